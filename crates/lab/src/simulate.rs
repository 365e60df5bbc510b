//! `strata-lab simulate`: replays page touches through the production
//! replacement and, beside it, through policies with perfect sight of every
//! touch, and counts misses. Page-level: no memory is moved, nothing is timed, so
//! it says what a policy misses, never how fast a program runs.
//!
//! Two sources: a model of a Redis server (every GET touches two index pages and
//! the page of its value), or a recorded trace ([`trace`], made by [`record`]).

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum as _};
use serde_json::Value;
use strata_policy::replay::{Shape, Tenant, Touch};

mod balloons;
mod foretell;
mod model;
mod record;
mod report;
mod rivals;
mod shares;
mod trace;

pub(crate) use balloons::{BalloonsArgs, run as balloons};
use foretell::Foretold;
use model::{KeyStream, Model, Workload};
pub(crate) use record::{TraceArgs, run as record};
use report::{Phase, Report, Row, WINDOWS};
use rivals::{Clock, Lru, Opt, Replay, S3Fifo, Told};
pub(crate) use shares::{SharesArgs, run as shares};

/// Pages that the model touches for one GET.
const TOUCHES_PER_GET: f64 = 3.0;

/// Options of `strata-lab simulate`.
#[derive(Args, Debug)]
pub(crate) struct SimulateArgs {
    /// Workloads to replay; all of them when none is named.
    #[arg(value_enum)]
    workloads: Vec<Workload>,
    /// Shares of the pages that may be resident, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "0.346,0.5,0.66,0.75")]
    resident: Vec<f64>,
    /// Room in pages, instead of shares.
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
    /// Values that are asked for alike do not lie beside each other.
    #[arg(long)]
    scattered: bool,
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
    #[arg(long, conflicts_with_all = ["workloads", "scale_down", "scattered"])]
    trace: Option<PathBuf>,
    /// Show what the advisor says of it with room for all pages.
    #[arg(long)]
    foretell: bool,
    /// Also write the figures here, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Runs what the arguments ask for and prints a table for each workload and size.
pub(crate) fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    for share in &args.resident {
        ensure!(*share > 0.0 && *share < 1.0, "--resident {share} is not a share between 0 and 1");
    }
    ensure!(args.gets > 0, "--gets 0 leaves nothing to measure");
    let mut values: Vec<Value> = Vec::new();
    let mut show = |report: Report| {
        print!("{}", report.table());
        values.push(report.json());
    };
    if let Some(path) = &args.trace {
        let touches = load_trace(path)?;
        let managed_pages = distinct(&touches);
        for room_pages in rooms(args, managed_pages) {
            show(replay_trace(args, path, &touches, room_pages)?);
        }
    } else {
        let all = Workload::value_variants();
        let chosen = if args.workloads.is_empty() { all } else { &args.workloads };
        for &workload in chosen {
            let model = Model::new(workload, args.scale_down.max(1), args.scattered);
            for room_pages in rooms(args, model.value_pages + model.index_pages) {
                show(replay_model(args, workload, &model, room_pages)?);
            }
        }
    }
    if let Some(path) = &args.json {
        let text = format!("{:#}\n", Value::Array(values));
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn rooms(args: &SimulateArgs, managed_pages: usize) -> Vec<usize> {
    match args.resident_pages {
        Some(pages) => vec![pages],
        None => {
            let room = |share: &f64| (managed_pages as f64 * share).round() as usize;
            args.resident.iter().map(room).collect()
        }
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
    rivals: Vec<Box<dyn Replay>>,
    rows: Vec<Row>,
}

impl Field {
    /// Page ids are below `ids`, of which `managed_pages` are in use.
    fn new(
        args: &SimulateArgs,
        ids: usize,
        managed_pages: usize,
        room_pages: usize,
    ) -> anyhow::Result<Self> {
        let least = args.staged_pages + args.batch_pages + 65;
        ensure!(
            room_pages >= least && room_pages < managed_pages,
            "room for {room_pages} of {managed_pages} pages: needs at least {least} and fewer \
             than there are"
        );
        Ok(Self {
            strata: Tenant::new(Shape {
                managed_pages: ids,
                capacity_pages: room_pages,
                staged_pages: args.staged_pages,
                batch_pages: args.batch_pages,
            }),
            rivals: vec![
                Box::new(Lru::new(ids, room_pages)),
                Box::new(Clock::new(ids, room_pages, true)),
                Box::new(Clock::new(ids, room_pages, false)),
                Box::new(S3Fifo::new(ids, room_pages)),
            ],
            rows: ["strata", "LRU", "CLOCK", "FIFO", "S3-FIFO"].map(Row::new).into(),
        })
    }

    fn add(&mut self, policy: &'static str, rival: Box<dyn Replay>) {
        self.rivals.push(rival);
        self.rows.push(Row::new(policy));
    }

    fn tell(&mut self, touches: &[f64]) {
        self.rivals.iter_mut().for_each(|rival| rival.tell(touches));
    }

    fn touch(&mut self, page: u32, phase: Phase) {
        let strata = self.strata.touch(page);
        self.rows[0].count(strata, phase);
        for (index, rival) in self.rivals.iter_mut().enumerate() {
            self.rows[index + 1].count(rival.touch(page), phase);
        }
    }
}

fn replay_model(
    args: &SimulateArgs,
    workload: Workload,
    model: &Model,
    room_pages: usize,
) -> anyhow::Result<Report> {
    let scale = args.scale_down.max(1) as u64;
    let managed_pages = model.value_pages + model.index_pages;
    let mut field = Field::new(args, managed_pages, managed_pages, room_pages)?;
    field.add("told", Box::new(Told::new(managed_pages, room_pages)));
    field.tell(&model.expected_touches(0));
    for key in 0..model.keys {
        for page in model.pages_of(key) {
            field.touch(page, Phase::Warm);
        }
    }
    let mut foretold = Foretold::new(managed_pages, args.scale_down.max(1));
    foretold.begin();
    let mut keys = KeyStream::new(model, args.seed);
    let window_units = (args.gets / scale / WINDOWS as u64).max(1);
    let warm_gets = args.warm_gets / scale;
    for get in 0..warm_gets {
        let before = warm_gets - get <= window_units * 8;
        for page in model.pages_of(keys.next_key()) {
            field.touch(page, if before { Phase::Before } else { Phase::Warm });
            if args.foretell {
                foretold.touch(page);
            }
        }
    }
    let foretold_misses = foretold.say().misses(room_pages, TOUCHES_PER_GET);
    if workload == Workload::Jump {
        keys.move_on(model.keys / 4);
        field.tell(&model.expected_touches(keys.offset()));
    }
    for window in 0..WINDOWS {
        for _ in 0..window_units {
            for page in model.pages_of(keys.next_key()) {
                field.touch(page, Phase::Window(window));
                if args.foretell {
                    foretold.touch(page);
                }
            }
        }
    }
    let name = workload.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
    Ok(Report {
        title: if args.scattered { format!("{name}, scattered") } else { name },
        unit: "GET",
        managed_pages,
        room_pages,
        window_units,
        best_fixed: best_fixed(model.expected_touches(keys.offset()), room_pages),
        replacement_bytes: field.strata.replacement().memory_bytes(),
        rows: field.rows,
        changes: workload == Workload::Jump,
        foretold: args.foretell.then(|| foretold.say().described(foretold_misses)),
    })
}

fn load_trace(path: &Path) -> anyhow::Result<Vec<u32>> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let touches = trace::decode(&bytes)
        .with_context(|| format!("{} is no usable recording", path.display()))?;
    ensure!(
        touches.len() >= WINDOWS,
        "{} has {} touches, too few to measure",
        path.display(),
        touches.len()
    );
    Ok(touches)
}

fn ids(touches: &[u32]) -> usize {
    touches.iter().max().map_or(0, |&page| page as usize + 1)
}

fn distinct(touches: &[u32]) -> usize {
    let mut seen = vec![false; ids(touches)];
    touches.iter().filter(|&&page| !std::mem::replace(&mut seen[page as usize], true)).count()
}

fn replay_trace(
    args: &SimulateArgs,
    path: &Path,
    touches: &[u32],
    room_pages: usize,
) -> anyhow::Result<Report> {
    let (ids, managed_pages) = (ids(touches), distinct(touches));
    let mut field = Field::new(args, ids, managed_pages, room_pages)?;
    field.add("OPT", Box::new(Opt::new(ids, room_pages, touches)));
    let window_units = touches.len() / WINDOWS;
    let mut repeats = vec![0.0; ids];
    let mut first_touches = vec![true; ids];
    for (at, &page) in touches.iter().take(window_units * WINDOWS).enumerate() {
        field.touch(page, Phase::Window(at / window_units));
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
        changes: false,
        foretold: None,
    })
}

/// What misses when the `room` pages with most touches are resident for ever.
fn best_fixed(mut touches: Vec<f64>, room: usize) -> f64 {
    touches.sort_by(|a, b| b.total_cmp(a));
    touches.iter().skip(room).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(scattered: bool) -> SimulateArgs {
        SimulateArgs {
            workloads: Vec::new(),
            resident: vec![0.3333],
            resident_pages: None,
            warm_gets: 4_000_000,
            gets: 2_000_000,
            scale_down: 20,
            scattered,
            staged_pages: 0,
            batch_pages: 4,
            seed: 1,
            trace: None,
            foretell: false,
            json: None,
        }
    }

    fn simulated(workload: Workload, scattered: bool) -> Report {
        let args = arguments(scattered);
        let model = Model::new(workload, args.scale_down, scattered);
        let room = rooms(&args, model.value_pages + model.index_pages)[0];
        replay_model(&args, workload, &model, room).expect("the model fits")
    }

    #[test]
    fn production_beats_the_rivals_on_skewed_requests() {
        for (workload, scattered) in
            [(Workload::Gaussian, false), (Workload::Zipf, false), (Workload::Gaussian, true)]
        {
            let report = simulated(workload, scattered);
            let per_get: Vec<f64> =
                report.rows.iter().map(|row| report.hard_per_unit(row)).collect();
            let [strata, lru, _, fifo, s3, told] = per_get[..] else { panic!("{per_get:?}") };
            assert!(report.best_fixed < strata, "better than the optimum: {strata}");
            assert!(strata < 0.97 * lru && strata < 0.8 * fifo, "{workload:?}: {per_get:?}");
            assert!(s3 < fifo && s3 > told, "{workload:?}: {per_get:?}");
            let off = (told / report.best_fixed - 1.0).abs();
            assert!(off < 0.02, "{workload:?}: {per_get:?}, best {}", report.best_fixed);
        }
    }

    #[test]
    fn after_a_jump_production_soon_misses_less_than_lru() {
        let report = simulated(Workload::Jump, false);
        let strata = report.hard_per_unit(&report.rows[0]);
        let lru = report.hard_per_unit(&report.rows[1]);
        assert!(strata < 0.95 * lru, "{strata} {lru}");
        let recovery = report.recovery(&report.rows[0], &report.rows[0]);
        assert!(recovery.is_some(), "{}", report.table());
    }

    #[test]
    fn a_recording_is_replayed_and_nobody_beats_the_optimum() {
        let touches: Vec<u32> = (0..40_000u32)
            .map(|n| if n % 3 == 0 { n / 3 % 900 } else { 1_024 + n * n % 300 })
            .collect();
        let args = arguments(false);
        let report =
            replay_trace(&args, Path::new("a trace"), &touches, 400).expect("there is room");
        let misses: Vec<f64> = report.rows.iter().map(|row| report.hard_per_unit(row)).collect();
        assert!(
            misses[..5].iter().all(|&other| other > misses[5] && misses[5] > 0.0),
            "{misses:?}"
        );
        assert!(report.managed_pages < 1_200, "ids without a page do not count");
    }
}
