//! Asking daemons: one connection, one request, one reply, progress before it
//! where the work is long. Which daemon knows a tenant is found by asking all
//! that the caller may ask.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use strata_api::{
    DEFAULT_SOCKET, ENV_CONTROL_SOCKET, MAX_LINE_BYTES, NO_ROOM_NOW, Progress, Reply, Request,
    Stats,
};

use crate::daemon;
use crate::failure::{Failure, Result};
use crate::place::{self, Died};

/// For a daemon to answer what it knows already.
const QUICK: Duration = Duration::from_secs(10);
/// For room to be asked in, and how often it is looked for.
const ROOM_PATIENCE: Duration = Duration::from_secs(10);
const ROOM_PAUSE: Duration = Duration::from_millis(50);
/// For a daemon to bring back all pages of a tenant, from a slow disk perhaps, to
/// end its processes with the grace that the configuration gives them, or to go
/// on with a snapshot. Ctrl-C ends the waiting, not the work.
const PATIENT: Duration = Duration::from_secs(24 * 3600);

/// What to do about a daemon that died.
const START_AGAIN: &str =
    "start it again (sudo systemctl start stratad): it takes its programs over";

/// What is said of it.
fn has_died(died: Died, socket: &Path) -> String {
    let Died { supervisor, holder } = died;
    format!(
        "stratad (process {supervisor}) at {} died, and its programs wait, held by process {holder}",
        socket.display()
    )
}

/// Why there is no reply.
#[derive(Debug)]
pub(crate) enum NoReply {
    /// Nobody listens there.
    Absent,
    /// Somebody listened and hung up; a daemon that was just ending does.
    HungUp,
    /// Anything else.
    Failed(io::Error),
}

impl NoReply {
    /// As a failure of `what`.
    pub(crate) fn failure(self, what: &str, socket: &Path) -> Failure {
        // Its service manager may go on listening for it.
        let nobody_is_there = match &self {
            Self::Absent => true,
            Self::Failed(error) => is_timeout(error),
            Self::HungUp => false,
        };
        if nobody_is_there && let Some(died) = place::died(socket) {
            return Failure::new(what, has_died(died, socket)).todo(START_AGAIN);
        }
        let socket = socket.display();
        match self {
            Self::Absent => Failure::new(what, format!("no stratad listens at {socket}"))
                .todo("start it (sudo systemctl start stratad), or correct STRATA_SOCKET"),
            Self::HungUp => Failure::new(what, format!("stratad at {socket} did not answer"))
                .todo("see its log: journalctl -u stratad"),
            Self::Failed(error) => {
                let todo = match error.kind() {
                    io::ErrorKind::PermissionDenied => "run as the user whose stratad it is",
                    _ if is_timeout(&error) => {
                        "stratad is busy or stuck; see its log: journalctl -u stratad"
                    }
                    _ => "use a strata and a stratad of the same version",
                };
                Failure::new(what, format!("stratad at {socket}: {error}")).todo(todo)
            }
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

/// Asks the daemon at `socket`.
pub(crate) fn ask(socket: &Path, request: &Request) -> std::result::Result<Reply, NoReply> {
    ask_watching(socket, request, &mut |_| {})
}

/// Asks the daemon at `socket`; shows `watch` how far it is, where it says so. Of many who
/// start something at once, some wait for their turn.
pub(crate) fn ask_watching(
    socket: &Path,
    request: &Request,
    watch: &mut dyn FnMut(&Progress),
) -> std::result::Result<Reply, NoReply> {
    let until = Instant::now() + ROOM_PATIENCE;
    loop {
        let reply = ask_once(socket, request, watch)?;
        let is_full = matches!(&reply, Reply::Error { hint, .. } if hint == NO_ROOM_NOW);
        if !is_full || Instant::now() >= until {
            return Ok(reply);
        }
        std::thread::sleep(ROOM_PAUSE);
    }
}

fn ask_once(
    socket: &Path,
    request: &Request,
    watch: &mut dyn FnMut(&Progress),
) -> std::result::Result<Reply, NoReply> {
    let long = request.shows_progress();
    let patience = match request {
        Request::Release { .. } | Request::Stop { .. } => PATIENT,
        _ if long => PATIENT,
        _ => QUICK,
    };
    let stream = UnixStream::connect(socket).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => NoReply::Absent,
        _ => NoReply::Failed(error),
    })?;
    stream.set_write_timeout(Some(QUICK)).map_err(NoReply::Failed)?;
    stream.set_read_timeout(Some(patience)).map_err(NoReply::Failed)?;
    let mut line = serde_json::to_vec(request).expect("requests have no keys but strings");
    line.push(b'\n');
    // A daemon that refuses (too many connections) answers before it is asked.
    let written = (&stream).write_all(&line);
    let mut answer = BufReader::new(&stream);
    loop {
        let line = match read_line(&mut answer) {
            Err(NoReply::HungUp) => {
                written.map_err(hung_up)?;
                return Err(NoReply::HungUp);
            }
            other => other?,
        };
        if let Some(progress) = long.then(|| serde_json::from_slice(&line).ok()).flatten() {
            watch(&progress);
            continue;
        }
        return serde_json::from_slice(&line).map_err(|error| {
            NoReply::Failed(io::Error::other(format!("its reply is not understood: {error}")))
        });
    }
}

fn hung_up(error: io::Error) -> NoReply {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => NoReply::HungUp,
        _ => NoReply::Failed(error),
    }
}

