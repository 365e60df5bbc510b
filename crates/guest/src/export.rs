//! A disk over NBD: one thread reads a connection's requests, some carry them out and
//! answer, in whatever order they are ready. Everything that is read here is untrusted.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use strata_units::PageBuffer;

use crate::disk::{Cache, Disk, Failure, NoCache, in_pages};
use crate::link::Links;
use crate::nbd::{self, Agreed, Command, Handshake, Next, Request, reply};
use crate::pool::lock;

/// Threads that carry out one connection's requests.
const WORKERS: usize = 4;
/// Requests that wait for one of them.
const WAITING: usize = 12;
/// Bytes that all requests under way may hold; one alone may hold more.
const MAX_UNDER_WAY_BYTES: u64 = 64 << 20;
/// Connections at a time.
const MAX_CONNECTIONS: usize = 16;
/// For each piece of a handshake to come.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// A thread keeps a buffer of so many pages, and gives a larger one back.
const KEPT_PAGES: usize = 256;
/// An answer of so many bytes goes out in one piece with what stands before it.
const SMALL_BYTES: usize = 64 << 10;

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
        Self { disk, links, under_way, connections, complain }
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
        let (sender, receiver) = sync_channel(WAITING);
        let receiver = Mutex::new(receiver);
        std::thread::scope(|scope| {
            for _ in 0..WORKERS {
                let (receiver, answers) = (&receiver, &answers);
                let made = std::thread::Builder::new()
                    .name("export-io".into())
                    .spawn_scoped(scope, move || self.work(receiver, answers, agreed));
                made?;
            }
            // When it returns the sender is gone: the workers finish what waits, and end.
            let listened = self.listen(&mut stream, sender, &answers, agreed);
            if listened.is_err() {
                // Who waits for the client to take an answer waits no more.
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
            listened
        })
    }

    /// Reads requests until the client goes.
    fn listen<'a>(
        &'a self,
        stream: &mut UnixStream,
        jobs: SyncSender<Job<'a>>,
        answers: &Mutex<UnixStream>,
        agreed: Agreed,
    ) -> io::Result<()> {
        loop {
            let mut bytes = [0; nbd::REQUEST_BYTES];
            match stream.read_exact(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            }
            let request = Request::parse(&bytes).map_err(nonsense)?;
            let payload = request.payload_bytes().map_err(nonsense)?;
            let command = match request.command(self.disk.info(), agreed) {
                Ok(Command::Disconnect) => return Ok(()),
                Ok(command) => command,
                Err(error) => {
                    // What was to be written is in the way of the next request.
                    skip(stream, payload.into())?;
                    send(answers, &reply::failed(&request, agreed, error), &[])?;
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
            let job = Job { request, command, pages, bytes: held };
            if jobs.send(job).is_err() {
                return Err(io::Error::other("nobody carries requests out any more"));
            }
        }
    }

    fn work(&self, jobs: &Mutex<Receiver<Job<'_>>>, answers: &Mutex<UnixStream>, agreed: Agreed) {
        let mut link = self.links.as_ref().map(Links::link);
        let mut buffer = Vec::new();
        loop {
            let job = lock(jobs).recv();
            let Ok(job) = job else { return };
            let cache: &mut dyn Cache = match &mut link {
                Some(link) => link,
                None => &mut NoCache,
            };
            // A client that takes no answer is gone, which its reader finds out.
            let _ = self.carry_out(job, cache, &mut buffer, answers, agreed);
            if buffer.len() > KEPT_PAGES {
                buffer = Vec::new();
            }
        }
    }

    fn carry_out(
        &self,
        job: Job<'_>,
        cache: &mut dyn Cache,
        buffer: &mut Vec<PageBuffer>,
        answers: &Mutex<UnixStream>,
        agreed: Agreed,
    ) -> io::Result<()> {
        let Job { request, command, mut pages, bytes: _bytes } = job;
        let disk = &self.disk;
        let done = match command {
            Command::Read { offset, bytes } => {
                let head = reply::read(&request, agreed, offset, bytes);
                match disk.read(cache, buffer, (offset, bytes), |data| send(answers, &head, data)) {
                    Ok(sent) => return sent,
                    Err(failure) => Err(failure),
                }
            }
            Command::Status { offset, bytes, one } => {
                let extents = disk.status((offset, bytes), one);
                return send(answers, &reply::status(&request, &extents), &[]);
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
            Ok(()) => reply::done(&request),
            Err(Failure { error, text }) => {
                (self.complain)(&text);
                reply::failed(&request, agreed, error)
            }
        };
        send(answers, &answer, &[])
    }
}

fn nonsense(what: nbd::Nonsense) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

/// One answer, whole.
fn send(answers: &Mutex<UnixStream>, head: &[u8], data: &[u8]) -> io::Result<()> {
    let mut stream = lock(answers);
    if data.len() <= SMALL_BYTES {
        let whole = [head, data].concat();
        return stream.write_all(&whole);
    }
    stream.write_all(head)?;
    stream.write_all(data)
}

fn skip(stream: &mut UnixStream, bytes: u64) -> io::Result<()> {
    let skipped = io::copy(&mut stream.take(bytes), &mut io::sink())?;
    if skipped == bytes { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;
