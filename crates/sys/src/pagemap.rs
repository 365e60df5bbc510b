//! Which parts of a process's memory are present, without looking at every page:
//! a mapping of terabytes of which little was touched is walked in microseconds.
//! (`PAGEMAP_SCAN`, Documentation/admin-guide/mm/pagemap.rst; Linux 6.7.)

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use strata_units::PAGE_SHIFT;

use crate::handle::gone;
use crate::uffd::{Range, iowr_of};

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = iowr_of(b'f', 16, size_of::<ScanArg>());
/// Not write-protected by a userfaultfd.
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// A guard (`MADV_GUARD_INSTALL`), which also counts as swapped. Linux 6.15; before, a
/// mask that names it is refused.
const PAGE_IS_GUARD: u64 = 1 << 8;
/// Ranges taken in one call.
const REGIONS: usize = 512;

/// `struct pm_scan_arg`.
#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}
const _: () = assert!(size_of::<ScanArg>() == 96);

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// Calls `each` for the guards (`MADV_GUARD_INSTALL`) in `range`, in order.
pub(crate) fn guards(pagemap: &File, range: Range, mut each: impl FnMut(Range)) -> io::Result<()> {
    let wanted =
        Wanted { inverted: 0, all: PAGE_IS_GUARD, any: 0, told: PAGE_IS_GUARD, optional: 0 };
    match scan_for(pagemap, range, wanted, |found, _| each(found)) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        other => other,
    }
}

/// Calls `each` for the parts of `range` that are there, in order, and with whether they
/// are write-protected by a userfaultfd.
pub(crate) fn protection(
    pagemap: &File,
    range: Range,
    mut each: impl FnMut(Range, bool),
) -> io::Result<()> {
    scan(pagemap, range, PAGE_IS_WRITTEN, |part, written| each(part, written == 0))
}

/// For each of the `count` pages from `address` on: whether it is there and
/// write-protected by a userfaultfd.
pub(crate) fn protected(pagemap: &File, address: u64, count: usize) -> io::Result<Vec<bool>> {
    const PROTECTED: u64 = 1 << 57;
    let mut bytes = vec![0; count * 8];
    let got = pagemap.read_at(&mut bytes, (address >> PAGE_SHIFT) * 8)?;
    if got == 0 {
        return Err(gone());
    }
    let words = bytes[..got].chunks_exact(8);
    let mut found: Vec<bool> = words
        .map(|word| u64::from_le_bytes(word.try_into().expect("chunks of eight")))
        .map(|word| is_there(word) && word & PROTECTED != 0)
        .collect();
    found.resize(count, false);
    Ok(found)
}

/// Calls `each` for the parts of `range` that are present, in order.
pub(crate) fn present(pagemap: &File, range: Range, mut each: impl FnMut(Range)) -> io::Result<()> {
    scan(pagemap, range, 0, |found, _| each(found))
}

/// Which pages a scan finds, by category: in `all` of these (or in none of those that
/// are `inverted`, too) and in `any` of these, and what is `told` of them. Without what
/// is `optional` where the kernel does not know it.
#[derive(Clone, Copy)]
struct Wanted {
    inverted: u64,
    all: u64,
    any: u64,
    told: u64,
    optional: u64,
}

/// Calls `each` for the parts of `range` that are there (or in the kernel's
/// swap), in order, with what of `asked` holds for all of a part. Guards hold
/// nothing and are not there.
fn scan(
    pagemap: &File,
    range: Range,
    asked: u64,
    mut each: impl FnMut(Range, u64),
) -> io::Result<()> {
    let there = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
    let wanted = Wanted {
        inverted: PAGE_IS_GUARD,
        all: PAGE_IS_GUARD,
        any: there,
        told: there | asked,
        optional: PAGE_IS_GUARD,
    };
    scan_for(pagemap, range, wanted, |part, told| each(part, told & asked))
}

