//! Which key comes next: the access patterns of the load generator.
//!
//! A pattern draws indices in `0..count`; it knows nothing of Redis or records.
//! Every connection draws its own stream from a seed of its own: connections
//! that share a seed ask for the same keys at the same time, and the miss rate
//! is understated several times over.

use crate::random::{Random, mix};
use clap::ValueEnum;
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
    /// Draws from a tenth of the keys, while one connection walks over all of
    /// them at a rate of its own.
    ScanHot,
    /// Gaussian; the middle moves by a quarter of the keys once, when a third
    /// of the measured time has gone.
    Jump,
}

impl Pattern {
    /// As on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

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
        KeyStream { keys: self.clone(), random: Random::new(seed), offset: 0, walks_at: None }
    }

    /// A walk over all keys in order, from a place that the seed gives.
    pub(crate) fn walk(&self, seed: u64) -> KeyStream {
        let mut stream = self.stream(seed);
        stream.walks_at = Some(stream.random.below(self.count));
        stream
    }

    /// Size of the hot set of [`Pattern::ScanHot`].
    pub(crate) fn hot_count(&self) -> u64 {
        hot_count(self.count)
    }
}

/// Where rank `rank` of a scrambled pattern lives. Two ranks may meet on one
/// key, as in every hashing scramble; the shape stays.
pub(crate) fn scramble(rank: u64, count: u64) -> u64 {
    ((u128::from(mix(rank)) * u128::from(count)) >> 64) as u64
}

/// A tenth of the keys.
pub(crate) const fn hot_count(count: u64) -> u64 {
    count.div_ceil(10)
}

/// One endless stream of keys.
#[derive(Clone, Debug)]
pub(crate) struct KeyStream {
    keys: Keys,
    random: Random,
    /// Keys by which the middle of a jump has moved.
    offset: u64,
    /// Where the walk is, if the stream is one.
    walks_at: Option<u64>,
}

impl KeyStream {
    pub(crate) fn draw(&mut self) -> u64 {
        let count = self.keys.count;
        if let Some(at) = &mut self.walks_at {
            *at = (*at + 1) % count;
            return *at;
        }
        match self.keys.pattern {
            Pattern::Uniform => self.random.below(count),
            Pattern::Gaussian => self.gaussian(),
            Pattern::Zipf | Pattern::ZipfScrambled => {
                let zipf = self.keys.zipf.as_ref().expect("made with the pattern");
                let rank = zipf.draw(&mut self.random).min(count - 1);
                if self.keys.pattern == Pattern::Zipf { rank } else { scramble(rank, count) }
            }
            Pattern::ScanHot => self.random.below(self.keys.hot_count()),
            Pattern::Jump => (self.gaussian() + self.offset) % count,
        }
    }

    /// From now on the middle of a jump lies a quarter of the keys further on.
    /// Other patterns have none to move.
    pub(crate) fn jump(&mut self) {
        self.offset = self.keys.count / 4;
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
    fn a_walk_visits_every_key_in_order_and_the_hot_set_is_a_tenth() {
        let keys = Keys::new(Pattern::ScanHot, COUNT);
        let mut walk = keys.walk(1);
        let first = walk.draw();
        assert!((1..COUNT).all(|step| walk.draw() == (first + step) % COUNT));
        assert_eq!(walk.draw(), first);
        let counts = histogram(Pattern::ScanHot, 200_000);
        assert!(counts[..1000].iter().all(|&count| count > 0));
        assert!(counts[1000..].iter().all(|&count| count == 0));
    }

    #[test]
    fn a_jump_moves_the_middle() {
        let mut stream = Keys::new(Pattern::Jump, COUNT).stream(1);
        let before = (0..100_000).map(|_| stream.draw()).sum::<u64>() as f64 / 1e5;
        stream.jump();
        let mut after = vec![0; COUNT as usize];
        for _ in 0..100_000 {
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
