//! Where a handler wakes: on the CPU of the thread that faults, which stands still
//! until it is served. To wake another CPU takes longer than to serve a fault.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_sys::{Process, pin_current_thread};

use crate::fault::events::Asker;
use crate::tenant::space::{NO_CPU, Space};

/// How often to look where the faulting thread runs.
const FOLLOW_EVERY: Duration = Duration::from_millis(4);
/// Looking takes one part of the time at most, and serving so many.
const SHARE: u32 = 50;

/// Which CPU this handler should wake on.
#[derive(Debug)]
pub(super) struct Follow {
    due: Instant,
    cpu: Option<u32>,
    /// Where no message says which thread faults: how often each had, by its number.
    had: Vec<(u32, u64)>,
}

impl Follow {
    pub(super) fn new() -> Self {
        Self { due: Instant::now(), cpu: None, had: Vec::new() }
    }

    /// Moves this thread beside the one that faults.
    pub(super) fn beside(&mut self, space: &Space, asker: Asker, now: Instant) {
        if now < self.due {
            return;
        }
        let Some(process) = space.process() else { return };
        let named = match asker {
            Asker::Thread(tid) => process.thread_cpu(tid),
            Asker::Unnamed | Asker::Seen => None,
        };
        // A thread in a container has a number there that is not its number here.
        let cpu = named.or_else(|| self.busiest(&process));
        if cpu.is_some() && cpu != self.cpu {
            self.cpu = cpu;
            pin_current_thread(cpu.unwrap_or(0));
            space.handler_cpu.store(cpu.unwrap_or(NO_CPU), Ordering::Relaxed);
        }
        self.due = now + FOLLOW_EVERY.max(now.elapsed() * SHARE);
    }

    /// The CPU of the thread that has faulted most since the last look.
    fn busiest(&mut self, process: &Process) -> Option<u32> {
        let threads = process.thread_faults();
        let before = |tid| self.had.iter().find(|had| had.0 == tid).map_or(0, |had| had.1);
        let faulted = |tid, faults: u64| faults.saturating_sub(before(tid));
        let most = threads.iter().max_by_key(|thread| faulted(thread.tid, thread.faults))?.cpu;
        self.had = threads.iter().map(|thread| (thread.tid, thread.faults)).collect();
        Some(most)
    }
}
