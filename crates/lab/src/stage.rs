//! What surrounds the program of one trial: its limit, its swap, its daemon.
//! Setting up, taking down, and what it costs at any moment; what is done with
//! the program is the trial's.

use crate::{
    cgroup::Group,
    janitor::Janitor,
    memtierd::Memtierd,
    meter::Meter,
    process,
    redis::{
        resp::Endpoint,
        server::{Server, Wrapping},
    },
    strata::Strata,
    trial::Plan,
    zram::{Stored, Zram},
    zswap::Zswap,
};
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::Path;

/// What the server has to live in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Setup {
    /// All the DRAM it wants, nothing in between.
    DramOnly,
    /// A limit on resident memory; the rest in zram (lz4), whose own cost is
    /// not counted against the limit.
    Zram { resident_limit_bytes: u64 },
    /// The same limit; the rest in zswap, with a swap file behind it.
    Zswap { resident_limit_bytes: u64 },
    /// The same limit and zram; memtierd swaps out what it takes for idle
    /// before the limit makes the kernel do it.
    Memtierd { resident_limit_bytes: u64 },
    /// A Strata budget: everything counts.
    Strata { dram_bytes: u64 },
}

impl Setup {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::DramOnly => "DRAM only",
            Self::Zram { .. } => "zram",
            Self::Zswap { .. } => "zswap",
            Self::Memtierd { .. } => "memtierd",
            Self::Strata { .. } => "Strata",
        }
    }

    /// The limit on resident memory, or the budget; none where there is none.
    pub(crate) const fn allowed_bytes(self) -> Option<u64> {
        match self {
            Self::DramOnly => None,
            Self::Zram { resident_limit_bytes }
            | Self::Zswap { resident_limit_bytes }
            | Self::Memtierd { resident_limit_bytes } => Some(resident_limit_bytes),
            Self::Strata { dram_bytes } => Some(dram_bytes),
        }
    }
}

/// What a server costs in DRAM, in bytes.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct MemoryUse {
    /// Its anonymous memory in DRAM.
    pub resident_bytes: u64,
    /// What the compressed store costs, fragmentation included.
    pub compressed_bytes: u64,
    /// Page map, object table and indexes (the kernel's are not to be had);
    /// memtierd's own memory.
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

/// Limit, swap and daemon of a program. Fields drop in this order.
pub(crate) struct Surroundings {
    pub(crate) setup: Setup,
    memtierd: Option<Memtierd>,
    group: Option<Group>,
    zram: Option<Zram>,
    zswap: Option<Zswap>,
    strata: Option<(Strata, String)>,
    wrapping: Wrapping,
}

impl Surroundings {
    /// Sets everything up for a program of about `data_bytes`.
    pub(crate) fn start(
        janitor: &Janitor,
        setup: Setup,
        name: &str,
        data_bytes: u64,
        binaries: &Path,
    ) -> Result<Self> {
        let mut this = Self {
            setup,
            memtierd: None,
            group: None,
            zram: None,
            zswap: None,
            strata: None,
            wrapping: Wrapping::default(),
        };
        match setup {
            Setup::DramOnly => {}
            Setup::Zram { resident_limit_bytes } | Setup::Memtierd { resident_limit_bytes } => {
                // Several times what can come: the device must never be full,
                // and its size costs nothing until it is used.
                let disk_bytes = (data_bytes * 8).max(256 << 20);
                this.zram = Some(Zram::start(janitor, "lz4", disk_bytes).context("zram")?);
                this.limit(janitor, resident_limit_bytes, false)?;
            }
            Setup::Zswap { resident_limit_bytes } => {
                // Every page of the program has room in the file, which is there
                // in full.
                let file_bytes = (data_bytes * 3).max(256 << 20);
                this.zswap = Some(Zswap::start(janitor, file_bytes).context("zswap")?);
                this.limit(janitor, resident_limit_bytes, true)?;
            }
            Setup::Strata { dram_bytes } => {
                let daemon = Strata::start(janitor, binaries).context("Strata")?;
                let tenant = format!("{name}-{}", std::process::id());
                this.wrapping = daemon.wrapping(&tenant, dram_bytes);
                this.strata = Some((daemon, tenant));
            }
        }
        Ok(this)
    }

