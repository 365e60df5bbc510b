//! What is sent back.

use super::{ALLOCATION_ID, Agreed, Error, Request};

const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
/// The last chunk of a structured reply.
const DONE: u16 = 1;
const OFFSET_DATA: u16 = 1;
const BLOCK_STATUS: u16 = 5;
const ERROR: u16 = (1 << 15) + 1;

/// Part of an image, and whether it is a hole, which reads as zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// How long.
    pub bytes: u32,
    /// Nothing is there.
    pub hole: bool,
}

fn simple(cookie: u64, error: u32) -> Vec<u8> {
    let mut bytes = SIMPLE_MAGIC.to_be_bytes().to_vec();
    bytes.extend(error.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes
}

fn chunk(cookie: u64, kind: u16, bytes: u32) -> Vec<u8> {
    let mut header = STRUCTURED_MAGIC.to_be_bytes().to_vec();
    header.extend(DONE.to_be_bytes());
    header.extend(kind.to_be_bytes());
    header.extend(cookie.to_be_bytes());
    header.extend(bytes.to_be_bytes());
    header
}

/// It is done.
#[must_use]
pub fn done(request: &Request) -> Vec<u8> {
    simple(request.cookie, 0)
}

/// It failed.
#[must_use]
pub fn failed(request: &Request, agreed: Agreed, error: Error) -> Vec<u8> {
    if !(agreed.structured && request.is_structured()) {
        return simple(request.cookie, error.number());
    }
    let mut reply = chunk(request.cookie, ERROR, 6);
    reply.extend(error.number().to_be_bytes());
    // Without a text.
    reply.extend(0u16.to_be_bytes());
    reply
}

/// What stands before `bytes` that were read at `offset`.
#[must_use]
pub fn read(request: &Request, agreed: Agreed, offset: u64, bytes: u32) -> Vec<u8> {
    if !agreed.structured {
        return simple(request.cookie, 0);
    }
    let mut reply = chunk(request.cookie, OFFSET_DATA, bytes + 8);
    reply.extend(offset.to_be_bytes());
    reply
}

/// What has room on disk.
#[must_use]
pub fn status(request: &Request, extents: &[Extent]) -> Vec<u8> {
    const HOLE_AND_ZERO: u32 = 3;
    let mut reply = chunk(request.cookie, BLOCK_STATUS, 4 + 8 * extents.len() as u32);
    reply.extend(ALLOCATION_ID.to_be_bytes());
    for extent in extents {
        reply.extend(extent.bytes.to_be_bytes());
        reply.extend(if extent.hole { HOLE_AND_ZERO } else { 0 }.to_be_bytes());
    }
    reply
}
