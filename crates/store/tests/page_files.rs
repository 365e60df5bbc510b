//! Pages of files that the store did not write: read where they lie, counted by file, there
//! again after the worker's death.

mod common;

use std::any::Any;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};

use common::{Page, page};
use strata_store::{
    Backing, Descriptors, Faults, Faulty, FileBacking, GetError, PageFile, Put, ReadBytes, Source,
    Store, StoreConfig, Unread, Wait,
};
use strata_sys::{EventFd, ReadQueue};
use strata_units::Handle;

const PAGES: u32 = 64;

/// Page `n` of the file lies at `4096 * n`, and is `page(1 + n)`.
#[derive(Debug)]
struct Plain;

impl PageFile for Plain {
    fn place(&self, page: u32) -> Option<(u64, usize)> {
        (page < PAGES).then_some((u64::from(page) * 4096, 4096))
    }

    fn get(&self, number: u32, read: ReadBytes<'_>, out: &mut Page) -> Result<(), GetError> {
        read(u64::from(number) * 4096, out)?;
        if *out == page(1 + u64::from(number)) { Ok(()) } else { Err(GetError::Corrupt) }
    }
}

/// Counts itself while it is there.
struct Note(Arc<AtomicU64>);

impl Drop for Note {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

struct Written {
    file: File,
    open: Arc<AtomicU64>,
    faults: Arc<Faults>,
}

fn written(name: &str) -> Written {
    let path = std::env::temp_dir().join(format!("strata-pages-{name}-{}", std::process::id()));
    let mut file = File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.as_mut().expect("a file in the temporary directory");
    std::fs::remove_file(&path).expect("ours");
    for number in 0..PAGES {
        file.write_all(&page(1 + u64::from(number))).expect("written");
    }
    let file = file.try_clone().expect("a descriptor");
    Written { file, open: Arc::default(), faults: Arc::default() }
}

impl Written {
    fn note(&self) -> Box<dyn Any + Send + Sync> {
        self.open.fetch_add(1, Relaxed);
        Box::new(Note(Arc::clone(&self.open)))
    }

    fn backing(&self) -> Box<dyn Backing> {
        let file = self.file.try_clone().expect("a descriptor");
        let file = Box::new(FileBacking::attach(file.into(), u64::MAX));
        Box::new(Faulty::new(file, Arc::clone(&self.faults)))
    }

