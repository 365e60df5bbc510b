//! The moment of a snapshot: what is done before everything stands, and while it
//! does.

use std::collections::BTreeSet;
use std::sync::Arc;

use strata_store::Put;
use strata_sys::{Fill, Mapping, Process, Range, Registration};
use strata_units::{LeafIndex, PAGE_SIZE, PageId, PageNumber, SpaceId};

use super::leaves::Seized;
use super::{BLOCK_BYTES, Capture, RUN_PAGES};
use crate::map::address::{add_run, piece_of};
use crate::map::by_many::{self, by_many};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::object::Object;
use crate::map::page_map::Piece;
use crate::map::page_set::PageSet;
use crate::tenant::Tenant;
use crate::tenant::capture::CleanPages;
use crate::tenant::copied::Copied;
use crate::tenant::excluded::Excluded;
use crate::tenant::orders::{SnapshotError, failed, restless};
use crate::tenant::space::Space;

/// Looked at and protected under one hold of the gate.
const ARMED_AT_ONCE: u64 = 64 << 20;
const FULL: &str = "its page map is full";
/// Of what stands still a thread looks at so much at a time.
const SCANNED_AT_ONCE: u64 = 128 << 20;

/// A process that stands still.
pub(crate) struct Seen<'a> {
    pub(crate) process: &'a Arc<Process>,
    pub(crate) maps: &'a [Mapping],
    pub(crate) excluded: &'a Excluded,
}

fn both(a: Range, b: Range) -> Range {
    let start = a.start.max(b.start);
    Range { start, end: a.end.min(b.end).max(start) }
}

impl Space {
    /// Registers everything eligible and write-protects it, while the program
    /// runs: the freeze finds little left to protect. Returns for how many leaves
    /// its copy of the page map needs memory. Only of `part`.
    pub(crate) fn arm(
        &self,
        process: &Process,
        part: Range,
        excluded: &Excluded,
    ) -> Result<usize, SnapshotError> {
        let (registered, mut pieces): (Vec<Range>, BTreeSet<Piece>) = {
            let mut gate = lock(&self.gate);
            gate.clean = CleanPages { base: gate.base.take(), pages: PageSet::default() };
            let pieces = gate.object.leaves_in(part).map(|(piece, _)| piece).collect();
            (gate.registered_in(part).collect(), pieces)
        };
        for range in registered {
            match self.uffd.register_protectable(range) {
                Registration::Done => {}
                Registration::Gone => return Err(restless("a process ended meanwhile")),
                // Changed since: the freeze looks again.
                Registration::Refused => continue,
            }
            for part in excluded.spared(range) {
                for start in (part.start..part.end).step_by(ARMED_AT_ONCE as usize) {
                    let end = part.end.min(start + ARMED_AT_ONCE);
                    self.arm_part(process, Range { start, end }, &mut pieces)?;
                }
            }
        }
        Ok(pieces.len())
    }

    /// Notes what of `part` is protected, and protects the rest. One hold of the
    /// gate: who writes to a protected page waits for whoever gets it next. Adds
    /// where there are pages to `pieces`.
    fn arm_part(
        &self,
        process: &Process,
        part: Range,
        pieces: &mut BTreeSet<Piece>,
    ) -> Result<(), SnapshotError> {
        let mut gate = lock(&self.gate);
        let clean = &mut gate.clean;
        let note = |found: Range, protected: bool| {
            let [first, last] = [found.start, found.end - 1].map(PageNumber::containing);
            pieces.extend(piece_of(first)..=piece_of(last));
            if protected && clean.base.is_some() {
                clean.pages.insert(found);
            }
        };
        process.protection(part, note).map_err(failed)?;
        // Whatever is not protected now is at the freeze.
        self.uffd.protect(part);
        Ok(())
    }

