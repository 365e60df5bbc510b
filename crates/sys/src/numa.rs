//! Memory nodes: which there are, and where the pages of a process are.
//!
//! A move is the kernel's own (`move_pages(2)`): the page stays in place and keeps
//! its content and its protection; who touches it meanwhile waits a moment. So
//! nothing here can lose a byte, whatever it answers.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use strata_units::PAGE_SIZE;

use crate::Pidfd;

const NODES: &str = "/sys/devices/system/node";
/// Move pages that only this process maps; those of several stay.
const MPOL_MF_MOVE: libc::c_int = 1 << 1;
/// Vectors that the kernel takes in a call (`UIO_MAXIOV`).
const MOST_VECTORS: usize = 1024;
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// No status of the kernel's: it did not say.
const UNSAID: libc::c_int = libc::c_int::MIN;
/// Highest node number that a kernel can be built for.
pub const MOST_NODES: u32 = 1024;

/// Where a page is, or was left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PagePlace {
    /// On this node.
    Node(u32),
    /// Nowhere: not touched, discarded, or swapped out.
    Absent,
    /// It could not be moved, and is where it was: pinned, shared, no room there.
    Stayed,
}

/// Why nothing can be moved or found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeRefusal {
    /// The process is gone.
    Gone,
    /// No right to move pages of that process.
    Forbidden,
    /// There is no such node, or the process may not use it.
    NoNode,
    /// The kernel has no such call, or something else that a retry does not mend.
    Unable,
}

fn refusal() -> NodeRefusal {
    match io::Error::last_os_error().raw_os_error() {
        Some(libc::ESRCH) => NodeRefusal::Gone,
        Some(libc::EPERM) => NodeRefusal::Forbidden,
        Some(libc::ENODEV | libc::EACCES) => NodeRefusal::NoNode,
        _ => NodeRefusal::Unable,
    }
}

fn call(
    pid: u32,
    addresses: &[u64],
    nodes: Option<&[libc::c_int]>,
    status: &mut [libc::c_int],
) -> libc::c_long {
    assert!(status.len() == addresses.len(), "a status for each page");
    assert!(nodes.is_none_or(|nodes| nodes.len() == addresses.len()), "a node for each page");
    let nodes = nodes.map_or(std::ptr::null(), <[libc::c_int]>::as_ptr);
    // SAFETY: the kernel reads as many addresses and nodes as are named and writes
    // as many statuses; the slices have them (asserted) and outlive the call. The
    // addresses are the other process's: numbers to us.
    unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            pid,
            addresses.len(),
            addresses.as_ptr(),
            nodes,
            status.as_mut_ptr(),
            MPOL_MF_MOVE,
        )
    }
}

/// Moves the pages at `addresses` of process `pid` to `node`; what became of each.
///
/// # Errors
/// None was moved, for one reason that holds for all.
pub fn move_pages(pid: u32, addresses: &[u64], node: u32) -> Result<Vec<PagePlace>, NodeRefusal> {
    if addresses.is_empty() {
        return Ok(Vec::new());
    }
    let target = libc::c_int::try_from(node).map_err(|_| NodeRefusal::NoNode)?;
    let nodes = vec![target; addresses.len()];
    let mut status = vec![UNSAID; addresses.len()];
    let left = call(pid, addresses, Some(&nodes), &mut status);
    let why = (left < 0).then(refusal);
    if let Some(why @ (NodeRefusal::Gone | NodeRefusal::Forbidden | NodeRefusal::NoNode)) = why {
        return Err(why);
    }
    if left != 0 {
        // It gave up in the middle (no room there, a page that is busy), and of the
        // rest it says nothing: where they are, then.
        let found = find_pages(pid, addresses)?;
        let seen = |place| if place == PagePlace::Node(node) { place } else { PagePlace::Stayed };
        return Ok(found.into_iter().map(seen).collect());
    }
    let moved = status.into_iter().map(|status| match status {
        _ if status == target => PagePlace::Node(node),
        _ if status == -libc::ENOENT => PagePlace::Absent,
        _ => PagePlace::Stayed,
    });
    Ok(moved.collect())
}

