//! Images that are made for the disks of a guest that comes, and what becomes of them.
//!
//! Which files are ours is written down before they get the names of images: at first each
//! has a name with the number of the move in it, and gets the other one where nothing has
//! it. What is removed is that very file. Once it is decided that the guest runs here they
//! are the guest's, and nobody's to remove.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use strata_api::{MOST_MOVE_DISKS, MoveDisk, MoveImage};
use strata_pager::Tenant;
use strata_sys::{Access, Priority, file_system_free_bytes, log};
use strata_units::ByteSize;
use strata_vm::disks::WrittenDisk;
use strata_vm::exports;

use super::super::super::guest_disks::Image;
use super::super::super::{Snapshots, lock};
use super::super::record::Decided;
use super::aside::place_of;
use super::ways::Open;
use crate::guests::create_image_over;

/// In the directory of a guest that comes: where its QEMU serves its disks.
const SOCKET: &str = "strata-disks";
/// What its QEMU may take to serve them, and to end that.
const SERVES_WITHIN: Duration = Duration::from_secs(20);

/// The images of one move, as they are written down.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct Room {
    images: Vec<Made>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Made {
    path: String,
    /// What it is called before it has that name.
    first: String,
    /// The file: device, number; none: it may not be there yet.
    file: Option<(u64, u64)>,
    temporary: bool,
}

/// That of a move that is under way. Dropped, it is nobody's.
pub(in super::super) struct Making<'a> {
    snapshots: &'a Snapshots,
    id: String,
    room: Room,
    open: Open<'a>,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        lock(&self.snapshots.ways.making).remove(&self.id);
    }
}

impl Room {
    /// Removes what was made of it.
    fn remove(&self) -> Result<(), String> {
        self.images.iter().try_for_each(|made| {
            made.remove().map_err(|error| format!("{} cannot be removed: {error}", made.path))
        })
    }
}

