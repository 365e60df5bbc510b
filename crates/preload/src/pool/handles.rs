//! The numbers of a process's connections to pools: each is a place in a table, which
//! belongs to one process, and which one thread at a time uses.

use core::ffi::c_int;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;

use strata_units::PAGE_SIZE;

use super::{Failure, Wire};
use crate::kernel::{self, Fd, word};
use crate::syscall::call;

/// Connections of a process at a time.
const HANDLES: usize = 64;
/// A number is a place, and how often that was taken, which takes the other bits of an `int`.
const SERIALS: u32 = (1 << 25) - 1;
/// A thread that waits for another one's call looks again after this.
const NAP: Duration = Duration::from_secs(60);

/// Where this process's own number is: a page that the kernel empties in every child, however
/// it is made. (A child in a namespace of its own can have its parent's process number.)
static IDENTITY: AtomicU64 = AtomicU64::new(0);

/// This process's own number; none: there is no memory for it.
fn identity() -> Option<u64> {
    let address = match IDENTITY.load(Ordering::Acquire) {
        0 => emptied_in_children()?,
        address => address,
    };
    // SAFETY: a page of ours, aligned, mapped for good.
    let number = unsafe { AtomicU64::from_ptr(address as *mut u64) };
    if number.load(Ordering::Acquire) == 0 {
        let own = (kernel::random() ^ u64::from(kernel::thread_id())) | 1 << 63;
        let _ = number.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire);
    }
    Some(number.load(Ordering::Acquire))
}

/// Maps the page, unless another thread just has.
fn emptied_in_children() -> Option<u64> {
    let page = kernel::map_anonymous(0, PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE)?;
    // SAFETY: of a page that nobody knows yet.
    let found = if unsafe { kernel::advise(page, PAGE_SIZE, libc::MADV_WIPEONFORK) } == 0 {
        match IDENTITY.compare_exchange(0, page, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(page),
            Err(first) => Some(first),
        }
    } else {
        None
    };
    // SAFETY: nobody has looked there.
    unsafe { kernel::unmap(page, PAGE_SIZE) };
    found
}

/// A place for a connection.
pub(super) struct Handle {
    /// The process that it belongs to, by its own number; 0: nobody's.
    pub(super) owner: AtomicU64,
    serial: AtomicU32,
    /// 0: free; 1: a thread uses it; 2: and others wait.
    lock: AtomicU32,
    /// -1: it has ended.
    pub(super) descriptor: AtomicI32,
    /// Of the socket behind it.
    pub(super) inode: AtomicU64,
    /// The file's number in the pool.
    pub(super) file: AtomicU32,
}

impl Handle {
    const fn new() -> Self {
        Self {
            owner: AtomicU64::new(0),
            serial: AtomicU32::new(0),
            lock: AtomicU32::new(0),
            descriptor: AtomicI32::new(-1),
            inode: AtomicU64::new(0),
            file: AtomicU32::new(0),
        }
    }
}

static TABLE: [Handle; HANDLES] = [const { Handle::new() }; HANDLES];

/// The process of which a thread looks for a free place; 0: none. A child may find its
/// parent's there, which is nobody.
static MAKING: AtomicU64 = AtomicU64::new(0);
/// Between two looks whether another thread has found one.
const SHORT_NAP: Duration = Duration::from_micros(50);

struct Making;

impl Making {
    fn enter(own: u64) -> Self {
        loop {
            let other = MAKING.load(Ordering::Acquire);
            let mine = MAKING.compare_exchange(other, own, Ordering::AcqRel, Ordering::Relaxed);
            if other != own && mine.is_ok() {
                return Self;
            }
            kernel::pause(SHORT_NAP);
        }
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        MAKING.store(0, Ordering::Release);
    }
}

/// A connection that this thread alone uses.
pub(super) struct InUse<'a>(pub(super) &'a Handle);

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        if self.0.lock.swap(0, Ordering::Release) == 2 {
            kernel::futex_wake(&self.0.lock);
        }
    }
}

