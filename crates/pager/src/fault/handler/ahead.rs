//! Pages that are brought before they are asked for: ahead of readers in order, where
//! the program has said that it wants them, and where all of it comes back, as after
//! a restore.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use strata_sys::Range;
use strata_units::{PAGE_SIZE, PageBuffer};

use super::{Filled, Served, SwapIn};
use crate::fault::clustering::{Clusters, addresses};
use crate::fault::reads::{Reads, Why};
use crate::fault::streams::Streams;
use crate::map::address::one_page;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// Pages brought ahead between two looks for threads that wait.
const AHEAD_AT_A_TIME: usize = 8;
/// Ranges that wait to be brought ahead.
const MOST_AHEAD: usize = 64;
/// Pages that must be free in the budget for it: as many as the keeper is woken
/// at.
const AHEAD_HEADROOM: i64 = crate::tenant::transitions::WAKE_AT_PAGES;
/// What comes around a page where all pages will: of a fault most is the messages
/// and the switches between threads.
const AROUND_BYTES: u64 = 16 * PAGE_SIZE as u64;
/// Pages brought at once where the program has said that it reads in order.
const IN_ORDER_PAGES: u64 = 256;
/// Readers of that kind that are told apart in one space.
const MOST_IN_ORDER: usize = 16;
/// Pieces that the program wants and that wait to be brought.
pub(crate) const MOST_HOT: usize = 64;
/// Pages that must be free in the budget for them: fewer than the keeper leaves.
const HOT_HEADROOM: i64 = 128;
/// How often that is looked at, and how often in vain.
const HOT_RETRY_AFTER: Duration = Duration::from_millis(5);
const MOST_HOT_LOOKS: u32 = 400;
/// The same with a file tier: who goes through memory in order there is ahead of
/// whoever evicts, and page after page waits for its own fault.
const AHEAD_HEADROOM_OF_FILE: i64 = AHEAD_HEADROOM / 4;

/// Pages that come before they are asked for.
#[derive(Default)]
pub(super) struct Ahead {
    streams: Streams,
    clusters: Clusters,
    /// What is still to come, at most [`MOST_AHEAD`].
    ranges: VecDeque<Range>,
    /// What the program has said that it wants, at most [`MOST_HOT`] pieces, or asked
    /// for first when it was restored the last time: comes after that, and waits for
    /// room.
    hot: VecDeque<Range>,
    /// What comes next where it has said that it reads in order, at most
    /// [`MOST_IN_ORDER`] readers: before the other two.
    in_order: VecDeque<Range>,
    /// Looks in a row at which there was no room for it.
    hot_looks: u32,
    /// The address space was, when the last page of it should have come.
    is_changing: bool,
    /// What will be after that, if the reader goes on: read from the file tier and
    /// kept at hand. At most as many.
    spares: VecDeque<Range>,
}

impl Ahead {
    /// A thread asked for the stored page at `address`; `in_order`: the program
    /// has said how it goes on.
    pub(super) fn follow(&mut self, space: &Space, tenant: &Tenant, address: u64, in_order: bool) {
        let pages = self.streams.follow(address);
        if pages == 0 && !in_order && self.ranges.len() < MOST_AHEAD {
            if tenant.comes_back.load(Ordering::Relaxed) {
                let start = address / AROUND_BYTES * AROUND_BYTES;
                self.ranges.push_back(Range { start, end: start + AROUND_BYTES });
            } else {
                self.bring_block(space, tenant, address);
            }
        }
        let range = |start: u64, pages: u64| Range { start, end: start + pages * PAGE_SIZE as u64 };
        let start = address + PAGE_SIZE as u64;
        if pages > 0 && !in_order {
            let near = range(start, pages);
            if self.ranges.len() < MOST_AHEAD {
                self.ranges.push_back(near);
            }
            if self.spares.len() < MOST_AHEAD {
                // With the page at which the reader will show that it has come.
                self.spares.push_back(range(near.end, pages + 1));
            }
        }
        if in_order {
            let end = start + IN_ORDER_PAGES * PAGE_SIZE as u64;
            // A reader that has caught up has one window, not one for each fault.
            self.in_order.retain(|known| known.end <= start || end <= known.start);
            self.in_order.push_back(Range { start, end });
            if self.in_order.len() > MOST_IN_ORDER {
                self.in_order.pop_front();
            }
            // What was brought at the fault before the last.
            let window = (IN_ORDER_PAGES + 1) * PAGE_SIZE as u64;
            let end = address.saturating_sub(window);
            let mut read = lock(&space.read);
            if read.len() < MOST_AHEAD {
                read.push(Range { start: end.saturating_sub(window), end });
            }
        }
    }

