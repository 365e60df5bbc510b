//! Where threads run. A fault handler that wakes on the CPU of the thread that
//! faults answers in a third of the time of one on another CPU.

/// The CPU that this thread runs on right now.
#[must_use]
pub fn current_cpu() -> u32 {
    // SAFETY: sched_getcpu takes nothing and touches nothing of ours.
    let cpu = unsafe { libc::sched_getcpu() };
    cpu.max(0) as u32
}

/// Binds this thread to one CPU. A CPU that it may not use leaves it where it
/// was: a slower fault, not an error.
pub fn pin_current_thread(cpu: u32) {
    // SAFETY: cpu_set_t is plain data for which all zeroes is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu as usize >= libc::CPU_SETSIZE as usize {
        return;
    }
    // SAFETY: `cpu` is below CPU_SETSIZE, `set` is live and of the size named.
    unsafe {
        libc::CPU_SET(cpu as usize, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

/// Makes this thread give way to others (a niceness of 10): what it does can
/// wait.
pub fn yield_to_others() {
    // SAFETY: takes three integers; 0 is the calling thread. A refusal leaves it
    // as it was.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) };
}

/// Names this thread for `ps` and `perf` (15 bytes count).
pub fn set_thread_name(name: &str) {
    let mut bytes = [0u8; 16];
    for (to, from) in bytes.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    // SAFETY: PR_SET_NAME reads at most 16 bytes; ours end with a zero.
    unsafe { libc::prctl(libc::PR_SET_NAME, bytes.as_ptr()) };
}
