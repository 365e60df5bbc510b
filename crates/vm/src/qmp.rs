//! QEMU's monitor protocol (QMP): one command, one answer, JSON on lines.
//!
//! Whoever answers is untrusted: a guest may have taken over its QEMU. So the length of a
//! line, how deep it nests, how much comes unasked, and the time for all of it are
//! bounded, and nothing in an answer is followed.
//!
//! A command that QEMU still carries out when whoever gave it has hung up (a worker that
//! was killed) is answered to whoever is connected then. So each request has a name that
//! none had before, and an answer to another one is passed over.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

/// Longest line. QEMU's longest answer to what is asked here has some hundreds of bytes.
const MAX_LINE_BYTES: usize = 64 << 10;
/// How deep a line may nest.
const MAX_DEPTH: usize = 16;
/// Events and answers to nothing that are passed over before a command's own answer.
const MAX_UNASKED: usize = 256;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The time is up, for this.
    #[error("its monitor does not answer in time ({0})")]
    Silent(String),
    /// It is gone.
    #[error("its monitor hung up")]
    HungUp,
    /// It does not speak the protocol, or too much.
    #[error("its monitor says what cannot be understood: {0}")]
    Nonsense(&'static str),
    /// It refused the command.
    #[error("its monitor refuses: {0}")]
    Refused(String),
    /// The connection failed.
    #[error("its monitor cannot be asked: {0}")]
    Io(io::Error),
}

impl QmpError {
    /// Says what was waited for.
    fn about(self, what: &str) -> Self {
        match self {
            Self::Silent(_) => Self::Silent(what.to_owned()),
            other => other,
        }
    }
}

impl From<io::Error> for QmpError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                Self::Silent("a connection".to_owned())
            }
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::HungUp,
            _ => Self::Io(error),
        }
    }
}

/// A conversation with a monitor.
#[derive(Debug)]
pub struct Monitor {
    stream: UnixStream,
    /// Read, and not yet looked at.
    rest: Vec<u8>,
    deadline: Instant,
    /// Of this conversation, and of no other.
    name: String,
    /// Commands so far.
    commands: u64,
}

/// A name that no conversation had before.
fn new_name() -> String {
    static BEGUN: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let number = BEGUN.fetch_add(1, Ordering::Relaxed);
    format!("{}-{:x}-{number}", std::process::id(), now.as_nanos())
}

impl Monitor {
    /// Begins a conversation; all of it may take `time`.
    ///
    /// # Errors
    /// No monitor answers there.
    pub fn begin(stream: UnixStream, time: Duration) -> Result<Self, QmpError> {
        Self::begin_as(stream, time, new_name())
    }

    /// The same, with requests that are called `name-0`, `name-1` and so on: for whoever has
    /// written the answers before.
    ///
    /// # Errors
    /// As for [`Self::begin`].
    pub fn begin_as(stream: UnixStream, time: Duration, name: String) -> Result<Self, QmpError> {
        let deadline = Instant::now() + time;
        let mut monitor = Self { stream, rest: Vec::new(), deadline, name, commands: 0 };
        if monitor.message().map_err(|error| error.about("its greeting"))?.get("QMP").is_none() {
            return Err(QmpError::Nonsense("no greeting"));
        }
        monitor.execute("qmp_capabilities", None)?;
        Ok(monitor)
    }

    /// What follows may take `time` from now on.
    pub fn allow(&mut self, time: Duration) {
        self.deadline = Instant::now() + time;
    }

    /// Has it carry out a command.
    ///
    /// # Errors
    /// It refuses, or there is no answer.
    pub fn execute(&mut self, command: &str, arguments: Option<Value>) -> Result<Value, QmpError> {
        self.execute_passing(command, arguments, &mut |mut stream, line| stream.write_all(line))
    }

    /// The same; `send` sends the line, and a descriptor with it.
    ///
    /// # Errors
    /// As for [`Self::execute`].
    pub fn execute_passing(
        &mut self,
        command: &str,
        arguments: Option<Value>,
        send: &mut dyn FnMut(&UnixStream, &[u8]) -> io::Result<()>,
    ) -> Result<Value, QmpError> {
        self.ask(command, arguments, send).map_err(|error| error.about(command))
    }

