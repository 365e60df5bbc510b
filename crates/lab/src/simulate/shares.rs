//! `strata-lab shares`: unlike tenants on one host, each under the production
//! replacement, and the host's DRAM shared out among them once a second by the production
//! function ([`strata_policy::shares`]) and by its rivals. Nothing is timed but in the
//! model: a touch costs what a server's does, a miss what a fault does.

use anyhow::ensure;
use clap::Args;
use strata_policy::advice::{Point, between};
use strata_policy::replay::{Shape, Tenant, Touch};
use strata_policy::shares::{Past, Seen, share};
use strata_units::PAGE_SIZE;

use super::foretell::Foretold;
use super::model::{KeyStream, Model, Workload};
use crate::table::Table;

/// Processor time of a touch, and what a miss makes its thread wait (docs/measurements.md).
pub(super) const TOUCH_US: f64 = 0.77;
pub(super) const MISS_US: f64 = 18.0;
/// What a stored page costs beside one in place.
const STORED_PART: f64 = 0.3;
/// Seconds whose touches the best fixed set is known for, afterwards.
const WINDOW_S: usize = 10;
/// From here on the advisor watches: most pages have been touched.
const ADVISED_FROM_S: usize = 10;
const ADVISED_EVERY_S: usize = 30;
const BATCH_PAGES: usize = 4;

/// Options of `strata-lab shares`.
#[derive(Args, Debug)]
pub(crate) struct SharesArgs {
    /// DRAM of the host, as a share of what all tenants have.
    #[arg(long, default_value_t = 0.55)]
    dram: f64,
    /// Simulated seconds.
    #[arg(long, default_value_t = 480)]
    seconds: usize,
    /// Simulated seconds of which the losses are not counted: all begin empty.
    #[arg(long, default_value_t = 60)]
    warm_seconds: usize,
    /// Divides pages and touches: a page stands for so many.
    #[arg(long, default_value_t = 40)]
    scale_down: usize,
    /// Seed of the random keys.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Whether the advisor watches the tenants.
    #[arg(long)]
    advised: bool,
}

/// A tenant, before anything is simulated.
struct Plan {
    name: &'static str,
    model: Model,
    pages: usize,
    /// In these seconds it works.
    works: fn(usize) -> bool,
    /// In this second its hot keys move on.
    jumps: Option<usize>,
}

impl Plan {
    fn new(name: &'static str, workload: Workload, scale_down: usize) -> Self {
        let model = Model::new(workload, scale_down, true);
        let pages = model.value_pages + model.index_pages;
        Self { name, model, pages, works: |_| true, jumps: None }
    }
}

/// The tenants that are simulated: what hosts have.
fn plans(args: &SharesArgs) -> Vec<Plan> {
    let one = args.scale_down;
    let cache = Plan::new("cache (Gaussian, moves on)", Workload::Gaussian, one);
    let batch = "batch (uniform, half the size, two minutes in four)";
    vec![
        Plan { jumps: Some(240), ..cache },
        Plan::new("store (Zipf)", Workload::Zipf, one),
        Plan::new("neighbour (scan beside a hot fifth)", Workload::ScanHot, one),
        Plan { works: |second| second % 240 < 120, ..Plan::new(batch, Workload::Uniform, one * 2) },
    ]
}

/// A stream of touches.
struct Stream<'a> {
    model: &'a Model,
    keys: KeyStream<'a>,
    /// Of the request under way, and how many of them have been touched.
    pages: [u32; 3],
    at: usize,
}

impl<'a> Stream<'a> {
    fn new(plan: &'a Plan, seed: u64) -> Self {
        let keys = KeyStream::new(&plan.model, seed);
        Self { model: &plan.model, keys, pages: [0; 3], at: 3 }
    }

    fn next(&mut self) -> u32 {
        if self.at == self.pages.len() {
            (self.pages, self.at) = (self.model.pages_of(self.keys.next_key()), 0);
        }
        self.at += 1;
        self.pages[self.at - 1]
    }

    fn jump(&mut self) {
        self.keys.move_on(self.model.keys / 4);
    }
}

/// Who shares the DRAM out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharer {
    Equal,
    Promised,
    Fixed,
    Strata,
}

impl Sharer {
    const ALL: [Self; 4] = [Self::Equal, Self::Promised, Self::Fixed, Self::Strata];

    const fn name(self) -> &'static str {
        match self {
            Self::Equal => "equal shares",
            Self::Promised => "by promised memory",
            Self::Fixed => "fixed, best of the first minutes",
            Self::Strata => "moving shares (production)",
        }
    }
}

