//! Process state for snapshots. It runs CRIU, which takes and brings back
//! everything of a process tree but its private anonymous memory.
//!
//! A dump: [`preflight`] names what CRIU cannot take, [`Dump::begin`] returns
//! when the tree stands frozen and all but memory is on disk, and
//! [`FrozenProcess::thaw`] lets it run on. A restore: [`Restore::begin`], then
//! [`Restore::next_arrival`] hands over each process's userfaultfd before the
//! process runs, and [`Restore::finish`] says how it ended.
//!
//! It knows nothing of pages, stores and tenants: whoever holds the
//! userfaultfds brings the memory. It keeps no state between calls.
#![forbid(unsafe_code)]

pub mod archive;
mod breakpoints;
pub mod claims;
pub mod clone;
mod connections;
pub mod coredump;
mod criu;
mod dump;
mod gate;
mod hide;
mod images;
mod log;
mod message;
mod preflight;
mod processes;
mod rehearsal;
mod restore;
mod stopping;
mod terminals;
mod view;

pub use criu::{Criu, CriuError, OLDEST};
pub use dump::{Dump, DumpError, DumpOptions, DumpOutcome, FrozenProcess};
pub use log::Complaint;
pub use preflight::{Refusal, Survey, preflight};
pub use processes::{is_ending, process_tree};
pub use restore::options::{RestoreOptions, Shown};
pub use restore::{Arrival, Restore, RestoreError, RestoredTree, keep_free};
pub use terminals::Terminals;

#[cfg(test)]
mod testing;
