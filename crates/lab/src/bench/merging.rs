//! Pages that the kernel merges (KSM), with Strata and without: two equal programs, each of
//! them under a budget of 70 % of its memory, against the same two alone. How much stays
//! merged, how many evictions are refused, and what the tenants are said to be spared.

use super::{
    Bench,
    parts::output_of,
    report::{PartResults, Series, Side},
};
use crate::{
    interrupt,
    janitor::{Registered, Undo},
    redis::server::Wrapping,
    strata::Strata,
    subject::scratch,
};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use strata_api::Stats;

const KSM: &str = "/sys/kernel/mm/ksm";
/// Fast: what it takes to merge everything is not what is measured.
const SETTINGS: [(&str, &str); 3] =
    [("pages_to_scan", "20000"), ("sleep_millisecs", "5"), ("run", "1")];
/// Of each program, and what Strata leaves it.
const MEMORY_MIB: u64 = 128;
const BUDGET_PERCENT: u64 = 70;
const LOOK_EVERY: Duration = Duration::from_millis(250);
const SOURCE: &str = include_str!("../../programs/merged.c");

/// What was seen of two programs.
struct Seen {
    merged_pages: f64,
    rounds: f64,
    /// At the end; none without Strata.
    stats: Vec<Stats>,
}

/// Both sides in turn, as often as is asked for.
pub(super) fn merging(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let seconds = if bench.quick { 10 } else { 25 };
    let (directory, _files) = scratch(&bench.janitor, "merged")?;
    let program = built(&directory.join("merged"))?;
    let mut strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
    strata.keep(&bench.janitor)?;
    let _settings = switched_on(bench)?;
    let [mut with, mut without] = [Side::new("Strata"), Side::new("native")];
    let [mut fast, mut native] = [Side::new("Strata"), Side::new("native")];
    let [mut refused, mut spared] = [Side::new("Strata"), Side::new("Strata")];
    for repetition in bench.repetitions() {
        for turn in 0..2 {
            interrupt::check()?;
            // Who goes first alternates.
            let is_managed = (repetition + turn) % 2 == 0;
            let seen = two(&program, seconds, is_managed.then_some(&strata), repetition)?;
            let stats = &seen.stats;
            let sum = |of: fn(&Stats) -> u64| stats.iter().map(of).sum::<u64>() as f64;
            results.raw.push(serde_json::json!({
                "strata": is_managed, "merged_pages": seen.merged_pages,
                "rounds": seen.rounds, "stats": stats,
            }));
            if is_managed {
                with.samples.push(seen.merged_pages);
                fast.samples.push(seen.rounds);
                let evictions = sum(|stats| stats.evictions_total).max(1.0);
                let refusals = sum(|stats| stats.evictions_refused_total);
                refused.samples.push(100.0 * refusals / evictions);
                spared.samples.push(sum(|stats| stats.merged_saved_bytes) / f64::from(1 << 20));
            } else {
                without.samples.push(seen.merged_pages);
                native.samples.push(seen.rounds);
            }
        }
    }
    let alone = |name: &str, unit: &str, left| Series {
        name: name.to_owned(),
        unit: unit.to_owned(),
        left,
        right: None,
    };
    let beside = |name: &str, unit: &str, left, right| Series {
        right: Some(right),
        ..alone(name, unit, left)
    };
    results.series.extend([
        beside("pages merged, of both programs", "pages", with, without),
        beside("rounds through all memory, both programs", "rounds", fast, native),
        alone("evictions refused", "%", refused),
        alone("spared by merging, as both tenants are told", "MiB", spared),
    ]);
    strata.stop()
}

fn built(place: &Path) -> Result<PathBuf> {
    let source = place.with_extension("c");
    fs::write(&source, SOURCE).context("write a program's source")?;
    let status = Command::new("cc").arg("-O2").arg("-o").arg(place).arg(&source).status();
    match status.context("run cc")? {
        status if status.success() => Ok(place.to_owned()),
        status => bail!("cc cannot build the program ({status})"),
    }
}

/// Has the kernel merge, until the guards drop, in whatever way this one ends.
fn switched_on(bench: &Bench) -> Result<Vec<Registered>> {
    let mut undo = Vec::new();
    for (name, value) in SETTINGS {
        let path = Path::new(KSM).join(name);
        let before = fs::read_to_string(&path).context("this kernel has no KSM")?;
        let before = before.trim().to_owned();
        if name == "run" && before == "1" {
            bail!("KSM runs on this machine already: what it merges could not be told apart");
        }
        undo.push(bench.janitor.register(Undo::WriteBack { path: path.clone(), value: before })?);
        fs::write(&path, value).context("switch KSM on")?;
    }
    Ok(undo)
}

/// Pages of a process that are merged: of the machine's count others' guests are a part.
fn merged_pages(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/ksm_stat")).context("ask what is merged")?;
    let word = text.lines().find_map(|line| line.strip_prefix("ksm_merging_pages "));
    word.and_then(|word| word.trim().parse().ok()).context("read what is merged")
}

fn started(program: &Path, seconds: u64, wrapping: &Wrapping) -> Result<Child> {
    let mut command = wrapping.command([program]);
    command.args([MEMORY_MIB.to_string(), seconds.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("start a program")
}

/// Runs two of them to their end; of what is merged, the median of the last third.
fn two(program: &Path, seconds: u64, strata: Option<&Strata>, repetition: usize) -> Result<Seen> {
    let names = [0, 1].map(|one| format!("merged-{}-{repetition}-{one}", std::process::id()));
    let budget_bytes = (MEMORY_MIB << 20) * BUDGET_PERCENT / 100;
    let began = Instant::now();
    let mut children = Vec::new();
    for name in &names {
        let wrapping =
            strata.map_or_else(Wrapping::default, |strata| strata.wrapping(name, budget_bytes));
        children.push(started(program, seconds, &wrapping)?);
    }
    let (mut seen, mut stats) = (Vec::new(), Vec::new());
    // The last second is theirs: one of them ends first.
    while began.elapsed() + Duration::from_secs(1) < Duration::from_secs(seconds) {
        interrupt::check()?;
        thread::sleep(LOOK_EVERY);
        let merged = children.iter().map(|child| merged_pages(child.id()));
        seen.push(merged.sum::<Result<f64>>()?);
        if let Some(strata) = strata {
            stats = names.iter().map(|name| strata.stats(name)).collect::<Result<_>>()?;
        }
    }
    let mut rounds = 0.0;
    for child in children {
        let text = output_of(child)?;
        rounds += text.trim().parse::<f64>().context("read what a program printed")?;
    }
    let mut last = seen.split_off(seen.len() * 2 / 3);
    last.sort_by(f64::total_cmp);
    let merged_pages = last.get(last.len() / 2).copied().context("nothing was seen")?;
    Ok(Seen { merged_pages, rounds, stats })
}
