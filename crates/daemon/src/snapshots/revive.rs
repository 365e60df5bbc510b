//! Bringing processes back from a snapshot: rollback, restore, clone.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::Builder;
use std::time::{Duration, Instant};

use strata_api::{
    AGENT_SOCKET_NAME, Net, PortForward, Progress, SnapshotRef, Tcp, Unit, clone_name,
};
use strata_pager::{Setting, Space, Tenant};
use strata_snapshot::{Restore, RestoreError, RestoreOptions, Shown, Terminals};
use strata_sys::{
    Pidfd, Process as Held, Range, SIGKILL, collect_child, forget_collected, give_core_filter,
};

use super::copies::{copy_directory, really, to_copy};
use super::disk::{Known, Place, Process};
use super::gone::{LOOK_EVERY, ends, wait_gone_again};
use super::machine::Machine;
use super::preparing::Preparing;
use super::{Snapshots, Tell, WORK, remove_flat, unfinished, wish_of};
use crate::cgroup::Cgroups;

/// Between the end of a process's memory and its own.
const GONE_WITHIN: Duration = Duration::from_secs(1);
/// How long it is tried again where somebody else got a number before CRIU did.
const TAKEN_PATIENCE: Duration = Duration::from_secs(3);
/// How long the agents of restored processes may take to say hello.
const HELLO_PATIENCE: Duration = Duration::from_secs(10);
/// The program that CRIU runs at each step of a restore, and is started with for a clone:
/// beside this one, or where it is installed.
const HELPER: &str = "strata-clone";
const INSTALLED_HELPER: &str = "/usr/lib/strata/strata-clone";

/// Why nothing was brought back, or not in whole.
struct Unrevived {
    why: String,
    /// Somebody else has a number that it needs, and may end.
    is_taken: bool,
}

impl From<String> for Unrevived {
    fn from(why: String) -> Self {
        Self { why, is_taken: false }
    }
}

impl From<RestoreError> for Unrevived {
    fn from(error: RestoreError) -> Self {
        Self { is_taken: error.is_taken(), why: error.to_string() }
    }
}

/// What clones are asked to be.
pub(crate) struct CloneWish {
    pub(crate) count: u32,
    pub(crate) name: Option<String>,
    pub(crate) net: Net,
    pub(crate) forwards: Vec<PortForward>,
    pub(crate) tcp: Tcp,
    pub(crate) copy_dirs: Vec<String>,
}

/// A tenant that came to life.
pub(crate) struct Revived {
    pub(crate) name: String,
    pub(crate) pid: u32,
    pub(crate) forwards: Vec<PortForward>,
    /// What the user should know.
    pub(crate) notes: Vec<String>,
}

/// How processes are brought back.
pub(super) struct How {
    /// Else those inside are closed: somebody else on the network may have them.
    pub(super) keep_connections: bool,
    /// For those that they had.
    pub(super) terminals: Terminals,
}

/// How far it is with what is brought back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// It stands, whole.
    Stands,
    /// Nothing is left to do but to let it run.
    Runs,
}

/// Decides whether it goes on from there: an error ends it.
pub(super) type Hold<'a> = &'a mut dyn FnMut(At) -> Result<(), String>;

/// Processes that came back.
pub(crate) struct Life {
    /// The first one.
    pub(crate) pid: u32,
    /// What the user should know.
    pub(crate) notes: Vec<String>,
}

/// Of whoever could not be put where its memory is counted.
const NO_CGROUP: &str = "it is not in its memory cgroup: memory that grows before it is managed can \
    exceed the budget (see docs/limits.md)";

/// Of who had a terminal when there is none.
const NO_TERMINAL: &str =
    "the terminal that it had is gone: what it prints is lost (it has /dev/null in that place)";

fn range(&(start, end): &(u64, u64)) -> Range {
    Range { start, end }
}

impl Snapshots {
    /// A snapshot that is to be brought back. A persisted one may have been taken
    /// on another machine.
    pub(super) fn fitting(
        &self,
        uid: u32,
        named: &SnapshotRef,
        tell: Tell<'_>,
    ) -> Result<(Known, Arc<Tenant>), String> {
        let found = self.loaded(uid, named, tell)?;
        let machine = found.0.machine.as_ref();
        match machine.and_then(|machine| machine.unfit_for(Machine::here(), false)) {
            Some(why) => Err(why),
            None => Ok(found),
        }
    }

