//! The pages that CRIU has (`pagemap.proto`): where they are, and their bytes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use strata_sys::{Access, Directory};
use strata_units::{ADDRESSES_END, PAGE_SIZE};

use crate::archive::Page;
use crate::message::Message;

/// Of an entry's `flags`: its pages are in the image of a dump before this one; they
/// are in this one's.
const IN_PARENT: u64 = 1;
const PRESENT: u64 = 4;
const BYTES: u64 = PAGE_SIZE as u64;

/// Pages that follow each other, in memory and in a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Run {
    pub(super) range: Range<u64>,
    /// Number of the file, and its byte there.
    pub(super) file: u64,
    pub(super) offset: u64,
}

impl Run {
    /// That part of it, a run of shared memory, that a mapping of it from `offset` on
    /// shows at `range`.
    pub(super) fn shown_at(&self, offset: u64, range: &Range<u64>) -> Option<Self> {
        // All of them are below 2^47.
        let start = self.range.start.max(offset);
        let end = self.range.end.min(offset + (range.end - range.start));
        let moved = |at: u64| at - offset + range.start;
        (start < end).then(|| Self {
            range: moved(start)..moved(end),
            file: self.file,
            offset: self.offset + (start - self.range.start),
        })
    }
}

/// The runs in the file `file`; none: this is not what CRIU writes.
pub(super) fn runs_of(file: u64, entries: &[Message]) -> Option<Vec<Run>> {
    let (mut runs, mut offset) = (Vec::<Run>::new(), 0u64);
    for entry in entries {
        let flags = entry.number(4).unwrap_or(PRESENT);
        let count = entry.number(5).or_else(|| entry.number(2))?;
        let start = entry.number(1)?;
        let length = count.checked_mul(BYTES)?;
        let end = start.checked_add(length).filter(|&end| end <= ADDRESSES_END)?;
        let follows = runs.last().is_none_or(|last| last.range.end <= start);
        if flags & IN_PARENT != 0 || !start.is_multiple_of(BYTES) || !follows {
            return None;
        }
        if flags & PRESENT != 0 && count != 0 {
            runs.push(Run { range: start..end, file, offset });
            // Disjoint ranges, all below 2^47.
            offset += length;
        }
    }
    Some(runs)
}

/// What reads the runs of a process, in the order of their addresses.
#[derive(Debug)]
pub(super) struct Pages {
    images: Directory,
    files: BTreeMap<u64, File>,
    /// Where an address is in two, the first has it.
    cursors: [Cursor; 2],
}

/// Runs, and the next page of them.
#[derive(Debug)]
struct Cursor {
    runs: Vec<Run>,
    run: usize,
    /// Bytes of that run that were read.
    done: u64,
}

impl Cursor {
    fn next(&self) -> Option<u64> {
        self.runs.get(self.run).map(|run| run.range.start + self.done)
    }

    fn step(&mut self) {
        self.done += BYTES;
        if self.runs.get(self.run).is_some_and(|run| run.range.start + self.done >= run.range.end) {
            (self.run, self.done) = (self.run + 1, 0);
        }
    }
}

impl Pages {
    pub(super) fn new(images: Directory, runs: [Vec<Run>; 2]) -> Self {
        let cursors = runs.map(|runs| Cursor { runs, run: 0, done: 0 });
        Self { images, files: BTreeMap::new(), cursors }
    }

    /// The address of the next page.
    pub(super) fn next(&self) -> Option<u64> {
        self.cursors.iter().filter_map(Cursor::next).min()
    }

    /// Reads the next page, that at `address`, and goes on.
    pub(super) fn read(&mut self, address: u64, page: &mut Page) -> io::Result<()> {
        let found = self.cursors.iter().find(|cursor| cursor.next() == Some(address));
        let Some(run) = found.and_then(|cursor| cursor.runs.get(cursor.run)) else {
            return Ok(());
        };
        let (number, offset) = (run.file, run.offset + (address - run.range.start));
        let file = match self.files.entry(number) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                new.insert(self.images.file(format!("pages-{number}.img"), Access::Read)?)
            }
        };
        file.read_exact_at(page, offset)?;
        self.cursors.iter_mut().filter(|c| c.next() == Some(address)).for_each(Cursor::step);
        Ok(())
    }
}
