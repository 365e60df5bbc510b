//! `release`: every page goes back, the program runs on natively.
//!
//! Nothing is unregistered before nothing is stored: a missing page of an
//! unregistered range reads as zero.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use strata_sys::available_bytes;
use strata_units::PAGE_SIZE;

use crate::evict::Evictor;
use crate::map::address::{EVERYTHING, ids_in};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::orders::{Order, ReleaseProgress};
use crate::tenant::space::Space;
use crate::tenant::{ReleaseRefused, Tenant};

/// DRAM that stays free for the rest of the machine.
const MARGIN_BYTES: u64 = 64 << 20;
/// How often progress is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Pages asked for at a time.
const PAGES_AT_A_TIME: usize = 2048;

impl Tenant {
    /// Gives every page back and stops managing; the program runs on natively.
    /// Waits as long as pages come back, and gives up when none did for `patience`.
    pub fn release(self: &Arc<Self>, patience: Duration) -> Result<(), ReleaseRefused> {
        // One without a process has none yet.
        self.start_keeper();
        ask(self, patience)
    }
}

/// Has the keeper release `tenant`. It gives up when no page came back for
/// `patience`; whoever asks gives up on a keeper that shows no progress for half as
/// long again, so that it can find out for itself.
pub(crate) fn ask(tenant: &Tenant, patience: Duration) -> Result<(), ReleaseRefused> {
    let (sender, receiver) = mpsc::channel();
    let progress = Arc::new(ReleaseProgress::new(patience));
    tenant.order(Order::Release(sender, Arc::clone(&progress)));
    let mut seen = 0;
    loop {
        match receiver.recv_timeout(patience + patience / 2) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Disconnected) => return Err(ReleaseRefused::Ended),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let steps = progress.steps.load(Ordering::Relaxed);
        if steps == seen {
            progress.given_up.store(true, Ordering::Release);
            tenant.registry.released(tenant.id).store(0, Ordering::Release);
            if !tenant.space_list().is_empty() {
                return Err(ReleaseRefused::Unanswered);
            }
            // It was carried out just now.
            tenant.registry.released(tenant.id).store(1, Ordering::Release);
            return Ok(());
        }
        seen = steps;
    }
}

/// Carries it out on the keeper's thread.
pub(crate) fn release(
    tenant: &Arc<Tenant>,
    evictor: &mut Evictor,
    progress: &ReleaseProgress,
) -> Result<(), ReleaseRefused> {
    progress.check()?;
    let stored_pages = tenant.away_pages();
    let needed_bytes = stored_pages * PAGE_SIZE as u64;
    let available = available_bytes().unwrap_or(0);
    if needed_bytes + MARGIN_BYTES > available && needed_bytes > 0 {
        return Err(ReleaseRefused::NoRoom { needed_bytes, available_bytes: available });
    }
    // From here on nothing is evicted, and faults are served beyond the budget.
    tenant.registry.released(tenant.id).store(1, Ordering::Release);
    tenant.account.set_may_exceed(true);
    loop {
        let spaces = tenant.space_list();
        if spaces.is_empty() {
            // Whoever gave up just now has taken it back.
            tenant.registry.released(tenant.id).store(1, Ordering::Release);
            tenant.note("exhausted", None);
            return Ok(());
        }
        for space in spaces {
            let returned = bring_back(&space, tenant, evictor, progress);
            if let Err(refused) = returned {
                tenant.registry.released(tenant.id).store(0, Ordering::Release);
                return Err(refused);
            }
            let_go(&space, tenant);
            progress.step();
        }
    }
}

fn stored_addresses(space: &Space, tenant: &Tenant, most: usize) -> (Vec<u64>, u64) {
    let gate = lock(&space.gate);
    let mut addresses = Vec::new();
    let mut left = 0;
    for (_, leaf, part) in gate.object.pages_in(EVERYTHING) {
        for (address, page) in ids_in(leaf, part) {
            let away = matches!(
                tenant.map.get(page),
                Entry::Stored(_) | Entry::Arriving(_) | Entry::Leaving { .. }
            );
            left += u64::from(away);
            if away && addresses.len() < most {
                addresses.push(address);
            }
        }
    }
    (addresses, left)
}

