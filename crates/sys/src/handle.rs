//! One process and the address space that it has, held by descriptors: whatever is
//! asked or read through them is that process's and that memory's, also when its number
//! is another's by now, and when it has executed another program.
//!
//! `/proc/PID/mem`, `maps`, `smaps` and `pagemap` belong to the address space that there
//! was when they were opened; files opened below the directory, to the process. That all
//! of them, and a userfaultfd, are of *one* address space is shown by [`Process::prove`].

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use strata_units::{PAGE_SHIFT, PAGE_SIZE};

use crate::pagemap::{self, is_there};
use crate::peer::KnownPeer;
use crate::process::{
    Mapping, MappingFlags, Pidfd, Presence, ReadOutcome, ThreadFaults, parse_mapping,
    parse_mapping_flags, stat_fields, wait_for_page,
};
use crate::sched::WorkClock;
use crate::smaps::{MappingUse, parse_uses};
use crate::uffd::{Range, own};

/// See the module's text.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: Pidfd,
    directory: File,
    // Opened in this order.
    pagemap: File,
    memory: File,
    // Read by one thread at a time: the kernel makes the text anew for whoever does not
    // go on where the last reader ended, and lines that have changed meanwhile would be
    // torn.
    maps: Mutex<File>,
    smaps: Mutex<File>,
    /// The page tables opened once more, after all others, until it is proved that they
    /// are the same: an address space that a process has left does not come back.
    last: Mutex<Option<File>>,
}

/// The descriptors of a [`Process`], in this order: pidfd, directory, pagemap, mem, maps,
/// smaps.
pub const PROCESS_FDS: usize = 6;

fn alone<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn gone() -> io::Error {
    io::Error::new(ErrorKind::NotFound, "the process has ended")
}

fn open_below(directory: &File, name: &CStr, flags: libc::c_int) -> io::Result<File> {
    // SAFETY: a descriptor that is open for the call and a string that ends with a zero;
    // returns a new descriptor.
    let fd = unsafe { libc::openat(directory.as_raw_fd(), name.as_ptr(), flags | libc::O_CLOEXEC) };
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(own(fd).into()) }
}

impl Process {
    /// The process that has the number `pid` now: for children that nobody has collected,
    /// whose number cannot be another's.
    ///
    /// # Errors
    /// It has ended, or may not be looked at.
    pub fn open(pid: u32) -> io::Result<Self> {
        Self::of(pid, Pidfd::open(pid)?)
    }

    /// The process at the other end of a socket.
    ///
    /// # Errors
    /// It has ended, is not visible from here, or may not be looked at.
    pub fn of_peer(peer: &KnownPeer) -> io::Result<Self> {
        Self::of(peer.peer().pid, Pidfd::adopt(peer.pidfd().as_fd().try_clone_to_owned()?))
    }

    fn of(pid: u32, pidfd: Pidfd) -> io::Result<Self> {
        if pid == 0 {
            return Err(io::Error::new(ErrorKind::NotFound, "the process is not visible here"));
        }
        let directory = File::open(format!("/proc/{pid}"))?;
        let open = |name| open_below(&directory, name, libc::O_RDONLY);
        let pagemap = open(c"pagemap")?;
        let memory = open(c"mem")?;
        let maps = Mutex::new(open(c"maps")?);
        let smaps = Mutex::new(open(c"smaps")?);
        let last = Mutex::new(Some(open(c"pagemap")?));
        // It lives: so all that time nobody else had its number, and that was its directory.
        if pidfd.has_exited() {
            return Err(gone());
        }
        Ok(Self { pid, pidfd, directory, pagemap, memory, maps, smaps, last })
    }

    /// One that an earlier worker has opened and proved, from its descriptors.
    #[must_use]
    pub fn adopt(pid: u32, fds: [OwnedFd; PROCESS_FDS]) -> Self {
        let [pidfd, directory, pagemap, memory, maps, smaps] = fds;
        Self {
            pid,
            pidfd: Pidfd::adopt(pidfd),
            directory: directory.into(),
            pagemap: pagemap.into(),
            memory: memory.into(),
            maps: Mutex::new(maps.into()),
            smaps: Mutex::new(smaps.into()),
            last: Mutex::default(),
        }
    }

