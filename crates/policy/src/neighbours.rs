//! How soon a resident page is wanted, judged from its own samples and from its
//! neighbours'. Arithmetic on one neighbourhood; which pages leave is decided in
//! [`crate::replacement`].
//!
//! A resident page gives no samples, but pages that lie beside it may be out, and
//! programs use neighbouring pages alike more often than not. So a page's gap is
//! estimated twice: by its own moving average, and by the rate at which its
//! neighbourhood's absent pages come back. Both are logarithms with an error of
//! known size, and are averaged with weights by their errors (shrinkage of
//! several means towards a common one: James, Stein: Estimation with quadratic
//! loss, 1961). By how much pages of the neighbourhood truly differ is estimated
//! from how much their own averages differ beyond those averages' errors
//! (DerSimonian, Laird: Meta-analysis in clinical trials, 1986): where they
//! differ much, neighbours count for nothing, and a page stands for itself.
//!
//! All gaps here are in octaves: log2 of faults.

use crate::gap::LEVELS_PER_OCTAVE;
use crate::table::{GROUP_PAGES, Group, Record, SAMPLES_MAX, State};

/// Ticks in which as many pages arrive as are resident: one *turn*.
pub(crate) const TICKS_PER_TURN: f32 = 256.0;
/// Squared error, in octaves, of the estimate from one sample of a memoryless
/// page; that from n is an nth of it.
const ONE_SAMPLE_VARIANCE: f32 = 2.4;
/// The same for a page without a sample: its guess says next to nothing.
const GUESS_VARIANCE: f32 = 64.0;
/// Squared error of a neighbourhood's rate from one return.
const ONE_RETURN_VARIANCE: f32 = 2.0;
/// Growth of a neighbourhood's squared error in a turn in which none of its pages
/// is out.
const BLIND_VARIANCE: f32 = 1.0;
/// Pages of a neighbourhood always differ a little.
const LEAST_SPREAD: f32 = 0.02;
/// Where too little is known to say by how much pages differ.
const UNKNOWN_SPREAD: f32 = 1.0;
/// A neighbourhood starts with this many returns at the rate of an average page,
/// which count for less with each of its own and for nothing after the fourth.
const PRIOR_RETURNS: f32 = 0.1;
const PRIOR_UNTIL_RETURNS: f32 = 4.0;
/// Octaves by which a page's key rises in one turn where neighbours differ much.
/// Slower ageing misses a little less when nothing changes, faster ageing finds a
/// moved hot set sooner.
const AGEING: f32 = 0.25;
/// The spread at which a page ages at half of that speed. Where pages are alike,
/// some of them are out at any time, and nothing need be aged.
const AGEING_SPREAD: f32 = 0.5;
/// Equals are told apart by up to this many octaves, always in the same way: of a
/// circle larger than memory a fixed part then stays resident, where any order by
/// age would miss every page of it.
const PREFERENCE: f32 = 0.2;
/// A silence of so many usual ones is suspicious.
const SUSPICIOUS_SILENCES: f32 = 1.0;
/// From a silence of so many faults × pages on, the gap is at least half of it.
const SILENCE_PART: f32 = 0.5;

/// What is the same for all neighbourhoods of one walk.
pub(crate) struct Sight {
    pub(crate) now: u32,
    pub(crate) tick: u16,
    /// Gap of an average page.
    pub(crate) average_octave: f32,
    /// Resident pages.
    pub(crate) resident: f32,
}

impl Sight {
    fn turns(&self, stamp: u16) -> f32 {
        f32::from(self.tick.wrapping_sub(stamp)) / TICKS_PER_TURN
    }
}

/// What is known about a neighbourhood.
#[derive(Clone, Copy, Default)]
pub(crate) struct Judgement {
    /// Gap of its pages by their returns.
    octave: f32,
    /// Weight of that against a page's own estimate.
    weight: f32,
    /// Added to all keys.
    preference: f32,
    /// Key growth per turn.
    ageing: f32,
    /// Absent pages that would settle whether it has gone cold.
    pub(crate) probes: u32,
}

