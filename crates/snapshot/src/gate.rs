//! CRIU asks before it lets a restored tree run, and once more when it has.
//!
//! It lets the threads go one after another. Each runs at once, and a thread that is
//! gone before its turn, because another one of its process has called `exit` or was
//! quicker to kill it, makes CRIU give up the whole tree. So each process is sent a
//! SIGSTOP while all of them stand, and a SIGCONT when all are let go.
//!
//! CRIU runs `strata-clone` at each step of a restore (`--action-script`), without
//! arguments or descriptors, in its work directory; there is the socket at which
//! this one asks for leave.

use std::env;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use strata_sys::{Pidfd, SIGCONT, SIGSTOP};

use crate::processes::{has_pending, is_ending};

/// Its name in the work directory.
pub(crate) const SOCKET: &str = "gate.socket";
/// The steps before and after the threads are let go.
const BEFORE: &str = "pre-resume";
const AFTER: &str = "post-resume";
/// Between two looks whether the tree was ended.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Lets CRIU go on, which asked here.
pub(crate) fn grant(mut asking: UnixStream) -> io::Result<()> {
    asking.write_all(&[0])
}

/// Keeps these processes from running when they are let go; those that are to run
/// once all are: one that was stopped at the dump stays so, by CRIU's own signal.
pub(crate) fn stop(processes: &[(u32, Pidfd)]) -> Vec<u32> {
    let runs = |(pid, pidfd): &&(u32, Pidfd)| !has_pending(*pid, SIGSTOP) && pidfd.signal(SIGSTOP);
    processes.iter().filter(runs).map(|(pid, _)| *pid).collect()
}

/// Lets them run: children first, whose parents then find none of them stopped.
pub(crate) fn run(processes: &[(u32, Pidfd)], stopped: &[u32]) {
    for (_, pidfd) in processes.iter().rev().filter(|(pid, _)| stopped.contains(pid)) {
        pidfd.signal(SIGCONT);
    }
}

/// The program's part: `action` is the step that CRIU has come to.
pub(crate) fn ask(action: &str) {
    if ![BEFORE, AFTER].contains(&action) {
        return;
    }
    let ask = || UnixStream::connect(SOCKET)?.read_exact(&mut [0]);
    if ask().is_ok() || action == AFTER {
        return;
    }
    // Whoever serves the tree has died, and CRIU goes on whatever is said here. The
    // next worker ends the tree. Not to be seen by a pidfd: killed threads stay until
    // CRIU, their tracer, has collected them.
    let root = env::var("CRTOOLS_INIT_PID").ok().and_then(|pid| pid.parse().ok());
    while root.is_some_and(|root| !is_ending(root)) {
        std::thread::sleep(LOOK_EVERY);
    }
}
