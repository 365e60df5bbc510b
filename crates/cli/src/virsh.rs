//! libvirt's own command line.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::failure::{Failure, Result};
use crate::libvirt::SYSTEM;
use crate::place;

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
        let mut printed = Vec::new();
        if let Some(out) = child.stdout.take() {
            let _ = out.take(MAX_PRINTED_BYTES).read_to_end(&mut printed);
        }
        let done = child.wait_with_output().map_err(|error| failed(format!("virsh: {error}")))?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr);
            let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
            let why = lines.join(", ").replace("error: ", "");
            return Err(failed(format!("virsh {}: {why}", words[0])));
        }
        String::from_utf8(printed).map_err(|_| failed("virsh does not print text".to_owned()))
    }
}
