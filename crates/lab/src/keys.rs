//! Which key comes next: the access patterns of the load generator.
//!
//! A pattern draws indices in `0..count`; it knows nothing of Redis or records.
//! Every connection draws its own stream from a seed of its own: connections
//! that share a seed ask for the same keys at the same time, and the miss rate
//! is understated several times over.

use crate::random::{Random, mix};
use serde::Serialize;
use std::sync::Arc;

/// The shapes of access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Pattern {
    /// Every key as likely as any other.
    Uniform,
    /// Normal around the middle, deviation a sixth of the keys.
    Gaussian,
    /// Zipf 0.99, key 0 the hottest: hot keys are neighbours.
    Zipf,
    /// Zipf 0.99 with the hot keys scattered over all pages.
    ZipfScrambled,
    /// Four of five draws from a tenth of the keys, the fifth walks over all.
    ScanHot,
    /// Gaussian; the middle jumps by a quarter of the keys every
    /// [`JUMP_EVERY`] draws of a connection.
    Jump,
}

/// Draws of one connection between two jumps.
const JUMP_EVERY: u64 = 250_000;
/// Exponent of the Zipf patterns.
const ZIPF_EXPONENT: f64 = 0.99;

/// Zipf by inversion (Gray et al., "Quickly generating billion-record synthetic
/// databases", 1994). The constants cost one pass over the keys, so they are
/// shared by all streams.
#[derive(Debug)]
struct Zipf {
    count: f64,
    zeta: f64,
    eta: f64,
}

impl Zipf {
    fn new(count: u64) -> Self {
        let zeta = |n: u64| (1..=n).map(|i| (i as f64).powf(-ZIPF_EXPONENT)).sum::<f64>();
        let total = zeta(count);
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - ZIPF_EXPONENT))
            / (1.0 - zeta(2.min(count)) / total);
        Self { count: count as f64, zeta: total, eta }
    }

    fn draw(&self, random: &mut Random) -> u64 {
        let uniform = random.unit();
        let scaled = uniform * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5f64.powf(ZIPF_EXPONENT) {
            return 1;
        }
        let base = self.eta.mul_add(uniform, 1.0 - self.eta);
        (self.count * base.powf(1.0 / (1.0 - ZIPF_EXPONENT))) as u64
    }
}

/// A pattern over a number of keys; makes streams.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    pattern: Pattern,
    count: u64,
    zipf: Option<Arc<Zipf>>,
}

impl Keys {
    /// `count` must not be zero.
    pub(crate) fn new(pattern: Pattern, count: u64) -> Self {
        assert!(count > 0, "a pattern needs at least one key");
        let zipf = matches!(pattern, Pattern::Zipf | Pattern::ZipfScrambled)
            .then(|| Arc::new(Zipf::new(count)));
        Self { pattern, count, zipf }
    }

    pub(crate) fn stream(&self, seed: u64) -> KeyStream {
        let mut random = Random::new(seed);
        let scan_next = random.below(self.count);
        KeyStream { keys: self.clone(), random, drawn: 0, scan_next }
    }

    /// Where rank `rank` of a scrambled pattern lives. Two ranks may meet on
    /// one key, as in every hashing scramble; the shape stays.
    fn scramble(&self, rank: u64) -> u64 {
        ((u128::from(mix(rank)) * u128::from(self.count)) >> 64) as u64
    }
}

/// One endless stream of keys.
#[derive(Clone, Debug)]
pub(crate) struct KeyStream {
    keys: Keys,
    random: Random,
    drawn: u64,
    scan_next: u64,
}

impl KeyStream {
    pub(crate) fn draw(&mut self) -> u64 {
        let count = self.keys.count;
        self.drawn += 1;
        match self.keys.pattern {
            Pattern::Uniform => self.random.below(count),
            Pattern::Gaussian => self.gaussian(),
            Pattern::Zipf | Pattern::ZipfScrambled => {
                let zipf = self.keys.zipf.as_ref().expect("made with the pattern");
                let rank = zipf.draw(&mut self.random).min(count - 1);
                if self.keys.pattern == Pattern::Zipf { rank } else { self.keys.scramble(rank) }
            }
            Pattern::ScanHot => {
                if self.random.below(5) == 0 {
                    self.scan_next = (self.scan_next + 1) % count;
                    self.scan_next
                } else {
                    self.random.below(count.div_ceil(10))
                }
            }
            Pattern::Jump => {
                let jumps = self.drawn / JUMP_EVERY;
                (self.gaussian() + jumps % 4 * (count / 4)) % count
            }
        }
    }

