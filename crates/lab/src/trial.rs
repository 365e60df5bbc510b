//! One trial: a Redis server in one setup, loaded, driven and verified, with
//! everything about it that is compared later. The demo and the bench are made
//! of trials.

use crate::{
    cgroup::Group,
    janitor::Janitor,
    keys::Pattern,
    process,
    progress::Progress,
    random::mix,
    records::Records,
    redis::{
        expect::Expect,
        load::{Client, Moment, Outcome, Pass, Workload},
        server::{Server, Wrapping},
    },
    strata::{self, Strata},
    zram::{Stored, Zram},
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

/// What the server has to live in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Setup {
    /// All the DRAM it wants, nothing in between.
    DramOnly,
    /// A limit on resident memory; the rest in zram (lz4), whose own cost is
    /// not counted against the limit.
    Zram { resident_limit_bytes: u64 },
    /// A Strata budget: everything counts.
    Strata { dram_bytes: u64 },
}

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
        })
    }

    /// For trying things out: figures of this are not to be quoted.
    pub(crate) fn shorten(&mut self) {
        self.records /= 8;
        self.workload.warmup = Duration::from_secs(1);
        self.workload.duration = Duration::from_secs(3);
    }
}

/// What a server costs in DRAM, in bytes.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct MemoryUse {
    /// Its anonymous memory in DRAM.
    pub resident_bytes: u64,
    /// What the compressed store costs, fragmentation included.
    pub compressed_bytes: u64,
    /// Page map, object table and indexes (zram's are not to be had).
    pub metadata_bytes: u64,
    /// Original size of what is stored.
    pub stored_bytes: u64,
}

impl MemoryUse {
    pub(crate) const fn total_bytes(&self) -> u64 {
        self.resident_bytes + self.compressed_bytes + self.metadata_bytes
    }

