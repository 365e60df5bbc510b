//! `strata move` and `strata receive`: they carry what two daemons say to each other. What
//! moves, and who decides what, is the daemons' business.
//!
//! The way to the other host is ssh, which runs `strata receive` there as whoever logs in;
//! to another daemon of this machine (`unix:SOCKET`) it is a pair of pipes.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use strata_api::{
    ENV_CONTROL_SOCKET, FrameKind, MOVE_LENT, MOVE_UNSETTLED, MoveNear, Reply, Request, read_frame,
    write_frame,
};

use crate::client::{self, misunderstood, refused};
use crate::failure::{Failure, Result};
use crate::guest_again::{self, Waiting};
use crate::progress::Meter;
use crate::{print, snapshots};

/// What names a daemon of this machine.
const UNIX: &str = "unix:";
/// How long it is tried to settle a move that was cut, and how often.
const SETTLED_WITHIN: Duration = Duration::from_secs(20);
const SETTLE_EVERY: Duration = Duration::from_millis(500);
/// How long a daemon may take to read a request.
const BEGUN_WITHIN: Duration = Duration::from_secs(20);
/// How long the other end may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Memory may be sent for long after the switch: then the time to settle begins anew.
const LONG: Duration = Duration::from_secs(2);

/// What is wanted.
#[derive(Clone, Copy)]
pub(crate) struct How {
    /// What an earlier move has left is settled.
    pub(crate) settle: bool,
    pub(crate) copy_disks: bool,
    pub(crate) at_once: bool,
}

/// How a conversation ended.
enum Ended {
    Replied(Reply),
    /// The daemon here has gone.
    Cut,
}

/// `strata move`.
pub(crate) fn move_to(name: &str, host: &str, how: How) -> Result<()> {
    let How { mut settle, copy_disks, at_once } = how;
    let what = match settle {
        true => format!("cannot settle the move of {name}"),
        false => format!("cannot move {name}"),
    };
    if host.is_empty() || host.starts_with('-') {
        return Err(Failure::new(what, "that is no host")
            .todo("name one as ssh knows it, or unix: and another daemon's socket"));
    }
    let socket = match settle {
        true => {
            client::find(name).map(|found| found.0).or_else(|_| snapshots::some_daemon(&what))?
        }
        false => client::find(name)?.0,
    };
    let mut caution = at_once.then(|| {
        format!(
            "strata: {}: until its last page is at {host} it depends on both hosts; should this one go down before that, it is lost",
            crate::failure::printable(name)
        )
    });
    let mut until = Instant::now() + SETTLED_WITHIN;
    let mut was_cut = false;
    loop {
        let (name, host_named) = (name.to_owned(), host.to_owned());
        let request = Request::Move { name, host: host_named, settle, copy_disks, at_once };
        let began = Instant::now();
        let ended = carry(&socket, &request, host, &what, &mut caution)?;
        if at_once && began.elapsed() > LONG {
            until = Instant::now() + SETTLED_WITHIN;
        }
        match ended {
            Ended::Replied(Reply::Done { note }) => {
                return print(&crate::failure::printable(&note));
            }
            Ended::Replied(Reply::Error { message, hint }) => {
                if ![MOVE_UNSETTLED, MOVE_LENT].contains(&&*hint) || Instant::now() > until {
                    let cut = "the stratad here died over it; ";
                    let message = format!("{}{message}", if was_cut { cut } else { "" });
                    return Err(refused(&what, &message, &hint));
                }
            }
            Ended::Replied(_) => return Err(misunderstood(&what)),
            Ended::Cut if Instant::now() > until => {
                return Err(Failure::new(what, "stratad did not answer").todo(MOVE_UNSETTLED));
            }
            Ended::Cut => was_cut = true,
        }
        settle = true;
        std::thread::sleep(SETTLE_EVERY);
    }
}

/// The other end: `strata receive`, here or on another host.
fn other_end(host: &str, what: &str) -> Result<Child> {
    let mut command = match host.strip_prefix(UNIX) {
        Some(socket) => {
            let own = std::env::current_exe().map_err(|error| Failure::new(what, error))?;
            let mut command = Command::new(own);
            command.arg("receive").env(ENV_CONTROL_SOCKET, socket);
            command
        }
        None => {
            let mut command = Command::new("ssh");
            command.args(["-T", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]);
            command.args(["--", host, "strata receive"]);
            command
        }
    };
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(|error| {
        Failure::new(what, format!("the way to {host}: {error}")).todo("install ssh")
    })
}

fn connect(socket: &Path, request: &Request) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    // What is sent before it has read the request would be lost.
    stream.set_read_timeout(Some(BEGUN_WITHIN))?;
    let first = read_frame(&stream)?;
    stream.set_read_timeout(None)?;
    match first {
        Some((FrameKind::Near, text)) if is_begun(&text) => Ok(stream),
        _ => Err(io::Error::other("it is of another version")),
    }
}

fn is_begun(text: &[u8]) -> bool {
    matches!(serde_json::from_slice(text), Ok(MoveNear::Begun))
}

