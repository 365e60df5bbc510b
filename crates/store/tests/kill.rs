//! A worker killed with SIGKILL at any moment leaves a store from which every
//! page in the page map comes back.
//!
//! The worker is this test binary, started again to run only `worker`. It keeps
//! its page map in a memory file, as the pager does. The parent opens its
//! descriptors through /proc, kills it, recovers, compares, and lets the next
//! worker recover from the same memory again.

mod common;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::time::Duration;

use common::{Page, Random, page, sentences};
use strata_store::{Descriptors, FileConfig, Put, Store, StoreConfig};
use strata_sys::SharedMemory;
use strata_units::Handle;

const SLOTS: usize = 3000;
const MUTATORS: usize = 2;
const ROUNDS: u64 = 24;
const SEEDS: usize = 6000;
const HANDLE_MASK: u64 = (1 << Handle::BITS) - 1;
/// Environment variable: the descriptors to start from, `pid:table:data:file:map`.
const ENV_WORKER: &str = "STRATA_TEST_WORKER";

fn config() -> StoreConfig {
    let name = format!("strata-kill-test-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    // Little enough DRAM that puts demote on their own, too, and a file small
    // enough to be cleaned.
    StoreConfig {
        compressed_limit: Some(2 << 20),
        file: Some(FileConfig { path, limit_bytes: 6 << 20 }),
    }
}

/// Every kind of page, most of them such that a dictionary pays.
fn content(seed: u64) -> Page {
    if seed.is_multiple_of(4) { page(seed / 4) } else { sentences(1, seed) }
}

/// Opens another process's descriptor.
fn open_of(pid: u32, descriptor: RawFd) -> OwnedFd {
    let path = format!("/proc/{pid}/fd/{descriptor}");
    OpenOptions::new().read(true).write(true).open(&path).expect(&path).into()
}

fn slot(map: &SharedMemory, index: usize) -> &std::sync::atomic::AtomicU64 {
    map.atomic_u64(index as u64 * 8)
}

/// Recovers the store and checks every page of the map.
fn recover(descriptors: Descriptors, map: &SharedMemory) -> Store {
    let mut recovery = Store::recover(descriptors, config()).expect("a store");
    let mut occupied = 0;
    for index in 0..SLOTS {
        let value = slot(map, index).load(Acquire);
        if value != 0 {
            occupied += 1;
            let handle = Handle(value & HANDLE_MASK);
            let referenced = recovery.reference(handle);
            assert_eq!(referenced, Ok(()), "slot {index}, {handle:?}");
        }
    }
    let store = recovery.finish();
    let stats = store.stats();
    assert_eq!(stats.stored_pages, occupied);
    assert_eq!(stats.objects + stats.deduplicated_pages + stats.fill_pages, occupied);
    let mut out = [0; 4096];
    for index in 0..SLOTS {
        let value = slot(map, index).load(Acquire);
        if value != 0 {
            let seed = value >> Handle::BITS;
            if let Err(error) = store.get(Handle(value & HANDLE_MASK), &mut out) {
                panic!("slot {index}, page {seed}: {error:?}, {:?}", store.last_tier_error());
            }
            assert!(out == content(seed), "slot {index} does not hold page {seed}");
        }
    }
    store
}

#[test]
fn a_killed_worker_loses_nothing() {
    let mut random = Random::new(0x5eed);
    let mut in_file = 0;
    let mut dictionaries = 0;
    let mut held: Option<(Descriptors<File>, File)> = None;
    for round in 0..10 * ROUNDS {
        // On a busy machine a worker may get too little done for either.
        if round >= ROUNDS && in_file > 0 && dictionaries > 0 {
            break;
        }
        let source = match &held {
            None => "new".to_owned(),
            Some((descriptors, map)) => format!(
                "{}:{}:{}:{}:{}",
                std::process::id(),
                descriptors.table.as_raw_fd(),
                descriptors.data.as_raw_fd(),
                descriptors.file.as_ref().expect("a tier file").as_raw_fd(),
                map.as_raw_fd(),
            ),
        };
        let mut worker = Command::new(std::env::current_exe().expect("this binary"))
            .args(["worker", "--exact", "--nocapture"])
            .env(ENV_WORKER, source)
            .stdout(Stdio::piped())
            .spawn()
            .expect("a worker");
        let mut lines = BufReader::new(worker.stdout.take().expect("its output")).lines();
        let ready = loop {
            let line = lines.next().expect("the worker got ready").expect("text");
            if let Some((_, numbers)) = line.split_once("READY ") {
                break numbers.to_owned();
            }
        };
        let [table, data, file, map] = ready
            .split(' ')
            .map(|number| File::from(open_of(worker.id(), number.parse().expect("a number"))))
            .collect::<Vec<_>>()
            .try_into()
            .expect("four descriptors");
        // From the first operations to a full store with everything going on.
        std::thread::sleep(Duration::from_micros(
            random.next() % [3_000, 40_000, 250_000][round as usize % 3],
        ));
        assert!(worker.try_wait().expect("wait").is_none(), "the worker ended by itself");
        worker.kill().expect("SIGKILL");
        worker.wait().expect("its end");

        let duplicate = |file: &File| OwnedFd::from(file.try_clone().expect("dup"));
        let shared_map = SharedMemory::from_fd(duplicate(&map)).expect("the page map");
        let descriptors = Descriptors {
            table: duplicate(&table),
            data: duplicate(&data),
            file: Some(duplicate(&file)),
        };
        let store = recover(descriptors, &shared_map);
        // Whatever belonged to nobody has been given back.
        let dram = store.stats().dram_bytes;
        assert_eq!(data.metadata().expect("fstat").blocks() * 512, dram, "round {round}");
        in_file += store.stats().file_payload_bytes;
        dictionaries = store.stats().dictionaries;
        if dictionaries == 0 {
            // Workers train too, and rarely live long enough.
            store.train_dictionary();
        }
        println!("round {round}: {:?}", store.stats());
        held = Some((Descriptors { table, data, file: Some(file) }, map));
    }
    assert!(in_file > 0, "the tier file was part of it");
    assert!(dictionaries > 0, "a dictionary was part of it");
}

/// Not a test: what the killed process does.
#[test]
fn worker() {
    let Ok(source) = std::env::var(ENV_WORKER) else { return };
    let (store, map) = if source == "new" {
        let store = Store::create(config()).expect("a store");
        (store, SharedMemory::create("page-map", SLOTS as u64 * 8).expect("memory"))
    } else {
        let numbers: Vec<i32> =
            source.split(':').map(|number| number.parse().expect("a number")).collect();
        let open = |index: usize| open_of(numbers[0] as u32, numbers[index]);
        let map = SharedMemory::from_fd(open(4)).expect("the page map");
        let descriptors = Descriptors { table: open(1), data: open(2), file: Some(open(3)) };
        (recover(descriptors, &map), map)
    };
    let descriptors = store.descriptors();
    println!(
        "READY {} {} {} {}",
        descriptors.table.as_raw_fd(),
        descriptors.data.as_raw_fd(),
        descriptors.file.as_ref().expect("a tier file").as_raw_fd(),
        map.as_fd().as_raw_fd(),
    );
    std::thread::scope(|scope| {
        for mutator in 0..MUTATORS {
            let (store, map) = (&store, &map);
            scope.spawn(move || mutate(store, map, mutator));
        }
        scope.spawn(|| {
            loop {
                store.train_dictionary();
            }
        });
        let mut random = Random::new(u64::from(std::process::id()) + 77);
        loop {
            let max = random.below(200);
            match random.below(5) {
                0 => _ = store.settle(max),
                4 => _ = store.demote_staged(max),
                1 => _ = store.repack(max),
                2 => _ = store.demote(max),
                _ => _ = store.compact(max as u64 * 1000),
            }
        }
    });
}

/// Puts, copies and drops pages, as a pager would, in its own slots.
fn mutate(store: &Store, map: &SharedMemory, mutator: usize) {
    let mut random = Random::new(u64::from(std::process::id()) * 10 + mutator as u64);
    let own = |random: &mut Random| random.below(SLOTS / MUTATORS) * MUTATORS + mutator;
    let mut out = [0; 4096];
    loop {
        let index = own(&mut random);
        let new = match random.below(8) {
            0..=3 => {
                let seed = random.below(SEEDS) as u64;
                let how = [Put::Staged, Put::Fast, Put::Zstd][random.below(3)];
                match store.put(&content(seed), how) {
                    Ok(handle) => seed << Handle::BITS | handle.0,
                    Err(_) => 0,
                }
            }
            4 => {
                let other = slot(map, own(&mut random)).load(Acquire);
                if other != 0 {
                    store.retain(Handle(other & HANDLE_MASK));
                }
                other
            }
            5 | 6 => {
                let value = slot(map, index).load(Acquire);
                if value != 0 {
                    store.get(Handle(value & HANDLE_MASK), &mut out).expect("a stored page");
                    assert!(out == content(value >> Handle::BITS), "slot {index}");
                }
                continue;
            }
            _ => 0,
        };
        // Out of the map first, then released.
        let old = slot(map, index).swap(new, AcqRel);
        if old != 0 {
            store.release(Handle(old & HANDLE_MASK));
        }
    }
}
