//! Between two looks. A look costs a tenth of a millisecond, and a tenant near its
//! budget may grow at any time; but most tenants do nothing most of the time. One for
//! which there is nothing to do rests: as often as it would be looked at, one read tells
//! whether its memory can have changed. After some of these its keeper sleeps, and the
//! idle watcher reads for it.
//!
//! What cannot be told that way waits for [`LONGEST`]: memory of the store that a program
//! gave back, a new part of a program of unchanged size. Of a tenant of which nothing is
//! registered that is nothing that matters: it rests twice as long each time.
//!
//! Whose processes do not run at all can have done none of it. One that has rested a few
//! times gets an [`alarm`] from the kernel, and then rests until it is charged more memory
//! or its processes have run, which is looked at instead: a clock says it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use strata_policy::budget::Actions;
use strata_sys::{Process, WorkClock};

use super::alarm::{self, Alarm};
use super::{Keeper, QUIET_LOOK, QUIET_ROUNDS, RoundOutcome, idle_watch};
use crate::map::counters::Counter;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::orders::Order;
use crate::tenant::space::Space;

/// A tenant is looked at this often at least...
const LONGEST: Duration = Duration::from_millis(100);
/// ...one that has its budget for merged pages alone, which it may write at any time
/// without anybody being asked, this often...
const LONGEST_MERGED: Duration = Duration::from_millis(10);
/// ...and one of which nothing is registered, after it has rested so often, this many
/// times doubled: every six seconds.
const DOUBLED: u32 = 6;
/// After so many rests it is read for together with others, and gets an alarm.
const TOGETHER_AFTER: u32 = 3;
/// With one, and while its processes do not run, it is looked at this often at least.
const LONGEST_STILL: Duration = Duration::from_secs(256);
/// Looks left out by a keeper itself, before the idle watcher does it for all that rest.
const OWN_READS: u32 = 16;
/// More than the files that are read have.
const MOST_BYTES: usize = 256;

/// When to look again.
#[derive(Clone, Copy, Debug)]
pub(super) struct NextLook {
    /// At the latest...
    pub(super) after: Duration,
    /// ...unless nothing has changed: then at this.
    pub(super) at_rest: Duration,
}

impl NextLook {
    pub(super) const fn after(after: Duration) -> Self {
        Self { after, at_rest: after }
    }
}

/// Why the idle watcher has woken a keeper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cause {
    /// The tenant has changed.
    Changed,
    /// Its processes have run, and nothing else is known.
    Worked,
}

/// A file that says how much memory a tenant has, and what it said.
#[derive(Debug)]
struct Gauge {
    path: String,
    file: File,
    said: ([u8; MOST_BYTES], usize),
}

impl Gauge {
    /// `process`: whose file it is, if it is a process's.
    fn open(path: String, process: Option<&Process>) -> Option<Self> {
        let file = match process {
            Some(process) => process.open_file(c"statm").ok()?,
            None => File::open(&path).ok()?,
        };
        let mut gauge = Self { path, file, said: ([0; MOST_BYTES], 0) };
        gauge.said = gauge.read()?;
        Some(gauge)
    }

    fn again(mut self) -> Option<Self> {
        self.said = self.read()?;
        Some(self)
    }

    fn read(&self) -> Option<([u8; MOST_BYTES], usize)> {
        let mut bytes = [0; MOST_BYTES];
        let count = self.file.read_at(&mut bytes, 0).ok()?;
        (count > 0 && count < MOST_BYTES).then_some((bytes, count))
    }
}

/// What a tenant was like when it was looked at last.
#[derive(Debug)]
pub(super) struct State {
    gauge: Gauge,
    seen: Seen,
    /// What its processes had worked, of one that has an alarm.
    work: Option<Work>,
}

/// The clocks of a tenant's processes, and what each showed.
type Work = Vec<(WorkClock, Duration)>;

fn work_of(tenant: &Tenant) -> Option<Work> {
    let clock = |space: &Arc<Space>| {
        let clock = space.process()?.work_clock()?;
        Some((clock, clock.read()?))
    };
    tenant.space_list().iter().map(clock).collect()
}

#[derive(PartialEq, Eq, Debug)]
struct Seen {
    policy_time: u64,
    /// By space: hints given so far.
    hints: Vec<u64>,
}

