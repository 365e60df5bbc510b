//! `strata-lab contention`: how faults of one program go with more cores than
//! this machine has. Measures here what locks, wake-ups and pages cost, and puts
//! the figures into a queueing model ([`model`]).

mod model;

use crate::{bare, drawing::Drawing, records::RECORD_BYTES, records::Records, table::Table};
use anyhow::{Context, Result, anyhow, bail};
use model::{Costs, Outcome, Staff, simulate};
use std::{
    hint::black_box,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use strata_store::{Put, Store, StoreConfig, Training, prepare_thread};
use strata_sys::{Fill, OwnMemory, pin_current_thread};
use strata_units::{PAGE_SIZE, PageBuffer};

const THREADS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const FAULTS: u64 = 400_000;
const ROUNDS: u32 = 50_000;
const PAGES: usize = 8192;
/// As the product does it, and what more hands would bring.
const STAFFS: [(&str, Staff); 3] = [
    ("1 handler, 1 keeper (as built)", Staff { handlers: 1, keepers: 1 }),
    ("4 handlers, 1 keeper", Staff { handlers: 4, keepers: 1 }),
    ("8 handlers, 8 keepers", Staff { handlers: 8, keepers: 8 }),
];

/// What this machine cannot say by itself.
#[derive(clap::Args)]
pub(crate) struct ContentionOptions {
    /// A fault as its thread sees it, µs (`bench --only fault`): what the parts
    /// measured here do not explain of it counts as the handler's
    #[arg(long)]
    fault_us: f64,
    /// A thread's own work between two faults, µs
    #[arg(long, default_value_t = 5.0)]
    work_us: f64,
    /// Settling a page under the gate, µs: a guess, from profiles
    #[arg(long, default_value_t = 0.2)]
    settle_us: f64,
    /// Where the picture goes
    #[arg(long)]
    out: Option<PathBuf>,
}

pub(crate) fn run(options: &ContentionOptions) -> Result<()> {
    let costs = measure(options)?;
    println!("measured, in nanoseconds: {}", serde_json::to_string(&costs)?);
    let curves: Vec<Vec<Outcome>> = STAFFS
        .iter()
        .map(|(_, staff)| {
            THREADS.iter().map(|&threads| simulate(&costs, threads, *staff, FAULTS)).collect()
        })
        .collect();
    let mut header = vec!["threads".to_owned()];
    for (name, _) in STAFFS {
        header.push(format!("{name}: faults/s"));
        header.push("µs a fault".into());
        header.push("gate, handlers, keepers busy".into());
    }
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = Table::new(&header);
    for (at, threads) in THREADS.iter().enumerate() {
        let mut row = vec![threads.to_string()];
        for curve in &curves {
            let seen = &curve[at];
            row.push(format!("{:.0}k", seen.faults_per_second / 1000.0));
            row.push(format!("{:.1}", seen.fault_us));
            let percent = |share: f64| format!("{:.0} %", share * 100.0);
            let busy = [seen.gate_held, seen.handlers_busy, seen.keepers_busy].map(percent);
            row.push(busy.join(", "));
        }
        table.row(row);
    }
    println!("\n{}", table.markdown());
    if let Some(path) = &options.out {
        std::fs::write(path, draw(&curves)).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn measure(options: &ContentionOptions) -> Result<Costs> {
    let cpus = thread::available_parallelism().map_or(1, |cpus| cpus.get());
    if cpus < 2 {
        bail!("one core: nothing here is ever handed from one to another");
    }
    let (pack, unpack) = packing()?;
    let (copy, evict) = paging()?;
    let bare_us = bare::measure(Duration::from_secs(1))?.p50_us;
    // Beside the copy, a bare fault wakes two threads on the same core.
    let read = (bare_us * 1000.0 - copy - 2.0 * wake_up(0, 0)?).max(200.0);
    let unexplained = (options.fault_us - bare_us) * 1000.0 - unpack;
    if unexplained < 0.0 {
        bail!("--fault-us is less than the {bare_us:.1} of a bare fault and unpacking");
    }
    Ok(Costs {
        work: options.work_us * 1000.0,
        wake: wake_up(0, 1)?,
        read,
        lock: hand_over()?,
        unpack: unpack + unexplained,
        copy,
        evict,
        pack,
        settle: options.settle_us * 1000.0,
    })
}

fn per(started: Instant, count: usize) -> f64 {
    started.elapsed().as_nanos() as f64 / count as f64
}

/// From waking a thread until it runs: half a round trip between two threads.
fn wake_up(here: u32, there: u32) -> Result<f64> {
    let turn = AtomicU64::new(0);
    let main = thread::current();
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            pin_current_thread(there);
            for round in 0..u64::from(ROUNDS) {
                while turn.load(Ordering::Acquire) != 2 * round + 1 {
                    thread::park();
                }
                turn.store(2 * round + 2, Ordering::Release);
                main.unpark();
            }
        });
        pin_current_thread(here);
        let started = Instant::now();
        for round in 0..u64::from(ROUNDS) {
            turn.store(2 * round + 1, Ordering::Release);
            other.thread().unpark();
            while turn.load(Ordering::Acquire) != 2 * round + 2 {
                thread::park();
            }
        }
        Ok(per(started, 2 * ROUNDS as usize))
    })
}

