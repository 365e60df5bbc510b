//! A guest's memory. QEMU is told that the guest's RAM is files of one directory,
//! shared, so that its snapshots may leave RAM out; their mappings are made private
//! anonymous memory here, which alone can leave and come back safely. The files stay
//! empty.
//!
//! Which mappings is decided by the file, never by the size: regular files without
//! content somewhere below the directory that `STRATA_GUEST_DIR` names. No other mapping of
//! any program is changed, and without that variable nothing is looked at.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use libc::{off_t, size_t};
use strata_units::wire::MAX_GUEST_PATH_BYTES;

use crate::kernel::word;
use crate::next::Next;
use crate::syscall::call;

static MMAP: Next = Next::new(c"mmap");
static MMAP64: Next = Next::new(c"mmap64");

/// The directory of the guest's memory.
static DIRECTORY: Directory =
    Directory { length: AtomicUsize::new(0), bytes: UnsafeCell::new([0; MAX_GUEST_PATH_BYTES]) };

struct Directory {
    /// 0: this program is no guest.
    length: AtomicUsize,
    bytes: UnsafeCell<[u8; MAX_GUEST_PATH_BYTES]>,
}

// SAFETY: the bytes are written once, before `length` says that they are there.
unsafe impl Sync for Directory {}

impl Directory {
    fn path(&self) -> Option<&[u8]> {
        let length = self.length.load(Ordering::Acquire);
        if length == 0 {
            return None;
        }
        // SAFETY: not written any more once the length is set.
        let bytes = unsafe { &*self.bytes.get() };
        bytes.get(..length)
    }

    /// # Safety
    /// Once, and by one thread: the constructor's.
    unsafe fn set(&self, path: &[u8]) {
        // SAFETY: nobody reads them before the length is set, and nobody else writes.
        let bytes = unsafe { &mut *self.bytes.get() };
        bytes[..path.len()].copy_from_slice(path);
        self.length.store(path.len(), Ordering::Release);
    }
}

/// Looks up now who else has the names: an allocator may come by with its locks held,
/// or in the middle of such a lookup. What comes before this goes to the kernel.
///
/// `directory` is what the environment says, if anything. False: it is no path that could be
/// matched (absolute, no `/` at its end, not too long).
pub(crate) fn prepare(directory: Option<&CStr>) -> bool {
    MMAP.address();
    MMAP64.address();
    let path = directory.map_or(&[][..], CStr::to_bytes);
    if path.is_empty() {
        return true;
    }
    if path[0] != b'/' || path.ends_with(b"/") || path.len() > MAX_GUEST_PATH_BYTES {
        return false;
    }
    // SAFETY: this is the constructor.
    unsafe { DIRECTORY.set(path) };
    true
}

/// POSIX's function, but a guest's memory is private.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's own arguments.
    unsafe { map(&MMAP, address, length, protection, flags, descriptor, offset) }
}

/// The same under the name that programs with large files use.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's own arguments.
    unsafe { map(&MMAP64, address, length, protection, flags, descriptor, offset) }
}

type Map = unsafe extern "C" fn(*mut c_void, size_t, c_int, c_int, c_int, off_t) -> *mut c_void;

/// # Safety
/// As for `mmap`.
unsafe fn map(
    next: &Next,
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: off_t,
) -> *mut c_void {
    if let Some(directory) = DIRECTORY.path()
        && descriptor >= 0
        && is_empty_file(descriptor)
        && is_below(descriptor, directory)
    {
        // SAFETY: the caller's own place, if it names one.
        return unsafe { map_private(address, length, protection, flags, descriptor) };
    }
    let next = next.known();
    if next.is_null() {
        // SAFETY: the caller's own arguments.
        return unsafe { system_call(address, length, protection, flags, descriptor, offset) };
    }
    // SAFETY: the next library's function of this name has this signature.
    let next = unsafe { core::mem::transmute::<*mut c_void, Map>(next) };
    // SAFETY: the caller's own arguments.
    unsafe { next(address, length, protection, flags, descriptor, offset) }
}

