//! The bench: pairs of trials in turn (A, B, A, B, …), so that the machine's
//! drift falls on both sides, and their ratios with 95 % intervals.
//!
//! Wiring only: what is measured lies in `bench/parts.rs` and, for `tight`, in
//! `bench/matrix.rs`, how it is written down in `bench/report.rs`.

mod budget;
mod cells;
mod compile;
mod density;
mod figure3;
mod figure4;
mod inside;
mod instances;
mod matrix;
mod memory_mode;
mod parts;
mod pool;
mod price;
mod programs;
mod report;
mod rows;
mod snapshots;
mod tiers;
mod unseen;

use self::budget::Budget;
use crate::{host_memory, interrupt, janitor::Janitor, machine::Provenance, trial};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use std::{fs, path::PathBuf};

/// What can be measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Part {
    /// Redis on zram, zswap, memtierd and Strata with the same total DRAM
    Tight,
    /// Fresh memory: first touches registered, not registered, native
    Alloc,
    /// What `strata run` adds until `main`
    Start,
    /// Programs far below their budget, against the same without Strata
    Unseen,
    /// Fault latency, and Strata's own memory per page and object
    Fault,
    /// What the daemon takes for a program that sleeps
    Rest,
    /// MariaDB under sysbench
    Mariadb,
    /// Lookups in a JVM's heap
    Jvm,
    /// Queries over CPython's dicts and lists
    Cpython,
    /// Walks in a graph
    Graph,
    /// Sweeps over a matrix
    Matrix,
    /// Threads that fault at the same time
    Threads,
    /// Freezes, restores, rollbacks and clones beside CRIU
    Snapshots,
    /// The file tier beside its device and beside kernel swap
    Tiers,
    /// Guests' disks in memory beside qemu-nbd
    Pool,
    /// Guests that build a C project at the same time
    Compile,
    /// How many guests fit into a given DRAM
    Density,
    /// Redis in a guest with Strata inside, by its DRAM
    Figure3,
    /// MariaDB in a guest under Strata, by its DRAM
    Figure4,
    /// DRAM as a cache with a noisy neighbour, against placement (simulated)
    MemoryMode,
    /// How many Redis instances fit into a guest, with Strata inside of it
    Instances,
}

/// Which parts, how often, how large.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only these parts [default: all that are not long and have no guests, within an hour]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Repetitions of every pair; of `tight`, those of the quoted rows
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    #[command(flatten)]
    narrowing: matrix::Narrowing,
    #[command(flatten)]
    sizes: snapshots::Sizes,
    /// Smaller and shorter: to see that all works, not to be quoted
    #[arg(long)]
    quick: bool,
    /// Where the results go
    #[arg(long, default_value = "bench/results")]
    out: PathBuf,
    /// Where strata and stratad are; default: beside this program
    #[arg(long)]
    binaries: Option<PathBuf>,
}

/// What the parts need.
struct Bench {
    janitor: Janitor,
    plan: trial::Plan,
    repetitions: usize,
    quick: bool,
    budget: Budget,
}

impl Bench {
    /// The repetitions of a row: as many as were asked for, at least one, and none that
    /// would begin when the row's time is over.
    fn repetitions(&self) -> impl Iterator<Item = usize> {
        (0..self.repetitions).take_while(|&done| self.budget.allows(done, self.repetitions))
    }
}

