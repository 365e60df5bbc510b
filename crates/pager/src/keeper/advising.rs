//! The advisor's work on the keeper: which pages are watched, and moving them out
//! so that their next use shows.
//!
//! Time here is the tenant's own processor time. It stands still while a thread
//! waits for a page, so that what is seen of a tenant that waits much is not
//! taken for what it would do with more room.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_policy::advice::Facts;
use strata_policy::budget::Observation;
use strata_policy::sampler::{COLD_PART, LEAST_SECONDS, Sampler};
use strata_store::Foretelling;
use strata_units::{PAGE, PageId};

use crate::advice::sample::{Pieces, register_sample};
use crate::keeper::act::may_train;
use crate::keeper::{Keeper, SLACK_PART};
use crate::map::address::address_of;
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::advisor::{Event, Observed};
use crate::tenant::space::Space;
use crate::tenant::usage::has_huge_pages;

/// From one look at watched pages to the next.
const TICK: Duration = Duration::from_millis(50);
/// Pages moved out for a look, for each second of processor time: at some 20
/// microseconds each, there and back, 0.6 % of it.
const PROBES_PER_SECOND: f64 = 300.0;
/// A tenant that sleeps is looked at, too: so many a second at least.
const LEAST_PROBES_PER_SECOND: f64 = 10.0;
/// Most probes saved up.
const MOST_PROBES: f64 = 64.0;
/// Leaves that are searched for pages to watch in a tick, the first time and
/// later.
const FIRST_LEAVES: usize = 64;
const LEAVES: usize = 8;
/// There is something to say after so long, if not after an epoch.
const FIRST_WORD: Duration = Duration::from_secs(10);
/// Its halves take turns so often.
const TURN: Duration = Duration::from_millis(500);
/// How often what a tenant far from its budget has new is sampled.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// Finding it walks the page tables of all that the tenant has: one part of the time,
/// and so many without.
const SAMPLE_REST: u32 = 400;
/// How often what is known is put out for those who ask.
const PUBLISH_EVERY: Duration = Duration::from_millis(500);
/// What a miss takes beside what the handler sees of it: the kernel's part of the
/// fault, and both threads' wakes.
const AROUND_A_MISS_SECONDS: f64 = 7e-6;
/// Processor time of its own that a fault takes a thread; never more than is
/// plausible.
const FAULT_SECONDS: f64 = 2.5e-6;
const LEAST_PROGRESS: f64 = 0.25;
/// A miss is guessed to take this long until so many were seen.
const GUESSED_MISS_SECONDS: f64 = 18e-6;
const LEAST_WAITS: u64 = 256;
/// A stored page is guessed to cost this until a sample was packed.
const GUESSED_STORED_BYTES: f64 = 1600.0;
/// Watched pages that are worth packing for a sample, and how often that is done: it
/// takes some tenths of a second. The first times sooner, each time after twice as long:
/// who has just begun still fills its memory.
const LEAST_TO_PACK: usize = 240;
const PACK_EVERY: (Duration, Duration) = (Duration::from_secs(4), Duration::from_secs(60));

/// The processor time of all processes of a tenant, that in which the kernel
/// serves their faults left out: with more room they would not have it.
#[derive(Debug, Default)]
struct ProcessorClock {
    by_pid: BTreeMap<u32, Duration>,
    faults: u64,
    seconds: f64,
}

impl ProcessorClock {
    /// What it says now; a process that ends takes nothing back.
    fn read(&mut self, tenant: &Tenant) -> f64 {
        let mut now = BTreeMap::new();
        let mut passed = 0.0;
        for space in tenant.space_list() {
            let Some(process) = space.process() else { continue };
            let (pid, Some(time)) = (process.pid(), process.processor_time()) else { continue };
            // What a process had run before it was first seen does not count.
            let before = self.by_pid.get(&pid).copied().unwrap_or(time);
            passed += time.saturating_sub(before).as_secs_f64();
            now.insert(pid, time);
        }
        self.by_pid = now;
        let faults = tenant.counters.get(Counter::Faults);
        let spent = faults.saturating_sub(self.faults) as f64 * FAULT_SECONDS;
        self.faults = faults;
        self.seconds += (passed - spent).max(passed * LEAST_PROGRESS);
        self.seconds
    }
}

/// Pieces of a tenant that were registered to be watched.
#[derive(Clone, Copy)]
struct Sampled {
    /// When what is new is looked for.
    next: Instant,
    pieces: Pieces,
}

