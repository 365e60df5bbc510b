//! The system calls of the fake daemon, as safe functions for tests.
//! They panic where a test cannot go on.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use strata_units::PAGE_SIZE;
use strata_units::wire::{CONTROL_BYTES, Control, Hello, MAGIC, Ready, Userfaultfd, Welcome};

const UFFDIO_API: u64 = 0xC018_AA3F;
const UFFDIO_REGISTER: u64 = 0xC020_AA00;
const UFFDIO_UNREGISTER: u64 = 0x8010_AA01;
const UFFDIO_COPY: u64 = 0xC028_AA03;
const UFFD_API: u64 = 0xAA;
const REGISTER_MISSING: u64 = 1;
/// Fork, remap, remove, unmap.
const EVENTS: u64 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6;

pub(crate) const EVENT_PAGEFAULT: u8 = 0x12;
pub(crate) const EVENT_FORK: u8 = 0x13;
pub(crate) const EVENT_REMOVE: u8 = 0x15;
pub(crate) const EVENT_UNMAP: u8 = 0x16;

/// A message structure of the wire.
pub(crate) trait Plain: Copy + Default {}
impl Plain for Hello {}
impl Plain for Welcome {}
impl Plain for Userfaultfd {}
impl Plain for Ready {}

fn check(result: i64, what: &str) -> i64 {
    assert!(result >= 0, "{what}: {}", io::Error::last_os_error());
    result
}

fn owned(raw: i64) -> OwnedFd {
    // SAFETY: fresh from the kernel in each caller.
    unsafe { OwnedFd::from_raw_fd(raw as RawFd) }
}

pub(crate) fn listen(path: &Path, timeout: Duration) -> OwnedFd {
    // SAFETY: plain system calls; the address outlives the call.
    unsafe {
        let raw = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        let socket = owned(check(raw.into(), "socket"));
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let bytes = path.as_os_str().as_encoded_bytes();
        assert!(bytes.len() < address.sun_path.len());
        for (to, from) in address.sun_path.iter_mut().zip(bytes) {
            *to = *from as libc::c_char;
        }
        let length = size_of::<libc::sockaddr_un>() as u32;
        check(libc::bind(raw, (&raw const address).cast(), length).into(), "bind");
        check(libc::listen(raw, 16).into(), "listen");
        set_timeout(&socket, timeout);
        socket
    }
}

/// Listens at an abstract name, as `user`.
pub(crate) fn listen_abstract(name: &[u8], user: u32, timeout: Duration) -> OwnedFd {
    listen_as([&[0], name].concat(), user, timeout)
}

/// Listens at what is to stand in the address, as `user`.
pub(crate) fn listen_as(name: Vec<u8>, user: u32, timeout: Duration) -> OwnedFd {
    // In a thread of its own, whose user alone changes by the bare system call.
    let listening = std::thread::spawn(move || {
        // SAFETY: plain system calls; the address outlives the call.
        unsafe {
            let keep = u32::MAX;
            check(libc::syscall(libc::SYS_setresuid, keep, user, keep), "setresuid");
            let raw = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            let socket = owned(check(raw.into(), "socket"));
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as libc::sa_family_t;
            for (to, from) in address.sun_path.iter_mut().zip(&name) {
                *to = *from as libc::c_char;
            }
            let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + name.len();
            check(libc::bind(raw, (&raw const address).cast(), length as u32).into(), "bind");
            check(libc::listen(raw, 16).into(), "listen");
            socket
        }
    });
    let socket = listening.join().expect("it listens");
    set_timeout(&socket, timeout);
    socket
}

/// Do two threads share what `kind` says (`KCMP_`)?
pub(crate) fn share(first: u32, second: u32, kind: u32) -> bool {
    // SAFETY: no pointers.
    let answer = unsafe { libc::syscall(libc::SYS_kcmp, first, second, kind, 0, 0) };
    check(answer, "kcmp") == 0
}

fn set_timeout(socket: &OwnedFd, timeout: Duration) {
    let value = libc::timeval { tv_sec: timeout.as_secs().cast_signed(), tv_usec: 0 };
    // SAFETY: the value is valid for the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO,
            (&raw const value).cast(),
            size_of_val(&value) as u32,
        )
    };
    check(result.into(), "setsockopt");
}

