//! A file that is memory, on a device with DAX or in a tmpfs: read and written by
//! mapping, without a copy in the page cache and without the kernel.
//!
//! A bad spot of the device, or a file system that is full, shows as a fault in the
//! middle of the copy (SIGBUS). The copies here are made so that they end there with
//! an error, and the process lives.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Room is taken for so much at once: each time costs a file system's journal an entry. No
/// more than is given back at once: what was given back is not taken along.
const CHUNK_BYTES: u64 = 256 << 10;

/// How a file is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MappingKind {
    /// Only if the mapping is the memory itself: a device's (DAX), or a tmpfs's.
    Memory,
    /// By way of the page cache too: for tests on machines without such a device.
    Any,
}

/// A mapped file.
#[derive(Debug)]
pub struct MappedFile {
    descriptor: OwnedFd,
    base: NonNull<u8>,
    len_bytes: usize,
    on_device: bool,
    /// A bit for each chunk for which room was taken.
    has_room: Box<[AtomicU64]>,
}

// SAFETY: `base` points to a MAP_SHARED mapping that lives as long as the value and
// is never handed out; its bytes are only touched by copies in assembly, which
// assume nothing about who else writes them.
unsafe impl Send for MappedFile {}
// SAFETY: see `Send`; all methods take `&self`.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Maps the first `len_bytes` of a file, which becomes so long (sparse) if it is
    /// shorter.
    ///
    /// # Errors
    /// `Unsupported` where the file is not on a device that is memory, or this
    /// processor's copies are not known here; else what the kernel says. The
    /// descriptor comes back.
    pub fn map(
        descriptor: OwnedFd,
        len_bytes: u64,
        how: MappingKind,
    ) -> Result<Self, (OwnedFd, io::Error)> {
        match Self::try_map(descriptor.as_fd(), len_bytes, how) {
            Ok((base, len_bytes, on_device)) => {
                let chunks = (len_bytes as u64).div_ceil(CHUNK_BYTES).div_ceil(64);
                let has_room = (0..chunks).map(|_| AtomicU64::new(0)).collect();
                Ok(Self { descriptor, base, len_bytes, on_device, has_room })
            }
            Err(error) => Err((descriptor, error)),
        }
    }

    fn try_map(
        descriptor: BorrowedFd<'_>,
        len_bytes: u64,
        how: MappingKind,
    ) -> io::Result<(NonNull<u8>, usize, bool)> {
        guarded::prepare()?;
        let too_large = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let len = usize::try_from(len_bytes).map_err(too_large)?;
        let end = libc::off_t::try_from(len_bytes).map_err(too_large)?;
        let on_device = how == MappingKind::Memory && !is_in_tmpfs(descriptor);
        let flags = match on_device {
            // Refused where the device is not memory.
            true => libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC,
            false => libc::MAP_SHARED,
        };
        // SAFETY: a new mapping at an address of the kernel's choice; it aliases no
        // Rust object.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                descriptor.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Tenants' pages do not belong into a core dump.
        // SAFETY: exactly the mapping just made; the advice changes no contents.
        unsafe { libc::madvise(base, len, libc::MADV_DONTDUMP) };
        let unmap = |error| {
            // SAFETY: exactly the mapping just made, of which nobody knows yet.
            unsafe { libc::munmap(base, len) };
            Err(error)
        };
        // After it is clear that the file is ours to treat so.
        // SAFETY: `status` is writable and of the size that the kernel expects; the
        // calls go to a borrowed descriptor.
        let grown = unsafe {
            let mut status = std::mem::zeroed::<libc::stat>();
            libc::fstat(descriptor.as_raw_fd(), &raw mut status) == 0
                && (status.st_size >= end || libc::ftruncate(descriptor.as_raw_fd(), end) == 0)
        };
        if !grown {
            return unmap(io::Error::last_os_error());
        }
        // SAFETY: the range is exactly the mapping; the advice changes no contents.
        unsafe { libc::madvise(base, len, libc::MADV_DONTDUMP) };
        match NonNull::new(base.cast()) {
            Some(base) => Ok((base, len, on_device)),
            None => unmap(io::Error::other("the kernel mapped a file at address zero")),
        }
    }

    /// Length of the mapping.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes as u64
    }

    /// Whether it is known to be on a device that is memory; else it is in a tmpfs, or
    /// nobody asked.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        self.on_device
    }

    fn at(&self, offset: u64, len: usize) -> io::Result<*mut u8> {
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| end > self.len_bytes as u64) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: `offset` is inside of the mapping.
        Ok(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// `UnexpectedEof` behind the mapping; EIO where the device cannot be read.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let from = self.at(offset, out.len())?;
        // SAFETY: `out` is ours alone; `from` has so many mapped bytes.
        unsafe { guarded::copy(out.as_mut_ptr(), from, out.len()) }
    }

    /// Copies bytes in. The room for them is taken first, so that a full file system
    /// says so. They are not flushed: a machine that stops forgets them.
    ///
    /// # Errors
    /// `UnexpectedEof` behind the mapping; ENOSPC; EIO where the device cannot be
    /// written.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let to = self.at(offset, bytes.len())?;
        self.take_room(offset, bytes.len() as u64)?;
        // SAFETY: `to` has so many mapped bytes; nobody holds a reference to them.
        unsafe { guarded::copy(to, bytes.as_ptr(), bytes.len()) }
    }

    /// Gives a range back; it reads as zeroes.
    ///
    /// # Errors
    /// What the file system says.
    pub fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        // Whoever writes beside the range meanwhile may take room for it, too.
        self.forget_room(offset, len_bytes);
        let punched = crate::punch_hole(self.as_fd(), offset, len_bytes);
        self.forget_room(offset, len_bytes);
        punched
    }

    fn take_room(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        for chunk in chunks(offset, len_bytes) {
            let (word, bit) = self.room_of(chunk);
            if word.load(Ordering::Acquire) & bit != 0 {
                continue;
            }
            let start = chunk * CHUNK_BYTES;
            let end = (start + CHUNK_BYTES).min(self.len_bytes());
            match self.allocate(start, end - start) {
                Ok(()) => word.fetch_or(bit, Ordering::AcqRel),
                // A file system that is nearly full may still have what is needed now.
                Err(_) => return self.allocate(offset, len_bytes),
            };
        }
        Ok(())
    }

    fn allocate(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        // SAFETY: a system call on our descriptor without pointers. Offsets in the
        // mapping fit: its length did.
        let code = unsafe {
            libc::fallocate(
                self.descriptor.as_raw_fd(),
                0,
                offset as libc::off_t,
                len_bytes as libc::off_t,
            )
        };
        if code == 0 {
            return Ok(());
        }
        match io::Error::last_os_error() {
            // A file system that does not know how takes room as it is written.
            error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            error => Err(error),
        }
    }

    fn forget_room(&self, offset: u64, len_bytes: u64) {
        for chunk in chunks(offset, len_bytes) {
            let (word, bit) = self.room_of(chunk);
            word.fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// Where it stands whether there is room for a chunk in the mapping.
    fn room_of(&self, chunk: u64) -> (&AtomicU64, u64) {
        (&self.has_room[(chunk / 64) as usize], 1 << (chunk % 64))
    }
}

/// The chunks that a range touches.
fn chunks(offset: u64, len_bytes: u64) -> std::ops::Range<u64> {
    offset / CHUNK_BYTES..(offset + len_bytes).div_ceil(CHUNK_BYTES)
}

fn is_in_tmpfs(file: BorrowedFd<'_>) -> bool {
    let mut status = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the kernel fills `status`, which is of the size that it expects; all
    // zeroes are a value of it, too.
    unsafe {
        libc::fstatfs(file.as_raw_fd(), status.as_mut_ptr()) == 0
            && status.assume_init().f_type == libc::TMPFS_MAGIC
    }
}

impl AsFd for MappedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`; no reference into it exists.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}

#[cfg(target_arch = "x86_64")]
mod guarded {
    //! One instruction that copies, and a signal handler that knows it.

    use std::io;
    use std::mem::MaybeUninit;
    use std::sync::{Mutex, OnceLock, PoisonError};

    // In the C calling convention: to rdi, from rsi, rdx bytes; returns how many
    // were not copied.
    std::arch::global_asm!(
        ".pushsection .text.strata_guarded_copy,\"ax\",@progbits",
        ".globl strata_guarded_copy",
        ".globl strata_guarded_copy_from",
        ".globl strata_guarded_copy_end",
        "strata_guarded_copy:",
        "mov rcx, rdx",
        "strata_guarded_copy_from:",
        "rep movsb",
        "strata_guarded_copy_end:",
        "mov rax, rcx",
        "ret",
        ".popsection",
    );

    unsafe extern "C" {
        fn strata_guarded_copy(to: *mut u8, from: *const u8, len: usize) -> usize;
        static strata_guarded_copy_from: u8;
        static strata_guarded_copy_end: u8;
    }

    /// What was done about SIGBUS before.
    struct Before(libc::sigaction);
    // SAFETY: plain data, read only.
    unsafe impl Send for Before {}
    // SAFETY: plain data, read only.
    unsafe impl Sync for Before {}
    static BEFORE: OnceLock<Before> = OnceLock::new();

    extern "C" fn on_bus_error(
        _signal: libc::c_int,
        _info: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        // SAFETY: with SA_SIGINFO the kernel passes the interrupted thread's context,
        // which this handler may change. The statics are addresses of labels.
        unsafe {
            let context = context.cast::<libc::ucontext_t>();
            let at = &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize];
            if *at == (&raw const strata_guarded_copy_from) as i64 {
                *at = (&raw const strata_guarded_copy_end) as i64;
            } else {
                // Somebody else's: as if this had never been here. The instruction
                // faults again.
                let before = BEFORE.get().map_or(std::ptr::null(), |before| &raw const before.0);
                if before.is_null() {
                    libc::signal(libc::SIGBUS, libc::SIG_DFL);
                } else {
                    libc::sigaction(libc::SIGBUS, before, std::ptr::null_mut());
                }
            }
        }
    }

    /// Before the first copy.
    pub(super) fn prepare() -> io::Result<()> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if BEFORE.get().is_some() {
            return Ok(());
        }
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: both point to sigactions of the C library's layout; the handler
        // only uses what may be used in one.
        let code = unsafe {
            libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr());
            let _ = BEFORE.set(Before(before.assume_init()));
            let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
        };
        if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Copies, or ends with EIO where the memory does not answer.
    ///
    /// # Safety
    /// Both have `len` mapped bytes, which do not overlap; no reference to those at
    /// `to` is in use.
    pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> io::Result<()> {
        // SAFETY: the caller's promise; the direction flag is clear, as everywhere.
        match unsafe { strata_guarded_copy(to, from, len) } {
            0 => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::EIO)),
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod guarded {
    use std::io;

    pub(super) fn prepare() -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// # Safety
    /// Never called: nothing is mapped.
    pub(super) unsafe fn copy(_to: *mut u8, _from: *const u8, _len: usize) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn file() -> File {
        let path = std::env::temp_dir().join(format!(
            "strata-mapped-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        std::fs::remove_file(&path).expect("ours");
        file.expect("a file in the temporary directory")
    }

    fn mapped(len_bytes: u64) -> Option<(MappedFile, File)> {
        let file = file();
        let copy = file.try_clone().expect("a copy");
        match MappedFile::map(copy.into(), len_bytes, MappingKind::Any) {
            Ok(mapped) => Some((mapped, file)),
            Err((_, error)) if error.kind() == io::ErrorKind::Unsupported => None,
            Err((_, error)) => panic!("{error}"),
        }
    }

    #[test]
    fn what_is_written_is_in_the_file() {
        let Some((mapped, file)) = mapped(1 << 20) else { return };
        let text: Vec<u8> = (0..9000u32).map(|n| n as u8).collect();
        mapped.write(4096 + 7, &text).expect("room");
        let mut out = vec![0; text.len()];
        mapped.read(4096 + 7, &mut out).expect("readable");
        assert_eq!(out, text);
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut out, 4096 + 7).expect("there");
        assert_eq!(out, text);
        let behind = mapped.read((1 << 20) - 10, &mut out).expect_err("behind the end");
        assert_eq!(behind.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn memory_that_does_not_answer_is_an_error() {
        let Some((mapped, file)) = mapped(2 * CHUNK_BYTES) else { return };
        mapped.write(0, &[5; 8192]).expect("room");
        // The end of the file: what is mapped behind it raises SIGBUS.
        file.set_len(8192).expect("shorter");
        let mut out = [0; 8192];
        for _ in 0..3 {
            let error = mapped.read(4096, &mut out).expect_err("half of it is gone");
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
            assert!(out[..4096].iter().all(|&byte| byte == 5));
        }
        mapped.read(0, &mut out).expect("the rest is there");
        // A write makes the file longer again.
        mapped.write(CHUNK_BYTES + 40_960, &[6; 100]).expect("room");
    }

    #[test]
    fn room_is_taken_in_chunks_and_again_for_what_was_given_back() {
        let Some((mapped, file)) = mapped(2 * CHUNK_BYTES) else { return };
        let blocks = || {
            use std::os::unix::fs::MetadataExt;
            file.metadata().expect("fstat").blocks() * 512
        };
        mapped.write(4096, &[7; 4096]).expect("room");
        assert!(blocks() >= CHUNK_BYTES);
        mapped.punch(0, CHUNK_BYTES).expect("given back");
        assert_eq!(blocks(), 0);
        let mut out = [1; 8192];
        mapped.read(0, &mut out).expect("readable");
        assert_eq!(out, [0; 8192]);
        mapped.write(CHUNK_BYTES - 4096, &[8; 8192]).expect("room on both sides");
        assert!(blocks() >= 2 * CHUNK_BYTES);
        mapped.read(CHUNK_BYTES - 4096, &mut out).expect("readable");
        assert_eq!(out, [8; 8192]);
    }

    #[test]
    fn a_file_on_a_disk_is_not_memory() {
        let refused = MappedFile::map(file().into(), 1 << 20, MappingKind::Memory);
        // In a temporary directory that is memory it is.
        if let Err((descriptor, _)) = refused {
            let file = File::from(descriptor);
            assert_eq!(file.metadata().expect("fstat").len(), 0, "left as it was");
        }
    }

    #[test]
    fn a_file_in_a_tmpfs_is_memory() {
        let memory = crate::SharedMemory::create("mapped-test", 1 << 20).expect("a memory file");
        let copy = memory.as_fd().try_clone_to_owned().expect("a copy");
        match MappedFile::map(copy, 1 << 20, MappingKind::Memory) {
            Ok(mapped) => {
                assert!(!mapped.is_on_device());
                mapped.write(8192, b"there").expect("room");
                let mut out = [0; 5];
                mapped.read(8192, &mut out).expect("readable");
                assert_eq!(&out, b"there");
            }
            Err((_, error)) => assert_eq!(error.kind(), io::ErrorKind::Unsupported),
        }
    }
}
