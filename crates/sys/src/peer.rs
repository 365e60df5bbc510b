//! Who is who: the process at the other end of a unix socket, and the number
//! behind a user's name. What a peer may do is the caller's business.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

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

/// Whether the process that connected to `socket` still lives (`SO_PEERPIDFD`,
/// Linux 6.5): until it has ended nobody else has its number. True where the
/// kernel cannot tell.
#[must_use]
pub fn peer_lives(socket: impl AsFd) -> bool {
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
        let error = io::Error::last_os_error().raw_os_error();
        // ESRCH, ENODATA: it has ended and was collected.
        return error == Some(libc::ENOPROTOOPT);
    }
    // SAFETY: a descriptor that was just made for us and that nobody else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(raw) };
    let mut ended = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, valid for the call, which does not wait.
    unsafe { libc::poll(&raw mut ended, 1, 0) == 0 }
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
    fn a_peer_that_is_here_lives() {
        let (a, b) = UnixStream::pair().expect("socket pair");
        assert!(peer_lives(&a) && peer_lives(&b));
        assert!(!peer_lives(std::fs::File::open("/dev/null").expect("/dev/null")));
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
