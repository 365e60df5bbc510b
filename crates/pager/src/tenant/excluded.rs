//! Memory of a process that never leaves: what its threads and mutexes need in place.

use std::sync::atomic::Ordering;

use strata_sys::Range;
use strata_units::PAGE;
use strata_units::wire::Control;

/// Pages around a thread control block (below, above) that are never evicted:
/// the kernel writes there when a thread ends, and cannot wait for a page then.
const CONTROL_BLOCK_PAGES: (u64, u64) = (1, 3);

/// Addresses that are never evicted, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Excluded {
    ranges: Vec<Range>,
    /// The thread table's generation that this holds for.
    pub(crate) thread_seq: u32,
    pinned_seq: u32,
}

impl Excluded {
    /// What the threads and mutexes of `control` keep in place. Asked of an
    /// untrusted table: a wrong answer pins or evicts only its own tenant's
    /// pages.
    pub(crate) fn read(control: &Control) -> Self {
        // The generation first: a thread that comes later raises it, and the
        // agent cancels a batch that was composed before.
        let thread_seq = control.thread_seq.load(Ordering::SeqCst);
        let pinned_seq = control.pinned_seq.load(Ordering::SeqCst);
        let mut ranges = Vec::new();
        for slot in &control.threads {
            let block = slot.control_block.load(Ordering::Acquire);
            if block != 0 {
                let page = block & !(PAGE - 1);
                ranges.push(Range {
                    start: page.saturating_sub(CONTROL_BLOCK_PAGES.0 * PAGE),
                    end: page.saturating_add(CONTROL_BLOCK_PAGES.1 * PAGE),
                });
            }
        }
        for pinned in &control.pinned {
            let address = pinned.load(Ordering::Acquire);
            if address != 0 {
                let page = address & !(PAGE - 1);
                ranges.push(Range { start: page, end: page.saturating_add(PAGE) });
            }
        }
        ranges.sort_unstable_by_key(|range| range.start);
        Self { ranges, thread_seq, pinned_seq }
    }

    /// The parts of `range` that are never evicted, in order, apart from each
    /// other.
    pub(crate) fn within(&self, range: Range) -> Vec<Range> {
        let mut parts: Vec<Range> = Vec::new();
        for out in &self.ranges {
            let part = Range { start: out.start.max(range.start), end: out.end.min(range.end) };
            match parts.last_mut() {
                _ if part.is_empty() => {}
                Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                _ => parts.push(part),
            }
        }
        parts
    }

    /// Whether the table has changed since.
    pub(crate) fn is_stale(&self, control: &Control) -> bool {
        control.thread_seq.load(Ordering::SeqCst) != self.thread_seq
            || control.pinned_seq.load(Ordering::SeqCst) != self.pinned_seq
    }

    pub(crate) fn contains(&self, address: u64) -> bool {
        // Ranges may overlap, all have nearly the same small length: look at
        // those that start within it.
        let longest = (CONTROL_BLOCK_PAGES.0 + CONTROL_BLOCK_PAGES.1) * PAGE;
        let from =
            self.ranges.partition_point(|range| range.start < address.saturating_sub(longest));
        self.ranges[from..]
            .iter()
            .take_while(|range| range.start <= address)
            .any(|range| range.contains(address))
    }

    /// The parts of `range` that may be write-protected.
    pub(crate) fn spared(&self, range: Range) -> Vec<Range> {
        let mut parts = Vec::new();
        let mut start = range.start;
        for out in self.within(range) {
            if start < out.start {
                parts.push(Range { start, end: out.start });
            }
            start = start.max(out.end);
        }
        if start < range.end {
            parts.push(Range { start, end: range.end });
        }
        parts
    }
}
