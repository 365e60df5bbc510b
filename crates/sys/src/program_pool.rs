//! The C API of `libstrata.so` about pools (`include/strata.h`), as this process has it.
//!
//! For programs that are managed, through `strata-client`; nothing of the daemon uses it.

use std::ffi::{CString, c_char, c_int, c_ulong, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::OnceLock;

use strata_units::PageBuffer;

use crate::placement::symbol;

type Open = unsafe extern "C" fn(*const c_char, *const c_char) -> c_int;
type Get = unsafe extern "C" fn(c_int, c_ulong, *mut c_void, usize, *mut u8) -> c_int;
type Put = unsafe extern "C" fn(c_int, c_ulong, *const c_void, usize) -> c_int;
type Flush = extern "C" fn(c_int, c_ulong, c_ulong) -> c_int;
type Close = extern "C" fn(c_int) -> c_int;

/// All or nothing of it.
struct Functions {
    open: Open,
    get: Get,
    put: Put,
    flush: Flush,
    close: Close,
}

fn functions() -> Option<&'static Functions> {
    static FOUND: OnceLock<Option<Functions>> = OnceLock::new();
    let look = || {
        let (open, get) = (symbol(c"strata_pool_open")?, symbol(c"strata_pool_get")?);
        let (put, flush) = (symbol(c"strata_pool_put")?, symbol(c"strata_pool_flush")?);
        let close = symbol(c"strata_pool_close")?;
        // SAFETY: functions of these names are those of include/strata.h, whose types these
        // are; they stay as long as the process.
        unsafe {
            Some(Functions {
                open: std::mem::transmute::<NonNull<c_void>, Open>(open),
                get: std::mem::transmute::<NonNull<c_void>, Get>(get),
                put: std::mem::transmute::<NonNull<c_void>, Put>(put),
                flush: std::mem::transmute::<NonNull<c_void>, Flush>(flush),
                close: std::mem::transmute::<NonNull<c_void>, Close>(close),
            })
        }
    };
    FOUND.get_or_init(look).as_ref()
}

/// A result of the library's; its errors are the kernel's of these numbers.
fn check(code: c_int) -> io::Result<u32> {
    u32::try_from(code).map_err(|_| match code.saturating_neg() {
        // Another process's: for this one as good as ended.
        libc::EBADF => io::ErrorKind::ConnectionReset.into(),
        number => io::Error::from_raw_os_error(number),
    })
}

/// A file of a pool that a program has open; closed when dropped.
#[derive(Debug)]
pub struct ProgramPool(c_int);

impl ProgramPool {
    /// Opens a file of one of the user's pools.
    ///
    /// # Errors
    /// As `strata_pool_open`; `ENOSYS` without the library, `EINVAL` of names with a zero.
    pub fn open(pool: &str, file: &str) -> io::Result<Self> {
        let functions = functions().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSYS))?;
        let (pool, file) = (CString::new(pool)?, CString::new(file)?);
        // SAFETY: two C strings.
        let number = check(unsafe { (functions.open)(pool.as_ptr(), file.as_ptr()) })?;
        Ok(Self(number.cast_signed()))
    }

    /// Copies out what is there of so many pages as `found` has places, from `first` on, and
    /// says of each whether it was. How many were there.
    ///
    /// # Errors
    /// As `strata_pool_get`.
    ///
    /// # Panics
    /// When there are not as many pages as places.
    pub fn get(&self, first: u64, pages: &mut [PageBuffer], found: &mut [bool]) -> io::Result<u32> {
        assert_eq!(pages.len(), found.len(), "a place for each page");
        let Some(functions) = functions() else { return Ok(0) };
        let mut bytes = vec![0; found.len()];
        let to = pages.as_mut_ptr().cast();
        // SAFETY: room for so many pages, and for a byte each.
        let code = unsafe { (functions.get)(self.0, first, to, pages.len(), bytes.as_mut_ptr()) };
        let count = check(code)?;
        found.iter_mut().zip(bytes).for_each(|(found, byte)| *found = byte == 1);
        Ok(count)
    }

    /// Puts pages there from `first` on; how many were taken.
    ///
    /// # Errors
    /// As `strata_pool_put`.
    pub fn put(&self, first: u64, pages: &[PageBuffer]) -> io::Result<u32> {
        let Some(functions) = functions() else { return Ok(0) };
        // SAFETY: so many pages.
        check(unsafe { (functions.put)(self.0, first, pages.as_ptr().cast(), pages.len()) })
    }

    /// Has pages be there no more.
    ///
    /// # Errors
    /// As `strata_pool_flush`.
    pub fn flush(&self, first: u64, count: u64) -> io::Result<()> {
        let Some(functions) = functions() else { return Ok(()) };
        check((functions.flush)(self.0, first, count)).map(drop)
    }
}

impl Drop for ProgramPool {
    fn drop(&mut self) {
        if let Some(functions) = functions() {
            (functions.close)(self.0);
        }
    }
}
