//! A memory cgroup per tenant: what its processes cost is counted there once,
//! however they share it, and (v2) memory that grows before it is managed is
//! slowed down there. Without one, everything works and less is promised.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use strata_sys::{Pidfd, Priority, log, parent_of, try_lock, try_share_lock};
use strata_units::ByteSize;

/// Where the memory controller is.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Hierarchy {
    V1(PathBuf),
    V2(PathBuf),
}

/// The cgroups of this daemon's tenants.
#[derive(Debug)]
pub(crate) struct Cgroups {
    hierarchy: Option<Hierarchy>,
    /// Directory of all tenants of this daemon, below the hierarchy's root.
    group: String,
    /// How many tenants have each: an ended one's may be its successor's already,
    /// of the same name. Nobody removes what is in use, also while it is empty.
    used: Mutex<HashMap<PathBuf, u32>>,
    /// Those of ended tenants that still had a process, since when.
    left: Mutex<Vec<(PathBuf, Instant)>>,
    /// This daemon's directory, and those of daemons before from which tenants were
    /// taken over. Other daemons sweep what no supervisor is there for and nobody locks.
    groups: Mutex<BTreeMap<PathBuf, Option<fs::File>>>,
}

/// Room above the budget before the kernel slows a tenant down (v2): fills are
/// charged there too and must not wait for it.
const HIGH_MARGIN_BYTES: u64 = 16 << 20;
/// A process that has ended is in its cgroup for a little longer: its memory goes
/// first. One that lives on there is left alone.
const DYING: Duration = Duration::from_secs(10);
/// As long as a daemon that ends waits for that.
const ENDING: Duration = Duration::from_millis(200);

/// Beyond this the kernel slows a tenant down.
fn high_bytes(memory_bytes: u64) -> u64 {
    memory_bytes.saturating_add(HIGH_MARGIN_BYTES).saturating_add(memory_bytes / 50)
}

