//! What the trials of `tight` say: a table of figures for each cell, and the
//! ratios with their bounds. Pure: results in, text out.

use super::{
    cells::{Cell, Subject},
    price::{Prices, said},
};
use crate::{
    keys::Pattern,
    optimum::{Optimum, bound_per_second},
    statistics::{Spread, estimate_ratio, spread},
    table::{Table, mebibytes, short, three_digits},
    trial::TrialResult,
};
use std::{cell::RefCell, collections::HashMap, rc::Rc};

/// All that was measured.
#[derive(Default)]
pub(super) struct Matrix {
    pub records: u64,
    pub rows: Vec<Row>,
    pub prices: Prices,
    pub notes: Vec<String>,
    /// What could not be measured, each with its reason.
    pub missing: Vec<String>,
    /// By pattern and walk: making one sorts all pages.
    pub optima: RefCell<HashMap<(String, u64), Rc<Optimum>>>,
}

/// One subject in one cell.
pub(super) struct Row {
    pub cell: Cell,
    pub subject: Subject,
    /// With the number of the repetition.
    pub results: Vec<(usize, TrialResult)>,
    pub failures: usize,
}

impl Row {
    pub(super) const fn new(cell: Cell, subject: Subject) -> Self {
        Self { cell, subject, results: Vec::new(), failures: 0 }
    }

    pub(super) fn spread(&self, of: impl Fn(&TrialResult) -> f64) -> Option<Spread> {
        let samples: Vec<f64> = self.results.iter().map(|(_, result)| of(result)).collect();
        spread(&samples)
    }

    fn median(&self, of: impl Fn(&TrialResult) -> f64) -> Option<f64> {
        self.spread(of).map(|spread| spread.median)
    }
}

/// Operations per second; of scan-hot, those on its hot set.
pub(super) fn speed(result: &TrialResult) -> f64 {
    result.run.asked_per_second()
}

/// CPU time of others that can be felt on the server's core.
const FELT_CPU_SHARE: f64 = 0.05;

/// A share in steps of a thousandth, as a key of a map.
fn thousandths(share: f64) -> u64 {
    (share * 1000.0).round() as u64
}

impl Matrix {
    /// Rows of each cell, in the order in which the cells were first measured.
    pub(super) fn cells(&self) -> Vec<Vec<&Row>> {
        let mut cells: Vec<Vec<&Row>> = Vec::new();
        for row in self.rows.iter().filter(|row| !row.results.is_empty()) {
            let name = row.cell.name();
            match cells.iter_mut().find(|rows| rows[0].cell.name() == name) {
                Some(rows) => rows.push(row),
                None => cells.push(vec![row]),
            }
        }
        cells
    }

    fn of(&self, cell: &Cell, subject: Subject) -> Option<&Row> {
        let name = cell.name();
        self.rows.iter().find(|row| {
            row.subject == subject && row.cell.name() == name && !row.results.is_empty()
        })
    }

    /// Fewest misses per operation with as many pages resident as in this
    /// trial; None without the size that makes this a share.
    pub(super) fn optimum(&self, row: &Row, result: &TrialResult) -> Option<f64> {
        let native = self.of(&row.cell, Subject::Native)?;
        let all_bytes = native.median(|native| native.cost.memory.resident_bytes as f64)?;
        let walk = result.run.scan_operations as f64 / result.run.operations.max(1) as f64;
        let key = (row.cell.pattern.name(), thousandths(walk));
        let optimum = Rc::clone(self.optima.borrow_mut().entry(key).or_insert_with(|| {
            let walk = thousandths(walk) as f64 / 1000.0;
            Rc::new(Optimum::new(row.cell.pattern, self.records, walk))
        }));
        Some(optimum.misses(result.cost.memory.resident_bytes as f64 / all_bytes))
    }

    /// Throughput with the fewest misses at the measured price of a fault.
    pub(super) fn bound(&self, row: &Row) -> Option<f64> {
        let native = self.of(&row.cell, Subject::Native)?;
        let native_per_second = native.median(|native| native.run.operations_per_second)?;
        let price_us = self.prices.median_us(row.subject.kind())?;
        let misses = row.median(|result| self.optimum(row, result).unwrap_or(f64::NAN))?;
        // Of scan-hot's operations only those on the hot set are reported.
        let asked = row.median(|result| speed(result) / result.run.operations_per_second)?;
        Some(asked * bound_per_second(native_per_second, misses, price_us))
    }

