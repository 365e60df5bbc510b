//! Background work: compressing, repacking, demoting. Compacting is in
//! `compact`.
//!
//! All of it moves objects, and all of it holds the maintenance lock, so that
//! an object's location changes only here and only one at a time. Readers and
//! reference counts go on meanwhile; puts too, but for moments of the
//! allocation lock. Every move is: reference the object, copy, write the copy,
//! swing the location in one compare-and-swap, free the old bytes.

use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use strata_units::{Handle, PAGE_SIZE};

use crate::codec::{FRAME_HEADER_BYTES, Scratch, dictionary_of, with_scratch};
use crate::compact::Sweep;
use crate::config::GetError;
use crate::dictionary::Encoder;
use crate::id_set::IdSet;
use crate::location::{Codec, Location, SizeClass, Tier, UNIT_BYTES, Word};
use crate::segments::{CLUSTER_BYTES, SEGMENT_BYTES};
use crate::space::Reclaimed;
use crate::store::{Store, Target, lock};

/// Pages that a put over the limit demotes itself before it gives up.
const RELIEF_PAGES: usize = 256;
/// Bytes that it compacts.
const RELIEF_BYTES: u64 = 1 << 20;
/// With a tier file, puts may exceed the limit by this before they have to
/// wait for the file: the larger of 1/64 and 1 MiB.
const OVERSHOOT_SHIFT: u32 = 6;
const MIN_OVERSHOOT_BYTES: u64 = 1 << 20;
/// What goes on between calls; the lock around it makes background work one at
/// a time.
#[derive(Default)]
pub(crate) struct Maintenance {
    pub(crate) sweep: Option<Sweep>,
}

/// Work that could not be done for want of room.
pub(crate) struct Stuck;

