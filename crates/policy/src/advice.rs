//! What a tenant's miss-ratio curve ([`crate::curve`]) means for its budget: how
//! much slower it runs with how much DRAM, and how a total is best shared out.
//!
//! The *loss* is the part of its speed that a tenant loses to waiting for pages:
//! with `m` misses a second of its own processor time, each of which makes a
//! thread wait for `c` seconds, the work of a second takes `1 + m c`, and the loss
//! is `m c / (1 + m c)`. A thread that has other things to wait for loses less.

use crate::budget::{KEPT_PART, kept_share_bytes, staged_share_bytes, watermarks_bytes};
use crate::curve::Curve;

const PAGE_BYTES: f64 = strata_units::PAGE_SIZE as f64;
/// Halvings of what is searched for.
const HALVINGS: usize = 48;
/// Points of a curve, by the share of the pages that has room.
const POINTS: usize = 40;
/// What a tenant costs varies by about this part: a budget that is to have room for
/// everything has so much more. A page too few is a walk that misses again and again.
const VARIES_PART: f64 = 64.0;
/// Part of the budget above which stored pages go to the file tier.
const STORED_PART: f64 = 0.5;
/// Standard errors between an estimate and its bounds (95 %).
pub const ERRORS: f64 = 2.0;
/// From this drift on ([`crate::sampler::Sampler::end_epoch`]) a workload changes too
/// fast: more of its uses than this would miss for being foretold wrongly.
pub const TOO_FAST: f64 = 0.08;

/// What is known of a tenant beside its curve.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Facts {
    /// Its pages, wherever they are.
    pub pages: f64,
    /// Part of them that is stored and costs nothing: of one value throughout. With
    /// less room they are the first that are out.
    pub free_pages: f64,
    /// What any other stored page costs in DRAM.
    pub stored_page_bytes: f64,
    /// What it costs beside its pages: unmanaged memory and our records.
    pub fixed_bytes: f64,
    /// How long a thread waits for a page.
    pub miss_seconds: f64,
    /// There is a file tier with room.
    pub has_file_tier: bool,
}

impl Facts {
    /// The share of the pages that has room within a budget.
    #[must_use]
    pub fn room(&self, budget_bytes: f64) -> f64 {
        let (mut low, mut high) = (0.0, self.pages);
        if self.cost_bytes(high, budget_bytes) <= budget_bytes {
            return 1.0;
        }
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            if self.cost_bytes(middle, budget_bytes) <= budget_bytes {
                low = middle;
            } else {
                high = middle;
            }
        }
        low / self.pages.max(1.0)
    }

    /// What the tenant costs with so many pages in place: they, the others in the
    /// store, what of these stays staged and what copies are kept
    /// ([`crate::budget`]), and what is kept free.
    fn cost_bytes(&self, in_place: f64, budget_bytes: f64) -> f64 {
        let out = self.pages - in_place;
        let stored = self.stored_bytes(out);
        let most_stored =
            if self.has_file_tier { budget_bytes * STORED_PART } else { f64::INFINITY };
        let staged = staged_share_bytes(budget_bytes, out * PAGE_BYTES);
        let most_kept = budget_bytes / KEPT_PART as f64;
        let kept = kept_share_bytes(most_kept, stored, out / in_place.max(1.0));
        let spare = spare_bytes(budget_bytes);
        in_place * PAGE_BYTES + stored.min(most_stored) + staged + kept + spare + self.fixed_bytes
    }

    /// The least budget that has room for a share of the pages.
    #[must_use]
    pub fn budget_bytes(&self, room: f64) -> f64 {
        // No more than three sixteenths of a budget are kept free.
        let most = (self.fixed_bytes + self.pages * PAGE_BYTES) * 4.0 / 3.0 + PAGE_BYTES;
        let (mut low, mut high) = (0.0, most);
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            if self.room(middle) >= room && self.least_bytes(middle) <= middle {
                high = middle;
            } else {
                low = middle;
            }
        }
        high
    }

    /// What so many pages that are out cost in the store.
    fn stored_bytes(&self, out: f64) -> f64 {
        (out - self.free_pages).max(0.0) * self.stored_page_bytes.min(PAGE_BYTES - 1.0)
    }

    /// What it costs with nothing in place, at the least.
    fn least_bytes(&self, budget_bytes: f64) -> f64 {
        let stored = if self.has_file_tier { 0.0 } else { self.stored_bytes(self.pages) };
        self.fixed_bytes + stored + spare_bytes(budget_bytes)
    }
}

/// What of a budget is kept free ahead of demand: half way between the marks.
fn spare_bytes(budget_bytes: f64) -> f64 {
    let (low, high) = watermarks_bytes(budget_bytes as u64, 0);
    f64::midpoint(low as f64, high as f64)
}

/// What a budget would mean.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Point {
    /// The budget.
    pub budget_bytes: u64,
    /// Misses a second of processor time.
    pub misses_per_second: f64,
    /// The loss, ...
    pub loss: f64,
    /// ...and its upper bound.
    pub loss_at_most: f64,
}

/// Whether a drift with this standard error says that a workload changes too fast.
#[must_use]
pub fn changes_too_fast(drift: (f64, f64)) -> bool {
    is_drift_from(drift, TOO_FAST)
}

/// Whether a drift is at least `least`, and more than chance.
pub(crate) fn is_drift_from((drift, error): (f64, f64), least: f64) -> bool {
    drift >= least && drift >= ERRORS * error
}

/// The loss of so many misses a second.
#[must_use]
pub fn loss(misses_per_second: f64, miss_seconds: f64) -> f64 {
    let waits = misses_per_second * miss_seconds;
    waits / (1.0 + waits)
}

