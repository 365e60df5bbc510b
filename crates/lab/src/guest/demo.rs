//! The other layout, to try: a guest with Strata *inside*, its file tier on
//! (emulated) persistent memory, and Redis under it with more than its DRAM. A
//! shell in it for whoever sits at a terminal, else a session that is written down
//! here.

use super::{
    machine::{Guest, Shape, Under},
    site::{PROGRAMS, Site},
    words::{Drive, Order, Served},
};
use crate::{janitor::Janitor, progress::Progress};
use anyhow::{Context, Result};
use rustix::termios::{OptionalActions, isatty, tcgetattr, tcsetattr};
use std::{
    io::{stdin, stdout},
    path::PathBuf,
    time::Duration,
};

const MEMORY_MIB: u64 = 1024;
const NVDIMM_MIB: u64 = 512;
/// About 170 MiB: nearly three times the budget.
const RECORDS: u64 = 130_000;
const DRAM_MIB: u64 = 64;
const NAME: &str = "redis";
const PATIENCE: Duration = Duration::from_secs(240);
/// Nobody is hurried.
const A_DAY: Duration = Duration::from_secs(24 * 3600);
const ACCELERATOR: &str = "tcg,thread=multi,tb-size=256";
const LOAD_SECONDS: u64 = 4;

const WELCOME: &str = "\r\n\
This is a Debian guest, emulated by QEMU. Strata runs inside of it; below its DRAM is a file on\r\n\
persistent memory that is mapped directly (DAX). Redis holds about 170 MiB under a budget of 64 MiB.\r\n\
\r\n\
    strata ps                              who is there\r\n\
    strata tiers redis                     which pages are where, and how soon they come back\r\n\
    strata top                             live; q quits\r\n\
    redis-benchmark -s /run/redis.sock -n 20000 -r 130000 get record:00__rand_int__\r\n\
    strata set redis --dram 32MiB          less\r\n\
    strata set redis --dram 256MiB         more\r\n\
    strata stats redis                     everything about it\r\n\
    exit                                   every record is compared, and the guest ends\r\n\
\r\n";

/// What the session that nobody sits at runs, and what it shows.
const SESSION: [&str; 4] = [
    "strata ps",
    "strata tiers redis",
    "strata set redis --dram 32MiB && sleep 3 && strata ps",
    "strata tiers redis",
];

/// How it is shown.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The session that is written down, even at a terminal
    #[arg(long)]
    scripted: bool,
    /// Where strata and stratad are; default: beside this program
    #[arg(long)]
    binaries: Option<PathBuf>,
}

/// Boots the guest and shows it.
pub(crate) fn run(options: &Options) -> Result<()> {
    let plan = crate::trial::Plan::standard(options.binaries.as_deref())?;
    let site = Site::that_manages(&plan.binaries)?;
    let has_terminal = !options.scripted && isatty(stdin()) && isatty(stdout());
    let janitor = Janitor::start()?;
    // QEMU makes it raw, and may be killed.
    let terminal = has_terminal.then(|| tcgetattr(stdin())).transpose().context("the terminal")?;
    let shown = show(&janitor, &site, has_terminal);
    if let Some(terminal) = terminal {
        tcsetattr(stdin(), OptionalActions::Now, &terminal).context("restore the terminal")?;
    }
    shown
}

fn show(janitor: &Janitor, site: &Site, has_terminal: bool) -> Result<()> {
    let progress = Progress::start("booting a guest");
    let shape = Shape {
        nvdimm_mebibytes: Some(NVDIMM_MIB),
        programs: PROGRAMS,
        processors: 2,
        has_terminal,
        ..Shape::new("guest-demo", MEMORY_MIB)
    };
    let mut guest = Guest::start(janitor, site, &shape, ACCELERATOR, Under::Nothing)?;
    guest.up()?;
    progress.part("Strata on persistent memory");
    progress.set(0.3, String::new());
    let _: () = guest.ask(&Order::Strata { lines: String::new() }, PATIENCE)?;
    progress.part("filling Redis");
    progress.set(0.5, format!("{RECORDS} records under {DRAM_MIB} MiB"));
    let under = Some(vec!["--dram".into(), format!("{DRAM_MIB}MiB")]);
    let redis = Order::Redis { name: NAME.into(), records: RECORDS, under };
    let _: () = guest.ask(&redis, PATIENCE)?;
    progress.finish("the guest is ready");
    if has_terminal {
        let _: () = guest.ask(&Order::Shell { text: WELCOME.into() }, A_DAY)?;
    } else {
        session(&mut guest)?;
    }
    let progress = Progress::start("comparing every record");
    let _: serde_json::Value = guest.ask(&Order::Verify { name: NAME.into() }, PATIENCE)?;
    progress.finish(&format!("{RECORDS} records compared: all right"));
    guest.end()
}

fn session(guest: &mut Guest) -> Result<()> {
    for line in SESSION {
        println!("guest# {line}");
        let said: String = guest.ask(&Order::Run { line: line.into() }, PATIENCE)?;
        println!("{said}");
        drive(guest)?;
    }
    Ok(())
}

fn drive(guest: &mut Guest) -> Result<()> {
    let load = Drive {
        name: NAME.into(),
        pattern: "gaussian".into(),
        reads: 1.0,
        per_second: 0,
        seconds: LOAD_SECONDS,
        seed: 1,
    };
    let seen: Served = guest.ask(&Order::Drive(load), PATIENCE)?;
    println!(
        "({LOAD_SECONDS} s of Gaussian GETs: {:.0} a second, p50 {:.0} µs, p99 {:.0} µs; emulated)\n",
        seen.per_second, seen.p50_us, seen.p99_us
    );
    Ok(())
}
