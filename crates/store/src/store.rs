//! The store itself: put, get, retain, release, and the freeing of the dead.
//!
//! Compression and moving in the background are in `maintain`, taking over from
//! a dead worker in `recover`.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};
use std::sync::{Mutex, MutexGuard};

use strata_units::{Handle, PAGE_SIZE};

use crate::backing::{Backing, FileBacking, MemoryBacking};
use crate::codec::{self, CLUSTER_PAGES, Page, Scratch, with_scratch};
use crate::config::{
    BorrowedDescriptors, Descriptors, FileConfig, GetError, Put, PutError, Source, StoreConfig,
    StoreError, StoreStats,
};
use crate::location::{Codec, Location, SizeClass, TIER_SPAN_BYTES, Tier, UNIT_BYTES, Word};
use crate::maintain::Maintenance;
use crate::segments::{CLUSTER_BYTES, MIN_FILE_BYTES, Segments};
use crate::slabs::Slabs;
use crate::table::{IndexSize, Table};

/// Address space for a tenant's data in DRAM. Costs nothing; bounded so that a
/// thousand tenants fit into a process.
pub(crate) const DATA_SPAN_BYTES: u64 = 128 << 30;
const _: () = assert!(DATA_SPAN_BYTES <= TIER_SPAN_BYTES);

/// Marks a handle whose low 32 bits are the page.
const FILL_HANDLE: u64 = 1 << (Handle::BITS - 1);
/// References moved to or from the overflow table at a time: half of what a
/// word holds, so that going back and forth at the edge costs nothing.
const OVERFLOW_STEP: u64 = Word::MAX_REFERENCES.div_ceil(2);
/// Objects of equal hash that a put compares with. The second is there by an
/// accident of 32 bits or by the tenant's design.
const MAX_CANDIDATES: usize = 4;
/// Dead objects that a put frees on its way: more than it makes, so that they
/// do not pile up without maintenance.
const REAP_PER_PUT: usize = 32;
/// Dead objects freed under one hold of the lock.
const REAP_BATCH: usize = 256;
/// Times that a page is read again before it counts as lost. A page that moved
/// away and back while it was read looks corrupt once; twice in a row is
/// nothing to reckon with.
const READ_ATTEMPTS: u32 = 3;

/// Pages by content. See the crate's documentation for what it promises.
pub struct Store {
    pub(crate) table: Table,
    pub(crate) data: Box<dyn Backing>,
    pub(crate) file: Option<Box<dyn Backing>>,
    pub(crate) allocator: Mutex<Allocator>,
    pub(crate) maintenance: Mutex<Maintenance>,
    /// References beyond what an object's word can count.
    overflow: Mutex<HashMap<u32, u64>>,
    /// Most DRAM for data, staged pages apart; `u64::MAX`: no limit.
    compressed_limit: AtomicU64,
    pub(crate) counters: Counters,
    last_tier_error: Mutex<Option<String>>,
}

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
    pub(crate) fill_pages: AtomicU64,
    pub(crate) objects: AtomicU64,
    pub(crate) dead: AtomicU64,
    pub(crate) dram_bytes: AtomicU64,
    pub(crate) dram_payload: AtomicU64,
    pub(crate) staged_objects: AtomicU64,
    pub(crate) fast_objects: AtomicU64,
    pub(crate) fast_payload: AtomicU64,
    pub(crate) file_bytes: AtomicU64,
    pub(crate) file_payload: AtomicU64,
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
}

/// Locks; a poisoned lock means that its holder hit a bug of ours.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread of the store has panicked")
}

/// Why an insert did not happen.
enum InsertError {
    NoSlot,
    Io(io::Error),
}

impl Store {
    /// Makes an empty store.
    ///
    /// # Errors
    /// When the memory files or the tier file cannot be made.
    pub fn create(config: StoreConfig) -> Result<Self, StoreError> {
        let file = match &config.file {
            Some(file) => Some(create_file(file)?),
            None => None,
        };
        let name = "strata-data";
        let data = MemoryBacking::create(name, DATA_SPAN_BYTES)
            .map_err(|source| StoreError::Memory { name, source })?;
        Self::create_on(config.compressed_limit, Box::new(data), file)
    }

