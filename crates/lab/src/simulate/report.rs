//! The figures of one simulated run, as a table. Counts only; what is
//! counted is decided in [`super`].

use std::fmt::Write as _;

use strata_policy::replay::Touch;

use super::foretell::Described;

/// Windows into which the measured part is cut, to see a change over time.
pub(super) const WINDOWS: usize = 64;
/// Windows shown in the table together.
const SHOWN: usize = 8;

/// What things cost, in microseconds, on the reference machine
/// (docs/measurements.md): a stored page brought back, a staged one, and the
/// eviction that makes room for it.
const HARD_US: f64 = 12.0;
const SOFT_US: f64 = 8.0;
const EVICTION_US: f64 = 6.0;

/// One policy's misses.
pub(super) struct Row {
    pub(super) policy: &'static str,
    hard: [u64; WINDOWS],
    soft: [u64; WINDOWS],
    /// Faults in the last part of the warm-up, as long as [`SHOWN`] windows.
    before: u64,
}

/// When a touch happened.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not counted.
    Warm,
    /// The end of the warm-up: the steady state before a change.
    Before,
    Window(usize),
}

impl Row {
    pub(super) fn new(policy: &'static str) -> Self {
        Self { policy, hard: [0; WINDOWS], soft: [0; WINDOWS], before: 0 }
    }

    pub(super) fn count(&mut self, touch: Touch, phase: Phase) {
        let miss = match touch {
            Touch::Hit | Touch::First => return,
            Touch::Soft => &mut self.soft,
            Touch::Hard => &mut self.hard,
        };
        match phase {
            Phase::Warm => {}
            Phase::Before => self.before += 1,
            Phase::Window(window) => miss[window] += 1,
        }
    }

    fn faults(&self, windows: std::ops::Range<usize>) -> u64 {
        windows.map(|window| self.hard[window] + self.soft[window]).sum()
    }
}

/// How long a change was felt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Recovery {
    pub(super) units: u64,
    pub(super) misses: u64,
}

/// All policies over one stream of touches.
pub(super) struct Report {
    pub(super) title: String,
    pub(super) managed_pages: usize,
    pub(super) room_pages: usize,
    pub(super) window_units: u64,
    /// Misses per unit of the best fixed set.
    pub(super) best_fixed: f64,
    pub(super) rows: Vec<Row>,
    /// What is hot changes between warm-up and measurement.
    pub(super) changes: bool,
    /// What the advisor said before.
    pub(super) foretold: Option<Described>,
}

impl Report {
    fn units(&self) -> f64 {
        (self.window_units * WINDOWS as u64) as f64
    }

    pub(super) fn hard_per_unit(&self, row: &Row) -> f64 {
        row.hard.iter().sum::<u64>() as f64 / self.units()
    }

    fn soft_per_unit(&self, row: &Row) -> f64 {
        row.soft.iter().sum::<u64>() as f64 / self.units()
    }

    /// Every page brought back has one evicted for it.
    fn cost_us_per_unit(&self, row: &Row) -> f64 {
        let (hard, soft) = (self.hard_per_unit(row), self.soft_per_unit(row));
        HARD_US * hard + SOFT_US * soft + EVICTION_US * (hard + soft)
    }

    /// Units after the change, and misses in them, until the misses of a window of
    /// 1/64 are for the first time less than a tenth above the steady state that
    /// `level` had before.
    pub(super) fn recovery(&self, row: &Row, level: &Row) -> Option<Recovery> {
        let steady = level.before as f64 / SHOWN as f64;
        let back = |window: &usize| row.faults(*window..window + 1) as f64 <= 1.1 * steady;
        (0..WINDOWS).find(back).map(|window| Recovery {
            units: (window as u64 + 1) * self.window_units,
            misses: row.faults(0..window + 1),
        })
    }

    /// The rival that others' levels are compared with.
    pub(super) fn lru(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.policy == "LRU")
    }

    /// What it took after the change: to the policy's own steady state, to LRU's, and to
    /// production's.
    fn recoveries(&self) -> String {
        let told = |recovery: Option<Recovery>| match recovery {
            Some(Recovery { units, misses }) => format!("{misses} in {units} GETs"),
            None => "never".to_owned(),
        };
        let mut text = String::from(
            "misses after the change until within a tenth of a steady state: its own; LRU's; \
             strata's\n",
        );
        for row in &self.rows {
            let own = told(self.recovery(row, row));
            let lru = self.lru().map_or_else(String::new, |lru| told(self.recovery(row, lru)));
            let strata = told(self.recovery(row, &self.rows[0]));
            let _ = writeln!(text, "{:<10}{own:>24}{lru:>24}{strata:>24}", row.policy);
        }
        text
    }

    pub(super) fn table(&self) -> String {
        let mut text = format!(
            "\n{}: {} pages, room for {} ({:.1} %); best fixed set {:.3} misses per GET\n",
            self.title,
            self.managed_pages,
            self.room_pages,
            100.0 * self.room_pages as f64 / self.managed_pages as f64,
            self.best_fixed,
        );
        let shown = WINDOWS / SHOWN;
        let _ = writeln!(
            text,
            "{:<10}{:>8}{:>8}{:>9}{:>9}   all faults in each {} GETs",
            "policy",
            "hard",
            "soft",
            "cost µs",
            if self.changes { "back in" } else { "" },
            self.window_units * SHOWN as u64,
        );
        for row in &self.rows {
            let back = match self.recovery(row, row) {
                _ if !self.changes => String::new(),
                Some(recovery) => format!("{}k", recovery.units.div_ceil(1000)),
                None => "never".to_owned(),
            };
            let _ = write!(
                text,
                "{:<10}{:>8.3}{:>8.3}{:>9.2}{:>9}  ",
                row.policy,
                self.hard_per_unit(row),
                self.soft_per_unit(row),
                self.cost_us_per_unit(row),
                back,
            );
            for first in (0..WINDOWS).step_by(shown) {
                let units = (self.window_units * shown as u64) as f64;
                let _ = write!(text, " {:.3}", row.faults(first..first + shown) as f64 / units);
            }
            text.push('\n');
        }
        if self.changes {
            text += &self.recoveries();
        }
        if let Some(foretold) = &self.foretold {
            text += &foretold.text();
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_is_the_first_window_near_the_steady_state() {
        let mut row = Row::new("any");
        for _ in 0..SHOWN * 100 {
            row.count(Touch::Hard, Phase::Before);
        }
        for window in 0..WINDOWS {
            for _ in 0..(300 - 10 * window.min(20)) {
                row.count(Touch::Soft, Phase::Window(window));
            }
        }
        let report = Report {
            title: String::new(),
            managed_pages: 10,
            room_pages: 5,
            window_units: 1_000,
            best_fixed: 0.0,
            rows: vec![row],
            changes: true,
            foretold: None,
        };
        let misses = (0..20).map(|window| 300 - 10 * window).sum();
        let recovery = report.recovery(&report.rows[0], &report.rows[0]);
        assert_eq!(recovery, Some(Recovery { units: 20_000, misses }));
        // Somebody who missed two and a half times as often is level sooner.
        let mut worse = Row::new("LRU");
        (0..SHOWN * 250).for_each(|_| worse.count(Touch::Hard, Phase::Before));
        let recovery = report.recovery(&report.rows[0], &worse);
        assert_eq!(recovery, Some(Recovery { units: 4_000, misses: 300 + 290 + 280 + 270 }));
        let soft = report.soft_per_unit(&report.rows[0]);
        assert!((report.cost_us_per_unit(&report.rows[0]) - 14.0 * soft).abs() < 1e-9);
    }
}