/// Carries a conversation of the daemon at `socket` with that of `host`. `caution` is said as
/// soon as something moves.
fn carry(
    socket: &Path,
    request: &Request,
    host: &str,
    what: &str,
    caution: &mut Option<String>,
) -> Result<Ended> {
    let Ok(daemon) = connect(socket, request) else { return Ok(Ended::Cut) };
    let mut child = other_end(host, what)?;
    let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(Failure::new(what, "the way has no pipes"));
    };
    let mut to = Some(to);
    let Ok(into) = daemon.try_clone() else { return Ok(Ended::Cut) };
    let into = Mutex::new(into);
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| pass_on(from, &into));
        let mut meter = Meter::new();
        let ended = loop {
            match read_frame(&daemon) {
                Ok(Some((FrameKind::Near, text))) => match serde_json::from_slice(&text) {
                    Ok(MoveNear::Progress { progress }) => {
                        if let Some(caution) = caution.take() {
                            eprintln!("{caution}");
                        }
                        meter.update(&progress);
                    }
                    Ok(MoveNear::Reply { reply }) => break Ended::Replied(reply),
                    Ok(MoveNear::Way { id, number }) => {
                        let request = Request::MoveDisk { id, number };
                        // The daemon sees what becomes of it, and says so.
                        scope.spawn(move || drop(carry(socket, &request, host, what, &mut None)));
                    }
                    _ => break Ended::Cut,
                },
                Ok(Some((kind, content))) => {
                    let gone =
                        to.as_mut().is_some_and(|to| write_frame(to, kind, &content).is_err());
                    if gone {
                        // What it has said is passed on first; by its end the daemon hears
                        // that nobody answers any more, and says what came of it.
                        to = None;
                        collect(&mut child);
                    }
                }
                _ => break Ended::Cut,
            }
        };
        drop(to);
        let _ = daemon.shutdown(Shutdown::Both);
        collect(&mut child);
        ended
    });
    Ok(ended)
}

/// Waits for the other end, which ends by itself when nobody speaks to it any more.
fn collect(child: &mut Child) {
    let until = Instant::now() + GONE_WITHIN;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Passes on to the daemon what comes from the other end.
fn pass_on(mut from: impl Read, into: &Mutex<UnixStream>) {
    let locked = || into.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        match read_frame(&mut from) {
            // What is said to this end is said by its own daemon only.
            Ok(Some((kind, content))) if kind != FrameKind::Near => {
                if write_frame(&*locked(), kind, &content).is_err() {
                    return;
                }
            }
            _ => {
                let _ = locked().shutdown(Shutdown::Write);
                return;
            }
        }
    }
}

/// `strata receive`: standard input and output are the way to the daemon that sends.
pub(crate) fn receive() -> Result<ExitCode> {
    let what = "cannot take a tenant in";
    let socket = snapshots::some_daemon(what)?;
    let failed = |error: io::Error| {
        Failure::new(what, format!("no stratad answers at {}: {error}", socket.display()))
            .todo("start it (sudo systemctl start stratad)")
    };
    let daemon = connect(&socket, &Request::Receive).map_err(failed)?;
    let into: &'static Mutex<UnixStream> =
        Box::leak(Box::new(Mutex::new(daemon.try_clone().map_err(failed)?)));
    // It ends with this process, whatever it waits for.
    std::thread::spawn(move || pass_on(io::stdin().lock(), into));
    let mut out = io::stdout().lock();
    let mut guest = None;
    loop {
        match read_frame(&daemon) {
            Ok(Some((FrameKind::Near, text))) => match serde_json::from_slice(&text) {
                Ok(MoveNear::Reply { reply: Reply::Done { .. } }) => return Ok(ExitCode::SUCCESS),
                Ok(MoveNear::StartGuest { snapshot, name, servers }) => {
                    let which = (snapshot, &*name, servers);
                    let answer = begin(&socket, which, &mut guest, what);
                    let text = serde_json::to_vec(&answer).unwrap_or_default();
                    let locked = into.lock().unwrap_or_else(PoisonError::into_inner);
                    let _ = write_frame(&*locked, FrameKind::Near, &text);
                }
                Ok(MoveNear::Committed) => {
                    if let Some((waiting, _)) = guest.take() {
                        Waiting::let_go(waiting);
                    }
                }
                Ok(MoveNear::Progress { .. }) => {}
                // Who sends hears why, and says it.
                _ => return Ok(ExitCode::FAILURE),
            },
            // Who does not listen any more has hung up, which the daemon hears as well.
            Ok(Some((kind, content))) => drop(write_frame(&mut out, kind, &content)),
            _ => return Ok(ExitCode::FAILURE),
        }
    }
}

/// Begins a guest's QEMU, which waits.
fn begin(
    socket: &Path,
    (snapshot, name, servers): (strata_api::SnapshotId, &str, u32),
    guest: &mut Option<(Waiting, Vec<UnixStream>)>,
    what: &str,
) -> MoveNear {
    match guest_again::wait_for(socket, &snapshot.into(), (name, servers), what) {
        Ok(waiting) => MoveNear::Started { pid: guest.insert(waiting).0.pid() },
        Err(failure) => MoveNear::Failed { why: failure.to_string() },
    }
}
