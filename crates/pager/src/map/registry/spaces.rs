//! The slots of address spaces and of snapshots of such.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use strata_sys::SharedMemory;
use strata_units::{SpaceId, TenantId};

use super::{
    BUILDING, FREE, H_SERIAL, LIVE, PROCESS_FIELDS, Registry, S_RING, S_SERIAL, S_SETTINGS,
    SNAPSHOT, SPACE_BYTES, SPACES, SPACES_AT, SPACES_LIVE_AT, SpaceAddress, SpaceField,
};

impl Registry {
    fn space_live(&self, id: SpaceId) -> &AtomicU32 {
        assert!(id.0 < SPACES, "space ids come from this registry");
        self.memory.atomic_u32(SPACES_LIVE_AT + 4 * u64::from(id.0))
    }

    fn space_at(id: SpaceId) -> u64 {
        assert!(id.0 < SPACES, "space ids come from this registry");
        SPACES_AT + u64::from(id.0) * SPACE_BYTES
    }

    /// Takes a free slot for a space that is not complete yet. None: all are
    /// taken.
    pub(crate) fn add_space(&self, tenant: TenantId, uffd: Option<RawFd>) -> Option<SpaceId> {
        let id = (0..SPACES).map(SpaceId).find(|&id| {
            self.space_live(id)
                .compare_exchange(FREE, BUILDING, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        })?;
        let at = Self::space_at(id);
        self.memory.write(at, &vec![0; SPACE_BYTES as usize]);
        let serial = self.memory.atomic_u64(H_SERIAL).fetch_add(1, Ordering::Relaxed) + 1;
        self.memory.atomic_u64(at + S_SERIAL).store(serial, Ordering::Relaxed);
        for field in PROCESS_FIELDS {
            self.set_space_fd(id, field, None);
        }
        self.set_space_fd(id, SpaceField::Control, None);
        self.set_space_fd(id, SpaceField::Socket, None);
        self.space_field(id, SpaceField::Tenant).store(tenant.0, Ordering::Relaxed);
        self.set_space_fd(id, SpaceField::Uffd, uffd);
        Some(id)
    }

    /// How many slots nobody uses.
    pub(crate) fn free_spaces(&self) -> usize {
        let is_free = |&id: &SpaceId| self.space_live(id).load(Ordering::Relaxed) == FREE;
        (0..SPACES).map(SpaceId).filter(is_free).count()
    }

    /// Tells the space or snapshot in a slot from those that had the slot before it
    /// and will have it after.
    pub(crate) fn serial_of(&self, id: SpaceId) -> u64 {
        self.memory.atomic_u64(Self::space_at(id) + S_SERIAL).load(Ordering::Relaxed)
    }

    pub(crate) fn space_goes_live(&self, id: SpaceId) {
        self.space_live(id).store(LIVE, Ordering::Release);
    }

    /// Whose space or snapshot it is.
    pub(crate) fn tenant_of(&self, id: SpaceId) -> TenantId {
        TenantId(self.space_field(id, SpaceField::Tenant).load(Ordering::Relaxed))
    }

    pub(crate) fn space_is_live(&self, id: SpaceId) -> bool {
        self.space_live(id).load(Ordering::Acquire) == LIVE
    }

    /// The slot is a whole snapshot's from now on.
    pub(crate) fn snapshot_is_whole(&self, id: SpaceId) {
        self.space_live(id).store(SNAPSHOT, Ordering::Release);
    }

    pub(crate) fn is_snapshot(&self, id: SpaceId) -> bool {
        self.space_live(id).load(Ordering::Acquire) == SNAPSHOT
    }

    pub(crate) fn remove_space(&self, id: SpaceId) {
        self.space_live(id).store(FREE, Ordering::Release);
    }

    /// Slots in use by `tenant`, complete or not.
    pub(crate) fn spaces_of(&self, tenant: TenantId) -> Vec<SpaceId> {
        (0..SPACES)
            .map(SpaceId)
            .filter(|&id| {
                self.space_live(id).load(Ordering::Acquire) != FREE
                    && self.space_field(id, SpaceField::Tenant).load(Ordering::Relaxed) == tenant.0
            })
            .collect()
    }

    pub(crate) fn space_field(&self, id: SpaceId, field: SpaceField) -> &AtomicU32 {
        self.memory.atomic_u32(Self::space_at(id) + field as u64)
    }

    pub(crate) fn space_address(&self, id: SpaceId, field: SpaceAddress) -> &AtomicU64 {
        self.memory.atomic_u64(Self::space_at(id) + field as u64)
    }

    pub(crate) fn space_fd(&self, id: SpaceId, field: SpaceField) -> Option<RawFd> {
        let fd = self.space_field(id, field).load(Ordering::Acquire) as RawFd;
        (fd >= 0).then_some(fd)
    }

    pub(crate) fn set_space_fd(&self, id: SpaceId, field: SpaceField, fd: Option<RawFd>) {
        self.space_field(id, field).store(fd.unwrap_or(-1) as u32, Ordering::Release);
    }

    /// How many settings of a space are kept, and in which bank.
    pub(crate) fn settings_word(&self, id: SpaceId) -> &AtomicU32 {
        self.memory.atomic_u32(Self::space_at(id) + S_SETTINGS)
    }

    /// The memory that a space's messages are read into, and where.
    pub(crate) fn ring(&self, id: SpaceId) -> (&SharedMemory, u64) {
        (&self.memory, Self::space_at(id) + S_RING)
    }
}
