//! Tests of the control socket: what hostile, slow, silent and many clients do
//! to it.

use super::*;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize};

use crate::lock::lock;

/// Remembers what it was asked and how much was logged.
#[derive(Default)]
struct Recorder {
    handled: AtomicUsize,
    logged: AtomicUsize,
    last: Mutex<Option<(Peer, Request)>>,
}

impl Handler for Recorder {
    fn handle(
        &self,
        peer: Peer,
        known: Option<KnownPeer>,
        request: Request,
        _: &mut (dyn FnMut(Progress) + Send),
    ) -> Reply {
        assert_eq!(known.is_some(), request.is_about_the_caller());
        self.handled.fetch_add(1, Ordering::SeqCst);
        *lock(&self.last) = Some((peer, request));
        Reply::Done { note: "handled".into() }
    }

    fn converse(&self, peer: Peer, request: Request, _: UnixStream) {
        *lock(&self.last) = Some((peer, request));
    }

    fn log(&self, _: u32, _line: &str) {
        self.logged.fetch_add(1, Ordering::SeqCst);
    }
}

struct Fixture {
    server: ControlServer,
    recorder: Arc<Recorder>,
    address: SocketAddr,
}

/// Abstract addresses leave nothing behind in the file system.
fn fixture(limits: Limits) -> Fixture {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::SeqCst);
    let name = format!("strata-control-test-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("address");
    let listener = UnixListener::bind_addr(&address).expect("bind");
    let recorder = Arc::new(Recorder::default());
    let handler: Arc<dyn Handler> = Arc::<Recorder>::clone(&recorder);
    let server = ControlServer::start(listener, limits, handler).expect("start");
    Fixture { server, recorder, address }
}

/// Much longer than any test takes; a client that meets it has found a hang.
const HANG: Duration = Duration::from_secs(60);

