//! How the DRAM of a host is shared out among its tenants, once a second.
//!
//! Each tenant has a *reserve* (it gets that back whenever it wants it), a *limit* and
//! a *weight*. What is left above the reserves goes where the sum of the losses is least
//! (marginal allocation along the hulls of the tenants' curves, Fox 1966, as in
//! [`crate::advice::share_out`]; then pieces are moved as long as that helps, for a curve
//! lies above its hull). Where the advisor has a curve it is that one. Where it has none
//! it is guessed from what is seen: with nothing in place all of the speed is lost, with
//! everything nothing, and in between it falls as a power of the part that is out, the
//! one that fits how much the tenant waits. A wrong guess shows as waiting in the next
//! second, and is put right by it.
//!
//! Then it moves there: up fast, by half of what is missing in a second; down at once
//! where nothing was in use, and slowly where something was. Shares that would save
//! hardly anything stay as they are, so that two of a kind do not swing. The budgets
//! never add up to more than there is, and what has not left yet is given to nobody.

mod goals;

use self::goals::goals;
use crate::advice::Point;

const MIB: u64 = 1 << 20;

/// Who waits for less than this part of the time is content.
const CONTENT: f64 = 0.005;
/// A tenant that waits is thought to be rid of it with as much as it brings back in so
/// many seconds, ...
const REACH_S: f64 = 8.0;
/// ...this much at least.
const LEAST_REACH_BYTES: u64 = 16 * MIB;
/// Free room that a budget has above what is used: this part of it, ...
const SPARE_PART: u64 = 16;
/// ...and as much as it grew in so many of these seconds, ...
const SPARE_GROWTH_S: u64 = 2;
/// ...and this much at least.
const LEAST_SPARE_BYTES: u64 = 8 * MIB;
/// Who uses less than this part of a processor and waits for nothing is quiet.
const QUIET: f64 = 0.02;
/// What a quiet tenant holds is worth half as much after so many seconds, ...
const HALF_AFTER_S: f64 = 60.0;
/// ...and never less than this part: it may wake up.
const LEAST_AWAKE: f64 = 1.0 / 16.0;
/// How a guessed curve falls ([`Past::skew`]) before anything was seen, its bounds, and
/// the part that the last second has in it.
const SKEW: f64 = 2.0;
const SKEWS: (f64, f64) = (0.2, 12.0);
const SKEW_PART: f64 = 0.1;
/// Shares that would save less than this part of one tenant's speed stay as they are.
const WORTH_MOVING: f64 = 0.02;
/// Part of what it uses that a tenant gives up in a second, busy or quiet.
const GIVES_PART: u64 = 24;
/// Smaller changes than this part of a budget are none, unless somebody waits for them.
const IGNORED_PART: u64 = 64;
/// How averages over the last seconds are made: the part that the last one has.
const LAST_PART: f64 = 0.4;

/// A tenant, as it was in the last second.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Seen {
    /// What it always gets back.
    pub reserve_bytes: u64,
    /// The most it may have.
    pub limit_bytes: u64,
    /// Its share of the rest, beside those of others; above 0.
    pub weight: f64,
    /// It cannot do with less: what is pinned, and our own records.
    pub least_bytes: u64,
    /// What it costs beside that with nothing in place: where there is no room below
    /// compressed memory, all of it compressed.
    pub packed_bytes: u64,
    /// What it may cost now.
    pub budget_bytes: u64,
    /// What it costs now.
    pub used_bytes: u64,
    /// What it would cost with everything in place.
    pub whole_bytes: u64,
    /// By how much `whole_bytes` grew in the second.
    pub growth_bytes: u64,
    /// What was brought back in the second.
    pub returned_bytes: u64,
    /// Part of the second in which some thread waited for a page.
    pub stall: f64,
    /// Processor seconds used.
    pub busy: f64,
    /// The advisor's curve, if it has one that can be relied on.
    pub curve: Vec<Point>,
}

/// What is remembered of a tenant from second to second.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Past {
    stall: f64,
    returned_bytes: f64,
    growth_bytes: f64,
    quiet_s: f64,
    /// Logarithm of the skew beside [`SKEW`].
    log_skew: f64,
}

/// Why a tenant has what it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// Everything that it wants is there.
    Content,
    /// It has its reserve, and what is above it is worth more to others.
    Reserve,
    /// It wants more, and is on the way up.
    Rising,
    /// It wants more, and a byte is worth more to others.
    Outbid,
    /// It is quiet, and others have, or get, what it does not use now.
    Quiet,
    /// It has its limit.
    Limit,
}

/// What a tenant gets for the next second.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Share {
    /// Its budget.
    pub budget_bytes: u64,
    /// What it would have if nobody else wanted anything.
    pub wants_bytes: u64,
    /// What it is on the way to.
    pub goal_bytes: u64,
    /// Why.
    pub why: Why,
    /// What others lose of their speed, in sum and by weight, because it has more than
    /// its reserve, and than what could not leave: 0.1 is a tenth of one tenant's speed.
    pub costs_others: f64,
}

