//! The `stratad` program: finding it, letting it answer (doctor, config check),
//! and starting a private one for a user who runs none.
//!
//! A private daemon must be nobody's child: strata becomes the program that it
//! runs, and a program that waits for its children must not meet one that it
//! never made. So strata starts itself in between, and that process goes.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use strata_api::{CONTROL_SOCKET_NAME, PROTOCOL_VERSION, Reply, Request};
use strata_units::ByteSize;

use crate::client::ask;
use crate::failure::{Failure, Result, printable};
use crate::{place, run};

const STRATAD: &str = "stratad";
/// Tells strata that it is the process in between.
const DETACHED: &str = "start-private-daemon-detached";
const LOG: &str = "stratad.log";
/// The log of the daemon before. No more are kept: `/run` is memory.
const OLD_LOG: &str = "stratad.log.old";
/// For a new daemon to answer.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// For one that takes programs over: it looks at all that they have first.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(120);
const START_POLL: Duration = Duration::from_millis(10);
/// Variables for managed programs and for the dynamic loader: a daemon must not
/// itself be preloaded or take itself for a tenant.
const NOT_FOR_DAEMONS: [&str; 5] = [
    "LD_PRELOAD",
    "LD_AUDIT",
    "LD_LIBRARY_PATH",
    strata_units::wire::ENV_SOCKET,
    strata_units::wire::ENV_TOKEN,
];
/// Address space that a daemon needs, in memories of the machine: it maps what it
/// stores, and what it knows of each page.
const MEMORIES: u64 = 4;
/// Bit of `CAP_SYS_PTRACE` in `/proc/self/status`.
const CAP_SYS_PTRACE: u32 = 19;

pub(crate) fn stratad() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    place::installed(STRATAD).or_else(|| place::in_path(STRATAD, &path)).ok_or_else(|| {
        Failure::new("cannot find stratad", "it is neither beside strata nor in PATH")
            .todo("install it, or put its directory into PATH")
    })
}

/// Runs `stratad ARGUMENTS` and makes its output and exit status ours.
pub(crate) fn pass_through(arguments: &[OsString]) -> Result<ExitCode> {
    let program = stratad()?;
    let what = format!("cannot run {}", program.display());
    let status = Command::new(&program)
        .args(arguments)
        .stdin(Stdio::null())
        .status()
        .map_err(|error| Failure::new(what.as_str(), error).todo("reinstall stratad"))?;
    match status.code() {
        Some(code) => Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
        None => Err(Failure::new(what, status).todo("run it by hand to see why")),
    }
}

/// The configuration of the system's daemon as `stratad` reads it; none: it cannot be read,
/// or there is something wrong with it.
pub(crate) fn checked_configuration() -> Option<String> {
    let output = Command::new(stratad().ok()?)
        .arg("config-check")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).ok())?
}

/// The control socket of the caller's private daemon, which is started unless it
/// runs already.
pub(crate) fn private() -> Result<PathBuf> {
    if !may_manage() {
        return Err(Failure::new(
            "cannot start a private stratad",
            "it needs root, or CAP_SYS_PTRACE and access to /dev/userfaultfd",
        )
        .todo("start the system's: sudo systemctl start stratad, or sudo stratad --config /etc/strata/stratad.toml"));
    }
    let directory = place::private_directory()?;
    let socket = directory.join(CONTROL_SOCKET_NAME);
    // Two that are started at once must not make two daemons. The lock goes with
    // the file, at the end of this function.
    let lock = open_private(&directory.join("lock"))
        .and_then(|file| {
            flock(&file, FlockOperation::LockExclusive).map(|()| file).map_err(Into::into)
        })
        .map_err(|error| {
            Failure::new(format!("cannot lock {}", directory.display()), error)
                .todo("see to its owner and mode")
        })?;
    if UnixStream::connect(&socket).is_err() {
        start(&directory)?;
    }
    drop(lock);
    Ok(socket)
}

/// Whether this process could do a daemon's work.
fn may_manage() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !has_ptrace(&status) {
        return false;
    }
    // With the capability the system call would do, but not every kernel has it
    // allowed in containers; the device, where there is one, must open.
    let device = OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
    device.is_ok() || rustix::process::geteuid().is_root()
}

fn has_ptrace(status: &str) -> bool {
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = hex.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    capabilities.is_some_and(|bits| bits & (1 << CAP_SYS_PTRACE) != 0)
}

fn open_private(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)
}

