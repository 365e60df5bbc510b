//! Reads of files that nobody waits for: begun here, finished whenever the device
//! has them, told by the ring of an eventfd. By io_uring where the kernel has it
//! and lets us, else by a few threads that wait.
//!
//! Buffers belong to the queue from the beginning of a read to its end, so that
//! the kernel never writes into memory that has become something else.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use io_uring::{IoUring, opcode, types};

use crate::event::EventFd;

/// Longest read: more in one go is hardly faster on any device, and whoever waits
/// for its first page would wait for all of it. 64 KiB of pages, and what describes them.
pub const READ_BYTES: usize = (64 + 4) << 10;
/// Threads of a queue without io_uring: as many slow reads go on at a time.
const THREADS: usize = 4;

/// A buffer that `O_DIRECT` takes.
#[repr(C, align(4096))]
struct Buffer([u8; READ_BYTES]);

impl Buffer {
    fn new() -> Box<Self> {
        Box::new(Self([0; READ_BYTES]))
    }
}

/// A read that was begun and not given back yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadId(u16);

enum Slot {
    /// Nobody's; with a buffer if it was ever used.
    Free(Option<Box<Buffer>>),
    /// The kernel writes into it.
    InKernel { buffer: Box<Buffer>, len: usize },
    /// A thread has the buffer.
    WithThread { len: usize },
    /// Read, or failed.
    Done { buffer: Box<Buffer>, len: usize },
}

type Read = Box<dyn FnOnce(&mut [u8]) -> io::Result<()> + Send>;
type Job = (u16, Box<Buffer>, usize, Read);
type Finished = (u16, Box<Buffer>, io::Result<()>);

/// Threads that wait for reads.
struct Threads {
    jobs: Option<Sender<Job>>,
    taken: Arc<Mutex<Receiver<Job>>>,
    finished: Receiver<Finished>,
    report: Sender<Finished>,
    started: usize,
    busy: usize,
}

/// A bounded number of reads under way. Of one thread: whoever made it uses it.
pub struct ReadQueue {
    ring: Option<IoUring>,
    threads: Option<Threads>,
    bell: Arc<EventFd>,
    slots: Vec<Slot>,
    /// Taken from the end, so that few buffers are used while few are needed.
    free: Vec<u16>,
    in_kernel: usize,
    /// Finished while they were begun.
    at_once: VecDeque<(u16, io::Result<()>)>,
}

impl ReadQueue {
    /// For at most `reads` at a time; each end of one rings `bell`.
    #[must_use]
    pub fn new(reads: u16, bell: &Arc<EventFd>) -> Self {
        let ring = IoUring::new(u32::from(reads))
            .ok()
            .filter(|ring| ring.submitter().register_eventfd(crate::event::raw(bell)).is_ok());
        Self::with(reads, bell, ring)
    }

    /// The same without io_uring.
    #[must_use]
    pub fn of_threads(reads: u16, bell: &Arc<EventFd>) -> Self {
        Self::with(reads, bell, None)
    }

    fn with(reads: u16, bell: &Arc<EventFd>, ring: Option<IoUring>) -> Self {
        Self {
            ring,
            threads: None,
            bell: Arc::clone(bell),
            slots: (0..reads).map(|_| Slot::Free(None)).collect(),
            free: (0..reads).rev().collect(),
            in_kernel: 0,
            at_once: VecDeque::new(),
        }
    }

    /// Whether reads of descriptors go to the kernel.
    #[must_use]
    pub fn uses_io_uring(&self) -> bool {
        self.ring.is_some()
    }

