//! Random lives of pages against a plain model: touched, evicted, faulted,
//! discarded, unmapped and moved by messages in the ring, which are acted on
//! once or twice. Every page is where the model says, with its content, and the
//! store holds exactly the references that the page map names.
//!
//! Not here: the kernel (see `serve_tests`), and the keeper.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use strata_store::Put;
use strata_sys::Range;
use strata_units::wire::TRANSFER_PAGES;
use strata_units::{Handle, PAGE, PAGE_SIZE, PAGES_PER_LEAF, PageBuffer};

use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::registry::{RING_MESSAGES, SpaceField};
use crate::tenant::Tenant;
use crate::tenant::space::{Gate, Space};
use crate::testing::{self, HEADROOM_PAGES, Message};

/// Where the managed memory begins: aligned to a leaf.
const BASE: u64 = 1 << 40;
/// Leaves of managed memory.
const LEAVES: u64 = 4;
const PAGES: u64 = LEAVES * PAGES_PER_LEAF as u64;
/// Pages lie close to these: the edges of leaves, where mistakes are.
const NEAR: [u64; 5] = [0, 510, 1022, 1535, 2040];

/// Where a page of the model is; the number says its content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Discarded,
    Resident(u8),
    Leaving(u8),
    Stored(u8),
    Arriving(u8),
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The program writes: what was stored comes back first.
    Write {
        page: u64,
        content: u8,
    },
    /// Resident → Leaving.
    Leave {
        page: u64,
    },
    /// All that is leaving is stored.
    Settle,
    /// Stored → Arriving, and no further for now.
    Claim {
        page: u64,
    },
    /// Stored or Arriving → Resident.
    Fault {
        page: u64,
    },
    /// The stored copy of a resident page goes.
    DropKept {
        page: u64,
    },
    /// `madvise`, `munmap`: the messages, and how often they are acted on.
    Remove {
        from: u64,
        count: u64,
        times: u8,
    },
    Unmap {
        from: u64,
        count: u64,
        times: u8,
    },
    /// `mremap` onto what was unmapped before; `half` of its pages were moved
    /// by a worker that died over it.
    Remap {
        from: u64,
        to: u64,
        count: u64,
        times: u8,
        half: u64,
    },
    /// Three messages in one read.
    Clusters {
        from: u64,
        to: u64,
        count: u64,
    },
}

fn near() -> impl Strategy<Value = u64> {
    (prop::sample::select(NEAR.as_slice()), 0..8u64).prop_map(|(at, more)| at + more)
}

fn count() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 1..6u64, 2 => 500..530u64, 1 => 1000..1100u64]
}

/// Starts of ranges, whole leaves' among them.
fn start() -> impl Strategy<Value = u64> {
    prop_oneof![near(), (0..LEAVES).prop_map(|leaf| leaf * PAGES_PER_LEAF as u64)]
}

fn step() -> impl Strategy<Value = Step> {
    let times = 1..3u8;
    prop_oneof![
        8 => (near(), 0..7u8).prop_map(|(page, content)| Step::Write { page, content }),
        8 => near().prop_map(|page| Step::Leave { page }),
        3 => Just(Step::Settle),
        2 => near().prop_map(|page| Step::Claim { page }),
        3 => near().prop_map(|page| Step::Fault { page }),
        1 => near().prop_map(|page| Step::DropKept { page }),
        1 => (start(), count(), times.clone())
            .prop_map(|(from, count, times)| Step::Remove { from, count, times }),
        1 => (start(), count(), times.clone())
            .prop_map(|(from, count, times)| Step::Unmap { from, count, times }),
        3 => (start(), start(), count(), times, 0..4u64)
            .prop_map(|(from, to, count, times, half)| Step::Remap { from, to, count, times, half }),
        1 => (start(), start(), count())
            .prop_map(|(from, to, count)| Step::Clusters { from, to, count }),
    ]
}

fn address(page: u64) -> u64 {
    BASE + page * PAGE
}

fn apart(from: u64, to: u64, count: u64) -> bool {
    from.max(to) - from.min(to) >= count
}

