//! Addresses of a process, and the pages, pieces and leaves that they lie in.

use strata_sys::Range;
use strata_units::{LeafIndex, PAGE_SHIFT, PAGE_SIZE, PAGES_PER_LEAF, PageId, PageNumber};

use crate::map::page_map::Piece;

/// The 2 MiB piece that holds a page. Addresses above 2^53 do not exist.
pub(crate) fn piece_of(page: PageNumber) -> Piece {
    (page.0 / PAGES_PER_LEAF as u64) as Piece
}

/// Bytes of a piece.
pub(crate) const PIECE_BYTES: u64 = (PAGES_PER_LEAF * PAGE_SIZE) as u64;

/// The piece that `address` lies in.
pub(crate) fn piece_at(address: u64) -> Piece {
    piece_of(PageNumber::containing(address))
}

/// Which page of its piece `address` lies in.
pub(crate) fn index_of(address: u64) -> usize {
    PageNumber::containing(address).0 as usize % PAGES_PER_LEAF
}

/// First byte of the page `index` of a piece.
pub(crate) fn address_of(piece: Piece, index: usize) -> u64 {
    (u64::from(piece) * PAGES_PER_LEAF as u64 + index as u64) << PAGE_SHIFT
}

/// The range of one page.
pub(crate) fn one_page(address: u64) -> Range {
    Range { start: address, end: address + PAGE_SIZE as u64 }
}

/// More than any process has.
pub(crate) const EVERYTHING: Range = Range { start: 0, end: 1 << 52 };

/// The addresses of the pages of `range`, beside their ids in `leaf`.
pub(crate) fn ids_in(leaf: LeafIndex, range: Range) -> impl Iterator<Item = (u64, PageId)> {
    (range.start..range.end)
        .step_by(PAGE_SIZE)
        .map(move |address| (address, PageId::new(leaf, index_of(address))))
}

/// Adds a range to others before it; where it begins at the end of the last, they
/// become one.
pub(crate) fn add_run(runs: &mut Vec<Range>, range: Range) {
    match runs.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => runs.push(range),
    }
}

pub(crate) fn overlaps(a: Range, b: Range) -> bool {
    a.start < b.end && b.start < a.end
}
