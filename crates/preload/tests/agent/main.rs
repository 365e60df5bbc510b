//! The agent in real programs, against a fake daemon and the real kernel.
//!
//! The managed half needs root and `/dev/userfaultfd`, and says so where they
//! are missing; all of it needs a C compiler.

mod daemon;
mod managed;
mod program;
mod raw;
mod restored;
mod snapshot;
mod succession;
mod unmanaged;
mod unseen;

use std::path::Path;
use std::time::{Duration, Instant};

/// Longest that anything may take before a test says that it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Says why the machine cannot run these tests, if it cannot.
pub(crate) fn cannot_run() -> bool {
    let reason = if !raw::is_root() {
        "not root"
    } else if !Path::new("/dev/userfaultfd").exists() {
        "no /dev/userfaultfd"
    } else {
        return false;
    };
    eprintln!("skipped: {reason}");
    true
}

/// Waits for something that must come; fails when it does not.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "not in {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
