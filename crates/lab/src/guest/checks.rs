//! The memory by which a guest checks itself: filled once, then gone through
//! without end at a pace of its own, every page compared with what must be in
//! it, and some written anew.

use super::words::Watched;
use crate::random::mix;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};
use strata_units::PAGE_SIZE;

const WORDS: usize = PAGE_SIZE / 8;
/// Words of a page that differ from each other: the rest compresses.
const RANDOM_WORDS: usize = WORDS / 4;
/// One page in so many is written anew in a round.
const PARTS: u64 = 16;
/// Pages between two pauses.
const STEP: u64 = 16;

type Page = [u64; WORDS];

/// What the pages must hold.
pub(super) struct Checked {
    pages: Vec<Page>,
    versions: Vec<u64>,
    round: u64,
}

fn content(number: u64, version: u64) -> Page {
    let seed = mix(number ^ version << 32);
    let mut page = [seed; WORDS];
    for (place, word) in page[..RANDOM_WORDS].iter_mut().enumerate() {
        *word = mix(seed ^ place as u64);
    }
    page
}

impl Checked {
    pub(super) fn fill(mebibytes: u64) -> Self {
        let count = (mebibytes << 20) / PAGE_SIZE as u64;
        let pages = (0..count).map(|number| content(number, 0)).collect();
        Self { pages, versions: vec![0; count as usize], round: 0 }
    }

    /// Compares a page, and writes it anew where it is its turn; false: it is not what
    /// it was.
    fn look(&mut self, number: u64) -> bool {
        let (page, version) =
            (&mut self.pages[number as usize], &mut self.versions[number as usize]);
        if *page != content(number, *version) {
            return false;
        }
        if number % PARTS == self.round % PARTS {
            *version += 1;
            *page = content(number, *version);
        }
        true
    }
}

/// How far a [`watch`] has come.
#[derive(Default)]
pub(super) struct Progress {
    pages: AtomicU64,
    rounds: AtomicU64,
}

impl Progress {
    pub(super) fn read(&self) -> Watched {
        Watched { pages: self.pages.load(Relaxed), rounds: self.rounds.load(Relaxed) }
    }
}

/// Goes through it for as long as this process lives, on a thread of its own;
/// `wrong` is called once, and ends it.
pub(super) fn watch(
    mut checked: Checked,
    mebibytes_per_second: u64,
    wrong: impl FnOnce(String) + Send + 'static,
) -> Arc<Progress> {
    let progress = Arc::new(Progress::default());
    let told = Arc::clone(&progress);
    let per_second = (mebibytes_per_second << 20) / PAGE_SIZE as u64;
    let pause = Duration::from_secs_f64(STEP as f64 / per_second.max(1) as f64);
    thread::spawn(move || {
        let mut next = Instant::now();
        loop {
            for number in 0..checked.pages.len() as u64 {
                if !checked.look(number) {
                    wrong(format!("page {number} in round {}", checked.round));
                    return;
                }
                told.pages.fetch_add(1, Relaxed);
                if number % STEP == 0 {
                    // Late, it does not hurry: it would be another load then.
                    next = (next + pause).max(Instant::now());
                    thread::sleep(next.saturating_duration_since(Instant::now()));
                }
            }
            checked.round += 1;
            told.rounds.fetch_add(1, Relaxed);
        }
    });
    progress
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_anew_is_right_and_one_bit_is_seen() {
        let mut checked = Checked::fill(1);
        assert_eq!(checked.pages.len(), 256);
        for round in 0..40 {
            checked.round = round;
            assert!((0..256).all(|number| checked.look(number)), "round {round}");
        }
        assert!(checked.versions.iter().all(|&version| version == 2 || version == 3));
        checked.pages[77][WORDS - 1] ^= 1;
        assert!(checked.look(76) && !checked.look(77));
    }

    #[test]
    fn no_two_pages_are_alike() {
        assert_ne!(content(1, 0), content(2, 0));
        assert_ne!(content(1, 0), content(1, 1));
    }
}
