//! Guests that libvirt has started: what they are, by the files that libvirt keeps of them,
//! and where Strata's own monitor is in them (`strata vm libvirt`).
//!
//! libvirt's files are root's, and looked at as the guest's QEMU sees the file system: it
//! can be another one than ours. QEMU itself may write neither there, nor mount anything: it
//! is in the user namespace that the daemon is in, without rights of root's.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use strata_api::{GuestSpec, Launch};
use strata_pager::Tenant;
use strata_sys::OPEN_NO_LINK;
use strata_sys::peer::Peer;
use strata_vm::{LiveDomain, live_domain, state, with_images};

use super::monitor::name_of;
use super::{Guests, lock};
use crate::program::Program;

/// Where libvirt keeps what it knows of the domains that run.
const DOMAINS: &str = "run/libvirt/qemu";
/// What starts its guests.
const MASTERS: [&str; 2] = ["libvirtd", "virtqemud"];
/// Domains' files that are looked at, and how large they are.
const MOST_DOMAINS: usize = 4096;
const MOST_BYTES: u64 = 8 << 20;
/// What one question may take.
const ASKED_WITHIN: Duration = Duration::from_secs(5);

impl Guests {
    /// What a tenant is that is a guest of libvirt's, as it runs. None: it is none.
    ///
    /// # Errors
    /// It is one, and has no monitor of ours, or that does not answer.
    pub(crate) fn libvirts(&self, tenant: &Tenant) -> Result<Option<GuestSpec>, String> {
        let Some((_, domain)) = domain_of(tenant) else { return Ok(None) };
        if domain.monitor.is_none() {
            return Err(format!(
                "libvirt has started it without a monitor for strata: strata vm libvirt {} --apply, and start it anew",
                domain.name
            ));
        }
        lock(&self.libvirts).remove(&name_of(tenant));
        self.make_all().map_err(|error| format!("stratad's socket_dir: {error}"))?;
        let mut talk = self.talk(tenant, &self.directory(tenant), ASKED_WITHIN)?;
        let version = state::version(&mut talk.monitor).map_err(|error| error.to_string())?;
        let launch = Launch {
            command: vec![domain.emulator],
            directory: "/".to_owned(),
            version: version.to_string(),
            disks: Vec::new(),
            swap_bytes: None,
        };
        let disks = self.known_spec(tenant).map(|spec| spec.disks).unwrap_or_default();
        // As the command line of a clone has it: what the first one's images are called.
        let images: Vec<_> = disks.iter().map(|disk| (&*disk.opened, &*disk.said)).collect();
        let text = with_images(&domain.text, &images);
        Ok(Some(GuestSpec {
            memory_bytes: domain.memory.0,
            machine: domain.machine,
            balloon: None,
            launch: Some(launch),
            disks,
            self_balloon: None,
            libvirt: Some(text),
            agent: domain.agent.is_some(),
        }))
    }

    /// Where the monitor of Strata's own is in a guest of libvirt's.
    pub(super) fn libvirts_monitor(&self, tenant: &Tenant) -> Option<PathBuf> {
        let folder = name_of(tenant);
        let pids = tenant.pids();
        if let Some((pid, path)) = lock(&self.libvirts).get(&folder)
            && pids == [*pid]
        {
            return Some(path.clone());
        }
        let (pid, domain) = domain_of(tenant)?;
        let path = root_of(pid).join(domain.monitor?.trim_start_matches('/'));
        lock(&self.libvirts).insert(folder, (pid, path.clone()));
        Some(path)
    }
}

/// The socket of the port of an agent in a guest of libvirt's, as it is reached from here,
/// and what QEMU calls it.
pub(super) fn libvirts_port(tenant: &Tenant) -> Option<(PathBuf, String)> {
    let (pid, domain) = domain_of(tenant)?;
    let (path, id) = domain.agent?;
    Some((root_of(pid).join(path.trim_start_matches('/')), id))
}

/// Whether a process is libvirt's master, which listens where its guests' sockets are.
pub(super) fn is_master(peer: Peer) -> bool {
    let program = Program::of(peer.pid).ok().and_then(|program| program.exe);
    let name = program.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    peer.uid == 0 && name.is_some_and(|name| MASTERS.contains(&name))
}

/// The file system as a process has it.
fn root_of(pid: u32) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join("root")
}

/// The domain whose QEMU is a tenant's only process, and that one.
fn domain_of(tenant: &Tenant) -> Option<(u32, LiveDomain)> {
    let [pid] = tenant.pids()[..] else { return None };
    // A program that is no QEMU has the machine's domains not searched.
    let program = Program::of(pid).ok()?.exe?;
    let name = program.file_name()?.to_str()?;
    if !name.starts_with("qemu-") && name != "kvm" {
        return None;
    }
    if !is_in_our_user_namespace(pid) {
        return None;
    }
    let directory = root_of(pid).join(DOMAINS);
    let entries = fs::read_dir(directory).ok()?.flatten().take(MOST_DOMAINS);
    let files = entries.map(|entry| entry.path());
    let mut files = files.filter(|path| path.extension().is_some_and(|end| end == "xml"));
    files.find_map(|path| Some((pid, live_domain(&roots(&path)?, pid)?)))
}

/// In another one anybody can mount files of root's under names of libvirt's.
fn is_in_our_user_namespace(pid: u32) -> bool {
    let of = |who: &str| fs::metadata(format!("/proc/{who}/ns/user")).map(|found| found.ino());
    matches!((of(&pid.to_string()), of("self")), (Ok(its), Ok(ours)) if its == ours)
}

/// What a file says that is root's, and whose name leads nowhere else.
fn roots(path: &Path) -> Option<String> {
    let mut options = File::options();
    let file = options.read(true).custom_flags(OPEN_NO_LINK).open(path);
    let file = file.ok()?;
    let found = file.metadata().ok()?;
    if !found.is_file() || found.uid() != 0 || found.mode() & 0o022 != 0 {
        return None;
    }
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_in_a_user_namespace_of_its_own_is_told() {
        assert!(is_in_our_user_namespace(std::process::id()));
        let mut other = Command::new("unshare");
        other.args(["--user", "sh", "-c", "echo; read _"]);
        other.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let Ok(mut other) = other.spawn() else { return println!("skipped: no unshare here") };
        let said = other.stdout.as_mut().expect("piped").read(&mut [0]).expect("read");
        if said == 1 {
            assert!(!is_in_our_user_namespace(other.id()));
        } else {
            println!("skipped: no user namespaces here");
        }
        drop(other.stdin.take());
        let _ = other.wait();
    }
}
