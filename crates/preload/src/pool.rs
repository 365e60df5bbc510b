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

mod handles;

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::PAGE_SIZE;
use strata_units::pool::{
    self, Ask, FILE_ID_BYTES, HIT, MAX_NAME_BYTES, MAX_PAGES, MAX_TEXT_BYTES, NO_FILE,
    PROGRAM_FILE, PROGRAM_NAME_AT,
};

use self::handles::{Handle, socket_inode};
use crate::block::{self, Block};
use crate::kernel::{Deadline, word};
use crate::message;
use crate::reason;
use crate::snapshot::beside;
use crate::syscall::call;

/// For connecting.
const REACH_TIME: Duration = Duration::from_secs(5);
/// Longest name of a file.
const FILE_NAME_BYTES: usize = FILE_ID_BYTES - PROGRAM_NAME_AT;
/// Pages of one call.
const MOST_PAGES: usize = 1 << 20;

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
