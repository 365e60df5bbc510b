//! This process as its own tenant: a userfaultfd for itself, and memory on
//! which it may use it.
//!
//! For tests, which thereby need no second process, and for whoever wants to
//! try a kernel out. Not for the pager: a thread that serves faults must never
//! touch memory that is registered, and in one process that is easily broken.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use strata_units::{PAGE_SIZE, PageBuffer};

use crate::probe::{Way, open_userfaultfd};
use crate::uffd::{Range, UffdError, Userfaultfd};

const WORD: usize = size_of::<u64>();

/// `struct uffdio_move`.
#[repr(C)]
struct MoveArg {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

/// `_IOWR(0xAA, 0x05, struct uffdio_move)`.
const UFFDIO_MOVE: libc::Ioctl = 0xC028_AA05_u32 as libc::Ioctl;
const _: () = assert!(size_of::<MoveArg>() == 0x28, "the size is part of UFFDIO_MOVE's number");

impl Userfaultfd {
    /// One for this process, ready for use (as root, or with access to
    /// `/dev/userfaultfd` and CAP_SYS_PTRACE). For tests and trials: see the
    /// warning at [`OwnMemory`].
    pub fn for_own_process() -> Result<Self, UffdError> {
        Self::handshake(open_userfaultfd(Way::Device).map_err(UffdError::Io)?)
    }
}

/// Private anonymous pages of this process that nobody else knows of, untouched
/// at first.
///
/// Once they are registered with a userfaultfd, every access waits until some
/// other thread serves it; discarding and dropping them waits until the event
/// is read (or the last descriptor of that userfaultfd is closed).
#[derive(Debug)]
pub struct OwnMemory {
    base: NonNull<u8>,
    pages: usize,
}

// SAFETY: a private mapping that lives as long as the value, only accessed by
// atomic words and system calls.
unsafe impl Send for OwnMemory {}
// SAFETY: see `Send`; no reference to plain bytes is ever made.
unsafe impl Sync for OwnMemory {}

impl OwnMemory {
    /// Maps `pages` pages, aligned to 2 MiB (huge pages switched off), with
    /// nothing resident.
    ///
    /// # Errors
    /// What `mmap` or `madvise` say.
    pub fn create(pages: usize) -> io::Result<Self> {
        const ALIGN: usize = 2 << 20;
        let bytes = pages * PAGE_SIZE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), bytes + ALIGN, access, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let skip = (raw as usize).next_multiple_of(ALIGN) - raw as usize;
        // SAFETY: `skip` < ALIGN, so the result and `bytes` behind it lie inside
        // the mapping just made; both cut-off ends are page-aligned parts of it
        // that nobody has seen.
        let base = unsafe {
            let base = raw.cast::<u8>().add(skip);
            if skip > 0 {
                libc::munmap(raw, skip);
            }
            libc::munmap(base.add(bytes).cast(), ALIGN - skip);
            base
        };
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at zero"))?;
        let this = Self { base, pages };
        this.advise(0, pages, libc::MADV_NOHUGEPAGE)?;
        Ok(this)
    }

    /// Where it is.
    #[must_use]
    pub fn range(&self) -> Range {
        let start = self.base.as_ptr() as u64;
        Range { start, end: start + (self.pages * PAGE_SIZE) as u64 }
    }

    /// Address of the page `index`.
    ///
    /// # Panics
    /// Behind the last page.
    #[must_use]
    pub fn address(&self, index: usize) -> u64 {
        assert!(index < self.pages, "page {index} of {}", self.pages);
        self.range().start + (index * PAGE_SIZE) as u64
    }

    fn word(&self, page: usize, word: usize) -> &AtomicU64 {
        assert!(page < self.pages && word < PAGE_SIZE / WORD, "outside of the memory");
        // SAFETY: inside the mapping (asserted), aligned to 8 bytes, mapped as
        // long as `self` lives, and only ever accessed atomically.
        unsafe {
            AtomicU64::from_ptr(self.base.as_ptr().add(page * PAGE_SIZE + word * WORD).cast())
        }
    }

    /// Reads the first word of the page `index`.
    ///
    /// # Panics
    /// Behind the last page.
    pub fn touch(&self, index: usize) -> u64 {
        self.word(index, 0).load(Ordering::Relaxed)
    }

    /// Copies the page `index` out, as a program would read it.
    ///
    /// # Panics
    /// Behind the last page.
    pub fn read_page(&self, index: usize, page: &mut PageBuffer) {
        for (at, chunk) in page.0.chunks_exact_mut(WORD).enumerate() {
            chunk.copy_from_slice(&self.word(index, at).load(Ordering::Relaxed).to_ne_bytes());
        }
    }

