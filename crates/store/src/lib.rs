//! The content store: pages by content, compressed, deduplicated, counted, in
//! tiers; it outlives the process that works on it.
//!
//! [`Store`] holds the pages of one dedup domain. It knows nothing of
//! processes, of userfaultfd or of time, and starts no thread: whoever owns it
//! calls [`Store::settle`], [`Store::repack`], [`Store::demote`],
//! [`Store::compact`] and [`Store::train_dictionary`] from background threads.
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
//!
//! ```
//! use strata_store::{Put, Source, Store, StoreConfig};
//!
//! let store = Store::create(StoreConfig::default())?;
//! let mut page = [0u8; 4096];
//! page[..5].copy_from_slice(b"hello");
//! let handle = store.put(&page, Put::Staged)?;
//! assert_eq!(store.put(&page, Put::Fast)?, handle, "one object, two references");
//! store.release(handle);
//! assert_eq!(store.settle(100), 1);
//! let mut out = [1u8; 4096];
//! assert_eq!(store.get(handle, &mut out)?, Source::Compressed);
//! assert_eq!(out, page);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod backing;
mod codec;
mod compact;
mod config;
mod dictionary;
mod get;
mod id_set;
mod location;
mod maintain;
mod own_backing;
mod page_files;
mod read;
mod recover;
mod references;
mod segments;
mod slabs;
mod space;
mod store;
mod table;
mod train;

pub use backing::{Backing, Faults, Faulty, FileBacking, MappedBacking, MemoryBacking, Waiting};
pub use config::{
    BorrowedDescriptors, Compacted, Descriptors, FileConfig, Fingerprint, Foretelling, GetError,
    Put, PutError, RecoverError, Source, StoreConfig, StoreError, StoreStats, Training,
};
pub use get::prepare_thread;
pub use page_files::{PageFile, ReadBytes, Wait};
pub use read::{FileRead, Unread};
pub use recover::Recovery;
pub use references::Retained;
pub use store::Store;