/// Judges the neighbourhood of `records`.
/// `preference`, in 0..1, is always the same for the same neighbourhood.
pub(crate) fn judge(
    sight: &Sight,
    records: &[Record],
    group: &Group,
    preference: f32,
) -> Judgement {
    debug_assert_eq!(records.len(), GROUP_PAGES);
    let spread = spread(sight, records);
    let (exposure, silent) = group.exposure(sight.now);
    let guessed = PRIOR_RETURNS * (1.0 - group.returns() / PRIOR_UNTIL_RETURNS).max(0.0);
    let returns = group.returns() + guessed;
    let prior = guessed * sight.average_octave.exp2();
    let usual = (exposure + prior) / returns;
    let octave = ((exposure + silent + prior) / returns).max(silent * SILENCE_PART).max(1.0).log2();
    let blind = f32::from(group.blind_ticks(sight.tick)) / TICKS_PER_TURN;
    let error = ONE_RETURN_VARIANCE / (returns + 1.0) + BLIND_VARIANCE * blind;
    let silences = silent / usual - SUSPICIOUS_SILENCES;
    Judgement {
        octave,
        weight: 1.0 / (spread + error),
        preference: PREFERENCE * preference,
        ageing: AGEING * spread / (spread + AGEING_SPREAD),
        probes: if silences > 0.0 { silences.min(5.0).exp2() as u32 } else { 0 },
    }
}

/// The key of a resident page, in octaves: the larger, the sooner it leaves.
pub(crate) fn key(sight: &Sight, judgement: &Judgement, record: Record) -> f32 {
    let (own, variance) = own_estimate(sight, record);
    let weight = 1.0 / variance;
    let octave = (weight * own + judgement.weight * judgement.octave) / (weight + judgement.weight);
    octave + judgement.preference + judgement.ageing * sight.turns(record.stamp)
}

/// A page's gap by its own samples and absence, and its squared error.
fn own_estimate(sight: &Sight, record: Record) -> (f32, f32) {
    let samples = if record.level == 0 { 0 } else { record.samples().clamp(1, SAMPLES_MAX) };
    let (mut octave, variance) = if samples == 0 {
        (sight.average_octave, GUESS_VARIANCE)
    } else {
        let octave = f32::from(record.level) / LEVELS_PER_OCTAVE as f32;
        (octave, ONE_SAMPLE_VARIANCE / f32::from(samples))
    };
    if record.state() == State::Out && samples > 0 {
        // The gap under way is at least as long as the absence so far: the moving
        // average as if the page came now.
        let absence = (sight.turns(record.stamp) * sight.resident).max(1.0).log2();
        if absence > octave {
            let ratio = (0.5 * (absence - octave)).exp2();
            octave += 2.0 * (0.75 + 0.25 * ratio).log2();
        }
    }
    (octave, variance)
}

