//! Tests of what outlives a worker: the page map's files and the registry.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use strata_sys::adopt_fd;
use strata_units::{Handle, LeafIndex, PAGES_PER_LEAF, PageId, SpaceId, TenantId};

use crate::map::entry::Entry;
use crate::map::page_map::{PageMap, Piece};
use crate::map::registry::{Registry, SPACES, SpaceField, TENANTS};
use crate::testing::{Message, record};

/// Copies of the descriptors, as a supervisor keeps them for the next worker.
fn kept(fds: &[RawFd]) -> Vec<RawFd> {
    fds.iter()
        .map(|&fd| {
            let borrowed = adopt_fd(fd).expect("an open descriptor");
            let copy = borrowed.try_clone().expect("a copy").into_raw_fd();
            // The page map owns the original.
            let _ = OwnedFd::into_raw_fd(borrowed);
            copy
        })
        .collect()
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Take { space: u32, piece: Piece },
    GiveBack { which: usize },
    Set { which: usize, index: usize, word: u8, age: u16 },
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        2 => (0..3u32, any::<Piece>()).prop_map(|(space, piece)| Change::Take { space, piece }),
        1 => (0..64usize).prop_map(|which| Change::GiveBack { which }),
        6 => (0..64usize, 0..PAGES_PER_LEAF, 0..8u8, any::<u16>())
            .prop_map(|(which, index, word, age)| Change::Set { which, index, word, age }),
    ]
}

fn entry(word: u8) -> Entry {
    match word {
        0 => Entry::Untouched,
        1 => Entry::Resident { shared: false },
        2 => Entry::Resident { shared: true },
        3 => Entry::Leaving { slot: 255, wanted: true },
        4 => Entry::Stored(Handle(1 << 47)),
        5 => Entry::Arriving(Handle(12345)),
        6 => Entry::Lost,
        _ => Entry::Discarded,
    }
}

/// A leaf as the model knows it: owner, and what was written.
type Leaf = (SpaceId, Piece, BTreeMap<usize, (Entry, u16)>);

