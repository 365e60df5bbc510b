//! What outlives a worker: the page map and its entries, the registry of spaces and
//! tenants, settings and counters. All of it lies in memory files.

pub(crate) mod address;
pub(crate) mod by_many;
pub(crate) mod counters;
pub(crate) mod entry;
pub(crate) mod object;
pub(crate) mod page_map;
pub(crate) mod page_set;
pub(crate) mod registry;
pub(crate) mod settings;

#[cfg(test)]
mod map_tests;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic aborts the worker (profile: panic = "abort"): no lock is ever
    // seen poisoned.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
