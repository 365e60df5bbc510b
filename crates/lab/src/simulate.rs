//! `strata-lab simulate`: replays page touches through the production
//! replacement and, beside it, through LRU, FIFO and CLOCK with perfect sight of
//! every touch, and counts misses. Page-level: no memory is moved, nothing is
//! timed, so it says what a policy misses, never how fast a program runs.
//!
//! Two sources: a model of a Redis server (every GET touches two index pages and
//! the page of its value), or a recorded trace (`u32` little-endian page ids, one
//! for every touch).

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum as _};
use serde_json::{Value, json};
use strata_policy::replay::{Shape, Tenant, Touch};

mod model;
mod rivals;

use model::{KeyStream, Model, Workload};
use rivals::{Clock, Lru, Replay};

/// Options of `strata-lab simulate`.
#[derive(Args, Debug)]
pub(crate) struct SimulateArgs {
    /// Workloads to replay; all of them when none is named.
    #[arg(value_enum)]
    workloads: Vec<Workload>,
    /// Share of the pages that may be resident.
    #[arg(long, default_value_t = 0.3333)]
    resident: f64,
    /// Room in pages, instead of a share.
    #[arg(long, conflicts_with = "resident")]
    resident_pages: Option<usize>,
    /// GETs between loading and measuring.
    #[arg(long, default_value_t = 4_000_000)]
    warm_gets: u64,
    /// GETs measured.
    #[arg(long, default_value_t = 2_000_000)]
    gets: u64,
    /// Divides the model (pages, keys, GETs) for a quick look.
    #[arg(long, default_value_t = 1)]
    scale_down: usize,
    /// Pages that production keeps raw after eviction, out of its room.
    #[arg(long, default_value_t = 0)]
    staged_pages: usize,
    /// Pages that production evicts at a time.
    #[arg(long, default_value_t = 16)]
    batch_pages: usize,
    /// Seed of the random keys.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Replay this recording instead of the model.
    #[arg(long, conflicts_with_all = ["workloads", "scale_down"])]
    trace: Option<PathBuf>,
    /// Also write the figures here, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Runs what the arguments ask for and prints a table for each workload.
pub(crate) fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    ensure!(
        args.resident > 0.0 && args.resident < 1.0,
        "--resident {} is not a share between 0 and 1",
        args.resident
    );
    ensure!(args.gets > 0, "--gets 0 leaves nothing to measure");
    let mut results = Vec::new();
    if let Some(path) = &args.trace {
        results.push(replay_trace(args, path)?);
    } else {
        let all = Workload::value_variants();
        let chosen = if args.workloads.is_empty() { all } else { &args.workloads };
        for &workload in chosen {
            results.push(replay_model(args, workload)?);
        }
    }
    for result in &results {
        print!("{}", result.table());
    }
    let values: Vec<Value> = results.iter().map(Report::json).collect();
    if let Some(path) = &args.json {
        let text = format!("{:#}\n", Value::Array(values));
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Windows into which the measured part is cut, to see a change over time.
const WINDOWS: usize = 8;

struct Row {
    policy: &'static str,
    /// Misses of each window.
    hard: [u64; WINDOWS],
    soft: [u64; WINDOWS],
}

struct Report {
    title: String,
    unit: &'static str,
    managed_pages: usize,
    room_pages: usize,
    window_units: u64,
    /// Misses per unit of the best fixed set.
    best_fixed: f64,
    rows: Vec<Row>,
    replacement_bytes: usize,
}

impl Report {
    fn per_unit(&self, misses: &[u64]) -> f64 {
        misses.iter().sum::<u64>() as f64 / (self.window_units * misses.len() as u64) as f64
    }

    fn table(&self) -> String {
        let mut text = format!(
            "\n{}: {} pages, room for {} ({:.1} %); best fixed set {:.3} misses per {}\n",
            self.title,
            self.managed_pages,
            self.room_pages,
            100.0 * self.room_pages as f64 / self.managed_pages as f64,
            self.best_fixed,
            self.unit,
        );
        let _ = writeln!(
            text,
            "{:<14}{:>8}{:>8}   all faults in each {} {}s",
            "policy", "hard", "soft", self.window_units, self.unit
        );
        for row in &self.rows {
            let _ = write!(
                text,
                "{:<14}{:>8.3}{:>8.3}  ",
                row.policy,
                self.per_unit(&row.hard),
                self.per_unit(&row.soft)
            );
            for window in 0..WINDOWS {
                let faults = row.hard[window] + row.soft[window];
                let _ = write!(text, " {:.3}", faults as f64 / self.window_units as f64);
            }
            text.push('\n');
        }
        text
    }

    fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "policy": row.policy,
                    "hard_per_unit": self.per_unit(&row.hard),
                    "soft_per_unit": self.per_unit(&row.soft),
                    "hard_by_window": row.hard,
                    "soft_by_window": row.soft,
                })
            })
            .collect();
        json!({
            "workload": self.title,
            "unit": self.unit,
            "managed_pages": self.managed_pages,
            "room_pages": self.room_pages,
            "window_units": self.window_units,
            "best_fixed_per_unit": self.best_fixed,
            "replacement_bytes": self.replacement_bytes,
            "policies": rows,
        })
    }
}

