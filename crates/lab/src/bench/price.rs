//! What one fault costs the thread that has it, in each setup: a program reads
//! its pages at random with half of its memory resident, on the server's core.
//!
//! Wall time, so whatever the thread waits for is in it: the kernel's reclaim,
//! Strata's handler on the same core, decompression. What the program needs for
//! the same reads without a limit is taken off.

use super::{
    Bench,
    parts::{output_of, pinned, subject},
};
use crate::{
    alloc::TouchResult,
    interrupt,
    progress::Progress,
    stage::{Setup, Surroundings},
};
use anyhow::{Context, Result, bail};
use serde::Serialize;

/// Samples of each setup, in microseconds a fault.
#[derive(Clone, Default, Debug, Serialize)]
pub(super) struct Prices {
    pub zram: Vec<f64>,
    pub zswap: Vec<f64>,
    pub strata: Vec<f64>,
}

/// Rounds; more say nothing new.
const ROUNDS: usize = 3;

impl Prices {
    /// None where it could not be measured. memtierd's faults are zram's.
    pub(super) fn median_us(&self, kind: Setup) -> Option<f64> {
        let samples = match kind {
            Setup::DramOnly => return None,
            Setup::Zram { .. } | Setup::Memtierd { .. } => &self.zram,
            Setup::Zswap { .. } => &self.zswap,
            Setup::Strata { .. } => &self.strata,
        };
        crate::statistics::spread(samples).map(|spread| spread.median)
    }
}

/// Measures all setups in turn. What cannot be measured is reported to
/// `missing` with its reason.
pub(super) fn measure(bench: &Bench, missing: &mut dyn FnMut(String)) -> Result<Prices> {
    let (size_bytes, seconds): (u64, &str) =
        if bench.quick { (64 << 20, "1") } else { (256 << 20, "3") };
    let half = size_bytes / 2;
    let setups = [
        Setup::Zram { resident_limit_bytes: half },
        Setup::Zswap { resident_limit_bytes: half },
        Setup::Strata { dram_bytes: half + size_bytes / 4 },
    ];
    let mut prices = Prices::default();
    let progress = Progress::start("price of a fault");
    for round in 0..bench.repetitions.min(ROUNDS) {
        let native = touch(bench, Setup::DramOnly, size_bytes, seconds)?;
        for setup in setups {
            interrupt::check()?;
            let found = touch(bench, setup, size_bytes, seconds)
                .and_then(|seen| price_us(&seen, native.pages_per_second));
            let samples = match setup {
                Setup::Zswap { .. } => &mut prices.zswap,
                Setup::Strata { .. } => &mut prices.strata,
                _ => &mut prices.zram,
            };
            match found {
                Ok(price) => samples.push(price),
                // What one round meets (no privileges) the next would too.
                Err(error) if round == 0 => {
                    missing(format!("price of a fault, {}: {error:#}", setup.name()));
                }
                Err(_) => {}
            }
        }
    }
    progress.finish(&format!(
        "price of a fault: zram {}, zswap {}, Strata {} µs",
        said(&prices.zram),
        said(&prices.zswap),
        said(&prices.strata)
    ));
    Ok(prices)
}

/// Median and spread, or a dash.
pub(super) fn said(samples: &[f64]) -> String {
    crate::statistics::spread(samples).map_or_else(|| "–".to_owned(), |spread| spread.to_string())
}

fn price_us(seen: &TouchResult, native_per_second: f64) -> Result<f64> {
    if seen.misses == 0 {
        bail!("the limit did not bind: no page had to be brought back");
    }
    let native_seconds = seen.pages_read as f64 / native_per_second;
    Ok((seen.seconds - native_seconds) * 1e6 / seen.misses as f64)
}

fn touch(bench: &Bench, setup: Setup, size_bytes: u64, seconds: &str) -> Result<TouchResult> {
    let around =
        Surroundings::start(&bench.janitor, setup, "price", size_bytes, &bench.plan.binaries)?;
    let size = format!("{size_bytes} bytes");
    let child = subject(around.wrapping(), &["touch", "--size", &size, "--seconds", seconds])?;
    let text = output_of(pinned(bench, child)?);
    around.stop()?;
    serde_json::from_str(&text?).context("read what touch printed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_price_is_what_faults_add() {
        let seen = TouchResult {
            pages_read: 1000,
            seconds: 0.010,
            pages_per_second: 100_000.0,
            misses: 500,
            miss_p50_us: 0.0,
            miss_p99_us: 0.0,
        };
        // 10 ms, 2 of them for the reading itself: 8 ms for 500 faults.
        let price = price_us(&seen, 500_000.0).expect("there were faults");
        assert!((price - 16.0).abs() < 1e-9, "{price}");
        assert!(price_us(&TouchResult { misses: 0, ..seen }, 1.0).is_err());
    }
}
