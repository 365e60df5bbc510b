//! The strata binary against a daemon made up here: what it sends, what it
//! prints, how it ends, and what it becomes. (The real daemon is tested with it
//! elsewhere.)

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use strata_api::{Latency, PROTOCOL_VERSION, Reply, Request, Stats, TenantState};

const STRATA: &str = env!("CARGO_BIN_EXE_strata");

/// Held for writing while a program's file is written, for reading while a child
/// is made: a child that inherits the open file for a moment makes executing it
/// fail (ETXTBSY).
static PROGRAMS: RwLock<()> = RwLock::new(());

fn spawn(command: &mut Command) -> Child {
    let _no_program_is_written = PROGRAMS.read().expect("no test panics while it writes");
    command.spawn().expect("strata runs")
}

fn output(command: &mut Command) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    spawn(command).wait_with_output().expect("it ends")
}

/// A directory of a test's own, removed at its end.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        let name = format!("strata-commands-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("directory");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).expect("mode");
        Self(path.canonicalize().expect("it is there"))
    }

    fn put(&self, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
        let path = self.0.join(name);
        let _no_child_is_made = PROGRAMS.write().expect("no test panics while it makes a child");
        std::fs::write(&path, bytes).expect("file");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("mode");
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("clean up");
    }
}

/// A daemon that answers with a function, and the requests that it got.
struct Daemon {
    directory: Directory,
    requests: Receiver<Request>,
}

impl Daemon {
    fn new(answer: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        let directory = Directory::new();
        let listener = UnixListener::bind(directory.0.join("s")).expect("bind");
        let (sender, requests) = channel();
        // Ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                // Before the reply: who has it, finds the request recorded.
                let recording = |request: &Request| {
                    let _ = sender.send(request.clone());
                    answer(request)
                };
                serve(client.expect("a client"), recording);
            }
        });
        Self { directory, requests }
    }

    /// One that has `tenants` and says "done" to all else.
    fn with(tenants: Vec<Stats>) -> Self {
        Self::new(move |request| match request {
            Request::List => Reply::List { tenants: tenants.clone() },
            _ => Reply::Done { note: "so it is".into() },
        })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(STRATA);
        command.args(arguments).env("STRATA_SOCKET", self.directory.0.join("s"));
        command.stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        output(&mut self.command(arguments))
    }

    fn last_request(&self) -> Option<Request> {
        self.requests.try_iter().last()
    }
}

fn serve(mut client: UnixStream, answer: impl Fn(&Request) -> Reply) {
    let mut line = String::new();
    BufReader::new(&client).read_line(&mut line).expect("a line");
    let request = serde_json::from_str(&line).expect("a request");
    let reply = serde_json::to_string(&answer(&request)).expect("a reply");
    writeln!(client, "{reply}").expect("the client listens");
}

fn stats(name: &str) -> Stats {
    Stats {
        name: name.into(),
        pids: vec![1],
        uid: 0,
        command: vec!["server".into()],
        state: TenantState::Managed,
        budget_bytes: 1 << 30,
        resident_bytes: 1 << 29,
        staged_bytes: 0,
        unmanaged_bytes: 0,
        stored_bytes: 0,
        kept_bytes: 0,
        compressed_bytes: 0,
        file_bytes: 0,
        metadata_bytes: 0,
        managed_pages: 0,
        stored_objects: 0,
        deduplicated_pages: 0,
        zero_pages: 0,
        faults_total: 3,
        soft_faults_total: 0,
        file_faults_total: 0,
        zero_faults_total: 0,
        prefetched_pages_total: 0,
        evictions_total: 0,
        evictions_unchanged_total: 0,
        evictions_refused_total: 0,
        lost_pages_total: 0,
        fault_latency_us: Latency::default(),
        worker_restarts_total: 0,
        uptime_seconds: 1.0,
        notes: vec![],
    }
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// The one line that a failure prints, after checking that it is one.
fn complaint(output: &Output, status: i32) -> String {
    let text = String::from_utf8(output.stderr.clone()).expect("text");
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert!(text.starts_with("strata: ") && text.ends_with('\n'), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("; "), "it does not say what to do: {text}");
    text
}

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
        Request::List => Reply::List { tenants: vec![stats("db")] },
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
            Request::List => Reply::List { tenants: vec![stats("private")] },
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
fn man_pages_and_completions_come_from_the_definition() {
    let directory = Directory::new();
    let daemon = Daemon::with(vec![]);
    let output = daemon.run(&["man", directory.0.to_str().expect("text")]);
    assert!(output.status.success(), "{output:?}");
    let script = stdout(&daemon.run(&["completions", "bash"]));
    for command in ["run", "ps", "top", "stats", "set", "release", "stop", "doctor", "config"] {
        assert!(directory.0.join(format!("strata-{command}.1")).is_file(), "{command}");
        assert!(script.contains(&format!("strata__subcmd__{command}")), "{command}");
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
