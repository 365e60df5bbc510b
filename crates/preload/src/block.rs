//! The library's own memory: one mapping with the agents' stacks and everything
//! that the agent shares with the program's threads.
//!
//! ```text
//! own_start                                               own_end
//!     | guard | seat | guard | seat | Shared    | Block       |
//!     | ----- wiped in a forked child --------- | inherited   |
//! ```
//!
//! `Block` begins with the page that a restorer patches (`wire::restart::Restart`).
//!
//! The daemon never manages it. It is mapped once, by whoever needs it first
//! (the constructor, or a thread made by another library's constructor), and
//! never unmapped: references to it are `'static`.
//!
//! The first part is `MADV_WIPEONFORK`: a child, however it was forked, finds no
//! agent and no pointer to its parent's control block.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use strata_units::PAGE_SIZE;
use strata_units::wire::restart::{Restart, SOCKET_PATH_BYTES};
use strata_units::wire::{CONTROL_BYTES, Control, PINNED_SLOTS, TRANSFER_PAGES, ThreadSlot};

use crate::kernel;
use crate::thread::{SEAT_BYTES, SEATS};

/// A seat with the guard page below it.
const GUARDED_BYTES: usize = PAGE_SIZE + SEAT_BYTES;
/// Threads that can be made before the handshake: more than any constructor
/// starts; further ones set the overflow flag.
pub(crate) const EARLY_SLOTS: usize = 256;
/// Bytes of the transfer range.
pub(crate) const TRANSFER_BYTES: usize = TRANSFER_PAGES * PAGE_SIZE;

/// [`Shared::outcome`]: the handshake is under way (what fresh memory says).
pub(crate) const OUTCOME_PENDING: u32 = 0;
/// [`Shared::outcome`]: the daemon holds the userfaultfd.
pub(crate) const OUTCOME_READY: u32 = 1;
/// [`Shared::outcome`]: the constructor gave up waiting; the agent must end.
pub(crate) const OUTCOME_ABANDONED: u32 = 2;
/// [`Shared::outcome`]: a forked child's agent has not reached the daemon, and goes
/// on trying.
pub(crate) const OUTCOME_TRYING: u32 = 3;
/// [`Shared::outcome`]: this plus a `Failure`.
pub(crate) const OUTCOME_FAILED: u32 = 16;

/// The part that a forked child finds zeroed.
#[repr(C, align(4096))]
pub(crate) struct Shared {
    /// The control block in use; null: none.
    pub(crate) control: AtomicPtr<Control>,
    /// How the handshake went; futex.
    pub(crate) outcome: AtomicU32,
    /// Thread ids of the agents in the two seats; 0: nobody sits there. Futexes,
    /// cleared by the kernel when the thread has ended.
    pub(crate) tids: [AtomicU32; SEATS],
    /// The seat of the agent in charge.
    pub(crate) seat: AtomicU32,
    /// The process whose agent it is.
    pub(crate) pid: AtomicU32,
    /// How far one agent's following another one is (`succession`); futex.
    pub(crate) succession: AtomicU32,
    /// Held by the thread of the program that wants it; futex.
    pub(crate) changing: AtomicU32,
    /// Name of the socket at which the old agent gives, in its lowest bytes.
    pub(crate) offer: AtomicU64,
    /// The daemon said that the program must not run unmanaged.
    pub(crate) required: AtomicU32,
    /// More early threads than slots.
    pub(crate) early_overflow: AtomicU32,
    /// Threads recorded while there was no control block.
    pub(crate) early: [ThreadSlot; EARLY_SLOTS],
}

/// The whole block, seen from its inherited part.
#[repr(C, align(4096))]
pub(crate) struct Block {
    /// Whom this process calls, and as whom; whether its agent is parked.
    pub(crate) restart: Restart,
    layout: Layout,
    settings: UnsafeCell<Settings>,
    /// This process or the one it was forked from is managed.
    pub(crate) managed: AtomicU32,
    /// The `HelloKind` with which the agent is to call.
    pub(crate) hello_kind: AtomicU32,
    /// Lives that the process has begun as a copy, twice counted: odd while the
    /// agent of such a life has not been answered yet.
    pub(crate) lives: AtomicU32,
    /// Entries of `mutexes` in use, so that others cost nothing to destroy.
    pub(crate) mutex_count: AtomicU32,
    /// Addresses of priority-inheriting mutexes; slot `i` stands behind
    /// `Control::pinned[i]`. 0: empty.
    pub(crate) mutexes: [AtomicU64; PINNED_SLOTS],
}

// SAFETY: `layout` is written before the block is published; `settings` only by
// the constructor, before it starts the agent, and read only by agents and by
// the fork handler, which come after. The rest is atomic.
unsafe impl Sync for Block {}

struct Layout {
    start: u64,
    shared: *const Shared,
}

/// What the constructor found out, for this agent and those of children.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    /// First byte of the transfer range.
    pub(crate) transfer: u64,
    /// Room for two control blocks, see [`Block::control_place`].
    pub(crate) places: u64,
}

const _: () = assert!(SOCKET_PATH_BYTES == size_of::<[c_char; 108]>());
const _: () = assert!(core::mem::offset_of!(Block, restart) == 0);