/// Maps private anonymous memory where a file of the guest's was wanted, and cuts that
/// file to nothing: another process that maps it (a vhost-user device that is plugged in
/// later) dies of it, and does not take zeroes for the guest's memory.
///
/// # Safety
/// As for `mmap`.
unsafe fn map_private(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
) -> *mut c_void {
    // Not counted against the machine's memory: what a guest is promised is more than it
    // gets, and its budget bounds that.
    let private = flags & !(libc::MAP_TYPE | libc::MAP_SYNC)
        | libc::MAP_PRIVATE
        | libc::MAP_ANONYMOUS
        | libc::MAP_NORESERVE;
    // SAFETY: the caller's own arguments; what is mapped reads as zero, as the file does.
    let mapped = unsafe { system_call(address, length, protection, private, -1, 0) };
    if mapped != libc::MAP_FAILED {
        // SAFETY: no pointers. Where it fails, the file stays as empty as it is.
        let _ = unsafe { call(libc::SYS_ftruncate, [word(descriptor), 0, 0, 0, 0, 0]) };
    }
    mapped
}

/// # Safety
/// As for `mmap`.
unsafe fn system_call(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: off_t,
) -> *mut c_void {
    let arguments = [
        address as u64,
        length as u64,
        word(protection),
        word(flags),
        word(descriptor),
        offset.cast_unsigned(),
    ];
    // SAFETY: the caller's own arguments.
    match unsafe { call(libc::SYS_mmap, arguments) } {
        Ok(mapped) => mapped as *mut c_void,
        Err(error) => {
            // SAFETY: a thread's own.
            unsafe { *libc::__errno_location() = error };
            libc::MAP_FAILED
        }
    }
}

