//! Ends TCP connections that nobody has any more and the kernel still closes, by
//! its socket diagnosis (`sock_diag(7)`).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;

use crate::uffd::own;

/// From `linux/sock_diag.h`.
const SOCK_DESTROY: u16 = 21;
/// nlmsghdr (16), inet_diag_req_v2 (56).
const REQUEST_BYTES: usize = 72;
const ADDRESS_AT: usize = 28;
const PEER_ADDRESS_AT: usize = 44;
const COOKIE_AT: usize = 64;
const HEADER_BYTES: usize = 16;

fn request(from: SocketAddr, to: SocketAddr) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[0..4].copy_from_slice(&(REQUEST_BYTES as u32).to_ne_bytes());
    bytes[4..6].copy_from_slice(&SOCK_DESTROY.to_ne_bytes());
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
    bytes[16] = if from.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 } as u8;
    bytes[17] = libc::IPPROTO_TCP as u8;
    bytes[20..24].copy_from_slice(&u32::MAX.to_ne_bytes()); // in every state
    bytes[24..26].copy_from_slice(&from.port().to_be_bytes());
    bytes[26..28].copy_from_slice(&to.port().to_be_bytes());
    for (at, address) in [(ADDRESS_AT, from.ip()), (PEER_ADDRESS_AT, to.ip())] {
        match address {
            IpAddr::V4(address) => bytes[at..at + 4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => bytes[at..at + 16].copy_from_slice(&address.octets()),
        }
    }
    bytes[COOKIE_AT..].fill(0xff); // whichever socket it is
    bytes
}

/// Ends the connection of the calling thread's network namespace at once. IPv4 in
/// IPv6 is told as IPv4.
///
/// # Errors
/// There is none, the caller may not (CAP_NET_ADMIN), or the kernel cannot
/// (CONFIG_INET_DIAG_DESTROY).
pub fn abort_connection(from: SocketAddr, to: SocketAddr) -> io::Result<()> {
    // SAFETY: integers only, returns a new descriptor.
    let fd = unsafe {
        libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_SOCK_DIAG)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let socket = own(fd);
    let request = request(from, to);
    // SAFETY: `request` is live and of the length given.
    let sent = unsafe { libc::send(socket.as_raw_fd(), request.as_ptr().cast(), request.len(), 0) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut answer = [0u8; 256];
    // SAFETY: `answer` is live and of the length given.
    let got =
        unsafe { libc::recv(socket.as_raw_fd(), answer.as_mut_ptr().cast(), answer.len(), 0) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    let code = answer.get(HEADER_BYTES..HEADER_BYTES + 4).and_then(|bytes| bytes.try_into().ok());
    match code.map_or(libc::EIO, i32::from_ne_bytes) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code.abs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_connection_ends_at_once_for_both() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                println!("skipped: no {address} here");
                continue;
            };
            let at = listener.local_addr().expect("its address");
            let mut client = TcpStream::connect(at).expect("connected");
            let (mut server, from) = listener.accept().expect("accepted");
            if let Err(error) = abort_connection(from, at) {
                println!("skipped: {error}");
                continue;
            }
            assert!(client.read(&mut [0]).is_err(), "{address}: it was aborted");
            assert!(server.read(&mut [0]).is_err(), "{address}: it was reset");
            assert!(abort_connection(from, at).is_err(), "there is none any more");
        }
    }
}
