//! Which resident pages to evict next. One owner (the tenant's maintenance
//! thread); the per-page estimates are in cells that fault handlers update
//! through [`crate::gap`], this decides the order of eviction.
//!
//! Every page has a key: how soon it is wanted again, by its own samples and by
//! its neighbours' ([`crate::neighbours`]), plus a little for its age. A walk goes
//! around the table of pages, neighbourhood by neighbourhood, and takes those
//! whose keys are among the largest of the last round. Nothing is sorted, nothing
//! is queued, and what the walk finds wrong it puts right.
//!
//! Estimates of resident pages grow stale, and staleness is met where it costs
//! least: of a neighbourhood that is wholly resident one page is evicted now and
//! then as a *probe*. If it comes back in time, the whole neighbourhood is
//! confirmed; if it does not, more follow, and soon all. When pages come back
//! much sooner than their neighbourhoods' past explains, something has changed,
//! and probing is speeded up for as long as that lasts, and then goes on where
//! nothing has come back since.
//!
//! Two guards:
//! - *the youngest* arrivals are never victims, so a program always gets to use
//!   the pages that it just waited for, however small its budget;
//! - *newcomers* (first touches) are treated as pages used as often as the average
//!   of all: a load phase runs through first in first out and does not push out
//!   pages with a proven shorter gap.

use std::collections::VecDeque;

use strata_units::PageId;

use crate::gap::{LEVELS, LEVELS_PER_OCTAVE, Level};
use crate::neighbours::{self, Sight, TICKS_PER_TURN};
use crate::table::{GROUP_PAGES, Record, State, Table};

/// At least this many of the youngest are spared (an instruction and a system call
/// with its buffers get all they touch)...
const YOUNG_MIN_PAGES: usize = 64;
/// ...or this part of what is resident.
const YOUNG_PART: usize = 64;

/// Most victims of one call: 16 MiB, more than is evicted between two looks.
pub const VICTIMS_MAX: usize = 4096;

/// A round of the walk takes this part of the resident pages, but not fewer than
/// [`ROUND_MIN_PAGES`]. Smaller rounds choose a little better and cost more.
const ROUND_PART: usize = 48;
const ROUND_MIN_PAGES: usize = 16;
/// Keys are counted in steps of a 32nd of an octave.
const STEPS_PER_OCTAVE: f32 = 32.0;
const STEPS: usize = 40 * STEPS_PER_OCTAVE as usize;
/// Ages are kept within half of what a stamp can tell.
const AGE_MAX_TICKS: u16 = 0x7000;

/// A round that took longer than this (a tenant that rested) counts as this long.
const MOST_ROUND_TURNS: f32 = 1.0 / 8.0;

/// Turns between two probes of a neighbourhood while nothing changes.
const PROBE_EVERY_TURNS: f32 = 1.0;
/// How much faster it goes when everything has changed.
const PROBE_SPEEDUP: f32 = 2048.0;
/// Probes that may be out at a time during a change: several say sooner that
/// nobody comes.
const PROBES_IN_CHANGE: u32 = 8;
/// A return after this part of the usual silence counts as early.
const EARLY_PART: f32 = 0.125;
/// Turns over which the share of early returns is averaged: now, and usually.
const NOW_TURNS: f32 = 1.0 / 64.0;
const USUALLY_TURNS: f32 = 0.5;
/// Returns to a neighbourhood that follow each other within so many turns are one
/// visit.
const BURST_TURNS: f32 = 1.0 / 256.0;
/// Excess of early returns that is taken for chance.
const CHANCE: f32 = 0.05;
/// So much more marks a change in which what was learned before may be void. (A moved
/// hot set brings 0.1 to 0.17, as does a scan beside one; skewed requests 0.02 at most.)
const MARKED_CHANGE: f32 = 0.03;
/// Turns for which a change is remembered: the early returns end long before the last
/// neighbourhood that was hot has been found cold.
const CHANGE_LASTS_TURNS: f32 = 4.0;

/// What the owner of the page map says about a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Candidate {
    /// Resident and may leave; its estimate by [`crate::gap::level`].
    Evictable(Level),
    /// Resident, but pinned, locked or in motion just now: asked about again
    /// later.
    Busy,
    /// Not resident. It is announced again when it arrives.
    Gone,
}

/// The page map as the replacement sees it.
pub trait Pages {
    /// How `page` stands now.
    fn candidate(&self, page: PageId) -> Candidate;
}

/// How many pages the tenant has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Census {
    /// With an entry in the page map, wherever they are.
    pub managed: usize,
    /// In the address space.
    pub resident: usize,
}