/// What the keeper knows of watched pages.
pub(super) struct Advising {
    sampler: Sampler,
    clock: ProcessorClock,
    /// The last tick, and what the clock said.
    looked: (Instant, f64),
    probes_saved: f64,
    /// Moved out at the last tick, as far as they let themselves.
    probed: Vec<PageId>,
    next_leaf: usize,
    /// Times that all leaves have been searched.
    searches: u64,
    /// Beginnings of the last epoch and of the one under way.
    epochs: [Instant; 2],
    drift: Option<(f64, f64)>,
    turned: Instant,
    published: Instant,
    /// Of a tenant far from its budget.
    sampled: Option<Sampled>,
    /// Faults that waited, pages that came ahead of any, and nanoseconds waited, at
    /// the beginnings of the epochs.
    waits: [Waits; 2],
    /// When pages are to be packed for a sample again, and how long after the last time.
    packs: (Instant, Duration),
}

/// What bringing pages back has taken so far.
#[derive(Clone, Copy, Debug, Default)]
struct Waits {
    faults: u64,
    ahead: u64,
    nanoseconds: u64,
}

impl Waits {
    fn read(tenant: &Tenant) -> Self {
        Self {
            faults: tenant.counters.get(Counter::Waits),
            ahead: tenant.counters.get(Counter::PagesAhead),
            nanoseconds: tenant.counters.get(Counter::WaitNanoseconds),
        }
    }

    /// What a page brought back has taken since, in seconds.
    fn miss_seconds(self, since: Self) -> f64 {
        let faults = self.faults.saturating_sub(since.faults);
        if faults < LEAST_WAITS {
            return GUESSED_MISS_SECONDS;
        }
        let waited = self.nanoseconds.saturating_sub(since.nanoseconds) as f64 * 1e-9;
        let pages = faults + self.ahead.saturating_sub(since.ahead);
        (waited + faults as f64 * AROUND_A_MISS_SECONDS) / pages as f64
    }
}

