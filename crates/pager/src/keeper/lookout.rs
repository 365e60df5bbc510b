//! The lookout: one thread that looks after all tenants at rest. To be woken costs more
//! than to look whether one of them has changed; so they are looked at together, and
//! only the keepers of those that have are woken.
//!
//! Tenants of which nothing is registered, and that have cgroups of their own below one
//! of the daemon's, are read for all at once: as long as that one is charged the same,
//! none of them has grown, unless another one has given back as much. So each is still
//! looked at itself, only less often.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::rest::{State, usage_file};
use crate::space::lock;
use crate::tenant::Tenant;

/// Whoever is due so soon is looked at with the others.
const TOGETHER: Duration = Duration::from_micros(500);

/// Who is read for together with others is looked at itself this often at least.
const OWN_LOOK: Duration = Duration::from_millis(250);

static RESTING: Mutex<BTreeMap<usize, Resting>> = Mutex::new(BTreeMap::new());
static CAME: Condvar = Condvar::new();
/// Whether there is such a thread; the first to rest starts it.
static THERE: OnceLock<bool> = OnceLock::new();

struct Resting {
    tenant: Arc<Tenant>,
    state: State,
    every: Duration,
    due: Instant,
    looked: Instant,
    /// The cgroup by which it is read for together with others.
    group: Option<PathBuf>,
    looks: u32,
    changed: bool,
}

/// A cgroup with those of several tenants below it.
struct Group {
    /// Where it is read. Opened each time: it goes with the last tenant.
    usage: String,
    said: Vec<u8>,
    /// The shortest of theirs.
    every: Duration,
    due: Instant,
}

/// What became of a tenant while it rested.
pub(super) struct Went {
    pub(super) state: State,
    /// So often it was looked at.
    pub(super) looks: u32,
    pub(super) changed: bool,
}

/// Takes `state`, and wakes the keeper when its tenant is not like that any more, found
/// out `every` so often. Who was taken must [`leave`]; false: nobody would look.
pub(super) fn enter(tenant: &Arc<Tenant>, state: &mut Option<State>, every: Duration) -> bool {
    let start = || {
        let thread = std::thread::Builder::new().name("lookout".into());
        thread.spawn(look_out).is_ok()
    };
    if !*THERE.get_or_init(start) {
        return false;
    }
    let Some(state) = state.take() else { return false };
    let now = Instant::now();
    let due = now + every;
    let group = group_of(tenant);
    let tenant = Arc::clone(tenant);
    let resting =
        Resting { state, every, due, looked: now, group, looks: 0, changed: false, tenant };
    let mut all = lock(&RESTING);
    // It sleeps until somebody is due, and this one may be due before.
    let is_first = all.values().filter(|other| !other.changed).all(|other| due < other.due);
    all.insert(key(&resting.tenant), resting);
    if is_first {
        CAME.notify_one();
    }
    true
}

/// The keeper looks itself again.
pub(super) fn leave(tenant: &Arc<Tenant>) -> Option<Went> {
    let Resting { state, looks, changed, .. } = lock(&RESTING).remove(&key(tenant))?;
    Some(Went { state, looks, changed })
}

/// Numbers of tenants are a registry's own; as long as one rests, its address is its own.
fn key(tenant: &Arc<Tenant>) -> usize {
    Arc::as_ptr(tenant).addr()
}

/// Where it can be read for this tenant and others at once.
fn group_of(tenant: &Tenant) -> Option<PathBuf> {
    if tenant.under_pressure.load(Ordering::Relaxed) {
        return None;
    }
    Path::new(tenant.record.cgroup.as_ref()?).parent().map(Path::to_owned)
}

