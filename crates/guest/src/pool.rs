//! A pool: pages by (file, index), which may vanish at any time.
//!
//! The pages are in a [`Store`], compressed and each content once, so that equal images of
//! two guests cost one: the store compares bytes before it says that a page is there. What
//! is known of them is in an index of many shards. A shard is locked to look a page up or
//! to enter it; no lock is held while a page is compressed or unpacked.
//!
//! All of it can go at once: what the pages are in is put aside whole, and freed.

mod index;
mod seen;

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use strata_store::{Put, PutError, Store, StoreConfig, StoreError};
use strata_units::{Handle, PAGE_SIZE};

use self::index::{Key, Shard};
use self::seen::Seen;

/// Parts of the index that are locked by themselves.
const SHARDS: usize = 64;
/// What a page costs beside its data: its entry, its place in a table, its object's record.
const PAGE_COST_BYTES: u64 = 96;
/// The part of the limit that is for that: an eighth, so that a pool holds five times its
/// limit in pages that compress or are there twice, and not more.
const INDEX_SHIFT: u32 = 3;
/// Pages that go when there is no room for one, and how often that is tried.
const EVICTED_AT_ONCE: usize = 64;
const EVICTIONS: usize = 4;
/// A pool is as good as full from this part of its limit on, in eighths.
const FULL_EIGHTHS: u64 = 7;
/// Files that a pool knows of at a time.
const MAX_FILES: usize = 4096;
/// Least limit: a store makes room in pieces of megabytes.
pub(crate) const LEAST_LIMIT_BYTES: u64 = 16 << 20;
/// From this limit on its memory is in huge pages: what they cost beyond what is in them
/// is little of that, and small pools are handed back soon enough.
const LEAST_HUGE_BYTES: u64 = 256 << 20;
/// What is compacted and packed tighter each time that a pool is tended.
const COMPACTED_BYTES: u64 = 8 << 20;
const REPACKED_PAGES: usize = 512;

/// Bytes that name a file's content: whoever says the same means the same bytes.
pub(crate) type FileId = [u8; crate::talk::FILE_ID_BYTES];
type Page = [u8; PAGE_SIZE];

/// Which pages that were missed the pool wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Admission {
    /// All.
    First,
    /// Those that were missed before, by whomever.
    Second,
    /// All as long as there is room; then those that were missed before.
    #[default]
    Room,
}

/// How often what happened; sums since the pool was made or its daemon's worker began.
#[derive(Debug, Default)]
struct Counters {
    gets: AtomicU64,
    hits: AtomicU64,
    puts: AtomicU64,
    refused: AtomicU64,
    passed_over: AtomicU64,
    forgotten: AtomicU64,
    evicted: AtomicU64,
    corrupt: AtomicU64,
    handed_back_bytes: AtomicU64,
    handed_back: AtomicU64,
}

/// A pool in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolFigures {
    /// The most that it may cost.
    pub limit_bytes: u64,
    /// What it costs.
    pub cost_bytes: u64,
    /// Pages in it.
    pub pages: u64,
    /// Part of them that is another one's content.
    pub deduplicated_pages: u64,
    /// Part of them that is one value throughout.
    pub fill_pages: u64,
    /// Files that it knows.
    pub files: u64,
    /// Pages that were asked for.
    pub gets: u64,
    /// Those that were there.
    pub hits: u64,
    /// Pages that were taken.
    pub puts: u64,
    /// Those for which there was no room.
    pub refused: u64,
    /// Pages that were missed and not wanted.
    pub passed_over: u64,
    /// Pages that went because their file changed or ended.
    pub forgotten: u64,
    /// Pages that went for others.
    pub evicted: u64,
    /// Pages whose checksum was wrong: misses.
    pub corrupt: u64,
    /// How often all was handed back, and how much memory that was.
    pub handed_back: u64,
    /// See above.
    pub handed_back_bytes: u64,
}

struct Content {
    store: Store,
    shards: Vec<Mutex<Shard>>,
    seen: Seen,
    pages: AtomicU64,
    next_victim: AtomicUsize,
}

#[derive(Default)]
struct Files {
    numbers: HashMap<FileId, (u32, usize)>,
    next: u32,
}

/// See the module's text.
pub struct Pool {
    content: RwLock<Arc<Content>>,
    files: Mutex<Files>,
    limit_bytes: u64,
    admission: Admission,
    /// It takes nothing: the machine needs its memory.
    closed: AtomicBool,
    ended: AtomicBool,
    counters: Counters,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

/// What is under a lock here is whole between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Content {
    fn new(limit_bytes: u64) -> Result<Self, StoreError> {
        let data = limit_bytes - (limit_bytes >> INDEX_SHIFT);
        let store = if limit_bytes >= LEAST_HUGE_BYTES {
            Store::create_own(Some(data))?
        } else {
            Store::create(StoreConfig { compressed_limit: Some(data), file: None })?
        };
        Ok(Self {
            store,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            seen: Seen::new(max_pages(limit_bytes)),
            pages: AtomicU64::new(0),
            next_victim: AtomicUsize::new(0),
        })
    }