/// Taking a lock that is taken and let go on another core all the time.
fn hand_over() -> Result<f64> {
    let lock = Mutex::new(0u64);
    let over = AtomicBool::new(false);
    let take = |cpu, rounds: u32| {
        pin_current_thread(cpu);
        let started = Instant::now();
        let mut taken = 0;
        while taken < rounds && !over.load(Ordering::Relaxed) {
            *lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner) += 1;
            taken += 1;
        }
        over.store(true, Ordering::Relaxed);
        per(started, taken.max(1) as usize)
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| take(1, u32::MAX));
        let ours = scope.spawn(|| take(0, 20 * ROUNDS));
        let (ours, other) = (ours.join(), other.join());
        let panicked = |_| anyhow!("a thread panicked");
        Ok(ours.map_err(panicked)?.max(other.map_err(panicked)?))
    })
}

/// Packing and unpacking pages of records, as a store does after training.
fn packing() -> Result<(f64, f64)> {
    prepare_thread();
    let records = Records::new(5);
    let mut record = Vec::new();
    let mut pages = vec![[0u8; PAGE_SIZE]; PAGES];
    let slots = pages.iter_mut().flat_map(|page| page.chunks_exact_mut(RECORD_BYTES));
    for (number, slot) in slots.enumerate() {
        records.fill(number as u64, 0, &mut record);
        slot.copy_from_slice(&record);
    }
    let store = Store::create(StoreConfig::default())?;
    for page in &pages[..PAGES / 2] {
        store.put(page, Put::Fast)?;
    }
    if !matches!(store.train_dictionary(), Training::Judged { adopted: true, .. }) {
        bail!("no dictionary was trained");
    }
    let second = &pages[PAGES / 2..];
    let started = Instant::now();
    let handles: Vec<_> =
        second.iter().map(|page| store.put(page, Put::Fast)).collect::<Result<_, _>>()?;
    let pack = per(started, second.len());
    let mut out = [0u8; PAGE_SIZE];
    let started = Instant::now();
    for &handle in &handles {
        store.get(handle, &mut out)?;
        black_box(&out);
    }
    Ok((pack, per(started, handles.len())))
}

/// Putting pages in place, and moving them out while the program's other core
/// runs.
fn paging() -> Result<(f64, f64)> {
    let (memory, target) = (OwnMemory::create(PAGES)?, OwnMemory::create(PAGES)?);
    let uffd = bare::userfaultfd_over(&[&memory, &target])?;
    let mut page = PageBuffer::zeroed();
    page.0.fill(7);
    let started = Instant::now();
    for at in 0..PAGES {
        if uffd.copy(memory.address(at), &page) != (Fill::Done { pages: 1 }) {
            bail!("a page could not be put in place");
        }
    }
    let copy = per(started, PAGES);
    let over = AtomicBool::new(false);
    let evict = thread::scope(|scope| {
        scope.spawn(|| {
            pin_current_thread(0);
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let mover = scope.spawn(|| {
            pin_current_thread(1);
            let started = Instant::now();
            let failed =
                (0..PAGES).find(|&at| target.move_in(&uffd, at, &memory, memory.address(at)) != 0);
            failed.is_none().then(|| per(started, PAGES))
        });
        let moved = mover.join();
        over.store(true, Ordering::Relaxed);
        moved
    });
    // Dropping the memory would wait for somebody to read of it.
    drop(uffd);
    let evict = evict.map_err(|_| anyhow!("a thread panicked"))?;
    Ok((copy, evict.context("pages could not be moved (Linux 6.8 can)")?))
}

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 80.0;
const BOTTOM: f64 = 400.0;
const TOP: f64 = 90.0;
const COLOURS: [&str; 3] = ["#0d9488", "#2563eb", "#9333ea"];

fn draw(curves: &[Vec<Outcome>]) -> String {
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    drawing.text(LEFT, 36.0, "h", "Faults of one program, simulated");
    drawing.text(
        LEFT,
        58.0,
        "s",
        "Thousands of faults a second, by threads that fault at once, a core each",
    );
    let most = curves.iter().flatten().map(|seen| seen.faults_per_second).fold(1.0, f64::max);
    let x = |at: usize| LEFT + 40.0 + at as f64 * 90.0;
    let y = |speed: f64| BOTTOM - speed / most * (BOTTOM - TOP - 30.0);
    for step in 0..=4 {
        let speed = most * f64::from(step) / 4.0;
        drawing.line((LEFT, y(speed)), (x(THREADS.len() - 1), y(speed)), "#e2e8f0", 1.0);
        drawing.text(LEFT - 8.0, y(speed) + 4.0, "n e", &format!("{:.0}k", speed / 1000.0));
    }
    for (at, threads) in THREADS.iter().enumerate() {
        drawing.text(x(at) - 4.0, BOTTOM + 20.0, "n", &threads.to_string());
    }
    for (number, ((name, _), curve)) in STAFFS.iter().zip(curves).enumerate() {
        let points: Vec<(f64, f64)> =
            curve.iter().enumerate().map(|(at, seen)| (x(at), y(seen.faults_per_second))).collect();
        for pair in points.windows(2) {
            drawing.line(pair[0], pair[1], COLOURS[number], 2.5);
        }
        let at = TOP + number as f64 * 20.0;
        drawing.line((LEFT + 20.0, at), (LEFT + 45.0, at), COLOURS[number], 2.5);
        drawing.text(LEFT + 52.0, at + 4.0, "n", name);
    }
    drawing.finish()
}