/// Divides the huge pages in which `addresses` lie into small ones, as far as the kernel
/// can: `move_pages` moves a huge page whole, whichever part of it is named.
///
/// The kernel has no call for it. `MADV_COLD` on a part of a huge page divides it first
/// (`madvise_cold_or_pageout_pte_range`); what it does besides, to one page of each, is to
/// say that the page was not used lately. Content and protection stay. Needs
/// `CAP_SYS_NICE`. Nothing says which were divided: without the right, under a lock
/// (`mlock`) or while somebody else holds a part of one they stay as they are.
pub fn divide_huge_pages(process: &Pidfd, addresses: &[u64]) {
    let vector = |&address: &u64| libc::iovec { iov_base: address as *mut _, iov_len: PAGE_SIZE };
    let one_of_each: BTreeMap<u64, &u64> =
        addresses.iter().map(|address| (address / HUGE_PAGE_BYTES, address)).collect();
    let vectors: Vec<libc::iovec> = one_of_each.into_values().map(vector).collect();
    for mut left in vectors.chunks(MOST_VECTORS) {
        while !left.is_empty() {
            // SAFETY: a descriptor that is open for the call, and as many live vectors as
            // are named. What they name is the other process's, and keeps its content.
            let advised = unsafe {
                libc::syscall(
                    libc::SYS_process_madvise,
                    process.as_fd().as_raw_fd(),
                    left.as_ptr(),
                    left.len(),
                    libc::MADV_COLD,
                    0u32,
                )
            };
            let error = || io::Error::last_os_error().raw_os_error();
            match usize::try_from(advised) {
                Ok(bytes) if bytes >= PAGE_SIZE => {
                    left = &left[(bytes / PAGE_SIZE).min(left.len())..]
                }
                // The first is not there (any more), or locked: the others may be.
                Err(_) if matches!(error(), Some(libc::ENOMEM | libc::EINVAL)) => left = &left[1..],
                _ => return,
            }
        }
    }
}

/// Where the pages at `addresses` of process `pid` are.
///
/// # Errors
/// Nothing can be said of any.
pub fn find_pages(pid: u32, addresses: &[u64]) -> Result<Vec<PagePlace>, NodeRefusal> {
    if addresses.is_empty() {
        return Ok(Vec::new());
    }
    let mut status = vec![UNSAID; addresses.len()];
    if call(pid, addresses, None, &mut status) < 0 {
        return Err(refusal());
    }
    let place = |status| u32::try_from(status).map_or(PagePlace::Absent, PagePlace::Node);
    Ok(status.into_iter().map(place).collect())
}

/// A node of this machine's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryNode {
    /// Its number.
    pub number: u32,
    /// All its memory, bytes; 0 where it has none online.
    pub total_bytes: u64,
    /// What is free of it.
    pub free_bytes: u64,
    /// Whether processors belong to it.
    pub has_cpus: bool,
}

/// A node as it is now; None: there is none of that number, or it is offline.
#[must_use]
pub fn memory_node(number: u32) -> Option<MemoryNode> {
    memory_node_in(Path::new(NODES), number)
}

fn memory_node_in(root: &Path, number: u32) -> Option<MemoryNode> {
    let directory = root.join(format!("node{number}"));
    let meminfo = std::fs::read_to_string(directory.join("meminfo")).ok()?;
    let field = |name: &str| {
        let (_, rest) = meminfo.split_once(name)?;
        rest.split_ascii_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    let cpus = std::fs::read_to_string(directory.join("cpulist")).ok()?;
    Some(MemoryNode {
        number,
        total_bytes: field("MemTotal:")?,
        free_bytes: field("MemFree:")?,
        has_cpus: !cpus.trim().is_empty(),
    })
}

/// All nodes that are online, by number.
#[must_use]
pub fn memory_nodes() -> Vec<MemoryNode> {
    memory_nodes_in(Path::new(NODES))
}

fn memory_nodes_in(root: &Path) -> Vec<MemoryNode> {
    let online = std::fs::read_to_string(root.join("online")).unwrap_or_default();
    let mut nodes = Vec::new();
    for part in online.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else { continue };
        nodes.extend((first..=last.min(MOST_NODES)).filter_map(|n| memory_node_in(root, n)));
    }
    nodes
}

/// The node with processors that is nearest to `node`: where its pages go back to.
#[must_use]
pub fn home_of(node: u32) -> Option<u32> {
    home_in(Path::new(NODES), node)
}