    /// The numbers of its descriptors.
    #[must_use]
    pub fn descriptors(&self) -> [RawFd; PROCESS_FDS] {
        let (maps, smaps) = (alone(&self.maps).as_raw_fd(), alone(&self.smaps).as_raw_fd());
        let [pidfd, directory] = [self.pidfd.as_fd(), self.directory.as_fd()];
        let [pagemap, memory] = [self.pagemap.as_fd(), self.memory.as_fd()];
        let [a, b, c, d] = [pidfd, directory, pagemap, memory].map(|fd| fd.as_raw_fd());
        [a, b, c, d, maps, smaps]
    }

    /// Its number, while it lives; for display, and for what only takes numbers.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The process, for signals.
    #[must_use]
    pub fn pidfd(&self) -> &Pidfd {
        &self.pidfd
    }

    /// Whether it has ended (it may still be a zombie).
    #[must_use]
    pub fn has_exited(&self) -> bool {
        self.pidfd.has_exited()
    }

    /// Whether it is the process at the other end of a socket.
    #[must_use]
    pub fn is(&self, peer: &KnownPeer) -> bool {
        // The peer lived when its descriptor was made: two of one number that live at one
        // time are one.
        self.pid == peer.peer().pid && !self.has_exited() && !peer.pidfd().has_exited()
    }

    /// Has `act` name the process by its number, for calls of the kernel that take nothing
    /// else. None: it has ended before, or by now, and what was done may have met whoever
    /// got its number in between.
    pub fn by_number<T>(&self, act: impl FnOnce(u32) -> T) -> Option<T> {
        if self.has_exited() {
            return None;
        }
        let done = act(self.pid);
        (!self.has_exited()).then_some(done)
    }

    /// Whether two processes that live have the same address space now.
    #[must_use]
    pub fn shares_memory_with(&self, other: &Self) -> bool {
        const KCMP_VM: libc::c_int = 1;
        let same = self.by_number(|pid| {
            // SAFETY: five integers.
            other.by_number(|of| unsafe {
                libc::syscall(libc::SYS_kcmp, pid as libc::pid_t, of as libc::pid_t, KCMP_VM, 0, 0)
            })
        });
        same.flatten() == Some(0)
    }

    /// A small file below its directory, as it is now: of the process, whatever it executes.
    ///
    /// # Errors
    /// It has ended.
    pub fn read_file(&self, name: &CStr) -> io::Result<String> {
        let mut text = String::new();
        self.open_file(name)?.read_to_string(&mut text)?;
        Ok(text)
    }

    /// Opens a file below its directory.
    ///
    /// # Errors
    /// It has ended, or the file may not be opened.
    pub fn open_file(&self, name: &CStr) -> io::Result<File> {
        open_below(&self.directory, name, libc::O_RDONLY)
    }

    /// Its memory for writing. Of a process that stands still: it is opened anew.
    ///
    /// # Errors
    /// It has ended, or may not be written to.
    pub fn open_memory_to_write(&self) -> io::Result<File> {
        open_below(&self.directory, c"mem", libc::O_RDWR)
    }

    // ----- its mappings -----

    /// What a file of its says. One that ended meanwhile has told only a part.
    fn whole_text(&self, file: &Mutex<File>) -> io::Result<String> {
        let text = read_alone(file)?;
        pagemap::is_alive(&self.pagemap)?;
        Ok(text)
    }

    /// The memory map. What cannot be parsed is left out, so it is not managed.
    ///
    /// # Errors
    /// The address space is gone.
    pub fn maps(&self) -> io::Result<Vec<Mapping>> {
        Ok(self.whole_text(&self.maps)?.lines().filter_map(parse_mapping).collect())
    }

    /// The flags of all mappings. Walks the page tables: for rare questions only.
    ///
    /// # Errors
    /// The address space is gone.
    pub fn mapping_flags(&self) -> io::Result<Vec<MappingFlags>> {
        Ok(parse_mapping_flags(&self.whole_text(&self.smaps)?))
    }

    /// The mappings that have resident anonymous memory, in order. Walks the page tables.
    ///
    /// # Errors
    /// The address space is gone.
    pub fn mapping_uses(&self) -> io::Result<Vec<MappingUse>> {
        Ok(parse_uses(&self.whole_text(&self.smaps)?))
    }

    // ----- its page tables -----

