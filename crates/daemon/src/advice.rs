//! The advisor's answers in the words of the command line.

use strata_api::{Advice, AdviceBrief, AdviceState, CurvePoint, NEEDED_FOR, Need, Reply};
use strata_pager::Tenant;
use strata_policy::advice::{Point, between, budget_for, share_out};

use crate::commands::{LEAST_BUDGET, error};

/// What can be said of `tenant`, who is watched from now on.
pub(crate) fn of(tenant: &Tenant) -> Reply {
    let name = &tenant.record().name;
    if tenant.is_released() {
        let hint = "it was released and is not managed any more";
        return error(format!("nothing can be observed of {name}"), hint);
    }
    if tenant.attachment() == (true, false) {
        return error(format!("nothing can be observed of {name}"), "its processes have ended");
    }
    let advice = tenant.advise().map_or_else(|| nothing(tenant), |seen| described(tenant, &seen));
    Reply::Advice { advice: Box::new(advice) }
}

/// The same in short, if somebody asked for it lately.
pub(crate) fn brief(tenant: &Tenant) -> Option<AdviceBrief> {
    let advice = described(tenant, &tenant.advice_known()?);
    let mut budget_bytes = [None; NEEDED_FOR.len()];
    for (brief, need) in budget_bytes.iter_mut().zip(&advice.needs) {
        *brief = need.budget_bytes;
    }
    Some(AdviceBrief {
        state: advice.state,
        loss: advice.now.map(|point| point.loss),
        budget_bytes,
    })
}

/// Before anything was seen.
fn nothing(tenant: &Tenant) -> Advice {
    Advice {
        name: tenant.record().name.clone(),
        state: AdviceState::Watching,
        budget_bytes: tenant.budget_bytes(),
        window_seconds: 0.0,
        processor_seconds: 0.0,
        watched_pages: 0,
        pages: 0,
        miss_us: 0.0,
        drift: None,
        now: None,
        needs: Vec::new(),
        curve: Vec::new(),
    }
}

fn described(tenant: &Tenant, seen: &strata_pager::Advice) -> Advice {
    // Nobody can be given less.
    let mut points = seen.points.clone();
    let small = points.partition_point(|point| point.budget_bytes < LEAST_BUDGET.0);
    points.drain(..small.min(points.len().saturating_sub(1)));
    let budget_bytes = tenant.budget_bytes();
    let need = |loss: f64| {
        let budget = budget_for(&points, loss, |point| point.loss);
        Need {
            loss,
            budget_bytes: budget,
            budget_bytes_at_most: budget_for(&points, loss, |point| point.loss_at_most),
            saves_bytes: budget.map(|budget| budget_bytes as i64 - budget as i64),
        }
    };
    Advice {
        state: match seen.state {
            strata_pager::AdviceState::Watching => AdviceState::Watching,
            strata_pager::AdviceState::Steady => AdviceState::Steady,
            strata_pager::AdviceState::Changing => AdviceState::Changing,
        },
        budget_bytes,
        window_seconds: seen.window.as_secs_f64(),
        processor_seconds: seen.processor_seconds,
        watched_pages: seen.watched_pages,
        pages: seen.pages,
        miss_us: seen.miss_us,
        drift: seen.drift,
        now: (!points.is_empty()).then(|| {
            let at = |of: fn(&Point) -> f64| between(&points, budget_bytes, of);
            CurvePoint {
                budget_bytes,
                misses_per_second: at(|point| point.misses_per_second),
                loss: at(|point| point.loss),
                loss_at_most: at(|point| point.loss_at_most),
            }
        }),
        needs: NEEDED_FOR.iter().filter(|_| !points.is_empty()).map(|&loss| need(loss)).collect(),
        curve: points
            .iter()
            .map(|point| CurvePoint {
                budget_bytes: point.budget_bytes,
                misses_per_second: point.misses_per_second,
                loss: point.loss,
                loss_at_most: point.loss_at_most,
            })
            .collect(),
        ..nothing(tenant)
    }
}

/// Shares `total_bytes` out among whom the curves belong to.
pub(crate) fn shares(total_bytes: u64, curves: &[Vec<CurvePoint>]) -> Reply {
    let tenants: Vec<Vec<Point>> = curves
        .iter()
        .map(|curve| {
            curve
                .iter()
                .map(|point| Point {
                    budget_bytes: point.budget_bytes,
                    misses_per_second: point.misses_per_second,
                    loss: point.loss,
                    loss_at_most: point.loss_at_most,
                })
                .collect()
        })
        .collect();
    let least: u64 =
        tenants.iter().fold(0, |sum, points| sum.saturating_add(points[0].budget_bytes));
    match share_out(&tenants, total_bytes) {
        None => error(
            format!(
                "{} does not suffice: these tenants need at least {}",
                strata_units::ByteSize(total_bytes),
                strata_units::ByteSize(least)
            ),
            "name a larger total",
        ),
        Some(budgets) => Reply::Shares {
            losses: tenants
                .iter()
                .zip(&budgets)
                .map(|(points, &budget)| between(points, budget, |point| point.loss))
                .collect(),
            budgets_bytes: budgets,
        },
    }
}
