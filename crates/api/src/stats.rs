//! What is known of one tenant. Names and units are stable: scripts rely on them.

use serde::{Deserialize, Serialize};

use crate::{AdviceBrief, GuestStats};

/// Whether a tenant pays anything yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TenantState {
    /// No process has attached yet.
    Starting,
    /// Far from its budget: nothing is registered, native speed.
    Native,
    /// Registered; pages may be stored.
    Managed,
    /// Released: runs natively, not managed any more.
    Released,
    /// Its processes have ended; it is there for its snapshots.
    Ended,
    /// Over its budget with nothing left to evict or nowhere to store it.
    Exhausted,
}

/// Fault latency as the daemon sees it, from reading the message to the page
/// being in place, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Latency {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
}

/// One tier of a tenant's memory. Counters since the tenant's start.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TierStats {
    /// `dram`, `node`, `compressed` or `file`; more may come.
    pub tier: String,
    /// How it is reached, for people: `io_uring`, `threads`, `DAX`, which node; empty
    /// for DRAM.
    pub access: String,
    /// What it may hold; none: whatever the budget leaves it.
    pub size_bytes: Option<u64>,
    /// What the pages in it cost there.
    pub used_bytes: u64,
    /// Distinct pages in it.
    pub pages: u64,
    /// Median latency of the faults that it served; 0: none. Of `dram`, those on
    /// staged pages.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Pages that came into it.
    pub pages_in_total: u64,
    /// Pages that left it, towards the program or another tier.
    pub pages_out_total: u64,
}

/// Anonymous memory in DRAM that is not managed, by cause: bytes, as of a moment ago.
/// What is left of [`Stats::unmanaged_bytes`] is the library's own or was counted at
/// another moment.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct UnmanagedBy {
    /// May be managed, and is not registered: the tenant is far below its budget, or
    /// the memory is new.
    pub untouched_bytes: u64,
    /// In mappings that are too small.
    pub small_bytes: u64,
    /// Stacks.
    pub stacks_bytes: u64,
    /// In executable mappings: code that was made at run time.
    pub executable_bytes: u64,
    /// In private mappings of files: programs' data, `/dev/zero`, memory files.
    pub files_bytes: u64,
    /// In processes that no agent is in: see [`Stats::unattended`].
    pub unattended_bytes: u64,
}

/// A process of a tenant that no agent is in.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Unattended {
    /// Its number.
    pub pid: u32,
    /// What it executes.
    pub name: String,
    /// Its anonymous memory in DRAM, shared pages in proportion.
    pub bytes: u64,
    /// Why no agent is in it, for people.
    pub reason: String,
}

/// Shares of time in hundredths, and a sum, as in `/proc/pressure`.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Pressure {
    /// Average over 10 s.
    pub avg10: f64,
    /// Average over 60 s.
    pub avg60: f64,
    /// Average over 300 s.
    pub avg300: f64,
    /// All of it since the tenant's start, microseconds.
    pub total_us: u64,
}

/// How long a tenant has waited for pages that Strata brings.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Stall {
    /// Some thread waited.
    pub some: Pressure,
    /// Some thread waited, and none of the tenant's ran.
    pub full: Pressure,
}

