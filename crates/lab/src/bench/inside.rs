//! Guests with a Strata inside, as several rows have them: a machine with an (emulated)
//! NVDIMM, and what one asks of it.

use crate::guest::{
    machine::{Guest, Shape},
    site::PROGRAMS,
    words::Order,
};
use anyhow::{Error, Result};
use serde_json::Value;
use std::time::Duration;

pub(super) const ACCELERATOR: &str = "tcg,thread=multi,tb-size=256";
pub(super) const PATIENCE: Duration = Duration::from_secs(180);
/// What is to be said beside every figure of an emulated guest.
pub(super) const TCG: &str = "The guest is emulated (TCG) and so is its persistent memory, which is \
    the host's DRAM. What a request costs and what a fault costs are both dearer than on hardware, \
    and not by the same factor: ratios say that it works and what it costs in such a guest, not \
    what hardware would show.";

/// Two processors, an NVDIMM, and Strata's programs.
pub(super) fn shape(name: &str, memory_mebibytes: u64, nvdimm_mebibytes: u64) -> Shape {
    Shape {
        nvdimm_mebibytes: Some(nvdimm_mebibytes),
        programs: PROGRAMS,
        processors: 2,
        ..Shape::new(name, memory_mebibytes)
    }
}

/// A command for the guest's shell; what it printed.
pub(super) fn run(guest: &mut Guest, line: &str) -> Result<String> {
    guest.ask(&Order::Run { line: line.into() }, PATIENCE)
}

/// Starts Strata in the guest.
pub(super) fn strata(guest: &mut Guest, lines: &str) -> Result<()> {
    let _: Value = guest.ask(&Order::Strata { lines: lines.into() }, PATIENCE)?;
    Ok(())
}

/// Whether a guest has said that a value is not what was written.
pub(super) fn is_wrong(error: &Error) -> bool {
    format!("{error:#}").contains("wrong value")
}
