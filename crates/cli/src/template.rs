//! `strata vm template`: a guest's snapshot at a good moment, which is waited for: when a
//! port of the guest answers, when a command succeeds, or when its console has said a text.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::{ArgGroup, Args};

use crate::args::{label, tenant_name};
use crate::client;
use crate::failure::{Failure, Result};
use crate::snapshots;

/// How often it is looked whether the moment has come.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long one look may take.
const LOOK_WITHIN: Duration = Duration::from_secs(10);
/// QEMU takes connections for its guest, and hangs up at once if the guest does not.
const STAYS: Duration = Duration::from_millis(300);
/// Bytes of a console that are read at once.
const MAX_READ_BYTES: u64 = 4 << 20;
/// The label of a template, if it is given none.
const LABEL: &str = "template";

/// Which guest's template, and when it is taken.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("moment").required(true)))]
pub(crate) struct VmTemplateArguments {
    /// The guest
    #[arg(value_parser = tenant_name)]
    pub(crate) name: String,
    /// When this command of the shell's succeeds here; 'port N answers' looks whether port N of
    /// this machine, which leads to the guest, answers
    #[arg(long, value_name = "COMMAND", group = "moment")]
    pub(crate) when: Option<String>,
    /// When the guest's console, which goes to a file (-serial file:PATH), has said this
    #[arg(long, value_name = "TEXT", group = "moment")]
    pub(crate) when_console: Option<String>,
    /// A second name for the snapshot
    #[arg(long, value_parser = label, default_value = LABEL)]
    pub(crate) label: String,
    /// How long that may take
    #[arg(long, value_name = "SECONDS", default_value = "300")]
    pub(crate) within: u64,
}

/// What is waited for.
#[derive(PartialEq, Debug)]
enum Moment {
    /// This port of this machine answers.
    Port(u16),
    /// This command of the shell's succeeds.
    Command(String),
    /// The console has said this, in this file.
    Said { text: String, file: PathBuf, read: u64 },
}

impl Moment {
    /// As it is typed.
    fn parse(text: &str) -> Self {
        match text.split_whitespace().collect::<Vec<_>>()[..] {
            ["port", number, "answers"] if number.parse::<u16>().is_ok_and(|port| port > 0) => {
                Self::Port(number.parse().unwrap_or_default())
            }
            _ => Self::Command(text.to_owned()),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Port(port) => format!("port {port} does not answer"),
            Self::Command(command) => format!("{command} does not succeed"),
            Self::Said { text, file, .. } => {
                format!("its console does not say {text:?} (in {})", file.display())
            }
        }
    }

    /// Whether it has come.
    fn is_here(&mut self) -> bool {
        match self {
            Self::Port(port) => answers(*port),
            Self::Command(command) => succeeds(command),
            Self::Said { text, file, read } => said(text, file, read).unwrap_or(false),
        }
    }
}

fn answers(port: u16) -> bool {
    let address = (Ipv4Addr::LOCALHOST, port).into();
    let Ok(mut stream) = TcpStream::connect_timeout(&address, LOOK_WITHIN) else { return false };
    if stream.set_read_timeout(Some(STAYS)).is_err() {
        return false;
    }
    match stream.read(&mut [0]) {
        Ok(read) => read > 0,
        Err(error) => {
            matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
        }
    }
}

fn succeeds(command: &str) -> bool {
    let started = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = started else { return false };
    let until = Instant::now() + LOOK_WITHIN;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < until => std::thread::sleep(LOOK_EVERY / 10),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return false;
            }
        }
    }
}

/// Looks at what a file has that was not read yet, and at the end of what was: the text may
/// have come in two parts.
fn said(text: &str, file: &Path, read: &mut u64) -> std::io::Result<bool> {
    let mut file = File::open(file)?;
    let mut piece = Vec::new();
    let at = read.saturating_sub(text.len() as u64);
    file.seek(SeekFrom::Start(at))?;
    file.take(MAX_READ_BYTES).read_to_end(&mut piece)?;
    *read = at + piece.len() as u64;
    Ok(piece.windows(text.len().max(1)).any(|part| part == text.as_bytes()))
}