impl Seen {
    /// Nothing of a tenant whose processes are not all attended and well.
    fn of(tenant: &Tenant) -> Option<Self> {
        let spaces = tenant.space_list();
        let hints = spaces.iter().map(|space| {
            let well = !space.is_gone() && !space.has_strays.load(Ordering::Acquire);
            let agent = space.agent().filter(|_| well)?;
            Some(agent.control.control().hints.tail.load(Ordering::Relaxed))
        });
        Some(Self {
            policy_time: tenant.counters.get(Counter::PolicyTime),
            hints: hints.collect::<Option<_>>()?,
        })
    }
}

impl State {
    /// `before`: of an earlier look. None: of this tenant it cannot be told.
    fn of(tenant: &Tenant, before: Option<Self>, has_alarm: bool) -> Option<Self> {
        let seen = Seen::of(tenant)?;
        let work = if has_alarm { work_of(tenant) } else { None };
        let (path, process) = gauge_path(tenant)?;
        let gauge = match before {
            Some(Self { gauge, .. }) if gauge.path == path => gauge.again(),
            _ => Gauge::open(path, process.as_deref()),
        };
        Some(Self { gauge: gauge?, seen, work })
    }

    /// What a file says, and a tenant without processes is like.
    #[cfg(test)]
    pub(super) fn of_file(path: &str) -> Option<Self> {
        let gauge = Gauge::open(path.into(), None)?;
        Some(Self { gauge, seen: Seen { policy_time: 0, hints: Vec::new() }, work: None })
    }

    /// Whether its programs have ever said something of their memory.
    fn has_hints(&self) -> bool {
        self.seen.hints.iter().any(|&given| given > 0)
    }

    /// Whether it is known what its processes had worked.
    pub(super) fn knows_work(&self) -> bool {
        self.work.is_some()
    }

    /// The clocks of its processes, and what they showed.
    pub(super) fn clocks(&self) -> impl Iterator<Item = (WorkClock, Duration)> {
        self.work.iter().flatten().copied()
    }

    /// Whether the tenant is like that still.
    pub(super) fn is_unchanged(&self, tenant: &Tenant) -> bool {
        self.gauge.read().as_ref() == Some(&self.gauge.said)
            && Seen::of(tenant).as_ref() == Some(&self.seen)
    }
}

