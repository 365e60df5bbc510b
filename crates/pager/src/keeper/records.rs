//! What the policy knows of the tenant's pages: arrivals are told to it, what was lost is
//! made anew from the page map, and estimates of pages that stay out for long rise.

use std::sync::atomic::Ordering;
use std::time::Instant;

use strata_policy::replacement::Candidate;
use strata_policy::{Pages, gap};
use strata_units::{LeafIndex, PAGES_PER_LEAF, PageId, SpaceId};

use super::Keeper;
use crate::evict::level_of;
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::transitions::MOST_ARRIVALS;

/// Most leaves whose estimates are swept a round.
const SWEEP_LEAVES: usize = 16;

impl Pages for Tenant {
    fn candidate(&self, page: PageId) -> Candidate {
        match self.map.get(page) {
            // As if it were not there: it is announced when it is let go.
            // For this it has left DRAM; it is announced when it is back.
            Entry::OnNode => Candidate::Gone,
            entry if entry.is_resident() && self.is_pinned(page) => Candidate::Gone,
            entry if entry.is_resident() => Candidate::Evictable(level_of(self, page)),
            // On its way out and perhaps back: it is announced when it is.
            _ => Candidate::Gone,
        }
    }
}

impl Keeper<'_> {
    pub(super) fn take_arrivals(&mut self) {
        let arrivals = std::mem::take(&mut *lock(&self.tenant.arrivals));
        let now = self.tenant.counters.get(Counter::PolicyTime) as u32;
        let lost = arrivals.len() >= MOST_ARRIVALS;
        for page in arrivals {
            if let Some(node) = &mut self.node {
                node.returned(page);
            }
            self.replacement.arrived(page, now);
        }
        // After the arrivals: of what the policy knows, all copies are known.
        self.evictor.copies.take_arrivals(self.tenant);
        let due = Instant::now();
        let mut still = Vec::new();
        for (when, page) in self.pinned.drain(..) {
            if when <= due {
                self.replacement.refused(page, now);
            } else {
                still.push((when, page));
            }
        }
        self.pinned = still;
        if lost {
            self.rebuild();
        }
    }

    /// Fills the queues from the page map: records were lost.
    pub(super) fn rebuild(&mut self) {
        let tenant = self.tenant;
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        let own = |&(_, owner, _): &(_, SpaceId, _)| tenant.registry.tenant_of(owner) == tenant.id;
        let resident = tenant.map.leaves().into_iter().filter(own).flat_map(|(leaf, _, _)| {
            leaf.pages()
                .filter(|&page| {
                    let entry = tenant.map.get(page);
                    entry.is_resident() && entry != Entry::OnNode && !self.merged.has(page)
                })
                .map(|page| (page, level_of(tenant, page)))
        });
        self.replacement.rebuild(resident, now);
    }

    /// Raises the estimates of pages that stay out for long.
    pub(super) fn sweep(&mut self) {
        let tenant = self.tenant;
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        // The whole map in as many arrivals as it has pages.
        let due = now.wrapping_sub(self.swept_at) as usize / PAGES_PER_LEAF;
        if due == 0 {
            return;
        }
        let rest = now.wrapping_sub(self.swept_at) % PAGES_PER_LEAF as u32;
        self.swept_at = now.wrapping_sub(rest);
        let count = due.min(SWEEP_LEAVES);
        let Some(leaves) = tenant.map.leaf_range(self.swept_leaf, count) else {
            self.swept_leaf = 0;
            return;
        };
        self.swept_leaf += count;
        let registry = &tenant.registry;
        let own = |&leaf: &LeafIndex| {
            tenant.map.owner(leaf).is_some_and(|(space, _)| {
                registry.tenant_of(space) == tenant.id && registry.space_is_live(space)
            })
        };
        for leaf in leaves.into_iter().filter(own) {
            for page in leaf.pages() {
                if matches!(tenant.map.get(page), Entry::Stored(_)) {
                    let age = tenant.map.age(page);
                    let cell = age.load(Ordering::Relaxed);
                    let swept = gap::swept(cell, now);
                    if swept != cell {
                        // A fault that comes first wins.
                        let _ =
                            age.compare_exchange(cell, swept, Ordering::Relaxed, Ordering::Relaxed);
                    }
                }
            }
        }
    }
}
