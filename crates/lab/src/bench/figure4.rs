//! The published figure of MariaDB in a guest with the memory manager underneath it, on
//! the host: DRAM for 100, 25 and 12.5 % of the guest's memory, a small and a large
//! database, against the same guest with all DRAM. A guest under Strata and a plain one
//! are asked in turn. Beside it what is better than without: a guest that is promised
//! twice the DRAM that it has, against a plain one whose memory is that DRAM.

use super::{
    Bench,
    report::{PartResults, Series, Side},
};
use crate::{
    guest::{
        machine::{Guest, Shape, Under},
        site::Site,
        words::{Order, Sysbench, Transactions},
    },
    interrupt,
    janitor::Registered,
    process,
    progress::Progress,
    statistics::spread,
    strata::{Strata, comes_within, total_bytes},
    swap_file,
    table::{Table, mebibytes, three_digits},
};
use anyhow::{Result, bail};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::time::Duration;
use strata_api::Stats;

/// One processor each: the host's other one is left to what answers faults.
const ACCELERATOR: &str = "tcg,thread=single,tb-size=64";
/// What emulation takes beside the guest's memory, in the plain guest as well: QEMU's
/// buffer of translated code, and a little of its own. It is in every budget.
const OWN_MIB: u64 = 72;
const PATIENCE: Duration = Duration::from_secs(300);
/// sysbench's distributions of rows: of the figure, and of what is promised twice. Where
/// a plain guest's pool holds all that is asked for, as with Gaussian rows, more memory is
/// of no use: "special", its default, and "uniform" ask for other rows as well.
const FIGURE: &str = "gaussian";
const WIDER: [&str; 2] = ["special", "uniform"];
const WINDOW_SECONDS: u64 = 3;
/// The one under Strata, and beside it.
const GUESTS: [&str; 2] = ["figure4-managed", "figure4-plain"];

/// What all guests have in memory, but for the one whose memory is another's DRAM.
const MEMORY_MIB: u64 = 1024;
/// Part of that in DRAM, in thousandths.
const SHARES: [u64; 3] = [1000, 250, 125];
const SMALL: Database = Database { name: "small", pool_mib: |_| 64, warm_seconds: 6, asked: 0.92 };
const LARGE: Database = Database {
    name: "large",
    pool_mib: |memory_mib| memory_mib * 3 / 5,
    warm_seconds: 32,
    asked: 0.97,
};
/// Of a plain guest's, what is asked of one that is promised twice its DRAM.
const PROMISED: f64 = 1.05;
const HALF_MIB: u64 = MEMORY_MIB / 2;

/// A database of the disk.
#[derive(Clone, Copy)]
struct Database {
    name: &'static str,
    /// InnoDB's buffer pool in a guest of that memory.
    pool_mib: fn(u64) -> u64,
    /// Not counted: until what is asked for has been asked for once, after a budget has
    /// changed.
    warm_seconds: u64,
    /// Of all DRAM's throughput, at a quarter.
    asked: f64,
}

/// Both databases in all shares, then what is promised twice.
pub(super) fn figure4(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let site = Site::find(&bench.plan.binaries)?;
    let mut table = Table::new(&[
        "",
        "DRAM, MiB",
        "compressed",
        "in the file",
        "faults a transaction",
        "fault p50, µs",
        "p95, ms",
        "plain",
        "QEMU's processor time a transaction, ms",
        "plain",
        "Strata's",
    ]);
    for database in [SMALL, LARGE] {
        let mut pair = Pair::start(bench, &site, database, [MEMORY_MIB; 2], MEMORY_MIB)?;
        for share in SHARES {
            let name = format!("{} database, {} % in DRAM", database.name, share as f64 / 10.0);
            let asked = (share == 250).then_some(database.asked);
            pair.settle(MEMORY_MIB * share / 1000)?;
            pair.compare(bench, (&name, FIGURE), asked, &mut table, results)?;
        }
        pair.end()?;
    }
    let mut pair = Pair::start(bench, &site, LARGE, [MEMORY_MIB, HALF_MIB], HALF_MIB)?;
    for distribution in WIDER {
        let name = format!("promised twice its DRAM, {distribution}");
        pair.compare(bench, (&name, distribution), Some(PROMISED), &mut table, results)?;
    }
    pair.end()?;
    results.text.push_str(&format!("\n{}\n{}\n", table.markdown(), said()));
    Ok(())
}

