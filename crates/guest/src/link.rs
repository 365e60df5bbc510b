//! A disk's way to its pool, over the daemon's socket. Whatever fails here costs time, and
//! nothing else: the pool may be full, its worker killed, the daemon gone.
//!
//! One thing must not fail: a page that was written must never be got as it was before.
//! Pages of a disk that writes are known by its *generation*. If it cannot be told that a
//! page is gone, or if it is not known whether a page was taken, all later pages belong to
//! the next generation, and nobody ever asks for one of this again.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use strata_sys::{FileStamp, connect_now, page_bytes};
use strata_units::PageBuffer;

use crate::disk::{Cache, Found, Stamp};
use crate::pool::{FileId, lock};
use crate::serve::hear_answer;
use crate::talk::{self, Ask};

/// For a pool to answer. A worker that was killed does not; the image does then.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long a pool that did not answer is not asked again.
const PAUSE: Duration = Duration::from_millis(500);

/// What all links of one disk have in common.
#[derive(Debug)]
pub struct Links {
    socket: PathBuf,
    greeting: Vec<u8>,
    /// Of this disk, and of nobody else's.
    session: [u8; 16],
    generation: AtomicU64,
    /// Nobody asks before.
    not_before: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct Open {
    stream: UnixStream,
    id: FileId,
    file: u32,
}

/// One thread's connection.
#[derive(Debug)]
pub struct Link {
    links: Arc<Links>,
    open: Option<Open>,
}

impl Links {
    /// To the pool of that name behind `socket`. `session`: 16 random bytes.
    ///
    /// # Errors
    /// No pool is called so.
    pub fn new(socket: PathBuf, pool: &str, session: [u8; 16]) -> io::Result<Arc<Self>> {
        let greeting = talk::greeting(pool).ok_or(io::ErrorKind::InvalidInput)?;
        let (generation, not_before) = (AtomicU64::new(0), Mutex::default());
        Ok(Arc::new(Self { socket, greeting, session, generation, not_before }))
    }

    /// Whether the pool is there for this user.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), String> {
        self.connect().map(drop).map_err(|error| error.to_string())
    }

    /// A link for one thread.
    #[must_use]
    pub fn link(self: &Arc<Self>) -> Link {
        Link { links: Arc::clone(self), open: None }
    }

    fn connect(&self) -> io::Result<UnixStream> {
        let mut stream = connect_now(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(&self.greeting)?;
        hear_answer(&mut stream)?;
        Ok(stream)
    }

    fn id(&self, stamp: Stamp) -> FileId {
        let mut id = [0; talk::FILE_ID_BYTES];
        match stamp {
            Stamp::Own => {
                id[0] = talk::DISK_FILE;
                id[8..24].copy_from_slice(&self.session);
                id[24..32].copy_from_slice(&self.generation.load(SeqCst).to_le_bytes());
            }
            Stamp::Shared(FileStamp { file, size_bytes, changed_ns, touched_ns }) => {
                id[0] = talk::SHARED_FILE;
                // Within two billion seconds of 1970 and for long after, that is what they are.
                let numbers = [file.0, file.1, size_bytes, changed_ns as u64, touched_ns as u64];
                for (to, number) in id[8..].chunks_exact_mut(8).zip(numbers) {
                    to.copy_from_slice(&number.to_le_bytes());
                }
            }
        }
        id
    }

    fn next_generation(&self) {
        self.generation.fetch_add(1, SeqCst);
    }
}

fn read_number(stream: &mut UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

impl Link {
    /// The connection, with the file open. None: there is no pool just now.
    fn open(&mut self, stamp: Stamp) -> Option<&mut Open> {
        let id = self.links.id(stamp);
        if self.open.as_ref().is_none_or(|open| open.id != id) {
            let opened = self.reopen(id, stamp == Stamp::Own);
            self.open = opened.inspect_err(|_| self.links.pause()).ok();
        }
        self.open.as_mut().filter(|open| open.file != talk::NO_FILE)
    }

    fn reopen(&mut self, id: FileId, private: bool) -> io::Result<Open> {
        let mut stream = match self.open.take() {
            Some(open) => open.stream,
            None => {
                let not_before = *lock(&self.links.not_before);
                if not_before.is_some_and(|time| Instant::now() < time) {
                    return Err(io::ErrorKind::NotConnected.into());
                }
                self.links.connect()?
            }
        };
        let mut request = Ask::Open { private }.encode().to_vec();
        request.extend(id);
        stream.write_all(&request)?;
        let file = read_number(&mut stream)?;
        Ok(Open { stream, id, file })
    }

    /// One request. None: it is not known what became of it; the connection is closed.
    fn ask<R>(&mut self, stamp: Stamp, ask: impl FnOnce(&mut Open) -> io::Result<R>) -> Option<R> {
        let open = self.open(stamp)?;
        match ask(open) {
            Ok(answer) => Some(answer),
            Err(_) => {
                self.open = None;
                self.links.pause();
                None
            }
        }
    }
}

impl Links {
    fn pause(&self) {
        let mut not_before = lock(&self.not_before);
        let now = Instant::now();
        // Who is refused for the pause does not prolong it.
        if not_before.is_none_or(|time| time <= now) {
            *not_before = Some(now + PAUSE);
        }
    }
}

impl Cache for Link {
    fn get(&mut self, stamp: Stamp, first: u64, pages: &mut [PageBuffer], found: &mut [Found]) {
        let count = pages.len() as u32;
        let got = self.ask(stamp, |open| {
            let ask = Ask::Get { file: open.file, index: first, count };
            open.stream.write_all(&ask.encode())?;
            open.stream.read_exact(found)?;
            for (page, _) in pages.iter_mut().zip(&*found).filter(|(_, found)| **found == talk::HIT)
            {
                open.stream.read_exact(&mut page.0)?;
            }
            Ok(())
        });
        if got.is_none() {
            found.fill(talk::MISSED);
        }
    }

    fn put(&mut self, stamp: Stamp, first: u64, pages: &[PageBuffer]) {
        // What was got under one generation is not put under another: nothing is wrong with
        // that, as these pages are held, but it may fail, and then this must be known.
        let count = pages.len() as u32;
        let mut sent = false;
        let put = self.ask(stamp, |open| {
            let ask = Ask::Put { file: open.file, index: first, count };
            sent = true;
            open.stream.write_all(&ask.encode())?;
            open.stream.write_all(page_bytes(pages))?;
            read_number(&mut open.stream)
        });
        if sent && put.is_none() && stamp == Stamp::Own {
            // It may be taken yet, when the page is another one already.
            self.links.next_generation();
        }
    }

    fn forget(&mut self, first: u64, count: u64) {
        let forgotten = self.ask(Stamp::Own, |open| {
            let ask = Ask::Forget { file: open.file, index: first, count };
            open.stream.write_all(&ask.encode())?;
            read_number(&mut open.stream)
        });
        if forgotten != Some(0) {
            self.links.next_generation();
        }
    }
}