struct World {
    tenant: Arc<Tenant>,
    space: Arc<Space>,
    model: BTreeMap<u64, Place>,
    /// Content of each transfer slot that holds a page.
    transfer: BTreeMap<usize, u8>,
    /// Stored copies of pages that are leaving.
    kept: Vec<Handle>,
    registered: Vec<bool>,
}

impl World {
    fn entry(&self, page: u64) -> Entry {
        let gate = lock(&self.space.gate);
        gate.object.page(address(page)).map_or(Entry::Untouched, |page| self.tenant.map.get(page))
    }

    /// What the store returns under a page's handle.
    fn fetched(&self, page: u64) -> Option<[u8; PAGE_SIZE]> {
        let mut out = PageBuffer::zeroed();
        self.tenant.store.get(self.entry(page).handle()?, &mut out.0).expect("a sound store");
        Some(out.0)
    }

    /// What the handler does at a touch, but for the kernel.
    fn fault(&mut self, page: u64) {
        let at = address(page);
        let map = &self.tenant.map;
        let id = lock(&self.space.gate).object.page_or_new(map, at).expect("room");
        match map.get(id) {
            Entry::Untouched | Entry::Discarded => {
                self.tenant.now_resident(id);
                self.model.insert(page, Place::Resident(0));
            }
            Entry::Stored(handle) | Entry::Arriving(handle) => {
                map.set(id, Entry::Arriving(handle));
                let content = self.fetched(page).expect("a handle");
                let Some(Place::Stored(known) | Place::Arriving(known)) = self.model.get(&page)
                else {
                    panic!("page {page} is stored, the model says {:?}", self.model.get(&page));
                };
                assert!(content == testing::page(*known).0, "content of page {page}");
                let known = *known;
                // Some keep their copies, whether they are written then or not.
                let mut out = PageBuffer::zeroed();
                let got = self.tenant.store.get_with_fingerprint(handle, &mut out.0);
                let (_, fingerprint) = got.expect("a sound store");
                let keep = fingerprint.filter(|_| !page.is_multiple_of(3));
                self.tenant.arrived(id, handle, keep);
                self.model.insert(page, Place::Resident(known));
            }
            _ => {}
        }
    }

    fn leave(&mut self, page: u64) {
        let mut gate = lock(&self.space.gate);
        let Some(id) = gate.object.page(address(page)) else { return };
        let Some(&Place::Resident(content)) = self.model.get(&page) else { return };
        let Some(slot) = (0..TRANSFER_PAGES).find(|slot| !self.transfer.contains_key(slot)) else {
            return;
        };
        gate.slots[slot] = address(page);
        let before = self.tenant.map.get(id);
        self.kept.extend(self.tenant.begins_to_leave(id, before, slot as u16));
        self.transfer.insert(slot, content);
        self.model.insert(page, Place::Leaving(content));
    }

    /// What `Evictor::fetch` does after it has read the transfer range.
    fn settle(&mut self) {
        let mut gate = lock(&self.space.gate);
        for (slot, content) in std::mem::take(&mut self.transfer) {
            let put = self.tenant.store.put(&testing::page(content).0, Put::Staged).expect("room");
            let at = std::mem::take(&mut gate.slots[slot]);
            let id = (at != 0).then(|| gate.object.page(at)).flatten();
            match id.map(|id| (id, self.tenant.map.get(id))) {
                Some((id, leaving @ Entry::Leaving { .. })) => {
                    self.tenant.overwrite(id, leaving, Entry::Stored(put));
                }
                _ => self.tenant.store.release(put),
            }
        }
        for handle in self.kept.drain(..) {
            self.tenant.store.release(handle);
        }
        for place in self.model.values_mut() {
            if let Place::Leaving(content) = *place {
                *place = Place::Stored(content);
            }
        }
        drop(gate);
    }

    fn act(&self, messages: &[Message], times: u8) {
        for _ in 0..times {
            testing::fill_ring(&self.tenant, &self.space, messages);
            let mut faults = Vec::new();
            self.space.act_on_ring(
                &self.tenant,
                &mut lock(&self.space.gate),
                RING_MESSAGES,
                &mut faults,
            );
            assert!(faults.is_empty());
        }
    }

