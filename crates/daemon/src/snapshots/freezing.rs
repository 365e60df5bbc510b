//! How a guest is frozen, for a snapshot of it and for a move: what is to be known before, and
//! one attempt. What is kept of it is its callers' business.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use strata_api::{GuestDisk, GuestSpec, Launch};
use strata_guest::moment::Taken;
use strata_pager::{Freeze, Only, SnapshotError, SnapshotRequest, Stand, Standing, Tenant};
use strata_sys::peer::peer_of;
use strata_sys::{Range, has_open};
use strata_units::SpaceId;
use strata_vm::disks::WrittenDisk;
use strata_vm::{Networks, OtherDisk, OtherDomain, PoolDisk, served, socket_name};

use super::guest::GuestPart;
use super::guest_disks::{FrozenDisk, Image, OwnDisk, others, own_disk, sum};
use super::moving::Once;
use super::take::captured;
use super::{Snapshots, Tell, guest_files, guest_swap, lock};
use crate::guests::{Alone, Stoppable, memory_at};

/// A guest that can be frozen.
pub(super) struct Freezable<'a> {
    pub(super) stoppable: Arc<Mutex<Stoppable>>,
    pid: u32,
    range: Range,
    files: Vec<Image>,
    /// Disks that it writes to, and what QEMU says of them.
    pub(super) own: Vec<OwnDisk>,
    pub(super) written: Vec<WrittenDisk>,
    /// Where its swap disk is served, and its size.
    swap: Option<(PathBuf, u64)>,
    /// Nobody else asks it.
    pub(super) alone: Alone<'a>,
}

/// How an attempt is made.
pub(super) struct Manner<'a> {
    pub(super) most_frozen_pages: u64,
    pub(super) urgent: bool,
    /// It stays as it is, and is sent elsewhere.
    pub(super) once: Option<&'a Once>,
}

/// What stood still.
pub(super) struct Frozen {
    pub(super) freeze: Freeze,
    pub(super) since: Instant,
    /// The state of its devices.
    pub(super) state: Vec<u8>,
    /// The pages of its swap disk, stored.
    pub(super) swap: Option<SpaceId>,
}

/// The pages of a guest's swap disk, on their way into the store.
enum Swap {
    Taken(Taken),
    Going(JoinHandle<Result<SpaceId, String>>),
    Failed(String),
}

impl Swap {
    /// The guest runs: they are read meanwhile.
    fn goes(self, tenant: &Arc<Tenant>) -> Self {
        let Self::Taken(taken) = self else { return self };
        let tenant = Arc::clone(tenant);
        let going = thread::Builder::new().name("swap".into());
        match going.spawn(move || guest_swap::stored(&tenant, taken)) {
            Ok(going) => Self::Going(going),
            Err(error) => Self::Failed(format!("its swap disk is not read: {error}")),
        }
    }

    fn stored(self, tenant: &Arc<Tenant>) -> Result<SpaceId, String> {
        match self.goes(tenant) {
            Self::Going(going) => {
                going.join().unwrap_or_else(|_| Err("its swap disk is not read".to_owned()))
            }
            Self::Failed(why) => Err(why),
            Self::Taken(_) => unreachable!("they go"),
        }
    }
}