fn check(map: &PageMap, model: &BTreeMap<u32, Leaf>) -> Result<(), TestCaseError> {
    let found: Vec<_> = map.leaves();
    let expected: Vec<_> =
        model.iter().map(|(&leaf, (space, piece, _))| (LeafIndex(leaf), *space, *piece)).collect();
    prop_assert_eq!(found, expected);
    prop_assert_eq!(map.leaf_count(), model.len() as u64);
    for (&leaf, (_, _, pages)) in model {
        for index in 0..PAGES_PER_LEAF {
            let page = PageId::new(LeafIndex(leaf), index);
            let &(entry, age) = pages.get(&index).unwrap_or(&(Entry::Untouched, 0));
            prop_assert_eq!(map.get(page), entry);
            prop_assert_eq!(map.age(page).load(Ordering::Relaxed), age);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_page_map_is_found_again_as_it_was_left(
        changes in prop::collection::vec(change(), 1..80)
    ) {
        let map = PageMap::create().expect("a page map");
        let mut model: BTreeMap<u32, Leaf> = BTreeMap::new();
        let mut high_water = 0;
        for change in changes {
            let some = |which: usize| model.keys().copied().nth(which % model.len().max(1));
            match change {
                Change::Take { space, piece } => {
                    let leaf = map.take(SpaceId(space), piece).expect("room");
                    high_water = high_water.max(leaf.0 + 1);
                    let known = model.insert(leaf.0, (SpaceId(space), piece, BTreeMap::new()));
                    prop_assert!(known.is_none(), "a leaf in use was given out again");
                    for index in 0..PAGES_PER_LEAF {
                        let page = PageId::new(leaf, index);
                        prop_assert_eq!(map.get(page), Entry::Untouched);
                        prop_assert_eq!(map.age(page).load(Ordering::Relaxed), 0);
                    }
                }
                Change::GiveBack { which } => {
                    let Some(leaf) = some(which) else { continue };
                    model.remove(&leaf);
                    map.give_back(LeafIndex(leaf));
                }
                Change::Set { which, index, word, age } => {
                    let Some(leaf) = some(which) else { continue };
                    let page = PageId::new(LeafIndex(leaf), index);
                    map.set(page, entry(word));
                    map.age(page).store(age, Ordering::Relaxed);
                    model.get_mut(&leaf).expect("known").2.insert(index, (entry(word), age));
                }
            }
        }
        check(&map, &model)?;
        let fds = kept(&map.fds());
        drop(map);
        let map = PageMap::attach(&fds).expect("the same files");
        check(&map, &model)?;
        // Free leaves below the high-water mark come first, then new ones.
        for _ in model.len()..high_water as usize {
            let leaf = map.take(SpaceId(9), 9).expect("room");
            prop_assert!(leaf.0 < high_water && !model.contains_key(&leaf.0));
            for index in 0..PAGES_PER_LEAF {
                prop_assert_eq!(map.get(PageId::new(leaf, index)), Entry::Untouched);
            }
            model.insert(leaf.0, (SpaceId(9), 9, BTreeMap::new()));
        }
        prop_assert_eq!(map.take(SpaceId(9), 9), Some(LeafIndex(high_water)));
    }
}

#[test]
fn a_leaf_whose_giving_back_was_cut_short_is_zero_for_its_next_owner() {
    let map = PageMap::create().expect("a page map");
    let leaf = map.take(SpaceId(0), 0).expect("room");
    let fds = kept(&map.fds());
    // A worker that died after it had cleared the owner and before the entries:
    // what it wrote last stands in a leaf that is free.
    map.give_back(leaf);
    map.set(PageId::new(leaf, 7), Entry::Resident { shared: false });
    map.age(PageId::new(leaf, 7)).store(77, Ordering::Relaxed);
    drop(map);
    let map = PageMap::attach(&fds).expect("the same files");
    assert_eq!(map.leaf_count(), 0);
    assert_eq!(map.take(SpaceId(1), 1), Some(leaf));
    assert_eq!(map.get(PageId::new(leaf, 7)), Entry::Untouched);
    assert_eq!(map.age(PageId::new(leaf, 7)).load(Ordering::Relaxed), 0);
}

#[test]
fn a_whole_leaf_becomes_pending_and_no_other() {
    let map = PageMap::create().expect("a page map");
    let [like, leaf, beside] = [1, 2, 3].map(|piece| map.take(SpaceId(0), piece).expect("room"));
    let pages = |leaf| (0..PAGES_PER_LEAF).map(move |index| PageId::new(leaf, index));
    for (number, page) in pages(like).enumerate() {
        map.set(page, entry(number as u8 % 2 * 4));
        map.age(page).store(number as u16, Ordering::Relaxed);
    }
    assert!(!map.has_leaving(like));
    let last = PageId::new(like, PAGES_PER_LEAF - 1);
    map.set(last, Entry::Leaving { slot: 7, wanted: true });
    assert!(map.has_leaving(like) && !map.has_leaving(leaf));
    map.set_pending(leaf, Some(like));
    for (number, page) in pages(leaf).enumerate() {
        assert_eq!(map.get(page), Entry::Pending);
        assert_eq!(map.age(page).load(Ordering::Relaxed), number as u16);
    }
    assert!(pages(beside).all(|page| map.get(page) == Entry::Untouched));
    map.set_pending(beside, None);
    assert!(pages(beside).all(|page| map.age(page).load(Ordering::Relaxed) == 0));
}

#[test]
fn a_page_map_with_a_file_missing_is_refused() {
    let map = PageMap::create().expect("a page map");
    let fds = kept(&map.fds());
    let error = PageMap::attach(&fds[..2]).expect_err("one is missing");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
}

#[test]
fn tenants_are_found_again_and_their_slots_reused() {
    let registry = Registry::create().expect("a registry");
    let ids: Vec<TenantId> = (0..TENANTS)
        .map(|number| {
            registry.add_tenant(&record(&format!("t{number}")), u64::from(number)).expect("room")
        })
        .collect();
    assert_eq!(registry.add_tenant(&record("one too many"), 0), None);
    let found = registry.tenants();
    assert_eq!(found.len(), ids.len());
    for (number, (id, found)) in found.into_iter().enumerate() {
        assert_eq!(id, ids[number]);
        assert_eq!(found, record(&format!("t{number}")));
        assert_eq!(registry.budget(id).load(Ordering::Relaxed), number as u64);
    }
    let reused = ids[500];
    registry.counter(reused, 3).store(9, Ordering::Relaxed);
    registry.bucket(reused, 700).store(9, Ordering::Relaxed);
    registry.released(reused).store(1, Ordering::Relaxed);
    registry.remove_tenant(reused);
    assert!(registry.tenants().iter().all(|&(id, _)| id != reused));
    assert_eq!(registry.add_tenant(&record("new"), 1), Some(reused));
    assert_eq!(registry.counter(reused, 3).load(Ordering::Relaxed), 0);
    assert_eq!(registry.bucket(reused, 700).load(Ordering::Relaxed), 0);
    assert_eq!(registry.released(reused).load(Ordering::Relaxed), 0);
}

#[test]
fn looking_for_slots_in_use_costs_no_memory_of_the_others() {
    let registry = Registry::create().expect("a registry");
    let id = registry.add_tenant(&record("one"), 0).expect("room");
    registry.add_space(id, None).expect("room");
    assert_eq!(registry.tenants().len(), 1);
    assert_eq!(registry.spaces_of(id).len(), 1);
    assert!(registry.claimed_fds().len() == 1);
    let (memory, _) = registry.ring(SpaceId(0));
    let allocated_bytes = memory.allocated_bytes().expect("the kernel tells");
    assert!(allocated_bytes <= 128 << 10, "{allocated_bytes} bytes");
}

#[test]
fn a_long_command_line_is_cut_and_everything_else_kept() {
    let registry = Registry::create().expect("a registry");
    for command in [
        (0..5000).map(|number| number.to_string()).collect::<Vec<_>>(),
        vec!["x".repeat(100_000)],
        vec!["short".into(), "\"ü\n".repeat(5000)],
    ] {
        let mut long = record("long");
        long.command.clone_from(&command);
        let id = registry.add_tenant(&long, 7).expect("room");
        let found = registry.tenants().into_iter().find(|(known, _)| *known == id);
        let (_, mut found) = found.expect("a record that can be read");
        let kept = std::mem::take(&mut found.command);
        assert!(!kept.is_empty() && kept.len() <= command.len());
        assert!(kept == ["…"] || command.starts_with(&kept), "{} parts", kept.len());
        long.command.clear();
        assert_eq!(found, long);
        // The neighbour's slot was not written into.
        let next = registry.add_tenant(&record("next"), 8).expect("room");
        assert_eq!(registry.budget(next).load(Ordering::Relaxed), 8);
    }
}

#[test]
fn every_descriptor_that_a_record_names_is_claimed() {
    let registry = Registry::create().expect("a registry");
    let mut tenant = record("t");
    tenant.map_fds = vec![1001, 1002, 1003];
    tenant.store_fds = vec![1004, 1005];
    let id = registry.add_tenant(&tenant, 0).expect("room");
    let live = registry.add_space(id, Some(1006)).expect("room");
    registry.space_goes_live(live);
    registry.set_space_fd(live, SpaceField::Pidfd, Some(1007));
    registry.set_space_fd(live, SpaceField::Control, Some(1008));
    registry.set_space_fd(live, SpaceField::Socket, Some(1009));
    let building = registry.add_space(id, Some(1010)).expect("room");
    assert!(!registry.space_is_live(building));
    // Forks whose messages were read and not acted on, wherever they stand.
    let (ring, at) = registry.ring(live);
    for (slot, fd) in [(0usize, 1011), (2, 1012), (15, 1013)] {
        let offset = strata_sys::Userfaultfd::ring_bytes(slot) as u64;
        ring.write(at + offset, &Message::Fork { fd }.bytes());
    }
    let file = registry.add_page_file(7, 3, 1014).expect("room");
    assert_eq!(registry.page_files(), [(file, 7, 3, 1014)]);
    let mut claimed = registry.claimed_fds();
    claimed.sort_unstable();
    let mut expected: Vec<RawFd> = (1001..=1014).collect();
    expected.push(registry.descriptor().as_raw_fd());
    expected.sort_unstable();
    assert_eq!(claimed, expected);
    registry.forget_page_files(|family| family == 7);
    assert!(registry.claimed_fds().contains(&1014));
    registry.forget_page_files(|family| family == 8);
    assert!(!registry.claimed_fds().contains(&1014));
    // A slot that is used again names nothing of its former space.
    registry.remove_space(live);
    let again = registry.add_space(id, Some(1020)).expect("room");
    assert_eq!(again, live);
    let claimed = registry.claimed_fds();
    assert!((1006..=1009).chain(1011..=1013).all(|fd| !claimed.contains(&fd)), "{claimed:?}");
    assert!(claimed.contains(&1020));
}

#[test]
fn spaces_are_of_their_tenant_and_their_number_is_limited() {
    let registry = Registry::create().expect("a registry");
    let mine = registry.add_tenant(&record("mine"), 0).expect("room");
    let other = registry.add_tenant(&record("other"), 0).expect("room");
    let spaces: Vec<SpaceId> = (0..SPACES)
        .map(|number| {
            let owner = if number % 2 == 0 { mine } else { other };
            registry.add_space(owner, Some(number as RawFd)).expect("room")
        })
        .collect();
    assert_eq!(registry.add_space(mine, Some(0)), None);
    let even: Vec<SpaceId> = spaces.iter().copied().step_by(2).collect();
    assert_eq!(registry.spaces_of(mine), even);
}