    /// A word for each page.
    pub(crate) fn pagemap(&self) -> &File {
        &self.pagemap
    }

    /// Calls `each(page index, presence)` for the pages of `range` that are present.
    ///
    /// # Errors
    /// The address space is gone.
    pub fn page_presence(
        &self,
        range: Range,
        mut each: impl FnMut(u64, Presence),
    ) -> io::Result<()> {
        const EXCLUSIVE: u64 = 1 << 56;
        const CHUNK_PAGES: usize = 4096;
        let pages = range.len() >> PAGE_SHIFT;
        let mut buffer = vec![0u8; pages.min(CHUNK_PAGES as u64) as usize * 8];
        let mut done = 0;
        while done < pages {
            let count = (pages - done).min(CHUNK_PAGES as u64) as usize;
            let at = ((range.start >> PAGE_SHIFT) + done) * 8;
            let got = self.pagemap.read_at(&mut buffer[..count * 8], at)? / 8;
            if got == 0 {
                return Err(gone());
            }
            for (index, word) in buffer[..got * 8].chunks_exact(8).enumerate() {
                let word = u64::from_le_bytes(word.try_into().expect("chunks of eight"));
                if is_there(word) {
                    let exclusive = word & EXCLUSIVE != 0;
                    each(done + index as u64, Presence { present: true, exclusive });
                }
            }
            done += got as u64;
        }
        Ok(())
    }

    /// Whether the page at `address` is present.
    ///
    /// # Errors
    /// The address space is gone.
    pub fn is_page_present(&self, address: u64) -> io::Result<bool> {
        let one = Range { start: address, end: address + PAGE_SIZE as u64 };
        let mut there = false;
        self.page_presence(one, |_, _| there = true)?;
        Ok(there)
    }

    /// Calls `each` for the parts of `range` that are present, in DRAM or in the kernel's
    /// swap, in order.
    ///
    /// # Errors
    /// The address space is gone.
    pub fn present(&self, range: Range, each: impl FnMut(Range)) -> io::Result<()> {
        pagemap::present(&self.pagemap, range, each)
    }

    /// Calls `each` for the guards (`MADV_GUARD_INSTALL`) in `range`, in order. None where
    /// the kernel does not tell them (before 6.15).
    ///
    /// # Errors
    /// The address space is gone.
    pub fn guards(&self, range: Range, each: impl FnMut(Range)) -> io::Result<()> {
        pagemap::guards(&self.pagemap, range, each)
    }

    /// Calls `each` for the parts of `range` that are there, in order, and with
    /// whether they are write-protected by a userfaultfd.
    ///
    /// # Errors
    /// The address space is gone.
    pub fn protection(&self, range: Range, each: impl FnMut(Range, bool)) -> io::Result<()> {
        pagemap::protection(&self.pagemap, range, each)
    }

    /// For each of the `count` pages from `address` on: whether it is there and
    /// write-protected by a userfaultfd.
    ///
    /// # Errors
    /// The address space is gone.
    pub fn protected(&self, address: u64, count: usize) -> io::Result<Vec<bool>> {
        pagemap::protected(&self.pagemap, address, count)
    }

    /// Whether all views of its page tables say that the page at `address` is
    /// write-protected, or all that it is not.
    pub(crate) fn is_protected_as(&self, address: u64, expected: bool) -> bool {
        let says = |file: &File| {
            pagemap::protected(file, address, 1).is_ok_and(|words| words == [expected])
        };
        says(&self.pagemap) && alone(&self.last).as_ref().is_none_or(says)
    }

    /// All of its descriptors are of one address space: nobody needs to ask again.
    pub(crate) fn is_proved(&self) {
        *alone(&self.last) = None;
    }

    // ----- its memory -----