    fn ask(
        &mut self,
        command: &str,
        arguments: Option<Value>,
        send: &mut dyn FnMut(&UnixStream, &[u8]) -> io::Result<()>,
    ) -> Result<Value, QmpError> {
        let id = format!("{}-{}", self.name, self.commands);
        self.commands += 1;
        let mut request = json!({ "execute": command, "id": id });
        if let Some(arguments) = arguments {
            request["arguments"] = arguments;
        }
        let mut line = request.to_string();
        line.push('\n');
        self.stream.set_write_timeout(Some(self.left()?))?;
        send(&self.stream, line.as_bytes())?;
        for _ in 0..MAX_UNASKED {
            let mut message = self.message()?;
            if message.get("id").and_then(Value::as_str) != Some(&id) {
                continue;
            }
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = message.get("error") {
                let text = error.get("desc").and_then(Value::as_str).unwrap_or("no reason");
                let clean = |c: char| if c.is_control() { '?' } else { c };
                return Err(QmpError::Refused(text.chars().take(200).map(clean).collect()));
            }
        }
        Err(QmpError::Nonsense("too many events"))
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        // Zero would mean "wait for ever" to the kernel.
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }

    /// The next line, an object.
    fn message(&mut self) -> Result<Value, QmpError> {
        let line = self.line()?;
        if depth(&line) > MAX_DEPTH {
            return Err(QmpError::Nonsense("a line that nests too deep"));
        }
        match serde_json::from_slice(&line) {
            Ok(value @ Value::Object(_)) => Ok(value),
            _ => Err(QmpError::Nonsense("a line that is no JSON object")),
        }
    }

