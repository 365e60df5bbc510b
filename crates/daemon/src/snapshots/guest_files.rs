//! Snapshots of guests in files. Beside the guest's memory such a file has
//!
//! ```text
//! devices    the state of its devices
//! disk-N     the copy of its Nth disk; only if the file is to travel
//! ```
//! A file that stays with its snapshot refers to the copies, which lie beside their images.
//! Images that the guest only reads are in no file: they have to be where it is restored.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use serde::Deserialize;
use strata_api::{Claim, GuestSpec, Progress, SnapshotId, Unit};
use strata_snapshot::archive::Reader;
use strata_units::ByteSize;

use super::disk::Known;
use super::guest::GuestPart;
use super::guest_disks::{Image, sum};
use super::guest_swap::{self, SWAP_PID};
use super::held_images::Held;
use super::vouch::Author;
use super::{Snapshots, Tell};
use crate::guests::MOST_STATE_BYTES;

/// The versions of what is said of a guest: the second one has disks that are served to it.
const VERSION: u32 = 1;
const SERVED_VERSION: u32 = 2;
/// The file of its devices' state.
const DEVICES: &str = "devices";
/// What begins the names of its disks' copies.
const DISK: &str = "disk-";
/// Nobody writes to a copy that is whole.
const READ_ONLY: u32 = 0o400;

/// The first one that can say all of it.
pub(super) fn version_of(spec: &GuestSpec) -> u32 {
    let is_served = spec.launch.as_ref().is_some_and(|launch| launch.servers() > 0);
    if is_served { SERVED_VERSION } else { VERSION }
}

pub(super) fn first_version() -> u32 {
    1
}

/// What of a description must be understood before the rest is read.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    guest: Option<Versioned>,
}

#[derive(Deserialize)]
struct Versioned {
    #[serde(default = "first_version")]
    version: u32,
}

/// What a file says that it is a snapshot of.
pub(super) fn described(reader: &Reader, path: &Path) -> Result<Known, String> {
    read_description(reader.description()).map_err(|why| format!("{}: {why}", path.display()))
}

fn read_description(text: &[u8]) -> Result<Known, String> {
    let nothing = |_| "it does not say what it is a snapshot of".to_owned();
    let outline: Outline = serde_json::from_slice(text).map_err(nothing)?;
    match outline.guest {
        Some(Versioned { version }) if !(VERSION..=SERVED_VERSION).contains(&version) => {
            Err(format!(
                "version {version} of what is said of a guest; this program reads versions {VERSION} and {SERVED_VERSION}"
            ))
        }
        _ => serde_json::from_slice(text).map_err(nothing),
    }
}

fn disk_name(number: usize) -> String {
    format!("{DISK}{number}")
}

/// The place of a file in a snapshot's file.
fn index_of(reader: &Reader, name: &str) -> Option<usize> {
    reader.files().iter().position(|file| file.name == name)
}

/// The state of a guest's devices, as its file has it.
pub(super) fn state_in(reader: &Reader, part: &GuestPart) -> Result<Vec<u8>, String> {
    let index = index_of(reader, DEVICES).ok_or("it lacks the state of the guest's devices")?;
    let bytes = reader
        .file_beginning(index, part.state_bytes + 1)
        .map_err(|error| crate::tenants::chain(&error))?;
    match part.is_state(&bytes) {
        true => Ok(bytes),
        false => Err("it contradicts itself: the state of the guest's devices".to_owned()),
    }
}

/// How much of a file's disks is there.
fn unpacked(done: u64, total: u64) -> Progress {
    Progress { what: "unpacking disks".into(), done, total: Some(total), unit: Unit::Bytes }
}

impl Snapshots {
    /// The state of a guest's devices, if it is what was written.
    pub(super) fn state_of(&self, id: &SnapshotId, part: &GuestPart) -> Result<Vec<u8>, String> {
        let bytes = self.disk.read_state(id, part.state_bytes + 1)?;
        match part.is_state(&bytes) {
            true => Ok(bytes),
            false => Err(format!("the state of its devices in {id} is not what was written")),
        }
    }

    /// The files that go into a snapshot's file, which is to travel, or stays.
    pub(super) fn files_of(
        &self,
        known: &Known,
        travels: bool,
    ) -> Result<Vec<(String, File)>, String> {
        let id = &known.info.id;
        let Some(part) = &known.guest else { return self.disk.open_images(id) };
        part.check()?;
        self.state_of(id, part)?;
        let mut files = vec![(DEVICES.to_owned(), self.disk.open_state(id)?)];
        for (number, disk) in part.disks.iter().enumerate() {
            match travels {
                true => files.push((disk_name(number), disk.open()?)),
                false => disk.is_to_stay()?,
            }
        }
        Ok(files)
    }