/// What was run, and what it says.
fn said() -> String {
    let pool = |database: Database, memory_mib| (database.pool_mib)(memory_mib);
    format!(
        "MariaDB and sysbench (`oltp_read_only`, {FIGURE} rows, two clients) in a guest of \
         {MEMORY_MIB} MiB with one processor, buffer pool {} MiB (small database) and {} (large), \
         under Strata with compressed memory and a file on {}; beside it a plain one, asked in \
         turn. DRAM is a part of the guest's memory, and {OWN_MIB} MiB for QEMU's own, which is \
         mostly translated code, and which the plain one has, too. Promised twice its DRAM: that \
         guest in DRAM for {HALF_MIB} MiB, beside a plain one of {HALF_MIB} MiB whose pool has {}. \
         At the beginning and at the end of each pair all rows of both guests were what was \
         written. The guests are emulated (TCG), and QEMU is the tenant: a transaction takes \
         many times what it takes on hardware, and what brings a page of the guest's back is not \
         emulated. So faults weigh less than under KVM, and ratios say that it works and what it \
         costs such guests, not what hardware would show.",
        pool(SMALL, MEMORY_MIB),
        pool(LARGE, MEMORY_MIB),
        swap_file::device(),
        pool(LARGE, HALF_MIB),
    )
}

/// A guest under Strata and a plain one, with the same database.
struct Pair {
    database: Database,
    guests: [Guest; 2],
    strata: Strata,
    changes: Vec<Registered>,
    progress: Progress,
}

