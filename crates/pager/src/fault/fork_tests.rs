//! What a forked child's pages are that were on their way out of its parent, with the real kernel.

use std::sync::atomic::Ordering;

use strata_sys::{Fill, Process};
use strata_units::PAGE;

use crate::fault::serve_tests::World;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::registry::SpaceAddress;
use crate::testing;

/// Of the first pages the first has arrived in its slot, as nobody has said yet; the second is in
/// place; the third is in both, as a worker leaves it that dies while it puts a page back.
fn leave(world: &World) {
    let transfer = world.space.agent().expect("attached").ranges.transfer.start;
    for page in [1, 2] {
        world.write(page, 1 + page as u8);
        world.wait_for(page, Entry::Resident { shared: false });
    }
    let mut gate = lock(&world.space.gate);
    for page in [0u8, 1, 2] {
        let address = world.memory.address(page.into());
        let id = gate.object.page_or_new(&world.tenant.map, address).expect("room");
        gate.slots[usize::from(page)] = address;
        match world.tenant.map.get(id) {
            Entry::Untouched => world.tenant.inherit(id, LEAVING[0]),
            before => assert_eq!(world.tenant.begins_to_leave(id, before, page.into()), None),
        }
        if page != 1 {
            let slot = transfer + u64::from(page) * PAGE;
            assert_eq!(world.space.uffd.copy(slot, &testing::page(7)), Fill::Done { pages: 1 });
        }
    }
    world.space.has_strays.store(true, Ordering::Release);
}

fn first_three(world: &World) -> [Entry; 3] {
    [0, 1, 2].map(|page| world.entry(page))
}

const LEAVING: [Entry; 3] = [
    Entry::Leaving { slot: 0, wanted: false },
    Entry::Leaving { slot: 1, wanted: false },
    Entry::Leaving { slot: 2, wanted: false },
];

#[test]
fn what_was_leaving_is_where_the_childs_own_memory_says() {
    let Some(world) = World::of(testing::tenant()) else { return };
    leave(&world);
    let mut gate = lock(&world.space.gate);
    let process = testing::own_process();
    world.space.settle_leaving(&world.tenant, &mut gate, &process).expect("it is this process");
    assert!(gate.slots.iter().all(|&address| address == 0));
    drop(gate);
    let own = Entry::Resident { shared: false };
    assert_eq!(first_three(&world), [own, Entry::Resident { shared: true }, own]);
    assert!(!world.space.has_strays.load(Ordering::Acquire));
    let page = world.id(0).expect("it has a leaf");
    assert!(lock(&world.tenant.arrivals).contains(&page), "it can leave again");
    for (page, content) in [(0, 7), (1, 2), (2, 3)] {
        world.expect(page, content);
    }
    world.end();
}

#[test]
fn who_was_found_by_a_number_is_proved() {
    let Some(world) = World::of(testing::tenant()) else { return };
    leave(&world);
    let gate = lock(&world.space.gate);
    let own = testing::own_process();
    let mut other = std::process::Command::new("sleep").arg("60").spawn().expect("a child");
    let process = Process::open(other.id()).expect("it lives");
    let ask = |process| world.space.prove_found(&world.tenant, &gate, process);
    assert_eq!(ask(&own), Ok(()));
    let while_it_lives = ask(&process);
    other.kill().expect("it sleeps");
    other.wait().expect("it was killed");
    assert!(while_it_lives.is_err() && ask(&process).is_err(), "another one has none of the pages");
    drop(gate);
    assert_eq!(first_three(&world), LEAVING);
    world.end();
}

/// As of memory that was advised away (`MADV_FREE`), or of a program all of whose pages are
/// stored.
#[test]
fn who_has_no_page_is_proved_by_a_slot_that_nothing_leaves_through() {
    let Some(world) = World::of(testing::tenant()) else { return };
    let mut gate = lock(&world.space.gate);
    let address = world.memory.address(0);
    let page = gate.object.page_or_new(&world.tenant.map, address).expect("room");
    gate.slots[0] = address;
    world.tenant.inherit(page, LEAVING[0]);
    let own = testing::own_process();
    world.space.prove_found(&world.tenant, &gate, &own).expect("it is this process");
    world.space.settle_leaving(&world.tenant, &mut gate, &own).expect("it has its page tables");
    drop(gate);
    assert_eq!(world.entry(0), Entry::Resident { shared: true }, "not what the slot has");
    world.end();
}

#[test]
fn whose_transfer_range_is_unknown_is_proved_by_a_page_of_its_own() {
    let Some(world) = World::of(testing::tenant()) else { return };
    let transfer = world.tenant.registry.space_address(world.space.id, SpaceAddress::Transfer);
    transfer.store(0, Ordering::Relaxed);
    let own = testing::own_process();
    let ask = || world.space.prove_found(&world.tenant, &lock(&world.space.gate), &own);
    assert!(ask().is_err(), "nothing is there yet");
    world.write(3, 4);
    world.wait_for(3, Entry::Resident { shared: false });
    assert_eq!(ask(), Ok(()));
    world.expect(3, 4);
    world.end();
}

#[test]
fn a_child_has_slots_for_what_was_leaving_and_waits_for_no_batch() {
    let Some(world) = World::of(testing::tenant()) else { return };
    leave(&world);
    let mut gate = lock(&world.space.gate);
    let fd = testing::raw(testing::userfaultfd().expect("as for the world"));
    world.space.forked(&world.tenant, &mut gate, fd);
    let child = world
        .tenant
        .space_list()
        .into_iter()
        .find(|space| space.id != world.space.id)
        .expect("the child's space");
    let process = testing::own_process();
    world.space.settle_leaving(&world.tenant, &mut gate, &process).expect("it is this process");
    drop(gate);
    let gate = lock(&child.gate);
    for (page, leaving) in LEAVING.into_iter().enumerate() {
        let address = world.memory.address(page);
        assert_eq!(gate.slots[page], address);
        assert_eq!(gate.object.entry(&world.tenant.map, address), leaving);
    }
    drop(gate);
    assert!(child.has_strays.load(Ordering::Acquire), "its own transfer range has them");
    world.tenant.bury(&child);
    while world.tenant.forget_buried(usize::MAX) {}
    world.end();
}
