//! Snapshots in files: persisted beside their images, exported, imported.

use std::fs::File;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;

use strata_api::{Claim, Progress, SnapshotInfo, SnapshotRef, SnapshotState, Unit};
use strata_pager::Tenant;
use strata_snapshot::archive::{Reader, Writer};
use strata_snapshot::claims;
use strata_units::{PAGE_SIZE, PageBuffer, SpaceId};

use super::disk::{Known, Process};
use super::guest::GuestPart;
use super::guest_files::described;
use super::in_file::{self, AsWritten};
use super::machine::Machine;
use super::vouch::Author;
use super::{Snapshots, Tell, lock, wish_of};

/// How a file is taken in.
pub(crate) struct ImportWish {
    /// As a snapshot of a tenant of this name; none: of that which it had.
    pub(crate) name: Option<String>,
    /// Though this machine's processor lacks instructions that the other's had.
    pub(crate) any_cpu: bool,
    /// Whoever wrote it, and whatever it asks for.
    pub(crate) trust: bool,
}

/// Process state of a snapshot that is imported has at most this.
const MOST_IMAGE_BYTES: u64 = 16 << 30;
/// Pages between two words on how far it is.
pub(super) const TELL_PAGES: u64 = 4096;

pub(super) fn told(what: &str, pages: u64, total: Option<u64>) -> Progress {
    let bytes = |pages: u64| pages * PAGE_SIZE as u64;
    Progress { what: what.into(), done: bytes(pages), total: total.map(bytes), unit: Unit::Bytes }
}

impl Snapshots {
    /// Writes a snapshot to disk, so that it survives a reboot.
    pub(crate) fn persist(
        &self,
        uid: u32,
        named: &SnapshotRef,
        tell: Tell<'_>,
    ) -> Result<SnapshotInfo, String> {
        let _turn = self.turn_of(uid, named)?;
        let (mut known, holder) = self.loaded(uid, named, tell)?;
        if known.info.state == SnapshotState::Persisted {
            return Ok(known.info);
        }
        let path = self.disk.archive(&known.info.id);
        // Of a daemon that died before it said that it is there.
        let _ = std::fs::remove_file(&path);
        let files = self.files_of(&known, false)?;
        let mut tell = self.stepping(&known, "persisting", tell);
        known.info.file_bytes = write_file(&known, &holder, files, &path, "persisting", &mut tell)?;
        self.guests.step("persisted");
        known.as_written = AsWritten::now(&path);
        known.info.state = SnapshotState::Persisted;
        self.disk.write(&known).inspect_err(|_| {
            // Nobody knows of it; what stays all the same is removed by the next attempt.
            let _ = std::fs::remove_file(&path);
        })?;
        lock(&self.known).insert(known.info.id.clone(), known.clone());
        Ok(known.info)
    }

    /// Writes a snapshot into one file. What the user should know.
    pub(crate) fn export(
        &self,
        uid: u32,
        named: &SnapshotRef,
        path: &Path,
        tell: Tell<'_>,
    ) -> Result<String, String> {
        let _turn = self.turn_of(uid, named)?;
        let (mut known, holder) = self.loaded(uid, named, tell)?;
        let files = self.files_of(&known, true)?;
        known.guest.as_mut().map_or(Ok(()), GuestPart::sum_up)?;
        write_file(&known, &holder, files, path, "exporting", tell)?;
        Ok(known.guest.map(|part| part.read_beside()).unwrap_or_default())
    }

