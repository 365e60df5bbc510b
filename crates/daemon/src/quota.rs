//! What one user may have of this daemon. Root has no quota, and a part of everything
//! that nobody else gets.
//!
//! Few numbers bound all: a tenant costs at most two threads, six descriptors, its part
//! of the address space, and its records, which its budget bounds; a process one thread
//! and five descriptors. Snapshots, clones and forwards are root's alone.

/// Slots for tenants that only root gets.
pub(crate) const RESERVED_TENANTS: usize = 64;

/// See the module's text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Quota {
    /// Tenants at a time.
    pub(crate) tenants: u32,
    /// Managed processes at a time, of all tenants.
    pub(crate) processes: u32,
    /// Connections at a time, to each socket.
    pub(crate) connections: u32,
    /// Lines of the log that a user causes in a minute.
    pub(crate) log_lines: u32,
    /// Pools at a time.
    pub(crate) pools: u32,
}

impl Default for Quota {
    fn default() -> Self {
        Self { tenants: 64, processes: 1024, connections: 8, log_lines: 60, pools: 4 }
    }
}

impl Quota {
    pub(crate) fn no_more_tenants(&self, uid: u32) -> String {
        format!(
            "user {uid} has {} tenants, and may have no more (quota tenants): end one, or have stratad's configuration raise it",
            self.tenants
        )
    }

    pub(crate) fn no_more_pools(&self, uid: u32) -> String {
        format!(
            "user {uid} has {} pools, and may have no more (quota pools): remove one, or have stratad's configuration raise it",
            self.pools
        )
    }

    pub(crate) fn no_more_processes(&self, uid: u32) -> String {
        format!(
            "user {uid} has {} managed processes, and may have no more (quota processes): end some, or have stratad's configuration raise it",
            self.processes
        )
    }
}
