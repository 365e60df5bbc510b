//! Readers check content while everything moves under them.

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use common::{Page, Random, keep_house, page, store_with_file};
use strata_store::{Put, Source, Store};
use strata_units::Handle;

const SLOTS: usize = 1500;
const SEEDS: usize = 3000;
const PUTS: usize = 30_000;

type Slots = Vec<Mutex<Option<(Handle, u64)>>>;

fn put_and_release(store: &Store, slots: &Slots, seed: u64) {
    let mut random = Random::new(seed);
    for _ in 0..PUTS / 2 {
        let seed = random.below(SEEDS) as u64;
        let how = [Put::Staged, Put::Staged, Put::Fast, Put::Zstd][random.below(4)];
        let new = store.put(&page(seed), how).ok().map(|handle| (handle, seed));
        let index = random.below(slots.len());
        let old = std::mem::replace(&mut *slots[index].lock().expect("slot"), new);
        if let Some((handle, _)) = old {
            store.release(handle);
        }
    }
}

fn read(store: &Store, slots: &Slots, done: &AtomicBool, seen: &[AtomicU64; 4], seed: u64) {
    let mut random = Random::new(seed);
    let mut out: Page = [0; 4096];
    while !done.load(Relaxed) {
        let held = {
            let slot = slots[random.below(slots.len())].lock().expect("slot");
            slot.inspect(|(handle, _)| store.retain(*handle))
        };
        let Some((handle, seed)) = held else { continue };
        let source = store.get(handle, &mut out).expect("a stored page");
        assert!(out == page(seed), "{handle:?} does not hold page {seed}");
        let kind = match source {
            Source::Fill => 0,
            Source::Staged => 1,
            Source::Compressed => 2,
            Source::File => 3,
        };
        seen[kind].fetch_add(1, Relaxed);
        store.release(handle);
    }
}

#[test]
fn readers_see_the_right_bytes_while_objects_move() {
    let (store, _faults) = store_with_file(Some(1 << 20), 6 << 20);
    let slots: Slots = (0..SLOTS).map(|_| Mutex::new(None)).collect();
    let done = AtomicBool::new(false);
    let seen = [const { AtomicU64::new(0) }; 4];
    let moved = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2)
            .map(|writer| {
                scope.spawn({
                    let (store, slots) = (&store, &slots);
                    move || put_and_release(store, slots, 100 + writer)
                })
            })
            .collect();
        for reader in 0..2 {
            let (store, slots, done, seen) = (&store, &slots, &done, &seen);
            scope.spawn(move || read(store, slots, done, seen, 200 + reader));
        }
        scope.spawn(|| moved.fetch_add(keep_house(&store, &done, 300), Relaxed));
        for writer in writers {
            writer.join().expect("a writer");
        }
        done.store(true, Relaxed);
    });
    let seen = seen.map(AtomicU64::into_inner);
    assert!(seen.iter().all(|&count| count > 0), "every source was read: {seen:?}");
    assert!(moved.into_inner() > 0, "compaction moved something");
    let stats = store.stats();
    assert_eq!((stats.tier_errors, stats.corrupt_objects), (0, 0));
    for slot in slots {
        if let Some((handle, seed)) = slot.into_inner().expect("slot") {
            let mut out: Page = [0; 4096];
            store.get(handle, &mut out).expect("a stored page");
            assert!(out == page(seed));
            store.release(handle);
        }
    }
    store.reap();
    let stats = store.stats();
    assert_eq!((stats.stored_pages, stats.objects), (0, 0));
    assert_eq!((stats.payload_bytes, stats.file_payload_bytes), (0, 0));
}

#[test]
fn counting_from_many_threads_is_exact() {
    // More references than an object's word can count, from threads that cross
    // its edge again and again.
    const EACH: usize = 40_000;
    let (store, _faults) = store_with_file(None, 6 << 20);
    let handle = store.put(&page(1), Put::Fast).expect("put");
    for _ in 0..3 {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..EACH).for_each(|_| store.retain(handle)));
            }
        });
        assert_eq!(store.put(&page(1), Put::Fast).expect("put"), handle, "still one object");
        store.release(handle);
        assert_eq!(store.stats().stored_pages, 2 * EACH as u64 + 1);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..EACH).for_each(|_| store.release(handle)));
            }
        });
        assert_eq!(store.reap(), 0, "one reference is left");
        let mut out: Page = [0; 4096];
        store.get(handle, &mut out).expect("a stored page");
        assert!(out == page(1));
    }
    store.release(handle);
    assert_eq!(store.reap(), 1);
    assert_eq!(store.stats().objects, 0);
}