    /// Brings a tenant back that has ended; under another name, if one is given.
    pub(crate) fn restore(
        &self,
        uid: u32,
        named: &SnapshotRef,
        name: Option<String>,
        terminals: Terminals,
        tell: Tell<'_>,
    ) -> Result<Revived, String> {
        let name = match name {
            Some(name) => name,
            None => self.find(uid, named)?.info.tenant,
        };
        let _turn = self.turn(&name)?;
        let (known, origin) = self.fitting(uid, named, tell)?;
        known.is_of_programs()?;
        if name == known.info.tenant {
            if !ends(&origin) {
                return Err(format!(
                    "{name} is running; a living tenant is rolled back (strata rollback) or cloned"
                ));
            }
            let mut forwards = Vec::new();
            if self.line_of(&origin).place != known.place {
                forwards = self.settle(&origin, known.place.clone())?;
            }
            let preparing = Preparing::begin(&origin, &origin, &known)?;
            let how = How { keep_connections: true, terminals };
            let life = self.revive(&origin, &known, preparing, how)?;
            self.descends(&origin, &known.info.id);
            let notes = life.notes;
            return Ok(Revived { name, pid: life.pid, forwards, notes });
        }
        // A clone is a clone under any name; its ports may still lead to the first.
        let place = known.place.clone().map(|place| Place { forwards: Vec::new(), ..place });
        let how = How { keep_connections: true, terminals };
        self.revive_beside(&origin, &known, name, place, how, Vec::new())
    }

    /// Starts further tenants from a snapshot: all, or none.
    pub(crate) fn start_clones(
        &self,
        uid: u32,
        named: &SnapshotRef,
        wish: &CloneWish,
        terminals: &Terminals,
        tell: Tell<'_>,
    ) -> Result<Vec<Revived>, String> {
        let (known, origin) = self.fitting(uid, named, tell)?;
        known.is_of_programs()?;
        let base = match &wish.name {
            Some(name) => name.clone(),
            None => self.free_clone_name(&known.info.tenant, wish.count),
        };
        let mut revived: Vec<Revived> = Vec::new();
        for index in 1..=wish.count {
            let name = clone_name(&base, index, wish.count);
            let shift = |wish: &PortForward| PortForward {
                // 0 is any; the request was checked for the others to fit.
                host: if wish.host == 0 { 0 } else { wish.host + (index - 1) as u16 },
                guest: wish.guest,
            };
            let forwards = wish.forwards.iter().map(shift).collect();
            match self.clone_one(&origin, &known, name, wish, forwards, terminals.again()) {
                Ok(one) => revived.push(one),
                Err(why) => {
                    for one in revived {
                        if let Some(tenant) = self.tenants.get(known.info.uid, &one.name) {
                            tenant.kill();
                        }
                    }
                    self.remove_copies();
                    return Err(why);
                }
            }
            tell(Progress {
                what: "cloning".into(),
                done: u64::from(index),
                total: Some(u64::from(wish.count)),
                unit: Unit::Tenants,
            });
        }
        Ok(revived)
    }

    /// A name of which no clone is taken.
    pub(super) fn free_clone_name(&self, tenant: &str, count: u32) -> String {
        let is_free = |base: &String| {
            (1..=count).all(|index| self.own_tenant(&clone_name(base, index, count)).is_none())
        };
        (1u32..)
            .map(|number| match number {
                1 => format!("{tenant}-clone"),
                _ => format!("{tenant}-clone{number}"),
            })
            .find(is_free)
            .expect("numbers do not run out before tenants")
    }

    fn clone_one(
        &self,
        origin: &Arc<Tenant>,
        known: &Known,
        name: String,
        wish: &CloneWish,
        forwards: Vec<PortForward>,
        terminals: Terminals,
    ) -> Result<Revived, String> {
        let _turn = self.turn(&name)?;
        let mut notes = Vec::new();
        // Of a clone: what is to be copied is what that one sees.
        let seen = known.place.clone().unwrap_or_default().shown;
        let mut shown = Vec::new();
        for (index, path) in to_copy(&wish.copy_dirs, &seen).into_iter().enumerate() {
            let copies = self.disk.copies(&name);
            let copy = copies.join(index.to_string());
            copy_directory(&really(&path, &seen), &copy).inspect_err(|_| {
                // What is left is removed with what ended clones leave.
                let _ = std::fs::remove_dir_all(&copies);
            })?;
            notes.push(format!("{name} sees {} as {}", copy.display(), path.display()));
            shown.push((copy, path));
        }
        // What is not copied anew is shared with it.
        let is_shared = |(_, path): &(PathBuf, PathBuf)| !shown.iter().any(|(_, own)| own == path);
        let shared: Vec<_> = seen.into_iter().filter(is_shared).collect();
        shown.extend(shared);
        // What lies in another one is shown after it.
        shown.sort_by_key(|(_, path)| path.components().count());
        let place = Place { own_network: wish.net == Net::New, shown, forwards };
        let keep_connections = place.own_network || wish.tcp == Tcp::Keep;
        let how = How { keep_connections, terminals };
        self.revive_beside(origin, known, name, Some(place), how, notes)
    }

