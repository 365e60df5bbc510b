//! A daemon begins in a directory where another one was: refused while that one lives,
//! takes over what its holder has when it is dead. docs/takeover.md has the order, and why
//! each step may be the last.

use std::collections::HashSet;
use std::fs::Permissions;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use strata_api::{MARK_NAME, MOST_MARK_BYTES, Mark};
use strata_pager::{Registry, Tenant};
use strata_sys::{
    Access, Directory, OpenThere, Pidfd, Priority, SIGKILL, copy_descriptor, descriptors_of, log,
    move_above, note_of, noted, put_at, shares_descriptors, sharing_descriptors_with, try_lock,
};
use strata_units::ByteSize;

/// What the mark is called until it is whole.
const NEW_MARK: &str = "holder.new";
/// How long another daemon may take that begins in the same directory.
const TURN: Duration = Duration::from_secs(20);
/// How long processes have to end that were killed: one may stand in the kernel.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Numbers below are every process's own: standard input, output and error.
const FIRST_NUMBER: RawFd = 3;
const TOO_MANY: &str = "it has more descriptors than this process may have (LimitNOFILE=)";

/// A daemon's directory, while nobody else begins in it.
#[derive(Debug)]
pub(crate) struct Place {
    path: PathBuf,
    lock: OwnedFd,
}

/// Who was in a directory before.
#[derive(Debug)]
pub(crate) enum Before {
    /// Nobody, or one that ended in good order.
    Nobody,
    /// This supervisor lives.
    Living(u32),
    /// This supervisor died, and its holder too.
    Gone(u32),
    /// One that died, and has a holder.
    Held(Held),
}

/// What is held for a supervisor that died.
#[derive(Debug)]
pub(crate) struct Held {
    supervisor: u32,
    holder: u32,
    pidfd: Pidfd,
    registry: RawFd,
}

impl Held {
    /// The supervisor that died.
    pub(crate) fn supervisor(&self) -> u32 {
        self.supervisor
    }
}

/// What was taken over.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) registry: Registry,
    /// The numbers of what came with it.
    pub(crate) numbers: HashSet<RawFd>,
    /// The supervisor that died.
    pub(crate) from: u32,
    /// The holder that has all of it, too.
    pub(crate) holder: Pidfd,
}

/// The process of a note, while it lives.
fn living(note: &str) -> Option<(u32, Pidfd)> {
    noted(note).filter(|(_, pidfd)| !pidfd.has_exited())
}

