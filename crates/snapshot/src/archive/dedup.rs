//! Finds pages that are in the file already, by their digest, in bounded memory.
//!
//! A table of sets with eight places each. It doubles until it has its largest
//! size; then, once the sets where one belongs are full, new pages are not
//! remembered: a duplicate is written twice, which costs space and nothing else.

/// Places of a set, filled in order.
const WAYS: usize = 8;
/// A page whose set is full may be in one of the next ones.
const PROBES: usize = 8;
/// Sets, at first and at most. A place is 20 bytes: 40 MiB at most, for as many
/// distinct pages as 8 GiB have.
const FIRST_SETS: usize = 1 << 7;
const MOST_SETS: usize = 1 << 18;

/// Four words of the digest, then the page's number + 1; 0: free. Words, because
/// a `u128` would be aligned to 16 bytes.
type Place = [u32; 5];

#[derive(Debug)]
pub(super) struct Dedup {
    sets: Vec<[Place; WAYS]>,
    used: usize,
    most_sets: usize,
}

fn words(digest: u128) -> [u32; 4] {
    [digest as u32, (digest >> 32) as u32, (digest >> 64) as u32, (digest >> 96) as u32]
}

impl Default for Dedup {
    fn default() -> Self {
        Self::up_to(MOST_SETS)
    }
}

impl Dedup {
    fn up_to(most_sets: usize) -> Self {
        Self { sets: vec![[[0; 5]; WAYS]; FIRST_SETS.min(most_sets)], used: 0, most_sets }
    }

    /// The number of the page with this digest; or none, and from now on
    /// `number` is.
    pub(super) fn find_or_add(&mut self, digest: u128, number: u32) -> Option<u32> {
        let key = words(digest);
        for set in self.sets_of(key[3]) {
            let known = self.sets[set].iter().find(|place| place[4] != 0 && place[..4] == key);
            if let Some(place) = known {
                return Some(place[4] - 1);
            }
            // Nothing was ever put past a free place.
            if self.sets[set][WAYS - 1][4] == 0 {
                break;
            }
        }
        // The last number cannot be told from a free place when one is added.
        if let Some(tag) = number.checked_add(1) {
            if self.used >= self.sets.len() * WAYS * 3 / 4 && self.sets.len() < self.most_sets {
                self.grow();
            }
            self.add([key[0], key[1], key[2], key[3], tag]);
        }
        None
    }

    /// The sets that may hold a digest with this last word.
    fn sets_of(&self, word: u32) -> impl Iterator<Item = usize> + use<> {
        // A power of two.
        let mask = self.sets.len() - 1;
        (0..PROBES.min(mask + 1)).map(move |next| (word as usize + next) & mask)
    }

    fn add(&mut self, place: Place) {
        for set in self.sets_of(place[3]) {
            if let Some(free) = self.sets[set].iter_mut().find(|place| place[4] == 0) {
                *free = place;
                self.used += 1;
                return;
            }
        }
    }

    fn grow(&mut self) {
        let larger = vec![[[0; 5]; WAYS]; self.sets.len() * 2];
        self.used = 0;
        for set in std::mem::replace(&mut self.sets, larger) {
            for place in set.into_iter().filter(|place| place[4] != 0) {
                self.add(place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spread over all bits, as digests are.
    fn digest(n: u32) -> u128 {
        u128::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
    }

    #[test]
    fn it_finds_what_it_was_given_while_it_grows() {
        let mut dedup = Dedup::default();
        for n in 0..50_000 {
            assert_eq!(dedup.find_or_add(digest(n), n), None);
        }
        for n in 0..50_000 {
            assert_eq!(dedup.find_or_add(digest(n), u32::MAX), Some(n));
        }
        // One bit more or less is another page.
        for bit in 0..128 {
            assert_eq!(dedup.find_or_add(digest(7) ^ 1 << bit, u32::MAX), None, "{bit}");
        }
    }

    #[test]
    fn a_full_one_keeps_what_it_has() {
        let mut dedup = Dedup::up_to(2);
        for n in 0..1000 {
            dedup.find_or_add(digest(n), n);
        }
        assert_eq!((dedup.sets.len(), dedup.used), (2, 16));
        assert_eq!(dedup.find_or_add(digest(0), 5), Some(0));
        assert_eq!(dedup.find_or_add(digest(999), 5), None);
    }
}
