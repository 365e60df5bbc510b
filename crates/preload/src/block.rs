//! The library's own memory: one mapping with the agent's stack and everything
//! that the agent shares with the program's threads.
//!
//! ```text
//! own_start                                               own_end
//!     | guard | the agent's stack | Shared      | Block       |
//!     | ----- wiped in a forked child --------- | inherited   |
//! ```
//!
//! `Block` begins with the page that a restorer patches (`wire::Restart`).
//!
//! The daemon never manages it. It is mapped once, by whoever needs it first
//! (the constructor, or a thread made by another library's constructor), and
//! never unmapped: references to it are `'static`.
//!
//! The first part is `MADV_WIPEONFORK`: a child, however it was forked, finds no
//! agent and no pointer to its parent's control block.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use strata_units::PAGE_SIZE;
use strata_units::wire::{
    CONTROL_BYTES, Control, MAGIC, PINNED_SLOTS, Restart, SOCKET_PATH_BYTES, TRANSFER_PAGES,
    ThreadSlot,
};

use crate::kernel;
use crate::next;

/// Stack for the agent's own frames, the deepest of which is under 4 KiB, and
/// for a C library signal handler's; what the C library itself needs of a
/// thread's stack (static TLS) comes on top.
const STACK_BYTES: usize = 64 << 10;
/// Assumed need of the C library where it does not tell.
const DEFAULT_MINIMUM_STACK_BYTES: usize = 128 << 10;
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
/// [`Shared::outcome`]: this plus a `Failure`.
pub(crate) const OUTCOME_FAILED: u32 = 16;

/// The part that a forked child finds zeroed.
#[repr(C, align(4096))]
pub(crate) struct Shared {
    /// The control block in use; null: none.
    pub(crate) control: AtomicPtr<Control>,
    /// How the handshake went; futex.
    pub(crate) outcome: AtomicU32,
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
    stack_start: u64,
    stack_bytes: usize,
    shared: *const Shared,
}

/// What the constructor found out, for this agent and those of children.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    /// First byte of the transfer range.
    pub(crate) transfer: u64,
    /// Room for two control blocks, see [`Block::control_place`].
    pub(crate) places: u64,
    /// glibc's count of threads, null: unknown. The last thread to end exits
    /// the process; the agent must not count.
    pub(crate) thread_count: *const AtomicU32,
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
    let stack_bytes = (STACK_BYTES + minimum_stack_bytes()).next_multiple_of(PAGE_SIZE);
    let wiped_bytes = PAGE_SIZE + stack_bytes + size_of::<Shared>();
    let length_bytes = wiped_bytes + size_of::<Block>();
    let start = kernel::map_anonymous(0, length_bytes, libc::PROT_READ | libc::PROT_WRITE)?;
    let shared = start + (PAGE_SIZE + stack_bytes) as u64;
    let block = (start + wiped_bytes as u64) as *mut Block;
    // SAFETY: the mapping is fresh, ours, zeroed (valid for every field) and
    // long enough for the four parts, each a whole number of pages. Nobody else
    // knows it yet.
    unsafe {
        let guarded = kernel::forbid(start, PAGE_SIZE);
        let wiped = kernel::advise(start, wiped_bytes, libc::MADV_WIPEONFORK) == 0;
        if !guarded || !wiped {
            kernel::unmap(start, length_bytes);
            return None;
        }
        (&raw mut (*block).layout).write(Layout {
            start,
            stack_start: start + PAGE_SIZE as u64,
            stack_bytes,
            shared: shared as *const Shared,
        });
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

    /// The agent's stack: first byte and length.
    pub(crate) fn stack(&self) -> (u64, usize) {
        (self.layout.stack_start, self.layout.stack_bytes)
    }

    /// Stores the daemon's socket and the tenant's token; false: the path is too
    /// long. Only for the constructor: afterwards only a restorer changes them,
    /// while no thread runs.
    pub(crate) fn introduce(&self, socket: &CStr, token: u64) -> bool {
        let path = socket.to_bytes_with_nul();
        let Some(room) = self.restart.socket.get(..path.len()) else { return false };
        for (to, from) in room.iter().zip(path) {
            to.store(*from, Ordering::Relaxed);
        }
        self.restart.token.store(token, Ordering::Relaxed);
        self.restart.magic.store(MAGIC, Ordering::Release);
        true
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

/// What the C library needs of a stack for itself. A private symbol, but the
/// only way to learn the size of the static TLS, which lies on the stack.
fn minimum_stack_bytes() -> usize {
    let symbol = next::any(c"__pthread_get_minstack");
    if symbol.is_null() {
        return DEFAULT_MINIMUM_STACK_BYTES;
    }
    // SAFETY: glibc's function takes an attribute pointer, which it ignores but
    // which a thread library might read, and returns a size.
    unsafe {
        let function = core::mem::transmute::<
            *mut c_void,
            unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize,
        >(symbol);
        let mut attributes: libc::pthread_attr_t = core::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        let bytes = function(&raw const attributes);
        libc::pthread_attr_destroy(&raw mut attributes);
        bytes
    }
}

/// glibc's thread counter, see [`Settings::thread_count`].
pub(crate) fn thread_count() -> *const AtomicU32 {
    next::any(c"__nptl_nthreads").cast()
}
