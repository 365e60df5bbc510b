//! The program that is dumped: parent, child, a zombie and threads; a socket to
//! ask it, memory to check, files of several kinds.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use strata_sys::Pidfd;

/// Longest wait for anything in these tests.
const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn signal(pid: u32, signal: i32) {
    Pidfd::open(pid).expect("it lives").signal(signal);
}

pub(crate) fn is_stopped(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    status.lines().any(|line| line.starts_with("State:\tT "))
}

pub(crate) struct Program {
    child: Option<Child>,
    pid: u32,
    home: PathBuf,
}

impl Program {
    pub(crate) fn start(home: &Path) -> Self {
        let log = fs::File::create(home.join("log")).expect("a log");
        // A session of its own: whoever runs the tests may have one that is led
        // from outside of this pid namespace, which CRIU cannot take.
        let mut command = Command::new("python3");
        strata_sys::own_session(&mut command);
        let child = command
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/criu/program.py"))
            .arg(home)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("python3 starts");
        let pid = child.id();
        let program = Self { child: Some(child), pid, home: home.to_owned() };
        wait_until("it listens", || program.try_ask_in(home, "ping").is_some());
        program
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// What it says its memory sums up to.
    pub(crate) fn sum(&self) -> String {
        fs::read_to_string(self.home.join("sum")).expect("its sum")
    }

    pub(crate) fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.home.join("socket")).expect("it listens");
        stream.set_read_timeout(Some(LIMIT)).expect("a limit");
        assert_eq!(self.ask_on(&stream, "hello"), "hello");
        stream
    }

    pub(crate) fn ask_on(&self, mut stream: &UnixStream, what: &str) -> String {
        stream.write_all(what.as_bytes()).expect("sent");
        let mut buffer = [0; 200];
        let got = stream.read(&mut buffer).expect("an answer");
        String::from_utf8_lossy(&buffer[..got]).into_owned()
    }

    pub(crate) fn try_ask_in(&self, home: &Path, what: &str) -> Option<String> {
        let mut stream = UnixStream::connect(home.join("socket")).ok()?;
        stream.set_read_timeout(Some(LIMIT)).ok()?;
        stream.write_all(what.as_bytes()).ok()?;
        let mut buffer = [0; 200];
        let got = stream.read(&mut buffer).ok().filter(|got| *got > 0)?;
        Some(String::from_utf8_lossy(&buffer[..got]).into_owned())
    }

    pub(crate) fn ask_in(&self, home: &Path, what: &str) -> String {
        self.try_ask_in(home, what).unwrap_or_else(|| {
            let log = fs::read_to_string(home.join("log")).unwrap_or_default();
            panic!("no answer to {what}; it said: {log}")
        })
    }

    pub(crate) fn ask(&self, what: &str) -> String {
        self.ask_in(&self.home, what)
    }

    pub(crate) fn tracer(&self) -> u32 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).expect("it lives");
        let line = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
        line.and_then(|text| text.trim().parse().ok()).expect("a number")
    }

    pub(crate) fn is_traced(&self) -> bool {
        self.tracer() != 0
    }

    /// Ends it and its child, and waits until their numbers are free.
    pub(crate) fn kill(&mut self) {
        let tree = strata_snapshot::process_tree(self.pid);
        for pid in &tree {
            if let Ok(pidfd) = Pidfd::open(*pid) {
                pidfd.signal(9);
            }
        }
        if let Some(mut child) = self.child.take() {
            child.wait().expect("ended");
        }
        wait_until("they are gone", || {
            tree.iter().all(|pid| strata_snapshot::process_tree(*pid).is_empty())
        });
    }

    /// A restored one is not our child, but is ended with the test too.
    pub(crate) fn adopt(&mut self, pid: u32) {
        self.pid = pid;
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        for pid in strata_snapshot::process_tree(self.pid) {
            if let Ok(pidfd) = Pidfd::open(pid) {
                pidfd.signal(9);
            }
        }
        if let Some(child) = &mut self.child {
            let _ = child.wait();
        }
    }
}
