//! Several threads read pages of one memory at random: how well faults of one
//! process go side by side.

use super::{Gate, Options, Work};
use crate::{
    histogram::Histogram,
    random::Random,
    records::{RECORD_BYTES, Records},
};
use anyhow::{Result, anyhow, bail};
use std::{
    thread,
    time::{Duration, Instant},
};
use strata_units::PAGE_SIZE;

const RECORDS_PER_PAGE: usize = PAGE_SIZE / RECORD_BYTES;
/// Reads between two looks at whether the time is over.
const BATCH: u64 = 64;
/// More would wait for cores, not for pages.
const MAX_THREADS: usize = 256;

struct Memory {
    bytes: Vec<u8>,
    pages: u64,
    records: Records,
}

impl Memory {
    fn new(size: usize, seed: u64) -> Result<Self> {
        let pages = size / PAGE_SIZE;
        if pages == 0 {
            bail!("--size is less than a page");
        }
        let records = Records::new(seed);
        let mut bytes = vec![0u8; pages * PAGE_SIZE];
        let mut record = Vec::new();
        for (number, slot) in bytes.chunks_exact_mut(RECORD_BYTES).enumerate() {
            records.fill(number as u64, 0, &mut record);
            slot.copy_from_slice(&record);
        }
        Ok(Self { bytes, pages: pages as u64, records })
    }

    /// Whether a record is what was written; `scratch` is the caller's.
    fn is_right(&self, number: usize, scratch: &mut Vec<u8>) -> bool {
        self.records.fill(number as u64, 0, scratch);
        self.bytes[number * RECORD_BYTES..(number + 1) * RECORD_BYTES] == **scratch
    }

    /// Reads pages at random for a time. The latency is that of the first byte,
    /// taken before the record is checked.
    fn read(&self, seed: u64, time: Duration) -> Result<(u64, Histogram)> {
        let mut random = Random::new(seed);
        let mut latencies = Histogram::default();
        let mut scratch = Vec::new();
        let mut reads = 0;
        let until = Instant::now() + time;
        while Instant::now() < until {
            for _ in 0..BATCH {
                let page = random.below(self.pages) as usize;
                let part = random.below(RECORDS_PER_PAGE as u64) as usize;
                let number = page * RECORDS_PER_PAGE + part;
                let started = Instant::now();
                std::hint::black_box(self.bytes[number * RECORD_BYTES]);
                latencies.record(started.elapsed().as_nanos() as u64, 1);
                if !self.is_right(number, &mut scratch) {
                    bail!("record {number} is not what was written");
                }
            }
            reads += BATCH;
        }
        Ok((reads, latencies))
    }

    fn read_side_by_side(&self, threads: usize, seed: u64, seconds: f64) -> Result<Reading> {
        let time = Duration::from_secs_f64(seconds);
        let started = Instant::now();
        let found = thread::scope(|scope| {
            let running: Vec<_> = (0..threads as u64)
                .map(|number| scope.spawn(move || self.read(seed + number, time)))
                .collect();
            let joined = running.into_iter().map(|thread| {
                thread
                    .join()
                    .map_err(|_| anyhow!("a reading thread panicked"))
                    .and_then(|found| found)
            });
            joined.collect::<Result<Vec<_>>>()
        })?;
        let mut reading =
            Reading { seconds: started.elapsed().as_secs_f64(), ..Reading::default() };
        for (reads, latencies) in found {
            reading.reads += reads;
            reading.latencies.merge(&latencies);
        }
        Ok(reading)
    }
}

#[derive(Default)]
struct Reading {
    reads: u64,
    seconds: f64,
    latencies: Histogram,
}

pub(super) fn run(options: &Options, threads: usize) -> Result<()> {
    if !(1..=MAX_THREADS).contains(&threads) {
        bail!("--threads must be between 1 and {MAX_THREADS}");
    }
    let memory = Memory::new(options.size.0 as usize, options.seed)?;
    Gate::Loaded { bytes: memory.bytes.len() as u64 }.pass(options.gated)?;
    memory.read_side_by_side(threads, options.seed, options.warmup)?;
    Gate::Warm.pass(options.gated)?;
    // Other pages than in the warm-up.
    let reading =
        memory.read_side_by_side(threads, options.seed + MAX_THREADS as u64, options.seconds)?;
    Gate::Done(Work {
        operations: reading.reads,
        seconds: reading.seconds,
        p50_us: reading.latencies.quantile_us(0.5),
        p99_us: reading.latencies.quantile_us(0.99),
        rounds: Vec::new(),
        latencies: reading.latencies.counts().collect(),
    })
    .pass(options.gated)?;
    let mut scratch = Vec::new();
    let count = memory.bytes.len() / RECORD_BYTES;
    if let Some(wrong) = (0..count).find(|&number| !memory.is_right(number, &mut scratch)) {
        bail!("record {wrong} is not what was written");
    }
    Gate::Verified { values: count as u64 }.pass(options.gated)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_one_memory_and_notice_damage() {
        let mut memory = Memory::new(64 * PAGE_SIZE, 5).expect("filled");
        let reading = memory.read_side_by_side(3, 1, 0.02).expect("right");
        assert!(reading.reads >= 3 * BATCH);
        assert_eq!(reading.latencies.counts().map(|(_, times)| times).sum::<u64>(), reading.reads);
        memory.bytes[40 * PAGE_SIZE + 3 * RECORD_BYTES + 500] ^= 1;
        let mut found = false;
        for seed in 0..100 {
            found |= memory.read_side_by_side(3, seed, 0.002).is_err();
        }
        assert!(found, "a changed byte was never noticed");
    }
}
