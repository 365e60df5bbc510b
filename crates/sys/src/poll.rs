//! Waiting for descriptors.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// What one descriptor is ready for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Polled {
    /// There is something to read.
    pub readable: bool,
    /// The other end is gone.
    pub hangup: bool,
}

/// Waits until one of `fds` is readable or hung up, at most `timeout` (none:
/// for ever). A signal ends the wait with nothing ready.
pub fn poll_readable<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> io::Result<[Polled; N]> {
    let mut list =
        fds.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    let spec = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    });
    let spec_pointer = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `list` holds N pollfds, `spec_pointer` is null or points to
    // `spec`, which outlives the call.
    let code = unsafe {
        libc::ppoll(list.as_mut_ptr(), N as libc::nfds_t, spec_pointer, std::ptr::null())
    };
    if code < 0 {
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::Interrupted {
            return Ok([Polled::default(); N]);
        }
        return Err(error);
    }
    Ok(list.map(|entry| Polled {
        readable: entry.revents & libc::POLLIN != 0,
        hangup: entry.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0,
    }))
}
