//! The newest snapshot of each tenant is kept ready: whoever is restored from it, or is a
//! clone of it and a guest, does not wait for a page map.

use std::io;
use std::sync::{Arc, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use strata_pager::Tenant;
use strata_sys::thread_time;
use strata_units::SpaceId;

use super::{Snapshots, lock};

/// Something else is being done with a tenant: when to look again.
const BUSY: Duration = Duration::from_millis(100);
/// How many times as long as it took nothing is made ready: whoever takes snapshots of
/// much memory all the time shall not pay for each.
const PAUSE: u32 = 20;

/// Keeps them ready from now on.
pub(crate) fn start(snapshots: &Arc<Snapshots>) -> io::Result<()> {
    let snapshots = Arc::clone(snapshots);
    Builder::new().name("ready".into()).spawn(move || {
        loop {
            let due = lock(&snapshots.ready_due);
            let waited = snapshots.ready_changed.wait_while(due, |due| !*due);
            *waited.unwrap_or_else(PoisonError::into_inner) = false;
            let before = thread_time();
            while !snapshots.make_ready() {
                std::thread::sleep(BUSY);
            }
            std::thread::sleep((thread_time() - before) * PAUSE);
        }
    })?;
    Ok(())
}

impl Snapshots {
    /// A snapshot came, went, or was restored.
    pub(super) fn ready_is_due(&self) {
        *lock(&self.ready_due) = true;
        self.ready_changed.notify_one();
    }

    /// `false`: not all, for something is being done with some.
    fn make_ready(&self) -> bool {
        let mut tenants = self.tenants.list();
        tenants.retain(|tenant| {
            tenant.record().uid == self.uid && !tenant.snapshot_memories().is_empty()
        });
        let mut all = true;
        for tenant in tenants {
            let turn = self.turn_now(&tenant.record().name);
            if turn.is_some() {
                // Where there is no room, whoever restores it is told so.
                let _ = tenant.keep_ready(&self.newest_memories(&tenant));
            }
            all &= turn.is_some();
        }
        all
    }

    fn newest_memories(&self, tenant: &Tenant) -> Vec<SpaceId> {
        let known = lock(&self.known);
        let own = known
            .values()
            .filter(|known| known.info.tenant == tenant.record().name && known.is_in_memory());
        let newest = own.max_by(|a, b| a.info.taken.total_cmp(&b.info.taken));
        // A guest's first is its memory; beside it is what it has swapped.
        let count = newest.map_or(0, |known| match known.guest {
            Some(_) => 1,
            None => known.processes.len(),
        });
        let processes = newest.into_iter().flat_map(|known| &known.processes).take(count);
        processes.filter_map(|process| process.memory.map(SpaceId)).collect()
    }
}