impl Census {
    /// The guess for a page without history: if all pages were used alike, each
    /// would come once in as many faults as there are pages.
    #[must_use]
    pub fn newcomer(&self) -> Level {
        Level::of_gap(u32::try_from(self.managed).unwrap_or(u32::MAX).max(YOUNG_MIN_PAGES as u32))
    }
}

/// The order of eviction of one tenant's resident pages.
pub struct Replacement {
    table: Table,
    now: u32,
    /// 256 of them are a turn; wraps.
    ticks: f64,
    resident: usize,
    /// The youngest, oldest first. Entries of pages that are gone or came twice
    /// are skipped when they come up.
    young: VecDeque<PageId>,
    /// Chosen by the walk, not yet asked for.
    chosen: VecDeque<PageId>,
    walk: Walk,
    surprise: Surprise,
}

/// Where the walk is, and which keys it takes.
struct Walk {
    /// The next neighbourhood.
    group: usize,
    /// Number of the round, for pseudo-random choices.
    round: u32,
    started: u32,
    /// Length of the round before, in turns.
    turns: f32,
    /// Keys met in this round.
    counts: Vec<u32>,
    /// Steps above this one are taken, and of this one a share.
    step: usize,
    share: f32,
    taken: usize,
    /// Rounds in a row in which nothing was taken.
    empty_rounds: u32,
}

impl Walk {
    fn new() -> Self {
        Self {
            group: 0,
            round: 0,
            started: 0,
            turns: 0.0,
            counts: vec![0; STEPS],
            step: STEPS,
            share: 0.0,
            taken: 0,
            empty_rounds: 0,
        }
    }

    /// Sets the limit so that of the keys of this round `want` would be taken, and
    /// begins the next.
    fn next_round(&mut self, want: usize, now: u32, resident: usize) {
        let turns = now.wrapping_sub(self.started) as f32 / resident.max(YOUNG_MIN_PAGES) as f32;
        self.turns = turns.min(MOST_ROUND_TURNS);
        self.empty_rounds = if self.taken == 0 { self.empty_rounds + 1 } else { 0 };
        let mut above = 0;
        self.step = 0;
        self.share = 1.0;
        // Twice in vain: whatever there is.
        if self.empty_rounds < 2 {
            for (step, &count) in self.counts.iter().enumerate().rev() {
                if above + count as usize >= want {
                    self.step = step;
                    self.share = (want - above) as f32 / count.max(1) as f32;
                    break;
                }
                above += count as usize;
            }
        }
        self.counts.fill(0);
        (self.group, self.taken, self.started) = (0, 0, now);
        self.round = self.round.wrapping_add(1);
    }
}

/// How many pages come back much sooner than their neighbourhoods' past explains.
struct Surprise {
    early_now: f32,
    early_usually: f32,
    /// When there was a marked change last, for [`CHANGE_LASTS_TURNS`].
    changed: Option<u32>,
}

impl Default for Surprise {
    /// Where nothing is known yet everything is early, and no change.
    fn default() -> Self {
        Self { early_now: 1.0, early_usually: 1.0, changed: None }
    }
}

impl Surprise {
    fn see(&mut self, silences: f32, resident: usize) {
        let early = f32::from(u8::from(silences < EARLY_PART));
        let pages = resident.max(1024) as f32;
        self.early_now += (early - self.early_now) / (NOW_TURNS * pages);
        self.early_usually += (early - self.early_usually) / (USUALLY_TURNS * pages);
    }

    /// Notes or forgets a marked change.
    fn pass(&mut self, now: u32, resident: usize) {
        let lasts = CHANGE_LASTS_TURNS * resident.max(YOUNG_MIN_PAGES) as f32;
        if self.change() > MARKED_CHANGE {
            self.changed = Some(now);
        } else if self.changed.is_some_and(|then| now.wrapping_sub(then) as f32 > lasts) {
            self.changed = None;
        }
    }

    /// 0 when all is as usual, 1 when nothing is.
    fn change(&self) -> f32 {
        let room = (1.0 - self.early_usually).max(0.2);
        ((self.early_now - self.early_usually) / room - CHANCE).clamp(0.0, 1.0)
    }
}

impl Default for Replacement {
    fn default() -> Self {
        Self::new()
    }
}

impl Replacement {
    /// Nothing resident.
    #[must_use]
    pub fn new() -> Self {
        Self {
            table: Table::default(),
            now: 0,
            ticks: 0.0,
            resident: 0,
            young: VecDeque::new(),
            chosen: VecDeque::new(),
            walk: Walk::new(),
            surprise: Surprise::default(),
        }
    }

