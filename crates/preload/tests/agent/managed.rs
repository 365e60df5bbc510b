//! Programs that are managed.

use std::sync::atomic::Ordering;

use strata_units::PAGE_SIZE;
use strata_units::wire::{
    Command, HelloKind, READER_AWAITED, RESULT_CANCELLED, RESULT_PENDING, TRANSFER_PAGES, Verdict,
};

use crate::daemon::{Daemon, Space};
use crate::program::{
    Program, agent_descriptors, blocked_signals, early_library, library, thread_names,
};
use crate::{cannot_run, raw, wait_until};

pub(crate) const PAGES: usize = 64;

/// A managed program with `pages` filled pages at the address in the last place;
/// they and its transfer range are registered.
pub(crate) fn all_registered(pages: usize) -> (Daemon, Program, Space, u64) {
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    let memory = program.fill(pages);
    space.register(memory, pages);
    space.register_transfer();
    (daemon, program, space, memory)
}

/// Every `step`-th page of a filled range.
pub(crate) fn some(address: u64, step: usize) -> Vec<u64> {
    (0..PAGES).step_by(step).map(|page| address + (page * PAGE_SIZE) as u64).collect()
}

#[test]
fn hello_says_what_the_contract_says() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    let hello = space.hello;
    assert_eq!(space.pid, program.pid());
    assert_eq!(hello.pid, space.pid.cast_unsigned());
    assert_eq!(hello.token, 0xab);
    assert_eq!(hello.transfer % PAGE_SIZE as u64, 0);
    assert!(hello.own_start < hello.own_end && hello.own_end - hello.own_start < 1 << 20);
    // The main thread is known before the program runs.
    let tid = space.pid.cast_unsigned();
    assert_eq!(space.threads().values().collect::<Vec<_>>(), [&(0, tid)]);
    assert_eq!(program.ask("verify"), "0");
    wait_until("the probe page is unmapped", || {
        raw::read_memory(space.pid, hello.probe, 1) == Err(libc::EFAULT)
    });
    let (status, complaint) = program.end();
    assert_eq!((status.code(), complaint.as_str()), (Some(5), ""));
    assert!(space.closed());
}

#[test]
fn moved_pages_come_back_as_they_were() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);

    let pages = some(memory, 2);
    let results = space.batch(Command::Move, &pages, 0);
    assert_eq!(results, vec![0; pages.len()]);
    // A slot that is in use, and one that does not exist.
    assert_eq!(space.batch(Command::Move, &[memory + PAGE_SIZE as u64], 0), [-libc::EEXIST]);
    assert_eq!(space.batch(Command::Move, &[memory + PAGE_SIZE as u64], 512), [-libc::EINVAL]);
    // A page that is not there any more.
    assert_eq!(space.batch(Command::Move, &pages[..1], 100), [-libc::ENOENT]);

    let bytes = pages.len() * PAGE_SIZE;
    let content = raw::read_memory(space.pid, space.hello.transfer, bytes).expect("readable");
    for (page, content) in pages.iter().zip(content.chunks(PAGE_SIZE)) {
        space.served.stored.lock().expect("no panic").insert(*page, content.to_vec());
    }
    space.give(Command::Discard, &[], 0, pages.len() as u32);
    space.done(0);
    assert_eq!(program.ask("verify"), "0");
    assert!(space.served.stored.lock().expect("no panic").is_empty(), "nothing was wanted");

    // The discarded slots take pages again.
    space.evict(&some(memory, 3), 0);
    assert_eq!(program.ask("verify"), "0");
}

#[test]
fn neighbours_go_together_and_each_has_its_own_result() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    let page = |index: usize| memory + (index * PAGE_SIZE) as u64;
    let keep = |index: usize, slot: usize| {
        let there = space.hello.transfer + (slot * PAGE_SIZE) as u64;
        let content = raw::read_memory(space.pid, there, PAGE_SIZE).expect("readable");
        space.served.stored.lock().expect("no panic").insert(page(index), content);
    };
    // Page 5 is gone already, and lies in slot 30.
    assert_eq!(space.batch(Command::Move, &[page(5)], 30), [0]);
    keep(5, 30);
    // Twenty in a row, with a hole; slots 20 to 39, of which one is in use.
    let row: Vec<u64> = (0..20).map(page).collect();
    let mut expected = vec![0; 20];
    expected[5] = -libc::ENOENT;
    expected[10] = -libc::EEXIST;
    assert_eq!(space.batch(Command::Move, &row, 20), expected);
    for index in (0..20).filter(|&index| expected[index] == 0) {
        keep(index, 20 + index);
    }
    // A row that is longer than what is left of the transfer range.
    let last = TRANSFER_PAGES - 2;
    let row: Vec<u64> = (30..34).map(page).collect();
    let expected = [0, 0, -libc::EINVAL, -libc::EINVAL];
    assert_eq!(space.batch(Command::Move, &row, last as u32), expected);
    keep(30, last);
    keep(31, last + 1);
    space.give(Command::Discard, &[], 0, TRANSFER_PAGES as u32);
    space.done(0);
    assert_eq!(program.ask("verify"), "0");
}

