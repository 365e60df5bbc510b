//! Requests, once the handshake is over.

use super::{Agreed, Error, Info, MAX_PAYLOAD_BYTES, Nonsense, Numbers};

/// Bytes of a request, without what is to be written.
pub const REQUEST_BYTES: usize = 28;
const REQUEST_MAGIC: u32 = 0x2560_9513;

const FUA: u16 = 1 << 0;
const NO_HOLE: u16 = 1 << 1;
const DONT_FRAGMENT: u16 = 1 << 2;
const REQ_ONE: u16 = 1 << 3;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

/// A request as it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    flags: u16,
    kind: u16,
    /// What the client knows it by.
    pub cookie: u64,
    offset: u64,
    bytes: u32,
}

/// What is to be done; ranges lie inside of the image, and are not empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// Read.
    Read {
        /// First byte.
        offset: u64,
        /// How many.
        bytes: u32,
    },
    /// Write what follows the request.
    Write {
        /// First byte.
        offset: u64,
        /// How many.
        bytes: u32,
        /// Answered when it is on disk.
        fua: bool,
    },
    /// Whatever was answered is to be on disk.
    Flush,
    /// The bytes are not wanted any more.
    Trim {
        /// First byte.
        offset: u64,
        /// How many.
        bytes: u32,
        /// As for a write.
        fua: bool,
    },
    /// They are zero from now on.
    Zero {
        /// First byte.
        offset: u64,
        /// How many.
        bytes: u32,
        /// As for a write.
        fua: bool,
        /// And have room on disk.
        keep_room: bool,
    },
    /// What has room on disk.
    Status {
        /// First byte.
        offset: u64,
        /// How many.
        bytes: u32,
        /// One answer is enough.
        one: bool,
    },
    /// The client goes, and hears nothing more.
    Disconnect,
}

impl Request {
    /// Reads one.
    ///
    /// # Errors
    /// It is none: where the next one begins nobody knows.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, Nonsense> {
        let mut numbers = Numbers(bytes);
        let mut read = || {
            let magic = numbers.u32()?;
            let (flags, kind) = (numbers.u16()?, numbers.u16()?);
            let (cookie, offset, bytes) = (numbers.u64()?, numbers.u64()?, numbers.u32()?);
            Some((magic, Self { flags, kind, cookie, offset, bytes }))
        };
        match read() {
            Some((REQUEST_MAGIC, request)) => Ok(request),
            _ => Err(Nonsense("a request without its magic number")),
        }
    }

    /// How many bytes follow it, which are to be read whatever becomes of it.
    ///
    /// # Errors
    /// More than any client is allowed to send.
    pub fn payload_bytes(&self) -> Result<u32, Nonsense> {
        match self.kind {
            WRITE if self.bytes > MAX_PAYLOAD_BYTES => {
                Err(Nonsense("a write of more than is allowed"))
            }
            WRITE => Ok(self.bytes),
            _ => Ok(0),
        }
    }

    /// Whether errors are told in a structured reply, where those were agreed on.
    #[must_use]
    pub fn is_structured(&self) -> bool {
        matches!(self.kind, READ | BLOCK_STATUS)
    }

    /// What it asks for.
    ///
    /// # Errors
    /// What it asks for makes no sense, or is not allowed.
    pub fn command(&self, info: Info, agreed: Agreed) -> Result<Command, Error> {
        let &Self { flags, kind, offset, bytes, .. } = self;
        let allowed = match kind {
            READ if agreed.structured => FUA | DONT_FRAGMENT,
            BLOCK_STATUS => FUA | REQ_ONE,
            WRITE_ZEROES => FUA | NO_HOLE,
            _ => FUA,
        };
        if flags & !allowed != 0 {
            return Err(Error::Invalid);
        }
        let fua = flags & FUA != 0;
        match kind {
            DISCONNECT => return Ok(Command::Disconnect),
            FLUSH if offset == 0 && bytes == 0 => return Ok(Command::Flush),
            READ | WRITE | TRIM | WRITE_ZEROES | BLOCK_STATUS => {}
            _ => return Err(Error::Invalid),
        }
        let changes = matches!(kind, WRITE | TRIM | WRITE_ZEROES);
        if changes && info.read_only {
            return Err(Error::Permission);
        }
        if bytes == 0 {
            return Err(Error::Invalid);
        }
        if offset.checked_add(bytes.into()).is_none_or(|end| end > info.size_bytes) {
            let grows = matches!(kind, WRITE | WRITE_ZEROES);
            return Err(if grows { Error::NoSpace } else { Error::Invalid });
        }
        match kind {
            READ if bytes > MAX_PAYLOAD_BYTES => Err(Error::Invalid),
            READ => Ok(Command::Read { offset, bytes }),
            WRITE => Ok(Command::Write { offset, bytes, fua }),
            TRIM => Ok(Command::Trim { offset, bytes, fua }),
            WRITE_ZEROES => {
                Ok(Command::Zero { offset, bytes, fua, keep_room: flags & NO_HOLE != 0 })
            }
            _ if !agreed.allocation => Err(Error::Invalid),
            _ => Ok(Command::Status { offset, bytes, one: flags & REQ_ONE != 0 }),
        }
    }
}
