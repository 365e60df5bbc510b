//! Page maps of processes to come: copied, ready, taken and forgotten.

use std::sync::atomic::{AtomicBool, Ordering};

use strata_store::StoreStats;
use strata_units::{PAGE_SIZE, PageBuffer, SpaceId};

use crate::capture::capture_tests::{Stops, Taken, fill};
use crate::fault::serve_tests::World;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::share::SnapshotSize;
use crate::testing;

#[test]
fn a_page_map_that_was_prepared_in_vain_leaves_nothing() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..8, |page| 1 + page as u8);
    let mut taken = Taken::of(&world);
    taken.capture_all(&world);
    let before = (world.tenant.leaf_count(), world.tenant.store.stats().stored_pages);
    let prepared = world.tenant.prepare_restore(&world.tenant, taken.id).expect("room");
    let during = (world.tenant.leaf_count(), world.tenant.store.stats().stored_pages);
    assert_eq!(during, (before.0 + 1, before.1 + 8));
    drop(prepared);
    let after = (world.tenant.leaf_count(), world.tenant.store.stats().stored_pages);
    assert_eq!(after, before);
    assert!(world.tenant.prepare_restore(&world.tenant, SpaceId(8000)).is_err());
    world.evict_all(&[0]);
    taken.remove(&world);
    world.end();
}

/// What is known of a snapshot and its store from outside.
fn known_of(world: &World, snapshot: SpaceId) -> (StoreStats, SnapshotSize, Option<u64>) {
    *lock(&world.tenant.share) = None;
    world.tenant.count_share();
    let stats = StoreStats { metadata_bytes: 0, ..world.tenant.store.stats() };
    let snapshots = lock(&world.tenant.share).map(|share| share.snapshots);
    (stats, world.tenant.snapshot_size(snapshot), snapshots)
}

#[test]
fn a_page_map_that_is_ready_is_nobodys_until_somebody_is_restored() {
    let Some(world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..8, |page| 1 + page as u8);
    // Of one value: no object.
    world.memory.write_page(8, &PageBuffer([7; PAGE_SIZE]));
    let mut taken = Taken::of(&world);
    taken.capture_all(&world);
    let tenant = &world.tenant;
    let before = known_of(&world, taken.id);
    assert_eq!((before.0.fill_pages, before.1.pages, before.2), (1, 9, Some(9)));
    let leaves = tenant.map.leaf_count();
    tenant.keep_ready(&[taken.id]).expect("room");
    tenant.keep_ready(&[taken.id]).expect("room");
    assert_eq!(known_of(&world, taken.id), before);
    assert_eq!(tenant.map.leaf_count(), leaves + 1, "once");
    // It is what a copy would be, and no other is made.
    let prepared = tenant.prepare_restore(tenant, taken.id).expect("room");
    assert!(!tenant.is_ready(taken.id));
    assert_eq!(tenant.map.leaf_count(), leaves + 1);
    assert_eq!(tenant.store.stats().stored_pages, before.0.stored_pages + 9);
    let of = |owner: SpaceId| {
        let mut all = tenant.map.leaves().into_iter();
        let (leaf, _, piece) = all.find(|&(_, slot, _)| slot == owner).expect("it has a leaf");
        let pages = leaf
            .pages()
            .map(|page| (tenant.map.get(page), tenant.map.age(page).load(Ordering::Relaxed)));
        (piece, pages.collect::<Vec<_>>())
    };
    assert_eq!(of(prepared.slot()), of(taken.id));
    // A second one has to be.
    let second = tenant.prepare_restore(tenant, taken.id).expect("room");
    assert_eq!(tenant.map.leaf_count(), leaves + 2);
    drop((prepared, second));
    assert_eq!(known_of(&world, taken.id), before);
    // Forgotten for another one, and with its snapshot.
    for forget in [|tenant: &Tenant| tenant.keep_ready(&[]).expect("room"), |_: &Tenant| {}] {
        tenant.keep_ready(&[taken.id]).expect("room");
        forget(tenant);
    }
    tenant.keep_ready(&[taken.id, SpaceId(8000)]).expect("what is not there is left out");
    assert_eq!(tenant.map.leaf_count(), leaves + 1);
    let slot = taken.id;
    taken.remove(&world);
    assert!(!tenant.is_ready(slot));
    world.end();
}

/// Snapshots come and go while what is ready of them is made, taken and forgotten.
#[test]
fn what_is_ready_goes_with_its_snapshot() {
    const ROUNDS: usize = 200;
    let Some(world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..8, |page| 1 + page as u8);
    let tenant = &world.tenant;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stops = Stops(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                tenant.keep_ready(&tenant.snapshot_memories()).expect("room");
            }
        });
        for round in 0..ROUNDS {
            let mut taken = Taken::of(&world);
            taken.capture_all(&world);
            if round % 2 == 0 {
                drop(tenant.prepare_restore(tenant, taken.id).expect("room"));
            }
            taken.remove(&world);
        }
    });
    tenant.keep_ready(&[]).expect("room");
    world.end();
}