    /// Restores into a new tenant that shares the pages of `origin`.
    fn revive_beside(
        &self,
        origin: &Arc<Tenant>,
        known: &Known,
        name: String,
        place: Option<Place>,
        how: How,
        mut notes: Vec<String>,
    ) -> Result<Revived, String> {
        let wish = wish_of(&known.info, &name);
        let (tenant, warnings) = self.tenants.create_beside(wish, origin)?;
        notes.extend(warnings);
        let outcome = self.settle(&tenant, place).and_then(|forwards| {
            let preparing = Preparing::begin(&tenant, origin, known)?;
            let life = self.revive(&tenant, known, preparing, how)?;
            Ok((forwards, life))
        });
        match outcome {
            Ok((forwards, life)) => {
                self.descends(&tenant, &known.info.id);
                notes.extend(life.notes.into_iter().map(|note| format!("{name}: {note}")));
                Ok(Revived { name, pid: life.pid, forwards, notes })
            }
            Err(why) => {
                self.tenants.discard(&tenant);
                Err(why)
            }
        }
    }

    /// Restores the processes of a snapshot into `tenant`, which has none; the
    /// first one's number.
    pub(super) fn revive(
        &self,
        tenant: &Arc<Tenant>,
        known: &Known,
        preparing: Preparing,
        how: How,
    ) -> Result<Life, String> {
        self.revive_held(tenant, known, preparing, how, &mut |_| Ok(()))
    }

    /// The same; what comes back stands still until `hold` lets it run.
    pub(super) fn revive_held(
        &self,
        tenant: &Arc<Tenant>,
        known: &Known,
        mut preparing: Preparing,
        how: How,
        hold: Hold<'_>,
    ) -> Result<Life, String> {
        let deadline = Instant::now() + TAKEN_PATIENCE;
        loop {
            match self.revive_once(tenant, known, &mut preparing, &how, hold) {
                Err(Unrevived { is_taken: true, .. }) if Instant::now() < deadline => {
                    wait_gone_again(tenant).map_err(str::to_owned)?;
                    preparing.again()?;
                }
                outcome => return outcome.map_err(|failed| failed.why),
            }
        }
    }

    fn revive_once(
        &self,
        tenant: &Arc<Tenant>,
        known: &Known,
        preparing: &mut Preparing,
        how: &How,
        hold: Hold<'_>,
    ) -> Result<Life, Unrevived> {
        let mut options = RestoreOptions::new(helper()?);
        (options.keep_connections, options.terminals) =
            (how.keep_connections, how.terminals.again());
        options.kept_log = Some(self.disk.kept_log("restore"));
        if let Some(place) = self.line_of(tenant).place {
            options.own_pids = true;
            options.own_network = place.own_network;
            let shown = place.shown.into_iter();
            options.shown = shown.map(|(copy, path)| Shown { copy, path }).collect();
        }
        options.group =
            tenant.record().cgroup.as_ref().and_then(|path| Cgroups::tasks_file(path.as_ref()));
        let work = self.work_directory();
        let mut alive = Vec::new();
        let with = (options, hold);
        let outcome = self.revive_in(&work, tenant, known, preparing, with, &mut alive);
        if outcome.is_err() {
            for held in alive {
                held.pidfd().signal(SIGKILL);
            }
        }
        remove_flat(&work);
        self.ready_is_due();
        outcome
    }

    /// For one restore. A name of its own: somebody who is just being ended may still
    /// write to the last one.
    pub(super) fn work_directory(&self) -> PathBuf {
        let number = self.restores.fetch_add(1, Ordering::Relaxed);
        self.work.join(format!("{WORK}{}-{number}", std::process::id()))
    }

