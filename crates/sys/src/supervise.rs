//! A worker that shares its supervisor's descriptor table, and what a
//! supervisor needs to watch over it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{OwnedFd, RawFd};

use std::sync::{Mutex, PoisonError};

use crate::process::is_zombie;
use crate::uffd::own;

/// A signal that the supervisor acts on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// A child changed state.
    Child,
    /// End in good order.
    Terminate,
    /// Look at the configuration anew, by custom.
    Hangup,
    /// End, and leave everything to the next one (`SIGUSR1`).
    HandOver,
    /// The process of this number says that it is well (`SIGUSR2`).
    Well(u32),
}

/// How a worker ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WorkerExit {
    /// It runs.
    Running,
    /// It ended with this status.
    Status(i32),
    /// It was killed by this signal.
    Killed(i32),
}

fn signal_set(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: sigemptyset initialises the set before anyone reads it, and
    // sigaddset gets valid signal numbers.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}

const SUPERVISED: [i32; 6] =
    [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];

/// Blocks the supervisor's signals (and SIGPIPE), so that they wait for
/// [`wait_for_signal`].
pub fn block_signals() {
    let set = signal_set(&[&SUPERVISED[..], &[libc::SIGPIPE]].concat());
    // SAFETY: a live set; the old one is not wanted.
    unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
}

/// Waits for one of them.
#[must_use]
pub fn wait_for_signal() -> Signal {
    let set = signal_set(&SUPERVISED);
    loop {
        // SAFETY: siginfo_t is plain data for which zeroes are valid.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: a live set, and a live siginfo_t that the kernel fills in.
        let signal = unsafe { libc::sigwaitinfo(&raw const set, &raw mut info) };
        match signal {
            libc::SIGCHLD => return Signal::Child,
            libc::SIGTERM | libc::SIGINT => return Signal::Terminate,
            libc::SIGHUP => return Signal::Hangup,
            libc::SIGUSR1 => return Signal::HandOver,
            // SAFETY: of a signal that a process sent the kernel has filled in the number.
            libc::SIGUSR2 => return Signal::Well(unsafe { info.si_pid() }.cast_unsigned()),
            _ => {}
        }
    }
}

/// Keeps this process in DRAM: a supervisor that waits for its own page cannot
/// save anyone. What it maps later comes there when it is touched: the registry is large,
/// and hardly any of it is in use. An unprivileged process may not; that is no reason to stop.
pub fn lock_memory() -> io::Result<()> {
    for flags in [libc::MCL_CURRENT, libc::MCL_FUTURE | libc::MCL_ONFAULT] {
        // SAFETY: flags.
        if unsafe { libc::mlockall(flags) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Makes a child that runs `work` and shares this process's descriptor table
/// but nothing else: what either opens, both hold, so a descriptor outlives the
/// child that opened it. Returns the child's pid.
///
/// The caller must be single-threaded (asserted): the child starts with a copy
/// of this thread's view of every lock.
pub fn spawn_sharing_files(work: impl FnOnce() -> i32) -> io::Result<u32> {
    spawn(libc::CLONE_FILES, work)
}

/// Makes a child that runs `work` and has descriptors of its own: what it opens is closed
/// when it dies. Returns the child's pid.
///
/// The caller must be single-threaded (asserted), as for [`spawn_sharing_files`].
pub fn spawn_with_own_files(work: impl FnOnce() -> i32) -> io::Result<u32> {
    spawn(0, work)
}

fn spawn(shared: libc::c_int, work: impl FnOnce() -> i32) -> io::Result<u32> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    assert_eq!(threads, 1, "a worker is made only from a single-threaded supervisor");
    // SAFETY: as fork(2), but perhaps with the descriptor table shared: without
    // CLONE_VM the child has its own copy of all memory, with a null stack it
    // goes on on its copy of this one, and no other thread holds a lock.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone,
            (shared | libc::SIGCHLD) as libc::c_ulong,
            std::ptr::null::<u8>(),
            std::ptr::null::<i32>(),
            std::ptr::null::<i32>(),
            0 as libc::c_ulong,
        )
    };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let status = work();
            // SAFETY: ends the child without running the parent's exit
            // handlers in it.
            unsafe { libc::_exit(status) }
        }
        pid => Ok(pid as u32),
    }
}

