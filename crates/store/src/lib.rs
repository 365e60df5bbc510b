//! The content store: pages by content, compressed, deduplicated, counted, in
//! tiers; it outlives the process that works on it.
//!
//! [`Store`] holds the pages of one dedup domain. It knows nothing of
//! processes, of userfaultfd or of time, and starts no thread: whoever owns it
//! calls [`Store::settle`], [`Store::repack`], [`Store::demote`] and
//! [`Store::compact`] from a background thread.
//!
//! Promises:
//! - [`Store::get`], [`Store::retain`] and [`Store::release`] take no lock,
//!   whatever else goes on; `get` returns exactly the bytes that were put, or an
//!   error.
//! - A page's only copy is not given up before another one is complete and
//!   reachable.
//! - After the process was killed at any instant, [`Store::recover`] gives back
//!   every page whose handle the caller still knows. docs/store-format.md has the
//!   layout and the argument.
//! - At most 24 bytes of memory per object beside its data.
#![forbid(unsafe_code)]

mod backing;
mod codec;
mod config;
mod id_set;
mod location;
mod maintain;
mod recover;
mod segments;
mod slabs;
mod store;
mod table;

pub use backing::{Backing, Faults, Faulty, FileBacking, MemoryBacking};
pub use config::{
    BorrowedDescriptors, Compacted, Descriptors, FileConfig, GetError, Put, PutError, RecoverError,
    Source, StoreConfig, StoreError, StoreStats,
};
pub use recover::Recovery;
pub use store::{Store, prepare_thread};
