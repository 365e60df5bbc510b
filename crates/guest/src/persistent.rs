//! A persistent pool: the pages of one guest's swap disk, in memory. It is an image, which a
//! [`Disk`](crate::Disk) serves: what was written is read, or nobody is told that it was
//! written; nothing is ever dropped.
//!
//! The pages are in a [`Store`], compressed and each content once; a page of zeroes is
//! nowhere. Which page has which handle is in a memory file, eight bytes a page. It is the
//! truth: as the store's own memory it outlives the process that works on it, and the next
//! one finds every page that was answered for ([`Persistent::recover`]). So a page that is
//! written is in the store before the map names it, and what it was before leaves the map
//! before it leaves the store.
//!
//! Not here: who may read or write which page now. A disk has pages held.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, PoisonError, RwLock};

use strata_store::{Descriptors, Put, PutError, Store, StoreConfig, StoreError};
use strata_sys::{Allocation, FileStamp, SharedMemory};
use strata_units::{Handle, PAGE_SIZE, PageBuffer};

use crate::disk::Image;

const PAGE: u64 = PAGE_SIZE as u64;
/// What the map says of a page of zeroes...
const NOTHING: u64 = 0;
/// ...of one that is unreadable for good...
const LOST: u64 = u64::MAX;
/// ...and of every other: its handle, and this, as a handle may be 0.
const STORED: u64 = 1 << Handle::BITS;
/// Bytes of an entry, and how many of them are in a page of the map.
const ENTRY_BYTES: u64 = 8;
const ENTRIES: u64 = PAGE / ENTRY_BYTES;
/// Entries that are looked at to say how far a hole reaches.
const ALLOCATION_PAGES: u64 = 1 << 16;
/// What is compacted and packed tighter each time that it is tended.
const COMPACTED_BYTES: u64 = 8 << 20;
const REPACKED_PAGES: usize = 512;

type Page = [u8; PAGE_SIZE];

/// What it is kept in. Whoever holds these holds the pages.
#[derive(Debug)]
pub struct SwapFiles {
    table: OwnedFd,
    data: OwnedFd,
    map: OwnedFd,
}

impl SwapFiles {
    /// The same once more.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            table: self.table.try_clone()?,
            data: self.data.try_clone()?,
            map: self.map.try_clone()?,
        })
    }
}

/// A swap disk in numbers. Sums are since its process began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapFigures {
    /// Its size, which is the most that it holds.
    pub size_bytes: u64,
    /// What it costs.
    pub cost_bytes: u64,
    /// Pages in it that are not zero.
    pub pages: u64,
    /// Part of them that is another one's content.
    pub deduplicated_pages: u64,
    /// Part of them that is one value throughout.
    pub fill_pages: u64,
    /// Pages that were read.
    pub gets: u64,
    /// Pages that were written.
    pub puts: u64,
    /// Those for which there was no room: the guest was told.
    pub refused: u64,
    /// Pages that the guest gave up, or wrote as zeroes.
    pub discarded: u64,
    /// Pages whose checksum was wrong: the guest was told.
    pub corrupt: u64,
}

#[derive(Debug, Default)]
struct Counters {
    pages: AtomicU64,
    gets: AtomicU64,
    puts: AtomicU64,
    refused: AtomicU64,
    discarded: AtomicU64,
    corrupt: AtomicU64,
}

/// See the module's text.
pub struct Persistent {
    store: Store,
    map: SharedMemory,
    /// Which pages of the map somebody has written to: to read one makes it.
    touched: Box<[AtomicBool]>,
    size_bytes: u64,
    /// Whether the machine has memory for more.
    has_room: Box<dyn Fn() -> bool + Send + Sync>,
    counters: Counters,
    /// Held while a page takes another's place, by one alone while a moment is taken.
    changing: RwLock<()>,
}

/// The pages of one moment. Dropped, it lets go of them.
pub(crate) struct Moment {
    disk: Arc<Persistent>,
    /// Which pages there are, and what the map said of them.
    indexes: Vec<u32>,
    entries: Vec<u64>,
}

impl Moment {
    /// Positions of them, in the order of the disk.
    pub(crate) fn pages(&self) -> Range<usize> {
        0..self.indexes.len()
    }

