//! A store that is taken over, whatever its memory files hold.

use std::os::fd::{AsFd, OwnedFd};

use strata_store::{Descriptors, Put, Store, StoreConfig};
use strata_sys::SharedMemory;
use strata_units::{Handle, PAGE_SIZE};

/// Pages that it has before it is damaged.
const PAGES: u8 = 12;

fn copy(descriptor: std::os::fd::BorrowedFd<'_>) -> OwnedFd {
    descriptor.try_clone_to_owned().expect("a descriptor")
}

/// Takes a store over whose object table and data were written over: pieces of eight
/// bytes behind the numbers of the words that they go to, the lowest bit of which
/// says in which of the two. What was stored reads as it was, or not at all.
pub fn store(data: &[u8]) {
    let store = Store::create(StoreConfig::default()).expect("memory files");
    let page = |number: u8| {
        let mut page = [0; PAGE_SIZE];
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = number.wrapping_mul(31).wrapping_add((at / 64 * usize::from(number % 5)) as u8);
        }
        page
    };
    let how = [Put::Staged, Put::Fast, Put::Zstd];
    let mut handles: Vec<(u8, Handle)> = Vec::new();
    for number in 0..PAGES {
        let stored = store.put(&page(number), how[usize::from(number) % how.len()]);
        handles.push((number, stored.expect("there is room")));
    }
    let (table, contents) = {
        let all = store.descriptors();
        (copy(all.table), copy(all.data))
    };
    // As if it were dead: nothing of it is written any more.
    drop(store);
    let parts = [&table, &contents]
        .map(|part| SharedMemory::from_fd(copy(part.as_fd())).expect("one of its files"));
    let mut is_changed = false;
    for piece in data.chunks_exact(12) {
        let (at, bytes) = piece.split_at(4);
        let word = u32::from_le_bytes(at.try_into().expect("four bytes"));
        let part = &parts[(word & 1) as usize];
        // What it uses lies at the beginning of each.
        let at = u64::from(word >> 1) * 8 % (1 << 20).min(part.len_bytes() - 8);
        part.write(at / 8 * 8, bytes);
        is_changed = true;
    }
    let descriptors = Descriptors { table, data: contents, file: None };
    let Ok(mut recovery) = Store::recover(descriptors, StoreConfig::default()) else {
        assert!(is_changed, "a store that is whole is taken over");
        return;
    };
    let kept: Vec<(u8, Handle)> =
        handles.into_iter().filter(|(_, handle)| recovery.reference(*handle).is_ok()).collect();
    let store = recovery.finish();
    assert!(is_changed || kept.len() == usize::from(PAGES));
    let mut out = [0; PAGE_SIZE];
    for (number, handle) in kept {
        if store.get(handle, &mut out).is_ok() {
            // Nobody can forge a checksum here by chance; a hash is no proof in general.
            assert!(out == page(number), "page {number} reads as another");
        } else {
            assert!(is_changed, "page {number} is lost");
        }
        store.release(handle);
    }
    let _ = store.put(&page(99), Put::Fast);
}
