//! What a forked child's pages are that were on their way out of its parent, with the real kernel:
//! a page that was moved without a word, as Linux 6.18 does now and then, and a parent that has
//! another page at the same address before the batch is settled.

use std::iter;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use strata_sys::{Fill, Process};

use crate::fault::events::moved_slots;
use crate::fault::serve_tests::World;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::space::Space;
use crate::testing;

/// What `child` has at the address of each of the first two pages.
fn first_two(world: &World, child: &Space) -> [Entry; 2] {
    let gate = lock(&child.gate);
    [0, 1].map(|page| {
        gate.object
            .page(world.memory.address(page))
            .map_or(Entry::Untouched, |id| world.tenant.map.get(id))
    })
}

#[test]
fn a_child_has_what_its_own_memory_says_whatever_comes_of_the_move_in_its_parent() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    for page in [0, 1] {
        world.write(page, 1 + page as u8);
        world.wait_for(page, Entry::Resident { shared: false });
    }
    // Both are on their way out; the first has arrived in its slot, and nobody has said so.
    let transfer = world.space.agent().expect("attached").ranges.transfer;
    let mut gate = lock(&world.space.gate);
    for page in [0u8, 1] {
        let address = world.memory.address(page.into());
        gate.slots[usize::from(page)] = address;
        let id = gate.object.page(address).expect("touched");
        world.tenant.map.set(id, Entry::Leaving { slot: page.into(), wanted: false });
    }
    assert_eq!(world.space.uffd.copy(transfer.start, &testing::page(1)), Fill::Done { pages: 1 });
    let fd = testing::raw(testing::userfaultfd().expect("as for the world"));
    world.space.forked(&world.tenant, &mut gate, fd);
    drop(gate);
    let child: Arc<Space> = world
        .tenant
        .space_list()
        .into_iter()
        .find(|space| space.id != world.space.id)
        .expect("the child's space");
    let leaving = Entry::Leaving { slot: 0, wanted: false };
    let expected = [leaving, Entry::Resident { shared: true }];
    assert_eq!(first_two(&world, &child), expected);

    // The parent has the first page in place again, another one by then, so that nothing of its
    // batch was moved as far as anybody can see.
    world.write(0, 9);
    world.space.has_strays.store(true, Ordering::Release);
    assert_eq!(world.evict_once(iter::empty()), 0);
    assert_eq!(world.entry(0), Entry::Resident { shared: false });
    assert_eq!(first_two(&world, &child), expected);
    assert!(child.has_strays.load(Ordering::Acquire), "its own transfer range has the page");
    assert!(!child.is_heir.load(Ordering::Acquire), "it waits for nobody else's batch");

    world.tenant.bury(&child);
    while world.tenant.forget_buried(usize::MAX) {}
    world.end();
}

#[test]
fn a_parent_that_has_ended_does_not_say_that_nothing_was_moved() {
    let mut parent = std::process::Command::new("sleep").arg("60").spawn().expect("a child");
    let held = Process::open(parent.id()).expect("it lives");
    let start = held.maps().expect("it lives")[0].range.start;
    assert!(moved_slots(&held, start, 2).is_some());
    parent.kill().expect("it sleeps");
    parent.wait().expect("it was killed");
    assert_eq!(moved_slots(&held, start, 2), None);
}
