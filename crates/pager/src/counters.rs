//! A tenant's counters and fault latencies, in the registry's memory so that
//! they outlive the worker.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use strata_units::TenantId;

use crate::registry::Registry;

/// What is counted. The number is the place in the registry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Counter {
    /// Missing-page faults served.
    Faults,
    /// Of them, served without decompression.
    SoftFaults,
    /// Of them, read from the file tier.
    FileFaults,
    /// Of them, first touches.
    ZeroFaults,
    /// Stored pages brought back before they were asked for.
    PagesAhead,
    /// Pages evicted.
    Evictions,
    /// Of them, pages that the store had already, from the last time.
    EvictionsUnchanged,
    /// Evictions that the kernel refused.
    EvictionsRefused,
    /// Pages whose stored copy could not be read back.
    LostPages,
    /// Times that the worker was replaced.
    WorkerRestarts,
    /// Faults so far as the policy counts time.
    PolicyTime,
}

/// Number of counters that the registry keeps room for.
pub(crate) const COUNTERS: usize = 64;
/// Buckets of the latency histogram: 8 an octave, from 1 ns.
pub(crate) const BUCKETS: usize = 320;

/// A view of one tenant's counters.
#[derive(Debug)]
pub struct Counters {
    registry: Arc<Registry>,
    tenant: TenantId,
}

impl Counters {
    pub(crate) fn new(registry: Arc<Registry>, tenant: TenantId) -> Self {
        Self { registry, tenant }
    }

    /// Counts `amount` more; returns the sum so far.
    pub fn add(&self, counter: Counter, amount: u64) -> u64 {
        self.registry
            .counter(self.tenant, counter as usize)
            .fetch_add(amount, Ordering::Relaxed)
            .wrapping_add(amount)
    }

    /// The sum so far.
    #[must_use]
    pub fn get(&self, counter: Counter) -> u64 {
        self.registry.counter(self.tenant, counter as usize).load(Ordering::Relaxed)
    }

    /// Records how long one fault took.
    pub(crate) fn record_latency(&self, latency: Duration) {
        let ns = latency.as_nanos().clamp(1, u128::from(u64::MAX)) as u64;
        self.registry.bucket(self.tenant, bucket_of(ns)).fetch_add(1, Ordering::Relaxed);
    }

    /// The latency in microseconds that the given shares of all faults do not
    /// exceed (upper bound of the bucket, so at most 9 % too high). 0 without
    /// faults.
    #[must_use]
    pub fn latency_us<const N: usize>(&self, shares: [f64; N]) -> [f64; N] {
        let counts: Vec<u64> = (0..BUCKETS)
            .map(|index| self.registry.bucket(self.tenant, index).load(Ordering::Relaxed))
            .collect();
        let total: u64 = counts.iter().sum();
        shares.map(|share| {
            let rank = (share * total as f64).ceil() as u64;
            let mut seen = 0;
            for (index, count) in counts.iter().enumerate() {
                seen += count;
                if seen >= rank && seen > 0 {
                    return bucket_end_ns(index) as f64 / 1000.0;
                }
            }
            0.0
        })
    }
}

fn bucket_of(ns: u64) -> usize {
    let octave = ns.ilog2();
    let eighth = if octave >= 3 { (ns >> (octave - 3)) & 7 } else { (ns << (3 - octave)) & 7 };
    (octave as usize * 8 + eighth as usize).min(BUCKETS - 1)
}

fn bucket_end_ns(index: usize) -> u64 {
    let (octave, eighth) = (index / 8, index as u64 % 8);
    ((8 + eighth + 1) << octave) / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_ends_at_most_an_eighth_above_its_values() {
        for ns in (1..5000u64).chain([1 << 20, (1 << 30) + 7]) {
            let end = bucket_end_ns(bucket_of(ns));
            assert!(end >= ns && end as f64 <= ns as f64 * 1.125 + 1.0, "{ns} in bucket to {end}");
        }
    }
}
