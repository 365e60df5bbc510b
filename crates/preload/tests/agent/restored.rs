//! Parked agents, and what they do in a copy of their process. The copy is the
//! process itself here, stopped and patched as a restorer patches a copy; what
//! only a real copy has, descriptors of the program's where the agent had its own,
//! is had by a filter on system calls.

use strata_units::PAGE_SIZE;
use strata_units::wire::restart::{RESTART_PARKED, RESTART_RESTORED, RestartError, patch_restart};
use strata_units::wire::{Command, HelloKind, Verdict};

use crate::daemon::{Daemon, Orphan, Space};
use crate::managed::{PAGES, all_registered, some};
use crate::program::{Program, agent_descriptors, private_mappings, stop};
use crate::{cannot_run, raw};

/// The tenant's token in the new life.
pub(crate) const NEW_TOKEN: u64 = 0xcd;

fn restart_page(pid: i32, address: u64) -> Vec<u8> {
    raw::read_memory(pid, address, PAGE_SIZE).expect("readable")
}

/// `Restart::state` in a page.
fn state(pid: i32, address: u64) -> u32 {
    let page = restart_page(pid, address);
    u32::from_le_bytes(*page[8..].first_chunk().expect("four bytes"))
}

pub(crate) fn park(space: &Space) {
    space.give(Command::Park, &[], 0, 0);
    space.done(0);
    assert_eq!(state(space.pid, space.hello.restart), RESTART_PARKED);
}

/// Makes a process with a parked agent what a restore makes of its dump.
pub(crate) fn restore(space: &Space, token: u64, daemon: Option<&Daemon>) {
    stop(space.pid);
    let mut page = restart_page(space.pid, space.hello.restart);
    let path = daemon.map(|daemon| daemon.path().as_os_str().as_encoded_bytes());
    patch_restart(&mut page, token, path).expect("parked");
    raw::write_memory(space.pid, space.hello.restart, &page);
    raw::signal(space.pid, libc::SIGCONT);
}

#[test]
fn a_parked_agent_goes_on_with_the_next_command() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    let unpatched = restart_page(space.pid, space.hello.restart);
    assert_eq!(
        patch_restart(&mut unpatched.clone(), 1, None),
        Err(RestartError::NotParked),
        "the agent obeys"
    );
    for end in [Command::Move, Command::Continue, Command::Discard] {
        park(&space);
        // The program's part of the contract goes on meanwhile.
        assert_eq!(program.ask("threads 2").split_whitespace().count(), 2);
        assert_eq!(program.ask("join"), "2");
        match end {
            Command::Move => space.evict(&some(memory, 2), 0),
            end => {
                space.give(end, &[], 0, 0);
                space.done(0);
            }
        }
        assert!(restart_page(space.pid, space.hello.restart) == unpatched);
        assert_eq!(program.ask("verify"), "0");
        space.evict(&some(memory, 3), 64);
        assert_eq!(program.ask("verify"), "0");
    }
    // Nothing to end, nothing to do.
    space.give(Command::Continue, &[memory], 0, 1);
    assert_eq!(space.done(1), [strata_units::wire::RESULT_PENDING]);
    assert_eq!(program.end().0.code(), Some(5));
}

#[test]
fn a_parked_agent_does_not_look_at_its_socket() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, mut space, memory) = all_registered(PAGES);
    park(&space);
    space.hang_up();
    // An obeying one calls again within a second.
    assert!(!daemon.is_called(3000));
    space.give(Command::Continue, &[], 0, 0);
    space.done(0);
    let caller = daemon.accept();
    assert_eq!(caller.hello.kind, HelloKind::Resumed as u32);
    let space = caller.resume(space.lose());
    space.settle();
    space.evict(&some(memory, 2), 0);
    assert_eq!(program.ask("verify"), "0");
}

#[test]
fn a_child_forked_while_parked_is_not_parked() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, space, memory) = all_registered(PAGES);
    park(&space);
    program.say("forkstay");
    let caller = daemon.accept();
    assert_eq!(caller.hello.kind, HelloKind::Forked as u32);
    assert_eq!(caller.hello.restart, space.hello.restart);
    assert_eq!(state(caller.pid, caller.hello.restart), 0);
    let child = caller.adopt(space.forked(), Default::default());
    child.settle();
    assert_eq!(program.hear(), "here");
    let shared = &some(memory, 8);
    assert_eq!(child.batch(Command::Populate, shared, 0), vec![0; shared.len()]);
    child.evict(shared, 0);
    assert_eq!(program.ask("verify"), "0");
    assert_eq!(state(space.pid, space.hello.restart), RESTART_PARKED, "the parent still is");
    assert_eq!(program.ask("leave"), "7");
}

