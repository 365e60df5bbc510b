//! What each way to keep a page makes of the pages of a file, and what it costs:
//!
//! ```text
//! cargo run --release -p strata-store --example codecs -- FILE
//! ```
//!
//! FILE is any bytes, taken as 4 KiB pages: a memory image of a program, say. A
//! store gets up to 20,000 of them, evenly spread. The times are those of whole
//! `put` and `get` calls, with hashing and bookkeeping; the line "staged" shows
//! how much of them is not packing. Duplicates are left out. No test: it asserts
//! that every page comes back, and no time.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::error::Error;
use std::time::{Duration, Instant};

use strata_store::{Put, Store, StoreConfig, Training, prepare_thread};
use strata_units::Handle;

type Page = [u8; 4096];

const MOST_PAGES: usize = 20_000;
/// Rounds of each way; the fastest counts.
const ROUNDS: usize = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("say which file: codecs -- FILE")?;
    let bytes = std::fs::read(path)?;
    let mut seen = HashSet::new();
    let (all, _) = bytes.as_chunks::<4096>();
    let one_value = |page: &Page| page.iter().all(|byte| *byte == page[0]);
    let pages: Vec<&Page> =
        all.iter().filter(|&page| !one_value(page) && seen.insert(page)).collect();
    let step = pages.len().div_ceil(MOST_PAGES).max(1);
    let pages: Vec<&Page> = pages.into_iter().step_by(step).collect();
    if pages.is_empty() {
        return Err("the file has no page that is not one value throughout".into());
    }
    println!("{} distinct pages, of {} in the file", pages.len(), all.len());
    prepare_thread();

    let dictionary = Store::create(StoreConfig::default())?;
    let trainees: Vec<Handle> =
        pages.iter().map(|page| dictionary.put(page, Put::Fast)).collect::<Result<_, _>>()?;
    let began = Instant::now();
    let training = dictionary.train_dictionary();
    println!("training took {} ms: {training}", began.elapsed().as_millis());
    for handle in trainees {
        dictionary.release(handle);
    }
    dictionary.reap();

    println!("{:12} {:>6} {:>8} {:>8} {:>8}", "", "ratio", "in slots", "put, µs", "get, µs");
    let plain = Store::create(StoreConfig::default())?;
    measure("staged", &plain, Put::Staged, &pages)?;
    measure("lz4", &plain, Put::Fast, &pages)?;
    measure("zstd", &plain, Put::Zstd, &pages)?;
    if matches!(training, Training::Judged { adopted: true, .. }) {
        measure("dictionary", &dictionary, Put::Fast, &pages)?;
    }
    Ok(())
}

/// Puts, reads and releases all pages a few times; prints the best of each.
fn measure(name: &str, store: &Store, how: Put, pages: &[&Page]) -> Result<(), Box<dyn Error>> {
    let original = pages.len() as f64 * 4096.0;
    let (mut best_put, mut best_get) = (Duration::MAX, Duration::MAX);
    let (mut payload, mut slots) = (0, 0);
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let handles: Vec<Handle> =
            pages.iter().map(|page| store.put(page, how)).collect::<Result<_, _>>()?;
        best_put = best_put.min(began.elapsed());
        let stats = store.stats();
        (payload, slots) = (stats.payload_bytes, stats.dram_bytes);
        let mut out = [0; 4096];
        let began = Instant::now();
        for &handle in &handles {
            store.get(handle, &mut out)?;
            std::hint::black_box(&out);
        }
        best_get = best_get.min(began.elapsed());
        for (&handle, page) in handles.iter().zip(pages) {
            store.get(handle, &mut out)?;
            assert!(out == **page, "{handle:?} holds another page");
            store.release(handle);
        }
        store.reap();
        store.compact(0);
    }
    let each = |time: Duration| time.as_secs_f64() * 1e6 / pages.len() as f64;
    println!(
        "{name:12} {:6.2} {:8.2} {:8.2} {:8.2}",
        original / payload as f64,
        original / slots as f64,
        each(best_put),
        each(best_get),
    );
    Ok(())
}
