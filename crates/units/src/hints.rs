//! Hints that a program gives about its memory, on their way to the daemon: a
//! ring in the control block (`wire::Control`), so that giving one costs no
//! system call and a million of them no more memory than one.
//!
//! What they are about is not checked here, and may be anything: the program can
//! write to this memory.

use core::array;
use core::sync::atomic::{AtomicU64, Ordering};

/// Hints that the program may be ahead of the daemon by.
pub const HINT_SLOTS: usize = 1024;

/// A hint about a range of the program's memory; the low bits of [`HintSlot::end_kind`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum HintKind {
    /// Wanted soon: to be brought, and to stay.
    Hot = 1,
    /// Not wanted for a while: may leave at once.
    Cold = 2,
    /// Will be freed: the first to leave, and not to come back.
    FreeSoon = 3,
}

impl HintKind {
    /// The kind of this number.
    #[must_use]
    pub const fn of(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Hot),
            2 => Some(Self::Cold),
            3 => Some(Self::FreeSoon),
            _ => None,
        }
    }
}

/// One hint. Threads of the program take places by counting [`Hints::tail`]
/// up, fill theirs, and pass it on by `turn`; the daemon takes them in order.
#[derive(Debug)]
#[repr(C)]
pub struct HintSlot {
    /// Twice the number of times that the place was used and emptied; one more
    /// while there is a hint in it.
    pub turn: AtomicU64,
    /// First byte.
    pub start: AtomicU64,
    /// The end, exclusive, a whole number of pages, plus a [`HintKind`].
    pub end_kind: AtomicU64,
}

impl HintSlot {
    /// What `turn` says while the hint number `position` is in its place.
    #[must_use]
    pub const fn full_turn(position: u64) -> u64 {
        position / HINT_SLOTS as u64 * 2 + 1
    }
}

/// The ring. All zero is an empty one.
#[derive(Debug)]
#[repr(C)]
pub struct Hints {
    /// Hints given so far; counted by the program.
    pub tail: AtomicU64,
    /// Hints taken so far; counted by the daemon alone.
    pub head: AtomicU64,
    /// Hint number `n` is in the place `n % HINT_SLOTS`.
    pub slots: [HintSlot; HINT_SLOTS],
}

impl Default for Hints {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            tail: zero(),
            head: zero(),
            slots: array::from_fn(|_| HintSlot { turn: zero(), start: zero(), end_kind: zero() }),
        }
    }
}

impl Hints {
    /// Leaves a hint for the daemon; false: it is [`HINT_SLOTS`] behind, and
    /// nothing was done. No lock: a thread may be stopped or interrupted by a
    /// signal handler that does the same; what comes after waits in the ring then.
    pub fn push(&self, start: u64, end_kind: u64) -> bool {
        let mut position = self.tail.load(Ordering::Relaxed);
        loop {
            let slot = &self.slots[position as usize % HINT_SLOTS];
            let turn = slot.turn.load(Ordering::Acquire);
            let full = HintSlot::full_turn(position);
            if turn == full - 1 {
                let next = self.tail.compare_exchange_weak(
                    position,
                    position.wrapping_add(1),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                match next {
                    Ok(_) => {
                        slot.start.store(start, Ordering::Relaxed);
                        slot.end_kind.store(end_kind, Ordering::Relaxed);
                        slot.turn.store(full, Ordering::Release);
                        return true;
                    }
                    Err(now) => position = now,
                }
            } else if turn < full - 1 {
                return false;
            } else {
                // Another thread took it.
                let now = self.tail.load(Ordering::Relaxed);
                if now == position {
                    // Nobody did: somebody writes here who should not.
                    return false;
                }
                position = now;
            }
        }
    }

    /// Takes the next hint, as it stands there: the program may have written
    /// anything. For one thread of the daemon.
    pub fn take(&self) -> Option<(u64, u64)> {
        let mut position = self.head.load(Ordering::Relaxed);
        // An earlier worker may have died after it had emptied one place.
        for _ in 0..2 {
            let slot = &self.slots[position as usize % HINT_SLOTS];
            let full = HintSlot::full_turn(position);
            let turn = slot.turn.load(Ordering::Acquire);
            if turn < full {
                return None;
            }
            let hint = (slot.start.load(Ordering::Relaxed), slot.end_kind.load(Ordering::Relaxed));
            // In this order: a place that is passed over unemptied stays full.
            if turn == full {
                slot.turn.store(full + 1, Ordering::Release);
            }
            position = position.wrapping_add(1);
            self.head.store(position, Ordering::Relaxed);
            if turn == full {
                return Some(hint);
            }
        }
        None
    }
}

const _: () = assert!(size_of::<HintSlot>() == 24);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_come_in_order_and_a_full_ring_says_so() {
        let hints = Hints::default();
        assert_eq!(hints.take(), None);
        for lap in 0..3u64 {
            for n in 0..HINT_SLOTS as u64 {
                assert!(hints.push(lap, n), "{lap} {n}");
            }
            assert!(!hints.push(9, 9), "nothing is overwritten");
            for n in 0..HINT_SLOTS as u64 {
                assert_eq!(hints.take(), Some((lap, n)));
            }
            assert_eq!(hints.take(), None);
        }
    }

    #[test]
    fn a_worker_that_dies_over_a_hint_does_not_stop_the_ring() {
        let hints = Hints::default();
        for n in 0..HINT_SLOTS as u64 {
            assert!(hints.push(1, n));
        }
        assert_eq!(hints.take(), Some((1, 0)));
        // Dead between emptying the place and counting it.
        hints.head.store(0, Ordering::Relaxed);
        assert!(hints.push(2, 0), "the place is empty");
        for n in 1..HINT_SLOTS as u64 {
            assert_eq!(hints.take(), Some((1, n)));
        }
        assert_eq!(hints.take(), Some((2, 0)));
        assert_eq!(hints.take(), None);
    }

    #[test]
    fn whatever_stands_in_the_ring_neither_side_hangs() {
        let hints = Hints::default();
        let mut seed = 7u64;
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if seed >> 60 == 0 { u64::MAX } else { seed >> (seed % 64) }
        };
        for _ in 0..20_000 {
            hints.head.store(next(), Ordering::Relaxed);
            hints.tail.store(next(), Ordering::Relaxed);
            let slot = next() as usize % HINT_SLOTS;
            hints.slots[slot].turn.store(next(), Ordering::Relaxed);
            let _ = hints.push(1, 1);
            let _ = hints.take();
        }
    }

    #[test]
    fn threads_that_hint_at_once_lose_nothing() {
        const EACH: u64 = 20_000;
        let hints = Hints::default();
        let mut seen = [0u64; 4];
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let hints = &hints;
                scope.spawn(move || {
                    for n in 0..EACH {
                        while !hints.push(thread, n) {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            while seen.iter().sum::<u64>() < 4 * EACH {
                if let Some((thread, n)) = hints.take() {
                    assert_eq!(seen[thread as usize], n, "in each thread's order");
                    seen[thread as usize] += 1;
                } else {
                    std::thread::yield_now();
                }
            }
        });
    }
}
