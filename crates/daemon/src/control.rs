//! The control socket: reads one request from each connection, hands it to the
//! [`Handler`], writes the reply. Everything that arrives here is untrusted.
//!
//! It bounds what a client can cost: connections in all and per user (`admission.rs`),
//! bytes and seconds per request. What a request does, and whether this peer may ask for
//! it, is the handler's business.

use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;
use strata_api::{
    MAX_LINE_BYTES, NO_ROOM_NOW, Progress, Reply, Request, name_problem, named_problem,
};
use strata_sys::peer::{KnownPeer, Peer, peer_of};

use crate::admission::{Deadline, Gate, Place, Room};

/// What answers requests. Called from many threads at once, one per connection;
/// it may take its time.
pub(crate) trait Handler: Send + Sync + 'static {
    /// Does what `peer` asks, if `peer` may ask it. Names in `request` are well-formed
    /// (see [`name_problem`], [`named_problem`]); all else is as the client sent it.
    /// `known`: the process, which lives, where the request is about it.
    /// `tell` passes on how far long work is; it is cheap to call often.
    fn handle(
        &self,
        peer: Peer,
        known: Option<KnownPeer>,
        request: Request,
        tell: &mut (dyn FnMut(Progress) + Send),
    ) -> Reply;

    /// Does what `peer` asks by a request that is a conversation (see
    /// [`Request::is_conversation`]), which goes on on `stream`.
    fn converse(&self, peer: Peer, request: Request, stream: UnixStream);

    /// Writes one line to the daemon's log, about a client of user `uid` that was
    /// refused, unless there were too many of theirs.
    fn log(&self, uid: u32, line: &str);
}

/// What one client, and all together, may cost.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Each connection costs a thread and at most a few times [`MAX_LINE_BYTES`]
    /// while its request is parsed.
    pub(crate) room: Room,
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
            room: Room { all: 64, for_root: 8, per_user: 8 },
            line_bytes: MAX_LINE_BYTES,
            read_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(5),
        }
    }
}

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
            gate: Gate::new(limits.room),
            limits,
            handler,
            stop: AtomicBool::new(false),
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

    /// From now on one user may have so many connections at a time.
    pub(crate) fn admit_of_each(&self, per_user: usize) {
        self.shared.gate.admit_of_each(per_user);
    }

    /// Tells, also after its end, how many connections are being served.
    pub(crate) fn counter(&self) -> impl Fn() -> usize + use<> {
        let gate = Arc::clone(&self.shared.gate);
        move || gate.count()
    }

    /// Connections being served now.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        self.shared.gate.count()
    }
}

struct Shared {
    gate: Arc<Gate>,
    limits: Limits,
    handler: Arc<dyn Handler>,
    stop: AtomicBool,
}

impl Shared {
    fn complain(&self, peer: Peer, text: &str) {
        let Peer { pid, uid, .. } = peer;
        self.handler.log(uid, &format!("control: client pid {pid} uid {uid}: {text}"));
    }
}

