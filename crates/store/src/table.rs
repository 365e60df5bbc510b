//! The object table: one 16-byte entry per object, the dedup index over them,
//! the sets of ids and the dictionaries, all in one sparse memory file.
//!
//! Entries are the truth and survive the worker, as do the dictionaries (see
//! `dictionary`). The index and the sets are
//! derived from them and wiped by recovery. The byte layout is described in
//! docs/store-format.md.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use strata_sys::SharedMemory;

use crate::dictionary::{REGION_BYTES, Region};
use crate::id_set::{self, IdSet, SetName};

/// Ids that a table can hold: 512 GiB of distinct pages. Id 0 is nobody.
pub(crate) const MAX_OBJECTS: u64 = 1 << 27;

const MAGIC: u64 = 0x5354_5241_5441_0b02;
const HEADER_BYTES: u64 = 4096;
const HIGH_OFFSET: u64 = 8;
const SEED_OFFSET: u64 = 16;
const ENTRY_BYTES: u64 = 16;
const ENTRIES: u64 = HEADER_BYTES;
const HEADS: u64 = ENTRIES + MAX_OBJECTS * ENTRY_BYTES;
const SETS: u64 = HEADS + MAX_OBJECTS * 4;
const DICTIONARIES: u64 = SETS + id_set::span_bytes(MAX_OBJECTS);
/// Length of the memory file.
const TABLE_BYTES: u64 = DICTIONARIES + REGION_BYTES;

/// Buckets of an empty index: one page of them.
const MIN_BUCKETS: u32 = 1024;
const NOBODY: u32 = 0;

/// The object table.
pub(crate) struct Table {
    memory: Arc<SharedMemory>,
    seed: u64,
    pub(crate) dead: IdSet,
    pub(crate) free: IdSet,
    pub(crate) staged: IdSet,
    pub(crate) repackable: IdSet,
    pub(crate) demotable: IdSet,
    occupied: Occupied,
}

/// What the memory file occupied when the kernel was asked last.
#[derive(Default)]
struct Occupied {
    bytes: AtomicU64,
    /// Which entries and dictionaries there were then.
    of: AtomicU64,
    answers: AtomicU32,
}

/// It occupies a page more for 256 entries; it is asked once for so many.
const ASKED_PER_ENTRIES: u32 = 64;
/// What else changes is a page of a set now and then: it is asked once in so many times.
const ASKED_IN: u32 = 64;

/// How far the dedup index has grown; changed under the allocation lock.
pub(crate) struct IndexSize {
    buckets: u32,
    linked: u32,
}

impl Table {
    pub(crate) fn create() -> io::Result<Self> {
        let memory = SharedMemory::create("strata-objects", TABLE_BYTES)?;
        memory.atomic_u64(HIGH_OFFSET).store(1, Relaxed);
        memory.atomic_u64(SEED_OFFSET).store(random_seed(), Relaxed);
        memory.atomic_u64(0).store(MAGIC, Release);
        Ok(Self::over(memory))
    }

