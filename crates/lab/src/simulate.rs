//! `strata-lab simulate`: replays page touches through the production
//! replacement and, beside it, through policies with perfect sight of every
//! touch, and counts misses. Page-level: no memory is moved, nothing is timed, so
//! it says what a policy misses, never how fast a program runs.
//!
//! The touches are those of a model of a Redis server: every GET touches two index
//! pages and the page of its value.

use anyhow::ensure;
use clap::{Args, ValueEnum as _};
use strata_policy::replay::{Shape, Tenant, Touch};

mod balloons;
mod foretell;
pub(crate) mod memory_mode;
mod model;
mod report;
mod rivals;
mod shares;

pub(crate) use balloons::{BalloonsArgs, run as balloons};
use foretell::Foretold;
use model::{KeyStream, Model, Workload};
use report::{Phase, Report, Row, WINDOWS};
use rivals::{Clock, Lru, Replay, S3Fifo, Told};
pub(crate) use shares::{SharesArgs, run as shares};

/// Pages that production evicts at a time.
const BATCH_PAGES: usize = 16;
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
    /// Seed of the random keys.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Show what the advisor says of it with room for all pages.
    #[arg(long)]
    foretell: bool,
}

/// Runs what the arguments ask for and prints a table for each workload and size.
pub(crate) fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    for share in &args.resident {
        ensure!(*share > 0.0 && *share < 1.0, "--resident {share} is not a share between 0 and 1");
    }
    ensure!(args.gets > 0, "--gets 0 leaves nothing to measure");
    let all = Workload::value_variants();
    let chosen = if args.workloads.is_empty() { all } else { &args.workloads };
    for &workload in chosen {
        let model = Model::new(workload, args.scale_down.max(1), args.scattered);
        for share in &args.resident {
            print!("{}", replay(args, workload, &model, *share)?.table());
        }
    }
    Ok(())
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
    fn new(managed_pages: usize, room_pages: usize) -> anyhow::Result<Self> {
        let least = BATCH_PAGES + 65;
        ensure!(
            room_pages >= least && room_pages < managed_pages,
            "room for {room_pages} of {managed_pages} pages: needs at least {least} and fewer \
             than there are"
        );
        Ok(Self {
            strata: Tenant::new(Shape {
                managed_pages,
                capacity_pages: room_pages,
                staged_pages: 0,
                batch_pages: BATCH_PAGES,
            }),
            rivals: vec![
                Box::new(Lru::new(managed_pages, room_pages)),
                Box::new(Clock::new(managed_pages, room_pages, true)),
                Box::new(Clock::new(managed_pages, room_pages, false)),
                Box::new(S3Fifo::new(managed_pages, room_pages)),
                Box::new(Told::new(managed_pages, room_pages)),
            ],
            rows: ["strata", "LRU", "CLOCK", "FIFO", "S3-FIFO", "told"].map(Row::new).into(),
        })
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

fn replay(
    args: &SimulateArgs,
    workload: Workload,
    model: &Model,
    share: f64,
) -> anyhow::Result<Report> {
    let scale = args.scale_down.max(1) as u64;
    let managed_pages = model.value_pages + model.index_pages;
    let room_pages = (managed_pages as f64 * share).round() as usize;
    let mut field = Field::new(managed_pages, room_pages)?;
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
        managed_pages,
        room_pages,
        window_units,
        best_fixed: best_fixed(model.expected_touches(keys.offset()), room_pages),
        rows: field.rows,
        changes: workload == Workload::Jump,
        foretold: args.foretell.then(|| foretold.say().described(foretold_misses)),
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
            resident: Vec::new(),
            warm_gets: 4_000_000,
            gets: 2_000_000,
            scale_down: 20,
            scattered,
            seed: 1,
            foretell: false,
        }
    }

    fn simulated(workload: Workload, scattered: bool) -> Report {
        let args = arguments(scattered);
        let model = Model::new(workload, args.scale_down, scattered);
        replay(&args, workload, &model, 0.3333).expect("the model fits")
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
}
