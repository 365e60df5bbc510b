//! Dictionaries: adopted where they pay and only there, survived, damaged, and
//! trained while everything else goes on.

mod common;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use common::{Page, Random, keep_house, page, sentences, store_with_file};
use strata_store::{
    Descriptors, Foretelling, GetError, MemoryBacking, Put, Store, StoreConfig, StoreStats,
    Training,
};
use strata_sys::SharedMemory;
use strata_units::Handle;

/// Where the first dictionary lies: the table's memory file ends with sixteen of
/// 32 KiB.
const REGION_BYTES: u64 = 16 * (32 << 10);
/// Enough pages for a store to want a dictionary.
const ENOUGH: u64 = 2048;

type Pages = Vec<(Handle, Page)>;

fn put_sentences(store: &Store, flavour: u64, how: Put, seeds: std::ops::Range<u64>) -> Pages {
    seeds
        .map(|seed| {
            let page = sentences(flavour, seed);
            (store.put(&page, how).expect("put"), page)
        })
        .collect()
}

fn check_all(store: &Store, pages: &Pages) {
    let mut out: Page = [0; 4096];
    for (handle, page) in pages {
        store.get(*handle, &mut out).expect("a stored page");
        assert!(out == *page, "{handle:?} holds another page");
    }
}

/// Bytes as stored of what is neither staged nor lz4.
fn dense_payload(stats: &StoreStats) -> u64 {
    stats.payload_bytes - stats.staged_bytes - stats.fast_payload_bytes
}

fn adopts(store: &Store) -> u32 {
    let training = store.train_dictionary();
    println!("{training}");
    match training {
        Training::Judged { adopted: true, dictionary, .. } => dictionary,
        other => panic!("{other:?}"),
    }
}

fn duplicates(store: &Store) -> Descriptors {
    let dup = |descriptor: BorrowedFd<'_>| descriptor.try_clone_to_owned().expect("dup");
    let borrowed = store.descriptors();
    Descriptors {
        table: dup(borrowed.table),
        data: dup(borrowed.data),
        file: borrowed.file.map(dup),
    }
}

fn recover(descriptors: Descriptors, pages: &Pages) -> Store {
    let attach =
        |descriptor| Box::new(MemoryBacking::attach(descriptor).expect("memory")) as Box<_>;
    let Descriptors { table, data, file } = descriptors;
    let file = file.map(|file| attach(file) as _);
    let mut recovery = Store::recover_on(table, None, attach(data), file).expect("a store");
    for (handle, _) in pages {
        assert_eq!(recovery.reference(*handle), Ok(()));
    }
    recovery.finish()
}

#[test]
fn it_is_wanted_adopted_and_used_by_every_way_in() {
    let (store, _faults) = store_with_file(None, 64 << 20);
    let mut pages = put_sentences(&store, 1, Put::Fast, 0..ENOUGH - 1);
    assert!(!store.wants_dictionary(), "too few objects");
    pages.extend(put_sentences(&store, 1, Put::Staged, ENOUGH..ENOUGH + 1));
    assert!(store.wants_dictionary());
    let before = store.stats();
    assert!(!before.lands_dense && before.dictionaries == 0 && before.dictionary_bytes == 0);
    assert_eq!(adopts(&store), 1);
    assert!(!store.wants_dictionary(), "for now");
    let adopted = store.stats();
    assert!(adopted.lands_dense && adopted.dictionaries == 1);
    assert!(adopted.dictionary_bytes > 32 << 10);
    let grown = adopted.metadata_bytes - before.metadata_bytes;
    assert!(grown >= adopted.dictionary_bytes, "{grown} {adopted:?}");
    assert_eq!(adopted.fast_payload_bytes, before.fast_payload_bytes, "nothing has moved");

    // Puts and settling land dense: lz4 makes half a page of such a page.
    let lz4_each = before.fast_payload_bytes / (ENOUGH - 1);
    let least_gain = |count: u64, bytes: u64| assert!(bytes * 2 < count * lz4_each, "{bytes}");
    store.settle(10);
    pages.extend(put_sentences(&store, 1, Put::Fast, 3000..3100));
    pages.extend(put_sentences(&store, 1, Put::Staged, 3100..3200));
    pages.extend(put_sentences(&store, 1, Put::Zstd, 3200..3300));
    assert_eq!(store.settle(1000), 100);
    let landed = store.stats();
    assert_eq!(landed.fast_payload_bytes, adopted.fast_payload_bytes);
    least_gain(301, dense_payload(&landed));
    // What was lz4 is repacked, what has the dictionary already is only looked at.
    let looked = store.repack(10_000) as u64;
    assert!((ENOUGH - 1..=ENOUGH + 300).contains(&looked), "{looked}");
    assert_eq!(store.repack(10_000), 0);
    let repacked = store.stats();
    assert_eq!(repacked.fast_original_bytes, 0);
    least_gain(ENOUGH + 300, dense_payload(&repacked));
    check_all(&store, &pages);
    // The tier file takes frames as they are.
    while store.demote(1000) > 0 {}
    assert_eq!(store.stats().payload_bytes, 0);
    check_all(&store, &pages);
}

