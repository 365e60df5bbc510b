//! Taking a snapshot of a tenant's memory.
//!
//! A snapshot of an address space is a page map without a process: leaves of the
//! tenant's page map, owned by a registry slot of its own. Evicted pages gain a
//! reference at the freeze. Pages in place are write-protected and *pending*:
//! captured in the background by the keeper, or by the handler when a thread is
//! about to write.
//!
//! ```text
//! arm      register, write-protect in bulk; the program runs
//! freeze   everything stands: what was written meanwhile is protected again,
//!          the page map is copied, memory that is not managed is read
//! thaw     the program runs on; pending pages are captured
//! whole    nothing is pending: the snapshot counts
//! ```
//! A pending page is captured if it was read, and *after that* seen to be there
//! and protected still: nobody but this module protects pages, and only at a
//! freeze, so it has not changed since. A page that the program discards while it
//! is pending tears the snapshot: the kernel says so too late to save it.

mod background;
pub(crate) mod clean;
mod freeze;
mod leaves;
pub(crate) mod pace;

#[cfg(test)]
pub(crate) mod capture_tests;
#[cfg(test)]
mod carry_tests;

pub(crate) use freeze::Seen;

use strata_store::Put;
use strata_sys::{Fill, Process, Range, Userfaultfd};
use strata_units::{Handle, LeafIndex, PAGE, PAGE_SIZE, PAGES_PER_LEAF, PageBuffer, PageId};

use crate::map::address::{add_run, address_of, ids_in, one_page, piece_at};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::page_map::{PageMap, Piece};
use crate::map::page_set::Bits;
use crate::tenant::Tenant;
use crate::tenant::capture::Capture;
use crate::tenant::space::{Gate, Leaving, Space};

/// Pages read at a time: what can be one huge page stays one.
pub(crate) const RUN_PAGES: usize = PAGES_PER_LEAF;
/// What is captured together when a thread writes to one page of it.
const BLOCK_PAGES: usize = 16;
const BLOCK_BYTES: u64 = BLOCK_PAGES as u64 * PAGE;
/// Pages of a block that are written one by one; then it loses its protection.
const WRITES_TO_FREE_BLOCK: usize = 3;
/// The same where what is written is wanted page by page: marks are then twice what was
/// written, at most.
const WRITES_TO_FREE_PRECISE: usize = BLOCK_PAGES / 2;

/// How a page leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leaves {
    Alone,
    /// A snapshot waits for it, and has it as well when it is stored.
    WithSnapshot,
}

/// Of what is pending.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Everything,
    /// What the snapshot before does not have.
    Unknown,
}

impl Gate {
    /// Whether the page at `address` is write-protected and not captured yet.
    pub(crate) fn is_pending(&self, map: &PageMap, address: u64) -> bool {
        self.capture.as_ref().is_some_and(|capture| capture.pending_at(map, address).is_some())
    }

    /// Whether the page at `address` may leave: it is nothing that is pending, or a
    /// page that is protected still. What it is by then is captured with it.
    pub(crate) fn may_leave(&mut self, tenant: &Tenant, address: u64) -> Option<Leaves> {
        let Some(capture) = self.capture.as_mut() else { return Some(Leaves::Alone) };
        let piece = piece_at(address);
        if let Some(leaf) = capture.object.leaf(piece) {
            capture.take_from_base(tenant, piece, leaf);
        }
        if capture.pending_at(&tenant.map, address).is_none() {
            return Some(Leaves::Alone);
        }
        let protected = capture.pages.protected(address, 1).is_ok_and(|found| found[0]);
        protected.then_some(Leaves::WithSnapshot)
    }

    /// A page has left `slot`, and was at `address`: the snapshot that waits for it
    /// has it, too. None: there was nothing left of it.
    pub(crate) fn captured_by_leaving(
        &mut self,
        tenant: &Tenant,
        slot: usize,
        address: u64,
        handle: Option<Handle>,
    ) {
        let Some(capture) = self.capture.as_mut() else { return };
        let Some(page) = capture.pending_at(&tenant.map, address) else { return };
        if !self.of_freeze[slot] {
            return capture.tear(&tenant.map, page);
        }
        let entry = handle.map_or(Entry::Untouched, |handle| {
            tenant.store.retain(handle);
            Entry::Stored(handle)
        });
        capture.settle(&tenant.map, page, entry);
    }

    /// Puts what was leaving through `slot` back in place, as `content`, or leaves it to what
    /// the program has there already.
    ///
    /// # Errors
    /// It cannot be just now: it is in its slot still.
    pub(crate) fn put_back(
        &mut self,
        tenant: &Tenant,
        uffd: &Userfaultfd,
        (slot, leaving): (usize, Leaving),
        content: &PageBuffer,
    ) -> Result<(), Fill> {
        match uffd.copy(leaving.address, content) {
            Fill::Done { .. } => {}
            Fill::Present => uffd.wake(one_page(leaving.address)),
            other => return Err(other),
        }
        self.slots[slot] = 0;
        self.put_back_unprotected(tenant, leaving.address);
        tenant.map.set(leaving.page, Entry::Resident { shared: false });
        Ok(())
    }