    fn add(&self, store: &Store) -> u16 {
        let added = store.add_page_file(Box::new(Plain), self.backing(), |_| Ok(self.note()));
        added.expect("room")
    }
}

fn in_file(store: &Store, file: u16, pages: std::ops::Range<u32>) -> Vec<Handle> {
    let handles: Vec<Handle> = pages.map(|page| Store::in_page_file(file, page)).collect();
    store.retain_all(&handles);
    handles
}

fn assert_is(store: &Store, handle: Handle, seed: u64) {
    let mut out: Page = [0; 4096];
    let (source, fingerprint) = store.get_with_fingerprint(handle, &mut out).expect("readable");
    assert_eq!((source, fingerprint), (Source::File, None));
    assert!(out == page(seed), "page {seed}");
}

#[test]
fn a_file_is_open_as_long_as_a_page_of_it_is_referred_to() {
    let (store, file) = (Store::create(StoreConfig::default()).expect("a store"), written("open"));
    let number = file.add(&store);
    let handles = in_file(&store, number, 0..PAGES);
    store.release_page_file(number);
    let stats = store.stats();
    assert_eq!((stats.filed_pages, stats.stored_pages), (64, 64));
    assert_eq!((stats.objects, stats.deduplicated_pages, stats.dram_bytes), (0, 0, 0));
    for (&handle, seed) in handles.iter().zip(1..) {
        assert_is(&store, handle, seed);
        assert_eq!(store.locate(handle), Source::File);
        assert_eq!(store.references(handle), None);
    }
    // Another one beside it, and objects, and they do not mix.
    let other = written("other");
    let second = other.add(&store);
    assert_ne!(second, number);
    let object = store.put(&page(9), Put::Fast).expect("put");
    assert!(store.try_retain(handles[3]));
    for &handle in &handles {
        store.release(handle);
    }
    assert_eq!(file.open.load(Relaxed), 1, "one page is referred to");
    assert_is(&store, handles[3], 4);
    store.release(handles[3]);
    assert_eq!((file.open.load(Relaxed), other.open.load(Relaxed)), (0, 1));
    assert!(!store.try_retain(handles[3]), "its file is closed");
    store.release_page_file(second);
    assert_eq!(other.open.load(Relaxed), 0, "never referred to");
    // Its number is free again.
    assert_eq!(file.add(&store), number);
    store.release_page_file(number);
    store.release(object);
    assert_eq!(store.stats().stored_pages, 0);
}

#[test]
fn what_is_not_as_it_was_written_is_never_given() {
    let (store, file) = (Store::create(StoreConfig::default()).expect("a store"), written("wrong"));
    let number = file.add(&store);
    let handles = in_file(&store, number, 0..PAGES);
    let mut out: Page = [0; 4096];
    file.file.write_all_at(&[7], 5 * 4096 + 100).expect("written");
    assert!(matches!(store.get(handles[5], &mut out), Err(GetError::Corrupt)));
    assert_is(&store, handles[4], 5);
    file.faults.read_error.store(1, Relaxed);
    assert!(matches!(store.get(handles[4], &mut out), Err(GetError::Io(_))));
    file.faults.read_error.store(0, Relaxed);
    assert!(store.last_tier_error().is_some_and(|text| text.contains("snapshot's file")));
    // Begun on a queue, several at once, as a handler does.
    let bell = Arc::new(EventFd::new().expect("an eventfd"));
    let mut queue = ReadQueue::new(4, &bell);
    assert!(store.has_slow_file() && !store.has_slow_tier());
    let reads: Vec<_> =
        (3..7).map(|page| store.file_read(handles[page]).expect("it is in a file")).collect();
    assert!(reads.iter().all(|read| read.page_file() == Some(number)));
    let (start, end) = (reads[0].start(), reads[3].end());
    assert_eq!((start, end), (3 * 4096, 7 * 4096));
    let id = store.begin_read(&mut queue, &reads[0], (start, end)).expect("room");
    while queue.completed().is_none() {
        std::thread::yield_now();
    }
    for (page_number, read) in (3..7).zip(&reads) {
        let bytes = queue.bytes(id);
        let got = store.get_from(handles[page_number], read, start, bytes, &mut out);
        match page_number {
            5 => assert_eq!(got, Err(Unread::Corrupt)),
            _ => assert!(got == Ok(None) && out == page(1 + page_number as u64)),
        }
    }
}

/// What a worker leaves that dies now.
fn left_by(store: &Store) -> Descriptors {
    let known = store.descriptors();
    let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("a descriptor");
    Descriptors { table: copy(known.table), data: copy(known.data), file: known.file.map(copy) }
}

#[test]
fn the_next_worker_has_what_is_referred_to_and_closes_the_rest() {
    let store = Store::create(StoreConfig::default()).expect("a store");
    let (first, second, third) = (written("one"), written("two"), written("three"));
    let numbers = [&first, &second, &third].map(|file| file.add(&store));
    let descriptors = left_by(&store);
    let mut recovery = Store::recover(descriptors, StoreConfig::default()).expect("its files");
    for file in [&first, &second, &third] {
        file.open.store(0, Relaxed);
    }
    for (number, file) in numbers.into_iter().zip([&first, &second, &third]) {
        // The third cannot be understood any more.
        let pages: Option<Box<dyn PageFile>> = (number < numbers[2]).then(|| Box::new(Plain) as _);
        recovery.page_file(number, pages, file.backing(), file.note()).expect("its number");
    }
    for page in [3, 4, 4] {
        recovery.reference(Store::in_page_file(numbers[0], page)).expect("it is there");
    }
    recovery.reference(Store::in_page_file(numbers[2], 1)).expect("its number is known");
    recovery.reference(Store::in_page_file(77, 1)).expect_err("no such file");
    let store = recovery.finish();
    let open = [&first, &second, &third].map(|file| file.open.load(Relaxed));
    assert_eq!(open, [1, 0, 1], "nobody refers to the second");
    assert_eq!(store.stats().filed_pages, 4);
    assert_is(&store, Store::in_page_file(numbers[0], 4), 5);
    let mut out: Page = [0; 4096];
    let lost = store.get(Store::in_page_file(numbers[2], 1), &mut out);
    assert!(matches!(lost, Err(GetError::Corrupt)));
    for page in [3, 4, 4] {
        store.release(Store::in_page_file(numbers[0], page));
    }
    assert_eq!(first.open.load(Relaxed), 0);
}

#[test]
fn there_is_an_end_to_them() {
    let store = Store::create(StoreConfig::default()).expect("a store");
    let file = written("many");
    let numbers: Vec<u16> = (0..1024).map(|_| file.add(&store)).collect();
    let refused = store.add_page_file(Box::new(Plain), file.backing(), |_| Ok(file.note()));
    assert!(refused.is_err());
    let failed = |store: &Store| {
        store.add_page_file(Box::new(Plain), file.backing(), |_| {
            Err(io::Error::other("no room for a record"))
        })
    };
    store.release_page_file(numbers[500]);
    assert!(failed(&store).is_err());
    assert_eq!(file.add(&store), numbers[500]);
    assert_eq!(file.open.load(Relaxed), 1024);
}

/// Pages of `Plain` that come later.
#[derive(Debug)]
struct Later {
    plain: Plain,
    come: Arc<(Mutex<bool>, Condvar)>,
}

impl PageFile for Later {
    fn place(&self, page: u32) -> Option<(u64, usize)> {
        self.plain.place(page)
    }

