//! libstrata.so: what Strata puts into an unmodified program.
//!
//! A constructor starts one agent thread, which hands a userfaultfd to the
//! daemon and then obeys it; wrappers tell the daemon of threads and of
//! priority-inheriting mutexes; a fork handler starts the agent anew in a child.
//! A program that knows of the library calls it by `include/strata.h`.
//! The states and what happens on each failure are in `docs/agent.md`, the
//! messages in `strata_units::wire`.
//!
//! It is not the pager: it decides nothing, keeps no page and serves no fault.
//!
//! The agent thread must never wait for a managed page, for it would wait for
//! itself: it allocates nothing, has no thread-local storage of its own, reads
//! no environment and prints nothing. Hence `no_std` and this rule for memory:
//! inside a command the agent touches its own [`block`], the control block and
//! this library's code.
//!
//! This crate uses `unsafe`: it is made of system calls and of symbols that the
//! C library looks up.
#![cfg_attr(not(test), no_std)]
// Unit tests must not be managed programs: what the linker would export, and
// what only that uses, is idle there.
#![cfg_attr(test, allow(dead_code))]

// Linked for its panic machinery alone, which the other crates' std brings with
// it; nothing here uses it.
#[cfg(not(test))]
extern crate std;

mod agent;
mod batch;
mod block;
mod fork;
mod guards;
mod guest;
mod handshake;
mod identity;
mod kernel;
mod message;
mod mutexes;
mod next;
mod place;
mod pool;
mod reason;
mod records;
mod remap;
mod reply;
#[cfg(not(test))]
mod runtime;
mod snapshot;
mod start;
mod succession;
mod syscall;
mod thread;
mod threads;

/// The library's version, a static C string: lets a program (or a person with
/// a debugger) see that the library is loaded.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn strata_version() -> *const libc::c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