    /// Tells, and is the step `name` of what is done with a guest.
    fn stepping<'a>(
        &'a self,
        known: &Known,
        name: &'static str,
        tell: Tell<'a>,
    ) -> impl FnMut(Progress) + Send + use<'a> {
        let is_guest = known.guest.is_some();
        move |progress| {
            if is_guest {
                self.guests.step(name);
            }
            tell(progress);
        }
    }

    /// Has the pager take the memory of a persisted snapshot in again, without reading it if
    /// the file is as it was written; the images come from its file as well, if no worker has
    /// had them since.
    pub(super) fn load(
        &self,
        mut known: Known,
        tell: Tell<'_>,
    ) -> Result<(Known, Arc<Tenant>), String> {
        let reader = Reader::open(&self.disk.archive(&known.info.id))
            .map_err(|error| crate::tenants::chain(&error))?;
        let images = self.disk.images(&known.info.id);
        match &known.guest {
            Some(part) => self.load_guest(&reader, &known, part)?,
            None if images.exists() => {}
            None => extract(&reader, &images)?,
        }
        let holder = self.with_holder(&known.info.clone(), |holder| {
            if known.as_written.as_ref().is_some_and(|then| then.is(reader.file())) {
                let memories = in_file::adopt(&reader, &known.processes, holder);
                known.has_memories(memories.map_err(|error| crate::tenants::chain(&error))?);
            } else {
                self.take_in(&reader, &mut known, holder, tell)?;
            }
            self.disk.write(&known)
        })?;
        lock(&self.known).insert(known.info.id.clone(), known.clone());
        Ok((known, holder))
    }

    /// The tenant that a snapshot's memory belongs to, made if it is not there,
    /// which `fill` gives that memory.
    pub(super) fn with_holder(
        &self,
        info: &SnapshotInfo,
        fill: impl FnOnce(&Tenant) -> Result<(), String>,
    ) -> Result<Arc<Tenant>, String> {
        // One that has ended is taken down at any moment, unless something is to come to it.
        let there = self.tenants.get(info.uid, &info.tenant);
        if let Some(kept) = there.and_then(|tenant| self.tenants.await_arrival(tenant)) {
            return fill(&kept.tenant).map(|()| Arc::clone(&kept.tenant));
        }
        let (tenant, _) = self.tenants.create(wish_of(info, &info.tenant))?;
        if let Err(why) = fill(&tenant) {
            self.tenants.discard(&tenant);
            return Err(why);
        }
        // Not before: without memory and processes it would be taken down.
        tenant.is_for_snapshots();
        Ok(tenant)
    }

    /// Reads the memory of all processes of `known`.
    fn take_in(
        &self,
        reader: &Reader,
        known: &mut Known,
        holder: &Tenant,
        tell: Tell<'_>,
    ) -> Result<(), String> {
        let total = reader.processes().iter().map(|process| process.pages).sum();
        let mut done = 0;
        let memories = of_all(&known.processes, holder, |process| {
            let mut pages = reader.pages(process.pid);
            holder.import_memory(|buffer: &mut PageBuffer| {
                done += 1;
                if done % TELL_PAGES == 0 {
                    tell(told("loading", done, Some(total)));
                }
                match pages.next_into(&mut buffer.0) {
                    None => Ok(None),
                    Some((address, Ok(()))) => Ok(Some(address)),
                    Some((_, Err(error))) => Err(io::Error::other(error)),
                }
            })
        });
        known.has_memories(memories.map_err(|error| crate::tenants::chain(&error))?);
        Ok(())
    }

    /// What a file asks for, and more than whose right that is.
    pub(crate) fn claims_of(
        &self,
        uid: u32,
        path: &Path,
        trust: bool,
    ) -> Result<(Option<u32>, Vec<Claim>), String> {
        self.check_user(uid)?;
        let reader = Reader::open(path).map_err(|error| crate::tenants::chain(&error))?;
        let author = Author::of(&reader, self.uid, trust)?;
        if let Some(part) = described(&reader, path)?.guest {
            return Ok(part.claims(&author));
        }
        let images =
            claims::load_archive(&reader).map_err(|error| crate::tenants::chain(&error))?;
        Ok(author.compare(&images))
    }

    /// Takes in a snapshot from a file.
    pub(crate) fn import(
        &self,
        uid: u32,
        path: &Path,
        wish: ImportWish,
        tell: Tell<'_>,
    ) -> Result<SnapshotInfo, String> {
        let ImportWish { name, any_cpu, trust } = wish;
        self.check_user(uid)?;
        self.check_limit()?;
        let reader = Reader::open(path).map_err(|error| crate::tenants::chain(&error))?;
        let author = Author::of(&reader, self.uid, trust)?;
        let mut known = described(&reader, path)?;
        if known.guest.is_some() {
            author.check_guest()?;
        }
        let listed =
            |process: &Process| reader.processes().iter().any(|known| known.pid == process.pid);
        if known.processes.is_empty() || !known.processes.iter().all(listed) {
            return Err(format!("{} contradicts itself", path.display()));
        }
        let here = Machine::here();
        if let Some(why) =
            known.machine.as_ref().and_then(|machine| machine.unfit_for(here, any_cpu))
        {
            return Err(why);
        }
        known.as_written = None;
        known.info.guest = known.guest.is_some();
        known.info.disks = Vec::new();
        // Numbers of another pager's, which may be those of other memory here.
        known.processes.iter_mut().for_each(|process| process.memory = None);
        // From here on it is this machine's.
        known.machine = Some(here.clone());
        let tenant = name.unwrap_or_else(|| known.info.tenant.clone());
        if let Some(problem) = strata_api::name_problem(&tenant) {
            return Err(problem.to_owned());
        }
        let _turn = self.turn(&tenant)?;
        let is_renamed = known.info.tenant != tenant;
        known.info.tenant.clone_from(&tenant);
        known.info.uid = uid;
        known.info.scheduled = false;
        known.info.parent = None;
        known.place = None;
        known.coming = None;
        // Its label may be taken here.
        let label = known.info.label.take();
        known.info.id = match self.next_id(&tenant, label.as_deref()) {
            Ok(id) => {
                known.info.label = label;
                id
            }
            Err(_) => self.next_id(&tenant, None)?,
        };
        known.info.state = SnapshotState::Usable;
        known.info.file_bytes = 0;
        let id = known.info.id.clone();
        let mut held = None;
        let tell = &mut self.stepping(&known, "importing", tell);
        let outcome = self.with_holder(&known.info.clone(), |holder| {
            if known.guest.is_some() {
                held = Some(self.guest_in(&reader, &mut known, is_renamed, tell)?);
            } else {
                self.images_in(&reader, &author, &known)?;
            }
            self.take_in(&reader, &mut known, holder, tell)?;
            self.guests.step("imported");
            self.disk.write(&known)
        });
        if let Err(why) = outcome {
            drop(held);
            let _ = self.forget(&known);
            return Err(why);
        }
        // From here on the copies of its disks are a snapshot's.
        lock(&self.known).insert(id, known.clone());
        drop(held);
        Ok(known.info)
    }

    fn images_in(&self, reader: &Reader, author: &Author, known: &Known) -> Result<(), String> {
        let images = self.disk.make(&known.info.id)?;
        extract(reader, &images)?;
        // Only now, of our own copy: whoever wrote the file may still write to it.
        author.check(&images)
    }
}

