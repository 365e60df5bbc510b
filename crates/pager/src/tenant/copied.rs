//! Pages that a snapshot has, and the store has not yet: raw copies in the
//! worker's own memory.
//!
//! A thread that is about to write waits for a copy and for nothing else: no
//! digest, no search for the same page, no memory file. What is here when the
//! worker dies is lost, and the half of a snapshot with it, which the next worker
//! frees anyway.

use std::collections::VecDeque;

use strata_sys::{LARGE_BUFFER_BYTES, LargeBuffer};
use strata_units::{PAGE_SIZE, PageId};

const PAGES: usize = LARGE_BUFFER_BYTES / PAGE_SIZE;

#[derive(Debug)]
struct Chunk {
    memory: LargeBuffer,
    /// Pages of it that were given out, from its beginning on.
    used: usize,
    /// Of those, pages whose copies are still wanted.
    live: usize,
}

/// The copies of one capture.
#[derive(Debug, Default)]
pub(crate) struct Copied {
    chunks: Vec<Option<Chunk>>,
    /// Where copies are added.
    filling: usize,
    /// The snapshot's pages, oldest copy first.
    pages: VecDeque<(PageId, u32)>,
}

impl Copied {
    /// What they cost.
    pub(crate) fn bytes(&self) -> u64 {
        (self.chunks.iter().flatten().count() * LARGE_BUFFER_BYTES) as u64
    }

    /// Has `read` fill room for `count` pages, at most [`PAGES`]; `read` says for
    /// each of them whose copy it is, if it is one. None: no memory.
    pub(crate) fn add(
        &mut self,
        count: usize,
        read: impl FnOnce(&mut [u8]) -> Vec<Option<PageId>>,
    ) -> Option<()> {
        let full =
            |chunk: &Option<Chunk>| chunk.as_ref().is_none_or(|chunk| chunk.used + count > PAGES);
        if self.chunks.get(self.filling).is_none_or(full) {
            self.filling = self.room()?;
        }
        let chunk = self.chunks[self.filling].as_mut()?;
        let first = chunk.used;
        let room = &mut chunk.memory[first * PAGE_SIZE..][..count * PAGE_SIZE];
        for (index, page) in read(room).into_iter().enumerate() {
            if let Some(page) = page {
                chunk.live += 1;
                self.pages.push_back((page, (self.filling * PAGES + first + index) as u32));
            }
        }
        chunk.used += count;
        Some(())
    }

    /// An empty chunk.
    fn room(&mut self) -> Option<usize> {
        let used_up = |chunk: &Chunk| chunk.live == 0;
        if let Some(index) = self.chunks.iter().position(|c| c.as_ref().is_some_and(used_up)) {
            self.chunks[index].as_mut()?.used = 0;
            return Some(index);
        }
        let chunk = Some(Chunk { memory: LargeBuffer::new().ok()?, used: 0, live: 0 });
        match self.chunks.iter().position(Option::is_none) {
            Some(index) => {
                self.chunks[index] = chunk;
                Some(index)
            }
            None => {
                self.chunks.push(chunk);
                Some(self.chunks.len() - 1)
            }
        }
    }

    /// Copies the oldest ones out, as many as `buffer` has room for, and forgets
    /// them: the pages, in the order of the buffer.
    pub(crate) fn take(&mut self, buffer: &mut [u8]) -> Vec<PageId> {
        let count = self.pages.len().min(buffer.len() / PAGE_SIZE);
        let mut taken = Vec::with_capacity(count);
        for ((page, slot), target) in
            self.pages.drain(..count).zip(buffer.chunks_exact_mut(PAGE_SIZE))
        {
            let (index, offset) = (slot as usize / PAGES, slot as usize % PAGES);
            let chunk = self.chunks[index].as_mut().expect("a chunk stays while it is wanted");
            target.copy_from_slice(&chunk.memory[offset * PAGE_SIZE..][..PAGE_SIZE]);
            chunk.live -= 1;
            if chunk.live == 0 && index != self.filling {
                self.chunks[index] = None;
            }
            taken.push(page);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(copied: &mut Copied, pages: &[u32]) {
        copied
            .add(pages.len(), |room| {
                for (page, bytes) in pages.iter().zip(room.chunks_exact_mut(PAGE_SIZE)) {
                    bytes.fill(*page as u8);
                }
                // Every seventh was written meanwhile.
                pages.iter().map(|page| (page % 7 != 0).then_some(PageId(*page))).collect()
            })
            .expect("memory");
    }

    #[test]
    fn every_copy_comes_back_once_and_in_order() {
        let mut copied = Copied::default();
        let mut expected = VecDeque::new();
        let mut buffer = vec![0; 48 * PAGE_SIZE];
        let (mut next, mut most) = (0, 0);
        for round in 0..400 {
            let pages: Vec<u32> = (next..next + 1 + round % 31).collect();
            next += pages.len() as u32;
            add(&mut copied, &pages);
            expected.extend(pages.into_iter().filter(|page| page % 7 != 0));
            if round % 3 == 0 {
                let taken = copied.take(&mut buffer);
                for (page, bytes) in taken.iter().zip(buffer.chunks_exact(PAGE_SIZE)) {
                    assert_eq!(expected.pop_front(), Some(page.0));
                    assert!(bytes.iter().all(|&byte| byte == page.0 as u8), "page {}", page.0);
                }
            }
            most = most.max(copied.bytes());
        }
        while !copied.pages.is_empty() {
            for page in copied.take(&mut buffer) {
                assert_eq!(expected.pop_front(), Some(page.0));
            }
        }
        assert!(expected.is_empty());
        assert_eq!(copied.bytes(), LARGE_BUFFER_BYTES as u64, "one chunk is kept");
        assert!(most > copied.bytes());
    }
}