/// A tenant under way.
struct Running<'a> {
    plan: &'a Plan,
    stream: Stream<'a>,
    tenant: Tenant,
    /// Pages touched so far: what it has.
    touched: Vec<bool>,
    pages: usize,
    budget: u64,
    page_bytes: u64,
    /// Counted after the warm-up.
    worked_s: f64,
    lost_s: f64,
    advisor: Foretold,
    curve: Vec<Point>,
}

/// What became of a second.
struct Second {
    first: usize,
    hard: usize,
    stall: f64,
    busy: f64,
}

struct World<'a> {
    args: &'a SharesArgs,
    dram: u64,
    /// Bytes that a simulated page stands for.
    page_bytes: u64,
    running: Vec<Running<'a>>,
}

impl<'a> World<'a> {
    fn new(args: &'a SharesArgs, plans: &'a [Plan], dram_pages: usize) -> Self {
        let page_bytes = (PAGE_SIZE * args.scale_down) as u64;
        let running = plans.iter().enumerate().map(|(index, plan)| Running {
            plan,
            stream: Stream::new(plan, args.seed + index as u64),
            tenant: Tenant::new(Shape {
                managed_pages: plan.pages,
                capacity_pages: dram_pages / plans.len(),
                staged_pages: 0,
                batch_pages: BATCH_PAGES,
            }),
            touched: vec![false; plan.pages],
            pages: 0,
            budget: dram_pages as u64 * page_bytes / plans.len() as u64,
            page_bytes,
            worked_s: 0.0,
            lost_s: 0.0,
            advisor: Foretold::new(plan.pages, args.scale_down),
            curve: Vec::new(),
        });
        Self { args, dram: dram_pages as u64 * page_bytes, page_bytes, running: running.collect() }
    }

    /// Shares of the DRAM before the first second.
    fn begin(&mut self, parts: &[f64]) {
        let all: f64 = parts.iter().sum();
        for (one, part) in self.running.iter_mut().zip(parts) {
            one.budget = (self.dram as f64 * part / all) as u64;
            one.apply(self.page_bytes);
        }
    }

    fn run(&mut self, moves: bool) {
        let mut past = vec![Past::default(); self.running.len()];
        for second in 0..self.args.seconds {
            let mut seen = Vec::new();
            for one in &mut self.running {
                let became = one.second(second, self.args, second >= self.args.warm_seconds);
                seen.push(one.seen(&became, self.page_bytes));
            }
            if moves {
                let shares = share(self.dram, &seen, &mut past, 1.0);
                for (one, share) in self.running.iter_mut().zip(shares) {
                    one.budget = share.budget_bytes;
                }
            }
            self.running.iter_mut().for_each(|one| one.apply(self.page_bytes));
        }
    }

    fn losses(&self) -> Vec<f64> {
        self.running.iter().map(|one| one.lost_s / one.worked_s.max(1.0)).collect()
    }
}

