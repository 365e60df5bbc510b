//! A program that we started and wait for, never longer than a limit.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use strata_sys::{Pidfd, own_session, poll_readable};

/// A started program.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    pidfd: Pidfd,
}

impl Running {
    /// Starts it in a session of its own, with nothing to read; what it prints
    /// goes into the file `output`.
    pub(crate) fn start(mut command: Command, output: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(output)?;
        own_session(&mut command);
        let mut child =
            command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn()?;
        // Not reaped before we wait for it, so the number is still its own.
        match Pidfd::open(child.id()) {
            Ok(pidfd) => Ok(Self { child, pidfd }),
            Err(error) => {
                child.kill().and_then(|()| child.wait())?;
                Err(error)
            }
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn pidfd(&self) -> &Pidfd {
        &self.pidfd
    }

    /// It goes on without a limit.
    pub(crate) fn into_child(self) -> Child {
        self.child
    }

    /// Waits for its end. `None`: it runs longer than `limit`.
    pub(crate) fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            poll_readable([self.pidfd.as_fd()], Some(left))?;
        }
    }

    /// Ends it now.
    pub(crate) fn kill(&mut self) {
        // An error says that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
