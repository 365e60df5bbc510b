//! What the keeper does of what the policy asks for, in one round: it drops copies,
//! evicts, settles, repacks, demotes and compacts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use strata_policy::budget::Actions;
use strata_policy::order::passes_unpacked;
use strata_sys::thread_time;
use strata_units::PageId;

use super::contents::contents;
use super::{Keeper, PAGES_PER_ROUND, RoundOutcome, SLACK_PART};
use crate::map::counters::Counter;
use crate::map::lock;
use crate::map::registry::TenantRecord;
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// Pages settled or repacked between two looks.
const STORE_PAGES_PER_ROUND: usize = 512;
/// Pages moved to the file tier between two looks: more than are evicted, or pages
/// that do not compress take all of the budget on their way.
const DEMOTED_PAGES_PER_ROUND: usize = 2 * PAGES_PER_ROUND;
/// Pages packed densely in a round while the tenant evicts...
const REPACK_BESIDE_EVICTION: usize = 4;
/// ...which it does until so long after the last eviction.
const REPACK_AFTER: Duration = Duration::from_millis(100);
/// Moved to the file tier, at least, in a round over the budget.
const DEMOTE_WHEN_OVER_BYTES: u64 = 256 << 10;
/// Store memory given back a round by moving objects together.
const COMPACT_BYTES_PER_ROUND: u64 = 1 << 20;

impl Keeper<'_> {
    /// Does some of what the policy asks for.
    pub(super) fn act(
        &mut self,
        actions: &Actions,
        spaces: &[Arc<Space>],
        spare: bool,
    ) -> RoundOutcome {
        let tenant = self.tenant;
        let began = thread_time();
        let before = tenant.store.stats();
        tenant.account.keep_copies(actions.keep_copies);
        if actions.drop_kept_bytes > 0 {
            self.evictor.copies.drop_oldest(tenant, actions.drop_kept_bytes);
        }
        if tenant.store.wants_dictionary() {
            self.train_dictionary();
        }
        tenant.store.reap();
        // Below its budget a tenant's pages are packed when somebody has time for it.
        let over = tenant.headroom_pages() <= 0;
        let asked_for = over || actions.evict_pages > 0 || actions.hold_growth;
        let packs = asked_for || self.packing.is_due();
        let most = if packs { STORE_PAGES_PER_ROUND } else { 0 };
        let settle = (actions.settle_pages as usize).min(most);
        let mut freed_pages = settle_staged(tenant, settle, self.evictor.unpacked);
        let mut evicted_pages = 0;
        let aside_before = self.merged.pages();
        self.spread.count(tenant.account.arrivals());
        let evict = (actions.evict_pages as usize).min(PAGES_PER_ROUND);
        if evict > 0 {
            evicted_pages = self.evict_evenly(evict, spaces);
            freed_pages += evicted_pages;
        }
        let set_aside_pages = self.merged.pages().saturating_sub(aside_before);
        // Dense packing costs more than an eviction and makes the next fault
        // slower: a little of it while pages come and go, unless nothing else
        // brings the tenant under its budget.
        if evicted_pages > 0 {
            self.evicted_last = Instant::now();
        }
        let idle = self.evicted_last.elapsed() >= REPACK_AFTER;
        // Where what is stored takes most of the budget, there is no other way.
        let stored = before.dram_bytes.saturating_sub(before.staged_bytes);
        let crowded = stored > tenant.budget_bytes() / 2;
        let most = if over || idle || crowded { most / 2 } else { REPACK_BESIDE_EVICTION };
        let repack = (actions.repack_pages as usize).min(most);
        tenant.store.repack(repack);
        if settle + repack > 0 && !asked_for {
            self.packing.worked(began, spare);
        }
        // What dense packing was guessed to bring may not come.
        let least = if over && tenant.record.tier.is_some() { DEMOTE_WHEN_OVER_BYTES } else { 0 };
        let demote_bytes = actions.demote_bytes.max(least);
        if demote_bytes > 0 {
            let pages = (demote_bytes / 1024) as usize + 1;
            let demoted = tenant.store.demote(pages.min(DEMOTED_PAGES_PER_ROUND));
            tenant.counters.add(Counter::Demotions, demoted as u64);
            freed_pages += demoted;
        }
        // Slots that pages left behind become memory again.
        let after = tenant.store.stats();
        let cost = after.dram_bytes.saturating_sub(after.staged_bytes);
        let payload = after.payload_bytes.saturating_sub(after.staged_bytes);
        let is_slack = cost > payload + payload / SLACK_PART + COMPACT_BYTES_PER_ROUND;
        if is_slack || tenant.store.wants_cleaning() {
            tenant.store.compact(COMPACT_BYTES_PER_ROUND);
        }
        let shrank_bytes = before.dram_bytes.saturating_sub(tenant.store.stats().dram_bytes);
        RoundOutcome {
            evicted_pages,
            set_aside_pages,
            shrank_bytes,
            more: freed_pages + set_aside_pages > 0 || (shrank_bytes > 0 && repack > 0),
        }
    }

    /// Has a dictionary trained, if one pays.
    pub(super) fn train_dictionary(&self) {
        self.train(|tenant| {
            let outcome = tenant.store.train_dictionary();
            tenant.inform(&outcome);
        });
    }

    /// Has the advisor know what such pages will take in the store.
    pub(super) fn foretell_packing(&self, pages: Vec<PageId>) {
        self.train(move |tenant| {
            let found = tenant.store.foretell(contents(tenant, &pages));
            *lock(&tenant.advisor.sample) = Some(found);
        });
    }

    /// Does `work` in a thread of its own: it takes a tenth of a second, and the
    /// budget does not wait that long. Nothing is done while another one's is under way, this
    /// tenant's or another's: it takes 20 MB that no budget counts.
    fn train(&self, work: impl FnOnce(&Tenant) + Send + 'static) {
        let Some(alone) = Alone::begin() else { return };
        let tenant = Arc::clone(self.tenant);
        // Without it pages are packed as they were; it is tried again.
        let _ =
            std::thread::Builder::new().name(format!("trainer-{}", tenant.id)).spawn(move || {
                strata_sys::set_thread_name(&format!("trainer-{}", tenant.id));
                strata_sys::yield_to_others();
                work(&tenant);
                strata_sys::trim_heap();
                drop(alone);
            });
    }
}

/// Packs pages that are staged, the oldest first, or has them go on to the file as they
/// are; how many are not staged any more.
fn settle_staged(tenant: &Tenant, pages: usize, unpacked: bool) -> usize {
    let moved = if unpacked { tenant.store.demote_staged(pages) } else { 0 };
    tenant.counters.add(Counter::Demotions, moved as u64);
    moved + tenant.store.settle(pages - moved)
}

/// Whether staged pages are to go on to the file as they are.
pub(super) fn pages_pass_unpacked(tenant: &Tenant) -> bool {
    let TenantRecord { tier, tier_order, .. } = &tenant.record;
    let Some((_, size_bytes)) = tier else { return false };
    tier_order.is_file_first()
        && !tenant.store.has_slow_tier()
        && passes_unpacked(*size_bytes, tenant.store.stats().file_bytes)
}

static TRAINS: AtomicBool = AtomicBool::new(false);

/// No other tenant trains.
struct Alone;

impl Alone {
    fn begin() -> Option<Self> {
        (!TRAINS.swap(true, Ordering::Acquire)).then_some(Self)
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        TRAINS.store(false, Ordering::Release);
    }
}

/// Whether no tenant trains.
pub(super) fn may_train() -> bool {
    !TRAINS.load(Ordering::Relaxed)
}
