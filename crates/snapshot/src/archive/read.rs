//! Reads a snapshot file, which may be truncated, damaged or hostile: all that
//! comes from it is bounded and checked, and no byte of a page is given that has
//! not passed its checksum. Memory grows with what the file really holds.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use strata_units::PAGE_SIZE;
use xxhash_rust::xxh3::Xxh3;

use super::blocks::{Block, PageBlocks, Scratch, read_head, unpack};
use super::directory::{Directory, MAX_DIRECTORY_BYTES};
use super::format::{
    BLOCK_PAGES, BadHeader, BlockEntry, CHUNK_BYTES, Content, ENTRY_BYTES, EXTENT_BYTES, Extent,
    FOOTER_BYTES, Footer, HEAD_BYTES, HEADER_BYTES, Kind, MAX_PAGES, decode_header, fill, sum,
};
use super::read_error::ReadError;
use super::{FileInfo, Page, ProcessInfo};

/// Of the block table, read at a time.
const TABLE_READ_BYTES: usize = 64 << 10;

/// What is wrong with a block.
pub(super) enum Fault {
    Io(io::Error),
    Damaged,
}

/// A block's place in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) offset: u64,
    pub(super) len_bytes: u32,
    pub(super) number: u32,
}

/// An open snapshot file whose header, directory and index are whole. May be used
/// by many threads at once, each with its [`Scratch`].
#[derive(Debug)]
pub struct Reader {
    file: File,
    pub(super) path: PathBuf,
    pub(super) seed: u64,
    pub(super) len_bytes: u64,
    pub(super) directory: Directory,
    /// By process: its pages, in order.
    pub(super) extents: Vec<Vec<Extent>>,
    pub(super) blocks: PageBlocks,
    /// With the file's position in the directory, in its order.
    pub(super) file_blocks: Vec<(u16, Place)>,
}

