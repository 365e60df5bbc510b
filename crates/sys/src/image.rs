//! Disk images: files or block devices, read and written past the page cache where that
//! can be, with the locks by which QEMU keeps others off its images.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use strata_units::{PAGE_SIZE, PageBuffer};

use crate::images::next_data;

/// The bytes that QEMU locks in an image: from here on one each for what it does...
const LOCK_DOES: i64 = 100;
/// ...and from here on for what others must not.
const LOCK_DENIES: i64 = 200;
/// Which byte of those is reading, writing, and changing the size.
const READS: i64 = 0;
const WRITES: i64 = 1;
const RESIZES: i64 = 3;

/// When a file was last changed, and which it is: as long as nothing of this differs, it
/// has the same content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileStamp {
    /// Its device, and its number there.
    pub file: (u64, u64),
    /// Its size.
    pub size_bytes: u64,
    /// Of its content, in nanoseconds since 1970.
    pub changed_ns: i128,
    /// Of its content or of what is known of it: nobody can set this back.
    pub touched_ns: i128,
}

/// Whether a range of an image has room on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allocation {
    /// It is a hole, which reads as zero.
    pub hole: bool,
    /// Where that ends.
    pub end: u64,
}

/// An open image.
#[derive(Debug)]
pub struct ImageFile {
    /// For whole pages; past the page cache.
    direct: File,
    /// For the last bytes of an image that does not end with a page.
    plain: File,
    is_direct: bool,
    is_device: bool,
    size_bytes: u64,
}

/// The bytes of pages that follow each other.
#[must_use]
pub fn page_bytes(pages: &[PageBuffer]) -> &[u8] {
    const { assert!(size_of::<PageBuffer>() == PAGE_SIZE) };
    // SAFETY: a PageBuffer is PAGE_SIZE bytes and nothing else (asserted, repr(C)).
    unsafe { std::slice::from_raw_parts(pages.as_ptr().cast(), size_of_val(pages)) }
}

/// The same, to be written.
#[must_use]
pub fn page_bytes_mut(pages: &mut [PageBuffer]) -> &mut [u8] {
    // SAFETY: as above; the borrow is passed on whole.
    unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), size_of_val(pages)) }
}

