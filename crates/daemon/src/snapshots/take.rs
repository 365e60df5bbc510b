//! Taking a snapshot.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use strata_api::{Progress, SnapshotId, SnapshotInfo, SnapshotState, Unit};
use strata_pager::{Captured, Freeze, SnapshotError, SnapshotRequest, Stand, Tenant};
use strata_snapshot::{Criu, Dump, DumpOptions, FrozenProcess, is_ending, process_tree};
use strata_sys::{Pidfd, Priority, log};
use strata_units::PAGE_SIZE;

use super::disk::{Known, Process};
use super::gone::LOOK_EVERY;
use super::machine::Machine;
use super::moving::Once;
use super::revive::helper;
use super::{Snapshots, Tell, lock};

pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Read in some tens of milliseconds, while the program stands still.
pub(super) const FEW_PAGES: u64 = 8192;

/// How long a moment is waited for in which the processes of a tenant neither come nor
/// go.
const RESTLESS_PATIENCE: Duration = Duration::from_secs(20);
/// How often CRIU may fail meanwhile for no reason that is seen.
const MOST_FAILURES: u32 = 5;
const RESTLESS: &str = "its processes come and go all the time";

/// Why nothing is known of what gave back memory when it was frozen: another attempt may do.
pub(super) const TORN: &str = "it gave back memory at that moment";

/// Why there is no snapshot.
pub(super) fn in_words(error: SnapshotError) -> String {
    match error {
        SnapshotError::Torn => TORN.to_owned(),
        SnapshotError::Failed(why) | SnapshotError::Restless(why) => why,
    }
}

/// Processes' numbers in their own pid namespace, by their numbers here.
pub(super) type Numbers = BTreeMap<u32, u32>;

/// How many pages are captured.
pub(super) fn captured(done: u64, total: u64) -> Progress {
    Progress {
        what: "capturing".into(),
        done: bytes(done),
        total: Some(bytes(total)),
        unit: Unit::Bytes,
    }
}

fn bytes(pages: u64) -> u64 {
    pages * PAGE_SIZE as u64
}

impl Snapshots {
    /// Takes a snapshot.
    pub(crate) fn take(
        &self,
        tenant: &Arc<Tenant>,
        label: Option<String>,
        scheduled: bool,
        tell: Tell<'_>,
    ) -> Result<SnapshotInfo, String> {
        if self.check_user(tenant.record().uid).is_err() && !self.may_take_libvirts(tenant)? {
            self.check_user(tenant.record().uid)?;
        }
        let _turn = self.turn(&tenant.record().name)?;
        self.take_in_turn(tenant, label, scheduled, tell)
    }

    /// Takes the snapshot that `asking`, a process of the tenant, asks for. None if
    /// it ended before its turn, for a rollback puts another process in its place.
    pub(crate) fn take_for(
        &self,
        asking: &Pidfd,
        tenant: &Arc<Tenant>,
        label: Option<String>,
        tell: Tell<'_>,
    ) -> Result<SnapshotInfo, String> {
        self.check_user(tenant.record().uid)?;
        let _turn = self.turn(&tenant.record().name)?;
        if asking.has_exited() {
            return Err("the process that asked for it has ended".into());
        }
        self.take_in_turn(tenant, label, false, tell)
    }

    fn take_in_turn(
        &self,
        tenant: &Arc<Tenant>,
        label: Option<String>,
        scheduled: bool,
        tell: Tell<'_>,
    ) -> Result<SnapshotInfo, String> {
        self.check_limit()?;
        let id = self.next_id(&tenant.record().name, label.as_deref())?;
        let mut known = self.capturing(tenant, id.clone());
        (known.info.label, known.info.scheduled) = (label, scheduled);
        lock(&self.known).insert(id.clone(), known.clone());
        let spec = match self.guests.spec(tenant) {
            None => self.guests.libvirts(tenant)?,
            spec => spec,
        };
        let taken = match spec {
            Some(spec) => self.take_guest(tenant, &mut known, spec, tell),
            None => self.take_memory(tenant, &id, false, tell),
        };
        match taken {
            Ok((freeze, numbers)) => {
                known.is_captured(&freeze, &numbers);
                if let Err(why) = self.disk.write(&known) {
                    let _ = self.forget(&known);
                    return Err(why);
                }
                lock(&self.known).insert(id.clone(), known.clone());
                self.descends(tenant, &id);
                self.ready_is_due();
                Ok(known.info)
            }
            Err(why) => {
                let _ = self.forget(&known);
                Err(why)
            }
        }
    }

