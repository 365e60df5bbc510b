//! What the store costs beside the data: the promise of 24 bytes an object, and
//! bounded fragmentation after churn. The numbers are printed
//! (`cargo test -p strata-store --test cost -- --nocapture`).

mod common;

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;

use common::Random;
use strata_store::{Descriptors, Put, Store, StoreConfig};
use strata_units::Handle;

const OBJECTS: u64 = 140_000;
const BYTES_PER_OBJECT: u64 = 24;

/// Cheap distinct pages, the larger `noise` the longer when compressed.
fn page(seed: u64, noise: usize) -> [u8; 4096] {
    let mut random = Random::new(seed);
    let mut page = [0; 4096];
    for chunk in page[..noise.next_multiple_of(8)].chunks_exact_mut(8) {
        chunk.copy_from_slice(&random.next().to_ne_bytes());
    }
    page[4088..].copy_from_slice(&(seed + 1).to_ne_bytes());
    page
}

fn allocated(descriptor: BorrowedFd<'_>) -> u64 {
    let file = File::from(descriptor.try_clone_to_owned().expect("dup"));
    file.metadata().expect("fstat").blocks() * 512
}

fn new_store() -> Store {
    Store::create(StoreConfig::default()).expect("a store")
}

fn metadata_per_object(store: &Store) -> f64 {
    let stats = store.stats();
    stats.metadata_bytes as f64 / stats.objects as f64
}

#[test]
fn an_object_costs_at_most_24_bytes_beside_its_data() {
    for (name, how, objects) in [("lz4", Put::Fast, OBJECTS), ("staged", Put::Staged, 104_000)] {
        let store = new_store();
        let mut worst: f64 = 0.0;
        let mut handles = Vec::new();
        for seed in 0..objects {
            handles.push(store.put(&page(seed, 0), how).expect("put"));
            // Every step: also the ones just after something has grown.
            if seed + 1 >= 100_000 && seed % 64 == 0 {
                worst = worst.max(metadata_per_object(&store));
            }
        }
        let last = metadata_per_object(&store);
        println!(
            "{name}: {last:.2} bytes per object at {objects}, worst {worst:.2} from 100000 on"
        );
        assert!(worst <= BYTES_PER_OBJECT as f64);

        let dup = |descriptor: BorrowedFd<'_>| descriptor.try_clone_to_owned().expect("dup");
        let borrowed = store.descriptors();
        let descriptors =
            Descriptors { table: dup(borrowed.table), data: dup(borrowed.data), file: None };
        drop(store);
        let mut recovery = Store::recover(descriptors, StoreConfig::default()).expect("a store");
        for &handle in &handles {
            recovery.reference(handle).expect("known");
        }
        let store = recovery.finish();
        let recovered = metadata_per_object(&store);
        println!("{name}: {recovered:.2} bytes per object after recovery");
        assert!(recovered <= BYTES_PER_OBJECT as f64);
        assert_eq!(store.stats().objects, objects);
        assert_eq!(store.stats().dram_bytes, allocated(store.descriptors().data));
    }
}

#[test]
fn fragmentation_after_random_churn_is_bounded() {
    let store = new_store();
    let mut random = Random::new(11);
    let mut pages: Vec<Handle> = Vec::new();
    let mut seed = 0;
    let mut put = |pages: &mut Vec<Handle>, random: &mut Random, most_noise: usize| {
        seed += 1;
        let noise = 64 + random.below(most_noise);
        pages.push(store.put(&page(seed, noise), Put::Fast).expect("put"));
    };
    // Sizes change their distribution, and most objects die at random.
    for round in 0..6 {
        while pages.len() < 30_000 {
            put(&mut pages, &mut random, [2900, 600, 1500][round % 3]);
        }
        while pages.len() > 9_000 {
            store.release(pages.swap_remove(random.below(pages.len())));
        }
        store.reap();
        let before = store.stats();
        while store.compact(1 << 20).unfinished {}
        let after = store.stats();
        let ratio = |dram: u64| dram as f64 / after.payload_bytes as f64;
        println!(
            "round {round}: {} KiB of objects cost {:.2} of themselves, compacted {:.2}",
            after.payload_bytes >> 10,
            ratio(before.dram_bytes),
            ratio(after.dram_bytes),
        );
        assert_eq!(before.payload_bytes, after.payload_bytes);
        // An eighth of holes, an eighth of slot ends, and a quarter of a slab
        // for each of the 29 classes.
        let open_slabs = 29 * (256 << 10) / 4;
        assert!(after.dram_bytes <= after.payload_bytes * 5 / 4 + open_slabs, "{after:?}");
        assert_eq!(after.dram_bytes, allocated(store.descriptors().data));
    }
    for handle in pages {
        store.release(handle);
    }
    store.reap();
    store.compact(0);
    assert_eq!(store.stats().dram_bytes, 0);
    assert_eq!(allocated(store.descriptors().data), 0);
}
