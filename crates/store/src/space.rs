//! What the store occupies: taking slots, freeing them, giving memory back,
//! and the numbers about it.
//!
//! Which bytes are whose is decided by `slabs` and `segments`; here their
//! decisions meet the tiers and the counters.

use std::io;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

use strata_units::PAGE_SIZE;

use crate::config::StoreStats;
use crate::location::{Codec, Location, SizeClass, Tier};
use crate::segments::{SEGMENT_BYTES, Segments};
use crate::slabs::{NoSlot, SLAB_BYTES, Slabs};
use crate::store::{Store, lock};
use crate::table::IndexSize;

/// Everything that says what is free. Held for moments, never over I/O or
/// compression.
pub(crate) struct Allocator {
    pub(crate) slabs: Slabs,
    pub(crate) segments: Option<Segments>,
    pub(crate) index: IndexSize,
    /// The id given out last. Ids are given out in a circle, so going round
    /// from here meets objects roughly oldest first.
    pub(crate) newest: u32,
}

/// What `stats` shows.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) references: AtomicU64,
    /// Those of them that are nobody's yet, and the same of fill pages and of page files'.
    pub(crate) references_aside: AtomicU64,
    pub(crate) fill_pages_aside: AtomicU64,
    pub(crate) filed_pages_aside: AtomicU64,
    pub(crate) fill_pages: AtomicU64,
    pub(crate) filed_pages: AtomicU64,
    pub(crate) objects: AtomicU64,
    pub(crate) dead: AtomicU64,
    pub(crate) dram_bytes: AtomicU64,
    pub(crate) dram_payload: AtomicU64,
    pub(crate) staged_objects: AtomicU64,
    pub(crate) fast_objects: AtomicU64,
    pub(crate) fast_payload: AtomicU64,
    pub(crate) file_bytes: AtomicU64,
    pub(crate) file_payload: AtomicU64,
    pub(crate) file_objects: AtomicU64,
    pub(crate) bookkeeping_bytes: AtomicU64,
    pub(crate) tier_errors: AtomicU64,
    pub(crate) corrupt_objects: AtomicU64,
}

/// Memory that is nobody's any more and still has to be given back, which is
/// done without the lock.
#[derive(Default)]
pub(crate) struct Reclaimed {
    pub(crate) slabs: Vec<u32>,
    pub(crate) segments: Vec<u32>,
    /// A write to them has failed: they come last when another is needed.
    pub(crate) failed: bool,
}

impl Store {
    /// Takes a slot in DRAM and fills it; none when there is no room.
    pub(crate) fn write_slot(
        &self,
        codec: Codec,
        bytes: &[u8],
        growth: bool,
    ) -> io::Result<Option<Location>> {
        let unit = {
            let mut allocator = lock(&self.allocator);
            let unit = allocator.slabs.allocate(SizeClass::of(bytes.len()), growth);
            self.show_costs(&allocator);
            match unit {
                Ok(unit) => unit,
                Err(NoSlot) => return Ok(None),
            }
        };
        let location = Location { tier: Tier::Dram, codec, len: bytes.len(), unit };
        self.account(location);
        // A reader that still copies the slot's last content must, once it has
        // seen a byte of the new one, also see that the object has moved: this
        // fence pairs with the one in `read_object`.
        fence(Release);
        match self.data.write_at(location.offset(), bytes) {
            Ok(()) => Ok(Some(location)),
            Err(error) => {
                self.free_location(location);
                Err(error)
            }
        }
    }

    /// Counts bytes that now lie at `location`.
    pub(crate) fn account(&self, location: Location) {
        let payload = match location.tier {
            Tier::Dram => &self.counters.dram_payload,
            Tier::File => &self.counters.file_payload,
        };
        payload.fetch_add(location.len as u64, Relaxed);
        if location.tier == Tier::File {
            self.counters.file_objects.fetch_add(1, Relaxed);
        }
        if location.codec == Codec::Staged {
            self.counters.staged_objects.fetch_add(1, Relaxed);
        }
        if location.tier == Tier::Dram && location.codec == Codec::Lz4 {
            self.counters.fast_objects.fetch_add(1, Relaxed);
            self.counters.fast_payload.fetch_add(location.len as u64, Relaxed);
        }
    }

    /// The same for bytes that do not lie there any more.
    pub(crate) fn discount(&self, location: Location) {
        let payload = match location.tier {
            Tier::Dram => &self.counters.dram_payload,
            Tier::File => &self.counters.file_payload,
        };
        payload.fetch_sub(location.len as u64, Relaxed);
        if location.tier == Tier::File {
            self.counters.file_objects.fetch_sub(1, Relaxed);
        }
        if location.codec == Codec::Staged {
            self.counters.staged_objects.fetch_sub(1, Relaxed);
        }
        if location.tier == Tier::Dram && location.codec == Codec::Lz4 {
            self.counters.fast_objects.fetch_sub(1, Relaxed);
            self.counters.fast_payload.fetch_sub(location.len as u64, Relaxed);
        }
    }

    pub(crate) fn release_location(
        &self,
        allocator: &mut Allocator,
        location: Location,
        reclaimed: &mut Reclaimed,
    ) {
        self.discount(location);
        match location.tier {
            Tier::Dram => {
                reclaimed.slabs.extend(allocator.slabs.release(location.unit, location.class()));
            }
            Tier::File => {
                let segments =
                    allocator.segments.as_mut().expect("objects lie in a file that exists");
                reclaimed.segments.extend(segments.remove(location.offset(), location.len));
            }
        }
    }

