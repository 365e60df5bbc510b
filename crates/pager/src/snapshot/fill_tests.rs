//! Memory that comes from a snapshot of other memory, at another address.

use strata_sys::{OwnMemory, Range, Registration};
use strata_units::{PAGE_SIZE, PageBuffer};

use crate::capture::capture_tests::{Taken, fill};
use crate::fault::serve_tests::{PAGES, World};
use crate::map::address::PIECE_BYTES;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::orders::Filling;
use crate::tenant::snapshots::Prepared;
use crate::testing;

/// More memory of the space, registered, with junk in a few pages.
fn more_memory(world: &World, pages: usize, junk: &[usize]) -> &'static OwnMemory {
    // Never unmapped: that would wait for a handler that may be gone.
    let memory: &OwnMemory = Box::leak(Box::new(OwnMemory::create(pages).expect("memory")));
    for &page in junk {
        memory.write_page(page, &testing::page(200));
    }
    assert_eq!(world.space.uffd.register(memory.range()), Registration::Done);
    lock(&world.space.gate).add_registered(memory.range());
    memory
}

fn filling(world: &World, taken: &Taken, from: Range, to: Range) -> Result<(), String> {
    filling_with(world, taken, from, to, None)
}

fn filling_with(
    world: &World,
    taken: &Taken,
    from: Range,
    to: Range,
    prepared: Option<Prepared>,
) -> Result<(), String> {
    let known = lock(&world.tenant.snapshots).get(&taken.id).cloned().expect("whole");
    let pid = std::process::id();
    let filling = Filling { pid, memory: taken.id, from, to, wanted: Vec::new() };
    world.space.fill(&world.tenant, &testing::own_process(), &known, &filling, prepared)
}

fn expect(memory: &OwnMemory, page: usize, seed: u8) {
    let mut found = PageBuffer::zeroed();
    memory.read_page(page, &mut found);
    assert!(found.0 == testing::page(seed).0, "page {page} is not that of {seed}");
}

#[test]
fn memory_of_a_snapshot_is_somewhere_else_again() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..40, |page| 1 + page as u8);
    world.evict_all(&(0..10).collect::<Vec<_>>());
    let mut taken = Taken::of(&world);
    taken.capture_all(&world);
    // What the first does from then on is its own.
    for page in 0..40 {
        world.write(page, 100);
    }
    // In place are a page that is stored, two that nothing is known of, and one after.
    let there = more_memory(&world, PAGES, &[3, 50, 60, 30]);
    let resident = world.tenant.account.resident_pages();
    filling(&world, &taken, world.memory.range(), there.range()).expect("filled");
    assert_eq!(world.tenant.account.resident_pages(), resident + 4);
    let entry = |page: usize| {
        let id = lock(&world.space.gate).object.page(there.address(page));
        id.map_or(Entry::Untouched, |id| world.tenant.map.get(id))
    };
    assert!(matches!(entry(20), Entry::Stored(_)), "{:?}", entry(20));
    for page in (0..PAGES).rev() {
        expect(there, page, if page < 40 { 1 + page as u8 } else { 0 });
    }
    there.write_page(7, &testing::page(77));
    for page in 0..40 {
        world.expect(page, 100);
    }
    expect(there, 7, 77);
    taken.remove(&world);
    expect(there, 39, 40);
    world.end();
}

#[test]
fn leaves_that_were_prepared_are_handed_over_and_others_forgotten() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..40, |page| 1 + page as u8);
    world.evict_all(&(0..10).collect::<Vec<_>>());
    let mut taken = Taken::of(&world);
    taken.capture_all(&world);
    let stored = world.tenant.store.stats().stored_pages;
    let start = world.memory.range().start;
    let whole = Range { start, end: start + PIECE_BYTES };
    let less = Range { end: whole.end - PAGE_SIZE as u64, ..whole };
    let leaves = world.tenant.leaf_count();
    // All of a leaf; one of which the process has touched something; a part of one.
    for (number, (from, junk, is_handed_over)) in
        [(whole, &[][..], true), (whole, &[3, 50], false), (less, &[], false)]
            .into_iter()
            .enumerate()
    {
        world.tenant.keep_ready(&[taken.id]).expect("room");
        let there = more_memory(&world, (from.len() as usize) / PAGE_SIZE, junk);
        let prepared = world.tenant.prepare_fill(&world.tenant, taken.id).expect("room");
        let slot = prepared.slot();
        let own = || world.tenant.map.leaves().into_iter().filter(|leaf| leaf.1 == slot).count();
        let leaf = world.tenant.map.leaves().into_iter().find(|leaf| leaf.1 == slot);
        filling_with(&world, &taken, from, there.range(), Some(prepared)).expect("filled");
        assert_eq!(own(), 0, "nothing is left of it");
        let first = lock(&world.space.gate).object.page(there.address(0)).expect("it has a page");
        assert_eq!(leaf.map(|leaf| leaf.0) == Some(first.leaf()), is_handed_over, "{number}");
        assert_eq!(world.tenant.leaf_count(), leaves + 1 + number as u64);
        for page in (0..PAGES).rev() {
            expect(there, page, if page < 40 { 1 + page as u8 } else { 0 });
        }
        there.write_page(7, &testing::page(77));
        expect(there, 7, 77);
        world.expect(7, 8);
    }
    taken.remove(&world);
    for page in 0..40 {
        world.expect(page, 1 + page as u8);
    }
    assert!(world.tenant.store.stats().stored_pages <= stored, "references are left");
    world.end();
}

#[test]
fn memory_that_is_not_fresh_or_not_as_large_is_refused() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..8, |page| 1 + page as u8);
    let mut taken = Taken::of(&world);
    taken.capture_all(&world);
    let whole = world.memory.range();
    // Stored already.
    world.evict_all(&[2]);
    let error = filling(&world, &taken, whole, whole).expect_err("not in place");
    assert!(error.contains("not in place"), "{error}");
    world.expect(2, 3);
    // Not registered.
    let other: &OwnMemory = Box::leak(Box::new(OwnMemory::create(PAGES).expect("memory")));
    let error = filling(&world, &taken, whole, other.range()).expect_err("not managed");
    assert!(error.contains("cannot be managed"), "{error}");
    let ask = |from: Range, to: Range| {
        let filling = Filling { pid: 1, memory: taken.id, from, to, wanted: Vec::new() };
        world.tenant.fill(&world.tenant, filling, None).expect_err("refused at once")
    };
    let page = PAGE_SIZE as u64;
    let shifted = Range { start: whole.start + 1, end: whole.end + 1 };
    assert!(ask(whole, shifted).contains("whole pages"));
    let less = Range { end: whole.end - page, ..whole };
    assert!(ask(whole, less).contains("another size"));
    assert!(ask(Range { end: whole.start, ..whole }, whole).contains("another size"));
    taken.remove(&world);
    world.end();
}
