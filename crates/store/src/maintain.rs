//! Background work: compressing, repacking, demoting, compacting.
//!
//! All of it moves objects, and all of it holds the maintenance lock, so that
//! an object's location changes only here and only one at a time. Readers and
//! reference counts go on meanwhile; puts too, but for moments of the
//! allocation lock. Every move is: reference the object, copy, write the copy,
//! swing the location in one compare-and-swap, free the old bytes.

use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use strata_units::PAGE_SIZE;

use crate::codec::{Scratch, with_scratch};
use crate::config::{Compacted, GetError};
use crate::id_set::IdSet;
use crate::location::{Codec, Location, SizeClass, Tier, UNIT_BYTES, Word};
use crate::segments::{CLUSTER_BYTES, SEGMENT_BYTES, segment_of};
use crate::slabs::slab_of;
use crate::store::{Reclaimed, Store, lock};

/// Pages that a put over the limit demotes itself before it gives up.
const RELIEF_PAGES: usize = 256;
/// Bytes that it compacts.
const RELIEF_BYTES: u64 = 1 << 20;
/// With a tier file, puts may exceed the limit by this before they have to
/// wait for the file: the larger of 1/64 and 1 MiB.
const OVERSHOOT_SHIFT: u32 = 6;
const MIN_OVERSHOOT_BYTES: u64 = 1 << 20;
/// Entries that one call of `compact` looks at: a few milliseconds.
const SWEEP_STEP: u32 = 1 << 20;

/// What goes on between calls; the lock around it makes background work one at
/// a time.
#[derive(Default)]
pub(crate) struct Maintenance {
    sweep: Option<Sweep>,
}

/// A pass over the object table that empties the victims. The table is the only
/// thing that knows which objects lie in a slab; a list the other way round
/// would cost 4 bytes an object all the time.
struct Sweep {
    slabs: Marks,
    segments: Marks,
    cursor: u32,
}

/// A set of small numbers.
#[derive(Default)]
struct Marks(Vec<u64>);

impl Marks {
    fn set(&mut self, index: u32) {
        let word = index as usize / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (index % 64);
    }

    fn contains(&self, index: u32) -> bool {
        self.0.get(index as usize / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
    }

    fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.0.len() as u32 * 64).filter(|&index| self.contains(index))
    }
}

/// Work that could not be done for want of room.
struct Stuck;

impl Store {
    /// Compresses the pages staged longest (lz4), at most `max` of them; how
    /// many are not staged any more. 0: none is left, or no room is.
    pub fn settle(&self, max: usize) -> usize {
        let _turn = lock(&self.maintenance);
        self.reap();
        for done in 0..max {
            let Some(id) = self.take_oldest(&self.table.staged) else { return done };
            let result = with_scratch(|scratch| self.settle_one(scratch, id));
            if result.is_err() {
                self.table.staged.insert(id);
            }
            self.drop_reference(id);
            if result.is_err() {
                return done;
            }
        }
        max
    }

    /// Looks at the objects that have been lz4 or raw longest, at most `max` of
    /// them, and packs with zstd those that get smaller by a size class. How
    /// many it looked at; none is looked at twice. 0: none is left.
    pub fn repack(&self, max: usize) -> usize {
        let _turn = lock(&self.maintenance);
        self.reap();
        for done in 0..max {
            let Some(id) = self.take_oldest(&self.table.repackable) else { return done };
            with_scratch(|scratch| self.repack_one(scratch, id));
            self.drop_reference(id);
        }
        max
    }

    /// Moves the compressed objects that are oldest to the tier file, at most
    /// `max` of them; how many moved. 0: none is left, there is no tier file, it
    /// is full, or it fails (see the statistics).
    pub fn demote(&self, max: usize) -> usize {
        let _turn = lock(&self.maintenance);
        self.reap();
        if self.file.is_none() {
            return 0;
        }
        let mut batch = Batch::new(false);
        while batch.moved + batch.items.len() < max {
            let Some(id) = self.take_oldest(&self.table.demotable) else { break };
            if self.add_to_batch(&mut batch, id).is_err() {
                self.table.demotable.insert(id);
                self.drop_reference(id);
                break;
            }
        }
        // A failure shows in the count and in the statistics.
        let _ = self.flush(&mut batch);
        batch.moved
    }

