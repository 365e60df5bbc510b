//! What a tier of the store is made of: bytes at offsets, in memory or in a
//! file, or either of them with faults injected.
//!
//! No bookkeeping here: who owns which bytes is decided above.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use strata_sys::{MappedFile, MappingKind, SharedMemory};

/// Bytes at offsets. The store keeps the tier file's accesses aligned to 4 KiB
/// in memory, offset and length, as `O_DIRECT` wants them; the DRAM tier's are
/// multiples of 64 in their offset only.
///
/// Reads of bytes that are being written may return any mixture; the store
/// notices. A failed write may have written anything inside its range.
pub trait Backing: Send + Sync + fmt::Debug {
    /// Fills `out` from `offset`, or fails.
    ///
    /// # Errors
    /// What the device says; `UnexpectedEof` behind its end.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`, or fails.
    ///
    /// # Errors
    /// What the device says.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Gives the range back; nobody will read it before writing it.
    ///
    /// # Errors
    /// What the device says; the store then keeps the range for itself.
    fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()>;

    /// Offsets from here on are not used.
    fn capacity_bytes(&self) -> u64;

    /// What must survive the worker for the bytes to survive it; none: they do not.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// What it costs, where that is not what is written and not punched.
    fn held_bytes(&self) -> Option<u64> {
        None
    }

    /// How [`Backing::read_at`] waits.
    fn waiting(&self) -> Waiting;

    /// It is mapped from a device that is memory.
    fn is_dax(&self) -> bool {
        false
    }
}

/// Whether whoever reads a backing has to wait for a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waiting {
    /// No: it is memory.
    Never,
    /// Yes, and reading [`Backing::descriptor`] at the same offsets is the same.
    OnDescriptor,
    /// Yes, inside of [`Backing::read_at`].
    InCall,
}

/// DRAM: a shared memory file.
#[derive(Debug)]
pub struct MemoryBacking(SharedMemory);

impl MemoryBacking {
    /// A new one that can grow to `capacity_bytes`.
    ///
    /// # Errors
    /// See [`SharedMemory::create`].
    pub fn create(name: &str, capacity_bytes: u64) -> io::Result<Self> {
        SharedMemory::create(name, capacity_bytes).map(Self)
    }

    /// A dead worker's.
    ///
    /// # Errors
    /// See [`SharedMemory::from_fd`].
    pub fn attach(descriptor: OwnedFd) -> io::Result<Self> {
        SharedMemory::from_fd(descriptor).map(Self)
    }
}

impl Backing for MemoryBacking {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write(offset, bytes);
        Ok(())
    }

    fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.0.punch(offset, len_bytes)
    }

    fn capacity_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn waiting(&self) -> Waiting {
        Waiting::Never
    }
}

/// A file on a disk.
///
/// It is memory that happens to lie on a device, not data to be kept: it is
/// unlinked as soon as it is open, so that its space and the tenant's secrets
/// are gone with the last descriptor, and no two stores ever share one.
#[derive(Debug)]
pub struct FileBacking {
    file: File,
    capacity_bytes: u64,
}

impl FileBacking {
    /// Makes a nameless file where `path` says, mode 0600, past the page cache
    /// where the file system allows it.
    ///
    /// # Errors
    /// When `path` exists, or its directory is missing or not writable.
    pub fn create(path: &Path, capacity_bytes: u64) -> io::Result<Self> {
        let open = |flags| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | flags)
                .open(path)
        };
        let file = match open(libc::O_DIRECT) {
            // Where O_DIRECT is refused the file has been made all the same.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                match std::fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => open(0)?,
                }
            }
            other => other?,
        };
        std::fs::remove_file(path)?;
        Ok(Self { file, capacity_bytes })
    }

    /// A dead worker's.
    #[must_use]
    pub fn attach(descriptor: OwnedFd, capacity_bytes: u64) -> Self {
        Self { file: File::from(descriptor), capacity_bytes }
    }
}

