//! The node tier: pages that are in place and not in DRAM, on a node without
//! processors (CXL, persistent memory as RAM).
//!
//! Moving a page there and back is the kernel's `move_pages`: the program does not
//! notice, and whatever it answers no byte can be lost. What is kept here is an
//! account: which pages are believed to be there ([`Entry::OnNode`]). The kernel
//! moves pages too (its balancing, its demotion, a write after a fork), so what was
//! moved is looked for once more within ten seconds, and all of it now and then.
//! Which pages go is the policy's choice, when is the keeper's
//! (`crate::keeper::node`).

mod locked;
pub(crate) mod watching;

#[cfg(test)]
mod node_tests;
#[cfg(test)]
mod watching_tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_sys::{
    NodeRefusal, PagePlace, divide_huge_pages, find_pages, memory_node, move_pages, thread_time,
};
use strata_units::{PAGE, PageId};

use self::locked::{LockedSpace, in_place};
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::registry::NodeSpec;
use crate::tenant::Tenant;
use crate::tenant::space::{Agent, Space};

/// Pages of one call: the kernel prepares each call at length, and holds locks of
/// the process while it moves.
pub(crate) const MOVED_AT_ONCE: usize = 512;
/// How often a page that the kernel is busy with is tried when all must come back.
const EMPTYING_ROUNDS: usize = 3;
/// A page that is found elsewhere so soon was moved by somebody who disagrees...
const OPPOSED_WITHIN: Duration = Duration::from_secs(10);
/// ...it is looked for a little earlier...
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(9);
/// ...and left alone for so long.
const ALONE_FOR: Duration = Duration::from_secs(60);
/// Pages of which it is remembered that they were moved, or that they are to be
/// left alone. Of more, some are looked at later and not counted.
const MOST_REMEMBERED: usize = 1 << 15;
/// After a refusal that holds for all pages nothing is tried for so long.
const REFUSED_FOR: Duration = Duration::from_secs(10);
/// Of a node so much stays free (a part of it, and bytes at most): the kernel
/// itself, and other tenants, find some.
const SPARE_PART: u64 = 64;
const SPARE_MOST_BYTES: u64 = 64 << 20;
/// Time whose bandwidth can be saved up.
const SAVED_UP: Duration = Duration::from_millis(250);

/// Who moves pages: the kernel, or a test.
pub(crate) trait Mover: Send {
    /// See [`strata_sys::divide_huge_pages`].
    fn divide(&mut self, process: &Agent, addresses: &[u64]);
    /// See [`strata_sys::move_pages`].
    fn move_to(
        &mut self,
        process: &Agent,
        addresses: &[u64],
        node: u32,
    ) -> Result<Vec<PagePlace>, NodeRefusal>;
    /// See [`strata_sys::find_pages`].
    fn find(&mut self, process: &Agent, addresses: &[u64]) -> Result<Vec<PagePlace>, NodeRefusal>;
    /// All memory of a node and what is free of it; None: it is not there.
    fn room(&mut self, node: u32) -> Option<(u64, u64)>;
}

/// The kernel.
pub(crate) struct Kernel;

impl Mover for Kernel {
    fn divide(&mut self, process: &Agent, addresses: &[u64]) {
        divide_huge_pages(process.process.pidfd(), addresses);
    }

    fn move_to(
        &mut self,
        process: &Agent,
        addresses: &[u64],
        node: u32,
    ) -> Result<Vec<PagePlace>, NodeRefusal> {
        // Should its number be a stranger's before the second look: their pages have been
        // moved to a node, which changes nothing that they hold.
        process
            .process
            .by_number(|pid| move_pages(pid, addresses, node))
            .unwrap_or(Err(NodeRefusal::Gone))
    }

    fn find(&mut self, process: &Agent, addresses: &[u64]) -> Result<Vec<PagePlace>, NodeRefusal> {
        process
            .process
            .by_number(|pid| find_pages(pid, addresses))
            .unwrap_or(Err(NodeRefusal::Gone))
    }

    fn room(&mut self, node: u32) -> Option<(u64, u64)> {
        memory_node(node).map(|node| (node.total_bytes, node.free_bytes))
    }
}

/// Bandwidth that was not used yet.
#[derive(Debug)]
struct Purse {
    bytes: u64,
    filled: Instant,
}

