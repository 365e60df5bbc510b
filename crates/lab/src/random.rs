//! A small deterministic generator for workloads. Not for secrets.
//!
//! Everything the lab draws is a function of a seed, so that a run can be
//! repeated and a value can be checked without having been kept.

/// One step of splitmix64's output function (Steele, Lea and Flood, 2014): a
/// bijection on 64 bits that scatters neighbours.
#[must_use]
pub(crate) const fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A splitmix64 stream.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// A stream of its own for every seed: neighbouring seeds share nothing.
    pub(crate) const fn new(seed: u64) -> Self {
        Self { state: mix(seed) }
    }

    pub(crate) const fn next(&mut self) -> u64 {
        let out = mix(self.state);
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        out
    }

    /// Uniform in `0..bound`. The bias of the multiplication is below 2⁻³² for
    /// the bounds used here, far under what a run of millions can show.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Uniform in `[0, 1)`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal, by the polar method (Marsaglia and Bray, 1964).
    pub(crate) fn normal(&mut self) -> f64 {
        loop {
            let (x, y) = (self.unit().mul_add(2.0, -1.0), self.unit().mul_add(2.0, -1.0));
            let square = x.mul_add(x, y * y);
            if square > 0.0 && square < 1.0 {
                return x * (-2.0 * square.ln() / square).sqrt();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_repeat_and_differ_by_seed() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            (0..100).map(|_| random.next()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        let (one, two) = (draw(1), draw(2));
        assert!(one.iter().all(|value| !two.contains(value)));
    }

    #[test]
    fn below_covers_its_range_evenly() {
        let mut random = Random::new(7);
        let mut counts = [0u32; 10];
        for _ in 0..100_000 {
            counts[random.below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|&count| (9_500..10_500).contains(&count)), "{counts:?}");
    }

    #[test]
    fn normal_has_mean_zero_and_deviation_one() {
        let mut random = Random::new(3);
        let draws: Vec<f64> = (0..200_000).map(|_| random.normal()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
    }
}
