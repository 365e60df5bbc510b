//! The steps of what is done with a guest, by their names, for tests that have this worker
//! or the guest's QEMU die in each of them. Only builds with assertions know of it.
//!
//! A file beside the sockets says in which step who dies: `NAME`, or `NAME PID`. `NAME wait`
//! has the worker stay in it until the file `test-step.reached`, which it makes, is gone.

use std::fs;
use std::time::Duration;

use strata_sys::{Pidfd, SIGKILL};

use super::Guests;

const FILE: &str = "test-step";
const WAIT: &str = "wait";
const LOOK_EVERY: Duration = Duration::from_millis(10);

impl Guests {
    /// This is the step `name`.
    pub(crate) fn step(&self, name: &str) {
        if !cfg!(debug_assertions) {
            return;
        }
        let Some(file) = self.directory.parent().map(|place| place.join(FILE)) else { return };
        let Ok(text) = fs::read_to_string(&file) else { return };
        let (wanted, pid) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        if wanted != name || fs::remove_file(&file).is_err() {
            return;
        }
        if pid == WAIT {
            let reached = file.with_extension("reached");
            if fs::write(&reached, "").is_ok() {
                while reached.exists() {
                    std::thread::sleep(LOOK_EVERY);
                }
            }
            return;
        }
        let pid = pid.parse().unwrap_or(std::process::id());
        if let Ok(victim) = Pidfd::open(pid) {
            victim.signal(SIGKILL);
        }
    }
}
