//! The strata binary against a daemon made up here: what it sends, what it
//! prints, how it ends, and what it becomes. (The real daemon is tested with it
//! elsewhere.)

mod fake;
mod guests;
mod snapshots;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use strata_api::{PROTOCOL_VERSION, Reply, Request, Stats};

use fake::{Daemon, Directory, complaint, output, spawn, stats, stdout};

const STRATA: &str = env!("CARGO_BIN_EXE_strata");

/// A shared library that every test binary has loaded anyway.
fn some_library() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let path = maps.split_whitespace().find(|word| word.contains("/libc.so"));
    path.expect("the test is dynamically linked").to_owned()
}

#[test]
fn listings_are_what_the_daemon_says() {
    let tenants = vec![stats("cache"), stats("db")];
    let daemon = Daemon::with(tenants.clone());
    let output = daemon.run(&["ps", "--json"]);
    assert_eq!(serde_json::from_str::<Vec<Stats>>(&stdout(&output)).expect("JSON"), tenants);
    let output = daemon.run(&["ps"]);
    assert_eq!(stdout(&output).lines().count(), 3);
    let output = daemon.run(&["stats", "db", "--json"]);
    assert_eq!(serde_json::from_str::<Stats>(&stdout(&output)).expect("JSON"), tenants[1]);
    let output = daemon.run(&["stats", "db"]);
    assert!(stdout(&output).contains("faults_total"), "{output:?}");
    let output = daemon.run(&["top", "--once", "--interval", "0.1"]);
    let text = stdout(&output);
    assert!(text.lines().nth(1).is_some_and(|line| line.starts_with("cache")), "{text}");
}

#[test]
fn orders_are_sent_and_notes_printed() {
    let daemon = Daemon::with(vec![stats("db")]);
    for (arguments, request) in [
        (
            &["set", "db", "--dram", "1.5GiB"][..],
            Request::Set { name: "db".into(), dram_bytes: 3 << 29 },
        ),
        (&["release", "db"], Request::Release { name: "db".into() }),
        (&["stop", "db"], Request::Stop { name: "db".into() }),
    ] {
        let output = daemon.run(arguments);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(stdout(&output), "so it is\n");
        assert_eq!(daemon.last_request(), Some(request));
    }
    let line = complaint(&daemon.run(&["stop", "dc"]), 1);
    assert!(line.contains("no tenant is named dc: there are db"), "{line}");
}

#[test]
fn a_refusal_is_one_line_with_the_daemons_hint() {
    let daemon = Daemon::new(|request| match request {
        Request::List { .. } => Reply::List { tenants: vec![stats("db")], next: None },
        _ => Reply::Error { message: "not\nnow".into(), hint: "wait \u{1b}[2J".into() },
    });
    let line = complaint(&daemon.run(&["release", "db"]), 1);
    assert_eq!(line, "strata: cannot release db: not?now; wait ?[2J\n");
    let line = complaint(&daemon.run(&["run", "--", "true"]), 1);
    assert_eq!(line, "strata: cannot make a tenant: not?now; wait ?[2J\n");
}

#[test]
fn usage_errors_have_status_2() {
    let daemon = Daemon::with(vec![]);
    for arguments in [
        &["frobnicate"][..],
        &["run"],
        &["run", "--dram", "512", "--", "true"],
        &["run", "--dram", "-1GiB", "--", "true"],
        &["run", "--drm", "1GiB", "--", "true"],
        &["run", "--name", "a/b", "--", "true"],
        &["stats"],
        &["set", "db"],
        &["top", "--interval", "NaN"],
        &["completions", "nosh"],
    ] {
        complaint(&daemon.run(arguments), 2);
    }
    assert_eq!(daemon.last_request(), None);
}

#[test]
fn nobody_at_the_named_socket() {
    let mut command = Command::new(STRATA);
    let output = output(command.arg("ps").env("STRATA_SOCKET", "/no/such/socket"));
    let line = complaint(&output, 1);
    assert!(line.contains("no stratad listens at /no/such/socket"), "{line}");
}