    /// Copies the page map of `wanted` of this space, whose process stands still, into
    /// the slot `snapshot`.
    pub(crate) fn freeze(
        &self,
        tenant: &Tenant,
        snapshot: SpaceId,
        wanted: Range,
        seen: &Seen<'_>,
        buffer: &mut [u8],
    ) -> Result<(), SnapshotError> {
        let &Seen { process, maps, excluded } = seen;
        // Whoever asked for a snapshot has looked before; it may be new.
        if maps.iter().any(|mapping| mapping.aio_ring) {
            return Err(failed("it has requests of asynchronous I/O under way"));
        }
        let pages = Arc::clone(process);
        let mut gate = lock(&self.gate);
        let mut capture = Capture {
            object: Object::new(snapshot),
            wanted,
            pages,
            pending: 0,
            unknown: 0,
            torn: false,
            clean: CleanPages::default(),
            from_base: 0,
            copied: Copied::default(),
            block: vec![0; BLOCK_BYTES as usize],
            next: 0,
        };
        let registered: Vec<Range> = gate.registered_in(wanted).collect();
        for &range in &registered {
            if self.uffd.register_protectable(range) != Registration::Done {
                return Err(failed("its memory cannot be write-protected"));
            }
        }
        let (mut present, unprotected) = scan(process, &registered)?;
        gate.written = PageSet::default();
        capture.clean = gate.take_clean(&unprotected);
        for part in unprotected.iter().flat_map(|&range| excluded.spared(range)) {
            match self.uffd.protect(part) {
                Fill::Done { .. } => {}
                // A thread of it that runs, as a QEMU's do, discards memory just now, which
                // is heard when the gate is free.
                Fill::Changing => return Err(SnapshotError::Torn),
                other => {
                    return Err(failed(format!("its memory cannot be write-protected: {other:?}")));
                }
            }
        }
        // Protected pages are captured later; all others now.
        let mut pieces: Vec<Seized> = gate
            .object
            .leaves_in(wanted)
            .map(|(piece, leaf)| Seized { piece, leaf: Some(leaf), there: present.take(piece) })
            .collect();
        let others = present.pieces();
        pieces.extend(others.map(|piece| Seized { piece, leaf: None, there: present.of(piece) }));
        let mut now = capture.copy_leaves(tenant, &pieces)?;
        for mapping in maps.iter().filter(|mapping| mapping.private && mapping.fileless) {
            now.extend(gate.unregistered(both(mapping.range, wanted)));
        }
        now.extend(registered.iter().flat_map(|&range| excluded.within(range)));
        if let Some(agent) = self.agent() {
            // It is empty, and who reads it is told so.
            let Range { start, end } = agent.ranges.transfer;
            now = now
                .into_iter()
                .flat_map(|range| {
                    let before = Range { start: range.start, end: range.end.min(start) };
                    let after = Range { start: range.start.max(end), end: range.end };
                    [before, after]
                })
                .filter(|range| !range.is_empty())
                .collect();
        }
        capture.read_now(tenant, &now, buffer)?;
        gate.capture = Some(capture);
        Ok(())
    }
}

/// What the kernel says of `ranges` of a process that stands still: which pages are there, and
/// the runs of those that are not write-protected.
fn scan(process: &Process, ranges: &[Range]) -> Result<(PageSet, Vec<Range>), SnapshotError> {
    let piece = |range: Range| {
        let starts = (range.start..range.end).step_by(SCANNED_AT_ONCE as usize);
        starts.map(move |start| Range { start, end: range.end.min(start + SCANNED_AT_ONCE) })
    };
    let parts: Vec<Range> = ranges.iter().copied().flat_map(piece).collect();
    let look = |&part: &Range| {
        let mut found = Vec::new();
        process.protection(part, |run, protected| found.push((run, protected))).map(|()| found)
    };
    let (mut present, mut unprotected) = (PageSet::default(), Vec::new());
    let bytes: u64 = ranges.iter().map(|range| range.len()).sum();
    let threads = by_many::threads().min(1 + (bytes / SCANNED_AT_ONCE) as usize);
    for found in by_many(threads, &parts, look) {
        for (run, protected) in found.map_err(failed)? {
            present.insert(run);
            if !protected {
                add_run(&mut unprotected, run);
            }
        }
    }
    Ok((present, unprotected))
}

impl Capture {
    fn page_or_new(&mut self, tenant: &Tenant, address: u64) -> Result<PageId, SnapshotError> {
        self.object.page_or_new(&tenant.map, address).ok_or_else(|| failed(FULL))
    }

    /// Not the snapshot's yet.
    pub(super) fn new_leaf(
        &self,
        tenant: &Tenant,
        piece: Piece,
    ) -> Result<LeafIndex, SnapshotError> {
        self.object.new_leaf(&tenant.map, piece).ok_or_else(|| failed(FULL))
    }

    /// Reads what is there in `ranges` and stores it at once.
    fn read_now(
        &mut self,
        tenant: &Tenant,
        ranges: &[Range],
        buffer: &mut [u8],
    ) -> Result<(), SnapshotError> {
        let mut present = Vec::new();
        for &range in ranges {
            self.pages.present(range, |part| present.push(part)).map_err(failed)?;
        }
        for range in present {
            let step = (RUN_PAGES * PAGE_SIZE) as u64;
            let mut start = range.start;
            while start < range.end {
                let end = (start + step).min(range.end);
                let buffer = &mut buffer[..(end - start) as usize];
                if self.pages.read(start, buffer) != buffer.len() {
                    return Err(failed("its memory cannot be read"));
                }
                for (address, bytes) in
                    (start..end).step_by(PAGE_SIZE).zip(buffer.chunks_exact(PAGE_SIZE))
                {
                    let page = self.page_or_new(tenant, address)?;
                    let bytes = bytes.try_into().expect("whole pages");
                    let handle = tenant.store.put(bytes, Put::Staged).map_err(failed)?;
                    let before = tenant.map.get(page);
                    tenant.overwrite(page, before, Entry::Stored(handle));
                    self.pending -= u64::from(before == Entry::Pending);
                }
                start = end;
            }
        }
        Ok(())
    }
}
