//! Carrying out the daemon's commands, as `wire::Control` documents them.
//!
//! Everything here touches only the control block and the agent's stack.

use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::PAGE_SIZE;
use strata_units::wire::{
    BATCH_PAGES, Command, Control, Entry, READER_AWAITED, READER_BUSY, RESULT_CANCELLED,
    RESULT_PENDING, TRANSFER_PAGES,
};

use crate::block::TRANSFER_BYTES;
use crate::kernel::{self, Fd};

/// How often to see whether the daemon that keeps us waiting still lives.
const LIVENESS: Duration = Duration::from_secs(1);

/// Pages moved by one call: the daemon's fault handler may wait for it.
const MOST_AT_ONCE: usize = 8;

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// It is done.
    Done,
    /// The daemon is gone; entries without a result stay so.
    Interrupted,
    /// It said to leave.
    Leave,
    /// It said to park.
    Park,
}

/// Carries out the command that stands in `control`. `transfer` is the first
/// byte of the transfer range; `daemon_gone` is asked when the daemon keeps us
/// waiting.
pub(crate) fn execute(
    control: &Control,
    userfaultfd: &Fd,
    transfer: u64,
    daemon_gone: impl Fn() -> bool,
) -> Progress {
    let command = control.command.load(Ordering::Relaxed);
    let count = control.count.load(Ordering::Relaxed) as usize;
    let first_slot = control.first_slot.load(Ordering::Relaxed) as usize;
    if command == Command::Leave as u32 {
        return Progress::Leave;
    }
    if command == Command::Park as u32 {
        return Progress::Park;
    }
    if command == Command::Continue as u32 {
        return Progress::Done;
    }
    if command == Command::Discard as u32 {
        discard(userfaultfd, transfer, first_slot, count);
        return Progress::Done;
    }
    let entries = &control.entries[..count.min(BATCH_PAGES)];
    let mut at = 0;
    while let Some(entry) = entries.get(at) {
        at += if entry.result.load(Ordering::Relaxed) != RESULT_PENDING {
            // A command that was interrupted is carried out again.
            1
        } else if command == Command::Move as u32 {
            let slot = first_slot.saturating_add(at);
            let run = &entries[at..at + run_length(&entries[at..])];
            match move_run(control, userfaultfd, run, transfer, slot, &daemon_gone) {
                Some(done) => done,
                None => return Progress::Interrupted,
            }
        } else {
            let populates = command == Command::Populate as u32;
            let result = if populates { populate(entry) } else { -libc::ENOSYS };
            entry.result.store(result, Ordering::Release);
            1
        };
    }
    Progress::Done
}

/// How many of the first of `entries` are to be moved and lie one behind the
/// other: at least one, at most [`MOST_AT_ONCE`].
fn run_length(entries: &[Entry]) -> usize {
    let address = |entry: &Entry| entry.address.load(Ordering::Relaxed);
    let follows = |pair: &[Entry]| {
        pair[1].result.load(Ordering::Relaxed) == RESULT_PENDING
            && address(&pair[1]) == address(&pair[0]).wrapping_add(PAGE_SIZE as u64)
    };
    let at_once = &entries[..entries.len().min(MOST_AT_ONCE)];
    1 + at_once.windows(2).take_while(|pair| follows(pair)).count()
}

