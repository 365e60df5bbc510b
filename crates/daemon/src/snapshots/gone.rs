//! Waiting for processes that end: until they are gone, and their tenant knows it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_pager::Tenant;
use strata_snapshot::is_ending;
use strata_sys::{Pidfd, collect_child};

/// How long killed processes may take to be gone.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Waits until processes that were killed are gone, and the tenant knows it. `meanwhile`
/// is done when they are.
pub(super) fn wait_gone(
    tenant: &Arc<Tenant>,
    processes: &[Pidfd],
    meanwhile: impl FnOnce(),
) -> Result<(), &'static str> {
    let deadline = Instant::now() + KILL_PATIENCE;
    // Not only dead: one that is not collected holds its number.
    let there = |process: &Pidfd| process.signal(0);
    let wait_while = |is_so: &dyn Fn() -> bool| {
        while is_so() {
            processes.iter().for_each(Pidfd::collect);
            if Instant::now() > deadline {
                return Err("its processes were killed and are not gone yet");
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    };
    wait_while(&|| processes.iter().any(there))?;
    // Their memory is taken down beside what follows.
    meanwhile();
    tenant.look_for_ended();
    wait_while(&|| tenant.attachment().1)
}

/// The same after a try that failed: what it had brought was killed.
pub(super) fn wait_gone_again(tenant: &Arc<Tenant>) -> Result<(), &'static str> {
    // A number may be somebody else's already.
    let ending = tenant.pids().into_iter().filter(|&pid| is_ending(pid));
    let processes: Vec<_> = ending.filter_map(|pid| Pidfd::open(pid).ok()).collect();
    wait_gone(tenant, &processes, || ())
}

/// Waits for a tenant whose processes were all killed and are not gone yet, or not
/// known to be. `false`: it lives.
pub(super) fn ends(tenant: &Tenant) -> bool {
    let deadline = Instant::now() + KILL_PATIENCE;
    while tenant.attachment().1 {
        let pids = tenant.pids();
        if pids.is_empty() {
            return !tenant.attachment().1;
        }
        if !pids.iter().all(|&pid| is_ending(pid)) || Instant::now() > deadline {
            return false;
        }
        pids.into_iter().for_each(collect_child);
        tenant.look_for_ended();
        std::thread::sleep(LOOK_EVERY);
    }
    true
}
