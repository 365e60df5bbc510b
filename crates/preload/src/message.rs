//! The daemon's sockets: connecting, the agent's messages with descriptors,
//! hang-up.
//!
//! Not here: the order of the messages (`handshake`).

use core::mem::MaybeUninit;

use libc::{c_int, c_uint, c_void};
use strata_units::wire::{Hello, HelloBefore, Ready, Userfaultfd, Welcome};

use crate::kernel::{Deadline, Fd, timespec, word};
use crate::syscall::call;

/// Descriptors that one message may carry.
pub(crate) const MOST_DESCRIPTORS: usize = 2;
/// Words of a control message with that many descriptors; generous, since
/// `CMSG_SPACE` is no constant expression.
const CONTROL_WORDS: usize = 8;

/// Why a message did not pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MessageError {
    /// No one listens, or the connection broke.
    Gone,
    /// The deadline passed.
    Late,
    /// It came, but it is not what the protocol says.
    Malformed,
}

/// A wire structure.
///
/// # Safety
/// Plain data without padding: every bit pattern is valid, every byte is
/// initialised.
pub(crate) unsafe trait Message: Default {}
// SAFETY: integers alone, sizes asserted beside their definitions.
unsafe impl Message for Hello {}
// SAFETY: as that.
unsafe impl Message for HelloBefore {}
// SAFETY: u64, u32, u32.
unsafe impl Message for Welcome {}
// SAFETY: one u64.
unsafe impl Message for Userfaultfd {}
// SAFETY: one u64.
unsafe impl Message for Ready {}

/// A new socket of a kind (`SOCK_`).
fn new_socket(kind: c_int) -> Result<Fd, MessageError> {
    let kind = word(kind | libc::SOCK_CLOEXEC);
    // SAFETY: no pointers.
    unsafe { call(libc::SYS_socket, [word(libc::AF_UNIX), kind, 0, 0, 0, 0]) }
        .map(|raw| Fd::own(raw as c_int))
        .map_err(|_| MessageError::Gone)
}

/// Connects to a socket of the daemon, of the kind that it is (`SOCK_`).
pub(crate) fn connect(
    address: &libc::sockaddr_un,
    kind: c_int,
    deadline: Deadline,
) -> Result<Fd, MessageError> {
    connect_to(address, size_of::<libc::sockaddr_un>(), kind, deadline)
}

fn connect_to(
    address: &libc::sockaddr_un,
    address_bytes: usize,
    kind: c_int,
    deadline: Deadline,
) -> Result<Fd, MessageError> {
    let socket = new_socket(kind)?;
    // Bounds the connect too, which waits while the listener's queue is full.
    let left = deadline.left().ok_or(MessageError::Late)?;
    let timeout = libc::timeval {
        tv_sec: left.as_secs().cast_signed(),
        tv_usec: i64::from(left.subsec_micros().max(1)),
    };
    let option = [
        socket.word(),
        word(libc::SOL_SOCKET),
        word(libc::SO_SNDTIMEO),
        &raw const timeout as u64,
        size_of::<libc::timeval>() as u64,
        0,
    ];
    let peer = core::ptr::from_ref(address) as u64;
    let peer = [socket.word(), peer, address_bytes as u64, 0, 0, 0];
    // SAFETY: the kernel copies the option's value and the address, both valid
    // for the calls and of the sizes given.
    let result =
        unsafe { call(libc::SYS_setsockopt, option).and_then(|_| call(libc::SYS_connect, peer)) };
    match result {
        Ok(_) => Ok(socket),
        Err(libc::EAGAIN) => Err(MessageError::Late),
        Err(_) => Err(MessageError::Gone),
    }
}

/// An address without a path: `name` in the namespace of abstract sockets, which
/// neither a root directory nor a user's rights stand before; and its length.
fn abstract_address(name: &[u8]) -> (libc::sockaddr_un, usize) {
    // SAFETY: all zero is a valid address structure.
    let mut address: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte stays zero: that makes it one.
    for (to, from) in address.sun_path.iter_mut().skip(1).zip(name) {
        *to = *from as libc::c_char;
    }
    (address, core::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len())
}

/// Connects to the daemon's agent socket that has no path.
pub(crate) fn connect_abstract(name: &[u8], deadline: Deadline) -> Result<Fd, MessageError> {
    let (address, bytes) = abstract_address(name);
    connect_to(&address, bytes, libc::SOCK_SEQPACKET, deadline)
}