fn granting() -> Daemon {
    let library = some_library();
    Daemon::new(move |_| Reply::Run {
        name: "db".into(),
        dram_bytes: 1 << 30,
        environment: vec![
            ("LD_PRELOAD".into(), library.clone()),
            ("STRATA_TOKEN".into(), "00ff".into()),
        ],
        warnings: vec!["no backstop".into()],
    })
}

#[test]
fn strata_becomes_the_program() {
    let daemon = granting();
    let script = "echo $$; echo $STRATA_TOKEN $LD_PRELOAD; echo \"$1\"; exit 7";
    let mut command = daemon
        .command(&["run", "--name", "db", "--dram", "1GiB", "sh", "-c", script, "x", "--json"]);
    let library = some_library();
    command.env("LD_PRELOAD", &library).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = spawn(&mut command);
    let pid = child.id();
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let expected = format!("{pid}\n00ff {library}:{library}\n--json\n");
    assert_eq!(stdout(&output), expected);
    let warnings = String::from_utf8_lossy(&output.stderr);
    assert_eq!(warnings, "strata: warning: no backstop\n");
    let request = daemon.last_request().expect("asked");
    let Request::Run { name, dram_bytes, command } = request else { panic!("{request:?}") };
    assert_eq!((name.as_deref(), dram_bytes), (Some("db"), Some(1 << 30)));
    assert_eq!(command, ["sh", "-c", script, "x", "--json"]);
}

#[test]
fn signals_are_the_programs_own() {
    let output = granting().run(&["run", "--", "sh", "-c", "kill -TERM $$"]);
    assert_eq!(output.status.signal(), Some(15));
    // The Rust runtime ignores SIGPIPE; the program must not inherit that.
    let output = granting().run(&["run", "--", "sh", "-c", "kill -PIPE $$"]);
    assert_eq!(output.status.signal(), Some(13));
}

#[test]
fn what_cannot_be_run_makes_no_tenant() {
    let daemon = granting();
    for (program, why) in [
        ("no-such-command-here", "command not found"),
        ("/etc/passwd", "is not executable"),
        ("/", "is a directory"),
    ] {
        let line = complaint(&daemon.run(&["run", "--", program]), 1);
        assert!(line.contains(why), "{line}");
    }
    let line = complaint(&daemon.run(&["run", "--dram", "9999TiB", "--", "true"]), 1);
    assert!(line.contains("more than this machine has"), "{line}");
    assert_eq!(daemon.last_request(), None);
}

/// The smallest statically linked program: `exit(42)`.
#[cfg(target_arch = "x86_64")]
fn static_program() -> Vec<u8> {
    let code = [0xbf, 42, 0, 0, 0, 0xb8, 60, 0, 0, 0, 0x0f, 0x05];
    let (base, headers) = (0x40_0000u64, 64 + 56);
    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1];
    elf.resize(16, 0);
    for half in [2u16, 62] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend(1u32.to_le_bytes());
    for word in [base + headers, 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    // PT_LOAD, readable and executable.
    elf.extend(1u32.to_le_bytes());
    elf.extend(5u32.to_le_bytes());
    let length = headers + code.len() as u64;
    for word in [0, base, base, length, length, 4096] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(code);
    elf
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_static_program_is_refused_or_run_unmanaged() {
    let daemon = granting();
    let program = daemon.directory.put("static", &static_program(), 0o755);
    let program = program.to_str().expect("text");
    let line = complaint(&daemon.run(&["run", "--", program]), 1);
    assert!(line.contains("the preload cannot enter: it is statically linked"), "{line}");
    let output = daemon.run(&["run", "--allow-unmanaged", "--", program]);
    assert_eq!(output.status.code(), Some(42), "{output:?}");
    let warning = String::from_utf8_lossy(&output.stderr);
    assert!(warning.starts_with("strata: warning: ") && warning.lines().count() == 1, "{warning}");
    assert_eq!(daemon.last_request(), None);
}

/// strata and a made-up stratad (a shell script), installed side by side.
struct Installation(Directory);

impl Installation {
    fn new(script: &str) -> Self {
        let directory = Directory::new();
        directory.put("strata", &std::fs::read(STRATA).expect("strata"), 0o755);
        directory.put("stratad", format!("#!/bin/sh\n{script}\n").as_bytes(), 0o755);
        Self(directory)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.0.0.join("strata"));
        command.args(arguments).env_remove("STRATA_SOCKET").env("XDG_RUNTIME_DIR", &self.0.0);
        command.stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        output(&mut self.command(arguments))
    }
}

