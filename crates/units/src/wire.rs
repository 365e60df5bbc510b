//! What passes between the daemon and the agent inside a program.
//!
//! Two channels. A `SOCK_SEQPACKET` unix socket carries the handshake, one
//! [`Hello`], [`Welcome`], [`Userfaultfd`], [`Ready`] each, with descriptors as
//! `SCM_RIGHTS`; afterwards it only tells either side that the other is gone.
//! Everything else goes through the [`Control`] block, a sealed memfd that both
//! map: commands are idempotent and their results stay in the block, so that a
//! daemon that died in between finds them.
//!
//! The daemon trusts none of it; the agent trusts the daemon.

pub mod restart;

use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use crate::Hints;

/// First word of every message, of [`Control`] and of [`Restart`](restart::Restart): "STRATA"
/// and the protocol's version.
pub const MAGIC: u64 = 0x5354_5241_5441_0006;
/// The same of the version before. Programs keep the library that they were started with, so
/// a daemon speaks this one, too: it answers as it was addressed. Its hello is
/// [`HelloBefore`]; everything else is as it was.
pub const MAGIC_BEFORE: u64 = MAGIC - 1;
/// Environment variable: `5` has the library speak [`MAGIC_BEFORE`], as one that was
/// installed before; for tests of that.
pub const ENV_PROTOCOL: &str = "STRATA_AGENT_PROTOCOL";

/// Whether a daemon knows the version.
#[must_use]
pub const fn is_spoken(magic: u64) -> bool {
    magic == MAGIC || magic == MAGIC_BEFORE
}

/// Most pages of one batch.
pub const BATCH_PAGES: usize = 256;
/// Pages of the transfer range: a batch.
pub const TRANSFER_PAGES: usize = BATCH_PAGES;
/// Threads that the control block can tell apart. A program with more keeps
/// running; the daemon then manages no mapping younger than the overflow.
pub const THREAD_SLOTS: usize = 4096;
/// Pages that hold priority-inheriting mutexes.
pub const PINNED_SLOTS: usize = 1024;

/// Environment variable: path of the daemon's agent socket.
pub const ENV_SOCKET: &str = "STRATA_AGENT_SOCKET";
/// Environment variable: the tenant's token, 16 hex digits.
pub const ENV_TOKEN: &str = "STRATA_TOKEN";
/// Environment variable of a guest's QEMU: the directory of the files that it takes for
/// the guest's memory, as the kernel names it (no link in it).
pub const ENV_GUEST: &str = "STRATA_GUEST_DIR";
/// Longest such path. (The monitor's socket is in there: of that the kernel takes 107.)
pub const MAX_GUEST_PATH_BYTES: usize = 255;
/// Where the agent looks for a socket when the environment names none (the
/// library came in through `/etc/ld.so.preload`).
pub const DEFAULT_AGENT_SOCKET: &str = "/run/strata/agent.sock";
/// The daemon's socket for requests, in the directory of the agents' socket.
pub const CONTROL_SOCKET_NAME: &str = "control.sock";

/// Why an agent calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum HelloKind {
    /// A program starts (after exec).
    Start = 1,
    /// The child of a fork.
    Forked = 2,
    /// The same process again: its connection was lost, not its userfaultfd.
    Resumed = 3,
    /// A copy of a process whose agent was parked, made by a restore: nothing of
    /// the original's connection is left. Answered with [`Verdict::Adopt`] and
    /// the userfaultfd that the restore made; anything else is asked again.
    Restored = 4,
}

/// Agent → daemon, first message. For [`HelloKind::Resumed`] the userfaultfd
/// travels with it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: u64,
    /// A [`HelloKind`].
    pub kind: u32,
    /// The process's own idea of its pid (its namespace's). The daemon uses
    /// the kernel's (`SO_PEERCRED`) and only logs this one.
    pub pid: u32,
    /// The tenant's token from [`ENV_TOKEN`] or, in a restored process, from
    /// [`Restart`](restart::Restart); 0 when absent.
    pub token: u64,
    /// First byte of the transfer range: [`TRANSFER_PAGES`] private anonymous
    /// pages, page-aligned, nothing resident. A forked child keeps its
    /// parent's address and must not touch it.
    pub transfer: u64,
    /// First byte of one private anonymous page that this process mapped for
    /// this handshake at an address drawn at random: the daemon tells by it
    /// which forked userfaultfd belongs to this process.
    pub probe: u64,
    /// The agent's own memory (stack and data), never managed.
    pub own_start: u64,
    /// End of the agent's own memory, exclusive.
    pub own_end: u64,
    /// First byte of the [`Restart`](restart::Restart) page, inside the agent's own memory.
    pub restart: u64,
    /// The library's version ([`version_number`]); 0: one before it was told.
    pub library: u64,
}

