//! What is lent of memory that stands still is what it is, whether it is captured or not.

use strata_units::{PAGE_SIZE, PageBuffer};

use super::lent::{Differences, Lent};
use crate::capture::capture_tests::{Taken, fill};
use crate::fault::serve_tests::World;
use crate::map::lock;
use crate::testing;

fn range(world: &World, first: usize, last: usize) -> (u64, u64) {
    (world.memory.address(first), world.memory.address(last) + PAGE_SIZE as u64)
}

#[test]
fn what_is_lent_is_what_differs_and_is_read_at_any_time() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..40, |page| 1 + page as u8);
    lock(&world.space.gate).is_precise = true;
    let mut first = Taken::of(&world);
    first.capture_all(&world);
    for page in [3, 4, 20] {
        world.write(page, 100 + page as u8);
    }
    world.write(50, 150);
    world.write(30, 130);
    world.evict_all(&[30]);
    let mut second = Taken::of(&world);
    let found = world.tenant.differences_in(&world.space, Some(first.id)).expect("a snapshot");
    let changed = [(3, 4), (20, 20), (30, 30), (50, 50)];
    let changed = changed.map(|(first, last)| range(&world, first, last)).to_vec();
    assert_eq!(found, Differences { changed: changed.clone(), gone: Vec::new(), pages: 5 });
    let seeds = [(3, 103), (4, 104), (20, 120), (30, 130), (50, 150), (7, 8)];
    let mut page = PageBuffer::zeroed();
    for (number, seed) in seeds {
        let at = world.memory.address(number);
        assert_eq!(world.tenant.lent_page_in(&world.space, at, &mut page), Lent::Bytes, "{number}");
        assert!(page.0 == testing::page(seed).0, "page {number}");
    }
    // One whose protection is gone may have been written since: it is not lent as it is.
    let at = world.memory.address(20);
    world.space.uffd.unprotect(strata_sys::Range { start: at, end: at + PAGE_SIZE as u64 });
    assert_eq!(world.tenant.lent_page_in(&world.space, at, &mut page), Lent::NotYet);
    lock(&world.space.gate).capture = None;
    world.tenant.forget_leaves(second.id);
    // A snapshot that is whole has the same.
    second = Taken::of(&world);
    second.capture_all(&world);
    for (number, seed) in seeds {
        let at = world.memory.address(number);
        assert_eq!(world.tenant.lent_page(second.id, at, &mut page), Lent::Bytes, "{number}");
        assert!(page.0 == testing::page(seed).0, "page {number}");
    }
    let found = world.tenant.differences_of(second.id, Some(first.id)).expect("both are whole");
    assert_eq!(found, Differences { changed, gone: Vec::new(), pages: 5 });
    let at = world.memory.address(60);
    assert_eq!(world.tenant.lent_page(second.id, at, &mut page), Lent::Zero);
    let gone = second.id;
    first.remove(&world);
    second.remove(&world);
    assert!(matches!(world.tenant.lent_page(gone, at, &mut page), Lent::Lost(_)), "not zero");
    world.end();
}