    /// Gives memory back: frees what is dead, moves objects out of sparse slabs
    /// and, when the tier file runs short, out of sparse segments, and returns
    /// empty slabs to the kernel. Moves about `max_bytes` at most.
    pub fn compact(&self, max_bytes: u64) -> Compacted {
        let mut turn = lock(&self.maintenance);
        self.reap();
        let cost_before = self.counters.dram_bytes.load(Relaxed);
        if turn.sweep.is_none() {
            turn.sweep = self.choose_victims();
        }
        let mut moved_bytes = 0;
        if let Some(sweep) = &mut turn.sweep {
            moved_bytes = self.sweep(sweep, max_bytes);
            if sweep.cursor >= self.table.high() {
                self.end_sweep(sweep);
                turn.sweep = None;
            }
        }
        self.give_back_empty();
        let cost = self.counters.dram_bytes.load(Relaxed);
        Compacted {
            moved_bytes,
            freed_bytes: cost_before.saturating_sub(cost),
            unfinished: turn.sweep.is_some(),
        }
    }

    /// Makes room for a put that found none; whether DRAM may grow now.
    pub(crate) fn relieve(&self) -> bool {
        if self.file.is_none() {
            return false;
        }
        let limit = self.compressed_limit();
        let most = limit.saturating_add((limit >> OVERSHOOT_SHIFT).max(MIN_OVERSHOOT_BYTES));
        if self.compressed_bytes() < most {
            return true;
        }
        if self.demote(RELIEF_PAGES) > 0 {
            self.compact(RELIEF_BYTES);
        }
        self.compressed_bytes() < most
    }

    /// The oldest living member of a set, taken out of it and referenced.
    fn take_oldest(&self, set: &IdSet) -> Option<u32> {
        let allocator = lock(&self.allocator);
        loop {
            let id = set.next_around(allocator.newest + 1)?;
            set.remove(id);
            // Fails for the dead, which are freed in their own time.
            if self.try_reference(id) {
                return Some(id);
            }
        }
    }

    fn location(&self, id: u32) -> Location {
        Word(self.table.word(id).load(Acquire)).location()
    }

    fn settle_one(&self, scratch: &mut Scratch, id: u32) -> Result<(), Stuck> {
        let from = self.location(id);
        if from.codec != Codec::Staged {
            return Ok(());
        }
        let mut page = [0; PAGE_SIZE];
        if let Err(error) = self.read_object(scratch, id, &mut page) {
            self.note_bad_object(&error);
            return Ok(());
        }
        match scratch.pack(Codec::Lz4, &page) {
            Some(len) => {
                let to = self.write_slot(Codec::Lz4, &scratch.packed[..len], true);
                self.replace(id, from, to.ok().flatten().ok_or(Stuck)?);
            }
            None => {
                // The same bytes under another name.
                let to = Location { codec: Codec::Raw, ..from };
                self.account(to);
                self.swing(id, from, to);
                self.discount(from);
            }
        }
        self.table.repackable.insert(id);
        self.table.demotable.insert(id);
        Ok(())
    }

    fn repack_one(&self, scratch: &mut Scratch, id: u32) {
        let from = self.location(id);
        if from.tier != Tier::Dram || !matches!(from.codec, Codec::Lz4 | Codec::Raw) {
            return;
        }
        let mut page = [0; PAGE_SIZE];
        if let Err(error) = self.read_object(scratch, id, &mut page) {
            self.note_bad_object(&error);
            return;
        }
        if let Some(len) = scratch.pack(Codec::Zstd, &page)
            && SizeClass::of(len) < from.class()
            && let Ok(Some(to)) = self.write_slot(Codec::Zstd, &scratch.packed[..len], true)
        {
            self.replace(id, from, to);
        }
    }

    /// Points the object at its complete new copy and frees the old one.
    fn replace(&self, id: u32, from: Location, to: Location) {
        self.swing(id, from, to);
        self.free_location(from);
    }

    fn swing(&self, id: u32, from: Location, to: Location) {
        let atomic = self.table.word(id);
        let mut word = Word(atomic.load(Relaxed));
        loop {
            assert_eq!(word.location(), from, "object {id} was moved behind maintenance's back");
            // Release: whoever finds the new location finds the bytes there.
            match atomic.compare_exchange_weak(word.0, word.moved_to(to).0, AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => word = Word(now),
            }
        }
    }