/// Finds the memory controller's mount in the text of `/proc/mounts`.
fn hierarchy_in(mounts: &str) -> Option<Hierarchy> {
    let mut v2 = None;
    for line in mounts.lines() {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (Some(path), Some(kind), Some(options)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if kind == "cgroup" && options.split(',').any(|option| option == "memory") {
            return Some(Hierarchy::V1(path.into()));
        }
        if kind == "cgroup2" {
            v2 = Some(Hierarchy::V2(path.into()));
        }
    }
    v2
}

/// Whether the text of `/proc/PID/cgroup` names a tenant's directory. The path in it
/// begins where the reader's cgroup namespace does.
fn is_among(directory: &Path, groups: &str) -> bool {
    let mut names = directory.iter().rev();
    let (Some(tenant), Some(group)) = (names.next(), names.next()) else { return false };
    let own = Path::new(group).join(tenant);
    let paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.map(Path::new).any(|path| path.ends_with(&own))
}

impl Cgroups {
    /// `kept`: directories of tenants that were there before.
    pub(crate) fn find(supervisor_pid: u32, kept: &[PathBuf]) -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let hierarchy = hierarchy_in(&mounts).filter(|found| match found {
            Hierarchy::V1(_) => true,
            Hierarchy::V2(root) => fs::read_to_string(root.join("cgroup.controllers"))
                .is_ok_and(|list| list.split_ascii_whitespace().any(|name| name == "memory")),
        });
        let group = format!("strata-{supervisor_pid}");
        let this = Self {
            hierarchy,
            group,
            used: Mutex::default(),
            left: Mutex::default(),
            groups: Mutex::default(),
        };
        this.remove_orphans(kept);
        this
    }

    fn used(&self) -> MutexGuard<'_, HashMap<PathBuf, u32>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more tenant that has this one.
    pub(crate) fn hold(&self, directory: &Path) {
        *self.used().entry(directory.to_owned()).or_default() += 1;
        let Some(group) = directory.parent() else { return };
        let mut groups = self.groups();
        if groups.get(group).is_none_or(Option::is_none) {
            groups.insert(group.to_owned(), lock_group(group));
        }
    }

    /// Removes what daemons that are gone left behind.
    fn remove_orphans(&self, kept: &[PathBuf]) {
        let kept = kept.iter().map(|directory| (directory.clone(), 1)).collect();
        let Some(Hierarchy::V1(root) | Hierarchy::V2(root)) = &self.hierarchy else { return };
        for entry in fs::read_dir(root).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid =
                name.to_str().and_then(|name| name.strip_prefix("strata-")?.parse::<u32>().ok());
            let Some(pid) = pid else { continue };
            if Path::new(&format!("/proc/{pid}")).exists() {
                continue;
            }
            sweep(&entry.path(), &kept);
        }
    }

    /// Makes the cgroup of a user's tenant and puts `process` into it, if it is there
    /// already. `memory_bytes`: its budget and what it may have on a node.
    pub(crate) fn make(
        &self,
        uid: u32,
        name: &str,
        process: Option<(u32, &Pidfd)>,
        memory_bytes: u64,
    ) -> io::Result<PathBuf> {
        let hierarchy =
            self.hierarchy.as_ref().ok_or_else(|| io::Error::other("no memory controller"))?;
        let (Hierarchy::V1(root) | Hierarchy::V2(root)) = hierarchy;
        let parent = root.join(&self.group);
        // A number ends before the first '-': no two tenants have one directory.
        let directory = parent.join(format!("{uid}-{name}"));
        self.hold(&directory);
        let prepared = {
            // Or the daemon's own could be swept away in the middle.
            let _used = self.used();
            Self::prepare(hierarchy, root, &directory, memory_bytes)
        };
        if let Err(error) = prepared.and_then(|()| {
            process.map_or(Ok(()), |(pid, pidfd)| Self::adopt(&directory, pid, pidfd))
        }) {
            self.release(&directory);
            return Err(error);
        }
        Ok(directory)
    }

    fn prepare(
        hierarchy: &Hierarchy,
        root: &Path,
        directory: &Path,
        memory_bytes: u64,
    ) -> io::Result<()> {
        if matches!(hierarchy, Hierarchy::V1(_)) {
            return fs::create_dir_all(directory);
        }
        fs::write(root.join("cgroup.subtree_control"), "+memory")?;
        if let Some(parent) = directory.parent() {
            fs::create_dir_all(parent)?;
            fs::write(parent.join("cgroup.subtree_control"), "+memory")?;
        }
        fs::create_dir_all(directory)?;
        fs::write(directory.join("memory.high"), high_bytes(memory_bytes).to_string())
    }

    /// Follows a changed budget.
    pub(crate) fn set_budget(directory: &Path, memory_bytes: u64) -> io::Result<()> {
        let high = directory.join("memory.high");
        if !high.exists() {
            return Ok(());
        }
        let bytes = high_bytes(memory_bytes);
        fs::write(&high, bytes.to_string()).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("cannot set {} to {}: {error}", high.display(), ByteSize(bytes)),
            )
        })
    }

    /// By which a thread can move itself into a tenant's group without waiting; only
    /// with v1.
    pub(crate) fn tasks_file(directory: &Path) -> Option<fs::File> {
        fs::OpenOptions::new().write(true).open(directory.join("tasks")).ok()
    }

    /// Puts the process of `pidfd` into a tenant's group. The kernel takes its number
    /// alone: should that be a stranger's by then, the stranger goes back to where it was.
    pub(crate) fn adopt(directory: &Path, pid: u32, pidfd: &Pidfd) -> io::Result<()> {
        let ended = || io::Error::from(io::ErrorKind::NotFound);
        let groups = |pid| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let before = groups(pid);
        if pidfd.has_exited() {
            return Err(ended());
        }
        let file = directory.join("cgroup.procs");
        fs::write(&file, pid.to_string())?;
        if !pidfd.has_exited() {
            return Ok(());
        }
        // Nobody, its next owner or, for what was read before that came, this process's own.
        if is_among(directory, &groups(pid)) {
            let parent = parent_of(pid).map(groups).unwrap_or_default();
            put_back(directory, pid, [&before, &parent]);
        }
        Err(ended())
    }

    /// Whether a process is in a tenant's group. Asking is cheap, moving one there
    /// is not: the kernel waits until no CPU forks or ends a process.
    pub(crate) fn has(directory: &Path, pid: u32) -> bool {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        is_among(directory, &groups)
    }

    /// Whether a process is in a tenant's group, or in one below it, as this daemon sees
    /// the whole path: nobody without its rights can put one there.
    pub(crate) fn holds(&self, directory: &Path, pid: u32) -> bool {
        let (root, controller) = match &self.hierarchy {
            Some(Hierarchy::V1(root)) => (root, Some("memory")),
            Some(Hierarchy::V2(root)) => (root, None),
            None => return false,
        };
        let Ok(within) = directory.strip_prefix(root) else { return false };
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        group_of(&groups, controller)
            .is_some_and(|own| own.starts_with(Path::new("/").join(within)))
    }

    /// A tenant is gone: removes its cgroup, if that is no other's by now, and the
    /// daemon's own with the last. One in which a process is just dying is removed by
    /// [`Self::remove_left`].
    pub(crate) fn release(&self, directory: &Path) {
        let mut used = self.used();
        if let Some(tenants) = used.get_mut(directory) {
            *tenants -= 1;
            if *tenants == 0 {
                used.remove(directory);
            }
        }
        if used.contains_key(directory) {
            return;
        }
        if is_busy(directory) {
            self.left().push((directory.to_owned(), Instant::now()));
        }
        self.remove_own(&used);
    }

    /// Removes what could not be removed when its tenant ended; whether there is more.
    pub(crate) fn remove_left(&self) -> bool {
        let used = self.used();
        let mut left = self.left();
        if left.is_empty() {
            return false;
        }
        left.retain(|(directory, since)| {
            !used.contains_key(directory) && since.elapsed() < DYING && is_busy(directory)
        });
        let more = !left.is_empty();
        drop(left);
        self.remove_own(&used);
        more
    }

    /// The same when the daemon ends: nobody does it after.
    pub(crate) fn finish(&self) {
        let until = Instant::now() + ENDING;
        while self.remove_left() && Instant::now() < until {
            std::thread::sleep(ENDING / 20);
        }
    }

    fn left(&self) -> MutexGuard<'_, Vec<(PathBuf, Instant)>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn groups(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Option<fs::File>>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes this daemon's own group with the last tenant's, and that of a daemon before
    /// with the last that was taken over from it. What has processes still refuses.
    fn remove_own(&self, used: &HashMap<PathBuf, u32>) {
        self.groups().retain(|group, _| {
            used.keys().any(|directory| directory.starts_with(group))
                || fs::remove_dir(group).is_err_and(|error| error.kind() != io::ErrorKind::NotFound)
        });
    }
}