    /// Makes an empty store on given tiers: for tests with faults.
    ///
    /// # Errors
    /// When the object table's memory file cannot be made.
    pub fn create_on(
        compressed_limit: Option<u64>,
        data: Box<dyn Backing>,
        file: Option<Box<dyn Backing>>,
    ) -> Result<Self, StoreError> {
        let name = "strata-objects";
        let table = Table::create().map_err(|source| StoreError::Memory { name, source })?;
        Ok(Self::assemble(table, compressed_limit, data, file))
    }

    pub(crate) fn assemble(
        table: Table,
        compressed_limit: Option<u64>,
        data: Box<dyn Backing>,
        file: Option<Box<dyn Backing>>,
    ) -> Self {
        let span = data.capacity_bytes().min(DATA_SPAN_BYTES);
        let segments =
            file.as_ref().map(|file| Segments::new(file.capacity_bytes().min(TIER_SPAN_BYTES)));
        Self {
            table,
            data,
            file,
            allocator: Mutex::new(Allocator {
                slabs: Slabs::new(span),
                segments,
                index: IndexSize::for_objects(0),
                newest: 0,
            }),
            maintenance: Mutex::default(),
            overflow: Mutex::default(),
            compressed_limit: AtomicU64::new(compressed_limit.unwrap_or(u64::MAX)),
            counters: Counters::default(),
            last_tier_error: Mutex::default(),
        }
    }