/// [`Hello`] in the version before: without what came last.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
#[expect(missing_docs, reason = "as in Hello")]
pub struct HelloBefore {
    pub magic: u64,
    pub kind: u32,
    pub pid: u32,
    pub token: u64,
    pub transfer: u64,
    pub probe: u64,
    pub own_start: u64,
    pub own_end: u64,
    pub restart: u64,
}

impl From<Hello> for HelloBefore {
    fn from(hello: Hello) -> Self {
        let Hello { magic, kind, pid, token, transfer, probe, own_start, own_end, restart, .. } =
            hello;
        Self { magic, kind, pid, token, transfer, probe, own_start, own_end, restart }
    }
}

impl Hello {
    /// A hello of any version that is spoken; none: it is not as long as its version's.
    #[must_use]
    pub fn heard(bytes: &[u8]) -> Option<Self> {
        let Some(before) = HelloBefore::from_bytes(bytes) else { return Self::from_bytes(bytes) };
        let HelloBefore { magic, kind, pid, token, transfer, probe, own_start, own_end, restart } =
            before;
        (magic == MAGIC_BEFORE).then_some(Self {
            magic,
            kind,
            pid,
            token,
            transfer,
            probe,
            own_start,
            own_end,
            restart,
            library: 0,
        })
    }
}

/// A version as one number, later ones larger: `major.minor.patch`, 16 bits each.
#[must_use]
pub const fn version_number(version: &str) -> u64 {
    let (mut number, mut part, mut at) = (0u64, 0u64, 0);
    let bytes = version.as_bytes();
    while at < bytes.len() && (bytes[at] == b'.' || bytes[at].is_ascii_digit()) {
        if bytes[at] == b'.' {
            number = (number | part & 0xffff) << 16;
            part = 0;
        } else {
            part = part * 10 + (bytes[at] - b'0') as u64;
        }
        at += 1;
    }
    number | part & 0xffff
}

/// What the daemon answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Verdict {
    /// Not to be managed: the agent closes everything and its thread ends.
    Unmanaged = 1,
    /// Managed. Descriptors: the control memfd, then `/dev/userfaultfd` (on
    /// which the agent makes its userfaultfd with `USERFAULTFD_IOC_NEW`).
    Create = 2,
    /// Managed, and the userfaultfd exists (a fork or a restore made it).
    /// Descriptors: the control memfd, then that userfaultfd, whose events are
    /// being read: the agent's next mapping may wait for that.
    Adopt = 3,
    /// Managed on, after [`HelloKind::Resumed`]. Descriptor: the control memfd.
    Resume = 4,
    /// As [`Verdict::Unmanaged`], but somebody wanted it managed, and its user may not
    /// have a userfaultfd: the program says so on its standard error.
    NotAllowed = 5,
    /// As [`Verdict::Unmanaged`], but a tenant was named that is not there or is another
    /// user's, or its user has as many processes as may be: the program says so.
    Refused = 6,
}

/// In [`Welcome::verdict`], beside a [`Verdict`]: a rule of the configuration says that
/// the program must not run unmanaged, whatever goes wrong from here on.
pub const REQUIRED: u32 = 1 << 31;
/// Exit status of a program that was to be managed, could not be, and must not run
/// otherwise.
pub const UNMANAGED_STATUS: i32 = 125;
/// Environment variable: the process that must not run unmanaged, its number, or, with
/// a `+` before it, whose children must not. `strata run` sets it.
pub const ENV_REQUIRED: &str = "STRATA_REQUIRED";

/// Daemon → agent, second message.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: u64,
    /// A [`Verdict`], perhaps with [`REQUIRED`].
    pub verdict: u32,
    /// The space's number, for messages only.
    pub space: u32,
    /// The daemon also listens for agents at [`back_name`] of this, 0: it does
    /// not.
    pub back: u64,
}

/// Agent → daemon after [`Verdict::Create`], with the new userfaultfd, made
/// with `O_CLOEXEC | O_NONBLOCK` and without the API handshake.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Userfaultfd {
    /// [`MAGIC`].
    pub magic: u64,
}

/// Daemon → agent, last message: the daemon holds the userfaultfd, the program
/// may run.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Ready {
    /// [`MAGIC`].
    pub magic: u64,
}

