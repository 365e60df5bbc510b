//! Settings and whereabouts, without a process: what requests and events make of
//! them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use strata_store::Put;
use strata_sys::Range;
use strata_units::PAGE;

use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::settings::{MOST_SETTINGS, Setting};
use crate::regions::place::{Refused, Whereabouts, Wish, most_pinned_bytes};
use crate::tenant::Tenant;
use crate::tenant::space::Space;
use crate::testing::{self, Message};

const BASE: u64 = 1 << 30;

fn r(start: u64, end: u64) -> Range {
    Range { start: BASE + start * PAGE, end: BASE + end * PAGE }
}

/// A space whose first 1024 pages from [`BASE`] on are registered, for all it knows.
fn space() -> Option<(Arc<Tenant>, Arc<Space>)> {
    let uffd = testing::userfaultfd()?;
    let tenant = testing::tenant();
    let space = testing::space(&tenant, uffd);
    lock(&space.gate).add_registered(r(0, 1024));
    Some((tenant, space))
}

fn act(tenant: &Arc<Tenant>, space: &Space, message: Message) {
    testing::fill_ring(tenant, space, &[message]);
    space.act_on_ring(tenant, &mut lock(&space.gate), 1, &mut Vec::new());
}

const PIN: Wish = Wish::Set(Setting::Pinned);

#[test]
fn pins_are_bounded_by_the_budget_all_or_none() {
    let Some((tenant, space)) = space() else { return };
    tenant.registry.budget(tenant.id).store(100 * PAGE, Ordering::Relaxed);
    assert_eq!(most_pinned_bytes(100 * PAGE), 75 * PAGE);
    tenant.place(&space, &[r(0, 40), r(50, 60)], PIN).expect("it fits");
    assert_eq!(tenant.pinned_bytes(), 50 * PAGE);
    tenant.place(&space, &[r(0, 40)], PIN).expect("the same again costs nothing");
    let refused = tenant.place(&space, &[r(100, 110), r(200, 216)], PIN);
    assert_eq!(refused, Err(Refused::Budget { most_bytes: 75 * PAGE }));
    assert_eq!(tenant.pinned_bytes(), 50 * PAGE, "nothing of it was done");
    tenant.place(&space, &[r(100, 125)], PIN).expect("as much as may be");
    // Less than it is pinned: to let go must be possible.
    tenant.registry.budget(tenant.id).store(10 * PAGE, Ordering::Relaxed);
    tenant.place(&space, &[r(0, 10)], Wish::Unpin).expect("less is never refused");
    tenant.place(&space, &[r(10, 20)], Wish::Set(Setting::Sequential)).expect("nor this");
    assert_eq!(tenant.pinned_bytes(), 55 * PAGE);
    tenant.forget_settings(&space);
    assert_eq!(tenant.pinned_bytes(), 0);
    assert!(tenant.registry.kept_settings(space.id).is_empty());
}

#[test]
fn a_restored_process_has_the_settings_that_fit() {
    let Some((tenant, space)) = space() else { return };
    tenant.registry.budget(tenant.id).store(100 * PAGE, Ordering::Relaxed);
    let had = [
        (r(0, 50), Setting::Pinned),
        (r(60, 90), Setting::Pinned),
        (r(100, 110), Setting::File),
        (r(200, 300), Setting::Sequential),
    ];
    tenant.set_restored(&space, &had).expect("kept");
    assert_eq!(tenant.pinned_bytes(), 50 * PAGE);
    let kept = [had[0], had[2], had[3]];
    assert_eq!(lock(&space.gate).settings.ranges(), kept, "no room for two");
    assert_eq!(tenant.registry.kept_settings(space.id).ranges(), kept);
    assert!(tenant.notes().iter().any(|note| note.contains("no longer")));
    tenant.set_restored(&space, &kept).expect("kept");
    assert!(tenant.notes().is_empty(), "{:?}", tenant.notes());
    // What no snapshot says, but a file that somebody made may.
    let wrong = [(Range { start: 1, end: PAGE }, Setting::Pinned)];
    tenant.set_restored(&space, &wrong).expect("none");
    assert_eq!(tenant.pinned_bytes(), 0);
}

