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
//! Two guards:
//! - *nursery*: the youngest arrivals are never victims, so a program always gets
//!   to use the pages that it just waited for, however small its budget;
//! - *newcomers* (first touches) are treated as pages used as often as the average
//!   of all: a load phase runs through first in first out and does not push out
//!   pages with a proven shorter gap.
//!
//! A walk in circles through more pages than there is room for needs no guard of
//! its own: the small differences between estimates keep some of the circle
//! resident, where LRU would miss every page of it.

use std::collections::HashSet;

use strata_units::PageId;

use crate::gap::{LEVELS, Level};
use crate::queues::Queues;

/// Queue of the youngest arrivals; 0..LEVELS are the levels, of which 0 holds
/// the pages without history.
const NURSERY: usize = LEVELS;
/// The nursery's size: at least this many pages (an instruction and a system
/// call with its buffers get all they touch)...
const NURSERY_MIN_PAGES: usize = 64;
/// ...or this part of what is resident.
const NURSERY_PART: usize = 64;

/// Most victims of one call: 16 MiB, more than is evicted between two looks.
pub const VICTIMS_MAX: usize = 4096;

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
    /// The victims of the call under way.
    chosen: HashSet<PageId>,
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
        Self { queues: Queues::new(), now: 0, chosen: HashSet::new() }
    }

    /// `page` came into DRAM (fault or first touch) and its cell is up to date.
    /// `now` is the tenant's count of arrivals; records may come a little out of
    /// order.
    pub fn arrived(&mut self, page: PageId, now: u32) {
        self.advance(now);
        self.queues.push(NURSERY, page, self.now);
    }

    /// A victim that could not be evicted (the kernel refused) stays resident.
    pub fn refused(&mut self, page: PageId, now: u32) {
        self.advance(now);
        self.queues.push(NURSERY, page, self.now);
    }

    /// Appends up to `want` pages ([`VICTIMS_MAX`] at most) to `out`, the best to
    /// lose first, none twice. They have left the queues: each is either evicted, or given back by
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
        let scale = age_scale(census);
        let newcomer = census.newcomer();
        let mut keys = [f32::NEG_INFINITY; LEVELS];
        for (level, key) in keys.iter_mut().enumerate() {
            *key = self.key(level, newcomer, scale);
        }
        self.chosen.clear();
        let until = out.len() + want.min(VICTIMS_MAX);
        while out.len() < until {
            let Some(level) = largest(&keys) else { break };
            let popped = self.queues.pop_oldest(level, self.now);
            let (page, _) = popped.expect("a queue with a key has an entry");
            keys[level] = self.key(level, newcomer, scale);
            match pages.standing(page) {
                // Another level: this entry is from an earlier stay, and the
                // page has a younger one elsewhere.
                Standing::Evictable(current) if current.index() == level => {
                    // A page that was discarded and touched has two entries.
                    if self.chosen.insert(page) {
                        out.push(page);
                    }
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
        let bound = census.resident + census.resident / 8 + 1024;
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
        let fixed = size_of::<Self>() - size_of::<Queues<{ LEVELS + 1 }>>();
        // A table entry is the page and a byte, in a table at most 7/8 full.
        let chosen = self.chosen.capacity() * (size_of::<PageId>() + 1) * 8 / 7;
        self.queues.memory_bytes() + fixed + chosen
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

    /// How much the oldest page of a level deserves to leave.
    fn key(&self, level: usize, newcomer: Level, scale: f32) -> f32 {
        match self.queues.oldest_time(level, self.now) {
            None => f32::NEG_INFINITY,
            Some(time) => {
                let estimate =
                    if level == Level::UNKNOWN.index() { newcomer.index() } else { level };
                estimate as f32 + self.now.wrapping_sub(time) as f32 * scale
            }
        }
    }
}

/// Levels of age for one arrival. Slower ageing misses a little less when nothing
/// changes, faster ageing finds a moved hot set sooner (docs/policy.md).
fn age_scale(census: Census) -> f32 {
    1.0 / census.resident.max(1024) as f32
}

/// The queue with the largest key; the colder one of equals.
fn largest(keys: &[f32; LEVELS]) -> Option<usize> {
    let mut best = (f32::NEG_INFINITY, None);
    for (level, &key) in keys.iter().enumerate() {
        if key > f32::NEG_INFINITY && key >= best.0 {
            best = (key, Some(level));
        }
    }
    best.1
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
