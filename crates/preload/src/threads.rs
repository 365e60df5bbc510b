//! `pthread_create` and `thrd_create`: every new thread is recorded before it
//! runs the program's code.
//!
//! Not recorded: threads that the C library makes for itself (POSIX timers and
//! asynchronous I/O) and those of a bare `clone` (`docs/agent.md`).

use core::ffi::{c_int, c_void};

use crate::next::Next;
use crate::records;
use crate::start;

static PTHREAD_CREATE: Next = Next::new(c"pthread_create");
static THRD_CREATE: Next = Next::new(c"thrd_create");

/// `thrd_nomem` of C11's `<threads.h>`.
const THRD_NO_MEMORY: c_int = 3;
/// `thrd_error`.
const THRD_ERROR: c_int = 2;

type PthreadCreate = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    *const c_void,
    *mut c_void,
) -> c_int;
type ThrdCreate = unsafe extern "C" fn(*mut libc::pthread_t, *const c_void, *mut c_void) -> c_int;

/// What a new thread is to run. Also what `recorded` returns in two registers.
#[repr(C)]
struct Routine {
    start: *const c_void,
    argument: *mut c_void,
}

/// A [`Routine`] in memory that the new thread frees; null: no memory.
fn pack(start: *const c_void, argument: *mut c_void) -> *mut Routine {
    // SAFETY: malloc's memory is aligned for two pointers and, if not null,
    // large enough.
    unsafe {
        let routine = libc::malloc(size_of::<Routine>()).cast::<Routine>();
        if !routine.is_null() {
            routine.write(Routine { start, argument });
        }
        routine
    }
}

/// POSIX's function, but the thread is recorded before `start` runs.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: *const c_void,
    argument: *mut c_void,
) -> c_int {
    let Some(create) = real_pthread_create() else { return libc::EAGAIN };
    if start::recording().is_none() {
        // SAFETY: the caller's own arguments.
        return unsafe { create(thread, attributes, start, argument) };
    }
    let routine = pack(start, argument);
    if routine.is_null() {
        return libc::EAGAIN;
    }
    let trampoline = trampoline as *const c_void;
    // SAFETY: the caller's arguments, and a start routine that takes what it is
    // given; when there is no thread, the routine is still ours.
    unsafe {
        let result = create(thread, attributes, trampoline, routine.cast());
        if result != 0 {
            libc::free(routine.cast());
        }
        result
    }
}

/// C11's function, but the thread is recorded before `start` runs.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn thrd_create(
    thread: *mut libc::pthread_t,
    start: *const c_void,
    argument: *mut c_void,
) -> c_int {
    let address = THRD_CREATE.address();
    if address.is_null() {
        return THRD_ERROR;
    }
    // SAFETY: the C library's function of this name has this signature
    // (`thrd_t` is `pthread_t`).
    let create = unsafe { core::mem::transmute::<*mut c_void, ThrdCreate>(address) };
    if start::recording().is_none() {
        // SAFETY: the caller's own arguments.
        return unsafe { create(thread, start, argument) };
    }
    let routine = pack(start, argument);
    if routine.is_null() {
        return THRD_NO_MEMORY;
    }
    // SAFETY: as above; the trampoline leaves the routine's result, an int
    // here, where it is.
    unsafe {
        let result = create(thread, trampoline as *const c_void, routine.cast());
        if result != 0 {
            libc::free(routine.cast());
        }
        result
    }
}

fn real_pthread_create() -> Option<PthreadCreate> {
    let address = PTHREAD_CREATE.address();
    // SAFETY: null is no function; else the C library's function of this name,
    // which has this signature.
    unsafe { core::mem::transmute::<*mut c_void, Option<PthreadCreate>>(address) }
}

/// Start routine of every wrapped thread: records it, then jumps to the real
/// one, whose caller the C library thus remains. No frame of ours is left on
/// the stack for `pthread_exit` or a cancellation to unwind through, and the
/// result passes unseen.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn trampoline() {
    core::arch::naked_asm!(
        // The argument stays in rdi; the call wants an aligned stack.
        "sub rsp, 8",
        "call {recorded}",
        "add rsp, 8",
        // The Routine came in rax and rdx.
        "mov rdi, rdx",
        "jmp rax",
        recorded = sym recorded,
    )
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn trampoline() {
    core::arch::naked_asm!(
        // The argument stays in x0; the call overwrites the return address.
        "stp x29, x30, [sp, #-16]!",
        "bl {recorded}",
        "ldp x29, x30, [sp], #16",
        // The Routine came in x0 and x1. x16: the register through which a
        // branch may enter a function under branch protection.
        "mov x16, x0",
        "mov x0, x1",
        "br x16",
        recorded = sym recorded,
    )
}

/// Runs on the new thread.
extern "C" fn recorded(packed: *mut Routine) -> Routine {
    // SAFETY: what `pack` made, given to this thread alone.
    let routine = unsafe {
        let routine = packed.read();
        libc::free(packed.cast());
        routine
    };
    if let Some(block) = start::recording() {
        records::record_thread(block, (&raw const routine) as u64);
    }
    routine
}