/// Makes memories of all `processes`; where one cannot be made there is none.
pub(super) fn of_all(
    processes: &[Process],
    holder: &Tenant,
    mut make: impl FnMut(&Process) -> io::Result<SpaceId>,
) -> io::Result<Vec<SpaceId>> {
    let mut memories = Vec::new();
    for process in processes {
        match make(process) {
            Ok(memory) => memories.push(memory),
            Err(error) => {
                memories.into_iter().for_each(|id| holder.remove_snapshot_memory(id));
                return Err(error);
            }
        }
    }
    Ok(memories)
}

/// Writes a snapshot into one file; its length.
fn write_file(
    known: &Known,
    holder: &Tenant,
    files: Vec<(String, File)>,
    path: &Path,
    what: &str,
    tell: Tell<'_>,
) -> Result<u64, String> {
    let failed = |error: &dyn std::error::Error| crate::tenants::chain(error);
    let mut writer = Writer::create(path).map_err(|error| failed(&error))?;
    let description = serde_json::to_vec(known).map_err(|error| failed(&error))?;
    writer.description(&description).map_err(|error| failed(&error))?;
    for (name, file) in files {
        writer.file(&name, file).map_err(|error| failed(&error))?;
    }
    let mut pages = 0;
    for process in &known.processes {
        writer.process(process.pid, process.restart).map_err(|error| failed(&error))?;
        let memory = process.memory.ok_or("its memory is not loaded")?;
        holder
            .read_snapshot(SpaceId(memory), |address, page| {
                pages += 1;
                if pages % TELL_PAGES == 0 {
                    tell(told(what, pages, None));
                }
                writer.page(address, &page.0).map_err(io::Error::other)
            })
            .map_err(|error| failed(&error))?;
    }
    writer.finish().map(|written| written.file_bytes).map_err(|error| failed(&error))
}

/// Makes the directory of a snapshot's images from its file.
pub(super) fn extract(reader: &Reader, images: &Path) -> Result<(), String> {
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(images)
        .map_err(|error| format!("cannot make {}: {error}", images.display()))?;
    reader.extract_files(images, MOST_IMAGE_BYTES).map_err(|error| {
        // Empty, and not to be taken for the images.
        let _ = std::fs::remove_dir(images);
        crate::tenants::chain(&error)
    })
}
