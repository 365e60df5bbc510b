//! The miss-ratio curve of one tenant, from samples of how long pages stay away.
//!
//! A page that is not mapped shows when it is used next ([`crate::sampler`] takes
//! such samples). What is wanted is the distribution of the *rates* at which pages
//! are used: from it follows what is missed with room for so many of them. Rates
//! of single pages, a few samples each, are too scattered for that (the pages
//! that seem coldest are those whose samples came out long by chance, and the
//! misses of a small room would be understated); so the distribution is found as
//! a whole, by maximum likelihood over a grid of rates (Laird 1978, Lindsay 1983:
//! nonparametric mixtures; by expectation maximisation).
//!
//! Time is whatever the caller counts; rates are per unit of it. Strata uses the
//! tenant's own processor time: it stands still while a thread waits for a page,
//! so that what is seen with little room also holds for more, and the other way
//! around.

/// Grid points an octave of rates.
const STEPS_PER_OCTAVE: f64 = 4.0;
/// Most grid points: 24 octaves.
const MOST_STEPS: usize = 96;
/// Rounds of expectation maximisation. More sharpen what the samples do not say.
const ROUNDS: usize = 120;
/// By how much (natural logarithms) the replacement misjudges rates. With this the curve
/// meets what it misses in the simulator where heat is scattered; where neighbours are
/// used alike it misses less (1.06 to 1.13 times the best fixed set, as with 0.3), but
/// which it is a sample of pages does not say.
const MISJUDGED: f64 = 0.4;
/// The sample is cut into so many parts; each is left out once to see how much the
/// curve depends on chance (delete-a-group jackknife).
pub const GROUPS: usize = 8;
/// The variation of gaps is believed within these bounds: 0.01 is a clockwork, 4
/// comes in bursts.
const VARIATION: (f64, f64) = (0.02, 4.0);

/// Below this variation uses are regular: absences that began at any moment say
/// little then.
const REGULAR: f64 = 0.5;
/// With regular uses, an absence under way counts from so many mean gaps on.
const OVERDUE: f64 = 2.0;

/// What was seen of one page.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Seen {
    /// Whole gaps between two uses: how many, ...
    pub gaps: f64,
    /// ...their sum, ...
    pub gap_time: f64,
    /// ...and the sum of their squares.
    pub gap_squares: f64,
    /// For how long before each of them the page was in place after it was used,
    /// all together.
    pub held: f64,
    /// Returns of any kind in the time that counts, ...
    pub returns: f64,
    /// ...and for how much of that time it was away.
    pub away: f64,
    /// How long the absence under way has lasted.
    pub open: f64,
    /// Which part of the sample it belongs to, below [`GROUPS`].
    pub group: u8,
}

impl Seen {
    /// Returns, and the time that they took.
    fn evidence(&self, variation: f64) -> (f64, f64) {
        if variation >= REGULAR {
            return (self.returns, self.away);
        }
        if self.gaps == 0.0 {
            // Half a gap at a time, on average.
            return (self.returns, if self.returns > 0.0 { 2.0 } else { 1.0 } * self.away);
        }
        // From use to use: a page in place for a while is not used in it, or it
        // would not come regularly.
        let time = self.gap_time + self.held;
        let overdue = self.open * self.gaps > OVERDUE * time;
        (self.gaps, time + if overdue { self.open } else { 0.0 })
    }
}

/// How regularly pages are used: the variance of a page's gaps over the square of
/// their mean. 1 when chance decides, 0 for a walk around and around.
#[must_use]
pub fn variation(pages: &[Seen]) -> f64 {
    let (mut sum, mut freedom) = (0.0, 0.0);
    for seen in pages.iter().filter(|seen| seen.gaps >= 2.0 && seen.gap_time > 0.0) {
        let n = seen.gaps;
        let mean = seen.gap_time / n;
        let squares = (seen.gap_squares - n * mean * mean).max(0.0);
        // Few samples understate it: (n + 1) / n undoes that for chance.
        sum += squares / (mean * mean) * (n + 1.0) / n;
        freedom += n - 1.0;
    }
    // Some observations of "chance decides" beside what was seen.
    ((sum + 8.0) / (freedom + 8.0)).clamp(VARIATION.0, VARIATION.1)
}

/// How often pages are used: a distribution.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Rates {
    /// Rates, rising, and the share of the pages that has each.
    steps: Vec<(f64, f64)>,
}

