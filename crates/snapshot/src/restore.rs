//! Restores a process tree whose memory somebody else brings.
//!
//! `criu restore --lazy-pages` connects to a socket of ours and sends, for each
//! process, its number and a userfaultfd, before the process has registered its
//! memory with it. From then on its missing pages must be answered: threads
//! touch their memory before CRIU says that it is finished. The process closes
//! its own copy, so the one handed out here is the only one: closed, missing
//! pages read as zero.
//!
//! What it registers is *all* private anonymous memory that is not locked, for
//! missing pages only: heaps, stacks, guard pages, the empty tails of programs and
//! libraries. Pages in it that hold a thread's stack pointer CRIU may have filled
//! itself: they are present already.

mod error;
mod numbers;
pub(crate) mod options;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use strata_sys::{Launch, Pidfd, Running, SIGKILL, peer, poll_readable, receive_with_fds};

pub use self::error::RestoreError;
use self::error::system;
use self::numbers::{check_highest, numbers, pass_over, taken, wait_free};
use self::options::RestoreOptions;
use crate::breakpoints::Breakpoints;
use crate::clone::Run;
use crate::connections::wait_gone;
use crate::criu::{Criu, IGNORE_CGROUPS};
use crate::gate;
use crate::images;
use crate::log::Complaint;
use crate::processes::{
    find_by_inner_number, is_ending, is_in_state, kill_below, kill_orphans, process_tree,
};
use crate::view;

/// How long numbers may still be in use by processes that have just ended and
/// are not collected yet. Some first processes (of containers) take seconds.
const FREE_WITHIN: Duration = Duration::from_secs(15);
/// The name that CRIU connects to, in its work directory.
const SOCKET: &str = "lazy-pages.socket";
/// What it sends at the end (`LAZY_PAGES_RESTORE_FINISHED`, "RSTF").
const FINISHED: i32 = 0x5253_5446;
/// How often it is looked whether what was restored is there still.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a restored tree may take to be gone after it was killed.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// A process that is being restored and does not run yet.
#[derive(Debug)]
pub struct Arrival {
    /// Its number at the dump: the name of its images, and its number in the
    /// namespace that it is restored into.
    pub old_pid: u32,
    /// Its number here.
    pub pid: u32,
    /// Gets its missing pages; the only copy. Opened with fork, remap, unmap and
    /// remove events, non-blocking.
    pub userfaultfd: OwnedFd,
}

/// A tree that was restored and runs.
#[derive(Debug)]
pub struct RestoredTree {
    /// Its root, by its number here.
    pub root: u32,
    /// For a clone with numbers of its own: the process outside that stands for
    /// it. It ends when the clone has, with the exit code of its root (or
    /// [`crate::clone::FAILED`]); killed, it takes the clone along. A child of
    /// this process; wait for it, or it stays a zombie.
    pub keeper: Option<Running>,
}

/// A restore under way. Dropped before its end, everything it has started is
/// ended.
#[derive(Debug)]
pub struct Restore {
    criu: Option<Running>,
    listener: UnixListener,
    connection: Option<UnixStream>,
    /// Written to by the clone's first process when CRIU has become it.
    ready: Option<OwnedFd>,
    arrived: Vec<(u32, Pidfd)>,
    /// Those that were free for it, and are its processes' now.
    numbers: Vec<u32>,
    /// CRIU's own number here, once it has connected.
    coordinator: u32,
    gate: UnixListener,
    /// When all stands ready: answered, it lets the tree run.
    asking: Option<UnixStream>,
    /// CRIU has let go of it.
    standing: Option<Standing>,
    own_pids: bool,
    lacks_terminal: bool,
    is_let_go: bool,
    work: PathBuf,
    kept_log: Option<PathBuf>,
    limit: Duration,
    _breakpoints: Breakpoints,
}

fn log_paths(work: &Path) -> (PathBuf, PathBuf) {
    (work.join("restore.log"), work.join("restore.out"))
}

/// A socket in `work`.
fn bind(work: &Path, name: &str) -> Result<UnixListener, RestoreError> {
    // By way of a descriptor: a socket's path is 107 bytes long at most.
    let here = fs::File::open(work).map_err(system(format!("opening {}", work.display())))?;
    let here = format!("/proc/self/fd/{}/{name}", here.as_raw_fd());
    UnixListener::bind(here).map_err(system(format!("binding {name} in {}", work.display())))
}

