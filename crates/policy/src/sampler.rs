//! Which pages are watched for the miss-ratio curve, and when each is taken out
//! of its address space so that its next use shows. The curve itself is made in
//! [`crate::curve`].
//!
//! Pages are sampled by a hash of their number, of which the limit falls as the
//! tenant grows, so that a fixed number of them is watched (SHARDS: Waldspurger,
//! Park, Garthwaite, Ahmad: Efficient MRC construction with SHARDS, FAST 2015).
//! SHARDS sees all uses of a sampled page; here a page that is mapped is used
//! unseen. So each is *probed*: moved out, it comes back by a fault when it is
//! used, and is moved out once more at once. The second absence is a whole gap
//! between two uses; the first began at an arbitrary moment, and is half a gap
//! for a page that is used like clockwork. Only for pages that have no whole gaps
//! yet does it count.
//!
//! What the tenant's own replacement evicts of the sample is seen the same way.
//!
//! Time is cut into *epochs*. Whether the workload changes is seen by how well the last
//! one and the one under way foretell each other: see [`Sampler::end_epoch`]. What was
//! sampled before these two counts for less with each epoch, and not at all once a
//! change was seen: pages that are used seldom, of which it depends how little room is
//! enough, show little in one epoch.

mod drift;

use std::collections::{BTreeMap, VecDeque};

use strata_units::PageId;

use crate::advice::{TOO_FAST, is_drift_from};
use crate::curve::{GROUPS, Seen};

/// Pages watched at most.
pub const MOST_PAGES: usize = 1024;
/// The part of the pages that [`Sampler::coldest`] names.
pub const COLD_PART: f64 = 2.0 / 3.0;
/// Samples a page after which an epoch may end.
pub const EPOCH_RETURNS: f64 = 4.0;
/// Epochs whose times differ by more than this factor tell no drift: the short one
/// foretells worse than either half of both, also when nothing has changed.
const UNLIKE: f64 = 2.0;

/// An epoch lasts at least and, for a tenant that works as before, at most so many
/// seconds by the clock.
const EPOCH_SECONDS: (f64, f64) = (5.0, 15.0);
/// A tenant that works less has the epoch last until it has had as much of its own time
/// as half of the one before, or of so much: for whoever rests it stands still, and what
/// was seen of his work stays known.
const FULL_SECONDS: f64 = 8.0;
/// What is left at the end of an epoch of what was sampled before it.
const KEPT_PART: f32 = 0.75;
/// Nothing is left from this drift on: less than that which makes advice useless, for it
/// adds up.
const FORGET_FROM: f64 = TOO_FAST / 2.0;

/// An epoch in which the tenant had less time of its own than this says nothing.
pub const LEAST_SECONDS: f64 = 0.05;

/// Pages that lie so close are left out of the sample together when its error is
/// estimated.
const NEIGHBOURS: u32 = 16;

/// Where a watched page is.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Place {
    /// Mapped; `used`: it came back then from its first absence, the second is due.
    In { used: Option<f64> },
    /// Out since then; `used`: last used then, shortly before. What came before
    /// `counted` belongs to an earlier epoch.
    Out { since: f64, counted: f64, used: Option<f64> },
}

/// What was seen of a page in an epoch: all that shows how often pages are used
/// that chance visits.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Exposure {
    returns: f32,
    /// Time out, whether it ended in a return or not.
    away: f32,
}

impl Exposure {
    fn plus(self, other: Self) -> Self {
        Self { returns: self.returns + other.returns, away: self.away + other.away }
    }

    fn times(self, part: f32) -> Self {
        Self { returns: self.returns * part, away: self.away * part }
    }

    fn rate(self) -> f64 {
        f64::from(self.returns) / f64::from(self.away).max(f64::MIN_POSITIVE)
    }
}

/// Whole gaps.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Sum {
    returns: f32,
    away: f32,
    away_squared: f32,
    /// Time between the use before the gap and the page's leaving.
    held: f32,
}

impl Sum {
    fn add(&mut self, away: f64, held: f64) {
        self.held += held as f32;
        self.returns += 1.0;
        self.away += away as f32;
        self.away_squared += (away * away) as f32;
    }

    fn plus(self, other: Self) -> Self {
        Self {
            returns: self.returns + other.returns,
            away: self.away + other.away,
            away_squared: self.away_squared + other.away_squared,
            held: self.held + other.held,
        }
    }

