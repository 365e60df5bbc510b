//! The gap estimate: how many faults lie between two uses of a page, in 16 bits
//! a page. Constant-time functions of one cell; the fault path calls them. What
//! is evicted is decided in [`crate::replacement`], not here.
//!
//! A page that is mapped hides its uses. A page that is not mapped shows its next
//! one: the faults of its tenant between its leaving and its arrival are a true
//! sample of its access gap. The cell holds a moving average of those samples
//! and the time the page left.
//!
//! Time is the tenant's count of arrivals, a `u32` that may wrap. Layout of a
//! cell, high bits first:
//!
//! | bits | content |
//! | --- | --- |
//! | 15 | the level comes from at least one sample |
//! | 14..8 | the estimate's [`Level`] |
//! | 7..0 | when it left, in units of a 16th of the estimate, modulo 256 |
//!
//! The unit grows with the estimate, so a gap is resolved to a 16th of what was
//! expected (never finer than [`MIN_UNIT_SHIFT`]) and the clock goes around after
//! 16 times the estimate. [`swept`] raises the estimate, and with it the unit,
//! of a page that stays out for half of that. A page that is not swept in time
//! shows some gap between nothing and 16 times its estimate, so its estimate
//! still rises on average, only more slowly.
//!
//! The cell `0` ([`NEW`]) is a page without history. While a page is in DRAM the
//! time means nothing.

use crate::octave::{exp2, log2};

/// A page that never left, or whose content was discarded.
pub const NEW: u16 = 0;

/// Levels per doubling of the gap.
pub const LEVELS_PER_OCTAVE: u32 = 4;
/// Number of levels, [`Level::UNKNOWN`] included: 32 octaves, the whole `u32`.
pub const LEVELS: usize = 128;
/// log2 of the finest unit of leaving times, in faults. Pages whose gap is below
/// 16 faults need no telling apart (a tenant of any size has hundreds of pages
/// to evict first), and a coarser unit leaves more time between sweeps.
pub const MIN_UNIT_SHIFT: u32 = 4;
/// log2 of the coarsest unit: 256 of them are the `u32` clock's full turn, so
/// that its wrap-around is the cells' own.
const MAX_UNIT_SHIFT: u32 = 24;
/// The unit is the estimate divided by 2 to this power.
const UNITS_PER_ESTIMATE_SHIFT: u32 = 4;

const SAMPLED: u16 = 1 << 15;

/// Weight of a new sample in the average.
const WEIGHT: f32 = 0.25;
/// The average is taken over gap^POWER. Samples of a memoryless page are spread
/// over several octaves; near 1 the average wastes less of what they tell than a
/// mean of logarithms does, below 1 one long absence does not drown the rest.
const POWER: f32 = 0.5;

/// An estimated access gap in quarter octaves: level `l` stands for `2^(l/4)`
/// faults.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Level(u8);

impl Level {
    /// No sample yet. Sorts below every real level but is no statement about
    /// heat: the replacement treats such pages as average ones.
    pub const UNKNOWN: Self = Self(0);

    /// The level of a gap in faults, never [`Level::UNKNOWN`].
    #[must_use]
    pub fn of_gap(gap_faults: u32) -> Self {
        Self::rounded(octaves(gap_faults) * LEVELS_PER_OCTAVE as f32)
    }

    /// The gap in faults that this level stands for (1 for `UNKNOWN`).
    #[must_use]
    pub fn gap_faults(self) -> u32 {
        (f32::from(self.0) / LEVELS_PER_OCTAVE as f32).exp2() as u32
    }

    /// 0..[`LEVELS`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    fn rounded(quarters: f32) -> Self {
        Self(quarters.round().clamp(1.0, (LEVELS - 1) as f32) as u8)
    }

    const fn unit_shift(self) -> u32 {
        let octave = self.0 as u32 / LEVELS_PER_OCTAVE;
        let shift = octave.saturating_sub(UNITS_PER_ESTIMATE_SHIFT);
        if shift < MIN_UNIT_SHIFT {
            MIN_UNIT_SHIFT
        } else if shift > MAX_UNIT_SHIFT {
            MAX_UNIT_SHIFT
        } else {
            shift
        }
    }
}

