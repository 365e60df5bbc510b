//! What the agent in a guest is told when the guest has become another machine, a clone, and
//! what it answers: a line of text each. The daemon writes orders and reads answers of a
//! guest, to whom it is a stranger; the agent reads orders.
//!
//! An agent that is older than this passes an order over, as it does any line that it does
//! not know, and so never answers one.

use core::fmt;
use core::str::FromStr;

/// Network cards of a guest that get addresses of their own.
pub const MAX_CARDS: usize = 8;
/// Longest host name, as DNS has its labels.
pub const MAX_HOST_NAME_BYTES: usize = 63;
/// Longest reason.
pub const MAX_WHY_BYTES: usize = 240;
/// What an order begins with: the form's name and version.
const ORDER: &str = "strata-order/1";
/// What an answer begins with.
const ANSWER: &str = "strata-answer/1";
/// What stands for a host name that is none.
const NO_NAME: &str = "-";

/// The address of a network card.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// That of a clone's card, locally administered. `clone`: four random bytes, the same for
    /// all of its cards.
    #[must_use]
    pub fn of_clone(clone: [u8; 4], card: u8) -> Self {
        let [a, b, c, d] = clone;
        Self([0x02, a, b, c, d, card])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(())?;
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| ())?;
        }
        if parts.next().is_some() { Err(()) } else { Ok(Self(bytes)) }
    }
}

/// Whether a machine can be called so.
#[must_use]
pub fn is_host_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    !name.is_empty()
        && name.len() <= MAX_HOST_NAME_BYTES
        && name.bytes().all(is_plain)
        && !name.starts_with(['-', '.'])
        && !name.ends_with(['-', '.'])
}

/// What a machine is called that is the tenant `name`: the same, as far as host names go.
#[must_use]
pub fn host_name_of(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '.';
    let plain: String = name.chars().map(|c| if is_plain(c) { c } else { '-' }).collect();
    let cut = &plain[..plain.len().min(MAX_HOST_NAME_BYTES)];
    let found = cut.trim_matches(['-', '.']);
    if found.is_empty() { "clone" } else { found }.to_owned()
}

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// It is another machine: it is called so, and its cards have these addresses, in order.
    Identity {
        /// A host name.
        host_name: String,
        /// [`MAX_CARDS`] at most.
        macs: Vec<Mac>,
    },
    /// Its network is another one from now on.
    Network,
}

/// An order. Whoever hears one again that it was given already answers it again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Order {
    /// Another one each time.
    pub number: u64,
    /// What is to be done.
    pub step: Step,
}

impl Order {
    /// Reads a line, without its end. None: it is no order.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        let mut words = core::str::from_utf8(line).ok()?.split(' ');
        if words.next() != Some(ORDER) {
            return None;
        }
        let number = number(words.next()?)?;
        let step = match words.next()? {
            "identity" => {
                let host_name = words.next().filter(|name| is_host_name(name))?.to_owned();
                Step::Identity { host_name, macs: macs(&mut words)? }
            }
            "network" => Step::Network,
            _ => return None,
        };
        words.next().is_none().then_some(Self { number, step })
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ORDER} {}", self.number)?;
        match &self.step {
            Step::Identity { host_name, macs } => {
                write!(f, " identity {host_name}")?;
                macs.iter().take(MAX_CARDS).try_for_each(|mac| write!(f, " {mac}"))
            }
            Step::Network => f.write_str(" network"),
        }
    }
}

/// How far an order is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// It was heard, and is being done.
    Runs,
    /// It is done.
    Done {
        /// What the guest is called now; none: nothing that can be said.
        host_name: Option<String>,
        /// The addresses of its cards now, [`MAX_CARDS`] at most.
        macs: Vec<Mac>,
    },
    /// It is not done, and why.
    Failed(String),
}

/// What the agent says of an order. It is the guest's word.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The order's.
    pub number: u64,
    /// How far it is.
    pub state: State,
}

impl Answer {
    /// Reads a line, without its end. None: it is no answer.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        let text = core::str::from_utf8(line).ok()?.strip_prefix(ANSWER)?.strip_prefix(' ')?;
        let (first, rest) = text.split_once(' ')?;
        let number = number(first)?;
        let (word, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let state = match word {
            "runs" if rest.is_empty() => State::Runs,
            "failed" => State::Failed(plain(rest)),
            "done" => {
                let mut words = rest.split(' ');
                let name = words.next()?;
                let host_name = match name {
                    NO_NAME => None,
                    name => Some(name.to_owned()).filter(|name| is_host_name(name)),
                };
                if host_name.is_none() && name != NO_NAME {
                    return None;
                }
                State::Done { host_name, macs: macs(&mut words)? }
            }
            _ => return None,
        };
        Some(Self { number, state })
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ANSWER} {}", self.number)?;
        match &self.state {
            State::Runs => f.write_str(" runs"),
            State::Done { host_name, macs } => {
                write!(f, " done {}", host_name.as_deref().unwrap_or(NO_NAME))?;
                macs.iter().take(MAX_CARDS).try_for_each(|mac| write!(f, " {mac}"))
            }
            State::Failed(why) => write!(f, " failed {}", plain(why)),
        }
    }
}

