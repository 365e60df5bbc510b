//! Directories that others may reach into: opened once, and everything in them by
//! plain names relative to that, so that nobody who puts a link in a path's way has
//! something else opened, made or removed.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::uffd::own;

/// As many links in a path as the kernel follows.
const MOST_LINKS: usize = 40;
/// Longest path that a link may hold.
const MOST_LINK_BYTES: usize = 4096;
/// May be written by its group, or by everybody.
const OTHERS_WRITE: u32 = 0o022;
/// `S_ISVTX`: what is in it is removed and renamed by its owner alone.
const STICKY: u32 = 0o1000;

/// An open directory.
///
/// On the way to it no symbolic link was followed that somebody else could have put
/// there: one that lies in a directory which belongs to neither root nor this
/// process's user, or which others may write to.
#[derive(Debug)]
pub struct Directory {
    descriptor: OwnedFd,
    path: PathBuf,
}

/// What [`Directory::file`] is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read what is there.
    Read,
    /// Read and write what is there, or a new file, of this user alone.
    ReadWrite,
    /// Write a new file, of this user alone; `AlreadyExists` if anything has the name.
    New,
}

fn refused(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

fn plain(name: &OsStr) -> io::Result<CString> {
    let bytes = name.as_bytes();
    let is_plain = !bytes.is_empty() && bytes != b"." && bytes != b".." && !bytes.contains(&b'/');
    if !is_plain {
        let text = format!("{} is not a plain name", Path::new(name).display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(CString::new(bytes)?)
}

/// `openat`. Never through a link at `name`.
fn open_at(
    directory: Option<BorrowedFd<'_>>,
    name: &CStr,
    flags: i32,
    mode: u32,
) -> io::Result<OwnedFd> {
    let at = directory.map_or(libc::AT_FDCWD, |directory| directory.as_raw_fd());
    let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: a live descriptor and a NUL-terminated string; the result is new.
    let fd = unsafe { libc::openat(at, name.as_ptr(), flags, mode) };
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(own(fd)) }
}

/// A name in a directory, whatever it is.
fn look_at(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<(OwnedFd, std::fs::Metadata)> {
    let descriptor = open_at(Some(directory), name, libc::O_PATH, 0)?;
    let metadata = File::from(descriptor.try_clone()?).metadata()?;
    Ok((descriptor, metadata))
}

fn read_link(link: BorrowedFd<'_>) -> io::Result<OsString> {
    let mut text = vec![0u8; MOST_LINK_BYTES];
    // SAFETY: a live descriptor of a link, an empty string, and room of that length.
    let len = unsafe {
        libc::readlinkat(link.as_raw_fd(), c"".as_ptr(), text.as_mut_ptr().cast(), text.len())
    };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    if len == text.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    text.truncate(len);
    Ok(OsString::from_vec(text))
}

fn own_user() -> u32 {
    // SAFETY: no arguments.
    unsafe { libc::geteuid() }
}

/// Whether somebody else may put names into a directory.
fn is_open_to_others(metadata: &std::fs::Metadata) -> bool {
    metadata.mode() & OTHERS_WRITE != 0 || is_strangers(metadata)
}

fn is_strangers(metadata: &std::fs::Metadata) -> bool {
    metadata.uid() != 0 && metadata.uid() != own_user()
}

/// Components that are still to be walked, the next one last.
fn push_components(rest: &mut Vec<OsString>, path: &Path) -> io::Result<()> {
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name.to_owned()),
            Component::ParentDir => names.push("..".into()),
            Component::RootDir | Component::CurDir => {}
            Component::Prefix(_) => return Err(io::ErrorKind::InvalidInput.into()),
        }
    }
    rest.extend(names.into_iter().rev());
    Ok(())
}