/// The estimate of a page; [`Level::UNKNOWN`] before its first return.
#[must_use]
pub const fn level(cell: u16) -> Level {
    if cell & SAMPLED == 0 { Level::UNKNOWN } else { stored_level(cell) }
}

/// The cell of a page that leaves DRAM at `now`. `newcomer` is the guess for a
/// page without a sample ([`crate::Census::newcomer`]); it only sets the unit of
/// time, and the first sample replaces it.
#[must_use]
pub const fn left(cell: u16, now: u32, newcomer: Level) -> u16 {
    if cell & SAMPLED == 0 {
        let guess = if newcomer.0 == 0 { Level(1) } else { newcomer };
        encode(0, guess, now)
    } else {
        encode(SAMPLED, stored_level(cell), now)
    }
}

/// The cell of a page that comes back to DRAM at `now`, and its new estimate.
/// A [`NEW`] cell stays as it is: a first touch.
#[must_use]
pub fn arrived(cell: u16, now: u32) -> (u16, Level) {
    if cell == NEW {
        return (NEW, Level::UNKNOWN);
    }
    let sample = octaves(elapsed_faults(cell, now));
    let octave = if cell & SAMPLED == 0 {
        sample
    } else {
        let before = f32::from(stored_level(cell).0) / LEVELS_PER_OCTAVE as f32;
        let ratio = exp2(POWER * (sample - before));
        before + log2(1.0 + WEIGHT * (ratio - 1.0)) / POWER
    };
    // Rounding to the nearest level would swallow every small correction:
    // a pseudo-random threshold keeps them in the mean.
    let level = Level::rounded(octave * LEVELS_PER_OCTAVE as f32 + dither(cell, now));
    (encode(SAMPLED, level, now), level)
}

/// The cell of a page that is out of DRAM, seen by a walk over the page map at
/// `now`: raised when the page has stayed out for more than 8 times its estimate.
/// The leaving time is kept. Walk the whole map at least once in as many faults
/// as it has pages.
#[must_use]
pub fn swept(cell: u16, now: u32) -> u16 {
    if cell == NEW {
        return NEW;
    }
    let elapsed = elapsed_faults(cell, now);
    let before = stored_level(cell);
    if before.unit_shift() == MAX_UNIT_SHIFT || elapsed >> before.unit_shift() < 128 {
        return cell;
    }
    let raised = Level::of_gap(elapsed / 4).max(before);
    encode(cell & SAMPLED, raised, now.wrapping_sub(elapsed))
}

const fn stored_level(cell: u16) -> Level {
    Level((cell >> 8) as u8 & 0x7f)
}

const fn encode(flag: u16, level: Level, now: u32) -> u16 {
    flag | (level.0 as u16) << 8 | (now >> level.unit_shift()) as u16 & 0xff
}

/// Faults since the page left, half a unit added: a page that returns within
/// the unit in which it left was out for half of one on average.
const fn elapsed_faults(cell: u16, now: u32) -> u32 {
    let shift = stored_level(cell).unit_shift();
    let units = ((now >> shift) as u8).wrapping_sub(cell as u8) as u32;
    if units == 0 { 1 << (shift - 1) } else { units << shift }
}

fn octaves(gap_faults: u32) -> f32 {
    log2(gap_faults.max(1) as f32)
}

