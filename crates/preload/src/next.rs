//! Symbols of the libraries behind this one.
//!
//! Lookups may allocate: they happen on the program's threads, never in the
//! agent.

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

/// A function that this library wraps, looked up at first use: a constructor of
/// another library may call it before ours has run.
pub(crate) struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(core::ptr::null_mut()) }
    }

    /// What was looked up; null: nothing yet, or there is none.
    pub(crate) fn known(&self) -> *mut c_void {
        self.address.load(Ordering::Relaxed)
    }

    /// The next definition of the name; null: there is none.
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: a lookup by name.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// Any definition of `name`; null: there is none.
pub(crate) fn any(name: &CStr) -> *mut c_void {
    // SAFETY: a lookup by name.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}