    /// A page was put back to `address`, where nothing protects it: too late, if it
    /// is pending.
    fn put_back_unprotected(&mut self, tenant: &Tenant, address: u64) {
        let Some(capture) = &mut self.capture else { return };
        if let Some(page) = capture.pending_at(&tenant.map, address) {
            capture.tear(&tenant.map, page);
        }
    }

    /// The program gives `range` back, or has moved it: what is pending there and still
    /// in place is captured now. What is not cannot be captured any more.
    pub(crate) fn tear_capture(&mut self, tenant: &Tenant, range: Range) {
        let Some(capture) = &mut self.capture else { return };
        if capture.pending == 0 {
            return;
        }
        let leaves: Vec<(Piece, LeafIndex)> = capture.object.leaves_in(range).collect();
        // Whoever discards goes on since its message was read, but must wake first.
        let starts = leaves.iter().flat_map(|&(piece, _)| {
            (0..PAGES_PER_LEAF).step_by(BLOCK_PAGES).map(move |index| address_of(piece, index))
        });
        let blocks = starts.map(|start| Range {
            start: start.max(range.start),
            end: (start + BLOCK_BYTES).min(range.end),
        });
        for block in blocks.filter(|block| block.start < block.end) {
            capture.capture_block(tenant, block);
            if !capture.pending_runs(tenant, block).is_empty() {
                break;
            }
        }
        for (piece, leaf) in leaves {
            capture.take_from_base(tenant, piece, leaf);
            for index in 0..PAGES_PER_LEAF {
                let page = PageId::new(leaf, index);
                if range.contains(address_of(piece, index))
                    && tenant.map.get(page) == Entry::Pending
                {
                    capture.tear(&tenant.map, page);
                }
            }
        }
    }
}

impl Capture {
    /// The snapshot's page that waits for what is at `address`.
    fn pending_at(&self, map: &PageMap, address: u64) -> Option<PageId> {
        if self.pending == 0 {
            return None;
        }
        let page = self.object.page(address)?;
        (map.get(page) == Entry::Pending).then_some(page)
    }

    /// Captures what is pending in a block, there and protected.
    fn capture_block(&mut self, tenant: &Tenant, block: Range) {
        let piece = piece_at(block.start);
        let Some(leaf) = self.object.leaf(piece) else { return };
        self.take_from_base(tenant, piece, leaf);
        for run in self.pending_runs(tenant, block) {
            let count = run.len() as usize / PAGE_SIZE;
            if tenant.headroom_pages() < count as i64 || !self.copy_run(tenant, leaf, run) {
                self.store_run(tenant, leaf, run);
            }
        }
    }

    /// Copies a run of pending pages, for the keeper to store. False: no memory.
    fn copy_run(&mut self, tenant: &Tenant, leaf: LeafIndex, run: Range) -> bool {
        let pages = &self.pages;
        let mut count = 0;
        let added = self.copied.add(run.len() as usize / PAGE_SIZE, |room| {
            let read = read_protected(pages, run.start, room).into_iter();
            let copied = ids_in(leaf, run).zip(read).map(|((_, page), good)| good.then_some(page));
            copied
                .inspect(|page| {
                    if let Some(page) = page {
                        tenant.map.set(*page, Entry::Copied);
                        count += 1;
                    }
                })
                .collect()
        });
        // Until the keeper measures.
        tenant.account.copies_take(count);
        added.is_some()
    }

    /// Stores a run of pending pages.
    fn store_run(&mut self, tenant: &Tenant, leaf: LeafIndex, run: Range) {
        let mut buffer = std::mem::take(&mut self.block);
        let room = &mut buffer[..run.len() as usize];
        let read = read_protected(&self.pages, run.start, room);
        let pages = room.chunks_exact(PAGE_SIZE).zip(read);
        for ((_, page), (bytes, good)) in ids_in(leaf, run).zip(pages) {
            if good
                && let Ok(handle) =
                    tenant.store.put(bytes.try_into().expect("whole pages"), Put::Fast)
            {
                self.settle(&tenant.map, page, Entry::Stored(handle));
            }
        }
        self.block = buffer;
    }

    /// The parts of a block that are pending.
    fn pending_runs(&self, tenant: &Tenant, block: Range) -> Vec<Range> {
        let piece = piece_at(block.start);
        let Some(leaf) = self.object.leaf(piece) else { return Vec::new() };
        let mut runs: Vec<Range> = Vec::new();
        for (address, page) in ids_in(leaf, block) {
            if tenant.map.get(page) != Entry::Pending {
                continue;
            }
            add_run(&mut runs, one_page(address));
        }
        runs
    }

