//! The system calls of the agent, each with its outcome as a value.
//!
//! Not here: what is done with them, and the socket's messages (`message`).

use core::sync::atomic::AtomicU32;
use core::time::Duration;

use libc::c_int;
use strata_units::PAGE_SIZE;

use crate::syscall::call;

/// `_IO(0xAA, 0x00)` on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: u64 = 0xAA00;
/// `_IOWR(0xAA, 0x05, struct uffdio_move)`; the C library's headers are older
/// than it.
const UFFDIO_MOVE: u64 = iowr(0xAA, 0x05, size_of::<UffdioMove>());

/// `_IOWR(0xAA, 0x00, struct uffdio_register)`.
const UFFDIO_REGISTER: u64 = iowr(0xAA, 0x00, size_of::<UffdioRegister>());
/// `_IOR(0xAA, 0x01, struct uffdio_range)`.
const UFFDIO_UNREGISTER: u64 = 0x8010_AA01;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;

const _: () = assert!(size_of::<UffdioMove>() == 40);
const _: () = assert!(UFFDIO_MOVE == 0xC028_AA05);
const _: () = assert!(UFFDIO_REGISTER == 0xC020_AA00);

/// `struct uffdio_move`.
#[repr(C)]
struct UffdioMove {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

/// `struct uffdio_register`, whose first two fields are `struct uffdio_range`.
#[repr(C)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

const fn iowr(group: u64, number: u64, size_bytes: usize) -> u64 {
    (3 << 30) | ((size_bytes as u64) << 16) | (group << 8) | number
}

/// A flag or descriptor as the kernel takes it: sign-extended.
pub(crate) fn word(value: c_int) -> u64 {
    i64::from(value).cast_unsigned()
}

/// An open descriptor of the calling thread's table, closed when dropped.
pub(crate) struct Fd(c_int);

impl Fd {
    /// Takes ownership of `raw`, an open descriptor nobody else closes.
    pub(crate) fn own(raw: c_int) -> Self {
        Self(raw)
    }

    /// Its number.
    pub(crate) fn raw(&self) -> c_int {
        self.0
    }

    /// Leaves it open, if it is: in a restored process the number is that of
    /// another descriptor, or of none.
    pub(crate) fn forget(self) {
        core::mem::forget(self);
    }

