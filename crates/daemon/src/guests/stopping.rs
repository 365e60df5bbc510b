//! Guests that are stopped for a snapshot and run on after it, and the state of their
//! devices.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use strata_pager::Tenant;
use strata_sys::{Priority, log, send_with_fds};
use strata_vm::state::{self, Footing};
use strata_vm::{Monitor, Served};

use super::disks::{self, DiskCopy};
use super::monitor::{COPYING, STILL_WITHIN, TRY_EVERY, Talk, name_of};
use super::{CONVERSATION, Guests, lock, mirrors};

/// How long the state of its devices may take.
const STATE_WITHIN: Duration = Duration::from_secs(10);
/// How long whoever has stopped a guest tries to have it run on; then others do.
const RUNS_ON_WITHIN: Duration = Duration::from_secs(10);
/// Most that the state of a guest's devices may be: a display's memory is in it.
pub(crate) const MOST_STATE_BYTES: u64 = 256 << 20;

/// A guest that can be stopped, its monitor at hand.
pub(crate) struct Stoppable {
    guests: Arc<Guests>,
    tenant: Arc<Tenant>,
    talk: Option<Talk>,
    /// Of its disks, for the snapshot.
    copies: Vec<DiskCopy>,
    /// Its disks are being copied to another host, meanwhile and after.
    is_mirrored: bool,
}

impl Stoppable {
    /// Asks the guest, which has disks that are `served`, what is to be known before, for
    /// which it may take `time`.
    pub(crate) fn new(
        guests: &Arc<Guests>,
        tenant: &Arc<Tenant>,
        served: &[Served],
        time: Duration,
    ) -> Result<(Self, Footing, u32), String> {
        let mut talk = guests.talk(tenant, &guests.directory(tenant), time)?;
        let is_mirrored = lock(&guests.mirrored).contains(&name_of(tenant));
        let footing = state::footing(&mut talk.monitor, is_mirrored, served);
        let footing = footing.map_err(|error| error.to_string())?;
        let pid = talk.pid;
        let (guests, tenant) = (Arc::clone(guests), Arc::clone(tenant));
        let (talk, copies) = (Some(talk), Vec::new());
        Ok((Self { guests, tenant, talk, copies, is_mirrored }, footing, pid))
    }

    /// Copies its disks while it runs. On an error it runs on without.
    pub(crate) fn copy(
        &mut self,
        copies: Vec<DiskCopy>,
        tell: &mut dyn FnMut(u64, u64),
    ) -> Result<(), String> {
        self.copies = copies;
        self.copy_marked(tell)
    }

    /// The same once more, for another attempt.
    pub(crate) fn copy_again(&mut self, tell: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        disks::renew(&mut self.copies)?;
        self.copy_marked(tell)
    }

    fn copy_marked(&mut self, tell: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        if self.copies.is_empty() {
            return Ok(());
        }
        let mark = self.guests.mark(&self.tenant);
        fs::write(&mark, COPYING)
            .map_err(|error| format!("cannot write {}: {error}", mark.display()))?;
        let copies = std::mem::take(&mut self.copies);
        let guests = Arc::clone(&self.guests);
        let step = |name: &str| guests.step(name);
        let copied = self.monitor().and_then(|monitor| disks::copy(monitor, &copies, tell, &step));
        self.copies = copies;
        if copied.is_err() && self.monitor().and_then(disks::clean).is_ok() {
            let _ = fs::remove_file(&mark);
        }
        copied
    }

    /// The copies, which are whole.
    pub(crate) fn copied(&mut self) -> Vec<DiskCopy> {
        std::mem::take(&mut self.copies)
    }

    fn monitor(&mut self) -> Result<&mut Monitor, String> {
        let talk = match self.talk.take() {
            Some(talk) => talk,
            None => {
                let directory = self.guests.directory(&self.tenant);
                self.guests.talk(&self.tenant, &directory, STILL_WITHIN)?
            }
        };
        Ok(&mut self.talk.insert(talk).monitor)
    }

    /// Has it stand still, and takes the state of its devices. On an error it runs on.
    /// `for_good`: copies of its disks elsewhere end with this moment.
    pub(crate) fn stop(&mut self, for_good: bool) -> Result<(Instant, Vec<u8>), String> {
        self.guests.write_mark(&self.tenant, "")?;
        let outcome = self.stop_marked(for_good);
        match outcome {
            Ok(stopped) => Ok(stopped),
            Err(why) => Err(match self.go_on() {
                Ok(()) => why,
                Err(too) => format!("{why}; {too}"),
            }),
        }
    }

    fn stop_marked(&mut self, for_good: bool) -> Result<(Instant, Vec<u8>), String> {
        let copies = std::mem::take(&mut self.copies);
        let guests = Arc::clone(&self.guests);
        let step = |name: &str| guests.step(name);
        let ends_mirrors = for_good && self.is_mirrored;
        let stopped =
            self.monitor().and_then(|monitor| stopped(monitor, (&copies, ends_mirrors), &step));
        self.copies = copies;
        stopped
    }