#[test]
fn a_copy_begins_anew_where_it_is_told() {
    if cannot_run() {
        return;
    }
    let (old_daemon, mut program, mut old, memory) = all_registered(PAGES);
    let new_daemon = Daemon::new();
    program.ask("threads 3");
    program.ask("mutex");
    let (threads, pinned) = (old.threads(), old.pinned());
    assert_eq!((threads.len(), pinned.len()), (4, 2));
    old.evict(&some(memory, 2), 0);
    park(&old);
    // A restore registers every private anonymous mapping; the agent's own memory
    // is to be whole and taken back before the copy runs.
    for (start, end) in private_mappings(old.pid) {
        old.register(start, (end - start) as usize / PAGE_SIZE);
    }
    let own = (old.hello.own_end - old.hello.own_start) as usize;
    raw::unregister(&old.served.userfaultfd, old.hello.own_start, own);
    restore(&old, NEW_TOKEN, Some(&new_daemon));
    // Twice without success: a connection that breaks, and a refusal.
    let caller = new_daemon.accept();
    assert_eq!(caller.hello.kind, HelloKind::Restored as u32);
    drop(caller);
    let caller = new_daemon.accept();
    assert_eq!(caller.hello.kind, HelloKind::Restored as u32);
    caller.welcome(Verdict::Unmanaged, &[]);
    drop(caller);
    let caller = new_daemon.accept();
    let (hello, before) = (caller.hello, old.hello);
    assert_eq!((hello.kind, hello.token), (HelloKind::Restored as u32, NEW_TOKEN));
    assert_eq!(
        (hello.transfer, hello.own_start, hello.own_end, hello.restart),
        (before.transfer, before.own_start, before.own_end, before.restart)
    );
    assert!(caller.userfaultfd.is_none());
    raw::register(&old.served.userfaultfd, hello.probe, PAGE_SIZE).expect("a page of its own");

    let (userfaultfd, stored) = old.hand_over();
    let mut new = caller.adopt(userfaultfd, stored);
    new.settle();
    assert_eq!(state(new.pid, hello.restart), 0);
    assert!(new.threads() == threads);
    assert_eq!(new.pinned(), pinned);
    assert!(old.closed(), "the descriptors of before were its own here");
    assert_eq!(program.ask("verify"), "0");
    assert_eq!(agent_descriptors(new.pid).1.len(), 2);
    new.evict(&some(memory, 3), 64);
    assert_eq!(program.ask("verify"), "0");

    // Threads are told to the new block, and only there.
    assert_eq!(program.ask("join"), "3");
    program.ask("threads 5");
    assert_eq!(new.threads().len(), 6);
    assert!(old.threads() == threads);
    assert_eq!(program.ask("join"), "5");

    new.evict(&some(memory, 2), 0);
    program.say("fork");
    let userfaultfd = new.forked();
    let stored = new.served.stored.lock().expect("no panic").clone();
    let orphan = Orphan::serve(userfaultfd, stored);
    let child = new_daemon.accept();
    assert_eq!((child.hello.kind, child.hello.token), (HelloKind::Forked as u32, NEW_TOKEN));
    let (userfaultfd, stored) = orphan.hand_over();
    let _child = child.adopt(userfaultfd, stored);
    assert_eq!(program.hear(), "7");

    // A copy of the copy, which keeps what it is not told anew.
    park(&new);
    restore(&new, 0, None);
    let caller = new_daemon.accept();
    let hello = caller.hello;
    assert_eq!((hello.kind, hello.token), (HelloKind::Restored as u32, NEW_TOKEN));
    let (userfaultfd, stored) = new.hand_over();
    let newest = caller.adopt(userfaultfd, stored);
    newest.give(Command::Discard, &[], 0, 0);
    newest.done(0);
    assert_eq!(newest.pinned(), pinned);
    assert_eq!(program.ask("verify"), "0");
    assert!(!old_daemon.is_called(0));

    newest.give(Command::Leave, &[], 0, 0);
    newest.done(0);
    assert!(newest.closed());
    let (status, complaint) = program.end();
    assert_eq!((status.code(), complaint.as_str()), (Some(5), ""));
}

#[test]
fn a_child_of_a_copy_calls_where_the_copy_is_to_call() {
    if cannot_run() {
        return;
    }
    let (old_daemon, mut program, space, memory) = all_registered(PAGES);
    let new_daemon = Daemon::new();
    // What a thread finds that forks before the agent has looked: an obeying
    // agent never does.
    let mut page = restart_page(space.pid, space.hello.restart);
    page[8] = RESTART_PARKED as u8;
    let path = new_daemon.path().as_os_str().as_encoded_bytes();
    patch_restart(&mut page, NEW_TOKEN, Some(path)).expect("so it says");
    raw::write_memory(space.pid, space.hello.restart, &page);

    program.say("forkstay");
    let caller = new_daemon.accept();
    let hello = caller.hello;
    assert_eq!((hello.kind, hello.token), (HelloKind::Forked as u32, NEW_TOKEN));
    assert_eq!(state(caller.pid, hello.restart), 0);
    assert_eq!(state(space.pid, hello.restart), RESTART_RESTORED);
    let child = caller.adopt(space.forked(), Default::default());
    child.settle();
    assert_eq!(program.hear(), "here");
    park(&child);
    let shared = &some(memory, 8);
    assert_eq!(child.batch(Command::Populate, shared, 0), vec![0; shared.len()]);
    child.evict(shared, 0);
    assert_eq!(program.ask("verify"), "0");
    assert_eq!(program.ask("leave"), "7");
    assert!(!old_daemon.is_called(0));
}

#[test]
fn the_descriptors_of_before_are_neither_used_nor_closed() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start_sharing(&daemon);
    let mut old = daemon.manage();
    let memory = program.fill(PAGES);
    old.register(memory, PAGES);
    old.register_transfer();
    old.evict(&some(memory, 2), 0);
    let (_, before) = agent_descriptors(old.pid);
    assert!(before.len() > 2, "files of the program's are there too: {before:?}");

    park(&old);
    restore(&old, 0, None);
    let caller = daemon.accept();
    assert_eq!(caller.hello.kind, HelloKind::Restored as u32);
    let (userfaultfd, stored) = old.hand_over();
    let new = caller.adopt(userfaultfd, stored);
    new.settle();
    assert_eq!(program.ask("verify"), "0");
    new.evict(&some(memory, 3), 0);
    assert_eq!(program.ask("verify"), "0");

    let (_, after) = agent_descriptors(new.pid);
    assert!(before.iter().all(|descriptor| after.contains(descriptor)), "{before:?} {after:?}");
    assert_eq!(after.len(), before.len() + 2, "{before:?} {after:?}");
    assert!(old.is_quiet());
}
