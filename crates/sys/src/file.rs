//! Questions about files and file systems.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// For `OpenOptionsExt::custom_flags`: a symbolic link is an error.
pub const OPEN_NO_LINK: i32 = libc::O_NOFOLLOW;

/// Locks a file for as long as this descriptor, or a copy of it, is open anywhere.
/// False: somebody else has it.
///
/// # Errors
/// What `flock` says; a file system without locks, say.
pub fn try_lock(descriptor: BorrowedFd<'_>) -> io::Result<bool> {
    flock(descriptor, libc::LOCK_EX)
}

/// The same beside others who share it. False: somebody has it alone.
///
/// # Errors
/// As [`try_lock`].
pub fn try_share_lock(descriptor: BorrowedFd<'_>) -> io::Result<bool> {
    flock(descriptor, libc::LOCK_SH)
}

fn flock(descriptor: BorrowedFd<'_>, how: libc::c_int) -> io::Result<bool> {
    // SAFETY: a system call on a borrowed descriptor without pointers.
    if unsafe { libc::flock(descriptor.as_raw_fd(), how | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock { Ok(false) } else { Err(error) }
}

/// What the file system at `path` has in all.
///
/// # Errors
/// What `statvfs` says.
pub fn file_system_bytes(path: &Path) -> io::Result<u64> {
    let status = statvfs(path)?;
    Ok(status.f_frsize.saturating_mul(status.f_blocks))
}

/// What is free there for whoever is not root.
///
/// # Errors
/// What `statvfs` says.
pub fn file_system_free_bytes(path: &Path) -> io::Result<u64> {
    let status = statvfs(path)?;
    Ok(status.f_frsize.saturating_mul(status.f_bavail))
}

fn statvfs(path: &Path) -> io::Result<libc::statvfs> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut status = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: a NUL-terminated string and writable memory of the right size, which is all
    // numbers.
    unsafe {
        if libc::statvfs(path.as_ptr(), status.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(status.assume_init())
    }
}
