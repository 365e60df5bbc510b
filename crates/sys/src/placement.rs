//! The C API of `libstrata.so` about memory (`include/strata.h`), as this process
//! has it: looked up by name, so that what uses it runs anywhere.
//!
//! For programs that are managed, through `strata-client`; nothing of the daemon
//! uses it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::OnceLock;

use strata_units::ADDRESSES_END;

const PAGE: usize = strata_units::PAGE_SIZE;

/// Why nothing, or not all, was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlacementError {
    /// No library in this process, or nobody who manages it.
    NotManaged,
    /// No such advice, tier or range.
    Invalid,
    /// Part of the range is not mapped.
    NotMapped,
    /// Too many hints at once: this one was dropped.
    Behind,
    /// More would be pinned than the budget allows, or there is no memory.
    NoMemory,
    /// Too many ranges of the process have settings.
    TooMany,
    /// There is no such tier.
    NoTier,
    /// The daemon refused, cannot be reached, went away, or is of another version.
    Daemon,
}

impl PlacementError {
    fn check(code: c_int) -> Result<(), Self> {
        match -code {
            code if code <= 0 => Ok(()),
            libc::ENOSYS => Err(Self::NotManaged),
            libc::EINVAL => Err(Self::Invalid),
            libc::EFAULT => Err(Self::NotMapped),
            libc::EAGAIN => Err(Self::Behind),
            libc::ENOMEM => Err(Self::NoMemory),
            libc::ENOBUFS => Err(Self::TooMany),
            libc::ENODEV => Err(Self::NoTier),
            _ => Err(Self::Daemon),
        }
    }
}

type Advise = extern "C" fn(*const c_void, usize, c_int) -> c_int;
type Where = unsafe extern "C" fn(*const c_void, usize, *mut u8) -> c_int;
type Alloc = unsafe extern "C" fn(*mut *mut c_void, usize, c_int) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type Reason = extern "C" fn() -> *const c_char;

/// What is there of it; all or nothing.
struct Functions {
    advise: Advise,
    find: Where,
    alloc: Alloc,
    free: Free,
    reason: Reason,
}

pub(crate) fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a C string; the handle means this process.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}

fn functions() -> Result<&'static Functions, PlacementError> {
    static FOUND: OnceLock<Option<Functions>> = OnceLock::new();
    let look = || {
        let (advise, find) = (symbol(c"strata_advise")?, symbol(c"strata_where")?);
        let (alloc, free) = (symbol(c"strata_alloc")?, symbol(c"strata_free")?);
        let reason = symbol(c"strata_error")?;
        // SAFETY: functions of these names are those of include/strata.h, whose
        // types these are; they stay as long as the process.
        unsafe {
            Some(Functions {
                advise: std::mem::transmute::<NonNull<c_void>, Advise>(advise),
                find: std::mem::transmute::<NonNull<c_void>, Where>(find),
                alloc: std::mem::transmute::<NonNull<c_void>, Alloc>(alloc),
                free: std::mem::transmute::<NonNull<c_void>, Free>(free),
                reason: std::mem::transmute::<NonNull<c_void>, Reason>(reason),
            })
        }
    };
    FOUND.get_or_init(look).as_ref().ok_or(PlacementError::NotManaged)
}

/// Gives advice (`enum strata_advice`) for a range of this process's memory, which
/// may be any pair of numbers: no content changes.
///
/// # Errors
/// See [`PlacementError`].
pub fn advise_memory(start: usize, bytes: usize, advice: i32) -> Result<(), PlacementError> {
    let functions = functions()?;
    PlacementError::check((functions.advise)(start as *const c_void, bytes, advice))
}

/// Where the pages that a range touches are (`enum strata_tier`).
///
/// # Errors
/// See [`PlacementError`].
pub fn memory_tiers(start: usize, bytes: usize) -> Result<Vec<u8>, PlacementError> {
    let functions = functions()?;
    let end = start.checked_add(bytes).filter(|end| end.checked_add(PAGE).is_some());
    let end = end.ok_or(PlacementError::Invalid)?;
    if bytes == 0 {
        return Ok(Vec::new());
    }
    // Nothing is allocated for what cannot be mapped.
    if end as u64 > ADDRESSES_END {
        return Err(PlacementError::Invalid);
    }
    let mut tiers = vec![0; (end.next_multiple_of(PAGE) - start / PAGE * PAGE) / PAGE];
    // SAFETY: a byte for each page that the range touches.
    let code = unsafe { (functions.find)(start as *const c_void, bytes, tiers.as_mut_ptr()) };
    PlacementError::check(code).map(|()| tiers)
}