    fn revive_in(
        &self,
        work: &Path,
        tenant: &Arc<Tenant>,
        known: &Known,
        preparing: &mut Preparing,
        (options, hold): (RestoreOptions, Hold<'_>),
        alive: &mut Vec<Arc<Held>>,
    ) -> Result<Life, Unrevived> {
        // Of an earlier life: an ended process that nobody has collected holds its
        // number.
        for process in &known.processes {
            collect_child(process.pid);
            forget_collected(process.pid);
        }
        let criu = self.criu()?;
        let images = self.disk.images(&known.info.id);
        let mut restore = Restore::begin(&criu, &images, work, options)?;
        let mut adopting = None;
        if let (Some(directory), Some(pid)) = (&tenant.record().cgroup, restore.forefather())
            && !Cgroups::has(directory.as_ref(), pid)
        {
            // What it starts is there, too. The kernel takes its time for that, in which
            // CRIU reads its images.
            let directory = PathBuf::from(directory);
            // A child of this process, which collects it last.
            let adopt = move || Cgroups::adopt(&directory, pid, &Pidfd::open(pid)?);
            // Without the thread each process is put there when it comes.
            adopting = Builder::new().name("adopt".into()).stack_size(64 << 10).spawn(adopt).ok();
        }
        let no_terminal = restore.lacks_terminal().then(|| NO_TERMINAL.to_owned());
        let agent_socket = self.work.join(AGENT_SOCKET_NAME);
        let mut spaces = Vec::new();
        while let Some(arrival) = restore.next_arrival()? {
            let is_it = |process: &&Process| process.pid == arrival.old_pid;
            let process = known.processes.iter().find(is_it);
            let process =
                process.ok_or_else(|| "CRIU restores a process that is not known".to_owned())?;
            // A child of CRIU that has not run yet, and whose number nobody has collected.
            let held = Held::open(arrival.pid).map_err(|error| error.to_string())?;
            let held = Arc::new(held);
            alive.push(Arc::clone(&held));
            unfinished::note(work, arrival.pid).map_err(|error| error.to_string())?;
            // One that is gone by now has no dump either.
            let _ = give_core_filter(arrival.pid);
            if let Some(directory) = &tenant.record().cgroup
                && !Cgroups::has(directory.as_ref(), arrival.pid)
            {
                // Without it its memory is counted process by process.
                let _ = Cgroups::adopt(directory.as_ref(), arrival.pid, held.pidfd());
            }
            let prepared = preparing.of(process.pid)?;
            let space = tenant
                .restore(prepared, held, arrival.userfaultfd, process.restart, &agent_socket)
                .map_err(|error| error.to_string())?;
            let settings = process.settings.iter().filter_map(|&(start, end, number)| {
                Some((Range { start, end }, Setting::of(number)?))
            });
            tenant
                .set_restored(&space, &settings.collect::<Vec<_>>())
                .map_err(|error| error.to_string())?;
            spaces.push((space, process));
        }
        for ((space, process), held) in spaces.iter().zip(alive.iter()) {
            let needed: Vec<Range> = process.needed.iter().map(range).collect();
            let prepared = tenant.restored_stands(
                space,
                range(&process.own),
                &needed,
                &process.wanted(),
                (process.restart, &agent_socket),
            );
            match prepared {
                // Somebody has killed it.
                Err(_) if held.pidfd().exits_within(GONE_WITHIN) => {}
                done => done.map_err(|error| error.to_string())?,
            }
        }
        // Whoever sees it run sees it in its group.
        if let Some(adopting) = adopting {
            let _ = adopting.join();
        }
        let is_outside = |directory: &String| {
            let mut living = alive.iter().filter(|held| !held.has_exited());
            living.any(|held| !Cgroups::has(directory.as_ref(), held.pid()))
        };
        let no_cgroup = tenant.record().cgroup.as_ref().filter(|directory| is_outside(directory));
        let no_cgroup = no_cgroup.map(|_| NO_CGROUP.to_owned());
        hold(At::Stands)?; // From here on it is not tried again: it may have run.
        restore.let_go().map_err(|error| error.to_string())?;
        hold(At::Runs)?;
        let tree = restore.finish().map_err(|error| error.to_string())?;
        if let Some(mut keeper) = tree.keeper {
            // Somebody must collect it when the clone has ended.
            let collected = Builder::new()
                .name("clone".into())
                .stack_size(64 << 10)
                .spawn(move || keeper.wait(None));
            collected.map_err(|error| format!("no thread for a clone: {error}"))?;
        }
        let deadline = Instant::now() + HELLO_PATIENCE;
        // One that has ended by then says no more: it found a connection closed, say.
        let is_there = |((space, _), held): (&(Arc<Space>, _), &Arc<Held>)| {
            space.pid().is_some() || held.has_exited()
        };
        while !spaces.iter().zip(alive.iter()).all(is_there) {
            if Instant::now() > deadline {
                return Err("the agents of its processes do not say hello".to_owned().into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let touched = spaces.into_iter().map(|(space, process)| (process.pid, space)).collect();
        self.remember_touched(&known.info.id, touched, 0);
        Ok(Life { pid: tree.root, notes: no_terminal.into_iter().chain(no_cgroup).collect() })
    }
}

/// The program that restores need.
pub(crate) fn helper() -> Result<PathBuf, String> {
    let missing = |why: String| format!("cannot find {HELPER}: {why}");
    let own = std::env::current_exe().map_err(|error| missing(error.to_string()))?;
    let beside = own.with_file_name(HELPER);
    let places = [beside.as_path(), Path::new(INSTALLED_HELPER)];
    let found = places.into_iter().find(|place| place.is_file());
    found.map(Path::to_owned).ok_or_else(|| {
        missing(format!("it is neither beside {} nor at {INSTALLED_HELPER}", own.display()))
    })
}