    /// Has those of the page's block come that are used together with it. Not what the
    /// advisor watches: to come would count as to be used.
    fn bring_block(&mut self, space: &Space, tenant: &Tenant, address: u64) {
        let gate = lock(&space.gate);
        let with = self.clusters.follow(address, |other| {
            gate.object
                .page(other)
                .is_some_and(|page| matches!(tenant.map.get(page), Entry::Stored(_)))
        });
        let after = address + PAGE_SIZE as u64;
        let mut next = after;
        for start in addresses(address, with) {
            if gate.object.page(start).is_some_and(|page| !tenant.advisor.watches(page)) {
                self.ranges.push_back(one_page(start));
            }
            if start == next {
                next += PAGE_SIZE as u64;
            }
        }
        if next > after {
            self.streams.brought(address, next);
        }
    }

    /// Takes what the keeper passes on.
    pub(super) fn take_hot(&mut self, space: &Space) {
        if self.hot.is_empty() {
            self.hot.extend(std::mem::take(&mut *lock(&space.hot)));
            self.hot_looks = 0;
        }
    }

    /// When to look again whether there is room, if anything waits for it.
    pub(super) fn patience(&mut self) -> Option<Duration> {
        self.is_changing = false;
        self.hot_looks += 1;
        if self.hot_looks > MOST_HOT_LOOKS {
            // A hint, not a promise.
            self.hot.clear();
        }
        (!self.hot.is_empty()).then_some(HOT_RETRY_AFTER)
    }

    /// Whether there is anything that may come now.
    pub(super) fn can_bring(&self, tenant: &Tenant, reads: &Reads) -> bool {
        let wants = !self.ranges.is_empty()
            || !self.in_order.is_empty()
            || !self.hot.is_empty() && !self.is_changing && tenant.headroom_pages() >= HOT_HEADROOM;
        wants && reads.has_room() || !self.spares.is_empty() && reads.has_room_for_spares()
    }

    /// Brings some of it; threads that wait come first again after that.
    pub(super) fn bring(
        &mut self,
        space: &Space,
        tenant: &Tenant,
        reads: &mut Reads,
        buffer: &mut PageBuffer,
    ) {
        let slow = tenant.store.has_slow_file();
        let least_near = if slow { AHEAD_HEADROOM_OF_FILE } else { AHEAD_HEADROOM };
        let mut looked = 0;
        while looked < AHEAD_AT_A_TIME && reads.has_room() {
            looked += 1;
            // What is brought must not make others wait.
            let room = tenant.headroom_pages() - reads.coming();
            let (queue, least, waits) = if !self.in_order.is_empty() {
                (&mut self.in_order, HOT_HEADROOM, false)
            } else if !self.ranges.is_empty() {
                (&mut self.ranges, least_near, false)
            } else {
                (&mut self.hot, HOT_HEADROOM, true)
            };
            let Some(range) = queue.front_mut() else { break };
            if range.is_empty() || room < least {
                if waits && !range.is_empty() {
                    // The keeper makes room, or does not.
                    break;
                }
                queue.pop_front();
                continue;
            }
            let address = range.start;
            range.start += PAGE_SIZE as u64;
            let claimed = space.claim_ahead(tenant, &lock(&space.gate), address);
            let Some(swap_in) = claimed else { continue };
            if reads.take(tenant, swap_in, Why::Ahead) {
                // It costs no time now, and in one read with those that follow less.
                looked -= 1;
                continue;
            }
            let filled = space.serve_stored(tenant, swap_in, buffer);
            // The address space is changing: a message says how. A guess is not
            // worth a second try.
            if waits && matches!(filled, Filled::Not(Served::Defer | Served::Again)) {
                tenant.map.set(swap_in.page, Entry::Stored(swap_in.handle));
                range.start = address;
                self.is_changing = true;
                break;
            }
            if waits {
                self.hot_looks = 0;
            }
            space.settle_ahead(tenant, swap_in, filled);
        }
        self.keep_at_hand(space, tenant, reads);
    }

    fn keep_at_hand(&mut self, space: &Space, tenant: &Tenant, reads: &mut Reads) {
        if !tenant.store.has_slow_file() {
            self.spares.clear();
        }
        while reads.has_room_for_spares() {
            let Some(range) = self.spares.front_mut() else { return };
            if range.is_empty() {
                self.spares.pop_front();
                continue;
            }
            let address = range.start;
            range.start += PAGE_SIZE as u64;
            // Under the gate nothing is released that the page map names.
            let gate = lock(&space.gate);
            let Some(page) = gate.object.page(address) else { continue };
            if let Entry::Stored(handle) = tenant.map.get(page)
                && !tenant.store.is_awaited(handle)
            {
                reads.take(tenant, SwapIn { page, address, handle }, Why::Spare);
            }
        }
    }
}
