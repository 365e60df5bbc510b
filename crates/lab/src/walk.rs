//! Programs that walk through memory: measured, not measuring. Each fills it
//! with contents that are a function of a seed, walks for a time, checks what it
//! reads, and prints one JSON object a line. They know nothing of Strata; run
//! them natively, under a control group, or under `strata run`.
//!
//! With `--gated` a program waits for a line on its input after each line that
//! it prints, so that whoever measures it can read the counters between loading,
//! warming up, measuring and verifying. The programs in other languages (see
//! `bench/programs`) say the same lines.

mod graph;
mod matrix;
mod threads;

use crate::{histogram::Histogram, random::mix};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::{
    io::BufRead,
    time::{Duration, Instant},
};
use strata_units::ByteSize;

/// What walks.
#[derive(clap::Subcommand)]
pub(crate) enum Walk {
    /// Random walks and small breadth-first searches in a graph whose degrees
    /// and popularities follow power laws
    Graph(Options),
    /// Sweeps over a matrix: by rows, by panels of columns, and writing
    Matrix(Options),
    /// Several threads read pages at random, each for itself
    Threads {
        #[command(flatten)]
        options: Options,
        /// How many read at the same time
        #[arg(long, default_value_t = 4)]
        threads: usize,
    },
}

/// Sizes and lengths.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Memory
    #[arg(long, default_value = "256MiB")]
    size: ByteSize,
    /// Seconds of walking before it counts
    #[arg(long, default_value_t = 1.0)]
    warmup: f64,
    /// Seconds of walking that count
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Contents and paths
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Wait for a line on the input after each line printed
    #[arg(long)]
    gated: bool,
}

/// What a measured program says, one line each, in this order.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "gate", rename_all = "kebab-case")]
pub(crate) enum Gate {
    /// Its memory is filled.
    Loaded {
        /// Of the data alone.
        bytes: u64,
    },
    /// Warmed up; what comes now counts.
    Warm,
    /// The time is over.
    Done(Work),
    /// All of its memory was read once more and was right.
    Verified {
        /// Values, of whatever size the program has.
        values: u64,
    },
}

/// What was done in the time that counts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Work {
    pub operations: u64,
    pub seconds: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// The running checksum after every round since the load, the warm-up's
    /// included: the same in every run, as far as both got.
    pub rounds: Vec<String>,
    /// Latency of every single operation, where that says something: pairs of
    /// nanoseconds and how often.
    #[serde(default)]
    pub latencies: Vec<(f64, u64)>,
}

/// Runs a walk.
pub(crate) fn run(walk: &Walk) -> Result<()> {
    match walk {
        Walk::Graph(options) => drive(graph::Graph::new(options.size, options.seed)?, options),
        Walk::Matrix(options) => drive(matrix::Matrix::new(options.size, options.seed)?, options),
        Walk::Threads { options, threads } => threads::run(options, *threads),
    }
}

/// A walk in rounds.
trait Rounds {
    /// Size of the data.
    fn bytes(&self) -> u64;
    /// A round: at most some tenths of a second even where every page is
    /// missing. Returns operations and a checksum over everything read.
    fn round(&mut self, latencies: &mut Histogram) -> (u64, u64);
    /// Reads everything; how many values were right. An error if one was not.
    fn verify(&self) -> Result<u64>;
}

impl Gate {
    /// Prints the line and waits where that is wanted. An input that has ended
    /// is an answer too.
    fn pass(&self, gated: bool) -> Result<()> {
        println!("{}", serde_json::to_string(self)?);
        if gated {
            let mut answer = String::new();
            std::io::stdin().lock().read_line(&mut answer).context("wait for a line")?;
        }
        Ok(())
    }
}

fn drive(mut walk: impl Rounds, options: &Options) -> Result<()> {
    Gate::Loaded { bytes: walk.bytes() }.pass(options.gated)?;
    let mut rounds = Vec::new();
    let mut chain = 0;
    let mut spend = |seconds: f64| {
        let mut latencies = Histogram::default();
        let mut operations = 0;
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs_f64(seconds) {
            let (done, checksum) = walk.round(&mut latencies);
            operations += done;
            chain = mix(chain ^ checksum);
            rounds.push(format!("{chain:016x}"));
        }
        (operations, started.elapsed().as_secs_f64(), latencies)
    };
    spend(options.warmup);
    Gate::Warm.pass(options.gated)?;
    let (operations, seconds, latencies) = spend(options.seconds);
    let work = Work {
        operations,
        seconds,
        p50_us: latencies.quantile_us(0.5),
        p99_us: latencies.quantile_us(0.99),
        rounds,
        latencies: Vec::new(),
    };
    Gate::Done(work).pass(options.gated)?;
    Gate::Verified { values: walk.verify()? }.pass(options.gated)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: ByteSize = ByteSize(8 << 20);

    /// Two walks with one seed say the same checksums, with another others.
    fn repeats<W: Rounds>(make: impl Fn(u64) -> W) {
        let chain = |seed| {
            let mut walk = make(seed);
            let mut latencies = Histogram::default();
            let rounds: Vec<(u64, u64)> = (0..4).map(|_| walk.round(&mut latencies)).collect();
            assert!(rounds.iter().all(|(operations, _)| *operations > 0));
            assert!(latencies.quantile_us(0.5) > 0.0);
            rounds
        };
        assert_eq!(chain(1), chain(1));
        assert_ne!(chain(1), chain(2));
    }

    #[test]
    fn walks_are_functions_of_their_seed() {
        repeats(|seed| graph::Graph::new(SIZE, seed).expect("built"));
        repeats(|seed| matrix::Matrix::new(SIZE, seed).expect("built"));
    }

    #[test]
    fn lines_are_read_as_written() {
        let work = Work {
            operations: 7,
            seconds: 0.5,
            p50_us: 1.0,
            p99_us: 2.0,
            rounds: vec!["0f".into()],
            latencies: Vec::new(),
        };
        let line = serde_json::to_string(&Gate::Done(work)).expect("encodes");
        assert!(line.starts_with(r#"{"gate":"done","operations":7"#), "{line}");
        let Ok(Gate::Done(work)) = serde_json::from_str(&line) else { panic!("{line}") };
        assert_eq!(work.operations, 7);
        // The other languages leave out what they do not have.
        let line = r#"{"gate":"loaded","bytes":5}"#;
        assert!(matches!(serde_json::from_str(line), Ok(Gate::Loaded { bytes: 5 })));
    }
}
