//! Eviction: one batch of a space's pages goes through its transfer range into
//! the store.
//!
//! ```text
//! compose   gate: Resident → Leaving(slot), slots[slot] = address
//! command   the agent MOVEs each page to its slot, or says why not
//! fetch     one contiguous read of the transfer range
//! put       the store has the pages, checksummed
//! settle    gate: Leaving → Stored(handle), or back to Resident
//! discard   the transfer range is emptied
//! ```
//! All but the last is done in parts of a batch, one after the other.
//!
//! Until `settle` the only copy is in the transfer range or in place; the
//! transfer range is emptied only after it. A page whose message says meanwhile
//! that it was discarded has `slots[slot] = 0` and is dropped.

pub(crate) mod fetch;
pub(crate) mod kept;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_policy::{Level, exchange, gap};
use strata_store::Fingerprint;
use strata_sys::{Range, futex_wait, futex_wake};
use strata_units::wire::{BATCH_PAGES, Command, Control, RESULT_CANCELLED, RESULT_PENDING};
use strata_units::{Handle, PAGE, PAGE_SIZE, PageBuffer, PageId};

use crate::capture::Leaves;
use crate::evict::kept::KeptCopies;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::excluded::Excluded;
use crate::tenant::space::{Agent, Space, slots_with_a_page};

/// How long the keeper waits for one command before it turns to other spaces.
/// A batch takes well under a millisecond, unless its process is stopped.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often it looks, while it waits for one before a snapshot, whether its process has
/// ended.
const ENDED_WITHIN: Duration = Duration::from_millis(10);
/// How long it waits before a snapshot is given up: on a busy machine an agent
/// sleeps for longer than a batch takes.
const PARK_PATIENCE: Duration = Duration::from_secs(3);
/// Pages that the agent moves before it sleeps again, until they are packed. It often
/// works on the CPU of the threads that fault, and as long as it does nobody is served:
/// a whole batch at once was most of their longest waits (docs/measurements.md).
pub(crate) const PART_PAGES: usize = 32;
pub(crate) const EBUSY: i32 = -16;
pub(crate) const EINVAL: i32 = -22;
pub(crate) const ENOENT: i32 = -2;

/// Why a page stayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stayed {
    /// Once shared by a fork, or pinned by I/O: worth a populate, then a pause.
    Busy,
    /// Locked or not writable.
    Pinned,
    /// The batch was cancelled: any time again.
    Cancelled,
    /// The store would not take it.
    StoreFull,
    /// A thread asked for it before it was stored.
    Wanted,
}

/// What came of a batch.
#[derive(Debug, Default)]
pub(crate) struct BatchReport {
    pub(crate) evicted: usize,
    /// Their addresses.
    pub(crate) left: Vec<u64>,
    pub(crate) stayed: Vec<(PageId, u64, Stayed)>,
    /// The store refused a page.
    pub(crate) store_error: Option<String>,
}

/// How parts of batches are spread over time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pauses {
    /// From the beginning of a part to that of the next one, at least...
    pub(crate) every: Duration,
    /// ...as long as there is more headroom than this.
    pub(crate) floor_pages: i64,
}

impl Pauses {
    /// Pauses after a part that began then.
    fn after(self, began: Instant, tenant: &Tenant) {
        let rest = self.every.saturating_sub(began.elapsed());
        if !rest.is_zero() && tenant.headroom_pages() > self.floor_pages {
            std::thread::sleep(rest);
        }
    }
}

/// The page buffers of one keeper.
pub(crate) struct Evictor {
    pub(crate) buffer: Vec<u8>,
    pub(crate) page: Box<PageBuffer>,
    /// None by default.
    pub(crate) pauses: Pauses,
    /// Pages are packed as they leave: eviction goes on without a pause.
    pub(crate) packs_at_once: bool,
    /// Staged pages go on to the file as they are.
    pub(crate) unpacked: bool,
    /// The pages under way are packed densely at once.
    pub(crate) densely: bool,
    /// What is known of the kept copies of resident pages.
    pub(crate) copies: KeptCopies,
    /// Stored copies of the pages of the batch under way, by slot. In ordinary
    /// memory: a worker that dies leaves them to nobody, and recovery frees them.
    pub(crate) kept: Vec<Option<(Handle, Option<Fingerprint>)>>,
    /// Pages with smaller gaps are worth compressed memory, should they lie in the
    /// file tier.
    pub(crate) horizon: Option<Level>,
    /// By transfer slot, as `kept`: whether the page is one of them.
    pub(crate) promotes: Vec<bool>,
}

