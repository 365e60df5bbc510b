//! A directory with a Redis that may die and come back: its sockets, its start
//! and its end by pid. Whoever brings it back is not this file's business.

use crate::{
    interrupt,
    janitor::{Janitor, Registered, Undo},
    process,
    redis::{
        resp::{Connection, Endpoint, Reply},
        server::Wrapping,
    },
    subject::{last_line, scratch},
};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::{
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Longest wait for a right reply: a reload of many gigabytes takes a while.
const REPLY_PATIENCE: Duration = Duration::from_secs(180);
/// Longest wait for a killed process to be gone: some first processes collect
/// orphans only now and then.
const DEATH_PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks for a reply. What is found is late by half of it.
const LOOK: Duration = Duration::from_micros(500);

/// The directory. Everything in it ends with it.
pub(super) struct Place {
    directory: PathBuf,
    port: Option<u16>,
    // In this order: the processes go before their files.
    _processes: Registered,
    _files: Registered,
}

impl Place {
    /// `listens`: on a TCP port too. A clone cannot have the port that the
    /// original listens on.
    pub(super) fn make(janitor: &Janitor, name: &str, listens: bool) -> Result<Self> {
        let (directory, files) = scratch(janitor, name)?;
        let processes = janitor.register(Undo::KillIn { directory: directory.clone() })?;
        let port = listens
            .then(|| anyhow::Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port()))
            .transpose()
            .context("find a free port")?;
        Ok(Self { directory, port, _processes: processes, _files: files })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join("redis.sock")
    }

    pub(super) fn unix(&self) -> Endpoint {
        Endpoint::Unix(self.socket())
    }

    /// The connection that plain CRIU can leave alone: half of an established
    /// unix connection it cannot dump.
    pub(super) fn tcp(&self) -> Result<Endpoint> {
        let port = self.port.context("this server has no port")?;
        Ok(Endpoint::Tcp(format!("127.0.0.1:{port}")))
    }

    /// Starts a server here and says which process it is; it is collected the
    /// moment it ends. Its log is appended to: CRIU minds a file whose size
    /// differs unless it is written at its end only.
    pub(super) fn start(&self, wrapping: &Wrapping, more: &[&str]) -> Result<u32> {
        let log = self.directory.join("log");
        let output = File::options().create(true).append(true).open(&log);
        let output = output.context("make the server's log")?;
        let mut command = wrapping.command(["redis-server"]);
        command
            .args(["--port", &self.port.unwrap_or(0).to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            .args(more)
            .arg("--unixsocket")
            .arg(self.socket())
            .arg("--dir")
            .arg(&self.directory)
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("share the server's log")?)
            .stderr(output);
        let child = command.spawn().context("start redis-server")?;
        let pid = child.id();
        collect(child);
        Ok(pid)
    }

    /// Waits until a server that was just started answers.
    pub(super) fn wait_until_up(&self, pid: u32) -> Result<()> {
        let until = Instant::now() + REPLY_PATIENCE;
        let answers =
            || Connection::open(&self.unix()).is_ok_and(|mut open| open.call(&[b"PING"]).is_ok());
        while !answers() {
            interrupt::check()?;
            if process::times(pid).is_none() || Instant::now() >= until {
                bail!("redis-server does not answer: {}", last_line(&self.directory.join("log")));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

/// Collects a child when it ends: what has its number later cannot come back
/// while it is a zombie.
fn collect(mut child: Child) {
    thread::spawn(move || {
        if let Err(error) = child.wait() {
            eprintln!("strata-lab: collect a server: {error}");
        }
    });
}

/// The same for a process that CRIU made a child of ours.
pub(super) fn collect_sibling(pid: u32) {
    thread::spawn(move || {
        // An error says that it is no child of ours: then it is not ours to
        // collect either.
        let _ = waitpid(Pid::from_raw(pid as i32), WaitOptions::empty());
    });
}

/// `kill -9`; the time until the process is gone.
pub(super) fn kill_hard(pid: u32) -> Result<Duration> {
    let target = Pid::from_raw(pid as i32).context("a pid is never zero")?;
    let begin = Instant::now();
    kill_process(target, Signal::KILL).context("kill the server")?;
    while process::times(pid).is_some() {
        if begin.elapsed() >= DEATH_PATIENCE {
            bail!("the killed server {pid} is not gone after {} s", DEATH_PATIENCE.as_secs());
        }
        thread::sleep(LOOK);
    }
    Ok(begin.elapsed())
}

/// The time from `begin` until a GET of `key` first answers `value`. `check` is
/// asked now and then whether there is still hope.
pub(super) fn first_right(
    endpoint: &Endpoint,
    (key, value): (&[u8], &[u8]),
    begin: Instant,
    mut check: impl FnMut() -> Result<()>,
) -> Result<Duration> {
    // Any error is one that a server on its way down or up may answer.
    let ask = || -> Result<bool> {
        let mut connection = Connection::open(endpoint)?;
        let reply = connection.call(&[b"GET", key])?;
        let Reply::Bulk(range) = reply else { return Ok(false) };
        Ok(connection.bytes(range) == value)
    };
    loop {
        if ask().unwrap_or(false) {
            return Ok(begin.elapsed());
        }
        interrupt::check()?;
        check()?;
        if begin.elapsed() >= REPLY_PATIENCE {
            bail!("no right reply from {endpoint} within {} s", REPLY_PATIENCE.as_secs());
        }
        thread::sleep(LOOK);
    }
}

/// Runs a command that brings a server back: the times from its start until a
/// GET of a key answers the right value, and until the command has ended.
pub(super) fn until_right(
    command: &mut Command,
    endpoint: &Endpoint,
    known: (&[u8], &[u8]),
) -> Result<(Duration, Duration)> {
    let what = Path::new(command.get_program()).file_name().unwrap_or_default().to_owned();
    let what = what.to_string_lossy().into_owned();
    let begin = Instant::now();
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.with_context(|| format!("start {what}"))?;
    let mut ended = None;
    let replied = first_right(endpoint, known, begin, || {
        if ended.is_none()
            && let Some(status) = child.try_wait().context("look at a command")?
        {
            ended = Some(begin.elapsed());
            if !status.success() {
                bail!("it failed ({status})");
            }
        }
        Ok(())
    });
    if replied.is_err() && ended.is_none() {
        child.kill().context("end a command")?;
    }
    let output = child.wait_with_output().context("wait for a command")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let replied = replied.with_context(|| format!("{what}: {}", said.trim()))?;
    if !output.status.success() {
        bail!("{what} failed after the first reply: {}", said.trim());
    }
    Ok((replied, ended.unwrap_or_else(|| begin.elapsed())))
}
