//! Events of the kernel's performance counters.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use crate::uffd::own;

/// `PERF_TYPE_SOFTWARE`, and `PERF_COUNT_SW_DUMMY` of that type: counts nothing.
const TYPE_SOFTWARE: u64 = 1;
const COUNT_DUMMY: u64 = 9;
/// `PERF_ATTR_SIZE_VER0`: `struct perf_event_attr` as it first was.
const ATTRIBUTE_BYTES: u64 = 64;
/// Its bits `disabled`, `exclude_kernel` and `exclude_hv`.
const FLAGS: u64 = 1 | 1 << 5 | 1 << 6;
/// `PERF_FLAG_FD_CLOEXEC`.
const CLOSE_ON_EXEC: u64 = 8;

/// An event of the calling thread that counts nothing. The first event of any
/// thread makes its maker wait for all CPUs (`account_event` in the kernel's
/// `kernel/events/core.c`), milliseconds; while there is one, others need not. It is
/// there as long as the descriptor, also when the thread has ended.
///
/// # Errors
/// The kernel has no such events, or `kernel.perf_event_paranoid` forbids them.
pub fn idle_task_event() -> io::Result<OwnedFd> {
    // type and size; config; period; sample_type; read_format; flags; and the rest.
    let attribute: [u64; 8] =
        [TYPE_SOFTWARE | ATTRIBUTE_BYTES << 32, COUNT_DUMMY, 0, 0, 0, FLAGS, 0, 0];
    // SAFETY: `attribute` is live and as large as it says; then integers: this
    // thread, on any CPU, in no group, closed on exec.
    let fd = unsafe {
        libc::syscall(libc::SYS_perf_event_open, attribute.as_ptr(), 0, -1, -1, CLOSE_ON_EXEC)
    };
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(own(fd as RawFd)) }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn an_event_outlives_its_thread() {
        let made = std::thread::spawn(idle_task_event).join().expect("a thread");
        let event = match made {
            Ok(event) => event,
            Err(error) => return println!("skipped: no event of a thread for us: {error}"),
        };
        let count = std::fs::File::from(event);
        let mut value = [1; 8];
        (&count).read_exact(&mut value).expect("a count");
        assert_eq!(value, [0; 8]);
    }
}