#[test]
fn it_survives_the_worker_and_goes_on_being_used() {
    let (store, _faults) = store_with_file(None, 64 << 20);
    let mut pages = put_sentences(&store, 1, Put::Fast, 0..ENOUGH);
    adopts(&store);
    pages.extend(put_sentences(&store, 1, Put::Fast, 3000..3200));
    store.repack(1000);
    store.demote(500);
    pages.extend(put_sentences(&store, 2, Put::Staged, 4000..4010));
    let before = store.stats();
    let descriptors = duplicates(&store);
    drop(store);
    let store = recover(descriptors, &pages);
    let after = store.stats();
    assert_eq!((after.dictionaries, after.lands_dense), (1, true));
    assert_eq!(after.dictionary_bytes, before.dictionary_bytes);
    assert!(!store.wants_dictionary(), "it has one that fits");
    check_all(&store, &pages);
    // What lz4 has is still repacked, with the dictionary.
    store.settle(100);
    while store.repack(1000) > 0 {}
    let repacked = store.stats();
    assert!(repacked.fast_original_bytes <= 10 * 4096, "{repacked:?}");
    assert!(repacked.payload_bytes < after.payload_bytes / 2, "{repacked:?}");
    check_all(&store, &pages);
}

#[test]
fn a_damaged_dictionary_makes_its_pages_corrupt_and_never_wrong() {
    for damage in 0..6 {
        let (store, _faults) = store_with_file(None, 64 << 20);
        let mut pages = put_sentences(&store, 1, Put::Fast, 0..ENOUGH);
        adopts(&store);
        let packed = put_sentences(&store, 1, Put::Fast, 3000..3100);
        pages.extend(packed.iter().copied());
        let descriptors = duplicates(&store);
        drop(store);
        let table = SharedMemory::from_fd(descriptors.table.try_clone().expect("dup"));
        let table = table.expect("memory");
        let region = table.len_bytes() - REGION_BYTES;
        let mut random = Random::new(damage);
        match damage {
            // Its length: gone, longer, absurd.
            0 => table.atomic_u64(region).store(0, Relaxed),
            1 => _ = table.atomic_u64(region).fetch_add(1, Relaxed),
            2 => table.atomic_u64(region).store(u64::MAX, Relaxed),
            // Its checksum.
            3 => _ = table.atomic_u64(region + 8).fetch_xor(1 << 40, Relaxed),
            // Its content, anywhere.
            _ => {
                let at = region + 64 + random.next() % 2000 * 8;
                let _ = table.atomic_u64(at).fetch_xor(1 << random.below(64), Relaxed);
            }
        }
        let store = recover(descriptors, &pages);
        assert_eq!((store.stats().dictionaries, store.stats().lands_dense), (0, false));
        let mut out: Page = [0; 4096];
        for (handle, _) in &packed {
            let error = store.get(*handle, &mut out).expect_err("no dictionary");
            assert!(matches!(error, GetError::Corrupt), "{error:?}");
        }
        pages.truncate(ENOUGH as usize);
        check_all(&store, &pages);
        // The store goes on, with another dictionary.
        let id = adopts(&store);
        assert_eq!(id, if damage == 0 { 1 } else { 2 }, "a damaged one keeps its id");
        while store.repack(1000) > 0 {}
        check_all(&store, &pages);
        for (handle, page) in &packed {
            match store.get(*handle, &mut out) {
                Ok(_) => assert!(out == *page, "wrong bytes"),
                Err(error) => assert!(matches!(error, GetError::Corrupt), "{error:?}"),
            }
        }
        assert_eq!(store.stats().corrupt_objects > 0, damage != 0);
    }
}

