//! Eviction and faults with the real kernel, in one process: this one is the
//! program, one of its threads plays the agent, and the product's evictor and
//! fault handler do the rest. With stores that fail, too.
//!
//! Not here: the real agent (its own tests), forks, and the keeper.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command as Program, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use strata_sys::{
    ControlBlock, OwnMemory, Range, Registration, SeqPacket, Userfaultfd, futex_wait, futex_wake,
};
use strata_units::wire::{
    BATCH_PAGES, Command, Control, READER_AWAITED, READER_BUSY, RESULT_CANCELLED, TRANSFER_PAGES,
};
use strata_units::{PAGE_SIZE, PageBuffer, PageId};

use crate::evict::Evictor;
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::excluded::Excluded;
use crate::tenant::space::Space;
use crate::tenant::{Hail, Tenant};
use crate::testing;

pub(crate) const PAGES: usize = 96;
/// A test that waits longer than this hangs.
pub(crate) const HANGS: Duration = Duration::from_secs(60);
/// Looks for orders and for the end this often.
const LOOK: Duration = Duration::from_millis(20);
/// Tells a copy of this test binary to be the victim.
const ENV_VICTIM: &str = "STRATA_TEST_VICTIM";

/// A managed process that is this one.
pub(crate) struct World {
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) space: Arc<Space>,
    /// Never unmapped: that would wait for a handler that may be gone.
    pub(crate) memory: &'static OwnMemory,
    evictor: Evictor,
    stop: Arc<AtomicBool>,
    agent: Option<JoinHandle<()>>,
}

/// One in so many pages that were moved is said not to have been.
const DENIED: usize = 3;
const EEXIST: i32 = -17;

/// Carries out commands as the agent in a program does.
struct Agent {
    block: ControlBlock,
    uffd: Userfaultfd,
    memory: &'static OwnMemory,
    transfer: &'static OwnMemory,
    stop: Arc<AtomicBool>,
}

impl Agent {
    fn run(&self) {
        let control = self.block.control();
        let mut done = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let seq = control.command_seq.load(Ordering::Acquire);
            if seq == done {
                futex_wait(&control.command_seq, seq, LOOK);
                continue;
            }
            let first = control.first_slot.load(Ordering::Relaxed) as usize;
            let count = control.count.load(Ordering::Relaxed) as usize;
            match control.command.load(Ordering::Relaxed) {
                command if command == Command::Move as u32 => {
                    for slot in first..first + count {
                        self.move_one(control, slot, slot - first);
                    }
                }
                command if command == Command::Discard as u32 => {
                    self.transfer.discard(first, count).expect("our own memory");
                }
                other => panic!("command {other} is not expected here"),
            }
            done = seq;
            control.done_seq.store(seq, Ordering::Release);
            futex_wake(&control.done_seq);
        }
    }

    /// See `wire::Control`, "Moving and reading exclude each other".
    fn move_one(&self, control: &Control, slot: usize, index: usize) {
        let entry = &control.entries[index];
        loop {
            control.mover_busy.store(1, Ordering::SeqCst);
            if control.reader_busy.load(Ordering::SeqCst) == 0 {
                break;
            }
            control.mover_busy.store(0, Ordering::SeqCst);
            futex_wake(&control.mover_busy);
            let awaited = control.reader_busy.compare_exchange(
                READER_BUSY,
                READER_AWAITED,
                Ordering::SeqCst,
                Ordering::SeqCst,
            );
            if awaited != Err(0) {
                futex_wait(&control.reader_busy, READER_AWAITED, LOOK);
            }
        }
        let now = control.epoch.load(Ordering::SeqCst);
        let result = if now == control.batch_epoch.load(Ordering::Relaxed) {
            let from = entry.address.load(Ordering::Relaxed);
            match self.transfer.move_in(&self.uffd, slot, self.memory, from) {
                // As Linux 6.18 does now and then.
                0 if slot.is_multiple_of(DENIED) => EEXIST,
                result => result,
            }
        } else {
            RESULT_CANCELLED
        };
        entry.result.store(result, Ordering::Release);
        control.mover_busy.store(0, Ordering::SeqCst);
        if control.reader_busy.load(Ordering::SeqCst) != 0 {
            futex_wake(&control.mover_busy);
        }
    }
}

fn leak(pages: usize) -> &'static OwnMemory {
    Box::leak(Box::new(OwnMemory::create(pages).expect("memory")))
}

