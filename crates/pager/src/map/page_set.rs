//! Sets of an address space's pages: a bit each, by the 2 MiB piece.

use std::collections::BTreeMap;

use strata_sys::Range;
use strata_units::{PAGE, PAGES_PER_LEAF};

use crate::map::address::{PIECE_BYTES, index_of, piece_at};
use crate::map::page_map::Piece;

/// A bit for each page of a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Bits([u64; PAGES_PER_LEAF / 64]);

impl Bits {
    pub(crate) fn has(self, index: usize) -> bool {
        self.0[index / 64] >> (index % 64) & 1 != 0
    }

    pub(crate) fn is_full(self) -> bool {
        self.count() == PAGES_PER_LEAF
    }

    pub(crate) fn count(self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The pages of the set, in order.
    pub(crate) fn each(self) -> impl Iterator<Item = usize> {
        (0..PAGES_PER_LEAF).filter(move |&index| self.has(index))
    }

    pub(crate) fn put(&mut self, pages: std::ops::Range<usize>, there: bool) {
        for (word, first) in self.0.iter_mut().zip((0..).step_by(64)) {
            let (start, end) = (pages.start.max(first), pages.end.min(first + 64));
            if start >= end {
                continue;
            }
            let mask = u64::MAX >> (64 - (end - start)) << (start - first);
            match there {
                true => *word |= mask,
                false => *word &= !mask,
            }
        }
    }
}

/// Pages of one address space.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct PageSet(BTreeMap<Piece, Bits>);

/// The pages of `range` within one piece that starts at `start`.
fn within(range: Range, start: u64) -> std::ops::Range<usize> {
    let page = |address: u64| ((address - start) / PAGE) as usize;
    page(range.start.max(start))..page(range.end.min(start + PIECE_BYTES))
}

impl PageSet {
    pub(crate) fn insert(&mut self, range: Range) {
        let mut start = range.start / PIECE_BYTES * PIECE_BYTES;
        while start < range.end {
            let piece = piece_at(start);
            self.0.entry(piece).or_default().put(within(range, start), true);
            start += PIECE_BYTES;
        }
    }

    pub(crate) fn remove(&mut self, range: Range) {
        if range.is_empty() {
            return;
        }
        let first = piece_at(range.start);
        let last = piece_at(range.end - 1);
        for (&piece, bits) in self.0.range_mut(first..=last) {
            bits.put(within(range, u64::from(piece) * PIECE_BYTES), false);
        }
    }

    /// Whether it has the page at `address`.
    pub(crate) fn has(&self, address: u64) -> bool {
        self.of(piece_at(address)).has(index_of(address))
    }

    /// How many pages of `range`, which lies within one piece, are in the set.
    pub(crate) fn count(&self, range: Range) -> usize {
        let piece = piece_at(range.start);
        let bits = self.of(piece);
        within(range, u64::from(piece) * PIECE_BYTES).filter(|&index| bits.has(index)).count()
    }

    /// The pages of one piece; the set loses them.
    pub(crate) fn take(&mut self, piece: Piece) -> Bits {
        self.0.remove(&piece).unwrap_or_default()
    }

    pub(crate) fn of(&self, piece: Piece) -> Bits {
        self.0.get(&piece).copied().unwrap_or_default()
    }

    /// The same, to be changed.
    pub(crate) fn of_mut(&mut self, piece: Piece) -> &mut Bits {
        self.0.entry(piece).or_default()
    }

    /// The pieces in which there are pages, or were.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        self.0.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(set: &PageSet) -> Vec<u64> {
        set.pieces()
            .flat_map(|piece| {
                let first = u64::from(piece) * PAGES_PER_LEAF as u64;
                set.of(piece).each().map(move |index| first + index as u64)
            })
            .collect()
    }

    #[test]
    fn ranges_come_and_go_across_pieces() {
        let range = |start: u64, end: u64| Range { start: start * PAGE, end: end * PAGE };
        let mut set = PageSet::default();
        set.insert(range(510, 515));
        set.insert(range(1020, 1024));
        set.insert(range(3, 3));
        assert_eq!(pages(&set), [510, 511, 512, 513, 514, 1020, 1021, 1022, 1023]);
        assert_eq!((set.count(range(496, 512)), set.count(range(496, 510))), (2, 0));
        assert_eq!((set.count(range(512, 513)), set.count(range(515, 600))), (1, 0));
        set.remove(range(511, 513));
        set.remove(range(1023, 5000));
        set.remove(range(0, 0));
        assert_eq!(pages(&set), [510, 513, 514, 1020, 1021, 1022]);
        assert!(set.has(513 * PAGE) && !set.has(512 * PAGE) && !set.has(5000 * PAGE));
        assert_eq!(set.take(1).each().count(), 5);
        assert_eq!(pages(&set), [510]);
    }
}