impl Past {
    /// Takes in a second of so many seconds.
    fn look(&mut self, seen: &Seen, seconds: f64) {
        let keep = (1.0 - LAST_PART).powf(seconds.clamp(0.0, 60.0));
        let averaged =
            |old: f64, new: f64| if new > old { new } else { old * keep + new * (1.0 - keep) };
        self.stall = averaged(self.stall, seen.stall.clamp(0.0, 1.0));
        self.returned_bytes =
            averaged(self.returned_bytes, seen.returned_bytes as f64 / seconds.max(0.1));
        self.growth_bytes =
            averaged(self.growth_bytes, seen.growth_bytes as f64 / seconds.max(0.1));
        let out = seen.out_part();
        if (0.02..0.98).contains(&out) && seen.busy + seen.stall > QUIET {
            // So skewed that as much is lost as was seen.
            let skew = seen.stall.clamp(1e-6, 0.999).ln() / out.ln();
            let part = 1.0 - (1.0 - SKEW_PART).powf(seconds.clamp(0.0, 60.0));
            let target = (skew.clamp(SKEWS.0, SKEWS.1) / SKEW).ln();
            self.log_skew += (target - self.log_skew) * part;
        }
        let is_quiet =
            seen.busy < QUIET * seconds && seen.stall < CONTENT && seen.growth_bytes == 0;
        self.quiet_s = if is_quiet { self.quiet_s + seconds } else { 0.0 };
    }

    /// What its bytes are worth beside those of one that works.
    fn awake(&self) -> f64 {
        (0.5f64).powf(self.quiet_s / HALF_AFTER_S).max(LEAST_AWAKE)
    }

    /// How uneven its use of its memory is: with a part `u` in place it loses
    /// `(1 - u)^skew` of its speed.
    fn skew(&self) -> f64 {
        SKEW * self.log_skew.exp()
    }

    fn waits(&self) -> bool {
        self.stall >= CONTENT
    }
}

impl Seen {
    fn most_bytes(&self) -> u64 {
        self.limit_bytes.max(self.least_bytes)
    }

    fn spare_bytes(&self, past: &Past) -> u64 {
        let growth = past.growth_bytes as u64 * SPARE_GROWTH_S;
        (self.used_bytes / SPARE_PART).max(LEAST_SPARE_BYTES) + growth
    }

    /// What it costs with nothing in place.
    fn empty_bytes(&self) -> u64 {
        self.least_bytes.saturating_add(self.packed_bytes)
    }

    /// Part of what can leave that is out now.
    fn out_part(&self) -> f64 {
        let can_leave = self.whole_bytes.saturating_sub(self.empty_bytes()).max(1);
        self.whole_bytes.saturating_sub(self.used_bytes) as f64 / can_leave as f64
    }

    /// What it lacks of being rid of its waiting.
    fn lack_bytes(&self, past: &Past) -> u64 {
        let missing = self.whole_bytes.saturating_sub(self.used_bytes);
        if !past.waits() {
            return 0;
        }
        let reach = (past.returned_bytes * REACH_S) as u64;
        missing.min(reach.max(LEAST_REACH_BYTES))
    }

    /// What it would have if nobody else wanted anything.
    fn wants_bytes(&self, past: &Past) -> u64 {
        let wants = match self.curve.last() {
            Some(last) => last.budget_bytes.max(self.used_bytes),
            None => self.used_bytes + self.lack_bytes(past),
        };
        wants.saturating_add(self.spare_bytes(past)).clamp(self.least_bytes, self.most_bytes())
    }

    /// What nobody takes from it: of its reserve what it wants.
    fn right_bytes(&self, past: &Past) -> u64 {
        self.reserve_bytes.min(self.wants_bytes(past)).max(self.least_bytes)
    }

    /// With less than this it gives up nothing more: it only waits.
    fn floor_bytes(&self, past: &Past) -> u64 {
        self.right_bytes(past).max(self.empty_bytes().min(self.most_bytes()))
    }
}

/// What each tenant gets of `dram_bytes` for the next second. `seconds`: since the last
/// time, one or so. `past` is of the same tenants in the same order, new for new ones.
#[must_use]
pub fn share(dram_bytes: u64, seen: &[Seen], past: &mut [Past], seconds: f64) -> Vec<Share> {
    for (tenant, past) in seen.iter().zip(past.iter_mut()) {
        past.look(tenant, seconds);
    }
    let goals = goals(dram_bytes, seen, past);
    let budgets = step(dram_bytes, seen, past, &goals, seconds);
    let costs = costs(seen, past, &budgets);
    (0..seen.len())
        .map(|index| Share {
            budget_bytes: budgets[index],
            wants_bytes: seen[index].wants_bytes(&past[index]),
            goal_bytes: goals[index],
            why: why(&seen[index], &past[index], budgets[index], goals[index]),
            costs_others: costs[index],
        })
        .collect()
}

