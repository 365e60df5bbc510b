//! One trial: a Redis server in one setup, loaded, driven and verified, with
//! everything about it that is compared later. The demo and the bench are made
//! of trials.

use crate::{
    janitor::Janitor,
    keys::Pattern,
    memtierd::Tool,
    process,
    progress::Progress,
    random::mix,
    records::Records,
    redis::{
        expect::Expect,
        load::{Client, Moment, Pass, Workload},
        outcome::Outcome,
        tally::WrongValues,
    },
    stage::{Counters, MemoryUse, Sample, Setup, Stage},
};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Asking `strata stats` costs a process: often enough to see a peak, seldom
/// enough not to be seen itself.
const STATS_INTERVAL: Duration = Duration::from_secs(1);

/// What all trials of a comparison share.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub records: u64,
    pub workload: Workload,
    pub connections: usize,
    pub pipeline: usize,
    /// Read every value once more at the end.
    pub verify: bool,
    pub server_core: Option<usize>,
    pub client_core: Option<usize>,
    /// Where `strata` and `stratad` are.
    pub binaries: PathBuf,
    /// For the setup that needs it.
    pub memtierd: Option<Tool>,
}

/// A budget may be exceeded by the larger of 2 % and this.
const ALLOWANCE_BYTES: u64 = 16 << 20;

impl TrialResult {
    /// What to say when Strata took more DRAM than its budget and allowance,
    /// by its own account or by the kernel's.
    pub(crate) fn budget_note(&self) -> Option<String> {
        let Setup::Strata { dram_bytes } = self.setup else { return None };
        over_budget(
            dram_bytes,
            self.peak_total_bytes,
            self.kernel_resident_bytes,
            self.daemon_memory_bytes,
        )
    }
}

/// See [`TrialResult::budget_note`].
pub(crate) fn over_budget(
    dram_bytes: u64,
    peak_bytes: u64,
    server_bytes: u64,
    daemon_bytes: u64,
) -> Option<String> {
    let allowed_bytes = dram_bytes + (dram_bytes / 50).max(ALLOWANCE_BYTES);
    let budget_mib = dram_bytes >> 20;
    if peak_bytes > allowed_bytes {
        let peak_mib = peak_bytes >> 20;
        Some(format!("over its budget of {budget_mib} MiB: {peak_mib} MiB at its peak"))
    } else if server_bytes + daemon_bytes > allowed_bytes {
        Some(format!(
            "over its budget of {budget_mib} MiB as the kernel counts: {} MiB in the server, \
             {} MiB in the daemon",
            server_bytes >> 20,
            daemon_bytes >> 20
        ))
    } else {
        None
    }
}

impl Plan {
    /// The setting of all quoted figures: 800,000 values of 1 KiB, read only, the server on
    /// one core and the client on the other. Binaries: in the given directory,
    /// or beside this program.
    pub(crate) fn standard(binaries: Option<&Path>) -> Result<Self> {
        let (server_core, client_core) = match process::allowed_cores()[..] {
            [first, second, ..] => (Some(first), Some(second)),
            _ => (None, None),
        };
        let binaries = match binaries {
            Some(path) => path.to_owned(),
            None => {
                let program = std::env::current_exe().context("find this program")?;
                program.parent().context("this program lies in a directory")?.to_owned()
            }
        };
        let workload = Workload {
            pattern: Pattern::Uniform,
            reads: 1.0,
            warmup: Duration::from_secs(8),
            warmup_pipeline: 1,
            duration: Duration::from_secs(12),
            seed: 1,
        };
        Ok(Self {
            records: 800_000,
            workload,
            connections: 8,
            pipeline: 16,
            verify: true,
            server_core,
            client_core,
            binaries,
            memtierd: None,
        })
    }

    /// For trying things out: figures of this are not to be quoted.
    pub(crate) fn shorten(&mut self) {
        self.records /= 8;
        self.workload.warmup = Duration::from_secs(1);
        self.workload.duration = Duration::from_secs(3);
    }
}

