//! The mark of a daemon in its runtime directory: who works there, and who would hold
//! what the daemon has if it died (docs/takeover.md). A few lines of text.

use std::fmt;

/// Its name in the runtime directory.
pub const MARK_NAME: &str = "holder";
/// More than a mark has.
pub const MOST_MARK_BYTES: u64 = 1024;
/// Its first line; the number is the version of what follows.
const FIRST: &str = "strata-holder 1";

/// What is in it. A process is noted by its number and when it started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The supervisor.
    pub supervisor: String,
    /// The process that holds the same descriptors.
    pub holder: String,
    /// The registry's descriptor in both.
    pub registry: i32,
}

impl Mark {
    /// Reads one; none: the text is none of this version.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        if lines.next()? != FIRST {
            return None;
        }
        let mut field =
            |name| Some(lines.next()?.strip_prefix(name)?.strip_prefix(' ')?.to_owned());
        let (supervisor, holder) = (field("supervisor")?, field("holder")?);
        let registry = field("registry")?.parse().ok().filter(|&number| number >= 0)?;
        Some(Self { supervisor, holder, registry })
    }

    /// The number of a process that is noted.
    #[must_use]
    pub fn number(note: &str) -> Option<u32> {
        note.split(' ').next()?.parse().ok()
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{FIRST}")?;
        writeln!(f, "supervisor {}", self.supervisor)?;
        writeln!(f, "holder {}", self.holder)?;
        writeln!(f, "registry {}", self.registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_reads_as_it_was_written() {
        let mark = Mark { supervisor: "17 1234".into(), holder: "18 1235".into(), registry: 9 };
        let text = mark.to_string();
        assert!((text.len() as u64) < MOST_MARK_BYTES);
        assert_eq!(Mark::parse(&text), Some(mark));
        assert_eq!(Mark::number("18 1235"), Some(18));
        assert_eq!(Mark::number("x"), None);
        for end in 0..text.len() - 1 {
            assert_eq!(Mark::parse(&text[..end]), None, "{:?}", &text[..end]);
        }
        for other in [text.replace("holder 1", "holder 2"), text.replace(" 9", " -1")] {
            assert_eq!(Mark::parse(&other), None, "{other}");
        }
    }
}
