//! What the keeper does with the node: pages that the policy gives up go there while
//! there is room, those that stay cold there go on to the store, and those that are
//! found hot come back.
//!
//! Strata does not see the uses of a page that is in place. The kernel does: what DAMON
//! saw, where it is to be had, is judged in `sensed.rs`. Everywhere, of every 2 MiB on
//! the node one page every few seconds is evicted as a *probe*: it is staged, and if
//! somebody asks for it soon, it is in DRAM by that fault, and its neighbours on the
//! node follow in place, as far as there is room under the budget. A probe for which
//! nobody asks goes on to compressed memory: what is cold on the node does.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_store::StoreStats;
use strata_units::wire::BATCH_PAGES;
use strata_units::{LeafIndex, PAGE, PAGES_PER_LEAF, PageId, SpaceId};

use super::Keeper;
use super::observe::file_room_bytes;
use super::sensed::Sensed;
use crate::map::address::{EVERYTHING, ids_in};
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::node::{Kernel, MOVED_AT_ONCE, NodeTier};
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// How often the node is attended to.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// In so many looks each leaf is probed once...
const PROBE_LOOKS: usize = 50;
/// ...or, while all of the node is watched, in so many...
const PROBE_LOOKS_WATCHED: usize = 200;
/// ...of which no look takes more than so many.
const MOST_PROBES: usize = 64;
/// A probe that is back within this time was warm.
const WARM: Duration = Duration::from_secs(5);
/// Neighbours of a probe that is back: the policy judges as many together.
const GROUP_PAGES: usize = 64;
/// In so many looks each leaf's pages are looked for once...
const SURVEY_LOOKS: usize = 100;
/// ...in no look those of more than so many: all of a tenant of 16 GiB within a few
/// minutes.
const SURVEYED_LEAVES: usize = 4;
/// Leaves that are searched for pages to probe or to evict in a look or a round.
const SEARCHED_LEAVES: usize = 256;
/// Pages waiting to be brought back, at most.
const MOST_WANTED: usize = 4096;
/// Batches that are looked for once more in a look.
const LOOKED_AGAIN: usize = 16;
/// With room for fewer pages, cold ones leave the node for the store.
const CROWDED_PAGES: u64 = 1024;
/// ...and with less than this part of the limit.
const CROWDED_PART: u64 = 16;
/// What stays free under the budget when pages are brought back that nobody asked for.
const SPARE_PART: u64 = 64;

/// See the module's text.
pub(super) struct NodeKeeper {
    pub(super) tier: NodeTier,
    looked: Instant,
    surveyed: usize,
    searched: usize,
    probed: usize,
    /// Number of the look: which page of a leaf is the next probe.
    looks: usize,
    probes: BTreeMap<PageId, Instant>,
    /// Neighbours of probes that came back.
    warm: VecDeque<PageId>,
    /// Pages that programs said to be hot.
    asked: VecDeque<PageId>,
    /// What was seen to be used.
    pub(super) sensed: Sensed,
}

impl NodeKeeper {
    pub(super) fn of(tenant: &Tenant, now: Instant) -> Option<Self> {
        let spec = tenant.record.node?;
        Some(Self {
            tier: NodeTier::new(spec, Box::new(Kernel), now),
            looked: now.checked_sub(LOOK_EVERY).unwrap_or(now),
            surveyed: 0,
            searched: 0,
            probed: 0,
            looks: 0,
            probes: BTreeMap::new(),
            warm: VecDeque::new(),
            asked: VecDeque::new(),
            sensed: Sensed::default(),
        })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.tier.memory_bytes()
            + (self.warm.capacity() + self.asked.capacity()) * size_of::<PageId>()
            + self.sensed.memory_bytes()
    }

    /// A page came back to DRAM by a fault: a probe?
    pub(super) fn returned(&mut self, page: PageId) {
        let Some(out) = self.probes.remove(&page) else { return };
        if out.elapsed() >= WARM {
            return;
        }
        let first = page.index() / GROUP_PAGES * GROUP_PAGES;
        let room = MOST_WANTED.saturating_sub(self.warm.len());
        let group = (first..first + GROUP_PAGES).map(|index| PageId::new(page.leaf(), index));
        self.warm.extend(group.take(room));
    }

    /// A program says that these are hot, or has pinned them. False: later, others
    /// come first.
    pub(super) fn ask(&mut self, pages: &[PageId]) -> bool {
        let fits = self.asked.len() + pages.len() <= MOST_WANTED;
        if fits {
            self.asked.extend(pages);
        }
        fits
    }
}

