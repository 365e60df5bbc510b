//! Looks for what CRIU cannot take, before anything is frozen.
//!
//! It reads `/proc` and the kernel's list of unix sockets. The tree runs on
//! meanwhile, so what it opens a moment later is found by CRIU itself: then the
//! dump fails, and the tree runs on as well.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::{fs, io};

use strata_sys::{UnixConnection, available_bytes, enter_network_of, read_maps, unix_connections};
use strata_units::{ByteSize, PAGE_SIZE};

use crate::connections;
use crate::processes::{lives_elsewhere, session_is_led_from_outside, tracer};

/// Private memory for which CRIU allocates a byte before it looks whether there
/// is anything in it: 16 bytes for every page (`create_page_pipe`, seen to fail
/// at 8 TiB).
const RESERVED_PER_BYTE: u64 = PAGE_SIZE as u64 / 16;

/// Something that keeps a process from being dumped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// The process.
    pub pid: u32,
    /// Its descriptor, if that is it.
    pub descriptor: Option<u32>,
    /// What it is, and why not.
    pub what: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {}", self.pid)?;
        if let Some(descriptor) = self.descriptor {
            write!(f, ", descriptor {descriptor}")?;
        }
        write!(f, ": {}", self.what)
    }
}

/// What a look at the processes found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Survey {
    /// What cannot be taken; none: go on.
    pub refusals: Vec<Refusal>,
    /// Inodes of their unix sockets that are connected to outsiders. A dump
    /// takes them; in what is restored from it they are closed.
    pub outside_connections: Vec<u32>,
    /// Whether they have TCP connections to each other.
    pub inside_connections: bool,
}

/// Anonymous files that CRIU has no image for.
const ANONYMOUS: [(&str, &str); 6] = [
    ("[io_uring]", "an io_uring ring, which no dump can hold"),
    ("[userfaultfd]", "a userfaultfd of the program's own"),
    ("[perf_event]", "a performance counter"),
    ("bpf-prog", "a BPF program"),
    ("[secretmem]", "secret memory"),
    ("[vfio-device]", "a device"),
];

/// Character devices that CRIU opens again (majors and minors): memory devices
/// that hold no state, and terminals.
const DEVICES: [(u64, Option<u64>); 11] = [
    (1, Some(3)),    // null
    (1, Some(5)),    // zero
    (1, Some(7)),    // full
    (1, Some(8)),    // random
    (1, Some(9)),    // urandom
    (1, Some(11)),   // kmsg
    (4, None),       // virtual terminals
    (5, None),       // tty, console, ptmx
    (10, Some(200)), // tun
    (88, None),      // pty slaves, old numbers
    (136, None),     // pty slaves
];

/// Largest deleted file that goes into a dump, bytes; what `--ghost-limit` says.
pub(crate) const GHOST_LIMIT: u64 = 64 << 20;

/// Majors of pty slaves beyond the first.
const PTY_MAJORS: std::ops::RangeInclusive<u64> = 136..=143;

fn major_minor(device: u64) -> (u64, u64) {
    let major = (device >> 8 & 0xfff) | (device >> 32 & !0xfff);
    (major, (device & 0xff) | (device >> 12 & !0xff))
}

fn is_plain_device(device: u64) -> bool {
    let (major, minor) = major_minor(device);
    PTY_MAJORS.contains(&major)
        || DEVICES.iter().any(|(known, one)| major == *known && one.is_none_or(|one| one == minor))
}

/// The inode in `socket:[123]`.
fn socket_inode(link: &str) -> Option<u32> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// The value of a line of `/proc/PID/fdinfo/FD`.
fn descriptor_info(pid: u32, fd: u32, key: &str) -> Option<String> {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
    info.lines().find_map(|line| Some(line.strip_prefix(key)?.trim().to_owned()))
}

/// The numbers of what is mounted where the process lives.
fn mounts_of(pid: u32) -> io::Result<BTreeSet<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    let number = |line: &str| line.split_ascii_whitespace().next().map(str::to_owned);
    Ok(text.lines().filter_map(number).collect())
}

