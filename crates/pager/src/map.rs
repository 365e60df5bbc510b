//! What outlives a worker: the page map and its entries, the registry of spaces and
//! tenants, settings and counters. All of it lies in memory files.

pub(crate) mod counters;
pub(crate) mod entry;
pub(crate) mod page_map;
pub(crate) mod page_set;
pub(crate) mod registry;
pub(crate) mod settings;

#[cfg(test)]
mod map_tests;
