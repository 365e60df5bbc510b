//! Persisted snapshots that are not read before they are brought back: their pages come from
//! the file when they are asked for.
//!
//! So damage of a page shows when a program touches it, and ends that program. Therefore
//! this is done only with a file that is as this daemon wrote it, for all that its number,
//! length and times tell; any other one is read, and checked, as a whole first.

use std::cell::RefCell;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use strata_pager::{Filed, GetError, PageFile, ReadBytes, Tenant};
use strata_snapshot::archive::{Content, Page, PageBlocks, Reader, Scratch};
use strata_sys::READ_BYTES;
use strata_units::SpaceId;

use super::disk::Process;
use super::files::of_all;

/// A file as it was when it had been written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct AsWritten {
    inode: u64,
    len_bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl AsWritten {
    fn of(metadata: &Metadata) -> Self {
        Self {
            inode: metadata.ino(),
            len_bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Of the file at `path`, which is whole now. None: it cannot be told.
    pub(super) fn now(path: &Path) -> Option<Self> {
        std::fs::symlink_metadata(path).ok().map(|metadata| Self::of(&metadata))
    }

    /// Whether the open file is still that.
    pub(super) fn is(&self, file: &File) -> bool {
        file.metadata().is_ok_and(|metadata| *self == Self::of(&metadata))
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Debug)]
struct FiledPages(PageBlocks);

impl PageFile for FiledPages {
    fn place(&self, page: u32) -> Option<(u64, usize)> {
        self.0.place(page).filter(|&(_, len)| len <= READ_BYTES)
    }

    fn get(&self, page: u32, read: ReadBytes<'_>, out: &mut Page) -> Result<(), GetError> {
        match SCRATCH.with_borrow_mut(|scratch| self.0.get(page, scratch, read, out))? {
            true => Ok(()),
            false => Err(GetError::Corrupt),
        }
    }
}

/// What the next worker reads the pages of such a file by.
pub(crate) fn open_page_file(file: &File) -> io::Result<Box<dyn PageFile>> {
    if let Some(owed) = super::moving::open_owed(file) {
        return owed;
    }
    let reader = Reader::from_file(file.try_clone()?, Path::new("a snapshot's file"));
    let reader = reader.map_err(|error| io::Error::other(crate::tenants::chain(&error)))?;
    Ok(Box::new(FiledPages(reader.page_blocks().clone())))
}

/// Has the memory of `processes` come from the file of `reader` when it is asked for; the
/// number of each.
pub(super) fn adopt(
    reader: &Reader,
    processes: &[Process],
    holder: &Tenant,
) -> io::Result<Vec<SpaceId>> {
    let pages = Box::new(FiledPages(reader.page_blocks().clone()));
    let file = holder.open_snapshot_file(reader.file().try_clone()?, pages)?;
    of_all(processes, holder, |process| {
        let pages = reader.contents_of(process.pid).map(|(address, content)| match content {
            Content::Filled(value) => (address, Filed::Filled(value)),
            Content::Stored(page) => (address, Filed::Page(page)),
        });
        holder.adopt_memory(&file, pages)
    })
}