impl Running<'_> {
    /// Room for so many pages that those and what the others cost in the store make up
    /// the budget.
    fn apply(&mut self, page_bytes: u64) {
        let whole = self.pages as f64;
        let budget = self.budget as f64 / page_bytes as f64;
        let room = if whole <= budget {
            budget
        } else {
            (budget - whole * STORED_PART) / (1.0 - STORED_PART)
        };
        self.tenant.resize(room.max(0.0) as usize);
    }

    fn second(&mut self, second: usize, args: &SharesArgs, counts: bool) -> Second {
        if self.plan.jumps == Some(second) {
            self.stream.jump();
        }
        let mut became = Second { first: 0, hard: 0, stall: 0.0, busy: 0.0 };
        if !(self.plan.works)(second) {
            return became;
        }
        let (touch_us, miss_us) =
            (TOUCH_US * args.scale_down as f64, MISS_US * args.scale_down as f64);
        let (mut at_us, mut work_us) = (0.0, 0.0);
        let advised = args.advised;
        if advised && second == ADVISED_FROM_S {
            self.advisor.begin();
        }
        while at_us < 1e6 {
            let page = self.stream.next();
            if advised {
                self.advisor.touch(page);
            }
            at_us += touch_us;
            work_us += touch_us;
            match self.tenant.touch(page) {
                Touch::Hit | Touch::Soft => {}
                Touch::First => {
                    became.first += 1;
                    if !std::mem::replace(&mut self.touched[page as usize], true) {
                        self.pages += 1;
                    }
                }
                Touch::Hard => {
                    became.hard += 1;
                    at_us += miss_us;
                }
            }
        }
        if advised && second > ADVISED_FROM_S && second.is_multiple_of(ADVISED_EVERY_S) {
            self.curve = self.foretold();
        }
        (became.stall, became.busy) = (1.0 - work_us / at_us, work_us / at_us);
        if counts {
            self.worked_s += 1.0;
            self.lost_s += became.stall;
        }
        became
    }

    /// What the advisor says, as budgets and losses.
    fn foretold(&self) -> Vec<Point> {
        const POINTS: usize = 40;
        let saying = self.advisor.say();
        let all = self.pages;
        let point = |step: usize| {
            let in_place = all * step / POINTS;
            let (misses, _) = saying.misses(in_place, 1.0)?;
            let waits = misses * MISS_US / TOUCH_US;
            let loss = if step == POINTS { 0.0 } else { waits / (1.0 + waits) };
            let pages = in_place as f64 + (all - in_place) as f64 * STORED_PART;
            let budget_bytes = (pages * self.page_bytes as f64) as u64;
            Some(Point { budget_bytes, misses_per_second: 0.0, loss, loss_at_most: loss })
        };
        (0..=POINTS).map(point).collect::<Option<Vec<_>>>().unwrap_or_default()
    }

    fn seen(&self, became: &Second, page_bytes: u64) -> Seen {
        let (resident, staged) = self.tenant.in_dram();
        let in_place = resident + staged;
        let stored = (self.pages - in_place.min(self.pages)) as f64 * STORED_PART;
        let packed = self.pages as f64 * STORED_PART;
        Seen {
            limit_bytes: u64::MAX,
            weight: 1.0,
            least_bytes: (BATCH_PAGES as u64 + 65) * page_bytes,
            packed_bytes: packed as u64 * page_bytes,
            budget_bytes: self.budget,
            used_bytes: (in_place as u64 + stored as u64) * page_bytes,
            whole_bytes: self.pages as u64 * page_bytes,
            growth_bytes: became.first as u64 * page_bytes,
            returned_bytes: became.hard as u64 * page_bytes,
            stall: became.stall,
            busy: became.busy,
            curve: self.curve.clone(),
            ..Seen::default()
        }
    }
}

/// What would be lost if in each window every tenant had its best pages in place, and the
/// DRAM were shared out with the curves of that window known: nobody who does not know the
/// future does better.
fn optimum(args: &SharesArgs, plans: &[Plan], dram_pages: usize) -> Vec<f64> {
    let seeds = (0u64..).map(|index| args.seed + index);
    let mut streams: Vec<Stream> =
        plans.iter().zip(seeds).map(|(plan, seed)| Stream::new(plan, seed)).collect();
    let per_second = (1e6 / (TOUCH_US * args.scale_down as f64)) as usize;
    let (mut lost, mut works) = (vec![0.0; plans.len()], vec![0.0; plans.len()]);
    for window in (0..args.seconds).step_by(WINDOW_S) {
        let mut curves = Vec::new();
        let mut worked = Vec::new();
        for (plan, stream) in plans.iter().zip(&mut streams) {
            let mut touches = vec![0u32; plan.pages];
            let mut work_s = 0.0;
            for second in window..(window + WINDOW_S).min(args.seconds) {
                if plan.jumps == Some(second) {
                    stream.jump();
                }
                if (plan.works)(second) {
                    (0..per_second).for_each(|_| touches[stream.next() as usize] += 1);
                    work_s += 1.0;
                }
            }
            touches.sort_unstable_by_key(|&count| std::cmp::Reverse(count));
            curves.push(curve(&touches[..plan.pages], work_s, per_second));
            worked.push(work_s);
        }
        let budgets = best(&curves, dram_pages as u64);
        if window < args.warm_seconds {
            continue;
        }
        for (index, (curve, budget)) in curves.iter().zip(budgets).enumerate() {
            let loss = between(curve, budget, |point| point.loss);
            works[index] += worked[index];
            lost[index] += worked[index] * loss;
        }
    }
    lost.iter().zip(&works).map(|(lost, works): (&f64, &f64)| lost / works.max(1.0)).collect()
}