    fn limit(&mut self, janitor: &Janitor, limit_bytes: u64, through_zswap: bool) -> Result<()> {
        let name = format!("strata-lab-{}", std::process::id());
        let group = Group::create(janitor, &name, limit_bytes, through_zswap)?;
        self.wrapping.prefix = group.wrapping();
        self.group = Some(group);
        Ok(())
    }

    /// Put before the program's command line.
    pub(crate) const fn wrapping(&self) -> &Wrapping {
        &self.wrapping
    }

    /// What is to be said of the store; none where its name says all.
    fn note(&self) -> Option<String> {
        self.zswap.as_ref().map(|zswap| format!("zswap's compressor: {}", zswap.compressor()))
    }

    /// Whether the kernel killed the program for its group's limit.
    pub(crate) fn was_oom_killed(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.oom_kills() > 0)
    }

    /// What the program costs now.
    pub(crate) fn sample(&self, pid: u32) -> Result<Sample> {
        let kernel = process::memory(pid);
        let mut sample = Sample {
            memory: MemoryUse { resident_bytes: kernel.anonymous_bytes, ..MemoryUse::default() },
            kernel_resident_bytes: kernel.anonymous_bytes,
            swapped_bytes: kernel.swapped_bytes,
            ..Sample::default()
        };
        let swap = self.zram.as_ref().map(Zram::stored);
        if let Some(stored) = swap.or_else(|| self.zswap.as_ref().map(Zswap::stored)) {
            let Stored { original_bytes, used_bytes, .. } = stored;
            sample.memory.compressed_bytes = used_bytes;
            sample.memory.stored_bytes = original_bytes;
            sample.has_swap = true;
        }
        if let Some(memtierd) = &self.memtierd {
            sample.daemon_bytes = process::memory(memtierd.pid()).anonymous_bytes;
            sample.memory.metadata_bytes = sample.daemon_bytes;
        }
        if let Some((strata, tenant)) = &self.strata {
            strata.sample(tenant, &mut sample)?;
        }
        Ok(sample)
    }

    /// What the program and what helps it have spent so far.
    pub(crate) fn counters(&self, pid: u32) -> Result<Counters> {
        let program = process::times(pid).unwrap_or_default();
        let daemon = self.strata.as_ref().map(|(strata, _)| strata.pids());
        let helper = self.memtierd.as_ref().map(|memtierd| process::family(memtierd.pid()));
        let pids = daemon.or(helper).unwrap_or_default();
        let mut counters = Counters {
            program_cpu_ns: program.cpu_ns,
            daemon_cpu_ns: pids.into_iter().filter_map(process::times).map(|t| t.cpu_ns).sum(),
            client_cpu_ns: process::times(std::process::id()).unwrap_or_default().cpu_ns,
            machine_cpu_ns: process::machine_busy_ns(),
            faults: program.major_faults,
            soft_faults: 0,
        };
        if let Some((strata, tenant)) = &self.strata {
            let stats = strata.stats(tenant)?;
            // A first touch brings nothing back, and is no major fault either.
            counters.faults = stats.faults_total.saturating_sub(stats.zero_faults_total);
            counters.soft_faults = stats.soft_faults_total;
        }
        Ok(counters)
    }

    /// Takes everything down again and says whether that worked; the program
    /// must have ended.
    pub(crate) fn stop(self) -> Result<()> {
        self.group.map_or(Ok(()), Group::remove)?;
        self.zram.map_or(Ok(()), Zram::stop)?;
        self.zswap.map_or(Ok(()), Zswap::stop)?;
        self.strata.map_or(Ok(()), |(strata, _)| strata.stop())
    }
}

/// A server and its surroundings. Fields drop in this order.
pub(crate) struct Stage {
    server: Server,
    around: Surroundings,
}

impl Stage {
    /// Sets everything up and starts the server in it.
    pub(crate) fn start(janitor: &Janitor, setup: Setup, name: &str, plan: &Plan) -> Result<Self> {
        let data_bytes = plan.records * 1024;
        let mut around = Surroundings::start(janitor, setup, name, data_bytes, &plan.binaries)?;
        let server = Server::start(janitor, name, around.wrapping(), plan.server_core)?;
        if let Setup::Memtierd { .. } = setup {
            let tool = plan.memtierd.as_ref().context("memtierd was not looked for")?;
            around.memtierd = Some(Memtierd::start(janitor, tool, server.pid())?);
        }
        Ok(Self { server, around })
    }

