//! A large sparse memory file (memfd), mapped once, for data that must outlive
//! the process that works on it.
//!
//! It is *not* an allocator and gives no `&[u8]` into the mapping: another
//! thread or another process may write the same bytes at any time, so all
//! access is by copy or through atomics.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use strata_units::PAGE;

use crate::images::next_data;
use crate::words::Words;

/// A memory file of fixed length whose pages cost nothing until they are
/// written, and nothing again after [`SharedMemory::punch`].
///
/// The file has its full length from the start and is sealed against changes
/// of length, so that no access inside `0..len_bytes()` can raise `SIGBUS`
/// (short of the machine running out of memory), whoever else holds the
/// descriptor. The whole range is mapped once: address space is plentiful, and
/// one mapping needs no lookup on the fault path. Offsets outside it panic.
///
/// Bytes that are read while another thread writes them may come from either
/// write, each aligned 8-byte word as a whole; callers that race must detect it
/// (a sequence check, a checksum).
#[derive(Debug)]
pub struct SharedMemory {
    descriptor: OwnedFd,
    words: Words,
}

impl SharedMemory {
    /// Makes a file of `len_bytes` zero bytes (rounded up to pages), none of
    /// which costs memory yet. `name` shows in `/proc/PID/maps`.
    ///
    /// # Errors
    /// What `memfd_create`, `ftruncate`, `fcntl` or `mmap` say: no descriptors
    /// left, or the address-space limit is too low.
    pub fn create(name: &str, len_bytes: u64) -> io::Result<Self> {
        let name = CString::new(name)?;
        // SAFETY: `name` is a NUL-terminated string that outlives the call.
        let raw = unsafe {
            libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raw` is a descriptor that was just made and that nobody else owns.
        let descriptor = unsafe { OwnedFd::from_raw_fd(raw) };
        let len_bytes = len_bytes.max(1).next_multiple_of(PAGE);
        let len = libc::off_t::try_from(len_bytes)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: a system call on our descriptor without pointers.
        if unsafe { libc::ftruncate(descriptor.as_raw_fd(), len) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        // SAFETY: a system call on our descriptor without pointers.
        if unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Self::map(descriptor, len_bytes)
    }

    /// Maps a file that [`SharedMemory::create`] made, perhaps in a process that
    /// is dead by now, with everything that is in it.
    ///
    /// # Errors
    /// `InvalidInput` when the descriptor is not such a file (its length is not
    /// sealed); else what `fcntl`, `fstat` or `mmap` say.
    pub fn from_fd(descriptor: OwnedFd) -> io::Result<Self> {
        // SAFETY: a system call on our descriptor without pointers.
        let seals = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the descriptor is not a memory file of fixed length",
            ));
        }
        let (len_bytes, _) = size_and_allocated(descriptor.as_fd())?;
        if len_bytes == 0 || !len_bytes.is_multiple_of(PAGE) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the memory file's length is not a number of pages",
            ));
        }
        Self::map(descriptor, len_bytes)
    }

    fn map(descriptor: OwnedFd, len_bytes: u64) -> io::Result<Self> {
        let words = Words::map(len_bytes, Some(descriptor.as_fd()))?;
        Ok(Self { descriptor, words })
    }

    /// The descriptor, to be kept where it survives this process.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// The file's length, holes included.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.words.len_bytes()
    }

    /// What the file costs now, page-exact.
    ///
    /// # Errors
    /// What `fstat` says.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        size_and_allocated(self.as_fd()).map(|(_, allocated)| allocated)
    }

    /// The first range at or behind `offset` that somebody has written to, whole pages;
    /// none: there is none.
    ///
    /// # Errors
    /// What `lseek` says.
    pub fn written(&self, offset: u64) -> io::Result<Option<std::ops::Range<u64>>> {
        if offset >= self.len_bytes() {
            return Ok(None);
        }
        next_data(self.as_fd(), offset)
    }

    /// Copies bytes out. Reading a hole may allocate its pages.
    ///
    /// # Panics
    /// When the range leaves the file.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        self.words.read(offset, out);
    }

    /// Copies bytes in. Neighbouring bytes keep their values even when another
    /// thread writes them at the same time.
    ///
    /// # Panics
    /// When the range leaves the file.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.words.write(offset, bytes);
    }

    /// The 8-byte word at `offset`.
    ///
    /// # Panics
    /// When it leaves the file or is not aligned.
    #[must_use]
    #[inline]
    pub fn atomic_u64(&self, offset: u64) -> &AtomicU64 {
        self.words.atomic_u64(offset)
    }

    /// The 4-byte word at `offset`. Threads that race on a word should agree on
    /// its width; the machine keeps single words whole in any case.
    ///
    /// # Panics
    /// When it leaves the file or is not aligned.
    #[must_use]
    #[inline]
    pub fn atomic_u32(&self, offset: u64) -> &AtomicU32 {
        self.words.atomic_u32(offset)
    }

    /// The 2-byte word at `offset`; see [`SharedMemory::atomic_u32`].
    ///
    /// # Panics
    /// When it leaves the file or is not aligned.
    #[must_use]
    #[inline]
    pub fn atomic_u16(&self, offset: u64) -> &AtomicU16 {
        self.words.atomic_u16(offset)
    }

    /// Where `len` bytes at `offset` are mapped, for system calls of this crate
    /// that write there.
    #[inline]
    pub(crate) fn raw_range(&self, offset: u64, len: usize) -> *mut u8 {
        self.words.raw_range(offset, len)
    }

    /// Gives the pages inside the range back to the kernel; it reads zero
    /// afterwards. Parts of pages at either end are only set to zero.
    ///
    /// # Errors
    /// What `fallocate` says.
    ///
    /// # Panics
    /// When the range leaves the file.
    pub fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.words.check(offset, len_bytes);
        punch_hole(self.as_fd(), offset, len_bytes)
    }

    /// Has the range's memory there and mapped before anybody writes to it; what is
    /// in it stays.
    ///
    /// # Errors
    /// What `madvise(MADV_POPULATE_WRITE)` says (Linux 5.14).
    ///
    /// # Panics
    /// When the range leaves the file.
    pub fn populate(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let start = offset / PAGE * PAGE;
        let len = (offset + len_bytes).next_multiple_of(PAGE) - start;
        let at = self.raw_range(start, len as usize);
        // SAFETY: whole pages of our mapping, whose content the advice keeps.
        match unsafe { libc::madvise(at.cast(), len as usize, libc::MADV_POPULATE_WRITE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Makes a hole in a file (`FALLOC_FL_PUNCH_HOLE`), its length kept: the range
/// reads zero and its whole blocks are given back. Nothing for an empty range.
///
/// # Errors
/// What `fallocate` says; `EOPNOTSUPP` where the file system has no holes.
pub fn punch_hole(descriptor: BorrowedFd<'_>, offset: u64, len_bytes: u64) -> io::Result<()> {
    if len_bytes == 0 {
        return Ok(());
    }
    let too_large = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let offset = libc::off_t::try_from(offset).map_err(too_large)?;
    let len = libc::off_t::try_from(len_bytes).map_err(too_large)?;
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    loop {
        // SAFETY: a system call on a borrowed descriptor without pointers.
        if unsafe { libc::fallocate(descriptor.as_raw_fd(), mode, offset, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A file's length and what it occupies.
fn size_and_allocated(descriptor: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `status` is writable memory of the size that the kernel expects.
    if unsafe { libc::fstat(descriptor.as_raw_fd(), status.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fstat succeeded and has filled it in.
    let status = unsafe { status.assume_init() };
    let positive = |value: i64| u64::try_from(value).unwrap_or(0);
    // st_blocks counts 512-byte units whatever the block size.
    Ok((positive(status.st_size), positive(status.st_blocks) * 512))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn memory() -> SharedMemory {
        SharedMemory::create("strata-test", 1 << 30).expect("a memory file")
    }

    #[test]
    fn bytes_come_back_at_every_alignment() {
        let memory = memory();
        let pattern: Vec<u8> = (0..64u8).map(|byte| byte.wrapping_mul(37) ^ 0x5a).collect();
        for offset in 0..9u64 {
            for len in 0..pattern.len() {
                memory.write(4096, &[0xee; 96]);
                memory.write(4096 + 8 + offset, &pattern[..len]);
                let mut all = [0u8; 96];
                memory.read(4096, &mut all);
                let start = 8 + offset as usize;
                assert_eq!(all[start..start + len], pattern[..len], "{offset} {len}");
                assert!(all[..start].iter().all(|&byte| byte == 0xee), "{offset} {len}");
                assert!(all[start + len..].iter().all(|&byte| byte == 0xee), "{offset} {len}");
                let mut part = vec![0u8; len];
                memory.read(4096 + 8 + offset, &mut part);
                assert_eq!(part, pattern[..len]);
            }
        }
    }

    #[test]
    fn what_was_written_is_found() {
        let memory = memory();
        assert_eq!(memory.written(0).expect("lseek"), None);
        memory.write(100 << 20, &[1; 8192]);
        memory.write(200 << 20, &[1]);
        let first = memory.written(5000).expect("lseek").expect("a range");
        // Huge pages make it longer.
        assert!(first.contains(&(100 << 20)) && first.end >= (100 << 20) + 8192, "{first:?}");
        let second = memory.written(first.end).expect("lseek").expect("a range");
        assert!(second.contains(&(200 << 20)), "{second:?}");
        assert_eq!(memory.written(second.end).expect("lseek"), None);
        assert_eq!(memory.written(1 << 30).expect("lseek"), None);
    }

    #[test]
    fn costs_what_is_written_and_punching_gives_it_back() {
        let memory = memory();
        assert_eq!(memory.allocated_bytes().expect("fstat"), 0);
        memory.write(100 << 20, &[1; 8192]);
        assert_eq!(memory.allocated_bytes().expect("fstat"), 8192);
        memory.punch(100 << 20, 4096).expect("punch");
        assert_eq!(memory.allocated_bytes().expect("fstat"), 4096);
        let mut out = [7u8; 8192];
        memory.read(100 << 20, &mut out);
        assert!(out[..4096].iter().all(|&byte| byte == 0));
        assert!(out[4096..].iter().all(|&byte| byte == 1));
    }

    #[test]
    fn what_is_populated_costs_memory_and_keeps_its_content() {
        let memory = memory();
        memory.write(8192, &[9; 10]);
        memory.populate(5000, 4096).expect("Linux 5.14");
        assert_eq!(memory.allocated_bytes().expect("fstat"), 8192);
        let mut out = [1u8; 8192];
        memory.read(4096, &mut out);
        assert!(out[..4096].iter().all(|&byte| byte == 0));
        assert!(out[4096..4106].iter().all(|&byte| byte == 9));
    }

    #[test]
    fn a_second_mapping_sees_the_same_memory() {
        let first = memory();
        first.write(12345, b"survives");
        let copy = first.as_fd().try_clone_to_owned().expect("dup");
        let second = SharedMemory::from_fd(copy).expect("mapped again");
        drop(first);
        let mut out = [0u8; 8];
        second.read(12345, &mut out);
        assert_eq!(&out, b"survives");
        second.atomic_u64(8).store(0x0102_0304_0506_0708, Ordering::Relaxed);
        second.atomic_u32(16).store(9, Ordering::Relaxed);
        second.atomic_u16(20).store(10, Ordering::Relaxed);
        assert_eq!(second.atomic_u64(8).load(Ordering::Relaxed), 0x0102_0304_0506_0708);
        assert_eq!(second.atomic_u64(16).load(Ordering::Relaxed).to_ne_bytes()[0], 9);
        assert_eq!(second.atomic_u64(16).load(Ordering::Relaxed).to_ne_bytes()[4], 10);
    }

    #[test]
    fn other_files_are_refused() {
        let null = std::fs::File::open("/dev/null").expect("open");
        let error = SharedMemory::from_fd(null.into()).expect_err("not a memory file");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn the_length_is_sealed() {
        let memory = memory();
        let file = std::fs::File::from(memory.as_fd().try_clone_to_owned().expect("dup"));
        assert!(file.set_len(4096).is_err());
        assert!(file.set_len(2 << 30).is_err());
    }

    #[test]
    #[should_panic(expected = "outside memory")]
    fn outside_panics() {
        let memory = memory();
        memory.read(memory.len_bytes() - 4, &mut [0; 8]);
    }

    #[test]
    #[should_panic(expected = "unaligned or outside")]
    fn unaligned_words_panic() {
        let _ = memory().atomic_u64(4);
    }
}
