//! What one fault gets, decided under the gate: a zero page at once, a stored page that
//! is to be put in place, or nothing yet.

use strata_sys::{Fill, Range};
use strata_units::{PAGE_SIZE, PAGES_PER_LEAF, PageId};

use super::{Served, SwapIn};
use crate::fault::events::FaultMessage;
use crate::map::address::{PIECE_BYTES, one_page};
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::settings::Setting;
use crate::tenant::Tenant;
use crate::tenant::space::{Gate, Space};

/// A first-touch fill never maps more than this at once: 2 MiB, one leaf.
const MOST_ZERO_PAGES: u64 = PAGES_PER_LEAF as u64;
/// A first-touch fill takes at most this part of what is free in the budget.
const ZERO_SHARE: i64 = 16;

/// What is to be done about one fault.
#[derive(Debug)]
pub(super) enum Claim {
    /// Nothing more to do.
    Done,
    /// Put this stored page in place.
    Fill {
        swap_in: SwapIn,
        /// The thread that waits is about to write to it.
        to_write: bool,
        /// The program has said that it reads in order here.
        in_order: bool,
    },
    /// It is on its way out; the keeper hands it back when it has arrived.
    Wait,
    /// No DRAM left: later.
    Defer,
    /// The address space is changing: in a moment.
    Again,
    /// What the process inherited is not known yet.
    Adjust,
    /// Its content is lost.
    Poison(u64),
}

impl Space {
    /// Decides what one fault gets. The caller holds the gate.
    pub(super) fn claim(
        &self,
        tenant: &Tenant,
        gate: &mut Gate,
        fault: &FaultMessage,
        waits_long: bool,
    ) -> Claim {
        let address = fault.address;
        if fault.protected {
            return match self.before_write(tenant, gate, address) {
                true => Claim::Done,
                false => Claim::Again,
            };
        }
        let agent = self.agent();
        // Before its agent has come nothing of a process can be evicted: to make it
        // wait for DRAM would only put that off.
        let must_wait = agent.is_some() && !waits_long;
        if let Some(agent) = agent {
            // That of a restored process may still be on its way.
            let is_stored = gate.object.page(address).is_some_and(|page| {
                matches!(tenant.map.get(page), Entry::Stored(_) | Entry::Arriving(_))
            });
            if agent.ranges.own.contains(address) && !is_stored {
                return self.zero_here(tenant, address);
            }
            // What has not been moved there is elsewhere: whoever reads it, the
            // evictor too, is told so.
            if agent.ranges.transfer.contains(address) {
                return match self.held.takes(fault.asker.thread(), address) {
                    true => Claim::Wait,
                    false => Claim::Poison(address),
                };
            }
        }
        let Some(page) = gate.object.page_or_new(&tenant.map, address) else {
            return Claim::Defer;
        };
        let entry = tenant.map.get(page);
        if self.must_adjust(entry) {
            return Claim::Adjust;
        }
        match entry {
            // Discarded unseen (MADV_FREE), or another thread's fault on the
            // same page came first: then it is there, and this only wakes.
            Entry::Resident { .. } | Entry::Kept(_) | Entry::OnNode => {
                self.zero_gone(tenant, address)
            }
            Entry::Leaving { slot, .. } => {
                tenant.map.set(page, Entry::Leaving { slot, wanted: true });
                Claim::Wait
            }
            Entry::Lost | Entry::Pending | Entry::Copied => Claim::Poison(address),
            _ if !tenant.may_fill() && must_wait => {
                tenant.wake_keeper();
                Claim::Defer
            }
            Entry::Untouched | Entry::Discarded => {
                let window = self.zero_window(tenant, gate, address);
                self.zero_new(tenant, window, page)
            }
            Entry::Stored(handle) | Entry::Arriving(handle) => {
                tenant.map.set(page, Entry::Arriving(handle));
                self.note_touched(address);
                let swap_in = SwapIn { page, address, handle };
                let in_order = !gate.settings.is_empty()
                    && gate.settings.at(address) == Some(Setting::Sequential);
                Claim::Fill { swap_in, to_write: fault.to_write, in_order }
            }
        }
    }

