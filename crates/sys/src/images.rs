//! Copies of large files that are mostly holes, such as the disks of guests, and files
//! that change places.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Read and written at once.
const STEP_BYTES: usize = 1 << 20;

/// Has `to`, an empty file, share all content of `from` until one of them is written
/// (`FICLONE`): at once, and without room of its own.
///
/// # Errors
/// The file system cannot, or they are on two; else the kernel's.
pub fn reflink(from: &File, to: &File) -> io::Result<()> {
    // SAFETY: two live descriptors; the call reads and writes no memory of ours.
    match unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has `to`, an empty file, have the content of `from`: by sharing it where the file
/// system can, else by a copy in which holes stay holes.
///
/// # Errors
/// The kernel's; `to` has a part of it then.
pub fn copy_sparse(from: &File, to: &File) -> io::Result<()> {
    if reflink(from, to).is_ok() {
        return Ok(());
    }
    let end = from.metadata()?.len();
    to.set_len(end)?;
    let mut buffer = vec![0_u8; STEP_BYTES];
    let mut at = 0;
    while let Some(data) = next_data(from.as_fd(), at)? {
        let hole = data.end.min(end);
        at = data.start;
        while at < hole {
            let step = buffer.len().min((hole - at) as usize);
            from.read_exact_at(&mut buffer[..step], at)?;
            to.write_all_at(&buffer[..step], at)?;
            at += step as u64;
        }
        if at >= end {
            break;
        }
    }
    Ok(())
}

/// The first range at or behind `at` that is no hole; none: there is none. Moves the file's
/// position.
///
/// # Errors
/// The kernel's: the file system may not tell.
pub(crate) fn next_data(file: BorrowedFd<'_>, at: u64) -> io::Result<Option<Range<u64>>> {
    let seek = |at: u64, whence| {
        let at = libc::off_t::try_from(at).map_err(io::Error::other)?;
        // SAFETY: numbers only; the descriptor lives.
        let found = unsafe { libc::lseek(file.as_raw_fd(), at, whence) };
        u64::try_from(found).map_err(|_| io::Error::last_os_error())
    };
    match seek(at, libc::SEEK_DATA) {
        Ok(start) => Ok(Some(start..seek(start, libc::SEEK_HOLE)?)),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether somebody has locked a part of a file, as every QEMU does with the images that it
/// uses.
///
/// # Errors
/// The kernel's.
pub fn is_locked(file: &File) -> io::Result<bool> {
    // SAFETY: all of it are numbers, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // Against which any lock stands, on whatever part: from the start to the end.
    lock.l_type = libc::F_WRLCK as _;
    lock.l_whence = libc::SEEK_SET as _;
    // SAFETY: a live descriptor, and a structure that the kernel reads and fills.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        0 => Ok(i32::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has two files of one directory change names, at once.
///
/// # Errors
/// The kernel's: both are as they were.
pub fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    let one = CString::new(one.as_os_str().as_bytes())?;
    let other = CString::new(other.as_os_str().as_bytes())?;
    let here = libc::AT_FDCWD;
    // SAFETY: NUL-terminated strings.
    match unsafe {
        libc::renameat2(here, one.as_ptr(), here, other.as_ptr(), libc::RENAME_EXCHANGE)
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::path::PathBuf;

    use super::*;

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("strata-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).expect("a directory");
            Self(path)
        }

        fn file(&self, name: &str) -> (PathBuf, File) {
            let path = self.0.join(name);
            let mut options = File::options();
            let file = options.read(true).write(true).create(true).truncate(true).open(&path);
            (path, file.expect("a file"))
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_copy_has_all_bytes_and_its_holes() {
        const HOLE: u64 = 64 << 20;
        let place = Place::new("sparse");
        let (from_path, from) = place.file("from");
        let piece: Vec<u8> = (0..3_000_001_u32).map(|i| (i * 7 % 251) as u8).collect();
        for at in [0, HOLE, 2 * HOLE + 5] {
            from.write_all_at(&piece, at).expect("written");
        }
        from.set_len(3 * HOLE + 1).expect("longer");
        let (to_path, to) = place.file("to");
        copy_sparse(&from, &to).expect("copied");
        assert!(fs::read(&from_path).expect("read") == fs::read(&to_path).expect("read"));
        assert!(to.metadata().expect("there").blocks() * 512 < HOLE);
        let (_, empty) = place.file("empty");
        let (copy_path, copy) = place.file("copy");
        copy_sparse(&empty, &copy).expect("copied");
        assert_eq!(fs::read(copy_path).expect("read"), b"");
    }

    #[test]
    fn a_lock_of_anybody_is_seen() {
        let place = Place::new("locked");
        let (path, file) = place.file("image");
        assert!(!is_locked(&file).expect("asked"));
        let other = File::open(&path).expect("open");
        // SAFETY: all of it are numbers, for which zero is a value.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        (lock.l_type, lock.l_start, lock.l_len) = (libc::F_RDLCK as _, 100, 1);
        // SAFETY: a live descriptor, and a structure that the kernel reads.
        let locked = unsafe { libc::fcntl(other.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) };
        assert_eq!(locked, 0);
        assert!(is_locked(&file).expect("asked"));
        drop(other);
        assert!(!is_locked(&file).expect("asked"));
    }

    #[test]
    fn files_change_names_or_stay() {
        let place = Place::new("exchange");
        let (one, two) = (place.0.join("one"), place.0.join("two"));
        fs::write(&one, "1").expect("written");
        assert!(exchange(&one, &two).is_err());
        fs::write(&two, "2").expect("written");
        exchange(&one, &two).expect("exchanged");
        assert_eq!(fs::read(&one).expect("read"), b"2");
        assert_eq!(fs::read(&two).expect("read"), b"1");
    }
}
