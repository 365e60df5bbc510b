//! What a snapshot takes from the one before it instead of reading it again.
//!
//! Pages stay write-protected after they were captured, until they are written
//! to. So a page that is still protected when the next snapshot is armed has the
//! content that the last one, the *base*, has for its address, if it was not
//! moved there since:
//!
//! ```text
//! freeze      base gone                    everything is protected from here on
//! whole, or   base = this snapshot; a torn one has what could be captured
//! torn
//! arm         base → clean                 what is protected is noted, and the
//!                                          rest protected, the gate held: no
//!                                          thread's write is let through between
//! freeze      less what is unprotected     written, discarded or evicted since
//!             less what was moved to       another page's protection
//! capturing   the base's handle            instead of reading the page
//! ```
//! A base is never found again once it was given up: an attempt that fails, and a
//! worker that dies, leave pages protected that were written before.

use strata_sys::Range;
use strata_units::{LeafIndex, PageId};

use crate::map::address::EVERYTHING;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::page_map::Piece;
use crate::map::page_set::Bits;
use crate::map::registry::Registry;
use crate::tenant::Tenant;
use crate::tenant::capture::{Base, Capture, CleanPages};
use crate::tenant::space::Gate;

/// More places to which memory was moved are taken for everywhere.
const MOST_MOVED: usize = 1024;

impl Gate {
    /// The snapshot is whole: the next one can build on it.
    pub(crate) fn end_capture(&mut self, registry: &Registry) -> Option<Capture> {
        let capture = self.capture.take()?;
        let snapshot = capture.object.id();
        self.base = Some(Base { snapshot, serial: registry.serial_of(snapshot) });
        Some(capture)
    }

    /// `mremap` moved pages to `range`, and their protection with them.
    pub(crate) fn note_moved(&mut self, range: Range) {
        if self.moved.len() == MOST_MOVED {
            self.moved = vec![EVERYTHING];
        }
        self.moved.push(range);
    }

    /// Everything stands still; of what was noted when the snapshot was armed,
    /// that which still holds. `unprotected` are the pages that are not protected.
    pub(crate) fn take_clean(&mut self, unprotected: &[Range]) -> CleanPages {
        let mut clean = std::mem::take(&mut self.clean);
        for &range in self.moved.iter().chain(unprotected) {
            clean.pages.remove(range);
        }
        self.moved.clear();
        clean
    }
}

impl Capture {
    /// Captures what of one leaf was not written since the base; how many pages
    /// that was. The others have to be read.
    pub(crate) fn take_from_base(
        &mut self,
        tenant: &Tenant,
        piece: Piece,
        leaf: LeafIndex,
    ) -> usize {
        let bits: Bits = self.clean.pages.take(piece);
        let Some(base) = self.clean.base.filter(|_| bits != Bits::default()) else { return 0 };
        // Held: nobody removes the base before its pages are this snapshot's too.
        let snapshots = lock(&tenant.snapshots);
        if tenant.registry.serial_of(base.snapshot) != base.serial {
            return 0;
        }
        let object = snapshots.get(&base.snapshot);
        let Some(base) = object.and_then(|object| object.leaf(piece)) else { return 0 };
        let mut taken = 0;
        for index in bits.each() {
            let page = PageId::new(leaf, index);
            if tenant.map.get(page) == Entry::Pending
                && let Entry::Stored(handle) = tenant.map.get(PageId::new(base, index))
            {
                tenant.store.retain(handle);
                self.settle(&tenant.map, page, Entry::Stored(handle));
                taken += 1;
            }
        }
        self.from_base += taken as u64;
        taken
    }
}
