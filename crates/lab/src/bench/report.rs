//! Results of a bench: the raw measurements, and what they say.

use super::Part;
use crate::{
    machine::Provenance,
    statistics::{Estimate, estimate, estimate_ratio},
    table::{Table, three_digits},
};
use anyhow::{Result, bail};
use serde::Serialize;

/// One thing measured several times: by itself, or two in turn.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Series {
    pub name: String,
    pub unit: String,
    pub left: Side,
    /// Compared with `left`; the ratio is left to right.
    pub right: Option<Side>,
}

/// The samples of one side, in the order in which they were taken.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Side {
    pub name: String,
    pub samples: Vec<f64>,
}

impl Side {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), samples: Vec::new() }
    }
}

/// What a part hands over: the series, and whatever raw results it kept.
#[derive(Default, Debug, Serialize)]
pub(crate) struct PartResults {
    pub series: Vec<Series>,
    pub raw: Vec<serde_json::Value>,
    /// What a part says in its own form, in Markdown.
    #[serde(skip)]
    pub text: String,
}

#[derive(Serialize)]
struct Entry {
    title: &'static str,
    results: PartResults,
    /// Why the part ended early, or could not run.
    failure: Option<String>,
}

/// All of a bench.
#[derive(Serialize)]
pub(crate) struct Results {
    provenance: Provenance,
    quick: bool,
    /// What was done about the machine's memory before.
    memory: Option<String>,
    parts: Vec<Entry>,
}

impl Results {
    pub(crate) const fn new(provenance: Provenance, quick: bool, memory: Option<String>) -> Self {
        Self { provenance, quick, memory, parts: Vec::new() }
    }

    pub(crate) fn add(&mut self, part: Part, results: PartResults, outcome: Result<()>) {
        let failure = outcome.err().map(|error| format!("{error:#}"));
        if let Some(failure) = &failure {
            eprintln!("  failed: {failure}");
        }
        self.parts.push(Entry { title: part.title(), results, failure });
    }

    /// File name without extension.
    pub(crate) fn stem(&self) -> String {
        let quick = if self.quick { "-quick" } else { "" };
        format!("{}-{}{quick}", self.provenance.seconds_since_epoch, self.provenance.commit)
    }

    /// A bench that could not measure something has failed.
    pub(crate) fn refuse_failed(&self) -> Result<()> {
        let failed: Vec<String> = self
            .parts
            .iter()
            .filter_map(|entry| Some(format!("{} ({})", entry.title, entry.failure.as_ref()?)))
            .collect();
        if !failed.is_empty() {
            bail!("could not be measured: {}", failed.join("; "));
        }
        Ok(())
    }

    pub(crate) fn markdown(&self) -> String {
        let mut out = format!(
            "# Bench\n\n{}\n\n`{}`\n",
            self.provenance.line(),
            self.provenance.command.join(" ")
        );
        if self.quick {
            out.push_str("\nQuick mode: shows that all works; not to be quoted.\n");
        }
        if let Some(memory) = &self.memory {
            out.push_str(&format!("\n{memory}\n"));
        }
        for Entry { title, results, failure } in &self.parts {
            out.push_str(&format!("\n## {title}\n\n"));
            if let Some(failure) = failure {
                out.push_str(&format!("Not all could be measured: {failure}\n\n"));
            }
            if !results.series.is_empty() {
                out.push_str(&table(&results.series).markdown());
            }
            out.push_str(&results.text);
        }
        out
    }
}

fn interval(found: Option<Estimate>) -> String {
    found.map_or_else(
        || "–".to_owned(),
        |found| {
            format!(
                "{} ({} … {})",
                three_digits(found.mean),
                three_digits(found.low),
                three_digits(found.high)
            )
        },
    )
}

/// Means and ratios, each with its 95 % interval.
fn table(series: &[Series]) -> Table {
    let mut table = Table::new(&["", "unit", "n", "A", "mean A", "B", "mean B", "A : B"]);
    for Series { name, unit, left, right } in series {
        let mut row = vec![
            name.clone(),
            unit.clone(),
            left.samples.len().to_string(),
            left.name.clone(),
            interval(estimate(&left.samples)),
        ];
        if let Some(right) = right {
            let pairs: Vec<(f64, f64)> =
                left.samples.iter().copied().zip(right.samples.iter().copied()).collect();
            row.push(right.name.clone());
            row.push(interval(estimate(&right.samples)));
            row.push(interval(estimate_ratio(&pairs)));
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series() -> Vec<Series> {
        vec![
            Series {
                name: "uniform".into(),
                unit: "ops/s".into(),
                left: Side { name: "strata".into(), samples: vec![200.0, 220.0] },
                right: Some(Side { name: "zram".into(), samples: vec![100.0, 110.0] }),
            },
            Series {
                name: "metadata".into(),
                unit: "B/page".into(),
                left: Side { name: "strata".into(), samples: vec![15.5] },
                right: None,
            },
        ]
    }

    #[test]
    fn ratios_are_those_of_the_pairs() {
        let text = table(&series()).markdown();
        assert!(text.contains("2.00 (2.00 … 2.00)"), "{text}");
        assert!(text.contains("210 (200 … 220)"), "{text}");
        assert!(text.contains("15.5 (15.5 … 15.5)"), "{text}");
    }

    #[test]
    fn a_part_that_failed_is_said_and_is_a_failure() {
        let mut results = Results::new(Provenance::now(), true, None);
        results.add(
            Part::Start,
            PartResults { series: series(), ..PartResults::default() },
            Ok(()),
        );
        assert!(results.refuse_failed().is_ok());
        let failure = Err(anyhow::anyhow!("swap needs root"));
        results.add(Part::Tight, PartResults::default(), failure);
        assert!(results.markdown().contains("Not all could be measured: swap needs root"));
        assert!(results.refuse_failed().is_err());
        assert!(results.stem().ends_with("-quick"));
    }
}
