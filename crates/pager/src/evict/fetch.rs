//! The second half of an eviction: what is in the transfer range is fetched, goes
//! into the store, and is settled. The first half is in [`crate::evict`].
//!
//! Threads may already wait for pages that are here. They are not made to wait
//! for the packing of a whole batch: it is settled in small parts, and a page
//! that is wanted goes back to its place at once, without passing the store.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use strata_policy::{Level, gap};
use strata_store::Put;
use strata_sys::{Range, ReadOutcome};
use strata_units::{Handle, PAGE, PAGE_SIZE};

use crate::evict::{BatchReport, EBUSY, EINVAL, ENOENT, Evictor, Moved, Stayed};
use crate::map::address::{add_run, one_page};
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::space::{Agent, Gate, Leaving, Space};

/// Pages packed between two looks for threads that wait: about a tenth of a
/// millisecond.
const PART_PAGES: usize = 16;

/// A page of the batch: its transfer slot, and its place in the buffer.
#[derive(Clone, Copy, Debug)]
struct Fetched {
    slot: usize,
    index: usize,
}

/// What a batch is settled with.
struct Settling<'a> {
    space: &'a Space,
    tenant: &'a Tenant,
    /// When the pages were out.
    began: Instant,
    /// The policy's time, and its guess for pages without history.
    now: u32,
    newcomer: Level,
    report: &'a mut BatchReport,
    /// Addresses of settled pages that threads wait for.
    wanted: Vec<u64>,
}

impl Evictor {
    /// Fetches what was moved (`results`, of the slots from `first` on), stores and
    /// settles it.
    pub(crate) fn fetch(
        &mut self,
        space: &Space,
        tenant: &Tenant,
        agent: &Agent,
        (results, first): (&[Moved], usize),
        report: &mut BatchReport,
    ) {
        let transfer = agent.ranges.transfer.start;
        let slots = first..first + results.len();
        let moved = slots.clone().filter(|&slot| results[slot - first] == Moved::Yes);
        let mut rest: VecDeque<Fetched> =
            moved.enumerate().map(|(index, slot)| Fetched { slot, index }).collect();
        let mut runs: Vec<Range> = Vec::new();
        for &Fetched { slot, .. } in &rest {
            add_run(&mut runs, one_page(transfer + slot as u64 * PAGE));
        }
        let bytes = rest.len() * PAGE_SIZE;
        if agent.process.read_runs(&runs, &mut self.buffer[..bytes]) == ReadOutcome::Failed {
            // The process is going, or its agent lied about what it moved. The
            // pages stay where they are; nothing is dropped.
            space.has_strays.store(true, Ordering::Release);
            return;
        }
        let mut settling = Settling {
            space,
            tenant,
            began: Instant::now(),
            now: tenant.counters.get(Counter::PolicyTime) as u32,
            newcomer: tenant.census().newcomer(),
            report,
            wanted: Vec::new(),
        };
        let mut gate = lock(&space.gate);
        for (slot, &result) in slots.zip(results) {
            if let Moved::No(reason) = result {
                settling.not_moved(&mut gate, slot, reason);
            }
        }
        loop {
            rest.retain(|&page| !self.put_back_wanted(&mut settling, &mut gate, page));
            drop(gate);
            space.hand_over(settling.wanted.drain(..));
            if rest.is_empty() {
                break;
            }
            let part: Vec<Fetched> = rest.drain(..rest.len().min(PART_PAGES)).collect();
            let stored: Vec<Option<Handle>> =
                part.iter().map(|&page| self.store(tenant, page, settling.report)).collect();
            gate = lock(&space.gate);
            for (&page, handle) in part.iter().zip(stored) {
                match handle {
                    Some(handle) => settling.moved(&mut gate, page.slot, handle),
                    // The store is full: the page goes back to where it was.
                    None => self.put_back(&mut settling, &mut gate, page, Stayed::StoreFull),
                }
            }
        }
    }

    /// Puts a page into the store. None: it takes none, and why is reported.
    fn store(
        &mut self,
        tenant: &Tenant,
        page: Fetched,
        report: &mut BatchReport,
    ) -> Option<Handle> {
        let Fetched { slot, index } = page;
        let page = &self.buffer[index * PAGE_SIZE..][..PAGE_SIZE];
        let page = page.try_into().expect("a page of the buffer");
        let had_copy = self.kept.get(slot).is_some_and(Option::is_some);
        let unchanged = self.kept.get_mut(slot).and_then(|kept| {
            kept.take_if(|(handle, fingerprint)| {
                fingerprint.is_some_and(|known| tenant.store.is_unchanged(*handle, known, page))
            })
        });
        if had_copy {
            self.copies.count(unchanged.is_some());
        }
        if let Some((handle, _)) = unchanged {
            tenant.counters.add(Counter::EvictionsUnchanged, 1);
            let promotes = self.promotes.get(slot).is_some_and(|&promotes| promotes);
            let promoted = promotes.then(|| tenant.store.promote(handle, page)).flatten();
            if let Some(promoted) = promoted {
                tenant.counters.add(Counter::Promotions, 1);
                tenant.store.release(handle);
                return Some(promoted);
            }
            return Some(handle);
        }
        if report.store_error.is_some() {
            return None;
        }
        // Staged pages are packed when there is time. While eviction goes on
        // without a pause there is none, and keeping a page twice only costs.
        let how = match (self.densely, self.packs_at_once) {
            (true, _) => Put::Zstd,
            (false, true) => Put::Fast,
            (false, false) => Put::Staged,
        };
        match tenant.store.put(page, how) {
            Ok(handle) => Some(handle),
            Err(error) => {
                report.store_error = Some(error.to_string());
                None
            }
        }
    }