    fn discard(&mut self, from: u64, count: u64, unmapped: bool) {
        let known: Vec<u64> = (from..from + count)
            .filter(|&page| lock(&self.space.gate).object.page(address(page)).is_some())
            .collect();
        for page in known {
            if unmapped {
                self.model.remove(&page);
            } else {
                self.model.insert(page, Place::Discarded);
            }
        }
        if unmapped {
            for page in from..from + count {
                self.registered[page as usize] = false;
            }
        }
    }

    fn remap(&mut self, from: u64, to: u64, count: u64) {
        for offset in 0..count {
            if let Some(place) = self.model.remove(&(from + offset)) {
                self.model.insert(to + offset, place);
            }
            self.registered[(from + offset) as usize] = false;
        }
        self.registered[to as usize..(to + count) as usize].fill(true);
    }

    /// A worker moved the first `half` pages of a remap, stored the target of
    /// the next, and died; the one after it counts that page's handle twice.
    fn die_over_remap(&self, from: u64, to: u64, count: u64, half: u64) {
        let mut gate = lock(&self.space.gate);
        let map = &self.tenant.map;
        let stored: Vec<u64> = (0..count)
            .filter(|&offset| {
                gate.object
                    .page(address(from + offset))
                    .is_some_and(|id| map.get(id).handle().is_some())
            })
            .take(half as usize)
            .collect();
        for (done, &offset) in stored.iter().enumerate() {
            let source = gate.object.page(address(from + offset)).expect("just found");
            let target = gate.object.page_or_new(map, address(to + offset)).expect("room");
            let entry = map.get(source);
            map.set(target, entry);
            if done + 1 < stored.len() {
                map.set(source, Entry::Untouched);
            } else {
                self.tenant.store.retain(entry.handle().expect("chosen for it"));
            }
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Write { page, content } => {
                self.fault(page);
                // A page on its way out: the writer waits until it has settled.
                if let Some(Place::Resident(known)) = self.model.get_mut(&page) {
                    *known = content;
                }
            }
            Step::Leave { page } => self.leave(page),
            Step::Settle => self.settle(),
            Step::Claim { page } => {
                let id = lock(&self.space.gate).object.page(address(page));
                if let Some(id) = id
                    && let Entry::Stored(handle) = self.tenant.map.get(id)
                {
                    self.tenant.map.set(id, Entry::Arriving(handle));
                    let place = self.model.get_mut(&page).expect("stored");
                    let Place::Stored(content) = *place else { panic!("model: {place:?}") };
                    *place = Place::Arriving(content);
                }
            }
            Step::Fault { page } => self.fault(page),
            Step::DropKept { page } => {
                let id = lock(&self.space.gate).object.page(address(page));
                if let Some(id) = id {
                    let had_one = matches!(self.tenant.map.get(id), Entry::Kept(_));
                    assert_eq!(self.tenant.drop_kept(id), had_one);
                }
            }
            Step::Remove { from, count, times } => {
                let count = count.min(PAGES - from);
                let message = Message::Remove { start: address(from), end: address(from + count) };
                self.discard(from, count, false);
                self.act(&[message], times);
            }
            Step::Unmap { from, count, times } => {
                let count = count.min(PAGES - from);
                let message = Message::Unmap { start: address(from), end: address(from + count) };
                self.discard(from, count, true);
                self.act(&[message], times);
            }
            Step::Remap { from, to, count, times, half } => {
                let count = count.min(PAGES - from).min(PAGES - to);
                if !apart(from, to, count) {
                    return;
                }
                // The kernel unmaps the target, moves, and unmaps the source.
                let (target, source) = (address(to), address(from));
                let len = count * PAGE;
                self.discard(to, count, true);
                self.act(&[Message::Unmap { start: target, end: target + len }], times);
                self.die_over_remap(from, to, count, half);
                self.remap(from, to, count);
                self.act(&[Message::Remap { from: source, to: target, len }], times);
                self.act(&[Message::Unmap { start: source, end: source + len }], times);
            }
            Step::Clusters { from, to, count } => {
                let count = count.min(PAGES - from).min(PAGES - to);
                if !apart(from, to, count) {
                    return;
                }
                let (target, source) = (address(to), address(from));
                let len = count * PAGE;
                self.discard(to, count, true);
                self.remap(from, to, count);
                self.act(
                    &[
                        Message::Unmap { start: target, end: target + len },
                        Message::Remap { from: source, to: target, len },
                        Message::Unmap { start: source, end: source + len },
                    ],
                    1,
                );
            }
        }
    }

