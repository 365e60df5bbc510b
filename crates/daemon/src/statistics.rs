//! One tenant's figures, as the command line and the metrics show them.

use std::time::{SystemTime, UNIX_EPOCH};

use strata_api::{Latency, Stats, TenantState};
use strata_pager::{Counter, Tenant};
use strata_units::PAGE_SIZE;

use crate::tenants::Tenants;

/// All tenants, by name.
pub(crate) fn all(tenants: &Tenants) -> Vec<Stats> {
    tenants.list().iter().map(|tenant| of(tenant)).collect()
}

/// One tenant.
pub(crate) fn of(tenant: &Tenant) -> Stats {
    let record = tenant.record();
    let usage = tenant.usage();
    let store = tenant.store_stats();
    let (resident_pages, managed_pages) = tenant.pages();
    let in_space_bytes = (resident_pages * PAGE_SIZE as u64).min(usage.anonymous_bytes);
    let count = |counter| tenant.counters.get(counter);
    let [p50, p99, p999] = tenant.counters.latency_us([0.5, 0.99, 0.999]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    Stats {
        name: record.name.clone(),
        pids: tenant.pids(),
        uid: record.uid,
        command: record.command.clone(),
        state: state(tenant),
        budget_bytes: tenant.budget_bytes(),
        resident_bytes: in_space_bytes + store.staged_bytes,
        staged_bytes: store.staged_bytes,
        unmanaged_bytes: usage.anonymous_bytes - in_space_bytes,
        stored_bytes: store.stored_bytes.saturating_sub(tenant.kept_pages() * PAGE_SIZE as u64),
        kept_bytes: tenant.kept_pages() * PAGE_SIZE as u64,
        compressed_bytes: store.dram_bytes.saturating_sub(store.staged_bytes),
        file_bytes: store.file_bytes,
        metadata_bytes: usage.metadata_bytes,
        managed_pages,
        stored_objects: store.objects,
        deduplicated_pages: store.deduplicated_pages,
        zero_pages: store.fill_pages,
        faults_total: count(Counter::Faults),
        soft_faults_total: count(Counter::SoftFaults),
        file_faults_total: count(Counter::FileFaults),
        zero_faults_total: count(Counter::ZeroFaults),
        prefetched_pages_total: count(Counter::PagesAhead),
        evictions_total: count(Counter::Evictions),
        evictions_unchanged_total: count(Counter::EvictionsUnchanged),
        evictions_refused_total: count(Counter::EvictionsRefused),
        lost_pages_total: count(Counter::LostPages),
        fault_latency_us: Latency { p50, p99, p999 },
        worker_restarts_total: count(Counter::WorkerRestarts),
        uptime_seconds: (now - record.started).max(0.0),
        notes: tenant.notes(),
    }
}

fn state(tenant: &Tenant) -> TenantState {
    if tenant.is_released() {
        TenantState::Released
    } else if tenant.is_exhausted() {
        TenantState::Exhausted
    } else if tenant.is_managed() {
        TenantState::Managed
    } else if tenant.attachment().0 {
        TenantState::Native
    } else {
        TenantState::Starting
    }
}
