//! The demo: one Redis and one load, in all the DRAM they want, squeezed onto
//! the kernel's compressed swap, and squeezed onto Strata with the DRAM that
//! the kernel was measured to use.
//!
//! Every figure it prints was measured in this run; nothing is kept from
//! earlier ones. A part that this machine does not permit is named with the
//! reason and left out.

use crate::{
    interrupt,
    janitor::Janitor,
    keys::Pattern,
    machine::Provenance,
    progress::Progress,
    redis::{load::Workload, tally::WrongValues},
    stage::Setup,
    table::{Table, mebibytes, short, three_digits},
    trial::{self, Plan, TrialResult},
};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::{fs, path::PathBuf, time::Duration};

/// Size and length of the demo.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Records of 1 KiB (800,000 are about 1 GB in Redis)
    #[arg(long, default_value_t = 800_000)]
    records: u64,
    /// Measured seconds of each phase
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Seconds of load before
    #[arg(long, default_value_t = 6.0)]
    warmup_seconds: f64,
    /// Which keys
    #[arg(long, value_enum, default_value_t = Pattern::Gaussian)]
    pattern: Pattern,
    /// Share of GETs
    #[arg(long, default_value_t = 0.9)]
    reads: f64,
    /// Where the results go
    #[arg(long, default_value = "target/demo")]
    out: PathBuf,
    /// Where strata and stratad are; default: beside this program
    #[arg(long)]
    binaries: Option<PathBuf>,
    /// Leave Strata out
    #[arg(long)]
    no_strata: bool,
    /// Which shares of DRAM, in per cent, the rival may keep resident
    #[arg(long, value_delimiter = ',', default_values_t = [66, 33])]
    shares: Vec<u64>,
}

/// One row of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Phase {
    pub label: String,
    pub detail: String,
    pub result: TrialResult,
}

/// What a demo leaves behind, as JSON.
#[derive(Serialize)]
pub(crate) struct Report {
    pub provenance: Provenance,
    pub workload: String,
    pub phases: Vec<Phase>,
    /// What else the reader must know: phases that were left out, kills.
    pub notes: Vec<String>,
}

struct Demo<'a> {
    janitor: &'a Janitor,
    plan: Plan,
    report: Report,
}

/// The whole demo.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.shares.iter().any(|share| !(5..100).contains(share)) {
        bail!("--shares lie between 5 and 99 per cent");
    }
    let janitor = Janitor::start()?;
    let plan = plan(options)?;
    let workload = format!(
        "{} JSON records of 1 KiB, {:?} keys, {:.0} % GET, {} connections × pipeline {}",
        plan.records,
        plan.workload.pattern,
        options.reads * 100.0,
        plan.connections,
        plan.pipeline
    );
    println!("\n  Strata demo: {workload}\n");
    let report =
        Report { provenance: Provenance::now(), workload, phases: Vec::new(), notes: Vec::new() };
    let mut demo = Demo { janitor: &janitor, plan, report };
    demo.phases(options)?;
    finish(&demo.report, options)?;
    let is_strata = |phase: &Phase| matches!(phase.result.setup, Setup::Strata { .. });
    if !options.no_strata && !demo.report.phases.iter().any(is_strata) {
        bail!("Strata itself could not be measured; the reason stands above");
    }
    Ok(())
}

fn plan(options: &Options) -> Result<Plan> {
    let mut plan = Plan::standard(options.binaries.as_deref())?;
    plan.records = options.records;
    plan.workload = Workload {
        pattern: options.pattern,
        reads: options.reads,
        warmup: Duration::from_secs_f64(options.warmup_seconds),
        duration: Duration::from_secs_f64(options.seconds),
        ..plan.workload
    };
    Ok(plan)
}

