//! The part of the Redis protocol (RESP 2) that a load generator needs:
//! encoding requests and reading replies from a stream.
//!
//! Not a general client: no subscriptions, no nested replies.

use anyhow::{Context, Result, bail};
use std::{
    fmt,
    io::{Read, Write},
    net::TcpStream,
    ops::Range,
    os::unix::net::UnixStream,
    path::PathBuf,
    time::Duration,
};
use strata_units::{DECIMAL_DIGITS, decimal};

/// Bytes asked of the socket at once: a pipeline of sixteen records fits.
const READ_BYTES: usize = 64 * 1024;
/// A server that says nothing for so long is taken for dead or stuck.
const REPLY_TIMEOUT: Duration = Duration::from_secs(120);

/// Where a server listens.
#[derive(Clone, Debug)]
pub(crate) enum Endpoint {
    /// A unix socket.
    Unix(PathBuf),
    /// A host and port.
    Tcp(String),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// A reply; the bytes of a bulk string are [`Connection::bytes`] of the range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Reply {
    /// A value.
    Bulk(Range<usize>),
    /// No such key.
    Nil,
    /// `+OK` and its like.
    Status,
    /// An integer.
    Integer(i64),
}

/// One connection with its read buffer.
pub(crate) struct Connection {
    stream: Stream,
    buffer: Vec<u8>,
    /// Parsed so far; what lies before is dropped at the next read.
    consumed: usize,
    /// Read so far; what lies behind is room.
    filled: usize,
}

impl Connection {
    pub(crate) fn open(endpoint: &Endpoint) -> Result<Self> {
        let stream = match endpoint {
            Endpoint::Unix(path) => UnixStream::connect(path).map(Stream::Unix),
            Endpoint::Tcp(address) => TcpStream::connect(address).map(Stream::Tcp),
        }
        .with_context(|| format!("connect to Redis at {endpoint}"))?;
        match &stream {
            Stream::Unix(stream) => stream.set_read_timeout(Some(REPLY_TIMEOUT))?,
            Stream::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
            }
        }
        Ok(Self { stream, buffer: Vec::new(), consumed: 0, filled: 0 })
    }

    pub(crate) fn send(&mut self, requests: &[u8]) -> Result<()> {
        match &mut self.stream {
            Stream::Unix(stream) => stream.write_all(requests),
            Stream::Tcp(stream) => stream.write_all(requests),
        }
        .context("send to Redis")
    }

    /// One reply. `on_read` is called after every read from the socket: the
    /// moment when the replies in it had arrived. An error that the server
    /// replies is an error here. A range in the reply holds until the next call.
    pub(crate) fn receive(&mut self, mut on_read: impl FnMut()) -> Result<Reply> {
        loop {
            if let Some((reply, used)) = parse(&self.buffer[self.consumed..self.filled])? {
                let base = self.consumed;
                self.consumed += used;
                return Ok(match reply {
                    Reply::Bulk(range) => Reply::Bulk(range.start + base..range.end + base),
                    other => other,
                });
            }
            self.buffer.copy_within(self.consumed..self.filled, 0);
            self.filled -= self.consumed;
            self.consumed = 0;
            if self.buffer.len() - self.filled < READ_BYTES {
                self.buffer.resize(self.filled + READ_BYTES, 0);
            }
            let room = &mut self.buffer[self.filled..];
            let got = match &mut self.stream {
                Stream::Unix(stream) => stream.read(room),
                Stream::Tcp(stream) => stream.read(room),
            };
            match got {
                Ok(0) => bail!("Redis closed the connection"),
                Ok(count) => {
                    self.filled += count;
                    on_read();
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("read from Redis"),
            }
        }
    }

    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.buffer[range]
    }

    /// Sends one command and waits for its reply.
    pub(crate) fn call(&mut self, arguments: &[&[u8]]) -> Result<Reply> {
        let mut request = Vec::new();
        encode(&mut request, arguments);
        self.send(&request)?;
        self.receive(|| ())
    }
}

/// Appends one command.
pub(crate) fn encode(out: &mut Vec<u8>, arguments: &[&[u8]]) {
    put_count(out, b'*', arguments.len());
    for argument in arguments {
        put_count(out, b'$', argument.len());
        out.extend_from_slice(argument);
        out.extend_from_slice(b"\r\n");
    }
}

fn put_count(out: &mut Vec<u8>, kind: u8, count: usize) {
    out.push(kind);
    out.extend_from_slice(decimal(count as u64, &mut [0; DECIMAL_DIGITS]).as_bytes());
    out.extend_from_slice(b"\r\n");
}

/// The first reply in `bytes` and its length; None when it is not complete.
fn parse(bytes: &[u8]) -> Result<Option<(Reply, usize)>> {
    let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") else {
        return Ok(None);
    };
    let line = &bytes[1..end];
    let after = end + 2;
    let text = || String::from_utf8_lossy(line).into_owned();
    match bytes[0] {
        b'+' => Ok(Some((Reply::Status, after))),
        b'-' => bail!("Redis answered: {}", text()),
        b':' => {
            let number = text().parse().with_context(|| format!("integer reply {:?}", text()))?;
            Ok(Some((Reply::Integer(number), after)))
        }
        b'$' if line == b"-1" => Ok(Some((Reply::Nil, after))),
        b'$' => {
            let length: usize =
                text().parse().with_context(|| format!("bulk length {:?}", text()))?;
            let total = after + length + 2;
            Ok((bytes.len() >= total).then_some((Reply::Bulk(after..after + length), total)))
        }
        other => bail!("unexpected reply type {:?}", char::from(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_encoded() {
        let mut out = Vec::new();
        encode(&mut out, &[b"SET", b"key:10", b"0123456789"]);
        assert_eq!(out, b"*3\r\n$3\r\nSET\r\n$6\r\nkey:10\r\n$10\r\n0123456789\r\n");
    }

    #[test]
    fn replies_are_parsed_only_when_complete() {
        let all: [(&[u8], Reply); 4] = [
            (b"+OK\r\n", Reply::Status),
            (b":-12\r\n", Reply::Integer(-12)),
            (b"$-1\r\n", Reply::Nil),
            (b"$5\r\na\r\nbc\r\n", Reply::Bulk(4..9)),
        ];
        for (bytes, reply) in all {
            assert_eq!(parse(bytes).expect("valid"), Some((reply, bytes.len())));
            for cut in 0..bytes.len() {
                assert_eq!(parse(&bytes[..cut]).expect("a prefix is not an error"), None);
            }
        }
        assert!(parse(b"-ERR no\r\n").is_err());
        assert!(parse(b"$x\r\n").is_err());
        assert!(parse(b"?\r\n").is_err());
    }

    #[test]
    fn a_connection_reads_replies_that_arrive_in_pieces() {
        let (ours, mut theirs) = UnixStream::pair().expect("socket pair");
        let mut connection =
            Connection { stream: Stream::Unix(ours), buffer: Vec::new(), consumed: 0, filled: 0 };
        let writer = std::thread::spawn(move || {
            for piece in b"$3\r\nabc\r\n$-1\r\n:7\r\n".chunks(2) {
                theirs.write_all(piece).expect("written");
            }
        });
        let Reply::Bulk(range) = connection.receive(|| ()).expect("bulk") else { panic!("bulk") };
        assert_eq!(connection.bytes(range), b"abc");
        assert_eq!(connection.receive(|| ()).expect("nil"), Reply::Nil);
        assert_eq!(connection.receive(|| ()).expect("integer"), Reply::Integer(7));
        writer.join().expect("writer");
        assert!(connection.receive(|| ()).is_err(), "the other side is gone");
    }
}
