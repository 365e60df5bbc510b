//! A disk: an image that is read through a cache and written to directly.
//!
//! What a guest reads is what is in the image, whatever the cache does: a page that is
//! written leaves the cache before the image changes, and while it is written nobody reads
//! it; it is not entered again before somebody has read it anew. So a write that failed,
//! or that was cut short, leaves no page behind that is not the image's.

use std::io;
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use strata_sys::{Allocation, FileStamp, ImageFile, page_bytes, page_bytes_mut};
use strata_units::{PAGE_SIZE, PageBuffer};

use crate::nbd::reply::Extent;
use crate::nbd::{Error, Info};
use crate::ranges::Ranges;
use crate::talk;

/// A file that changed later than this ago may change again without its times telling:
/// the clock by which the kernel notes them goes in steps of some milliseconds.
const SETTLED_NS: i128 = 2_000_000_000;
/// Extents of one answer; whoever wants more asks again.
const MAX_EXTENTS: usize = 512;
/// Zeroes that are written at a time where the file system has no other way.
const ZERO_PAGES: usize = 64;

/// Where the bytes are.
pub trait Image: Send + Sync {
    /// Whether reading and writing may wait for a device.
    fn waits(&self) -> bool {
        true
    }
    /// See [`ImageFile`], whose methods these are.
    fn size_bytes(&self) -> u64;
    /// See [`ImageFile::read_pages`].
    ///
    /// # Errors
    /// The kernel's.
    fn read_pages(&self, offset: u64, pages: &mut [PageBuffer]) -> io::Result<()>;
    /// See [`ImageFile::write_pages`].
    ///
    /// # Errors
    /// The kernel's.
    fn write_pages(&self, offset: u64, pages: &[PageBuffer]) -> io::Result<()>;
    /// See [`ImageFile::sync`].
    ///
    /// # Errors
    /// The kernel's.
    fn sync(&self) -> io::Result<()>;
    /// See [`ImageFile::zero_pages`].
    ///
    /// # Errors
    /// The kernel's.
    fn zero_pages(&self, offset: u64, bytes: u64, keep_room: bool) -> io::Result<bool>;
    /// See [`ImageFile::allocation`].
    fn allocation(&self, offset: u64) -> Allocation;
    /// See [`ImageFile::stamp`].
    ///
    /// # Errors
    /// The kernel's.
    fn stamp(&self) -> io::Result<Option<FileStamp>>;
}

impl Image for ImageFile {
    fn size_bytes(&self) -> u64 {
        self.size_bytes()
    }

    fn read_pages(&self, offset: u64, pages: &mut [PageBuffer]) -> io::Result<()> {
        self.read_pages(offset, pages)
    }

    fn write_pages(&self, offset: u64, pages: &[PageBuffer]) -> io::Result<()> {
        self.write_pages(offset, pages)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync()
    }

    fn zero_pages(&self, offset: u64, bytes: u64, keep_room: bool) -> io::Result<bool> {
        self.zero_pages(offset, bytes, keep_room)
    }

    fn allocation(&self, offset: u64) -> Allocation {
        self.allocation(offset)
    }

    fn stamp(&self) -> io::Result<Option<FileStamp>> {
        self.stamp()
    }
}

/// What is known of a page in the cache; a byte as [`talk`] has it.
pub type Found = u8;

/// Which bytes a page is one of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stamp {
    /// Those of a file that nobody writes to, as long as this holds of it.
    Shared(FileStamp),
    /// Those of this disk, which writes to its image and is alone with it.
    Own,
}

/// Pages by their number in the image. Whatever fails is a miss; but see
/// [`Cache::forget`].
pub trait Cache {
    /// Fills those pages that are there, and says so of each in `found`.
    fn get(&mut self, stamp: Stamp, first: u64, pages: &mut [PageBuffer], found: &mut [Found]);
    /// Offers pages.
    fn put(&mut self, stamp: Stamp, first: u64, pages: &[PageBuffer]);
    /// Has pages of this disk's own go. When it returns nobody gets them any more, even if
    /// the cache cannot be reached.
    fn forget(&mut self, first: u64, count: u64);
}

/// No cache.
#[derive(Debug)]
pub struct NoCache;

impl Cache for NoCache {
    fn get(&mut self, _: Stamp, _: u64, _: &mut [PageBuffer], found: &mut [Found]) {
        found.fill(talk::MISSED);
    }

    fn put(&mut self, _: Stamp, _: u64, _: &[PageBuffer]) {}

    fn forget(&mut self, _: u64, _: u64) {}
}

/// Why something was not done: for the client, and for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// What the client is told.
    pub error: Error,
    /// What happened.
    pub text: String,
}

fn failure(what: &str, offset: u64, error: &io::Error) -> Failure {
    let told = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::NoSpace,
        _ => Error::Io,
    };
    Failure { error: told, text: format!("the image cannot be {what} at {offset}: {error}") }
}

/// See the module's text.
pub struct Disk {
    image: Box<dyn Image>,
    info: Info,
    ranges: Ranges,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk").field("info", &self.info).finish_non_exhaustive()
    }
}

