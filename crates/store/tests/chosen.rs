//! Objects that the owner chooses for the tier file.
#![forbid(unsafe_code)]

mod common;

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use common::{page, store_with_file};
use strata_store::{MemoryBacking, Put, Source, Store};
use strata_units::Handle;

#[test]
fn what_is_chosen_goes_to_the_file_and_reads_back() {
    let (store, _) = store_with_file(None, 64 << 20);
    let handles: Vec<Handle> =
        (0..400).map(|seed| store.put(&page(seed), Put::Zstd).expect("room")).collect();
    // The same object under two references, and one named twice.
    let again = store.put(&page(1), Put::Zstd).expect("room");
    let chosen: Vec<Handle> =
        handles[..200].iter().copied().chain([again, handles[2], handles[2]]).collect();
    let moved = store.demote_these(&chosen);
    let in_file = |handle: &&Handle| store.locate(**handle) == Source::File;
    let objects = (0..200u64).filter(|seed| seed % 8 != 0).count();
    assert_eq!(moved, objects, "all but those of one value");
    assert_eq!(handles[..200].iter().filter(in_file).count(), objects);
    assert_eq!(handles[200..].iter().filter(in_file).count(), 0, "nothing else");
    assert_eq!(store.demote_these(&chosen), 0, "they are there");
    let mut out = [0; 4096];
    for (seed, &handle) in handles.iter().enumerate() {
        store.get(handle, &mut out).expect("readable");
        assert!(out == page(seed as u64), "page {seed}");
    }
    for handle in handles.into_iter().chain([again]) {
        store.release(handle);
    }
    store.reap();
    assert_eq!(store.stats().objects, 0);
}

#[test]
fn staged_pages_and_stores_without_a_file_are_left_alone() {
    let (store, _) = store_with_file(None, 64 << 20);
    let staged = store.put(&page(1), Put::Staged).expect("room");
    assert_eq!(store.demote_these(&[staged]), 0);
    assert_eq!(store.locate(staged), Source::Staged);
    let plain = Store::create(strata_store::StoreConfig::default()).expect("memory");
    let handle = plain.put(&page(1), Put::Zstd).expect("room");
    assert_eq!(plain.demote_these(&[handle]), 0);
    assert_eq!(plain.locate(handle), Source::Compressed);
}

#[test]
fn staged_pages_go_to_the_file_as_they_are_and_stay_staged_where_it_fails() {
    let (store, faults) = store_with_file(None, 64 << 20);
    let handles: Vec<Handle> =
        (1..400).map(|seed| store.put(&page(seed), Put::Staged).expect("room")).collect();
    let staged = store.stats().staged_bytes;
    faults.no_space.store(1, Relaxed);
    assert_eq!(store.demote_staged(1000), 0);
    assert_eq!(store.stats().staged_bytes, staged);
    faults.no_space.store(0, Relaxed);
    let objects = store.stats().objects as usize;
    assert_eq!(store.demote_staged(10), 10);
    assert_eq!(store.demote_staged(1000), objects - 10);
    let stats = store.stats();
    assert_eq!((stats.staged_bytes, stats.file_objects), (0, objects as u64));
    assert_eq!(stats.file_payload_bytes, objects as u64 * 4096, "as they are");
    let mut out = [0; 4096];
    for (seed, &handle) in (1..).zip(&handles) {
        store.get(handle, &mut out).expect("readable");
        assert!(out == page(seed), "page {seed}");
    }
}

#[test]
fn a_file_of_memory_is_cleaned_before_it_is_full() {
    let memory = |name, len| Box::new(MemoryBacking::create(name, len).expect("memory"));
    let file = memory("strata-file", 1 << 30);
    let store = Store::create_on(None, memory("strata-data", 1 << 30), Some(file)).expect("one");
    let seed = |number: u64| number * 8 + 7;
    // Most live for a moment, and each twentieth stays: without cleaning no segment would
    // ever be empty.
    let (mut pages, mut brief) = (Vec::new(), VecDeque::new());
    let mut most_bytes = 0;
    for number in 0..40_000 {
        let put = (store.put(&page(seed(number)), Put::Staged).expect("room"), number);
        if number % 20 == 0 {
            pages.push(put)
        } else {
            brief.push_back(put)
        }
        if brief.len() > 1000 {
            store.release(brief.pop_front().expect("many").0);
        }
        if number % 64 == 0 {
            store.demote_staged(100);
            while store.wants_cleaning() {
                store.compact(1 << 20);
            }
            most_bytes = most_bytes.max(store.stats().file_bytes);
        }
    }
    // 12 MiB live of 156, and 32 MiB of empty segments may keep their blocks.
    assert!(most_bytes < 80 << 20, "{most_bytes} bytes for 12 MiB");
    pages.extend(brief);
    let mut out = [0; 4096];
    for (handle, number) in pages {
        store.get(handle, &mut out).expect("readable");
        assert!(out == page(seed(number)), "page {number}");
    }
}
