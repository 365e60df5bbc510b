//! Snapshots of guests that `strata vm run` started: the guest's memory by the pager, the
//! state of its devices by QEMU, both of one moment; and guests that come from them.
//!
//! ```text
//! take     look, copy disks, arm ─▶ mark, stop ─▶ disks ─▶ devices ─▶ page map ─▶ cont, unmark ─▶ capture
//!             each of these fails: the guest runs on ─────────────────────┘
//! revive   disks, client: QEMU that waits ─▶ page map, shifted ─▶ devices ─▶ cont
//!             fails: the client ends that QEMU, nobody has seen it ─┘
//! rollback as that, and instead of cont: mark ─▶ end the old ─▶ its images' names ─▶ cont, unmark
//!             fails: whoever finds the mark does what is left ───────────────┘
//! ```
//! QEMU's own memory is not in a snapshot: a guest that comes from one has a QEMU of its
//! own, started by whoever asked for it, as that user.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use strata_api::{GuestDisk, GuestSpec, Launch, Progress, SnapshotRef, Unit};
use strata_pager::{Filling, Freeze, Tenant};
use strata_snapshot::is_ending;
use strata_sys::peer::Peer;
use strata_sys::{Pidfd, Range};
use strata_units::SpaceId;
use strata_vm::state;

use super::disk::Known;
use super::freezing::Manner;
use super::gone::{LOOK_EVERY, ends};
use super::guest_disks::{FrozenDisk, Image};
use super::held_images::Held;
use super::preparing::Preparing;
use super::revive::{At, Hold, Revived};
use super::take::{FEW_PAGES, Numbers};
use super::{Snapshots, Tell, lock, wish_of};
use super::{guest_files, guest_swap};
use crate::cgroup::Cgroups;
use crate::guests::{BEFORE_SUFFIX, Talk, Undone, give_state, memory_at};

/// How long a QEMU may take until it waits for a guest.
const STARTED_WITHIN: Duration = Duration::from_secs(20);
/// How long it may take to say where it has the guest's memory, and to let it run.
const SAID_WITHIN: Duration = Duration::from_secs(5);
/// How often a captured snapshot may turn out torn: as for programs.
const ATTEMPTS: [u64; 5] = [0, FEW_PAGES, FEW_PAGES, FEW_PAGES, u64::MAX];

/// What a guest's snapshot has beside its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct GuestPart {
    /// Of what is said here.
    #[serde(default = "guest_files::first_version")]
    pub(super) version: u32,
    /// What it is, and how it was started.
    pub(super) spec: GuestSpec,
    /// Where its QEMU had its memory: first byte, end.
    pub(super) memory: (u64, u64),
    /// The state of its devices: its size, and its sum.
    pub(super) state_bytes: u64,
    pub(super) state_sum: u64,
    /// Files that its drives read, as they were.
    pub(super) files: Vec<Image>,
    /// Disks that it wrote to.
    #[serde(default)]
    pub(super) disks: Vec<FrozenDisk>,
    /// Of one that moves: it has no copies, and keeps these disks, as they were when it
    /// stood still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) in_place: Option<BTreeMap<String, Option<Image>>>,
}

/// A tenant that a guest is to come into.
pub(crate) struct Begun {
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) spec: GuestSpec,
    pub(crate) warnings: Vec<String>,
    /// Its disks stay until it is a guest.
    pub(crate) held: Held,
}

impl Known {
    /// Refuses what CRIU did not take.
    pub(super) fn is_of_programs(&self) -> Result<(), String> {
        match &self.guest {
            None => Ok(()),
            Some(_) => Err(format!("{} is of a guest, which is not done here", self.info.id)),
        }
    }
}

