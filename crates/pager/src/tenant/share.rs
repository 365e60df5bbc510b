//! What of a page map and a store is one tenant's, where it has snapshots or
//! shares both with clones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_store::StoreStats;
use strata_units::{PAGE_SIZE, SpaceId};

use crate::map::lock;
use crate::tenant::Tenant;

/// How often it is counted anew, at most...
const COUNT_EVERY: Duration = Duration::from_millis(250);
/// ...and never more than this part of the time.
const COUNT_PART: u32 = 100;

/// What is one tenant's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Share {
    /// References of its address spaces to the store.
    pub(crate) live: u64,
    /// References of its snapshots.
    pub(crate) snapshots: u64,
    /// Leaves of the page map.
    leaves: u64,
    /// References to the store, everybody's.
    all: u64,
    /// Others have pages in this store too.
    is_shared: bool,
    next: Instant,
}

impl Share {
    /// The part of `stats` that is this tenant's: in proportion to its
    /// references, so that what several refer to is paid by each of them in
    /// part.
    pub(crate) fn of(&self, stats: StoreStats) -> StoreStats {
        if !self.is_shared {
            return stats;
        }
        let own = self.live + self.snapshots;
        let part = |what: u64| {
            (u128::from(what) * u128::from(own.min(self.all)) / u128::from(self.all.max(1))) as u64
        };
        StoreStats {
            stored_pages: part(stats.stored_pages),
            stored_bytes: part(stats.stored_bytes),
            objects: part(stats.objects),
            deduplicated_pages: part(stats.deduplicated_pages),
            fill_pages: part(stats.fill_pages),
            filed_pages: part(stats.filed_pages),
            dram_bytes: part(stats.dram_bytes),
            payload_bytes: part(stats.payload_bytes),
            staged_bytes: part(stats.staged_bytes),
            fast_original_bytes: part(stats.fast_original_bytes),
            fast_payload_bytes: part(stats.fast_payload_bytes),
            file_bytes: part(stats.file_bytes),
            file_payload_bytes: part(stats.file_payload_bytes),
            file_objects: part(stats.file_objects),
            dictionary_bytes: part(stats.dictionary_bytes),
            metadata_bytes: part(stats.metadata_bytes),
            ..stats
        }
    }
}

/// What a snapshot of an address space refers to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SnapshotSize {
    /// Pages with content, zero pages left out.
    pub pages: u64,
    /// What removing it alone would free, about.
    pub unique_bytes: u64,
    /// What others refer to as well.
    pub shared_bytes: u64,
}

impl Tenant {
    /// Whether a snapshot of `other` can be restored here.
    #[must_use]
    pub fn shares_pages_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.map, &other.map)
    }

    /// Whether others have pages in its store: clones, or what it is a clone of.
    pub(crate) fn shares_store(&self) -> bool {
        Arc::strong_count(&self.store) > 1
    }

    /// What the snapshot `memory` of an address space refers to. A page costs
    /// what pages cost on average.
    #[must_use]
    pub fn snapshot_size(&self, memory: SpaceId) -> SnapshotSize {
        let known = lock(&self.snapshots).get(&memory).cloned();
        let Some(known) = known else { return SnapshotSize::default() };
        let cost = stored_page_cost(&self.store.stats());
        // What is ready to be restored from it is part of it.
        let own = 1 + u64::from(self.is_ready(memory));
        let mut size = SnapshotSize::default();
        for (_, page) in known.pages() {
            let Some(handle) = self.map.get(page).handle() else { continue };
            size.pages += 1;
            match self.store.references(handle) {
                None => {}
                Some(references) if references > own => size.shared_bytes += cost,
                Some(_) => size.unique_bytes += cost,
            }
        }
        size
    }

    /// Counts what is this tenant's, if there is anybody to share with and it is
    /// time to.
    pub(crate) fn count_share(&self) {
        let is_shared = self.shares_store();
        if !is_shared && lock(&self.snapshots).is_empty() {
            *lock(&self.share) = None;
            return;
        }
        let now = Instant::now();
        if lock(&self.share).is_some_and(|share| now < share.next && share.is_shared == is_shared) {
            return;
        }
        let ready = self.ready_slots();
        let (mut live, mut snapshots, mut leaves) = (0, 0, 0);
        for (leaf, owner, _) in self.map.leaves() {
            if self.registry.tenant_of(owner) != self.id {
                continue;
            }
            leaves += 1;
            let handles =
                leaf.pages().filter(|&page| self.map.get(page).handle().is_some()).count() as u64;
            if self.registry.space_is_live(owner) {
                live += handles;
            } else if !ready.contains(&owner) {
                snapshots += handles;
            }
        }
        let all = self.store.stats().stored_pages;
        let counted = Instant::now();
        let pause = COUNT_EVERY.max((counted - now) * COUNT_PART);
        let share = Share { live, snapshots, leaves, all, is_shared, next: counted + pause };
        *lock(&self.share) = Some(share);
    }

    /// Leaves of the page map that are this tenant's.
    pub(crate) fn leaf_count(&self) -> u64 {
        lock(&self.share).map_or_else(|| self.map.leaf_count(), |share| share.leaves)
    }

    /// Stored pages of its address spaces, those that are resident too left out.
    pub(crate) fn away_pages(&self) -> u64 {
        let live = lock(&self.share).map(|share| share.live);
        live.unwrap_or_else(|| self.store.stats().stored_pages).saturating_sub(self.kept_pages())
    }
}

/// What a stored page costs in DRAM on average, staged ones apart.
pub(crate) fn stored_page_cost(store: &StoreStats) -> u64 {
    let staged_pages = store.staged_bytes / PAGE_SIZE as u64;
    let cost = store.dram_bytes.saturating_sub(store.staged_bytes);
    cost / store.objects.saturating_sub(staged_pages).max(1)
}
