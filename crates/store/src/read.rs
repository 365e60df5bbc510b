//! Reading the tier file without waiting for it: where a page's bytes are, a read
//! begun on a queue of the caller's, and, when it has ended, the page.
//!
//! The caller keeps a reference from the first step to the last. In between the
//! object may be moved, and what lay there overwritten: the last step finds out
//! and says so, and the caller begins again.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, fence};

use strata_sys::{READ_BYTES, ReadId, ReadQueue};
use strata_units::Handle;

use crate::backing::Waiting;
use crate::codec::{Page, with_scratch};
use crate::config::Fingerprint;
use crate::location::{Codec, Location, Tier, Word};
use crate::segments::{CLUSTER_BYTES, segment_of};
use crate::store::{Store, Target};

/// Counters of segments' reuse; segments whose numbers differ by a multiple of
/// this share one.
const COUNTERS: usize = 512;

/// How often segments of the tier file were given back. A segment is written once
/// from front to back before that: while its counter stands, bytes that were there
/// are there.
pub(crate) struct Reuses(Box<[AtomicU32; COUNTERS]>);

impl Default for Reuses {
    fn default() -> Self {
        Self(Box::new([const { AtomicU32::new(0) }; COUNTERS]))
    }
}

impl Reuses {
    /// A segment becomes free to be written again. Before it is.
    pub(crate) fn count(&self, segment: u32) {
        self.of(segment).fetch_add(1, Release);
    }

    fn of(&self, segment: u32) -> &AtomicU32 {
        &self.0[segment as usize % COUNTERS]
    }
}

/// Where the bytes of a page were in a file, and what to read for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileRead(Place);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// In the tier file.
    Tier { location: Location, reuses: u32 },
    /// In a page file.
    InFile { file: u16, start: u64, len: u32 },
}

impl FileRead {
    /// First byte to read.
    #[must_use]
    pub fn start(&self) -> u64 {
        match self.0 {
            Place::Tier { location, .. } => location.offset() / CLUSTER_BYTES * CLUSTER_BYTES,
            Place::InFile { start, .. } => start,
        }
    }

    /// Byte after the last one to read.
    #[must_use]
    pub fn end(&self) -> u64 {
        match self.0 {
            Place::Tier { location, .. } => {
                (location.offset() + location.len as u64).next_multiple_of(CLUSTER_BYTES)
            }
            Place::InFile { start, len, .. } => start + u64::from(len),
        }
    }

    /// The number of the page file; none: the tier file.
    #[must_use]
    pub fn page_file(&self) -> Option<u16> {
        match self.0 {
            Place::Tier { .. } => None,
            Place::InFile { file, .. } => Some(file),
        }
    }
}

/// What was read is not the page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unread {
    /// It has moved meanwhile: look again where it is.
    Moved,
    /// The bytes are wrong; a second read may find better ones.
    Corrupt,
}