impl Snapshots {
    /// Asks a guest what is to be known before, for which its monitor may take `time`.
    pub(super) fn freezable<'a>(
        &'a self,
        tenant: &Arc<Tenant>,
        spec: &GuestSpec,
        time: Duration,
    ) -> Result<Freezable<'a>, String> {
        let launch = spec
            .launch
            .as_ref()
            .ok_or("how it was started is not known: its command line is no text")?;
        let alone = self.guests.alone(tenant)?;
        let pooled = pooled(launch, &others(&spec.disks))?;
        let served = served(&pooled, launch.swap_bytes.is_some());
        let (stoppable, footing, pid) = Stoppable::new(&self.guests, tenant, &served, time)?;
        if footing.memory_bytes != spec.memory_bytes {
            return Err(format!(
                "it was promised {} bytes, and has {} bytes of memory that is captured",
                spec.memory_bytes, footing.memory_bytes
            ));
        }
        if !footing.is_running {
            // What has given the state of its devices cannot be let stand still again.
            let how = if spec.libvirt.is_some() { "virsh resume" } else { "cont in its monitor" };
            return Err(format!("it is paused, and would run on: let it run first ({how})"));
        }
        let range = memory_at(tenant, pid, footing.memory_start, footing.memory_bytes)?;
        let guest = self.guests.directory(tenant);
        let image = |path: &String, readers: &[u32]| {
            is_open(readers, &launch.directory, path)?;
            Image::of(&launch.directory, path)
        };
        let mut files = Vec::new();
        for path in &footing.files {
            files.push(image(path, &[pid])?);
        }
        let mut servers = Vec::new();
        for (index, disk) in pooled.iter().enumerate() {
            let server = server_of(&guest, index, tenant.record().uid)
                .map_err(|why| format!("its disk {} is not served: {why}", disk.image))?;
            if disk.image_is_read_only() {
                files.push(image(&disk.image, &[server])?);
            }
            servers.push(server);
        }
        let (mut own, mut written) = (Vec::new(), footing.disks);
        for disk in &mut written {
            let found = own_disk(spec, &launch.directory, disk, &pooled)?;
            let is_served = found.is_pooled && found.disk.layers.is_empty();
            let readers: &[u32] = if is_served { &servers } else { &[pid] };
            is_open(readers, "/", &found.disk.path)?;
            own.push(found);
        }
        // What no guest could come of is of no use.
        let disks: Vec<GuestDisk> = own.iter().map(|own| own.disk.clone()).collect();
        can_come(spec, &tenant.record().name, &guest, &disks)?;
        let stoppable = Arc::new(Mutex::new(stoppable));
        let swap = launch.swap_bytes.map(|bytes| (guest, bytes));
        Ok(Freezable { stoppable, pid, range, files, own, written, swap, alone })
    }
}

impl Freezable<'_> {
    /// Its QEMU, and where that has its memory.
    pub(super) fn place(&self) -> (u32, Range) {
        (self.pid, self.range)
    }

    /// One attempt; none: it is torn. Without it the guest runs on.
    pub(super) fn freeze(
        &self,
        tenant: &Arc<Tenant>,
        manner: &Manner<'_>,
        tell: Tell<'_>,
    ) -> Result<Option<Frozen>, String> {
        let (pid, stay) = (self.pid, manner.once.is_some());
        let (stops, goes_on) = (Arc::clone(&self.stoppable), Arc::clone(&self.stoppable));
        let stopped = Arc::new(Mutex::new(None));
        let kept = Arc::clone(&stopped);
        let swap = Arc::new(Mutex::new(None));
        let (swap_kept, swap_goes) = (Arc::clone(&swap), Arc::clone(&swap));
        let (disk, uid) = (self.swap.clone(), tenant.record().uid);
        let (storing, stands) = (Arc::clone(tenant), Arc::clone(tenant));
        let request = SnapshotRequest {
            freeze: Box::new(move || {
                let (since, state) = lock(&stops).stop(stay).map_err(SnapshotError::Failed)?;
                if let Some((directory, bytes)) = disk {
                    // QEMU has been answered whatever it wrote there.
                    let taken = guest_swap::taken(&directory, uid, bytes).map_err(|why| {
                        let too = lock(&stops).go_on().err();
                        SnapshotError::Failed(
                            too.map_or(why.clone(), |too| format!("{why}; {too}")),
                        )
                    })?;
                    let taken = Swap::Taken(taken);
                    // Of one that is to stand still until all is read.
                    *lock(&swap_kept) = Some(if stay { taken.goes(&stands) } else { taken });
                }
                *lock(&kept) = Some((since, state));
                Ok(Standing { pids: vec![pid], since })
            }),
            thaw: Box::new(move || {
                if stay {
                    return Ok(());
                }
                lock(&goes_on).go_on()?;
                let mut swap = lock(&swap_goes);
                *swap = swap.take().map(|swap| swap.goes(&storing));
                Ok(())
            }),
            most_frozen_pages: manner.most_frozen_pages,
            stand: if stay { Stand::UntilCaptured } else { Stand::Briefly },
            urgent: manner.urgent,
            only: Some(Only { pid, range: self.range }),
            carry: manner.once.map(Once::carry),
            frozen: None,
        };
        let taken = tenant.snapshot(request, |done, total| tell(captured(done, total)));
        let stopped = lock(&stopped).take();
        let swap = lock(&swap).take().map(|swap| swap.stored(tenant)).transpose();
        match (taken, stopped) {
            (Ok(freeze), Some((since, state))) => match swap {
                Ok(swap) => Ok(Some(Frozen { freeze, since, state, swap })),
                Err(why) => {
                    for process in &freeze.processes {
                        tenant.remove_snapshot_memory(process.memory);
                    }
                    if stay {
                        lock(&self.stoppable).go_on()?;
                    }
                    Err(why)
                }
            },
            (Ok(_), None) => Err("it does not stand still".to_owned()),
            (Err(error), stopped) => {
                if let Ok(Some(memory)) = swap {
                    tenant.remove_snapshot_memory(memory);
                }
                if stay && stopped.is_some() {
                    lock(&self.stoppable).go_on()?;
                }
                match error {
                    SnapshotError::Torn => Ok(None),
                    SnapshotError::Failed(why) | SnapshotError::Restless(why) => Err(why),
                }
            }
        }
    }

    /// What its snapshot has beside its memory.
    pub(super) fn part(&self, spec: GuestSpec, state: &[u8], disks: Vec<FrozenDisk>) -> GuestPart {
        GuestPart {
            version: guest_files::version_of(&spec),
            spec,
            memory: (self.range.start, self.range.end),
            state_bytes: state.len() as u64,
            state_sum: sum(state),
            files: self.files.clone(),
            disks,
            in_place: None,
        }
    }
}

