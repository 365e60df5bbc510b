//! The keeper's record of kept copies: stored copies of pages that are resident
//! again. Which they are says the page map ([`crate::map::entry::Entry::Kept`]); here is
//! in which order they were made, what their digests are, and whether they pay.
//!
//! In ordinary memory: after a worker's death the order is collected from the page
//! map, and pages without a digest are compared with what is stored.

use std::collections::{HashMap, HashSet, VecDeque};

use strata_store::Fingerprint;
use strata_units::{PageId, SpaceId};

use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::share::stored_page_cost;

/// Stale entries that the order may have beyond as many as good ones.
const SLACK: u64 = 4096;
/// Copies dropped between two looks.
const DROPPED_PER_ROUND: u64 = 512;
/// Evictions of pages with kept copies that count for whether copies pay.
const MEMORY: u32 = 8192;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct KeptCopies {
    /// The oldest first; some have left or lost their copies since.
    order: VecDeque<PageId>,
    fingerprints: HashMap<PageId, Fingerprint>,
    /// Evictions of pages that had one, lately, and how many of them had not
    /// changed.
    seen: u32,
    unchanged: u32,
}

impl KeptCopies {
    /// Takes note of what the handlers kept.
    pub(crate) fn take_arrivals(&mut self, tenant: &Tenant) {
        for (page, fingerprint) in std::mem::take(&mut *lock(&tenant.kept_arrivals)) {
            self.order.push_back(page);
            self.fingerprints.insert(page, fingerprint);
        }
        if self.order.len() as u64 > 2 * tenant.kept_pages() + SLACK {
            self.tidy(tenant);
        }
    }

    /// A page leaves; the digest of its copy, if it is known.
    pub(crate) fn forget(&mut self, page: PageId) -> Option<Fingerprint> {
        self.fingerprints.remove(&page)
    }

    /// Drops the oldest until about `bytes` are free.
    pub(crate) fn drop_oldest(&mut self, tenant: &Tenant, bytes: u64) {
        let cost = stored_page_cost(&tenant.store.stats());
        let mut pages = bytes.div_ceil(cost.max(1)).min(DROPPED_PER_ROUND);
        while pages > 0 {
            let Some(page) = self.order.pop_front() else {
                // Copies of which nothing is known: from before a worker's death.
                if tenant.kept_pages() > 0 {
                    self.collect(tenant);
                }
                return;
            };
            self.fingerprints.remove(&page);
            pages -= u64::from(tenant.drop_kept(page));
        }
    }

    /// Counts an eviction of a page that had a copy.
    pub(crate) fn count(&mut self, unchanged: bool) {
        self.seen += 1;
        self.unchanged += u32::from(unchanged);
        if self.seen >= MEMORY {
            self.seen /= 2;
            self.unchanged /= 2;
        }
    }

    /// Of a hundred evicted pages with copies so many had not changed; half of
    /// them before any was evicted.
    pub(crate) fn unchanged_percent(&self) -> u64 {
        if self.seen == 0 { 50 } else { u64::from(self.unchanged) * 100 / u64::from(self.seen) }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.order.capacity() * size_of::<PageId>()
            + self.fingerprints.capacity() * (size_of::<(PageId, Fingerprint)>() + 1)
    }

    /// Forgets pages that left or lost their copies.
    fn tidy(&mut self, tenant: &Tenant) {
        let mut good = HashSet::new();
        let mut tidy = VecDeque::new();
        // The newest entry of a page counts.
        for page in self.order.drain(..).rev() {
            if matches!(tenant.map.get(page), Entry::Kept(_)) && good.insert(page) {
                tidy.push_front(page);
            }
        }
        self.order = tidy;
        self.fingerprints.retain(|page, _| good.contains(page));
        self.fingerprints.shrink_to(2 * good.len());
    }

    /// Makes the order anew from the page map.
    fn collect(&mut self, tenant: &Tenant) {
        let own = |&(_, owner, _): &(_, SpaceId, _)| tenant.registry.tenant_of(owner) == tenant.id;
        let kept = tenant.map.leaves().into_iter().filter(own).flat_map(|(leaf, _, _)| {
            leaf.pages().filter(|&page| matches!(tenant.map.get(page), Entry::Kept(_)))
        });
        self.order = kept.collect();
    }
}