/// The pages that bytes lie in.
fn pages_of(offset: u64, bytes: u32) -> Range<u64> {
    let page = PAGE_SIZE as u64;
    offset / page..(offset + u64::from(bytes)).div_ceil(page)
}

fn zeroes(count: usize) -> Vec<PageBuffer> {
    vec![PageBuffer([0; PAGE_SIZE]); count]
}

/// Runs of pages of which `which` is true.
fn runs(found: &[Found], which: impl Fn(Found) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, _) in found.iter().enumerate().filter(|(_, found)| which(**found)) {
        match runs.last_mut() {
            Some(run) if run.end == index => run.end += 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

impl Disk {
    /// Of an image; with `read_only` it is not written to, and nobody else does either.
    #[must_use]
    pub fn new(image: Box<dyn Image>, read_only: bool) -> Self {
        let info = Info { size_bytes: image.size_bytes(), read_only };
        Self { image, info, ranges: Ranges::default() }
    }

    /// What it is.
    #[must_use]
    pub fn info(&self) -> Info {
        self.info
    }

    /// Whether its image is on a device, which may have to be waited for.
    pub(crate) fn waits(&self) -> bool {
        self.image.waits()
    }

    /// What its pages are known by just now; none: they are in no cache.
    fn stamp(&self) -> Option<Stamp> {
        if !self.info.read_only {
            return Some(Stamp::Own);
        }
        let stamp = self.image.stamp().ok()??;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_nanos();
        let age_ns = i128::try_from(now).ok()? - stamp.touched_ns;
        (age_ns >= SETTLED_NS).then_some(Stamp::Shared(stamp))
    }

    /// Reads bytes inside of the disk; has them answered, and then offers the cache what it
    /// wants of them. `buffer` is what they are read into; `before_waiting` is called
    /// before a device is waited for.
    ///
    /// # Errors
    /// The image cannot be read.
    pub fn read<R>(
        &self,
        cache: &mut dyn Cache,
        buffer: &mut Vec<PageBuffer>,
        (offset, bytes): (u64, u32),
        before_waiting: &mut dyn FnMut(),
        answer: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Failure> {
        let pages = pages_of(offset, bytes);
        let _held = self.ranges.hold(pages.clone(), false, before_waiting);
        let count = (pages.end - pages.start) as usize;
        buffer.resize(count, PageBuffer([0; PAGE_SIZE]));
        let mut found = vec![talk::MISSED; count];
        let stamp = self.stamp();
        if let Some(stamp) = stamp {
            let mut first = pages.start;
            let chunks = buffer.chunks_mut(talk::MAX_PAGES).zip(found.chunks_mut(talk::MAX_PAGES));
            for (pages, found) in chunks {
                cache.get(stamp, first, pages, found);
                first += pages.len() as u64;
            }
        }
        for run in runs(&found, |found| found != talk::HIT) {
            if self.waits() {
                before_waiting();
            }
            let offset = (pages.start + run.start as u64) * PAGE_SIZE as u64;
            let read = self.image.read_pages(offset, &mut buffer[run]);
            read.map_err(|error| failure("read", offset, &error))?;
        }
        let skip = (offset % PAGE_SIZE as u64) as usize;
        let answered = answer(&page_bytes(buffer)[skip..skip + bytes as usize]);
        let wanted = runs(&found, |found| found == talk::WANTED);
        // What changed while it was read is of neither time.
        if let Some(stamp) =
            stamp.filter(|_| !wanted.is_empty()).filter(|&was| self.stamp() == Some(was))
        {
            for run in wanted {
                let mut first = pages.start + run.start as u64;
                for pages in buffer[run].chunks(talk::MAX_PAGES) {
                    cache.put(stamp, first, pages);
                    first += pages.len() as u64;
                }
            }
        }
        Ok(answered)
    }

    /// Writes bytes inside of the disk, which lie in `pages` where they lie in the image's
    /// pages. `sync`: until they are on disk.
    ///
    /// # Errors
    /// The image cannot be written; any part of the bytes may have been.
    pub fn write(
        &self,
        cache: &mut dyn Cache,
        pages: &mut [PageBuffer],
        (offset, bytes): (u64, u32),
        sync: bool,
    ) -> Result<(), Failure> {
        let range = pages_of(offset, bytes);
        let _held = self.ranges.hold(range.clone(), true, &mut || ());
        cache.forget(range.start, range.end - range.start);
        self.write_held(pages, (offset, bytes))?;
        if sync { self.flush() } else { Ok(()) }
    }

    fn write_held(
        &self,
        pages: &mut [PageBuffer],
        (offset, bytes): (u64, u32),
    ) -> Result<(), Failure> {
        const PAGE: u64 = PAGE_SIZE as u64;
        let range = pages_of(offset, bytes);
        debug_assert_eq!(pages.len() as u64, range.end - range.start);
        let begin = range.start * PAGE;
        let end = offset + u64::from(bytes);
        // Of the pages at both ends the rest is what it was.
        let (head, tail) = ((offset - begin) as usize, (end % PAGE) as usize);
        let last = range.end - 1;
        let mut edge = zeroes(1);
        let mut read = |page: u64| {
            let read = self.image.read_pages(page * PAGE, &mut edge);
            read.map_err(|error| failure("read", page * PAGE, &error))?;
            Ok::<_, Failure>(edge[0].0)
        };
        if head != 0 {
            let old = read(range.start)?;
            pages[0].0[..head].copy_from_slice(&old[..head]);
        }
        if tail != 0 {
            let old = read(last)?;
            let at = pages.len() - 1;
            pages[at].0[tail..].copy_from_slice(&old[tail..]);
        }
        self.image.write_pages(begin, pages).map_err(|error| failure("written", offset, &error))
    }

    /// Has all that was answered be on disk.
    ///
    /// # Errors
    /// It is not known what is.
    pub fn flush(&self) -> Result<(), Failure> {
        self.image.sync().map_err(|error| Failure {
            error: Error::Io,
            text: format!("the image cannot be flushed: {error}"),
        })
    }

    /// Gives up bytes that are not wanted any more, as far as they are whole pages.
    ///
    /// # Errors
    /// As for a write.
    pub fn trim(
        &self,
        cache: &mut dyn Cache,
        (offset, bytes): (u64, u32),
        sync: bool,
    ) -> Result<(), Failure> {
        let range = pages_of(offset, bytes);
        let _held = self.ranges.hold(range.clone(), true, &mut || ());
        cache.forget(range.start, range.end - range.start);
        let whole = self.whole_pages(offset, bytes);
        if !whole.is_empty() {
            // Where the file system cannot, they stay what they were.
            let trimmed = self.image.zero_pages(whole.start, whole.end - whole.start, false);
            trimmed.map_err(|error| failure("trimmed", offset, &error))?;
        }
        if sync { self.flush() } else { Ok(()) }
    }

    /// Has bytes be zero. `keep_room`: without giving up their room on disk.
    ///
    /// # Errors
    /// As for a write.
    pub fn zero(
        &self,
        cache: &mut dyn Cache,
        (offset, bytes): (u64, u32),
        keep_room: bool,
        sync: bool,
    ) -> Result<(), Failure> {
        let range = pages_of(offset, bytes);
        let _held = self.ranges.hold(range.clone(), true, &mut || ());
        cache.forget(range.start, range.end - range.start);
        let end = offset + u64::from(bytes);
        let whole = self.whole_pages(offset, bytes);
        if whole.is_empty() {
            self.write_zeroes(offset..end)?;
        } else {
            self.write_zeroes(offset..whole.start)?;
            let zeroed = self.image.zero_pages(whole.start, whole.end - whole.start, keep_room);
            if !zeroed.map_err(|error| failure("zeroed", whole.start, &error))? {
                self.write_zeroes(whole.clone())?;
            }
            self.write_zeroes(whole.end..end)?;
        }
        if sync { self.flush() } else { Ok(()) }
    }

    /// The part of a range that is whole pages of the image, in bytes.
    fn whole_pages(&self, offset: u64, bytes: u32) -> Range<u64> {
        let page = PAGE_SIZE as u64;
        let end = offset + u64::from(bytes);
        let start = offset.next_multiple_of(page);
        start..(end - end % page).max(start)
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<(), Failure> {
        let mut offset = range.start;
        while offset < range.end {
            let piece = (ZERO_PAGES * PAGE_SIZE) as u64;
            let end = range.end.min((offset / piece + 1) * piece);
            let part = (offset, (end - offset) as u32);
            let pages = pages_of(part.0, part.1);
            let mut zeroes = zeroes((pages.end - pages.start) as usize);
            self.write_held(&mut zeroes, part)?;
            offset = end;
        }
        Ok(())
    }

    /// What has room on disk. `one`: the first is enough.
    #[must_use]
    pub fn status(&self, (offset, bytes): (u64, u32), one: bool) -> Vec<Extent> {
        let end = offset + u64::from(bytes);
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end {
            let Allocation { hole, end: until } = self.image.allocation(at);
            let until = until.clamp(at + 1, end);
            let bytes = (until - at) as u32;
            let is_full = extents.len() == if one { 1 } else { MAX_EXTENTS };
            match extents.last_mut() {
                Some(last) if last.hole == hole => last.bytes += bytes,
                _ if is_full => break,
                _ => extents.push(Extent { bytes, hole }),
            }
            at = until;
        }
        extents
    }
}

/// Puts bytes where they lie in their pages: `fill` gets the place for them.
pub(crate) fn in_pages<R>(
    (offset, bytes): (u64, u32),
    fill: impl FnOnce(&mut [u8]) -> io::Result<R>,
) -> io::Result<(Vec<PageBuffer>, R)> {
    let range = pages_of(offset, bytes);
    let mut pages = zeroes((range.end - range.start) as usize);
    let skip = (offset % PAGE_SIZE as u64) as usize;
    let filled = fill(&mut page_bytes_mut(&mut pages)[skip..skip + bytes as usize])?;
    Ok((pages, filled))
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
