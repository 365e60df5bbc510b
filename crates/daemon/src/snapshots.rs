//! Snapshots of tenants: process state by CRIU, memory by the pager, and what is
//! known of both on disk.
//!
//! The memory of a snapshot belongs to the tenant that it was taken of, which
//! stays for it when its processes have ended. `snapshot.json` is written when
//! the snapshot is whole: without it there is none. What the pager has and no
//! file names is forgotten by the next worker, and the other way round.

mod copies;
mod core_file;
mod disk;
mod files;
mod forward;
mod freezing;
mod gone;
mod guest;
mod guest_disks;
mod guest_files;
mod guest_swap;
mod held_images;
mod in_file;
mod limit;
mod lineage;
mod machine;
mod moving;
mod preparing;
pub(crate) mod ready;
mod revive;
mod rollback;
pub(crate) mod schedules;
mod take;
mod touched;
mod unfinished;
mod vouch;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use strata_api::{Progress, SnapshotId, SnapshotInfo, SnapshotRef, SnapshotState};
use strata_pager::Tenant;
use strata_snapshot::Criu;
use strata_sys::Directory;
use strata_sys::peer::Peer;
use strata_units::SpaceId;

use crate::current::Current;
use crate::guests::Guests;
use crate::lock::lock;
use crate::tenants::{Tenants, Wish};
pub(crate) use core_file::Refused;
use disk::{Disk, Known, Line, Process};
pub(crate) use files::ImportWish;
pub(crate) use in_file::open_page_file;
use lineage::life_of;
pub(crate) use moving::{How as MoveHow, Wire};
pub(crate) use revive::{CloneWish, Revived, helper};

/// What directories of restores under way begin with.
const WORK: &str = "restore-";

/// Whoever waits longer for something else to be done with a tenant is told so.
const TURN_PATIENCE: Duration = Duration::from_secs(60);

/// Who hears how far long work is.
pub(crate) type Tell<'a> = &'a mut (dyn FnMut(Progress) + Send);

pub(crate) struct Snapshots {
    disk: Disk,
    tenants: Arc<Tenants>,
    guests: Arc<Guests>,
    made: held_images::Made,
    moves: moving::Moves,
    ways: moving::Ways,
    known: Arc<Mutex<BTreeMap<SnapshotId, Known>>>,
    lineage: Mutex<BTreeMap<String, Line>>,
    /// Tenants that something is being done with.
    busy: Mutex<BTreeSet<String>>,
    turn_ended: Condvar,
    current: Arc<Current>,
    found: Mutex<Option<Criu>>,
    /// Where sockets are, this daemon's and CRIU's: their paths are short.
    work: PathBuf,
    restores: AtomicU64,
    /// Which snapshots are to be ready has changed.
    ready_due: Mutex<bool>,
    ready_changed: Condvar,
    /// This daemon's user.
    uid: u32,
}

/// Holds a tenant's name busy.
struct Turn<'a>(&'a Snapshots, String);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.busy).remove(&self.1);
        self.0.turn_ended.notify_all();
    }
}

/// Removes a directory with the files in it, and nothing below: CRIU, which works
/// there as root, may have mounted something that is not ours to remove.
fn remove_flat(directory: &Path) {
    let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else { return };
    let Ok(parent) = Directory::open(parent) else { return };
    if let Ok(directory) = parent.directory(name) {
        for name in directory.names().unwrap_or_default() {
            let _ = directory.remove_file(&name);
        }
    }
    let _ = parent.remove_directory(name);
}

/// The CRIU that is used, where one is named: by the configuration, or by
/// `STRATA_CRIU` in the environment.
pub(crate) fn criu_named(set: Option<&Path>) -> Option<PathBuf> {
    let of_environment = || std::env::var_os("STRATA_CRIU").filter(|named| !named.is_empty());
    set.map(PathBuf::from).or_else(|| of_environment().map(PathBuf::from))
}

/// A tenant like the one that a snapshot was taken of, called `name`.
fn wish_of(info: &SnapshotInfo, name: &str) -> Wish {
    Wish {
        name: Some(name.to_owned()),
        uid: info.uid,
        command: info.command.clone(),
        budget_bytes: info.budget_bytes,
        claim: None,
        tier_limit: None,
        tier_order: None,
        starter: None,
        of_rule: false,
    }
}

