//! Why a snapshot file, or something of it, is refused.

use std::io;
use std::path::PathBuf;

use strata_units::PAGE_SIZE;

/// Why a snapshot file, or something of it, is refused.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is something else.
    #[error("{path}: this is no snapshot file", path = .0.display())]
    NotASnapshot(PathBuf),
    /// A version that is not known here.
    #[error("{path}: version {version} of the format; this program reads version {known}",
        path = .path.display(), known = super::format::VERSION)]
    Version {
        /// Which file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// Of a machine of another kind.
    #[error("{path}: its pages have {page_bytes} bytes, as on other machines; here they have {PAGE_SIZE}",
        path = .path.display())]
    PageSize {
        /// Which file.
        path: PathBuf,
        /// Of a page there.
        page_bytes: u32,
    },
    /// The end is missing or damaged.
    #[error("{path}: incomplete: the file was cut off, or its end is damaged", path = .0.display())]
    Incomplete(PathBuf),
    /// A page's bytes are not those that were written.
    #[error("{path}: damaged: the page at {address:#x} of process {pid}", path = .path.display())]
    DamagedPage {
        /// Which file.
        path: PathBuf,
        /// The process.
        pid: u32,
        /// The page's first byte.
        address: u64,
    },
    /// Anything else is not as it was written, or contradicts itself.
    #[error("{path}: damaged: {what}, at byte {offset}", path = .path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is there.
        what: String,
        /// Where in the file.
        offset: u64,
    },
    /// The files in it are larger than the caller takes.
    #[error("{path}: its files have {size_bytes} bytes, more than the {limit_bytes} allowed",
        path = .path.display())]
    TooLarge {
        /// Which file.
        path: PathBuf,
        /// All of them.
        size_bytes: u64,
        /// What was allowed.
        limit_bytes: u64,
    },
    /// The file system or the device failed.
    #[error("cannot read {path}", path = .path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A file of the snapshot cannot be made.
    #[error("cannot write {path}", path = .path.display())]
    Extract {
        /// Which one.
        path: PathBuf,
        /// What was said.
        source: io::Error,
    },
}
