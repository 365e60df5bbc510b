//! At every write and every hole that the store makes, before and after it:
//! another thread reads every page, and a copy of the memory is recovered as if
//! the worker had died right there.
//!
//! Where `kill` finds the moments at random, this goes through them in order.

mod common;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};

use common::{Page, Random, page, sentences};
use strata_store::{Backing, MemoryBacking, Put, Store, Training, Waiting};
use strata_sys::SharedMemory;
use strata_units::Handle;

const DATA_BYTES: u64 = 8 << 20;
const FILE_BYTES: u64 = 4 << 20;
/// The end of the table's memory file, where dictionaries lie.
const REGION_BYTES: u64 = 16 * (32 << 10);
/// Moments at which pages are read, and at which a copy is recovered (a multiple
/// of the first).
const READ_EVERY: u64 = 14;
const RECOVER_EVERY: u64 = 140;

/// A backing that stops the world around each change.
#[derive(Debug)]
struct Watched {
    inner: MemoryBacking,
    watch: Arc<Watch>,
}

#[derive(Debug, Default)]
struct Watch {
    store: OnceLock<Arc<Store>>,
    /// Handles and seeds, as a page map would know them now.
    map: Mutex<Vec<(Handle, u64)>>,
    moments: AtomicU64,
    recoveries: AtomicU64,
}

impl Watch {
    /// In another thread, because this one is in the middle of the store.
    fn look(&self) {
        let Some(store) = self.store.get() else { return };
        let moment = self.moments.fetch_add(1, SeqCst);
        if !moment.is_multiple_of(READ_EVERY) {
            return;
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let map = self.map.lock().expect("map");
                let sample = |offset: u64| map.iter().skip(offset as usize % 23).step_by(23);
                let mut out: Page = [0; 4096];
                for &(handle, seed) in sample(moment) {
                    store.get(handle, &mut out).expect("a stored page");
                    assert!(out == content(seed), "page {seed} is wrong while the store works");
                }
                if moment.is_multiple_of(RECOVER_EVERY) {
                    self.recoveries.fetch_add(1, SeqCst);
                    let copy = recover_copy(store, &map);
                    for &(handle, seed) in sample(moment / RECOVER_EVERY) {
                        copy.get(handle, &mut out).expect("a recovered page");
                        assert!(out == content(seed), "page {seed} is wrong after recovery");
                    }
                }
            });
        });
    }
}

/// A second store from a copy of the first one's memory, as it is now.
fn recover_copy(store: &Store, map: &[(Handle, u64)]) -> Store {
    let copy_of = |descriptor: BorrowedFd<'_>, first: u64, last: u64| {
        let from =
            SharedMemory::from_fd(descriptor.try_clone_to_owned().expect("dup")).expect("memory");
        let to = SharedMemory::create("strata-copy", from.len_bytes()).expect("memory");
        let mut buffer = vec![0u8; 64 << 10];
        let end = from.len_bytes();
        let parts = (0..first).chain(end - last..end);
        for offset in parts.step_by(buffer.len()) {
            from.read(offset, &mut buffer);
            if buffer.iter().any(|&byte| byte != 0) {
                to.write(offset, &buffer);
            }
        }
        to.as_fd().try_clone_to_owned().expect("dup")
    };
    let descriptors = store.descriptors();
    let table = copy_of(descriptors.table, 64 << 10, REGION_BYTES);
    let data = copy_of(descriptors.data, DATA_BYTES, 0);
    let file = copy_of(descriptors.file.expect("a file"), FILE_BYTES, 0);
    let attach = |descriptor| Box::new(MemoryBacking::attach(descriptor).expect("memory"));
    let mut recovery =
        Store::recover_on(table, None, attach(data), Some(attach(file))).expect("a store");
    for &(handle, seed) in map {
        assert_eq!(recovery.reference(handle), Ok(()), "page {seed}");
    }
    let store = recovery.finish();
    assert_eq!(store.stats().stored_pages, map.len() as u64);
    store
}

/// Every kind of page, most of them such that a dictionary pays.
fn content(seed: u64) -> Page {
    if seed.is_multiple_of(4) { page(seed / 4) } else { sentences(1, seed) }
}

impl Backing for Watched {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.inner.read_at(offset, out)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        // Half of it first: a moment in the middle of the write.
        self.inner.write_at(offset, &bytes[..bytes.len() / 2])?;
        self.watch.look();
        self.inner.write_at(offset, bytes)?;
        self.watch.look();
        Ok(())
    }

    fn punch(&self, offset: u64, len_bytes: u64) -> std::io::Result<()> {
        self.inner.punch(offset, len_bytes)?;
        // Rare, and the moment when anything still needed would be gone.
        let next = self.watch.moments.load(SeqCst).next_multiple_of(RECOVER_EVERY);
        self.watch.moments.store(next, SeqCst);
        self.watch.look();
        Ok(())
    }

    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn waiting(&self) -> Waiting {
        self.inner.waiting()
    }
}

#[test]
fn every_moment_is_readable_and_recoverable() {
    let watch = Arc::new(Watch::default());
    let tier = |name, bytes| {
        let inner = MemoryBacking::create(name, bytes).expect("memory");
        Box::new(Watched { inner, watch: Arc::clone(&watch) })
    };
    let store = Store::create_on(None, tier("data", DATA_BYTES), Some(tier("file", FILE_BYTES)))
        .expect("a store");
    let store = Arc::new(store);
    watch.store.set(Arc::clone(&store)).expect("set once");
    let mut random = Random::new(42);
    let mut seed = 0;
    for round in 0..2 {
        // Enough staged pages that settling them empties more slabs than are
        // kept for later.
        for _ in 0..500 {
            seed += 1;
            let how = if round % 2 == 0 { Put::Staged } else { Put::Fast };
            let handle = store.put(&content(seed), how).expect("put");
            watch.map.lock().expect("map").push((handle, seed));
        }
        store.settle(1000);
        if round == 0 {
            let training = store.train_dictionary();
            assert!(matches!(training, Training::Judged { adopted: true, .. }), "{training}");
        }
        for _ in 0..300 {
            let mut map = watch.map.lock().expect("map");
            let index = random.below(map.len());
            let (handle, _) = map.swap_remove(index);
            drop(map);
            store.release(handle);
        }
        while store.compact(100_000).unfinished {}
        store.repack(200);
        store.demote(300);
        while store.compact(100_000).unfinished {}
    }
    let (moments, recoveries) = (watch.moments.load(SeqCst), watch.recoveries.load(SeqCst));
    println!("{moments} moments, {recoveries} recoveries");
    assert!(moments > 2000 && recoveries > 20);
    assert!(store.stats().file_payload_bytes > 0);
}
