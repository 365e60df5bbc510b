//! Pages that the kernel has merged with equal ones (KSM): left where they are. To move
//! one is refused, to write to it so that it can be moved undoes the merging, and what it
//! costs it costs but once for all who have it.
//!
//! | a page is | the keeper | next |
//! | --- | --- | --- |
//! | chosen, of a process that has merged pages | asks whether it is merged | aside, or in a batch |
//! | refused as busy | asks the same, and of the process first | aside, or populated and tried again |
//! | aside | has the policy forget it; asks again in its turn, all within ten seconds, as fast as it can when the tenant is over its budget | merged still: aside. No longer, or its process has none now: announced to the policy. Not resident: forgotten |
//! | discarded, unmapped, touched again | as any page | forgotten, or announced, when its turn comes |
//!
//! That a page is aside is no state of the page map: nothing is lost with it, and a new
//! worker finds it out again.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_sys::kernel_has_merged_pages;
use strata_units::{LeafIndex, PAGE, PageId};

use super::Keeper;
use crate::map::address::address_of;
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::page_set::Bits;
use crate::tenant::merged::Merged;
use crate::tenant::space::Space;

/// How often it is asked whether processes have merged pages.
const ASK_EVERY: Duration = Duration::from_millis(250);
/// What merged pages spare is measured this often, at least...
const MEASURE_EVERY: Duration = Duration::from_secs(1);
/// ...and sooner when this part of it may be gone, but not as soon as this...
const MEASURE_AT_PART: u64 = 64;
const MEASURE_SOONEST: Duration = Duration::from_millis(20);
/// ...nor for more than this part of the time.
const MEASURE_PART: u32 = 20;
/// All pages that are aside are asked about within this time...
const REVISIT_EVERY: Duration = Duration::from_secs(10);
/// ...so many leaves at a time, and never for more than this part of it.
const REVISIT_LEAVES: usize = 8;
const REVISIT_PART: u32 = 8;

/// Pages that are left alone.
#[derive(Default)]
struct Aside {
    leaves: BTreeMap<LeafIndex, Bits>,
    pages: usize,
    /// From here on they are asked about next.
    next: u32,
}

impl Aside {
    fn has(&self, page: PageId) -> bool {
        self.leaves.get(&page.leaf()).is_some_and(|bits| bits.has(page.index()))
    }

    fn put(&mut self, page: PageId, there: bool) {
        if self.has(page) == there {
            return;
        }
        let index = page.index();
        self.leaves.entry(page.leaf()).or_default().put(index..index + 1, there);
        self.pages = if there { self.pages + 1 } else { self.pages - 1 };
        if self.leaves.get(&page.leaf()) == Some(&Bits::default()) {
            self.leaves.remove(&page.leaf());
        }
    }

    fn of(&self, leaf: LeafIndex) -> Vec<PageId> {
        let bits = self.leaves.get(&leaf).copied().unwrap_or_default();
        bits.each().map(|index| PageId::new(leaf, index)).collect()
    }

    /// The leaves whose turn it is.
    fn turn(&mut self) -> Vec<LeafIndex> {
        let from = LeafIndex(self.next);
        let due: Vec<_> =
            self.leaves.range(from..).take(REVISIT_LEAVES).map(|(leaf, _)| *leaf).collect();
        self.next = match due.last() {
            Some(last) if due.len() == REVISIT_LEAVES => last.0 + 1,
            _ => 0,
        };
        due
    }
}

/// What the keeper knows of merged pages.
#[derive(Default)]
pub(super) struct MergedPages {
    aside: Aside,
    /// The spaces whose processes have merged pages.
    merging: BTreeSet<u32>,
    asked: Option<Instant>,
    measured: Option<Instant>,
    measuring_took: Duration,
    revisited: Option<Instant>,
    revisiting_took: Duration,
}

fn is_due(last: Option<Instant>, every: Duration) -> bool {
    last.is_none_or(|when| when.elapsed() >= every)
}

