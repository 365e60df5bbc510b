//! What one tenant's store held is nowhere in another's, and nowhere at all when it has
//! ended: each has files of its own, which the kernel hands out zeroed.
#![forbid(unsafe_code)]

mod common;

use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use common::Random;
use strata_store::{Put, Store, StoreConfig};

const PAGES: usize = 600;
const SECRET: &[u8; 32] = b"one tenant's secret, and no more";

/// Pages that stay as they are, each with the secret at its beginning.
fn secret(number: u64) -> common::Page {
    let mut random = Random::new(number);
    let mut page = [0; 4096];
    for chunk in page.chunks_exact_mut(8) {
        chunk.copy_from_slice(&random.next().to_le_bytes());
    }
    page[..SECRET.len()].copy_from_slice(SECRET);
    page
}

fn copy(descriptor: BorrowedFd<'_>) -> std::fs::File {
    descriptor.try_clone_to_owned().expect("a descriptor").into()
}

/// Where a file has the secret, of what of it is really there.
fn found(file: &std::fs::File) -> usize {
    let status = file.metadata().expect("there");
    // Past what lies at its beginning everything is a hole.
    let mut left = status.blocks() * 512;
    let (mut count, mut at) = (0, 0);
    let mut piece = vec![0; 1 << 20];
    while left > 0 && at < status.len() {
        let len = file.read_at(&mut piece, at).expect("read");
        count += piece[..len].windows(SECRET.len()).filter(|bytes| bytes == SECRET).count();
        let empty = piece[..len].iter().all(|&byte| byte == 0);
        left = left.saturating_sub(if empty { 0 } else { len as u64 });
        at += len as u64;
        if at > 1 << 30 {
            break;
        }
    }
    count
}

fn filled(how: Put) -> (Store, Vec<strata_units::Handle>) {
    let store = Store::create(StoreConfig::default()).expect("memory files");
    let handles =
        (0..PAGES).map(|number| store.put(&secret(number as u64), how).expect("room")).collect();
    (store, handles)
}

#[test]
fn what_one_store_held_is_in_no_other() {
    for how in [Put::Staged, Put::Fast, Put::Zstd] {
        let (first, handles) = filled(how);
        let second = Store::create(StoreConfig::default()).expect("memory files");
        let (mine, theirs) = (first.descriptors(), second.descriptors());
        let files = |all: &strata_store::BorrowedDescriptors<'_>| [copy(all.table), copy(all.data)];
        let (mine, theirs) = (files(&mine), files(&theirs));
        let number = |file: &std::fs::File| file.metadata().expect("there").ino();
        for own in &mine {
            assert!(theirs.iter().all(|other| number(other) != number(own)), "one file of both");
        }
        // So that one would be seen.
        assert_eq!(found(&mine[1]), PAGES, "{how:?}");
        // Freed, and the other grows: whatever the kernel gives it is its own.
        handles.into_iter().for_each(|handle| first.release(handle));
        first.reap();
        for number in 0..PAGES as u64 {
            second.put(&common::page(number), how).expect("room");
        }
        for file in &theirs {
            assert_eq!(found(file), 0, "{how:?}");
        }
        // Nor does the table hold contents.
        assert_eq!(found(&mine[0]), 0, "{how:?}");
        drop((first, mine));
        let third = Store::create(StoreConfig::default()).expect("memory files");
        third.put(&common::page(1), how).expect("room");
        assert_eq!(found(&copy(third.descriptors().data)), 0, "{how:?}");
    }
}