/// What the daemon asks of the agent through the control block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Command {
    /// `UFFDIO_MOVE` each entry's page to its transfer slot.
    Move = 1,
    /// `MADV_DONTNEED` on the transfer slots `first_slot..first_slot + count`.
    Discard = 2,
    /// `MADV_POPULATE_WRITE` each entry's page (breaks copy-on-write sharing).
    Populate = 3,
    /// Close everything and end: the space is released, the program runs on
    /// natively.
    Leave = 4,
    /// To be reported as done at once; from then until the next command,
    /// whichever, the agent touches no descriptor and no memory but its own and
    /// the control block. The process may be dumped meanwhile: see [`Restart`](restart::Restart).
    Park = 5,
    /// Nothing: ends a [`Command::Park`].
    Continue = 6,
}

/// [`Entry::result`] before the agent has come to it.
pub const RESULT_PENDING: i32 = 1;
/// [`Entry::result`]: the agent did not try, because [`Control::epoch`] or
/// [`Control::thread_seq`] moved on.
pub const RESULT_CANCELLED: i32 = 2;

/// One page of a batch. Entry `i` of a batch with `first_slot` `s` goes to the
/// transfer slot `s + i`.
#[derive(Debug)]
#[repr(C)]
pub struct Entry {
    /// The page's virtual address.
    pub address: AtomicU64,
    /// 0: done. Negative: the kernel's errno. Else a `RESULT_` constant.
    pub result: AtomicI32,
    /// Padding.
    pub reserved: AtomicU32,
}

/// One thread of the program. Written by the thread itself before it runs the
/// program's code; never removed (glibc reuses a dead thread's stack), the
/// daemon drops those whose tid is gone.
#[derive(Debug)]
#[repr(C)]
pub struct ThreadSlot {
    /// `pthread_self()`: the thread control block, with the rseq area, the
    /// robust list and the clear-child-tid word. 0: empty slot.
    pub control_block: AtomicU64,
    /// An address on its stack.
    pub stack: AtomicU64,
    /// Its kernel thread id.
    pub tid: AtomicU32,
    /// Padding.
    pub reserved: AtomicU32,
}

/// Bytes of a [`back_name`].
pub const BACK_NAME_BYTES: usize = 23;

/// Name of the abstract socket at which a daemon listens for agents that its
/// path, or its directory's permissions, keep away: those of programs that have
/// changed their root directory or their user. Only agents of processes that the
/// daemon knows already, and of their children, are answered there.
#[must_use]
pub const fn back_name(key: u64) -> [u8; BACK_NAME_BYTES] {
    let mut name = *b"strata-0000000000000000";
    let mut digit = 0;
    while digit < 16 {
        let value = (key >> (60 - 4 * digit) & 15) as u8;
        name[7 + digit] = if value < 10 { b'0' + value } else { b'a' + value - 10 };
        digit += 1;
    }
    name
}

/// [`Control::reader_busy`]: the daemon is taking messages.
pub const READER_BUSY: u32 = 1;
/// The same, and the agent sleeps until it is done.
pub const READER_AWAITED: u32 = 2;

