//! A Redis server process for one phase: started, pinned, measured, ended.
//!
//! The configuration is Redis's own except that nothing is persisted: a save
//! in the middle of a phase would measure the disk.

use super::resp::{Connection, Endpoint};
use crate::{
    interrupt,
    janitor::{Janitor, Registered, Undo},
    process,
};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A server that does not answer after this long has failed to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Between SIGTERM and SIGKILL.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// A running server.
pub(crate) struct Server {
    child: Child,
    endpoint: Endpoint,
    killed: Option<Registered>,
    files: Option<Registered>,
}

/// How the server's command line is wrapped: the control group's shell, or
/// `strata run … --`. Also what else its environment holds.
#[derive(Default)]
pub(crate) struct Wrapping {
    pub prefix: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
}

impl Server {
    /// Starts `redis-server` in a fresh directory and waits for its answer.
    pub(crate) fn start(
        janitor: &Janitor,
        name: &str,
        wrapping: &Wrapping,
        core: Option<usize>,
    ) -> Result<Self> {
        let directory = scratch_directory(name);
        let files = janitor.register(Undo::RemoveFiles { path: directory.clone() })?;
        fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
        let socket = directory.join("redis.sock");
        let log = directory.join("log");
        let mut line: Vec<OsString> = wrapping.prefix.clone();
        line.push("redis-server".into());
        line.extend(["--port", "0", "--save", "", "--appendonly", "no"].map(Into::into));
        line.extend(["--unixsocket".into(), socket.clone().into()]);
        line.extend(["--dir".into(), directory.clone().into()]);
        let child = Command::new(&line[0])
            .args(&line[1..])
            .envs(wrapping.environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(File::create(&log).context("make the server's log")?)
            .stderr(File::options().append(true).open(&log).context("open the server's log")?)
            .spawn()
            .with_context(|| format!("start {}", line[0].to_string_lossy()))?;
        let mut server =
            Self { killed: None, endpoint: Endpoint::Unix(socket), files: Some(files), child };
        // Whatever the wrapping is, it executes the server: same pid.
        if let Some(times) = process::times(server.pid()) {
            let undo = Undo::Kill { pid: server.pid(), start_ticks: times.start_ticks };
            server.killed = Some(janitor.register(undo)?);
        }
        server.wait_until_ready(&log)?;
        if let Some(core) = core {
            process::pin_process(server.pid(), core)?;
        }
        Ok(server)
    }

    fn wait_until_ready(&mut self, log: &Path) -> Result<()> {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            interrupt::check()?;
            if let Ok(mut connection) = Connection::open(&self.endpoint)
                && connection.call(&[b"PING"]).is_ok()
            {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait().context("look at the server")? {
                bail!("redis-server ended at once ({status}): {}", last_line(log));
            }
            if Instant::now() >= until {
                bail!("redis-server does not answer: {}", last_line(log));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// False when it has died on its own.
    pub(crate) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends the server; nothing of it is left afterwards.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        stop_child(&mut self.child)?;
        if let Some(killed) = self.killed.take() {
            killed.undo()?;
        }
        self.files.take().map_or(Ok(()), Registered::undo)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("strata-lab: end redis-server: {error:#}");
        }
    }
}

/// SIGTERM, a while to obey, then SIGKILL; collects the child.
pub(crate) fn stop_child(child: &mut Child) -> Result<()> {
    let until = Instant::now() + STOP_GRACE;
    if child.try_wait().context("look at a child")?.is_some() {
        return Ok(());
    }
    let pid = Pid::from_raw(child.id() as i32).context("a pid is never zero")?;
    // Not collected yet, so the pid is still this child's.
    kill_process(pid, Signal::TERM).context("end a child")?;
    while Instant::now() < until {
        if child.try_wait().context("look at a child")?.is_some() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
    child.kill().context("kill a child")?;
    child.wait().context("collect a child")?;
    Ok(())
}

/// A directory of this process for one server. Socket paths are short: the
/// kernel allows 107 bytes.
pub(crate) fn scratch_directory(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("strata-lab-{}-{name}", std::process::id()))
}

fn last_line(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
}
