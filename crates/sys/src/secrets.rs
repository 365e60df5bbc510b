//! Keeping what is in this process's memory out of files that others may find:
//! core dumps.

use std::io;
use std::sync::OnceLock;

/// What kinds of memory a core dump of this process holds, and of its children:
/// none, but what tells where it was.
const NO_MEMORY: &str = "0";
const OWN_FILTER: &str = "/proc/self/coredump_filter";
/// What was set before.
static BEFORE: OnceLock<String> = OnceLock::new();

/// From here on nothing of this process's memory, nor of that of processes that it
/// forks, gets into a core dump: the kernel writes none, whatever the limits and
/// wherever they are sent (`PR_SET_DUMPABLE`), and who takes one from outside
/// (`gcore`, which only root may then) finds no memory in it unless it insists. What
/// this process starts inherits the filter; [`give_core_filter`] takes it away again.
///
/// # Errors
/// The kernel's. What could be done is done.
pub fn forbid_core_dumps() -> io::Result<()> {
    // First: once it is not dumpable, the file is root's.
    let before = std::fs::read_to_string(OWN_FILTER);
    let filtered = std::fs::write(OWN_FILTER, NO_MEMORY);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is live and both calls only copy it; prctl gets integers. The
    // hard limit stays: what is restored from here may have had a higher one.
    let refused = unsafe {
        if libc::getrlimit(libc::RLIMIT_CORE, &raw mut limit) == 0 {
            limit.rlim_cur = 0;
            libc::setrlimit(libc::RLIMIT_CORE, &raw const limit);
        }
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) != 0
    };
    if refused {
        return Err(io::Error::last_os_error());
    }
    filtered?;
    // The kernel prints it as hexadecimal, and reads what looks like it.
    let _ = BEFORE.set(format!("0x{}", before?.trim()));
    Ok(())
}

/// Has core dumps of a process hold what they would if this one had not forbidden its
/// own: it is no part of Strata, and inherited that.
///
/// # Errors
/// The kernel's; `NotFound` when there is no such process.
pub fn give_core_filter(pid: u32) -> io::Result<()> {
    match BEFORE.get() {
        Some(filter) => std::fs::write(format!("/proc/{pid}/coredump_filter"), filter),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a child of a process of its own: the tests around it are to be dumpable.
    #[test]
    fn a_process_that_forbade_it_leaves_no_memory() {
        const ASKED: &str = "STRATA_TEST_FORBID_CORE_DUMPS";
        if std::env::var_os(ASKED).is_none() {
            let own = std::env::current_exe().expect("this program");
            let status = std::process::Command::new(own)
                .args(["--exact", "secrets::tests::a_process_that_forbade_it_leaves_no_memory"])
                .env(ASKED, "yes")
                .status()
                .expect("it starts");
            assert!(status.success());
            return;
        }
        let before = std::fs::read_to_string(OWN_FILTER).expect("a filter");
        forbid_core_dumps().expect("forbidden");
        let filter = || {
            let text = std::fs::read_to_string(OWN_FILTER).expect("a filter");
            u32::from_str_radix(text.trim(), 16).expect("a number")
        };
        assert_eq!(filter(), 0);
        // SAFETY: integers.
        assert_eq!(unsafe { libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0) }, 0);
        let limits = std::fs::read_to_string("/proc/self/limits").expect("limits");
        let core = limits.lines().find(|line| line.starts_with("Max core")).expect("a line");
        assert_eq!(core.split_ascii_whitespace().nth(4), Some("0"));
        // What such a process needs of itself is there all the same.
        assert!(!crate::open_fds().expect("its descriptors").is_empty());
        assert!(crate::read_maps(std::process::id()).is_ok());
        give_core_filter(std::process::id()).expect("set back");
        assert_eq!(u32::from_str_radix(before.trim(), 16), Ok(filter()));
    }
}
