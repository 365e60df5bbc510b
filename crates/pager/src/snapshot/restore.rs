//! A process that comes back from a snapshot: its page map is a copy of the
//! snapshot's, its userfaultfd was made by whoever restored it.
//!
//! Until its agent says hello it is an orphan, as the child of a fork: faults
//! are served, nothing is evicted. All of its private anonymous memory is
//! registered, by the one who restored it; what is not to be managed (stacks,
//! small mappings, the agent's own) is brought back whole and let go.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{io, thread};

use strata_store::Put;
use strata_sys::{ControlBlock, EventFd, Process, Range, Registration, SeqPacket, Userfaultfd};
use strata_units::PageBuffer;
use strata_units::wire::restart::{RestartError, patch_restart};

use crate::map::address::ids_in;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::registry::SpaceField;
use crate::regions::eligibility::eligibility;
use crate::regions::registration::stacks_of;
use crate::tenant::snapshots::Prepared;
use crate::tenant::space::{Agent, Space};
use crate::tenant::{Hail, Tenant};

/// How long a process may take to get its unmanaged memory back.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// Pages asked for at a time.
const PAGES_AT_A_TIME: usize = 1024;

impl Tenant {
    /// Takes a process that is being restored, before it runs. With the address of its
    /// agent's `wire::restart::Restart`, the agent begins a new life there as this
    /// tenant's, and calls at `socket`: the snapshot may be another daemon's.
    ///
    /// # Errors
    /// Then nobody serves the process: it must not run.
    pub fn restore(
        self: &Arc<Self>,
        mut prepared: Prepared,
        process: Arc<Process>,
        uffd: OwnedFd,
        restart: Option<u64>,
        socket: &Path,
    ) -> io::Result<Arc<Space>> {
        let kick = EventFd::new()?;
        let uffd = Userfaultfd::of_stranger(uffd)?;
        let id = prepared.slot();
        self.registry.set_space_fd(id, SpaceField::Uffd, Some(uffd.as_fd().as_raw_fd()));
        let space = Space::new(id, uffd, kick);
        // By which its agent is told from those of its children.
        space.set_process(&self.registry, process);
        space.transfer_clean.store(true, Ordering::Release);
        lock(&space.gate).object = prepared.take_object();
        if let Some(address) = restart {
            self.patch(&space, address, socket)?;
        }
        prepared.keep();
        *lock(&space.touched) = Some(Vec::new());
        let space = Arc::new(space);
        self.registry.space_goes_live(id);
        crate::fault::handler::start(&space, self);
        self.adopt_space(Arc::clone(&space));
        Ok(space)
    }

    /// What a restored process has asked for so far, in order; from now on nobody
    /// keeps count.
    #[must_use]
    pub fn touched(space: &Space) -> Vec<u64> {
        lock(&space.touched).take().unwrap_or_default()
    }

    /// Tells the agent whose page is stored for `address` of its new life.
    fn patch(&self, space: &Space, address: u64, socket: &Path) -> io::Result<()> {
        let missing = || io::Error::other("its agent's memory is not in the snapshot");
        let gate = lock(&space.gate);
        let page = gate.object.page(address).ok_or_else(missing)?;
        let Entry::Stored(handle) = self.map.get(page) else { return Err(missing()) };
        let mut buffer = PageBuffer::zeroed();
        self.store.get(handle, &mut buffer.0).map_err(io::Error::other)?;
        let socket = socket.as_os_str().as_bytes();
        patch_restart(&mut buffer.0, self.record.token, Some(socket)).map_err(io::Error::other)?;
        let patched = self.store.put(&buffer.0, Put::Staged).map_err(io::Error::other)?;
        self.map.set(page, Entry::Stored(patched));
        self.store.release(handle);
        Ok(())
    }

