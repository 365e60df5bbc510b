//! What the daemon must know of threads and mutexes, in the control block.
//!
//! A record may be made while there is no control block yet or while the agent
//! exchanges it for another one after a reconnect. Both sides therefore do as
//! in Dekker's algorithm: the recorder writes, then looks again which control
//! block is in use; the agent puts the new one in use, then copies what the old
//! one had.

use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::PAGE_SIZE;
use strata_units::wire::{Control, ThreadSlot, thread_slot};

use crate::block::Block;
use crate::kernel;

/// Looks at the mover before sleeping on it: one `MOVE` takes about a
/// microsecond.
const SPINS: u32 = 100;
/// Longest sleep on the mover; it wakes only those whom the daemon keeps away.
const NAP: Duration = Duration::from_millis(1);
/// Address bits in which a record of a mutex is no address: set for the page of
/// a mutex's last byte.
const LAST_PAGE: u64 = 1;

/// Records the calling thread, with `stack`, an address on its stack (0: the
/// main thread's, which the kernel names). Returns after the agent can no
/// longer be moving any of the thread's pages on older knowledge.
pub(crate) fn record_thread(block: &Block, stack: u64) {
    // SAFETY: no arguments, cannot fail.
    let control_block = unsafe { libc::pthread_self() } as u64;
    let tid = kernel::thread_id();
    let shared = block.shared();
    loop {
        let used = block.control();
        if let Some(control) = used {
            if !insert(&control.threads, control_block, stack, tid) {
                control.thread_overflow.store(1, Ordering::SeqCst);
            }
            announce(control);
        } else if !insert(&shared.early, control_block, stack, tid) {
            shared.early_overflow.store(1, Ordering::SeqCst);
        }
        if still_used(block, used) {
            break;
        }
    }
    touch(control_block);
}

/// Records a priority-inheriting mutex of `length_bytes` at `address`.
pub(crate) fn record_mutex(block: &Block, address: u64, length_bytes: usize) {
    pin(block, address);
    let last = address + length_bytes as u64 - 1;
    if page_of(last) != page_of(address) {
        pin(block, address | LAST_PAGE);
    }
}