/// Everything measured in one trial.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrialResult {
    pub setup: Setup,
    pub load: Pass,
    pub run: Outcome,
    pub verify: Option<Pass>,
    /// CPU time of the server and, with Strata, of its daemon, in the measured
    /// time, per operation.
    pub server_cpu_us_per_op: f64,
    /// Part of it that is Strata's daemon.
    pub daemon_cpu_us_per_op: f64,
    /// CPU time of the whole machine but the client: kernel threads too, and
    /// whatever else ran.
    pub machine_cpu_us_per_op: f64,
    /// Share of the machine's CPU time in the window that went to none of these:
    /// kernel threads, and whatever else ran.
    pub other_cpu_share: f64,
    /// Pages brought back per second: swap-ins, or faults served by Strata.
    pub faults_per_second: f64,
    /// The same per operation.
    pub misses_per_op: f64,
    /// Part of them that Strata served without decompression.
    pub soft_misses_per_op: f64,
    /// What else is to be said of the store.
    pub store_note: Option<String>,
    /// Mean over the measured time.
    pub memory: MemoryUse,
    /// Largest total seen from the start of the load to the end of the run.
    pub peak_total_bytes: u64,
    /// Mean of the server's anonymous memory in DRAM as the kernel counts it,
    /// beside what the setup itself says.
    pub kernel_resident_bytes: u64,
    /// Mean of the daemon's own memory (anonymous and memfd) as the kernel
    /// counts it; 0 without one.
    pub daemon_memory_bytes: u64,
    /// Earlier attempts at this trial in which the kernel's OOM killer ended
    /// the server under the rival's limit.
    pub oom_kills: u32,
    /// Strata's own statistics at the end of the run.
    pub strata: Option<strata_api::Stats>,
}

/// Watches a stage while the client works.
struct Watch<'a> {
    stage: &'a Stage,
    progress: &'a Progress,
    last_sample: Option<Instant>,
    peak_total_bytes: u64,
    measuring: bool,
    measured: Vec<Sample>,
    begin: Counters,
    end: Counters,
    problem: Option<anyhow::Error>,
    rate: (Instant, u64),
}

impl<'a> Watch<'a> {
    fn new(stage: &'a Stage, progress: &'a Progress) -> Self {
        Self {
            stage,
            progress,
            last_sample: None,
            peak_total_bytes: 0,
            measuring: false,
            measured: Vec::new(),
            begin: Counters::default(),
            end: Counters::default(),
            problem: None,
            rate: (Instant::now(), 0),
        }
    }

    fn part(&mut self, what: &str) {
        self.progress.part(what);
        self.rate = (Instant::now(), 0);
    }

    fn tell(&mut self, moment: Moment) {
        match moment {
            Moment::Tick { done, operations } => {
                let seconds = self.rate.0.elapsed().as_secs_f64().max(0.001);
                let rate = operations as f64 / seconds / 1000.0;
                self.progress.set(done, format!("{rate:.0}k ops/s"));
                if self.last_sample.is_none_or(|at| at.elapsed() >= STATS_INTERVAL) {
                    self.sample();
                }
            }
            Moment::MeasureBegins => {
                self.begin = self.stage.counters();
                self.measuring = true;
            }
            Moment::MeasureEnds => {
                self.end = self.stage.counters();
                self.sample();
                self.measuring = false;
            }
        }
    }

    fn sample(&mut self) {
        match self.stage.sample() {
            Ok(sample) => {
                self.peak_total_bytes = self.peak_total_bytes.max(sample.memory.total_bytes());
                if self.measuring {
                    self.measured.push(sample);
                }
            }
            Err(error) => self.problem = Some(error),
        }
        self.last_sample = Some(Instant::now());
    }

    fn mean(&self, of: impl Fn(&Sample) -> u64) -> u64 {
        let count = self.measured.len().max(1) as u64;
        self.measured.iter().map(of).sum::<u64>() / count
    }
}