fn arguments(
    criu: &Criu,
    images: &Path,
    work: &Path,
    options: &RestoreOptions,
    keep_connections: bool,
) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec![criu.path().into(), "restore".into()];
    words.extend(["--images-dir".into(), images.into(), "--work-dir".into(), work.into()]);
    words.extend(["--log-file", "restore.log", "-v1"].map(OsString::from));
    words.extend(["--lazy-pages", "--shell-job", "--file-locks"].map(OsString::from));
    words.push(IGNORE_CGROUPS.into());
    words.extend(["--action-script".into(), options.helper.clone().into()]);
    if keep_connections {
        words.extend(["--tcp-established", "--network-lock", "skip"].map(OsString::from));
    } else {
        words.push("--tcp-close".into());
    }
    for (name, fd) in &options.inherited {
        words.extend(["--inherit-fd".into(), format!("fd[{}]:{name}", fd.as_raw_fd()).into()]);
    }
    words
}

/// A tree that is its own master, and stands still.
#[derive(Debug)]
struct Standing {
    root: u32,
    /// Those that are to run on.
    stopped: Vec<u32>,
    asking: UnixStream,
}

/// The numbers of the dump's processes and threads, for which a tree is about to end so that
/// they are free: has the kernel give none of them to anybody else for a while. Images that
/// cannot be read are an error of the restore.
pub fn keep_free(images: &Path) {
    pass_over(&numbers(images).unwrap_or_default(), numbers::limit());
}

fn go_on(asking: UnixStream) -> Result<(), RestoreError> {
    gate::grant(asking).map_err(system("telling CRIU to go on"))
}

impl Restore {
    /// Starts CRIU on the images of a dump. `work` (made here, owner-only; it
    /// must not exist) is for this restore alone; the caller removes it after the restore.
    ///
    /// # Errors
    /// [`RestoreError`]; nothing is left running.
    pub fn begin(
        criu: &Criu,
        images_dir: &Path,
        work: &Path,
        mut options: RestoreOptions,
    ) -> Result<Self, RestoreError> {
        let breakpoints = Breakpoints::ahead();
        if options.rehearsal {
            (options.own_pids, options.own_network) = (true, true);
        }
        let reading = || system(format!("reading the images in {}", images_dir.display()));
        let numbers = numbers(images_dir).map_err(reading())?;
        let limit = numbers::limit();
        check_highest(&numbers, limit)?;
        if !options.own_pids {
            wait_free(&numbers, limit, work.parent())?;
        }
        DirBuilder::new()
            .mode(0o700)
            .create(work)
            .map_err(system(format!("making {}", work.display())))?;
        let listener = bind(work, SOCKET)?;
        let gate = bind(work, gate::SOCKET)?;
        let own_place = options.own_pids || options.own_network || !options.shown.is_empty();
        let mut connections = BTreeSet::new();
        if options.keep_connections {
            connections = images::connections(images_dir).map_err(reading())?;
        }
        if !options.own_network {
            wait_gone(&connections, Instant::now() + FREE_WITHIN)
                .map_err(system("its connections cannot be made again"))?;
        }
        let seen = view::make(images_dir, work, &options.terminals, options.rehearsal)
            .map_err(reading())?;
        let images_seen = if seen.is_some() { work } else { images_dir };
        let seen = seen.unwrap_or_default();
        options.inherited.extend(seen.inherited);
        let mut program = arguments(criu, images_seen, work, &options, !connections.is_empty());
        let mut inherited: Vec<OwnedFd> =
            std::mem::take(&mut options.inherited).into_iter().map(|(_, fd)| fd).collect();
        let mut ready = None;
        if options.own_pids {
            let helper = &options.helper;
            let (reader, writer) = io::pipe().map_err(system("making a pipe"))?;
            let writer = OwnedFd::from(writer);
            program.extend(["--exec-cmd".into(), "--".into(), helper.into(), "init".into()]);
            program.push(writer.as_raw_fd().to_string().into());
            inherited.push(writer);
            ready = Some(OwnedFd::from(reader));
        } else {
            program.push("--restore-detached".into());
        }
        let mut launch;
        if own_place {
            let shown = options.shown.into_iter().map(|shown| (shown.copy, shown.path)).collect();
            let (own_pids, own_network) = (options.own_pids, options.own_network);
            launch = Launch::new(&options.helper);
            let any_address = options.rehearsal;
            launch.args(Run { own_pids, own_network, any_address, shown, program }.words());
        } else {
            launch = Launch::new(&program[0]);
            launch.args(&program[1..]);
        }
        launch.inherit(inherited);
        if let Some(group) = options.group {
            launch.join(group);
        }
        let running = launch
            .start(&log_paths(work).1)
            .map_err(system(format!("starting {}", criu.path().display())))?;
        Ok(Self {
            criu: Some(running),
            listener,
            connection: None,
            ready,
            arrived: Vec::new(),
            numbers: if options.own_pids { Vec::new() } else { numbers },
            coordinator: 0,
            gate,
            asking: None,
            standing: None,
            own_pids: options.own_pids,
            lacks_terminal: seen.lacks_terminal,
            is_let_go: false,
            work: work.to_owned(),
            kept_log: options.kept_log,
            limit: options.limit,
            _breakpoints: breakpoints,
        })
    }

