//! Memory that arrives, taken in.

use std::io;

use strata_pager::Tenant;
use strata_snapshot::archive::Reader;
use strata_units::PageBuffer;

use super::into::Coming;
use super::out::gone_name;
use crate::tenants::chain;

/// Ranges that a process may have given back between two rounds, in bytes of their file.
const MOST_GONE_BYTES: u64 = 64 << 20;

/// Takes in memory of one process: all of it, or what has changed.
pub(super) fn memory_in(
    reader: &Reader,
    coming: &mut Coming<'_>,
    pid: u32,
    holder: &Tenant,
) -> Result<(), String> {
    let mut pages = reader.pages(pid);
    let next = |buffer: &mut PageBuffer| match pages.next_into(&mut buffer.0) {
        None => Ok(None),
        Some((address, Ok(()))) => Ok(Some(address)),
        Some((_, Err(error))) => Err(io::Error::other(error)),
    };
    let failed = |error: io::Error| chain(&error);
    let gone = ranges_in(reader, &gone_name(pid))?;
    // One that cannot be updated is no more.
    let memory = match coming.memories.remove(&pid) {
        None => holder.import_memory(next).map_err(failed)?,
        Some(memory) => {
            holder.update_memory(memory, &gone, next).map_err(failed)?;
            memory
        }
    };
    coming.memories.insert(pid, memory);
    Ok(())
}

/// Takes in a piece of what stands still.
pub(super) fn piece_in(
    reader: &Reader,
    coming: &mut Coming<'_>,
    holder: &Tenant,
) -> Result<(), String> {
    let pids = reader.processes().iter().map(|process| process.pid);
    pids.collect::<Vec<_>>().into_iter().try_for_each(|pid| memory_in(reader, coming, pid, holder))
}

pub(super) fn forget_memories(coming: &mut Coming<'_>, holder: &Tenant) {
    for (_, memory) in std::mem::take(&mut coming.memories) {
        holder.remove_snapshot_memory(memory);
    }
    if let Some(known) = &mut coming.known {
        known.processes.iter_mut().for_each(|process| process.memory = None);
    }
}

/// The ranges that a file of that name says, in order.
pub(super) fn ranges_in(reader: &Reader, name: &str) -> Result<Vec<(u64, u64)>, String> {
    let Some(index) = reader.files().iter().position(|file| file.name == name) else {
        return Ok(Vec::new());
    };
    let bytes = reader.file_beginning(index, MOST_GONE_BYTES).map_err(|error| chain(&error))?;
    ranges_of(&bytes)
}

fn ranges_of(bytes: &[u8]) -> Result<Vec<(u64, u64)>, String> {
    let (pairs, rest) = bytes.as_chunks::<16>();
    let half = |pair: &[u8; 16], at: usize| u64::from_le_bytes(pair.as_chunks::<8>().0[at]);
    let ranges: Vec<(u64, u64)> = pairs.iter().map(|pair| (half(pair, 0), half(pair, 1))).collect();
    let is_ordered =
        ranges.iter().all(|&(start, end)| start < end) && ranges.is_sorted_by(|a, b| a.1 <= b.0);
    match rest.is_empty() && is_ordered {
        true => Ok(ranges),
        false => Err("what arrived contradicts itself".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::ranges_of;

    fn read(ranges: &[(u64, u64)]) -> Result<Vec<(u64, u64)>, String> {
        let bytes = ranges.iter().flat_map(|&(start, end)| [start, end]).flat_map(u64::to_le_bytes);
        ranges_of(&bytes.collect::<Vec<u8>>())
    }

    #[test]
    fn ranges_that_arrive_are_in_order_and_apart_from_each_other() {
        for fine in [&[][..], &[(4096, 8192)], &[(0, 4096), (4096, 8192), (12288, u64::MAX)]] {
            assert_eq!(read(fine).as_deref(), Ok(fine));
        }
        for wrong in [
            &[(8192, 4096)][..],
            &[(4096, 4096)],
            &[(0, 4096), (12288, 8192)],
            &[(0, 8192), (4096, 12288)],
            &[(8192, 12288), (0, 4096)],
        ] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
        assert!(ranges_of(&[0; 15]).is_err());
    }
}
