//! Which snapshots of address spaces a tenant has, and which page maps are ready for
//! those that are to be restored without waiting.

use std::collections::BTreeMap;
use std::sync::Arc;

use strata_store::Retained;
use strata_units::{LeafIndex, PAGES_PER_LEAF, PageId, SpaceId};

use crate::map::lock;
use crate::map::page_map::Piece;
use crate::tenant::Tenant;

/// A snapshot of an address space: the leaves of the page map that describe it.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) directory: BTreeMap<Piece, LeafIndex>,
}

/// The pages of a leaf that a space's snapshot has, for tests and for restoring.
pub(crate) fn pages_of(
    memory: &Memory,
) -> impl Iterator<Item = (Piece, LeafIndex, usize, PageId)> + '_ {
    memory.directory.iter().flat_map(|(&piece, &leaf)| {
        (0..PAGES_PER_LEAF).map(move |index| (piece, leaf, index, PageId::new(leaf, index)))
    })
}

/// A page map in a slot of its own.
#[derive(Debug)]
pub(crate) struct MapCopy {
    pub(crate) slot: SpaceId,
    pub(crate) directory: BTreeMap<Piece, LeafIndex>,
    pub(crate) retained: Retained,
}

/// The page map of a process that is about to be restored. Dropped, what of it was not
/// needed is forgotten.
pub struct Prepared {
    tenant: Arc<Tenant>,
    slot: SpaceId,
    directory: BTreeMap<Piece, LeafIndex>,
    taken: bool,
}

impl Prepared {
    pub(crate) fn of(tenant: &Arc<Tenant>, copied: MapCopy) -> Self {
        let MapCopy { slot, directory, .. } = copied;
        Self { tenant: Arc::clone(tenant), slot, directory, taken: false }
    }

    pub(crate) fn slot(&self) -> SpaceId {
        self.slot
    }

    /// Once.
    pub(crate) fn take_directory(&mut self) -> BTreeMap<Piece, LeafIndex> {
        std::mem::take(&mut self.directory)
    }

    /// The slot is a process's from now on.
    pub(crate) fn keep(mut self) {
        self.taken = true;
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if !self.taken {
            self.tenant.forget_slot(self.slot);
        }
    }
}

impl Tenant {
    /// A snapshot that an earlier worker took.
    pub(crate) fn know_snapshot(&self, id: SpaceId, directory: BTreeMap<Piece, LeafIndex>) {
        lock(&self.snapshots).insert(id, Arc::new(Memory { directory }));
    }

    /// Numbers of its whole snapshots of address spaces.
    #[must_use]
    pub fn snapshot_memories(&self) -> Vec<SpaceId> {
        lock(&self.snapshots).keys().copied().collect()
    }

    /// Whether it has the memory `id` of a snapshot.
    #[must_use]
    pub fn has_snapshot_memory(&self, id: SpaceId) -> bool {
        lock(&self.snapshots).contains_key(&id)
    }

    pub(crate) fn is_ready(&self, memory: SpaceId) -> bool {
        lock(&self.ready).contains_key(&memory)
    }

    /// Slots of page maps that are nobody's yet.
    pub(crate) fn ready_slots(&self) -> Vec<SpaceId> {
        lock(&self.ready).values().map(|copied| copied.slot).collect()
    }

    pub(crate) fn forget_slot(&self, slot: SpaceId) {
        self.forget_leaves(slot);
        self.registry.remove_space(slot);
    }
}
