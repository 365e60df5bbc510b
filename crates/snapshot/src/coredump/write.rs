//! Writes a core file. Pages come in the order of their addresses; what is known only
//! when all have come, headers and notes, is behind them.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use strata_units::PAGE_SIZE;

use super::CoreError;
use super::notes::{ARGUMENT_BYTES, notes};
use super::process::{Mapping, Process};
use crate::archive::{MAGIC, Page, PartFile, Sink};

const BYTES: u64 = PAGE_SIZE as u64;
/// Memory without pages is zeroes, a hole in the file, if it is no more than this at a
/// time; else it is not in it, for no file system has a file of so many terabytes as
/// a program may have addresses.
const MOST_HOLE_BYTES: u64 = 1 << 30;
/// So much may wait in the page cache for the device.
const SYNC_EVERY_BYTES: u64 = 64 << 20;

const HEADER_BYTES: u64 = 64;
const SEGMENT_BYTES: u16 = 56;
const SECTION_BYTES: u16 = 64;
/// Segments beyond these are counted in a section's header (`PN_XNUM`).
const MOST_SEGMENTS: usize = 0xffff;
const LOAD: u32 = 1;
const NOTE: u32 = 4;
/// Of a mapping's protection and of a segment, which have them the other way round.
const READ: u32 = 1;
const WRITE: u32 = 2;
const EXECUTE: u32 = 4;

/// A program header, but for what is the same in all.
struct Segment {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    file_bytes: u64,
    memory_bytes: u64,
    align: u64,
}

/// Pages of a mapping that lie in one piece in the file.
struct Piece {
    range: Range<u64>,
    offset: u64,
}

