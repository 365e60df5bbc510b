//! Processes as `/proc` shows them: trees, states, numbers in namespaces.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use strata_sys::{Pidfd, SIGKILL, SIGSTOP, parent_of, stat_field};

/// Longest wait for a tracer's end to show.
const DETACHED_WITHIN: Duration = Duration::from_secs(2);
/// A task that ends (`PF_EXITING`, kernel's `linux/sched.h`).
const EXITING: u64 = 4;

/// All processes by number.
fn all() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// `root` and all that descends from it, parents before children; empty when
/// `root` is gone.
#[must_use]
pub fn process_tree(root: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut found = Vec::new();
    for pid in all() {
        if pid == root {
            found.push(root);
        }
        if let Some(parent) = parent_of(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        found.extend(children.remove(pid).unwrap_or_default());
        next += 1;
    }
    found
}

/// A line of `/proc/PID/status`.
pub(crate) fn status(pid: u32, key: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let value = |line: &str| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim().to_owned());
    text.lines().find_map(value)
}

/// Who traces it: 0 for nobody; `None` when it is gone.
pub(crate) fn tracer(pid: u32) -> Option<u32> {
    status(pid, "TracerPid")?.parse().ok()
}

/// Whether its state is the letter (see proc(5)).
pub(crate) fn is_in_state(pid: u32, letter: char) -> bool {
    status(pid, "State").is_some_and(|state| state.starts_with(letter))
}

/// Whether it has ended (collected or not), or is about to: it was killed, and the
/// kernel takes its memory down, which is tenths of a second for a big one.
#[must_use]
pub fn is_ending(pid: u32) -> bool {
    let exits = || flags(pid).is_none_or(|flags| flags & EXITING != 0);
    is_in_state(pid, 'Z') || has_pending(pid, SIGKILL) || exits()
}

/// Whether a signal waits for it, or for its first thread; also of who is gone.
pub(crate) fn has_pending(pid: u32, signal: i32) -> bool {
    ["SigPnd", "ShdPnd"].into_iter().any(|key| {
        let set = status(pid, key).and_then(|set| u64::from_str_radix(&set, 16).ok());
        set.is_none_or(|set| set & (1 << (signal - 1)) != 0)
    })
}

/// A task's `PF_` flags (see proc(5)).
fn flags(pid: u32) -> Option<u64> {
    stat_field(&format!("/proc/{pid}/stat"), 9)?.parse().ok()
}

