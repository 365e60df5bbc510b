//! What every key must hold now: the truth that replies are checked against.
//!
//! Values are a function of (seed, index, version), so the truth is one version
//! per key. While a write is under way a reader may see the old value or the
//! new one, nothing else: `acknowledged` and `sent` bound what is right. A hash
//! of the newest value makes the common check cost a hash instead of building
//! the record; whatever the hash does not confirm is compared byte for byte. Its
//! seed is the version: one that was stored too late confirms nothing.

use crate::records::Records;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use xxhash_rust::xxh3::xxh3_64_with_seed;

struct Key {
    acknowledged: AtomicU32,
    sent: AtomicU32,
    /// Hash of some version's value, mostly that of `sent`.
    hash: AtomicU64,
}

/// The table. Each key is written by one thread only; all may read.
pub(crate) struct Expect {
    records: Records,
    keys: Vec<Key>,
}

impl Expect {
    /// All keys at version 0.
    pub(crate) fn new(records: Records, count: u64) -> Self {
        let key = || Key {
            acknowledged: AtomicU32::new(0),
            sent: AtomicU32::new(0),
            hash: AtomicU64::new(0),
        };
        Self { records, keys: (0..count).map(|_| key()).collect() }
    }

    pub(crate) fn count(&self) -> u64 {
        self.keys.len() as u64
    }

    /// Writes the value of the current version to `out` and keeps its hash.
    pub(crate) fn current(&self, index: u64, out: &mut Vec<u8>) {
        let key = &self.keys[index as usize];
        let version = key.sent.load(SeqCst);
        self.records.fill(index, version, out);
        key.hash.store(hash_of(version, out), SeqCst);
    }

    /// The next version's value, for a write that is about to be sent.
    pub(crate) fn begin_write(&self, index: u64, out: &mut Vec<u8>) {
        let key = &self.keys[index as usize];
        let version = key.sent.load(SeqCst) + 1;
        self.records.fill(index, version, out);
        key.sent.store(version, SeqCst);
        key.hash.store(hash_of(version, out), SeqCst);
    }

    /// The server has confirmed the oldest unconfirmed write of this key.
    pub(crate) fn confirm_write(&self, index: u64) {
        self.keys[index as usize].acknowledged.fetch_add(1, SeqCst);
    }

    /// Newest confirmed version: take it before sending a read.
    pub(crate) fn confirmed(&self, index: u64) -> u32 {
        self.keys[index as usize].acknowledged.load(SeqCst)
    }

    /// Whether `value` is one that a read may return which was sent when
    /// `oldest` was the confirmed version and has been answered now.
    pub(crate) fn admits(&self, index: u64, oldest: u32, value: &[u8]) -> bool {
        let key = &self.keys[index as usize];
        let newest = key.sent.load(SeqCst);
        let hash = hash_of(newest, value);
        if hash == key.hash.load(SeqCst) {
            return true;
        }
        let mut record = Vec::new();
        let found = (oldest..=newest).rev().find(|&version| {
            self.records.fill(index, version, &mut record);
            record == value
        });
        if found == Some(newest) {
            key.hash.store(hash, SeqCst);
        }
        found.is_some()
    }
}

fn hash_of(version: u32, value: &[u8]) -> u64 {
    xxh3_64_with_seed(value, u64::from(version))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(index: u64, version: u32) -> Vec<u8> {
        let mut out = Vec::new();
        Records::new(1).fill(index, version, &mut out);
        out
    }

    #[test]
    fn old_and_new_are_right_only_while_a_write_is_under_way() {
        let expect = Expect::new(Records::new(1), 10);
        let mut out = Vec::new();
        expect.current(3, &mut out);
        assert_eq!(out, value(3, 0));
        let before = expect.confirmed(3);
        expect.begin_write(3, &mut out);
        assert_eq!(out, value(3, 1));
        for version in [0, 1] {
            assert!(expect.admits(3, before, &value(3, version)));
        }
        expect.confirm_write(3);
        let after = expect.confirmed(3);
        assert!(expect.admits(3, after, &value(3, 1)));
        assert!(!expect.admits(3, after, &value(3, 0)), "a lost write");
        assert!(!expect.admits(3, after, &value(3, 2)), "from the future");
        assert!(!expect.admits(3, after, &value(4, 1)), "another key's value");
        // A read sent before the confirmation may still return the old value.
        assert!(expect.admits(3, before, &value(3, 0)));
    }

    #[test]
    fn what_was_right_is_recognised_by_its_hash_until_it_is_replaced() {
        let expect = Expect::new(Records::new(1), 1);
        let mut out = Vec::new();
        assert!(expect.admits(0, 0, &value(0, 0)));
        let late = expect.keys[0].hash.load(SeqCst);
        assert_eq!(late, hash_of(0, &value(0, 0)));
        expect.begin_write(0, &mut out);
        expect.confirm_write(0);
        expect.keys[0].hash.store(late, SeqCst);
        assert!(!expect.admits(0, 1, &value(0, 0)), "a lost write");
        assert!(expect.admits(0, 1, &value(0, 1)));
        assert_eq!(expect.keys[0].hash.load(SeqCst), hash_of(1, &value(0, 1)));
    }

    #[test]
    fn one_wrong_bit_is_seen() {
        let expect = Expect::new(Records::new(1), 1);
        let mut out = Vec::new();
        expect.current(0, &mut out);
        out[700] ^= 1;
        assert!(!expect.admits(0, 0, &out));
    }
}