    /// Reads that could be begun now.
    #[must_use]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Begins to read `len` bytes (at most [`READ_BYTES`]) at `offset` of the file
    /// `descriptor`; where there is none, or no io_uring, a thread does `read`.
    /// None: there is no room.
    ///
    /// # Panics
    /// When `len` is 0 or too large.
    pub fn begin(
        &mut self,
        descriptor: Option<BorrowedFd<'_>>,
        offset: u64,
        len: usize,
        read: impl FnOnce(&mut [u8]) -> io::Result<()> + Send + 'static,
    ) -> Option<ReadId> {
        assert!((1..=READ_BYTES).contains(&len), "a read of {len} bytes");
        let id = self.free.pop()?;
        let slot = &mut self.slots[usize::from(id)];
        let Slot::Free(buffer) = slot else { unreachable!("the list names free slots") };
        let buffer = buffer.take().unwrap_or_else(Buffer::new);
        if let (Some(ring), Some(descriptor)) = (&mut self.ring, descriptor) {
            *slot = Slot::InKernel { buffer, len };
            let Slot::InKernel { buffer, .. } = slot else { unreachable!("just made") };
            let target = buffer.0.as_mut_ptr();
            let entry = opcode::Read::new(types::Fd(descriptor.as_raw_fd()), target, len as u32)
                .offset(offset)
                .build()
                .user_data(u64::from(id));
            // SAFETY: `target` points to at least `len` bytes on the heap that stay
            // in this slot, untouched, until the completion was taken: `bytes` and
            // `give_back` refuse slots in this state, and `drop` waits or leaks.
            let pushed = unsafe { ring.submission().push(&entry) };
            // As many entries as slots, each submitted at once: it has room.
            let submitted = pushed.map_err(io::Error::other).and_then(|()| submit(ring));
            match submitted {
                Ok(()) => {
                    self.in_kernel += 1;
                    return Some(ReadId(id));
                }
                // Nothing was taken by the kernel, and with this ring, whose queue
                // now holds a stale entry, nothing ever will be.
                Err(_) => self.retire_ring(id),
            }
            return self.begin_by_thread(id, len, read);
        }
        *slot = Slot::Free(Some(buffer));
        self.begin_by_thread(id, len, read)
    }

    /// The ring does not take submissions any more: threads read from now on.
    fn retire_ring(&mut self, refused: u16) {
        let slot = &mut self.slots[usize::from(refused)];
        if let Slot::InKernel { buffer, .. } = std::mem::replace(slot, Slot::Free(None)) {
            // Named by an entry that stays in the ring for ever.
            std::mem::forget(buffer);
        }
        self.drain_kernel();
        self.ring = None;
    }

    fn begin_by_thread(
        &mut self,
        id: u16,
        len: usize,
        read: impl FnOnce(&mut [u8]) -> io::Result<()> + Send + 'static,
    ) -> Option<ReadId> {
        let slot = &mut self.slots[usize::from(id)];
        let Slot::Free(buffer) = slot else { unreachable!("the caller's") };
        let buffer = buffer.take().unwrap_or_else(Buffer::new);
        *slot = Slot::WithThread { len };
        let threads = self.threads.get_or_insert_with(Threads::new);
        if let Some((id, mut buffer, len, read)) =
            threads.take(&self.bell, (id, buffer, len, Box::new(read)))
        {
            // There is no thread to be had: better slow than never.
            let result = read(&mut buffer.0[..len]);
            self.slots[usize::from(id)] = Slot::Done { buffer, len };
            self.at_once.push_back((id, result));
            self.bell.ring();
        }
        Some(ReadId(id))
    }

    /// The next read that has ended, each once; its bytes are there until it is
    /// given back.
    pub fn completed(&mut self) -> Option<(ReadId, io::Result<()>)> {
        if let Some((id, result)) = self.at_once.pop_front() {
            return Some((ReadId(id), result));
        }
        while let Some(entry) = self.ring.as_mut().and_then(|ring| ring.completion().next()) {
            if let Some(done) = self.kernel_has_read(&entry) {
                return Some(done);
            }
        }
        let threads = self.threads.as_mut()?;
        let (id, buffer, result) = threads.finished.try_recv().ok()?;
        threads.busy -= 1;
        let slot = &mut self.slots[usize::from(id)];
        let Slot::WithThread { len } = *slot else { unreachable!("threads read what they have") };
        *slot = Slot::Done { buffer, len };
        Some((ReadId(id), result))
    }

