//! A disk over NBD: some threads read a connection's requests in turns, carry them out and
//! answer, in whatever order they are ready. Everything that is read here is untrusted.

use std::cell::RefCell;
use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use strata_units::PageBuffer;

use crate::disk::{Cache, Disk, Failure, NoCache, in_pages};
use crate::link::Links;
use crate::nbd::{self, Agreed, Command, Handshake, Next, Request, reply};
use crate::pool::lock;

/// Threads that carry out one connection's requests.
const WORKERS: usize = 4;
/// Of what a client sends, read at a time.
const READ_BYTES: usize = 64 << 10;
/// Bytes that all requests under way may hold; one alone may hold more.
const MAX_UNDER_WAY_BYTES: u64 = 64 << 20;
/// Connections at a time.
const MAX_CONNECTIONS: usize = 16;
/// For each piece of a handshake to come.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// A thread keeps a buffer of so many pages, and gives a larger one back.
const KEPT_PAGES: usize = 256;

/// Bytes of requests under way.
#[derive(Debug, Default)]
struct UnderWay {
    bytes: Mutex<u64>,
    less: Condvar,
}

struct Bytes<'a>(&'a UnderWay, u64);

impl UnderWay {
    /// Waits until there is room for so many.
    fn hold(&self, bytes: u64) -> Bytes<'_> {
        let mut held = lock(&self.bytes);
        while *held > 0 && *held + bytes > MAX_UNDER_WAY_BYTES {
            held = self.less.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        *held += bytes;
        Bytes(self, bytes)
    }
}

impl Drop for Bytes<'_> {
    fn drop(&mut self) {
        *lock(&self.0.bytes) -= self.1;
        self.0.less.notify_all();
    }
}

/// What a client sends.
struct Requests {
    stream: BufReader<UnixStream>,
    /// How it came to an end, for those whose turn it would be.
    ended: Option<io::Result<()>>,
}

/// Whose turn it is to read requests. One thread reads a request, carries it out and reads
/// the next, so that nobody has to be woken for it; it gives its turn to another before
/// it waits for a device, and when the next request is there already.
struct Turn<'a> {
    requests: &'a Mutex<Requests>,
    held: RefCell<Option<MutexGuard<'a, Requests>>>,
}

impl<'a> Turn<'a> {
    /// Waits for it, unless this thread has it.
    fn take(&self) -> MutexGuard<'a, Requests> {
        self.held.take().unwrap_or_else(|| lock(self.requests))
    }

    fn keep(&self, turn: MutexGuard<'a, Requests>) {
        self.held.replace(Some(turn));
    }

    fn give(&self) {
        self.held.take();
    }
}

struct Job<'a> {
    request: Request,
    command: Command,
    /// What is to be written, where it lies in its pages.
    pages: Vec<PageBuffer>,
    bytes: Bytes<'a>,
}

/// See the module's text.
pub struct Export {
    disk: Disk,
    links: Option<Arc<Links>>,
    under_way: UnderWay,
    connections: Mutex<usize>,
    /// The disk has failed, and nothing was written since: that was said.
    fails: AtomicBool,
    complain: Box<dyn Fn(&str) + Send + Sync>,
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("disk", &self.disk).finish_non_exhaustive()
    }
}

impl Export {
    /// Of a disk; `links`: to its pool. `complain` hears what people should know.
    #[must_use]
    pub fn new(
        disk: Disk,
        links: Option<Arc<Links>>,
        complain: Box<dyn Fn(&str) + Send + Sync>,
    ) -> Self {
        let (under_way, connections) = (UnderWay::default(), Mutex::new(0));
        Self { disk, links, under_way, connections, fails: AtomicBool::new(false), complain }
    }

    /// Serves one client until it goes. Clients are served at the same time.
    ///
    /// # Errors
    /// The connection's; or the client is none.
    pub fn serve(&self, stream: UnixStream) -> io::Result<()> {
        {
            let mut connections = lock(&self.connections);
            if *connections >= MAX_CONNECTIONS {
                return Err(io::Error::other("there are too many connections"));
            }
            *connections += 1;
        }
        let served = self.converse(stream);
        *lock(&self.connections) -= 1;
        served
    }

