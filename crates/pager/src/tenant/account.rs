//! What a tenant's pages cost it, in pages: kept up to date in constant time, in the
//! middle of faults. Its counters change by these methods alone, one for each way in
//! which a page comes, goes or changes its tier; `crate::tenant::transitions` calls them
//! together with the change of the page map.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use strata_policy::Census;

/// The policy's time moves on by so much with each arrival, until it is known better.
const FIRST_UNITS: u64 = 1;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Account {
    /// Managed pages in DRAM, those on their way out included.
    resident: AtomicI64,
    /// Of those: pages whose stored copies are kept.
    kept: AtomicI64,
    /// Managed pages on the node.
    on_node: AtomicI64,
    /// Pages that may still come in before the budget is full.
    headroom: AtomicI64,
    /// Pages that have come into DRAM since this worker began.
    arrivals: AtomicU64,
    /// By how much each moves the policy's time on ([`strata_policy::Clock`]).
    units_of_arrival: AtomicU64,
    /// More copies may be kept.
    keeps_copies: AtomicBool,
    /// Nothing can be evicted any more: faults are served beyond the budget.
    may_exceed: AtomicBool,
}

impl Default for Account {
    fn default() -> Self {
        Self {
            resident: AtomicI64::new(0),
            kept: AtomicI64::new(0),
            on_node: AtomicI64::new(0),
            headroom: AtomicI64::new(0),
            arrivals: AtomicU64::new(0),
            units_of_arrival: AtomicU64::new(FIRST_UNITS),
            keeps_copies: AtomicBool::new(false),
            may_exceed: AtomicBool::new(false),
        }
    }
}

impl Account {
    // ----- changes, one for each way of a page -----

    /// A page has come into DRAM. The headroom before it came.
    pub(super) fn came_in(&self) -> i64 {
        self.resident.fetch_add(1, Ordering::Relaxed);
        self.headroom.fetch_sub(1, Ordering::Relaxed)
    }

    /// So many pages have left DRAM.
    pub(super) fn went_out(&self, pages: i64) {
        self.resident.fetch_sub(pages, Ordering::Relaxed);
        self.headroom.fetch_add(pages, Ordering::Relaxed);
    }

    /// A page that another space is charged for leaves this one: as long as it is on its
    /// way it is charged here.
    pub(super) fn shared_page_leaves(&self) {
        self.resident.fetch_add(1, Ordering::Relaxed);
    }

    /// A page in DRAM is on the node now.
    pub(super) fn is_on_node(&self) {
        self.on_node.fetch_add(1, Ordering::Relaxed);
    }

    /// A page is on the node no more.
    pub(super) fn left_node(&self) {
        self.on_node.fetch_sub(1, Ordering::Relaxed);
    }

    /// The stored copy of a page that has come in is kept.
    pub(crate) fn copy_is_kept(&self) {
        self.kept.fetch_add(1, Ordering::Relaxed);
    }

    /// So many copies are kept no longer: dropped, or all that there is of the page.
    pub(crate) fn copies_went(&self, pages: i64) {
        self.kept.fetch_sub(pages, Ordering::Relaxed);
    }

    /// The worker itself has taken so much memory, until the keeper measures.
    pub(crate) fn copies_take(&self, pages: i64) {
        self.headroom.fetch_sub(pages, Ordering::Relaxed);
    }

    /// The sums are to be made anew from the page map.
    pub(crate) fn clear(&self) {
        self.resident.store(0, Ordering::Relaxed);
        self.kept.store(0, Ordering::Relaxed);
    }

    // ----- what the keeper has measured and decided -----

    /// So many pages may still come in.
    pub(crate) fn set_headroom(&self, pages: i64) {
        self.headroom.store(pages, Ordering::Relaxed);
    }

    /// Whether more copies are to be kept.
    pub(crate) fn keep_copies(&self, keep: bool) {
        self.keeps_copies.store(keep, Ordering::Relaxed);
    }

    /// Whether faults are served beyond the budget.
    pub(crate) fn set_may_exceed(&self, may: bool) {
        self.may_exceed.store(may, Ordering::Relaxed);
    }

    /// An arrival moves the policy's time on by so much from now on.
    pub(crate) fn set_units_of_arrival(&self, units: u64) {
        self.units_of_arrival.store(units, Ordering::Relaxed);
    }

    /// A page arrives; by how much the policy's time moves on.
    pub(super) fn count_arrival(&self) -> u64 {
        self.arrivals.fetch_add(1, Ordering::Relaxed);
        self.units_of_arrival.load(Ordering::Relaxed)
    }

    // ----- the sums -----

    pub(crate) fn resident_pages(&self) -> i64 {
        self.resident.load(Ordering::Relaxed)
    }

    pub(crate) fn kept_pages(&self) -> u64 {
        self.kept.load(Ordering::Relaxed).max(0) as u64
    }

    pub(crate) fn node_pages(&self) -> u64 {
        self.on_node.load(Ordering::Relaxed).max(0) as u64
    }

    pub(crate) fn headroom_pages(&self) -> i64 {
        self.headroom.load(Ordering::Relaxed)
    }

    pub(crate) fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Relaxed)
    }

    pub(super) fn keeps_copies(&self) -> bool {
        self.keeps_copies.load(Ordering::Relaxed)
    }

    pub(super) fn may_exceed(&self) -> bool {
        self.may_exceed.load(Ordering::Relaxed)
    }

    /// What the policy has to know of the sums; so many pages are in the store alone.
    pub(super) fn census(&self, away_pages: u64) -> Census {
        let resident = self.resident_pages().max(0) as usize;
        Census { managed: resident + (away_pages + self.node_pages()) as usize, resident }
    }
}
