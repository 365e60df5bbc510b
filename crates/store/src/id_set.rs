//! Sets of object ids: a bit per id, with three levels of summary above, so
//! that the next member after a given id is found in constant time.
//!
//! The bits live in the object table's memory file, which is sparse: a set
//! costs what its ids need. They are hints for this process only; recovery
//! clears them and builds them anew.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use strata_sys::SharedMemory;

/// The sets that a store keeps. Their words are interleaved, so that all sets'
/// bits for 64 ids share one cache line, and a small store touches one page
/// per level and not one per level and set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SetName {
    /// Referenced by nobody, not yet freed. The one set that is written without
    /// the allocation lock.
    Dead = 0,
    /// Below the table's end and not in use.
    Free = 1,
    /// Raw, still to be compressed.
    Staged = 2,
    /// Not yet tried with zstd, or with the dictionary in use.
    Repackable = 3,
    /// In DRAM, compressed or found incompressible.
    Demotable = 4,
}

/// Sets that a group of words has room for: one cache line.
const GROUP_WORDS: u64 = 8;
const LEVELS: usize = 4;

/// Words of `level` for a table of `ids`.
const fn words(ids: u64, level: usize) -> u64 {
    let mut count = ids;
    let mut done = 0;
    while done <= level {
        count = count.div_ceil(64);
        done += 1;
    }
    count
}

/// Bytes that all sets span, each level rounded up to pages.
pub(crate) const fn span_bytes(ids: u64) -> u64 {
    let (mut total, mut level) = (0, 0);
    while level < LEVELS {
        total += (words(ids, level) * GROUP_WORDS * 8).next_multiple_of(4096);
        level += 1;
    }
    total
}

/// One set.
pub(crate) struct IdSet {
    memory: Arc<SharedMemory>,
    /// Byte offset of this set's first word, by level.
    bases: [u64; LEVELS],
    top_words: u64,
}

impl IdSet {
    /// The set `name` in the range at `offset`, [`span_bytes`]`(ids)` long.
    pub(crate) fn new(memory: Arc<SharedMemory>, offset: u64, ids: u64, name: SetName) -> Self {
        let mut bases = [0; LEVELS];
        let mut at = offset;
        for (level, base) in bases.iter_mut().enumerate() {
            *base = at + name as u64 * 8;
            at += (words(ids, level) * GROUP_WORDS * 8).next_multiple_of(4096);
        }
        Self { memory, bases, top_words: words(ids, LEVELS - 1) }
    }

    fn word(&self, level: usize, index: u64) -> &std::sync::atomic::AtomicU64 {
        self.memory.atomic_u64(self.bases[level] + index * GROUP_WORDS * 8)
    }

    /// Adds `id`. Any thread, at any time.
    pub(crate) fn insert(&self, id: u32) {
        self.mark(0, u64::from(id));
    }

    fn mark(&self, from: usize, index: u64) {
        let mut index = index;
        for level in from..LEVELS {
            self.word(level, index / 64).fetch_or(1 << (index % 64), SeqCst);
            index /= 64;
        }
    }

    /// Takes `id` out; whether it was in. One thread at a time.
    pub(crate) fn remove(&self, id: u32) -> bool {
        let mut index = u64::from(id);
        let mut was_in = false;
        for level in 0..LEVELS {
            let bit = 1u64 << (index % 64);
            let before = self.word(level, index / 64).fetch_and(!bit, SeqCst);
            if level == 0 {
                was_in = before & bit != 0;
            } else if self.word(level - 1, index).load(SeqCst) != 0 {
                // An insert came between emptying the word below and clearing
                // its summary: it may have found the summary still set.
                self.mark(level, index);
                return was_in;
            }
            if before & !bit != 0 {
                return was_in;
            }
            index /= 64;
        }
        was_in
    }

    /// The smallest member that is at least `from`.
    pub(crate) fn next(&self, from: u32) -> Option<u32> {
        // An insert marks the lowest level first, so a summary bit may be set
        // late; a remove clears it late, so a summary may lead to an empty word.
        // Then go on behind it.
        let mut index = u64::from(from);
        'descend: loop {
            let mut level = 0;
            // Up, until a word has a bit at or after `index`.
            loop {
                if level == LEVELS {
                    return None;
                }
                let word_index = index / 64;
                let in_range = level < LEVELS - 1 || word_index < self.top_words;
                let word = if in_range { self.word_or_zero(level, word_index) } else { 0 };
                let rest = word & (u64::MAX << (index % 64));
                if rest != 0 {
                    index = word_index * 64 + u64::from(rest.trailing_zeros());
                    break;
                }
                index = word_index + 1;
                level += 1;
            }
            // Down, to the first member below.
            while level > 0 {
                level -= 1;
                let word = self.word(level, index).load(SeqCst);
                if word == 0 {
                    // Stale summary: continue after everything below it.
                    index += 1;
                    for _ in 0..=level {
                        index = index.saturating_mul(64);
                    }
                    continue 'descend;
                }
                index = index * 64 + u64::from(word.trailing_zeros());
            }
            return u32::try_from(index).ok();
        }
    }

    /// A word, or nothing beyond the level's end (where `next` may step).
    fn word_or_zero(&self, level: usize, index: u64) -> u64 {
        let above = if level + 1 < LEVELS { self.bases[level + 1] } else { u64::MAX };
        let offset = self.bases[level] + index * GROUP_WORDS * 8;
        // `bases` of the next level is the end of this one, in this set's lane.
        if offset >= above { 0 } else { self.memory.atomic_u64(offset).load(SeqCst) }
    }

    /// The smallest member that is at least `from`, else the smallest at all.
    pub(crate) fn next_around(&self, from: u32) -> Option<u32> {
        self.next(from).or_else(|| self.next(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const IDS: u64 = 1 << 20;

    fn set() -> IdSet {
        let memory = SharedMemory::create("strata-test", span_bytes(IDS)).expect("memory");
        IdSet::new(Arc::new(memory), 0, IDS, SetName::Staged)
    }

    proptest! {
        #[test]
        fn behaves_like_a_set(
            steps in prop::collection::vec((0u8..3, prop_oneof![0u32..200, 0u32..IDS as u32]), 1..300)
        ) {
            let set = set();
            let mut model = BTreeSet::new();
            for (step, id) in steps {
                match step {
                    0 => {
                        set.insert(id);
                        model.insert(id);
                    }
                    1 => prop_assert_eq!(set.remove(id), model.remove(&id)),
                    _ => {}
                }
                prop_assert_eq!(set.next(id), model.range(id..).next().copied());
                prop_assert_eq!(set.next(0), model.first().copied());
            }
            while let Some(id) = set.next(0) {
                prop_assert!(set.remove(id) && model.remove(&id));
            }
            prop_assert!(model.is_empty());
        }
    }

    #[test]
    fn nothing_is_lost_between_inserting_and_removing_threads() {
        const PER_THREAD: u32 = 20_000;
        let set = set();
        let taken = std::thread::scope(|scope| {
            for thread in 0..2 {
                let set = &set;
                scope.spawn(move || {
                    for step in 0..PER_THREAD {
                        // Neighbours from different threads, spread over words.
                        set.insert(step.wrapping_mul(97) % (IDS as u32 / 2) * 2 + thread);
                    }
                });
            }
            let mut taken = 0;
            while taken < 2 * PER_THREAD {
                match set.next(0) {
                    Some(id) => taken += u32::from(set.remove(id)),
                    None => std::thread::yield_now(),
                }
            }
            taken
        });
        assert_eq!(taken, 2 * PER_THREAD);
        assert_eq!(set.next(0), None);
    }
}
