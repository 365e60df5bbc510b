//! A program with a small index that it needs all the time, and an archive that it
//! seldom looks into: the index is pinned, the archive lives compressed. It runs
//! the same without Strata.
#![forbid(unsafe_code)]

use std::time::Duration;

use strata_client::{Advice, Error, Memory, Place, Tier, advise, places};

const ARCHIVE_BYTES: usize = 16 << 20;
const RECORD_BYTES: usize = 4096;

/// Memory in a tier, or any where there is none.
fn memory(bytes: usize, tier: Tier) -> (Memory, bool) {
    match Memory::in_tier(bytes, tier) {
        Ok(memory) => (memory, true),
        Err(error) => {
            if error != Error::NotManaged {
                println!("the archive is in DRAM: {error}");
            }
            (Memory::plain(bytes).expect("memory"), false)
        }
    }
}

fn main() {
    let (mut archive, placed) = memory(ARCHIVE_BYTES, Tier::Compressed);
    let mut index: Vec<u64> = Vec::new();
    for (number, record) in archive.chunks_exact_mut(RECORD_BYTES).enumerate() {
        for byte in record.iter_mut().step_by(7) {
            *byte = number as u8;
        }
        index.push(record.iter().map(|byte| u64::from(*byte)).sum());
    }
    let pinned = advise(&index, Advice::Pin);
    // Given a while, it has left.
    let stored = |memory: &[u8]| {
        let places = places(memory).unwrap_or_default();
        let is_stored = |place: &&Place| !matches!(place, Place::Dram | Place::NotManaged);
        places.iter().filter(is_stored).count()
    };
    let mut turns = 0;
    while placed && stored(&archive) < ARCHIVE_BYTES / 4096 * 9 / 10 && turns < 1500 {
        std::thread::sleep(Duration::from_millis(10));
        turns += 1;
    }
    println!("{} of {} pages of the archive are out of DRAM", stored(&archive), index.len());
    for (record, sum) in archive.chunks_exact(RECORD_BYTES).zip(&index) {
        assert_eq!(record.iter().map(|byte| u64::from(*byte)).sum::<u64>(), *sum);
    }
    println!("index pinned: {}, all records right", pinned.is_ok());
}