/// Attempts at a trial of the rival: under a tight limit the kernel sometimes
/// kills the server although it could swap. The kills are counted and shown.
const RIVAL_ATTEMPTS: u32 = 3;
/// After a failure: until a server that was killed has gone.
const DEATH_PATIENCE: Duration = Duration::from_secs(2);

/// Runs one trial. Whatever it sets up is gone afterwards, also on an error.
pub(crate) fn run(
    janitor: &Janitor,
    setup: Setup,
    name: &str,
    plan: &Plan,
    progress: &Progress,
) -> Result<TrialResult> {
    let mut oom_kills = 0;
    loop {
        match attempt(janitor, setup, name, plan, progress)? {
            Attempt::Done(result) => return Ok(TrialResult { oom_kills, ..*result }),
            Attempt::OomKilled if oom_kills + 1 < RIVAL_ATTEMPTS => oom_kills += 1,
            Attempt::OomKilled => {
                bail!("the kernel's OOM killer ended redis-server in {RIVAL_ATTEMPTS} attempts")
            }
        }
    }
}

enum Attempt {
    Done(Box<TrialResult>),
    OomKilled,
}

fn attempt(
    janitor: &Janitor,
    setup: Setup,
    name: &str,
    plan: &Plan,
    progress: &Progress,
) -> Result<Attempt> {
    let cores = process::allowed_cores();
    let mut stage = Stage::start(janitor, setup, name, plan)?;
    // Off the server's core; what the stage started was not to inherit this.
    if let Some(core) = plan.client_core {
        process::pin_self(core)?;
    }
    let mut result = drive(&stage, setup, plan, progress);
    if let Err(error) = stage.check_helper() {
        result = Err(error);
    }
    if plan.client_core.is_some() {
        process::unpin_self(&cores)?;
    }
    // Its connections are closed before a killed server can be collected.
    let until = Instant::now() + DEATH_PATIENCE;
    while result.is_err() && stage.is_running() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    let died = !stage.is_running();
    let oom_killed = stage.was_oom_killed();
    stage.stop()?;
    match result {
        Ok(result) => Ok(Attempt::Done(Box::new(result))),
        Err(error) if died && oom_killed && !error.is::<WrongValues>() => Ok(Attempt::OomKilled),
        Err(error) if died => Err(error.context("redis-server died")),
        Err(error) => Err(error),
    }
}

pub(crate) fn client(stage: &Stage, plan: &Plan) -> Client {
    Client {
        endpoint: stage.endpoint().clone(),
        connections: plan.connections,
        pipeline: plan.pipeline,
        core: plan.client_core,
    }
}

