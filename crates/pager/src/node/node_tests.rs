//! The node's account, with a mover that does as told: no machine of ours has two
//! nodes. That the kernel's moves lose nothing is shown in a guest (tests/cases).

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use strata_store::Put;
use strata_sys::{ControlBlock, NodeRefusal, PagePlace, Range, SeqPacket};
use strata_units::{PAGE, PageId};

use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::object::Object;
use crate::map::registry::NodeSpec;
use crate::node::{Mover, NodeTier};
use crate::tenant::space::{Agent, Space};
use crate::tenant::{Hail, Tenant};
use crate::testing::{self, HEADROOM_PAGES};

const BASE: u64 = 1 << 30;
const DRAM: u32 = 0;
const NODE: u32 = 1;

/// A machine with two nodes.
#[derive(Default)]
struct Machine {
    /// Pages that are not in DRAM, by address.
    on_node: BTreeSet<u64>,
    absent: BTreeSet<u64>,
    /// Where huge pages were divided, one after the other.
    divided: Vec<u64>,
    busy: BTreeSet<u64>,
    free_bytes: u64,
    refuses: Option<NodeRefusal>,
    /// What the program does while pages are being moved.
    meanwhile: Option<Box<dyn FnOnce() + Send>>,
}

#[derive(Clone)]
struct Fake(Arc<Mutex<Machine>>);

impl Mover for Fake {
    fn divide(&mut self, _: &Agent, addresses: &[u64]) {
        lock(&self.0).divided.extend(addresses);
    }

    fn move_to(
        &mut self,
        process: &Agent,
        addresses: &[u64],
        node: u32,
    ) -> Result<Vec<PagePlace>, NodeRefusal> {
        assert_eq!(process.process.pid(), std::process::id());
        let mut machine = lock(&self.0);
        if let Some(refusal) = machine.refuses {
            return Err(refusal);
        }
        let places = addresses.iter().map(|&address| {
            if machine.absent.contains(&address) {
                return PagePlace::Absent;
            }
            if machine.busy.contains(&address) {
                return PagePlace::Stayed;
            }
            match node {
                NODE => machine.on_node.insert(address),
                _ => machine.on_node.remove(&address),
            };
            PagePlace::Node(node)
        });
        let places = places.collect();
        if let Some(meanwhile) = machine.meanwhile.take() {
            drop(machine);
            meanwhile();
        }
        Ok(places)
    }

    fn find(&mut self, _: &Agent, addresses: &[u64]) -> Result<Vec<PagePlace>, NodeRefusal> {
        let machine = lock(&self.0);
        let place = |address: &u64| match machine.absent.contains(address) {
            true => PagePlace::Absent,
            false => PagePlace::Node(if machine.on_node.contains(address) { NODE } else { DRAM }),
        };
        Ok(addresses.iter().map(place).collect())
    }

    fn room(&mut self, _: u32) -> Option<(u64, u64)> {
        Some((64 * PAGE, lock(&self.0).free_bytes))
    }
}

struct World {
    tenant: Arc<Tenant>,
    space: Arc<Space>,
    machine: Fake,
    tier: NodeTier,
    now: Instant,
    pages: Vec<PageId>,
}

const SPEC: NodeSpec =
    NodeSpec { node: NODE, home: DRAM, limit_bytes: 1 << 30, bytes_per_second: 1 << 30 };

/// A tenant of this process with `count` resident pages, for all it knows.
fn world(spec: NodeSpec, count: u64) -> Option<World> {
    let uffd = testing::userfaultfd()?;
    let tenant = testing::tenant();
    let (ours, _) = UnixDatagram::pair().expect("sockets");
    let (transfer, own) = (BASE / 2, Range { start: 0, end: 0 });
    let hail = Hail { process: testing::own_process(), transfer, own, restart: 0, library: 0 };
    let block = ControlBlock::create(strata_units::wire::MAGIC).expect("a control block");
    let space =
        tenant.attach_unkept(uffd, block, SeqPacket::adopt(ours.into()), hail).expect("a space");
    let mut gate = lock(&space.gate);
    gate.add_registered(Range { start: BASE, end: BASE + count * PAGE });
    let page = |n| gate.object.page_or_new(&tenant.map, BASE + n * PAGE).expect("room");
    let pages: Vec<PageId> = (0..count).map(page).collect();
    drop(gate);
    for &page in &pages {
        tenant.now_resident(page);
    }
    let machine = Fake(Arc::new(Mutex::new(Machine { free_bytes: 1 << 40, ..Machine::default() })));
    let now = Instant::now() + Duration::from_secs(1);
    let mut tier = NodeTier::new(spec, Box::new(machine.clone()), now - Duration::from_secs(1));
    tier.look(&tenant, now);
    Some(World { tenant, space, machine, tier, now, pages })
}

impl World {
    fn demote(&mut self, range: std::ops::Range<usize>) -> Vec<PageId> {
        self.tier.demote(&self.tenant, &self.space, &self.pages[range], self.now)
    }

