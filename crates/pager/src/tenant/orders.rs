//! What the keeper is asked to do, and what whoever asks hears of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use strata_sys::Range;
use strata_units::{PAGE, PAGES_PER_LEAF, PageNumber, SpaceId};

use crate::map::address::{address_of, piece_of};
use crate::map::object::Object;
use crate::map::page_map::Piece;
use crate::map::settings::Setting;
use crate::tenant::ReleaseRefused;
use crate::tenant::snapshots::Prepared;

/// What the keeper is asked to do.
pub(crate) enum Order {
    Release(mpsc::Sender<Result<(), ReleaseRefused>>, Arc<ReleaseProgress>),
    Snapshot(Box<SnapshotOrder>),
    Fill(Box<FillOrder>),
    End,
}

/// What the keeper and the one who asked know of each other. A keeper can be
/// held up for as long as a program likes: what it reads from a process may be
/// memory that the process makes its readers wait for.
#[derive(Debug)]
pub(crate) struct ReleaseProgress {
    /// Without any page coming back for so long, it is given up.
    pub(crate) patience: Duration,
    /// Grows with everything that comes of it.
    pub(crate) steps: AtomicU64,
    /// Nobody waits any more: it is not to be carried out later.
    pub(crate) given_up: AtomicBool,
}

impl ReleaseProgress {
    pub(crate) fn new(patience: Duration) -> Self {
        Self { patience, steps: AtomicU64::new(0), given_up: AtomicBool::new(false) }
    }

    pub(crate) fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn check(&self) -> Result<(), ReleaseRefused> {
        if self.given_up.load(Ordering::Acquire) {
            return Err(ReleaseRefused::Unanswered);
        }
        Ok(())
    }
}

/// Stops and restarts the tenant's processes, which is not the pager's business.
pub struct SnapshotRequest {
    /// Stops all of them until `thaw`.
    pub freeze: Box<dyn FnOnce() -> Result<Standing, SnapshotError> + Send>,
    /// Lets them run on, unless they `stay`.
    pub thaw: Box<dyn FnOnce() -> Result<(), String> + Send>,
    /// Pages that may be captured before `thaw`, if that is all: slow, but nothing
    /// can tear it.
    pub most_frozen_pages: u64,
    /// How they stand.
    pub stand: Stand,
    /// Somebody waits for it to be whole, and has more to do the later it is: its capture
    /// does not give way to the tenant. So it is with the next one, for which what is written
    /// from now on is marked page by page.
    pub urgent: bool,
    /// No more than this; none: all memory of all processes.
    pub only: Option<Only>,
    /// Of what stays: gets what the snapshot before does not have as it is read, instead of
    /// the store. The snapshot does not have those pages then (they are lost in it).
    pub carry: Option<Carry>,
    /// Hears that all of it is known: what it was at the freeze is captured, or will be.
    pub frozen: Option<Frozen>,
}

/// Hears of what stands still, or did for a moment.
pub type Frozen = Box<dyn FnOnce(&Freeze) + Send>;

/// How processes stand still of which a snapshot is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stand {
    /// Until `thaw`, which lets them run on.
    Briefly,
    /// `thaw` does not let them run on: whoever asked ends them, or lets them go himself.
    /// All is captured before.
    UntilCaptured,
    /// The same, but for what is captured after that.
    Meanwhile,
    /// As that, and they have stood before `freeze`, stopped by signal, since another worker
    /// took a snapshot of them: whoever stopped them has looked that they still do.
    Already,
}

/// What stands still, on its way elsewhere.
#[derive(Clone, Copy, Debug)]
pub enum Carried<'a> {
    /// All of it stands still, these processes.
    Standing(&'a [Captured]),
    /// Pages of the one that has this memory, from an address on.
    Pages {
        /// The number under which the snapshot of it is kept.
        memory: SpaceId,
        /// Of the first page.
        start: u64,
        /// Whole pages.
        bytes: &'a [u8],
    },
}

/// Takes what stands still; `false`: nobody wants more of it.
pub type Carry = Box<dyn FnMut(Carried<'_>) -> bool + Send>;

/// A part of one process's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Only {
    /// The process's number. Others of the tenant are not stopped.
    pub pid: u32,
    /// The part: whole pages.
    pub range: Range,
}

