//! Talking to a guest's own monitor at some length, and that a guest that was stopped runs on
//! whatever happens. How one is stopped for a snapshot is in `stopping`.
//!
//! A guest that is about to be stopped is marked, in a file beside its directory, and so is
//! one whose QEMU copies disks. The mark goes when the guest was seen running again, and has
//! let go of the copies. Whoever finds a mark of nobody's, this worker or the next, sees to
//! that, and goes on trying.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_api::GuestSpec;
use strata_pager::Tenant;
use strata_sys::peer::peer_of;
use strata_sys::{Priority, Range, connect_within, log};
use strata_vm::state;
use strata_vm::{MONITOR_SOCKET_NAME, Monitor, QmpError};

use super::disks;
use super::takeover::Undone;
use super::{Guests, NEXT_SUFFIX, STILL_PREFIX, folder, lock};

/// How long a guest may take to stand still: until its disks have done what they were told.
pub(super) const STILL_WITHIN: Duration = Duration::from_secs(5);
/// How long others try to have a guest run on, who have all guests to ask.
const SEEN_TO_WITHIN: Duration = Duration::from_secs(3);
/// How often it is tried again meanwhile.
pub(super) const TRY_EVERY: Duration = Duration::from_millis(50);
/// A disk that has failed is tried at once when its guest runs on.
const FAILS_AGAIN_WITHIN: Duration = Duration::from_millis(300);
/// In the mark of a guest that runs while its disks are copied.
pub(super) const COPYING: &str = "copying";
/// In the mark of a guest that was given up to another host.
const GIVEN: &str = "given";
/// QEMU's word for a guest that it has stopped because a disk failed.
pub(super) const IO_ERROR: &str = "io-error";
/// What is to be done then.
pub(super) const NO_ROOM: &str =
    "see to it that its image can be written (df: is there room?), then strata vm resume";
/// Guests' memory consists of whole pages.
const ALIGNED: u64 = strata_units::PAGE_SIZE as u64;

/// A conversation with the monitor of a guest.
pub(crate) struct Talk {
    pub(crate) monitor: Monitor,
    /// Its QEMU.
    pub(crate) pid: u32,
}

/// Nobody else asks a guest.
pub(crate) struct Alone<'a>(&'a Guests, String);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        lock(&self.0.talking).remove(&self.1);
    }
}

impl Guests {
    /// What a tenant is that is a guest, and whose QEMU `strata` has started.
    pub(crate) fn spec(&self, tenant: &Tenant) -> Option<GuestSpec> {
        self.known_spec(tenant).filter(|spec| spec.libvirt.is_none())
    }

    /// The same, or it came from a snapshot and libvirt has started it.
    pub(crate) fn known_spec(&self, tenant: &Tenant) -> Option<GuestSpec> {
        lock(&self.known).get(&name_of(tenant)).map(|guest| guest.spec.clone())
    }

    /// Where a guest's files are.
    pub(crate) fn directory(&self, tenant: &Tenant) -> PathBuf {
        self.directory.join(name_of(tenant))
    }