/// Who is at the other end: its process and its user, as far as they have numbers
/// here.
pub(crate) fn peer(socket: &Fd) -> Option<(u32, u32)> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as u32;
    let arguments = [
        socket.word(),
        word(libc::SOL_SOCKET),
        word(libc::SO_PEERCRED),
        &raw mut peer as u64,
        &raw mut bytes as u64,
        0,
    ];
    // SAFETY: both places are valid for the call and of the sizes given.
    unsafe { call(libc::SYS_getsockopt, arguments) }.ok()?;
    Some((peer.pid.cast_unsigned(), peer.uid))
}

/// Bytes of a name that the kernel makes up: five hexadecimal digits.
const MADE_UP_BYTES: usize = 5;

/// Listens where the kernel chooses, for another thread of this process; and the
/// name of that place.
pub(crate) fn listen_anywhere() -> Result<(Fd, u64), MessageError> {
    let listener = new_socket(libc::SOCK_SEQPACKET)?;
    let (mut address, _) = abstract_address(&[]);
    let place = &raw mut address as u64;
    let family_bytes = size_of::<libc::sa_family_t>() as u64;
    let mut bytes = size_of::<libc::sockaddr_un>() as u32;
    let length = &raw mut bytes as u64;
    // SAFETY: the address and its length are valid for the calls; to bind, the
    // kernel reads the family alone, and then writes what it has chosen.
    unsafe {
        call(libc::SYS_bind, [listener.word(), place, family_bytes, 0, 0, 0])
            .and_then(|_| call(libc::SYS_listen, [listener.word(), 1, 0, 0, 0, 0]))
            .and_then(|_| call(libc::SYS_getsockname, [listener.word(), place, length, 0, 0, 0]))
    }
    .map_err(|_| MessageError::Gone)?;
    let (_, expected) = abstract_address(&[0; MADE_UP_BYTES]);
    if bytes as usize != expected {
        return Err(MessageError::Malformed);
    }
    let mut name = [0; 8];
    for (to, from) in name.iter_mut().zip(&address.sun_path[1..=MADE_UP_BYTES]) {
        *to = *from as u8;
    }
    Ok((listener, u64::from_le_bytes(name)))
}

/// Connects to another thread of this process that listens under such a name.
pub(crate) fn connect_own(name: u64, deadline: Deadline) -> Result<Fd, MessageError> {
    own(connect_abstract(&name.to_le_bytes()[..MADE_UP_BYTES], deadline)?)
}

/// The connection of another thread of this process.
pub(crate) fn accept_own(listener: &Fd, deadline: Deadline) -> Result<Fd, MessageError> {
    wait_readable(listener, deadline)?;
    let flags = word(libc::SOCK_CLOEXEC);
    // SAFETY: nothing is to be written about the other end.
    let raw = unsafe { call(libc::SYS_accept4, [listener.word(), 0, 0, flags, 0, 0]) };
    own(raw.map(|raw| Fd::own(raw as c_int)).map_err(|_| MessageError::Gone)?)
}

/// A connection whose other end is in this process too.
fn own(socket: Fd) -> Result<Fd, MessageError> {
    match peer(&socket) {
        Some((pid, _)) if pid == crate::kernel::process_id() => Ok(socket),
        _ => Err(MessageError::Malformed),
    }
}

/// Sends one message, with descriptors if there are some, at most
/// [`MOST_DESCRIPTORS`].
pub(crate) fn send<T: Message>(
    socket: &Fd,
    message: &T,
    descriptors: &[&Fd],
) -> Result<(), MessageError> {
    let mut vector = libc::iovec {
        iov_base: core::ptr::from_ref(message).cast_mut().cast(),
        iov_len: size_of::<T>(),
    };
    let mut space = [0_u64; CONTROL_WORDS];
    // SAFETY: all zero is a valid, empty message header.
    let mut header: libc::msghdr = unsafe { core::mem::zeroed() };
    header.msg_iov = &raw mut vector;
    header.msg_iovlen = 1;
    let descriptors = &descriptors[..descriptors.len().min(MOST_DESCRIPTORS)];
    if !descriptors.is_empty() {
        let bytes = descriptors.len() * size_of::<c_int>();
        header.msg_control = space.as_mut_ptr().cast();
        // SAFETY: the space is aligned for a cmsghdr and, with eight words,
        // larger than one with two descriptors, so that the first header and its
        // data lie inside it.
        unsafe {
            header.msg_controllen = libc::CMSG_SPACE(bytes as c_uint) as usize;
            let control = libc::CMSG_FIRSTHDR(&raw const header);
            (*control).cmsg_level = libc::SOL_SOCKET;
            (*control).cmsg_type = libc::SCM_RIGHTS;
            (*control).cmsg_len = libc::CMSG_LEN(bytes as c_uint) as usize;
            let data = libc::CMSG_DATA(control).cast::<c_int>();
            for (i, descriptor) in descriptors.iter().enumerate() {
                data.add(i).write_unaligned(descriptor.raw());
            }
        }
    }
    // SAFETY: the header points to valid buffers, which the call only reads.
    let sent = unsafe {
        let flags = word(libc::MSG_NOSIGNAL);
        call(libc::SYS_sendmsg, [socket.word(), &raw const header as u64, flags, 0, 0, 0])
    };
    match sent {
        Ok(_) => Ok(()),
        Err(libc::EAGAIN) => Err(MessageError::Late),
        Err(_) => Err(MessageError::Gone),
    }
}

