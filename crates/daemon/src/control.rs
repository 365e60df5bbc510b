//! The control socket: reads one request from each connection, hands it to the
//! [`Handler`], writes the reply. Everything that arrives here is untrusted.
//!
//! It bounds what a client can cost: connections in all and per user, bytes and
//! seconds per request. What a request does, and whether this peer may ask for
//! it, is the handler's business.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;
use strata_api::{MAX_LINE_BYTES, Progress, Reply, Request, name_problem};
use strata_sys::peer::{Peer, peer_lives, peer_of};

/// What answers requests. Called from many threads at once, one per connection;
/// it may take its time.
pub(crate) trait Handler: Send + Sync + 'static {
    /// Does what `peer` asks, if `peer` may ask it. Names in `request` are
    /// well-formed (see [`name_problem`]); all else is as the client sent it.
    /// `tell` passes on how far long work is; it is cheap to call often.
    fn handle(
        &self,
        peer: Peer,
        request: Request,
        tell: &mut (dyn FnMut(Progress) + Send),
    ) -> Reply;

    /// Writes one line to the daemon's log: about a client that was refused.
    /// The rate is bounded here, whatever clients do.
    fn log(&self, line: &str);
}

/// What one client, and all together, may cost.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Connections at a time. Each costs a thread and at most a few times
    /// [`MAX_LINE_BYTES`] while its request is parsed.
    pub(crate) connections: usize,
    /// Part of `connections` that only root gets, so that users who fill theirs
    /// cannot lock the administrator out.
    pub(crate) reserved_for_root: usize,
    /// Connections at a time per user (root: no own limit).
    pub(crate) connections_per_user: usize,
    /// Longest request.
    pub(crate) line_bytes: usize,
    /// From accepting to the end of the request. The clock does not start anew
    /// with each byte, so trickling does not help.
    pub(crate) read_timeout: Duration,
    /// For the client to take its reply.
    pub(crate) write_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 64,
            reserved_for_root: 8,
            connections_per_user: 8,
            line_bytes: MAX_LINE_BYTES,
            read_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(5),
        }
    }
}

/// Log lines about refused clients per [`COMPLAINT_PERIOD`]; the rest is counted.
const COMPLAINTS: u32 = 20;
const COMPLAINT_PERIOD: Duration = Duration::from_secs(60);
/// Pause after the kernel refused a connection for want of descriptors or
/// memory: long enough not to spin, short enough not to be noticed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How often a client hears how far its request is.
const TELL_EVERY: Duration = Duration::from_millis(200);
/// Stack of a connection's thread. The JSON parser recurses at most 128 deep;
/// the handler is ours.
const STACK_BYTES: usize = 512 << 10;

/// Makes the listening socket at `path`, with file mode `mode`. A socket left
/// over from a dead daemon is replaced; a live daemon's is not.
///
/// # Errors
/// `AddrInUse` when a daemon answers there; else the kernel's.
pub(crate) fn bind(path: &Path, mode: u32) -> io::Result<UnixListener> {
    if let Ok(metadata) = path.symlink_metadata() {
        let taken = |what: &str| {
            io::Error::new(io::ErrorKind::AddrInUse, format!("{} {what}", path.display()))
        };
        if !metadata.file_type().is_socket() {
            return Err(taken("exists and is not a socket"));
        }
        match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // A full backlog, say, is a live daemon too.
            Ok(_) | Err(_) => return Err(taken("is in use by another stratad")),
        }
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Ok(listener)
}

/// A control socket that is being served by a thread of its own.
pub(crate) struct ControlServer {
    shared: Arc<Shared>,
    listener: UnixListener,
    thread: JoinHandle<()>,
}