    fn check(&self) {
        let gate = lock(&self.space.gate);
        let mut charged = 0;
        let mut handles = self.kept.len() as u64;
        let mut kept = 0;
        for page in 0..PAGES {
            let id = gate.object.page(address(page));
            let entry = id.map_or(Entry::Untouched, |id| self.tenant.map.get(id));
            let place = self.model.get(&page).copied();
            let agrees = match (entry, place) {
                (Entry::Untouched, None) | (Entry::Discarded, Some(Place::Discarded)) => true,
                (Entry::Resident { shared: false }, Some(Place::Resident(_))) => {
                    charged += 1;
                    true
                }
                (Entry::Kept(_), Some(Place::Resident(_))) => {
                    charged += 1;
                    handles += 1;
                    kept += 1;
                    true
                }
                (Entry::Leaving { slot, .. }, Some(Place::Leaving(content))) => {
                    charged += 1;
                    gate.slots[usize::from(slot)] == address(page)
                        && self.transfer.get(&usize::from(slot)) == Some(&content)
                }
                (Entry::Stored(handle), Some(Place::Stored(content)))
                | (Entry::Arriving(handle), Some(Place::Arriving(content))) => {
                    handles += 1;
                    let mut out = PageBuffer::zeroed();
                    self.tenant.store.get(handle, &mut out.0).expect("a sound store");
                    out.0 == testing::page(content).0
                }
                _ => false,
            };
            assert!(agrees, "page {page} is {entry:?}, the model says {place:?}");
            let one = Range { start: address(page), end: address(page + 1) };
            assert_eq!(gate.is_registered(one), self.registered[page as usize], "page {page}");
        }
        // A slot that named a page which left it would give that page old bytes.
        for (slot, &at) in gate.slots.iter().enumerate().filter(|&(_, &at)| at != 0) {
            let entry = gate.object.page(at).map(|id| self.tenant.map.get(id));
            let expected = Entry::Leaving { slot: slot as u16, wanted: false };
            assert_eq!(entry, Some(expected), "slot {slot} names {at:#x}");
        }
        let mut owned: Vec<_> = self.tenant.map.leaves();
        owned.sort_by_key(|&(_, _, piece)| piece);
        let known: Vec<_> =
            gate.object.leaves().map(|(piece, leaf)| (leaf, self.space.id, piece)).collect();
        assert_eq!(owned, known, "leaves and object");
        assert_eq!(self.tenant.store.stats().stored_pages, handles, "references");
        assert_eq!(self.tenant.kept_pages(), kept, "kept copies");
        let resident = self.tenant.account.resident_pages();
        assert_eq!(resident, charged, "resident pages");
        assert_eq!(self.tenant.headroom_pages(), HEADROOM_PAGES - charged, "headroom");
    }
}

fn world() -> Option<World> {
    let uffd = testing::userfaultfd()?;
    let tenant = testing::tenant();
    let space = testing::space(&tenant, uffd);
    lock(&space.gate).add_registered(Range { start: BASE, end: address(PAGES) });
    let registered = vec![true; PAGES as usize];
    Some(World {
        tenant,
        space,
        model: BTreeMap::new(),
        transfer: BTreeMap::new(),
        kept: Vec::new(),
        registered,
    })
}

