//! A wake-up that can be polled beside other descriptors.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use crate::uffd::own;

/// An eventfd: any number of [`Self::ring`]s are one readiness until
/// [`Self::clear`].
#[derive(Debug)]
pub struct EventFd {
    fd: OwnedFd,
}

impl EventFd {
    /// A new one, not ringing.
    pub fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes two integers and returns a new descriptor.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd: own(fd) })
    }

    /// Makes it readable.
    pub fn ring(&self) {
        let one = 1u64;
        // SAFETY: eight readable bytes. A full counter (EAGAIN) is readable
        // anyway.
        unsafe { libc::write(self.fd.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Takes all rings so far.
    pub fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: eight writable bytes. EAGAIN means that nobody rang.
        unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

/// Has a memory cgroup of version 1 tell when it is charged `bytes`, from below or from
/// above; until what is returned is closed. The kernel looks when so many pages have been
/// charged on a processor that it is half a MiB late at most for each. This waits until no
/// processor reads its list any more: some milliseconds, in which it does nothing.
///
/// # Errors
/// It is no such cgroup, or it has gone.
pub fn alarm_when_charged(directory: &Path, bytes: u64) -> io::Result<EventFd> {
    let event = EventFd::new()?;
    let usage = File::open(directory.join("memory.usage_in_bytes"))?;
    let line = format!("{} {} {bytes}", raw(&event), usage.as_raw_fd());
    let mut control =
        OpenOptions::new().write(true).open(directory.join("cgroup.event_control"))?;
    control.write_all(line.as_bytes())?;
    Ok(event)
}

/// Its number.
pub(crate) fn raw(event: &EventFd) -> RawFd {
    event.fd.as_raw_fd()
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
