//! Who may read or write which pages of a disk now. A page that is written is nobody
//! else's meanwhile; those who only read it share it. Whoever came first goes first, so
//! nobody waits for ever, and who waits holds nothing, so nobody waits in a circle.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
struct Claim {
    number: u64,
    pages: Range<u64>,
    alone: bool,
}

#[derive(Debug, Default)]
struct Claims {
    /// In the order in which they came. As many as there are requests under way: few.
    all: Vec<Claim>,
    next: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    claims: Mutex<Claims>,
    gone: Condvar,
}

/// Pages that are held; until it is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    ranges: &'a Ranges,
    number: u64,
}

impl Ranges {
    fn lock(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the pages. `alone`: to write them. `before_waiting` is called if others
    /// have them.
    pub(crate) fn hold(
        &self,
        pages: Range<u64>,
        alone: bool,
        before_waiting: &mut dyn FnMut(),
    ) -> Held<'_> {
        let mut claims = self.lock();
        let number = claims.next;
        claims.next += 1;
        claims.all.push(Claim { number, pages: pages.clone(), alone });
        let in_the_way = |claim: &Claim| {
            let overlaps = claim.pages.start < pages.end && pages.start < claim.pages.end;
            claim.number < number && overlaps && (alone || claim.alone)
        };
        if claims.all.iter().any(in_the_way) {
            before_waiting();
        }
        while claims.all.iter().any(in_the_way) {
            claims = self.gone.wait(claims).unwrap_or_else(PoisonError::into_inner);
        }
        Held { ranges: self, number }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.ranges.lock().all.retain(|claim| claim.number != self.number);
        self.ranges.gone.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicI32, Ordering};

    #[test]
    fn who_writes_is_alone_and_who_reads_is_not() {
        let ranges = Ranges::default();
        let first = ranges.hold(0..10, false, &mut || ());
        drop((ranges.hold(5..15, false, &mut || ()), ranges.hold(15..20, true, &mut || ())));
        let state = AtomicI32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _held = ranges.hold(9..11, true, &mut || ());
                assert_eq!(state.swap(2, Ordering::SeqCst), 1, "it waited for the reader");
            });
            while ranges.lock().all.len() < 2 {
                std::thread::yield_now();
            }
            // A reader that comes later waits for the writer, and others do not.
            drop(ranges.hold(0..9, false, &mut || ()));
            scope.spawn(|| {
                let _held = ranges.hold(10..11, false, &mut || ());
                assert_eq!(state.load(Ordering::SeqCst), 2, "it waited for the writer");
            });
            while ranges.lock().all.len() < 3 {
                std::thread::yield_now();
            }
            assert_eq!(state.swap(1, Ordering::SeqCst), 0);
            drop(first);
        });
        assert!(ranges.lock().all.is_empty());
    }
}