/// Why a descriptor that points to `link` cannot be taken.
fn objection(
    pid: u32,
    fd: u32,
    link: &str,
    tree: &[u32],
    mounts: &BTreeSet<String>,
) -> Option<String> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};

    if let Some(name) = link.strip_prefix("anon_inode:") {
        if name == "[pidfd]" {
            let other = descriptor_info(pid, fd, "Pid:")?;
            let inside = other.parse().is_ok_and(|other| tree.contains(&other));
            return (!inside).then(|| format!("a pidfd of process {other}, which is not its own"));
        }
        let known = ANONYMOUS.iter().find(|(kind, _)| name.contains(kind));
        return known.map(|(_, what)| format!("{what} ({link})"));
    }
    if link.starts_with("/secretmem") {
        return Some("secret memory (memfd_secret)".to_owned());
    }
    if link.starts_with("socket:") || link.starts_with("pipe:") || link.starts_with("/memfd:") {
        return None;
    }
    if descriptor_info(pid, fd, "mnt_id:").is_some_and(|mount| !mounts.contains(&mount)) {
        return Some(format!("{link}, opened in another mount namespace"));
    }
    let metadata = fs::metadata(format!("/proc/{pid}/fd/{fd}")).ok()?;
    let kind = metadata.file_type();
    if kind.is_block_device() || kind.is_char_device() && !is_plain_device(metadata.rdev()) {
        let (major, minor) = major_minor(metadata.rdev());
        return Some(format!("the device {link} ({major}:{minor})"));
    }
    if kind.is_file() && metadata.nlink() == 0 && metadata.len() > GHOST_LIMIT {
        let mib = GHOST_LIMIT >> 20;
        return Some(format!(
            "a deleted file of {} bytes ({link}; up to {mib} MiB)",
            metadata.len()
        ));
    }
    None
}

/// Open descriptors of a process and where they point. A thread with a table
/// of its own is not seen (nor does CRIU see it).
fn descriptors(pid: u32) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        // One that was closed in between is none.
        if let (Some(number), Ok(link)) = (number, fs::read_link(entry.path())) {
            found.push((number, link));
        }
    }
    found.sort();
    Ok(found)
}

/// System V shared memory, by its line in `/proc/PID/maps`.
fn shared_segment(maps: &str) -> Option<&str> {
    let names = maps.lines().filter_map(|line| line.split_ascii_whitespace().nth(5));
    names.into_iter().find(|name| name.starts_with("/SYSV"))
}

/// The connections in the network namespace of a process.
fn connections_around(pid: u32) -> io::Result<Vec<UnixConnection>> {
    if !lives_elsewhere(pid) {
        return unix_connections();
    }
    let look = move || enter_network_of(pid).and_then(|()| unix_connections());
    let thread = std::thread::Builder::new().spawn(look)?;
    thread.join().map_err(|_| io::Error::other("the look at unix sockets panicked"))?
}