impl Keeper<'_> {
    /// What may go to the node now: nothing before its turn in the tenant's order.
    pub(super) fn node_room_bytes(&self, store: &StoreStats) -> u64 {
        let tenant = self.tenant;
        // What is being captured for a snapshot stays where it is until it is whole.
        let Some(node) = self.node.as_ref().filter(|_| self.capturing.is_none()) else { return 0 };
        let stored = store.dram_bytes.saturating_sub(store.staged_bytes);
        let file = file_room_bytes(&tenant.record, store);
        match tenant.record.tier_order.is_nodes_turn(tenant.budget_bytes(), stored, file) {
            true => node.tier.room_pages(tenant) * PAGE,
            false => 0,
        }
    }

    /// Moves those of `victims` to the node for which there is room; returns how many
    /// went, and the others.
    pub(super) fn demote(
        &mut self,
        victims: Vec<PageId>,
        spaces: &[Arc<Space>],
    ) -> (usize, Vec<PageId>) {
        let tenant = self.tenant;
        let Some(node) = &mut self.node else { return (0, victims) };
        node.sensed.gave_up(&victims, Instant::now());
        let room = self.node_room_bytes(&tenant.store_stats());
        let Some(node) = self.node.as_mut().filter(|_| room > 0) else { return (0, victims) };
        let now = Instant::now();
        let mut went = 0;
        let mut others = Vec::new();
        for (space, pages) in by_space(tenant, victims, spaces) {
            let stay = node.tier.demote(tenant, space, &pages, now);
            went += pages.len() - stay.len();
            others.extend(stay);
        }
        (went, others)
    }

    /// Moves what a program wants there to the node; what finds no room stays.
    pub(super) fn send_to_node(&mut self, space: &Arc<Space>, pages: &[PageId]) {
        if self.capturing.is_none()
            && let Some(node) = &mut self.node
        {
            node.tier.demote(self.tenant, space, pages, Instant::now());
        }
    }

    /// Makes room on a crowded node: its pages go on to the store, one part of the
    /// page map after the other.
    pub(super) fn relieve_node(&mut self, spaces: &[Arc<Space>]) -> usize {
        let tenant = self.tenant;
        let Some(node) = self.node.as_mut().filter(|_| self.capturing.is_none()) else { return 0 };
        let enough = CROWDED_PAGES.min(node.tier.spec.limit_bytes / PAGE / CROWDED_PART);
        let record = &tenant.record;
        if node.tier.space_pages(tenant) >= enough
            || tenant.node_pages() == 0
            || !record.tier_order.leaves_the_node(record.tier.is_some())
        {
            return 0;
        }
        let mut pages = Vec::new();
        for _ in 0..SEARCHED_LEAVES {
            let Some(leaf) = next_leaf(tenant, &mut node.searched) else { continue };
            pages.extend(on_node(tenant, leaf));
            if pages.len() >= BATCH_PAGES {
                break;
            }
        }
        self.evict_from_node(pages, spaces)
    }

    fn evict_from_node(&mut self, pages: Vec<PageId>, spaces: &[Arc<Space>]) -> usize {
        let evicted = self.evict_pages(pages, spaces);
        self.tenant.counters.add(Counter::NodeEvictions, evicted as u64);
        evicted
    }

    /// Looks after the node, if it is time; how long nothing is to be done.
    pub(super) fn attend_node(&mut self, spaces: &[Arc<Space>]) -> Duration {
        let tenant = self.tenant;
        let Some(node) = &mut self.node else { return Duration::MAX };
        let now = Instant::now();
        if now.duration_since(node.looked) < LOOK_EVERY {
            return if tenant.node_pages() > 0 { LOOK_EVERY } else { Duration::MAX };
        }
        node.looked = now;
        node.tier.look(tenant, now);
        if self.capturing.is_some() {
            return LOOK_EVERY;
        }
        for _ in 0..LOOKED_AGAIN {
            if !node.tier.look_again(tenant, now) {
                break;
            }
        }
        let leaves = (tenant.leaf_count() as usize).div_ceil(SURVEY_LOOKS);
        for _ in 0..leaves.min(SURVEYED_LEAVES) {
            let Some(leaf) = next_leaf(tenant, &mut node.surveyed) else { continue };
            let pages: Vec<PageId> = leaf.pages().collect();
            for (space, pages) in by_space(tenant, pages, spaces) {
                node.tier.verify(tenant, space, &pages, now);
            }
        }
        node.probes.retain(|_, out| now.duration_since(*out) < WARM);
        let asked = std::mem::take(&mut node.asked);
        let mut warm = std::mem::take(&mut node.warm);
        warm.retain(|&page| !tenant.is_for_node(page));
        let most = (tenant.headroom_pages() / 2).max(0) as usize;
        let (_, later) = self.bring_back(asked.into(), most, spaces);
        if let Some(node) = &mut self.node {
            node.asked.extend(later);
        }
        let spare = (tenant.budget_bytes() / SPARE_PART / PAGE) as i64;
        let most = (tenant.headroom_pages() - spare).max(0) as usize;
        let (came, _) = self.bring_back(warm.into(), most, spaces);
        self.judge_sight(spaces);
        self.bring_sensed(most - came.min(most), spaces);
        self.probe(spaces);
        if tenant.node_pages() > 0 { LOOK_EVERY } else { Duration::MAX }
    }

    /// Brings up to `most` of `pages` back in place; returns how many came, and those for
    /// which there is no room now.
    pub(super) fn bring_back(
        &mut self,
        mut pages: Vec<PageId>,
        most: usize,
        spaces: &[Arc<Space>],
    ) -> (usize, Vec<PageId>) {
        let tenant = self.tenant;
        let Some(node) = &mut self.node else { return (0, Vec::new()) };
        pages.retain(|&page| tenant.map.get(page) == Entry::OnNode);
        pages.sort_unstable();
        pages.dedup();
        let later = pages.split_off(most.min(node.tier.affordable_pages()).min(pages.len()));
        let now = Instant::now();
        let mut came = 0;
        for (space, pages) in by_space(tenant, pages, spaces) {
            came += node.tier.promote(tenant, space, &pages, now);
        }
        (came, later)
    }

    /// Evicts a page here and there from the node, to see whether somebody wants it.
    fn probe(&mut self, spaces: &[Arc<Space>]) {
        let tenant = self.tenant;
        let Some(node) = self.node.as_mut().filter(|_| tenant.node_pages() > 0) else { return };
        let all_is_seen = node.sensed.sees_all(node.looked);
        let looks = if all_is_seen { PROBE_LOOKS_WATCHED } else { PROBE_LOOKS };
        let leaves = (tenant.leaf_count() as usize).div_ceil(looks);
        node.looks = node.looks.wrapping_add(1);
        let mut probes = Vec::new();
        for _ in 0..leaves.min(SEARCHED_LEAVES) {
            let Some(leaf) = next_leaf(tenant, &mut node.probed) else { continue };
            let there: Vec<PageId> = on_node(tenant, leaf).collect();
            if !there.is_empty() && probes.len() < MOST_PROBES {
                // Any of them, another one each time.
                let stride = node.looks.wrapping_mul(0x9e37_79b9) >> 7;
                let page = there[stride % there.len()];
                // What is wanted there need not be looked for.
                probes.extend(Some(page).filter(|&page| !tenant.is_for_node(page)));
            }
        }
        self.evict_from_node(probes.clone(), spaces);
        let Some(node) = &mut self.node else { return };
        let now = Instant::now();
        let out = |page: &PageId| matches!(tenant.map.get(*page), Entry::Stored(_));
        node.probes.extend(probes.into_iter().filter(out).map(|page| (page, now)));
    }

    /// Brings all of it back, as far as the machine has DRAM: the tenant is about to be
    /// released, and nobody else would.
    pub(super) fn empty_node(&mut self) {
        let tenant = self.tenant;
        let Some(node) = &mut self.node else { return };
        for space in tenant.space_list() {
            let pieces = lock(&space.gate).object.pages_in(EVERYTHING);
            for (_, leaf, part) in pieces {
                let pages: Vec<PageId> = ids_in(leaf, part).map(|(_, page)| page).collect();
                node.tier.empty(tenant, &space, &pages, Instant::now());
            }
        }
    }
}

