//! The disks of guests' snapshots: a copy of each image that the guest writes to, beside
//! that image, read-only; and what guests that come from the snapshot get of it.
//!
//! ```text
//! IMAGE              the guest's own: it writes to it, before and after
//! IMAGE.web1@1       the snapshot's copy
//! IMAGE.test         the clone test's overlay of that copy
//! IMAGE.strata       what a rollback or restore puts in IMAGE's place; then another name of it,
//!                    by which QEMU has opened it
//! IMAGE.before       what it has replaced
//! ```
//! The files that are made here are in a list, written before they are. One goes when
//! nothing stands on it: no snapshot, no guest that is there.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use strata_api::{GuestDisk, GuestSpec, MoveImage};
use strata_pager::Tenant;
use strata_snapshot::archive::sum_of;
use strata_sys::{copy_sparse, is_locked};
use strata_units::fnv1a;
use strata_vm::disks::WrittenDisk;
use strata_vm::{OtherDisk, PoolDisk};

use super::guest::GuestPart;
use super::held_images::Held;
use super::{Snapshots, lock};
use crate::guests::{DiskCopy, create_image, keep};

/// What follows an image's name in that by which a QEMU opens what is to replace it.
const OPENED: &str = "strata";
/// Pieces of a file that are looked at, and how large they are: enough that an image that a
/// guest has run on differs in some.
const PIECES: u64 = 64;
const PIECE_BYTES: u64 = 4096;

pub(super) fn sum(bytes: &[u8]) -> u64 {
    fnv1a(bytes.iter().copied())
}

/// A file that a guest reads, as it was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Image {
    pub(super) path: String,
    bytes: u64,
    /// When it was written last, in nanoseconds since the epoch.
    written: u128,
    /// Its number in its file system.
    number: u64,
    /// Of its header and of pieces all over it.
    sum: u64,
    /// Of all of it, in a file that travels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    whole: Option<u64>,
}

fn whole_sum(directory: &str, path: &str) -> Result<u64, String> {
    File::open(Path::new(directory).join(path))
        .and_then(|file| sum_of(&file))
        .map_err(|error| format!("its drive's file {path} cannot be read: {error}"))
}

impl Image {
    /// `path` is relative to `directory`, if it is.
    pub(super) fn of(directory: &str, path: &str) -> Result<Self, String> {
        let failed = |why: io::Error| format!("its drive's file {path} cannot be looked at: {why}");
        let file = File::open(Path::new(directory).join(path)).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        let written = found.modified().map_err(failed)?;
        let written = written.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let mut pieces = vec![0; (PIECES * PIECE_BYTES) as usize];
        for (piece, at) in pieces.chunks_mut(PIECE_BYTES as usize).zip(0..) {
            // What is behind the end stays zero.
            let _ = file.read_at(piece, found.len() / PIECES * at).map_err(failed)?;
        }
        Ok(Self {
            path: path.to_owned(),
            bytes: found.len(),
            written,
            number: found.ino(),
            sum: sum(&pieces),
            whole: None,
        })
    }

    /// Sums it up, all of it, for whoever compares it elsewhere.
    pub(super) fn sum_up(&mut self, directory: &str) -> Result<(), String> {
        self.whole = Some(whole_sum(directory, &self.path)?);
        Ok(())
    }

    /// Takes the file that is here for the one that was elsewhere, if both are alike.
    pub(super) fn is_here(&mut self, directory: &str) -> Result<(), String> {
        let here = Self::of(directory, &self.path)
            .map_err(|why| format!("{why} (what a guest only reads is not in its file)"))?;
        let is_other = (here.bytes, here.sum) != (self.bytes, self.sum)
            || match self.whole {
                Some(sum) => whole_sum(directory, &self.path)? != sum,
                None => false,
            };
        if is_other {
            return Err(format!(
                "{}, which the guest reads, is another file here than where its snapshot was taken",
                self.path
            ));
        }
        *self = here;
        Ok(())
    }

    /// Whether the file that is called so here is as this one was.
    pub(super) fn is_alike(&self, here: &Self) -> bool {
        (here.bytes, here.sum) == (self.bytes, self.sum)
    }

