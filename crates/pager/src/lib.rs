//! The pager: moves pages between address spaces and the store.
//!
//! One [`Tenant`] has a page map, a store and any number of [`Space`]s. Each
//! space under pressure has one fault handler thread; each tenant has one
//! keeper thread, which watches the budget, evicts and maintains the store.
//! Everything that must outlive this process lies in memory files whose
//! descriptors the supervisor shares ([`Registry`], page map, store, control
//! blocks). See ARCHITECTURE.md, "Inside the pager", for the state table and
//! who may change what.
#![forbid(unsafe_code)]

mod advice;
mod capture;
#[cfg(test)]
mod capture_tests;
mod charge;
mod claim;
mod copied;
mod copies;
mod counters;
mod ending;
mod entry;
mod events;
mod evict;
mod exchange;
mod fetch;
mod fill;
mod handler;
mod hold;
mod inbox;
mod keeper;
mod node;
mod notes;
mod pace;
mod page_map;
mod page_set;
mod place;
mod prepared;
mod reads;
mod recover;
mod registry;
mod release;
mod restore;
mod sample;
mod scan;
mod settings;
mod share;
mod snapshot;
mod space;
mod stall;
mod standing;
mod streams;
mod survey;
mod tenant;
mod together;
mod unattended;
#[doc(hidden)]
pub mod untrusted;
mod unwritten;
mod usage;
mod watching;

#[cfg(test)]
mod fill_tests;
#[cfg(test)]
mod map_tests;
mod merged;
#[cfg(test)]
mod node_tests;
#[cfg(test)]
mod place_tests;
#[cfg(test)]
mod prepared_tests;
#[cfg(test)]
mod read_tests;
#[cfg(test)]
mod ring_tests;
#[cfg(test)]
mod serve_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod watching_tests;

pub use advice::{Advice, AdviceState};
pub use claim::{Claim, Demand};
pub use counters::{Counter, Counters, Latencies};
pub use ending::Revival;
pub use fill::Filling;
pub use hold::Hold;
pub use keeper::start_alarms;
pub use node::NodeSpec;
pub use place::{Refused, Whereabouts, Wish};
pub use prepared::Prepared;
pub use registry::{
    RESERVED_SPACES, Registry, SPACES as MOST_SPACES, TENANTS as MOST_TENANTS, TenantRecord,
};
pub use settings::{MOST_SETTINGS, Setting};
pub use share::SnapshotSize;
pub use snapshot::{Captured, Freeze, Only, SnapshotError, SnapshotRequest, Standing};
pub use space::Space;
pub use stall::Stalled;
pub use strata_store::StoreStats;
pub use survey::{Survey, Unattended, Unmanaged, wait_for_questions};
pub use tenant::{Hail, ReleaseRefused, Tenant, TenantSpec, Usage};
pub use watching::{Seen, Watch};
