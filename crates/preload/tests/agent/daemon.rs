//! A fake daemon: as little of the real one as the agent's contract needs.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use strata_units::PAGE_SIZE;
use strata_units::wire::{
    self, BATCH_PAGES, Control, Hello, HelloKind, MAGIC, RESULT_PENDING, Ready, TRANSFER_PAGES,
    Userfaultfd, Verdict, Welcome,
};

use crate::raw;
use crate::{PATIENCE, wait_until};

/// Times that a cancelled move is tried.
const MOVE_TRIES: u32 = 1000;

/// Where a fake daemon listens.
pub(crate) struct Daemon {
    path: PathBuf,
    listener: OwnedFd,
    /// What it says of a way back.
    key: u64,
}

impl Daemon {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("strata-test-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).expect("a directory");
        let path = directory.join("agent.sock");
        let listener = raw::listen(&path, PATIENCE);
        open_to_all(&path);
        Self { path, listener, key: 0 }
    }

    /// One that says that it can be reached at the name that belongs to `key`.
    pub(crate) fn with_way_back(key: u64) -> Self {
        let mut daemon = Self::new();
        daemon.key = key;
        daemon
    }

    /// Has its path lead nowhere.
    pub(crate) fn hide(&self) {
        std::fs::remove_file(&self.path).expect("it was bound");
    }

    /// Its socket.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Does an agent call within that time?
    pub(crate) fn is_called(&self, milliseconds: i32) -> bool {
        raw::readable(&self.listener, milliseconds)
    }

    /// Waits for an agent and its Hello.
    pub(crate) fn accept(&self) -> Caller {
        self.accept_at(&self.listener)
    }

    /// The same at another socket.
    pub(crate) fn accept_at(&self, listener: &OwnedFd) -> Caller {
        let (socket, pid) = raw::accept(listener, PATIENCE);
        let (hello, userfaultfd) = raw::receive::<Hello>(&socket).expect("a Hello");
        assert_eq!(hello.magic, MAGIC);
        Caller { socket, pid, hello, userfaultfd, key: self.key }
    }

    /// Waits for a program's agent and manages it.
    pub(crate) fn manage(&self) -> Space {
        let caller = self.accept();
        assert_eq!(caller.hello.kind, HelloKind::Start as u32);
        caller.create()
    }
}

/// Programs may become another user, and their agents have no privileges.
pub(crate) fn open_to_all(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(path, open).expect("its own file");
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let directory = self.path.parent().expect("made with one");
        let _ = std::fs::remove_dir_all(directory);
    }
}

/// An agent that has said Hello.
pub(crate) struct Caller {
    pub(crate) socket: OwnedFd,
    pub(crate) pid: i32,
    pub(crate) hello: Hello,
    pub(crate) userfaultfd: Option<OwnedFd>,
    key: u64,
}

impl Caller {
    pub(crate) fn welcome(&self, verdict: Verdict, descriptors: &[&OwnedFd]) {
        let welcome = Welcome { magic: MAGIC, verdict: verdict as u32, space: 1, back: self.key };
        raw::send(&self.socket, &welcome, descriptors);
    }

    /// Goes on to Ready with [`Verdict::Create`].
    pub(crate) fn create(self) -> Space {
        let device: OwnedFd = File::options()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd")
            .expect("root may open it")
            .into();
        let control = raw::control();
        self.welcome(Verdict::Create, &[&control.0, &device]);
        let (message, userfaultfd) =
            raw::receive::<Userfaultfd>(&self.socket).expect("a Userfaultfd");
        assert_eq!(message.magic, MAGIC);
        let userfaultfd = userfaultfd.expect("which carries one");
        raw::start_userfaultfd(&userfaultfd);
        self.ready(control, userfaultfd, HashMap::new())
    }

    /// Goes on to Ready with the userfaultfd that a fork or a restore made.
    pub(crate) fn adopt(self, userfaultfd: OwnedFd, stored: Pages) -> Space {
        let control = raw::control();
        self.welcome(Verdict::Adopt, &[&control.0, &userfaultfd]);
        self.ready(control, userfaultfd, stored)
    }

    /// Goes on to Ready with the userfaultfd that the agent brought and a new
    /// control block.
    pub(crate) fn resume(self, stored: Pages) -> Space {
        self.resume_with(raw::control(), stored)
    }

