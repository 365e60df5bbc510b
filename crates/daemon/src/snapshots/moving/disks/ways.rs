//! Ways between two QEMUs, one for each disk: a connection of its own, of which each daemon
//! has one end, and its QEMU's socket at the other side.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use strata_api::{FrameKind, MOVE_DISKS_VERSION, MoveNear, MoveWord, read_frame, write_frame};
use strata_pager::Tenant;
use strata_sys::connect_within;

use super::super::super::{Snapshots, lock};
use super::super::{ANSWERED_WITHIN, Wire};
use crate::guests::who_answers;

/// What is read of a QEMU at a time.
const PIECE_BYTES: usize = 256 << 10;
/// How often it is looked whether a QEMU has connected.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A disk of a move.
type Of = (String, u32);

/// All that are about to be opened, and moves that have images made here.
#[derive(Default)]
pub(in super::super::super) struct Ways {
    leaving: Mutex<BTreeMap<Of, Leaving>>,
    coming: Mutex<BTreeMap<Of, Coming>>,
    pub(super) making: Mutex<BTreeSet<String>>,
}

/// One that begins at a QEMU here.
struct Leaving {
    listener: UnixListener,
    tenant: Arc<Tenant>,
    heard: SyncSender<Result<(), String>>,
    all: Arc<All>,
}

/// One that ends at a QEMU here.
struct Coming {
    socket: PathBuf,
    tenant: Arc<Tenant>,
    all: Arc<All>,
}

/// The ways of one move.
#[derive(Default)]
struct All {
    streams: Mutex<Vec<UnixStream>>,
    is_over: AtomicBool,
    sent_bytes: AtomicU64,
}

impl All {
    /// Has a stream end when the move does.
    fn add(&self, stream: &UnixStream) -> io::Result<()> {
        let stream = stream.try_clone()?;
        let mut streams = lock(&self.streams);
        if self.is_over.load(Ordering::Acquire) {
            return Err(ErrorKind::BrokenPipe.into());
        }
        streams.push(stream);
        Ok(())
    }
}

/// The ways of a move that is under way. Dropped, they end.
pub(in super::super) struct Open<'a> {
    ways: &'a Ways,
    id: String,
    all: Arc<All>,
}

impl Open<'_> {
    /// What went to the other side.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.all.sent_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        lock(&self.ways.leaving).retain(|of, _| of.0 != self.id);
        lock(&self.ways.coming).retain(|of, _| of.0 != self.id);
        let streams = lock(&self.all.streams);
        self.all.is_over.store(true, Ordering::Release);
        for stream in &*streams {
            // One that has ended has ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Ways {
    pub(super) fn open(&self, id: &str) -> Open<'_> {
        Open { ways: self, id: id.to_owned(), all: Arc::default() }
    }

    /// Has the command line open a way, which the tenant's QEMU finds at `socket` from now on.
    pub(super) fn leave(
        &self,
        open: &Open<'_>,
        (number, tenant): (u32, &Arc<Tenant>),
        socket: &Path,
        wire: &mut Wire,
    ) -> Result<(), String> {
        let failed = |error: io::Error| format!("{} cannot be made: {error}", socket.display());
        // Of a move that came to nothing.
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let (heard, hears): (_, Receiver<Result<(), String>>) = sync_channel(1);
        let (tenant, all) = (Arc::clone(tenant), Arc::clone(&open.all));
        let leaving = Leaving { listener, tenant, heard, all };
        lock(&self.leaving).insert((open.id.clone(), number), leaving);
        wire.near(&MoveNear::Way { id: open.id.clone(), number })?;
        hears.recv_timeout(ANSWERED_WITHIN).unwrap_or_else(|_| Err("nobody answers".to_owned()))
    }

    /// Has ways end at the QEMU of a tenant that waits, which serves disks at `socket`.
    pub(super) fn come(&self, open: &Open<'_>, tenant: &Arc<Tenant>, socket: &Path, count: usize) {
        let mut coming = lock(&self.coming);
        for number in 0..count as u32 {
            let (socket, tenant) = (socket.to_owned(), Arc::clone(tenant));
            let one = Coming { socket, tenant, all: Arc::clone(&open.all) };
            coming.insert((open.id.clone(), number), one);
        }
    }
}

