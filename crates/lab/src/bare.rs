//! What a fault costs that a userfaultfd serves and nothing else does: the least
//! that a fault of Strata could cost on this machine.
//!
//! One thread touches pages, another waits for its faults as Strata's handler
//! does, and puts the same page in place each time: no daemon, no page map, no
//! decompression, no eviction.

use crate::histogram::Histogram;
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::{
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};
use strata_sys::{
    Event, Fill, OwnMemory, Poller, Registration, SharedMemory, Userfaultfd, pin_current_thread,
};
use strata_units::PageBuffer;

/// Pages touched before they are dropped again.
const PAGES: usize = 4096;
const MESSAGES: usize = 16;
const CPU: u32 = 0;
/// How often the serving thread looks whether the other has finished.
const LOOK: Duration = Duration::from_millis(100);

/// How long.
#[derive(clap::Args)]
pub(crate) struct BareOptions {
    /// Seconds of touching pages
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
}

/// What the thread that touched saw.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct BareResult {
    pub faults: u64,
    pub p50_us: f64,
    pub p99_us: f64,
}

pub(crate) fn run(options: &BareOptions) -> Result<()> {
    let result = measure(Duration::from_secs_f64(options.seconds))?;
    println!("{}", serde_json::to_string(&result)?);
    Ok(())
}

/// A userfaultfd with which all of `memories` is registered.
pub(crate) fn userfaultfd_over(memories: &[&OwnMemory]) -> Result<Userfaultfd> {
    let uffd = Userfaultfd::for_own_process()
        .map_err(|error| anyhow::anyhow!("open a userfaultfd (root may): {error:?}"))?;
    for memory in memories {
        if uffd.register(memory.range()) != Registration::Done {
            bail!("memory of this process cannot be registered");
        }
    }
    Ok(uffd)
}

/// Touches pages for `time`.
pub(crate) fn measure(time: Duration) -> Result<BareResult> {
    let memory = OwnMemory::create(PAGES)?;
    let uffd = userfaultfd_over(&[&memory])?;
    let latencies = thread::scope(|scope| {
        let toucher = scope.spawn(|| touch(&memory, time));
        let served = serve(&uffd, || toucher.is_finished());
        let touched = toucher.join();
        served
            .and_then(|()| touched.map_err(|_| anyhow::anyhow!("the touching thread panicked"))?)
    });
    // Dropping the memory would wait for somebody to read of it.
    drop(uffd);
    let latencies = latencies?;
    Ok(BareResult {
        faults: latencies.counts().map(|(_, times)| times).sum(),
        p50_us: latencies.quantile_us(0.5),
        p99_us: latencies.quantile_us(0.99),
    })
}

fn touch(memory: &OwnMemory, time: Duration) -> Result<Histogram> {
    pin_current_thread(CPU);
    let mut latencies = Histogram::default();
    let until = Instant::now() + time;
    while Instant::now() < until {
        for page in 0..PAGES {
            let started = Instant::now();
            memory.touch(page);
            latencies.record(started.elapsed().as_nanos() as u64, 1);
        }
        memory.discard(0, PAGES)?;
    }
    Ok(latencies)
}

fn serve(uffd: &Userfaultfd, is_over: impl Fn() -> bool) -> Result<()> {
    pin_current_thread(CPU);
    let ring = SharedMemory::create("bare-ring", Userfaultfd::ring_bytes(MESSAGES) as u64)?;
    let poller = Poller::new([uffd.as_fd()])?;
    let mut page = PageBuffer::zeroed();
    page.0.fill(7);
    while !is_over() {
        if !poller.wait(Some(LOOK))?[0] {
            continue;
        }
        let count = uffd.read_messages(&ring, 0, MESSAGES).unwrap_or(0);
        for index in 0..count {
            if let Some(Event::Fault { address, .. }) = Userfaultfd::message(&ring, 0, index) {
                let filled = uffd.copy(address, &page);
                if filled != (Fill::Done { pages: 1 }) {
                    bail!("a page could not be put in place: {filled:?}");
                }
            }
        }
    }
    Ok(())
}
