//! What a measured run gives, and what its timeline says about a jump. Pure.

use super::tally::Tally;
use serde::Serialize;
use std::time::Duration;

/// Result of a measured run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    pub operations: u64,
    pub reads: u64,
    /// Part of the operations that belong to the walk of scan-hot; their
    /// latency is not among the quantiles.
    pub scan_operations: u64,
    pub seconds: f64,
    pub operations_per_second: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    /// Values checked, those of the warm-up included.
    pub verified_values: u64,
    pub wrong_values: u64,
    pub missing_values: u64,
    /// Operations per second over time, warm-up included: (seconds, rate).
    pub timeline: Vec<(f64, f64)>,
    /// What the jump did, where the pattern has one.
    pub jump: Option<Jump>,
}

/// Throughput around the moment at which the hot set moved.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Jump {
    /// Since the start of the load, in seconds.
    pub at_seconds: f64,
    /// Mean of the measured time before.
    pub before_per_second: f64,
    /// The lowest second after.
    pub lowest_per_second: f64,
    /// Mean of all the time after.
    pub after_per_second: f64,
    /// Until a second again has [`RECOVERED`] of what was before; none: not
    /// in the measured time.
    pub recovered_after_seconds: Option<f64>,
}

/// Share of the throughput before a jump at which it counts as got over.
pub(crate) const RECOVERED: f64 = 0.9;
/// Ticks are shorter than this and jitter; a jump is judged by means over it.
const SMOOTH_SECONDS: f64 = 1.0;

impl Outcome {
    pub(crate) fn new(
        tally: &Tally,
        measured: Duration,
        timeline: Vec<(f64, f64)>,
        jump: Option<Jump>,
    ) -> Self {
        let seconds = measured.as_secs_f64();
        Self {
            operations: tally.operations,
            reads: tally.reads,
            scan_operations: tally.scanned,
            seconds,
            operations_per_second: tally.operations as f64 / seconds,
            p50_us: tally.latency.quantile_us(0.5),
            p99_us: tally.latency.quantile_us(0.99),
            p999_us: tally.latency.quantile_us(0.999),
            verified_values: tally.verified,
            wrong_values: tally.wrong,
            missing_values: tally.missing,
            timeline,
            jump,
        }
    }

    /// Operations per second outside the walk of scan-hot; all of them where
    /// there is none.
    pub(crate) fn asked_per_second(&self) -> f64 {
        (self.operations - self.scan_operations) as f64 / self.seconds
    }
}

fn mean(rates: &[(f64, f64)]) -> Option<f64> {
    (!rates.is_empty())
        .then(|| rates.iter().map(|(_, rate)| rate).sum::<f64>() / rates.len() as f64)
}

impl Jump {
    /// Reads a timeline whose measured part begins at `begin_seconds`. None
    /// when it has nothing on one side of the jump.
    pub(crate) fn read(
        timeline: &[(f64, f64)],
        begin_seconds: f64,
        at_seconds: f64,
    ) -> Option<Self> {
        let start = timeline.partition_point(|(at, _)| *at <= begin_seconds);
        let jump = timeline.partition_point(|(at, _)| *at <= at_seconds);
        let before_per_second = mean(timeline.get(start..jump)?)?;
        let after = &timeline[jump..];
        let seconds: Vec<(f64, f64)> = after
            .iter()
            .enumerate()
            .filter_map(|(index, (at, _))| {
                let upto = after.partition_point(|(later, _)| *later <= at + SMOOTH_SECONDS);
                let is_whole = after.last().is_some_and(|(end, _)| *end >= at + SMOOTH_SECONDS);
                is_whole.then(|| mean(&after[index..upto])).flatten().map(|rate| (*at, rate))
            })
            .collect();
        let is_back = |(_, rate): &&(f64, f64)| *rate >= RECOVERED * before_per_second;
        Some(Self {
            at_seconds,
            before_per_second,
            lowest_per_second: seconds.iter().map(|(_, rate)| *rate).min_by(f64::total_cmp)?,
            after_per_second: mean(after)?,
            recovered_after_seconds: seconds.iter().find(is_back).map(|(at, _)| at - at_seconds),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(rate: impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
        (1..=80).map(|tick| f64::from(tick) * 0.25).map(|at| (at, rate(at))).collect()
    }

    #[test]
    fn a_dent_is_measured_and_its_end_found() {
        // 100 until the jump at 8 s, 40 for five seconds, then 95; a warm-up of 4 s at 10.
        let line = timeline(|at| match at {
            at if at <= 4.0 => 10.0,
            at if at <= 8.0 => 100.0,
            at if at <= 13.0 => 40.0,
            _ => 95.0,
        });
        let jump = Jump::read(&line, 4.0, 8.0).expect("both sides");
        assert_eq!(jump.before_per_second, 100.0);
        assert_eq!(jump.lowest_per_second, 40.0);
        let recovered = jump.recovered_after_seconds.expect("it came back");
        assert!((4.9..5.3).contains(&recovered), "{recovered}");
        assert!((70.0..75.0).contains(&jump.after_per_second), "{jump:?}");
    }

    #[test]
    fn what_does_not_come_back_is_not_said_to() {
        let line = timeline(|at| if at <= 8.0 { 100.0 } else { 89.0 });
        let jump = Jump::read(&line, 4.0, 8.0).expect("both sides");
        assert_eq!(jump.recovered_after_seconds, None);
        assert_eq!(Jump::read(&line, 4.0, 20.0), None);
        assert_eq!(Jump::read(&line, 9.0, 8.0), None);
    }
}
