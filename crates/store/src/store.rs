//! The store itself: making one, and putting pages in.
//!
//! Getting them back is in `get`, counting and freeing in `references`, what is
//! occupied in `space`, background work in `maintain`, dictionaries in `train`,
//! taking over from a dead worker in `recover`.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard};

use strata_units::{Handle, PAGE_SIZE};

use crate::backing::{self, Backing, FileBacking, MemoryBacking};
use crate::codec::{self, Digest, Page, with_scratch};
use crate::config::{
    BorrowedDescriptors, Descriptors, FileConfig, Put, PutError, StoreConfig, StoreError,
};
use crate::dictionary::Dictionaries;
use crate::location::{Codec, TIER_SPAN_BYTES, Tier, UNIT_BYTES, Word};
use crate::maintain::Maintenance;
use crate::own_backing::OwnBacking;
use crate::page_files::{self, PageFiles};
use crate::read::Reuses;
use crate::segments::{MIN_FILE_BYTES, Segments};
use crate::slabs::Slabs;
use crate::space::{Allocator, Counters};
use crate::table::{IndexSize, Table};
use crate::train::Schedule;

/// Address space for a tenant's data in DRAM, at most. Costs nothing; bounded so that
/// many hundreds of tenants fit into a process.
pub(crate) const DATA_SPAN_BYTES: u64 = 128 << 30;
/// ...and no more than this many times the machine's memory: what lies in it at a time
/// is less than that once, and holes are given back where they are.
const MACHINES: u64 = 4;
const LEAST_SPAN_BYTES: u64 = 16 << 30;
const _: () = assert!(DATA_SPAN_BYTES <= TIER_SPAN_BYTES);

/// Marks a handle whose low 32 bits are the page.
pub(crate) const FILL_HANDLE: u64 = 1 << (Handle::BITS - 1);
/// Marks a handle of a page in a page file.
pub(crate) const PAGE_FILE_HANDLE: u64 = 1 << (Handle::BITS - 2);
/// Objects of equal hash that a put compares with. The second is there by an
/// accident of 32 bits or by the tenant's design.
const MAX_CANDIDATES: usize = 4;
/// Dead objects that a put frees on its way: more than it makes, so that they
/// do not pile up without maintenance.
const REAP_PER_PUT: usize = 32;

/// Pages by content. See the crate's documentation for what it promises.
pub struct Store {
    pub(crate) table: Table,
    pub(crate) data: Box<dyn Backing>,
    /// Shared with threads that read it while nobody waits for them.
    pub(crate) file: Option<Arc<dyn Backing>>,
    pub(crate) reuses: Reuses,
    pub(crate) allocator: Mutex<Allocator>,
    pub(crate) maintenance: Mutex<Maintenance>,
    /// References beyond what an object's word can count.
    pub(crate) overflow: Mutex<HashMap<u32, u64>>,
    /// Most DRAM for data, staged pages apart; `u64::MAX`: no limit.
    pub(crate) compressed_limit: AtomicU64,
    pub(crate) counters: Counters,
    pub(crate) dictionaries: Dictionaries,
    pub(crate) schedule: Schedule,
    pub(crate) page_files: PageFiles,
    pub(crate) last_tier_error: Mutex<Option<String>>,
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

/// What is reserved for the data of a tenant of this machine.
fn data_span_bytes() -> u64 {
    let machine = strata_sys::total_bytes().unwrap_or(u64::MAX);
    let span = machine.saturating_mul(MACHINES).clamp(LEAST_SPAN_BYTES, DATA_SPAN_BYTES);
    span.next_multiple_of(1 << 30).min(DATA_SPAN_BYTES)
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
        let data = MemoryBacking::create(name, data_span_bytes())
            .map_err(|source| StoreError::Memory { name, source })?;
        Self::create_on(config.compressed_limit, Box::new(data), file)
    }