/// Between −½ and ½, from what differs between two arrivals.
fn dither(cell: u16, now: u32) -> f32 {
    let mixed = (now ^ u32::from(cell) << 16).wrapping_mul(0x9e37_79b9);
    (mixed >> 8) as f32 / (1u32 << 24) as f32 - 0.5
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deterministic uniform numbers in 0..1.
    fn uniform(seed: &mut u64) -> f64 {
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 11) as f64 / (1u64 << 53) as f64
    }

    #[test]
    fn a_new_page_stays_new_until_it_has_left() {
        assert_eq!(arrived(NEW, 1234), (NEW, Level::UNKNOWN));
        assert_eq!(swept(NEW, 99), NEW);
        let out = left(NEW, 1000, Level::of_gap(4096));
        assert_eq!(level(out), Level::UNKNOWN, "a guess is not a sample");
        let (cell, first) = arrived(out, 1000 + 8192);
        assert_eq!(level(cell), first);
        assert!(first.index().abs_diff(Level::of_gap(8192).index()) <= 1, "{first:?}");
    }

    #[test]
    fn a_gap_is_resolved_to_a_sixteenth_of_the_estimate_at_every_time() {
        for now in [0, 77, 4_000_000_000, u32::MAX - 3, u32::MAX - 100_000] {
            for exponent in 5..28 {
                let estimate = 1u32 << exponent;
                for gap in [estimate / 2, estimate, estimate * 2, estimate / 4 * 11] {
                    let cell =
                        left(SAMPLED | (Level::of_gap(estimate).0 as u16) << 8, now, Level(1));
                    let unit = (estimate / 16).max(1 << MIN_UNIT_SHIFT);
                    let seen = elapsed_faults(cell, now.wrapping_add(gap));
                    assert!(seen.abs_diff(gap) <= unit, "{estimate} {gap} at {now}: {seen}");
                }
            }
        }
    }

    #[test]
    fn the_average_finds_the_gap_of_a_memoryless_page() {
        let mut seed = 7;
        for gap in [300.0, 5_000.0, 400_000.0] {
            let (mut cell, mut now, mut sum) = (NEW, u32::MAX - 1_000_000, 0.0);
            for round in 0..4_000 {
                cell = left(cell, now, Level::of_gap(100_000));
                let wait = -(1.0 - uniform(&mut seed)).ln() * gap;
                now = now.wrapping_add(wait as u32 + 1);
                (cell, _) = arrived(cell, now);
                if round >= 1000 {
                    sum += f64::from(level(cell).0) / 4.0;
                }
            }
            let mean = sum / 3000.0;
            // The mean of square roots of an exponential is 0.89 of the root of
            // its mean: a third of an octave below, whatever the gap.
            let expected = gap.log2() - 0.4;
            assert!((mean - expected).abs() < 0.25, "{gap}: {mean} for {expected}");
        }
    }

    #[test]
    fn a_page_that_becomes_hot_is_believed_within_a_few_returns() {
        let mut cell = SAMPLED | (Level::of_gap(1 << 20).0 as u16) << 8;
        let mut now = 5u32;
        for _ in 0..8 {
            cell = left(cell, now, Level(1));
            now += 1 << 14;
            (cell, _) = arrived(cell, now);
        }
        assert!(level(cell) < Level::of_gap(1 << 16), "{:?}", level(cell));
    }

    #[test]
    fn sweeping_keeps_long_absences_true_through_the_wrap() {
        let start = u32::MAX - 3_000_000;
        let mut cell = left(SAMPLED | (Level::of_gap(1 << 8).0 as u16) << 8, start, Level(1));
        let mut now = start;
        for _ in 0..10_000 {
            now = now.wrapping_add(1_000);
            cell = swept(cell, now);
        }
        let seen = elapsed_faults(cell, now);
        assert!((9_000_000..=11_000_000).contains(&seen), "{seen}");
        assert!(level(cell) >= Level::of_gap(10_000_000 / 16), "{:?}", level(cell));
    }

    #[test]
    fn a_page_within_its_estimate_is_not_touched_by_a_sweep() {
        for exponent in 8..30 {
            let cell = left(SAMPLED | (Level::of_gap(1 << exponent).0 as u16) << 8, 999, Level(1));
            for times in 0..7u32 {
                let now = 999u32.wrapping_add((1u32 << exponent).wrapping_mul(times));
                assert_eq!(swept(cell, now), cell, "2^{exponent} × {times}");
            }
        }
    }

    #[test]
    fn a_page_that_nobody_swept_still_rises() {
        // Out for 1000 times its estimate, again and again, at odd phases.
        let (mut cell, mut now) = (SAMPLED | (Level::of_gap(1 << 9).0 as u16) << 8, 0u32);
        for round in 0..60u32 {
            cell = left(cell, now, Level(1));
            now = now.wrapping_add((1 << 19) + round * 977);
            (cell, _) = arrived(cell, now);
        }
        assert!(level(cell) > Level::of_gap(1 << 14), "{:?}", level(cell));
    }
}
