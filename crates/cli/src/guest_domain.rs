//! Guests of libvirt's that come from snapshots: libvirt starts their QEMU, paused, as a
//! domain that it forgets when it has ended, and the daemon gives it memory and devices.
//!
//! libvirt has one QEMU of a domain. So in a rollback the one that runs is ended before the
//! other is started; before that it was seen that the other can come, and a snapshot was
//! taken of what runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use strata_api::{GuestSpec, Reply, Request, RevivedTenant, SnapshotInfo, SnapshotRef};
use strata_units::wire::{ENV_SOCKET, ENV_TOKEN};
use strata_vm::{Networks, OtherDomain, other_domain};

use crate::client::misunderstood;
use crate::failure::{Failure, Result, printable};
use crate::guest_again::{self, Wish, others};
use crate::libvirt::MONITORS;
use crate::program::{self, Caller};
use crate::snapshots::long;
use crate::virsh::Virsh;
use crate::{run, vm};

/// Where libvirt writes the numbers of its QEMUs.
const NUMBERS: &str = "/run/libvirt/qemu";
/// How long a domain that was ended may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A domain that waits.
pub(crate) struct Paused {
    virsh: Virsh,
    name: String,
    pub(crate) pid: u32,
    pub(crate) consoles: Vec<PathBuf>,
    /// Tap devices that lead nowhere.
    pub(crate) taps: Vec<String>,
}

impl Paused {
    /// Nobody has seen it run.
    pub(crate) fn end(self) {
        if let Err(failure) = self.virsh.destroy(&self.name) {
            run::warn(&format!("the domain {} waits for ever: {failure}", printable(&self.name)));
        }
    }
}

/// Has libvirt start a guest, which waits.
pub(crate) fn start(
    tenant: &str,
    guest: &GuestSpec,
    environment: &[(String, String)],
    networks: Networks<'_>,
    what: &str,
) -> Result<Paused> {
    let virsh = Virsh::find(what)?;
    virsh.check_system()?;
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid")
        .map_err(|error| Failure::new(what, format!("no uuid: {error}")))?;
    let value = |key: &str| {
        let found = environment.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str()).ok_or_else(|| misunderstood(what))
    };
    let wish = OtherDomain {
        clone: matches!(networks, Networks::Clone(_)).then_some(tenant),
        uuid: uuid.trim(),
        monitor_directory: MONITORS,
        tenant: (value(ENV_SOCKET)?, value(ENV_TOKEN)?),
        disks: &others(guest),
        networks,
    };
    let domain = other_domain(guest.libvirt.as_deref().unwrap_or_default(), &wish);
    let domain = domain.map_err(|mut refusals| vm::refusal_of(what, refusals.remove(0)))?;
    let launch = guest.launch.as_ref().ok_or_else(|| misunderstood(what))?;
    let program = program::examine(domain.emulator.as_ref(), "".as_ref(), Caller::this())?;
    let version = vm::version(&program, what)?;
    if let Some(failure) = vm::other_version(version, &launch.version, what) {
        return Err(failure);
    }
    for note in &domain.notes {
        eprintln!("strata: {tenant}: {}", printable(note));
    }
    virsh.create(&domain.text)?;
    let number = Path::new(NUMBERS).join(format!("{}.pid", domain.name));
    let pid = fs::read_to_string(&number).ok().and_then(|text| text.trim().parse().ok());
    let consoles = domain.consoles.into_iter().map(PathBuf::from).collect();
    let (name, taps) = (domain.name, domain.taps);
    let paused = Paused { virsh, name, pid: pid.unwrap_or(0), consoles, taps };
    if pid.is_none() {
        let why = format!("{} does not say which process it is", number.display());
        paused.end();
        return Err(Failure::new(what, why));
    }
    Ok(paused)
}

/// The guest `name` goes back: what runs is ended when it is known that the other can come,
/// and that it can come back itself.
pub(crate) fn rollback(
    socket: &Path,
    name: &str,
    found: &SnapshotInfo,
    what: &str,
) -> Result<Vec<RevivedTenant>> {
    if name != found.tenant {
        return Err(Failure::new(what, format!("the snapshot is of {}", found.tenant))
            .todo("restore it under a name of its own"));
    }
    let target = SnapshotRef::from(found.id.clone());
    let rehearsal = format!("{name}-rehearsal");
    let wish = Wish { rehearse: true, ..Wish::one(&rehearsal, 0) };
    guest_again::revive(socket, &target, &wish, what)?;
    let request = Request::Snapshot { name: name.to_owned(), label: None, persist: false };
    let Reply::Snapshot { snapshot: now, .. } = long(socket, &request, what)? else {
        return Err(misunderstood(what));
    };
    let undo = SnapshotRef::from(now.id.clone());
    let back =
        |snapshot: &SnapshotRef| guest_again::revive(socket, snapshot, &Wish::one(name, 0), what);
    let forget = || {
        let request = Request::SnapshotRemove { snapshot: undo.clone() };
        if let Err(failure) = long(socket, &request, what) {
            run::warn(&format!("{} is left of it: {failure}", now.id));
        }
    };
    let domain = match running(socket, name, what) {
        Ok(domain) => domain,
        Err(failure) => {
            forget();
            return Err(failure);
        }
    };
    if let Err(failure) = end(socket, name, &domain, what) {
        // It may have ended all the same.
        return Err(failure.todo(format!("what it was is in {} (strata restore)", now.id)));
    }
    match back(&target) {
        Ok(tenants) => {
            forget();
            Ok(tenants)
        }
        Err(failure) => match back(&undo) {
            Ok(_) => {
                forget();
                Err(failure.todo(format!("{name} is back as it was before")))
            }
            Err(too) => Err(Failure::new(what, failure).todo(format!(
                "it could not come back as it was either ({too}); what it was is in {} (strata restore)",
                now.id
            ))),
        },
    }
}

fn pids(socket: &Path, name: &str, what: &str) -> Result<Vec<u32>> {
    match long(socket, &Request::Stats { name: name.to_owned() }, what)? {
        Reply::Stats { stats } => Ok(stats.pids),
        _ => Err(misunderstood(what)),
    }
}

/// The domain that a tenant runs as.
fn running(socket: &Path, name: &str, what: &str) -> Result<String> {
    let pids = pids(socket, name, what)?;
    let domain = |entry: fs::DirEntry| {
        let path = entry.path();
        let domain = path.file_name()?.to_str()?.strip_suffix(".pid")?.to_owned();
        let pid: u32 = fs::read_to_string(&path).ok()?.trim().parse().ok()?;
        (pids == [pid]).then_some(domain)
    };
    let found = fs::read_dir(NUMBERS).into_iter().flatten().flatten().find_map(domain);
    found.ok_or_else(|| {
        Failure::new(what, format!("libvirt knows nothing of the process of {name}"))
            .todo("see virsh list")
    })
}

/// Has libvirt end a domain, and the tenant know it.
fn end(socket: &Path, name: &str, domain: &str, what: &str) -> Result<()> {
    Virsh::find(what)?.destroy(domain)?;
    let until = Instant::now() + GONE_WITHIN;
    while !pids(socket, name, what)?.is_empty() {
        if Instant::now() > until {
            return Err(Failure::new(what, "its QEMU was ended and is not gone yet"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
