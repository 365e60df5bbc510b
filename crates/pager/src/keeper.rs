//! The keeper: one thread per tenant. It looks at what the tenant costs, asks
//! the policy what to do about it, and does some of it; then it looks again.
//! Evicting runs ahead of demand: faults are served from what it keeps free.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use strata_policy::budget::{self, Actions, Observation, Packed};
use strata_policy::replacement::Standing;
use strata_policy::{Census, Pages, Replacement, gap};
use strata_store::StoreStats;
use strata_units::wire::BATCH_PAGES;
use strata_units::{ByteSize, PAGE_SIZE, PAGES_PER_LEAF, PageId};

use crate::copies::stored_page_cost;
use crate::counters::Counter;
use crate::entry::Entry;
use crate::evict::{BatchReport, Evictor, Stayed, level_of};
use crate::release;
use crate::scan::{Excluded, register_new, settle_shared, take_charge};
use crate::space::{Space, lock};
use crate::tenant::{Order, Tenant};
use crate::usage::{Usage, measure};

/// A handler that takes the last but so many pages of headroom wakes the keeper.
pub(crate) const WAKE_AT_PAGES: i64 = 512;
/// Pages evicted between two looks: a few milliseconds of work.
const PAGES_PER_ROUND: usize = 2 * BATCH_PAGES;
/// Pages settled, repacked or demoted between two looks.
const STORE_PAGES_PER_ROUND: usize = 512;
/// Pages packed densely in a round while the tenant evicts...
const REPACK_BESIDE_EVICTION: usize = 4;
/// ...which it does until so long after the last eviction.
const REPACK_AFTER: Duration = Duration::from_millis(100);
/// Moved to the file tier, at least, in a round over the budget.
const DEMOTE_WHEN_OVER_BYTES: u64 = 256 << 10;
/// Memory maps are read again at least this often under pressure...
const RESCAN_EVERY: Duration = Duration::from_millis(250);
/// ...and at once when so much memory has come that is not managed.
const RESCAN_AT_BYTES: u64 = 1 << 20;
/// How often inherited pages are looked at: a page that the parent evicts costs
/// as much as before until its children evict it too. Never more than a part of
/// the time.
const SETTLE_SHARED_EVERY: Duration = Duration::from_millis(20);
const SETTLE_SHARED_PART: u32 = 5;
/// After so many rounds in which nothing came in the keeper looks no more often
/// than this: what is new and not registered grows by some MiB in the meantime.
const QUIET_ROUNDS: u32 = 50;
const QUIET_LOOK: Duration = Duration::from_millis(4);
/// Most leaves whose estimates are swept a round.
const SWEEP_LEAVES: usize = 16;
/// Records of arrivals that are kept for a keeper that is held up.
pub(crate) const MOST_ARRIVALS: usize = 1 << 20;
/// A page that the kernel would not move is tried again after this.
const PINNED_FOR: Duration = Duration::from_secs(3);
/// A tenant over its budget from which fewer than so many pages left in this
/// time has nothing more to evict; its faults are served beyond the budget.
const STUCK_AFTER: Duration = Duration::from_millis(100);
const STUCK_BELOW_PAGES: usize = 256;
/// ...and in so many rounds.
const STUCK_ROUNDS: u32 = 8;
/// Unused parts of slots and slabs are put up with up to this part of what is
/// stored.
const SLACK_PART: u64 = 8;
/// Store memory given back a round by moving objects together.
const COMPACT_BYTES_PER_ROUND: u64 = 1 << 20;

const PAGE: u64 = PAGE_SIZE as u64;

impl Pages for Tenant {
    fn standing(&self, page: PageId) -> Standing {
        match self.map.get(page) {
            entry if entry.is_resident() => Standing::Evictable(level_of(self, page)),
            // On its way out and perhaps back: it is announced when it is.
            _ => Standing::Gone,
        }
    }
}

impl Tenant {
    pub(crate) fn census(&self) -> Census {
        let resident = self.resident_pages.load(Ordering::Relaxed).max(0) as usize;
        let stored = self.store.stats().stored_pages.saturating_sub(self.kept_pages());
        Census { managed: resident + stored as usize, resident }
    }
}

/// What a round brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Progress {
    /// Pages that left the address spaces.
    evicted_pages: usize,
    /// By how much the store became smaller.
    shrank_bytes: u64,
    /// There is more to do at once.
    more: bool,
}

