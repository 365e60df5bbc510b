//! The daemon becomes the one that is installed now (`strata upgrade`), while programs
//! wait for a moment: the supervisor executes it, and it takes over from the holder as
//! from a dead daemon's. Asked first is whether it can.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use strata_pager::Registry;
use strata_sys::{HandedSockets, Notifier, Priority, log};

use crate::doors::Doors;

/// Its subcommand that answers [`what_is_here`].
pub(crate) const QUESTION: &str = "can-take-over";
/// What a worker leaves in the registry that makes room for the next stratad, which this
/// process is to execute...
pub(crate) const THIS: u32 = 1;
/// ...or which somebody else starts.
pub(crate) const ANOTHER: u32 = 2;
/// What the kernel appends to the name of an executable that was replaced.
const DELETED: &[u8] = b" (deleted)";

/// What this stratad says of itself: its version, and how its records are laid out.
pub(crate) fn what_is_here() -> String {
    format!("{} {:016x}", env!("CARGO_PKG_VERSION"), Registry::layout())
}

/// Where the executable of this process was, and its successor is.
fn installed() -> anyhow::Result<PathBuf> {
    let called = std::env::args_os().next().map(PathBuf::from);
    if let Some(path) = called.filter(|path| path.is_absolute()) {
        return Ok(path);
    }
    let own = std::env::current_exe().context("cannot tell which executable this is")?;
    let bytes = own.as_os_str().as_bytes();
    let name = bytes.strip_suffix(DELETED).unwrap_or(bytes);
    Ok(OsString::from_vec(name.to_vec()).into())
}

/// Whether the stratad that is installed is another file than this process executes.
pub(crate) fn is_another() -> bool {
    let file = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let Ok(installed) = installed() else { return false };
    match (file(&installed), file(Path::new("/proc/self/exe"))) {
        (Ok(installed), Ok(own)) => installed != own,
        _ => false,
    }
}

/// The version of the stratad that is installed, if it starts, can read the configuration,
/// and can take over.
///
/// # Errors
/// Why not.
pub(crate) fn check(config_file: Option<&Path>, private: bool) -> anyhow::Result<String> {
    let program = installed()?;
    let answer = answer_of(&program, &[QUESTION.as_ref()])?;
    let (version, layout) =
        answer.trim().split_once(' ').context("its answer is not understood")?;
    if layout != format!("{:016x}", Registry::layout()) {
        bail!(
            "stratad {version} keeps its records otherwise than this one: stop it (all pages come back), and start the new one"
        );
    }
    if !private {
        let mut words = vec!["config-check".as_ref()];
        words.extend(config_file.map(Path::as_os_str));
        answer_of(&program, &words)?;
    }
    Ok(version.to_owned())
}

fn answer_of(program: &Path, words: &[&std::ffi::OsStr]) -> anyhow::Result<String> {
    let shown = program.display();
    let output = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {shown}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("it said nothing");
        bail!("{shown} does not start: {}: {last}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Becomes it, with the words that this one was started with. Comes back only if that
/// cannot be. Its sockets go with it: who comes meanwhile waits there.
pub(crate) fn become_it(doors: &Doors, private: bool, notifier: &Notifier) {
    let failed = match execute(doors, private, notifier) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    HandedSockets::take_back(&doors.descriptors());
    log(Priority::Error, format_args!("the new stratad cannot be executed: {failed:#}"));
}

fn execute(doors: &Doors, private: bool, notifier: &Notifier) -> anyhow::Result<Infallible> {
    let mut command = Command::new(installed()?);
    command.args(std::env::args_os().skip(1)).envs(notifier.environment());
    if !private {
        let (name, sockets) = HandedSockets::hand_over(&doors.descriptors(), doors.are_managers)?;
        command.env(name, sockets);
    }
    Err(command.exec().into())
}
