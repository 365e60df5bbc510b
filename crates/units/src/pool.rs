//! What goes between a disk, or a program, and a pool: first a greeting that names the pool,
//! then requests, each answered before the next. Numbers are little-endian; both ends are on
//! one machine and of one version, which the greeting says.

use crate::PAGE_SIZE;

/// What a greeting begins with: the version of all this.
pub const MAGIC: [u8; 8] = *b"STRPOOL1";
/// The same of one that names a guest, whose swap disk's figures follow.
pub const SWAP_MAGIC: [u8; 8] = *b"STRSWAP1";
/// Longest name of a pool or a guest.
pub const MAX_NAME_BYTES: usize = 64;
/// Longest text of a refusal.
pub const MAX_TEXT_BYTES: usize = 512;
/// What a file's content is named by.
pub const FILE_ID_BYTES: usize = 64;
/// What the name of a file begins with that a disk writes to, ...
pub const DISK_FILE: u8 = 1;
/// ...that is only read, ...
pub const SHARED_FILE: u8 = 2;
/// ...and that a program has named.
pub const PROGRAM_FILE: u8 = 3;
/// Where the name of that begins.
pub const PROGRAM_NAME_AT: usize = 8;
/// The socket's name, beside the daemon's control socket.
pub const SOCKET_NAME: &str = "pool.sock";
/// Pages of one request.
pub const MAX_PAGES: usize = 64;
/// Bytes of a request, without what follows it.
pub const HEADER_BYTES: usize = 24;
/// The number of a file that the pool has no room for.
pub const NO_FILE: u32 = u32::MAX;

/// A page was not there, and is not wanted.
pub const MISSED: u8 = 0;
/// It was.
pub const HIT: u8 = 1;
/// It was not, and the pool would take it.
pub const WANTED: u8 = 2;

/// A request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// A file, whose identity follows: answered by its number. `private`: nobody else has it.
    Open {
        /// See above.
        private: bool,
    },
    /// Pages: answered by a byte for each, [`MISSED`], [`HIT`] or [`WANTED`], and behind
    /// them all those that were there.
    Get {
        /// The file.
        file: u32,
        /// The first.
        index: u64,
        /// How many: at most [`MAX_PAGES`].
        count: u32,
    },
    /// Pages, which follow: answered by how many were taken.
    Put {
        /// The file.
        file: u32,
        /// The first.
        index: u64,
        /// How many: at most [`MAX_PAGES`].
        count: u32,
    },
    /// Pages that are not what they were: answered by 0 when nobody gets them any more.
    Forget {
        /// The file.
        file: u32,
        /// The first.
        index: u64,
        /// How many.
        count: u64,
    },
}

impl Ask {
    /// As it is sent.
    #[must_use]
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let (kind, file, index, count) = match self {
            Self::Open { private } => (1u32, u32::from(private), 0, 0),
            Self::Get { file, index, count } => (2, file, index, count.into()),
            Self::Put { file, index, count } => (3, file, index, count.into()),
            Self::Forget { file, index, count } => (4, file, index, count),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&file.to_le_bytes());
        bytes[8..16].copy_from_slice(&index.to_le_bytes());
        bytes[16..].copy_from_slice(&count.to_le_bytes());
        bytes
    }

    /// As it was sent. None: it is no request.
    #[must_use]
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let number = |from: usize| {
            u32::from_le_bytes([bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]])
        };
        let long = |from: usize| u64::from(number(from)) | u64::from(number(from + 4)) << 32;
        let (kind, file, index, count) = (number(0), number(4), long(8), long(16));
        let few = u32::try_from(count).ok().filter(|&count| {
            let is_range = index.checked_add(count.into()).is_some();
            (1..=MAX_PAGES as u32).contains(&count) && is_range
        });
        match kind {
            1 if file <= 1 && index == 0 && count == 0 => Some(Self::Open { private: file == 1 }),
            2 => Some(Self::Get { file, index, count: few? }),
            3 => Some(Self::Put { file, index, count: few? }),
            4 => index.checked_add(count).map(|_| Self::Forget { file, index, count }),
            _ => None,
        }
    }

    /// How many bytes follow it.
    #[must_use]
    pub fn payload_bytes(self) -> usize {
        match self {
            Self::Open { .. } => FILE_ID_BYTES,
            Self::Put { count, .. } => count as usize * PAGE_SIZE,
            Self::Get { .. } | Self::Forget { .. } => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_were_sent() {
        for ask in [
            Ask::Open { private: true },
            Ask::Open { private: false },
            Ask::Get { file: 7, index: 1 << 40, count: 64 },
            Ask::Put { file: u32::MAX, index: 0, count: 1 },
            Ask::Forget { file: 1, index: 5, count: u64::MAX - 5 },
        ] {
            assert_eq!(Ask::decode(&ask.encode()), Some(ask));
        }
        for none in [
            Ask::Get { file: 7, index: 0, count: 65 },
            Ask::Put { file: 7, index: 0, count: 0 },
            Ask::Get { file: 7, index: u64::MAX, count: 1 },
            Ask::Forget { file: 1, index: 2, count: u64::MAX - 1 },
        ] {
            assert_eq!(Ask::decode(&none.encode()), None, "{none:?}");
        }
        assert_eq!(Ask::decode(&[0xff; HEADER_BYTES]), None);
    }
}
