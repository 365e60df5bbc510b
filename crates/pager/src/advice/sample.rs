//! The sample of a tenant far from its budget, for the advisor: which pieces of its
//! memory are registered, so that their pages can be watched.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use strata_policy::sampler;
use strata_sys::{Mapping, Range, Registration};
use strata_units::PageId;

use crate::fault::handler;
use crate::map::lock;
use crate::regions::eligibility::is_large_data;
use crate::regions::registration::{register_all, stacks_of};
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// One piece in so many is registered, of a tenant that is not large.
const PART: u64 = 112;
/// Pieces wanted: each splits a mapping in the kernel and takes a leaf of the page map,
/// if it is alone there. Pages that lie together are used alike, so one of each tells
/// most.
const WANTED: u64 = 640;
/// Most pieces: with some 65,000 mappings (`vm.max_map_count`) a process gets no more
/// memory. Above what the limit lets through of a tenant of any size: what there is no
/// room for is what came last.
const MOST: usize = 1536;
const _: () = assert!(MOST as u64 > WANTED + WANTED / 2 + WANTED / 8);
const SMALLEST_BYTES: u64 = 4 << 10;
const HUGE_BYTES: u64 = 2 << 20;

/// Which pieces of address spaces are of the sample: those whose hash is below a limit,
/// which falls as the tenant grows and rises as it shrinks. So a sample is part of every
/// larger one, and memory that came early is in it no more often than what came late.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pieces {
    bytes: u64,
    /// How often the limit has been halved.
    halvings: u32,
}

impl Pieces {
    /// Of a process with huge pages a piece is as large as these: a smaller one would
    /// cost it a huge page, too.
    pub(crate) fn new(has_huge_pages: bool) -> Self {
        Self { bytes: if has_huge_pages { HUGE_BYTES } else { SMALLEST_BYTES }, halvings: 0 }
    }

    /// Has about as many pieces as are wanted in so much memory.
    pub(crate) fn fit_to(&mut self, bytes: u64) {
        let all = bytes / self.bytes / PART;
        while all >> self.halvings > WANTED + WANTED / 2 {
            self.halvings += 1;
        }
        while self.halvings > 0 && all >> self.halvings < WANTED / 3 {
            self.halvings -= 1;
        }
    }

    fn hash(self, number: u64) -> u64 {
        u64::from(sampler::hash(PageId(number as u32)))
    }

    fn takes(self, number: u64) -> bool {
        self.hash(number) < ((1 << 32) / PART) >> self.halvings
    }

    /// Whether the page at `address` lies in a piece of the sample.
    pub(crate) fn contain(self, address: u64) -> bool {
        self.takes(address / self.bytes)
    }
}

/// Registers the sample of what is eligible and in DRAM; never more than a hundredth of
/// that or [`MOST`] pieces. What is reserved and was never touched is not looked at,
/// however large it is. Returns whether the process was there.
pub(crate) fn register_sample(space: &Arc<Space>, tenant: &Arc<Tenant>, pieces: Pieces) -> bool {
    let Some(agent) = space.agent() else { return true };
    let Ok(maps) = agent.process.maps() else { return false };
    let control = agent.control.control();
    if control.thread_overflow.load(Ordering::Relaxed) != 0 {
        return true;
    }
    let mut stacks = stacks_of(control);
    stacks.extend(agent.process.stack_pointers());
    let mut present_bytes = 0;
    let mut numbers = Vec::new();
    let large = |mapping: &&Mapping| is_large_data(mapping, agent.ranges, &stacks).is_ok();
    for mapping in maps.iter().filter(large) {
        let whole = mapping.range.start.div_ceil(pieces.bytes)..mapping.range.end / pieces.bytes;
        let found = |present: Range| {
            present_bytes += present.len();
            let touched = present.start / pieces.bytes..present.end.div_ceil(pieces.bytes);
            for number in touched.start.max(whole.start)..touched.end.min(whole.end) {
                if pieces.takes(number) && numbers.last() != Some(&number) {
                    numbers.push(number);
                }
            }
        };
        // Whether it is gone is told where something is registered.
        if agent.process.present(mapping.range, found).is_err() {
            return true;
        }
    }
    // By their hashes: what is one too many is any of them.
    numbers.sort_unstable_by_key(|&number| pieces.hash(number));
    numbers.truncate((present_bytes / 100 / pieces.bytes) as usize);
    let mut new: Vec<Range> = numbers
        .iter()
        .map(|&number| Range { start: number * pieces.bytes, end: (number + 1) * pieces.bytes })
        .collect();
    {
        let gate = lock(&space.gate);
        new.retain(|&piece| !gate.is_registered(piece));
        new.truncate(MOST.saturating_sub(gate.registered.len()));
    }
    if new.is_empty() {
        return true;
    }
    handler::start(space, tenant);
    if space.uffd.register(agent.ranges.transfer) == Registration::Gone {
        return false;
    }
    register_all(space, tenant, &agent.process, &new)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of which there are so many, of one gibibyte.
    fn chosen(pieces: Pieces) -> Vec<u64> {
        (0..(1 << 30) / pieces.bytes).filter(|&number| pieces.takes(number)).collect()
    }

    #[test]
    fn about_as_many_pieces_as_wanted_are_sampled_of_tenants_of_any_size() {
        for gibibytes in 1..40 {
            let mut pieces = Pieces::new(false);
            pieces.fit_to(gibibytes << 30);
            let count = chosen(pieces).len() as u64 * gibibytes;
            assert!(
                (WANTED / 3..WANTED * 2).contains(&count),
                "{count} pieces of {gibibytes} GiB, {pieces:?}"
            );
        }
    }

    /// Else what came early would be watched more often than what came late.
    #[test]
    fn there_is_room_for_all_that_is_chosen_of_a_tenant_that_grows() {
        let mut pieces = Pieces::new(false);
        for mebibytes in (64..2048).step_by(32) {
            let bytes = mebibytes << 20;
            pieces.fit_to(bytes);
            let count = (0..bytes / pieces.bytes).filter(|&number| pieces.takes(number)).count();
            assert!(count <= MOST, "{count} pieces of {mebibytes} MiB");
        }
    }

    #[test]
    fn the_sample_of_a_tenant_that_has_grown_is_part_of_what_it_was() {
        let mut pieces = Pieces::new(false);
        pieces.fit_to(1 << 30);
        let before = chosen(pieces);
        pieces.fit_to(4 << 30);
        let after = chosen(pieces);
        assert!(after.len() < before.len() / 2 && !after.is_empty());
        assert!(after.iter().all(|number| before.contains(number)));
        // A tenant of half the size has the same: it would be sampled anew all the time.
        let grown = pieces;
        pieces.fit_to(2 << 30);
        assert_eq!(pieces, grown);
        pieces.fit_to(1 << 30);
        let shrunk = chosen(pieces);
        assert!(shrunk.len() > after.len());
        assert!(shrunk.iter().all(|number| before.contains(number)));
    }
}
