//! Dumps a process tree: everything but its private anonymous memory.
//!
//! `criu dump --lazy-pages` writes all else, keeps the tree frozen and waits for
//! somebody to fetch memory. That somebody is a socket pair of ours: CRIU says
//! on `--status-fd` that it waits, and closing our end lets the tree run on. So
//! a tree never stays frozen for longer than we live.
//!
//! CRIU is killed only when a limit of time is over: a kill in the few
//! milliseconds in which it has code of its own inside the tree can end the
//! tree's processes.

use std::fs::DirBuilder;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use std::{fs, io};

use strata_sys::{Launch, Running, poll_readable};

use crate::breakpoints::Breakpoints;
use crate::criu::{Criu, IGNORE_CGROUPS};
use crate::hide;
use crate::images::mend_files;
use crate::log::Complaint;
use crate::preflight::{GHOST_LIMIT, Refusal, preflight};
use crate::processes::{inner_number, is_in_state, lives_elsewhere, process_tree, wait_untraced};
use crate::stopping::{DID_NOT_STOP, Threads};

/// How often a dump is begun anew because a connection to an outsider was made
/// between our look and CRIU's.
const MOST_ATTEMPTS: u32 = 4;
/// How often, if its processes came and went meanwhile.
const MOST_RESTLESS: u32 = 3;
/// What CRIU says of such a connection.
const NEW_CONNECTION: &str = "External socket is used";
/// What it says of a connection whose queues changed while it read them: the
/// other end may be outside, and what was sent before the freeze is acknowledged
/// a little later.
const MOVING_CONNECTION: &str = "soccr";
/// What it says of a process of which one thread has ended and others have not.
const ENDING: &str = "Zombies with threads";
/// What the threads of a tree do is looked at when CRIU is not ready by then.
const SLOW: Duration = Duration::from_secs(1);
/// How long CRIU may take to go after it was told to stop, before it is killed.
const GRACE: Duration = Duration::from_secs(10);
/// Between two looks whether the tree stands still.
const LOOK: Duration = Duration::from_millis(1);

/// How a dump is made.
#[derive(Clone, Debug)]
pub struct DumpOptions {
    /// The caller has all private anonymous memory of mappings from 1 MiB on:
    /// CRIU is not shown where their pages are, so the freeze does not grow with
    /// them. Else the caller needs not bring pages that hold a thread's stack
    /// pointer, which CRIU then restores itself. Without effect for programs
    /// with a seccomp filter or locked memory.
    pub hide_memory: bool,
    /// The program `strata-clone`; needed for trees that live in namespaces of
    /// their own, as clones do.
    pub helper: Option<PathBuf>,
    /// Where all that CRIU says is kept when it fails.
    pub kept_log: Option<PathBuf>,
    /// Longest wait until the tree stands frozen with all but memory on disk;
    /// and again for CRIU's end after the thaw.
    pub limit: Duration,
}

impl Default for DumpOptions {
    fn default() -> Self {
        let limit = Duration::from_secs(30);
        Self { hide_memory: false, helper: None, kept_log: None, limit }
    }
}

/// Why there is no dump. Unless it says otherwise, the tree runs on.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// Found before anything was frozen.
    #[error("this cannot be dumped: {}", .0.iter().map(Refusal::to_string).collect::<Vec<_>>().join("; "))]
    Refused(Vec<Refusal>),
    /// CRIU said no.
    #[error("process {pid} could not be dumped: {reason}{}", .did.as_ref().map(|did| format!("; {did}")).unwrap_or_default())]
    Failed {
        /// Root of the tree.
        pid: u32,
        /// CRIU's.
        reason: Complaint,
        /// What the thread did that did not stop, if that was it.
        did: Option<String>,
    },
    /// It took too long, and was ended. `running`: the tree was seen to run on.
    #[error("CRIU did not {what} process {pid} within {limit:?}; it was ended, and the process {}", if *.running { "runs on" } else { "does not run any more" })]
    TooLong {
        /// What it was to do.
        what: &'static str,
        /// Root of the tree.
        pid: u32,
        /// The limit.
        limit: Duration,
        /// The tree's root was seen to run on.
        running: bool,
    },
    /// The system refused something that is needed for it.
    #[error("{what}: {cause}")]
    System {
        /// What was being done.
        what: String,
        /// The cause.
        cause: io::Error,
    },
}

