//! Which snapshots of address spaces a tenant has, and which page maps are ready for
//! those that are to be restored without waiting.

use std::sync::Arc;

use strata_store::Retained;
use strata_units::SpaceId;

use crate::map::lock;
use crate::map::object::Object;
use crate::tenant::Tenant;

/// A copy of a snapshot's page map.
#[derive(Debug)]
pub(crate) struct MapCopy {
    pub(crate) object: Object,
    pub(crate) retained: Retained,
}

/// The page map of a process that is about to be restored. Dropped, what of it was not
/// needed is forgotten.
pub struct Prepared {
    tenant: Arc<Tenant>,
    object: Object,
    taken: bool,
}

impl Prepared {
    pub(crate) fn of(tenant: &Arc<Tenant>, copied: MapCopy) -> Self {
        Self { tenant: Arc::clone(tenant), object: copied.object, taken: false }
    }

    pub(crate) fn slot(&self) -> SpaceId {
        self.object.id()
    }

    /// Its pages; what is taken over from them is kept.
    pub(crate) fn object_mut(&mut self) -> &mut Object {
        &mut self.object
    }

    /// They are a process's from now on, in the slot in which they are. Once.
    pub(crate) fn take_object(&mut self) -> Object {
        let none = Object::new(self.slot());
        std::mem::replace(&mut self.object, none)
    }

    /// The slot is a process's from now on.
    pub(crate) fn keep(mut self) {
        self.taken = true;
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if !self.taken {
            self.tenant.forget_slot(self.slot());
        }
    }
}

impl Tenant {
    /// It has this snapshot of an address space.
    pub(crate) fn know_snapshot(&self, object: Object) {
        lock(&self.snapshots).insert(object.id(), Arc::new(object));
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
        lock(&self.ready).values().map(|copied| copied.object.id()).collect()
    }

    pub(crate) fn forget_slot(&self, slot: SpaceId) {
        self.forget_leaves(slot);
        self.registry.remove_space(slot);
    }
}
