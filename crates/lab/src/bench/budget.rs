//! How long a row may take: measuring must not cost days. A row that is not long by its
//! nature begins no further repetition when its ten minutes are over, and says so.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// What a row may take.
const ROW: Duration = Duration::from_secs(600);
/// What a bench may take that was asked for no row in particular.
const WHOLE: Duration = Duration::from_secs(3600);

/// The time of a bench and of the row under way.
pub(super) struct Budget {
    began: Instant,
    row_began: Cell<Instant>,
    /// None: as long as it takes.
    row: Cell<Option<Duration>>,
    /// Repetitions that were left out, of how many.
    left_out: Cell<Option<(usize, usize)>>,
}

impl Budget {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            row_began: Cell::new(now),
            row: Cell::new(None),
            left_out: Cell::new(None),
        }
    }

    /// A row begins. False: a bench of all rows (`whole`) has no time left for it.
    pub(super) fn begin(&self, is_long: bool, whole: bool) -> bool {
        let left = WHOLE.saturating_sub(self.began.elapsed());
        self.row_began.set(Instant::now());
        self.left_out.set(None);
        self.row.set(if is_long {
            None
        } else if whole {
            Some(ROW.min(left))
        } else {
            Some(ROW)
        });
        !whole || !left.is_zero()
    }

    /// Whether a further repetition may begin, `done` being done of the row's `asked`. It
    /// will take as long as those before, and must end in time.
    pub(super) fn allows(&self, done: usize, asked: usize) -> bool {
        let Some(row) = self.row.get() else { return true };
        let spent = self.row_began.get().elapsed();
        let fits = done == 0 || spent + spent / u32::try_from(done).unwrap_or(u32::MAX) <= row;
        if !fits {
            self.left_out.set(Some((asked - done, asked)));
        }
        fits
    }

    /// What the row took, and whether that was too long.
    pub(super) fn said(&self) -> String {
        let seconds = self.row_began.get().elapsed().as_secs();
        match (self.left_out.get(), self.row.get()) {
            (Some((left_out, asked)), _) => format!(
                "  {seconds} s; {left_out} of {asked} repetitions were left out: a row has {} s",
                ROW.as_secs()
            ),
            (None, Some(row)) if seconds > row.as_secs() => {
                format!("  {seconds} s: OVER the {} s that a row has", row.as_secs())
            }
            _ => format!("  {seconds} s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_begins_no_repetition_that_would_end_too_late() {
        let budget = Budget::new();
        assert!(budget.begin(false, false));
        assert!(budget.allows(0, 5) && budget.allows(1, 5));
        budget.row.set(Some(Duration::ZERO));
        assert!(budget.allows(0, 5), "one there is always");
        std::thread::sleep(Duration::from_millis(1));
        assert!(!budget.allows(2, 5));
        assert!(budget.said().contains("3 of 5 repetitions were left out"), "{}", budget.said());
        assert!(budget.begin(true, false) && budget.allows(4, 5), "a long one runs to its end");
        assert!(!budget.said().contains("left out"), "that was another row");
    }
}
