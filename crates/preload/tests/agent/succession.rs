//! Programs that change who they are, or what they see: their agent follows.

use strata_units::wire::Command;

use crate::daemon::{Daemon, Space};
use crate::managed::{PAGES, all_registered, some};
use crate::program::{Program, agent_descriptors, status};
use crate::{cannot_run, wait_until};

/// Everything about a thread that a change of user changes.
fn identity(pid: i32, thread: u32) -> Vec<String> {
    ["Uid", "Gid", "Groups"].map(|name| status(pid, thread, name)).to_vec()
}

/// The agent is alone, and who the program is; and it works.
fn check(space: &Space, program: &mut Program, memory: u64) -> u32 {
    // On a busy machine the program goes on before it has both.
    wait_until("the agent has both descriptors", || agent_descriptors(space.pid).1.len() == 2);
    let (agent, descriptors) = agent_descriptors(space.pid);
    let main = space.pid.cast_unsigned();
    assert_eq!(identity(space.pid, agent), identity(space.pid, main));
    assert_eq!(status(space.pid, agent, "CapPrm"), "0000000000000000");
    assert_eq!(descriptors.len(), 2, "{descriptors:?}");
    assert!(space.is_quiet(), "the daemon notices nothing");
    space.evict(&some(memory, 2), 0);
    assert_eq!(program.ask("verify"), "0");
    agent
}

#[test]
fn a_program_that_drops_root_keeps_no_thread_that_is_root() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    let first = check(&space, &mut program, memory);
    assert_eq!(program.ask("become 65534"), "0");
    let second = check(&space, &mut program, memory);
    assert_ne!(first, second);
    assert_eq!(status(space.pid, second, "Uid"), "65534\t65534\t65534\t65534");
    // What the kernel made of it stays what it is; and what the program makes of
    // that, too.
    let natively = std::fs::read_to_string("/proc/sys/fs/suid_dumpable").expect("/proc");
    assert_eq!(program.ask("dumpable"), natively.trim());
    assert_eq!(program.ask("open"), "0");
    assert_eq!(program.ask("effective 65534"), "0");
    assert_eq!(program.ask("dumpable"), "1");
    assert_eq!(check(&space, &mut program, memory), second, "nothing has changed");
    let (status, complaint) = program.end();
    assert_eq!((status.code(), complaint.as_str()), (Some(5), ""));
}

#[test]
fn agents_follow_one_another_for_ever() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    program.ask("threads 2");
    for user in [65534, 0].repeat(4) {
        assert_eq!(program.ask(&format!("effective {user}")), "0");
        let agent = check(&space, &mut program, memory);
        let users = status(space.pid, agent, "Uid");
        assert!(users.starts_with(&format!("0\t{user}\t")), "{users}");
    }
    assert_eq!(program.ask("join"), "2");
    space.give(Command::Leave, &[], 0, 0);
    space.done(0);
    assert!(space.closed());
    // Nobody is there to be followed.
    assert_eq!(program.ask("become 65534"), "0");
    assert_eq!(program.end().0.code(), Some(5));
}

#[test]
fn root_directory_and_mounts_are_followed() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    let sees = |thread: u32, what: &str| {
        std::fs::read_link(format!("/proc/{}/task/{thread}/{what}", space.pid)).expect("/proc")
    };
    let main = space.pid.cast_unsigned();
    let own = std::fs::read_link("/proc/self/ns/mnt").expect("/proc");
    assert_eq!(program.ask("mounts"), "0");
    let agent = check(&space, &mut program, memory);
    assert_ne!(sees(main, "ns/mnt"), own);
    assert_eq!(sees(agent, "ns/mnt"), sees(main, "ns/mnt"));
    assert_eq!(program.ask("root /proc"), "0");
    let agent = check(&space, &mut program, memory);
    assert_eq!(sees(agent, "root").to_string_lossy(), "/proc");
}

#[test]
fn who_cannot_be_met_is_not_followed() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    let first = check(&space, &mut program, memory);
    assert_eq!(program.ask("network"), "0");
    wait_until("the other one is gone", || thread_count(space.pid) == 2);
    wait_until("nobody listens for it", || agent_descriptors(space.pid).1.len() == 2);
    assert_eq!(check(&space, &mut program, memory), first);
}

fn thread_count(pid: i32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).expect("it lives").count()
}

#[test]
fn the_child_of_a_vfork_is_not_its_parent() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    let before = check(&space, &mut program, memory);
    assert_eq!(program.ask("vforkbecome 65534"), "7");
    assert_eq!(check(&space, &mut program, memory), before);
}

#[test]
fn a_parked_agent_is_followed_later_and_only_by_the_last() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    let (first, _) = agent_descriptors(space.pid);
    space.give(Command::Park, &[], 0, 0);
    space.done(0);
    assert_eq!(program.ask("effective 12345"), "0");
    assert_eq!(program.ask("effective 0"), "0");
    assert_eq!(program.ask("become 65534"), "0");
    wait_until("one waits", || thread_count(space.pid) == 3);
    assert!(std::fs::exists(format!("/proc/{0}/task/{first}", space.pid)).expect("/proc"));
    space.give(Command::Continue, &[], 0, 0);
    space.done(0);
    wait_until("it has followed", || thread_count(space.pid) == 2);
    assert_ne!(check(&space, &mut program, memory), first);
}

#[test]
fn who_waits_in_a_copy_takes_over_there() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, mut old, memory) = all_registered(PAGES);
    old.evict(&some(memory, 2), 0);
    crate::restored::park(&old);
    assert_eq!(program.ask("become 65534"), "0");
    crate::restored::restore(&old, crate::restored::NEW_TOKEN, None);
    let caller = daemon.accept();
    let (userfaultfd, stored) = old.hand_over();
    let new = caller.adopt(userfaultfd, stored);
    new.settle();
    wait_until("it has followed", || thread_count(new.pid) == 2);
    assert_eq!(program.ask("verify"), "0");
    check(&new, &mut program, memory);
}

#[test]
fn who_has_no_daemon_yet_is_followed_too() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    program.fill(PAGES);
    // The child's first call breaks; it becomes somebody else before the next.
    program.say("forkstay");
    drop(daemon.accept());
    assert_eq!(program.hear(), "here");
    assert_eq!(program.ask("become 65534"), "0");
    let refused = |caller: &crate::daemon::Caller| {
        thread_count(caller.pid) > 2 || {
            let agent = agent_descriptors(caller.pid).0;
            !status(caller.pid, agent, "Uid").starts_with("65534\t")
        }
    };
    let mut caller = daemon.accept();
    let mut calls = 1;
    while refused(&caller) {
        // One that was under way.
        assert!(calls < 8, "the one of before goes on calling");
        calls += 1;
        drop(caller);
        caller = daemon.accept();
    }
    let child = caller.create();
    assert_ne!(child.pid, space.pid);
    assert_eq!(thread_count(child.pid), 2, "the other one has let it begin");
    assert_eq!(program.ask("verify"), "0");
    assert_eq!(program.ask("leave"), "7");
}
