//! `strata_pool_open`, `_get`, `_put`, `_flush`, `_close`: a program's cache that may vanish,
//! in a pool of the daemon's. What is returned when is said in `include/strata.h`.
//!
//! The calling thread talks to the pools' socket itself; the agent has no part in it. A
//! connection is behind a number, not behind its descriptor: a descriptor can be inherited,
//! closed or become another file behind the library's back, and an answer that somebody else
//! reads would be a wrong page. So each number belongs to one process, one thread at a time
//! uses it, and before each use its descriptor is looked at.
//!
//! There is no limit of time for an answer: a program whose daemon stands still waits at its
//! next evicted page, too. If there is no answer, the worker is dead or the pool removed, and
//! with either all pages of it are gone; or the process has come back from a snapshot, without
//! its connection, and they are not.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;

use strata_units::PAGE_SIZE;
use strata_units::pool::{
    self, Ask, FILE_ID_BYTES, HIT, MAX_NAME_BYTES, MAX_PAGES, MAX_TEXT_BYTES, NO_FILE,
    PROGRAM_FILE, PROGRAM_NAME_AT,
};

use crate::block::{self, Block};
use crate::kernel::{self, Deadline, Fd, word};
use crate::message;
use crate::reason;
use crate::snapshot::beside;
use crate::syscall::call;

/// For connecting.
const REACH_TIME: Duration = Duration::from_secs(5);
/// Connections of a process at a time.
const HANDLES: usize = 64;
/// A number is a place, and how often that was taken, which takes the other bits of an `int`.
const SERIALS: u32 = (1 << 25) - 1;
/// Longest name of a file.
const FILE_NAME_BYTES: usize = FILE_ID_BYTES - PROGRAM_NAME_AT;
/// Pages of one call.
const MOST_PAGES: usize = 1 << 20;
/// A thread that waits for another one's call looks again after this.
const NAP: Duration = Duration::from_secs(60);

/// Why nothing, or not all, was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failure {
    Invalid,
    NotManaged,
    Unreachable,
    /// Refused; why is kept already.
    Refused,
    /// No such number, or another process's.
    NotOpen,
    TooMany,
    /// The connection has ended.
    Lost,
    Protocol,
}

impl Failure {
    fn code(self) -> c_int {
        match self {
            Self::Invalid => -libc::EINVAL,
            Self::NotManaged => -libc::ENOSYS,
            Self::Unreachable => -libc::ENOTCONN,
            Self::Refused => -libc::ECANCELED,
            Self::NotOpen => -libc::EBADF,
            Self::TooMany => -libc::EMFILE,
            Self::Lost => -libc::ECONNRESET,
            Self::Protocol => -libc::EPROTO,
        }
    }

    fn reason(self) -> Option<&'static str> {
        match self {
            Self::Invalid => Some("no such name, or no such range of pages"),
            Self::NotManaged => Some("this process is not managed by Strata"),
            Self::Unreachable => {
                Some("the daemon's socket for pools cannot be reached from this process")
            }
            Self::Refused => None,
            Self::NotOpen => {
                Some("this process has nothing open under that number; a forked child opens anew")
            }
            Self::TooMany => Some("the process has 64 connections to pools, or there is no memory"),
            Self::Lost => Some("the connection to the pool has ended: close this and open it anew"),
            Self::Protocol => Some("the daemon speaks another protocol (versions differ?)"),
        }
    }
}

fn result(outcome: Result<c_int, Failure>) -> c_int {
    outcome.unwrap_or_else(|failure| {
        if let Some(text) = failure.reason() {
            reason::keep(text.as_bytes());
        }
        failure.code()
    })
}

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
struct Handle {
    /// The process that it belongs to, by its own number; 0: nobody's.
    owner: AtomicU64,
    serial: AtomicU32,
    /// 0: free; 1: a thread uses it; 2: and others wait.
    lock: AtomicU32,
    /// -1: it has ended.
    descriptor: AtomicI32,
    /// Of the socket behind it.
    inode: AtomicU64,
    /// The file's number in the pool.
    file: AtomicU32,
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
struct InUse<'a>(&'a Handle);

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        if self.0.lock.swap(0, Ordering::Release) == 2 {
            kernel::futex_wake(&self.0.lock);
        }
    }
}

