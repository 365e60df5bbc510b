//! What restored processes ask for in their first moments.

use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use strata_api::SnapshotId;
use strata_pager::{Space, Tenant};

use super::{Snapshots, lock};

/// What they ask for in this time is remembered.
const FIRST_MOMENTS: Duration = Duration::from_secs(1);

impl Snapshots {
    /// What these processes ask for in their first moments is brought ahead when
    /// the snapshot is restored the next time. They have it so many bytes further on.
    pub(super) fn remember_touched(
        &self,
        id: &SnapshotId,
        spaces: Vec<(u32, Arc<Space>)>,
        moved: u64,
    ) {
        let (id, this) = (id.clone(), Arc::downgrade(&self.known));
        let disk = self.disk.clone();
        // Without a thread nothing is remembered.
        let _ = Builder::new().name("touched".into()).spawn(move || {
            std::thread::sleep(FIRST_MOMENTS);
            let touched = |space: &Space| {
                let all = Tenant::touched(space).into_iter();
                all.map(|address| address.wrapping_sub(moved)).collect::<Vec<_>>()
            };
            let touched: Vec<_> =
                spaces.iter().map(|(pid, space)| (*pid, touched(space))).collect();
            let Some(known) = this.upgrade() else { return };
            let mut known = lock(&known);
            let Some(known) = known.get_mut(&id) else { return };
            for (pid, touched) in touched {
                let process = known.processes.iter_mut().find(|process| process.pid == pid);
                // Brought ahead, they were not asked for: what is known stays known.
                if let Some(process) = process.filter(|process| process.touched.is_empty()) {
                    process.asked_for(touched);
                }
            }
            // For the next worker; this one knows.
            let _ = disk.write(known);
        });
    }
}