static BLOCK: AtomicPtr<Block> = AtomicPtr::new(core::ptr::null_mut());

/// The block; none: there is none yet.
pub(crate) fn existing() -> Option<&'static Block> {
    // SAFETY: null, or a block that `obtain` completed and nobody unmaps.
    unsafe { BLOCK.load(Ordering::Acquire).as_ref() }
}

/// The block, mapped now if need be; none: no memory.
pub(crate) fn obtain() -> Option<&'static Block> {
    if let Some(block) = existing() {
        return Some(block);
    }
    let wiped_bytes = SEATS * GUARDED_BYTES + size_of::<Shared>();
    let length_bytes = wiped_bytes + size_of::<Block>();
    let start = kernel::map_anonymous(0, length_bytes, libc::PROT_READ | libc::PROT_WRITE)?;
    let shared = start + (SEATS * GUARDED_BYTES) as u64;
    let block = (start + wiped_bytes as u64) as *mut Block;
    // SAFETY: the mapping is fresh, ours, zeroed (valid for every field) and
    // long enough for its parts, each a whole number of pages. Nobody else
    // knows it yet.
    unsafe {
        let guarded = (0..SEATS as u64)
            .all(|seat| kernel::forbid(start + seat * GUARDED_BYTES as u64, PAGE_SIZE));
        let wiped = kernel::advise(start, wiped_bytes, libc::MADV_WIPEONFORK) == 0;
        if !guarded || !wiped {
            kernel::unmap(start, length_bytes);
            return None;
        }
        (&raw mut (*block).layout).write(Layout { start, shared: shared as *const Shared });
    }
    let null = core::ptr::null_mut();
    if BLOCK.compare_exchange(null, block, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: another thread was first; ours was never published.
        unsafe { kernel::unmap(start, length_bytes) };
    }
    existing()
}

impl Block {
    /// The part that is wiped in a child.
    pub(crate) fn shared(&self) -> &'static Shared {
        // SAFETY: inside this block's mapping, aligned, valid when zeroed (which
        // a fork makes it, before the child runs), never unmapped.
        unsafe { &*self.layout.shared }
    }

    /// First byte of the whole mapping.
    pub(crate) fn start(&self) -> u64 {
        self.layout.start
    }

    /// End of the whole mapping, exclusive.
    pub(crate) fn end(&self) -> u64 {
        core::ptr::from_ref(self) as u64 + size_of::<Self>() as u64
    }

    /// First byte of a seat's memory, of `SEAT_BYTES`.
    pub(crate) fn seat(&self, seat: usize) -> u64 {
        self.layout.start + (seat * GUARDED_BYTES + PAGE_SIZE) as u64
    }

    /// Stores the daemon's socket, the tenant's token and the version that is spoken; false: the path is too
    /// long. Only for the constructor: afterwards only a restorer changes them,
    /// while no thread runs.
    pub(crate) fn introduce(&self, socket: &CStr, token: u64, magic: u64) -> bool {
        let path = socket.to_bytes_with_nul();
        let Some(room) = self.restart.socket.get(..path.len()) else { return false };
        for (to, from) in room.iter().zip(path) {
            to.store(*from, Ordering::Relaxed);
        }
        self.restart.token.store(token, Ordering::Relaxed);
        self.restart.magic.store(magic, Ordering::Release);
        true
    }

    /// The version of the protocol that this process speaks: the first word of what it says.
    pub(crate) fn magic(&self) -> u64 {
        self.restart.magic.load(Ordering::Acquire)
    }

    /// Where the daemon listens for this process.
    pub(crate) fn socket(&self) -> libc::sockaddr_un {
        // SAFETY: all zero is a valid address structure.
        let mut address: libc::sockaddr_un = unsafe { core::mem::zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in address.sun_path.iter_mut().zip(&self.restart.socket) {
            *to = from.load(Ordering::Relaxed) as c_char;
        }
        address
    }

    /// Stores what else the constructor found.
    ///
    /// # Safety
    /// Only by the constructor, before it starts an agent.
    pub(crate) unsafe fn set(&self, settings: Settings) {
        // SAFETY: nobody reads them before there is an agent, says the caller.
        unsafe { *self.settings.get() = settings };
    }

    /// What the constructor found.
    pub(crate) fn settings(&self) -> &Settings {
        // SAFETY: zeroed or written by the constructor before any caller of
        // this existed; never written again.
        unsafe { &*self.settings.get() }
    }

    /// Where the next control block is to be mapped: the place that is not in
    /// use. A thread that is still writing a record to the block before last
    /// then writes it into the newest, where it belongs anyway; so neither
    /// place is ever unmapped.
    pub(crate) fn control_place(&self) -> u64 {
        let first = self.settings().places;
        if self.shared().control.load(Ordering::SeqCst) as u64 == first {
            first + CONTROL_BYTES as u64
        } else {
            first
        }
    }

    /// The control block, if there is one.
    pub(crate) fn control(&self) -> Option<&'static Control> {
        // SAFETY: null, or a place where a control memfd of full length is
        // mapped; places stay mapped for ever. All its fields are atomic.
        unsafe { self.shared().control.load(Ordering::SeqCst).as_ref() }
    }
}