impl Replay for Tenant {
    fn touch(&mut self, page: u32) -> Touch {
        Tenant::touch(self, page)
    }
}

/// All policies over one stream of touches.
struct Field {
    strata: Tenant,
    rivals: [Box<dyn Replay>; 3],
    rows: Vec<Row>,
}

impl Field {
    fn new(args: &SimulateArgs, managed_pages: usize, room_pages: usize) -> anyhow::Result<Self> {
        let least = args.staged_pages + args.batch_pages + 65;
        ensure!(
            room_pages >= least && room_pages < managed_pages,
            "room for {room_pages} of {managed_pages} pages: needs at least {least} and fewer \
             than there are"
        );
        let row = |policy| Row { policy, hard: [0; WINDOWS], soft: [0; WINDOWS] };
        Ok(Self {
            strata: Tenant::new(Shape {
                managed_pages,
                capacity_pages: room_pages,
                staged_pages: args.staged_pages,
                batch_pages: args.batch_pages,
            }),
            rivals: [
                Box::new(Lru::new(managed_pages, room_pages)),
                Box::new(Clock::new(managed_pages, room_pages, true)),
                Box::new(Clock::new(managed_pages, room_pages, false)),
            ],
            rows: vec![row("strata"), row("LRU"), row("CLOCK"), row("FIFO")],
        })
    }

    fn touch(&mut self, page: u32, window: Option<usize>) {
        let strata = self.strata.touch(page);
        count(&mut self.rows[0], strata, window);
        for (index, rival) in self.rivals.iter_mut().enumerate() {
            count(&mut self.rows[index + 1], rival.touch(page), window);
        }
    }
}

fn count(row: &mut Row, touch: Touch, window: Option<usize>) {
    let Some(window) = window else { return };
    match touch {
        Touch::Hit | Touch::First => {}
        Touch::Soft => row.soft[window] += 1,
        Touch::Hard => row.hard[window] += 1,
    }
}

fn replay_model(args: &SimulateArgs, workload: Workload) -> anyhow::Result<Report> {
    let scale = args.scale_down.max(1);
    let model = Model::new(workload, scale);
    let managed_pages = model.value_pages + model.index_pages;
    let room_pages =
        args.resident_pages.unwrap_or((managed_pages as f64 * args.resident).round() as usize);
    let mut field = Field::new(args, managed_pages, room_pages)?;
    for key in 0..model.keys {
        for page in model.pages_of(key) {
            field.touch(page, None);
        }
    }
    let mut keys = KeyStream::new(&model, args.seed);
    let window_units = (args.gets / scale as u64 / WINDOWS as u64).max(1);
    for _ in 0..args.warm_gets / scale as u64 {
        for page in model.pages_of(keys.next_key()) {
            field.touch(page, None);
        }
    }
    if workload == Workload::Jump {
        keys.move_on(model.keys / 4);
    }
    for window in 0..WINDOWS {
        for _ in 0..window_units {
            for page in model.pages_of(keys.next_key()) {
                field.touch(page, Some(window));
            }
        }
    }
    let name = workload.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
    Ok(Report {
        title: name,
        unit: "GET",
        managed_pages,
        room_pages,
        window_units,
        best_fixed: best_fixed(model.expected_touches(keys.offset()), room_pages),
        replacement_bytes: field.strata.replacement().memory_bytes(),
        rows: field.rows,
    })
}

