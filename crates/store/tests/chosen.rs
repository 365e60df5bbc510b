//! Objects that the owner chooses for the tier file.
#![forbid(unsafe_code)]

mod common;

use common::{page, store_with_file};
use strata_store::{Put, Source};
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
    let plain = strata_store::Store::create(strata_store::StoreConfig::default()).expect("memory");
    let handle = plain.put(&page(1), Put::Zstd).expect("room");
    assert_eq!(plain.demote_these(&[handle]), 0);
    assert_eq!(plain.locate(handle), Source::Compressed);
}
