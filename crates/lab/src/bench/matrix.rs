//! `tight`: a squeezed Redis, no Strata, the kernel's compressed swap, memtierd
//! and Strata in turn, for every cell of the matrix. Runs the trials and keeps
//! what they gave; what it says is `bench/rows.rs`'s business.

use super::{
    Bench,
    cells::{Cell, Subject, chosen},
    price,
    report::PartResults,
    rows::{Matrix, Row},
};
use crate::{
    interrupt,
    keys::Pattern,
    memtierd::Tool,
    progress::Progress,
    redis::tally::WrongValues,
    stage::Setup,
    trial::{self, Plan, TrialResult},
};
use anyhow::{Context, Result, anyhow, bail};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// What the command line says of the matrix.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Narrowing {
    /// `tight`: only rows with these key patterns
    #[arg(long, value_enum, value_delimiter = ',')]
    patterns: Vec<Pattern>,
    /// `tight`: only rows in which the rivals keep these shares resident, in per cent
    #[arg(long, value_delimiter = ',')]
    shares: Vec<u64>,
    /// `tight`: measured seconds of a trial [default: 8, with --quick 3]
    #[arg(long)]
    seconds: Option<f64>,
    /// `tight`: seconds of load before [default: 7, with --quick 1]
    #[arg(long)]
    warmup_seconds: Option<f64>,
    /// `tight`: the program memtierd; default: where scripts/memtierd.sh puts it
    #[arg(long)]
    memtierd: Option<PathBuf>,
}

const WARMUP_SECONDS: Duration = Duration::from_secs(7);
const TRIAL_SECONDS: Duration = Duration::from_secs(8);
/// What is hot is learned by requests, of which an unpipelined client makes few.
const WARMUP_PIPELINE: usize = 16;
/// Trials without a limit settle at once and differ little.
const NATIVE_WARMUP: Duration = Duration::from_secs(1);
const NATIVE_SECONDS: Duration = Duration::from_secs(4);
/// A jump needs time to be got over.
const JUMP_SECONDS_FACTOR: f64 = 3.0;
/// Failed repetitions after which a subject is left out of a cell.
const PATIENCE: usize = 2;

impl Narrowing {
    pub(super) fn check(&self) -> Result<()> {
        if [self.seconds, self.warmup_seconds].iter().flatten().any(|given| *given <= 0.0) {
            bail!("--seconds and --warmup-seconds are above zero");
        }
        self.cells().map(|_| ())
    }

    fn cells(&self) -> Result<Vec<Cell>> {
        chosen(&self.patterns, &self.shares)
    }

    const fn is_narrowed(&self) -> bool {
        !self.patterns.is_empty() || !self.shares.is_empty()
    }

    fn memtierd(&self) -> PathBuf {
        let cache = || {
            let set = |name: &str| std::env::var_os(name).map(PathBuf::from);
            let home = || set("HOME").map(|home| home.join(".cache"));
            set("XDG_CACHE_HOME").or_else(home).unwrap_or_else(std::env::temp_dir)
        };
        self.memtierd.clone().unwrap_or_else(|| cache().join("strata-lab/memtierd"))
    }
}

/// The matrix, as far as it could be measured; an error names what could not.
pub(super) fn tight(bench: &Bench, narrowing: &Narrowing, results: &mut PartResults) -> Result<()> {
    let cells = narrowing.cells()?;
    let mut run = Run {
        bench,
        narrowing,
        memtierd: None,
        matrix: Matrix { records: bench.plan.records, ..Matrix::default() },
    };
    let ended = run.all(&cells);
    let matrix = run.matrix;
    for row in &matrix.rows {
        for (repetition, result) in &row.results {
            results.raw.push(serde_json::json!({
                "row": row.cell.name(),
                "cell": row.cell,
                "subject": row.subject,
                "repetition": repetition,
                "optimum_misses_per_op": matrix.optimum(row, result),
                "result": result,
            }));
        }
    }
    results.raw.push(serde_json::json!({ "price_of_a_fault_us": matrix.prices }));
    results.text = matrix.markdown();
    ended?;
    if let Some(first) = matrix.missing.first() {
        bail!("{} not measured, first: {first}", matrix.missing.len());
    }
    Ok(())
}

