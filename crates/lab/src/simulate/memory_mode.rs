//! DRAM as a cache of slower memory, which the processor's memory controller keeps without
//! anybody's say ("memory mode"), against DRAM that is given out ("app direct"): the model
//! of a Redis, and beside it a neighbour that walks through memory of its own and uses no
//! line twice. Nothing is timed but in the model: a request costs what a server's does, a
//! line of slower memory what it was measured to cost elsewhere, a fault what it costs here.

use super::TOUCHES_PER_GET;
use super::model::{KeyStream, Model, Random, Workload};
use super::shares::{MISS_US, TOUCH_US};
use serde::Serialize;
use strata_policy::replay::{Shape, Tenant, Touch};

/// Lines of a page.
const LINES: usize = 64;
/// A line read from persistent memory, at random and in order (Izraelevitz et al.: Basic
/// performance measurements of the Intel Optane DC persistent memory module, 2019).
const RANDOM_US: f64 = 0.305;
const NEXT_US: f64 = 0.169;
/// Of DRAM, at random and in order (there too): a request's time has that in it.
const DRAM_RANDOM_US: f64 = 0.101;
const DRAM_NEXT_US: f64 = 0.081;
/// Lines of a value of 1 KiB, and where the next one begins.
const VALUE_LINES: usize = 16;
const SLOT_LINES: usize = 20;
/// Slower memory, and what of it the neighbour walks through, as multiples of DRAM.
const SLOW: usize = 8;
const WALKED: usize = 4;
/// Most of a budget that can be pinned (docs/placement.md).
const PINNED: f64 = 0.75;
const BATCH_PAGES: usize = 16;

/// Who decides what is in DRAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// The memory controller: each line has so many places.
    Cache { ways: usize },
    /// Production's replacement; what is not in DRAM comes by a fault. The neighbour's
    /// memory was asked for on the node, and has no DRAM.
    Replacement,
    /// The program: its hottest pages are pinned, all else is used in place on the node.
    Pins,
}

/// One trial.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Trial {
    pub mode: Mode,
    /// The server's memory, as a share of DRAM.
    pub size: f64,
    /// Pages that the neighbour walks through for each request of the server.
    pub neighbour: f64,
    pub requests: usize,
    pub scale_down: usize,
    pub seed: u64,
}

/// What became of it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Ran {
    /// Throughput, as a share of that with all memory in DRAM.
    pub speed: f64,
    /// Lines, or with [`Mode::Replacement`] pages, that were not in DRAM, of each request.
    pub misses: f64,
}

/// A cache with the least recently used line of a set leaving it.
struct Cache {
    ways: usize,
    lines: Vec<u32>,
}

impl Cache {
    fn new(pages: usize, ways: usize) -> Self {
        Self { ways, lines: vec![u32::MAX; pages * LINES / ways * ways] }
    }

    /// Whether it was there; it is afterwards.
    fn touch(&mut self, line: u32) -> bool {
        let sets = self.lines.len() / self.ways;
        let at = line as usize % sets * self.ways;
        let set = &mut self.lines[at..at + self.ways];
        let found = set.iter().position(|&other| other == line);
        set[..=found.unwrap_or(self.ways - 1)].rotate_right(1);
        set[0] = line;
        found.is_some()
    }
}

/// What stands below the server's requests.
enum Memory {
    /// Where the server's pages lie, and the neighbour's, and which one it is at.
    Cache {
        cache: Cache,
        frames: Vec<u32>,
        walked: Vec<u32>,
        at: usize,
    },
    Replacement(Box<Tenant>),
    Pins(Vec<bool>),
}

impl Memory {
    fn new(trial: &Trial, model: &Model, dram_pages: usize, random: &mut Random) -> Self {
        let pages = model.value_pages + model.index_pages;
        match trial.mode {
            Mode::Cache { ways } => {
                let mut frames: Vec<u32> = (0..(SLOW * dram_pages) as u32).collect();
                for last in (1..frames.len()).rev() {
                    frames.swap(last, (random.next() % (last as u64 + 1)) as usize);
                }
                let mut walked = frames.split_off(pages);
                walked.truncate(WALKED * dram_pages);
                Self::Cache { cache: Cache::new(dram_pages, ways), frames, walked, at: 0 }
            }
            Mode::Replacement => Self::Replacement(Box::new(Tenant::new(Shape {
                managed_pages: pages,
                capacity_pages: dram_pages,
                staged_pages: 0,
                batch_pages: BATCH_PAGES,
            }))),
            Mode::Pins => {
                let touches = model.expected_touches(0);
                let mut order: Vec<usize> = (0..pages).collect();
                order.sort_by(|&a, &b| touches[b].total_cmp(&touches[a]));
                let mut pinned = vec![false; pages];
                let room = (dram_pages as f64 * PINNED) as usize;
                order.into_iter().take(room).for_each(|page| pinned[page] = true);
                Self::Pins(pinned)
            }
        }
    }

