//! `MADV_GUARD_INSTALL` (Linux 6.13): the kernel drops a range's content and tells
//! no userfaultfd of it. So whoever holds that content is told here, by a discard.
//!
//! Everything that reaches the kernel through the C library comes by: `madvise`,
//! `process_madvise`, and `syscall` with the number of either. What a program does
//! with system calls of its own is in `docs/lost-content.md`.

use core::ffi::{c_int, c_long, c_void};

use strata_units::PAGE;

use crate::kernel::{self, word};
use crate::next::Next;
use crate::start;
use crate::syscall::call;

const MADV_GUARD_INSTALL: c_int = 102;
/// UIO_MAXIOV: of more ranges the kernel advises none.
const MOST_RANGES: usize = 1024;

static SYSCALL: Next = Next::new(c"syscall");

/// Looks up now what a thread might otherwise look up while it holds a lock that
/// whoever loads a library waits for.
pub(crate) fn prepare() {
    SYSCALL.address();
}

/// Linux's function, but guards are made known. The system call itself: allocators come
/// by with their locks held, which is no place to look up who else has the name.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn madvise(
    address: *mut c_void,
    length: usize,
    advice: c_int,
) -> c_int {
    let address = address as u64;
    // SAFETY: the caller's own arguments.
    let result = unsafe {
        match advice {
            MADV_GUARD_INSTALL => install(address, length),
            _ => kernel::advise(address, length, advice),
        }
    };
    if result < 0 { fail(-result) } else { result }
}

/// Linux's function, but guards are made known. (Those of another process the kernel
/// refuses.)
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn process_madvise(
    process: c_int,
    ranges: *const libc::iovec,
    count: usize,
    advice: c_int,
    flags: libc::c_uint,
) -> isize {
    let arguments = [word(process), ranges as u64, count as u64, word(advice), u64::from(flags), 0];
    // SAFETY: the caller's own arguments.
    let result = unsafe { call(libc::SYS_process_madvise, arguments) };
    let done = result.unwrap_or(0);
    let was_read = flags == 0 && count <= MOST_RANGES && result != Err(libc::EFAULT);
    if advice == MADV_GUARD_INSTALL && was_read && (done > 0 || is_self(process)) {
        let mut left = done;
        for index in 0..count {
            // SAFETY: the kernel has read the vector, before it did anything else.
            let range = unsafe { ranges.add(index).read() };
            // SAFETY: what the caller has just had the kernel do; of the range that it
            // stopped at a part, perhaps, and it stops there again.
            unsafe { install(range.iov_base as u64, range.iov_len) };
            let Some(rest) = left.checked_sub(range.iov_len as u64) else { break };
            left = rest;
        }
    }
    match result {
        Ok(bytes) => bytes.cast_signed() as isize,
        Err(error) => fail(error) as isize,
    }
}

/// Whether a descriptor, or a number that stands for one, names this very process: else
/// nothing of ours was advised.
fn is_self(process: c_int) -> bool {
    let range = libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };
    // Refused for every other process, and does nothing to this one.
    let arguments = [word(process), &raw const range as u64, 1, word(libc::MADV_DONTNEED), 0, 0];
    // SAFETY: an empty range.
    unsafe { call(libc::SYS_process_madvise, arguments) }.is_ok()
}

/// Makes guards and tells of it: 0, or a negative errno as the kernel gives it.
///
/// # Safety
/// As for the advice: the range's content is lost.
unsafe fn install(start: u64, length: usize) -> i32 {
    // SAFETY: the caller vouches for the range.
    let result = unsafe { kernel::advise(start, length, MADV_GUARD_INSTALL) };
    let length = (length as u64).checked_next_multiple_of(PAGE).unwrap_or(0);
    let is_range = start.is_multiple_of(PAGE) && length > 0 && start.checked_add(length).is_some();
    // Nobody holds anything of an unmanaged program.
    if !is_range || start::is_off() {
        return result;
    }
    if result == 0 || is_whole_but_for_holes(result, start, length) {
        // SAFETY: all of it that is mapped was just made guards.
        unsafe { announce(start, length) };
        return result;
    }
    // The kernel goes through the mappings in order and stops at the first that it
    // refuses: what lies before that is guards now. Bit by bit, longest first.
    let pages = length / PAGE;
    let mut done = 0;
    let mut step = 1_u64 << (63 - pages.leading_zeros());
    while step > 0 {
        let (from, bytes) = (start + done * PAGE, step * PAGE);
        if done + step <= pages {
            // SAFETY: as above: it is in what the program wants to be guards, and in
            // the part that is guards already if this succeeds.
            let again = unsafe { kernel::advise(from, bytes as usize, MADV_GUARD_INSTALL) };
            if again == 0 || is_whole_but_for_holes(again, from, bytes) {
                // SAFETY: as above.
                unsafe { announce(from, bytes) };
                done += step;
            }
        }
        step /= 2;
    }
    result
}

