//! Which resident pages to evict next. One owner (the tenant's maintenance
//! thread); the per-page estimates are in cells that fault handlers update
//! through [`crate::gap`], this holds only the order of eviction.
//!
//! Resident pages hide their uses, so their estimates grow stale. Each page
//! therefore has a key, its estimate in levels plus one level for every
//! [`Census::resident`] arrivals since it came, and the largest key goes first.
//! Cold pages leave at once, warm ones after a while, hot ones last; but
//! everything leaves at some time, and what comes back proves itself anew. This
//! is what lets a set of hot pages that has moved on be found without probing,
//! and bounds how long one lucky sample can keep a cold page.
//!
//! Three guards:
//! - *nursery*: the youngest arrivals are never victims, so a program always gets
//!   to use the pages that it just waited for, however small its budget;
//! - *newcomers* (first touches) are treated as pages used as often as the average
//!   of all: a load phase runs through first in first out and does not push out
//!   pages with a proven shorter gap;
//! - *loops*: where the returns of a level come exactly when expected, its pages
//!   are being walked in a circle larger than their share of memory, and evicting
//!   the oldest would miss every single one. There the youngest goes instead.

use strata_units::PageId;

use crate::gap::{Arrival, LEVELS, Level};
use crate::queues::Queues;

/// Queue of the youngest arrivals; 0..LEVELS are the levels, of which 0 holds
/// the pages without history.
const NURSERY: usize = LEVELS;
/// The nursery's size: at least this many pages (an instruction and a system
/// call with its buffers get all they touch)...
const NURSERY_MIN_PAGES: usize = 64;
/// ...or this part of what is resident.
const NURSERY_PART: usize = 64;

/// A return counts as expected when it is off by no more than this many levels.
const LOOP_LEVELS: u8 = 2;
/// Share of expected returns, in 2^-16, from which a level counts as a loop. Of
/// a memoryless page's returns 30 % are that close to its estimate.
const LOOP_SHARE: u16 = 40_000;
/// log2 of the returns over which that share is averaged.
const LOOP_MEMORY_SHIFT: u32 = 8;
/// One victim in so many is chosen by age even in a loop, to notice its end.
const LOOP_CHECK_EVERY: u32 = 16;

/// What the owner of the page map says about a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
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
    fn standing(&self, page: PageId) -> Standing;
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
        Level::of_gap(u32::try_from(self.managed).unwrap_or(u32::MAX).max(NURSERY_MIN_PAGES as u32))
    }
}