/// How one page of a batch ended at the agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moved {
    Yes,
    No(i32),
}

impl Agent {
    /// Whether every command was carried out.
    pub(crate) fn is_idle(&self) -> bool {
        let control = self.control.control();
        control.done_seq.load(Ordering::Acquire) == control.command_seq.load(Ordering::Relaxed)
    }

    /// Gives a command. The agent must be idle.
    pub(crate) fn command(&self, command: Command, first_slot: u32, count: u32) {
        let control = self.control.control();
        control.command.store(command as u32, Ordering::Relaxed);
        control.first_slot.store(first_slot, Ordering::Relaxed);
        control.count.store(count, Ordering::Relaxed);
        control.command_seq.fetch_add(1, Ordering::Release);
        futex_wake(&control.command_seq);
    }

    /// Waits until the agent is idle, at most `patience`.
    pub(crate) fn wait_idle(&self, space: &Space, patience: Duration) -> bool {
        let control = self.control.control();
        let deadline = Instant::now() + patience;
        loop {
            let done = control.done_seq.load(Ordering::Acquire);
            if done == control.command_seq.load(Ordering::Relaxed) {
                return true;
            }
            let now = Instant::now();
            if now >= deadline || space.is_gone() {
                return false;
            }
            futex_wait(&control.done_seq, done, deadline - now);
        }
    }

    /// Has it look for a command: the worker before may have given one, and died before it
    /// woke it.
    pub(crate) fn remind(&self) {
        futex_wake(&self.control.control().command_seq);
    }

    /// Asks the agent to end: its space is released.
    pub(crate) fn dismiss(&self) {
        self.command(Command::Leave, 0, 0);
    }
}

impl Space {
    /// Has the agent stand aside while its process is dumped; whether it does.
    pub(crate) fn park(&self) -> bool {
        self.agent().is_some_and(|agent| {
            let idle = self.waits_for(&agent);
            if idle {
                agent.command(Command::Park, 0, 0);
            }
            idle && self.waits_for(&agent)
        })
    }

    /// Whether the agent is idle in good time; nobody waits for one that has ended.
    fn waits_for(&self, agent: &Agent) -> bool {
        let end = Instant::now() + PARK_PATIENCE;
        loop {
            let is_idle = agent.wait_idle(self, ENDED_WITHIN);
            if is_idle || agent.process.has_exited() || Instant::now() >= end {
                return is_idle;
            }
        }
    }

    /// Whether the agent of a process that is stopped does nothing: it is idle, or has been told
    /// to go on when it is not stopped any more, and has not heard that.
    pub(crate) fn stands_aside(&self) -> bool {
        self.agent().is_some_and(|agent| {
            let command = agent.control.control().command.load(Ordering::Relaxed);
            agent.is_idle() || command == Command::Continue as u32
        })
    }

    /// It obeys again.
    pub(crate) fn unpark(&self) {
        if let Some(agent) = self.agent().filter(|agent| agent.is_idle()) {
            agent.command(Command::Continue, 0, 0);
            agent.wait_idle(self, PATIENCE);
        }
    }

    /// It obeys again when its process, which stands still, runs.
    pub(crate) fn unpark_later(&self) {
        if let Some(agent) = self.agent().filter(|agent| agent.is_idle()) {
            agent.command(Command::Continue, 0, 0);
        }
    }
}

impl Evictor {
    pub(crate) fn new() -> Self {
        Self {
            buffer: vec![0; BATCH_PAGES * PAGE_SIZE],
            page: PageBuffer::zeroed(),
            pauses: Pauses::default(),
            packs_at_once: false,
            unpacked: false,
            densely: false,
            copies: KeptCopies::default(),
            kept: Vec::with_capacity(BATCH_PAGES),
            horizon: None,
            promotes: Vec::with_capacity(BATCH_PAGES),
        }
    }