#[test]
fn doctor_and_config_check_are_stratads_answers() {
    let installation = Installation::new("echo \"$@\"; exit 3");
    for (arguments, passed) in [
        (&["doctor"][..], "doctor\n"),
        (&["doctor", "--json"], "doctor --json\n"),
        (&["config", "check"], "config-check\n"),
        (&["config", "check", "a b"], "config-check a b\n"),
    ] {
        let output = installation.run(arguments);
        assert_eq!((stdout(&output).as_str(), output.status.code()), (passed, Some(3)));
    }
}

/// A private daemon is started only where none of the system's is found and the
/// caller may do its work.
fn private_daemons_are_possible() -> bool {
    let system = UnixStream::connect(strata_api::DEFAULT_SOCKET).is_ok();
    let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd");
    if system || device.is_err() {
        eprintln!("skipped: a system stratad runs, or /dev/userfaultfd does not open");
        return false;
    }
    true
}

/// Not a test: what the made-up stratad below executes. It answers until the
/// file `stop` appears beside its socket.
#[test]
#[ignore = "the body of another test's daemon"]
fn private_daemon_body() {
    let Some(directory) = std::env::var_os("STRATA_TEST_PRIVATE").map(PathBuf::from) else {
        return;
    };
    let library = some_library();
    let listener = UnixListener::bind(directory.join("control.sock")).expect("bind");
    listener.set_nonblocking(true).expect("nonblocking");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !directory.join("stop").exists() && Instant::now() < deadline {
        let Ok((client, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        client.set_nonblocking(false).expect("blocking");
        let mut probe = BufReader::new(client.try_clone().expect("clone"));
        // `strata` looks whether somebody listens before it asks.
        if probe.fill_buf().is_ok_and(<[u8]>::is_empty) {
            continue;
        }
        let mut line = String::new();
        probe.read_line(&mut line).expect("a line");
        let reply = match serde_json::from_str(&line).expect("a request") {
            Request::Ping => Reply::Pong {
                protocol: PROTOCOL_VERSION,
                version: "test".into(),
                pid: std::process::id(),
            },
            Request::List { .. } => Reply::List { tenants: vec![stats("private")], next: None },
            _ => Reply::Run {
                name: "private".into(),
                dram_bytes: 1 << 30,
                environment: vec![("LD_PRELOAD".into(), library.clone())],
                warnings: vec![],
            },
        };
        writeln!(&client, "{}", serde_json::to_string(&reply).expect("a reply")).expect("written");
    }
    std::fs::remove_file(directory.join("control.sock")).expect("own socket");
}

fn uid() -> u32 {
    std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").expect("/proc"))
}

/// The number after `field` in `/proc/PID/stat`'s friendlier twin.
fn status_number(pid: &str, field: &str) -> Option<u32> {
    let status = std::fs::read_to_string(Path::new("/proc").join(pid).join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(field))?.trim().parse().ok()
}

#[test]
fn a_private_daemon_is_started_once_and_is_nobodys_child() {
    if !private_daemons_are_possible() {
        return;
    }
    let own = std::env::current_exe().expect("own path");
    let installation = Installation::new(&format!(
        "[ \"$1\" = --private ] || exit 9\n[ -z \"$LD_PRELOAD\" ] || exit 8\n\
         echo $$ >> \"$2/pids\"\nSTRATA_TEST_PRIVATE=\"$2\" exec {} \
         private_daemon_body --exact --ignored",
        own.display()
    ));
    let directory = installation.0.0.join(format!("strata-{}", uid()));
    // Two at once, from a program that itself preloads something.
    let children: Vec<_> = (0..2)
        .map(|_| {
            let mut command =
                installation.command(&["run", "--", "sh", "-c", "echo $$; read line"]);
            command.env("LD_PRELOAD", some_library());
            spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))
        })
        .collect();
    for mut child in children {
        let pid = child.id();
        let mut line = String::new();
        let output = child.stdout.take().expect("piped");
        BufReader::new(output).read_line(&mut line).expect("the program runs");
        assert_eq!(line.trim(), pid.to_string());
        // The program has no child that it did not make.
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        assert_eq!(children.expect("it waits for a line"), "");
        drop(child.stdin.take());
        child.wait().expect("it ends");
    }
    let pids = std::fs::read_to_string(directory.join("pids")).expect("pids");
    assert_eq!(pids.lines().count(), 1, "one daemon serves both: {pids}");
    let daemon = pids.trim();
    assert_ne!(status_number(daemon, "PPid:"), Some(std::process::id()));
    // A session of its own: field 6 of stat, after the name in parentheses.
    let stat = std::fs::read_to_string(format!("/proc/{daemon}/stat")).expect("alive");
    let session = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(3));
    let own_stat = std::fs::read_to_string("/proc/self/stat").expect("own");
    let own_session = own_stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(3));
    assert_ne!(session, own_session);
    // Others find it.
    let output = installation.run(&["ps", "--json"]);
    let found: Vec<Stats> = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert!(found.iter().any(|tenant| tenant.name == "private"), "{output:?}");
    std::fs::write(directory.join("stop"), "").expect("stop");
    let deadline = Instant::now() + Duration::from_secs(60);
    while directory.join("control.sock").exists() {
        assert!(Instant::now() < deadline, "the daemon does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_private_daemon_that_dies_says_why() {
    if !private_daemons_are_possible() {
        return;
    }
    let installation = Installation::new("echo 'stratad: the disk is on fire' >&2; exit 5");
    let line = complaint(&installation.run(&["run", "--", "true"]), 1);
    assert!(line.contains("it ended at once (exit status: 5): stratad: the disk is on fire"));
    assert!(line.contains("stratad.log"), "{line}");
}

#[test]
fn a_private_daemon_that_left_snapshots_is_started_for_them() {
    if !private_daemons_are_possible() {
        return;
    }
    let installation = Installation::new("echo 'stratad: started' >&2; exit 5");
    let directory = installation.0.0.join(format!("strata-{}", uid()));
    let restored = || complaint(&installation.run(&["restore", "db@1"]), 1);
    assert!(restored().contains("no snapshot is named db@1"));
    std::fs::DirBuilder::new().mode(0o700).create(&directory).expect("directory");
    let snapshots = directory.join(strata_api::PRIVATE_SNAPSHOTS_NAME);
    std::fs::create_dir(&snapshots).expect("directory");
    assert!(restored().contains("no snapshot is named db@1"), "there are none");
    std::fs::create_dir(snapshots.join("db@1")).expect("directory");
    assert!(restored().contains("stratad: started"));
}

#[test]
fn man_pages_and_completions_come_from_the_definition() {
    let directory = Directory::new();
    let daemon = Daemon::with(vec![]);
    let output = daemon.run(&["man", directory.0.to_str().expect("text")]);
    assert!(output.status.success(), "{output:?}");
    let script = stdout(&daemon.run(&["completions", "bash"]));
    for command in [
        "run",
        "ps",
        "top",
        "stats",
        "set",
        "release",
        "stop",
        "snapshot",
        "snapshots",
        "rollback",
        "restore",
        "clone",
        "doctor",
        "config",
    ] {
        assert!(directory.0.join(format!("strata-{command}.1")).is_file(), "{command}");
        assert!(script.contains(&format!("strata__subcmd__{command}")), "{command}");
    }
    for command in ["rm", "persist", "export", "core", "import"] {
        assert!(directory.0.join(format!("strata-snapshot-{command}.1")).is_file(), "{command}");
    }
    let page = std::fs::read_to_string(directory.0.join("strata-run.1")).expect("page");
    assert!(page.contains("allow") && page.contains("exit status"), "{page}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let daemon = Daemon::with((0..500).map(|n| stats(&format!("t{n}"))).collect());
    // More than a pipe holds, and nobody reads it.
    let mut child = spawn(daemon.command(&["ps", "--json"]).stdout(Stdio::piped()));
    drop(child.stdout.take());
    assert!(child.wait().expect("it ends").success());
}