    /// Has what a persisted snapshot of a guest needs beside memory be there again.
    pub(super) fn load_guest(
        &self,
        reader: &Reader,
        known: &Known,
        part: &GuestPart,
    ) -> Result<(), String> {
        let id = &known.info.id;
        let path = self.disk.archive(id);
        let written = described(reader, &path)?;
        let pids = |known: &Known| known.processes.iter().map(|one| one.pid).collect::<Vec<_>>();
        if written.guest.as_ref() != Some(part) || pids(&written) != pids(known) {
            return Err(format!(
                "what is said of {id} beside {} is not what was persisted: snapshot.json there is damaged",
                path.display()
            ));
        }
        if self.state_of(id, part).is_ok() {
            return Ok(());
        }
        let bytes = state_in(reader, part).map_err(|why| format!("{}: {why}", path.display()))?;
        self.disk.write_state(id, &bytes)
    }

    /// Takes in what a guest's file has beside memory, as the snapshot `known`. The copies
    /// of its disks are held until that is one.
    pub(super) fn guest_in(
        &self,
        reader: &Reader,
        known: &mut Known,
        is_renamed: bool,
        tell: Tell<'_>,
    ) -> Result<Held, String> {
        let mut held = self.made.hold();
        let id = known.info.id.clone();
        let Some(part) = &mut known.guest else { return Ok(held) };
        part.fits_here(reader)?;
        self.disk.make(&id)?;
        self.disk.write_state(&id, &state_in(reader, part)?)?;
        let total = part.disks.iter().map(|disk| disk.copy_bytes()).sum();
        let mut done = 0;
        for (number, disk) in part.disks.iter_mut().enumerate() {
            let name = disk_name(number);
            let index = index_of(reader, &name).ok_or_else(|| {
                format!("it lacks {name}, the copy of a disk: it was persisted for its own machine; strata snapshot export writes one that travels")
            })?;
            let path = held.name(disk.said(), &id.to_string())?;
            let mut told = |bytes: u64| {
                done += bytes;
                tell(unpacked(done, total));
            };
            unpack(reader, index, &path, &mut told)?;
            disk.came(&path, is_renamed.then_some(&*known.info.tenant))?;
            self.guests.step("unpacked");
        }
        known.info.disks = part.disks.iter().map(|disk| disk.path()).collect();
        Ok(held)
    }
}

/// Makes the copy of a disk from a file's.
fn unpack(
    reader: &Reader,
    index: usize,
    path: &str,
    told: &mut dyn FnMut(u64),
) -> Result<(), String> {
    let failed = |error: io::Error| {
        format!("{path}, which is to be the copy of a disk, cannot be made: {error}")
    };
    let mut options = File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    reader.unpack_file(index, &file, told).map_err(|error| crate::tenants::chain(&error))?;
    file.set_permissions(Permissions::from_mode(READ_ONLY))
        .and_then(|()| file.sync_all())
        .map_err(failed)
}

impl GuestPart {
    fn is_state(&self, bytes: &[u8]) -> bool {
        bytes.len() as u64 == self.state_bytes && sum(bytes) == self.state_sum
    }

    /// What relative paths are relative to.
    pub(super) fn directory(&self) -> &str {
        self.spec.launch.as_ref().map_or("/", |launch| &launch.directory)
    }

    /// Refuses a guest whose disks or images are not as they were.
    pub(super) fn check(&self) -> Result<(), String> {
        self.files.iter().try_for_each(|image| image.check(self.directory()))?;
        self.disks.iter().try_for_each(|disk| disk.check())
    }

    /// Refuses what a file says of a guest if that is none, or cannot be one here; takes
    /// the images that it reads for those that are here.
    pub(super) fn fits_here(&mut self, reader: &Reader) -> Result<(), String> {
        if self.spec.libvirt.is_some() {
            // Its XML would be root's word to libvirt.
            return Err(
                "it is of a guest of libvirt's, which comes back on its own host".to_owned()
            );
        }
        if let Some(why) = self.problem(reader) {
            return Err(format!("it contradicts itself: {why}"));
        }
        let directory = self.directory().to_owned();
        if !Path::new(&directory).is_dir() {
            return Err(format!("its QEMU is started in {directory}: make that directory"));
        }
        self.files.iter_mut().try_for_each(|image| image.is_here(&directory))
    }

