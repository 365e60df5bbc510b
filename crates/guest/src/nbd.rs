//! The NBD protocol as its public specification says it (NetworkBlockDevice/nbd,
//! doc/proto.md), the server's side: fixed newstyle handshake, simple and structured
//! replies, one export. Pure functions of bytes: [`Handshake`] and [`Request`] read what a
//! client sent, which is untrusted; [`reply`] makes what is sent back.

mod handshake;
pub mod reply;
mod request;

pub use handshake::{Agreed, Handshake, Next, Step};
pub use request::{Command, REQUEST_BYTES, Request};

/// The most that one request may read or write: what clients take for granted that are
/// told of no limit.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;
/// The name of the one export; the empty name means it, too.
pub const EXPORT_NAME: &str = "disk";
/// The number that `base:allocation` has in a connection.
pub const ALLOCATION_ID: u32 = 1;

/// What is exported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Info {
    /// Its size.
    pub size_bytes: u64,
    /// Nothing may be written.
    pub read_only: bool,
}

impl Info {
    /// The transmission flags.
    #[must_use]
    pub fn flags(self) -> u16 {
        const HAS_FLAGS: u16 = 1 << 0;
        const READ_ONLY: u16 = 1 << 1;
        const SEND_FLUSH: u16 = 1 << 2;
        const SEND_FUA: u16 = 1 << 3;
        const SEND_TRIM: u16 = 1 << 5;
        const SEND_WRITE_ZEROES: u16 = 1 << 6;
        const SEND_DF: u16 = 1 << 7;
        // A flush on one connection is one of what was answered on all.
        const CAN_MULTI_CONN: u16 = 1 << 8;
        let all = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_DF | CAN_MULTI_CONN;
        all | if self.read_only { READ_ONLY } else { SEND_TRIM | SEND_WRITE_ZEROES }
    }
}

/// An error as the protocol numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// Not permitted: a write to what may only be read.
    Permission,
    /// The image cannot be read or written.
    Io,
    /// The request makes no sense.
    Invalid,
    /// Beyond the end of the image, or no room below it.
    NoSpace,
}

impl Error {
    /// Its number.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Permission => 1,
            Self::Io => 5,
            Self::Invalid => 22,
            Self::NoSpace => 28,
        }
    }
}

/// What a client said that no client says: the connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Nonsense(pub &'static str);

impl std::fmt::Display for Nonsense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// Reads numbers off the front of bytes; none where they are at their end.
pub(crate) struct Numbers<'a>(pub(crate) &'a [u8]);

impl<'a> Numbers<'a> {
    pub(crate) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().ok()?))
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(self.take(8)?.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests;
