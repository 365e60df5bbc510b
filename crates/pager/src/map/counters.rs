//! A tenant's counters and fault latencies, in the registry's memory so that
//! they outlive the worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use strata_store::Source;
use strata_units::TenantId;

use crate::map::registry::Registry;

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
    /// Pages that came back from compressed memory, asked for or ahead.
    FromCompressed,
    /// Pages that came back from the file tier, asked for or ahead.
    FromFile,
    /// Stored pages moved from compressed memory to the file tier.
    Demotions,
    /// Stored pages moved from the file tier to compressed memory.
    Promotions,
    /// Faults for which a stored page was unpacked...
    Waits,
    /// ...and the nanoseconds from their messages to the pages being in place.
    WaitNanoseconds,
    /// Pages moved from DRAM to the node.
    NodeDemotions,
    /// Pages moved from the node to DRAM.
    NodePromotions,
    /// Nanoseconds of the keeper that these moves took.
    NodeMoveNanoseconds,
    /// Pages evicted from the node to the store.
    NodeEvictions,
    /// Pages that somebody else moved back within ten seconds.
    OpposedMoves,
    /// Pages moved from the node to DRAM because DAMON saw them used.
    DamonPromotions,
    /// Nanoseconds in which some thread waited for a page...
    StallNanoseconds,
    /// ...and, of them, in which none ran.
    FullStallNanoseconds,
    /// Pages with content that programs discarded.
    Discards,
}

/// A wait counts as no longer than this in what a miss takes on average: a few
/// that fell into a stall of the machine would outweigh all others.
const LONGEST_COUNTED: Duration = Duration::from_millis(1);

/// Number of counters that the registry keeps room for.
pub(crate) const COUNTERS: usize = 64;
/// Buckets of the latency histogram: 8 an octave, from 1 ns.
const BUCKETS: usize = 320;
/// Those of all histograms.
pub(crate) const ALL_BUCKETS: usize = 4 * BUCKETS;

/// Whose latencies a histogram holds; first touches are in none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Latencies {
    /// Of all faults.
    All,
    /// Of those on staged pages.
    Staged,
    /// Of those served from compressed memory.
    Compressed,
    /// Of those that read the file tier.
    File,
}

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

    /// Records a fault on a stored page: where the page was, and how long it took.
    pub(crate) fn record_fault(&self, source: Source, latency: Duration) {
        let ns = latency.as_nanos().clamp(1, u128::from(u64::MAX)) as u64;
        let tier = match source {
            Source::Staged => Some((Latencies::Staged, Counter::SoftFaults)),
            Source::Compressed => Some((Latencies::Compressed, Counter::FromCompressed)),
            Source::File => {
                self.add(Counter::FromFile, 1);
                Some((Latencies::File, Counter::FileFaults))
            }
            Source::Fill => None,
        };
        self.bucket(Latencies::All, bucket_of(ns)).fetch_add(1, Ordering::Relaxed);
        if source != Source::Staged {
            self.add(Counter::Waits, 1);
            self.add(Counter::WaitNanoseconds, latency.min(LONGEST_COUNTED).as_nanos() as u64);
        }
        if let Some((latencies, counter)) = tier {
            self.bucket(latencies, bucket_of(ns)).fetch_add(1, Ordering::Relaxed);
            self.add(counter, 1);
        }
    }

    /// Counts a page that came before it was asked for.
    pub(crate) fn count_ahead(&self, source: Source) {
        self.add(Counter::PagesAhead, 1);
        match source {
            Source::Compressed => self.add(Counter::FromCompressed, 1),
            Source::File => self.add(Counter::FromFile, 1),
            Source::Staged | Source::Fill => 0,
        };
    }

    fn bucket(&self, latencies: Latencies, index: usize) -> &AtomicU64 {
        self.registry.bucket(self.tenant, latencies as usize * BUCKETS + index)
    }

    /// The latency in microseconds that the given shares of these faults do not
    /// exceed (upper bound of the bucket, so at most 9 % too high). 0 without
    /// faults.
    #[must_use]
    pub fn latency_us<const N: usize>(&self, of: Latencies, shares: [f64; N]) -> [f64; N] {
        let counts: Vec<u64> =
            (0..BUCKETS).map(|index| self.bucket(of, index).load(Ordering::Relaxed)).collect();
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
