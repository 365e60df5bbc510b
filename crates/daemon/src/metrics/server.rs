//! A server that gives the metrics to whoever does `GET /metrics`. It knows no more of HTTP
//! than that takes.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use strata_sys::Priority;

use super::{Seen, render};
use crate::admission::{Deadline, Room};
use crate::lobby::{self, House, Kept, Rules};
use crate::lock::lock;
use crate::logbook;

/// Longest request head that is read. Prometheus sends some 300 bytes.
const MAX_REQUEST_BYTES: usize = 8 << 10;
/// For a client to send its request and take its answer. Nobody knows whose it is: the
/// silent ones wait beside those who are served, and the oldest of them goes when there
/// are too many.
const RULES: Rules = Rules {
    waiting: 64,
    waiting_per_user: 64,
    served: Room { all: 16, for_root: 0, per_user: 16 },
    patience: Duration::from_secs(4),
    stack_bytes: 512 << 10,
};
/// As if all clients were this user's, who is nobody.
const WHOEVER: u32 = u32::MAX - 1;

/// What there is to tell, whenever it is asked.
type Look = Arc<dyn Fn() -> Seen + Send + Sync>;

/// The metrics, at the address that the configuration names now.
pub(crate) struct Metrics {
    seen: Look,
    served: Mutex<Option<(SocketAddr, Kept)>>,
}

impl Metrics {
    pub(crate) fn new(seen: impl Fn() -> Seen + Send + Sync + 'static) -> Self {
        Self { seen: Arc::new(seen), served: Mutex::default() }
    }

    /// Has them be at `address` alone, or nowhere.
    ///
    /// # Errors
    /// The address cannot be had, or the thread not be made: then they are nowhere.
    pub(crate) fn follow(&self, address: Option<SocketAddr>) -> io::Result<()> {
        let mut served = lock(&self.served);
        if served.as_ref().map(|(at, _)| *at) == address {
            return Ok(());
        }
        if let Some((_, kept)) = served.take() {
            kept.end();
        }
        if let Some(address) = address {
            let (_, kept) = serve(address, Arc::clone(&self.seen))?;
            *served = Some((address, kept));
        }
        Ok(())
    }
}

/// Listens on `address` and serves what `seen` returns, on threads of its
/// own. Returns the address, with the port that the kernel chose if it was 0.
///
/// # Errors
/// The address cannot be had, or the thread not be made.
fn serve(address: SocketAddr, seen: Look) -> io::Result<(SocketAddr, Kept)> {
    let listener = TcpListener::bind(address)?;
    let bound = listener.local_addr()?;
    Ok((bound, lobby::keep("metrics", Server { listener, seen }, RULES)?))
}

struct Server {
    listener: TcpListener,
    seen: Look,
}

impl House for Server {
    type Guest = TcpStream;

    fn doors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.listener.as_fd()]
    }

    fn accept(&self, _: usize) -> io::Result<Option<(TcpStream, u32)>> {
        Ok(Some((self.listener.accept()?.0, WHOEVER)))
    }

    fn serve(&self, client: TcpStream, _: usize, deadline: Deadline) {
        // Whoever hangs up early harms only themselves.
        let _ = answer(client, deadline, &*self.seen);
    }

    fn close(&self) {
        // Threads that still serve have the listener, too.
        if let Ok(listener) = self.listener.try_clone() {
            let _ = TcpStream::from(OwnedFd::from(listener)).shutdown(Shutdown::Both);
        }
    }

    fn thrown_out(&self, uid: u32, why: &str) {
        let line = format!("a client of the metrics asked for nothing: {why}");
        logbook::tell_of(uid, "metrics", Priority::Warning, line);
    }
}

fn answer(mut client: TcpStream, deadline: Deadline, seen: &dyn Fn() -> Seen) -> io::Result<()> {
    let head = read_head(&mut client, deadline)?;
    let (status, kind, body) = respond(&head, seen);
    let allow = if status.starts_with("405") { "Allow: GET\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{allow}\
         Connection: close\r\n\r\n",
        body.len()
    );
    for part in [head.as_bytes(), body.as_bytes()] {
        let mut rest = part;
        while !rest.is_empty() {
            client.set_write_timeout(Some(deadline.time_left()?))?;
            match client.write(rest)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => rest = &rest[count..],
            }
        }
    }
    // Closing with input unread would reset the connection and could take the
    // answer with it; a GET has no more to say.
    client.shutdown(Shutdown::Write)
}

