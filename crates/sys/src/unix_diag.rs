//! Who is connected to whom: the unix sockets of a network namespace, as the
//! kernel's socket diagnosis (`sock_diag(7)`) lists them.

use std::io;
use std::os::fd::AsRawFd;

use crate::uffd::own;

/// A socket that is connected to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnixConnection {
    /// Its inode, as in `socket:[…]`.
    pub inode: u32,
    /// The inode of the other end; 0 when that is not (yet) anybody's.
    pub peer: u32,
    /// A datagram socket; stream or packets otherwise.
    pub datagram: bool,
}

/// From `linux/sock_diag.h` and `linux/unix_diag.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SHOW_PEER: u32 = 4;
const ATTRIBUTE_PEER: u16 = 2;

/// nlmsghdr (16), unix_diag_req (24).
const REQUEST_BYTES: usize = 40;
const HEADER_BYTES: usize = 16;
const MESSAGE_BYTES: usize = 16;

fn request() -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[0..4].copy_from_slice(&(REQUEST_BYTES as u32).to_ne_bytes());
    bytes[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
    bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
    bytes[16] = libc::AF_UNIX as u8;
    bytes[20..24].copy_from_slice(&u32::MAX.to_ne_bytes()); // sockets in every state
    bytes[28..32].copy_from_slice(&SHOW_PEER.to_ne_bytes());
    bytes
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// What one unix_diag_msg with its attributes says.
fn parse(message: &[u8]) -> Option<UnixConnection> {
    let kind = i32::from(*message.get(1)?);
    let inode = u32::from_ne_bytes(number(message, 4)?);
    let mut at = MESSAGE_BYTES;
    while let (Some(length), Some(name)) = (number(message, at), number(message, at + 2)) {
        let length = usize::from(u16::from_ne_bytes(length));
        if u16::from_ne_bytes(name) == ATTRIBUTE_PEER {
            let peer = u32::from_ne_bytes(number(message, at + 4)?);
            return Some(UnixConnection { inode, peer, datagram: kind == libc::SOCK_DGRAM });
        }
        at += length.max(4).next_multiple_of(4);
    }
    None
}

/// All connected unix sockets of the calling thread's network namespace.
pub fn unix_connections() -> io::Result<Vec<UnixConnection>> {
    // SAFETY: integers only, returns a new descriptor.
    let fd = unsafe {
        libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_SOCK_DIAG)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let socket = own(fd);
    let request = request();
    // SAFETY: `request` is live and of the length given.
    let sent = unsafe { libc::send(socket.as_raw_fd(), request.as_ptr().cast(), request.len(), 0) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut buffer = vec![0u8; 64 << 10];
    loop {
        // SAFETY: `buffer` is live and of the length given.
        let got =
            unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut rest = &buffer[..got as usize];
        if rest.is_empty() {
            return Ok(found);
        }
        while let (Some(length), Some(kind)) = (number(rest, 0), number(rest, 4)) {
            let length = u32::from_ne_bytes(length) as usize;
            match i32::from(u16::from_ne_bytes(kind)) {
                libc::NLMSG_DONE => return Ok(found),
                libc::NLMSG_ERROR => {
                    let code = number(rest, HEADER_BYTES).map_or(libc::EIO, i32::from_ne_bytes);
                    return Err(io::Error::from_raw_os_error(code.abs()));
                }
                _ => found.extend(rest.get(HEADER_BYTES..length).and_then(parse)),
            }
            rest = rest.get(length.max(HEADER_BYTES).next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_pair_is_seen_from_both_ends() {
        let (one, other) = UnixStream::pair().expect("a pair");
        let inode = |socket: &UnixStream| {
            let fd = socket.as_raw_fd();
            std::fs::metadata(format!("/proc/self/fd/{fd}")).expect("its inode").ino() as u32
        };
        let found = unix_connections().expect("the list");
        for (inode, peer) in [(inode(&one), inode(&other)), (inode(&other), inode(&one))] {
            assert!(found.contains(&UnixConnection { inode, peer, datagram: false }));
        }
        let gone = inode(&other);
        drop(other);
        let found = unix_connections().expect("the list");
        assert!(found.iter().all(|connection| connection.peer != gone));
    }
}
