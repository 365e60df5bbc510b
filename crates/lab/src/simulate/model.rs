//! The model of a Redis server under `strata-lab simulate`: which pages there
//! are, and which a request touches. Knows nothing of policies.

use clap::ValueEnum;

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

/// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
/// generators, 2014).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
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
pub(super) struct Model {
    workload: Workload,
    pub(super) keys: usize,
    pub(super) value_pages: usize,
    pub(super) index_pages: usize,
    /// Zipf: the sum of all weights up to each key.
    cumulative: Vec<f64>,
    /// Where each value page lies.
    places: Vec<u32>,
}

impl Model {
    /// `scattered`: keys that are asked for alike do not lie beside each other.
    pub(super) fn new(workload: Workload, scale_down: usize, scattered: bool) -> Self {
        let keys = KEYS / scale_down;
        let mut cumulative = Vec::new();
        if workload == Workload::Zipf {
            let mut sum = 0.0;
            cumulative.extend((1..=keys).map(|rank| {
                sum += (rank as f64).powf(-0.99);
                sum
            }));
        }
        let mut places: Vec<u32> = (0..(VALUE_PAGES / scale_down) as u32).collect();
        if scattered {
            let mut random = Random(99);
            for last in (1..places.len()).rev() {
                places.swap(last, (random.next() % (last as u64 + 1)) as usize);
            }
        }
        Self {
            workload,
            keys,
            value_pages: VALUE_PAGES / scale_down,
            index_pages: INDEX_PAGES / scale_down,
            cumulative,
            places,
        }
    }

    /// Two index pages by the key's hash, then the value's.
    pub(super) fn pages_of(&self, key: usize) -> [u32; 3] {
        let hash = Random(key as u64).next();
        let index = |bits: u64| (self.value_pages as u64 + bits % self.index_pages as u64) as u32;
        let value = self.places[key * self.value_pages / self.keys];
        [index(hash & 0xffff_ffff), index(hash >> 32), value]
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

    /// Expected touches of each page by one request; a page that is touched many
    /// times in a row counts once.
    pub(super) fn expected_touches(&self, offset: usize) -> Vec<f64> {
        let mut touches = vec![0.0; self.value_pages + self.index_pages];
        for (key, share) in self.key_shares(offset).into_iter().enumerate() {
            let [index_a, index_b, value] = self.pages_of(key);
            touches[index_a as usize] += share;
            touches[index_b as usize] += share;
            touches[value as usize] += share;
        }
        // A walk in order stays on a value page for all its keys: one miss.
        let walked = match self.workload {
            Workload::Loop => 1.0,
            Workload::ScanHot => 1.0 / SCAN_EVERY as f64,
            _ => 0.0,
        };
        let repeats = 1.0 / self.value_pages as f64 - 1.0 / self.keys as f64;
        for value in &mut touches[..self.value_pages] {
            *value -= walked * repeats;
        }
        touches
    }
}

/// The keys that the model's clients ask for, one after the other.
pub(super) struct KeyStream<'a> {
    model: &'a Model,
    random: Random,
    requests: u64,
    /// Keys by which the hot ones have moved.
    offset: usize,
}

impl<'a> KeyStream<'a> {
    pub(super) fn new(model: &'a Model, seed: u64) -> Self {
        Self { model, random: Random(seed), requests: 0, offset: 0 }
    }

    /// From now on the hot keys lie `keys` further on.
    pub(super) fn move_on(&mut self, keys: usize) {
        self.offset += keys;
    }

    /// Keys by which the hot ones have moved.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    pub(super) fn next_key(&mut self) -> usize {
        let keys = self.model.keys;
        let request = self.requests;
        self.requests += 1;
        let key = match self.model.workload {
            Workload::Uniform => (self.random.uniform() * keys as f64) as usize,
            Workload::Loop => request as usize % keys,
            Workload::ScanHot if request.is_multiple_of(SCAN_EVERY) => {
                (request / SCAN_EVERY) as usize
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Touches of each page, counted over a stream, against what is expected.
    fn farthest_from_expected(workload: Workload) -> f64 {
        let model = Model::new(workload, 500, true);
        let mut keys = KeyStream::new(&model, 3);
        keys.move_on(100);
        let requests = 600_000;
        let mut counted = vec![0.0; model.value_pages + model.index_pages];
        let mut last = u32::MAX;
        let walks = matches!(workload, Workload::Loop);
        for _ in 0..requests {
            let [index_a, index_b, value] = model.pages_of(keys.next_key());
            for page in [index_a, index_b] {
                counted[page as usize] += 1.0 / f64::from(requests);
            }
            if !walks || value != last {
                counted[value as usize] += 1.0 / f64::from(requests);
            }
            last = value;
        }
        let expected = model.expected_touches(100);
        let pairs = counted.iter().zip(&expected);
        pairs.map(|(seen, said)| (seen - said).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn streams_touch_pages_as_often_as_expected() {
        for workload in
            [Workload::Uniform, Workload::Gaussian, Workload::Jump, Workload::Zipf, Workload::Loop]
        {
            // A page is touched by 0.002 to 0.4 of the requests.
            let off = farthest_from_expected(workload);
            assert!(off < 0.002, "{workload:?}: {off}");
        }
    }

    #[test]
    fn every_request_names_three_pages_of_the_model() {
        let model = Model::new(Workload::ScanHot, 1000, true);
        for key in 0..model.keys {
            let [index_a, index_b, value] = model.pages_of(key);
            assert!((value as usize) < model.value_pages);
            for index in [index_a, index_b] {
                let place = (index as usize).checked_sub(model.value_pages);
                assert!(place.is_some_and(|place| place < model.index_pages), "{index}");
            }
        }
    }
}
