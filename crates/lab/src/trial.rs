//! One trial: a Redis server in one setup, loaded, driven and verified, with
//! everything about it that is compared later. The demo and the bench are made
//! of trials.

use crate::{
    janitor::Janitor,
    keys::Pattern,
    memtierd::Tool,
    meter::{Cost, Done, Meter, Window},
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
    stage::{Sample, Setup, Stage},
};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

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
    #[serde(flatten)]
    pub cost: Cost,
    /// What else is to be said of the store.
    pub store_note: Option<String>,
    /// Earlier attempts at this trial in which the kernel's OOM killer ended
    /// the server under the rival's limit.
    pub oom_kills: u32,
}

/// Watches a stage while the client works.
struct Watch<'a> {
    meter: Meter<'a>,
    progress: &'a Progress,
    window: Option<Window>,
    problem: Option<anyhow::Error>,
    rate: (Instant, u64),
}

impl<'a> Watch<'a> {
    fn new(stage: &'a Stage, progress: &'a Progress) -> Self {
        let rate = (Instant::now(), 0);
        Self { meter: stage.meter(), progress, window: None, problem: None, rate }
    }

    fn part(&mut self, what: &str) {
        self.progress.part(what);
        self.rate = (Instant::now(), 0);
    }

    fn tell(&mut self, moment: Moment) {
        let looked = match moment {
            Moment::Tick { done, operations } => {
                let seconds = self.rate.0.elapsed().as_secs_f64().max(0.001);
                let rate = operations as f64 / seconds / 1000.0;
                self.progress.set(done, format!("{rate:.0}k ops/s"));
                self.meter.tick()
            }
            Moment::MeasureBegins => self.meter.begin(),
            Moment::MeasureEnds => self.meter.end().map(|window| self.window = Some(window)),
        };
        if let Err(error) = looked {
            self.problem = Some(error);
        }
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
    let window = watch.window.context("nothing was sampled in the measured time")?;
    let problem = |of: fn(&Sample) -> Option<String>| watch.meter.measured().iter().find_map(of);
    if let Some(problem) = problem(Sample::intruder).or_else(|| problem(Sample::unmanaged)) {
        bail!("{problem}");
    }
    let done = Done { operations: run.operations, seconds: run.seconds, client_cpu_ns: 0 };
    let cost = watch.meter.cost(&window, done);
    Ok(TrialResult { setup, load, run, verify, cost, store_note: stage.note(), oom_kills: 0 })
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
            cost: Cost {
                program_cpu_us_per_op: 3.0,
                machine_cpu_us_per_op: 3.5,
                ..Cost::default()
            },
            store_note: None,
            oom_kills: 0,
        }
    }
}