impl ControlServer {
    /// Starts to serve `listener`.
    ///
    /// # Errors
    /// The listener cannot be duplicated or the thread cannot be made.
    pub(crate) fn start(
        listener: UnixListener,
        limits: Limits,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            limits,
            handler,
            stop: AtomicBool::new(false),
            admitted: Mutex::default(),
            complaints: Mutex::new(Complaints::new(Instant::now())),
        });
        let accepting = Arc::clone(&shared);
        let accept_from = listener.try_clone()?;
        let thread = thread::Builder::new()
            .name("control".into())
            .spawn(move || accept_loop(&accepting, &accept_from))?;
        Ok(Self { shared, listener, thread })
    }

    /// Accepts no more connections; those under way are finished by their own
    /// threads. The listener itself stays open where it is held elsewhere.
    ///
    /// # Errors
    /// The accepting thread could not be woken.
    pub(crate) fn stop(self) -> io::Result<()> {
        self.shared.stop.store(true, Ordering::SeqCst);
        // `accept` waits for someone to come; so someone comes.
        let address = self.listener.local_addr()?;
        drop(UnixStream::connect_addr(&address)?);
        self.thread.join().map_err(|_| io::Error::other("the control thread panicked"))
    }

    /// Connections being served now.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        lock(&self.shared.admitted).total
    }
}

struct Shared {
    limits: Limits,
    handler: Arc<dyn Handler>,
    stop: AtomicBool,
    admitted: Mutex<Admitted>,
    complaints: Mutex<Complaints>,
}

/// A panic while a lock is held is our own bug and ends the process in release
/// builds; the counters behind these locks are valid at any moment anyway.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Admitted {
    total: usize,
    by_user: HashMap<u32, usize>,
}

impl Admitted {
    fn admit(&mut self, uid: u32, limits: &Limits) -> Result<(), &'static str> {
        let own = self.by_user.get(&uid).copied().unwrap_or(0);
        let free = limits.connections.saturating_sub(self.total);
        let refusal = match uid {
            0 if free == 0 => Some("stratad has too many connections"),
            0 => None,
            _ if own >= limits.connections_per_user => Some("you have too many connections"),
            _ if free <= limits.reserved_for_root => Some("stratad has too many connections"),
            _ => None,
        };
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        self.total += 1;
        self.by_user.insert(uid, own + 1);
        Ok(())
    }

    fn leave(&mut self, uid: u32) {
        self.total -= 1;
        let own = self.by_user.get_mut(&uid).expect("whoever leaves was admitted");
        *own -= 1;
        if *own == 0 {
            self.by_user.remove(&uid);
        }
    }
}

/// A place among the admitted; given back when dropped, whatever happens.
struct Place {
    shared: Arc<Shared>,
    peer: Peer,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.shared.admitted).leave(self.peer.uid);
    }
}

/// Bounds the log: a client that is refused ten thousand times a second must
/// not fill the disk.
struct Complaints {
    period_start: Instant,
    in_period: u32,
}

impl Complaints {
    fn new(now: Instant) -> Self {
        Self { period_start: now, in_period: 0 }
    }

    /// What to log for one more complaint, if anything.
    fn line(&mut self, now: Instant, text: &str) -> Option<String> {
        let mut dropped = 0;
        if now.duration_since(self.period_start) >= COMPLAINT_PERIOD {
            dropped = self.in_period.saturating_sub(COMPLAINTS);
            *self = Self::new(now);
        }
        self.in_period = self.in_period.saturating_add(1);
        match (self.in_period <= COMPLAINTS, dropped) {
            (false, _) => None,
            (true, 0) => Some(format!("control: {text}")),
            (true, n) => Some(format!("control: {text} ({n} earlier complaints not logged)")),
        }
    }
}

impl Shared {
    fn complain(&self, peer: Option<Peer>, text: &str) {
        let who = match peer {
            Some(peer) => format!("client pid {} uid {}: {text}", peer.pid, peer.uid),
            None => text.to_owned(),
        };
        let line = lock(&self.complaints).line(Instant::now(), &who);
        if let Some(line) = line {
            self.handler.log(&line);
        }
    }
}

