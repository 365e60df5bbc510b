//! The policy's time, in which gaps between uses are told.
//!
//! What a pager sees is arrivals, so time could be counted in them, and is while there
//! are many. But it is the program's work that uses pages, and with room for most of
//! what is used a change brings several times as many arrivals for the same work: told
//! in arrivals, every gap seen after the change would look several times as long as
//! those learned before it, and what had been hot would be kept for what is. So where
//! arrivals are few, each counts for several units, by the processor time that the
//! tenant has used for it.

use std::time::Duration;

/// Work that is worth a unit: some twenty pages used by a server that looks up records.
const UNIT: Duration = Duration::from_micros(15);
/// Most units of one arrival. Finer time lets neighbourhoods be probed more often, which
/// costs misses; a program that works longer for a page has a larger unit instead.
const MOST_UNITS: f64 = 4.0;

/// How many units an arrival counts for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock {
    work: Duration,
    arrivals: u64,
    /// Work for an arrival, in seconds, averaged over as many as there are resident
    /// pages; 0: not known.
    usual: f64,
    units: u64,
}

impl Clock {
    /// Arrivals between two measurements, at least.
    pub const LEAST_ARRIVALS: u64 = 64;

    /// Takes in what the tenant has worked, and how many pages have come, since the last
    /// call; `resident` pages are in DRAM. Units of an arrival from now on, at least 1.
    pub fn advance(&mut self, work: Duration, arrivals: u64, resident: usize) -> u64 {
        self.work += work;
        self.arrivals += arrivals;
        if self.arrivals >= Self::LEAST_ARRIVALS {
            let count = self.arrivals as f64;
            let each = self.work.as_secs_f64() / count;
            let part = if self.usual == 0.0 { 1.0 } else { count / resident.max(1) as f64 };
            self.usual += (each - self.usual) * part.min(1.0);
            let unit = UNIT.as_secs_f64().max(self.usual / MOST_UNITS);
            self.units = (each / unit).round().clamp(1.0, MOST_UNITS) as u64;
            (self.work, self.arrivals) = (Duration::ZERO, 0);
        }
        self.units.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESIDENT: usize = 10_000;

    /// Units after `rounds` of 100 arrivals with so much work for each.
    fn after(clock: &mut Clock, rounds: u32, each: Duration) -> u64 {
        (0..rounds).map(|_| clock.advance(each * 100, 100, RESIDENT)).last().unwrap_or(0)
    }

    #[test]
    fn many_arrivals_count_one_each_and_few_count_for_the_work() {
        for (each_us, units) in [(0, 1), (10, 1), (16, 1), (45, 3), (60, 4)] {
            let each = Duration::from_micros(each_us);
            assert_eq!(after(&mut Clock::default(), 500, each), units, "{each_us} us");
        }
    }

    #[test]
    fn a_program_that_works_long_for_each_has_a_unit_of_its_own() {
        let mut clock = Clock::default();
        assert_eq!(after(&mut clock, 500, Duration::from_millis(2)), 4);
        // Five times as many for the same work: a change, and told as one.
        assert_eq!(after(&mut clock, 1, Duration::from_micros(400)), 1);
        // Which becomes usual.
        assert_eq!(after(&mut clock, 1_000, Duration::from_micros(400)), 4);
    }

    #[test]
    fn a_few_arrivals_are_not_measured_alone() {
        let mut clock = Clock::default();
        assert_eq!(clock.advance(Duration::from_secs(1), 3, RESIDENT), 1);
        assert_eq!(clock.advance(Duration::ZERO, Clock::LEAST_ARRIVALS, RESIDENT), 4);
        assert_eq!(clock.advance(Duration::ZERO, 0, RESIDENT), 4, "as before");
    }
}