    /// It, to be compared where it is to be as well. `path` is absolute.
    pub(super) fn said(&self) -> MoveImage {
        MoveImage { path: self.path.clone(), bytes: self.bytes, sum: self.sum }
    }

    /// Refuses one that has changed.
    pub(super) fn check(&self, directory: &str) -> Result<(), String> {
        match Self::of(directory, &self.path)? == *self {
            true => Ok(()),
            false => Err(format!(
                "{}, which the guest reads, has changed since: its file system would be wrong",
                self.path
            )),
        }
    }
}

/// A disk in a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct FrozenDisk {
    /// The image that the command line names.
    said: String,
    /// The image that the guest wrote to, and whether that was to go with the guest.
    path: String,
    temporary: bool,
    /// Of the copy.
    format: String,
    copy: Image,
    /// Of one that is read through a pool: the images that it was over, the nearest first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    layers: Option<Vec<String>>,
}

/// What stands in the places of the images of a guest's command line.
pub(super) fn others(disks: &[GuestDisk]) -> Vec<OtherDisk> {
    let other = |disk: &GuestDisk| OtherDisk {
        said: PathBuf::from(&disk.said),
        path: disk.opened.clone(),
        format: disk.format.clone(),
        layers: disk.layers.clone(),
    };
    disks.iter().map(other).collect()
}

/// A disk that a guest writes to.
pub(super) struct OwnDisk {
    pub(super) disk: GuestDisk,
    /// It is read through a pool.
    pub(super) is_pooled: bool,
}

/// The disk of a guest that its QEMU has as `written`; those that are read through pools are
/// `pooled`. Of an overlay above one of these QEMU was told what it is over; its header says
/// what it likes.
pub(super) fn own_disk(
    spec: &GuestSpec,
    directory: &str,
    written: &mut WrittenDisk,
    pooled: &[PoolDisk],
) -> Result<OwnDisk, String> {
    let path = Path::new(directory).join(&written.file);
    let path = path.to_str().ok_or("the path of its drive is no text")?.to_owned();
    let pooled = pooled.iter().find(|disk| disk.written() == Some(&*path));
    let mut layers = Vec::new();
    if let Some(disk) = pooled
        && let Some((below, format)) = disk.below()
    {
        written.backing = Some((below.to_owned(), format.to_owned()));
        layers.clone_from(&disk.between);
        layers.push(disk.image.clone());
    }
    let is_pooled = pooled.is_some();
    if let Some(known) = spec.disks.iter().find(|known| known.opened == written.file) {
        return Ok(OwnDisk { disk: GuestDisk { layers, ..known.clone() }, is_pooled });
    }
    let disk = GuestDisk {
        said: path.clone(),
        path: path.clone(),
        opened: path,
        format: written.format.clone(),
        temporary: false,
        needs: Vec::new(),
        layers,
    };
    Ok(OwnDisk { disk, is_pooled })
}

impl Snapshots {
    /// Empty copies of a guest's disks for the snapshot `of`.
    pub(super) fn begin_copies(
        &self,
        own: &[OwnDisk],
        written: Vec<WrittenDisk>,
        of: &str,
    ) -> Result<(Held, Vec<DiskCopy>), String> {
        let mut held = self.made.hold();
        let mut copies = Vec::new();
        for (OwnDisk { disk, .. }, written) in own.iter().zip(written) {
            let path = held.name(&disk.said, of)?;
            copies.push(DiskCopy::new(written, PathBuf::from(&disk.path), path.into())?);
        }
        Ok((held, copies))
    }

    /// What the snapshot has of a guest's disks, whose copies are whole.
    pub(super) fn frozen(own: &[OwnDisk], copies: &[DiskCopy]) -> Result<Vec<FrozenDisk>, String> {
        keep(copies)?;
        let frozen = |(OwnDisk { disk, is_pooled }, copy): (&OwnDisk, &DiskCopy)| {
            Ok(FrozenDisk {
                said: disk.said.clone(),
                path: disk.path.clone(),
                temporary: disk.temporary,
                format: copy.disk.format.clone(),
                copy: Image::of("/", copy.path.to_str().ok_or("its path is no text")?)?,
                layers: is_pooled.then(|| disk.layers.clone()),
            })
        };
        own.iter().zip(copies).map(frozen).collect()
    }