fn on_node(tenant: &Tenant, leaf: LeafIndex) -> impl Iterator<Item = PageId> {
    leaf.pages().filter(|&page| tenant.map.get(page) == Entry::OnNode)
}

/// The next leaf of a walk around the page map. None: the walk begins anew, or there is
/// none of this tenant's here.
fn next_leaf(tenant: &Tenant, at: &mut usize) -> Option<LeafIndex> {
    let Some(leaves) = tenant.map.leaf_range(*at, 1) else {
        *at = 0;
        return None;
    };
    *at += 1;
    let registry = &tenant.registry;
    let own = |leaf| {
        tenant.map.owner(leaf).is_some_and(|(space, _)| registry.tenant_of(space) == tenant.id)
    };
    leaves.first().copied().filter(|&leaf| own(leaf))
}

/// Pages by the space that they belong to, neighbours side by side.
fn by_space<'a>(
    tenant: &Tenant,
    pages: Vec<PageId>,
    spaces: &'a [Arc<Space>],
) -> Vec<(&'a Arc<Space>, Vec<PageId>)> {
    let mut of: BTreeMap<SpaceId, Vec<PageId>> = BTreeMap::new();
    for page in pages {
        if let Some((space, _)) = tenant.map.owner(page.leaf()) {
            of.entry(space).or_default().push(page);
        }
    }
    let known = |id| spaces.iter().find(|space| space.id == id);
    of.into_iter()
        .filter_map(|(id, mut pages)| {
            pages.sort_unstable();
            Some((known(id)?, pages))
        })
        .collect()
}

const _: () = assert!(MOVED_AT_ONCE == PAGES_PER_LEAF, "a leaf is looked for in one call");