    /// Evicts some of `pages` (all of one space). None: the space's agent is
    /// not there or still busy, nothing was done.
    pub(crate) fn evict(
        &mut self,
        space: &Arc<Space>,
        tenant: &Tenant,
        excluded: &Excluded,
        pages: &[PageId],
    ) -> Option<BatchReport> {
        let report = self.evict_batch(space, tenant, excluded, pages);
        self.promotes.clear();
        // What is left of them belongs to pages that changed or stayed.
        for (handle, _) in self.kept.drain(..).flatten() {
            tenant.store.release(handle);
        }
        report
    }

    fn evict_batch(
        &mut self,
        space: &Arc<Space>,
        tenant: &Tenant,
        excluded: &Excluded,
        pages: &[PageId],
    ) -> Option<BatchReport> {
        let agent = space.agent()?;
        if !agent.is_idle() || space.has_strays.load(Ordering::Acquire) || space.is_gone() {
            return None;
        }
        if !space.transfer_clean.load(Ordering::Acquire) && !empty_transfer(space, &agent) {
            return None;
        }
        let mut report = BatchReport::default();
        let mut used = 0;
        for part in pages[..pages.len().min(BATCH_PAGES)].chunks(PART_PAGES) {
            let began = Instant::now();
            used += self.evict_part(space, tenant, &agent, excluded, (part, used), &mut report);
            if space.has_strays.load(Ordering::Acquire) {
                return Some(report);
            }
            self.pauses.after(began, tenant);
        }
        if used > 0 {
            empty_transfer(space, &agent);
        }
        Some(report)
    }

    /// Evicts pages through the transfer range's slots from `first` on. Returns how
    /// many slots that took.
    fn evict_part(
        &mut self,
        space: &Arc<Space>,
        tenant: &Tenant,
        agent: &Agent,
        excluded: &Excluded,
        (pages, first): (&[PageId], usize),
        report: &mut BatchReport,
    ) -> usize {
        let control = agent.control.control();
        let count = self.compose(space, tenant, control, excluded, (pages, first), report);
        if count == 0 {
            return 0;
        }
        space.transfer_clean.store(false, Ordering::Release);
        agent.command(Command::Move, first as u32, count as u32);
        if !agent.wait_idle(space, PATIENCE) {
            // Stopped, or hostile. What it holds is fetched when it answers.
            space.has_strays.store(true, Ordering::Release);
            return count;
        }
        let mut results = results_of(control, count);
        let all = results.iter().all(|result| *result == Moved::Yes);
        if !all && look_what_moved(space, agent, first, &mut results).is_err() {
            space.has_strays.store(true, Ordering::Release);
            return count;
        }
        self.fetch(space, tenant, agent, (&results, first), report);
        count
    }

    /// Fetches what is in the transfer range with nobody waiting for it: after
    /// a fork in the middle of a batch, after a worker's death, after an agent
    /// answered late, or after the store refused.
    pub(crate) fn fetch_strays(&mut self, space: &Arc<Space>, tenant: &Tenant) -> BatchReport {
        let mut report = BatchReport::default();
        let Some(agent) = space.agent() else { return report };
        if !agent.wait_idle(space, PATIENCE) {
            return report;
        }
        let mut results = vec![Moved::No(RESULT_CANCELLED); BATCH_PAGES];
        if look_what_moved(space, &agent, 0, &mut results).is_err() {
            return report;
        }
        space.has_strays.store(false, Ordering::Release);
        self.fetch(space, tenant, &agent, (&results, 0), &mut report);
        if !space.has_strays.load(Ordering::Acquire) {
            empty_transfer(space, &agent);
        }
        report
    }