impl Demo<'_> {
    fn phases(&mut self, options: &Options) -> Result<()> {
        let native = self.phase("DRAM only", "no limit", Setup::DramOnly)?;
        let all_bytes = native.cost.memory.resident_bytes;
        let mut rivals = Vec::new();
        for &share in &options.shares {
            let label = format!("zram, {share} % resident");
            let setup = Setup::Zram { resident_limit_bytes: all_bytes * share / 100 };
            if let Some(result) = self.optional(&label, "store extra", setup)? {
                rivals.push((share, result.cost.memory.total_bytes()));
            }
        }
        if options.no_strata {
            return Ok(());
        }
        let mut budgets: Vec<(String, String, u64)> = rivals
            .iter()
            .map(|(share, total_bytes)| {
                (
                    format!("Strata, {} % total", total_bytes * 100 / all_bytes),
                    format!("DRAM of zram at {share} %"),
                    *total_bytes,
                )
            })
            .collect();
        if budgets.is_empty() {
            // No rival to equal: two thirds stand in for it.
            let detail = "all included".to_owned();
            budgets.push(("Strata, 66 % total".into(), detail, all_bytes * 66 / 100));
        }
        budgets.push(("Strata, 33 % total".into(), "all included".into(), all_bytes * 33 / 100));
        for (label, detail, dram_bytes) in budgets {
            // What one budget meets (no privileges, no daemon) the next would too.
            if self.optional(&label, &detail, Setup::Strata { dram_bytes })?.is_none() {
                break;
            }
        }
        Ok(())
    }

    fn phase(&mut self, label: &str, detail: &str, setup: Setup) -> Result<TrialResult> {
        let progress = Progress::start(label);
        let name = match setup {
            Setup::DramOnly => "demo-dram",
            Setup::Strata { .. } => "demo",
            Setup::Zram { .. } | Setup::Zswap { .. } | Setup::Memtierd { .. } => "demo-zram",
        };
        let result = trial::run(self.janitor, setup, name, &self.plan, &progress);
        match &result {
            Ok(result) => {
                progress.finish(&format!(
                    "✓ {label:24} {:>6} ops/s  {:>5} MiB  every value right",
                    short(result.run.operations_per_second),
                    mebibytes(result.cost.memory.total_bytes())
                ));
            }
            Err(_) => progress.finish(&format!("– {label}")),
        }
        let result = result.with_context(|| label.to_owned())?;
        if result.oom_kills > 0 {
            let note = format!(
                "{label}: the kernel's OOM killer ended Redis {} times before this run",
                result.oom_kills
            );
            eprintln!("    {note}");
            self.report.notes.push(note);
        }
        if let Some(note) = result.cost.budget_note(result.setup) {
            eprintln!("    {note}");
            self.report.notes.push(format!("{label}: {note}"));
        }
        self.report.phases.push(Phase {
            label: label.to_owned(),
            detail: detail.to_owned(),
            result: result.clone(),
        });
        Ok(result)
    }

    /// A phase that the machine may not permit: noted, and the demo goes on.
    /// Wrong values are never excused.
    fn optional(&mut self, label: &str, detail: &str, setup: Setup) -> Result<Option<TrialResult>> {
        match self.phase(label, detail, setup) {
            Ok(result) => Ok(Some(result)),
            Err(error) if interrupt::requested() || error.is::<WrongValues>() => Err(error),
            Err(error) => {
                eprintln!("    left out: {error:#}");
                self.report.notes.push(format!("left out: {error:#}"));
                Ok(None)
            }
        }
    }
}

fn finish(report: &Report, options: &Options) -> Result<()> {
    fs::create_dir_all(&options.out).with_context(|| format!("make {}", options.out.display()))?;
    let path = options.out.join("demo.json");
    fs::write(&path, serde_json::to_string_pretty(report)?)
        .with_context(|| format!("write {}", path.display()))?;
    println!("\n{}", table(&report.phases).plain());
    for note in &report.notes {
        println!("  {note}");
    }
    println!("  {}", report.provenance.line());
    println!("  raw: {}", path.display());
    Ok(())
}

/// The table at the end. Memory in MiB, times in microseconds.
pub(crate) fn table(phases: &[Phase]) -> Table {
    let mut table = Table::new(&[
        "",
        "ops/s",
        "of DRAM",
        "p50 µs",
        "p99 µs",
        "CPU µs/op",
        "resident",
        "compr.",
        "meta",
        "total MiB",
        "ratio",
    ]);
    let base = phases.first().map_or(0.0, |phase| phase.result.run.operations_per_second);
    for Phase { label, result, .. } in phases {
        let memory = &result.cost.memory;
        table.row(vec![
            label.clone(),
            short(result.run.operations_per_second),
            format!("{:.2} ×", result.run.operations_per_second / base),
            three_digits(result.run.p50_us),
            three_digits(result.run.p99_us),
            three_digits(result.cost.program_cpu_us_per_op),
            mebibytes(memory.resident_bytes),
            mebibytes(memory.compressed_bytes),
            mebibytes(memory.metadata_bytes),
            mebibytes(memory.total_bytes()),
            memory.ratio().map_or_else(|| "–".to_owned(), three_digits),
        ]);
    }
    table
}