impl Directory {
    /// Opens the directory at `path`.
    ///
    /// # Errors
    /// `PermissionDenied` with the link that was not followed and why; else the
    /// kernel's.
    pub fn open(path: &Path) -> io::Result<Self> {
        let Walked { here: descriptor, of: metadata, .. } = walk(path)?.whole()?;
        if !metadata.is_dir() {
            return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
        }
        // One that can be read and synced, not only walked through.
        let descriptor =
            open_at(Some(descriptor.as_fd()), c".", libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
        Ok(Self { descriptor, path: path.to_owned() })
    }

    /// The same, of a directory that nobody but root and this user may put anything
    /// into, or put something else in the place of.
    ///
    /// # Errors
    /// `PermissionDenied` with who could; else as [`Self::open`].
    pub fn open_private(path: &Path) -> io::Result<Self> {
        let this = Self::open(path)?;
        let of = File::from(this.descriptor.try_clone()?).metadata()?;
        if is_strangers(&of) {
            let (path, uid) = (path.display(), of.uid());
            return Err(refused(format!("{path} belongs to user {uid}")));
        }
        if of.mode() & OTHERS_WRITE != 0 {
            let (path, mode) = (path.display(), of.mode() & 0o7777);
            return Err(refused(format!("others may write to {path} (mode {mode:o})")));
        }
        Ok(this)
    }

    /// Where it was.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory `name` in it.
    ///
    /// # Errors
    /// The kernel's; a link is none.
    pub fn directory(&self, name: impl AsRef<OsStr>) -> io::Result<Self> {
        let name = name.as_ref();
        let flags = libc::O_RDONLY | libc::O_DIRECTORY;
        let descriptor = open_at(Some(self.as_fd()), &plain(name)?, flags, 0)?;
        Ok(Self { descriptor, path: self.path.join(name) })
    }

    /// The plain file `name` in it. Neither a link nor anything else but a plain file
    /// is opened.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput`: it is no plain file.
    pub fn file(&self, name: impl AsRef<OsStr>, access: Access) -> io::Result<File> {
        let name = name.as_ref();
        // Who opens the other end of a pipe, or a terminal, is not waited for.
        let never_waits = libc::O_NONBLOCK | libc::O_NOCTTY;
        let flags = match access {
            Access::Read => libc::O_RDONLY | never_waits,
            Access::ReadWrite => libc::O_RDWR | libc::O_CREAT | never_waits,
            Access::New => libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL,
        };
        let file = File::from(open_at(Some(self.as_fd()), &plain(name)?, flags, 0o600)?);
        if !file.metadata()?.is_file() {
            let text = format!("{} is not a plain file", self.path.join(name).display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(file)
    }

    /// What is at `name`, a link itself.
    ///
    /// # Errors
    /// The kernel's.
    pub fn metadata(&self, name: impl AsRef<OsStr>) -> io::Result<std::fs::Metadata> {
        look_at(self.as_fd(), &plain(name.as_ref())?).map(|(_, metadata)| metadata)
    }

    /// Makes a directory in it, of this user alone.
    ///
    /// # Errors
    /// The kernel's.
    pub fn make_directory(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        let name = plain(name.as_ref())?;
        // SAFETY: a live descriptor and a NUL-terminated string.
        check(unsafe { libc::mkdirat(self.descriptor.as_raw_fd(), name.as_ptr(), 0o700) })
    }

    /// Removes a file, or a link itself.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove_file(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        self.unlink(name.as_ref(), 0)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove_directory(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        self.unlink(name.as_ref(), libc::AT_REMOVEDIR)
    }

    fn unlink(&self, name: &OsStr, flags: i32) -> io::Result<()> {
        let name = plain(name)?;
        // SAFETY: a live descriptor and a NUL-terminated string.
        check(unsafe { libc::unlinkat(self.descriptor.as_raw_fd(), name.as_ptr(), flags) })
    }

    /// Gives `from` the name `to`, in place of what has it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn rename(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> io::Result<()> {
        let (from, to) = (plain(from.as_ref())?, plain(to.as_ref())?);
        let at = self.descriptor.as_raw_fd();
        // SAFETY: a live descriptor and NUL-terminated strings.
        check(unsafe { libc::renameat(at, from.as_ptr(), at, to.as_ptr()) })
    }

    /// The same, but never in the place of anything.
    ///
    /// # Errors
    /// `AlreadyExists`; else the kernel's.
    pub fn rename_new(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> io::Result<()> {
        let (from, to) = (plain(from.as_ref())?, plain(to.as_ref())?);
        let at = self.descriptor.as_raw_fd();
        // SAFETY: a live descriptor and NUL-terminated strings.
        let renamed = check(unsafe {
            libc::renameat2(at, from.as_ptr(), at, to.as_ptr(), libc::RENAME_NOREPLACE)
        });
        match renamed {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                // Not every file system knows this rename; a link replaces nothing
                // either. The old name is still there then.
                // SAFETY: as above.
                check(unsafe { libc::linkat(at, from.as_ptr(), at, to.as_ptr(), 0) })
            }
            done => done,
        }
    }

    /// The names in it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let own = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        std::fs::read_dir(own)?.map(|entry| entry.map(|entry| entry.file_name())).collect()
    }

