//! What stands still, sent while it is read: in pieces, each a snapshot file of some pages.
//!
//! ```text
//! keeper: reads, sees it protected ─▶ here: packs, sends ──▶ there: receives ─▶ takes in
//! ```
//! So it stands still for the longest of these, not for all. What was carried so is not in
//! the snapshot here, of which nothing comes but a move: if that fails, it runs on.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use strata_api::MoveWord;
use strata_pager::{Carried, Carry};
use strata_snapshot::archive::Writer;
use strata_units::{PAGE_SIZE, SpaceId};

use super::super::lock;
use super::super::take::number_within;
use super::{Sent, Wire, random};
use crate::tenants::chain;

/// Pages of a piece: packed in some milliseconds, while the next ones are read.
const PIECE_PAGES: usize = 512;
/// Runs of pages that wait to be packed, each of 2 MiB at most.
const MOST_WAITING: usize = 16;

/// Pages from an address on.
struct Run {
    pid: u32,
    memory: SpaceId,
    start: u64,
    bytes: Vec<u8>,
}

/// What was sent of the memories of processes.
#[derive(Default)]
pub(super) struct Gone {
    /// Ranges, in order.
    ranges: BTreeMap<SpaceId, Vec<(u64, u64)>>,
    /// From when on all of it stood still, and its memory was read.
    pub(super) stands: Option<Instant>,
}

impl Gone {
    /// Whether the page at `address` was sent.
    pub(super) fn has(&self, memory: SpaceId, address: u64) -> bool {
        self.ranges.get(&memory).is_some_and(|ranges| {
            let after = ranges.partition_point(|&(start, _)| start <= address);
            after > 0 && address < ranges[after - 1].1
        })
    }
}

/// The way to whoever sends, for the one attempt of which it all stands still: what was sent
/// of another one would not be of the same moment.
#[derive(Clone)]
pub(in super::super) struct Once {
    sender: Arc<Mutex<Option<SyncSender<Run>>>>,
    stands: Arc<OnceLock<Instant>>,
    /// Its QEMU is known by the number that it has here.
    is_guest: bool,
}

impl Once {
    pub(super) fn new(is_guest: bool) -> (Self, Runs) {
        let (sender, runs) = sync_channel(MOST_WAITING);
        let (sender, stands) = (Arc::new(Mutex::new(Some(sender))), Arc::default());
        (Self { sender, stands: Arc::clone(&stands), is_guest }, Runs { runs, stands })
    }

    /// For one attempt.
    pub(in super::super) fn carry(&self) -> Carry {
        let once = self.clone();
        let mut sender = None;
        let mut pids = BTreeMap::new();
        Box::new(move |carried| match carried {
            Carried::Standing(processes) => {
                sender = lock(&once.sender).take();
                once.stands.get_or_init(Instant::now);
                pids.extend(processes.iter().map(|process| {
                    let own = if once.is_guest { None } else { number_within(process.pid) };
                    (process.memory, own.unwrap_or(process.pid))
                }));
                sender.is_some()
            }
            Carried::Pages { memory, start, bytes } => {
                let run =
                    pids.get(&memory).map(|&pid| Run { pid, memory, start, bytes: bytes.to_vec() });
                run.zip(sender.as_ref()).is_some_and(|(run, to)| to.send(run).is_ok())
            }
        })
    }
}

/// What is to be sent.
pub(super) struct Runs {
    runs: Receiver<Run>,
    stands: Arc<OnceLock<Instant>>,
}

impl Runs {
    /// Sends what comes until there is no more; what that was.
    pub(super) fn send(self, wire: &mut Wire) -> Result<Gone, String> {
        let mut gone = Gone::default();
        let mut next = self.runs.recv().ok();
        while let Some(first) = next {
            wire.say(&MoveWord::Piece)?;
            next = self.piece(first, wire, &mut gone).map_err(|error| chain(&*error))?;
            wire.say(&MoveWord::End)?;
        }
        gone.ranges.values_mut().for_each(|ranges| ranges.sort_unstable());
        gone.stands = self.stands.get().copied();
        Ok(gone)
    }

    /// Sends a piece that begins with `run`; what does not belong to it.
    fn piece(
        &self,
        mut run: Run,
        wire: &mut Wire,
        gone: &mut Gone,
    ) -> Result<Option<Run>, Box<dyn std::error::Error>> {
        let (pid, mut pages) = (run.pid, 0);
        let mut writer = Writer::to(Sent(wire), Path::new("to the other side"), random()?)?;
        writer.process(pid, None)?;
        let next = loop {
            let end = run.start + run.bytes.len() as u64;
            let addresses = (run.start..end).step_by(PAGE_SIZE);
            for (address, page) in addresses.zip(run.bytes.as_chunks::<PAGE_SIZE>().0) {
                writer.page(address, page).map_err(io::Error::other)?;
            }
            gone.ranges.entry(run.memory).or_default().push((run.start, end));
            pages += run.bytes.len() / PAGE_SIZE;
            match self.runs.recv() {
                Ok(other) if pages < PIECE_PAGES && other.pid == pid && other.start >= end => {
                    run = other;
                }
                other => break other.ok(),
            }
        };
        writer.finish()?;
        Ok(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_is_known_by_page() {
        let (memory, page) = (SpaceId(3), PAGE_SIZE as u64);
        let ranges = BTreeMap::from([(memory, vec![(page, 3 * page), (8 * page, 9 * page)])]);
        let gone = Gone { ranges, stands: None };
        let found: Vec<u64> = (0..10).filter(|at| gone.has(memory, at * page)).collect();
        assert_eq!(found, [1, 2, 8]);
        assert!(!gone.has(SpaceId(4), page));
    }

    #[test]
    fn only_one_attempt_is_carried() {
        let (once, runs) = Once::new(true);
        let (mut first, mut second) = (once.carry(), once.carry());
        assert!(first(Carried::Standing(&[])));
        assert!(!second(Carried::Standing(&[])), "the first one was carried");
        drop((once, first, second));
        assert!(runs.runs.recv().is_err(), "nobody sends any more");
    }
}
