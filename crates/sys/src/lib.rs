//! The kernel, made safe: userfaultfd, futexes, memory files, process memory,
//! descriptor passing.
//!
//! `unsafe` lives here (and in the library inside the program) and nowhere
//! else: this crate exists to hold it. Every call answers with an outcome that
//! says what happened; no other crate looks at an errno.
#![allow(unsafe_code, reason = "this crate wraps system calls; each block says why it holds")]

mod control_block;
mod event;
mod futex;
mod own_memory;
mod pagemap;
pub mod peer;
mod poll;
pub mod probe;
mod process;
mod sched;
mod shared_memory;
mod socket;
mod supervise;
mod uffd;

pub use control_block::ControlBlock;
pub use event::EventFd;
pub use futex::{futex_wait, futex_wake};
pub use own_memory::OwnMemory;
pub use pagemap::present_ranges;
pub use poll::{Polled, Poller, poll_readable};
pub use process::{
    Mapping, MappingFlags, Pidfd, Presence, ReadOutcome, anonymous_rss, available_bytes,
    page_presence, read_mapping_flags, read_maps, read_process, thread_cpu, total_bytes, trim_heap,
};
pub use sched::{current_cpu, pin_current_thread, set_thread_name, yield_to_others};
pub use shared_memory::{SharedMemory, punch_hole};
pub use socket::{SeqPacket, SeqPacketListener};
pub use supervise::{
    Signal, WorkerExit, adopt_fd, block_signals, close_fd, close_inherited_fds,
    is_living_userfaultfd, kill_process, lock_memory, open_fds, raise_descriptor_limit,
    spawn_sharing_files, wait_for_signal, wait_worker,
};
pub use uffd::{
    Event, FEATURES_REQUIRED, Fill, Range, Registration, UffdError, Userfaultfd, open_device,
};
