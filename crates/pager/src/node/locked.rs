//! A space of which pages were moved, or are to be: what its page map says of them, its
//! gate held.

use std::sync::MutexGuard;

use strata_policy::Level;
use strata_units::{LeafIndex, PageId};

use crate::map::address::address_of;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::page_map::Piece;
use crate::tenant::Tenant;
use crate::tenant::space::{Gate, Space};

/// A space with its gate held: what is looked up for a page holds
/// for its leaf, and neighbours come one after the other.
pub(super) struct LockedSpace<'a> {
    tenant: &'a Tenant,
    space: &'a Space,
    gate: MutexGuard<'a, Gate>,
    /// The newest leaf, and where it lies if it is the space's.
    leaf: Option<(LeafIndex, Option<Piece>)>,
    newcomer: Level,
}

impl<'a> LockedSpace<'a> {
    pub(super) fn open(tenant: &'a Tenant, space: &'a Space) -> Self {
        let newcomer = tenant.census().newcomer();
        Self { tenant, space, gate: lock(&space.gate), leaf: None, newcomer }
    }

    /// Where the page lies, if its leaf is the space's and the space knows it there.
    pub(super) fn address(&mut self, page: PageId) -> Option<u64> {
        let leaf = page.leaf();
        if self.leaf.is_none_or(|(newest, _)| newest != leaf) {
            let piece = self.tenant.map.owner(leaf).and_then(|(owner, piece)| {
                let known = || self.gate.object.leaf(piece) == Some(leaf);
                (owner == self.space.id && known()).then_some(piece)
            });
            self.leaf = Some((leaf, piece));
        }
        let (_, piece) = self.leaf?;
        Some(address_of(piece?, page.index()))
    }

    /// Whether the program has it stay in DRAM.
    pub(super) fn is_pinned(&self, address: u64) -> bool {
        self.tenant.holds_pinned(&self.gate, address)
    }

    /// The page, whose entry was `entry`, is on the node now, or in DRAM; false: it
    /// has changed since.
    pub(super) fn settle(&self, page: PageId, entry: Entry, on_node: bool) -> bool {
        if on_node {
            self.tenant.went_to_node(page, entry, self.newcomer)
        } else {
            self.tenant.came_from_node(page)
        }
    }
}

/// Those of `pages` whose entries are as wanted, and that are where their leaf says,
/// with their addresses. What is pinned and in DRAM stays there.
pub(super) fn in_place(
    tenant: &Tenant,
    space: &Space,
    pages: &[PageId],
    wanted: impl Fn(Entry) -> bool,
) -> (Vec<PageId>, Vec<u64>) {
    let mut locked = LockedSpace::open(tenant, space);
    let found = pages.iter().filter_map(|&page| {
        let entry = tenant.map.get(page);
        let address = locked.address(page).filter(|_| wanted(entry))?;
        let stays = entry != Entry::OnNode && locked.is_pinned(address);
        (!stays).then_some((page, address))
    });
    found.unzip()
}
