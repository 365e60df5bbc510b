//! A new QEMU takes a guest's place: the one before is ended, the disks that were made for
//! the new one get their images' names, and it runs.
//!
//! From its first step on there is no way back, so what is to be done is written down
//! before. Whoever finds that, this worker or the next, does what is left of it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use strata_api::{GuestDisk, GuestSpec};
use strata_pager::Tenant;
use strata_sys::{SIGKILL, exchange, note_of, noted};
use strata_vm::state;

use super::{Guest, Guests, folder, lock};

/// How long killed processes may take to be gone.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// How long the new QEMU may take to run.
const RUNS_WITHIN: Duration = Duration::from_secs(5);
/// What follows the name of an image that another has replaced.
pub(crate) const BEFORE_SUFFIX: &str = ".before";

/// What follows it while that is under way.
const NEXT_SUFFIX: &str = ".strata-next";

/// What is to be done.
#[derive(Serialize, Deserialize)]
pub(super) struct Takeover {
    /// The new QEMU, as `note_of` has it.
    qemu: String,
    /// What it is.
    pub(super) spec: GuestSpec,
    /// Its disks' files: device, number.
    files: Vec<(u64, u64)>,
}

/// Why it is not done.
pub(crate) enum Undone {
    /// It cannot be any more: nothing was ended, or nothing is left.
    Never(String),
    /// Not yet: somebody goes on trying.
    NotYet(String),
}

impl Undone {
    /// As a sentence.
    pub(crate) fn into_why(self) -> String {
        match self {
            Self::Never(why) | Self::NotYet(why) => why,
        }
    }
}

fn file_of(path: &str) -> io::Result<(u64, u64)> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

impl Guests {
    /// Has the QEMU `pid`, which has all of the guest `spec` and waits, take its place.
    pub(crate) fn take_over(
        &self,
        tenant: &Arc<Tenant>,
        pid: u32,
        spec: GuestSpec,
    ) -> Result<(), Undone> {
        let never = |why: String| Undone::Never(why);
        let qemu = note_of(pid).ok_or_else(|| never("its QEMU has ended".into()))?;
        let files = spec.disks.iter().map(|disk| {
            file_of(&disk.opened).map_err(|error| never(format!("{}: {error}", disk.opened)))
        });
        let files = files.collect::<Result<_, _>>()?;
        let takeover = Takeover { qemu, spec, files };
        let text = serde_json::to_vec(&takeover).map_err(|error| never(error.to_string()))?;
        let mark = self.mark(tenant);
        fs::write(&mark, text).map_err(|error| {
            let _ = fs::remove_file(&mark);
            never(format!("cannot write {}: {error}", mark.display()))
        })?;
        self.step("marked");
        self.finish(tenant, &takeover)
    }

    /// Does what is left to be done, if the mark of a guest says that there is something.
    pub(crate) fn finish_marked(&self, tenant: &Arc<Tenant>) -> Option<Result<u32, Undone>> {
        let takeover = takeover_in(&self.mark(tenant))?;
        let pid = noted(&takeover.qemu).map_or(0, |(pid, _)| pid);
        Some(self.finish(tenant, &takeover).map(|()| pid))
    }

    /// Does what is left to be done; the mark goes with the last of it.
    pub(super) fn finish(&self, tenant: &Arc<Tenant>, takeover: &Takeover) -> Result<(), Undone> {
        let name = &tenant.record().name;
        let Some((pid, _)) = noted(&takeover.qemu) else {
            // What was ended, is; what was not goes on.
            let _ = fs::remove_file(self.mark(tenant));
            return Err(Undone::Never("its new QEMU has ended".to_owned()));
        };
        let not_yet = |what: &str, why: &dyn std::fmt::Display| {
            Undone::NotYet(format!("{what}: {why}; stratad goes on trying"))
        };
        let mut before = tenant.processes();
        before.retain(|process| process.pid() != pid);
        let pids: Vec<u32> = before.iter().map(|process| process.pid()).collect();
        let held = tenant.hold_memory(&pids);
        for process in &before {
            process.pidfd().signal(SIGKILL);
        }
        if !before.iter().all(|process| process.pidfd().exits_within(KILL_PATIENCE)) {
            return Err(not_yet("the QEMU that ran was killed", &"it has not ended"));
        }
        // Its memory is taken down beside what follows.
        drop(held);
        tenant.look_for_ended();
        self.step("ended");
        for (disk, file) in takeover.spec.disks.iter().zip(&takeover.files) {
            put_in_place(disk, *file).map_err(|error| not_yet(&disk.path, &error))?;
        }
        self.step("placed");
        self.next_is_here(tenant, &takeover.spec)
            .map_err(|error| not_yet("its directory cannot be moved", &error))?;
        self.step("moved");
        self.talk(tenant, &self.directory(tenant), RUNS_WITHIN)
            .and_then(|mut talk| state::go_on(&mut talk.monitor).map_err(|error| error.to_string()))
            .map_err(|why| not_yet(&format!("the new QEMU of {name} does not run yet"), &why))?;
        self.step("runs");
        let _ = fs::remove_file(self.mark(tenant));
        Ok(())
    }

