//! What snapshots of tenants that have ended may cost.

use std::sync::Arc;

use strata_api::SnapshotState;
use strata_pager::Tenant;
use strata_units::{ByteSize, SpaceId};

use super::disk::Known;
use super::{Snapshots, lock};

impl Snapshots {
    /// What snapshots of ended tenants cost.
    fn ended_bytes(&self) -> u64 {
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
}
