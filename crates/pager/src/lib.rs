//! The pager: moves pages between address spaces and the store.
//!
//! One [`Tenant`] has a page map, a store and any number of [`Space`]s. Each
//! space under pressure has one fault handler thread; each tenant has one
//! keeper thread, which watches the budget, evicts and maintains the store.
//! Everything that must outlive this process lies in memory files whose
//! descriptors the supervisor shares ([`Registry`], page map, store, control
//! blocks). See ARCHITECTURE.md for the rooms that this is divided
//! into, and docs/design/pages.md for who may change which entry.
#![forbid(unsafe_code)]

mod advice;
mod capture;
mod evict;
mod fault;
mod keeper;
mod life;
mod map;
mod node;
mod regions;
mod snapshot;
mod tenant;
#[doc(hidden)]
pub mod untrusted;

#[cfg(test)]
mod testing;

pub use advice::survey::{SURVEY_PATIENCE, wait_for_questions};
pub use keeper::start_alarms;
pub use map::counters::{Counter, Counters, Latencies};
pub use map::registry::{
    NodeSpec, RESERVED_SPACES, Registry, SPACES as MOST_SPACES, TENANTS as MOST_TENANTS,
    TenantRecord,
};
pub use map::settings::{MOST_SETTINGS, Setting};
pub use regions::place::{Refused, Whereabouts, Wish};
pub use snapshot::held_memory::HeldMemory;
pub use snapshot::in_file::{Filed, OpenPageFile, SnapshotFile};
pub use snapshot::lent::{Differences, Lent};
pub use strata_store::{GetError, PageFile, ReadBytes, StoreStats, Wait};
pub use tenant::advisor::{Advice, AdviceState};
pub use tenant::claim::{Claim, Demand};
pub use tenant::ending::Revival;
pub use tenant::orders::{
    Captured, Carried, Carry, Filling, Freeze, Frozen, Only, SnapshotError, SnapshotRequest, Stand,
    Standing,
};
pub use tenant::share::SnapshotSize;
pub use tenant::snapshots::Prepared;
pub use tenant::space::Space;
pub use tenant::stall::Stalled;
pub use tenant::surveyed::{Survey, Unattended, Unmanaged};
pub use tenant::watching::{Seen, Watch};
pub use tenant::{Hail, ReleaseRefused, Tenant, TenantSpec, Usage};
