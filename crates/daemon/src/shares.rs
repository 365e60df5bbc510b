//! The host's DRAM, shared out among the tenants once a second: what is seen of each is
//! gathered here, what each gets is decided in `strata_policy::shares`, and its keeper
//! obeys the budget as it does any other.
//!
//! Only where the configuration says how much DRAM there is (`dram`). A tenant takes part
//! when it has a claim (reserve, limit, weight); one that was given a budget and no claim
//! keeps that, and the others share what is left.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use strata_api::{DramClaim, TenantShare};
use strata_pager::{AdviceState, Claim, Demand, Tenant};
use strata_policy::advice::Point;
use strata_policy::room::{Machine, room_bytes};
use strata_policy::shares::{Past, Seen, Share, Why, share};
use strata_sys::{Priority, log};
use strata_units::ByteSize;

use crate::cgroup::Cgroups;
use crate::commands::LEAST_BUDGET;
use crate::current::Current;
use crate::guests::{Guests, Lack};
use crate::tenants::Tenants;

const EVERY: Duration = Duration::from_secs(1);
/// For so long tenants are watched after not all got what they wanted.
const WATCHED_FOR: Duration = Duration::from_secs(120);
/// Looking up a curve takes one part in so many of the time.
const CURVE_REST: u32 = 100;
/// So long the machine has what it is to share out before that is said.
const OVER_FOR: Duration = Duration::from_secs(60);
/// A weight of 1.
const THOUSANDTHS: f64 = 1000.0;

/// See the module's text.
pub(crate) struct Shares {
    current: Arc<Current>,
    tenants: Arc<Tenants>,
    guests: Arc<Guests>,
    last: Mutex<Last>,
    /// There is a thread that does.
    runs: AtomicBool,
}

/// What was shared out in the last second.
#[derive(Default)]
struct Last {
    tenants: Vec<TenantShare>,
    /// The machine has no more than this, which is less than it was to share out.
    room_bytes: Option<u64>,
}

/// Whose curve is looked up next, and when.
struct Turns {
    turn: usize,
    next: Instant,
}

/// Since when the machine has less than it is to share out, and when it had less last.
#[derive(Default)]
struct Shortage(Option<(Instant, Instant)>);

/// What is remembered of a tenant from second to second, by its token.
#[derive(Default)]
struct Remembered {
    past: Past,
    demand: Option<Demand>,
    /// What the advisor said when it was asked last.
    curve: Vec<Point>,
}

impl Shares {
    pub(crate) fn new(
        current: &Arc<Current>,
        tenants: &Arc<Tenants>,
        guests: &Arc<Guests>,
    ) -> Arc<Self> {
        let (current, tenants) = (Arc::clone(current), Arc::clone(tenants));
        let (guests, runs) = (Arc::clone(guests), AtomicBool::new(false));
        Arc::new(Self { current, tenants, guests, last: Mutex::default(), runs })
    }