fn read_line(answer: &mut impl BufRead) -> std::result::Result<Vec<u8>, NoReply> {
    let mut line = Vec::new();
    // One byte more tells "too long" from "just fits".
    let read = answer.take(MAX_LINE_BYTES as u64 + 1).read_until(b'\n', &mut line);
    if line.last() == Some(&b'\n') {
        return Ok(line);
    }
    if line.len() > MAX_LINE_BYTES {
        return Err(NoReply::Failed(io::Error::other("its reply is too long")));
    }
    read.map_err(hung_up)?;
    Err(NoReply::HungUp)
}

/// The daemon's refusal as a failure of `what`.
pub(crate) fn refused(what: &str, message: &str, hint: &str) -> Failure {
    Failure::new(what, message).todo(hint)
}

/// The daemon answered another question.
pub(crate) fn misunderstood(what: &str) -> Failure {
    Failure::new(what, "stratad answered something else")
        .todo("use a strata and a stratad of the same version")
}

/// What each daemon that is alive answers to `request`, which failed as `what`
/// if one refuses.
pub(crate) fn ask_each(what: &str, request: &Request) -> Result<Vec<(PathBuf, Reply)>> {
    let named = place::named_socket().is_some();
    let mut replies = Vec::new();
    for socket in place::control_sockets() {
        let mut answer = ask(&socket, request);
        if let (Err(NoReply::Absent), Some(died)) = (&answer, place::died(&socket)) {
            if place::is_own_private(&socket) {
                eprintln!("strata: {}; another stratad takes them over", has_died(died, &socket));
                daemon::private()?;
                answer = ask(&socket, request);
            } else if !named {
                eprintln!("strata: {}; {START_AGAIN}", has_died(died, &socket));
            }
        }
        match answer {
            Ok(Reply::Error { message, hint }) => return Err(refused(what, &message, &hint)),
            Ok(reply) => replies.push((socket, reply)),
            // What is only looked for need not be there; a daemon that ends
            // while it is asked has nothing to tell either.
            Err(NoReply::Absent | NoReply::HungUp) if !named => {}
            Err(no_reply) => return Err(no_reply.failure(what, &socket)),
        }
    }
    Ok(replies)
}