impl Snapshots {
    /// Takes the memory and the devices of a guest. On an error it runs on.
    pub(super) fn take_guest(
        &self,
        tenant: &Arc<Tenant>,
        known: &mut Known,
        spec: GuestSpec,
        tell: Tell<'_>,
    ) -> Result<(Freeze, Numbers), String> {
        let mut guest = self.freezable(tenant, &spec, SAID_WITHIN)?;
        let id = known.info.id.clone();
        let written = std::mem::take(&mut guest.written);
        let (_held, copies) = self.begin_copies(&guest.own, written, &id.to_string())?;
        // QEMU's copies end when the guest is stopped, and begin anew for a second attempt.
        let attempts = if copies.is_empty() { &ATTEMPTS[..] } else { &ATTEMPTS[3..] };
        lock(&guest.stoppable).copy(copies, &mut |done, total| tell(copied(done, total)))?;
        self.disk.make(&known.info.id)?;
        for (attempt, &most_frozen_pages) in attempts.iter().enumerate() {
            if attempt > 0 {
                lock(&guest.stoppable).copy_again(&mut |done, total| tell(copied(done, total)))?;
            }
            let manner = Manner { most_frozen_pages, urgent: false, once: None };
            let Some(frozen) = guest.freeze(tenant, &manner, tell)? else { continue };
            self.guests.step("captured");
            let copies = lock(&guest.stoppable).copied();
            let kept = Self::frozen(&guest.own, &copies).and_then(|disks| {
                self.disk.write_state(&known.info.id, &frozen.state).map(|()| disks)
            });
            let disks = match kept {
                Ok(disks) => disks,
                Err(why) => {
                    let memories = frozen.freeze.processes.iter().map(|process| process.memory);
                    for memory in memories.chain(frozen.swap) {
                        tenant.remove_snapshot_memory(memory);
                    }
                    return Err(why);
                }
            };
            known.processes = frozen.swap.map(guest_swap::process).into_iter().collect();
            known.info.guest = true;
            known.info.libvirt = spec.libvirt.is_some();
            known.info.disks = disks.iter().map(FrozenDisk::path).collect();
            known.info.servers = spec.launch.as_ref().map_or(0, Launch::servers);
            known.guest = Some(guest.part(spec, &frozen.state, disks));
            // From here on its disks are a snapshot's.
            lock(&self.known).insert(id, known.clone());
            return Ok((frozen.freeze, Numbers::new()));
        }
        Err("its memory cannot be captured".into())
    }

    /// A guest's snapshot that is to be brought back by the user `uid`.
    fn guest_of(
        &self,
        uid: u32,
        named: &SnapshotRef,
        tell: Tell<'_>,
    ) -> Result<(Known, Arc<Tenant>, GuestPart), String> {
        let (known, origin) = self.fitting(uid, named, tell)?;
        let part = known.guest.clone().ok_or_else(|| format!("{named} is of no guest"))?;
        // What libvirt starts has the rights that its domain says; libvirt's master is root.
        let is_libvirts = uid == 0 && part.spec.libvirt.is_some();
        if uid != known.info.uid && !is_libvirts {
            // Its QEMU would run with more rights than the first one had.
            return Err(format!(
                "{named} is of user {}, who alone starts guests of it",
                known.info.uid
            ));
        }
        part.check()?;
        Ok((known, origin, part))
    }

    /// A tenant for a guest that is to come from a snapshot; `peer` starts its QEMU.
    pub(crate) fn begin_guest(
        &self,
        peer: Peer,
        named: &SnapshotRef,
        name: Option<String>,
        rollback: bool,
        tell: Tell<'_>,
    ) -> Result<Begun, String> {
        let (known, origin, part) = self.guest_of(peer.uid, named, tell)?;
        let name = name.unwrap_or_else(|| self.free_clone_name(&known.info.tenant, 1));
        let _turn = self.turn(&name)?;
        let starter = Pidfd::open(peer.pid).map_err(|error| format!("whoever asked: {error}"))?;
        let is_libvirts = part.spec.libvirt.is_some();
        if rollback {
            if is_libvirts {
                return Err("libvirt has one QEMU of a domain: end it, and restore it".to_owned());
            }
            let tenant = self.own_tenant(&name).filter(|tenant| tenant.attachment().1);
            let tenant = tenant.ok_or_else(|| format!("{name} does not run"))?;
            if !tenant.shares_pages_with(&origin) || self.guests.spec(&tenant).is_none() {
                return Err(format!("{} was taken of another guest than {name}", known.info.id));
            }
            let is_first = name == known.info.tenant;
            let (held, disks) = self.disks_for(&part, None, Some((&tenant, is_first)))?;
            let warnings = adopted(&tenant, peer.pid, &starter);
            return Ok(begun(tenant, part, warnings, (held, disks)));
        }
        if name != known.info.tenant {
            let disks = self.disks_for(&part, Some(&name), None)?;
            let starter = Some((peer.pid, starter));
            // libvirt's QEMUs stay in control groups of libvirt's, as those of a rule.
            let of_rule = is_libvirts;
            let wish = crate::tenants::Wish { starter, of_rule, ..wish_of(&known.info, &name) };
            let (tenant, mut warnings) = self.tenants.create_beside(wish, &origin)?;
            if is_libvirts {
                warnings.clear();
            }
            return Ok(begun(tenant, part, warnings, disks));
        }
        if !ends(&origin) {
            return Err(format!(
                "{name} is running; a living guest is rolled back (strata rollback) or cloned"
            ));
        }
        let disks = self.disks_for(&part, None, None)?;
        let warnings = match is_libvirts {
            true => Vec::new(),
            false => adopted(&origin, peer.pid, &starter),
        };
        Ok(begun(origin, part, warnings, disks))
    }

