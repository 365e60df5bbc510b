//! A tenant moves to another daemon, usually on another host.
//!
//! ```text
//! here                                            there
//! all memory, while it runs       ──────────────▶ taken in
//! what has changed, while it runs ──────────────▶ taken in      (a few times)
//! it stands still: what has changed, its state ─▶ taken in, restored, stands still
//!                                 ◀── ready ─────
//! given up: written down          ── go ────────▶ decided: written down, it runs
//!                                 ◀── running ───
//! ended
//! ```
//! Until it is given up here, whatever fails lets it run on here. From then on *there*
//! decides, once, whether it runs: until the answer is known it stands still here. Whoever
//! has not got it asks again.

mod asked;
mod disks;
mod given;
mod into;
mod lend;
mod lending;
mod lent;
mod memories;
mod out;
mod owed;
mod owing;
mod pieces;
mod record;
mod standstill;
mod still;

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use strata_api::{
    FrameKind, MAX_FRAME_BYTES, MoveNear, MoveWord, Progress, Reply, read_frame, write_frame,
};
use strata_snapshot::archive::Sink;

use super::lock;
pub(super) use disks::Ways;
pub(crate) use out::How;
pub(super) use owed::{open as open_owed, refusal as owes};
pub(super) use pieces::Once;
pub(super) use record::Moves;

/// How long the other side may take for an answer that costs it nothing, or little.
const ANSWERED_WITHIN: Duration = Duration::from_secs(30);
/// How long it may take to take memory in, while the tenant runs.
const TAKEN_WITHIN: Duration = Duration::from_secs(600);
/// How long a frame may take to be sent.
const SENT_WITHIN: Duration = Duration::from_secs(60);

/// Nobody is there any more.
const CUT: &str = "the connection was cut";

fn random() -> Result<u64, String> {
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| format!("no random number: {error}"))?;
    Ok(u64::from_le_bytes(bytes))
}

/// What a daemon is called, so that nothing moves to where it is.
fn home(place: &std::path::Path) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{} {}", boot.trim(), place.display())
}

/// The way to the other daemon, and to the command line that carries it.
pub(crate) struct Wire {
    stream: UnixStream,
    /// Where everybody writes: the same.
    to: Arc<Mutex<UnixStream>>,
    sent_bytes: u64,
    /// Another thread reads, and passes on what is not its own.
    heard: Option<Receiver<(FrameKind, Vec<u8>)>>,
}

impl Wire {
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_write_timeout(Some(SENT_WITHIN))?;
        let to = Arc::new(Mutex::new(stream.try_clone()?));
        let mut wire = Self { stream, to, sent_bytes: 0, heard: None };
        wire.near(&MoveNear::Begun).map_err(io::Error::other)?;
        Ok(wire)
    }

    fn send(&mut self, kind: FrameKind, content: &[u8]) -> io::Result<()> {
        self.sent_bytes += content.len() as u64;
        write_frame(&*lock(&self.to), kind, content)
    }

    /// Where whoever else speaks to the other side writes.
    fn writer(&self) -> Arc<Mutex<UnixStream>> {
        Arc::clone(&self.to)
    }

    /// From now on another thread reads from what this gives it, and passes on what is said.
    fn hand_over(&mut self, heard: Receiver<(FrameKind, Vec<u8>)>) -> io::Result<UnixStream> {
        self.stream.set_read_timeout(None)?;
        let from = self.stream.try_clone()?;
        self.heard = Some(heard);
        Ok(from)
    }

    fn say(&mut self, word: &MoveWord) -> Result<(), String> {
        let text = serde_json::to_vec(word).map_err(|error| error.to_string())?;
        self.send(FrameKind::Word, &text).map_err(|error| format!("the connection: {error}"))
    }

    fn near(&mut self, near: &MoveNear) -> Result<(), String> {
        let text = serde_json::to_vec(near).map_err(|error| error.to_string())?;
        write_frame(&*lock(&self.to), FrameKind::Near, &text)
            .map_err(|error| format!("the command line: {error}"))
    }

    fn tell(&mut self, progress: Progress) {
        // Who does not listen gets the rest all the same.
        let _ = self.near(&MoveNear::Progress { progress });
    }

    /// Ends the conversation with the command line.
    pub(crate) fn reply(&mut self, reply: Reply) {
        // Who has gone has gone.
        let _ = self.near(&MoveNear::Reply { reply });
    }

    fn frame(&mut self, within: Duration) -> Result<(FrameKind, Vec<u8>), String> {
        if let Some(heard) = &self.heard {
            return heard.recv_timeout(within).map_err(|error| match error {
                RecvTimeoutError::Disconnected => CUT.to_owned(),
                RecvTimeoutError::Timeout => {
                    format!("the connection: {}", io::Error::from(io::ErrorKind::TimedOut))
                }
            });
        }
        let read = self.stream.set_read_timeout(Some(within)).and_then(|()| {
            read_frame(&self.stream).map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
                _ => error,
            })
        });
        match read {
            Ok(Some(frame)) => Ok(frame),
            Ok(None) => Err(CUT.to_owned()),
            Err(error) => Err(format!("the connection: {error}")),
        }
    }

    fn hear(&mut self, within: Duration) -> Result<MoveWord, String> {
        match self.frame(within)? {
            (FrameKind::Word, text) => serde_json::from_slice(&text)
                .map_err(|_| "the other side says what is not understood".to_owned()),
            _ => Err("the other side sends what was not asked for".to_owned()),
        }
    }

    fn hear_near(&mut self, within: Duration) -> Result<MoveNear, String> {
        match self.frame(within)? {
            (FrameKind::Near, text) => serde_json::from_slice(&text)
                .map_err(|_| "the command line says what is not understood".to_owned()),
            _ => Err("the other side sends what was not asked for".to_owned()),
        }
    }

    /// Waits for one word.
    fn expect(&mut self, wanted: &MoveWord, within: Duration) -> Result<(), String> {
        match self.hear(within)? {
            word if word == *wanted => Ok(()),
            MoveWord::Never { why } => Err(why),
            _ => Err("the other side says what was not asked for".to_owned()),
        }
    }

    /// Waits for the end of a file of which each piece goes `into`.
    fn file(&mut self, mut into: impl io::Write) -> Result<(), String> {
        loop {
            match self.frame(ANSWERED_WITHIN)? {
                (FrameKind::Data, piece) => {
                    into.write_all(&piece).map_err(|error| format!("snapshot_dir: {error}"))?;
                }
                (FrameKind::Word, text) if is_end(&text) => return Ok(()),
                _ => return Err("the other side sends what was not asked for".to_owned()),
            }
        }
    }
}

fn is_end(text: &[u8]) -> bool {
    matches!(serde_json::from_slice(text), Ok(MoveWord::End))
}

/// A snapshot file that is sent instead of written.
struct Sent<'a>(&'a mut Wire);

impl Sink for Sent<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        bytes.chunks(MAX_FRAME_BYTES).try_for_each(|piece| self.0.send(FrameKind::Data, piece))
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn publish(&mut self) -> io::Result<()> {
        Ok(())
    }
}