impl Pair {
    /// With so much memory each, and a budget for the first; all rows are read.
    fn start(
        bench: &Bench,
        site: &Site,
        database: Database,
        memory_mib: [u64; 2],
        dram_mib: u64,
    ) -> Result<Self> {
        let progress = Progress::start(&format!("figure4: {} database", database.name));
        let mut changes = Vec::new();
        let tier = swap_file::directory(&bench.janitor, "tier", &mut changes)?;
        let lines = format!("tier_path = {tier:?}\n");
        let strata = Strata::start_with(&bench.janitor, &bench.plan.binaries, &[], Some(&lines))?;
        let words = ["--dram".to_owned(), format!("{}MiB", dram_mib + OWN_MIB)];
        let start = |place: usize, under: Under<'_>| {
            let shape = Shape::new(GUESTS[place], memory_mib[place]);
            Guest::start(&bench.janitor, site, &shape, ACCELERATOR, under)
        };
        let guests = [start(0, Under::Strata(&strata, &words))?, start(1, Under::Nothing)?];
        let mut pair = Self { database, guests, strata, changes, progress };
        pair.guests.iter_mut().try_for_each(Guest::up)?;
        pair.progress.part("reading all rows");
        for (guest, memory_mib) in pair.guests.iter_mut().zip(memory_mib) {
            guest.tell(&Order::Mariadb { pool_mebibytes: (database.pool_mib)(memory_mib) })?;
        }
        pair.guests.iter_mut().try_for_each(|guest| guest.hear::<()>(PATIENCE))?;
        pair.verify()?;
        Ok(pair)
    }

    /// All rows of both.
    fn verify(&mut self) -> Result<()> {
        self.both::<()>(&Order::Rows { database: self.database.name.into() })
    }

    /// Both at the same time, whatever they answer.
    fn both<T: DeserializeOwned>(&mut self, order: &Order) -> Result<()> {
        self.guests.iter_mut().try_for_each(|guest| guest.tell(order))?;
        self.guests.iter_mut().try_for_each(|guest| guest.hear::<T>(PATIENCE).map(drop))
    }

    fn stats(&self) -> Result<Stats> {
        self.strata.stats(GUESTS[0])
    }

    /// Gives the first DRAM for so much of its memory, and waits until it is within that.
    fn settle(&self, dram_mib: u64) -> Result<()> {
        let mebibytes = dram_mib + OWN_MIB;
        self.strata.ask(&["set", GUESTS[0], "--dram", &format!("{mebibytes}MiB")])?;
        if !comes_within(mebibytes << 20, || self.stats())? {
            bail!("it takes more DRAM than {mebibytes} MiB: {:?}", self.stats()?);
        }
        Ok(())
    }

    fn order(&self, distribution: &str, seconds: u64, seed: u64) -> Order {
        Order::Sysbench(Sysbench {
            database: self.database.name.into(),
            distribution: distribution.into(),
            seconds,
            seed,
        })
    }

    /// Processor time of one's QEMU, and of Strata.
    fn spent_ms(&self, place: usize) -> [f64; 2] {
        [self.guests[place].pids(), self.strata.pids()].map(|pids| {
            let times = pids.into_iter().filter_map(process::times);
            times.map(|times| times.cpu_ns as f64 / 1e6).sum()
        })
    }

    /// Windows of load on both in turn; what the first had to bring in meanwhile.
    fn compare(
        &mut self,
        bench: &Bench,
        (name, distribution): (&str, &str),
        asked: Option<f64>,
        table: &mut Table,
        results: &mut PartResults,
    ) -> Result<()> {
        let warm_seconds = if bench.quick { 2 } else { self.database.warm_seconds };
        let warm = self.order(distribution, warm_seconds, 1);
        self.both::<Transactions>(&warm)?;
        let mut seen: [Vec<Transactions>; 2] = Default::default();
        let mut spent_ms = [[0.0; 2]; 2];
        let before = self.stats()?;
        let windows = if bench.quick { 1 } else { bench.repetitions };
        for window in 0..windows {
            interrupt::check()?;
            self.progress.set(window as f64 / windows as f64, name.to_owned());
            // Who goes first alternates.
            for turn in 0..GUESTS.len() {
                let place = (turn + window) % GUESTS.len();
                let order = self.order(distribution, WINDOW_SECONDS, window as u64 + 2);
                let began = self.spent_ms(place);
                seen[place].push(self.guests[place].ask(&order, PATIENCE)?);
                let ended = self.spent_ms(place);
                for (spent, (ended, began)) in
                    spent_ms[place].iter_mut().zip(ended.into_iter().zip(began))
                {
                    *spent += ended - began;
                }
            }
        }
        let stats = self.stats()?;
        let side = |name: &str, seen: &[Transactions]| Side {
            name: name.to_owned(),
            samples: seen.iter().map(|one| one.per_second).collect(),
        };
        results.series.push(Series {
            name: asked.map_or_else(|| name.to_owned(), |asked| format!("{name} (asked: {asked})")),
            unit: "transactions/s".into(),
            left: side("Strata", &seen[0]),
            right: Some(side("plain", &seen[1])),
        });
        let count = |place: usize| seen[place].iter().map(|one| one.count).sum::<u64>() as f64;
        let faults = (stats.faults_total - before.faults_total) as f64;
        let p95 = |seen: &[Transactions]| {
            let all: Vec<f64> = seen.iter().map(|one| one.p95_ms).collect();
            spread(&all).map_or_else(|| "–".to_owned(), |spread| three_digits(spread.median))
        };
        table.row(vec![
            name.to_owned(),
            mebibytes(total_bytes(&stats)),
            mebibytes(stats.compressed_bytes),
            mebibytes(stats.file_bytes),
            three_digits(faults / count(0)),
            three_digits(stats.fault_latency_us.p50),
            p95(&seen[0]),
            p95(&seen[1]),
            three_digits(spent_ms[0][0] / count(0)),
            three_digits(spent_ms[1][0] / count(1)),
            three_digits(spent_ms[0][1] / count(0)),
        ]);
        results.raw.push(json!({
            "name": name, "strata": seen[0], "plain": seen[1], "before": before, "after": stats,
            "processor_ms": spent_ms,
        }));
        Ok(())
    }

    /// Every row is read once more.
    fn end(mut self) -> Result<()> {
        self.progress.part("reading all rows");
        self.verify()?;
        self.guests.into_iter().try_for_each(Guest::end)?;
        self.strata.stop()?;
        swap_file::undo_all(&mut self.changes)?;
        self.progress.finish(&format!("figure4: {} database", self.database.name));
        Ok(())
    }
}
