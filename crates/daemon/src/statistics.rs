//! One tenant's figures, as the command line and the metrics show them.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use strata_api::{
    Latency, Pressure, Stall, Stats, TenantState, TierStats, Unattended, UnmanagedBy,
};
use strata_pager::{
    Counter, Latencies, SURVEY_PATIENCE, Stalled, StoreStats, Survey, Tenant, Unmanaged,
};
use strata_policy::order::Lower;
use strata_units::PAGE_SIZE;

use crate::tenants::Tenants;

/// All tenants, by name.
pub(crate) fn all(tenants: &Tenants) -> Vec<Stats> {
    let tenants = tenants.list();
    tenants.iter().for_each(|tenant| tenant.ask_for_survey());
    let by = Instant::now() + SURVEY_PATIENCE;
    tenants.iter().map(|tenant| by_then(tenant, by)).collect()
}

/// One tenant.
pub(crate) fn of(tenant: &Tenant) -> Stats {
    by_then(tenant, Instant::now() + SURVEY_PATIENCE)
}

/// One tenant, with what is known by then of what it has unmanaged.
pub(crate) fn by_then(tenant: &Tenant, by: Instant) -> Stats {
    let record = tenant.record();
    let survey = tenant.surveyed(by);
    let usage = tenant.usage();
    let store = tenant.store_stats();
    let (resident_pages, managed_pages) = tenant.pages();
    let in_space_bytes = usage.in_space_bytes(resident_pages * PAGE_SIZE as u64);
    let count = |counter| tenant.counters.get(counter);
    let [p50, p99, p999] = tenant.counters.latency_us(Latencies::All, [0.5, 0.99, 0.999]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    Stats {
        name: record.name.clone(),
        pids: tenant.pids(),
        uid: record.uid,
        group: record.group.clone(),
        libraries: tenant.libraries().into_iter().map(library).collect(),
        command: record.command.clone(),
        state: state(tenant),
        budget_bytes: tenant.budget_bytes(),
        resident_bytes: in_space_bytes + store.staged_bytes,
        staged_bytes: store.staged_bytes,
        pinned_bytes: tenant.pinned_bytes(),
        unmanaged_bytes: usage.anonymous_bytes - in_space_bytes,
        unmanaged_by: unmanaged_by(&survey),
        unattended_processes: survey.unattended_processes as u64,
        unattended: survey.unattended.into_iter().map(unattended).collect(),
        shared_bytes: usage.shared_bytes,
        swap_bytes: usage.swap_bytes,
        stored_bytes: store.stored_bytes.saturating_sub(tenant.kept_pages() * PAGE_SIZE as u64),
        kept_bytes: tenant.kept_pages() * PAGE_SIZE as u64,
        compressed_bytes: store.dram_bytes.saturating_sub(store.staged_bytes),
        file_bytes: store.file_bytes,
        node_bytes: usage.node_bytes,
        merged_bytes: usage.merged_bytes,
        merged_saved_bytes: usage.merged_saved_bytes,
        metadata_bytes: usage.metadata_bytes,
        managed_pages,
        stored_objects: store.objects,
        deduplicated_pages: store.deduplicated_pages,
        zero_pages: store.fill_pages,
        snapshot_file_bytes: store.filed_pages * PAGE_SIZE as u64,
        faults_total: count(Counter::Faults),
        soft_faults_total: count(Counter::SoftFaults),
        file_faults_total: count(Counter::FileFaults),
        zero_faults_total: count(Counter::ZeroFaults),
        prefetched_pages_total: count(Counter::PagesAhead),
        evictions_total: count(Counter::Evictions),
        evictions_unchanged_total: count(Counter::EvictionsUnchanged),
        evictions_refused_total: count(Counter::EvictionsRefused),
        discarded_pages_total: count(Counter::Discards),
        lost_pages_total: count(Counter::LostPages),
        opposed_moves_total: count(Counter::OpposedMoves),
        damon_promotions_total: count(Counter::DamonPromotions),
        node_move_us_total: count(Counter::NodeMoveNanoseconds) / 1000,
        stall: stall(tenant),
        fault_latency_us: Latency { p50, p99, p999 },
        tiers: tiers(tenant, &store),
        worker_restarts_total: count(Counter::WorkerRestarts),
        uptime_seconds: (now - record.started).max(0.0),
        advice: crate::advice::brief(tenant),
        guest: None,
        notes: tenant.notes(),
    }
}

fn stall(tenant: &Tenant) -> Stall {
    let Stalled { some_ns, full_ns, some, full } = tenant.stalled();
    let pressure = |total_ns: u64, parts: [f64; 3]| {
        // Two digits behind the point, as the kernel has them.
        let [avg10, avg60, avg300] = parts.map(|part| (part * 10_000.0).round() / 100.0);
        Pressure { avg10, avg60, avg300, total_us: total_ns / 1000 }
    };
    Stall { some: pressure(some_ns, some), full: pressure(full_ns, full) }
}

fn unmanaged_by(survey: &Survey) -> UnmanagedBy {
    let Unmanaged {
        untouched_bytes,
        small_bytes,
        stacks_bytes,
        executable_bytes,
        files_bytes,
        unattended_bytes,
    } = survey.unmanaged;
    UnmanagedBy {
        untouched_bytes,
        small_bytes,
        stacks_bytes,
        executable_bytes,
        files_bytes,
        unattended_bytes,
    }
}

/// A version as it is written.
fn library(number: u64) -> String {
    match number {
        0 => "older".to_owned(),
        _ => format!("{}.{}.{}", number >> 32, number >> 16 & 0xffff, number & 0xffff),
    }
}

fn unattended(one: strata_pager::Unattended) -> Unattended {
    let strata_pager::Unattended { pid, name, bytes, why } = one;
    Unattended { pid, name, bytes, reason: why.to_owned() }
}

fn tiers(tenant: &Tenant, store: &StoreStats) -> Vec<TierStats> {
    let count = |counter| tenant.counters.get(counter);
    let tier = |tier: &str, latencies| {
        let [p50_us, p99_us] = tenant.counters.latency_us(latencies, [0.5, 0.99]);
        let (tier, access) = (tier.to_owned(), String::new());
        TierStats { tier, access, p50_us, p99_us, size_bytes: None, ..EMPTY }
    };
    let (resident_pages, _) = tenant.pages();
    let staged_pages = store.staged_bytes / PAGE_SIZE as u64;
    let dram = TierStats {
        size_bytes: Some(tenant.budget_bytes()),
        used_bytes: resident_pages * PAGE_SIZE as u64 + store.staged_bytes,
        pages: resident_pages + staged_pages,
        pages_in_total: count(Counter::Faults) + count(Counter::PagesAhead),
        pages_out_total: count(Counter::Evictions),
        ..tier("dram", Latencies::Staged)
    };
    let stored = count(Counter::Evictions) - count(Counter::EvictionsUnchanged);
    let record = tenant.record();
    let below = record.tier_order.tiers().into_iter().filter_map(|lower| match lower {
        Lower::Node => record.node.map(|node| TierStats {
            // Nothing faults there.
            tier: "node".to_owned(),
            access: format!("node {}", node.node),
            size_bytes: Some(node.limit_bytes),
            used_bytes: tenant.node_pages() * PAGE_SIZE as u64,
            pages: tenant.node_pages(),
            pages_in_total: count(Counter::NodeDemotions),
            pages_out_total: count(Counter::NodePromotions) + count(Counter::NodeEvictions),
            ..EMPTY
        }),
        Lower::Compressed => Some(TierStats {
            used_bytes: store.dram_bytes.saturating_sub(store.staged_bytes),
            pages: store.objects.saturating_sub(store.file_objects + staged_pages),
            pages_in_total: stored + count(Counter::Promotions),
            pages_out_total: count(Counter::FromCompressed) + count(Counter::Demotions),
            ..tier("compressed", Latencies::Compressed)
        }),
        Lower::File => record.tier.as_ref().map(|(_, limit)| TierStats {
            access: tenant.file_access().to_owned(),
            size_bytes: Some(*limit),
            used_bytes: store.file_bytes,
            pages: store.file_objects,
            pages_in_total: count(Counter::Demotions),
            pages_out_total: count(Counter::FromFile) + count(Counter::Promotions),
            ..tier("file", Latencies::File)
        }),
    });
    std::iter::once(dram).chain(below).collect()
}

const EMPTY: TierStats = TierStats {
    tier: String::new(),
    access: String::new(),
    size_bytes: None,
    used_bytes: 0,
    pages: 0,
    p50_us: 0.0,
    p99_us: 0.0,
    pages_in_total: 0,
    pages_out_total: 0,
};

fn state(tenant: &Tenant) -> TenantState {
    let (was_there, is_there) = tenant.attachment();
    if was_there && !is_there {
        TenantState::Ended
    } else if tenant.is_released() {
        TenantState::Released
    } else if tenant.is_exhausted() || tenant.usage().fixed_bytes() > tenant.budget_bytes() {
        TenantState::Exhausted
    } else if tenant.is_managed() {
        TenantState::Managed
    } else if was_there {
        TenantState::Native
    } else {
        TenantState::Starting
    }
}
