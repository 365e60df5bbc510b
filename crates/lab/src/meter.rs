//! What a program costs in its surroundings: looked at now and then from its start
//! on, and in particular around the measured time.

use crate::{
    process,
    stage::{Counters, MemoryUse, Sample, Setup, Surroundings},
};
use anyhow::{Context, Result};
use serde::Serialize;
use std::time::{Duration, Instant};
use strata_api::Stats;

/// Asking `strata stats` costs a process: often enough to see a peak, seldom
/// enough not to be seen itself.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// A budget may be exceeded by the larger of 2 % and this.
const ALLOWANCE_BYTES: u64 = 16 << 20;

/// What the measured time cost.
#[derive(Clone, Default, Debug, Serialize)]
pub(crate) struct Cost {
    /// CPU time of the program and, with Strata, of its daemon, per operation.
    pub program_cpu_us_per_op: f64,
    /// Part of it that is Strata's daemon.
    pub daemon_cpu_us_per_op: f64,
    /// CPU time of the whole machine but the client: kernel threads too, and
    /// whatever else ran.
    pub machine_cpu_us_per_op: f64,
    /// Share of the machine's CPU time in the window that went to none of these:
    /// kernel threads, and whatever else ran.
    pub other_cpu_share: f64,
    /// Pages brought back: swap-ins, or faults served by Strata.
    pub faults: u64,
    pub faults_per_second: f64,
    pub misses_per_op: f64,
    /// Part of them that Strata served without decompression.
    pub soft_misses_per_op: f64,
    /// Mean over the measured time.
    pub memory: MemoryUse,
    /// Largest total seen from the start of the load on.
    pub peak_total_bytes: u64,
    /// Mean of the program's anonymous memory in DRAM as the kernel counts it,
    /// beside what the setup itself says.
    pub kernel_resident_bytes: u64,
    /// Mean of the daemon's own memory (anonymous and memfd) as the kernel
    /// counts it; 0 without one.
    pub daemon_memory_bytes: u64,
    /// Strata's own statistics at the end of the measured time.
    pub strata: Option<Stats>,
}

/// What was done in the measured time.
#[derive(Clone, Copy)]
pub(crate) struct Done {
    pub operations: u64,
    pub seconds: f64,
    /// CPU time of a client that is a process of its own.
    pub client_cpu_ns: u64,
}

/// Looks at a program.
pub(crate) struct Meter<'a> {
    around: &'a Surroundings,
    pid: u32,
    last: Option<Instant>,
    peak_total_bytes: u64,
    measured: Vec<Sample>,
    begin: Option<Counters>,
}

/// Both ends of the measured time.
pub(crate) struct Window {
    begin: Counters,
    end: Counters,
}

impl<'a> Meter<'a> {
    pub(crate) const fn new(around: &'a Surroundings, pid: u32) -> Self {
        Self { around, pid, last: None, peak_total_bytes: 0, measured: Vec::new(), begin: None }
    }

    /// To be called often: takes a sample when one is due.
    pub(crate) fn tick(&mut self) -> Result<()> {
        if self.last.is_none_or(|last| last.elapsed() >= SAMPLE_INTERVAL) {
            self.sample()?;
        }
        Ok(())
    }

    fn sample(&mut self) -> Result<()> {
        let sample = self.around.sample(self.pid).context("observe the program")?;
        self.peak_total_bytes = self.peak_total_bytes.max(sample.memory.total_bytes());
        if self.begin.is_some() {
            self.measured.push(sample);
        }
        self.last = Some(Instant::now());
        Ok(())
    }

