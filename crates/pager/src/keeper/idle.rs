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
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::process::{Child, Command, Stdio};
    use strata_sys::{ControlBlock, Range, SeqPacket};

    use super::*;
    use crate::tenant::Hail;
    use crate::testing;

    /// Longer than a busy machine keeps a thread from running.
    const HANGS: Duration = Duration::from_secs(60);

    /// A tenant of one process that sleeps.
    fn asleep() -> Option<(Arc<Tenant>, Child)> {
        asleep_of(testing::tenant())
    }

    fn asleep_of(tenant: Arc<Tenant>) -> Option<(Arc<Tenant>, Child)> {
        let uffd = testing::userfaultfd()?;
        let mut command = Command::new("sleep");
        let child = command.arg("1000").stdout(Stdio::null()).stderr(Stdio::null());
        let child = child.spawn().expect("a child");
        let begun = Instant::now();
        while !sleeps(child.id()) {
            assert!(begun.elapsed() < HANGS, "it does not begin to sleep");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (socket, _) = UnixDatagram::pair().expect("sockets");
        let own = Range { start: 0, end: 0 };
        let process = Arc::new(Process::open(child.id()).expect("a child"));
        let hail = Hail { process, transfer: 4096, own, restart: 0, library: 0 };
        let block = ControlBlock::create(strata_units::wire::MAGIC).expect("a control block");
        tenant.attach_unkept(uffd, block, SeqPacket::adopt(socket.into()), hail).expect("a space");
        Some((tenant, child))
    }

    /// Whether it has come to that: until then it still changes, and may wait for a processor
    /// in between. A kernel that does not tell where a process waits says 0.
    fn sleeps(pid: u32) -> bool {
        let waits_in = std::fs::read_to_string(format!("/proc/{pid}/wchan")).expect("its wchan");
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("its stat");
        stat.contains(") S ") && (waits_in == "0" || waits_in.contains("nanosleep"))
    }

    fn is_unchanged(keeper: &Keeper<'_>) -> bool {
        keeper.state.as_ref().is_some_and(|state| state.is_unchanged(keeper.tenant))
    }

    /// Notes what a tenant is like, and again until it does not change by itself.
    fn settle(keeper: &mut Keeper<'_>) {
        let begun = Instant::now();
        loop {
            keeper.note_state();
            std::thread::sleep(Duration::from_millis(5));
            if is_unchanged(keeper) {
                return;
            }
            assert!(begun.elapsed() < HANGS, "a sleeping process changes");
        }
    }

    #[test]
    fn whatever_may_need_the_keeper_ends_a_rest() {
        let Some((tenant, mut child)) = asleep() else { return };
        let mut keeper = Keeper::new(&tenant);
        let space = tenant.space_list().remove(0);
        let rest = NextLook { after: Duration::from_micros(100), at_rest: HANGS * 2 };
        let mut ends = |cause: &dyn Fn()| {
            settle(&mut keeper);
            // By the keeper itself, then by the idle watcher.
            (0..2).all(|turn| {
                lock(&tenant.inbox).woken = false;
                keeper.left_out = turn * OWN_READS;
                if turn == 0 {
                    cause();
                }
                let begun = Instant::now();
                keeper.wait(rest);
                begun.elapsed() < HANGS
            })
        };
        let agent = space.agent().expect("attached");
        assert!(ends(&|| assert!(agent.control.control().hints.push(4096, 8192))), "a hint");
        assert!(
            ends(&|| {
                tenant.counters.add(Counter::PolicyTime, 1);
            }),
            "a page came"
        );
        let other = testing::userfaultfd().map(|uffd| testing::space(&tenant, uffd));
        assert!(ends(&|| tenant.adopt_space(other.clone().expect("as before"))), "a process more");
        tenant.bury(&other.expect("as before"));
        assert!(ends(&|| space.has_strays.store(true, Ordering::Release)), "pages on their way");
        space.has_strays.store(false, Ordering::Release);
        let pid = child.id();
        let killed =
            || assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().is_ok());
        assert!(ends(&killed), "its process has ended");
        child.wait().expect("it was killed");
        keeper.note_state();
        assert!(keeper.state.is_none(), "of nobody");
    }

    #[test]
    fn who_has_nothing_registered_rests_longer_each_time() {
        let Some((tenant, mut child)) = asleep() else { return };
        let mut keeper = Keeper::new(&tenant);
        let lengths = [0, 1, 2, 6, 60].map(|rests| {
            keeper.rests = rests;
            keeper.longest_rest() / 100
        });
        let expected = [1, 2, 4, 64, 64].map(Duration::from_millis);
        assert_eq!(lengths, expected);
        tenant.under_pressure.store(true, Ordering::Relaxed);
        assert_eq!(keeper.longest_rest(), LONGEST);
        // An order ends the count, a whole rest goes on with it.
        settle(&mut keeper);
        keeper.rests = 3;
        lock(&tenant.inbox).woken = true;
        let rest = NextLook { after: Duration::from_millis(1), at_rest: Duration::from_millis(20) };
        keeper.wait(rest);
        assert_eq!(keeper.rests, 0);
        child.kill().expect("it sleeps");
        child.wait().expect("it was killed");
    }

    #[test]
    fn who_has_an_alarm_rests_until_it_goes_off_or_something_runs() {
        let nowhere = testing::tenant_in("/nonexistent");
        let Some((tenant, mut child)) = asleep_of(nowhere) else { return };
        let mut keeper = Keeper::new(&tenant);
        let path = std::env::temp_dir().join(format!("strata-charged-{}", std::process::id()));
        std::fs::write(&path, "4096\n").expect("file");
        let rest = NextLook { after: Duration::from_millis(1), at_rest: HANGS * 2 };
        let signal = |name: &str| {
            let status =
                Command::new("kill").args([name, child.id().to_string().as_str()]).status();
            assert!(status.is_ok());
        };
        let other = testing::userfaultfd().map(|uffd| testing::space(&tenant, uffd));
        let causes: [(&(dyn Fn() + Sync), bool); 3] = [
            (&|| signal("-STOP"), true),
            (&|| tenant.adopt_space(other.clone().expect("as before")), false),
            (&|| idle_watch::alarmed(idle_watch::key(&tenant)), false),
        ];
        for (number, (cause, goes_on)) in causes.into_iter().enumerate() {
            keeper.alarm = Some(Alarm::of_file(&path, 8192));
            settle(&mut keeper);
            let runs = |keeper: &Keeper<'_>| {
                let mut clocks = keeper.state.as_ref().expect("noted").clocks();
                clocks.any(|(clock, before)| clock.read() != Some(before))
            };
            while runs(&keeper) {
                settle(&mut keeper);
            }
            assert_eq!(keeper.longest_rest(), LONGEST_STILL);
            (keeper.left_out, keeper.rests) = (OWN_READS, TOGETHER_AFTER);
            lock(&tenant.inbox).woken = false;
            let begun = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !tenant.stands_still.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    cause();
                });
                keeper.wait(rest);
            });
            assert!(begun.elapsed() < HANGS, "{number}");
            assert!(!tenant.stands_still.load(Ordering::Relaxed));
            let goes = keeper.left_out >= OWN_READS && keeper.rests >= TOGETHER_AFTER;
            assert_eq!(goes, goes_on, "{number}");
            assert_eq!(keeper.alarm.is_some(), number < 2, "{number}");
            if number == 1 {
                tenant.bury(other.as_ref().expect("as before"));
            }
        }
        std::fs::remove_file(&path).expect("file");
        child.kill().expect("it sleeps");
        child.wait().expect("it was killed");
    }

    #[test]
    fn a_rest_has_an_end() {
        let Some((tenant, mut child)) = asleep() else { return };
        let mut keeper = Keeper::new(&tenant);
        settle(&mut keeper);
        // First by itself, then by the idle watcher. A rest of which another process had all is
        // over before its first look.
        let rest = NextLook { after: Duration::from_millis(1), at_rest: Duration::from_millis(20) };
        lock(&tenant.inbox).woken = false;
        for own in [0, OWN_READS] {
            let (begun, before) = (Instant::now(), keeper.quiet_rounds);
            while keeper.quiet_rounds == before {
                keeper.left_out = own;
                assert!(keeper.wait(rest).is_empty());
                assert!(is_unchanged(&keeper) && keeper.left_out >= own, "it slept");
                assert!(begun.elapsed() < HANGS, "no look was left out");
            }
        }
        child.kill().expect("it sleeps");
        child.wait().expect("it was killed");
    }

    #[test]
    fn a_gauge_tells_memory_that_came() {
        let path = std::env::temp_dir().join(format!("strata-gauge-{}", std::process::id()));
        std::fs::write(&path, "4096\n").expect("file");
        let gauge =
            Gauge::open(path.to_str().expect("a name").into(), None).expect("it was written");
        assert_eq!(gauge.read().as_ref(), Some(&gauge.said));
        std::fs::write(&path, "8192\n").expect("file");
        assert_ne!(gauge.read().as_ref(), Some(&gauge.said));
        let gauge = gauge.again().expect("it is there");
        assert_eq!(gauge.read().as_ref(), Some(&gauge.said));
        std::fs::write(&path, "").expect("file");
        assert!(gauge.read().is_none() && gauge.again().is_none(), "it says nothing");
        std::fs::remove_file(&path).expect("file");
        assert!(Gauge::open(path.to_str().expect("a name").into(), None).is_none());
    }
}
