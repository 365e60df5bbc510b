//! How a guest is frozen, for a snapshot of it and for a move: what is to be known before, and
//! one attempt. What is kept of it is its callers' business.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use strata_api::{GuestDisk, GuestSpec};
use strata_pager::{Freeze, Only, SnapshotError, SnapshotRequest, Standing, Tenant};
use strata_sys::Range;
use strata_vm::disks::WrittenDisk;
use strata_vm::{Networks, OtherDomain};

use super::guest::GuestPart;
use super::guest_disks::{FrozenDisk, Image, others, sum};
use super::moving::Once;
use super::take::captured;
use super::{Snapshots, Tell, guest_files, lock};
use crate::guests::{Alone, Stoppable, memory_at};

/// A guest that can be frozen.
pub(super) struct Freezable<'a> {
    pub(super) stoppable: Arc<Mutex<Stoppable>>,
    pid: u32,
    range: Range,
    files: Vec<Image>,
    /// Disks that it writes to, and what QEMU says of them.
    pub(super) own: Vec<GuestDisk>,
    pub(super) written: Vec<WrittenDisk>,
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
}

impl Snapshots {
    /// Asks a guest what is to be known before, for which its monitor may take `time`.
    pub(super) fn freezable<'a>(
        &'a self,
        tenant: &Arc<Tenant>,
        spec: &GuestSpec,
        time: Duration,
    ) -> Result<Freezable<'a>, String> {
        let launch = spec.launch.as_ref().ok_or(
            "how it was started is not known as text, a disk of it is read through a pool, or it has a swap disk (--swap)",
        )?;
        let alone = self.guests.alone(tenant)?;
        let (stoppable, footing, pid) = Stoppable::new(&self.guests, tenant, time)?;
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
        let image = |path: &String| Image::of(&launch.directory, path);
        let files = footing.files.iter().map(image).collect::<Result<_, _>>()?;
        let own = Self::disks_of(spec, &launch.directory, &footing.disks)?;
        // What no guest could come of is of no use.
        can_come(spec, &tenant.record().name, &self.guests.directory(tenant), &own)?;
        let stoppable = Arc::new(Mutex::new(stoppable));
        Ok(Freezable { stoppable, pid, range, files, own, written: footing.disks, alone })
    }
}

impl Freezable<'_> {
    /// One attempt; none: it is torn. Without it the guest runs on.
    pub(super) fn freeze(
        &self,
        tenant: &Tenant,
        manner: &Manner<'_>,
        tell: Tell<'_>,
    ) -> Result<Option<Frozen>, String> {
        let (pid, stay) = (self.pid, manner.once.is_some());
        let (stops, goes_on) = (Arc::clone(&self.stoppable), Arc::clone(&self.stoppable));
        let stopped = Arc::new(Mutex::new(None));
        let kept = Arc::clone(&stopped);
        let request = SnapshotRequest {
            freeze: Box::new(move || {
                let (since, state) = lock(&stops).stop(stay).map_err(SnapshotError::Failed)?;
                *lock(&kept) = Some((since, state));
                Ok(Standing { pids: vec![pid], since })
            }),
            thaw: Box::new(move || if stay { Ok(()) } else { lock(&goes_on).go_on() }),
            most_frozen_pages: manner.most_frozen_pages,
            stay,
            urgent: manner.urgent,
            only: Some(Only { pid, range: self.range }),
            carry: manner.once.map(Once::carry),
        };
        let taken = tenant.snapshot(request, |done, total| tell(captured(done, total)));
        let stopped = lock(&stopped).take();
        match (taken, stopped) {
            (Ok(freeze), Some((since, state))) => Ok(Some(Frozen { freeze, since, state })),
            (Ok(_), None) => Err("it does not stand still".to_owned()),
            (Err(error), stopped) => {
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
            version: guest_files::VERSION,
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
    let found = strata_vm::again(&words, name, directory, (here, &disks), networks).map(drop);
    found.map_err(|refusal| refusal.to_string())
}
