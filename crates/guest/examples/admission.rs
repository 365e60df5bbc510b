//! Which pages should a pool take? Guests with page caches of their own read one image
//! through one pool: they boot from it one after the other, then read what they like most
//! most, and one of them reads all of it in between, as a backup does. For each way to
//! admit pages: how many reads that the guests' own caches missed the pool answered, and
//! how many for each MiB that it cost. docs/pools.md has the result.
//!
//!     cargo run --release -p strata-guest --example admission
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::process::ExitCode;

use strata_guest::{Admission, Pool};

const IMAGE_PAGES: u64 = 24_000;
const BOOT_PAGES: u64 = 3_000;
const WORKING_SET_PAGES: u64 = 14_000;
/// Of each guest's own page cache.
const CACHE_PAGES: usize = 5_000;
const READS: u64 = 60_000;

/// A page cache: what was read last stays.
#[derive(Default)]
struct PageCache {
    last: HashMap<u64, u64>,
    order: VecDeque<(u64, u64)>,
    clock: u64,
}

impl PageCache {
    /// Whether the page was there; it is now.
    fn read(&mut self, page: u64) -> bool {
        self.clock += 1;
        let hit = self.last.insert(page, self.clock).is_some();
        self.order.push_back((page, self.clock));
        while self.last.len() > CACHE_PAGES {
            let Some((page, time)) = self.order.pop_front() else { break };
            if self.last.get(&page) == Some(&time) {
                self.last.remove(&page);
            }
        }
        hit
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The few first often, the others less and less: about Zipf's law.
    fn favourite(&mut self) -> u64 {
        let page = (WORKING_SET_PAGES as f64).powf(self.unit()) as u64;
        // They do not lie side by side.
        page.wrapping_mul(0x9e37_79b1) % WORKING_SET_PAGES
    }
}

/// Half of it hardly compresses.
fn content(page: u64) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    let mut random = Random(page + 1);
    for chunk in bytes[..2048].chunks_exact_mut(8) {
        chunk.copy_from_slice(&random.unit().to_le_bytes());
    }
    bytes
}

/// What a page cache missed, read through the pool: whether it was there.
fn through(pool: &Pool, page: u64) -> bool {
    let mut out = [0; 4096];
    let hit = pool.get(0, page, &mut out);
    if hit {
        assert!(out == content(page), "page {page} has other bytes");
    } else if pool.wants(0, page) {
        pool.put(0, page, &content(page));
    }
    hit
}

fn simulate(guests: usize, limit_bytes: u64, admission: Admission) -> (u64, u64, u64) {
    let Ok(pool) = Pool::new(limit_bytes, admission) else { return (0, 0, 1) };
    let mut caches: Vec<PageCache> = (0..guests).map(|_| PageCache::default()).collect();
    let mut random = Random(7);
    let (mut misses, mut hits) = (0, 0);
    let mut read = |cache: &mut PageCache, page: u64| {
        if !cache.read(page) {
            misses += 1;
            hits += u64::from(through(&pool, page));
        }
    };
    for cache in &mut caches {
        (0..BOOT_PAGES).for_each(|page| read(cache, page));
    }
    for round in 0..READS {
        for cache in &mut caches {
            read(cache, random.favourite());
        }
        if round == READS / 2 {
            (0..IMAGE_PAGES).for_each(|page| read(&mut caches[0], page));
        }
    }
    (misses, hits, pool.figures().cost_bytes)
}

fn main() -> ExitCode {
    println!("guests  limit  takes    missed by guests  found   part  found per MiB");
    for guests in [1, 2, 4] {
        for limit_mib in [16u64, 32, 64] {
            for (name, admission) in [
                ("room", Admission::Room),
                ("first", Admission::First),
                ("second", Admission::Second),
            ] {
                let (misses, hits, cost) = simulate(guests, limit_mib << 20, admission);
                println!(
                    "{guests:6}  {limit_mib:5}  {name:6}  {misses:17}  {hits:5}  {:4.1} %  {:13.0}",
                    100.0 * hits as f64 / misses as f64,
                    hits as f64 / (cost as f64 / f64::from(1 << 20))
                );
            }
        }
    }
    ExitCode::SUCCESS
}