#[test]
fn it_is_refused_where_it_does_not_pay() {
    // Noise has nothing in common; a page that is nearly empty is small anyway.
    let noise = |seed: u64| {
        let mut random = Random::new(seed + 1);
        let mut page: Page = [0; 4096];
        page.fill_with(|| random.next() as u8);
        page
    };
    let tiny = |seed: u64| {
        let mut page: Page = [0; 4096];
        page[..8].copy_from_slice(&(seed + 1).to_ne_bytes());
        page
    };
    let kinds: [&dyn Fn(u64) -> Page; 2] = [&noise, &tiny];
    for kind in kinds {
        let (store, _faults) = store_with_file(None, 64 << 20);
        let mut pages = Pages::new();
        let mut attempts = 0;
        for seed in 0..3 * ENOUGH {
            let page = kind(seed);
            pages.push((store.put(&page, Put::Fast).expect("put"), page));
            if store.wants_dictionary() {
                attempts += 1;
                let training = store.train_dictionary();
                println!("{training}");
                let refused = match training {
                    Training::Judged { adopted, .. } => !adopted,
                    Training::NothingInCommon { .. } => true,
                    _ => false,
                };
                assert!(refused, "{training:?}");
            }
        }
        assert_eq!(attempts, 1, "not again after each page");
        let stats = store.stats();
        assert_eq!((stats.dictionaries, stats.dictionary_bytes, stats.lands_dense), (0, 0, false));
        check_all(&store, &pages);
        // The same again, later.
        for seed in 3 * ENOUGH..4 * ENOUGH {
            let page = kind(seed);
            pages.push((store.put(&page, Put::Fast).expect("put"), page));
        }
        assert!(store.wants_dictionary(), "the store has grown fourfold");
    }
    let (store, _faults) = store_with_file(None, 64 << 20);
    assert_eq!(store.train_dictionary(), Training::TooFewPages { pages: 0 });
    put_sentences(&store, 1, Put::Staged, 0..50);
    assert_eq!(store.train_dictionary(), Training::TooFewPages { pages: 50 });
}

#[test]
fn another_is_adopted_when_the_content_has_changed() {
    let (store, _faults) = store_with_file(None, 64 << 20);
    let first = put_sentences(&store, 1, Put::Fast, 0..ENOUGH);
    assert_eq!(adopts(&store), 1);
    // More of the same wants nothing, and would get nothing.
    let more = put_sentences(&store, 1, Put::Fast, 3000..3100);
    assert!(!store.wants_dictionary());
    let training = store.train_dictionary();
    assert!(matches!(training, Training::Judged { adopted: false, .. }), "{training:?}");
    // Other pages pack worse, until enough of them have come.
    let mut others = Pages::new();
    while !store.wants_dictionary() {
        let seed = 10_000 + others.len() as u64;
        others.extend(put_sentences(&store, 2, Put::Fast, seed..seed + 100));
        assert!(others.len() < 6000, "the change goes unnoticed");
    }
    assert!(others.len() > 2000, "noticed at once, from nothing");
    for (handle, _) in first.iter().chain(&more) {
        store.release(*handle);
    }
    store.reap();
    assert_eq!(adopts(&store), 2);
    let before = store.stats();
    while store.repack(1000) > 0 {}
    let after = store.stats();
    assert!(after.payload_bytes * 2 < before.payload_bytes, "{before:?} {after:?}");
    assert_eq!(after.dictionaries, 2);
    check_all(&store, &others);
}

#[test]
fn sixteen_are_the_limit() {
    let (store, _faults) = store_with_file(None, 64 << 20);
    let mut kept = Pages::new();
    for flavour in 1..=16 {
        let seeds = flavour * 1000..flavour * 1000 + 600;
        let pages = put_sentences(&store, flavour, Put::Fast, seeds);
        assert_eq!(u64::from(adopts(&store)), flavour);
        let mut packed =
            put_sentences(&store, flavour, Put::Fast, flavour * 1000 + 900..flavour * 1000 + 910);
        kept.append(&mut packed);
        for (handle, _) in pages {
            store.release(handle);
        }
        store.reap();
    }
    let pages = put_sentences(&store, 17, Put::Fast, 20_000..20_000 + ENOUGH);
    assert!(!store.wants_dictionary());
    assert_eq!(store.train_dictionary(), Training::NoRoom);
    assert_eq!(store.stats().dictionaries, 16);
    kept.extend(pages);
    check_all(&store, &kept);
    let descriptors = duplicates(&store);
    drop(store);
    let store = recover(descriptors, &kept);
    assert_eq!(store.stats().dictionaries, 16);
    assert_eq!(store.train_dictionary(), Training::NoRoom);
    check_all(&store, &kept);
}

