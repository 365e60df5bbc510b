//! A part of a pool's index: which handle a page has, and which page goes next. A page
//! that was asked for since the hand last came by stays for another round (the CLOCK
//! algorithm, Corbató 1968).

use std::collections::HashMap;

use strata_units::Handle;
use xxhash_rust::xxh3::xxh3_64;

/// A page's name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Key {
    pub(super) file: u32,
    pub(super) index: u64,
}

impl Key {
    pub(super) fn hash(self) -> u64 {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&self.file.to_le_bytes());
        bytes[4..].copy_from_slice(&self.index.to_le_bytes());
        xxh3_64(&bytes)
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: Key,
    handle: Handle,
    asked: bool,
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    places: HashMap<Key, u32>,
    /// In no order; what was last fills a hole.
    entries: Vec<Entry>,
    hand: usize,
}

impl Shard {
    /// The page's handle; it has been asked for.
    pub(super) fn find(&mut self, key: Key) -> Option<Handle> {
        let place = *self.places.get(&key)?;
        let entry = &mut self.entries[place as usize];
        entry.asked = true;
        Some(entry.handle)
    }

    /// Enters a page; the handle that it had before.
    pub(super) fn enter(&mut self, key: Key, handle: Handle) -> Option<Handle> {
        if let Some(&place) = self.places.get(&key) {
            let before = &mut self.entries[place as usize].handle;
            return Some(std::mem::replace(before, handle));
        }
        self.places.insert(key, self.entries.len() as u32);
        self.entries.push(Entry { key, handle, asked: false });
        None
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<Handle> {
        let place = *self.places.get(&key)? as usize;
        Some(self.remove_at(place))
    }

    fn remove_at(&mut self, place: usize) -> Handle {
        let gone = self.entries.swap_remove(place);
        self.places.remove(&gone.key);
        if let Some(moved) = self.entries.get(place) {
            self.places.insert(moved.key, place as u32);
        }
        gone.handle
    }

    pub(super) fn remove_where(&mut self, which: impl Fn(Key) -> bool, gone: &mut Vec<Handle>) {
        let mut place = 0;
        while let Some(entry) = self.entries.get(place) {
            if which(entry.key) {
                gone.push(self.remove_at(place));
            } else {
                place += 1;
            }
        }
    }

    /// Takes so many pages out, if there are.
    pub(super) fn evict(&mut self, count: usize, gone: &mut Vec<Handle>) {
        let mut left = count;
        // The second time round nobody is spared.
        let mut looks = self.entries.len() * 2;
        while left > 0 && looks > 0 && !self.entries.is_empty() {
            looks -= 1;
            if self.hand >= self.entries.len() {
                self.hand = 0;
            }
            let entry = &mut self.entries[self.hand];
            if std::mem::take(&mut entry.asked) {
                self.hand += 1;
            } else {
                gone.push(self.remove_at(self.hand));
                left -= 1;
            }
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        assert_eq!(self.places.len(), self.entries.len());
        for (place, entry) in self.entries.iter().enumerate() {
            assert_eq!(self.places[&entry.key], place as u32);
        }
    }
}