    /// The same of one that moves here: the disks that it keeps have to be here, and, when
    /// it stands still, to be those that it had, or like them if they `are_copied`.
    pub(super) fn comes_here(&mut self, reader: &Reader, are_copied: bool) -> Result<(), String> {
        self.fits_here(reader)?;
        let disks = self.in_place.as_ref().ok_or("it contradicts itself: the guest's disks")?;
        for (path, image) in disks {
            let here = Image::of(self.directory(), path).map_err(|why| {
                format!("{why}; the disk of a guest that moves has to be where both hosts see it")
            })?;
            if image.as_ref().is_some_and(|image| !image.is_alike(&here)) {
                return Err(match are_copied {
                    true => format!("the copy of its disk {path} is not like the disk"),
                    false => format!(
                        "its disk {path} is another one here: it has to be one that both hosts see, or be copied (--copy-disks)"
                    ),
                });
            }
        }
        Ok(())
    }

    fn problem(&self, reader: &Reader) -> Option<&'static str> {
        let (start, end) = self.memory;
        let swap = guest_swap::size_bytes(&self.spec).is_some();
        let is_absolute = |path: &str| Path::new(path).is_absolute();
        if let Some(problem) = self.spec.problem() {
            Some(problem)
        } else if self.spec.launch.is_none() {
            Some("how the guest was started")
        } else if self.state_bytes > MOST_STATE_BYTES {
            Some("the size of the state of the guest's devices")
        } else if end.checked_sub(start) != Some(self.spec.memory_bytes)
            || reader.processes().len() != 1 + usize::from(swap)
            || reader.processes().iter().any(|process| process.pid == SWAP_PID) != swap
        {
            Some("the guest's memory")
        } else if !is_absolute(self.directory())
            || !self.disks.iter().all(|disk| is_absolute(disk.said()) && is_absolute(disk.image()))
        {
            Some("the paths of the guest's disks")
        } else {
            None
        }
    }

    /// Sums up what a file that travels does not have.
    pub(super) fn sum_up(&mut self) -> Result<(), String> {
        if self.spec.libvirt.is_some() {
            return Err("a guest of libvirt's comes back on its own host: persist it".to_owned());
        }
        let directory = self.directory().to_owned();
        self.files.iter_mut().try_for_each(|image| image.sum_up(&directory))
    }

    /// What a file that travels does not have, for whoever carries it.
    pub(super) fn read_beside(&self) -> String {
        let paths: Vec<&str> = self.files.iter().map(|image| &*image.path).collect();
        match paths[..] {
            [] => String::new(),
            _ => format!(
                "it has no {}: what the guest only reads has to be there, too",
                paths.join(", ")
            ),
        }
    }

    /// What a file has whoever takes it in do; it asks for that as its author.
    pub(super) fn claims(&self, author: &Author) -> (Option<u32>, Vec<Claim>) {
        let owner = author.user();
        let mut claims = Vec::new();
        let mut claim = |text: String| claims.push(Claim { text, is_beyond: owner.is_some() });
        if let Some(launch) = &self.spec.launch {
            claim(format!("starts, in {}: {}", launch.directory, launch.command.join(" ")));
            for disk in &launch.disks {
                claim(format!("has the disk {disk}"));
            }
            if let Some(bytes) = launch.swap_bytes {
                claim(format!("has a swap disk of {}", ByteSize(bytes)));
            }
        }
        for disk in &self.disks {
            claim(format!("makes a copy of a disk beside {}", disk.said()));
            claim(format!("puts a disk in the place of {}, when it is restored", disk.image()));
        }
        for image in &self.files {
            claim(format!("reads {}, which must be there", image.path));
        }
        (owner, claims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_refused_before_anything_else_is_read() {
        for (text, named) in [
            (&br#"{"guest":{"version":3,"shape":"unknown"}}"#[..], "version 3"),
            (br#"{"guest":{"version":0}}"#, "version 0"),
            (br#"{"guest":{}}"#, "does not say"),
            (br#"{"guest":null}"#, "does not say"),
            (b"{", "does not say"),
        ] {
            let why = read_description(text).expect_err(named);
            assert!(why.contains(named), "{why}");
        }
    }
}