/// One second on the way to the goals.
fn step(dram_bytes: u64, seen: &[Seen], past: &[Past], goals: &[u64], seconds: f64) -> Vec<u64> {
    // Down, as far as it may go in this time.
    let mut budgets: Vec<u64> = seen
        .iter()
        .zip(past)
        .zip(goals)
        .map(|((one, past), &goal)| {
            if goal >= one.budget_bytes {
                return one.budget_bytes;
            }
            let used = one.used_bytes.saturating_add(one.spare_bytes(past)).min(one.budget_bytes);
            let gives = (one.used_bytes as f64 / GIVES_PART as f64 * seconds) as u64;
            let slowly = used.saturating_sub(if used < one.budget_bytes { 0 } else { gives });
            goal.max(slowly)
        })
        .collect();
    // Whoever is below what is his by right gets it now, whoever has to give it.
    let owed: u64 = seen
        .iter()
        .zip(past)
        .map(|(one, past)| one.right_bytes(past).saturating_sub(one.budget_bytes))
        .fold(0, u64::saturating_add);
    let held = |budgets: &[u64]| -> u64 {
        budgets
            .iter()
            .zip(seen)
            .map(|(&budget, one)| budget.max(one.used_bytes))
            .fold(0, u64::saturating_add)
    };
    let total: u64 = budgets.iter().fold(0, |sum, &budget| sum.saturating_add(budget));
    let over = total.saturating_add(owed).saturating_sub(dram_bytes);
    if over > 0 {
        let above: Vec<u64> =
            budgets.iter().zip(goals).map(|(&budget, &goal)| budget.saturating_sub(goal)).collect();
        let all: u64 = above.iter().fold(0, |sum, &bytes| sum.saturating_add(bytes));
        let part = (over as f64 / all.max(1) as f64).min(1.0);
        for (budget, above) in budgets.iter_mut().zip(&above) {
            *budget -= (*above as f64 * part).ceil() as u64;
        }
    }
    // Up: first what is owed, then half of what is missing, as far as there is room
    // that nobody uses any more.
    let mut room = dram_bytes.saturating_sub(held(&budgets));
    for ((budget, one), past) in budgets.iter_mut().zip(seen).zip(past) {
        let right = one.right_bytes(past).saturating_sub(*budget).min(room);
        *budget += right;
        room -= right;
    }
    let asks: Vec<u64> = budgets
        .iter()
        .zip(seen)
        .zip(goals)
        .map(|((&budget, one), &goal)| {
            let missing = goal.saturating_sub(budget);
            let is_waited_for = budget < one.used_bytes + LEAST_SPARE_BYTES || one.stall >= CONTENT;
            if missing < budget / IGNORED_PART && !is_waited_for {
                return 0;
            }
            let half = (missing as f64 * (1.0 - (0.5f64).powf(seconds))).ceil() as u64;
            half.max(LEAST_REACH_BYTES).min(missing)
        })
        .collect();
    let asked: u64 = asks.iter().fold(0, |sum, &ask| sum.saturating_add(ask));
    let part = (room as f64 / asked.max(1) as f64).min(1.0);
    for (budget, ask) in budgets.iter_mut().zip(&asks) {
        *budget += (*ask as f64 * part) as u64;
    }
    budgets
}

fn why(seen: &Seen, past: &Past, budget: u64, goal: u64) -> Why {
    let wants = seen.wants_bytes(past);
    if past.quiet_s > 0.0 && (goal < budget || seen.whole_bytes > budget) {
        Why::Quiet
    } else if budget >= wants && wants >= seen.most_bytes() && past.waits() {
        Why::Limit
    } else if !past.waits() && budget >= seen.used_bytes {
        Why::Content
    } else if goal > budget {
        Why::Rising
    } else if budget <= seen.reserve_bytes {
        Why::Reserve
    } else {
        Why::Outbid
    }
}

/// What each tenant's bytes above its floor would save the others who lack some.
fn costs(seen: &[Seen], past: &[Past], budgets: &[u64]) -> Vec<f64> {
    let lacks: Vec<(f64, u64)> = seen
        .iter()
        .zip(past)
        .zip(budgets)
        .map(|((one, past), &budget)| {
            let lack = one.wants_bytes(past).saturating_sub(budget).min(one.lack_bytes(past));
            (one.weight * past.stall, lack)
        })
        .collect();
    let cost = |own: usize| {
        let above = budgets[own].saturating_sub(seen[own].floor_bytes(&past[own]));
        let others =
            lacks.iter().enumerate().filter(|&(other, &(_, lack))| other != own && lack > 0);
        let lacking: u64 = others.clone().map(|(_, &(_, lack))| lack).sum();
        let part = (above as f64 / lacking.max(1) as f64).min(1.0);
        others.map(|(_, &(stall, _))| stall * part).fold(0.0, |sum, cost| sum + cost)
    };
    (0..seen.len()).map(cost).collect()
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
