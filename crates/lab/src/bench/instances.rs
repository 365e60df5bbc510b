//! How many Redis instances fit into a guest's DRAM. A guest gets one more and one more,
//! all of them are asked at a fixed rate at the same time, and the last number counts at
//! which all of them together lose less than a fixed part: answers that come too late, or
//! not at all. Plain; with the kernel's swap on the NVDIMM; and with Strata inside, its
//! file tier there.

use super::{
    Bench, inside,
    report::{PartResults, Series, Side},
};
use crate::{
    guest::{
        machine::{Guest, Silent, Under},
        site::Site,
        words::{Drive, Order, Served},
    },
    interrupt,
    progress::Progress,
};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MEMORY_MIB: u64 = 384;
const NVDIMM_MIB: u64 = 512;
/// About 27 MiB in Redis.
const RECORDS: u64 = 20_000;
/// Of each instance.
/// Few, so that it is DRAM that is short, and not the emulated processors.
const PER_SECOND: u64 = 20;
/// Of what is due, by all together.
const LOSS: f64 = 0.05;
/// So many fit without a question, or something else is wrong; and no more are tried.
const FIRST: u64 = 3;
const MOST: u64 = 14;
const WARM_SECONDS: u64 = 1;
const WINDOW_SECONDS: u64 = 3;
/// Who takes longer to be filled, or to answer, is not served: a guest that has no room
/// may read its programs from the disk again and again before its kernel ends one.
const PATIENCE: Duration = Duration::from_secs(60);
/// Left of what is available in the guest at first, for the kernel and for who asks.
const SLACK_MIB: u64 = 40;

#[derive(Clone, Copy, PartialEq, Debug)]
enum With {
    Nothing,
    Swap,
    Strata,
}

impl With {
    const ALL: [Self; 3] = [Self::Strata, Self::Nothing, Self::Swap];

    const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "plain",
            Self::Swap => "swap on the NVDIMM",
            Self::Strata => "Strata inside",
        }
    }
}

/// All three in turn; with the most instances each.
pub(super) fn instances(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let site = Site::that_manages(&bench.plan.binaries)?;
    let mut sides = With::ALL.map(|with| Side::new(with.name()));
    for repetition in bench.repetitions() {
        for (with, side) in With::ALL.into_iter().zip(&mut sides) {
            interrupt::check()?;
            let what = format!("instances, {}, repetition {repetition}", with.name());
            let progress = Progress::start(&what);
            let count = fitting(bench, &site, with, &progress, results)
                .with_context(|| with.name().to_owned())?;
            side.samples.push(count as f64);
            progress.finish(&format!("{what}: {count}"));
        }
    }
    let [strata, plain, swap] = sides;
    for rival in [plain, swap] {
        results.series.push(Series {
            name: "Redis instances in a guest".into(),
            unit: String::new(),
            left: strata.clone(),
            right: Some(rival),
        });
    }
    results.text = format!(
        "\nA guest of {MEMORY_MIB} MiB, emulated; instances with {RECORDS} records of 1 KiB (27 MiB), \
         each asked {PER_SECOND} times a second, Gaussian keys, nine reads in ten. An answer that \
         takes more than {} ms is lost; all together lose less than {LOSS} of what is due. At most \
         {MOST} are tried. Asked: 1.66 times the plain guest's. {}\n",
        crate::guest::words::LATE_MS,
        inside::TCG
    );
    Ok(())
}

