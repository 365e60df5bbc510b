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

use crate::kernel::{self, Fd};

/// How often to see whether the daemon that keeps us waiting still lives.
const LIVENESS: Duration = Duration::from_secs(1);

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// It is done.
    Done,
    /// The daemon is gone; entries without a result stay so.
    Interrupted,
    /// It said to leave.
    Leave,
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
    if command == Command::Discard as u32 {
        discard(transfer, first_slot, count);
        return Progress::Done;
    }
    for (i, entry) in control.entries.iter().enumerate().take(count.min(BATCH_PAGES)) {
        // A command that was interrupted is carried out again.
        if entry.result.load(Ordering::Relaxed) != RESULT_PENDING {
            continue;
        }
        let result = if command == Command::Move as u32 {
            let slot = first_slot.saturating_add(i);
            match move_one(control, userfaultfd, entry, transfer, slot, &daemon_gone) {
                Some(result) => result,
                None => return Progress::Interrupted,
            }
        } else if command == Command::Populate as u32 {
            populate(entry)
        } else {
            -libc::ENOSYS
        };
        entry.result.store(result, Ordering::Release);
    }
    Progress::Done
}

/// Moves one page, unless the daemon is taking messages just now or knows more
/// than when it made the batch. None: it is gone.
fn move_one(
    control: &Control,
    userfaultfd: &Fd,
    entry: &Entry,
    transfer: u64,
    slot: usize,
    daemon_gone: &impl Fn() -> bool,
) -> Option<i32> {
    if slot >= TRANSFER_PAGES {
        return Some(-libc::EINVAL);
    }
    let destination = transfer + (slot * PAGE_SIZE) as u64;
    if !enter(control, daemon_gone) {
        return None;
    }
    let current = control.epoch.load(Ordering::SeqCst)
        == control.batch_epoch.load(Ordering::Relaxed)
        && control.thread_seq.load(Ordering::SeqCst)
            == control.batch_thread_seq.load(Ordering::Relaxed);
    let result = if current {
        // SAFETY: a page of the transfer range; the daemon, which alone writes
        // commands, answers faults on what it has moved, and no range changed
        // since it chose the page.
        unsafe {
            kernel::move_page(userfaultfd, entry.address.load(Ordering::Relaxed), destination)
        }
    } else {
        RESULT_CANCELLED
    };
    leave(control);
    Some(result)
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

/// Drops transfer slots.
fn discard(transfer: u64, first_slot: usize, count: usize) {
    let first = first_slot.min(TRANSFER_PAGES);
    let bytes = count.min(TRANSFER_PAGES - first) * PAGE_SIZE;
    let address = transfer + (first * PAGE_SIZE) as u64;
    // SAFETY: slots of the transfer range, whose content the daemon has taken
    // before it gave this command.
    let drop_slots = || unsafe { kernel::advise(address, bytes, libc::MADV_DONTNEED) };
    if drop_slots() == -libc::EINVAL && kernel::unlock(transfer, TRANSFER_PAGES * PAGE_SIZE) {
        // The program has called `mlockall`, which covers the transfer range
        // too. Unlocked, it takes no more of the program's locked pages: MOVE
        // wants both sides alike.
        drop_slots();
    }
}

/// Breaks copy-on-write sharing of one page.
fn populate(entry: &Entry) -> i32 {
    let address = entry.address.load(Ordering::Relaxed);
    // SAFETY: populating writes no content.
    unsafe { kernel::advise(address, PAGE_SIZE, libc::MADV_POPULATE_WRITE) }
}
