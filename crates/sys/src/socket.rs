//! Unix sockets with descriptors.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::uffd::own;

/// Most descriptors in one message; further ones are closed unseen.
const MOST_FDS: usize = 4;

fn unix_address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: sockaddr_un is plain data, all zeroes is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} is longer than a socket's name may be (107 bytes)", path.display()),
        ));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
    Ok((address, length as libc::socklen_t))
}

fn abstract_address(name: &[u8]) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: sockaddr_un is plain data, all zeroes is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The zero in front makes it one.
    if name.len() >= address.sun_path.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (to, from) in address.sun_path[1..].iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((address, length as libc::socklen_t))
}

fn seqpacket() -> io::Result<OwnedFd> {
    // SAFETY: integers only, returns a new descriptor.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(own(fd)) }
}

/// Listens for agents.
#[derive(Debug)]
pub struct SeqPacketListener {
    fd: OwnedFd,
}

impl SeqPacketListener {
    /// Binds `path`, which must not exist.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Self::bind_address(unix_address(path)?)
    }

    /// Binds a name that is no path: neither a root directory nor permissions
    /// stand before it, so that whoever connects must be looked at. It is free
    /// again when the last descriptor closes.
    pub fn bind_abstract(name: &[u8]) -> io::Result<Self> {
        Self::bind_address(abstract_address(name)?)
    }

    fn bind_address((address, length): (libc::sockaddr_un, libc::socklen_t)) -> io::Result<Self> {
        let fd = seqpacket()?;
        // SAFETY: `address` is live and `length` does not exceed it.
        let bound = unsafe {
            libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) == 0
                && libc::listen(fd.as_raw_fd(), 128) == 0
        };
        if bound { Ok(Self { fd }) } else { Err(io::Error::last_os_error()) }
    }

    /// A socket at which somebody listens already.
    #[must_use]
    pub fn adopt(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Another descriptor of the same socket.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()? })
    }

    /// Waits for a connection.
    pub fn accept(&self) -> io::Result<SeqPacket> {
        // SAFETY: null address arguments are allowed; returns a new descriptor.
        let fd = unsafe {
            libc::accept4(
                self.fd.as_raw_fd(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                libc::SOCK_CLOEXEC,
            )
        };
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(SeqPacket { fd: own(fd) }) }
    }
}

impl AsFd for SeqPacketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One connection of packets.
#[derive(Debug)]
pub struct SeqPacket {
    fd: OwnedFd,
}

impl SeqPacket {
    /// Connects to a listener.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let (address, length) = unix_address(path)?;
        let fd = seqpacket()?;
        // SAFETY: `address` is live and `length` does not exceed it.
        let code = unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length) };
        if code == 0 { Ok(Self { fd }) } else { Err(io::Error::last_os_error()) }
    }

    /// Connects to a listener whose name is no path.
    pub fn connect_abstract(name: &[u8]) -> io::Result<Self> {
        let (address, length) = abstract_address(name)?;
        let fd = seqpacket()?;
        // SAFETY: `address` is live and `length` does not exceed it.
        let code = unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length) };
        if code == 0 { Ok(Self { fd }) } else { Err(io::Error::last_os_error()) }
    }

    /// One that was accepted earlier.
    #[must_use]
    pub fn adopt(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Longest wait of one receive or send.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let value = libc::timeval {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_usec: timeout.subsec_micros() as libc::suseconds_t,
        };
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            // SAFETY: `value` is a live timeval of the length given.
            let code = unsafe {
                libc::setsockopt(
                    self.fd.as_raw_fd(),
                    libc::SOL_SOCKET,
                    option,
                    (&raw const value).cast(),
                    size_of::<libc::timeval>() as libc::socklen_t,
                )
            };
            if code != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Sends one packet with up to [`MOST_FDS`] descriptors.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_with_fds(self, bytes, fds).map(drop)
    }

    /// Receives one packet: how many bytes of it fit `buffer`, and its
    /// descriptors. 0 bytes: the other end is gone.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        receive_with_fds(self, buffer)
    }
}

/// Connects to a stream's listener if it has room for one more now: a listener that accepts
/// nobody holds nobody up.
///
/// # Errors
/// The kernel's; `WouldBlock` when there is no room.
pub fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let stream = stream_socket(libc::SOCK_NONBLOCK)?;
    connect(&stream, path)?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// The same, and waits for so long until there is room.
///
/// # Errors
/// The kernel's; `WouldBlock` when there is none by then.
pub fn connect_within(path: &Path, time: Duration) -> io::Result<UnixStream> {
    let stream = stream_socket(0)?;
    // What a connection waits at most, too.
    stream.set_write_timeout(Some(time.max(Duration::from_millis(1))))?;
    while let Err(error) = connect(&stream, path) {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    stream.set_write_timeout(None)?;
    Ok(stream)
}

fn stream_socket(flags: libc::c_int) -> io::Result<UnixStream> {
    // SAFETY: integers only, returns a new descriptor.
    let fd =
        unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags, 0) };
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(UnixStream::from(own(fd))) }
}

fn connect(stream: &UnixStream, path: &Path) -> io::Result<()> {
    let (address, length) = unix_address(path)?;
    // SAFETY: `address` is live and `length` does not exceed it.
    let code = unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), length) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends to a unix socket of any kind, with up to [`MOST_FDS`] descriptors: how many bytes
