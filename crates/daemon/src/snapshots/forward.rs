//! Ports of this machine that lead into the network of a clone.

use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use strata_api::PortForward;
use strata_pager::Tenant;
use strata_sys::{Priority, enter_network_of};

use crate::admission::{Gate, Place, Room};
use crate::logbook;

/// How often it is looked whether the clone is still there.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Pause after a connection could not be taken.
const PAUSE: Duration = Duration::from_millis(10);
const STACK_BYTES: usize = 128 << 10;
/// Connections at a time through one forward, two threads each. Nobody knows whose they
/// are; further ones are closed at once.
const ROOM: Room = Room { all: 64, for_root: 0, per_user: 64 };
/// As if all were this user's, who is nobody.
const WHOEVER: u32 = u32::MAX - 2;

/// Listens on a port of the loopback address and passes connections on to the
/// same or another one in the network of `tenant`, as long as the tenant is
/// there; the forward with the port that it got.
pub(super) fn start(tenant: &Arc<Tenant>, wish: PortForward) -> Result<PortForward, String> {
    let failed = |error: io::Error| format!("cannot listen on 127.0.0.1:{}: {error}", wish.host);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, wish.host)).map_err(failed)?;
    let host = listener.local_addr().map_err(failed)?.port();
    listener.set_nonblocking(true).map_err(failed)?;
    let tenant = Arc::clone(tenant);
    let gate = Gate::new(ROOM);
    spawn("forward", move || {
        while !tenant.has_ended() {
            match listener.accept() {
                Ok((outside, _)) => {
                    let Ok(place) = gate.admit(WHOEVER) else {
                        let line = format!(
                            "port {host} of {}: more than {} connections; one was closed",
                            tenant.record().name,
                            ROOM.all
                        );
                        logbook::tell_of(WHOEVER, "forward", Priority::Warning, line);
                        continue;
                    };
                    let tenant = Arc::clone(&tenant);
                    // Without a thread the connection closes.
                    let _ = spawn("forwarded", move || {
                        connect(&tenant, outside, wish.guest, place);
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    thread::sleep(LOOK_EVERY / 40);
                }
                Err(_) => thread::sleep(PAUSE),
            }
        }
    })
    .map_err(failed)?;
    Ok(PortForward { host, guest: wish.guest })
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.into()).stack_size(STACK_BYTES).spawn(run).map(|_| ())
}

/// Passes one connection on. On an error it closes, as if nobody listened.
fn connect(tenant: &Tenant, outside: TcpStream, port: u16, place: Place) {
    let inside = || -> io::Result<TcpStream> {
        let pid = tenant.pids().first().copied().ok_or(io::ErrorKind::NotConnected)?;
        // This thread alone is there from now on, until it ends.
        enter_network_of(pid)?;
        TcpStream::connect((Ipv4Addr::LOCALHOST, port))
    };
    let Ok(inside) = inside() else { return };
    let ends = (|| Ok::<_, io::Error>((outside.try_clone()?, inside.try_clone()?)))();
    let Ok((outside_read, inside_write)) = ends else { return };
    if outside.set_nonblocking(false).is_err() {
        return;
    }
    // Until both directions have ended.
    let place = Arc::new(place);
    let shared = Arc::clone(&place);
    let inward = move || {
        pass(outside_read, inside_write);
        drop(shared);
    };
    if spawn("forwarded", inward).is_ok() {
        pass(inside, outside);
    }
    drop(place);
}

/// Copies until one end closes, and tells the other.
fn pass(mut from: TcpStream, mut to: TcpStream) {
    // However it ends, the other side is told.
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}
