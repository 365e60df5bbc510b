//! Programs that take snapshots of themselves, against a fake socket for
//! requests. The copy is the process itself, patched as in `restored`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use strata_units::wire::{CONTROL_SOCKET_NAME, Command, HelloKind};

use crate::cannot_run;
use crate::daemon::Daemon;
use crate::managed::{PAGES, all_registered};
use crate::program::Program;
use crate::raw;
use crate::restored::{NEW_TOKEN, park, restore};

fn listen(daemon: &Daemon) -> UnixListener {
    UnixListener::bind(daemon.path().with_file_name(CONTROL_SOCKET_NAME)).expect("free")
}

/// The next connection, and the request that came with it.
fn accept(listener: &UnixListener) -> (UnixStream, String) {
    let (stream, _) = listener.accept().expect("the program calls");
    stream.set_read_timeout(Some(crate::PATIENCE)).expect("a time");
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).expect("a line");
    (stream, line)
}

const TAKEN: &str = "{\"reply\":\"snapshot\",\"snapshot\":{\"id\":\"db@1\"},\"warnings\":[]}\n";
const PROGRESS: &str =
    "{\"progress\":\"capturing\",\"done\":4096,\"total\":null,\"unit\":\"bytes\"}\n";

/// Descriptors that the program itself has open.
fn descriptors(program: &mut Program) -> String {
    program.ask("descriptors")
}

#[test]
fn the_answer_decides_what_is_returned() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, _space, _) = all_registered(PAGES);
    let unreachable = program.ask("snapshot good");
    assert!(unreachable.starts_with(&format!("-{} ", libc::ENOTCONN)), "{unreachable}");
    let listener = listen(&daemon);
    let before = descriptors(&mut program);
    let unknown =
        format!("-{} the daemon speaks another protocol (versions differ?)", libc::EPROTO);
    let lost = format!(
        "-{} the daemon went away before it answered; strata snapshots tells",
        libc::ECONNRESET
    );
    let refused = "{\"reply\":\"error\",\"message\":\"no room\",\"hint\":\"\"}\n";
    for (answer, expected) in [
        (TAKEN.to_owned(), "0".to_owned()),
        (format!("{PROGRESS}{PROGRESS}{TAKEN}"), "0".to_owned()),
        (refused.to_owned(), format!("-{} no room", libc::ECANCELED)),
        (format!("{PROGRESS}{refused}"), format!("-{} no room", libc::ECANCELED)),
        ("{\"reply\":\"done\",\"note\":\"\"}\n".to_owned(), unknown.clone()),
        ("\n".to_owned(), unknown),
        (String::new(), lost.clone()),
        (PROGRESS.to_owned(), lost.clone()),
        (TAKEN[..TAKEN.len() - 1].to_owned(), lost),
    ] {
        program.say("snapshot good");
        let (mut stream, request) = accept(&listener);
        assert_eq!(request, "{\"request\":\"snapshot_self\",\"label\":\"good\"}\n");
        for piece in answer.as_bytes().chunks(7) {
            stream.write_all(piece).expect("the program listens");
        }
        drop(stream);
        assert_eq!(program.hear(), expected, "{answer}");
        assert_eq!(descriptors(&mut program), before);
    }
    program.say("snapshot");
    let (mut stream, request) = accept(&listener);
    assert_eq!(request, "{\"request\":\"snapshot_self\",\"label\":null}\n");
    // Stopped and continued meanwhile: the wait goes on.
    raw::signal(program.pid(), libc::SIGSTOP);
    raw::signal(program.pid(), libc::SIGCONT);
    stream.write_all(TAKEN.as_bytes()).expect("the program listens");
    assert_eq!(program.hear(), "0");
}

#[test]
fn a_daemon_that_hangs_up_at_once_may_have_said_why() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, _space, _) = all_registered(PAGES);
    let listener = listen(&daemon);
    program.say("snapshot");
    let (mut stream, _) = listener.accept().expect("the program calls");
    stream
        .write_all(b"{\"reply\":\"error\",\"message\":\"too many connections\",\"hint\":\"\"}\n")
        .expect("the program listens");
    // The request is never read.
    drop(stream);
    assert_eq!(program.hear(), format!("-{} too many connections", libc::ECANCELED));
}

#[test]
fn who_is_a_copy_learns_it_at_the_connections_end() {
    if cannot_run() {
        return;
    }
    let (daemon, mut program, mut space, _) = all_registered(PAGES);
    let listener = listen(&daemon);
    let before = descriptors(&mut program);
    program.say("snapshot");
    let (stream, _) = accept(&listener);
    park(&space);
    restore(&space, NEW_TOKEN, None);
    drop(stream);
    // Whether its agent has been answered or not.
    assert_eq!(program.hear(), "1");
    assert_eq!(descriptors(&mut program), before);

    // The next call waits until it has been.
    program.say("snapshot next");
    let caller = daemon.accept();
    assert_eq!(caller.hello.kind, HelloKind::Restored as u32);
    // Time in which it would ask.
    std::thread::sleep(Duration::from_millis(200));
    listener.set_nonblocking(true).expect("a flag");
    assert!(listener.accept().is_err(), "it asks before it is known");
    listener.set_nonblocking(false).expect("a flag");
    let (userfaultfd, stored) = space.hand_over();
    let mut space = caller.adopt(userfaultfd, stored);
    let (mut stream, request) = accept(&listener);
    assert!(request.contains("\"next\""), "{request}");
    stream.write_all(TAKEN.as_bytes()).expect("the program listens");
    assert_eq!(program.hear(), "0", "it is the original of this one");

    // In a copy whose agent was answered before the end is seen.
    program.say("snapshot");
    let (stream, _) = accept(&listener);
    park(&space);
    restore(&space, NEW_TOKEN, None);
    let caller = daemon.accept();
    let (userfaultfd, stored) = space.hand_over();
    let space = caller.adopt(userfaultfd, stored);
    space.give(Command::Discard, &[], 0, 0);
    space.done(0);
    drop(stream);
    assert_eq!(program.hear(), "1");

    // And an end in the same life is none.
    program.say("snapshot");
    drop(accept(&listener));
    assert!(program.hear().starts_with(&format!("-{} ", libc::ECONNRESET)));
    assert_eq!(program.ask("verify"), "0");
}
