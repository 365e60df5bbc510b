//! Taking messages from a userfaultfd, and acting on those that are not faults.
//!
//! Only a space's handler takes its messages. While it does, no `MOVE` is under
//! way in that space (see `wire::Control`): an unmap, remap, remove or fork is
//! always read with every page either still in place or wholly in its transfer
//! slot, and what was not moved by then is cancelled.
//!
//! Everything here can be done twice: the messages stay in the ring until all of
//! them were acted on, and a new worker begins with those that it finds there.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use strata_policy::gap;
use strata_sys::{Event, Range, Userfaultfd, adopt_fd, futex_wait, futex_wake};
use strata_units::wire::{Control, READER_BUSY};

use crate::map::address::{PIECE_BYTES, ids_in};
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::page_map::Piece;
use crate::map::registry::{RESERVED_SPACES, RING_MESSAGES, SpaceAddress, SpaceField};
use crate::tenant::Tenant;
use crate::tenant::space::{Gate, Space};

/// Looks at a busy agent this often before sleeping on it: a `MOVE` takes about
/// a microsecond.
const MOVER_SPINS: u32 = 300;
/// Sleep on a busy agent, between looks at whether the process still lives.
const MOVER_WAIT: Duration = Duration::from_millis(5);
/// After so many sleeps the messages are left for later: the process is stopped,
/// or its agent hostile, and the gate is not for it to hold.
const MOVER_WAITS: u32 = 10;

/// Who waits for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asker {
    /// A thread, by its number in its own PID namespace.
    Thread(u32),
    /// One that the userfaultfd does not name: CRIU makes such ones.
    Unnamed,
    /// Whose fault was handed back: it was looked at when it came.
    Seen,
}

impl Asker {
    /// Its number; 0: not known.
    pub(crate) fn thread(self) -> u32 {
        match self {
            Self::Thread(tid) => tid,
            Self::Unnamed | Self::Seen => 0,
        }
    }
}

/// A fault as the kernel told it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FaultMessage {
    pub(crate) address: u64,
    pub(crate) asker: Asker,
    /// The thread is about to write.
    pub(crate) to_write: bool,
    /// The page is there, and write-protected for a snapshot.
    pub(crate) protected: bool,
}

/// Lets the agent move pages again.
pub(crate) fn done_reading(control: &Control) {
    if control.reader_busy.swap(0, Ordering::SeqCst) != READER_BUSY {
        futex_wake(&control.reader_busy);
    }
}

impl Space {
    /// Takes all waiting messages, acts on events, and appends faults to
    /// `faults`.
    pub(crate) fn take_messages(
        &self,
        tenant: &Arc<Tenant>,
        gate: &mut Gate,
        faults: &mut Vec<FaultMessage>,
    ) {
        let (ring, at) = tenant.registry.ring(self.id);
        let agent = self.agent();
        loop {
            if let Some(agent) = &agent {
                let control = agent.control.control();
                control.reader_busy.store(READER_BUSY, Ordering::SeqCst);
                let mut spins = 0;
                while control.mover_busy.load(Ordering::SeqCst) != 0 && !self.is_gone() {
                    spins += 1;
                    if spins < MOVER_SPINS {
                        std::hint::spin_loop();
                        continue;
                    }
                    if spins > MOVER_SPINS + MOVER_WAITS {
                        done_reading(control);
                        return;
                    }
                    futex_wait(&control.mover_busy, 1, MOVER_WAIT);
                    if !self.uffd.is_alive() {
                        self.gone.store(true, Ordering::Release);
                    }
                }
            }
            let count = if self.is_gone() {
                0
            } else {
                self.uffd.read_messages(ring, at, RING_MESSAGES).unwrap_or(0)
            };
            self.act_on_ring(tenant, gate, count, faults);
            if let Some(agent) = &agent {
                done_reading(agent.control.control());
            }
            if count < RING_MESSAGES {
                return;
            }
        }
    }

    /// Acts on what stands in the first `count` slots of the ring, then empties
    /// them. Also where a new worker begins, with all of it.
    pub(crate) fn act_on_ring(
        &self,
        tenant: &Arc<Tenant>,
        gate: &mut Gate,
        count: usize,
        faults: &mut Vec<FaultMessage>,
    ) {
        let (ring, at) = tenant.registry.ring(self.id);
        for slot in 0..count {
            // A worker that died over the ring left its first slots empty.
            let Some(event) = Userfaultfd::message(ring, at, slot) else { continue };
            let mut changed = false;
            match event {
                Event::Fault { address, tid, to_write, protected } => {
                    let asker = if tid == 0 { Asker::Unnamed } else { Asker::Thread(tid) };
                    faults.push(FaultMessage { address, asker, to_write, protected });
                }
                Event::Fork { fd } => {
                    changed = true;
                    self.forked(tenant, gate, fd);
                }
                Event::Remap { from, to, len } => {
                    changed = true;
                    self.remapped(tenant, gate, from, to, len);
                }
                Event::Remove(range) => {
                    changed = true;
                    self.discarded(tenant, gate, range, false);
                }
                Event::Unmap(range) => {
                    changed = true;
                    self.discarded(tenant, gate, range, true);
                }
                Event::Unknown(number) => {
                    tenant.log(&format!("{}: unknown userfaultfd event {number}", self.id));
                }
            }
            // Before the slot is emptied: a worker that dies in between must not
            // leave the agent a batch that still holds.
            if changed && let Some(agent) = self.agent() {
                agent.control.control().epoch.fetch_add(1, Ordering::SeqCst);
            }
            // At once: done again after the messages that follow it, an unmap
            // would drop what a remap brought since.
            let slot_at = at + Userfaultfd::ring_bytes(slot) as u64;
            Userfaultfd::clear_messages(ring, slot_at, 1);
        }
    }