/// The order of eviction of one tenant's resident pages.
pub struct Replacement {
    queues: Queues<{ LEVELS + 1 }>,
    now: u32,
    expected_share: [u16; LEVELS],
    victims_total: u32,
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
        Self { queues: Queues::new(), now: 0, expected_share: [0; LEVELS], victims_total: 0 }
    }

    /// `page` came into DRAM (fault or first touch). `now` is the tenant's count
    /// of arrivals; records may come a little out of order.
    pub fn arrived(&mut self, page: PageId, arrival: Arrival, now: u32) {
        self.advance(now);
        if arrival.repeated {
            let share = &mut self.expected_share[arrival.level.index()];
            let expected = arrival.surprise.unsigned_abs() <= LOOP_LEVELS;
            let target = if expected { i32::from(u16::MAX) } else { 0 };
            let step = (target - i32::from(*share)) >> LOOP_MEMORY_SHIFT;
            *share = share.saturating_add_signed(step as i16);
        }
        self.queues.push(NURSERY, page, self.now);
    }

    /// A victim that could not be evicted (the kernel refused) stays resident.
    pub fn refused(&mut self, page: PageId, now: u32) {
        self.advance(now);
        self.queues.push(NURSERY, page, self.now);
    }

    /// Appends up to `want` pages to `out`, the best to lose first. They have
    /// left the queues: each is either evicted, or given back by
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
        self.graduate(census, pages);
        let scale = self.age_scale(census);
        let newcomer = census.newcomer();
        let mut keys = [f32::NEG_INFINITY; LEVELS];
        for (level, key) in keys.iter_mut().enumerate() {
            *key = self.key(level, newcomer, scale);
        }
        let until = out.len() + want;
        while out.len() < until {
            let check = self.victims_total.is_multiple_of(LOOP_CHECK_EVERY);
            let Some(level) = self.choose(&keys, newcomer, check) else { break };
            let youngest = !check && self.is_loop(level);
            let popped = if youngest {
                self.queues.pop_youngest(level)
            } else {
                self.queues.pop_oldest(level, self.now).map(|(page, _)| page)
            };
            let page = popped.expect("a queue with a key has an entry");
            keys[level] = self.key(level, newcomer, scale);
            match pages.standing(page) {
                // Another level: this entry is from an earlier stay, and the
                // page has a younger one elsewhere.
                Standing::Evictable(current) if current.index() == level => {
                    out.push(page);
                    self.victims_total = self.victims_total.wrapping_add(1);
                }
                Standing::Busy => self.queues.push(NURSERY, page, self.now),
                Standing::Evictable(_) | Standing::Gone => {}
            }
        }
    }

    /// Drops entries of pages that are gone when they have become many. Called
    /// by [`Self::victims`]; the owner calls it on its tick too, for a tenant
    /// that discards and touches memory without ever being squeezed.
    pub fn maintain(&mut self, census: Census, pages: &impl Pages) {
        let bound = census.resident + census.resident / 4 + 1024;
        let slack = self.queues.slack_chunks();
        if self.queues.entries() <= bound && slack <= 64 + self.queues.entries() / 128 {
            return;
        }
        let mut old = core::mem::replace(&mut self.queues, Queues::new());
        let mut seen: Vec<u64> = Vec::new();
        // The nursery first: its entries are the youngest, hence the true ones.
        for queue in (0..=NURSERY).rev() {
            while let Some((page, time)) = old.pop_oldest(queue, self.now) {
                let stale = match pages.standing(page) {
                    Standing::Gone => true,
                    Standing::Busy => false,
                    Standing::Evictable(level) => queue != NURSERY && level.index() != queue,
                };
                if !stale && first_sight(&mut seen, page) {
                    self.queues.push(queue, page, time);
                }
            }
        }
    }

    /// Starts anew from a walk over all resident pages, after the owner lost its
    /// state. The estimates survive in the cells, the order within a level does
    /// not.
    pub fn rebuild(&mut self, resident: impl IntoIterator<Item = (PageId, Level)>, now: u32) {
        *self = Self { now, ..Self::new() };
        for (page, level) in resident {
            self.queues.push(level.index(), page, now);
        }
    }

    /// Entries held, stale ones included.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.queues.entries()
    }

    /// Memory held.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.queues.memory_bytes() + size_of::<Self>() - size_of::<Queues<{ LEVELS + 1 }>>()
    }

    fn advance(&mut self, now: u32) {
        if now.wrapping_sub(self.now) as i32 > 0 {
            self.now = now;
        }
    }

    /// Moves those who are no longer the youngest into their levels.
    fn graduate(&mut self, census: Census, pages: &impl Pages) {
        let keep = (census.resident / NURSERY_PART).max(NURSERY_MIN_PAGES);
        let surplus = self.queues.len(NURSERY).saturating_sub(keep);
        for _ in 0..surplus {
            let Some((page, time)) = self.queues.pop_oldest(NURSERY, self.now) else { break };
            match pages.standing(page) {
                Standing::Evictable(level) => self.queues.push(level.index(), page, time),
                Standing::Busy => self.queues.push(NURSERY, page, self.now),
                Standing::Gone => {}
            }
        }
    }

    /// Levels of age for one arrival.
    fn age_scale(&self, census: Census) -> f32 {
        1.0 / census.resident.max(1024) as f32
    }

    fn is_loop(&self, level: usize) -> bool {
        level != Level::UNKNOWN.index() && self.expected_share[level] >= LOOP_SHARE
    }

    /// How much the oldest page of a level deserves to leave.
    fn key(&self, level: usize, newcomer: Level, scale: f32) -> f32 {
        match self.queues.oldest_time(level, self.now) {
            None => f32::NEG_INFINITY,
            Some(time) => base(level, newcomer) + self.now.wrapping_sub(time) as f32 * scale,
        }
    }

    fn choose(&self, keys: &[f32; LEVELS], newcomer: Level, check: bool) -> Option<usize> {
        let mut best = (f32::NEG_INFINITY, None);
        for (level, &key) in keys.iter().enumerate() {
            if key == f32::NEG_INFINITY {
                continue;
            }
            // In a loop it is the youngest that would go, and it has no age.
            let key = if !check && self.is_loop(level) { base(level, newcomer) } else { key };
            if key >= best.0 {
                best = (key, Some(level));
            }
        }
        best.1
    }
}

fn base(level: usize, newcomer: Level) -> f32 {
    if level == Level::UNKNOWN.index() { newcomer.index() as f32 } else { level as f32 }
}

/// Marks `page`; false when it was marked before.
fn first_sight(seen: &mut Vec<u64>, page: PageId) -> bool {
    let (word, bit) = (page.0 as usize / 64, 1u64 << (page.0 % 64));
    if word >= seen.len() {
        seen.resize(word + 1, 0);
    }
    let first = seen[word] & bit == 0;
    seen[word] |= bit;
    first
}
