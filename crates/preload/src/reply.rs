//! Reads the daemon's answers to what the C API asks, byte by byte.
//!
//! The lines are JSON objects (`strata_api`): any number that tell of progress,
//! then one reply. Only its kind, its message and its tiers are wanted of it. This is no
//! JSON parser: what it takes for well-formed is what the daemon, which is
//! trusted, could have written, and a little more. Lines may be far longer than
//! what is kept of them.

use core::mem;

use crate::reason::REASON_BYTES;

/// Longest line that the daemon writes (`strata_api::MAX_LINE_BYTES`); a longer
/// one comes from something else.
const MAX_LINE_BYTES: usize = 1 << 20;

/// What a line says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Line {
    /// How far it is; the reply is still to come.
    Progress,
    /// The snapshot is whole.
    Taken,
    /// Refused; [`Reader::message`] says why.
    Refused,
    /// What came of a setting; if it was not done, [`Reader::message`] says why.
    Placed(Outcome),
    /// Where pages are: what was given to [`Reader::into_tiers`] says it.
    Where,
    /// No line that answers this request.
    Unknown,
}

/// `strata_api::PlaceOutcome`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Done,
    Budget,
    TooMany,
    NoTier,
    Range,
}

/// The first bytes of a text.
struct Text<const ROOM: usize> {
    bytes: [u8; ROOM],
    length: usize,
}

impl<const ROOM: usize> Text<ROOM> {
    const EMPTY: Self = Self { bytes: [0; ROOM], length: 0 };

    fn push(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.length) {
            *place = byte;
            self.length += 1;
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// Fields of the outermost object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Progress,
    Reply,
    Message,
    Outcome,
    Tiers,
    Other,
}

/// Where in a string the next byte is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In none.
    Outside,
    /// Stands for itself.
    Plain,
    /// After a backslash.
    Escaped,
    /// One of the last so many digits of `\uXXXX`.
    Digit(u8),
}

/// A line so far.
struct Partial {
    length_bytes: usize,
    /// Objects and arrays that are open.
    depth: usize,
    /// The outermost was closed.
    is_closed: bool,
    is_broken: bool,
    place: Place,
    /// A field's name is next, not its value.
    expects_name: bool,
    field: Field,
    /// The name, or the value of `reply`; longer than any that is known.
    word: Text<16>,
    kind: Option<Line>,
    outcome: Option<Outcome>,
    message: Text<REASON_BYTES>,
}

impl Partial {
    const EMPTY: Self = Self {
        length_bytes: 0,
        depth: 0,
        is_closed: false,
        is_broken: false,
        place: Place::Outside,
        expects_name: true,
        field: Field::Other,
        word: Text::EMPTY,
        kind: None,
        outcome: None,
        message: Text::EMPTY,
    };

    fn take(&mut self, byte: u8) {
        self.length_bytes += 1;
        self.is_broken |= self.length_bytes > MAX_LINE_BYTES || self.is_closed && byte > b' ';
        match self.place {
            Place::Outside => self.take_outside(byte),
            Place::Plain => match byte {
                b'"' => {
                    self.place = Place::Outside;
                    self.end_string();
                }
                b'\\' => self.place = Place::Escaped,
                0..b' ' => self.is_broken = true,
                _ => self.push(byte),
            },
            Place::Escaped => {
                self.place = Place::Plain;
                match byte {
                    b'"' | b'\\' | b'/' => self.push(byte),
                    b'b' | b'f' | b'n' | b'r' | b't' => self.push(b' '),
                    b'u' => self.place = Place::Digit(4),
                    _ => self.is_broken = true,
                }
            }
            // The daemon writes control characters so, and nothing else.
            Place::Digit(1) => {
                self.place = Place::Plain;
                self.push(b'?');
            }
            Place::Digit(left) => self.place = Place::Digit(left - 1),
        }
    }