    /// The same with a control block from before.
    pub(crate) fn resume_with(mut self, control: ControlBlock, stored: Pages) -> Space {
        let userfaultfd = self.userfaultfd.take().expect("Resumed carries a userfaultfd");
        self.welcome(Verdict::Resume, &[&control.0]);
        self.ready(control, userfaultfd, stored)
    }

    fn ready(self, (file, control): ControlBlock, userfaultfd: OwnedFd, stored: Pages) -> Space {
        let (shared, server) = Served::start(control, userfaultfd, stored);
        raw::send(&self.socket, &Ready { magic: MAGIC }, &[]);
        let Self { socket, pid, hello, .. } = self;
        Space { socket: Some(socket), pid, hello, file, served: shared, server: Some(server) }
    }
}

/// The memfd and where it is mapped.
pub(crate) type ControlBlock = (OwnedFd, &'static Control);

/// Content of pages that are out of an address space.
pub(crate) type Pages = HashMap<u64, Vec<u8>>;

/// What the fault thread shares with the test.
pub(crate) struct Served {
    pub(crate) control: &'static Control,
    pub(crate) userfaultfd: OwnedFd,
    pub(crate) stored: Mutex<Pages>,
    /// Pages known to be there; locked after `stored`.
    pub(crate) resident: Mutex<BTreeSet<u64>>,
    pub(crate) forked: Mutex<Vec<OwnedFd>>,
    stop: AtomicBool,
}

impl Served {
    fn start(
        control: &'static Control,
        userfaultfd: OwnedFd,
        stored: Pages,
    ) -> (Arc<Self>, JoinHandle<()>) {
        let shared = Arc::new(Self {
            control,
            userfaultfd,
            stored: Mutex::new(stored),
            resident: Mutex::default(),
            forked: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
        });
        let server = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.serve()
        });
        (shared, server)
    }

    /// The userfaultfd and what is stored, for whoever goes on.
    fn give_away(&self) -> (OwnedFd, Pages) {
        let userfaultfd = self.userfaultfd.try_clone().expect("a descriptor is free");
        (userfaultfd, std::mem::take(&mut *self.stored.lock().expect("no panic")))
    }

    /// Answers faults with what is stored, else with zeroes; reads as the
    /// contract says.
    fn serve(&self) {
        let control = self.control;
        let mut faults: Vec<u64> = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let patience_ms = if faults.is_empty() { 20 } else { 0 };
            if raw::readable(&self.userfaultfd, patience_ms) {
                control.reader_busy.store(1, Ordering::SeqCst);
                while control.mover_busy.load(Ordering::SeqCst) != 0 {
                    std::thread::yield_now();
                }
                let event = raw::event(&self.userfaultfd);
                if event.is_some_and(|(kind, ..)| kind != raw::EVENT_PAGEFAULT) {
                    control.epoch.fetch_add(1, Ordering::SeqCst);
                }
                control.reader_busy.store(0, Ordering::SeqCst);
                raw::futex_wake(&control.reader_busy);
                // Only now: whoever moves pages holds the lock.
                match event {
                    Some((raw::EVENT_PAGEFAULT, _, address)) => {
                        faults.push(address & !(PAGE_SIZE as u64 - 1));
                    }
                    Some(event) => self.act(event),
                    None => {}
                }
            }
            faults.retain(|address| !self.answer(*address));
        }
    }

    fn act(&self, event: (u8, u64, u64)) {
        match event {
            (raw::EVENT_FORK, number, _) => {
                self.forked.lock().expect("no panic").push(raw::adopt(number));
            }
            (raw::EVENT_REMOVE | raw::EVENT_UNMAP, start, end) => {
                let mut stored = self.stored.lock().expect("no panic");
                stored.retain(|address, _| !(start..end).contains(address));
                let mut resident = self.resident.lock().expect("no panic");
                resident.retain(|address| !(start..end).contains(address));
            }
            _ => {}
        }
    }

    /// False: an event is to be read first.
    fn answer(&self, address: u64) -> bool {
        let mut stored = self.stored.lock().expect("no panic");
        let zeroes = vec![0; PAGE_SIZE];
        let page = stored.get(&address).unwrap_or(&zeroes);
        match raw::fill(&self.userfaultfd, address, page) {
            // Done, or already there, or the process is gone.
            Ok(()) | Err(libc::EEXIST | libc::ESRCH | libc::ENOENT) => {
                stored.remove(&address);
                self.resident.lock().expect("no panic").insert(address);
                true
            }
            Err(libc::EAGAIN) => false,
            Err(error) => panic!("UFFDIO_COPY: errno {error}"),
        }
    }
}

