//! The parent of a program under `strata run --supervise`: it stays when the program is
//! rolled back, waits for whatever has taken its place, and ends as that one ends. What
//! it is sent it passes on.
//!
//! A rollback ends the program's processes, and their parent sees that: a shell would
//! say "Killed", a service manager start a second one. This one asks the daemon
//! first. It is no part of the daemon, only of its program.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use strata_api::{Reply, Request};
use strata_sys::{Pidfd, Relay, SIGKILL, end_like};

/// Variables that the program gets and this process must not have: the loader of this
/// one would look at it.
pub(crate) const ENV_PRELOAD: &str = "STRATA_SUPERVISED_PRELOAD";
const PRELOAD: &str = "LD_PRELOAD";
/// Longer than the longest rollback: it answers when that is over.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long a worker that dies over it may take to be replaced.
const REPLACED_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// What a shell says of a program that it could not start.
const NOT_STARTED: i32 = 127;

/// What became of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Became {
    pid: Option<u32>,
    status: Option<i32>,
}

fn ask(socket: &Path, name: &str, pid: u32) -> anyhow::Result<Became> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(&Request::Became { name: name.to_owned(), pid })?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    match serde_json::from_str(&answer)? {
        Reply::Became { pid, status } => Ok(Became { pid, status }),
        other => anyhow::bail!("its reply is not understood: {other:?}"),
    }
}

/// The same, while a worker that has died is replaced. With no daemon nothing has
/// become of it.
fn became(socket: &Path, name: &str, pid: u32) -> Became {
    let end = Instant::now() + REPLACED_WITHIN;
    loop {
        match ask(socket, name, pid) {
            Ok(became) => return became,
            Err(_) if Instant::now() < end && UnixStream::connect(socket).is_ok() => {
                std::thread::sleep(LOOK_EVERY);
            }
            Err(_) => return Became::default(),
        }
    }
}

/// Starts `words` and ends as it does, or as what has taken its place. `first`: the name
/// that the program is called by.
pub(crate) fn supervise(
    socket: &Path,
    name: &str,
    first: &OsString,
    words: &[OsString],
) -> anyhow::Result<()> {
    let (program, arguments) = words.split_first().context("there is no program to run")?;
    let mut command = Command::new(program);
    command.arg0(first).args(arguments).env_remove(ENV_PRELOAD);
    if let Some(preload) = std::env::var_os(ENV_PRELOAD) {
        command.env(PRELOAD, preload);
    }
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("strata: cannot run {}: {error}", first.display());
            std::process::exit(NOT_STARTED);
        }
    };
    let mut pid = child.id();
    let relay = Relay::begin().context("cannot take signals")?;
    let pidfd = Pidfd::open(pid).context("cannot wait for the program")?;
    // It is in the terminal's foreground as this one is, and hears the terminal itself.
    pass_on(&relay, &pidfd, false)?;
    let status = child.wait().context("cannot wait for the program")?.into_raw();
    if status & 0x7f != SIGKILL {
        end_like(status);
    }
    let mut after = Became { status: Some(status), ..became(socket, name, pid) };
    // Whoever ends it again may roll it back again.
    while let Some(next) = after.pid {
        pid = next;
        if let Ok(pidfd) = Pidfd::open(pid) {
            pass_on(&relay, &pidfd, true)?;
        }
        after = became(socket, name, pid);
    }
    match after.status {
        Some(status) => end_like(status),
        None => anyhow::bail!("process {pid} of {name} has ended, and nobody knows how"),
    }
}

/// Passes signals on until the process ends.
fn pass_on(relay: &Relay, pidfd: &Pidfd, all: bool) -> anyhow::Result<()> {
    while let Some(came) = relay.next(pidfd).context("cannot wait for signals")? {
        if all || !came.of_terminal {
            pidfd.signal(came.signal);
        }
    }
    Ok(())
}
