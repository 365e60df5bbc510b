//! Finding a process by what a message of the kernel says of one of its threads.

use std::fs;

/// The processes that may have a thread of which that is the number: in its own PID
/// namespace, which need not be this one.
///
/// The obvious one first, which is right in this namespace; the others are looked for
/// only when that was not taken.
pub fn processes_with_thread(tid: u32) -> impl Iterator<Item = u32> {
    let obvious = numbers(&format!("/proc/{tid}/status")).map(|(process, _)| process);
    let others = std::iter::once_with(all_processes).flatten();
    let others = others.filter(move |&process| has_thread(process, tid));
    obvious.into_iter().chain(others.filter(move |&process| Some(process) != obvious))
}

/// The processes whose parent is `parent`.
#[must_use]
pub fn children_of(parent: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let of_thread = |thread: fs::DirEntry| {
        let text = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
    };
    threads.flat_map(of_thread).collect()
}

/// All processes that are shown to this one.
#[must_use]
pub fn all_processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn has_thread(process: u32, tid: u32) -> bool {
    let mut threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let is_it = |thread: fs::DirEntry| {
        let path = thread.path().join("status");
        path.to_str().and_then(numbers).is_some_and(|(_, names)| names.last() == Some(&tid))
    };
    threads.any(is_it)
}

/// The process of a thread, and the thread's number in each PID namespace from this
/// one inwards.
fn numbers(path: &str) -> Option<(u32, Vec<u32>)> {
    let text = fs::read_to_string(path).ok()?;
    let line = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let process = line("Tgid:")?.trim().parse().ok()?;
    let names = line("NSpid:")?.split_ascii_whitespace().filter_map(|word| word.parse().ok());
    Some((process, names.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_names_its_process() {
        let own = std::process::id();
        assert_eq!(processes_with_thread(own).next(), Some(own));
        let tid = std::thread::spawn(|| {
            // SAFETY: no arguments, cannot fail.
            let tid = unsafe { libc::gettid() } as u32;
            assert_eq!(processes_with_thread(tid).next(), Some(std::process::id()));
            tid
        });
        let tid = tid.join().expect("the thread ends well");
        assert_ne!(tid, own);
    }

    #[test]
    fn a_child_is_its_parents() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        assert!(children_of(std::process::id()).contains(&child.id()));
        child.kill().expect("it sleeps");
        child.wait().expect("it is a child");
    }
}
