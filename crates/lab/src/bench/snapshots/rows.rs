//! What is measured of snapshots, what is asked of it, and the table of both.
//! Pure.

use crate::{
    statistics::{Spread, spread},
    table::{Table, short},
};
use serde::Serialize;

/// A figure.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Measure {
    Size,
    Freeze,
    SecondFreeze,
    SecondShare,
    Took,
    DuringP99,
    DuringLongest,
    CaptureReads,
    CaptureMixed,
    Gone,
    Crash,
    BackAtSpeed,
    CrashAgain,
    BackAgain,
    Rollback,
    Clones,
    ClonesDram,
    ClonesAccount,
}

/// Whose figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Column {
    Resident,
    Half,
    Lazy,
    Criu,
    Reload,
}

impl Column {
    const ALL: [Self; 5] = [Self::Resident, Self::Half, Self::Lazy, Self::Criu, Self::Reload];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Resident => "Strata, all resident",
            Self::Half => "Strata, half resident",
            Self::Lazy => "CRIU, lazy",
            Self::Criu => "CRIU, full",
            Self::Reload => "Redis's reload",
        }
    }

    const fn is_strata(self) -> bool {
        matches!(self, Self::Resident | Self::Half)
    }
}

/// "Only what changed" in pages: a SET of a key that is there writes the new
/// value, the entry that refers to it, the old value's place in its allocator's
/// list, and the allocator's own records.
const PAGES_OF_A_WRITE: f64 = 5.0;

/// What the issue asks.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Asked {
    /// Reported only.
    Nothing,
    AtMost(f64),
    AtLeast(f64),
    /// At most this, and no more than lazy CRIU's.
    AtMostAndCriu(f64),
    /// At most this; where lazy CRIU itself has more than the second, its
    /// figure and the third.
    Freeze(f64, f64, f64),
}

impl Measure {
    /// In the order of the table.
    const ALL: [Self; 18] = [
        Self::Size,
        Self::Freeze,
        Self::SecondFreeze,
        Self::SecondShare,
        Self::Took,
        Self::DuringP99,
        Self::DuringLongest,
        Self::CaptureReads,
        Self::CaptureMixed,
        Self::Gone,
        Self::Crash,
        Self::BackAtSpeed,
        Self::CrashAgain,
        Self::BackAgain,
        Self::Rollback,
        Self::Clones,
        Self::ClonesDram,
        Self::ClonesAccount,
    ];

