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

mod copies;
mod counters;
mod entry;
mod events;
mod evict;
mod fetch;
mod handler;
mod keeper;
mod page_map;
mod recover;
mod registry;
mod release;
mod scan;
mod space;
mod streams;
mod tenant;
mod usage;

#[cfg(test)]
mod map_tests;
#[cfg(test)]
mod ring_tests;
#[cfg(test)]
mod serve_tests;
#[cfg(test)]
mod testing;

pub use counters::{Counter, Counters};
pub use registry::{Registry, TenantRecord};
pub use space::Space;
pub use tenant::{Hail, ReleaseRefused, Tenant, TenantSpec, Usage};
