//! What several tests need.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory of a test's own, removed at its end.
pub(crate) struct Directory(PathBuf);

impl Directory {
    pub(crate) fn new(name: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        let name = format!("strata-cli-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("directory");
        Self(path.canonicalize().expect("it is there"))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("clean up");
    }
}

pub(crate) fn tier(tier: &str, access: &str) -> strata_api::TierStats {
    strata_api::TierStats {
        tier: tier.into(),
        access: access.into(),
        size_bytes: (tier != "compressed").then_some(1 << 30),
        used_bytes: 300 << 20,
        pages: 200_000,
        p50_us: 8.5,
        p99_us: 0.0,
        pages_in_total: 1000,
        pages_out_total: 500,
    }
}

/// A tenant with some of everything.
pub(crate) fn stats(name: &str) -> strata_api::Stats {
    strata_api::Stats {
        name: name.into(),
        pids: vec![10, 11],
        uid: 1000,
        group: None,
        libraries: vec![],
        command: vec!["server".into(), "--fast".into()],
        state: strata_api::TenantState::Managed,
        budget_bytes: 1 << 30,
        resident_bytes: 600 << 20,
        staged_bytes: 10 << 20,
        pinned_bytes: 0,
        unmanaged_bytes: 20 << 20,
        unmanaged_by: strata_api::UnmanagedBy {
            stacks_bytes: 12 << 20,
            small_bytes: 8 << 20,
            ..Default::default()
        },
        unattended_processes: 0,
        unattended: vec![],
        shared_bytes: 0,
        swap_bytes: 0,
        stored_bytes: 900 << 20,
        kept_bytes: 0,
        compressed_bytes: 300 << 20,
        file_bytes: 0,
        node_bytes: 0,
        merged_bytes: 0,
        merged_saved_bytes: 0,
        metadata_bytes: 8 << 20,
        managed_pages: 400_000,
        stored_objects: 200_000,
        deduplicated_pages: 1000,
        zero_pages: 2000,
        snapshot_file_bytes: 0,
        faults_total: 50_000,
        soft_faults_total: 5000,
        file_faults_total: 0,
        zero_faults_total: 400_000,
        prefetched_pages_total: 0,
        evictions_total: 260_000,
        evictions_unchanged_total: 0,
        evictions_refused_total: 12,
        discarded_pages_total: 5,
        lost_pages_total: 0,
        opposed_moves_total: 0,
        damon_promotions_total: 0,
        node_move_us_total: 0,
        stall: strata_api::Stall {
            some: strata_api::Pressure { avg10: 70.25, ..Default::default() },
            ..Default::default()
        },
        fault_latency_us: strata_api::Latency { p50: 8.5, p99: 41.0, p999: 160.0 },
        tiers: vec![tier("dram", ""), tier("compressed", ""), tier("file", "io_uring")],
        worker_restarts_total: 0,
        uptime_seconds: 100.0,
        advice: None,
        guest: None,
        notes: vec!["a note".into()],
    }
}

/// A snapshot called `id`, taken one second after the epoch.
pub(crate) fn snapshot(id: &str, parent: Option<&str>) -> strata_api::SnapshotInfo {
    let id: strata_api::SnapshotId = id.parse().expect("an identity");
    strata_api::SnapshotInfo {
        tenant: id.tenant.clone(),
        id,
        label: None,
        parent: parent.map(|parent| parent.parse().expect("an identity")),
        scheduled: false,
        state: strata_api::SnapshotState::Usable,
        reason: String::new(),
        taken: 1.0,
        size_unique_bytes: 1 << 20,
        size_shared_bytes: 1 << 30,
        file_bytes: 0,
        pages: 262_144,
        copied_pages: 256,
        guest: false,
        libvirt: false,
        disks: Vec::new(),
        servers: 0,
        processes: 1,
        uid: 1000,
        command: vec!["server".into()],
        budget_bytes: 1 << 30,
        freeze_us: 31_000,
        capture_us: 900_000,
    }
}
