//! What production is compared with: policies that see every touch, which the
//! kernel only approximates and a pager cannot have.

use std::collections::{BTreeSet, VecDeque};

use strata_policy::replay::Touch;

/// A policy that is shown every touch.
pub(super) trait Replay {
    fn touch(&mut self, page: u32) -> Touch;

    /// From now on each page is touched so often. Who sees touches only does not listen.
    fn tell(&mut self, _touches: &[f64]) {}
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

/// S3-FIFO (Yang, Zhang, Qiu, Yue, Vinayak: FIFO queues are all you need for cache
/// eviction, 2023): a tenth of the room for newcomers, the rest for what was used
/// again, and a memory of as many pages as the rest.
pub(super) struct S3Fifo {
    small_room: usize,
    room: usize,
    seen: Vec<bool>,
    resident: Vec<bool>,
    uses: Vec<u8>,
    /// Evictions from the small queue when the page went, plus one; 0: never.
    ghost: Vec<u32>,
    ghosts: u32,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
}

impl S3Fifo {
    pub(super) fn new(pages: usize, room: usize) -> Self {
        Self {
            small_room: (room / 10).max(1),
            room,
            seen: vec![false; pages],
            resident: vec![false; pages],
            uses: vec![0; pages],
            ghost: vec![0; pages],
            ghosts: 0,
            small: VecDeque::new(),
            main: VecDeque::new(),
        }
    }

    fn evict(&mut self) {
        loop {
            if self.small.len() >= self.small_room || self.main.is_empty() {
                let Some(page) = self.small.pop_front() else { return };
                if std::mem::take(&mut self.uses[page as usize]) > 1 {
                    self.main.push_back(page);
                    continue;
                }
                self.ghosts += 1;
                self.ghost[page as usize] = self.ghosts;
                self.resident[page as usize] = false;
                return;
            }
            let Some(page) = self.main.pop_front() else { return };
            if self.uses[page as usize] > 0 {
                self.uses[page as usize] -= 1;
                self.main.push_back(page);
                continue;
            }
            self.resident[page as usize] = false;
            return;
        }
    }
}

impl Replay for S3Fifo {
    fn touch(&mut self, page: u32) -> Touch {
        let index = page as usize;
        let hit = self.resident[index];
        if hit {
            self.uses[index] = (self.uses[index] + 1).min(3);
        } else {
            if self.small.len() + self.main.len() >= self.room {
                self.evict();
            }
            let remembered = self.ghost[index] != 0
                && (self.ghosts - self.ghost[index]) as usize <= self.room - self.small_room;
            let queue = if remembered { &mut self.main } else { &mut self.small };
            queue.push_back(page);
            self.ghost[index] = 0;
            self.uses[index] = 0;
            self.resident[index] = true;
        }
        outcome(hit, &mut self.seen[index])
    }
}

/// Keeps the pages that are touched most often, which it is told, and so finds out nothing
/// itself: of touches that do not depend on each other nobody misses less in the long run
/// (Aho, Denning, Ullman: Principles of optimal page replacement, 1971). After a change it
/// misses once each page that has become hot.
pub(super) struct Told {
    room: usize,
    seen: Vec<bool>,
    /// Of each page, its place among all: 0 is touched least.
    places: Vec<u32>,
    pages: Vec<u32>,
    /// Places of the resident pages.
    resident: BTreeSet<u32>,
}

impl Told {
    pub(super) fn new(pages: usize, room: usize) -> Self {
        let any: Vec<u32> = (0..pages as u32).collect();
        Self {
            room,
            seen: vec![false; pages],
            places: any.clone(),
            pages: any,
            resident: BTreeSet::new(),
        }
    }
}

impl Replay for Told {
    fn touch(&mut self, page: u32) -> Touch {
        let place = self.places[page as usize];
        let hit = self.resident.contains(&place);
        if !hit {
            if self.resident.len() == self.room {
                self.resident.pop_first();
            }
            self.resident.insert(place);
        }
        outcome(hit, &mut self.seen[page as usize])
    }

    fn tell(&mut self, touches: &[f64]) {
        let resident: Vec<u32> =
            self.resident.iter().map(|&place| self.pages[place as usize]).collect();
        self.pages.sort_by(|&a, &b| touches[a as usize].total_cmp(&touches[b as usize]));
        for (place, &page) in self.pages.iter().enumerate() {
            self.places[page as usize] = place as u32;
        }
        self.resident = resident.into_iter().map(|page| self.places[page as usize]).collect();
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
    fn s3_fifo_keeps_a_hot_set_through_a_scan() {
        let mut policy = S3Fifo::new(10_000, 100);
        let mut hot_misses = 0;
        for n in 0..9_000u32 {
            policy.touch(1_000 + n);
            hot_misses += u32::from(policy.touch(n % 50) != Touch::Hit);
        }
        assert!(hot_misses < 200, "{hot_misses}");
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
    fn who_is_told_keeps_the_most_touched_through_a_change() {
        let mut told = Told::new(6, 3);
        told.tell(&[0.1, 0.3, 0.2, 0.0, 0.25, 0.15]);
        misses(&mut told, &[0, 1, 2, 3, 4, 5]);
        // 5 was the last to come, and is the least touched of those resident beside 1 and 4.
        assert_eq!(misses(&mut told, &[1, 4, 5, 2, 5]), [false, false, false, true, true]);
        told.tell(&[0.3, 0.0, 0.0, 0.25, 0.1, 0.2]);
        assert_eq!(misses(&mut told, &[1, 4, 5, 0, 3]), [false, false, false, true, true]);
        assert_eq!(misses(&mut told, &[5, 0, 3, 1]), [false, false, false, true]);
    }

    #[test]
    fn clock_gives_a_second_chance_and_fifo_does_not() {
        let pages = [1, 2, 3, 1, 4, 1];
        assert!(!misses(&mut Clock::new(10, 3, true), &pages)[5]);
        assert!(misses(&mut Clock::new(10, 3, false), &pages)[5]);
    }
}
