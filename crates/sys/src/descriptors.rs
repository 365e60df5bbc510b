//! Descriptor tables of other processes: who shares one, what is in it, and copies of
//! that under the same numbers here.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::kin::all_processes;
use crate::process::Pidfd;

/// A descriptor of another process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenThere {
    /// Its number there.
    pub number: RawFd,
    /// Whether it is a userfaultfd, going by its name.
    pub is_userfaultfd: bool,
}

/// What a process has open, by number.
///
/// # Errors
/// It has ended, or may not be looked at.
pub fn descriptors_of(pid: u32) -> io::Result<Vec<OpenThere>> {
    let mut open = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let link = fs::read_link(entry.path());
        let is_userfaultfd = link.is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]");
        open.push(OpenThere { number, is_userfaultfd });
    }
    open.sort_unstable_by_key(|one| one.number);
    Ok(open)
}

/// Whether a process has the very file open that is called `path` now.
///
/// # Errors
/// There is none of that name, the process has ended, or may not be looked at.
pub fn has_open(pid: u32, path: &Path) -> io::Result<bool> {
    let file = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let wanted = file(path)?;
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?;
    // One that is closed meanwhile is none.
    Ok(entries.flatten().any(|entry| file(&entry.path()).is_ok_and(|found| found == wanted)))
}

/// A copy of a descriptor of another process: what it does to the open file, it does there
/// too.
///
/// # Errors
/// The process has ended or may not be traced, has no such descriptor, or this one has as
/// many as it may.
pub fn copy_descriptor(of: &Pidfd, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: integers; returns a new descriptor, which is closed on exec.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, of.as_fd().as_raw_fd(), number, 0u32) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Gives a descriptor another number, at which [`crate::adopt_fd`] finds it. Whatever has
/// that number is closed: nothing of this process may own it.
///
/// # Errors
/// The number is beyond what this process may have.
pub fn put_at(descriptor: OwnedFd, number: RawFd) -> io::Result<()> {
    if descriptor.as_raw_fd() == number {
        let _ = descriptor.into_raw_fd();
        return Ok(());
    }
    // SAFETY: integers. By the contract above, no object here owns what is closed.
    let code = unsafe { libc::dup3(descriptor.as_raw_fd(), number, libc::O_CLOEXEC) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives a descriptor a free number that is `floor` or more.
///
/// # Errors
/// There is none.
pub fn move_above(descriptor: OwnedFd, floor: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: integers; returns a new descriptor.
    let fd = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, floor) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The processes, `pid` left out, that have a thread with the very descriptor table of
/// `pid`. A thread that is past closing its descriptors runs nothing any more.
///
/// # Errors
/// `pid` has ended, or the kernel does not compare tables (`CONFIG_KCMP`).
pub fn sharing_descriptors_with(pid: u32) -> io::Result<Vec<u32>> {
    compare_tables(pid, pid)?;
    let has_it = |process: &u32| shares_descriptors(pid, *process).is_ok_and(|shares| shares);
    Ok(all_processes().into_iter().filter(|process| *process != pid).filter(has_it).collect())
}

/// Whether a thread of `other` has the descriptor table of `pid`.
///
/// # Errors
/// As [`sharing_descriptors_with`].
pub fn shares_descriptors(pid: u32, other: u32) -> io::Result<bool> {
    compare_tables(pid, pid)?;
    let threads = fs::read_dir(format!("/proc/{other}/task")).into_iter().flatten().flatten();
    let mut numbers = threads.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // One that has ended by now has none.
    Ok(numbers.any(|thread| compare_tables(pid, thread).is_ok_and(|same| same)))
}

fn compare_tables(first: u32, second: u32) -> io::Result<bool> {
    const KCMP_FILES: libc::c_int = 2;
    let (first, second) = (first as libc::pid_t, second as libc::pid_t);
    // SAFETY: five integers.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, first, second, KCMP_FILES, 0, 0) };
    if order < 0 { Err(io::Error::last_os_error()) } else { Ok(order == 0) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A child that has a file as its standard input, and lives until it is killed.
    fn child_with(path: &str) -> Child {
        let file = File::open(path).expect("a file");
        Command::new("sleep").arg("60").stdin(Stdio::from(file)).spawn().expect("sleep")
    }

    fn end(mut child: Child) {
        child.kill().expect("it sleeps");
        child.wait().expect("it is a child");
    }

    #[test]
    fn a_childs_descriptor_comes_at_the_number_that_is_wanted() {
        const NUMBER: RawFd = 700;
        let child = child_with("/proc/self/comm");
        let there = descriptors_of(child.id()).expect("its table");
        assert!(there.contains(&OpenThere { number: 0, is_userfaultfd: false }), "{there:?}");
        let pidfd = Pidfd::open(child.id()).expect("a child");
        let copy = copy_descriptor(&pidfd, 0).expect("a copy");
        let copy = move_above(copy, NUMBER - 100).expect("a number");
        assert!(copy.as_raw_fd() >= NUMBER - 100);
        put_at(copy, NUMBER).expect("that number");
        let mut text = String::new();
        let adopted = crate::adopt_fd(NUMBER).expect("it is open");
        File::from(adopted).read_to_string(&mut text).expect("read");
        assert!(!text.is_empty());
        assert!(crate::adopt_fd(NUMBER).is_none(), "it was closed");
        assert!(copy_descriptor(&pidfd, 699).is_err(), "it has no such");
        end(child);
        assert!(copy_descriptor(&pidfd, 0).is_err(), "it has ended");
    }

    #[test]
    fn a_file_is_open_whatever_it_is_called_by_now() {
        let path = std::env::temp_dir().join(format!("strata-open-{}", std::process::id()));
        fs::write(&path, "one").expect("a file");
        let child = child_with(path.to_str().expect("text"));
        assert!(has_open(child.id(), &path).expect("looked at"));
        let moved = path.with_extension("moved");
        fs::rename(&path, &moved).expect("another name");
        fs::write(&path, "one").expect("another file of that name");
        assert!(!has_open(child.id(), &path).expect("looked at"));
        assert!(has_open(child.id(), &moved).expect("looked at"));
        fs::remove_file(&path).expect("clean up");
        assert!(has_open(child.id(), &path).is_err(), "there is none");
        fs::remove_file(&moved).expect("clean up");
        end(child);
    }

    #[test]
    fn a_table_is_shared_by_who_was_made_so() {
        // A child of std has a table of its own.
        let child = child_with("/dev/null");
        let sharing = sharing_descriptors_with(std::process::id()).expect("compared");
        assert!(!sharing.contains(&child.id()));
        assert!(!sharing.contains(&std::process::id()));
        let of_child = sharing_descriptors_with(child.id()).expect("compared");
        assert!(of_child.is_empty(), "{of_child:?}");
        let pid = child.id();
        end(child);
        assert!(sharing_descriptors_with(pid).is_err(), "it has ended");
    }
}
