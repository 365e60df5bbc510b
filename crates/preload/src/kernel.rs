//! The system calls of the agent, each with its outcome as a value.
//!
//! Not here: what is done with them, and the socket's messages (`message`).

use core::sync::atomic::AtomicU32;
use core::time::Duration;

use libc::{c_int, c_ulong, c_void};
use strata_units::PAGE_SIZE;

/// `_IO(0xAA, 0x00)` on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: c_ulong = 0xAA00;
/// `_IOWR(0xAA, 0x05, struct uffdio_move)`; the C library's headers are older
/// than it.
const UFFDIO_MOVE: c_ulong = iowr(0xAA, 0x05, size_of::<UffdioMove>());

const _: () = assert!(size_of::<UffdioMove>() == 40);
const _: () = assert!(UFFDIO_MOVE == 0xC028_AA05);

/// `struct uffdio_move`.
#[repr(C)]
struct UffdioMove {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

const fn iowr(group: c_ulong, number: c_ulong, size_bytes: usize) -> c_ulong {
    (3 << 30) | ((size_bytes as c_ulong) << 16) | (group << 8) | number
}

/// The calling thread's `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: glibc's location is a word of the calling thread's control block,
    // valid as long as the thread.
    unsafe { *libc::__errno_location() }
}

/// An open descriptor of the calling thread's table, closed when dropped.
pub(crate) struct Fd(c_int);

impl Fd {
    /// Takes ownership of `raw`, an open descriptor nobody else closes.
    pub(crate) fn own(raw: c_int) -> Self {
        Self(raw)
    }

    pub(crate) fn raw(&self) -> c_int {
        self.0
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours alone. The raw call is no cancellation
        // point and touches no memory.
        unsafe { libc::syscall(libc::SYS_close, self.0) };
    }
}

/// Leaves the program's descriptor table and starts with an empty one.
pub(crate) fn own_empty_descriptor_table() -> Result<(), c_int> {
    // SAFETY: concerns only the calling thread, the agent, which has opened
    // nothing; the program's table is no longer shared when the second call
    // closes everything.
    unsafe {
        if libc::syscall(libc::SYS_unshare, libc::CLONE_FILES) != 0
            || libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0) != 0
        {
            return Err(errno());
        }
    }
    Ok(())
}

/// Sleeps while `*word == expected`, at most `timeout`; false: the time is up.
/// A shared futex, since the word may lie in memory of two processes.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) -> bool {
    let timeout = timespec(timeout);
    // SAFETY: both pointers are valid for the call; the kernel only reads them.
    let result = unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &raw const timeout,
        )
    };
    result == 0 || errno() != libc::ETIMEDOUT
}

/// Wakes everyone who sleeps on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: a wake reads nothing through the pointer.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, c_int::MAX) };
}

/// A new userfaultfd, before its API handshake, from a descriptor of
/// `/dev/userfaultfd`.
pub(crate) fn new_userfaultfd(device: &Fd) -> Result<Fd, c_int> {
    // SAFETY: the argument is a flag word, not a pointer.
    let raw = unsafe {
        libc::ioctl(device.raw(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK)
    };
    if raw < 0 { Err(errno()) } else { Ok(Fd::own(raw)) }
}

/// Moves the page at `source` to `destination`: 0 or a negative errno.
///
/// # Safety
/// `destination` must be a page of the transfer range. The content of `source`
/// is the daemon's from then on: it must answer faults there.
pub(crate) unsafe fn move_page(userfaultfd: &Fd, source: u64, destination: u64) -> i32 {
    let mut request =
        UffdioMove { dst: destination, src: source, len: PAGE_SIZE as u64, mode: 0, moved: 0 };
    // SAFETY: the request is valid for the call; the caller vouches for the
    // two pages, and the kernel refuses what it may not move.
    let result = unsafe { libc::ioctl(userfaultfd.raw(), UFFDIO_MOVE, &raw mut request) };
    if result != 0 {
        -errno()
    } else if request.moved < 0 {
        i32::try_from(request.moved).unwrap_or(-libc::EIO)
    } else {
        0
    }
}

/// `madvise`: 0 or a negative errno.
///
/// # Safety
/// As for the advice itself: `MADV_DONTNEED` loses the range's content.
pub(crate) unsafe fn advise(address: u64, length_bytes: usize, advice: c_int) -> i32 {
    // SAFETY: the caller vouches for the range; the kernel checks that it is
    // mapped.
    let result = unsafe { libc::syscall(libc::SYS_madvise, address, length_bytes, advice) };
    if result == 0 { 0 } else { -errno() }
}

/// Private anonymous memory, near `hint` when that is free.
pub(crate) fn map_anonymous(hint: u64, length_bytes: usize, protection: c_int) -> Option<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: without MAP_FIXED no existing mapping is touched.
    let result = unsafe { libc::mmap(hint as *mut c_void, length_bytes, protection, flags, -1, 0) };
    (result != libc::MAP_FAILED).then_some(result as u64)
}