    /// Original to stored; none when nothing is stored.
    pub(crate) fn ratio(&self) -> Option<f64> {
        (self.stored_bytes > 0 && self.compressed_bytes > 0)
            .then(|| self.stored_bytes as f64 / self.compressed_bytes as f64)
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
    /// Pages brought back per second: swap-ins, or faults served by Strata.
    pub faults_per_second: f64,
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

/// The surroundings of one server. Fields drop in this order.
struct Stage {
    server: Server,
    group: Option<Group>,
    zram: Option<Zram>,
    strata: Option<(Strata, String)>,
}

impl Stage {
    fn start(janitor: &Janitor, setup: Setup, name: &str, plan: &Plan) -> Result<Self> {
        let mut wrapping = Wrapping::default();
        let (mut group, mut zram, mut strata) = (None, None, None);
        match setup {
            Setup::DramOnly => {}
            Setup::Zram { resident_limit_bytes } => {
                // Several times what can come: the device must never be full,
                // and its size costs nothing until it is used.
                let disk_bytes = (plan.records * 8192).max(256 << 20);
                zram = Some(Zram::start(janitor, "lz4", disk_bytes).context("zram")?);
                let group_name = format!("strata-lab-{}", std::process::id());
                let made = Group::create(janitor, &group_name, resident_limit_bytes)?;
                wrapping.prefix = made.wrap(&[]);
                group = Some(made);
            }
            Setup::Strata { dram_bytes } => {
                let daemon = Strata::start(janitor, &plan.binaries).context("Strata")?;
                let tenant = format!("{name}-{}", std::process::id());
                wrapping = daemon.wrapping(&tenant, dram_bytes);
                strata = Some((daemon, tenant));
            }
        }
        let server = Server::start(janitor, name, &wrapping, plan.server_core)?;
        Ok(Self { server, group, zram, strata })
    }

    fn stop(self) -> Result<()> {
        self.server.stop()?;
        self.group.map_or(Ok(()), Group::remove)?;
        self.zram.map_or(Ok(()), Zram::stop)?;
        self.strata.map_or(Ok(()), |(strata, _)| strata.stop())
    }

    fn sample(&self) -> Result<Sample> {
        let kernel = process::memory(self.server.pid());
        let mut sample = Sample {
            memory: MemoryUse { resident_bytes: kernel.anonymous_bytes, ..MemoryUse::default() },
            kernel_resident_bytes: kernel.anonymous_bytes,
            ..Sample::default()
        };
        if let Some(zram) = &self.zram {
            let Stored { original_bytes, used_bytes, .. } = zram.stored();
            sample.memory.compressed_bytes = used_bytes;
            sample.memory.stored_bytes = original_bytes;
        }
        if let Some((strata, tenant)) = &self.strata {
            let stats = strata.stats(tenant)?;
            sample.memory = MemoryUse {
                resident_bytes: stats.resident_bytes + stats.unmanaged_bytes,
                compressed_bytes: stats.compressed_bytes,
                metadata_bytes: stats.metadata_bytes,
                stored_bytes: stats.stored_bytes,
            };
            debug_assert_eq!(sample.memory.total_bytes(), strata::total_bytes(&stats));
            sample.daemon_bytes = strata
                .pids()
                .into_iter()
                .map(process::memory)
                .map(|memory| memory.anonymous_bytes + memory.shared_bytes)
                .max()
                .unwrap_or(0);
            sample.stats = Some(stats);
        }
        Ok(sample)
    }

    fn counters(&self) -> Counters {
        let server = process::times(self.server.pid()).unwrap_or_default();
        let daemon_cpu_ns = self.strata.as_ref().map_or(0, |(strata, _)| {
            strata.pids().into_iter().filter_map(process::times).map(|times| times.cpu_ns).sum()
        });
        let faults = match &self.strata {
            Some((strata, tenant)) => strata.stats(tenant).map_or(0, |stats| stats.faults_total),
            None => server.major_faults,
        };
        Counters {
            server_cpu_ns: server.cpu_ns,
            daemon_cpu_ns,
            client_cpu_ns: process::times(std::process::id()).unwrap_or_default().cpu_ns,
            machine_cpu_ns: process::machine_busy_ns(),
            faults,
        }
    }
}

#[derive(Clone, Default)]
struct Sample {
    memory: MemoryUse,
    kernel_resident_bytes: u64,
    daemon_bytes: u64,
    stats: Option<strata_api::Stats>,
}

#[derive(Clone, Copy, Default)]
struct Counters {
    server_cpu_ns: u64,
    daemon_cpu_ns: u64,
    client_cpu_ns: u64,
    machine_cpu_ns: u64,
    faults: u64,
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
    let result = drive(&stage, setup, plan, progress);
    if plan.client_core.is_some() {
        process::unpin_self(&cores)?;
    }
    let died = !stage.server.is_running();
    let oom_killed = stage.group.as_ref().is_some_and(|group| group.oom_kills() > 0);
    stage.stop()?;
    match result {
        Ok(result) => Ok(Attempt::Done(Box::new(result))),
        Err(_) if died && oom_killed => Ok(Attempt::OomKilled),
        Err(error) if died => Err(error.context("redis-server died")),
        Err(error) => Err(error),
    }
}

fn drive(stage: &Stage, setup: Setup, plan: &Plan, progress: &Progress) -> Result<TrialResult> {
    let client = Client {
        endpoint: stage.server.endpoint().clone(),
        connections: plan.connections,
        pipeline: plan.pipeline,
        core: plan.client_core,
    };
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
    let per_op = |of: fn(&Counters) -> u64| {
        (of(&watch.end) - of(&watch.begin)) as f64 / 1e3 / run.operations.max(1) as f64
    };
    let daemon = per_op(|counters| counters.daemon_cpu_ns);
    Ok(TrialResult {
        setup,
        load,
        verify,
        server_cpu_us_per_op: per_op(|counters| counters.server_cpu_ns) + daemon,
        daemon_cpu_us_per_op: daemon,
        machine_cpu_us_per_op: per_op(|counters| counters.machine_cpu_ns)
            - per_op(|counters| counters.client_cpu_ns),
        faults_per_second: (watch.end.faults - watch.begin.faults) as f64 / run.seconds,
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
