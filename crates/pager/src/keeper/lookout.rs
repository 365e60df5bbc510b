//! The lookout: one thread that looks after all tenants at rest. To be woken costs more
//! than to look whether one of them has changed; so they are looked at together, and
//! only the keepers of those that have are woken.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::rest::State;
use crate::space::lock;
use crate::tenant::Tenant;

/// Whoever is due so soon is looked at with the others.
const TOGETHER: Duration = Duration::from_micros(500);

static RESTING: Mutex<BTreeMap<usize, Resting>> = Mutex::new(BTreeMap::new());
static CAME: Condvar = Condvar::new();
/// Whether there is such a thread; the first to rest starts it.
static THERE: OnceLock<bool> = OnceLock::new();

struct Resting {
    tenant: Arc<Tenant>,
    state: State,
    every: Duration,
    due: Instant,
    looks: u32,
    changed: bool,
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
    let due = Instant::now() + every;
    let tenant = Arc::clone(tenant);
    let resting = Resting { state, every, due, looks: 0, changed: false, tenant };
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

fn look_out() {
    strata_sys::set_thread_name("lookout");
    let mut all = lock(&RESTING);
    loop {
        let now = Instant::now();
        for resting in all.values_mut().filter(|one| !one.changed && one.due <= now + TOGETHER) {
            resting.looks += 1;
            resting.due = now + resting.every;
            if !resting.state.is_unchanged(&resting.tenant) {
                resting.changed = true;
                resting.tenant.wake_keeper();
            }
        }
        let due = all.values().filter(|one| !one.changed).map(|one| one.due).min();
        all = match due {
            Some(due) => {
                let patience = due.saturating_duration_since(Instant::now());
                CAME.wait_timeout(all, patience).unwrap_or_else(PoisonError::into_inner).0
            }
            None => CAME.wait(all).unwrap_or_else(PoisonError::into_inner),
        };
    }
}
