//! What surrounds the server of one trial: its limit, its swap, its daemon.
//! Setting up, taking down, and what it costs at any moment; what is done with
//! the server is the trial's.

use crate::{
    cgroup::Group,
    janitor::Janitor,
    process,
    redis::{
        resp::Endpoint,
        server::{Server, Wrapping},
    },
    strata::{self, Strata},
    trial::Plan,
    zram::{Stored, Zram},
};
use anyhow::{Context, Result};
use serde::Serialize;

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

/// The surroundings of one server. Fields drop in this order.
pub(crate) struct Stage {
    server: Server,
    group: Option<Group>,
    zram: Option<Zram>,
    strata: Option<(Strata, String)>,
}

impl Stage {
    /// Sets everything up and starts the server in it.
    pub(crate) fn start(janitor: &Janitor, setup: Setup, name: &str, plan: &Plan) -> Result<Self> {
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
                wrapping.prefix = made.wrapping();
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

    pub(crate) const fn endpoint(&self) -> &Endpoint {
        self.server.endpoint()
    }

    /// False when the server has ended on its own.
    pub(crate) fn is_running(&mut self) -> bool {
        self.server.is_running()
    }

    /// Whether the kernel killed the server for its group's limit.
    pub(crate) fn was_oom_killed(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.oom_kills() > 0)
    }

    /// Takes everything down again and says whether that worked.
    pub(crate) fn stop(self) -> Result<()> {
        self.server.stop()?;
        self.group.map_or(Ok(()), Group::remove)?;
        self.zram.map_or(Ok(()), Zram::stop)?;
        self.strata.map_or(Ok(()), |(strata, _)| strata.stop())
    }

    /// What the server costs now.
    pub(crate) fn sample(&self) -> Result<Sample> {
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

    /// What has been spent so far.
    pub(crate) fn counters(&self) -> Counters {
        let mut counters = self.times();
        if let Some((strata, tenant)) = &self.strata {
            counters.faults = strata.stats(tenant).map_or(0, |stats| stats.faults_total);
        }
        counters
    }

    /// The same, without asking a daemon: faults are the kernel's.
    pub(crate) fn times(&self) -> Counters {
        let server = process::times(self.server.pid()).unwrap_or_default();
        let daemon_cpu_ns = self.strata.as_ref().map_or(0, |(strata, _)| {
            strata.pids().into_iter().filter_map(process::times).map(|times| times.cpu_ns).sum()
        });
        Counters {
            server_cpu_ns: server.cpu_ns,
            daemon_cpu_ns,
            client_cpu_ns: process::times(std::process::id()).unwrap_or_default().cpu_ns,
            machine_cpu_ns: process::machine_busy_ns(),
            faults: server.major_faults,
        }
    }
}

/// The server's cost at one moment.
#[derive(Clone, Default)]
pub(crate) struct Sample {
    pub memory: MemoryUse,
    pub kernel_resident_bytes: u64,
    pub daemon_bytes: u64,
    pub stats: Option<strata_api::Stats>,
}

/// CPU times and faults since the start of each process.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counters {
    pub server_cpu_ns: u64,
    pub daemon_cpu_ns: u64,
    pub client_cpu_ns: u64,
    pub machine_cpu_ns: u64,
    pub faults: u64,
}
