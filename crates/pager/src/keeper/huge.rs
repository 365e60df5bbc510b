//! Huge pages on their way to the node. `move_pages` moves a huge page as a whole,
//! whichever of its pages was meant: hot ones would go along with cold ones, and the
//! account would not know. So of each 2 MiB one page is evicted first, which divides the
//! huge page that may be there (`UFFDIO_MOVE` takes small pages out of it). As long as
//! one is out, khugepaged does not put the others together again: it leaves gaps in a
//! userfaultfd's memory alone. What goes as a whole stays one.
//!
//! Huge pages that are mapped as such are told by the kernel. Those that are not (a
//! mapping begins or ends in the middle of them) are not: hence one page of every 2 MiB,
//! once.

use std::sync::Arc;

use strata_sys::{ProcessPages, Range};
use strata_units::{LeafIndex, PAGES_PER_LEAF, PageId};

use super::Keeper;
use crate::entry::Entry;
use crate::events::address_of;
use crate::space::Space;

/// Pages that are to move to the node one by one.
#[derive(Debug, Default)]
pub(super) struct Divided {
    /// So many left for the store instead.
    pub(super) evicted: usize,
    /// These can.
    pub(super) single: Vec<PageId>,
    /// These are parts of huge pages that could not be divided now.
    pub(super) whole: Vec<PageId>,
}

impl Keeper<'_> {
    /// Divides what huge pages `pages` are parts of; in order, all of `space`.
    pub(super) fn divide_huge(
        &mut self,
        space: &Arc<Space>,
        pages: Vec<PageId>,
        spaces: &[Arc<Space>],
    ) -> Divided {
        let tenant = self.tenant;
        let Some(looked) = space.agent().and_then(|agent| ProcessPages::open(agent.pid).ok())
        else {
            // It has ended: nothing will move.
            return Divided { single: pages, ..Divided::default() };
        };
        let known = self.node.as_ref().map(|node| &node.divided);
        let is_divided = |leaf: LeafIndex| {
            let piece = tenant.map.owner(leaf).map(|(_, piece)| piece);
            let range = piece.map(|piece| Range {
                start: address_of(piece, 0),
                end: address_of(piece, PAGES_PER_LEAF),
            });
            known.is_some_and(|known| known.contains(&leaf))
                && !range.is_some_and(|range| looked.has_huge(range).is_ok_and(|has| has))
        };
        // What has changed since it was chosen divides nothing.
        let mut pages = pages;
        pages.retain(|&page| tenant.map.get(page).is_own_dram());
        let parts = pages.chunk_by(|one, next| one.leaf() == next.leaf());
        let mut huge: Vec<PageId> = parts
            .filter(|part| part.len() < PAGES_PER_LEAF && !is_divided(part[0].leaf()))
            .map(|part| part[0])
            .collect();
        if huge.is_empty() {
            return Divided { single: pages, ..Divided::default() };
        }
        let evicted = self.evict_pages(huge.clone(), spaces);
        // An agent that is late has not moved it yet.
        huge.retain(|&page| {
            let left = matches!(tenant.map.get(page), Entry::Stored(_));
            if let Some(node) = self.node.as_mut().filter(|_| left) {
                node.divided.insert(page.leaf());
            }
            !left
        });
        let in_huge = |page: &PageId| huge.iter().any(|one| one.leaf() == page.leaf());
        let there = pages.into_iter().filter(|&page| tenant.map.get(page).is_own_dram());
        let (whole, single) = there.partition(in_huge);
        Divided { evicted, single, whole }
    }
}