    /// Which page of the disk that one is.
    pub(crate) fn number(&self, position: usize) -> u64 {
        self.indexes[position].into()
    }

    pub(crate) fn get(&self, position: usize, out: &mut Page) -> io::Result<()> {
        let entry = self.entries[position];
        let read = entry != LOST && self.disk.store.get(handle_of(entry), out).is_ok();
        if read { Ok(()) } else { Err(corrupt(self.number(position))) }
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        for &entry in self.entries.iter().filter(|&&entry| entry != LOST) {
            self.disk.store.release(handle_of(entry));
        }
        self.disk.store.reap();
    }
}

impl std::fmt::Debug for Persistent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Persistent").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

fn entry_of(handle: Handle) -> u64 {
    debug_assert!(handle.0 < STORED);
    STORED | handle.0
}

fn handle_of(entry: u64) -> Handle {
    Handle(entry & (STORED - 1))
}

fn map_bytes(size_bytes: u64) -> u64 {
    (size_bytes / PAGE * ENTRY_BYTES).next_multiple_of(PAGE)
}

fn corrupt(index: u64) -> io::Error {
    io::Error::other(format!("page {index} is not what was written"))
}

impl Persistent {
    /// What an empty one of that size, in whole pages, is kept in.
    ///
    /// # Errors
    /// There is no memory, or there are no descriptors left.
    pub fn create(size_bytes: u64) -> Result<SwapFiles, StoreError> {
        let memory = |source| StoreError::Memory { name: "strata-swap", source };
        let store = Store::create(StoreConfig::default())?;
        let map = SharedMemory::create("strata-swap", map_bytes(size_bytes)).map_err(memory)?;
        let files = store.descriptors();
        let own = |file: std::os::fd::BorrowedFd<'_>| file.try_clone_to_owned().map_err(memory);
        Ok(SwapFiles { table: own(files.table)?, data: own(files.data)?, map: own(map.as_fd())? })
    }

    /// Takes over what nobody works on any more. `limit_bytes`: the most that its data may
    /// cost, if there is a limit; `has_room`: whether the machine has memory for more.
    ///
    /// # Errors
    /// The files are not what [`Self::create`] made.
    pub fn recover(
        files: SwapFiles,
        size_bytes: u64,
        limit_bytes: Option<u64>,
        has_room: Box<dyn Fn() -> bool + Send + Sync>,
    ) -> Result<Self, StoreError> {
        let attach = |source| StoreError::Attach { name: "map of pages", source };
        let map = SharedMemory::from_fd(files.map).map_err(attach)?;
        if map.len_bytes() != map_bytes(size_bytes) || !size_bytes.is_multiple_of(PAGE) {
            return Err(attach(io::ErrorKind::InvalidInput.into()));
        }
        let descriptors = Descriptors { table: files.table, data: files.data, file: None };
        let config = StoreConfig { compressed_limit: limit_bytes, file: None };
        let mut recovery = Store::recover(descriptors, config)?;
        let counters = Counters::default();
        let touched: Box<[_]> =
            (0..map.len_bytes() / PAGE).map(|_| AtomicBool::new(false)).collect();
        let mut at = 0;
        while let Some(written) = map.written(at).map_err(attach)? {
            at = written.end;
            for page in written.start / PAGE..written.end.div_ceil(PAGE) {
                touched[page as usize].store(true, Relaxed);
            }
            for offset in written.step_by(ENTRY_BYTES as usize) {
                let entry = map.atomic_u64(offset);
                let value = entry.load(Acquire);
                if value == NOTHING {
                    continue;
                }
                counters.pages.fetch_add(1, Relaxed);
                if value != LOST && recovery.reference(handle_of(value)).is_err() {
                    // Zeroes would be a wrong page.
                    entry.store(LOST, Release);
                }
            }
        }
        let (store, changing) = (recovery.finish(), RwLock::default());
        Ok(Self { store, map, touched, size_bytes, has_room, counters, changing })
    }

