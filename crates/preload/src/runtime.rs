//! What compiled code and the panic machinery of the standard library want of other
//! libraries.
//!
//! The agent's thread must run nobody else's code: a sanitizer's `memcpy` looks for
//! its own records of the thread in the thread-local storage, and there is none. And
//! this library is to need none but the C library: with `libgcc_s` or glibc's dynamic
//! linker among its needs, a program that is linked with musl would not start.
//!
//! Nothing here unwinds: a panic prints its line and aborts. So the unwinder is a
//! stack that ends at once, and the panic machinery's thread-local storage, which
//! nothing else here uses, a few words for whichever thread panics first.

/// More than the standard library keeps for a panic.
#[cfg(target_arch = "x86_64")]
const LOCAL_BYTES: usize = 4096;

macro_rules! unwinder {
    ($return:literal: $($name:literal)+) => {
        core::arch::global_asm!(
            ".text",
            $(
                concat!(".globl ", $name),
                concat!(".hidden ", $name),
                concat!(".type ", $name, ", @function"),
                concat!($name, ":"),
            )+
            $return,
        );
    };
}

// The end of the stack, or no answer: what all of these may say.
#[cfg(target_arch = "x86_64")]
unwinder!("mov eax, 5
    ret": "_Unwind_Backtrace" "_Unwind_RaiseException");
#[cfg(target_arch = "x86_64")]
unwinder!("xor eax, eax
    ret": "_Unwind_GetIP" "_Unwind_GetIPInfo" "_Unwind_GetCFA" "_Unwind_GetRegionStart"
    "_Unwind_GetLanguageSpecificData" "_Unwind_GetTextRelBase" "_Unwind_GetDataRelBase"
    "_Unwind_SetGR" "_Unwind_SetIP" "_Unwind_DeleteException" "_Unwind_FindEnclosingFunction");
// Nobody returns from it.
#[cfg(target_arch = "x86_64")]
unwinder!("ud2": "_Unwind_Resume");

#[cfg(target_arch = "aarch64")]
unwinder!("mov w0, #5
    ret": "_Unwind_Backtrace" "_Unwind_RaiseException");
#[cfg(target_arch = "aarch64")]
unwinder!("mov x0, #0
    ret": "_Unwind_GetIP" "_Unwind_GetIPInfo" "_Unwind_GetCFA" "_Unwind_GetRegionStart"
    "_Unwind_GetLanguageSpecificData" "_Unwind_GetTextRelBase" "_Unwind_GetDataRelBase"
    "_Unwind_SetGR" "_Unwind_SetIP" "_Unwind_DeleteException" "_Unwind_FindEnclosingFunction");
#[cfg(target_arch = "aarch64")]
unwinder!("brk #1": "_Unwind_Resume");

// On aarch64 the compiler asks the dynamic linker in another way, without a
// function of its.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".text",
    ".globl __tls_get_addr",
    ".hidden __tls_get_addr",
    ".type __tls_get_addr, @function",
    "__tls_get_addr:",
    // The argument is a module's number and an offset in what it keeps.
    "mov rax, [rdi + 8]",
    "cmp rax, {bytes}",
    "jae 2f",
    "lea rcx, [rip + strata_panic_storage]",
    "add rax, rcx",
    "ret",
    "2:",
    "ud2",
    ".local strata_panic_storage",
    ".comm strata_panic_storage, {bytes}, 64",
    bytes = const LOCAL_BYTES,
);

// How the compiler copies, fills and compares memory.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".text",
    ".globl memcpy",
    ".hidden memcpy",
    ".type memcpy, @function",
    "memcpy:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    ".globl memmove",
    ".hidden memmove",
    ".type memmove, @function",
    "memmove:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "mov r8, rdi",
    "sub r8, rsi",
    "cmp r8, rdx",
    "jb 2f",
    "rep movsb",
    "ret",
    // The end of what is copied would be overwritten: from there, downwards.
    "2:",
    "lea rsi, [rsi + rdx - 1]",
    "lea rdi, [rdi + rdx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    ".globl memset",
    ".hidden memset",
    ".type memset, @function",
    "memset:",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    ".globl memcmp",
    ".hidden memcmp",
    ".type memcmp, @function",
    "memcmp:",
    ".globl bcmp",
    ".hidden bcmp",
    ".type bcmp, @function",
    "bcmp:",
    "xor eax, eax",
    "test rdx, rdx",
    "je 3f",
    "2:",
    "movzx eax, byte ptr [rdi]",
    "movzx ecx, byte ptr [rsi]",
    "sub eax, ecx",
    "jne 3f",
    "inc rdi",
    "inc rsi",
    "dec rdx",
    "jne 2b",
    "3:",
    "ret",
);
