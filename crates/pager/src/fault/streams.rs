//! Which pages to bring back before they are asked for: those that follow where
//! a reader goes through memory in order. Knows addresses only; whether a page
//! can come is the handler's business.
//!
//! The window doubles with every fault that goes on where the last one ended,
//! as the kernel's read-ahead does for files. A random reader never gets one:
//! three of its faults in a row are neighbours by accident only.

use strata_units::PAGE;

/// Readers that are told apart in one space: as many scan at once, each with
/// faults between those of the others.
const STREAMS: usize = 16;
/// So many faults in a row are a reader in order: two are often one object that
/// lies across the edge of a page.
const FAULTS_IN_A_ROW: u32 = 3;
/// Pages that are brought at once for a reader that has just been found...
const FIRST_PAGES: u64 = 2;
/// ...and at most: as much as a handler fetches in a quarter of a millisecond.
const MOST_PAGES: u64 = 64;
/// Pages after the end of a window at which its reader is still recognised: some
/// of what follows may have been resident.
const SLACK_PAGES: u64 = 16;

/// One reader.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// First address after what was brought for it.
    next: u64,
    /// Pages brought last; 0: none yet.
    window_pages: u64,
    /// Faults in a row.
    faults: u32,
    /// When it was seen last.
    seen: u64,
}

/// The readers of a space.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: [Stream; STREAMS],
    faults: u64,
}

impl Streams {
    /// A stored page was asked for: how many of the pages after it should come
    /// too. Constant time.
    pub(crate) fn follow(&mut self, address: u64) -> u64 {
        self.faults += 1;
        let faults = self.faults;
        let known = self.streams.iter_mut().find(|stream| {
            let near = stream.next..=stream.next.saturating_add(SLACK_PAGES * PAGE);
            let behind = if stream.window_pages == 0 { address == stream.next } else { true };
            stream.seen > 0 && behind && near.contains(&address)
        });
        if let Some(stream) = known {
            stream.faults = stream.faults.saturating_add(1);
            if stream.faults >= FAULTS_IN_A_ROW {
                stream.window_pages = (stream.window_pages * 2).clamp(FIRST_PAGES, MOST_PAGES);
            }
            stream.next = address.saturating_add((stream.window_pages + 1) * PAGE);
            stream.seen = faults;
            return stream.window_pages;
        }
        let oldest = self.streams.iter_mut().min_by_key(|stream| stream.seen);
        if let Some(oldest) = oldest {
            *oldest = Stream {
                next: address.saturating_add(PAGE),
                window_pages: 0,
                faults: 1,
                seen: faults,
            };
        }
        0
    }

    /// After the page at `address`, whose fault was followed last, what lies before
    /// `next` comes as well: if it began a reader, that is where it goes on.
    pub(crate) fn brought(&mut self, address: u64, next: u64) {
        let faults = self.faults;
        let begun = |stream: &&mut Stream| stream.seen == faults && stream.window_pages == 0;
        if let Some(stream) = self.streams.iter_mut().find(begun) {
            debug_assert_eq!(stream.next, address.saturating_add(PAGE));
            stream.next = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    /// Walks `pages` pages from `start` on; faults and pages that came ahead.
    fn walk(streams: &mut Streams, start: u64, pages: u64) -> (u64, u64) {
        let (mut at, mut faults, mut ahead) = (start, 0, 0);
        while at < start + pages * PAGE {
            let window = streams.follow(at);
            faults += 1;
            ahead += window;
            at += (window + 1) * PAGE;
        }
        (faults, ahead)
    }

    #[test]
    fn a_reader_in_order_is_soon_far_ahead() {
        let mut streams = Streams::default();
        let (faults, ahead) = walk(&mut streams, 1 << 30, 1000);
        assert!(faults < 25, "{faults} faults");
        assert!((1000..1000 + MOST_PAGES).contains(&(faults + ahead)), "{faults} + {ahead}");
    }

    #[test]
    fn readers_that_take_turns_are_told_apart() {
        let mut streams = Streams::default();
        let mut at: Vec<u64> = (1..=8u64).map(|reader| reader << 32).collect();
        let mut windows = 0;
        for _ in 0..12 {
            for reader in &mut at {
                let window = streams.follow(*reader);
                windows += window;
                *reader += (window + 1) * PAGE;
            }
        }
        assert!(windows > 8 * 5 * MOST_PAGES, "{windows}");
    }

    #[test]
    fn resident_pages_in_between_do_not_lose_the_reader() {
        let mut streams = Streams::default();
        let mut at = 1 << 30;
        for _ in 0..10 {
            at += (streams.follow(at) + 1) * PAGE;
        }
        assert_eq!(streams.follow(at + 5 * PAGE), MOST_PAGES);
    }

    #[test]
    fn a_reader_is_found_whose_pages_come_in_blocks() {
        let mut streams = Streams::default();
        let mut at = 1 << 30;
        for _ in 0..2 {
            assert_eq!(streams.follow(at), 0);
            streams.brought(at, at + 4 * PAGE);
            at += 4 * PAGE;
        }
        assert_eq!(streams.follow(at), FIRST_PAGES);
    }

    #[test]
    fn an_object_across_the_edge_of_a_page_is_no_reader() {
        let mut streams = Streams::default();
        for object in 0..1000u64 {
            let at = (object * 7919 % 100_003) * 16 * PAGE;
            assert_eq!(streams.follow(at) + streams.follow(at + PAGE), 0);
        }
    }

    #[test]
    fn a_random_reader_gets_nothing() {
        let mut streams = Streams::default();
        let mut ahead = 0;
        for number in numbers(7).take(100_000) {
            ahead += streams.follow((number >> 44) * PAGE);
        }
        // Of a million pages, one in 60,000 draws is a neighbour of the last 16.
        assert!(ahead < 40, "{ahead} pages for nothing");
    }
}
