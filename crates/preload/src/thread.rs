//! A thread that only the kernel knows, made by `clone` itself.
//!
//! A thread that the C library makes counts for it: from then on the program is
//! one with several threads, whose stdio takes locks, whose reference counts are
//! atomic, and whose changes of user are carried out on that thread too. The
//! agent is none of the program's business. It shares memory and signal actions
//! with the program, and is in the same process; it has its own table of
//! descriptors, its own root and working directory, and every signal blocked.
//! Nothing that the C library or the loader sets up for a thread is there:
//! neither its list of threads nor its thread-local storage, for which there is
//! a block of zeroes, so that whatever reads it meets nobody else's.
//!
//! There are two *seats*, each with a stack: an agent that follows another one
//! (`succession`) begins before that one has ended.

use core::sync::atomic::Ordering;
use core::time::Duration;

use libc::{c_int, c_long};

use crate::block::Block;
use crate::kernel::{self, Deadline};

/// Agents that may live at a time.
pub(crate) const SEATS: usize = 2;
/// Stack for the agent's own frames, the deepest of which is under 4 KiB in a
/// release build. No signal handler runs there.
const STACK_BYTES: usize = 56 << 10;
/// Thread-local storage that nobody uses: as much on either side of the thread
/// pointer, since the architectures do not agree on which is whose.
const LOCAL_BYTES: usize = 8 << 10;
/// Bytes of a seat: the stack, and at its upper end the storage.
pub(crate) const SEAT_BYTES: usize = STACK_BYTES + LOCAL_BYTES;
/// How often a thread looks that waits for another one's end.
const NAP: Duration = Duration::from_millis(10);

/// Memory and signal actions are the program's, since a thread's must be.
/// Descriptors, root and working directory are copies.
const SHARED_WITH_PROGRAM: c_int =
    libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;

/// What a thread runs; it must not return before it has closed what it holds.
pub(crate) type Entry = extern "C" fn(&'static Block);

/// Starts a thread in a free seat; false: the kernel makes none.
///
/// # Safety
/// No thread may sit there: [`is_free`].
pub(crate) unsafe fn start(block: &'static Block, seat: usize, entry: Entry) -> bool {
    let Some(tid) = block.shared().tids.get(seat) else { return false };
    let bottom = block.seat(seat);
    let stack = bottom + STACK_BYTES as u64;
    let local = stack + (LOCAL_BYTES / 2) as u64;
    let flags = SHARED_WITH_PROGRAM
        | libc::CLONE_SETTLS
        | libc::CLONE_PARENT_SETTID
        | libc::CLONE_CHILD_CLEARTID;
    let before = kernel::block_signals();
    // SAFETY: the seat's memory is mapped for ever and used by no other thread,
    // says the caller. Its storage begins with its own address, as the ABI of
    // x86-64 wants it; elsewhere that is a word like any other. The thread id's
    // word is atomic, and lives as long.
    let made = unsafe {
        (local as *mut u64).write(local);
        (local as *mut u64).add(2).write(local);
        clone_thread(word(flags), stack, tid.as_ptr(), local, entry, block)
    };
    kernel::restore_signals(before);
    made > 0
}

/// Is nobody sitting there?
pub(crate) fn is_free(block: &Block, seat: usize) -> bool {
    block.shared().tids.get(seat).is_some_and(|tid| tid.load(Ordering::SeqCst) == 0)
}

/// Waits until a seat is free: the kernel takes the number back when the thread
/// there has ended. False: not in that time.
pub(crate) fn wait_free(block: &Block, seat: usize, time: Duration) -> bool {
    let Some(tid) = block.shared().tids.get(seat) else { return false };
    let deadline = Deadline::after(time);
    loop {
        let sitting = tid.load(Ordering::SeqCst);
        if sitting == 0 {
            return true;
        }
        let Some(left) = deadline.left() else { return false };
        kernel::futex_wait(tid, sitting, left.min(NAP));
    }
}

/// A new agent's first steps: nothing of the program's is held, and nothing may
/// be done in its name.
pub(crate) fn settle_in() -> Result<(), c_int> {
    kernel::own_empty_descriptor_table()?;
    kernel::leave_directory();
    kernel::drop_capabilities();
    kernel::name_thread(c"strata-agent");
    Ok(())
}

fn word(flags: c_int) -> u64 {
    u64::from(flags.cast_unsigned())
}

/// `clone`, and in the new thread `entry(block)` and the thread's end. Returns
/// the thread's id or a negative errno, in the caller only.
///
/// # Safety
/// `stack` and `local` must be memory of the new thread's alone, `tid` must live
/// as long as it.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn clone_thread(
    flags: u64,
    stack: u64,
    tid: *mut u32,
    local: u64,
    entry: Entry,
    block: &'static Block,
) -> c_long {
    core::arch::naked_asm!(
        // The new thread finds its routine and its argument on its stack.
        "sub rsi, 16",
        "mov [rsi], r8",
        "mov [rsi + 8], r9",
        // The kernel wants: flags, stack, tid, tid to clear, storage.
        "mov r10, rdx",
        "mov r8, rcx",
        "mov eax, {clone}",
        "syscall",
        "test rax, rax",
        "jnz 2f",
        "xor ebp, ebp",
        "pop rax",
        "pop rdi",
        "call rax",
        "xor edi, edi",
        "mov eax, {exit}",
        "syscall",
        "ud2",
        "2:",
        "ret",
        clone = const libc::SYS_clone,
        exit = const libc::SYS_exit,
    )
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn clone_thread(
    flags: u64,
    stack: u64,
    tid: *mut u32,
    local: u64,
    entry: Entry,
    block: &'static Block,
) -> c_long {
    core::arch::naked_asm!(
        "stp x4, x5, [x1, #-16]!",
        // The kernel wants: flags, stack, tid, storage, tid to clear.
        "mov x4, x2",
        "mov x8, #{clone}",
        "svc #0",
        "cbnz x0, 2f",
        "mov x29, #0",
        "mov x30, #0",
        "ldp x9, x0, [sp], #16",
        "blr x9",
        "mov x0, #0",
        "mov x8, #{exit}",
        "svc #0",
        "brk #1",
        "2:",
        "ret",
        clone = const libc::SYS_clone,
        exit = const libc::SYS_exit,
    )
}