/// Waits until nobody traces it any more. `false`: somebody still does, or it
/// is gone.
pub(crate) fn wait_untraced(pid: u32) -> bool {
    let end = Instant::now() + DETACHED_WITHIN;
    loop {
        match tracer(pid) {
            Some(0) => return !is_in_state(pid, 'Z'),
            Some(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
            _ => return false,
        }
    }
}

/// Its number in its own pid namespace.
pub(crate) fn inner_number(pid: u32) -> Option<u32> {
    status(pid, "NSpid")?.split_ascii_whitespace().next_back()?.parse().ok()
}

/// Whether its session is led from outside of its own pid namespace, as after
/// `nsenter`: a number that it cannot be given again.
pub(crate) fn session_is_led_from_outside(pid: u32) -> bool {
    status(pid, "NSsid").is_some_and(|numbers| numbers.split_ascii_whitespace().last() == Some("0"))
}

/// Whether it lives in pid, mount or network namespaces other than ours.
pub(crate) fn lives_elsewhere(pid: u32) -> bool {
    ["pid", "mnt", "net"].iter().any(|kind| {
        let namespace = |who: &str| fs::read_link(format!("/proc/{who}/ns/{kind}")).ok();
        namespace(&pid.to_string()) != namespace("self")
    })
}

/// The process below `ancestor` (itself included) that bears `number` in its
/// own pid namespace.
pub(crate) fn find_by_inner_number(ancestor: u32, number: u32) -> Option<u32> {
    process_tree(ancestor).into_iter().find(|pid| inner_number(*pid) == Some(number))
}

/// Ends all that descends from a process, but not itself. They are stopped
/// first, so that none starts another between the look and the kill: that one
/// would be nobody's child then, and not be found again.
pub(crate) fn kill_below(ancestor: u32) {
    let mut found: Vec<(u32, Pidfd)> = Vec::new();
    loop {
        let known = found.len();
        for pid in process_tree(ancestor) {
            if pid == ancestor || found.iter().any(|(other, _)| *other == pid) {
                continue;
            }
            let Ok(pidfd) = Pidfd::open(pid) else { continue };
            // Still below it, so the number was not another's in between.
            if process_tree(ancestor).contains(&pid) {
                pidfd.signal(SIGSTOP);
                found.push((pid, pidfd));
            }
        }
        if found.len() == known {
            break;
        }
    }
    for (_, pidfd) in &found {
        pidfd.signal(SIGKILL);
    }
}

/// Ends what a CRIU that was killed left behind: it waits for that CRIU for ever,
/// and nobody knows of it yet. `numbers` were free when it started. Its parent is
/// whoever collects orphans: us, or we cannot tell it from others.
pub(crate) fn kill_orphans(numbers: &[u32]) {
    let is_ours = |number: u32| parent_of(number) == Some(std::process::id());
    for &number in numbers.iter().filter(|&&number| is_ours(number)) {
        // Still ours, so the number was not another's in between.
        if let Some(pidfd) = Pidfd::open(number).ok().filter(|_| is_ours(number)) {
            pidfd.signal(SIGKILL);
        }
    }
}

/// Ends the CRIU that keeps the number of a child that has ended, when the worker that
/// started it is dead: it may wait for ever, and does not collect that child. `places`: where
/// work directories of restores are, owner-only; a CRIU of ours has one of them on its line.
pub(crate) fn kill_left_behind(number: u32, places: &Path) {
    let keeper = || parent_of(number).filter(|parent| is_left_behind(number, *parent, places));
    let Some(parent) = keeper() else { return };
    // Still the same, so the number was not another's in between.
    if let Some(pidfd) = Pidfd::open(parent).ok().filter(|_| keeper() == Some(parent)) {
        pidfd.signal(SIGKILL);
    }
}

fn is_left_behind(number: u32, parent: u32, places: &Path) -> bool {
    let user = |pid: &str| fs::metadata(format!("/proc/{pid}")).ok().map(|data| data.uid());
    let line = fs::read(format!("/proc/{parent}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).map(OsStr::from_bytes);
    let work = words.find(|word| *word == "--work-dir").and_then(|_| words.next());
    is_in_state(number, 'Z')
        && parent_of(parent) != Some(std::process::id())
        && user(&parent.to_string()) == user("self")
        && work.is_some_and(|work| Path::new(work).parent() == Some(places))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn who_was_killed_is_ending_until_collected_and_after() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        assert!(!is_ending(child.id()) && !is_ending(std::process::id()));
        child.kill().expect("kill");
        assert!(is_ending(child.id()), "at once");
        child.wait().expect("wait");
        assert!(is_ending(child.id()), "gone");
    }

    const UNCOLLECTING: &str = "sh -c \"true & exec perl -e 'sleep 60' -- --work-dir /places/one\"";

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        shell
    }

    /// A process in the tree of `child` that does not collect its own child, which has ended,
    /// and that one; it has `--work-dir` in `/places` on its line.
    fn uncollecting(child: &std::process::Child) -> (u32, u32) {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let tree = process_tree(child.id());
            let ended = tree.iter().copied().find(|pid| is_in_state(*pid, 'Z'));
            if let Some((number, parent)) = ended.and_then(|pid| Some((pid, parent_of(pid)?)))
                && fs::read(format!("/proc/{parent}/cmdline"))
                    .is_ok_and(|line| line.starts_with(b"perl"))
            {
                return (parent, number);
            }
            assert!(Instant::now() < end, "no child that has ended: {tree:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn who_keeps_a_number_of_ours_is_ended_unless_somebody_waits_for_it() {
        let mut child = shell(&format!("{UNCOLLECTING}; true")).spawn().expect("sh");
        let (parent, number) = uncollecting(&child);
        kill_left_behind(number, Path::new("/other"));
        assert!(is_in_state(number, 'Z') && !is_ending(parent), "another's work directory");
        kill_left_behind(number, Path::new("/places"));
        child.wait().expect("wait");
        assert!(is_ending(parent) && is_ending(number));

        let mut child = shell(&format!("exec {UNCOLLECTING}")).spawn().expect("sh");
        let (parent, number) = uncollecting(&child);
        kill_left_behind(number, Path::new("/places"));
        assert!(is_in_state(number, 'Z') && !is_ending(parent), "ours, we will collect it");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_tree_has_its_children_and_no_others() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let tree = process_tree(std::process::id());
        assert_eq!(tree[0], std::process::id());
        assert!(tree.contains(&child.id()));
        assert_eq!(process_tree(child.id()), [child.id()]);
        assert_eq!(find_by_inner_number(std::process::id(), child.id()), Some(child.id()));
        assert_eq!(tracer(child.id()), Some(0));
        assert!(wait_untraced(child.id()));
        child.kill().expect("kill");
        child.wait().expect("wait");
        assert_eq!(process_tree(child.id()), []);
        assert!(!wait_untraced(child.id()));
    }
}
