//! What a tenant's pages cost it, kept up to date: constant time, in the middle
//! of faults.

use std::sync::atomic::Ordering;
use std::time::Duration;

use strata_policy::{Census, Level, gap};
use strata_store::Fingerprint;
use strata_units::{Handle, LeafIndex, PAGE_SIZE, PageId};

use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// A handler that takes the last but so many pages of headroom wakes the keeper.
pub(crate) const WAKE_AT_PAGES: i64 = 512;
/// Records of arrivals that are kept for a keeper that is held up.
pub(crate) const MOST_ARRIVALS: usize = 1 << 20;
/// Arrivals with a kept copy that wait for the keeper: more than come between two
/// looks.
const MOST_KEPT_ARRIVALS: usize = 1 << 16;
/// With less than this part of its budget free, a tenant is at its budget.
const SHORT_PART: i64 = 32;

impl Tenant {
    /// Pages that may still come in.
    pub(crate) fn headroom_pages(&self) -> i64 {
        self.headroom_pages.load(Ordering::Relaxed)
    }

    /// Whether pages have to leave for those that come, now or soon.
    pub(crate) fn is_short(&self) -> bool {
        let budget_pages = (self.budget_bytes() / PAGE_SIZE as u64) as i64;
        self.headroom_pages() < (budget_pages / SHORT_PART).max(4 * WAKE_AT_PAGES)
    }

    /// What the policy has to know of the sums.
    pub(crate) fn census(&self) -> Census {
        let resident = self.resident_pages.load(Ordering::Relaxed).max(0) as usize;
        let elsewhere = self.away_pages() + self.node_pages();
        Census { managed: resident + elsewhere as usize, resident }
    }

    pub(crate) fn may_fill(&self) -> bool {
        self.headroom_pages() > 0 || self.may_exceed.load(Ordering::Relaxed)
    }

    /// For how long its processes have been being stopped.
    pub(crate) fn freezes_for(&self) -> Duration {
        lock(&self.freeze_began).map_or(Duration::ZERO, |began| began.elapsed())
    }

    /// A page arrives: the policy's time then.
    fn policy_now(&self) -> u32 {
        self.arrivals_so_far.fetch_add(1, Ordering::Relaxed);
        let units = self.units_of_arrival.load(Ordering::Relaxed);
        self.counters.add(Counter::PolicyTime, units) as u32
    }

    fn count_in(&self, page: PageId) {
        self.resident_pages.fetch_add(1, Ordering::Relaxed);
        let left = self.headroom_pages.fetch_sub(1, Ordering::Relaxed);
        self.tell_policy(page);
        if left == WAKE_AT_PAGES {
            self.wake_keeper();
        }
    }

    fn tell_policy(&self, page: PageId) {
        let mut arrivals = lock(&self.arrivals);
        if arrivals.len() < MOST_ARRIVALS {
            arrivals.push(page);
        }
    }

    /// Whether there is room to tell the keeper of a kept copy. Before the entry
    /// says so: there is no kept copy without its fingerprint.
    fn tell_kept(&self, page: PageId, fingerprint: Fingerprint) -> bool {
        let mut kept = lock(&self.kept_arrivals);
        let room = kept.len() < MOST_KEPT_ARRIVALS;
        if room {
            kept.push((page, fingerprint));
        }
        room
    }

    /// A page was touched for the first time, or found resident.
    pub(crate) fn charge_resident(&self, page: PageId) {
        self.policy_now();
        self.count_in(page);
    }

    /// Resident pages with a stored copy.
    #[must_use]
    pub fn kept_pages(&self) -> u64 {
        self.kept_pages.load(Ordering::Relaxed).max(0) as u64
    }

    /// A stored page is in place again: its entry owns the handle no more, unless
    /// there is room to keep its copy, of which this is the fingerprint. None: the
    /// copy is good for nothing.
    pub(crate) fn arrived(&self, page: PageId, handle: Handle, copy: Option<Fingerprint>) {
        let cell = self.map.age(page);
        let (age, _) = gap::arrived(cell.load(Ordering::Relaxed), self.policy_now());
        cell.store(age, Ordering::Relaxed);
        let copy = copy.filter(|_| self.keep_copies.load(Ordering::Relaxed));
        if copy.is_some_and(|fingerprint| self.tell_kept(page, fingerprint)) {
            self.kept_pages.fetch_add(1, Ordering::Relaxed);
            self.map.set(page, Entry::Kept(handle));
        } else {
            self.map.set(page, Entry::Resident { shared: false });
            self.store.release(handle);
        }
        self.advisor.returned(page);
        self.count_in(page);
    }

