//! Evicting so that the tenant hardly notices: spread over the time in which as many
//! pages come, and not on the CPUs of the threads that fault.
//!
//! Pages leave in parts, each of which takes the CPU of whoever faults for some tens of
//! microseconds. One after the other they are a good part of a slow request; evenly
//! spread each request has its share of them (docs/measurements.md). A tenant that is
//! short of room has its pages evicted as fast as can be, anywhere.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_sys::Cpus;

use super::QUIET_LOOK;
use crate::evict::{PART_PAGES, Pauses};
use crate::tenant::space::{NO_CPU, Space};

/// A part takes so much of the time in which as many pages come: room is won meanwhile.
const PART_OF_TIME: f64 = 0.75;
/// Evicting is not spread over longer than this: the tenant is not looked at meanwhile.
const LONGEST: Duration = QUIET_LOOK;
/// Arrivals are counted over this time at least,
const COUNT_FOR: Duration = Duration::from_millis(2);
/// and earlier counts are forgotten after this one.
const FORGET_AFTER: Duration = Duration::from_millis(50);
/// Of an older count so much is kept.
const KEPT: f64 = 0.75;

#[derive(Debug)]
pub(super) struct Spread {
    counted: Instant,
    arrivals: u64,
    /// Pages that come in a second.
    rate: f64,
    /// Where this thread may run at all.
    cpus: Option<Cpus>,
    /// Of these, where it does not.
    avoided: Vec<u32>,
}

impl Spread {
    pub(super) fn new() -> Self {
        Self {
            counted: Instant::now(),
            arrivals: 0,
            rate: 0.0,
            cpus: Cpus::of_current_thread(),
            avoided: Vec::new(),
        }
    }

    /// So many pages have arrived in all until now.
    pub(super) fn count(&mut self, arrivals: u64) {
        let time = self.counted.elapsed();
        if time < COUNT_FOR {
            return;
        }
        let rate = arrivals.wrapping_sub(self.arrivals) as f64 / time.as_secs_f64();
        let kept = if time > FORGET_AFTER { 0.0 } else { KEPT };
        self.rate = self.rate * kept + rate * (1.0 - kept);
        self.counted = Instant::now();
        self.arrivals = arrivals;
    }

    /// Of `want` pages, how many to evict before the next look, and the pauses in it
    /// while there is more headroom than `floor_pages`.
    pub(super) fn plan(&self, want: usize, floor_pages: i64) -> (usize, Pauses) {
        let part = PART_OF_TIME * PART_PAGES as f64 / self.rate.max(1.0);
        let parts = (LONGEST.as_secs_f64() / part) as usize;
        let every = Duration::from_secs_f64(part).min(LONGEST);
        (want.min(parts.max(1) * PART_PAGES), Pauses { every, floor_pages })
    }

    /// Keeps this thread off the CPUs where faults of `spaces` are served, or lets it
    /// run anywhere.
    pub(super) fn keep_apart(&mut self, apart: bool, spaces: &[Arc<Space>]) {
        let handlers = spaces.iter().filter(|_| apart);
        let mut avoided: Vec<u32> = handlers
            .map(|space| space.handler_cpu.load(Ordering::Relaxed))
            .filter(|&cpu| cpu != NO_CPU)
            .collect();
        avoided.sort_unstable();
        avoided.dedup();
        if avoided == self.avoided {
            return;
        }
        if let Some(cpus) = &self.cpus {
            cpus.without(&avoided).as_ref().unwrap_or(cpus).confine_current_thread();
        }
        self.avoided = avoided;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages that `arrivals` a second allow.
    fn planned(arrivals: u64, want: usize) -> (usize, Duration) {
        let mut spread = Spread::new();
        spread.counted = Instant::now() - FORGET_AFTER * 2;
        spread.count(arrivals * 2 * FORGET_AFTER.as_millis() as u64 / 1000);
        let (pages, pauses) = spread.plan(want, 7);
        assert_eq!(pauses.floor_pages, 7);
        (pages, pauses.every)
    }

    #[test]
    fn more_leave_than_come_within_the_longest_time() {
        for arrivals in [100, 10_000, 30_000, 60_000, 1_000_000] {
            let (pages, every) = planned(arrivals, usize::MAX);
            let parts = (pages / PART_PAGES) as u32;
            assert!(every * parts <= LONGEST, "{arrivals}: {parts} parts in {every:?} each");
            // The test's own time makes the rate a little smaller.
            let leave = PART_PAGES as f64 / every.as_secs_f64();
            assert!(leave > 1.2 * arrivals as f64, "{arrivals} come in a second, {leave} leave");
        }
    }

    #[test]
    fn who_hardly_faults_has_a_part_evicted_at_a_time_and_no_more_than_asked() {
        assert_eq!(planned(0, 512), (PART_PAGES, LONGEST));
        assert_eq!(planned(0, 3).0, 3);
        assert_eq!(planned(1_000_000, 40).0, 40);
    }

    #[test]
    fn counts_within_a_moment_wait_and_old_ones_fade() {
        let mut spread = Spread::new();
        spread.counted = Instant::now() - FORGET_AFTER * 2;
        spread.count(1000);
        let first = spread.rate;
        spread.count(1_000_000);
        assert!((spread.rate - first).abs() < f64::EPSILON, "counted again at once");
        spread.counted = Instant::now() - COUNT_FOR;
        spread.count(1000);
        assert!(spread.rate < first && spread.rate > first / 2.0, "{} of {first}", spread.rate);
    }
}
