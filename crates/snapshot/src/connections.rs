//! Which TCP connections have both ends in one tree: the ones that can go on in
//! what is restored from it. To a peer outside, a connection has ended with the
//! program.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};
use std::{fs, io};

use strata_sys::abort_connection;

/// How long a connection may still be some program's: one that was just killed.
const LETS_GO_WITHIN: Duration = Duration::from_secs(1);
/// Between two looks whether connections are gone.
const LOOK: Duration = Duration::from_millis(2);
/// States in the kernel's list that keep nobody from making the same connection
/// again: what it remembers of a closed one.
const FIN_WAIT2: u8 = 5;
const TIME_WAIT: u8 = 6;

/// One end of a connection.
pub(crate) type End = SocketAddr;
/// A socket's own end and the other one.
pub(crate) type Ends = (End, End);

/// IPv4 in IPv6 and IPv4 are the same address.
pub(crate) fn end(address: IpAddr, port: u16) -> End {
    (address.to_canonical(), port).into()
}

/// An address from 32-bit words whose bytes are in the order of the network.
pub(crate) fn address(words: &[u32]) -> Option<IpAddr> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    match bytes.len() {
        4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into()),
        16 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
        _ => None,
    }
}

/// Of connections (this end, the other one) those whose other end is there, too.
pub(crate) fn with_both_ends(all: &BTreeSet<Ends>) -> BTreeSet<Ends> {
    all.iter().filter(|(own, other)| all.contains(&(*other, *own))).copied().collect()
}

/// `0100007F:1F90` of `/proc/net/tcp`.
fn listed_end(text: &str) -> Option<End> {
    let (address_text, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(address_text.get(at..at + 8)?, 16).ok();
    let words: Option<Vec<u32>> = (0..address_text.len()).step_by(8).map(word).collect();
    Some(end(address(&words?)?, u16::from_str_radix(port, 16).ok()?))
}

/// A socket that `/proc/net/tcp` lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Listed {
    ends: Ends,
    state: u8,
    /// 0: no program has it any more.
    inode: u32,
}

fn listed(line: &str) -> Option<Listed> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (own, other) = (listed_end(fields.get(1)?)?, listed_end(fields.get(2)?)?);
    let state = u8::from_str_radix(fields.get(3)?, 16).ok()?;
    Some(Listed { ends: (own, other), state, inode: fields.get(9)?.parse().ok()? })
}

/// The TCP sockets of the network of process `pid` that are or were connected.
fn list(pid: u32) -> io::Result<Vec<Listed>> {
    let mut found = Vec::new();
    for kind in ["tcp", "tcp6"] {
        match fs::read_to_string(format!("/proc/{pid}/net/{kind}")) {
            Ok(text) => found.extend(text.lines().filter_map(listed)),
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    found.retain(|socket| socket.ends.1.port() != 0);
    Ok(found)
}

/// Whether any of the sockets `inodes`, in the network of process `pid`, are
/// connected to each other.
pub(crate) fn are_inside(pid: u32, inodes: &BTreeSet<u32>) -> io::Result<bool> {
    let own = list(pid)?.into_iter().filter(|socket| inodes.contains(&socket.inode));
    Ok(!with_both_ends(&own.map(|socket| socket.ends).collect()).is_empty())
}

/// Waits until nothing of the connections is left in this network that keeps them
/// from being made again. What a killed program had not sent yet the kernel still
/// tries to send; to nobody, as the other end has gone as well.
///
/// # Errors
/// A connection that is still there at the time `until`.
pub(crate) fn wait_gone(wanted: &BTreeSet<Ends>, until: Instant) -> io::Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let owned_until = until.min(Instant::now() + LETS_GO_WITHIN);
    loop {
        let mut left = list(std::process::id())?;
        left.retain(|socket| wanted.contains(&socket.ends));
        for socket in left.iter().filter(|socket| socket.inode == 0) {
            // Where the kernel cannot, it takes its time.
            let _ = abort_connection(socket.ends.0, socket.ends.1);
        }
        left.retain(|socket| ![FIN_WAIT2, TIME_WAIT].contains(&socket.state));
        let owned = left.iter().find(|socket| socket.inode != 0);
        let Some(Listed { ends: (own, other), inode, .. }) = owned.or(left.first()) else {
            return Ok(());
        };
        if Instant::now() >= if *inode != 0 { owned_until } else { until } {
            return Err(io::Error::other(format!("{own} is still connected to {other}")));
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::MetadataExt;

    fn inode(fd: &impl std::os::fd::AsRawFd) -> u32 {
        fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("its inode").ino() as u32
    }

    #[test]
    fn both_ends_are_found_in_either_family() {
        for address in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                println!("skipped: no {address} here");
                continue;
            };
            let port = listener.local_addr().expect("its port").port();
            let host = if address.starts_with("[::1]") { "::1" } else { "127.0.0.1" };
            let client = TcpStream::connect((host, port)).expect("connected");
            let (server, _) = listener.accept().expect("accepted");
            let inside = |inodes: &[u32]| {
                are_inside(std::process::id(), &inodes.iter().copied().collect()).expect("a look")
            };
            assert!(inside(&[inode(&client), inode(&server), inode(&listener)]), "{address}");
            assert!(!inside(&[inode(&client), inode(&listener)]), "{address}");
            assert!(!inside(&[]), "{address}");
        }
    }

    #[test]
    fn what_a_closed_connection_leaves_goes_and_a_living_one_does_not() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let client = TcpStream::connect(listener.local_addr().expect("its port")).expect("there");
        let (server, from) = listener.accept().expect("accepted");
        let wanted = BTreeSet::from([(from, listener.local_addr().expect("its port"))]);
        let error = wait_gone(&wanted, Instant::now()).expect_err("it is there");
        assert!(error.to_string().contains("still connected"), "{error}");
        drop((client, server));
        wait_gone(&wanted, Instant::now() + Duration::from_secs(30)).expect("it is gone");
    }

    #[test]
    fn a_line_of_the_list_is_read() {
        let line = "   1: 0100007F:1F90 0200007F:C350 01 00000000:00000000 00:00000000 \
                    00000000     0        0 4711 1 0000000000000000 20 4 30 10 -1";
        let ends = (("127.0.0.1", 8080), ("127.0.0.2", 50000));
        let parsed = |(host, port): (&str, u16)| end(host.parse().expect("an address"), port);
        let ends = (parsed(ends.0), parsed(ends.1));
        assert_eq!(listed(line), Some(Listed { ends, state: 1, inode: 4711 }));
        assert_eq!(listed("  sl  local_address rem_address   st tx_queue"), None);
    }
}