/// Budgets in steps of a 256th of `total` with the least sum of losses: all of them are
/// tried, one tenant after the other.
fn best(curves: &[Vec<Point>], total: u64) -> Vec<u64> {
    const STEPS: usize = 256;
    let budget = |steps: usize| total * steps as u64 / STEPS as u64;
    // The least sum of the tenants so far with so many steps, and what the last one has.
    let mut least = vec![(0.0, Vec::new()); STEPS + 1];
    for curve in curves {
        let losses: Vec<f64> =
            (0..=STEPS).map(|steps| between(curve, budget(steps), |point| point.loss)).collect();
        let first = curve[0].budget_bytes;
        least = (0..=STEPS)
            .map(|all| {
                let with = |own: usize| {
                    let (sum, _): &(f64, Vec<usize>) = &least[all - own];
                    // It cannot do with less than what it costs with nothing in place.
                    sum + if budget(own) < first { 1.0 } else { losses[own] }
                };
                let own = (0..=all).min_by(|&a, &b| with(a).total_cmp(&with(b))).unwrap_or(0);
                let mut steps = least[all - own].1.clone();
                steps.push(own);
                (with(own), steps)
            })
            .collect();
    }
    least[STEPS].1.iter().map(|&steps| budget(steps)).collect()
}

/// What a tenant loses in a window with how many pages of DRAM; `touches` of each of its
/// pages, the most first.
fn curve(touches: &[u32], work_s: f64, per_second: usize) -> Vec<Point> {
    const POINTS: usize = 64;
    let all = touches.len();
    let mut points: Vec<Point> = (0..=POINTS)
        .map(|step| {
            let in_place = all * step / POINTS;
            let missed: u64 = touches[in_place..].iter().map(|&count| u64::from(count)).sum();
            let wait_s = missed as f64 / per_second as f64 * (MISS_US / TOUCH_US);
            let loss = if work_s == 0.0 { 0.0 } else { wait_s / (work_s + wait_s) };
            let stored = (all - in_place) as f64 * STORED_PART;
            let budget_bytes = in_place as u64 + stored as u64;
            Point { budget_bytes, misses_per_second: 0.0, loss, loss_at_most: loss }
        })
        .collect();
    points.dedup_by_key(|point| point.budget_bytes);
    points
}

/// Runs what the arguments ask for and prints a table.
pub(crate) fn run(args: &SharesArgs) -> anyhow::Result<()> {
    ensure!(args.dram > 0.4 && args.dram <= 1.0, "--dram {} is no share from 0.4 to 1", args.dram);
    ensure!(args.seconds > args.warm_seconds, "--seconds {} leaves nothing to count", args.seconds);
    ensure!(
        (1..=200).contains(&args.scale_down),
        "--scale-down {} is not in 1..200",
        args.scale_down
    );
    let plans = plans(args);
    let pages: Vec<f64> = plans.iter().map(|plan| plan.pages as f64).collect();
    let dram_pages = (pages.iter().sum::<f64>() * args.dram) as usize;
    let ends = |parts: &[f64], seconds: usize, moves: bool| {
        let args = SharesArgs { seconds, ..*args };
        let mut world = World::new(&args, &plans, dram_pages);
        world.begin(parts);
        world.run(moves);
        let budgets: Vec<f64> = world.running.iter().map(|one| one.budget as f64).collect();
        (world.losses(), budgets)
    };
    let equal = vec![1.0; plans.len()];
    let mut rows: Vec<(&str, Vec<f64>)> = Vec::new();
    for sharer in Sharer::ALL {
        let (losses, _) = match sharer {
            Sharer::Equal => ends(&equal, args.seconds, false),
            Sharer::Promised => ends(&pages, args.seconds, false),
            // What the moving shares had come to when all had settled.
            Sharer::Fixed => {
                let (_, settled) = ends(&pages, args.warm_seconds.max(120) + 1, true);
                ends(&settled, args.seconds, false)
            }
            Sharer::Strata => ends(&pages, args.seconds, true),
        };
        rows.push((sharer.name(), losses));
    }
    rows.push(("optimum, known afterwards", optimum(args, &plans, dram_pages)));
    print!("{}", table(args, &plans, &rows).plain());
    Ok(())
}

fn table(args: &SharesArgs, plans: &[Plan], rows: &[(&str, Vec<f64>)]) -> Table {
    println!(
        "{} tenants of {} simulated pages, DRAM for {:.0} %, {} s; part of each one's speed that is lost",
        plans.len(),
        plans.iter().map(|plan| plan.pages).sum::<usize>(),
        args.dram * 100.0,
        args.seconds,
    );
    let mut header = vec!["shared out"];
    header.extend(plans.iter().map(|plan| plan.name));
    header.extend(["sum", "of equal"]);
    let mut table = Table::new(&header);
    let equal: f64 = rows[0].1.iter().sum();
    for (name, losses) in rows {
        let sum: f64 = losses.iter().sum();
        let mut cells = vec![(*name).to_owned()];
        cells.extend(losses.iter().map(|loss| format!("{loss:.3}")));
        cells.extend([format!("{sum:.3}"), format!("{:.2}", sum / equal.max(1e-9))]);
        table.row(cells);
    }
    table
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