impl ImageFile {
    /// Opens one with the rights of this process, and locks it.
    ///
    /// # Errors
    /// It cannot be opened, is no image, or somebody has it who does not go with this.
    pub fn open(path: &Path, writable: bool) -> io::Result<Self> {
        let open = |flags: i32| {
            // Who opens a pipe waits for nobody.
            let flags = flags | libc::O_NONBLOCK;
            OpenOptions::new().read(true).write(writable).custom_flags(flags).open(path)
        };
        let plain = open(0)?;
        let kind = plain.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::other("it is neither a file nor a block device"));
        }
        lock_image(&plain, writable)?;
        let (direct, is_direct) = match open(libc::O_DIRECT) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (open(0)?, false),
            other => (other?, true),
        };
        // By the path it may be another file meanwhile.
        let same =
            |file: &File| file.metadata().map(|known| (known.dev(), known.ino(), known.rdev()));
        if same(&direct)? != same(&plain)? {
            return Err(io::Error::other("it was replaced while it was opened"));
        }
        let size_bytes = (&plain).seek(SeekFrom::End(0))?;
        Ok(Self { direct, plain, is_direct, is_device: kind.is_block_device(), size_bytes })
    }

    /// Its size when it was opened.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether the page cache is passed by. (Not every file system can.)
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// What its content is known by; none: a device, which does not tell.
    ///
    /// # Errors
    /// What `fstat` says.
    pub fn stamp(&self) -> io::Result<Option<FileStamp>> {
        if self.is_device {
            return Ok(None);
        }
        let known = self.plain.metadata()?;
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Ok(Some(FileStamp {
            file: (known.dev(), known.ino()),
            size_bytes: known.size(),
            changed_ns: ns(known.mtime(), known.mtime_nsec()),
            touched_ns: ns(known.ctime(), known.ctime_nsec()),
        }))
    }

    /// Where whole pages end.
    fn whole(&self) -> u64 {
        self.size_bytes - self.size_bytes % PAGE_SIZE as u64
    }

    /// How many bytes of pages from `offset` on are whole pages of the image, and how many
    /// of the last one there are beyond them.
    fn parts(&self, offset: u64, len: usize) -> io::Result<(usize, usize)> {
        let len = len as u64;
        let end = offset.checked_add(len).filter(|end| *end < self.size_bytes + PAGE_SIZE as u64);
        let end =
            end.filter(|_| offset.is_multiple_of(PAGE_SIZE as u64) && offset < self.size_bytes);
        let end = end.ok_or(io::ErrorKind::InvalidInput)?;
        let whole = end.min(self.whole()) - offset.min(self.whole());
        let rest = end.min(self.size_bytes) - offset - whole;
        Ok((whole as usize, rest as usize))
    }

    /// Reads pages from `offset` on, a multiple of their size; what is beyond the image's
    /// end is zero.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read_pages(&self, offset: u64, pages: &mut [PageBuffer]) -> io::Result<()> {
        let bytes = page_bytes_mut(pages);
        let (whole, rest) = self.parts(offset, bytes.len())?;
        self.direct.read_exact_at(&mut bytes[..whole], offset)?;
        self.plain.read_exact_at(&mut bytes[whole..whole + rest], offset + whole as u64)?;
        bytes[whole + rest..].fill(0);
        Ok(())
    }

    /// Writes pages from `offset` on, a multiple of their size; what is beyond the image's
    /// end is left out.
    ///
    /// # Errors
    /// The kernel's: any part may have been written.
    pub fn write_pages(&self, offset: u64, pages: &[PageBuffer]) -> io::Result<()> {
        let bytes = page_bytes(pages);
        let (whole, rest) = self.parts(offset, bytes.len())?;
        self.direct.write_all_at(&bytes[..whole], offset)?;
        self.plain.write_all_at(&bytes[whole..whole + rest], offset + whole as u64)
    }

    /// Has all that was written be on disk.
    ///
    /// # Errors
    /// The kernel's.
    pub fn sync(&self) -> io::Result<()> {
        self.plain.sync_data()
    }

    /// Has whole pages be zero, and, unless they are to keep it, have no room on disk.
    /// False: this file system cannot.
    ///
    /// # Errors
    /// The kernel's.
    pub fn zero_pages(&self, offset: u64, bytes: u64, keep_room: bool) -> io::Result<bool> {
        let whole = |number: u64| number.is_multiple_of(PAGE_SIZE as u64);
        let end = offset.checked_add(bytes).filter(|end| *end <= self.whole());
        if !whole(offset) || !whole(bytes) || end.is_none() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let how = if keep_room { libc::FALLOC_FL_ZERO_RANGE } else { libc::FALLOC_FL_PUNCH_HOLE };
        let mode = how | libc::FALLOC_FL_KEEP_SIZE;
        let fd = self.direct.as_raw_fd();
        loop {
            // SAFETY: numbers only; the descriptor is open.
            let code = unsafe { libc::fallocate(fd, mode, offset as i64, bytes as i64) };
            if code == 0 {
                return Ok(true);
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EOPNOTSUPP | libc::ENODEV | libc::EINVAL) => return Ok(false),
                _ => return Err(error),
            }
        }
    }

    /// What is at `offset`, inside of the image. Where the file system does not tell it is
    /// no hole.
    #[must_use]
    pub fn allocation(&self, offset: u64) -> Allocation {
        match next_data(self.plain.as_fd(), offset) {
            Ok(Some(data)) if data.start > offset => {
                Allocation { hole: true, end: data.start.min(self.size_bytes) }
            }
            Ok(Some(data)) if data.end > offset => {
                Allocation { hole: false, end: data.end.min(self.size_bytes) }
            }
            // There is no data behind it.
            Ok(None) => Allocation { hole: true, end: self.size_bytes },
            Ok(Some(_)) | Err(_) => Allocation { hole: false, end: self.size_bytes },
        }
    }
}