    /// Its number as a system call's argument.
    pub(crate) fn word(&self) -> u64 {
        word(self.0)
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours alone. On Linux it is closed whatever
        // the call returns.
        let _ = unsafe { call(libc::SYS_close, [self.word(), 0, 0, 0, 0, 0]) };
    }
}

/// Starts with an empty descriptor table, and a root and working directory of
/// one's own. A new agent has copies; in a restored process it shares the
/// program's, since a restore gives all threads the same. (The copy that is
/// emptied has an owner of its own: the program's record locks stay.)
pub(crate) fn own_empty_descriptor_table() -> Result<(), c_int> {
    // SAFETY: concerns only the calling thread, the agent, which holds no
    // descriptor that it will use; the program's table is not shared when the
    // second call closes everything.
    unsafe {
        call(libc::SYS_unshare, [word(libc::CLONE_FILES | libc::CLONE_FS), 0, 0, 0, 0, 0])?;
        call(libc::SYS_close_range, [0, u64::from(u32::MAX), 0, 0, 0, 0])?;
    }
    Ok(())
}

/// Leaves the working directory of the thread that this one was made by: its
/// file system could not be unmounted otherwise.
pub(crate) fn leave_directory() {
    // SAFETY: a C string. Where it fails, the directory stays in use.
    let _ = unsafe { call(libc::SYS_chdir, [c"/".as_ptr() as u64, 0, 0, 0, 0, 0]) };
}

/// `struct __user_cap_header_struct`.
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

/// `_LINUX_CAPABILITY_VERSION_3`: two words a set.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// Gives up every capability of the calling thread. Its user stays: changing
/// that would make the whole process undumpable.
///
/// Not under a seccomp filter: it may end the process for the call (systemd's
/// `SystemCallFilter=~@privileged` does), and there is no way to ask it first.
pub(crate) fn drop_capabilities() {
    let query = [libc::PR_GET_SECCOMP.cast_unsigned().into(), 0, 0, 0, 0, 0];
    // SAFETY: it only asks; a filter that refuses `prctl` would refuse the name of the
    // thread as well.
    if unsafe { call(libc::SYS_prctl, query) } != Ok(0) {
        return;
    }
    let header = CapabilityHeader { version: CAPABILITY_VERSION, pid: 0 };
    // Effective, permitted, inheritable; twice.
    let none = [0_u32; 6];
    let arguments = [&raw const header as u64, none.as_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: both are valid for the call. To have less is never refused.
    let _ = unsafe { call(libc::SYS_capset, arguments) };
}

/// Real, effective and saved user, and the same of the group, of the calling
/// thread.
pub(crate) fn ids() -> [u32; 6] {
    let mut ids = [0_u32; 6];
    let (users, groups) = ids.split_at_mut(3);
    for (number, three) in [(libc::SYS_getresuid, users), (libc::SYS_getresgid, groups)] {
        let place = three.as_mut_ptr();
        let at = |index| place.wrapping_add(index) as u64;
        // SAFETY: three places, which the kernel writes; it cannot fail.
        let _ = unsafe { call(number, [at(0), at(1), at(2), 0, 0, 0]) };
    }
    ids
}

/// Blocks every signal of the calling thread, the C library's own as well;
/// returns those that were blocked.
pub(crate) fn block_signals() -> u64 {
    let mut before = 0_u64;
    mask_signals(u64::MAX, &raw mut before);
    before
}

/// Ends that.
pub(crate) fn restore_signals(before: u64) {
    mask_signals(before, core::ptr::null_mut());
}

fn mask_signals(mask: u64, before: *mut u64) {
    let how = word(libc::SIG_SETMASK);
    let bytes = size_of::<u64>() as u64;
    let arguments = [how, &raw const mask as u64, before as u64, bytes, 0, 0];
    // SAFETY: the mask is valid for the call, the place for the one before is
    // null or the caller's; both are the kernel's 64 signals. It cannot fail.
    let _ = unsafe { call(libc::SYS_rt_sigprocmask, arguments) };
}

/// Sleeps while `*word == expected`, at most `timeout`; false: the time is up.
/// A shared futex, since the word may lie in memory of two processes.
pub(crate) fn futex_wait(futex: &AtomicU32, expected: u32, timeout: Duration) -> bool {
    let timeout = timespec(timeout);
    let operation = word(libc::FUTEX_WAIT);
    let arguments =
        [futex.as_ptr() as u64, operation, expected.into(), &raw const timeout as u64, 0, 0];
    // SAFETY: both pointers are valid for the call; the kernel only reads them.
    let result = unsafe { call(libc::SYS_futex, arguments) };
    result != Err(libc::ETIMEDOUT)
}

/// Wakes everyone who sleeps on `futex`.
pub(crate) fn futex_wake(futex: &AtomicU32) {
    let arguments = [futex.as_ptr() as u64, word(libc::FUTEX_WAKE), word(c_int::MAX), 0, 0, 0];
    // SAFETY: a wake reads nothing through the pointer. It fails only for
    // addresses that are not mapped.
    let _ = unsafe { call(libc::SYS_futex, arguments) };
}

/// A new userfaultfd, before its API handshake, from a descriptor of
/// `/dev/userfaultfd`.
pub(crate) fn new_userfaultfd(device: &Fd) -> Result<Fd, c_int> {
    let flags = word(libc::O_CLOEXEC | libc::O_NONBLOCK);
    // SAFETY: the argument is a flag word, not a pointer.
    unsafe { call(libc::SYS_ioctl, [device.word(), USERFAULTFD_IOC_NEW, flags, 0, 0, 0]) }
        .map(|raw| Fd::own(raw as c_int))
}

/// Moves `pages` pages from `source` on to `destination`, in order, until one
/// does not go: how many went, and a negative errno if not all did.
///
/// # Safety
/// `destination` must be so many pages of the transfer range. The content of
/// what was moved is the daemon's from then on: it must answer faults there.
pub(crate) unsafe fn move_pages(
    userfaultfd: &Fd,
    source: u64,
    destination: u64,
    pages: usize,
) -> (usize, i32) {
    let bytes = (pages * PAGE_SIZE) as u64;
    let mut request = UffdioMove { dst: destination, src: source, len: bytes, mode: 0, moved: 0 };
    let arguments = [userfaultfd.word(), UFFDIO_MOVE, &raw mut request as u64, 0, 0, 0];
    // SAFETY: the request is valid for the call; the caller vouches for the
    // pages, and the kernel refuses what it may not move.
    let answer = unsafe { call(libc::SYS_ioctl, arguments) };
    // Negative: an errno; refused before anything else, it is as it was.
    let moved = usize::try_from(request.moved).unwrap_or(0) / PAGE_SIZE;
    match answer {
        Ok(_) if moved == pages => (moved, 0),
        Ok(_) => {
            (moved, i32::try_from(request.moved).ok().filter(|e| *e < 0).unwrap_or(-libc::EIO))
        }
        Err(error) => (moved, -error),
    }
}

/// Has whoever touches a missing page of a range wait for the daemon.
pub(crate) fn register(userfaultfd: &Fd, start: u64, length_bytes: usize) {
    let mode = UFFDIO_REGISTER_MODE_MISSING;
    let mut request = UffdioRegister { start, len: length_bytes as u64, mode, ioctls: 0 };
    let arguments = [userfaultfd.word(), UFFDIO_REGISTER, &raw mut request as u64, 0, 0, 0];
    // SAFETY: the request is valid for the call, which changes no content.
    let _ = unsafe { call(libc::SYS_ioctl, arguments) };
}

/// Ends that, where it was so: what is missing in a range reads zero.
pub(crate) fn unregister(userfaultfd: &Fd, start: u64, length_bytes: usize) -> bool {
    let request = [start, length_bytes as u64];
    let arguments = [userfaultfd.word(), UFFDIO_UNREGISTER, request.as_ptr() as u64, 0, 0, 0];
    // SAFETY: the request, a range, is valid for the call, which reads it.
    unsafe { call(libc::SYS_ioctl, arguments) }.is_ok()
}

/// `madvise`: 0 or a negative errno.
///
/// # Safety
/// As for the advice itself: `MADV_DONTNEED` loses the range's content.
pub(crate) unsafe fn advise(address: u64, length_bytes: usize, advice: c_int) -> i32 {
    let arguments = [address, length_bytes as u64, word(advice), 0, 0, 0];
    // SAFETY: the caller vouches for the range; the kernel checks that it is
    // mapped.
    match unsafe { call(libc::SYS_madvise, arguments) } {
        Ok(_) => 0,
        Err(error) => -error,
    }
}

/// Private anonymous memory, near `hint` when that is free.
pub(crate) fn map_anonymous(hint: u64, length_bytes: usize, protection: c_int) -> Option<u64> {
    let flags = word(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    let arguments = [hint, length_bytes as u64, word(protection), flags, word(-1), 0];
    // SAFETY: without MAP_FIXED no existing mapping is touched.
    unsafe { call(libc::SYS_mmap, arguments) }.ok()
}

/// Replaces `length_bytes` at `address` by memory without access.
///
/// # Safety
/// The range must be one that this library mapped, and nothing may hold a
/// reference into it.
pub(crate) unsafe fn blank(address: u64, length_bytes: usize) -> bool {
    let flags =
        word(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED);
    let arguments = [address, length_bytes as u64, word(libc::PROT_NONE), flags, word(-1), 0];
    // SAFETY: the caller vouches for the range.
    unsafe { call(libc::SYS_mmap, arguments) }.is_ok()
}

/// Maps `file` (shared) over `length_bytes` at `address`.
///
/// # Safety
/// The range must be one that this library mapped for the purpose.
pub(crate) unsafe fn map_shared_at(file: &Fd, address: u64, length_bytes: usize) -> bool {
    let protection = word(libc::PROT_READ | libc::PROT_WRITE);
    let flags = word(libc::MAP_SHARED | libc::MAP_FIXED);
    let arguments = [address, length_bytes as u64, protection, flags, file.word(), 0];
    // SAFETY: the caller vouches for the range.
    unsafe { call(libc::SYS_mmap, arguments) }.is_ok()
}

/// Makes a range inaccessible.
///
/// # Safety
/// The range must be one that this library mapped, and nothing may access it.
pub(crate) unsafe fn forbid(address: u64, length_bytes: usize) -> bool {
    let arguments = [address, length_bytes as u64, word(libc::PROT_NONE), 0, 0, 0];
    // SAFETY: the caller vouches for the range.
    unsafe { call(libc::SYS_mprotect, arguments) }.is_ok()
}

/// Locks the page at `address` into memory, as far as the process's limit goes.
pub(crate) fn lock_page(address: u64) -> bool {
    // SAFETY: locking changes no content; the kernel checks the address.
    unsafe { call(libc::SYS_mlock, [address, PAGE_SIZE as u64, 0, 0, 0, 0]) }.is_ok()
}

/// Lets a range be swapped out again.
pub(crate) fn unlock(address: u64, length_bytes: usize) -> bool {
    // SAFETY: unlocking changes no content; the kernel checks the address.
    unsafe { call(libc::SYS_munlock, [address, length_bytes as u64, 0, 0, 0, 0]) }.is_ok()
}

/// Unmaps a range.
///
/// # Safety
/// The range must be one that this library mapped, with no references into it.
pub(crate) unsafe fn unmap(address: u64, length_bytes: usize) {
    // SAFETY: the caller vouches for the range. It fails only when the process
    // has too many mappings; the range then stays, unused.
    let _ = unsafe { call(libc::SYS_munmap, [address, length_bytes as u64, 0, 0, 0, 0]) };
}

/// Size of an open file, found by seeking to its end (a memfd's position is
/// nobody's concern).
pub(crate) fn file_bytes(file: &Fd) -> Option<u64> {
    let arguments = [file.word(), 0, word(libc::SEEK_END), 0, 0, 0];
    // SAFETY: no pointers.
    unsafe { call(libc::SYS_lseek, arguments) }.ok()
}

/// A random number for choosing an address; 0 when the kernel has none yet.
pub(crate) fn random() -> u64 {
    let mut value = 0_u64;
    let flags = u64::from(libc::GRND_NONBLOCK);
    let arguments = [&raw mut value as u64, size_of::<u64>() as u64, flags, 0, 0, 0];
    // SAFETY: the buffer is eight bytes long.
    let _ = unsafe { call(libc::SYS_getrandom, arguments) };
    value
}

/// Kernel id of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { call(libc::SYS_gettid, [0; 6]) }.map_or(0, |id| id as u32)
}

/// Kernel id of the process, in its own namespace.
pub(crate) fn process_id() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { call(libc::SYS_getpid, [0; 6]) }.map_or(0, |id| id as u32)
}

/// Kernel id of the process's parent, in this one's namespace; 0: it is outside.
pub(crate) fn parent_id() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { call(libc::SYS_getppid, [0; 6]) }.map_or(0, |id| id as u32)
}

