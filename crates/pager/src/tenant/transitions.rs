//! The changes of the page map that change what a tenant costs: each with its charge, in
//! one call, so that the map and the account cannot part.

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
        self.account.headroom_pages()
    }

    /// Whether pages have to leave for those that come, now or soon.
    pub(crate) fn is_short(&self) -> bool {
        let budget_pages = (self.budget_bytes() / PAGE_SIZE as u64) as i64;
        self.headroom_pages() < (budget_pages / SHORT_PART).max(4 * WAKE_AT_PAGES)
    }

    /// What the policy has to know of the sums.
    pub(crate) fn census(&self) -> Census {
        self.account.census(self.away_pages())
    }

    pub(crate) fn may_fill(&self) -> bool {
        self.headroom_pages() > 0 || self.account.may_exceed()
    }

    /// For how long its processes have been being stopped.
    pub(crate) fn freezes_for(&self) -> Duration {
        lock(&self.freeze_began).map_or(Duration::ZERO, |began| began.elapsed())
    }

    /// A page arrives: the policy's time then.
    fn policy_now(&self) -> u32 {
        self.counters.add(Counter::PolicyTime, self.account.count_arrival()) as u32
    }

    fn count_in(&self, page: PageId) {
        let left = self.account.came_in();
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

    /// A page is in DRAM that was not, and whose content was nowhere else.
    fn charge_resident(&self, page: PageId) {
        self.policy_now();
        self.count_in(page);
    }

    /// A page was touched for the first time.
    pub(crate) fn now_resident(&self, page: PageId) {
        self.map.set(page, Entry::Resident { shared: false });
        self.charge_resident(page);
    }

    /// A page was found resident, or to be this space's alone: it is, if its entry is
    /// still `before`.
    pub(crate) fn found_resident(&self, page: PageId, before: Entry) -> bool {
        let is_it = self.map.replace(page, before, Entry::Resident { shared: false });
        if is_it {
            self.charge_resident(page);
        }
        is_it
    }

    /// The entry `before` of a page is `after` from now on, which is not in DRAM: what
    /// it held is given up. The page map first: see [`Self::uncharge`].
    pub(crate) fn overwrite(&self, page: PageId, before: Entry, after: Entry) {
        debug_assert!(!after.is_own_dram() && after != Entry::OnNode, "{after:?} costs DRAM");
        self.map.set(page, after);
        self.uncharge(before);
    }

    /// A page in place, whose entry is `before`, is to leave by `slot`. The stored copy
    /// that was kept of it, which is the caller's from now on.
    pub(crate) fn begins_to_leave(&self, page: PageId, before: Entry, slot: u16) -> Option<Handle> {
        // Leaving pages are charged here, and as DRAM: the store is there.
        match before {
            Entry::Resident { shared: true } => self.account.shared_page_leaves(),
            Entry::OnNode => {
                self.account.came_in();
                self.account.left_node();
            }
            _ => {}
        }
        self.map.set(page, Entry::Leaving { slot, wanted: false });
        let copy = before.handle();
        if copy.is_some() {
            self.account.copies_went(1);
        }
        copy
    }

    /// The entry of a forked child's page is `entry`, which is what its parent's became.
    pub(crate) fn inherit(&self, page: PageId, entry: Entry) {
        if let Entry::Leaving { .. } = entry {
            // Leaving pages are charged to whoever has them.
            self.account.shared_page_leaves();
        }
        self.map.set(page, entry);
    }

    /// A worker begins: what `entry`, which an earlier one left, costs is counted.
    pub(crate) fn count_again(&self, page: PageId, entry: Entry) {
        match entry {
            Entry::Resident { shared: false } => self.charge_resident(page),
            Entry::Kept(_) => {
                self.account.copy_is_kept();
                self.charge_resident(page);
            }
            Entry::OnNode => self.account.is_on_node(),
            Entry::Leaving { slot, .. } => {
                self.account.shared_page_leaves();
                // Whoever waited is woken and asks again.
                self.map.set(page, Entry::Leaving { slot, wanted: false });
            }
            _ => {}
        }
    }

    /// Resident pages with a stored copy.
    #[must_use]
    pub fn kept_pages(&self) -> u64 {
        self.account.kept_pages()
    }

    /// A stored page is in place again: its entry owns the handle no more, unless
    /// there is room to keep its copy, of which this is the fingerprint. None: the
    /// copy is good for nothing.
    pub(crate) fn arrived(&self, page: PageId, handle: Handle, copy: Option<Fingerprint>) {
        let cell = self.map.age(page);
        let (age, _) = gap::arrived(cell.load(Ordering::Relaxed), self.policy_now());
        cell.store(age, Ordering::Relaxed);
        let copy = copy.filter(|_| self.account.keeps_copies());
        if copy.is_some_and(|fingerprint| self.tell_kept(page, fingerprint)) {
            self.account.copy_is_kept();
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

    /// What `entry` held is gone: its handle, or its DRAM. The page map does not name the
    /// handle any more: dead in between, the store has an object that nobody names.
    fn uncharge(&self, entry: Entry) {
        match entry {
            Entry::Resident { shared: false } | Entry::Leaving { .. } => {
                self.account.went_out(1);
            }
            Entry::OnNode => self.account.left_node(),
            Entry::Stored(handle) | Entry::Arriving(handle) => self.store.release(handle),
            Entry::Kept(handle) => {
                self.account.went_out(1);
                self.account.copies_went(1);
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

    /// What was resident there is gone with its process.
    pub(crate) fn uncharge_leaf(&self, leaf: LeafIndex) {
        let (mut resident, mut kept) = (0, 0);
        for page in leaf.pages() {
            let left = match self.map.get(page) {
                Entry::Resident { shared: false } | Entry::Leaving { .. } => Entry::Untouched,
                Entry::Kept(handle) => {
                    kept += 1;
                    Entry::Stored(handle)
                }
                _ => continue,
            };
            self.map.set(page, left);
            resident += 1;
        }
        self.account.went_out(resident);
        self.account.copies_went(kept);
    }

    /// Pages on the node.
    #[must_use]
    pub fn node_pages(&self) -> u64 {
        self.account.node_pages()
    }

    /// A page in DRAM whose entry is `before` was moved to the node; false: it has
    /// changed since. The caller holds the gate. `newcomer`: the census's.
    pub(crate) fn went_to_node(&self, page: PageId, before: Entry, newcomer: Level) -> bool {
        if !self.map.replace(page, before, Entry::OnNode) {
            return false;
        }
        let now = self.counters.get(Counter::PolicyTime) as u32;
        let cell = self.map.age(page);
        cell.store(gap::left(cell.load(Ordering::Relaxed), now, newcomer), Ordering::Relaxed);
        self.account.is_on_node();
        self.uncharge(before);
        true
    }

    /// The reverse: for the policy, an arrival.
    pub(crate) fn came_from_node(&self, page: PageId) -> bool {
        if !self.map.replace(page, Entry::OnNode, Entry::Resident { shared: false }) {
            return false;
        }
        let cell = self.map.age(page);
        let (age, _) = gap::arrived(cell.load(Ordering::Relaxed), self.policy_now());
        cell.store(age, Ordering::Relaxed);
        self.uncharge(Entry::OnNode);
        self.count_in(page);
        true
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
        self.account.copies_went(1);
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
        self.overwrite(page, self.map.get(page), Entry::Lost);
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