impl Rates {
    /// The distribution under which `pages` are most likely. Pages of which nothing
    /// was seen are not counted. None: nothing was seen.
    #[must_use]
    pub fn fit<'a>(
        pages: impl Iterator<Item = &'a Seen>,
        variation: f64,
        rounds: usize,
    ) -> Option<Self> {
        let evidence = pages.map(|seen| seen.evidence(variation));
        let evidence: Vec<(f64, f64)> = evidence.filter(|&(_, time)| time > 0.0).collect();
        let rate = |&(returns, time): &(f64, f64)| returns.max(0.25) / time;
        let lowest = evidence.iter().map(rate).fold(f64::INFINITY, f64::min) / 4.0;
        let highest = evidence.iter().map(rate).fold(0.0, f64::max) * 2.0;
        if evidence.is_empty() || !(lowest > 0.0 && highest.is_finite()) {
            return None;
        }
        let octaves = (highest / lowest).log2();
        let steps = ((octaves * STEPS_PER_OCTAVE).ceil() as usize).clamp(1, MOST_STEPS);
        let ratio = (octaves / steps as f64).exp2();
        let grid: Vec<f64> = (0..=steps).map(|step| lowest * ratio.powi(step as i32)).collect();
        // The sum of n gaps with this variation is gamma distributed, of shape
        // n / variation (exact for chance, near for the rest); without a return
        // only that it was away so long is known.
        let mut likely = Vec::with_capacity(evidence.len() * grid.len());
        for &(returns, time) in &evidence {
            let shape = returns / variation;
            let scale = if returns > 0.0 { 1.0 / variation } else { 1.0 };
            let log = |rate: f64| shape * (rate * time * scale).ln() - rate * time * scale;
            let most = grid.iter().map(|&rate| log(rate)).fold(f64::NEG_INFINITY, f64::max);
            likely.extend(grid.iter().map(|&rate| (log(rate) - most).exp()));
        }
        let mut shares = vec![1.0 / grid.len() as f64; grid.len()];
        for _ in 0..rounds {
            let mut next = vec![0.0; grid.len()];
            for page in likely.chunks_exact(grid.len()) {
                let total: f64 = page.iter().zip(&shares).map(|(a, b)| a * b).sum();
                let part = 1.0 / (total.max(f64::MIN_POSITIVE) * evidence.len() as f64);
                for ((next, likely), share) in next.iter_mut().zip(page).zip(&shares) {
                    *next += likely * share * part;
                }
            }
            shares = next;
        }
        Some(Self { steps: grid.into_iter().zip(shares).collect() })
    }

    /// Uses of a page and unit of time, on average.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.steps.iter().map(|(rate, share)| rate * share).sum()
    }

    /// Misses of a page and unit of time, on average over all pages, when this
    /// share of them has room. The replacement keeps the pages that it takes for
    /// the most used; in that it errs by [`MISJUDGED`].
    #[must_use]
    pub fn misses(&self, room: f64) -> f64 {
        let room = room.clamp(0.0, 1.0);
        let (mut low, mut high) = match (self.steps.first(), self.steps.last()) {
            (Some(first), Some(last)) => (first.0.ln() - 8.0, last.0.ln() + 8.0),
            _ => return 0.0,
        };
        let stays = |rate: f64, limit: f64| normal((rate.ln() - limit) / MISJUDGED);
        for _ in 0..48 {
            let limit = f64::midpoint(low, high);
            let kept: f64 = self.steps.iter().map(|&(rate, s)| s * stays(rate, limit)).sum();
            if kept > room {
                low = limit;
            } else {
                high = limit;
            }
        }
        // Ends of the search: all have room, or none.
        if room >= 1.0 {
            return 0.0;
        }
        self.steps.iter().map(|&(rate, share)| rate * share * (1.0 - stays(rate, high))).sum()
    }
}

/// The normal distribution function, to 1e-4 (a logistic with a cubic term:
/// Page 1977).
fn normal(x: f64) -> f64 {
    let argument = 1.595_769_1 * x + 0.071_35 * x * x * x;
    1.0 / (1.0 + (-argument.clamp(-700.0, 700.0)).exp())
}

/// Points of a curve.
#[derive(Clone, PartialEq, Debug)]
pub struct Curve {
    all: Rates,
    /// Each without one part of the sample.
    parts: Vec<Rates>,
}

impl Curve {
    /// The curve of a sample. None: nothing was seen.
    #[must_use]
    pub fn of(pages: &[Seen]) -> Option<Self> {
        let variation = variation(pages);
        let all = Rates::fit(pages.iter(), variation, ROUNDS)?;
        let without = |group| pages.iter().filter(move |seen| usize::from(seen.group) != group);
        let parts =
            (0..GROUPS).filter_map(|group| Rates::fit(without(group), variation, ROUNDS / 3));
        Some(Self { parts: parts.collect(), all })
    }

    /// Uses of a page and unit of time.
    #[must_use]
    pub fn uses(&self) -> f64 {
        self.all.mean()
    }

    /// Misses of a page and unit of time with room for this share of the pages,
    /// and the standard error of that.
    #[must_use]
    pub fn misses(&self, room: f64) -> (f64, f64) {
        let misses = self.all.misses(room);
        let n = self.parts.len() as f64;
        if n < 2.0 {
            return (misses, misses);
        }
        let parts: Vec<f64> = self.parts.iter().map(|part| part.misses(room)).collect();
        let mean = parts.iter().sum::<f64>() / n;
        let squares: f64 = parts.iter().map(|part| (part - mean).powi(2)).sum();
        (misses, (squares * (n - 1.0) / n).sqrt())
    }
}