/// Everything there is to know about one tenant. Sizes in bytes, counters since
/// the tenant's start.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Stats {
    /// The tenant's name.
    pub name: String,
    /// Its processes.
    pub pids: Vec<u32>,
    /// Owner's user id.
    pub uid: u32,
    /// The group whose members keep equal evicted pages once, if it is of one.
    #[serde(default)]
    pub group: Option<String>,
    /// What it was started with.
    pub command: Vec<String>,
    /// The versions of `libstrata.so` in its processes, from the oldest on: a program keeps
    /// the one that it was started with. `older`: one that does not tell.
    #[serde(default)]
    pub libraries: Vec<String>,
    /// What it does.
    pub state: TenantState,
    /// Its budget.
    pub budget_bytes: u64,
    /// Managed pages in DRAM, staged ones included; a page that several of its
    /// processes share counts once.
    pub resident_bytes: u64,
    /// Part of `resident_bytes` that is out of the address space, kept raw.
    pub staged_bytes: u64,
    /// Memory that its programs have pinned, resident or not.
    #[serde(default)]
    pub pinned_bytes: u64,
    /// Anonymous memory in DRAM that Strata may not or does not yet manage.
    pub unmanaged_bytes: u64,
    /// The same by cause.
    #[serde(default)]
    pub unmanaged_by: UnmanagedBy,
    /// Processes that no agent is in.
    #[serde(default)]
    pub unattended_processes: u64,
    /// Some of them.
    #[serde(default)]
    pub unattended: Vec<Unattended>,
    /// Shared memory and memory files in DRAM that its processes made. Never managed; it
    /// counts against the budget.
    #[serde(default)]
    pub shared_bytes: u64,
    /// Original size of what is stored.
    pub stored_bytes: u64,
    /// Original size of resident pages whose stored copies are kept: evicting
    /// one that was not written since costs no compression.
    pub kept_bytes: u64,
    /// What the stored pages and kept copies cost in DRAM.
    pub compressed_bytes: u64,
    /// What they cost in the file tier.
    pub file_bytes: u64,
    /// What is in place on the node: no DRAM.
    #[serde(default)]
    pub node_bytes: u64,
    /// Pages that the kernel has merged with equal ones (KSM), all of them. They stay
    /// where they are.
    #[serde(default)]
    pub merged_bytes: u64,
    /// Part of it that the tenant does not pay for: a page that so many processes have
    /// costs each of them that part of it.
    #[serde(default)]
    pub merged_saved_bytes: u64,
    /// Strata's own memory for this tenant: page map, object table, indexes.
    pub metadata_bytes: u64,
    /// Pages that have an entry in the page map.
    pub managed_pages: u64,
    /// Distinct pages in the store.
    pub stored_objects: u64,
    /// Pages that are stored as another reference to the same content.
    pub deduplicated_pages: u64,
    /// Stored pages that are all one value and cost no data.
    pub zero_pages: u64,
    /// Original size of what is stored and still lies in the file of a persisted snapshot,
    /// where it is read when it is asked for. It costs no DRAM.
    #[serde(default)]
    pub snapshot_file_bytes: u64,
    /// Missing-page faults served.
    pub faults_total: u64,
    /// Part of them that needed no decompression (staged or just leaving).
    pub soft_faults_total: u64,
    /// Part of them that read the file tier.
    pub file_faults_total: u64,
    /// Part of them that were first touches.
    pub zero_faults_total: u64,
    /// Pages brought back before they were asked for, for readers that go
    /// through memory in order; not counted as faults.
    pub prefetched_pages_total: u64,
    /// Pages evicted.
    pub evictions_total: u64,
    /// Part of them that the store had already, from the last time that the
    /// page was there: no compression.
    pub evictions_unchanged_total: u64,
    /// Evictions that the kernel refused (page pinned, locked or shared).
    pub evictions_refused_total: u64,
    /// Pages with content that its programs gave back: discarded memory, what a guest's
    /// balloon takes and what it reports free. Of memory that is managed by then.
    #[serde(default)]
    pub discarded_pages_total: u64,
    /// Stored pages that failed their checksum or could not be read back.
    pub lost_pages_total: u64,
    /// Pages that somebody else (the kernel's balancing or demotion) moved back from or
    /// to the node within ten seconds.
    #[serde(default)]
    pub opposed_moves_total: u64,
    /// Pages that came back from the node because DAMON, the kernel's access monitor, saw
    /// them used.
    #[serde(default)]
    pub damon_promotions_total: u64,
    /// Processor time that moving pages to the node and back took, microseconds.
    #[serde(default)]
    pub node_move_us_total: u64,
    /// How long it has waited for pages.
    #[serde(default)]
    pub stall: Stall,
    /// Faults, first touches apart.
    pub fault_latency_us: Latency,
    /// Where its pages are, fastest first.
    #[serde(default)]
    pub tiers: Vec<TierStats>,
    /// Times that the worker died under this tenant and was replaced.
    pub worker_restarts_total: u64,
    /// Seconds since the tenant's start.
    pub uptime_seconds: f64,
    /// What the advisor says, where somebody asked it in the last ten minutes.
    #[serde(default)]
    pub advice: Option<AdviceBrief>,
    /// What its swap disk costs, if it is a guest that has one.
    #[serde(default)]
    pub swap_bytes: u64,
    /// What is known of it as a virtual machine, if it is one.
    #[serde(default)]
    pub guest: Option<GuestStats>,
    /// What the user should know now; empty when all is well.
    pub notes: Vec<String>,
}

impl Stats {
    /// What the tenant costs in DRAM: what its budget bounds.
    #[must_use]
    pub fn dram_bytes(&self) -> u64 {
        let parts = [
            self.resident_bytes,
            self.unmanaged_bytes,
            self.shared_bytes,
            self.swap_bytes,
            self.compressed_bytes,
            self.metadata_bytes,
        ];
        parts.iter().fold(0, |sum, part| sum.saturating_add(*part))
    }
}