impl Store {
    /// Compresses the pages staged longest as [`crate::Put::Fast`] does, at most
    /// `max` of them; how many are not staged any more. 0: none is left, or no room is.
    pub fn settle(&self, max: usize) -> usize {
        let _turn = lock(&self.maintenance);
        self.reap();
        let encoder = self.dictionaries.current();
        for done in 0..max {
            let Some(id) = self.take_oldest(&self.table.staged) else { return done };
            let result = with_scratch(|scratch| self.settle_one(scratch, encoder.as_deref(), id));
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

    /// Looks at the objects that could be packed tighter, oldest first, at most
    /// `max` of them, and packs with zstd those that get smaller by a size class:
    /// what is lz4 or raw, and, with a dictionary, what was packed without it.
    /// How many it looked at; none is looked at twice, but after a new dictionary
    /// was adopted. 0: none is left.
    pub fn repack(&self, max: usize) -> usize {
        let _turn = lock(&self.maintenance);
        self.reap();
        let encoder = self.dictionaries.current();
        for done in 0..max {
            let Some(id) = self.take_oldest(&self.table.repackable) else { return done };
            with_scratch(|scratch| self.repack_one(scratch, encoder.as_deref(), id));
            self.drop_reference(id);
        }
        max
    }

    /// Moves the compressed objects that are oldest to the tier file, at most
    /// `max` of them; how many moved. 0: none is left, there is no tier file, it
    /// is full, or it fails (see the statistics).
    pub fn demote(&self, max: usize) -> usize {
        self.demote_oldest(&self.table.demotable, max)
    }

    /// Moves the pages staged longest to the tier file, as they are, at most `max` of
    /// them; how many moved. Where the file is memory and has room, packing them would
    /// cost more than it brings. 0: as for [`Store::demote`].
    pub fn demote_staged(&self, max: usize) -> usize {
        self.demote_oldest(&self.table.staged, max)
    }

    fn demote_oldest(&self, of: &IdSet, max: usize) -> usize {
        let _turn = lock(&self.maintenance);
        self.reap();
        if self.file.is_none() {
            return 0;
        }
        let mut batch = Batch::new(false);
        while batch.moved + batch.items.len() < max {
            let Some(id) = self.take_oldest(of) else { break };
            if !self.takes_to_file(&mut batch, id) {
                break;
            }
        }
        // A failure shows in the count and in the statistics.
        let _ = self.flush(&mut batch);
        batch.moved
    }

    /// Adds a referenced object to a batch for the tier file. False: nothing more
    /// goes there now, and it stays to be moved.
    fn takes_to_file(&self, batch: &mut Batch, id: u32) -> bool {
        let added = self.add_to_batch(batch, id).is_ok();
        if !added {
            self.stays_in_dram(id, self.location(id));
            self.drop_reference(id);
        }
        added
    }

    /// Has an object that was on its way to the tier file be asked again later.
    fn stays_in_dram(&self, id: u32, location: Location) {
        let set = match location.codec {
            Codec::Staged => &self.table.staged,
            _ => &self.table.demotable,
        };
        set.insert(id);
    }

    /// Moves these of the compressed objects to the tier file, whatever their age;
    /// how many moved. The caller owns a reference to each. What is staged, in the
    /// file, or of one value stays as it is.
    ///
    /// # Panics
    /// When a handle names no referenced object.
    pub fn demote_these(&self, handles: &[Handle]) -> usize {
        let _turn = lock(&self.maintenance);
        if self.file.is_none() {
            return 0;
        }
        let mut ids: Vec<u32> = handles
            .iter()
            .filter_map(|&handle| match Target::of(handle) {
                Target::Object(id) => Some(id),
                Target::Fill(_) | Target::InFile { .. } => None,
            })
            .collect();
        // An object is moved once, however many pages it is.
        ids.sort_unstable();
        ids.dedup();
        let mut batch = Batch::new(false);
        ids.retain(|&id| self.location(id).codec != Codec::Staged);
        for id in ids {
            {
                let _allocator = lock(&self.allocator);
                self.table.demotable.remove(id);
            }
            let handle = Handle(u64::from(id));
            assert!(self.try_reference(id), "{handle:?} names no referenced object");
            if !self.takes_to_file(&mut batch, id) {
                break;
            }
        }
        let _ = self.flush(&mut batch);
        batch.moved
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

    pub(crate) fn location(&self, id: u32) -> Location {
        Word(self.table.word(id).load(Acquire)).location()
    }

    fn settle_one(
        &self,
        scratch: &mut Scratch,
        encoder: Option<&Encoder>,
        id: u32,
    ) -> Result<(), Stuck> {
        let from = self.location(id);
        if from.codec != Codec::Staged {
            return Ok(());
        }
        let mut page = [0; PAGE_SIZE];
        if let Err(error) = self.read_object(scratch, id, &mut page) {
            self.note_bad_object(&error);
            return Ok(());
        }
        let to = match scratch.pack_fast(encoder, &page) {
            Some((codec, len)) => {
                let to = self.write_slot(codec, &scratch.packed[..len], true);
                let to = to.ok().flatten().ok_or(Stuck)?;
                self.replace(id, from, to);
                to
            }
            None => {
                // The same bytes under another name.
                let to = Location { codec: Codec::Raw, ..from };
                self.account(to);
                self.swing(id, from, to);
                self.discount(from);
                to
            }
        };
        match encoder {
            Some(_) => self.schedule.note_landing(to.class().slot_bytes()),
            None => self.table.repackable.insert(id),
        }
        self.table.demotable.insert(id);
        Ok(())
    }

    fn repack_one(&self, scratch: &mut Scratch, encoder: Option<&Encoder>, id: u32) {
        let from = self.location(id);
        let worth_a_try = match from.codec {
            Codec::Staged => false,
            Codec::Lz4 | Codec::Raw => true,
            Codec::Zstd => encoder.is_some_and(|encoder| !self.is_packed_with(encoder, from)),
        };
        if from.tier != Tier::Dram || !worth_a_try {
            return;
        }
        let mut page = [0; PAGE_SIZE];
        if let Err(error) = self.read_object(scratch, id, &mut page) {
            self.note_bad_object(&error);
            return;
        }
        if let Some(len) = scratch.pack_dense(encoder, &page)
            && SizeClass::of(len) < from.class()
            && let Ok(Some(to)) = self.write_slot(Codec::Zstd, &scratch.packed[..len], true)
        {
            self.replace(id, from, to);
        }
    }

    /// Whether a zstd object in DRAM was packed with this dictionary.
    fn is_packed_with(&self, encoder: &Encoder, location: Location) -> bool {
        let mut header = [0; FRAME_HEADER_BYTES];
        let header = &mut header[..location.len.min(FRAME_HEADER_BYTES)];
        self.data.read_at(location.offset(), header).is_ok() && dictionary_of(header) == encoder.id
    }

    /// Points the object at its complete new copy and frees the old one.
    pub(crate) fn replace(&self, id: u32, from: Location, to: Location) {
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
    pub(crate) fn add_to_batch(&self, batch: &mut Batch, id: u32) -> Result<(), Stuck> {
        let from = self.location(id);
        let wanted = if batch.cleaning { Tier::File } else { Tier::Dram };
        if from.tier != wanted {
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
            let raw = matches!(from.codec, Codec::Staged | Codec::Raw);
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
    pub(crate) fn flush(&self, batch: &mut Batch) -> Result<(), Stuck> {
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
                    let codec = match from.codec {
                        Codec::Staged => Codec::Raw,
                        packed => packed,
                    };
                    let unit = place / UNIT_BYTES;
                    let to = Location { tier: Tier::File, codec, len: from.len, unit };
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
        let segments = closed.into_iter().collect();
        self.give_back(Reclaimed { segments, failed: true, ..Default::default() });
        for Item { id, from, .. } in batch.items.drain(..) {
            if !batch.cleaning {
                self.stays_in_dram(id, from);
            }
            self.drop_reference(id);
        }
    }
}

/// Objects on their way to the tier file: one sequential write.
pub(crate) struct Batch {
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
    pub(crate) fn new(cleaning: bool) -> Self {
        Self { cleaning, buffer: None, fill: 0, room: 0, items: Vec::new(), moved: 0 }
    }

    fn buffer(&mut self) -> &mut [u8; SEGMENT_BYTES as usize] {
        let zeroed = || Box::new(SegmentBuffer([0; SEGMENT_BYTES as usize]));
        &mut self.buffer.get_or_insert_with(zeroed).0
    }
}