/// Looks at all processes of one tree, its root first.
///
/// # Errors
/// A process is gone or may not be looked at, or the kernel does not list unix
/// sockets.
pub fn preflight(pids: &[u32]) -> io::Result<Survey> {
    let mut survey = Survey::default();
    let mut sockets = Vec::new();
    for &pid in pids {
        let mut refuse = |descriptor: Option<u32>, what: String| {
            survey.refusals.push(Refusal { pid, descriptor, what });
        };
        match tracer(pid) {
            Some(0) | None => {}
            Some(by) => refuse(None, format!("process {by} traces it (a debugger?)")),
        }
        if session_is_led_from_outside(pid) {
            let what =
                "its session is led from outside of its pid namespace (start it with setsid)";
            refuse(None, what.to_owned());
        }
        let open = descriptors(pid)?;
        // One that has ended has none, and no mounts either.
        let mounts = if open.is_empty() { BTreeSet::new() } else { mounts_of(pid)? };
        for (fd, link) in open {
            let link = link.to_string_lossy();
            if let Some(what) = objection(pid, fd, &link, pids, &mounts) {
                refuse(Some(fd), what);
            }
            sockets.extend(socket_inode(&link).map(|inode| (pid, fd, inode)));
        }
        if let Some(name) = shared_segment(&fs::read_to_string(format!("/proc/{pid}/maps"))?) {
            refuse(None, format!("System V shared memory ({name})"));
        }
    }
    let available = available_bytes()?;
    for &pid in pids {
        let mappings = read_maps(pid)?;
        if mappings.iter().any(|mapping| mapping.aio_ring) {
            let what = "asynchronous I/O (io_setup), whose requests no dump can hold".to_owned();
            survey.refusals.push(Refusal { pid, descriptor: None, what });
        }
        let reserved: u64 = mappings
            .iter()
            .filter(|mapping| mapping.private)
            .map(|mapping| mapping.range.len())
            .sum();
        let needed = reserved / RESERVED_PER_BYTE;
        if needed > available / 2 {
            let what = format!(
                "{} of address space that it reserves (CRIU would take {} of memory to list its pages)",
                ByteSize(reserved),
                ByteSize(needed)
            );
            survey.refusals.push(Refusal { pid, descriptor: None, what });
        }
    }
    let own: BTreeSet<u32> = sockets.iter().map(|(_, _, inode)| *inode).collect();
    if let Some(root) = pids.first() {
        survey.inside_connections = connections::are_inside(*root, &own)?;
    }
    let connections = pids.first().map_or(Ok(Vec::new()), |root| connections_around(*root))?;
    for connection in connections.iter().filter(|found| own.contains(&found.inode)) {
        if connection.peer == 0 || own.contains(&connection.peer) {
            continue;
        }
        if connection.datagram {
            let place = sockets.iter().find(|(_, _, inode)| *inode == connection.inode);
            if let Some((pid, fd, _)) = place {
                let what = "a datagram socket connected to another program".to_owned();
                survey.refusals.push(Refusal { pid: *pid, descriptor: Some(*fd), what });
            }
        } else {
            survey.outside_connections.push(connection.inode);
        }
    }
    Ok(survey)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    fn own() -> u32 {
        std::process::id()
    }

    #[test]
    fn device_numbers_are_split_as_the_kernel_does() {
        assert_eq!(major_minor(0x0103), (1, 3));
        assert_eq!(major_minor((0x12 << 8) | 0x34 | (0x5 << 20)), (0x12, 0x534));
        assert!(is_plain_device(0x0103) && !is_plain_device(0x0a00 | 232));
        assert!(is_plain_device(137 << 8 | 4));
    }

    #[test]
    fn a_look_at_ourselves_names_what_is_open() {
        let (inside, other) = UnixStream::pair().expect("a pair");
        let null = File::open("/dev/null").expect("null");
        let survey = preflight(&[own()]).expect("a look");
        let refused = |survey: &Survey, fd: i32| {
            survey.refusals.iter().any(|r| r.descriptor == u32::try_from(fd).ok())
        };
        assert!(!refused(&survey, null.as_raw_fd()));
        assert!(!refused(&survey, inside.as_raw_fd()) && !refused(&survey, other.as_raw_fd()));
        let Ok(device) = File::open("/dev/loop-control") else {
            return println!("skipped: no /dev/loop-control to open here");
        };
        let survey = preflight(&[own()]).expect("a look");
        assert!(refused(&survey, device.as_raw_fd()), "{survey:?}");
        assert!(survey.refusals.iter().any(|r| r.to_string().contains("/dev/loop-control")));
    }

    #[test]
    fn what_was_opened_behind_other_mounts_is_named() {
        // Where there is no way to a mount namespace of its own, the shell says so.
        let look = "exec 9</dev/null && exec unshare --mount sleep 60";
        let mut child = std::process::Command::new("sh").args(["-c", look]).spawn().expect("sh");
        let comm = || fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap_or_default();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while comm().trim() != "sleep" && end > std::time::Instant::now() && !comm().is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let found = preflight(&[child.id()]);
        let ended = child.try_wait().expect("a look").is_some();
        child.kill().expect("kill");
        child.wait().expect("wait");
        if ended {
            return println!("skipped: no mount namespace to be had here");
        }
        let refusals = found.expect("a look").refusals;
        let named = refusals.iter().find(|refusal| refusal.descriptor == Some(9));
        let text = named.expect("it is refused").to_string();
        assert!(text.ends_with("/dev/null, opened in another mount namespace"), "{text}");
    }

    #[test]
    fn connections_to_outsiders_are_told_from_those_inside() {
        use std::os::unix::fs::MetadataExt;
        let inode =
            |fd: i32| fs::metadata(format!("/proc/self/fd/{fd}")).expect("its inode").ino() as u32;
        let (inside, _other) = UnixStream::pair().expect("a pair");
        let (outward, theirs) = UnixStream::pair().expect("a pair");
        // The other end belongs to a child, and then to nobody else.
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .stdin(std::os::fd::OwnedFd::from(theirs))
            .spawn()
            .expect("sleep");
        let survey = preflight(&[own()]).expect("a look");
        assert!(survey.outside_connections.contains(&inode(outward.as_raw_fd())));
        assert!(!survey.outside_connections.contains(&inode(inside.as_raw_fd())));
        let both = preflight(&[own(), child.id()]).expect("a look");
        assert!(!both.outside_connections.contains(&inode(outward.as_raw_fd())));
        child.kill().expect("kill");
        child.wait().expect("wait");
        let (datagram, _end) = UnixDatagram::pair().expect("a pair");
        let survey = preflight(&[own()]).expect("a look");
        let fd = u32::try_from(datagram.as_raw_fd()).ok();
        assert!(!survey.refusals.iter().any(|r| r.descriptor == fd), "both ends are ours");
    }

    #[test]
    fn shared_segments_are_found_by_name() {
        let line = "7f00-7f01 rw-s 00000000 00:01 5 /SYSV00000000 (deleted)";
        let other = "7f00-7f01 rw-p 00000000 00:00 0 [heap]\n7f00-7f01 rw-p 00000000 00:00 0";
        assert_eq!(shared_segment(&format!("{other}\n{line}")), Some("/SYSV00000000"));
        assert_eq!(shared_segment(other), None);
    }
}
