//! Which pages were missed lately, by a part of the hash of their names: no more than four
//! bytes each. Two that fall together are taken for one now and then, which costs a page
//! that nobody asks for.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

pub(super) struct Seen(Vec<AtomicU32>);

/// Places at least, and at most (of 16 MiB).
const LEAST: u64 = 1 << 12;
const MOST: u64 = 1 << 22;

impl Seen {
    /// Remembers twice as many as the pool may hold.
    pub(super) fn new(pages: u64) -> Self {
        let places = (pages * 2).clamp(LEAST, MOST).next_power_of_two();
        Self((0..places).map(|_| AtomicU32::new(0)).collect())
    }

    /// Notes a miss; whether there was one before.
    pub(super) fn note(&self, hash: u64) -> bool {
        let place = hash as usize & (self.0.len() - 1);
        // Never that of an empty place.
        let part = (hash >> 32) as u32 | 1;
        self.0[place].swap(part, Relaxed) == part
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.len() as u64 * 4
    }
}
