//! Who reads a process's memory so that it outlives the process, and where
//! (`crate::snapshot::held_memory`).
//!
//! ```text
//! nobody ─ begin ─▶ wanted ─ comes ─▶ wanted by it ─ its fault ─▶ address
//!    ▲                 │                   │                        │
//!    └──────────────── Drop ◀──────────────┴────────────────────────┘
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

const NOBODY: u64 = 0;

/// Where the reader waits, or who it is; behind no lock.
#[derive(Debug, Default)]
pub(crate) struct MemoryHold(pub(crate) AtomicU64);

impl MemoryHold {
    /// Not the address of a page. Thread 0: it has not come yet.
    pub(crate) fn wanted_by(thread: u32) -> u64 {
        u64::from(thread) << 1 | 1
    }

    /// Whether the fault of `thread` at `address`, in the transfer range, is to stay
    /// unanswered. Others read there, too: the evictor.
    pub(crate) fn takes(&self, thread: u32, address: u64) -> bool {
        let is_it = |now: u64| match thread {
            // As CRIU makes userfaultfds: nobody says whose fault it is.
            0 => now & 1 == 1 && now != Self::wanted_by(0),
            _ => now == Self::wanted_by(thread),
        };
        let change = |now| (is_it(now) || now == address).then_some(address);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }

    /// The reader has come. False: nobody wants it any more.
    pub(crate) fn comes(&self, thread: u32) -> bool {
        let (begun, wanted) = (Self::wanted_by(0), Self::wanted_by(thread));
        self.0.compare_exchange(begun, wanted, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.0.load(Ordering::Acquire) != NOBODY
    }

    pub(crate) fn is_made(&self) -> bool {
        self.is_wanted() && self.0.load(Ordering::Acquire) & 1 == 0
    }

    /// Where the reader waits, who is not wanted any more.
    pub(crate) fn end(&self) -> Option<u64> {
        Some(self.0.swap(NOBODY, Ordering::AcqRel)).filter(|&was| was != NOBODY && was & 1 == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_reader_is_left_waiting() {
        let held = MemoryHold::default();
        assert!(!held.takes(7, 4096) && !held.takes(0, 4096) && !held.comes(7));
        held.0.store(MemoryHold::wanted_by(0), Ordering::Release);
        assert!(!held.takes(7, 4096) && !held.takes(0, 4096), "nobody has come");
        assert!(held.comes(7) && !held.comes(8));
        assert!(!held.takes(8, 4096) && !held.is_made());
        assert!(held.takes(7, 8192) && held.is_made());
        assert!(held.takes(7, 8192), "it looked again");
        assert!(!held.takes(7, 4096) && !held.takes(0, 4096) && !held.takes(8, 4096));
        assert_eq!((held.end(), held.end()), (Some(8192), None));
        assert!(!held.takes(7, 8192) && !held.is_wanted());
        // Of a userfaultfd that does not say whose fault it is.
        held.0.store(MemoryHold::wanted_by(0), Ordering::Release);
        assert!(held.comes(9) && held.takes(0, 4096) && !held.takes(0, 8192));
        assert_eq!(held.end(), Some(4096));
        // Not wanted any more before it has come, or before it has read.
        held.0.store(MemoryHold::wanted_by(0), Ordering::Release);
        assert!(held.end().is_none() && !held.comes(9));
        held.0.store(MemoryHold::wanted_by(9), Ordering::Release);
        assert!(held.end().is_none() && !held.takes(9, 4096));
    }
}
