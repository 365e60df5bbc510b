//! Where threads run. A fault handler that wakes on the CPU of the thread that
//! faults answers in a third of the time of one on another CPU.

use std::fs::File;
use std::io::Read;
use std::time::Duration;

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

/// The CPUs that a thread may run on.
#[derive(Clone)]
pub struct Cpus(libc::cpu_set_t);

impl std::fmt::Debug for Cpus {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_set().entries((0..libc::CPU_SETSIZE as u32).filter(|&cpu| self.has(cpu))).finish()
    }
}

impl Cpus {
    /// Those of this thread. None: there are more than can be named here.
    #[must_use]
    pub fn of_current_thread() -> Option<Self> {
        // SAFETY: cpu_set_t is plain data for which all zeroes is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: writes one live set of the size named.
        let got = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
        (got == 0).then_some(Self(set))
    }

    /// Whether `cpu` is one of them.
    #[must_use]
    pub fn has(&self, cpu: u32) -> bool {
        // SAFETY: reads one word of a live set, which has the CPU.
        cpu < libc::CPU_SETSIZE as u32 && unsafe { libc::CPU_ISSET(cpu as usize, &self.0) }
    }

    /// All of them but `cpus`; none if no other is left.
    #[must_use]
    pub fn without(&self, cpus: &[u32]) -> Option<Self> {
        let mut left = self.clone();
        for &cpu in cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as u32) {
            // SAFETY: writes one word of a live set, which has the CPU.
            unsafe { libc::CPU_CLR(cpu as usize, &mut left.0) };
        }
        // SAFETY: reads a live set.
        (unsafe { libc::CPU_COUNT(&left.0) } > 0).then_some(left)
    }

    /// Has this thread run on these alone. A refusal leaves it as it was.
    pub fn confine_current_thread(&self) {
        // SAFETY: reads one live set of the size named.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const self.0) };
    }
}

/// How long all CPUs together have been idle since the machine started; none
/// where the kernel does not say. In steps of a hundredth of a second.
#[must_use]
pub fn idle_time() -> Option<Duration> {
    const TICKS_PER_SECOND: u64 = 100;
    // Its first line, with all CPUs' sums; the rest is long.
    let mut line = [0; 256];
    let read = File::open("/proc/stat").ok()?.read(&mut line).ok()?;
    let text = std::str::from_utf8(&line[..read]).ok()?;
    // cpu user nice system idle iowait ...
    let mut fields = text.lines().next()?.split_ascii_whitespace().skip(4);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(Duration::from_millis((ticks()? + ticks()?) * 1000 / TICKS_PER_SECOND))
}

/// How long this thread has run so far, waits for a CPU not counted.
#[must_use]
pub fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one live timespec; the clock exists for every thread.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The clock of a process: how long all its threads have run, to the nanosecond. It goes
/// by the process's number, so it serves to see that nothing ran: two that read alike are
/// one process's, for who gets a number later begins at nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkClock(libc::clockid_t);

impl WorkClock {
    pub(crate) fn of(pid: u32) -> Option<Self> {
        // How the kernel makes a clock of a number (linux/posix-timers.h): its complement,
        // and which of the clocks, here the scheduler's.
        const SCHEDULER: libc::clockid_t = 2;
        let pid = libc::pid_t::try_from(pid).ok().filter(|&pid| pid > 0)?;
        Some(Self(((!pid) << 3) | SCHEDULER))
    }

    /// What it shows; none when there is no such process.
    #[must_use]
    pub fn read(self) -> Option<Duration> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes one live timespec; a clock of a process that has gone is refused.
        let read = unsafe { libc::clock_gettime(self.0, &raw mut time) } == 0;
        read.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
}

/// Makes this thread give way to others (a niceness of 10): what it does can
/// wait.
pub fn yield_to_others() {
    // SAFETY: takes three integers; 0 is the calling thread. A refusal leaves it
    // as it was.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) };
}

/// Has this thread woken when its timeouts end, not up to 50 microseconds later.
pub fn wake_in_time() {
    // SAFETY: takes plain integers; 1 is a slack of a nanosecond.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
}

/// The number of this thread.
#[must_use]
pub fn thread_id() -> u32 {
    // SAFETY: gettid takes nothing and cannot fail.
    unsafe { libc::gettid() as u32 }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_on_the_cpus_that_it_is_confined_to() {
        let all = Cpus::of_current_thread().expect("few CPUs");
        let own: Vec<u32> = (0..1024).filter(|&cpu| all.has(cpu)).collect();
        assert!(own.contains(&current_cpu()));
        assert!(all.without(&own).is_none(), "no CPU is left");
        assert_eq!(format!("{:?}", all.without(&[u32::MAX]).expect("all")), format!("{all:?}"));
        let Some(rest) = all.without(&own[..1]) else { return };
        std::thread::spawn(move || {
            rest.confine_current_thread();
            assert!(!Cpus::of_current_thread().expect("few CPUs").has(own[0]));
            assert_ne!(current_cpu(), own[0]);
            all.confine_current_thread();
            assert!(Cpus::of_current_thread().expect("few CPUs").has(own[0]));
        })
        .join()
        .expect("no assertion failed");
    }

    #[test]
    fn a_clock_stands_as_long_as_its_process_does_nothing() {
        let own = WorkClock::of(std::process::id()).expect("a number");
        let before = own.read().expect("it lives");
        while own.read().expect("it lives") < before + Duration::from_millis(1) {}
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("sleep");
        let clock = WorkClock::of(child.id()).expect("a number");
        // It has to start first, for which a busy machine takes its time.
        let hangs = std::time::Instant::now() + Duration::from_secs(60);
        let mut last = clock.read();
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let now = clock.read();
            if std::mem::replace(&mut last, now) == now {
                break;
            }
            assert!(std::time::Instant::now() < hangs, "a sleeping process runs");
        }
        child.kill().expect("it sleeps");
        child.wait().expect("it was killed");
        assert_ne!(clock.read(), last, "it is gone");
        assert_eq!(WorkClock::of(0), None);
    }
}