/// The mark in a directory; none: there is no such file.
fn read_mark(directory: &Directory) -> anyhow::Result<Option<Mark>> {
    let mut text = String::new();
    match directory.file(MARK_NAME, Access::Read) {
        Ok(file) => file.take(MOST_MARK_BYTES).read_to_string(&mut text)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mark = Mark::parse(&text);
    let unknown = "it is not of this version: if programs of the stratad that wrote it still run, start that version, which takes them over; else remove the file";
    mark.context(unknown).map(Some)
}

impl Place {
    /// Waits for its turn in a directory.
    ///
    /// # Errors
    /// Another one does not come to an end with beginning there.
    pub(crate) fn enter(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let directory = Directory::open(path).with_context(|| format!("cannot open {shown}"))?;
        let until = Instant::now() + TURN;
        while !try_lock(directory.as_fd()).with_context(|| format!("cannot lock {shown}"))? {
            if Instant::now() >= until {
                bail!("another stratad is about to start in {shown}, and does not get on; end it");
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let lock = directory.as_fd().try_clone_to_owned()?;
        Ok(Self { path: path.to_owned(), lock })
    }

    /// Who was there before.
    ///
    /// # Errors
    /// The mark cannot be read, or is another version's.
    pub(crate) fn before(&self) -> anyhow::Result<Before> {
        let read = || read_mark(&Directory::open(&self.path)?);
        let mark = read().with_context(|| format!("{}/{MARK_NAME}", self.path.display()))?;
        let Some(mark) = mark else { return Ok(Before::Nobody) };
        let supervisor = Mark::number(&mark.supervisor).unwrap_or_default();
        // This process itself is there by another executable's name.
        if living(&mark.supervisor).is_some_and(|(pid, _)| pid != std::process::id()) {
            return Ok(Before::Living(supervisor));
        }
        Ok(living(&mark.holder).map_or(Before::Gone(supervisor), |(holder, pidfd)| {
            Before::Held(Held { supervisor, holder, pidfd, registry: mark.registry })
        }))
    }

    /// Has this supervisor and its holder be those who are here.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn mark(&self, holder: u32, registry: RawFd) -> io::Result<()> {
        let note = |pid| note_of(pid).ok_or_else(|| io::Error::other("a process has no note"));
        let mark = Mark { supervisor: note(std::process::id())?, holder: note(holder)?, registry };
        write_mark(&self.path, &mark)
    }

    /// Copies what is held, under the numbers that it has there. `home`: whose it must be;
    /// `own`: what this process has open itself, which gets other numbers.
    /// None: it ended before anything was copied, because nothing is left of it.
    ///
    /// # Errors
    /// With which the holder goes on as before.
    pub(crate) fn take(
        &mut self,
        held: Held,
        home: u64,
        own: &mut Vec<OwnedFd>,
    ) -> anyhow::Result<Option<Taken>> {
        let Held { supervisor, holder, pidfd, registry } = held;
        let refused = |error: anyhow::Error| {
            error.context(format!(
                "what stratad (process {supervisor}) left cannot be taken over; process {holder} goes on holding it"
            ))
        };
        log(
            Priority::Notice,
            format_args!(
                "takes over what process {holder} holds for stratad (process {supervisor})"
            ),
        );
        end_others(supervisor, holder).map_err(refused)?;
        let there = match descriptors_of(holder) {
            Err(_) if pidfd.has_exited() => return Ok(None),
            listed => listed.context("its descriptors cannot be listed").map_err(refused)?,
        };
        // What is this process's own stands in nobody's way from here on.
        let above = there.last().map_or(FIRST_NUMBER, |last| last.number + 1);
        let move_away = |descriptor: OwnedFd| move_above(descriptor, above).context(TOO_MANY);
        let moved = move_away(pidfd.as_fd().try_clone_to_owned()?).map_err(refused)?;
        // Now, not at the end: what gets its number then is another's.
        drop(pidfd);
        let pidfd = Pidfd::adopt(moved);
        self.lock = move_away(self.lock.try_clone()?).map_err(refused)?;
        *own = own.drain(..).map(move_away).collect::<Result<_, _>>().map_err(refused)?;
        let looked_at = match copy_descriptor(&pidfd, registry) {
            Err(_) if pidfd.has_exited() => return Ok(None),
            copied => copied.context("its registry cannot be copied").map_err(refused)?,
        };
        let looked_at = Registry::attach(move_away(looked_at).map_err(refused)?, home)
            .context("its registry is not to be used: start the version of stratad that it was")
            .map_err(refused)?;
        let numbers = copy_named(&looked_at, &pidfd, &there, registry).map_err(refused)?;
        // Once more, at numbers that do not grow from daemon to daemon.
        *own = own.drain(..).map(|socket| socket.try_clone()).collect::<Result<_, _>>()?;
        let registry = looked_at.descriptor().try_clone_to_owned()?;
        let registry = Registry::attach(registry, home).map_err(|error| refused(error.into()))?;
        Ok(Some(Taken { registry, numbers, from: supervisor, holder: pidfd }))
    }

    /// The daemon ends in good order: nobody was here.
    pub(crate) fn leave(path: &Path) {
        // Gone already is as good.
        let _ = Directory::open(path).and_then(|directory| directory.remove_file(MARK_NAME));
    }
}

/// Copies what `registry` names, and all userfaultfds, of the holder at `pidfd` to the
/// numbers that they have `there`; which those are.
fn copy_named(
    registry: &Registry,
    pidfd: &Pidfd,
    there: &[OpenThere],
    registry_there: RawFd,
) -> anyhow::Result<HashSet<RawFd>> {
    let named: HashSet<_> = registry.claimed_fds().into_iter().collect();
    let mut numbers = HashSet::new();
    for one in there {
        let is_wanted = named.contains(&one.number) || one.is_userfaultfd;
        if !is_wanted || one.number < FIRST_NUMBER || one.number == registry_there {
            continue;
        }
        match copy_descriptor(pidfd, one.number) {
            Ok(descriptor) => put_at(descriptor, one.number).context(TOO_MANY)?,
            // A holder that is killed now: what is missing will be said of its tenant. Or
            // it has just closed one of a process that has ended.
            Err(_) if pidfd.has_exited() || !named.contains(&one.number) => continue,
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("descriptor {} cannot be copied", one.number));
            }
        }
        numbers.insert(one.number);
    }
    Ok(numbers)
}