/// Makes a daemon's group and keeps others from sweeping it away, also while its tenants
/// have no process, as in a rollback. None: it cannot be made, or somebody keeps it locked
/// (everybody may), and then nobody sweeps it either.
fn lock_group(group: &Path) -> Option<fs::File> {
    // Whoever sweeps has it locked for a moment, and may have removed it then.
    (0..5).find_map(|attempt| {
        std::thread::sleep(Duration::from_millis(attempt));
        fs::create_dir_all(group).ok()?;
        let file = fs::File::open(group).ok()?;
        let is_locked = try_share_lock(file.as_fd()).ok()?;
        let is_it = fs::metadata(group).ok()?.ino() == file.metadata().ok()?.ino();
        (is_locked && is_it).then_some(file)
    })
}

/// Removes a group; whether it has a process still.
fn is_busy(directory: &Path) -> bool {
    fs::remove_dir(directory).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
}

/// The group of a controller (none: of version 2) in the text of `/proc/PID/cgroup`.
fn group_of<'a>(groups: &'a str, controller: Option<&str>) -> Option<&'a Path> {
    groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let is_it = match controller {
            Some(wanted) => controllers.split(',').any(|one| one == wanted),
            None => number == "0" && controllers.is_empty(),
        };
        is_it.then(|| Path::new(path))
    })
}

/// Moves a process that was put into a tenant's group by mistake to where one of `places`
/// (texts of `/proc/PID/cgroup`) has been, in the same hierarchy.
fn put_back(directory: &Path, pid: u32, places: [&str; 2]) {
    let Some(root) = directory.parent().and_then(Path::parent) else { return };
    let fits = |line: &&str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next().unwrap_or_default();
        let is_ours = controllers.is_empty() || controllers.split(',').any(|one| one == "memory");
        is_ours && !is_among(directory, line)
    };
    let former = places.into_iter().flat_map(|text| text.lines().filter(fits)).find_map(|line| {
        let group = line.splitn(3, ':').nth(2)?;
        let procs = root.join(group.trim_start_matches('/')).join("cgroup.procs");
        procs.exists().then_some(procs)
    });
    let former = former.unwrap_or_else(|| root.join("cgroup.procs"));
    if let Err(error) = fs::write(&former, pid.to_string()) {
        let text = format!(
            "process {pid} was put into {} by mistake and cannot be put back: {error}",
            directory.display()
        );
        log(Priority::Warning, text);
    }
}

/// Removes a daemon's cgroups that are not in use, and its own if none is left. One
/// that has processes refuses, and what another daemon has locked is not touched.
fn sweep(group: &Path, used: &HashMap<PathBuf, u32>) {
    let Ok(file) = fs::File::open(group) else { return };
    if !try_lock(file.as_fd()).unwrap_or(true) {
        return;
    }
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !used.contains_key(&path) {
            let _ = fs::remove_dir(path);
        }
    }
    let _ = fs::remove_dir(group);
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