/// Why the calling thread's last call failed, as the library says it; empty where
/// there is none.
#[must_use]
pub fn placement_reason() -> String {
    let Ok(functions) = functions() else { return String::new() };
    // SAFETY: never null, ended by a zero, and never freed.
    unsafe { CStr::from_ptr((functions.reason)()) }.to_string_lossy().into_owned()
}

/// Zeroed memory of its own mapping.
#[derive(Debug)]
pub struct MappedMemory {
    base: NonNull<u8>,
    bytes: usize,
    /// By the library; else by `mmap`.
    placed: bool,
}

// SAFETY: plain bytes that belong to the value alone.
unsafe impl Send for MappedMemory {}
// SAFETY: shared references only read.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// In a tier (`enum strata_tier`).
    ///
    /// # Errors
    /// See [`PlacementError`].
    pub fn in_tier(bytes: usize, tier: i32) -> Result<Self, PlacementError> {
        let functions = functions()?;
        let mut memory = std::ptr::null_mut();
        if bytes > isize::MAX as usize {
            return Err(PlacementError::Invalid);
        }
        // SAFETY: a place for a pointer.
        PlacementError::check(unsafe { (functions.alloc)(&raw mut memory, bytes, tier) })?;
        let base = NonNull::new(memory.cast()).ok_or(PlacementError::NoMemory)?;
        Ok(Self { base, bytes, placed: true })
    }

    /// Anywhere, as `mmap` gives it.
    ///
    /// # Errors
    /// What `mmap` says; of no bytes there is no memory.
    pub fn plain(bytes: usize) -> io::Result<Self> {
        if bytes > isize::MAX as usize {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(raw.cast()).ok_or_else(|| io::Error::other("mapped at zero"))?;
        Ok(Self { base, bytes, placed: false })
    }
}

impl Deref for MappedMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: so many bytes, zeroed when they were mapped, ours until dropped.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }
}

impl DerefMut for MappedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        match functions() {
            Ok(functions) if self.placed => {
                // SAFETY: given by the library, and nobody has it any more.
                unsafe { (functions.free)(self.base.as_ptr().cast(), self.bytes) };
            }
            // SAFETY: mapped here, and nobody has it any more.
            _ => unsafe {
                libc::munmap(self.base.as_ptr().cast(), self.bytes);
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_library_everything_says_so() {
        let byte = 0_u8;
        let start = &raw const byte as usize;
        assert_eq!(advise_memory(start, 1, 1), Err(PlacementError::NotManaged));
        assert_eq!(memory_tiers(start, 1), Err(PlacementError::NotManaged));
        assert!(MappedMemory::in_tier(1, 1).is_err_and(|e| e == PlacementError::NotManaged));
        assert_eq!(placement_reason(), "");
    }

    #[test]
    fn plain_memory_is_memory() {
        let mut memory = MappedMemory::plain(10_000).expect("memory");
        assert!(memory.len() == 10_000 && memory.iter().all(|byte| *byte == 0));
        memory[9_999] = 7;
        assert_eq!(memory.last(), Some(&7));
        assert!(MappedMemory::plain(0).is_err() && MappedMemory::plain(usize::MAX).is_err());
    }

    #[test]
    fn every_code_is_an_outcome() {
        for (code, outcome) in [
            (libc::ENOSYS, PlacementError::NotManaged),
            (libc::EFAULT, PlacementError::NotMapped),
            (libc::EAGAIN, PlacementError::Behind),
            (libc::ENOMEM, PlacementError::NoMemory),
            (libc::ENOBUFS, PlacementError::TooMany),
            (libc::ENODEV, PlacementError::NoTier),
            (libc::EINVAL, PlacementError::Invalid),
            (libc::ECONNRESET, PlacementError::Daemon),
        ] {
            assert_eq!(PlacementError::check(-code), Err(outcome));
        }
        assert_eq!(PlacementError::check(0), Ok(()));
    }
}