    /// The first process of a tenant, when nothing is being done with it.
    pub(crate) fn first_process(&self, tenant: &Arc<Tenant>) -> Option<u32> {
        let _turn = self.turn(&tenant.record().name).ok()?;
        let mut pids = tenant.pids();
        pids.retain(|&pid| !is_ending(pid));
        root_of(&pids).ok()
    }

    /// Takes a snapshot of a tenant that is about to be ended: its processes stand
    /// still from the moment that it has, and all of it is there. It is on disk, and
    /// in no list: whoever asked offers it, or forgets it.
    pub(super) fn take_standing(&self, tenant: &Arc<Tenant>) -> Result<Standing, String> {
        let mut standing = self.stand_still(tenant, &Whither::Nowhere)?;
        if let Err(why) = self.disk.write(&standing.known) {
            // It runs on.
            standing.frozen = None;
            let _ = self.forget(&standing.known);
            return Err(why);
        }
        Ok(standing)
    }

    /// The same, and not all of it is on disk.
    pub(super) fn stand_still(
        &self,
        tenant: &Arc<Tenant>,
        whither: &Whither<'_>,
    ) -> Result<Standing, String> {
        let known = self.capturing(tenant, self.number_to_come(&tenant.record().name));
        let criu = self.criu()?;
        let held = Arc::new(Mutex::new(None));
        let until = Until::Ended(&held, whither);
        let taken = self.take_restless(tenant, &criu, &known.info.id, &until, &mut |_| ());
        let mut standing = Standing { known, frozen: lock(&held).take() };
        let written = taken.map_err(in_words).and_then(|(freeze, numbers)| {
            standing.known.is_captured(&freeze, &numbers);
            if matches!(whither, Whither::Lent(_)) {
                // That is the lender's.
                standing.known.processes.iter_mut().for_each(|process| process.memory = None);
            }
            let frozen = standing.frozen.as_ref().ok_or("it does not stand still")?;
            frozen.complete().map_err(|error| error.to_string())
        });
        if let Err(why) = written {
            // It runs on.
            standing.frozen = None;
            let _ = self.forget(&standing.known);
            return Err(why);
        }
        Ok(standing)
    }

    /// What is known of a snapshot that is being taken.
    pub(super) fn capturing(&self, tenant: &Arc<Tenant>, id: SnapshotId) -> Known {
        let record = tenant.record();
        let line = self.line_of(tenant);
        Known {
            info: SnapshotInfo {
                id,
                tenant: record.name.clone(),
                label: None,
                parent: line.parent,
                scheduled: false,
                state: SnapshotState::Capturing,
                reason: String::new(),
                taken: now(),
                size_unique_bytes: 0,
                size_shared_bytes: 0,
                file_bytes: 0,
                pages: 0,
                copied_pages: 0,
                processes: tenant.pids().len() as u32,
                guest: false,
                libvirt: false,
                disks: Vec::new(),
                servers: 0,
                uid: record.uid,
                command: record.command.clone(),
                budget_bytes: tenant.budget_bytes(),
                freeze_us: 0,
                capture_us: 0,
            },
            processes: Vec::new(),
            machine: Some(Machine::here().clone()),
            place: line.place,
            guest: None,
            as_written: None,
            coming: None,
        }
    }

    pub(super) fn take_memory(
        &self,
        tenant: &Arc<Tenant>,
        id: &SnapshotId,
        urgent: bool,
        tell: Tell<'_>,
    ) -> Result<(Freeze, Numbers), String> {
        let criu = self.criu()?;
        // What a program discards between the freeze and the capture cannot be
        // captured any more. Each attempt has less to read than the one before; if it
        // is little, or at last, the program stands still for it.
        for most_frozen_pages in [0, FEW_PAGES, FEW_PAGES, FEW_PAGES, u64::MAX] {
            let until = Until::Captured(most_frozen_pages, urgent);
            match self.take_restless(tenant, &criu, id, &until, tell) {
                Ok(taken) => return Ok(taken),
                Err(SnapshotError::Torn) => {}
                Err(SnapshotError::Failed(why) | SnapshotError::Restless(why)) => return Err(why),
            }
        }
        Err("its memory cannot be captured".into())
    }

