//! Requests, replies and statistics between `strata` and `stratad`: types only.
//!
//! One connection carries one request and its reply, each one JSON object on
//! one line of at most [`MAX_LINE_BYTES`]. The daemon knows its peer from the
//! socket (`SO_PEERCRED`): a user sees and commands only their own tenants,
//! root all of them.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

/// Longest line that either side reads; a longer one ends the connection.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Raised when the meaning of a message changes; the daemon refuses others.
pub const PROTOCOL_VERSION: u32 = 1;
/// Where the system daemon listens.
pub const DEFAULT_SOCKET: &str = "/run/strata/control.sock";
/// Environment variable that names another control socket.
pub const ENV_CONTROL_SOCKET: &str = "STRATA_SOCKET";
/// A daemon's control socket inside its socket directory.
pub const CONTROL_SOCKET_NAME: &str = "control.sock";
/// Private daemons keep their sockets in directories whose names start so,
/// under `/run` or the user's runtime directory.
pub const PRIVATE_DIRECTORY_PREFIX: &str = "strata-";
/// Longest tenant name: it must fit in a file name and in a column.
pub const MAX_NAME_BYTES: usize = 64;

/// Why `name` cannot name a tenant; None when it can. Names become parts of
/// paths (control groups) and labels of metrics, so they are plain.
#[must_use]
pub fn name_problem(name: &str) -> Option<&'static str> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if name.is_empty() {
        Some("a name may not be empty")
    } else if name.len() > MAX_NAME_BYTES {
        Some("a name has at most 64 characters")
    } else if !name.bytes().all(plain) {
        Some("a name consists of letters, digits, '.', '_' and '-'")
    } else if name.starts_with(['.', '-']) {
        Some("a name starts with a letter, a digit or '_'")
    } else {
        None
    }
}

/// What the command line asks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Is anyone there, and who?
    Ping,
    /// Make a tenant and put the calling process into it. The process then
    /// executes the program with the environment of the reply.
    Run {
        /// The tenant's name; must be free. None: the daemon makes one of
        /// `command`.
        name: Option<String>,
        /// Its DRAM budget; none: the configuration's default.
        dram_bytes: Option<u64>,
        /// The program, for display.
        command: Vec<String>,
    },
    /// All tenants of the caller.
    List,
    /// One tenant.
    Stats {
        /// Its name.
        name: String,
    },
    /// Change a budget.
    Set {
        /// The tenant.
        name: String,
        /// The new budget.
        dram_bytes: u64,
    },
    /// Give all pages back and stop managing.
    Release {
        /// The tenant.
        name: String,
    },
    /// End the tenant's processes (SIGTERM, then SIGKILL after a grace time).
    Stop {
        /// The tenant.
        name: String,
    },
}

/// What the daemon answers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// To [`Request::Ping`].
    Pong {
        /// [`PROTOCOL_VERSION`].
        protocol: u32,
        /// The daemon's version.
        version: String,
        /// The supervisor's pid.
        pid: u32,
    },
    /// To [`Request::Run`].
    Run {
        /// The tenant's name.
        name: String,
        /// Its budget.
        dram_bytes: u64,
        /// Variables to set before executing the program.
        environment: Vec<(String, String)>,
        /// Things the user should know (no cgroup backstop, say).
        warnings: Vec<String>,
    },
    /// To [`Request::List`].
    List {
        /// In order of name.
        tenants: Vec<Stats>,
    },
    /// To [`Request::Stats`].
    Stats {
        /// The tenant. Boxed: it is much larger than the others.
        stats: Box<Stats>,
    },
    /// Done, with nothing to tell but perhaps a note.
    Done {
        /// One line for the user, or empty.
        note: String,
    },
    /// Refused or failed; nothing was changed.
    Error {
        /// What was being done, to what, and why it failed: one line.
        message: String,
        /// What the user can do; may be empty.
        hint: String,
    },
}

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
    /// What it was started with.
    pub command: Vec<String>,
    /// What it does.
    pub state: TenantState,
    /// Its budget.
    pub budget_bytes: u64,
    /// Managed pages in DRAM, staged ones included; a page that several of its
    /// processes share counts once.
    pub resident_bytes: u64,
    /// Part of `resident_bytes` that is out of the address space, kept raw.
    pub staged_bytes: u64,
    /// Anonymous memory in DRAM that Strata may not or does not yet manage.
    pub unmanaged_bytes: u64,
    /// Original size of what is stored.
    pub stored_bytes: u64,
    /// Original size of resident pages whose stored copies are kept: evicting
    /// one that was not written since costs no compression.
    pub kept_bytes: u64,
    /// What the stored pages and kept copies cost in DRAM.
    pub compressed_bytes: u64,
    /// What they cost in the file tier.
    pub file_bytes: u64,
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
    /// Stored pages that failed their checksum or could not be read back.
    pub lost_pages_total: u64,
    /// Faults, first touches apart.
    pub fault_latency_us: Latency,
    /// Times that the worker died under this tenant and was replaced.
    pub worker_restarts_total: u64,
    /// Seconds since the tenant's start.
    pub uptime_seconds: f64,
    /// What the user should know now; empty when all is well.
    pub notes: Vec<String>,
}

impl Stats {
    /// What the tenant costs in DRAM: what its budget bounds.
    #[must_use]
    pub fn dram_bytes(&self) -> u64 {
        [self.resident_bytes, self.unmanaged_bytes, self.compressed_bytes, self.metadata_bytes]
            .iter()
            .fold(0, |sum, part| sum.saturating_add(*part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_can_and_cannot_be() {
        for name in ["db", "redis-1", "a.b_c", "_x", &"n".repeat(MAX_NAME_BYTES)] {
            assert_eq!(name_problem(name), None, "{name}");
        }
        for name in ["", ".", "..", "-x", "a/b", "a b", "ä", "a\n", &"n".repeat(MAX_NAME_BYTES + 1)]
        {
            assert!(name_problem(name).is_some(), "{name:?}");
        }
    }

    #[test]
    fn requests_survive_the_wire_and_unknown_fields_do_not() {
        let request = Request::Run {
            name: Some("db".into()),
            dram_bytes: Some(1 << 30),
            command: vec!["redis-server".into()],
        };
        let line = serde_json::to_string(&request).expect("serialise");
        assert_eq!(serde_json::from_str::<Request>(&line).expect("parse"), request);
        let line = r#"{"request":"stats","name":"db","force":true}"#;
        assert!(serde_json::from_str::<Request>(line).is_err());
    }
}
