//! Which pages of a block come back with the one that is asked for, because they are
//! asked for soon after it: a database's pages are larger than the machine's. Knows
//! addresses only; whether a page can come is the handler's business.
//!
//! A page that was brought is mapped, and nobody sees whether it is used. So in one block
//! of eight nothing is brought, and there it shows: of the pages that were out when the
//! first of the block was asked for, how many are asked for while so many other such
//! blocks are opened. That is told apart by which page came first, and which other one:
//! what lies at the same place in all blocks (a header, a directory) is used alike.

use std::collections::VecDeque;

use strata_units::PAGE;

/// Pages of a block.
const PAGES: usize = 4;
const BLOCK_BYTES: u64 = PAGES as u64 * PAGE;
/// One block in so many is only watched.
const WATCHED_PART: u64 = 8;
/// Blocks watched at a time: a page that comes back later was not used together.
const WATCHED: usize = 32;
/// A page comes with another if it would have been asked for this often: less, and
/// what is saved in faults is paid for in evictions.
const WORTH: f32 = 0.6;
/// Not before so many blocks were seen; each counts for this part of the mean then.
const LEAST_SEEN: u32 = 32;
const MOST_SEEN: u32 = 128;

/// A block that was opened.
#[derive(Clone, Copy, Debug)]
struct Watched {
    block: u64,
    /// The page that was asked for first.
    first: usize,
    /// A bit for each other page that was out then, and for each asked for since.
    out: u8,
    asked: u8,
}

/// How often a page was asked for.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    share: f32,
    seen: u32,
}

impl Mean {
    fn add(&mut self, asked: bool) {
        self.seen = (self.seen + 1).min(MOST_SEEN);
        self.share += (f32::from(u8::from(asked)) - self.share) / self.seen as f32;
    }

    fn is_worth_it(self) -> bool {
        self.seen >= LEAST_SEEN && self.share >= WORTH
    }
}

/// What is used together in a space.
#[derive(Debug, Default)]
pub(crate) struct Clusters {
    watched: VecDeque<Watched>,
    /// By the page that came first, and the other.
    means: [[Mean; PAGES]; PAGES],
}

impl Clusters {
    /// The page at `address` was asked for. The others of its block that should come
    /// too, a bit each. `is_out` says of an address whether its page is; it is asked
    /// only in blocks that are watched. Constant time.
    pub(crate) fn follow(&mut self, address: u64, is_out: impl Fn(u64) -> bool) -> u8 {
        let block = address / BLOCK_BYTES;
        let page = (address % BLOCK_BYTES / PAGE) as usize;
        if !is_watched(block) {
            return self.with(page);
        }
        if let Some(known) = self.watched.iter_mut().find(|known| known.block == block) {
            known.asked |= 1 << page;
            return 0;
        }
        let others = (0..PAGES).filter(|&other| other != page);
        let out = others
            .filter(|&other| is_out(block * BLOCK_BYTES + other as u64 * PAGE))
            .fold(0, |out, other| out | 1 << other);
        self.watched.push_back(Watched { block, first: page, out, asked: 0 });
        if self.watched.len() > WATCHED
            && let Some(last) = self.watched.pop_front()
        {
            for other in pages_of(last.out) {
                self.means[last.first][other].add(last.asked >> other & 1 == 1);
            }
        }
        0
    }

    fn with(&self, page: usize) -> u8 {
        let means = self.means[page].iter().enumerate();
        means.filter(|(_, mean)| mean.is_worth_it()).fold(0, |with, (other, _)| with | 1 << other)
    }
}

/// Where these pages of the block around `address` are, a bit each.
pub(crate) fn addresses(address: u64, pages: u8) -> impl Iterator<Item = u64> {
    let block = address / BLOCK_BYTES * BLOCK_BYTES;
    pages_of(pages).map(move |page| block + page as u64 * PAGE)
}

fn pages_of(bits: u8) -> impl Iterator<Item = usize> {
    (0..PAGES).filter(move |page| bits >> page & 1 == 1)
}

/// Blocks that lie beside each other are watched or not as chance has it.
fn is_watched(block: u64) -> bool {
    (block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).is_multiple_of(WATCHED_PART)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    /// Has `pages` of each of so many blocks asked for in turn, all of them out before;
    /// how many were brought, and how many faults there were.
    fn walk(
        clusters: &mut Clusters,
        blocks: std::ops::Range<u64>,
        pages: impl Fn(u64) -> Vec<usize>,
    ) -> (u32, u32) {
        let (mut brought, mut faults) = (0, 0);
        for block in blocks {
            let mut here = 0u8;
            for page in pages(block) {
                if here >> page & 1 == 1 {
                    continue;
                }
                faults += 1;
                let with = clusters.follow(block * BLOCK_BYTES + page as u64 * PAGE, |_| true);
                assert_eq!(with >> page & 1, 0, "the page itself");
                brought += (with & !here).count_ones();
                here |= with | 1 << page;
            }
        }
        (brought, faults)
    }

    #[test]
    fn a_header_and_a_directory_come_together_and_what_lies_between_does_not() {
        let mut clusters = Clusters::default();
        let pages = |block: u64| if block.is_multiple_of(5) { vec![0, 3, 1] } else { vec![0, 3] };
        walk(&mut clusters, 0..4000, pages);
        let (brought, faults) = walk(&mut clusters, 4000..8000, pages);
        // In seven of eight blocks one page came with the first.
        assert!((3300..3700).contains(&brought), "{brought}");
        assert!((5000..5600).contains(&faults), "{faults}");
    }

    #[test]
    fn pages_that_are_used_alone_bring_nothing() {
        let mut clusters = Clusters::default();
        let mut brought = 0;
        for number in numbers(3).take(100_000) {
            brought += clusters.follow((number >> 44) * PAGE, |_| true);
        }
        assert_eq!(brought, 0);
        // An object across the edge of a page, one in four.
        let pages = |block: u64| if block.is_multiple_of(4) { vec![1, 2] } else { vec![1] };
        assert_eq!(walk(&mut clusters, 1 << 30..(1 << 30) + 20_000, pages).0, 0);
    }

    #[test]
    fn what_changes_is_noticed_in_the_blocks_in_which_nothing_is_brought() {
        let mut clusters = Clusters::default();
        walk(&mut clusters, 0..8000, |_| vec![2, 0]);
        assert!(walk(&mut clusters, 8000..9000, |_| vec![2, 0]).0 > 800);
        walk(&mut clusters, 9000..17_000, |_| vec![2]);
        assert_eq!(walk(&mut clusters, 17_000..18_000, |_| vec![2]).0, 0);
    }

    #[test]
    fn pages_that_were_there_already_say_nothing() {
        let mut clusters = Clusters::default();
        for block in 0..8000 {
            assert_eq!(clusters.follow(block * BLOCK_BYTES, |_| false), 0);
        }
        assert!(clusters.means.iter().flatten().all(|mean| mean.seen == 0));
    }
}