    /// Again, while processes of the tenant come and go, which is a matter of the
    /// moment: one that has just begun is nobody's yet.
    fn take_restless(
        &self,
        tenant: &Arc<Tenant>,
        criu: &Criu,
        id: &SnapshotId,
        until: &Until<'_>,
        tell: Tell<'_>,
    ) -> Result<(Freeze, Numbers), SnapshotError> {
        let end = Instant::now() + RESTLESS_PATIENCE;
        let (mut was_restless, mut failures) = (false, 0);
        loop {
            let images = self.disk.make(id).map_err(SnapshotError::Failed)?;
            let pids = calm(tenant, end).map_err(SnapshotError::Failed)?;
            let with = (criu, self.disk.kept_log("dump"));
            match take_once(tenant, &pids, with, &images, until, tell) {
                Err(SnapshotError::Restless(_)) if Instant::now() < end => was_restless = true,
                // Of one that comes and goes CRIU has more to say than can be told apart.
                Err(SnapshotError::Failed(_))
                    if failures < MOST_FAILURES
                        && (was_restless || process_tree(pids[0]) != pids) =>
                {
                    failures += 1;
                }
                outcome => return outcome,
            }
            if let Until::Ended(held, _) = until {
                // What stood still for this attempt runs on.
                drop(lock(held).take());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Waits for a moment in which all processes of a tenant are managed and descend from
/// one of them: these, that one first.
fn calm(tenant: &Tenant, end: Instant) -> Result<Vec<u32>, String> {
    loop {
        let mut managed = tenant.pids();
        managed.retain(|&pid| !is_ending(pid));
        let why = match root_of(&managed) {
            Ok(root) => {
                let mut tree = process_tree(root);
                tree.retain(|&pid| pid == root || !is_ending(pid));
                let strange = tree.iter().find(|pid| !managed.contains(pid));
                match strange {
                    None => return Ok(tree),
                    Some(pid) => format!("process {pid} of it is not managed"),
                }
            }
            Err(why) => why.to_owned(),
        };
        if Instant::now() > end || managed.is_empty() {
            return Err(why);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// A tenant that stands still, all of it in a snapshot. Dropped, it runs on.
pub(super) struct Standing {
    pub(super) known: Known,
    frozen: Option<FrozenProcess>,
}

impl Standing {
    /// Since when it stands still.
    pub(super) fn since(&self) -> Option<Instant> {
        self.frozen.as_ref().map(FrozenProcess::since)
    }

    /// Its processes were killed: returns when they are nobody's any more.
    pub(super) fn end_killed(self) -> Known {
        if let Some(frozen) = self.frozen {
            frozen.end_killed();
        }
        self.known
    }
}

impl Known {
    /// Its memory is captured, and it is usable.
    pub(super) fn is_captured(&mut self, freeze: &Freeze, numbers: &Numbers) {
        self.info.state = SnapshotState::Usable;
        self.info.processes = freeze.processes.len() as u32;
        self.info.copied_pages = freeze.copied_pages;
        self.info.freeze_us = freeze.frozen.as_micros() as u64;
        self.info.capture_us = freeze.captured.as_micros() as u64;
        let process = |captured: &Captured| Process {
            pid: numbers.get(&captured.pid).copied().unwrap_or(captured.pid),
            memory: Some(captured.memory.0),
            restart: captured.restart,
            own: (captured.own.start, captured.own.end),
            needed: captured.needed.iter().map(|r| (r.start, r.end)).collect(),
            settings: captured
                .settings
                .iter()
                .map(|&(range, setting)| (range.start, range.end, setting as u64))
                .collect(),
            touched: Vec::new(),
            touched_then: Vec::new(),
        };
        // What a guest has beside its memory is there.
        let beside = std::mem::take(&mut self.processes);
        self.processes = freeze.processes.iter().map(process).chain(beside).collect();
    }
}

/// How long the processes stand still.
enum Until<'a> {
    /// Until all is captured, if that is no more than so many pages; else until it is
    /// known what is to be; whether the rest is urgent.
    Captured(u64, bool),
    /// Until whoever asked has ended them, or drops this.
    Ended(&'a Arc<Mutex<Option<FrozenProcess>>>, &'a Whither<'a>),
}

/// Where the memory of a program goes that stands still.
pub(super) enum Whither<'a> {
    /// All of it is captured.
    Nowhere,
    /// Elsewhere, while it is read.
    Sent(&'a Once),
    /// Elsewhere, by and by. Whoever lends it takes the snapshot, and returns when it is known
    /// what is to be captured.
    Lent(&'a dyn Fn(SnapshotRequest) -> Result<Freeze, SnapshotError>),
}

/// The process of a tenant that is no other's descendant.
fn root_of(pids: &[u32]) -> Result<u32, &'static str> {
    let has_all = |&&pid: &&u32| {
        let tree = process_tree(pid);
        pids.iter().all(|pid| tree.contains(pid))
    };
    match pids.iter().find(has_all) {
        Some(&root) => Ok(root),
        None if pids.is_empty() => Err("it has no process"),
        None => Err("its processes do not descend from one of them"),
    }
}

/// `pids`: its processes, the first one first.
fn take_once(
    tenant: &Arc<Tenant>,
    pids: &[u32],
    (criu, kept_log): (&Criu, PathBuf),
    images: &Path,
    until: &Until<'_>,
    tell: Tell<'_>,
) -> Result<(Freeze, Numbers), SnapshotError> {
    let (root, pids) = (pids[0], pids.to_vec());
    let (frozen, stand, most_frozen_pages, urgent) = match until {
        &Until::Captured(most, urgent) => (Arc::default(), Stand::Briefly, most, urgent),
        Until::Ended(held, Whither::Lent(_)) => (Arc::clone(held), Stand::Meanwhile, 0, true),
        Until::Ended(held, _) => (Arc::clone(held), Stand::UntilCaptured, u64::MAX, true),
    };
    let carry = match until {
        Until::Ended(_, Whither::Sent(once)) => Some(once.carry()),
        _ => None,
    };
    let held = Arc::clone(&frozen);
    let numbers = Arc::new(Mutex::new(Numbers::new()));
    let numbered = Arc::clone(&numbers);
    let (criu, images) = (criu.clone(), images.to_owned());
    let name = tenant.record().name.clone();
    let request = SnapshotRequest {
        freeze: Box::new(move || {
            if process_tree(root) != pids {
                return Err(SnapshotError::Restless(RESTLESS.to_owned()));
            }
            // All of it is the pager's.
            let options = DumpOptions {
                hide_memory: true,
                helper: helper().ok(),
                kept_log: Some(kept_log),
                ..DumpOptions::default()
            };
            let process = Dump::begin(&criu, root, &images, &options).map_err(|error| {
                let why = error.to_string();
                match process_tree(root) != pids || error.is_of_the_moment() {
                    true => SnapshotError::Restless(why),
                    false => SnapshotError::Failed(why),
                }
            })?;
            if let Some(why) = process.late() {
                log(
                    Priority::Warning,
                    format_args!("{name}: its processes stopped at the second attempt: {why}"),
                );
            }
            let since = process.since();
            *lock(&held) = Some(process);
            let pids = process_tree(root);
            let own = |&pid: &u32| Some((pid, number_within(pid)?));
            *lock(&numbered) = pids.iter().filter_map(own).collect();
            Ok(strata_pager::Standing { pids, since })
        }),
        thaw: Box::new(move || {
            if stand != Stand::Briefly {
                return Ok(());
            }
            let process = lock(&frozen).take();
            process.map_or(Ok(()), |process| {
                process.thaw().map(|_| ()).map_err(|error| error.to_string())
            })
        }),
        most_frozen_pages,
        stand,
        urgent,
        only: None,
        carry,
        frozen: None,
    };
    let taken = match until {
        Until::Ended(_, Whither::Lent(take)) => take(request),
        _ => tenant.snapshot(request, |done, total| tell(captured(done, total))),
    };
    taken.map(|freeze| {
        let numbers = std::mem::take(&mut *lock(&numbers));
        (freeze, numbers)
    })
}

/// A process's number in its own pid namespace, which is what CRIU knows it by.
pub(super) fn number_within(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_ascii_whitespace().last()?.parse().ok()
}
