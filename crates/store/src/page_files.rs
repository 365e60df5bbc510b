//! Files of pages that the store did not write and that never change: a snapshot that a
//! tenant was started from is read where it lies.
//!
//! A handle of such a page names the file and the page. Nothing is counted page by page,
//! as nothing is freed page by page: a file is closed when nobody refers to any page of it.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use strata_units::Handle;

use crate::backing::{Backing, Waiting};
use crate::codec::Page;
use crate::config::GetError;
use crate::store::{PAGE_FILE_HANDLE, Store};

/// Page files of one store at a time.
const MOST_FILES: usize = 1024;
/// Where a handle of such a page has its file's number.
const FILE_SHIFT: u32 = 32;
const _: () = assert!(((MOST_FILES as u64) << FILE_SHIFT) <= PAGE_FILE_HANDLE);

/// How pages lie in such a file.
pub trait PageFile: Send + Sync + fmt::Debug {
    /// The bytes that hold `page`: the first one's offset, and how many, at most
    /// [`strata_sys::READ_BYTES`]. None: it cannot be had.
    fn place(&self, page: u32) -> Option<(u64, usize)>;

    /// Makes the page of those bytes. `read` fills what it is given from an offset of the
    /// file; it need not be called for what this thread has read just before.
    ///
    /// # Errors
    /// [`GetError::Corrupt`] when they are not what was written, and what `read` says.
    fn get(&self, page: u32, read: ReadBytes<'_>, out: &mut Page) -> Result<(), GetError>;

    /// What waits until `len` bytes from `start` on are in the file, of one whose bytes come
    /// from elsewhere; none: they are. It holds on to nothing that ends with this.
    fn until_there(&self, start: u64, len: usize) -> Option<Wait> {
        let _ = (start, len);
        None
    }
}

/// See [`PageFile::get`].
pub type ReadBytes<'a> = &'a mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>;

/// See [`PageFile::until_there`]. An error: they never will be.
pub type Wait = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// A file in use.
#[derive(Debug)]
pub(crate) struct Opened {
    pages: Box<dyn PageFile>,
    /// References to its pages, and one of whoever adds it.
    references: AtomicU64,
    /// What says that its descriptor is needed: gone before that is.
    _record: Box<dyn Any + Send + Sync>,
    pub(crate) backing: Arc<dyn Backing>,
}

impl Opened {
    pub(crate) fn place(&self, page: u32) -> Option<(u64, usize)> {
        self.pages.place(page)
    }

    pub(crate) fn get(&self, page: u32, out: &mut Page) -> Result<(), GetError> {
        let mut read = |offset, bytes: &mut [u8]| {
            self.until_there(offset, bytes.len()).map_or(Ok(()), |wait| wait())?;
            self.backing.read_at(offset, bytes)
        };
        self.pages.get(page, &mut read, out)
    }

    pub(crate) fn until_there(&self, start: u64, len: usize) -> Option<Wait> {
        self.pages.until_there(start, len)
    }

    /// The same from `bytes`, which are those of the file from `start` on.
    pub(crate) fn get_from(
        &self,
        page: u32,
        start: u64,
        bytes: &[u8],
        out: &mut Page,
    ) -> Result<(), GetError> {
        let mut read = |offset: u64, out: &mut [u8]| {
            let from = offset.checked_sub(start).and_then(|from| usize::try_from(from).ok());
            let part = from.and_then(|from| bytes.get(from..)?.get(..out.len()));
            out.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        };
        self.pages.get(page, &mut read, out)
    }
}

/// A store's, by number.
#[derive(Debug, Default)]
pub(crate) struct PageFiles(RwLock<Vec<Option<Arc<Opened>>>>);

/// Recovery of a file that cannot be opened any more: its pages are lost, one by one, when
/// they are asked for.
#[derive(Debug)]
struct Unreadable;

impl PageFile for Unreadable {
    fn place(&self, _: u32) -> Option<(u64, usize)> {
        None
    }

    fn get(&self, _: u32, _: ReadBytes<'_>, _: &mut Page) -> Result<(), GetError> {
        Err(GetError::Corrupt)
    }
}

impl PageFiles {
    fn read(&self) -> RwLockReadGuard<'_, Vec<Option<Arc<Opened>>>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, file: u16) -> Option<Arc<Opened>> {
        self.read().get(usize::from(file)).cloned().flatten()
    }

