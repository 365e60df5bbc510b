//! Plain CRIU, as a user runs it: dumps of a running Redis and restores of it.
//! Nothing of Strata's snapshots is in here.

use super::place::until_right;
use crate::{janitor::Janitor, process, redis::resp::Endpoint, subject::Subject};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    io::Read,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use strata_snapshot::Criu;

/// CRIU's daemon must listen within this time.
const LISTEN_PATIENCE: Duration = Duration::from_secs(10);

/// Between two looks whether a process stands still.
const LOOK: Duration = Duration::from_micros(300);

/// What both dumps and restores are told: a root that leads no session, and
/// connections of clients that end with the original.
const COMMON: [&str; 3] = ["-v1", "--shell-job", "--tcp-close"];

/// Leaves memory where it is: the process goes on as soon as CRIU has all else.
pub(super) fn dump_lazily(janitor: &Janitor, criu: &Criu, pid: u32, images: &Path) -> Result<f64> {
    fs::create_dir_all(images).context("make a directory for images")?;
    let (ours, theirs) = UnixStream::pair().context("make a socket pair")?;
    let mut command = dump(criu, pid, images);
    // The page server's connection and the word that it waits come through the
    // standard descriptors, so nothing has to be inherited.
    command.args(["--lazy-pages", "--ps-socket", "0", "--status-fd", "1"]);
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::piped());
    let standstill = Standstill::watch(pid);
    let mut dumping = Subject::spawn(janitor, &mut command)?;
    // Its copy of the socket must go for the end to be seen.
    drop(command);
    let mut word = [0];
    let mut status = dumping.child().stdout.take().context("criu has no output")?;
    let waits = status.read_exact(&mut word);
    drop(ours);
    let status = dumping.child().wait().context("wait for criu")?;
    if waits.is_err() || !status.success() {
        bail!("criu dump --lazy-pages failed ({status}): {}", reason(&images.join("dump.log")));
    }
    standstill.end_ms()
}

/// Everything, memory too.
pub(super) fn dump_all(janitor: &Janitor, criu: &Criu, pid: u32, images: &Path) -> Result<f64> {
    fs::create_dir_all(images).context("make a directory for images")?;
    let mut command = dump(criu, pid, images);
    let standstill = Standstill::watch(pid);
    let mut dumping = Subject::spawn(janitor, command.stdin(Stdio::null()).stdout(Stdio::null()))?;
    let status = dumping.child().wait().context("wait for criu")?;
    if !status.success() {
        bail!("criu dump failed ({status}): {}", reason(&images.join("dump.log")));
    }
    standstill.end_ms()
}

fn dump(criu: &Criu, pid: u32, images: &Path) -> Command {
    let mut command = Command::new(criu.path());
    command.args(["dump", "--leave-running", "-o", "dump.log"]).args(COMMON);
    command.arg("-t").arg(pid.to_string()).arg("-D").arg(images).stderr(Stdio::null());
    command
}

/// Times until a right reply and until `criu restore` has ended. The process
/// is our child then, and has the number that it had.
pub(super) fn restore_all(
    criu: &Criu,
    images: &Path,
    work: &Path,
    endpoint: &Endpoint,
    known: (&[u8], &[u8]),
) -> Result<(Duration, Duration)> {
    fs::create_dir_all(work).context("make a directory for a restore")?;
    until_right(&mut restore(criu, images, work), endpoint, known)
        .with_context(|| reason(&work.join("restore.log")))
}

/// A lazy restore under way.
pub(super) struct Lazily {
    /// As of [`restore_all`].
    pub times: (Duration, Duration),
    /// Until its daemon listened, not counted in them.
    pub daemon_start: Duration,
    pub daemon: Subject,
}

/// The same through CRIU's own lazy-pages daemon, which stands ready: its start
/// is not counted. It goes on in the background until all pages are in.
pub(super) fn restore_lazily(
    janitor: &Janitor,
    criu: &Criu,
    images: &Path,
    work: &Path,
    endpoint: &Endpoint,
    known: (&[u8], &[u8]),
) -> Result<Lazily> {
    fs::create_dir_all(work).context("make a directory for a restore")?;
    let mut command = Command::new(criu.path());
    command.args(["lazy-pages", "-v1", "-o", "lazy.log", "-D"]).arg(images).arg("-W").arg(work);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let begin = Instant::now();
    let mut daemon = Subject::spawn(janitor, &mut command)?;
    while !work.join("lazy-pages.socket").exists() {
        let ended = daemon.child().try_wait().context("look at criu")?;
        if ended.is_some() || begin.elapsed() >= LISTEN_PATIENCE {
            bail!("criu lazy-pages does not listen: {}", reason(&work.join("lazy.log")));
        }
        thread::sleep(Duration::from_millis(1));
    }
    let daemon_start = begin.elapsed();
    let mut command = restore(criu, images, work);
    let times = until_right(command.arg("--lazy-pages"), endpoint, known)
        .with_context(|| reason(&work.join("restore.log")))?;
    Ok(Lazily { times, daemon_start, daemon })
}

fn restore(criu: &Criu, images: &Path, work: &Path) -> Command {
    let mut command = Command::new(criu.path());
    command.args(["restore", "--restore-detached", "--restore-sibling", "-o", "restore.log"]);
    command.args(COMMON).arg("-D").arg(images).arg("-W").arg(work);
    command
}

/// The cause in a log of CRIU's. What it says of its own limit of open files is
/// none.
fn reason(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let is_cause = |line: &&str| line.contains("Error (") && !line.contains("RLIMIT_NOFILE");
    text.lines().find(is_cause).unwrap_or("its log names no cause").trim().to_owned()
}

/// Looks at a process until told to stop: from the first look that found it
/// traced to the last one. The statistics that CRIU writes say nothing of the
/// kind for a lazy dump.
struct Standstill {
    stop: Arc<AtomicBool>,
    looker: Option<JoinHandle<Option<Duration>>>,
}

impl Standstill {
    fn watch(pid: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let looker = thread::spawn(move || {
            let mut seen: Option<(Instant, Instant)> = None;
            while !until.load(Relaxed) {
                if process::is_traced(pid) {
                    let now = Instant::now();
                    seen = Some((seen.map_or(now, |(first, _)| first), now));
                }
                thread::sleep(LOOK);
            }
            seen.map(|(first, last)| last - first)
        });
        Self { stop, looker: Some(looker) }
    }

    fn end_ms(mut self) -> Result<f64> {
        self.stop.store(true, Relaxed);
        let looker = self.looker.take().context("nobody looked")?;
        let stood = looker.join().expect("a looking thread panicked");
        let stood = stood.context("the process was not seen to be traced")?;
        Ok(stood.as_secs_f64() * 1e3)
    }
}

impl Drop for Standstill {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_nobody_traces_does_not_stand_still() {
        let standstill = Standstill::watch(std::process::id());
        assert!(standstill.end_ms().is_err());
    }

    #[test]
    fn the_cause_is_found_in_a_log() {
        let log = std::env::temp_dir().join(format!("strata-lab-criu-log-{}", std::process::id()));
        let text = "Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self\n\
                    Warn  (x.c:1): no\n(00.1) Error (criu/sk-unix.c:1): External socket is used\n\
                    Error (criu/cr-dump.c:2): Dumping FAILED.\n";
        fs::write(&log, text).expect("written");
        assert!(reason(&log).ends_with("External socket is used"));
        fs::remove_file(&log).expect("removed");
        assert_eq!(reason(&log), "its log names no cause");
    }
}
