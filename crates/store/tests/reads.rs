//! Reads of the tier file that nobody waits for: right bytes, or word that the page
//! has moved.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use common::{Page, Random, keep_house, page, store_with_file};
use strata_store::{
    Backing, FileBacking, FileRead, MappedBacking, MemoryBacking, Put, Source, Store, Unread,
};
use strata_sys::{EventFd, MappingKind, ReadId, ReadQueue};
use strata_units::Handle;

fn queue() -> (ReadQueue, Arc<EventFd>) {
    let bell = Arc::new(EventFd::new().expect("an eventfd"));
    (ReadQueue::new(8, &bell), bell)
}

fn finished(queue: &mut ReadQueue, id: ReadId) {
    loop {
        if let Some((done, result)) = queue.completed() {
            assert_eq!(done, id);
            result.expect("a device without faults");
            return;
        }
        std::thread::yield_now();
    }
}

/// Reads as a handler does, once.
fn read_once(
    store: &Store,
    queue: &mut ReadQueue,
    handle: Handle,
    read: &FileRead,
    out: &mut Page,
) -> Result<(), Unread> {
    let id = store.begin_read(queue, read, (read.start(), read.end())).expect("room");
    finished(queue, id);
    let got = store.get_from(handle, read, read.start(), queue.bytes(id), out);
    queue.give_back(id);
    got.map(drop)
}

#[test]
fn what_is_read_from_the_file_is_the_page() {
    let (store, faults) = store_with_file(None, 8 << 20);
    let seeds: Vec<u64> = (0..200).filter(|seed| seed % 8 != 0).collect();
    let pages: Vec<(Handle, u64)> =
        seeds.iter().map(|&seed| (store.put(&page(seed), Put::Fast).expect("put"), seed)).collect();
    assert!(pages.iter().all(|&(handle, _)| store.file_read(handle).is_none()));
    assert_eq!(store.demote(1000), pages.len());
    let (mut queue, _bell) = queue();
    let mut out: Page = [0; 4096];
    for &(handle, seed) in &pages {
        let read = store.file_read(handle).expect("it is in the file");
        assert!(read.start().is_multiple_of(4096) && read.end() - read.start() <= 8192);
        read_once(&store, &mut queue, handle, &read, &mut out).expect("the page");
        assert!(out == page(seed), "page {seed}");
    }
    let (handle, _) = pages[0];
    let read = store.file_read(handle).expect("still there");
    faults.flipped_bit.store(1, Relaxed);
    let got = read_once(&store, &mut queue, handle, &read, &mut out);
    assert_eq!(got, Err(Unread::Corrupt));
    faults.flipped_bit.store(0, Relaxed);
    read_once(&store, &mut queue, handle, &read, &mut out).expect("good bytes this time");
}

#[test]
fn a_place_that_was_used_again_is_not_the_page() {
    let (store, _faults) = store_with_file(None, 8 << 20);
    let fill = |store: &Store, first: u64| -> Vec<Handle> {
        let pages = (first..first + 256).map(|seed| seed * 8 + 7);
        let handles = pages.map(|seed| store.put(&page(seed), Put::Fast).expect("put")).collect();
        while store.demote(300) > 0 {}
        handles
    };
    // Noise: four segments full, of thirty-two, so that the log comes round.
    let handles = fill(&store, 0);
    let reads: Vec<FileRead> =
        handles.iter().map(|&handle| store.file_read(handle).expect("in the file")).collect();
    let (mut queue, _bell) = queue();
    let id =
        store.begin_read(&mut queue, &reads[0], (reads[0].start(), reads[0].end())).expect("room");
    finished(&mut queue, id);
    for &handle in &handles {
        store.release(handle);
    }
    store.reap();
    // Until the log has come round, and the id and the place are another page's.
    let mut out: Page = [0; 4096];
    let mut met = false;
    for round in 1..20 {
        let now = fill(&store, round * 1000);
        for &handle in &now {
            let there = store.file_read(handle).expect("in the file");
            if handle == handles[0] && there.start() == reads[0].start() {
                met = true;
                let got =
                    store.get_from(handle, &reads[0], reads[0].start(), queue.bytes(id), &mut out);
                assert_eq!(got, Err(Unread::Moved), "old bytes, and not only by their checksum");
            }
            store.release(handle);
        }
        store.reap();
    }
    assert!(met, "the place was used again for the same handle");
}

