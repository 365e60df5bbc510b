//! `strata-lab simulate`: replays page touches through the production
//! replacement and, beside it, through LRU, FIFO and CLOCK with perfect sight of
//! every touch, and counts misses. Page-level: no memory is moved, nothing is
//! timed, so it says what a policy misses, never how fast a program runs.
//!
//! Two sources: a model of a Redis server (every GET touches two index pages and
//! the page of its value), or a recorded trace (`u32` little-endian page ids, one
//! for every touch).

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use strata_policy::replay::{Shape, Tenant, Touch};

const VALUE_PAGES: usize = 250_000;
const INDEX_PAGES: usize = 16_500;
/// Three to a page.
const KEYS: usize = 750_000;
/// Every so many of a scanning client's requests belong to the scan.
const SCAN_EVERY: u64 = 10;

/// Which keys the model's clients ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Workload {
    /// Every key alike.
    Uniform,
    /// Normal around the middle, a sixth of the keys as its deviation.
    Gaussian,
    /// Zipf with exponent 0.99, neighbours in rank neighbours in memory.
    Zipf,
    /// Nine requests in ten to a fifth of the keys, the tenth walks all keys.
    ScanHot,
    /// All keys in order, over and over.
    Loop,
    /// Gaussian; after the warm-up its middle moves by a quarter of the keys.
    Jump,
}

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

/// A policy that is shown every touch.
trait Replay {
    fn touch(&mut self, page: u32) -> Touch;
}

impl Replay for Tenant {
    fn touch(&mut self, page: u32) -> Touch {
        Tenant::touch(self, page)
    }
}

/// All policies over one stream of touches.
struct Field {
    strata: Tenant,
    rivals: [(&'static str, Box<dyn Replay>); 3],
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
                ("LRU, sees all", Box::new(Lru::new(managed_pages, room_pages))),
                ("CLOCK, sees all", Box::new(Clock::new(managed_pages, room_pages, true))),
                ("FIFO", Box::new(Clock::new(managed_pages, room_pages, false))),
            ],
            rows: vec![row("strata"), row("LRU"), row("CLOCK"), row("FIFO")],
        })
    }

    fn touch(&mut self, page: u32, window: Option<usize>) {
        let strata = self.strata.touch(page);
        count(&mut self.rows[0], strata, window);
        for (index, (_, rival)) in self.rivals.iter_mut().enumerate() {
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
        keys.offset = model.keys / 4;
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
        best_fixed: best_fixed(model.expected_touches(keys.offset), room_pages),
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

/// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
/// generators, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In 0..1.
    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }
}

/// The server's memory and how often each key is asked for.
struct Model {
    workload: Workload,
    keys: usize,
    value_pages: usize,
    index_pages: usize,
    /// Zipf: the sum of all weights up to each key.
    cumulative: Vec<f64>,
}

impl Model {
    fn new(workload: Workload, scale_down: usize) -> Self {
        let keys = KEYS / scale_down;
        let mut cumulative = Vec::new();
        if workload == Workload::Zipf {
            let mut sum = 0.0;
            cumulative.extend((1..=keys).map(|rank| {
                sum += (rank as f64).powf(-0.99);
                sum
            }));
        }
        Self {
            workload,
            keys,
            value_pages: VALUE_PAGES / scale_down,
            index_pages: INDEX_PAGES / scale_down,
            cumulative,
        }
    }

    /// Two index pages by the key's hash, then the value's.
    fn pages_of(&self, key: usize) -> [u32; 3] {
        let hash = Random(key as u64).next();
        let index = |bits: u64| (self.value_pages as u64 + bits % self.index_pages as u64) as u32;
        let value = key * self.value_pages / self.keys;
        [index(hash & 0xffff_ffff), index(hash >> 32), value as u32]
    }

    /// How often a request asks for each key, `offset` keys moved on.
    fn key_shares(&self, offset: usize) -> Vec<f64> {
        let even = 1.0 / self.keys as f64;
        let mut shares: Vec<f64> = match self.workload {
            Workload::Uniform | Workload::Loop => vec![even; self.keys],
            Workload::Zipf => {
                let sum = self.cumulative.last().copied().unwrap_or(1.0);
                (1..=self.keys).map(|rank| (rank as f64).powf(-0.99) / sum).collect()
            }
            Workload::ScanHot => {
                let (scan, hot_keys) = (1.0 / SCAN_EVERY as f64, self.keys / 5);
                let hot = (1.0 - scan) / hot_keys as f64;
                let share = |key| scan * even + if key < hot_keys { hot } else { 0.0 };
                (0..self.keys).map(share).collect()
            }
            Workload::Gaussian | Workload::Jump => {
                let density = |key: usize| {
                    let deviations = ((key as f64 + 0.5) * even - 0.5) * 6.0;
                    (-0.5 * deviations * deviations).exp()
                };
                let sum: f64 = (0..self.keys).map(density).sum();
                (0..self.keys).map(|key| density(key) / sum).collect()
            }
        };
        shares.rotate_right(offset);
        shares
    }

