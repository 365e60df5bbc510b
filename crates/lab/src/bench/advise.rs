//! The advisor: what it foretells beside what is then missed, what watching costs,
//! and what sharing out by its advice wins against equal shares.
//!
//! A miss is a page that is brought back. Misses are counted per request on both
//! sides: what is foretold for a second by the advisor's clock is multiplied by what a
//! request took by it while it was foretold.

use super::{
    Bench,
    foretelling::{
        Foretelling, PLENTY_BYTES, SHARES, WATCHED_AT, advisor_seconds, brought_back, budget_bytes,
    },
    report::{PartResults, Series, Side},
};
use crate::{
    interrupt,
    keys::Pattern,
    process,
    progress::Progress,
    random::mix,
    records::Records,
    redis::{
        expect::Expect,
        load::{Client, Moment, Workload},
        outcome::Outcome,
        server::{Server, Wrapping},
    },
    strata::{Strata, total_bytes},
    trial::Plan,
};
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;
use std::{cell::Cell, time::Duration};
use strata_api::{AdviceState, Stats};

/// The same requests again until the replacement has settled, in warm-ups.
const SETTLING_ROUNDS: u64 = 2;
/// Pairs of windows in which a tenant and the same server without Strata take turns.
const WINDOWS: u32 = 6;
/// For the processor's caches, which the other one had.
const WINDOW_WARMUP: Duration = Duration::from_millis(500);

/// What four tenants get together.
#[derive(clap::Args)]
pub(super) struct Totals {
    /// `advise-shares`: these parts of what the tenants want, in per cent
    #[arg(long, value_delimiter = ',', default_value = "60,75",
        value_parser = clap::value_parser!(u64).range(1..=100))]
    totals: Vec<u64>,
}

/// A server, under Strata or without, and who drives it.
struct Driven {
    /// Of the tenant.
    name: String,
    server: Server,
    client: Client,
    expect: Expect,
    workload: Workload,
    /// Runs so far. Each draws keys of its own: one that draws the last one's again
    /// uses only the pages that that one has used, and the rest look unused.
    runs: Cell<u64>,
}

/// One drive of it.
struct Drive {
    run: Outcome,
    misses_per_op: f64,
    /// By the advisor's clock.
    seconds_per_op: f64,
}

impl Driven {
    fn start(
        bench: &Bench,
        strata: &Strata,
        name: &str,
        pattern: Pattern,
        records: u64,
    ) -> Result<Self> {
        let name = format!("{name}-{}", std::process::id());
        let wrapping = strata.wrapping(&name, PLENTY_BYTES);
        Self::start_in(bench, &wrapping, name, pattern, records)
    }

    fn start_in(
        bench: &Bench,
        wrapping: &Wrapping,
        name: String,
        pattern: Pattern,
        records: u64,
    ) -> Result<Self> {
        let plan: &Plan = &bench.plan;
        let server = Server::start(&bench.janitor, &name, wrapping, plan.server_core)?;
        let client = Client {
            endpoint: server.endpoint().clone(),
            connections: plan.connections,
            pipeline: plan.pipeline,
            core: plan.client_core,
        };
        let expect = Expect::new(Records::new(mix(plan.workload.seed)), records);
        client.load(&expect, &mut |_| {}).context("load")?;
        let workload = Workload { pattern, ..plan.workload };
        Ok(Self { name, server, client, expect, workload, runs: Cell::new(0) })
    }

    fn drive(&self, strata: &Strata, warmup: Duration, duration: Duration) -> Result<Drive> {
        let look = || -> (u64, Option<Stats>) {
            let times = process::times(self.server.pid()).unwrap_or_default();
            (times.cpu_ns, strata.stats(&self.name).ok())
        };
        let (mut begin, mut end) = ((0, None), (0, None));
        let run = self.run(warmup, duration, &mut |moment| match moment {
            Moment::MeasureBegins => begin = look(),
            Moment::MeasureEnds => end = look(),
            Moment::Tick { .. } => {}
        })?;
        let stats = begin.1.as_ref().zip(end.1.as_ref()).context("the tenant had no statistics")?;
        let grown = |of: fn(&Stats) -> u64| of(stats.1).saturating_sub(of(stats.0));
        let cpu_seconds = (end.0 - begin.0) as f64 / 1e9;
        let operations = run.operations.max(1) as f64;
        Ok(Drive {
            misses_per_op: grown(brought_back) as f64 / operations,
            seconds_per_op: advisor_seconds(cpu_seconds, grown(|stats| stats.faults_total))
                / operations,
            run,
        })
    }

