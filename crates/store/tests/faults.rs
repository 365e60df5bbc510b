//! The world fails: devices, space, memory. The store says so and loses
//! nothing that it could keep.

mod common;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::{Page, Random, page, store_with_file};
use strata_store::{
    Descriptors, FileConfig, GetError, Put, PutError, Source, Store, StoreConfig, StoreError,
};
use strata_sys::SharedMemory;
use strata_units::Handle;

/// Seeds whose pages lz4 shrinks.
fn compressible(count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(|seed| seed * 8 + 1)
}

fn put_all(store: &Store, how: Put, count: u64) -> Vec<(Handle, u64)> {
    compressible(count).map(|seed| (store.put(&page(seed), how).expect("put"), seed)).collect()
}

fn check_all(store: &Store, pages: &[(Handle, u64)]) {
    let mut out: Page = [0; 4096];
    for &(handle, seed) in pages {
        store.get(handle, &mut out).expect("a stored page");
        assert!(out == page(seed), "page {seed}");
    }
}

fn second_view(descriptor: BorrowedFd<'_>) -> SharedMemory {
    SharedMemory::from_fd(descriptor.try_clone_to_owned().expect("dup")).expect("memory")
}

#[test]
fn failed_demotion_leaves_pages_where_they_are() {
    let (store, faults) = store_with_file(None, 8 << 20);
    let pages = put_all(&store, Put::Fast, 300);
    for (fault, text) in [(&faults.write_error, "os error 5"), (&faults.no_space, "os error 28")] {
        let errors = store.stats().tier_errors;
        fault.store(1, Relaxed);
        assert_eq!(store.demote(300), 0);
        fault.store(0, Relaxed);
        let stats = store.stats();
        assert_eq!(stats.tier_errors, errors + 1);
        let said = store.last_tier_error().expect("an error");
        assert!(said.contains("write") && said.contains(text), "{said}");
        assert_eq!(stats.file_payload_bytes, 0);
        assert!(pages.iter().all(|&(handle, _)| store.locate(handle) == Source::Compressed));
        check_all(&store, &pages);
    }
    assert_eq!(store.demote(300), 300, "it works again when the device does");
    assert!(pages.iter().all(|&(handle, _)| store.locate(handle) == Source::File));
    assert_eq!(store.stats().payload_bytes, 0);
    check_all(&store, &pages);
}

#[test]
fn demotion_that_fails_now_and_then_gets_there() {
    let (store, faults) = store_with_file(None, 16 << 20);
    let pages = put_all(&store, Put::Fast, 2000);
    faults.no_space.store(3, Relaxed);
    let mut rounds = 0;
    while store.stats().payload_bytes > 0 {
        store.demote(200);
        check_all(&store, &pages[..50]);
        rounds += 1;
        assert!(rounds < 1000, "no progress: {:?}", store.stats());
    }
    faults.no_space.store(0, Relaxed);
    assert!(store.stats().tier_errors > 0);
    check_all(&store, &pages);
}

#[test]
fn failed_reads_are_errors_and_pass() {
    let (store, faults) = store_with_file(None, 8 << 20);
    let pages = put_all(&store, Put::Zstd, 20);
    assert_eq!(store.demote(20), 20);
    let mut out: Page = [0; 4096];
    let mut failing = |fault: &AtomicU64, expected: fn(&GetError) -> bool| {
        fault.store(1, Relaxed);
        for &(handle, _) in &pages {
            let error = store.get(handle, &mut out).expect_err("a fault");
            assert!(expected(&error), "{error:?}");
        }
        fault.store(0, Relaxed);
        check_all(&store, &pages);
    };
    failing(&faults.read_error, |error| matches!(error, GetError::Io(_)));
    failing(&faults.short_read, |error| matches!(error, GetError::Io(_)));
    failing(&faults.flipped_bit, |error| matches!(error, GetError::Corrupt));
    assert_eq!(store.stats().tier_errors, 60);
}

