//! Threads that help whoever has work for several for some milliseconds, and sleep in between.
//! A thread that is made for that may not begin before it is over: the kernel leaves it on its
//! maker's processor until that sleeps. One that is woken begins at once, on a processor that
//! is free.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Threads, for all who want help.
#[derive(Debug)]
pub struct Helpers {
    state: Mutex<State>,
    /// There is work.
    begins: Condvar,
    /// Somebody has left it.
    ends: Condvar,
}

#[derive(Debug)]
struct State {
    threads: usize,
    jobs: Vec<Job>,
    number: u64,
}

#[derive(Debug)]
struct Job {
    number: u64,
    work: Work,
    /// So many may still begin.
    places: usize,
    /// So many are at it.
    inside: usize,
    panicked: bool,
}

/// What is to be done, of somebody who does not leave before nobody is at it.
#[derive(Clone, Copy, Debug)]
struct Work(*const (dyn Fn() + Sync));

// SAFETY: what it points to may be shared, and lives as long as somebody may be at it: see
// `Leaving`.
unsafe impl Send for Work {}

/// Takes the work away, and waits for those that are at it, also in a panic.
struct Leaving<'a> {
    helpers: &'a Helpers,
    number: u64,
}

impl Helpers {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            state: Mutex::new(State { threads: 0, jobs: Vec::new(), number: 0 }),
            begins: Condvar::new(),
            ends: Condvar::new(),
        }
    }

    /// Does `work` here, and in up to `helpers` other threads beside. Returns when all that
    /// have begun are done; those that have not by then never do.
    ///
    /// # Panics
    /// Where `work` did, here or there.
    pub fn beside(&'static self, helpers: usize, work: &(dyn Fn() + Sync)) {
        if helpers == 0 {
            return work();
        }
        // SAFETY: only the lifetime changes. Nobody calls it when `leaving` has been dropped, and
        // that is before `work` can go.
        let lasting = unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync)>(work)
        };
        let mut state = self.lock();
        state.number += 1;
        let number = state.number;
        let (places, work_of) = (helpers, Work(lasting));
        state.jobs.push(Job { number, work: work_of, places, inside: 0, panicked: false });
        while state.threads < helpers {
            let thread = thread::Builder::new().name("helper".into()).spawn(|| self.help());
            // Without one there is one less.
            let Ok(_) = thread else { break };
            state.threads += 1;
        }
        drop(state);
        self.begins.notify_all();
        let leaving = Leaving { helpers: self, number };
        work();
        assert!(!leaving.end(), "a helper panicked");
    }

    fn help(&self) {
        let mut state = self.lock();
        loop {
            let Some(job) = state.jobs.iter_mut().find(|job| job.places > 0) else {
                state = self.begins.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            (job.places, job.inside) = (job.places - 1, job.inside + 1);
            let (number, Work(work)) = (job.number, job.work);
            drop(state);
            // SAFETY: whoever has it waits for us: `inside` says that we are at it.
            let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*work)() }));
            state = self.lock();
            if let Some(job) = state.jobs.iter_mut().find(|job| job.number == number) {
                job.inside -= 1;
                job.panicked |= done.is_err();
            }
            self.ends.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Helpers {
    fn default() -> Self {
        Self::new()
    }
}

impl Leaving<'_> {
    /// Whether a helper panicked.
    fn end(self) -> bool {
        let panicked = self.leave();
        std::mem::forget(self);
        panicked
    }

    fn leave(&self) -> bool {
        let mut state = self.helpers.lock();
        loop {
            let Some(at) = state.jobs.iter().position(|job| job.number == self.number) else {
                return false;
            };
            state.jobs[at].places = 0;
            if state.jobs[at].inside == 0 {
                return state.jobs.swap_remove(at).panicked;
            }
            state = self.helpers.ends.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};

    use super::*;

    #[test]
    fn work_is_done_beside_and_nobody_is_at_it_afterwards() {
        static HELPERS: Helpers = Helpers::new();
        for round in 0..200 {
            // Gone when `beside` has returned.
            let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            let next = AtomicUsize::new(0);
            HELPERS.beside(round % 4, &|| {
                while let Some(count) = counts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
        assert!(HELPERS.lock().jobs.is_empty() && HELPERS.lock().threads == 3);
    }

    #[test]
    fn several_have_help_at_the_same_time() {
        static HELPERS: Helpers = Helpers::new();
        // All four are there at once, or this hangs: two who ask, and two helpers.
        let there = Arc::new(AtomicUsize::new(0));
        let ask = |there: Arc<AtomicUsize>| {
            let work = move || {
                there.fetch_add(1, Ordering::SeqCst);
                while there.load(Ordering::SeqCst) < 4 {
                    thread::yield_now();
                }
            };
            move || HELPERS.beside(2, &work)
        };
        let asking = [thread::spawn(ask(Arc::clone(&there))), thread::spawn(ask(there))];
        asking.into_iter().for_each(|one| one.join().expect("it returns"));
    }

    #[test]
    fn a_panic_is_heard_where_help_was_asked_for() {
        static HELPERS: Helpers = Helpers::new();
        let here = thread::current().id();
        let both = Barrier::new(2);
        let asked = catch_unwind(AssertUnwindSafe(|| {
            HELPERS.beside(1, &|| {
                both.wait();
                assert!(thread::current().id() == here, "in the helper");
            });
        }));
        assert!(asked.is_err());
        let calls = AtomicUsize::new(0);
        HELPERS.beside(1, &|| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert!(calls.into_inner() >= 1 && HELPERS.lock().jobs.is_empty());
    }
}
