//! What a tenant costs, measured. Reads only what the kernel answers at once.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_sys::Process;
use strata_units::PAGE_SIZE;

use crate::map::lock;
use crate::tenant::Tenant;

/// How often a cgroup is asked for shared memory, which is of no use to the eviction
/// that it calls for.
const SHARED_EVERY: Duration = Duration::from_millis(100);

/// A tenant's DRAM, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Anonymous memory of all its processes in DRAM, a shared page once.
    pub anonymous_bytes: u64,
    /// The same on the node: no DRAM.
    pub node_bytes: u64,
    /// Pages that the kernel has merged with equal ones, all of them...
    pub merged_bytes: u64,
    /// ...and what they do not cost, because others have them too.
    pub merged_saved_bytes: u64,
    /// Shared memory and memory files that its processes made: never managed.
    pub shared_bytes: u64,
    /// What its swap disk costs, which is not in its processes.
    pub swap_bytes: u64,
    /// Part of both that the budget is compared with. What cannot leave DRAM must not
    /// drive out everything else: that keeps an eighth.
    pub counted_shared_bytes: u64,
    /// What stored pages cost in DRAM (staged ones included).
    pub stored_bytes: u64,
    /// Part of it that is kept raw.
    pub staged_bytes: u64,
    /// Page map, object table, queues.
    pub metadata_bytes: u64,
}

impl Usage {
    /// All of it but what is on the node: what the budget is compared with.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.anonymous_bytes + self.counted_shared_bytes + self.stored_bytes + self.metadata_bytes
    }

    /// What `managed_bytes` of managed memory in place cost: merged pages their part.
    #[must_use]
    pub fn in_space_bytes(&self, managed_bytes: u64) -> u64 {
        managed_bytes.saturating_sub(self.merged_saved_bytes).min(self.anonymous_bytes)
    }

    /// Anonymous memory that is not managed, if so much is.
    #[must_use]
    pub fn unmanaged_bytes(&self, managed_bytes: u64) -> u64 {
        self.anonymous_bytes - self.in_space_bytes(managed_bytes)
    }

    /// What merged pages cost. None of it can be evicted.
    #[must_use]
    pub const fn merged_cost_bytes(&self) -> u64 {
        self.merged_bytes.saturating_sub(self.merged_saved_bytes)
    }

    /// What is never managed: shared memory, and a swap disk.
    #[must_use]
    pub const fn fixed_bytes(&self) -> u64 {
        self.shared_bytes + self.swap_bytes
    }

    /// All of it, what is never managed in full.
    #[must_use]
    pub const fn real_bytes(&self) -> u64 {
        self.total_bytes() + self.fixed_bytes() - self.counted_shared_bytes
    }
}

fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?;
        rest.trim_start_matches(':').trim().split_ascii_whitespace().next()?.parse().ok()
    })
}

/// Anonymous memory charged to a cgroup and those below it, and shared memory: each
/// page once, at whoever touched it first.
fn cgroup_memory(directory: &str) -> Option<(u64, u64)> {
    let text = fs::read_to_string(Path::new(directory).join("memory.stat")).ok()?;
    // v1 says total_rss, v2 says anon.
    let anonymous = field(&text, "total_rss ").or_else(|| field(&text, "anon "))?;
    let shared = field(&text, "total_shmem ").or_else(|| field(&text, "shmem ")).unwrap_or(0);
    Some((anonymous, shared))
}

/// What part of a budget that which is never managed may take from the rest: all but this.
const PRIVATE_PART: u64 = 8;

/// See [`Usage::counted_shared_bytes`].
fn counted(fixed_bytes: u64, budget_bytes: u64) -> u64 {
    fixed_bytes.min(budget_bytes - budget_bytes / PRIVATE_PART)
}

/// Shared memory as it was when somebody looked last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shared {
    pub(crate) bytes: u64,
    pub(crate) looked: Option<Instant>,
}

/// Shared memory of a tenant. One that has a cgroup is asked there, now and then; of
/// others the survey has summed up what their processes map.
fn shared_memory(tenant: &Tenant) -> u64 {
    let mut shared = lock(&tenant.shared);
    if let Some(directory) = &tenant.record.cgroup
        && shared.looked.is_none_or(|when| when.elapsed() >= SHARED_EVERY)
    {
        shared.looked = Some(Instant::now());
        if let Some((_, bytes)) = cgroup_memory(directory) {
            shared.bytes = bytes;
        }
    }
    shared.bytes
}

/// Shared memory of one process in proportion, where it has any to speak of.
pub(crate) fn proportional_shared(pid: u32) -> u64 {
    const LEAST_KIB: u64 = 1024;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    if field(&status, "RssShmem").unwrap_or(0) < LEAST_KIB {
        return 0;
    }
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    field(&text, "Pss_Shmem").unwrap_or(0) << 10
}

