//! `release`: every page goes back, the program runs on natively.
//!
//! Nothing is unregistered before nothing is stored: a missing page of an
//! unregistered range reads as zero.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_sys::{Range, available_bytes, read_maps};
use strata_units::PAGE_SIZE;

use crate::entry::Entry;
use crate::evict::Evictor;
use crate::space::{Space, ids_in, lock};
use crate::tenant::{ReleaseRefused, Tenant};

/// DRAM that stays free for the rest of the machine.
const MARGIN_BYTES: u64 = 64 << 20;
/// Without any page coming back for so long, it is given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often progress is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Pages asked for at a time.
const PAGES_AT_A_TIME: usize = 2048;

const EVERYTHING: Range = Range { start: 0, end: 1 << 52 };

/// Carries it out on the keeper's thread.
pub(crate) fn release(tenant: &Arc<Tenant>, evictor: &mut Evictor) -> Result<(), ReleaseRefused> {
    let stored_pages = tenant.store.stats().stored_pages.saturating_sub(tenant.kept_pages());
    let needed_bytes = stored_pages * PAGE_SIZE as u64;
    let available = available_bytes().unwrap_or(0);
    if needed_bytes + MARGIN_BYTES > available && needed_bytes > 0 {
        return Err(ReleaseRefused::NoRoom { needed_bytes, available_bytes: available });
    }
    // From here on nothing is evicted, and faults are served beyond the budget.
    tenant.registry.released(tenant.id).store(1, Ordering::Release);
    tenant.may_exceed.store(true, Ordering::Relaxed);
    loop {
        let spaces = tenant.space_list();
        if spaces.is_empty() {
            tenant.note("exhausted", None);
            return Ok(());
        }
        for space in spaces {
            let returned = bring_back(&space, tenant, evictor);
            if let Err(refused) = returned {
                tenant.registry.released(tenant.id).store(0, Ordering::Release);
                return Err(refused);
            }
            let_go(&space, tenant);
        }
    }
}

fn stored_addresses(space: &Space, tenant: &Tenant, most: usize) -> (Vec<u64>, u64) {
    let gate = lock(&space.gate);
    let mut addresses = Vec::new();
    let mut left = 0;
    for (_, leaf, part) in gate.pages_in(EVERYTHING) {
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
) -> Result<(), ReleaseRefused> {
    let mut least = u64::MAX;
    let mut since = Instant::now();
    loop {
        if space.has_strays.load(Ordering::Acquire) {
            evictor.fetch_strays(space, tenant);
        }
        let (addresses, left) = stored_addresses(space, tenant, PAGES_AT_A_TIME);
        if left == 0 || space.is_gone() || !space.uffd.is_alive() {
            return Ok(());
        }
        if left < least {
            least = left;
            since = Instant::now();
        } else if since.elapsed() > PATIENCE {
            return Err(ReleaseRefused::Stuck { pages: left });
        }
        crate::handler::start(space, tenant);
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
        let maps = read_maps(agent.pid).unwrap_or_default();
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
