//! What the threads of a tree do while they are told to stop, for whoever reads why
//! one of them did not.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::param::clock_ticks_per_second;
use strata_sys::stat_fields;

/// What CRIU says, before its number, of a thread that was told to stop and did not.
pub(crate) const DID_NOT_STOP: &str = "Unseizable non-zombie ";

/// One look at a thread: totals since it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Totals {
    ran: Duration,
    in_kernel: Duration,
    /// Able to run, and not running.
    waited: Duration,
}

/// One thread's totals, and what it is now: state and processor.
fn look(pid: u32, thread: u32) -> Option<(Totals, String)> {
    let read = |what| fs::read_to_string(format!("/proc/{pid}/task/{thread}/{what}")).ok();
    let stat = read("stat")?;
    let mut fields = stat_fields(&stat)?;
    // As proc(5) counts them: the third, the 15th and the 39th.
    let state = fields.next()?;
    let ticks: u64 = fields.nth(11)?.parse().ok()?;
    let processor = fields.nth(23)?;
    let name = read("comm")?;
    // proc(5) does not have it: nanoseconds run, nanoseconds waited, times run.
    let schedule = read("schedstat")?;
    let mut nanoseconds = schedule.split_ascii_whitespace().map(str::parse);
    let mut next = || nanoseconds.next()?.ok().map(Duration::from_nanos);
    let totals = Totals {
        ran: next()?,
        in_kernel: Duration::from_millis(ticks * 1000 / clock_ticks_per_second()),
        waited: next()?,
    };
    Some((totals, format!("({}), in state {state} on processor {processor}", name.trim_end())))
}

/// All threads of some processes, as they were at one time.
#[derive(Debug)]
pub(crate) struct Threads {
    at: Instant,
    found: BTreeMap<u32, (u32, Totals)>,
}

impl Threads {
    pub(crate) fn of(pids: &[u32]) -> Self {
        let mut found = BTreeMap::new();
        for &pid in pids {
            let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            for thread in entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
                if let Some((totals, _)) = look(pid, thread) {
                    found.insert(thread, (pid, totals));
                }
            }
        }
        Self { at: Instant::now(), found }
    }

    /// What the thread that CRIU names in `reason` has done since then. None: it names
    /// none, or one that was not there.
    pub(crate) fn did(&self, reason: &str) -> Option<String> {
        let (_, named) = reason.split_once(DID_NOT_STOP)?;
        let digits = named.find(|c: char| !c.is_ascii_digit()).unwrap_or(named.len());
        let thread: u32 = named[..digits].parse().ok()?;
        let &(pid, before) = self.found.get(&thread)?;
        let (now, what) = look(pid, thread)?;
        let seconds = |now: Duration, then| now.saturating_sub(then).as_secs_f64();
        Some(format!(
            "in {:.1} s thread {thread} {what}, ran {:.1} s, in the kernel {:.1} s, and waited {:.1} s for a processor",
            self.at.elapsed().as_secs_f64(),
            seconds(now.ran, before.ran),
            seconds(now.in_kernel, before.in_kernel),
            seconds(now.waited, before.waited),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_did_not_stop_is_told_by_what_it_did() {
        let own = std::process::id();
        let before = Threads::of(&[own]);
        let thread = strata_sys::thread_id();
        let began = strata_sys::thread_time();
        while strata_sys::thread_time() - began < Duration::from_millis(160) {}
        let reason = format!("Timeout reached; {DID_NOT_STOP}{thread} found, state R, err -1/4");
        let did = before.did(&reason).expect("it is there");
        assert!(did.contains(&format!("thread {thread} (")), "{did}");
        assert!(did.contains("in state R on processor "), "{did}");
        let ran = did.split_once(" ran ").and_then(|(_, rest)| rest.split_once(" s,"));
        let ran: f64 = ran.expect("how long").0.parse().expect("a number");
        assert!(ran >= 0.15, "{did}");
        assert_eq!(before.did("it gives no reason"), None);
        assert_eq!(before.did(&format!("{DID_NOT_STOP}0 found")), None);
        assert_eq!(before.did(DID_NOT_STOP), None);
    }
}
