//! Keeps CRIU from handling memory that the caller brings anyway.
//!
//! A lazy dump leaves memory out of the images and yet takes every resident
//! page into pipes while the tree stands frozen: about 0.1 s a GiB. It asks with
//! the ioctl PAGEMAP_SCAN where pages are. For big private anonymous ranges that
//! question is answered here, with "nowhere". A restore registers them with its
//! userfaultfd all the same, so the caller must have all of them, stacks of
//! threads included.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use strata_sys::{IoctlCall, IoctlListener, Launch, Range, poll_readable, read_maps};

use crate::processes::{inner_number, status};

/// `PAGEMAP_SCAN` and its `struct pm_scan_arg` (kernel's `linux/fs.h`).
const PAGEMAP_SCAN: u32 = 0xc060_6610;
const ARGUMENT_START: u64 = 16;
const ARGUMENT_WALK_END: u64 = 32;

/// Smaller ranges are left to CRIU: to ask us costs more than the pages.
const SMALLEST_BYTES: u64 = 1 << 20;

/// Whether nothing can be hidden of a process: CRIU could not go on with a
/// filter of ours on it (the process has a seccomp filter itself, which a tracer
/// under one may not suspend), or it must see pages (locked ones, which it
/// restores itself).
fn must_see(pid: u32) -> bool {
    let says = |key, usual: &str| status(pid, key).is_none_or(|value| value == usual);
    !(says("Seccomp", "0") && says("VmLck", "0 kB"))
}

/// Puts the filter on CRIU. `None`: for these processes it must see everything.
pub(crate) fn prepare(launch: &mut Launch, pids: &[u32]) -> io::Result<Option<UnixStream>> {
    if pids.iter().any(|pid| must_see(*pid)) {
        return Ok(None);
    }
    let (ours, theirs) = UnixStream::pair()?;
    launch.ask_about_ioctl(PAGEMAP_SCAN, theirs);
    Ok(Some(ours))
}

/// Answers until CRIU has ended; about `pids` only.
pub(crate) fn answer(channel: &UnixStream, pids: &[u32]) -> io::Result<()> {
    let listener = IoctlListener::accept(channel)?;
    let numbers = pids.iter().filter_map(|pid| Some((inner_number(*pid)?, *pid))).collect();
    let answers = move || {
        let mut hider = Hider { numbers, ranges: HashMap::new(), memory: None };
        // An error is the end: the listener closes with us, CRIU's question
        // fails, and so does the dump; the tree runs on.
        while let Ok([polled]) = poll_readable([listener.as_fd()], None) {
            if !polled.readable {
                return;
            }
            let Ok(call) = listener.receive() else { return };
            let Some(call) = call else { continue };
            let value = hider.hide(call).then_some(0);
            if listener.answer(call, value).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("criu-pagemap".to_owned()).spawn(answers)?;
    Ok(())
}

/// What was looked up once for each process; the tree stands still by then.
#[derive(Debug)]
struct Hider {
    /// By the numbers that CRIU knows them by: those in their own namespace.
    numbers: HashMap<u32, u32>,
    ranges: HashMap<u32, Vec<Range>>,
    /// CRIU's own memory, where the questions are.
    memory: Option<File>,
}

/// Which process's pagemap a descriptor of CRIU is, by its inner number.
fn pagemap_of(call: IoctlCall) -> Option<u32> {
    let link = fs::read_link(format!("/proc/{}/fd/{}", call.thread, call.fd)).ok()?;
    let name = link.to_str()?.strip_suffix("/pagemap")?;
    name.rsplit('/').next()?.parse().ok()
}

/// Private anonymous memory, neighbours joined.
fn private_memory(pid: u32) -> Vec<Range> {
    let mut found: Vec<Range> = Vec::new();
    for mapping in read_maps(pid).unwrap_or_default() {
        if !(mapping.private && mapping.anonymous) {
            continue;
        }
        match found.last_mut() {
            Some(last) if last.end == mapping.range.start => last.end = mapping.range.end,
            _ => found.push(mapping.range),
        }
    }
    found
}

impl Hider {
    /// Answers the question in CRIU's memory. `false`: the kernel is to do it.
    fn hide(&mut self, call: IoctlCall) -> bool {
        self.try_hide(call).unwrap_or(false)
    }

    fn try_hide(&mut self, call: IoctlCall) -> Option<bool> {
        let pid = *self.numbers.get(&pagemap_of(call)?)?;
        if self.memory.is_none() {
            let path = format!("/proc/{}/mem", call.thread);
            self.memory = Some(OpenOptions::new().read(true).write(true).open(path).ok()?);
        }
        let memory = self.memory.as_ref()?;
        let mut bytes = [0; 16];
        memory.read_exact_at(&mut bytes, call.argument + ARGUMENT_START).ok()?;
        let (start, end) = bytes.split_at(8);
        let start = u64::from_ne_bytes(start.try_into().ok()?);
        let end = u64::from_ne_bytes(end.try_into().ok()?);
        if end.checked_sub(start)? < SMALLEST_BYTES {
            return Some(false);
        }
        let ranges = self.ranges.entry(pid).or_insert_with(|| private_memory(pid));
        if !ranges.iter().any(|range| range.start <= start && end <= range.end) {
            return Some(false);
        }
        // "Looked at everything, found no page."
        memory.write_all_at(&end.to_ne_bytes(), call.argument + ARGUMENT_WALK_END).ok()?;
        Some(true)
    }
}