struct Run<'a> {
    bench: &'a Bench,
    narrowing: &'a Narrowing,
    /// Looked for once; an error is the reason why there is none.
    memtierd: Option<Result<Tool, String>>,
    matrix: Matrix,
}

/// What one repetition of a cell has measured so far.
#[derive(Default)]
struct Seen {
    native_bytes: u64,
    kernel_totals: Vec<u64>,
    memtierd_total: Option<u64>,
}

impl Run<'_> {
    fn all(&mut self, cells: &[Cell]) -> Result<()> {
        let missing = &mut self.matrix.missing;
        self.matrix.prices = price::measure(self.bench, &mut |reason| missing.push(reason))?;
        for repetition in self.bench.repetitions() {
            for cell in cells {
                self.cell(cell, repetition)?;
            }
        }
        Ok(())
    }

    fn cell(&mut self, cell: &Cell, repetition: usize) -> Result<()> {
        let mut seen = Seen::default();
        for &subject in cell.subjects {
            interrupt::check()?;
            let asked =
                cell.repetitions(subject, self.bench.repetitions, self.narrowing.is_narrowed());
            if repetition >= asked {
                continue;
            }
            let what = format!("{}: {} ({}/{asked})", cell.name(), subject.name(), repetition + 1);
            if self.matrix.failures(cell, subject) >= PATIENCE {
                continue;
            }
            let found = self
                .setup(cell, subject, &seen)
                .and_then(|setup| self.trial(setup, &what, &self.plan(cell, subject, repetition)));
            match found {
                Ok(result) => {
                    seen.note(subject, &result);
                    self.matrix.add(cell, subject, repetition, result);
                }
                // Nothing can be compared without it, and wrong values are
                // never excused.
                Err(error)
                    if interrupt::requested()
                        || error.is::<WrongValues>()
                        || subject == Subject::Native =>
                {
                    return Err(error);
                }
                Err(error) => {
                    let reason = format!("{what}: {error:#}");
                    eprintln!("  not measured: {reason}");
                    self.matrix.fail(cell, subject, reason);
                }
            }
        }
        Ok(())
    }

    fn setup(&mut self, cell: &Cell, subject: Subject, seen: &Seen) -> Result<Setup> {
        let resident_limit_bytes = seen.native_bytes * cell.share / 100;
        Ok(match subject {
            Subject::Native => Setup::DramOnly,
            Subject::Zram => Setup::Zram { resident_limit_bytes },
            Subject::Zswap => Setup::Zswap { resident_limit_bytes },
            Subject::Memtierd => {
                let program = self.narrowing.memtierd();
                self.find_memtierd(&program, cell.reads < 1.0)?;
                Setup::Memtierd { resident_limit_bytes }
            }
            Subject::Strata => {
                let smallest = seen.kernel_totals.iter().min();
                let missing = || anyhow!("no rival says how much DRAM it may have");
                Setup::Strata { dram_bytes: *smallest.ok_or_else(missing)? }
            }
            Subject::StrataAsMemtierd => {
                let total = seen.memtierd_total.context("memtierd was not measured")?;
                Setup::Strata { dram_bytes: total }
            }
            Subject::StrataThird => Setup::Strata { dram_bytes: seen.native_bytes * 33 / 100 },
        })
    }

    fn find_memtierd(&mut self, program: &Path, load_writes: bool) -> Result<()> {
        let janitor = &self.bench.janitor;
        let notes = &mut self.matrix.notes;
        let found = self.memtierd.get_or_insert_with(|| {
            let found = Tool::find(janitor, program, load_writes);
            if let Ok(tool) = &found {
                let mut note =
                    format!("memtierd's age policy with its tracker {}.", tool.tracker.name());
                for refused in &tool.refused {
                    note.push_str(&format!(" Not {refused}."));
                }
                eprintln!("  {note}");
                notes.push(note);
            }
            found.map_err(|error| format!("{error:#}"))
        });
        found.as_ref().map(|_| ()).map_err(|reason| anyhow!("{reason}"))
    }

    fn plan(&self, cell: &Cell, subject: Subject, repetition: usize) -> Plan {
        let mut plan = self.bench.plan.clone();
        plan.pipeline = cell.pipeline;
        plan.workload.pattern = cell.pattern;
        plan.workload.reads = cell.reads;
        plan.workload.warmup_pipeline = WARMUP_PIPELINE;
        plan.memtierd = self.memtierd.clone().and_then(Result::ok);
        // Every value of every GET is checked all the same.
        plan.verify = repetition == 0;
        let of = |given: Option<f64>, quick: Duration, usual: Duration| match given {
            Some(seconds) => Duration::from_secs_f64(seconds),
            None if self.bench.quick => quick,
            None => usual,
        };
        let load = &mut plan.workload;
        load.duration = of(self.narrowing.seconds, load.duration, TRIAL_SECONDS);
        load.warmup = of(self.narrowing.warmup_seconds, load.warmup, WARMUP_SECONDS);
        if cell.pattern == Pattern::Jump {
            plan.workload.duration = plan.workload.duration.mul_f64(JUMP_SECONDS_FACTOR);
        } else if subject == Subject::Native {
            plan.workload.warmup = plan.workload.warmup.min(NATIVE_WARMUP);
            plan.workload.duration = plan.workload.duration.min(NATIVE_SECONDS);
        }
        plan
    }

    fn trial(&self, setup: Setup, what: &str, plan: &Plan) -> Result<TrialResult> {
        let progress = Progress::start(what);
        let result = trial::run(&self.bench.janitor, setup, "bench", plan, &progress);
        match &result {
            Ok(result) => progress.finish(&format!(
                "{what}: {:.0} ops/s, {:.3} misses/op, {} MiB",
                result.run.asked_per_second(),
                result.cost.misses_per_op,
                result.cost.memory.total_bytes() >> 20
            )),
            Err(_) => progress.finish(&format!("{what}: failed")),
        }
        result
    }
}

