//! Between a tenant and whoever can see what of its memory is used (the daemon, by
//! DAMON): which ranges of which process are worth watching, and what was seen there.
//!
//! What is worth it is what lies on the node: runs of such pages, and beside them a few
//! runs of pages in DRAM to compare them with. What comes of it is the keeper's
//! (`crate::keeper::node`).

use std::sync::Arc;

use strata_sys::Range;
use strata_units::{LeafIndex, PAGE, PAGES_PER_LEAF};

use crate::map::address::{EVERYTHING, ids_in};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::space::Space;
use crate::tenant::watching::{Seen, Sight, Watch};

/// A few pages elsewhere within a run do not end it: what is seen of it is seen of its
/// pages on the node, by far most of it.
const BRIDGED_PAGES: u64 = 4;
/// Shorter runs are not worth a range: there are probes.
const LEAST_RUN_PAGES: u64 = 4;
/// Runs in DRAM that others are compared with: so many, of so many pages at least.
const COMPARED: usize = 64;
const LEAST_COMPARED_PAGES: u64 = 16;
/// Leaves that are searched for one look.
const SEARCHED_LEAVES: usize = 1 << 14;

impl Tenant {
    /// What to watch next, in up to `most` ranges: the tenant's processes are gone
    /// round, and the memory of each. None: it has nothing on the node, or nothing that
    /// can be watched.
    #[must_use]
    pub fn next_watch(&self, most: usize) -> Option<Watch> {
        if self.is_released() || self.node_pages() == 0 {
            return None;
        }
        let begin = lock(&self.watching).next;
        let spaces = self.space_list();
        let first = begin.map_or(0, |(id, _)| spaces.partition_point(|space| space.id < id));
        let alone = spaces.len() == 1;
        // The first one again at the end, from its beginning.
        for turn in 0..=spaces.len() {
            let space = spaces.get((first + turn) % spaces.len().max(1))?;
            let from = begin.filter(|&(id, _)| turn == 0 && id == space.id).map_or(0, |at| at.1);
            let living = space.agent().filter(|a| !space.is_gone() && !a.process.has_exited());
            let Some(process) = living.map(|agent| Arc::clone(&agent.process)) else { continue };
            let (ranges, next) = self.ranges_on_node(space, from, most);
            if !ranges.is_empty() {
                lock(&self.watching).next = Some((space.id, next.unwrap_or(u64::MAX)));
                let all = alone && from == 0 && next.is_none();
                return Some(Watch { space: space.id, process, ranges, all });
            }
        }
        None
    }

    /// What was seen of it; the keeper takes it at its next look. What lies elsewhere was
    /// not asked for.
    pub fn was_watched(&self, watch: &Watch, mut seen: Vec<Seen>) {
        let (Some(first), Some(last)) = (watch.ranges.first(), watch.ranges.last()) else { return };
        seen.retain(|Seen { range, .. }| {
            first.start <= range.start && !range.is_empty() && range.end <= last.end
        });
        let sight = Sight { space: watch.space, all: watch.all, seen };
        lock(&self.watching).sight = Some(sight);
        self.wake_keeper();
    }

    pub(crate) fn take_sight(&self) -> Option<Sight> {
        lock(&self.watching).sight.take()
    }

    /// Runs of a space's pages on the node, from address `from` on, and some in DRAM;
    /// and where to go on, if that is not all.
    fn ranges_on_node(
        &self,
        space: &Arc<Space>,
        from: u64,
        most: usize,
    ) -> (Vec<Range>, Option<u64>) {
        let pieces = lock(&space.gate).object.pages_in(EVERYTHING);
        let is_there = |entry: Entry| entry == Entry::OnNode;
        let compared = COMPARED.min(most / 4);
        let (mut ranges, mut next) = (Vec::new(), None);
        let later = pieces.iter().filter(|(_, _, part)| part.start >= from);
        for (searched, &(_, leaf, part)) in later.enumerate() {
            if ranges.len() + compared >= most || searched >= SEARCHED_LEAVES {
                next = Some(part.start);
                break;
            }
            let runs = self.runs(leaf, part, BRIDGED_PAGES, is_there);
            ranges.extend(runs.into_iter().filter(|run| run.len() >= LEAST_RUN_PAGES * PAGE));
        }
        if let Some(first) = ranges.get(most - compared) {
            next = Some(first.start & !(PAGES_PER_LEAF as u64 * PAGE - 1));
            ranges.truncate(most - compared);
        }
        if ranges.is_empty() {
            return (ranges, next);
        }
        let step = pieces.len().div_ceil(compared.max(1)).max(1);
        let some = pieces.iter().step_by(step).take(compared);
        ranges.extend(some.filter_map(|&(_, leaf, part)| {
            let runs = self.runs(leaf, part, 0, Entry::is_own_dram);
            let longest = runs.into_iter().max_by_key(|run| run.len())?;
            (longest.len() >= LEAST_COMPARED_PAGES * PAGE).then_some(longest)
        }));
        ranges.sort_unstable_by_key(|range| range.start);
        (ranges, next)
    }

    /// Runs of pages in a leaf whose entries are as wanted, with up to `bridged` others
    /// within.
    fn runs(
        &self,
        leaf: LeafIndex,
        part: Range,
        bridged: u64,
        wanted: impl Fn(Entry) -> bool,
    ) -> Vec<Range> {
        let mut runs: Vec<Range> = Vec::new();
        let there = ids_in(leaf, part).filter(|&(_, page)| wanted(self.map.get(page)));
        for (address, _) in there {
            let end = address + PAGE;
            match runs.last_mut() {
                Some(run) if address - run.end <= bridged * PAGE => run.end = end,
                _ => runs.push(Range { start: address, end }),
            }
        }
        runs
    }
}

const _: () = assert!(BRIDGED_PAGES < LEAST_COMPARED_PAGES, "runs there and here do not overlap");
const _: () = assert!(PAGES_PER_LEAF as u64 / LEAST_RUN_PAGES <= 128, "a leaf is few ranges");