    fn promote(&mut self, range: std::ops::Range<usize>) -> usize {
        self.tier.promote(&self.tenant, &self.space, &self.pages[range], self.now)
    }

    fn verify(&mut self) {
        self.tier.verify(&self.tenant, &self.space, &self.pages, self.now);
    }

    fn pass(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.tier.look(&self.tenant, self.now);
    }

    fn address(&self, page: usize) -> u64 {
        BASE + page as u64 * PAGE
    }

    fn entry(&self, page: usize) -> Entry {
        self.tenant.map.get(self.pages[page])
    }

    fn opposed(&self) -> u64 {
        self.tenant.counters.get(Counter::OpposedMoves)
    }

    /// Pages in DRAM and on the node; they, and the headroom, add up to all.
    fn account(&self) -> (u64, u64) {
        let count = |wanted: fn(Entry) -> bool| {
            (0..self.pages.len()).filter(|&page| wanted(self.entry(page))).count() as u64
        };
        let (dram, _) = self.tenant.pages();
        assert_eq!(dram, count(|entry| entry.is_resident() && entry != Entry::OnNode));
        assert_eq!(self.tenant.node_pages(), count(|entry| entry == Entry::OnNode));
        assert_eq!(self.tenant.headroom_pages(), HEADROOM_PAGES - dram as i64);
        (dram, self.tenant.node_pages())
    }
}

#[test]
fn pages_go_and_come_back_and_are_charged_where_they_are() {
    let Some(mut world) = world(SPEC, 700) else { return };
    let copy = world.tenant.store.put(&testing::page(1).0, Put::Fast).expect("room");
    world.tenant.map.set(world.pages[5], Entry::Kept(copy));
    world.tenant.account.copy_is_kept();
    {
        let mut machine = lock(&world.machine.0);
        machine.busy.extend([world.address(3)]);
        machine.absent.extend([world.address(4)]);
    }
    assert_eq!(world.demote(0..600), [world.pages[3], world.pages[4]]);
    assert_eq!(world.account(), (102, 598));
    assert_eq!(world.entry(3), Entry::Resident { shared: false });
    assert_eq!(world.entry(5), Entry::OnNode, "its copy in the store is good for nothing now");
    assert_eq!((world.tenant.kept_pages(), world.tenant.store.stats().stored_pages), (0, 0));
    // Once more moves nothing, and loses no count.
    assert_eq!(world.demote(0..600).len(), 600);
    assert_eq!(world.account(), (102, 598));
    assert_eq!(world.promote(0..700), 598);
    assert_eq!(world.account(), (700, 0));
    let count = |counter| world.tenant.counters.get(counter);
    assert_eq!((count(Counter::NodeDemotions), count(Counter::NodePromotions)), (598, 598));
    assert!(lock(&world.machine.0).on_node.is_empty());
}

#[test]
fn huge_pages_are_divided_before_a_part_of_them_goes_or_comes() {
    let Some(mut world) = world(SPEC, 600) else { return };
    let divided = |world: &World| std::mem::take(&mut lock(&world.machine.0).divided);
    let addresses = |world: &World, pages: std::ops::Range<usize>| -> Vec<u64> {
        pages.map(|page| world.address(page)).collect()
    };
    world.demote(500..530);
    assert_eq!(divided(&world), addresses(&world, 500..530));
    assert_eq!(world.promote(504..506), 2);
    assert_eq!(divided(&world), addresses(&world, 504..506), "the kernel may have made one again");
}

#[test]
fn limit_free_memory_and_bandwidth_bound_what_goes() {
    let spec = NodeSpec { limit_bytes: 40 * PAGE, ..SPEC };
    let Some(mut world) = world(spec, 100) else { return };
    assert_eq!(world.demote(0..100).len(), 60, "the tenant's limit");
    assert_eq!(world.tier.room_pages(&world.tenant), 0);
    world.promote(0..100);
    lock(&world.machine.0).free_bytes = 11 * PAGE;
    world.pass(1);
    // One page, a 64th of the node, stays free.
    assert_eq!(world.demote(0..100).len(), 90, "what is free there");
    lock(&world.machine.0).free_bytes = 0;
    world.pass(1);
    assert_eq!(world.demote(0..100).len(), 100, "full");

    let spec = NodeSpec { bytes_per_second: 1000 * PAGE, ..SPEC };
    let Some(mut world) = self::world(spec, 2000) else { return };
    // A batch fits always; what is saved up is no more.
    assert_eq!(world.demote(0..2000).len(), 2000 - 512);
    world.now += Duration::from_millis(100);
    world.tier.look(&world.tenant, world.now);
    assert_eq!(world.tier.affordable_pages(), 100);
    assert_eq!(world.promote(0..2000), 100, "and back");
}

