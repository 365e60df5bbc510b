//! `strata-lab simulate --foretell`: what the advisor says of a tenant that has
//! room for all its pages, beside what the policies then miss with less. The
//! advisor sees what it would see in production: of sampled pages, when they left
//! and when they came back.

use std::fmt::Write as _;

use strata_policy::curve::Curve;
use strata_policy::sampler::{EPOCH_RETURNS, Sampler};
use strata_units::PageId;

/// Touches between two looks of the keeper, and probes each: 50 ms of 250,000
/// GETs a second, 300 probes a second.
const TOUCHES_PER_TICK: u64 = 37_500;
const PROBES_PER_TICK: usize = 15;

/// The advisor beside a stream of touches.
pub(super) struct Foretold {
    sampler: Sampler,
    out: Vec<bool>,
    managed_pages: usize,
    now: u64,
    touches_per_tick: u64,
    drifts: Vec<f64>,
}

/// What it says.
pub(super) struct Saying {
    curve: Option<Curve>,
    managed_pages: usize,
    watched: usize,
    epochs: u64,
    drifts: Vec<f64>,
}

impl Foretold {
    /// Of a model divided by `scale_down`.
    pub(super) fn new(managed_pages: usize, scale_down: usize) -> Self {
        Self {
            sampler: Sampler::default(),
            out: vec![false; managed_pages],
            managed_pages,
            now: 0,
            touches_per_tick: (TOUCHES_PER_TICK / scale_down as u64).max(1),
            drifts: Vec::new(),
        }
    }

    /// All pages are there now.
    pub(super) fn begin(&mut self) {
        self.sampler.fit_to(self.managed_pages);
        for page in 0..self.managed_pages as u32 {
            self.sampler.found(PageId(page), true, self.now as f64);
        }
    }

    pub(super) fn touch(&mut self, page: u32) {
        self.now += 1;
        if std::mem::replace(&mut self.out[page as usize], false) {
            self.sampler.returned(PageId(page), self.now as f64);
        }
        if self.now.is_multiple_of(self.touches_per_tick) {
            for page in self.sampler.probes(PROBES_PER_TICK) {
                self.out[page.0 as usize] = true;
                self.sampler.left(page, self.now as f64);
            }
            if self.now.is_multiple_of(16 * self.touches_per_tick) {
                self.sampler.turn(self.now as f64);
            }
            if self.sampler.epoch_returns() >= EPOCH_RETURNS {
                let drift = self.sampler.end_epoch(self.now as f64);
                self.drifts.extend(drift.map(|(drift, _)| drift));
            }
        }
    }

    pub(super) fn say(&self) -> Saying {
        Saying {
            curve: Curve::of(&self.sampler.seen(self.now as f64)),
            managed_pages: self.managed_pages,
            watched: self.sampler.watched(),
            epochs: self.sampler.epochs(),
            drifts: self.drifts.clone(),
        }
    }
}

impl Saying {
    /// Misses a request with room for so many pages, and the standard error.
    pub(super) fn misses(&self, room_pages: usize, touches_per_unit: f64) -> Option<(f64, f64)> {
        let pages = self.managed_pages as f64;
        let (misses, error) = self.curve.as_ref()?.misses(room_pages as f64 / pages);
        Some((misses * pages * touches_per_unit, error * pages * touches_per_unit))
    }

    pub(super) fn described(self, misses: Option<(f64, f64)>) -> Described {
        Described { misses, watched: self.watched, epochs: self.epochs, drifts: self.drifts }
    }
}

/// What was said, for the report.
pub(super) struct Described {
    /// Misses a request, and the standard error.
    pub(super) misses: Option<(f64, f64)>,
    watched: usize,
    epochs: u64,
    drifts: Vec<f64>,
}

impl Described {
    pub(super) fn text(&self) -> String {
        let mut text = match self.misses {
            Some((misses, error)) => {
                format!("foretold  {misses:>8.3} ± {error:.3} misses per GET")
            }
            None => "foretold: nothing".to_owned(),
        };
        // Writing to a string does not fail.
        let _ = write!(text, ", from {} pages, {} epochs; drift", self.watched, self.epochs);
        for drift in &self.drifts {
            let _ = write!(text, " {drift:.3}");
        }
        text.push('\n');
        text
    }
}