    fn take_outside(&mut self, byte: u8) {
        match byte {
            b'{' => self.depth += 1,
            _ if self.depth == 0 => self.is_broken |= byte > b' ',
            b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth -= 1;
                self.is_closed = self.depth == 0;
            }
            b'"' => {
                self.place = Place::Plain;
                if self.depth == 1 {
                    self.word = Text::EMPTY;
                }
            }
            b',' | b':' if self.depth == 1 => self.expects_name = byte == b',',
            _ => {}
        }
    }

    /// Whether the next byte is of the tiers, which are plain letters.
    fn is_in_tiers(&self) -> bool {
        let is_value = self.depth == 1 && !self.expects_name;
        is_value && self.field == Field::Tiers && self.place == Place::Plain
    }

    /// One more byte of a string.
    fn push(&mut self, byte: u8) {
        if self.depth != 1 {
            return;
        }
        if !self.expects_name && self.field == Field::Message {
            self.message.push(byte);
        } else {
            self.word.push(byte);
        }
    }

    fn end_string(&mut self) {
        if self.depth != 1 {
            return;
        }
        if self.expects_name {
            self.field = match self.word.bytes() {
                b"progress" => Field::Progress,
                b"reply" => Field::Reply,
                b"message" => Field::Message,
                b"outcome" => Field::Outcome,
                b"tiers" => Field::Tiers,
                _ => Field::Other,
            };
            return;
        }
        match (self.field, self.word.bytes()) {
            (Field::Progress, _) => self.kind = Some(Line::Progress),
            (Field::Reply, b"snapshot") => self.kind = Some(Line::Taken),
            (Field::Reply, b"error") => self.kind = Some(Line::Refused),
            (Field::Reply, b"where") => self.kind = Some(Line::Where),
            // The outcome says which.
            (Field::Reply, b"place") => self.kind = Some(Line::Placed(Outcome::Range)),
            (Field::Outcome, word) => {
                self.outcome = match word {
                    b"done" => Some(Outcome::Done),
                    b"budget" => Some(Outcome::Budget),
                    b"too_many" => Some(Outcome::TooMany),
                    b"no_tier" => Some(Outcome::NoTier),
                    b"range" => Some(Outcome::Range),
                    _ => None,
                };
            }
            (Field::Reply | Field::Message | Field::Tiers | Field::Other, _) => {}
        }
    }

    /// What it says if it ends here.
    fn end(&self) -> Line {
        let whole = self.is_closed && !self.is_broken;
        let kind = match self.kind {
            Some(Line::Placed(_)) => self.outcome.map(Line::Placed),
            kind => kind,
        };
        kind.filter(|_| whole).unwrap_or(Line::Unknown)
    }
}

/// Lines, as they come.
pub(crate) struct Reader<'a> {
    line: Partial,
    /// The one before it.
    last: Partial,
    /// Where the tiers go, and how many there were.
    tiers: &'a mut [u8],
    tier_count: usize,
}

impl Reader<'static> {
    /// Of answers without tiers.
    pub(crate) fn new() -> Self {
        Self::into_tiers(&mut [])
    }
}

impl<'a> Reader<'a> {
    /// Of an answer with as many tiers as there is room for, a letter each.
    pub(crate) fn into_tiers(tiers: &'a mut [u8]) -> Self {
        Self { line: Partial::EMPTY, last: Partial::EMPTY, tiers, tier_count: 0 }
    }

    /// How many tiers there were; more than there was room for is no answer.
    pub(crate) fn tier_count(&self) -> usize {
        self.tier_count
    }