    /// Gives the guest that waits in the QEMU `pid` what the snapshot has, and lets it run.
    pub(crate) fn fill_guest(
        &self,
        uid: u32,
        tenant: &Arc<Tenant>,
        named: &SnapshotRef,
        (pid, rollback): (u32, bool),
        (again, rehearse): (bool, bool),
        tell: Tell<'_>,
    ) -> Result<Revived, String> {
        let name = tenant.record().name.clone();
        let _turn = self.turn(&name)?;
        let revived = Revived { name, pid, forwards: Vec::new(), notes: Vec::new() };
        if again {
            self.filled(tenant, pid)?;
            self.descends(tenant, &self.find(uid, named)?.info.id);
            return Ok(revived);
        }
        let mut is_whole = false;
        let mut hold = |_| match rehearse {
            true => {
                is_whole = true;
                Err("it is a rehearsal".to_owned())
            }
            false => Ok(()),
        };
        match self.fill_in_turn(uid, tenant, named, (pid, rollback), tell, &mut hold) {
            Err(_) if is_whole => Ok(revived),
            outcome => outcome.map(|()| revived),
        }
    }

    /// The same for one that moves here, which stands still until `hold` lets it run.
    pub(super) fn fill_held(
        &self,
        uid: u32,
        tenant: &Arc<Tenant>,
        named: &SnapshotRef,
        (pid, rollback): (u32, bool),
        tell: Tell<'_>,
        hold: Hold<'_>,
    ) -> Result<(), String> {
        let _turn = self.turn(&tenant.record().name)?;
        self.fill_in_turn(uid, tenant, named, (pid, rollback), tell, hold)
    }

    fn fill_in_turn(
        &self,
        uid: u32,
        tenant: &Arc<Tenant>,
        named: &SnapshotRef,
        (pid, rollback): (u32, bool),
        tell: Tell<'_>,
        hold: Hold<'_>,
    ) -> Result<(), String> {
        let (known, origin, part) = self.guest_of(uid, named, tell)?;
        let id = &known.info.id;
        let process = known.processes.first().ok_or("it has no memory")?;
        let memory = SpaceId(process.memory.ok_or("its memory is not loaded")?);
        let mut preparing = Preparing::of_guest(tenant, &origin, pid, memory)?;
        let bytes = self.state_of(id, &part)?;
        let _alone = self.guests.alone(tenant)?;
        let mut talk = self.waiting(tenant, pid, rollback)?;
        let said = |error: state::StateError| error.to_string();
        talk.monitor.allow(SAID_WITHIN);
        if let Some(launch) = &part.spec.launch {
            let version = state::version(&mut talk.monitor).map_err(said)?.to_string();
            if version != launch.version {
                return Err(format!("its QEMU is {version}, and it ran in {}", launch.version));
            }
        }
        let (start, length) = state::memory(&mut talk.monitor).map_err(said)?;
        let from = Range { start: part.memory.0, end: part.memory.1 };
        if length != from.len() {
            return Err(format!(
                "its memory has {length} bytes, and {} in the snapshot",
                from.len()
            ));
        }
        let to = memory_at(tenant, pid, start, length)?;
        let directory = match rollback {
            true => self.guests.next_directory(tenant),
            false => self.guests.directory(tenant),
        };
        guest_swap::given(&known, &part.spec, &origin, (&directory, tenant.record().uid))?;
        self.guests.step("swap");
        let filling = Filling { pid, memory, from, to, wanted: process.wanted() };
        tenant.fill(&origin, filling, Some(preparing.of(pid)?))?;
        self.guests.step("filled");
        give_state(&mut talk, bytes)?;
        self.guests.step("given");
        let spec = match rollback {
            true => self.guests.coming(tenant),
            false => self.guests.known_spec(tenant),
        };
        let spec = spec.ok_or("the worker that has begun it is gone")?;
        hold(At::Stands)?;
        hold(At::Runs)?;
        let takes_places = spec.disks.iter().any(|disk| disk.opened != disk.path);
        if rollback || takes_places {
            drop(talk);
            self.guests.take_over(tenant, pid, spec).map_err(Undone::into_why)?;
        } else {
            talk.monitor.allow(SAID_WITHIN);
            state::go_on(&mut talk.monitor).map_err(said)?;
        }
        self.descends(tenant, id);
        // What was ready is used up.
        self.ready_is_due();
        if let Some(space) = tenant.space_of(pid) {
            self.remember_touched(
                id,
                vec![(process.pid, space)],
                to.start.wrapping_sub(from.start),
            );
        }
        Ok(())
    }