/// Forgets what `record_mutex` recorded for this address.
pub(crate) fn forget_mutex(block: &Block, address: u64) {
    if block.mutex_count.load(Ordering::Relaxed) == 0 {
        return;
    }
    for (i, mutex) in block.mutexes.iter().enumerate() {
        let recorded = mutex.load(Ordering::Relaxed);
        if recorded != 0 && recorded & !LAST_PAGE == address {
            // First there, then here: once it is free here, another mutex may
            // take the slot and write its page there.
            if let Some(page) = block.control().and_then(|control| control.pinned.get(i)) {
                page.store(0, Ordering::SeqCst);
            }
            mutex.store(0, Ordering::Release);
            block.mutex_count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn pin(block: &Block, record: u64) {
    let count = block.mutexes.len();
    let first = (record >> 4) as usize % count;
    for i in (0..count).map(|i| (first + i) % count) {
        let Some(mutex) = block.mutexes.get(i) else { continue };
        if mutex.compare_exchange(0, record, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            continue;
        }
        block.mutex_count.fetch_add(1, Ordering::Relaxed);
        loop {
            let used = block.control();
            if let Some(control) = used {
                if let Some(page) = control.pinned.get(i) {
                    page.store(pinned_page(record), Ordering::SeqCst);
                }
                control.pinned_seq.fetch_add(1, Ordering::SeqCst);
                announce(control);
            }
            if still_used(block, used) {
                break;
            }
        }
        touch(pinned_address(record));
        return;
    }
    // No slot is left: lock the page, which MOVE refuses. If even that fails
    // (RLIMIT_MEMLOCK), the limit that `docs/agent.md` states is reached.
    kernel::lock_page(pinned_page(record));
}

/// Puts `control`, fresh from the daemon, in use and brings it up to date.
pub(crate) fn publish(block: &Block, control: &'static Control) {
    let shared = block.shared();
    let old = block.control();
    shared.control.store(core::ptr::from_ref(control).cast_mut(), Ordering::SeqCst);
    if shared.early_overflow.load(Ordering::SeqCst) != 0
        || old.is_some_and(|old| old.thread_overflow.load(Ordering::SeqCst) != 0)
    {
        control.thread_overflow.store(1, Ordering::SeqCst);
    }
    copy(&shared.early, control);
    if let Some(old) = old {
        copy(&old.threads, control);
    }
    for (mutex, page) in block.mutexes.iter().zip(&control.pinned) {
        let record = mutex.load(Ordering::SeqCst);
        if record != 0 {
            page.store(pinned_page(record), Ordering::SeqCst);
        }
    }
    control.pinned_seq.fetch_add(1, Ordering::SeqCst);
    control.thread_seq.fetch_add(1, Ordering::SeqCst);
}

/// Copies records without overwriting what a thread itself writes meanwhile.
fn copy(from: &[ThreadSlot], control: &Control) {
    for slot in from {
        let control_block = slot.control_block.load(Ordering::SeqCst);
        if control_block == 0 {
            continue;
        }
        let Some(to) = claim(&control.threads, control_block) else {
            control.thread_overflow.store(1, Ordering::SeqCst);
            continue;
        };
        let stack = slot.stack.load(Ordering::SeqCst);
        let tid = slot.tid.load(Ordering::SeqCst);
        // The thread's own, unconditional stores win in either order.
        let _ = to.stack.compare_exchange(0, stack, Ordering::SeqCst, Ordering::Relaxed);
        let _ = to.tid.compare_exchange(0, tid, Ordering::SeqCst, Ordering::Relaxed);
    }
}

/// Fills the slot of `control_block`; false: the table is full.
fn insert(table: &[ThreadSlot], control_block: u64, stack: u64, tid: u32) -> bool {
    let Some(slot) = claim(table, control_block) else { return false };
    slot.stack.store(stack, Ordering::SeqCst);
    slot.tid.store(tid, Ordering::SeqCst);
    true
}

/// The slot of `control_block`, taken if it has none: glibc gives a new thread
/// the stack, and with it the control block, of one that has ended.
fn claim(table: &[ThreadSlot], control_block: u64) -> Option<&ThreadSlot> {
    let first = thread_slot(control_block) % table.len();
    let (before, from) = table.split_at_checked(first)?;
    from.iter().chain(before).find(|slot| {
        match slot.control_block.compare_exchange(
            0,
            control_block,
            Ordering::SeqCst,
            Ordering::SeqCst,
        ) {
            Ok(_) => true,
            Err(holder) => holder == control_block,
        }
    })
}

/// Makes batches that were built without the new record stop, and waits out
/// the page that is being moved now.
fn announce(control: &Control) {
    control.thread_seq.fetch_add(1, Ordering::SeqCst);
    for _ in 0..SPINS {
        if control.mover_busy.load(Ordering::SeqCst) == 0 {
            return;
        }
        core::hint::spin_loop();
    }
    while control.mover_busy.load(Ordering::SeqCst) != 0 {
        kernel::futex_wait(&control.mover_busy, 1, NAP);
    }
}

fn still_used(block: &Block, used: Option<&Control>) -> bool {
    block.control().map(core::ptr::from_ref) == used.map(core::ptr::from_ref)
}

/// Brings the page back if it was just moved away.
fn touch(address: u64) {
    // SAFETY: the caller's own thread control block or mutex: mapped, readable.
    unsafe { core::ptr::with_exposed_provenance::<u8>(address as usize).read_volatile() };
}

fn page_of(address: u64) -> u64 {
    address & !(PAGE_SIZE as u64 - 1)
}

/// The page that a mutex record stands for.
fn pinned_page(record: u64) -> u64 {
    page_of(pinned_address(record))
}

/// An address of the mutex in that page.
fn pinned_address(record: u64) -> u64 {
    if record & LAST_PAGE == 0 { record } else { page_of(record) + PAGE_SIZE as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU32, AtomicU64};

    fn table(slots: usize) -> Vec<ThreadSlot> {
        (0..slots)
            .map(|_| ThreadSlot {
                control_block: AtomicU64::new(0),
                stack: AtomicU64::new(0),
                tid: AtomicU32::new(0),
                reserved: AtomicU32::new(0),
            })
            .collect()
    }

    #[test]
    fn every_slot_is_used_before_the_table_is_full() {
        let table = table(8);
        for thread in 1..=8_u64 {
            assert!(insert(&table, thread << 12, thread, thread as u32));
        }
        assert!(!insert(&table, 9 << 12, 9, 9));
        for thread in 1..=8_u64 {
            let slot = claim(&table, thread << 12).expect("recorded above");
            assert_eq!(slot.stack.load(Ordering::Relaxed), thread);
        }
    }

    #[test]
    fn a_reused_control_block_keeps_its_slot() {
        let table = table(4);
        assert!(insert(&table, 0x7000, 1, 1));
        assert!(insert(&table, 0x7000, 2, 2));
        let used: Vec<_> =
            table.iter().filter(|s| s.control_block.load(Ordering::Relaxed) != 0).collect();
        assert_eq!(used.len(), 1);
        assert_eq!(used[0].tid.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_mutex_across_two_pages_pins_both() {
        assert_eq!(pinned_page(0x5008), 0x5000);
        let straddling = 0x5ff0_u64;
        assert_eq!(pinned_page(straddling), 0x5000);
        assert_eq!(pinned_page(straddling | LAST_PAGE), 0x6000);
        assert_eq!(pinned_address(straddling | LAST_PAGE), 0x6000);
    }
}