    /// Frees the bytes of an object that has moved or was never published.
    pub(crate) fn free_location(&self, location: Location) {
        let mut reclaimed = Reclaimed::default();
        {
            let mut allocator = lock(&self.allocator);
            self.release_location(&mut allocator, location, &mut reclaimed);
            self.show_costs(&allocator);
        }
        self.give_back(reclaimed);
    }

    /// Gives empty slabs and segments back to the kernel; how many bytes of
    /// DRAM that was at most.
    pub(crate) fn give_back(&self, mut reclaimed: Reclaimed) {
        if !reclaimed.segments.is_empty()
            && let Some(segments) = &mut lock(&self.allocator).segments
        {
            reclaimed.segments.retain(|&segment| {
                self.reuses.count(segment);
                reclaimed.failed || !segments.keep_blocks(segment)
            });
        }
        if reclaimed.slabs.is_empty() && reclaimed.segments.is_empty() {
            return;
        }
        let punched: Vec<bool> = reclaimed
            .slabs
            .iter()
            .map(|&slab| self.data.punch(u64::from(slab) * SLAB_BYTES, SLAB_BYTES).is_ok())
            .collect();
        if let Some(file) = &self.file {
            for &segment in &reclaimed.segments {
                // A file system without holes keeps the blocks; the segment is
                // used again either way.
                let _ = file.punch(u64::from(segment) * SEGMENT_BYTES, SEGMENT_BYTES);
            }
        }
        let mut allocator = lock(&self.allocator);
        for (&slab, &done) in reclaimed.slabs.iter().zip(&punched) {
            allocator.slabs.punched(slab, done);
        }
        if let Some(segments) = &mut allocator.segments {
            for &segment in &reclaimed.segments {
                segments.given_back(segment);
            }
        }
        self.show_costs(&allocator);
    }

    /// Publishes what the allocator knows, for readers without the lock.
    pub(crate) fn show_costs(&self, allocator: &Allocator) {
        let counters = &self.counters;
        counters.dram_bytes.store(allocator.slabs.touched_bytes(), Relaxed);
        let mut bookkeeping = allocator.slabs.metadata_bytes();
        if let Some(segments) = &allocator.segments {
            counters.file_bytes.store(segments.written_bytes(), Relaxed);
            bookkeeping += segments.metadata_bytes();
        }
        counters.bookkeeping_bytes.store(bookkeeping, Relaxed);
    }

    pub(crate) fn note_tier_error(&self, what: &str, offset: u64, error: &dyn std::fmt::Display) {
        self.counters.tier_errors.fetch_add(1, Relaxed);
        *lock(&self.last_tier_error) = Some(format!("{what} at {offset:#x}: {error}"));
    }

    /// The text of the tier file's last failure.
    #[must_use]
    pub fn last_tier_error(&self) -> Option<String> {
        lock(&self.last_tier_error).clone()
    }

    /// DRAM that counts against the limit.
    pub(crate) fn compressed_bytes(&self) -> u64 {
        let staged = self.counters.staged_objects.load(Relaxed) * PAGE_SIZE as u64;
        self.counters.dram_bytes.load(Relaxed).saturating_sub(staged)
    }

    pub(crate) fn compressed_limit(&self) -> u64 {
        self.compressed_limit.load(Relaxed)
    }

    /// Changes [`StoreConfig::compressed_limit`]. A lower limit takes effect
    /// with the next put; what is stored stays.
    pub fn set_compressed_limit(&self, limit_bytes: Option<u64>) {
        self.compressed_limit.store(limit_bytes.unwrap_or(u64::MAX), Relaxed);
    }

    /// The store in numbers; constant time.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        let counters = &self.counters;
        let without = |all: &AtomicU64, aside: &AtomicU64| {
            all.load(Relaxed).saturating_sub(aside.load(Relaxed))
        };
        let references = without(&counters.references, &counters.references_aside);
        let fill_pages = without(&counters.fill_pages, &counters.fill_pages_aside);
        let filed_pages = without(&counters.filed_pages, &counters.filed_pages_aside);
        let objects = counters.objects.load(Relaxed);
        let stored_pages = references + fill_pages + filed_pages;
        StoreStats {
            stored_pages,
            stored_bytes: stored_pages * PAGE_SIZE as u64,
            objects,
            deduplicated_pages: references.saturating_sub(objects),
            fill_pages,
            filed_pages,
            dram_bytes: counters.dram_bytes.load(Relaxed),
            payload_bytes: counters.dram_payload.load(Relaxed),
            staged_bytes: counters.staged_objects.load(Relaxed) * PAGE_SIZE as u64,
            fast_original_bytes: counters.fast_objects.load(Relaxed) * PAGE_SIZE as u64,
            fast_payload_bytes: counters.fast_payload.load(Relaxed),
            file_bytes: counters.file_bytes.load(Relaxed),
            file_payload_bytes: counters.file_payload.load(Relaxed),
            file_objects: counters.file_objects.load(Relaxed),
            dictionaries: self.dictionaries.count(),
            dictionary_bytes: self.dictionaries.bytes(),
            lands_dense: self.dictionaries.has_current(),
            // The table's own file says what it costs; the dictionaries' content is in
            // there.
            metadata_bytes: self.table.occupied_bytes(self.dictionaries.bytes())
                + counters.bookkeeping_bytes.load(Relaxed)
                + self.dictionaries.prepared_bytes()
                + size_of::<Self>() as u64,
            tier_errors: counters.tier_errors.load(Relaxed),
            corrupt_objects: counters.corrupt_objects.load(Relaxed),
        }
    }
}
