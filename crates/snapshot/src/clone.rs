//! The programs around a restored tree; `strata-clone` is all four, and nothing else.
//!
//! `run`: gets namespaces of its own, shows directories elsewhere, switches the
//! loopback interface on, and starts CRIU in there. With a pid namespace CRIU
//! is the first process in it, and `run` stays outside: killed, it takes the
//! whole clone along.
//!
//! `enter`: starts a program in the namespaces of a clone, to dump it.
//!
//! `init`: what CRIU becomes when it has restored the tree. It writes a byte to
//! a descriptor (that is how the restore is known to be over), collects whoever
//! ends, and ends when nobody is left, with the exit code of the tree's root.
//!
//! Without arguments it is what CRIU runs at each step of a restore (see `gate`).

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use strata_sys::{
    Own, adopt_fd, bind_mount, enter_namespaces_of, own_session, prepare_child, raise_loopback,
    unshare, wait_any_child,
};

use crate::gate;

/// Exit code of `run` and `init` when they themselves failed.
pub const FAILED: i32 = 125;

/// The arguments of `run`, as a list of words.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Run {
    pub(crate) own_pids: bool,
    pub(crate) own_network: bool,
    /// With a network of its own: addresses that it does not have may be bound all
    /// the same.
    pub(crate) any_address: bool,
    /// Directories: what is shown, and where.
    pub(crate) shown: Vec<(PathBuf, PathBuf)>,
    /// The program to run inside, with its arguments.
    pub(crate) program: Vec<OsString>,
}

impl Run {
    pub(crate) fn words(&self) -> Vec<OsString> {
        let mut words = vec![OsString::from("run")];
        words.extend(self.own_pids.then(|| "--pids".into()));
        words.extend(self.own_network.then(|| "--network".into()));
        words.extend(self.any_address.then(|| "--any-address".into()));
        for (from, onto) in &self.shown {
            words.extend(["--show".into(), from.into(), onto.into()]);
        }
        words.push("--".into());
        words.extend(self.program.iter().cloned());
        words
    }

    fn parse(mut words: impl Iterator<Item = OsString>) -> Option<Self> {
        let mut run = Self::default();
        loop {
            match words.next()?.to_str()? {
                "--pids" => run.own_pids = true,
                "--network" => run.own_network = true,
                "--any-address" => run.any_address = true,
                "--show" => run.shown.push((words.next()?.into(), words.next()?.into())),
                "--" => break,
                _ => return None,
            }
        }
        run.program = words.collect();
        (!run.program.is_empty()).then_some(run)
    }

    fn run(&self) -> io::Result<i32> {
        let own = Own { mounts: true, network: self.own_network, pids: self.own_pids };
        unshare(own)?;
        for (from, onto) in &self.shown {
            bind_mount(from, onto).map_err(|error| {
                let text = format!("showing {} as {}: {error}", from.display(), onto.display());
                io::Error::new(error.kind(), text)
            })?;
        }
        if self.own_network {
            raise_loopback()?;
            if self.any_address {
                for version in ["ipv4", "ipv6"] {
                    // Not everywhere to be had; CRIU then says what it cannot bind.
                    let _ =
                        std::fs::write(format!("/proc/sys/net/{version}/ip_nonlocal_bind"), "1");
                }
            }
        }
        let mut command = Command::new(&self.program[0]);
        command.args(&self.program[1..]);
        if !self.own_pids {
            return Err(command.exec());
        }
        prepare_child(&mut command);
        // Its leader must be inside, or the clone cannot be dumped again.
        own_session(&mut command);
        let mut child = command.spawn()?;
        let status = child.wait()?;
        Ok(status.code().unwrap_or(FAILED))
    }
}

/// Runs a program in the namespaces of a process.
fn enter(mut words: impl Iterator<Item = OsString>) -> Option<io::Result<i32>> {
    let pid = words.next()?.to_str()?.parse().ok()?;
    let mut command = Command::new(words.next()?);
    command.args(words);
    Some(enter_namespaces_of(pid).and_then(|()| {
        let status = command.status()?;
        Ok(status.code().unwrap_or(FAILED))
    }))
}

/// Collects whoever ends until nobody is left. The tree's root is the only
/// child that was there at the start; orphans come later.
fn init(ready: &str) -> io::Result<i32> {
    let number = ready.parse().map_err(|_| io::Error::other("no descriptor's number"))?;
    let ready = adopt_fd(number).ok_or_else(|| io::Error::other("that descriptor is not open"))?;
    let root = std::fs::read_to_string("/proc/self/task/1/children").unwrap_or_default();
    let root: Option<u32> = root.split_ascii_whitespace().next().and_then(|pid| pid.parse().ok());
    // Nobody reads any more: then nobody wants the clone.
    File::from(ready).write_all(&[0])?;
    let mut code = 0;
    while let Some(ended) = wait_any_child()? {
        if Some(ended.pid) == root {
            code = ended.code;
        }
    }
    Ok(code)
}

/// The whole program `strata-clone`: what to exit with.
#[must_use]
pub fn main(mut words: impl Iterator<Item = OsString>) -> i32 {
    let word = words.next();
    if let (None, Ok(action)) = (&word, env::var("CRTOOLS_SCRIPT_ACTION")) {
        gate::ask(&action);
        return 0;
    }
    let result = match word.as_deref().and_then(|word| word.to_str()) {
        Some("run") => Run::parse(words).map(|run| run.run()),
        Some("enter") => enter(words),
        Some("init") => words.next().and_then(|word| word.into_string().ok()).map(|fd| init(&fd)),
        _ => None,
    };
    match result {
        Some(Ok(code)) => code,
        Some(Err(error)) => {
            eprintln!("strata-clone: {error}");
            FAILED
        }
        None => {
            eprintln!("strata-clone: Strata starts this by itself; there is nothing to type");
            FAILED
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_say_what_was_meant() {
        let run = Run {
            own_pids: true,
            own_network: true,
            any_address: true,
            shown: vec![("/a b".into(), "/c".into()), ("--".into(), "/d".into())],
            program: vec!["criu".into(), "--".into(), "x".into()],
        };
        let words = run.words();
        assert_eq!(words[0], "run");
        assert_eq!(Run::parse(words.into_iter().skip(1)), Some(run));
        for wrong in [&["--what", "--", "x"][..], &["--show", "a"], &["--pids", "--"], &[]] {
            assert_eq!(Run::parse(wrong.iter().map(OsString::from)), None, "{wrong:?}");
        }
    }
}