    /// Shares out from now on, if there is something to be shared out.
    pub(crate) fn follow(self: &Arc<Self>) -> io::Result<()> {
        if self.runs.load(Ordering::Relaxed) || self.current.get().dram.is_none() {
            return Ok(());
        }
        let own = Arc::clone(self);
        let work = move || {
            let (mut remembered, mut shortage) = (HashMap::new(), Shortage::default());
            let mut looked = Instant::now();
            let mut turns = Turns { turn: 0, next: looked };
            loop {
                std::thread::sleep(EVERY);
                let seconds = looked.elapsed().as_secs_f64();
                looked = Instant::now();
                match own.current.get().dram {
                    Some(dram) => {
                        let room = own.look(dram.0, &mut remembered, &mut turns, seconds);
                        shortage.see(dram.0, room);
                    }
                    // Budgets stay as they are.
                    None => *own.last() = Last::default(),
                }
            }
        };
        let thread = std::thread::Builder::new().name("shares".into()).stack_size(256 << 10);
        thread.spawn(work)?;
        self.runs.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// What each tenant has, as of the last second; and what the machine has for them, if
    /// that is less than it was to share out.
    pub(crate) fn list(&self) -> (Vec<TenantShare>, Option<u64>) {
        let last = self.last();
        (last.tenants.clone(), last.room_bytes)
    }

    /// `turns`: whose curve is looked up this time, for that takes a while. What the machine
    /// has for all of them, if that is less than `dram_bytes`.
    fn look(
        &self,
        dram_bytes: u64,
        remembered: &mut HashMap<u64, Remembered>,
        turns: &mut Turns,
        seconds: f64,
    ) -> Option<u64> {
        let all = self.tenants.list();
        let all: Vec<_> = all.into_iter().filter(|tenant| takes_dram(tenant)).collect();
        remembered.retain(|token, _| all.iter().any(|tenant| tenant.record().token == *token));
        let (mut fixed, mut promised) = (0u64, 0u64);
        for tenant in all.iter().filter(|tenant| tenant.claim().is_none()) {
            let budget = tenant.budget_bytes();
            fixed = fixed.saturating_add(budget);
            let unused = budget.saturating_sub(tenant.usage().total_bytes());
            promised = promised.saturating_add(unused);
        }
        let moving: Vec<(Arc<Tenant>, Claim)> =
            all.iter().filter_map(|tenant| Some((Arc::clone(tenant), tenant.claim()?))).collect();
        let mut seen = Vec::new();
        let mut past = Vec::new();
        for (tenant, claim) in &moving {
            let known = remembered.entry(tenant.record().token).or_default();
            let demand = tenant.demand();
            let curve = known.curve.clone();
            let before = known.demand.replace(demand);
            let demands = [&demand, &before.unwrap_or(demand)];
            let lack = self.guests.lack(tenant);
            seen.push(seen_of(tenant, claim, curve, demands, lack, seconds));
            past.push(known.past);
        }
        let for_them = dram_bytes.saturating_sub(fixed);
        let used = seen.iter().fold(0u64, |sum, one| sum.saturating_add(one.used_bytes));
        let shared_bytes =
            machine().map_or(for_them, |machine| room_bytes(for_them, used, promised, machine));
        let room = (shared_bytes < for_them).then(|| shared_bytes.saturating_add(fixed));
        let shares = share(shared_bytes, &seen, &mut past, seconds);
        let wanted = shares.iter().fold(0u64, |sum, share| sum.saturating_add(share.wants_bytes));
        have_advised(&moving, wanted > shared_bytes, remembered, turns);
        let mut list = Vec::new();
        for (index, (tenant, claim)) in moving.iter().enumerate() {
            remembered.entry(tenant.record().token).or_default().past = past[index];
            give(tenant, shares[index].budget_bytes);
            list.push(described(tenant, claim, &seen[index], &shares[index]));
        }
        list.extend(
            all.iter().filter(|tenant| tenant.claim().is_none()).map(|tenant| fixed_share(tenant)),
        );
        list.sort_by(|a, b| (a.uid, &a.name).cmp(&(b.uid, &b.name)));
        *self.last() = Last { tenants: list, room_bytes: room };
        room
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn machine() -> Option<Machine> {
    let total_bytes = strata_sys::total_bytes().ok()?;
    Some(Machine { total_bytes, available_bytes: strata_sys::available_bytes().ok()? })
}

impl Shortage {
    /// Says so when it begins, and when it has been over for a while.
    fn see(&mut self, dram_bytes: u64, room: Option<u64>) {
        let now = Instant::now();
        match (room, self.0) {
            (Some(_), Some((since, _))) => self.0 = Some((since, now)),
            (Some(room), None) => {
                self.0 = Some((now, now));
                log(
                    Priority::Warning,
                    format_args!(
                        "this machine has only {} for its tenants of the {} that dram names: what else runs on it needs the rest",
                        ByteSize(room),
                        ByteSize(dram_bytes)
                    ),
                );
            }
            (None, Some((since, short))) if short.elapsed() > OVER_FOR => {
                self.0 = None;
                log(
                    Priority::Notice,
                    format_args!(
                        "this machine has {} for its tenants again, after {} s",
                        ByteSize(dram_bytes),
                        since.elapsed().as_secs()
                    ),
                );
            }
            (None, _) => {}
        }
    }
}

/// Where not all get what they want, the advisor watches them; of one of them it is asked
/// what it knows by now.
fn have_advised(
    moving: &[(Arc<Tenant>, Claim)],
    is_short: bool,
    remembered: &mut HashMap<u64, Remembered>,
    turns: &mut Turns,
) {
    if is_short {
        moving.iter().for_each(|(tenant, _)| tenant.keep_advising(WATCHED_FOR));
    }
    if Instant::now() < turns.next {
        return;
    }
    turns.turn = turns.turn.wrapping_add(1);
    let Some((tenant, _)) = moving.get(turns.turn % moving.len().max(1)) else { return };
    let began = Instant::now();
    let advice = tenant.advice_known().filter(|advice| advice.state == AdviceState::Steady);
    turns.next = Instant::now() + began.elapsed() * CURVE_REST;
    remembered.entry(tenant.record().token).or_default().curve =
        advice.map(|advice| advice.points).unwrap_or_default();
}

/// Whether the host can keep `bytes` for a tenant (`but`: that one, if it is there) beside
/// what it has promised the others: reserves, and budgets that do not move.
///
/// # Errors
/// Why not, as a sentence.
pub(crate) fn can_keep(
    dram_bytes: u64,
    tenants: &[Arc<Tenant>],
    but: Option<&Tenant>,
    bytes: u64,
) -> Result<(), String> {
    let is_other = |tenant: &&Arc<Tenant>| {
        but.is_none_or(|one| one.record().token != tenant.record().token) && takes_dram(tenant)
    };
    let promised = tenants
        .iter()
        .filter(is_other)
        .map(|tenant| {
            tenant.claim().map_or_else(|| tenant.budget_bytes(), |claim| claim.reserve_bytes)
        })
        .fold(0, u64::saturating_add);
    if promised.saturating_add(bytes) <= dram_bytes {
        return Ok(());
    }
    Err(format!(
        "{} cannot be kept for it: of the {} that this host shares out, {} are promised to others",
        ByteSize(bytes),
        ByteSize(dram_bytes),
        ByteSize(promised)
    ))
}

/// A budget to begin with, until the next second shares out: half of what nobody uses.
pub(crate) fn first_budget(dram_bytes: u64, tenants: &[Arc<Tenant>], claim: &Claim) -> u64 {
    let used = tenants
        .iter()
        .filter(|tenant| takes_dram(tenant))
        .map(|tenant| match tenant.claim() {
            Some(_) => tenant.usage().total_bytes().min(tenant.budget_bytes()),
            None => tenant.budget_bytes(),
        })
        .fold(0, u64::saturating_add);
    let half = dram_bytes.saturating_sub(used) / 2;
    half.max(claim.reserve_bytes).min(claim.limit_bytes).max(LEAST_BUDGET.0)
}

/// Whether a tenant has DRAM that counts: one that was released, or has ended, is not
/// kept to any budget.
fn takes_dram(tenant: &Tenant) -> bool {
    let (was_there, is_there) = tenant.attachment();
    !tenant.is_released() && (is_there || !was_there)
}

/// Changes a budget that moves, and the backstop with it.
fn give(tenant: &Tenant, bytes: u64) {
    let bytes = bytes.max(LEAST_BUDGET.0);
    if tenant.budget_bytes() != bytes {
        set_budget(tenant, bytes).ok();
    }
}

/// Sets a tenant's budget, and its memory cgroup's: an error is that of the cgroup.
pub(crate) fn set_budget(tenant: &Tenant, bytes: u64) -> io::Result<()> {
    tenant.set_budget(bytes);
    let record = tenant.record();
    let node_bytes = record.node.map_or(0, |node| node.limit_bytes);
    record.cgroup.as_ref().map_or(Ok(()), |directory| {
        Cgroups::set_budget(directory.as_ref(), bytes.saturating_add(node_bytes))
    })
}

/// What a tenant claims, after `wanted` was asked for on top of `before`.
pub(crate) fn claim(before: Option<Claim>, wanted: &DramClaim) -> Claim {
    let before = before.unwrap_or(Claim {
        reserve_bytes: 0,
        limit_bytes: u64::MAX,
        weight_thousandths: THOUSANDTHS as u64,
    });
    Claim {
        reserve_bytes: wanted.reserve_bytes.unwrap_or(before.reserve_bytes),
        limit_bytes: wanted.limit_bytes.unwrap_or(before.limit_bytes),
        weight_thousandths: wanted
            .weight
            .map_or(before.weight_thousandths, |weight| (weight * THOUSANDTHS).round() as u64)
            .max(1),
    }
}

fn seen_of(
    tenant: &Tenant,
    claim: &Claim,
    curve: Vec<Point>,
    [now, before]: [&Demand; 2],
    lack: Option<Lack>,
    seconds: f64,
) -> Seen {
    // What a guest's balloon keeps from it counts as what is out, and waiting for it inside
    // of the guest as waiting for pages.
    let lack = lack.unwrap_or_default();
    let since = |now: u64, before: u64| now.saturating_sub(before);
    let nanoseconds = seconds.max(0.001) * 1e9;
    Seen {
        reserve_bytes: claim.reserve_bytes,
        limit_bytes: claim.limit_bytes,
        weight: claim.weight_thousandths as f64 / THOUSANDTHS,
        least_bytes: now.least_bytes.saturating_add(LEAST_BUDGET.0),
        packed_bytes: now.packed_bytes,
        budget_bytes: tenant.budget_bytes(),
        used_bytes: now.used_bytes,
        whole_bytes: now.whole_bytes.max(now.used_bytes).saturating_add(lack.bytes),
        growth_bytes: since(now.whole_bytes, before.whole_bytes),
        returned_bytes: since(now.returned_bytes, before.returned_bytes)
            .saturating_add((lack.returned_bytes * seconds) as u64),
        stall: (since(now.waited_ns, before.waited_ns) as f64 / nanoseconds)
            .max(lack.stall)
            .min(1.0),
        busy: since(now.processor_ns, before.processor_ns) as f64 / 1e9,
        curve,
    }
}

fn described(tenant: &Tenant, claim: &Claim, seen: &Seen, share: &Share) -> TenantShare {
    let record = tenant.record();
    let (why, reason) = match share.why {
        Why::Content => ("content", "it waits for nothing".to_owned()),
        Why::Reserve => ("reserve", "it has its reserve; more would save others more".to_owned()),
        Why::Rising => {
            let lacks = ByteSize(share.goal_bytes.saturating_sub(share.budget_bytes));
            ("rising", format!("it waits for pages, and gets {lacks} more"))
        }
        Why::Outbid => {
            ("outbid", "it waits for pages, and others lose more by the same DRAM".to_owned())
        }
        Why::Quiet => ("quiet", "it does nothing, and others use what it does not".to_owned()),
        Why::Limit => {
            ("limit", "it waits for pages, and has its limit: strata set --limit".to_owned())
        }
    };
    TenantShare {
        name: record.name.clone(),
        uid: record.uid,
        budget_bytes: share.budget_bytes,
        moves: true,
        used_bytes: seen.used_bytes,
        wants_bytes: share.wants_bytes,
        goal_bytes: share.goal_bytes,
        reserve_bytes: claim.reserve_bytes,
        limit_bytes: (claim.limit_bytes != u64::MAX).then_some(claim.limit_bytes),
        weight: seen.weight,
        stall: seen.stall,
        costs_others: share.costs_others,
        why: why.to_owned(),
        reason,
    }
}

fn fixed_share(tenant: &Tenant) -> TenantShare {
    let record = tenant.record();
    let budget_bytes = tenant.budget_bytes();
    let some = tenant.stalled().some;
    TenantShare {
        name: record.name.clone(),
        uid: record.uid,
        budget_bytes,
        moves: false,
        used_bytes: tenant.usage().total_bytes(),
        wants_bytes: budget_bytes,
        goal_bytes: budget_bytes,
        reserve_bytes: budget_bytes,
        limit_bytes: Some(budget_bytes),
        weight: 1.0,
        stall: some[0],
        costs_others: 0.0,
        why: "fixed".to_owned(),
        reason: "it was given this budget: strata set --weight lets it move".to_owned(),
    }
}
