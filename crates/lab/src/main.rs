//! `strata-lab`: measures Strata and shows it. Ships with nothing.
//!
//! Wiring only: what each command does is in its module. See
//! `docs/benchmarks.md` for how each figure is made.
#![forbid(unsafe_code)]

mod cgroup;
mod demo;
mod histogram;
mod interrupt;
mod janitor;
mod keys;
mod machine;
mod picture;
mod process;
mod progress;
mod random;
mod records;
mod redis;
mod statistics;
mod strata;
mod table;
mod trial;
mod zram;

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
    /// Puts the machine back as it was when the lab ends; started by the lab
    #[command(hide = true)]
    Janitor,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match &cli.command {
        Command::Janitor => janitor::serve(),
        other => interrupt::install().and_then(|()| run(other)),
    };
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
        Command::Demo(options) => demo::run(options),
        Command::Redis(command) => redis::command::run(command),
        Command::Records { count, seed, version } => {
            let records = records::Records::new(random::mix(*seed));
            let mut record = Vec::new();
            for index in 0..*count {
                records.fill(index, *version, &mut record);
                println!("{}", String::from_utf8_lossy(&record));
            }
            Ok(())
        }
        Command::Janitor => janitor::serve(),
    }
}