/// The control block, at offset 0 of the control memfd.
///
/// *Commands.* The daemon fills `entries`, `count`, `first_slot`, `batch_epoch`,
/// `batch_thread_seq` and `command`, stores `command_seq + 1` (release) and
/// wakes its futex. The agent works, stores that number in `done_seq` (release)
/// and wakes its futex. One command is under way at a time.
///
/// *Moving and reading exclude each other.* A message read from the userfaultfd
/// may say that a range is gone, and its addresses may be in use again for
/// memory that the daemon does not know; a `MOVE` that is under way then would
/// steal from it. (While such a message is unread the kernel refuses `MOVE`.)
/// So, Dekker's way, all sequentially consistent:
/// - agent, for each page: `mover_busy = 1`; if `reader_busy != 0`, set
///   `mover_busy = 0`, wake it, change `reader_busy` from [`READER_BUSY`] to
///   [`READER_AWAITED`], wait on it as a futex, and try again;
///   if `epoch != batch_epoch` or `thread_seq != batch_thread_seq`, the result
///   is [`RESULT_CANCELLED`]; else `MOVE`; then `mover_busy = 0` and wake it if
///   `reader_busy` is set;
/// - daemon, for each read: `reader_busy = READER_BUSY`; wait while
///   `mover_busy != 0`; read; if there was an unmap, remap, remove or fork,
///   `epoch += 1`; then `reader_busy = 0`, and wake it if it was awaited: a
///   system call less in every fault.
///
/// *Threads.* A new thread fills its slot, adds 1 to `thread_seq`, waits while
/// `mover_busy != 0`, then touches its own control block (which brings it back
/// if it had just been moved).
///
/// *Hints* go the other way: [`Hints`].
#[derive(Debug)]
#[repr(C)]
pub struct Control {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Number of the newest command; futex. 0: none yet.
    pub command_seq: AtomicU32,
    /// A [`Command`].
    pub command: AtomicU32,
    /// Entries (or slots) of the command, at most [`BATCH_PAGES`] (entries).
    pub count: AtomicU32,
    /// First transfer slot.
    pub first_slot: AtomicU32,
    /// `epoch` for which the batch holds.
    pub batch_epoch: AtomicU32,
    /// `thread_seq` for which the batch holds.
    pub batch_thread_seq: AtomicU32,
    /// Number of the newest finished command; futex.
    pub done_seq: AtomicU32,
    /// Changes of the address space that the daemon has read.
    pub epoch: AtomicU32,
    /// The daemon is taking messages: 0, [`READER_BUSY`] or
    /// [`READER_AWAITED`]; futex.
    pub reader_busy: AtomicU32,
    /// The agent is inside a `MOVE`; futex.
    pub mover_busy: AtomicU32,
    /// Counts up with every thread and every pinned page that is recorded: a
    /// batch made before must not be carried out.
    pub thread_seq: AtomicU32,
    /// Set when `threads` was full: new mappings are not managed any more.
    pub thread_overflow: AtomicU32,
    /// Pinned pages recorded so far.
    pub pinned_seq: AtomicU32,
    /// Padding.
    pub reserved: AtomicU32,
    /// The batch.
    pub entries: [Entry; BATCH_PAGES],
    /// Hash table by control block, open addressing from
    /// [`thread_slot`]`(control_block)` on.
    pub threads: [ThreadSlot; THREAD_SLOTS],
    /// Page addresses that hold a priority-inheriting mutex; 0: empty.
    pub pinned: [AtomicU64; PINNED_SLOTS],
    /// What the program says of its memory by the C API.
    pub hints: Hints,
}

/// A message of the handshake as the bytes that travel: its fields in order,
/// little-endian, which is its layout in memory (`repr(C)`, no padding).
pub trait AsBytes: Sized {
    /// The message as it is sent.
    fn to_bytes(&self) -> Vec<u8>;
    /// The message in `bytes`; none if they are not exactly one.
    fn from_bytes(bytes: &[u8]) -> Option<Self>;
}

macro_rules! as_bytes {
    ($message:ident { $($field:ident: $kind:ty),+ }) => {
        impl AsBytes for $message {
            fn to_bytes(&self) -> Vec<u8> {
                let mut bytes = Vec::with_capacity(size_of::<Self>());
                $(bytes.extend_from_slice(&self.$field.to_le_bytes());)+
                bytes
            }

            fn from_bytes(bytes: &[u8]) -> Option<Self> {
                let rest = bytes;
                $(
                    let (head, rest) = rest.split_first_chunk::<{ size_of::<$kind>() }>()?;
                    let $field = <$kind>::from_le_bytes(*head);
                )+
                rest.is_empty().then_some(Self { $($field),+ })
            }
        }

        const _: () = assert!(size_of::<$message>() == 0 $(+ size_of::<$kind>())+);
    };
}

as_bytes!(Hello {
    magic: u64,
    kind: u32,
    pid: u32,
    token: u64,
    transfer: u64,
    probe: u64,
    own_start: u64,
    own_end: u64,
    restart: u64,
    library: u64
});
as_bytes!(HelloBefore {
    magic: u64,
    kind: u32,
    pid: u32,
    token: u64,
    transfer: u64,
    probe: u64,
    own_start: u64,
    own_end: u64,
    restart: u64
});
as_bytes!(Welcome { magic: u64, verdict: u32, space: u32, back: u64 });
as_bytes!(Userfaultfd { magic: u64 });
as_bytes!(Ready { magic: u64 });

/// Bytes of the control memfd: [`Control`] rounded up to pages.
pub const CONTROL_BYTES: usize = size_of::<Control>().next_multiple_of(crate::PAGE_SIZE);

/// First slot to try for a thread's control block.
#[must_use]
pub const fn thread_slot(control_block: u64) -> usize {
    ((control_block >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % THREAD_SLOTS
}

const _: () = assert!(size_of::<Entry>() == 16);
const _: () = assert!(size_of::<ThreadSlot>() == 24);

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
