//! What can be learned of another process from outside, and its memory.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use crate::poll::poll_readable;
use crate::supervise::collect_by;
use crate::uffd::{Range, own};

/// One line of `/proc/PID/maps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// Its addresses.
    pub range: Range,
    /// Protection.
    pub readable: bool,
    /// Protection.
    pub writable: bool,
    /// Protection.
    pub executable: bool,
    /// Private (copy on write), not shared.
    pub private: bool,
    /// No file behind it, and not one of the kernel's own (`[stack]`,
    /// `[vdso]`): plain anonymous memory or the brk heap.
    pub anonymous: bool,
    /// A file, or a device, behind it.
    pub backed: bool,
    /// A mapping of /dev/zero.
    pub dev_zero: bool,
    /// Memory without a file, the main thread's stack included: what is lost
    /// with the process.
    pub fileless: bool,
    /// The ring of an asynchronous I/O context (`io_setup`): requests that were
    /// submitted there write to pages without a look at their protection.
    pub aio_ring: bool,
}

pub(crate) fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let range = Range {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
    };
    let flags = fields.next()?.as_bytes();
    let _offset = fields.next()?;
    let _device = fields.next()?;
    let inode = fields.next()?;
    let name = fields.next();
    let flag = |index: usize, letter: u8| flags.get(index) == Some(&letter);
    Some(Mapping {
        range,
        readable: flag(0, b'r'),
        writable: flag(1, b'w'),
        executable: flag(2, b'x'),
        private: flag(3, b'p'),
        anonymous: inode == "0"
            && name.is_none_or(|name| name == "[heap]" || name.starts_with("[anon:")),
        backed: inode != "0",
        dev_zero: inode != "0" && name == Some("/dev/zero"),
        fileless: inode == "0" && name.is_none_or(|name| !name.starts_with("[v")),
        aio_ring: name == Some("/[aio]"),
    })
}

/// The memory map of a process. What cannot be parsed is left out, so it is
/// not managed.
pub fn read_maps(pid: u32) -> io::Result<Vec<Mapping>> {
    Ok(fs::read_to_string(format!("/proc/{pid}/maps"))?.lines().filter_map(parse_mapping).collect())
}

/// A mapping's flags that the short map does not show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappingFlags {
    /// Its addresses.
    pub range: Range,
    /// A userfaultfd answers its missing pages.
    pub registered: bool,
    /// A forked child finds it empty (`MADV_WIPEONFORK`).
    pub wiped_on_fork: bool,
}

pub(crate) fn parse_mapping_flags(text: &str) -> Vec<MappingFlags> {
    let mut found = Vec::new();
    let mut range = None;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let Some(range) = range.take() else { continue };
            let has = |wanted: &str| flags.split_ascii_whitespace().any(|flag| flag == wanted);
            found.push(MappingFlags { range, registered: has("um"), wiped_on_fork: has("wf") });
        } else if let Some(mapping) = parse_mapping(line) {
            range = Some(mapping.range);
        }
    }
    found
}

fn meminfo(key: &str) -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    text.lines()
        .find_map(|line| {
            let rest = line.strip_prefix(key)?.strip_prefix(':')?;
            rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        })
        .map(|kib| kib << 10)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("no {key} in meminfo")))
}

/// The machine's memory, bytes.
pub fn total_bytes() -> io::Result<u64> {
    meminfo("MemTotal")
}

/// Memory that could be had without swapping, bytes.
pub fn available_bytes() -> io::Result<u64> {
    meminfo("MemAvailable")
}

/// The fields of a `/proc/…/stat` file from the third on, as proc(5) counts them:
/// the state. What comes before is the name, which may hold anything.
#[must_use]
pub fn stat_fields(text: &str) -> Option<std::str::SplitAsciiWhitespace<'_>> {
    Some(text[text.rfind(')')? + 1..].split_ascii_whitespace())
}

/// Field `number` of a `/proc/…/stat` file.
#[must_use]
pub fn stat_field(path: &str, number: usize) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    stat_fields(&text)?.nth(number - 3).map(str::to_owned)
}

/// What a thread has faulted, and where it ran last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ThreadFaults {
    /// Its number.
    pub tid: u32,
    /// All faults: those that a userfaultfd answers may count as minor ones.
    pub faults: u64,
    /// The CPU.
    pub cpu: u32,
}

/// A process's parent.
#[must_use]
pub fn parent_of(pid: u32) -> Option<u32> {
    stat_field(&format!("/proc/{pid}/stat"), 4)?.parse().ok()
}

/// When a process started, in the kernel's ticks since the machine did: with its
/// number, it is no other.
pub(crate) fn start_of(pid: u32) -> Option<u64> {
    stat_field(&format!("/proc/{pid}/stat"), 22)?.parse().ok()
}

/// A line by which [`noted`] finds the process again, if it is still the same.
#[must_use]
pub fn note_of(pid: u32) -> Option<String> {
    Some(format!("{pid} {}", start_of(pid)?))
}

