//! Lines of the log: on standard error, one each, with priorities that the
//! journal reads. Decides nothing about how often something is said.

use std::fmt::Display;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

/// How much it matters, as syslog numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Priority {
    /// Somebody has to act.
    Error = 3,
    /// Something is not as it should be.
    Warning = 4,
    /// What an administrator looks for later: starts, ends, changes.
    Notice = 5,
    /// The rest.
    Info = 6,
}

/// Longest line: foreign text ends somewhere.
const MOST_CHARS: usize = 2000;

/// Whether standard error is the journal's: `JOURNAL_STREAM` names device and
/// inode of the stream that the service manager opened for it.
fn is_journal(stream: Option<&str>, device: u64, inode: u64) -> bool {
    let numbers = stream.and_then(|text| text.split_once(':'));
    let number = |text: &str| text.parse::<u64>().ok();
    numbers.is_some_and(|(of, at)| number(of) == Some(device) && number(at) == Some(inode))
}

fn goes_to_journal() -> bool {
    static JOURNAL: OnceLock<bool> = OnceLock::new();
    *JOURNAL.get_or_init(|| {
        let stream = std::env::var("JOURNAL_STREAM").ok();
        std::fs::metadata("/proc/self/fd/2")
            .is_ok_and(|file| is_journal(stream.as_deref(), file.dev(), file.ino()))
    })
}

/// The journal knows who speaks, and takes the number off.
fn line(priority: Priority, text: &str, journal: bool) -> String {
    let clean = |c: char| if c.is_control() { '?' } else { c };
    let text = text.chars().take(MOST_CHARS).map(clean);
    let head = if journal { format!("<{}>", priority as u8) } else { "stratad: ".into() };
    head.chars().chain(text).chain(['\n']).collect()
}

/// Writes one line, whole: several processes and threads share the log.
pub fn log(priority: Priority, text: impl Display) {
    let line = line(priority, &text.to_string(), goes_to_journal());
    // A log that takes nothing is no reason to stop.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_known_by_device_and_inode() {
        assert!(is_journal(Some("8:71"), 8, 71));
        for other in [None, Some(""), Some("8"), Some("8:72"), Some("9:71"), Some("x:71")] {
            assert!(!is_journal(other, 8, 71), "{other:?}");
        }
    }

    #[test]
    fn a_line_is_one_line_and_ends() {
        assert_eq!(line(Priority::Warning, "a\nb\u{1b}", false), "stratad: a?b?\n");
        assert_eq!(line(Priority::Notice, "a", true), "<5>a\n");
        assert_eq!(line(Priority::Info, &"ä".repeat(5000), true).chars().count(), 2004);
    }
}