/// By how much the gaps of a neighbourhood's pages truly differ: the variance of
/// their own estimates beyond those estimates' errors.
fn spread(sight: &Sight, records: &[Record]) -> f32 {
    let (mut weights, mut squares, mut sum, mut sum_of_squares) = (0.0, 0.0, 0.0, 0.0);
    let mut count = 0;
    for &record in records {
        if record.state() == State::Absent || record.level == 0 {
            continue;
        }
        let (octave, variance) = own_estimate(sight, record);
        let weight = 1.0 / variance;
        weights += weight;
        squares += weight * weight;
        sum += weight * octave;
        sum_of_squares += weight * octave * octave;
        count += 1;
    }
    if count < 2 {
        return UNKNOWN_SPREAD;
    }
    let scatter = sum_of_squares - sum * sum / weights;
    let excess = (scatter - (count - 1) as f32) / (weights - squares / weights);
    excess.max(LEAST_SPREAD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;
    use crate::table::Table;
    use strata_units::PageId;

    const SIGHT: Sight = Sight { now: 1_000_000, tick: 600, average_octave: 16.0, resident: 1e5 };

    /// A neighbourhood whose pages have proven `gap(n)` and are resident, of which
    /// each in turn left and came back after `out_faults`, twice over.
    fn judged(gap: impl Fn(u32) -> u32, out_faults: u32) -> (Judgement, Vec<Record>) {
        let mut table = Table::default();
        let mut now = SIGHT.now - 128 * out_faults;
        for turn in 0..2 * GROUP_PAGES as u32 {
            let page = PageId(turn % GROUP_PAGES as u32);
            table.depart(page, now, SIGHT.tick);
            now += out_faults;
            table.arrive(page, now, SIGHT.tick, 1.0);
            let (record, _) = table.entry(page);
            record.set_state(State::Resident);
            record.set_samples(SAMPLES_MAX);
            record.level = Level::of_gap(gap(page.0)).index() as u8;
        }
        let (records, group) = table.group(0).expect("it is known");
        (judge(&SIGHT, records, group, 0.0), records.to_vec())
    }

    #[test]
    fn alike_neighbours_speak_for_a_page_and_unlike_ones_do_not() {
        let (alike, mut records) = judged(|_| 1 << 12, 1 << 12);
        records[5].level = Level::of_gap(1 << 15).index() as u8;
        let key_alike = key(&SIGHT, &alike, records[5]);
        assert!((12.0..14.0).contains(&key_alike), "one odd average is doubted: {key_alike}");
        let (unlike, records) = judged(|page| 1 << (8 + page % 10), 1 << 12);
        for page in [0, 9] {
            let seen = key(&SIGHT, &unlike, records[page]);
            let own = 8.0 + page as f32;
            assert!((seen - own).abs() < 0.4, "a page stands for itself: {seen} for {own}");
        }
    }

    #[test]
    fn returns_after_a_short_absence_make_the_neighbourhood_hot() {
        let (hot, records) = judged(|_| 1 << 14, 1 << 10);
        assert!(key(&SIGHT, &hot, records[0]) < 12.5, "{}", key(&SIGHT, &hot, records[0]));
    }

    #[test]
    fn silence_asks_for_more_probes_and_cools_the_neighbourhood() {
        let mut table = Table::default();
        for now in (0..100u32).map(|n| n * 1_000) {
            table.depart(PageId(1), now, 0);
            table.arrive(PageId(1), now + 1_000, 0, 1.0);
        }
        table.depart(PageId(1), 100_000, 0);
        let (mut octaves, mut probes) = (Vec::new(), Vec::new());
        for silence in [500, 3_500, 60_000] {
            let sight = Sight { now: 100_000 + silence, tick: 0, ..SIGHT };
            let (records, group) = table.group(0).expect("it is known");
            let judgement = judge(&sight, records, group, 0.0);
            octaves.push(judgement.octave);
            probes.push(judgement.probes);
        }
        assert!(probes[0] == 0 && probes[1] >= 4 && probes[2] >= 16, "{probes:?}");
        assert!(octaves[0] < 11.0 && octaves[2] > 13.5, "{octaves:?}");
    }

    #[test]
    fn pages_without_samples_leave_in_the_order_they_came() {
        let mut table = Table::default();
        for page in 0..GROUP_PAGES as u32 {
            table.arrive(PageId(page), page, page as u16, 1.0);
            table.entry(PageId(page)).0.set_state(State::Resident);
        }
        let (records, group) = table.group(0).expect("it is known");
        let judgement = judge(&SIGHT, records, group, 0.0);
        let keys: Vec<f32> = records.iter().map(|&r| key(&SIGHT, &judgement, r)).collect();
        assert!(keys.is_sorted_by(|older, younger| older > younger), "{keys:?}");
    }
}