    /// The next QEMU has taken the place of the one before, if there is a next one.
    fn next_is_here(&self, tenant: &Tenant, spec: &GuestSpec) -> io::Result<()> {
        let record = tenant.record();
        let folder = folder(record.uid, &record.name);
        let (directory, next) = (self.directory(tenant), self.next_directory(tenant));
        let mut known = lock(&self.known);
        if fs::symlink_metadata(&next).is_ok() {
            self.put_aside(&directory)?;
            fs::rename(next, directory)?;
        }
        self.write_record(&folder, spec)?;
        known.insert(folder.clone(), Guest::new(spec.clone()));
        lock(&self.coming).remove(&folder);
        Ok(())
    }

    /// What the QEMU is that is about to take a guest's place.
    pub(crate) fn coming(&self, tenant: &Tenant) -> Option<GuestSpec> {
        let record = tenant.record();
        lock(&self.coming).get(&folder(record.uid, &record.name)).cloned()
    }

    /// All files that the disks of guests are, or stand on.
    pub(crate) fn disks_needed(&self) -> BTreeSet<PathBuf> {
        let mut specs: Vec<GuestSpec> = Vec::new();
        let is_there = |folder: &String| self.tenant(folder).is_some();
        let known = lock(&self.known);
        specs.extend(known.iter().filter(|one| is_there(one.0)).map(|one| one.1.spec.clone()));
        drop(known);
        let coming = lock(&self.coming);
        specs.extend(coming.iter().filter(|one| is_there(one.0)).map(|one| one.1.clone()));
        drop(coming);
        for tenant in self.tenants.list() {
            specs.extend(takeover_in(&self.mark(&tenant)).map(|takeover| takeover.spec));
        }
        let files = |disk: GuestDisk| [disk.path, disk.opened].into_iter().chain(disk.needs);
        let disks = specs.into_iter().flat_map(|spec| spec.disks);
        disks.flat_map(files).map(PathBuf::from).collect()
    }
}

fn takeover_in(mark: &Path) -> Option<Takeover> {
    serde_json::from_slice(&fs::read(mark).ok()?).ok()
}

/// Gives the file of a disk the name of its image, beside that by which its QEMU opened it:
/// a QEMU opens files by that name again when it likes. What had the image's name stays
/// beside it, unless it was to go when the guest ends.
fn put_in_place(disk: &GuestDisk, file: (u64, u64)) -> io::Result<()> {
    if disk.path == disk.opened {
        return Ok(());
    }
    let next = format!("{}{NEXT_SUFFIX}", disk.path);
    if file_of(&disk.path).ok() != Some(file) {
        // Of one that came to nothing: another name of the new file.
        let _ = fs::remove_file(&next);
        fs::hard_link(&disk.opened, &next)?;
        if fs::symlink_metadata(&disk.path).is_err() {
            return fs::rename(&next, &disk.path);
        }
        // At no moment there is no image, or half of one.
        exchange(Path::new(&next), Path::new(&disk.path))?;
    }
    match file_of(&next) {
        Err(_) => Ok(()),
        Ok(old) if old != file && !disk.temporary => {
            fs::rename(&next, format!("{}{BEFORE_SUFFIX}", disk.path))
        }
        Ok(_) => fs::remove_file(&next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(place: &Path, temporary: bool) -> GuestDisk {
        let path = |name: &str| place.join(name).to_str().expect("text").to_owned();
        GuestDisk {
            said: path("a"),
            path: path("a"),
            opened: path("a.new"),
            format: "raw".into(),
            temporary,
            needs: Vec::new(),
            layers: Vec::new(),
        }
    }

    #[test]
    fn a_disk_is_put_in_place_once_and_what_was_there_is_kept() {
        let place = std::env::temp_dir().join(format!("strata-takeover-{}", std::process::id()));
        fs::create_dir_all(&place).expect("a directory");
        let text = |name: &str| fs::read_to_string(place.join(name)).unwrap_or_default();
        for temporary in [false, true] {
            let disk = disk(&place, temporary);
            fs::write(&disk.path, "old").expect("written");
            fs::write(&disk.opened, "new").expect("written");
            let file = file_of(&disk.opened).expect("there");
            for _ in 0..2 {
                put_in_place(&disk, file).expect("in its place");
                assert_eq!(text("a"), "new");
                assert_eq!(text("a.before"), if temporary { "" } else { "old" });
            }
            assert_eq!(text("a.new"), "new");
            assert!(!place.join(format!("a{NEXT_SUFFIX}")).exists());
            let _ = fs::remove_file(place.join("a.before"));
            fs::remove_file(&disk.opened).expect("removed");
        }
        let disk = disk(&place, false);
        fs::remove_file(&disk.path).expect("removed");
        fs::write(&disk.opened, "first").expect("written");
        put_in_place(&disk, file_of(&disk.opened).expect("there")).expect("in its place");
        assert_eq!(text("a"), "first");
        // Whoever died between two steps has left what was there under another name.
        let next = place.join(format!("a{NEXT_SUFFIX}"));
        fs::write(&next, "older").expect("written");
        put_in_place(&disk, file_of(&disk.opened).expect("there")).expect("in its place");
        assert_eq!((text("a").as_str(), text("a.before").as_str()), ("first", "older"));
        fs::remove_dir_all(&place).expect("clean up");
    }
}