    fn line(&mut self) -> Result<Vec<u8>, QmpError> {
        let mut looked_at = 0;
        loop {
            if let Some(end) = self.rest[looked_at..].iter().position(|byte| *byte == b'\n') {
                let rest = self.rest.split_off(looked_at + end + 1);
                return Ok(std::mem::replace(&mut self.rest, rest));
            }
            looked_at = self.rest.len();
            if looked_at > MAX_LINE_BYTES {
                return Err(QmpError::Nonsense("a line that is too long"));
            }
            self.stream.set_read_timeout(Some(self.left()?))?;
            let mut chunk = [0_u8; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(QmpError::HungUp),
                Ok(count) => self.rest.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// How deep brackets nest, those in strings apart.
fn depth(line: &[u8]) -> usize {
    let (mut deepest, mut now, mut in_string, mut escaped) = (0_usize, 0_usize, false, false);
    for byte in line {
        match (in_string, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => in_string = !in_string,
            (false, b'{' | b'[') => now += 1,
            (false, b'}' | b']') => now = now.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(now);
    }
    deepest
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::BufRead;

    use super::*;

    pub(crate) const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}"#;
    const PATIENCE: Duration = Duration::from_secs(20);

    /// A monitor that answers each line with what `answer` makes of it, until that is None.
    pub(crate) fn answering(
        mut answer: impl FnMut(&str) -> Option<String> + Send + 'static,
    ) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        std::thread::spawn(move || {
            let mut out = theirs.try_clone().expect("a copy");
            let _ = writeln!(out, "{GREETING}");
            for line in io::BufReader::new(theirs).lines() {
                let Ok(line) = line else { break };
                let (line, id) = without_id(&line);
                let Some(text) = answer(&line) else { break };
                let _ = out.write_all(with_id(&text, &id).as_bytes());
            }
        });
        ours
    }

    /// A request, and what it is called.
    fn without_id(line: &str) -> (String, Value) {
        let mut request: Value = serde_json::from_str(line).expect("a request");
        let id = request.as_object_mut().expect("an object").remove("id").expect("its name");
        (request.to_string(), id)
    }

    /// What is said, with the name in what is an answer and has none.
    fn with_id(text: &str, id: &Value) -> String {
        let named = |line: &str| match serde_json::from_str::<Value>(line) {
            Ok(mut said) if said.get("event").is_none() && said.get("id").is_none() => {
                said["id"] = id.clone();
                said.to_string()
            }
            _ => line.to_owned(),
        };
        text.lines().map(|line| named(line) + "\r\n").collect()
    }

    /// A monitor that says `bytes` and waits to be hung up on.
    fn saying(bytes: Vec<u8>) -> UnixStream {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        std::thread::spawn(move || {
            let _ = theirs.write_all(&bytes);
            let _ = theirs.read_to_end(&mut Vec::new());
        });
        ours
    }

    #[test]
    fn commands_are_answered_among_events() {
        let mut asked = Vec::new();
        let stream = answering(move |line| {
            asked.push(line.to_owned());
            Some(match asked.len() {
                1 => "{\"return\": {}}\r\n".to_owned(),
                2 => "{\"event\": \"RESUME\", \"data\": {}}\r\n{\"return\": {\"actual\": 7}}\r\n"
                    .to_owned(),
                _ => {
                    assert_eq!(line, r#"{"arguments":{"value":1},"execute":"balloon"}"#);
                    "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\\nballoon\"}}\r\n"
                        .to_owned()
                }
            })
        });
        let mut monitor = Monitor::begin(stream, PATIENCE).expect("it answers");
        let answer = monitor.execute("query-balloon", None).expect("answered");
        assert_eq!(answer, json!({"actual": 7}));
        let refused = monitor.execute("balloon", Some(json!({"value": 1}))).expect_err("refused");
        assert_eq!(refused.to_string(), "its monitor refuses: no?balloon");
    }

    #[test]
    fn an_answer_to_somebody_else_is_none() {
        let mut asked = 0;
        let stream = answering(move |_| {
            asked += 1;
            // Of a worker that was killed, which had asked for a node and for the jobs.
            Some(match asked {
                1 => "{\"return\": {}, \"id\": \"7-1-0-3\"}\n{\"return\": {}}\n".to_owned(),
                _ => "{\"return\": [], \"id\": \"7-1-0-4\"}\n{\"return\": {\"status\": 1}}\n"
                    .to_owned(),
            })
        });
        let mut monitor = Monitor::begin(stream, PATIENCE).expect("it answers");
        let answer = monitor.execute("query-status", None).expect("answered");
        assert_eq!(answer, json!({"status": 1}));
        assert_ne!(new_name(), new_name());
    }

    #[test]
    fn what_is_no_monitor_is_seen_at_once() {
        let deep = format!("{}\n", "[".repeat(MAX_DEPTH + 1));
        let long = vec![b' '; MAX_LINE_BYTES + 5000];
        let events = format!("{GREETING}\n") + &"{\"event\": \"X\"}\n".repeat(MAX_UNASKED + 1);
        for (bytes, why) in [
            (b"SSH-2.0-OpenSSH\r\n".to_vec(), "no JSON object"),
            (b"[]\n".to_vec(), "no JSON object"),
            (b"{\"return\": {}}\n".to_vec(), "no greeting"),
            (b"{\"QMP\": \n".to_vec(), "no JSON object"),
            (b"{\"QMP\": \xff}\n".to_vec(), "no JSON object"),
            (deep.into_bytes(), "nests too deep"),
            (long, "too long"),
            (events.into_bytes(), "too many events"),
        ] {
            let error = Monitor::begin(saying(bytes), PATIENCE).expect_err(why);
            assert!(error.to_string().contains(why), "{error} is not {why}");
        }
    }

    #[test]
    fn silence_and_hanging_up_end_the_conversation() {
        let silent = Monitor::begin(saying(Vec::new()), Duration::from_millis(20));
        let words = silent.expect_err("nobody answers").to_string();
        assert_eq!(words, "its monitor does not answer in time (its greeting)");
        let gone = Monitor::begin(answering(|_| None), PATIENCE);
        assert!(matches!(gone, Err(QmpError::HungUp)), "{gone:?}");
        // A byte now and then does not make the time longer.
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let trickling = std::thread::spawn(move || {
            while theirs.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let silent = Monitor::begin(ours, Duration::from_millis(50));
        assert!(matches!(silent, Err(QmpError::Silent(_))), "{silent:?}");
        trickling.join().expect("it ends with the conversation");
    }

    #[test]
    fn depth_counts_brackets_outside_of_strings() {
        assert_eq!(depth(br#"{"a":[{"b":"]]}}[[\"[["}]}"#), 3);
        assert_eq!(depth(b"]]]]"), 0);
        assert_eq!(depth(b"\"[[["), 0);
    }

    #[test]
    fn nonsense_never_panics() {
        let pieces: [&[u8]; 12] = [
            b"{",
            b"}",
            b"[",
            b"\"QMP\"",
            b":",
            b"{\"QMP\": {}}\n",
            b"{\"return\": {}, \"id\": \"x-0\"}\n",
            b"\n",
            b"\\",
            b"\xff",
            b"{\"error\": 1, \"id\": \"x-1\"}\n",
            b"{\"return\": [[[]]], \"id\": \"x-1\"}\n",
        ];
        let mut state = 7_u64;
        for _ in 0..300 {
            let mut bytes = Vec::new();
            for _ in 0..24 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                bytes.extend_from_slice(pieces[(state >> 33) as usize % pieces.len()]);
            }
            let (ours, mut theirs) = UnixStream::pair().expect("a pair");
            theirs.write_all(&bytes).expect("room for so little");
            theirs.shutdown(std::net::Shutdown::Write).expect("ended");
            if let Ok(mut monitor) = Monitor::begin_as(ours, PATIENCE, "x".into()) {
                let _ = monitor.execute("query-status", None);
                let _ = crate::balloon::look(&mut monitor, Some("b"));
            }
        }
    }
}
