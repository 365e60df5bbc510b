//! Pages that are pending are captured by the keeper, while the program runs.

use std::sync::Arc;

use strata_store::Put;
use strata_sys::{Fill, Process, Range};
use strata_units::{Handle, LeafIndex, PAGE, PAGE_SIZE, PAGES_PER_LEAF, PageId};

use super::{RUN_PAGES, What, read_protected};
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

/// What is done with pages that were read.
enum Into<'a> {
    Store(Put),
    /// Whoever takes them elsewhere says whether to go on.
    Carried(&'a mut dyn FnMut(u64, &[u8]) -> bool),
}

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
        let captured = self.capture_leaves(tenant, &mut Into::Store(how), What::Everything, buffer);
        stored + captured.unwrap_or_default()
    }

    /// The same while nobody runs; `each` gets what the snapshot before does not have, from
    /// an address on, and says whether to go on. None: it has said no.
    pub(crate) fn carry_some(
        &self,
        tenant: &Tenant,
        each: &mut dyn FnMut(u64, &[u8]) -> bool,
        buffer: &mut [u8],
    ) -> Option<usize> {
        let stored = self.store_copied(tenant, Put::Fast, buffer);
        let carried =
            self.capture_leaves(tenant, &mut Into::Carried(each), What::Everything, buffer);
        carried.map(|carried| stored + carried)
    }

    /// Captures some of what the snapshot before does not have: nothing else can be
    /// lost. Nobody runs. Returns whether there is none left.
    pub(crate) fn capture_unknown(&self, tenant: &Tenant, how: Put, buffer: &mut [u8]) -> bool {
        self.capture_leaves(tenant, &mut Into::Store(how), What::Unknown, buffer);
        lock(&self.gate)
            .capture
            .as_mut()
            .is_none_or(|capture| capture.next_leaf(&tenant.map, What::Unknown).is_none())
    }

    /// None: whoever takes the pages wants no more.
    fn capture_leaves(
        &self,
        tenant: &Tenant,
        into: &mut Into<'_>,
        what: What,
        buffer: &mut [u8],
    ) -> Option<usize> {
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
                let run = (piece, leaf, index);
                captured += match into {
                    Into::Store(how) => self.capture_run(tenant, *how, run, count, buffer),
                    Into::Carried(each) => self.carry_run(tenant, *each, run, count, buffer)?,
                };
                index += count;
            }
        }
        Some(known + captured)
    }

    /// The next leaf of the snapshot in which something was pending, and how many
    /// pages of it the snapshot before had.
    fn next_to_capture(&self, tenant: &Tenant, what: What) -> Option<(Piece, LeafIndex, usize)> {
        let mut gate = lock(&self.gate);
        let capture = gate.capture.as_mut()?;
        let (piece, leaf) = capture.next_leaf(&tenant.map, what)?;
        Some((piece, leaf, capture.take_from_base(tenant, piece, leaf)))
    }

    fn reader(&self) -> Option<Arc<Process>> {
        lock(&self.gate).capture.as_ref().map(|capture| Arc::clone(&capture.pages))
    }

    /// Carries what of `count` pages from one on is pending, there and protected; the rest
    /// is captured as always.
    fn carry_run(
        &self,
        tenant: &Tenant,
        each: &mut dyn FnMut(u64, &[u8]) -> bool,
        (piece, leaf, first): (Piece, LeafIndex, usize),
        count: usize,
        buffer: &mut [u8],
    ) -> Option<usize> {
        let start = address_of(piece, first);
        let Some(reader) = self.reader() else { return Some(0) };
        let room = &mut buffer[..count * PAGE_SIZE];
        let mut good = read_protected(&reader, start, room);
        let mut gate = lock(&self.gate);
        let Some(capture) = gate.capture.as_mut() else { return Some(0) };
        for (offset, good) in good.iter_mut().enumerate() {
            let page = PageId::new(leaf, first + offset);
            // Nobody gives it back meanwhile: what was protected is so still, or pending no
            // more.
            *good &= tenant.map.get(page) == Entry::Pending;
            if *good {
                capture.settle(&tenant.map, page, Entry::Lost);
            }
        }
        drop(gate);
        let mut carried = 0;
        while carried < count {
            let is_good = good[carried];
            let end = (carried..count).find(|&at| good[at] != is_good).unwrap_or(count);
            let address = start + (carried * PAGE_SIZE) as u64;
            if is_good && !each(address, &buffer[carried * PAGE_SIZE..end * PAGE_SIZE]) {
                return None;
            }
            carried = end;
        }
        let left = good.iter().filter(|good| !**good).count();
        let mut captured = count - left;
        if left > 0 {
            captured += self.capture_run(tenant, Put::Fast, (piece, leaf, first), count, buffer);
        }
        Some(captured)
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
        let Some(reader) = self.reader() else { return 0 };
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
            let live = gate.object.page(address).map(|page| (page, tenant.map.get(page)));
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
