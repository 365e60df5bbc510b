//! Ctrl-C and SIGTERM: noticed, not obeyed at once, so that every guard on the
//! way out restores what it changed.

use anyhow::{Context, Result, bail};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering::Relaxed},
};

static REQUESTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From here on the first signal only sets a flag; a second one ends the
/// process (the janitor then restores).
pub(crate) fn install() -> Result<()> {
    let requested = REQUESTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, 130, Arc::clone(requested))
            .and_then(|_| flag::register(signal, Arc::clone(requested)))
            .context("catch interrupts")?;
    }
    Ok(())
}

/// Whether someone wants this to end.
pub(crate) fn requested() -> bool {
    REQUESTED.get().is_some_and(|flag| flag.load(Relaxed))
}

/// An error when someone wants this to end.
pub(crate) fn check() -> Result<()> {
    if requested() {
        bail!("interrupted");
    }
    Ok(())
}