    pub(crate) fn any_is_slow(&self) -> bool {
        self.read().iter().flatten().any(|file| file.backing.waiting() != Waiting::Never)
    }

    /// Further references to pages of it. False: the file is closed.
    pub(crate) fn retain(&self, file: u16, references: u64) -> bool {
        let files = self.read();
        let Some(Some(file)) = files.get(usize::from(file)) else { return false };
        // Closing takes the lock to write, and looks once more.
        file.references.fetch_add(references, Relaxed);
        true
    }

    /// With the last reference the file is closed.
    pub(crate) fn release(&self, number: u16) {
        let place = usize::from(number);
        let last = {
            let files = self.read();
            let file = files.get(place).and_then(Option::as_ref);
            let file = file.expect("what is given up was referred to");
            let before = file.references.fetch_sub(1, Relaxed);
            assert!(before > 0, "page file {number} has no reference to give up");
            before == 1
        };
        if last {
            self.close_unused(place);
        }
    }

    fn close_unused(&self, place: usize) {
        let mut files = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let unused = files[place].take_if(|file| file.references.load(Acquire) == 0);
        drop(files);
        // Closed here, if no read is under way.
        drop(unused);
    }

    /// Takes a file in at `place`, or at one that is free; its number.
    fn add(
        &self,
        place: Option<u16>,
        references: u64,
        pages: Box<dyn PageFile>,
        backing: Box<dyn Backing>,
        record: impl FnOnce(u16) -> io::Result<Box<dyn Any + Send + Sync>>,
    ) -> io::Result<u16> {
        let mut files = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let free = || files.iter().position(Option::is_none).unwrap_or(files.len());
        let at = place.map_or_else(free, usize::from);
        if at >= MOST_FILES {
            return Err(io::Error::other("too many snapshots are being read from their files"));
        }
        if files.len() <= at {
            files.resize_with(at + 1, || None);
        }
        let number = at as u16;
        let record = record(number)?;
        let backing = Arc::from(backing);
        let references = AtomicU64::new(references);
        files[at] = Some(Arc::new(Opened { pages, references, _record: record, backing }));
        Ok(number)
    }

    /// Closes those that nobody refers to: none was by a dead worker's page map.
    pub(crate) fn finish(&self) {
        let places = self.read().len();
        (0..places).for_each(|place| self.close_unused(place));
    }

    pub(crate) fn recover(
        &self,
        number: u16,
        pages: Option<Box<dyn PageFile>>,
        backing: Box<dyn Backing>,
        record: Box<dyn Any + Send + Sync>,
    ) -> io::Result<()> {
        let pages = pages.unwrap_or_else(|| Box::new(Unreadable));
        self.add(Some(number), 0, pages, backing, |_| Ok(record)).map(drop)
    }
}

impl Store {
    /// Takes in a file of pages that never changes. `record`, which is told its number
    /// first, makes what notes that `backing` must outlive this process; that is
    /// dropped when the file is not needed any more. The caller owns a reference to
    /// the file ([`Store::release_page_file`]), and takes one to each page that it
    /// notes ([`Store::retain`]).
    ///
    /// # Errors
    /// What `record` says; or there are too many such files.
    pub fn add_page_file(
        &self,
        pages: Box<dyn PageFile>,
        backing: Box<dyn Backing>,
        record: impl FnOnce(u16) -> io::Result<Box<dyn Any + Send + Sync>>,
    ) -> io::Result<u16> {
        self.page_files.add(None, 1, pages, backing, record)
    }

    /// Gives up the reference that [`Store::add_page_file`] has given.
    pub fn release_page_file(&self, number: u16) {
        self.page_files.release(number);
    }

    /// The name of a page of a page file. No reference comes with it.
    #[must_use]
    pub fn in_page_file(number: u16, page: u32) -> Handle {
        Handle(PAGE_FILE_HANDLE | u64::from(number) << FILE_SHIFT | u64::from(page))
    }

    /// The name of a page that has one value throughout. Neither does it here.
    #[must_use]
    pub fn filled_with(value: u32) -> Handle {
        Handle(crate::store::FILL_HANDLE | u64::from(value))
    }
}

/// File and page of a handle of this kind.
pub(crate) fn named(handle: Handle) -> (u16, u32) {
    let file = (handle.0 & (PAGE_FILE_HANDLE - 1)) >> FILE_SHIFT;
    (file as u16, handle.0 as u32)
}