impl Advising {
    fn new(tenant: &Tenant) -> Self {
        let faults = tenant.counters.get(Counter::Faults);
        let mut clock = ProcessorClock { faults, ..ProcessorClock::default() };
        let now = (Instant::now(), clock.read(tenant));
        Self {
            sampler: Sampler::default(),
            clock,
            looked: now,
            probes_saved: 0.0,
            probed: Vec::new(),
            next_leaf: 0,
            searches: 0,
            epochs: [now.0; 2],
            drift: None,
            turned: now.0,
            published: now.0,
            sampled: None,
            waits: [Waits::read(tenant); 2],
            packs: (now.0, PACK_EVERY.0),
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.sampler.memory_bytes()
    }

    /// Takes in what happened between the last tick and `now`.
    fn take_events(&mut self, events: &[Event], now: (Instant, f64)) {
        let wall = now.0.duration_since(self.looked.0).as_secs_f64().max(1e-9);
        let mut left = BTreeSet::new();
        for event in events {
            let part = event.at.saturating_duration_since(self.looked.0).as_secs_f64() / wall;
            let at = self.looked.1 + (now.1 - self.looked.1) * part.min(1.0);
            if event.left {
                left.insert(event.page);
                self.sampler.left(event.page, at);
            } else {
                self.sampler.returned(event.page, at);
            }
        }
        for page in std::mem::take(&mut self.probed) {
            if !left.contains(&page) {
                self.sampler.stayed(page);
            }
        }
    }

    /// Searches some leaves for pages to watch.
    fn search(&mut self, tenant: &Tenant, now: f64) {
        if self.next_leaf == 0 {
            self.sampler.fit_to(tenant.census().managed);
        }
        let far = !tenant.under_pressure.load(Ordering::Relaxed);
        let pieces = self.sampled.filter(|_| far).map(|sampled| sampled.pieces);
        let count = if self.searches == 0 { FIRST_LEAVES } else { LEAVES };
        let Some(leaves) = tenant.map.leaf_range(self.next_leaf, count) else {
            self.next_leaf = 0;
            self.searches += 1;
            let lost = |&page: &PageId| !is_to_be_watched(tenant, pieces, page);
            for page in self.sampler.pages().filter(lost).collect::<Vec<_>>() {
                self.sampler.gone(page);
            }
            return;
        };
        self.next_leaf += count;
        for leaf in leaves {
            for page in leaf.pages() {
                if self.sampler.takes(page) && is_to_be_watched(tenant, pieces, page) {
                    self.sampler.found(page, tenant.map.get(page).is_resident(), now);
                }
            }
        }
    }

    fn turn_epoch(&mut self, tenant: &Tenant, now: (Instant, f64)) {
        if self.turned.elapsed() >= TURN {
            self.turned = now.0;
            self.sampler.turn(now.1);
        }
        let lasted = now.0.duration_since(self.epochs[1]).as_secs_f64();
        if self.searches == 0 || !self.sampler.is_epoch_over(now.1, lasted) {
            return;
        }
        self.drift = self.sampler.end_epoch(now.1).or(self.drift);
        self.epochs = [self.epochs[1], now.0];
        self.waits = [self.waits[1], Waits::read(tenant)];
    }

    /// Lets those who ask know what was seen, every now and then; whether it did.
    fn publish(&mut self, tenant: &Tenant, seen: &Observation, now: (Instant, f64)) -> bool {
        if self.published.elapsed() < PUBLISH_EVERY {
            return false;
        }
        self.published = now.0;
        let epochs = now.0.duration_since(self.epochs[0]);
        let (before, this) = self.sampler.epoch_times(now.1);
        let processor_seconds = self.sampler.seen_for(now.1);
        // What was seen before was seen at the same pace, or would be forgotten. Who has had
        // no time at all has been watched nevertheless.
        let recent = before + this;
        let window = if recent > 0.0 { epochs.mul_f64(processor_seconds / recent) } else { epochs };
        tenant.advisor.publish(Observed {
            seen: self.sampler.seen(now.1),
            facts: facts(tenant, seen, Waits::read(tenant).miss_seconds(self.waits[0])),
            window,
            processor_seconds,
            is_enough: self.sampler.epochs() > 0
                || self.searches > 0 && window >= FIRST_WORD && processor_seconds >= LEAST_SECONDS,
            drift: self.drift,
        });
        true
    }

    /// The pages to be packed now, if any, to learn what stored ones will cost: those
    /// that are going to be. What is used least often packs worse in some programs.
    fn pages_to_pack(&mut self, now: (Instant, f64)) -> Option<Vec<PageId>> {
        if now.0 < self.packs.0 || self.searches == 0 || self.sampler.watched() < LEAST_TO_PACK {
            return None;
        }
        self.packs = (now.0 + self.packs.1, (self.packs.1 * 2).min(PACK_EVERY.1));
        Some(self.sampler.coldest(now.1))
    }
}

/// Whether the page is this tenant's, its content is somewhere, and it lies in `pieces`,
/// if only these are the sample.
fn is_to_be_watched(tenant: &Tenant, pieces: Option<Pieces>, page: PageId) -> bool {
    let Some((space, piece)) = tenant.map.owner(page.leaf()) else { return false };
    pieces.is_none_or(|pieces| pieces.contain(address_of(piece, page.index())))
        && tenant.registry.tenant_of(space) == tenant.id
        && tenant.registry.space_is_live(space)
        && !matches!(
            tenant.map.get(page),
            Entry::Untouched | Entry::Discarded | Entry::Lost | Entry::Pending
        )
}

fn facts(tenant: &Tenant, seen: &Observation, miss_seconds: f64) -> Facts {
    let store = tenant.store_stats();
    let away = tenant.away_pages() as f64;
    let registered = tenant.under_pressure.load(Ordering::Relaxed);
    let sample = *lock(&tenant.advisor.sample);
    // What several pages share costs each of them a part.
    let objects = store.objects.max(1) as f64;
    let distinct = objects / (objects + store.deduplicated_pages as f64);
    // Between no unused parts of slabs and as many as are put up with.
    let slack = 1.0 + 0.5 / SLACK_PART as f64;
    let packed = sample.and_then(|sample| sample.packed_bytes).map(|bytes| bytes as f64);
    let stored_page_bytes = packed.map_or(GUESSED_STORED_BYTES, |bytes| bytes * slack * distinct);
    let in_space = seen.resident_bytes - seen.staged_bytes.min(seen.resident_bytes);
    let pages = |in_place: u64| in_place as f64 / PAGE as f64 + away;
    let (pages, free_pages, fixed) = if registered {
        // Being the first that are out, they are out already.
        (pages(in_space), store.fill_pages as f64, seen.unmanaged_bytes)
    } else {
        // What is not registered yet will be when the budget presses.
        let pages = pages(in_space + seen.unmanaged_bytes);
        // Of the coldest ones; the others are in use, and hold something.
        let share = |sample: Foretelling| sample.fill_pages as f64 / sample.pages.max(1) as f64;
        (pages, sample.map_or(0.0, share) * COLD_PART * pages, 0)
    };
    Facts {
        pages,
        free_pages,
        stored_page_bytes,
        fixed_bytes: (fixed + seen.metadata_bytes) as f64,
        miss_seconds,
        has_file_tier: seen.file_room_bytes.is_some_and(|room| room > 0),
    }
}

impl Keeper<'_> {
    /// Registers some of what a tenant far from its budget has.
    fn sample(&mut self, spaces: &[Arc<Space>], seen: &Observation) {
        let tenant = self.tenant;
        let Some(advising) = &mut self.advising else { return };
        let began = Instant::now();
        let mut pieces = match advising.sampled {
            Some(Sampled { next, .. }) if began < next => return,
            Some(Sampled { pieces, .. }) => pieces,
            None => {
                let mut processes = spaces.iter().filter_map(|space| space.process());
                Pieces::new(processes.any(|process| has_huge_pages(&process)))
            }
        };
        pieces.fit_to(seen.unmanaged_bytes);
        for space in spaces {
            if !register_sample(space, tenant, pieces) {
                space.set_gone();
            }
        }
        let rest = SAMPLE_EVERY.max(began.elapsed() * SAMPLE_REST);
        advising.sampled = Some(Sampled { next: Instant::now() + rest, pieces });
    }

