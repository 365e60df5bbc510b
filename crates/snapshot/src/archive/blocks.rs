//! Blocks of pages: where they lie in a snapshot file, and how their pages come out of
//! them. Whoever has this needs nothing else of the file to read its pages.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use zstd::bulk::Decompressor;

use super::Page;
use super::format::{BLOCK_PAGES, BlockHead, HEAD_BYTES, Kind, page_sum, sum, u64_at};
use super::read::{Fault, Place};

/// Blocks that a [`Scratch`] keeps unpacked: processes that were forked from each
/// other refer to each other's pages.
const SCRATCH_BLOCKS: usize = 4;

/// Fills what it is given from an offset of the file.
pub type ReadBytes<'a> = &'a mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>;

/// Where the distinct pages of a snapshot file are.
#[derive(Clone, Debug)]
pub struct PageBlocks {
    /// Tells it from others of this process.
    id: u64,
    seed: u64,
    /// Distinct pages.
    pub(super) count: u64,
    pub(super) places: Vec<Place>,
}

/// What one thread needs to read: buffers, and the blocks that it read last.
#[derive(Default)]
pub struct Scratch {
    file: u64,
    pub(super) stored: Vec<u8>,
    pub(super) decompressor: Option<Decompressor<'static>>,
    blocks: Vec<Block>,
    next: usize,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch").field("blocks", &self.blocks.len()).finish_non_exhaustive()
    }
}

/// An unpacked block of pages.
#[derive(Default)]
pub(super) struct Block {
    index: usize,
    pages: Vec<u8>,
    sums: Vec<u8>,
    /// Whether all of it was as it was written, not only the pages.
    pub(super) is_whole: bool,
}

impl Block {
    pub(super) fn count(&self) -> usize {
        self.pages.len() / size_of::<Page>()
    }

    /// The page at `index`, if its bytes are those that were written.
    pub(super) fn page(&self, index: usize, seed: u64) -> Option<&Page> {
        let page = self.pages.as_chunks().0.get(index)?;
        (page_sum(page, seed) == u64_at(&self.sums, 8 * index)).then_some(page)
    }
}

/// What a block holds, unpacked into `out`. False: not all of it.
pub(super) fn unpack(
    decompressor: &mut Option<Decompressor<'static>>,
    stored: &[u8],
    raw_bytes: usize,
    out: &mut Vec<u8>,
) -> io::Result<bool> {
    out.clear();
    if stored.len() == raw_bytes {
        out.extend_from_slice(stored);
        return Ok(true);
    }
    out.resize(raw_bytes, 0);
    let decompressor = match decompressor {
        Some(decompressor) => decompressor,
        empty => empty.insert(Decompressor::new()?),
    };
    let unpacked = decompressor.decompress_to_buffer(stored, &mut out[..]);
    Ok(unpacked.is_ok_and(|len| len == raw_bytes))
}

/// Reads a block into `stored` and checks its head.
pub(super) fn read_head(
    (place, kind, owner): (Place, Kind, u16),
    seed: u64,
    stored: &mut Vec<u8>,
    read: ReadBytes<'_>,
) -> Result<BlockHead, Fault> {
    stored.resize(place.len_bytes as usize, 0);
    read(place.offset, stored).map_err(Fault::Io)?;
    BlockHead::decode(stored, seed)
        .filter(|head| (head.kind, head.owner, head.number) == (kind, owner, place.number))
        .ok_or(Fault::Damaged)
}

impl PageBlocks {
    pub(super) fn new(seed: u64, count: u64) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, seed, count, places: Vec::new() }
    }

    /// The bytes of the file that hold distinct page `content`: the first one's offset, and
    /// how many. None: there is no such page.
    #[must_use]
    pub fn place(&self, content: u32) -> Option<(u64, usize)> {
        let place = self.places.get(content as usize / BLOCK_PAGES)?;
        (u64::from(content) < self.count).then_some((place.offset, place.len_bytes as usize))
    }

    /// The distinct page `content`, by what `read` fetches of the file, if `scratch` does not
    /// have it. False: its bytes are not what was written.
    ///
    /// # Errors
    /// What `read` says.
    pub fn get(
        &self,
        content: u32,
        scratch: &mut Scratch,
        read: ReadBytes<'_>,
        out: &mut Page,
    ) -> io::Result<bool> {
        let content = content as usize;
        let block = match self.block(content / BLOCK_PAGES, scratch, read) {
            Ok(block) => block,
            Err(Fault::Io(error)) => return Err(error),
            Err(Fault::Damaged) => return Ok(false),
        };
        if let Some(page) = block.page(content % BLOCK_PAGES, self.seed) {
            out.copy_from_slice(page);
            return Ok(true);
        }
        // Whoever tries again is to have better bytes, if there are any.
        scratch.blocks.retain(|block| block.index != content / BLOCK_PAGES);
        Ok(false)
    }

    /// Reads the block of pages at `index`. What of it is damaged shows at its
    /// pages; the fault is for a head that cannot be trusted.
    pub(super) fn block<'a>(
        &self,
        index: usize,
        scratch: &'a mut Scratch,
        read: ReadBytes<'_>,
    ) -> Result<&'a Block, Fault> {
        if scratch.file != self.id {
            scratch.file = self.id;
            scratch.blocks.clear();
        }
        if let Some(at) = scratch.blocks.iter().position(|block| block.index == index) {
            return Ok(&scratch.blocks[at]);
        }
        let place = *self.places.get(index).ok_or(Fault::Damaged)?;
        let head = read_head((place, Kind::Pages, 0), self.seed, &mut scratch.stored, read)?;
        let pages = (self.count - (index * BLOCK_PAGES) as u64).min(BLOCK_PAGES as u64);
        if u64::from(head.items) != pages {
            return Err(Fault::Damaged);
        }
        let mut block = match scratch.blocks.len() {
            SCRATCH_BLOCKS => {
                scratch.next = (scratch.next + 1) % SCRATCH_BLOCKS;
                scratch.blocks.swap_remove(scratch.next)
            }
            _ => Block::default(),
        };
        let (sums, stored) = scratch.stored[HEAD_BYTES..].split_at(head.sums_bytes());
        block.index = index;
        block.sums.clear();
        block.sums.extend_from_slice(sums);
        let unpacked =
            unpack(&mut scratch.decompressor, stored, head.raw_bytes as usize, &mut block.pages)
                .map_err(Fault::Io)?;
        block.is_whole = unpacked && sum(stored, self.seed) == head.stored_sum;
        scratch.blocks.push(block);
        scratch.blocks.last().ok_or(Fault::Damaged)
    }
}