/// Starts the process in between and waits for it.
fn start(directory: &Path) -> Result<()> {
    const WHAT: &str = "cannot start a private stratad";
    let started = std::env::current_exe().and_then(|own| {
        Command::new(own)
            .arg(DETACHED)
            .arg(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .output()
    });
    let output = started.map_err(|error| Failure::new(WHAT, error).todo("reinstall strata"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().last().unwrap_or("it died").trim_start_matches("strata: ");
    Err(Failure::new(line, ""))
}

/// The directory of the daemon to start, if this is the process in between.
pub(crate) fn detached_directory() -> Option<PathBuf> {
    let mut arguments = std::env::args_os().skip(1);
    let (mode, directory, end) = (arguments.next()?, arguments.next()?, arguments.next());
    (mode == DETACHED && end.is_none()).then(|| directory.into())
}

/// The process in between: leaves the caller's session, so that neither Ctrl-C
/// nor a closed terminal reaches the daemon, starts it, and waits until it
/// answers.
pub(crate) fn start_detached(directory: &Path) -> Result<()> {
    const WHAT: &str = "cannot start a private stratad";
    let program = stratad()?;
    lift_limits().map_err(|limit| {
        let why = format!(
            "this shell's limit of address space ({limit}) would be the daemon's, whose memory holds all programs'"
        );
        Failure::new(WHAT, why)
            .todo("begin from a shell without ulimit -v; the program itself may have one")
    })?;
    let log_path = directory.join(LOG);
    let see_log = format!("see {}", log_path.display());
    // There is none before the first daemon.
    let _ = std::fs::rename(&log_path, directory.join(OLD_LOG));
    let log = open_private(&log_path).and_then(|log| Ok((log.try_clone()?, log)));
    let (log, log_too) = log.map_err(|error| {
        Failure::new(format!("cannot write {}", log_path.display()), error)
            .todo("see to its owner and mode")
    })?;
    // Fails only for a process that leads a group already: then it is alone.
    let _ = rustix::process::setsid();
    let mut command = Command::new(&program);
    command.arg("--private").arg(directory).current_dir("/");
    command.stdin(Stdio::null()).stdout(log).stderr(log_too);
    for name in NOT_FOR_DAEMONS {
        command.env_remove(name);
    }
    let socket = directory.join(CONTROL_SOCKET_NAME);
    let timeout = if place::died(&socket).is_some() { TAKEOVER_TIMEOUT } else { START_TIMEOUT };
    let mut child = command
        .spawn()
        .map_err(|error| Failure::new(format!("cannot run {}", program.display()), error))?;
    let deadline = Instant::now() + timeout;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            let last = last_line(&log_path).unwrap_or_else(|| "it left no message".into());
            let why = format!("it ended at once ({status}): {last}");
            return Err(Failure::new(WHAT, why).todo(see_log));
        }
        if let Ok(Reply::Pong { protocol, version, .. }) = ask(&socket, &Request::Ping) {
            if protocol == PROTOCOL_VERSION {
                return Ok(());
            }
            let why = format!("{} {version} speaks another protocol", program.display());
            let _ = child.kill();
            return Err(Failure::new(WHAT, why).todo("install strata and stratad together"));
        }
        if Instant::now() >= deadline {
            // Better none than one that comes up when nobody waits any more.
            let _ = child.kill();
            let why = format!("it did not answer within {} s", timeout.as_secs());
            return Err(Failure::new(WHAT, why).todo(see_log));
        }
        std::thread::sleep(START_POLL);
    }
}

/// Limits of a shell are for its programs; the daemon serves others too, later. Those
/// that are lifted as far as this process may.
const OF_PROGRAMS: [Resource; 7] = [
    Resource::As,
    Resource::Data,
    Resource::Fsize,
    Resource::Cpu,
    Resource::Rss,
    Resource::Nproc,
    Resource::Nofile,
];

/// An error: address space stays limited to so much, which is too little.
fn lift_limits() -> std::result::Result<(), ByteSize> {
    for resource in OF_PROGRAMS {
        let Rlimit { maximum, .. } = getrlimit(resource);
        let lifted = |maximum| setrlimit(resource, Rlimit { current: maximum, maximum }).is_ok();
        // Descriptors have a limit of the system's: none is more than that.
        if resource == Resource::Nofile || !lifted(None) {
            lifted(maximum);
        }
    }
    let needed = run::machine_memory().map_or(0, |memory| memory.0.saturating_mul(MEMORIES));
    match getrlimit(Resource::As).current {
        Some(limit) if limit < needed => Err(ByteSize(limit)),
        _ => Ok(()),
    }
}

/// The last line of a file, or of its last few kilobytes.
fn last_line(path: &Path) -> Option<String> {
    const TAIL_BYTES: u64 = 4096;
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES))).ok()?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut tail).ok()?;
    let text = String::from_utf8_lossy(&tail);
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(printable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Directory;

    #[test]
    fn the_last_line_is_the_last_that_says_something() {
        let directory = Directory::new("log");
        let path = directory.path().join("log");
        assert_eq!(last_line(&path), None);
        std::fs::write(&path, "").expect("file");
        assert_eq!(last_line(&path), None);
        let long = "x".repeat(10_000);
        std::fs::write(&path, format!("{long}\nfirst\nlast \u{1b}[1m\n\n")).expect("file");
        assert_eq!(last_line(&path).as_deref(), Some("last ?[1m"));
    }

    #[test]
    fn the_capability_is_bit_19() {
        assert!(has_ptrace("Name:\tx\nCapEff:\t0000000000080000\n"));
        assert!(!has_ptrace("CapEff:\t0000000000040000\n"));
        assert!(!has_ptrace("CapPrm:\t0000000000080000\n"));
    }
}