    /// Puts a page back in place if a thread waits for it. Whether there is
    /// nothing more to do about the page, because of that or because it was
    /// discarded on its way.
    fn put_back_wanted(
        &mut self,
        settling: &mut Settling<'_>,
        gate: &mut Gate,
        page: Fetched,
    ) -> bool {
        let waits = settling.leaving(gate, page.slot).is_some_and(|leaving| leaving.wanted);
        // A snapshot has the page from the store.
        let to_store = gate.is_pending(&settling.tenant.map, gate.slots[page.slot]);
        if waits && !to_store {
            self.put_back(settling, gate, page, Stayed::Wanted);
        }
        gate.slots[page.slot] == 0
    }

    /// Puts a page back in place, for `why`. If that cannot be just now, the
    /// transfer range keeps it.
    fn put_back(
        &mut self,
        settling: &mut Settling<'_>,
        gate: &mut Gate,
        page: Fetched,
        why: Stayed,
    ) {
        let Fetched { slot, index } = page;
        let Some(leaving) = settling.leaving(gate, slot) else { return };
        let Settling { space, tenant, .. } = *settling;
        self.page.0.copy_from_slice(&self.buffer[index * PAGE_SIZE..][..PAGE_SIZE]);
        if gate.put_back(tenant, &space.uffd, (slot, leaving), &self.page).is_err() {
            // One that is wanted goes by way of the store, then.
            if why == Stayed::StoreFull {
                space.has_strays.store(true, Ordering::Release);
            }
            return;
        }
        if why == Stayed::Wanted {
            tenant.advisor.left(leaving.page, settling.began);
            tenant.advisor.returned(leaving.page);
            tenant.counters.add(Counter::Faults, 1);
            tenant.counters.add(Counter::SoftFaults, 1);
        }
        settling.report.stayed.push((leaving.page, leaving.address, why));
    }
}

impl Settling<'_> {
    /// The page that is leaving through `slot`. None: discarded on its way, or no page of
    /// this batch; the slot is free then.
    fn leaving(&self, gate: &mut Gate, slot: usize) -> Option<Leaving> {
        let leaving = gate.leaving(&self.tenant.map, slot);
        if leaving.is_none() {
            gate.slots[slot] = 0;
        }
        leaving
    }

    /// A page that stayed.
    fn not_moved(&mut self, gate: &mut Gate, slot: usize, reason: i32) {
        if let Some(leaving) = self.leaving(gate, slot) {
            gate.slots[slot] = 0;
            if reason == ENOENT {
                gate.captured_by_leaving(self.tenant, slot, leaving.address, None);
            }
            stay(self.space, self.tenant, leaving, reason, self.report);
        }
    }

    /// A page that is in the store now.
    fn moved(&mut self, gate: &mut Gate, slot: usize, handle: Handle) {
        let tenant = self.tenant;
        let Some(Leaving { page, address, wanted }) = self.leaving(gate, slot) else {
            tenant.store.release(handle);
            return;
        };
        gate.slots[slot] = 0;
        gate.captured_by_leaving(tenant, slot, address, Some(handle));
        let age = tenant.map.age(page);
        age.store(
            gap::left(age.load(Ordering::Relaxed), self.now, self.newcomer),
            Ordering::Relaxed,
        );
        // Before a fault can bring it back.
        tenant.advisor.left(page, self.began);
        tenant.overwrite(page, tenant.map.get(page), Entry::Stored(handle));
        tenant.counters.add(Counter::Evictions, 1);
        self.report.evicted += 1;
        self.report.left.push(address);
        if wanted {
            self.wanted.push(address);
        }
    }
}

/// A page that was not moved is resident again.
fn stay(
    space: &Space,
    tenant: &Tenant,
    Leaving { page, address, wanted }: Leaving,
    reason: i32,
    report: &mut BatchReport,
) {
    let stayed = match reason {
        ENOENT => {
            // Discarded unseen: there is nothing to keep.
            tenant.overwrite(page, tenant.map.get(page), Entry::Untouched);
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
    if wanted {
        // Its fault was of the moment before; it looks again.
        space.uffd.wake(one_page(address));
        if stayed.is_none() {
            space.hand_over([address]);
        }
    }
}