/// A connection and the peer's pid.
pub(crate) fn accept(listener: &OwnedFd, timeout: Duration) -> (OwnedFd, i32) {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as u32;
    // SAFETY: the buffers are valid for the calls.
    unsafe {
        let raw = libc::accept4(
            listener.as_raw_fd(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            libc::SOCK_CLOEXEC,
        );
        let socket = owned(check(raw.into(), "accept (did the agent call?)"));
        let result = libc::getsockopt(
            raw,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        );
        check(result.into(), "SO_PEERCRED");
        set_timeout(&socket, timeout);
        (socket, peer.pid)
    }
}

pub(crate) fn send<T: Plain>(socket: &OwnedFd, message: &T, descriptors: &[&OwnedFd]) {
    let raws: Vec<RawFd> = descriptors.iter().map(|d| d.as_raw_fd()).collect();
    let mut space = [0_u64; 16];
    let mut vector = libc::iovec {
        iov_base: std::ptr::from_ref(message).cast_mut().cast(),
        iov_len: size_of::<T>(),
    };
    // SAFETY: the header describes live buffers; the control space is larger
    // than any test's descriptors need.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut vector;
        header.msg_iovlen = 1;
        if !raws.is_empty() {
            let bytes = size_of_val(raws.as_slice()) as u32;
            header.msg_control = space.as_mut_ptr().cast();
            header.msg_controllen = libc::CMSG_SPACE(bytes) as usize;
            let control = libc::CMSG_FIRSTHDR(&raw const header);
            (*control).cmsg_level = libc::SOL_SOCKET;
            (*control).cmsg_type = libc::SCM_RIGHTS;
            (*control).cmsg_len = libc::CMSG_LEN(bytes) as usize;
            let data = libc::CMSG_DATA(control).cast::<RawFd>();
            std::ptr::copy_nonoverlapping(raws.as_ptr(), data, raws.len());
        }
        let sent = libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL);
        check(sent as i64, "sendmsg");
    }
}

/// The next message, with its descriptor if it has one; none: end of file.
pub(crate) fn receive<T: Plain>(socket: &OwnedFd) -> Option<(T, Option<OwnedFd>)> {
    let mut message = T::default();
    let mut space = [0_u64; 16];
    let mut vector =
        libc::iovec { iov_base: (&raw mut message).cast::<c_void>(), iov_len: size_of::<T>() };
    // SAFETY: the header describes live buffers; all wire messages are plain.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut vector;
        header.msg_iovlen = 1;
        header.msg_control = space.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&space);
        let flags = libc::MSG_CMSG_CLOEXEC;
        let received = libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags);
        check(received as i64, "recvmsg");
        if received == 0 {
            return None;
        }
        assert_eq!(received as usize, size_of::<T>(), "a message of another size");
        let control = libc::CMSG_FIRSTHDR(&raw const header);
        let descriptor = (!control.is_null())
            .then(|| owned(libc::CMSG_DATA(control).cast::<RawFd>().read_unaligned().into()));
        Some((message, descriptor))
    }
}

