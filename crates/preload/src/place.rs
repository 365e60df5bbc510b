//! `strata_alloc`, `strata_advise`, `strata_where`: a program that knows its memory
//! says so. What is returned when is said in `include/strata.h`.
//!
//! Hints go into the ring of the control block: no system call but the one that
//! looks whether there is memory, and nobody waits. What is set, and where a page
//! is, is asked of the daemon over its socket for requests, by the calling thread,
//! as snapshots are (`snapshot`). The agent has no part in either.

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::wire::CONTROL_SOCKET_NAME;
use strata_units::{ADDRESSES_END, DECIMAL_DIGITS, HintKind, PAGE, PAGE_SIZE, decimal};

use crate::block::{self, Block};
use crate::kernel::{self, Deadline, Fd, word};
use crate::message;
use crate::reason;
use crate::reply::{Line, Outcome, Reader};
use crate::snapshot::{beside, receive, send};
use crate::syscall::call;

/// For connecting.
const REACH_TIME: Duration = Duration::from_secs(5);
/// For the daemon to answer: it looks something up.
static ANSWER_TIME: libc::timeval = libc::timeval { tv_sec: 10, tv_usec: 0 };
/// Ranges of one request (`strata_api::MAX_PLACE_RANGES`).
const MOST_RANGES: usize = 64;
/// Longest request: so many ranges of two addresses, and what stands around them.
const REQUEST_BYTES: usize = 64 + MOST_RANGES * 40;
/// Pages of one question (`strata_api::MAX_PLACE_PAGES`).
const MOST_PAGES: usize = 1 << 16;

/// `struct strata_range`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct StrataRange {
    start: *const c_void,
    bytes: usize,
}

/// Whole pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pages {
    start: u64,
    end: u64,
}

/// What `advice` is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Advice {
    Hint(HintKind),
    /// The word of `strata_api::PlaceWish`.
    Wish(&'static str),
}

impl Advice {
    /// `enum strata_advice`.
    fn of(number: c_int) -> Option<Self> {
        match number {
            0 => Some(Self::Wish("normal")),
            1 => Some(Self::Hint(HintKind::Hot)),
            2 => Some(Self::Hint(HintKind::Cold)),
            3 => Some(Self::Wish("sequential")),
            4 => Some(Self::Wish("pin")),
            5 => Some(Self::Wish("unpin")),
            6 => Some(Self::Hint(HintKind::FreeSoon)),
            _ => None,
        }
    }

    /// What lets pages leave must not touch a neighbour's.
    fn shrinks(self) -> bool {
        matches!(self, Self::Hint(HintKind::Cold | HintKind::FreeSoon))
    }
}

/// Why nothing was done, or not all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failure {
    Invalid,
    NotMapped,
    NotManaged,
    Behind,
    Unreachable,
    /// Refused; why is kept already.
    Refused,
    Lost,
    Protocol,
    Placed(Outcome),
    NoMemory,
}

impl Failure {
    fn code(self) -> c_int {
        match self {
            Self::Invalid | Self::Placed(Outcome::Range | Outcome::Done) => -libc::EINVAL,
            Self::NotMapped => -libc::EFAULT,
            Self::NotManaged => -libc::ENOSYS,
            Self::Behind => -libc::EAGAIN,
            Self::Unreachable => -libc::ENOTCONN,
            Self::Refused => -libc::ECANCELED,
            Self::Lost => -libc::ECONNRESET,
            Self::Protocol => -libc::EPROTO,
            Self::Placed(Outcome::Budget) | Self::NoMemory => -libc::ENOMEM,
            Self::Placed(Outcome::TooMany) => -libc::ENOBUFS,
            Self::Placed(Outcome::NoTier) => -libc::ENODEV,
        }
    }

    /// What is to be kept of it; none: the daemon has said more.
    fn reason(self) -> Option<&'static str> {
        match self {
            Self::Invalid => Some("no such advice or tier, or no range of memory"),
            Self::NotMapped => Some("part of the range is not mapped"),
            Self::NotManaged => Some("this process is not managed by Strata"),
            Self::Behind => Some("the daemon has not taken the hints before this one yet"),
            Self::Unreachable => {
                Some("the daemon's socket for requests cannot be reached from this process")
            }
            Self::Lost => Some("the daemon went away before it answered"),
            Self::Protocol => Some("the daemon speaks another protocol (versions differ?)"),
            Self::NoMemory => Some("there is no memory"),
            Self::Refused | Self::Placed(_) => None,
        }
    }
}

