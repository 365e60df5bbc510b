use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use strata_sys::page_bytes;

use super::*;
use crate::disk::{Disk, NoCache};
use crate::nbd::Error;

const PAGES: u64 = 2000;
const SIZE: u64 = PAGES * PAGE;

/// xorshift64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn range(&mut self) -> Range<u64> {
        let (start, count) = (self.below(PAGES), 1 + self.below(40));
        start..(start + count).min(PAGES)
    }
}

/// A page that hardly compresses; no other seed gives it.
fn dense(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    for word in page.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes());
    }
    page
}

fn half(seed: u64) -> Page {
    let mut page = dense(seed);
    page[PAGE_SIZE / 2..].fill(7);
    page
}

struct Here {
    files: SwapFiles,
    room: Arc<AtomicBool>,
    disk: Arc<Persistent>,
}

impl Here {
    fn new() -> Self {
        let files = Persistent::create(SIZE).expect("files");
        let room = Arc::new(AtomicBool::new(true));
        let disk = Self::taken_over(&files, &room, None);
        Self { files, room, disk }
    }

    fn taken_over(
        files: &SwapFiles,
        room: &Arc<AtomicBool>,
        limit_bytes: Option<u64>,
    ) -> Arc<Persistent> {
        let (files, room) = (files.try_clone().expect("descriptors"), Arc::clone(room));
        let has_room = Box::new(move || room.load(SeqCst));
        Arc::new(Persistent::recover(files, SIZE, limit_bytes, has_room).expect("taken over"))
    }

    /// As when its process was killed: nothing of it is dropped.
    fn die(&mut self) {
        let next = Self::taken_over(&self.files, &self.room, None);
        std::mem::forget(std::mem::replace(&mut self.disk, next));
    }

    fn page(&self, index: u64) -> Page {
        let mut out = [0xee; PAGE_SIZE];
        self.disk.get(index, &mut out).expect("a page");
        out
    }
}

#[test]
fn it_is_what_a_model_says_whatever_comes_and_whoever_dies() {
    for seed in 1..=4 {
        let mut random = Random(seed);
        let mut here = Here::new();
        let mut model: Vec<Option<Page>> = vec![None; PAGES as usize];
        for round in 0..6000 {
            let index = random.below(PAGES);
            match random.below(100) {
                // Some contents are there many times.
                0..55 => {
                    let page = match random.below(6) {
                        0 => [0; PAGE_SIZE],
                        1 => [random.below(3) as u8; PAGE_SIZE],
                        2 | 3 => half(random.below(40)),
                        4 => half(random.next()),
                        _ => dense(random.next()),
                    };
                    here.disk.put(index, &page).expect("room");
                    model[index as usize] = Some(page).filter(|page| *page != [0; PAGE_SIZE]);
                }
                55..85 => {
                    let expected = model[index as usize].unwrap_or([0; PAGE_SIZE]);
                    assert!(here.page(index) == expected, "page {index} in round {round}");
                }
                85..93 => {
                    let range = random.range();
                    here.disk.discard(range.clone());
                    model[range.start as usize..range.end as usize].fill(None);
                }
                93..96 => {
                    here.room.store(false, SeqCst);
                    let refused = here.disk.put(index, &dense(random.next()));
                    assert_eq!(
                        refused.expect_err("no room").kind(),
                        io::ErrorKind::StorageFull,
                        "what was there stays"
                    );
                    // Zeroes need none.
                    let zeroed = random.below(PAGES);
                    here.disk.put(zeroed, &[0; PAGE_SIZE]).expect("zeroes");
                    model[zeroed as usize] = None;
                    here.room.store(true, SeqCst);
                }
                96..99 => here.disk.tend(),
                _ => here.die(),
            }
        }
        here.die();
        for index in 0..PAGES {
            let expected = model[index as usize].unwrap_or([0; PAGE_SIZE]);
            assert!(here.page(index) == expected, "page {index} in the end");
            let hole = here.disk.allocation(index * PAGE).hole;
            assert_eq!(hole, model[index as usize].is_none(), "page {index}");
        }
        let there: Vec<Page> = model.iter().flatten().copied().collect();
        let mut distinct = there.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let is_fill = |page: &&Page| page.iter().all(|&byte| byte == page[0]);
        let fills = there.iter().filter(is_fill).count() as u64;
        let objects = distinct.iter().filter(|page| !is_fill(page)).count() as u64;
        let figures = here.disk.figures();
        assert_eq!(
            (figures.pages, figures.fill_pages, figures.deduplicated_pages, figures.corrupt),
            (there.len() as u64, fills, there.len() as u64 - fills - objects, 0)
        );
    }
}

#[test]
fn a_store_that_is_full_refuses_and_loses_nothing() {
    let here = Here::new();
    let disk = Here::taken_over(&here.files, &here.room, Some(3 << 20));
    let mut taken = 0;
    while disk.put(taken, &dense(taken)).is_ok() {
        taken += 1;
        assert!(taken < PAGES, "it is never full");
    }
    assert!((500..1200).contains(&taken), "{taken}");
    let mut out = [0; PAGE_SIZE];
    for index in 0..taken {
        disk.get(index, &mut out).expect("a page");
        assert!(out == dense(index), "{index}");
    }
    assert!(disk.put(0, &dense(77_777)).is_err(), "still full");
    disk.get(0, &mut out).expect("a page");
    assert!(out == dense(0), "what was there is there still");
    assert_eq!(disk.figures().refused, 2);
    disk.discard(0..taken);
    disk.tend();
    disk.put(5, &dense(5)).expect("there is room again");
    assert_eq!(disk.figures().pages, 1);
}

