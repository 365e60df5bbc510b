//! Checks every byte of a snapshot file, front to back, without the order of the
//! processes' pages.

use strata_units::PAGE_SIZE;

use super::blocks::Scratch;
use super::format::{BLOCK_PAGES, Content};
use super::read::{Fault, Reader};
use super::read_error::ReadError;

/// How many blocks of pages (at most a megabyte) are checked before `tell` hears
/// of them.
const TELL_BLOCKS: usize = 16;

impl Reader {
    /// Reads and checks all that [`Reader::open`] has not: every page, every
    /// file. `tell(done, total)` hears how many distinct pages are checked.
    ///
    /// # Errors
    /// See [`ReadError`]; the first damage that is found.
    pub fn verify(&self, tell: &mut dyn FnMut(u64, u64)) -> Result<(), ReadError> {
        let mut scratch = Scratch::default();
        for index in 0..self.blocks.places.len() {
            self.verify_block(index, &mut scratch)?;
            if index % TELL_BLOCKS == 0 {
                tell((index * BLOCK_PAGES) as u64, self.blocks.count);
            }
        }
        for file in 0..self.files().len() {
            self.read_file(file, &mut scratch, |_| Ok(()))?;
        }
        tell(self.blocks.count, self.blocks.count);
        Ok(())
    }

    fn verify_block(&self, index: usize, scratch: &mut Scratch) -> Result<(), ReadError> {
        let first = index * BLOCK_PAGES;
        let block = match self.page_block(index, scratch) {
            Ok(block) => block,
            Err(Fault::Io(error)) => return Err(self.failed(error)),
            Err(Fault::Damaged) => {
                return Err(self.damaged_pages(index, first..first + BLOCK_PAGES));
            }
        };
        let bad = (0..block.count()).find(|&page| block.page(page, self.seed).is_none());
        match bad {
            Some(page) => Err(self.damaged_pages(index, first + page..first + page + 1)),
            None if block.is_whole => Ok(()),
            // Every page can be read all the same.
            None => Err(self.damaged("what packs some pages", self.blocks.places[index].offset)),
        }
    }

    /// Names the first page of a process that has one of the distinct pages
    /// `contents`, which lie in the block at `index`.
    fn damaged_pages(&self, index: usize, contents: std::ops::Range<usize>) -> ReadError {
        let (from, to) = (contents.start as u64, contents.end as u64);
        for (process, extents) in self.processes().iter().zip(&self.extents) {
            for extent in extents {
                let Content::Stored(first) = extent.content else { continue };
                let first = u64::from(first);
                let hit = first.max(from);
                if hit < to.min(first + u64::from(extent.count)) {
                    let address = (extent.first + (hit - first)) * PAGE_SIZE as u64;
                    let path = self.path.clone();
                    return ReadError::DamagedPage { path, pid: process.pid, address };
                }
            }
        }
        self.damaged("pages that no process has", self.blocks.places[index].offset)
    }
}
