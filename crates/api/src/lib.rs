//! Requests, replies and statistics between `strata` and `stratad`: types only.
//!
//! One connection carries one request and its reply, each one JSON object on
//! one line of at most [`MAX_LINE_BYTES`]. The reply to a request for which
//! [`Request::shows_progress`] may be preceded by any number of [`Progress`]
//! lines, a few a second; every other request is answered by exactly one line.
//! A line is a [`Reply`] when it has a `reply` key, a [`Progress`] when it has a
//! `progress` key. The reply ends the connection; a client that hangs up before
//! it ends the waiting, not the work.
//!
//! The daemon knows its peer from the socket (`SO_PEERCRED`): a user sees and
//! commands only their own tenants and snapshots, root all of them.
#![forbid(unsafe_code)]

mod advice;
mod guest;
mod mark;
mod moves;
mod place;
mod pool;
mod request;
mod self_balloon;
mod shares;
mod snapshot;
mod stats;

pub use advice::{
    Advice, AdviceBrief, AdviceState, CurvePoint, MAX_CURVE_POINTS, NEEDED_FOR, Need,
};
pub use guest::{GuestDisk, GuestSpec, GuestStats, Identified, Identity, Launch, SwapStats};
pub use mark::{MARK_NAME, MOST_MARK_BYTES, Mark};
pub use moves::{
    FrameKind, MAX_FRAME_BYTES, MOST_MOVE_DISKS, MOVE_AT_ONCE_VERSION, MOVE_DISKS_VERSION,
    MOVE_LENT, MOVE_PROGRAM_AT_ONCE_VERSION, MOVE_SERVED_VERSION, MOVE_UNSETTLED, MOVE_VERSION,
    MoveDisk, MoveImage, MoveNear, MoveWord, read_frame, write_frame,
};
pub use place::{MAX_PLACE_PAGES, MAX_PLACE_RANGES, PlaceOutcome, PlaceWish, tier_letters};
pub use pool::{PoolAdmission, PoolStats};
pub use request::Request;
pub use self_balloon::{BalloonStats, SelfBalloon};
pub use shares::{DramClaim, TenantShare};
pub use snapshot::{
    Claim, MAX_CLONES, MAX_COPY_DIRS, MAX_FORWARDS, MAX_LABEL_BYTES, MAX_PATH_BYTES,
    MIN_SCHEDULE_SECONDS, Net, PortForward, Progress, RevivedTenant, SnapshotId, SnapshotInfo,
    SnapshotRef, SnapshotState, Tcp, Unit, Which, clone_name, label_problem,
};
pub use stats::{Latency, Pressure, Stall, Stats, TenantState, TierStats, Unattended, UnmanagedBy};

use serde::{Deserialize, Serialize};

/// Longest line that either side reads; a longer one ends the connection.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Tenants of one page of a list...
pub const MAX_LISTED: usize = 64;
/// ...and how much of each command line is in it: [`Request::Stats`] has it all.
pub const MAX_LISTED_COMMAND_BYTES: usize = 256;
/// Raised when the meaning of a message changes; the daemon refuses others.
pub const PROTOCOL_VERSION: u32 = 1;
/// Where the system daemon listens.
pub const DEFAULT_SOCKET: &str = "/run/strata/control.sock";
/// Environment variable that names another control socket.
pub const ENV_CONTROL_SOCKET: &str = "STRATA_SOCKET";
/// Where agents say hello, in a daemon's socket directory.
pub const AGENT_SOCKET_NAME: &str = "agent.sock";
/// Where those ask for pages of pools who serve guests' disks, and programs.
pub use strata_units::pool::SOCKET_NAME as POOL_SOCKET_NAME;
/// A daemon's control socket inside its socket directory.
pub use strata_units::wire::CONTROL_SOCKET_NAME;
/// Private daemons keep their sockets in directories whose names start so,
/// under `/run` or the user's runtime directory.
pub const PRIVATE_DIRECTORY_PREFIX: &str = "strata-";
/// Where a private daemon keeps its snapshots, in that directory.
pub const PRIVATE_SNAPSHOTS_NAME: &str = "snapshots";
/// What a daemon answers that takes no more tenants: a private one, with its last.
pub const ENDING: &str = "this daemon is ending";
/// The hint of a daemon that has no room for a connection just now: nothing was done, and
/// a moment later there may be.
pub const NO_ROOM_NOW: &str = "try again in a moment";
/// What a daemon answers where the caller has no tenant of this name, whoever else may.
#[must_use]
pub fn no_tenant(name: &str) -> String {
    format!("there is no tenant {name}")
}

