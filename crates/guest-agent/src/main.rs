//! The agent in a guest: reads what the kernel says of memory, and writes a line of that to
//! a port of the host's now and then (`strata vm run --self-balloon`); and has the guest's
//! hook run when the host says that the guest is another machine, a clone ([`orders`]).
//!
//! It decides nothing, and whatever fails costs the guest nothing: without the port, or
//! without anybody at its other side, it waits. It allocates next to nothing once it runs:
//! it has to speak when memory is short.
#![forbid(unsafe_code)]

mod kernel;
mod orders;

use std::fmt::{Display, Write as _};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use strata_units::order::Order;
use strata_units::reading::{
    AGENT_PORT, AGENT_PORT_NAME, Lines, MAX_READING_BYTES, Reading, asked,
};

use kernel::Kernel;
use orders::{HOOK, Orders};

/// How often a line is written, unless something happens.
const INTERVAL: Duration = Duration::from_secs(1);
/// An interval is between these.
const INTERVALS_MS: std::ops::RangeInclusive<u64> = 100..=60_000;
/// In an interval it is looked so often whether something happens.
const LOOKS: u32 = 5;
/// Something happens: tasks waited for memory for so long since the last line, ...
const WAITED_US: u64 = 10_000;
/// ...or what is available has fallen, or what programs may come to use has grown, by this
/// part of what was available.
const PART: u64 = 8;
/// Where ports are listed, with their names: without udev they have no links.
const PORTS: &str = "/sys/class/virtio-ports";

const HELP: &str =
    "Says to the host what this guest's memory is like (strata vm run --self-balloon), and runs
a hook when this guest has become another machine (strata clone).

Usage: strata-guest-agent [--port PATH] [--interval MILLISECONDS] [--hook PATH] [--once]

  --port PATH              the port; without it the one called org.strata.memory.0
  --interval MILLISECONDS  how often a line is written, 1000 without it
  --hook PATH              the hook; without it /usr/lib/strata/clone-hook
  --once                   print one line, and end
  --help, --version";

/// What the command line says.
#[derive(Debug, PartialEq)]
enum Wish {
    Help,
    Version,
    Once,
    /// None: the port that has the name.
    Run {
        port: Option<PathBuf>,
        interval: Duration,
        hook: PathBuf,
    },
}

fn wish(mut words: impl Iterator<Item = String>) -> Result<Wish, String> {
    let (mut port, mut interval, mut once) = (None, INTERVAL, false);
    let mut hook = PathBuf::from(HOOK);
    while let Some(word) = words.next() {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word.as_str(), None),
        };
        let mut value = || value.clone().or_else(|| words.next());
        match name {
            "--help" | "-h" => return Ok(Wish::Help),
            "--version" | "-V" => return Ok(Wish::Version),
            "--once" => once = true,
            "--port" => port = Some(value().ok_or("--port has no value")?.into()),
            "--hook" => hook = value().ok_or("--hook has no value")?.into(),
            "--interval" => {
                let text = value().ok_or("--interval has no value")?;
                let ms = text.parse().ok().filter(|ms| INTERVALS_MS.contains(ms));
                let ms = ms.ok_or("--interval is between 100 and 60000 milliseconds")?;
                interval = Duration::from_millis(ms);
            }
            _ => return Err(format!("{word} is not known; see --help")),
        }
    }
    Ok(if once { Wish::Once } else { Wish::Run { port, interval, hook } })
}

