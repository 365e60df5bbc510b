//! A Redis under Strata: snapshots while clients work, a crash and a rollback.

use super::{
    Trial,
    observe::{at_full_speed, watched},
    place::{Place, kill_hard, until_right},
    rows::{Column, Measure},
};
use crate::{
    interrupt,
    janitor::Registered,
    keys::Pattern,
    process,
    random::mix,
    records::Records,
    redis::{
        load::{Client, Workload, key_name},
        resp::{Connection, encode},
    },
    strata::Strata,
};
use anyhow::{Context, Result, bail};
use std::{
    process::Command,
    thread,
    time::{Duration, Instant},
};
use strata_api::{SnapshotInfo, TenantState};

/// One key in so many is written between the first snapshot and the second.
const CHANGED_ONE_IN: usize = 100;
/// Longest wait until a daemon has noticed that its tenant was killed.
const NOTICE_PATIENCE: Duration = Duration::from_secs(10);
/// A version that no load writes.
const LATER_VERSION: u32 = 1 << 20;
/// "Back at its former speed": at this share of it, over this time.
const BACK: f64 = 0.9;
const BACK_WINDOW: Duration = Duration::from_millis(200);
/// How often longer than the quiet time that is waited for.
const BACK_PATIENCE: u32 = 4;

/// A tenant with its daemon. Fields drop in this order.
pub(super) struct Tenant {
    pub name: String,
    _stopping: Registered,
    pub place: Place,
    pub strata: Strata,
}

impl Tenant {
    /// Starts a daemon, and a Redis with all its records under it.
    pub(super) fn start(trial: &Trial<'_>, budget_bytes: u64, listens: bool) -> Result<Self> {
        let janitor = &trial.bench.janitor;
        let environment = [("STRATA_CRIU", trial.criu.path())];
        let mut strata =
            Strata::start_with(janitor, &trial.bench.plan.binaries, &environment, None)?;
        // The daemon must outlive a tenant that crashes.
        strata.keep(janitor)?;
        let place = Place::make(janitor, &trial.name, listens)?;
        let name = trial.name.clone();
        let stopping = strata.stopping(janitor, &name)?;
        let pid = place.start(&strata.wrapping(&name, budget_bytes), &[])?;
        place.wait_until_up(pid)?;
        trial.pin(pid)?;
        let tenant = Self { name, _stopping: stopping, place, strata };
        trial.load(&tenant.client(trial))?;
        thread::sleep(trial.quiet());
        Ok(tenant)
    }

    pub(super) fn client(&self, trial: &Trial<'_>) -> Client {
        trial.client(self.place.unix())
    }

    /// The tenant's process, and since a restore that need not be a child.
    pub(super) fn pid(&self) -> Result<u32> {
        let stats = self.strata.stats(&self.name)?;
        stats.pids.first().copied().context("the tenant has no process")
    }

    /// `strata snapshot`: what is listed of it, and when the command began and
    /// ended.
    pub(super) fn snapshot(&self) -> Result<Taken> {
        let begin = Instant::now();
        let id = self.strata.ask(&["snapshot", &self.name])?;
        let end = Instant::now();
        let info = self.strata.snapshot_info(&self.name, id.trim())?;
        Ok(Taken { info, begin, end })
    }

    fn remove(&self, taken: &Taken) -> Result<()> {
        self.strata.ask(&["snapshot", "rm", &taken.info.id.to_string()]).map(|_| ())
    }