    /// `page` came into DRAM (fault or first touch) and its cell is up to date.
    /// `now` is the tenant's count of arrivals; records may come a little out of
    /// order.
    pub fn arrived(&mut self, page: PageId, now: u32) {
        self.advance(now);
        let burst_faults = self.resident as f32 * BURST_TURNS;
        let silence = self.table.arrive(page, self.now, self.tick(), burst_faults.max(1.0));
        if let Some(silences) = silence {
            self.surprise.see(silences, self.resident);
        }
        self.surprise.pass(self.now, self.resident);
        self.young.push_back(page);
    }

    /// A victim that could not be evicted (the kernel refused) stays resident.
    pub fn refused(&mut self, page: PageId, now: u32) {
        self.advance(now);
        self.table.stay(page, self.now, self.tick());
        self.young.push_back(page);
    }

    /// A victim that may not leave for a while stays resident and is not chosen until it
    /// is announced anew, by [`Self::refused`].
    pub fn set_aside(&mut self, page: PageId, now: u32) {
        self.advance(now);
        self.table.stay(page, self.now, self.tick());
        self.table.entry(page).0.set_state(State::Absent);
    }

    /// Appends up to `want` pages ([`VICTIMS_MAX`] at most) to `out`, the best to
    /// lose, none twice. Each is either evicted, or given back by
    /// [`Self::refused`]. Fewer come when nothing else may leave; if much more
    /// is resident than that, records were lost and [`Self::rebuild`] is due.
    pub fn victims(
        &mut self,
        now: u32,
        want: usize,
        census: Census,
        pages: &impl Pages,
        out: &mut Vec<PageId>,
    ) {
        self.advance(now);
        self.maintain(census, pages);
        let until = out.len() + want.min(VICTIMS_MAX);
        loop {
            while out.len() < until {
                let Some(page) = self.chosen.pop_front() else { break };
                if self.table.record(page).is_none_or(|r| r.state() != State::Chosen) {
                    continue;
                }
                match pages.candidate(page) {
                    Candidate::Evictable(_) => {
                        self.table.depart(page, self.now, self.tick());
                        out.push(page);
                    }
                    Candidate::Busy => {
                        self.table.entry(page).0.set_state(State::Young);
                        self.young.push_back(page);
                    }
                    Candidate::Gone => self.table.entry(page).0.set_state(State::Absent),
                }
            }
            if out.len() >= until || !self.walk_on(until - out.len(), census) {
                return;
            }
        }
    }

    /// Keeps what is known of young pages small. Called by [`Self::victims`]; the
    /// owner calls it on its tick too, for a tenant that discards and touches
    /// memory without ever being squeezed.
    pub fn maintain(&mut self, census: Census, pages: &impl Pages) {
        self.resident = census.resident;
        let keep = (census.resident / YOUNG_PART).max(YOUNG_MIN_PAGES);
        for _ in 0..self.young.len().saturating_sub(keep) {
            let Some(page) = self.young.pop_front() else { break };
            let (record, _) = self.table.entry(page);
            if record.state() != State::Young {
                continue;
            }
            match pages.candidate(page) {
                Candidate::Evictable(level) => {
                    record.level = level.index() as u8;
                    record.set_state(State::Resident);
                }
                Candidate::Busy => self.young.push_back(page),
                Candidate::Gone => record.set_state(State::Absent),
            }
        }
        if self.young.capacity() > 4 * (keep + 1024) {
            self.young.shrink_to(2 * keep);
        }
    }

    /// Starts anew from a walk over all resident pages, after the owner lost its
    /// state. The pages' own estimates survive in the cells, what was known of
    /// neighbourhoods does not.
    pub fn rebuild(&mut self, resident: impl IntoIterator<Item = (PageId, Level)>, now: u32) {
        *self = Self { now, ticks: self.ticks, resident: self.resident, ..Self::new() };
        let tick = self.tick();
        for (page, level) in resident {
            let (record, _) = self.table.entry(page);
            (record.level, record.stamp) = (level.index() as u8, tick);
            record.set_state(State::Resident);
        }
    }

