//! The holder: a process that does nothing but to have the descriptor table of
//! supervisor and worker, too.
//!
//! With the last copy of a userfaultfd closed, missing pages read as zero. The child
//! of a raw `clone` has no agent that would hold one: whoever ends supervisor *and*
//! worker would have it read zeroes. Because the table is shared, the holder has every
//! userfaultfd in the instant in which the kernel makes it. When both are dead it keeps
//! those of processes that live, and closes all else, so that agents see that their
//! daemon is gone. It serves nobody: who waits there waits for ever, and can be killed.

use std::time::Duration;

use strata_sys::{
    Pidfd, close_fd, is_living_userfaultfd, open_fds, process_exists, set_thread_name,
    spawn_sharing_files,
};

use crate::supervisor::Inheritance;

/// Its name in `ps`: not that of those who work.
const NAME: &str = "strata-holder";
/// A worker that outlives its supervisor is looked at this often.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long one has that the supervisor made in its last moment to say its number.
const LAST_BORN: Duration = Duration::from_millis(200);
/// How often it looks whose process has ended.
const TIDY_EVERY: Duration = Duration::from_secs(1);

/// Makes one; its number. The supervisor ends it.
pub(crate) fn start(inheritance: &Inheritance, supervisor: &Pidfd) -> std::io::Result<u32> {
    spawn_sharing_files(|| {
        set_thread_name(NAME);
        // As the supervisor: refused to all but the privileged.
        let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
        while !supervisor.exits_within(Duration::from_secs(3600)) {}
        let worker =
            || inheritance.registry.worker_pid().load(std::sync::atomic::Ordering::Acquire);
        loop {
            let last = worker();
            while process_exists(last) {
                std::thread::sleep(LOOK_EVERY);
            }
            std::thread::sleep(LAST_BORN);
            if worker() == last {
                break;
            }
        }
        while hold() > 0 {
            std::thread::sleep(TIDY_EVERY);
        }
        0
    })
}

/// Closes all but userfaultfds of processes that live; how many those are.
fn hold() -> usize {
    let mut held = 0;
    // What cannot be listed is held.
    let Ok(fds) = open_fds() else { return 1 };
    for fd in fds {
        if is_living_userfaultfd(fd) {
            held += 1;
        } else {
            close_fd(fd);
        }
    }
    held
}
