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
//! Until `settle` the only copy is in the transfer range or in place; the
//! transfer range is emptied only after it. A page whose message says meanwhile
//! that it was discarded has `slots[slot] = 0` and is dropped.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_policy::{Level, gap};
use strata_store::{Fingerprint, Put};
use strata_sys::{Fill, Range, ReadOutcome, futex_wait, futex_wake, page_presence, read_process};
use strata_units::wire::{BATCH_PAGES, Command, Control, RESULT_CANCELLED, RESULT_PENDING};
use strata_units::{Handle, PAGE_SIZE, PageBuffer, PageId, SpaceId};

use crate::counters::Counter;
use crate::entry::Entry;
use crate::scan::Excluded;
use crate::space::{Agent, Space, lock};
use crate::tenant::Tenant;

/// How long the keeper waits for one command before it turns to other spaces.
/// A batch takes well under a millisecond, unless its process is stopped.
const PATIENCE: Duration = Duration::from_millis(100);
const PAGE: u64 = PAGE_SIZE as u64;
const EBUSY: i32 = -16;
const EINVAL: i32 = -22;
const ENOENT: i32 = -2;

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

/// The page buffers of one keeper.
pub(crate) struct Evictor {
    buffer: Vec<u8>,
    page: Box<PageBuffer>,
    /// The keeper was evicting in its last round, too.
    pub(crate) in_a_hurry: bool,
    /// Fingerprints of the kept copies of resident pages; some have left or lost
    /// them since.
    pub(crate) fingerprints: HashMap<PageId, Fingerprint>,
    /// Stored copies of the pages of the batch under way, by slot. In ordinary
    /// memory: a worker that dies leaves them to nobody, and recovery frees them.
    kept: Vec<Option<(Handle, Option<Fingerprint>)>>,
}

/// How one page of a batch ended at the agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Moved {
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
    fn command(&self, command: Command, first_slot: u32, count: u32) {
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

    /// Asks the agent to end: its space is released.
    pub(crate) fn dismiss(&self) {
        self.command(Command::Leave, 0, 0);
    }
}