/// Ends whoever has the holder's descriptor table, a worker that outlived its supervisor:
/// two that serve the same pages would be worse than none.
fn end_others(supervisor: u32, holder: u32) -> anyhow::Result<()> {
    let until = Instant::now() + ENDS_WITHIN;
    loop {
        let others = sharing_descriptors_with(holder)
            .context("it cannot be told who has its descriptors (a kernel without CONFIG_KCMP?)")?;
        if others.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            bail!("process {} of stratad (process {supervisor}) does not end", others[0]);
        }
        for other in others {
            // By a descriptor that was opened before the last look: nobody else's.
            let Ok(pidfd) = Pidfd::open(other) else { continue };
            if shares_descriptors(holder, other).is_ok_and(|shares| shares) {
                pidfd.signal(SIGKILL);
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn write_mark(path: &Path, mark: &Mark) -> io::Result<()> {
    let directory = Directory::open(path)?;
    // Left by one who was killed over it.
    let _ = directory.remove_file(NEW_MARK);
    let mut file = directory.file(NEW_MARK, Access::New)?;
    file.write_all(mark.to_string().as_bytes())?;
    // For the users' commands: who lives is no secret.
    file.set_permissions(Permissions::from_mode(0o644))?;
    directory.rename(NEW_MARK, MARK_NAME)
}

/// Whether another holder, which lives, has all that this process has as its holder.
pub(crate) fn is_replaced(path: &Path) -> bool {
    let mark = Directory::open(path).ok().and_then(|directory| read_mark(&directory).ok()?);
    let Some(mark) = mark else { return false };
    living(&mark.holder).is_some_and(|(pid, _)| pid != std::process::id())
}

/// The holder ends, with nothing left to be held: takes its mark away, unless a daemon is
/// just beginning here.
pub(crate) fn holder_ends(path: &Path) {
    let Ok(directory) = Directory::open(path) else { return };
    if !try_lock(directory.as_fd()).is_ok_and(|locked| locked) {
        return;
    }
    let own = note_of(std::process::id());
    let mark = read_mark(&directory).ok().flatten();
    if mark.is_some_and(|mark| Some(mark.holder) == own) {
        let _ = directory.remove_file(MARK_NAME);
    }
}

/// Says of each tenant what came back, once for each takeover.
pub(crate) fn report(
    registry: &Registry,
    supervisor: u32,
    from: u32,
    tenants: &[(String, io::Result<Arc<Tenant>>)],
) {
    if registry.reported().swap(supervisor, Ordering::Relaxed) == supervisor {
        return;
    }
    let mut came_back = 0;
    for (name, recovered) in tenants {
        // Why one did not come back is said already.
        let Ok(tenant) = recovered else { continue };
        let (living, orphans, ended) = tenant.who_is_left();
        let snapshots = tenant.snapshot_memories().len();
        let stored = ByteSize(tenant.store_stats().stored_bytes);
        let uid = tenant.record().uid;
        let line = what_came_back(living, orphans, ended, snapshots, stored);
        came_back += usize::from(living + orphans + snapshots > 0);
        log(Priority::Notice, format_args!("{name}, user {uid}: {line}"));
    }
    log(
        Priority::Notice,
        format_args!(
            "took over {came_back} of {} tenants of stratad (process {from}){}",
            tenants.len(),
            if from == supervisor { "" } else { ", which has ended" }
        ),
    );
}

fn what_came_back(
    living: usize,
    orphans: usize,
    ended: usize,
    snapshots: usize,
    stored: ByteSize,
) -> String {
    if living + orphans + ended + snapshots == 0 {
        return "came back, and no process of it was attached".into();
    }
    if living + orphans + snapshots == 0 {
        return format!("is gone: its {ended} processes ended while there was no stratad");
    }
    let count = |number: usize, one: &str, more: &str| {
        let what = if number == 1 { one } else { more };
        (number > 0).then(|| format!("{number} {what}"))
    };
    let parts = [
        count(living, "process", "processes"),
        count(orphans, "process without an agent", "processes without an agent"),
        count(snapshots, "page map of snapshots", "page maps of snapshots"),
    ];
    let there: Vec<_> = parts.into_iter().flatten().collect();
    let gone = match ended {
        0 => String::new(),
        _ => format!("; {ended} of its processes ended while there was no stratad"),
    };
    format!("came back: {}, {stored} stored{gone}", there.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note() -> String {
        note_of(std::process::id()).expect("this process")
    }

    #[test]
    fn who_was_there_is_told_by_the_mark() {
        let path = std::env::temp_dir().join(format!("strata-mark-{}", std::process::id()));
        std::fs::create_dir(&path).expect("a directory");
        let place = Place::enter(&path).expect("nobody else is there");
        let own = std::process::id();
        let dead = || "4194304 1".to_owned();
        let mark = |supervisor: String, holder: String| {
            write_mark(&path, &Mark { supervisor, holder, registry: 5 }).expect("written");
            place.before().expect("readable")
        };
        assert!(matches!(place.before(), Ok(Before::Nobody)));
        let other = note_of(strata_sys::parent_of(own).expect("a parent")).expect("it lives");
        assert!(matches!(mark(other, dead()), Before::Living(pid) if pid != own));
        // It has executed another stratad.
        assert!(matches!(mark(note(), dead()), Before::Gone(pid) if pid == own));
        assert!(matches!(mark(dead(), dead()), Before::Gone(4_194_304)));
        let held = mark(dead(), note());
        assert!(matches!(held, Before::Held(Held { holder, registry: 5, .. }) if holder == own));
        assert!(!is_replaced(&path), "this process is named");
        // Of this number, but another's start.
        assert!(matches!(mark(format!("{own} 1"), dead()), Before::Gone(pid) if pid == own));
        holder_ends(&path);
        assert!(path.join(MARK_NAME).exists(), "somebody begins there");
        std::fs::write(path.join(MARK_NAME), "something else\n").expect("written");
        assert!(place.before().is_err(), "it is no mark");
        drop(place);
        mark_of(&path, dead());
        holder_ends(&path);
        assert!(path.join(MARK_NAME).exists(), "it is another's");
        mark_of(&path, note());
        holder_ends(&path);
        assert!(!path.join(MARK_NAME).exists());
        std::fs::remove_dir_all(&path).expect("removed");
    }

    fn mark_of(path: &Path, holder: String) {
        let mark = Mark { supervisor: "4194304 1".into(), holder, registry: 5 };
        write_mark(path, &mark).expect("written");
    }

    #[test]
    fn another_one_that_lives_replaces_a_holder() {
        let path = std::env::temp_dir().join(format!("strata-replaced-{}", std::process::id()));
        std::fs::create_dir(&path).expect("a directory");
        assert!(!is_replaced(&path), "nobody has said so");
        let mut other = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        mark_of(&path, note_of(other.id()).expect("a child"));
        assert!(is_replaced(&path));
        other.kill().expect("it sleeps");
        other.wait().expect("it is a child");
        assert!(!is_replaced(&path), "that one is dead");
        std::fs::remove_dir_all(&path).expect("removed");
    }

    #[test]
    fn what_is_said_of_a_tenant() {
        let said = |living, orphans, ended, snapshots| {
            what_came_back(living, orphans, ended, snapshots, ByteSize(1 << 20))
        };
        assert_eq!(said(1, 0, 0, 0), "came back: 1 process, 1.0 MiB stored");
        assert!(
            said(2, 0, 1, 0).ends_with("; 1 of its processes ended while there was no stratad")
        );
        assert!(said(0, 0, 3, 0).starts_with("is gone: its 3 processes"));
        assert!(said(0, 0, 3, 1).starts_with("came back: 1 page map"));
        assert!(said(0, 0, 0, 0).contains("no process"));
    }
}