/// The inode of what is behind a descriptor, if it is a socket.
fn socket_inode(descriptor: c_int) -> Option<u64> {
    // SAFETY: all zero is a valid structure.
    let mut found: libc::stat = unsafe { core::mem::zeroed() };
    let arguments = [word(descriptor), &raw mut found as u64, 0, 0, 0, 0];
    // SAFETY: a place of the kernel's own layout.
    unsafe { call(libc::SYS_fstat, arguments) }.ok()?;
    (found.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(found.st_ino)
}

impl Handle {
    /// The place behind a number of this process's.
    fn of(number: c_int) -> Result<InUse<'static>, Failure> {
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
    fn take() -> Result<(InUse<'static>, c_int), Failure> {
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
    fn hang_up(&self) {
        let descriptor = self.descriptor.swap(-1, Ordering::AcqRel);
        if descriptor >= 0 && socket_inode(descriptor) == Some(self.inode.load(Ordering::Acquire)) {
            drop(Fd::own(descriptor));
        }
    }

    /// One exchange. Whatever fails in it ends the connection: nobody knows what is still to
    /// come over it.
    fn exchange<T>(
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

/// What is sent and heard over a connection.
struct Wire(c_int);

impl Wire {
    fn send(&self, bytes: &[u8]) -> Result<(), Failure> {
        let (mut at, end) = (bytes.as_ptr() as u64, bytes.as_ptr() as u64 + bytes.len() as u64);
        while at < end {
            let arguments = [word(self.0), at, end - at, word(libc::MSG_NOSIGNAL), 0, 0];
            // SAFETY: what is left of the bytes; the kernel only reads them.
            match unsafe { call(libc::SYS_sendto, arguments) } {
                Ok(length) => at += length,
                Err(libc::EINTR) => {}
                Err(_) => return Err(Failure::Lost),
            }
        }
        Ok(())
    }

    /// # Safety
    /// So many bytes can be written there.
    unsafe fn hear_into(&self, to: *mut u8, length: usize) -> Result<(), Failure> {
        let (mut at, end) = (to as u64, to as u64 + length as u64);
        while at < end {
            let arguments = [word(self.0), at, end - at, word(libc::MSG_WAITALL), 0, 0];
            // SAFETY: the place is the caller's, and so long.
            match unsafe { call(libc::SYS_recvfrom, arguments) } {
                Ok(0) => return Err(Failure::Lost),
                Ok(length) => at += length,
                Err(libc::EINTR) => {}
                Err(_) => return Err(Failure::Lost),
            }
        }
        Ok(())
    }

    fn hear(&self, to: &mut [u8]) -> Result<(), Failure> {
        // SAFETY: a slice of ours.
        unsafe { self.hear_into(to.as_mut_ptr(), to.len()) }
    }

    fn hear_number(&self) -> Result<u32, Failure> {
        let mut bytes = [0; 4];
        self.hear(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }
}

/// A name of at most so many bytes.
fn checked(name: *const c_char, most: usize) -> Result<&'static CStr, Failure> {
    if name.is_null() {
        return Err(Failure::Invalid);
    }
    // SAFETY: a C string, says the caller; it is not kept.
    let name = unsafe { CStr::from_ptr(name) };
    let is_one = (1..=most).contains(&name.count_bytes());
    if is_one { Ok(name) } else { Err(Failure::Invalid) }
}

/// Opens a file of a pool.
///
/// # Safety
/// Both are null or C strings.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn strata_pool_open(
    pool: *const c_char,
    file: *const c_char,
) -> c_int {
    reason::clear();
    let names =
        checked(pool, MAX_NAME_BYTES).and_then(|pool| Ok((pool, checked(file, FILE_NAME_BYTES)?)));
    result(names.and_then(|(pool, file)| open(pool.to_bytes(), file.to_bytes())))
}

fn open(pool: &[u8], file: &[u8]) -> Result<c_int, Failure> {
    let managed = |block: &&Block| block.managed.load(Ordering::SeqCst) != 0;
    let block = block::existing().filter(managed).ok_or(Failure::NotManaged)?;
    let address = beside(&block.socket(), pool::SOCKET_NAME).ok_or(Failure::Unreachable)?;
    let (in_use, number) = Handle::take()?;
    let handle = in_use.0;
    let socket = message::connect(&address, libc::SOCK_STREAM, Deadline::after(REACH_TIME));
    let opened = socket.map_err(|_| Failure::Unreachable).and_then(|socket| {
        let inode = socket_inode(socket.raw()).ok_or(Failure::Unreachable)?;
        let number = greet(&Wire(socket.raw()), pool, file)?;
        handle.file.store(number, Ordering::Relaxed);
        handle.inode.store(inode, Ordering::Release);
        handle.descriptor.store(socket.raw(), Ordering::Release);
        socket.forget();
        Ok(())
    });
    if opened.is_err() {
        handle.owner.store(0, Ordering::Release);
    }
    opened.map(|()| number)
}

/// Names the pool and the file; the file's number.
fn greet(wire: &Wire, pool: &[u8], file: &[u8]) -> Result<u32, Failure> {
    let mut greeting = [0; 12 + MAX_NAME_BYTES];
    greeting[..8].copy_from_slice(&pool::MAGIC);
    greeting[8..12].copy_from_slice(&(pool.len() as u32).to_le_bytes());
    greeting[12..12 + pool.len()].copy_from_slice(pool);
    wire.send(&greeting[..12 + pool.len()])?;
    let (refused, length) = (wire.hear_number()?, wire.hear_number()? as usize);
    let mut text = [0; MAX_TEXT_BYTES];
    let text = text.get_mut(..length).ok_or(Failure::Protocol)?;
    wire.hear(text)?;
    if refused != 0 {
        reason::keep(text);
        return Err(Failure::Refused);
    }
    let mut name = [0; FILE_ID_BYTES];
    name[0] = PROGRAM_FILE;
    name[PROGRAM_NAME_AT..PROGRAM_NAME_AT + file.len()].copy_from_slice(file);
    wire.send(&Ask::Open { private: false }.encode())?;
    wire.send(&name)?;
    match wire.hear_number()? {
        NO_FILE => {
            reason::keep(b"the pool knows as many files as it may");
            Err(Failure::Refused)
        }
        number => Ok(number),
    }
}

/// `count` pages from `first` on, in pieces of what one request may have: the first of a
/// piece, its place among them, and how many.
fn pieces(first: u64, count: usize) -> impl Iterator<Item = (u64, usize, usize)> {
    (0..count).step_by(MAX_PAGES).map(move |at| (first + at as u64, at, MAX_PAGES.min(count - at)))
}

fn check_range(first: u64, count: usize) -> Result<(), Failure> {
    let ends = first.checked_add(count as u64);
    if count <= MOST_PAGES && ends.is_some() { Ok(()) } else { Err(Failure::Invalid) }
}

/// Copies pages out of a pool.
///
/// # Safety
/// `pages` has room for so many pages, `found` for so many bytes; or `count` is 0.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn strata_pool_get(
    number: c_int,
    first: u64,
    pages: *mut c_void,
    count: usize,
    found: *mut u8,
) -> c_int {
    reason::clear();
    let place = (pages.cast::<u8>(), found);
    result(check_range(first, count).and_then(|()| {
        let in_use = Handle::of(number)?;
        if count > 0 && (place.0.is_null() || place.1.is_null()) {
            return Err(Failure::Invalid);
        }
        let mut sum = 0;
        for (index, at, count) in pieces(first, count) {
            sum += in_use.0.exchange(|wire, file| {
                wire.send(&Ask::Get { file, index, count: count as u32 }.encode())?;
                let mut states = [0; MAX_PAGES];
                let states = &mut states[..count];
                wire.hear(states)?;
                let mut hits = 0;
                for (one, state) in states.iter().enumerate() {
                    let is_hit = *state == HIT;
                    if is_hit {
                        let to = place.0.wrapping_add((at + one) * PAGE_SIZE);
                        // SAFETY: one of the pages that the caller has room for.
                        unsafe { wire.hear_into(to, PAGE_SIZE)? };
                        hits += 1;
                    }
                    // SAFETY: one of the bytes that the caller has room for.
                    unsafe { place.1.wrapping_add(at + one).write(u8::from(is_hit)) };
                }
                Ok(hits)
            })?;
        }
        Ok(sum)
    }))
}

/// Puts pages into a pool.
///
/// # Safety
/// There are so many pages at `pages`; or `count` is 0.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn strata_pool_put(
    number: c_int,
    first: u64,
    pages: *const c_void,
    count: usize,
) -> c_int {
    reason::clear();
    result(check_range(first, count).and_then(|()| {
        let in_use = Handle::of(number)?;
        if count > 0 && pages.is_null() {
            return Err(Failure::Invalid);
        }
        let mut sum = 0;
        for (index, at, count) in pieces(first, count) {
            sum += in_use.0.exchange(|wire, file| {
                let from = pages.cast::<u8>().wrapping_add(at * PAGE_SIZE);
                // SAFETY: some of the pages that the caller has there.
                let bytes = unsafe { core::slice::from_raw_parts(from, count * PAGE_SIZE) };
                wire.send(&Ask::Put { file, index, count: count as u32 }.encode())?;
                wire.send(bytes)?;
                wire.hear_number()
            })?;
        }
        Ok(sum as c_int)
    }))
}

/// Has pages be in the pool no more.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn strata_pool_flush(number: c_int, first: u64, count: u64) -> c_int {
    reason::clear();
    let is_range = first.checked_add(count).is_some();
    result(if is_range { Ok(()) } else { Err(Failure::Invalid) }.and_then(|()| {
        Handle::of(number)?.0.exchange(|wire, file| {
            wire.send(&Ask::Forget { file, index: first, count }.encode())?;
            match wire.hear_number()? {
                0 => Ok(0),
                _ => Err(Failure::Protocol),
            }
        })
    }))
}

