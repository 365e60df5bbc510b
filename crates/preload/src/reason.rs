//! Why a call of the C API failed, kept for the thread that made it.
//!
//! Not thread-local storage: that of a library that is loaded at the start lies
//! on every thread's stack, and nothing here may allocate. A few places are
//! shared by all threads instead; who fails when all are taken takes over the
//! one that was taken first.

use core::ffi::c_char;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use crate::kernel;

/// Longest text, with the zero at its end.
pub(crate) const REASON_BYTES: usize = 256;
/// Threads whose last failures are remembered.
const PLACES: usize = 16;

struct Place {
    /// Whose, by its kernel thread id; 0: nobody's.
    thread: AtomicU32,
    /// The last byte is never written: whatever is read meanwhile, it ends.
    text: [AtomicU8; REASON_BYTES],
}

/// The places, and how many have been taken so far.
struct Reasons {
    places: [Place; PLACES],
    taken: AtomicU32,
}

static REASONS: Reasons = Reasons::new();

impl Reasons {
    const fn new() -> Self {
        let places = [const {
            Place { thread: AtomicU32::new(0), text: [const { AtomicU8::new(0) }; REASON_BYTES] }
        }; PLACES];
        Self { places, taken: AtomicU32::new(0) }
    }

    fn own_place(&self) -> Option<&Place> {
        let thread = kernel::thread_id();
        self.places.iter().find(|place| place.thread.load(Ordering::Acquire) == thread)
    }

    fn clear(&self) {
        if let Some(place) = self.own_place() {
            place.text[0].store(0, Ordering::Relaxed);
        }
    }

    fn keep(&self, text: &[u8]) {
        let place = self.own_place().unwrap_or_else(|| {
            let number = self.taken.fetch_add(1, Ordering::Relaxed) as usize;
            let place = &self.places[number % PLACES];
            place.thread.store(kernel::thread_id(), Ordering::Release);
            place
        });
        let text = text.iter().copied().chain(core::iter::repeat(0));
        for (to, from) in place.text[..REASON_BYTES - 1].iter().zip(text) {
            to.store(from, Ordering::Relaxed);
        }
    }

    fn last(&self) -> *const c_char {
        match self.own_place() {
            Some(place) => place.text.as_ptr().cast(),
            None => c"".as_ptr(),
        }
    }
}

/// Forgets what the calling thread's last failure was.
pub(crate) fn clear() {
    REASONS.clear();
}

/// Remembers why the calling thread's call failed: as many bytes as there is
/// room for, up to a zero.
pub(crate) fn keep(text: &[u8]) {
    REASONS.keep(text);
}

/// Why the calling thread's last call failed; `include/strata.h` says the rest.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn strata_error() -> *const c_char {
    REASONS.last()
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ffi::CStr;

    /// Its own: other tests fail calls, too.
    static REASONS: Reasons = Reasons::new();

    fn reason() -> String {
        // SAFETY: always ended by a zero, and never freed.
        unsafe { CStr::from_ptr(REASONS.last()) }.to_str().expect("text").to_owned()
    }

    fn keep(text: &[u8]) {
        REASONS.keep(text);
    }

    #[test]
    fn each_thread_has_its_own_and_the_oldest_gives_way() {
        assert_eq!(reason(), "");
        keep(b"first");
        keep(b"own");
        for number in 1..PLACES {
            let other = move || {
                assert_eq!(reason(), "");
                keep(format!("of {number}").as_bytes());
                assert_eq!(reason(), format!("of {number}"));
            };
            std::thread::spawn(other).join().expect("as asserted");
        }
        assert_eq!(reason(), "own");
        REASONS.clear();
        assert_eq!(reason(), "");
        keep(&[b'x'; 2 * REASON_BYTES]);
        assert_eq!(reason(), "x".repeat(REASON_BYTES - 1));
        std::thread::spawn(|| keep(b"one more")).join().expect("nothing fails");
        assert_eq!(reason(), "", "the first place is another thread's");
    }
}