impl Fixture {
    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect_addr(&self.address).expect("connect");
        stream.set_read_timeout(Some(HANG)).expect("timeout");
        stream.set_write_timeout(Some(HANG)).expect("timeout");
        stream
    }

    fn exchange(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // The server may hang up before it has read everything.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        read_reply(stream)
    }

    /// Waits until nobody is being served: a panic in a client's thread would
    /// leave its place taken only if the guard did not work.
    fn drain(&self) {
        let deadline = Instant::now() + HANG;
        while self.server.connections() > 0 {
            assert!(Instant::now() < deadline, "a connection was never given back");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn read_reply(mut stream: UnixStream) -> String {
    let mut reply = String::new();
    match stream.read_to_string(&mut reply) {
        Ok(_) => {}
        Err(error) if is_timeout(&error) => panic!("the server hangs"),
        // Refused with bytes unread; what was sent before is in `reply`.
        Err(_) => {}
    }
    reply
}

fn many() -> Limits {
    Limits { room: Room { all: 4096, for_root: 8, per_user: 4096 }, ..Limits::default() }
}

fn is_error(reply: &str) -> bool {
    matches!(serde_json::from_str(reply), Ok(Reply::Error { .. }))
}

#[test]
fn a_request_reaches_the_handler_with_its_peer() {
    let fixture = fixture(Limits::default());
    let reply = fixture.exchange(b"{\"request\":\"stats\",\"name\":\"db\"}\n");
    assert!(reply.ends_with('\n') && reply.contains("handled"), "{reply}");
    let (peer, request) = lock(&fixture.recorder.last).take().expect("handled");
    assert_eq!(peer.pid, std::process::id());
    assert_eq!(request, Request::Stats { name: "db".into() });
    let Fixture { server, address, .. } = fixture;
    server.stop().expect("stop");
    UnixStream::connect_addr(&address).expect_err("nobody listens any more");
}

#[test]
fn garbage_is_answered_and_never_handled() {
    let fixture = fixture(many());
    let deep = "[".repeat(100_000);
    for garbage in [
        "\n",
        "{}\n",
        "null\n",
        "GET / HTTP/1.1\r\n\r\n",
        "{\"request\":\"fly\"}\n",
        "{\"request\":\"stats\",\"name\":\"../../etc\"}\n",
        "{\"request\":\"stats\",\"name\":\"\"}\n",
        "{\"request\":\"set\",\"name\":\"db\",\"dram_bytes\":0}\n",
        "{\"request\":\"stats\",\"name\":\":db\"}\n",
        "{\"request\":\"stats\",\"name\":\"a/b:db\"}\n",
        "{\"request\":\"stats\",\"name\":\"1:2:db\"}\n",
        "{\"request\":\"run\",\"name\":\"1:db\",\"dram_bytes\":null,\"command\":[]}\n",
        "{\"request\":\"set\",\"name\":\"db\",\"dram_bytes\":-1}\n",
        "{\"request\":\"set\",\"name\":\"db\",\"dram_bytes\":1e99}\n",
        "{\"request\":\"snapshot\",\"name\":\"db\",\"label\":\"7\",\"persist\":false}\n",
        "{\"request\":\"snapshot\",\"name\":\"a/b\",\"label\":null,\"persist\":false}\n",
        "{\"request\":\"snapshots\",\"name\":\"..\"}\n",
        "{\"request\":\"snapshot_remove\",\"snapshot\":\"db@../1\"}\n",
        "{\"request\":\"rollback\",\"name\":\"\",\"snapshot\":\"db@1\"}\n",
        "{\"request\":\"restore\",\"snapshot\":\"db@1\",\"name\":\"-x\"}\n",
        "{\"request\":\"snapshot_import\",\"path\":\"etc/passwd\",\"name\":null}\n",
        "{\"request\":\"snapshot_import\",\"path\":\"/x\",\"name\":\"a b\"}\n",
        "{\"request\":\"stats\",\"name\":\"db\"",
        deep.as_str(),
        "\u{0}\u{1}\u{1b}[2J\n",
    ] {
        let reply = fixture.exchange(garbage.as_bytes());
        assert!(is_error(&reply), "{garbage:.60?}: {reply}");
        assert!(!reply.contains('\u{1b}'), "{reply:?}");
    }
    assert_eq!(fixture.recorder.handled.load(Ordering::SeqCst), 0);
}

#[test]
fn a_request_longer_than_the_limit_is_cut_off() {
    let fixture = fixture(Limits { line_bytes: 1000, ..many() });
    let reply = fixture.exchange(&vec![b' '; 1 << 20]);
    assert!(reply.is_empty() || reply.contains("longer than 1000 bytes"), "{reply}");
    let fits = format!("{}{{\"request\":\"ping\"}}\n", " ".repeat(900));
    assert!(fixture.exchange(fits.as_bytes()).contains("handled"));
}

#[test]
fn a_client_that_trickles_is_dropped() {
    let limits = Limits { read_timeout: Duration::from_millis(300), ..many() };
    let fixture = fixture(limits);
    let mut slow = fixture.connect();
    let deadline = Instant::now() + HANG;
    // One byte at a time, far more often than the timeout.
    while slow.write_all(b" ").is_ok() {
        assert!(Instant::now() < deadline, "trickling kept the connection alive");
        thread::sleep(Duration::from_millis(10));
    }
    fixture.drain();
    // And one that sends nothing at all.
    let silent = fixture.connect();
    assert!(read_reply(silent).contains("in time"));
    fixture.drain();
}

#[test]
fn a_client_that_takes_no_reply_is_dropped() {
    struct Verbose;
    impl Handler for Verbose {
        fn handle(
            &self,
            _: Peer,
            _: Option<KnownPeer>,
            _: Request,
            _: &mut (dyn FnMut(Progress) + Send),
        ) -> Reply {
            Reply::Done { note: "x".repeat(MAX_LINE_BYTES - 100) }
        }
        fn converse(&self, _: Peer, _: Request, _: UnixStream) {}
        fn log(&self, _: u32, _: &str) {}
    }
    let (listener, address) = {
        let name = format!("strata-control-verbose-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("address");
        (UnixListener::bind_addr(&address).expect("bind"), address)
    };
    let limits = Limits { write_timeout: Duration::from_millis(200), ..many() };
    let server = ControlServer::start(listener, limits, Arc::new(Verbose)).expect("start");
    let mut stream = UnixStream::connect_addr(&address).expect("connect");
    stream.write_all(b"{\"request\":\"ping\"}\n").expect("write");
    // First it is served (the place is taken), then given up.
    let deadline = Instant::now() + HANG;
    let mut served = false;
    loop {
        let connections = server.connections();
        served |= connections == 1;
        if served && connections == 0 {
            break;
        }
        assert!(Instant::now() < deadline, "the server waits for ever");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn half_closed_and_vanished_clients() {
    let fixture = fixture(many());
    // `exchange` half-closes; without a line feed the end of sending is the end.
    assert!(fixture.exchange(b"{\"request\":\"ping\"}").contains("handled"));
    // Only looks.
    drop(fixture.connect());
    // Asks and goes.
    let mut gone = fixture.connect();
    gone.write_all(b"{\"request\":\"ping\"}\n").expect("write");
    drop(gone);
    // Goes in the middle.
    let mut gone = fixture.connect();
    gone.write_all(b"{\"request\":").expect("write");
    drop(gone);
    fixture.drain();
    assert!(fixture.exchange(b"{\"request\":\"ping\"}\n").contains("handled"));
}

#[test]
fn a_reply_that_would_not_fit_becomes_an_error() {
    let line = encode(&Reply::Done { note: "x".repeat(MAX_LINE_BYTES) });
    assert!(line.len() < 1000);
    assert!(is_error(&String::from_utf8(line).expect("text")));
}

#[test]
fn a_thousand_connections_at_once() {
    let fixture = fixture(Limits { read_timeout: HANG, ..Limits::default() });
    let uid = peer_of(UnixStream::pair().expect("pair").0).expect("peer").uid;
    let limits = Limits::default();
    let allowed = if uid == 0 { limits.room.all } else { limits.room.per_user };
    // All open, none has asked. Those beyond the limit are refused at once; they
    // are accepted in order, so when the last has its refusal, all have theirs.
    let mut open: Vec<UnixStream> = (0..1000).map(|_| fixture.connect()).collect();
    let refused = |reply: &str| is_error(reply) && reply.contains("too many connections");
    assert!(refused(&read_reply(open.pop().expect("a thousand"))));
    for (index, mut stream) in open.into_iter().enumerate() {
        let _ = stream.write_all(b"{\"request\":\"ping\"}\n");
        let reply = read_reply(stream);
        let expected = if index < allowed { reply.contains("handled") } else { refused(&reply) };
        assert!(expected, "{index}: {reply}");
    }
    // Nothing leaked, each refusal was for the log to bound, service goes on.
    fixture.drain();
    assert_eq!(fixture.recorder.logged.load(Ordering::SeqCst), 1000 - allowed);
    assert!(fixture.exchange(b"{\"request\":\"ping\"}\n").contains("handled"));
}

/// Small and seeded: xorshift64*, enough to vary bytes.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % bound
    }
}

/// A valid request with a few bytes changed, dropped, doubled or inserted.
fn mutated(random: &mut Random) -> Vec<u8> {
    const SEEDS: [&str; 7] = [
        r#"{"request":"ping"}"#,
        r#"{"request":"run","name":"db","dram_bytes":1073741824,"command":["redis","--x"]}"#,
        r#"{"request":"stats","name":"db"}"#,
        r#"{"request":"set","name":"db","dram_bytes":4096}"#,
        r#"{"request":"stop","name":"db"}"#,
        r#"{"name":"db","request":"release"}"#,
        r#"{"request":"snapshot_self","label":"good"}"#,
    ];
    let mut bytes = SEEDS[random.below(SEEDS.len())].as_bytes().to_vec();
    for _ in 0..random.below(6) {
        let at = random.below(bytes.len().max(1)).min(bytes.len());
        match random.below(5) {
            0 if at < bytes.len() => bytes[at] = random.below(256) as u8,
            1 if at < bytes.len() => drop(bytes.remove(at)),
            2 => bytes.insert(at, random.below(256) as u8),
            3 => {
                let copy = bytes[at..].to_vec();
                bytes.extend(copy);
            }
            _ => bytes.truncate(at),
        }
    }
    bytes.push(b'\n');
    bytes
}

#[test]
fn random_and_mutated_requests_are_answered_and_nothing_breaks() {
    let fixture = fixture(many());
    let mut random = Random(0x5354_5241_5441);
    let mut accepted = 0;
    for round in 0..3000 {
        let bytes = match round % 3 {
            0 => (0..random.below(5000)).map(|_| random.below(256) as u8).collect(),
            _ => mutated(&mut random),
        };
        let reply = fixture.exchange(&bytes);
        // An empty line of random length 0 is a client that only looked.
        if bytes.is_empty() {
            continue;
        }
        let Ok(reply) = serde_json::from_str::<Reply>(&reply) else {
            panic!("round {round}: no reply to {bytes:?}: {reply:?}");
        };
        accepted += usize::from(matches!(reply, Reply::Done { .. }));
    }
    fixture.drain();
    // The mutations must not all be trivial: some requests are still requests.
    assert!(accepted > 100, "{accepted}");
    assert_eq!(fixture.recorder.handled.load(Ordering::SeqCst), accepted);
}

#[test]
fn a_dead_socket_is_replaced_a_live_one_and_a_file_are_not() {
    let directory = std::env::temp_dir().join(format!("strata-bind-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("directory");
    let path = directory.join("control.sock");
    drop(bind(&path, 0o600).expect("first"));
    let live = bind(&path, 0o666).expect("left over from the first");
    let mode = std::fs::metadata(&path).expect("socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o666);
    assert_eq!(bind(&path, 0o600).expect_err("live").kind(), io::ErrorKind::AddrInUse);
    drop(live);
    std::fs::remove_file(&path).expect("socket");
    std::fs::write(&path, "precious").expect("file");
    bind(&path, 0o600).expect_err("a file");
    assert_eq!(std::fs::read_to_string(&path).expect("file"), "precious");
    std::fs::remove_dir_all(&directory).expect("clean up");
}
