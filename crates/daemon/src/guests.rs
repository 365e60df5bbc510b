//! Tenants that are virtual machines: the directory that their QEMU takes for the place
//! of the guest's memory, and what their monitors say.
//!
//! A guest's directory belongs to its user, and so does all that is in it: nothing there is
//! trusted. Whoever answers at the monitor's socket must be a process of the tenant, and is
//! asked for little, seldom, and not for long. What the daemon knows of a guest lies beside
//! the directory, for the next worker.

mod balloons;
mod channel;
mod disks;
mod libvirts;
mod mirrors;
mod monitor;
mod orders;
mod steps;
mod stopping;
mod takeover;

pub(crate) use balloons::Lack;
pub(crate) use disks::{DiskCopy, create_image, create_image_over, keep};
pub(crate) use mirrors::{FarDisk, Mirrored};
pub(crate) use monitor::{Alone, Talk, memory_at, who_answers};
pub(crate) use stopping::{MOST_STATE_BYTES, Stoppable, give_state};
pub(crate) use takeover::{BEFORE_SUFFIX, Undone};

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use strata_api::{BalloonStats, GuestSpec, GuestStats, Reply, Stats};
use strata_pager::Tenant;
use strata_sys::peer::Peer;
use strata_sys::{Priority, log};
use strata_vm::{Described, GuestState, look};

use crate::commands::error;
use crate::lock::lock;
use crate::tenants::Tenants;

/// The guests' directories, in the directory of the sockets.
const DIRECTORY: &str = "guests";
/// What begins the name of what is known of a guest: no tenant's name does.
const RECORD_PREFIX: char = '.';
/// What begins the name of what says that a guest stands still for a snapshot.
const STILL_PREFIX: char = '=';
/// What begins the name of what says that an agent in a guest has spoken ([`balloons`]).
const HEARD_PREFIX: char = '+';
/// What ends the name of the directory of a QEMU that is about to take a guest's place: no
/// tenant's name does.
const NEXT_SUFFIX: char = '~';
/// What begins the name of what is to be removed: no tenant's name does either.
const ASIDE_PREFIX: &str = "-";
/// What libvirt calls the monitor that it talks by.
const LIBVIRTS_MONITOR: &str = "charmonitor";
/// How often a guest is asked.
const EVERY: Duration = Duration::from_secs(2);
/// How often one that does not answer is asked at last: each time the pause doubles.
const SELDOM: Duration = Duration::from_secs(64);
/// What one conversation may take, whoever is at the other end.
const CONVERSATION: Duration = Duration::from_millis(500);
/// How often it is looked whether one is due.
const LOOK_EVERY: Duration = Duration::from_millis(500);

struct Guest {
    spec: GuestSpec,
    /// When it came to be known: a second one of its name is another one.
    made: Instant,
    self_balloon: Option<BalloonStats>,
    lack: Option<Lack>,
    said: Option<GuestState>,
    trouble: String,
    due: Instant,
    pause: Duration,
}

impl Guest {
    fn new(spec: GuestSpec) -> Self {
        let (made, self_balloon) =
            (Instant::now(), spec.self_balloon.map(|_| BalloonStats::default()));
        let trouble = String::new();
        Self { spec, made, self_balloon, lack: None, said: None, trouble, due: made, pause: EVERY }
    }

    fn stats(&self) -> GuestStats {
        let said = self.said.clone().unwrap_or_default();
        let accelerator = match &self.said {
            None => "",
            Some(said) if said.is_kvm => "kvm",
            Some(_) => "tcg",
        };
        GuestStats {
            memory_bytes: self.spec.memory_bytes,
            machine: self.spec.machine.clone(),
            accelerator: accelerator.to_owned(),
            status: said.status,
            trouble: self.trouble.clone(),
            monitor: String::new(),
            balloon_bytes: said.balloon_bytes,
            free_bytes: said.free_bytes,
            available_bytes: said.available_bytes,
            swap: None,
            self_balloon: self.self_balloon.clone(),
        }
    }