/// Looks, without waiting, whether a child has ended.
#[must_use]
pub fn wait_worker(pid: u32) -> WorkerExit {
    let mut status = 0;
    // SAFETY: `status` is live.
    let got = unsafe { libc::waitpid(pid as libc::pid_t, &raw mut status, libc::WNOHANG) };
    if got == 0 {
        WorkerExit::Running
    } else if got > 0 && libc::WIFSIGNALED(status) {
        WorkerExit::Killed(libc::WTERMSIG(status))
    } else if got > 0 && libc::WIFEXITED(status) {
        WorkerExit::Status(libc::WEXITSTATUS(status))
    } else if got > 0 {
        WorkerExit::Running
    } else {
        WorkerExit::Killed(0)
    }
}

/// Makes this process the parent of whatever descends from it and loses its own
/// parent: processes that were restored, above all. It must collect them.
pub fn adopt_orphans() {
    // SAFETY: integers only. It cannot fail on any kernel that has userfaultfd.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
}

/// Children that were collected last, and how they ended. Locked while one is collected:
/// who finds it gone finds its status too.
static COLLECTED: Mutex<VecDeque<(u32, i32)>> = Mutex::new(VecDeque::new());
/// So many are remembered.
const REMEMBERED: usize = 256;

/// Collects a child by `wait`, which says its number and how it has ended, and remembers
/// that.
pub(crate) fn collect_by(wait: impl FnOnce() -> Option<(u32, i32)>) {
    let mut collected = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((pid, status)) = wait() {
        collected.retain(|(number, _)| *number != pid);
        collected.truncate(REMEMBERED - 1);
        collected.push_front((pid, status));
    }
}

/// How the child that had this number last has ended, as `wait` says it; none: it was
/// not collected by this process, or long ago, or forgotten.
#[must_use]
pub fn status_of_collected(pid: u32) -> Option<i32> {
    let collected = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
    collected.iter().find(|(number, _)| *number == pid).map(|&(_, status)| status)
}

/// Forgets how the child that had this number has ended: another one is about to have it.
pub fn forget_collected(pid: u32) {
    let mut collected = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
    collected.retain(|(number, _)| *number != pid);
}

/// Collects a child that has ended, if it has; no matter if it is no child.
pub fn collect_child(pid: u32) {
    collect_by(|| {
        let mut status = 0;
        // SAFETY: `status` is live.
        let got = unsafe { libc::waitpid(pid as libc::pid_t, &raw mut status, libc::WNOHANG) };
        (got > 0).then_some((pid, status))
    });
}

/// Children of this process that have ended and are not collected.
#[must_use]
pub fn ended_children() -> Vec<u32> {
    let mut ended = Vec::new();
    if !has_ended_child() {
        return ended;
    }
    for thread in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let children = std::fs::read_to_string(thread.path().join("children"));
        for child in children.unwrap_or_default().split_ascii_whitespace() {
            ended.extend(child.parse::<u32>().ok().filter(|&pid| is_zombie(pid)));
        }
    }
    ended
}

/// Whether there is any: there are files for as many threads as there are tenants.
fn has_ended_child() -> bool {
    // SAFETY: siginfo_t is plain data for which zeroes are valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: writes one live siginfo_t; nobody is collected.
    let found = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, options) } == 0;
    // SAFETY: after a success the kernel has filled in a child's fields, or left zeroes.
    found && unsafe { info.si_pid() } != 0
}