/// Longest tenant name: it must fit in a file name and in a column.
pub const MAX_NAME_BYTES: usize = 64;

/// Why `name` cannot say which tenant is meant: a tenant's name, or `USER:NAME`, as root
/// says whose it means; None when it can.
#[must_use]
pub fn named_problem(name: &str) -> Option<&'static str> {
    let Some((user, own)) = name.split_once(':') else { return name_problem(name) };
    let plain = |b: u8| b.is_ascii_graphic() && !b"/:".contains(&b);
    if user.is_empty() || user.len() > MAX_USER_BYTES || !user.bytes().all(plain) {
        return Some("before the ':' is no user's name or number");
    }
    name_problem(own)
}

/// Longest user's name that is looked up.
const MAX_USER_BYTES: usize = 256;

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
    /// To [`Request::Guest`].
    Guest {
        /// The directory of the files that its QEMU takes for its memory, and of its
        /// monitor's socket; the caller's, empty, and removed when the tenant is gone.
        directory: String,
    },
    /// To [`Request::GuestAgain`].
    GuestAgain {
        /// The tenant's name.
        name: String,
        /// As for [`Reply::Run`].
        environment: Vec<(String, String)>,
        /// As for [`Reply::Guest`].
        directory: String,
        /// What it is, and how the first one was started. Boxed: it is large.
        guest: Box<GuestSpec>,
        /// Things the user should know.
        warnings: Vec<String>,
    },
    /// To [`Request::GuestOrder`].
    GuestOrdered {
        /// What its agent says of it, when that is done.
        identified: Identified,
    },
    /// To [`Request::List`].
    List {
        /// In order of name, command lines cut to [`MAX_LISTED_COMMAND_BYTES`].
        tenants: Vec<Stats>,
        /// There are more behind this one (its name, its user); none: these were the
        /// last.
        #[serde(default)]
        next: Option<(String, u32)>,
    },
    /// To [`Request::Stats`].
    Stats {
        /// The tenant. Boxed: it is much larger than the others.
        stats: Box<Stats>,
    },
    /// To [`Request::Advise`].
    Advice {
        /// What can be said. Boxed: it is much larger than the others.
        advice: Box<Advice>,
    },
    /// To [`Request::ShareOut`], both in the order of its curves.
    Shares {
        /// The budgets.
        budgets_bytes: Vec<u64>,
        /// What each loses by it.
        losses: Vec<f64>,
    },
    /// To [`Request::Shares`].
    HostShares {
        /// All DRAM that is shared out.
        dram_bytes: u64,
        /// What the machine has of that, if it is less.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        room_bytes: Option<u64>,
        /// Those of the caller, by owner and name.
        tenants: Vec<TenantShare>,
    },
    /// To [`Request::Snapshot`], [`Request::SnapshotSelf`],
    /// [`Request::SnapshotPersist`] and [`Request::SnapshotImport`].
    Snapshot {
        /// The snapshot as it is now. Boxed: it is much larger than the others.
        snapshot: Box<SnapshotInfo>,
        /// Things the user should know.
        warnings: Vec<String>,
    },
    /// To [`Request::SnapshotImport`] that is only to say it.
    Claims {
        /// Whose rights they were compared with; none: nobody's, for root or this
        /// daemon's user wrote it, or it is trusted.
        owner: Option<u32>,
        /// In order of the processes.
        claims: Vec<Claim>,
    },
    /// To [`Request::Snapshots`].
    Snapshots {
        /// In order of tenant and number.
        snapshots: Vec<SnapshotInfo>,
    },
    /// To [`Request::Rollback`], [`Request::Restore`] and [`Request::Clone`].
    Revived {
        /// Who came to life, in order.
        tenants: Vec<RevivedTenant>,
        /// Things the user should know (connections that were closed, say).
        warnings: Vec<String>,
    },
    /// To [`Request::Became`].
    Became {
        /// The first process of the tenant, which runs: it has taken its place.
        pid: Option<u32>,
        /// How it ended, as `wait` says it; none: this daemon does not know.
        status: Option<i32>,
    },
    /// To [`Request::Pools`].
    Pools {
        /// In order of owner and name.
        pools: Vec<PoolStats>,
    },
    /// To [`Request::Place`].
    Place {
        /// What came of it.
        outcome: PlaceOutcome,
        /// Why nothing was done; empty when it was.
        message: String,
    },
    /// To [`Request::Where`].
    Where {
        /// A letter for each page, see [`tier_letters`].
        tiers: String,
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

#[cfg(test)]
mod tests;
