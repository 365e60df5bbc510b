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
//! When what is hot has changed, the averages of all pages are wrong together, and
//! the rate, which forgets sooner, shows by how much: what it differs from them by
//! more than the errors explain is added to the error of each.
//!
//! All gaps here are in octaves: log2 of faults.

use crate::gap::LEVELS_PER_OCTAVE;
use crate::octave::{exp2, log2};
use crate::table::{GROUP_PAGES, Group, Record, SAMPLES_MAX, State};

const OCTAVES_PER_LEVEL: f32 = 1.0 / LEVELS_PER_OCTAVE as f32;
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

/// A neighbourhood's records, each as [`Record::word`]: what follows is the same
/// arithmetic for all of them, whatever they are, and a compiler's vector is four.
type Words = [u32; GROUP_PAGES];
/// Sums are made in so many parts, which do not wait for each other.
const LANES: usize = 4;

const STATE_BITS: u32 = 7 << 24;
const OUT: u32 = (State::Out as u32) << 24;

pub(crate) fn words(records: &[Record; GROUP_PAGES]) -> Words {
    records.map(Record::word)
}

fn level(word: u32) -> f32 {
    (word >> 16 & 0xff) as i32 as f32
}

/// Samples that count, 0 for a page without any: its weight, where
/// [`ONE_SAMPLE_VARIANCE`] is 1.
fn samples(word: u32) -> f32 {
    let samples = (word >> 27) as i32 as f32;
    let known = samples.clamp(1.0, f32::from(SAMPLES_MAX));
    if word & 0xff << 16 == 0 { 0.0 } else { known }
}

/// What is the same for all neighbourhoods of one walk.
pub(crate) struct Sight {
    pub(crate) now: u32,
    pub(crate) tick: u16,
    /// Gap of an average page.
    pub(crate) average_octave: f32,
    /// Resident pages.
    pub(crate) resident: f32,
    /// When what is hot changed, if that was not long ago.
    pub(crate) changed: Option<u32>,
}

impl Sight {
    fn ticks(&self, word: u32) -> f32 {
        (u32::from(self.tick).wrapping_sub(word) & 0xffff) as i32 as f32
    }
}

/// What is known about a neighbourhood.
#[derive(Clone, Copy)]
pub(crate) struct Judgement {
    /// Gap of its pages by their returns.
    octave: f32,
    /// Weight of that against a page's own estimate.
    weight: f32,
    /// Squared error that all its pages' own estimates have in common.
    staleness: f32,
    /// Added to all keys.
    preference: f32,
    /// Key growth per tick.
    ageing: f32,
    /// Absent pages that would settle whether it has gone cold.
    pub(crate) probes: u32,
}

/// Judges the neighbourhood of these records.
/// `preference`, in 0..1, is always the same for the same neighbourhood.
pub(crate) fn judge(sight: &Sight, words: &Words, group: &Group, preference: f32) -> Judgement {
    let Scatter { mean, spread } = scatter(sight, words);
    let (exposure, silent) = group.exposure(sight.now);
    let guessed = PRIOR_RETURNS * (1.0 - group.returns() / PRIOR_UNTIL_RETURNS).max(0.0);
    let returns = group.returns() + guessed;
    let prior = guessed * exp2(sight.average_octave);
    let usual = (exposure + prior) / returns;
    let octave = log2(((exposure + silent + prior) / returns).max(silent * SILENCE_PART).max(1.0));
    let blind = f32::from(group.blind_ticks(sight.tick)) / TICKS_PER_TURN;
    let error = ONE_RETURN_VARIANCE / (returns + 1.0) + BLIND_VARIANCE * blind;
    let staleness = match (sight.changed, mean) {
        (Some(_), Some(mean)) => ((octave - mean).powi(2) - error - spread).max(0.0),
        _ => 0.0,
    };
    let silences = silent / usual - SUSPICIOUS_SILENCES;
    Judgement {
        octave,
        weight: 1.0 / (spread + error),
        staleness,
        preference: PREFERENCE * preference,
        ageing: AGEING * spread / (spread + AGEING_SPREAD) / TICKS_PER_TURN,
        probes: if silences > 0.0 { exp2(silences.min(5.0)) as u32 } else { 0 },
    }
}

/// The keys of the neighbourhood's pages, in octaves: the larger, the sooner a page
/// leaves. Those of pages that are not resident say nothing.
pub(crate) fn keys(sight: &Sight, judgement: &Judgement, words: &Words) -> [f32; GROUP_PAGES] {
    let mut keys = [0.0; GROUP_PAGES];
    for (key, &word) in keys.iter_mut().zip(words) {
        let known = samples(word);
        let own = if known > 0.0 { level(word) * OCTAVES_PER_LEVEL } else { sight.average_octave };
        let error = ONE_SAMPLE_VARIANCE + known * judgement.staleness;
        let weight = if known > 0.0 { known / error } else { 1.0 / GUESS_VARIANCE };
        let sum = weight * own + judgement.weight * judgement.octave;
        let octave = sum / (weight + judgement.weight);
        *key = octave + judgement.preference + judgement.ageing * sight.ticks(word);
    }
    keys
}

/// What the own estimates of a neighbourhood's pages say together.
struct Scatter {
    /// `None` where too few have one.
    mean: Option<f32>,
    /// By how much the pages' gaps truly differ: the variance of their own estimates
    /// beyond those estimates' errors.
    spread: f32,
}

