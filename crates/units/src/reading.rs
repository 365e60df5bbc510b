//! What the agent in a guest says of the guest's memory, a line of text each time, and what
//! it is asked. Written by the agent, read by the daemon, to whom a guest is a stranger.

use core::fmt;

/// Where the agent finds its port in the guest: the port's name is the last part.
pub const AGENT_PORT: &str = "/dev/virtio-ports/org.strata.memory.0";
/// The port's name.
pub const AGENT_PORT_NAME: &str = "org.strata.memory.0";
/// Longest line, without its end. The longest that an agent writes has less than 400.
pub const MAX_READING_BYTES: usize = 512;
/// What a line begins with: the form's name and version.
const HEAD: &str = "strata-memory/1";
/// What a question begins with.
const ASK: &str = "ask ";
/// No figure is larger: 4 PiB of memory, or 140 years in milliseconds.
const MAX_FIGURE: u64 = 1 << 52;

/// A guest's memory, as the guest says. Counters count from the guest's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reading {
    /// The number of the last question that it had heard then; 0: none.
    pub heard: u64,
    /// When that was, in milliseconds since its start.
    pub at_ms: u64,
    /// `MemTotal`.
    pub total_bytes: u64,
    /// `MemFree`.
    pub free_bytes: u64,
    /// `MemAvailable`.
    pub available_bytes: u64,
    /// What is to be written to a disk first: `Dirty` and `Writeback`.
    pub dirty_bytes: u64,
    /// `Committed_AS`: what programs may come to use.
    pub committed_bytes: Option<u64>,
    /// Microseconds in which some task waited for memory (PSI).
    pub some_us: Option<u64>,
    /// Microseconds in which all tasks did.
    pub full_us: Option<u64>,
    /// Pages that had been reclaimed and were wanted again (`workingset_refault`).
    pub refaulted_pages: Option<u64>,
    /// Pages read from swap.
    pub swapped_in_pages: Option<u64>,
    /// Pages written to swap.
    pub swapped_out_pages: Option<u64>,
    /// Faults that had to read something.
    pub major_faults: Option<u64>,
}

impl Reading {
    /// Reads a line, without its end. None: it is no reading. Keys that are not known are
    /// those of a later agent, and passed over.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        if line.len() > MAX_READING_BYTES {
            return None;
        }
        let mut words = core::str::from_utf8(line).ok()?.split(' ');
        if words.next() != Some(HEAD) {
            return None;
        }
        let mut found = [None; KEYS.len()];
        for word in words {
            let (key, value) = word.split_once('=')?;
            let Some(index) = KEYS.iter().position(|known| *known == key) else { continue };
            if found[index].replace(figure(value)?).is_some() {
                return None;
            }
        }
        let [heard, at, total, free, available, dirty, rest @ ..] = found;
        let [committed, some, full, refaulted, swapped_in, swapped_out, major] = rest;
        Some(Self {
            heard: heard?,
            at_ms: at?,
            total_bytes: total?,
            free_bytes: free?,
            available_bytes: available?,
            dirty_bytes: dirty?,
            committed_bytes: committed,
            some_us: some,
            full_us: full,
            refaulted_pages: refaulted,
            swapped_in_pages: swapped_in,
            swapped_out_pages: swapped_out,
            major_faults: major,
        })
    }
}

/// The keys of a line: those that every line has, and those that a guest may not know.
const KEYS: [&str; 13] = [
    "heard",
    "at_ms",
    "total",
    "free",
    "available",
    "dirty",
    "committed",
    "some_us",
    "full_us",
    "refaulted",
    "swapped_in",
    "swapped_out",
    "major_faults",
];

/// Digits, and not too many: no sign, no space.
fn figure(text: &str) -> Option<u64> {
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|figure| is_plain && *figure <= MAX_FIGURE)
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HEAD)?;
        let figures = [
            Some(self.heard),
            Some(self.at_ms),
            Some(self.total_bytes),
            Some(self.free_bytes),
            Some(self.available_bytes),
            Some(self.dirty_bytes),
            self.committed_bytes,
            self.some_us,
            self.full_us,
            self.refaulted_pages,
            self.swapped_in_pages,
            self.swapped_out_pages,
            self.major_faults,
        ];
        for (key, figure) in KEYS.iter().zip(figures) {
            if let Some(figure) = figure {
                write!(f, " {key}={}", figure.min(MAX_FIGURE))?;
            }
        }
        Ok(())
    }
}

/// A question, with its end. Whoever reads a line that has its number knows that the line
/// was written after this was.
#[must_use]
pub fn question(number: u64) -> String {
    format!("{ASK}{number}\n")
}