fn drive(stage: &Stage, setup: Setup, plan: &Plan, progress: &Progress) -> Result<TrialResult> {
    let client = client(stage, plan);
    let expect = Expect::new(Records::new(mix(plan.workload.seed)), plan.records);
    let mut watch = Watch::new(stage, progress);
    watch.part("loading");
    let load = client.load(&expect, &mut |moment| watch.tell(moment)).context("load")?;
    watch.part("running");
    let run =
        client.run(&plan.workload, &expect, &mut |moment| watch.tell(moment)).context("run")?;
    let verify = if plan.verify {
        watch.part("verifying every value");
        Some(client.verify(&expect, &mut |moment| watch.tell(moment)).context("verify")?)
    } else {
        None
    };
    if let Some(problem) = watch.problem.take() {
        return Err(problem.context("observe the server"));
    }
    let Some(last) = watch.measured.last().cloned() else {
        bail!("nothing was sampled in the measured time");
    };
    if let Some(problem) = watch.measured.iter().find_map(Sample::intruder) {
        bail!("{problem}");
    }
    if let Some(problem) = watch.measured.iter().find_map(Sample::unmanaged) {
        bail!("{problem}");
    }
    // Saturating: a worker that died and was replaced takes its counts along.
    let per_op = |of: fn(&Counters) -> u64| {
        of(&watch.end).saturating_sub(of(&watch.begin)) as f64 / 1e3 / run.operations.max(1) as f64
    };
    let daemon = per_op(|counters| counters.daemon_cpu_ns);
    // Counted in ticks, the parts can be more than the whole.
    let spent = |of: fn(&Counters) -> u64| of(&watch.end).saturating_sub(of(&watch.begin)) as f64;
    let known = |counters: &Counters| {
        counters.server_cpu_ns + counters.daemon_cpu_ns + counters.client_cpu_ns
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let other_ns = (spent(|counters| counters.machine_cpu_ns) - spent(known)).max(0.0);
    let count_per_op = |of: fn(&Counters) -> u64| {
        of(&watch.end).saturating_sub(of(&watch.begin)) as f64 / run.operations.max(1) as f64
    };
    Ok(TrialResult {
        setup,
        load,
        verify,
        server_cpu_us_per_op: per_op(|counters| counters.server_cpu_ns) + daemon,
        daemon_cpu_us_per_op: daemon,
        machine_cpu_us_per_op: per_op(|counters| counters.machine_cpu_ns)
            - per_op(|counters| counters.client_cpu_ns),
        other_cpu_share: (other_ns / (run.seconds * cores * 1e9)).min(1.0),
        faults_per_second: watch.end.faults.saturating_sub(watch.begin.faults) as f64 / run.seconds,
        misses_per_op: count_per_op(|counters| counters.faults),
        soft_misses_per_op: count_per_op(|counters| counters.soft_faults),
        store_note: stage.note(),
        memory: MemoryUse {
            resident_bytes: watch.mean(|sample| sample.memory.resident_bytes),
            compressed_bytes: watch.mean(|sample| sample.memory.compressed_bytes),
            metadata_bytes: watch.mean(|sample| sample.memory.metadata_bytes),
            stored_bytes: watch.mean(|sample| sample.memory.stored_bytes),
        },
        peak_total_bytes: watch.peak_total_bytes,
        kernel_resident_bytes: watch.mean(|sample| sample.kernel_resident_bytes),
        daemon_memory_bytes: watch.mean(|sample| sample.daemon_bytes),
        oom_kills: 0,
        strata: last.stats,
        run,
    })
}

#[cfg(test)]
impl TrialResult {
    /// A result for tests of what is made of results.
    pub(crate) fn example(setup: Setup) -> Self {
        use crate::redis::tally::Tally;
        let pass = Pass { operations: 1, seconds: 1.0, wrong_values: 0, missing_values: 0 };
        let run = Outcome::new(&Tally::default(), Duration::from_secs(1), Vec::new(), None);
        Self {
            setup,
            load: pass,
            run,
            verify: None,
            server_cpu_us_per_op: 3.0,
            daemon_cpu_us_per_op: 0.0,
            machine_cpu_us_per_op: 3.5,
            other_cpu_share: 0.0,
            faults_per_second: 0.0,
            misses_per_op: 0.0,
            soft_misses_per_op: 0.0,
            store_note: None,
            memory: MemoryUse::default(),
            peak_total_bytes: 0,
            kernel_resident_bytes: 0,
            daemon_memory_bytes: 0,
            oom_kills: 0,
            strata: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_held_to_its_allowance() {
        const MIB: u64 = 1 << 20;
        assert_eq!(over_budget(100 * MIB, 116 * MIB, 60 * MIB, 56 * MIB), None);
        let peak = over_budget(100 * MIB, 117 * MIB, 0, 0).expect("over");
        assert!(peak.contains("117 MiB at its peak"), "{peak}");
        let outside = over_budget(100 * MIB, 90 * MIB, 70 * MIB, 47 * MIB).expect("over");
        assert!(outside.contains("as the kernel counts"), "{outside}");
        // Two per cent, where that is more.
        assert_eq!(over_budget(2000 * MIB, 2040 * MIB, 0, 0), None);
        assert!(over_budget(2000 * MIB, 2041 * MIB, 0, 0).is_some());
    }
}