    /// The measured time begins.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.measured.clear();
        self.begin = Some(self.around.counters(self.pid).context("observe the program")?);
        Ok(())
    }

    /// It is over: the counters of the end, to be asked for at once.
    pub(crate) fn end(&mut self) -> Result<Window> {
        let end = self.around.counters(self.pid).context("observe the program")?;
        self.sample()?;
        let begin = self.begin.take().context("the measured time never began")?;
        Ok(Window { begin, end })
    }

    /// Samples of the measured time.
    pub(crate) fn measured(&self) -> &[Sample] {
        &self.measured
    }

    /// What it comes to.
    pub(crate) fn cost(&self, window: &Window, done: Done) -> Cost {
        let per_op = |spent_ns: f64| spent_ns / 1e3 / done.operations.max(1) as f64;
        let count_per_op = |count: u64| count as f64 / done.operations.max(1) as f64;
        let mean = |of: fn(&Sample) -> u64| {
            self.measured.iter().map(of).sum::<u64>() / self.measured.len().max(1) as u64
        };
        let program_ns = window.spent(|counters| counters.program_cpu_ns) as f64;
        let daemon_ns = window.spent(|counters| counters.daemon_cpu_ns) as f64;
        let client_ns =
            window.spent(|counters| counters.client_cpu_ns) as f64 + done.client_cpu_ns as f64;
        let machine_ns = window.spent(|counters| counters.machine_cpu_ns) as f64;
        // Not what this thread may use: it is pinned while it measures.
        let cores = process::machine_cores() as f64;
        // Counted in ticks, the parts can be more than the whole.
        let other_ns = (machine_ns - program_ns - daemon_ns - client_ns).max(0.0);
        let faults = window.spent(|counters| counters.faults);
        Cost {
            program_cpu_us_per_op: per_op(program_ns + daemon_ns),
            daemon_cpu_us_per_op: per_op(daemon_ns),
            machine_cpu_us_per_op: per_op(machine_ns - client_ns),
            other_cpu_share: (other_ns / (done.seconds * cores * 1e9)).min(1.0),
            faults,
            faults_per_second: faults as f64 / done.seconds,
            misses_per_op: count_per_op(faults),
            soft_misses_per_op: count_per_op(window.spent(|counters| counters.soft_faults)),
            memory: MemoryUse {
                resident_bytes: mean(|sample| sample.memory.resident_bytes),
                compressed_bytes: mean(|sample| sample.memory.compressed_bytes),
                metadata_bytes: mean(|sample| sample.memory.metadata_bytes),
                stored_bytes: mean(|sample| sample.memory.stored_bytes),
            },
            peak_total_bytes: self.peak_total_bytes,
            kernel_resident_bytes: mean(|sample| sample.kernel_resident_bytes),
            daemon_memory_bytes: mean(|sample| sample.daemon_bytes),
            strata: self.measured.last().and_then(|sample| sample.stats.clone()),
        }
    }
}

impl Window {
    /// By how much something has grown.
    fn spent(&self, of: fn(&Counters) -> u64) -> u64 {
        // Saturating: a worker that died and was replaced takes its counts along.
        of(&self.end).saturating_sub(of(&self.begin))
    }
}

impl Cost {
    /// What to say when Strata took more DRAM than its budget and allowance,
    /// by its own account or by the kernel's.
    pub(crate) fn budget_note(&self, setup: Setup) -> Option<String> {
        let Setup::Strata { dram_bytes } = setup else { return None };
        let allowed_bytes = dram_bytes + (dram_bytes / 50).max(ALLOWANCE_BYTES);
        let budget_mib = dram_bytes >> 20;
        if self.peak_total_bytes > allowed_bytes {
            let peak_mib = self.peak_total_bytes >> 20;
            Some(format!("over its budget of {budget_mib} MiB: {peak_mib} MiB at its peak"))
        } else if self.kernel_resident_bytes + self.daemon_memory_bytes > allowed_bytes {
            Some(format!(
                "over its budget of {budget_mib} MiB as the kernel counts: {} MiB in the server, \
                 {} MiB in the daemon",
                self.kernel_resident_bytes >> 20,
                self.daemon_memory_bytes >> 20
            ))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_kept_within_its_allowance() {
        const MIB: u64 = 1 << 20;
        let note = |dram: u64, peak: u64, server: u64, daemon: u64| {
            let cost = Cost {
                peak_total_bytes: peak * MIB,
                kernel_resident_bytes: server * MIB,
                daemon_memory_bytes: daemon * MIB,
                ..Cost::default()
            };
            cost.budget_note(Setup::Strata { dram_bytes: dram * MIB })
        };
        assert_eq!(note(100, 116, 60, 56), None);
        let peak = note(100, 117, 0, 0).expect("over");
        assert!(peak.contains("117 MiB at its peak"), "{peak}");
        let outside = note(100, 90, 70, 47).expect("over");
        assert!(outside.contains("70 MiB in the server"), "{outside}");
        // Of a large budget 2 % are more.
        assert_eq!(note(2000, 2040, 0, 0), None);
        assert!(note(2000, 2041, 0, 0).is_some());
    }
}