/// Refuses an image that is another file by now than that which one of its `readers` has open:
/// a copy of it, or whoever reads it under that name later, would not have the guest's bytes.
fn is_open(readers: &[u32], directory: &str, path: &str) -> Result<(), String> {
    let whole = Path::new(directory).join(path);
    for &reader in readers {
        match has_open(reader, &whole) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(why) => return Err(format!("its drive's file {path} cannot be looked at: {why}")),
        }
    }
    Err(format!(
        "{path} is not the file any more that the guest has open: it was replaced while the guest ran (put that one back, or start the guest anew)"
    ))
}

/// Who serves the disk of that number to a guest whose files are in `directory`.
fn server_of(directory: &Path, index: usize, uid: u32) -> Result<u32, String> {
    let stream = guest_swap::connected(&directory.join(socket_name(index)), uid)?;
    peer_of(&stream).map(|peer| peer.pid).map_err(|error| error.to_string())
}

/// The disks of a guest that are read through pools, as it has them now.
fn pooled(launch: &Launch, others: &[OtherDisk]) -> Result<Vec<PoolDisk>, String> {
    let here = Path::new(&launch.directory);
    let (disks, _) = strata_vm::disks_again(&launch.disks, here, others)
        .map_err(|refusal| refusal.to_string())?;
    for disk in &disks {
        let is_file = fs::metadata(&disk.image).is_ok_and(|found| found.is_file());
        if !is_file {
            return Err(format!(
                "its disk {} is in no file: it would not be seen whether it has changed",
                disk.image
            ));
        }
    }
    Ok(disks)
}

/// Refuses a guest of which no second one could be started.
fn can_come(
    spec: &GuestSpec,
    name: &str,
    directory: &Path,
    own: &[GuestDisk],
) -> Result<(), String> {
    let (disks, networks) = (others(own), Networks::Back { beside: false });
    if let Some(text) = &spec.libvirt {
        let wish = OtherDomain {
            clone: None,
            uuid: "",
            monitor_directory: "/",
            tenant: ("", ""),
            disks: &disks,
            networks,
        };
        let found = strata_vm::other_domain(text, &wish).map(drop);
        return found.map_err(|refusals| refusals[0].to_string());
    }
    let launch = spec.launch.as_ref().ok_or("how it was started is not known")?;
    let words: Vec<_> = launch.command.iter().skip(1).map(Into::into).collect();
    let here = Path::new(&launch.directory);
    let again = strata_vm::disks_again(&launch.disks, here, &disks);
    let found = again.and_then(|(_, disks)| {
        strata_vm::again(&words, name, directory, (here, &disks), networks).map(drop)
    });
    found.map_err(|refusal| refusal.to_string())
}
