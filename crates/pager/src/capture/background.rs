//! Pages that are pending are captured by the keeper, while the program runs.

use std::sync::Arc;

use strata_store::Put;
use strata_sys::{Fill, Range};
use strata_units::{Handle, LeafIndex, PAGE, PAGE_SIZE, PAGES_PER_LEAF, PageId};

use super::{RUN_PAGES, What};
use crate::map::address::address_of;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::page_map::Piece;
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// Pages read for one space in one round of the keeper, and how many leaves are
/// looked at: about as much work, if the snapshot before has all of it.
const READ_PER_ROUND: usize = 2 * PAGES_PER_LEAF;
/// Pages read where faults wait for what is evicted.
const READ_BESIDE_EVICTION: usize = PAGES_PER_LEAF / 4;
const LEAVES_PER_ROUND: usize = 64;
/// Copies taken under one hold of the gate.
const COPIED_AT_ONCE: usize = 64;

/// Pages that the keeper reads before it looks after its tenant's budget again.
fn most_at_once(tenant: &Tenant) -> usize {
    if tenant.is_short() { READ_BESIDE_EVICTION } else { READ_PER_ROUND }
}

impl Space {
    /// Stores some of what was copied. Returns how many pages that was.
    fn store_copied(&self, tenant: &Tenant, how: Put, buffer: &mut [u8]) -> usize {
        let mut count = 0;
        while count < most_at_once(tenant) {
            let part = &mut buffer[..COPIED_AT_ONCE * PAGE_SIZE];
            let pages = match lock(&self.gate).capture.as_mut() {
                Some(capture) => capture.copied.take(part),
                None => break,
            };
            if pages.is_empty() {
                break;
            }
            count += pages.len();
            let bytes = part.chunks_exact(PAGE_SIZE);
            let stored: Vec<_> = bytes
                .take(pages.len())
                .map(|page| tenant.store.put(page.try_into().expect("whole pages"), how).ok())
                .collect();
            let mut gate = lock(&self.gate);
            let Some(capture) = gate.capture.as_mut() else { break };
            for (page, handle) in pages.into_iter().zip(stored) {
                match handle {
                    Some(handle) => capture.settle(&tenant.map, page, Entry::Stored(handle)),
                    // The store is full, and there is no other copy.
                    None => capture.torn = true,
                }
            }
        }
        count
    }

    /// Captures some of what is pending. Returns how many pages that was.
    pub(crate) fn capture_some(&self, tenant: &Tenant, how: Put, buffer: &mut [u8]) -> usize {
        let stored = self.store_copied(tenant, how, buffer);
        stored + self.capture_leaves(tenant, how, What::Everything, buffer)
    }

    /// Captures some of what the snapshot before does not have: nothing else can be
    /// lost. Nobody runs. Returns whether there is none left.
    pub(crate) fn capture_unknown(&self, tenant: &Tenant, how: Put, buffer: &mut [u8]) -> bool {
        self.capture_leaves(tenant, how, What::Unknown, buffer);
        lock(&self.gate)
            .capture
            .as_mut()
            .is_none_or(|capture| capture.next_leaf(&tenant.map, What::Unknown).is_none())
    }

    fn capture_leaves(&self, tenant: &Tenant, how: Put, what: What, buffer: &mut [u8]) -> usize {
        let (mut known, mut captured) = (0, 0);
        for _ in 0..LEAVES_PER_ROUND {
            if captured >= most_at_once(tenant) {
                break;
            }
            let Some((piece, leaf, of_leaf)) = self.next_to_capture(tenant, what) else { break };
            known += of_leaf;
            let mut index = 0;
            while index < PAGES_PER_LEAF && captured < most_at_once(tenant) {
                let is_pending =
                    |index: usize| tenant.map.get(PageId::new(leaf, index)) == Entry::Pending;
                if !is_pending(index) {
                    index += 1;
                    continue;
                }
                let end = (index + RUN_PAGES.min(most_at_once(tenant))).min(PAGES_PER_LEAF);
                let count = (index..end).take_while(|&index| is_pending(index)).count();
                captured += self.capture_run(tenant, how, (piece, leaf, index), count, buffer);
                index += count;
            }
        }
        known + captured
    }

    /// The next leaf of the snapshot in which something was pending, and how many
    /// pages of it the snapshot before had.
    fn next_to_capture(&self, tenant: &Tenant, what: What) -> Option<(Piece, LeafIndex, usize)> {
        let mut gate = lock(&self.gate);
        let capture = gate.capture.as_mut()?;
        let (piece, leaf) = capture.next_leaf(&tenant.map, what)?;
        Some((piece, leaf, capture.take_from_base(tenant, piece, leaf)))
    }

    /// Captures `count` pages from one on, all of them pending a moment ago.
    fn capture_run(
        &self,
        tenant: &Tenant,
        how: Put,
        (piece, leaf, first): (Piece, LeafIndex, usize),
        count: usize,
        buffer: &mut [u8],
    ) -> usize {
        let start = address_of(piece, first);
        let reader = {
            let gate = lock(&self.gate);
            gate.capture.as_ref().map(|capture| Arc::clone(&capture.pages))
        };
        let Some(reader) = reader else { return 0 };
        let buffer = &mut buffer[..count * PAGE_SIZE];
        let read = reader.read(start, buffer) / PAGE_SIZE;
        let mut stored: Vec<Option<Handle>> = buffer[..read * PAGE_SIZE]
            .chunks_exact(PAGE_SIZE)
            .map(|page| tenant.store.put(page.try_into().expect("whole pages"), how).ok())
            .collect();
        let store_full = stored.iter().any(Option::is_none);
        stored.resize(count, None);
        let mut gate = lock(&self.gate);
        // After the reading: see the module's text.
        let protected = reader.protected(start, count).unwrap_or_default();
        let mut captured = 0;
        for (offset, handle) in stored.into_iter().enumerate() {
            let address = start + offset as u64 * PAGE;
            let one = Range { start: address, end: address + PAGE };
            let page = PageId::new(leaf, first + offset);
            let live = gate.page(address).map(|page| (page, tenant.map.get(page)));
            let capture = gate.capture.as_mut();
            let capture = capture.filter(|_| tenant.map.get(page) == Entry::Pending);
            match (capture, handle) {
                (Some(capture), Some(handle)) if protected.get(offset) == Some(&true) => {
                    capture.settle(&tenant.map, page, Entry::Stored(handle));
                    captured += 1;
                }
                (_, Some(handle)) => tenant.store.release(handle),
                // Discarded before the freeze, and gone only now: it may have been
                // zero. The kernel takes no zero page where there is one, nor while
                // a message waits that might say otherwise.
                (Some(capture), None)
                    if live.is_some_and(|(_, entry)| {
                        entry.is_resident() || entry == Entry::Discarded
                    }) && matches!(self.uffd.zero(one), Fill::Done { .. }) =>
                {
                    capture.settle(&tenant.map, page, Entry::Untouched);
                    if let Some((id, Entry::Discarded)) = live {
                        tenant.now_resident(id);
                    }
                    captured += 1;
                }
                (Some(capture), None) => capture.torn |= store_full,
                (None, None) => {}
            }
        }
        captured
    }
}