    /// Ends what an earlier worker has begun with the QEMU `pid`.
    fn filled(&self, tenant: &Arc<Tenant>, pid: u32) -> Result<(), String> {
        let _alone = self.guests.alone(tenant)?;
        if let Some(outcome) = self.guests.finish_marked(tenant) {
            return match outcome {
                Ok(finished) if finished == pid => Ok(()),
                Ok(_) => Err("another QEMU has taken its place".to_owned()),
                Err(Undone::Never(why) | Undone::NotYet(why)) => Err(why),
            };
        }
        // Or another one has ended it meanwhile, and the mark is gone: then its QEMU is the only
        // one, which may take a moment to be seen, and runs.
        let status = || {
            let mut talk = self.guests.talk(tenant, &self.guests.directory(tenant), SAID_WITHIN)?;
            state::status(&mut talk.monitor).map_err(|error| error.to_string())
        };
        let until = Instant::now() + SAID_WITHIN;
        loop {
            let has_another = tenant.processes().iter().any(|process| process.pid() != pid);
            let status = if has_another { Ok(String::new()) } else { status() };
            match status {
                Ok(status) if status == "running" && tenant.is_alone(pid) => return Ok(()),
                Ok(status) if status != "running" => {
                    let why = "the worker that did it has died over it, before anything was ended";
                    return Err(why.into());
                }
                Err(why) if Instant::now() > until => {
                    return Err(format!("the worker that did it has died over it: {why}"));
                }
                Ok(_) if Instant::now() > until || is_ending(pid) => {
                    return Err("another QEMU has taken its place".into());
                }
                _ => std::thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// A conversation with the QEMU `pid`, which waits for the state of a guest: the only
    /// process of the tenant, unless it is to take the place of another one.
    pub(super) fn waiting(
        &self,
        tenant: &Arc<Tenant>,
        pid: u32,
        rollback: bool,
    ) -> Result<Talk, String> {
        let directory = match rollback {
            true => self.guests.next_directory(tenant),
            false => self.guests.directory(tenant),
        };
        let until = Instant::now() + STARTED_WITHIN;
        loop {
            let pids = tenant.pids();
            let why = if pids == [pid] || rollback && pids.contains(&pid) {
                match self.guests.talk(tenant, &directory, SAID_WITHIN) {
                    Ok(mut talk) => match state::status(&mut talk.monitor) {
                        Ok(status) if status == "inmigrate" => return Ok(talk),
                        Ok(_) => return Err("its QEMU does not wait for a guest".to_owned()),
                        Err(error) => error.to_string(),
                    },
                    Err(why) => why,
                }
            } else {
                format!("its QEMU is not its only process ({pids:?})")
            };
            if Instant::now() > until {
                return Err(why);
            }
            if is_ending(pid) {
                return Err("its QEMU has ended".to_owned());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

fn begun(
    tenant: Arc<Tenant>,
    part: GuestPart,
    mut warnings: Vec<String>,
    (held, disks): (Held, Vec<GuestDisk>),
) -> Begun {
    let keeps = part.in_place.is_some();
    for disk in disks.iter().filter(|_| !keeps) {
        warnings.push(match (disk.temporary, disk.opened == disk.path) {
            (true, true) => {
                format!("its disk {} is its own, and goes when the guest has ended", disk.path)
            }
            (true, false) => format!("its disk {} is as it was", disk.path),
            (false, _) => format!(
                "its disk {0} is as it was; what it has been until now stays as {0}{BEFORE_SUFFIX}",
                disk.path
            ),
        });
    }
    Begun { tenant, spec: GuestSpec { disks, ..part.spec }, warnings, held }
}

/// How much of its disks is copied.
fn copied(done: u64, total: u64) -> Progress {
    let what = "copying disks".into();
    Progress { what, done, total: Some(total), unit: Unit::Bytes }
}

/// Whoever starts a tenant's QEMU counts as the tenant's. What the user should know.
fn adopted(tenant: &Tenant, pid: u32, starter: &Pidfd) -> Vec<String> {
    let Some(directory) = &tenant.record().cgroup else { return Vec::new() };
    match Cgroups::adopt(Path::new(directory), pid, starter) {
        Ok(()) => Vec::new(),
        Err(error) => vec![format!("no memory cgroup ({error}): see docs/limits.md")],
    }
}