fn replay_trace(args: &SimulateArgs, path: &Path) -> anyhow::Result<Report> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let (touches, managed_pages) = parse_trace(&bytes)
        .with_context(|| format!("{} is no usable recording", path.display()))?;
    let room_pages =
        args.resident_pages.unwrap_or((managed_pages as f64 * args.resident).round() as usize);
    let mut field = Field::new(args, managed_pages, room_pages)?;
    let window_units = (touches.len() / WINDOWS).max(1);
    let mut repeats = vec![0.0; managed_pages];
    let mut first_touches = vec![true; managed_pages];
    for (at, &page) in touches.iter().take(window_units * WINDOWS).enumerate() {
        field.touch(page, Some(at / window_units));
        if !std::mem::replace(&mut first_touches[page as usize], false) {
            repeats[page as usize] += 1.0 / (window_units * WINDOWS) as f64;
        }
    }
    Ok(Report {
        title: format!("{} (first touches not counted)", path.display()),
        unit: "touch",
        managed_pages,
        room_pages,
        window_units: window_units as u64,
        best_fixed: best_fixed(repeats, room_pages),
        replacement_bytes: field.strata.replacement().memory_bytes(),
        rows: field.rows,
    })
}

/// The touches of a recording with its page ids made dense, and their number.
fn parse_trace(bytes: &[u8]) -> anyhow::Result<(Vec<u32>, usize)> {
    let (records, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        bail!(
            "it is cut short: {} bytes are {} whole records of 4 bytes and {} bytes of another; \
             record it again, or cut those off",
            bytes.len(),
            records.len(),
            rest.len()
        );
    }
    ensure!(records.len() >= WINDOWS, "it has {} touches, too few to measure", records.len());
    let mut dense = HashMap::new();
    let touches = records
        .iter()
        .map(|&record| {
            let next = dense.len() as u32;
            *dense.entry(u32::from_le_bytes(record)).or_insert(next)
        })
        .collect();
    Ok((touches, dense.len()))
}

/// What misses when the `room` pages with most touches are resident for ever.
fn best_fixed(mut touches: Vec<f64>, room: usize) -> f64 {
    touches.sort_by(|a, b| b.total_cmp(a));
    touches.iter().skip(room).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments() -> SimulateArgs {
        SimulateArgs {
            workloads: Vec::new(),
            resident: 0.3333,
            resident_pages: None,
            warm_gets: 4_000_000,
            gets: 2_000_000,
            scale_down: 20,
            staged_pages: 0,
            batch_pages: 4,
            seed: 1,
            trace: None,
            json: None,
        }
    }

    #[test]
    fn production_beats_the_rivals_on_skewed_requests() {
        for workload in [Workload::Gaussian, Workload::Zipf] {
            let report = replay_model(&arguments(), workload).expect("the model fits");
            let per_get: Vec<f64> =
                report.rows.iter().map(|row| report.per_unit(&row.hard)).collect();
            let [strata, lru, _, fifo] = per_get[..] else { panic!("four policies: {per_get:?}") };
            assert!(report.best_fixed < strata, "better than the optimum: {strata}");
            assert!(strata < 0.97 * lru && strata < 0.8 * fifo, "{workload:?}: {per_get:?}");
        }
    }

    #[test]
    fn a_recording_that_is_cut_short_says_so() {
        let error = parse_trace(&[0; 4 * 20 + 3]).expect_err("three bytes too many").to_string();
        assert!(error.contains("cut short") && error.contains("20 whole records"), "{error}");
        let error = parse_trace(&[0; 8]).expect_err("two touches").to_string();
        assert!(error.contains("2 touches"), "{error}");
    }

    #[test]
    fn a_recording_is_replayed_with_dense_page_ids() {
        let ids = [7u32, 1 << 31, 7, 9, 9, 9, u32::MAX, 7];
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let (touches, pages) = parse_trace(&bytes).expect("whole records");
        assert_eq!((touches, pages), (vec![0, 1, 0, 2, 2, 2, 3, 0], 4));
    }
}