/// Processes that stand still.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Standing {
    /// Their numbers.
    pub pids: Vec<u32>,
    /// Since when.
    pub since: Instant,
}

/// Why there is no snapshot. The tenant runs on as if nothing had been.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SnapshotError {
    /// The program discarded memory before it was captured. Another attempt, or
    /// one with many `most_frozen_pages`, succeeds.
    Torn,
    /// Its processes come and go just now: another attempt may find none that has just
    /// begun, or ends; one line for the user.
    Restless(String),
    /// Anything else; one line for the user.
    Failed(String),
}

/// The memory of one process in a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Captured {
    /// The process, when it was taken.
    pub pid: u32,
    /// The number under which the pager keeps it.
    pub memory: SpaceId,
    /// Address of its agent's `wire::restart::Restart`; none: it has no agent.
    pub restart: Option<u64>,
    /// The agent's own memory.
    pub own: Range,
    /// Memory that must be in place before the process runs again: the kernel
    /// writes there, and does not wait for a page.
    pub needed: Vec<Range>,
    /// What the program had set for ranges of its memory.
    pub settings: Vec<(Range, Setting)>,
}

/// What came of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Freeze {
    /// Each process.
    pub processes: Vec<Captured>,
    /// How long the processes stood still: until `thaw` returned.
    pub frozen: Duration,
    /// From the thaw until nothing was pending.
    pub captured: Duration,
    /// Pages that were in place and had to be read: those that the snapshot before
    /// has, and that were not written since, did not.
    pub copied_pages: u64,
}

/// To the keeper.
pub(crate) struct SnapshotOrder {
    pub(crate) request: SnapshotRequest,
    pub(crate) answer: mpsc::Sender<Result<Freeze, SnapshotError>>,
    pub(crate) progress: Arc<CaptureProgress>,
}

/// How far a snapshot is, for whoever waits for it.
#[derive(Debug, Default)]
pub(crate) struct CaptureProgress {
    pub(crate) pending: AtomicU64,
    pub(crate) total: AtomicU64,
}

pub(crate) fn failed(what: impl std::fmt::Display) -> SnapshotError {
    SnapshotError::Failed(what.to_string())
}

/// Its processes come and go.
pub(crate) fn restless(what: impl std::fmt::Display) -> SnapshotError {
    SnapshotError::Restless(what.to_string())
}

/// What memory of which process comes from where.
#[derive(Clone, Debug)]
pub struct Filling {
    /// The process, of the tenant that is asked.
    pub pid: u32,
    /// The number of the snapshot's memory, of its tenant.
    pub memory: SpaceId,
    /// The part of it: whole pages.
    pub from: Range,
    /// Where it goes: as long.
    pub to: Range,
    /// What of the snapshot is probably wanted first, in this order.
    pub wanted: Vec<Range>,
}

impl Filling {
    pub(crate) fn problem(&self) -> Option<&'static str> {
        let is_aligned =
            |range: Range| range.start.is_multiple_of(PAGE) && range.end.is_multiple_of(PAGE);
        if self.from.is_empty() || self.from.len() != self.to.len() {
            Some("the memory has another size")
        } else if !is_aligned(self.from) || !is_aligned(self.to) {
            Some("the memory is not of whole pages")
        } else {
            None
        }
    }

    /// The snapshot's address of one of the process's.
    pub(crate) fn source(&self, address: u64) -> u64 {
        address - self.to.start + self.from.start
    }

    /// The process's address of one of the snapshot's; none: it is not in the part.
    pub(crate) fn target(&self, source: u64) -> Option<u64> {
        self.from.contains(source).then(|| source - self.from.start + self.to.start)
    }

    /// The process's piece that is all of one of the snapshot's; none: there is none such.
    pub(crate) fn piece_for(&self, piece: Piece) -> Option<Piece> {
        let [first, last] = [0, PAGES_PER_LEAF - 1].map(|index| address_of(piece, index));
        let (first, _) = self.target(first).zip(self.target(last))?;
        let page = PageNumber::containing(first);
        (page.0 as usize).is_multiple_of(PAGES_PER_LEAF).then(|| piece_of(page))
    }
}

/// To the keeper.
pub(crate) struct FillOrder {
    pub(crate) filling: Filling,
    pub(crate) known: Arc<Object>,
    pub(crate) prepared: Option<Prepared>,
    pub(crate) answer: mpsc::Sender<Result<(), String>>,
}