    /// Takes in how a conversation went.
    fn heard(&mut self, outcome: Result<GuestState, String>, now: Instant) {
        match outcome {
            Ok(said) => {
                self.said = Some(said);
                self.trouble.clear();
                self.pause = EVERY;
            }
            // Figures of earlier are no figures of now.
            Err(trouble) => {
                self.said = None;
                self.trouble = trouble;
                self.pause = (self.pause * 2).min(SELDOM);
            }
        }
        self.due = now + self.pause;
    }
}

/// All of them.
pub(crate) struct Guests {
    directory: PathBuf,
    tenants: Arc<Tenants>,
    /// By what their directories are called.
    known: Mutex<BTreeMap<String, Guest>>,
    /// Those whose monitors somebody talks to for longer: nobody else asks them.
    talking: Mutex<BTreeSet<String>>,
    /// Those whose disks are being copied to another host, by somebody who sees to it.
    mirrored: Mutex<BTreeSet<String>>,
    /// Those whose agents are being told something: nobody else talks to them.
    ordering: Mutex<BTreeSet<String>>,
    /// What QEMUs are that are about to take the places of others.
    coming: Mutex<BTreeMap<String, GuestSpec>>,
    /// Monitors of libvirt's guests, and whose they are.
    libvirts: Mutex<BTreeMap<String, (u32, PathBuf)>>,
}

/// What a guest's directory is called. Two users may each have a guest of one name.
fn folder(uid: u32, name: &str) -> String {
    format!("{uid}.{name}")
}

impl Guests {
    /// Those that an earlier worker knew, and a thread that asks them all.
    pub(crate) fn start(socket_dir: &Path, tenants: &Arc<Tenants>) -> io::Result<Arc<Self>> {
        let guests = Arc::new(Self {
            directory: socket_dir.join(DIRECTORY),
            tenants: Arc::clone(tenants),
            known: Mutex::default(),
            talking: Mutex::default(),
            mirrored: Mutex::default(),
            ordering: Mutex::default(),
            coming: Mutex::default(),
            libvirts: Mutex::default(),
        });
        for tenant in tenants.list() {
            let record = tenant.record();
            let (name, folder) = (&record.name, folder(record.uid, &record.name));
            let Ok(text) = fs::read_to_string(guests.record(&folder)) else { continue };
            match serde_json::from_str(&text) {
                Ok(spec) => drop(lock(&guests.known).insert(folder, Guest::new(spec))),
                Err(error) => {
                    let line = format!("{name}: what is known of the guest is lost: {error}");
                    log(Priority::Warning, line);
                }
            }
        }
        let asking = Arc::clone(&guests);
        std::thread::Builder::new().name("guests".into()).spawn(move || {
            loop {
                asking.let_go_on();
                asking.tidy();
                asking.ask_due();
                std::thread::sleep(LOOK_EVERY);
            }
        })?;
        guests.follow()?;
        Ok(guests)
    }

    fn record(&self, folder: &str) -> PathBuf {
        self.directory.join(format!("{RECORD_PREFIX}{folder}"))
    }

    /// The tenant whose directory is called so.
    fn tenant(&self, folder: &str) -> Option<Arc<Tenant>> {
        let (uid, name) = folder.split_once('.')?;
        self.tenants.get(uid.parse().ok()?, name)
    }

    /// A directory for a tenant that is about to become a guest.
    pub(crate) fn make(&self, peer: Peer, tenant: &Tenant, spec: GuestSpec) -> Reply {
        let record = tenant.record();
        let name = &record.name;
        if let Some(problem) = spec.problem() {
            return error(format!("{name} is no guest: {problem}"), "");
        }
        if tenant.attachment().0 {
            return error(format!("{name} runs already, and what runs becomes no guest"), "");
        }
        // Only what comes from a snapshot has any.
        self.make_for(peer, tenant, GuestSpec { disks: Vec::new(), libvirt: None, ..spec })
    }

