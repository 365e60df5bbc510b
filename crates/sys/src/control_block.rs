//! The block of memory that the daemon shares with one agent.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use strata_units::wire::{CONTROL_BYTES, Control};

use crate::uffd::own;

/// A mapped [`Control`] block. The agent may write anything into it at any
/// time: every field is an atomic, and nothing read from it is believed beyond
/// the agent's own tenant.
#[derive(Debug)]
pub struct ControlBlock {
    fd: OwnedFd,
    address: NonNull<Control>,
}

// SAFETY: the block is only atomics in memory that stays mapped until drop.
unsafe impl Send for ControlBlock {}
// SAFETY: as above; atomics may be shared.
unsafe impl Sync for ControlBlock {}

impl ControlBlock {
    /// A new block for a new agent, sealed: nobody can shrink it under us.
    pub fn create(magic: u64) -> io::Result<Self> {
        let name = CString::new("strata-control").expect("no zero byte inside");
        // SAFETY: a live C string and flags.
        let fd = unsafe {
            libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = own(fd);
        // SAFETY: plain integers on a descriptor that we own.
        let sealed = unsafe {
            libc::ftruncate(fd.as_raw_fd(), CONTROL_BYTES as libc::off_t) == 0
                && libc::fcntl(
                    fd.as_raw_fd(),
                    libc::F_ADD_SEALS,
                    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
                ) == 0
        };
        if !sealed {
            return Err(io::Error::last_os_error());
        }
        let this = Self::attach(fd)?;
        this.control().magic.store(magic, Ordering::Relaxed);
        Ok(this)
    }

    /// Maps a block that [`Self::create`] made, in an earlier worker perhaps.
    pub fn attach(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: a new mapping of a descriptor that we own, at an address of
        // the kernel's choice.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                CONTROL_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                fd.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address.cast()).expect("mmap does not return null");
        Ok(Self { fd, address })
    }

    /// The block.
    #[must_use]
    pub fn control(&self) -> &Control {
        // SAFETY: mapped, page-aligned, of at least `size_of::<Control>()`
        // bytes that cannot shrink (sealed), alive as long as `self`; every
        // bit pattern is a valid `Control`, and all fields are atomics.
        unsafe { self.address.as_ref() }
    }
}

impl Drop for ControlBlock {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `attach`; no reference outlives `self`.
        unsafe { libc::munmap(self.address.as_ptr().cast(), CONTROL_BYTES) };
    }
}

impl AsFd for ControlBlock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