/// Locks as QEMU does (`file.locking`): what this does, and what others must not.
fn lock_image(file: &File, writable: bool) -> io::Result<()> {
    let fd = file.as_raw_fd();
    let mut own = vec![LOCK_DOES + READS, LOCK_DENIES + WRITES, LOCK_DENIES + RESIZES];
    if writable {
        own.push(LOCK_DOES + WRITES);
    }
    for byte in own {
        match lock_byte(fd, libc::F_OFD_SETLK, libc::F_RDLCK, byte) {
            Ok(_) => {}
            // A file system without locks: QEMU goes without, too.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP)
                ) =>
            {
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
    let mut others = vec![LOCK_DOES + WRITES, LOCK_DOES + RESIZES, LOCK_DENIES + READS];
    if writable {
        others.push(LOCK_DENIES + WRITES);
    }
    for byte in others {
        if lock_byte(fd, libc::F_OFD_GETLK, libc::F_WRLCK, byte)? {
            let why =
                if writable { "somebody else has it open" } else { "somebody else writes to it" };
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
        }
    }
    Ok(())
}

/// Locks a byte, or asks whether somebody else's lock were in the way.
fn lock_byte(fd: RawFd, command: libc::c_int, kind: libc::c_int, byte: i64) -> io::Result<bool> {
    // SAFETY: flock is plain data, all zeroes is valid (l_pid must be).
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = byte;
    lock.l_len = 1;
    // SAFETY: a live flock of the kernel's layout.
    if unsafe { libc::fcntl(fd, command, &raw mut lock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str, len: u64) -> std::path::PathBuf {
        let directory = std::env::current_dir().expect("a directory");
        let path = directory.join(format!(".image-{name}-{}", std::process::id()));
        File::create(&path).and_then(|file| file.set_len(len)).expect("a file");
        path
    }

    fn pages(value: u8, count: usize) -> Vec<PageBuffer> {
        vec![PageBuffer([value; PAGE_SIZE]); count]
    }

    #[test]
    fn pages_and_the_bytes_behind_them_are_read_and_written() {
        let path = image("pages", 5 * 4096 + 777);
        let file = ImageFile::open(&path, true).expect("an image");
        file.write_pages(4096, &pages(7, 2)).expect("written");
        file.write_pages(4 * 4096, &pages(9, 2)).expect("written");
        file.sync().expect("on disk");
        assert_eq!(std::fs::metadata(&path).expect("a file").len(), 5 * 4096 + 777);
        let mut read = pages(1, 6);
        file.read_pages(0, &mut read).expect("read");
        let expected = [0, 7, 7, 0, 9, 9].map(|value| pages(value, 1).remove(0).0);
        for (page, expected) in read.iter().zip(expected).take(5) {
            assert_eq!(page.0, expected);
        }
        assert!(read[5].0[..777].iter().all(|byte| *byte == 9));
        assert!(read[5].0[777..].iter().all(|byte| *byte == 0));
        for (offset, count) in [(1, 1), (4096, 6), (6 * 4096, 1), (u64::MAX - 4095, 1)] {
            assert!(file.read_pages(offset, &mut pages(0, count)).is_err(), "{offset}");
            assert!(file.write_pages(offset, &pages(0, count)).is_err(), "{offset}");
        }
        if file.zero_pages(4096, 4096, false).expect("zeroed") {
            assert_eq!(file.allocation(4096), Allocation { hole: true, end: 2 * 4096 });
            assert_eq!(file.allocation(2 * 4096), Allocation { hole: false, end: 3 * 4096 });
            file.read_pages(4096, &mut read[..1]).expect("read");
            assert_eq!(read[0].0, [0; PAGE_SIZE]);
        }
        assert!(file.zero_pages(5 * 4096, 4096, false).is_err(), "beyond whole pages");
        std::fs::remove_file(&path).expect("removed");
    }

    #[test]
    fn who_writes_is_alone() {
        let path = image("lock", 4096);
        let busy = |writable| {
            let error = ImageFile::open(&path, writable).expect_err("it is open");
            assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
        };
        let writes = ImageFile::open(&path, true).expect("an image");
        busy(true);
        busy(false);
        drop(writes);
        let reads = [ImageFile::open(&path, false), ImageFile::open(&path, false)];
        assert!(reads.iter().all(Result::is_ok));
        busy(true);
        drop(reads);
        assert!(ImageFile::open(&path, true).is_ok());
        std::fs::remove_file(&path).expect("removed");
    }

    #[test]
    fn a_change_changes_the_stamp_and_what_is_no_file_is_no_image() {
        let path = image("stamp", 4096);
        let file = ImageFile::open(&path, true).expect("an image");
        let before = file.stamp().expect("a stamp").expect("a file's");
        std::thread::sleep(std::time::Duration::from_millis(20));
        file.write_pages(0, &pages(3, 1)).expect("written");
        assert_ne!(file.stamp().expect("a stamp"), Some(before));
        std::fs::remove_file(&path).expect("removed");
        assert!(ImageFile::open(Path::new("/dev/zero"), false).is_err());
    }
}
