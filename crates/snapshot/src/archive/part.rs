//! The file of a snapshot while it is written: `NAME.part`, locked, and renamed
//! when it is whole. Dropped before that, it is gone.
//!
//! What a killed writer leaves has no lock and is removed by the next one.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Advice, FlockOperation};
use strata_sys::{Access, Directory};

use super::format::MAGIC;

/// How often a leftover may turn up again while it is being removed.
const ATTEMPTS: usize = 4;

/// Where a [`super::Writer`] writes to: a [`PartFile`], or one with faults.
pub trait Sink {
    /// Appends all of `bytes`.
    ///
    /// # Errors
    /// What the device says.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Has everything written so far on the device.
    ///
    /// # Errors
    /// What the device says.
    fn sync(&mut self) -> io::Result<()>;

    /// Gives the file its name, for good: it outlives a crash of the machine
    /// from here on. Overwrites nothing.
    ///
    /// # Errors
    /// `AlreadyExists`, or what the device says; there is no file then.
    fn publish(&mut self) -> io::Result<()>;
}

/// A file that has its name only when it is whole.
#[derive(Debug)]
pub struct PartFile {
    file: File,
    /// All names are in it, wherever it is by then.
    directory: Directory,
    part: OsString,
    name: OsString,
    is_published: bool,
}

/// `name` with `.part` at its end.
pub(super) fn part_of(name: impl AsRef<OsStr>) -> OsString {
    let mut part = name.as_ref().to_owned();
    part.push(".part");
    part
}

fn lock(file: &File) -> io::Result<()> {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
        let error = io::Error::from(error);
        match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::new(
                io::ErrorKind::ResourceBusy,
                "it is being written by another process",
            ),
            _ => error,
        }
    })
}

impl PartFile {
    /// Makes `path` with `.part` at its end, for its owner alone.
    ///
    /// # Errors
    /// `AlreadyExists`: there is something at `path`, or something that no
    /// writer left at `path.part`. `ResourceBusy`: another process writes it. Or
    /// what the file system says.
    pub fn create(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let directory = Directory::open(directory)?;
        if directory.metadata(name).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let part = part_of(name);
        for _ in 0..ATTEMPTS {
            // Nothing that is there is opened, links included.
            let file = match directory.file(&part, Access::New) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    remove_leftover(&directory, &part)?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            lock(&file)?;
            // Another may have taken it for a leftover before it was locked.
            if file.metadata()?.nlink() == 1 {
                let name = name.to_owned();
                return Ok(Self { file, directory, part, name, is_published: false });
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process makes the same file"))
    }
}

impl PartFile {
    /// Writes at a place of its own; what nobody writes to is a hole.
    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }
}

/// Removes what a killed writer has left.
fn remove_leftover(directory: &Directory, part: &OsStr) -> io::Result<()> {
    let in_the_way = || {
        let text = format!(
            "{} is in the way and is no snapshot; move it",
            directory.path().join(part).display()
        );
        io::Error::new(io::ErrorKind::AlreadyExists, text)
    };
    match directory.metadata(part) {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err(in_the_way()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    let mut file = match directory.file(part, Access::Read) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    lock(&file)?;
    let mut beginning = Vec::new();
    (&mut file).take(MAGIC.len() as u64).read_to_end(&mut beginning)?;
    if !MAGIC.starts_with(&beginning) {
        return Err(in_the_way());
    }
    // Still the one that is locked? Who made another one has it locked.
    if is_named(directory, part, &file).unwrap_or(false) {
        directory.remove_file(part)?;
    }
    Ok(())
}

/// Whether `name` is the name of this very file.
fn is_named(directory: &Directory, name: &OsStr, file: &File) -> io::Result<bool> {
    let (mine, now) = (file.metadata()?, directory.metadata(name)?);
    Ok((now.dev(), now.ino()) == (mine.dev(), mine.ino()))
}

impl Sink for PartFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_all()?;
        // It is not read soon, and others need the memory. Advice: may fail.
        let _ = rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed);
        Ok(())
    }

