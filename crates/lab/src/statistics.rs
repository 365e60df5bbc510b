//! What repetitions say: means, medians, and ratios with their uncertainty.
//!
//! The machine's speed drifts, so every repetition runs both sides and gives
//! one ratio; the interval is over those ratios.

use crate::{random::Random, table::short};
use serde::Serialize;
use std::fmt;

/// A mean with a 95 % confidence interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Estimate {
    /// The mean (of ratios: the geometric mean).
    pub mean: f64,
    /// Lower end; equals the mean when there was only one sample.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Number of samples.
    pub samples: usize,
}

/// The middle of some samples and their ends.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Spread {
    pub median: f64,
    pub lowest: f64,
    pub highest: f64,
}

/// None for no samples.
pub(crate) fn spread(samples: &[f64]) -> Option<Spread> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let (lowest, highest) = (*sorted.first()?, *sorted.last()?);
    let middle = sorted.len() / 2;
    let median = if sorted.len().is_multiple_of(2) {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted[middle]
    };
    Some(Spread { median, lowest, highest })
}

impl fmt::Display for Spread {
    /// `12.3 (11.0 … 14.1)`; a single sample, or several alike, without ends.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&short(self.median))?;
        if short(self.lowest) == short(self.highest) {
            return Ok(());
        }
        write!(f, " ({} … {})", short(self.lowest), short(self.highest))
    }
}

/// Resamples of the bootstrap.
const RESAMPLES: usize = 10_000;
/// The bootstrap draws from a fixed seed: the same raw results give the same
/// interval.
const BOOTSTRAP_SEED: u64 = 42;

/// Mean and percentile-bootstrap interval (Efron, 1979). None for no samples.
pub(crate) fn estimate(samples: &[f64]) -> Option<Estimate> {
    if samples.is_empty() {
        return None;
    }
    let count = samples.len();
    let mean = samples.iter().sum::<f64>() / count as f64;
    let mut random = Random::new(BOOTSTRAP_SEED);
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            (0..count).map(|_| samples[random.below(count as u64) as usize]).sum::<f64>()
                / count as f64
        })
        .collect();
    means.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| means[(share * (RESAMPLES - 1) as f64).round() as usize];
    Some(Estimate { mean, low: at(0.025), high: at(0.975), samples: count })
}

/// Geometric mean of the pairs' ratios `left / right` with its interval: the
/// ratio and its inverse then tell the same story.
pub(crate) fn estimate_ratio(pairs: &[(f64, f64)]) -> Option<Estimate> {
    let logs: Vec<f64> = pairs
        .iter()
        .filter(|(left, right)| *left > 0.0 && *right > 0.0)
        .map(|(left, right)| (left / right).ln())
        .collect();
    estimate(&logs).map(|logs| Estimate {
        mean: logs.mean.exp(),
        low: logs.low.exp(),
        high: logs.high.exp(),
        samples: logs.samples,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_cover_the_true_mean_about_95_times_in_100() {
        let mut random = Random::new(11);
        let covered = (0..200)
            .filter(|_| {
                let samples: Vec<f64> = (0..20).map(|_| 5.0 + random.normal()).collect();
                let found = estimate(&samples).expect("there are samples");
                found.low <= 5.0 && 5.0 <= found.high
            })
            .count();
        assert!((178..=199).contains(&covered), "{covered}");
    }

    #[test]
    fn medians_lie_between_the_ends() {
        assert_eq!(spread(&[]), None);
        let odd = spread(&[5.0, 1.0, 2.0]).expect("samples");
        assert_eq!((odd.median, odd.lowest, odd.highest), (2.0, 1.0, 5.0));
        let even = spread(&[4.0, 1.0, 2.0, 100.0]).expect("samples");
        assert_eq!(even.median, 3.0);
        assert_eq!(even.to_string(), "3.00 (1.00 … 100)");
        assert_eq!(spread(&[7.0]).expect("one").to_string(), "7.00");
    }

    #[test]
    fn ratios_are_symmetric() {
        let pairs = [(2.0, 1.0), (1.0, 2.0), (3.0, 3.0)];
        let found = estimate_ratio(&pairs).expect("there are pairs");
        assert!((found.mean - 1.0).abs() < 1e-12);
        assert!(found.low < 1.0 && found.high > 1.0);
    }

    #[test]
    fn few_samples_are_said_as_such() {
        assert_eq!(estimate(&[]), None);
        let one = estimate(&[3.0]).expect("one sample");
        assert_eq!((one.low, one.mean, one.high, one.samples), (3.0, 3.0, 3.0, 1));
        assert_eq!(estimate_ratio(&[(1.0, 0.0)]), None);
    }
}