/// The number of a question.
#[must_use]
pub fn asked(line: &[u8]) -> Option<u64> {
    core::str::from_utf8(line).ok()?.strip_prefix(ASK).and_then(figure)
}

/// Lines out of pieces of them. What is longer than a reading is passed over to its end.
#[derive(Clone, Debug, Default)]
pub struct Lines {
    rest: Vec<u8>,
    is_too_long: bool,
}

impl Lines {
    /// Takes in a piece, and hands `each` the lines that end in it, without their ends.
    pub fn take(&mut self, piece: &[u8], each: &mut dyn FnMut(&[u8])) {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            let text = part.strip_suffix(b"\n");
            let more = text.unwrap_or(part);
            if self.rest.len() + more.len() > MAX_READING_BYTES {
                self.is_too_long = true;
            } else {
                self.rest.extend_from_slice(more);
            }
            if text.is_some() {
                if !self.is_too_long {
                    each(&self.rest);
                }
                self.rest.clear();
                self.is_too_long = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading() -> Reading {
        Reading {
            heard: 7,
            at_ms: 61_000,
            total_bytes: 1 << 30,
            free_bytes: 1 << 20,
            available_bytes: 2 << 20,
            dirty_bytes: 4096,
            committed_bytes: Some(3 << 30),
            some_us: Some(12),
            full_us: None,
            refaulted_pages: Some(0),
            swapped_in_pages: None,
            swapped_out_pages: Some(1),
            major_faults: Some(9),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let line = reading().to_string();
        assert!(
            line.starts_with("strata-memory/1 heard=7 at_ms=61000 total=1073741824 "),
            "{line}"
        );
        assert!(!line.contains("full_us"), "{line}");
        assert_eq!(Reading::parse(line.as_bytes()), Some(reading()));
        let most = Some(u64::MAX);
        let largest = Reading {
            heard: u64::MAX,
            at_ms: u64::MAX,
            total_bytes: u64::MAX,
            free_bytes: u64::MAX,
            available_bytes: u64::MAX,
            dirty_bytes: u64::MAX,
            committed_bytes: most,
            some_us: most,
            full_us: most,
            refaulted_pages: most,
            swapped_in_pages: most,
            swapped_out_pages: most,
            major_faults: most,
        };
        assert!(largest.to_string().len() < 400);
        assert!(Reading::parse(largest.to_string().as_bytes()).is_some());
        assert_eq!(asked(question(9).trim_end().as_bytes()), Some(9));
        assert_eq!((asked(b"ask "), asked(b"ask -1"), asked(b"9")), (None, None, None));
    }

    #[test]
    fn a_later_agents_words_are_passed_over_and_nonsense_is_none() {
        let line = reading().to_string();
        let parse = |line: &str| Reading::parse(line.as_bytes());
        assert_eq!(parse(&format!("{line} colour=blue")), Some(reading()));
        for line in [
            String::new(),
            "strata-memory/1".into(),
            "strata-memory/2 heard=1".into(),
            line.replace("free=1048576 ", ""),
            line.replace("free=1048576", "free=-1"),
            line.replace("free=1048576", "free=+1"),
            line.replace("free=1048576", "free="),
            line.replace("free=1048576", "free"),
            line.replace("free=1048576", "free=99999999999999999999"),
            line.replace("free=1048576", "free=4503599627370497"),
            format!("{line} free=1"),
            format!("{line} "),
            format!("{line} {}=1", "x".repeat(MAX_READING_BYTES)),
        ] {
            assert_eq!(parse(&line), None, "{line}");
        }
        assert_eq!(Reading::parse(b"strata-memory/1 heard=\xff"), None);
    }

    #[test]
    fn lines_come_whole_out_of_pieces_and_never_too_long() {
        let mut lines = Lines::default();
        let mut heard = Vec::new();
        let long = "x".repeat(MAX_READING_BYTES + 1);
        let text = format!("a\nbcd\n\n{long}\ne\n{}\nlast", "y".repeat(MAX_READING_BYTES));
        for piece in text.as_bytes().chunks(5) {
            lines.take(piece, &mut |line| heard.push(line.to_vec()));
            assert!(lines.rest.len() <= MAX_READING_BYTES);
        }
        let lengths: Vec<usize> = heard.iter().map(Vec::len).collect();
        assert_eq!(lengths, [1, 3, 0, 1, MAX_READING_BYTES]);
        assert_eq!(heard[1], b"bcd");
    }
}
