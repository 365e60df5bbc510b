//! Which pages of the file tier are worth compressed memory: those that come back
//! sooner than compressed memory keeps a page.
//!
//! Downwards the oldest go first, when the budget asks for it. Upwards a page goes
//! when it is evicted again unchanged: its bytes are in hand then, and what is known
//! is how long it stays away ([`crate::gap`]). How long a page lasts in compressed
//! memory follows from how many there are and how fast they come (Little's law).

use crate::gap::Level;

/// Arrivals between two looks, and pages stored; fewer say little.
pub const LOOK_EVERY: u64 = 4096;
const LEAST_STORED: u64 = 512;
/// A page that would last only just as long as it stays away pushes out another one
/// that is as good.
const MARGIN: u64 = 2;
/// The file has to be so many times slower, or nothing is gained by moving.
const WORTH: f64 = 2.0;
/// Below this part of the budget compressed memory has room for all.
const ROOM_PART: u64 = 8;

/// What was counted of a tenant since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flow {
    /// Arrivals: the clock of gap estimates.
    pub time: u64,
    /// Pages that came into compressed memory.
    pub stored: u64,
}

/// What is in compressed memory, and how fast it is.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Compressed {
    /// Distinct pages.
    pub pages: u64,
    /// What they cost.
    pub bytes: u64,
    /// Of all that the tenant may cost.
    pub budget_bytes: u64,
    /// A fault on one takes so long, ...
    pub fault_us: f64,
    /// ...and so long on a page in the file. 0: not known yet.
    pub file_fault_us: f64,
}

/// What follows from two looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Horizon {
    /// Pages whose gap is known and below this are kept in compressed memory when
    /// they leave; none: no page is.
    At(Option<Level>),
    /// Too little has happened to say: what was found before holds.
    AsBefore,
}

/// How far pages are worth compressed memory.
#[must_use]
pub fn horizon(before: Flow, now: Flow, compressed: &Compressed) -> Horizon {
    let Compressed { pages, bytes, budget_bytes, fault_us, file_fault_us } = *compressed;
    // A device that is not known is taken for a slow one.
    if fault_us > 0.0 && file_fault_us > 0.0 && file_fault_us < WORTH * fault_us {
        return Horizon::At(None);
    }
    if bytes < budget_bytes / ROOM_PART {
        return Horizon::At(Some(Level::of_gap(u32::MAX)));
    }
    let time = now.time.saturating_sub(before.time);
    let stored = now.stored.saturating_sub(before.stored);
    if time < LOOK_EVERY || stored < LEAST_STORED {
        return Horizon::AsBefore;
    }
    let lasts = u128::from(pages) * u128::from(time) / u128::from(stored);
    let lasts = u32::try_from(lasts).unwrap_or(u32::MAX) / MARGIN as u32;
    Horizon::At(Some(Level::of_gap(lasts.max(1))))
}

/// Whether a page whose gap is estimated at `level` is.
#[must_use]
pub fn promotes(horizon: Option<Level>, level: Level) -> bool {
    level != Level::UNKNOWN && horizon.is_some_and(|horizon| level < horizon)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_FIRST: Flow = Flow { time: 1000, stored: 500 };
    const FULL: Compressed = Compressed {
        pages: 10_000,
        bytes: 50 << 20,
        budget_bytes: 100 << 20,
        fault_us: 20.0,
        file_fault_us: 120.0,
    };

    fn after(time: u64, stored: u64) -> Flow {
        Flow { time: AT_FIRST.time + time, stored: AT_FIRST.stored + stored }
    }

    fn level(horizon: Horizon) -> Option<Level> {
        match horizon {
            Horizon::At(level) => level,
            Horizon::AsBefore => panic!("enough has happened"),
        }
    }

    #[test]
    fn a_page_that_comes_back_before_it_would_be_pushed_out_is_promoted() {
        // 10,000 pages there, one comes with every second arrival: each lasts
        // 20,000 arrivals, and half of that counts.
        let horizon = level(horizon(AT_FIRST, after(8192, 4096), &FULL));
        assert!(promotes(horizon, Level::of_gap(8000)));
        assert!(!promotes(horizon, Level::of_gap(12_000)));
        assert!(!promotes(horizon, Level::UNKNOWN), "nothing is known of it");
    }

    #[test]
    fn where_nothing_comes_nothing_new_is_known() {
        // Pages that leave unchanged are stored already. Were all promoted because
        // none comes, all would be pushed out by each other.
        assert_eq!(horizon(AT_FIRST, after(8192, 0), &FULL), Horizon::AsBefore);
        assert_eq!(horizon(AT_FIRST, after(100, 90), &FULL), Horizon::AsBefore);
    }

    #[test]
    fn where_there_is_room_there_is_room_for_all() {
        let little = Compressed { bytes: 1 << 20, ..FULL };
        let horizon = level(horizon(AT_FIRST, after(1, 1), &little));
        assert!(promotes(horizon, Level::of_gap(1 << 30)));
    }

    #[test]
    fn a_file_that_is_as_fast_as_memory_gains_nothing() {
        let fast = Compressed { file_fault_us: 30.0, ..FULL };
        assert_eq!(horizon(AT_FIRST, after(8192, 4096), &fast), Horizon::At(None));
        let unknown = Compressed { file_fault_us: 0.0, ..FULL };
        assert!(level(horizon(AT_FIRST, after(8192, 4096), &unknown)).is_some());
        assert!(!promotes(None, Level::of_gap(1)));
    }
}