/// A regular file that nothing was ever written to, whatever its size.
fn is_empty_file(descriptor: c_int) -> bool {
    // SAFETY: plain numbers, for which zeroes will do.
    let mut status: libc::stat = unsafe { core::mem::zeroed() };
    let arguments = [word(descriptor), &raw mut status as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes its `struct stat`, which on these architectures is the C
    // library's.
    let known = unsafe { call(libc::SYS_fstat, arguments) }.is_ok();
    known && status.st_mode & libc::S_IFMT == libc::S_IFREG && status.st_blocks == 0
}

/// Whether the descriptor's file is somewhere below `directory`, as the kernel names it.
fn is_below(descriptor: c_int, directory: &[u8]) -> bool {
    const PREFIX: &[u8] = b"/proc/self/fd/";
    let mut link = [0_u8; PREFIX.len() + 11];
    link[..PREFIX.len()].copy_from_slice(PREFIX);
    let mut digits = [0_u8; 10];
    let mut first = digits.len();
    let mut rest = descriptor.cast_unsigned();
    loop {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    link[PREFIX.len()..][..digits.len() - first].copy_from_slice(&digits[first..]);
    // Room for what is compared, and to see that the name goes on; the rest is cut off.
    let mut target = [0_u8; MAX_GUEST_PATH_BYTES + 2];
    let arguments = [
        word(libc::AT_FDCWD),
        link.as_ptr() as u64,
        target.as_mut_ptr() as u64,
        target.len() as u64,
        0,
        0,
    ];
    // SAFETY: a C string, and a buffer of that length.
    let Ok(length) = (unsafe { call(libc::SYS_readlinkat, arguments) }) else { return false };
    let target = target.get(..length as usize).unwrap_or_default();
    let below = target.strip_prefix(directory).and_then(|rest| rest.strip_prefix(b"/"));
    below.is_some_and(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;

    use super::*;

    const BYTES: usize = 4 << 20;

    /// The one directory of this process's guest, named once; and another beside it.
    fn directories() -> (PathBuf, PathBuf) {
        use std::sync::OnceLock;
        static MADE: OnceLock<(PathBuf, PathBuf)> = OnceLock::new();
        let make = || {
            let base = std::env::temp_dir().canonicalize().expect("a directory");
            let base = base.join(format!("strata-preload-guest-{}", std::process::id()));
            let both = (base.join("guest"), base.join("guests"));
            std::fs::create_dir_all(both.0.join("inner")).expect("a directory");
            std::fs::create_dir_all(&both.1).expect("a directory");
            let path = std::ffi::CString::new(both.0.as_os_str().as_bytes()).expect("a path");
            assert!(prepare(Some(&path)));
            both
        };
        MADE.get_or_init(make).clone()
    }

    fn file(path: PathBuf) -> File {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(path);
        let file = file.expect("a file");
        file.set_len(BYTES as u64).expect("as large as that");
        file
    }

    /// What the kernel says of the mapping at `address`: its permissions and its inode.
    fn mapping(address: *mut c_void) -> (String, String) {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let line = maps.lines().find(|line| {
            let (start, end) =
                line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
            let at = |text| u64::from_str_radix(text, 16).expect("a number");
            (at(start)..at(end)).contains(&(address as u64))
        });
        let words: Vec<&str> = line.expect("mapped").split_whitespace().collect();
        (words[1].to_owned(), words[4].to_owned())
    }

    const ACCESS: c_int = libc::PROT_READ | libc::PROT_WRITE;

    fn map_at(address: *mut c_void, protection: c_int, flags: c_int, file: &File) -> *mut c_void {
        // SAFETY: a place of the test's own, or any.
        unsafe { mmap64(address, BYTES, protection, flags, file.as_raw_fd(), 0) }
    }

    fn unmap(address: *mut c_void) {
        // SAFETY: mapped by the test, which has no references into it.
        assert_eq!(unsafe { libc::munmap(address, BYTES) }, 0);
    }

    #[test]
    fn a_guests_memory_is_private_and_where_it_was_wanted() {
        let (guest, _) = directories();
        for path in [guest.join("ram"), guest.join("inner/ram")] {
            let ram = file(path);
            // As QEMU does: a place without access first, then the memory over it.
            // SAFETY: any place.
            let place = unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                mmap64(core::ptr::null_mut(), BYTES, libc::PROT_NONE, flags, -1, 0)
            };
            assert_ne!(place, libc::MAP_FAILED);
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            assert_eq!(map_at(place, ACCESS, flags, &ram), place);
            assert_eq!(mapping(place), ("rw-p".to_owned(), "0".to_owned()));
            // SAFETY: mapped just now, with access.
            unsafe { place.cast::<u8>().write(7) };
            let metadata = ram.metadata().expect("a file");
            assert_eq!(std::os::unix::fs::MetadataExt::blocks(&metadata), 0);
            assert_eq!(metadata.len(), 0, "whoever maps it gets a signal, not zeroes");
            unmap(place);
            ram.set_len(BYTES as u64).expect("as large as that");
            let place = map_at(core::ptr::null_mut(), libc::PROT_READ, libc::MAP_SHARED, &ram);
            assert_eq!(mapping(place), ("r--p".to_owned(), "0".to_owned()));
            unmap(place);
        }
    }

    #[test]
    fn no_other_mapping_is_changed() {
        let (guest, beside) = directories();
        // An NVDIMM's file, say: elsewhere, in a directory whose name begins the same.
        let elsewhere = file(beside.join("ram"));
        let full = file(guest.join("full"));
        std::os::unix::fs::FileExt::write_all_at(&full, b"content", 0).expect("written");
        for other in [&elsewhere, &full] {
            let place = map_at(core::ptr::null_mut(), ACCESS, libc::MAP_SHARED, other);
            let (permissions, inode) = mapping(place);
            assert_eq!(permissions, "rw-s");
            assert_ne!(inode, "0");
            unmap(place);
            assert_eq!(other.metadata().expect("a file").len(), BYTES as u64);
        }
        let place = map_at(core::ptr::null_mut(), ACCESS, libc::MAP_SHARED, &full);
        // SAFETY: mapped just now, and written before.
        assert_eq!(unsafe { place.cast::<u8>().read() }, b'c');
        unmap(place);
    }

    #[test]
    fn what_the_kernel_refuses_is_refused_with_its_reason() {
        let (guest, _) = directories();
        let ram = file(guest.join("refused"));
        // SAFETY: refused.
        let mapped =
            unsafe { mmap(core::ptr::null_mut(), 0, ACCESS, libc::MAP_SHARED, ram.as_raw_fd(), 0) };
        assert_eq!(mapped, libc::MAP_FAILED);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(ram.metadata().expect("a file").len(), BYTES as u64);
        // SAFETY: refused.
        let mapped =
            unsafe { mmap(core::ptr::null_mut(), BYTES, ACCESS, libc::MAP_SHARED, 1 << 20, 0) };
        assert_eq!(mapped, libc::MAP_FAILED);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn a_directory_that_cannot_be_matched_is_refused() {
        let long = std::ffi::CString::new("/x".repeat(MAX_GUEST_PATH_BYTES)).expect("a path");
        for path in [c"run/strata", c"/run/strata/", &long] {
            assert!(!prepare(Some(path)), "{path:?}");
        }
        assert!(prepare(None) && prepare(Some(c"")));
    }
}