    /// The server reads so many lines of a page in order: what it waits beyond DRAM's time,
    /// and how often it missed.
    fn read(&mut self, page: u32, first: usize, count: usize) -> (f64, u64) {
        match self {
            Self::Cache { cache, frames, .. } => {
                let frame = frames[page as usize] as usize;
                let mut waited = (0.0, 0);
                for line in first..first + count {
                    if !cache.touch((frame * LINES + line) as u32) {
                        // The controller looks in DRAM first.
                        waited.0 += if line == first { RANDOM_US } else { NEXT_US };
                        waited.1 += 1;
                    }
                }
                waited
            }
            Self::Replacement(tenant) => match tenant.touch(page) {
                Touch::Hard => (MISS_US, 1),
                Touch::Hit | Touch::First | Touch::Soft => (0.0, 0),
            },
            Self::Pins(pinned) if pinned[page as usize] => (0.0, 0),
            Self::Pins(_) => {
                let more = (count - 1) as f64;
                (RANDOM_US - DRAM_RANDOM_US + more * (NEXT_US - DRAM_NEXT_US), count as u64)
            }
        }
    }

    /// The neighbour walks through its next page.
    fn walk(&mut self) {
        if let Self::Cache { cache, walked, at, .. } = self {
            let frame = walked[*at] as usize;
            *at = (*at + 1) % walked.len();
            for line in 0..LINES {
                cache.touch((frame * LINES + line) as u32);
            }
        }
    }
}

/// Loads the server, warms it with half as many requests as are measured, and measures.
pub(crate) fn ran(trial: &Trial) -> Ran {
    let model = Model::new(Workload::Gaussian, trial.scale_down, true);
    let dram_pages = ((model.value_pages + model.index_pages) as f64 / trial.size) as usize;
    let mut memory = Memory::new(trial, &model, dram_pages, &mut Random(!trial.seed));
    let request = |memory: &mut Memory, key: usize| {
        let [index_a, index_b, value] = model.pages_of(key);
        let line = key % LINES;
        // Three values to a page.
        let first = key % 3 * SLOT_LINES;
        let reads = [(index_a, line, 1), (index_b, line, 1), (value, first, VALUE_LINES)];
        reads.into_iter().fold((0.0, 0), |sum, (page, first, count)| {
            let (waited, misses) = memory.read(page, first, count);
            (sum.0 + waited, sum.1 + misses)
        })
    };
    for key in 0..model.keys {
        request(&mut memory, key);
    }
    let mut keys = KeyStream::new(&model, trial.seed);
    let warm = trial.requests / 2;
    let (mut owed, mut waited, mut misses) = (0.0, 0.0, 0);
    for number in 0..warm + trial.requests {
        let (us, missed) = request(&mut memory, keys.next_key());
        if number >= warm {
            waited += us;
            misses += missed;
        }
        owed += trial.neighbour;
        while owed >= 1.0 {
            memory.walk();
            owed -= 1.0;
        }
    }
    let requests = trial.requests as f64;
    let needed = requests * TOUCHES_PER_GET * TOUCH_US;
    Ran { speed: needed / (needed + waited), misses: misses as f64 / requests }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speed(mode: Mode, size: f64, neighbour: f64) -> f64 {
        let trial = Trial { mode, size, neighbour, requests: 20_000, scale_down: 200, seed: 1 };
        ran(&trial).speed
    }

    #[test]
    fn a_cache_keeps_what_was_used_last() {
        let mut cache = Cache::new(2, 2);
        let sets = (2 * LINES / 2) as u32;
        assert!(!cache.touch(1) && cache.touch(1));
        assert!(!cache.touch(1 + sets) && cache.touch(1), "two places in a set");
        assert!(!cache.touch(1 + 2 * sets) && cache.touch(1), "the oldest one leaves");
        assert!(!cache.touch(1 + sets) && !cache.touch(2));
    }

    #[test]
    fn a_neighbour_takes_a_cache_away_and_nothing_that_was_given_out() {
        let [direct, sets] = [Mode::Cache { ways: 1 }, Mode::Cache { ways: 8 }];
        // In DRAM that is as large as the server, lines meet all the same.
        assert!(speed(direct, 0.8, 0.0) < 0.98);
        assert!(speed(sets, 0.5, 0.0) > speed(direct, 0.5, 0.0));
        for mode in [direct, sets] {
            assert!(speed(mode, 0.8, 1.0) < 0.95 * speed(mode, 0.8, 0.0));
        }
        for mode in [Mode::Replacement, Mode::Pins] {
            let alone = speed(mode, 0.8, 0.0);
            assert!((speed(mode, 0.8, 1.0) - alone).abs() < 1e-9 && alone > 0.98, "{alone}");
        }
        assert!(speed(Mode::Replacement, 1.5, 0.0) < 0.9, "what is out has to come");
    }
}
