//! Small programs that are measured, not measuring: they allocate, touch and
//! check memory, and print what they saw as one JSON object. They know nothing
//! of Strata; run them natively, under a control group, or under `strata run`.

use crate::{
    histogram::Histogram,
    process::Pagemap,
    random::{Random, mix},
    records::{RECORD_BYTES, Records},
};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::{
    collections::VecDeque,
    hint::black_box,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};
use strata_store::{Backing, FileBacking};
use strata_units::{ByteSize, PAGE_SIZE, PageBuffer};

/// Sizes and lengths of `alloc`.
#[derive(clap::Args)]
pub(crate) struct AllocOptions {
    /// Memory that is held at once
    #[arg(long, default_value = "256MiB")]
    size: ByteSize,
    /// It is allocated, touched and freed in chunks of this size
    #[arg(long, default_value = "64MiB")]
    chunk: ByteSize,
    /// Seconds
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Milliseconds between getting a chunk and touching it, not measured: as
    /// in a program that reserves ahead, a memory manager can see it coming
    #[arg(long, default_value_t = 0)]
    settle_ms: u64,
}

/// What `alloc` saw.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct AllocResult {
    pub touched_bytes: u64,
    /// Spent on getting, touching, checking and freeing.
    pub seconds: f64,
    pub mebibytes_per_second: f64,
}

fn stamp(chunk: u64, page: usize) -> u64 {
    mix(chunk << 32 | page as u64) | 1
}

/// Touches fresh memory for a time: every chunk is new from the kernel, must
/// read as zero, gets a stamp in each page, and is checked before it is freed.
pub(crate) fn churn(options: &AllocOptions) -> Result<()> {
    let chunk_bytes = options.chunk.0 as usize;
    // A chunk this large comes from mmap and goes back with munmap: the
    // allocator's threshold grows with use, but never beyond 32 MiB.
    if options.chunk.0 <= 32 << 20 || options.size.0 < options.chunk.0 {
        bail!("--chunk must be above 32MiB (or it is reused, not fresh) and at most --size");
    }
    let held_chunks = (options.size.0 / options.chunk.0) as usize;
    let mut held: VecDeque<(u64, Vec<u8>)> = VecDeque::new();
    let started = Instant::now();
    let mut settled = Duration::ZERO;
    let mut number = 0;
    while started.elapsed() < Duration::from_secs_f64(options.seconds) {
        if held.len() == held_chunks {
            check_chunk(held.pop_front())?;
        }
        let mut chunk = vec![0u8; chunk_bytes];
        let pause = Instant::now();
        thread::sleep(Duration::from_millis(options.settle_ms));
        settled += pause.elapsed();
        for (page, bytes) in chunk.chunks_exact_mut(PAGE_SIZE).enumerate() {
            if black_box(&bytes)[PAGE_SIZE / 2..PAGE_SIZE / 2 + 8] != [0; 8] {
                bail!("fresh memory did not read as zero");
            }
            bytes[..8].copy_from_slice(&stamp(number, page).to_le_bytes());
        }
        held.push_back((number, chunk));
        number += 1;
    }
    let seconds = (started.elapsed() - settled).as_secs_f64();
    while !held.is_empty() {
        check_chunk(held.pop_front())?;
    }
    let touched_bytes = number * chunk_bytes as u64;
    print(&AllocResult {
        touched_bytes,
        seconds,
        mebibytes_per_second: touched_bytes as f64 / f64::from(1 << 20) / seconds,
    })
}

fn check_chunk(chunk: Option<(u64, Vec<u8>)>) -> Result<()> {
    let Some((number, bytes)) = chunk else { return Ok(()) };
    for (page, bytes) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
        if bytes[..8] != stamp(number, page).to_le_bytes() {
            bail!("page {page} of chunk {number} does not hold what was written");
        }
    }
    Ok(())
}

/// Sizes and lengths of `touch`.
#[derive(clap::Args)]
pub(crate) struct TouchOptions {
    /// Memory, filled once with records
    #[arg(long, default_value = "256MiB")]
    size: ByteSize,
    /// Seconds of reading pages in random order
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Fill it with noise, which does not compress
    #[arg(long)]
    noise: bool,
    /// Read pages in order, again and again, and look at none before
    #[arg(long)]
    in_order: bool,
    /// Seconds to sleep with it in the end
    #[arg(long, default_value_t = 0)]
    rest_seconds: u64,
}

/// What `touch` saw.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct TouchResult {
    pub pages_read: u64,
    pub seconds: f64,
    pub pages_per_second: f64,
    /// Part of them that were not in place just before.
    pub misses: u64,
    /// What reading the first byte of those took.
    pub miss_p50_us: f64,
    pub miss_p99_us: f64,
}

impl TouchResult {
    fn since(started: Instant, pages_read: u64, misses: u64, latencies: &Histogram) -> Self {
        let seconds = started.elapsed().as_secs_f64();
        Self {
            pages_read,
            seconds,
            pages_per_second: pages_read as f64 / seconds,
            misses,
            miss_p50_us: latencies.quantile_us(0.5),
            miss_p99_us: latencies.quantile_us(0.99),
        }
    }
}