#[test]
fn a_busy_program_sees_no_wrong_byte() {
    if cannot_run() {
        return;
    }
    const STRESS_PAGES: usize = 256;
    let (_daemon, mut program, space, memory) = all_registered(STRESS_PAGES);
    let pages = (0..STRESS_PAGES).map(|page| memory + (page * PAGE_SIZE) as u64);
    space.served.resident.lock().expect("no panic").extend(pages);

    program.say("stress 10000");
    // It gives the program back, which is to live as long as the moving does.
    let answer = std::thread::spawn(move || (program.hear(), program));
    let mut evicted = 0;
    while !answer.is_finished() {
        evicted += space.evict_some();
    }
    let (wrong, _program) = answer.join().expect("no panic");
    assert_eq!(wrong, "0", "pages with wrong bytes");
    assert!(evicted > 2 * STRESS_PAGES, "only {evicted} evicted: that was no test");
}

#[test]
fn a_batch_ends_where_the_daemon_knows_more() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    let control = space.control();
    let pages = some(memory, 8);

    space.freshen();
    control.batch_epoch.fetch_add(1, Ordering::Relaxed);
    space.give(Command::Move, &pages, 0, pages.len() as u32);
    assert_eq!(space.done(pages.len()), vec![RESULT_CANCELLED; pages.len()]);

    // A batch made before a thread was.
    space.freshen();
    program.ask("threads 1");
    space.give(Command::Move, &pages, 0, pages.len() as u32);
    assert_eq!(space.done(pages.len()), vec![RESULT_CANCELLED; pages.len()]);
    assert_eq!(program.ask("join"), "1");

    // A batch that is given while the daemon takes messages waits, and sees
    // what they said.
    space.freshen();
    control.reader_busy.store(1, Ordering::SeqCst);
    space.give(Command::Move, &pages, 0, pages.len() as u32);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(control.mover_busy.load(Ordering::SeqCst), 0);
    control.epoch.fetch_add(1, Ordering::SeqCst);
    assert_eq!(control.reader_busy.swap(0, Ordering::SeqCst), READER_AWAITED);
    raw::futex_wake(&control.reader_busy);
    assert_eq!(space.done(pages.len()), vec![RESULT_CANCELLED; pages.len()]);

    assert_eq!(program.ask("verify"), "0");
    assert_eq!(space.batch(Command::Move, &pages[..1], 0), [0]);
}

#[test]
fn a_program_that_closes_and_overwrites_everything_is_not_hurt() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    let descriptors = program.ask("descriptors");
    let ours = ["userfaultfd", "memfd", "socket"];
    assert!(!ours.iter().any(|name| descriptors.contains(name)), "{descriptors}");

    assert_eq!(program.ask("wipe"), "wiped");
    assert_eq!(program.ask("group"), "0");
    let memory = program.fill(PAGES);
    space.register(memory, PAGES);
    space.register_transfer();
    space.evict(&some(memory, 1), 0);
    assert_eq!(program.ask("verify"), "0");

    // The environment was read before it was overwritten.
    program.say("fork");
    let child = daemon.accept();
    assert_eq!((child.hello.token, child.hello.kind), (0xab, HelloKind::Forked as u32));
    let userfaultfd = space.forked();
    let _child = child.adopt(userfaultfd, Default::default());
    assert_eq!(program.hear(), "7");
}

