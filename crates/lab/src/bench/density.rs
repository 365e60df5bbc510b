//! How many guests fit into a given DRAM: each has a Redis with data of its own, all of
//! them are asked at a fixed rate, none is idle. Each window of load is answered by as
//! many guests with all their DRAM, by the same under Strata in a part of it, and by the
//! same under the kernel in as much. What has no room is on the same disk: in Strata's file
//! tier, and on the kernel's swap.

use super::{
    Bench,
    report::{PartResults, Series, Side},
};
use crate::{
    cgroup::Group,
    guest::{
        machine::{Guest, Shape, Under},
        site::Site,
        words::{Drive, Order, Served},
    },
    interrupt,
    progress::Progress,
    strata::Strata,
    swap_file::{self, SwapFile},
};
use anyhow::{Context, Result};
use std::{process, time::Duration};
use strata_api::Stats;

/// Guests, and how many of them the DRAM that all share would hold whole.
const GUESTS: u64 = 4;
const WHOLE: u64 = 1;
/// What each was promised, and QEMU's own beside it.
const MEMORY_MIB: u64 = 448;
const OWN_MIB: u64 = 48;
const DRAM_MIB: u64 = WHOLE * (MEMORY_MIB + OWN_MIB);
/// About 200 MiB in each guest.
const RECORDS: u64 = 150_000;
/// Of each guest; emulated, they share two processors.
const PER_SECOND: u64 = 40;
const WINDOW_SECONDS: u64 = 8;
const PATIENCE: Duration = Duration::from_secs(300);
const ACCELERATOR: &str = "tcg,thread=single,tb-size=16";

#[derive(Clone, Copy, PartialEq, Debug)]
enum With {
    AllDram,
    Strata,
    Swap,
}

/// All three, window by window.
pub(super) fn density(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let site = Site::find(&bench.plan.binaries)?;
    let windows = if bench.quick { 1 } else { bench.repetitions as u64 };
    let mut sides = Vec::new();
    for (with, name) in
        [(With::AllDram, "all DRAM"), (With::Strata, "Strata"), (With::Swap, "kernel swap")]
    {
        interrupt::check()?;
        let samples = fleet(bench, &site, with, name, windows, results)?;
        sides.push(Side { name: name.to_owned(), samples });
    }
    let all = sides.remove(0);
    for side in sides.into_iter().filter(|side| !side.samples.is_empty()) {
        results.series.push(Series {
            name: format!("{GUESTS} guests in the DRAM of {WHOLE}, answers in time"),
            unit: "a window".to_owned(),
            left: side,
            right: Some(all.clone()),
        });
    }
    Ok(())
}

/// Answers in time of all guests together, in each window.
fn fleet(
    bench: &Bench,
    site: &Site,
    with: With,
    name: &str,
    windows: u64,
    results: &mut PartResults,
) -> Result<Vec<f64>> {
    let what = format!("density: {GUESTS} guests, {name}");
    let progress = Progress::start(&what);
    let mut changes = Vec::new();
    let strata = match with {
        With::Strata => {
            let tier = swap_file::directory(&bench.janitor, "tier", &mut changes)?;
            let lines = format!("dram = \"{DRAM_MIB}MiB\"\ntier_path = {tier:?}\n");
            Some(Strata::start_with(&bench.janitor, &bench.plan.binaries, &[], Some(&lines))?)
        }
        With::AllDram | With::Swap => None,
    };
    let limited = match with {
        With::Swap => {
            let swap = SwapFile::start(&bench.janitor, (GUESTS * MEMORY_MIB) << 20)?;
            let group = format!("strata-density-{}", process::id());
            Some((Group::create(&bench.janitor, &group, DRAM_MIB << 20, false)?, swap))
        }
        With::AllDram | With::Strata => None,
    };
    let under = match (&strata, &limited) {
        (Some(strata), _) => Under::Strata(strata, &[]),
        (None, Some((group, _))) => Under::Group(group),
        (None, None) => Under::Nothing,
    };
    let seen = asked(bench, site, under, &progress, (name, windows), results);
    let killed = limited.as_ref().map_or(0, |(group, _)| group.oom_kills());
    if let Some((group, swap)) = limited {
        group.remove()?;
        swap.stop()?;
    }
    strata.map_or(Ok(()), Strata::stop)?;
    swap_file::undo_all(&mut changes)?;
    progress.finish(&what);
    if seen.is_err() && killed > 0 {
        let line = format!("\n{name}: the kernel's OOM killer ended {killed} of the guests.\n\n");
        results.text.push_str(&line);
        return Ok(Vec::new());
    }
    seen
}

/// The same of guests that are started for it, and ended.
fn asked(
    bench: &Bench,
    site: &Site,
    under: Under<'_>,
    progress: &Progress,
    (name, windows): (&str, u64),
    results: &mut PartResults,
) -> Result<Vec<f64>> {
    let mut guests = Vec::new();
    for number in 0..GUESTS {
        let shape = Shape::new(&name_of(number), MEMORY_MIB);
        guests.push(Guest::start(&bench.janitor, site, &shape, ACCELERATOR, under)?);
    }
    guests.iter_mut().try_for_each(Guest::up)?;
    progress.set(0.3, "filling".to_owned());
    let redis = Order::Redis { name: "r".into(), records: RECORDS, under: None };
    let _: Vec<serde_json::Value> = together(&mut guests, |_| redis.clone())?;
    let mut in_time = Vec::new();
    // The first one warms up, and is not counted.
    for window in 0..=windows {
        interrupt::check()?;
        progress.set(0.5 + 0.4 * window as f64 / windows as f64, format!("window {window}"));
        let load = |number: u64| {
            Order::Drive(Drive {
                name: "r".into(),
                pattern: "gaussian".into(),
                reads: 0.9,
                per_second: PER_SECOND,
                seconds: WINDOW_SECONDS,
                seed: window * GUESTS + number,
            })
        };
        let seen: Vec<Served> = together(&mut guests, load)?;
        let sum = |of: fn(&Served) -> u64| seen.iter().map(of).sum::<u64>();
        let (answered, late, due) =
            (sum(|one| one.answered), sum(|one| one.late), sum(|one| one.due));
        if window > 0 {
            in_time.push((answered - late) as f64);
        }
        let tenants = match under {
            Under::Strata(strata, _) => {
                (0..GUESTS).map(|number| strata.stats(&name_of(number))).collect()
            }
            _ => Ok(Vec::new()),
        };
        let tenants: Vec<Stats> = tenants?;
        results.raw.push(serde_json::json!({
            "with": name, "window": window, "due": due, "answered": answered, "late": late,
            "tenants": tenants, "guests": seen,
        }));
    }
    let _: Vec<serde_json::Value> = together(&mut guests, |_| Order::Verify { name: "r".into() })?;
    guests.into_iter().try_for_each(Guest::end)?;
    Ok(in_time)
}

fn name_of(number: u64) -> String {
    format!("density-{number}")
}

/// Tells each of them, and hears all.
fn together<T: serde::de::DeserializeOwned>(
    guests: &mut [Guest],
    order: impl Fn(u64) -> Order,
) -> Result<Vec<T>> {
    for (number, guest) in (0..).zip(&mut *guests) {
        guest.tell(&order(number))?;
    }
    let heard = guests.iter_mut().map(|guest| guest.hear(PATIENCE));
    heard.collect::<Result<_>>().context("guests at once")
}