fn home_in(root: &Path, node: u32) -> Option<u32> {
    let nodes = memory_nodes_in(root);
    let text = std::fs::read_to_string(root.join(format!("node{node}/distance")));
    // One number for each node that is online, in order.
    let distances: Vec<u32> = text
        .unwrap_or_default()
        .split_ascii_whitespace()
        .map(|word| word.parse().unwrap_or(u32::MAX))
        .collect();
    let far = |index: usize| distances.get(index).copied().unwrap_or(u32::MAX);
    let homes = nodes.iter().enumerate().filter(|(_, n)| n.has_cpus && n.total_bytes > 0);
    homes.min_by_key(|&(index, _)| far(index)).map(|(_, home)| home.number)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;

    use strata_units::PageBuffer;

    use super::*;
    use crate::OwnMemory;

    /// Two nodes with processors, one without, one without memory.
    fn machine(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("strata-{name}-{}", std::process::id()));
        let node = |number: u32, kib: u64, free: u64, cpus: &str, distance: &str| {
            let directory = root.join(format!("node{number}"));
            fs::create_dir_all(&directory).expect("a directory");
            let meminfo = format!(
                "Node {number} MemTotal:       {kib} kB\nNode {number} MemFree:   {free} kB\n"
            );
            fs::write(directory.join("meminfo"), meminfo).expect("written");
            fs::write(directory.join("cpulist"), format!("{cpus}\n")).expect("written");
            fs::write(directory.join("distance"), format!("{distance}\n")).expect("written");
        };
        node(0, 1000, 500, "0-3", "10 21 31 41");
        node(1, 2000, 900, "4-7", "21 10 17 41");
        node(2, 3000, 2800, "", "31 17 10 41");
        node(5, 0, 0, "8", "41 41 41 10");
        fs::write(root.join("online"), "0-2,5\n").expect("written");
        root
    }

    #[test]
    fn nodes_and_their_homes_are_read_from_the_kernels_files() {
        let root = machine("nodes");
        let nodes = memory_nodes_in(&root);
        let seen: Vec<_> = nodes.iter().map(|n| (n.number, n.total_bytes, n.has_cpus)).collect();
        let expected =
            [(0, 1000 << 10, true), (1, 2000 << 10, true), (2, 3000 << 10, false), (5, 0, true)];
        assert_eq!(seen, expected);
        assert_eq!(nodes[2].free_bytes, 2800 << 10);
        assert_eq!(home_in(&root, 2), Some(1));
        assert_eq!(memory_node_in(&root, 3), None);
        fs::remove_dir_all(&root).expect("removed");
        assert_eq!(memory_nodes_in(&root), []);
    }

    /// Whether the page at `address` of this process is a part of a huge page; None: this
    /// is not told here.
    fn is_of_a_huge_page(address: u64) -> Option<bool> {
        const FRAME: u64 = (1 << 55) - 1;
        const THP: u64 = 1 << 22;
        let number = |file: &str, at: u64| {
            let mut bytes = [0; 8];
            fs::File::open(file).ok()?.read_exact_at(&mut bytes, at * 8).ok()?;
            Some(u64::from_ne_bytes(bytes))
        };
        let entry = number("/proc/self/pagemap", address / PAGE_SIZE as u64)?;
        let frame = Some(entry & FRAME).filter(|&frame| frame != 0)?;
        Some(number("/proc/kpageflags", frame)? & THP != 0)
    }

    #[test]
    fn a_huge_page_is_divided_and_keeps_its_content() {
        const HUGE: usize = HUGE_PAGE_BYTES as usize;
        let memory = OwnMemory::create(3 * HUGE / PAGE_SIZE).expect("memory");
        let begin = memory.address(0).next_multiple_of(HUGE as u64);
        let first = (begin - memory.address(0)) as usize / PAGE_SIZE;
        // SAFETY: within memory that is ours, and advice keeps what it holds.
        unsafe { libc::madvise(begin as *mut _, 2 * HUGE, libc::MADV_HUGEPAGE) };
        let mut page = PageBuffer::zeroed();
        for index in first..first + 2 * HUGE / PAGE_SIZE {
            page.0.fill(index as u8);
            memory.write_page(index, &page);
        }
        let (here, next) = (begin + 7 * PAGE_SIZE as u64, begin + HUGE as u64);
        if (is_of_a_huge_page(here), is_of_a_huge_page(next)) != (Some(true), Some(true)) {
            return println!("skipped: no huge pages here, or nobody tells");
        }
        let nowhere = 4 * PAGE_SIZE as u64;
        let ours = Pidfd::open(std::process::id()).expect("a descriptor of ourselves");
        divide_huge_pages(&ours, &[nowhere, here - PAGE_SIZE as u64, here]);
        assert_eq!((is_of_a_huge_page(here), is_of_a_huge_page(next)), (Some(false), Some(true)));
        for index in first..first + 2 * HUGE / PAGE_SIZE {
            memory.read_page(index, &mut page);
            assert!(page.0.iter().all(|&byte| byte == index as u8));
        }
    }

    #[test]
    fn own_pages_are_found_and_a_move_loses_nothing() {
        let memory = OwnMemory::create(4).expect("memory");
        let mut page = PageBuffer::zeroed();
        for index in [0, 2] {
            page.0.fill(7 + index as u8);
            memory.write_page(index, &page);
        }
        let addresses: Vec<u64> = (0..3).map(|index| memory.address(index)).collect();
        let pid = std::process::id();
        let found = match find_pages(pid, &addresses) {
            Ok(found) => found,
            Err(why) => return println!("skipped: pages cannot be found here: {why:?}"),
        };
        let PagePlace::Node(here) = found[0] else { panic!("a touched page is nowhere") };
        assert_eq!(found, [PagePlace::Node(here), PagePlace::Absent, PagePlace::Node(here)]);
        // To where they are: the kernel looks at each and moves none.
        assert_eq!(move_pages(pid, &addresses, here), Ok(found));
        assert_eq!(move_pages(pid, &addresses, 900), Err(NodeRefusal::NoNode));
        assert_eq!(find_pages(u32::MAX >> 1, &addresses), Err(NodeRefusal::Gone));
        for index in [0, 2] {
            memory.read_page(index, &mut page);
            assert!(page.0.iter().all(|&byte| byte == 7 + index as u8));
        }
    }
}