impl DumpError {
    /// Whether it is because of a process that was just ending.
    #[must_use]
    pub fn is_of_the_moment(&self) -> bool {
        matches!(self, Self::Failed { reason, .. } if reason.words.contains(ENDING))
    }
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> DumpError {
    let what = what.into();
    move |cause| DumpError::System { what, cause }
}

/// A dump that is whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DumpOutcome {
    /// From when the tree was seen frozen (to a millisecond) to when it was seen
    /// to run on.
    pub frozen: Duration,
    /// From the start of CRIU to the frozen tree: nothing stands still in it.
    pub before: Duration,
    /// Of `frozen`, until CRIU was ready; the rest is the caller's and the thaw.
    pub criu: Duration,
}

/// Begins dumps. TCP connections inside of the tree are in them; those to
/// outsiders are closed in what is restored.
#[derive(Debug)]
pub struct Dump;

/// A tree that stands frozen, all but memory on disk. Dropped, it runs on and
/// the dump is given up.
#[derive(Debug)]
pub struct FrozenProcess {
    root: u32,
    images: PathBuf,
    criu: Running,
    /// CRIU waits for this end to speak or close.
    release: Option<UnixStream>,
    kept_log: Option<PathBuf>,
    limit: Duration,
    began: Instant,
    frozen: Instant,
    ready: Instant,
    late: Option<String>,
    _breakpoints: Breakpoints,
}

fn log_paths(images: &Path) -> (PathBuf, PathBuf) {
    (images.join("dump.log"), images.join("dump.out"))
}

fn failed(root: u32, images: &Path, kept: Option<&Path>, threads: Option<&Threads>) -> DumpError {
    let (log, output) = log_paths(images);
    let reason = Complaint::read(&log, &output, kept);
    let did = threads.and_then(|threads| threads.did(&reason.words));
    DumpError::Failed { pid: root, reason, did }
}

/// Removes what an attempt left in the directory.
fn empty(images: &Path) -> io::Result<()> {
    for entry in fs::read_dir(images)? {
        fs::remove_file(entry?.path())?;
    }
    Ok(())
}

impl Dump {
    /// Freezes `root` and all below it, and returns when everything but memory
    /// is in `images` (made here, owner-only; it must not exist).
    ///
    /// # Errors
    /// [`DumpError`]; the tree runs on, and `images` is gone.
    pub fn begin(
        criu: &Criu,
        root: u32,
        images: &Path,
        options: &DumpOptions,
    ) -> Result<FrozenProcess, DumpError> {
        DirBuilder::new()
            .mode(0o700)
            .create(images)
            .map_err(system(format!("making {}", images.display())))?;
        let result = Self::attempts(criu, root, images, options);
        if result.is_err() {
            // The error at hand is the one to tell.
            let _ = fs::remove_dir_all(images);
        }
        result
    }

    fn attempts(
        criu: &Criu,
        root: u32,
        images: &Path,
        options: &DumpOptions,
    ) -> Result<FrozenProcess, DumpError> {
        let mut attempt = 1;
        let mut still_moving = false;
        let mut restless = 0;
        // Once more, too, if a thread did not stop in CRIU's time, as when the machine
        // itself stood still.
        let mut late = None;
        loop {
            let pids = process_tree(root);
            // One that ends meanwhile is none, and one that has begun is seen the next
            // time.
            let changed = || restless < MOST_RESTLESS && process_tree(root) != pids;
            let survey = match preflight(&pids) {
                Ok(survey) => survey,
                Err(_) if changed() => {
                    restless += 1;
                    continue;
                }
                Err(error) => return Err(system(format!("looking at process {root}"))(error)),
            };
            if !survey.refusals.is_empty() {
                return Err(DumpError::Refused(survey.refusals));
            }
            let keep = survey.inside_connections && !still_moving;
            match start(criu, &pids, images, options, &survey.outside_connections, keep) {
                Err(DumpError::Failed { reason, .. })
                    if attempt < MOST_ATTEMPTS
                        && [NEW_CONNECTION, MOVING_CONNECTION]
                            .iter()
                            .any(|m| reason.words.contains(m)) =>
                {
                    attempt += 1;
                    // Rather all of them closed than no dump.
                    still_moving =
                        attempt == MOST_ATTEMPTS && reason.words.contains(MOVING_CONNECTION);
                }
                Err(DumpError::Failed { reason, did, .. })
                    if late.is_none() && reason.words.contains(DID_NOT_STOP) =>
                {
                    late =
                        Some([Some(reason.words), did].into_iter().flatten().collect::<Vec<_>>());
                }
                Err(DumpError::Failed { .. }) if changed() => restless += 1,
                result => {
                    return result.map(|mut frozen| {
                        frozen.late = late.map(|words| words.join("; "));
                        frozen
                    });
                }
            }
            empty(images).map_err(system(format!("emptying {}", images.display())))?;
        }
    }
}

