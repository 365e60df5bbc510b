//! Counting references to objects, and freeing those that nobody references.
//!
//! A count lives in the object's word, beside its location; what it cannot hold
//! lies in an overflow table.

use std::hint::black_box;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use strata_units::Handle;

use crate::location::Word;
use crate::space::Reclaimed;
use crate::store::{Store, Target, lock};

/// References moved to or from the overflow table at a time: half of what a
/// word holds, so that going back and forth at the edge costs nothing.
const OVERFLOW_STEP: u64 = Word::MAX_REFERENCES.div_ceil(2);
/// Dead objects freed under one hold of the lock.
const REAP_BATCH: usize = 256;

/// References that were added together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Retained {
    /// To objects.
    pub objects: u64,
    /// To pages of one value, which are no objects.
    pub fill_pages: u64,
    /// To pages of page files, which are none either.
    pub filed_pages: u64,
}

impl std::ops::AddAssign for Retained {
    fn add_assign(&mut self, other: Self) {
        self.objects += other.objects;
        self.fill_pages += other.fill_pages;
        self.filed_pages += other.filed_pages;
    }
}

impl Store {
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
            Target::InFile { file, .. } => {
                assert!(self.page_files.retain(file, 1), "{handle:?} is of a file that is closed");
                self.counters.filed_pages.fetch_add(1, Relaxed);
            }
        }
    }

    /// [`Store::retain`] for many pages. Returns how many of them were of each kind.
    ///
    /// # Panics
    /// As it does.
    pub fn retain_all(&self, handles: &[Handle]) -> Retained {
        self.prefetch_counts(handles.iter().copied());
        let mut retained = Retained::default();
        // Neighbours are mostly of one file: its count is everybody's.
        let mut same_file = (0, 0);
        let retain = |(file, pages): (u16, u64)| {
            let retained = pages == 0 || self.page_files.retain(file, pages);
            assert!(retained, "page file {file} is closed");
        };
        for &handle in handles {
            match Target::of(handle) {
                Target::Object(id) => {
                    assert!(self.try_reference(id), "{handle:?} names no referenced object");
                    retained.objects += 1;
                }
                Target::InFile { file, .. } => {
                    if same_file.0 != file {
                        retain(std::mem::replace(&mut same_file, (file, 0)));
                    }
                    same_file.1 += 1;
                    retained.filed_pages += 1;
                }
                Target::Fill(_) => retained.fill_pages += 1,
            }
        }
        retain(same_file);
        self.counters.references.fetch_add(retained.objects, Relaxed);
        self.counters.fill_pages.fetch_add(retained.fill_pages, Relaxed);
        self.counters.filed_pages.fetch_add(retained.filed_pages, Relaxed);
        retained
    }

    /// From now on [`Store::stats`] leaves these references out: nobody has the pages
    /// that hold them yet.
    pub fn set_aside(&self, retained: Retained) {
        self.counters.references_aside.fetch_add(retained.objects, Relaxed);
        self.counters.fill_pages_aside.fetch_add(retained.fill_pages, Relaxed);
        self.counters.filed_pages_aside.fetch_add(retained.filed_pages, Relaxed);
    }

    /// They count again.
    pub fn count_again(&self, retained: Retained) {
        self.counters.references_aside.fetch_sub(retained.objects, Relaxed);
        self.counters.fill_pages_aside.fetch_sub(retained.fill_pages, Relaxed);
        self.counters.filed_pages_aside.fetch_sub(retained.filed_pages, Relaxed);
    }

    /// Adds a reference to a page to which another thread holds one, and may be giving
    /// it up. False: it has, or the store holds nothing of that name. True: there is
    /// a page of that name; whether it is still the one that was meant, only the
    /// caller can find out, who knows where the name stood.
    #[must_use]
    pub fn try_retain(&self, handle: Handle) -> bool {
        let (retained, counter) = match Target::of(handle) {
            Target::Fill(_) => (true, &self.counters.fill_pages),
            Target::Object(id) => (self.try_reference(id), &self.counters.references),
            Target::InFile { file, .. } => {
                (self.page_files.retain(file, 1), &self.counters.filed_pages)
            }
        };
        if retained {
            counter.fetch_add(1, Relaxed);
        }
        retained
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
            Target::InFile { file, .. } => {
                self.counters.filed_pages.fetch_sub(1, Relaxed);
                self.page_files.release(file);
            }
        }
    }

    /// How many references there are to the page of `handle`, or more than one if
    /// there are very many; none: it costs no memory.
    #[must_use]
    pub fn references(&self, handle: Handle) -> Option<u64> {
        match Target::of(handle) {
            Target::Fill(_) | Target::InFile { .. } => None,
            Target::Object(id) => Some(Word(self.table.word(id).load(Relaxed)).references()),
        }
    }

    /// Has the counts of these pages at hand for whoever is about to retain or
    /// release them all. Those of pages that were put at different times lie far apart;
    /// a change waits for its own count alone, where reads wait side by side.
    pub fn prefetch_counts(&self, handles: impl Iterator<Item = Handle>) {
        let words = handles.filter_map(|handle| match Target::of(handle) {
            Target::Object(id) => Some(self.table.word(id).load(Relaxed)),
            Target::Fill(_) | Target::InFile { .. } => None,
        });
        black_box(words.fold(0, |all, word| all ^ word));
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

    pub(crate) fn reap_some(&self, max: usize) -> usize {
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
}