    /// Operations a second.
    fn speed(&self, warmup: Duration, duration: Duration) -> Result<f64> {
        Ok(self.run(warmup, duration, &mut |_| {})?.operations_per_second)
    }

    fn run(
        &self,
        warmup: Duration,
        duration: Duration,
        at: &mut dyn FnMut(Moment),
    ) -> Result<Outcome> {
        interrupt::check()?;
        let run = self.runs.get() + 1;
        self.runs.set(run);
        let seed = self.workload.seed + run;
        let workload = Workload { warmup, duration, seed, ..self.workload };
        self.client.run(&workload, &self.expect, at).context("run")
    }

    fn set(&self, strata: &Strata, budget_bytes: u64) -> Result<()> {
        strata.ask(&["set", &self.name, "--dram", &format!("{budget_bytes} bytes")]).map(drop)
    }
}

/// How long a foretelling watches: several epochs of the advisor.
fn watch_time(bench: &Bench) -> Duration {
    Duration::from_secs(if bench.quick { 15 } else { 60 })
}

fn side(name: &str) -> Side {
    Side::new(name)
}

/// Does one of the parts beside the servers' core.
pub(super) fn pinned(bench: &Bench, part: impl FnOnce() -> Result<()>) -> Result<()> {
    let cores = process::allowed_cores();
    if let Some(core) = bench.plan.client_core {
        process::pin_self(core)?;
    }
    let outcome = part();
    process::unpin_self(&cores)?;
    outcome
}

/// What is foretold, and what is missed then.
pub(super) fn foretelling(bench: &Bench, results: &mut PartResults) -> Result<()> {
    for pattern in [Pattern::Gaussian, Pattern::Zipf, Pattern::ScanHot, Pattern::Uniform] {
        let mut foretelling = Foretelling::new(&pattern.name(), "op");
        for repetition in bench.repetitions() {
            let what = format!("{}: {} of {}", pattern.name(), repetition + 1, bench.repetitions);
            let progress = Progress::start(&what);
            foretell_once(bench, pattern, &mut foretelling, results)?;
            progress.finish(&what);
        }
        results.series.extend(foretelling.into_series());
    }
    Ok(())
}

fn foretell_once(
    bench: &Bench,
    pattern: Pattern,
    foretelling: &mut Foretelling,
    results: &mut PartResults,
) -> Result<()> {
    let warmup = bench.plan.workload.warmup;
    let duration = bench.plan.workload.duration;
    let watch = watch_time(bench);
    let strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
    let driven = Driven::start(bench, &strata, "foretold", pattern, bench.plan.records)?;
    driven.drive(&strata, warmup, duration)?;
    let full = total_bytes(&strata.stats(&driven.name)?);
    let budget = |share: f64| budget_bytes(full, share);
    strata.advice(&driven.name)?;
    let far = driven.drive(&strata, warmup, watch)?;
    let far = (strata.advice(&driven.name)?, far.seconds_per_op);
    driven.set(&strata, budget(WATCHED_AT))?;
    let near = driven.drive(&strata, warmup, watch)?;
    let near = (strata.advice(&driven.name)?, near.seconds_per_op);
    for (at, &share) in SHARES.iter().enumerate() {
        driven.set(&strata, budget(share))?;
        for _ in 0..SETTLING_ROUNDS {
            driven.drive(&strata, warmup, duration)?;
        }
        let drive = driven.drive(&strata, warmup, duration)?;
        let foretellings = [&far, &near].map(|(advice, seconds)| (advice, *seconds));
        foretelling.add(at, budget(share), foretellings, drive.misses_per_op)?;
        results.raw.push(json!({
            "pattern": pattern, "share": share, "budget_bytes": budget(share), "run": drive.run,
            "misses_per_op": drive.misses_per_op, "stats": strata.stats(&driven.name)?,
        }));
    }
    for (place, (advice, seconds)) in [("far", far), ("near", near)] {
        results.raw.push(json!({
            "pattern": pattern, "watched": place, "advice": advice, "seconds_per_op": seconds,
        }));
    }
    driven.server.stop()?;
    strata.stop()
}