fn accept_loop(shared: &Arc<Shared>, listener: &UnixListener) {
    loop {
        let accepted = listener.accept();
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        match accepted {
            Ok((stream, _)) => admit(shared, stream),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                shared.complain(None, &format!("cannot accept a connection: {error}"));
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn admit(shared: &Arc<Shared>, stream: UnixStream) {
    let accepted_at = Instant::now();
    let peer = match peer_of(&stream) {
        Ok(peer) => peer,
        Err(error) => {
            shared.complain(None, &format!("cannot tell who connected: {error}"));
            return;
        }
    };
    let admitted = lock(&shared.admitted).admit(peer.uid, &shared.limits);
    if let Err(why) = admitted {
        shared.complain(Some(peer), why);
        refuse_at_once(stream, why);
        return;
    }
    let place = Place { shared: Arc::clone(shared), peer };
    let spawned = thread::Builder::new()
        .name("control-client".into())
        .stack_size(STACK_BYTES)
        .spawn(move || converse(&place, stream, accepted_at));
    // The closure, and with it the connection and the place, is gone then.
    if let Err(error) = spawned {
        shared.complain(Some(peer), &format!("cannot make a thread: {error}"));
    }
}

/// Tells a client that there is no room, without waiting for it: this runs on
/// the accepting thread.
fn refuse_at_once(mut stream: UnixStream, why: &str) {
    let reply = Reply::Error { message: why.to_owned(), hint: "try again in a moment".into() };
    if stream.set_nonblocking(true).is_ok() {
        // A client that does not even take one line gets none.
        let _ = stream.write(&encode(&reply));
    }
}

fn converse(place: &Place, mut stream: UnixStream, accepted_at: Instant) {
    let Place { shared, peer } = place;
    let limits = &shared.limits;
    let reply = match read_line(&mut stream, limits.line_bytes, accepted_at + limits.read_timeout) {
        Ok(line) => match parse(&line) {
            Ok(request) if request.is_about_the_caller() && !peer_lives(&stream) => {
                let why = "asks for a process that has ended".to_owned();
                shared.complain(Some(*peer), &why);
                Reply::Error { message: why, hint: String::new() }
            }
            Ok(request) => {
                let mut told = Instant::now();
                let mut tell = |progress: Progress| {
                    if told.elapsed() >= TELL_EVERY {
                        told = Instant::now();
                        // Who does not listen gets the reply all the same.
                        let deadline = told + TELL_EVERY;
                        let _ = write_all(&mut stream, &line_of(&progress), deadline);
                    }
                };
                shared.handler.handle(*peer, request, &mut tell)
            }
            Err(why) => {
                shared.complain(Some(*peer), &why);
                Reply::Error { message: why, hint: "use a strata of the same version".into() }
            }
        },
        // Looking whether anyone listens is no offence (`bind` does it too).
        Err(Unread::Nothing) => return,
        Err(unread) => {
            let why = unread.to_string();
            shared.complain(Some(*peer), &why);
            Reply::Error { message: why, hint: String::new() }
        }
    };
    let deadline = Instant::now() + limits.write_timeout;
    if let Err(error) = write_all(&mut stream, &encode(&reply), deadline) {
        // A client that went away (Ctrl-C) is none either.
        if error.kind() != io::ErrorKind::BrokenPipe {
            shared.complain(Some(*peer), &format!("did not take its reply: {error}"));
        }
    }
}

/// Why there is no request.
#[derive(Debug)]
enum Unread {
    Nothing,
    TooLong(usize),
    TimedOut,
    Io(io::Error),
}

impl std::fmt::Display for Unread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nothing => write!(f, "no request"),
            Self::TooLong(limit) => write!(f, "the request is longer than {limit} bytes"),
            Self::TimedOut => write!(f, "the request did not come in time"),
            Self::Io(error) => write!(f, "cannot read the request: {error}"),
        }
    }
}