/// Writes the core file of one process. Dropped before [`Writer::finish`], or after an
/// error, nothing is left of it.
pub struct Writer {
    file: PartFile,
    path: PathBuf,
    process: Process,
    segments: Vec<Segment>,
    /// The mapping that the next page may be in.
    mapping: usize,
    /// Up to here that mapping is in segments already.
    covered: u64,
    piece: Option<Piece>,
    /// Pages below have been, or are not there.
    next: u64,
    /// The end of the file so far.
    end: u64,
    unsynced_bytes: u64,
    arguments: Vec<u8>,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Of a mapping, how much without a page may be a hole. A file's pages are the file's
/// unless the program has written to them.
fn most_hole(mapping: &Mapping) -> u64 {
    if mapping.file.is_some() { 0 } else { MOST_HOLE_BYTES }
}

impl Writer {
    /// Begins the file `path`, for its owner alone, under a name with `.part` at its
    /// end; what a killed writer left there is removed.
    ///
    /// # Errors
    /// [`CoreError::Exists`], [`CoreError::Io`].
    pub fn create(path: &Path, process: Process) -> Result<Self, CoreError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AlreadyExists if source.get_ref().is_none() => {
                CoreError::Exists(path.to_owned())
            }
            _ => CoreError::Io { path: path.to_owned(), source },
        };
        let file = PartFile::create(path).map_err(failed)?;
        // By this the next writer of this name knows what a killed one has left.
        file.write_at(&MAGIC, 0).map_err(failed)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            segments: Vec::new(),
            mapping: 0,
            covered: process.mappings.first().map_or(0, |first| first.range.start),
            process,
            piece: None,
            next: 0,
            end: BYTES,
            unsynced_bytes: 0,
            arguments: Vec::new(),
        })
    }

    fn failed(&self, source: io::Error) -> CoreError {
        CoreError::Io { path: self.path.clone(), source }
    }

    /// Takes a page of the process, which comes behind those before it. One that CRIU
    /// has as well is CRIU's: so does a restore.
    ///
    /// # Errors
    /// [`CoreError::Io`]; an image cannot be read.
    pub fn page(&mut self, address: u64, page: &Page) -> Result<(), CoreError> {
        self.images_below(address.saturating_add(1))?;
        self.put(address, page)
    }

    /// Puts the pages that CRIU has below `end`.
    fn images_below(&mut self, end: u64) -> Result<(), CoreError> {
        let mut page: Page = [0; PAGE_SIZE];
        while let Some(address) = self.process.pages.next().filter(|&address| address < end) {
            self.process.pages.read(address, &mut page).map_err(CoreError::Images)?;
            self.put(address, &page)?;
        }
        Ok(())
    }

    fn put(&mut self, address: u64, page: &Page) -> Result<(), CoreError> {
        if address < self.next {
            return Ok(());
        }
        self.next = address + BYTES;
        let is_before = |mapping: &Mapping| mapping.range.end <= address;
        while self.process.mappings.get(self.mapping).is_some_and(is_before) {
            self.end_mapping();
        }
        let Some(mapping) = self.process.mappings.get(self.mapping) else { return Ok(()) };
        if address < mapping.range.start {
            return Ok(());
        }
        let most = most_hole(mapping);
        match &mut self.piece {
            Some(piece) if address - piece.range.end <= most => piece.range.end = address + BYTES,
            _ => {
                self.end_piece();
                let far = address - self.covered > most;
                let start = if far { address } else { self.covered };
                self.leave_out(start);
                self.piece = Some(Piece { range: start..address + BYTES, offset: self.end });
            }
        }
        self.note_arguments(address, page);
        let place =
            self.piece.as_ref().map_or(0, |piece| piece.offset + (address - piece.range.start));
        // A zero page is a hole like those that nobody has touched.
        if page.iter().any(|&byte| byte != 0) {
            self.write(page, place)?;
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8], offset: u64) -> Result<(), CoreError> {
        self.file.write_at(bytes, offset).map_err(|error| self.failed(error))?;
        self.unsynced_bytes += bytes.len() as u64;
        if self.unsynced_bytes >= SYNC_EVERY_BYTES {
            self.unsynced_bytes = 0;
            self.file.sync().map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    /// Keeps the beginning of the command line.
    fn note_arguments(&mut self, address: u64, page: &Page) {
        let wanted = &self.process.arguments;
        let end = wanted.end.min(wanted.start.saturating_add(ARGUMENT_BYTES as u64));
        let (from, to) = (wanted.start.max(address), end.min(address + BYTES));
        if from < to {
            self.arguments.extend(&page[(from - address) as usize..(to - address) as usize]);
        }
    }

    /// A segment of the mapping at hand, of which `file_bytes` are in the file.
    fn segment(&mut self, range: Range<u64>, offset: u64, file_bytes: u64) {
        let protection = self.process.mappings.get(self.mapping).map_or(0, |m| m.protection);
        let turned = [(READ, EXECUTE), (WRITE, WRITE), (EXECUTE, READ)];
        let flags = turned.iter().filter(|(own, _)| protection & own != 0).map(|(_, elf)| elf);
        self.segments.push(Segment {
            kind: LOAD,
            flags: flags.sum(),
            offset,
            address: range.start,
            file_bytes,
            memory_bytes: range.end - range.start,
            align: BYTES,
        });
        self.covered = range.end;
    }

    /// Says that the mapping at hand goes on to `end` without anything in the file.
    fn leave_out(&mut self, end: u64) {
        if self.covered < end {
            self.segment(self.covered..end, self.end, 0);
        }
    }

    fn end_piece(&mut self) {
        if let Some(Piece { range, offset }) = self.piece.take() {
            let length = range.end - range.start;
            self.segment(range, offset, length);
            self.end = offset + length;
        }
    }

    fn end_mapping(&mut self) {
        let Some(mapping) = self.process.mappings.get(self.mapping) else { return };
        let (end, most) = (mapping.range.end, most_hole(mapping));
        let is_memory = mapping.protection != 0;
        match &mut self.piece {
            Some(piece) if end - piece.range.end <= most => piece.range.end = end,
            None if is_memory && end - self.covered <= most => {
                self.piece = Some(Piece { range: self.covered..end, offset: self.end });
            }
            _ => {}
        }
        self.end_piece();
        self.leave_out(end);
        self.mapping += 1;
        self.covered = self.process.mappings.get(self.mapping).map_or(0, |next| next.range.start);
    }

    /// Writes what is left and gives the file its name; how long it is.
    ///
    /// # Errors
    /// [`CoreError::Exists`], [`CoreError::Io`]; an image cannot be read.
    pub fn finish(mut self) -> Result<u64, CoreError> {
        self.images_below(u64::MAX)?;
        while self.mapping < self.process.mappings.len() {
            self.end_mapping();
        }
        let notes = notes(&self.process, &self.arguments);
        let notes_at = self.end;
        let table_at = (notes_at + notes.len() as u64).next_multiple_of(8);
        let length = notes.len() as u64;
        self.segments.insert(
            0,
            Segment {
                kind: NOTE,
                flags: 0,
                offset: notes_at,
                address: 0,
                file_bytes: length,
                memory_bytes: 0,
                align: 4,
            },
        );
        let table: Vec<u8> = self.segments.iter().flat_map(Segment::bytes).collect();
        let mut end = table_at + table.len() as u64;
        let (header, section) = header(self.segments.len(), table_at, end);
        self.write(&notes, notes_at)?;
        self.write(&table, table_at)?;
        if let Some(section) = section {
            self.write(&section, end)?;
            end += section.len() as u64;
        }
        self.write(&header, 0)?;
        match self.file.publish() {
            Ok(()) => Ok(end),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(CoreError::Exists(self.path.clone()))
            }
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl Segment {
    fn bytes(&self) -> Vec<u8> {
        let words = [self.offset, self.address, 0, self.file_bytes, self.memory_bytes, self.align];
        let kind = [self.kind, self.flags].map(u32::to_le_bytes).concat();
        [kind, words.map(u64::to_le_bytes).concat()].concat()
    }
}

/// The header of a file with so many segments, and, where they are too many for it,
/// that of a section.
pub(super) fn header(
    segments: usize,
    table_at: u64,
    section_at: u64,
) -> (Vec<u8>, Option<Vec<u8>>) {
    let is_short = segments < MOST_SEGMENTS;
    // 64-bit, little-endian, version 1; a core file (4) for x86-64 (62).
    let mut out = b"\x7fELF\x02\x01\x01".to_vec();
    out.resize(16, 0);
    out.extend([4u16, 62].map(u16::to_le_bytes).concat());
    out.extend(1u32.to_le_bytes());
    let section_place = if is_short { 0 } else { section_at };
    out.extend([0, table_at, section_place].map(u64::to_le_bytes).concat());
    out.extend(0u32.to_le_bytes());
    let counted = segments.min(MOST_SEGMENTS) as u16;
    let sections = u16::from(!is_short);
    let sizes =
        [HEADER_BYTES as u16, SEGMENT_BYTES, counted, SECTION_BYTES * sections, sections, 0];
    out.extend(sizes.map(u16::to_le_bytes).concat());
    let section = (!is_short).then(|| {
        let mut section = vec![0; usize::from(SECTION_BYTES)];
        // `sh_size` counts sections, `sh_info` segments.
        section[32..40].copy_from_slice(&1u64.to_le_bytes());
        section[44..48].copy_from_slice(&(segments as u32).to_le_bytes());
        section
    });
    (out, section)
}