    /// The same for a tenant that is to be a guest again: nobody is in it; or the `next`
    /// QEMU is to take the place of the one that is.
    pub(crate) fn make_again(
        &self,
        peer: Peer,
        tenant: &Tenant,
        spec: GuestSpec,
        next: bool,
    ) -> Reply {
        // Whole it is in its snapshot: passwords are in it.
        let spec = GuestSpec { libvirt: spec.libvirt.map(|_| String::new()), ..spec };
        if !next {
            return self.make_for(peer, tenant, spec);
        }
        let record = tenant.record();
        let name = &record.name;
        match self.make_empty(peer, &self.next_directory(tenant)) {
            Ok(directory) => {
                lock(&self.coming).insert(folder(record.uid, name), spec);
                Reply::Guest { directory }
            }
            Err(why) => error(format!("no directory for the guest {name}: {why}"), ""),
        }
    }

    fn make_for(&self, peer: Peer, tenant: &Tenant, spec: GuestSpec) -> Reply {
        let record = tenant.record();
        let (name, folder) = (&record.name, folder(record.uid, &record.name));
        // Against `tidy`, which would take a directory away that nobody has yet.
        let mut known = lock(&self.known);
        // Of an earlier life.
        let _ = fs::remove_file(self.mark(tenant));
        let _ = self.put_aside(&self.next_directory(tenant));
        lock(&self.coming).remove(&folder);
        let _ = fs::remove_file(self.heard_mark(&folder));
        match self.make_directory(peer, &folder, &spec) {
            Ok(directory) => {
                known.insert(folder, Guest::new(spec));
                Reply::Guest { directory }
            }
            Err(why) => {
                let what = format!("no directory for the guest {name}: {why}");
                error(what, "see to stratad's socket_dir")
            }
        }
    }

    /// The directory of all guests' directories, and marks.
    fn make_all(&self) -> io::Result<()> {
        match DirBuilder::new().mode(0o711).create(&self.directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            // Whatever the umask is.
            _ => fs::set_permissions(&self.directory, Permissions::from_mode(0o711)),
        }
    }

    fn make_directory(&self, peer: Peer, folder: &str, spec: &GuestSpec) -> io::Result<String> {
        self.make_all()?;
        let directory = self.make_empty(peer, &self.directory.join(folder))?;
        self.write_record(folder, spec)?;
        Ok(directory)
    }

    fn write_record(&self, folder: &str, spec: &GuestSpec) -> io::Result<()> {
        let text = serde_json::to_vec(spec).map_err(io::Error::other)?;
        fs::write(self.record(folder), text)
    }

    fn make_empty(&self, peer: Peer, directory: &Path) -> io::Result<String> {
        self.put_aside(directory)?;
        DirBuilder::new().mode(0o700).create(directory)?;
        chown(directory, Some(peer.uid), Some(peer.gid))?;
        // As the kernel names it: that is what the library compares.
        let directory = directory.canonicalize()?;
        directory.into_os_string().into_string().map_err(|_| io::ErrorKind::InvalidFilename.into())
    }