    pub(super) fn markdown(&self) -> String {
        let mut out = format!(
            "Medians, with the lowest and the highest in brackets. **Optimum:** the fewest misses \
             per operation that a fixed set of as many resident pages can have. **Bound:** 1 / (1 \
             / throughput of DRAM only + optimum × price of a fault), the throughput that perfect \
             replacement would reach. Price of a fault, measured in this run: zram {} µs, zswap \
             {} µs, Strata {} µs. How each figure is made: `docs/benchmarks.md`.\n\n",
            said(&self.prices.zram),
            said(&self.prices.zswap),
            said(&self.prices.strata)
        );
        if let Some(line) = self.model() {
            out.push_str(&line);
        }
        out.push_str("### Ratios\n\n");
        out.push_str(&self.ratios().markdown());
        for rows in self.cells() {
            let cell = &rows[0].cell;
            let scan = if cell.pattern == Pattern::ScanHot {
                " (ops/s and latency: GETs of the hot set; the walk apart)"
            } else {
                ""
            };
            out.push_str(&format!("\n### {}{scan}\n\n", cell.name()));
            out.push_str(&self.figures(&rows).markdown());
            out.push('\n');
            out.push_str(&memory(&rows).markdown());
            if cell.pattern == Pattern::Jump {
                out.push('\n');
                out.push_str(&jumps(&rows).markdown());
            }
        }
        for note in &self.notes {
            out.push_str(&format!("\n{note}\n"));
        }
        if let Some(line) = self.disturbed() {
            out.push_str(&line);
        }
        for missing in &self.missing {
            out.push_str(&format!("\n**Not measured:** {missing}\n"));
        }
        out
    }

    /// What else ran meanwhile, if it was enough to be felt.
    fn disturbed(&self) -> Option<String> {
        let results = self.rows.iter().flat_map(|row| &row.results);
        let shares: Vec<f64> = results.map(|(_, result)| result.cost.other_cpu_share).collect();
        let felt = shares.iter().filter(|share| **share > FELT_CPU_SHARE).count();
        let highest = spread(&shares)?.highest;
        (felt > 0).then(|| {
            format!(
                "\n**Disturbed:** in {felt} of {} trials something else took more than {:.0} % of \
                 the machine's CPU time, at most {:.0} %; their throughput and latency are not to \
                 be believed.\n",
                shares.len(),
                100.0 * FELT_CPU_SHARE,
                100.0 * highest
            )
        })
    }

    /// Whether the optimum's model is as large as what it models.
    fn model(&self) -> Option<String> {
        let modelled = self.optima.borrow().values().next()?.bytes();
        let native = self.rows.iter().filter(|row| row.subject == Subject::Native);
        let measured: Vec<f64> = native
            .flat_map(|row| &row.results)
            .map(|(_, result)| result.cost.memory.resident_bytes as f64)
            .collect();
        let measured = spread(&measured)?.median as u64;
        Some(format!(
            "The optimum's model of Redis has {} MiB of pages; the server was measured to have \
             {}.\n\n",
            mebibytes(modelled),
            mebibytes(measured)
        ))
    }

    fn figures(&self, rows: &[&Row]) -> Table {
        let mut table = Table::new(&[
            "",
            "n",
            "ops/s",
            "of DRAM only",
            "p50 µs",
            "p99 µs",
            "p99.9 µs",
            "server CPU µs/op",
            "machine CPU µs/op",
            "misses/op",
            "optimum",
            "bound ops/s",
        ]);
        let base = rows.first().and_then(|row| row.median(speed));
        for row in rows {
            let cell = |of: &dyn Fn(&TrialResult) -> f64| said_of(row.spread(of));
            let median = |of: fn(&TrialResult) -> f64| dash(row.median(of), three_digits);
            let share = row.median(speed).zip(base).map(|(speed, base)| speed / base);
            let has_misses = row.subject != Subject::Native;
            let optimum = has_misses
                .then(|| row.median(|result| self.optimum(row, result).unwrap_or(f64::NAN)));
            table.row(vec![
                row.subject.name().to_owned(),
                row.results.len().to_string(),
                cell(&speed),
                dash(share, |share| format!("{share:.2} ×")),
                median(|result| result.run.p50_us),
                median(|result| result.run.p99_us),
                median(|result| result.run.p999_us),
                cell(&|result| result.cost.program_cpu_us_per_op),
                median(|result| result.cost.machine_cpu_us_per_op),
                dash(row.median(|result| result.cost.misses_per_op), |misses| {
                    format!("{misses:.3}")
                }),
                dash(optimum.flatten(), |misses| format!("{misses:.3}")),
                dash(self.bound(row), short),
            ]);
        }
        table
    }

