//! Evicting as the keeper does it: which pages, batch by batch, and what becomes of
//! those that stay.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use strata_units::wire::BATCH_PAGES;
use strata_units::{PAGE, PageId};

use super::{Keeper, PINNED_FOR};
use crate::evict::{BatchReport, Pauses, Stayed};
use crate::map::counters::Counter;
use crate::regions::registration::take_charge;
use crate::tenant::excluded::Excluded;
use crate::tenant::space::Space;

impl Keeper<'_> {
    /// Evicts `want` pages, or as many of them as the next moments allow without haste,
    /// where nobody is short of room; how many left.
    pub(super) fn evict_evenly(&mut self, want: usize, spaces: &[Arc<Space>]) -> usize {
        let floor_pages = self.comfortable_pages();
        let comfortable = self.tenant.headroom_pages() > floor_pages;
        self.spread.keep_apart(comfortable, spaces);
        let (want, pauses) = match comfortable {
            true => self.spread.plan(want, floor_pages),
            false => (want, Pauses::default()),
        };
        self.evictor.pauses = pauses;
        let evicted = self.evict(want, spaces);
        // Whoever else evicts has the pages out at once.
        self.evictor.pauses = Pauses::default();
        evicted
    }

    /// Evicts `want` pages, those that the program gave up first; how many left.
    pub(super) fn evict(&mut self, want: usize, spaces: &[Arc<Space>]) -> usize {
        let tenant = self.tenant;
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        let census = tenant.census();
        let given_up = self.evict_given_up(want, spaces);
        if given_up >= want {
            return given_up;
        }
        let mut victims = Vec::with_capacity(want);
        self.replacement.maintain(census, tenant.as_ref());
        self.replacement.victims(now, want, census, tenant.as_ref(), &mut victims);
        let pinned = (tenant.pinned_bytes() / PAGE) as usize + self.merged.pages();
        if victims.len() < want / 2 && census.resident > victims.len() + pinned + 4096 {
            self.rebuild();
        }
        // Down to the next tier that has room, and there what is colder gives way.
        let victims = self.leave_merged_of_all(victims, spaces);
        let (demoted, victims) = self.demote(victims, spaces);
        let relieved = self.relieve_node(spaces);
        given_up + demoted + relieved + self.evict_pages(victims, spaces)
    }

    /// Evicts these pages.
    pub(super) fn evict_pages(&mut self, victims: Vec<PageId>, spaces: &[Arc<Space>]) -> usize {
        let tenant = self.tenant;
        let mut by_space: BTreeMap<u32, Vec<PageId>> = BTreeMap::new();
        for page in victims {
            if let Some((space, _)) = tenant.map.owner(page.leaf()) {
                by_space.entry(space.0).or_default().push(page);
            }
        }
        let mut evicted = 0;
        for (id, mut pages) in by_space {
            // Neighbours side by side: the agent moves them together.
            pages.sort_unstable();
            let Some(space) = spaces.iter().find(|space| space.id.0 == id) else { continue };
            for batch in pages.chunks(BATCH_PAGES) {
                match self.evict_batch(space, batch, spaces) {
                    Some(pages) => evicted += pages,
                    None => self.give_back(batch),
                }
            }
        }
        evicted
    }

    /// Evicts some of a space's pages, and what its relatives share of them. None:
    /// its agent cannot just now.
    pub(super) fn evict_batch(
        &mut self,
        space: &Arc<Space>,
        batch: &[PageId],
        spaces: &[Arc<Space>],
    ) -> Option<usize> {
        let agent = space.agent()?;
        let control = agent.control.control();
        let batch = self.leave_merged(space, batch);
        if batch.is_empty() {
            return Some(0);
        }
        let excluded = self.excluded.entry(space.id.0).or_default();
        if excluded.is_stale(control) {
            *excluded = Excluded::read(control);
        }
        let report = self.evictor.evict(space, self.tenant, excluded, &batch)?;
        let evicted = report.evicted;
        // What goes after them is out at once.
        let pauses = std::mem::take(&mut self.evictor.pauses);
        let left = self.take_report(space, report);
        let relatives = self.evict_relatives(space, &left, spaces);
        self.evictor.pauses = pauses;
        Some(evicted + relatives)
    }

    /// A page that a fork shares costs as much as before until the last of the
    /// family has lost it: those who inherited what `space` just lost follow.
    fn evict_relatives(
        &mut self,
        space: &Arc<Space>,
        left: &[u64],
        spaces: &[Arc<Space>],
    ) -> usize {
        let mut evicted = 0;
        for relative in spaces {
            if relative.id == space.id || !relative.has_shared.load(Ordering::Acquire) {
                continue;
            }
            let pages = take_charge(relative, self.tenant, left);
            for batch in pages.chunks(BATCH_PAGES) {
                let Some(agent) = relative.agent() else { continue };
                let excluded = self.excluded.entry(relative.id.0).or_default();
                if excluded.is_stale(agent.control.control()) {
                    *excluded = Excluded::read(agent.control.control());
                }
                match self.evictor.evict(relative, self.tenant, excluded, batch) {
                    Some(report) => {
                        evicted += report.evicted;
                        self.take_report(relative, report);
                    }
                    None => self.give_back(batch),
                }
            }
        }
        evicted
    }

    pub(super) fn give_back(&mut self, pages: &[PageId]) {
        let now = self.tenant.counters.get(Counter::PolicyTime) as u32;
        for &page in pages {
            self.replacement.refused(page, now);
        }
    }

    /// Sees to the pages that stayed. Returns the addresses of those that left.
    pub(super) fn take_report(&mut self, space: &Arc<Space>, report: BatchReport) -> Vec<u64> {
        let mut left = report.left;
        let tenant = self.tenant;
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        let mut busy = Vec::new();
        for (page, address, stayed) in report.stayed {
            match stayed {
                Stayed::Cancelled | Stayed::Wanted => self.replacement.refused(page, now),
                Stayed::Busy => busy.push((page, address)),
                Stayed::Pinned | Stayed::StoreFull => {
                    self.pinned.push((Instant::now() + PINNED_FOR, page));
                }
            }
        }
        tenant.note(
            "store",
            report.store_error.map(|error| format!("pages cannot be stored, they stay: {error}")),
        );
        let busy = self.leave_merged_since(space, busy);
        // Once shared by a fork, or pinned by I/O: after a write of its own a
        // page is the process's alone. Then once more; else a pause.
        for batch in busy.chunks(BATCH_PAGES) {
            let addresses: Vec<u64> = batch.iter().map(|&(_, address)| address).collect();
            let populated = self.evictor.populate(space, &addresses);
            let pages: Vec<PageId> = batch.iter().map(|&(page, _)| page).collect();
            let again = populated.then(|| {
                let excluded = self.excluded.entry(space.id.0).or_default();
                self.evictor.evict(space, tenant, excluded, &pages)
            });
            match again.flatten() {
                Some(second) => {
                    left.extend(second.left);
                    for (page, _, stayed) in second.stayed {
                        if matches!(stayed, Stayed::Cancelled | Stayed::Wanted) {
                            self.replacement.refused(page, now);
                        } else {
                            self.pinned.push((Instant::now() + PINNED_FOR, page));
                        }
                    }
                }
                None => self.give_back(&pages),
            }
        }
        left
    }
}