impl World {
    pub(crate) fn of(tenant: Arc<Tenant>) -> Option<Self> {
        let uffd = testing::userfaultfd()?;
        let (memory, transfer) = (leak(PAGES), leak(TRANSFER_PAGES));
        for range in [memory.range(), transfer.range()] {
            assert_eq!(uffd.register(range), Registration::Done);
        }
        let block = ControlBlock::create(strata_units::wire::MAGIC).expect("a control block");
        let copy = block.as_fd().try_clone_to_owned().expect("a copy");
        let (ours, _) = UnixDatagram::pair().expect("sockets");
        let own = Range { start: 0, end: 0 };
        let hail = Hail {
            process: testing::own_process(),
            transfer: transfer.range().start,
            own,
            restart: 0,
            library: 0,
        };
        tenant.under_pressure.store(true, Ordering::Relaxed);
        let space = tenant
            .attach_unkept(uffd, block, SeqPacket::adopt(ours.into()), hail)
            .expect("a space");
        lock(&space.gate).add_registered(memory.range());
        let stop = Arc::new(AtomicBool::new(false));
        let agent = Agent {
            block: ControlBlock::attach(copy).expect("the same block"),
            uffd: Userfaultfd::adopt(space.userfaultfd().expect("a copy")),
            memory,
            transfer,
            stop: Arc::clone(&stop),
        };
        let agent = Some(std::thread::spawn(move || agent.run()));
        Some(Self { tenant, space, memory, evictor: Evictor::new(), stop, agent })
    }

    pub(crate) fn id(&self, page: usize) -> Option<PageId> {
        lock(&self.space.gate).object.page(self.memory.address(page))
    }

    pub(crate) fn entry(&self, page: usize) -> Entry {
        self.id(page).map_or(Entry::Untouched, |id| self.tenant.map.get(id))
    }

    /// Offers `pages` to the evictor once; how many went.
    pub(crate) fn evict_once(&mut self, pages: impl Iterator<Item = usize>) -> usize {
        let ids: Vec<PageId> = pages.filter_map(|page| self.id(page)).take(BATCH_PAGES).collect();
        let agent = self.space.agent().expect("attached");
        let excluded = Excluded::read(agent.control.control());
        if self.space.has_strays.load(Ordering::Acquire) {
            return self.evictor.fetch_strays(&self.space, &self.tenant).evicted;
        }
        let report = self.evictor.evict(&self.space, &self.tenant, &excluded, &ids);
        report.map_or(0, |report| {
            assert_eq!(report.store_error, None);
            report.evicted
        })
    }

    /// Evicts `pages` until all are stored.
    pub(crate) fn evict_all(&mut self, pages: &[usize]) {
        let hangs = Instant::now() + HANGS;
        while pages.iter().any(|&page| !matches!(self.entry(page), Entry::Stored(_))) {
            assert!(Instant::now() < hangs, "pages do not leave");
            self.evict_once(pages.iter().copied());
        }
    }

    pub(crate) fn write(&self, page: usize, seed: u8) {
        self.memory.write_page(page, &testing::page(seed));
    }

    pub(crate) fn expect(&self, page: usize, seed: u8) {
        expect(self.memory, page, seed);
    }

    /// Asks for a page without touching it.
    pub(crate) fn ask_for(&self, page: usize) {
        self.space.hand_over([self.memory.address(page)]);
    }

    pub(crate) fn wait_for(&self, page: usize, wanted: Entry) {
        let hangs = Instant::now() + HANGS;
        while self.entry(page) != wanted {
            assert!(Instant::now() < hangs, "page {page} stays {:?}", self.entry(page));
            std::thread::yield_now();
        }
    }

    /// The store holds as many references as the page map names, as soon as the
    /// handler has finished its last fault.
    fn wait_for_references(&self) {
        let named = || (0..PAGES).filter(|&page| self.entry(page).handle().is_some()).count();
        let hangs = Instant::now() + HANGS;
        while self.tenant.store.stats().stored_pages != named() as u64 {
            assert!(Instant::now() < hangs, "{} named, {:?}", named(), self.tenant.store.stats());
            std::thread::yield_now();
        }
    }

    /// Takes all down; nothing may be left in the store.
    pub(crate) fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.agent.take().expect("once").join().expect("the agent is sound");
        self.tenant.bury(&self.space);
        // Leaf by leaf, and none while somebody comes back.
        let revival = self.tenant.revival();
        let leaves = self.tenant.map.leaf_count();
        while self.tenant.forget_some() {}
        assert_eq!(self.tenant.account.resident_pages(), 0);
        assert_eq!(self.tenant.map.leaf_count(), leaves);
        drop(revival);
        while self.tenant.forget_buried(1) {}
        self.tenant.store.reap();
        let stats = self.tenant.store.stats();
        assert_eq!((stats.objects, stats.stored_pages), (0, 0), "{stats:?}");
        assert_eq!(self.tenant.account.resident_pages(), 0);
        assert_eq!(self.tenant.map.leaf_count(), 0);
    }
}