    /// Reads from `address` on, as far as pages are there; how many bytes that was. Never
    /// waits for whoever answers missing pages: one that a userfaultfd would have to bring
    /// ends it.
    #[must_use]
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> usize {
        let mut done = 0;
        while done < buffer.len() {
            match self.memory.read_at(&mut buffer[done..], address + done as u64) {
                Ok(0) => break,
                Ok(more) => done += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        done
    }

    /// Reads `runs` one after the other into `buffer`, whose length is the sum of theirs.
    pub fn read_runs(&self, runs: &[Range], buffer: &mut [u8]) -> ReadOutcome {
        let mut left = buffer;
        for run in runs {
            let Some((target, rest)) = left.split_at_mut_checked(run.len() as usize) else {
                return ReadOutcome::Failed;
            };
            if self.read(run.start, target) < target.len() {
                return ReadOutcome::Failed;
            }
            left = rest;
        }
        if left.is_empty() { ReadOutcome::Done } else { ReadOutcome::Failed }
    }

    /// Touches the page at `address` and waits until it has been brought. Whatever it holds
    /// is dropped: this goes by the process's number, and tells nobody anything.
    pub fn wait_for_page(&self, address: u64) {
        self.by_number(|pid| wait_for_page(pid, address));
    }

    // ----- the process -----

    /// Resident anonymous bytes. The kernel keeps this per CPU: it can be off by some
    /// hundred KiB.
    ///
    /// # Errors
    /// It has ended.
    pub fn anonymous_rss(&self) -> io::Result<u64> {
        let text = self.read_file(c"statm")?;
        let mut fields = text.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
        match (fields.next(), fields.next()) {
            (Some(Ok(resident)), Some(Ok(shared))) => {
                Ok(resident.saturating_sub(shared) << PAGE_SHIFT)
            }
            _ => Err(io::Error::new(ErrorKind::InvalidData, "statm has no second and third field")),
        }
    }

    /// The processor time that its threads have used.
    #[must_use]
    pub fn processor_time(&self) -> Option<Duration> {
        self.by_number(|pid| WorkClock::of(pid)?.read()).flatten()
    }

    /// By which it is seen whether its threads have run at all.
    #[must_use]
    pub fn work_clock(&self) -> Option<WorkClock> {
        WorkClock::of(self.pid)
    }

    /// The stack pointers of those threads that are waiting in the kernel, its own agent's
    /// too. (What runs just now has its stack in place.)
    #[must_use]
    pub fn stack_pointers(&self) -> Vec<u64> {
        let pointer = |tid: u32| {
            // "running", or: number, six arguments, stack pointer, program counter.
            let text = self.read_of_thread(tid, "syscall")?;
            let word = text.split_ascii_whitespace().rev().nth(1)?;
            u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
        };
        self.threads().into_iter().filter_map(pointer).collect()
    }

    /// The CPU that a thread of it ran on last.
    #[must_use]
    pub fn thread_cpu(&self, tid: u32) -> Option<u32> {
        stat_fields(&self.read_of_thread(tid, "stat")?)?.nth(36)?.parse().ok()
    }

    /// Its first threads, at most 16: for each a file is read.
    #[must_use]
    pub fn thread_faults(&self) -> Vec<ThreadFaults> {
        const MOST_THREADS: usize = 16;
        let seen = self.threads().into_iter().take(MOST_THREADS).filter_map(|tid| {
            let text = self.read_of_thread(tid, "stat")?;
            let mut fields = stat_fields(&text)?;
            // minflt, the tenth; majflt, the twelfth; processor, the 39th.
            let minor: u64 = fields.nth(7)?.parse().ok()?;
            let major: u64 = fields.nth(1)?.parse().ok()?;
            let cpu = fields.nth(26)?.parse().ok()?;
            Some(ThreadFaults { tid, faults: minor + major, cpu })
        });
        seen.collect()
    }

    fn threads(&self) -> Vec<u32> {
        // Through the descriptor's own link: the directory stays the process's.
        let path = format!("/proc/self/fd/{}/task", self.directory.as_raw_fd());
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    fn read_of_thread(&self, tid: u32, name: &str) -> Option<String> {
        let path = std::ffi::CString::new(format!("task/{tid}/{name}")).ok()?;
        self.read_file(&path).ok()
    }
}

/// What a file of the kernel's says, from its beginning to its end, read by nobody else
/// meanwhile.
fn read_alone(file: &Mutex<File>) -> io::Result<String> {
    const CHUNK_BYTES: usize = 64 << 10;
    let file = alone(file);
    let mut text = Vec::new();
    loop {
        let done = text.len();
        text.resize(done + CHUNK_BYTES, 0);
        let got = loop {
            match file.read_at(&mut text[done..], done as u64) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        text.truncate(done + got);
        if got == 0 {
            break;
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
#[path = "handle_tests.rs"]
mod tests;