/// Runs the parts and writes raw results and a summary.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.repetitions == 0 {
        bail!("--repetitions must be at least 1");
    }
    options.narrowing.check()?;
    let mut plan = trial::Plan::standard(options.binaries.as_deref())?;
    if options.quick {
        plan.shorten();
    }
    let bench = Bench {
        janitor: Janitor::start()?,
        plan,
        repetitions: options.repetitions,
        quick: options.quick,
        budget: Budget::new(),
    };
    let memory = if options.quick { None } else { Some(host_memory::keep(&bench.janitor)?) };
    let said = memory.as_ref().map(|memory| memory.said.clone());
    let mut results = report::Results::new(Provenance::now(), options.quick, said);
    let all: Vec<Part> =
        Part::value_variants().iter().copied().filter(|part| part.is_usual()).collect();
    for part in if options.only.is_empty() { &all } else { &options.only } {
        eprintln!("{}", part.title());
        let mut found = report::PartResults::default();
        if !bench.budget.begin(part.is_long(), options.only.is_empty()) {
            results.add(*part, found, Err(anyhow::anyhow!("the hour of a whole bench is over")));
            continue;
        }
        let outcome = match part {
            Part::Tight => matrix::tight(&bench, &options.narrowing, &mut found),
            Part::Alloc => parts::alloc(&bench, &mut found),
            Part::Start => parts::start(&bench, &mut found),
            Part::Unseen => unseen::unseen(&bench, &mut found),
            Part::Fault => parts::fault(&bench, &mut found),
            Part::Rest => parts::rest(&bench, &mut found),
            Part::Mariadb => programs::mariadb(&bench, &mut found),
            Part::Jvm => programs::jvm(&bench, &mut found),
            Part::Cpython => programs::cpython(&bench, &mut found),
            Part::Graph => programs::graph(&bench, &mut found),
            Part::Matrix => programs::matrix(&bench, &mut found),
            Part::Threads => programs::threads(&bench, &mut found),
            Part::Snapshots => snapshots::snapshots(&bench, &options.sizes, &mut found),
            Part::Tiers => tiers::tiers(&bench, &mut found),
            Part::Pool => pool::pool(&bench, &mut found),
            Part::Compile => compile::compile(&bench, &mut found),
            Part::Density => density::density(&bench, &mut found),
            Part::Figure3 => figure3::figure3(&bench, &mut found),
            Part::Figure4 => figure4::figure4(&bench, &mut found),
            Part::MemoryMode => memory_mode::memory_mode(&bench, &mut found),
            Part::Instances => instances::instances(&bench, &mut found),
        };
        eprintln!("{}", bench.budget.said());
        results.add(*part, found, outcome);
        // What was measured until now is written down all the same.
        if interrupt::requested() {
            break;
        }
    }
    fs::create_dir_all(&options.out).with_context(|| format!("make {}", options.out.display()))?;
    let stem = results.stem();
    let put = |extension: &str, text: String| {
        let path = options.out.join(format!("{stem}.{extension}"));
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        println!("{}", path.display());
        anyhow::Ok(())
    };
    let summary = results.markdown();
    println!("\n{summary}");
    put("json", serde_json::to_string_pretty(&results)?)?;
    put("md", summary)?;
    results.refuse_failed()
}

impl Part {
    /// Those that take longer than a row's ten minutes by their nature run only when they
    /// are named, and to their end.
    const fn is_long(self) -> bool {
        matches!(
            self,
            Self::Tight
                | Self::Mariadb
                | Self::Jvm
                | Self::Cpython
                | Self::Matrix
                | Self::Compile
                | Self::Density
        )
    }

    /// Whether a bench of no part in particular has it: guests need a disk, which is built
    /// for who asks for it.
    const fn is_usual(self) -> bool {
        !self.is_long() && !matches!(self, Self::Figure3 | Self::Figure4 | Self::Instances)
    }

    const fn title(self) -> &'static str {
        match self {
            Self::Tight => {
                "Redis squeezed: Strata, zram, zswap and memtierd with the same total DRAM"
            }
            Self::Alloc => "Fresh memory: MiB/s",
            Self::Start => "From start to main",
            Self::Unseen => "Far below the budget: what a program notices",
            Self::Fault => "Faults and Strata's own memory",
            Self::Rest => "Programs that sleep: what the daemon takes",
            Self::Mariadb => "MariaDB (InnoDB, sysbench): Strata against zram, the same total DRAM",
            Self::Jvm => "JVM heap: Strata against zram, the same total DRAM",
            Self::Cpython => "CPython objects: Strata against zram, the same total DRAM",
            Self::Graph => "Graph walk: Strata against zram, the same total DRAM",
            Self::Matrix => "Matrix sweeps: Strata against zram, the same total DRAM",
            Self::Threads => "Threads faulting at the same time, memory twice the budget",
            Self::Tiers => {
                "The file tier: faults beside reads of the device, sweeps beside kernel swap"
            }
            Self::Pool => "Guests' disks in memory, beside qemu-nbd on a file in a tmpfs",
            Self::Density => "Guests in a part of their DRAM: Strata, kernel swap, and all of it",
            Self::Figure3 => "Redis in a guest with Strata inside, in a part of its DRAM",
            Self::Figure4 => "MariaDB in a guest under Strata, in a part of its DRAM",
            Self::MemoryMode => "DRAM as a cache with a noisy neighbour, and placement (simulated)",
            Self::Instances => "Redis instances in a guest: with Strata inside, and without",
            Self::Compile => "Guests that build a C project at the same time, in the same DRAM",
            Self::Snapshots => "Snapshots: Strata, plain CRIU and Redis's own reload",
        }
    }
}
