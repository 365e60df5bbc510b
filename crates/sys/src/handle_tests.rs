//! What is held of a process stays that process's, and that memory's.

use std::io::{BufRead, BufReader, Write, pipe};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::process::{Child, Command, Stdio};

use super::*;
use crate::{Disproof, OwnMemory, Userfaultfd};

/// A shell that executes another program when it is told so, by a line.
fn shell() -> Child {
    let script = "read line; exec sleep 60";
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdin(Stdio::piped()).spawn().expect("a shell")
}

fn end(mut child: Child) {
    child.kill().expect("it is there");
    child.wait().expect("it was killed");
}

/// Where a process has its stack, and what is there.
fn stack_of(process: &Process) -> Option<(Range, Vec<u8>)> {
    let mapping = process.maps().ok()?.into_iter().rfind(|mapping| {
        mapping.fileless && !mapping.anonymous && mapping.writable && mapping.private
    })?;
    let mut page = vec![0; PAGE_SIZE];
    let last = mapping.range.end - PAGE_SIZE as u64;
    (process.read(last, &mut page) == PAGE_SIZE).then_some((mapping.range, page))
}

#[test]
fn what_is_held_of_a_process_shows_nothing_of_what_it_executes() {
    let mut child = shell();
    let held = Process::open(child.id()).expect("a child");
    assert!(stack_of(&held).is_some(), "the shell's");
    assert!(held.mapping_flags().is_ok_and(|flags| !flags.is_empty()));
    let executes = child.stdin.take().expect("piped").write_all(b"\n");
    executes.expect("it reads");
    let hangs = std::time::Instant::now() + Duration::from_secs(60);
    while held.read_file(c"comm").expect("it lives") != "sleep\n" {
        assert!(std::time::Instant::now() < hangs, "it executes nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
    let now = Process::open(child.id()).expect("the same process");
    let (range, page) = stack_of(&now).expect("the new program's");
    let mut seen = vec![0; page.len()];
    assert_eq!(held.read(range.end - PAGE_SIZE as u64, &mut seen), 0, "of the new program");
    assert!(held.maps().is_err() && held.mapping_flags().is_err());
    assert!(held.mapping_uses().is_err());
    let mut pages = 0;
    assert!(held.page_presence(range, |_, _| pages += 1).is_err());
    assert!(held.present(range, |_| pages += 1).is_err());
    assert!(held.protection(range, |_, _| pages += 1).is_err());
    assert!(held.is_page_present(range.start).is_err());
    assert_eq!(pages, 0);
    // The process itself is the same.
    assert!(!held.has_exited() && held.anonymous_rss().is_ok());
    assert_eq!(held.by_number(|pid| pid), Some(child.id()));
    end(child);
}

#[test]
fn who_has_ended_is_not_who_has_its_number() {
    let mut child = shell();
    let held = Process::open(child.id()).expect("a child");
    let (stack, _) = stack_of(&held).expect("the shell's");
    child.kill().expect("it reads");
    child.wait().expect("it was killed");
    assert!(held.has_exited() && !held.pidfd().signal(0));
    assert_eq!(held.by_number(|pid| pid), None);
    assert!(held.maps().is_err() && held.anonymous_rss().is_err());
    assert!(held.page_presence(stack, |_, _| ()).is_err() && held.present(stack, |_| ()).is_err());
    assert!(held.stack_pointers().is_empty() && held.processor_time().is_none());
    assert!(Process::open(child.id()).is_err(), "nobody has its number yet");
    // As if somebody had it: what is asked of the number is not answered.
    let own = Process::open(std::process::id()).expect("this process");
    let mut fds = held.descriptors();
    fds[0] = held.pidfd().as_fd().as_raw_fd();
    // SAFETY: copies of descriptors that `held` keeps open.
    let copies = fds.map(|fd| unsafe { OwnedFd::from_raw_fd(libc::dup(fd)) });
    let reused = Process::adopt(own.pid(), copies);
    assert_eq!(reused.by_number(|pid| pid), None);
    assert!(!reused.shares_memory_with(&own) && !own.shares_memory_with(&reused));
    assert!(!reused.pidfd().signal(0), "nobody is signalled");
    Process::open(0).expect_err("not visible");
}

#[test]
fn one_address_space_is_told_from_another() {
    let child = shell();
    let [own, again] = [(); 2].map(|()| Process::open(std::process::id()).expect("this process"));
    let other = Process::open(child.id()).expect("a child");
    assert!(own.shares_memory_with(&again) && !own.shares_memory_with(&other));
    end(child);
}

#[test]
fn a_userfaultfd_is_proved_by_what_it_does() {
    let uffd = match Userfaultfd::for_own_process() {
        Ok(uffd) => uffd,
        Err(error) => return println!("skipped: no userfaultfd here: {error:?}"),
    };
    let memory = OwnMemory::create(4).expect("memory");
    let child = shell();
    let own = Process::open(std::process::id()).expect("this process");
    let other = Process::open(child.id()).expect("a child");
    assert_eq!(other.prove(&uffd, memory.address(0), &[]), Err(Disproof::Different));
    assert_eq!(own.prove(&uffd, memory.address(1), &[&other]), Ok(()));
    // Of a handshake that was broken off the page is there already.
    assert_eq!(own.prove(&uffd, memory.address(1), &[]), Ok(()));
    assert_eq!(other.prove(&uffd, memory.address(1), &[]), Err(Disproof::Different));
    let again = Process::open(std::process::id()).expect("this process");
    let known = again.prove(&uffd, memory.address(2), &[&other, &own]);
    assert_eq!(known, Err(Disproof::Known(1)));
    assert_eq!(own.prove(&uffd, 0, &[]), Err(Disproof::NoPage));
    // Nothing is left registered or protected.
    for page in 0..4 {
        memory.write_page(page, &strata_units::PageBuffer([7; PAGE_SIZE]));
    }
    end(child);
}

#[test]
fn descriptors_of_two_address_spaces_are_none_of_either() {
    let uffd = match Userfaultfd::for_own_process() {
        Ok(uffd) => uffd,
        Err(error) => return println!("skipped: no userfaultfd here: {error:?}"),
    };
    let memory = OwnMemory::create(3).expect("memory");
    let child = shell();
    let other = Process::open(child.id()).expect("a child");
    let own = || Process::open(std::process::id()).expect("this process");
    // As if it had executed another program between two openings.
    let changed = own();
    *alone(&changed.last) = Some(other.open_file(c"pagemap").expect("its page tables"));
    assert_eq!(changed.prove(&uffd, memory.address(0), &[]), Err(Disproof::Different));
    let changed = Process { memory: other.open_file(c"mem").expect("its memory"), ..own() };
    assert_eq!(changed.prove(&uffd, memory.address(1), &[]), Err(Disproof::Different));
    let changed = Process { pagemap: other.open_file(c"pagemap").expect("as above"), ..own() };
    assert_eq!(changed.prove(&uffd, memory.address(2), &[]), Err(Disproof::Different));
    end(child);
}

#[test]
fn only_what_the_kernel_calls_a_userfaultfd_is_one() {
    let directory = std::env::temp_dir().join(format!("strata-uffd-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let named = directory.join("anon_inode:[userfaultfd]");
    std::fs::write(&named, [0; 64]).expect("a file");
    let (reader, _writer) = pipe().expect("a pipe");
    let strangers: [OwnedFd; 4] = [
        File::open(&named).expect("the file").into(),
        crate::EventFd::new().expect("an eventfd").as_fd().try_clone_to_owned().expect("a copy"),
        reader.into(),
        File::open("/dev/null").expect("a device").into(),
    ];
    for fd in strangers {
        assert!(Userfaultfd::of_stranger(fd).is_err());
    }
    std::fs::remove_dir_all(&directory).expect("removed");
    if let Ok(uffd) = Userfaultfd::for_own_process() {
        let copy = uffd.try_clone().expect("a copy").into_raw_fd();
        // SAFETY: a number that nobody else owns.
        assert!(Userfaultfd::of_stranger(unsafe { OwnedFd::from_raw_fd(copy) }).is_ok());
    }
}

#[test]
fn a_memory_map_is_whole_while_others_read_it() {
    let own = Process::open(std::process::id()).expect("this process");
    let text = read_alone(&own.maps).expect("this process");
    assert!(BufReader::new(text.as_bytes()).lines().count() > 10);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let text = read_alone(&own.maps).expect("this process");
                    let torn = text.lines().find(|line| parse_mapping(line).is_none());
                    assert_eq!(torn, None);
                }
            });
        }
    });
}