    /// Expected touches of each page by one request.
    fn expected_touches(&self, offset: usize) -> Vec<f64> {
        let mut touches = vec![0.0; self.value_pages + self.index_pages];
        for (key, share) in self.key_shares(offset).into_iter().enumerate() {
            for page in self.pages_of(key) {
                touches[page as usize] += share;
            }
        }
        touches
    }
}

/// The keys that the model's clients ask for, one after the other.
struct KeyStream<'a> {
    model: &'a Model,
    random: Random,
    requests: u64,
    /// Keys by which the hot ones have moved.
    offset: usize,
}

impl<'a> KeyStream<'a> {
    fn new(model: &'a Model, seed: u64) -> Self {
        Self { model, random: Random(seed), requests: 0, offset: 0 }
    }

    fn next_key(&mut self) -> usize {
        let keys = self.model.keys;
        let request = self.requests;
        self.requests += 1;
        let key = match self.model.workload {
            Workload::Uniform => (self.random.uniform() * keys as f64) as usize,
            Workload::Loop => request as usize % keys,
            Workload::ScanHot if request % SCAN_EVERY == 0 => (request / SCAN_EVERY) as usize,
            Workload::ScanHot => (self.random.uniform() * (keys / 5) as f64) as usize,
            Workload::Zipf => {
                let sum = self.model.cumulative.last().copied().unwrap_or(1.0);
                let at = self.random.uniform() * sum;
                self.model.cumulative.partition_point(|&upto| upto <= at)
            }
            Workload::Gaussian | Workload::Jump => loop {
                let place = 0.5 + self.random.normal() / 6.0;
                if (0.0..1.0).contains(&place) {
                    break (place * keys as f64) as usize;
                }
            },
        };
        (key + self.offset) % keys
    }
}

const NONE: u32 = u32::MAX;

/// Least recently used, exact: a list through arrays.
struct Lru {
    room: usize,
    resident: usize,
    seen: Vec<bool>,
    /// Neighbours of resident pages; the last entry is the list's anchor.
    younger: Vec<u32>,
    older: Vec<u32>,
}

impl Lru {
    fn new(pages: usize, room: usize) -> Self {
        let mut links = vec![NONE; pages + 1];
        links[pages] = pages as u32;
        Self { room, resident: 0, seen: vec![false; pages], younger: links.clone(), older: links }
    }

    fn unlink(&mut self, page: u32) {
        let (younger, older) = (self.younger[page as usize], self.older[page as usize]);
        self.older[younger as usize] = older;
        self.younger[older as usize] = younger;
        self.younger[page as usize] = NONE;
    }
}

impl Replay for Lru {
    fn touch(&mut self, page: u32) -> Touch {
        let anchor = self.seen.len();
        let hit = self.younger[page as usize] != NONE;
        if hit {
            self.unlink(page);
        } else if self.resident == self.room {
            self.unlink(self.younger[anchor]);
        } else {
            self.resident += 1;
        }
        // The anchor's `older` is the youngest page, its `younger` the oldest.
        let youngest = self.older[anchor];
        self.older[page as usize] = youngest;
        self.younger[page as usize] = anchor as u32;
        self.younger[youngest as usize] = page;
        self.older[anchor] = page;
        outcome(hit, &mut self.seen[page as usize])
    }
}

/// CLOCK: first in, first out, with a second chance for what was touched. FIFO
/// when it does not look.
struct Clock {
    room: usize,
    looks: bool,
    seen: Vec<bool>,
    resident: Vec<bool>,
    touched: Vec<bool>,
    queue: VecDeque<u32>,
}

impl Clock {
    fn new(pages: usize, room: usize, looks: bool) -> Self {
        let no = vec![false; pages];
        Self {
            room,
            looks,
            seen: no.clone(),
            resident: no.clone(),
            touched: no,
            queue: VecDeque::new(),
        }
    }
}

impl Replay for Clock {
    fn touch(&mut self, page: u32) -> Touch {
        let hit = self.resident[page as usize];
        if hit {
            self.touched[page as usize] = self.looks;
        } else {
            while self.queue.len() >= self.room {
                let oldest = self.queue.pop_front().expect("room is not zero");
                if std::mem::replace(&mut self.touched[oldest as usize], false) {
                    self.queue.push_back(oldest);
                } else {
                    self.resident[oldest as usize] = false;
                }
            }
            self.queue.push_back(page);
            self.resident[page as usize] = true;
        }
        outcome(hit, &mut self.seen[page as usize])
    }
}

fn outcome(hit: bool, seen: &mut bool) -> Touch {
    match (hit, std::mem::replace(seen, true)) {
        (true, _) => Touch::Hit,
        (false, true) => Touch::Hard,
        (false, false) => Touch::First,
    }
}