#[test]
fn trimmed_and_zero_pages_cost_nothing_and_the_rest_little() {
    let here = Here::new();
    let empty = here.disk.figures().cost_bytes;
    for index in 0..PAGES {
        here.disk.put(index, &half(index % 100)).expect("room");
    }
    let full = here.disk.figures();
    assert_eq!((full.pages, full.deduplicated_pages), (PAGES, PAGES - 100));
    assert!(full.cost_bytes < SIZE / 4, "{full:?}");
    here.disk.zero_pages(0, SIZE, true).expect("zeroed");
    here.disk.tend();
    let after = here.disk.figures();
    assert_eq!((after.pages, after.deduplicated_pages, after.discarded), (0, 0, PAGES));
    assert!(after.cost_bytes < empty + (1 << 20), "{after:?}, {empty}");
    assert_eq!(here.page(PAGES - 1), [0; PAGE_SIZE]);
}

#[test]
fn what_cannot_be_taken_over_is_an_error_and_not_zeroes() {
    let mut here = Here::new();
    for index in 0..10 {
        here.disk.put(index, &dense(index)).expect("room");
    }
    // A name without an object.
    here.disk.map.atomic_u64(3 * ENTRY_BYTES).store(STORED | 0x7777, SeqCst);
    here.die();
    let mut out = [0; PAGE_SIZE];
    assert!(here.disk.get(3, &mut out).is_err());
    here.die();
    assert!(here.disk.get(3, &mut out).is_err(), "for good");
    assert!(here.page(4) == dense(4));
    assert_eq!((here.disk.figures().pages, here.disk.figures().corrupt), (10, 1));
    here.disk.put(3, &dense(33)).expect("room");
    assert!(here.page(3) == dense(33));
    here.disk.discard(0..10);
    assert_eq!(here.disk.figures().pages, 0);
    let files = here.files.try_clone().expect("descriptors");
    let other = Persistent::recover(files, SIZE * 2, None, Box::new(|| true));
    assert!(other.is_err(), "of another size");
}

#[test]
fn as_a_disk_it_has_parts_of_pages_holes_and_a_client_is_told_of_its_end() {
    let here = Here::new();
    here.disk.format().expect("room");
    let header = here.page(0);
    assert_eq!(&header[PAGE_SIZE - 10..], b"SWAPSPACE2");
    assert_eq!(header[1028..1032], (PAGES as u32 - 1).to_le_bytes());
    let disk = Disk::new(Box::new(Arc::clone(&here.disk)), false);
    let bytes = [5; 3000];
    let part = (PAGE * 7 + 2000, bytes.len() as u32);
    let write = |byte: u8| {
        let (mut pages, ()) = crate::disk::in_pages(part, |place| {
            place.fill(byte);
            Ok(())
        })
        .expect("pages");
        disk.write(&mut NoCache, &mut pages, part, true)
    };
    write(5).expect("written");
    let read = |part| {
        let mut buffer = Vec::new();
        disk.read(&mut NoCache, &mut buffer, part, &mut || (), <[u8]>::to_vec).expect("read")
    };
    assert_eq!(read(part), bytes);
    assert_eq!(read((PAGE * 7, 2000)), [0; 2000]);
    let extents = disk.status((0, (PAGE * 10) as u32), false);
    let holes: Vec<_> = extents.iter().map(|e| (u64::from(e.bytes) / PAGE, e.hole)).collect();
    assert_eq!(holes, [(1, false), (6, true), (2, false), (1, true)]);
    here.room.store(false, SeqCst);
    assert_eq!(write(6).expect_err("no room").error, Error::NoSpace);
    assert_eq!(read(part), bytes);
    // No part of a page is given up, and whole ones are.
    disk.trim(&mut NoCache, (PAGE * 7 + 1, (PAGE * 2 - 1) as u32), false).expect("trimmed");
    assert_eq!(here.page(8), [0; PAGE_SIZE]);
    assert_eq!(read((PAGE * 7 + 2000, 100)), [5; 100]);
    assert_eq!(page_bytes(&[PageBuffer(here.page(9))]), [0; PAGE_SIZE]);
}

#[test]
fn many_at_once_read_what_they_wrote() {
    let here = Here::new();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let disk = &here.disk;
            scope.spawn(move || {
                let mut out = [0; PAGE_SIZE];
                for round in 0..1500u64 {
                    let index = round * 7 % 401 * 4 + thread;
                    disk.put(index, &half(round % 50)).expect("room");
                    disk.get(index, &mut out).expect("a page");
                    assert!(out == half(round % 50), "{thread} {round}");
                    if round % 9 == 0 {
                        disk.discard(index..index + 1);
                    }
                }
            });
        }
        scope.spawn(|| (0..50).for_each(|_| here.disk.tend()));
    });
    let figures = here.disk.figures();
    let holes = (0..PAGES).filter(|&index| here.disk.allocation(index * PAGE).hole).count();
    assert_eq!(figures.pages, PAGES - holes as u64);
}
