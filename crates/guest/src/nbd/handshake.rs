//! From the connection to the first request: the client's flags, then options, each
//! answered, until one of them begins the transmission.

use super::{ALLOCATION_ID, EXPORT_NAME, Info, MAX_PAYLOAD_BYTES, Nonsense, Numbers};

const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Of both sides: fixed newstyle, and no zeroes after the old answer.
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

/// Longest value of an option. Names have at most 4096 bytes.
const MAX_OPTION_BYTES: u32 = 64 << 10;
/// Options of one client: a few do.
const MAX_OPTIONS: u32 = 256;
/// Contexts and pieces of information that one option may ask for.
const MAX_ASKED: u32 = 1024;

const OPT_EXPORT_NAME: u32 = 1;
const OPT_ABORT: u32 = 2;
const OPT_LIST: u32 = 3;
const OPT_INFO: u32 = 6;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_LIST_META_CONTEXT: u32 = 9;
const OPT_SET_META_CONTEXT: u32 = 10;

const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
const REP_ERR_UNSUPPORTED: u32 = (1 << 31) + 1;
const REP_ERR_INVALID: u32 = (1 << 31) + 3;
const REP_ERR_UNKNOWN: u32 = (1 << 31) + 6;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// The one context that there is, and what asks for all of its family.
const ALLOCATION: &[u8] = b"base:allocation";
const BASE: &[u8] = b"base:";

/// What client and server have agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Agreed {
    /// Reads and block status are answered in structured replies.
    pub structured: bool,
    /// Block status may be asked for, and says `base:allocation`.
    pub allocation: bool,
}

/// What comes after an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// More of the handshake.
    More,
    /// Requests.
    Transmission(Agreed),
    /// The client goes.
    End,
}

/// What a piece of the client's led to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// To be sent.
    pub answer: Vec<u8>,
    /// Then.
    pub next: Next,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Flags,
    Header,
    Value { option: u32, bytes: u32 },
    Over,
}

/// One client's. Give it pieces of exactly [`Self::wanted`] bytes.
#[derive(Clone, Debug)]
pub struct Handshake {
    info: Info,
    state: State,
    no_zeroes: bool,
    options: u32,
    agreed: Agreed,
}

impl Handshake {
    /// Of a client that has just connected.
    #[must_use]
    pub fn new(info: Info) -> Self {
        let agreed = Agreed::default();
        Self { info, state: State::Flags, no_zeroes: false, options: 0, agreed }
    }

    /// What the server says first.
    #[must_use]
    pub fn greeting() -> Vec<u8> {
        let mut bytes = NBD_MAGIC.to_be_bytes().to_vec();
        bytes.extend(OPTION_MAGIC.to_be_bytes());
        bytes.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        bytes
    }

    /// How many bytes the next piece has; 0: there is none any more, or an option without
    /// a value is to be answered.
    #[must_use]
    pub fn wanted(&self) -> usize {
        match self.state {
            State::Flags => 4,
            State::Header => 16,
            State::Value { bytes, .. } => bytes as usize,
            State::Over => 0,
        }
    }