/// Moves pages that lie one behind the other to as many slots from `slot` on,
/// unless the daemon is taking messages just now or knows more than when it made
/// the batch. Returns how many of them have their results now, at least one.
/// None: it is gone.
///
/// Together, because the kernel interrupts the program's other cores once for
/// all of them (Linux 6.18; `UFFDIO_MOVE` of one page costs mostly that).
fn move_run(
    control: &Control,
    userfaultfd: &Fd,
    run: &[Entry],
    transfer: u64,
    slot: usize,
    daemon_gone: &impl Fn() -> bool,
) -> Option<usize> {
    let first = run.first()?;
    let free = TRANSFER_PAGES.saturating_sub(slot);
    if free == 0 {
        first.result.store(-libc::EINVAL, Ordering::Release);
        return Some(1);
    }
    let run = &run[..run.len().min(free)];
    let source = first.address.load(Ordering::Relaxed);
    let destination = transfer + (slot * PAGE_SIZE) as u64;
    if !enter(control, daemon_gone) {
        return None;
    }
    let current = control.epoch.load(Ordering::SeqCst)
        == control.batch_epoch.load(Ordering::Relaxed)
        && control.thread_seq.load(Ordering::SeqCst)
            == control.batch_thread_seq.load(Ordering::Relaxed);
    let (moved, error) = if current {
        // SAFETY: pages of the transfer range; the daemon, which alone writes
        // commands, answers faults on what it has moved, and no range changed
        // since it chose the pages.
        let move_first =
            |pages| unsafe { kernel::move_pages(userfaultfd, source, destination, pages) };
        match move_first(run.len()) {
            // What is wrong may be wrong with another of them, or with moving
            // them together: two mappings, perhaps.
            (0, _) if run.len() > 1 => move_first(1),
            outcome => outcome,
        }
    } else {
        (0, RESULT_CANCELLED)
    };
    leave(control);
    for entry in &run[..moved] {
        entry.result.store(0, Ordering::Release);
    }
    if moved > 0 {
        // Whatever stopped it there is found again, and said of that page.
        return Some(moved);
    }
    first.result.store(error, Ordering::Release);
    Some(1)
}

/// Dekker's entry: afterwards the daemon takes no messages until [`leave`].
/// False: the daemon is gone.
fn enter(control: &Control, daemon_gone: &impl Fn() -> bool) -> bool {
    loop {
        control.mover_busy.store(1, Ordering::SeqCst);
        if control.reader_busy.load(Ordering::SeqCst) == 0 {
            return true;
        }
        control.mover_busy.store(0, Ordering::SeqCst);
        kernel::futex_wake(&control.mover_busy);
        let awaited = control.reader_busy.compare_exchange(
            READER_BUSY,
            READER_AWAITED,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
        // It has just finished.
        if awaited == Err(0) {
            continue;
        }
        let timely = kernel::futex_wait(&control.reader_busy, READER_AWAITED, LIVENESS);
        if !timely && daemon_gone() {
            return false;
        }
    }
}

fn leave(control: &Control) {
    control.mover_busy.store(0, Ordering::SeqCst);
    if control.reader_busy.load(Ordering::SeqCst) != 0 {
        kernel::futex_wake(&control.mover_busy);
    }
}

/// Drops transfer slots, in memory that is not registered meanwhile: of what is
/// dropped in registered memory the kernel tells the daemon, and no page is put
/// anywhere until that has listened and this thread has run again.
///
/// Nobody takes a dropped page's zeroes for content: the daemon reads slots only
/// between commands, and after one whose end it did not see it looks first which
/// pages are there.
fn discard(userfaultfd: &Fd, transfer: u64, first_slot: usize, count: usize) {
    let first = first_slot.min(TRANSFER_PAGES);
    let bytes = count.min(TRANSFER_PAGES - first) * PAGE_SIZE;
    let address = transfer + (first * PAGE_SIZE) as u64;
    // SAFETY: slots of the transfer range, whose content the daemon has taken
    // before it gave this command.
    let drop_slots = || unsafe { kernel::advise(address, bytes, libc::MADV_DONTNEED) };
    let unregistered = kernel::unregister(userfaultfd, transfer, TRANSFER_BYTES);
    if drop_slots() == -libc::EINVAL && kernel::unlock(transfer, TRANSFER_BYTES) {
        // The program has called `mlockall`, which covers the transfer range
        // too. Unlocked, it takes no more of the program's locked pages: MOVE
        // wants both sides alike.
        drop_slots();
    }
    if unregistered {
        // Without memory for it nothing is moved there until the daemon does it,
        // as whenever it looks at the process's mappings.
        kernel::register(userfaultfd, transfer, TRANSFER_BYTES);
    }
}

/// Breaks copy-on-write sharing of one page.
fn populate(entry: &Entry) -> i32 {
    let address = entry.address.load(Ordering::Relaxed);
    // SAFETY: populating writes no content.
    unsafe { kernel::advise(address, PAGE_SIZE, libc::MADV_POPULATE_WRITE) }
}