/// The call's result; why it failed is kept.
fn result(outcome: Result<(), Failure>) -> c_int {
    let Err(failure) = outcome else { return 0 };
    if let Some(text) = failure.reason() {
        reason::keep(text.as_bytes());
    }
    failure.code()
}

/// The block of a managed process.
fn managed() -> Result<&'static Block, Failure> {
    let managed = |block: &&Block| block.managed.load(Ordering::SeqCst) != 0;
    block::existing().filter(managed).ok_or(Failure::NotManaged)
}

/// The pages of a range: those that it touches, or (`shrinks`) those that are wholly
/// in it. None: there is none.
fn pages_of(start: u64, bytes: usize, shrinks: bool) -> Result<Option<Pages>, Failure> {
    let end = start.checked_add(bytes as u64).filter(|end| *end <= ADDRESSES_END);
    let end = end.ok_or(Failure::Invalid)?;
    let up = |address: u64| address.next_multiple_of(PAGE);
    let down = |address: u64| address & !(PAGE - 1);
    let pages = if shrinks {
        Pages { start: up(start), end: down(end) }
    } else {
        Pages { start: down(start), end: up(end) }
    };
    Ok((bytes > 0 && pages.start < pages.end).then_some(pages))
}

/// Whether all of it is mapped. (`MS_ASYNC` does nothing else.)
fn check_mapped(pages: Pages) -> Result<(), Failure> {
    let arguments = [pages.start, pages.end - pages.start, word(libc::MS_ASYNC), 0, 0, 0];
    // SAFETY: it changes nothing; the kernel checks the range.
    match unsafe { call(libc::SYS_msync, arguments) } {
        Err(libc::ENOMEM) => Err(Failure::NotMapped),
        // A filter of system calls may forbid it: then nobody looks.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Gives advice for one range.
///
/// # Safety
/// None but that of any call from C: the range is only a pair of numbers.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn strata_advise(start: *const c_void, bytes: usize, advice: c_int) -> c_int {
    reason::clear();
    result(advise(&[StrataRange { start, bytes }], advice))
}

/// Gives advice for several ranges.
///
/// # Safety
/// `ranges` must be so many, or `count` 0.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn strata_advise_ranges(
    ranges: *const StrataRange,
    count: usize,
    advice: c_int,
) -> c_int {
    reason::clear();
    if count == 0 {
        return 0;
    }
    let most = isize::MAX as usize / size_of::<StrataRange>();
    if ranges.is_null() || !ranges.is_aligned() || count > most {
        return result(Err(Failure::Invalid));
    }
    // SAFETY: so many ranges, says the caller; not null, aligned, and not too long.
    let ranges = unsafe { core::slice::from_raw_parts(ranges, count) };
    result(advise(ranges, advice))
}

fn advise(ranges: &[StrataRange], advice: c_int) -> Result<(), Failure> {
    let advice = Advice::of(advice).ok_or(Failure::Invalid)?;
    let of = |range: &StrataRange| pages_of(range.start as u64, range.bytes, advice.shrinks());
    // All are looked at before anything is done.
    for range in ranges {
        of(range)?;
    }
    let block = managed()?;
    for range in ranges {
        if let Some(pages) = of(range)? {
            check_mapped(pages)?;
        }
    }
    match advice {
        Advice::Hint(kind) => {
            for range in ranges {
                if let Some(pages) = of(range)? {
                    hint(block, pages, kind)?;
                }
            }
        }
        Advice::Wish(wish) => {
            for some in ranges.chunks(MOST_RANGES) {
                let mut request = RequestLine::new();
                request.begin_place(wish);
                for range in some {
                    if let Some(pages) = of(range)? {
                        request.add_range(pages);
                    }
                }
                place(block, request)?;
            }
            if wish == "pin" {
                // What is out is to come in. Full: it comes when it is asked for.
                for range in ranges {
                    if let Some(pages) = of(range)? {
                        let _ = hint(block, pages, HintKind::Hot);
                    }
                }
            }
        }
    }
    Ok(())
}

