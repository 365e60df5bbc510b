//! The idle watcher: one thread that looks after all tenants at rest. To be woken costs more
//! than to look whether one of them has changed; so they are looked at together, and
//! only the keepers of those that have are woken.
//!
//! Tenants of which nothing is registered, and that have cgroups of their own below one
//! of the daemon's, are read for all at once: as long as that one is charged the same,
//! none of them has grown, unless another one has given back as much. So each is still
//! looked at itself, only less often.
//!
//! Those that have alarms ([`alarm`](super::alarm)) are asked for nothing but whether their
//! processes have run, a few times a second, and now and then the rest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use strata_sys::{WorkClock, thread_time};

use super::LOOK_PART;
use super::alarm::Alarm;
use super::idle::{Cause, State, usage_file};
use crate::map::lock;
use crate::tenant::Tenant;

/// Whoever is due so soon is looked at with the others.
const TOGETHER: Duration = Duration::from_micros(500);

/// Who is read for together with others is looked at itself this often at least.
const OWN_LOOK: Duration = Duration::from_millis(250);

/// How often it is counted anew who is in which group.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// How often it is looked whether the processes of a tenant with an alarm have run: as
/// often as guards are looked for ([`guards`](super::guards))...
const STILL_LOOK: Duration = Duration::from_millis(250);
/// ...and one time in so many of one that has nothing registered, and so nothing that a
/// guard could be on. That one has ended is seen by this, too.
const UNREGISTERED_IN: u32 = 4;
/// One time in so many they are looked at in whole.
const WHOLE_IN: u32 = 32;

/// Its looks take no more of a processor than a keeper's ([`LOOK_PART`]), where that makes none
/// later than this: a look is dear where the processor is emulated.
const LATER_AT_MOST: Duration = Duration::from_millis(8);

static RESTING: Mutex<All> = Mutex::new(All::new());
static CAME: Condvar = Condvar::new();
/// Whether there is such a thread; the first to rest starts it.
static THERE: OnceLock<bool> = OnceLock::new();

/// Who rests, and the groups that some of them are in.
struct All {
    resting: BTreeMap<usize, Resting>,
    groups: BTreeMap<PathBuf, Group>,
    still: Still,
}

/// Those with alarms. They are looked at all together, so that the idle watcher sleeps in
/// between.
struct Still {
    resting: BTreeMap<usize, Resting>,
    /// All that is looked at most of the time: to go through all tenants would take longer
    /// than to read the clocks.
    clocks: Vec<Watched>,
    /// Somebody has come or gone since these were put together.
    has_changed: bool,
    looks: u32,
    due: Option<Instant>,
}

/// A clock of a tenant that stands still, and what it showed.
struct Watched {
    clock: WorkClock,
    before: Duration,
    key: usize,
    is_registered: bool,
}

struct Resting {
    tenant: Arc<Tenant>,
    state: State,
    every: Duration,
    due: Instant,
    looked: Instant,
    /// The cgroup by which it is read for together with others.
    group: Option<PathBuf>,
    /// One that was set while it rested, or before.
    alarm: Option<Alarm>,
    looks: u32,
    /// Its keeper was woken.
    cause: Option<Cause>,
}

/// A cgroup with those of several tenants below it.
struct Group {
    /// Where it is read. Opened each time: it goes with the last tenant.
    usage: String,
    said: Vec<u8>,
    /// The shortest of theirs.
    every: Duration,
    due: Instant,
    /// When all of them are looked at themselves.
    own_look: Instant,
}

/// How a tenant rests.
pub(super) struct IdleLook {
    /// So often it is looked at...
    pub(super) every: Duration,
    /// ...by itself and not with others.
    pub(super) alone: bool,
    /// With one that was set before its state was noted less is looked at.
    pub(super) alarm: Option<Alarm>,
}

/// What became of a tenant while it rested.
pub(super) struct Went {
    pub(super) state: State,
    /// So often it was looked at.
    pub(super) looks: u32,
    /// Why its keeper was woken.
    pub(super) cause: Option<Cause>,
    pub(super) alarm: Option<Alarm>,
}

/// Takes `state`, and wakes the keeper when its tenant is not like that any more. Who was
/// taken must [`leave`]; false: nobody would look.
pub(super) fn enter(tenant: &Arc<Tenant>, state: &mut Option<State>, rest: IdleLook) -> bool {
    let start = || {
        let thread = std::thread::Builder::new().name("idle-watch".into());
        thread.spawn(look_out).is_ok()
    };
    if !*THERE.get_or_init(start) {
        return false;
    }
    let Some(state) = state.take() else { return false };
    let IdleLook { every, alone, alarm } = rest;
    let now = Instant::now();
    let mut all = lock(&RESTING);
    // One that has gone off by now tells nobody.
    let alarm = alarm.filter(|alarm| !alarm.has_rung());
    let is_still = alarm.is_some() && state.knows_work();
    let group = if alone || is_still { None } else { group_of(tenant) };
    let tenant = Arc::clone(tenant);
    let due = now + every;
    let looked = now;
    let mut resting =
        Resting { state, every, due, looked, group, alarm, looks: 0, cause: None, tenant };
    let before = all.next_due();
    if is_still {
        all.still.enter(resting, now);
    } else {
        all.join_group(&mut resting, now);
        all.resting.insert(key(&resting.tenant), resting);
    }
    // It sleeps until somebody is due, and this one, or its group, may be due before.
    let next = all.next_due();
    if next.is_some_and(|next| before.is_none_or(|before| next < before)) {
        CAME.notify_one();
    }
    true
}

