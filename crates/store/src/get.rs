//! Getting pages back, and finding out where they are. A thread that waits for the tier
//! file waits here; reading it without waiting is in `read`.

use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::fence;

use strata_units::{Handle, PAGE_SIZE};

use crate::backing::Waiting;
use crate::codec::{self, CLUSTER_PAGES, Digest, Page, Scratch, with_scratch};
use crate::config::{Fingerprint, GetError, Source};
use crate::location::{Codec, Location, Tier, Word};
use crate::segments::CLUSTER_BYTES;
use crate::store::{Store, Target};

/// Times that a page is read again before it counts as lost. A page that moved
/// away and back while it was read looks corrupt once; twice in a row is
/// nothing to reckon with.
const READ_ATTEMPTS: u32 = 3;

impl Store {
    /// Copies the page out and says where it came from. Takes no lock, waits
    /// for nothing but the tier file, and allocates nothing after the thread's
    /// [`prepare_thread`]. The caller owns a reference and keeps it meanwhile.
    ///
    /// # Errors
    /// [`GetError::Corrupt`] when the bytes are not what was stored, and
    /// [`GetError::Io`] when the tier cannot be read; `out` is then unspecified.
    ///
    /// # Panics
    /// When the handle names no referenced object.
    pub fn get(&self, handle: Handle, out: &mut Page) -> Result<Source, GetError> {
        self.get_with_fingerprint(handle, out).map(|(source, _)| source)
    }

    /// [`Store::get`], and the page's fingerprint for [`Store::is_unchanged`];
    /// none for a page of one value, which costs nothing to store again, and for one of
    /// a page file.
    ///
    /// # Errors
    /// As [`Store::get`].
    ///
    /// # Panics
    /// As [`Store::get`].
    pub fn get_with_fingerprint(
        &self,
        handle: Handle,
        out: &mut Page,
    ) -> Result<(Source, Option<Fingerprint>), GetError> {
        match Target::of(handle) {
            Target::Fill(value) => {
                codec::fill(value, out);
                Ok((Source::Fill, None))
            }
            Target::Object(id) => with_scratch(|scratch| self.read_object(scratch, id, out))
                .map(|(source, digest)| (source, Some(digest.fingerprint()))),
            Target::InFile { file, page } => {
                let opened = self.page_files.get(file);
                let opened = opened.expect("a file whose pages are referred to is open");
                opened.get(page, out).map(|()| (Source::File, None)).inspect_err(|error| {
                    let (start, _) = opened.place(page).unwrap_or_default();
                    self.note_tier_error("read of a snapshot's file", start, error);
                })
            }
        }
    }

    /// Whether `page` is what is stored under `handle`, whose fingerprint the
    /// caller has from [`Store::get_with_fingerprint`]: by digest, without reading
    /// what is stored. The caller owns a reference.
    #[must_use]
    pub fn is_unchanged(&self, handle: Handle, fingerprint: Fingerprint, page: &Page) -> bool {
        let Target::Object(id) = Target::of(handle) else { return false };
        let digest = Digest::of(page, self.table.seed());
        digest.fingerprint() == fingerprint && digest.hash() == self.table.hash(id).load(Relaxed)
    }

    /// Where [`Store::get`] would read the page now, without reading it.
    ///
    /// # Panics
    /// When the handle names no referenced object.
    #[must_use]
    pub fn locate(&self, handle: Handle) -> Source {
        match Target::of(handle) {
            Target::Fill(_) => Source::Fill,
            Target::Object(id) => {
                let word = Word(self.table.word(id).load(Acquire));
                assert!(word.references() > 0, "{handle:?} names no referenced object");
                source_of(word.location())
            }
            Target::InFile { .. } => Source::File,
        }
    }

    /// Reads an object that the caller holds a reference to. Afterwards its
    /// bytes as stored are in `scratch.packed`, unless it is raw.
    pub(crate) fn read_object(
        &self,
        scratch: &mut Scratch,
        id: u32,
        out: &mut Page,
    ) -> Result<(Source, Digest), GetError> {
        let word = self.table.word(id);
        let hash = self.table.hash(id).load(Relaxed);
        let mut attempts = 0;
        loop {
            let before = Word(word.load(Acquire));
            assert!(before.references() > 0, "object {id} is read without a reference");
            let location = before.location();
            let fetched = self.fetch(scratch, location, out);
            fence(Acquire);
            let moved = Word(word.load(Relaxed)).location_bits() != before.location_bits();
            if moved {
                continue;
            }
            let result = match fetched {
                Err(error) => Err(GetError::Io(error)),
                Ok(()) => match self.unpacked(scratch, location, hash, out) {
                    Some(digest) => return Ok((source_of(location), digest)),
                    None => Err(GetError::Corrupt),
                },
            };
            attempts += 1;
            if attempts == READ_ATTEMPTS {
                if location.tier == Tier::File
                    && let Err(error) = &result
                {
                    self.note_tier_error("read", location.offset(), error);
                }
                return result;
            }
        }
    }

    /// Makes a page of what [`Self::fetch`] brought. None: it is not the page
    /// whose hash this is.
    pub(crate) fn unpacked(
        &self,
        scratch: &mut Scratch,
        location: Location,
        hash: u32,
        out: &mut Page,
    ) -> Option<Digest> {
        let whole = match location.codec {
            Codec::Staged | Codec::Raw => true,
            codec => scratch.unpack(codec, location.len, &self.dictionaries, out),
        };
        let digest = Digest::of(out, self.table.seed());
        (whole && digest.hash() == hash).then_some(digest)
    }

    /// Copies an object's bytes as stored: into `out` when it is raw, else into
    /// `scratch.packed`.
    fn fetch(&self, scratch: &mut Scratch, location: Location, out: &mut Page) -> io::Result<()> {
        let raw = matches!(location.codec, Codec::Staged | Codec::Raw);
        let Scratch { packed, cluster, .. } = scratch;
        let target = if raw { &mut out[..] } else { &mut packed[..location.len] };
        match (location.tier, &self.file) {
            (Tier::Dram, _) => self.data.read_at(location.offset(), target),
            (Tier::File, Some(file)) if file.waiting() == Waiting::Never => {
                file.read_at(location.offset(), target)
            }
            (Tier::File, Some(file)) => {
                let skip = (location.offset() % CLUSTER_BYTES) as usize;
                let len = (skip + location.len).next_multiple_of(CLUSTER_BYTES as usize);
                const { assert!(CLUSTER_PAGES * PAGE_SIZE >= 2 * CLUSTER_BYTES as usize) };
                file.read_at(location.offset() - skip as u64, &mut cluster.0[..len])?;
                target.copy_from_slice(&cluster.0[skip..skip + location.len]);
                Ok(())
            }
            (Tier::File, None) => Err(io::Error::other("the tier file is gone")),
        }
    }
}

fn source_of(location: Location) -> Source {
    match (location.tier, location.codec) {
        (Tier::File, _) => Source::File,
        (Tier::Dram, Codec::Staged) => Source::Staged,
        (Tier::Dram, _) => Source::Compressed,
    }
}

/// Makes what this thread needs to read pages of every kind, so that later
/// reads allocate nothing. Threads that serve faults call it once.
pub fn prepare_thread() {
    with_scratch(|scratch| {
        scratch.prepare();
    });
}
