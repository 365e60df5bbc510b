//! Memory that the host of this virtual machine has taken back.
//!
//! Where a guest tells its host what is free (free page reporting), the first touch
//! of it costs what the host takes to give it again, many times what the kernel does
//! for a page. Whoever needs fresh memory is measured with that, and
//! whoever finds what another has just freed is not. So nothing is reported while a
//! bench runs, and what is free was touched before.

use anyhow::Result;
use std::{fs, hint::black_box, path::PathBuf, time::Instant};
use strata_units::PAGE_SIZE;

use crate::{
    interrupt,
    janitor::{Janitor, Registered, Undo},
    process::available_bytes,
    progress::Progress,
};

/// The smallest block that is reported, as a power of two of pages.
const ORDER: &str = "/sys/module/page_reporting/parameters/page_reporting_order";
/// One more than the kernel's largest block has.
const NEVER: u32 = 11;
/// Left to everybody else.
const SPARED_BYTES: u64 = 2 << 30;
/// From here on an allocation is a mapping of its own.
const CHUNK_BYTES: usize = 64 << 20;

/// Keeps what the machine has until this is dropped.
pub(crate) struct Kept {
    _order: Option<Registered>,
    /// What was done, for the report.
    pub said: String,
}

/// Has nothing reported from now on, and touches what is free.
pub(crate) fn keep(janitor: &Janitor) -> Result<Kept> {
    let not = |said: &str| Ok(Kept { _order: None, said: said.to_owned() });
    let order = fs::read_to_string(ORDER).ok().and_then(|text| text.trim().parse::<u32>().ok());
    let Some(order) = order else {
        return not("The kernel has no free page reporting.");
    };
    // None has registered for it.
    if order >= NEVER {
        return not("No free memory is reported to a host.");
    }
    let undo = Undo::WriteBack { path: PathBuf::from(ORDER), value: order.to_string() };
    let registered = janitor.register(undo)?;
    if let Err(error) = fs::write(ORDER, NEVER.to_string()) {
        eprintln!("free page reporting cannot be turned off: {error}");
        return not("Free memory was reported to the host: the first touch of it costs more.");
    }
    let free = available_bytes()?.saturating_sub(SPARED_BYTES) as usize;
    let progress = Progress::start("touching free memory");
    let first = touch(free)?;
    let again = touch(free)?;
    progress.finish(&format!("{} MiB of free memory touched", free >> 20));
    let said = format!(
        "Free page reporting was off, and what was free had been touched: {first:.2} µs a page, {again:.2} once more."
    );
    Ok(Kept { _order: Some(registered), said })
}

/// Touches so much, and gives it back; what a page took, in microseconds.
fn touch(bytes: usize) -> Result<f64> {
    let began = Instant::now();
    let mut held = Vec::new();
    for _ in 0..bytes / CHUNK_BYTES {
        interrupt::check()?;
        held.push(black_box(vec![1u8; CHUNK_BYTES]));
    }
    let pages = held.len() * CHUNK_BYTES / PAGE_SIZE;
    Ok(began.elapsed().as_secs_f64() * 1e6 / pages.max(1) as f64)
}