#[test]
fn what_others_move_back_soon_is_counted_and_left_alone() {
    let Some(mut world) = world(SPEC, 20) else { return };
    world.demote(0..10);
    world.pass(9);
    let back: Vec<u64> = (0..4).map(|page| world.address(page)).collect();
    {
        let mut machine = lock(&world.machine.0);
        machine.on_node.retain(|address| !back.contains(address));
        machine.absent.insert(BASE + 5 * PAGE);
    }
    // Looked for once more, without being asked.
    assert!(world.tier.look_again(&world.tenant, world.now));
    assert!(!world.tier.look_again(&world.tenant, world.now));
    assert_eq!(world.opposed(), 4, "one that was discarded was not moved");
    assert_eq!(world.account(), (15, 5));
    assert_eq!(world.demote(0..4).len(), 4, "left alone");
    world.pass(61);
    assert_eq!(world.demote(0..4).len(), 0, "for a minute");

    // Later than ten seconds it is put right and not counted.
    world.pass(11);
    lock(&world.machine.0).on_node.clear();
    world.verify();
    assert_eq!((world.account(), world.opposed()), ((20, 0), 4));
    // Nor is what somebody moved to the node of which we knew nothing.
    lock(&world.machine.0).on_node.extend((12..15).map(|page| BASE + page * PAGE));
    world.verify();
    assert_eq!((world.account(), world.opposed()), ((17, 3), 4));
    // Brought back by us, and down again: opposed.
    world.promote(12..15);
    lock(&world.machine.0).on_node.extend((12..14).map(|page| BASE + page * PAGE));
    world.verify();
    assert_eq!((world.account(), world.opposed()), ((18, 2), 6));
}

#[test]
fn nothing_stays_on_the_node_of_a_tenant_that_is_released() {
    let spec = NodeSpec { bytes_per_second: PAGE, ..SPEC };
    let Some(mut world) = world(spec, 20) else { return };
    world.demote(0..10);
    // Opposed, and down again; moved by somebody of whom we know nothing.
    lock(&world.machine.0).on_node.remove(&BASE);
    world.verify();
    assert_eq!(world.opposed(), 1);
    lock(&world.machine.0).on_node.extend([BASE, BASE + 15 * PAGE]);
    world.tier.empty(&world.tenant, &world.space, &world.pages, world.now);
    assert_eq!(world.account(), (20, 0));
    assert!(lock(&world.machine.0).on_node.is_empty());
}

#[test]
fn what_changes_while_pages_move_is_not_believed_to_have_moved() {
    let Some(mut world) = world(SPEC, 10) else { return };
    let (tenant, space) = (Arc::clone(&world.tenant), Arc::clone(&world.space));
    let pages = world.pages.clone();
    let change = move || {
        // As the handler does: discarded, unmapped, moved away.
        let mut gate = lock(&space.gate);
        for (page, entry) in [(1, Entry::Discarded), (2, Entry::Untouched)] {
            tenant.overwrite(pages[page], tenant.map.get(pages[page]), entry);
        }
        gate.object = Object::new(space.id);
        let other = gate.object.page_or_new(&tenant.map, BASE).expect("room");
        assert_ne!(other, pages[0]);
    };
    lock(&world.machine.0).meanwhile = Some(Box::new(change));
    assert_eq!(world.demote(0..10).len(), 10);
    assert_eq!(world.tenant.node_pages(), 0);
    assert_eq!((world.entry(1), world.entry(2)), (Entry::Discarded, Entry::Untouched));
}

#[test]
fn a_refusal_is_said_once_and_tried_again_later() {
    let Some(mut world) = world(SPEC, 10) else { return };
    let said = |world: &World| -> BTreeMap<bool, usize> {
        world.tenant.notes().iter().fold(BTreeMap::new(), |mut sum, note| {
            *sum.entry(note.contains("CAP_SYS_PTRACE")).or_default() += 1;
            sum
        })
    };
    lock(&world.machine.0).refuses = Some(NodeRefusal::Forbidden);
    assert_eq!(world.demote(0..10).len(), 10);
    assert_eq!(world.account(), (10, 0));
    assert_eq!(world.tier.room_pages(&world.tenant), 0, "the policy is not told of room");
    assert_eq!(said(&world), BTreeMap::from([(true, 1)]));
    lock(&world.machine.0).refuses = None;
    world.pass(5);
    assert_eq!(world.demote(0..10).len(), 10, "not at once");
    world.pass(5);
    assert_eq!(said(&world), BTreeMap::new());
    assert_eq!(world.demote(0..10).len(), 0);
    assert_eq!(world.account(), (0, 10));
}

#[test]
fn what_a_fork_shares_stays_where_it_is() {
    assert_eq!(Entry::OnNode.inherited(), Entry::Resident { shared: true });
    let Some(mut world) = world(SPEC, 4) else { return };
    let shared = Entry::Resident { shared: true };
    world.tenant.map.set(world.pages[0], shared);
    assert_eq!(world.demote(0..4), [world.pages[0]]);
    world.verify();
    assert_eq!((world.entry(0), world.tenant.node_pages()), (shared, 3));
}
