//! What the advisor foretells of programs other than Redis, and what is missed when
//! the budget is set: a database, and a batch job that walks through a graph. The
//! program is started anew for each budget.

use super::{
    super::foretelling::{
        Foretelling, PLACES, PLENTY_BYTES, SHARES, WATCHED_AT, advisor_seconds, budget_bytes,
    },
    mariadb::{Database, PHASES, Schedule},
    place::Figures,
    run::Job,
    walk,
};
use crate::{
    bench::{Bench, report::PartResults},
    stage::Setup,
};
use anyhow::{Context, Result};
use serde_json::json;

/// Statements that sysbench's read-only transaction looks rows up with: ten for one row,
/// four for a range.
const STATEMENTS: f64 = 14.0;

/// How a trial is run.
#[derive(Clone, Copy)]
struct Run {
    budget_bytes: u64,
    is_advised: bool,
    /// Warm-up and measured time, in seconds. While it is watched, about as long as what
    /// the advisor goes by: the machine's speed changes, and both must be of the same.
    times: [&'static str; 2],
}

/// What misses are counted for: its name, and how many of it a trial had, if that was
/// counted.
type Unit = (&'static str, fn(&Figures) -> Option<f64>);

fn operations(figures: &Figures) -> f64 {
    figures.done.operations.max(1) as f64
}

/// All of the part.
pub(in crate::bench) fn foretelling_programs(
    bench: &Bench,
    results: &mut PartResults,
) -> Result<()> {
    let database = Database::prepare(bench)?;
    let trial = |run: Run, what: &str| {
        let schedule =
            Schedule { phases: &PHASES[..1], times: run.times, is_advised: run.is_advised };
        let setup = Setup::Strata { dram_bytes: run.budget_bytes };
        let figures = database.trial(bench, setup, &schedule, &format!("mariadb: {what}"))?;
        figures.into_iter().next().context("no phase was run")
    };
    let units: [Unit; 2] = [
        ("statement", |figures| Some(operations(figures) * STATEMENTS)),
        ("page request", |figures| Some(figures.done.page_requests? as f64)),
    ];
    foretell(bench, "mariadb, read only", &units, trial, results)?;
    database.remove()?;

    let data_bytes = if bench.quick { 64 << 20 } else { 600 << 20 };
    let trial = |run: Run, what: &str| {
        let line = walk(run.times, &["graph"], data_bytes)?;
        let job = Job { name: "graph", line, data_bytes, is_advised: run.is_advised };
        let setup = Setup::Strata { dram_bytes: run.budget_bytes };
        Ok(bench.program(setup, &format!("graph: {what}"), &job)?.figures)
    };
    foretell(bench, "graph", &[("vertex", |figures| Some(operations(figures)))], trial, results)
}

/// Watches a program far from its budget and near it, then sets the budgets.
fn foretell(
    bench: &Bench,
    name: &str,
    units: &[Unit],
    trial: impl Fn(Run, &str) -> Result<Figures>,
    results: &mut PartResults,
) -> Result<()> {
    let mut foretellings: Vec<Foretelling> =
        units.iter().map(|(unit, _)| Foretelling::new(name, unit)).collect();
    let (watch, settle) =
        if bench.quick { (["15", "5"], ["5", "2"]) } else { (["40", "30"], ["90", "8"]) };
    for _ in bench.repetitions() {
        let watched = |budget_bytes: u64, place: &str| {
            let figures = trial(Run { budget_bytes, is_advised: true, times: watch }, place)?;
            let advice = figures.advice.clone().context("the advisor was not asked")?;
            // Of the program alone: the advisor's time is that.
            let cpu_us = figures.program_cpu_us_per_op - figures.daemon_cpu_us_per_op;
            let seconds = advisor_seconds(cpu_us / 1e6 * operations(&figures), figures.faults);
            anyhow::Ok((figures, advice, seconds))
        };
        let far = watched(PLENTY_BYTES, PLACES[0])?;
        let full = far.0.memory.total_bytes();
        let near = watched(budget_bytes(full, WATCHED_AT), PLACES[1])?;
        for (at, &share) in SHARES.iter().enumerate() {
            let budget_bytes = budget_bytes(full, share);
            let what = format!("{:.0} % in place", share * 100.0);
            let figures = trial(Run { budget_bytes, is_advised: false, times: settle }, &what)?;
            let missed = figures.brought_back.context("the tenant had no statistics")? as f64;
            for (foretelling, (unit, count)) in foretellings.iter_mut().zip(units) {
                let count = |figures: &Figures| {
                    count(figures).with_context(|| format!("no {unit} was counted"))
                };
                let far = (&far.1, far.2 / count(&far.0)?);
                let near = (&near.1, near.2 / count(&near.0)?);
                foretelling.add(at, budget_bytes, [far, near], missed / count(&figures)?)?;
            }
            results.raw.push(json!({ "share": share, "figures": figures }));
        }
        for (place, (figures, advice, _)) in PLACES.iter().zip([&far, &near]) {
            if advice.curve.is_empty() {
                results.text += &format!("\n{name}, {place}: the advisor had nothing to say.\n");
            }
            results.raw.push(json!({ "watched": place, "figures": figures }));
        }
    }
    results.series.extend(foretellings.into_iter().flat_map(Foretelling::into_series));
    Ok(())
}
