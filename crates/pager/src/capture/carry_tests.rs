//! What a move has of memory that was captured before: marks of single pages, and pages that
//! are handed on as they are read.

use std::time::Instant;

use strata_sys::Range;
use strata_units::PAGE_SIZE;

use crate::capture::capture_tests::{Taken, fill, pending};
use crate::fault::serve_tests::{HANGS, PAGES, World};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::testing;

#[test]
fn what_is_wanted_page_by_page_is_marked_so() {
    let Some(world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..48, |page| 1 + page as u8);
    lock(&world.space.gate).is_precise = true;
    let mut first = Taken::of(&world);
    // Written while it is captured: a page of one block, and nine of the next.
    world.write(3, 100);
    for page in 16..25 {
        world.write(page, 100);
    }
    let left: Vec<usize> = (0..3).chain(4..16).chain(32..48).collect();
    assert_eq!(pending(&world), left, "the ninth took the rest of its block along");
    first.capture_all(&world);
    for page in 0..48 {
        first.expect(&world, page, 1 + page as u8);
    }
    let mut second = Taken::of(&world);
    assert_eq!(second.capture_all(&world), 15 + 16, "one was written, and a block is another's");
    for page in 0..48 {
        let is_written = page == 3 || (16..25).contains(&page);
        second.expect(&world, page, if is_written { 100 } else { 1 + page as u8 });
    }
    first.remove(&world);
    second.remove(&world);
    world.end();
}

#[test]
fn what_is_carried_is_what_the_snapshot_before_has_not() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..40, |page| 1 + page as u8);
    lock(&world.space.gate).is_precise = true;
    let mut first = Taken::of(&world);
    first.capture_all(&world);
    for page in [3, 4, 20] {
        world.write(page, 100 + page as u8);
    }
    world.evict_all(&[30]);
    world.write(30, 130);
    let mut second = Taken::of(&world);
    // Another thread's write while it is carried: it was read before, and is stored.
    world.write(20, 9);
    let mut carried = Vec::new();
    let mut each = |start: u64, bytes: &[u8]| {
        for (at, page) in (start..).step_by(PAGE_SIZE).zip(bytes.as_chunks::<PAGE_SIZE>().0) {
            let found = (0..PAGES).find(|&page| world.memory.address(page) == at).expect("ours");
            assert!(page == &testing::page(100 + found as u8).0, "page {found}");
            carried.push(found);
        }
        true
    };
    let hangs = Instant::now() + HANGS;
    while world.space.capture_state().is_some_and(|(pending, _)| pending > 0) {
        world.space.carry_some(&world.tenant, &mut each, &mut second.buffer).expect("wanted");
        assert!(Instant::now() < hangs, "pages stay pending");
    }
    second.end(&world);
    assert_eq!(carried, [3, 4, 30]);
    second.expect(&world, 20, 120);
    for page in (0..40).filter(|page| !carried.contains(page) && *page != 20) {
        second.expect(&world, page, 1 + page as u8);
    }
    for page in carried {
        assert_eq!(second.entry(&world, page), Entry::Lost, "{page} is nowhere else");
    }
    // One that lost its protection may have been written since: it is not carried.
    let mut third = Taken::of(&world);
    let at = world.memory.address(3);
    world.space.uffd.unprotect(Range { start: at, end: at + PAGE_SIZE as u64 });
    world.write(3, 77);
    let mut starts = Vec::new();
    let mut each = |start: u64, _: &[u8]| {
        starts.push(start);
        true
    };
    let some = world.space.carry_some(&world.tenant, &mut each, &mut third.buffer);
    assert!(some.is_some());
    assert_eq!(starts, [4, 20, 30].map(|page| world.memory.address(page)));
    assert_eq!(pending(&world), [3]);
    lock(&world.space.gate).capture = None;
    world.tenant.forget_leaves(third.id);
    // Nobody takes it: whoever carries says so.
    let mut fourth = Taken::of(&world);
    let wanted = world.space.carry_some(&world.tenant, &mut |_, _| false, &mut fourth.buffer);
    assert_eq!(wanted, None);
    lock(&world.space.gate).capture = None;
    world.tenant.forget_leaves(fourth.id);
    first.remove(&world);
    second.remove(&world);
    world.end();
}
