//! The keeper: one thread per tenant. It looks at what the tenant costs, asks
//! the policy what to do about it, and does some of it; then it looks again.
//! Evicting runs ahead of demand: faults are served from what it keeps free.

mod act;
mod advising;
mod alarm;
mod contents;
mod evicting;
mod exchange;
mod exhausted;
mod guards;
mod hints;
mod idle;
mod idle_watch;
mod merged;
mod node;
mod observe;
mod records;
mod release;
mod sensed;
mod spread;
mod start;
mod taking;
mod thrashing;
mod time;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_policy::Replacement;
use strata_policy::budget::{self};
use strata_sys::thread_time;
use strata_units::wire::BATCH_PAGES;
use strata_units::{PAGE, PageId, SpaceId};

use advising::Advising;
pub use alarm::start_alarms;
use idle::{NextLook, State};
use spread::Spread;

use crate::capture::pace::{Machine, Pace};
use crate::evict::Evictor;
use crate::keeper::hints::Hinted;
use crate::map::counters::Counter;
use crate::map::lock;
use crate::regions::registration::{register_new, settle_shared};
use crate::snapshot::{Capturing, Torn};
use crate::tenant::Tenant;
use crate::tenant::excluded::Excluded;
use crate::tenant::orders::{Order, SnapshotError};
use crate::tenant::space::Space;
use crate::tenant::usage::measure;

/// Pages evicted between two looks: a few milliseconds of work.
const PAGES_PER_ROUND: usize = 2 * BATCH_PAGES;
/// Memory maps are read again at least this often under pressure...
const REGISTER_EVERY: Duration = Duration::from_millis(250);
/// ...but where there are very many mappings, for no more than a part of the time.
const REGISTER_PART: u32 = 10;
/// ...and at once when so much memory has come that is not managed.
const REGISTER_AT_BYTES: u64 = 1 << 20;
/// How often inherited pages are looked at: a page that the parent evicts costs
/// as much as before until its children evict it too. Never more than a part of
/// the time.
const SETTLE_SHARED_EVERY: Duration = Duration::from_millis(20);
const SETTLE_SHARED_PART: u32 = 5;
/// After so many rounds in which nothing came in the keeper looks no more often
/// than this: what is new and not registered grows by some MiB in the meantime.
const QUIET_ROUNDS: u32 = 50;
const QUIET_LOOK: Duration = Duration::from_millis(4);
/// Looks at a managed tenant that find nothing to do take one part in so many of a
/// processor, as long as none is due later than this: who takes the last of its headroom
/// wakes its keeper.
const LOOK_PART: u32 = 64;
const SELDOM_LOOK: Duration = Duration::from_millis(50);
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

/// What a round brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct RoundOutcome {
    /// Pages that left the address spaces.
    evicted_pages: usize,
    /// Merged pages that were found among those that were to leave: chosen no more.
    set_aside_pages: usize,
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
    merged: merged::MergedPages,
    registered_at: Instant,
    registering_took: Duration,
    unmanaged_when_registered: u64,
    settled_shared: Instant,
    guards: guards::Guards,
    settle_shared_every: Duration,
    swept_leaf: usize,
    /// The policy's time then.
    swept_at: u32,
    evicting: bool,
    told: time::Told,
    spread: Spread,
    evicted_last: Instant,
    resident_before: u64,
    attended_when_registered: Vec<SpaceId>,
    time_before: u64,
    quiet_rounds: u32,
    over: Option<Over>,
    capturing: Option<Capturing>,
    torn: Option<Torn>,
    hinted: Hinted,
    machine: Machine,
    /// Of packing that nothing asks for.
    packing: Pace,
    /// What the tenant was like when it was looked at last.
    state: Option<State>,
    /// Looks that it has spared itself one after the other.
    left_out: u32,
    /// Rests that nothing has ended, one after the other.
    rests: u32,
    /// Set in one of them, for those that follow.
    alarm: Option<alarm::Alarm>,
    exchange: exchange::Exchange,
    /// Where there is one.
    node: Option<node::NodeKeeper>,
    /// It was registered for snapshots alone.
    stands_down: bool,
    snapshot_begun: Instant,
    /// As long as somebody wants advice.
    advising: Option<Advising>,
    /// It does little but wait for pages.
    thrashes: bool,
    /// Processor time of a look, as of late.
    look_took: Duration,
}

/// How it goes with a tenant that is over its budget.
#[derive(Clone, Copy, Debug)]
struct Over {
    since: Instant,
    rounds: u32,
    evicted_pages: usize,
    stuck: bool,
}

