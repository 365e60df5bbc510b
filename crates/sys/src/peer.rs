//! Who is who: the process at the other end of a unix socket, and the number
//! behind a user's name. What a peer may do is the caller's business.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::process::{Pidfd, start_of};
use crate::uffd::own;

/// The process at the other end of a connected unix socket, as the kernel knew
/// it when it connected. The pid may have been reused since then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Process id in our namespace; 0 when it is not visible from here.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// Asks the kernel (`SO_PEERCRED`) who connected to `socket`.
///
/// # Errors
/// The kernel's, when `socket` is not a connected unix socket.
pub fn peer_of(socket: impl AsFd) -> io::Result<Peer> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open for the call (borrowed), and the kernel
    // writes at most `length` bytes, the size of the struct that we own.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // A socket that was never connected answers with "nobody": pid 0, uid -1.
    if credentials.uid == u32::MAX {
        return Err(io::ErrorKind::NotConnected.into());
    }
    Ok(Peer {
        pid: u32::try_from(credentials.pid).unwrap_or(0),
        uid: credentials.uid,
        gid: credentials.gid,
    })
}

/// The process at the other end of a connected unix socket, held by a descriptor: it
/// lived when this was made, and cannot be confused with whoever gets its number later.
#[derive(Debug)]
pub struct KnownPeer {
    peer: Peer,
    pidfd: Pidfd,
}

impl KnownPeer {
    /// Asks the kernel who connected to `socket`.
    ///
    /// # Errors
    /// It has ended, or `socket` is not a connected unix socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let peer = peer_of(&socket)?;
        let pidfd = match peer_pidfd(&socket) {
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => by_start(peer.pid)?,
            Err(_) => return Err(ended()),
            Ok(pidfd) => pidfd,
        };
        if pidfd.has_exited() {
            return Err(ended());
        }
        Ok(Self { peer, pidfd })
    }

    /// Its numbers.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// The process.
    #[must_use]
    pub fn pidfd(&self) -> &Pidfd {
        &self.pidfd
    }

    /// The process, to be kept.
    #[must_use]
    pub fn into_pidfd(self) -> Pidfd {
        self.pidfd
    }
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the process that connected has ended")
}

/// The kernel's own answer (`SO_PEERPIDFD`, Linux 6.5).
fn peer_pidfd(socket: impl AsFd) -> io::Result<Pidfd> {
    let mut raw: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: as above; the kernel writes one descriptor number.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut raw).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Pidfd::adopt(own(raw)))
}

/// Without it: whoever has the number now, if nobody got it meanwhile. (Such a kernel
/// lacks `UFFDIO_MOVE` as well: no agent gets further.)
fn by_start(pid: u32) -> io::Result<Pidfd> {
    let before = start_of(pid).ok_or_else(ended)?;
    let pidfd = Pidfd::open(pid)?;
    if start_of(pid) == Some(before) { Ok(pidfd) } else { Err(ended()) }
}

/// The C library's headers are older than it.
const SO_PEERPIDFD: libc::c_int = 77;

/// Most memory that one entry of the user data base may take. Real entries have
/// a few hundred bytes; a directory service could answer with anything.
const MAX_ENTRY_BYTES: usize = 1 << 20;

/// The user id of `name`, from wherever the system keeps its users (files,
/// LDAP, systemd). `Ok(None)`: there is no such user.
///
/// # Errors
/// The data base could not be asked.
pub fn user_id(name: &str) -> io::Result<Option<u32>> {
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut buffer = vec![0u8; 4096];
    loop {
        let mut entry = std::mem::MaybeUninit::<libc::passwd>::uninit();
        let mut found: *mut libc::passwd = std::ptr::null_mut();
        // SAFETY: `name` ends with a zero byte; `entry` and `found` are ours to
        // write; `buffer` is as long as we say. All outlive the call.
        let error = unsafe {
            libc::getpwnam_r(
                name.as_ptr(),
                entry.as_mut_ptr(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                &raw mut found,
            )
        };
        match error {
            0 if found.is_null() => return Ok(None),
            // SAFETY: `found` is not null, so glibc has filled `entry`, to
            // which it points; the user id is a plain number in it.
            0 => return Ok(Some(unsafe { (*found).pw_uid })),
            libc::ERANGE if buffer.len() < MAX_ENTRY_BYTES => buffer.resize(buffer.len() * 4, 0),
            // Some data bases say so when the user does not exist.
            libc::ENOENT | libc::ESRCH => return Ok(None),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_peer_is_the_process_that_connected() {
        let (a, b) = UnixStream::pair().expect("socket pair");
        let own = std::fs::metadata("/proc/self").expect("/proc");
        for end in [&a, &b] {
            let peer = peer_of(end).expect("connected");
            assert_eq!(peer.pid, std::process::id());
            assert_eq!((peer.uid, peer.gid), (own.uid(), own.gid()));
        }
    }

    #[test]
    fn a_peer_that_has_ended_is_nobody() {
        let (here, there) = UnixStream::pair().expect("socket pair");
        assert!(KnownPeer::of(&here).is_ok_and(|peer| peer.peer().pid == std::process::id()));
        drop((here, there));
        let directory = std::env::temp_dir().join(format!("strata-peer-{}", std::process::id()));
        let listener = std::os::unix::net::UnixListener::bind(&directory).expect("a socket");
        // Connects, is accepted, and ends: what it leaves in the queue is a dead one's.
        let script = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])";
        let mut python = std::process::Command::new("python3");
        let Ok(status) = python.args(["-c", script]).arg(&directory).status() else {
            std::fs::remove_file(&directory).expect("removed");
            return println!("skipped: no python3");
        };
        assert!(status.success());
        let (ended, _) = listener.accept().expect("it had connected");
        std::fs::remove_file(&directory).expect("removed");
        assert_ne!(peer_of(&ended).expect("its numbers").pid, 0);
        assert_eq!(KnownPeer::of(&ended).expect_err("a dead one").kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_number_is_a_process_as_long_as_it_starts_alike() {
        assert!(by_start(std::process::id()).is_ok_and(|pidfd| !pidfd.has_exited()));
        by_start(u32::MAX >> 1).expect_err("no such process");
    }

    #[test]
    fn what_is_no_socket_has_no_peer() {
        let file = std::fs::File::open("/dev/null").expect("/dev/null");
        assert_eq!(peer_of(&file).expect_err("no socket").raw_os_error(), Some(libc::ENOTSOCK));
    }

    #[test]
    fn users_have_numbers() {
        assert_eq!(user_id("root").expect("data base"), Some(0));
        assert_eq!(user_id("no-such-user-here").expect("data base"), None);
        assert_eq!(user_id("root\0x").expect("data base"), None);
    }
}