    fn shard(&self, key: Key) -> MutexGuard<'_, Shard> {
        lock(&self.shards[(key.hash() >> 32) as usize % SHARDS])
    }

    fn cost_bytes(&self) -> u64 {
        let stats = self.store.stats();
        self.store.held_bytes()
            + stats.metadata_bytes
            + self.seen.bytes()
            + self.pages.load(Relaxed) * (PAGE_COST_BYTES - 24)
    }

    /// Gives up references of pages that are in no shard any more.
    fn release(&self, handles: &[Handle]) -> u64 {
        handles.iter().for_each(|&handle| self.store.release(handle));
        self.pages.fetch_sub(handles.len() as u64, Relaxed);
        handles.len() as u64
    }

    /// Has pages go that were not asked for lately.
    fn evict(&self, count: usize) -> u64 {
        let mut victims = Vec::new();
        for _ in 0..SHARDS {
            let shard = self.next_victim.fetch_add(1, Relaxed) % SHARDS;
            let left = count - victims.len();
            lock(&self.shards[shard]).evict(left.min(count.div_ceil(8)), &mut victims);
            if victims.len() >= count {
                break;
            }
        }
        let gone = self.release(&victims);
        self.store.reap();
        gone
    }
}

fn max_pages(limit_bytes: u64) -> u64 {
    (limit_bytes >> INDEX_SHIFT) / PAGE_COST_BYTES
}