struct Keeper<'a> {
    tenant: &'a Arc<Tenant>,
    replacement: Replacement,
    evictor: Evictor,
    excluded: BTreeMap<u32, Excluded>,
    /// Pages that the kernel refused, and when to try again.
    pinned: Vec<(Instant, PageId)>,
    scanned: Instant,
    unmanaged_at_scan: u64,
    settled_shared: Instant,
    settle_shared_every: Duration,
    swept_leaf: usize,
    /// The policy's time then.
    swept_at: u32,
    evicting: bool,
    evicted_last: Instant,
    resident_before: u64,
    spaces_at_scan: usize,
    time_before: u64,
    quiet_rounds: u32,
    over: Option<Over>,
    /// Trains a dictionary for the store.
    trainer: Option<JoinHandle<()>>,
}

/// How it goes with a tenant that is over its budget.
#[derive(Clone, Copy, Debug)]
struct Over {
    since: Instant,
    rounds: u32,
    evicted_pages: usize,
    stuck: bool,
}

pub(crate) fn run(tenant: &Arc<Tenant>) {
    strata_sys::set_thread_name(&format!("keeper-{}", tenant.id));
    let now = Instant::now();
    let mut keeper = Keeper {
        tenant,
        replacement: Replacement::new(),
        evictor: Evictor::new(),
        excluded: BTreeMap::new(),
        pinned: Vec::new(),
        scanned: now,
        unmanaged_at_scan: 0,
        settled_shared: now,
        settle_shared_every: SETTLE_SHARED_EVERY,
        swept_leaf: 0,
        swept_at: 0,
        evicting: false,
        evicted_last: now,
        resident_before: 0,
        spaces_at_scan: 0,
        time_before: 0,
        quiet_rounds: 0,
        over: None,
        trainer: None,
    };
    let mut next_look = Duration::ZERO;
    loop {
        for order in wait_for_orders(tenant, next_look) {
            match order {
                Order::Release(answer, progress) => {
                    let outcome = release::release(tenant, &mut keeper.evictor, &progress);
                    // The one who asked may have gone.
                    let _ = answer.send(outcome);
                }
                Order::End => {
                    for space in tenant.space_list() {
                        tenant.bury(&space);
                    }
                    tenant.ended.store(true, Ordering::Release);
                    return;
                }
            }
        }
        next_look = keeper.round();
    }
}

/// What lz4 packed, and everything else in DRAM that is not staged (zstd, with a
/// dictionary or without, and pages that do not compress): what each was and
/// costs, unused parts of slots and slabs shared out in proportion.
fn packed(store: &StoreStats) -> (Packed, Packed) {
    let payload = store.payload_bytes - store.staged_bytes.min(store.payload_bytes);
    let cost = store.dram_bytes.saturating_sub(store.staged_bytes);
    let fast_cost = (u128::from(cost) * u128::from(store.fast_payload_bytes)
        / u128::from(payload.max(1))) as u64;
    let fast_cost = fast_cost.min(cost);
    let in_dram = store.objects * PAGE;
    let rest = in_dram.saturating_sub(store.fast_original_bytes + store.staged_bytes);
    let fast = Packed { original_bytes: store.fast_original_bytes, cost_bytes: fast_cost };
    (fast, Packed { original_bytes: rest, cost_bytes: cost - fast_cost })
}

fn wait_for_orders(tenant: &Tenant, patience: Duration) -> Vec<Order> {
    let inbox = lock(&tenant.inbox);
    let (mut inbox, _) = tenant
        .inbox_filled
        .wait_timeout_while(inbox, patience, |inbox| !inbox.woken)
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    inbox.woken = false;
    std::mem::take(&mut inbox.orders)
}

