//! What the service manager is told of the daemon (`Type=notify`): that it is ready, reloads
//! or stops, that its worker answers (`WATCHDOG=1`), and a line of what goes on. The
//! supervisor tells it, being the process that the manager watches.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use strata_sys::{Notifier, Priority, log, monotonic_us};

/// A worker that begins answers nobody before it has taken over what there is: it may take so
/// many times as long as one that serves.
const BEGINS: u32 = 10;

/// The manager, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Manager {
    notifier: Notifier,
    /// From which it is told.
    socket: Option<UnixDatagram>,
    /// It has been told that the daemon is ready, as it is now.
    knows_ready: bool,
    /// The worker has answered since it began, and the manager knows.
    knows_answer: bool,
    /// The line that it has.
    status: String,
    /// The log says that it hears nothing.
    is_deaf: bool,
}

impl Manager {
    /// Opens what it needs. Not before a takeover, which gives numbers of descriptors to
    /// others.
    pub(crate) fn new(notifier: Notifier) -> std::io::Result<Self> {
        Ok(Self { socket: notifier.open()?, notifier, ..Self::default() })
    }

    pub(crate) fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// Another worker begins.
    pub(crate) fn worker_begins(&mut self) {
        self.knows_answer = false;
        if let Some(watchdog) = self.notifier.watchdog() {
            self.tell(&patience(watchdog.saturating_mul(BEGINS)));
        }
    }

    /// The worker answers. `stays`: it is not about to make room for another one.
    pub(crate) fn worker_answers(&mut self, tenants: usize, stays: bool) {
        let lines = self.lines_of_answer(tenants, stays);
        if self.tell(&lines) {
            self.knows_answer = true;
            self.knows_ready |= stays;
        }
    }

    fn lines_of_answer(&mut self, tenants: usize, stays: bool) -> String {
        let mut lines = String::from("WATCHDOG=1");
        if let Some(watchdog) = self.notifier.watchdog().filter(|_| !self.knows_answer) {
            lines += &format!("\n{}", patience(watchdog));
        }
        if !stays {
            return lines;
        }
        if !self.knows_ready {
            lines += "\nREADY=1";
        }
        let status = match tenants {
            0 => "Manages no program.".to_owned(),
            1 => "Manages the programs of 1 tenant.".to_owned(),
            many => format!("Manages the programs of {many} tenants."),
        };
        if self.status != status {
            lines += &format!("\nSTATUS={status}");
            self.status = status;
        }
        lines
    }

    /// Another worker, or another stratad, is about to take over.
    pub(crate) fn reloads(&mut self, status: &str) {
        self.knows_ready = false;
        self.says(&format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_us()), status);
    }

    /// It does not after all.
    pub(crate) fn goes_on(&mut self, status: &str) {
        self.says("READY=1", status);
        self.knows_ready = true;
    }

    /// The daemon is about to end.
    pub(crate) fn stops(&mut self, status: &str) {
        self.says("STOPPING=1", status);
    }

    /// What goes on.
    pub(crate) fn is_at(&mut self, status: &str) {
        self.says("", status);
    }

    fn says(&mut self, lines: &str, status: &str) {
        status.clone_into(&mut self.status);
        self.tell(format!("{lines}\nSTATUS={status}").trim_start());
    }

    fn tell(&mut self, lines: &str) -> bool {
        let Some(socket) = &self.socket else { return true };
        let told = self.notifier.tell(socket, lines);
        if let Err(error) = &told
            && !self.is_deaf
        {
            log(Priority::Warning, format_args!("the service manager cannot be told: {error}"));
        }
        self.is_deaf = told.is_err();
        told.is_ok()
    }
}

/// How long the manager is to wait for a sign, until it is told otherwise.
fn patience(time: Duration) -> String {
    format!("WATCHDOG_USEC={}", time.as_micros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_what_it_does_not_know() {
        let mut manager = Manager::default();
        let first = manager.lines_of_answer(2, true);
        assert_eq!(first, "WATCHDOG=1\nREADY=1\nSTATUS=Manages the programs of 2 tenants.");
        manager.worker_answers(2, true);
        assert_eq!(manager.lines_of_answer(2, true), "WATCHDOG=1");
        assert_eq!(manager.lines_of_answer(0, true), "WATCHDOG=1\nSTATUS=Manages no program.");
        manager.reloads("Reads its configuration again.");
        // The worker that makes room is no sign of readiness.
        assert_eq!(manager.lines_of_answer(0, false), "WATCHDOG=1");
        assert!(manager.lines_of_answer(0, true).contains("READY=1\nSTATUS="));
        manager.goes_on("As before.");
        assert!(!manager.lines_of_answer(0, true).contains("READY"));
    }
}
