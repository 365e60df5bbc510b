//! What a tenant costs, measured. Reads only what the kernel answers at once.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

use strata_sys::anonymous_rss;
use strata_units::PAGE_SIZE;

use crate::tenant::Tenant;

/// A tenant's DRAM, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Anonymous memory of all its processes in DRAM, a shared page once.
    pub anonymous_bytes: u64,
    /// The same on the node: no DRAM.
    pub node_bytes: u64,
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
        self.anonymous_bytes + self.stored_bytes + self.metadata_bytes
    }
}

fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?;
        rest.trim_start_matches(':').trim().split_ascii_whitespace().next()?.parse().ok()
    })
}

/// Anonymous memory charged to a cgroup and those below it.
fn cgroup_anonymous(directory: &str) -> Option<u64> {
    let text = fs::read_to_string(Path::new(directory).join("memory.stat")).ok()?;
    // v1 says total_rss, v2 says anon.
    field(&text, "total_rss ").or_else(|| field(&text, "anon "))
}

/// Anonymous memory of one process, shared pages in proportion.
fn proportional_anonymous(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    field(&text, "Pss_Anon").map(|kib| kib << 10)
}

/// Whether a process has huge pages. Walks its page table.
pub(crate) fn has_huge_pages(pid: u32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    field(&text, "AnonHugePages").is_some_and(|kib| kib > 0)
}

/// Measures. A lone process is asked itself; several are asked through their
/// cgroup, which counts a shared page once, or one by one, in proportion.
pub(crate) fn measure(tenant: &Tenant, policy_bytes: u64) -> Usage {
    let spaces = tenant.space_list();
    let pids: Vec<u32> = spaces.iter().filter_map(|space| space.pid()).collect();
    let anonymous_bytes = match (pids.as_slice(), &tenant.record.cgroup) {
        ([], _) => 0,
        ([pid], _) if spaces.len() == 1 => anonymous_rss(*pid).unwrap_or(0),
        // What is being taken down is charged there, too.
        (_, Some(directory))
            if tenant.memory_held.load(Ordering::Relaxed) == 0
                && let Some(bytes) = cgroup_anonymous(directory) =>
        {
            bytes
        }
        (pids, _) => pids.iter().filter_map(|&pid| proportional_anonymous(pid)).sum(),
    };
    let node_bytes = (tenant.node_pages() * PAGE_SIZE as u64).min(anonymous_bytes);
    let store = tenant.store_stats();
    let copied_bytes: u64 = spaces.iter().map(|space| space.copied_bytes()).sum();
    Usage {
        anonymous_bytes: anonymous_bytes - node_bytes,
        node_bytes,
        stored_bytes: store.dram_bytes + copied_bytes,
        staged_bytes: store.staged_bytes + copied_bytes,
        metadata_bytes: tenant.leaf_count() * crate::page_map::LEAF_BYTES
            + store.metadata_bytes
            + policy_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_in_both_styles() {
        assert_eq!(field("cache 1\ntotal_rss 4096\n", "total_rss "), Some(4096));
        assert_eq!(field("Rss: 12 kB\nPss_Anon:      34 kB\n", "Pss_Anon"), Some(34));
        assert_eq!(field("anon 77\n", "total_rss "), None);
        assert!(proportional_anonymous(std::process::id()).is_some_and(|bytes| bytes > 0));
    }
}
