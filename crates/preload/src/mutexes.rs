//! `pthread_mutex_init` and `pthread_mutex_destroy`: the pages of
//! priority-inheriting mutexes are to stay resident.
//!
//! The kernel itself writes to such a mutex, and fails with EFAULT where it
//! would have to wait for a page.

use core::ffi::{c_int, c_void};

use crate::block;
use crate::next::Next;
use crate::records;
use crate::start;

static MUTEX_INIT: Next = Next::new(c"pthread_mutex_init");
static MUTEX_DESTROY: Next = Next::new(c"pthread_mutex_destroy");

type Init =
    unsafe extern "C" fn(*mut libc::pthread_mutex_t, *const libc::pthread_mutexattr_t) -> c_int;
type Destroy = unsafe extern "C" fn(*mut libc::pthread_mutex_t) -> c_int;

/// POSIX's function, but a priority-inheriting mutex is recorded before it is
/// used.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn pthread_mutex_init(
    mutex: *mut libc::pthread_mutex_t,
    attributes: *const libc::pthread_mutexattr_t,
) -> c_int {
    let address = MUTEX_INIT.address();
    if address.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the C library's function of this name has this signature.
    let init = unsafe { core::mem::transmute::<*mut c_void, Init>(address) };
    // SAFETY: the caller's own arguments.
    let result = unsafe { init(mutex, attributes) };
    // SAFETY: null, or attributes that the C library has just accepted.
    let inherits = result == 0 && unsafe { inherits_priority(attributes) };
    if inherits && let Some(block) = start::recording() {
        records::record_mutex(block, mutex as u64, size_of::<libc::pthread_mutex_t>());
    }
    result
}

/// POSIX's function, but the mutex's page may leave again.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn pthread_mutex_destroy(mutex: *mut libc::pthread_mutex_t) -> c_int {
    let address = MUTEX_DESTROY.address();
    if address.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the C library's function of this name has this signature.
    let destroy = unsafe { core::mem::transmute::<*mut c_void, Destroy>(address) };
    // SAFETY: the caller's own argument.
    let result = unsafe { destroy(mutex) };
    if result == 0
        && let Some(block) = block::existing()
    {
        records::forget_mutex(block, mutex as u64);
    }
    result
}

/// # Safety
/// `attributes` must be null or initialised.
unsafe fn inherits_priority(attributes: *const libc::pthread_mutexattr_t) -> bool {
    let mut protocol = 0;
    // SAFETY: initialised, says the caller; the result is written to a local.
    !attributes.is_null()
        && unsafe { libc::pthread_mutexattr_getprotocol(attributes, &raw mut protocol) } == 0
        && protocol == libc::PTHREAD_PRIO_INHERIT
}