/// The point of a budget.
#[must_use]
pub fn point(curve: &Curve, facts: &Facts, budget_bytes: u64) -> Point {
    let (misses, error) = curve.misses(facts.room(budget_bytes as f64));
    let (misses, error) = (misses * facts.pages, error * facts.pages);
    Point {
        budget_bytes,
        misses_per_second: misses,
        loss: loss(misses, facts.miss_seconds),
        loss_at_most: loss(misses + ERRORS * error, facts.miss_seconds),
    }
}

/// The whole curve, from the least budget to one with room for everything: budgets
/// rise, losses fall.
#[must_use]
pub fn points(curve: &Curve, facts: &Facts) -> Vec<Point> {
    let mut points: Vec<Point> = (1..=POINTS)
        .map(|step| facts.budget_bytes(step as f64 / POINTS as f64) as u64)
        .map(|budget_bytes| point(curve, facts, budget_bytes))
        .collect();
    points.dedup_by_key(|point| point.budget_bytes);
    // A hundredth of a room is no room for the last page: everything has it.
    if let Some(last) = points.last_mut() {
        last.budget_bytes += (last.budget_bytes as f64 / VARIES_PART) as u64;
        (last.misses_per_second, last.loss, last.loss_at_most) = (0.0, 0.0, 0.0);
    }
    let mut most = f64::INFINITY;
    let mut most_bound = f64::INFINITY;
    for point in &mut points {
        most = point.loss.min(most);
        most_bound = point.loss_at_most.min(most_bound);
        (point.loss, point.loss_at_most) = (most, most_bound);
    }
    points
}

/// The loss at a budget, between the points of a curve: by `of` of each point.
#[must_use]
pub fn between(points: &[Point], budget_bytes: u64, of: impl Fn(&Point) -> f64) -> f64 {
    let after = points.partition_point(|point| point.budget_bytes < budget_bytes);
    match (after.checked_sub(1).and_then(|before| points.get(before)), points.get(after)) {
        (None, None) => 0.0,
        (None, Some(only)) | (Some(only), None) => of(only),
        (Some(before), Some(after)) => {
            let span = (after.budget_bytes - before.budget_bytes).max(1) as f64;
            let part = (budget_bytes - before.budget_bytes) as f64 / span;
            of(before) + (of(after) - of(before)) * part
        }
    }
}

/// The least budget with which no more than `limit` is lost, by `of` of each
/// point; none when every budget loses more.
#[must_use]
pub fn budget_for(points: &[Point], limit: f64, of: impl Fn(&Point) -> f64) -> Option<u64> {
    let first = points.iter().position(|point| of(point) <= limit)?;
    let Some(before) = first.checked_sub(1) else { return Some(points[first].budget_bytes) };
    let (before, after) = (&points[before], &points[first]);
    let part = (of(before) - limit) / (of(before) - of(after)).max(f64::MIN_POSITIVE);
    let span = (after.budget_bytes - before.budget_bytes) as f64;
    Some(before.budget_bytes + (span * part.clamp(0.0, 1.0)).ceil() as u64)
}

/// Shares out `total_bytes` so that the sum of the losses is least, each counted half
/// way to its bound: where little is known, or a little less DRAM would cost much, a
/// mistake costs more than it can win. Each tenant is its curve, of at least one
/// point; it gets at least its first budget and at most its last. None: the first
/// budgets are more than there is.
///
/// Curves are replaced by their lower convex hulls, whose segments are served by
/// what a byte saves. For the hulls that is the least sum (Fox 1966: marginal
/// allocation); a curve lies above its hull within a segment that ends in the
/// middle, and at most one does.
#[must_use]
pub fn share_out(tenants: &[Vec<Point>], total_bytes: u64) -> Option<Vec<u64>> {
    let mut budgets: Vec<u64> = tenants.iter().map(|points| points[0].budget_bytes).collect();
    let least = budgets.iter().try_fold(0u64, |sum, &budget| sum.checked_add(budget))?;
    let mut left = total_bytes.checked_sub(least)?;
    let mut segments: Vec<(f64, usize, u64)> = Vec::new();
    for (tenant, points) in tenants.iter().enumerate() {
        segments
            .extend(hull_segments(points).into_iter().map(|(bytes, saved)| (saved, tenant, bytes)));
    }
    // Stable: the segments of a hull stay in order.
    segments.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (saved, tenant, bytes) in segments {
        if saved <= 0.0 {
            break;
        }
        let given = bytes.min(left);
        budgets[tenant] += given;
        left -= given;
    }
    Some(budgets)
}

/// See [`share_out`].
fn expected(point: Point) -> f64 {
    f64::midpoint(point.loss, point.loss_at_most.max(point.loss))
}

/// The segments of a curve's lower convex hull, in order: bytes, and how much loss each
/// byte saves.
pub(crate) fn hull_segments(points: &[Point]) -> Vec<(u64, f64)> {
    let segment = |pair: &[Point]| {
        let bytes = pair[1].budget_bytes - pair[0].budget_bytes;
        (bytes, (expected(pair[0]) - expected(pair[1])).max(0.0) / bytes.max(1) as f64)
    };
    lower_hull(points).windows(2).map(segment).collect()
}

fn lower_hull(points: &[Point]) -> Vec<Point> {
    let mut hull: Vec<Point> = Vec::new();
    for &point in points {
        while let [.., a, b] = hull[..] {
            let slope = |from: Point, to: Point| {
                (expected(to) - expected(from))
                    / (to.budget_bytes - from.budget_bytes).max(1) as f64
            };
            if slope(b, point) > slope(a, b) {
                break;
            }
            hull.pop();
        }
        hull.push(point);
    }
    hull
}