impl Snapshots {
    /// Those that an earlier worker knew; in a new daemon, those that were
    /// persisted.
    pub(crate) fn new(
        current: &Arc<Current>,
        tenants: &Arc<Tenants>,
        guests: &Arc<Guests>,
    ) -> Self {
        let config = current.get();
        let disk = Disk::new(config.snapshot_dir.clone());
        let uid = std::fs::metadata("/proc/self").map_or(0, |own| own.uid());
        let mut known = BTreeMap::new();
        let (found, left) = disk.read_all();
        let moves = moving::Moves::new(&disk);
        for mut snapshot in found {
            let id = &snapshot.info.id;
            if snapshot.coming.as_ref().is_some_and(|coming| !moves.needs(coming, id)) {
                // Its tenant does not come any more, or runs: its memory is forgotten below.
                let _ = disk.remove(id);
                continue;
            }
            let holder = tenants.get(snapshot.info.uid, &snapshot.info.tenant);
            let has = |process: &Process| {
                process.memory.is_some_and(|memory| {
                    holder.as_ref().is_some_and(|t| t.has_snapshot_memory(SpaceId(memory)))
                })
            };
            if !snapshot.processes.iter().all(has) {
                if snapshot.info.state != SnapshotState::Persisted {
                    // Its memory is gone: it is not known, whatever is left of it.
                    let _ = disk.remove(&snapshot.info.id);
                    continue;
                }
                snapshot.processes.iter_mut().for_each(|process| process.memory = None);
                // The file has them as well, with checksums, and on the device.
                remove_flat(&disk.images(&snapshot.info.id));
            }
            known.insert(snapshot.info.id.clone(), snapshot);
        }
        let mut lineage = disk.read_lineage();
        for tenant in tenants.list() {
            let is_for_import =
                tenant.record().starter.is_none() && lineage.contains_key(&tenant.record().name);
            if is_for_import && !tenant.attachment().0 {
                // Whoever has made it for a snapshot that was to come is no more.
                tenant.is_for_snapshots();
            }
            for memory in tenant.snapshot_memories() {
                let named = |known: &Known| {
                    known.info.tenant == tenant.record().name
                        && known.info.uid == tenant.record().uid
                        && known.processes.iter().any(|process| process.memory == Some(memory.0))
                };
                let is_lent =
                    tenant.record().uid == uid && moves.lends(&tenant.record().name, memory);
                if !known.values().any(named) && !is_lent {
                    tenant.remove_snapshot_memory(memory);
                }
            }
        }
        // Of restores that ended with their worker.
        for entry in std::fs::read_dir(&config.socket_dir).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(WORK) {
                unfinished::end(&entry.path(), tenants);
                remove_flat(&entry.path());
            }
        }
        for id in known.keys() {
            // One that a worker took who died before it had given the number.
            let line = lineage.entry(id.tenant.clone()).or_default();
            line.last = line.last.max(id.number);
        }
        for (name, line) in &lineage {
            let forwards = line.place.iter().flat_map(|place| &place.forwards);
            let Some(tenant) = tenants.get(uid, name) else { continue };
            if line.life != life_of(&tenant) {
                continue;
            }
            for &wish in forwards {
                if let Err(why) = forward::start(&tenant, wish) {
                    strata_sys::log(strata_sys::Priority::Warning, format_args!("{name}: {why}"));
                }
            }
        }
        disk.forget_arrived();
        Self::see_to_moves(&moves, uid, tenants, guests);
        let snapshots = Self {
            made: held_images::Made::new(&disk, &left),
            moves,
            ways: moving::Ways::default(),
            disk,
            tenants: Arc::clone(tenants),
            guests: Arc::clone(guests),
            known: Arc::new(Mutex::new(known)),
            lineage: Mutex::new(lineage),
            busy: Mutex::default(),
            turn_ended: Condvar::new(),
            current: Arc::clone(current),
            found: Mutex::default(),
            work: config.socket_dir.clone(),
            restores: AtomicU64::new(0),
            ready_due: Mutex::new(true),
            ready_changed: Condvar::new(),
            uid,
        };
        snapshots.see_to_rooms();
        snapshots
    }

    /// The tenant of this name of this daemon's user, whose alone snapshots are of.
    fn own_tenant(&self, name: &str) -> Option<Arc<Tenant>> {
        self.tenants.get(self.uid, name)
    }

    fn criu(&self) -> Result<Criu, String> {
        let mut found = lock(&self.found);
        if let Some(criu) = &*found {
            return Ok(criu.clone());
        }
        let criu = Criu::find(criu_named(self.current.get().criu.as_deref()).as_deref())
            .map_err(|error| error.to_string())?;
        Ok(found.insert(criu).clone())
    }

    /// It may be another one from now on.
    pub(crate) fn forget_criu(&self) {
        *lock(&self.found) = None;
    }

    /// Whoever asks may know where CRIU is, by an environment that is not this daemon's:
    /// a private one has that of its first client. Only of this daemon's own user.
    pub(crate) fn learn_criu(&self, peer: Peer) {
        if peer.uid != self.uid || criu_named(self.current.get().criu.as_deref()).is_some() {
            return;
        }
        let environment = std::fs::read(format!("/proc/{}/environ", peer.pid)).unwrap_or_default();
        let value = |name: &str| {
            let mut words = environment.split(|&byte| byte == 0);
            let value = words.find_map(|word| word.strip_prefix(name.as_bytes()))?;
            (!value.is_empty()).then(|| OsStr::from_bytes(value))
        };
        let named = value("STRATA_CRIU=").map(PathBuf::from);
        let Some(path) = named.or_else(|| Criu::in_path(value("PATH=")?)) else { return };
        let mut found = lock(&self.found);
        if found.as_ref().is_none_or(|known| known.path() != path)
            && let Ok(criu) = Criu::find(Some(&path))
        {
            *found = Some(criu);
        }
    }

    /// Without what they cost.
    pub(crate) fn list(&self) -> Vec<SnapshotInfo> {
        lock(&self.known).values().map(|known| known.info.clone()).collect()
    }

    /// With what it costs now. Every page of it is looked at.
    pub(crate) fn with_size(&self, mut info: SnapshotInfo) -> SnapshotInfo {
        let known = lock(&self.known).get(&info.id).cloned();
        let holder = self.tenants.get(info.uid, &info.tenant);
        if let (Some(known), Some(holder)) = (known, holder) {
            for memory in known.processes.iter().filter_map(|process| process.memory) {
                let size = holder.snapshot_size(SpaceId(memory));
                info.pages += size.pages;
                info.size_unique_bytes += size.unique_bytes;
                info.size_shared_bytes += size.shared_bytes;
            }
        }
        info
    }

    /// What `named` names, if the user `uid` may see it.
    fn find(&self, uid: u32, named: &SnapshotRef) -> Result<Known, String> {
        lock(&self.known)
            .values()
            .find(|known| named.names(&known.info) && (uid == 0 || uid == known.info.uid))
            .cloned()
            .ok_or_else(|| format!("there is no snapshot {named}"))
    }

    /// CRIU brings files back by their paths, with this daemon's rights: what it
    /// restores for another user, that user could have it open anything for.
    fn check_user(&self, uid: u32) -> Result<(), String> {
        if uid == self.uid {
            return Ok(());
        }
        Err(format!(
            "this daemon takes snapshots for user {} alone (docs/threat-model.md says why)",
            self.uid
        ))
    }

    /// Whether a tenant of another user is a guest of libvirt's: nothing of its snapshots
    /// comes back with this daemon's rights. A name is one tenant's.
    fn may_take_libvirts(&self, tenant: &Tenant) -> Result<bool, String> {
        let record = tenant.record();
        let name = &record.name;
        let has_others = || {
            let of_other =
                |known: &Known| known.info.tenant == *name && known.info.uid != record.uid;
            self.own_tenant(name).is_some() || lock(&self.known).values().any(of_other)
        };
        if self.uid != 0 || self.guests.libvirts(tenant)?.is_none() {
            return Ok(false);
        }
        match has_others() {
            true => Err(format!("another user's tenant {name} is there, or has snapshots")),
            false => Ok(true),
        }
    }

    /// Whether anything is being done with any tenant.
    pub(crate) fn is_busy(&self) -> bool {
        !lock(&self.busy).is_empty()
    }

    /// One thing at a time is done with a tenant; whoever comes meanwhile waits.
    /// What was found before may not be true any more.
    fn turn(&self, name: &str) -> Result<Turn<'_>, String> {
        let turn = self.turn_for_move(name)?;
        match self.given(name).map(|out| out.refusal(name)).or_else(|| moving::owes(name)) {
            Some(refusal) => Err(refusal),
            None => Ok(turn),
        }
    }

    /// The same, whether it is on its way to another host or not.
    fn turn_for_move(&self, name: &str) -> Result<Turn<'_>, String> {
        let busy = lock(&self.busy);
        let is_taken = |busy: &mut BTreeSet<String>| busy.contains(name);
        let waited = self.turn_ended.wait_timeout_while(busy, TURN_PATIENCE, is_taken);
        let (mut busy, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if busy.insert(name.to_owned()) {
            Ok(Turn(self, name.to_owned()))
        } else {
            Err(format!("another snapshot, rollback or restore of {name} is under way"))
        }
    }

    /// The same for whoever must not wait.
    fn turn_now(&self, name: &str) -> Option<Turn<'_>> {
        let is_free = lock(&self.busy).insert(name.to_owned());
        is_free.then(|| Turn(self, name.to_owned()))
    }

    /// The turn of the tenant whose snapshot `named` names.
    fn turn_of(&self, uid: u32, named: &SnapshotRef) -> Result<Turn<'_>, String> {
        self.turn(&self.find(uid, named)?.info.tenant)
    }

    /// A number that no snapshot of this tenant had, for one with this label.
    fn next_id(&self, tenant: &str, label: Option<&str>) -> Result<SnapshotId, String> {
        let taken = |known: &Known| known.info.tenant == tenant && known.info.label.is_some();
        let known = lock(&self.known);
        if let Some(label) = label
            && let Some(other) = known
                .values()
                .find(|known| taken(known) && known.info.label.as_deref() == Some(label))
        {
            return Err(format!("{} has the label {label} already", other.info.id));
        }
        let mut lineage = lock(&self.lineage);
        let line = lineage.entry(tenant.to_owned()).or_default();
        line.last += 1;
        let number = line.last;
        self.disk.write_lineage(&lineage)?;
        Ok(SnapshotId { tenant: tenant.to_owned(), number })
    }

    /// The number of the next one, which is given only if it is offered.
    fn number_to_come(&self, tenant: &str) -> SnapshotId {
        let last = lock(&self.lineage).get(tenant).map_or(0, |line| line.last);
        SnapshotId { tenant: tenant.to_owned(), number: last + 1 }
    }

    /// Offers a snapshot with the number to come.
    fn offer(&self, known: Known) {
        let mut lineage = lock(&self.lineage);
        lineage.entry(known.info.tenant.clone()).or_default().last = known.info.id.number;
        // If this worker dies over it, the next one knows by the snapshot itself.
        let _ = self.disk.write_lineage(&lineage);
        lock(&self.known).insert(known.info.id.clone(), known);
    }

    /// Nobody finds it any more; what nothing else refers to is freed. An error: its
    /// files are there still, which the next worker finds, and the pager's number of
    /// its memory in them: that must be nobody else's by then, so it is kept. Whoever
    /// undoes what failed has a better error.
    fn forget(&self, known: &Known) -> Result<(), String> {
        lock(&self.known).remove(&known.info.id);
        self.disk.remove(&known.info.id)?;
        if let Some(holder) = self.tenants.get(known.info.uid, &known.info.tenant) {
            for memory in known.processes.iter().filter_map(|process| process.memory) {
                holder.remove_snapshot_memory(SpaceId(memory));
            }
        }
        self.sweep_disks();
        self.ready_is_due();
        Ok(())
    }

    /// A snapshot whose memory the pager has, and the tenant that has it.
    fn loaded(
        &self,
        uid: u32,
        named: &SnapshotRef,
        tell: Tell<'_>,
    ) -> Result<(Known, Arc<Tenant>), String> {
        let known = self.find(uid, named)?;
        if known.info.state == SnapshotState::Capturing {
            return Err(format!("{} is not captured yet", known.info.id));
        }
        if known.is_in_memory() {
            return self.with_its_holder(known);
        }
        let _turn = self.turn(&format!("{} on disk", known.info.id))?;
        // Whoever had the turn before may have loaded it.
        match self.find(uid, named)? {
            known if known.is_in_memory() => self.with_its_holder(known),
            known => self.load(known, tell),
        }
    }

    fn with_its_holder(&self, known: Known) -> Result<(Known, Arc<Tenant>), String> {
        match self.tenants.get(known.info.uid, &known.info.tenant) {
            Some(holder) => Ok((known, holder)),
            None => Err(format!("the memory of {} is gone", known.info.id)),
        }
    }

    /// Forgets a snapshot; what nothing else refers to is freed.
    pub(crate) fn remove(&self, uid: u32, named: &SnapshotRef) -> Result<(), String> {
        let _turn = self.turn_of(uid, named)?;
        let known = self.find(uid, named)?;
        self.forget(&known)
    }
}
