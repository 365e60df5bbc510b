//! The page map of a space, copied while its process stands still: by many threads, for
//! nobody runs meanwhile.

use std::sync::atomic::Ordering;

use strata_sys::Range;
use strata_units::{Handle, LeafIndex, PAGES_PER_LEAF, PageId};

use super::Capture;
use crate::map::address::{add_run, address_of, one_page};
use crate::map::by_many::{self, by_many};
use crate::map::entry::Entry;
use crate::map::page_map::Piece;
use crate::map::page_set::Bits;
use crate::tenant::Tenant;
use crate::tenant::orders::{SnapshotError, failed};

const LEAVING: &str = "pages of it are on their way; try again";
/// Leaves that a thread takes at a time.
const PART: usize = 16;

/// A piece of the space, as it stands still.
pub(super) struct Seized {
    pub(super) piece: Piece,
    /// What the page map says of it.
    pub(super) leaf: Option<LeafIndex>,
    /// What the kernel says of it.
    pub(super) there: Bits,
}

/// What was copied of one.
#[derive(Default)]
struct LeafCopy {
    leaf: Option<LeafIndex>,
    pending: u64,
    unknown: u64,
    late: Vec<Range>,
}

impl Capture {
    /// Copies what the page map says of registered memory. Returns what came late, which is
    /// to be read.
    pub(super) fn copy_leaves(
        &mut self,
        tenant: &Tenant,
        pieces: &[Seized],
    ) -> Result<Vec<Range>, SnapshotError> {
        let parts: Vec<_> = pieces.chunks(PART).collect();
        let copy = |part: &&[Seized]| {
            let copied = part.iter().map(|seized| self.copy_leaf(tenant, seized));
            copied.collect::<Result<Vec<_>, _>>()
        };
        let copied = by_many(by_many::threads(), &parts, copy);
        let mut late = Vec::new();
        for (part, copies) in parts.iter().zip(copied) {
            for (seized, copy) in part.iter().zip(copies?) {
                if let Some(leaf) = copy.leaf {
                    self.object.insert(seized.piece, leaf);
                }
                self.pending += copy.pending;
                self.unknown += copy.unknown;
                late.extend(copy.late);
            }
        }
        Ok(late)
    }

    /// Copies one leaf. The kernel's page table has the last word: a page that is `there` is
    /// what the program sees, whatever the entry says (discarded and written again without
    /// a fault, or put in place a moment ago).
    ///
    /// Whoever waits for a page can be stopped before it comes, and the handler does
    /// not wait: what comes after the page table was read is not `there` and not
    /// protected. It is `late`.
    fn copy_leaf(&self, tenant: &Tenant, seized: &Seized) -> Result<LeafCopy, SnapshotError> {
        let &Seized { piece, leaf, there } = seized;
        let mut copied = LeafCopy::default();
        let known = self.clean.pages.of(piece);
        let [first, last] = [0, PAGES_PER_LEAF - 1].map(|index| address_of(piece, index));
        let is_all_wanted = self.wanted.contains(first) && self.wanted.contains(last);
        if is_all_wanted && there.is_full() {
            return self.copy_whole(tenant, seized, known);
        }
        if let Some(leaf) = leaf {
            tenant.prefetch_counts(leaf);
        }
        for index in 0..PAGES_PER_LEAF {
            if !is_all_wanted && !self.wanted.contains(address_of(piece, index)) {
                continue;
            }
            let from = leaf.map(|leaf| PageId::new(leaf, index));
            let entry = from.map_or(Entry::Untouched, |from| tenant.map.get(from));
            let is_there = there.has(index);
            let copy = match entry {
                Entry::Leaving { .. } => {
                    return Err(failed(LEAVING));
                }
                _ if is_there => Entry::Pending,
                Entry::Stored(handle) => {
                    tenant.store.retain(handle);
                    entry
                }
                Entry::Arriving(handle) if retains_arriving(tenant, from, handle) => {
                    Entry::Stored(handle)
                }
                Entry::Lost | Entry::Pending | Entry::Copied => Entry::Lost,
                Entry::Untouched | Entry::Discarded => continue,
                Entry::Arriving(_) | Entry::Resident { .. } | Entry::Kept(_) | Entry::OnNode => {
                    add_run(&mut copied.late, one_page(address_of(piece, index)));
                    continue;
                }
            };
            let target = match copied.leaf {
                Some(target) => target,
                None => *copied.leaf.insert(self.new_leaf(tenant, piece)?),
            };
            let page = PageId::new(target, index);
            if copy == Entry::Pending {
                copied.pending += 1;
                copied.unknown += u64::from(!known.has(index));
            }
            if let Some(from) = from {
                let age = tenant.map.age(from).load(Ordering::Relaxed);
                tenant.map.age(page).store(age, Ordering::Relaxed);
            }
            tenant.map.set(page, copy);
        }
        Ok(copied)
    }

    /// Copies one leaf all of whose pages are there: most are of a guest that has its DRAM.
    fn copy_whole(
        &self,
        tenant: &Tenant,
        &Seized { piece, leaf: from, .. }: &Seized,
        known: Bits,
    ) -> Result<LeafCopy, SnapshotError> {
        if from.is_some_and(|from| tenant.map.has_leaving(from)) {
            return Err(failed(LEAVING));
        }
        let leaf = self.new_leaf(tenant, piece)?;
        tenant.map.set_pending(leaf, from);
        let pending = PAGES_PER_LEAF as u64;
        let unknown = pending - known.count() as u64;
        Ok(LeafCopy { leaf: Some(leaf), pending, unknown, late: Vec::new() })
    }
}

/// Takes a reference to what the handler is just putting in place, which gives its
/// own up when it has. False: it has done so. Nobody else changes the entry while the
/// gate is held, so if it is what it was, it was this page's reference all the time.
fn retains_arriving(tenant: &Tenant, page: Option<PageId>, handle: Handle) -> bool {
    if !tenant.store.try_retain(handle) {
        return false;
    }
    let is_it = page.is_some_and(|page| tenant.map.get(page) == Entry::Arriving(handle));
    if !is_it {
        tenant.store.release(handle);
    }
    is_it
}
