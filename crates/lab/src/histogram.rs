//! A latency histogram: log-linear buckets, at most 0.8 % wide.
//!
//! Recording costs a shift and an increment, so it can be done for every
//! operation. Values are nanoseconds; what lies beyond the last bucket counts
//! there.

/// Linear steps inside each power of two: sets the precision.
const STEPS: u64 = 128;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Up to 2³⁷ ns, a little over two minutes.
const BUCKETS: usize = (STEPS as usize) * (38 - STEP_BITS as usize);

/// Counts by latency.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], total: 0 }
    }
}

fn bucket(value_ns: u64) -> usize {
    if value_ns < STEPS {
        return value_ns as usize;
    }
    let shift = value_ns.ilog2() - STEP_BITS;
    let step = (value_ns >> shift) - STEPS;
    let index = u64::from(shift + 1) * STEPS + step;
    (index as usize).min(BUCKETS - 1)
}

/// The middle of a bucket.
fn value_ns(bucket: usize) -> f64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket as f64;
    }
    let shift = bucket / STEPS - 1;
    let low = (STEPS + bucket % STEPS) << shift;
    low as f64 + ((1u64 << shift) - 1) as f64 / 2.0
}

impl Histogram {
    pub(crate) fn record(&mut self, value_ns: u64, times: u64) {
        self.counts[bucket(value_ns)] += times;
        self.total += times;
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
    }

    /// What was recorded: nanoseconds (the middle of a bucket) and how often,
    /// in ascending order.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let recorded = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        recorded.map(|(index, &count)| (value_ns(index), count))
    }

    /// The smallest recorded value that `quantile` of all values do not
    /// exceed, in microseconds; 0 when nothing was recorded.
    pub(crate) fn quantile_us(&self, quantile: f64) -> f64 {
        let rank = ((self.total as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return value_ns(index) / 1000.0;
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn buckets_are_narrow_and_in_order() {
        let mut last = 0;
        let mut value = 1u64;
        while value < 1 << 37 {
            let index = bucket(value);
            assert!(index >= last, "{value}");
            last = index;
            let error = (value_ns(index) - value as f64).abs() / value as f64;
            assert!(error <= 0.004, "{value}: {error}");
            value += value / 50 + 1;
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_match_a_sorted_list() {
        let mut random = Random::new(5);
        let mut values: Vec<u64> =
            (0..50_000).map(|_| (1000.0 * (3.0 * random.unit()).exp()) as u64).collect();
        let mut histogram = Histogram::default();
        for &value in &values {
            histogram.record(value, 1);
        }
        values.sort_unstable();
        for quantile in [0.5, 0.9, 0.99, 0.999] {
            let exact = values[(values.len() as f64 * quantile).ceil() as usize - 1] as f64 / 1e3;
            let seen = histogram.quantile_us(quantile);
            assert!((seen / exact - 1.0).abs() < 0.008, "{quantile}: {seen} {exact}");
        }
    }

    #[test]
    fn merging_adds() {
        let (mut one, mut two) = (Histogram::default(), Histogram::default());
        one.record(1000, 3);
        two.record(9000, 1);
        one.merge(&two);
        assert_eq!(one.total, 4);
        assert!(one.quantile_us(0.75) < 1.1 && one.quantile_us(1.0) > 8.9);
        assert_eq!(Histogram::default().quantile_us(0.5), 0.0);
    }
}