    /// None: it was given up.
    fn kernel_has_read(
        &mut self,
        entry: &io_uring::cqueue::Entry,
    ) -> Option<(ReadId, io::Result<()>)> {
        let id = entry.user_data() as u16;
        let slot = &mut self.slots[usize::from(id)];
        if !matches!(slot, Slot::InKernel { .. }) {
            return None;
        }
        let Slot::InKernel { buffer, len } = std::mem::replace(slot, Slot::Free(None)) else {
            unreachable!("just looked at")
        };
        self.in_kernel -= 1;
        let result = match entry.result() {
            count if count >= 0 && count as usize == len => Ok(()),
            // Cut off at the end of the file, or in between: asked for again, it
            // says why.
            count if count >= 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            error => Err(io::Error::from_raw_os_error(-error)),
        };
        *slot = Slot::Done { buffer, len };
        Some((ReadId(id), result))
    }

    /// What was read.
    ///
    /// # Panics
    /// When the read has not ended.
    #[must_use]
    pub fn bytes(&self, id: ReadId) -> &[u8] {
        match &self.slots[usize::from(id.0)] {
            Slot::Done { buffer, len } => &buffer.0[..*len],
            _ => panic!("{id:?} has not ended"),
        }
    }

    /// Its bytes are of no use any more.
    ///
    /// # Panics
    /// When the read has not ended.
    pub fn give_back(&mut self, id: ReadId) {
        let slot = &mut self.slots[usize::from(id.0)];
        match std::mem::replace(slot, Slot::Free(None)) {
            Slot::Done { buffer, .. } => *slot = Slot::Free(Some(buffer)),
            _ => panic!("{id:?} has not ended"),
        }
        self.free.push(id.0);
    }

    /// Waits until the kernel has nothing of ours.
    fn drain_kernel(&mut self) {
        while self.in_kernel > 0 {
            let Some(ring) = &mut self.ring else { return };
            let Some(entry) = ring.completion().next() else {
                match ring.submitter().submit_and_wait(1) {
                    Ok(_) => continue,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    // What cannot be waited for is never reused.
                    Err(_) => {
                        for slot in &mut self.slots {
                            if matches!(slot, Slot::InKernel { .. }) {
                                std::mem::forget(std::mem::replace(slot, Slot::Free(None)));
                            }
                        }
                        self.in_kernel = 0;
                        return;
                    }
                }
            };
            if let Some((id, result)) = self.kernel_has_read(&entry) {
                self.at_once.push_back((id.0, result));
            }
        }
    }
}

