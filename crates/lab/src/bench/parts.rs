//! What the bench measures, part by part. Both sides of a pair run right after
//! each other in every repetition, and which goes first alternates.

use super::{
    Bench,
    report::{PartResults, Series, Side},
};
use crate::{
    alloc::{AllocResult, TouchResult, monotonic_ns},
    bare::BareResult,
    interrupt, process,
    redis::server::Wrapping,
    strata::Strata,
};
use anyhow::{Context, Result, bail};
use std::{
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};
use strata_api::Stats;

/// A budget that a program is far from: nothing is ever registered.
const PLENTY_BYTES: u64 = 8 << 30;
/// Until a program has begun to fill its memory, which takes longer.
const START_PAUSE: Duration = Duration::from_millis(200);

/// A command of this program, perhaps wrapped in `strata run`.
pub(super) fn subject(wrapping: &Wrapping, arguments: &[&str]) -> Result<Child> {
    let this = std::env::current_exe().context("find this program")?;
    let mut command = wrapping.command([this]);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", command.get_program().display()))
}

pub(super) fn output_of(child: Child) -> Result<String> {
    let output = child.wait_with_output().context("wait for a program")?;
    if !output.status.success() {
        bail!("the measured program failed ({})", output.status);
    }
    String::from_utf8(output.stdout).context("read what a program printed")
}

/// A program to the server's core, once it has begun to fill its memory: with whatever
/// helps it inside.
pub(super) fn pinned(bench: &Bench, child: Child) -> Result<Child> {
    thread::sleep(START_PAUSE);
    if let Some(core) = bench.plan.server_core {
        process::pin_process(child.id(), core)?;
    }
    Ok(child)
}

/// Waits for a tenant's program to end; what it printed, and the newest
/// statistics of its tenant before it ended.
pub(super) fn watch(strata: &Strata, name: &str, mut child: Child) -> Result<(String, Stats)> {
    let mut stats = None;
    while child.try_wait().context("look at a program")?.is_none() {
        if let Ok(newest) = strata.stats(name) {
            stats = Some(newest);
        }
        thread::sleep(Duration::from_millis(100));
    }
    let text = output_of(child)?;
    Ok((text, stats.context("the tenant never had statistics")?))
}

/// Fresh memory: in a program near its budget, in one far from it, and natively;
/// taken and touched at full speed, and touched some time after it was taken.
pub(super) fn alloc(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let mut strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
    strata.keep(&bench.janitor)?;
    // At full speed a new mapping may be full before Strata has seen it; after
    // this pause it is registered.
    for (how, settle_ms) in [("at full speed", "0"), ("taken ahead", "400")] {
        alloc_in_turn(bench, &strata, how, settle_ms, results)?;
    }
    strata.stop()
}

fn alloc_in_turn(
    bench: &Bench,
    strata: &Strata,
    how: &str,
    settle_ms: &str,
    results: &mut PartResults,
) -> Result<()> {
    let (size, held_bytes) =
        if bench.quick { ("128MiB", 128 << 20) } else { ("512MiB", 512 << 20) };
    let seconds = if bench.quick { "2" } else { "6" };
    let arguments = ["alloc", "--size", size, "--seconds", seconds, "--settle-ms", settle_ms];
    let sides =
        [("near", Some(held_bytes * 105 / 100)), ("far", Some(PLENTY_BYTES)), ("native", None)];
    let mut speeds = sides.map(|(name, _)| Side::new(name));
    let mut served = sides.map(|(name, _)| Side::new(name));
    for repetition in bench.repetitions() {
        for turn in 0..sides.len() {
            interrupt::check()?;
            let place = (repetition + turn) % sides.len();
            let (text, stats) = match sides[place].1 {
                Some(budget_bytes) => {
                    let name =
                        format!("alloc-{}-{settle_ms}-{repetition}-{turn}", std::process::id());
                    let child = subject(&strata.wrapping(&name, budget_bytes), &arguments)?;
                    let (text, stats) = watch(strata, &name, child)?;
                    (text, Some(stats))
                }
                None => (output_of(subject(&Wrapping::default(), &arguments)?)?, None),
            };
            let seen: AllocResult =
                serde_json::from_str(&text).context("read what alloc printed")?;
            let faults = stats.as_ref().map_or(0, |stats| stats.zero_faults_total);
            let touched_gib = seen.touched_bytes as f64 / f64::from(1 << 30);
            speeds[place].samples.push(seen.mebibytes_per_second);
            served[place].samples.push(faults as f64 / touched_gib);
            results.raw.push(serde_json::json!({ "alloc": seen, "stats": stats }));
        }
    }
    let [near, far, native] = speeds;
    let [served_near, served_far, _] = served;
    let series = |name: &str, unit: &str, left: &Side, right: &Side| Series {
        name: format!("{how}: {name}"),
        unit: unit.to_owned(),
        left: left.clone(),
        right: Some(right.clone()),
    };
    results.series.extend([
        series("near its budget", "MiB/s", &near, &native),
        series("far from it", "MiB/s", &far, &native),
        // Says whether the sides are what they are called. One fault may bring
        // in many pages.
        series("first-touch faults that Strata served", "/GiB", &served_near, &served_far),
    ]);
    Ok(())
}

