//! Memory that the host of this virtual machine has taken back.
//!
//! Where a guest tells its host what is free (free page reporting), the first touch
//! of it costs what the host takes to give it again: 10 µs a page instead of 0.2
//! (docs/measurements.md). Whoever needs fresh memory is measured with that, and
//! whoever finds what another has just freed is not. So nothing is reported while a
//! bench runs, and what is free was touched before.

use anyhow::Result;
use std::{fs, hint::black_box, path::PathBuf};

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
    pub said: &'static str,
}

/// Has nothing reported from now on, and touches what is free.
pub(crate) fn keep(janitor: &Janitor) -> Result<Kept> {
    let not = |said| Ok(Kept { _order: None, said });
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
    touch_free()?;
    Ok(Kept {
        _order: Some(registered),
        said: "Free page reporting was off, and what was free had been touched.",
    })
}

fn touch_free() -> Result<()> {
    let free = available_bytes()?.saturating_sub(SPARED_BYTES);
    let chunks = free as usize / CHUNK_BYTES;
    let progress = Progress::start("touching free memory");
    let mut held = Vec::with_capacity(chunks);
    for _ in 0..chunks {
        interrupt::check()?;
        held.push(black_box(vec![1u8; CHUNK_BYTES]));
    }
    progress.finish(&format!("{} MiB of free memory touched", held.len() * (CHUNK_BYTES >> 20)));
    Ok(())
}