pub(crate) fn expect(memory: &OwnMemory, page: usize, seed: u8) {
    let mut out = PageBuffer::zeroed();
    memory.read_page(page, &mut out);
    assert!(out.0 == testing::page(seed).0, "page {page} is not what was written ({seed})");
}

#[test]
fn pages_leave_and_come_back_and_what_was_discarded_is_zero() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    let pages: Vec<usize> = (0..8).collect();
    for &page in &pages {
        world.expect(page, 0);
        world.write(page, 1 + page as u8);
        // The page is in place a moment before its entry says so.
        world.wait_for(page, Entry::Resident { shared: false });
    }
    world.evict_all(&pages);
    assert_eq!(world.tenant.store.stats().stored_pages, 8);
    assert_eq!(world.tenant.counters.get(Counter::Evictions), 8);
    // Discarded while stored, while resident again, and never touched.
    world.memory.discard(2, 2).expect("madvise");
    world.expect(4, 5);
    world.memory.discard(4, 1).expect("madvise");
    for page in [2, 3, 4, 50] {
        world.expect(page, 0);
    }
    for page in [0, 1, 5, 6, 7] {
        world.expect(page, 1 + page as u8);
    }
    for page in 0..8 {
        world.wait_for(page, Entry::Resident { shared: false });
    }
    world.wait_for_references();
    world.end();
}

#[test]
fn a_page_in_both_places_is_the_one_that_the_program_sees() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    world.write(0, 1);
    world.wait_for(0, Entry::Resident { shared: false });
    // As a worker leaves it that dies while it puts a page back: the old content
    // in the transfer range, a newer one in place.
    let (id, address) = (world.id(0).expect("touched"), world.memory.address(0));
    let transfer = world.space.agent().expect("attached").ranges.transfer;
    let filled = world.space.uffd.copy(transfer.start, &testing::page(1));
    assert_eq!(filled, strata_sys::Fill::Done { pages: 1 });
    lock(&world.space.gate).slots[0] = address;
    world.tenant.map.set(id, Entry::Leaving { slot: 0, wanted: false });
    world.write(0, 2);
    world.space.has_strays.store(true, Ordering::Release);
    assert_eq!(world.evict_once(std::iter::empty()), 0);
    assert_eq!(world.entry(0), Entry::Resident { shared: false });
    world.evict_all(&[0]);
    world.expect(0, 2);
    world.wait_for(0, Entry::Resident { shared: false });
    world.wait_for_references();
    world.end();
}

#[test]
fn what_is_not_in_the_transfer_range_is_never_read_as_zero() {
    let Some(world) = World::of(testing::tenant()) else { return };
    let transfer = world.space.agent().expect("attached").ranges.transfer;
    let slot = Range { start: transfer.start, end: transfer.start + PAGE_SIZE as u64 };
    let mut buffer = vec![0; PAGE_SIZE];
    let outcome = testing::own_process().read_runs(&[slot], &mut buffer);
    assert_eq!(outcome, strata_sys::ReadOutcome::Failed);
    world.end();
}

#[test]
fn where_all_comes_back_its_neighbours_come_with_a_page() {
    const BLOCK_BYTES: u64 = 64 << 10;
    let Some(mut world) = World::of(testing::tenant()) else { return };
    let pages: Vec<usize> = (0..PAGES).collect();
    for &page in &pages {
        world.write(page, page as u8);
    }
    world.evict_all(&pages);
    world.tenant.comes_back.store(true, Ordering::Relaxed);
    let asked = PAGES / 2;
    let block = |page: usize| world.memory.address(page) / BLOCK_BYTES;
    world.expect(asked, asked as u8);
    let hangs = Instant::now() + HANGS;
    let is_back = |&page: &usize| world.entry(page).is_resident();
    let wanted: Vec<usize> =
        pages.iter().copied().filter(|&page| block(page) == block(asked)).collect();
    while !wanted.iter().all(is_back) {
        assert!(Instant::now() < hangs, "its neighbours stay away");
        std::thread::yield_now();
    }
    assert_eq!(pages.iter().filter(|&page| is_back(page)).count(), wanted.len());
    for &page in &pages {
        world.expect(page, page as u8);
    }
    assert!(world.tenant.counters.get(Counter::PagesAhead) >= wanted.len() as u64 - 1);
    world.end();
}

/// What the program thread does: random writes, reads and discards, all checked.
fn live(memory: &OwnMemory, steps: usize) -> BTreeMap<usize, u8> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut below = |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % limit as u64) as usize
    };
    let mut model = BTreeMap::new();
    for _ in 0..steps {
        let page = below(PAGES);
        match below(8) {
            0..=2 => {
                let seed = below(30) as u8;
                memory.write_page(page, &testing::page(seed));
                model.insert(page, seed);
            }
            3 => {
                let count = (1 + below(4)).min(PAGES - page);
                memory.discard(page, count).expect("madvise");
                model.retain(|known, _| !(page..page + count).contains(known));
            }
            _ => expect(memory, page, model.get(&page).copied().unwrap_or(0)),
        }
    }
    model
}