    /// An object that cannot be read stays as and where it is: rewriting it
    /// would seal wrong bytes, and its reader must learn of it.
    fn note_bad_object(&self, error: &GetError) {
        if matches!(error, GetError::Corrupt) {
            self.counters.corrupt_objects.fetch_add(1, Relaxed);
        }
    }

    /// Adds a referenced object to a batch for the tier file, which takes over
    /// the reference unless it fails.
    fn add_to_batch(&self, batch: &mut Batch, id: u32) -> Result<(), Stuck> {
        let from = self.location(id);
        let wanted = if batch.cleaning { Tier::File } else { Tier::Dram };
        if from.tier != wanted || from.codec == Codec::Staged {
            self.drop_reference(id);
            return Ok(());
        }
        if batch.fill + from.len > batch.room {
            self.flush(batch)?;
            let allocator = lock(&self.allocator);
            let segments = allocator.segments.as_ref().ok_or(Stuck)?;
            batch.room = segments.room_bytes(batch.cleaning) as usize;
            if batch.room < from.len {
                return Err(Stuck);
            }
        }
        let at = batch.fill;
        let into = &mut batch.buffer()[at..at + from.len];
        let mut page = [0; PAGE_SIZE];
        let read = with_scratch(|scratch| {
            self.read_object(scratch, id, &mut page)?;
            let raw = from.codec == Codec::Raw;
            into.copy_from_slice(if raw { &page } else { &scratch.packed[..from.len] });
            Ok(())
        });
        match read {
            Ok(()) => {
                batch.items.push(Item { id, from, at });
                batch.fill = (at + from.len).next_multiple_of(UNIT_BYTES as usize);
            }
            Err(error) => {
                self.note_bad_object(&error);
                self.drop_reference(id);
            }
        }
        Ok(())
    }

    /// Writes a batch to the tier file and, only then, points its objects
    /// there. On failure they stay where they are.
    fn flush(&self, batch: &mut Batch) -> Result<(), Stuck> {
        if batch.items.is_empty() {
            return Ok(());
        }
        let file = self.file.as_ref().ok_or(Stuck)?;
        let len = batch.fill.next_multiple_of(CLUSTER_BYTES as usize);
        let fill = batch.fill;
        batch.buffer()[fill..len].fill(0);
        let (offset, closed) = {
            let mut allocator = lock(&self.allocator);
            let segments = allocator.segments.as_mut().ok_or(Stuck)?;
            let reserved = segments.reserve(len as u64);
            self.show_costs(&allocator);
            reserved
        };
        self.give_back(Reclaimed { segments: closed.into_iter().collect(), ..Default::default() });
        let result = file.write_at(offset, &batch.buffer()[..len]);
        batch.fill = 0;
        batch.room = 0;
        match result {
            Ok(()) => {
                batch.moved += batch.items.len();
                for Item { id, from, at } in batch.items.drain(..) {
                    let place = offset + at as u64;
                    let to = Location { tier: Tier::File, unit: place / UNIT_BYTES, ..from };
                    if let Some(segments) = &mut lock(&self.allocator).segments {
                        segments.add(place, from.len);
                    }
                    self.account(to);
                    self.replace(id, from, to);
                    self.drop_reference(id);
                }
                Ok(())
            }
            Err(error) => {
                self.abandon(batch, offset, &error);
                Err(Stuck)
            }
        }
    }

    fn abandon(&self, batch: &mut Batch, offset: u64, error: &io::Error) {
        self.note_tier_error("write", offset, error);
        let closed = lock(&self.allocator).segments.as_mut().and_then(|segments| segments.close());
        self.give_back(Reclaimed { segments: closed.into_iter().collect(), ..Default::default() });
        for Item { id, .. } in batch.items.drain(..) {
            if !batch.cleaning {
                self.table.demotable.insert(id);
            }
            self.drop_reference(id);
        }
    }