    /// Each Strata row against its rivals.
    fn ratios(&self) -> Table {
        let mut table = Table::new(&[
            "",
            "against",
            "n",
            "throughput (95 %)",
            "lowest … highest",
            "bound",
            "server CPU/op",
            "p99",
            "total DRAM",
        ]);
        for row in self.cells().into_iter().flatten().filter(|row| row.subject.is_strata()) {
            let rivals = row.subject.rivals().iter().filter_map(|&rival| self.of(&row.cell, rival));
            for rival in rivals {
                table.row(self.ratio(row, rival));
            }
        }
        table
    }

    fn ratio(&self, row: &Row, rival: &Row) -> Vec<String> {
        // Of the repetitions that have both.
        let pairs = |of: fn(&TrialResult) -> f64| -> Vec<(f64, f64)> {
            let other = |repetition| rival.results.iter().find(move |(at, _)| *at == repetition);
            row.results
                .iter()
                .filter_map(|(repetition, ours)| {
                    other(*repetition).map(|(_, theirs)| (of(ours), of(theirs)))
                })
                .collect()
        };
        let mean = |of| dash(estimate_ratio(&pairs(of)), |ratio| format!("{:.2}", ratio.mean));
        let speeds = pairs(speed);
        let each: Vec<f64> = speeds.iter().map(|(ours, theirs)| ours / theirs).collect();
        let bound = self.bound(row).zip(rival.median(speed)).map(|(bound, theirs)| bound / theirs);
        vec![
            format!("{}: {}", row.cell.name(), row.subject.name()),
            rival.subject.name().to_owned(),
            speeds.len().to_string(),
            dash(estimate_ratio(&speeds), |ratio| {
                format!("{:.2} ({:.2} … {:.2})", ratio.mean, ratio.low, ratio.high)
            }),
            dash(spread(&each), |found| format!("{:.2} … {:.2}", found.lowest, found.highest)),
            dash(bound, |bound| format!("{bound:.2}")),
            mean(|result| result.cost.program_cpu_us_per_op),
            mean(|result| result.run.p99_us),
            mean(|result| result.cost.memory.total_bytes() as f64),
        ]
    }
}

fn dash<T>(value: Option<T>, say: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "–".to_owned(), say)
}

fn said_of(found: Option<Spread>) -> String {
    dash(found, |found| found.to_string())
}

/// Where the DRAM is.
fn memory(rows: &[&Row]) -> Table {
    let mut table = Table::new(&[
        "MiB",
        "limit or budget",
        "resident",
        "compressed",
        "metadata",
        "total",
        "of DRAM only",
        "original : compressed",
    ]);
    let total = |result: &TrialResult| result.cost.memory.total_bytes() as f64;
    let base = rows.first().and_then(|row| row.median(total));
    for row in rows {
        let mib = |of: fn(&TrialResult) -> u64| {
            dash(row.median(|result| of(result) as f64), |bytes| mebibytes(bytes as u64))
        };
        let share = row.median(total).zip(base).map(|(total, base)| 100.0 * total / base);
        let ratio = row.median(|result| result.cost.memory.ratio().unwrap_or(f64::NAN));
        table.row(vec![
            row.subject.name().to_owned(),
            if row.subject == Subject::Native {
                "–".to_owned()
            } else {
                mib(|result| result.setup.allowed_bytes().unwrap_or(0))
            },
            mib(|result| result.cost.memory.resident_bytes),
            mib(|result| result.cost.memory.compressed_bytes),
            mib(|result| result.cost.memory.metadata_bytes),
            mib(|result| result.cost.memory.total_bytes()),
            dash(share, |share| format!("{share:.0} %")),
            dash(ratio.filter(|ratio| ratio.is_finite()), three_digits),
        ]);
    }
    table
}

