//! The file tier: what a fault on it costs beside a bare read of the same device,
//! and how fast a program goes in order through four times its DRAM, beside kernel
//! swap on the same device.

use super::{
    Bench,
    parts::{output_of, pinned, subject, watch},
    report::{PartResults, Series, Side},
};
use crate::{
    alloc::TouchResult,
    cgroup::Group,
    interrupt,
    progress::Progress,
    redis::server::Wrapping,
    strata::Strata,
    swap_file::{self, SwapFile},
};
use anyhow::{Context, Result, bail};
use std::path::Path;
use strata_api::Stats;

/// Of the memory that is read at random, so much is DRAM: nearly every page has to
/// come from the file.
const RANDOM_PART: u64 = 8;
/// Of the memory that is read in order.
const ORDER_PART: u64 = 4;

/// What one side of a pair saw.
struct Seen {
    result: TouchResult,
    stats: Option<Stats>,
}

/// All of the part.
pub(super) fn tiers(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let mut changes = Vec::new();
    let directory = swap_file::directory(&bench.janitor, "tier", &mut changes)?;
    results.text = format!("\nDevice: {}.\n", swap_file::device());
    let outcome = random(bench, &directory, results)
        .and_then(|()| in_order(bench, &directory, "records", results))
        .and_then(|()| in_order(bench, &directory, "noise", results));
    outcome.and(swap_file::undo_all(&mut changes))
}

const fn size_bytes(bench: &Bench) -> u64 {
    if bench.quick { 128 << 20 } else { 512 << 20 }
}

fn touch_arguments<'a>(size: &'a str, seconds: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["touch", "--size", size, "--seconds", seconds], more].concat()
}

fn random(bench: &Bench, directory: &Path, results: &mut PartResults) -> Result<()> {
    let size_bytes = size_bytes(bench);
    let (size, seconds) = (format!("{size_bytes} bytes"), if bench.quick { "2" } else { "10" });
    let (mut p50, mut bare_p50) = (Side::new("Strata"), Side::new("4 KiB with O_DIRECT"));
    let (mut p99, mut bare_p99) = (p50.clone(), bare_p50.clone());
    let arguments = touch_arguments(&size, seconds, &["--noise"]);
    let place = directory.to_str().context("a path of our own making")?;
    let bare = ["direct-read", "--directory", place, "--size", &size, "--seconds", seconds];
    let progress = Progress::start("tiers: random faults");
    for repetition in bench.repetitions() {
        let mut strata_turn = || -> Result<()> {
            interrupt::check()?;
            let seen = under_strata(bench, directory, &arguments, size_bytes / RANDOM_PART)?;
            if seen.result.misses == 0 {
                bail!("nothing was evicted");
            }
            p50.samples.push(seen.result.miss_p50_us);
            p99.samples.push(seen.result.miss_p99_us);
            results.raw.push(serde_json::json!({ "random": seen.result, "stats": seen.stats }));
            Ok(())
        };
        if repetition % 2 == 0 {
            strata_turn()?;
        }
        interrupt::check()?;
        let child = pinned(bench, subject(&Wrapping::default(), &bare)?)?;
        let read = read(&output_of(child)?)?;
        bare_p50.samples.push(read.miss_p50_us);
        bare_p99.samples.push(read.miss_p99_us);
        if repetition % 2 != 0 {
            strata_turn()?;
        }
        results.raw.push(serde_json::json!({ "direct": read }));
    }
    progress.finish("tiers: random faults");
    for (name, left, right) in [("p50", p50, bare_p50), ("p99", p99, bare_p99)] {
        results.series.push(Series {
            name: format!("random fault on the file tier, {name}"),
            unit: "µs".to_owned(),
            left,
            right: Some(right),
        });
    }
    Ok(())
}

fn in_order(
    bench: &Bench,
    directory: &Path,
    content: &str,
    results: &mut PartResults,
) -> Result<()> {
    let size_bytes = size_bytes(bench);
    let (size, seconds) = (format!("{size_bytes} bytes"), if bench.quick { "3" } else { "20" });
    let more: &[&str] =
        if content == "noise" { &["--in-order", "--noise"] } else { &["--in-order"] };
    let arguments = touch_arguments(&size, seconds, more);
    let dram_bytes = size_bytes / ORDER_PART;
    let (mut strata, mut swap) = (Side::new("Strata"), Side::new("kernel swap"));
    let what = format!("tiers: in order, {content}");
    let progress = Progress::start(&what);
    for repetition in bench.repetitions() {
        for turn in 0..2 {
            interrupt::check()?;
            let (seen, side) = if (repetition + turn) % 2 == 0 {
                (under_strata(bench, directory, &arguments, dram_bytes)?, &mut strata)
            } else {
                (under_swap(bench, &arguments, dram_bytes, size_bytes)?, &mut swap)
            };
            side.samples.push(seen.result.pages_per_second);
            let name = side.name.clone();
            results.raw.push(serde_json::json!({
                "in order": content, "under": name, "seen": seen.result, "stats": seen.stats,
            }));
        }
    }
    progress.finish(&what);
    results.series.push(Series {
        name: format!("in order through {ORDER_PART} times the DRAM, {content}"),
        unit: "pages/s".to_owned(),
        left: strata,
        right: Some(swap),
    });
    Ok(())
}

fn read(text: &str) -> Result<TouchResult> {
    serde_json::from_str(text).context("read what a program printed")
}

fn under_strata(
    bench: &Bench,
    directory: &Path,
    arguments: &[&str],
    dram_bytes: u64,
) -> Result<Seen> {
    let tier = format!("tier_path = {directory:?}\n");
    let strata = Strata::start_with(&bench.janitor, &bench.plan.binaries, &[], Some(&tier))?;
    let name = format!("tiers-{}", std::process::id());
    let child = pinned(bench, subject(&strata.wrapping(&name, dram_bytes), arguments)?)?;
    let (text, stats) = watch(&strata, &name, child)?;
    strata.stop()?;
    Ok(Seen { result: read(&text)?, stats: Some(stats) })
}

fn under_swap(bench: &Bench, arguments: &[&str], dram_bytes: u64, size_bytes: u64) -> Result<Seen> {
    let swap = SwapFile::start(&bench.janitor, size_bytes * 2).context("swap")?;
    let name = format!("strata-lab-{}", std::process::id());
    let group = Group::create(&bench.janitor, &name, dram_bytes, false)?;
    let wrapping = Wrapping { prefix: group.wrapping(), environment: Vec::new() };
    let child = pinned(bench, subject(&wrapping, arguments)?)?;
    let text = output_of(child);
    let kills = group.oom_kills();
    group.remove()?;
    swap.stop()?;
    if kills > 0 {
        bail!("the kernel killed the program for its limit");
    }
    Ok(Seen { result: read(&text?)?, stats: None })
}