impl Backing for FileBacking {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        strata_sys::punch_hole(self.file.as_fd(), offset, len_bytes)
    }

    fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }

    fn waiting(&self) -> Waiting {
        Waiting::OnDescriptor
    }
}

/// A file that is memory (PMEM with a DAX file system, or a tmpfs, of a memory node
/// without processors perhaps): a mapping.
///
/// As nameless as [`FileBacking`], so nothing in it has to survive the machine, and
/// nothing is flushed: what a dead worker wrote is in the processor's caches or on
/// the device, and its successor sees it either way.
#[derive(Debug)]
pub struct MappedBacking(MappedFile);

impl MappedBacking {
    /// Maps a new file or a dead worker's, if it can be; else the file comes back.
    ///
    /// # Errors
    /// The file, where it is on a disk.
    pub fn of(file: FileBacking, how: MappingKind) -> Result<Self, FileBacking> {
        let FileBacking { file, capacity_bytes } = file;
        MappedFile::map(file.into(), capacity_bytes, how)
            .map(Self)
            .map_err(|(descriptor, _)| FileBacking::attach(descriptor, capacity_bytes))
    }
}

impl Backing for MappedBacking {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write(offset, bytes)
    }

    fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.0.punch(offset, len_bytes)
    }

    fn capacity_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn waiting(&self) -> Waiting {
        Waiting::Never
    }

    fn is_dax(&self) -> bool {
        self.0.is_on_device()
    }
}

/// A file as what it can be: a mapping where it is memory.
pub(crate) fn best(file: FileBacking) -> Box<dyn Backing> {
    match MappedBacking::of(file, MappingKind::Memory) {
        Ok(mapped) => Box::new(mapped),
        Err(file) => Box::new(file),
    }
}

/// Which faults a [`Faulty`] backing injects: each value is "every n-th such
/// operation", 0 for never. May be changed while in use.
#[derive(Debug, Default)]
pub struct Faults {
    /// Reads fail with EIO.
    pub read_error: AtomicU64,
    /// Reads stop half way (`UnexpectedEof`).
    pub short_read: AtomicU64,
    /// Reads succeed with a bit of every byte wrong.
    pub flipped_bit: AtomicU64,
    /// Writes write half and fail with EIO.
    pub write_error: AtomicU64,
    /// Writes write half and fail with ENOSPC.
    pub no_space: AtomicU64,
    /// While it is set (not a number of operations), reads do not end.
    pub hold_reads: AtomicBool,
    operations: AtomicU64,
}

/// Another backing, with faults.
#[derive(Debug)]
pub struct Faulty {
    inner: Box<dyn Backing>,
    faults: Arc<Faults>,
}

impl Faulty {
    /// `inner`, to be disturbed as `faults` says.
    #[must_use]
    pub fn new(inner: Box<dyn Backing>, faults: Arc<Faults>) -> Self {
        Self { inner, faults }
    }

    fn strikes(&self, every: &AtomicU64) -> bool {
        let every = every.load(Ordering::Relaxed);
        every != 0 && self.faults.operations.fetch_add(1, Ordering::Relaxed).is_multiple_of(every)
    }
}

impl Backing for Faulty {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        while self.faults.hold_reads.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.strikes(&self.faults.read_error) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if self.strikes(&self.faults.short_read) {
            let half = out.len() / 2;
            self.inner.read_at(offset, &mut out[..half])?;
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.inner.read_at(offset, out)?;
        if self.strikes(&self.faults.flipped_bit) {
            // Every byte of the range, or the fault may miss the object in it.
            for byte in out {
                *byte ^= 0x10;
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        for (every, errno) in
            [(&self.faults.write_error, libc::EIO), (&self.faults.no_space, libc::ENOSPC)]
        {
            if self.strikes(every) {
                self.inner.write_at(offset, &bytes[..bytes.len() / 2])?;
                return Err(io::Error::from_raw_os_error(errno));
            }
        }
        self.inner.write_at(offset, bytes)
    }

    fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.inner.punch(offset, len_bytes)
    }

    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn waiting(&self) -> Waiting {
        // Past this, nothing would be injected.
        Waiting::InCall
    }
}