/// The tenants of each daemon that is alive.
pub(crate) fn list_by_daemon() -> Result<Vec<(PathBuf, Vec<Stats>)>> {
    const WHAT: &str = "cannot list tenants";
    let mut listed = Vec::new();
    for (socket, reply) in ask_each(WHAT, &Request::List { after: None })? {
        let Reply::List { mut tenants, mut next } = reply else { return Err(misunderstood(WHAT)) };
        while let Some(after) = next {
            let request = Request::List { after: Some(after.clone()) };
            match ask(&socket, &request).map_err(|none| none.failure(WHAT, &socket))? {
                // One that gives no further page would be asked for ever.
                Reply::List { next: Some(same), .. } if same <= after => {
                    return Err(misunderstood(WHAT));
                }
                Reply::List { tenants: page, next: further } => {
                    tenants.extend(page);
                    next = further;
                }
                Reply::Error { message, hint } => return Err(refused(WHAT, &message, &hint)),
                _ => return Err(misunderstood(WHAT)),
            }
        }
        listed.push((socket, tenants));
    }
    Ok(listed)
}

/// What a tenant is called, so that nobody else's is meant.
pub(crate) fn address(stats: &Stats) -> String {
    match stats.uid == rustix::process::geteuid().as_raw() {
        true => stats.name.clone(),
        false => format!("{}:{}", stats.uid, stats.name),
    }
}

/// Whether `name`, as the user types it, may mean this tenant; the daemon decides.
fn may_mean(name: &str, stats: &Stats) -> bool {
    match name.split_once(':') {
        None => stats.name == name,
        // Whose a user's name is, the daemon looks up.
        Some((user, own)) => {
            stats.name == own && user.parse().map_or(true, |uid: u32| uid == stats.uid)
        }
    }
}

/// All tenants of the caller, in order of name; None when no daemon is alive.
pub(crate) fn list_all() -> Result<Option<Vec<Stats>>> {
    let daemons = list_by_daemon()?;
    if daemons.is_empty() {
        return Ok(None);
    }
    let mut tenants: Vec<Stats> = daemons.into_iter().flat_map(|(_, tenants)| tenants).collect();
    tenants.sort_by(|a, b| (&a.name, a.uid).cmp(&(&b.name, b.uid)));
    Ok(Some(tenants))
}

/// The daemon that has the tenant `name`, and what it says of it.
pub(crate) fn find(name: &str) -> Result<(PathBuf, Stats)> {
    let daemons = list_by_daemon()?;
    let none_alive = daemons.is_empty();
    let mut known: Vec<String> = Vec::new();
    for (socket, tenants) in daemons {
        for tenant in tenants {
            if may_mean(name, &tenant) {
                return Ok((socket, tenant));
            }
            known.push(tenant.name);
        }
    }
    let what = format!("no tenant is named {name}");
    Err(if none_alive {
        let todo = format!("strata run starts one; {ENV_CONTROL_SOCKET} names another socket");
        Failure::new(what, "no stratad is running").todo(todo)
    } else if known.is_empty() {
        Failure::new(what, "you have no tenants").todo("start one with strata run")
    } else {
        known.sort();
        let some = known.iter().take(5).map(String::as_str).collect::<Vec<_>>().join(", ");
        let dots = if known.len() > 5 { ", …" } else { "" };
        Failure::new(what, format!("there are {some}{dots}")).todo("see strata ps")
    })
}

/// Everything about the tenant `name`.
pub(crate) fn stats(name: &str) -> Result<Stats> {
    let (socket, listed) = find(name)?;
    let what = format!("cannot show {name}");
    match ask(&socket, &Request::Stats { name: name.to_owned() }) {
        Ok(Reply::Stats { stats }) => Ok(*stats),
        Ok(Reply::Error { message, hint }) => Err(refused(&what, &message, &hint)),
        Ok(_) => Ok(listed),
        Err(no_reply) => Err(no_reply.failure(&what, &socket)),
    }
}