impl Seen {
    fn note(&mut self, subject: Subject, result: &TrialResult) {
        let total_bytes = result.cost.memory.total_bytes();
        match subject {
            Subject::Native => self.native_bytes = result.cost.memory.resident_bytes,
            Subject::Zram | Subject::Zswap => self.kernel_totals.push(total_bytes),
            Subject::Memtierd => self.memtierd_total = Some(total_bytes),
            Subject::Strata | Subject::StrataAsMemtierd | Subject::StrataThird => {}
        }
    }
}

impl Matrix {
    fn row(&mut self, cell: &Cell, subject: Subject) -> &mut Row {
        let name = cell.name();
        let found = self
            .rows
            .iter()
            .position(|row| row.subject == subject && row.cell.name() == name)
            .unwrap_or_else(|| {
                self.rows.push(Row::new(*cell, subject));
                self.rows.len() - 1
            });
        &mut self.rows[found]
    }

    fn add(&mut self, cell: &Cell, subject: Subject, repetition: usize, result: TrialResult) {
        let what = format!("{}: {}", cell.name(), subject.name());
        let mut say = |note: String| {
            if !self.notes.contains(&note) {
                eprintln!("  {note}");
                self.notes.push(note);
            }
        };
        if let Some(note) = &result.store_note {
            say(format!("{note}."));
        }
        if let Some(note) = result.cost.budget_note(result.setup) {
            say(format!("{what}, repetition {}: {note}.", repetition + 1));
        }
        if result.oom_kills > 0 {
            say(format!(
                "{what}, repetition {}: the kernel's OOM killer ended Redis {} times before.",
                repetition + 1,
                result.oom_kills
            ));
        }
        self.row(cell, subject).results.push((repetition, result));
    }

    fn failures(&mut self, cell: &Cell, subject: Subject) -> usize {
        self.row(cell, subject).failures
    }

    fn fail(&mut self, cell: &Cell, subject: Subject, reason: String) {
        self.row(cell, subject).failures += 1;
        self.missing.push(reason);
    }
}