/// Digits, and no others: a number is written in one way only.
fn number(text: &str) -> Option<u64> {
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_plain)
}

fn macs<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<Vec<Mac>> {
    let macs: Option<Vec<Mac>> = words.map(|word| word.parse().ok()).collect();
    macs.filter(|macs| macs.len() <= MAX_CARDS)
}

/// A text as one line, not long and without control characters.
fn plain(text: &str) -> String {
    let mut out = String::new();
    for character in text.trim().chars() {
        let character = if character.is_control() { '?' } else { character };
        if out.len() + character.len_utf8() > MAX_WHY_BYTES {
            break;
        }
        out.push(character);
    }
    out.truncate(out.trim_end().len());
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reading::{MAX_READING_BYTES, Reading, asked};

    fn clone(card: u8) -> Mac {
        Mac::of_clone([0xab, 0, 0x10, 0xff], card)
    }

    #[test]
    fn what_is_ordered_is_read_and_nothing_else() {
        let macs: Vec<Mac> = (0..MAX_CARDS as u8).map(clone).collect();
        let host_name = "x".repeat(MAX_HOST_NAME_BYTES);
        let identity = Order { number: u64::MAX, step: Step::Identity { host_name, macs } };
        let network = Order { number: 7, step: Step::Network };
        for order in [&identity, &network] {
            let line = order.to_string();
            assert!(line.len() <= MAX_READING_BYTES, "{line}");
            assert_eq!(Order::parse(line.as_bytes()).as_ref(), Some(order));
            // An agent that is older passes it over.
            assert_eq!((asked(line.as_bytes()), Reading::parse(line.as_bytes())), (None, None));
        }
        assert_eq!(clone(1).to_string(), "02:ab:00:10:ff:01");
        for line in [
            "",
            "strata-order/1",
            "strata-order/1 7",
            "strata-order/2 7 network",
            "strata-order/1 -7 network",
            "strata-order/1 7 network ",
            "strata-order/1 7 reboot",
            "strata-order/1 7 identity",
            "strata-order/1 7 identity a;b",
            "strata-order/1 7 identity -a",
            "strata-order/1 7 identity a 02:ab",
            "strata-order/1 7 identity a 02:ab:00:10:ff:01:02",
            "strata-order/1 7 identity a 02:ab:00:10:ff:+1",
            &format!("strata-order/1 7 identity a{}", " 02:ab:00:10:ff:01".repeat(9)),
        ] {
            assert_eq!(Order::parse(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn what_is_answered_is_read_bounded_and_plain() {
        let done = |host_name: Option<&str>, macs: &[Mac]| State::Done {
            host_name: host_name.map(str::to_owned),
            macs: macs.to_vec(),
        };
        for state in [
            State::Runs,
            State::Failed("ip: no such device".into()),
            done(Some("web1-2"), &[clone(0), clone(1)]),
            done(None, &[]),
        ] {
            let answer = Answer { number: 9, state };
            let line = answer.to_string();
            assert_eq!(Answer::parse(line.as_bytes()), Some(answer), "{line}");
            assert_eq!(Reading::parse(line.as_bytes()), None);
        }
        let long = format!("a\u{1b}[2J\n{}", "ä".repeat(MAX_WHY_BYTES));
        let line = Answer { number: 9, state: State::Failed(long) }.to_string();
        assert!(line.len() < MAX_READING_BYTES && !line.contains(['\n', '\u{1b}']), "{line}");
        let Some(Answer { state: State::Failed(why), .. }) = Answer::parse(line.as_bytes()) else {
            panic!("{line}")
        };
        assert!(why.starts_with("a?[2J?ä") && why.len() <= MAX_WHY_BYTES, "{why}");
        for line in [
            &b"strata-answer/1 9"[..],
            b"strata-answer/1 9 walks",
            b"strata-answer/1 9 runs far",
            b"strata-answer/1 nine runs",
            b"strata-answer/1 9 done",
            b"strata-answer/1 9 done a$b",
            b"strata-answer/1 9 done a 02:zz:00:10:ff:01",
            b"strata-answer/1 9 failed \xff",
            b"strata-answer/2 9 runs",
        ] {
            assert_eq!(Answer::parse(line), None, "{}", String::from_utf8_lossy(line));
        }
    }

    #[test]
    fn every_tenant_has_a_host_name() {
        for (name, expected) in [
            ("web1-2", "web1-2"),
            ("db.prod", "db.prod"),
            ("a_b", "a-b"),
            ("_x-", "x"),
            ("___", "clone"),
        ] {
            assert_eq!(host_name_of(name), expected);
        }
        let long = format!("{}-{}", "x".repeat(62), "y");
        let found = host_name_of(&long);
        assert!(is_host_name(&found) && found.len() == 62, "{found}");
        assert!(!is_host_name("") && !is_host_name("a b") && !is_host_name("a."));
    }
}
