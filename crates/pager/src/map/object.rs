//! Pages that belong together, by their addresses: the memory of a process, of a snapshot, or
//! of a process to come. What has them in DRAM and takes them from there is a space's business
//! ([`crate::tenant::space`]); an object without one is what the store has.

use std::collections::{BTreeMap, BTreeSet};

use strata_sys::Range;
use strata_units::{LeafIndex, PAGES_PER_LEAF, PageId, SpaceId};

use crate::map::address::{PIECE_BYTES, address_of, index_of, piece_at};
use crate::map::entry::Entry;
use crate::map::page_map::{PageMap, Piece};

/// The leaves of the page map that describe it. Each says there whose it is and where, from
/// which the next worker makes the object anew.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    id: SpaceId,
    leaves: BTreeMap<Piece, LeafIndex>,
}

/// A piece, its leaf in one object, and that in another.
pub(crate) type LeafPair = (Piece, LeafIndex, LeafIndex);

impl Object {
    /// Without pages, in the slot `id` of the registry.
    pub(crate) fn new(id: SpaceId) -> Self {
        Self { id, leaves: BTreeMap::new() }
    }

    pub(crate) fn id(&self) -> SpaceId {
        self.id
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// The leaf that describes a piece.
    pub(crate) fn leaf(&self, piece: Piece) -> Option<LeafIndex> {
        self.leaves.get(&piece).copied()
    }

    /// All leaves, in order of their pieces.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = (Piece, LeafIndex)> + '_ {
        self.leaves.iter().map(|(&piece, &leaf)| (piece, leaf))
    }