#[test]
fn readers_that_do_not_wait_see_the_right_bytes_while_objects_move() {
    let (store, _faults) = store_with_file(Some(1 << 20), 6 << 20);
    let done = AtomicBool::new(false);
    let (read, moved) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (store, done, read, moved) = (&store, &done, &read, &moved);
        let worker = scope.spawn(move || {
            let mut random = Random::new(5);
            let (mut queue, _bell) = queue();
            let mut held: Vec<(Handle, u64)> = Vec::new();
            let mut out: Page = [0; 4096];
            for _ in 0..20_000 {
                let seed = random.below(3000) as u64;
                if let Ok(handle) = store.put(&page(seed), Put::Fast) {
                    held.push((handle, seed));
                }
                let (handle, seed) = held[random.below(held.len())];
                if let Some(file_read) = store.file_read(handle) {
                    match read_once(store, &mut queue, handle, &file_read, &mut out) {
                        Ok(()) => {
                            read.fetch_add(1, Relaxed);
                            assert!(out == page(seed), "{handle:?} does not hold page {seed}");
                        }
                        Err(Unread::Moved) => {
                            moved.fetch_add(1, Relaxed);
                        }
                        Err(Unread::Corrupt) => panic!("page {seed} is corrupt"),
                    }
                }
                if held.len() > 1200 {
                    let (handle, _) = held.swap_remove(random.below(held.len()));
                    store.release(handle);
                }
            }
        });
        scope.spawn(move || keep_house(store, done, 300));
        worker.join().expect("the worker");
        done.store(true, Relaxed);
    });
    assert!(read.load(Relaxed) > 1000, "{read:?} read, {moved:?} moved");
}

#[test]
fn a_mapped_file_is_read_at_once_and_survives_its_worker() {
    let path = std::env::temp_dir().join(format!("strata-mapped-tier-{}", std::process::id()));
    let file = FileBacking::create(&path, 8 << 20).expect("a file");
    let Ok(mapped) = MappedBacking::of(file, MappingKind::Any) else { return };
    let data = Box::new(MemoryBacking::create("strata-data", 1 << 30).expect("memory"));
    let store = Store::create_on(None, data, Some(Box::new(mapped))).expect("a store");
    let pages: Vec<(Handle, u64)> = (0..400)
        .filter(|seed| seed % 8 != 0)
        .map(|seed| (store.put(&page(seed), Put::Fast).expect("put"), seed))
        .collect();
    assert_eq!(store.demote(1000), pages.len());
    let mut out: Page = [0; 4096];
    for &(handle, seed) in &pages {
        assert_eq!(store.file_read(handle), None, "nobody has to wait");
        assert_eq!(store.get(handle, &mut out).expect("a page"), Source::File);
        assert!(out == page(seed), "page {seed}");
    }
    // Another worker may find that the file cannot be mapped.
    let copy = |descriptor: std::os::fd::BorrowedFd<'_>| descriptor.try_clone_to_owned();
    let descriptors = store.descriptors();
    let file = copy(descriptors.file.expect("a file")).expect("dup");
    let file = FileBacking::attach(file, 8 << 20);
    assert_eq!(file.capacity_bytes(), 8 << 20);
    let data = MemoryBacking::attach(copy(descriptors.data).expect("dup")).expect("memory");
    let table = copy(descriptors.table).expect("dup");
    drop(store);
    let mut recovery =
        Store::recover_on(table, None, Box::new(data), Some(Box::new(file))).expect("a store");
    for &(handle, seed) in &pages {
        assert_eq!(recovery.reference(handle), Ok(()), "page {seed}");
    }
    let store = recovery.finish();
    for &(handle, seed) in &pages {
        store.get(handle, &mut out).expect("a page");
        assert!(out == page(seed), "page {seed}");
    }
}

#[test]
fn a_page_that_is_promoted_is_the_youngest_in_memory() {
    let (store, _faults) = store_with_file(None, 8 << 20);
    let seeds: Vec<u64> = (1..5).chain(9..13).collect();
    let pages: Vec<Handle> =
        seeds.iter().map(|&seed| store.put(&page(seed), Put::Fast).expect("put")).collect();
    assert_eq!(store.promote(pages[0], &page(1)), None, "it is in memory");
    assert_eq!(store.demote(100), pages.len());
    assert_eq!(store.promote(pages[0], &page(2)), None, "another page's bytes");
    store.retain(pages[1]);
    assert_eq!(store.promote(pages[1], &page(2)), None, "others refer to it, too");
    let promoted = store.promote(pages[0], &page(1)).expect("room");
    store.release(pages[0]);
    let other = store.put(&page(100), Put::Fast).expect("put");
    let mut out: Page = [0; 4096];
    assert_eq!(store.get(promoted, &mut out).expect("a page"), Source::Compressed);
    assert!(out == page(1));
    assert_eq!(store.demote(1), 1);
    assert_eq!((store.locate(promoted), store.locate(other)), (Source::File, Source::Compressed));
    store.get(promoted, &mut out).expect("a page");
    assert!(out == page(1));
    let stats = store.stats();
    assert_eq!((stats.stored_pages, stats.file_objects), (10, 8));
}
