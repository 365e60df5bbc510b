//! Messages of a userfaultfd: read straight into a memory file, where they stay until
//! they were acted on.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use strata_units::PAGE_SIZE;

use super::{Range, Userfaultfd};
use crate::SharedMemory;

/// In a fault message: the access was a write.
const UFFD_PAGEFAULT_FLAG_WRITE: u64 = 1;
/// In a fault message: the page is there and write-protected.
const UFFD_PAGEFAULT_FLAG_WP: u64 = 2;
const MESSAGE_BYTES: usize = 32;

/// A message that the kernel delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A thread waits for the page at `address`.
    Fault {
        /// Page-aligned.
        address: u64,
        /// The waiting thread.
        tid: u32,
        /// It is about to write.
        to_write: bool,
        /// The page is there, and was write-protected by
        /// [`Userfaultfd::protect`].
        protected: bool,
    },
    /// The process forked; the child's memory has this userfaultfd.
    Fork {
        /// A descriptor in this process's table.
        fd: RawFd,
    },
    /// `mremap` moved a range.
    Remap {
        /// Old start.
        from: u64,
        /// New start.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// `madvise` discarded a range.
    Remove(Range),
    /// A range was unmapped.
    Unmap(Range),
    /// Not known to this version.
    Unknown(u8),
}

impl Event {
    /// Reads one message of the kernel's layout (`struct uffd_msg`).
    #[must_use]
    fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        let word = |at: usize| {
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes of thirty-two"))
        };
        Some(match bytes[0] {
            0 => return None,
            0x12 => Self::Fault {
                address: word(16) & !(PAGE_SIZE as u64 - 1),
                tid: word(24) as u32,
                to_write: word(8) & UFFD_PAGEFAULT_FLAG_WRITE != 0,
                protected: word(8) & UFFD_PAGEFAULT_FLAG_WP != 0,
            },
            0x13 => Self::Fork { fd: word(8) as u32 as RawFd },
            0x14 => Self::Remap { from: word(8), to: word(16), len: word(24) },
            0x15 => Self::Remove(Range { start: word(8), end: word(16) }),
            0x16 => Self::Unmap(Range { start: word(8), end: word(16) }),
            other => Self::Unknown(other),
        })
    }
}

impl Userfaultfd {
    /// Bytes that [`Self::read_messages`] needs for `count` messages.
    #[must_use]
    pub const fn ring_bytes(count: usize) -> usize {
        count * MESSAGE_BYTES
    }

    /// Reads up to `count` messages without waiting, straight into `ring` at
    /// `offset`: whatever the kernel handed over is in the memory file before
    /// this thread can be killed. Returns how many came.
    pub fn read_messages(
        &self,
        ring: &SharedMemory,
        offset: u64,
        count: usize,
    ) -> io::Result<usize> {
        let bytes = Self::ring_bytes(count);
        let target = ring.raw_range(offset, bytes);
        // SAFETY: `raw_range` returned a pointer to `bytes` mapped bytes of a
        // shared mapping that lives as long as `ring`; nobody holds a
        // reference into them (SharedMemory only copies in and out).
        let got = unsafe { libc::read(self.fd.as_raw_fd(), target.cast(), bytes) };
        if got >= 0 {
            return Ok(got as usize / MESSAGE_BYTES);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Ok(0),
            _ => Err(error),
        }
    }

    /// The message in slot `index` of a ring at `offset`; none if the slot is
    /// empty.
    #[must_use]
    pub fn message(ring: &SharedMemory, offset: u64, index: usize) -> Option<Event> {
        let mut bytes = [0; MESSAGE_BYTES];
        ring.read(offset + Self::ring_bytes(index) as u64, &mut bytes);
        Event::decode(&bytes)
    }

    /// Empties `count` slots of a ring at `offset`: their messages were acted
    /// on.
    pub fn clear_messages(ring: &SharedMemory, offset: u64, count: usize) {
        for index in 0..count {
            ring.write(offset + Self::ring_bytes(index) as u64, &[0; MESSAGE_BYTES]);
        }
    }
}