/// Fills memory with compressible pages and reads it in random order, checking
/// each page by its stamp and the record behind it.
pub(crate) fn touch(options: &TouchOptions) -> Result<()> {
    let pages = options.size.0 as usize / PAGE_SIZE;
    if pages == 0 {
        bail!("--size is less than a page");
    }
    let content = Content { records: Records::new(7), noise: options.noise };
    let mut memory = vec![0u8; pages * PAGE_SIZE];
    let mut record = Vec::new();
    for (page, bytes) in memory.chunks_exact_mut(PAGE_SIZE).enumerate() {
        for (part, slot) in bytes.chunks_exact_mut(RECORD_BYTES).enumerate() {
            content.fill((page * RECORDS_PER_PAGE + part) as u64, &mut record);
            slot.copy_from_slice(&record);
        }
    }
    let mut random = Random::new(3);
    let pagemap = Pagemap::open()?;
    let start = memory.as_ptr() as usize;
    let mut misses = 0;
    let mut latencies = Histogram::default();
    let started = Instant::now();
    let mut pages_read = 0;
    while started.elapsed() < Duration::from_secs_f64(options.seconds) {
        // A batch between two looks at the clock.
        for _ in 0..256 {
            let page = match options.in_order {
                true => pages_read as usize % pages,
                false => random.below(pages as u64) as usize,
            };
            let part = random.below(RECORDS_PER_PAGE as u64) as usize;
            let at = page * PAGE_SIZE + part * RECORD_BYTES;
            content.fill((page * RECORDS_PER_PAGE + part) as u64, &mut record);
            let missing = !options.in_order && !pagemap.is_present(start + at)?;
            if missing {
                let touched = Instant::now();
                black_box(memory[at]);
                latencies.record(touched.elapsed().as_nanos() as u64, 1);
                misses += 1;
            }
            if black_box(&memory[at..at + RECORD_BYTES]) != record {
                bail!("page {page} does not hold what was written");
            }
            pages_read += 1;
        }
    }
    print(&TouchResult::since(started, pages_read, misses, &latencies))?;
    thread::sleep(Duration::from_secs(options.rest_seconds));
    black_box(&memory);
    Ok(())
}

/// What memory is filled with, 1 KiB at a time.
struct Content {
    records: Records,
    noise: bool,
}

impl Content {
    fn fill(&self, index: u64, out: &mut Vec<u8>) {
        if !self.noise {
            self.records.fill(index, 0, out);
            return;
        }
        out.clear();
        let words = (RECORD_BYTES / 8) as u64;
        for word in 0..words {
            out.extend(mix(index * words + word).to_le_bytes());
        }
    }
}

/// Sizes and lengths of `direct-read`.
#[derive(clap::Args)]
pub(crate) struct DirectOptions {
    /// Where to make the file, which has no name
    #[arg(long)]
    directory: PathBuf,
    /// Its size
    #[arg(long, default_value = "256MiB")]
    size: ByteSize,
    /// Seconds of reading blocks of 4 KiB in random order
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
}

/// Reads 4 KiB of a file at a time with `O_DIRECT`: what the device needs without
/// anybody's help. All reads are misses.
pub(crate) fn direct_read(options: &DirectOptions) -> Result<()> {
    const WRITE_BYTES: usize = 1 << 20;
    let writes = options.size.0 as usize / WRITE_BYTES;
    if writes == 0 {
        bail!("--size is less than a MiB");
    }
    let path = options.directory.join(format!("direct-{}", std::process::id()));
    let file = FileBacking::create(&path, options.size.0)
        .with_context(|| format!("make {}", path.display()))?;
    let content = Content { records: Records::new(7), noise: true };
    let mut record = Vec::new();
    let mut page = PageBuffer::zeroed();
    let pages = (writes * WRITE_BYTES / PAGE_SIZE) as u64;
    for number in 0..pages {
        for (part, slot) in page.0.chunks_exact_mut(RECORD_BYTES).enumerate() {
            content.fill(number * RECORDS_PER_PAGE as u64 + part as u64, &mut record);
            slot.copy_from_slice(&record);
        }
        file.write_at(number * PAGE_SIZE as u64, &page.0).context("write the file")?;
    }
    let mut random = Random::new(3);
    let mut latencies = Histogram::default();
    let started = Instant::now();
    let mut pages_read = 0;
    while started.elapsed() < Duration::from_secs_f64(options.seconds) {
        let number = random.below(pages);
        let touched = Instant::now();
        file.read_at(number * PAGE_SIZE as u64, &mut page.0).context("read the file")?;
        latencies.record(touched.elapsed().as_nanos() as u64, 1);
        content.fill(number * RECORDS_PER_PAGE as u64, &mut record);
        if page.0[..RECORD_BYTES] != record {
            bail!("block {number} does not hold what was written");
        }
        pages_read += 1;
    }
    print(&TouchResult::since(started, pages_read, pages_read, &latencies))
}

const RECORDS_PER_PAGE: usize = PAGE_SIZE / RECORD_BYTES;

/// Prints the monotonic clock at the start of `main`, in nanoseconds: what
/// starting a program costs, seen from the program.
pub(crate) fn now() {
    println!("{}", monotonic_ns());
}

/// The clock that [`now`] prints.
pub(crate) fn monotonic_ns() -> i64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn print<T: Serialize>(result: &T) -> Result<()> {
    println!("{}", serde_json::to_string(result)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_page_is_noticed() {
        let mut chunk = vec![0u8; 4 * PAGE_SIZE];
        for (page, bytes) in chunk.chunks_exact_mut(PAGE_SIZE).enumerate() {
            bytes[..8].copy_from_slice(&stamp(5, page).to_le_bytes());
        }
        assert!(check_chunk(Some((5, chunk.clone()))).is_ok());
        assert!(check_chunk(Some((6, chunk.clone()))).is_err());
        chunk[2 * PAGE_SIZE] ^= 1;
        assert!(check_chunk(Some((5, chunk))).is_err());
    }
}