fn accept_loop(shared: &Arc<Shared>, listener: &UnixListener) {
    loop {
        let accepted = listener.accept();
        if shared.stop.load(Ordering::SeqCst) {
            // Somebody else may have come at the same time, and then whoever stopped this is
            // still to come: what it left would look like a client to who listens here next.
            let is_own = |peer: Peer| peer.pid == std::process::id();
            match accepted {
                Ok((stream, _)) if !peer_of(&stream).is_ok_and(is_own) => admit(shared, stream),
                _ => return,
            }
            continue;
        }
        match accepted {
            Ok((stream, _)) => admit(shared, stream),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                shared.handler.log(0, &format!("control: cannot accept a connection: {error}"));
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn admit(shared: &Arc<Shared>, stream: UnixStream) {
    let deadline = Deadline::after(shared.limits.read_timeout);
    let peer = match peer_of(&stream) {
        Ok(peer) => peer,
        Err(error) => {
            shared.handler.log(0, &format!("control: cannot tell who connected: {error}"));
            return;
        }
    };
    let place = match shared.gate.admit(peer.uid) {
        Ok(place) => place,
        Err(full) => {
            shared.complain(peer, full.reason());
            refuse_at_once(stream, full.reason());
            return;
        }
    };
    let own = Arc::clone(shared);
    let spawned = thread::Builder::new()
        .name("control-client".into())
        .stack_size(STACK_BYTES)
        .spawn(move || converse(&own, place, peer, stream, deadline));
    // The closure, and with it the connection and the place, is gone then.
    if let Err(error) = spawned {
        shared.complain(peer, &format!("cannot make a thread: {error}"));
    }
}

/// Tells a client that there is no room, without waiting for it: this runs on
/// the accepting thread.
fn refuse_at_once(mut stream: UnixStream, why: &str) {
    let reply = Reply::Error { message: why.to_owned(), hint: NO_ROOM_NOW.into() };
    if stream.set_nonblocking(true).is_ok() {
        // A client that does not even take one line gets none.
        let _ = stream.write(&encode(&reply));
    }
}

fn converse(shared: &Shared, place: Place, peer: Peer, mut stream: UnixStream, deadline: Deadline) {
    // Also while the request is carried out.
    let _place = place;
    let limits = &shared.limits;
    let reply = match read_line(&mut stream, limits.line_bytes, deadline) {
        Ok(line) => match parse(&line) {
            Ok(request) if request.is_conversation() => {
                return shared.handler.converse(peer, request, stream);
            }
            Ok(request) => {
                let known = match request.is_about_the_caller() {
                    true => KnownPeer::of(&stream).map(Some),
                    false => Ok(None),
                };
                let mut told = Instant::now();
                let mut tell = |progress: Progress| {
                    if told.elapsed() >= TELL_EVERY {
                        told = Instant::now();
                        // Who does not listen gets the reply all the same.
                        let deadline = Deadline::after(TELL_EVERY);
                        let _ = write_all(&mut stream, &line_of(&progress), deadline);
                    }
                };
                match known {
                    Ok(known) => shared.handler.handle(peer, known, request, &mut tell),
                    Err(_) => {
                        let why = "asks for a process that has ended".to_owned();
                        shared.complain(peer, &why);
                        Reply::Error { message: why, hint: String::new() }
                    }
                }
            }
            Err(why) => {
                shared.complain(peer, &why);
                Reply::Error { message: why, hint: "use a strata of the same version".into() }
            }
        },
        // Looking whether anyone listens is no offence (`bind` does it too).
        Err(Unread::Nothing) => return,
        Err(unread) => {
            let why = unread.to_string();
            shared.complain(peer, &why);
            Reply::Error { message: why, hint: String::new() }
        }
    };
    let deadline = Deadline::after(limits.write_timeout);
    if let Err(error) = write_all(&mut stream, &encode(&reply), deadline) {
        // A client that went away (Ctrl-C) is none either.
        if error.kind() != io::ErrorKind::BrokenPipe {
            shared.complain(peer, &format!("did not take its reply: {error}"));
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
    deadline: Deadline,
) -> Result<Vec<u8>, Unread> {
    let mut line = Vec::new();
    let mut chunk = [0u8; 16 << 10];
    loop {
        let left = deadline.left();
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

fn write_all(stream: &mut UnixStream, mut bytes: &[u8], deadline: Deadline) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(deadline.time_left()?))?;
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
    let (new, named, dram_bytes) = match &request {
        Request::Ping
        | Request::Receive
        | Request::MoveDisk { .. }
        | Request::Reload
        | Request::Upgrade
        | Request::Pools
        | Request::Shares
        | Request::List { .. }
        | Request::ShareOut { .. }
        | Request::SnapshotSelf { .. }
        | Request::Place { .. }
        | Request::Where { .. }
        | Request::SnapshotRemove { .. }
        | Request::SnapshotPersist { .. }
        | Request::SnapshotExport { .. }
        | Request::SnapshotCore { .. } => (None, None, None),
        Request::Run { name, dram_bytes, .. } => (name.as_ref(), None, *dram_bytes),
        Request::PoolCreate { name, .. } => (Some(name), None, None),
        Request::Set { name, dram_bytes } => (None, Some(name), Some(*dram_bytes)),
        Request::Stats { name }
        | Request::Guest { name, .. }
        | Request::GuestFill { name, .. }
        | Request::GuestOrder { name, .. }
        | Request::GuestResume { name }
        | Request::Claim { name, .. }
        | Request::Advise { name, .. }
        | Request::Release { name }
        | Request::Stop { name }
        | Request::Snapshot { name, .. }
        | Request::Move { name, .. }
        | Request::Rollback { name, .. }
        | Request::PoolEmpty { name }
        | Request::PoolRemove { name }
        | Request::Became { name, .. } => (None, Some(name), None),
        Request::Snapshots { name, .. }
        | Request::GuestAgain { name, .. }
        | Request::Restore { name, .. }
        | Request::Clone { name, .. }
        | Request::SnapshotImport { name, .. } => (name.as_ref(), None, None),
    };
    let problem = new.and_then(|name| name_problem(name));
    if let Some(problem) = problem.or_else(|| named.and_then(|name| named_problem(name))) {
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