    /// Takes the next piece.
    ///
    /// # Errors
    /// It is none.
    pub fn hear(&mut self, piece: &[u8]) -> Result<Step, Nonsense> {
        if piece.len() != self.wanted() || self.state == State::Over {
            return Err(Nonsense("a piece of another length"));
        }
        let mut numbers = Numbers(piece);
        match self.state {
            State::Flags => {
                let flags = numbers.u32().unwrap_or_default();
                if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
                    return Err(Nonsense("unknown client flags"));
                }
                if flags & u32::from(FIXED_NEWSTYLE) == 0 {
                    return Err(Nonsense("a client that knows no fixed newstyle handshake"));
                }
                self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
                self.state = State::Header;
                Ok(more(Vec::new()))
            }
            State::Header => {
                let magic = numbers.u64().unwrap_or_default();
                let option = numbers.u32().unwrap_or_default();
                let bytes = numbers.u32().unwrap_or_default();
                if magic != OPTION_MAGIC {
                    return Err(Nonsense("an option without its magic number"));
                }
                if bytes > MAX_OPTION_BYTES {
                    return Err(Nonsense("an option longer than any is"));
                }
                self.options += 1;
                if self.options > MAX_OPTIONS {
                    return Err(Nonsense("more options than there are"));
                }
                self.state = State::Value { option, bytes };
                if bytes == 0 { self.hear(&[]) } else { Ok(more(Vec::new())) }
            }
            State::Value { option, .. } => {
                self.state = State::Header;
                let step = self.option(option, piece)?;
                if step.next != Next::More {
                    self.state = State::Over;
                }
                Ok(step)
            }
            State::Over => Err(Nonsense("nothing more is heard")),
        }
    }

    fn option(&mut self, option: u32, value: &[u8]) -> Result<Step, Nonsense> {
        let ack = || reply(option, REP_ACK, &[]);
        let invalid = |text: &str| Ok(more(reply(option, REP_ERR_INVALID, text.as_bytes())));
        match option {
            OPT_EXPORT_NAME => {
                // Its only error is the end.
                if !is_ours(value) {
                    return Err(Nonsense("there is no such export"));
                }
                let mut answer = self.info.size_bytes.to_be_bytes().to_vec();
                answer.extend(self.info.flags().to_be_bytes());
                if !self.no_zeroes {
                    answer.resize(answer.len() + 124, 0);
                }
                Ok(Step { answer, next: Next::Transmission(self.agreed) })
            }
            OPT_ABORT => Ok(Step { answer: ack(), next: Next::End }),
            OPT_LIST if !value.is_empty() => invalid("this option has no value"),
            OPT_LIST => {
                let mut server = (EXPORT_NAME.len() as u32).to_be_bytes().to_vec();
                server.extend(EXPORT_NAME.as_bytes());
                let mut answer = reply(option, REP_SERVER, &server);
                answer.extend(ack());
                Ok(more(answer))
            }
            OPT_INFO | OPT_GO => {
                let Some(asked) = asked_info(value) else {
                    return invalid("this is no name with a list of what is asked");
                };
                if !is_ours(asked.name) {
                    return Ok(more(unknown(option)));
                }
                let mut answer = reply(option, REP_INFO, &self.export());
                // Told unasked, too: a client that does not know it passes over it.
                answer.extend(reply(option, REP_INFO, &block_sizes()));
                answer.extend(ack());
                let go = option == OPT_GO;
                let next = if go { Next::Transmission(self.agreed) } else { Next::More };
                Ok(Step { answer, next })
            }
            OPT_STRUCTURED_REPLY if !value.is_empty() => invalid("this option has no value"),
            OPT_STRUCTURED_REPLY => {
                self.agreed.structured = true;
                Ok(more(ack()))
            }
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => {
                if option == OPT_SET_META_CONTEXT {
                    self.agreed.allocation = false;
                    if !self.agreed.structured {
                        return invalid("ask for structured replies first");
                    }
                }
                let Some(asked) = asked_contexts(value) else {
                    return invalid("this is no name with a list of contexts");
                };
                if !is_ours(asked.name) {
                    return Ok(more(unknown(option)));
                }
                let listing = option == OPT_LIST_META_CONTEXT;
                let wants = asked
                    .contexts
                    .iter()
                    .any(|&context| context == ALLOCATION || (listing && context == BASE))
                    || (listing && asked.contexts.is_empty());
                let mut answer = Vec::new();
                if wants {
                    let id = if listing { 0 } else { ALLOCATION_ID };
                    let mut context = id.to_be_bytes().to_vec();
                    context.extend(ALLOCATION);
                    answer.extend(reply(option, REP_META_CONTEXT, &context));
                    self.agreed.allocation |= !listing;
                }
                answer.extend(ack());
                Ok(more(answer))
            }
            _ => Ok(more(reply(option, REP_ERR_UNSUPPORTED, b"this option is not known here"))),
        }
    }

    fn export(&self) -> Vec<u8> {
        let mut info = INFO_EXPORT.to_be_bytes().to_vec();
        info.extend(self.info.size_bytes.to_be_bytes());
        info.extend(self.info.flags().to_be_bytes());
        info
    }
}

/// Any byte may be asked for; pages are best.
fn block_sizes() -> Vec<u8> {
    let mut info = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
    for size in [1, strata_units::PAGE_SIZE as u32, MAX_PAYLOAD_BYTES] {
        info.extend(size.to_be_bytes());
    }
    info
}

fn is_ours(name: &[u8]) -> bool {
    name.is_empty() || name == EXPORT_NAME.as_bytes()
}

fn more(answer: Vec<u8>) -> Step {
    Step { answer, next: Next::More }
}

fn unknown(option: u32) -> Vec<u8> {
    reply(option, REP_ERR_UNKNOWN, b"there is no such export")
}

fn reply(option: u32, kind: u32, value: &[u8]) -> Vec<u8> {
    let mut bytes = REPLY_MAGIC.to_be_bytes().to_vec();
    for number in [option, kind, value.len() as u32] {
        bytes.extend(number.to_be_bytes());
    }
    bytes.extend(value);
    bytes
}

struct Asked<'a> {
    name: &'a [u8],
    contexts: Vec<&'a [u8]>,
}

/// The value of `INFO` and `GO`. Which information is asked for does not matter: all of
/// it is given.
fn asked_info(value: &[u8]) -> Option<Asked<'_>> {
    let mut numbers = Numbers(value);
    let bytes = numbers.u32()?;
    let name = numbers.take(bytes as usize)?;
    let count = numbers.u16()?;
    numbers.take(usize::from(count) * 2)?;
    numbers.0.is_empty().then_some(Asked { name, contexts: Vec::new() })
}

/// The value of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
fn asked_contexts(value: &[u8]) -> Option<Asked<'_>> {
    let mut numbers = Numbers(value);
    let bytes = numbers.u32()?;
    let name = numbers.take(bytes as usize)?;
    let count = numbers.u32()?;
    if count > MAX_ASKED {
        return None;
    }
    let mut contexts = Vec::new();
    for _ in 0..count {
        let bytes = numbers.u32()?;
        contexts.push(numbers.take(bytes as usize)?);
    }
    numbers.0.is_empty().then_some(Asked { name, contexts })
}