/// Whether the only thing that was wrong with a range is that not all of it is mapped:
/// then all that is has been advised. (Else the kernel was short of memory.)
fn is_whole_but_for_holes(result: i32, start: u64, length: u64) -> bool {
    // Does nothing but to look for holes.
    let arguments = [start, length, word(libc::MS_ASYNC), 0, 0, 0];
    result == -libc::ENOMEM
        // SAFETY: changes nothing.
        && unsafe { call(libc::SYS_msync, arguments) } == Err(libc::ENOMEM)
}

/// Tells whoever holds what was in a range of guards that it is gone.
///
/// A discard leaves guards as they are, and has nothing else to discard. Between the
/// two a page that was on its way may have come, in the place of its guard: up to
/// Linux 6.18 at least, `UFFDIO_COPY` takes a guard for an empty place. So the guards
/// are made once more; from the discard on nothing comes.
///
/// # Safety
/// The mapped part of the range must have been made guards by the calling thread.
unsafe fn announce(start: u64, length: u64) {
    // SAFETY: the content is gone already.
    unsafe {
        kernel::advise(start, length as usize, libc::MADV_DONTNEED);
        kernel::advise(start, length as usize, MADV_GUARD_INSTALL);
    }
}

/// Linux's function, but guards that are made by way of it are made known. It leaves
/// no frame: the call may be one after which a child goes on on this stack.
///
/// # Safety
/// As the C library's.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn syscall() -> c_long {
    core::arch::naked_asm!(
        "cmp rdi, {madvise_number}",
        "je 2f",
        "cmp rdi, {process_madvise_number}",
        "je 3f",
        "4:",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "call {next}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        "2:",
        "cmp ecx, {install}",
        "jne 4b",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "jmp {madvise}",
        "3:",
        "cmp r8d, {install}",
        "jne 4b",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov rcx, r9",
        "jmp {process_madvise}",
        madvise_number = const libc::SYS_madvise,
        process_madvise_number = const libc::SYS_process_madvise,
        install = const MADV_GUARD_INSTALL,
        next = sym next_syscall,
        madvise = sym madvise_by_number,
        process_madvise = sym process_madvise_by_number,
    )
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn syscall() -> c_long {
    core::arch::naked_asm!(
        "cmp x0, #{madvise_number}",
        "b.eq 2f",
        "cmp x0, #{process_madvise_number}",
        "b.eq 3f",
        "4:",
        "stp x29, x30, [sp, #-80]!",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "bl {next}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]",
        "ldp x6, x7, [sp, #64]",
        "ldp x29, x30, [sp], #80",
        "br x16",
        "2:",
        "cmp w3, #{install}",
        "b.ne 4b",
        "mov x0, x1",
        "mov x1, x2",
        "b {madvise}",
        "3:",
        "cmp w4, #{install}",
        "b.ne 4b",
        "mov x0, x1",
        "mov x1, x2",
        "mov x2, x3",
        "mov x3, x5",
        "b {process_madvise}",
        madvise_number = const libc::SYS_madvise,
        process_madvise_number = const libc::SYS_process_madvise,
        install = const MADV_GUARD_INSTALL,
        next = sym next_syscall,
        madvise = sym madvise_by_number,
        process_madvise = sym process_madvise_by_number,
    )
}

/// Where `syscall` goes on: the C library's, which every program has.
extern "C" fn next_syscall() -> *mut c_void {
    SYSCALL.address()
}

/// Guards by number: `syscall` returns a long.
///
/// # Safety
/// As for the advice.
unsafe extern "C" fn madvise_by_number(address: *mut c_void, length: usize) -> c_long {
    // SAFETY: the caller's own arguments.
    c_long::from(unsafe { madvise(address, length, MADV_GUARD_INSTALL) })
}

/// # Safety
/// As for the advice.
unsafe extern "C" fn process_madvise_by_number(
    process: c_int,
    ranges: *const libc::iovec,
    count: usize,
    flags: libc::c_uint,
) -> isize {
    // SAFETY: the caller's own arguments.
    unsafe { process_madvise(process, ranges, count, MADV_GUARD_INSTALL, flags) }
}

/// What the C library makes of the kernel's refusal.
fn fail(error: c_int) -> c_int {
    // SAFETY: a thread's own.
    unsafe { *libc::__errno_location() = error };
    -1
}