    /// The stored page at `address`, to be brought although nobody asked. The
    /// caller holds the gate.
    pub(super) fn claim_ahead(&self, tenant: &Tenant, gate: &Gate, address: u64) -> Option<SwapIn> {
        let page = gate.object.page(address)?;
        let Entry::Stored(handle) = tenant.map.get(page) else { return None };
        // What comes from elsewhere comes by itself, and those first for whom threads wait.
        if self.is_unadjusted() || tenant.store.is_awaited(handle) {
            return None;
        }
        tenant.map.set(page, Entry::Arriving(handle));
        Some(SwapIn { page, address, handle })
    }

    /// How much to map at a first touch: one page, but twice as much each time
    /// as long as touches go on where the last fill ended.
    pub(super) fn zero_window(&self, tenant: &Tenant, gate: &mut Gate, address: u64) -> Range {
        let in_sequence = address == gate.zero_end && gate.zero_pages > 0;
        let wish = if in_sequence { (gate.zero_pages * 2).min(MOST_ZERO_PAGES) } else { 1 };
        let afford = (tenant.headroom_pages() / ZERO_SHARE).max(1) as u64;
        let wish = wish.min(afford);
        let leaf_end = (address / PIECE_BYTES + 1) * PIECE_BYTES;
        let mapped_end = gate.registered_end(address).unwrap_or(address + PAGE_SIZE as u64);
        let most = leaf_end.min(mapped_end).min(address + wish * PAGE_SIZE as u64);
        let mut end = address + PAGE_SIZE as u64;
        while end < most
            && gate.object.page(end).is_none_or(|page| tenant.map.get(page).reads_zero())
        {
            end += PAGE_SIZE as u64;
        }
        gate.zero_end = end;
        gate.zero_pages = if in_sequence { wish } else { 1 };
        Range { start: address, end }
    }

    /// A zero page at `address` unless there is a page. Under the gate, as all
    /// zero pages are put in place: later the page could have been evicted, and
    /// zeroes would stand where a stored page belongs.
    pub(super) fn zero_here(&self, tenant: &Tenant, address: u64) -> Claim {
        match self.uffd.zero(one_page(address)) {
            Fill::Done { .. } => Claim::Done,
            other => self.not_zeroed(tenant, address, other),
        }
    }

    /// The same for a page that was in place, for all that is known. If it is not,
    /// the kernel has taken it by MADV_FREE, or it was lost: nobody else would ever
    /// say so.
    pub(super) fn zero_gone(&self, tenant: &Tenant, address: u64) -> Claim {
        let filled = self.uffd.zero(one_page(address));
        if !matches!(filled, Fill::Done { .. }) {
            return self.not_zeroed(tenant, address, filled);
        }
        let pid = self.pid().unwrap_or(0);
        tenant.log(&format!("page {address:#x} of process {pid} was in place and is gone: zero"));
        Claim::Done
    }

    /// Zero pages in `window`, whose first page is `first`. The caller holds the
    /// gate: see [`Self::zero_here`].
    pub(super) fn zero_new(&self, tenant: &Tenant, window: Range, first: PageId) -> Claim {
        let filled = match self.uffd.zero(window) {
            // The window may span mappings of different kinds.
            Fill::Unmapped if window.len() > PAGE_SIZE as u64 => {
                self.uffd.zero(one_page(window.start))
            }
            other => other,
        };
        let Fill::Done { pages } = filled else {
            // Present: entered by nobody yet, or just being discarded.
            return self.not_zeroed(tenant, window.start, filled);
        };
        tenant.counters.add(Counter::ZeroFaults, 1);
        for offset in 0..pages as u32 {
            let page = PageId(first.0 + offset);
            tenant.now_resident(page);
        }
        Claim::Done
    }

    /// What a zero fill that put nothing in place means for its fault.
    pub(super) fn not_zeroed(&self, tenant: &Tenant, address: u64, outcome: Fill) -> Claim {
        match self.not_filled(tenant, address, outcome) {
            Served::Done => Claim::Done,
            Served::Defer => Claim::Defer,
            Served::Again => Claim::Again,
        }
    }
}