    /// Memory held.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let lists = self.young.capacity() + self.chosen.capacity();
        size_of::<Self>()
            + self.table.memory_bytes()
            + lists * size_of::<PageId>()
            + self.walk.counts.capacity() * size_of::<u32>()
    }

    fn advance(&mut self, now: u32) {
        let passed = now.wrapping_sub(self.now);
        if passed as i32 > 0 {
            self.now = now;
            let turns = f64::from(passed) / self.resident.max(YOUNG_MIN_PAGES) as f64;
            self.ticks += turns * f64::from(TICKS_PER_TURN);
        }
    }

    fn tick(&self) -> u16 {
        self.ticks as u64 as u16
    }

    /// Walks until something is chosen or a round ends. False when nothing is left
    /// to choose.
    fn walk_on(&mut self, want: usize, census: Census) -> bool {
        let sight = Sight {
            now: self.now,
            tick: self.tick(),
            average_octave: f32::from(census.newcomer().index() as u8) / LEVELS_PER_OCTAVE as f32,
            resident: census.resident as f32,
            changed: self.surprise.changed,
        };
        while self.walk.group < self.table.groups() {
            self.judge_group(&sight);
            self.walk.group += 1;
            if !self.chosen.is_empty() {
                return true;
            }
        }
        let exhausted = self.walk.taken == 0 && self.walk.step == 0 && self.walk.share >= 1.0;
        let round = (census.resident / ROUND_PART).max(ROUND_MIN_PAGES).max(want);
        self.walk.next_round(round, self.now, census.resident);
        !exhausted
    }

    fn judge_group(&mut self, sight: &Sight) {
        let group_index = self.walk.group;
        let Some((records, group)) = self.table.group(group_index) else { return };
        records.iter_mut().for_each(|record| limit_age(record, sight.tick));
        let words = neighbours::words(records);
        let resident = resident(records);
        if resident != 0 {
            let judgement = neighbours::judge(sight, &words, group, uniform(group_index as u32, 0));
            let keys = neighbours::keys(sight, &judgement, &words);
            let doubted = sight.changed.is_some_and(|then| !group.returned_since(then, sight.now));
            let change = self.surprise.change();
            let probes = probes(&self.walk, change, doubted, judgement.probes, group.out);
            // Those that stay.
            let mut rest = resident;
            let mut left = resident;
            while left != 0 {
                let index = left.trailing_zeros() as usize;
                left &= left - 1;
                let key = keys[index];
                let step = ((key * STEPS_PER_OCTAVE) as usize).min(STEPS - 1);
                self.walk.counts[step] += 1;
                let page = PageId((group_index * GROUP_PAGES + index) as u32);
                let takes = step > self.walk.step
                    || step == self.walk.step && uniform(page.0, self.walk.round) < self.walk.share;
                if takes {
                    records[index].set_state(State::Chosen);
                    self.chosen.push_back(page);
                    self.walk.taken += 1;
                    rest &= !(1 << index);
                }
            }
            for _ in 0..probes {
                let Some(index) = largest(&keys, rest) else { break };
                records[index].set_state(State::Chosen);
                self.chosen.push_back(PageId((group_index * GROUP_PAGES + index) as u32));
                self.walk.taken += 1;
                rest &= !(1 << index);
            }
        }
        self.table.leave_group(group_index);
    }
}

/// How many more pages of a neighbourhood with `out` absent pages leave, to see
/// whether they come back: one by one as long as all is as usual. In a change as many
/// as are to be out: the walk comes by again when a round has gone. One that is
/// `doubted`, because nothing has come back since a change, is probed at once.
fn probes(walk: &Walk, change: f32, doubted: bool, suspicion: u32, out: u8) -> u32 {
    let many = doubted || change > 0.0;
    let (at_once, most) = if many { (PROBES_IN_CHANGE, u32::MAX) } else { (1, 1) };
    let out = u32::from(out);
    if out >= at_once {
        return suspicion.saturating_sub(out).min(most);
    }
    let chance = walk.turns / PROBE_EVERY_TURNS * (1.0 + PROBE_SPEEDUP * change * change);
    if doubted || uniform(walk.group as u32, !walk.round) < chance { at_once - out } else { 0 }
}

/// Which of the pages of `among`, a bit each, has the largest key.
fn largest(keys: &[f32; GROUP_PAGES], among: u64) -> Option<usize> {
    let pages = (0..GROUP_PAGES).filter(|page| among >> page & 1 == 1);
    pages.max_by(|&a, &b| keys[a].total_cmp(&keys[b]))
}

/// A bit for each page that is resident and may be chosen.
fn resident(records: &[Record; GROUP_PAGES]) -> u64 {
    let bit =
        |(index, record): (usize, &Record)| u64::from(record.state() == State::Resident) << index;
    records.iter().enumerate().map(bit).sum()
}

/// Ages do not wrap around: whoever is older counts as this old.
fn limit_age(record: &mut Record, tick: u16) {
    if tick.wrapping_sub(record.stamp) > AGE_MAX_TICKS {
        record.stamp = tick.wrapping_sub(AGE_MAX_TICKS);
    }
}

/// Between 0 and 1, the same for the same arguments.
fn uniform(a: u32, b: u32) -> f32 {
    let mut mixed = (u64::from(a) << 32 | u64::from(b)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed >> 40) as f32 / (1u64 << 24) as f32
}

const _: () = assert!(LEVELS <= 1 << 8 && LEVELS as f32 / LEVELS_PER_OCTAVE as f32 <= 40.0);

#[cfg(test)]
#[path = "replacement_tests.rs"]
mod tests;