#[test]
fn what_is_no_range_is_refused() {
    let Some((tenant, space)) = space() else { return };
    for wrong in [
        Range { start: BASE + 1, end: BASE + PAGE },
        Range { start: BASE, end: BASE + 1 },
        Range { start: BASE, end: BASE },
        Range { start: BASE + PAGE, end: BASE },
        Range { start: 0, end: u64::MAX - PAGE + 1 },
        Range { start: 1 << 47, end: (1 << 47) + PAGE },
    ] {
        for wish in [PIN, Wish::Unpin, Wish::Normal] {
            let both = [r(0, 1), wrong];
            assert_eq!(tenant.place(&space, &both, wish), Err(Refused::Range), "{wrong:x?}");
        }
        assert_eq!(tenant.whereabouts(&space, wrong), Err(Refused::Range));
    }
    assert_eq!(tenant.pinned_bytes(), 0);
    let one_by_one: Vec<Range> = (0..=MOST_SETTINGS as u64).map(|n| r(n * 2, n * 2 + 1)).collect();
    assert_eq!(tenant.place(&space, &one_by_one, PIN), Err(Refused::TooMany));
    tenant.place(&space, &one_by_one[1..], PIN).expect("as many as may be");
    // A hole would make one more of two: then it keeps its setting.
    tenant.place(&space, &[r(900, 1000)], Wish::Normal).expect("not more");
    act(&tenant, &space, Message::Unmap { start: r(2, 3).start, end: r(2, 3).end });
    assert_eq!(
        tenant.pinned_bytes(),
        tenant.registry.kept_settings(space.id).bytes_of(Setting::Pinned)
    );
}

#[test]
fn settings_end_with_their_memory_and_move_with_it() {
    let Some((tenant, space)) = space() else { return };
    tenant.place(&space, &[r(0, 100)], PIN).expect("it fits");
    let unmapped = Message::Unmap { start: r(10, 20).start, end: r(10, 20).end };
    // As a worker does that takes over from a dead one.
    for _ in 0..2 {
        act(&tenant, &space, unmapped);
        assert_eq!(tenant.pinned_bytes(), 90 * PAGE);
    }
    let moved = Message::Remap { from: r(50, 60).start, to: r(500, 510).start, len: 10 * PAGE };
    for _ in 0..2 {
        act(&tenant, &space, moved);
        assert_eq!(tenant.pinned_bytes(), 90 * PAGE);
    }
    let gate = lock(&space.gate);
    let pinned = |page| gate.settings.at(r(page, page + 1).start) == Some(Setting::Pinned);
    assert!(pinned(9) && !pinned(10) && pinned(20) && !pinned(55) && pinned(505));
    drop(gate);
    // Discarded is not unmapped.
    act(&tenant, &space, Message::Remove { start: r(0, 5).start, end: r(0, 5).end });
    assert_eq!(tenant.pinned_bytes(), 90 * PAGE);
    let kept = tenant.registry.kept_settings(space.id);
    assert_eq!(kept, lock(&space.gate).settings, "the next worker finds the same");
}

#[test]
fn a_page_is_where_its_entry_says() {
    let Some((tenant, space)) = space() else { return };
    let entries = {
        let page = |seed: u8, how| tenant.store.put(&testing::page(seed).0, how).expect("room");
        [
            (Entry::Untouched, Whereabouts::Untouched),
            (Entry::Discarded, Whereabouts::Untouched),
            (Entry::Resident { shared: true }, Whereabouts::Dram),
            (Entry::OnNode, Whereabouts::Node),
            (Entry::Kept(page(1, Put::Fast)), Whereabouts::Dram),
            (Entry::Leaving { slot: 1, wanted: false }, Whereabouts::Dram),
            (Entry::Arriving(page(2, Put::Fast)), Whereabouts::Dram),
            (Entry::Stored(page(4, Put::Staged)), Whereabouts::Staged),
            (Entry::Stored(page(5, Put::Zstd)), Whereabouts::Compressed),
            (Entry::Stored(page(0, Put::Fast)), Whereabouts::Compressed),
            (Entry::Lost, Whereabouts::Lost),
        ]
    };
    {
        let mut gate = lock(&space.gate);
        for (n, (entry, _)) in entries.iter().enumerate() {
            let address = r(507 + n as u64, 0).start;
            let page = gate.object.page_or_new(&tenant.map, address).expect("room");
            tenant.map.set(page, *entry);
        }
    }
    let found = tenant.whereabouts(&space, r(507, 507 + entries.len() as u64)).expect("a range");
    let expected: Vec<Whereabouts> = entries.iter().map(|&(_, place)| place).collect();
    assert_eq!(found, expected, "over the edge of a piece");
    let found = tenant.whereabouts(&space, r(1023, 1025)).expect("a range");
    assert_eq!(found, [Whereabouts::Untouched, Whereabouts::NotManaged]);
}
