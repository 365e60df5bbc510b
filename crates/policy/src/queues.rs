//! First-in-first-out queues of page ids in one pool of chunks, a little over
//! four bytes an entry. Knows nothing of levels or gaps; [`crate::replacement`]
//! decides what each queue means.
//!
//! A chunk carries one time stamp; the time of an entry inside it is interpolated
//! to the next chunk's. Chunks come from slabs, so that growing never copies and
//! wastes at most one slab.

use strata_units::PageId;

const CHUNK_ENTRIES: usize = 64;
const SLAB_CHUNKS: usize = 32;
const NONE: u32 = u32::MAX;

#[derive(Clone)]
struct Chunk {
    next: u32,
    /// Time of the first entry ever put in.
    stamp: u32,
    start: u8,
    end: u8,
    pages: [PageId; CHUNK_ENTRIES],
}

const EMPTY: Chunk =
    Chunk { next: NONE, stamp: 0, start: 0, end: 0, pages: [PageId(0); CHUNK_ENTRIES] };

#[derive(Clone, Copy)]
struct Ends {
    head: u32,
    tail: u32,
    len: u32,
}

/// `QUEUES` queues over one pool.
pub(crate) struct Queues<const QUEUES: usize> {
    slabs: Vec<Box<[Chunk; SLAB_CHUNKS]>>,
    free: u32,
    ends: [Ends; QUEUES],
    entries: usize,
}

impl<const QUEUES: usize> Queues<QUEUES> {
    pub(crate) fn new() -> Self {
        let ends = [Ends { head: NONE, tail: NONE, len: 0 }; QUEUES];
        Self { slabs: Vec::new(), free: NONE, ends, entries: 0 }
    }

    /// Entries in all queues.
    pub(crate) fn entries(&self) -> usize {
        self.entries
    }

    pub(crate) fn len(&self, queue: usize) -> usize {
        self.ends[queue].len as usize
    }

    /// Memory held, unused chunks included.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.slabs.len() * size_of::<[Chunk; SLAB_CHUNKS]>()
            + self.slabs.capacity() * size_of::<usize>()
    }

    /// Chunks held for each that a full packing of the entries would need.
    pub(crate) fn slack_chunks(&self) -> usize {
        let packed = self.entries.div_ceil(CHUNK_ENTRIES) + 2 * QUEUES;
        (self.slabs.len() * SLAB_CHUNKS).saturating_sub(packed)
    }

    fn chunk(&self, index: u32) -> &Chunk {
        &self.slabs[index as usize / SLAB_CHUNKS][index as usize % SLAB_CHUNKS]
    }

    fn chunk_mut(&mut self, index: u32) -> &mut Chunk {
        &mut self.slabs[index as usize / SLAB_CHUNKS][index as usize % SLAB_CHUNKS]
    }

    fn take_free(&mut self) -> u32 {
        if self.free == NONE {
            let first = (self.slabs.len() * SLAB_CHUNKS) as u32;
            let mut slab = Box::new([EMPTY; SLAB_CHUNKS]);
            for (offset, chunk) in slab.iter_mut().enumerate() {
                let last = offset + 1 == SLAB_CHUNKS;
                chunk.next = if last { NONE } else { first + offset as u32 + 1 };
            }
            self.slabs.push(slab);
            self.free = first;
        }
        let index = self.free;
        self.free = self.chunk(index).next;
        index
    }

    /// Puts `page` at the young end. Times must not go back within a queue.
    pub(crate) fn push(&mut self, queue: usize, page: PageId, time: u32) {
        let tail = self.ends[queue].tail;
        let full = tail == NONE || self.chunk(tail).end as usize == CHUNK_ENTRIES;
        let index = if full {
            let index = self.take_free();
            *self.chunk_mut(index) = Chunk { stamp: time, ..EMPTY };
            if tail == NONE {
                self.ends[queue].head = index;
            } else {
                self.chunk_mut(tail).next = index;
            }
            self.ends[queue].tail = index;
            index
        } else {
            tail
        };
        let chunk = self.chunk_mut(index);
        chunk.pages[chunk.end as usize] = page;
        chunk.end += 1;
        self.ends[queue].len += 1;
        self.entries += 1;
    }

    fn entry_time(&self, index: u32, position: u8, now: u32) -> u32 {
        let chunk = self.chunk(index);
        let until = if chunk.next == NONE { now } else { self.chunk(chunk.next).stamp };
        let span = until.wrapping_sub(chunk.stamp);
        let entries = u64::from(chunk.end).max(1);
        let part = u64::from(span) * u64::from(position) / entries;
        chunk.stamp.wrapping_add(part as u32)
    }

    /// When the oldest entry was put in, about.
    pub(crate) fn oldest_time(&self, queue: usize, now: u32) -> Option<u32> {
        let head = self.ends[queue].head;
        (head != NONE).then(|| self.entry_time(head, self.chunk(head).start, now))
    }

    /// Takes the oldest entry, with its time, about.
    pub(crate) fn pop_oldest(&mut self, queue: usize, now: u32) -> Option<(PageId, u32)> {
        let head = self.ends[queue].head;
        if head == NONE {
            return None;
        }
        let time = self.entry_time(head, self.chunk(head).start, now);
        let chunk = self.chunk_mut(head);
        let page = chunk.pages[chunk.start as usize];
        chunk.start += 1;
        let (emptied, next) = (chunk.start == chunk.end, chunk.next);
        self.ends[queue].len -= 1;
        self.entries -= 1;
        if emptied {
            self.ends[queue].head = next;
            if next == NONE {
                self.ends[queue].tail = NONE;
            }
            self.chunk_mut(head).next = self.free;
            self.free = head;
        }
        Some((page, time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn behaves_like_deques_and_reuses_its_chunks() {
        let mut queues = Queues::<3>::new();
        let mut model: [VecDeque<u32>; 3] = Default::default();
        let mut seed = 1u64;
        let mut most = 0;
        for step in 0..200_000u32 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            let queue = (seed >> 33) as usize % 3;
            let grow = step / 20_000 % 2 == 0;
            match (seed >> 40) % 4 {
                1 if !grow => {
                    let popped = queues.pop_oldest(queue, step).map(|(page, _)| page.0);
                    assert_eq!(popped, model[queue].pop_front());
                }
                2 if !grow => {}
                _ => {
                    queues.push(queue, PageId(step), step);
                    model[queue].push_back(step);
                }
            }
            assert_eq!(queues.len(queue), model[queue].len());
            most = most.max(queues.entries());
        }
        assert_eq!(queues.entries(), model.iter().map(VecDeque::len).sum::<usize>());
        let per_entry = queues.memory_bytes() as f64 / most as f64;
        assert!(most > 5_000 && per_entry < 5.0, "{most} entries, {per_entry} bytes each");
    }

    #[test]
    fn entry_times_are_interpolated() {
        let mut queues = Queues::<1>::new();
        for n in 0..1000u32 {
            queues.push(0, PageId(n), n.wrapping_mul(10).wrapping_sub(5_000));
        }
        for n in 0..1000u32 {
            let put = n.wrapping_mul(10).wrapping_sub(5_000);
            let (page, time) =
                queues.pop_oldest(0, 10_000u32.wrapping_sub(5_000)).expect("an entry");
            assert_eq!(page.0, n);
            assert!(time.wrapping_sub(put) as i32 >= -20 && (time.wrapping_sub(put) as i32) < 20);
        }
    }
}