    /// Until the daemon knows that the tenant has ended: one that it takes for
    /// alive it does not restore.
    fn wait_until_ended(&self) -> Result<Duration> {
        let begin = Instant::now();
        while self.strata.stats(&self.name)?.state != TenantState::Ended {
            interrupt::check()?;
            if begin.elapsed() >= NOTICE_PATIENCE {
                bail!("its daemon takes the killed tenant for alive");
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(begin.elapsed())
    }

    fn bring_back(&self, arguments: &[&str]) -> Command {
        self.strata.command(arguments)
    }
}

pub(super) struct Taken {
    pub info: SnapshotInfo,
    begin: Instant,
    end: Instant,
}

impl Taken {
    fn frozen_ms(&self) -> f64 {
        self.info.freeze_us as f64 / 1e3
    }

    /// When the background capture began: it ended with the command.
    fn capture_began(&self) -> Instant {
        let background = self.info.capture_us.saturating_sub(self.info.freeze_us);
        self.end
            .checked_sub(Duration::from_micros(background))
            .unwrap_or(self.begin)
            .max(self.begin)
    }
}

/// All of one tenant.
pub(super) fn run(trial: &mut Trial<'_>, column: Column, budget_bytes: u64) -> Result<()> {
    trial.progress.part("starting");
    let tenant = Tenant::start(trial, budget_bytes, true)?;
    let stats = tenant.strata.stats(&tenant.name)?;
    trial.put(column, Measure::Size, process::memory(tenant.pid()?).anonymous_bytes as f64 / 1e6);
    trial.note("before", serde_json::to_value(&stats)?);
    trial.step("snapshots while a client waits", |trial| watch(trial, column, &tenant))?;
    let mut former = None;
    for (what, reads, measure) in [
        ("reads at full speed", 1.0, Measure::CaptureReads),
        ("1:1 at full speed", 0.5, Measure::CaptureMixed),
    ] {
        let rate = trial.step(what, |trial| full_speed(trial, column, &tenant, reads, measure))?;
        former = former.or(rate);
    }
    let last = trial.step("the snapshot to come back to", |_| tenant.snapshot())?;
    let Some(last) = last else { return Ok(()) };
    trial.note("last snapshot", serde_json::to_value(&last.info)?);
    let id = last.info.id.to_string();
    // Of the second restore it is known what was touched first after the first.
    let mut back = None;
    for (what, reply, speed) in [
        ("crash", Measure::Crash, Measure::BackAtSpeed),
        ("crash again", Measure::CrashAgain, Measure::BackAgain),
    ] {
        back = trial.step(what, |trial| crash(trial, column, &tenant, &id, reply))?;
        if back.is_none() {
            break;
        }
        trial.step("back at speed", |trial| {
            back_at_speed(trial, (column, speed), &tenant, former)
        })?;
    }
    if back.is_some() {
        trial.step("rollback", |trial| rollback(trial, column, &tenant, &id))?;
    }
    let stats = tenant.strata.stats(&tenant.name)?;
    trial.note("after", serde_json::to_value(&stats)?);
    Ok(())
}

fn watch(trial: &mut Trial<'_>, column: Column, tenant: &Tenant) -> Result<()> {
    let endpoint = tenant.place.tcp()?;
    let core = trial.bench.plan.client_core;
    let quiet = trial.quiet();
    let ((), seen) = watched(&endpoint, &trial.expect, core, || {
        thread::sleep(quiet);
        Ok(())
    })?;
    trial.note("client, quiet", serde_json::to_value(seen)?);

    let (first, seen) = watched(&endpoint, &trial.expect, core, || tenant.snapshot())?;
    trial.put(column, Measure::Freeze, first.frozen_ms());
    trial.put(column, Measure::Took, (first.end - first.begin).as_secs_f64());
    trial.put_seen(column, &seen);
    trial.note("client, first snapshot", serde_json::to_value(seen)?);
    trial.note("first snapshot", serde_json::to_value(&first.info)?);

    let changed = change_some(trial, tenant)?;
    let (second, seen) = watched(&endpoint, &trial.expect, core, || tenant.snapshot())?;
    trial.put(column, Measure::SecondFreeze, second.frozen_ms());
    let share = second.info.copied_pages as f64 / changed as f64;
    trial.put(column, Measure::SecondShare, share);
    trial.note("client, second snapshot", serde_json::to_value(seen)?);
    trial.note("second snapshot", serde_json::to_value(&second.info)?);
    tenant.remove(&second)?;
    tenant.remove(&first)
}

/// Writes one key of a hundred; how many.
fn change_some(trial: &Trial<'_>, tenant: &Tenant) -> Result<usize> {
    let mut connection = Connection::open(&tenant.place.unix())?;
    let (mut request, mut record) = (Vec::new(), Vec::new());
    for index in (0..trial.expect.count()).step_by(CHANGED_ONE_IN) {
        trial.expect.begin_write(index, &mut record);
        request.clear();
        encode(&mut request, &[b"SET", &key_name(index), &record]);
        connection.send(&request)?;
        connection.receive(|| ())?;
        trial.expect.confirm_write(index);
    }
    Ok(trial.expect.count().div_ceil(CHANGED_ONE_IN as u64) as usize)
}

/// A snapshot while clients work at full speed; with none of the tenant's before
/// it, so that all must be captured. Gives the rate without.
fn full_speed(
    trial: &mut Trial<'_>,
    column: Column,
    tenant: &Tenant,
    reads: f64,
    measure: Measure,
) -> Result<f64> {
    let quiet = trial.quiet();
    let workload =
        Workload { pattern: Pattern::Uniform, reads, ..trial.bench.plan.workload.clone() };
    let client = tenant.client(trial);
    let ((from, taken, to), course) = at_full_speed(&client, &workload, &trial.expect, || {
        // Not counted: until it goes at an even pace.
        thread::sleep(quiet);
        let from = Instant::now();
        thread::sleep(quiet);
        let taken = tenant.snapshot()?;
        // Its own end is not the capture's.
        thread::sleep(quiet);
        Ok((from, taken, Instant::now()))
    })?;
    tenant.remove(&taken)?;
    let (before, after) = (course.rate(from, taken.begin), course.rate(taken.end, to));
    let none = f64::midpoint(before, after);
    let in_capture = course.rate(taken.capture_began(), taken.end);
    trial.put(column, measure, in_capture / none);
    trial.note(
        if reads < 1.0 { "1:1" } else { "reads" },
        serde_json::json!({
            "before_per_second": before,
            "capture_per_second": in_capture,
            "after_per_second": after,
            "snapshot": taken.info,
        }),
    );
    Ok(before)
}

fn crash(
    trial: &mut Trial<'_>,
    column: Column,
    tenant: &Tenant,
    id: &str,
    reply: Measure,
) -> Result<()> {
    let gone = kill_hard(tenant.pid()?)?;
    trial.put(column, Measure::Gone, gone.as_secs_f64() * 1e3);
    let noticed = tenant.wait_until_ended()?;
    trial.note("until its daemon noticed, ms", noticed.as_secs_f64() * 1e3);
    let (key, value) = trial.known(trial.some_index(1));
    let mut command = tenant.bring_back(&["restore", id]);
    let (replied, ended) = until_right(&mut command, &tenant.place.unix(), (&key, &value))?;
    trial.put(column, reply, replied.as_secs_f64() * 1e3);
    trial.note("restore command, ms", ended.as_secs_f64() * 1e3);
    trial.pin(tenant.pid()?)
}

/// Until a restored tenant is as fast as it was, and whether it is as it was.
fn back_at_speed(
    trial: &mut Trial<'_>,
    (column, measure): (Column, Measure),
    tenant: &Tenant,
    former: Option<f64>,
) -> Result<()> {
    let client = tenant.client(trial);
    if let Some(former) = former {
        let workload =
            Workload { pattern: Pattern::Uniform, reads: 1.0, ..trial.bench.plan.workload.clone() };
        let patience = trial.quiet() * BACK_PATIENCE;
        let (from, course) = at_full_speed(&client, &workload, &trial.expect, || {
            let from = Instant::now();
            thread::sleep(patience);
            Ok(from)
        })?;
        match course.reaches(from, BACK_WINDOW, BACK * former) {
            Some(after) => trial.put(column, measure, after.as_secs_f64()),
            None => trial.figures.remark(format!(
                "{}: not at 90 % of its former speed within {} s of the first reply",
                trial.title(),
                patience.as_secs_f64()
            )),
        }
        trial.note("restored, per second at the end", {
            let end = from + patience;
            course.rate(end - BACK_WINDOW * 2, end)
        });
    }
    trial.verify(&client)
}

fn rollback(trial: &mut Trial<'_>, column: Column, tenant: &Tenant, id: &str) -> Result<()> {
    let index = trial.some_index(2);
    let (key, value) = trial.known(index);
    // Written after the snapshot: the old value is what the rollback brings.
    let mut later = Vec::new();
    let seed = mix(trial.bench.plan.workload.seed);
    Records::new(seed).fill(index, LATER_VERSION, &mut later);
    Connection::open(&tenant.place.unix())?.call(&[b"SET", &key, &later])?;
    let mut command = tenant.bring_back(&["rollback", &tenant.name, id]);
    let (replied, ended) = until_right(&mut command, &tenant.place.unix(), (&key, &value))?;
    trial.put(column, Measure::Rollback, replied.as_secs_f64() * 1e3);
    trial.note("rollback command, ms", ended.as_secs_f64() * 1e3);
    trial.verify(&tenant.client(trial))
}
