//! userfaultfd: handshake, registration and filling.
//!
//! Numbers are our own, checked at compile time: the distribution's headers are
//! older than `UFFDIO_MOVE` and `UFFDIO_POISON`. Kernel document:
//! Documentation/admin-guide/mm/userfaultfd.rst.

pub(crate) mod messages;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use strata_units::{PAGE_SIZE, PageBuffer};

/// A request that reads and writes its argument.
pub(crate) const fn iowr_of(kind: u8, number: u32, bytes: usize) -> libc::c_ulong {
    ((3u32 << 30) | ((bytes as u32) << 16) | ((kind as u32) << 8) | number) as libc::c_ulong
}
const fn iowr(number: u32, bytes: usize) -> libc::c_ulong {
    iowr_of(0xAA, number, bytes)
}
const fn ior(number: u32, bytes: usize) -> libc::c_ulong {
    ((2u32 << 30) | ((bytes as u32) << 16) | (0xAA << 8) | number) as libc::c_ulong
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct RangeArg {
    start: u64,
    len: u64,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct RegisterArg {
    range: RangeArg,
    mode: u64,
    ioctls: u64,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct CopyArg {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct FillArg {
    range: RangeArg,
    mode: u64,
    done: i64,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct ProtectArg {
    range: RangeArg,
    mode: u64,
}

const UFFDIO_API: libc::c_ulong = iowr(0x3F, size_of::<ApiArg>());
const UFFDIO_REGISTER: libc::c_ulong = iowr(0x00, size_of::<RegisterArg>());
const UFFDIO_UNREGISTER: libc::c_ulong = ior(0x01, size_of::<RangeArg>());
const UFFDIO_WAKE: libc::c_ulong = ior(0x02, size_of::<RangeArg>());
const UFFDIO_COPY: libc::c_ulong = iowr(0x03, size_of::<CopyArg>());
const UFFDIO_ZEROPAGE: libc::c_ulong = iowr(0x04, size_of::<FillArg>());
const UFFDIO_WRITEPROTECT: libc::c_ulong = iowr(0x06, size_of::<ProtectArg>());
const UFFDIO_POISON: libc::c_ulong = iowr(0x08, size_of::<FillArg>());
const _: () = assert!(UFFDIO_API == 0xC018_AA3F);
const _: () = assert!(UFFDIO_REGISTER == 0xC020_AA00);
const _: () = assert!(UFFDIO_UNREGISTER == 0x8010_AA01);
const _: () = assert!(UFFDIO_WAKE == 0x8010_AA02);
const _: () = assert!(UFFDIO_COPY == 0xC028_AA03);
const _: () = assert!(UFFDIO_ZEROPAGE == 0xC020_AA04);
const _: () = assert!(UFFDIO_WRITEPROTECT == 0xC018_AA06);
const _: () = assert!(UFFDIO_POISON == 0xC020_AA08);

const UFFD_API_VERSION: u64 = 0xAA;
const REGISTER_MODE_MISSING: u64 = 1;
const REGISTER_MODE_WP: u64 = 2;
const PROTECT_MODE_WP: u64 = 1;

const FEATURE_EVENT_FORK: u64 = 1 << 1;
const FEATURE_EVENT_REMAP: u64 = 1 << 2;
const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
const FEATURE_THREAD_ID: u64 = 1 << 8;
const FEATURE_POISON: u64 = 1 << 14;
const FEATURE_MOVE: u64 = 1 << 16;

/// What the pager cannot do without.
pub const FEATURES_REQUIRED: u64 = FEATURE_EVENT_FORK
    | FEATURE_EVENT_REMAP
    | FEATURE_EVENT_REMOVE
    | FEATURE_EVENT_UNMAP
    | FEATURE_THREAD_ID
    | FEATURE_POISON
    | FEATURE_MOVE;

/// A range of a process's addresses, page-aligned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
}

impl Range {
    /// Bytes.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Nothing in it.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.end <= self.start
    }

    /// Whether `address` lies inside.
    #[must_use]
    pub const fn contains(self, address: u64) -> bool {
        self.start <= address && address < self.end
    }
}

/// What came of putting a page in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fill {
    /// Pages put in place, from the start of the range; the waiters are awake.
    Done {
        /// At least 1; fewer than asked when the range met a present page.
        pages: u64,
    },
    /// A page is there already. Nobody was woken.
    Present,
    /// The address space is changing: an event waits to be read.
    Changing,
    /// Nothing is mapped or registered there.
    Unmapped,
    /// The address space is gone.
    Gone,
    /// The tenant's memory cgroup or the machine is out of memory.
    NoMemory,
}

/// What came of registering a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Registration {
    /// Missing pages now wait for us.
    Done,
    /// The kernel refuses this kind of memory, or it changed meanwhile.
    Refused,
    /// The address space is gone.
    Gone,
}

/// Why a userfaultfd cannot be used at all.
#[derive(Debug)]
pub enum UffdError {
    /// The kernel lacks features that the pager needs (mask of the missing).
    Features(u64),
    /// A call failed.
    Io(io::Error),
}

/// One address space's userfaultfd, held from outside.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
}

