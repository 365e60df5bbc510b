//! What snapshots of tenants that have ended may cost, and what clones leave behind.

use std::sync::Arc;

use strata_api::SnapshotState;
use strata_pager::Tenant;
use strata_units::{ByteSize, SpaceId};

use super::disk::{Known, Place};
use super::{Snapshots, lock};

impl Snapshots {
    /// What snapshots of ended tenants cost.
    pub(super) fn ended_bytes(&self) -> u64 {
        let ended = |tenant: &Arc<Tenant>| !tenant.attachment().1;
        let tenants = self.tenants.list().into_iter().filter(ended);
        tenants.map(|tenant| tenant.usage().total_bytes()).sum()
    }

    /// Refuses what would cost more while there is no room.
    pub(super) fn check_limit(&self) -> Result<(), String> {
        let bytes = self.ended_bytes();
        let limit = self.current.get().snapshot_limit;
        if bytes <= limit.0 {
            return Ok(());
        }
        Err(format!(
            "snapshots of tenants that have ended cost {}, and may cost {} (snapshot_limit): remove or persist some",
            ByteSize(bytes),
            limit
        ))
    }

    /// Lets go of the memory of a persisted snapshot whose tenant has ended, if
    /// there is too much of that: the oldest. It is read in again when it is
    /// restored.
    pub(crate) fn keep_limit(&self) {
        if self.ended_bytes() <= self.current.get().snapshot_limit.0 {
            return;
        }
        let is_on_disk = |known: &Known| {
            known.info.state == SnapshotState::Persisted
                && known.processes.iter().any(|process| process.memory.is_some())
        };
        let oldest = lock(&self.known)
            .values()
            .filter(|known| is_on_disk(known))
            .filter_map(|known| {
                Some((known.clone(), self.tenants.get(known.info.uid, &known.info.tenant)?))
            })
            .filter(|(_, tenant)| !tenant.attachment().1)
            .min_by(|(a, _), (b, _)| a.info.taken.total_cmp(&b.info.taken));
        let Some((mut known, holder)) = oldest else { return };
        // Who is busy with it may want it: the next look is soon enough.
        let Some(_turn) = self.turn_now(&known.info.tenant) else { return };
        let memories: Vec<u32> =
            known.processes.iter_mut().filter_map(|process| process.memory.take()).collect();
        // First the file, then the memory: a worker that dies in between finds
        // memory that no file names, and forgets it.
        if self.disk.write(&known).is_ok() {
            lock(&self.known).insert(known.info.id.clone(), known);
            for memory in memories {
                holder.remove_snapshot_memory(SpaceId(memory));
            }
        }
    }

    /// Removes what clones that have ended had for themselves, and nobody has
    /// since.
    pub(crate) fn remove_copies(&self) {
        self.sweep_disks();
        for name in self.disk.copied() {
            if !self.is_there(&name) && !self.is_shown(&name) {
                // What cannot be removed now is tried again when the next tenant ends.
                let _ = std::fs::remove_dir_all(self.disk.copies(&name));
            }
        }
    }

    /// Whether a tenant is there, or begins.
    pub(super) fn is_there(&self, name: &str) -> bool {
        self.own_tenant(name).is_some() || lock(&self.busy).contains(name)
    }

    /// Whether others see its copies: clones of it, or what a snapshot brings back.
    pub(super) fn is_shown(&self, name: &str) -> bool {
        let copies = self.disk.copies(name);
        let sees = |place: &Option<Place>| {
            place.iter().any(|place| place.shown.iter().any(|(copy, _)| copy.starts_with(&copies)))
        };
        lock(&self.known).values().any(|known| sees(&known.place))
            || self.tenants.list().iter().any(|tenant| sees(&self.line_of(tenant).place))
    }
}
