//! libvirt's own command line.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::failure::{Failure, Result};
use crate::libvirt::SYSTEM;
use crate::place;

/// How long it may take: a domain that starts waits for its devices.
const ENDS_WITHIN: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// A domain's XML is some ten kilobytes.
const MAX_PRINTED_BYTES: u64 = 8 << 20;

/// libvirt's own command line.
pub(crate) struct Virsh {
    program: PathBuf,
    what: String,
}

impl Virsh {
    pub(crate) fn find(what: &str) -> Result<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = place::in_path("virsh", &path).ok_or_else(|| {
            Failure::new(what, "virsh is not there").todo("install libvirt's clients")
        })?;
        Ok(Self { program, what: what.to_owned() })
    }

    /// It has to be the libvirt whose guests have a user and directories of their own.
    pub(crate) fn check_system(&self) -> Result<()> {
        let uri = self.ask(&["uri"])?;
        if uri.trim() == SYSTEM {
            return Ok(());
        }
        let why = format!("libvirt is at {}, and its guests have to be of {SYSTEM}", uri.trim());
        let todo = format!("set LIBVIRT_DEFAULT_URI={SYSTEM}");
        Err(Failure::new(self.what.as_str(), why).todo(todo))
    }

    /// Starts a domain that is in no list of libvirt's when it has ended; it is paused.
    pub(crate) fn create(&self, text: &str) -> Result<()> {
        self.run(&["create", "--paused", "--file", "/dev/stdin"], text).map(drop)
    }

    /// Ends a domain at once.
    pub(crate) fn destroy(&self, domain: &str) -> Result<()> {
        self.run(&["destroy", "--domain", domain], "").map(drop)
    }

    pub(crate) fn ask(&self, words: &[&str]) -> Result<String> {
        self.run(words, "")
    }

    pub(crate) fn define(&self, text: &str, what: &str) -> Result<()> {
        self.run(&["define", "--file", "/dev/stdin"], text)
            .map(drop)
            .map_err(|failure| Failure::new(what, failure).todo("nothing was changed"))
    }

    fn run(&self, words: &[&str], input: &str) -> Result<String> {
        let failed = |why: String| Failure::new(self.what.as_str(), why);
        let mut child = Command::new(&self.program)
            .args(["--quiet"])
            .args(words)
            .env("LC_ALL", "C")
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(format!("virsh: {error}")))?;
        if let Some(mut stdin) = child.stdin.take() {
            // Who does not read it says why on standard error.
            let _ = stdin.write_all(input.as_bytes());
        }
        let (out, said) = (read(child.stdout.take()), read(child.stderr.take()));
        let until = Instant::now() + ENDS_WITHIN;
        let status = loop {
            match child.try_wait().map_err(|error| failed(format!("virsh: {error}")))? {
                Some(status) => break status,
                None if Instant::now() < until => std::thread::sleep(LOOK_EVERY),
                None => {
                    let _ = child.kill();
                    let _ = child.wait();
                    let why = format!("virsh {}: nothing in {ENDS_WITHIN:?}", words[0]);
                    return Err(failed(why).todo("see to libvirtd"));
                }
            }
        };
        let bytes = |reader: JoinHandle<Vec<u8>>| reader.join().unwrap_or_default();
        let printed = bytes(out);
        if !status.success() {
            let said = bytes(said);
            let said = String::from_utf8_lossy(&said);
            let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
            let why = lines.join(", ").replace("error: ", "");
            return Err(failed(format!("virsh {}: {why}", words[0])));
        }
        String::from_utf8(printed).map_err(|_| failed("virsh does not print text".to_owned()))
    }
}

/// Reads what it says, while it says it.
fn read(from: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(from) = from {
            let _ = from.take(MAX_PRINTED_BYTES).read_to_end(&mut bytes);
        }
        bytes
    })
}