    fn get(&self, number: u32, read: ReadBytes<'_>, out: &mut Page) -> Result<(), GetError> {
        self.plain.get(number, read, out)
    }

    fn until_there(&self, start: u64, _: usize) -> Option<Wait> {
        let come = Arc::clone(&self.come);
        let is_there = start == 0 || *come.0.lock().expect("nobody panics");
        (!is_there).then(|| {
            let wait: Wait = Box::new(move || {
                let waits = come.1.wait_while(come.0.lock().expect("nobody panics"), |come| !*come);
                drop(waits.expect("nobody panics"));
                Ok(())
            });
            wait
        })
    }
}

/// Who reads what has not come waits for it, and nobody else does.
#[test]
fn a_page_that_has_not_come_is_waited_for() {
    let (store, file) = (Store::create(StoreConfig::default()).expect("a store"), written("later"));
    let come = Arc::new((Mutex::new(false), Condvar::new()));
    let later = Later { plain: Plain, come: Arc::clone(&come) };
    let number = store.add_page_file(Box::new(later), file.backing(), |_| Ok(file.note()));
    let number = number.expect("room");
    let handles = in_file(&store, number, 0..3);
    assert_eq!(
        handles.iter().map(|&one| store.is_awaited(one)).collect::<Vec<_>>(),
        [false, true, true]
    );
    let bell = Arc::new(EventFd::new().expect("an eventfd"));
    let mut queue = ReadQueue::new(4, &bell);
    let mut begin = |handle| {
        let read = store.file_read(handle).expect("in a file");
        let id = store.begin_read(&mut queue, &read, (read.start(), read.end()));
        (id.expect("room"), read)
    };
    let (_, (quick, _)) = (begin(handles[1]), begin(handles[0]));
    let ends = |queue: &mut ReadQueue| loop {
        if let Some((id, result)) = queue.completed() {
            result.expect("readable");
            return id;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    assert_eq!(ends(&mut queue), quick);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(queue.completed().map(|(id, _)| id), None, "it is read before it has come");
    let waiter = {
        let (come, handle) = (Arc::clone(&come), handles[2]);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| assert_is(&store, handle, 3));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!waiter.is_finished(), "it is read before it has come");
            *come.0.lock().expect("nobody panics") = true;
            come.1.notify_all();
            waiter.join()
        })
    };
    waiter.expect("it is what was written");
    let slow = ends(&mut queue);
    let mut out: Page = [0; 4096];
    let read = store.file_read(handles[1]).expect("in a file");
    let bytes = queue.bytes(slow).to_vec();
    store.get_from(handles[1], &read, read.start(), &bytes, &mut out).expect("sound");
    assert!(out == page(2));
    assert!(handles.iter().all(|&one| !store.is_awaited(one)));
    handles.into_iter().for_each(|one| store.release(one));
    store.release_page_file(number);
}
