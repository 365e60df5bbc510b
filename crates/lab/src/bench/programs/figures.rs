//! What one trial of a program that is not Redis gives. The program itself is in
//! `run.rs` or, for the database, in `mariadb.rs`.

use crate::{
    meter::{self, Cost, Meter, Window},
    stage::Setup,
};
use serde::Serialize;

/// What a program did in the measured time, as it or its client says.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Done {
    pub operations: u64,
    pub seconds: f64,
    pub p50_us: Option<f64>,
    pub p99_us: f64,
}

/// Everything measured in one trial's measured time.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figures {
    pub program: String,
    pub setup: Setup,
    pub done: Done,
    pub operations_per_second: f64,
    #[serde(flatten)]
    pub cost: Cost,
    /// Earlier attempts that the kernel's OOM killer ended.
    pub oom_kills: u32,
}

impl Figures {
    /// `client_cpu_ns`: of a client that is a process of its own.
    pub(super) fn new(
        program: &str,
        setup: Setup,
        meter: &Meter<'_>,
        window: &Window,
        (done, client_cpu_ns): (Done, u64),
    ) -> Self {
        let Done { operations, seconds, .. } = done;
        let cost = meter.cost(window, meter::Done { operations, seconds, client_cpu_ns });
        if let Some(note) = cost.budget_note(setup) {
            eprintln!("  {program}: {note}");
        }
        Self {
            program: program.to_owned(),
            setup,
            done,
            operations_per_second: operations as f64 / seconds,
            cost,
            oom_kills: 0,
        }
    }
}
