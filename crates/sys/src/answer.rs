//! Answers one kind of ioctl of a program that we start, in the kernel's place
//! (seccomp user notification, `seccomp_unotify(2)`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use crate::socket::receive_with_fds;
use crate::uffd::own;

/// From `linux/audit.h`: which system call numbers are meant.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xC000_00B7;

// Where `struct seccomp_data` has its fields (little-endian: the low halves).
const DATA_NUMBER: u32 = 0;
const DATA_ARCHITECTURE: u32 = 4;
const DATA_SECOND_ARGUMENT: u32 = 24;

const fn load(offset: u32) -> libc::sock_filter {
    libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: offset } // BPF_LD | BPF_W | BPF_ABS
}

/// Goes on when equal, else over `otherwise` instructions.
const fn equal(value: u32, otherwise: u8) -> libc::sock_filter {
    libc::sock_filter { code: 0x15, jt: 0, jf: otherwise, k: value } // BPF_JMP | BPF_JEQ | BPF_K
}

const fn give(action: u32) -> libc::sock_filter {
    libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: action } // BPF_RET | BPF_K
}

/// Lets the kernel ask about every ioctl with this `request` that the calling
/// thread makes from now on; whoever has the other end of `channel` answers.
/// Allocates nothing, for use between fork and exec.
pub(crate) fn install_and_send(request: u32, channel: &UnixStream) -> io::Result<()> {
    let filter = install(request)?;
    send_one(channel, filter.as_fd())
}

/// Puts the filter on the calling thread and returns the kernel's end of it.
fn install(request: u32) -> io::Result<OwnedFd> {
    let mut filter = [
        load(DATA_ARCHITECTURE),
        equal(ARCHITECTURE, 5),
        load(DATA_NUMBER),
        equal(libc::SYS_ioctl as u32, 3),
        load(DATA_SECOND_ARGUMENT),
        equal(request, 1),
        give(libc::SECCOMP_RET_USER_NOTIF),
        give(libc::SECCOMP_RET_ALLOW),
    ];
    let program =
        libc::sock_fprog { len: filter.len() as libc::c_ushort, filter: filter.as_mut_ptr() };
    // SAFETY: `program` names a live filter of the length given; the kernel
    // copies it.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(own(fd as RawFd)) }
}

/// Sends one byte with a descriptor, allocating nothing.
fn send_one(socket: &UnixStream, fd: BorrowedFd<'_>) -> io::Result<()> {
    let byte = [0u8];
    let mut iov = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
    let mut space = [0u64; 4];
    // SAFETY: msghdr is plain data, all zeroes is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    // SAFETY: CMSG_SPACE only computes (24 bytes for one descriptor); the
    // header and its data lie inside `space`, which is aligned for them.
    let sent = unsafe {
        message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as libc::c_uint) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as libc::c_uint) as usize;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd.as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    if sent == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// An ioctl whose caller waits for our answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoctlCall {
    id: u64,
    /// The thread that calls.
    pub thread: u32,
    /// The descriptor, in its table.
    pub fd: u32,
    /// The third argument.
    pub argument: u64,
}

/// Hears of the ioctls. Becomes readable with each, and hangs up when nobody is
/// left who could make one. Closed, they fail with ENOSYS.
#[derive(Debug)]
pub struct IoctlListener {
    fd: OwnedFd,
}

impl IoctlListener {
    /// Takes it over from the started program.
    ///
    /// # Errors
    /// It did not send one.
    pub fn accept(channel: &UnixStream) -> io::Result<Self> {
        let mut byte = [0];
        let (_, mut fds) = receive_with_fds(channel, &mut byte)?;
        fds.pop().map(|fd| Self { fd }).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// The next call; `None` when its caller is gone already. Waits for one: look
    /// first whether it is readable.
    pub fn receive(&self) -> io::Result<Option<IoctlCall>> {
        // SAFETY: plain data; the kernel wants zeroes.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: `call` is live and of the type that the request names.
        let code = unsafe {
            libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV as _, &raw mut call)
        };
        if code != 0 {
            let error = io::Error::last_os_error();
            let gone = matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR));
            return if gone { Ok(None) } else { Err(error) };
        }
        Ok(Some(IoctlCall {
            id: call.id,
            thread: call.pid,
            fd: call.data.args[0] as u32,
            argument: call.data.args[2],
        }))
    }

    /// Lets the kernel carry the call out (`None`), or says in its place that it
    /// returned `value`. A caller that is gone is no error.
    pub fn answer(&self, call: IoctlCall, value: Option<i64>) -> io::Result<()> {
        let mut response = libc::seccomp_notif_resp {
            id: call.id,
            val: value.unwrap_or(0),
            error: 0,
            flags: if value.is_some() { 0 } else { libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32 },
        };
        // SAFETY: `response` is live and of the type that the request names.
        let code = unsafe {
            libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND as _, &raw mut response)
        };
        let error = io::Error::last_os_error();
        if code == 0 || error.raw_os_error() == Some(libc::ENOENT) { Ok(()) } else { Err(error) }
    }
}

impl AsFd for IoctlListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::launch::Launch;
    use crate::poll::poll_readable;

    #[test]
    fn an_ioctl_is_answered_in_the_kernels_place() {
        // What isatty asks for (TCGETS): /dev/null is a terminal, for once.
        const TCGETS: u32 = 0x5401;
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let mut launch = Launch::new("/bin/sh");
        launch.args(["-c", "test -t 0"]).ask_about_ioctl(TCGETS, theirs);
        let mut child = match launch.start(Path::new("/dev/null")) {
            Ok(child) => child,
            Err(error) => return println!("skipped: no seccomp filter for us: {error}"),
        };
        let listener = IoctlListener::accept(&ours).expect("a listener");
        let mut answered = 0;
        loop {
            let [polled] = poll_readable([listener.as_fd()], None).expect("a wait");
            if !polled.readable {
                break;
            }
            let Some(call) = listener.receive().expect("a call") else { continue };
            assert_eq!((call.thread, call.fd), (child.id(), 0));
            listener.answer(call, Some(0)).expect("answered");
            answered += 1;
        }
        let ended = child.wait(None).expect("a wait").expect("its end");
        assert!(answered > 0 && ended.success());
    }
}