    fn times(self, part: f32) -> Self {
        Self {
            returns: self.returns * part,
            away: self.away * part,
            away_squared: self.away_squared * part,
            held: self.held * part,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Watch {
    place: Place,
    /// Waits in the queue of those to be probed.
    queued: bool,
    /// Whole gaps: what is left of all before, the last epoch's in full, and now.
    whole: [Sum; 2],
    /// By epoch, and by halves of its time that take turns.
    exposure: [[Exposure; 2]; 2],
    /// What is left of earlier epochs.
    past: Exposure,
}

impl Watch {
    fn new(place: Place) -> Self {
        Self {
            place,
            queued: false,
            whole: Default::default(),
            exposure: Default::default(),
            past: Default::default(),
        }
    }

    /// Everything, the absence under way included.
    fn seen(&self, now: f64, group: u8) -> Seen {
        let whole = self.whole[0].plus(self.whole[1]);
        let exposure = self.past.plus(self.epoch(0)).plus(self.epoch(1));
        let (open, uncounted) = match self.place {
            Place::Out { since, counted, .. } => ((now - since).max(0.0), (now - counted).max(0.0)),
            Place::In { .. } => (0.0, 0.0),
        };
        Seen {
            gaps: f64::from(whole.returns),
            gap_time: f64::from(whole.away),
            gap_squares: f64::from(whole.away_squared),
            held: f64::from(whole.held),
            returns: f64::from(exposure.returns),
            away: f64::from(exposure.away) + uncounted,
            open,
            group,
        }
    }

    fn epoch(&self, epoch: usize) -> Exposure {
        self.exposure[epoch][0].plus(self.exposure[epoch][1])
    }

    fn half(&self, half: usize) -> Exposure {
        self.exposure[0][half].plus(self.exposure[1][half])
    }

    /// Counts an absence up to now.
    fn count(&mut self, half: usize, now: f64) {
        if let Place::Out { counted, .. } = &mut self.place {
            self.exposure[1][half].away += (now - *counted).max(0.0) as f32;
            *counted = now;
        }
    }
}

/// The sample of one tenant. See the module's text.
#[derive(Clone, Debug)]
pub struct Sampler {
    /// Pages whose hash is below this are watched.
    limit: u64,
    pages: BTreeMap<u32, Watch>,
    /// To be moved out for a whole gap, before all others.
    again: VecDeque<u32>,
    queue: VecDeque<u32>,
    returns_now: f64,
    /// Epochs that have ended.
    epochs: u64,
    /// When the last of them began, and the one under way.
    begun: [f64; 2],
    /// What is left of the times of those before.
    past: f64,
    /// Of an epoch, the half of its time that is under way.
    half: usize,
}

impl Default for Sampler {
    fn default() -> Self {
        Self {
            limit: 1 << 32,
            pages: BTreeMap::new(),
            again: VecDeque::new(),
            queue: VecDeque::new(),
            returns_now: 0.0,
            epochs: 0,
            begun: [0.0; 2],
            past: 0.0,
            half: 0,
        }
    }
}

/// The hash that decides: 32 bits, evenly spread.
#[must_use]
pub fn hash(page: PageId) -> u32 {
    let mixed = (u64::from(page.0) ^ 0x5bd1_e995).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 32) as u32
}

impl Sampler {
    /// The limit of hashes, exclusive; at most 2^32.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether `page` is one to be watched.
    #[must_use]
    pub fn takes(&self, page: PageId) -> bool {
        u64::from(hash(page)) < self.limit
    }

    /// Pages watched.
    #[must_use]
    pub fn watched(&self) -> usize {
        self.pages.len()
    }

    /// Those watched.
    pub fn pages(&self) -> impl Iterator<Item = PageId> {
        self.pages.keys().copied().map(PageId)
    }

    /// The part of them, [`COLD_PART`], that is used least often as far as is known: what
    /// would be out with room for the others. Pages of which nothing is known count as used.
    #[must_use]
    pub fn coldest(&self, now: f64) -> Vec<PageId> {
        let rate = |watch: &Watch| {
            let seen = watch.seen(now, 0);
            if seen.away > 0.0 { seen.returns / seen.away } else { f64::INFINITY }
        };
        let mut pages: Vec<(f64, PageId)> =
            self.pages.iter().map(|(&page, watch)| (rate(watch), PageId(page))).collect();
        pages.sort_by(|a, b| a.0.total_cmp(&b.0));
        pages.truncate((pages.len() as f64 * COLD_PART) as usize);
        pages.into_iter().map(|(_, page)| page).collect()
    }

    /// Watches `page` from now on, if it is of the sample and not watched yet.
    /// `mapped`: it is in its address space.
    pub fn found(&mut self, page: PageId, mapped: bool, now: f64) {
        if !self.takes(page) || self.pages.contains_key(&page.0) {
            return;
        }
        let place = if mapped {
            Place::In { used: None }
        } else {
            Place::Out { since: now, counted: now, used: None }
        };
        self.pages.insert(page.0, Watch::new(place));
        if mapped {
            self.enqueue(page.0);
        }
        if self.pages.len() > MOST_PAGES {
            self.shrink();
        }
    }

    /// The page's content was given up, or the page is no more.
    pub fn gone(&mut self, page: PageId) {
        self.pages.remove(&page.0);
    }

    /// A page left its address space, whoever moved it.
    pub fn left(&mut self, page: PageId, now: f64) {
        if let Some(watch) = self.pages.get_mut(&page.0) {
            let used = match watch.place {
                Place::In { used } => used,
                Place::Out { .. } => None,
            };
            watch.place = Place::Out { since: now, counted: now, used };
        }
    }

    /// It is mapped again: somebody uses it.
    pub fn returned(&mut self, page: PageId, now: f64) {
        let Some(watch) = self.pages.get_mut(&page.0) else { return };
        let Place::Out { since, used, .. } = watch.place else { return };
        watch.count(self.half, now);
        watch.exposure[1][self.half].returns += 1.0;
        self.returns_now += 1.0;
        if let Some(used) = used {
            watch.whole[1].add((now - since).max(0.0), (since - used).max(0.0));
            watch.place = Place::In { used: None };
            self.enqueue(page.0);
        } else {
            watch.place = Place::In { used: Some(now) };
            self.again.push_back(page.0);
        }
    }

    /// Up to `most` pages to move out now. Each is answered by [`Self::left`], or by
    /// [`Self::stayed`].
    pub fn probes(&mut self, most: usize) -> Vec<PageId> {
        let mut probes = Vec::new();
        while probes.len() < most {
            let again = self.again.pop_front();
            let Some(page) = again.or_else(|| self.queue.pop_front()) else { break };
            let Some(watch) = self.pages.get_mut(&page) else { continue };
            watch.queued &= again.is_some();
            if matches!(watch.place, Place::In { .. }) {
                probes.push(PageId(page));
            }
        }
        probes
    }

    /// A page that was to be moved out could not be.
    pub fn stayed(&mut self, page: PageId) {
        if let Some(watch) = self.pages.get_mut(&page.0)
            && matches!(watch.place, Place::In { .. })
        {
            // By the time it is tried again it has been used unseen.
            watch.place = Place::In { used: None };
            self.enqueue(page.0);
        }
    }

    /// Adapts the sample to how many pages there are: fewer than were watched let
    /// the limit rise. The owner finds the new ones.
    pub fn fit_to(&mut self, pages: usize) {
        let share = MOST_PAGES as f64 * 0.8 / pages.max(1) as f64;
        let limit = (share.min(1.0) * (1u64 << 32) as f64) as u64;
        if limit > self.limit / 4 * 5 {
            self.limit = limit;
        } else if limit < self.limit / 5 * 4
            && (self.pages.is_empty() || self.pages.len() > MOST_PAGES / 2)
        {
            self.limit = limit;
            let kept = |page: &u32, _: &mut Watch| u64::from(hash(PageId(*page))) < limit;
            self.pages.retain(kept);
        }
    }

    /// Samples a watched page in this epoch.
    #[must_use]
    pub fn epoch_returns(&self) -> f64 {
        self.returns_now / self.pages.len().max(1) as f64
    }

    /// Whether the epoch under way, which has lasted for so long by the clock, is over.
    #[must_use]
    pub fn is_epoch_over(&self, now: f64, lasted_seconds: f64) -> bool {
        let (before, had) = self.epoch_times(now);
        let enough = self.epoch_returns() >= EPOCH_RETURNS && lasted_seconds >= EPOCH_SECONDS.0;
        let works = had * UNLIKE >= before.min(FULL_SECONDS);
        works && (enough || lasted_seconds >= EPOCH_SECONDS.1) && had >= LEAST_SECONDS
    }

    /// It is the turn of the other half of the epoch's time. The owner calls it many
    /// times in an epoch.
    pub fn turn(&mut self, now: f64) {
        for watch in self.pages.values_mut() {
            watch.count(self.half, now);
        }
        self.half = 1 - self.half;
    }

    /// Begins an epoch. The drift between the one that ends and the one before (None: too
    /// little was seen, or their times are unlike), and its standard error. What came before
    /// the one that ends is kept in part if there is a drift that says that nothing changed.
    pub fn end_epoch(&mut self, now: f64) -> Option<(f64, f64)> {
        let drift = self.drift(now);
        let steady = drift.is_some_and(|drift| !is_drift_from(drift, FORGET_FROM));
        let kept = if steady { KEPT_PART } else { 0.0 };
        for watch in self.pages.values_mut() {
            watch.count(self.half, now);
            watch.past = watch.past.plus(watch.epoch(0)).times(kept);
            watch.whole[0] = watch.whole[0].times(kept).plus(std::mem::take(&mut watch.whole[1]));
            watch.exposure[0] = std::mem::take(&mut watch.exposure[1]);
        }
        let (before, _) = self.epoch_times(now);
        self.past = (self.past + before) * f64::from(kept);
        self.returns_now = 0.0;
        self.epochs += 1;
        self.begun = [self.begun[1], now];
        drift
    }

    /// For how long what is known was seen; earlier epochs count for what is left of them.
    #[must_use]
    pub fn seen_for(&self, now: f64) -> f64 {
        self.past + now - self.begun[0]
    }

    /// Epochs that have ended.
    #[must_use]
    pub fn epochs(&self) -> u64 {
        self.epochs
    }

    /// How long the last epoch was, and how long the one under way has been.
    #[must_use]
    pub fn epoch_times(&self, now: f64) -> (f64, f64) {
        (self.begun[1] - self.begun[0], now - self.begun[1])
    }

    /// What was seen of each page.
    #[must_use]
    pub fn seen(&self, now: f64) -> Vec<Seen> {
        self.pages.iter().map(|(&page, watch)| watch.seen(now, group_of(page))).collect()
    }

    /// Memory held.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let entry = size_of::<Watch>() + size_of::<u32>();
        size_of::<Self>()
            + self.pages.len() * entry * 3 / 2
            + (self.queue.capacity() + self.again.capacity()) * size_of::<u32>()
    }

    fn enqueue(&mut self, page: u32) {
        if let Some(watch) = self.pages.get_mut(&page)
            && !std::mem::replace(&mut watch.queued, true)
        {
            self.queue.push_back(page);
        }
    }

    /// Lowers the limit until an eighth fewer pages are watched.
    fn shrink(&mut self) {
        let mut hashes: Vec<u32> = self.pages.keys().map(|&page| hash(PageId(page))).collect();
        hashes.sort_unstable();
        self.limit = u64::from(hashes[MOST_PAGES / 8 * 7]);
        let limit = self.limit;
        self.pages.retain(|&page, _| u64::from(hash(PageId(page))) < limit);
    }
}

/// Which part of the sample a page belongs to. By neighbourhood: neighbours are used
/// alike, and to leave out one of them would not tell how much depends on which
/// were drawn.
fn group_of(page: u32) -> u8 {
    (hash(PageId(page / NEIGHBOURS)) as usize % GROUPS) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_least_often_is_coldest_and_what_is_unknown_is_not() {
        let mut sampler = Sampler::default();
        // Page n comes back every n + 1 seconds; the last ten were never out.
        for page in 0..30 {
            sampler.found(PageId(page), true, 0.0);
            for turn in (0..10).filter(|_| page < 20) {
                let at = f64::from(turn * (page + 1));
                sampler.left(PageId(page), at);
                sampler.returned(PageId(page), at + f64::from(page + 1));
            }
        }
        let coldest = sampler.coldest(300.0);
        let expected: Vec<PageId> = (0..20).rev().map(PageId).collect();
        assert_eq!(coldest, expected);
    }
}
