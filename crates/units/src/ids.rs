//! Small integer names. Each is a type of its own so that they cannot be mixed.

use core::fmt;

/// A tenant: what a budget belongs to. Slot number in the daemon's registry.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TenantId(pub u32);

/// One address space (one userfaultfd). Slot number in the daemon's registry.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SpaceId(pub u32);

/// A leaf of a tenant's page map: 512 page entries, one aligned 2 MiB piece of
/// one address space.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LeafIndex(pub u32);

impl LeafIndex {
    /// Its pages, in order.
    pub fn pages(self) -> impl Iterator<Item = PageId> {
        (0..crate::PAGES_PER_LEAF).map(move |index| PageId::new(self, index))
    }
}

/// One managed page of a tenant: leaf index × 512 + page within the leaf.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PageId(pub u32);

impl PageId {
    /// The page `index` (0..512) of `leaf`.
    #[must_use]
    pub const fn new(leaf: LeafIndex, index: usize) -> Self {
        Self(leaf.0 * crate::PAGES_PER_LEAF as u32 + index as u32)
    }

    /// The leaf that holds this page's entry.
    #[must_use]
    pub const fn leaf(self) -> LeafIndex {
        LeafIndex(self.0 / crate::PAGES_PER_LEAF as u32)
    }

    /// The page's place in its leaf, 0..512.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize % crate::PAGES_PER_LEAF
    }
}

/// The store's name for one stored page. Opaque to everyone but the store; at
/// most [`Handle::BITS`] bits, so that a page-map entry can hold it beside its
/// state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle(pub u64);

impl Handle {
    /// Bits that a handle may use.
    pub const BITS: u32 = 48;
}

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}", self.0)
    }
}

impl fmt::Display for SpaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}", self.0)
    }
}