    /// What must be kept open for [`Store::recover`].
    #[must_use]
    pub fn descriptors(&self) -> BorrowedDescriptors<'_> {
        Descriptors {
            table: self.table.memory().as_fd(),
            data: self.data.descriptor(),
            file: self.file.as_ref().map(|file| file.descriptor()),
        }
    }

    /// Stores a page, or finds that it is stored already. The caller owns one
    /// reference to the result.
    ///
    /// # Errors
    /// [`PutError::Full`] when the DRAM limit is reached and the tier file takes
    /// no more (either frees up again through releases), [`PutError::Io`] when
    /// the page cannot be written.
    pub fn put(&self, page: &Page, how: Put) -> Result<Handle, PutError> {
        if let Some(value) = codec::fill_value(page) {
            self.counters.fill_pages.fetch_add(1, Relaxed);
            return Ok(Handle(FILL_HANDLE | u64::from(value)));
        }
        if self.counters.dead.load(Relaxed) > 0 {
            self.reap_some(REAP_PER_PUT);
        }
        let hash = codec::hash(page);
        let id = match self.find_duplicate(hash, page) {
            Some(id) => id,
            None => match self.insert(page, hash, how, false) {
                Ok(id) => id,
                Err(InsertError::Io(error)) => return Err(PutError::Io(error)),
                Err(InsertError::NoSlot) => {
                    let relieved = self.relieve();
                    match self.insert(page, hash, how, relieved) {
                        Ok(id) => id,
                        Err(InsertError::Io(error)) => return Err(PutError::Io(error)),
                        Err(InsertError::NoSlot) => return Err(PutError::Full),
                    }
                }
            },
        };
        self.counters.references.fetch_add(1, Relaxed);
        Ok(Handle(u64::from(id)))
    }

    /// An object with this content, with a reference for the caller.
    fn find_duplicate(&self, hash: u32, page: &Page) -> Option<u32> {
        let mut found = [0u32; MAX_CANDIDATES];
        let mut count = 0;
        {
            let allocator = lock(&self.allocator);
            for id in self.table.candidates(&allocator.index, hash) {
                if self.try_reference(id) {
                    found[count] = id;
                    count += 1;
                    if count == MAX_CANDIDATES {
                        break;
                    }
                }
            }
        }
        let mut same = None;
        for &id in &found[..count] {
            let mut stored = [0; PAGE_SIZE];
            if same.is_none()
                && with_scratch(|scratch| self.read_object(scratch, id, &mut stored)).is_ok()
                && stored == *page
            {
                same = Some(id);
            } else {
                self.drop_reference(id);
            }
        }
        same
    }

    /// Makes an object. `relieved`: room has been made, DRAM may grow.
    fn insert(&self, page: &Page, hash: u32, how: Put, relieved: bool) -> Result<u32, InsertError> {
        let growth = relieved || self.compressed_bytes() < self.compressed_limit.load(Relaxed);
        with_scratch(|scratch| {
            let tried = match how {
                Put::Staged => None,
                Put::Lz4 => Some(Codec::Lz4),
                Put::Zstd => Some(Codec::Zstd),
            };
            let packed = tried.and_then(|codec| Some((codec, scratch.pack(codec, page)?)));
            let (codec, len, bytes) = match packed {
                Some((codec, len)) => (codec, len, &scratch.packed[..len]),
                None if how == Put::Staged => (Codec::Staged, PAGE_SIZE, &page[..]),
                None => (Codec::Raw, PAGE_SIZE, &page[..]),
            };
            let location = self.write_slot(codec, bytes, growth)?.ok_or(InsertError::NoSlot)?;
            let mut allocator = lock(&self.allocator);
            let free = self.table.free.next_around(allocator.newest + 1);
            let id = match free {
                Some(id) => {
                    self.table.free.remove(id);
                    id
                }
                None => match self.table.extend() {
                    Some(id) => id,
                    None => {
                        drop(allocator);
                        self.free_location(location);
                        return Err(InsertError::NoSlot);
                    }
                },
            };
            allocator.newest = id;
            self.table.hash(id).store(hash, Relaxed);
            // From here on the object survives this process, if its handle
            // reaches the page map.
            self.table.word(id).store(Word::new(location, 1).0, Release);
            self.table.link_in(&mut allocator.index, id);
            match codec {
                Codec::Staged => self.table.staged.insert(id),
                Codec::Zstd => self.table.demotable.insert(id),
                Codec::Lz4 | Codec::Raw => {
                    self.table.demotable.insert(id);
                    if how == Put::Lz4 {
                        self.table.repackable.insert(id);
                    }
                }
            }
            drop(allocator);
            self.counters.objects.fetch_add(1, Relaxed);
            debug_assert_eq!(location.len, len);
            Ok(id)
        })
    }

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
                Err(crate::slabs::NoSlot) => return Ok(None),
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
        match Target::of(handle) {
            Target::Fill(value) => {
                codec::fill(value, out);
                Ok(Source::Fill)
            }
            Target::Object(id) => with_scratch(|scratch| self.read_object(scratch, id, out)),
        }
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
        }
    }

    /// Reads an object that the caller holds a reference to. Afterwards its
    /// bytes as stored are in `scratch.packed`, unless it is raw.
    pub(crate) fn read_object(
        &self,
        scratch: &mut Scratch,
        id: u32,
        out: &mut Page,
    ) -> Result<Source, GetError> {
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
                Ok(()) => {
                    let whole = match location.codec {
                        Codec::Staged | Codec::Raw => true,
                        codec => scratch.unpack(codec, location.len, out),
                    };
                    if whole && codec::hash(out) == hash {
                        return Ok(source_of(location));
                    }
                    Err(GetError::Corrupt)
                }
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

    /// Copies an object's bytes as stored: into `out` when it is raw, else into
    /// `scratch.packed`.
    fn fetch(&self, scratch: &mut Scratch, location: Location, out: &mut Page) -> io::Result<()> {
        let raw = matches!(location.codec, Codec::Staged | Codec::Raw);
        let Scratch { packed, cluster, .. } = scratch;
        let target = if raw { &mut out[..] } else { &mut packed[..location.len] };
        match (location.tier, &self.file) {
            (Tier::Dram, _) => self.data.read_at(location.offset(), target),
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

    /// Adds a reference to a page that the caller holds one to. Takes no lock
    /// (but once in 16384 references to the same page).
    ///
    /// # Panics
    /// When the handle names no referenced object.
    pub fn retain(&self, handle: Handle) {
        match Target::of(handle) {
            Target::Fill(_) => {
                self.counters.fill_pages.fetch_add(1, Relaxed);
            }
            Target::Object(id) => {
                assert!(self.try_reference(id), "{handle:?} names no referenced object");
                self.counters.references.fetch_add(1, Relaxed);
            }
        }
    }

    /// Gives a reference up; with the last one the page goes. Constant time and
    /// without a lock, as [`Store::retain`]: the memory is freed later, by
    /// [`Store::reap`] or on the way of a put.
    ///
    /// Take the handle out of the page map first: a worker killed in between
    /// then leaves a page that nobody names, which recovery frees, and not a
    /// name without a page.
    ///
    /// # Panics
    /// When the handle names no referenced object.
    pub fn release(&self, handle: Handle) {
        match Target::of(handle) {
            Target::Fill(_) => {
                self.counters.fill_pages.fetch_sub(1, Relaxed);
            }
            Target::Object(id) => {
                self.drop_reference(id);
                self.counters.references.fetch_sub(1, Relaxed);
            }
        }
    }

    /// Adds a reference, unless the object is dead.
    pub(crate) fn try_reference(&self, id: u32) -> bool {
        let atomic = self.table.word(id);
        let mut word = Word(atomic.load(Relaxed));
        loop {
            if word.references() == 0 {
                return false;
            }
            if word.references() == Word::MAX_REFERENCES {
                self.spill_references(id);
                word = Word(atomic.load(Relaxed));
                continue;
            }
            match atomic.compare_exchange_weak(word.0, word.0 + Word::ONE, Acquire, Relaxed) {
                Ok(_) => return true,
                Err(now) => word = Word(now),
            }
        }
    }

    pub(crate) fn drop_reference(&self, id: u32) {
        let atomic = self.table.word(id);
        let mut word = Word(atomic.load(Relaxed));
        loop {
            assert!(word.references() > 0, "object {id} has no reference to give up");
            if word.references() == 1 && word.overflows() {
                self.refill_references(id);
                word = Word(atomic.load(Relaxed));
                continue;
            }
            match atomic.compare_exchange_weak(word.0, word.0 - Word::ONE, AcqRel, Relaxed) {
                Ok(_) => break,
                Err(now) => word = Word(now),
            }
        }
        if word.references() == 1 {
            self.counters.objects.fetch_sub(1, Relaxed);
            self.table.dead.insert(id);
            self.counters.dead.fetch_add(1, Relaxed);
        }
    }

    /// Moves a full word's surplus to the overflow table.
    fn spill_references(&self, id: u32) {
        let mut overflow = lock(&self.overflow);
        let atomic = self.table.word(id);
        let mut word = atomic.load(Relaxed);
        while Word(word).references() == Word::MAX_REFERENCES {
            let new = (word - OVERFLOW_STEP * Word::ONE) | Word::OVERFLOW;
            match atomic.compare_exchange_weak(word, new, AcqRel, Relaxed) {
                Ok(_) => {
                    *overflow.entry(id).or_insert(0) += OVERFLOW_STEP;
                    return;
                }
                Err(now) => word = now,
            }
        }
    }

    /// Brings references back from the overflow table before a word's last one
    /// goes.
    fn refill_references(&self, id: u32) {
        let mut overflow = lock(&self.overflow);
        let atomic = self.table.word(id);
        let mut word = atomic.load(Relaxed);
        // While the lock is held nobody else changes flag or overflow.
        while Word(word).overflows() && Word(word).references() == 1 {
            let rest = overflow.get(&id).map_or(0, |extra| extra - OVERFLOW_STEP);
            let flag = if rest == 0 { Word::OVERFLOW } else { 0 };
            let new = (word & !flag) + OVERFLOW_STEP * Word::ONE;
            match atomic.compare_exchange_weak(word, new, AcqRel, Relaxed) {
                Ok(_) if rest == 0 => {
                    overflow.remove(&id);
                    return;
                }
                Ok(_) => {
                    overflow.insert(id, rest);
                    return;
                }
                Err(now) => word = now,
            }
        }
    }

    /// Frees everything that nobody references any more; how many objects.
    pub fn reap(&self) -> usize {
        let mut total = 0;
        loop {
            let freed = self.reap_some(REAP_BATCH);
            total += freed;
            if freed < REAP_BATCH {
                return total;
            }
        }
    }

    fn reap_some(&self, max: usize) -> usize {
        let mut reclaimed = Reclaimed::default();
        let mut freed = 0;
        {
            let mut guard = lock(&self.allocator);
            let allocator = &mut *guard;
            while freed < max
                && let Some(id) = self.table.dead.next(0)
            {
                self.table.dead.remove(id);
                let word = Word(self.table.word(id).load(Acquire));
                assert_eq!(word.references(), 0, "object {id} is referenced and on the dead list");
                self.table.unlink(&mut allocator.index, id);
                for set in [&self.table.staged, &self.table.repackable, &self.table.demotable] {
                    set.remove(id);
                }
                // First the entry, then the slot: at no instant does an entry
                // point at bytes that may be another's.
                self.table.word(id).store(Word::FREE.0, Release);
                self.release_location(allocator, word.location(), &mut reclaimed);
                self.table.free.insert(id);
                freed += 1;
            }
            self.show_costs(allocator);
        }
        self.counters.dead.fetch_sub(freed as u64, Relaxed);
        self.give_back(reclaimed);
        freed
    }

    /// Counts bytes that now lie at `location`.
    pub(crate) fn account(&self, location: Location) {
        let payload = match location.tier {
            Tier::Dram => &self.counters.dram_payload,
            Tier::File => &self.counters.file_payload,
        };
        payload.fetch_add(location.len as u64, Relaxed);
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
        if location.codec == Codec::Staged {
            self.counters.staged_objects.fetch_sub(1, Relaxed);
        }
        if location.tier == Tier::Dram && location.codec == Codec::Lz4 {
            self.counters.fast_objects.fetch_sub(1, Relaxed);
            self.counters.fast_payload.fetch_sub(location.len as u64, Relaxed);
        }
    }

    fn release_location(
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
    pub(crate) fn give_back(&self, reclaimed: Reclaimed) {
        use crate::segments::SEGMENT_BYTES;
        use crate::slabs::SLAB_BYTES;
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
        let references = counters.references.load(Relaxed);
        let fill_pages = counters.fill_pages.load(Relaxed);
        let objects = counters.objects.load(Relaxed);
        let stored_pages = references + fill_pages;
        StoreStats {
            stored_pages,
            stored_bytes: stored_pages * PAGE_SIZE as u64,
            objects,
            deduplicated_pages: references.saturating_sub(objects),
            fill_pages,
            dram_bytes: counters.dram_bytes.load(Relaxed),
            payload_bytes: counters.dram_payload.load(Relaxed),
            staged_bytes: counters.staged_objects.load(Relaxed) * PAGE_SIZE as u64,
            fast_original_bytes: counters.fast_objects.load(Relaxed) * PAGE_SIZE as u64,
            fast_payload_bytes: counters.fast_payload.load(Relaxed),
            file_bytes: counters.file_bytes.load(Relaxed),
            file_payload_bytes: counters.file_payload.load(Relaxed),
            // The table's own file says what it costs, to the page.
            metadata_bytes: self.table.memory().allocated_bytes().unwrap_or(0)
                + counters.bookkeeping_bytes.load(Relaxed)
                + size_of::<Self>() as u64,
            tier_errors: counters.tier_errors.load(Relaxed),
            corrupt_objects: counters.corrupt_objects.load(Relaxed),
        }
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl From<io::Error> for InsertError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// What a handle names.
pub(crate) enum Target {
    /// A page of one value.
    Fill(u32),
    /// An object.
    Object(u32),
}

impl Target {
    pub(crate) fn of(handle: Handle) -> Self {
        if handle.0 & FILL_HANDLE != 0 {
            Self::Fill(handle.0 as u32)
        } else {
            // Out-of-range ids are refused by the table.
            Self::Object(u32::try_from(handle.0).unwrap_or(u32::MAX))
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

pub(crate) fn check_file_limit(limit_bytes: u64) -> Result<(), StoreError> {
    let (min_bytes, max_bytes) = (MIN_FILE_BYTES, TIER_SPAN_BYTES);
    if (min_bytes..=max_bytes).contains(&limit_bytes) {
        Ok(())
    } else {
        Err(StoreError::FileLimit { limit_bytes, min_bytes, max_bytes })
    }
}

pub(crate) fn create_file(config: &FileConfig) -> Result<Box<dyn Backing>, StoreError> {
    check_file_limit(config.limit_bytes)?;
    let file = FileBacking::create(&config.path, config.limit_bytes)
        .map_err(|source| StoreError::File { path: config.path.clone(), source })?;
    Ok(Box::new(file))
}

/// Makes what this thread needs to read pages of every kind, so that later
/// reads allocate nothing. Threads that serve faults call it once.
pub fn prepare_thread() {
    with_scratch(|scratch| {
        scratch.prepare();
    });
}

const _: () = assert!(UNIT_BYTES.is_multiple_of(8));
