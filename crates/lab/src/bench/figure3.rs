//! The published figure of Redis in a guest with the memory manager inside of that guest:
//! DRAM for 100, 66, 33 and 0 % of the data and persistent memory below, reads, writes,
//! and both, against the same guest with all DRAM. Two servers with the same records, one
//! of them under Strata, are asked in turn. And the same on this machine itself, because
//! emulation makes a request dear and so hides what a fault costs.

use super::{
    Bench, inside,
    report::{PartResults, Series, Side},
};
use crate::{
    alloc::TouchResult,
    guest::{
        machine::{Guest, Under},
        paced,
        site::Site,
        words::{Drive, Order, Served},
    },
    interrupt,
    janitor::Registered,
    progress::Progress,
    random::mix,
    records::Records,
    redis::{
        expect::Expect,
        load::Client,
        server::{Server, Wrapping},
    },
    strata::{Strata, comes_within, total_bytes},
    swap_file,
    table::three_digits,
};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use strata_api::Stats;

const MEMORY_MIB: u64 = 1024;
const NVDIMM_MIB: u64 = 512;
/// How much, and for how long. A manager that sees a page's uses only while it is out of
/// DRAM has to miss each some times before it knows them: what is counted begins after
/// about ten requests a page.
#[derive(Clone, Copy)]
struct Extent {
    records: u64,
    /// Under Strata, after a budget has changed; not counted.
    warm_seconds: u64,
    window_seconds: u64,
}
/// About 54 MiB in Redis.
const IN_GUEST: Extent = Extent { records: 40_000, warm_seconds: 40, window_seconds: 2 };
/// About 107 MiB.
const ON_MACHINE: Extent = Extent { records: 80_000, warm_seconds: 8, window_seconds: 1 };
/// More than that.
const AMPLE_MIB: u64 = 384;
/// "None" is the least of these that it can be brought to; 4 MiB is the least that Strata
/// takes as a budget.
const LEAST_MIB: [u64; 4] = [4, 8, 12, 16];
/// Part of the data in DRAM, in per cent, and what of all DRAM's throughput is asked there.
const SHARES: [(u64, Option<f64>); 4] =
    [(100, None), (66, Some(0.96)), (33, Some(0.84)), (0, Some(0.80))];
/// Share of GETs.
const LOADS: [(&str, f64); 3] = [("GET", 1.0), ("SET", 0.0), ("1:1", 0.5)];
/// Beside all DRAM, and under Strata.
const SERVERS: [&str; 2] = ["plain", "managed"];

/// Two servers, one of them under a Strata with a file tier on memory.
trait Place {
    fn name(&self) -> &'static str;
    fn extent(&self) -> Extent;
    fn drive(&mut self, load: &Drive) -> Result<Served>;
    /// The budget of the one under Strata.
    fn set(&mut self, mebibytes: u64) -> Result<()>;
    fn stats(&mut self) -> Result<Stats>;
    fn verify(&mut self, server: &str) -> Result<()>;
}

/// In the guest, then here.
pub(super) fn figure3(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let site = Site::that_manages(&bench.plan.binaries)?;
    let progress = Progress::start("figure3: in a guest");
    let (mut guest, latency) = Inside::start(bench, &site)?;
    let mut least = vec![compared(bench, &mut guest, &progress, results)?];
    guest.0.end()?;
    progress.finish("figure3: in a guest");
    let progress = Progress::start("figure3: on this machine");
    let mut here = Here::start(bench)?;
    least.push(compared(bench, &mut here, &progress, results)?);
    here.end()?;
    progress.finish("figure3: on this machine");
    let us = |found: &TouchResult| three_digits(found.miss_p50_us);
    results.text.push_str(&format!(
        "\n{} records of 1 KiB in the guest, {} on this machine, Gaussian keys, two clients that each ask for one thing at a \
         time. DRAM is all that the server costs, Strata's own included; 0 %: in the guest {} MiB, \
         on this machine {}, the least that Strata could bring it to. Reading 4 KiB of a file on the \
         guest's NVDIMM takes {} µs (p50). On this machine the tier is a file in /dev/shm. {}\n",
        IN_GUEST.records,
        ON_MACHINE.records,
        least[0],
        least[1],
        us(&latency),
        inside::TCG
    ));
    results.raw.push(json!({ "direct_read_of_the_nvdimm": latency }));
    Ok(())
}

