//! One process of a snapshot as an ELF core file, for debuggers.
//!
//! [`Process`] is what CRIU's images say of it: threads with their registers,
//! mappings, what the kernel told it at its start. [`Writer`] takes the pages that
//! the caller has, in order, puts those that CRIU has between them, and writes the
//! file. What no page was ever written to is a hole in the file; what a file on disk
//! has anyway is not in it, as in a core file of the kernel's.

mod notes;
mod pages;
mod process;
mod write;

#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

pub use process::Process;
pub use write::Writer;

/// Why there is no core file. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// Its images do not have it.
    #[error("process {pid} is not in it; it has {there}")]
    NoProcess {
        /// Which was asked for.
        pid: u32,
        /// Those that are there.
        there: String,
    },
    /// A program that no core file is written of here.
    #[error("process {0} is none of a 64-bit x86 program; core files are written of those alone")]
    OtherMachine(u32),
    /// An image is missing, or not as CRIU writes it.
    #[error("its image {name} {what}")]
    Image {
        /// Which one.
        name: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The images cannot be read.
    #[error("cannot read its images")]
    Images(#[source] io::Error),
    /// There is something of that name.
    #[error("{path}: it exists; nothing was overwritten", path = .0.display())]
    Exists(PathBuf),
    /// The file system or the device failed.
    #[error("cannot write {path}", path = .path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

fn bad(name: &str, what: &'static str) -> CoreError {
    CoreError::Image { name: name.to_owned(), what }
}