    /// `range` reads as zero from now on.
    pub(crate) fn discarded(&self, tenant: &Tenant, gate: &mut Gate, range: Range, unmapped: bool) {
        gate.tear_capture(tenant, range);
        gate.gone_meanwhile.note(range);
        let mut emptied: Vec<Piece> = Vec::new();
        let mut given_back = 0;
        for (piece, leaf, part) in gate.object.pages_in(range) {
            for (_, page) in ids_in(leaf, part) {
                let entry = tenant.map.get(page);
                if let Entry::Leaving { slot, .. } = entry {
                    gate.slots[usize::from(slot)] = 0;
                }
                tenant.map.age(page).store(gap::NEW, Ordering::Relaxed);
                let was_empty = matches!(entry, Entry::Untouched | Entry::Discarded);
                given_back += u64::from(!unmapped && !was_empty);
                let after = if unmapped { Entry::Untouched } else { Entry::Discarded };
                tenant.overwrite(page, entry, after);
            }
            if unmapped && part.len() == PIECE_BYTES {
                emptied.push(piece);
            }
        }
        tenant.counters.add(Counter::Discards, given_back);
        for piece in emptied {
            gate.object.give_back(&tenant.map, piece);
        }
        if unmapped {
            gate.remove_registered(range);
            tenant.change_settings(self.id, gate, |settings| settings.clear(range, |_| true));
        }
    }

    /// `mremap` moved `len` bytes. The new place may have grown; it was empty.
    fn remapped(&self, tenant: &Tenant, gate: &mut Gate, from: u64, to: u64, len: u64) {
        let source = Range { start: from, end: from + len };
        gate.tear_capture(tenant, source);
        gate.gone_meanwhile.note(source);
        gate.note_moved(Range { start: to, end: to + len });
        for (_, leaf, part) in gate.object.pages_in(source) {
            for (address, page) in ids_in(leaf, part) {
                let entry = tenant.map.get(page);
                if entry == Entry::Untouched {
                    continue;
                }
                let Some(target) = gate.object.page_or_new(&tenant.map, address - from + to) else {
                    // No room in the page map: 16 TiB are managed already. The
                    // page is lost to the program rather than wrong.
                    tenant.log(&format!("{}: page map full, a moved page is lost", self.id));
                    continue;
                };
                if let Entry::Leaving { slot, .. } = entry {
                    gate.slots[usize::from(slot)] = address - from + to;
                }
                let age = tenant.map.age(page).load(Ordering::Relaxed);
                tenant.map.age(target).store(age, Ordering::Relaxed);
                if tenant.map.get(target) == entry
                    && let Some(handle) = entry.handle()
                {
                    // Done before by a worker that died over it: the new one
                    // counted the handle twice.
                    tenant.store.release(handle);
                }
                // In this order: killed in between, both name the handle, and
                // doing it again repairs that.
                tenant.map.set(target, entry);
                tenant.map.set(page, Entry::Untouched);
                if entry.is_resident() {
                    tenant.noticed_resident(target);
                }
            }
        }
        gate.remove_registered(source);
        gate.add_registered(Range { start: to, end: to + len });
        tenant.change_settings(self.id, gate, |settings| settings.moved(source, to));
    }

    /// A fork: the child has the same pages, the stored ones too.
    pub(super) fn forked(&self, tenant: &Arc<Tenant>, gate: &mut Gate, fd: RawFd) {
        let Some(uffd) = adopt_fd(fd) else {
            return;
        };
        // Done half already, by a worker that died over it? Begin again.
        if let Some(known) =
            tenant.registry.spaces_of(tenant.id).into_iter().find(|&id| {
                tenant.registry.space_fd(id, SpaceField::Uffd) == Some(uffd.as_raw_fd())
            })
        {
            if tenant.registry.space_is_live(known) {
                // Whole: only the ring had not been emptied yet. The
                // descriptor belongs to that space.
                std::mem::forget(uffd);
                return;
            }
            tenant.forget_leaves(known);
            tenant.registry.remove_space(known);
        }
        // The last slots are root's: whoever forks without end keeps no service of the
        // machine from it.
        let may_take =
            tenant.record.uid == 0 || tenant.registry.free_spaces() > RESERVED_SPACES as usize;
        let slot = may_take
            .then(|| tenant.registry.add_space(tenant.id, Some(uffd.as_raw_fd())))
            .flatten();
        let Some(child) = slot else {
            // Closing it would let the child read zeroes: keep it for ever,
            // so that it waits.
            tenant.log("too many address spaces: a forked child will wait for ever");
            std::mem::forget(uffd);
            return;
        };
        let parent = self.id.0 + 1;
        tenant.registry.space_field(child, SpaceField::Parent).store(parent, Ordering::Relaxed);
        let transfer =
            tenant.registry.space_address(self.id, SpaceAddress::Transfer).load(Ordering::Relaxed);
        tenant
            .registry
            .space_address(child, SpaceAddress::Transfer)
            .store(transfer, Ordering::Relaxed);
        match self.copy_for_child(tenant, gate, child, uffd) {
            Ok(space) => {
                tenant.registry.space_goes_live(child);
                tenant.adopt_space(Arc::new(space));
            }
            Err((reason, uffd)) => {
                tenant.log(&format!("{}: a forked child will wait for ever: {reason}", self.id));
                tenant.forget_leaves(child);
                std::mem::forget(uffd);
            }
        }
    }
}