/// Replaces `length_bytes` at `address` by memory without access.
///
/// # Safety
/// The range must be one that this library mapped, and nothing may hold a
/// reference into it.
pub(crate) unsafe fn blank(address: u64, length_bytes: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the caller vouches for the range.
    let result =
        unsafe { libc::mmap(address as *mut c_void, length_bytes, libc::PROT_NONE, flags, -1, 0) };
    result != libc::MAP_FAILED
}

/// Maps `file` (shared) over `length_bytes` at `address`.
///
/// # Safety
/// The range must be one that this library mapped for the purpose.
pub(crate) unsafe fn map_shared_at(file: &Fd, address: u64, length_bytes: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the caller vouches for the range.
    let result = unsafe {
        libc::mmap(address as *mut c_void, length_bytes, protection, flags, file.raw(), 0)
    };
    result != libc::MAP_FAILED
}

/// Unmaps a range.
///
/// # Safety
/// The range must be one that this library mapped, with no references into it.
pub(crate) unsafe fn unmap(address: u64, length_bytes: usize) {
    // SAFETY: the caller vouches for the range.
    unsafe { libc::munmap(address as *mut c_void, length_bytes) };
}

/// Size of an open file.
pub(crate) fn file_bytes(file: &Fd) -> Option<u64> {
    // SAFETY: all zero is a valid `stat`, which the call fills.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: the pointer is valid for the call.
    let result = unsafe { libc::fstat(file.raw(), &raw mut stat) };
    (result == 0).then_some(stat.st_size.cast_unsigned())
}

/// A random number for choosing an address; 0 when the kernel has none yet.
pub(crate) fn random() -> u64 {
    let mut value = 0_u64;
    // SAFETY: the buffer is eight bytes long.
    unsafe {
        libc::syscall(libc::SYS_getrandom, &raw mut value, size_of::<u64>(), libc::GRND_NONBLOCK)
    };
    value
}

/// Kernel id of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: no arguments, cannot fail.
    (unsafe { libc::syscall(libc::SYS_gettid) }) as u32
}

/// Kernel id of the process, in its own namespace.
pub(crate) fn process_id() -> u32 {
    // SAFETY: no arguments, cannot fail.
    (unsafe { libc::syscall(libc::SYS_getpid) }) as u32
}

/// Sleeps for `duration`; earlier only if a signal came.
pub(crate) fn pause(duration: Duration) {
    let duration = timespec(duration);
    // SAFETY: the request is valid for the call, the remainder is not wanted.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const duration, 0) };
}

/// A point on the monotonic clock.
#[derive(Clone, Copy)]
pub(crate) struct Deadline(Duration);

impl Deadline {
    pub(crate) fn after(duration: Duration) -> Self {
        Self(now() + duration)
    }

    /// Time left; none: it has passed.
    pub(crate) fn left(self) -> Option<Duration> {
        self.0.checked_sub(now()).filter(|left| !left.is_zero())
    }
}

fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

/// A duration as the kernel wants it. Ours are seconds, far from any overflow.
pub(crate) fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: duration.as_secs().cast_signed(),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
