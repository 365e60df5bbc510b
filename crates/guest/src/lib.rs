//! What guests reach of Strata: pools, and disk images that are read through them.
//!
//! A [`Pool`] is a cache of pages by (file, index) that may lose any of them at any time:
//! it holds copies of what is on a disk. A [`Disk`] reads an image through one and writes
//! to the image; [`Export`] serves a disk over NBD to whoever emulates a machine.
//!
//! A [`Persistent`] pool is an image in memory, of which nothing is ever dropped: a guest's
//! swap disk. It is in the process that serves it, which tells the daemon its figures
//! ([`report`]), and has the pages of a moment ([`moment`]).
//!
//! They are two processes: the pool is in the daemon ([`serve`]), the disk in a program of
//! its own, `strata-export`, with the rights of the guest's user; [`Link`] is what goes
//! between them. docs/pools.md says why.
//!
//! Not here: who may have a pool, which sockets there are, and who listens at the pool's.
#![forbid(unsafe_code)]

mod disk;
mod export;
mod link;
pub mod moment;
pub mod nbd;
mod persistent;
mod pool;
mod ranges;
mod report;
mod serve;
pub mod talk;

pub use disk::{Cache, Disk, Failure, Found, Image, NoCache, Stamp};
pub use export::Export;
pub use link::{Link, Links};
pub use persistent::{Persistent, SwapFigures, SwapFiles};
pub use pool::{Admission, Pool, PoolFigures};
pub use report::{hear_reports, report};
pub use serve::{Caller, greet, serve};
