//! Taking over from a worker that is dead, wherever it died.
//!
//! The object table says where every page is; the page map says which pages
//! still matter. Everything else (counts, free space, index, sets) is made anew
//! from the two. The argument why each instant is recoverable is in
//! docs/store-format.md.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;

use strata_sys::SharedMemory;
use strata_units::Handle;

use crate::backing::{self, Backing, FileBacking, MemoryBacking};
use crate::config::{Descriptors, RecoverError, StoreConfig, StoreError};
use crate::location::{Codec, Tier, Word};
use crate::page_files::PageFile;
use crate::segments::SEGMENT_BYTES;
use crate::store::{Store, Target, check_file_limit, create_file};
use crate::table::{IndexSize, Table};

/// A dead worker's store, not in service yet: tell it every handle that the
/// page map holds ([`Recovery::reference`], once per occurrence), then
/// [`Recovery::finish`]. If this process dies meanwhile, nothing is lost: the
/// next one begins again.
#[derive(Debug)]
pub struct Recovery {
    store: Store,
}

impl Store {
    /// Takes over the store that a dead worker left in `descriptors`. Dead means
    /// waited for: until then one of its threads may still be inside a write.
    /// Of `config.file` only the limit counts where the file exists already;
    /// without it the file is read but does not grow.
    ///
    /// # Errors
    /// When they are not a store of this version, or the table's header is
    /// damaged.
    pub fn recover(descriptors: Descriptors, config: StoreConfig) -> Result<Recovery, StoreError> {
        let attach_error = |name| move |source| StoreError::Attach { name, source };
        let data = MemoryBacking::attach(descriptors.data).map_err(attach_error("data"))?;
        let file: Option<Box<dyn Backing>> = match (descriptors.file, &config.file) {
            (Some(descriptor), configured) => {
                let file = File::from(descriptor);
                let len = file.metadata().map_err(attach_error("tier file"))?.len();
                // What lies behind a limit that was lowered meanwhile is still
                // somebody's.
                let used = len.next_multiple_of(SEGMENT_BYTES);
                let limit = configured.as_ref().map_or(0, |file| file.limit_bytes);
                if limit > 0 {
                    check_file_limit(limit)?;
                }
                Some(backing::best(FileBacking::attach(file.into(), limit.max(used))))
            }
            (None, Some(configured)) => Some(create_file(configured)?),
            (None, None) => None,
        };
        Self::recover_on(descriptors.table, config.compressed_limit, Box::new(data), file)
    }

    /// The same on given tiers: for tests with faults.
    ///
    /// # Errors
    /// When `table` is not an object table of this version, or its header is
    /// damaged.
    pub fn recover_on(
        table: OwnedFd,
        compressed_limit: Option<u64>,
        data: Box<dyn Backing>,
        file: Option<Box<dyn Backing>>,
    ) -> Result<Recovery, StoreError> {
        let table = SharedMemory::from_fd(table)
            .and_then(Table::attach)
            .map_err(|source| StoreError::Attach { name: "object table", source })?;
        for id in 1..table.high() {
            let word = table.word(id);
            word.store(Word(word.load(Relaxed)).unreferenced().0, Relaxed);
        }
        Ok(Recovery { store: Self::assemble(table, compressed_limit, data, file) })
    }
}

impl Recovery {
    /// A page file that the dead worker had, before any of its pages is referred to. Of
    /// one whose `pages` are not known any more each page is lost when it is asked for.
    ///
    /// # Errors
    /// There is no such number.
    pub fn page_file(
        &mut self,
        number: u16,
        pages: Option<Box<dyn PageFile>>,
        backing: Box<dyn Backing>,
        record: Box<dyn Any + Send + Sync>,
    ) -> io::Result<()> {
        self.store.page_files.recover(number, pages, backing, record)
    }

    /// One occurrence of `handle` in the page map.
    ///
    /// # Errors
    /// When the handle names nothing that can be read. That page is lost; after
    /// a mere death of the worker it does not happen.
    pub fn reference(&mut self, handle: Handle) -> Result<(), RecoverError> {
        let store = &mut self.store;
        let id = match Target::of(handle) {
            Target::Fill(_) => {
                store.counters.fill_pages.fetch_add(1, Relaxed);
                return Ok(());
            }
            Target::InFile { file, .. } => {
                if !store.page_files.retain(file, 1) {
                    return Err(RecoverError::Unknown);
                }
                store.counters.filed_pages.fetch_add(1, Relaxed);
                return Ok(());
            }
            Target::Object(id) => id,
        };
        if id == 0 || id >= store.table.high() {
            return Err(RecoverError::Unknown);
        }
        if !store.try_reference(id) {
            let word = Word(store.table.word(id).load(Relaxed));
            if word.location_bits() == 0 {
                return Err(RecoverError::Unknown);
            }
            let location = word.location();
            let allocator = store.allocator.get_mut().expect("no thread of the store has panicked");
            let claimed = location.is_consistent()
                && match (location.tier, &mut allocator.segments) {
                    (Tier::Dram, _) => allocator.slabs.claim(location.unit, location.class()),
                    (Tier::File, Some(segments)) => segments.claim(location.offset(), location.len),
                    (Tier::File, None) => false,
                };
            if !claimed {
                return Err(RecoverError::Damaged);
            }
            store.table.word(id).store(Word::new(location, 1).0, Relaxed);
            store.account(location);
            store.counters.objects.fetch_add(1, Relaxed);
        }
        store.counters.references.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Frees everything that was not referenced; the store is in service.
    #[must_use]
    pub fn finish(self) -> Store {
        let mut store = self.store;
        store.page_files.finish();
        let allocator = store.allocator.get_mut().expect("no thread of the store has panicked");
        let table = &store.table;
        let objects = store.counters.objects.load(Relaxed) as u32;
        let has_dictionary = store.dictionaries.has_current();
        store.schedule.resume(u64::from(objects), has_dictionary);
        allocator.index = IndexSize::for_objects(objects);
        let high = table.high();
        for id in 1..high {
            let word = Word(table.word(id).load(Relaxed));
            if word.references() == 0 {
                table.word(id).store(Word::FREE.0, Relaxed);
                table.free.insert(id);
                continue;
            }
            table.link_in(&mut allocator.index, id);
            let location = word.location();
            if location.codec == Codec::Staged {
                table.staged.insert(id);
            } else if location.tier == Tier::Dram {
                table.demotable.insert(id);
                // Which dictionary a frame was packed with is looked at later.
                if location.codec != Codec::Zstd || has_dictionary {
                    table.repackable.insert(id);
                }
            }
        }
        allocator.newest = high - 1;
        let (data, file) = (&store.data, &store.file);
        // Failing to give memory back costs memory, not data.
        allocator.slabs.finish_claims(|offset, len| {
            let _ = data.punch(offset, len);
        });
        let end = allocator.slabs.end_bytes();
        let _ = data.punch(end, data.capacity_bytes() - end);
        if let (Some(segments), Some(file)) = (&mut allocator.segments, file) {
            segments.finish_claims(|segment| {
                let _ = file.punch(u64::from(segment) * SEGMENT_BYTES, SEGMENT_BYTES);
            });
            let end = segments.end_bytes();
            let _ = file.punch(end, file.capacity_bytes().saturating_sub(end));
        }
        let allocator = store.allocator.lock().expect("no thread of the store has panicked");
        store.show_costs(&allocator);
        drop(allocator);
        store
    }
}