/// Receives one message and its descriptors.
pub(crate) fn receive<T: Message>(
    socket: &Fd,
    deadline: Deadline,
) -> Result<(T, [Option<Fd>; MOST_DESCRIPTORS]), MessageError> {
    wait_readable(socket, deadline)?;
    let mut message = T::default();
    let mut vector =
        libc::iovec { iov_base: (&raw mut message).cast::<c_void>(), iov_len: size_of::<T>() };
    let mut space = [MaybeUninit::<u64>::zeroed(); CONTROL_WORDS];
    // SAFETY: all zero is a valid, empty message header.
    let mut header: libc::msghdr = unsafe { core::mem::zeroed() };
    header.msg_iov = &raw mut vector;
    header.msg_iovlen = 1;
    header.msg_control = space.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&space);
    // SAFETY: the header points to valid buffers of the sizes given; T takes
    // any bytes.
    let received = unsafe {
        let flags = word(libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT);
        call(libc::SYS_recvmsg, [socket.word(), &raw mut header as u64, flags, 0, 0, 0])
    };
    let received = received.ok().filter(|bytes| *bytes != 0).ok_or(MessageError::Gone)?;
    let (descriptors, too_many) = take_descriptors(&header);
    let truncated = header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    if received != size_of::<T>() as u64 || truncated || too_many {
        return Err(MessageError::Malformed);
    }
    Ok((message, descriptors))
}

/// Owns every descriptor that came, closing those beyond what we expect.
fn take_descriptors(header: &libc::msghdr) -> ([Option<Fd>; MOST_DESCRIPTORS], bool) {
    let mut taken = [const { None }; MOST_DESCRIPTORS];
    let mut count = 0;
    // SAFETY: the kernel filled the header and its control space, so that the
    // macros stay inside `msg_controllen`, and each SCM_RIGHTS message holds
    // whole descriptors that are now open and ours.
    unsafe {
        let mut control = libc::CMSG_FIRSTHDR(header);
        while !control.is_null() {
            if (*control).cmsg_level == libc::SOL_SOCKET && (*control).cmsg_type == libc::SCM_RIGHTS
            {
                let bytes = (*control).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(control).cast::<c_int>();
                for i in 0..bytes / size_of::<c_int>() {
                    let descriptor = Fd::own(data.add(i).read_unaligned());
                    if let Some(place) = taken.get_mut(count) {
                        *place = Some(descriptor);
                    }
                    count += 1;
                }
            }
            control = libc::CMSG_NXTHDR(header, control);
        }
    }
    (taken, count > MOST_DESCRIPTORS)
}

fn wait_readable(socket: &Fd, deadline: Deadline) -> Result<(), MessageError> {
    loop {
        let left = timespec(deadline.left().ok_or(MessageError::Late)?);
        match poll(socket, libc::POLLIN, &left) {
            Ok(0) => return Err(MessageError::Late),
            Ok(_) => return Ok(()),
            Err(libc::EINTR) => {}
            Err(_) => return Err(MessageError::Gone),
        }
    }
}

/// Has the daemon closed its end? After the handshake it sends nothing, so
/// there is nothing else to find.
pub(crate) fn hung_up(socket: &Fd) -> bool {
    poll(socket, libc::POLLRDHUP, &libc::timespec { tv_sec: 0, tv_nsec: 0 })
        .is_ok_and(|ready| ready != 0)
}

fn poll(socket: &Fd, events: i16, timeout: &libc::timespec) -> Result<u64, c_int> {
    let mut entry = libc::pollfd { fd: socket.raw(), events, revents: 0 };
    // The kernel writes the time left back into its argument.
    let mut timeout = *timeout;
    // SAFETY: one entry and one time, both valid for the call; no signal mask.
    unsafe { call(libc::SYS_ppoll, [&raw mut entry as u64, 1, &raw mut timeout as u64, 0, 0, 0]) }
}
