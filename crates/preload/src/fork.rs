//! A forked child: its own agent, before `fork` returns.
//!
//! Only for `fork` itself. A child of `vfork` or `posix_spawn` shares its
//! parent's memory until it executes something; a child of a bare `clone` (or
//! of `_Fork`) runs no handlers and has no agent (`docs/agent.md`).
//!
//! Starting a thread allocates, and an allocator may hold its locks from its
//! fork handler in the parent to the one in the child. Handlers in the child
//! run in the order of their registration, and ours may come first. So `fork`
//! is wrapped, and the agent started when all handlers have run; our own
//! handler serves only the forks that the C library makes itself (`daemon`,
//! `forkpty`).

use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use strata_units::wire::{CONTROL_BYTES, HelloKind};

use crate::block::{self, OUTCOME_PENDING};
use crate::kernel;
use crate::next::Next;
use crate::records;
use crate::start;

/// How long `fork` waits in the child. The agent goes on trying afterwards.
const FORK_TIME: Duration = Duration::from_secs(5);

static FORK: Next = Next::new(c"fork");

/// Thread control block of the last thread to enter our `fork`, until it
/// leaves. A child that finds its own there knows that our `fork` will go on
/// after the handlers.
static FORKING: AtomicU64 = AtomicU64::new(0);

/// POSIX's function, but the child has an agent if its parent has one.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn fork() -> libc::pid_t {
    let address = FORK.address();
    if address.is_null() {
        // SAFETY: the C library's error number of this thread.
        unsafe { *libc::__errno_location() = libc::ENOSYS };
        return -1;
    }
    // SAFETY: the C library's function of this name has this signature.
    let fork = unsafe {
        core::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> libc::pid_t>(address)
    };
    let this = this_thread();
    FORKING.store(this, Ordering::SeqCst);
    // SAFETY: the caller's own wish.
    let child = unsafe { fork() };
    // When another thread forked meanwhile, the place is its own.
    let deferred = FORKING.compare_exchange(this, 0, Ordering::SeqCst, Ordering::Relaxed).is_ok();
    if child == 0 && deferred {
        start_in_child();
    }
    child
}

/// Looks the real `fork` up now: it may be called from a signal handler, where
/// no lookup may happen.
pub(crate) fn prepare() {
    FORK.address();
}

/// Makes forks known; false: no memory for it.
pub(crate) fn register() -> bool {
    // SAFETY: the handler is a function of this library, which is never
    // unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) == 0 }
}

extern "C" fn in_child() {
    if FORKING.load(Ordering::SeqCst) != this_thread() {
        start_in_child();
    }
}

fn this_thread() -> u64 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::pthread_self() as u64 }
}

/// Runs in the child, on the thread that forked. The wiped block says that
/// there is neither agent nor control block.
fn start_in_child() {
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
