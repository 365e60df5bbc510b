//! A store and a page map that are taken over, whatever their files hold.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use strata_pager::untrusted::{page_map_of, take_over};
use strata_store::{Descriptors, FileConfig, Put, Store, StoreConfig};
use strata_sys::SharedMemory;
use strata_units::{Handle, PAGE_SIZE};

/// Pages that it has before it is damaged.
const PAGES: u8 = 12;

fn copy(descriptor: std::os::fd::BorrowedFd<'_>) -> OwnedFd {
    descriptor.try_clone_to_owned().expect("a descriptor")
}

fn page_of(number: u8) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    for (at, byte) in page.iter_mut().enumerate() {
        *byte = number.wrapping_mul(31).wrapping_add((at / 64 * usize::from(number % 5)) as u8);
    }
    page
}

/// A store with some pages, their numbers and handles.
fn filled(config: StoreConfig) -> (Store, Vec<(u8, Handle)>) {
    let store = Store::create(config).expect("memory files");
    let how = [Put::Staged, Put::Fast, Put::Zstd];
    let stored = (0..PAGES).map(|number| {
        let handle = store.put(&page_of(number), how[usize::from(number) % how.len()]);
        (number, handle.expect("there is room"))
    });
    let handles = stored.collect();
    (store, handles)
}

/// What a store leaves. As if it were dead: nothing of it is written any more.
fn left(store: Store) -> Descriptors {
    let all = store.descriptors();
    Descriptors { table: copy(all.table), data: copy(all.data), file: all.file.map(copy) }
}

/// Takes over what is left of a store of those pages; they read as they were, or, if it
/// `is_changed`, not at all.
fn recover(
    descriptors: Descriptors,
    config: StoreConfig,
    handles: Vec<(u8, Handle)>,
    is_changed: bool,
) {
    let Ok(mut recovery) = Store::recover(descriptors, config) else {
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
            assert!(out == page_of(number), "page {number} reads as another");
        } else {
            assert!(is_changed, "page {number} is lost");
        }
        store.release(handle);
    }
    let _ = store.put(&page_of(99), Put::Fast);
}

/// Takes a store over whose object table and data were written over: pieces of eight
/// bytes behind the numbers of the words that they go to, the lowest bit of which
/// says in which of the two. What was stored reads as it was, or not at all.
pub fn store(data: &[u8]) {
    let (store, handles) = filled(StoreConfig::default());
    let descriptors = left(store);
    let parts = [&descriptors.table, &descriptors.data]
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
    recover(descriptors, StoreConfig::default(), handles, is_changed);
}

/// The same with all pages in a tier file, which was written over: pieces of eight bytes
/// behind the numbers of the words that they go to. The last says how much of it is left.
pub fn tier(data: &[u8]) {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let memory = Path::new("/dev/shm");
    let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let name =
        format!("strata-fuzz-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
    let file = FileConfig { path: place.join(name), limit_bytes: 64 << 20 };
    let config = StoreConfig { file: Some(file), ..StoreConfig::default() };
    let (store, handles) = filled(config.clone());
    store.settle(usize::from(PAGES));
    store.demote(usize::from(PAGES));
    assert!(store.stats().file_bytes > 0, "something is in the file");
    let descriptors = left(store);
    let tier = descriptors.file.as_ref().expect("it has one");
    // Opened again: the store's own descriptor may be for whole blocks only.
    let path = format!("/proc/self/fd/{}", tier.as_raw_fd());
    let file: File = OpenOptions::new().read(true).write(true).open(path).expect("it is there");
    let len = file.metadata().expect("it is open").len().max(8);
    let mut pieces = data.chunks_exact(10);
    let is_changed = pieces.len() > 0;
    for piece in &mut pieces {
        let (at, bytes) = piece.split_at(2);
        let at = u64::from(u16::from_le_bytes(at.try_into().expect("two bytes"))) * 8;
        file.write_all_at(bytes, at % (len - 7)).expect("there is room");
    }
    let cut = pieces.remainder();
    if let [kept, ..] = cut {
        file.set_len(len * u64::from(*kept) / 256).expect("it is open");
    }
    recover(descriptors, config, handles, is_changed || !cut.is_empty());
}

/// Takes a page map over, with a store that is whole: pieces of eight bytes behind the
/// numbers of the words that they are written to, the lowest two bits of which say in
/// which of its three files. What it names can be read, and is some page that was stored;
/// what it does not name is given back.
pub fn pages(data: &[u8]) {
    let (store, handles) = filled(StoreConfig::default());
    let stored: Vec<Handle> = handles.iter().map(|(_, handle)| *handle).collect();
    let map = page_map_of(&stored).expect("memory files");
    let store = left(store);
    let parts: Vec<SharedMemory> = map
        .iter()
        .map(|part| SharedMemory::from_fd(copy(part.as_fd())).expect("one of its files"))
        .collect();
    let mut is_changed = false;
    for piece in data.chunks_exact(12) {
        let (at, bytes) = piece.split_at(4);
        let word = u32::from_le_bytes(at.try_into().expect("four bytes"));
        let index = (word & 3) as usize % parts.len();
        let at = u64::from(word >> 2) * 8 % (1 << 14);
        let mut value = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        if index == 2 && at == 0 {
            // So many leaves were in use: each that there can be takes a moment.
            value %= 64;
        }
        parts[index].write(at, &value.to_le_bytes());
        is_changed = true;
    }
    let Ok(taken) = take_over(map, store, StoreConfig::default()) else {
        assert!(is_changed, "what is whole is taken over");
        return;
    };
    let named: Vec<Handle> = taken.pages().into_iter().filter_map(|(_, handle)| handle).collect();
    assert!(is_changed || named == stored, "what is whole is taken over as it was");
    let mut out = [0; PAGE_SIZE];
    for &handle in &named {
        // Of one value, as a handle says it itself, or one of them.
        if taken.store.get(handle, &mut out).is_ok() {
            let is_one = (0..PAGES).any(|number| out == page_of(number));
            assert!(is_one || out.chunks_exact(8).all(|word| word == &out[..8]));
        }
    }
    named.into_iter().for_each(|handle| taken.store.release(handle));
    assert_eq!(taken.store.stats().objects, 0, "nothing is stored that nobody names");
}
