//! A pager for tests: answers missing pages from a copy.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use strata_sys::{
    Event, Fill, Process, Range, SharedMemory, Userfaultfd, poll_readable, read_maps,
};
use strata_units::{PAGE_SIZE, PageBuffer};

type Pages = HashMap<u64, Box<PageBuffer>>;

/// What private anonymous memory holds, by process.
pub(crate) struct Memory {
    by_number: HashMap<u32, Arc<Pages>>,
    by_inner_number: HashMap<u32, Arc<Pages>>,
}

impl Memory {
    /// Copies it out of processes that stand still.
    pub(crate) fn of(pids: &[u32]) -> Self {
        // A zombie has none.
        let has_memory = |pid: &&u32| File::open(format!("/proc/{pid}/mem")).is_ok();
        let mut memory = Self { by_number: HashMap::new(), by_inner_number: HashMap::new() };
        for pid in pids.iter().filter(has_memory) {
            let pages = Arc::new(pages(*pid));
            memory.by_number.insert(*pid, Arc::clone(&pages));
            let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            let inner = numbers.and_then(|text| text.split_ascii_whitespace().next_back());
            memory.by_inner_number.insert(inner.expect("a number").parse().expect("one"), pages);
        }
        memory
    }

    pub(crate) fn pages_of(&self, pid: u32) -> Arc<Pages> {
        Arc::clone(&self.by_number[&pid])
    }

    /// By the number in its own pid namespace.
    pub(crate) fn pages_of_inner(&self, pid: u32) -> Arc<Pages> {
        Arc::clone(&self.by_inner_number[&pid])
    }
}

fn pages(pid: u32) -> Pages {
    let memory = File::open(format!("/proc/{pid}/mem")).expect("its memory");
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its map");
    let stack = maps.lines().find(|line| line.ends_with("[stack]")).expect("a stack");
    let mut found = Pages::new();
    let process = Process::open(pid).expect("it is there");
    for mapping in read_maps(pid).expect("its map") {
        let is_stack = stack.starts_with(&format!("{:x}-", mapping.range.start));
        if !(mapping.private && (mapping.anonymous || is_stack)) {
            continue;
        }
        let copy = |range: Range| {
            for address in (range.start..range.end).step_by(PAGE_SIZE) {
                let mut page = PageBuffer::zeroed();
                memory.read_exact_at(&mut page.0, address).expect("a page");
                found.insert(address, page);
            }
        };
        process.present(mapping.range, copy).expect("its pages");
    }
    found
}

/// Serves one process until it is gone or this is dropped.
#[derive(Debug)]
pub(crate) struct Pager {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pager {
    pub(crate) fn serve(fd: OwnedFd, pages: Arc<Pages>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || serve(&Userfaultfd::adopt(fd), &pages, &seen));
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("a thread").join().expect("it served");
    }
}

fn serve(uffd: &Userfaultfd, pages: &Pages, stop: &AtomicBool) {
    let ring = SharedMemory::create("ring", PAGE_SIZE as u64).expect("a ring");
    let zeroes = PageBuffer::zeroed();
    while !stop.load(Ordering::Relaxed) {
        let [polled] =
            poll_readable([uffd.as_fd()], Some(Duration::from_millis(20))).expect("polled");
        if polled.hangup {
            return;
        }
        let count = uffd.read_messages(&ring, 0, 16).unwrap_or(0);
        for index in 0..count {
            let Some(Event::Fault { address, .. }) = Userfaultfd::message(&ring, 0, index) else {
                continue;
            };
            let address = address & !(PAGE_SIZE as u64 - 1);
            let page = pages.get(&address).map_or(&zeroes, |page| page);
            while uffd.copy(address, page) == Fill::Changing {
                std::thread::yield_now();
            }
            uffd.wake(Range { start: address, end: address + PAGE_SIZE as u64 });
        }
        Userfaultfd::clear_messages(&ring, 0, count);
    }
}
