//! What surrounds a measured program that is not Redis: its limit and swap, or
//! its daemon; and what it costs in there at any moment. The program itself is
//! in `run.rs` or, for the database, in `mariadb.rs`.

use crate::{
    cgroup::Group,
    janitor::Janitor,
    process,
    redis::server::Wrapping,
    stage::{Counters, MemoryUse, Sample, Setup},
    strata::Strata,
    trial,
    zram::Zram,
};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::{
    path::Path,
    time::{Duration, Instant},
};
use strata_api::Stats;

/// Asking `strata stats` costs a process.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// The surroundings of one program. Fields drop in this order.
pub(super) struct Place {
    pub(super) setup: Setup,
    group: Option<Group>,
    zram: Option<Zram>,
    strata: Option<(Strata, String)>,
}

impl Place {
    /// Makes them. `data_bytes`: what the program holds, for the swap's size.
    pub(super) fn make(
        janitor: &Janitor,
        setup: Setup,
        name: &str,
        data_bytes: u64,
        binaries: &Path,
    ) -> Result<(Self, Wrapping)> {
        let mut place = Self { setup, group: None, zram: None, strata: None };
        let mut wrapping = Wrapping::default();
        match setup {
            Setup::DramOnly => {}
            Setup::Zram { resident_limit_bytes } => {
                // The device must never be full, and its size costs nothing
                // until it is used.
                let disk_bytes = (data_bytes * 4).max(256 << 20);
                place.zram = Some(Zram::start(janitor, "lz4", disk_bytes).context("zram")?);
                let group = format!("strata-lab-{}", std::process::id());
                let made = Group::create(janitor, &group, resident_limit_bytes, false)?;
                wrapping.prefix = made.wrapping();
                place.group = Some(made);
            }
            Setup::Zswap { .. } | Setup::Memtierd { .. } => {
                bail!("only Redis is measured on {setup:?}");
            }
            Setup::Strata { dram_bytes } => {
                let daemon = Strata::start(janitor, binaries).context("Strata")?;
                let tenant = format!("{name}-{}", std::process::id());
                wrapping = daemon.wrapping(&tenant, dram_bytes);
                place.strata = Some((daemon, tenant));
            }
        }
        Ok((place, wrapping))
    }

    /// Whether the kernel killed something for the group's limit.
    pub(super) fn was_oom_killed(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.oom_kills() > 0)
    }

    /// Takes everything down, once the program has ended.
    pub(super) fn remove(self) -> Result<()> {
        self.group.map_or(Ok(()), Group::remove)?;
        self.zram.map_or(Ok(()), Zram::stop)?;
        self.strata.map_or(Ok(()), |(strata, _)| strata.stop())
    }

    fn sample(&self, pid: u32) -> Result<Sample> {
        let kernel_resident_bytes = process::memory(pid).anonymous_bytes;
        let resident = MemoryUse { resident_bytes: kernel_resident_bytes, ..MemoryUse::default() };
        let mut sample = Sample { memory: resident, kernel_resident_bytes, ..Sample::default() };
        if let Some(zram) = &self.zram {
            let stored = zram.stored();
            sample.memory.compressed_bytes = stored.used_bytes;
            sample.memory.stored_bytes = stored.original_bytes;
        }
        if let Some((strata, tenant)) = &self.strata {
            strata.sample(tenant, &mut sample)?;
        }
        Ok(sample)
    }

    fn look(&self, pid: u32) -> Result<Look> {
        let program = process::times(pid).unwrap_or_default();
        let mut counters = Counters {
            server_cpu_ns: program.cpu_ns,
            client_cpu_ns: process::times(std::process::id()).unwrap_or_default().cpu_ns,
            machine_cpu_ns: process::machine_busy_ns(),
            faults: program.major_faults,
            daemon_cpu_ns: 0,
            soft_faults: 0,
        };
        if let Some((strata, tenant)) = &self.strata {
            let times = strata.pids().into_iter().filter_map(process::times);
            counters.daemon_cpu_ns = times.map(|times| times.cpu_ns).sum();
            let newest = strata.stats(tenant)?;
            counters.faults = newest.faults_total;
            counters.soft_faults = newest.soft_faults_total;
        }
        Ok(Look { counters })
    }
}

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
    /// CPU time of the program and, with Strata, of its daemon.
    pub program_cpu_us_per_op: f64,
    pub daemon_cpu_us_per_op: f64,
    /// CPU time of the whole machine but the client: kernel threads too, and
    /// whatever else ran.
    pub machine_cpu_us_per_op: f64,
    /// Pages brought back: swap-ins, or faults served by Strata.
    pub faults: u64,
    pub faults_per_second: f64,
    /// Mean over the measured time.
    pub memory: MemoryUse,
    /// Largest total seen from the start of the load on.
    pub peak_total_bytes: u64,
    /// Means as the kernel counts them.
    pub kernel_resident_bytes: u64,
    pub daemon_memory_bytes: u64,
    /// Earlier attempts that the kernel's OOM killer ended.
    pub oom_kills: u32,
    /// Strata's own statistics at the end of the measured time.
    pub strata: Option<Stats>,
}