    /// Takes bytes up to the reply, or to what is none; `None`: it is still to
    /// come. What follows it is not looked at.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> Option<Line> {
        for &byte in bytes {
            if byte != b'\n' {
                if self.line.is_in_tiers() && byte != b'"' {
                    if let Some(place) = self.tiers.get_mut(self.tier_count) {
                        *place = byte;
                    }
                    self.tier_count += 1;
                }
                self.line.take(byte);
                continue;
            }
            self.last = mem::replace(&mut self.line, Partial::EMPTY);
            let line = self.last.end();
            if line != Line::Progress {
                return Some(line);
            }
        }
        None
    }

    /// The message of the last whole line, cut off where room or whole
    /// characters end; empty where it has none.
    pub(crate) fn message(&self) -> &[u8] {
        let bytes = self.last.message.bytes();
        match core::str::from_utf8(bytes) {
            Ok(_) => bytes,
            Err(error) => &bytes[..error.valid_up_to()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All at once, and byte by byte.
    fn read(text: &[u8]) -> (Option<Line>, String) {
        let mut whole = Reader::new();
        let line = whole.take(text);
        let message = String::from_utf8(whole.message().to_vec()).expect("whole characters");
        let mut slow = Reader::new();
        let slowly = text.iter().find_map(|byte| slow.take(&[*byte]));
        assert_eq!((slowly, slow.message()), (line, message.as_bytes()));
        (line, message)
    }

    fn kind(text: &str) -> Option<Line> {
        read(text.as_bytes()).0
    }

    const PROGRESS: &str =
        "{\"progress\":\"capturing\",\"done\":1,\"total\":null,\"unit\":\"bytes\"}\n";
    const TAKEN: &str = "{\"reply\":\"snapshot\",\"snapshot\":{\"id\":\"db@1\",\"label\":null,\
                         \"command\":[\"{\\\"\",\"reply\"],\"reply\":\"error\"},\"warnings\":[]}\n";

    #[test]
    fn a_reply_is_told_from_progress() {
        assert_eq!(kind(TAKEN), Some(Line::Taken));
        assert_eq!(kind(PROGRESS), None);
        assert_eq!(kind(&format!("{PROGRESS}{PROGRESS}{TAKEN}")), Some(Line::Taken));
        assert_eq!(
            kind(" { \"warnings\" : [ ] , \"reply\" : \"snapshot\" } \r\n"),
            Some(Line::Taken)
        );
        assert_eq!(
            kind(&format!("{TAKEN}garbage\n")),
            Some(Line::Taken),
            "what follows is not read"
        );
    }

    #[test]
    fn a_refusal_says_why() {
        let (line, why) = read(
            b"{\"reply\":\"error\",\"message\":\"a \\\"b\\\" \\\\ c\\td\\u0007 \xc3\xa4\",\"hint\":\"message\"}\n",
        );
        assert_eq!((line, why.as_str()), (Some(Line::Refused), "a \"b\" \\ c d? ä"));
        let (line, why) = read(b"{\"message\":\"first\",\"reply\":\"error\"}\n");
        assert_eq!((line, why.as_str()), (Some(Line::Refused), "first"));
        let nested =
            b"{\"reply\":\"error\",\"x\":{\"message\":\"no\"},\"y\":[\"message\",\"no\"]}\n";
        assert_eq!(read(nested), (Some(Line::Refused), String::new()));
        let text = format!("{PROGRESS}{{\"reply\":\"error\",\"message\":\"late\"}}\n");
        assert_eq!(read(text.as_bytes()), (Some(Line::Refused), "late".into()));
    }

    #[test]
    fn what_came_of_a_setting_is_known_by_its_word() {
        let of = |outcome: &str| {
            let text =
                format!("{{\"reply\":\"place\",\"outcome\":\"{outcome}\",\"message\":\"why\"}}\n");
            read(text.as_bytes())
        };
        for (word, outcome) in [
            ("done", Outcome::Done),
            ("budget", Outcome::Budget),
            ("too_many", Outcome::TooMany),
            ("no_tier", Outcome::NoTier),
            ("range", Outcome::Range),
        ] {
            assert_eq!(of(word), (Some(Line::Placed(outcome)), "why".into()));
        }
        assert_eq!(of("other").0, Some(Line::Unknown));
        assert_eq!(kind("{\"reply\":\"place\"}\n"), Some(Line::Unknown));
        assert_eq!(kind("{\"outcome\":\"done\"}\n"), Some(Line::Unknown));
    }

    #[test]
    fn tiers_go_where_there_is_room() {
        let text = b"{\"reply\":\"where\",\"tiers\":\"ddscf\"}\n";
        for room in 0..8 {
            let mut tiers = [b'?'; 8];
            let mut reader = Reader::into_tiers(&mut tiers[..room]);
            // Byte by byte, as it may come.
            let line = text.iter().find_map(|byte| reader.take(&[*byte]));
            assert_eq!((line, reader.tier_count()), (Some(Line::Where), 5));
            let held = room.min(5);
            assert_eq!((&tiers[..held], &tiers[held..]), (&b"ddscf"[..held], &[b'?'; 8][held..]));
        }
        let nested = b"{\"reply\":\"where\",\"x\":{\"tiers\":\"dd\"},\"tiers\":\"\"}\n";
        let mut reader = Reader::into_tiers(&mut []);
        assert_eq!((reader.take(nested), reader.tier_count()), (Some(Line::Where), 0));
    }

    #[test]
    fn long_lines_are_read_and_cut() {
        let padding = "x".repeat(100_000);
        let text = format!("{{\"x\":\"{padding}\",\"{padding}\":1,\"reply\":\"snapshot\"}}\n");
        assert_eq!(kind(&text), Some(Line::Taken));
        let message = "ä".repeat(1000);
        let text = format!("{{\"reply\":\"error\",\"message\":\"x{message}\"}}\n");
        let (line, why) = read(text.as_bytes());
        assert_eq!(line, Some(Line::Refused));
        assert_eq!(why, format!("x{}", "ä".repeat((REASON_BYTES - 1) / 2)));
        let endless =
            format!("{{\"reply\":\"snapshot\",\"x\":\"{}\"}}\n", "x".repeat(MAX_LINE_BYTES));
        assert_eq!(kind(&endless), Some(Line::Unknown));
    }

    #[test]
    fn what_is_cut_off_is_nothing() {
        for line in [PROGRESS, TAKEN] {
            for length in 0..line.len() {
                assert_eq!(kind(&line[..length]), None, "{length}");
                let ended = format!("{}\n", &line[..length]);
                let expected = match length + 1 == line.len() {
                    false => Some(Line::Unknown),
                    true if line == TAKEN => Some(Line::Taken),
                    true => None,
                };
                assert_eq!(kind(&ended), expected, "{length}");
            }
        }
    }

    #[test]
    fn garbage_is_no_reply() {
        for text in [
            "\n",
            "{}\n",
            "[]\n",
            "null\n",
            "snapshot\n",
            "}\n",
            "]]]]\n",
            "\"reply\":\"snapshot\"\n",
            "[\"reply\":\"snapshot\"]\n",
            "{\"reply\":\"snapshots\"}\n",
            "{\"reply\":\"snapshotsnapshotsnapshot\"}\n",
            "{\"reply\":\"pong\"}\n",
            "{\"reply\":1}\n",
            "{\"a\":{\"reply\":\"snapshot\"}}\n",
            "{\"reply\":\"snapshot\"\n",
            "{\"reply\":\"snapshot\"}}\n",
            "{\"reply\":\"snapshot\"}{\n",
            "{\"reply\":\"snapshot\"} x\n",
            "{\"reply\":\"snapshot\",\"a\":\"\\x\"}\n",
            "{\"reply\":\"snapshot\",\"a\":\"\u{1}\"}\n",
        ] {
            assert_eq!(kind(text), Some(Line::Unknown), "{text}");
        }
    }
}