    /// Disks for a guest that is to come from a snapshot. A `clone` of that name gets
    /// overlays; else they are to take the places of the images of `now`, which is the guest
    /// that goes back, or of those that the snapshot was taken of.
    pub(super) fn disks_for(
        &self,
        part: &GuestPart,
        clone: Option<&str>,
        now: Option<(&Tenant, bool)>,
    ) -> Result<(Held, Vec<GuestDisk>), String> {
        let mut held = self.made.hold();
        if part.in_place.is_some() {
            return Ok((held, part.spec.disks.clone()));
        }
        let directory = part.directory();
        let absolute =
            |image: &Image| Path::new(directory).join(&image.path).to_str().map(str::to_owned);
        let needs: Vec<String> = part.files.iter().filter_map(absolute).collect();
        let mut disks = Vec::new();
        for disk in &part.disks {
            let said = disk.said.clone();
            if let Some(name) = clone {
                let path = held.name(&said, name)?;
                create_image(&path, Some((&disk.copy.path, &disk.format)), None)?;
                let mut needs = needs.clone();
                needs.push(disk.copy.path.clone());
                let (opened, format) = (path.clone(), "qcow2".to_owned());
                let layers = disk.layers_with_copy();
                let temporary = true;
                disks.push(GuestDisk { said, path, opened, format, temporary, needs, layers });
                continue;
            }
            let (path, temporary) = match now {
                None => (disk.path.clone(), disk.temporary),
                Some((tenant, is_first)) => self.image_of(tenant, is_first, &said)?,
            };
            if now.is_none() && Path::new(&path).exists() {
                refuse_used(&path)?;
            }
            let opened = held.name(&path, OPENED)?;
            copy(&disk.copy.path, &opened, &path)?;
            let (needs, format) = (needs.clone(), disk.format.clone());
            let layers = disk.layers.clone().unwrap_or_default();
            disks.push(GuestDisk { said, path, opened, format, temporary, needs, layers });
        }
        Ok((held, disks))
    }

    /// The image that a guest has in the place of one of its command line.
    fn image_of(
        &self,
        tenant: &Tenant,
        is_first: bool,
        said: &str,
    ) -> Result<(String, bool), String> {
        let spec = self.guests.spec(tenant).ok_or("it is no guest")?;
        match spec.disks.iter().find(|disk| disk.said == said) {
            Some(disk) => Ok((disk.path.clone(), disk.temporary)),
            None if is_first => Ok((said.to_owned(), false)),
            None => Err(format!("it has no disk in the place of {said}")),
        }
    }

    /// Removes the files of disks that nothing stands on any more.
    pub(crate) fn sweep_disks(&self) {
        self.made.sweep(|| self.disks_needed());
    }

    fn disks_needed(&self) -> BTreeSet<PathBuf> {
        let mut needed = self.guests.disks_needed();
        for known in lock(&self.known).values() {
            let Some(part) = &known.guest else { continue };
            let directory = part.directory();
            needed.extend(part.disks.iter().map(|disk| PathBuf::from(&disk.copy.path)));
            needed.extend(part.files.iter().map(|file| Path::new(directory).join(&file.path)));
        }
        needed
    }
}

impl FrozenDisk {
    /// What an overlay above the copy is over.
    fn layers_with_copy(&self) -> Vec<String> {
        let Some(layers) = &self.layers else { return Vec::new() };
        std::iter::once(&self.copy.path).chain(layers).cloned().collect()
    }

    /// The file of the copy.
    pub(super) fn path(&self) -> String {
        self.copy.path.clone()
    }

    /// The image that the command line names.
    pub(super) fn said(&self) -> &str {
        &self.said
    }

    /// The image that is the guest's when it is restored.
    pub(super) fn image(&self) -> &str {
        &self.path
    }