    /// Copies into the page `index`, as a program would write it.
    ///
    /// # Panics
    /// Behind the last page.
    pub fn write_page(&self, index: usize, page: &PageBuffer) {
        for (at, chunk) in page.0.chunks_exact(WORD).enumerate() {
            let word = u64::from_ne_bytes(chunk.try_into().expect("chunks of a word"));
            self.word(index, at).store(word, Ordering::Relaxed);
        }
    }

    /// Discards `count` pages from `first` on (`MADV_DONTNEED`).
    ///
    /// # Errors
    /// What `madvise` says.
    ///
    /// # Panics
    /// Behind the last page.
    pub fn discard(&self, first: usize, count: usize) -> io::Result<()> {
        self.advise(first, count, libc::MADV_DONTNEED)
    }

    /// Unmaps all but the first `pages` pages.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn shrink_to(&mut self, pages: usize) {
        assert!(pages <= self.pages, "{pages} of {} pages", self.pages);
        // SAFETY: inside the mapping (asserted), which holds no Rust object; with
        // `self.pages` below it, nothing is accessed there again.
        unsafe {
            let start = self.base.as_ptr().add(pages * PAGE_SIZE);
            libc::munmap(start.cast(), (self.pages - pages) * PAGE_SIZE);
        }
        self.pages = pages;
    }

    fn advise(&self, first: usize, count: usize, advice: libc::c_int) -> io::Result<()> {
        assert!(first + count <= self.pages, "pages {first}+{count} of {}", self.pages);
        // SAFETY: inside the mapping (asserted), which holds no Rust object;
        // every later access is an atomic word that may have any value.
        let code = unsafe {
            let start = self.base.as_ptr().add(first * PAGE_SIZE);
            libc::madvise(start.cast(), count * PAGE_SIZE, advice)
        };
        if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Moves the page at the address `from` to page `to` of this memory
    /// (`UFFDIO_MOVE`); 0, or the kernel's errno, negative, as an agent reports
    /// it.
    ///
    /// # Panics
    /// When `from` does not lie inside `source`, or `to` behind the last page.
    pub fn move_in(&self, uffd: &Userfaultfd, to: usize, source: &Self, from: u64) -> i32 {
        let page = PAGE_SIZE as u64;
        assert!(source.range().contains(from) && from.is_multiple_of(page), "not of the source");
        let mut arg = MoveArg { dst: self.address(to), src: from, len: page, mode: 0, moved: 0 };
        // SAFETY: the kernel reads and writes one `struct uffdio_move`, and
        // moves a page between two mappings that hold no Rust objects.
        let code = unsafe { libc::ioctl(uffd.as_fd().as_raw_fd(), UFFDIO_MOVE, &raw mut arg) };
        if code == 0 { 0 } else { -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) }
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `create` left; no reference into it
        // outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.pages * PAGE_SIZE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fill, Registration};

    #[test]
    fn a_page_moves_and_is_missing_afterwards() {
        // Unmapping waits while a userfaultfd is open that nobody reads: it must
        // be dropped first, so it comes last.
        let memory = OwnMemory::create(4).expect("memory");
        let transfer = OwnMemory::create(1).expect("memory");
        let uffd = match Userfaultfd::for_own_process() {
            Ok(uffd) => uffd,
            Err(error) => return println!("skipped: no userfaultfd here: {error:?}"),
        };
        let mut page = PageBuffer::zeroed();
        page.0.fill(7);
        memory.write_page(1, &page);
        assert_eq!(uffd.register(memory.range()), Registration::Done);
        assert_eq!(transfer.move_in(&uffd, 0, &memory, memory.address(0)), -libc::EINVAL);
        // The destination of a MOVE must be registered with this userfaultfd.
        assert_eq!(uffd.register(transfer.range()), Registration::Done);
        assert_eq!(transfer.move_in(&uffd, 0, &memory, memory.address(0)), -libc::ENOENT);
        assert_eq!(transfer.move_in(&uffd, 0, &memory, memory.address(1)), 0);
        let mut out = PageBuffer::zeroed();
        transfer.read_page(0, &mut out);
        assert_eq!(out.0, page.0);
        // Missing now: what is put there is what is read.
        page.0.fill(9);
        assert_eq!(uffd.copy(memory.address(1), &page), Fill::Done { pages: 1 });
        assert_eq!(uffd.copy(memory.address(1), &page), Fill::Present);
        memory.read_page(1, &mut out);
        assert_eq!(out.0, page.0);
    }
}
