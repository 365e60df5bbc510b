//! What this kernel allows, found out by trying: for `stratad doctor` only.
//! Nothing here is kept open, and nothing here serves a tenant.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

/// Features of userfaultfd, as `UFFDIO_API` numbers them.
pub mod feature {
    /// Write-protect faults on anonymous memory.
    pub const WRITE_PROTECT: u64 = 1 << 0;
    /// A message for each fork, with the child's userfaultfd.
    pub const EVENT_FORK: u64 = 1 << 1;
    /// A message for each `mremap`.
    pub const EVENT_REMAP: u64 = 1 << 2;
    /// A message for each `MADV_DONTNEED`.
    pub const EVENT_REMOVE: u64 = 1 << 3;
    /// A message for each `munmap`.
    pub const EVENT_UNMAP: u64 = 1 << 6;
    /// The thread that waits, in each message of a fault.
    pub const THREAD_ID: u64 = 1 << 8;
    /// Minor faults on shared memory.
    pub const MINOR_SHMEM: u64 = 1 << 10;
    /// `UFFDIO_POISON`.
    pub const POISON: u64 = 1 << 14;
    /// `UFFDIO_MOVE`.
    pub const MOVE: u64 = 1 << 16;
}

const UFFD_API: u64 = 0xAA;
/// `_IO(0xAA, 0x00)`, on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xAA00;
/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`.
const UFFDIO_API: libc::Ioctl = 0xC018_AA3F_u32 as libc::Ioctl;
/// Faults from user mode only; what an ordinary user may ask for.
const UFFD_USER_MODE_ONLY: libc::c_int = 1;

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

const _: () = assert!(size_of::<Api>() == 0x18, "the size is part of UFFDIO_API's number");

/// A way to a userfaultfd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// `/dev/userfaultfd`; whoever may open it gets kernel faults too.
    Device,
    /// The system call, kernel faults too (root, CAP_SYS_PTRACE or
    /// `vm.unprivileged_userfaultfd`).
    SystemCall,
    /// The system call, faults from user mode only.
    UserModeOnly,
}

/// Opens a userfaultfd by `way`, asks for `wanted` features (0: none in
/// particular) and returns all that the kernel then reports.
///
/// # Errors
/// The kernel's: no such device or system call, no permission, or a feature
/// that it does not have or does not allow us.
pub fn userfaultfd_features(way: Way, wanted: u64) -> io::Result<u64> {
    let uffd = open_userfaultfd(way)?;
    let mut api = Api { api: UFFD_API, features: wanted, ioctls: 0 };
    // SAFETY: the descriptor is ours and open; UFFDIO_API reads and writes one
    // `struct uffdio_api`, whose layout and size `Api` has (asserted above).
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(api.features)
}

pub(crate) fn open_userfaultfd(way: Way) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let fd = match way {
        Way::Device => {
            let device = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_CLOEXEC)
                .open("/dev/userfaultfd")?;
            // SAFETY: `device` is open for the call; USERFAULTFD_IOC_NEW takes
            // flags by value and touches no memory of ours.
            unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) }
        }
        Way::SystemCall | Way::UserModeOnly => {
            let mode = if way == Way::UserModeOnly { UFFD_USER_MODE_ONLY } else { 0 };
            // SAFETY: userfaultfd(2) takes flags by value and touches no memory
            // of ours.
            let result = unsafe { libc::syscall(libc::SYS_userfaultfd, flags | mode) };
            libc::c_int::try_from(result).expect("a descriptor or -1")
        }
    };
    own(fd)
}

/// Whether an io_uring can be made.
///
/// # Errors
/// The kernel's: no such system call, or forbidden here.
pub fn io_uring() -> io::Result<()> {
    /// Bytes of `struct io_uring_params`; it has not grown since it was made,
    /// because a larger one would break the system call.
    const PARAMETER_BYTES: usize = 120;
    let mut parameters = [0u64; PARAMETER_BYTES / 8];
    // SAFETY: the kernel reads and writes one `struct io_uring_params`, which
    // has 120 bytes and the alignment of a u64; all zero is "no flags".
    let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    own(libc::c_int::try_from(result).expect("a descriptor or -1")).map(drop)
}

fn own(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a system call that makes descriptors has just returned this one,
    // so it is open and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is to be had differs by machine; that the kernel understands the
    /// question does not.
    #[test]
    fn the_kernel_understands_the_handshake() {
        for way in [Way::Device, Way::SystemCall, Way::UserModeOnly] {
            match userfaultfd_features(way, 0) {
                Ok(features) => {
                    assert_ne!(features & feature::EVENT_REMAP, 0, "{way:?}: {features:#x}");
                }
                Err(error) => {
                    let refused = [libc::EPERM, libc::EACCES, libc::ENOENT, libc::ENOSYS];
                    let errno = error.raw_os_error().expect("the kernel's");
                    assert!(refused.contains(&errno), "{way:?}: {error}");
                }
            }
        }
    }

    #[test]
    fn an_unknown_feature_is_refused() {
        if userfaultfd_features(Way::UserModeOnly, 0).is_ok() {
            let error = userfaultfd_features(Way::UserModeOnly, 1 << 63).expect_err("bit 63");
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        }
    }

    #[test]
    fn io_uring_is_there_or_refused() {
        if let Err(error) = io_uring() {
            let refused = [libc::EPERM, libc::ENOSYS, libc::EACCES, libc::ENOMEM];
            assert!(refused.contains(&error.raw_os_error().expect("the kernel's")), "{error}");
        }
    }
}