    /// The same in place: CRIU restores memory itself where it took it for a stack,
    /// which is all of it when a stack pointer ends in three zeroes.
    fn patch_in_place(&self, space: &Space, address: u64, socket: &Path) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let memory = space.held_process().ok_or_else(gone)?.open_memory_to_write()?;
        let mut page = PageBuffer::zeroed();
        memory.read_exact_at(&mut page.0, address)?;
        let socket = socket.as_os_str().as_bytes();
        match patch_restart(&mut page.0, self.record.token, Some(socket)) {
            Ok(()) => memory.write_all_at(&page.0, address),
            // It was told by what the store had.
            Err(RestartError::NotParked) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// A restored process has its mappings and stands still for a moment more:
    /// brings what it must not wait for, and the agent's `own` memory, which the
    /// kernel serves from then on: a child that is forked before the agent has
    /// said hello finds it wiped, as it must. The agent knows by its page at `restart`
    /// that it calls at `socket` from now on.
    ///
    /// # Errors
    /// It must not run.
    pub fn restored_stands(
        &self,
        space: &Space,
        own: Range,
        needed: &[Range],
        wanted: &[Range],
        (restart, socket): (Option<u64>, &Path),
    ) -> io::Result<()> {
        let mut ranges = needed.to_vec();
        ranges.push(own);
        self.bring_back(space, &ranges)?;
        if let Some(address) = restart {
            self.patch_in_place(space, address, socket)?;
        }
        self.let_go(space, &[own])?;
        // After what it asks for itself.
        lock(&space.hot).extend(wanted);
        space.kick.ring();
        Ok(())
    }

    /// Memory in which nothing is stored is the kernel's alone from now on.
    fn let_go(&self, space: &Space, ranges: &[Range]) -> io::Result<()> {
        let mut gate = lock(&space.gate);
        for &range in ranges {
            // A page that came into the range meanwhile (mremap): it stays served.
            let is_away = |page| {
                let entry = self.map.get(page);
                !entry.reads_zero() && !entry.is_resident()
            };
            let pieces = gate.object.pages_in(range);
            if pieces.iter().any(|&(_, leaf, part)| ids_in(leaf, part).any(|(_, id)| is_away(id))) {
                continue;
            }
            if space.uffd.unregister(range) == Registration::Gone {
                return Err(io::ErrorKind::NotConnected.into());
            }
            for (_, leaf, part) in gate.object.pages_in(range) {
                for (_, page) in ids_in(leaf, part) {
                    let entry = self.map.get(page);
                    self.overwrite(page, entry, Entry::Untouched);
                }
            }
            gate.remove_registered(range);
        }
        Ok(())
    }

    /// The agent of a restored process came.
    pub fn attach_restored(
        &self,
        space: &Space,
        control: ControlBlock,
        socket: SeqPacket,
        hail: Hail,
    ) -> io::Result<()> {
        let agent = Agent::new(control, socket, hail);
        space.attach_agent(&self.registry, agent);
        self.wake_keeper();
        Ok(())
    }

    /// What of a restored process is not to be managed goes back in place, and
    /// the kernel serves it from now on. After its agent was told Ready: this
    /// takes as long as it takes.
    ///
    /// # Errors
    /// It is served on, and never evicted.
    pub fn settle_restored(&self, space: &Space) -> io::Result<()> {
        let Some(agent) = space.agent() else { return Ok(()) };
        let stacks = stacks_of(agent.control.control());
        let maps = agent.process.maps()?;
        let let_go: Vec<Range> = eligibility(&maps, agent.ranges, &stacks)
            .into_iter()
            .filter(|(mapping, why)| mapping.private && mapping.fileless && why.is_err())
            .map(|(mapping, _)| mapping.range)
            .filter(|&range| range != agent.ranges.transfer)
            .collect();
        self.bring_back(space, &let_go)?;
        self.let_go(space, &let_go)
    }

    /// Has every stored page of `ranges` put in place.
    pub(crate) fn bring_back(&self, space: &Space, ranges: &[Range]) -> io::Result<()> {
        let began = Instant::now();
        loop {
            let mut stored = Vec::new();
            {
                let gate = lock(&space.gate);
                for (_, leaf, part) in ranges.iter().flat_map(|&range| gate.object.pages_in(range))
                {
                    let is_stored =
                        |page| matches!(self.map.get(page), Entry::Stored(_) | Entry::Arriving(_));
                    stored.extend(
                        ids_in(leaf, part)
                            .filter(|&(_, page)| is_stored(page))
                            .map(|(address, _)| address)
                            .take(PAGES_AT_A_TIME),
                    );
                }
            }
            if stored.is_empty() {
                return Ok(());
            }
            if space.is_gone() {
                return Err(io::Error::other("the process has ended"));
            }
            if began.elapsed() > PATIENCE {
                let (address, count) = (stored[0], stored.len());
                return Err(io::Error::other(format!(
                    "{count} pages of its memory do not come back, the first at {address:#x}"
                )));
            }
            let left = stored.len();
            space.hand_over(stored);
            // The handler serves some hundred of them in a millisecond.
            thread::sleep(LOOK_EVERY.max(Duration::from_micros(2 * left as u64)));
        }
    }
}
