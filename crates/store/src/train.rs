//! Whether a dictionary pays: when to look, what to train from, and how a new
//! one is judged.
//!
//! Nothing here holds a lock for longer than it takes to read one page; the
//! thread is the caller's.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use strata_units::{Handle, PAGE_SIZE};

use crate::codec::{Page, fill, fill_value, with_scratch};
use crate::config::{Foretelling, Training};
use crate::dictionary::{Candidate, Encoder, MAX_CONTENT_BYTES};
use crate::location::{Codec, SizeClass, Tier, Word};
use crate::store::{Store, Target};
use crate::table::random_seed;

/// Objects that a store has before its first training.
const FIRST_OBJECTS: u64 = 2048;
/// Pages read for one training, and the least that it makes do with.
const SAMPLE_PAGES: usize = 600;
const MIN_SAMPLE_PAGES: usize = 120;
/// One in so many of them judges and is not trained from.
const JUDGE_EVERY: usize = 6;
/// Draws for each page wanted, until a thin or a small population is given up.
const DRAWS_PER_PAGE: usize = 8;
/// The next look comes when so many times the objects have been put: the first
/// pages to leave are not what a large store is made of later. Sooner where no
/// dictionary has paid yet.
const AGAIN_AFTER_ADOPTED: u64 = 8;
const AGAIN_AFTER_REFUSED: u64 = 4;
/// Or when pages have come to pack worse than judged, by a quarter, and not
/// before so many were put since: twice as many after each time that no better
/// dictionary was found for them. Where pages of two kinds come in turn, the mean is
/// above what was judged every few thousand pages, and that is no reason.
const DRIFT_PART: u64 = 4;
const DRIFT_PUTS: u64 = 4096;
const MAX_DRIFT_SHIFT: u32 = 20;
/// Weight of one page in the mean that tells.
const LANDED_SHIFT: u32 = 8;
/// Trainings in a store's life: with looks that far apart, more is a mistake.
const MAX_ATTEMPTS: u32 = 64;
/// A new dictionary has to save, over all objects, what it costs itself, and to
/// make pages this much smaller than lz4 does …
const LZ4_GAIN_PERCENT: u64 = 20;
/// … and than the current dictionary does.
const CURRENT_GAIN_PERCENT: u64 = 10;

/// When to train next.
#[derive(Default)]
pub(crate) struct Schedule {
    training: AtomicBool,
    attempts: AtomicU32,
    /// Objects put in the store's life; after a recovery, at least those found.
    puts: AtomicU64,
    /// Objects put at the last training, and those put at which the next is due.
    last_puts: AtomicU64,
    next_puts: AtomicU64,
    /// Trainings for pages that pack worse, since the last one that brought a
    /// dictionary.
    refusals: AtomicU32,
    /// Mean slot of the pages packed last, in 1/256 bytes; 0: not known.
    landed: AtomicU64,
    /// What it was, or was judged to become, at the last training.
    expected: AtomicU64,
}

/// Ends a training however it ends.
struct Turn<'a> {
    schedule: &'a Schedule,
    /// It began when pages packed worse than judged.
    for_drift: bool,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.schedule.training.store(false, Release);
    }
}

impl Schedule {
    /// After a recovery that found so many objects.
    pub(crate) fn resume(&mut self, objects: u64, has_dictionary: bool) {
        self.puts = AtomicU64::new(objects);
        if has_dictionary {
            self.last_puts = AtomicU64::new(objects);
            self.next_puts = AtomicU64::new(objects.max(FIRST_OBJECTS) * AGAIN_AFTER_ADOPTED);
        }
    }

    /// Counts an object.
    pub(crate) fn count_put(&self) {
        self.puts.fetch_add(1, Relaxed);
    }

    /// Remembers what a page costs that was packed with the current dictionary,
    /// or was found to gain nothing from it. Counts of two threads at once may
    /// get lost.
    pub(crate) fn note_landing(&self, slot_bytes: u64) {
        let mean = self.landed.load(Relaxed);
        let value = slot_bytes << LANDED_SHIFT;
        let next = if mean == 0 { value } else { mean - (mean >> LANDED_SHIFT) + slot_bytes };
        self.landed.store(next, Relaxed);
    }

