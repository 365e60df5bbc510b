//! Which ranges are to be watched, and how the round goes on.

use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use strata_sys::{ControlBlock, Range, SeqPacket};
use strata_units::{PAGE, PAGES_PER_LEAF, PageId};

use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::space::Space;
use crate::tenant::watching::{Seen, Watch};
use crate::tenant::{Hail, Tenant};
use crate::testing;

const LEAF: u64 = PAGES_PER_LEAF as u64;
const DRAM: Entry = Entry::Resident { shared: false };

/// A process of `tenant` whose pages, from page `base` on, are as told: runs of so many
/// in the node (true) or in DRAM.
fn process(tenant: &Arc<Tenant>, base: u64, runs: &[(u64, bool)]) -> Option<Arc<Space>> {
    let uffd = testing::userfaultfd()?;
    let (ours, _) = UnixDatagram::pair().expect("sockets");
    let own = Range { start: 0, end: 0 };
    let hail =
        Hail { process: testing::own_process(), transfer: 1 << 20, own, restart: 0, library: 0 };
    let block = ControlBlock::create(strata_units::wire::MAGIC).expect("a control block");
    let space =
        tenant.attach_unkept(uffd, block, SeqPacket::adopt(ours.into()), hail).expect("a space");
    let mut page = base;
    for &(count, on_node) in runs {
        for _ in 0..count {
            let id = lock(&space.gate).object.page_or_new(&tenant.map, page * PAGE);
            set(tenant, id.expect("room"), on_node);
            page += 1;
        }
    }
    Some(space)
}

fn set(tenant: &Tenant, page: PageId, on_node: bool) {
    tenant.now_resident(page);
    if on_node {
        assert!(tenant.went_to_node(page, DRAM, tenant.census().newcomer()));
    }
}

/// In pages.
fn told(watch: &Watch) -> Vec<(u64, u64)> {
    watch.ranges.iter().map(|range| (range.start / PAGE, range.end / PAGE)).collect()
}

#[test]
fn runs_on_the_node_are_watched_and_some_in_dram_beside_them() {
    let tenant = testing::tenant();
    let base = 4 * LEAF;
    let runs = [(100, true), (4, false), (50, true), (20, false), (3, true), (200, false)];
    let Some(_space) = process(&tenant, base, &runs) else { return };
    let watch = tenant.next_watch(512).expect("something to watch");
    // Four pages in between are bridged, three on the node are too few, and of DRAM the
    // longest run of the leaf is beside them.
    assert_eq!(told(&watch), [(base, base + 154), (base + 177, base + 377)]);
    assert!(watch.all);
    assert_eq!(watch.process.pid(), std::process::id());
    // The round begins anew; what was seen waits for the keeper, the newest alone.
    assert_eq!(tenant.next_watch(512).expect("again").ranges, watch.ranges);
    for hits in [3, 4] {
        tenant.was_watched(&watch, vec![Seen { range: watch.ranges[0], hits }]);
    }
    assert_eq!(tenant.take_sight().expect("seen").seen[0].hits, 4);
    assert!(tenant.take_sight().is_none());
    // Nonsense is not looked up.
    let Range { start, end } = watch.ranges[0];
    let nonsense = [(0, end), (start, u64::MAX), (end, start), (start, start), (start, end)];
    let seen = nonsense.map(|(start, end)| Seen { range: Range { start, end }, hits: 20 });
    tenant.was_watched(&watch, seen.into());
    assert_eq!(tenant.take_sight().expect("seen").seen, [seen[4]]);
}

#[test]
fn what_is_too_much_for_one_look_is_gone_round() {
    let tenant = testing::tenant();
    // Sixteen runs a leaf.
    let runs: Vec<(u64, bool)> = (0..8 * 16).flat_map(|_| [(16, true), (16, false)]).collect();
    let Some(_first) = process(&tenant, 4 * LEAF, &runs) else { return };
    let Some(_second) = process(&tenant, 400 * LEAF, &[(40, true)]) else { return };
    let mut seen = Vec::new();
    for _ in 0..6 {
        let watch = tenant.next_watch(64).expect("something to watch");
        assert!(watch.ranges.len() <= 64 && !watch.all);
        let sorted = watch.ranges.windows(2).all(|two| two[0].end <= two[1].start);
        assert!(sorted, "{:?}", told(&watch));
        seen.push(watch);
    }
    // 48 runs a look, whole leaves: three looks for the first process, then the second.
    let begins: Vec<u64> = seen
        .iter()
        .map(|watch| {
            let node = |range: &&Range| {
                let gate = tenant.space(watch.space).expect("there");
                let page = lock(&gate.gate).object.page(range.start).expect("a page");
                tenant.map.get(page) == Entry::OnNode
            };
            watch.ranges.iter().find(node).expect("a run on the node").start / PAGE / LEAF
        })
        .collect();
    assert_eq!(begins, [4, 7, 10, 400, 4, 7]);
}

#[test]
fn nothing_is_watched_of_who_has_nothing_there() {
    let tenant = testing::tenant();
    assert!(tenant.next_watch(64).is_none());
    let Some(space) = process(&tenant, LEAF, &[(100, false)]) else { return };
    assert!(tenant.next_watch(64).is_none());
    let Some(other) = process(&tenant, 9 * LEAF, &[(2, true)]) else { return };
    assert!(tenant.next_watch(64).is_none(), "too few to be worth it");
    let page = lock(&space.gate).object.page(LEAF * PAGE).expect("a page");
    for index in 0..10 {
        set(&tenant, PageId::new(page.leaf(), index), true);
    }
    assert_eq!(tenant.next_watch(64).expect("there").space, space.id);
    space.set_gone();
    assert!(tenant.next_watch(64).is_none(), "its process has ended");
    drop(other);
}