/// Opens `/dev/userfaultfd`, on which a process can make a userfaultfd.
pub fn open_device() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")
}

impl Userfaultfd {
    /// Takes a descriptor from somebody else, if the kernel calls it a userfaultfd: any
    /// other file could say what it likes when it is asked for messages.
    ///
    /// # Errors
    /// It is something else.
    pub fn of_stranger(fd: OwnedFd) -> io::Result<Self> {
        if is_userfaultfd(fd.as_raw_fd()) {
            return Ok(Self { fd });
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the descriptor is no userfaultfd"))
    }

    /// Takes a userfaultfd that a process made and does the API handshake.
    pub fn handshake(fd: OwnedFd) -> Result<Self, UffdError> {
        let this = Self::of_stranger(fd).map_err(UffdError::Io)?;
        let mut arg = ApiArg { api: UFFD_API_VERSION, features: FEATURES_REQUIRED, ioctls: 0 };
        match this.ioctl(UFFDIO_API, &mut arg) {
            Ok(()) => Ok(this),
            Err(libc::EINVAL) => {
                // The handshake failed and left the descriptor as it was; the
                // features that this kernel offers stand in the argument.
                Err(UffdError::Features(FEATURES_REQUIRED & !arg.features))
            }
            Err(errno) => Err(UffdError::Io(io::Error::from_raw_os_error(errno))),
        }
    }

    /// A userfaultfd on which the handshake was done: made by a fork, or kept
    /// by a supervisor over the worker's death.
    #[must_use]
    pub fn adopt(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Another descriptor of the same address space.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    fn ioctl<T>(&self, request: libc::c_ulong, arg: &mut T) -> Result<(), i32> {
        // SAFETY: every request constant above is built from the size of the
        // argument type it is used with, `arg` is a live exclusive reference,
        // and the kernel writes only inside it.
        let code = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, std::ptr::from_mut(arg)) };
        if code == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
        }
    }

    /// Lets missing pages of `range` wait for us. A no-op where that is so.
    pub fn register(&self, range: Range) -> Registration {
        self.register_for(range, REGISTER_MODE_MISSING)
    }

    /// The same, and pages of `range` can be write-protected.
    pub fn register_protectable(&self, range: Range) -> Registration {
        self.register_for(range, REGISTER_MODE_MISSING | REGISTER_MODE_WP)
    }

    fn register_for(&self, range: Range, mode: u64) -> Registration {
        let mut arg = RegisterArg {
            range: RangeArg { start: range.start, len: range.len() },
            mode,
            ioctls: 0,
        };
        match self.ioctl(UFFDIO_REGISTER, &mut arg) {
            Ok(()) => Registration::Done,
            Err(libc::ESRCH | libc::ENOMEM) if !self.is_alive() => Registration::Gone,
            Err(_) => Registration::Refused,
        }
    }

    /// Ends waiting in `range` and wakes who waits: pages still missing read
    /// zero from now on.
    pub fn unregister(&self, range: Range) -> Registration {
        let mut arg = RangeArg { start: range.start, len: range.len() };
        match self.ioctl(UFFDIO_UNREGISTER, &mut arg) {
            Ok(()) => Registration::Done,
            Err(libc::ESRCH | libc::ENOMEM) if !self.is_alive() => Registration::Gone,
            Err(_) => Registration::Refused,
        }
    }

    /// Puts `page` at `address` and wakes who waits for it.
    pub fn copy(&self, address: u64, page: &PageBuffer) -> Fill {
        let mut arg = CopyArg {
            dst: address,
            src: page.0.as_ptr() as u64,
            len: PAGE_SIZE as u64,
            mode: 0,
            copied: 0,
        };
        match self.ioctl(UFFDIO_COPY, &mut arg) {
            Ok(()) => Fill::Done { pages: 1 },
            Err(errno) => Self::refused(errno),
        }
    }

    /// Maps the zero page over `range`, from its start up to the first page
    /// that is present, and wakes who waits there.
    pub fn zero(&self, range: Range) -> Fill {
        let mut arg =
            FillArg { range: RangeArg { start: range.start, len: range.len() }, mode: 0, done: 0 };
        match self.ioctl(UFFDIO_ZEROPAGE, &mut arg) {
            Ok(()) => Fill::Done { pages: range.len() / PAGE_SIZE as u64 },
            // Some pages, then a present one or the range's end.
            Err(libc::EAGAIN) if arg.done > 0 => {
                Fill::Done { pages: arg.done as u64 / PAGE_SIZE as u64 }
            }
            Err(errno) => Self::refused(errno),
        }
    }

    /// Makes whoever touches the page at `address` die by SIGBUS: its content
    /// is lost, and any other answer would be a wrong byte.
    pub fn poison(&self, address: u64) -> Fill {
        let mut arg =
            FillArg { range: RangeArg { start: address, len: PAGE_SIZE as u64 }, mode: 0, done: 0 };
        match self.ioctl(UFFDIO_POISON, &mut arg) {
            Ok(()) => Fill::Done { pages: 1 },
            Err(errno) => Self::refused(errno),
        }
    }

    /// Write-protects the pages of `range` that are there: whoever writes to one
    /// waits until its protection is taken off.
    pub fn protect(&self, range: Range) -> Fill {
        self.protect_with(range, PROTECT_MODE_WP)
    }

    /// Takes the write protection off `range` and wakes who waits there.
    pub fn unprotect(&self, range: Range) -> Fill {
        self.protect_with(range, 0)
    }

    fn protect_with(&self, range: Range, mode: u64) -> Fill {
        let mut arg = ProtectArg { range: RangeArg { start: range.start, len: range.len() }, mode };
        match self.ioctl(UFFDIO_WRITEPROTECT, &mut arg) {
            Ok(()) => Fill::Done { pages: range.len() / PAGE_SIZE as u64 },
            Err(errno) => Self::refused(errno),
        }
    }

    fn refused(errno: i32) -> Fill {
        match errno {
            libc::EEXIST => Fill::Present,
            libc::EAGAIN => Fill::Changing,
            libc::ESRCH => Fill::Gone,
            libc::ENOMEM => Fill::NoMemory,
            // ENOENT: nothing registered there; EINVAL: no such range; EFAULT:
            // the page table went away underneath.
            _ => Fill::Unmapped,
        }
    }

    /// Wakes everyone who waits in `range`; who still misses a page faults
    /// again, and the fault is delivered anew.
    pub fn wake(&self, range: Range) {
        let mut arg = RangeArg { start: range.start, len: range.len() };
        // A range that is no longer valid has no waiters.
        let _ = self.ioctl(UFFDIO_WAKE, &mut arg);
    }

    /// Whether the address space still exists.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // The lowest address that may be mapped at all; nothing is registered
        // there, so nothing is filled: ENOENT with, ESRCH without an address
        // space.
        const LOWEST: u64 = 64 << 10;
        let mut arg =
            FillArg { range: RangeArg { start: LOWEST, len: PAGE_SIZE as u64 }, mode: 0, done: 0 };
        !matches!(self.ioctl(UFFDIO_ZEROPAGE, &mut arg), Err(libc::ESRCH))
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether the kernel calls `fd` a userfaultfd. Its name alone is not enough: a mounted
/// file system may show what it likes as a file's name. So it is also asked whether it
/// lies where the kernel keeps what has no file, as an eventfd of ours does.
pub(crate) fn is_userfaultfd(fd: RawFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
    let is_called_one = link.is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]");
    let device = |fd| {
        let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: an integer and writable memory of the right size, which all zeroes fill
        // already.
        let (code, status) =
            unsafe { (libc::fstat(fd, status.as_mut_ptr()), status.assume_init()) };
        (code == 0).then_some(status.st_dev)
    };
    is_called_one
        && crate::EventFd::new().is_ok_and(|event| {
            let nowhere = device(event.as_fd().as_raw_fd());
            nowhere.is_some() && device(fd) == nowhere
        })
}

/// Takes ownership of a descriptor whose number came from a record of ours or
/// from the kernel.
pub(crate) fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: callers pass a number that the kernel just returned to this
    // process or that the registry recorded as open and not otherwise owned.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