    /// Marks `pages` as leaving, through slots from `first` on, and writes the
    /// command's entries. Returns how many.
    fn compose(
        &mut self,
        space: &Space,
        tenant: &Tenant,
        control: &Control,
        excluded: &Excluded,
        (pages, first): (&[PageId], usize),
        report: &mut BatchReport,
    ) -> usize {
        let mut gate = lock(&space.gate);
        control.batch_epoch.store(control.epoch.load(Ordering::SeqCst), Ordering::Relaxed);
        control.batch_thread_seq.store(excluded.thread_seq, Ordering::Relaxed);
        let mut count = 0;
        for &page in pages {
            let Some((owner, piece)) = tenant.map.owner(page.leaf()) else { continue };
            if owner != space.id {
                continue;
            }
            let address = crate::map::address::address_of(piece, page.index());
            let resident = tenant.map.get(page);
            if !resident.is_resident() {
                continue;
            }
            // Memory that is not registered must never be moved: its program would
            // read zeroes there, not wait.
            let one = Range { start: address, end: address + PAGE };
            if gate.object.page(address) != Some(page) || !gate.is_registered(one) {
                continue;
            }
            if tenant.holds_pinned(&gate, address) {
                // Let go of until the pin is: the policy has forgotten it.
                continue;
            }
            if excluded.contains(address) {
                report.stayed.push((page, address, Stayed::Pinned));
                continue;
            }
            let Some(leaves) = gate.may_leave(tenant, address) else {
                report.stayed.push((page, address, Stayed::Cancelled));
                continue;
            };
            let slot = first + count;
            gate.of_freeze[slot] = leaves == Leaves::WithSnapshot;
            let entry = &control.entries[count];
            entry.address.store(address, Ordering::Relaxed);
            entry.result.store(RESULT_PENDING, Ordering::Relaxed);
            gate.slots[slot] = address;
            let copy = tenant.begins_to_leave(page, resident, slot as u16);
            self.promotes.push(exchange::promotes(self.horizon, level_of(tenant, page)));
            self.kept.push(copy.map(|handle| (handle, self.copies.forget(page))));
            count += 1;
        }
        count
    }

    /// Breaks copy-on-write sharing of `addresses`, so that they can be moved.
    pub(crate) fn populate(&mut self, space: &Space, addresses: &[u64]) -> bool {
        let Some(agent) = space.agent() else { return false };
        if !agent.is_idle() || space.is_gone() {
            return false;
        }
        let control = agent.control.control();
        let addresses = &addresses[..addresses.len().min(BATCH_PAGES)];
        for (entry, &address) in control.entries.iter().zip(addresses) {
            entry.address.store(address, Ordering::Relaxed);
            entry.result.store(RESULT_PENDING, Ordering::Relaxed);
        }
        agent.command(Command::Populate, 0, addresses.len() as u32);
        agent.wait_idle(space, PATIENCE)
    }
}

/// How the first `count` pages of a batch ended, as its agent says; read once.
pub(crate) fn results_of(control: &Control, count: usize) -> Vec<Moved> {
    let entries = control.entries[..count].iter();
    entries
        .map(|entry| match entry.result.load(Ordering::Acquire) {
            0 => Moved::Yes,
            other => Moved::No(other),
        })
        .collect()
}

/// Corrects what is said not to have been moved: the page tables have the last word.
///
/// `UFFDIO_MOVE` does not always tell the truth. When a page changes under it (a
/// first write to a zero page, a protection taken off) it begins again, moves the
/// page, forgets that it did, tries once more, and says `EEXIST`: Linux 6.18, see
/// docs/soak.md.
///
/// `results` are those of the slots from `first` on.
fn look_what_moved(
    space: &Space,
    agent: &Agent,
    first: usize,
    results: &mut [Moved],
) -> io::Result<()> {
    let slots = first..first + results.len();
    let there = slots_with_a_page(&agent.process, agent.ranges.transfer.start, slots.clone())?;
    let slots = lock(&space.gate).slots[slots].to_vec();
    for ((result, there), address) in results.iter_mut().zip(there).zip(slots) {
        if *result == Moved::Yes || !there {
            continue;
        }
        // A worker that died while it put a page back left it in both places, and
        // the program has gone on with the one that it sees.
        if address == 0 || !agent.process.is_page_present(address)? {
            *result = Moved::Yes;
        }
    }
    Ok(())
}

/// Empties the transfer range. The store has everything that was in it.
fn empty_transfer(space: &Space, agent: &Agent) -> bool {
    agent.command(Command::Discard, 0, BATCH_PAGES as u32);
    let done = agent.wait_idle(space, PATIENCE);
    space.transfer_clean.store(done, Ordering::Release);
    done
}

/// A resident page's level, for queues that are built anew.
pub(crate) fn level_of(tenant: &Tenant, page: PageId) -> Level {
    gap::level(tenant.map.age(page).load(Ordering::Relaxed))
}