/// Looks at a place now and then, and in particular around the measured time.
pub(super) struct Meter<'a> {
    place: &'a Place,
    pid: u32,
    last: Option<Instant>,
    peak_total_bytes: u64,
    measured: Vec<Sample>,
    begin: Option<Look>,
}

impl<'a> Meter<'a> {
    pub(super) const fn new(place: &'a Place, pid: u32) -> Self {
        Self { place, pid, last: None, peak_total_bytes: 0, measured: Vec::new(), begin: None }
    }

    /// To be called often: takes a sample when one is due.
    pub(super) fn tick(&mut self) -> Result<()> {
        if self.last.is_none_or(|last| last.elapsed() >= SAMPLE_INTERVAL) {
            self.sample()?;
        }
        Ok(())
    }

    fn sample(&mut self) -> Result<()> {
        let sample = self.place.sample(self.pid).context("observe the program")?;
        self.peak_total_bytes = self.peak_total_bytes.max(sample.memory.total_bytes());
        if self.begin.is_some() {
            self.measured.push(sample);
        }
        self.last = Some(Instant::now());
        Ok(())
    }

    /// The measured time begins.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.measured.clear();
        self.begin = Some(self.place.look(self.pid).context("observe the program")?);
        Ok(())
    }

    /// It is over: the counters of the end, to be asked for at once.
    pub(super) fn end(&mut self) -> Result<Window> {
        let end = self.place.look(self.pid).context("observe the program")?;
        self.sample()?;
        let begin = self.begin.take().context("the measured time never began")?;
        Ok(Window { begin, end })
    }

    /// What it comes to. `client_cpu_ns`: of a client that is a process of its
    /// own, in the measured time.
    pub(super) fn figures(
        &self,
        program: &str,
        window: &Window,
        done: Done,
        client_cpu_ns: u64,
    ) -> Figures {
        let spent = |of: fn(&Counters) -> u64| window.of(|look| of(&look.counters)) as f64;
        let per_op = |spent_ns: f64| spent_ns / 1e3 / done.operations.max(1) as f64;
        let daemon_cpu_us_per_op = per_op(spent(|counters| counters.daemon_cpu_ns));
        let others_ns = spent(|counters| counters.client_cpu_ns) + client_cpu_ns as f64;
        let machine_ns = spent(|counters| counters.machine_cpu_ns) - others_ns;
        let mean = |of: fn(&Sample) -> u64| {
            self.measured.iter().map(of).sum::<u64>() / self.measured.len().max(1) as u64
        };
        let faults = window.of(|look| look.counters.faults);
        let figures = Figures {
            program: program.to_owned(),
            setup: self.place.setup,
            done,
            operations_per_second: done.operations as f64 / done.seconds,
            program_cpu_us_per_op: per_op(spent(|counters| counters.server_cpu_ns))
                + daemon_cpu_us_per_op,
            daemon_cpu_us_per_op,
            machine_cpu_us_per_op: per_op(machine_ns),
            faults,
            faults_per_second: faults as f64 / done.seconds,
            memory: MemoryUse {
                resident_bytes: mean(|sample| sample.memory.resident_bytes),
                compressed_bytes: mean(|sample| sample.memory.compressed_bytes),
                metadata_bytes: mean(|sample| sample.memory.metadata_bytes),
                stored_bytes: mean(|sample| sample.memory.stored_bytes),
            },
            peak_total_bytes: self.peak_total_bytes,
            kernel_resident_bytes: mean(|sample| sample.kernel_resident_bytes),
            daemon_memory_bytes: mean(|sample| sample.daemon_bytes),
            oom_kills: 0,
            strata: self.measured.last().and_then(|sample| sample.stats.clone()),
        };
        if let Some(note) = figures.budget_note() {
            eprintln!("  {program}: {note}");
        }
        figures
    }
}

impl Figures {
    /// What to say when Strata took more DRAM than its budget and allowance.
    fn budget_note(&self) -> Option<String> {
        let Setup::Strata { dram_bytes } = self.setup else { return None };
        trial::over_budget(
            dram_bytes,
            self.peak_total_bytes,
            self.kernel_resident_bytes,
            self.daemon_memory_bytes,
        )
    }
}

/// A look at a program and its surroundings.
struct Look {
    counters: Counters,
}

/// Both ends of the measured time.
pub(super) struct Window {
    begin: Look,
    end: Look,
}

impl Window {
    /// By how much something has grown.
    fn of(&self, of: impl Fn(&Look) -> u64) -> u64 {
        // Saturating: a worker that died and was replaced takes its counts along.
        of(&self.end).saturating_sub(of(&self.begin))
    }
}
