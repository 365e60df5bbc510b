//! Memory of a snapshot that stays in its file, and is read page by page when it is asked
//! for.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use strata_store::{Backing, FileBacking, PageFile, Store};
use strata_units::SpaceId;

use crate::map::registry::Registry;
use crate::tenant::Tenant;

/// Opens files that pages are read from where they lie: those of snapshots, whose layout
/// is not known here.
pub type OpenPageFile = fn(&File) -> io::Result<Box<dyn PageFile>>;

/// Where a page of such memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Filed {
    /// It has this value throughout.
    Filled(u32),
    /// It is this page of the file.
    Page(u32),
}

/// An open file that snapshots' memory of one tenant, and of those that share its pages,
/// can be in. Open as long as something is, dropped or not.
#[derive(Debug)]
pub struct SnapshotFile {
    store: Arc<Store>,
    number: u16,
}

impl Drop for SnapshotFile {
    fn drop(&mut self) {
        self.store.release_page_file(self.number);
    }
}

/// The record that says that the descriptor of such a file must outlive the worker.
pub(crate) struct PageFileNote {
    registry: Arc<Registry>,
    slot: u32,
}

impl PageFileNote {
    /// That which stands in `slot`.
    pub(crate) fn of(registry: &Arc<Registry>, slot: u32) -> Self {
        Self { registry: Arc::clone(registry), slot }
    }
}

impl Drop for PageFileNote {
    fn drop(&mut self) {
        self.registry.remove_page_file(self.slot);
    }
}

/// What such a file is read by.
pub(crate) fn backing_of(file: File) -> Box<dyn Backing> {
    Box::new(FileBacking::attach(OwnedFd::from(file), u64::MAX))
}

impl Tenant {
    /// Has pages of a snapshot's file at hand, which never changes from now on.
    ///
    /// # Errors
    /// There are too many such files.
    pub fn open_snapshot_file(
        &self,
        file: File,
        pages: Box<dyn PageFile>,
    ) -> io::Result<SnapshotFile> {
        let fd = file.as_raw_fd();
        let number = self.store.add_page_file(pages, backing_of(file), |number| {
            let slot = self.registry.add_page_file(self.record.family, number, fd);
            let slot = slot.ok_or_else(|| {
                io::Error::other("too many snapshots are being read from their files")
            })?;
            Ok(Box::new(PageFileNote::of(&self.registry, slot)))
        })?;
        Ok(SnapshotFile { store: Arc::clone(&self.store), number })
    }

    /// Takes in the memory of one process of a snapshot without reading it. `pages` says
    /// where each page belongs.
    ///
    /// # Errors
    /// There is no room. Nothing is left of it then.
    ///
    /// # Panics
    /// `file` is not this tenant's.
    pub fn adopt_memory(
        &self,
        file: &SnapshotFile,
        mut pages: impl Iterator<Item = (u64, Filed)>,
    ) -> io::Result<SpaceId> {
        assert!(Arc::ptr_eq(&file.store, &self.store), "a file of another tenant");
        self.take_in(&mut || {
            let Some((address, filed)) = pages.next() else { return Ok(None) };
            let handle = match filed {
                Filed::Filled(value) => Store::filled_with(value),
                Filed::Page(page) => Store::in_page_file(file.number, page),
            };
            self.store.retain(handle);
            Ok(Some((address, handle)))
        })
    }

    /// Takes pages of `file`, from `first` on, into the memory `id` of a snapshot that nobody
    /// restores yet, to one of `addresses` each. `gone` is as for [`Self::update_memory`].
    ///
    /// # Errors
    /// As for that.
    ///
    /// # Panics
    /// `file` is not this tenant's.
    pub fn adopt_over(
        &self,
        (id, file, first): (SpaceId, &SnapshotFile, u32),
        gone: &[(u64, u64)],
        addresses: &[u64],
    ) -> io::Result<()> {
        assert!(Arc::ptr_eq(&file.store, &self.store), "a file of another tenant");
        let mut pages = (first..).zip(addresses);
        self.take_in_over(id, gone, &mut || {
            let Some((page, &address)) = pages.next() else { return Ok(None) };
            let handle = Store::in_page_file(file.number, page);
            self.store.retain(handle);
            Ok(Some((address, handle)))
        })
    }
}
