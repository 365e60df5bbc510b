//! What reads bytes that strangers wrote, one function each: whatever the bytes are, it
//! returns. Not a panic, not a read out of bounds, not memory without end.
//!
//! `scripts/fuzz.sh` builds them with coverage for libFuzzer and lets them run for as
//! long as one likes; `tests/replay.rs` runs each on what was kept of that (`corpus/`),
//! and on changes of it, as an ordinary test. What a fuzzer finds is kept there.
#![forbid(unsafe_code)]

mod agents;
mod balloons;
mod guests;
mod monitor;
mod recovery;
mod snapshots;

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

use strata_api::{Reply, Request, name_problem};
use strata_pager::Registry;
use strata_sys::SharedMemory;
use strata_units::wire::{self, AsBytes};
use strata_units::{HintKind, Hints};

pub use agents::{block, handshake};
pub use balloons::reading;
pub use guests::{nbd, pool};
pub use monitor::monitor;
pub use recovery::{pages, store, tier};
pub use snapshots::{archive, claims};

/// A target by its name.
pub type Target = fn(&[u8]);

/// All of them, by the names of their directories in `corpus/`.
pub const TARGETS: [(&str, Target); 14] = [
    ("control", control),
    ("agent", agent),
    ("handshake", handshake),
    ("block", block),
    ("archive", archive),
    ("claims", claims),
    ("store", store),
    ("tier", tier),
    ("pages", pages),
    ("registry", registry),
    ("monitor", monitor),
    ("nbd", nbd),
    ("pool", pool),
    ("reading", reading),
];

/// A line on the control socket; what a daemon answers, as the command line reads it.
pub fn control(data: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<Request>(data) {
        let _ = (request.snapshot_problem(), request.curve_problem());
        let _ = (request.is_about_the_caller(), request.shows_progress());
        let line = serde_json::to_vec(&request).expect("what was read can be written");
        let again: Request = serde_json::from_slice(&line).expect("and read again");
        assert_eq!(request, again);
    }
    if let Ok(reply) = serde_json::from_slice::<Reply>(data) {
        assert!(serde_json::to_vec(&reply).is_ok());
    }
    if let Ok(name) = std::str::from_utf8(data)
        && name_problem(name).is_none()
    {
        assert!(!name.contains('/') && !name.is_empty() && name.len() <= 64);
    }
}

/// What an agent sends, and what it leaves in the control block.
pub fn agent(data: &[u8]) {
    let hello = wire::Hello::from_bytes(data);
    assert_eq!(hello.is_some(), data.len() == size_of::<wire::Hello>());
    if let Some(heard) = wire::Hello::heard(data) {
        let before = wire::HelloBefore::from(heard).to_bytes();
        assert!(heard.to_bytes() == data || (before == data && heard.library == 0));
    }
    let _ = (wire::Userfaultfd::from_bytes(data), wire::Ready::from_bytes(data));
    let _ = wire::Welcome::from_bytes(data);
    // A page of a process that is to be restored, and where it is to call.
    if let Some((path, page)) = data.split_at_checked(16) {
        let mut whole = vec![0; strata_units::PAGE_SIZE];
        let len = page.len().min(whole.len());
        whole[..len].copy_from_slice(&page[..len]);
        let before = whole.clone();
        let patched = wire::restart::patch_restart(&mut whole, 7, Some(path));
        assert!(patched.is_ok() || whole == before, "on an error the page is as it was");
    }
    // The ring of hints: the program writes all of it, at any time.
    let ring = Hints::default();
    for (index, words) in data.chunks_exact(25).enumerate() {
        let word = |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().expect("eight"));
        let slot = &ring.slots[(usize::from(words[0]) * 5 + index) % ring.slots.len()];
        let place: &AtomicU64 = match words[0] & 3 {
            0 => &ring.head,
            1 => &ring.tail,
            _ => &slot.turn,
        };
        place.store(word(1), Ordering::Relaxed);
        slot.start.store(word(9), Ordering::Relaxed);
        slot.end_kind.store(word(17), Ordering::Relaxed);
        if let Some((_, end_kind)) = ring.take() {
            let _ = HintKind::of(end_kind & 0xfff);
        }
        let _ = ring.push(word(9), word(17));
    }
    for _ in 0..2 * ring.slots.len() {
        let _ = ring.take();
    }
}

/// The registry that a worker finds, whatever the one before it left there: pieces of
/// eight bytes behind the numbers of the words that they are written to.
pub fn registry(data: &[u8]) {
    let registry = Registry::create().expect("a memory file");
    let descriptor = registry.descriptor().try_clone_to_owned().expect("a descriptor");
    let memory = SharedMemory::from_fd(descriptor).expect("the same file");
    for piece in data.chunks(12) {
        let Some((at, bytes)) = piece.split_at_checked(4) else { break };
        let at = u64::from(u32::from_le_bytes(at.try_into().expect("four bytes"))) * 4;
        // Most of it lies behind what records are in.
        let at = at % (memory.len_bytes() - 8);
        memory.write(at, bytes);
    }
    for (_, record) in registry.tenants() {
        assert!(!format!("{record:?}").is_empty());
    }
    let _ = registry.claimed_fds();
    assert!(registry.descriptor().as_fd().try_clone_to_owned().is_ok());
}