    /// A resident page has another id (mremap): the policy learns it.
    pub(crate) fn noticed_resident(&self, page: PageId) {
        self.tell_policy(page);
    }

    /// Before all stored pages of `leaf` are retained or released.
    pub(crate) fn prefetch_counts(&self, leaf: LeafIndex) {
        self.store.prefetch_counts(leaf.pages().filter_map(|page| match self.map.get(page) {
            Entry::Stored(handle) => Some(handle),
            _ => None,
        }));
    }

    /// What `entry` held is gone: its handle, or its DRAM.
    pub(crate) fn uncharge(&self, entry: Entry) {
        match entry {
            Entry::Resident { shared: false } | Entry::Leaving { .. } => {
                self.resident_pages.fetch_sub(1, Ordering::Relaxed);
                self.headroom_pages.fetch_add(1, Ordering::Relaxed);
            }
            Entry::OnNode => {
                self.node_pages.fetch_sub(1, Ordering::Relaxed);
            }
            Entry::Stored(handle) | Entry::Arriving(handle) => self.store.release(handle),
            Entry::Kept(handle) => {
                self.resident_pages.fetch_sub(1, Ordering::Relaxed);
                self.headroom_pages.fetch_add(1, Ordering::Relaxed);
                self.kept_pages.fetch_sub(1, Ordering::Relaxed);
                self.store.release(handle);
            }
            Entry::Resident { shared: true }
            | Entry::Untouched
            | Entry::Discarded
            | Entry::Lost
            | Entry::Pending
            | Entry::Copied => {}
        }
    }

    /// Pages on the node.
    #[must_use]
    pub fn node_pages(&self) -> u64 {
        self.node_pages.load(Ordering::Relaxed).max(0) as u64
    }

    /// A page is on the node now and not in DRAM: `before` was its entry, and the
    /// caller, who holds the gate, has changed it. `newcomer`: the census's.
    pub(crate) fn went_to_node(&self, page: PageId, before: Entry, newcomer: Level) {
        let now = self.counters.get(Counter::PolicyTime) as u32;
        let cell = self.map.age(page);
        cell.store(gap::left(cell.load(Ordering::Relaxed), now, newcomer), Ordering::Relaxed);
        self.node_pages.fetch_add(1, Ordering::Relaxed);
        self.uncharge(before);
    }

    /// The reverse: for the policy, an arrival.
    pub(crate) fn came_from_node(&self, page: PageId) {
        let cell = self.map.age(page);
        let (age, _) = gap::arrived(cell.load(Ordering::Relaxed), self.policy_now());
        cell.store(age, Ordering::Relaxed);
        self.uncharge(Entry::OnNode);
        self.count_in(page);
    }

    /// Lets go of the stored copy of a resident page; whether there was one.
    pub(crate) fn drop_kept(&self, page: PageId) -> bool {
        let Some((space, _)) = self.map.owner(page.leaf()) else { return false };
        let Some(space) = self.space(space) else { return false };
        // An event that moves or discards the page reads its entry and writes it
        // under the gate.
        let gate = lock(&space.gate);
        let Entry::Kept(handle) = self.map.get(page) else { return false };
        self.map.set(page, Entry::Resident { shared: false });
        drop(gate);
        self.kept_pages.fetch_sub(1, Ordering::Relaxed);
        self.store.release(handle);
        true
    }

    /// A stored page was in place already. What is in place counts: the program has
    /// gone on with it. It can be what was stored (a worker died over it); if it is
    /// zero, a page was lost, and nobody else would ever say so.
    pub(crate) fn was_in_place(&self, space: &Space, page: PageId, address: u64, handle: Handle) {
        // In the first moments of a restored process, CRIU has put some there itself.
        if lock(&space.touched).is_none() {
            let pid = space.pid().unwrap_or(0);
            self.log(&format!("page {address:#x} of process {pid} was stored and in place"));
        }
        self.arrived(page, handle, None);
    }

    /// A stored page could not be read back.
    pub(crate) fn lost_page(&self, space: &Space, page: PageId, address: u64, why: &str) {
        let entry = self.map.get(page);
        self.map.set(page, Entry::Lost);
        self.uncharge(entry);
        self.counters.add(Counter::LostPages, 1);
        let pid = space.pid().unwrap_or(0);
        self.note(
            "lost",
            Some(format!(
                "page {address:#x} of process {pid} cannot be read back: {why}; whoever touches it gets SIGBUS"
            )),
        );
    }
}
