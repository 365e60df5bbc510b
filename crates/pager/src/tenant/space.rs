//! One address space: its userfaultfd, its agent, and the gate that keeps
//! messages, evictions and forks in order.
//!
//! The gate is held while messages are taken and acted on, while victims are
//! marked as leaving, and while they are marked as stored. It is never held
//! over decompression, I/O, or waiting for an agent.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Instant;

use strata_sys::{ControlBlock, Disproof, EventFd, Process, Range, SeqPacket, Userfaultfd};
use strata_units::wire::TRANSFER_PAGES;
use strata_units::{PAGE, PageId, SpaceId};

use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::object::Object;
use crate::map::page_map::PageMap;
use crate::map::page_set::PageSet;
use crate::map::registry::{PROCESS_FIELDS, Registry, SpaceAddress, SpaceField};
use crate::map::settings::Settings;
use crate::tenant::capture::{Base, Capture, CleanPages};
use crate::tenant::gone_meanwhile::GoneMeanwhile;
use crate::tenant::memory_hold::MemoryHold;

/// First byte of the transfer range and of the agent's own memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AgentRanges {
    pub(crate) transfer: Range,
    pub(crate) own: Range,
}

/// The agent of a space, once it has said hello.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) control: ControlBlock,
    pub(crate) ranges: AgentRanges,
    pub(crate) socket: Mutex<Option<SeqPacket>>,
    pub(crate) process: Arc<Process>,
    /// Where it reads, in a restored process, what its new life is.
    pub(crate) restart: Option<u64>,
    /// The version of its library; 0: it was not told.
    pub(crate) library: u64,
}

/// What only the holder of the gate may touch.
#[derive(Debug)]
pub(crate) struct Gate {
    /// Its pages.
    pub(crate) object: Object,
    /// The address of the page that has each transfer slot; 0: none, or it was
    /// discarded while it was leaving.
    pub(crate) slots: Vec<u64>,
    /// By slot: what a snapshot waits for, unwritten since the freeze.
    pub(crate) of_freeze: Vec<bool>,
    /// Registered ranges, in order, apart from each other.
    pub(crate) registered: Vec<Range>,
    /// What went away while somebody looked which pages are in place.
    pub(crate) gone_meanwhile: GoneMeanwhile,
    /// The snapshot that is being taken of it.
    pub(crate) capture: Option<Capture>,
    /// The snapshot for which what is write-protected here was captured last.
    pub(crate) base: Option<Base>,
    /// What was still protected when the next one was armed.
    pub(crate) clean: CleanPages,
    /// Pages that lost their protection by a write since the last freeze.
    pub(crate) written: PageSet,
    /// What is written is wanted page by page, by whoever sends it elsewhere: a page that was
    /// not is left protected though its neighbours are written.
    pub(crate) is_precise: bool,
    /// Where pages were moved to since the last freeze.
    pub(crate) moved: Vec<Range>,
    /// Where the last first-touch fill ended, and how many pages it had.
    pub(crate) zero_end: u64,
    pub(crate) zero_pages: u64,
    /// What the program has set for ranges of its memory.
    pub(crate) settings: Settings,
}

/// Pages that a restored process asks for first and that are remembered, at most: 256 MiB.
const MOST_TOUCHED: usize = 1 << 16;

/// No CPU's number.
pub(crate) const NO_CPU: u32 = u32::MAX;

/// One address space of a tenant.
#[derive(Debug)]
pub struct Space {
    pub(crate) id: SpaceId,
    pub(crate) uffd: Userfaultfd,
    pub(crate) agent: RwLock<Option<Arc<Agent>>>,
    /// Whose memory it is. Of a forked child that is known with its agent; of a restored
    /// process before.
    pub(crate) process: OnceLock<Arc<Process>>,
    pub(crate) gate: Mutex<Gate>,
    /// Wakes the handler.
    pub(crate) kick: Arc<EventFd>,
    /// Faulting addresses that others hand to the handler.
    pub(crate) kicked: Mutex<Vec<u64>>,
    /// The process is gone: the handler ends.
    pub(crate) gone: AtomicBool,
    pub(crate) handler: Mutex<Option<JoinHandle<()>>>,
    /// The CPU that it is bound to; [`NO_CPU`]: none yet.
    pub(crate) handler_cpu: AtomicU32,
    /// Pages may be in the transfer range with nobody fetching them (after a
    /// fork or a worker's death).
    pub(crate) has_strays: AtomicBool,
    /// The transfer range is known to be empty.
    pub(crate) transfer_clean: AtomicBool,
    /// Inherited pages may still be shared with the parent.
    pub(crate) has_shared: AtomicBool,
    /// Its page map is its parent's, of which it may not have inherited everything.
    pub(crate) unadjusted: AtomicBool,
    /// When its process was looked for last, to ask what it inherited.
    pub(crate) looked: Mutex<Option<Instant>>,
    /// What a restored process asks for first; none: nobody wants to know.
    pub(crate) touched: Mutex<Option<Vec<u64>>>,
    /// Ranges that the program wants soon, or probably will, for the handler.
    pub(crate) hot: Mutex<Vec<Range>>,
    /// What a reader in order has left behind, for the keeper.
    pub(crate) read: Mutex<Vec<Range>>,
    /// Whether its memory is to outlive its process.
    pub(crate) held: MemoryHold,
}

