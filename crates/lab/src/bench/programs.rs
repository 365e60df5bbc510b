//! Parts of the bench with programs other than Redis: a database, a JVM,
//! CPython, walks through a graph and a matrix, and threads that fault side by
//! side. In every repetition a program runs with all the DRAM it wants, then for
//! each share on zram under a limit, and on Strata with the DRAM that zram was
//! measured to use.
//!
//! This file says what runs and what is compared; a trial is in
//! `programs/run.rs` (and `programs/mariadb.rs`), what is kept of it in
//! `programs/figures.rs`.

mod figures;
mod mariadb;
mod run;

use super::{
    Bench,
    report::{PartResults, Series, Side},
};
use crate::{
    interrupt,
    progress::Progress,
    stage::Setup,
    subject::{Subject, last_line, scratch},
};
use anyhow::{Context, Result, bail};
use figures::Figures;
use run::{Job, Trial};
use std::{
    ffi::OsString,
    fs::{self, File},
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

/// Resident shares of the rival, in per cent of what the program takes natively.
const SHARES: [u64; 2] = [66, 33];
const LOOKUPS: &str = include_str!("../../programs/Lookups.java");
const ANALYTICS: &str = include_str!("../../programs/analytics.py");

/// A compiler of one small file that takes longer hangs.
const COMPILE_PATIENCE: Duration = Duration::from_secs(120);

/// What an operation of a program is, in the tables.
struct Wording {
    rate: &'static str,
    cpu: &'static str,
}

const fn per(rate: &'static str, cpu: &'static str) -> Wording {
    Wording { rate, cpu }
}

/// The first of some programs that is installed.
///
/// # Errors
/// None is: says which Debian package brings it.
fn installed(names: &[&str], package: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Not everybody's PATH has the administrator's directories; the system's
    // own come first, where others only stand for a version manager.
    let places: Vec<PathBuf> = ["/usr/bin", "/usr/sbin"]
        .map(PathBuf::from)
        .into_iter()
        .chain(std::env::split_paths(&path))
        .collect();
    names
        .iter()
        .flat_map(|name| places.iter().map(move |place| place.join(name)))
        .find(|program| program.is_file())
        .with_context(|| {
            format!(
                "{} is not installed: run scripts/setup.sh bench, or apt-get install {package}",
                names.join(" or ")
            )
        })
}

impl Bench {
    fn program(&self, setup: Setup, what: &str, job: &Job) -> Result<Trial> {
        interrupt::check()?;
        let progress = Progress::start(what);
        let found = run::trial(&self.janitor, &self.plan.binaries, setup, job, &progress)
            .with_context(|| what.to_owned());
        match &found {
            Ok(found) => {
                progress.finish(&format!("{what}: {:.0} op/s", found.figures.operations_per_second))
            }
            Err(_) => progress.finish(&format!("{what}: failed")),
        }
        found
    }

    /// Warm-up and measured time of a program, in seconds.
    const fn times(&self) -> [&'static str; 2] {
        if self.quick { ["1", "2"] } else { ["3", "8"] }
    }
}

/// Compares the checksums of all runs of a program: they are the same, as far
/// as both runs got.
#[derive(Default)]
struct Agreement {
    longest: Vec<String>,
}

impl Agreement {
    fn check(&mut self, rounds: &[String], what: &str) -> Result<()> {
        if rounds.is_empty() {
            bail!("{what}: no round was finished, so no checksum was compared");
        }
        let differs = rounds.iter().zip(&self.longest).position(|(one, other)| one != other);
        if let Some(round) = differs {
            bail!("{what}: another checksum in round {round} than before: data was damaged");
        }
        if rounds.len() > self.longest.len() {
            self.longest = rounds.to_vec();
        }
        Ok(())
    }
}

/// The trials of one share, in the order of the repetitions.
struct Pairs {
    share: u64,
    strata: Vec<Figures>,
    zram: Vec<Figures>,
    native: Vec<Figures>,
}

impl Pairs {
    fn all() -> [Self; SHARES.len()] {
        SHARES.map(|share| Self { share, strata: Vec::new(), zram: Vec::new(), native: Vec::new() })
    }

    /// Keeps what a complete turn found: sides of one length make pairs.
    fn push(&mut self, native: Figures, zram: Figures, strata: Figures) {
        self.native.push(native);
        self.zram.push(zram);
        self.strata.push(strata);
    }
}

/// How a figure is read off a trial.
type Of = fn(&Figures) -> f64;

const MIB: f64 = (1 << 20) as f64;

fn side(name: &str, figures: &[Figures], of: Of) -> Side {
    Side { name: name.to_owned(), samples: figures.iter().map(of).collect() }
}

/// What is compared of every program.
fn series(name: &str, wording: &Wording, pairs: &Pairs) -> Vec<Series> {
    let figures: [(&str, &str, Of); 11] = [
        ("throughput", wording.rate, |f| f.operations_per_second),
        ("p50", "µs", |f| f.done.p50_us.unwrap_or_default()),
        ("p99", "µs", |f| f.done.p99_us),
        ("CPU of program and daemon", wording.cpu, |f| f.cost.program_cpu_us_per_op),
        ("CPU of the machine", wording.cpu, |f| f.cost.machine_cpu_us_per_op),
        ("faults", "/s", |f| f.cost.faults_per_second),
        ("faults per operation", "", |f| f.cost.misses_per_op),
        ("resident", "MiB", |f| f.cost.memory.resident_bytes as f64 / MIB),
        ("compressed and metadata", "MiB", |f| {
            (f.cost.memory.compressed_bytes + f.cost.memory.metadata_bytes) as f64 / MIB
        }),
        ("DRAM in total", "MiB", |f| f.cost.memory.total_bytes() as f64 / MIB),
        ("original : compressed", "×", |f| f.cost.memory.ratio().unwrap_or_default()),
    ];
    let row =
        |share: u64, sides: [&str; 2], of: [&[Figures]; 2], figure: &(&str, &str, Of)| Series {
            name: format!("{name} {share} %, {}", figure.0),
            unit: figure.1.to_owned(),
            left: side(sides[0], of[0], figure.2),
            right: Some(side(sides[1], of[1], figure.2)),
        };
    let share = pairs.share;
    let mut all: Vec<Series> = figures
        .iter()
        // Not every client gives a median.
        .filter(|(figure, ..)| {
            *figure != "p50" || pairs.strata.iter().all(|f| f.done.p50_us.is_some())
        })
        .map(|figure| row(share, ["Strata", "zram"], [&pairs.strata, &pairs.zram], figure))
        .collect();
    let native = &pairs.native;
    let figure = ("throughput against native", figures[0].1, figures[0].2);
    all.push(row(share, ["Strata", "native"], [&pairs.strata, native], &figure));
    all.push(row(share, ["zram", "native"], [&pairs.zram, native], &figure));
    all
}

/// All turns of a program that says its gates.
fn gated(bench: &Bench, results: &mut PartResults, job: &Job, wording: &Wording) -> Result<()> {
    let mut found = Pairs::all();
    let mut agreement = Agreement::default();
    let outcome: Result<()> = bench.repetitions().try_for_each(|_| {
        let mut one = |setup: Setup, what: &str| -> Result<Figures> {
            let what = format!("{}: {what}", job.name);
            let Trial { figures, work } = bench.program(setup, &what, job)?;
            agreement.check(&work.rounds, &what)?;
            results.raw.push(serde_json::to_value(&figures)?);
            Ok(figures)
        };
        let native = one(Setup::DramOnly, "native")?;
        for pairs in &mut found {
            let share = pairs.share;
            // The rival first, always: its measured total is the budget.
            let resident_limit_bytes = native.cost.peak_total_bytes * share / 100;
            let zram = one(Setup::Zram { resident_limit_bytes }, &format!("zram {share} %"))?;
            let budget = Setup::Strata { dram_bytes: zram.cost.memory.total_bytes() };
            let strata = one(budget, &format!("Strata beside zram {share} %"))?;
            pairs.push(native.clone(), zram, strata);
        }
        Ok(())
    });
    for pairs in &found {
        results.series.extend(series(job.name, wording, pairs));
    }
    outcome
}

/// A JVM with a heap of records.
pub(super) fn jvm(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let compiler = installed(&["javac"], "default-jdk-headless")?;
    let machine = installed(&["java"], "default-jre-headless")?;
    let (directory, files) = scratch(&bench.janitor, "classes")?;
    let source = directory.join("Lookups.java");
    fs::write(&source, LOOKUPS).context("write the Java source")?;
    let log = directory.join("javac.log");
    let mut command = Command::new(compiler);
    command.args(["-nowarn", "-d"]).args([&directory, &source]).stdin(Stdio::null());
    command.stderr(File::create(&log).context("make javac's log")?);
    let mut compiling = Subject::spawn(&bench.janitor, &mut command)?;
    if !compiling.wait(COMPILE_PATIENCE, || Ok(())).context("wait for javac")?.success() {
        bail!("javac: {}", last_line(&log));
    }
    let (records, heap) = if bench.quick { ("60000", "128m") } else { ("550000", "800m") };
    // A fixed size, and a young generation that garbage of single requests
    // fits in: what is measured is the heap's records, not its growth.
    let young = if bench.quick { "-Xmn16m" } else { "-Xmn64m" };
    let data_bytes = if bench.quick { 128 << 20 } else { 800 << 20 };
    // Left to itself a JVM takes another collector under the rival's limit than
    // without one. G1 marks the whole heap now and then, so a window has to be
    // long, or chance decides whether there is a mark in it.
    let [warmup, seconds] = bench.times();
    let g1_seconds = if bench.quick { seconds } else { "30" };
    for (name, collector, seconds) in
        [("jvm", "-XX:+UseSerialGC", seconds), ("jvm-g1", "-XX:+UseG1GC", g1_seconds)]
    {
        let mut line: Vec<OsString> = vec![(&machine).into()];
        line.extend([format!("-Xms{heap}"), format!("-Xmx{heap}")].map(OsString::from));
        line.extend([young, collector, "-cp"].map(OsString::from));
        line.push((&directory).into());
        line.extend(["Lookups", records, warmup, seconds].map(OsString::from));
        let job = Job { name, line, data_bytes };
        gated(bench, results, &job, &per("lookups/s", "µs/lookup"))?;
    }
    files.undo()
}

/// CPython with dicts and lists.
pub(super) fn cpython(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let python = installed(&["python3"], "python3")?;
    let (directory, files) = scratch(&bench.janitor, "analytics")?;
    let source = directory.join("analytics.py");
    fs::write(&source, ANALYTICS).context("write the Python source")?;
    let orders = if bench.quick { "120000" } else { "620000" };
    let mut line: Vec<OsString> = vec![python.into(), source.into(), orders.into()];
    line.extend(bench.times().map(OsString::from));
    let data_bytes = if bench.quick { 96 << 20 } else { 448 << 20 };
    let job = Job { name: "cpython", line, data_bytes };
    gated(bench, results, &job, &per("rounds/s", "µs/round"))?;
    files.undo()
}

/// `strata-lab walk …`, warming up and measured for so many seconds.
fn walk([warmup, seconds]: [&str; 2], what: &[&str], size_bytes: u64) -> Result<Vec<OsString>> {
    let program = std::env::current_exe().context("find this program")?;
    let size = format!("{size_bytes} bytes");
    let options = ["--size", &size, "--warmup", warmup, "--seconds", seconds, "--gated"];
    let mut line: Vec<OsString> = vec![program.into(), "walk".into()];
    line.extend(what.iter().chain(&options).map(OsString::from));
    Ok(line)
}

/// Random walks and searches in a graph.
pub(super) fn graph(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let data_bytes = if bench.quick { 64 << 20 } else { 600 << 20 };
    let line = walk(bench.times(), &["graph"], data_bytes)?;
    let job = Job { name: "graph", line, data_bytes };
    gated(bench, results, &job, &per("vertices/s", "µs/vertex"))
}

/// Sweeps over a matrix.
pub(super) fn matrix(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let data_bytes = if bench.quick { 64 << 20 } else { 512 << 20 };
    let line = walk(bench.times(), &["matrix"], data_bytes)?;
    let job = Job { name: "matrix", line, data_bytes };
    gated(bench, results, &job, &per("pages/s", "µs/page"))
}

/// A database with a buffer pool.
pub(super) fn mariadb(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let database = mariadb::Database::prepare(bench)?;
    let mut found = mariadb::PHASES.map(|phase| (phase, Pairs::all()));
    let outcome: Result<()> = bench.repetitions().try_for_each(|_| {
        let mut one = |setup: Setup, what: &str| -> Result<Vec<Figures>> {
            let figures = database.trial(bench, setup, &format!("mariadb: {what}"))?;
            for one in &figures {
                results.raw.push(serde_json::to_value(one)?);
            }
            Ok(figures)
        };
        let native = one(Setup::DramOnly, "native")?;
        let peak_bytes = native.iter().map(|one| one.cost.peak_total_bytes).max().unwrap_or(0);
        for (place, share) in SHARES.iter().enumerate() {
            let resident_limit_bytes = peak_bytes * share / 100;
            let zram = one(Setup::Zram { resident_limit_bytes }, &format!("zram {share} %"))?;
            let total_bytes: u64 = zram.iter().map(|one| one.cost.memory.total_bytes()).sum();
            let budget = Setup::Strata { dram_bytes: total_bytes / zram.len().max(1) as u64 };
            let strata = one(budget, &format!("Strata beside zram {share} %"))?;
            let turns = native.iter().cloned().zip(zram).zip(strata);
            for ((_, pairs), ((native, zram), strata)) in found.iter_mut().zip(turns) {
                pairs[place].push(native, zram, strata);
            }
        }
        Ok(())
    });
    for (phase, pairs) in &found {
        for pairs in pairs {
            let name = format!("mariadb {}", phase.title);
            results.series.extend(series(&name, &per("transactions/s", "µs/transaction"), pairs));
        }
    }
    outcome?;
    database.remove()
}

/// Threads that fault at the same time in one process, in memory twice its
/// budget.
pub(super) fn threads(bench: &Bench, results: &mut PartResults) -> Result<()> {
    const COUNTS: [&str; 4] = ["1", "2", "4", "8"];
    let data_bytes: u64 = if bench.quick { 64 << 20 } else { 512 << 20 };
    let setups = [
        ("Strata", Setup::Strata { dram_bytes: data_bytes / 2 }),
        // With what does not fit shrunk 2.6-fold, about half in total, too.
        ("zram", Setup::Zram { resident_limit_bytes: data_bytes * 19 / 100 }),
    ];
    // By setup, then by count.
    let mut found = setups.map(|_| COUNTS.map(|_| Vec::<Faulting>::new()));
    let outcome: Result<()> = bench.repetitions().try_for_each(|_| {
        let mut turn = setups.map(|_| Vec::new());
        for count in COUNTS {
            let line = walk(bench.times(), &["threads", "--threads", count], data_bytes)?;
            let job = Job { name: "threads", line, data_bytes };
            for ((name, setup), turn) in setups.iter().zip(&mut turn) {
                let what = format!("threads: {name}, {count}");
                let faulting = Faulting::of(bench.program(*setup, &what, &job)?)?;
                results.raw.push(serde_json::json!({
                    "threads": count, "fault_p50_us": faulting.p50_us,
                    "fault_p99_us": faulting.p99_us, "figures": faulting.figures,
                }));
                turn.push(faulting);
            }
        }
        for (found, turn) in found.iter_mut().zip(turn) {
            for (found, faulting) in found.iter_mut().zip(turn) {
                found.push(faulting);
            }
        }
        Ok(())
    });
    let side = |name: &str, faulting: &[Faulting], of: OfFaulting| Side {
        name: name.to_owned(),
        samples: faulting.iter().map(of).collect(),
    };
    let figures: [(&str, &str, OfFaulting); 8] = [
        ("faults", "/s", |f| f.figures.cost.faults_per_second),
        ("reads", "/s", |f| f.figures.operations_per_second),
        ("fault p50", "µs", |f| f.p50_us),
        ("fault p99", "µs", |f| f.p99_us),
        ("CPU of program and daemon", "µs/read", |f| f.figures.cost.program_cpu_us_per_op),
        ("CPU of the machine", "µs/read", |f| f.figures.cost.machine_cpu_us_per_op),
        ("resident", "MiB", |f| f.figures.cost.memory.resident_bytes as f64 / MIB),
        ("DRAM in total", "MiB", |f| f.figures.cost.memory.total_bytes() as f64 / MIB),
    ];
    let [strata, zram] = &found;
    for (place, count) in COUNTS.iter().enumerate() {
        results.series.extend(figures.iter().map(|(figure, unit, of)| Series {
            name: format!("{count} threads: {figure}"),
            unit: (*unit).to_owned(),
            left: side("Strata", &strata[place], *of),
            right: Some(side("zram", &zram[place], *of)),
        }));
    }
    for ((name, _), found) in setups.iter().zip(&found) {
        for (place, count) in COUNTS.iter().enumerate().skip(1) {
            results.series.push(Series {
                name: format!("{name}, {count} threads against 1: faults"),
                unit: "/s".to_owned(),
                left: side(count, &found[place], figures[0].2),
                right: Some(side("1", &found[0], figures[0].2)),
            });
        }
    }
    outcome
}

type OfFaulting = fn(&Faulting) -> f64;

/// A trial of reading threads, with the latency of those reads that faulted.
struct Faulting {
    figures: Figures,
    p50_us: f64,
    p99_us: f64,
}

impl Faulting {
    fn of(trial: Trial) -> Result<Self> {
        let Trial { figures, work } = trial;
        if figures.cost.faults == 0 {
            bail!("no page was ever missing: the budget did not bind");
        }
        // A read that faults takes longer than any that does not: as many of
        // the longest as there were faults.
        let quantile = |share: f64| longest_us(&work.latencies, figures.cost.faults, share);
        Ok(Self { p50_us: quantile(0.5), p99_us: quantile(0.99), figures })
    }
}

/// The quantile of the `count` largest of some latencies, in microseconds.
/// `latencies`: nanoseconds and how often, ascending.
fn longest_us(latencies: &[(f64, u64)], count: u64, share: f64) -> f64 {
    let total: u64 = latencies.iter().map(|(_, times)| times).sum();
    let longest = count.min(total);
    let rank = (total - longest) + ((longest as f64 * share).ceil() as u64).max(1);
    let mut seen = 0;
    for (nanoseconds, times) in latencies {
        seen += times;
        if seen >= rank {
            return nanoseconds / 1000.0;
        }
    }
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_agree_as_far_as_both_got() {
        let rounds = |text: &str| text.chars().map(String::from).collect::<Vec<_>>();
        let mut agreement = Agreement::default();
        agreement.check(&rounds("abc"), "first").expect("nothing to compare with");
        agreement.check(&rounds("ab"), "slower").expect("the same");
        agreement.check(&rounds("abcde"), "faster").expect("the same");
        let error = agreement.check(&rounds("abcdX"), "damaged").expect_err("differs");
        assert!(error.to_string().contains("round 4"), "{error}");
        assert!(agreement.check(&[], "nothing").is_err());
    }

    #[test]
    fn faults_are_the_longest_reads() {
        let latencies = [(100.0, 90), (5000.0, 8), (40_000.0, 2)];
        assert_eq!(longest_us(&latencies, 10, 0.5), 5.0);
        assert_eq!(longest_us(&latencies, 10, 0.99), 40.0);
        assert_eq!(longest_us(&latencies, 100, 0.5), 0.1);
        assert_eq!(longest_us(&[], 10, 0.5), 0.0);
    }

    #[test]
    fn what_is_missing_is_said_with_its_package() {
        assert!(installed(&["no-such-program", "sh"], "dash").is_ok());
        let error = installed(&["no-such-program"], "no-package").expect_err("missing");
        assert!(error.to_string().contains("apt-get install no-package"), "{error}");
    }
}