    /// Those from `piece` on.
    pub(crate) fn leaves_from(
        &self,
        piece: Piece,
    ) -> impl Iterator<Item = (Piece, LeafIndex)> + '_ {
        self.leaves.range(piece..).map(|(&piece, &leaf)| (piece, leaf))
    }

    /// Those that describe a page of `range`.
    pub(crate) fn leaves_in(&self, range: Range) -> impl Iterator<Item = (Piece, LeafIndex)> + '_ {
        let last = piece_at(range.end.saturating_sub(1));
        let pieces = self.leaves_from(piece_at(range.start));
        pieces.take_while(move |&(piece, _)| piece <= last && !range.is_empty())
    }

    /// The same, with the part of `range` that each describes.
    pub(crate) fn pages_in(&self, range: Range) -> Vec<(Piece, LeafIndex, Range)> {
        let part = |piece| {
            let start = address_of(piece, 0);
            let end = start + PIECE_BYTES;
            Range { start: start.max(range.start), end: end.min(range.end) }
        };
        self.leaves_in(range).map(|(piece, leaf)| (piece, leaf, part(piece))).collect()
    }

    /// All pages of its leaves, and their addresses.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (u64, PageId)> + '_ {
        self.leaves().flat_map(|(piece, leaf)| {
            (0..PAGES_PER_LEAF)
                .map(move |index| (address_of(piece, index), PageId::new(leaf, index)))
        })
    }

    /// The page at `address`, if there is a leaf for it.
    pub(crate) fn page(&self, address: u64) -> Option<PageId> {
        Some(PageId::new(self.leaf(piece_at(address))?, index_of(address)))
    }

    /// What is at `address`.
    pub(crate) fn entry(&self, map: &PageMap, address: u64) -> Entry {
        self.page(address).map_or(Entry::Untouched, |page| map.get(page))
    }

    /// The page at `address`, with a new leaf where there was none. None: the page map is full.
    pub(crate) fn page_or_new(&mut self, map: &PageMap, address: u64) -> Option<PageId> {
        let piece = piece_at(address);
        let leaf = match self.leaf(piece) {
            Some(leaf) => leaf,
            None => {
                let leaf = self.new_leaf(map, piece)?;
                self.insert(piece, leaf);
                leaf
            }
        };
        Some(PageId::new(leaf, index_of(address)))
    }

    /// A leaf for `piece`, which is this object's as soon as it is [inserted](Self::insert).
    /// None: the page map is full.
    pub(crate) fn new_leaf(&self, map: &PageMap, piece: Piece) -> Option<LeafIndex> {
        map.take(self.id, piece)
    }

    /// An object in the slot `id` with a leaf for each of this one's, and which is for which.
    /// None: the page map is full, and some of them are the slot's.
    pub(crate) fn shaped_like(&self, map: &PageMap, id: SpaceId) -> Option<(Self, Vec<LeafPair>)> {
        let mut object = Self::new(id);
        let mut pairs = Vec::with_capacity(self.leaves.len());
        for (piece, leaf) in self.leaves() {
            let copy = object.new_leaf(map, piece)?;
            object.insert(piece, copy);
            pairs.push((piece, leaf, copy));
        }
        Some((object, pairs))
    }

    /// The pieces of which this object or the one `before` it has a leaf, with that one's and
    /// this one's.
    pub(crate) fn beside<'a>(
        &'a self,
        before: Option<&'a Self>,
    ) -> impl Iterator<Item = (Piece, [Option<LeafIndex>; 2])> + 'a {
        let leaves = before.into_iter().chain([self]).flat_map(Self::leaves);
        let pieces: BTreeSet<Piece> = leaves.map(|(piece, _)| piece).collect();
        let old = move |piece| before.and_then(|before| before.leaf(piece));
        pieces.into_iter().map(move |piece| (piece, [old(piece), self.leaf(piece)]))
    }

    /// `leaf`, which the page map says is this object's, describes `piece`.
    pub(crate) fn insert(&mut self, piece: Piece, leaf: LeafIndex) {
        self.leaves.insert(piece, leaf);
    }

    /// Gives the leaf of `piece`, all of whose pages are untouched, back to the page map.
    pub(crate) fn give_back(&mut self, map: &PageMap, piece: Piece) {
        if let Some(leaf) = self.leaves.remove(&piece) {
            map.give_back(leaf);
        }
    }

    /// Takes the leaf of `other`'s piece `from`, with all of its pages, for its own piece `to`,
    /// of which it has none. False: the other one has none either.
    pub(crate) fn take_over(
        &mut self,
        map: &PageMap,
        to: Piece,
        (other, from): (&mut Self, Piece),
    ) -> bool {
        if self.leaves.contains_key(&to) {
            return false;
        }
        let Some(leaf) = other.leaves.remove(&from) else { return false };
        map.hand_over(leaf, self.id, to);
        self.insert(to, leaf);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::address::ids_in;
    use strata_units::PAGE_SIZE;

    fn pages(start: u64, end: u64) -> Range {
        Range { start: start * PAGE_SIZE as u64, end: end * PAGE_SIZE as u64 }
    }

    fn object() -> Object {
        let mut object = Object::new(SpaceId(3));
        object.insert(0, LeafIndex(7));
        object.insert(2, LeafIndex(9));
        object
    }

    #[test]
    fn pages_of_a_range_are_clipped_to_it() {
        let object = object();
        let found = object.pages_in(pages(500, 1030));
        assert_eq!(
            found,
            [(0, LeafIndex(7), pages(500, 512)), (2, LeafIndex(9), pages(1024, 1030))]
        );
        assert!(object.pages_in(pages(512, 1024)).is_empty());
        assert!(object.pages_in(pages(3, 3)).is_empty());
        assert_eq!(object.leaves_in(pages(0, 1025)).count(), 2);
        assert_eq!(object.leaves_from(1).collect::<Vec<_>>(), [(2, LeafIndex(9))]);
        let ids: Vec<_> = ids_in(LeafIndex(9), pages(1024, 1026)).collect();
        assert_eq!(
            ids,
            [
                (1024 << 12, PageId::new(LeafIndex(9), 0)),
                (1025 << 12, PageId::new(LeafIndex(9), 1))
            ]
        );
    }

    #[test]
    fn a_page_is_found_by_its_address_only() {
        let object = object();
        let leaf = LeafIndex(9);
        assert_eq!(object.page((1024 + 5) << 12), Some(PageId::new(leaf, 5)));
        assert_eq!(object.page(512 << 12), None);
        let all: Vec<_> = object.pages().collect();
        assert_eq!((all.len(), all[512]), (1024, (1024 << 12, PageId::new(leaf, 0))));
    }
}