/// Throughput with the advisor on and off, in turn on one server: near its budget,
/// and far from it.
pub(super) fn cost(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let (windows, window) =
        if bench.quick { (4, Duration::from_secs(2)) } else { (16, Duration::from_secs(4)) };
    // What is measured is to be watched, not that it begins: pieces are registered, and
    // each of their pages is looked at for the first time.
    let pause = window;
    for (place, share) in [("near the budget", Some(WATCHED_AT)), ("far from it", None)] {
        let mut series = Series {
            name: format!("advisor on, Gaussian, {place}"),
            unit: "ops/s".into(),
            left: side("on"),
            right: Some(side("off")),
        };
        for repetition in bench.repetitions() {
            let what = format!("cost {place}: {} of {}", repetition + 1, bench.repetitions);
            let progress = Progress::start(&what);
            let strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
            let driven =
                Driven::start(bench, &strata, "cost", Pattern::Gaussian, bench.plan.records)?;
            if let Some(share) = share {
                let full = total_bytes(&strata.stats(&driven.name)?);
                driven.set(&strata, budget_bytes(full, share))?;
            }
            let duration = bench.plan.workload.duration;
            driven.drive(&strata, bench.plan.workload.warmup, duration)?;
            let on = || -> Result<f64> {
                strata.advice(&driven.name)?;
                Ok(driven.drive(&strata, pause, window)?.run.operations_per_second)
            };
            let off = || -> Result<f64> {
                strata.ask(&["advise", &driven.name, "--stop"])?;
                Ok(driven.drive(&strata, pause, window)?.run.operations_per_second)
            };
            for number in 0..windows {
                let (with, without) = if number % 2 == 0 {
                    let with = on()?;
                    (with, off()?)
                } else {
                    let without = off()?;
                    (on()?, without)
                };
                series.left.samples.push(with);
                if let Some(right) = &mut series.right {
                    right.samples.push(without);
                }
            }
            driven.server.stop()?;
            strata.stop()?;
            progress.finish(&what);
        }
        results.series.push(series);
    }
    Ok(())
}

/// Four unlike tenants under one total: equal shares, then `advise --all --apply`.
/// They are driven one after the other; the advisor's time stands still while a
/// tenant has nothing to do.
pub(super) fn sharing(bench: &Bench, totals: &Totals, results: &mut PartResults) -> Result<()> {
    let series = |percent| Series {
        name: format!("sum of losses of four tenants, {percent} % of what they want"),
        unit: "of 4".into(),
        left: side("advise --apply"),
        right: Some(side("equal shares")),
    };
    let mut sums: Vec<Series> = totals.totals.iter().map(series).collect();
    for repetition in bench.repetitions() {
        let what = format!("sharing out: {} of {}", repetition + 1, bench.repetitions);
        let progress = Progress::start(&what);
        let mut strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
        strata.keep(&bench.janitor)?;
        let tenants = Tenants::start(bench, &strata)?;
        tenants.drive(1)?;
        let plenty = tenants.speeds()?;
        let mut wanted = 0;
        for one in &tenants.managed {
            wanted += total_bytes(&strata.stats(&one.name)?);
        }
        results.raw.push(json!({ "plenty": plenty, "lost": lost(&plenty) }));
        for (percent, sum) in totals.totals.iter().zip(&mut sums) {
            results.raw.push(tenants.share_out(&strata, wanted / 100 * percent, sum)?);
        }
        for one in tenants.managed.into_iter().chain(tenants.plain) {
            one.server.stop()?;
        }
        strata.stop()?;
        progress.finish(&what);
    }
    results.series.extend(sums);
    Ok(())
}

