//! What was seen to be used on the node (`crate::node::watching`), and what the keeper does
//! about it: which parts are worth DRAM is the policy's (`strata_policy::warmth`); they
//! come back in place, the hottest first, as fast as budget and bandwidth allow.
//!
//! A part is coarse: cold pages come with it, and are given up again. A leaf of which
//! that happens soon is left to the probes for a while, so that nothing goes round.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_policy::budget;
use strata_policy::warmth::{Room, Watched, worth_dram};
use strata_units::{LeafIndex, PAGE, PageId};

use super::Keeper;
use crate::map::address::ids_in;
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// Pages of one look that wait to be brought back, at most; the next look finds others.
const MOST_SENSED: usize = 1 << 16;
/// Pages that are brought back at once: a few milliseconds of the keeper's.
const MOST_AT_ONCE: usize = 4096;
/// What may come in one look for which something else has to go: a part of the budget.
const EXCHANGED_PART: u64 = 16;
/// Whoever is given up so soon should not have come...
const REGRETTED: Duration = Duration::from_secs(30);
/// ...and its leaf is left alone for so long.
const ALONE_FOR: Duration = Duration::from_secs(60);
/// Leaves of which that is remembered.
const MOST_LEAVES: usize = 1 << 13;
/// What was seen all holds for so long: a look and the rest between two.
const FRESH: Duration = Duration::from_secs(20);

/// See the module's text.
#[derive(Default)]
pub(super) struct Sensed {
    /// To come, the hottest first.
    pages: VecDeque<PageId>,
    /// Leaves of which pages came, and when.
    brought: BTreeMap<LeafIndex, Instant>,
    /// Leaves to leave alone, until then.
    alone: BTreeMap<LeafIndex, Instant>,
    /// When all that the tenant has on the node was watched in one look.
    all_seen: Option<Instant>,
}

impl Sensed {
    pub(super) fn memory_bytes(&self) -> usize {
        const EACH: usize = size_of::<(LeafIndex, Instant)>() * 3 / 2;
        self.pages.capacity() * size_of::<PageId>() + (self.brought.len() + self.alone.len()) * EACH
    }

    pub(super) fn sees_all(&self, now: Instant) -> bool {
        self.all_seen.is_some_and(|seen| now.saturating_duration_since(seen) < FRESH)
    }

    /// These leave DRAM.
    pub(super) fn gave_up(&mut self, victims: &[PageId], now: Instant) {
        if self.brought.is_empty() {
            return;
        }
        for leaf in victims.iter().map(|page| page.leaf()) {
            let Some(came) = self.brought.remove(&leaf) else { continue };
            if now.saturating_duration_since(came) < REGRETTED && self.alone.len() < MOST_LEAVES {
                self.alone.insert(leaf, now + ALONE_FOR);
            }
        }
    }

    fn brought(&mut self, leaves: BTreeSet<LeafIndex>, now: Instant) {
        for leaf in leaves {
            if self.brought.len() < MOST_LEAVES {
                self.brought.insert(leaf, now);
            }
        }
    }

    fn forget(&mut self, now: Instant) {
        self.brought.retain(|_, came| now.saturating_duration_since(*came) < REGRETTED);
        self.alone.retain(|_, until| *until > now);
    }
}

