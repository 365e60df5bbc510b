//! Programs that are not managed, for one reason or another: they run all the
//! same, and standard error says why when someone ought to know.

use std::path::Path;
use std::process::Command;

use strata_units::wire::Verdict;

use crate::cannot_run;
use crate::daemon::Daemon;
use crate::program::{Program, TOKEN, library, thread_names};

#[test]
fn only_what_is_documented_is_exported() {
    let Ok(output) = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output()
    else {
        eprintln!("skipped: no nm");
        return;
    };
    let text = String::from_utf8(output.stdout).expect("text");
    let mut names: Vec<&str> = text.lines().filter_map(|l| l.split_whitespace().last()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "chroot",
            "initgroups",
            "madvise",
            "mmap",
            "mmap64",
            "mremap",
            "process_madvise",
            "pthread_create",
            "pthread_mutex_destroy",
            "pthread_mutex_init",
            "setegid",
            "seteuid",
            "setgid",
            "setgroups",
            "setns",
            "setregid",
            "setresgid",
            "setresuid",
            "setreuid",
            "setuid",
            "strata_advise",
            "strata_advise_ranges",
            "strata_alloc",
            "strata_error",
            "strata_free",
            "strata_pool_close",
            "strata_pool_flush",
            "strata_pool_get",
            "strata_pool_open",
            "strata_pool_put",
            "strata_snapshot",
            "strata_version",
            "strata_where",
            "syscall",
            "thrd_create",
            "unshare",
        ]
    );
}

/// A program with another C library than glibc could not start otherwise, and a
/// sanitizer's functions would be called on a thread that it does not know.
#[test]
fn nothing_is_needed_but_the_c_library() {
    let read = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).arg(library()).output().ok()?;
        String::from_utf8(output.stdout).ok()
    };
    let Some(dynamic) = read("readelf", &["-dW"]) else {
        eprintln!("skipped: no readelf");
        return;
    };
    let needed: Vec<&str> = dynamic.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert_eq!(needed.len(), 1, "{needed:?}");
    assert!(needed[0].contains("libc.so.6"), "{needed:?}");
    let undefined = read("nm", &["-D", "--undefined-only"]).expect("as readelf");
    let copies = |line: &&str| ["memcpy", "memset", "_Unwind"].iter().any(|n| line.contains(n));
    let copying: Vec<&str> = undefined.lines().filter(copies).collect();
    assert_eq!(copying, [""; 0], "other libraries' functions");
}

#[test]
fn an_instrument_that_knows_every_thread_is_left_alone() {
    if cannot_run() {
        return;
    }
    let daemon = Daemon::new();
    // What Valgrind has in the environment of what it runs. (There is no such file:
    // the dynamic linker says so, and goes on.)
    let preload = format!("{}:/nonexistent/vgpreload_core.so", library().display());
    let mut program = Program::start_at(&daemon, &preload);
    assert_eq!(program.ask("verify"), "0");
    assert!(!daemon.is_called(0));
    assert_eq!(thread_names(program.pid()).len(), 1);
    let (status, complaint) = program.end();
    assert_eq!(status.code(), Some(5));
    assert!(complaint.contains("Valgrind"), "{complaint}");
}

#[test]
fn without_a_daemon_nothing_happens() {
    let preload = library().to_string_lossy().into_owned();
    if Path::new(strata_units::wire::DEFAULT_AGENT_SOCKET).exists() {
        eprintln!("skipped: a daemon runs on this machine");
        return;
    }
    let mut program = Program::start_with(None, Some(TOKEN), &preload);
    assert_eq!(program.ask("ends"), "41 cancelled -42");
    assert_eq!(thread_names(program.pid()).len(), 1);
    let nobody = format!("-{} this process is not managed by Strata", libc::ENOSYS);
    assert_eq!(program.ask("snapshot"), nobody);
    let (status, complaint) = program.end();
    assert_eq!((status.code(), complaint.as_str()), (Some(5), ""));
}

#[test]
fn an_unreachable_daemon_is_a_line_only_for_a_tenant() {
    let preload = library().to_string_lossy().into_owned();
    let nowhere = Path::new("/nonexistent/agent.sock");
    for (token, lines) in [(Some(TOKEN), 1), (None, 0)] {
        let mut program = Program::start_with(Some(nowhere), token, &preload);
        assert_eq!(program.ask("ends"), "41 cancelled -42");
        assert_eq!(thread_names(program.pid()).len(), 1);
        let (status, complaint) = program.end();
        assert_eq!((status.code(), complaint.lines().count()), (Some(5), lines), "{complaint}");
    }
}

#[test]
fn a_socket_path_that_is_too_long_is_a_line() {
    let preload = library().to_string_lossy().into_owned();
    let path = format!("/{}", "x".repeat(200));
    let mut program = Program::start_with(Some(Path::new(&path)), None, &preload);
    assert_eq!(program.ask("verify"), "0");
    let (_, complaint) = program.end();
    assert!(complaint.contains("STRATA_AGENT_SOCKET"), "{complaint}");
}

#[test]
fn a_daemon_that_hangs_is_given_up() {
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    // It accepts, but never answers.
    let caller = daemon.accept();
    assert_eq!(program.ask("ends"), "41 cancelled -42");
    assert_eq!(thread_names(program.pid()).len(), 1);
    assert_eq!(program.ask("fork"), "7");
    let (status, complaint) = program.end();
    assert_eq!((status.code(), complaint.lines().count()), (Some(5), 1), "{complaint}");
    assert!(complaint.contains("does not answer"), "{complaint}");
    drop(caller);
}

#[test]
fn a_refusal_is_obeyed_in_silence() {
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let caller = daemon.accept();
    caller.welcome(Verdict::Unmanaged, &[]);
    assert_eq!(program.ask("ends"), "41 cancelled -42");
    assert_eq!(thread_names(program.pid()).len(), 1);
    // Nobody calls for a child of an unmanaged program.
    assert_eq!(program.ask("fork"), "7");
    let (status, complaint) = program.end();
    assert_eq!((status.code(), complaint.as_str()), (Some(5), ""));
}

#[test]
fn another_protocol_is_refused() {
    let daemon = Daemon::new();
    let mut program = Program::start(&daemon);
    let caller = daemon.accept();
    // Create without the descriptors that belong to it.
    caller.welcome(Verdict::Create, &[]);
    assert_eq!(program.ask("verify"), "0");
    let (_, complaint) = program.end();
    assert!(complaint.contains("another protocol"), "{complaint}");
}