    fn publish(&mut self) -> io::Result<()> {
        self.sync()?;
        // Where it was done by a link, the other name goes when this is dropped.
        self.directory.rename_new(&self.part, &self.name)?;
        if let Err(error) = self.directory.sync() {
            // Whoever is told that it failed must not find it later.
            let _ = self.directory.remove_file(&self.name);
            return Err(error);
        }
        self.is_published = true;
        Ok(())
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        // After a rename there is none; another's may be there only after that.
        if is_named(&self.directory, &self.part, &self.file).unwrap_or(false) {
            let _ = self.directory.remove_file(&self.part);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::*;
    use crate::archive::testing::Place;

    fn part_of(path: &Path) -> PathBuf {
        super::part_of(path).into()
    }

    fn kind<T>(outcome: io::Result<T>) -> Option<io::ErrorKind> {
        outcome.err().map(|error| error.kind())
    }

    #[test]
    fn it_has_its_name_only_when_published_and_is_its_owners() {
        let place = Place::new("published");
        let path = place.path("x");
        let mut file = PartFile::create(&path).expect("a file");
        file.write(b"bytes").expect("room");
        let mode = fs::metadata(part_of(&path)).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        assert!(!path.exists());
        file.publish().expect("published");
        drop(file);
        assert!(!part_of(&path).exists());
        assert_eq!(fs::read(&path).expect("there"), b"bytes");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o7777, 0o600);
    }

    #[test]
    fn nothing_is_left_of_one_that_is_dropped() {
        let place = Place::new("dropped");
        drop(PartFile::create(&place.path("x")).expect("a file"));
        assert_eq!(place.names(), [""; 0]);
    }

    #[test]
    fn what_is_there_stays() {
        let place = Place::new("there");
        let path = place.path("x");
        let mut late = PartFile::create(&path).expect("a file");
        fs::write(&path, "mine").expect("written");
        assert_eq!(kind(PartFile::create(&path)), Some(io::ErrorKind::AlreadyExists));
        assert_eq!(kind(late.publish()), Some(io::ErrorKind::AlreadyExists));
        drop(late);
        assert_eq!(fs::read(&path).expect("there"), b"mine");
        assert_eq!(place.names(), ["x"]);
        // A link is something, too, wherever it leads.
        std::os::unix::fs::symlink("/nowhere", place.path("y")).expect("a link");
        assert_eq!(kind(PartFile::create(&place.path("y"))), Some(io::ErrorKind::AlreadyExists));
    }

    #[test]
    fn leftovers_go_and_living_writers_and_strangers_stay() {
        let place = Place::new("leftovers");
        let path = place.path("x");
        let part = part_of(&path);
        for leftover in [&b""[..], &MAGIC[..3], &MAGIC, b"\x89strata\nand more"] {
            fs::write(&part, leftover).expect("written");
            let file = PartFile::create(&path).expect("the leftover goes");
            assert_eq!(kind(PartFile::create(&path)), Some(io::ErrorKind::ResourceBusy));
            drop(file);
        }
        fs::write(&part, "a letter").expect("written");
        assert_eq!(kind(PartFile::create(&path)), Some(io::ErrorKind::AlreadyExists));
        assert_eq!(fs::read(&part).expect("there"), b"a letter");
        fs::remove_file(&part).expect("removed");
        fs::create_dir(&part).expect("made");
        assert_eq!(kind(PartFile::create(&path)), Some(io::ErrorKind::AlreadyExists));
        assert!(part.is_dir());
        fs::remove_dir(&part).expect("removed");
        std::os::unix::fs::symlink("/etc/hostname", &part).expect("a link");
        assert!(PartFile::create(&path).is_err());
        assert!(part.is_symlink());
        fs::remove_file(&part).expect("removed");
        // A link that somebody else can have put on the way is not followed; one's own is.
        let open = place.path("open");
        fs::create_dir(&open).expect("made");
        fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).expect("a mode");
        fs::create_dir(place.path("target")).expect("made");
        for (link, is_refused) in [(open.join("link"), true), (place.path("own"), false)] {
            std::os::unix::fs::symlink(place.path("target"), &link).expect("a link");
            let made = PartFile::create(&link.join("x"));
            assert_eq!(made.is_err(), is_refused, "{}", link.display());
        }
        assert_eq!(fs::read_dir(place.path("target")).expect("there").count(), 0);
    }
}
