//! Whose memory is lent, and what is on record of that.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use strata_pager::{Only, SnapshotError, SnapshotRequest, Stand};
use strata_sys::{Range, stat_field};
use strata_units::{ByteSize, PAGE_SIZE, SpaceId};

/// The state, in a `/proc/…/stat` file.
const STATE: usize = 3;

/// What is on record of memory that is lent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Lent {
    /// Of a guest: its QEMU.
    pid: u32,
    /// The guest's memory in it: first byte, end.
    memory: (u64, u64),
    /// Pages that are lent.
    pages: u64,
    /// The pager's number of a snapshot that has all of it.
    whole: Option<u32>,
    /// Of a program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    processes: Vec<LentProcess>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct LentProcess {
    number: u32,
    pid: u32,
    whole: Option<u32>,
}

/// Whose pages are lent.
#[derive(Clone, Debug)]
pub(super) struct Of {
    /// Its processes.
    pub(super) pids: Vec<u32>,
    /// Of a guest: its memory in its QEMU.
    pub(super) range: Option<Range>,
}

impl Lent {
    /// Pages that are lent of these processes, which have these numbers elsewhere.
    pub(super) fn new(of: &Of, numbers: &[u32], pages: u64) -> Self {
        let guest = of.range.map(|range| (of.pids[0], (range.start, range.end)));
        let (pid, memory) = guest.unwrap_or_default();
        let process = |(&number, &pid)| LentProcess { number, pid, whole: None };
        let processes = match guest {
            Some(_) => Vec::new(),
            None => numbers.iter().zip(&of.pids).map(process).collect(),
        };
        Self { pid, memory, pages, whole: None, processes }
    }

    pub(super) const fn pages(&self) -> u64 {
        self.pages
    }

    pub(super) fn bytes(&self) -> ByteSize {
        ByteSize(self.pages * PAGE_SIZE as u64)
    }

    pub(super) fn is_captured(&mut self, memories: &[SpaceId]) {
        if self.processes.is_empty() {
            self.whole = memories.first().map(|memory| memory.0);
        }
        for (process, memory) in self.processes.iter_mut().zip(memories) {
            process.whole = Some(memory.0);
        }
    }

    /// The snapshot that has it; none: it is being captured, or was.
    pub(super) fn memories(&self) -> Option<Vec<SpaceId>> {
        let whole = |process: &LentProcess| process.whole.map(SpaceId);
        match self.processes[..] {
            [] => self.whole.map(|memory| vec![SpaceId(memory)]),
            _ => self.processes.iter().map(whole).collect(),
        }
    }

    /// Whether the pager's memory of this number is what is lent.
    pub(super) fn is_in(&self, memory: SpaceId) -> bool {
        self.memories().is_some_and(|all| all.contains(&memory))
    }

    pub(super) fn of(&self) -> Of {
        match self.processes[..] {
            [] => Of::guest((self.pid, Range { start: self.memory.0, end: self.memory.1 })),
            _ => Of { pids: self.processes.iter().map(|one| one.pid).collect(), range: None },
        }
    }

    pub(super) fn numbers(&self) -> Vec<u32> {
        match self.processes[..] {
            [] => vec![self.pid],
            _ => self.processes.iter().map(|one| one.number).collect(),
        }
    }
}

impl Of {
    /// A guest's memory.
    pub(super) fn guest((pid, range): (u32, Range)) -> Self {
        Self { pids: vec![pid], range: Some(range) }
    }

    /// A program, of which it is not known yet what processes it has.
    pub(super) const fn program() -> Self {
        Self { pids: Vec::new(), range: None }
    }

    /// A snapshot of a guest that `freeze` has stand still; `thaw` does nothing.
    pub(super) fn request(
        &self,
        freeze: impl FnOnce() -> Result<Instant, SnapshotError> + Send + 'static,
    ) -> SnapshotRequest {
        let pids = self.pids.clone();
        SnapshotRequest {
            freeze: Box::new(move || {
                let since = freeze()?;
                Ok(strata_pager::Standing { pids, since })
            }),
            thaw: Box::new(|| Ok(())),
            most_frozen_pages: 0,
            // Of a guest nothing but its processors stands.
            stand: if self.range.is_some() { Stand::Briefly } else { Stand::Already },
            urgent: true,
            only: self.range.map(|range| Only { pid: self.pids[0], range }),
            carry: None,
            frozen: None,
        }
    }

    /// The same of what has stood still since before, whoever had it.
    pub(super) fn again(&self) -> SnapshotRequest {
        let pids = if self.range.is_some() { Vec::new() } else { self.pids.clone() };
        self.request(move || match pids.iter().all(|&pid| is_stopped(pid)) {
            true => Ok(Instant::now()),
            false => Err(SnapshotError::Failed("it does not stand still".to_owned())),
        })
    }
}

/// Whether no thread of a process runs until it is told to.
fn is_stopped(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let states = tasks.map(|task| stat_field(&task.path().join("stat").to_string_lossy(), STATE));
    let stands = |state: Option<String>| matches!(state.as_deref(), Some("T" | "t" | "Z" | "X"));
    let mut states = states.peekable();
    states.peek().is_some() && states.all(stands)
}