/// Closes what was opened.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn strata_pool_close(number: c_int) -> c_int {
    reason::clear();
    result(Handle::of(number).map(|in_use| {
        in_use.0.hang_up();
        in_use.0.owner.store(0, Ordering::Release);
        0
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_asked_for_in_pieces() {
        let pieces = |first, count| pieces(first, count).collect::<Vec<_>>();
        assert_eq!(pieces(7, 0), []);
        assert_eq!(pieces(7, 64), [(7, 0, 64)]);
        assert_eq!(
            pieces(1 << 40, 130),
            [(1 << 40, 0, 64), ((1 << 40) + 64, 64, 64), ((1 << 40) + 128, 128, 2)]
        );
        assert!(check_range(0, MOST_PAGES).is_ok() && check_range(0, MOST_PAGES + 1).is_err());
        assert!(check_range(u64::MAX, 1).is_err() && check_range(u64::MAX - 1, 1).is_ok());
    }

    #[test]
    fn numbers_are_one_processs_and_never_used_twice() {
        for number in [-1, 0, 63, c_int::MAX] {
            assert_eq!(strata_pool_flush(number, 0, 1), -libc::EBADF);
        }
        let (in_use, number) = Handle::take().expect("a place");
        drop(in_use);
        // It is open, but there is no connection.
        assert_eq!(strata_pool_flush(number, 0, 1), -libc::ECONNRESET);
        assert_eq!(strata_pool_close(number), 0);
        assert_eq!(strata_pool_close(number), -libc::EBADF);
        let (again, other) = Handle::take().expect("a place");
        assert_ne!(number, other);
        // A child finds its parent's, whose thread was in the middle of a call.
        again.0.owner.store(1, Ordering::Release);
        core::mem::forget(again);
        assert_eq!(strata_pool_flush(other, 0, 1), -libc::EBADF);
        let (its_own, third) = Handle::take().expect("a place");
        assert!(third != other);
        drop(its_own);
        assert_eq!(strata_pool_close(third), 0);
    }

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

    #[test]
    fn nothing_is_open_where_nobody_manages() {
        for (pool, file, code) in [
            (c"", c"a", libc::EINVAL),
            (c"pool", c"", libc::EINVAL),
            (c"pool", c"a name of a file that is longer than names of files can be", libc::EINVAL),
            (c"pool", c"a", libc::ENOSYS),
        ] {
            // SAFETY: C strings.
            assert_eq!(unsafe { strata_pool_open(pool.as_ptr(), file.as_ptr()) }, -code);
        }
        // SAFETY: null.
        let of_null = unsafe { strata_pool_open(core::ptr::null(), core::ptr::null()) };
        assert_eq!(of_null, -libc::EINVAL);
    }
}