    /// Has the names in it on the device.
    ///
    /// # Errors
    /// The kernel's.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: a live descriptor.
        check(unsafe { libc::fsync(self.descriptor.as_raw_fd()) })
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

fn check(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Opens a plain file to be read, by a path on which no link is followed that
/// somebody else could have put there.
///
/// # Errors
/// As [`Directory::open`]; `InvalidInput`: it is no plain file.
pub fn open_plain_file(path: &Path) -> io::Result<File> {
    let Walked { here: place, of: metadata, .. } = walk(path)?.whole()?;
    if !metadata.is_file() {
        let text = format!("{} is not a plain file", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    // By way of a descriptor of the very file that was looked at.
    File::open(format!("/proc/self/fd/{}", place.as_raw_fd()))
}

/// How far one came on a path.
struct Walked {
    here: OwnedFd,
    of: std::fs::Metadata,
    /// There is no more of it.
    misses: Option<io::Error>,
    /// Who could have one come somewhere else the next time.
    who: Option<String>,
}

impl Walked {
    fn whole(self) -> io::Result<Self> {
        match self.misses {
            Some(error) => Err(error),
            None => Ok(self),
        }
    }
}

/// Walks to `path`, or to where it is not there any more.
fn walk(path: &Path) -> io::Result<Walked> {
    let mut rest = Vec::new();
    push_components(&mut rest, path)?;
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    let (start, mut name_here) =
        if path.is_absolute() { (c"/", PathBuf::from("/")) } else { (c".", PathBuf::from(".")) };
    let mut here = open_at(None, start, flags, 0)?;
    let mut of = File::from(here.try_clone()?).metadata()?;
    let (mut links, mut who, mut misses) = (0, None, None);
    while let Some(name) = rest.pop() {
        let name_text = CString::new(name.as_bytes())?;
        let (next, found) = match look_at(here.as_fd(), &name_text) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                who = who.or_else(|| who_may_write(&name_here, &of, None));
                misses = Some(error);
                break;
            }
            Err(error) => return Err(error),
        };
        who = who.or_else(|| who_may_write(&name_here, &of, Some(&found)));
        if found.is_symlink() {
            if is_open_to_others(&of) {
                let link = Path::new(&name).display();
                return Err(refused(format!(
                    "{}: {link} is a symbolic link that another user can have put there; name the place itself",
                    path.display()
                )));
            }
            links += 1;
            if links > MOST_LINKS {
                return Err(io::Error::from_raw_os_error(libc::ELOOP));
            }
            let target = PathBuf::from(read_link(next.as_fd())?);
            push_components(&mut rest, &target)?;
            if target.is_absolute() {
                here = open_at(None, c"/", flags, 0)?;
                of = File::from(here.try_clone()?).metadata()?;
                name_here = PathBuf::from("/");
            }
            continue;
        }
        name_here.push(&name);
        here = next;
        of = found;
    }
    Ok(Walked { here, of, misses, who })
}

/// Who but root and this user could put something else in the place of `path`, or
/// make it where it is not there yet: the first directory on the way to it that lets
/// them, and why. None: nobody.
///
/// # Errors
/// As [`Directory::open`].
pub fn who_may_replace(path: &Path) -> io::Result<Option<String>> {
    Ok(walk(path)?.who)
}

/// Who may put something else in the place of `entry` in a directory; no entry: one
/// that this user is going to make.
fn who_may_write(
    directory: &Path,
    of: &std::fs::Metadata,
    entry: Option<&std::fs::Metadata>,
) -> Option<String> {
    if is_strangers(of) {
        return Some(format!("{} belongs to user {}", directory.display(), of.uid()));
    }
    let keeps = of.mode() & STICKY != 0 && !entry.is_some_and(is_strangers);
    let is_open = of.mode() & OTHERS_WRITE != 0 && !keeps;
    is_open.then(|| format!("others may write to {}", directory.display()))
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
