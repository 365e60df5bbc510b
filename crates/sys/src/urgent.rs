//! Work that programs wait for, on a machine whose processors they keep busy: a thread
//! that comes before theirs for a while.

use std::fs;

/// Lower is sooner; -20 is the end of it.
const NICE: libc::c_int = -15;

/// The calling thread comes before others until this is dropped. Threads and processes that it
/// makes meanwhile are as usual.
#[derive(Debug)]
pub struct Urgent {
    before: libc::c_int,
}

/// How nice a thread of this process is (0: the calling one).
fn nice_of(thread: libc::id_t) -> Option<libc::c_int> {
    // SAFETY: two integers. The kernel's own call gives 20 less than the nice value, turned
    // round, so that it is never an error's number.
    let turned = unsafe { libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, thread) };
    libc::c_int::try_from(turned).ok().filter(|turned| *turned > 0).map(|turned| 20 - turned)
}

fn set_nice(thread: libc::id_t, nice: libc::c_int) -> bool {
    // SAFETY: three integers.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, nice) == 0 }
}

impl Urgent {
    /// None: this process may not, or was made urgent by somebody else.
    #[must_use]
    pub fn begin() -> Option<Self> {
        let before = nice_of(0).filter(|nice| *nice >= 0)?;
        let parameter = libc::sched_param { sched_priority: 0 };
        let policy = libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK;
        // SAFETY: the parameter is valid for the call.
        let resets = unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) == 0 };
        (resets && set_nice(0, NICE)).then_some(Self { before })
    }

    /// For good, of all threads of a process that is about to end: others wait for that.
    pub fn end_soon() {
        for entry in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            if let Some(thread) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
                set_nice(thread, NICE);
            }
        }
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        set_nice(0, self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_urgent_for_a_while_and_its_children_are_not() {
        let work = || {
            let before = nice_of(0);
            let Some(urgent) = Urgent::begin() else {
                eprintln!("skipped: this user may not make a thread urgent");
                return;
            };
            assert_eq!(nice_of(0), Some(NICE));
            let of_child = std::thread::spawn(|| nice_of(0)).join().expect("a thread");
            assert_eq!(of_child, Some(0));
            assert!(Urgent::begin().is_none(), "it is urgent already");
            drop(urgent);
            assert_eq!(nice_of(0), before);
        };
        std::thread::spawn(work).join().expect("a thread");
    }
}