/// What comes before the empty line; all that came, if it is too long.
fn read_head(client: &mut TcpStream, deadline: Deadline) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut chunk = [0u8; 1024];
    while head.len() <= MAX_REQUEST_BYTES {
        client.set_read_timeout(Some(deadline.time_left()?))?;
        let count = client.read(&mut chunk)?;
        head.extend_from_slice(&chunk[..count]);
        if count == 0 || head.windows(4).any(|four| four == b"\r\n\r\n") {
            break;
        }
    }
    Ok(head)
}

/// Status, content type and body.
fn respond(head: &[u8], seen: &dyn Fn() -> Seen) -> (&'static str, &'static str, String) {
    const TEXT: &str = "text/plain; charset=utf-8";
    if head.len() > MAX_REQUEST_BYTES {
        return ("431 Request Header Fields Too Large", TEXT, "request too long\n".into());
    }
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let is_http = version.is_some_and(|version| version.starts_with(b"HTTP/1."));
    if !is_http || words.next().is_some() {
        return ("400 Bad Request", TEXT, "this is not HTTP\n".into());
    }
    let path = target.unwrap_or_default().split(|byte| *byte == b'?').next().unwrap_or_default();
    match (method.unwrap_or_default(), path) {
        (b"GET", b"/metrics") => {
            ("200 OK", "text/plain; version=0.0.4; charset=utf-8", render(&seen()))
        }
        (b"GET", _) => ("404 Not Found", TEXT, "metrics are at /metrics\n".into()),
        _ => ("405 Method Not Allowed", TEXT, "only GET is served\n".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::tests::stats;

    fn seen() -> Seen {
        Seen { tenants: vec![stats("db")], pools: vec![] }
    }

    fn request(address: SocketAddr, bytes: &[u8]) -> String {
        let mut client = TcpStream::connect(address).expect("connect");
        client.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
        // The server may answer and hang up before it has read everything.
        let _ = client.write_all(bytes);
        let _ = client.shutdown(Shutdown::Write);
        let mut answer = String::new();
        let _ = client.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn the_server_gives_metrics_and_nothing_else() {
        let any: SocketAddr = "127.0.0.1:0".parse().expect("address");
        let (address, kept) = serve(any, Arc::new(seen)).expect("serve");
        let answer = request(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        assert_eq!(body, render(&seen()));
        // Clients that say nothing hold nobody up.
        let silent: Vec<TcpStream> =
            (0..100).map(|_| TcpStream::connect(address).expect("connect")).collect();
        let long = vec![b'x'; 3 * MAX_REQUEST_BYTES];
        for (bytes, status) in [
            (&b"GET /metrics?a=b HTTP/1.0\r\n\r\n"[..], "200"),
            (b"GET / HTTP/1.1\r\n\r\n", "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"\x00\xff\r\n\r\n", "400"),
            (b"GET /metrics", "400"),
        ] {
            let answer = request(address, bytes);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{bytes:?}: {answer}");
        }
        // Cut off; whether the client still hears why depends on its timing.
        let answer = request(address, &long);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
        drop(silent);
        kept.end();
        assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
    }

    #[test]
    fn they_are_where_the_configuration_says() {
        let metrics = Metrics::new(seen);
        metrics.follow(None).expect("nowhere");
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("bound");
        assert!(metrics.follow(Some(address)).is_err(), "somebody else has it");
        drop(taken);
        metrics.follow(Some(address)).expect("it is free");
        metrics.follow(Some(address)).expect("the same");
        assert!(request(address, b"GET /metrics HTTP/1.1\r\n\r\n").contains("strata_"));
        metrics.follow(None).expect("nowhere");
        assert!(TcpStream::connect(address).is_err());
    }

    #[test]
    fn a_request_that_is_too_long_is_refused() {
        let (status, _, _) = respond(&vec![b'x'; MAX_REQUEST_BYTES + 1], &Seen::default);
        assert!(status.starts_with("431"));
    }
}
