//! Futexes in memory that several processes map.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Waits while `word` holds `expected`, at most `timeout`. Returns on a wake, a
/// change, a signal or the timeout: the caller looks again.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let spec = libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    };
    // SAFETY: `word` is a live aligned u32, `spec` a live timespec; FUTEX_WAIT
    // reads both and writes nothing.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &raw const spec,
            std::ptr::null::<u32>(),
            0u32,
        );
    }
}

/// Wakes everyone who waits on `word`.
pub fn futex_wake(word: &AtomicU32) {
    // SAFETY: `word` is a live aligned u32; FUTEX_WAKE uses only its address.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE,
            i32::MAX,
            std::ptr::null::<libc::timespec>(),
            std::ptr::null::<u32>(),
            0u32,
        );
    }
}