impl Made {
    fn remove(&self) -> io::Result<()> {
        let (place, name) = match place_of(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        let found = |name: &str| place.metadata(name).map(|found| (found.dev(), found.ino())).ok();
        let mut ours = vec![self.first.as_str()];
        if self.file.is_some() && found(&name) == self.file {
            ours.push(&name);
        }
        for name in ours {
            match place.remove_file(name) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

impl Snapshots {
    /// Makes an image for each disk of the move `id`, where nothing is; which of them are
    /// overlays.
    pub(in super::super) fn make_room(
        &self,
        id: &str,
        disks: &[MoveDisk],
    ) -> Result<(Making<'_>, Vec<bool>), String> {
        self.see_to_rooms();
        let paths: BTreeSet<&str> = disks.iter().map(|disk| &*disk.path).collect();
        if disks.is_empty() || disks.len() > MOST_MOVE_DISKS || paths.len() != disks.len() {
            return Err("it contradicts itself: the guest's disks".to_owned());
        }
        if let Some(problem) = disks.iter().find_map(MoveDisk::problem) {
            return Err(format!("it contradicts itself: {problem}"));
        }
        let over: Vec<bool> = disks.iter().map(is_over).collect::<Result<_, _>>()?;
        is_roomy(disks)?;
        lock(&self.ways.making).insert(id.to_owned());
        let (id, open) = (id.to_owned(), self.ways.open(id));
        let mut making = Making { snapshots: self, id, room: Room::default(), open };
        match making.make(disks, &over) {
            Ok(()) => Ok((making, over)),
            Err(why) => {
                let id = making.id.clone();
                drop(making);
                self.empty_room(&id);
                Err(why)
            }
        }
    }

    /// The guest runs here: its images are its own from now on.
    pub(in super::super) fn keep_room(&self, id: &str) -> Result<(), String> {
        let Some(room) = self.moves.room(id) else { return Ok(()) };
        let mut held = self.made.hold();
        for made in room.images.iter().filter(|made| made.temporary) {
            held.add(Path::new(&made.path))?;
        }
        self.moves.forget_room(id)
    }

    /// It does not, and will not: they are removed.
    pub(in super::super) fn empty_room(&self, id: &str) {
        let Some(room) = self.moves.room(id) else { return };
        if let Err(why) = room.remove().and_then(|()| self.moves.forget_room(id)) {
            // The next move that comes tries again, and the next worker.
            log(Priority::Error, format_args!("a disk of a guest that did not come: {why}"));
        }
    }

    /// Looks after images of moves that are not under way any more.
    pub(in super::super::super) fn see_to_rooms(&self) {
        for id in self.moves.all_rooms() {
            if lock(&self.ways.making).contains(&id) {
                continue;
            }
            match self.moves.decided(&id) {
                // Whoever asks for it has it run.
                Some(Decided::Committed(_) | Decided::LetRun(_)) => {}
                Some(Decided::Ran) => {
                    if let Err(why) = self.keep_room(&id) {
                        log(Priority::Error, format_args!("disks of a guest that came: {why}"));
                    }
                }
                // What was not decided will be, that it never runs here.
                Some(Decided::Never(_)) | None => self.empty_room(&id),
            }
        }
    }
}

impl<'a> Making<'a> {
    fn make(&mut self, disks: &[MoveDisk], over: &[bool]) -> Result<(), String> {
        let moves = &self.snapshots.moves;
        for disk in disks {
            let (_, name) = place_of(&disk.path).map_err(|error| no_place(disk, &error))?;
            let first = format!(".{name}.strata-{}", self.id);
            let (path, temporary) = (disk.path.clone(), disk.temporary);
            self.room.images.push(Made { path, first, file: None, temporary });
        }
        moves.write_room(&self.id, &self.room)?;
        self.snapshots.guests.step("room");
        for (number, (disk, over)) in disks.iter().zip(over).enumerate() {
            let file = self.make_one(disk, *over, &self.room.images[number].first)?;
            self.room.images[number].file = Some(file);
        }
        moves.write_room(&self.id, &self.room)?;
        for made in &self.room.images {
            let named = || {
                let (place, name) = place_of(&made.path)?;
                place.rename_new(&made.first, &name)?;
                // Where the file system could only give it a second name.
                let _ = place.remove_file(&made.first);
                place.sync()
            };
            named().map_err(|error| match error.kind() {
                ErrorKind::AlreadyExists => there_already(&made.path),
                _ => format!("{} cannot be made: {error}", made.path),
            })?;
        }
        self.snapshots.guests.step("made");
        Ok(())
    }

    /// Makes an image by its first name: device and number of the file.
    fn make_one(&self, disk: &MoveDisk, over: bool, first: &str) -> Result<(u64, u64), String> {
        let failed = |error: io::Error| format!("{} cannot be made: {error}", disk.path);
        let (place, _) = place_of(&disk.path).map_err(failed)?;
        let file = place.file(first, Access::New).map_err(failed)?;
        match disk.format.as_str() {
            "raw" => file.set_len(disk.size_bytes).map_err(failed)?,
            _ => self.fill(&file, disk, over)?,
        }
        let found = file.metadata().map_err(failed)?;
        if (found.uid(), found.gid()) != (disk.uid, disk.gid) && self.snapshots.uid == 0 {
            fchown(&file, Some(disk.uid), Some(disk.gid)).map_err(failed)?;
        }
        file.set_permissions(Permissions::from_mode(disk.mode & 0o777))
            .and_then(|()| file.sync_all())
            .map_err(failed)?;
        Ok((found.dev(), found.ino()))
    }

    /// Writes an empty qcow2 image, made where nobody else reaches. What it is over is not
    /// looked at: that was compared.
    fn fill(&self, mut file: &File, disk: &MoveDisk, over: bool) -> Result<(), String> {
        let (path, empty) = self.snapshots.disk.arriving(&self.id)?;
        drop(empty);
        let backing = disk.backing.as_ref().filter(|_| over);
        let backing = backing.map(|(name, format)| (&**name, &**format));
        let text = path.to_str().ok_or("snapshot_dir is no text")?;
        let filled = create_image_over(text, backing, disk.size_bytes).and_then(|()| {
            File::open(&path)
                .and_then(|mut image| io::copy(&mut image, &mut file))
                .map_err(|error| format!("{} cannot be made: {error}", disk.path))
        });
        self.snapshots.disk.forget_arrived_of(&self.id);
        filled.map(drop)
    }

    /// That the guest that comes has the disks that were said, and no others.
    pub(in super::super) fn is_for(&self, paths: &[&str]) -> Result<(), String> {
        let made: BTreeSet<&str> = self.room.images.iter().map(|made| &*made.path).collect();
        match made == paths.iter().copied().collect() {
            true => Ok(()),
            false => Err("it contradicts itself: the guest's disks".to_owned()),
        }
    }

    /// Has the QEMU that waits for the guest serve them to whoever copies.
    pub(in super::super) fn serve(&self, tenant: &Arc<Tenant>, pid: u32) -> Result<(), String> {
        let guests = &self.snapshots.guests;
        let socket = guests.directory(tenant).join(SOCKET);
        let text = socket.to_str().ok_or("socket_dir is no text")?;
        let _alone = guests.alone(tenant)?;
        let mut talk = self.snapshots.waiting(tenant, pid, false)?;
        talk.monitor.allow(SERVES_WITHIN);
        let written = strata_vm::disks::written(&mut talk.monitor).map_err(|e| e.to_string())?;
        let by_file: BTreeMap<&str, &WrittenDisk> =
            written.iter().map(|disk| (&*disk.file, disk)).collect();
        let found = |made: &Made| {
            let disk = by_file.get(&*made.path).copied();
            disk.ok_or_else(|| format!("its QEMU does not have the disk {}", made.path))
        };
        let disks: Vec<&WrittenDisk> =
            self.room.images.iter().map(found).collect::<Result<_, _>>()?;
        exports::open(&mut talk.monitor, text, &disks).map_err(|error| error.to_string())?;
        self.snapshots.ways.come(&self.open, tenant, &socket, disks.len());
        guests.step("served");
        Ok(())
    }

    /// They are as the guest had them: nobody writes to them any more until it runs.
    pub(in super::super) fn end(&self, tenant: &Arc<Tenant>) -> Result<(), String> {
        let guests = &self.snapshots.guests;
        {
            let _alone = guests.alone(tenant)?;
            let directory = guests.directory(tenant);
            let mut talk = guests.talk(tenant, &directory, SERVES_WITHIN)?;
            exports::close(&mut talk.monitor).map_err(|error| error.to_string())?;
        }
        for made in &self.room.images {
            File::open(&made.path)
                .and_then(|file| file.sync_all())
                .map_err(|error| format!("{} is not on its device: {error}", made.path))?;
        }
        guests.step("unserved");
        Ok(())
    }
}

fn no_place(disk: &MoveDisk, error: &io::Error) -> String {
    format!("no image can be made at {}: {error}", disk.path)
}

fn there_already(path: &str) -> String {
    format!("there is {path} already: remove it, or, if both hosts see it, leave out --copy-disks")
}

/// Whether a disk is made as an overlay: all that it is over is there, and is as it was.
fn is_over(disk: &MoveDisk) -> Result<bool, String> {
    let (place, name) = place_of(&disk.path).map_err(|error| no_place(disk, &error))?;
    if place.metadata(&name).is_ok() {
        return Err(there_already(&disk.path));
    }
    if disk.backing.is_none() || disk.layers.iter().any(|image| is_missing(&image.path)) {
        return Ok(false);
    }
    let alike = |image: &MoveImage| match Image::of("/", &image.path)?.said() == *image {
        true => Ok(()),
        false => Err(format!(
            "{}, which its disk {} is an overlay of, is another file here: remove it, or bring the one that is there",
            image.path, disk.path
        )),
    };
    disk.layers.iter().try_for_each(alike).map(|()| true)
}

fn is_missing(path: &str) -> bool {
    matches!(fs::symlink_metadata(path), Err(error) if error.kind() == ErrorKind::NotFound)
}

/// That there is room for all of them.
fn is_roomy(disks: &[MoveDisk]) -> Result<(), String> {
    let mut wanted: BTreeMap<u64, u64> = BTreeMap::new();
    for disk in disks {
        let place = Path::new(&disk.path).parent().unwrap_or(Path::new("/"));
        let looked = fs::metadata(place).and_then(|of| Ok((of, file_system_free_bytes(place)?)));
        let (of, free) = looked.map_err(|error| no_place(disk, &error))?;
        let all = wanted.entry(of.dev()).or_default();
        *all = all.saturating_add(disk.used_bytes);
        if *all > free {
            return Err(format!(
                "its disks need {} in {}, where {} are free",
                ByteSize(*all),
                place.display(),
                ByteSize(free)
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_file_that_was_made_is_removed() {
        let place = std::env::temp_dir().join(format!("strata-room-{}", std::process::id()));
        fs::create_dir_all(&place).expect("a directory");
        let path = place.join("a.raw").to_str().expect("text").to_owned();
        let first = ".a.raw.strata-1".to_owned();
        let made = |file| Made { path: path.clone(), first: first.clone(), file, temporary: false };
        // It was about to be made: what has the name is somebody else's.
        fs::write(&path, "theirs").expect("written");
        fs::write(place.join(&first), "ours").expect("written");
        made(None).remove().expect("removed");
        assert!(Path::new(&path).exists() && !place.join(&first).exists());
        let found = fs::metadata(&path).expect("there");
        made(Some((found.dev(), found.ino() + 1))).remove().expect("nothing");
        assert!(Path::new(&path).exists());
        made(Some((found.dev(), found.ino()))).remove().expect("removed");
        assert!(!Path::new(&path).exists());
        made(Some((1, 1))).remove().expect("it is gone already");
        fs::remove_dir_all(&place).expect("clean up");
        made(Some((1, 1))).remove().expect("so is its directory");
    }

    #[test]
    fn a_disk_that_cannot_be_made_is_refused_before_it_is() {
        let place = std::env::temp_dir().join(format!("strata-over-{}", std::process::id()));
        fs::create_dir_all(&place).expect("a directory");
        let at = |name: &str| place.join(name).to_str().expect("text").to_owned();
        fs::write(at("base"), "base").expect("written");
        let base = Image::of("/", &at("base")).expect("there").said();
        let disk = MoveDisk {
            path: at("a"),
            format: "qcow2".into(),
            size_bytes: 1 << 20,
            used_bytes: 0,
            mode: 0o600,
            uid: 0,
            gid: 0,
            temporary: false,
            backing: Some(("base".into(), "raw".into())),
            layers: vec![base],
        };
        assert_eq!(is_over(&disk), Ok(true));
        assert_eq!(is_over(&MoveDisk { backing: None, ..disk.clone() }), Ok(false));
        let why = is_roomy(&[MoveDisk { used_bytes: u64::MAX, ..disk.clone() }]);
        assert!(why.expect_err("no room").contains("are free"));
        fs::write(at("base"), "more").expect("written");
        assert!(is_over(&disk).expect_err("another").contains("is another file here"));
        fs::remove_file(at("base")).expect("removed");
        assert_eq!(is_over(&disk), Ok(false));
        fs::write(at("a"), "there").expect("written");
        assert!(is_over(&disk).expect_err("there").contains("leave out --copy-disks"));
        fs::remove_dir_all(&place).expect("clean up");
        assert!(is_over(&disk).expect_err("no place").contains("no image can be made"));
    }
}
