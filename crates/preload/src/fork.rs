//! A forked child: its own agent, before `fork` returns.
//!
//! For every fork of the C library, `daemon` and `forkpty` included. A child of `vfork` or `posix_spawn` shares its
//! parent's memory until it executes something; a child of a bare `clone` (or
//! of `_Fork`) runs no handlers and has no agent (`docs/agent.md`).
//!
//! The handler may run before other libraries' handlers have, an allocator's that
//! holds its locks across the fork, say: it allocates nothing.

use core::ffi::{c_int, c_void};
use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::wire::{CONTROL_BYTES, HelloKind};

use crate::block::{self, OUTCOME_FAILED, OUTCOME_TRYING};
use crate::handshake::Failure;
use crate::kernel;
use crate::next::Next;
use crate::records;
use crate::start;

/// How long `fork` waits in the child for a daemon that is slow to answer; nothing
/// is lost when it does not: the agent goes on, and what the child touches meanwhile
/// is served as its parent's. One that cannot be reached is not waited for.
const FORK_TIME: Duration = Duration::from_millis(200);

/// glibc's own name for it; other C libraries have none such.
static REGISTER: Next = Next::new(c"__register_atfork");

/// `__register_atfork`: handlers before, in the parent, in the child; the library
/// that they are of.
type Register = unsafe extern "C" fn(
    Option<extern "C" fn()>,
    Option<extern "C" fn()>,
    Option<extern "C" fn()>,
    *mut c_void,
) -> c_int;

/// Makes forks known; false: no memory for it.
pub(crate) fn register() -> bool {
    let address = REGISTER.address();
    if address.is_null() {
        return false;
    }
    // SAFETY: the C library's function of this name has this signature.
    let register = unsafe { core::mem::transmute::<*mut c_void, Register>(address) };
    // SAFETY: the handler is a function of this library, which is never unloaded:
    // so it need not say which.
    unsafe { register(None, None, Some(start_in_child), core::ptr::null_mut()) == 0 }
}

/// Runs in the child, on the thread that forked. The wiped block says that
/// there is neither agent nor control block.
extern "C" fn start_in_child() {
    let Some(block) = block::existing() else { return };
    if block.managed.load(Ordering::SeqCst) == 0 {
        return;
    }
    // SAFETY: the two places of control blocks: in this process nothing refers
    // to them, since the pointer to the one in use was wiped. What is unmapped
    // here is the parent's.
    if !unsafe { kernel::blank(block.settings().places, 2 * CONTROL_BYTES) } {
        start::say("strata: no memory for the agent of a forked process\n");
        return;
    }
    let here = 0_u8;
    records::record_thread(block, (&raw const here) as u64);
    if !start::start_agent(block, HelloKind::Forked) {
        start::say("strata: no thread for the agent of a forked process\n");
        return;
    }
    let outcome = start::wait(block, FORK_TIME);
    if outcome == OUTCOME_TRYING {
        start::say(
            "strata: a forked process cannot reach the daemon (has it ended, or was a network namespace left?); it runs on in its parent's memory cgroup, and goes on trying\n",
        );
    } else if outcome != OUTCOME_FAILED + Failure::NotAllowed as u32
        && outcome != OUTCOME_FAILED + Failure::Refused as u32
    {
        // Of one that is refused the daemon tells: a program that serves each client by a
        // child would say so for each.
        start::complain_of(outcome);
    }
}
