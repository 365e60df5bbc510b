//! What the advisor foretells of a program at two shares of its pages, from far from
//! its budget and from near it, beside what is missed once the budget is set.

use super::report::{Series, Side};
use anyhow::{Result, bail};
use strata_api::{Advice, CurvePoint, Stats};

/// A budget that a server is far from.
pub(super) const PLENTY_BYTES: u64 = 8 << 30;
/// Shares of the pages that are to be in place. What is not is taken to cost this
/// part of itself: the budgets need not hit the shares, they are foretold as what
/// they are.
pub(super) const SHARES: [f64; 2] = [0.5, 0.33];
const STORED_PART: f64 = 0.4;
/// Where the second foretelling is made.
pub(super) const WATCHED_AT: f64 = 0.8;
/// The advisor's clock: it leaves so much out of the processor's time for each fault,
/// but no more than three quarters of it (docs/advisor.md, "The curve").
const FAULT_SECONDS: f64 = 2.5e-6;
const LEAST_PROGRESS: f64 = 0.25;
/// Where it is foretold from.
pub(super) const PLACES: [&str; 2] = ["far from the budget", "near it"];

/// Pages brought back.
pub(super) fn brought_back(stats: &Stats) -> u64 {
    stats.faults_total - stats.zero_faults_total + stats.prefetched_pages_total
}

/// What a program's `cpu_seconds` with so many faults are by the advisor's clock.
pub(super) fn advisor_seconds(cpu_seconds: f64, faults: u64) -> f64 {
    (cpu_seconds - faults as f64 * FAULT_SECONDS).max(cpu_seconds * LEAST_PROGRESS)
}

/// The budget with which about so many of the pages of a tenant, which costs `full`
/// with all of them, are in place.
pub(super) fn budget_bytes(full: u64, share: f64) -> u64 {
    (full as f64 * (share + (1.0 - share) * STORED_PART)) as u64
}

/// Misses a request that `advice` foretells for a budget. `seconds_per_op`: by the
/// advisor's clock.
fn foretold(advice: &Advice, budget_bytes: u64, seconds_per_op: f64) -> Result<f64> {
    let after = advice.curve.partition_point(|point| point.budget_bytes < budget_bytes);
    let of = |point: &CurvePoint| (point.budget_bytes as f64, point.misses_per_second);
    let per_second =
        match (after.checked_sub(1).and_then(|at| advice.curve.get(at)), advice.curve.get(after)) {
            (Some(before), Some(after)) => {
                let ((from, most), (to, least)) = (of(before), of(after));
                most + (least - most) * (budget_bytes as f64 - from) / (to - from)
            }
            (Some(only), None) | (None, Some(only)) => of(only).1,
            (None, None) => bail!("the advisor said nothing of {}", advice.name),
        };
    Ok(per_second * seconds_per_op)
}

/// Of one program: a series for each share and each place.
pub(super) struct Foretelling {
    series: Vec<Series>,
}

impl Foretelling {
    /// `unit`: what misses are counted for.
    pub(super) fn new(program: &str, unit: &str) -> Self {
        let of = |share: &f64| {
            let percent = share * 100.0;
            PLACES.map(|place| Series {
                name: format!("{program}, {percent:.0} % in place, foretold {place}"),
                unit: format!("misses/{unit}"),
                left: Side::new("foretold"),
                right: Some(Side::new("measured")),
            })
        };
        Self { series: SHARES.iter().flat_map(of).collect() }
    }

    /// At a budget for the share `at` of [`SHARES`], `measured` misses a unit.
    /// `foretellings`: from each of [`PLACES`], and the time of a unit there by the
    /// advisor's clock.
    pub(super) fn add(
        &mut self,
        at: usize,
        budget_bytes: u64,
        foretellings: [(&Advice, f64); 2],
        measured: f64,
    ) -> Result<()> {
        let series = &mut self.series[at * PLACES.len()..];
        for ((advice, seconds), series) in foretellings.into_iter().zip(series) {
            if advice.curve.is_empty() {
                continue;
            }
            series.left.samples.push(foretold(advice, budget_bytes, seconds)?);
            if let Some(right) = &mut series.right {
                right.samples.push(measured);
            }
        }
        Ok(())
    }

    /// Those of which something was foretold.
    pub(super) fn into_series(self) -> impl Iterator<Item = Series> {
        self.series.into_iter().filter(|series| !series.left.samples.is_empty())
    }
}