/// A page on its way out through a slot of the transfer range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaving {
    pub(crate) page: PageId,
    pub(crate) address: u64,
    /// A thread waits for it.
    pub(crate) wanted: bool,
}

impl Gate {
    fn new(id: SpaceId) -> Self {
        Self {
            object: Object::new(id),
            slots: vec![0; TRANSFER_PAGES],
            of_freeze: vec![false; TRANSFER_PAGES],
            registered: Vec::new(),
            gone_meanwhile: GoneMeanwhile::default(),
            capture: None,
            base: None,
            clean: CleanPages::default(),
            written: PageSet::default(),
            is_precise: false,
            moved: Vec::new(),
            zero_end: 0,
            zero_pages: 0,
            settings: Settings::default(),
        }
    }

    /// What is leaving through `slot`. None: nothing is, or it was discarded on its way.
    pub(crate) fn leaving(&self, map: &PageMap, slot: usize) -> Option<Leaving> {
        let address = self.slots[slot];
        let page = (address != 0).then(|| self.object.page(address)).flatten()?;
        let Entry::Leaving { wanted, .. } = map.get(page) else { return None };
        Some(Leaving { page, address, wanted })
    }

    /// Remembers that `range` is registered.
    pub(crate) fn add_registered(&mut self, range: Range) {
        // What it touches becomes one with it.
        let first = self.registered.partition_point(|known| known.end < range.start);
        let end = self.registered.partition_point(|known| known.start <= range.end);
        let touched = &self.registered[first..end];
        let whole = Range {
            start: touched.first().map_or(range.start, |known| known.start.min(range.start)),
            end: touched.last().map_or(range.end, |known| known.end.max(range.end)),
        };
        self.registered.splice(first..end, [whole]);
    }

    /// Forgets `range`, whole or in part.
    pub(crate) fn remove_registered(&mut self, range: Range) {
        let first = self.registered.partition_point(|known| known.end <= range.start);
        let end = self.registered.partition_point(|known| known.start < range.end).max(first);
        let touched = &self.registered[first..end];
        let rest = touched.first().zip(touched.last()).map(|(before, after)| {
            [
                Range { start: before.start, end: range.start },
                Range { start: range.end, end: after.end },
            ]
        });
        let rest = rest.into_iter().flatten().filter(|part| !part.is_empty());
        let rest: Vec<Range> = rest.collect();
        self.registered.splice(first..end, rest);
    }

    /// Whether all of `range` is registered.
    pub(crate) fn is_registered(&self, range: Range) -> bool {
        let at = self.registered.partition_point(|known| known.end <= range.start);
        self.registered
            .get(at)
            .is_some_and(|known| known.start <= range.start && range.end <= known.end)
    }

    /// The parts of `range` that are registered, in order.
    pub(crate) fn registered_in(&self, range: Range) -> impl Iterator<Item = Range> + '_ {
        let first = self.registered.partition_point(|known| known.end <= range.start);
        self.registered[first..].iter().take_while(move |known| known.start < range.end).map(
            move |known| Range {
                start: known.start.max(range.start),
                end: known.end.min(range.end),
            },
        )
    }

    /// The parts of `range` that are not registered, in order.
    pub(crate) fn unregistered(&self, range: Range) -> Vec<Range> {
        let mut parts = Vec::new();
        let mut start = range.start;
        for known in &self.registered {
            if known.end <= range.start || range.end <= known.start {
                continue;
            }
            if start < known.start {
                parts.push(Range { start, end: known.start });
            }
            start = known.end;
        }
        if start < range.end {
            parts.push(Range { start, end: range.end });
        }
        parts
    }

    /// End of the registered range around `address`.
    pub(crate) fn registered_end(&self, address: u64) -> Option<u64> {
        let at = self.registered.partition_point(|known| known.end <= address);
        self.registered.get(at).filter(|known| known.contains(address)).map(|known| known.end)
    }
}

impl Space {
    pub(crate) fn new(id: SpaceId, uffd: Userfaultfd, kick: EventFd) -> Self {
        Self {
            id,
            uffd,
            agent: RwLock::new(None),
            process: OnceLock::new(),
            gate: Mutex::new(Gate::new(id)),
            kick: Arc::new(kick),
            kicked: Mutex::default(),
            gone: AtomicBool::new(false),
            handler: Mutex::new(None),
            handler_cpu: AtomicU32::new(NO_CPU),
            has_strays: AtomicBool::new(false),
            transfer_clean: AtomicBool::new(false),
            has_shared: AtomicBool::new(false),
            unadjusted: AtomicBool::new(false),
            looked: Mutex::default(),
            touched: Mutex::default(),
            hot: Mutex::default(),
            read: Mutex::default(),
            held: MemoryHold::default(),
        }
    }