#[test]
fn a_forked_child_has_its_own_agent_before_fork_returns() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, space, memory) = all_registered(PAGES);
    space.evict(&some(memory, 2), 0);
    let before = space.threads();

    program.say("forkthreads");
    let caller = daemon.accept();
    let (hello, pid) = (caller.hello, caller.pid);
    assert_eq!(hello.kind, HelloKind::Forked as u32);
    assert_ne!(pid, program.pid());
    assert_eq!(hello.transfer, space.hello.transfer);
    // Which of the forked userfaultfds is this child's? The one on which its
    // probe page can be registered.
    let userfaultfd = space.forked();
    raw::register(&userfaultfd, hello.probe, PAGE_SIZE).expect("the child's own userfaultfd");
    assert_eq!(raw::register(&space.served.userfaultfd, hello.probe, PAGE_SIZE), Err(libc::EINVAL));

    let stored = space.served.stored.lock().expect("no panic").clone();
    let child = caller.adopt(userfaultfd, stored);
    // Its two threads answer first (on the same standard output). 7: all pages
    // are right, evicted ones included.
    let blocks = program.hear();
    assert_eq!(blocks.split_whitespace().count(), 2, "{blocks}");
    assert_eq!(program.hear(), "2");
    assert_eq!(program.hear(), "7");
    // The child's threads are in the child's block, and only there.
    let threads = child.threads();
    assert_eq!(threads.len(), 3);
    assert!(threads.values().any(|(_, tid)| *tid == pid.cast_unsigned()));
    assert_eq!(space.threads(), before);
    assert_eq!(program.ask("verify"), "0");
}

#[test]
fn a_forked_child_can_be_created_anew() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    program.fill(PAGES);
    // Nothing is registered: the kernel makes no userfaultfd for the child.
    program.say("fork");
    let child = daemon.accept();
    assert_eq!(child.hello.kind, HelloKind::Forked as u32);
    let child = child.create();
    assert_eq!(program.hear(), "7");
    assert_ne!(child.pid, space.pid);
}

#[test]
fn a_childs_agent_tries_until_it_is_heard() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, space, memory) = all_registered(PAGES);
    space.evict(&some(memory, 2), 0);

    program.say("fork");
    drop(daemon.accept());
    let caller = daemon.accept();
    assert_eq!(caller.hello.kind, HelloKind::Forked as u32);
    let stored = space.served.stored.lock().expect("no panic").clone();
    let _child = caller.adopt(space.forked(), stored);
    assert_eq!(program.hear(), "7");
}

#[test]
fn an_allocator_that_is_locked_across_fork_is_no_deadlock() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start_other(&daemon, "allocator");
    let _space = daemon.manage();
    let child = daemon.accept();
    assert_eq!(child.hello.kind, HelloKind::Forked as u32);
    let _child = child.create();
    assert_eq!(program.end().0.code(), Some(7));
}

#[test]
fn a_fork_of_the_c_library_has_an_agent_too() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start_other(&daemon, "daemonise");
    let space = daemon.manage();
    let child = daemon.accept();
    assert_eq!(child.hello.kind, HelloKind::Forked as u32);
    assert_ne!(child.pid, space.pid);
    let _child = child.create();
    assert_eq!(program.hear(), "daemon");
}

#[test]
fn threads_are_recorded_and_end_in_every_way() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    let sequence = space.control().thread_seq.load(Ordering::SeqCst);
    let blocks = program.ask("threads 20");
    let blocks: Vec<u64> = blocks
        .split_whitespace()
        .map(|block| u64::from_str_radix(block, 16).expect("a control block"))
        .collect();
    assert_eq!(blocks.len(), 20);
    let threads = space.threads();
    for block in &blocks {
        let (stack, tid) = threads.get(block).expect("recorded");
        assert!(
            stack < block && block - stack < 8 << 20,
            "{stack:#x} is on no stack of {block:#x}"
        );
        assert!(std::fs::exists(format!("/proc/{}/task/{tid}", space.pid)).expect("/proc"));
    }
    assert!(space.control().thread_seq.load(Ordering::SeqCst) >= sequence + 20);
    assert_eq!(program.ask("join"), "20");
    assert_eq!(program.ask("ends"), "41 cancelled -42");
    assert_eq!(program.end().0.code(), Some(5));
}

#[test]
fn threads_of_earlier_constructors_are_recorded() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let early = early_library();
    let preload = format!("{} {}", library().display(), early.display());
    let mut program = Program::start_at(&daemon, &preload);
    let space = daemon.manage();
    program.ask("verify");
    wait_until("the early thread is recorded", || space.threads().len() == 2);
    let mut tids: Vec<u32> = space.threads().values().map(|(_, tid)| *tid).collect();
    tids.retain(|tid| std::fs::exists(format!("/proc/{}/task/{tid}", space.pid)).expect("/proc"));
    assert_eq!(tids.len(), 2);
}

#[test]
fn the_last_thread_ends_the_process_as_without_an_agent() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    assert_eq!(program.ask("mainexit"), "leaving");
    // The socket closes when the last thread, the agent, is gone.
    assert!(space.closed());
    assert_eq!(program.end().0.code(), Some(0));
}