    /// What was started, the forefather of all that is restored.
    #[must_use]
    pub fn forefather(&self) -> Option<u32> {
        self.criu.as_ref().map(Running::id)
    }

    /// A terminal that the tree had is nowhere to be had: it has `/dev/null` instead.
    #[must_use]
    pub fn lacks_terminal(&self) -> bool {
        self.lacks_terminal
    }

    fn failed(&self) -> RestoreError {
        let (log, output) = log_paths(&self.work);
        RestoreError::Failed(Complaint::read(&log, &output, self.kept_log.as_deref()))
    }

    fn too_long(&self, what: &'static str) -> RestoreError {
        RestoreError::TooLong { what, limit: self.limit }
    }

    /// Waits for `fd` to be readable. `false`: CRIU ended first.
    fn wait_or_end(&self, fd: &impl AsFd, what: &'static str) -> Result<bool, RestoreError> {
        let Some(criu) = &self.criu else { return Ok(false) };
        let end = Instant::now() + self.limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.too_long(what));
            }
            let wait = left.min(LOOK_EVERY);
            let [wanted, ended] = poll_readable([fd.as_fd(), criu.pidfd().as_fd()], Some(wait))
                .map_err(system("waiting for CRIU"))?;
            if wanted.readable || wanted.hangup {
                return Ok(true);
            }
            // CRIU waits for ever for one that was killed before it was let go.
            let was_killed = || self.arrived.iter().any(|(_, pidfd)| pidfd.has_exited());
            if ended.readable || !self.is_let_go && was_killed() {
                return Ok(false);
            }
        }
    }

    fn accept(&mut self) -> Result<(), RestoreError> {
        if !self.wait_or_end(&self.listener, "connect")? {
            return Err(self.failed());
        }
        let (connection, _) = self.listener.accept().map_err(system("accepting CRIU"))?;
        connection.set_read_timeout(Some(self.limit)).map_err(system("setting a limit"))?;
        let peer = peer::peer_of(&connection).map_err(system("asking who CRIU is"))?;
        self.coordinator = peer.pid;
        self.connection = Some(connection);
        Ok(())
    }

    /// The next process; `None` when all have come and stand, to the last thread, where
    /// they will run on, until [`Restore::finish`]. What it hands out must be served
    /// at once.
    ///
    /// # Errors
    /// [`RestoreError`]. Drop the restore then: that ends what was started.
    pub fn next_arrival(&mut self) -> Result<Option<Arrival>, RestoreError> {
        if self.connection.is_none() {
            self.accept()?;
        }
        loop {
            let Some(connection) = &self.connection else { return Err(self.failed()) };
            if self.asking.is_some() {
                return Ok(None);
            }
            if !self.wait_or_end(connection, "restore the next process")? {
                return Err(self.failed());
            }
            let mut number = [0; 4];
            if let Err(error) = (&*connection).read_exact(&mut number) {
                let over = error.kind() == io::ErrorKind::UnexpectedEof;
                return Err(if over { self.failed() } else { system("hearing CRIU")(error) });
            }
            match i32::from_ne_bytes(number) {
                FINISHED => {
                    self.asking = Some(self.hear("bring all threads to where they run on")?);
                }
                // A zombie: it has no memory.
                number if number < 0 => {}
                number => {
                    let arrival = self.receive(number.cast_unsigned())?;
                    return Ok(Some(arrival));
                }
            }
        }
    }

    /// Waits until CRIU asks for leave: until it has come to `what`.
    fn hear(&self, what: &'static str) -> Result<UnixStream, RestoreError> {
        if !self.wait_or_end(&self.gate, what)? {
            return Err(self.failed());
        }
        Ok(self.gate.accept().map_err(system("hearing CRIU's program"))?.0)
    }

    fn receive(&mut self, old_pid: u32) -> Result<Arrival, RestoreError> {
        let Some(connection) = &self.connection else { return Err(self.failed()) };
        let mut byte = [0; 1];
        let (got, mut fds) =
            receive_with_fds(connection, &mut byte).map_err(system("receiving a userfaultfd"))?;
        let (Some(userfaultfd), true, true) = (fds.pop(), fds.is_empty(), got == 1) else {
            return Err(RestoreError::Protocol(format!("{got} bytes after process {old_pid}")));
        };
        let pid = if self.own_pids {
            find_by_inner_number(self.coordinator, old_pid)
        } else {
            Some(old_pid)
        };
        let pid = pid.ok_or_else(|| RestoreError::Protocol(format!("no process {old_pid}")))?;
        let pidfd = Pidfd::open(pid).map_err(system(format!("opening process {pid}")))?;
        self.arrived.push((pid, pidfd));
        Ok(Arrival { old_pid, pid, userfaultfd })
    }

    /// Has CRIU let go of the tree, which stands still all the same. After this nothing but
    /// [`Restore::finish`] is left to do, and it runs.
    ///
    /// # Errors
    /// [`RestoreError`]. Drop the restore then: nothing of it has run.
    pub fn let_go(&mut self) -> Result<(), RestoreError> {
        let Some(asking) = self.asking.take() else {
            return Err(RestoreError::Protocol("the end before the end".to_owned()));
        };
        // While none has ended.
        let root = self.root();
        let stopped = gate::stop(&self.arrived);
        self.is_let_go = true;
        go_on(asking)?;
        let asking = self.hear("let all threads go")?;
        self.standing = Some(Standing { root, stopped, asking });
        Ok(())
    }

    /// Waits until the tree runs. Missing pages must be served meanwhile.
    ///
    /// # Errors
    /// [`RestoreError`]; what was started has been ended.
    pub fn finish(mut self) -> Result<RestoredTree, RestoreError> {
        if self.standing.is_none() {
            self.let_go()?;
        }
        let Some(Standing { root, stopped, asking }) = self.standing.take() else {
            return Err(self.failed());
        };
        gate::run(&self.arrived, &stopped);
        go_on(asking)?;
        let limit = self.limit;
        let is_clone = if let Some(ready) = self.ready.take() {
            let mut byte = [0; 1];
            let said = self.wait_or_end(&ready, "let the clone run")?
                && fs::File::from(ready).read(&mut byte).is_ok_and(|got| got == 1);
            if !said {
                return Err(self.failed());
            }
            true
        } else {
            let Some(criu) = &mut self.criu else { return Err(self.failed()) };
            let ended = criu.wait(Some(limit)).map_err(system("waiting for CRIU"))?;
            match ended {
                None => return Err(self.too_long("let the tree run")),
                Some(status) if !status.success() => return Err(self.failed()),
                Some(_) => false,
            }
        };
        // Nothing is to be ended any more.
        let keeper = self.criu.take().filter(|_| is_clone);
        Ok(RestoredTree { root, keeper })
    }

    /// The root: the arrival that is not below another.
    fn root(&self) -> u32 {
        let pids: Vec<u32> = self.arrived.iter().map(|(pid, _)| *pid).collect();
        let has_all = |pid: &&u32| {
            let tree = process_tree(**pid);
            pids.iter().all(|pid| tree.contains(pid))
        };
        match pids.as_slice() {
            [one] => *one,
            _ => pids.iter().find(has_all).or(pids.first()).copied().unwrap_or(0),
        }
    }
}

impl Drop for Restore {
    /// Ends what CRIU has started first: it then gives up by itself. Killed
    /// before, it would leave processes behind that wait for it for ever.
    fn drop(&mut self) {
        let Some(mut criu) = self.criu.take() else { return };
        let end = Instant::now() + GONE_WITHIN;
        while matches!(criu.wait(Some(Duration::ZERO)), Ok(None)) && Instant::now() < end {
            kill_below(criu.id());
            // It has yet to notice, or to start anything.
            if !matches!(criu.wait(Some(Duration::from_millis(5))), Ok(None)) {
                break;
            }
        }
        criu.kill();
        kill_orphans(&self.numbers);
        // Those that CRIU had let go already.
        for (_, pidfd) in &self.arrived {
            pidfd.signal(SIGKILL);
        }
        for (_, pidfd) in &self.arrived {
            while !pidfd.has_exited() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // Those that CRIU has killed: their numbers are to be free for the next try.
        let dies = |(number, _): &(u32, String)| !is_in_state(*number, 'Z') && is_ending(*number);
        while taken(&self.numbers).iter().any(dies) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