fn main() -> ExitCode {
    match wish(std::env::args().skip(1)) {
        Ok(Wish::Help) => println!("{HELP}"),
        Ok(Wish::Version) => println!("strata-guest-agent {}", env!("CARGO_PKG_VERSION")),
        Ok(Wish::Once) => match Kernel::open().and_then(|mut kernel| kernel.look()) {
            Ok(reading) => println!("{reading}"),
            Err(error) => {
                eprintln!("strata-guest-agent: /proc cannot be read: {error}");
                return ExitCode::FAILURE;
            }
        },
        Ok(Wish::Run { port, interval, hook }) => run(port.as_deref(), interval, hook),
        Err(why) => {
            eprintln!("strata-guest-agent: {why}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// For ever: one port after the other.
fn run(wished: Option<&Path>, interval: Duration, hook: PathBuf) -> ! {
    // Who says that memory is short should not be the one who goes.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let mut told = None;
    let mut orders = Orders::new(hook);
    loop {
        let port = wished.map_or_else(|| port_in(Path::new(PORTS)), Path::to_owned);
        let outcome = Kernel::open().and_then(|kernel| {
            serve(&mut open(&port)?, kernel, interval, (&mut orders, &mut told))
        });
        if let Err(error) = outcome
            && told != Some(error.kind())
        {
            told = Some(error.kind());
            eprintln!("strata-guest-agent: {}: {error}; it is tried again", port.display());
        }
        std::thread::sleep(interval);
    }
}

/// The device of the port that has the name, by the kernel's list; else where udev links it.
fn port_in(list: &Path) -> PathBuf {
    let has_name = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("name"))
            .is_ok_and(|name| name.trim() == AGENT_PORT_NAME)
    };
    let found = fs::read_dir(list).into_iter().flatten().flatten().find(has_name);
    found.map_or_else(|| AGENT_PORT.into(), |entry| Path::new("/dev").join(entry.file_name()))
}

/// Nothing waits: where nobody is at the other side, a line is not written.
fn open(port: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(port)
}

/// Writes lines until the port is gone.
fn serve(
    port: &mut File,
    mut kernel: Kernel,
    interval: Duration,
    (orders, told): (&mut Orders, &mut Option<io::ErrorKind>),
) -> io::Result<()> {
    let mut voice = Voice::default();
    let mut due = Instant::now();
    loop {
        let is_somebody_there = voice.hear(port)?;
        if let Some(order) = voice.order.take() {
            orders.take(order);
        }
        orders.look(Instant::now());
        if is_somebody_there
            && let Some(answer) = orders.to_say()
            && voice.write(port, answer)?
        {
            orders.was_said();
        }
        let mut reading = kernel.look()?;
        reading.heard = voice.asked;
        let now = Instant::now();
        if is_somebody_there
            && (now >= due || voice.is_urgent(&reading))
            && voice.say(port, reading)?
        {
            *told = None;
            due = now + interval;
        }
        std::thread::sleep(interval / LOOKS);
    }
}

/// What was heard and said at a port.
struct Voice {
    lines: Lines,
    /// The last question.
    asked: u64,
    /// The last order, until somebody takes it.
    order: Option<Order>,
    said: Option<Reading>,
    line: String,
    /// A line was written in part.
    is_torn: bool,
}

impl Default for Voice {
    fn default() -> Self {
        let line = String::with_capacity(2 * MAX_READING_BYTES);
        Self { lines: Lines::default(), asked: 0, order: None, said: None, line, is_torn: false }
    }
}

impl Voice {
    /// Takes in what there is; false: nobody is at the other side.
    fn hear(&mut self, port: &mut impl Read) -> io::Result<bool> {
        let mut piece = [0; MAX_READING_BYTES];
        // So much in one look: who says more is heard later.
        for _ in 0..LOOKS {
            match port.read(&mut piece) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    let (newest, order) = (&mut self.asked, &mut self.order);
                    self.lines.take(&piece[..count], &mut |line| {
                        match (asked(line), Order::parse(line)) {
                            (Some(number), _) => *newest = number,
                            (None, Some(heard)) => *order = Some(heard),
                            // A later host's word.
                            (None, None) => {}
                        }
                    });
                }
                Err(error) if is_for_later(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Whether the host should know before the interval is over.
    fn is_urgent(&self, reading: &Reading) -> bool {
        let Some(said) = &self.said else { return true };
        let waited = reading.some_us.unwrap_or(0).saturating_sub(said.some_us.unwrap_or(0));
        let fallen = said.available_bytes.saturating_sub(reading.available_bytes);
        let committed = |reading: &Reading| reading.committed_bytes.unwrap_or(0);
        let grown = committed(reading).saturating_sub(committed(said));
        waited >= WAITED_US || fallen.max(grown) > said.available_bytes / PART
    }

    /// Says what memory is like; false: there is no room, and it is forgotten.
    fn say(&mut self, port: &mut impl Write, reading: Reading) -> io::Result<bool> {
        let is_whole = self.write(port, &reading)?;
        self.said = Some(reading);
        Ok(is_whole)
    }

    /// Writes a line; false: not all of it.
    fn write(&mut self, port: &mut impl Write, text: &impl Display) -> io::Result<bool> {
        self.line.clear();
        if self.is_torn {
            self.line.push('\n');
        }
        // Into a string it is always written.
        let _ = writeln!(self.line, "{text}");
        match port.write(self.line.as_bytes()) {
            Ok(count) => {
                self.is_torn = count < self.line.len() && (count > 0 || self.is_torn);
                Ok(count == self.line.len())
            }
            Err(error) if is_for_later(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn is_for_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn words(text: &str) -> Result<Wish, String> {
        wish(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn the_command_line_is_read_or_refused() {
        let run = |port: Option<&str>, ms| Wish::Run {
            port: port.map(PathBuf::from),
            interval: Duration::from_millis(ms),
            hook: HOOK.into(),
        };
        assert_eq!(words(""), Ok(run(None, 1000)));
        let Ok(Wish::Run { hook, .. }) = words("--hook /h") else { panic!("it runs") };
        assert_eq!(hook, Path::new("/h"));
        assert_eq!(words("--port /x --interval=200"), Ok(run(Some("/x"), 200)));
        assert_eq!(words("--once"), Ok(Wish::Once));
        assert_eq!((words("--help"), words("-V")), (Ok(Wish::Help), Ok(Wish::Version)));
        for (text, why) in [
            ("--interval 99", "between"),
            ("--interval soon", "between"),
            ("--interval", "no value"),
            ("--port", "no value"),
            ("now", "now is not known"),
        ] {
            assert!(words(text).expect_err(text).contains(why), "{text}");
        }
    }

    #[test]
    fn what_is_said_is_heard_with_the_last_question() {
        let (mut ours, mut theirs) = UnixStream::pair().expect("a pair");
        for end in [&ours, &theirs] {
            end.set_nonblocking(true).expect("set");
        }
        let mut voice = Voice::default();
        assert!(voice.hear(&mut theirs).expect("nothing yet"));
        ours.write_all(b"ask 7\nnonsense\nask 8\nask ").expect("room");
        assert!(voice.hear(&mut theirs).expect("heard"));
        assert_eq!((voice.asked, voice.order.take()), (8, None));
        ours.write_all(b"9\nstrata-order/1 4 network\n").expect("room");
        assert!(voice.hear(&mut theirs).expect("heard"));
        let order = voice.order.take().expect("an order");
        assert_eq!((voice.asked, order.number), (9, 4));
        let reading = Reading { heard: voice.asked, total_bytes: 5, ..Reading::default() };
        assert!(voice.say(&mut theirs, reading).expect("said"));
        let mut piece = [0; MAX_READING_BYTES];
        let count = ours.read(&mut piece).expect("read");
        let line = piece[..count].strip_suffix(b"\n").expect("one line");
        assert_eq!(Reading::parse(line), Some(reading));
        // Nobody reads: lines are forgotten, and none is torn for good.
        while voice.say(&mut theirs, reading).expect("said or forgotten") {}
        let mut heard = Vec::new();
        let _ = ours.read_to_end(&mut heard);
        assert!(voice.say(&mut theirs, reading).expect("said"));
        let _ = ours.read_to_end(&mut heard);
        let last = heard.split(|byte| *byte == b'\n').rfind(|line| !line.is_empty());
        assert_eq!(Reading::parse(last.expect("a line")), Some(reading));
        drop(ours);
        assert!(!voice.hear(&mut theirs).expect("the other side is gone"));
    }

    #[test]
    fn what_happens_is_said_before_the_interval_is_over() {
        let mut voice = Voice::default();
        let said = Reading { available_bytes: 800, some_us: Some(5), ..Reading::default() };
        assert!(voice.is_urgent(&said));
        voice.said = Some(said);
        assert!(!voice.is_urgent(&Reading { available_bytes: 700, ..said }));
        assert!(voice.is_urgent(&Reading { available_bytes: 699, ..said }));
        assert!(!voice.is_urgent(&Reading { some_us: Some(10_004), ..said }));
        assert!(voice.is_urgent(&Reading { some_us: Some(10_005), ..said }));
        assert!(!voice.is_urgent(&Reading { committed_bytes: Some(100), ..said }));
        assert!(voice.is_urgent(&Reading { committed_bytes: Some(101), ..said }));
        assert!(!voice.is_urgent(&Reading { available_bytes: 900, some_us: None, ..said }));
    }

    #[test]
    fn the_port_is_found_by_its_name() {
        let place = std::env::temp_dir().join(format!("strata-ports-{}", std::process::id()));
        for (port, name) in [("vport1p1", "com.redhat.spice.0"), ("vport2p1", AGENT_PORT_NAME)] {
            fs::create_dir_all(place.join(port)).expect("made");
            fs::write(place.join(port).join("name"), format!("{name}\n")).expect("written");
        }
        assert_eq!(port_in(&place), Path::new("/dev/vport2p1"));
        fs::remove_dir_all(&place).expect("removed");
        assert_eq!(port_in(&place), Path::new(AGENT_PORT));
        assert!(open(Path::new("/nonexistent/port")).is_err());
    }
}