    fn is_due(&self) -> bool {
        let puts = self.puts.load(Relaxed);
        let shift = self.refusals.load(Relaxed).min(MAX_DRIFT_SHIFT);
        let drifted =
            self.packs_worse() && puts >= self.last_puts.load(Relaxed) + (DRIFT_PUTS << shift);
        !self.training.load(Relaxed)
            && self.attempts.load(Relaxed) < MAX_ATTEMPTS
            && puts >= FIRST_OBJECTS
            && (puts >= self.next_puts.load(Relaxed) || drifted)
    }

    /// Pages have come to take a quarter more than was judged.
    fn packs_worse(&self) -> bool {
        let (landed, expected) = (self.landed.load(Relaxed), self.expected.load(Relaxed));
        expected > 0 && landed > expected + expected / DRIFT_PART
    }

    fn begin(&self) -> Option<Turn<'_>> {
        let begun = self.training.compare_exchange(false, true, AcqRel, Relaxed).is_ok();
        begun.then(|| {
            self.attempts.fetch_add(1, Relaxed);
            Turn { schedule: self, for_drift: self.packs_worse() }
        })
    }
}

impl Turn<'_> {
    /// Sets the next date. `expected_bytes`: what a page will cost from now on,
    /// where a dictionary is in use.
    fn note_result(&self, adopted: bool, expected_bytes: Option<u64>) {
        let schedule = self.schedule;
        let puts = schedule.puts.load(Relaxed);
        schedule.last_puts.store(puts, Relaxed);
        if adopted {
            schedule.refusals.store(0, Relaxed);
        } else if self.for_drift {
            schedule.refusals.fetch_add(1, Relaxed);
        }
        let again = if adopted || expected_bytes.is_some() {
            AGAIN_AFTER_ADOPTED
        } else {
            AGAIN_AFTER_REFUSED
        };
        schedule.next_puts.store(puts.max(FIRST_OBJECTS).saturating_mul(again), Relaxed);
        if let Some(bytes) = expected_bytes {
            let judged = bytes << LANDED_SHIFT;
            // What was no reason for a better dictionary now is none tomorrow.
            let landed = schedule.landed.load(Relaxed);
            schedule.expected.store(if adopted { judged } else { judged.max(landed) }, Relaxed);
            if adopted {
                schedule.landed.store(judged, Relaxed);
            }
        }
    }
}

/// Pages to judge with, packed in every way: bytes of slots.
struct Verdict {
    lz4_bytes: u64,
    current_bytes: Option<u64>,
    new_bytes: u64,
}

impl Store {
    /// Whether [`Store::train_dictionary`] is worth its tenth of a second now.
    /// Constant time.
    #[must_use]
    pub fn wants_dictionary(&self) -> bool {
        self.schedule.is_due()
            && self.counters.objects.load(Relaxed) >= FIRST_OBJECTS
            && self.dictionaries.next_id().is_some()
    }

    /// Trains a dictionary from pages that are stored, and packs new pages with
    /// it if it pays: if it makes pages 20 % smaller than lz4 does, and 10 %
    /// smaller than the dictionary in use does. Takes about a tenth of a second
    /// and 20 MB of memory for that long, and holds no lock meanwhile: a thread
    /// of its own may run it beside everything else.
    pub fn train_dictionary(&self) -> Training {
        let Some(turn) = self.schedule.begin() else { return Training::Busy };
        let Some(id) = self.dictionaries.next_id() else { return Training::NoRoom };
        let current = self.dictionaries.current();
        let pages = self.sample();
        let refused = |training| {
            turn.note_result(false, None);
            training
        };
        if pages.len() < MIN_SAMPLE_PAGES {
            return refused(Training::TooFewPages { pages: pages.len() as u32 });
        }
        let (judges, trained_pages, candidate) = train(&pages, id);
        let Some(candidate) = candidate else {
            return refused(Training::NothingInCommon { pages: trained_pages });
        };
        let verdict = judge(&judges, current.as_deref(), &candidate.encoder);
        let adopted = self.pays(&verdict, judges.len() as u64, &candidate);
        let judged = judges.len() as u64;
        let dictionary_bytes = candidate.cost_bytes();
        if adopted {
            self.dictionaries.adopt(candidate);
            self.offer_all_for_repacking();
        }
        let expected = if adopted { Some(verdict.new_bytes) } else { verdict.current_bytes };
        turn.note_result(adopted, expected.map(|bytes| bytes / judged));
        Training::Judged {
            adopted,
            dictionary: id,
            dictionary_bytes,
            trained_pages,
            judged_pages: judged as u32,
            lz4_bytes: verdict.lz4_bytes,
            current_bytes: verdict.current_bytes,
            new_bytes: verdict.new_bytes,
        }
    }