    /// The next leaf in which `what` is pending.
    fn next_leaf(&mut self, map: &PageMap, what: What) -> Option<(Piece, LeafIndex)> {
        if self.pending == 0 {
            return None;
        }
        let waits = |piece: Piece, leaf: LeafIndex| {
            let known = match what {
                What::Everything => Bits::default(),
                What::Unknown => self.clean.pages.of(piece),
            };
            (0..PAGES_PER_LEAF).any(|index| {
                !known.has(index) && map.get(PageId::new(leaf, index)) == Entry::Pending
            })
        };
        let before = self.object.leaves().take_while(|&(piece, _)| piece < self.next);
        let mut all = self.object.leaves_from(self.next).chain(before);
        let (piece, leaf) = all.find(|&(piece, leaf)| waits(piece, leaf))?;
        drop(all);
        self.next = piece + 1;
        Some((piece, leaf))
    }

    /// A pending page cannot be captured any more.
    fn tear(&mut self, map: &PageMap, page: PageId) {
        self.settle(map, page, Entry::Untouched);
        self.torn = true;
    }

    /// A pending page is captured: it is `entry`.
    pub(crate) fn settle(&mut self, map: &PageMap, page: PageId, entry: Entry) {
        map.set(page, entry);
        self.pending -= 1;
    }
}

/// Reads pages from `address` on; which of them are what they were when they were
/// protected.
pub(crate) fn read_protected(pages: &Process, address: u64, buffer: &mut [u8]) -> Vec<bool> {
    let count = buffer.len() / PAGE_SIZE;
    let mut read = vec![true; count];
    let mut next = 0;
    while next < count {
        let rest = &mut buffer[next * PAGE_SIZE..];
        next += pages.read(address + (next * PAGE_SIZE) as u64, rest) / PAGE_SIZE;
        // One that is on its way out is not there any more; those behind it are.
        if let Some(read) = read.get_mut(next) {
            *read = false;
            next += 1;
        }
    }
    // After the reading: see the module's text.
    let protected = pages.protected(address, count).unwrap_or_else(|_| vec![false; count]);
    read.into_iter().zip(protected).map(|(read, protected)| read && protected).collect()
}

impl Space {
    /// A thread waits to write to the page at `address`, which is protected:
    /// captures it if it is pending, and lets the thread go on. False: not now.
    /// The caller holds the gate.
    ///
    /// While the snapshot is captured its neighbours are captured with it, and lose
    /// their protection: they are likely to be next, and reading them costs less than
    /// another fault. After that only the page does, so that the next snapshot reads
    /// little of a program that writes here and there; until so many of its block
    /// were written that faults cost more. Where what is written is wanted page by page,
    /// it is so from the beginning.
    pub(crate) fn before_write(&self, tenant: &Tenant, gate: &mut Gate, address: u64) -> bool {
        let one = Range { start: address, end: address + PAGE };
        let start = address / BLOCK_BYTES * BLOCK_BYTES;
        let mut block = Range { start, end: start + BLOCK_BYTES };
        let most = if gate.is_precise { WRITES_TO_FREE_PRECISE } else { WRITES_TO_FREE_BLOCK };
        let is_alone =
            (gate.is_precise || gate.capture.is_none()) && gate.written.count(block) < most;
        let mut pending = Vec::new();
        if let Some(capture) = gate.capture.as_mut().filter(|capture| capture.pending > 0) {
            // Without room for copies the thread waits until each page is packed.
            if is_alone || tenant.headroom_pages() < BLOCK_PAGES as i64 {
                block = one;
            }
            capture.capture_block(tenant, block);
            pending = capture.pending_runs(tenant, block);
            if pending.iter().any(|run| run.contains(address)) {
                if !capture.pages.protected(address, 1).is_ok_and(|found| found[0]) {
                    // It is not the page that the thread was about to write to any
                    // more: it looks again.
                    self.uffd.wake(one);
                    return true;
                }
                capture.torn = true;
                pending.clear();
            }
        }
        if is_alone {
            gate.written.insert(one);
            return self.let_write(one);
        }
        let mut start = block.start;
        let end = Range { start: block.end, end: block.end };
        let mut done = false;
        for run in pending.into_iter().chain([end]) {
            let part = Range { start, end: run.start };
            if !part.is_empty() {
                // If not now, then by whoever writes there first.
                let filled = self.uffd.unprotect(part);
                done |= part.contains(address) && matches!(filled, Fill::Done { .. });
            }
            start = run.end;
        }
        // The block need not be all one mapping.
        done || self.let_write(one)
    }

    /// Takes the protection off one page. False: not now.
    fn let_write(&self, one: Range) -> bool {
        match self.uffd.unprotect(one) {
            Fill::Done { .. } => true,
            Fill::Changing => false,
            _ => {
                self.uffd.wake(one);
                true
            }
        }
    }

    /// What is pending, and whether it is torn. None: nothing is captured here
    /// any more.
    pub(crate) fn capture_state(&self) -> Option<(u64, bool)> {
        lock(&self.gate).capture.as_ref().map(|capture| (capture.pending, capture.torn))
    }

    /// How many of its pages have to be read for the snapshot, as of the freeze.
    pub(crate) fn unknown_pages(&self) -> u64 {
        lock(&self.gate).capture.as_ref().map_or(0, |capture| capture.unknown)
    }
}