/// Anonymous memory of one process, shared pages in proportion.
pub(crate) fn proportional_anonymous(process: &Process) -> Option<u64> {
    anonymous_in(&process.read_file(c"smaps_rollup").ok()?)
}

/// The same of a process that nobody holds: to be shown and counted, by its number.
pub(crate) fn proportional_unattended(pid: u32) -> Option<u64> {
    anonymous_in(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?)
}

fn anonymous_in(text: &str) -> Option<u64> {
    field(text, "Pss_Anon").map(|kib| kib << 10)
}

/// Whether a process has huge pages. Walks its page table.
pub(crate) fn has_huge_pages(process: &Process) -> bool {
    let text = process.read_file(c"smaps_rollup").unwrap_or_default();
    field(&text, "AnonHugePages").is_some_and(|kib| kib > 0)
}

/// Measures. A lone process is asked itself; several are asked through their
/// cgroup, which counts a shared page once, or one by one, in proportion.
pub(crate) fn measure(tenant: &Tenant, policy_bytes: u64) -> Usage {
    let spaces = tenant.space_list();
    let processes: Vec<_> = spaces.iter().filter_map(|space| space.process()).collect();
    // Processes that no agent is in cost DRAM, too.
    let unattended_bytes = tenant.unattended_bytes.load(Ordering::Relaxed);
    let merged = lock(&tenant.merged).now();
    let anonymous_bytes = match (processes.as_slice(), &tenant.record.cgroup) {
        ([], _) => 0,
        // The kernel counts a merged page in full for each who maps it.
        ([one], _) if spaces.len() == 1 => {
            one.anonymous_rss().unwrap_or(0).saturating_sub(merged.saved_bytes) + unattended_bytes
        }
        // What is being taken down is charged there, too.
        (_, Some(directory))
            if tenant.memory_held.load(Ordering::Relaxed) == 0
                && let Some((bytes, _)) = cgroup_memory(directory) =>
        {
            bytes
        }
        (processes, _) => {
            let all = processes.iter().filter_map(|process| proportional_anonymous(process));
            all.sum::<u64>() + unattended_bytes
        }
    };
    let shared_bytes = if spaces.is_empty() { 0 } else { shared_memory(tenant) };
    let swap_bytes = if spaces.is_empty() { 0 } else { tenant.swap_bytes.load(Ordering::Relaxed) };
    let node_bytes = (tenant.node_pages() * PAGE_SIZE as u64).min(anonymous_bytes);
    let store = tenant.store_stats();
    let copied_bytes: u64 = spaces.iter().map(|space| space.copied_bytes()).sum();
    Usage {
        anonymous_bytes: anonymous_bytes - node_bytes,
        node_bytes,
        merged_bytes: merged.bytes,
        merged_saved_bytes: merged.saved_bytes,
        shared_bytes,
        swap_bytes,
        counted_shared_bytes: counted(shared_bytes + swap_bytes, tenant.budget_bytes()),
        stored_bytes: store.dram_bytes + copied_bytes,
        staged_bytes: store.staged_bytes + copied_bytes,
        metadata_bytes: tenant.leaf_count() * crate::map::page_map::LEAF_BYTES
            + store.metadata_bytes
            + policy_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_leaves_an_eighth_to_the_rest() {
        assert_eq!(counted(100, 800), 100);
        assert_eq!(counted(900, 800), 700);
        let usage = Usage {
            anonymous_bytes: 50,
            shared_bytes: 600,
            swap_bytes: 300,
            counted_shared_bytes: counted(900, 800),
            ..Usage::default()
        };
        assert_eq!((usage.total_bytes(), usage.real_bytes()), (750, 950));
    }

    #[test]
    fn merged_pages_count_once() {
        let usage = Usage {
            anonymous_bytes: 60,
            merged_bytes: 80,
            merged_saved_bytes: 40,
            ..Usage::default()
        };
        assert_eq!((usage.in_space_bytes(90), usage.unmanaged_bytes(90)), (50, 10));
        assert_eq!((usage.in_space_bytes(0), usage.unmanaged_bytes(0)), (0, 60));
        assert_eq!((usage.merged_cost_bytes(), usage.total_bytes()), (40, 60));
    }

    #[test]
    fn fields_are_found_in_both_styles() {
        assert_eq!(field("cache 1\ntotal_rss 4096\n", "total_rss "), Some(4096));
        assert_eq!(field("Rss: 12 kB\nPss_Anon:      34 kB\n", "Pss_Anon"), Some(34));
        assert_eq!(field("anon 77\n", "total_rss "), None);
        assert!(proportional_unattended(std::process::id()).is_some_and(|bytes| bytes > 0));
    }
}