impl Store {
    /// Whether there is a tier file, and reading it waits for a device.
    #[must_use]
    pub fn has_slow_tier(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.waiting() != Waiting::Never)
    }

    /// Whether the tier file is mapped from a device that is memory.
    #[must_use]
    pub fn has_dax_tier(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.is_dax())
    }

    /// Whether reading some page may wait for a device.
    #[must_use]
    pub fn has_slow_file(&self) -> bool {
        self.has_slow_tier() || self.page_files.any_is_slow()
    }

    /// What has to be read for the page, if [`Store::get`] would have to wait for
    /// it. The caller owns a reference.
    ///
    /// # Panics
    /// When the handle names no referenced object.
    #[must_use]
    pub fn file_read(&self, handle: Handle) -> Option<FileRead> {
        let id = match Target::of(handle) {
            Target::Object(id) if self.has_slow_tier() => id,
            Target::InFile { file, page } => {
                let opened = self.page_files.get(file)?;
                let (start, len) = opened.place(page)?;
                let is_slow = opened.backing.waiting() != Waiting::Never;
                return is_slow.then_some(FileRead(Place::InFile { file, start, len: len as u32 }));
            }
            Target::Object(_) | Target::Fill(_) => return None,
        };
        let word = self.table.word(id);
        let mut before = Word(word.load(Acquire));
        loop {
            assert!(before.references() > 0, "{handle:?} names no referenced object");
            let location = before.location();
            if location.tier != Tier::File {
                return None;
            }
            // The counter first, then the place: the object lay there while the
            // counter stood so.
            let reuses = self.reuses.of(segment_of(location.offset())).load(Acquire);
            let now = Word(word.load(Acquire));
            if now.location_bits() == before.location_bits() {
                return Some(FileRead(Place::Tier { location, reuses }));
            }
            before = now;
        }
    }

    /// Whether the page is of a page file and not in it yet. The caller owns a reference.
    #[must_use]
    pub fn is_awaited(&self, handle: Handle) -> bool {
        let Target::InFile { file, page } = Target::of(handle) else { return false };
        self.page_files.get(file).is_some_and(|file| {
            let place = file.place(page);
            place.is_some_and(|(start, len)| file.until_there(start, len).is_some())
        })
    }

    /// Begins to read the file that `read` is of from `start` to `end`, at most
    /// [`READ_BYTES`] apart: begin and end of reads of that file. None: the queue
    /// has no room.
    ///
    /// # Panics
    /// When there is no such file, or the range is none.
    pub fn begin_read(
        &self,
        queue: &mut ReadQueue,
        read: &FileRead,
        (start, end): (u64, u64),
    ) -> Option<ReadId> {
        assert!(start < end && end - start <= READ_BYTES as u64, "a read of {start} to {end}");
        let len = (end - start) as usize;
        let (file, wait) = match read.page_file() {
            None => (self.file.clone(), None),
            Some(number) => self.page_files.get(number).map_or((None, None), |file| {
                (Some(Arc::clone(&file.backing)), file.until_there(start, len))
            }),
        };
        let file = &file.expect("what is read lies in a file that exists");
        let descriptor = match file.waiting() {
            Waiting::OnDescriptor if wait.is_none() => file.descriptor(),
            _ => None,
        };
        let own = Arc::clone(file);
        queue.begin(descriptor, start, len, move |out| {
            wait.map_or(Ok(()), |wait| wait())?;
            own.read_at(start, out)
        })
    }

    /// The page of `read`, from `bytes` that were read from `start` on. With it its
    /// fingerprint as of [`Store::get_with_fingerprint`]. The caller has owned a
    /// reference since before [`Store::file_read`].
    ///
    /// # Errors
    /// See [`Unread`]; `out` is then unspecified.
    ///
    /// # Panics
    /// When `bytes` do not cover the read.
    pub fn get_from(
        &self,
        handle: Handle,
        read: &FileRead,
        start: u64,
        bytes: &[u8],
        out: &mut Page,
    ) -> Result<Option<Fingerprint>, Unread> {
        let (id, location, reuses) = match (Target::of(handle), read.0) {
            (Target::Object(id), Place::Tier { location, reuses }) => (id, location, reuses),
            (Target::InFile { file, page }, Place::InFile { .. }) => {
                let opened = self.page_files.get(file).ok_or(Unread::Moved)?;
                let got = opened.get_from(page, start, bytes, out);
                return got.map(|()| None).map_err(|_| Unread::Corrupt);
            }
            _ => return Err(Unread::Moved),
        };
        let at = (location.offset() - start) as usize;
        let bytes = &bytes[at..at + location.len];
        fence(Acquire);
        let now = Word(self.table.word(id).load(Relaxed));
        let reused = self.reuses.of(segment_of(location.offset())).load(Relaxed) != reuses;
        if reused || now.location_bits() != location.pack() {
            return Err(Unread::Moved);
        }
        let hash = self.table.hash(id).load(Relaxed);
        let digest = with_scratch(|scratch| {
            match location.codec {
                Codec::Staged | Codec::Raw => out.copy_from_slice(bytes),
                Codec::Lz4 | Codec::Zstd => scratch.packed[..location.len].copy_from_slice(bytes),
            }
            self.unpacked(scratch, location, hash, out)
        });
        digest.map(|digest| Some(digest.fingerprint())).ok_or(Unread::Corrupt)
    }

    /// A read of `read` failed for the last time: counted, and shown.
    pub fn note_failed_read(&self, read: &FileRead, error: &dyn std::fmt::Display) {
        match read.0 {
            Place::Tier { location, .. } => self.note_tier_error("read", location.offset(), error),
            Place::InFile { start, .. } => {
                self.note_tier_error("read of a snapshot's file", start, error);
            }
        }
    }
}