/// A forked child whose agent has not yet called: its faults and events must be
/// served where they come before that.
pub(crate) struct Orphan {
    served: Arc<Served>,
    server: JoinHandle<()>,
}

impl Orphan {
    pub(crate) fn serve(userfaultfd: OwnedFd, stored: Pages) -> Self {
        let (served, server) = Served::start(raw::control().1, userfaultfd, stored);
        Self { served, server }
    }

    /// Ends serving; the userfaultfd and what was stored, for whoever goes on.
    pub(crate) fn hand_over(self) -> (OwnedFd, Pages) {
        self.served.stop.store(true, Ordering::Relaxed);
        self.server.join().expect("the fault thread does not panic");
        self.served.give_away()
    }
}

/// A managed address space.
pub(crate) struct Space {
    socket: Option<OwnedFd>,
    pub(crate) pid: i32,
    pub(crate) hello: Hello,
    file: OwnedFd,
    pub(crate) served: Arc<Served>,
    server: Option<JoinHandle<()>>,
}

impl Space {
    pub(crate) fn control(&self) -> &'static Control {
        self.served.control
    }

    pub(crate) fn register(&self, address: u64, pages: usize) {
        let userfaultfd = &self.served.userfaultfd;
        raw::register(userfaultfd, address, pages * PAGE_SIZE).expect("UFFDIO_REGISTER");
    }

    pub(crate) fn register_transfer(&self) {
        self.register(self.hello.transfer, TRANSFER_PAGES);
    }

    /// Writes a command for the knowledge of now and gives it.
    pub(crate) fn give(
        &self,
        command: wire::Command,
        addresses: &[u64],
        first_slot: u32,
        count: u32,
    ) {
        let control = self.control();
        assert!(addresses.len() <= BATCH_PAGES);
        for (entry, address) in control.entries.iter().zip(addresses) {
            entry.address.store(*address, Ordering::Relaxed);
            entry.result.store(RESULT_PENDING, Ordering::Relaxed);
        }
        control.command.store(command as u32, Ordering::Relaxed);
        control.first_slot.store(first_slot, Ordering::Relaxed);
        control.count.store(count, Ordering::Relaxed);
        control.command_seq.fetch_add(1, Ordering::Release);
        raw::futex_wake(&control.command_seq);
    }

    /// The batch holds for what is known now.
    pub(crate) fn freshen(&self) {
        let control = self.control();
        control.batch_epoch.store(control.epoch.load(Ordering::SeqCst), Ordering::Relaxed);
        let threads = control.thread_seq.load(Ordering::SeqCst);
        control.batch_thread_seq.store(threads, Ordering::Relaxed);
    }

    /// Waits until the last command is done.
    pub(crate) fn done(&self, entries: usize) -> Vec<i32> {
        let control = self.control();
        wait_until("the agent has done its command", || {
            control.done_seq.load(Ordering::Acquire) == control.command_seq.load(Ordering::Relaxed)
        });
        control.entries.iter().take(entries).map(|e| e.result.load(Ordering::Relaxed)).collect()
    }

    /// A whole batch command.
    pub(crate) fn batch(
        &self,
        command: wire::Command,
        addresses: &[u64],
        first_slot: u32,
    ) -> Vec<i32> {
        self.freshen();
        self.give(command, addresses, first_slot, addresses.len() as u32);
        self.done(addresses.len())
    }

    /// Evicts pages: move, read, keep, discard. All must be movable.
    pub(crate) fn evict(&self, addresses: &[u64], first_slot: u32) {
        for (i, address) in addresses.iter().enumerate() {
            let there = self.hello.transfer + ((first_slot as usize + i) * PAGE_SIZE) as u64;
            // A message that was read meanwhile cancels it.
            let mut moves = (0..MOVE_TRIES)
                .map(|_| self.batch(wire::Command::Move, &[*address], first_slot + i as u32));
            let results = moves.find(|results| *results != [wire::RESULT_CANCELLED]);
            assert_eq!(results, Some(vec![0]), "MOVE of {address:#x}");
            let page = raw::read_memory(self.pid, there, PAGE_SIZE).expect("process_vm_readv");
            self.served.stored.lock().expect("no panic").insert(*address, page);
        }
        self.give(wire::Command::Discard, &[], first_slot, addresses.len() as u32);
        self.done(0);
    }

    /// The userfaultfd of a forked child. Its agent may call before the fault
    /// thread has put it there.
    pub(crate) fn forked(&self) -> OwnedFd {
        let forked = || self.served.forked.lock().expect("no panic");
        wait_until("a fork event", || !forked().is_empty());
        forked().remove(0)
    }

    /// Evicts what can be evicted of some resident pages while the program
    /// runs; returns how many. A fault on a page that is leaving waits for the
    /// lock.
    pub(crate) fn evict_some(&self) -> usize {
        let mut stored = self.served.stored.lock().expect("no panic");
        self.freshen();
        let pages: Vec<u64> = {
            let resident = self.served.resident.lock().expect("no panic");
            resident.iter().copied().take(BATCH_PAGES).collect()
        };
        let mut evicted = 0;
        let results = {
            self.give(wire::Command::Move, &pages, 0, pages.len() as u32);
            self.done(pages.len())
        };
        for (i, (address, result)) in pages.iter().zip(results).enumerate() {
            if result == 0 {
                let there = self.hello.transfer + (i * PAGE_SIZE) as u64;
                let page = raw::read_memory(self.pid, there, PAGE_SIZE).expect("readable");
                stored.insert(*address, page);
                self.served.resident.lock().expect("no panic").remove(address);
                evicted += 1;
            }
        }
        drop(stored);
        self.give(wire::Command::Discard, &[], 0, BATCH_PAGES as u32);
        self.done(0);
        evicted
    }

    /// Closes the daemon's end of the connection, and serves faults all the same.
    pub(crate) fn hang_up(&mut self) {
        self.socket = None;
    }

    /// Waits until the agent uses a control block that was new: it cancels what
    /// it is given earlier.
    pub(crate) fn settle(&self) {
        let threads = &self.control().thread_seq;
        wait_until("the new control block is used", || threads.load(Ordering::SeqCst) != 0);
    }

    /// Has the agent neither said anything nor closed its end?
    pub(crate) fn is_quiet(&self) -> bool {
        !raw::readable(self.socket.as_ref().expect("not lost"), 0)
    }

    /// Ends serving; the userfaultfd and what was stored, for whoever goes on.
    pub(crate) fn hand_over(&mut self) -> (OwnedFd, Pages) {
        self.stop();
        self.served.give_away()
    }

    /// The daemon's end of the connection breaks; what was stored is handed
    /// over to whoever resumes.
    pub(crate) fn lose(mut self) -> Pages {
        self.stop();
        self.socket = None;
        self.served.give_away().1
    }

    /// A copy of its control block, for a daemon to come.
    pub(crate) fn control_block(&self) -> ControlBlock {
        (self.file.try_clone().expect("a descriptor is free"), self.control())
    }

    /// Waits for the agent to close its end.
    pub(crate) fn closed(&self) -> bool {
        let socket = self.socket.as_ref().expect("not lost");
        raw::receive::<Ready>(socket).is_none()
    }

    /// Slots with a thread: control block, stack, thread id.
    pub(crate) fn threads(&self) -> HashMap<u64, (u64, u32)> {
        let threads = self.control().threads.iter().map(|slot| {
            let control_block = slot.control_block.load(Ordering::SeqCst);
            let stack = slot.stack.load(Ordering::SeqCst);
            (control_block, (stack, slot.tid.load(Ordering::SeqCst)))
        });
        threads.filter(|(control_block, _)| *control_block != 0).collect()
    }

    pub(crate) fn pinned(&self) -> Vec<u64> {
        let pages = self.control().pinned.iter().map(|page| page.load(Ordering::SeqCst));
        let mut pages: Vec<u64> = pages.filter(|page| *page != 0).collect();
        pages.sort_unstable();
        pages
    }

    /// Nobody reads the userfaultfd any more.
    pub(crate) fn stop(&mut self) {
        self.served.stop.store(true, Ordering::Relaxed);
        if let Some(server) = self.server.take() {
            server.join().expect("the fault thread does not panic");
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.served.stop.store(true, Ordering::Relaxed);
    }
}