fn start(
    criu: &Criu,
    pids: &[u32],
    images: &Path,
    options: &DumpOptions,
    outside: &[u32],
    keep_connections: bool,
) -> Result<FrozenProcess, DumpError> {
    let Some(&root) = pids.first() else {
        return Err(system("looking at the process")(io::ErrorKind::NotFound.into()));
    };
    let (release, theirs) = UnixStream::pair().map_err(system("making a socket pair"))?;
    let (status, ready) = io::pipe().map_err(system("making a pipe"))?;
    let (theirs, ready) = (OwnedFd::from(theirs), OwnedFd::from(ready));
    let mut launch = if lives_elsewhere(root) {
        let none = || io::Error::new(io::ErrorKind::NotFound, "no path to strata-clone is set");
        let helper =
            options.helper.as_ref().ok_or_else(none).map_err(system("entering namespaces"))?;
        let mut launch = Launch::new(helper);
        launch.arg("enter").arg(root.to_string()).arg(criu.path());
        launch
    } else {
        Launch::new(criu.path())
    };
    let number = inner_number(root).unwrap_or(root);
    launch.arg("dump").arg("--tree").arg(number.to_string()).arg("--images-dir").arg(images);
    // One line of log costs as much as dumping a page: errors only.
    launch.args(["--log-file", "dump.log", "-v1"]);
    launch.args(["--lazy-pages", "--leave-running", "--shell-job", "--file-locks"]);
    launch.arg(IGNORE_CGROUPS);
    launch.arg("--ghost-limit").arg(GHOST_LIMIT.to_string());
    launch.arg("--ps-socket").arg(theirs.as_raw_fd().to_string());
    launch.arg("--status-fd").arg(ready.as_raw_fd().to_string());
    // One that nobody has accepted yet stays where it is, and is in no dump.
    launch.arg("--skip-in-flight");
    if keep_connections {
        launch.args(["--tcp-established", "--network-lock", "skip"]);
    } else {
        launch.arg("--tcp-close");
    }
    for inode in outside {
        launch.arg("--external").arg(format!("unix[{inode}]"));
    }
    // Our copies of its ends close when it has started.
    launch.inherit(vec![theirs, ready]);
    let questions = if options.hide_memory {
        hide::prepare(&mut launch, pids).map_err(system("making a socket pair"))?
    } else {
        None
    };
    let began = Instant::now();
    let breakpoints = Breakpoints::ahead();
    let running = launch
        .start(&log_paths(images).1)
        .map_err(system(format!("starting {}", criu.path().display())))?;
    let mut waiting = FrozenProcess {
        root,
        images: images.to_owned(),
        criu: running,
        release: Some(release),
        kept_log: options.kept_log.clone(),
        limit: options.limit,
        began,
        frozen: began,
        ready: began,
        late: None,
        _breakpoints: breakpoints,
    };
    if let Some(questions) = questions {
        hide::answer(&questions, pids).map_err(system("answering for the kernel"))?;
    }
    // What they were doing when CRIU was found to be slow.
    let mut threads = None;
    if waiting.wait_ready(&OwnedFd::from(status), &mut threads)? {
        return Ok(waiting);
    }
    // It gave up by itself: nothing is left to be ended.
    waiting.release = None;
    waiting.end("freeze")?;
    Err(failed(root, images, options.kept_log.as_deref(), threads.as_ref()))
}