#[test]
fn a_corrupt_page_is_never_sealed_again() {
    for how in [Put::Staged, Put::Fast, Put::Zstd] {
        let (store, _faults) = store_with_file(None, 8 << 20);
        let pages = put_all(&store, how, 3);
        // The first object lies at the start of the data.
        let memory = second_view(store.descriptors().data);
        let mut bytes = [0; 8];
        memory.read(24, &mut bytes);
        memory.write(24, &bytes.map(|byte| byte ^ 0x44));
        for work in [Store::settle, Store::repack, Store::demote] {
            work(&store, 10);
        }
        let mut out: Page = [0; 4096];
        let error = store.get(pages[0].0, &mut out).expect_err("corrupt");
        assert!(matches!(error, GetError::Corrupt), "{how:?} {error:?}");
        assert!(store.stats().corrupt_objects > 0, "{how:?}");
        check_all(&store, &pages[1..]);
        // A good copy of the same page is another object.
        let again = store.put(&page(pages[0].1), how).expect("put");
        assert_ne!(again, pages[0].0);
        check_all(&store, &[(again, pages[0].1)]);
    }
}

#[test]
fn full_means_full_until_something_goes() {
    let store = Store::create(StoreConfig { compressed_limit: Some(1 << 20), file: None })
        .expect("a store");
    let mut pages = Vec::new();
    let error = loop {
        let seed = pages.len() as u64 * 8 + 7;
        match store.put(&page(seed), Put::Fast) {
            Ok(handle) => pages.push((handle, seed)),
            Err(error) => break error,
        }
        assert!(pages.len() < 1000, "the limit does not bind");
    };
    assert!(matches!(error, PutError::Full), "{error:?}");
    let stats = store.stats();
    assert!(stats.dram_bytes >= 1 << 20 && stats.dram_bytes < (1 << 20) + 8192, "{stats:?}");
    // What is stored already costs nothing more.
    let again = store.put(&page(pages[0].1), Put::Fast).expect("a duplicate");
    assert_eq!(again, pages[0].0);
    store.put(&[9; 4096], Put::Fast).expect("a filled page");
    let (handle, _) = pages.pop().expect("pages");
    store.release(handle);
    let fits = store.put(&page(80_007), Put::Fast).expect("the hole is used");
    assert!(matches!(store.put(&page(80_015), Put::Fast), Err(PutError::Full)));
    store.set_compressed_limit(Some(2 << 20));
    store.put(&page(80_015), Put::Fast).expect("the limit was raised");
    pages.push((fits, 80_007));
    check_all(&store, &pages);
}

#[test]
fn a_put_over_the_limit_goes_through_to_the_file_until_that_is_full_too() {
    let (store, _faults) = store_with_file(Some(1 << 20), 4 << 20);
    let mut pages = Vec::new();
    while let Ok(handle) = store.put(&page(pages.len() as u64 * 8 + 7), Put::Fast) {
        pages.push((handle, pages.len() as u64 * 8 + 7));
        assert!(pages.len() < 5000, "the limits do not bind");
    }
    let stats = store.stats();
    assert!(stats.dram_bytes <= 3 << 20, "{stats:?}");
    assert!(stats.file_payload_bytes >= 3 << 20 && stats.file_bytes <= 4 << 20, "{stats:?}");
    check_all(&store, &pages);
}

#[test]
fn cleaning_the_file_makes_room_again() {
    let (store, _faults) = store_with_file(None, 4 << 20);
    let mut random = Random::new(5);
    let mut pages: Vec<(Handle, u64)> = Vec::new();
    let mut next = 0;
    // Many times the file's size, each time most of it dead at random.
    for _ in 0..30 {
        while store.stats().file_payload_bytes + store.stats().payload_bytes < 2 << 20 {
            next += 8;
            pages.push((store.put(&page(next + 1), Put::Fast).expect("put"), next + 1));
        }
        for _ in 0..20 {
            store.demote(100);
            store.compact(1 << 20);
        }
        assert_eq!(store.stats().payload_bytes, 0, "the file took everything: {:?}", store.stats());
        while store.stats().file_payload_bytes > 1 << 20 {
            let (handle, _) = pages.swap_remove(random.below(pages.len()));
            store.release(handle);
            store.reap();
        }
    }
    check_all(&store, &pages);
    assert_eq!(store.stats().tier_errors, 0);
}

