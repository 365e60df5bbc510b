//! How a process tree is restored: what the caller chooses.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use crate::terminals::Terminals;

/// A directory that the restored tree sees in another's place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shown {
    /// What is there really: the copy.
    pub copy: PathBuf,
    /// Where the tree sees it: the path at the dump.
    pub path: PathBuf,
}

/// How a tree is restored.
#[derive(Debug)]
pub struct RestoreOptions {
    /// Process numbers in a namespace of their own, as in a clone; else the old
    /// numbers, which must be free.
    pub own_pids: bool,
    /// A network of its own, with nothing but a loopback interface.
    pub own_network: bool,
    /// Directories that are seen elsewhere.
    pub shown: Vec<Shown>,
    /// Descriptors in the place of what the tree had from outsiders: what that
    /// was, as in `/proc/PID/fd` at the dump (`pipe:[7]`), and the new one.
    pub inherited: Vec<(String, OwnedFd)>,
    /// What is in the place of outsiders' terminals; where there is none, `/dev/null`.
    pub terminals: Terminals,
    /// Only to see whether it can be done, beside the original: in namespaces of its
    /// own, and up to [`Restore::next_arrival`](super::Restore::next_arrival)'s end. No
    /// content is wanted: missing pages may be filled with anything. Dropped, nothing is
    /// left.
    pub rehearsal: bool,
    /// TCP connections inside of the tree go on; nobody else may have them, as
    /// the original does on the network of a clone. Else all are closed.
    pub keep_connections: bool,
    /// The file `tasks` of the cgroup (v1) that the tree comes to live in, open for
    /// writing.
    pub group: Option<fs::File>,
    /// The program `strata-clone`.
    pub helper: PathBuf,
    /// Where all that CRIU says is kept when it fails.
    pub kept_log: Option<PathBuf>,
    /// Longest wait for the next process, and for the end.
    pub limit: Duration,
}

impl RestoreOptions {
    /// Nothing own, nothing shown elsewhere, connections kept. `helper`: the program
    /// `strata-clone`.
    #[must_use]
    pub fn new(helper: PathBuf) -> Self {
        Self {
            own_pids: false,
            own_network: false,
            shown: Vec::new(),
            inherited: Vec::new(),
            terminals: Terminals::default(),
            rehearsal: false,
            keep_connections: true,
            group: None,
            helper,
            kept_log: None,
            limit: Duration::from_secs(30),
        }
    }
}