impl Keeper<'_> {
    /// Looks and acts once; says when to look again at the latest.
    fn round(&mut self) -> Duration {
        let tenant = self.tenant;
        self.take_arrivals();
        let spaces = self.living_spaces();
        let own = self.replacement.memory_bytes() + self.evictor.copies.memory_bytes();
        let usage = measure(tenant, own as u64);
        *lock(&tenant.usage) = usage;
        if tenant.is_released() {
            tenant.may_exceed.store(true, Ordering::Relaxed);
            return RESCAN_EVERY;
        }
        let budget = tenant.budget_bytes();
        self.set_headroom(budget, usage);
        let seen = self.observe(budget, usage);
        let actions = budget::decide(&seen);
        let shares = spaces.iter().any(|space| space.has_shared.load(Ordering::Acquire));
        let was_managed = tenant.under_pressure.load(Ordering::Relaxed);
        if actions.register && !spaces.is_empty() {
            tenant.under_pressure.store(true, Ordering::Relaxed);
        }
        if tenant.under_pressure.load(Ordering::Relaxed) {
            self.rescan(&spaces, seen.unmanaged_bytes);
            self.settle_shared(&spaces);
            for space in &spaces {
                let strays = space.has_strays.load(Ordering::Acquire)
                    && !space.is_heir.load(Ordering::Acquire);
                if strays {
                    let report = self.evictor.fetch_strays(space, tenant);
                    self.take_report(space, report);
                }
            }
        }
        self.evictor.in_a_hurry = self.evicting;
        let progress = self.act(&actions, &spaces);
        self.evicting = actions.evict_pages > 0;
        self.sweep();
        // Before the first scan nothing is known to be evictable.
        let exhausted = was_managed && self.is_stuck(&progress);
        self.say_exhausted(exhausted, &actions, usage, budget);
        if progress.more {
            return Duration::ZERO;
        }
        let time = tenant.counters.get(Counter::PolicyTime);
        let quiet = time == self.time_before && was_managed && !shares;
        self.quiet_rounds = if quiet { self.quiet_rounds + 1 } else { 0 };
        self.time_before = time;
        let least = if self.quiet_rounds >= QUIET_ROUNDS { QUIET_LOOK } else { Duration::ZERO };
        Duration::from_micros(actions.next_look_us).max(least)
    }

    /// Whether the tenant has been over its budget for a while and hardly
    /// anything left, until there is room again or things leave again.
    fn is_stuck(&mut self, progress: &Progress) -> bool {
        if self.tenant.headroom_pages() > 0 {
            self.over = None;
            return false;
        }
        let over = self.over.get_or_insert_with(|| Over {
            since: Instant::now(),
            rounds: 0,
            evicted_pages: 0,
            stuck: false,
        });
        let shrank_pages = (progress.shrank_bytes / PAGE) as usize;
        over.evicted_pages += progress.evicted_pages + shrank_pages;
        over.rounds += 1;
        // A keeper or an agent that gets no CPU is slow, not stuck.
        if over.since.elapsed() >= STUCK_AFTER && over.rounds >= STUCK_ROUNDS {
            over.stuck = over.evicted_pages < STUCK_BELOW_PAGES;
            over.since = Instant::now();
            over.rounds = 0;
            over.evicted_pages = 0;
        }
        over.stuck
    }

    fn take_arrivals(&mut self) {
        let arrivals = std::mem::take(&mut *lock(&self.tenant.arrivals));
        let now = self.tenant.counters.get(Counter::PolicyTime) as u32;
        let lost = arrivals.len() >= MOST_ARRIVALS;
        for page in arrivals {
            self.replacement.arrived(page, now);
        }
        // After the arrivals: of what the policy knows, all copies are known.
        self.evictor.copies.take_arrivals(self.tenant);
        let due = Instant::now();
        let mut still = Vec::new();
        for (when, page) in self.pinned.drain(..) {
            if when <= due {
                self.replacement.refused(page, now);
            } else {
                still.push((when, page));
            }
        }
        self.pinned = still;
        if lost {
            self.rebuild();
        }
    }

    /// Fills the queues from the page map: records were lost.
    fn rebuild(&mut self) {
        let tenant = self.tenant;
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        let resident = tenant.map.leaves().into_iter().flat_map(|(leaf, _, _)| {
            (0..PAGES_PER_LEAF)
                .map(move |index| PageId::new(leaf, index))
                .filter(|&page| tenant.map.get(page).is_resident())
                .map(|page| (page, level_of(tenant, page)))
        });
        self.replacement.rebuild(resident, now);
    }

    /// The spaces whose processes live; the others are buried.
    fn living_spaces(&mut self) -> Vec<Arc<Space>> {
        let mut living = self.tenant.space_list();
        living.retain(|space| {
            let exited = space.agent().is_some_and(|agent| agent.pidfd.has_exited());
            let alive = !exited && !space.is_gone() && space.uffd.is_alive();
            if !alive {
                self.tenant.bury(space);
                self.excluded.remove(&space.id.0);
            }
            alive
        });
        living
    }

    fn set_headroom(&self, budget: u64, usage: Usage) {
        let hard = budget + budget::tolerance_bytes(budget) / 4;
        let pages = (hard as i64 - usage.total_bytes() as i64) / PAGE as i64;
        self.tenant.headroom_pages.store(pages, Ordering::Relaxed);
    }

    fn observe(&mut self, budget_bytes: u64, usage: Usage) -> Observation {
        let tenant = self.tenant;
        let store = tenant.store.stats();
        let managed = tenant.resident_pages.load(Ordering::Relaxed).max(0) as u64 * PAGE;
        let in_space = managed.min(usage.anonymous_bytes);
        let pinned = self.pinned.len() as u64 * PAGE;
        let resident_bytes = in_space + store.staged_bytes;
        let growth_bytes = resident_bytes.saturating_sub(self.resident_before);
        self.resident_before = resident_bytes;
        let (fast, dense) = packed(&store);
        Observation {
            budget_bytes,
            resident_bytes,
            evictable_bytes: in_space.saturating_sub(pinned),
            staged_bytes: store.staged_bytes,
            fast,
            dense,
            lands_dense: store.lands_dense,
            kept_unchanged_percent: self.evictor.copies.unchanged_percent(),
            kept_cost_bytes: tenant.kept_pages() * stored_page_cost(&store),
            metadata_bytes: usage.metadata_bytes,
            unmanaged_bytes: usage.anonymous_bytes - in_space,
            growth_bytes,
            file_room_bytes: tenant
                .record
                .tier
                .as_ref()
                .map(|(_, limit)| limit.saturating_sub(store.file_bytes)),
            evicting: self.evicting,
        }
    }

    fn rescan(&mut self, spaces: &[Arc<Space>], unmanaged_bytes: u64) {
        let due = self.scanned.elapsed() >= RESCAN_EVERY
            || spaces.len() != self.spaces_at_scan
            || unmanaged_bytes > self.unmanaged_at_scan + RESCAN_AT_BYTES;
        if !due {
            return;
        }
        for space in spaces {
            if !register_new(space, self.tenant) {
                space.set_gone();
            }
        }
        self.scanned = Instant::now();
        self.spaces_at_scan = spaces.len();
        let managed = self.tenant.resident_pages.load(Ordering::Relaxed).max(0) as u64 * PAGE;
        let usage = measure(self.tenant, 0);
        self.unmanaged_at_scan = usage.anonymous_bytes.saturating_sub(managed);
    }

    fn settle_shared(&mut self, spaces: &[Arc<Space>]) {
        if self.settled_shared.elapsed() < self.settle_shared_every {
            return;
        }
        let began = Instant::now();
        for space in spaces {
            if space.has_shared.load(Ordering::Acquire) {
                settle_shared(space, self.tenant);
            }
        }
        self.settled_shared = Instant::now();
        self.settle_shared_every = SETTLE_SHARED_EVERY.max(began.elapsed() * SETTLE_SHARED_PART);
    }

    /// Does some of what the policy asks for.
    fn act(&mut self, actions: &Actions, spaces: &[Arc<Space>]) -> Progress {
        let tenant = self.tenant;
        let before = tenant.store.stats();
        tenant.keep_copies.store(actions.keep_copies, Ordering::Relaxed);
        if actions.drop_kept_bytes > 0 {
            self.evictor.copies.drop_oldest(tenant, actions.drop_kept_bytes);
        }
        if tenant.store.wants_dictionary() {
            self.train_dictionary();
        }
        tenant.store.reap();
        let settle = (actions.settle_pages as usize).min(STORE_PAGES_PER_ROUND);
        let mut freed_pages = tenant.store.settle(settle);
        let mut evicted_pages = 0;
        let evict = (actions.evict_pages as usize).min(PAGES_PER_ROUND);
        if evict > 0 {
            evicted_pages = self.evict(evict, spaces);
            freed_pages += evicted_pages;
        }
        // Dense packing costs more than an eviction and makes the next fault
        // slower: a little of it while pages come and go, unless nothing else
        // brings the tenant under its budget.
        let over = tenant.headroom_pages() <= 0;
        if evicted_pages > 0 {
            self.evicted_last = Instant::now();
        }
        let idle = self.evicted_last.elapsed() >= REPACK_AFTER;
        // Where what is stored takes most of the budget, there is no other way.
        let stored = before.dram_bytes.saturating_sub(before.staged_bytes);
        let crowded = stored > tenant.budget_bytes() / 2;
        let most = if over || idle || crowded {
            STORE_PAGES_PER_ROUND / 2
        } else {
            REPACK_BESIDE_EVICTION
        };
        let repack = (actions.repack_pages as usize).min(most);
        tenant.store.repack(repack);
        // What dense packing was guessed to bring may not come.
        let least = if over && tenant.record.tier.is_some() { DEMOTE_WHEN_OVER_BYTES } else { 0 };
        let demote_bytes = actions.demote_bytes.max(least);
        if demote_bytes > 0 {
            let pages = (demote_bytes / 1024) as usize + 1;
            freed_pages += tenant.store.demote(pages.min(STORE_PAGES_PER_ROUND / 2));
        }
        // Slots that pages left behind become memory again.
        let after = tenant.store.stats();
        let cost = after.dram_bytes.saturating_sub(after.staged_bytes);
        let payload = after.payload_bytes.saturating_sub(after.staged_bytes);
        if cost > payload + payload / SLACK_PART + COMPACT_BYTES_PER_ROUND {
            tenant.store.compact(COMPACT_BYTES_PER_ROUND);
        }
        let shrank_bytes = before.dram_bytes.saturating_sub(tenant.store.stats().dram_bytes);
        Progress {
            evicted_pages,
            shrank_bytes,
            more: freed_pages > 0 || (shrank_bytes > 0 && repack > 0),
        }
    }

    /// Has a dictionary trained, if one pays, by a thread of its own: it takes a
    /// tenth of a second, and the budget does not wait that long.
    fn train_dictionary(&mut self) {
        if self.trainer.as_ref().is_some_and(|trainer| !trainer.is_finished()) {
            return;
        }
        let tenant = Arc::clone(self.tenant);
        let started =
            std::thread::Builder::new().name(format!("trainer-{}", tenant.id)).spawn(move || {
                strata_sys::set_thread_name(&format!("trainer-{}", tenant.id));
                strata_sys::yield_to_others();
                let outcome = tenant.store.train_dictionary();
                // Training took megabytes that no budget counts.
                strata_sys::trim_heap();
                tenant.log(&outcome.to_string());
            });
        // Without it pages are packed as they were; the store asks again.
        self.trainer = started.ok();
    }

    fn evict(&mut self, want: usize, spaces: &[Arc<Space>]) -> usize {
        let tenant = self.tenant;
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        let census = tenant.census();
        let mut victims = Vec::with_capacity(want);
        self.replacement.maintain(census, tenant.as_ref());
        self.replacement.victims(now, want, census, tenant.as_ref(), &mut victims);
        if victims.len() < want / 2 && census.resident > victims.len() + 4096 {
            self.rebuild();
        }
        let mut by_space: BTreeMap<u32, Vec<PageId>> = BTreeMap::new();
        for page in victims {
            if let Some((space, _)) = tenant.map.owner(page.leaf()) {
                by_space.entry(space.0).or_default().push(page);
            }
        }
        let mut evicted = 0;
        for (id, mut pages) in by_space {
            // Neighbours side by side: the agent moves them together.
            pages.sort_unstable();
            let Some(space) = spaces.iter().find(|space| space.id.0 == id) else { continue };
            for batch in pages.chunks(BATCH_PAGES) {
                let Some(agent) = space.agent() else {
                    self.give_back(batch);
                    continue;
                };
                let control = agent.control.control();
                let excluded = self.excluded.entry(id).or_default();
                if excluded.is_stale(control) {
                    *excluded = Excluded::read(control);
                }
                match self.evictor.evict(space, tenant, excluded, batch) {
                    Some(report) => {
                        evicted += report.evicted;
                        let left = self.take_report(space, report);
                        evicted += self.evict_relatives(space, &left, spaces);
                    }
                    None => self.give_back(batch),
                }
            }
        }
        evicted
    }

    /// A page that a fork shares costs as much as before until the last of the
    /// family has lost it: those who inherited what `space` just lost follow.
    fn evict_relatives(
        &mut self,
        space: &Arc<Space>,
        left: &[u64],
        spaces: &[Arc<Space>],
    ) -> usize {
        let mut evicted = 0;
        for relative in spaces {
            if relative.id == space.id || !relative.has_shared.load(Ordering::Acquire) {
                continue;
            }
            let pages = take_charge(relative, self.tenant, left);
            for batch in pages.chunks(BATCH_PAGES) {
                let Some(agent) = relative.agent() else { continue };
                let excluded = self.excluded.entry(relative.id.0).or_default();
                if excluded.is_stale(agent.control.control()) {
                    *excluded = Excluded::read(agent.control.control());
                }
                match self.evictor.evict(relative, self.tenant, excluded, batch) {
                    Some(report) => {
                        evicted += report.evicted;
                        self.take_report(relative, report);
                    }
                    None => self.give_back(batch),
                }
            }
        }
        evicted
    }

    fn give_back(&mut self, pages: &[PageId]) {
        let now = self.tenant.counters.get(Counter::PolicyTime) as u32;
        for &page in pages {
            self.replacement.refused(page, now);
        }
    }

    /// Sees to the pages that stayed. Returns the addresses of those that left.
    fn take_report(&mut self, space: &Arc<Space>, report: BatchReport) -> Vec<u64> {
        let mut left = report.left;
        let tenant = self.tenant;
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        let mut busy = Vec::new();
        for (page, address, stayed) in report.stayed {
            match stayed {
                Stayed::Cancelled | Stayed::Wanted => self.replacement.refused(page, now),
                Stayed::Busy => busy.push((page, address)),
                Stayed::Pinned | Stayed::StoreFull => {
                    self.pinned.push((Instant::now() + PINNED_FOR, page));
                }
            }
        }
        tenant.note(
            "store",
            report.store_error.map(|error| format!("pages cannot be stored, they stay: {error}")),
        );
        // Once shared by a fork, or pinned by I/O: after a write of its own a
        // page is the process's alone. Then once more; else a pause.
        for batch in busy.chunks(BATCH_PAGES) {
            let addresses: Vec<u64> = batch.iter().map(|&(_, address)| address).collect();
            let populated = self.evictor.populate(space, &addresses);
            let pages: Vec<PageId> = batch.iter().map(|&(page, _)| page).collect();
            let again = populated.then(|| {
                let excluded = self.excluded.entry(space.id.0).or_default();
                self.evictor.evict(space, tenant, excluded, &pages)
            });
            match again.flatten() {
                Some(second) => {
                    left.extend(second.left);
                    for (page, _, stayed) in second.stayed {
                        if matches!(stayed, Stayed::Cancelled | Stayed::Wanted) {
                            self.replacement.refused(page, now);
                        } else {
                            self.pinned.push((Instant::now() + PINNED_FOR, page));
                        }
                    }
                }
                None => self.give_back(&pages),
            }
        }
        left
    }

    /// Raises the estimates of pages that stay out for long.
    fn sweep(&mut self) {
        let tenant = self.tenant;
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        // The whole map in as many arrivals as it has pages.
        let due = now.wrapping_sub(self.swept_at) as usize / PAGES_PER_LEAF;
        if due == 0 {
            return;
        }
        let rest = now.wrapping_sub(self.swept_at) % PAGES_PER_LEAF as u32;
        self.swept_at = now.wrapping_sub(rest);
        let count = due.min(SWEEP_LEAVES);
        let Some(leaves) = tenant.map.leaf_range(self.swept_leaf, count) else {
            self.swept_leaf = 0;
            return;
        };
        self.swept_leaf += count;
        for leaf in leaves {
            for index in 0..PAGES_PER_LEAF {
                let page = PageId::new(leaf, index);
                if matches!(tenant.map.get(page), Entry::Stored(_)) {
                    let age = tenant.map.age(page);
                    let cell = age.load(Ordering::Relaxed);
                    let swept = gap::swept(cell, now);
                    if swept != cell {
                        // A fault that comes first wins.
                        let _ =
                            age.compare_exchange(cell, swept, Ordering::Relaxed, Ordering::Relaxed);
                    }
                }
            }
        }
    }

    fn say_exhausted(&self, exhausted: bool, actions: &Actions, usage: Usage, budget: u64) {
        let tenant = self.tenant;
        tenant.may_exceed.store(exhausted, Ordering::Relaxed);
        let text = exhausted.then(|| {
            format!(
                "over its budget: costs {}, may cost {}, and nothing more can leave DRAM ({} short); raise the budget, or give it a file tier",
                ByteSize(usage.total_bytes()),
                ByteSize(budget),
                ByteSize(actions.cannot_by_bytes.max(usage.total_bytes().saturating_sub(budget))),
            )
        });
        tenant.note("exhausted", text);
    }
}
