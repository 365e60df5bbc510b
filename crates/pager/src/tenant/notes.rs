//! What the user should know of a tenant: notes, as long as they hold, and lines of
//! the log. What comes and goes is not logged each time.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Instant;

use strata_policy::Allowance;
use strata_sys::{Priority, log};

use crate::map::lock;
use crate::tenant::Tenant;

/// A note that comes again is logged again after this.
const NOTED_AGAIN_MS: u64 = 60_000;
/// Other lines of one tenant: so many at once...
const LINES_AT_ONCE: u32 = 20;
/// ...then one each so often.
const LINE_EVERY_MS: u64 = 10_000;

/// The notes that hold, and what was logged.
#[derive(Debug)]
pub(crate) struct Notes {
    /// By cause.
    hold: BTreeMap<&'static str, String>,
    logged: BTreeMap<&'static str, Allowance>,
    lines: Allowance,
    began: Instant,
}

impl Default for Notes {
    fn default() -> Self {
        Self {
            hold: BTreeMap::new(),
            logged: BTreeMap::new(),
            lines: Allowance::new(LINES_AT_ONCE, LINE_EVERY_MS),
            began: Instant::now(),
        }
    }
}

impl Notes {
    /// Changes the note of a cause. Whether to log it, then how often it came since
    /// it was logged last.
    fn set(&mut self, cause: &'static str, text: Option<&str>, now_ms: u64) -> Option<u64> {
        let Some(text) = text else {
            self.hold.remove(cause);
            return None;
        };
        if self.hold.insert(cause, text.to_owned()).is_some() {
            return None;
        }
        let fresh = || Allowance::new(1, NOTED_AGAIN_MS);
        self.logged.entry(cause).or_insert_with(fresh).take(now_ms)
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }
}

impl Tenant {
    /// What the user should know now.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        lock(&self.notes).hold.values().cloned().collect()
    }

    /// Sets the note of a cause, or ends it.
    pub(crate) fn note(&self, cause: &'static str, text: Option<String>) {
        let mut notes = lock(&self.notes);
        let now_ms = notes.now_ms();
        let due = notes.set(cause, text.as_deref(), now_ms);
        drop(notes);
        if let (Some(text), Some(left_out)) = (text, due) {
            let text = match left_out {
                0 => text,
                times => format!("{text} ({times} times more since this was logged last)"),
            };
            self.write(Priority::Warning, &text);
        }
    }

    /// The same for what is logged elsewhere.
    pub(crate) fn hold_note(&self, cause: &'static str, text: Option<String>) {
        let mut notes = lock(&self.notes);
        match text {
            Some(text) => notes.hold.insert(cause, text),
            None => notes.hold.remove(cause),
        };
    }

    /// Logs what is not as it should be.
    pub(crate) fn log(&self, text: &str) {
        let mut notes = lock(&self.notes);
        let now_ms = notes.now_ms();
        let due = notes.lines.take(now_ms);
        drop(notes);
        match due {
            Some(0) => self.write(Priority::Warning, &text),
            Some(lines) => {
                self.write(Priority::Warning, &format!("{text} ({lines} lines were left out)"));
            }
            None => {}
        }
    }

    /// Logs what went as it should.
    pub(crate) fn inform(&self, text: &impl Display) {
        self.write(Priority::Info, &text);
    }

    fn write(&self, priority: Priority, text: &impl Display) {
        log(priority, format_args!("{} ({}): {text}", self.record.name, self.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_and_goes_is_logged_once_a_minute_with_the_number_of_times() {
        let mut notes = Notes::default();
        assert_eq!(notes.set("exhausted", Some("over"), 0), Some(0));
        assert_eq!(notes.set("exhausted", Some("still over"), 1), None);
        let mut logged = Vec::new();
        // Each 200 ms it is over its budget, and then again not.
        for round in 1..=600u64 {
            assert_eq!(notes.set("exhausted", None, round * 200), None);
            logged.extend(notes.set("exhausted", Some("over"), round * 200 + 100));
        }
        assert_eq!(logged, [299, 299]);
        // Another cause has nothing to do with it.
        assert_eq!(notes.set("lost", Some("a page"), 120_001), Some(0));
        assert_eq!(notes.hold.len(), 2);
    }
}
