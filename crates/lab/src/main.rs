//! `strata-lab`: measures Strata and shows it. Ships with nothing.
//!
//! Wiring only: what each command does is in its module. See
//! `docs/benchmarks.md` for how each figure is made.
#![forbid(unsafe_code)]

mod alloc;
mod bare;
mod bench;
mod cgroup;
mod demo;
mod guest;
mod histogram;
mod host_memory;
mod interrupt;
mod janitor;
mod journal;
mod keys;
mod machine;
mod memtierd;
mod meter;
mod optimum;
mod process;
mod progress;
mod random;
mod records;
mod redis;
mod simulate;
mod stage;
mod statistics;
mod strata;
mod subject;
mod swap_file;
mod sysbench;
mod table;
mod trial;
mod walk;
mod zram;
mod zswap;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "strata-lab", about = "Measures Strata and shows it", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Redis with all the DRAM it wants, on zram, and on Strata, side by side
    Demo(demo::Options),
    /// Repeated pairs of measurements with confidence intervals
    Bench(bench::Options),
    /// Fill, drive and verify a running Redis server
    #[command(subcommand)]
    Redis(redis::command::RedisCommand),
    /// Print records: one JSON document a line
    Records {
        /// How many
        #[arg(long, default_value_t = 10)]
        count: u64,
        /// Seed
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Version of each
        #[arg(long, default_value_t = 0)]
        version: u32,
    },
    /// Touch fresh memory, check it, free it, repeat (a program to be measured)
    Alloc(alloc::AllocOptions),
    /// Fill memory once and read it in random order (a program to be measured)
    Touch(alloc::TouchOptions),
    /// Read a file in random order past the page cache (a program to be measured)
    DirectRead(alloc::DirectOptions),
    /// Touch pages that a userfaultfd serves, without Strata (a program to be measured)
    BareFault(bare::BareOptions),
    /// Walk a graph, a matrix or pages (programs to be measured)
    #[command(subcommand)]
    Walk(walk::Walk),
    /// Replacement policies on page-level models
    Simulate(simulate::SimulateArgs),
    /// DRAM shared out among unlike tenants once a second: production, rivals, the optimum
    Shares(simulate::SharesArgs),
    /// Guests' balloons set by production, by what others do, and not at all
    Balloons(simulate::BalloonsArgs),
    /// Print the monotonic clock, in nanoseconds, and end
    Now,
    /// A guest with Strata inside and Redis under it, to try
    GuestDemo(guest::demo::Options),
    /// The first process of a guest of the lab's; started by the guest's kernel
    #[command(hide = true)]
    Guest,
    /// Puts the machine back as it was when the lab ends; started by the lab
    #[command(hide = true)]
    Janitor,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = run(&cli.command);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("strata-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Demo(options) => interrupt::install().and_then(|()| demo::run(options)),
        Command::Bench(options) => interrupt::install().and_then(|()| bench::run(options)),
        Command::Redis(command) => interrupt::install().and_then(|()| redis::command::run(command)),
        Command::Records { count, seed, version } => {
            records::print(*count, *seed, *version);
            Ok(())
        }
        Command::Simulate(options) => simulate::run(options),
        Command::Shares(options) => simulate::shares(options),
        Command::Balloons(options) => simulate::balloons(options),
        Command::Alloc(options) => alloc::churn(options),
        Command::Touch(options) => alloc::touch(options),
        Command::DirectRead(options) => alloc::direct_read(options),
        Command::BareFault(options) => bare::run(options),
        Command::Walk(walk) => walk::run(walk),
        Command::Now => {
            alloc::now();
            Ok(())
        }
        Command::GuestDemo(options) => {
            interrupt::install().and_then(|()| guest::demo::run(options))
        }
        Command::Guest => guest::agent::run(),
        Command::Janitor => janitor::serve(),
    }
}