/// Operations a second of a tenant, and of the same server without Strata.
#[derive(Serialize)]
struct Speeds {
    managed: f64,
    plain: f64,
}

fn lost(speeds: &[Speeds]) -> f64 {
    speeds.iter().map(|speeds| 1.0 - speeds.managed / speeds.plain).sum()
}

/// Unlike servers under Strata, and the same without.
struct Tenants<'a> {
    bench: &'a Bench,
    managed: Vec<Driven>,
    plain: Vec<Driven>,
}

impl<'a> Tenants<'a> {
    fn start(bench: &'a Bench, strata: &Strata) -> Result<Self> {
        let records = bench.plan.records;
        let tenants = [
            ("gaussian", Pattern::Gaussian, records / 2),
            ("zipf", Pattern::Zipf, records / 2),
            ("uniform", Pattern::Uniform, records / 8),
            ("scan", Pattern::ScanHot, records / 4),
        ];
        let mut this = Self { bench, managed: Vec::new(), plain: Vec::new() };
        for (name, pattern, records) in tenants {
            this.managed.push(Driven::start(bench, strata, name, pattern, records)?);
            let name = format!("plain-{name}-{}", std::process::id());
            let bare = Wrapping::default();
            this.plain.push(Driven::start_in(bench, &bare, name, pattern, records)?);
        }
        Ok(this)
    }

    fn drive(&self, rounds: u64) -> Result<()> {
        let Workload { warmup, duration, .. } = self.bench.plan.workload;
        for one in (0..rounds).flat_map(|_| &self.managed) {
            one.speed(warmup, duration)?;
        }
        Ok(())
    }

    /// Each in turn with the same server without Strata, in short windows: the
    /// machine's speed is another one minutes later. The mean of each side.
    fn speeds(&self) -> Result<Vec<Speeds>> {
        let duration = self.bench.plan.workload.duration / WINDOWS;
        let pairs = self.managed.iter().zip(&self.plain);
        let speeds = pairs.map(|(one, plain)| {
            let mut sums = Speeds { managed: 0.0, plain: 0.0 };
            for window in 0..WINDOWS {
                // Who comes first takes turns, too.
                if window % 2 == 0 {
                    sums.plain += plain.speed(WINDOW_WARMUP, duration)?;
                    sums.managed += one.speed(WINDOW_WARMUP, duration)?;
                } else {
                    sums.managed += one.speed(WINDOW_WARMUP, duration)?;
                    sums.plain += plain.speed(WINDOW_WARMUP, duration)?;
                }
            }
            let windows = f64::from(WINDOWS);
            Ok(Speeds { managed: sums.managed / windows, plain: sums.plain / windows })
        });
        speeds.collect()
    }

    fn share_out(
        &self,
        strata: &Strata,
        total: u64,
        sum: &mut Series,
    ) -> Result<serde_json::Value> {
        for one in &self.managed {
            one.set(strata, total / self.managed.len() as u64)?;
            strata.advice(&one.name)?;
        }
        self.drive(SETTLING_ROUNDS)?;
        for one in &self.managed {
            one.speed(self.bench.plan.workload.warmup, watch_time(self.bench))?;
        }
        let equal = self.speeds()?;
        // The daemon's keeper is a tenant, too, that keeps its budget.
        let kept: u64 = 64 << 20;
        let argument = format!("{} bytes", total + kept);
        let shares = strata.ask(&["advise", "--all", "--total", &argument, "--apply", "--json"])?;
        self.drive(SETTLING_ROUNDS)?;
        let advised = self.speeds()?;
        sum.left.samples.push(lost(&advised));
        if let Some(right) = &mut sum.right {
            right.samples.push(lost(&equal));
        }
        let state = |one: &Driven| strata.advice(&one.name).map(|advice| advice.state);
        let states = self.managed.iter().map(state).collect::<Result<Vec<AdviceState>>>()?;
        Ok(json!({
            "total_bytes": total, "equal": equal, "advised": advised, "states": states,
            "shares": serde_json::from_str::<serde_json::Value>(&shares)?,
        }))
    }
}