impl FrozenProcess {
    /// Waits for CRIU's byte, and looks at the tree's `threads` when that takes long.
    /// `false`: it ended without one.
    fn wait_ready(
        &mut self,
        status: &OwnedFd,
        threads: &mut Option<Threads>,
    ) -> Result<bool, DumpError> {
        let end = self.began + self.limit;
        let mut seen_frozen = false;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.release = None;
                self.stop();
                let running = wait_untraced(self.root);
                let (pid, limit) = (self.root, self.limit);
                return Err(DumpError::TooLong { what: "freeze", pid, limit, running });
            }
            let slow_in = SLOW.saturating_sub(self.began.elapsed());
            if slow_in.is_zero() && threads.is_none() {
                *threads = Some(Threads::of(&process_tree(self.root)));
            }
            let wait = match (seen_frozen, &threads) {
                (false, _) => left.min(LOOK),
                (true, None) => left.min(slow_in),
                (true, Some(_)) => left,
            };
            let [polled] =
                poll_readable([status.as_fd()], Some(wait)).map_err(system("waiting for CRIU"))?;
            if !seen_frozen && is_in_state(self.root, 't') {
                seen_frozen = true;
                self.frozen = Instant::now();
            }
            if polled.readable || polled.hangup {
                self.ready = Instant::now();
                if !seen_frozen {
                    self.frozen = self.ready;
                }
                return Ok(polled.readable);
            }
        }
    }

    /// Waits for CRIU's end; when that takes too long it is killed.
    fn end(&mut self, what: &'static str) -> Result<ExitStatus, DumpError> {
        let limit = self.limit;
        let ended = self.criu.wait(Some(limit)).map_err(system("waiting for CRIU"))?;
        ended.ok_or_else(|| {
            self.criu.kill();
            let running = wait_untraced(self.root);
            DumpError::TooLong { what, pid: self.root, limit, running }
        })
    }

    /// Ends CRIU, which is to give up by itself where it can.
    fn stop(&mut self) {
        self.release = None;
        if !matches!(self.criu.wait(Some(GRACE)), Ok(Some(_))) {
            self.criu.kill();
        }
    }

    /// Since when the tree stands still, to a millisecond.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.frozen
    }

    /// Why an attempt before this one stood still in vain.
    #[must_use]
    pub fn late(&self) -> Option<&str> {
        self.late.as_deref()
    }

    /// The root of the tree.
    #[must_use]
    pub fn root(&self) -> u32 {
        self.root
    }

    /// Lets the tree run on, and returns when it does and the dump is whole.
    ///
    /// # Errors
    /// [`DumpError`]; the images are gone then.
    pub fn thaw(mut self) -> Result<DumpOutcome, DumpError> {
        let result = self.finish();
        if result.is_err() {
            let _ = fs::remove_dir_all(&self.images);
        }
        result
    }

    fn finish(&mut self) -> Result<DumpOutcome, DumpError> {
        self.release = None;
        let status = self.end("thaw")?;
        let thawed = Instant::now();
        if !status.success() {
            return Err(failed(self.root, &self.images, self.kept_log.as_deref(), None));
        }
        mend_files(&self.images)
            .map_err(system(format!("changing the images in {}", self.images.display())))?;
        Ok(DumpOutcome {
            frozen: thawed - self.frozen,
            before: self.frozen - self.began,
            criu: self.ready - self.frozen,
        })
    }

    /// Makes the images what they are after a thaw, while the tree stands still.
    ///
    /// # Errors
    /// They cannot be used.
    pub fn complete(&self) -> Result<(), DumpError> {
        let what = format!("changing the images in {}", self.images.display());
        mend_files(&self.images).map_err(system(what))
    }

    /// Whoever asked has killed the tree, after [`Self::complete`]: returns when CRIU
    /// holds none of it any more. The images stay.
    pub fn end_killed(mut self) {
        self.stop();
    }

    /// Lets the tree run on and gives the dump up: the images are removed.
    ///
    /// # Errors
    /// CRIU had to be killed, or the images could not be removed.
    pub fn abort(mut self) -> Result<(), DumpError> {
        self.release = None;
        self.end("thaw")?;
        let what = format!("removing {}", self.images.display());
        fs::remove_dir_all(&self.images).map_err(system(what))
    }
}

impl Drop for FrozenProcess {
    fn drop(&mut self) {
        if self.release.is_some() {
            self.stop();
            let _ = fs::remove_dir_all(&self.images);
        }
    }
}

#[cfg(test)]
mod tests;