impl<'a> Keeper<'a> {
    fn new(tenant: &'a Arc<Tenant>) -> Self {
        let now = Instant::now();
        Self {
            tenant,
            replacement: Replacement::new(),
            evictor: Evictor::new(),
            excluded: BTreeMap::new(),
            pinned: Vec::new(),
            merged: merged::MergedPages::default(),
            registered_at: now,
            registering_took: Duration::ZERO,
            unmanaged_when_registered: 0,
            settled_shared: now,
            guards: guards::Guards::new(now),
            settle_shared_every: SETTLE_SHARED_EVERY,
            swept_leaf: 0,
            swept_at: 0,
            evicting: false,
            told: time::Told::default(),
            spread: Spread::new(),
            evicted_last: now,
            resident_before: 0,
            attended_when_registered: Vec::new(),
            time_before: 0,
            quiet_rounds: 0,
            over: None,
            capturing: None,
            torn: None,
            hinted: Hinted::default(),
            machine: Machine::new(),
            packing: Pace::default(),
            state: None,
            left_out: 0,
            rests: 0,
            alarm: None,
            exchange: exchange::Exchange::default(),
            node: node::NodeKeeper::of(tenant, now),
            stands_down: false,
            snapshot_begun: now,
            advising: None,
            thrashes: false,
            look_took: Duration::ZERO,
        }
    }
}

pub(crate) fn run(tenant: &Arc<Tenant>) {
    strata_sys::set_thread_name(&format!("keeper-{}", tenant.id));
    let mut keeper = Keeper::new(tenant);
    // An earlier worker may have died over a snapshot.
    for space in tenant.space_list() {
        space.unpark();
    }
    let mut next_look = NextLook::after(Duration::ZERO);
    loop {
        for order in keeper.wait(next_look) {
            match order {
                Order::Release(answer, progress) => {
                    keeper.empty_node();
                    let outcome = release::release(tenant, &mut keeper.evictor, &progress);
                    // The one who asked may have gone.
                    let _ = answer.send(outcome);
                }
                Order::Snapshot(order) => keeper.begin_snapshot(*order),
                Order::Fill(order) => keeper.fill(*order),
                Order::End => {
                    if let Some(capturing) = keeper.capturing.take() {
                        capturing.give_up(tenant, SnapshotError::Failed("it has ended".into()));
                    }
                    keeper.torn = None;
                    for space in tenant.space_list() {
                        tenant.bury(&space);
                    }
                    tenant.forget_buried(usize::MAX);
                    tenant.ended.store(true, Ordering::Release);
                    tenant.close_inbox();
                    tenant.forget_ready_but(&[]);
                    return;
                }
            }
        }
        next_look = keeper.round();
    }
}

