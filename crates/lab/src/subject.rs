//! Children of the lab: none outlives it, and what they leave is removed.

use crate::{
    interrupt,
    janitor::{Janitor, Registered, Undo},
    process,
};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

/// Between SIGTERM and SIGKILL.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// How often a waiting lab looks around.
const LOOK: Duration = Duration::from_millis(100);

/// A directory of this process for one server. Socket paths are short: the
/// kernel allows 107 bytes.
pub(crate) fn scratch_directory(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("strata-lab-{}-{name}", std::process::id()))
}

/// A directory for one thing of this run, gone with the guard.
pub(crate) fn scratch(janitor: &Janitor, name: &str) -> Result<(PathBuf, Registered)> {
    let path = scratch_directory(name);
    let files = janitor.register(Undo::RemoveFiles { path: path.clone() })?;
    fs::create_dir_all(&path).with_context(|| format!("make {}", path.display()))?;
    Ok((path, files))
}

/// The last thing that a log says.
pub(crate) fn last_line(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()
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

/// Has the janitor kill a process when the lab dies first. None: it has ended.
pub(crate) fn to_be_killed(janitor: &Janitor, pid: u32) -> Result<Option<Registered>> {
    process::times(pid)
        .map(|times| janitor.register(Undo::Kill { pid, start_ticks: times.start_ticks }))
        .transpose()
}

/// A child that is killed when the guard drops, and by the janitor when the lab
/// dies first.
pub(crate) struct Subject {
    child: Child,
    killed: Option<Registered>,
    /// What goes with it.
    files: Option<Registered>,
}

impl Subject {
    /// One that only its guard ends.
    pub(crate) const fn of(child: Child) -> Self {
        Self { child, killed: None, files: None }
    }

    pub(crate) fn spawn(janitor: &Janitor, command: &mut Command) -> Result<Self> {
        let child = command.spawn().with_context(|| {
            let program = Path::new(command.get_program());
            format!("start {}", program.file_name().unwrap_or_default().to_string_lossy())
        })?;
        let mut subject = Self::of(child);
        // Whatever it is wrapped in executes the program: same pid.
        subject.killed = to_be_killed(janitor, subject.pid())?;
        Ok(subject)
    }

    /// Its files go when it does.
    pub(crate) fn with(mut self, files: Registered) -> Self {
        self.files = Some(files);
        self
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) const fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits for its end for at most `patience`; `tick` is called meanwhile.
    pub(crate) fn wait(
        &mut self,
        patience: Duration,
        mut tick: impl FnMut() -> Result<()>,
    ) -> Result<std::process::ExitStatus> {
        let until = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait().context("look at a program")? {
                return Ok(status);
            }
            interrupt::check()?;
            if Instant::now() >= until {
                bail!("it does not end within {} s", patience.as_secs());
            }
            tick()?;
            thread::sleep(LOOK);
        }
    }

    /// Ends it, with a while to obey; nothing of it is left afterwards.
    pub(crate) fn stop(mut self) -> Result<()> {
        stop_child(&mut self.child)?;
        if let Some(killed) = self.killed.take() {
            killed.undo()?;
        }
        self.files.take().map_or(Ok(()), Registered::undo)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        // Nothing it has is kept: no grace.
        let killed = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = killed {
            eprintln!("strata-lab: end a program: {error}");
        }
        drop(self.killed.take());
        drop(self.files.take());
    }
}
