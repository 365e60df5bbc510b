//! What a program could notice of its agent, and does not.

use crate::daemon::{Daemon, open_to_all};
use crate::managed::{PAGES, all_registered, some};
use crate::program::{Program, agent_descriptors, status};
use crate::{cannot_run, raw};

/// `KCMP_VM`, `KCMP_FILES`, `KCMP_FS`.
const MEMORY: u32 = 1;
const FILES: u32 = 2;
const DIRECTORIES: u32 = 3;

#[test]
fn the_c_library_knows_of_one_thread() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let _space = daemon.manage();
    assert_eq!(program.ask("single"), "1");
    // Nor has the child of a fork more.
    program.say("forkstay");
    let _child = daemon.accept().create();
    assert_eq!(program.hear(), "here");
    assert_eq!(program.ask("single"), "1");
    assert_eq!(program.ask("leave"), "7");
}

#[test]
fn nothing_is_shared_but_memory() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let _program = Program::start(&daemon);
    let space = daemon.manage();
    let (agent, _) = agent_descriptors(space.pid);
    let main = space.pid.cast_unsigned();
    assert!(raw::share(main, agent, MEMORY));
    assert!(!raw::share(main, agent, FILES));
    assert!(!raw::share(main, agent, DIRECTORIES));
    // So that a file system can be unmounted that the program was started in.
    let directory = std::fs::read_link(format!("/proc/{main}/task/{agent}/cwd")).expect("/proc");
    assert_eq!(directory.to_string_lossy(), "/");
}

#[test]
fn the_agent_has_no_privilege() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    let (agent, _) = agent_descriptors(space.pid);
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status(space.pid, agent, set), "0000000000000000", "{set}");
    }
    let main = space.pid.cast_unsigned();
    assert_ne!(status(space.pid, main, "CapEff"), "0000000000000000", "the program keeps its own");
    for same in ["Uid", "Gid", "Groups"] {
        assert_eq!(status(space.pid, agent, same), status(space.pid, main, same));
    }
    assert_eq!(program.ask("dumpable"), "1");
}

#[test]
fn a_child_reaches_the_daemon_from_another_root() {
    if cannot_run() {
        return;
    }
    let key = 0xfeed_0000_0000_0000 | u64::from(std::process::id());
    let name = strata_units::wire::back_name(key);
    // Whoever else takes the name is not believed.
    let impostor = raw::listen_abstract(&name, 12345, crate::PATIENCE);
    let daemon = Daemon::with_way_back(key);
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    let memory = program.fill(PAGES);
    space.register(memory, PAGES);
    space.register_transfer();
    space.evict(&some(memory, 2), 0);
    let empty = std::env::temp_dir().join(format!("strata-empty-{}", std::process::id()));
    std::fs::create_dir_all(&empty).expect("a directory");
    assert_eq!(program.ask(&format!("root {}", empty.display())), "0");
    assert_eq!(program.ask("become 65534"), "0");

    program.say("fork");
    let (socket, _) = raw::accept(&impostor, crate::PATIENCE);
    assert!(raw::receive::<strata_units::wire::Hello>(&socket).is_none(), "told a stranger");
    drop((socket, impostor));
    let back = raw::listen_abstract(&name, 0, crate::PATIENCE);
    let child = daemon.accept_at(&back);
    let stored = space.served.stored.lock().expect("no panic").clone();
    let _child = child.adopt(space.forked(), stored);
    assert_eq!(program.hear(), "7");
    // Its own agent, too, when the daemon is a new one.
    let stored = space.lose();
    let _space = daemon.accept_at(&back).resume(stored);
    assert_eq!(program.ask("verify"), "0");
    std::fs::remove_dir(&empty).expect("still empty");
}

#[test]
fn who_takes_the_daemons_path_is_not_believed() {
    if cannot_run() {
        return;
    }
    use std::os::unix::ffi::OsStrExt;
    let (daemon, mut program, space, memory) = all_registered(PAGES);
    space.evict(&some(memory, 2), 0);
    daemon.hide();
    open_to_all(daemon.path().parent().expect("made with one"));
    let path = daemon.path().as_os_str().as_bytes().to_vec();
    let impostor = raw::listen_as(path, 12345, crate::PATIENCE);
    open_to_all(daemon.path());
    program.say("forkstay");
    let (socket, _) = raw::accept(&impostor, crate::PATIENCE);
    assert!(raw::receive::<strata_units::wire::Hello>(&socket).is_none(), "told a stranger");
    assert_eq!(program.hear(), "here");
    assert_eq!(program.ask("leave"), "7");
}

#[test]
fn a_fork_does_not_wait_for_a_daemon_that_is_gone() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, space, memory) = all_registered(PAGES);
    space.evict(&some(memory, 2), 0);
    daemon.hide();
    // The child answers while it has no agent. (What is stored, it waits for.)
    program.say("forkstay");
    assert_eq!(program.hear(), "here");
    assert_eq!(program.ask("leave"), "7");
    drop(space);
    let (_, complaint) = program.end();
    assert!(complaint.contains("cannot reach the daemon"), "{complaint}");
}
