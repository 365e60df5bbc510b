//! Alarms: the kernel tells when a tenant at rest is charged more memory than it was, so
//! that nobody has to read it in between. With them a tenant that does nothing costs next
//! to nothing: the idle watcher looks now and then whether its processes have run.
//!
//! There are such alarms with cgroups of version 1. Setting one takes some milliseconds,
//! in which the kernel waits, so threads of their own do it; another one waits for them.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use strata_sys::{EventFd, PollSet, alarm_when_charged, poll_readable};

use super::idle_watch;
use crate::map::lock;
use crate::tenant::Tenant;

/// Alarms that are being set at a time.
const SETTERS: usize = 4;
/// So much more than it was charged when the alarm was set. The kernel adds up to half a
/// MiB for each processor.
const MORE_BYTES: u64 = 1 << 20;

const PAUSE: Duration = Duration::from_millis(50);

/// Who has alarms set.
static SETTER: OnceLock<Mutex<Sender<Arc<Tenant>>>> = OnceLock::new();

/// One that is set, until it is dropped. It costs one descriptor: of these a daemon has few,
/// and each tenant needs a dozen.
#[derive(Debug)]
pub(super) struct Alarm {
    event: EventFd,
    usage: PathBuf,
    at_bytes: u64,
}

impl Alarm {
    fn set(directory: &Path) -> Option<Self> {
        let usage = directory.join("memory.usage_in_bytes");
        let at_bytes = charged(&usage)? + MORE_BYTES;
        let event = alarm_when_charged(directory, at_bytes).ok()?;
        let alarm = Self { event, usage, at_bytes };
        // It tells of what passes the mark from now on: it must not have been passed.
        alarm.fits().then_some(alarm)
    }

    /// One that does not go off by itself, at `at_bytes` of what a file says.
    #[cfg(test)]
    pub(super) fn of_file(path: &Path, at_bytes: u64) -> Self {
        let event = EventFd::new().expect("an eventfd");
        Self { event, usage: path.to_owned(), at_bytes }
    }

    /// Whether it has gone off: it does so once.
    pub(super) fn has_rung(&self) -> bool {
        poll_readable([self.event.as_fd()], Some(Duration::ZERO)).is_ok_and(|[at]| at.readable)
    }

    /// Whether it tells in time: what is charged is below the mark, but not far.
    pub(super) fn fits(&self) -> bool {
        let near = self.at_bytes.saturating_sub(2 * MORE_BYTES)..self.at_bytes;
        !self.has_rung() && charged(&self.usage).is_some_and(|bytes| near.contains(&bytes))
    }
}

/// What a cgroup is charged by its file, in bytes.
fn charged(usage: &Path) -> Option<u64> {
    let mut text = [0; 32];
    let count = File::open(usage).ok()?.read_at(&mut text, 0).ok()?;
    std::str::from_utf8(&text[..count]).ok()?.trim_end().parse().ok()
}

/// Has an alarm set for a tenant at rest, unless one is being set; the idle watcher gets it, if
/// the tenant rests still.
pub(super) fn ask(tenant: &Arc<Tenant>) {
    if let Some(setter) = SETTER.get()
        && !tenant.waits_for_alarm.swap(true, Ordering::Relaxed)
    {
        // It takes them as long as it lives.
        let _ = lock(setter).send(Arc::clone(tenant));
    }
}

/// Starts whoever sets alarms and hears them, once. Without them all works and costs more.
///
/// # Errors
/// No descriptor, or no thread.
pub fn start_alarms() -> io::Result<()> {
    let waiting = Arc::new(PollSet::new()?);
    let (asked, asking) = mpsc::channel::<Arc<Tenant>>();
    let asking = Arc::new(Mutex::new(asking));
    let thread = |name: &str| std::thread::Builder::new().name(name.into());
    for _ in 0..SETTERS {
        let (set, asking) = (Arc::clone(&waiting), Arc::clone(&asking));
        let setting = move || {
            strata_sys::set_thread_name("alarm-setter");
            loop {
                let next = lock(&asking).recv();
                let Ok(tenant) = next else { return };
                set_for(&tenant, &set);
                tenant.waits_for_alarm.store(false, Ordering::Relaxed);
            }
        };
        thread("alarm-setter").spawn(setting)?;
    }
    thread("alarms").spawn(move || listen(&waiting))?;
    // A second one would find nobody to send it anything, and end.
    let _ = SETTER.set(Mutex::new(asked));
    Ok(())
}

fn set_for(tenant: &Arc<Tenant>, set: &PollSet) {
    let Some(directory) = &tenant.record.cgroup else { return };
    let Some(alarm) = Alarm::set(Path::new(directory)) else { return };
    if set.add(&alarm.event, idle_watch::key(tenant) as u64).is_ok() {
        idle_watch::give_alarm(tenant, alarm);
    }
}

/// Wakes the keepers of tenants whose alarms have gone off.
fn listen(set: &PollSet) {
    strata_sys::set_thread_name("alarms");
    loop {
        match set.wait() {
            Ok(keys) => keys.into_iter().for_each(|key| idle_watch::alarmed(key as usize)),
            // Of a list that is there none is known; not to spin.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn an_alarm_fits_what_is_charged_just_below_it() {
        let directory = std::env::temp_dir().join(format!("strata-alarm-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("memory.usage_in_bytes");
        let write = |bytes: u64| std::fs::write(&path, format!("{bytes}\n")).expect("written");
        write(10 << 20);
        assert!(Alarm::set(&directory).is_none(), "it is no cgroup");
        let alarm = Alarm::of_file(&path, 11 << 20);
        let fits = |bytes| {
            write(bytes);
            alarm.fits()
        };
        assert!(fits(10 << 20) && fits((11 << 20) - 1) && fits(9 << 20));
        assert!(!alarm.has_rung());
        assert!(!fits(11 << 20) && !fits((9 << 20) - 1) && !fits(0));
        alarm.event.ring();
        write(10 << 20);
        assert!(alarm.has_rung() && !alarm.fits(), "it tells once");
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    /// A memory cgroup of version 1, where this machine has them and this user may make one.
    fn cgroup() -> Option<PathBuf> {
        let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
        let root = mounts.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let is_it = fields[2] == "cgroup" && fields[3].split(',').any(|one| one == "memory");
            is_it.then_some(fields[1])
        })?;
        let directory = Path::new(root).join(format!("strata-alarm-{}", std::process::id()));
        std::fs::create_dir(&directory).ok()?;
        Some(directory)
    }

    #[test]
    fn the_kernel_tells_when_more_is_charged() {
        let Some(directory) = cgroup() else { return println!("skipped: no memory cgroup v1") };
        let script = "read x; y=$(head -c 8000000 /dev/zero | tr '\\0' x); read x";
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", script]).stdin(std::process::Stdio::piped());
        let mut child = shell.spawn().expect("a shell");
        let procs = directory.join("cgroup.procs");
        std::fs::write(procs, child.id().to_string()).expect("it lives");
        let alarm = Alarm::set(&directory).expect("a cgroup");
        assert!(alarm.fits());
        child.stdin.as_mut().expect("piped").write_all(b"\n").expect("it reads");
        let hangs = Some(Duration::from_secs(60));
        assert!(poll_readable([alarm.event.as_fd()], hangs).expect("poll")[0].readable);
        assert!(alarm.has_rung() && !alarm.fits());
        child.kill().expect("it reads again");
        child.wait().expect("it was killed");
        drop(alarm);
        // What it leaves goes a moment later.
        let removed = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            std::fs::remove_dir(&directory).is_ok()
        });
        assert!(removed, "{}", directory.display());
    }
}
