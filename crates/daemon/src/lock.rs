//! Locks of what stays whole when a thread panics over it.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock, whoever has panicked with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