impl Purse {
    fn fill(&mut self, bytes_per_second: u64, now: Instant) {
        let passed = now.saturating_duration_since(self.filled);
        let earned = u128::from(bytes_per_second) * passed.as_micros() / 1_000_000;
        let most = u128::from(bytes_per_second) * SAVED_UP.as_micros() / 1_000_000;
        // One batch fits however narrow it is.
        let most = (most as u64).max(MOVED_AT_ONCE as u64 * PAGE);
        self.bytes = self.bytes.saturating_add(earned as u64).min(most);
        self.filled = now;
    }

    fn spend(&mut self, pages: usize) {
        self.bytes = self.bytes.saturating_sub(pages as u64 * PAGE);
    }
}

/// A batch that was moved.
struct Batch {
    moved: Instant,
    space: Arc<Space>,
    /// In order.
    pages: Vec<PageId>,
}

/// One keeper's view of the node. See the module's text.
pub(crate) struct NodeTier {
    pub(crate) spec: NodeSpec,
    mover: Box<dyn Mover>,
    purse: Purse,
    /// Bytes of the node that may be taken, as of the last look.
    free_bytes: u64,
    refused: Option<Instant>,
    /// What was moved of late, the oldest first; the first ones have been looked at
    /// again.
    batches: VecDeque<Batch>,
    looked_at: usize,
    batched_pages: usize,
    /// Pages to leave alone, and until when.
    alone: BTreeMap<PageId, Instant>,
}

impl NodeTier {
    pub(crate) fn new(spec: NodeSpec, mover: Box<dyn Mover>, now: Instant) -> Self {
        Self {
            spec,
            mover,
            purse: Purse { bytes: 0, filled: now },
            free_bytes: 0,
            refused: None,
            batches: VecDeque::new(),
            looked_at: 0,
            batched_pages: 0,
            alone: BTreeMap::new(),
        }
    }

    /// What this costs: bounded, and counted in the budget.
    pub(crate) fn memory_bytes(&self) -> usize {
        const EACH: usize = size_of::<(PageId, Instant)>() * 3 / 2;
        self.alone.len() * EACH + self.batched_pages * size_of::<PageId>()
    }

    /// Looks what the node has left, and tells the user when there is none.
    pub(crate) fn look(&mut self, tenant: &Tenant, now: Instant) {
        self.purse.fill(self.spec.bytes_per_second, now);
        let room = self.mover.room(self.spec.node);
        self.free_bytes = room.map_or(0, |(total, free)| {
            free.saturating_sub((total / SPARE_PART).min(SPARE_MOST_BYTES))
        });
        if self.refused.is_some_and(|since| now.duration_since(since) >= REFUSED_FOR) {
            self.refused = None;
        }
        let gone = room.is_none_or(|(total, _)| total == 0);
        let node = self.spec.node;
        let text = || format!("node {node} is not online: cold pages go to compressed memory");
        tenant.note("node offline", gone.then(text));
        if self.refused.is_none() {
            tenant.note("node", None);
        }
        self.alone.retain(|_, until| *until > now);
        let is_over = |batch: &Batch| now.duration_since(batch.moved) >= OPPOSED_WITHIN;
        while self.looked_at > 0 && self.batches.front().is_some_and(is_over) {
            self.looked_at -= 1;
            let Some(batch) = self.batches.pop_front() else { return };
            self.batched_pages -= batch.pages.len();
        }
    }

    /// Pages that may be moved there now: within the tenant's limit, the node's free
    /// memory and the bandwidth.
    pub(crate) fn room_pages(&self, tenant: &Tenant) -> u64 {
        self.space_pages(tenant).min(self.purse.bytes / PAGE)
    }

    /// The same, whatever the bandwidth.
    pub(crate) fn space_pages(&self, tenant: &Tenant) -> u64 {
        if self.refused.is_some() {
            return 0;
        }
        let left = (self.spec.limit_bytes / PAGE).saturating_sub(tenant.node_pages());
        left.min(self.free_bytes / PAGE)
    }

    /// Pages that bandwidth allows to be moved now.
    pub(crate) fn affordable_pages(&self) -> usize {
        if self.refused.is_some() { 0 } else { (self.purse.bytes / PAGE) as usize }
    }