    fn choose_victims(&self) -> Option<Sweep> {
        let mut sweep = Sweep { slabs: Marks::default(), segments: Marks::default(), cursor: 1 };
        let mut any = false;
        let mut allocator = lock(&self.allocator);
        allocator.slabs.choose_victims(|slab| {
            sweep.slabs.set(slab);
            any = true;
        });
        if let Some(segments) = &mut allocator.segments {
            segments.choose_victims(|segment| {
                sweep.segments.set(segment);
                any = true;
            });
        }
        any.then_some(sweep)
    }

    fn end_sweep(&self, sweep: &Sweep) {
        let mut allocator = lock(&self.allocator);
        for slab in sweep.slabs.iter() {
            allocator.slabs.pardon(slab);
        }
        if let Some(segments) = &mut allocator.segments {
            for segment in sweep.segments.iter() {
                segments.pardon(segment);
            }
        }
    }

    /// Goes on with a sweep; bytes moved.
    fn sweep(&self, sweep: &mut Sweep, max_bytes: u64) -> u64 {
        let mut batch = Batch::new(true);
        let mut moved = 0;
        let end = self.table.high().min(sweep.cursor.saturating_add(SWEEP_STEP));
        let mut cleaning = true;
        while sweep.cursor < end && moved < max_bytes {
            let id = sweep.cursor;
            sweep.cursor += 1;
            let word = Word(self.table.word(id).load(Acquire));
            if word.references() == 0 {
                continue;
            }
            let location = word.location();
            let marked = match location.tier {
                Tier::Dram => sweep.slabs.contains(slab_of(location.unit)),
                Tier::File => sweep.segments.contains(segment_of(location.offset())),
            };
            if !marked || !self.try_reference(id) {
                continue;
            }
            // The id may have changed hands since; look again, referenced.
            let location = self.location(id);
            match location.tier {
                Tier::Dram if sweep.slabs.contains(slab_of(location.unit)) => {
                    if self.move_in_dram(id, location).is_ok() {
                        moved += location.len as u64;
                    }
                    self.drop_reference(id);
                }
                Tier::File if cleaning => match self.add_to_batch(&mut batch, id) {
                    Ok(()) => moved += location.len as u64,
                    Err(Stuck) => {
                        cleaning = false;
                        self.drop_reference(id);
                    }
                },
                _ => self.drop_reference(id),
            }
        }
        // A failed flush leaves its objects where they are, in a segment that
        // is pardoned at the end.
        let _ = self.flush(&mut batch);
        moved
    }

    /// Copies an object's bytes as they are: their checksum stays the one that
    /// was taken when the page was put.
    fn move_in_dram(&self, id: u32, from: Location) -> Result<(), Stuck> {
        let to = with_scratch(|scratch| {
            let bytes = &mut scratch.packed[..from.len];
            self.data.read_at(from.offset(), bytes)?;
            self.write_slot(from.codec, bytes, true)
        });
        self.replace(id, from, to.ok().flatten().ok_or(Stuck)?);
        Ok(())
    }

    fn give_back_empty(&self) {
        let mut reclaimed = Reclaimed::default();
        {
            let mut allocator = lock(&self.allocator);
            while let Some(slab) = allocator.slabs.pop_warm() {
                reclaimed.slabs.push(slab);
            }
        }
        self.give_back(reclaimed);
    }
}

/// Objects on their way to the tier file: one sequential write.
struct Batch {
    /// For cleaning (from the file to the file) or demotion (from DRAM).
    cleaning: bool,
    /// Made for the first object.
    buffer: Option<Box<SegmentBuffer>>,
    fill: usize,
    /// Bytes that the log takes in one write; 0: not asked yet.
    room: usize,
    /// Each with a reference.
    items: Vec<Item>,
    /// Objects that have arrived.
    moved: usize,
}

struct Item {
    id: u32,
    from: Location,
    at: usize,
}

/// Aligned for `O_DIRECT`.
#[repr(C, align(4096))]
struct SegmentBuffer([u8; SEGMENT_BYTES as usize]);

impl Batch {
    fn new(cleaning: bool) -> Self {
        Self { cleaning, buffer: None, fill: 0, room: 0, items: Vec::new(), moved: 0 }
    }

    fn buffer(&mut self) -> &mut [u8; SEGMENT_BYTES as usize] {
        let zeroed = || Box::new(SegmentBuffer([0; SEGMENT_BYTES as usize]));
        &mut self.buffer.get_or_insert_with(zeroed).0
    }
}
