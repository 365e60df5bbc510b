//! How long a tenant waits for its pages. Handlers say when a thread waits and when none
//! does any more; the keeper makes averages of it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use strata_policy::stall::{Averages, Stall, Sums};
use strata_sys::Process;

use crate::map::counters::Counter;
use crate::map::lock;
use crate::tenant::Tenant;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Waiting {
    began: Instant,
    /// Handlers with a fault that is not served.
    handlers: AtomicU32,
    /// Since when there is one, nanoseconds from `began`.
    since_ns: AtomicU64,
    stall: Mutex<Stall>,
}

impl Default for Waiting {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            handlers: AtomicU32::new(0),
            since_ns: AtomicU64::new(0),
            stall: Mutex::default(),
        }
    }
}

impl Waiting {
    fn ns(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.began).as_nanos() as u64
    }
}

/// How long a tenant has waited for pages: since its start, and lately.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Stalled {
    /// Some thread, nanoseconds.
    pub some_ns: u64,
    /// All threads, nanoseconds.
    pub full_ns: u64,
    /// Some thread: parts of the last 10, 60 and 300 seconds.
    pub some: Averages,
    /// All threads.
    pub full: Averages,
}

impl Tenant {
    /// A handler has a fault to serve that it learnt of at `began`, and had none before.
    pub(crate) fn wait_begins(&self, began: Instant) {
        let waiting = &self.waiting;
        if waiting.handlers.fetch_add(1, Ordering::AcqRel) == 0 {
            waiting.since_ns.store(waiting.ns(began), Ordering::Release);
        }
    }

    /// It has served all that it had since `began`.
    pub(crate) fn wait_ends(&self, began: Instant) {
        let waiting = &self.waiting;
        if waiting.handlers.fetch_sub(1, Ordering::AcqRel) == 1 {
            // Another may just have begun, and written when: at worst what it overlaps
            // with this one is counted twice.
            let since_ns = waiting.since_ns.load(Ordering::Acquire).min(waiting.ns(began));
            let now_ns = waiting.ns(Instant::now());
            self.counters.add(Counter::StallNanoseconds, now_ns.saturating_sub(since_ns));
        }
    }

    /// Some thread has waited for so long, the one that waits now included.
    fn some_ns(&self, at_ns: u64) -> u64 {
        let counted = self.counters.get(Counter::StallNanoseconds);
        let waits = self.waiting.handlers.load(Ordering::Acquire) > 0;
        let since_ns = self.waiting.since_ns.load(Ordering::Acquire);
        counted + if waits { at_ns.saturating_sub(since_ns) } else { 0 }
    }

    /// The same, up to now.
    pub(crate) fn waited_ns(&self) -> u64 {
        self.some_ns(self.waiting.ns(Instant::now()))
    }

    /// Ends a window of the averages, if one is over; whether one was.
    pub(crate) fn look_at_stall(&self, processes: impl Iterator<Item = Arc<Process>>) -> bool {
        let at_ns = self.waiting.ns(Instant::now());
        let mut stall = lock(&self.waiting.stall);
        if !stall.is_due(at_ns) {
            return false;
        }
        let processor: std::time::Duration = processes.filter_map(|one| one.processor_time()).sum();
        let processor_ns = processor.as_nanos() as u64;
        let full_ns = stall.look(Sums { at_ns, some_ns: self.some_ns(at_ns), processor_ns });
        drop(stall);
        self.counters.add(Counter::FullStallNanoseconds, full_ns);
        true
    }

    /// See [`Stalled`].
    #[must_use]
    pub fn stalled(&self) -> Stalled {
        let at_ns = self.waiting.ns(Instant::now());
        let (some, full) = lock(&self.waiting.stall).at(at_ns);
        let full_ns = self.counters.get(Counter::FullStallNanoseconds);
        let some_ns = self.counters.get(Counter::StallNanoseconds).max(full_ns);
        Stalled { some_ns, full_ns, some, full }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing;

    #[test]
    fn two_handlers_that_wait_at_once_count_once() {
        let tenant = testing::tenant();
        let some = |tenant: &Tenant| tenant.counters.get(Counter::StallNanoseconds);
        let first = Instant::now();
        tenant.wait_begins(first);
        std::thread::sleep(Duration::from_millis(5));
        let second = Instant::now();
        tenant.wait_begins(second);
        tenant.wait_ends(first);
        assert_eq!(some(&tenant), 0, "one still waits");
        assert!(tenant.some_ns(tenant.waiting.ns(Instant::now())) >= 5_000_000);
        std::thread::sleep(Duration::from_millis(5));
        tenant.wait_ends(second);
        let waited = some(&tenant);
        let whole = first.elapsed().as_nanos() as u64;
        assert!((10_000_000..=whole).contains(&waited), "{waited} of {whole}");
    }
}
