//! Pages and stores for the tests.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use strata_store::{Backing, Faults, Faulty, MemoryBacking, Store};

pub(crate) type Page = [u8; 4096];

/// A small deterministic generator (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// Page number `seed`: by turns filled with one value, records that compress
/// well, hex that only zstd shrinks, a mixture of noise and zeroes of every
/// size, and noise.
pub(crate) fn page(seed: u64) -> Page {
    let mut random = Random::new(seed + 1);
    let mut page = [0; 4096];
    match seed % 8 {
        0 => page = [(seed / 8) as u8; 4096],
        1..=4 => {
            let mut text = String::new();
            while text.len() < 4096 {
                let (a, b) = (random.next(), random.next());
                text += &format!(
                    "{{\"id\":{},\"user\":\"user{:06}\",\"active\":{},\"score\":{},\"at\":\"2026-{:02}-{:02}\"}}\n",
                    a % 1_000_000,
                    b % 1_000_000,
                    a % 2 == 0,
                    b % 1000,
                    1 + a % 12,
                    1 + b % 28
                );
            }
            page.copy_from_slice(&text.as_bytes()[..4096]);
        }
        5 => {
            for byte in &mut page {
                *byte = b"0123456789abcdef"[random.below(16)];
            }
        }
        6 => {
            let noise = random.below(4096);
            for byte in &mut page[..noise] {
                *byte = random.next() as u8;
            }
        }
        _ => {
            for byte in &mut page {
                *byte = random.next() as u8;
            }
        }
    }
    // Distinct seeds make distinct pages, fill pages apart.
    if !seed.is_multiple_of(8) {
        page[..8].copy_from_slice(&seed.to_ne_bytes());
    }
    page
}

/// A store whose tier file is memory, with a switchboard of faults for it.
pub(crate) fn store_with_file(limit: Option<u64>, file_bytes: u64) -> (Store, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let data = MemoryBacking::create("strata-data", 4 << 30).expect("memory");
    let file = MemoryBacking::create("strata-file", file_bytes).expect("memory");
    let file = Faulty::new(Box::new(file), Arc::clone(&faults));
    let store = Store::create_on(limit, Box::new(data), Some(Box::new(file) as Box<dyn Backing>))
        .expect("a store");
    (store, faults)
}

/// A page of sentences from a vocabulary that all pages of a `flavour` share: a
/// dictionary makes it far smaller than lz4 does. Distinct by `seed`.
pub(crate) fn sentences(flavour: u64, seed: u64) -> Page {
    let mut random = Random::new(seed + 1);
    let mut text = format!("{seed:016x} ");
    while text.len() < 4096 {
        let mut words = Random::new(flavour * 1000 + random.next() % 60 + 1);
        for _ in 0..6 {
            text += &format!("{:08x} ", words.next() as u32);
        }
    }
    let mut page = [0; 4096];
    page.copy_from_slice(&text.as_bytes()[..4096]);
    page
}

/// Moves objects about, as a keeper does, until `done`; bytes that compaction
/// moved.
pub(crate) fn keep_house(store: &Store, done: &AtomicBool, seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let mut moved_bytes = 0;
    while !done.load(Relaxed) {
        let max = random.below(100);
        match random.below(5) {
            0 => _ = store.settle(max),
            4 => _ = store.demote_staged(max),
            1 => _ = store.repack(max),
            2 => _ = store.demote(max),
            _ => moved_bytes += store.compact(1 << 20).moved_bytes,
        }
    }
    moved_bytes
}