/// What a jump did to the throughput.
fn jumps(rows: &[&Row]) -> Table {
    let mut table = Table::new(&[
        "jump",
        "before, ops/s",
        "lowest second after",
        "mean after",
        "seconds until 90 % of before",
    ]);
    for row in rows {
        let seen: Vec<_> = row.results.iter().filter_map(|(_, result)| result.run.jump).collect();
        if seen.is_empty() {
            continue;
        }
        let of = |pick: fn(&crate::redis::outcome::Jump) -> f64| {
            said_of(spread(&seen.iter().map(pick).collect::<Vec<_>>()))
        };
        let back: Vec<f64> = seen.iter().filter_map(|jump| jump.recovered_after_seconds).collect();
        let never = seen.len() - back.len();
        let recovered = match spread(&back) {
            Some(found) if never == 0 => found.to_string(),
            Some(found) => format!("{found}; not in {never} of {}", seen.len()),
            None => "not in the measured time".to_owned(),
        };
        table.row(vec![
            row.subject.name().to_owned(),
            of(|jump| jump.before_per_second),
            of(|jump| jump.lowest_per_second),
            of(|jump| jump.after_per_second),
            recovered,
        ]);
    }
    table
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{bench::cells::chosen, redis::outcome::Jump};

    const MIB: u64 = 1 << 20;

    /// Three subjects of one cell, twice each: 100k, 20k and 30k, then twice
    /// that for all, as on a machine that has become faster.
    pub(in crate::bench) fn example(pattern: Pattern) -> Matrix {
        let cell = chosen(&[pattern], &[33]).expect("there is one")[0];
        let mut matrix = Matrix { records: 8000, ..Matrix::default() };
        matrix.prices.zram = vec![10.0];
        matrix.prices.strata = vec![8.0, 12.0, 10.0];
        let subjects = [
            (Subject::Native, 100_000.0, 11, 0),
            (Subject::Zram, 20_000.0, 4, 3),
            (Subject::Strata, 30_000.0, 3, 4),
        ];
        for (subject, rate, resident, compressed) in subjects {
            let mut row = Row::new(cell, subject);
            for repetition in 0..2u8 {
                let mut result = TrialResult::example(subject.kind());
                let rate = rate * f64::from(repetition + 1);
                result.run.operations_per_second = rate;
                result.run.operations = rate as u64;
                result.run.timeline = (1..=40).map(|tick| (f64::from(tick) * 0.25, rate)).collect();
                result.run.jump = (pattern == Pattern::Jump)
                    .then(|| Jump::read(&result.run.timeline, 1.0, 4.0))
                    .flatten();
                result.cost.memory.resident_bytes = resident * MIB;
                result.cost.memory.compressed_bytes = compressed * MIB;
                row.results.push((usize::from(repetition), result));
            }
            matrix.rows.push(row);
        }
        matrix
    }

    #[test]
    fn ratios_are_those_of_each_repetition() {
        let matrix = example(Pattern::Uniform);
        let text = matrix.ratios().markdown();
        // Both repetitions say 1.5, however the machine changed between them.
        assert!(text.contains("1.50 (1.50 … 1.50)"), "{text}");
        assert!(text.contains("1.50 … 1.50 |"), "{text}");
        let mut lame = matrix;
        lame.rows[1].results.remove(0);
        let text = lame.ratios().markdown();
        assert!(text.contains("zram | 1 | 1.50"), "{text}");
    }

    #[test]
    fn the_bound_is_the_documented_formula() {
        let matrix = example(Pattern::Uniform);
        let strata = &matrix.rows[2];
        let misses = matrix.optimum(strata, &strata.results[0].1).expect("there is a native row");
        let expected = 1.0 / (1.0 / 150_000.0 + misses * 10e-6);
        let bound = matrix.bound(strata).expect("price and native are there");
        assert!((bound / expected - 1.0).abs() < 1e-9, "{bound} {expected}");
        assert!(misses > 0.5 && misses < 1.2, "{misses}");
        // More resident, fewer misses.
        let zram = &matrix.rows[1];
        assert!(matrix.optimum(zram, &zram.results[0].1).is_some_and(|fewer| fewer < misses));
        let mut without = example(Pattern::Uniform);
        without.prices.strata.clear();
        assert_eq!(without.bound(&without.rows[2]), None);
    }

    #[test]
    fn what_is_missing_or_disturbed_is_said() {
        let mut matrix = example(Pattern::Jump);
        assert!(!matrix.markdown().contains("Disturbed"));
        assert!(matrix.markdown().contains("| jump "), "{}", matrix.markdown());
        matrix.missing.push("zswap: this kernel has none".into());
        matrix.rows[0].results[0].1.cost.other_cpu_share = 0.4;
        let text = matrix.markdown();
        assert!(text.contains("**Not measured:** zswap: this kernel has none"), "{text}");
        assert!(text.contains("in 1 of 6 trials") && text.contains("at most 40 %"), "{text}");
        assert!(!text.contains("NaN"), "{text}");
    }
}