    /// Has a name be free at once, however long it takes to remove what has it.
    fn put_aside(&self, path: &Path) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let aside = self.directory.join(format!("{ASIDE_PREFIX}{number}"));
            // An earlier worker may have left some.
            if fs::symlink_metadata(&aside).is_ok() {
                continue;
            }
            return match fs::rename(path, aside) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            };
        }
    }

    /// Takes away what ended guests have left.
    fn tidy(&self) {
        let entries = || fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let mut known = lock(&self.known);
        for entry in entries() {
            let file = entry.file_name();
            let Some(name) = file.to_str() else { continue };
            let folder =
                name.strip_prefix([RECORD_PREFIX, STILL_PREFIX, HEARD_PREFIX]).unwrap_or(name);
            let folder = folder.strip_suffix(NEXT_SUFFIX).unwrap_or(folder);
            if !folder.starts_with(ASIDE_PREFIX) && self.tenant(folder).is_none() {
                // The next round tries again.
                let _ = self.put_aside(&entry.path());
            }
        }
        known.retain(|folder, _| self.tenant(folder).is_some());
        drop(known);
        lock(&self.libvirts).retain(|folder, _| self.tenant(folder).is_some());
        for entry in entries() {
            if entry.file_name().as_encoded_bytes().starts_with(ASIDE_PREFIX.as_bytes()) {
                let _ = remove(&entry.path());
            }
        }
    }

    /// Asks the guests whose time has come.
    fn ask_due(&self) {
        let now = Instant::now();
        let due = |(folder, guest): (&String, &Guest)| (guest.due <= now).then(|| folder.clone());
        let folders: Vec<String> = lock(&self.known).iter().filter_map(due).collect();
        for folder in folders {
            // Its monitor hears one at a time.
            let Some(_alone) = self.alone_now(&folder) else { continue };
            let Some(tenant) = self.tenant(&folder) else { continue };
            let balloon = match lock(&self.known).get(&folder) {
                Some(guest) => guest.spec.balloon.clone(),
                None => continue,
            };
            let outcome = self.ask(&tenant, balloon.as_deref());
            if let Some(guest) = lock(&self.known).get_mut(&folder) {
                let failed = |said: &GuestState| said.status == monitor::IO_ERROR;
                let is_new = !guest.said.as_ref().is_some_and(failed);
                if is_new && outcome.as_ref().is_ok_and(failed) {
                    let name = &tenant.record().name;
                    log(
                        Priority::Warning,
                        format_args!(
                            "{name} stands still: a disk of it failed; {}",
                            monitor::NO_ROOM
                        ),
                    );
                }
                guest.heard(outcome, Instant::now());
            }
        }
    }

    fn ask(&self, tenant: &Tenant, balloon: Option<&str>) -> Result<GuestState, String> {
        let mut talk = self.talk(tenant, &self.directory(tenant), CONVERSATION)?;
        look(&mut talk.monitor, balloon).map_err(|error| error.to_string())
    }

    /// Adds what is known of a guest to what is known of it as a tenant.
    pub(crate) fn add(&self, stats: &mut Stats) {
        stats.guest = lock(&self.known).get(&folder(stats.uid, &stats.name)).map(Guest::stats);
        if stats.guest.is_none() && stats.pids.len() == 1 {
            stats.guest = others_guest(&stats.command);
        }
    }
}

/// A guest that somebody else started, by its command line: it is promised what that says,
/// and its monitor is not ours to ask.
fn others_guest(command: &[String]) -> Option<GuestStats> {
    let program = Path::new(command.first()?).file_name()?.to_str()?;
    let is_qemu = program.starts_with("qemu-system-") || ["qemu-kvm", "kvm"].contains(&program);
    let Described { name, memory, machine, accelerator } = strata_vm::described(command);
    if !is_qemu || name.is_none() {
        return None;
    }
    let is_libvirts = command.iter().any(|word| word.contains(LIBVIRTS_MONITOR));
    Some(GuestStats {
        memory_bytes: memory?.0,
        machine: machine.unwrap_or_default(),
        accelerator: accelerator.unwrap_or_default(),
        monitor: if is_libvirts { "libvirt's" } else { "not Strata's" }.to_owned(),
        ..GuestStats::default()
    })
}