    /// What pages would take in this store, packed, by a sample of them: it is packed,
    /// and the result thrown away. Takes as long as [`Store::train_dictionary`], for a
    /// thread of its own likewise.
    #[must_use]
    pub fn foretell(&self, mut pages: Vec<Page>) -> Foretelling {
        let count = pages.len() as u64;
        pages.retain(|page| fill_value(page).is_none());
        let fill_pages = count - pages.len() as u64;
        if pages.len() < MIN_SAMPLE_PAGES {
            return Foretelling { pages: count, fill_pages, packed_bytes: None };
        }
        let all: Vec<&Page> = pages.iter().collect();
        let lz4_bytes = slots(&all, None);
        // What a new dictionary saves of the pages that judge it, it saves of all.
        let new = self.dictionaries.next_id().and_then(|id| {
            let (judges, _, candidate) = train(&pages, id);
            let packed = slots(&judges, Some(&candidate?.encoder));
            Some(lz4_bytes * packed / slots(&judges, None))
        });
        let current = self.dictionaries.current();
        let current = current.map(|encoder| slots(&all, Some(&encoder)));
        // As it will be judged once there are enough.
        let pays = |&bytes: &u64| is_smaller(bytes, lz4_bytes, LZ4_GAIN_PERCENT);
        let bytes = current.into_iter().chain(new).min().filter(pays).unwrap_or(lz4_bytes);
        Foretelling { pages: count, fill_pages, packed_bytes: Some(bytes / pages.len() as u64) }
    }

    /// A copy of what is stored under `handle`, if it is in DRAM and still there; else,
    /// perhaps, of another page that has come in its place. Whoever asks need not own a
    /// reference: this is for samples.
    #[must_use]
    pub fn glance(&self, handle: Handle) -> Option<Page> {
        match Target::of(handle) {
            Target::Fill(value) => {
                let mut page = [0; PAGE_SIZE];
                fill(value, &mut page);
                Some(page)
            }
            Target::Object(id) => self.glance_at(id),
            Target::InFile { .. } => None,
        }
    }

    fn glance_at(&self, id: u32) -> Option<Page> {
        if !self.try_reference(id) {
            return None;
        }
        let mut page = [0; PAGE_SIZE];
        let in_dram = self.location(id).tier == Tier::Dram;
        let read =
            in_dram && with_scratch(|scratch| self.read_object(scratch, id, &mut page)).is_ok();
        self.drop_reference(id);
        read.then_some(page)
    }

    fn pays(&self, verdict: &Verdict, judged: u64, candidate: &Candidate) -> bool {
        let smaller = |than, percent| is_smaller(verdict.new_bytes, than, percent);
        let before = verdict.current_bytes.unwrap_or(verdict.lz4_bytes);
        let gain = before.saturating_sub(verdict.new_bytes) * self.counters.objects.load(Relaxed);
        smaller(verdict.lz4_bytes, LZ4_GAIN_PERCENT)
            && verdict.current_bytes.is_none_or(|current| smaller(current, CURRENT_GAIN_PERCENT))
            && gain / judged >= candidate.cost_bytes()
    }