impl Snapshots {
    /// Carries what the QEMU here says about a disk that leaves, and what it is answered.
    pub(crate) fn carry_disk(
        &self,
        uid: u32,
        (id, number): (&str, u32),
        wire: &mut Wire,
    ) -> Result<String, String> {
        self.check_user(uid)?;
        let leaving = lock(&self.ways.leaving).remove(&(id.to_owned(), number));
        let Leaving { listener, tenant, heard, all } = leaving.ok_or("there is no such move")?;
        let (version, id) = (MOVE_DISKS_VERSION, id.to_owned());
        let welcome = wire
            .say(&MoveWord::Way { version, id, number })
            .and_then(|()| wire.expect(&MoveWord::Welcome, ANSWERED_WITHIN));
        // Who does not wait for it any more has ended the move.
        let _ = heard.send(welcome.clone());
        welcome?;
        let until = Instant::now() + ANSWERED_WITHIN;
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(_) if Instant::now() > until || all.is_over.load(Ordering::Acquire) => {
                    return Err("its QEMU did not ask for it".to_owned());
                }
                Err(_) => thread::sleep(LOOK_EVERY),
            }
        };
        drop(listener);
        who_answers(&tenant, &stream, "the way of a disk")?;
        carry(wire, &stream, &all).map_err(|error| format!("the way of a disk: {error}"))?;
        Ok(String::new())
    }

    /// The same of a disk that comes.
    pub(in super::super) fn take_disk(
        &self,
        (id, number): (String, u32),
        wire: &mut Wire,
    ) -> Result<String, String> {
        let coming = lock(&self.ways.coming).remove(&(id, number));
        let Coming { socket, tenant, all } = coming.ok_or("there is no such move")?;
        let stream = connect_within(&socket, ANSWERED_WITHIN)
            .map_err(|error| format!("its QEMU there serves no disk: {error}"))?;
        who_answers(&tenant, &stream, "the socket of its disks")?;
        wire.say(&MoveWord::Welcome)?;
        carry(wire, &stream, &all).map_err(|error| format!("the way of a disk: {error}"))?;
        Ok(String::new())
    }
}

/// Carries both directions until one of them ends.
fn carry(wire: &Wire, disk: &UnixStream, all: &All) -> io::Result<()> {
    let link = &wire.stream;
    disk.set_nonblocking(false)?;
    // A disk that nobody writes to says nothing for days.
    link.set_read_timeout(None)?;
    all.add(link)?;
    all.add(disk)?;
    let ends = || {
        let _ = link.shutdown(Shutdown::Both);
        let _ = disk.shutdown(Shutdown::Both);
    };
    thread::scope(|scope| {
        let outwards = thread::Builder::new().name("disk".into()).spawn_scoped(scope, move || {
            let mut piece = vec![0; PIECE_BYTES];
            loop {
                match { disk }.read(&mut piece) {
                    Ok(count) if count > 0 => {
                        if write_frame(link, FrameKind::Data, &piece[..count]).is_err() {
                            break;
                        }
                        all.sent_bytes.fetch_add(count as u64, Ordering::Relaxed);
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    _ => break,
                }
            }
            ends();
        });
        if outwards.is_ok() {
            while let Ok(Some((FrameKind::Data, piece))) = read_frame(link) {
                if { disk }.write_all(&piece).is_err() {
                    break;
                }
            }
        }
        ends();
        outwards.map(drop)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_carries_both_directions_and_ends_with_either_side() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let (qemu, mut there) = UnixStream::pair().expect("a pair");
        let all = Arc::new(All::default());
        let counted = Arc::clone(&all);
        let carrying = thread::spawn(move || {
            let wire = Wire::new(near).expect("a wire");
            carry(&wire, &qemu, &counted)
        });
        let read = |mut from: &UnixStream| read_frame(&mut from).expect("a frame");
        assert!(matches!(read(&far), Some((FrameKind::Near, _))));
        there.write_all(b"a question").expect("sent");
        assert_eq!(read(&far), Some((FrameKind::Data, b"a question".to_vec())));
        write_frame(&far, FrameKind::Data, b"an answer").expect("sent");
        let mut answer = [0; 9];
        there.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"an answer");
        // What is no data is of no use to a QEMU.
        write_frame(&far, FrameKind::Word, b"{}").expect("sent");
        carrying.join().expect("nobody panics").expect("carried");
        assert_eq!(all.sent_bytes.load(Ordering::Relaxed), 10);
        assert_eq!(there.read(&mut answer).expect("the end"), 0);
        assert_eq!(read(&far), None);
    }

    #[test]
    fn ways_end_with_their_move() {
        let ways = Ways::default();
        let open = ways.open("1");
        let (one, mut other) = UnixStream::pair().expect("a pair");
        open.all.add(&one).expect("added");
        let all = Arc::clone(&open.all);
        drop(open);
        assert_eq!(other.read(&mut [0]).expect("the end"), 0);
        assert!(all.add(&one).is_err(), "it is over");
    }
}