fn nothing_is_left(tenant: &Tenant, space: &Space) {
    tenant.forget_leaves(space.id);
    tenant.store.reap();
    let stats = tenant.store.stats();
    assert_eq!((stats.objects, stats.stored_pages), (0, 0), "{stats:?}");
    assert_eq!(tenant.account.resident_pages(), 0);
    assert_eq!(tenant.kept_pages(), 0);
    assert_eq!(tenant.headroom_pages(), HEADROOM_PAGES);
    assert_eq!(tenant.map.leaf_count(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pages_are_where_the_model_says(steps in prop::collection::vec(step(), 1..60)) {
        let Some(mut world) = world() else { return Ok(()) };
        for (at, &step) in steps.iter().enumerate() {
            world.take(step);
            if at % 8 == 7 {
                world.check();
            }
        }
        world.check();
        world.settle();
        world.check();
        nothing_is_left(&world.tenant, &world.space);
    }
}

#[test]
fn messages_acted_on_before_a_death_are_not_acted_on_again() {
    let Some(mut world) = world() else { return };
    world.take(Step::Write { page: 1, content: 5 });
    world.take(Step::Leave { page: 1 });
    world.take(Step::Settle);
    // One read returned all three. A handle that names nothing makes the third
    // a panic: the ring and the page map are then what a dead worker leaves.
    let trap = 5;
    world.take(Step::Write { page: trap, content: 1 });
    let id = lock(&world.space.gate).object.page(address(trap)).expect("a leaf");
    world.tenant.overwrite(id, world.tenant.map.get(id), Entry::Stored(Handle(12345)));
    let (source, target) = (address(1), address(600));
    let messages = [
        Message::Unmap { start: target, end: target + PAGE },
        Message::Remap { from: source, to: target, len: PAGE },
        Message::Unmap { start: address(trap), end: address(trap + 1) },
    ];
    testing::fill_ring(&world.tenant, &world.space, &messages);
    let act = || {
        let mut gate = lock(&world.space.gate);
        world.space.act_on_ring(&world.tenant, &mut gate, RING_MESSAGES, &mut Vec::new());
    };
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
    assert!(died.is_err(), "the trap did not close");
    act();
    world.discard(trap, 1, true);
    world.remap(1, 600, 1);
    world.check();
}

#[test]
fn a_forked_child_owns_its_own_references_whole_or_begun_again() {
    let Some(mut world) = world() else { return };
    for page in [0, 1, 511, 512] {
        world.take(Step::Write { page, content: 1 + (page % 5) as u8 });
        world.take(Step::Leave { page });
    }
    world.take(Step::Settle);
    world.take(Step::Write { page: 2, content: 6 });
    world.take(Step::Claim { page: 1 });
    world.take(Step::Remove { from: 3, count: 1, times: 1 });
    let tenant = Arc::clone(&world.tenant);
    let handles = tenant.store.stats().stored_pages;
    assert_eq!(handles, 4);
    let Some(child_uffd) = testing::userfaultfd() else { return };
    let fd = testing::raw(child_uffd);
    // A worker died over the same message: the child's slot was being built,
    // and one leaf of it was there.
    let begun = tenant.registry.add_space(tenant.id, Some(fd)).expect("room");
    let leaf = tenant.map.take(begun, 77).expect("room");
    tenant.map.set(strata_units::PageId::new(leaf, 5), Entry::Resident { shared: true });
    world.act(&[Message::Fork { fd }], 2);
    let children: Vec<_> = tenant
        .registry
        .spaces_of(tenant.id)
        .into_iter()
        .filter(|&id| id != world.space.id)
        .collect();
    let [child] = children[..] else { panic!("one child, not {children:?}") };
    assert!(tenant.registry.space_is_live(child));
    assert_eq!(tenant.registry.space_fd(child, SpaceField::Uffd), Some(fd));
    let child = tenant.space(child).expect("adopted");
    assert_eq!(tenant.store.stats().stored_pages, 2 * handles, "each owns its own");
    {
        let (parent_gate, child_gate) = (lock(&world.space.gate), lock(&child.gate));
        let pieces = |gate: &Gate| gate.object.leaves().map(|(piece, _)| piece).collect::<Vec<_>>();
        assert_eq!(pieces(&parent_gate), pieces(&child_gate));
        let owned = tenant.map.leaves().into_iter().filter(|&(_, owner, _)| owner == child.id);
        assert_eq!(
            owned.count(),
            child_gate.object.leaves().count(),
            "nothing of the first attempt"
        );
        assert_eq!(parent_gate.registered, child_gate.registered);
        for page in 0..PAGES {
            let entry = |gate: &Gate| {
                gate.object.page(address(page)).map_or(Entry::Untouched, |id| tenant.map.get(id))
            };
            assert_eq!(entry(&child_gate), entry(&parent_gate).inherited(), "page {page}");
        }
    }
    tenant.bury(&child);
    assert!(!tenant.forget_buried(usize::MAX));
    assert_eq!(tenant.store.stats().stored_pages, handles);
    world.check();
    nothing_is_left(&tenant, &world.space);
}
