//! A daemon made up for these tests, and what it is asked with.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};

use strata_api::{Latency, Reply, Request, Stats, TenantState};

use crate::STRATA;

/// Held for writing while a program's file is written, for reading while a child
/// is made: a child that inherits the open file for a moment makes executing it
/// fail (ETXTBSY).
static PROGRAMS: RwLock<()> = RwLock::new(());

pub(crate) fn spawn(command: &mut Command) -> Child {
    let _no_program_is_written = PROGRAMS.read().expect("no test panics while it writes");
    command.spawn().expect("strata runs")
}

pub(crate) fn output(command: &mut Command) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    spawn(command).wait_with_output().expect("it ends")
}

/// A directory of a test's own, removed at its end.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        let name = format!("strata-commands-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("directory");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).expect("mode");
        Self(path.canonicalize().expect("it is there"))
    }

    pub(crate) fn put(&self, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
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
pub(crate) struct Daemon {
    pub(crate) directory: Directory,
    requests: Receiver<Request>,
}

impl Daemon {
    pub(crate) fn new(answer: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        Self::speaking(move |request, _| answer(request))
    }

    /// One that may say something before its reply.
    pub(crate) fn speaking(
        answer: impl Fn(&Request, &dyn Fn(&str)) -> Reply + Send + 'static,
    ) -> Self {
        let directory = Directory::new();
        let listener = UnixListener::bind(directory.0.join("s")).expect("bind");
        let (sender, requests) = channel();
        // Ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                // Before the reply: who has it, finds the request recorded.
                let recording = |request: &Request, say: &dyn Fn(&str)| {
                    let _ = sender.send(request.clone());
                    answer(request, say)
                };
                serve(client.expect("a client"), recording);
            }
        });
        Self { directory, requests }
    }

    /// One that has `tenants` and says "done" to all else.
    pub(crate) fn with(tenants: Vec<Stats>) -> Self {
        Self::new(move |request| match request {
            Request::List { .. } => Reply::List { tenants: tenants.clone(), next: None },
            _ => Reply::Done { note: "so it is".into() },
        })
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(STRATA);
        command.args(arguments).env("STRATA_SOCKET", self.directory.0.join("s"));
        command.stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        output(&mut self.command(arguments))
    }

    pub(crate) fn all_requests(&self) -> Vec<Request> {
        self.requests.try_iter().collect()
    }

    pub(crate) fn last_request(&self) -> Option<Request> {
        self.requests.try_iter().last()
    }
}

fn serve(client: UnixStream, answer: impl Fn(&Request, &dyn Fn(&str)) -> Reply) {
    let mut line = String::new();
    BufReader::new(&client).read_line(&mut line).expect("a line");
    let request = serde_json::from_str(&line).expect("a request");
    let say = |line: &str| writeln!(&client, "{line}").expect("the client listens");
    let reply = answer(&request, &say);
    say(&serde_json::to_string(&reply).expect("a reply"));
}

pub(crate) fn stats(name: &str) -> Stats {
    Stats {
        name: name.into(),
        pids: vec![1],
        uid: 0,
        group: None,
        libraries: vec![],
        command: vec!["server".into()],
        state: TenantState::Managed,
        budget_bytes: 1 << 30,
        resident_bytes: 1 << 29,
        staged_bytes: 0,
        pinned_bytes: 0,
        unmanaged_bytes: 0,
        unmanaged_by: strata_api::UnmanagedBy::default(),
        unattended_processes: 0,
        unattended: vec![],
        shared_bytes: 0,
        swap_bytes: 0,
        stored_bytes: 0,
        kept_bytes: 0,
        compressed_bytes: 0,
        file_bytes: 0,
        node_bytes: 0,
        merged_bytes: 0,
        merged_saved_bytes: 0,
        metadata_bytes: 0,
        managed_pages: 0,
        stored_objects: 0,
        deduplicated_pages: 0,
        zero_pages: 0,
        snapshot_file_bytes: 0,
        faults_total: 3,
        soft_faults_total: 0,
        file_faults_total: 0,
        zero_faults_total: 0,
        prefetched_pages_total: 0,
        evictions_total: 0,
        evictions_unchanged_total: 0,
        evictions_refused_total: 0,
        discarded_pages_total: 0,
        lost_pages_total: 0,
        opposed_moves_total: 0,
        damon_promotions_total: 0,
        node_move_us_total: 0,
        stall: strata_api::Stall::default(),
        fault_latency_us: Latency::default(),
        tiers: vec![],
        worker_restarts_total: 0,
        uptime_seconds: 1.0,
        advice: None,
        guest: None,
        notes: vec![],
    }
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// The one line that a failure prints, after checking that it is one.
pub(crate) fn complaint(output: &Output, status: i32) -> String {
    let text = String::from_utf8(output.stderr.clone()).expect("text");
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert!(text.starts_with("strata: ") && text.ends_with('\n'), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("; "), "it does not say what to do: {text}");
    text
}
