//! Strata as a subject: its daemon, `strata run`, and what it says of itself.
//!
//! Uses only what a user has (the command line), so a figure here is one that a
//! user can see. The daemon is a private one, started by us, so that its CPU
//! time and memory can be counted and nobody else's tenants are in it.

use crate::{
    interrupt,
    janitor::{Janitor, Registered, Undo},
    process,
    redis::server::Wrapping,
    stage::{MemoryUse, Sample},
    subject::{last_line, scratch_directory, stop_child},
};
use anyhow::{Context, Result, bail};
use std::{
    ffi::OsString,
    fs::{self, File},
    os::unix::{fs::DirBuilderExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use strata_api::{ENV_CONTROL_SOCKET, Stats};

/// The daemon must listen within this time.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A private daemon and the way to talk to it.
pub(crate) struct Strata {
    program: PathBuf,
    directory: PathBuf,
    daemon: Child,
    keeper: Option<Child>,
    killed: Vec<Registered>,
    files: Option<Registered>,
}

impl Strata {
    /// Starts a daemon from the binaries in `directory`. An error says what is
    /// missing; the caller goes on without Strata.
    pub(crate) fn start(janitor: &Janitor, binaries: &Path) -> Result<Self> {
        let (program, daemon) = (binaries.join("strata"), binaries.join("stratad"));
        for path in [&program, &daemon] {
            if !path.exists() {
                bail!("{} is not built (make build)", path.display());
            }
        }
        let directory = scratch_directory("daemon");
        let files = janitor.register(Undo::RemoveFiles { path: directory.clone() })?;
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&directory)
            .with_context(|| format!("make {}", directory.display()))?;
        let log = directory.join("stratad.log");
        let output = File::create(&log).context("make the daemon's log")?;
        let daemon = Command::new(&daemon)
            .arg("--private")
            .arg(&directory)
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("share the daemon's log")?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("start {}", daemon.display()))?;
        let mut strata = Self {
            program,
            directory,
            daemon,
            keeper: None,
            killed: Vec::new(),
            files: Some(files),
        };
        strata.wait_until_ready(&log)?;
        // The worker too: it would wait for a new supervisor for ever.
        for pid in strata.pids() {
            if let Some(times) = process::times(pid) {
                let undo = Undo::Kill { pid, start_ticks: times.start_ticks };
                strata.killed.push(janitor.register(undo)?);
            }
        }
        Ok(strata)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    fn wait_until_ready(&mut self, log: &Path) -> Result<()> {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            interrupt::check()?;
            if UnixStream::connect(self.socket()).is_ok() {
                return Ok(());
            }
            if let Some(status) = self.daemon.try_wait().context("look at stratad")? {
                bail!("stratad ended at once ({status}): {}", last_line(log));
            }
            if Instant::now() >= until {
                bail!("stratad does not listen on {}: {}", self.socket().display(), last_line(log));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Supervisor, worker and whatever else belongs to the daemon.
    pub(crate) fn pids(&self) -> Vec<u32> {
        process::family(self.daemon.id())
    }

    pub(crate) fn environment(&self) -> Vec<(OsString, OsString)> {
        vec![(ENV_CONTROL_SOCKET.into(), self.socket().into())]
    }

    /// `strata run --name NAME --dram SIZE --`, to be put before a command.
    pub(crate) fn wrapping(&self, name: &str, dram_bytes: u64) -> Wrapping {
        let prefix = vec![
            self.program.clone().into(),
            "run".into(),
            "--name".into(),
            name.into(),
            "--dram".into(),
            format!("{dram_bytes} bytes").into(),
            "--".into(),
        ];
        Wrapping { prefix, environment: self.environment() }
    }

    /// `strata stats NAME --json`.
    pub(crate) fn stats(&self, name: &str) -> Result<Stats> {
        let output = Command::new(&self.program)
            .args(["stats", name, "--json"])
            .envs(self.environment())
            .output()
            .context("run strata stats")?;
        if !output.status.success() {
            bail!("strata stats: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let mut stats: Stats =
            serde_json::from_slice(&output.stdout).context("read what strata stats printed")?;
        // Results are published: where this machine keeps things is nobody's
        // business.
        for word in &mut stats.command {
            if let Some((_, file)) = word.rsplit_once('/') {
                *word = file.to_owned();
            }
        }
        Ok(stats)
    }

    /// What `tenant` and the daemon cost now, into `sample`.
    pub(crate) fn sample(&self, tenant: &str, sample: &mut Sample) -> Result<()> {
        let stats = self.stats(tenant)?;
        sample.memory = MemoryUse {
            resident_bytes: stats.resident_bytes + stats.unmanaged_bytes,
            compressed_bytes: stats.compressed_bytes,
            metadata_bytes: stats.metadata_bytes,
            stored_bytes: stats.stored_bytes,
        };
        debug_assert_eq!(sample.memory.total_bytes(), total_bytes(&stats));
        sample.daemon_bytes = self
            .pids()
            .into_iter()
            .map(process::memory)
            .map(|memory| memory.anonymous_bytes + memory.shared_bytes)
            .max()
            .unwrap_or(0);
        sample.stats = Some(stats);
        Ok(())
    }

    /// A private daemon ends with its last tenant: this one outlives those that
    /// come and go, and does nothing.
    pub(crate) fn keep(&mut self, janitor: &Janitor) -> Result<()> {
        let wrapping = self.wrapping(&format!("keeper-{}", std::process::id()), 64 << 20);
        let child = Command::new(&wrapping.prefix[0])
            .args(&wrapping.prefix[1..])
            .args(["sleep", "infinity"])
            .envs(wrapping.environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .spawn()
            .context("start a tenant that keeps the daemon")?;
        if let Some(times) = process::times(child.id()) {
            let undo = Undo::Kill { pid: child.id(), start_ticks: times.start_ticks };
            self.killed.push(janitor.register(undo)?);
        }
        self.keeper = Some(child);
        Ok(())
    }

    /// Ends the daemon; its tenants must have ended.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if let Some(mut keeper) = self.keeper.take() {
            stop_child(&mut keeper)?;
        }
        stop_child(&mut self.daemon)?;
        for killed in self.killed.drain(..) {
            killed.undo()?;
        }
        self.files.take().map_or(Ok(()), Registered::undo)
    }
}

impl Drop for Strata {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("strata-lab: end stratad: {error:#}");
        }
    }
}

/// Everything that a tenant costs in DRAM, as its budget counts it.
pub(crate) const fn total_bytes(stats: &Stats) -> u64 {
    stats.resident_bytes + stats.unmanaged_bytes + stats.compressed_bytes + stats.metadata_bytes
}