impl Keeper<'_> {
    /// Waits for orders, or until it is time to look.
    pub(super) fn wait(&mut self, next: NextLook) -> Vec<Order> {
        let tenant = self.tenant;
        let due = Instant::now() + next.at_rest;
        let rests = next.at_rest > next.after;
        let before = std::mem::take(&mut self.rests);
        let is_managed = tenant.under_pressure.load(Ordering::Relaxed);
        loop {
            let left = due.saturating_duration_since(Instant::now());
            let quiet = is_managed && self.quiet_rounds >= QUIET_ROUNDS;
            let every = if quiet { next.after.max(QUIET_LOOK) } else { next.after };
            if rests && every < left && self.left_out >= OWN_READS {
                return self.wait_for_the_idle_watcher(every, left, before);
            }
            if let Some(orders) = wait_for_orders(tenant, every.min(left)) {
                return orders;
            }
            if !rests || every >= left {
                self.rests = if rests { before + 1 } else { 0 };
                return Vec::new();
            }
            if !self.state.as_ref().is_some_and(|state| state.is_unchanged(tenant)) {
                self.left_out = 0;
                return Vec::new();
            }
            self.left_out += 1;
            self.quiet_rounds += 1;
        }
    }

    /// How long the tenant may rest if nothing changes.
    pub(super) fn longest_rest(&self) -> Duration {
        let tenant = self.tenant;
        if self.may_unmerge_beyond() {
            return LONGEST_MERGED;
        }
        if self.alarm.is_some() {
            return LONGEST_STILL;
        }
        // These can grow where nobody reads of it while it rests.
        let elsewhere = tenant.unattended_bytes.load(Ordering::Relaxed) > 0
            || lock(&tenant.usage).fixed_bytes() > 0;
        match elsewhere || tenant.under_pressure.load(Ordering::Relaxed) {
            true => LONGEST,
            false => LONGEST * (1 << self.rests.min(DOUBLED)),
        }
    }

    fn wait_for_the_idle_watcher(
        &mut self,
        every: Duration,
        left: Duration,
        rests: u32,
    ) -> Vec<Order> {
        let tenant = self.tenant;
        // Who has given hints may give more, and these are seen only where it is looked
        // at itself.
        let hints = self.state.as_ref().is_some_and(State::has_hints);
        let alone = rests < TOGETHER_AFTER || hints;
        let alarm = self.alarm.take().filter(Alarm::fits);
        let wants_alarm = alarm.is_none() && !alone && self.may_stand_still();
        let rest = idle_watch::IdleLook { every, alone, alarm };
        if !idle_watch::enter(tenant, &mut self.state, rest) {
            self.left_out = 0;
            return wait_for_orders(tenant, every).unwrap_or_default();
        }
        if wants_alarm {
            alarm::ask(tenant);
        }
        let orders = wait_for_orders(tenant, left);
        let Some(went) = idle_watch::leave(tenant) else { return orders.unwrap_or_default() };
        self.state = Some(went.state);
        self.alarm = went.alarm;
        self.quiet_rounds += went.looks;
        match went.cause {
            Some(Cause::Changed) => self.left_out = 0,
            // It is looked at, and rests on as before if that shows nothing.
            Some(Cause::Worked) => self.rests = rests,
            None if orders.is_none() => self.rests = rests + 1,
            None => {}
        }
        orders.unwrap_or_default()
    }

    /// Whether a tenant may rest until it is charged more memory or its processes run:
    /// all that it costs is in its cgroup, and nothing that is said of it wants to be said
    /// anew by itself.
    fn may_stand_still(&self) -> bool {
        let unattended = self.tenant.unattended_bytes.load(Ordering::Relaxed) > 0;
        self.tenant.record.cgroup.is_some() && !unattended && !self.thrashes
    }

    /// Notes what the tenant is like. To be done before it is looked at: what changes
    /// from now on is a change.
    pub(super) fn note_state(&mut self) {
        if !self.may_stand_still() {
            self.alarm = None;
        }
        self.state = State::of(self.tenant, self.state.take(), self.alarm.is_some());
    }

    /// Whether a round has left nothing to go on with, so that the tenant may rest.
    pub(super) fn may_rest(&self, actions: &Actions, progress: RoundOutcome) -> bool {
        let asks = actions.evict_pages > 0
            || actions.settle_pages > 0
            || actions.drop_kept_bytes > 0
            || actions.repack_pages > 0
            || actions.demote_bytes > 0
            || actions.cannot_by_bytes > 0;
        let goes_on = asks || progress.shrank_bytes > 0 || self.capturing.is_some();
        !goes_on && self.pinned.is_empty() && self.state.is_some()
    }
}

/// Where the kernel tells how much memory a tenant has, pages that processes share once,
/// as [`crate::tenant::usage::measure`] counts them.
fn gauge_path(tenant: &Tenant) -> Option<(String, Option<Arc<Process>>)> {
    let spaces = tenant.space_list();
    match spaces.as_slice() {
        [] => None,
        [one] => {
            let process = one.process()?;
            Some((format!("/proc/{}/statm", process.pid()), Some(process)))
        }
        _ => Some((usage_file(Path::new(tenant.record.cgroup.as_ref()?))?, None)),
    }
}

/// Where a cgroup says what it is charged, with those below it: of version 2 or 1.
pub(super) fn usage_file(directory: &Path) -> Option<String> {
    let path = |name| directory.join(name);
    [path("memory.current"), path("memory.usage_in_bytes")]
        .into_iter()
        .find(|path| path.exists())?
        .into_os_string()
        .into_string()
        .ok()
}

/// `None`: nothing came in all the time.
fn wait_for_orders(tenant: &Tenant, patience: Duration) -> Option<Vec<Order>> {
    let inbox = lock(&tenant.inbox);
    let (mut inbox, _) = tenant
        .inbox_filled
        .wait_timeout_while(inbox, patience, |inbox| !inbox.woken)
        .unwrap_or_else(PoisonError::into_inner);
    std::mem::take(&mut inbox.woken).then(|| std::mem::take(&mut inbox.orders))
}

#[cfg(test)]
#[path = "idle_tests.rs"]
mod tests;