    /// Distinct living pages in DRAM, drawn at random.
    fn sample(&self) -> Vec<Page> {
        let mut random = random_seed();
        let mut drawn = HashSet::new();
        let mut pages = Vec::new();
        for _ in 0..SAMPLE_PAGES * DRAWS_PER_PAGE {
            // Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators
            // (2014), reduced to what sampling needs.
            random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let high = u64::from(self.table.high());
            let from = (((mixed >> 32) * high) >> 32) as u32;
            // Whatever lives next: ids that are free, or whose pages are in the
            // file, may be many.
            let ahead = |set: &crate::id_set::IdSet| {
                set.next_around(from).map(|id| (id.wrapping_sub(from), id))
            };
            let nearest = [&self.table.demotable, &self.table.staged].map(ahead);
            let Some(&(_, id)) = nearest.iter().flatten().min() else { break };
            if drawn.insert(id) {
                pages.extend(self.glance_at(id));
            }
            if pages.len() == SAMPLE_PAGES {
                break;
            }
        }
        pages
    }

    /// Everything in DRAM may get smaller by a new dictionary. The set is a
    /// hint: members that have gone or changed meanwhile are passed over.
    fn offer_all_for_repacking(&self) {
        for id in 1..self.table.high() {
            let word = Word(self.table.word(id).load(Acquire));
            if word.references() == 0 {
                continue;
            }
            let location = word.location();
            if location.tier == Tier::Dram && location.codec != Codec::Staged {
                self.table.repackable.insert(id);
            }
        }
    }
}

/// Trains from most of these pages: the others, to judge with; from how many; and
/// what came of it. None: pages that have nothing in common.
fn train(pages: &[Page], id: u32) -> (Vec<&Page>, u32, Option<Candidate>) {
    let mut samples = Vec::with_capacity(pages.len() * PAGE_SIZE);
    let mut judges = Vec::new();
    for (index, page) in pages.iter().enumerate() {
        if index % JUDGE_EVERY == 0 {
            judges.push(page);
        } else {
            samples.extend_from_slice(page);
        }
    }
    let sizes = vec![PAGE_SIZE; samples.len() / PAGE_SIZE];
    let trained = zstd::dict::from_continuous(&samples, &sizes, MAX_CONTENT_BYTES);
    let candidate = trained.ok().and_then(|content| Candidate::prepare(content, id));
    (judges, sizes.len() as u32, candidate)
}

/// Whether it is smaller by so much at least.
fn is_smaller(bytes: u64, than: u64, percent: u64) -> bool {
    bytes * 100 <= than * (100 - percent)
}

/// What these pages take, packed: bytes of slots.
fn slots(pages: &[&Page], encoder: Option<&Encoder>) -> u64 {
    with_scratch(|scratch| {
        let cost = |page: &&Page| {
            let packed = scratch.pack_fast(encoder, page);
            SizeClass::of(packed.map_or(PAGE_SIZE, |(_, len)| len)).slot_bytes()
        };
        pages.iter().map(cost).sum()
    })
}

fn judge(pages: &[&Page], current: Option<&Encoder>, new: &Encoder) -> Verdict {
    Verdict {
        lz4_bytes: slots(pages, None),
        current_bytes: current.map(|current| slots(pages, Some(current))),
        new_bytes: slots(pages, Some(new)),
    }
}

impl fmt::Display for Training {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Busy => f.write_str("another training is under way"),
            Self::NoRoom => f.write_str("the store holds all the dictionaries that it may"),
            Self::TooFewPages { pages } => {
                write!(f, "{pages} pages are too few to train a dictionary from")
            }
            Self::NothingInCommon { pages } => {
                write!(f, "no dictionary comes out of {pages} pages")
            }
            Self::Judged {
                adopted,
                dictionary,
                dictionary_bytes,
                trained_pages,
                judged_pages,
                lz4_bytes,
                current_bytes,
                new_bytes,
            } => {
                let each = |bytes: u64| bytes / u64::from(judged_pages.max(1));
                let verdict = if adopted { "adopted" } else { "not adopted" };
                write!(
                    f,
                    "dictionary {dictionary} {verdict}: {} bytes a page on average, with lz4 {}",
                    each(new_bytes),
                    each(lz4_bytes)
                )?;
                if let Some(bytes) = current_bytes {
                    write!(f, ", with the last dictionary {}", each(bytes))?;
                }
                write!(
                    f,
                    " (trained from {trained_pages} pages, judged by {judged_pages}, costs {} KiB)",
                    dictionary_bytes >> 10
                )
            }
        }
    }
}

#[cfg(test)]
#[path = "train_tests.rs"]
mod tests;
