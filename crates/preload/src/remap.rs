//! `mremap`: the kernel moves and resizes one mapping at a time, and a program may
//! have several where it knows of one: those parts of it that are watched for the
//! advisor are registered, the others are not.

use core::ffi::{c_int, c_void};

use crate::next::Next;
use crate::place;

static MREMAP: Next = Next::new(c"mremap");

type Remap = unsafe extern "C" fn(*mut c_void, usize, usize, c_int, ...) -> *mut c_void;

/// Linux's function, but what the daemon cut into pieces is made whole first.
///
/// `new_address` is there only with some flags; else it is whatever the register held,
/// handed on and looked at by nobody.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn mremap(
    old_address: *mut c_void,
    old_size: usize,
    new_size: usize,
    flags: c_int,
    new_address: *mut c_void,
) -> *mut c_void {
    let address = MREMAP.address();
    if address.is_null() {
        set_errno(libc::ENOSYS);
        return libc::MAP_FAILED;
    }
    // SAFETY: the C library's function of this name has this signature.
    let remap = unsafe { core::mem::transmute::<*mut c_void, Remap>(address) };
    // Since 6.17 Linux moves to a fixed place what it can of several mappings before it
    // comes to a registered one and fails.
    let is_fixed = flags & libc::MREMAP_FIXED != 0;
    if is_fixed {
        place::make_whole(old_address as u64, old_size);
    }
    // SAFETY: the caller's own arguments.
    let moved = unsafe { remap(old_address, old_size, new_size, flags, new_address) };
    if is_fixed || moved != libc::MAP_FAILED || errno() != libc::EFAULT {
        return moved;
    }
    if !place::make_whole(old_address as u64, old_size) {
        set_errno(libc::EFAULT);
        return moved;
    }
    // SAFETY: the same call; nothing has been moved.
    unsafe { remap(old_address, old_size, new_size, flags, new_address) }
}

fn errno() -> c_int {
    // SAFETY: a thread's own.
    unsafe { *libc::__errno_location() }
}

fn set_errno(number: c_int) {
    // SAFETY: a thread's own.
    unsafe { *libc::__errno_location() = number }
}