    /// Has nobody else ask a guest until this is dropped.
    pub(crate) fn alone(&self, tenant: &Tenant) -> Result<Alone<'_>, String> {
        let until = Instant::now() + STILL_WITHIN;
        loop {
            match self.alone_now(&name_of(tenant)) {
                Some(alone) => return Ok(alone),
                None if Instant::now() > until => {
                    return Err("somebody else talks to its monitor".to_owned());
                }
                None => std::thread::sleep(TRY_EVERY),
            }
        }
    }

    pub(super) fn alone_now(&self, folder: &str) -> Option<Alone<'_>> {
        let is_free = lock(&self.talking).insert(folder.to_owned());
        is_free.then(|| Alone(self, folder.to_owned()))
    }

    /// Where the files of the QEMU are that is about to take its place.
    pub(crate) fn next_directory(&self, tenant: &Tenant) -> PathBuf {
        self.directory.join(format!("{}{NEXT_SUFFIX}", name_of(tenant)))
    }

    /// Begins a conversation, which may take `time`, with the QEMU whose files are in
    /// `directory`.
    pub(crate) fn talk(
        &self,
        tenant: &Tenant,
        directory: &Path,
        time: Duration,
    ) -> Result<Talk, String> {
        let socket = directory.join(MONITOR_SOCKET_NAME);
        let socket = match fs::symlink_metadata(&socket) {
            Err(_) => self.libvirts_monitor(tenant).unwrap_or(socket),
            Ok(_) => socket,
        };
        // One that accepts nobody would hold this up for ever.
        let stream = connect_within(&socket, time).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => QmpError::Silent("a connection".into()).to_string(),
            _ => format!("its monitor cannot be reached: {error}"),
        })?;
        let pid = who_answers(tenant, &stream, "its monitor")?;
        let monitor = Monitor::begin(stream, time).map_err(|error| error.to_string())?;
        Ok(Talk { monitor, pid })
    }

    pub(super) fn mark(&self, tenant: &Tenant) -> PathBuf {
        self.directory.join(format!("{STILL_PREFIX}{}", name_of(tenant)))
    }

    /// Lets those run on that somebody stopped who is no more.
    pub(super) fn let_go_on(&self) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let file = entry.file_name();
            let Some(folder) = file.to_str().and_then(|name| name.strip_prefix(STILL_PREFIX))
            else {
                continue;
            };
            let Some(tenant) = self.tenant(folder) else { continue };
            if is_given(&entry.path()) || self.is_mirrored(folder, &entry.path()) {
                continue;
            }
            let Some(_alone) = self.alone_now(folder) else { continue };
            let name = &tenant.record().name;
            match self.see_to(&tenant, &entry.path()) {
                Ok(done) => log(Priority::Warning, format_args!("{name} {done}")),
                Err((what, why)) => {
                    let is_new = lock(&self.known).get_mut(folder).is_none_or(|guest| {
                        let is_new = guest.trouble != why;
                        guest.heard(Err(why.clone()), Instant::now());
                        is_new
                    });
                    if is_new {
                        log(Priority::Error, format_args!("{name} {what}: {why}"));
                    }
                }
            }
        }
    }
}

fn is_given(mark: &Path) -> bool {
    says(mark, GIVEN)
}

pub(super) fn says(mark: &Path, what: &str) -> bool {
    fs::read(mark).is_ok_and(|text| text == what.as_bytes())
}

impl Guests {
    /// A guest that stands still is not to run on, whoever finds its mark.
    pub(crate) fn give_up(&self, tenant: &Tenant) -> Result<(), String> {
        self.write_mark(tenant, GIVEN)
    }

    /// It is to run on: if not by whoever has it stand still, then by others.
    pub(crate) fn take_back(&self, tenant: &Tenant) -> Result<(), String> {
        self.write_mark(tenant, "")
    }

    /// Has a guest run that has all that it needs.
    pub(crate) fn runs(&self, tenant: &Tenant) -> Result<(), Undone> {
        let not_yet = Undone::NotYet;
        let _alone = self.alone(tenant).map_err(not_yet)?;
        let mut talk = self.talk(tenant, &self.directory(tenant), STILL_WITHIN).map_err(not_yet)?;
        let status = state::status(&mut talk.monitor);
        match status.map_err(|error| not_yet(error.to_string()))?.as_str() {
            "running" => Ok(()),
            "inmigrate" => {
                Err(Undone::Never("its QEMU has not got the state of its devices".to_owned()))
            }
            _ => state::go_on(&mut talk.monitor).map_err(|error| not_yet(error.to_string())),
        }
    }

    /// Has a guest run that stands still, because somebody asks for it. Else why it does
    /// not, and what to do.
    pub(crate) fn go_on(&self, tenant: &Tenant) -> Result<(), (String, &'static str)> {
        if self.spec(tenant).is_none() {
            let why = "it is no guest that strata vm run has started".to_owned();
            return Err((why, "a guest of libvirt's runs on by virsh resume"));
        }
        if is_given(&self.mark(tenant)) {
            let why = "it was given to another host, and may run there".to_owned();
            return Err((why, "strata move --settle asks there"));
        }
        let told = self.runs(tenant);
        std::thread::sleep(FAILS_AGAIN_WITHIN);
        if self.has_failed(tenant) {
            return Err(("its disk failed again".to_owned(), NO_ROOM));
        }
        told.map_err(|undone| (undone.into_why(), "see strata vm stats"))
    }

    /// Whether its QEMU has been given the state of its devices, as far as it waited for any.
    pub(crate) fn has_devices(&self, tenant: &Tenant) -> Result<bool, String> {
        self.status(tenant).map(|status| status != "inmigrate")
    }

