//! The kernel, made safe: userfaultfd, futexes, memory files, process memory,
//! descriptor passing.
//!
//! `unsafe` lives here (and in the library inside the program) and nowhere
//! else: this crate exists to hold it. Every call answers with an outcome that
//! says what happened; no other crate looks at an errno.
#![allow(unsafe_code, reason = "this crate wraps system calls; each block says why it holds")]

mod answer;
mod control_block;
mod damon;
mod descriptors;
mod directory;
mod event;
mod file;
mod futex;
mod handle;
mod helpers;
mod image;
mod images;
mod kin;
mod large_buffer;
mod launch;
mod log;
mod mapped_file;
mod merged;
mod numa;
mod own_memory;
mod pagemap;
pub mod peer;
mod perf;
mod placement;
mod poll;
mod private_memory;
pub mod probe;
mod process;
mod program_pool;
mod proof;
mod read_queue;
mod relay;
mod sched;
mod secrets;
mod service;
mod shared_memory;
mod smaps;
mod socket;
mod spawn;
mod supervise;
mod tcp_diag;
mod uffd;
mod unix_diag;
mod urgent;
mod words;

pub use answer::{IoctlCall, IoctlListener};
pub use control_block::ControlBlock;
pub use damon::{
    DAMON_PERIOD, DAMON_RANGES, DAMON_SAMPLES, Damon, DamonOwner, DamonRange, DamonRefusal,
};
pub use descriptors::{
    OpenThere, copy_descriptor, descriptors_of, has_open, move_above, put_at, shares_descriptors,
    sharing_descriptors_with,
};
pub use directory::{Access, Directory, open_plain_file, who_may_replace};
pub use event::{EventFd, alarm_when_charged};
pub use file::{OPEN_NO_LINK, file_system_bytes, file_system_free_bytes, try_lock, try_share_lock};
pub use futex::{futex_wait, futex_wake};
pub use handle::{PROCESS_FDS, Process};
pub use helpers::Helpers;
pub use image::{Allocation, FileStamp, ImageFile, page_bytes, page_bytes_mut};
pub use images::{copy_sparse, exchange, is_locked, reflink};
pub use kin::{all_processes, children_of, processes_with_thread};
pub use large_buffer::{LARGE_BUFFER_BYTES, LargeBuffer};
pub use launch::{Launch, Running};
pub use log::{Priority, log};
pub use mapped_file::{MappedFile, MappingKind};
pub use merged::{MergedMemory, kernel_has_merged_pages};
pub use numa::{
    MOST_NODES, MemoryNode, NodeRefusal, PagePlace, divide_huge_pages, find_pages, home_of,
    memory_node, memory_nodes, move_pages,
};
pub use own_memory::OwnMemory;
pub use perf::idle_task_event;
pub use placement::{MappedMemory, PlacementError, advise_memory, memory_tiers, placement_reason};
pub use poll::{PollSet, Polled, Poller, poll_all, poll_readable};
pub use private_memory::{HUGE_BYTES, PrivateMemory};
pub use process::{
    Mapping, MappingFlags, Pidfd, Presence, ReadOutcome, SIGCONT, SIGHUP, SIGKILL, SIGSTOP,
    SIGTERM, SIGUSR1, SIGUSR2, ThreadFaults, available_bytes, is_zombie, keep_little_heap, note_of,
    noted, parent_of, process_exists, read_maps, stat_field, stat_fields, total_bytes, trim_heap,
};
pub use program_pool::ProgramPool;
pub use proof::Disproof;
pub use read_queue::{READ_BYTES, ReadId, ReadQueue};
pub use relay::{Relay, Relayed, end_like};
pub use sched::{
    Cpus, WorkClock, current_cpu, idle_time, pin_current_thread, set_thread_name, thread_id,
    thread_time, wake_in_time, yield_to_others,
};
pub use secrets::{forbid_core_dumps, give_core_filter};
pub use service::{HandedSockets, Listening, Notifier, monotonic_us, take_from_service_manager};
pub use shared_memory::{SharedMemory, punch_hole};
pub use smaps::MappingUse;
pub use socket::{
    SeqPacket, SeqPacketListener, connect_now, connect_within, receive_with_fds, send_now,
    send_with_fds,
};
pub use spawn::{
    Ended, Own, bind_mount, enter_namespaces_of, enter_network_of, own_session, own_session_now,
    prepare_child, raise_loopback, unshare, wait_any_child,
};
pub use supervise::{
    Signal, WorkerExit, adopt_fd, adopt_orphans, block_signals, close_fd, close_inherited_fds,
    collect_child, ended_children, forget_collected, is_living_userfaultfd, kill_process,
    lock_memory, open_fds, raise_descriptor_limit, spawn_sharing_files, spawn_with_own_files,
    status_of_collected, wait_for_signal, wait_worker,
};
pub use tcp_diag::abort_connection;
pub use uffd::messages::Event;
pub use uffd::{FEATURES_REQUIRED, Fill, Range, Registration, UffdError, Userfaultfd, open_device};
pub use unix_diag::{UnixConnection, unix_connections};
pub use urgent::Urgent;