/// Sends a signal to a child that has not been waited for.
pub fn kill_process(pid: u32, signal: i32) {
    // SAFETY: integers. The caller's child cannot have been replaced by another
    // process before it is waited for.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// Allows as many descriptors as the hard limit does: each managed process
/// takes ten.
pub fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is live; both calls only copy it.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// The numbers of all open descriptors of this process.
pub fn open_fds() -> io::Result<Vec<RawFd>> {
    let mut fds = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        if let Some(fd) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) {
            fds.push(fd);
        }
    }
    // The listing's own descriptor is named too, and closed by now.
    // SAFETY: F_GETFD only looks.
    fds.retain(|&fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0);
    Ok(fds)
}

/// Whether `fd` is a userfaultfd of an address space that still exists.
#[must_use]
pub fn is_living_userfaultfd(fd: RawFd) -> bool {
    if !crate::uffd::is_userfaultfd(fd) {
        return false;
    }
    // Asked through a copy, which is closed again; without one, assume life.
    // SAFETY: F_DUPFD_CLOEXEC takes integers and returns a new descriptor.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    copy < 0 || crate::Userfaultfd::adopt(own(copy)).is_alive()
}

/// Closes a descriptor that a dead worker left behind and that no record names.
pub fn close_fd(fd: RawFd) {
    // SAFETY: the caller found it unclaimed while no other thread runs.
    unsafe { libc::close(fd) };
}

/// Closes every descriptor but the standard three: what the caller had open and
/// did not mark close-on-exec is none of a daemon's business, and a lock or a
/// pipe's end that it kept would outlive whoever needs to see it closed.
///
/// Only for the beginning of `main`, while the process is single-threaded
/// (asserted) and nothing of its own is open: an object that owns one of the
/// descriptors would later close a stranger's.
pub fn close_inherited_fds() -> io::Result<()> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    assert_eq!(threads, 1, "descriptors are closed before there is anyone to use them");
    // SAFETY: integers. No object of this process owns a descriptor from 3 on:
    // by the contract above `main` has just begun, the runtime keeps none open
    // between calls, the listing just read is closed again, and no other thread
    // can be using one.
    let code = unsafe {
        libc::syscall(libc::SYS_close_range, FIRST_INHERITED, libc::c_uint::MAX, 0 as libc::c_uint)
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The first descriptor behind standard input, output and error.
const FIRST_INHERITED: libc::c_uint = 3;

/// Takes over a descriptor that a record names. None if it is not open.
#[must_use]
pub fn adopt_fd(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: F_GETFD only looks.
    let open = unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    open.then(|| own(fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_collected_child_ended_is_known_afterwards() {
        for (script, status) in [("exit 7", 7 << 8), ("kill -9 $$", 9)] {
            let mut child =
                std::process::Command::new("sh").args(["-c", script]).spawn().expect("sh");
            let pid = child.id();
            while status_of_collected(pid).is_none() {
                collect_child(pid);
                std::thread::yield_now();
            }
            assert_eq!(status_of_collected(pid), Some(status), "{script}");
            assert!(child.wait().is_err(), "it was collected");
        }
        assert_eq!(status_of_collected(0), None);
    }

    #[test]
    fn how_it_ended_is_forgotten_when_another_gets_its_number() {
        let mut child = std::process::Command::new("true").spawn().expect("true");
        let pid = child.id();
        while status_of_collected(pid).is_none() {
            collect_child(pid);
            std::thread::yield_now();
        }
        assert!(child.wait().is_err(), "it was collected");
        forget_collected(pid);
        assert_eq!(status_of_collected(pid), None);
        assert!(child.wait().is_err(), "it was collected");
    }

    #[test]
    fn it_is_known_too_of_one_that_its_pidfd_collected() {
        let mut child =
            std::process::Command::new("sh").args(["-c", "exit 8"]).spawn().expect("sh");
        let pidfd = crate::Pidfd::open(child.id()).expect("a pidfd");
        while status_of_collected(child.id()).is_none() {
            pidfd.collect();
            std::thread::yield_now();
        }
        assert_eq!(status_of_collected(child.id()), Some(8 << 8));
        assert!(child.wait().is_err(), "it was collected");
    }
}