/// A control block in a memfd, mapped until the test ends.
pub(crate) fn control() -> (OwnedFd, &'static Control) {
    // SAFETY: a new mapping of full length, never unmapped; the block is all
    // atomics and valid when zero.
    unsafe {
        let raw = libc::memfd_create(c"control".as_ptr(), libc::MFD_CLOEXEC);
        let file = owned(check(raw.into(), "memfd_create"));
        check(libc::ftruncate(raw, CONTROL_BYTES as i64).into(), "ftruncate");
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let address =
            libc::mmap(std::ptr::null_mut(), CONTROL_BYTES, access, libc::MAP_SHARED, raw, 0);
        assert_ne!(address, libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        let control = &*address.cast::<Control>();
        control.magic.store(MAGIC, Ordering::Release);
        (file, control)
    }
}

/// The API handshake; has the descriptor to block when read.
pub(crate) fn start_userfaultfd(userfaultfd: &OwnedFd) {
    let mut request = [UFFD_API, EVENTS, 0];
    // SAFETY: `struct uffdio_api` is three words.
    let result = unsafe { libc::ioctl(userfaultfd.as_raw_fd(), UFFDIO_API, request.as_mut_ptr()) };
    check(result.into(), "UFFDIO_API");
}

/// Registers for missing pages; the error is an errno.
pub(crate) fn register(userfaultfd: &OwnedFd, address: u64, bytes: usize) -> Result<(), i32> {
    let mut request = [address, bytes as u64, REGISTER_MISSING, 0];
    // SAFETY: `struct uffdio_register` is four words.
    let result =
        unsafe { libc::ioctl(userfaultfd.as_raw_fd(), UFFDIO_REGISTER, request.as_mut_ptr()) };
    if result == 0 { Ok(()) } else { Err(errno()) }
}

/// Takes a range back from the userfaultfd.
pub(crate) fn unregister(userfaultfd: &OwnedFd, address: u64, bytes: usize) {
    let mut request = [address, bytes as u64];
    // SAFETY: `struct uffdio_range` is two words.
    let result =
        unsafe { libc::ioctl(userfaultfd.as_raw_fd(), UFFDIO_UNREGISTER, request.as_mut_ptr()) };
    check(result.into(), "UFFDIO_UNREGISTER");
}

/// Fills a page; the error is an errno.
pub(crate) fn fill(userfaultfd: &OwnedFd, address: u64, page: &[u8]) -> Result<(), i32> {
    assert_eq!(page.len(), PAGE_SIZE);
    let mut request = [address, page.as_ptr() as u64, PAGE_SIZE as u64, 0, 0];
    // SAFETY: `struct uffdio_copy` is five words; the source is a whole page.
    let result = unsafe { libc::ioctl(userfaultfd.as_raw_fd(), UFFDIO_COPY, request.as_mut_ptr()) };
    if result == 0 { Ok(()) } else { Err(errno()) }
}

/// One message: its event and its first two words (fault: flags and address;
/// fork: the new descriptor; remove, unmap: start and end). None: there is none, or the descriptor is dead.
pub(crate) fn event(userfaultfd: &OwnedFd) -> Option<(u8, u64, u64)> {
    let mut message = [0_u64; 4];
    // SAFETY: `struct uffd_msg` is 32 bytes.
    let received = unsafe { libc::read(userfaultfd.as_raw_fd(), message.as_mut_ptr().cast(), 32) };
    (received == 32).then_some((message[0] as u8, message[1], message[2]))
}

/// Waits until there is a message, at most that long.
pub(crate) fn readable(descriptor: &OwnedFd, milliseconds: i32) -> bool {
    let mut entry = libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry.
    unsafe { libc::poll(&raw mut entry, 1, milliseconds) == 1 }
}

/// Reads another process's memory; the error is an errno.
pub(crate) fn read_memory(pid: i32, address: u64, bytes: usize) -> Result<Vec<u8>, i32> {
    let mut buffer = vec![0; bytes];
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: bytes };
    // SAFETY: the local vector describes the buffer; the remote one is checked
    // by the kernel.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    if read == bytes as isize { Ok(buffer) } else { Err(errno()) }
}

/// Writes another process's memory.
pub(crate) fn write_memory(pid: i32, address: u64, bytes: &[u8]) {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: bytes.len() };
    // SAFETY: the local vector describes the bytes, which are only read; the
    // remote one is checked by the kernel.
    let written =
        unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    assert_eq!(written, bytes.len() as isize, "process_vm_writev: errno {}", errno());
}

/// Sends a signal.
pub(crate) fn signal(pid: i32, signal: i32) {
    // SAFETY: no pointers.
    check(unsafe { libc::kill(pid, signal) }.into(), "kill");
}

/// Has `unshare` and `close_range` report success and do nothing in the process
/// of `command`: its agent then has the program's descriptors beside its own, as
/// after a restore.
pub(crate) fn share_descriptors(command: &mut Command) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let line = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let filter = [
        // The number of the system call comes first.
        line(LOAD, 0, 0),
        line(EQUAL, 2, libc::SYS_unshare as u32),
        line(EQUAL, 1, libc::SYS_close_range as u32),
        line(RETURN, 0, libc::SECCOMP_RET_ALLOW),
        line(RETURN, 0, libc::SECCOMP_RET_ERRNO),
    ];
    // SAFETY: one system call, which is safe after fork; the kernel copies the
    // filter.
    unsafe {
        command.pre_exec(move || {
            let filter =
                libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
            let mode = libc::SECCOMP_MODE_FILTER;
            match libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
    }
}

pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: a wake reads nothing through the pointer.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// A descriptor out of the table of one thread of another process.
pub(crate) fn take_descriptor(thread: u32, number: u32) -> OwnedFd {
    /// Linux 6.9.
    const PIDFD_THREAD: i32 = libc::O_EXCL;
    // SAFETY: no pointers.
    unsafe {
        let raw = libc::syscall(libc::SYS_pidfd_open, thread, PIDFD_THREAD);
        let pidfd = owned(check(raw, "pidfd_open of a thread"));
        let raw = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0);
        owned(check(raw, "pidfd_getfd"))
    }
}

/// The descriptor that a fork event named.
pub(crate) fn adopt(number: u64) -> OwnedFd {
    owned(number.cast_signed())
}

pub(crate) fn is_root() -> bool {
    // SAFETY: no arguments.
    unsafe { libc::geteuid() == 0 }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
