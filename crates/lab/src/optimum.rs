//! How few misses are possible: the best fixed set of pages for a pattern, in a
//! model of where Redis keeps what. Pure.
//!
//! For accesses that are independent draws from a distribution that does not
//! change, no replacement policy has fewer misses in the long run than the one
//! that keeps the most probable pages (Aho, Denning and Ullman, "Principles of
//! optimal page replacement", 1971). The model: records are loaded in order of
//! index, so jemalloc lays them out in that order, kind by kind. Reading a key
//! touches its bucket in the hash table (random), its entry, its name, its
//! object, and the page or two with its value. What a page is worth is the
//! probability that an operation touches it.

use crate::keys::{Pattern, hot_count};

const PAGE_BYTES: u64 = 4096;
/// What one record costs by kind, in jemalloc's size classes (quantum 16):
/// value (a header of 5, 1024, a zero: 1030), entry of the hash table (24),
/// name (a header of 3, 15, a zero: 19), object (16).
const VALUE_CLASS: u64 = 1280;
const VALUE_USED: u64 = 1030;
const SMALL_CLASSES: [u64; 3] = [32, 32, 16];
/// A pointer of the hash table.
const BUCKET_BYTES: u64 = 8;
const ZIPF_EXPONENT: f64 = 0.99;

/// Pages of a server in the order of their worth.
#[derive(Clone, Debug)]
pub(crate) struct Optimum {
    /// `missed[n]`: touches per operation that fall outside the best n pages.
    missed: Vec<f64>,
}

/// How often an operation asks for each key. `walk` is the share of the
/// operations that belong to scan-hot's walk; it is not in the result.
fn key_shares(pattern: Pattern, count: u64, walk: f64) -> Vec<f64> {
    let share = |weight: &dyn Fn(u64) -> f64| -> Vec<f64> {
        let weights: Vec<f64> = (0..count).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / sum * (1.0 - walk)).collect()
    };
    match pattern {
        Pattern::Uniform => share(&|_| 1.0),
        // Wherever the middle is: the hot set of a jump has the same size
        // before and after.
        Pattern::Gaussian | Pattern::Jump => share(&|key| {
            let deviations = ((key as f64 + 0.5) / count as f64 - 0.5) * 6.0;
            (-0.5 * deviations * deviations).exp()
        }),
        Pattern::Zipf | Pattern::ZipfScrambled => {
            share(&|key| ((key + 1) as f64).powf(-ZIPF_EXPONENT))
        }
        Pattern::ScanHot => share(&|key| f64::from(u8::from(key < hot_count(count)))),
    }
}

impl Optimum {
    /// For `count` records under a pattern. `walk` is the measured share of
    /// scan-hot's walk in all operations; 0 for the other patterns.
    pub(crate) fn new(pattern: Pattern, count: u64, walk: f64) -> Self {
        let shares = key_shares(pattern, count, walk);
        let pages_of = |bytes: u64| bytes.div_ceil(PAGE_BYTES) as usize;
        let mut touches = vec![0.0; pages_of(count * VALUE_CLASS)];
        // The walk touches each page once a round, however many keys it has:
        // its neighbours in the walk find it resident.
        let once_a_round = walk / count as f64;
        for (key, share) in shares.iter().enumerate() {
            // Scattered hot keys: neighbours in rank are nowhere near.
            let place = if pattern == Pattern::ZipfScrambled {
                crate::keys::scramble(key as u64, count)
            } else {
                key as u64
            };
            let first = place * VALUE_CLASS;
            let last = first + VALUE_USED - 1;
            for page in first / PAGE_BYTES..=last / PAGE_BYTES {
                touches[page as usize] += share;
            }
        }
        for class in SMALL_CLASSES {
            let begin = touches.len();
            touches.resize(begin + pages_of(count * class), 0.0);
            for (key, share) in shares.iter().enumerate() {
                let place = if pattern == Pattern::ZipfScrambled {
                    crate::keys::scramble(key as u64, count)
                } else {
                    key as u64
                };
                touches[begin + (place * class / PAGE_BYTES) as usize] += share;
            }
        }
        for touched in &mut touches {
            *touched += once_a_round;
        }
        // Redis keeps a power of two of buckets, at least one a key.
        let buckets = pages_of(count.next_power_of_two() * BUCKET_BYTES);
        let each = 1.0 / buckets as f64;
        touches.resize(touches.len() + buckets, each);
        touches.sort_unstable_by(|a, b| b.total_cmp(a));
        let mut missed: Vec<f64> = touches
            .iter()
            .rev()
            .scan(0.0, |sum, touched| {
                let before = *sum;
                *sum += touched;
                Some(before)
            })
            .collect();
        missed.push(touches.iter().sum());
        missed.reverse();
        Self { missed }
    }

