//! Which loads are measured under which limits, and who takes part: the matrix
//! of `tight`, as data. How it is run is in `bench/matrix.rs`.

use crate::{keys::Pattern, stage::Setup};
use anyhow::{Result, bail};
use serde::Serialize;

/// Who is measured in a cell, in the order in which they run: the rivals first,
/// because what they were measured to use is Strata's budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Subject {
    /// No Strata, no limit: 100 %.
    Native,
    Zram,
    Zswap,
    Memtierd,
    /// With the smallest total of zram and zswap in the same repetition.
    Strata,
    /// With memtierd's total.
    StrataAsMemtierd,
    /// With a third of what native needs, everything counted.
    StrataThird,
}

/// One load under one limit.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Cell {
    pub pattern: Pattern,
    /// Share of the data that the rivals may keep resident, in per cent.
    pub share: u64,
    /// Share of GETs.
    pub reads: f64,
    pub pipeline: usize,
    /// Repeated as often as asked for, but for memtierd; the others [`OTHER_REPETITIONS`] times.
    pub is_quoted: bool,
    #[serde(skip)]
    pub subjects: &'static [Subject],
}

/// Repetitions of what is not quoted, unless the matrix was narrowed.
pub(super) const OTHER_REPETITIONS: usize = 2;

const PAIR: &[Subject] = &[Subject::Native, Subject::Zram, Subject::Strata];
const KERNELS: &[Subject] = &[Subject::Native, Subject::Zram, Subject::Zswap, Subject::Strata];
const ALL: &[Subject] = &[
    Subject::Native,
    Subject::Zram,
    Subject::Zswap,
    Subject::Memtierd,
    Subject::Strata,
    Subject::StrataAsMemtierd,
    Subject::StrataThird,
];

const fn cell(pattern: Pattern, share: u64, subjects: &'static [Subject]) -> Cell {
    Cell { pattern, share, reads: 1.0, pipeline: 16, is_quoted: false, subjects }
}

/// All of them.
const CELLS: [Cell; 10] = [
    Cell { is_quoted: true, ..cell(Pattern::Gaussian, 33, ALL) },
    Cell { is_quoted: true, ..cell(Pattern::Gaussian, 66, PAIR) },
    Cell { is_quoted: true, ..cell(Pattern::Uniform, 33, KERNELS) },
    Cell { is_quoted: true, ..cell(Pattern::Zipf, 33, PAIR) },
    Cell { pipeline: 1, ..cell(Pattern::Gaussian, 66, PAIR) },
    cell(Pattern::Gaussian, 15, PAIR),
    cell(Pattern::ScanHot, 33, PAIR),
    Cell { reads: 0.5, ..cell(Pattern::Uniform, 33, PAIR) },
    Cell { reads: 0.0, ..cell(Pattern::Uniform, 33, PAIR) },
    cell(Pattern::Jump, 33, PAIR),
];

/// The cells of these patterns and shares; an empty list means all.
pub(super) fn chosen(patterns: &[Pattern], shares: &[u64]) -> Result<Vec<Cell>> {
    let wanted = |cell: &&Cell| {
        (patterns.is_empty() || patterns.contains(&cell.pattern))
            && (shares.is_empty() || shares.contains(&cell.share))
    };
    let found: Vec<Cell> = CELLS.iter().filter(wanted).copied().collect();
    if found.is_empty() {
        let names: Vec<String> = CELLS.iter().map(Cell::name).collect();
        bail!("no row has these --patterns and --shares; there are: {}", names.join("; "));
    }
    Ok(found)
}

impl Cell {
    pub(super) fn name(&self) -> String {
        let reads = match self.reads {
            1.0 => "",
            0.0 => ", writes only",
            _ => ", 1:1",
        };
        let pipeline = if self.pipeline == 1 { ", unpipelined" } else { "" };
        format!("{} {} %{reads}{pipeline}", self.pattern.name(), self.share)
    }

    pub(super) fn repetitions(&self, subject: Subject, asked: usize, is_narrowed: bool) -> usize {
        let is_quoted =
            self.is_quoted && !matches!(subject, Subject::Memtierd | Subject::StrataAsMemtierd);
        if is_quoted || is_narrowed { asked } else { asked.min(OTHER_REPETITIONS) }
    }
}

impl Subject {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Native => "DRAM only",
            Self::Zram => "zram",
            Self::Zswap => "zswap",
            Self::Memtierd => "memtierd",
            Self::Strata => "Strata",
            Self::StrataAsMemtierd => "Strata, memtierd's total",
            Self::StrataThird => "Strata, 33 % in total",
        }
    }

    pub(super) const fn is_strata(self) -> bool {
        matches!(self, Self::Strata | Self::StrataAsMemtierd | Self::StrataThird)
    }

    /// For the colour of a picture, and the price of a fault.
    pub(super) const fn kind(self) -> Setup {
        match self {
            Self::Native => Setup::DramOnly,
            Self::Zram => Setup::Zram { resident_limit_bytes: 0 },
            Self::Zswap => Setup::Zswap { resident_limit_bytes: 0 },
            Self::Memtierd => Setup::Memtierd { resident_limit_bytes: 0 },
            Self::Strata | Self::StrataAsMemtierd | Self::StrataThird => {
                Setup::Strata { dram_bytes: 0 }
            }
        }
    }

    /// Whom a Strata row is compared with.
    pub(super) const fn rivals(self) -> &'static [Subject] {
        match self {
            Self::Strata => &[Self::Zram, Self::Zswap],
            Self::StrataAsMemtierd => &[Self::Memtierd],
            Self::StrataThird => &[Self::Zram],
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_names_of_their_own_and_rivals_come_first() {
        let mut names: Vec<String> = CELLS.iter().map(Cell::name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), CELLS.len(), "{names:?}");
        for cell in &CELLS {
            assert_eq!(cell.subjects[0], Subject::Native, "{}", cell.name());
            for (place, subject) in cell.subjects.iter().enumerate() {
                let present: Vec<&Subject> =
                    subject.rivals().iter().filter(|one| cell.subjects.contains(one)).collect();
                assert!(!subject.is_strata() || !present.is_empty(), "{}", cell.name());
                for rival in present {
                    assert!(cell.subjects[..place].contains(rival), "{}", cell.name());
                }
            }
        }
    }

    #[test]
    fn the_matrix_can_be_narrowed_but_not_to_nothing() {
        let found = chosen(&[Pattern::Gaussian], &[66]).expect("there are two");
        assert_eq!(found.len(), 2);
        assert_eq!(chosen(&[], &[]).expect("all").len(), CELLS.len());
        let error = chosen(&[Pattern::Zipf], &[66]).expect_err("none").to_string();
        assert!(error.contains("zipf 33 %"), "{error}");
        let other = found.iter().find(|cell| !cell.is_quoted).expect("the unpipelined one");
        let repetitions = |narrowed| other.repetitions(Subject::Strata, 5, narrowed);
        assert_eq!((repetitions(false), repetitions(true)), (2, 5));
        assert_eq!(CELLS[0].repetitions(Subject::Strata, 5, false), 5);
        assert_eq!(CELLS[0].repetitions(Subject::Memtierd, 5, false), 2);
        assert_eq!(other.name(), "gaussian 66 %, unpipelined");
    }
}