    /// Moves pages of `space` from DRAM to the node, as many as there is room for;
    /// returns those that stay where they are.
    pub(crate) fn demote(
        &mut self,
        tenant: &Tenant,
        space: &Arc<Space>,
        pages: &[PageId],
        now: Instant,
    ) -> Vec<PageId> {
        let began = thread_time();
        let mut stay = Vec::new();
        for batch in pages.chunks(MOVED_AT_ONCE) {
            let room = self.room_pages(tenant).min(batch.len() as u64) as usize;
            let (batch, rest) = batch.split_at(room);
            let (alone, batch): (Vec<_>, Vec<_>) =
                batch.iter().copied().partition(|page| self.alone.contains_key(page));
            stay.extend(alone);
            let moved = self.move_batch(tenant, space, &batch, self.spec.node, now);
            // What moved is a part of the batch, in its order.
            let mut next = moved.iter().peekable();
            stay.extend(batch.iter().filter(|page| next.next_if_eq(page).is_none()));
            stay.extend(rest);
            self.free_bytes = self.free_bytes.saturating_sub(moved.len() as u64 * PAGE);
            tenant.counters.add(Counter::NodeDemotions, moved.len() as u64);
        }
        count_time(tenant, began);
        stay
    }

    /// Moves pages of `space` from the node to DRAM; how many came.
    pub(crate) fn promote(
        &mut self,
        tenant: &Tenant,
        space: &Arc<Space>,
        pages: &[PageId],
        now: Instant,
    ) -> usize {
        let began = thread_time();
        let mut came = 0;
        for batch in pages.chunks(MOVED_AT_ONCE) {
            let mut batch = batch.to_vec();
            batch.retain(|page| !self.alone.contains_key(page));
            batch.truncate(self.affordable_pages());
            came += self.move_batch(tenant, space, &batch, self.spec.home, now).len();
        }
        tenant.counters.add(Counter::NodePromotions, came as u64);
        count_time(tenant, began);
        came
    }

    /// Brings back what of `pages` is on the node: whatever the account says, whoever
    /// has opposed it, and as fast as that goes. Nobody will do it later.
    pub(crate) fn empty(
        &mut self,
        tenant: &Tenant,
        space: &Arc<Space>,
        pages: &[PageId],
        now: Instant,
    ) {
        self.verify(tenant, space, pages, now);
        self.alone.clear();
        // The kernel is busy with some for a moment.
        for _ in 0..EMPTYING_ROUNDS {
            let is_there = |page: &PageId| tenant.map.get(*page) == Entry::OnNode;
            let left: Vec<PageId> = pages.iter().copied().filter(is_there).collect();
            if left.is_empty() {
                break;
            }
            self.purse.bytes = u64::MAX;
            self.promote(tenant, space, &left, now);
        }
    }

    /// Moves pages that are not on `to`; returns those that are now, in order.
    fn move_batch(
        &mut self,
        tenant: &Tenant,
        space: &Arc<Space>,
        batch: &[PageId],
        to: u32,
        now: Instant,
    ) -> Vec<PageId> {
        let demotes = to == self.spec.node;
        let is_there =
            |entry: Entry| if demotes { entry.is_own_dram() } else { entry == Entry::OnNode };
        let (pages, addresses) = in_place(tenant, space, batch, is_there);
        let Some(process) = living(space).filter(|_| !pages.is_empty()) else { return Vec::new() };
        // The kernel would move a huge page whole, and nobody had asked for the rest. In
        // every batch: it makes huge pages of small ones again, and cannot divide all.
        self.mover.divide(&process, &addresses);
        // Without the gate: the process may discard, move or unmap any of it, and a
        // fault is served meanwhile. What holds then is looked up again below.
        let places = match self.mover.move_to(&process, &addresses, to) {
            Ok(places) => places,
            Err(refusal) => {
                self.was_refused(tenant, refusal, now);
                return Vec::new();
            }
        };
        self.purse.spend(pages.len());
        let mut moved = Vec::with_capacity(pages.len());
        let mut locked = LockedSpace::open(tenant, space);
        for ((&page, &address), place) in pages.iter().zip(&addresses).zip(places) {
            let entry = tenant.map.get(page);
            if place == PagePlace::Node(to)
                && is_there(entry)
                && locked.address(page) == Some(address)
                && locked.settle(page, entry, demotes)
            {
                moved.push(page);
            }
        }
        drop(locked);
        self.remember(space, &moved, now);
        moved
    }

