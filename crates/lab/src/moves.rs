//! Whether `UFFDIO_MOVE` says what it did.
//!
//! One thread writes for the first time to pages that are mapped to the zero page,
//! while another moves them. The page table tells afterwards what was moved.

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    io,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};
use strata_sys::{OwnMemory, Process, Userfaultfd};
use strata_units::PageBuffer;

/// Pages moved in one round.
const PAGES: usize = 8192;
/// The writer is at most so far ahead of the mover.
const AHEAD: usize = 16;

/// Lengths of `moves`.
#[derive(clap::Args)]
pub(crate) struct MovesOptions {
    /// How often 8192 pages are moved
    #[arg(long, default_value_t = 100)]
    rounds: usize,
}

#[derive(Debug, Default, Serialize)]
struct MovesResult {
    moves: u64,
    /// Said not to have been moved, and moved all the same.
    denied: u64,
    /// What was said of moves that failed, and how often.
    errors: BTreeMap<String, u64>,
}

pub(crate) fn run(options: &MovesOptions) -> Result<()> {
    let mut result = MovesResult::default();
    for _ in 0..options.rounds {
        let source = OwnMemory::create(PAGES).context("map memory")?;
        let target = OwnMemory::create(PAGES).context("map memory")?;
        // Dropped first: giving registered memory back waits for its reader.
        let uffd = Userfaultfd::for_own_process()
            .map_err(|error| anyhow!("no userfaultfd for this process: {error:?}"))?;
        uffd.register(target.range());
        for page in 0..PAGES {
            source.touch(page);
        }
        let moving = AtomicUsize::new(0);
        thread::scope(|scope| -> io::Result<()> {
            scope.spawn(|| write_ahead(&source, &moving));
            let outcome = move_all(&uffd, &source, &target, &moving, &mut result);
            moving.store(PAGES, Ordering::Relaxed);
            outcome
        })?;
    }
    println!("{}", serde_json::to_string(&result)?);
    Ok(())
}

fn write_ahead(source: &OwnMemory, moving: &AtomicUsize) {
    let content = PageBuffer::zeroed();
    for page in 0..PAGES {
        while page > moving.load(Ordering::Relaxed) + AHEAD {
            std::hint::spin_loop();
        }
        source.write_page(page, &content);
    }
}

fn move_all(
    uffd: &Userfaultfd,
    source: &OwnMemory,
    target: &OwnMemory,
    moving: &AtomicUsize,
    result: &mut MovesResult,
) -> io::Result<()> {
    for page in 0..PAGES {
        moving.store(page, Ordering::Relaxed);
        result.moves += 1;
        let code = target.move_in(uffd, page, source, source.address(page));
        if code == 0 {
            continue;
        }
        let error = io::Error::from_raw_os_error(-code).to_string();
        *result.errors.entry(error).or_default() += 1;
        if Process::open(std::process::id())?.is_page_present(target.address(page))? {
            result.denied += 1;
        }
    }
    Ok(())
}
