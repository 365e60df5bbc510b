//! What `/proc` says about processes and the machine: CPU time, memory, and
//! which core a thread may use. Reads only, except for [`pin_self`] and
//! [`pin_process`].

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use serde::Serialize;
use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::FileExt,
};
use strata_units::PAGE_SIZE;

/// Memory of one process in bytes, from `/proc/PID/status`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Memory {
    /// Anonymous pages in DRAM.
    pub anonymous_bytes: u64,
    /// Shared-memory pages in DRAM (memfd, tmpfs) that it has mapped.
    pub shared_bytes: u64,
    /// Pages in swap.
    pub swapped_bytes: u64,
}

/// Times of one process, from `/proc/PID/stat`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Times {
    /// User and system time of all its threads, the dead ones included.
    pub cpu_ns: u64,
    /// Faults that needed the swap or a file.
    pub major_faults: u64,
    /// When it started, in ticks since boot: tells a pid from its next user.
    pub start_ticks: u64,
    /// Its parent.
    pub parent: u32,
}

fn tick_ns() -> u64 {
    1_000_000_000 / rustix::param::clock_ticks_per_second()
}

fn parse_times(stat: &str) -> Option<Times> {
    // The name in parentheses may itself hold spaces and parentheses.
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(Times {
        parent: number(1)? as u32,
        major_faults: number(9)?,
        cpu_ns: (number(11)? + number(12)?) * tick_ns(),
        start_ticks: number(19)?,
    })
}

/// Ended, but not yet collected by its parent.
pub(crate) fn is_zombie(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rfind(')').is_some_and(|end| stat[end + 1..].starts_with(" Z")))
}

/// Somebody traces it: CRIU does from before it stops until it lets go, while
/// the state changes with what it has the process do.
pub(crate) fn is_traced(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| has_tracer(&status))
}

fn has_tracer(status: &str) -> bool {
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.is_some_and(|tracer| tracer.trim() != "0")
}

/// None when the process is gone.
pub(crate) fn times(pid: u32) -> Option<Times> {
    parse_times(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Which pages of this process are in place, from `/proc/self/pagemap`.
pub(crate) struct Pagemap {
    file: File,
}

impl Pagemap {
    pub(crate) fn open() -> Result<Self> {
        let file = File::open("/proc/self/pagemap").context("open /proc/self/pagemap")?;
        Ok(Self { file })
    }

    /// The entry of the page with this address, as the kernel documents it
    /// (`Documentation/admin-guide/mm/pagemap.rst`).
    pub(crate) fn entry(&self, address: usize) -> Result<u64> {
        let mut entry = [0; 8];
        self.file
            .read_exact_at(&mut entry, (address / PAGE_SIZE) as u64 * 8)
            .context("read /proc/self/pagemap")?;
        Ok(u64::from_ne_bytes(entry))
    }

    /// Whether reading there needs no fault.
    pub(crate) fn is_present(&self, address: usize) -> Result<bool> {
        const PRESENT: u64 = 1 << 63;
        Ok(self.entry(address)? & PRESENT != 0)
    }
}

fn parse_memory(status: &str) -> Memory {
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| {
                line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok()
            })
            .map_or(0, |kib: u64| kib * 1024)
    };
    Memory {
        anonymous_bytes: field("RssAnon:"),
        shared_bytes: field("RssShmem:"),
        swapped_bytes: field("VmSwap:"),
    }
}

/// All zero when the process is gone.
pub(crate) fn memory(pid: u32) -> Memory {
    fs::read_to_string(format!("/proc/{pid}/status"))
        .map_or_else(|_| Memory::default(), |s| parse_memory(&s))
}

/// What a process has had read from disks, and written to them; nothing once it is gone.
pub(crate) fn moved_bytes(pid: u32) -> (u64, u64) {
    parse_moved(&fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default())
}

fn parse_moved(io: &str) -> (u64, u64) {
    let field = |name: &str| {
        let line = io.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.trim().parse().ok()).unwrap_or(0)
    };
    (field("read_bytes:"), field("write_bytes:"))
}

fn parse_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// DRAM that programs could still have without swapping, as the kernel
/// estimates it.
pub(crate) fn available_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    parse_available(&text).context("/proc/meminfo does not say what is available")
}

/// Free memory that the kernel does not count as free: on its CPUs' own lists, which
/// hold much of what was freed lately, and give it back bit by bit.
pub(crate) fn listed_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/zoneinfo").context("read /proc/zoneinfo")?;
    Ok(parse_listed_pages(&text) * PAGE_SIZE as u64)
}

fn parse_listed_pages(zoneinfo: &str) -> u64 {
    let counts = zoneinfo.lines().filter_map(|line| line.trim().strip_prefix("count:"));
    counts.filter_map(|count| count.trim().parse::<u64>().ok()).sum()
}

fn parse_machine_busy(stat: &str) -> Option<u64> {
    let line = stat.lines().find(|line| line.starts_with("cpu "))?;
    let ticks: Vec<u64> =
        line.split_ascii_whitespace().skip(1).map_while(|field| field.parse().ok()).collect();
    // user nice system idle iowait irq softirq
    let busy = [0usize, 1, 2, 5, 6].iter().map(|&index| ticks.get(index)).sum::<Option<u64>>()?;
    Some(busy * tick_ns())
}

/// CPU time that the whole machine spent on anything, kernel threads included.
pub(crate) fn machine_busy_ns() -> u64 {
    fs::read_to_string("/proc/stat").ok().and_then(|s| parse_machine_busy(&s)).unwrap_or(0)
}

