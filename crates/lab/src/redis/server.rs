//! A Redis server process for one phase: started, pinned, measured, ended.
//!
//! The configuration is Redis's own except that nothing is persisted: a save
//! in the middle of a phase would measure the disk.

use super::resp::{Connection, Endpoint};
use crate::{
    interrupt,
    janitor::Janitor,
    process,
    subject::{Subject, last_line, scratch},
};
use anyhow::{Context, Result, bail};
use std::{
    ffi::OsString,
    fs::File,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A server that does not answer after this long has failed to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// A running server.
pub(crate) struct Server {
    subject: Subject,
    endpoint: Endpoint,
}

/// How the server's command line is wrapped: the control group's shell, or
/// `strata run … --`. Also what else its environment holds.
#[derive(Default)]
pub(crate) struct Wrapping {
    pub prefix: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
}

impl Wrapping {
    /// A command line in its wrapping.
    pub(crate) fn command<Word: Into<OsString>>(
        &self,
        line: impl IntoIterator<Item = Word>,
    ) -> Command {
        let mut words = self.prefix.iter().cloned().chain(line.into_iter().map(Into::into));
        let mut command = Command::new(words.next().expect("a command has a name"));
        command.args(words);
        command.envs(self.environment.iter().map(|(key, value)| (key, value)));
        command
    }
}

impl Server {
    /// Starts `redis-server` in a fresh directory and waits for its answer.
    pub(crate) fn start(
        janitor: &Janitor,
        name: &str,
        wrapping: &Wrapping,
        core: Option<usize>,
    ) -> Result<Self> {
        let (directory, files) = scratch(janitor, name)?;
        let socket = directory.join("redis.sock");
        let log = directory.join("log");
        let mut command = wrapping.command(["redis-server"]);
        command
            .args(["--port", "0", "--save", "", "--appendonly", "no"])
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(&directory)
            .stdin(Stdio::null())
            .stdout(File::create(&log).context("make the server's log")?)
            .stderr(File::options().append(true).open(&log).context("open the server's log")?);
        let subject = Subject::spawn(janitor, &mut command)?.with(files);
        let mut server = Self { subject, endpoint: Endpoint::Unix(socket) };
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
            if let Some(status) = self.subject.child().try_wait().context("look at the server")? {
                bail!("redis-server ended at once ({status}): {}", last_line(log));
            }
            if Instant::now() >= until {
                bail!("redis-server does not answer: {}", last_line(log));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.subject.pid()
    }

    pub(crate) const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// False when it has died on its own.
    pub(crate) fn is_running(&mut self) -> bool {
        matches!(self.subject.child().try_wait(), Ok(None))
    }

    /// Ends the server; nothing of it is left afterwards.
    pub(crate) fn stop(self) -> Result<()> {
        self.subject.stop()
    }
}