/// The inode of what is behind a descriptor, if it is a socket.
pub(super) fn socket_inode(descriptor: c_int) -> Option<u64> {
    // SAFETY: all zero is a valid structure.
    let mut found: libc::stat = unsafe { core::mem::zeroed() };
    let arguments = [word(descriptor), &raw mut found as u64, 0, 0, 0, 0];
    // SAFETY: a place of the kernel's own layout.
    unsafe { call(libc::SYS_fstat, arguments) }.ok()?;
    (found.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(found.st_ino)
}

impl Handle {
    /// The place behind a number of this process's.
    pub(super) fn of(number: c_int) -> Result<InUse<'static>, Failure> {
        let number = u32::try_from(number).map_err(|_| Failure::NotOpen)?;
        let (place, serial) = (number as usize % HANDLES, number / HANDLES as u32);
        let handle = &TABLE[place];
        let own = identity().ok_or(Failure::NotOpen)?;
        let is_it = || {
            handle.owner.load(Ordering::Acquire) == own
                && handle.serial.load(Ordering::Acquire) == serial
        };
        // Before it is locked, too: a child's copy may be locked by nobody who is there.
        if !is_it() {
            return Err(Failure::NotOpen);
        }
        let in_use = handle.lock();
        if is_it() { Ok(in_use) } else { Err(Failure::NotOpen) }
    }

    fn lock(&self) -> InUse<'_> {
        if self.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            while self.lock.swap(2, Ordering::Acquire) != 0 {
                kernel::futex_wait(&self.lock, 2, NAP);
            }
        }
        InUse(self)
    }

    /// A place that nobody of this process has, and its number.
    pub(super) fn take() -> Result<(InUse<'static>, c_int), Failure> {
        let own = identity().ok_or(Failure::TooMany)?;
        let _making = Making::enter(own);
        for (place, handle) in TABLE.iter().enumerate() {
            let owner = handle.owner.load(Ordering::Acquire);
            if owner == own {
                continue;
            }
            if owner != 0 {
                // A parent's: its thread that had it in use is not here, its descriptor is.
                handle.hang_up();
                handle.lock.store(0, Ordering::Release);
            }
            let in_use = handle.lock();
            let serial = (handle.serial.load(Ordering::Relaxed) + 1) & SERIALS;
            handle.serial.store(serial, Ordering::Release);
            handle.owner.store(own, Ordering::Release);
            let number = serial * HANDLES as u32 + place as u32;
            return Ok((in_use, number.cast_signed()));
        }
        Err(Failure::TooMany)
    }

    /// Closes the connection, if it still is behind its descriptor.
    pub(super) fn hang_up(&self) {
        let descriptor = self.descriptor.swap(-1, Ordering::AcqRel);
        if descriptor >= 0 && socket_inode(descriptor) == Some(self.inode.load(Ordering::Acquire)) {
            drop(Fd::own(descriptor));
        }
    }

    /// One exchange. Whatever fails in it ends the connection: nobody knows what is still to
    /// come over it.
    pub(super) fn exchange<T>(
        &self,
        talk: impl FnOnce(&Wire, u32) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let descriptor = self.descriptor.load(Ordering::Acquire);
        if descriptor < 0 || socket_inode(descriptor) != Some(self.inode.load(Ordering::Acquire)) {
            self.descriptor.store(-1, Ordering::Release);
            return Err(Failure::Lost);
        }
        let outcome = talk(&Wire(descriptor), self.file.load(Ordering::Relaxed));
        if outcome.is_err() {
            self.hang_up();
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_another_process_however_it_is_made() {
        let own = identity().expect("memory");
        assert_eq!(identity(), Some(own));
        // SAFETY: as a fork, without the C library: the child makes system calls alone.
        let child = unsafe { call(libc::SYS_clone, [word(libc::SIGCHLD), 0, 0, 0, 0, 0]) };
        let child = child.expect("a child");
        if child == 0 {
            let is_other = identity().is_some_and(|number| number != own && number != 0);
            kernel::end_process(if is_other { 0 } else { 1 });
        }
        let mut status = 0;
        // SAFETY: a child of ours, and a place for its status.
        let waited = unsafe { libc::waitpid(child as libc::pid_t, &raw mut status, 0) };
        assert_eq!((waited, status), (child as libc::pid_t, 0));
        assert_eq!(identity(), Some(own));
    }
}