/// All shares, and at each both servers in turn; the last budget, in MiB.
fn compared(
    bench: &Bench,
    place: &mut dyn Place,
    progress: &Progress,
    results: &mut PartResults,
) -> Result<u64> {
    let (mut data_bytes, mut least_mib) = (0, 0);
    let Extent { warm_seconds, window_seconds, .. } = place.extent();
    for (step, (share, asked)) in SHARES.into_iter().enumerate() {
        let tried = match share {
            100 => vec![AMPLE_MIB],
            0 => LEAST_MIB.to_vec(),
            part => vec![(data_bytes * part / 100) >> 20],
        };
        let mut budget_mib = None;
        for mebibytes in tried {
            if budget_mib.is_none() && settled(place, mebibytes)? {
                budget_mib = Some(mebibytes);
            }
        }
        let budget_mib = budget_mib.with_context(|| format!("{share} %: it takes more DRAM"))?;
        let drive = |server: usize, reads, seconds, seed| Drive {
            name: SERVERS[server].into(),
            pattern: "gaussian".into(),
            reads,
            per_second: 0,
            seconds,
            seed,
        };
        if share != 100 {
            place.drive(&drive(1, 0.5, warm_seconds, 1))?;
        }
        let mut series = LOADS.map(|(load, _)| Series {
            name: format!(
                "{}, {share} % in DRAM, {load}{}",
                place.name(),
                asked.map_or_else(String::new, |asked| format!(" (asked: {asked})"))
            ),
            unit: "requests/s".into(),
            left: Side::new("Strata"),
            right: Some(Side::new("all DRAM")),
        });
        for repetition in 0..bench.repetitions {
            interrupt::check()?;
            let done = step as f64 + repetition as f64 / bench.repetitions as f64;
            progress.set(done / SHARES.len() as f64, format!("{share} % in DRAM"));
            for ((_, reads), series) in LOADS.iter().zip(&mut series) {
                // Who goes first alternates.
                for turn in 0..SERVERS.len() {
                    let server = (turn + repetition) % SERVERS.len();
                    let seed = (repetition + 2) as u64;
                    let seen = place.drive(&drive(server, *reads, window_seconds, seed))?;
                    let side = match (server, &mut series.right) {
                        (0, Some(plain)) => plain,
                        _ => &mut series.left,
                    };
                    side.samples.push(seen.per_second);
                }
            }
        }
        let stats = place.stats()?;
        if data_bytes == 0 {
            data_bytes = stats.resident_bytes + stats.unmanaged_bytes;
        }
        results.raw.push(json!({
            "place": place.name(), "share": share, "budget_mib": budget_mib,
            "data_bytes": data_bytes, "dram_bytes": total_bytes(&stats), "stats": stats,
        }));
        results.series.extend(series);
        least_mib = budget_mib;
    }
    SERVERS.into_iter().try_for_each(|server| place.verify(server))?;
    Ok(least_mib)
}

/// Gives it a budget; whether it is within that in the end.
fn settled(place: &mut dyn Place, mebibytes: u64) -> Result<bool> {
    place.set(mebibytes)?;
    comes_within(mebibytes << 20, || place.stats())
}

/// A guest.
struct Inside(Guest);

impl Inside {
    fn start(bench: &Bench, site: &Site) -> Result<(Self, TouchResult)> {
        let shape = inside::shape("figure3", MEMORY_MIB, NVDIMM_MIB);
        let mut guest =
            Guest::start(&bench.janitor, site, &shape, inside::ACCELERATOR, Under::Nothing)?;
        guest.up()?;
        inside::strata(&mut guest, "")?;
        let line = "strata-lab direct-read --directory /pmem --size 64MiB --seconds 2";
        let latency = serde_json::from_str(&inside::run(&mut guest, line)?)
            .context("read what direct-read printed")?;
        for server in SERVERS {
            let under = (server == SERVERS[1])
                .then(|| vec!["--dram".to_owned(), format!("{AMPLE_MIB}MiB")]);
            let order = Order::Redis { name: server.into(), records: IN_GUEST.records, under };
            let _: Value = guest.ask(&order, inside::PATIENCE)?;
        }
        Ok((Self(guest), latency))
    }
}