/// Boots a guest and fills it.
fn fitting(
    bench: &Bench,
    site: &Site,
    with: With,
    progress: &Progress,
    results: &mut PartResults,
) -> Result<u64> {
    let shape = inside::shape("instances", MEMORY_MIB, NVDIMM_MIB);
    let mut guest =
        Guest::start(&bench.janitor, site, &shape, inside::ACCELERATOR, Under::Nothing)?;
    guest.up()?;
    match with {
        With::Nothing => {}
        With::Swap => {
            let line =
                "mkswap /dev/pmem0 && swapon /dev/pmem0 && echo 0 >/proc/sys/vm/page-cluster";
            inside::run(&mut guest, line)?;
        }
        With::Strata => {
            let free = inside::run(&mut guest, "awk '/MemAvailable/ {print $2}' /proc/meminfo")?;
            let free_mib = free.trim().parse::<u64>().context("read MemAvailable")? >> 10;
            let lines = format!("dram = \"{}MiB\"\n", free_mib.saturating_sub(SLACK_MIB));
            inside::strata(&mut guest, &lines)?;
        }
    }
    let mut fitting = 0;
    for count in 1..=MOST {
        interrupt::check()?;
        progress.set(count as f64 / MOST as f64, format!("{count} instances"));
        let began = Instant::now();
        let asked = with_one_more(&mut guest, with, count);
        let (loss, outcome) = match &asked {
            Ok(served) => (loss(served), Value::Null),
            Err(error) => (1.0, json!(format!("{error:#}"))),
        };
        results.raw.push(json!({
            "with": with.name(), "instances": count, "loss": loss, "failed": outcome,
            "served": asked.as_ref().ok(), "seconds": began.elapsed().as_secs_f64(),
        }));
        if let Err(error) = asked {
            // Whoever has no room is ended by the guest's kernel, or does not answer; nothing
            // else may fail.
            let no_room = error.is::<Silent>() || killed_some(&mut guest)?;
            let is_that = no_room && count > FIRST && !inside::is_wrong(&error);
            return if is_that { Ok(fitting) } else { Err(error) };
        }
        if loss >= LOSS {
            break;
        }
        fitting = count;
    }
    for number in 1..=fitting {
        let _: Value = guest.ask(&Order::Verify { name: name(number) }, inside::PATIENCE)?;
    }
    guest.end()?;
    Ok(fitting)
}

fn name(number: u64) -> String {
    format!("r{number}")
}

/// Starts and fills one more, and asks all of them.
fn with_one_more(guest: &mut Guest, with: With, count: u64) -> Result<Vec<Served>> {
    let under = (with == With::Strata).then(Vec::new);
    let redis = Order::Redis { name: name(count), records: RECORDS, under };
    let _: Value = guest.ask(&redis, PATIENCE)?;
    if count < FIRST {
        return Ok(Vec::new());
    }
    let mut ask = |seconds, salt| {
        let load = |number| Drive {
            name: name(number),
            pattern: "gaussian".into(),
            reads: 0.9,
            per_second: PER_SECOND,
            seconds,
            seed: salt * MOST + number,
        };
        let order = Order::DriveAll { loads: (1..=count).map(load).collect() };
        guest.ask::<Vec<Served>>(&order, PATIENCE)
    };
    ask(WARM_SECONDS, 2 * count)?;
    ask(WINDOW_SECONDS, 2 * count + 1)
}

/// Part of what was due that did not come in time.
fn loss(served: &[Served]) -> f64 {
    let due: u64 = served.iter().map(|one| one.due).sum();
    let in_time: u64 = served.iter().map(|one| one.answered - one.late).sum();
    if due == 0 { 0.0 } else { 1.0 - in_time as f64 / due as f64 }
}

fn killed_some(guest: &mut Guest) -> Result<bool> {
    let said = inside::run(guest, "awk '/^oom_kill / {print $2}' /proc/vmstat")?;
    match said.trim().parse::<u64>() {
        Ok(count) => Ok(count > 0),
        Err(_) => bail!("the guest's kernel does not say whom it killed: {said:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_late_and_what_never_came_is_lost() {
        let served = |due, answered, late| Served {
            due,
            answered,
            per_second: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            late,
        };
        assert!(loss(&[]).abs() < 1e-9);
        assert!(loss(&[served(100, 100, 0), served(100, 100, 0)]).abs() < 1e-9);
        let lost = loss(&[served(100, 90, 0), served(100, 100, 30)]);
        assert!((lost - 0.2).abs() < 1e-9, "{lost}");
    }
}
