//! Work that can wait gives way to the tenant, which runs meanwhile: an eighth of
//! a CPU as long as the machine has none to spare, else all of one.

use std::time::{Duration, Instant};

use strata_sys::{idle_time, thread_time};

/// Work takes one part of the time, and rests so many.
const REST: u32 = 7;
/// Shorter than this the kernel's count of idle time says nothing.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Whether the machine has a CPU to spare.
#[derive(Debug)]
pub(crate) struct Machine {
    looked: Instant,
    /// How long its CPUs had been idle then.
    idle: Option<Duration>,
    spare: bool,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self { looked: Instant::now(), idle: idle_time(), spare: false }
    }

    /// Whether half a CPU or more was idle lately.
    pub(crate) fn has_spare(&mut self) -> bool {
        let since = self.looked.elapsed();
        if since >= LOOK_EVERY {
            let idle = idle_time();
            let rested = idle.zip(self.idle).map(|(now, then)| now.saturating_sub(then));
            self.spare = rested.is_some_and(|rested| rested * 2 >= since);
            self.idle = idle;
            self.looked = Instant::now();
        }
        self.spare
    }
}

/// When to go on with some work.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    due: Option<Instant>,
}

impl Pace {
    pub(crate) fn is_due(self) -> bool {
        self.rest().is_zero()
    }

    /// How long there is nothing to do.
    pub(crate) fn rest(self) -> Duration {
        self.due.map_or(Duration::ZERO, |due| due.saturating_duration_since(Instant::now()))
    }

    /// Some was done, which took from `began` on, by [`thread_time`]; `hurries`: no
    /// rest.
    pub(crate) fn worked(&mut self, began: Duration, hurries: bool) {
        let rest = if hurries { Duration::ZERO } else { (thread_time() - began) * REST };
        self.due = Some(Instant::now() + rest);
    }
}