fn submit(ring: &IoUring) -> io::Result<()> {
    loop {
        match ring.submit() {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

impl Drop for ReadQueue {
    fn drop(&mut self) {
        self.drain_kernel();
        // Threads end by themselves, with their buffers.
    }
}

impl fmt::Debug for ReadQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadQueue")
            .field("slots", &self.slots.len())
            .field("free", &self.free.len())
            .field("in_kernel", &self.in_kernel)
            .finish_non_exhaustive()
    }
}

impl Threads {
    fn new() -> Self {
        let (jobs, taken) = mpsc::channel();
        let (report, finished) = mpsc::channel();
        Self {
            jobs: Some(jobs),
            taken: Arc::new(Mutex::new(taken)),
            finished,
            report,
            started: 0,
            busy: 0,
        }
    }

    /// Has a thread do it; gives it back if there is none.
    fn take(&mut self, bell: &Arc<EventFd>, job: Job) -> Option<Job> {
        if self.busy >= self.started && self.started < THREADS && self.start(bell).is_ok() {
            self.started += 1;
        }
        if self.started == 0 {
            return Some(job);
        }
        self.busy += 1;
        let jobs = self.jobs.as_ref().expect("open until the end");
        jobs.send(job).expect("threads take jobs as long as there is a sender");
        None
    }

    fn start(&self, bell: &Arc<EventFd>) -> io::Result<()> {
        let (taken, report, bell) =
            (Arc::clone(&self.taken), self.report.clone(), Arc::clone(bell));
        let work = move || {
            loop {
                let job = taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok((id, mut buffer, len, read)) = job else { return };
                let result = read(&mut buffer.0[..len]);
                if report.send((id, buffer, result)).is_err() {
                    return;
                }
                bell.ring();
            }
        };
        std::thread::Builder::new().name("tier-read".into()).spawn(work).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use super::*;
    use crate::poll::Poller;

    const PAGE: usize = 4096;

    fn file(pages: usize) -> Arc<File> {
        let path =
            std::env::temp_dir().join(format!("strata-reads-{}-{pages}", std::process::id()));
        let mut file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .expect("a file in the temporary directory");
        std::fs::remove_file(&path).expect("ours");
        for page in 0..pages {
            file.write_all(&[page as u8 + 1; PAGE]).expect("write");
        }
        Arc::new(file)
    }

    fn begin(queue: &mut ReadQueue, file: &Arc<File>, page: usize, pages: usize) -> Option<ReadId> {
        let (copy, offset) = (Arc::clone(file), (page * PAGE) as u64);
        queue.begin(Some(file.as_fd()), offset, pages * PAGE, move |out| {
            copy.read_exact_at(out, offset)
        })
    }

    /// Waits as a handler does.
    fn next(queue: &mut ReadQueue, bell: &EventFd) -> (ReadId, io::Result<()>) {
        let poller = Poller::new([bell.as_fd()]).expect("epoll");
        loop {
            bell.clear();
            if let Some(done) = queue.completed() {
                return done;
            }
            poller.wait(Some(Duration::from_secs(60))).expect("wait");
        }
    }

    fn queues(reads: u16) -> Vec<(ReadQueue, Arc<EventFd>)> {
        let bell = || Arc::new(EventFd::new().expect("an eventfd"));
        let (one, two) = (bell(), bell());
        vec![(ReadQueue::new(reads, &one), one), (ReadQueue::of_threads(reads, &two), two)]
    }

    #[test]
    fn reads_end_in_any_order_with_their_own_bytes() {
        let file = file(40);
        for (mut queue, bell) in queues(8) {
            let mut wanted: Vec<(ReadId, usize)> = (0..8)
                .map(|read| (begin(&mut queue, &file, read * 5, 1 + read % 3).expect("room"), read))
                .collect();
            assert_eq!(begin(&mut queue, &file, 0, 1), None, "there is no room");
            while !wanted.is_empty() {
                let (id, result) = next(&mut queue, &bell);
                result.expect("the file can be read");
                let at = wanted.iter().position(|(known, _)| *known == id).expect("begun once");
                let (_, read) = wanted.swap_remove(at);
                let bytes = queue.bytes(id);
                assert_eq!(bytes.len(), (1 + read % 3) * PAGE);
                for (page, bytes) in bytes.chunks(PAGE).enumerate() {
                    assert!(bytes.iter().all(|&byte| byte == (read * 5 + page) as u8 + 1));
                }
                queue.give_back(id);
            }
            assert_eq!(queue.room(), 8);
            assert!(begin(&mut queue, &file, 3, 1).is_some(), "there is room again");
        }
    }

    #[test]
    fn a_read_behind_the_end_is_an_error() {
        let file = file(2);
        for (mut queue, bell) in queues(2) {
            let id = begin(&mut queue, &file, 1, 2).expect("room");
            let (done, result) = next(&mut queue, &bell);
            assert_eq!(done, id);
            assert_eq!(result.expect_err("short").kind(), io::ErrorKind::UnexpectedEof);
            queue.give_back(id);
        }
    }

    #[test]
    fn one_that_waits_does_not_keep_the_others_waiting() {
        let file = file(4);
        for (mut queue, bell) in queues(4) {
            let (go, wait) = mpsc::channel::<()>();
            // Without a descriptor it is a thread's in both kinds.
            let slow = queue.begin(None, 0, PAGE, move |out| {
                out.fill(9);
                wait.recv().map_err(io::Error::other)
            });
            let slow = slow.expect("room");
            let quick = begin(&mut queue, &file, 2, 1).expect("room");
            assert_eq!(next(&mut queue, &bell).0, quick);
            go.send(()).expect("it waits");
            assert_eq!(next(&mut queue, &bell).0, slow);
            assert_eq!(queue.bytes(slow)[7], 9);
        }
    }

    #[test]
    fn a_queue_can_end_with_reads_under_way() {
        let file = file(16);
        for (mut queue, _) in queues(16) {
            for page in 0..16 {
                begin(&mut queue, &file, page, 1).expect("room");
            }
        }
    }
}