impl Place for Inside {
    fn name(&self) -> &'static str {
        "guest"
    }

    fn extent(&self) -> Extent {
        IN_GUEST
    }

    fn drive(&mut self, load: &Drive) -> Result<Served> {
        self.0.ask(&Order::Drive(load.clone()), inside::PATIENCE)
    }

    fn set(&mut self, mebibytes: u64) -> Result<()> {
        let line = format!("strata set {} --dram {mebibytes}MiB", SERVERS[1]);
        inside::run(&mut self.0, &line).map(drop)
    }

    fn stats(&mut self) -> Result<Stats> {
        let said = inside::run(&mut self.0, &format!("strata stats {} --json", SERVERS[1]))?;
        serde_json::from_str(&said).context("read what strata stats printed")
    }

    fn verify(&mut self, server: &str) -> Result<()> {
        let _: Value = self.0.ask(&Order::Verify { name: server.into() }, inside::PATIENCE)?;
        Ok(())
    }
}

/// This machine.
struct Here {
    servers: Vec<(Server, Expect)>,
    strata: Strata,
    changes: Vec<Registered>,
}

impl Here {
    fn start(bench: &Bench) -> Result<Self> {
        let mut changes = Vec::new();
        let tier = swap_file::directory_in(&bench.janitor, "/dev/shm", "tier", &mut changes)?;
        let lines = format!("tier_path = {tier:?}\ntier_order = [\"file\", \"compressed\"]\n");
        let strata = Strata::start_with(&bench.janitor, &bench.plan.binaries, &[], Some(&lines))?;
        let mut servers = Vec::new();
        for name in SERVERS {
            let wrapping = match name == SERVERS[1] {
                true => strata.wrapping(name, AMPLE_MIB << 20),
                false => Wrapping::default(),
            };
            let server = Server::start(&bench.janitor, name, &wrapping, bench.plan.server_core)?;
            let expect = Expect::new(Records::new(mix(1)), ON_MACHINE.records);
            client(&server).load(&expect, &mut |_| ()).context("fill Redis")?;
            servers.push((server, expect));
        }
        Ok(Self { servers, strata, changes })
    }

    fn of(&self, name: &str) -> Result<&(Server, Expect)> {
        let found = SERVERS.iter().position(|&known| known == name);
        found.and_then(|place| self.servers.get(place)).with_context(|| format!("no {name}"))
    }

    fn end(mut self) -> Result<()> {
        self.servers.into_iter().try_for_each(|(server, _)| server.stop())?;
        self.strata.stop()?;
        swap_file::undo_all(&mut self.changes)
    }
}

fn client(server: &Server) -> Client {
    Client { endpoint: server.endpoint().clone(), connections: 2, pipeline: 16, core: None }
}

impl Place for Here {
    fn name(&self) -> &'static str {
        "this machine"
    }

    fn extent(&self) -> Extent {
        ON_MACHINE
    }

    fn drive(&mut self, load: &Drive) -> Result<Served> {
        let (server, expect) = self.of(&load.name)?;
        paced::drive(server.endpoint(), expect, load)
    }

    fn set(&mut self, mebibytes: u64) -> Result<()> {
        self.strata.ask(&["set", SERVERS[1], "--dram", &format!("{mebibytes}MiB")]).map(drop)
    }

    fn stats(&mut self) -> Result<Stats> {
        self.strata.stats(SERVERS[1])
    }

    fn verify(&mut self, server: &str) -> Result<()> {
        let (server, expect) = self.of(server)?;
        let pass = client(server).verify(expect, &mut |_| ())?;
        if pass.missing_values > 0 {
            bail!("wrong values: {} records are gone", pass.missing_values);
        }
        Ok(())
    }
}