/// went, which of a stream may be fewer.
pub fn send_with_fds(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    assert!(fds.len() <= MOST_FDS, "more descriptors than a message holds");
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut space = [0u64; 8];
    // SAFETY: msghdr is plain data, all zeroes is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        let payload = size_of_val(fds) as libc::c_uint;
        message.msg_control = space.as_mut_ptr().cast();
        // SAFETY: CMSG_SPACE only computes.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(payload) } as usize;
        assert!(message.msg_controllen <= size_of_val(&space), "the control buffer holds all");
        // SAFETY: msg_control points to `space`, aligned and large enough
        // (asserted), so the first header and its data lie inside.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(payload) as usize;
            let data = libc::CMSG_DATA(header).cast::<RawFd>();
            for (index, fd) in fds.iter().enumerate() {
                data.add(index).write_unaligned(fd.as_raw_fd());
            }
        }
    }
    // SAFETY: `message` points to live buffers of the lengths it names.
    let sent = unsafe {
        libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

/// Receives from a unix socket of any kind: how many bytes came, and the
/// descriptors with them (at most [`MOST_FDS`]; more are closed). 0 bytes: the
/// other end is gone.
pub fn receive_with_fds(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut space = [MaybeUninit::<u64>::zeroed(); 8];
    // SAFETY: msghdr is plain data, all zeroes is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&space);
    // SAFETY: `message` points to live buffers of the lengths it names.
    let got = unsafe {
        libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC)
    };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut fds = Vec::new();
    // SAFETY: the kernel filled `space` with well-formed control messages
    // and set msg_controllen; the CMSG macros stay inside it. Each number
    // is a new descriptor of this process.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for index in 0..bytes / size_of::<RawFd>() {
                    fds.push(own(data.add(index).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    fds.truncate(MOST_FDS);
    Ok((got as usize, fds))
}

impl AsFd for SeqPacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Sends what there is room for without waiting, of two pieces one behind the other; how
/// many bytes.
///
/// # Errors
/// What `sendmsg` says; never that it would have to wait.
pub fn send_now(stream: &UnixStream, first: &[u8], second: &[u8]) -> io::Result<usize> {
    let piece = |bytes: &[u8]| libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut pieces = [piece(first), piece(second)];
    // SAFETY: all zeroes is a message of nothing.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = 2;
    loop {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: a live descriptor, and a message whose two pieces are readable memory of
        // the lengths given; the kernel only reads them.
        let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, flags) };
        if let Ok(sent) = usize::try_from(sent) {
            return Ok(sent);
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock => return Ok(0),
            _ => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use std::time::Instant;

    #[test]
    fn a_name_that_is_no_path_is_one_listeners() {
        let name = format!("strata-sys-{}", std::process::id());
        let listener = SeqPacketListener::bind_abstract(name.as_bytes()).expect("bind");
        let taken = SeqPacketListener::bind_abstract(name.as_bytes()).expect_err("it is taken");
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        let client = SeqPacket::connect_abstract(name.as_bytes()).expect("connect");
        let server = listener.accept().expect("accept");
        assert_eq!(crate::peer::peer_of(&server).expect("peer").pid, std::process::id());
        drop((client, listener));
        // A child that another test forks has the listener, too, for as long as it lives.
        // Nobody accepts what connects meanwhile: so no more often than has room to wait.
        let until = Instant::now() + Duration::from_secs(30);
        while SeqPacket::connect_abstract(name.as_bytes()).is_ok() {
            assert!(Instant::now() < until, "nobody listens");
            std::thread::sleep(Duration::from_millis(500));
        }
        assert!(SeqPacketListener::bind_abstract(&[b'x'; 108]).is_err(), "it does not fit");
    }

    #[test]
    fn a_listener_without_room_is_waited_for_and_not_for_ever() {
        let directory = std::env::temp_dir().join(format!("strata-room-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("bind");
        let mut waiting = Vec::new();
        let full = loop {
            match connect_now(&path) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let moment = Duration::from_millis(50);
        let full = connect_within(&path, moment).expect_err("nobody makes room");
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        std::thread::scope(|scope| {
            let late = scope.spawn(|| connect_within(&path, Duration::from_secs(60)));
            std::thread::sleep(moment);
            let _room = listener.accept().expect("somebody");
            let stream = late.join().expect("no panic").expect("there is room");
            assert_eq!(stream.write_timeout().expect("an option"), None);
        });
        std::fs::remove_dir_all(&directory).expect("ours");
    }

    #[test]
    fn a_descriptor_travels() {
        let directory = std::env::temp_dir().join(format!("strata-sys-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("s");
        let listener = SeqPacketListener::bind(&path).expect("bind");
        let client = SeqPacket::connect(&path).expect("connect");
        let server = listener.accept().expect("accept");
        assert_eq!(crate::peer::peer_of(&server).expect("peer").pid, std::process::id());
        let file = File::open("/proc/self/comm").expect("comm");
        client.send(b"hello", &[file.as_fd()]).expect("send");
        let mut buffer = [0; 16];
        let (got, mut fds) = server.receive(&mut buffer).expect("receive");
        assert_eq!(&buffer[..got], b"hello");
        let mut text = String::new();
        File::from(fds.pop().expect("one descriptor")).read_to_string(&mut text).expect("read");
        assert!(!text.is_empty());
        drop(client);
        assert_eq!(server.receive(&mut buffer).expect("end").0, 0);
        std::fs::remove_dir_all(&directory).expect("cleaned up");
    }
}