impl Pool {
    /// An empty one.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new(limit_bytes: u64, admission: Admission) -> Result<Self, StoreError> {
        let limit_bytes = limit_bytes.max(LEAST_LIMIT_BYTES);
        Ok(Self {
            content: RwLock::new(Arc::new(Content::new(limit_bytes)?)),
            files: Mutex::default(),
            limit_bytes,
            admission,
            closed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            counters: Counters::default(),
        })
    }

    fn content(&self) -> Arc<Content> {
        Arc::clone(&self.content.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The number of a file, which stays the same as long as somebody has it open, and
    /// while there are pages of it for others to find. None: the pool knows too many.
    pub fn open(&self, id: &FileId) -> Option<u32> {
        let mut files = lock(&self.files);
        if let Some((number, users)) = files.numbers.get_mut(id) {
            *users += 1;
            return Some(*number);
        }
        if files.numbers.len() >= MAX_FILES {
            // Those that nobody has open lose their pages; they are not found again.
            files.numbers.retain(|_, (_, users)| *users > 0);
            if files.numbers.len() >= MAX_FILES {
                return None;
            }
        }
        let number = files.next;
        // A number is never another file's: after four billion there are no more.
        files.next = number.checked_add(1)?;
        files.numbers.insert(*id, (number, 1));
        Some(number)
    }

    /// Somebody has it open no more. `private`: nobody else will ask for what it was.
    pub fn close(&self, id: &FileId, private: bool) {
        let mut files = lock(&self.files);
        let Some((number, users)) = files.numbers.get_mut(id) else { return };
        *users = users.saturating_sub(1);
        if private && *users == 0 {
            let number = *number;
            files.numbers.remove(id);
            drop(files);
            self.forget_file(number);
        }
    }

    /// Copies a page out. False: it is not there.
    pub fn get(&self, file: u32, index: u64, out: &mut Page) -> bool {
        let content = self.content();
        let key = Key { file, index };
        self.counters.gets.fetch_add(1, Relaxed);
        let found = {
            let mut shard = content.shard(key);
            let found = shard.find(key);
            // So that it stays while it is read without the lock.
            found.inspect(|&handle| content.store.retain(handle))
        };
        let Some(handle) = found else { return false };
        let read = content.store.get(handle, out);
        content.store.release(handle);
        if read.is_err() {
            self.counters.corrupt.fetch_add(1, Relaxed);
            self.forget_in(&content, key);
            return false;
        }
        self.counters.hits.fetch_add(1, Relaxed);
        true
    }

    /// Whether the pool wants a page that was just missed.
    pub fn wants(&self, file: u32, index: u64) -> bool {
        if self.closed.load(Relaxed) {
            return false;
        }
        let content = self.content();
        let again = content.seen.note(Key { file, index }.hash());
        let wants = match self.admission {
            Admission::First => true,
            Admission::Second => again,
            Admission::Room => again || !self.is_full(&content),
        };
        if !wants {
            self.counters.passed_over.fetch_add(1, Relaxed);
        }
        wants
    }

    fn is_full(&self, content: &Content) -> bool {
        let part = |limit: u64| limit / 8 * FULL_EIGHTHS;
        let data = self.limit_bytes - (self.limit_bytes >> INDEX_SHIFT);
        content.store.stats().dram_bytes >= part(data)
            || content.pages.load(Relaxed) >= part(max_pages(self.limit_bytes))
    }

    /// Takes a page, in the place of what was there before. False: it did not.
    pub fn put(&self, file: u32, index: u64, page: &Page) -> bool {
        let key = Key { file, index };
        let content = self.content();
        let stored = if self.closed.load(Relaxed) { None } else { self.store(&content, page) };
        let Some(handle) = stored else {
            // What was there before is not what was to be there.
            self.forget_in(&content, key);
            self.counters.refused.fetch_add(1, Relaxed);
            return false;
        };
        content.pages.fetch_add(1, Relaxed);
        let before = content.shard(key).enter(key, handle);
        if let Some(before) = before {
            content.release(&[before]);
        }
        self.counters.puts.fetch_add(1, Relaxed);
        true
    }

    fn store(&self, content: &Content, page: &Page) -> Option<Handle> {
        for _ in 0..EVICTIONS {
            if content.pages.load(Relaxed) < max_pages(self.limit_bytes) {
                match content.store.put(page, Put::Fast) {
                    Ok(handle) => return Some(handle),
                    Err(PutError::Full) => {}
                    Err(PutError::Io(_)) => return None,
                }
            }
            let gone = content.evict(EVICTED_AT_ONCE);
            self.counters.evicted.fetch_add(gone, Relaxed);
        }
        None
    }

    fn forget_in(&self, content: &Content, key: Key) {
        let gone = content.shard(key).remove(key);
        if let Some(handle) = gone {
            let count = content.release(&[handle]);
            self.counters.forgotten.fetch_add(count, Relaxed);
        }
    }

    /// Has pages go: afterwards nobody gets them.
    pub fn forget(&self, file: u32, index: u64, count: u64) {
        let content = self.content();
        // A look at each page that there is costs less than one at each that is named.
        if count > content.pages.load(Relaxed) + SHARDS as u64 {
            let range = index..index.saturating_add(count);
            self.forget_where(&content, |key| key.file == file && range.contains(&key.index));
            return;
        }
        for index in index..index.saturating_add(count) {
            self.forget_in(&content, Key { file, index });
        }
    }

    /// Has all pages of a file go.
    pub fn forget_file(&self, file: u32) {
        self.forget_where(&self.content(), |key| key.file == file);
    }

    fn forget_where(&self, content: &Content, which: impl Fn(Key) -> bool) {
        for shard in &content.shards {
            let mut gone = Vec::new();
            lock(shard).remove_where(&which, &mut gone);
            let count = content.release(&gone);
            self.counters.forgotten.fetch_add(count, Relaxed);
        }
        content.store.reap();
    }

    /// Hands all memory back, at once and without any I/O; how much it was.
    ///
    /// # Errors
    /// There is no memory even for an empty pool; nothing was handed back.
    pub fn empty(&self) -> Result<u64, StoreError> {
        let fresh = Arc::new(Content::new(self.limit_bytes)?);
        let old = {
            let mut content = self.content.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *content, fresh)
        };
        let bytes = old.cost_bytes();
        // Whoever reads a page of it just now frees it in the end.
        drop(old);
        self.counters.handed_back.fetch_add(1, Relaxed);
        self.counters.handed_back_bytes.fetch_add(bytes, Relaxed);
        Ok(bytes)
    }

    /// Whether it is to take pages.
    pub fn set_closed(&self, closed: bool) {
        self.closed.store(closed, Relaxed);
    }

    /// Nobody gets or puts anything any more.
    pub fn end(&self) {
        self.ended.store(true, Relaxed);
        self.set_closed(true);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }

    /// Gives memory back that is of no use, and packs tighter what is: now and then.
    pub fn tend(&self) {
        let content = self.content();
        content.store.repack(REPACKED_PAGES);
        content.store.compact(COMPACTED_BYTES);
    }

    /// The pool in numbers.
    #[must_use]
    pub fn figures(&self) -> PoolFigures {
        let content = self.content();
        let stats = content.store.stats();
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        let counters = &self.counters;
        PoolFigures {
            limit_bytes: self.limit_bytes,
            cost_bytes: content.cost_bytes(),
            pages: of(&content.pages),
            deduplicated_pages: stats.deduplicated_pages,
            fill_pages: stats.fill_pages,
            files: lock(&self.files).numbers.len() as u64,
            gets: of(&counters.gets),
            hits: of(&counters.hits),
            puts: of(&counters.puts),
            refused: of(&counters.refused),
            passed_over: of(&counters.passed_over),
            forgotten: of(&counters.forgotten),
            evicted: of(&counters.evicted),
            corrupt: of(&counters.corrupt),
            handed_back: of(&counters.handed_back),
            handed_back_bytes: of(&counters.handed_back_bytes),
        }
    }
}

#[cfg(test)]
mod tests;
