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
    subject::{Subject, last_line, scratch_directory, stop_child},
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
use strata_api::{ENV_CONTROL_SOCKET, SnapshotInfo, Stats};

/// The daemon must listen within this time.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a tenant may take to come down to a budget.
const SETTLING: Duration = Duration::from_secs(40);

/// A private daemon and the way to talk to it.
pub(crate) struct Strata {
    program: PathBuf,
    directory: PathBuf,
    daemon: Child,
    keeper: Option<Subject>,
    killed: Option<Registered>,
    files: Option<Registered>,
}

impl Strata {
    /// Starts a daemon from the binaries in a directory. An error says what is
    /// missing; the caller goes on without Strata.
    pub(crate) fn start(janitor: &Janitor, binaries: &Path) -> Result<Self> {
        Self::start_with(janitor, binaries, &[], None)
    }

    /// The same with more in the daemon's environment, and with these lines in its
    /// configuration.
    pub(crate) fn start_with(
        janitor: &Janitor,
        binaries: &Path,
        environment: &[(&str, &Path)],
        lines: Option<&str>,
    ) -> Result<Self> {
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
        // By where they work: a worker that is replaced has a number that nobody
        // knows before, and one that is left alone waits for ever.
        let killed = janitor.register(Undo::KillIn { directory: directory.clone() })?;
        let log = directory.join("stratad.log");
        let output = File::create(&log).context("make the daemon's log")?;
        let mut arguments: Vec<OsString> = vec!["--private".into(), directory.clone().into()];
        if let Some(lines) = lines {
            let file = directory.join("stratad.toml");
            let text = format!(
                "socket_dir = {directory:?}\nsnapshot_dir = {:?}\n{lines}",
                directory.join("snapshots")
            );
            fs::write(&file, text).context("write the daemon's configuration")?;
            arguments = vec!["--config".into(), file.into()];
        }
        let daemon = Command::new(&daemon)
            .args(arguments)
            .current_dir(&directory)
            .envs(environment.iter().copied())
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
            killed: Some(killed),
            files: Some(files),
        };
        strata.wait_until_ready(&log)?;
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

    /// Where disks ask for pages of pools.
    pub(crate) fn pool_socket(&self) -> PathBuf {
        self.socket().with_file_name(strata_api::POOL_SOCKET_NAME)
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

    /// `strata ARGUMENTS`, asking this daemon.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).envs(self.environment()).stdin(Stdio::null());
        command
    }

    /// Runs `strata ARGUMENTS` and gives what it printed; its complaint becomes
    /// the error.
    pub(crate) fn ask(&self, arguments: &[&str]) -> Result<String> {
        let what = arguments.first().copied().unwrap_or_default();
        let output =
            self.command(arguments).output().with_context(|| format!("run strata {what}"))?;
        if !output.status.success() {
            bail!("strata {what}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        String::from_utf8(output.stdout).with_context(|| format!("read what strata {what} printed"))
    }

    /// `strata stats NAME --json`.
    pub(crate) fn stats(&self, name: &str) -> Result<Stats> {
        let mut stats: Stats = serde_json::from_str(&self.ask(&["stats", name, "--json"])?)
            .context("read what strata stats printed")?;
        without_places(&mut stats.command);
        Ok(stats)
    }

    /// `strata snapshots NAME --json`, the one called `id`.
    pub(crate) fn snapshot_info(&self, name: &str, id: &str) -> Result<SnapshotInfo> {
        let mut all: Vec<SnapshotInfo> =
            serde_json::from_str(&self.ask(&["snapshots", name, "--json"])?)
                .context("read what strata snapshots printed")?;
        all.retain(|info| info.id.to_string() == id);
        let mut info = all.pop().with_context(|| format!("{id} is not listed"))?;
        without_places(&mut info.command);
        Ok(info)
    }

    /// The tenant called `name` is ended when the guard drops, whichever
    /// processes it consists of by then.
    pub(crate) fn stopping(&self, janitor: &Janitor, name: &str) -> Result<Registered> {
        janitor.register(Undo::StopTenant {
            program: self.program.clone(),
            socket: self.socket(),
            name: name.to_owned(),
        })
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
        let mut command = wrapping.command(["sleep", "infinity"]);
        let keeper = Subject::spawn(janitor, command.stdin(Stdio::null()))
            .context("start a tenant that keeps the daemon")?;
        self.keeper = Some(keeper);
        Ok(())
    }

    /// Ends the daemon; its tenants must have ended.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if let Some(keeper) = self.keeper.take() {
            keeper.stop()?;
        }
        stop_child(&mut self.daemon)?;
        if let Some(killed) = self.killed.take() {
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

/// Results are published: where this machine keeps things is nobody's business.
fn without_places(command: &mut [String]) {
    for word in command {
        if let Some((_, file)) = word.rsplit_once('/') {
            *word = file.to_owned();
        }
    }
}

/// Waits until a tenant that has just been given a budget is within it; whether it came to that.
pub(crate) fn comes_within(bytes: u64, mut stats: impl FnMut() -> Result<Stats>) -> Result<bool> {
    let until = Instant::now() + SETTLING;
    while total_bytes(&stats()?) > bytes {
        interrupt::check()?;
        if Instant::now() > until {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(500));
    }
    Ok(true)
}

/// Everything that a tenant costs in DRAM, as its budget counts it.
pub(crate) const fn total_bytes(stats: &Stats) -> u64 {
    stats.resident_bytes + stats.unmanaged_bytes + stats.compressed_bytes + stats.metadata_bytes
}
