//! The pools' socket: who comes in, and how many. Each connection is a disk's or a swap
//! disk's, stays as long as that does, and has a thread; what is said there is in
//! `strata-guest`.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use strata_api::POOL_SOCKET_NAME;
use strata_guest::{Caller, Pool, greet, hear_reports, serve};
use strata_sys::peer::peer_of;
use strata_sys::{Priority, log};

use super::Pools;
use super::swaps::Here;
use crate::admission::{Gate, Place, Room};
use crate::control;
use crate::logbook;
use crate::supervisor::Inheritance;

/// A disk has four connections for each of its clients' one.
const ROOM: Room = Room { all: 512, for_root: 64, per_user: 128 };
/// For a greeting to come, and for answers to be taken.
const PATIENCE: Duration = Duration::from_secs(5);
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// A page, and what unpacking takes beside the heap.
const STACK_BYTES: usize = 512 << 10;

/// Listens from now on. The socket is this worker's: those who were connected to the one
/// before connect again.
pub(super) fn open(inheritance: &Inheritance, pools: &Arc<Pools>) -> io::Result<()> {
    let path = inheritance.config.socket_dir.join(POOL_SOCKET_NAME);
    let mode = if inheritance.private { 0o600 } else { 0o666 };
    let listener = control::bind(&path, mode)?;
    let pools = Arc::clone(pools);
    std::thread::Builder::new()
        .name("pool-door".into())
        .spawn(move || accept(&listener, &pools))?;
    Ok(())
}

fn accept(listener: &UnixListener, pools: &Arc<Pools>) {
    let gate = Gate::new(ROOM);
    loop {
        match listener.accept() {
            Ok((stream, _)) => admit(&gate, stream, pools),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                log(Priority::Warning, format_args!("pools: cannot accept: {error}"));
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn admit(gate: &Arc<Gate>, stream: UnixStream, pools: &Arc<Pools>) {
    let Ok(peer) = peer_of(&stream) else { return };
    let place = match gate.admit(peer.uid) {
        Ok(place) => place,
        Err(full) => {
            // Its disk goes on without the pool, and tries again.
            logbook::tell_of(
                peer.uid,
                "pools",
                Priority::Warning,
                format_args!("pools: {}", full.reason()),
            );
            return;
        }
    };
    let pools = Arc::clone(pools);
    let made = std::thread::Builder::new().name("pool-disk".into()).stack_size(STACK_BYTES).spawn(
        move || {
            if let Err(error) = converse(place, stream, &pools, peer.uid) {
                let line = format!("pools: process {} was let go: {error}", peer.pid);
                logbook::tell_of(peer.uid, "pools", Priority::Warning, line);
            }
        },
    );
    if let Err(error) = made {
        log(Priority::Warning, format_args!("pools: cannot make a thread: {error}"));
    }
}

/// Counts a connection as long as it is there.
struct Counted(Arc<AtomicU64>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Whom a greeting has led to.
enum Met {
    Pool(Arc<Pool>, Counted),
    Swap(Here),
}

fn converse(place: Place, mut stream: UnixStream, pools: &Pools, uid: u32) -> io::Result<()> {
    let _place = place;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let met = greet(&mut stream, |caller, name| match caller {
        Caller::Disk => {
            let (pool, connections) = pools.of(uid, name)?;
            connections.fetch_add(1, Relaxed);
            Ok(Met::Pool(pool, Counted(connections)))
        }
        Caller::Swap => pools.swaps.meet(uid, name).map(Met::Swap),
    });
    let ended = met.and_then(|met| {
        // A guest may read nothing for days.
        stream.set_read_timeout(None)?;
        match met {
            Ok(Met::Pool(pool, _counted)) => serve(&mut stream, &pool),
            Ok(Met::Swap(swap)) => hear_reports(&mut stream, |figures| swap.hear(figures)),
            Err(_) => Ok(()),
        }
    });
    match ended {
        // A disk that ended or was ended. Looking whether anyone listens is no offence.
        Err(error) if is_gone(&error) => Ok(()),
        other => other,
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}