impl Keeper<'_> {
    /// Judges what was seen since the last time, if anything was.
    pub(super) fn judge_sight(&mut self, spaces: &[Arc<Space>]) {
        let tenant = self.tenant;
        let Some(node) = &mut self.node else { return };
        let Some(sight) = tenant.take_sight() else { return };
        let now = Instant::now();
        node.sensed.forget(now);
        node.sensed.all_seen = sight.all.then_some(now);
        // What the last look found and that has not come is old by now.
        node.sensed.pages = VecDeque::new();
        let Some(space) = spaces.iter().find(|space| space.id == sight.space) else { return };
        let mut parts = Vec::with_capacity(sight.seen.len());
        let mut there = Vec::with_capacity(sight.seen.len());
        for seen in &sight.seen {
            let mut part = Watched { node_pages: 0, dram_pages: 0, hits: seen.hits };
            let pieces = lock(&space.gate).object.pages_in(seen.range);
            let mut pages = Vec::new();
            for (_, leaf, range) in pieces {
                let is_alone = node.sensed.alone.contains_key(&leaf);
                for (_, page) in ids_in(leaf, range) {
                    match tenant.map.get(page) {
                        Entry::OnNode if !is_alone && !tenant.is_for_node(page) => pages.push(page),
                        entry if entry.is_own_dram() => part.dram_pages += 1,
                        _ => {}
                    }
                }
            }
            part.node_pages = pages.len();
            parts.push(part);
            there.push(pages);
        }
        for part in worth_dram(&parts, room(tenant)) {
            let left = MOST_SENSED - node.sensed.pages.len();
            node.sensed.pages.extend(there[part].iter().take(left));
        }
    }

    /// Brings back up to `most` of the pages that were judged to be worth it.
    pub(super) fn bring_sensed(&mut self, most: usize, spaces: &[Arc<Space>]) {
        let tenant = self.tenant;
        let Some(node) = &mut self.node else { return };
        let most = most.min(MOST_AT_ONCE).min(node.tier.affordable_pages());
        let count = most.min(node.sensed.pages.len());
        if count == 0 {
            return;
        }
        let pages: Vec<PageId> = node.sensed.pages.drain(..count).collect();
        if node.sensed.pages.is_empty() {
            node.sensed.pages = VecDeque::new();
        }
        let leaves: BTreeSet<LeafIndex> = pages.iter().map(|page| page.leaf()).collect();
        let (came, _) = self.bring_back(pages, count, spaces);
        tenant.counters.add(Counter::DamonPromotions, came as u64);
        if let Some(node) = self.node.as_mut().filter(|_| came > 0) {
            node.sensed.brought(leaves, Instant::now());
        }
    }
}

/// What may come of a look: all that fits before anything has to be evicted, and some
/// for which something is.
fn room(tenant: &Tenant) -> Room {
    let budget = tenant.budget_bytes();
    let (_, kept_free) = budget::watermarks_bytes(budget, 0);
    let free = budget.saturating_sub(tenant.usage().total_bytes() + kept_free);
    Room {
        free_pages: (free / PAGE) as usize,
        exchanged_pages: (budget / EXCHANGED_PART / PAGE) as usize,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(leaf: u32, index: usize) -> PageId {
        PageId::new(LeafIndex(leaf), index)
    }

    #[test]
    fn what_is_given_up_soon_is_left_alone_for_a_while() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let mut sensed = Sensed::default();
        sensed.gave_up(&[page(1, 0)], now);
        assert!(sensed.alone.is_empty(), "it did not come by this");
        sensed.brought([1, 2, 3].map(LeafIndex).into(), now);
        sensed.gave_up(&[page(1, 7), page(1, 8), page(9, 0)], after(29));
        assert_eq!(sensed.alone.keys().copied().collect::<Vec<_>>(), [LeafIndex(1)]);
        sensed.gave_up(&[page(2, 7)], after(30));
        assert_eq!(sensed.alone.len(), 1, "it has stayed for long enough");
        sensed.forget(after(60));
        assert!(sensed.brought.is_empty(), "so has the third one");
        assert_eq!(sensed.alone.len(), 1);
        sensed.forget(after(29 + 60));
        assert!(sensed.alone.is_empty());
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let now = Instant::now();
        let mut sensed = Sensed::default();
        sensed.brought((0..2 * MOST_LEAVES as u32).map(LeafIndex).collect(), now);
        assert_eq!(sensed.brought.len(), MOST_LEAVES);
        let victims: Vec<PageId> = (0..2 * MOST_LEAVES as u32).map(|leaf| page(leaf, 1)).collect();
        sensed.gave_up(&victims, now);
        assert!(sensed.brought.is_empty() && sensed.alone.len() == MOST_LEAVES);
        assert!(sensed.memory_bytes() < 1 << 19);
        assert!(!sensed.sees_all(now));
        sensed.all_seen = Some(now);
        assert!(sensed.sees_all(now + Duration::from_secs(19)));
        assert!(!sensed.sees_all(now + FRESH));
    }
}