    const fn title(self) -> &'static str {
        match self {
            Self::Size => "anonymous memory in DRAM before, MB",
            Self::Freeze => "freeze, ms",
            Self::SecondFreeze => "freeze of a second snapshot, 1 % of the keys written, ms",
            Self::SecondShare => "pages captured by the second, per key written",
            Self::Took => "whole snapshot, capture included, s",
            Self::DuringP99 => "client over the whole snapshot: p99, ms",
            Self::DuringLongest => "client over the whole snapshot: longest, ms",
            Self::CaptureReads => "throughput in the background capture : none, reads",
            Self::CaptureMixed => "throughput in the background capture : none, 1:1",
            Self::Gone => "kill -9 until the process is gone, ms",
            Self::Crash => "crash → first right reply, ms",
            Self::BackAtSpeed => "first reply → 90 % of the former speed, s",
            Self::CrashAgain => "crash again → first right reply, with prefetch, ms",
            Self::BackAgain => "first reply → 90 % of the former speed, with prefetch, s",
            Self::Rollback => "rollback → first right reply, ms",
            Self::Clones => "eight clones, all answering, s",
            Self::ClonesDram => "eight clones before they write, % of one, by the kernel",
            Self::ClonesAccount => "eight clones before they write, % of one, by Strata",
        }
    }

    const fn asked(self) -> Asked {
        match self {
            Self::Freeze | Self::SecondFreeze => Asked::Freeze(150.0, 100.0, 50.0),
            Self::SecondShare => Asked::AtMost(PAGES_OF_A_WRITE),
            Self::CaptureReads | Self::CaptureMixed => Asked::AtLeast(0.85),
            Self::Crash | Self::CrashAgain => Asked::AtMostAndCriu(200.0),
            Self::Rollback => Asked::AtMost(250.0),
            Self::Clones => Asked::AtMost(2.0),
            Self::ClonesDram | Self::ClonesAccount => Asked::AtMost(15.0),
            _ => Asked::Nothing,
        }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Figure {
    measure: Measure,
    size_bytes: u64,
    column: Column,
    samples: Vec<f64>,
}

/// All figures, in the order in which they came, and what could not be had.
#[derive(Default)]
pub(super) struct Figures {
    all: Vec<Figure>,
    failures: Vec<String>,
    remarks: Vec<String>,
}

/// `1 GB`: sizes are asked for in powers of ten.
pub(super) fn size_name(bytes: u64) -> String {
    let megabytes = bytes as f64 / 1e6;
    if megabytes >= 1000.0 { format!("{} GB", megabytes / 1e3) } else { format!("{megabytes} MB") }
}

impl Figures {
    pub(super) fn put(&mut self, measure: Measure, size_bytes: u64, column: Column, value: f64) {
        let is_it = |known: &&mut Figure| {
            (known.measure, known.size_bytes, known.column) == (measure, size_bytes, column)
        };
        match self.all.iter_mut().find(is_it) {
            Some(known) => known.samples.push(value),
            None => self.all.push(Figure { measure, size_bytes, column, samples: vec![value] }),
        }
    }

    pub(super) fn fail(&mut self, reason: String) {
        self.failures.push(reason);
    }

    /// What a figure that is not there means, or one that is.
    pub(super) fn remark(&mut self, remark: String) {
        self.remarks.push(remark);
    }

    pub(super) fn failures(&self) -> &[String] {
        &self.failures
    }

    pub(super) fn all(&self) -> impl Serialize + '_ {
        &self.all
    }

    fn spread(&self, measure: Measure, size_bytes: u64, column: Column) -> Option<Spread> {
        let is_it = |known: &&Figure| {
            (known.measure, known.size_bytes, known.column) == (measure, size_bytes, column)
        };
        spread(&self.all.iter().find(is_it)?.samples)
    }

    fn sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<u64> = self.all.iter().map(|figure| figure.size_bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Beside each figure of Strata's what was asked, and whether it is reached
    /// by the median of every column of Strata's.
    pub(super) fn markdown(&self, criu: &str) -> String {
        let mut header = vec!["", "size"];
        header.extend(Column::ALL.map(Column::name));
        header.extend(["asked", "reached"]);
        let mut table = Table::new(&header);
        for measure in Measure::ALL {
            for &size in &self.sizes() {
                let found = Column::ALL.map(|column| self.spread(measure, size, column));
                if found.iter().all(Option::is_none) {
                    continue;
                }
                let mut row = vec![measure.title().to_owned(), size_name(size)];
                row.extend(found.map(|one| one.map_or_else(|| "–".into(), |one| one.to_string())));
                let (asked, reached) = self.judged(measure, size);
                row.extend([asked, reached]);
                table.row(row);
            }
        }
        let mut out = format!("CRIU {criu}. Medians with the lowest and the highest.\n\n");
        out.push_str(&table.markdown());
        out.push_str(&self.alike());
        for (title, list) in [("To be said", &self.remarks), ("Not measured", &self.failures)] {
            if !list.is_empty() {
                out.push_str(&format!("\n{title}:\n\n"));
                list.iter().for_each(|line| out.push_str(&format!("- {line}\n")));
            }
        }
        out
    }

    fn judged(&self, measure: Measure, size: u64) -> (String, String) {
        let criu = self.spread(measure, size, Column::Lazy).map(|found| found.median);
        // The freeze of a second dump is not measured: the first one's counts.
        let frozen = self.spread(Measure::Freeze, size, Column::Lazy).map(|found| found.median);
        let (sign, limit, needs_rival) = match measure.asked() {
            Asked::Nothing => return (String::new(), String::new()),
            Asked::AtLeast(least) => ("≥", least, false),
            Asked::AtMost(most) => ("≤", most, false),
            Asked::AtMostAndCriu(most) => ("≤", most, true),
            Asked::Freeze(most, grown, more) => match frozen {
                Some(frozen) if frozen > grown => ("≤", most.max(frozen + more), false),
                _ => ("≤", most, false),
            },
        };
        let mut asked = format!("{sign} {}", short(limit));
        let mut limit = limit;
        if needs_rival {
            match criu {
                Some(criu) => {
                    asked.push_str(&format!(" and CRIU's {}", short(criu)));
                    limit = limit.min(criu);
                }
                None => asked.push_str(" and CRIU's, not measured"),
            }
        }
        let holds = |value: f64| if sign == "≥" { value >= limit } else { value <= limit };
        let strata: Vec<(Column, f64)> = Column::ALL
            .into_iter()
            .filter(|column| column.is_strata())
            .filter_map(|column| Some((column, self.spread(measure, size, column)?.median)))
            .collect();
        let missed: Vec<&str> = strata
            .iter()
            .filter(|(_, value)| !holds(*value))
            .map(|(column, _)| column.name())
            .collect();
        let reached = match (strata.is_empty(), missed.is_empty()) {
            (true, _) => "not measured".to_owned(),
            (false, true) if needs_rival && criu.is_none() => "not known".to_owned(),
            (false, true) => "yes".to_owned(),
            (false, false) => format!("no: {}", missed.join(", ")),
        };
        (asked, reached)
    }

    /// Whether figures that should not grow with the size do.
    fn alike(&self) -> String {
        let sizes = self.sizes();
        let (Some(&small), Some(&large)) = (sizes.first(), sizes.last()) else {
            return String::new();
        };
        if small == large {
            return String::new();
        }
        let mut out = String::new();
        for measure in [Measure::Freeze, Measure::Crash, Measure::Rollback] {
            for column in Column::ALL {
                let median = |size| self.spread(measure, size, column).map(|found| found.median);
                let (Some(less), Some(more)) = (median(small), median(large)) else { continue };
                out.push_str(&format!(
                    "- {}, {}: {} at {} is {} times that at {}\n",
                    measure.title(),
                    column.name(),
                    short(more),
                    size_name(large),
                    short(more / less),
                    size_name(small)
                ));
            }
        }
        format!("\nWith the size:\n\n{out}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn judged(figures: &[(Measure, Column, f64)], measure: Measure) -> (String, String) {
        let mut all = Figures::default();
        for &(measure, column, value) in figures {
            all.put(measure, GB, column, value);
        }
        all.judged(measure, GB)
    }

    #[test]
    fn a_freeze_is_held_to_the_issue_and_to_what_criu_itself_needs() {
        let freeze = |strata, criu| {
            let figures = [
                (Measure::Freeze, Column::Resident, strata),
                (Measure::Freeze, Column::Lazy, criu),
            ];
            judged(&figures, Measure::Freeze)
        };
        assert_eq!(freeze(149.0, 80.0), ("≤ 150".into(), "yes".into()));
        assert_eq!(freeze(151.0, 99.0).1, "no: Strata, all resident");
        // CRIU alone has grown: its figure and 50 ms, and never less than 150.
        assert_eq!(freeze(240.0, 200.0), ("≤ 250".into(), "yes".into()));
        assert_eq!(freeze(149.0, 100.5), ("≤ 150".into(), "yes".into()));
        assert_eq!(freeze(251.0, 200.0).1, "no: Strata, all resident");
    }

    #[test]
    fn a_crash_is_also_held_to_criu() {
        let crash = |half, criu: Option<f64>| {
            let mut figures = vec![
                (Measure::Crash, Column::Resident, 90.0),
                (Measure::Crash, Column::Half, half),
            ];
            figures.extend(criu.map(|criu| (Measure::Crash, Column::Lazy, criu)));
            judged(&figures, Measure::Crash).1
        };
        assert_eq!(crash(100.0, Some(120.0)), "yes");
        assert_eq!(crash(130.0, Some(120.0)), "no: Strata, half resident");
        assert_eq!(crash(210.0, Some(500.0)), "no: Strata, half resident");
        assert_eq!(crash(100.0, None), "not known");
    }

    #[test]
    fn throughput_is_to_be_high_and_the_rest_is_reported() {
        let reads = |value| {
            judged(&[(Measure::CaptureReads, Column::Half, value)], Measure::CaptureReads).1
        };
        assert_eq!(reads(0.86), "yes");
        assert_eq!(reads(0.84), "no: Strata, half resident");
        assert_eq!(judged(&[], Measure::Rollback).1, "not measured");
        let gone = [(Measure::Gone, Column::Resident, 1e9)];
        assert_eq!(judged(&gone, Measure::Gone), (String::new(), String::new()));
    }

    #[test]
    fn the_table_has_a_row_for_each_size_and_says_what_failed() {
        let mut figures = Figures::default();
        figures.put(Measure::Freeze, GB, Column::Resident, 20.0);
        figures.put(Measure::Freeze, GB, Column::Resident, 30.0);
        figures.put(Measure::Freeze, 4 * GB, Column::Resident, 50.0);
        figures.fail("4 GB, rollback: it broke".into());
        let text = figures.markdown("4.2.1");
        assert!(text.contains("25.0 (20.0 … 30.0)"), "{text}");
        assert!(text.contains("50.0 at 4 GB is 2.00 times that at 1 GB"), "{text}");
        assert!(text.contains("- 4 GB, rollback: it broke"), "{text}");
        assert_eq!(size_name(100_000_000), "100 MB");
    }
}
