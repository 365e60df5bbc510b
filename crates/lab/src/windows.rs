//! Two servers side by side, driven in turn in short windows: for differences
//! that are smaller than the machine's drift from one trial to the next.

use crate::{
    janitor::Janitor,
    process,
    progress::Progress,
    random::mix,
    records::Records,
    redis::{
        expect::Expect,
        load::{Moment, Workload},
        outcome::Outcome,
    },
    stage::{Counters, Setup, Stage},
    trial::{Plan, client},
};
use anyhow::{Context, Result};
use serde::Serialize;

/// One window of a server that stands beside another.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Window {
    pub setup: Setup,
    pub run: Outcome,
    /// CPU time of the server and of its daemon, per operation.
    pub server_cpu_us_per_op: f64,
}

/// Two servers side by side, both loaded, driven in turn for one short window
/// each: a pair lies within seconds, so that the machine's drift falls on both.
/// Who goes first alternates.
pub(crate) fn windows(
    janitor: &Janitor,
    setups: [Setup; 2],
    plan: &Plan,
    count: usize,
    progress: &Progress,
) -> Result<Vec<[Window; 2]>> {
    let cores = process::allowed_cores();
    let stages = [
        Stage::start(janitor, setups[0], "left", plan)?,
        Stage::start(janitor, setups[1], "right", plan)?,
    ];
    if let Some(core) = plan.client_core {
        process::pin_self(core)?;
    }
    let result = drive_in_turn(&stages, setups, plan, count, progress);
    if plan.client_core.is_some() {
        process::unpin_self(&cores)?;
    }
    for stage in stages {
        stage.stop()?;
    }
    result
}

fn drive_in_turn(
    stages: &[Stage; 2],
    setups: [Setup; 2],
    plan: &Plan,
    count: usize,
    progress: &Progress,
) -> Result<Vec<[Window; 2]>> {
    let expect = Expect::new(Records::new(mix(plan.workload.seed)), plan.records);
    progress.part("loading");
    for stage in stages {
        client(stage, plan).load(&expect, &mut |_| {}).context("load")?;
    }
    progress.part("running");
    let mut pairs = Vec::with_capacity(count);
    for number in 0..count {
        let window = |side: usize| -> Result<Window> {
            let stage = &stages[side];
            let (mut begin, mut end) = (Counters::default(), Counters::default());
            // Both sides of a pair ask for the same keys.
            let workload = Workload { seed: plan.workload.seed + number as u64, ..plan.workload };
            let run = client(stage, plan)
                .run(&workload, &expect, &mut |moment| match moment {
                    Moment::MeasureBegins => begin = stage.times(),
                    Moment::MeasureEnds => end = stage.times(),
                    Moment::Tick { .. } => {}
                })
                .context("run")?;
            let spent_ns = end.server_cpu_ns + end.daemon_cpu_ns;
            let spent_ns = spent_ns.saturating_sub(begin.server_cpu_ns + begin.daemon_cpu_ns);
            let server_cpu_us_per_op = spent_ns as f64 / 1e3 / run.operations.max(1) as f64;
            Ok(Window { setup: setups[side], run, server_cpu_us_per_op })
        };
        let pair = if number % 2 == 0 {
            let left = window(0)?;
            [left, window(1)?]
        } else {
            let right = window(1)?;
            [window(0)?, right]
        };
        progress.set((number + 1) as f64 / count as f64, String::new());
        pairs.push(pair);
    }
    Ok(pairs)
}