/// The file that a console of a QEMU with these words goes to.
fn console(words: &[String]) -> Option<&str> {
    let mut options = words.iter().zip(words.iter().skip(1));
    options.find_map(|(option, value)| match option.trim_start_matches('-') {
        "serial" | "debugcon" => value.strip_prefix("mon:").unwrap_or(value).strip_prefix("file:"),
        "chardev" if value.starts_with("file,") || value.contains("backend=file,") => {
            value.split(',').find_map(|part| part.strip_prefix("path="))
        }
        _ => None,
    })
}

/// Waits, and takes the snapshot.
pub(crate) fn template(arguments: VmTemplateArguments) -> Result<()> {
    let VmTemplateArguments { name, when, when_console, label, within } = arguments;
    let what = format!("cannot make a template of {name}");
    let stats = client::stats(&name)?;
    let failed = |why: &str, todo: &str| Failure::new(what.clone(), why).todo(todo);
    if stats.guest.is_none() {
        return Err(failed("it is no guest", "strata snapshot takes one of a program"));
    }
    let pid = *stats.pids.first().ok_or_else(|| failed("it does not run", "start it"))?;
    let mut moment = match (when, when_console) {
        (Some(when), _) => Moment::parse(&when),
        (None, Some(text)) => {
            let place = format!("/proc/{pid}");
            let words = std::fs::read(format!("{place}/cmdline")).unwrap_or_default();
            let word = |word: &[u8]| OsString::from_vec(word.to_vec()).into_string().ok();
            let words: Vec<String> = words.split(|&byte| byte == 0).filter_map(word).collect();
            let file = console(&words).ok_or_else(|| {
                failed(
                    "its console goes to no file",
                    "start it with -serial file:PATH, or wait by --when",
                )
            })?;
            let here = std::fs::read_link(format!("{place}/cwd")).unwrap_or_default();
            Moment::Said { text, file: here.join(file), read: 0 }
        }
        (None, None) => {
            return Err(failed("nothing is waited for", "give --when or --when-console"));
        }
    };
    let until = Instant::now() + Duration::from_secs(within);
    while !moment.is_here() {
        let still = client::stats(&name)?;
        if still.pids.first() != Some(&pid) {
            return Err(failed("it has ended meanwhile", "see what it said"));
        }
        if Instant::now() > until {
            let why = format!("{} within {within} s", moment.name());
            return Err(failed(&why, "see what it does, or wait longer (--within)"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    snapshots::take(name, Some(label), false)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn moments_are_read_as_they_are_typed() {
        assert_eq!(Moment::parse(" port 8080 answers"), Moment::Port(8080));
        for text in ["port 0 answers", "port x answers", "ssh web1 true"] {
            assert_eq!(Moment::parse(text), Moment::Command(text.into()));
        }
        assert!(Moment::parse("test 1 = 1").is_here());
        assert!(!Moment::parse("test 1 = 2").is_here());
    }

    #[test]
    fn a_port_answers_that_stays_open_or_says_something() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let answering = std::thread::spawn(move || {
            let (first, _) = listener.accept().expect("a connection");
            drop(first);
            let (mut second, _) = listener.accept().expect("a connection");
            second.write_all(b"hello").expect("written");
            let third = listener.accept().expect("a connection");
            (second, third)
        });
        assert!(!answers(port), "hung up");
        assert!(answers(port), "said hello");
        assert!(answers(port), "stays");
        drop(answering.join().expect("it ends"));
        assert!(!answers(port), "gone");
    }

    #[test]
    fn a_text_that_comes_in_parts_is_seen() {
        let path = std::env::temp_dir().join(format!("strata-console-{}", std::process::id()));
        let mut file = File::create(&path).expect("a file");
        let mut moment = Moment::Said { text: "login:".into(), file: path.clone(), read: 0 };
        assert!(!moment.is_here());
        for (piece, is_here) in [("booting\nlog", false), ("in", false), (": ", true)] {
            file.write_all(piece.as_bytes()).expect("written");
            assert_eq!(moment.is_here(), is_here, "{piece}");
        }
        std::fs::remove_file(path).expect("clean up");
    }

    #[test]
    fn a_console_goes_to_the_file_that_is_said() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for (line, file) in [
            ("q -serial mon:file:/a", Some("/a")),
            ("q -serial stdio -debugcon file:b", Some("b")),
            ("q -chardev file,id=c,path=/c -serial chardev:c", Some("/c")),
            ("q -chardev backend=file,id=c,path=/c", Some("/c")),
            ("q -serial unix:/d,server=on file:/e", None),
        ] {
            assert_eq!(console(&words(line)), file, "{line}");
        }
    }
}
