//! The store against a plain model: any sequence of operations, the same
//! pages.

mod common;

use std::collections::HashMap;

use common::{Page, page, sentences, store_with_file};
use proptest::prelude::*;
use strata_store::{Put, PutError, Store};
use strata_units::Handle;

#[derive(Clone, Debug)]
enum Step {
    Put(u64, Put),
    Get(usize),
    Retain(usize),
    /// Every page, those picked twice.
    RetainAll(usize),
    Release(usize),
    Settle(usize),
    Repack(usize),
    Demote(usize),
    DemoteStaged(usize),
    Compact(u64),
    Reap,
    Train,
}

fn steps(trainings: u32) -> impl Strategy<Value = Vec<Step>> {
    let how = prop_oneof![Just(Put::Staged), Just(Put::Fast), Just(Put::Zstd)];
    let step = prop_oneof![
        8 => (0u64..400, how).prop_map(|(seed, how)| Step::Put(seed, how)),
        4 => any::<usize>().prop_map(Step::Get),
        2 => any::<usize>().prop_map(Step::Retain),
        7 => any::<usize>().prop_map(|pick| match pick % 7 {
            0 => Step::RetainAll(pick),
            _ => Step::Release(pick),
        }),
        1 => (0usize..60).prop_map(Step::Settle),
        1 => (0usize..60).prop_map(Step::Repack),
        2 => (0usize..60, any::<bool>()).prop_map(|(max, staged)| match staged {
            true => Step::DemoteStaged(max),
            false => Step::Demote(max),
        }),
        1 => (0u64..200_000).prop_map(Step::Compact),
        1 => Just(Step::Reap),
        trainings => Just(Step::Train),
    ];
    prop::collection::vec(step, 1..400)
}

/// Every kind of page, half of them such that a dictionary pays.
fn content(seed: u64) -> Page {
    if seed.is_multiple_of(2) { page(seed / 2) } else { sentences(1, seed) }
}

/// What the model knows: every handle, its content's seed, its references.
#[derive(Default)]
struct Model {
    handles: HashMap<u64, (u64, u64)>,
}

impl Model {
    fn pick(&self, random: usize) -> Option<(Handle, u64)> {
        let mut handles: Vec<_> = self.handles.iter().collect();
        handles.sort_unstable();
        (!handles.is_empty()).then(|| {
            let (&handle, &(seed, _)) = handles[random % handles.len()];
            (Handle(handle), seed)
        })
    }

    fn references(&self) -> u64 {
        self.handles.values().map(|(_, references)| references).sum()
    }
}

fn check(store: &Store, handle: Handle, seed: u64) {
    let mut out: Page = [0; 4096];
    store.get(handle, &mut out).expect("a stored page");
    assert!(out == content(seed), "{handle:?} does not hold page {seed}");
}

/// Pages enough for a dictionary to pay, and a training.
fn population() -> Vec<Step> {
    let puts = (0..400).map(|seed| Step::Put(10_001 + 2 * seed, Put::Fast));
    puts.chain([Step::Train]).collect()
}

/// Whether a dictionary was adopted on the way.
fn run(store: &Store, steps: Vec<Step>) -> bool {
    let mut model = Model::default();
    for step in steps {
        match step {
            Step::Put(seed, how) => match store.put(&content(seed), how) {
                Ok(handle) => {
                    assert!(handle.0 < 1 << Handle::BITS && handle.0 != 0);
                    let entry = model.handles.entry(handle.0).or_insert((seed, 0));
                    assert!(content(entry.0) == content(seed), "{handle:?} is two pages");
                    entry.1 += 1;
                }
                Err(PutError::Full) => {}
                Err(error) => panic!("{error}"),
            },
            Step::Get(pick) => {
                if let Some((handle, seed)) = model.pick(pick) {
                    check(store, handle, seed);
                }
            }
            Step::Retain(pick) => {
                if let Some((handle, _)) = model.pick(pick) {
                    store.retain(handle);
                    model.handles.get_mut(&handle.0).expect("picked").1 += 1;
                }
            }
            Step::RetainAll(pick) => {
                let twice = model.pick(pick).map(|(handle, _)| handle.0);
                let all: Vec<u64> = model.handles.keys().copied().chain(twice).collect();
                store.retain_all(&all.iter().map(|&handle| Handle(handle)).collect::<Vec<_>>());
                for handle in all {
                    model.handles.get_mut(&handle).expect("a key").1 += 1;
                }
            }
            Step::Release(pick) => {
                if let Some((handle, _)) = model.pick(pick) {
                    let entry = model.handles.get_mut(&handle.0).expect("picked");
                    entry.1 -= 1;
                    if entry.1 == 0 {
                        model.handles.remove(&handle.0);
                    }
                    store.release(handle);
                }
            }
            Step::Settle(max) => assert!(store.settle(max) <= max),
            Step::Repack(max) => assert!(store.repack(max) <= max),
            Step::Demote(max) => assert!(store.demote(max) <= max),
            Step::DemoteStaged(max) => assert!(store.demote_staged(max) <= max),
            Step::Compact(max) => {
                store.compact(max);
            }
            Step::Reap => {
                store.reap();
            }
            Step::Train => {
                store.train_dictionary();
            }
        }
        assert_eq!(store.stats().stored_pages, model.references());
    }
    for (&handle, &(seed, _)) in &model.handles {
        check(store, Handle(handle), seed);
    }
    let stats = store.stats();
    assert_eq!(stats.objects + stats.deduplicated_pages + stats.fill_pages, stats.stored_pages);
    for (handle, (_, references)) in model.handles {
        for _ in 0..references {
            store.release(Handle(handle));
        }
    }
    store.reap();
    while store.compact(u64::MAX).unfinished {}
    let stats = store.stats();
    assert_eq!((stats.stored_pages, stats.objects, stats.payload_bytes), (0, 0, 0));
    assert_eq!((stats.dram_bytes, stats.staged_bytes, stats.file_payload_bytes), (0, 0, 0));
    assert_eq!((stats.tier_errors, stats.corrupt_objects), (0, 0));
    stats.dictionaries > 0
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn unlimited(steps in steps(0)) {
        run(&store_with_file(None, 64 << 20).0, steps);
    }

    #[test]
    fn little_memory_and_a_small_file(steps in steps(0)) {
        run(&store_with_file(Some(100_000), 2 << 20).0, steps);
    }
}

proptest! {
    // Each training takes its tenth of a second.
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn with_dictionaries(steps in steps(1)) {
        let steps = population().into_iter().chain(steps).collect();
        assert!(run(&store_with_file(None, 64 << 20).0, steps));
    }
}
