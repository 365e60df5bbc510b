//! `setuid` and its kind, `chroot`, `unshare`, `setns`: when a program has changed
//! who it is or what it sees, its agent follows (`succession`).
//!
//! Not seen: a program that makes the system call itself. Its agent keeps the user
//! that it had, without any privilege (`docs/agent.md`).

use core::ffi::{c_char, c_int, c_void};

use crate::block;
use crate::kernel;
use crate::next::Next;
use crate::succession;

/// Has the agent follow, if there is one.
fn follow() {
    if let Some(block) = block::existing() {
        succession::follow(block);
    }
}

/// Defines a function of the C library that calls the real one and, where that
/// has succeeded and `changed` says so, has the agent follow.
macro_rules! followed {
    ($($lookup:ident, $look:ident: $name:ident($($argument:ident: $kind:ty),+);)+) => {
        $(
            static $lookup: Next = Next::new(match core::ffi::CStr::from_bytes_with_nul(
                concat!(stringify!($name), "\0").as_bytes(),
            ) {
                Ok(name) => name,
                Err(_) => panic!("a name without a zero byte"),
            });

            /// The C library's function, but the agent follows.
            ///
            /// # Safety
            /// As the C library's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub(crate) unsafe extern "C" fn $name($($argument: $kind),+) -> c_int {
                let address = $lookup.address();
                if address.is_null() {
                    // SAFETY: the C library's error number of this thread.
                    unsafe { *libc::__errno_location() = libc::ENOSYS };
                    return -1;
                }
                // SAFETY: the C library's function of this name has this signature.
                let real = unsafe {
                    core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),+) -> c_int>(
                        address,
                    )
                };
                let before = $look();
                // SAFETY: the caller's own arguments.
                let result = unsafe { real($($argument),+) };
                if result == 0 && before.is_none_or(|before| Some(before) != $look()) {
                    follow();
                }
                result
            }
        )+

        /// Looks the real functions up now: they may be called from a signal
        /// handler, or from the child of a vfork, where no lookup may happen.
        pub(crate) fn prepare() {
            $($lookup.address();)+
        }
    };
}

/// Users and groups, so that who sets what is set anyway costs no new agent.
fn ids() -> Option<[u32; 6]> {
    block::existing().map(|_| kernel::ids())
}

/// For what cannot be compared.
fn unknown() -> Option<()> {
    None
}

followed! {
    SETUID, ids: setuid(user: libc::uid_t);
    SETEUID, ids: seteuid(user: libc::uid_t);
    SETREUID, ids: setreuid(real_user: libc::uid_t, effective: libc::uid_t);
    SETRESUID, ids: setresuid(real_user: libc::uid_t, effective: libc::uid_t, saved: libc::uid_t);
    SETGID, ids: setgid(group: libc::gid_t);
    SETEGID, ids: setegid(group: libc::gid_t);
    SETREGID, ids: setregid(real_group: libc::gid_t, effective: libc::gid_t);
    SETRESGID, ids: setresgid(real_group: libc::gid_t, effective: libc::gid_t, saved: libc::gid_t);
    SETGROUPS, unknown: setgroups(count: libc::size_t, groups: *const libc::gid_t);
    INITGROUPS, unknown: initgroups(user: *const c_char, group: libc::gid_t);
    CHROOT, unknown: chroot(path: *const c_char);
    UNSHARE, unknown: unshare(what: c_int);
    SETNS, unknown: setns(descriptor: c_int, kind: c_int);
}