fn hint(block: &Block, pages: Pages, kind: HintKind) -> Result<(), Failure> {
    let control = block.control().ok_or(Failure::NotManaged)?;
    let pushed = control.hints.push(pages.start, pages.end | kind as u64);
    if pushed { Ok(()) } else { Err(Failure::Behind) }
}

/// A request as it is written.
struct RequestLine {
    bytes: [u8; REQUEST_BYTES],
    length: usize,
    ranges: usize,
}

impl RequestLine {
    const fn new() -> Self {
        Self { bytes: [0; REQUEST_BYTES], length: 0, ranges: 0 }
    }

    fn add(&mut self, text: &str) {
        for (to, from) in self.bytes[self.length..].iter_mut().zip(text.bytes()) {
            *to = from;
            self.length += 1;
        }
    }

    fn add_number(&mut self, number: u64) {
        self.add(decimal(number, &mut [0; DECIMAL_DIGITS]));
    }

    fn begin_place(&mut self, wish: &str) {
        self.add(r#"{"request":"place","wish":""#);
        self.add(wish);
        self.add(r#"","ranges":["#);
    }

    fn add_range(&mut self, pages: Pages) {
        self.add(if self.ranges == 0 { "[" } else { ",[" });
        self.add_number(pages.start);
        self.add(",");
        self.add_number(pages.end);
        self.add("]");
        self.ranges += 1;
    }

    fn ask_where(&mut self, start: u64, pages: usize) {
        self.add(r#"{"request":"where","start":"#);
        self.add_number(start);
        self.add(r#","pages":"#);
        self.add_number(pages as u64);
        self.add("}\n");
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

fn place(block: &Block, mut request: RequestLine) -> Result<(), Failure> {
    if request.ranges == 0 {
        return Ok(());
    }
    request.add("]}\n");
    match ask(block, request.bytes(), &mut Reader::new())? {
        Line::Placed(Outcome::Done) => Ok(()),
        Line::Placed(outcome) => Err(Failure::Placed(outcome)),
        _ => Err(Failure::Protocol),
    }
}

/// One request and its answer.
fn ask(block: &Block, request: &[u8], reader: &mut Reader<'_>) -> Result<Line, Failure> {
    let address = beside(&block.socket(), CONTROL_SOCKET_NAME).ok_or(Failure::Unreachable)?;
    let socket = message::connect(&address, libc::SOCK_STREAM, Deadline::after(REACH_TIME))
        .map_err(|_| Failure::Unreachable)?;
    limit(&socket);
    send(&socket, request);
    match receive(&socket, reader).ok_or(Failure::Lost)? {
        line @ (Line::Where | Line::Placed(Outcome::Done)) => Ok(line),
        line @ (Line::Placed(_) | Line::Refused) => {
            reason::keep(reader.message());
            if line == Line::Refused { Err(Failure::Refused) } else { Ok(line) }
        }
        Line::Progress | Line::Taken | Line::Unknown => Err(Failure::Protocol),
    }
}

/// Bounds how long an answer is waited for.
fn limit(socket: &Fd) {
    let time = &raw const ANSWER_TIME as u64;
    let arguments = [
        socket.word(),
        word(libc::SOL_SOCKET),
        word(libc::SO_RCVTIMEO),
        time,
        size_of::<libc::timeval>() as u64,
        0,
    ];
    // SAFETY: the kernel reads so many bytes. Refused, the daemon's own limits hold.
    let _ = unsafe { call(libc::SYS_setsockopt, arguments) };
}

/// Says where the pages of a range live, a byte each.
///
/// # Safety
/// `tiers` must have a byte for each page that the range touches.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn strata_where(
    start: *const c_void,
    bytes: usize,
    tiers: *mut u8,
) -> c_int {
    reason::clear();
    let pages = match pages_of(start as u64, bytes, false) {
        Ok(Some(pages)) => pages,
        Ok(None) => return 0,
        Err(failure) => return result(Err(failure)),
    };
    if tiers.is_null() {
        return result(Err(Failure::Invalid));
    }
    let count = ((pages.end - pages.start) / PAGE) as usize;
    // SAFETY: a byte for each page, says the caller.
    let tiers = unsafe { core::slice::from_raw_parts_mut(tiers, count) };
    result(find(pages, tiers))
}

fn find(pages: Pages, tiers: &mut [u8]) -> Result<(), Failure> {
    let block = managed()?;
    check_mapped(pages)?;
    let mut start = pages.start;
    for some in tiers.chunks_mut(MOST_PAGES) {
        let mut request = RequestLine::new();
        request.ask_where(start, some.len());
        let mut reader = Reader::into_tiers(some);
        match ask(block, request.bytes(), &mut reader)? {
            Line::Where if reader.tier_count() == some.len() => {}
            _ => return Err(Failure::Protocol),
        }
        for letter in some.iter_mut() {
            *letter = tier_of(*letter);
        }
        start += (some.len() * PAGE_SIZE) as u64;
    }
    Ok(())
}

/// `enum strata_tier` for a letter of `strata_api::tier_letters`.
fn tier_of(letter: u8) -> u8 {
    match letter {
        b'd' => 1,
        b'n' => 2,
        b'c' => 3,
        b'f' => 4,
        b's' => 5,
        b'0' => 6,
        b'x' => 7,
        _ => 0,
    }
}

/// Maps memory whose pages are to be in a tier.
///
/// # Safety
/// `memory` must be a place for a pointer.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn strata_alloc(
    memory: *mut *mut c_void,
    bytes: usize,
    tier: c_int,
) -> c_int {
    reason::clear();
    if memory.is_null() {
        return result(Err(Failure::Invalid));
    }
    let allocated = allocate(bytes, tier);
    // SAFETY: a place for a pointer, says the caller.
    unsafe {
        *memory = match allocated {
            Ok(address) => address as *mut c_void,
            Err(_) => ptr::null_mut(),
        };
    }
    result(allocated.map(|_| ()))
}

fn allocate(bytes: usize, tier: c_int) -> Result<u64, Failure> {
    let wish = match tier {
        1 => "pin",
        2 => "node",
        3 => "compressed",
        4 => "file",
        _ => return Err(Failure::Invalid),
    };
    let length = bytes.checked_next_multiple_of(PAGE_SIZE).filter(|bytes| *bytes > 0);
    let length = length.filter(|bytes| *bytes as u64 <= ADDRESSES_END).ok_or(Failure::Invalid)?;
    let block = managed()?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let start = kernel::map_anonymous(0, length, protection).ok_or(Failure::NoMemory)?;
    let mut request = RequestLine::new();
    request.begin_place(wish);
    request.add_range(Pages { start, end: start + length as u64 });
    if let Err(failure) = place(block, request) {
        // SAFETY: just mapped, and nobody knows it.
        unsafe { kernel::unmap(start, length) };
        return Err(failure);
    }
    Ok(start)
}

/// Has the daemon make one mapping of a range that it cut into pieces; whether it did.
pub(crate) fn make_whole(start: u64, bytes: usize) -> bool {
    let (Ok(block), Ok(Some(pages))) = (managed(), pages_of(start, bytes, false)) else {
        return false;
    };
    let mut request = RequestLine::new();
    request.begin_place("whole");
    request.add_range(pages);
    place(block, request).is_ok()
}

/// Unmaps what `strata_alloc` gave.
///
/// # Safety
/// Nobody uses it any more.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn strata_free(memory: *mut c_void, bytes: usize) -> c_int {
    reason::clear();
    if memory.is_null() {
        return 0;
    }
    let pages = match pages_of(memory as u64, bytes, false) {
        Ok(Some(pages)) if pages.start == memory as u64 => pages,
        Ok(_) | Err(_) => return result(Err(Failure::Invalid)),
    };
    // What was set for it is forgotten when the unmapping is announced.
    // SAFETY: the caller is done with it.
    unsafe { kernel::unmap(pages.start, (pages.end - pages.start) as usize) };
    0
}

#[cfg(test)]
#[path = "place_tests.rs"]
mod tests;