    /// Watches pages, if anybody wants to know. When to look again at the latest.
    pub(super) fn advise(&mut self, spaces: &[Arc<Space>], seen: &Observation) -> Duration {
        let tenant = self.tenant;
        if !tenant.advisor.is_wanted() {
            if let Some(advising) = self.advising.take() {
                tenant.advisor.stop();
                // Its pieces are the kernel's again once all their pages are back.
                let far = !tenant.under_pressure.load(Ordering::Relaxed);
                self.stands_down |= far && advising.sampled.is_some();
            }
            return Duration::MAX;
        }
        let advising = self.advising.get_or_insert_with(|| Advising::new(tenant));
        let elapsed = advising.looked.0.elapsed();
        if elapsed < TICK {
            return TICK - elapsed;
        }
        if !tenant.under_pressure.load(Ordering::Relaxed) {
            self.sample(spaces, seen);
        }
        let Some(advising) = &mut self.advising else { return TICK };
        let now = (Instant::now(), advising.clock.read(tenant));
        let events = tenant.advisor.take_events();
        advising.take_events(&events, now);
        advising.search(tenant, now.1);
        tenant.advisor.set_limit(advising.sampler.limit());
        advising.turn_epoch(tenant, now);
        let is_due = advising.publish(tenant, seen, now);
        let packs = if is_due && may_train() { advising.pages_to_pack(now) } else { None };
        let worth = (now.1 - advising.looked.1) * PROBES_PER_SECOND;
        let least = elapsed.as_secs_f64() * LEAST_PROBES_PER_SECOND;
        advising.probes_saved = (advising.probes_saved + worth.max(least)).min(MOST_PROBES);
        advising.looked = now;
        let probes = advising.sampler.probes(advising.probes_saved as usize);
        advising.probes_saved -= probes.len() as f64;
        advising.probed.clone_from(&probes);
        if !probes.is_empty() {
            // They are wanted again soon.
            let hurries = std::mem::replace(&mut self.evictor.packs_at_once, false);
            self.evict_pages(probes, spaces);
            self.evictor.packs_at_once = hurries;
        }
        if let Some(pages) = packs {
            self.foretell_packing(pages);
        }
        TICK
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn what_is_not_registered_is_judged_by_the_sample() {
        let tenant = testing::tenant();
        let seen = Observation { unmanaged_bytes: 1000 * PAGE, ..Observation::default() };
        let before = facts(&tenant, &seen, 1e-5);
        assert_eq!((before.pages, before.free_pages, before.fixed_bytes), (1000.0, 0.0, 0.0));
        assert_eq!(before.stored_page_bytes, GUESSED_STORED_BYTES);
        let sample = Foretelling { pages: 200, fill_pages: 60, packed_bytes: Some(800) };
        *lock(&tenant.advisor.sample) = Some(sample);
        let after = facts(&tenant, &seen, 1e-5);
        assert_eq!((after.free_pages.round(), after.stored_page_bytes), (200.0, 850.0));
        // Under pressure what is free is out, and counted.
        tenant.under_pressure.store(true, Ordering::Relaxed);
        let near = facts(&tenant, &seen, 1e-5);
        assert_eq!((near.pages, near.free_pages), (0.0, 0.0));
        assert_eq!((near.fixed_bytes, near.stored_page_bytes), (1000.0 * PAGE as f64, 850.0));
    }
}