impl Evictor {
    pub(crate) fn new() -> Self {
        Self {
            buffer: vec![0; BATCH_PAGES * PAGE_SIZE],
            page: PageBuffer::zeroed(),
            in_a_hurry: false,
            fingerprints: HashMap::new(),
            kept: Vec::with_capacity(BATCH_PAGES),
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
        let control = agent.control.control();
        let mut report = BatchReport::default();
        let count = self.compose(space, tenant, control, excluded, pages, &mut report);
        if count == 0 {
            return Some(report);
        }
        space.transfer_clean.store(false, Ordering::Release);
        agent.command(Command::Move, 0, count as u32);
        if !agent.wait_idle(space, PATIENCE) {
            // Stopped, or hostile. What it holds is fetched when it answers.
            space.has_strays.store(true, Ordering::Release);
            return Some(report);
        }
        let results: Vec<Moved> = control.entries[..count]
            .iter()
            .map(|entry| match entry.result.load(Ordering::Acquire) {
                0 => Moved::Yes,
                other => Moved::No(other),
            })
            .collect();
        self.fetch(space, tenant, &agent, &results, &mut report);
        if !space.has_strays.load(Ordering::Acquire) {
            empty_transfer(space, &agent);
        }
        Some(report)
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
        let transfer = agent.ranges.transfer;
        let mut results = vec![Moved::No(RESULT_CANCELLED); BATCH_PAGES];
        let read = page_presence(agent.pid, transfer, |index, _| {
            if let Some(result) = results.get_mut(index as usize) {
                *result = Moved::Yes;
            }
        });
        if read.is_err() {
            return report;
        }
        space.has_strays.store(false, Ordering::Release);
        self.fetch(space, tenant, &agent, &results, &mut report);
        if !space.has_strays.load(Ordering::Acquire) {
            empty_transfer(space, &agent);
        }
        report
    }

    fn fetch(
        &mut self,
        space: &Space,
        tenant: &Tenant,
        agent: &Agent,
        results: &[Moved],
        report: &mut BatchReport,
    ) {
        let transfer = agent.ranges.transfer.start;
        let moved: Vec<usize> =
            (0..results.len()).filter(|&slot| results[slot] == Moved::Yes).collect();
        let mut runs: Vec<Range> = Vec::new();
        for &slot in &moved {
            let start = transfer + slot as u64 * PAGE;
            match runs.last_mut() {
                Some(run) if run.end == start => run.end += PAGE,
                _ => runs.push(Range { start, end: start + PAGE }),
            }
        }
        let bytes = moved.len() * PAGE_SIZE;
        if read_process(agent.pid, &runs, &mut self.buffer[..bytes]) == ReadOutcome::Failed {
            // The process is going, or its agent lied about what it moved. The
            // pages stay where they are; nothing is dropped.
            space.has_strays.store(true, Ordering::Release);
            return;
        }
        let mut stored = Vec::with_capacity(moved.len());
        // Staged pages are there sooner for a thread that waits, and are packed
        // when there is time. While eviction goes on without a pause there is
        // none, and keeping a page twice only costs.
        let how = if self.in_a_hurry { Put::Fast } else { Put::Staged };
        for (page, &slot) in self.buffer[..bytes].chunks_exact(PAGE_SIZE).zip(&moved) {
            let page = page.try_into().expect("chunks of a page");
            let kept = self.kept.get_mut(slot);
            let unchanged = kept.and_then(|kept| {
                kept.take_if(|(handle, fingerprint)| {
                    fingerprint.is_some_and(|known| tenant.store.is_unchanged(*handle, known, page))
                })
            });
            if let Some((handle, _)) = unchanged {
                tenant.counters.add(Counter::EvictionsUnchanged, 1);
                stored.push(Some(handle));
                continue;
            }
            let put = if report.store_error.is_some() {
                None
            } else {
                match tenant.store.put(page, how) {
                    Ok(handle) => Some(handle),
                    Err(error) => {
                        report.store_error = Some(error.to_string());
                        None
                    }
                }
            };
            stored.push(put);
        }
        let newcomer = tenant.census().newcomer();
        let now = tenant.counters.get(Counter::PolicyTime) as u32;
        let mut wanted = Vec::new();
        let mut gate = lock(&space.gate);
        // While the gate is held nobody becomes an heir of this batch.
        let batch = tenant.has_heirs(space.id).then(|| Inheritance::new(tenant, results, &stored));
        let mut stored = stored.into_iter();
        let mut buffers = self.buffer.chunks_exact(PAGE_SIZE);
        for (slot, &result) in results.iter().enumerate() {
            let put = (result == Moved::Yes).then(|| stored.next().flatten());
            let content = (result == Moved::Yes).then(|| buffers.next()).flatten();
            let address = gate.slots[slot];
            let page = (address != 0).then(|| gate.page(address)).flatten();
            let leaving = page.map(|page| (page, tenant.map.get(page)));
            let Some((page, Entry::Leaving { wanted: waits, .. })) = leaving else {
                // Discarded on its way, or no page of this batch.
                gate.slots[slot] = 0;
                if let Some(Some(handle)) = put {
                    tenant.store.release(handle);
                }
                continue;
            };
            match put {
                Some(Some(handle)) => {
                    gate.slots[slot] = 0;
                    let age = tenant.map.age(page);
                    age.store(
                        gap::left(age.load(Ordering::Relaxed), now, newcomer),
                        Ordering::Relaxed,
                    );
                    tenant.map.set(page, Entry::Stored(handle));
                    tenant.uncharge(Entry::Resident { shared: false });
                    tenant.counters.add(Counter::Evictions, 1);
                    report.evicted += 1;
                    report.left.push(address);
                    if waits {
                        wanted.push(address);
                    }
                }
                Some(None) => {
                    // The store is full: the page goes back to where it was.
                    self.page.0.copy_from_slice(content.expect("it was read"));
                    match space.uffd.copy(address, &self.page) {
                        Fill::Done { .. } | Fill::Present => {
                            gate.slots[slot] = 0;
                            tenant.map.set(page, Entry::Resident { shared: false });
                            report.stayed.push((page, address, Stayed::StoreFull));
                        }
                        // Later: the transfer range keeps it.
                        _ => space.has_strays.store(true, Ordering::Release),
                    }
                }
                None => {
                    gate.slots[slot] = 0;
                    let Moved::No(reason) = result else { continue };
                    stay(space, tenant, page, address, reason, waits, report);
                }
            }
        }
        drop(gate);
        space.hand_over(wanted);
        if let Some(batch) = batch {
            batch.give_to_heirs(tenant, space.id);
        }
    }

    /// Marks up to a batch of `pages` as leaving and writes the command's entries.
    fn compose(
        &mut self,
        space: &Space,
        tenant: &Tenant,
        control: &Control,
        excluded: &Excluded,
        pages: &[PageId],
        report: &mut BatchReport,
    ) -> usize {
        let mut gate = lock(&space.gate);
        control.batch_epoch.store(control.epoch.load(Ordering::SeqCst), Ordering::Relaxed);
        control.batch_thread_seq.store(excluded.thread_seq, Ordering::Relaxed);
        let mut count = 0;
        for &page in pages.iter().take(BATCH_PAGES) {
            let Some((owner, piece)) = tenant.map.owner(page.leaf()) else { continue };
            if owner != space.id {
                continue;
            }
            let address = crate::events::address_of(piece, page.index());
            let resident = tenant.map.get(page);
            if !resident.is_resident() {
                continue;
            }
            // Memory that is not registered must never be moved: its program would
            // read zeroes there, not wait.
            let one = Range { start: address, end: address + PAGE };
            if gate.page(address) != Some(page) || !gate.is_registered(one) {
                continue;
            }
            if excluded.contains(address) {
                report.stayed.push((page, address, Stayed::Pinned));
                continue;
            }
            if resident == (Entry::Resident { shared: true }) {
                // Leaving pages are charged here.
                tenant.resident_pages.fetch_add(1, Ordering::Relaxed);
            }
            let entry = &control.entries[count];
            entry.address.store(address, Ordering::Relaxed);
            entry.result.store(RESULT_PENDING, Ordering::Relaxed);
            gate.slots[count] = address;
            tenant.map.set(page, Entry::Leaving { slot: count as u16, wanted: false });
            let copy = resident.handle();
            if copy.is_some() {
                tenant.kept_pages.fetch_sub(1, Ordering::Relaxed);
            }
            self.kept.push(copy.map(|handle| (handle, self.fingerprints.remove(&page))));
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

/// Empties the transfer range. The store has everything that was in it.
fn empty_transfer(space: &Space, agent: &Agent) -> bool {
    agent.command(Command::Discard, 0, BATCH_PAGES as u32);
    let done = agent.wait_idle(space, PATIENCE);
    space.transfer_clean.store(done, Ordering::Release);
    done
}

/// What a batch brought, for spaces that were forked in the middle of it: their
/// leaving pages have the same content, or were left in place too.
struct Inheritance {
    /// By slot: what came of the move, and the page in the store.
    slots: Vec<(Moved, Option<Handle>)>,
}

impl Inheritance {
    /// Holds a reference of its own to each page.
    fn new(tenant: &Tenant, results: &[Moved], stored: &[Option<Handle>]) -> Self {
        let mut stored = stored.iter();
        let slots = results.iter().map(|&result| {
            let handle = (result == Moved::Yes).then(|| stored.next().copied().flatten()).flatten();
            if let Some(handle) = handle {
                tenant.store.retain(handle);
            }
            (result, handle)
        });
        Self { slots: slots.collect() }
    }

    fn give_to_heirs(self, tenant: &Tenant, origin: SpaceId) {
        loop {
            // An heir that forks while it waits makes another one.
            let heirs = tenant.take_heirs(origin);
            if heirs.is_empty() {
                break;
            }
            for heir in heirs {
                self.give_to(tenant, &heir);
            }
        }
        for (_, handle) in self.slots {
            if let Some(handle) = handle {
                tenant.store.release(handle);
            }
        }
    }

    fn give_to(&self, tenant: &Tenant, heir: &Space) {
        let mut wanted = Vec::new();
        let mut gate = lock(&heir.gate);
        let mut left = false;
        for slot in 0..gate.slots.len() {
            let address = gate.slots[slot];
            let page = (address != 0).then(|| gate.page(address)).flatten();
            let Some(page) = page else { continue };
            let Entry::Leaving { wanted: waits, .. } = tenant.map.get(page) else { continue };
            let outcome = self.slots.get(slot).copied();
            let entry = match outcome {
                Some((Moved::Yes, Some(handle))) => {
                    tenant.store.retain(handle);
                    Entry::Stored(handle)
                }
                Some((Moved::Yes, None)) => {
                    left = true;
                    continue;
                }
                Some((Moved::No(_), _)) | None => Entry::Resident { shared: true },
            };
            gate.slots[slot] = 0;
            tenant.map.set(page, entry);
            tenant.uncharge(Entry::Resident { shared: false });
            if waits && entry.handle().is_some() {
                wanted.push(address);
            } else if waits {
                heir.uffd.wake(Range { start: address, end: address + PAGE });
            }
        }
        heir.has_shared.store(true, Ordering::Release);
        heir.has_strays.store(left, Ordering::Release);
        heir.is_heir.store(false, Ordering::Release);
        drop(gate);
        heir.hand_over(wanted);
    }
}

/// A page that was not moved is resident again.
fn stay(
    space: &Space,
    tenant: &Tenant,
    page: PageId,
    address: u64,
    reason: i32,
    waits: bool,
    report: &mut BatchReport,
) {
    let stayed = match reason {
        ENOENT => {
            // Discarded unseen: there is nothing to keep.
            tenant.map.set(page, Entry::Untouched);
            tenant.uncharge(Entry::Resident { shared: false });
            None
        }
        EBUSY => Some(Stayed::Busy),
        EINVAL => Some(Stayed::Pinned),
        _ => Some(Stayed::Cancelled),
    };
    if let Some(stayed) = stayed {
        tenant.map.set(page, Entry::Resident { shared: false });
        report.stayed.push((page, address, stayed));
        if stayed != Stayed::Cancelled {
            tenant.counters.add(Counter::EvictionsRefused, 1);
        }
    }
    if waits {
        // Its fault was of the moment before; it looks again.
        space.uffd.wake(Range { start: address, end: address + PAGE });
        if stayed.is_none() {
            space.hand_over([address]);
        }
    }
}

/// A resident page's level, for queues that are built anew.
pub(crate) fn level_of(tenant: &Tenant, page: PageId) -> Level {
    gap::level(tenant.map.age(page).load(Ordering::Relaxed))
}