#[test]
fn pages_of_inheriting_mutexes_are_told() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    let sequence = space.control().thread_seq.load(Ordering::SeqCst);
    let mutex = u64::from_str_radix(&program.ask("mutex"), 16).expect("an address");
    let page = mutex & !(PAGE_SIZE as u64 - 1);
    assert_eq!(space.pinned(), [page, page + PAGE_SIZE as u64]);
    // Batches made without that knowledge are cancelled.
    assert_ne!(space.control().thread_seq.load(Ordering::SeqCst), sequence);

    // A child inherits the mutex, and its record.
    program.say("fork");
    let child = daemon.accept().create();
    assert_eq!(program.hear(), "7");
    assert_eq!(child.pinned(), space.pinned());

    assert_eq!(program.ask("destroy"), "0");
    assert_eq!(space.pinned(), []);
}

#[test]
fn the_agent_comes_back_and_leaves_when_told() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, space, memory) = all_registered(PAGES);
    program.ask("threads 3");
    program.ask("mutex");
    space.evict(&some(memory, 2), 0);
    let (threads, pinned) = (space.threads(), space.pinned());
    assert_eq!((threads.len(), pinned.len()), (4, 2));
    let stored = space.lose();

    // Refused twice in a row: once by a daemon that hangs up, once by one that
    // does not know it.
    let caller = daemon.accept();
    assert_eq!(caller.hello.kind, HelloKind::Resumed as u32);
    drop(caller);
    let caller = daemon.accept();
    caller.welcome(Verdict::Unmanaged, &[]);
    drop(caller);

    let space = daemon.accept().resume(stored);
    wait_until("records are there again", || {
        (space.threads(), space.pinned()) == (threads.clone(), pinned.clone())
    });
    assert_eq!(program.ask("verify"), "0");
    assert_eq!(program.ask("join"), "3");
    space.evict(&some(memory, 4), 64);
    assert_eq!(program.ask("verify"), "0");

    space.give(Command::Leave, &[], 0, 0);
    space.done(0);
    assert!(space.closed());
    wait_until("the agent is gone", || {
        !thread_names(space.pid).contains(&"strata-agent".to_owned())
    });
    assert_eq!(program.ask("ends"), "41 cancelled -42");
    // Its children are not managed either: nobody calls.
    assert_eq!(program.ask("fork"), "7");
    let (status, complaint) = program.end();
    assert_eq!((status.code(), complaint.as_str()), (Some(5), ""));
}

#[test]
fn a_command_survives_the_daemon() {
    if cannot_run() {
        return;
    }
    let (daemon, program, mut space, memory) = all_registered(PAGES);
    let pages = some(memory, 32);
    assert_eq!(space.batch(Command::Move, &pages, 0), [0, 0]);

    // The daemon dies while it keeps the agent from moving.
    space.stop();
    let control = space.control();
    space.freshen();
    control.reader_busy.store(1, Ordering::SeqCst);
    space.give(Command::Move, &[memory + PAGE_SIZE as u64, pages[0]], 2, 2);
    // The second entry has been dealt with before: it is not to be touched.
    control.entries[1].result.store(0, Ordering::SeqCst);
    let block = space.control_block();
    let stored = space.lose();

    let caller = daemon.accept();
    assert_eq!(control.entries[0].result.load(Ordering::SeqCst), RESULT_PENDING);
    control.reader_busy.store(0, Ordering::SeqCst);
    let space = caller.resume_with(block, stored);
    // What was left is not done on knowledge from before.
    assert_eq!(space.done(2), [RESULT_CANCELLED, 0]);
    space.give(Command::Discard, &[], 0, 2);
    space.done(0);
    assert_eq!(space.batch(Command::Move, &[memory + PAGE_SIZE as u64], 0), [0]);
    assert_eq!(space.pid, program.pid());
}

#[test]
fn locked_pages_stay() {
    if cannot_run() {
        return;
    }
    let (_daemon, mut program, space, memory) = all_registered(PAGES);
    space.evict(&[memory], 0);
    // mlockall covers the transfer range, too, and brings every page back.
    assert_eq!(program.ask("lock"), "0");
    let next = memory + PAGE_SIZE as u64;
    space.give(Command::Discard, &[], 0, TRANSFER_PAGES as u32);
    space.done(0);
    assert_eq!(space.batch(Command::Move, &[next], 1), [-libc::EINVAL]);
    assert_eq!(program.ask("verify"), "0");
}