/// Brings every page of a space back in place.
fn bring_back(
    space: &Arc<Space>,
    tenant: &Arc<Tenant>,
    evictor: &mut Evictor,
    progress: &ReleaseProgress,
) -> Result<(), ReleaseRefused> {
    let mut least = u64::MAX;
    let mut since = Instant::now();
    loop {
        if space.has_strays.load(Ordering::Acquire) {
            evictor.fetch_strays(space, tenant);
        }
        let (addresses, left) = stored_addresses(space, tenant, PAGES_AT_A_TIME);
        progress.check()?;
        if left == 0 || space.is_gone() || !space.uffd.is_alive() {
            return Ok(());
        }
        if left < least {
            least = left;
            since = Instant::now();
            progress.step();
        } else if since.elapsed() > progress.patience {
            return Err(ReleaseRefused::Stuck { pages: left });
        }
        crate::fault::handler::start(space, tenant);
        space.hand_over(addresses);
        let asked = Instant::now();
        while asked.elapsed() < LOOK_EVERY * 20 {
            let (_, now_left) = stored_addresses(space, tenant, 0);
            if now_left + (PAGES_AT_A_TIME as u64) <= left || now_left == 0 {
                break;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Ends the management of a space in which every page is in place.
fn let_go(space: &Arc<Space>, tenant: &Arc<Tenant>) {
    if let Some(agent) = space.agent() {
        let maps = agent.process.maps().unwrap_or_default();
        // The gate keeps the handler from taking an event in between.
        let gate = lock(&space.gate);
        for mapping in maps.iter().filter(|mapping| mapping.private && mapping.anonymous) {
            space.uffd.unregister(mapping.range);
        }
        for &range in &gate.registered {
            space.uffd.unregister(range);
        }
        drop(gate);
        if agent.is_idle() {
            agent.dismiss();
        }
        lock(&tenant.released_agents).push(agent);
    }
    tenant.bury(space);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    /// Longer than anything here takes.
    const PATIENCE: Duration = Duration::from_secs(45);

    #[test]
    fn a_keeper_that_is_held_up_is_not_waited_for_for_ever() {
        let Some(uffd) = testing::userfaultfd() else { return };
        let tenant = testing::tenant();
        let space = testing::space(&tenant, uffd);
        tenant.adopt_space(Arc::clone(&space));
        let gate = lock(&space.gate);
        tenant.start_keeper();
        let patience = Duration::from_millis(50);
        assert_eq!(ask(&tenant, patience), Err(ReleaseRefused::Unanswered));
        assert!(!tenant.is_released());
        drop(gate);
        assert_eq!(ask(&tenant, PATIENCE), Ok(()));
        assert!(tenant.is_released());
        tenant.end();
        // Nobody carries anything out any more.
        assert_eq!(ask(&tenant, PATIENCE), Err(ReleaseRefused::Ended));
    }

    #[test]
    fn a_keeper_that_ends_answers_those_who_came_after() {
        let tenant = testing::tenant();
        tenant.start_keeper();
        std::thread::scope(|scope| {
            let asking = [0; 4].map(|_| {
                scope.spawn(|| {
                    let began = Instant::now();
                    while ask(&tenant, PATIENCE) == Ok(()) {}
                    assert!(began.elapsed() < PATIENCE, "nobody answered");
                })
            });
            tenant.end();
            for one in asking {
                one.join().expect("an answer");
            }
        });
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_not_carried_out() {
        let Some(uffd) = testing::userfaultfd() else { return };
        let tenant = testing::tenant();
        let space = testing::space(&tenant, uffd);
        tenant.adopt_space(Arc::clone(&space));
        let progress = ReleaseProgress::new(PATIENCE);
        progress.given_up.store(true, Ordering::Relaxed);
        let refused = release(&tenant, &mut Evictor::new(), &progress);
        assert_eq!(refused, Err(ReleaseRefused::Unanswered));
        assert!(!tenant.is_released());
        assert_eq!(tenant.space_list().len(), 1, "its space is managed on");
        tenant.bury(&space);
    }
}
