//! What is left of processes that have ended, and of torn snapshots.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use strata_sys::Range;
use strata_units::{LeafIndex, SpaceId};

use crate::map::address::{PIECE_BYTES, ids_in};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// Leaves of a dead space that are forgotten in one round of the keeper: with a
/// big one all at once nobody would be evicted for some tenths of a second.
const FORGOTTEN_PER_ROUND: usize = 16;
/// The same for what only leaves the account: no count of references is changed.
const UNCHARGED_PER_ROUND: usize = 1024;

/// A page map that nobody needs. It keeps its slot of the registry until its leaves
/// are forgotten: a worker that finds it half forgotten buries it anew.
#[derive(Debug)]
pub(crate) struct Grave {
    slot: SpaceId,
    /// Whose descriptors are named there.
    _space: Option<Arc<Space>>,
    leaves: Vec<LeafIndex>,
    /// So many of them, from the first, still count as the tenant's DRAM.
    charged: usize,
}

/// Processes of a tenant come back to life. Until this is dropped nobody spends time
/// on what those before them have left.
pub struct Revival(Arc<Tenant>);

impl Drop for Revival {
    fn drop(&mut self) {
        self.0.revivals.fetch_sub(1, Ordering::Relaxed);
        self.0.wake_keeper();
    }
}

impl Tenant {
    /// A space's process is gone: the tenant has it no more.
    /// [`Self::forget_buried`] releases what it held.
    pub(crate) fn bury(&self, space: &Arc<Space>) {
        space.set_gone();
        let handler = lock(&space.handler).take();
        if let Some(handler) = handler {
            let _ = handler.join();
        }
        if let Some(agent) = space.agent() {
            // A reader of ours may have come to the transfer range just now, and nobody
            // answers any more: it would wait for ever, and keep the dead memory with it.
            space.uffd.unregister(agent.ranges.transfer);
        }
        lock(&self.ending_agents).extend(space.agent());
        self.forget_settings(space);
        self.bury_leaves(space.id, Some(Arc::clone(space)));
        self.spaces.write().unwrap_or_else(PoisonError::into_inner).remove(&space.id);
    }

    /// The same for a snapshot that nobody was ever offered, and nobody reads.
    pub(crate) fn bury_snapshot(&self, id: SpaceId) {
        lock(&self.snapshots).remove(&id);
        self.bury_leaves(id, None);
    }

    fn bury_leaves(&self, slot: SpaceId, space: Option<Arc<Space>>) {
        let leaves = self.leaves_of(slot);
        let charged = leaves.len();
        lock(&self.graves).push(Grave { slot, _space: space, leaves, charged });
    }

    /// See [`Revival`].
    #[must_use]
    pub fn revival(self: &Arc<Self>) -> Revival {
        self.revivals.fetch_add(1, Ordering::Relaxed);
        Revival(Arc::clone(self))
    }

    /// Forgets some of what is left of ended processes: first what others wait for,
    /// which is room in the budget. Returns whether there is more to do now.
    pub(crate) fn forget_some(&self) -> bool {
        self.uncharge_some()
            || self.revivals.load(Ordering::Relaxed) == 0 && self.forget_buried(FORGOTTEN_PER_ROUND)
    }

    /// Whether anything was still charged.
    fn uncharge_some(&self) -> bool {
        let mut graves = lock(&self.graves);
        let Some(grave) = graves.iter_mut().find(|grave| grave.charged > 0) else { return false };
        let rest = grave.charged.saturating_sub(UNCHARGED_PER_ROUND);
        grave.leaves[rest..grave.charged].iter().for_each(|&leaf| self.uncharge_leaf(leaf));
        grave.charged = rest;
        true
    }

    /// Forgets at most so many leaves of buried spaces. Returns whether there are
    /// more.
    pub(crate) fn forget_buried(&self, most_leaves: usize) -> bool {
        let mut graves = lock(&self.graves);
        let mut left = most_leaves;
        while let Some(mut grave) = graves.pop() {
            let kept = grave.leaves.len().saturating_sub(left);
            left -= grave.leaves.len() - kept;
            grave.leaves.drain(kept..).for_each(|leaf| self.forget_leaf(leaf));
            grave.charged = grave.charged.min(kept);
            if kept > 0 {
                graves.push(grave);
                return true;
            }
            self.registry.remove_space(grave.slot);
        }
        false
    }

    /// Has the keeper look for processes that have ended, and bury their spaces, at
    /// once instead of at its next round.
    pub fn look_for_ended(&self) {
        self.wake_keeper();
    }

    /// Whether a process lives whose space is gone: it is being taken down, or it has
    /// executed another program, whose agent may be about to come.
    #[must_use]
    pub fn has_ending_process(&self) -> bool {
        lock(&self.ending_agents).iter().any(|agent| !agent.process.has_exited())
    }

    /// Whether a process of it lives that is served, or that was released.
    #[must_use]
    pub fn has_living_process(&self) -> bool {
        let lives = |space: &Arc<Space>| match space.agent() {
            Some(agent) => !agent.process.has_exited(),
            None => space.uffd.is_alive(),
        };
        self.space_list().iter().any(lives) || self.has_released_process()
    }

    /// Collects processes that have ended.
    pub(crate) fn collect_ended(&self) {
        lock(&self.ending_agents).retain(|agent| {
            let ended = agent.process.has_exited();
            if ended {
                agent.process.pidfd().collect();
            }
            !ended
        });
    }

    /// Releases every page of a space.
    pub(crate) fn forget_leaves(&self, space: SpaceId) {
        self.leaves_of(space).into_iter().for_each(|leaf| self.forget_leaf(leaf));
    }

    fn leaves_of(&self, space: SpaceId) -> Vec<LeafIndex> {
        let own = |(leaf, owner, _)| (owner == space).then_some(leaf);
        self.map.leaves().into_iter().filter_map(own).collect()
    }

    fn forget_leaf(&self, leaf: LeafIndex) {
        self.prefetch_counts(leaf);
        let whole = Range { start: 0, end: PIECE_BYTES };
        for (_, page) in ids_in(leaf, whole) {
            let entry = self.map.get(page);
            if entry != Entry::Untouched {
                self.overwrite(page, entry, Entry::Untouched);
            }
        }
        self.map.give_back(leaf);
    }
}