fn scatter(sight: &Sight, words: &Words) -> Scatter {
    let faults_per_tick = sight.resident / TICKS_PER_TURN;
    let (mut octaves, mut weights) = ([0.0; GROUP_PAGES], [0.0; GROUP_PAGES]);
    for ((octave, weight), &word) in octaves.iter_mut().zip(&mut weights).zip(words) {
        let state = word & STATE_BITS;
        // The gap under way is at least as long as an absence so far: the moving
        // average as if the page came now. For any other page nothing is added.
        let own = level(word) * OCTAVES_PER_LEVEL;
        let absence = log2((sight.ticks(word) * faults_per_tick).max(1.0));
        let longer = if state == OUT { (absence - own).max(0.0) } else { 0.0 };
        *octave = own + 2.0 * log2(0.75 + 0.25 * exp2(0.5 * longer));
        *weight = if state == 0 { 0.0 } else { samples(word) };
    }
    // Of weights, their squares, pages, weighted octaves and those times octaves.
    let mut sums = [[0.0; LANES]; 5];
    for (octaves, weights) in octaves.chunks_exact(LANES).zip(weights.chunks_exact(LANES)) {
        for lane in 0..LANES {
            let (octave, weight) = (octaves[lane], weights[lane]);
            sums[0][lane] += weight;
            sums[1][lane] += weight * weight;
            sums[2][lane] += if weight > 0.0 { 1.0 } else { 0.0 };
            sums[3][lane] += weight * octave;
            sums[4][lane] += weight * octave * octave;
        }
    }
    let [weights, squares, count, sum, sum_of_squares] =
        sums.map(|lanes| lanes.iter().sum::<f32>());
    if count < 2.0 {
        return Scatter { mean: None, spread: UNKNOWN_SPREAD };
    }
    let scatter = (sum_of_squares - sum * sum / weights) / ONE_SAMPLE_VARIANCE;
    let unbiased = (weights - squares / weights) / ONE_SAMPLE_VARIANCE;
    let spread = ((scatter - (count - 1.0)) / unbiased).max(LEAST_SPREAD);
    Scatter { mean: Some(sum / weights), spread }
}

const _: () = assert!(State::Absent as u32 == 0, "no state is one that does not count");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;
    use crate::table::Table;
    use strata_units::PageId;

    const SIGHT: Sight =
        Sight { now: 1_000_000, tick: 600, average_octave: 16.0, resident: 1e5, changed: None };

    /// A neighbourhood whose pages have proven `gap(n)` and are resident, of which
    /// each in turn left and came back after `out_faults`, twice over.
    fn proven(gap: impl Fn(u32) -> u32, out_faults: u32) -> Table {
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
        table
    }

    fn judged(gap: impl Fn(u32) -> u32, out_faults: u32) -> (Judgement, [Record; GROUP_PAGES]) {
        let mut table = proven(gap, out_faults);
        let (records, group) = table.group(0).expect("it is known");
        (judge(&SIGHT, &words(records), group, 0.0), *records)
    }

    #[test]
    fn alike_neighbours_speak_for_a_page_and_unlike_ones_do_not() {
        let (alike, mut records) = judged(|_| 1 << 12, 1 << 12);
        records[5].level = Level::of_gap(1 << 15).index() as u8;
        let key_alike = keys(&SIGHT, &alike, &words(&records))[5];
        assert!((12.0..14.0).contains(&key_alike), "one odd average is doubted: {key_alike}");
        let (unlike, records) = judged(|page| 1 << (8 + page % 10), 1 << 12);
        let keys = keys(&SIGHT, &unlike, &words(&records));
        for page in [0, 9] {
            let seen = keys[page];
            let own = 8.0 + page as f32;
            assert!((seen - own).abs() < 0.4, "a page stands for itself: {seen} for {own}");
        }
    }

    #[test]
    fn returns_after_a_short_absence_make_the_neighbourhood_hot() {
        let (hot, records) = judged(|_| 1 << 14, 1 << 10);
        let key = keys(&SIGHT, &hot, &words(&records))[0];
        assert!(key < 12.5, "{key}");
    }

    #[test]
    fn after_a_change_averages_that_the_rate_contradicts_give_way() {
        let changed = Sight { changed: Some(SIGHT.now - 1_000), ..SIGHT };
        let key = |sight: &Sight, own_faults: u32| {
            let mut table = proven(|_| own_faults, 1 << 10);
            let (records, group) = table.group(0).expect("it is known");
            let words = words(records);
            keys(sight, &judge(sight, &words, group, 0.0), &words)[0]
        };
        let (before, after) = (key(&SIGHT, 1 << 15), key(&changed, 1 << 15));
        assert!(before > 11.5 && after < 10.5, "the rate is 10: {before} {after}");
        assert_eq!(key(&SIGHT, 1 << 10), key(&changed, 1 << 10), "nothing is contradicted");
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
            let judgement = judge(&sight, &words(records), group, 0.0);
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
        let words = words(records);
        let keys = keys(&SIGHT, &judge(&SIGHT, &words, group, 0.0), &words);
        assert!(keys.is_sorted_by(|older, younger| older > younger), "{keys:?}");
    }
}
