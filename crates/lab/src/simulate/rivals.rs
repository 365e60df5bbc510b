//! What production is compared with: policies that see every touch, which the
//! kernel only approximates and a pager cannot have.

use std::collections::VecDeque;

use strata_policy::replay::Touch;

/// A policy that is shown every touch.
pub(super) trait Replay {
    fn touch(&mut self, page: u32) -> Touch;
}

const NONE: u32 = u32::MAX;

/// Least recently used, exact: a list through arrays.
pub(super) struct Lru {
    room: usize,
    resident: usize,
    seen: Vec<bool>,
    /// Neighbours of resident pages; the last entry is the list's anchor.
    younger: Vec<u32>,
    older: Vec<u32>,
}

impl Lru {
    pub(super) fn new(pages: usize, room: usize) -> Self {
        let mut links = vec![NONE; pages + 1];
        links[pages] = pages as u32;
        Self { room, resident: 0, seen: vec![false; pages], younger: links.clone(), older: links }
    }

    fn unlink(&mut self, page: u32) {
        let (younger, older) = (self.younger[page as usize], self.older[page as usize]);
        self.older[younger as usize] = older;
        self.younger[older as usize] = younger;
        self.younger[page as usize] = NONE;
    }
}

impl Replay for Lru {
    fn touch(&mut self, page: u32) -> Touch {
        let anchor = self.seen.len();
        let hit = self.younger[page as usize] != NONE;
        if hit {
            self.unlink(page);
        } else if self.resident == self.room {
            self.unlink(self.younger[anchor]);
        } else {
            self.resident += 1;
        }
        // The anchor's `older` is the youngest page, its `younger` the oldest.
        let youngest = self.older[anchor];
        self.older[page as usize] = youngest;
        self.younger[page as usize] = anchor as u32;
        self.younger[youngest as usize] = page;
        self.older[anchor] = page;
        outcome(hit, &mut self.seen[page as usize])
    }
}

/// CLOCK: first in, first out, with a second chance for what was touched. FIFO
/// when it does not look.
pub(super) struct Clock {
    room: usize,
    looks: bool,
    seen: Vec<bool>,
    resident: Vec<bool>,
    touched: Vec<bool>,
    queue: VecDeque<u32>,
}

impl Clock {
    pub(super) fn new(pages: usize, room: usize, looks: bool) -> Self {
        let no = vec![false; pages];
        Self {
            room,
            looks,
            seen: no.clone(),
            resident: no.clone(),
            touched: no,
            queue: VecDeque::new(),
        }
    }
}

impl Replay for Clock {
    fn touch(&mut self, page: u32) -> Touch {
        let hit = self.resident[page as usize];
        if hit {
            self.touched[page as usize] = self.looks;
        } else {
            while self.queue.len() >= self.room {
                let oldest = self.queue.pop_front().expect("room is not zero");
                if std::mem::replace(&mut self.touched[oldest as usize], false) {
                    self.queue.push_back(oldest);
                } else {
                    self.resident[oldest as usize] = false;
                }
            }
            self.queue.push_back(page);
            self.resident[page as usize] = true;
        }
        outcome(hit, &mut self.seen[page as usize])
    }
}

fn outcome(hit: bool, seen: &mut bool) -> Touch {
    match (hit, std::mem::replace(seen, true)) {
        (true, _) => Touch::Hit,
        (false, true) => Touch::Hard,
        (false, false) => Touch::First,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn misses(policy: &mut dyn Replay, pages: &[u32]) -> Vec<bool> {
        pages.iter().map(|&page| policy.touch(page) != Touch::Hit).collect()
    }

    #[test]
    fn lru_keeps_what_was_touched_last() {
        let mut lru = Lru::new(10, 3);
        let seen = misses(&mut lru, &[1, 2, 3, 1, 4, 1, 2, 3, 4]);
        assert_eq!(seen, [true, true, true, false, true, false, true, true, true]);
        assert_eq!(lru.touch(9), Touch::First);
        assert_eq!(lru.touch(1), Touch::Hard);
    }

    #[test]
    fn lru_agrees_with_a_plain_list() {
        let (mut lru, mut list, mut seed) = (Lru::new(50, 20), VecDeque::new(), 1u32);
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let page = (seed >> 16) % 50 * ((seed >> 24) % 50) / 50;
            let hit = list.contains(&page);
            list.retain(|&other| other != page);
            list.push_back(page);
            if list.len() > 20 {
                list.pop_front();
            }
            assert_eq!(lru.touch(page) == Touch::Hit, hit);
        }
    }

    #[test]
    fn clock_gives_a_second_chance_and_fifo_does_not() {
        let pages = [1, 2, 3, 1, 4, 1];
        assert!(!misses(&mut Clock::new(10, 3, true), &pages)[5]);
        assert!(misses(&mut Clock::new(10, 3, false), &pages)[5]);
    }
}
