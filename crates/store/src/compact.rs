//! Giving memory back: moving objects out of sparse slabs and segments.
//!
//! Part of the background work; the rules of `maintain` hold here too.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use crate::codec::with_scratch;
use crate::config::Compacted;
use crate::location::{Location, Tier, Word};
use crate::maintain::{Batch, Stuck};
use crate::segments::{Segments, segment_of};
use crate::slabs::{SLAB_BYTES, slab_of, units_into_slab};
use crate::space::{Allocator, Reclaimed};
use crate::store::{Store, lock};

/// A pass over the table has to promise this share of what data costs, and at
/// least this much.
const WORTH_SHIFT: u32 = 6;
const MIN_WORTH_BYTES: u64 = SLAB_BYTES;
/// Entries that one call of `compact` looks at: a few milliseconds.
const SWEEP_STEP: u32 = 1 << 20;

/// A pass over the object table that empties the victims. The table is the only
/// thing that knows which objects lie in a slab; a list the other way round
/// would cost 4 bytes an object all the time.
pub(crate) struct Sweep {
    slabs: Marks,
    segments: Marks,
    /// Slabs whose objects go to the front, with the units that they need
    /// there; at most one a class.
    squeezed: Vec<(u32, u64)>,
    cursor: u32,
}

impl Sweep {
    /// Whether an object there has to move.
    fn concerns(&self, location: Location) -> bool {
        if location.tier == Tier::File {
            return self.segments.contains(segment_of(location.offset()));
        }
        let slab = slab_of(location.unit);
        self.slabs.contains(slab) || self.squeezes(location)
    }

    fn squeezes(&self, location: Location) -> bool {
        let slab = slab_of(location.unit);
        self.squeezed
            .iter()
            .any(|&(squeezed, units)| squeezed == slab && units_into_slab(location.unit) >= units)
    }
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

impl Store {
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

    /// Whether it is time to look for segments of the tier file that are nearly empty, or
    /// they are being emptied. Only where the file is memory: on a device that costs more
    /// than the room is worth.
    #[must_use]
    pub fn wants_cleaning(&self) -> bool {
        if self.file.is_none() || self.has_slow_tier() {
            return false;
        }
        let begun = |allocator: &Allocator| {
            allocator.segments.as_ref().is_some_and(Segments::has_begun_many)
        };
        begun(&lock(&self.allocator)) || lock(&self.maintenance).sweep.is_some()
    }

    fn choose_victims(&self) -> Option<Sweep> {
        let mut sweep = Sweep {
            slabs: Marks::default(),
            segments: Marks::default(),
            squeezed: Vec::new(),
            cursor: 1,
        };
        let mut gain_bytes = 0;
        let mut cleans = false;
        let mut allocator = lock(&self.allocator);
        allocator.slabs.choose_victims(|slab| {
            sweep.slabs.set(slab);
            gain_bytes += SLAB_BYTES;
        });
        gain_bytes +=
            allocator.slabs.choose_squeezed(|slab, units| sweep.squeezed.push((slab, units)));
        if let Some(segments) = &mut allocator.segments {
            segments.choose_victims(!self.has_slow_tier(), |segment| {
                sweep.segments.set(segment);
                cleans = true;
            });
        }
        let worth = (allocator.slabs.touched_bytes() >> WORTH_SHIFT).max(MIN_WORTH_BYTES);
        if cleans || gain_bytes >= worth {
            return Some(sweep);
        }
        for slab in sweep.slabs.iter() {
            allocator.slabs.pardon(slab);
        }
        None
    }

    fn end_sweep(&self, sweep: &Sweep) {
        let mut allocator = lock(&self.allocator);
        for slab in sweep.slabs.iter() {
            allocator.slabs.pardon(slab);
        }
        for &(slab, _) in &sweep.squeezed {
            // Under the lock, or a put could take a slot of the tail meanwhile;
            // punching memory waits for nothing.
            if let Some((offset, len)) = allocator.slabs.tail(slab)
                && self.data.punch(offset, len).is_ok()
            {
                allocator.slabs.trimmed(slab);
            }
        }
        self.show_costs(&allocator);
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
            if !sweep.concerns(word.location()) || !self.try_reference(id) {
                continue;
            }
            // The id may have changed hands since; look again, referenced.
            let location = self.location(id);
            if location.tier == Tier::File && cleaning {
                match self.add_to_batch(&mut batch, id) {
                    Ok(()) => moved += location.len as u64,
                    Err(Stuck) => {
                        cleaning = false;
                        self.drop_reference(id);
                    }
                }
                continue;
            }
            if location.tier == Tier::Dram
                && sweep.concerns(location)
                && self.move_in_dram(id, location, !sweep.squeezes(location)).is_ok()
            {
                moved += location.len as u64;
            }
            self.drop_reference(id);
        }
        // A failed flush leaves its objects where they are, in a segment that
        // is pardoned at the end.
        let _ = self.flush(&mut batch);
        moved
    }

    /// Copies an object's bytes as they are: their checksum stays the one that
    /// was taken when the page was put.
    fn move_in_dram(&self, id: u32, from: Location, growth: bool) -> Result<(), Stuck> {
        let to = with_scratch(|scratch| {
            let bytes = &mut scratch.packed[..from.len];
            self.data.read_at(from.offset(), bytes)?;
            self.write_slot(from.codec, bytes, growth)
        });
        let to = to.ok().flatten().ok_or(Stuck)?;
        if !growth && slab_of(to.unit) == slab_of(from.unit) && to.unit > from.unit {
            // A put has taken the hole meant for it.
            self.free_location(to);
            return Err(Stuck);
        }
        self.replace(id, from, to);
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