/// Reads for all of a group at once, where it is time to: has those looked at whose group
/// is charged another sum than before.
fn read_for_groups(
    groups: &mut BTreeMap<PathBuf, Group>,
    all: &mut BTreeMap<usize, Resting>,
    now: Instant,
) {
    for group in groups.values_mut() {
        group.every = OWN_LOOK;
    }
    let mut members = 0;
    for resting in all.values().filter(|one| !one.changed) {
        let Some(path) = &resting.group else { continue };
        members += 1;
        if !groups.contains_key(path)
            && let Some(usage) = usage_file(path)
        {
            let group = Group { usage, said: Vec::new(), every: OWN_LOOK, due: now };
            groups.insert(path.clone(), group);
        }
        if let Some(group) = groups.get_mut(path) {
            group.every = group.every.min(resting.every);
        }
    }
    if members == 0 {
        groups.clear();
        return;
    }
    for (path, group) in groups {
        group.due = group.due.min(now + group.every);
        if group.due > now + TOGETHER {
            continue;
        }
        group.due = now + group.every;
        // What says nothing may have changed.
        let now_said = std::fs::read(&group.usage).unwrap_or_default();
        if now_said.is_empty() || now_said != group.said {
            group.said = now_said;
            for resting in all.values_mut().filter(|one| one.group.as_ref() == Some(path)) {
                resting.due = resting.due.min(resting.looked + resting.every);
            }
        }
    }
}

fn look_out() {
    strata_sys::set_thread_name("lookout");
    let mut groups: BTreeMap<PathBuf, Group> = BTreeMap::new();
    let mut all = lock(&RESTING);
    loop {
        let now = Instant::now();
        read_for_groups(&mut groups, &mut all, now);
        for resting in all.values_mut().filter(|one| !one.changed && one.due <= now + TOGETHER) {
            resting.looks += 1;
            resting.looked = now;
            let is_read_for = resting.group.as_ref().is_some_and(|path| groups.contains_key(path));
            let after = if is_read_for { OWN_LOOK.max(resting.every) } else { resting.every };
            resting.due = now + after;
            if !resting.state.is_unchanged(&resting.tenant) {
                resting.changed = true;
                resting.tenant.wake_keeper();
            }
        }
        let own = all.values().filter(|one| !one.changed).map(|one| one.due);
        let due = own.chain(groups.values().map(|group| group.due)).min();
        all = match due {
            Some(due) => {
                let patience = due.saturating_duration_since(Instant::now());
                CAME.wait_timeout(all, patience).unwrap_or_else(PoisonError::into_inner).0
            }
            None => CAME.wait(all).unwrap_or_else(PoisonError::into_inner),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// One that rests in a group, as far as the group is concerned.
    fn resting(group: &Path, looked: Instant, every: Duration) -> Option<Resting> {
        let tenant = testing::tenant();
        let state = State::of_file("/proc/self/statm")?;
        let group = Some(group.to_owned());
        let due = looked + Duration::from_secs(60);
        Some(Resting { tenant, state, every, due, looked, group, looks: 0, changed: false })
    }

    #[test]
    fn all_of_a_group_are_looked_at_when_it_is_charged_another_sum() {
        let group = std::env::temp_dir().join(format!("strata-group-{}", std::process::id()));
        std::fs::create_dir(&group).expect("a directory");
        let usage = group.join("memory.current");
        std::fs::write(&usage, "4096\n").expect("a file");
        let now = Instant::now();
        let every = Duration::from_millis(4);
        let Some(one) = resting(&group, now, every) else { return };
        let far = one.due;
        let mut all = BTreeMap::from([(1, one)]);
        let mut groups = BTreeMap::new();
        let mut due_after = |all: &mut BTreeMap<usize, Resting>, ms| {
            all.get_mut(&1).expect("it rests").due = far;
            read_for_groups(&mut groups, all, now + Duration::from_millis(ms));
            all[&1].due
        };
        // What was charged before is not known; then it stays, changes, and is gone.
        assert_eq!(due_after(&mut all, 0), now + every);
        assert_eq!(due_after(&mut all, 10), far);
        std::fs::write(&usage, "8192\n").expect("a file");
        // Not before it is time to read.
        assert_eq!(due_after(&mut all, 11), far);
        assert_eq!(due_after(&mut all, 20), now + every);
        assert_eq!(due_after(&mut all, 30), far);
        std::fs::remove_dir_all(&group).expect("removed");
        assert_eq!(due_after(&mut all, 40), now + every);
        all.clear();
        read_for_groups(&mut groups, &mut all, now);
        assert!(groups.is_empty());
    }
}