/// Spawning a program until its `main`, with and without `strata run`.
pub(super) fn start(bench: &Bench, results: &mut PartResults) -> Result<()> {
    /// Starts per repetition: one is a few milliseconds.
    const STARTS: usize = 20;
    let mut strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
    strata.keep(&bench.janitor)?;
    let mut counter = 0;
    let mut milliseconds = |managed: bool| -> Result<f64> {
        counter += 1;
        let name = format!("start-{}-{counter}", std::process::id());
        let wrapping = if managed { strata.wrapping(&name, 1 << 30) } else { Wrapping::default() };
        let begin = monotonic_ns();
        let text = output_of(subject(&wrapping, &["now"])?)?;
        let main: i64 = text.trim().parse().context("read what now printed")?;
        Ok((main - begin) as f64 / 1e6)
    };
    let (mut managed, mut native) = (Side::new("strata run"), Side::new("native"));
    for _ in 0..bench.repetitions * STARTS {
        interrupt::check()?;
        managed.samples.push(milliseconds(true)?);
        native.samples.push(milliseconds(false)?);
    }
    strata.stop()?;
    let added = managed.samples.iter().zip(&native.samples).map(|(with, without)| with - without);
    let added = Side { name: "added".to_owned(), samples: added.collect() };
    let unit = "ms".to_owned();
    results.series = vec![
        Series { name: "start".into(), unit: unit.clone(), left: managed, right: Some(native) },
        Series { name: "strata run adds".into(), unit, left: added, right: None },
    ];
    Ok(())
}