#[test]
fn the_agent_has_two_descriptors_of_its_own() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let _program = Program::start(&daemon);
    let space = daemon.manage();
    let (_, descriptors) = agent_descriptors(space.pid);
    let mut kinds: Vec<&str> = descriptors
        .iter()
        .map(|(_, target)| target.split(['[', ']', ':']).find(|s| !s.is_empty()).unwrap_or(""))
        .collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["anon_inode", "socket"], "{descriptors:?}");
}

#[test]
fn the_agent_takes_no_signals_of_the_program() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    // Its main thread has signals blocked as long as it is making the agent.
    program.ask("verify");
    // SIGKILL and SIGSTOP cannot be blocked. The C library, whose own are among
    // them, does not know of this thread.
    const ALL: u64 = !(1 << 8 | 1 << 18);
    assert_eq!(blocked_signals(space.pid, agent_descriptors(space.pid).0), ALL);
    assert_eq!(blocked_signals(space.pid, space.pid.cast_unsigned()), 0);
}

/// A program with one page moved away, which the daemon has.
fn one_page_away() -> (Daemon, Program, Space, u64, Vec<u8>) {
    let (daemon, program, space, memory) = all_registered(PAGES);
    assert_eq!(space.batch(Command::Move, &[memory], 0), [0]);
    let page = raw::read_memory(space.pid, space.hello.transfer, PAGE_SIZE).expect("readable");
    space.served.stored.lock().expect("no panic").insert(memory, page.clone());
    (daemon, program, space, memory, page)
}

#[test]
fn discarding_is_done_while_nobody_reads_messages() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, mut space, memory, page) = one_page_away();
    space.stop();
    space.give(Command::Discard, &[], 0, TRANSFER_PAGES as u32);
    space.done(0);
    let userfaultfd = &space.served.userfaultfd;
    assert!(!raw::readable(userfaultfd, 0), "a message about slots");
    // The space does not change: pages can be put in place.
    assert_eq!(raw::fill(userfaultfd, memory, &page), Ok(()));
    // Whoever reads a slot waits again, instead of reading zeroes.
    let (pid, transfer) = (space.pid, space.hello.transfer);
    let reader = std::thread::spawn(move || raw::read_memory(pid, transfer, PAGE_SIZE));
    assert!(raw::readable(userfaultfd, 10_000), "a fault");
    let (_, _, address) = raw::event(userfaultfd).expect("a fault");
    assert_eq!(address, transfer);
    assert_eq!(raw::fill(userfaultfd, transfer, &page), Ok(()));
    assert_eq!(reader.join().expect("no panic"), Ok(page));
    let stored = space.lose();
    let _space = daemon.accept().resume(stored);
    assert_eq!(program.ask("verify"), "0");
}

#[test]
fn an_agent_that_waits_for_a_dead_daemon_can_be_freed() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, mut space, memory, page) = one_page_away();
    // The daemon dies between a Populate and its fault: the agent stands in the
    // kernel and cannot call.
    space.stop();
    space.give(Command::Populate, &[memory], 0, 1);
    assert!(raw::readable(&space.served.userfaultfd, 10_000), "a fault");
    let pid = space.pid;
    let stored = space.lose();

    // The next daemon takes the userfaultfd from the agent's table and reads.
    let (agent, descriptors) = agent_descriptors(pid);
    let is_userfaultfd = |target: &str| target.contains("userfaultfd");
    let (number, _) = descriptors.iter().find(|(_, t)| is_userfaultfd(t)).expect("its own");
    let taken = raw::take_descriptor(agent, *number);
    let (_, _, address) = raw::event(&taken).expect("the fault that the agent waits for");
    assert_eq!(address, memory);
    assert_eq!(raw::fill(&taken, memory, &page), Ok(()));
    drop(taken);
    let _space = daemon.accept().resume(stored);
    assert_eq!(program.ask("verify"), "0");
}

#[test]
fn populating_makes_shared_pages_movable() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let space = daemon.manage();
    let memory = program.fill(PAGES);
    program.say("fork");
    let _child = daemon.accept().create();
    assert_eq!(program.hear(), "7");
    space.register(memory, PAGES);
    space.register_transfer();
    assert_eq!(space.batch(Command::Move, &[memory], 0), [-libc::EBUSY]);
    assert_eq!(space.batch(Command::Populate, &[memory, 0x1000], 0), [0, -libc::ENOMEM]);
    assert_eq!(space.batch(Command::Move, &[memory], 0), [0]);
}