/// The keeper looks itself again.
pub(super) fn leave(tenant: &Arc<Tenant>) -> Option<Went> {
    let mut all = lock(&RESTING);
    let key = key(tenant);
    let rested = all.resting.remove(&key).or_else(|| all.still.leave(key));
    if tenant.stands_still.swap(false, Ordering::Relaxed) {
        tenant.stood_up.fetch_add(1, Ordering::Relaxed);
    }
    let Resting { state, looks, cause, alarm, .. } = rested?;
    Some(Went { state, looks, cause, alarm })
}

/// An alarm was set for a tenant: if it does not rest any more, it asks again.
pub(super) fn give_alarm(tenant: &Arc<Tenant>, alarm: Alarm) {
    if let Some(resting) = lock(&RESTING).resting.get_mut(&key(tenant))
        && !alarm.has_rung()
    {
        resting.alarm = Some(alarm);
    }
}

/// An alarm has gone off.
pub(super) fn alarmed(key: usize) {
    let mut all = lock(&RESTING);
    let All { resting, still, .. } = &mut *all;
    if let Some(one) = still.resting.get_mut(&key).or_else(|| resting.get_mut(&key)) {
        one.alarm = None;
        one.wake(Cause::Changed);
    }
}

/// Numbers of tenants are a registry's own; as long as one rests, its address is its own.
pub(super) fn key(tenant: &Arc<Tenant>) -> usize {
    Arc::as_ptr(tenant).addr()
}

/// Where it can be read for this tenant and others at once.
fn group_of(tenant: &Tenant) -> Option<PathBuf> {
    if tenant.under_pressure.load(Ordering::Relaxed) {
        return None;
    }
    Path::new(tenant.record.cgroup.as_ref()?).parent().map(Path::to_owned)
}

impl Resting {
    fn wake(&mut self, cause: Cause) {
        if self.cause.is_none() {
            self.cause = Some(cause);
            self.tenant.wake_keeper();
        }
    }
}

impl All {
    const fn new() -> Self {
        Self { resting: BTreeMap::new(), groups: BTreeMap::new(), still: Still::new() }
    }

    /// Enters a tenant's group, if it is in one that can be read.
    fn join_group(&mut self, resting: &mut Resting, now: Instant) {
        let Some(path) = &resting.group else { return };
        if !self.groups.contains_key(path) {
            let Some(usage) = usage_file(path) else {
                resting.group = None;
                return;
            };
            let (every, own_look) = (resting.every, now + OWN_LOOK);
            let group = Group { usage, said: Vec::new(), every, due: now, own_look };
            self.groups.insert(path.clone(), group);
        }
        if let Some(group) = self.groups.get_mut(path) {
            group.every = group.every.min(resting.every);
            group.due = group.due.min(now + group.every);
        }
    }

    /// Forgets groups that nobody is in, and how often those wanted to be read for who
    /// have gone.
    fn count_groups(&mut self) {
        let mut every: BTreeMap<&Path, Duration> = BTreeMap::new();
        for resting in self.resting.values().filter(|one| one.cause.is_none()) {
            if let Some(path) = &resting.group {
                let least = every.entry(path).or_insert(resting.every);
                *least = resting.every.min(*least);
            }
        }
        self.groups.retain(|path, group| {
            let least = every.get(path.as_path());
            group.every = least.copied().unwrap_or(group.every);
            least.is_some()
        });
    }

    /// Reads for all of a group at once, where it is time to: has those looked at whose
    /// group is charged another sum than before.
    fn read_for_groups(&mut self, now: Instant) {
        for (path, group) in &mut self.groups {
            if group.due > now + TOGETHER {
                continue;
            }
            group.due = now + group.every;
            // What says nothing may have changed.
            let said = std::fs::read(&group.usage).unwrap_or_default();
            if said.is_empty() || said != group.said {
                group.said = said;
                let members = self.resting.values_mut();
                for resting in members.filter(|one| one.group.as_ref() == Some(path)) {
                    resting.due = resting.due.min(resting.looked + resting.every);
                }
            }
        }
    }

