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

/// A tenant with some of everything.
pub(crate) fn stats(name: &str) -> strata_api::Stats {
    strata_api::Stats {
        name: name.into(),
        pids: vec![10, 11],
        uid: 1000,
        command: vec!["server".into(), "--fast".into()],
        state: strata_api::TenantState::Managed,
        budget_bytes: 1 << 30,
        resident_bytes: 600 << 20,
        staged_bytes: 10 << 20,
        unmanaged_bytes: 20 << 20,
        stored_bytes: 900 << 20,
        kept_bytes: 0,
        compressed_bytes: 300 << 20,
        file_bytes: 0,
        metadata_bytes: 8 << 20,
        managed_pages: 400_000,
        stored_objects: 200_000,
        deduplicated_pages: 1000,
        zero_pages: 2000,
        faults_total: 50_000,
        soft_faults_total: 5000,
        file_faults_total: 0,
        zero_faults_total: 400_000,
        prefetched_pages_total: 0,
        evictions_total: 260_000,
        evictions_unchanged_total: 0,
        evictions_refused_total: 12,
        lost_pages_total: 0,
        fault_latency_us: strata_api::Latency { p50: 8.5, p99: 41.0, p999: 160.0 },
        worker_restarts_total: 0,
        uptime_seconds: 100.0,
        notes: vec!["a note".into()],
    }
}