    /// Misses per operation with the best set of pages resident, where
    /// `resident_share` of all pages may be.
    pub(crate) fn misses(&self, resident_share: f64) -> f64 {
        let pages = self.missed.len() - 1;
        let resident = (resident_share.clamp(0.0, 1.0) * pages as f64) as usize;
        self.missed[resident]
    }

    /// What the model says that the server occupies.
    pub(crate) fn bytes(&self) -> u64 {
        (self.missed.len() as u64 - 1) * PAGE_BYTES
    }
}

/// The throughput that `native_per_second` comes down to when each operation
/// has `misses` that cost `fault_us` each on the server's core: the bound that
/// perfect replacement would reach at that price of a fault.
pub(crate) fn bound_per_second(native_per_second: f64, misses: f64, fault_us: f64) -> f64 {
    1.0 / misses.mul_add(fault_us / 1e6, 1.0 / native_per_second)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Keys;

    const COUNT: u64 = 80_000;

    #[test]
    fn nothing_is_missed_with_all_resident_and_all_with_nothing() {
        for pattern in [Pattern::Uniform, Pattern::Gaussian, Pattern::Zipf, Pattern::ScanHot] {
            let optimum = Optimum::new(pattern, COUNT, 0.0);
            assert!(optimum.misses(1.0) < 1e-9, "{pattern:?}");
            // Four index pages and, every third time, a second value page.
            let all = optimum.misses(0.0);
            assert!((5.0..5.4).contains(&all), "{pattern:?}: {all}");
            let mut last = f64::MAX;
            for percent in 0..=100 {
                let now = optimum.misses(f64::from(percent) / 100.0);
                assert!(now <= last, "{pattern:?} {percent}");
                last = now;
            }
        }
    }

    #[test]
    fn uniform_keys_miss_what_is_not_there() {
        let optimum = Optimum::new(Pattern::Uniform, COUNT, 0.0);
        // The index (7 % of the pages) stays; of the value pages 28 % do.
        let third = optimum.misses(0.33);
        assert!((0.85..0.98).contains(&third), "{third}");
        let bytes = optimum.bytes() as f64 / COUNT as f64;
        assert!((1360.0..1380.0).contains(&bytes), "{bytes}");
    }

    /// The closed form against a count: the best pages are found by drawing,
    /// and what misses them by drawing again.
    #[test]
    fn the_stream_misses_as_often_as_said() {
        for pattern in [Pattern::Gaussian, Pattern::Zipf, Pattern::ZipfScrambled] {
            let keys = Keys::new(pattern, COUNT);
            let value_pages = |key: u64| {
                let first = key * VALUE_CLASS;
                first / PAGE_BYTES..=(first + VALUE_USED - 1) / PAGE_BYTES
            };
            let mut counts = vec![0u64; (COUNT * VALUE_CLASS / PAGE_BYTES) as usize];
            let mut stream = keys.stream(1);
            let draws = 2_000_000;
            for _ in 0..draws {
                value_pages(stream.draw()).for_each(|page| counts[page as usize] += 1);
            }
            // A third of the value pages and the whole index: the index pages
            // are worth more than the coldest of that third for these patterns.
            let mut sorted = counts.clone();
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            let index_pages = Optimum::new(pattern, COUNT, 0.0).missed.len() - 1 - counts.len();
            let keep = counts.len() / 3;
            let counted = sorted[keep..].iter().sum::<u64>() as f64 / f64::from(draws);
            let optimum = Optimum::new(pattern, COUNT, 0.0);
            let said = optimum.missed[keep + index_pages];
            assert!(said <= counted + 0.02, "{pattern:?}: {said} {counted}");
            assert!(said >= counted - 0.06, "{pattern:?}: {said} {counted}");
        }
    }

    #[test]
    fn a_walk_costs_a_miss_a_page_not_a_key() {
        let optimum = Optimum::new(Pattern::ScanHot, COUNT, 0.2);
        // The hot tenth and the buckets stay; the rest of the pages are met
        // once a round of the walk.
        let missed = optimum.misses(0.33);
        let pages = (optimum.missed.len() - 1) as f64;
        let expected = 0.2 * 0.67 * pages / COUNT as f64;
        assert!((missed / expected - 1.0).abs() < 0.05, "{missed} {expected}");
    }

    #[test]
    fn the_bound_is_the_native_speed_without_misses() {
        assert!((bound_per_second(300_000.0, 0.0, 10.0) - 300_000.0).abs() < 1e-6);
        // 2 µs + half a miss of 4 µs.
        assert!((bound_per_second(500_000.0, 0.5, 4.0) - 250_000.0).abs() < 1e-6);
    }
}