impl Keeper<'_> {
    /// Looks and acts once; says when to look again.
    fn round(&mut self) -> NextLook {
        let tenant = self.tenant;
        let began = thread_time();
        self.note_state();
        self.take_arrivals();
        tenant.collect_ended();
        let spaces = self.living_spaces();
        let forgets = tenant.forget_some();
        tenant.count_share();
        let own = self.replacement.memory_bytes()
            + self.evictor.copies.memory_bytes()
            + self.merged.memory_bytes()
            + self.advising.as_ref().map_or(0, Advising::memory_bytes)
            + self.node.as_ref().map_or(0, node::NodeKeeper::memory_bytes);
        self.look_for_merged(&spaces);
        let usage = measure(tenant, own as u64);
        *lock(&tenant.usage) = usage;
        self.tell_time(&spaces);
        self.say_thrashing(&spaces, usage);
        if tenant.is_released() {
            tenant.account.set_may_exceed(true);
            return NextLook::after(if forgets { Duration::ZERO } else { REGISTER_EVERY });
        }
        let budget = tenant.budget_bytes();
        self.set_headroom(budget, usage);
        let node_rest = self.attend_node(&spaces);
        let seen = self.observe(budget, usage);
        let actions = budget::decide(&seen);
        let shares = spaces.iter().any(|space| space.has_shared.load(Ordering::Acquire));
        let was_managed = tenant.under_pressure.load(Ordering::Relaxed);
        if actions.register && !spaces.is_empty() {
            self.stands_down = false;
            tenant.under_pressure.store(true, Ordering::Relaxed);
        }
        let is_managed = tenant.under_pressure.load(Ordering::Relaxed);
        if is_managed {
            self.register_new_memory(&spaces, seen.unmanaged_bytes);
            self.look_for_guards(&spaces);
        }
        if is_managed || tenant.placement.registers.load(Ordering::Relaxed) {
            self.settle_shared(&spaces);
        }
        // Whoever made them, the advisor of a tenant far from its budget too: their
        // threads wait until they are fetched.
        for space in &spaces {
            if space.has_strays.load(Ordering::Acquire) {
                let report = self.evictor.fetch_strays(space, tenant);
                self.take_report(space, report);
            }
        }
        let spare = self.machine.has_spare();
        self.capture_on(spare);
        self.stand_down_if_due(&spaces);
        self.evictor.unpacked = act::pages_pass_unpacked(tenant);
        self.evictor.packs_at_once = self.evicting && !self.evictor.unpacked;
        self.evictor.horizon = self.exchange.horizon(tenant);
        let heeds = self.heed(&spaces);
        let progress = self.act(&actions, &spaces, spare);
        self.evicting = actions.evict_pages > 0;
        let patience = self.advise(&spaces, &seen);
        self.sweep();
        // Before memory is first registered nothing is known to be evictable.
        let exhausted = was_managed && self.is_stuck(&progress);
        tenant.account.set_may_exceed(exhausted);
        self.say_exhausted(exhausted, &actions, usage, budget);
        if progress.more || forgets {
            return NextLook::after(Duration::ZERO);
        }
        let next_look = Duration::from_micros(actions.next_look_us).min(node_rest);
        let next_look = if heeds { next_look.min(QUIET_LOOK) } else { next_look };
        if let Some(capturing) = &self.capturing {
            return NextLook::after(capturing.rest().min(next_look).min(patience));
        }
        let time = tenant.counters.get(Counter::PolicyTime);
        let quiet = time == self.time_before && was_managed && !shares;
        self.quiet_rounds = if quiet { self.quiet_rounds + 1 } else { 0 };
        self.time_before = time;
        let least = if self.quiet_rounds >= QUIET_ROUNDS { QUIET_LOOK } else { Duration::ZERO };
        self.look_took = (3 * self.look_took + thread_time().saturating_sub(began)) / 4;
        let affords = (self.look_took * LOOK_PART).min(SELDOM_LOOK);
        let least = if was_managed && !heeds && !shares { least.max(affords) } else { least };
        let after = next_look.max(least).min(patience);
        if heeds || shares || !self.may_rest(&actions, progress) {
            return NextLook::after(after);
        }
        // Also one that is looked at so seldom that a first rest would be shorter.
        let at_rest = self.longest_rest().max(2 * after).min(node_rest).min(patience);
        NextLook { after, at_rest: at_rest.max(after) }
    }

    /// Whether the tenant has been over its budget for a while and hardly
    /// anything left, until there is room again or things leave again.
    fn is_stuck(&mut self, progress: &RoundOutcome) -> bool {
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
        over.evicted_pages += progress.evicted_pages + progress.set_aside_pages + shrank_pages;
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

    /// The spaces whose processes live; the others are buried.
    fn living_spaces(&mut self) -> Vec<Arc<Space>> {
        let mut living = self.tenant.space_list();
        living.retain(|space| {
            let exited = space.agent().is_some_and(|agent| agent.process.has_exited());
            let alive = !exited && !space.is_gone() && space.uffd.is_alive();
            if !alive {
                self.tenant.bury(space);
                self.excluded.remove(&space.id.0);
            }
            alive
        });
        living
    }

    fn register_new_memory(&mut self, spaces: &[Arc<Space>], unmanaged_bytes: u64) {
        // Of one whose agent has just come, as of a restored process, nothing can be
        // evicted before its memory map was read.
        let attended: Vec<SpaceId> =
            spaces.iter().filter(|space| space.agent().is_some()).map(|space| space.id).collect();
        let due = self.registered_at.elapsed()
            >= REGISTER_EVERY.max(self.registering_took * REGISTER_PART)
            || attended != self.attended_when_registered
            || unmanaged_bytes > self.unmanaged_when_registered + REGISTER_AT_BYTES;
        if !due {
            return;
        }
        let began = Instant::now();
        for space in spaces {
            if !register_new(space, self.tenant) {
                space.set_gone();
            }
        }
        self.registered_at = Instant::now();
        self.registering_took = self.registered_at - began;
        self.attended_when_registered = attended;
        let managed = self.tenant.account.resident_pages().max(0) as u64 * PAGE;
        let usage = measure(self.tenant, 0);
        self.unmanaged_when_registered = usage.unmanaged_bytes(managed);
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
}
