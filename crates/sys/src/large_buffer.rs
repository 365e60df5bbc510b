//! Ordinary memory in one huge page, where the kernel has one to give.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// 2 MiB of zeroes, aligned to 2 MiB: touching it first costs a fiftieth of what
/// touching as much in small pages costs. Given back when it is dropped.
#[derive(Debug)]
pub struct LargeBuffer(NonNull<u8>);

/// Its length.
pub const LARGE_BUFFER_BYTES: usize = 2 << 20;

// SAFETY: it owns its memory as a Box does.
unsafe impl Send for LargeBuffer {}
// SAFETY: shared references only read.
unsafe impl Sync for LargeBuffer {}

impl LargeBuffer {
    /// Maps one; nothing is resident yet.
    ///
    /// # Errors
    /// What `mmap` says.
    pub fn new() -> io::Result<Self> {
        const BYTES: usize = LARGE_BUFFER_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), 2 * BYTES, access, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let skip = (raw as usize).next_multiple_of(BYTES) - raw as usize;
        // SAFETY: `skip` < BYTES, so `BYTES` from there lie inside the mapping just
        // made; the two ends that are cut off are page-aligned parts of it that
        // nobody has seen.
        unsafe {
            let base = raw.cast::<u8>().add(skip);
            if skip > 0 {
                libc::munmap(raw, skip);
            }
            libc::munmap(base.add(BYTES).cast(), BYTES - skip);
            // Small pages do as well.
            libc::madvise(base.cast(), BYTES, libc::MADV_HUGEPAGE);
            // Raw pages of tenants do not belong into a core dump.
            libc::madvise(base.cast(), BYTES, libc::MADV_DONTDUMP);
            Ok(Self(NonNull::new(base).expect("mmap does not return null")))
        }
    }
}

impl Deref for LargeBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping made above, zeroes at first, lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), LARGE_BUFFER_BYTES) }
    }
}

impl DerefMut for LargeBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), LARGE_BUFFER_BYTES) }
    }
}

impl Drop for LargeBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping made above; no reference to it is left.
        unsafe { libc::munmap(self.0.as_ptr().cast(), LARGE_BUFFER_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_zero_aligned_and_one_s_own() {
        let mut first = LargeBuffer::new().expect("memory");
        let second = LargeBuffer::new().expect("memory");
        assert_eq!(first.as_ptr() as usize % LARGE_BUFFER_BYTES, 0);
        first.fill(7);
        assert!(first.iter().all(|&byte| byte == 7));
        assert!(second.iter().all(|&byte| byte == 0));
    }
}