#[test]
fn training_goes_on_beside_everything_else() {
    const SLOTS: usize = 1500;
    let (store, _faults) = store_with_file(None, 16 << 20);
    let done = AtomicBool::new(false);
    let (adopted, busy) = (AtomicU64::new(0), AtomicU64::new(0));
    let content = |seed: u64| {
        // Sentences change their vocabulary as time goes on.
        if seed.is_multiple_of(4) { page(seed) } else { sentences(seed / 2500, seed) }
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2u64)
            .map(|writer| {
                let (store, content) = (&store, &content);
                scope.spawn(move || {
                    let mut random = Random::new(writer + 1);
                    let mut slots: Vec<Option<(Handle, u64)>> = vec![None; SLOTS];
                    let mut out: Page = [0; 4096];
                    for step in 0..5_000 {
                        let how = [Put::Staged, Put::Fast, Put::Fast, Put::Zstd][random.below(4)];
                        let seed = step * 2 + writer;
                        let handle = store.put(&content(seed), how).expect("put");
                        let old = slots[random.below(SLOTS)].replace((handle, seed));
                        if let Some((handle, seed)) = old {
                            store.get(handle, &mut out).expect("a stored page");
                            assert!(out == content(seed), "page {seed}");
                            store.release(handle);
                        }
                    }
                    slots
                })
            })
            .collect();
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    match store.train_dictionary() {
                        Training::Judged { adopted: true, .. } => _ = adopted.fetch_add(1, Relaxed),
                        Training::Busy => {
                            busy.fetch_add(1, Relaxed);
                            std::thread::yield_now();
                        }
                        _ => {}
                    }
                }
            });
        }
        scope.spawn(|| keep_house(&store, &done, 9));
        let slots: Vec<_> =
            writers.into_iter().flat_map(|writer| writer.join().expect("a writer")).collect();
        done.store(true, Relaxed);
        let mut out: Page = [0; 4096];
        for (handle, seed) in slots.into_iter().flatten() {
            store.get(handle, &mut out).expect("a stored page");
            assert!(out == content(seed), "page {seed}");
            store.release(handle);
        }
    });
    assert!(adopted.into_inner() > 0 && busy.into_inner() > 0);
    store.reap();
    let stats = store.stats();
    assert_eq!((stats.stored_pages, stats.objects, stats.payload_bytes), (0, 0, 0));
    assert_eq!((stats.fast_original_bytes, stats.fast_payload_bytes), (0, 0));
    assert_eq!((stats.tier_errors, stats.corrupt_objects), (0, 0));
}

#[test]
fn what_pages_will_take_is_foretold_from_a_sample() {
    let store = Store::create(StoreConfig::default()).expect("a store");
    let nothing = Foretelling { pages: 0, fill_pages: 0, packed_bytes: None };
    assert_eq!(store.foretell(Vec::new()), nothing);
    let mut sample: Vec<Page> = (0..500).map(|seed| sentences(1, seed)).collect();
    sample.extend([[7; 4096]; 30]);
    let foretold = store.foretell(sample);
    assert_eq!((foretold.pages, foretold.fill_pages), (530, 30));
    let foretold = foretold.packed_bytes.expect("enough pages");
    assert_eq!(store.stats().objects, 0, "nothing is stored");
    // As many as it takes to adopt one, packed with it.
    let packed = put_sentences(&store, 1, Put::Fast, 500..500 + ENOUGH);
    adopts(&store);
    let before = store.stats();
    let more = put_sentences(&store, 1, Put::Fast, 10_000..11_000);
    let each = (store.stats().payload_bytes - before.payload_bytes) / 1000;
    assert!(
        each * 3 / 4 <= foretold && foretold <= each * 2,
        "foretold {foretold} bytes a page, they took {each}"
    );
    check_all(&store, &packed);
    check_all(&store, &more);
}

#[test]
fn a_glance_needs_no_reference() {
    let store = Store::create(StoreConfig::default()).expect("a store");
    let page = sentences(1, 1);
    for (page, how) in [(page, Put::Staged), (page, Put::Fast), ([9; 4096], Put::Fast)] {
        let handle = store.put(&page, how).expect("room");
        assert_eq!(store.glance(handle), Some(page));
        store.release(handle);
    }
    let handle = store.put(&page, Put::Fast).expect("room");
    store.release(handle);
    store.reap();
    assert_eq!(store.glance(handle), None, "it is gone");
    assert_eq!(store.stats().objects, 0, "and no glance keeps a page");
}