    /// Takes over a dead worker's table, derived parts wiped.
    pub(crate) fn attach(memory: SharedMemory) -> io::Result<Self> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        if memory.len_bytes() != TABLE_BYTES || memory.atomic_u64(0).load(Acquire) != MAGIC {
            return Err(invalid("the memory file is not an object table of this version"));
        }
        memory.punch(HEADS, DICTIONARIES - HEADS)?;
        let high = memory.atomic_u64(HIGH_OFFSET).load(Acquire);
        // The end is raised before the new entry's page is touched, hence the
        // page of grace; without the check a damaged end could make recovery
        // touch the whole span. (Dictionaries are backed too: a little more grace.)
        let backed = memory.allocated_bytes()? / ENTRY_BYTES;
        if high == 0 || high > MAX_OBJECTS || high > backed + 4096 / ENTRY_BYTES {
            return Err(invalid("the object table's end is damaged"));
        }
        Ok(Self::over(memory))
    }

    fn over(memory: SharedMemory) -> Self {
        let memory = Arc::new(memory);
        let set = |name| IdSet::new(Arc::clone(&memory), SETS, MAX_OBJECTS, name);
        Self {
            dead: set(SetName::Dead),
            free: set(SetName::Free),
            staged: set(SetName::Staged),
            repackable: set(SetName::Repackable),
            demotable: set(SetName::Demotable),
            seed: memory.atomic_u64(SEED_OFFSET).load(Relaxed),
            occupied: Occupied::default(),
            memory,
        }
    }

    /// What its memory file occupies, with what is there of `dictionary_bytes`: right to some
    /// pages, for those who ask hundreds of times a second.
    pub(crate) fn occupied_bytes(&self, dictionary_bytes: u64) -> u64 {
        let known = &self.occupied;
        let of = dictionary_bytes << 32 | u64::from(self.high() / ASKED_PER_ENTRIES + 1);
        let answers = known.answers.fetch_add(1, Relaxed);
        if known.of.swap(of, Relaxed) != of || answers.is_multiple_of(ASKED_IN) {
            known.bytes.store(self.memory.allocated_bytes().unwrap_or(0), Relaxed);
        }
        known.bytes.load(Relaxed)
    }

    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Where the dictionaries are kept.
    pub(crate) fn dictionaries(&self) -> Region {
        Region::new(Arc::clone(&self.memory), DICTIONARIES, self.seed)
    }

    /// The seed of this store's hashes.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// First id that was never used.
    pub(crate) fn high(&self) -> u32 {
        self.memory.atomic_u64(HIGH_OFFSET).load(Acquire) as u32
    }

    /// The next id that was never used, if the table has room. Under the
    /// allocation lock.
    pub(crate) fn extend(&self) -> Option<u32> {
        let high = self.high();
        if u64::from(high) >= MAX_OBJECTS {
            return None;
        }
        self.memory.atomic_u64(HIGH_OFFSET).store(u64::from(high) + 1, Release);
        Some(high)
    }

    fn entry(id: u32) -> u64 {
        assert!(u64::from(id) < MAX_OBJECTS, "object id {id} out of range");
        ENTRIES + u64::from(id) * ENTRY_BYTES
    }

    /// The object's [`crate::location::Word`].
    pub(crate) fn word(&self, id: u32) -> &AtomicU64 {
        self.memory.atomic_u64(Self::entry(id))
    }

    /// The low 32 bits of the page's xxh3-128.
    pub(crate) fn hash(&self, id: u32) -> &AtomicU32 {
        self.memory.atomic_u32(Self::entry(id) + 8)
    }

    /// Next object in the same bucket.
    fn link(&self, id: u32) -> &AtomicU32 {
        self.memory.atomic_u32(Self::entry(id) + 12)
    }

    fn head(&self, bucket: u32) -> &AtomicU32 {
        self.memory.atomic_u32(HEADS + u64::from(bucket) * 4)
    }

    /// Objects with this hash, newest first. Under the allocation lock.
    pub(crate) fn candidates(&self, size: &IndexSize, hash: u32) -> impl Iterator<Item = u32> + '_ {
        let mut id = self.head(size.bucket(hash)).load(Relaxed);
        std::iter::from_fn(move || {
            let current = id;
            (current != NOBODY).then(|| {
                id = self.link(current).load(Relaxed);
                current
            })
        })
        .filter(move |&id| self.hash(id).load(Relaxed) == hash)
    }

    /// Adds an object to the index, which grows by at most one bucket. Under
    /// the allocation lock; the entry's hash is set.
    pub(crate) fn link_in(&self, size: &mut IndexSize, id: u32) {
        if size.linked >= size.buckets && u64::from(size.buckets) < MAX_OBJECTS {
            self.split(size);
        }
        self.push(size.bucket(self.hash(id).load(Relaxed)), id);
        size.linked += 1;
    }

    /// Takes an object out of the index. Under the allocation lock.
    pub(crate) fn unlink(&self, size: &mut IndexSize, id: u32) {
        let mut slot = self.head(size.bucket(self.hash(id).load(Relaxed)));
        loop {
            let current = slot.load(Relaxed);
            assert_ne!(current, NOBODY, "object {id} is not in the dedup index");
            if current == id {
                break;
            }
            slot = self.link(current);
        }
        slot.store(self.link(id).load(Relaxed), Relaxed);
        size.linked -= 1;
    }

    fn push(&self, bucket: u32, id: u32) {
        let head = self.head(bucket);
        self.link(id).store(head.load(Relaxed), Relaxed);
        head.store(id, Relaxed);
    }

    /// One step of linear hashing (Litwin 1980): the bucket next in line gives
    /// those of its objects that the next hash bit sends there to a new one.
    fn split(&self, size: &mut IndexSize) {
        let new = size.buckets;
        let old = new - size.floor();
        let mut id = self.head(old).load(Relaxed);
        self.head(old).store(NOBODY, Relaxed);
        size.buckets += 1;
        while id != NOBODY {
            let next = self.link(id).load(Relaxed);
            let bucket = size.bucket(self.hash(id).load(Relaxed));
            debug_assert!(bucket == old || bucket == new);
            self.push(bucket, id);
            id = next;
        }
    }
}

/// A number that the tenant cannot know: the standard library's hash maps draw
/// theirs from the operating system.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

impl IndexSize {
    /// For an index that is empty now and about to hold `objects`.
    pub(crate) fn for_objects(objects: u32) -> Self {
        Self { buckets: objects.clamp(MIN_BUCKETS, MAX_OBJECTS as u32), linked: 0 }
    }

    /// The largest power of two that is at most `buckets`.
    fn floor(&self) -> u32 {
        1 << self.buckets.ilog2()
    }

    fn bucket(&self, hash: u32) -> u32 {
        let floor = self.floor();
        let wide = hash & (2 * floor - 1);
        if wide < self.buckets { wide } else { hash & (floor - 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_finds_everything_while_it_grows_and_shrinks() {
        let table = Table::create().expect("table");
        let mut size = IndexSize::for_objects(0);
        let hash_of =
            |id: u32| if id.is_multiple_of(10) { 77 } else { id.wrapping_mul(0x9e37_79b9) };
        const COUNT: u32 = 5000;
        for id in 1..=COUNT {
            table.hash(id).store(hash_of(id), Relaxed);
            table.link_in(&mut size, id);
            assert!(table.candidates(&size, hash_of(id)).any(|found| found == id));
        }
        assert!(size.buckets >= COUNT - 1);
        for id in 1..=COUNT {
            assert!(table.candidates(&size, hash_of(id)).any(|found| found == id), "{id}");
        }
        for id in (1..=COUNT).filter(|id| id % 3 != 0) {
            table.unlink(&mut size, id);
        }
        for id in 1..=COUNT {
            let found = table.candidates(&size, hash_of(id)).any(|found| found == id);
            assert_eq!(found, id % 3 == 0, "{id}");
        }
        assert_eq!(size.linked, COUNT / 3);
    }
}
