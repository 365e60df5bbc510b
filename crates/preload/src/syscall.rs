//! One system call, made directly.
//!
//! The program or another preloaded library may define `mmap`, `ioctl`,
//! `clock_gettime` or even `syscall` itself, with allocation or locks inside;
//! the agent must not end up there. Nor does it need `errno`.

use core::arch::asm;

use libc::{c_int, c_long};

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the agent knows the system calls of x86-64 and aarch64 only");

/// Results from here up are negative errnos.
const FIRST_ERRNO: u64 = (-4095_i64).cast_unsigned();

/// Makes the system call; the error is an errno.
///
/// # Safety
/// As for the system call itself.
pub(crate) unsafe fn call(number: c_long, arguments: [u64; 6]) -> Result<u64, c_int> {
    let [a, b, c, d, e, f] = arguments;
    let result: u64;
    // SAFETY: the kernel's calling convention: it changes the result register
    // and, on x86-64, rcx and r11. What it does to memory the caller vouches
    // for; the compiler takes all memory as changed.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number.cast_unsigned() => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    // SAFETY: as above; on aarch64 only x0 changes.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "svc 0",
            in("x8") number.cast_unsigned(),
            inlateout("x0") a => result,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x4") e,
            in("x5") f,
            options(nostack),
        );
    }
    if result >= FIRST_ERRNO { Err(result.wrapping_neg() as c_int) } else { Ok(result) }
}