    pub(crate) const fn endpoint(&self) -> &Endpoint {
        self.server.endpoint()
    }

    /// False when the server has ended on its own.
    pub(crate) fn is_running(&mut self) -> bool {
        self.server.is_running()
    }

    /// An error when what is to help the server has ended on its own.
    pub(crate) fn check_helper(&mut self) -> Result<()> {
        self.around.memtierd.as_mut().map_or(Ok(()), Memtierd::check)
    }

    /// What is to be said of the store; none where its name says all.
    pub(crate) fn note(&self) -> Option<String> {
        self.around.note()
    }

    /// Whether the kernel killed the server for its group's limit.
    pub(crate) fn was_oom_killed(&self) -> bool {
        self.around.was_oom_killed()
    }

    /// Takes everything down again and says whether that worked.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.around.memtierd.take().map_or(Ok(()), Memtierd::stop)?;
        self.server.stop()?;
        self.around.stop()
    }

    /// Looks at the server from now on.
    pub(crate) fn meter(&self) -> Meter<'_> {
        Meter::new(&self.around, self.server.pid())
    }
}

/// A program's cost at one moment.
#[derive(Clone, Default)]
pub(crate) struct Sample {
    pub memory: MemoryUse,
    pub kernel_resident_bytes: u64,
    pub daemon_bytes: u64,
    pub stats: Option<strata_api::Stats>,
    /// What the kernel says that the server has in swap, whichever that is.
    pub swapped_bytes: u64,
    pub has_swap: bool,
}

impl Sample {
    /// What to say when Strata does not know of the server's memory: it then
    /// runs unmanaged, at native speed and for nothing.
    pub(crate) fn unmanaged(&self) -> Option<String> {
        self.stats.as_ref()?;
        unmanaged(self.memory.resident_bytes, self.kernel_resident_bytes)
    }

    /// What to say when the rival's store holds pages of others, or the server
    /// has pages in another swap: its DRAM is then not what it was measured to be.
    pub(crate) fn intruder(&self) -> Option<String> {
        // Pages on their way are in neither or in both.
        let tolerated = self.swapped_bytes / 10 + (16 << 20);
        let is_off = self.memory.stored_bytes.abs_diff(self.swapped_bytes) > tolerated;
        (self.has_swap && is_off).then(|| {
            format!(
                "{} MiB are in the swap set up for this trial, {} MiB of the server are in swap: \
                 somebody else is swapping",
                self.memory.stored_bytes >> 20,
                self.swapped_bytes >> 20
            )
        })
    }
}

fn unmanaged(known_bytes: u64, kernel_bytes: u64) -> Option<String> {
    let tolerated = kernel_bytes / 10 + (16 << 20);
    (kernel_bytes > known_bytes + tolerated).then(|| {
        format!(
            "Strata knows of {} MiB of the {} MiB that the server has in DRAM: it is not managed",
            known_bytes >> 20,
            kernel_bytes >> 20
        )
    })
}

/// CPU times and faults since the start of each process.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counters {
    pub program_cpu_ns: u64,
    pub daemon_cpu_ns: u64,
    pub client_cpu_ns: u64,
    pub machine_cpu_ns: u64,
    pub faults: u64,
    /// Part of them that Strata served without decompression.
    pub soft_faults: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_not_managed_is_noticed() {
        assert_eq!(unmanaged(340 << 20, 350 << 20), None);
        let said = unmanaged(0, 135 << 20).expect("it runs beside Strata");
        assert!(said.contains("0 MiB of the 135 MiB"), "{said}");
    }

    #[test]
    fn others_in_the_swap_are_noticed() {
        const MIB: u64 = 1 << 20;
        let sample = |stored_mib: u64, swapped_mib: u64| Sample {
            memory: MemoryUse { stored_bytes: stored_mib * MIB, ..MemoryUse::default() },
            swapped_bytes: swapped_mib * MIB,
            has_swap: true,
            ..Sample::default()
        };
        assert_eq!(sample(700, 690).intruder(), None);
        let said = sample(800, 690).intruder().expect("110 MiB too many");
        assert!(said.contains("800 MiB are in the swap"), "{said}");
        assert!(sample(600, 700).intruder().is_some());
        let strata = Sample { has_swap: false, ..sample(700, 0) };
        assert_eq!(strata.intruder(), None);
    }
}
