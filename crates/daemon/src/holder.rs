//! The holder: a process that does nothing but to have the descriptor table of
//! supervisor and worker, too.
//!
//! With the last copy of a userfaultfd closed, missing pages read as zero; with the last
//! one of a memory file closed, what is stored there is gone. Because the table is shared,
//! the holder has every descriptor in the instant in which it is made. When both are dead
//! it keeps what the registry names and the userfaultfds of processes that live, and
//! closes all else, so that clients see that their daemon is gone. It serves nobody: who
//! waits at a page waits until another daemon takes over (`takeover.rs`), or is killed.

use std::collections::HashSet;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use strata_pager::Registry;
use strata_sys::{
    Pidfd, close_fd, is_living_userfaultfd, open_fds, process_exists, set_thread_name,
    shares_descriptors, sharing_descriptors_with, spawn_sharing_files,
};

use crate::takeover;

/// Its name in `ps`: not that of those who work.
const NAME: &str = "strata-holder";
/// A worker that outlives its supervisor is looked at this often.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long one has that the supervisor made in its last moment to say its number, where
/// the kernel does not tell who shares the table.
const LAST_BORN: Duration = Duration::from_millis(200);
/// How often it looks whose process has ended.
const TIDY_EVERY: Duration = Duration::from_secs(1);

/// Makes one; its number. The supervisor ends it. `directory`: where the mark is.
pub(crate) fn start(
    registry: &Arc<Registry>,
    supervisor: &Pidfd,
    directory: &Path,
) -> std::io::Result<u32> {
    spawn_sharing_files(|| {
        set_thread_name(NAME);
        // As the supervisor: refused to all but the privileged.
        let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
        while !supervisor.exits_within(Duration::from_secs(3600)) {}
        wait_for_workers(registry);
        let mut living = hold(registry);
        while !living.is_empty() || registry.has_snapshots() {
            if takeover::is_replaced(directory) {
                return 0;
            }
            std::thread::sleep(TIDY_EVERY);
            living.retain(|&fd| is_living_userfaultfd(fd));
        }
        takeover::holder_ends(directory);
        0
    })
}

/// Waits until nobody else has this table. The supervisor is dead: no more are made.
fn wait_for_workers(registry: &Registry) {
    let own = std::process::id();
    let worker = || registry.worker_pid().load(Ordering::Acquire);
    loop {
        let last = worker();
        while process_exists(last) && shares_descriptors(own, last).unwrap_or(true) {
            std::thread::sleep(LOOK_EVERY);
        }
        match sharing_descriptors_with(own) {
            Ok(others) if others.is_empty() => return,
            Ok(_) => std::thread::sleep(LOOK_EVERY),
            Err(_) => {
                std::thread::sleep(LAST_BORN);
                if worker() == last {
                    return;
                }
            }
        }
    }
}

/// Closes all but what the registry names and userfaultfds of processes that live, and
/// returns those.
fn hold(registry: &Registry) -> Vec<RawFd> {
    let named: HashSet<_> = registry.claimed_fds().into_iter().collect();
    let open = loop {
        match open_fds() {
            Ok(open) => break open,
            Err(_) => std::thread::sleep(TIDY_EVERY),
        }
    };
    let (living, others): (Vec<_>, Vec<_>) =
        open.into_iter().partition(|&fd| is_living_userfaultfd(fd));
    others.into_iter().filter(|fd| !named.contains(fd)).for_each(close_fd);
    living
}