/// The process of a line that [`note_of`] has made, while it is there.
#[must_use]
pub fn noted(line: &str) -> Option<(u32, Pidfd)> {
    let (pid, started) = line.trim_end().split_once(' ')?;
    let pid = pid.parse().ok()?;
    let pidfd = Pidfd::open(pid).ok()?;
    (start_of(pid)? == started.parse().ok()?).then_some((pid, pidfd))
}

/// Whether a process has ended and is not collected yet.
#[must_use]
pub fn is_zombie(pid: u32) -> bool {
    stat_field(&format!("/proc/{pid}/stat"), 3).is_some_and(|state| state == "Z")
}

/// Whether there is a process of that number, one that has ended and was not collected
/// left out.
#[must_use]
pub fn process_exists(pid: u32) -> bool {
    stat_field(&format!("/proc/{pid}/stat"), 3).is_some_and(|state| state != "Z" && state != "X")
}

/// Has the allocator give back what is freed rather than keep megabytes for each thread:
/// for a process in which many threads now and then need much. To be said before there are
/// threads.
pub fn keep_little_heap() {
    const MOST_ARENAS: libc::c_int = 4;
    const LARGE_BYTES: libc::c_int = 1 << 20;
    const KEPT_BYTES: libc::c_int = 2 << 20;
    for (what, value) in [
        (libc::M_ARENA_MAX, MOST_ARENAS),
        // Set, it does not grow with what was freed, nor does the other one.
        (libc::M_MMAP_THRESHOLD, LARGE_BYTES),
        (libc::M_TRIM_THRESHOLD, KEPT_BYTES),
    ] {
        // SAFETY: sets a parameter of the allocator's.
        unsafe { libc::mallopt(what, value) };
    }
}

/// Gives memory of this process that was freed back to the kernel; the allocator
/// would keep it.
pub fn trim_heap() {
    // SAFETY: takes the allocator's own locks and touches only free memory.
    unsafe { libc::malloc_trim(0) };
}

/// What the page table says of one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Presence {
    /// In DRAM or in the kernel's swap: touching it raises no missing fault.
    pub present: bool,
    /// Mapped by this process alone.
    pub exclusive: bool,
}

/// What came of reading another process's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadOutcome {
    /// All of it.
    Done,
    /// The process is gone or its memory is not what was expected.
    Failed,
}

/// Touches the page at `address` of process `pid`, and waits as long as whoever brings it
/// likes. What the page holds is dropped.
pub(crate) fn wait_for_page(pid: u32, address: u64) {
    let mut word = [0u8; 8];
    let local = libc::iovec { iov_base: word.as_mut_ptr().cast(), iov_len: word.len() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: word.len() };
    // SAFETY: `local` is a live exclusive buffer; the remote address is the other process's
    // and is checked by the kernel.
    unsafe {
        libc::process_vm_readv(pid as libc::pid_t, &raw const local, 1, &raw const remote, 1, 0)
    };
}

/// What [`Pidfd::signal`] is asked for here.
pub use libc::{SIGCONT, SIGHUP, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1, SIGUSR2};

/// A process that cannot be confused with a later one of the same number.
#[derive(Debug)]
pub struct Pidfd {
    fd: OwnedFd,
}

impl Pidfd {
    /// Opens a process by its number, now.
    pub fn open(pid: u32) -> io::Result<Self> {
        // SAFETY: two integers, returns a new descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0u32) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd: own(fd as RawFd) })
    }

    /// One that was opened earlier.
    #[must_use]
    pub fn adopt(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Whether the process has ended (it may still be a zombie).
    #[must_use]
    pub fn has_exited(&self) -> bool {
        self.is_readable_within(Duration::ZERO)
    }

    /// The same, waited for.
    #[must_use]
    pub fn exits_within(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        // A signal may cut a wait short.
        while !self.is_readable_within(deadline.saturating_duration_since(Instant::now())) {
            if Instant::now() >= deadline {
                return false;
            }
        }
        true
    }

    fn is_readable_within(&self, limit: Duration) -> bool {
        poll_readable([self.fd.as_fd()], Some(limit)).is_ok_and(|[polled]| polled.readable)
    }

    /// Collects the process if it has ended and is a child of this one; no matter
    /// if it is not.
    pub fn collect(&self) {
        collect_by(|| {
            // SAFETY: all zeroes is valid; the kernel writes at most that.
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            let options = libc::WEXITED | libc::WNOHANG;
            let fd = self.fd.as_raw_fd() as libc::id_t;
            // SAFETY: a descriptor that is open for the call, and a live struct; its
            // fields of an ended child are there, or zero.
            let (pid, how, code) = unsafe {
                libc::waitid(libc::P_PIDFD, fd, &raw mut info, options);
                (info.si_pid(), info.si_status(), info.si_code)
            };
            let status = match code {
                libc::CLD_EXITED => (how & 0xff) << 8,
                libc::CLD_DUMPED => how | 0x80,
                _ => how,
            };
            (pid > 0).then_some((pid.cast_unsigned(), status))
        });
    }

    /// Sends a signal. `false`: it is gone already.
    pub fn signal(&self, signal: i32) -> bool {
        // SAFETY: integers and a null siginfo, which means "as kill(2) would".
        let code = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.fd.as_raw_fd(),
                signal,
                std::ptr::null::<libc::siginfo_t>(),
                0u32,
            )
        };
        code == 0
    }
}

