//! One snapshot in one file: the memory of its processes, CRIU's images as
//! files that nobody here looks into, and a description in the caller's words.
//!
//! [`Writer`] makes such a file from a stream of pages with bounded memory;
//! [`Reader`] refuses what is not whole, and gives pages back one by one or in
//! order. docs/snapshot-format.md has the layout. It knows no process, no pager
//! and no store: whoever calls brings pages and takes them.
//!
//! ```
//! use strata_snapshot::archive::{Reader, Scratch, Writer};
//! # let directory = std::env::temp_dir().join(format!("strata-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&directory)?;
//! let path = directory.join("db@1.strata");
//! let mut writer = Writer::create(&path)?;
//! writer.description(b"{}")?;
//! writer.file("core-1.img", &b"an image"[..])?;
//! writer.process(1, None)?;
//! writer.page(0x7000_0000_0000, &[7; 4096])?;
//! writer.finish()?;
//!
//! let reader = Reader::open(&path)?;
//! reader.verify(&mut |_, _| ())?;
//! let mut out = [0; 4096];
//! assert!(reader.page(1, 0x7000_0000_0000, &mut Scratch::default(), &mut out)?);
//! assert_eq!(out, [7; 4096]);
//! # std::fs::remove_dir_all(&directory)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocks;
mod dedup;
mod directory;
mod extract;
mod format;
mod part;
mod read;
mod read_error;
mod sent;
mod verify;
mod write;

#[cfg(test)]
mod damage_tests;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use blocks::{PageBlocks, ReadBytes, Scratch};
pub use directory::{FileInfo, ProcessInfo};
pub use extract::sum_of;
pub use format::Content;
pub(crate) use format::MAGIC;
pub use part::{PartFile, Sink};
pub use read::{Pages, Reader};
pub use read_error::ReadError;
pub use sent::{MOST_SENT_PAGES, SentPage, pack_pages, sum_of_page, unpack_pages};
pub use write::{WriteError, Writer, Written};

/// One page of memory.
pub type Page = [u8; strata_units::PAGE_SIZE];

/// Processes of one snapshot, at most: a block names its process in 16 bits, and
/// the daemon keeps no more than 8192.
pub const MAX_PROCESSES: usize = 8192;
/// Files of one snapshot, at most. CRIU writes about eight a process.
pub const MAX_FILES: usize = 65_535;
/// Bytes of a file's name, at most: what Linux allows.
pub const MAX_NAME_BYTES: usize = 255;
/// Bytes of the description, at most.
pub const MAX_DESCRIPTION_BYTES: usize = 1 << 20;
