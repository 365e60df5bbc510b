//! How much a tenant's workload has changed from one epoch to the next, by how well the
//! two foretell each other.

use super::{Exposure, Sampler, UNLIKE, group_of};
use crate::curve::GROUPS;

/// Pages that the drift is told from, at least.
const LEAST_PAGES: usize = 48;

impl Sampler {
    /// How much the workload has changed between the epochs: by how much the
    /// misses with room for a third, half or two thirds of the pages, as a share
    /// of all uses (those of the hottest pages counted in part), exceed what they would be had it not.
    ///
    /// The pages that one part of the time takes for hottest are kept, and what the
    /// other part misses is counted: once with the halves that take turns, which
    /// saw the same, once with one epoch against the other. Chance mistakes as many
    /// pages in the one as in the other, if the epochs are about as long. The second
    /// figure is the standard error. None: too little was seen, or they are not.
    pub(super) fn drift(&self, now: f64) -> Option<(f64, f64)> {
        let (before, this) = self.epoch_times(now);
        if before.max(this) > before.min(this) * UNLIKE {
            return None;
        }
        let mut pages = Vec::new();
        for (&page, watch) in &self.pages {
            let parts = [watch.half(0), watch.half(1), watch.epoch(0), watch.epoch(1)];
            if parts.iter().all(|part| part.away > 0.0) {
                pages.push((group_of(page), parts.map(Exposure::rate)));
            }
        }
        if pages.len() < LEAST_PAGES {
            return None;
        }
        // A few pages that are used all the time would outweigh the others: they are
        // nobody's victims, and count as the hottest tenth begins.
        let mut rates: Vec<f64> = pages.iter().flat_map(|page| page.1).collect();
        rates.sort_by(f64::total_cmp);
        let most = rates[rates.len() / 10 * 9].max(f64::MIN_POSITIVE);
        for (_, rates) in &mut pages {
            *rates = rates.map(|rate| rate.min(most));
        }
        let all = drift_of(pages.iter().map(|page| page.1));
        let without = |group| {
            let others = pages.iter().filter(move |page| page.0 != group);
            drift_of(others.map(|page| page.1))
        };
        let parts: Vec<f64> = (0..GROUPS as u8).map(without).collect();
        let mean = parts.iter().sum::<f64>() / GROUPS as f64;
        let squares: f64 = parts.iter().map(|part| (part - mean).powi(2)).sum();
        Some((all, (squares * (GROUPS - 1) as f64 / GROUPS as f64).sqrt()))
    }
}

/// The drift of pages with these rates: in either half, and in either epoch.
fn drift_of(pages: impl Iterator<Item = [f64; 4]>) -> f64 {
    let pages: Vec<[f64; 4]> = pages.collect();
    let both_ways = |a: usize, b: usize, room: f64| {
        let mut there: Vec<(f64, f64)> = pages.iter().map(|page| (page[a], page[b])).collect();
        let mut back: Vec<(f64, f64)> = pages.iter().map(|page| (page[b], page[a])).collect();
        f64::midpoint(missed(&mut there, room), missed(&mut back, room))
    };
    [1.0 / 3.0, 0.5, 2.0 / 3.0]
        .into_iter()
        .map(|room| both_ways(2, 3, room) - both_ways(0, 1, room))
        .fold(f64::NEG_INFINITY, f64::max)
}

/// What share of the second rates belongs to pages that are not among the `room`
/// hottest by the first.
fn missed(pairs: &mut [(f64, f64)], room: f64) -> f64 {
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0));
    let kept = (pairs.len() as f64 * room) as usize;
    let sum = |pairs: &[(f64, f64)]| pairs.iter().map(|pair| pair.1).sum::<f64>();
    sum(&pairs[kept..]) / sum(pairs).max(f64::MIN_POSITIVE)
}
