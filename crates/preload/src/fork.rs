//! A forked child: its own agent, before `fork` returns.
//!
//! Only for `fork` itself. A child of `vfork` or `posix_spawn` shares its
//! parent's memory until it executes something; a child of a bare `clone` runs
//! no handlers and has no agent (`docs/agent.md`).

use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::wire::{CONTROL_BYTES, HelloKind};

use crate::block::{self, OUTCOME_PENDING};
use crate::kernel;
use crate::records;
use crate::start;

/// How long `fork` waits in the child. The agent goes on trying afterwards.
const FORK_TIME: Duration = Duration::from_secs(5);

/// Makes forks known; false: no memory for it.
pub(crate) fn register() -> bool {
    // SAFETY: the handler is a function of this library, which is never
    // unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) == 0 }
}

/// Runs in the child, on its only thread. The wiped block says that there is
/// neither agent nor control block.
extern "C" fn in_child() {
    let Some(block) = block::existing() else { return };
    if block.managed.load(Ordering::SeqCst) == 0 {
        return;
    }
    // SAFETY: the two places of control blocks: in this process nothing refers
    // to them, since the pointer to the one in use was wiped and the child has
    // no other thread. What is unmapped here is the parent's.
    if !unsafe { kernel::blank(block.settings().places, 2 * CONTROL_BYTES) } {
        start::say("strata: no memory for the agent of a forked process\n");
        return;
    }
    let here = 0_u8;
    records::record_thread(block, (&raw const here) as u64);
    if start::start_agent(block, HelloKind::Forked).is_none() {
        start::say("strata: no thread for the agent of a forked process\n");
        return;
    }
    let outcome = start::wait(block, FORK_TIME);
    if outcome == OUTCOME_PENDING {
        start::say("strata: no answer from the daemon to a forked process; it goes on trying\n");
    } else {
        start::complain_of(outcome);
    }
}