fn parse_cores(stat: &str) -> usize {
    let is_core = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    stat.lines().filter(is_core).count()
}

/// Cores of the whole machine, whichever of them this thread may use.
pub(crate) fn machine_cores() -> usize {
    parse_cores(&fs::read_to_string("/proc/stat").unwrap_or_default()).max(1)
}

/// All processes that there are now.
pub(crate) fn all() -> Vec<u32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

/// A process and all its descendants that are alive now.
pub(crate) fn family(root: u32) -> Vec<u32> {
    let mut members = BTreeSet::from([root]);
    let all: Vec<(u32, u32)> =
        all().into_iter().filter_map(|pid| Some((pid, times(pid)?.parent))).collect();
    // Parents need not come before their children in the listing.
    loop {
        let before = members.len();
        for &(pid, parent) in &all {
            if members.contains(&parent) {
                members.insert(pid);
            }
        }
        if members.len() == before {
            return members.into_iter().collect();
        }
    }
}

/// Cores that this process may use, in order.
pub(crate) fn allowed_cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

fn only(core: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(core);
    set
}

/// Keeps the calling thread, and those it will make, on one core.
pub(crate) fn pin_self(core: usize) -> Result<()> {
    sched_setaffinity(None, &only(core)).with_context(|| format!("pin to core {core}"))
}

/// Lets the calling thread use the given cores again.
pub(crate) fn unpin_self(cores: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &core in cores {
        set.set(core);
    }
    sched_setaffinity(None, &set).context("undo the pinning")
}

/// Keeps every thread that a process has now on one core.
pub(crate) fn pin_process(pid: u32, core: usize) -> Result<()> {
    for entry in fs::read_dir(format!("/proc/{pid}/task")).context("list threads")? {
        let name = entry?.file_name();
        let Some(tid) = name.to_str().and_then(|text| text.parse::<i32>().ok()) else { continue };
        let tid = Pid::from_raw(tid).context("a thread id is never zero")?;
        match sched_setaffinity(Some(tid), &only(core)) {
            // The thread ended between the listing and now.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error).with_context(|| format!("pin process {pid}")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_on_the_lists_of_cpus_are_summed() {
        let zones = "Node 0, zone DMA32\n  pages free 7\n    cpu: 0\n              count:    12\n\
            \x20             high:    99\n    cpu: 1\n              count: 30\n";
        assert_eq!(parse_listed_pages(zones), 42);
        assert!(listed_bytes().is_ok_and(|bytes| bytes < 1 << 40));
    }

    #[test]
    fn stat_lines_with_hostile_names() {
        let line = "42 (a) b (c) S 7 1 1 0 -1 4194560 100 0 13 0 250 50 0 0 20 0 4 0 98765 1 2 3";
        let found = parse_times(line).expect("parses");
        assert_eq!(found.parent, 7);
        assert_eq!(found.major_faults, 13);
        assert_eq!(found.cpu_ns, 300 * tick_ns());
        assert_eq!(found.start_ticks, 98_765);
        assert_eq!(parse_times("42 (x S 7"), None);
    }

    #[test]
    fn status_fields() {
        let status = "Name:\tredis\nRssAnon:\t    1000 kB\nRssShmem:\t 8 kB\nVmSwap:\t 4 kB\n";
        let expected =
            Memory { anonymous_bytes: 1_024_000, shared_bytes: 8192, swapped_bytes: 4096 };
        assert_eq!(parse_memory(status), expected);
        assert_eq!(parse_memory("Name:\tkthreadd\n"), Memory::default());
    }

    #[test]
    fn a_tracer_is_seen() {
        assert!(has_tracer("State:\tS (sleeping)\nTracerPid:\t812\n"));
        assert!(!has_tracer("Name:\tx\nTracerPid:\t0\n"));
        assert!(!has_tracer("Name:\tx\n"));
    }

    #[test]
    fn what_is_available_is_read() {
        let text = "MemTotal:  900 kB\nMemAvailable:   21 kB\nBuffers: 3 kB\n";
        assert_eq!(parse_available(text), Some(21 * 1024));
        assert_eq!(parse_available("MemTotal: 900 kB\n"), None);
    }

    #[test]
    fn idle_and_stolen_time_is_not_busy() {
        let stat = "cpu  10 1 20 5000 300 2 3 999 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(parse_machine_busy(stat), Some(36 * tick_ns()));
        assert_eq!((parse_cores(stat), parse_cores("cpu  1\ncpu0 1\ncpu11 1\nctxt 7\n")), (1, 2));
    }

    #[test]
    fn touched_pages_are_present() {
        let pagemap = Pagemap::open().expect("there is one");
        let bytes = vec![0u8; 64 << 20];
        let last = bytes.as_ptr() as usize + bytes.len() - 1;
        // Fresh from the kernel, unless it gives huge pages.
        let fresh = pagemap.is_present(last).expect("read");
        let bytes = vec![1u8; 1 << 20];
        let touched = bytes.as_ptr() as usize + bytes.len() / 2;
        assert!(pagemap.is_present(touched).expect("read") && !fresh);
    }

    #[test]
    fn this_process_is_found() {
        let me = std::process::id();
        assert!(times(me).is_some_and(|times| times.start_ticks > 0));
        assert!(memory(me).anonymous_bytes > 0);
        assert!(family(me).contains(&me));
        assert!(!allowed_cores().is_empty());
    }
}
