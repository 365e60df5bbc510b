//! Programs that run under the library, built from `tests/programs`.

use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Mutex;

use strata_units::wire::{ENV_SOCKET, ENV_TOKEN};

use crate::daemon::Daemon;
use crate::{raw, wait_until};

/// The library under test: cargo builds it beside the test.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let library = test.parent().expect("and a directory").join("libstrata.so");
    assert!(library.exists(), "{} is missing", library.display());
    library
}

/// Builds a C source of `tests/programs`, once in a run of the tests.
fn compile(source: &str, arguments: &[&str]) -> PathBuf {
    static BUILT: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let program = directory.join(source);
    let mut built = BUILT.lock().expect("another test could not build");
    if built.contains(source) {
        return program;
    }
    // Renamed into place: another run's processes may be executing the last one.
    let fresh = directory.join(format!("{source}-{}", std::process::id()));
    let status = Command::new("cc")
        .args(["-O1", "-Wall", "-Werror", "-pthread", "-o"])
        .arg(&fresh)
        .arg(format!("{}/tests/programs/{source}.c", env!("CARGO_MANIFEST_DIR")))
        .args(arguments)
        .status()
        .expect("the tests need cc");
    assert!(status.success(), "cc {source}.c");
    std::fs::rename(&fresh, &program).expect("one directory");
    built.insert(source.to_owned());
    program
}

/// What the programs are told in `STRATA_TOKEN`: 0xab.
pub(crate) const TOKEN: &str = "00000000000000ab";

/// A program under the library.
pub(crate) struct Program {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// `tenant.c`, told of the daemon.
    pub(crate) fn start(daemon: &Daemon) -> Self {
        Self::start_at(daemon, &library().to_string_lossy())
    }

    /// The same with chosen libraries.
    pub(crate) fn start_at(daemon: &Daemon, preload: &str) -> Self {
        Self::start_with(Some(daemon.path()), Some(TOKEN), preload)
    }

    /// `tenant.c` with a chosen environment.
    pub(crate) fn start_with(socket: Option<&Path>, token: Option<&str>, preload: &str) -> Self {
        Self::spawn(Self::command("tenant", socket, token, preload))
    }

    /// `tenant.c` in a process whose agent keeps copies of the program's descriptors.
    pub(crate) fn start_sharing(daemon: &Daemon) -> Self {
        let preload = library();
        let preload = preload.to_string_lossy();
        let mut command = Self::command("tenant", Some(daemon.path()), Some(TOKEN), &preload);
        raw::share_descriptors(&mut command);
        Self::spawn(command)
    }

    /// Another of `tests/programs`.
    pub(crate) fn start_other(daemon: &Daemon, source: &str) -> Self {
        let preload = library();
        let preload = preload.to_string_lossy();
        Self::spawn(Self::command(source, Some(daemon.path()), Some(TOKEN), &preload))
    }

    fn command(source: &str, socket: Option<&Path>, token: Option<&str>, preload: &str) -> Command {
        let mut command = Command::new(compile(source, &[]));
        command.env_remove(ENV_SOCKET).env_remove(ENV_TOKEN).env("LD_PRELOAD", preload);
        if let Some(socket) = socket {
            command.env(ENV_SOCKET, socket);
        }
        if let Some(token) = token {
            command.env(ENV_TOKEN, token);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command.spawn().expect("the program starts");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Sends a line.
    pub(crate) fn say(&mut self, line: &str) {
        let input = self.input.as_mut().expect("not yet ended");
        writeln!(input, "{line}").expect("the program reads");
    }

    /// Receives a line.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the program writes");
        line.trim().to_owned()
    }

    /// Sends a line and receives the answer.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.hear()
    }

    /// Asks for `pages` filled pages.
    pub(crate) fn fill(&mut self, pages: usize) -> u64 {
        u64::from_str_radix(&self.ask(&format!("fill {pages}")), 16).expect("an address")
    }

    /// Ends its input; its status and what it wrote to standard error.
    pub(crate) fn end(&mut self) -> (ExitStatus, String) {
        self.input = None;
        let mut complaint = String::new();
        let mut errors = self.child.stderr.take().expect("piped");
        errors.read_to_string(&mut complaint).expect("text");
        (self.child.wait().expect("it ends"), complaint)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // A test that failed leaves it running, perhaps waiting for a page.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The library of `early.c`.
pub(crate) fn early_library() -> PathBuf {
    compile("early", &["-shared", "-fPIC"])
}

/// Names of a process's threads.
pub(crate) fn thread_names(pid: i32) -> Vec<String> {
    threads(pid).into_values().collect()
}

/// A process's threads: ids and names.
pub(crate) fn threads(pid: i32) -> HashMap<u32, String> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return HashMap::new() };
    tasks
        .filter_map(|task| {
            let task = task.ok()?;
            let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
            Some((task.file_name().to_str()?.parse().ok()?, name.trim().to_owned()))
        })
        .collect()
}

/// The agent's thread id and the descriptors that it has open: number and what
/// it is.
pub(crate) fn agent_descriptors(pid: i32) -> (u32, Vec<(u32, String)>) {
    let agents = threads(pid).into_iter().filter(|(_, name)| name == "strata-agent");
    let (agent, _) = agents.last().expect("an agent");
    let directory = std::fs::read_dir(format!("/proc/{pid}/task/{agent}/fd")).expect("as root");
    let descriptors = directory.filter_map(|entry| {
        let entry = entry.ok()?;
        let target = std::fs::read_link(entry.path()).ok()?;
        Some((entry.file_name().to_str()?.parse().ok()?, target.to_string_lossy().into_owned()))
    });
    (agent, descriptors.collect())
}

/// Stops a process as a whole, as a dump does, and waits until its agent stands.
pub(crate) fn stop(pid: i32) {
    raw::signal(pid, libc::SIGSTOP);
    let (agent, _) = agent_descriptors(pid);
    let path = format!("/proc/{pid}/task/{agent}/status");
    wait_until("the process is stopped", || {
        std::fs::read_to_string(&path).expect("it lives").contains("State:\tT")
    });
}

/// Private anonymous mappings, addresses of their first byte and of their end.
pub(crate) fn private_mappings(pid: i32) -> Vec<(u64, u64)> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
    let mapping = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [range, access, _, _, "0", name @ ..] = fields.as_slice() else { return None };
        let known = matches!(name, [] | ["[heap]" | "[stack]"]);
        let (start, end) = range.split_once('-')?;
        let number = |hex| u64::from_str_radix(hex, 16).expect("an address");
        (known && access.ends_with('p')).then(|| (number(start), number(end)))
    };
    maps.lines().filter_map(mapping).collect()
}

/// The signals that a thread has blocked, signal `n` as bit `n - 1`.
pub(crate) fn blocked_signals(pid: i32, thread: u32) -> u64 {
    let path = format!("/proc/{pid}/task/{thread}/status");
    let status = std::fs::read_to_string(path).expect("the thread lives");
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask");
    u64::from_str_radix(blocked.trim(), 16).expect("in hex")
}

/// A line of a thread's `status`, without its name.
pub(crate) fn status(pid: i32, thread: u32, name: &str) -> String {
    let path = format!("/proc/{pid}/task/{thread}/status");
    let status = std::fs::read_to_string(path).expect("the thread lives");
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name}")).trim().to_owned()
}