    /// The space's number.
    #[must_use]
    pub fn id(&self) -> SpaceId {
        self.id
    }

    /// Another descriptor of its userfaultfd, to be sent to its agent.
    pub fn userfaultfd(&self) -> io::Result<OwnedFd> {
        self.uffd.try_clone()
    }

    /// The agent, once there is one.
    pub(crate) fn agent(&self) -> Option<Arc<Agent>> {
        self.agent.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The number of the process, once its agent has said hello.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process().map(|process| process.pid())
    }

    /// The process, once its agent has said hello.
    #[must_use]
    pub fn process(&self) -> Option<Arc<Process>> {
        self.agent().map(|agent| Arc::clone(&agent.process))
    }

    /// The process, that of a restored one whose agent has not come yet, too.
    #[must_use]
    pub fn held_process(&self) -> Option<Arc<Process>> {
        self.process.get().cloned()
    }

    /// Shows that the userfaultfd of this space is that of a process's memory; see
    /// [`Process::prove`].
    ///
    /// # Errors
    /// It is not shown.
    pub fn prove(&self, process: &Process, probe: u64) -> Result<(), Disproof> {
        process.prove(&self.uffd, probe, &[])
    }

    /// Records and keeps whose memory this is, once and for all.
    pub(crate) fn set_process(&self, registry: &Registry, process: Arc<Process>) {
        for (field, fd) in PROCESS_FIELDS.into_iter().zip(process.descriptors()) {
            registry.set_space_fd(self.id, field, Some(fd));
        }
        registry.space_field(self.id, SpaceField::Pid).store(process.pid(), Ordering::Release);
        let known = Arc::clone(self.process.get_or_init(|| Arc::clone(&process)));
        assert!(Arc::ptr_eq(&known, &process), "an address space has one process");
    }

    /// Records and takes the agent of this space.
    pub(crate) fn attach_agent(&self, registry: &Registry, agent: Agent) {
        if self.process.get().is_none() {
            self.set_process(registry, Arc::clone(&agent.process));
        }
        for (field, value) in [
            (SpaceAddress::Transfer, agent.ranges.transfer.start),
            (SpaceAddress::OwnStart, agent.ranges.own.start),
            (SpaceAddress::OwnEnd, agent.ranges.own.end),
            (SpaceAddress::Restart, agent.restart.unwrap_or(0)),
            (SpaceAddress::Library, agent.library),
        ] {
            registry.space_address(self.id, field).store(value, Ordering::Relaxed);
        }
        let socket = lock(&agent.socket).as_ref().map(|socket| socket.as_fd().as_raw_fd());
        registry.set_space_fd(self.id, SpaceField::Socket, socket);
        registry.set_space_fd(
            self.id,
            SpaceField::Control,
            Some(agent.control.as_fd().as_raw_fd()),
        );
        *self.agent.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(agent));
    }

    /// Gives a faulting address to the handler.
    pub(crate) fn hand_over(&self, addresses: impl IntoIterator<Item = u64>) {
        let mut kicked = lock(&self.kicked);
        let before = kicked.len();
        kicked.extend(addresses);
        if kicked.len() > before {
            self.kick.ring();
        }
    }

    /// A restored process asks for the page at `address`.
    pub(crate) fn note_touched(&self, address: u64) {
        let mut touched = lock(&self.touched);
        if let Some(touched) = touched.as_mut().filter(|touched| touched.len() < MOST_TOUCHED) {
            touched.push(address);
        }
    }

    /// The process is gone, or the address space is being given up.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
        self.kick.ring();
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

/// Which of these slots of the transfer range at `transfer` have a page.
///
/// # Errors
/// The process has ended, or executes something else.
pub(crate) fn slots_with_a_page(
    process: &Process,
    transfer: u64,
    slots: std::ops::Range<usize>,
) -> io::Result<Vec<bool>> {
    let at = |slot: usize| transfer + slot as u64 * PAGE;
    let mut there = vec![false; slots.len()];
    process.page_presence(Range { start: at(slots.start), end: at(slots.end) }, |index, _| {
        there[index as usize] = true
    })?;
    Ok(there)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn r(start: u64, end: u64) -> Range {
        Range { start: start << 12, end: end << 12 }
    }

    #[test]
    fn registered_ranges_merge_and_split() {
        let mut gate = Gate::new(SpaceId(0));
        gate.add_registered(r(10, 20));
        gate.add_registered(r(20, 30));
        gate.add_registered(r(40, 50));
        assert_eq!(gate.registered, [r(10, 30), r(40, 50)]);
        assert!(gate.is_registered(r(15, 25)));
        assert!(!gate.is_registered(r(25, 45)));
        gate.remove_registered(r(12, 14));
        gate.remove_registered(r(45, 60));
        assert_eq!(gate.registered, [r(10, 12), r(14, 30), r(40, 45)]);
        assert_eq!(gate.registered_end(11 << 12), Some(12 << 12));
        assert_eq!(gate.registered_end(12 << 12), None);
        gate.add_registered(r(0, 100));
        assert_eq!(gate.registered, [r(0, 100)]);
    }
}