    fn was_refused(&mut self, tenant: &Tenant, refusal: NodeRefusal, now: Instant) {
        let node = self.spec.node;
        let why = match refusal {
            // Its keeper will see.
            NodeRefusal::Gone => return,
            NodeRefusal::Forbidden => {
                "stratad may not move pages of its processes (CAP_SYS_PTRACE)".to_owned()
            }
            NodeRefusal::NoNode => {
                format!("node {node} is not there, or its processes may not use it (cpuset)")
            }
            NodeRefusal::Unable => "the kernel moves no pages".to_owned(),
        };
        self.refused = Some(now);
        tenant.note("node", Some(format!("{why}: cold pages go to compressed memory")));
    }

    fn remember(&mut self, space: &Arc<Space>, moved: &[PageId], now: Instant) {
        if moved.is_empty() || self.batched_pages + moved.len() > MOST_REMEMBERED {
            return;
        }
        self.batched_pages += moved.len();
        let mut pages = moved.to_vec();
        pages.sort_unstable();
        self.batches.push_back(Batch { moved: now, space: Arc::clone(space), pages });
    }

    /// Looks once more for what was moved nine seconds ago; at most one batch.
    pub(crate) fn look_again(&mut self, tenant: &Tenant, now: Instant) -> bool {
        let is_due = |batch: &&Batch| now.duration_since(batch.moved) >= LOOK_AGAIN_AFTER;
        let Some(batch) = self.batches.get(self.looked_at).filter(is_due) else { return false };
        self.looked_at += 1;
        let (space, pages) = (Arc::clone(&batch.space), batch.pages.clone());
        self.verify(tenant, &space, &pages, now);
        true
    }

    /// Looks where pages are, and puts the account right.
    pub(crate) fn verify(
        &mut self,
        tenant: &Tenant,
        space: &Arc<Space>,
        pages: &[PageId],
        now: Instant,
    ) {
        let any = |entry: Entry| entry.is_own_dram() || entry == Entry::OnNode;
        for batch in pages.chunks(MOVED_AT_ONCE) {
            let (pages, addresses) = in_place(tenant, space, batch, any);
            let Some(process) = living(space).filter(|_| !pages.is_empty()) else { continue };
            let Ok(places) = self.mover.find(&process, &addresses) else { continue };
            let mut locked = LockedSpace::open(tenant, space);
            for ((&page, &address), place) in pages.iter().zip(&addresses).zip(places) {
                let entry = tenant.map.get(page);
                let is_there = place == PagePlace::Node(self.spec.node);
                let wrong = if is_there { entry.is_own_dram() } else { entry == Entry::OnNode };
                // One that is nowhere was discarded, not moved.
                if wrong
                    && locked.address(page) == Some(address)
                    && locked.settle(page, entry, is_there)
                    && place != PagePlace::Absent
                    && self.forget_move(page, now)
                {
                    tenant.counters.add(Counter::OpposedMoves, 1);
                    if self.alone.len() < MOST_REMEMBERED {
                        self.alone.insert(page, now + ALONE_FOR);
                    }
                }
            }
        }
    }

    /// Whether we moved the page within ten seconds; asked once for each move.
    fn forget_move(&mut self, page: PageId, now: Instant) -> bool {
        let mut lately = false;
        for batch in &mut self.batches {
            if let Ok(at) = batch.pages.binary_search(&page) {
                batch.pages.remove(at);
                self.batched_pages -= 1;
                lately |= now.duration_since(batch.moved) < OPPOSED_WITHIN;
            }
        }
        lately
    }
}

fn count_time(tenant: &Tenant, began: Duration) {
    let spent = thread_time().saturating_sub(began);
    tenant.counters.add(Counter::NodeMoveNanoseconds, spent.as_nanos() as u64);
}

/// The process, if it has not ended: another could have its number by now.
fn living(space: &Space) -> Option<Arc<Agent>> {
    space.agent().filter(|agent| !space.is_gone() && !agent.process.has_exited())
}