    /// True with the given probability; drawn from the same stream.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.random.unit() < probability
    }

    fn gaussian(&mut self) -> u64 {
        let count = self.keys.count as f64;
        loop {
            let position = self.random.normal().mul_add(count / 6.0, count / 2.0);
            if position >= 0.0 && position < count {
                return position as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: u64 = 10_000;

    fn histogram(pattern: Pattern, draws: u64) -> Vec<u64> {
        let mut counts = vec![0; COUNT as usize];
        let mut stream = Keys::new(pattern, COUNT).stream(1);
        for _ in 0..draws {
            counts[stream.draw() as usize] += 1;
        }
        counts
    }

    fn share(counts: &[u64], range: std::ops::Range<usize>) -> f64 {
        counts[range].iter().sum::<u64>() as f64 / counts.iter().sum::<u64>() as f64
    }

    #[test]
    fn uniform_is_flat() {
        let counts = histogram(Pattern::Uniform, 200_000);
        for tenth in 0..10 {
            let part = share(&counts, tenth * 1000..(tenth + 1) * 1000);
            assert!((0.095..0.105).contains(&part), "{tenth}: {part}");
        }
    }

    #[test]
    fn gaussian_has_two_thirds_in_the_middle_third() {
        let counts = histogram(Pattern::Gaussian, 200_000);
        let middle = share(&counts, 3333..6667);
        assert!((0.67..0.70).contains(&middle), "{middle}");
    }

    #[test]
    fn zipf_follows_its_law() {
        let counts = histogram(Pattern::Zipf, 1_000_000);
        let zeta: f64 = (1..=COUNT).map(|i| (i as f64).powf(-0.99)).sum();
        for rank in [0usize, 1, 10] {
            let expected = ((rank + 1) as f64).powf(-0.99) / zeta;
            let seen = share(&counts, rank..rank + 1);
            assert!((seen / expected - 1.0).abs() < 0.2, "rank {rank}: {seen} {expected}");
        }
        let top = share(&counts, 0..100);
        assert!((0.50..0.58).contains(&top), "{top}");
    }

    #[test]
    fn scrambling_scatters_the_hot_keys_and_keeps_the_shape() {
        let counts = histogram(Pattern::ZipfScrambled, 1_000_000);
        assert!(share(&counts, 0..100) < 0.3);
        let mut sorted = counts;
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        assert!(share(&sorted, 0..100) > 0.45);
    }

    #[test]
    fn scan_visits_every_key_and_keeps_its_hot_set() {
        let counts = histogram(Pattern::ScanHot, 200_000);
        assert!(counts.iter().all(|&count| count > 0));
        let hot = share(&counts, 0..1000);
        assert!((0.80..0.84).contains(&hot), "{hot}");
    }

    #[test]
    fn jump_moves_the_middle() {
        let mut stream = Keys::new(Pattern::Jump, COUNT).stream(1);
        let mean = |stream: &mut KeyStream, draws: u64| {
            (0..draws).map(|_| stream.draw()).sum::<u64>() as f64 / draws as f64
        };
        let before = mean(&mut stream, JUMP_EVERY - 1);
        let mut after = vec![0; COUNT as usize];
        for _ in 0..JUMP_EVERY {
            after[stream.draw() as usize] += 1;
        }
        assert!((before - 5000.0).abs() < 100.0, "{before}");
        assert!(share(&after, 6000..9000) > 0.6);
    }

    #[test]
    fn streams_of_two_seeds_do_not_draw_the_same_keys() {
        let keys = Keys::new(Pattern::Uniform, COUNT);
        let (mut one, mut two) = (keys.stream(1), keys.stream(2));
        let same = (0..1000).filter(|_| one.draw() == two.draw()).count();
        assert!(same < 5, "{same}");
    }
}