impl AsFd for Pidfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use strata_units::PAGE_SIZE;

    use super::*;
    use crate::Process;

    #[test]
    fn maps_are_told_apart() {
        let heap = parse_mapping("5581e000-5583f000 rw-p 00000000 00:00 0    [heap]");
        assert!(heap.is_some_and(|m| m.anonymous && m.writable && m.private));
        let stack = parse_mapping("7ffc0000-7ffc2000 rw-p 00000000 00:00 0    [stack]");
        assert!(stack.is_some_and(|m| !m.anonymous && m.fileless));
        let vdso = parse_mapping("7ffc3000-7ffc5000 r-xp 00000000 00:00 0    [vdso]");
        assert!(vdso.is_some_and(|m| !m.anonymous && !m.fileless));
        let file = parse_mapping("7f0000-7f1000 rw-p 00000000 fe:00 131 /lib/x (deleted)");
        assert!(file.is_some_and(|m| !m.anonymous));
        let shared = parse_mapping("7f0000-7f1000 rw-s 00000000 00:01 9 /memfd:x (deleted)");
        assert!(shared.is_some_and(|m| !m.private && !m.anonymous));
        let ring = parse_mapping("7f0000-7f1000 rw-s 00000000 00:0f 77 /[aio] (deleted)");
        assert!(ring.is_some_and(|m| m.aio_ring) && shared.is_some_and(|m| !m.aio_ring));
        assert_eq!(parse_mapping("garbage"), None);
    }

    #[test]
    fn faults_are_counted_by_thread() {
        use std::process::{Command, Stdio};
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("a program of one thread");
        let found = Process::open(child.id()).expect("a child").thread_faults();
        drop(child.stdin.take());
        child.wait().expect("it ends with its input");
        let [thread] = found[..] else { panic!("{found:?}") };
        assert_eq!(thread.tid, child.id());
        assert!(thread.faults > 0, "a program faults when it starts");
    }

    #[test]
    fn flags_follow_their_mapping() {
        let text = "7f0000-7f2000 rw-p 00000000 00:00 0 \nRss: 4 kB\nVmFlags: rd wr mr um \n\
            7f2000-7f3000 rw-p 00000000 00:00 0 \nRss: 4 kB\nVmFlags: rd wf \n";
        let found = parse_mapping_flags(text);
        assert_eq!(found.len(), 2);
        assert!(found[0].registered && !found[0].wiped_on_fork);
        assert!(!found[1].registered && found[1].wiped_on_fork);
        assert_eq!(found[1].range, Range { start: 0x7f_2000, end: 0x7f_3000 });
        let own = Process::open(std::process::id()).expect("this process");
        assert!(own.mapping_flags().is_ok_and(|flags| flags.len() > 5));
    }

    #[test]
    fn own_memory_is_present_once_touched() {
        let buffer = vec![1u8; 64 * PAGE_SIZE];
        let start = (buffer.as_ptr() as u64).next_multiple_of(PAGE_SIZE as u64);
        let range = Range { start, end: start + 63 * PAGE_SIZE as u64 };
        let mut seen = 0;
        let own = Process::open(std::process::id()).expect("this process");
        own.page_presence(range, |_, presence| {
            assert!(presence.present);
            seen += 1;
        })
        .expect("own pagemap is readable");
        assert_eq!(seen, 63);
        assert!(own.anonymous_rss().expect("statm") > 63 * PAGE_SIZE as u64);
    }

    #[test]
    fn reads_itself() {
        let data: Vec<u8> = (0..3 * PAGE_SIZE).map(|i| (i * 7) as u8).collect();
        let at = data.as_ptr() as u64;
        let page = PAGE_SIZE as u64;
        let runs = [
            Range { start: at + 2 * page, end: at + 3 * page },
            Range { start: at, end: at + page },
        ];
        let mut buffer = vec![0; 2 * PAGE_SIZE];
        let own = Process::open(std::process::id()).expect("this process");
        assert_eq!(own.read_runs(&runs, &mut buffer), ReadOutcome::Done);
        assert_eq!(buffer[..PAGE_SIZE], data[2 * PAGE_SIZE..]);
        assert_eq!(buffer[PAGE_SIZE..], data[..PAGE_SIZE]);
        let nowhere = [Range { start: page, end: 2 * page }];
        let mut buffer = vec![0; PAGE_SIZE];
        assert_eq!(own.read_runs(&nowhere, &mut buffer), ReadOutcome::Failed);
    }
}
