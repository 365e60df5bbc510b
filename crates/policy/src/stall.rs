//! What part of the time a tenant waits for pages, in the kernel's terms for pressure:
//! *some* of its threads, and *all* of them. Sees sums only, and reads no clock.
//!
//! *Some* is counted where pages are brought. Whether anything ran meanwhile is known
//! by the processor time that the tenant used: in a window as short as a look, all waited
//! for as long as some did, but not longer than the processors stood still.

/// Windows are at least this long: to ask for processor time costs a system call for
/// each process.
pub const LEAST_WINDOW_NS: u64 = 20_000_000;
/// What averages are taken over, seconds.
pub const AVERAGED_S: [f64; 3] = [10.0, 60.0, 300.0];

/// Averages over [`AVERAGED_S`], as parts of the time: 1.0 is all of it.
pub type Averages = [f64; 3];

/// See the module's text.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Stall {
    some: Averages,
    full: Averages,
    last: Option<Sums>,
}

/// What has been counted so far, nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sums {
    /// When.
    pub at_ns: u64,
    /// Some thread waited.
    pub some_ns: u64,
    /// Processor time of all threads.
    pub processor_ns: u64,
}

impl Stall {
    /// Whether a window is over by now.
    #[must_use]
    pub fn is_due(&self, at_ns: u64) -> bool {
        self.last.is_none_or(|last| at_ns.saturating_sub(last.at_ns) >= LEAST_WINDOW_NS)
    }

    /// Ends a window. Returns how long all threads waited in it.
    pub fn look(&mut self, now: Sums) -> u64 {
        let Some(last) = self.last.replace(now) else { return 0 };
        let window_ns = now.at_ns.saturating_sub(last.at_ns);
        if window_ns == 0 {
            return 0;
        }
        // Longer than the window: some began before it and were counted at their end.
        let some_ns = now.some_ns.saturating_sub(last.some_ns).min(window_ns);
        // Of processes that have ended nothing is known: then it is less than before.
        let ran_ns = now.processor_ns.saturating_sub(last.processor_ns).min(window_ns);
        let full_ns = some_ns.min(window_ns - ran_ns);
        let part = |ns: u64| ns as f64 / window_ns as f64;
        self.some = averaged(self.some, window_ns, part(some_ns));
        self.full = averaged(self.full, window_ns, part(full_ns));
        full_ns
    }

    /// The averages of some and of all, if nobody has waited since the last window.
    #[must_use]
    pub fn at(&self, at_ns: u64) -> (Averages, Averages) {
        let since_ns = self.last.map_or(0, |last| at_ns.saturating_sub(last.at_ns));
        if since_ns < LEAST_WINDOW_NS {
            return (self.some, self.full);
        }
        (averaged(self.some, since_ns, 0.0), averaged(self.full, since_ns, 0.0))
    }
}

fn averaged(before: Averages, window_ns: u64, part: f64) -> Averages {
    let seconds = window_ns as f64 / 1e9;
    let mut averages = before;
    for (average, over_s) in averages.iter_mut().zip(AVERAGED_S) {
        let kept = (-seconds / over_s).exp();
        *average = *average * kept + part * (1.0 - kept);
    }
    averages
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Windows of 100 ms in each of which some waited and processors ran for so long.
    fn after(windows: u64, some_ms: u64, ran_ms: u64) -> (Stall, u64) {
        let mut stall = Stall::default();
        let mut full_ns = 0;
        for n in 0..=windows {
            let sums = Sums {
                at_ns: n * 100 * MS,
                some_ns: n * some_ms * MS,
                processor_ns: n * ran_ms * MS,
            };
            assert!(stall.is_due(sums.at_ns));
            full_ns += stall.look(sums);
        }
        (stall, full_ns)
    }

    #[test]
    fn one_thread_that_waits_is_all_of_them() {
        let (stall, full_ns) = after(100, 60, 30);
        let (some, full) = stall.at(10_000 * MS);
        assert_eq!(some, full);
        // After as long as it is averaged over, all but 1/e of it.
        assert!((some[0] - 0.6 * (1.0 - (-1.0f64).exp())).abs() < 1e-9, "{some:?}");
        assert!(some[0] > some[1] && some[1] > some[2] && some[2] > 0.0);
        assert_eq!(full_ns, 100 * 60 * MS);
    }

    #[test]
    fn what_runs_meanwhile_is_not_stalled() {
        // One waits nearly always, another computes.
        let (stall, full_ns) = after(1000, 90, 100);
        let (some, full) = stall.at(100_000 * MS);
        assert!(some[0] > 0.89 && full[0] == 0.0, "{some:?} {full:?}");
        assert_eq!(full_ns, 0);
        // It computes half of the time only.
        assert_eq!(after(10, 90, 50).1, 10 * 50 * MS);
        // Four processors at once are no more than all of the time.
        assert_eq!(after(10, 90, 400).1, 0);
    }

    #[test]
    fn averages_fade_when_nobody_waits() {
        let (stall, _) = after(3000, 100, 0);
        let (some, _) = stall.at(300_000 * MS);
        assert!(some[0] > 0.999 && some[1] > 0.99, "{some:?}");
        let (later, _) = stall.at(310_000 * MS);
        assert!((later[0] - some[0] * (-1.0f64).exp()).abs() < 1e-9, "{later:?}");
        assert!(later[2] > 0.6, "{later:?}");
    }

    #[test]
    fn odd_sums_are_put_up_with() {
        let mut stall = Stall::default();
        assert_eq!(stall.at(5), ([0.0; 3], [0.0; 3]));
        stall.look(Sums { at_ns: 100 * MS, some_ns: 5, processor_ns: 900 * MS });
        assert!(!stall.is_due(110 * MS) && stall.is_due(120 * MS));
        // Less processor time than before, more waiting than there was time, no time.
        assert_eq!(
            stall.look(Sums { at_ns: 200 * MS, some_ns: 1 << 40, processor_ns: 0 }),
            100 * MS
        );
        assert_eq!(stall.look(Sums { at_ns: 200 * MS, some_ns: 1 << 50, processor_ns: 0 }), 0);
        let (some, full) = stall.at(200 * MS);
        assert!(some.iter().chain(&full).all(|part| (0.0..=1.0).contains(part)));
    }
}