/// Time until `deadline`; None when it has passed. (Zero would mean "wait for
/// ever" to the kernel.)
fn remaining(deadline: Instant) -> Option<Duration> {
    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// For what has arrived when the time is over.
const LAST_LOOK: Duration = Duration::from_millis(1);

/// Reads up to a line feed or the client's end of sending. What follows the
/// line feed is not looked at. Memory grows with what has arrived, not with what
/// is allowed. What has arrived at the deadline is read all the same: it was not the
/// client that kept this thread from running.
fn read_line(
    stream: &mut UnixStream,
    limit_bytes: usize,
    deadline: Instant,
) -> Result<Vec<u8>, Unread> {
    let mut line = Vec::new();
    let mut chunk = [0u8; 16 << 10];
    loop {
        let left = remaining(deadline);
        stream.set_read_timeout(Some(left.unwrap_or(LAST_LOOK))).map_err(Unread::Io)?;
        let count = match stream.read(&mut chunk) {
            Ok(0) if line.is_empty() => return Err(Unread::Nothing),
            Ok(0) => return Ok(line),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if is_timeout(&error) => return Err(Unread::TimedOut),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Err(Unread::Nothing);
            }
            Err(error) => return Err(Unread::Io(error)),
        };
        let arrived = &chunk[..count];
        let end = arrived.iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&arrived[..end.unwrap_or(count)]);
        if line.len() > limit_bytes {
            return Err(Unread::TooLong(limit_bytes));
        }
        if end.is_some() {
            return Ok(line);
        }
        if left.is_none() && count < chunk.len() {
            return Err(Unread::TimedOut);
        }
    }
}

fn write_all(stream: &mut UnixStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = remaining(deadline).ok_or(io::ErrorKind::TimedOut)?;
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_timeout(&error) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A request, with names that are names. The error is one line for the client;
/// it repeats nothing that the client sent beyond what the JSON parser quotes.
fn parse(line: &[u8]) -> Result<Request, String> {
    let request: Request = serde_json::from_slice(line)
        .map_err(|error| format!("this is not a request: {}", printable(&error.to_string())))?;
    // Names of snapshots are checked by their own type.
    let (name, dram_bytes) = match &request {
        Request::Ping
        | Request::List
        | Request::ShareOut { .. }
        | Request::SnapshotSelf { .. }
        | Request::Place { .. }
        | Request::Where { .. }
        | Request::SnapshotRemove { .. }
        | Request::SnapshotPersist { .. }
        | Request::SnapshotExport { .. } => (None, None),
        Request::Run { name, dram_bytes, .. } => (name.as_ref(), *dram_bytes),
        Request::Set { name, dram_bytes } => (Some(name), Some(*dram_bytes)),
        Request::Stats { name }
        | Request::Guest { name, .. }
        | Request::Advise { name, .. }
        | Request::Release { name }
        | Request::Stop { name }
        | Request::Snapshot { name, .. }
        | Request::Rollback { name, .. }
        | Request::Became { name, .. } => (Some(name), None),
        Request::Snapshots { name, .. }
        | Request::Restore { name, .. }
        | Request::Clone { name, .. }
        | Request::SnapshotImport { name, .. } => (name.as_ref(), None),
    };
    if let Some(problem) = name.and_then(|name| name_problem(name)) {
        return Err(problem.to_owned());
    }
    if dram_bytes == Some(0) {
        return Err("a budget of 0 bytes holds nothing".to_owned());
    }
    if let Some(problem) = request.snapshot_problem() {
        return Err(printable(&problem));
    }
    if let Some(problem) = request.curve_problem() {
        return Err(problem.to_owned());
    }
    Ok(request)
}

/// Longest piece of foreign text that goes into a message or the log.
const MAX_QUOTED_CHARS: usize = 200;

/// Foreign text, fit for a terminal and a log: no control characters, not long.
fn printable(text: &str) -> String {
    let clean = |c: char| if c.is_control() { '?' } else { c };
    text.chars().take(MAX_QUOTED_CHARS).map(clean).collect()
}

/// One line, line feed included.
fn line_of(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("messages have no keys but strings");
    line.push(b'\n');
    line
}

fn encode(reply: &Reply) -> Vec<u8> {
    let line = line_of(reply);
    if line.len() <= MAX_LINE_BYTES {
        return line;
    }
    line_of(&Reply::Error {
        message: format!("the reply would be longer than {MAX_LINE_BYTES} bytes"),
        hint: "ask for one tenant at a time: strata stats NAME, strata snapshots NAME".into(),
    })
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