/// Ends the process, all its threads, with nothing more of it being run.
pub(crate) fn end_process(status: c_int) -> ! {
    loop {
        // SAFETY: no pointers; it does not return.
        let _ = unsafe { call(libc::SYS_exit_group, [word(status), 0, 0, 0, 0, 0]) };
    }
}

/// Names the calling thread, for people who look at it.
pub(crate) fn name_thread(name: &'static core::ffi::CStr) {
    let arguments = [word(libc::PR_SET_NAME), name.as_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: a C string, which the kernel copies.
    let _ = unsafe { call(libc::SYS_prctl, arguments) };
}

/// Sleeps for `duration`; earlier only if a signal came.
pub(crate) fn pause(duration: Duration) {
    let duration = timespec(duration);
    // SAFETY: the request is valid for the call, the remainder is not wanted.
    let _ = unsafe { call(libc::SYS_nanosleep, [&raw const duration as u64, 0, 0, 0, 0, 0]) };
}

/// Is there a file of that name, as far as this process can see?
pub(crate) fn exists(path: &core::ffi::CStr) -> bool {
    let arguments = [word(libc::AT_FDCWD), path.as_ptr() as u64, word(libc::F_OK), 0, 0, 0];
    // SAFETY: a C string.
    unsafe { call(libc::SYS_faccessat, arguments) }.is_ok()
}

/// Writes to a descriptor, once.
pub(crate) fn write(descriptor: c_int, text: &str) {
    let arguments = [word(descriptor), text.as_ptr() as u64, text.len() as u64, 0, 0, 0];
    // SAFETY: the buffer is valid for its length. There is no one to tell of a
    // failure.
    let _ = unsafe { call(libc::SYS_write, arguments) };
}

/// A point on the monotonic clock.
#[derive(Clone, Copy)]
pub(crate) struct Deadline(Duration);

impl Deadline {
    /// That much from now.
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
    let arguments = [word(libc::CLOCK_MONOTONIC), &raw mut time as u64, 0, 0, 0, 0];
    // SAFETY: the pointer is valid for the call, which cannot fail.
    let _ = unsafe { call(libc::SYS_clock_gettime, arguments) };
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

/// A duration as the kernel wants it. Ours are seconds, far from any overflow.
pub(crate) fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: duration.as_secs().cast_signed(),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
