//! How much DRAM a tenant needs, as far as its pages' absences tell: what the
//! threads share of it, and the answer. Which pages are watched is the keeper's
//! business, what follows from it the policy's.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use strata_policy::advice::{Facts, Point, changes_too_fast, points};
use strata_policy::curve::{Curve, Seen};
use strata_policy::sampler::hash;
use strata_store::Foretelling;
use strata_units::PageId;

use crate::map::lock;
use crate::tenant::Tenant;

/// A tenant is watched for so long after somebody last asked.
const WATCHED_FOR: Duration = Duration::from_secs(600);
/// Absences and returns that are kept for a keeper that is held up.
const MOST_EVENTS: usize = 1 << 16;
/// A curve takes some tens of milliseconds: who asks again within this time gets
/// the one that there is.
const FRESH_FOR: Duration = Duration::from_secs(1);
/// The same for whoever only shows it beside other figures.
const SHOWN_FOR: Duration = Duration::from_secs(10);
/// Pages of which something must have been seen.
const LEAST_PAGES: usize = 32;

/// What happened to a watched page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) page: PageId,
    pub(crate) at: Instant,
    /// It left; else it is back.
    pub(crate) left: bool,
}

/// What the keeper last saw.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    pub(crate) seen: Vec<Seen>,
    pub(crate) facts: Facts,
    /// Since when the samples are, and how much of its processors' time the
    /// tenant has had since.
    pub(crate) window: Duration,
    pub(crate) processor_seconds: f64,
    /// Enough was seen to say something.
    pub(crate) is_enough: bool,
    /// With its standard error.
    pub(crate) drift: Option<(f64, f64)>,
}

/// What handlers, keeper and askers share.
#[derive(Debug, Default)]
pub(crate) struct Advisor {
    /// Pages whose hash is below this are watched; 0: nobody asks.
    limit: AtomicU64,
    events: Mutex<Vec<Event>>,
    until: Mutex<Option<Instant>>,
    observed: Mutex<Option<Arc<Observed>>>,
    said: Mutex<Option<(Instant, Advice)>>,
    /// What watched pages took when they were packed last.
    pub(crate) sample: Mutex<Option<Foretelling>>,
}

/// Whether there is advice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdviceState {
    /// Too little was seen yet.
    Watching,
    /// There is.
    Steady,
    /// There is, but it will not hold: what is used changes too fast.
    Changing,
}

/// What can be said of a tenant's need for DRAM.
#[derive(Clone, PartialEq, Debug)]
pub struct Advice {
    /// Whether there is any.
    pub state: AdviceState,
    /// Over what time it was watched.
    pub window: Duration,
    /// How much of its processors' time the tenant had in it.
    pub processor_seconds: f64,
    /// Pages watched, of how many.
    pub watched_pages: u64,
    /// All its pages.
    pub pages: u64,
    /// For how long a page that is missed keeps a thread waiting.
    pub miss_us: f64,
    /// The part of all uses that would be misses because the workload changes;
    /// none as long as that cannot be told.
    pub drift: Option<f64>,
    /// What budgets would mean: budgets rise, losses fall. Empty while watching.
    pub points: Vec<Point>,
}

impl Advisor {
    /// Whether the use of this page is to be seen. In the middle of faults: nearly
    /// always this is one comparison.
    pub(crate) fn watches(&self, page: PageId) -> bool {
        u64::from(hash(page)) < self.limit.load(Ordering::Relaxed)
    }

    /// A watched page is in place again.
    pub(crate) fn returned(&self, page: PageId) {
        if self.watches(page) {
            self.push(Event { page, at: Instant::now(), left: false });
        }
    }

    /// A page has left its address space at `at`.
    pub(crate) fn left(&self, page: PageId, at: Instant) {
        if self.watches(page) {
            self.push(Event { page, at, left: true });
        }
    }

    fn push(&self, event: Event) {
        let mut events = lock(&self.events);
        if events.len() < MOST_EVENTS {
            events.push(event);
        }
    }

    pub(crate) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut *lock(&self.events))
    }

    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Somebody wants advice now or did a while ago.
    pub(crate) fn is_wanted(&self) -> bool {
        lock(&self.until).is_some_and(|until| Instant::now() < until)
    }

    pub(crate) fn publish(&self, observed: Observed) {
        *lock(&self.observed) = Some(Arc::new(observed));
    }

    /// Nobody asks any more.
    pub(crate) fn stop(&self) {
        self.set_limit(0);
        lock(&self.events).clear();
        *lock(&self.observed) = None;
        *lock(&self.said) = None;
    }

    fn say(&self, fresh_for: Duration) -> Option<Advice> {
        let mut said = lock(&self.said);
        if let Some((when, advice)) = &*said
            && when.elapsed() < fresh_for
        {
            return Some(advice.clone());
        }
        let observed = lock(&self.observed).clone()?;
        let advice = observed.advice();
        *said = Some((Instant::now(), advice.clone()));
        Some(advice)
    }
}

impl Observed {
    fn advice(&self) -> Advice {
        let Self { facts, .. } = self;
        let evident = self.seen.iter().filter(|seen| seen.away > 0.0).count();
        let curve =
            (self.is_enough && evident >= LEAST_PAGES).then(|| Curve::of(&self.seen)).flatten();
        let state = match (&curve, self.drift) {
            (None, _) => AdviceState::Watching,
            (Some(_), Some(drift)) if changes_too_fast(drift) => AdviceState::Changing,
            (Some(_), _) => AdviceState::Steady,
        };
        Advice {
            state,
            window: self.window,
            processor_seconds: self.processor_seconds,
            watched_pages: self.seen.len() as u64,
            pages: facts.pages as u64,
            miss_us: facts.miss_seconds * 1e6,
            drift: self.drift.map(|(drift, _)| drift),
            points: curve.map_or_else(Vec::new, |curve| points(&curve, facts)),
        }
    }
}

impl Tenant {
    /// Has it watched from now on, if it was not; what can be said by now. None:
    /// nothing yet.
    pub fn advise(&self) -> Option<Advice> {
        *lock(&self.advisor.until) = Some(Instant::now() + WATCHED_FOR);
        self.wake_keeper();
        self.advisor.say(FRESH_FOR)
    }

    /// Has it watched for so long from now on at least, if it was not; nothing is said.
    pub fn keep_advising(&self, time: Duration) {
        let end = Instant::now() + time;
        let mut until = lock(&self.advisor.until);
        if until.is_none_or(|until| until < Instant::now()) {
            self.wake_keeper();
        }
        *until = Some(until.map_or(end, |until| until.max(end)));
    }

    /// It is not watched any more.
    pub fn stop_advising(&self) {
        *lock(&self.advisor.until) = None;
        self.wake_keeper();
    }

    /// What can be said, if somebody asks for it anyway.
    #[must_use]
    pub fn advice_known(&self) -> Option<Advice> {
        self.advisor.say(SHOWN_FOR)
    }
}