    /// Makes an empty store that ends with this process, and whose memory goes back to
    /// the kernel at once when it is dropped: in huge pages, where there are such.
    ///
    /// # Errors
    /// When the memory files cannot be made.
    pub fn create_own(compressed_limit: Option<u64>) -> Result<Self, StoreError> {
        match OwnBacking::create(data_span_bytes()) {
            Ok(data) => Self::create_on(compressed_limit, Box::new(data), None),
            // No huge pages, or no address space for what is no file.
            Err(_) => Self::create(StoreConfig { compressed_limit, file: None }),
        }
    }

    /// What the data in DRAM really costs: whole huge pages, where it is in such.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        let counted = self.counters.dram_bytes.load(Relaxed);
        self.data.held_bytes().map_or(counted, |held| held.max(counted))
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
        let dictionaries = Dictionaries::load(table.dictionaries());
        Self {
            table,
            data,
            file: file.map(Arc::from),
            reuses: Reuses::default(),
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
            dictionaries,
            schedule: Schedule::default(),
            page_files: PageFiles::default(),
            last_tier_error: Mutex::default(),
        }
    }

    /// What must be kept open for [`Store::recover`].
    ///
    /// # Panics
    /// When it was made to end with this process.
    #[must_use]
    pub fn descriptors(&self) -> BorrowedDescriptors<'_> {
        Descriptors {
            table: self.table.memory().as_fd(),
            data: self.data.descriptor().expect("it is to be taken over"),
            file: self.file.as_ref().and_then(|file| file.descriptor()),
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
        let hash = Digest::of(page, self.table.seed()).hash();
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

    /// Keeps a page in DRAM that is in the tier file under `handle`, and nowhere
    /// else: as a new object, so that it is the youngest. The caller owns one
    /// reference to the result and still the one to `handle`, whose content `page`
    /// is. None: it is not so, or there is no room.
    pub fn promote(&self, handle: Handle, page: &Page) -> Option<Handle> {
        let Target::Object(id) = Target::of(handle) else { return None };
        let word = Word(self.table.word(id).load(Acquire));
        let hash = Digest::of(page, self.table.seed()).hash();
        let alone = word.references() == 1 && !word.overflows();
        if word.location().tier != Tier::File || !alone || hash != self.table.hash(id).load(Relaxed)
        {
            return None;
        }
        let id = self.insert(page, hash, Put::Fast, false).ok()?;
        self.counters.references.fetch_add(1, Relaxed);
        Some(Handle(u64::from(id)))
    }

    /// Makes an object. `relieved`: room has been made, DRAM may grow.
    fn insert(&self, page: &Page, hash: u32, how: Put, relieved: bool) -> Result<u32, InsertError> {
        let growth = relieved || self.compressed_bytes() < self.compressed_limit.load(Relaxed);
        let encoder = if how == Put::Staged { None } else { self.dictionaries.current() };
        let encoder = encoder.as_deref();
        with_scratch(|scratch| {
            let packed = match how {
                Put::Staged => None,
                Put::Fast => scratch.pack_fast(encoder, page),
                Put::Zstd => scratch.pack_dense(encoder, page).map(|len| (Codec::Zstd, len)),
            };
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
                    // What a dictionary was tried on has been tried.
                    if how == Put::Fast && encoder.is_none() {
                        self.table.repackable.insert(id);
                    }
                }
            }
            drop(allocator);
            self.counters.objects.fetch_add(1, Relaxed);
            self.schedule.count_put();
            if encoder.is_some() {
                self.schedule.note_landing(location.class().slot_bytes());
            }
            debug_assert_eq!(location.len, len);
            Ok(id)
        })
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
    /// A page of a page file.
    InFile { file: u16, page: u32 },
}

impl Target {
    pub(crate) fn of(handle: Handle) -> Self {
        if handle.0 & FILL_HANDLE != 0 {
            Self::Fill(handle.0 as u32)
        } else if handle.0 & PAGE_FILE_HANDLE != 0 {
            let (file, page) = page_files::named(handle);
            Self::InFile { file, page }
        } else {
            // Out-of-range ids are refused by the table.
            Self::Object(u32::try_from(handle.0).unwrap_or(u32::MAX))
        }
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
    Ok(backing::best(file))
}

const _: () = assert!(UNIT_BYTES.is_multiple_of(8));