#[test]
fn a_program_sees_its_own_bytes_while_its_pages_are_evicted_under_it() {
    const STEPS: usize = 6000;
    let Some(mut world) = World::of(testing::tenant()) else { return };
    let memory = world.memory;
    let (sender, receiver) = mpsc::channel();
    let program = std::thread::spawn(move || {
        // The one who waits may have given up.
        let _ = sender.send(live(memory, STEPS));
    });
    let hangs = Instant::now() + HANGS;
    let model = loop {
        world.evict_once(0..PAGES);
        match receiver.try_recv() {
            Ok(model) => break model,
            Err(mpsc::TryRecvError::Empty) => assert!(Instant::now() < hangs, "no progress"),
            Err(mpsc::TryRecvError::Disconnected) => panic!("the program saw a wrong byte"),
        }
    };
    program.join().expect("it answered");
    assert!(world.tenant.counters.get(Counter::Evictions) > 0, "nothing was evicted");
    while world.space.has_strays.load(Ordering::Acquire) {
        world.evict_once(0..PAGES);
    }
    world.wait_for_references();
    for page in 0..PAGES {
        world.expect(page, model.get(&page).copied().unwrap_or(0));
    }
    assert_eq!(world.tenant.counters.get(Counter::LostPages), 0);
    world.end();
}

#[test]
fn a_page_that_cannot_be_read_back_is_lost_alone() {
    let (tenant, faults) = testing::faulty_tenant();
    let Some(mut world) = World::of(tenant) else { return };
    let Some(mut other) = World::of(testing::tenant()) else { return };
    for page in 0..4 {
        world.write(page, 1 + page as u8);
        other.write(page, 11 + page as u8);
    }
    world.evict_all(&[0, 1, 2, 3]);
    other.evict_all(&[0, 1, 2, 3]);
    let lost = || world.tenant.counters.get(Counter::LostPages);
    for (count, page, fault, text) in [
        (1, 1, &faults.read_error, "cannot read a stored page"),
        (2, 2, &faults.flipped_bit, "a stored page is corrupt"),
    ] {
        fault.store(1, Ordering::Relaxed);
        // Nobody touches it: who did would die.
        world.ask_for(page);
        world.wait_for(page, Entry::Lost);
        other.expect(page, 11 + page as u8);
        fault.store(0, Ordering::Relaxed);
        let hangs = Instant::now() + HANGS;
        while lost() < count {
            assert!(Instant::now() < hangs, "not counted");
            std::thread::yield_now();
        }
        assert_eq!(lost(), count);
        while !world.tenant.notes().iter().any(|note| note.contains(text)) {
            assert!(Instant::now() < hangs, "no note: {:?}", world.tenant.notes());
            std::thread::yield_now();
        }
        assert_eq!(world.tenant.store.stats().stored_pages, 4 - count, "it is released");
    }
    world.expect(0, 1);
    world.expect(3, 4);
    // What the program throws away itself it may use again.
    world.memory.discard(1, 1).expect("madvise");
    world.expect(1, 0);
    world.write(1, 9);
    world.expect(1, 9);
    assert_eq!(other.tenant.counters.get(Counter::LostPages), 0);
    assert!(other.tenant.notes().is_empty());
    other.expect(0, 11);
    other.expect(3, 14);
    world.end();
    other.end();
}

/// In a copy of this process: touches a page whose stored copy is corrupt.
fn be_the_victim() {
    let (tenant, faults) = testing::faulty_tenant();
    let mut world = World::of(tenant).expect("the parent could");
    world.write(0, 5);
    world.evict_all(&[0]);
    faults.flipped_bit.store(1, Ordering::Relaxed);
    let mut out = PageBuffer::zeroed();
    world.memory.read_page(0, &mut out);
    // Whatever it read, it lives.
    std::process::exit(i32::from(out.0[..PAGE_SIZE] == testing::page(5).0));
}

#[test]
fn a_corrupt_page_kills_its_reader() {
    if std::env::var_os(ENV_VICTIM).is_some() {
        be_the_victim();
    }
    if testing::userfaultfd().is_none() {
        return;
    }
    let (_, module) = module_path!().split_once("::").expect("a module of a crate");
    let own_name = format!("{module}::a_corrupt_page_kills_its_reader");
    let status = Program::new(std::env::current_exe().expect("this test"))
        .args(["--exact", &own_name, "--test-threads=1"])
        .env(ENV_VICTIM, "1")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("a copy of this test");
    const SIGBUS: i32 = 7;
    assert_eq!(status.signal(), Some(SIGBUS), "{status:?}");
}
