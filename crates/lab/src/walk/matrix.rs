//! A matrix of readings (a temperature field in sixteenths of a degree, as
//! doubles) swept in turn by rows, by panels of columns, and by rows with a
//! write to every element. All sums are exact, so they do not depend on the
//! order of addition.

use super::Rounds;
use crate::{
    histogram::Histogram,
    random::{Random, mix},
};
use anyhow::{Result, bail};
use std::{hint::black_box, time::Instant};
use strata_units::ByteSize;

/// Elements of a row: 64 KiB.
const COLUMNS: usize = 8192;
/// Columns of a panel: one page of each row.
const PANEL: usize = 512;
/// Rows of a step: what one latency is of, 1 MiB by rows, 64 KiB by columns.
const STEP_ROWS: usize = 16;
/// Rows of a round by rows: 8192 pages.
const ROUND_ROWS: usize = 512;
/// Readings per degree.
const STEPS_PER_DEGREE: f64 = 16.0;

pub(super) struct Matrix {
    cells: Vec<f64>,
    rows: usize,
    seed: u64,
    /// Rounds done; which sweep is next follows from it.
    rounds: u64,
    /// A power of two for each row: what the writing sweep has made of it.
    scales: Vec<f64>,
}

/// One round's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sweep {
    Rows { first: usize },
    Panel { first: usize },
    Scale { first: usize },
}

impl Matrix {
    pub(super) fn new(size: ByteSize, seed: u64) -> Result<Self> {
        let rows = size.0 as usize / (COLUMNS * size_of::<f64>());
        if rows < STEP_ROWS {
            bail!("--size must be at least 1MiB for a matrix");
        }
        let mut cells = Vec::with_capacity(rows * COLUMNS);
        for row in 0..rows {
            cells.extend(Field::new(seed, row));
        }
        Ok(Self { cells, rows, seed, rounds: 0, scales: vec![1.0; rows] })
    }

    /// All rows, all panels, all rows again with writing, and from the start.
    fn sweep(&self) -> Sweep {
        let bands = self.rows.div_ceil(ROUND_ROWS) as u64;
        let panels = (COLUMNS / PANEL) as u64;
        let number = self.rounds % (2 * bands + panels);
        if number < bands {
            Sweep::Rows { first: number as usize * ROUND_ROWS }
        } else if number < bands + panels {
            Sweep::Panel { first: (number - bands) as usize * PANEL }
        } else {
            Sweep::Scale { first: (number - bands - panels) as usize * ROUND_ROWS }
        }
    }

    fn columns(&self, row: usize, from: usize, to: usize) -> &[f64] {
        &self.cells[row * COLUMNS + from..row * COLUMNS + to]
    }
}

/// The readings of a row: a wave with the row's own start, and small steps.
struct Field {
    random: Random,
    level: f64,
    left: usize,
}

impl Field {
    fn new(seed: u64, row: usize) -> Self {
        let random = Random::new(seed ^ mix(row as u64));
        Self { random, level: 160.0 + 100.0 * (row as f64 / 700.0).sin().round(), left: COLUMNS }
    }
}

impl Iterator for Field {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        self.left = self.left.checked_sub(1)?;
        // One of four readings is the one before.
        self.level += match self.random.below(8) {
            0 => -3.0,
            1 => -2.0,
            2 => -1.0,
            3 => 1.0,
            4 => 2.0,
            5 => 3.0,
            _ => 0.0,
        };
        Some(self.level / STEPS_PER_DEGREE)
    }
}

/// A weighted sum in eight lanes; exact, see the file's head.
fn sum(cells: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    for eight in cells.chunks_exact(8) {
        for (lane, cell) in lanes.iter_mut().zip(eight) {
            *lane += cell;
        }
    }
    lanes.iter().zip(1..).map(|(lane, weight)| lane * f64::from(weight)).sum()
}

impl Rounds for Matrix {
    fn bytes(&self) -> u64 {
        size_of_val(&*self.cells) as u64
    }

    /// An operation is a page; the latency is that of a step.
    fn round(&mut self, latencies: &mut Histogram) -> (u64, u64) {
        let sweep = self.sweep();
        self.rounds += 1;
        let (first, end, from, to) = match sweep {
            Sweep::Rows { first } | Sweep::Scale { first } => {
                (first, (first + ROUND_ROWS).min(self.rows), 0, COLUMNS)
            }
            Sweep::Panel { first } => (0, self.rows, first, first + PANEL),
        };
        let mut checksum = 0;
        for step in (first..end).step_by(STEP_ROWS) {
            let started = Instant::now();
            for row in step..(step + STEP_ROWS).min(end) {
                if matches!(sweep, Sweep::Scale { .. }) {
                    // Exact both ways, and every page of it is dirty then.
                    let factor = if self.scales[row] == 1.0 { 2.0 } else { 0.5 };
                    self.scales[row] *= factor;
                    for cell in &mut self.cells[row * COLUMNS..(row + 1) * COLUMNS] {
                        *cell *= factor;
                    }
                }
                let total = black_box(sum(self.columns(row, from, to)));
                checksum = mix(checksum ^ total.to_bits());
            }
            latencies.record(started.elapsed().as_nanos() as u64, 1);
        }
        let pages = (end - first) * (to - from) / PANEL;
        (pages as u64, checksum)
    }

    fn verify(&self) -> Result<u64> {
        for row in 0..self.rows {
            let scale = self.scales[row];
            let expected = Field::new(self.seed, row);
            for (column, (cell, expected)) in
                self.columns(row, 0, COLUMNS).iter().zip(expected).enumerate()
            {
                if *cell != expected * scale {
                    bail!("row {row}, column {column} is {cell}, not {}", expected * scale);
                }
            }
        }
        Ok(self.cells.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Matrix {
        Matrix::new(ByteSize(16 << 20), 3).expect("built")
    }

    #[test]
    fn a_cycle_touches_every_page_three_times() {
        let mut matrix = small();
        let mut latencies = Histogram::default();
        let pages = matrix.bytes() / 4096;
        let rounds = 2 * matrix.rows.div_ceil(ROUND_ROWS) + COLUMNS / PANEL;
        let swept: u64 = (0..rounds).map(|_| matrix.round(&mut latencies).0).sum();
        assert_eq!(swept, 3 * pages);
        assert_eq!(matrix.sweep(), Sweep::Rows { first: 0 });
        assert!(matrix.scales.iter().all(|&scale| scale == 2.0));
        assert_eq!(matrix.verify().expect("exact"), pages * 512);
    }

    #[test]
    fn damage_is_noticed() {
        let mut matrix = small();
        matrix.verify().expect("as it was made");
        matrix.cells[77_777] += 1.0 / STEPS_PER_DEGREE;
        assert!(matrix.verify().is_err());
        assert!(Matrix::new(ByteSize(1000), 3).is_err());
    }

    #[test]
    fn pages_of_readings_compress() {
        let matrix = small();
        let bytes: Vec<u8> = matrix.cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
        let pages = bytes.chunks_exact(4096);
        let packed: usize = pages
            .map(|page| lz4::block::compress(page, None, false).expect("compresses").len())
            .sum();
        let ratio = bytes.len() as f64 / packed as f64;
        println!("{ratio:.2}");
        assert!((1.8..3.5).contains(&ratio), "{ratio:.2}");
    }
}