/// Has `request` done by the daemon that knows `name`; returns its note.
pub(crate) fn command(name: &str, request: Request) -> Result<String> {
    let (socket, _) = find(name)?;
    let verb = match &request {
        Request::Set { .. } | Request::Claim { .. } => "set the budget of",
        Request::Release { .. } => "release",
        Request::Advise { .. } => "stop watching",
        Request::GuestResume { .. } => "resume",
        _ => "stop",
    };
    let what = format!("cannot {verb} {name}");
    match ask(&socket, &request) {
        Ok(Reply::Done { note }) => Ok(crate::failure::printable(&note)),
        Ok(Reply::Error { message, hint }) => Err(refused(&what, &message, &hint)),
        Ok(_) => Err(misunderstood(&what)),
        Err(no_reply) => Err(no_reply.failure(&what, &socket)),
    }
}

/// Has a request done that is for a daemon, not a tenant: by the one that the environment
/// names, or the system's.
pub(crate) fn of_daemon(what: &str, request: &Request) -> Result<String> {
    let socket = place::named_socket().unwrap_or_else(|| DEFAULT_SOCKET.into());
    match ask(&socket, request) {
        Ok(Reply::Done { note }) => Ok(crate::failure::printable(&note)),
        Ok(Reply::Error { message, hint }) => Err(refused(what, &message, &hint)),
        Ok(_) => Err(misunderstood(what)),
        Err(no_reply) => Err(no_reply.failure(what, &socket)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Directory;
    use std::os::unix::net::UnixListener;

    /// What asking a daemon that sends `answer` and hangs up comes to.
    fn asked(answer: Vec<u8>) -> std::result::Result<Reply, NoReply> {
        let directory = Directory::new("client");
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).expect("bind");
        let daemon = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().expect("accept");
            let mut line = String::new();
            BufReader::new(&client).read_line(&mut line).expect("a request");
            // The client hangs up on an answer that is too long.
            let _ = client.write_all(&answer);
            line
        });
        let reply = ask(&socket, &Request::Stats { name: "db".into() });
        let line = daemon.join().expect("daemon");
        assert_eq!(line, "{\"request\":\"stats\",\"name\":\"db\"}\n");
        reply
    }

    #[test]
    fn who_finds_no_room_asks_again() {
        let directory = Directory::new("room");
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).expect("bind");
        let full = Reply::Error { message: "full".into(), hint: NO_ROOM_NOW.into() };
        let done = Reply::Done { note: "done".into() };
        let answers = [full.clone(), full, done.clone()];
        let daemon = std::thread::spawn(move || {
            for answer in answers {
                let (mut client, _) = listener.accept().expect("accept");
                let line = serde_json::to_string(&answer).expect("a reply");
                writeln!(client, "{line}").expect("a reader");
            }
        });
        assert_eq!(ask(&socket, &Request::Ping).ok(), Some(done));
        daemon.join().expect("daemon");
    }

    #[test]
    fn replies_good_and_bad() {
        let reply = asked(b"{\"reply\":\"done\",\"note\":\"x\"}\n".to_vec());
        assert_eq!(reply.expect("a reply"), Reply::Done { note: "x".into() });
        assert!(matches!(asked(Vec::new()), Err(NoReply::HungUp)));
        assert!(matches!(asked(b"{\"reply\":\"done\"".to_vec()), Err(NoReply::HungUp)));
        for (bytes, why) in [
            (b"garbage\n".to_vec(), "not understood"),
            (vec![b' '; MAX_LINE_BYTES + 100], "too long"),
        ] {
            let Err(NoReply::Failed(error)) = asked(bytes) else { panic!("{why}") };
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn nobody_there() {
        let nowhere = Path::new("/no/such/socket");
        let no_reply = ask(nowhere, &Request::Ping).expect_err("nobody");
        assert!(matches!(no_reply, NoReply::Absent));
        let line = no_reply.failure("cannot x", nowhere).to_string();
        assert!(line.contains("no stratad listens at /no/such/socket; start it"), "{line}");
    }
}