impl Reader {
    /// Opens a snapshot file and checks all of it but pages and files.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        match strata_sys::open_plain_file(path) {
            Ok(file) => Self::from_file(file, path),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(ReadError::NotASnapshot(path.to_owned()))
            }
            Err(source) => Err(ReadError::Io { path: path.to_owned(), source }),
        }
    }

    /// The same with an open file; `path` names it in errors.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn from_file(file: File, path: &Path) -> Result<Self, ReadError> {
        let path = path.to_owned();
        let io = |source| ReadError::Io { path: path.clone(), source };
        let metadata = file.metadata().map_err(io)?;
        let len_bytes = metadata.len();
        let mut header = [0; HEADER_BYTES];
        if !metadata.is_file() || len_bytes < HEADER_BYTES as u64 {
            return Err(ReadError::NotASnapshot(path));
        }
        file.read_exact_at(&mut header, 0).map_err(io)?;
        let seed = match decode_header(&header) {
            Ok(seed) => seed,
            Err(BadHeader::Magic) => return Err(ReadError::NotASnapshot(path)),
            Err(BadHeader::Version(version)) => return Err(ReadError::Version { path, version }),
            Err(BadHeader::PageSize(page_bytes)) => {
                return Err(ReadError::PageSize { path, page_bytes });
            }
            Err(BadHeader::Sum) => {
                return Err(ReadError::Damaged { path, what: "the header".into(), offset: 0 });
            }
        };
        let Some(footer_offset) = len_bytes.checked_sub(FOOTER_BYTES as u64) else {
            return Err(ReadError::Incomplete(path));
        };
        let mut footer = [0; FOOTER_BYTES];
        file.read_exact_at(&mut footer, footer_offset).map_err(io)?;
        let Some(footer) = Footer::decode(&footer, seed, len_bytes) else {
            return Err(ReadError::Incomplete(path));
        };
        let mut reader = Self {
            file,
            path,
            seed,
            len_bytes,
            directory: Directory::default(),
            extents: Vec::new(),
            blocks: PageBlocks::new(seed, footer.contents),
            file_blocks: Vec::new(),
        };
        reader.load(&footer)?;
        Ok(reader)
    }

    pub(super) fn damaged(&self, what: impl Into<String>, offset: u64) -> ReadError {
        ReadError::Damaged { path: self.path.clone(), what: what.into(), offset }
    }

    pub(crate) fn failed(&self, source: io::Error) -> ReadError {
        if source.kind() == io::ErrorKind::UnexpectedEof {
            // It has become shorter since it was opened.
            return ReadError::Incomplete(self.path.clone());
        }
        ReadError::Io { path: self.path.clone(), source }
    }

    /// Reads table, directory and extents.
    fn load(&mut self, footer: &Footer) -> Result<(), ReadError> {
        let mut extent_blocks = Vec::new();
        let mut directory_blocks = Vec::new();
        let mut table_sum = Xxh3::with_seed(self.seed);
        let mut offset = HEADER_BYTES as u64;
        let mut number = 0;
        let bad_table = || self.damaged("the table of blocks", footer.table_offset);
        let (mut page_blocks, mut file_blocks) = (Vec::new(), Vec::new());
        let mut piece = vec![0; TABLE_READ_BYTES];
        while u64::from(number) < footer.blocks {
            let left = (footer.blocks - u64::from(number)) * ENTRY_BYTES as u64;
            let len = left.min(TABLE_READ_BYTES as u64) as usize;
            let at = footer.table_offset + u64::from(number) * ENTRY_BYTES as u64;
            let piece = &mut piece[..len];
            self.file.read_exact_at(piece, at).map_err(|error| self.failed(error))?;
            table_sum.update(piece);
            for bytes in piece.chunks_exact(ENTRY_BYTES) {
                let BlockEntry { len_bytes, kind, owner } =
                    BlockEntry::decode(bytes).ok_or_else(bad_table)?;
                let place = Place { offset, len_bytes, number };
                match kind {
                    Kind::Pages => page_blocks.push(place),
                    Kind::Extents => extent_blocks.push((owner, place)),
                    Kind::File => file_blocks.push((owner, place)),
                    Kind::Directory => directory_blocks.push(place),
                }
                offset += u64::from(len_bytes);
                // At most blocks, which are at most u32::MAX.
                number += 1;
            }
        }
        let is_damaged = !cfg!(fuzzing) && table_sum.digest() != footer.table_sum;
        if is_damaged
            || offset != footer.table_offset
            || page_blocks.len() as u64 != footer.contents.div_ceil(BLOCK_PAGES as u64)
            || !file_blocks.is_sorted_by_key(|(owner, _)| *owner)
        {
            return Err(bad_table());
        }
        self.blocks.places = page_blocks;
        self.file_blocks = file_blocks;
        let mut scratch = Scratch::default();
        self.directory = self.load_directory(&directory_blocks, &mut scratch)?;
        for (index, file) in self.directory.files.iter().enumerate() {
            let blocks = self.blocks_of(index);
            if blocks.len() as u64 != file.size_bytes.div_ceil(CHUNK_BYTES as u64) {
                let what = format!("the length of the file {}", file.name);
                return Err(self.damaged(what, footer.table_offset));
            }
        }
        let files = self.directory.files.len();
        if self.file_blocks.last().is_some_and(|(owner, _)| usize::from(*owner) >= files) {
            return Err(self.damaged("a file without a name", footer.table_offset));
        }
        self.extents = self.load_extents(&extent_blocks, &mut scratch)?;
        Ok(())
    }

    fn load_directory(
        &self,
        blocks: &[Place],
        scratch: &mut Scratch,
    ) -> Result<Directory, ReadError> {
        let offset = blocks.first().map_or(0, |place| place.offset);
        let damaged = || self.damaged("the directory", offset);
        let (mut bytes, mut chunk) = (Vec::new(), Vec::new());
        for place in blocks {
            self.chunk(*place, Kind::Directory, 0, scratch, &mut chunk).map_err(
                |fault| match fault {
                    Fault::Io(error) => self.failed(error),
                    Fault::Damaged => damaged(),
                },
            )?;
            bytes.extend_from_slice(&chunk);
            if bytes.len() > MAX_DIRECTORY_BYTES {
                return Err(damaged());
            }
        }
        Directory::decode(&bytes).ok_or_else(damaged)
    }

    fn load_extents(
        &self,
        blocks: &[(u16, Place)],
        scratch: &mut Scratch,
    ) -> Result<Vec<Vec<Extent>>, ReadError> {
        let mut extents = vec![Vec::<Extent>::new(); self.directory.processes.len()];
        let mut chunk = Vec::new();
        for &(owner, place) in blocks {
            let damaged = || self.damaged("the index of pages", place.offset);
            self.chunk(place, Kind::Extents, owner, scratch, &mut chunk).map_err(|fault| {
                match fault {
                    Fault::Io(error) => self.failed(error),
                    Fault::Damaged => damaged(),
                }
            })?;
            let list = extents.get_mut(usize::from(owner)).ok_or_else(damaged)?;
            for bytes in chunk.chunks_exact(EXTENT_BYTES) {
                let extent = Extent::decode(bytes, self.blocks.count).ok_or_else(damaged)?;
                if list.last().is_some_and(|last| last.end() > extent.first) {
                    return Err(damaged());
                }
                list.push(extent);
            }
        }
        let mut all_pages = 0u64;
        for (list, process) in extents.iter_mut().zip(&self.directory.processes) {
            list.shrink_to_fit();
            // An extent has less than 2^31 pages, and there is no room for 2^33.
            let pages: u64 = list.iter().map(|extent| u64::from(extent.count)).sum();
            all_pages = all_pages.saturating_add(pages);
            if pages != process.pages || all_pages > MAX_PAGES {
                let what = format!("the number of pages of process {}", process.pid);
                return Err(self.damaged(what, self.len_bytes));
            }
        }
        Ok(extents)
    }

    /// Reads a block that is not of pages into `out`.
    pub(super) fn chunk(
        &self,
        place: Place,
        kind: Kind,
        owner: u16,
        scratch: &mut Scratch,
        out: &mut Vec<u8>,
    ) -> Result<(), Fault> {
        let head =
            read_head((place, kind, owner), self.seed, &mut scratch.stored, &mut |at, out| {
                self.file.read_exact_at(out, at)
            })?;
        let stored = &scratch.stored[HEAD_BYTES..];
        if sum(stored, self.seed) != head.stored_sum
            || (kind == Kind::Extents && stored.len() != head.raw_bytes as usize)
        {
            return Err(Fault::Damaged);
        }
        match unpack(&mut scratch.decompressor, stored, head.raw_bytes as usize, out) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Fault::Damaged),
            Err(error) => Err(Fault::Io(error)),
        }
    }

    /// See [`PageBlocks::block`].
    pub(super) fn page_block<'a>(
        &self,
        index: usize,
        scratch: &'a mut Scratch,
    ) -> Result<&'a Block, Fault> {
        self.blocks.block(index, scratch, &mut |offset, out| self.file.read_exact_at(out, offset))
    }

    /// Where its distinct pages are.
    #[must_use]
    pub fn page_blocks(&self) -> &PageBlocks {
        &self.blocks
    }

    /// The file itself.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// What each page of process `pid` is, in order of their addresses, nothing of them
    /// read.
    pub fn contents_of(&self, pid: u32) -> impl Iterator<Item = (u64, Content)> {
        let extents = self.process(pid).map_or(&[][..], |process| &self.extents[process]);
        extents.iter().flat_map(|extent| {
            (extent.first..extent.end())
                .map(|number| (number * PAGE_SIZE as u64, extent.at(number)))
        })
    }

    /// What the caller said of the snapshot.
    #[must_use]
    pub fn description(&self) -> &[u8] {
        &self.directory.description
    }

    /// Its processes, in the order in which they were written.
    #[must_use]
    pub fn processes(&self) -> &[ProcessInfo] {
        &self.directory.processes
    }

    /// Its files, in the order in which they were written.
    #[must_use]
    pub fn files(&self) -> &[FileInfo] {
        &self.directory.files
    }

    /// Whose the file is, and who may write to it.
    ///
    /// # Errors
    /// [`ReadError::Io`].
    pub fn metadata(&self) -> Result<std::fs::Metadata, ReadError> {
        self.file.metadata().map_err(|error| self.failed(error))
    }

    /// Length of the snapshot file.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn process(&self, pid: u32) -> Option<usize> {
        self.directory.processes.iter().position(|process| process.pid == pid)
    }

    /// Reads the page of process `pid` at `address` (its first byte) into `out`.
    /// False: the snapshot does not have it.
    ///
    /// # Errors
    /// [`ReadError::DamagedPage`], [`ReadError::Io`]; what is in `out` then means
    /// nothing.
    pub fn page(
        &self,
        pid: u32,
        address: u64,
        scratch: &mut Scratch,
        out: &mut Page,
    ) -> Result<bool, ReadError> {
        let number = address / PAGE_SIZE as u64;
        let Some(process) = self.process(pid).filter(|_| address.is_multiple_of(PAGE_SIZE as u64))
        else {
            return Ok(false);
        };
        let extents = &self.extents[process];
        let after = extents.partition_point(|extent| extent.first <= number);
        let Some(extent) = extents[..after].last().filter(|extent| number < extent.end()) else {
            return Ok(false);
        };
        self.read(pid, number, extent, scratch, out).map(|()| true)
    }

    fn read(
        &self,
        pid: u32,
        number: u64,
        extent: &Extent,
        scratch: &mut Scratch,
        out: &mut Page,
    ) -> Result<(), ReadError> {
        let content = match extent.at(number) {
            Content::Filled(value) => {
                fill(value, out);
                return Ok(());
            }
            Content::Stored(content) => content as usize,
        };
        let address = number * PAGE_SIZE as u64;
        let damaged = || ReadError::DamagedPage { path: self.path.clone(), pid, address };
        let block = match self.page_block(content / BLOCK_PAGES, scratch) {
            Ok(block) => block,
            Err(Fault::Io(error)) => return Err(self.failed(error)),
            Err(Fault::Damaged) => return Err(damaged()),
        };
        out.copy_from_slice(block.page(content % BLOCK_PAGES, self.seed).ok_or_else(damaged)?);
        Ok(())
    }

    /// All pages of process `pid`, in order of their addresses. None of a process
    /// that the snapshot does not have.
    #[must_use]
    pub fn pages(&self, pid: u32) -> Pages<'_> {
        let extents = self.process(pid).map_or(&[][..], |process| &self.extents[process]);
        Pages { reader: self, pid, extents, done: 0, scratch: Scratch::default() }
    }

    pub(super) fn blocks_of(&self, file: usize) -> &[(u16, Place)] {
        let from = self.file_blocks.partition_point(|(owner, _)| usize::from(*owner) < file);
        let to = self.file_blocks.partition_point(|(owner, _)| usize::from(*owner) <= file);
        &self.file_blocks[from..to]
    }

    /// Reads the file at `index` piece by piece.
    pub(super) fn read_file(
        &self,
        index: usize,
        scratch: &mut Scratch,
        mut take: impl FnMut(&[u8]) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let FileInfo { name, size_bytes } = &self.directory.files[index];
        let mut left = *size_bytes;
        let mut chunk = Vec::new();
        for &(owner, place) in self.blocks_of(index) {
            let damaged = || self.damaged(format!("the file {name}"), place.offset);
            match self.chunk(place, Kind::File, owner, scratch, &mut chunk) {
                Ok(()) if chunk.len() as u64 == left.min(CHUNK_BYTES as u64) => {}
                Ok(()) | Err(Fault::Damaged) => return Err(damaged()),
                Err(Fault::Io(error)) => return Err(self.failed(error)),
            }
            left -= chunk.len() as u64;
            take(&chunk)?;
        }
        Ok(())
    }

    /// The first bytes of the file at `index`, `most` at most.
    ///
    /// # Errors
    /// What reading says.
    ///
    /// # Panics
    /// There is no such file.
    pub fn file_beginning(&self, index: usize, most: u64) -> Result<Vec<u8>, ReadError> {
        let FileInfo { name, size_bytes } = &self.directory.files[index];
        let wanted = most.min(*size_bytes);
        let (mut found, mut chunk) = (Vec::new(), Vec::new());
        let mut scratch = Scratch::default();
        for &(owner, place) in self.blocks_of(index) {
            if found.len() as u64 >= wanted {
                break;
            }
            match self.chunk(place, Kind::File, owner, &mut scratch, &mut chunk) {
                Ok(()) => found.extend_from_slice(&chunk),
                Err(Fault::Damaged) => {
                    return Err(self.damaged(format!("the file {name}"), place.offset));
                }
                Err(Fault::Io(error)) => return Err(self.failed(error)),
            }
        }
        found.truncate(usize::try_from(wanted).unwrap_or(usize::MAX));
        Ok(found)
    }
}

/// The pages of a process, in order; see [`Reader::pages`].
#[derive(Debug)]
pub struct Pages<'a> {
    reader: &'a Reader,
    pid: u32,
    /// Those that are not through.
    extents: &'a [Extent],
    /// Pages of the first of them that are.
    done: u32,
    scratch: Scratch,
}

impl Pages<'_> {
    /// Reads the next page into `out`, and says where it belongs. One that is
    /// damaged does not end it: the others can be read.
    pub fn next_into(&mut self, out: &mut Page) -> Option<(u64, Result<(), ReadError>)> {
        let (extent, rest) = self.extents.split_first()?;
        let number = extent.first + u64::from(self.done);
        self.done += 1;
        if self.done == extent.count {
            self.extents = rest;
            self.done = 0;
        }
        let read = self.reader.read(self.pid, number, extent, &mut self.scratch, out);
        Some((number * PAGE_SIZE as u64, read))
    }
}