    /// Looks at those who are due themselves.
    fn look(&mut self, now: Instant) {
        for group in self.groups.values_mut().filter(|group| group.own_look <= now + TOGETHER) {
            group.own_look = now + OWN_LOOK;
        }
        let due = |one: &&mut Resting| one.cause.is_none() && one.due <= now + TOGETHER;
        for resting in self.resting.values_mut().filter(due) {
            resting.looks += 1;
            resting.looked = now;
            let group = resting.group.as_ref().and_then(|path| self.groups.get(path));
            // All of a group together, so that the idle watcher sleeps in between.
            let together = group.map(|group| group.own_look.max(now + resting.every));
            resting.due = together.unwrap_or(now + resting.every);
            if !resting.state.is_unchanged(&resting.tenant) {
                resting.wake(Cause::Changed);
            }
        }
    }

    fn next_due(&self) -> Option<Instant> {
        let own = self.resting.values().filter(|one| one.cause.is_none()).map(|one| one.due);
        own.chain(self.groups.values().map(|group| group.due)).chain(self.still.due).min()
    }
}

impl Still {
    const fn new() -> Self {
        let clocks = Vec::new();
        Self { resting: BTreeMap::new(), clocks, has_changed: false, looks: 0, due: None }
    }

    fn enter(&mut self, mut resting: Resting, now: Instant) {
        resting.tenant.stands_still.store(true, Ordering::SeqCst);
        // Who comes from now on wakes it; this one has come before.
        if resting.tenant.space_count() != resting.state.clocks().count() {
            resting.wake(Cause::Changed);
        }
        self.resting.insert(key(&resting.tenant), resting);
        self.has_changed = true;
        self.due.get_or_insert(now + STILL_LOOK);
    }

    fn leave(&mut self, key: usize) -> Option<Resting> {
        self.has_changed = true;
        self.resting.remove(&key)
    }

    /// Looks whether any of them has run, when it is time to.
    fn look(&mut self, now: Instant) {
        if self.due.is_none_or(|due| due > now + TOGETHER) {
            return;
        }
        self.due = if self.resting.is_empty() { None } else { Some(now + STILL_LOOK) };
        self.looks = self.looks.wrapping_add(1);
        if std::mem::take(&mut self.has_changed) {
            self.clocks.clear();
            for (&key, one) in &self.resting {
                let is_registered = one.tenant.under_pressure.load(Ordering::Relaxed);
                let watched = |(clock, before)| Watched { clock, before, key, is_registered };
                self.clocks.extend(one.state.clocks().map(watched));
            }
        }
        let all = self.looks.is_multiple_of(UNREGISTERED_IN);
        for one in self.clocks.iter().filter(|one| all || one.is_registered) {
            if one.clock.read() != Some(one.before)
                && let Some(resting) = self.resting.get_mut(&one.key)
            {
                resting.wake(Cause::Worked);
            }
        }
        if self.looks.is_multiple_of(WHOLE_IN) {
            for one in self.resting.values_mut().filter(|one| one.cause.is_none()) {
                if !one.state.is_unchanged(&one.tenant) {
                    one.wake(Cause::Changed);
                }
            }
        }
    }
}

fn look_out() {
    strata_sys::set_thread_name("idle-watch");
    let mut counted = Instant::now();
    let mut all = lock(&RESTING);
    loop {
        let (now, began) = (Instant::now(), thread_time());
        if now >= counted + COUNT_EVERY {
            all.count_groups();
            counted = now;
        }
        all.read_for_groups(now);
        all.look(now);
        all.still.look(now);
        let affords = ((thread_time() - began) * LOOK_PART).min(LATER_AT_MOST);
        all = match all.next_due() {
            Some(due) => {
                let patience = due.max(now + affords).saturating_duration_since(Instant::now());
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
        let (alarm, cause) = (None, None);
        Some(Resting { tenant, state, every, due, looked, group, alarm, looks: 0, cause })
    }

    #[test]
    fn all_of_a_group_are_looked_at_when_it_is_charged_another_sum() {
        let group = std::env::temp_dir().join(format!("strata-group-{}", std::process::id()));
        std::fs::create_dir(&group).expect("a directory");
        let usage = group.join("memory.current");
        std::fs::write(&usage, "4096\n").expect("a file");
        let now = Instant::now();
        let every = Duration::from_millis(4);
        let Some(mut one) = resting(&group, now, every) else { return };
        let far = one.due;
        let mut all = All::new();
        all.join_group(&mut one, now);
        all.resting.insert(1, one);
        let due_after = |all: &mut All, ms| {
            all.resting.get_mut(&1).expect("it rests").due = far;
            all.read_for_groups(now + Duration::from_millis(ms));
            all.resting[&1].due
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
        all.count_groups();
        assert_eq!(all.groups.len(), 1);
        all.resting.clear();
        all.count_groups();
        assert!(all.groups.is_empty());
        let mut other = resting(&group, now, every).expect("as before");
        all.join_group(&mut other, now);
        assert!(other.group.is_none() && all.groups.is_empty(), "it cannot be read");
    }
}