    /// What the map says of a page.
    fn value(&self, index: u64) -> u64 {
        if self.touched[(index / ENTRIES) as usize].load(Acquire) {
            self.map.atomic_u64(index * ENTRY_BYTES).load(Acquire)
        } else {
            NOTHING
        }
    }

    /// Copies a page out.
    ///
    /// # Errors
    /// It is not what was written, and is not handed out.
    pub fn get(&self, index: u64, out: &mut Page) -> io::Result<()> {
        self.counters.gets.fetch_add(1, Relaxed);
        let read = match self.value(index) {
            NOTHING => {
                out.fill(0);
                return Ok(());
            }
            LOST => Err(()),
            entry => self.store.get(handle_of(entry), out).map(drop).map_err(drop),
        };
        read.map_err(|()| {
            self.counters.corrupt.fetch_add(1, Relaxed);
            corrupt(index)
        })
    }

    /// Takes a page.
    ///
    /// # Errors
    /// There is no room for it ([`io::ErrorKind::StorageFull`]); what was there before is
    /// there still.
    pub fn put(&self, index: u64, page: &Page) -> io::Result<()> {
        if page.iter().all(|&byte| byte == 0) {
            self.discard(index..index + 1);
            return Ok(());
        }
        let full = || {
            self.counters.refused.fetch_add(1, Relaxed);
            io::Error::new(io::ErrorKind::StorageFull, "there is no memory left for it")
        };
        if !(self.has_room)() {
            return Err(full());
        }
        let handle = match self.store.put(page, Put::Fast) {
            Ok(handle) => handle,
            Err(PutError::Full) => return Err(full()),
            Err(PutError::Io(error)) => return Err(error),
        };
        self.replace(index, entry_of(handle));
        self.counters.puts.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Names another page, and gives up the one that was there; whether there was one.
    fn replace(&self, index: u64, entry: u64) -> bool {
        let _changing = self.changing.read().unwrap_or_else(PoisonError::into_inner);
        self.touched[(index / ENTRIES) as usize].store(true, Release);
        let before = self.map.atomic_u64(index * ENTRY_BYTES).swap(entry, AcqRel);
        match (before == NOTHING, entry == NOTHING) {
            (true, false) => drop(self.counters.pages.fetch_add(1, Relaxed)),
            (false, true) => drop(self.counters.pages.fetch_sub(1, Relaxed)),
            _ => {}
        }
        if before != NOTHING && before != LOST {
            self.store.release(handle_of(before));
        }
        before != NOTHING
    }

    /// The pages of now: a reference to each.
    pub(crate) fn freeze(self: &Arc<Self>) -> Moment {
        let (mut indexes, mut entries) = (Vec::new(), Vec::new());
        let alone = self.changing.write().unwrap_or_else(PoisonError::into_inner);
        for (page, touched) in self.touched.iter().enumerate() {
            if !touched.load(Acquire) {
                continue;
            }
            let first = page as u64 * ENTRIES;
            for index in first..(first + ENTRIES).min(self.size_bytes / PAGE) {
                let entry = self.map.atomic_u64(index * ENTRY_BYTES).load(Acquire);
                if entry != NOTHING {
                    indexes.push(index as u32);
                    entries.push(entry);
                }
            }
        }
        let handles: Vec<_> =
            entries.iter().filter(|&&entry| entry != LOST).map(|&entry| handle_of(entry)).collect();
        self.store.retain_all(&handles);
        drop(alone);
        Moment { disk: Arc::clone(self), indexes, entries }
    }

    /// Has pages be zero, which costs nothing.
    pub fn discard(&self, pages: Range<u64>) {
        let gone =
            pages.filter(|&index| self.value(index) != NOTHING && self.replace(index, NOTHING));
        let gone = gone.count() as u64;
        self.counters.discarded.fetch_add(gone, Relaxed);
        if gone > 1 {
            self.store.reap();
        }
    }

    /// Gives memory back that is of no use, and packs tighter what is: now and then.
    pub fn tend(&self) {
        self.store.reap();
        self.store.repack(REPACKED_PAGES);
        self.store.compact(COMPACTED_BYTES);
    }

    /// It in numbers.
    #[must_use]
    pub fn figures(&self) -> SwapFigures {
        let stats = self.store.stats();
        let map_bytes = self.map.allocated_bytes().unwrap_or(0);
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        let counters = &self.counters;
        SwapFigures {
            size_bytes: self.size_bytes,
            cost_bytes: stats.dram_bytes + stats.metadata_bytes + map_bytes,
            pages: of(&counters.pages),
            deduplicated_pages: stats.deduplicated_pages,
            fill_pages: stats.fill_pages,
            gets: of(&counters.gets),
            puts: of(&counters.puts),
            refused: of(&counters.refused),
            discarded: of(&counters.discarded),
            corrupt: of(&counters.corrupt),
        }
    }

    /// Writes what Linux knows a swap disk by, as `mkswap` does, with the label
    /// `strata-swap`, so that a guest need only switch it on.
    ///
    /// # Errors
    /// There is no room.
    pub fn format(&self) -> io::Result<()> {
        self.put(0, &header(self.size_bytes))
    }
}

/// The first page of a swap disk (the kernel's include/linux/swap.h, `union swap_header`),
/// for guests whose pages have 4 KiB and whose numbers are little-endian.
fn header(size_bytes: u64) -> Page {
    const VERSION: u32 = 1;
    const LABEL: &[u8] = b"strata-swap";
    let mut page = [0; PAGE_SIZE];
    // It counts pages in 32 bits; what is behind them is not used.
    let last = u32::try_from(size_bytes / PAGE - 1).unwrap_or(u32::MAX);
    page[1024..1028].copy_from_slice(&VERSION.to_le_bytes());
    page[1028..1032].copy_from_slice(&last.to_le_bytes());
    page[1052..1052 + LABEL.len()].copy_from_slice(LABEL);
    page[PAGE_SIZE - 10..].copy_from_slice(b"SWAPSPACE2");
    page
}

impl Image for Persistent {
    fn waits(&self) -> bool {
        false
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_pages(&self, offset: u64, pages: &mut [PageBuffer]) -> io::Result<()> {
        (offset / PAGE..).zip(pages).try_for_each(|(index, page)| self.get(index, &mut page.0))
    }

    fn write_pages(&self, offset: u64, pages: &[PageBuffer]) -> io::Result<()> {
        (offset / PAGE..).zip(pages).try_for_each(|(index, page)| self.put(index, &page.0))
    }

    /// What was answered is in memory files, which outlive this process.
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero_pages(&self, offset: u64, bytes: u64, _: bool) -> io::Result<bool> {
        self.discard(offset / PAGE..(offset + bytes) / PAGE);
        Ok(true)
    }

    fn allocation(&self, offset: u64) -> Allocation {
        let first = offset / PAGE;
        let end = (first + ALLOCATION_PAGES).min(self.size_bytes / PAGE);
        let is_hole = |index| self.value(index) == NOTHING;
        let hole = is_hole(first);
        let until = (first + 1..end).find(|&index| is_hole(index) != hole).unwrap_or(end);
        Allocation { hole, end: until * PAGE }
    }

    fn stamp(&self) -> io::Result<Option<FileStamp>> {
        Ok(None)
    }
}

/// So that a disk can have it, and others see its figures.
impl Image for Arc<Persistent> {
    fn waits(&self) -> bool {
        (**self).waits()
    }

    fn size_bytes(&self) -> u64 {
        (**self).size_bytes()
    }

    fn read_pages(&self, offset: u64, pages: &mut [PageBuffer]) -> io::Result<()> {
        (**self).read_pages(offset, pages)
    }

    fn write_pages(&self, offset: u64, pages: &[PageBuffer]) -> io::Result<()> {
        (**self).write_pages(offset, pages)
    }

    fn sync(&self) -> io::Result<()> {
        (**self).sync()
    }

    fn zero_pages(&self, offset: u64, bytes: u64, keep_room: bool) -> io::Result<bool> {
        (**self).zero_pages(offset, bytes, keep_room)
    }

    fn allocation(&self, offset: u64) -> Allocation {
        (**self).allocation(offset)
    }

    fn stamp(&self) -> io::Result<Option<FileStamp>> {
        Ok(None)
    }
}

#[cfg(test)]
#[path = "persistent_tests.rs"]
mod tests;
