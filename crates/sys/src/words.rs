//! A mapping of memory that other threads or processes may write at any time: all
//! access is by copy or through atomics, and there is no `&[u8]` into it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// See the module's text. Unmapped when it is dropped. Offsets outside of it panic.
///
/// Bytes that are read while another thread writes them may come from either
/// write, each aligned 8-byte word as a whole.
#[derive(Debug)]
pub(crate) struct Words {
    base: NonNull<u8>,
    len_bytes: u64,
}

// SAFETY: `base` points to a mapping that lives as long as the value and is never
// handed out as a reference to plain bytes; every access through it is atomic, so it
// may happen on any thread.
unsafe impl Send for Words {}
// SAFETY: see `Send`; all methods take `&self` and touch the mapping with
// atomic operations only.
unsafe impl Sync for Words {}

impl Words {
    /// Maps `len_bytes`, whole pages, of a file that keeps its length, or of nothing:
    /// memory of this process alone.
    pub(crate) fn map(len_bytes: u64, file: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let len =
            usize::try_from(len_bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let (kind, descriptor) = match file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        // SAFETY: a new mapping at an address of the kernel's choice; it aliases
        // no Rust object. The length is that of the file, which keeps it.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                kind | libc::MAP_NORESERVE,
                descriptor,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("the kernel mapped memory at address zero"))?;
        let words = Self { base, len_bytes };
        // A tenant's pages do not belong into the daemon's core dump.
        words.advise(0, len_bytes, libc::MADV_DONTDUMP)?;
        Ok(words)
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Where it begins.
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// `madvise` of a range of whole pages.
    pub(crate) fn advise(&self, offset: u64, len_bytes: u64, advice: i32) -> io::Result<()> {
        let at = self.raw_range(offset, len_bytes as usize);
        // SAFETY: pages of our mapping, which nobody has a reference to plain bytes of.
        match unsafe { libc::madvise(at.cast(), len_bytes as usize, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Copies bytes out. Reading a hole may allocate its pages.
    ///
    /// # Panics
    /// When the range leaves it.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) {
        self.check(offset, out.len() as u64);
        let shift = offset as usize % WORD;
        let mut at = offset - shift as u64;
        let mut out = out;
        if shift != 0 {
            let bytes = self.word(at).load(Ordering::Relaxed).to_ne_bytes();
            let count = out.len().min(WORD - shift);
            let (head, rest) = out.split_at_mut(count);
            head.copy_from_slice(&bytes[shift..shift + count]);
            out = rest;
            at += WORD as u64;
        }
        let mut words = out.chunks_exact_mut(WORD);
        for chunk in &mut words {
            chunk.copy_from_slice(&self.word(at).load(Ordering::Relaxed).to_ne_bytes());
            at += WORD as u64;
        }
        let tail = words.into_remainder();
        if !tail.is_empty() {
            let bytes = self.word(at).load(Ordering::Relaxed).to_ne_bytes();
            tail.copy_from_slice(&bytes[..tail.len()]);
        }
    }

    /// Copies bytes in. Neighbouring bytes keep their values even when another
    /// thread writes them at the same time.
    ///
    /// # Panics
    /// When the range leaves it.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        self.check(offset, bytes.len() as u64);
        let shift = offset as usize % WORD;
        let mut at = offset - shift as u64;
        let mut bytes = bytes;
        if shift != 0 {
            let (head, rest) = bytes.split_at(bytes.len().min(WORD - shift));
            self.merge(at, shift, head);
            bytes = rest;
            at += WORD as u64;
        }
        let mut words = bytes.chunks_exact(WORD);
        for chunk in &mut words {
            let word = u64::from_ne_bytes(chunk.try_into().expect("chunks of a word's length"));
            self.word(at).store(word, Ordering::Relaxed);
            at += WORD as u64;
        }
        if !words.remainder().is_empty() {
            self.merge(at, 0, words.remainder());
        }
    }

    /// Replaces a part of the word at `at`.
    fn merge(&self, at: u64, shift: usize, part: &[u8]) {
        let word = self.word(at);
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            let mut bytes = seen.to_ne_bytes();
            bytes[shift..shift + part.len()].copy_from_slice(part);
            let new = u64::from_ne_bytes(bytes);
            match word.compare_exchange_weak(seen, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// The aligned word at `at`, which the caller has checked.
    fn word(&self, at: u64) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(WORD as u64) && at < self.len_bytes);
        // SAFETY: `at` is a multiple of 8 below `len_bytes`, itself a multiple of
        // 4096: every caller checked its byte range with `check` and rounds down
        // to the word that holds a byte of it. So the word lies inside the
        // mapping, which is page-aligned, readable and writable, does not shrink
        // (see `map`), and lives as long as `self`, whose lifetime the reference
        // takes. The memory is only ever accessed atomically.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at as usize).cast()) }
    }

    /// The 8-byte word at `offset`.
    ///
    /// # Panics
    /// When it leaves it or is not aligned.
    #[inline]
    pub(crate) fn atomic_u64(&self, offset: u64) -> &AtomicU64 {
        self.check_aligned(offset, 8);
        // SAFETY: `check_aligned` has shown the word to be inside the mapping and
        // aligned; for the rest see `word`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset as usize).cast()) }
    }

    /// The 4-byte word at `offset`. Threads that race on a word should agree on
    /// its width; the machine keeps single words whole in any case.
    ///
    /// # Panics
    /// When it leaves it or is not aligned.
    #[inline]
    pub(crate) fn atomic_u32(&self, offset: u64) -> &AtomicU32 {
        self.check_aligned(offset, 4);
        // SAFETY: as in `atomic_u64`. An access of another width to the same
        // bytes is atomic too; all processors that Linux supports with 64-bit
        // atomics define such mixtures (each access sees whole single writes).
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset as usize).cast()) }
    }

    /// The 2-byte word at `offset`; see [`Words::atomic_u32`].
    ///
    /// # Panics
    /// When it leaves it or is not aligned.
    #[inline]
    pub(crate) fn atomic_u16(&self, offset: u64) -> &AtomicU16 {
        self.check_aligned(offset, 2);
        // SAFETY: as in `atomic_u32`.
        unsafe { AtomicU16::from_ptr(self.base.as_ptr().add(offset as usize).cast()) }
    }

    /// Where `len` bytes at `offset` are mapped, for system calls of this crate
    /// that write there.
    #[inline]
    pub(crate) fn raw_range(&self, offset: u64, len: usize) -> *mut u8 {
        self.check(offset, len as u64);
        // SAFETY: checked to lie inside the mapping.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }

    pub(crate) fn check(&self, offset: u64, len_bytes: u64) {
        assert!(
            offset.checked_add(len_bytes).is_some_and(|end| end <= self.len_bytes),
            "bytes {offset:#x}+{len_bytes:#x} outside memory of {:#x} bytes",
            self.len_bytes
        );
    }

    #[inline]
    fn check_aligned(&self, offset: u64, width: u64) {
        assert!(
            offset.is_multiple_of(width) && offset < self.len_bytes,
            "word at {offset:#x} unaligned or outside memory of {:#x} bytes",
            self.len_bytes
        );
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the range is exactly the mapping that `map` made; no reference
        // into it outlives `self`. The length fitted a usize when it was mapped.
        let status = unsafe { libc::munmap(self.base.as_ptr().cast(), self.len_bytes as usize) };
        debug_assert_eq!(status, 0);
    }
}