fn scan_for(
    pagemap: &File,
    range: Range,
    mut wanted: Wanted,
    mut each: impl FnMut(Range, u64),
) -> io::Result<()> {
    let mut regions = [Region { start: 0, end: 0, categories: 0 }; REGIONS];
    let mut start = range.start;
    while start < range.end {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: 0,
            start,
            end: range.end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: REGIONS as u64,
            max_pages: 0,
            category_inverted: wanted.inverted,
            category_mask: wanted.all,
            category_anyof_mask: wanted.any,
            return_mask: wanted.told,
        };
        // SAFETY: `arg` is a pm_scan_arg of the size it names, and its vector has
        // room for as many regions as it says; both outlive the call.
        let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        if found < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            if wanted.optional != 0 && error.kind() == io::ErrorKind::InvalidInput {
                wanted.inverted &= !wanted.optional;
                wanted.all &= !wanted.optional;
                wanted.optional = 0;
                continue;
            }
            return Err(error);
        }
        for region in &regions[..found as usize] {
            each(Range { start: region.start, end: region.end }, region.categories);
        }
        if arg.walk_end <= start {
            break;
        }
        start = arg.walk_end;
    }
    is_alive(pagemap)
}

/// Whether the address space is still there. Linux 6.8 does not ask before it scans, and finds
/// nothing in one that is gone; 6.18 says so itself.
pub(crate) fn is_alive(pagemap: &File) -> io::Result<()> {
    let mut word = [0; 8];
    match pagemap.read_at(&mut word, 0)? {
        0 => Err(gone()),
        _ => Ok(()),
    }
}

/// Whether the page that a word of `/proc/PID/pagemap` is about is in DRAM or in the
/// kernel's swap.
///
/// A guard counts as swapped, to a type of its own, the last there is. It has a bit for
/// itself since 6.15; the type, which only a privileged reader is shown, tells it before.
pub(crate) const fn is_there(word: u64) -> bool {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const GUARD: u64 = 1 << 58;
    const TYPE: u64 = 0x1F;
    const MARKER_OF_A_GUARD: u64 = 1 << (2 + 5);
    let is_guard = word & GUARD != 0 || (word & TYPE == TYPE && word & MARKER_OF_A_GUARD != 0);
    word & PRESENT != 0 || (word & SWAPPED != 0 && !is_guard)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn own() -> crate::Process {
        crate::Process::open(std::process::id()).expect("this process")
    }

    #[test]
    fn a_few_pages_are_found_in_eight_tebibytes() {
        const BYTES: usize = 8 << 40;
        // SAFETY: a new private mapping that costs nothing until it is touched.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        // SAFETY: inside the mapping, of which no reference exists. Small pages,
        // so that a touch is one page.
        unsafe { libc::madvise(base, BYTES, libc::MADV_NOHUGEPAGE) };
        let start = base as u64;
        let touched = [0, 1, 5, 1 << 20, (1 << 30) + 7, (BYTES as u64 / PAGE) - 1];
        for page in touched {
            // SAFETY: as above.
            unsafe { (base as *mut u8).add((page * PAGE) as usize).write_volatile(1) };
        }
        let mut pages = Vec::new();
        let range = Range { start, end: start + BYTES as u64 };
        own()
            .present(range, |found| {
                pages.extend(
                    (found.start..found.end).step_by(PAGE as usize).map(|at| (at - start) / PAGE),
                );
            })
            .expect("this process can be looked at");
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(base, BYTES) };
        assert_eq!(pages, touched);
    }

    #[test]
    fn a_guard_is_not_there() {
        let memory = crate::OwnMemory::create(4).expect("memory");
        let start = memory.range().start;
        for page in 0..4 {
            // SAFETY: inside the mapping, of which no reference exists.
            unsafe { ((start + page * PAGE) as *mut u8).write_volatile(1) };
        }
        // SAFETY: as above. MADV_GUARD_INSTALL.
        if unsafe { libc::madvise((start + PAGE) as *mut libc::c_void, PAGE as usize, 102) } != 0 {
            return;
        }
        let (own, mut pages) = (own(), Vec::new());
        own.present(memory.range(), |part| pages.push((part.start, part.end)))
            .expect("this process can be looked at");
        assert_eq!(pages, [(start, start + PAGE), (start + 2 * PAGE, start + 4 * PAGE)]);
        let mut found = Vec::new();
        own.page_presence(memory.range(), |index, _| found.push(index)).expect("as above");
        assert_eq!(found, [0, 2, 3]);
        // As Linux 6.13 shows it, which has no bit for it: type 31, marker 4.
        assert!(!is_there(0x4000_0000_0000_009F));
        assert!(is_there(0x4000_0000_0000_0081), "swapped to the second file");
    }
}