    pub(super) fn copy_bytes(&self) -> u64 {
        self.copy.bytes
    }

    /// The copy, open to be read.
    pub(super) fn open(&self) -> Result<File, String> {
        File::open(&self.copy.path).map_err(|error| format!("{}: {error}", self.copy.path))
    }

    /// Has the copy outlive the machine's next crash, its name too.
    pub(super) fn is_to_stay(&self) -> Result<(), String> {
        let place = Path::new(&self.copy.path).parent().unwrap_or(Path::new("/"));
        self.open()?
            .sync_all()
            .and_then(|()| File::open(place)?.sync_all())
            .map_err(|error| format!("{} is not on its device: {error}", self.copy.path))
    }

    /// The copy came from elsewhere, and is at `path`. The disk of a guest that is called
    /// otherwise now (`renamed`) takes no place of the first one's; it is nobody's clone.
    pub(super) fn came(&mut self, path: &str, renamed: Option<&str>) -> Result<(), String> {
        let copy = Image::of("/", path)?;
        if (copy.bytes, copy.sum) != (self.copy.bytes, self.copy.sum) {
            return Err(format!("it contradicts itself: the disk {}", self.said));
        }
        self.copy = copy;
        self.temporary = false;
        if let Some(name) = renamed {
            self.path = format!("{}.{name}", self.said);
        }
        Ok(())
    }

    /// Refuses one whose copy has changed.
    pub(super) fn check(&self) -> Result<(), String> {
        self.copy.check("/").map_err(|_| {
            format!("{}, the copy of a disk, is gone or has changed since", self.copy.path)
        })
    }
}

/// Refuses an image that some QEMU has.
fn refuse_used(path: &str) -> Result<(), String> {
    match File::open(path).and_then(|file| is_locked(&file)) {
        Ok(false) => Ok(()),
        Ok(true) => Err(format!("{path} is in use: another QEMU has it")),
        Err(error) => Err(format!("{path} cannot be looked at: {error}")),
    }
}

/// Makes `to`, a copy of the image `from` that is like `like`: whose and for whom.
fn copy(from: &str, to: &str, like: &str) -> Result<(), String> {
    let made = || {
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(to)?;
        copy_sparse(&File::open(from)?, &file)?;
        if let Ok(like) = fs::metadata(like) {
            file.set_permissions(Permissions::from_mode(like.mode() & 0o777))?;
        }
        file.sync_all()
    };
    made().map_err(|error| format!("cannot copy {from} to {to}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_was_written_is_another_whatever_its_time_says() {
        let path = std::env::temp_dir().join(format!("strata-image-{}", std::process::id()));
        let name = path.to_str().expect("text").to_owned();
        let big = vec![7_u8; 5 << 20];
        fs::write(&path, &big).expect("a file");
        let first = Image::of("/", &name).expect("there");
        assert_eq!(first.check("/"), Ok(()));
        let time = fs::metadata(&path).and_then(|found| found.modified()).expect("a time");
        let file = File::options().write(true).open(&path).expect("open");
        file.write_all_at(b"x", 0).expect("written");
        file.set_modified(time).expect("an older time");
        assert!(first.check("/").expect_err("another").contains("has changed since"));
        file.write_all_at(&big[..1], 0).expect("written");
        file.set_modified(time).expect("an older time");
        assert_eq!(first.check("/"), Ok(()));
        // Another file with the same content: not the same, but as good where none was.
        fs::copy(&path, format!("{name}-2"))
            .and_then(|_| fs::rename(format!("{name}-2"), &path))
            .expect("a copy");
        assert!(first.check("/").is_err());
        let mut second = first.clone();
        assert_eq!(second.is_here("/"), Ok(()));
        assert_eq!(second.check("/"), Ok(()));
        fs::write(&path, "less").expect("a file");
        assert!(first.check("/").is_err());
        assert!(second.is_here("/").expect_err("another").contains("is another file here"));
        fs::remove_file(&path).expect("clean up");
        assert!(Image::of("/", &name).expect_err("gone").contains(&name));
    }
}
