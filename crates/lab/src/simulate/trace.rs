//! Page traces: the file format. Neither how one is recorded ([`super::record`])
//! nor what is made of it.
//!
//! | bytes | content |
//! | --- | --- |
//! | 8 | `STRAPT01` |
//! | 8 | number of touches, little endian |
//! | 8 | XXH3 of the uncompressed touches, little endian |
//! | rest | one zstd frame: for each touch the difference of its page id to the one before (the first: to 0), zigzag, as a LEB128 varint |
//!
//! Page ids are the pager's: leaf × 512 + page within the leaf's 2 MiB. Leaves are
//! numbered by address, without gaps.

use std::collections::BTreeSet;
use std::io::Read as _;

use anyhow::{Context as _, ensure};
use strata_units::PAGES_PER_LEAF;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"STRAPT01";
const HEADER_BYTES: usize = 24;
/// More would not be a small trace: a gibibyte of ids in memory.
const MOST_TOUCHES: u64 = 1 << 28;
/// Highest page id: 256 GiB of leaves.
const MOST_PAGES: i64 = 1 << 26;
const LEVEL: i32 = 19;

/// Page numbers (addresses / 4096) as page ids: leaves close up, neighbours stay
/// neighbours.
pub(super) fn page_ids(numbers: &[u64]) -> Vec<u32> {
    let per_leaf = PAGES_PER_LEAF as u64;
    let leaves: BTreeSet<u64> = numbers.iter().map(|number| number / per_leaf).collect();
    let leaves: Vec<u64> = leaves.into_iter().collect();
    let id = |number: &u64| {
        let leaf = leaves.partition_point(|&leaf| leaf < number / per_leaf) as u64;
        (leaf * per_leaf + number % per_leaf) as u32
    };
    numbers.iter().map(id).collect()
}

/// The file's content for these touches.
pub(super) fn encode(touches: &[u32]) -> anyhow::Result<Vec<u8>> {
    let (mut body, mut before) = (Vec::new(), 0i64);
    for &page in touches {
        let difference = i64::from(page) - before;
        before = i64::from(page);
        let mut rest = ((difference << 1) ^ (difference >> 63)) as u64;
        while rest >= 0x80 {
            body.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        body.push(rest as u8);
    }
    let mut file = MAGIC.to_vec();
    file.extend((touches.len() as u64).to_le_bytes());
    file.extend(xxh3_64(&body).to_le_bytes());
    file.extend(zstd::bulk::compress(&body, LEVEL).context("compressing the trace")?);
    Ok(file)
}

/// The touches in a file. Errors say in one line what is wrong with it.
pub(super) fn decode(file: &[u8]) -> anyhow::Result<Vec<u32>> {
    let word = |at: usize| -> Option<u64> {
        Some(u64::from_le_bytes(file.get(at..at + 8)?.try_into().ok()?))
    };
    ensure!(file.starts_with(MAGIC), "it does not begin with STRAPT01: not a page trace");
    let (Some(count), Some(checksum)) = (word(8), word(16)) else {
        anyhow::bail!("it is cut short: {} bytes, not even its head; copy it again", file.len());
    };
    ensure!(count <= MOST_TOUCHES, "its head is damaged: it claims {count} touches");
    let compressed = file.get(HEADER_BYTES..).unwrap_or_default();
    let most = count * 5 + 1;
    let mut body = Vec::new();
    zstd::stream::read::Decoder::new(compressed)
        .and_then(|decoder| decoder.take(most).read_to_end(&mut body))
        .context("it is cut short or damaged: its zstd frame does not end well; copy it again")?;
    ensure!(xxh3_64(&body) == checksum, "it is damaged: its checksum is wrong; copy it again");
    let (mut touches, mut page, mut at) = (Vec::with_capacity(count as usize), 0i64, 0);
    while let Some((difference, next)) = varint(&body, at) {
        page += difference;
        ensure!((0..MOST_PAGES).contains(&page), "it names the impossible page {page}");
        touches.push(page as u32);
        at = next;
    }
    ensure!(
        at == body.len() && touches.len() as u64 == count,
        "it claims {count} touches and has {}",
        touches.len()
    );
    Ok(touches)
}

fn varint(body: &[u8], mut at: usize) -> Option<(i64, usize)> {
    let (mut value, mut shift) = (0u64, 0);
    loop {
        let byte = *body.get(at)?;
        at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(((value >> 1) as i64 ^ -((value & 1) as i64), at));
        }
        shift += 7;
        if shift > 56 {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some_touches() -> Vec<u32> {
        (0..10_000u32).map(|n| n.wrapping_mul(2_654_435_761) >> (8 + n % 12)).collect()
    }

    #[test]
    fn what_is_written_is_read_back() {
        for touches in [some_touches(), vec![0; 9], vec![(1 << 26) - 1, 0, (1 << 26) - 1]] {
            let file = encode(&touches).expect("it compresses");
            assert_eq!(decode(&file).expect("it is whole"), touches);
        }
    }

    #[test]
    fn a_file_that_is_cut_short_or_damaged_is_refused_in_one_line() {
        let file = encode(&some_touches()).expect("it compresses");
        for length in [0, 7, 8, 20, HEADER_BYTES, HEADER_BYTES + 9, file.len() / 2, file.len() - 1]
        {
            let error = format!("{:#}", decode(&file[..length]).expect_err("cut short"));
            assert!(!error.contains('\n'), "{error}");
            assert!(error.contains("cut short") || error.contains("not a page trace"), "{error}");
        }
        for at in (0..file.len()).step_by(7) {
            let mut damaged = file.clone();
            damaged[at] ^= 0x20;
            assert!(decode(&damaged).is_err(), "byte {at}");
        }
    }

    #[test]
    fn neighbours_stay_neighbours_and_gaps_close() {
        let numbers = [512 * 7 + 3, 512 * 7 + 4, 512 * 1_000_000, 5, 512 * 7 + 3];
        assert_eq!(page_ids(&numbers), [512 + 3, 512 + 4, 1024, 5, 512 + 3]);
    }
}