#[test]
fn the_tier_file_is_private_and_refused_with_the_reason() {
    let directory = std::env::temp_dir().join(format!("strata-faults-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("a directory");
    let create = |path: &std::path::Path, limit_bytes| {
        let file = Some(FileConfig { path: path.to_owned(), limit_bytes });
        Store::create(StoreConfig { compressed_limit: None, file })
    };
    let path = directory.join("tier");
    let store = create(&path, 8 << 20).expect("a store");
    assert!(!path.exists(), "the file has no name");
    let descriptor = store.descriptors().file.expect("a file");
    let file = std::fs::File::from(descriptor.try_clone_to_owned().expect("dup"));
    assert_eq!(file.metadata().expect("fstat").mode() & 0o7777, 0o600);
    let pages = put_all(&store, Put::Fast, 500);
    assert_eq!(store.demote(500), 500);
    check_all(&store, &pages);
    assert!(file.metadata().expect("fstat").blocks() * 512 <= store.stats().file_bytes);

    std::fs::write(&path, "somebody's").expect("write");
    let said = create(&path, 8 << 20).expect_err("taken").to_string();
    assert!(said.contains(path.to_str().expect("utf-8")), "{said}");
    assert_eq!(std::fs::read(&path).expect("read"), b"somebody's");
    let missing = directory.join("no/such/directory");
    assert!(matches!(create(&missing, 8 << 20), Err(StoreError::File { .. })));
    assert!(matches!(create(&path, 4096), Err(StoreError::FileLimit { .. })));
    std::fs::remove_dir_all(&directory).expect("clean up");
}

#[test]
fn recovery_survives_any_damage_to_the_table() {
    const ENTRIES: u64 = 4096;
    const PAGES: u64 = 300;
    let originals: Vec<Page> = compressible(PAGES).map(page).collect();
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let file = FileConfig {
            path: std::env::temp_dir().join(format!("strata-damage-{}-{seed}", std::process::id())),
            limit_bytes: 8 << 20,
        };
        let config = StoreConfig { compressed_limit: None, file: Some(file) };
        let store = Store::create(config).expect("a store");
        let mut pages = put_all(&store, Put::Fast, PAGES);
        store.demote(PAGES as usize / 2);
        let table = second_view(store.descriptors().table);
        // A few entries or most of them; sometimes copies of other entries.
        let hits = [3, 50, 1000][seed as usize % 3];
        for _ in 0..hits {
            let target = ENTRIES + random.next() % PAGES * 16;
            let word = match random.below(3) {
                0 => random.next(),
                1 => table.atomic_u64(ENTRIES + random.next() % PAGES * 16).load(Relaxed),
                _ => table.atomic_u64(target).load(Relaxed) ^ 1 << random.below(64),
            };
            table.atomic_u64(target + random.next() % 2 * 8).store(word, Relaxed);
        }
        // Handles from anywhere.
        pages.extend((0..50).map(|_| (Handle(random.next() >> 16), 1)));
        pages.extend((0..50).map(|_| (Handle(random.next() % (2 * PAGES)), 1)));
        let dup = |descriptor: BorrowedFd<'_>| descriptor.try_clone_to_owned().expect("dup");
        let borrowed = store.descriptors();
        let descriptors = Descriptors {
            table: dup(borrowed.table.as_fd()),
            data: dup(borrowed.data.as_fd()),
            file: borrowed.file.map(dup),
        };
        drop(store);
        let mut recovery =
            Store::recover(descriptors, StoreConfig::default()).expect("the header is whole");
        pages.retain(|&(handle, _)| recovery.reference(handle).is_ok());
        let store = recovery.finish();
        let mut out: Page = [0; 4096];
        for &(handle, _) in &pages {
            if store.get(handle, &mut out).is_ok() {
                let filled = store.locate(handle) == Source::Fill;
                assert!(filled || originals.contains(&out), "bytes that were never stored");
            }
        }
        for work in [Store::settle, Store::repack, Store::demote] {
            work(&store, 1000);
        }
        while store.compact(u64::MAX).unfinished {}
        for (handle, _) in pages {
            store.release(handle);
        }
        store.reap();
        let stats = store.stats();
        assert_eq!((stats.stored_pages, stats.objects, stats.payload_bytes), (0, 0, 0));
    }
}

#[test]
fn a_damaged_header_is_refused() {
    for (offset, value) in [(0, 1), (8, 0), (8, u64::MAX), (8, 1 << 26)] {
        let store = Store::create(StoreConfig::default()).expect("a store");
        put_all(&store, Put::Fast, 3);
        let table = second_view(store.descriptors().table);
        table.atomic_u64(offset).store(value, Relaxed);
        let dup = |descriptor: BorrowedFd<'_>| descriptor.try_clone_to_owned().expect("dup");
        let borrowed = store.descriptors();
        let descriptors =
            Descriptors { table: dup(borrowed.table), data: dup(borrowed.data), file: None };
        let error = Store::recover(descriptors, StoreConfig::default()).expect_err("damaged");
        assert!(matches!(error, StoreError::Attach { .. }), "{error}");
    }
}
