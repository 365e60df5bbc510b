//! Virtual machines underneath: QEMU's command line, read and completed before there is
//! a process ([`plan`]); a domain of libvirt's, likewise ([`amend`]); and QEMU's monitor,
//! whose answers are untrusted ([`Monitor`]).
//!
//! Not here: sockets' owners, tenants, budgets, the guest's memory itself. Nothing in
//! this crate looks at the machine but through what it is given.
#![forbid(unsafe_code)]

mod accelerator;
mod again;
pub mod agent_port;
mod balloon;
mod described;
mod diff;
pub mod disks;
mod domain;
mod drives;
pub mod exports;
mod line;
mod networks;
mod options;
mod pool_disks;
mod qmp;
mod refusals;
pub mod self_balloon;
pub mod state;
mod version;

pub use accelerator::{Accelerator, kvm_problem};
pub use again::{Again, OtherDisk, again};
pub use balloon::{BALLOON_ID, GuestState, look};
pub use described::{Described, described};
pub use diff::unified;
pub use domain::{
    Domain, DomainWish, LiveDomain, OtherDomain, WaitingDomain, amend, live_domain, other_domain,
    with_images,
};
pub use line::{MONITOR_SOCKET_NAME, Plan, Wish, plan};
pub use networks::{CloneNetworks, NetworkWish, Networks};
pub use pool_disks::{
    Format, PoolDisk, SWAP_MOMENTS_NAME, SWAP_SOCKET_NAME, Served, disks_again, served, socket_name,
};
pub use qmp::{Monitor, QmpError};
pub use refusals::Refusal;
pub use version::{OLDEST, Version};