/// Random reads of memory that is twice its budget: what a fault costs, and
/// what Strata itself costs per page and object.
pub(super) fn fault(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let mut strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
    strata.keep(&bench.janitor)?;
    let (size, budget_bytes) =
        if bench.quick { ("64MiB", 32 << 20) } else { ("512MiB", 256 << 20) };
    let seconds = if bench.quick { "2" } else { "8" };
    let mut sides = [
        ("fault p50, as the thread sees it", "µs", Side::new("Strata")),
        ("fault p99, as the thread sees it", "µs", Side::new("Strata")),
        ("fault p50, as the daemon sees it", "µs", Side::new("Strata")),
        ("fault p99, as the daemon sees it", "µs", Side::new("Strata")),
        ("pages read at random, half of them stored", "pages/s", Side::new("Strata")),
        ("all metadata, per managed page", "B", Side::new("Strata")),
        ("all metadata, per stored object", "B", Side::new("Strata")),
        ("original : compressed", "×", Side::new("Strata")),
    ];
    let mut bare = [Side::new("bare userfaultfd"), Side::new("bare userfaultfd")];
    for repetition in bench.repetitions() {
        interrupt::check()?;
        let child = subject(&Wrapping::default(), &["bare-fault", "--seconds", "2"])?;
        let least: BareResult =
            serde_json::from_str(&output_of(child)?).context("read what bare-fault printed")?;
        for (side, value) in bare.iter_mut().zip([least.p50_us, least.p99_us]) {
            side.samples.push(value);
        }
        let name = format!("touch-{}-{repetition}", std::process::id());
        let wrapping = strata.wrapping(&name, budget_bytes);
        let child = subject(&wrapping, &["touch", "--size", size, "--seconds", seconds])?;
        let (text, stats) = watch(&strata, &name, child)?;
        let seen: TouchResult = serde_json::from_str(&text).context("read what touch printed")?;
        if stats.faults_total == 0 || stats.stored_objects == 0 {
            bail!("no page was ever stored: the budget did not bind");
        }
        let values = [
            seen.miss_p50_us,
            seen.miss_p99_us,
            stats.fault_latency_us.p50,
            stats.fault_latency_us.p99,
            seen.pages_per_second,
            stats.metadata_bytes as f64 / stats.managed_pages.max(1) as f64,
            stats.metadata_bytes as f64 / stats.stored_objects as f64,
            stats.stored_bytes as f64 / stats.compressed_bytes.max(1) as f64,
        ];
        for ((_, _, side), value) in sides.iter_mut().zip(values) {
            side.samples.push(value);
        }
        results.raw.push(serde_json::to_value(&stats)?);
    }
    strata.stop()?;
    // The first two stand beside what the kernel alone needs for them.
    let mut bare = bare.into_iter();
    results.series = sides
        .into_iter()
        .map(|(name, unit, left)| Series {
            name: name.into(),
            unit: unit.into(),
            left,
            right: bare.next(),
        })
        .collect();
    Ok(())
}

/// A program that sleeps: what the daemon takes for it, near its budget and far from
/// it, beside a daemon without a tenant.
pub(super) fn rest(bench: &Bench, results: &mut PartResults) -> Result<()> {
    /// Until all is read, and packed that is to be.
    const SETTLING: Duration = Duration::from_secs(20);
    let (window, rest_seconds) =
        if bench.quick { (Duration::from_secs(2), "26") } else { (Duration::from_secs(10), "40") };
    let mut strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
    strata.keep(&bench.janitor)?;
    let percent = |strata: &Strata| -> f64 {
        let cpu_ns = || -> u64 {
            let times = strata.pids().into_iter().filter_map(process::times);
            times.map(|times| times.cpu_ns).sum()
        };
        let (before, began) = (cpu_ns(), Instant::now());
        thread::sleep(window);
        (cpu_ns() - before) as f64 / 1e7 / began.elapsed().as_secs_f64()
    };
    // How many at once, of 64 MiB each.
    let places = [
        ("budget exceeded by a third", 1, 48),
        ("budget used to nine tenths", 1, 74),
        ("sixteen of them", 16, 74),
        ("budget used by half", 1, 128),
        ("budget used to a tenth", 1, 640),
    ];
    let mut sides = places.map(|_| Side::new("daemon"));
    let mut alone = Side::new("no such tenant");
    for repetition in bench.repetitions() {
        interrupt::check()?;
        alone.samples.push(percent(&strata));
        for (place, &(_, count, budget_mib)) in places.iter().enumerate() {
            interrupt::check()?;
            let mut asleep = Vec::new();
            for number in 0..count {
                let name = format!("rest-{}-{repetition}-{place}-{number}", std::process::id());
                let wrapping = strata.wrapping(&name, budget_mib << 20);
                let arguments =
                    ["touch", "--size", "64MiB", "--seconds", "1", "--rest-seconds", rest_seconds];
                asleep.push((name, subject(&wrapping, &arguments)?));
            }
            thread::sleep(SETTLING);
            sides[place].samples.push(percent(&strata));
            for (name, _) in &asleep {
                results.raw.push(serde_json::to_value(strata.stats(name)?)?);
            }
            for (_, child) in asleep {
                output_of(child)?;
            }
        }
    }
    strata.stop()?;
    results.series = places
        .iter()
        .zip(sides)
        .map(|((place, ..), left)| Series {
            name: format!("asleep, {place}"),
            unit: "% of a core".into(),
            left,
            right: Some(alone.clone()),
        })
        .collect();
    Ok(())
}