/// Removes a file, or a directory with the files in it. Directories in there, which QEMU
/// makes none of, stay, and with them the one around them: they may nest as deep as their
/// user likes.
fn remove(path: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.is_dir() {
        return fs::remove_file(path);
    }
    for entry in fs::read_dir(path)?.flatten() {
        let _ = fs::remove_file(entry.path());
    }
    fs::remove_dir(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> GuestSpec {
        let balloon = Some("b".into());
        GuestSpec {
            memory_bytes: 4 << 30,
            machine: "q35".into(),
            balloon,
            launch: None,
            disks: Vec::new(),
            self_balloon: None,
            libvirt: None,
            agent: false,
        }
    }

    fn said() -> GuestState {
        GuestState {
            status: "running".into(),
            is_kvm: true,
            balloon_bytes: Some(3 << 30),
            free_bytes: Some(1 << 30),
            available_bytes: Some(2 << 30),
        }
    }

    #[test]
    fn a_guest_that_does_not_answer_is_asked_less_and_less_and_has_no_figures() {
        let mut guest = Guest::new(spec());
        let now = Instant::now();
        assert_eq!((guest.stats().accelerator.as_str(), guest.stats().memory_bytes), ("", 4 << 30));
        guest.heard(Ok(said()), now);
        assert_eq!(guest.due, now + EVERY);
        let stats = guest.stats();
        assert_eq!((stats.accelerator.as_str(), stats.status.as_str()), ("kvm", "running"));
        assert_eq!((stats.balloon_bytes, stats.free_bytes), (Some(3 << 30), Some(1 << 30)));
        for pause in [4, 8, 16, 32, 64, 64] {
            guest.heard(Err("gone".into()), now);
            assert_eq!(guest.due, now + Duration::from_secs(pause));
        }
        let stats = guest.stats();
        assert_eq!((stats.balloon_bytes, stats.trouble.as_str()), (None, "gone"));
        guest.heard(Ok(said()), now);
        assert_eq!((guest.due, guest.stats().trouble.as_str()), (now + EVERY, ""));
    }

    #[test]
    fn guests_of_others_are_known_by_their_command_lines() {
        let line =
            |text: &str| -> Vec<String> { text.split_whitespace().map(str::to_owned).collect() };
        let libvirts = "/usr/bin/qemu-system-x86_64 -name guest=web,debug-threads=on -S \
                        -machine pc-q35-7.2 -accel tcg,tb-size=64 -m size=327680k -chardev socket,id=charmonitor,fd=3";
        let guest = others_guest(&line(libvirts)).expect("a guest");
        assert_eq!((guest.memory_bytes, guest.machine.as_str()), (320 << 20, "pc-q35-7.2"));
        assert_eq!((guest.accelerator.as_str(), guest.monitor.as_str()), ("tcg", "libvirt's"));
        let own = others_guest(&line("kvm -name x -m 1G")).expect("a guest");
        assert_eq!((own.memory_bytes, own.monitor.as_str()), (1 << 30, "not Strata's"));
        for other in ["", "redis -name x -m 1G", "kvm -m 1G", "qemu-system-x86_64 -name x"] {
            assert_eq!(others_guest(&line(other)), None, "{other}");
        }
    }

    #[test]
    fn what_is_removed_is_not_what_a_link_leads_to() {
        let base = std::env::temp_dir().join(format!("strata-guests-{}", std::process::id()));
        let (kept, gone, deep) = (base.join("kept"), base.join("gone"), base.join("deep"));
        for directory in [&kept, &gone, &deep.join("inner")] {
            fs::create_dir_all(directory).expect("a directory");
        }
        fs::write(kept.join("file"), "x").expect("a file");
        fs::write(gone.join("file"), "x").expect("a file");
        std::os::unix::fs::symlink(&kept, gone.join("link")).expect("a link");
        std::os::unix::fs::symlink(&kept, base.join("link")).expect("a link");
        remove(&gone).expect("removed");
        remove(&base.join("link")).expect("removed");
        assert!(remove(&deep).is_err() && remove(&base.join("nothing")).is_err());
        assert!(kept.join("file").exists() && !gone.exists() && deep.exists());
        fs::remove_dir_all(&base).expect("clean up");
    }
}