    fn converse(&self, mut stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(HANDSHAKE_PATIENCE))?;
        stream.set_write_timeout(Some(HANDSHAKE_PATIENCE))?;
        stream.write_all(&Handshake::greeting())?;
        let mut handshake = Handshake::new(self.disk.info());
        let mut piece = Vec::new();
        let agreed = loop {
            piece.resize(handshake.wanted(), 0);
            stream.read_exact(&mut piece)?;
            let step = handshake.hear(&piece).map_err(nonsense)?;
            stream.write_all(&step.answer)?;
            match step.next {
                Next::More => {}
                Next::Transmission(agreed) => break agreed,
                Next::End => return Ok(()),
            }
        };
        // A guest may ask for nothing for days.
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        let answers = Mutex::new(stream.try_clone()?);
        let requests = Mutex::new(Requests {
            stream: BufReader::with_capacity(READ_BYTES, stream),
            ended: None,
        });
        std::thread::scope(|scope| {
            for _ in 1..WORKERS {
                let (requests, answers) = (&requests, &answers);
                let made = std::thread::Builder::new()
                    .name("export-io".into())
                    .spawn_scoped(scope, move || self.work(requests, answers, agreed));
                if let Err(error) = made {
                    // Those that there are already would wait for the client.
                    let _ = lock(answers).shutdown(Shutdown::Both);
                    return Err(error);
                }
            }
            self.work(&requests, &answers, agreed);
            Ok(())
        })?;
        let ended = lock(&requests).ended.take();
        ended.unwrap_or(Ok(()))
    }

    /// Reads requests and carries them out, in turns with others.
    fn work(&self, requests: &Mutex<Requests>, answers: &Mutex<UnixStream>, agreed: Agreed) {
        let mut link = self.links.as_ref().map(Links::link);
        let mut buffer = Vec::new();
        let turn = Turn { requests, held: RefCell::default() };
        loop {
            let mut reader = turn.take();
            if reader.ended.is_some() {
                return;
            }
            let job = match self.listen(&mut reader.stream, answers, &turn, agreed) {
                Ok(Some(job)) => job,
                other => {
                    if other.is_err() {
                        // Who waits for the client to take an answer waits no more.
                        let _ = reader.stream.get_ref().shutdown(Shutdown::Both);
                    }
                    reader.ended = Some(other.map(|_| ()));
                    return;
                }
            };
            let is_slow = self.disk.waits()
                && !matches!(job.command, Command::Read { .. } | Command::Status { .. });
            if !is_slow && reader.stream.buffer().is_empty() {
                turn.keep(reader);
            } else {
                drop(reader);
            }
            let cache: &mut dyn Cache = match &mut link {
                Some(link) => link,
                None => &mut NoCache,
            };
            // A client that takes no answer is gone, which its reader finds out.
            let _ = self.carry_out(job, cache, &mut buffer, answers, agreed, &turn);
            if buffer.len() > KEPT_PAGES {
                buffer = Vec::new();
            }
        }
    }

    /// Reads the next request. None: the client goes.
    fn listen(
        &self,
        stream: &mut BufReader<UnixStream>,
        answers: &Mutex<UnixStream>,
        turn: &Turn<'_>,
        agreed: Agreed,
    ) -> io::Result<Option<Job<'_>>> {
        loop {
            let mut bytes = [0; nbd::REQUEST_BYTES];
            match stream.read_exact(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
                other => other?,
            }
            let request = Request::parse(&bytes).map_err(nonsense)?;
            let payload = request.payload_bytes().map_err(nonsense)?;
            let command = match request.command(self.disk.info(), agreed) {
                Ok(Command::Disconnect) => return Ok(None),
                Ok(command) => command,
                Err(error) => {
                    // What was to be written is in the way of the next request.
                    skip(stream, payload.into())?;
                    send(answers, turn, &reply::failed(&request, agreed, error), &[])?;
                    continue;
                }
            };
            let held = match command {
                Command::Read { bytes, .. } | Command::Write { bytes, .. } => bytes,
                _ => 0,
            };
            let held = self.under_way.hold(held.into());
            let pages = match command {
                Command::Write { offset, bytes, .. } => {
                    in_pages((offset, bytes), |place| stream.read_exact(place))?.0
                }
                _ => Vec::new(),
            };
            return Ok(Some(Job { request, command, pages, bytes: held }));
        }
    }

    fn carry_out(
        &self,
        job: Job<'_>,
        cache: &mut dyn Cache,
        buffer: &mut Vec<PageBuffer>,
        answers: &Mutex<UnixStream>,
        agreed: Agreed,
        turn: &Turn<'_>,
    ) -> io::Result<()> {
        let Job { request, command, mut pages, bytes: _bytes } = job;
        let disk = &self.disk;
        let done = match command {
            Command::Read { offset, bytes } => {
                let head = reply::read(&request, agreed, offset, bytes);
                let answer = |data: &[u8]| send(answers, turn, &head, data);
                match disk.read(cache, buffer, (offset, bytes), &mut || turn.give(), answer) {
                    Ok(sent) => return sent,
                    Err(failure) => Err(failure),
                }
            }
            Command::Status { offset, bytes, one } => {
                let extents = disk.status((offset, bytes), one);
                return send(answers, turn, &reply::status(&request, &extents), &[]);
            }
            Command::Write { offset, bytes, fua } => {
                disk.write(cache, &mut pages, (offset, bytes), fua)
            }
            Command::Trim { offset, bytes, fua } => disk.trim(cache, (offset, bytes), fua),
            Command::Zero { offset, bytes, fua, keep_room } => {
                disk.zero(cache, (offset, bytes), keep_room, fua)
            }
            Command::Flush => disk.flush(),
            Command::Disconnect => return Ok(()),
        };
        let answer = match done {
            Ok(()) => {
                self.fails.store(false, Ordering::Relaxed);
                reply::done(&request)
            }
            Err(Failure { error, text }) => {
                if !self.fails.swap(true, Ordering::Relaxed) {
                    (self.complain)(&text);
                }
                reply::failed(&request, agreed, error)
            }
        };
        send(answers, turn, &answer, &[])
    }
}

fn nonsense(what: nbd::Nonsense) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

/// One answer, whole. A client that takes no answer yet may have to be heard first.
fn send(answers: &Mutex<UnixStream>, turn: &Turn<'_>, head: &[u8], data: &[u8]) -> io::Result<()> {
    let mut stream = answers.try_lock().unwrap_or_else(|_| {
        turn.give();
        lock(answers)
    });
    let sent = strata_sys::send_now(&stream, head, data)?;
    if sent < head.len() + data.len() {
        turn.give();
        stream.write_all(&head[sent.min(head.len())..])?;
        stream.write_all(&data[sent.saturating_sub(head.len())..])?;
    }
    Ok(())
}

fn skip(stream: &mut impl Read, bytes: u64) -> io::Result<()> {
    let skipped = io::copy(&mut stream.take(bytes), &mut io::sink())?;
    if skipped == bytes { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;