impl MergedPages {
    /// How many are left alone.
    pub(super) fn pages(&self) -> usize {
        self.aside.pages
    }

    pub(super) fn has(&self, page: PageId) -> bool {
        self.aside.has(page)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.aside.leaves.len() * 2 * size_of::<(LeafIndex, Bits)>()
    }
}

impl Keeper<'_> {
    /// Looks who has merged pages, what they spare, and which of those that are aside are
    /// merged no longer.
    pub(super) fn look_for_merged(&mut self, spaces: &[Arc<Space>]) {
        if is_due(self.merged.asked, ASK_EVERY) {
            self.merged.asked = Some(Instant::now());
            let merges = |space: &&Arc<Space>| {
                space.process().is_some_and(|process| process.has_merged_pages())
            };
            let any = kernel_has_merged_pages();
            let merging = spaces.iter().filter(|_| any).filter(merges);
            self.merged.merging = merging.map(|space| space.id.0).collect();
        }
        let merges = !self.merged.merging.is_empty();
        if merges || self.merged.measured.is_some() {
            self.measure_merged(spaces, merges);
        }
        if self.merged.aside.pages > 0 {
            self.revisit(spaces);
        }
    }

    fn measure_merged(&mut self, spaces: &[Arc<Space>], merges: bool) {
        let tenant = self.tenant;
        if !merges {
            *lock(&tenant.merged) = Merged::default();
            self.merged.measured = None;
            return;
        }
        let fades = || {
            let merged = lock(&tenant.merged);
            let then = merged.saved_then();
            then - merged.now().saved_bytes > then / MEASURE_AT_PART
        };
        let least = self.merged.measuring_took * MEASURE_PART;
        let measured = self.merged.measured;
        let due = is_due(measured, MEASURE_EVERY.max(least))
            || (is_due(measured, MEASURE_SOONEST.max(least)) && fades());
        if due {
            let began = Instant::now();
            let processes: Vec<_> = spaces.iter().filter_map(|space| space.process()).collect();
            let merged = Merged::measure(&processes);
            *lock(&tenant.merged) = merged;
            self.merged.measured = Some(Instant::now());
            self.merged.measuring_took = began.elapsed();
        }
    }

    /// Asks about some of the pages that are aside.
    fn revisit(&mut self, spaces: &[Arc<Space>]) {
        let tenant = self.tenant;
        let steps = self.merged.aside.leaves.len().div_ceil(REVISIT_LEAVES) as u32;
        let least = self.merged.revisiting_took * REVISIT_PART;
        // What was written since may have to leave now.
        let every =
            if tenant.headroom_pages() <= 0 { least } else { least.max(REVISIT_EVERY / steps) };
        if !is_due(self.merged.revisited, every) {
            return;
        }
        let began = Instant::now();
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        for leaf in self.merged.aside.turn() {
            let pages = self.merged.aside.of(leaf);
            let owner = tenant.map.owner(leaf).map(|(id, _)| id);
            let space = spaces.iter().find(|space| Some(space.id) == owner);
            let merged = space.map(|space| self.which_are_merged(space, &pages, true));
            for (index, &page) in pages.iter().enumerate() {
                let entry = tenant.map.get(page);
                let in_dram = entry.is_resident() && entry != Entry::OnNode;
                if in_dram && merged.as_ref().is_some_and(|merged| merged[index]) {
                    continue;
                }
                self.merged.aside.put(page, false);
                if in_dram && space.is_some() {
                    self.replacement.refused(page, now);
                }
            }
        }
        self.merged.revisited = Some(Instant::now());
        self.merged.revisiting_took = began.elapsed();
    }

    /// Which of these pages of a space, in ascending order, are merged.
    fn which_are_merged(&self, space: &Space, pages: &[PageId], before: bool) -> Vec<bool> {
        let none = vec![false; pages.len()];
        if !self.merged.merging.contains(&space.id.0) {
            return none;
        }
        let Some(process) = space.process() else { return none };
        let addresses: Option<Vec<u64>> = pages
            .iter()
            .map(|page| {
                let (owner, piece) = self.tenant.map.owner(page.leaf())?;
                (owner == space.id).then(|| address_of(piece, page.index()))
            })
            .collect();
        let found = addresses.and_then(|addresses| process.merged(&addresses, before).ok());
        found.unwrap_or(none)
    }

    /// Puts those of a space's pages aside that are merged; returns the others.
    pub(super) fn leave_merged<'p>(
        &mut self,
        space: &Space,
        pages: &'p [PageId],
    ) -> Cow<'p, [PageId]> {
        if !self.merged.merging.contains(&space.id.0) {
            return Cow::Borrowed(pages);
        }
        let merged = self.which_are_merged(space, pages, false);
        let now = self.tenant.counters.get(Counter::PolicyTime) as u32;
        let mut others = Vec::with_capacity(pages.len());
        for (&page, is_merged) in pages.iter().zip(merged) {
            if is_merged {
                self.merged.aside.put(page, true);
                self.replacement.set_aside(page, now);
            } else {
                others.push(page);
            }
        }
        Cow::Owned(others)
    }

    /// The same for pages of several spaces, where the node may take them: it would have the
    /// kernel try to move them.
    pub(super) fn leave_merged_of_all(
        &mut self,
        pages: Vec<PageId>,
        spaces: &[Arc<Space>],
    ) -> Vec<PageId> {
        if self.node.is_none() || self.merged.merging.is_empty() {
            return pages;
        }
        let mut by_space: BTreeMap<u32, Vec<PageId>> = BTreeMap::new();
        for page in pages {
            if let Some((space, _)) = self.tenant.map.owner(page.leaf()) {
                by_space.entry(space.0).or_default().push(page);
            }
        }
        let mut others = Vec::new();
        for (id, mut pages) in by_space {
            pages.sort_unstable();
            match spaces.iter().find(|space| space.id.0 == id) {
                Some(space) => others.extend_from_slice(&self.leave_merged(space, &pages)),
                None => others.extend(pages),
            }
        }
        others
    }

    /// The same for pages that the kernel has just refused: perhaps they were merged since
    /// the process was asked.
    pub(super) fn leave_merged_since(
        &mut self,
        space: &Space,
        busy: Vec<(PageId, u64)>,
    ) -> Vec<(PageId, u64)> {
        if busy.is_empty() || !space.process().is_some_and(|process| process.has_merged_pages()) {
            return busy;
        }
        self.merged.merging.insert(space.id.0);
        let mut pages: Vec<PageId> = busy.iter().map(|&(page, _)| page).collect();
        pages.sort_unstable();
        let others = self.leave_merged(space, &pages);
        busy.into_iter().filter(|(page, _)| others.binary_search(page).is_ok()).collect()
    }

    /// What is left of the budget would be used up if all that is merged were written.
    pub(super) fn may_unmerge_beyond(&self) -> bool {
        let saved = lock(&self.tenant.usage).merged_saved_bytes;
        (saved / PAGE) as i64 > self.tenant.headroom_pages().max(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_aside_has_its_turn() {
        let mut aside = Aside::default();
        let pages: Vec<_> = (0..30).map(|leaf| PageId::new(LeafIndex(leaf * 3), 7)).collect();
        for &page in &pages {
            aside.put(page, true);
            aside.put(page, true);
        }
        assert_eq!(aside.pages, 30);
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.extend(aside.turn().into_iter().flat_map(|leaf| aside.of(leaf)));
        }
        assert_eq!(seen, pages);
        assert_eq!(aside.turn()[0], LeafIndex(0), "and again");
        aside.put(pages[0], false);
        aside.put(pages[0], false);
        assert!(!aside.has(pages[0]) && aside.has(pages[1]) && aside.pages == 29);
        assert_eq!(aside.leaves.len(), 29, "what is empty costs nothing");
    }
}