    /// Whether it ran until a disk of it failed.
    pub(crate) fn has_failed(&self, tenant: &Tenant) -> bool {
        self.status(tenant).is_ok_and(|status| status == IO_ERROR)
    }

    fn status(&self, tenant: &Tenant) -> Result<String, String> {
        let _alone = self.alone(tenant)?;
        let mut talk = self.talk(tenant, &self.directory(tenant), STILL_WITHIN)?;
        state::status(&mut talk.monitor).map_err(|error| error.to_string())
    }

    /// Has a guest run that was taken back; if it does not now, others see to it.
    pub(crate) fn resume(&self, tenant: &Tenant) {
        if self.runs(tenant).is_ok() {
            let _ = fs::remove_file(self.mark(tenant));
        }
    }

    /// It was given up, and has ended.
    pub(crate) fn forget_given(&self, tenant: &Tenant) {
        let mark = self.mark(tenant);
        if is_given(&mark) {
            // The guest that has this name next removes it as well.
            let _ = fs::remove_file(mark);
        }
    }

    pub(super) fn write_mark(&self, tenant: &Tenant, text: &str) -> Result<(), String> {
        let mark = self.mark(tenant);
        fs::write(&mark, text).map_err(|error| format!("cannot write {}: {error}", mark.display()))
    }

    /// Does what the mark of a guest says that is to be done. What was done; or what is
    /// not, and why.
    fn see_to(
        &self,
        tenant: &Arc<Tenant>,
        mark: &Path,
    ) -> Result<&'static str, (&'static str, String)> {
        match self.finish_marked(tenant) {
            Some(Ok(_)) => return Ok("has a new QEMU, which runs"),
            Some(Err(Undone::Never(_))) => return Ok("was to have a new QEMU, which has ended"),
            Some(Err(Undone::NotYet(why))) => return Err(("is to have a new QEMU", why)),
            None => {}
        }
        let copies = says(mark, COPYING);
        let talked = self.talk(tenant, &self.directory(tenant), SEEN_TO_WITHIN);
        let outcome = talked.and_then(|mut talk| {
            if !copies {
                state::go_on(&mut talk.monitor).map_err(|error| error.to_string())?;
            }
            disks::clean(&mut talk.monitor)
        });
        outcome.map_err(|why| match copies {
            true => ("copies disks for a snapshot or a move that came to nothing", why),
            false => ("stands still for a snapshot or a move that came to nothing", why),
        })?;
        let _ = fs::remove_file(mark);
        Ok(match copies {
            true => {
                "copied disks for a snapshot or a move that came to nothing, and has ended that"
            }
            false => "stood still for a snapshot or a move that came to nothing, and runs on",
        })
    }
}

/// The process that answers at a socket of a guest's directory: it must be the tenant's.
/// `whose`: what is there.
pub(crate) fn who_answers(
    tenant: &Tenant,
    stream: &UnixStream,
    whose: &str,
) -> Result<u32, String> {
    let peer = peer_of(stream).map_err(|error| format!("{whose} is not known: {error}"))?;
    // The socket's name is the user's to give: another program of the machine's could
    // stand behind it.
    if peer.uid != tenant.record().uid || !tenant.pids().contains(&peer.pid) {
        return Err(format!("who answers at {whose} is no process of the tenant's"));
    }
    Ok(peer.pid)
}

pub(super) fn name_of(tenant: &Tenant) -> String {
    let record = tenant.record();
    folder(record.uid, &record.name)
}

/// The memory that begins at `start` in a guest's QEMU, if it is what a guest's memory is
/// there.
pub(crate) fn memory_at(
    tenant: &Tenant,
    pid: u32,
    start: u64,
    bytes: u64,
) -> Result<Range, String> {
    let range = Range { start, end: start.checked_add(bytes).ok_or("its memory has no end")? };
    let process = tenant.space_of(pid).and_then(|space| space.process());
    let maps = process.ok_or("its QEMU has no agent")?.maps().map_err(|error| error.to_string())?;
    // Where a part of it is managed in another way the kernel has several mappings.
    let mut end = start;
    for mapping in maps.iter().filter(|mapping| mapping.range.end > start) {
        let is_it = mapping.private && mapping.fileless && mapping.writable;
        if !is_it || mapping.range.start > end || end >= range.end {
            break;
        }
        end = mapping.range.end;
    }
    if end < range.end || !start.is_multiple_of(ALIGNED) {
        return Err(format!("its memory is not private memory at {start:#x}"));
    }
    Ok(range)
}
