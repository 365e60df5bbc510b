//! What the advisor says: how much DRAM a tenant needs.

use serde::{Deserialize, Serialize};

/// The slowdowns for which [`Advice::needs`] says what they would take.
pub const NEEDED_FOR: [f64; 3] = [0.01, 0.05, 0.1];
/// Most points of a curve in a request.
pub const MAX_CURVE_POINTS: usize = 64;

/// Whether there is advice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdviceState {
    /// Too little was seen yet.
    Watching,
    /// There is.
    Steady,
    /// There is, but it will not hold: what is used changes too fast.
    Changing,
}

/// What a budget would mean.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CurvePoint {
    /// The budget.
    pub budget_bytes: u64,
    /// Pages brought back in a second of the tenant's processor time, in which each
    /// fault's own 2.5 microseconds do not count.
    pub misses_per_second: f64,
    /// The part of its speed that the tenant loses by waiting for them: 0 to 1.
    pub loss: f64,
    /// The same with two standard errors more misses.
    pub loss_at_most: f64,
}

/// What a slowdown would take.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Need {
    /// The part of its speed that is given up: 0 to 1.
    pub loss: f64,
    /// The budget that costs no more than that; none: no budget was found.
    pub budget_bytes: Option<u64>,
    /// The same to be on the safe side: two standard errors.
    pub budget_bytes_at_most: Option<u64>,
    /// What that budget saves against the present one; negative: what it costs
    /// more.
    pub saves_bytes: Option<i64>,
}

/// What can be said of a tenant's need for DRAM.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Advice {
    /// The tenant.
    pub name: String,
    /// Whether there is advice.
    pub state: AdviceState,
    /// Its budget.
    pub budget_bytes: u64,
    /// The time that the advice is from, ...
    pub window_seconds: f64,
    /// ...and the processor time that the tenant had in it.
    pub processor_seconds: f64,
    /// Pages that were watched...
    pub watched_pages: u64,
    /// ...out of so many.
    pub pages: u64,
    /// How long a page that is missed keeps a thread waiting.
    pub miss_us: f64,
    /// Which part of its uses would miss because what is used changes; none as
    /// long as that cannot be told.
    pub drift: Option<f64>,
    /// What the present budget means.
    pub now: Option<CurvePoint>,
    /// What slowdowns of 1, 5 and 10 % would take.
    pub needs: Vec<Need>,
    /// Budgets from the least to one with room for everything.
    pub curve: Vec<CurvePoint>,
}

/// The same in short, beside other figures.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct AdviceBrief {
    /// Whether there is advice.
    pub state: AdviceState,
    /// What the tenant loses with its present budget.
    pub loss: Option<f64>,
    /// The budgets that cost it 1, 5 and 10 %.
    pub budget_bytes: [Option<u64>; NEEDED_FOR.len()],
}

/// What is wrong with a curve from outside; none when nothing is.
pub(crate) fn curve_problem(curve: &[CurvePoint]) -> Option<&'static str> {
    let is_part = |part: f64| (0.0..=1.0).contains(&part);
    if curve.is_empty() || curve.len() > MAX_CURVE_POINTS {
        Some("a curve has 1 to 64 points")
    } else if !curve.is_sorted_by(|a, b| a.budget_bytes < b.budget_bytes) {
        Some("the budgets of a curve rise")
    } else if !curve.iter().all(|point| is_part(point.loss) && is_part(point.loss_at_most)) {
        Some("a loss is between 0 and 1")
    } else {
        None
    }
}