    /// Lets it run on. An error: it does not yet, and somebody goes on trying.
    pub(crate) fn go_on(&mut self) -> Result<(), String> {
        let until = Instant::now() + RUNS_ON_WITHIN;
        let mut told = false;
        loop {
            let tried = match self.talk.take() {
                Some(mut talk) => {
                    talk.monitor.allow(CONVERSATION);
                    Ok(talk)
                }
                None => {
                    let directory = self.guests.directory(&self.tenant);
                    self.guests.talk(&self.tenant, &directory, CONVERSATION)
                }
            };
            let tried = tried.and_then(|mut talk| {
                state::go_on(&mut talk.monitor).map_err(|error| error.to_string()).map(|()| talk)
            });
            let why = match tried {
                Ok(mut talk) => {
                    self.guests.step("runs");
                    let is_clean =
                        self.copies.is_empty() || disks::clean(&mut talk.monitor).is_ok();
                    self.talk = Some(talk);
                    let mark = self.guests.mark(&self.tenant);
                    // What stays is done once more by whoever finds it.
                    let _ = match is_clean && !self.is_mirrored {
                        true => fs::remove_file(mark),
                        false => fs::write(mark, COPYING),
                    };
                    return Ok(());
                }
                Err(why) => why,
            };
            if !told {
                told = true;
                let name = &self.tenant.record().name;
                log(Priority::Error, format_args!("{name} stands still for a snapshot: {why}"));
            }
            if Instant::now() > until || self.tenant.pids().is_empty() {
                return Err(format!(
                    "it stands still, and does not run on ({why}); stratad goes on trying"
                ));
            }
            std::thread::sleep(TRY_EVERY);
        }
    }
}

/// Has a guest stand still, and takes its disks and the state of its devices.
fn stopped(
    monitor: &mut Monitor,
    (copies, ends_mirrors): (&[DiskCopy], bool),
    step: &dyn Fn(&str),
) -> Result<(Instant, Vec<u8>), String> {
    let failed = |error: io::Error| format!("no way for the state of its devices: {error}");
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    ours.set_read_timeout(Some(STATE_WITHIN)).map_err(failed)?;
    let reading = Builder::new().name("state".into()).spawn(move || {
        let mut bytes = Vec::new();
        let read = (&ours).take(MOST_STATE_BYTES + 1).read_to_end(&mut bytes);
        read.map(|_| bytes)
    });
    let reading = reading.map_err(failed)?;
    monitor.allow(STILL_WITHIN);
    let since = Instant::now();
    state::stop(monitor).map_err(|error| error.to_string())?;
    step("stopped");
    disks::finish(monitor, copies)?;
    step("disks");
    if ends_mirrors {
        mirrors::finish(monitor)?;
        step("alike");
    }
    monitor.allow(STATE_WITHIN);
    let mut theirs = Some(theirs);
    let saved = state::save(monitor, &mut |stream, line| pass(stream, line, &mut theirs));
    drop(theirs);
    // Whoever failed may not hang up: the guest does not wait for that.
    saved.map_err(|error| error.to_string())?;
    let read = reading.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
    let bytes = read.map_err(|error| format!("the state of its devices does not come: {error}"))?;
    if bytes.is_empty() || bytes.len() as u64 > MOST_STATE_BYTES {
        return Err(format!("the state of its devices has {} bytes", bytes.len()));
    }
    disks::share(copies)?;
    step("devices");
    Ok((since, bytes))
}

/// Sends a line with a descriptor, which is closed here then.
fn pass(stream: &UnixStream, line: &[u8], fd: &mut Option<UnixStream>) -> io::Result<()> {
    let Some(fd) = fd.take() else { return Err(io::ErrorKind::InvalidInput.into()) };
    let sent = send_with_fds(stream, line, &[fd.as_fd()])?;
    let mut stream = stream;
    stream.write_all(&line[sent..])
}

/// Has a QEMU that waits take the state of a guest's devices.
pub(crate) fn give_state(talk: &mut Talk, bytes: Vec<u8>) -> Result<(), String> {
    let failed = |error: io::Error| format!("no way for the state of its devices: {error}");
    let (mut ours, theirs) = UnixStream::pair().map_err(failed)?;
    ours.set_write_timeout(Some(STATE_WITHIN)).map_err(failed)?;
    let writing = Builder::new().name("state".into()).spawn(move || ours.write_all(&bytes));
    let writing = writing.map_err(failed)?;
    talk.monitor.allow(STATE_WITHIN);
    let mut theirs = Some(theirs);
    let loaded =
        state::load(&mut talk.monitor, &mut |stream, line| pass(stream, line, &mut theirs));
    drop(theirs);
    let written = writing.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
    loaded.map_err(|error| error.to_string())?;
    written.map_err(|error| format!("it does not take the state of its devices: {error}"))
}
