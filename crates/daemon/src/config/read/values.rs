//! One value of a configuration file: what its type must be, and what it may say.

use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use strata_policy::order::{Lower, TierOrder};
use strata_units::ByteSize;
use toml::de::DeValue;

use super::Refusal;
use crate::config::{Machine, User, exact_time};
use crate::naming::Naming;

/// What the kernel keeps of the name that a program is executed by (`comm`).
const MOST_COMM_BYTES: usize = 15;
/// Longest path of a unix socket, without the zero byte at its end.
const MAX_SOCKET_PATH_BYTES: usize = 107;

pub(super) fn wrong_type(value: &DeValue<'_>, wanted: &str) -> Refusal {
    (format!("is of the type {}", value.type_str()), format!("write {wanted}"))
}

/// The text of a value; `wanted` says what to write instead of another type.
pub(super) fn text<'a>(value: &'a DeValue<'_>, wanted: &str) -> Result<&'a str, Refusal> {
    value.as_str().ok_or_else(|| wrong_type(value, wanted))
}

pub(super) fn size(value: &DeValue<'_>) -> Result<ByteSize, Refusal> {
    let text = text(value, "a size with its unit, in quotes: \"4GiB\"")?;
    text.parse().map_err(|_| {
        (format!("{text:?} is not a size"), "write a size with its unit: \"4GiB\"".into())
    })
}

/// Tiers that the machine does not have may be named: one file serves several.
pub(super) fn tier_order(value: &DeValue<'_>) -> Result<TierOrder, Refusal> {
    const WANTED: &str =
        "each tier once, the first to be filled first: [\"node\", \"compressed\", \"file\"]";
    let array = value.as_array().ok_or_else(|| wrong_type(value, WANTED))?;
    let names: Result<Vec<&str>, Refusal> =
        array.iter().map(|element| text(element.get_ref(), WANTED)).collect();
    TierOrder::of_names(names?).map_err(|name| {
        let known = TierOrder::default().tiers().map(Lower::name);
        let what = match known.contains(&name) {
            true => format!("names {name:?} twice"),
            false => format!("{name:?} is no tier below DRAM"),
        };
        (what, format!("write {WANTED}"))
    })
}

pub(super) fn budget(value: &DeValue<'_>, machine: &Machine) -> Result<ByteSize, Refusal> {
    let size = size(value)?;
    if size > machine.memory {
        let what = format!("{size} is more than this machine has ({})", machine.memory);
        return Err((what, "give it less: a budget is a share of DRAM".into()));
    }
    Ok(size)
}

/// A part of the machine's memory.
pub(super) fn share(value: &DeValue<'_>, machine: &Machine) -> Result<ByteSize, Refusal> {
    let size = size(value)?;
    if size > machine.memory {
        let what = format!("{size} is more than this machine has ({})", machine.memory);
        return Err((what, "name a part of it".into()));
    }
    Ok(size)
}

/// `"250ms"`, `"10s"`, `"5m"` or `"5min"`, `"2h"`, `"1d"`; at most `max`.
pub(super) fn duration(value: &DeValue<'_>, max: Duration) -> Result<Duration, Refusal> {
    const WANTED: &str =
        "a time with its unit, in quotes: \"250ms\", \"10s\", \"5min\", \"2h\" or \"1d\"";
    let text = text(value, WANTED)?;
    let refuse = |what: String| (what, format!("write {WANTED}"));
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: u64 = number.parse().map_err(|_| refuse(format!("{text:?} is not a time")))?;
    let unit_ms = match unit.trim() {
        "ms" => 1,
        "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(refuse(format!("{text:?} is not a time"))),
    };
    let time = Duration::from_millis(number.saturating_mul(unit_ms));
    if time > max {
        let (what, todo) = (format!("{text:?} is too long"), exact_time(max));
        return Err((what, format!("at most {todo} is allowed")));
    }
    Ok(time)
}

pub(super) fn address(value: &DeValue<'_>) -> Result<SocketAddr, Refusal> {
    const WANTED: &str = "an address and a port: \"127.0.0.1:9464\"";
    let text = text(value, WANTED)?;
    text.parse().map_err(|_| (format!("{text:?} is not an address"), format!("write {WANTED}")))
}

pub(super) fn absolute(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    const WANTED: &str = "an absolute path: \"/var/lib/strata\"";
    let text = text(value, WANTED)?;
    let path = Path::new(text);
    if !path.is_absolute() || text.contains('\0') {
        return Err((format!("{text:?} is not an absolute path"), format!("write {WANTED}")));
    }
    Ok(path.to_owned())
}

pub(super) fn socket_directory(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    let directory = absolute(value)?;
    let socket = directory.join(strata_api::CONTROL_SOCKET_NAME);
    if socket.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
        let what = format!("{} is too long for a socket", socket.display());
        return Err((what, format!("stay within {MAX_SOCKET_PATH_BYTES} bytes")));
    }
    Ok(directory)
}

/// Names for the file that is made to see whether one can be.
const PROBE_NAMES: u32 = 64;

/// A directory in which we can make a file. Tried, not guessed from its mode:
/// read-only file systems and access lists would be guessed wrong.
pub(super) fn writable_directory(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    let directory = absolute(value)?;
    // Somebody else may try just now, or have been killed when he did.
    let taken = |error: &std::io::Error| error.kind() == std::io::ErrorKind::AlreadyExists;
    let mut tried = (0..PROBE_NAMES).map(|number| {
        let probe = directory.join(format!(".strata-check-{}-{number}", std::process::id()));
        std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&probe)
            .and_then(|_| std::fs::remove_file(&probe))
    });
    let last = tried.find(|made| !made.as_ref().is_err_and(taken));
    match last.unwrap_or_else(|| Err(std::io::ErrorKind::AlreadyExists.into())) {
        Ok(()) => Ok(directory),
        Err(error) => Err((
            format!("cannot write to {}: {error}", directory.display()),
            "make the directory, writable for stratad".into(),
        )),
    }
}

/// A directory that stratad makes when it first needs it, parents and all. What
/// is there already must serve.
pub(super) fn snapshot_directory(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    let directory = absolute(value)?;
    match directory.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(directory),
        Ok(_) | Err(_) => writable_directory(value),
    }
}

pub(super) fn program(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    let path = absolute(value)?;
    let executable =
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    if !executable {
        let what = format!("{} is not a program", path.display());
        return Err((what, "name the criu to use, or leave the key out".into()));
    }
    Ok(path)
}

pub(super) fn library(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    let path = absolute(value)?;
    // The dynamic loader splits LD_PRELOAD at these.
    if path.as_os_str().as_encoded_bytes().iter().any(|b| b.is_ascii_whitespace() || *b == b':') {
        let what = format!("{} has a blank or a colon in it", path.display());
        return Err((what, "the dynamic loader would split it there; move it".into()));
    }
    if !path.is_file() {
        let what = format!("{} is not a file", path.display());
        return Err((what, "name libstrata.so, or leave the key out".into()));
    }
    Ok(path)
}

pub(super) fn truth(value: &DeValue<'_>) -> Result<bool, Refusal> {
    value.as_bool().ok_or_else(|| wrong_type(value, "true or false, without quotes"))
}

pub(super) fn tenant_name(value: &DeValue<'_>) -> Result<String, Refusal> {
    let text = text(value, "a name: \"db\"")?;
    match strata_api::name_problem(text) {
        None => Ok(text.to_owned()),
        Some(problem) => Err((problem.to_owned(), "choose another name".into())),
    }
}

/// The name of a rule's tenants.
pub(super) fn naming(value: &DeValue<'_>) -> Result<Naming, Refusal> {
    Naming::parse(text(value, "a name: \"db\"")?)
}

pub(super) fn executable(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    const WANTED: &str = "an absolute path, or a file name alone: \"redis-server\"";
    let text = text(value, WANTED)?;
    let path = Path::new(text);
    let bare = path.file_name().is_some_and(|name| name == text);
    if !(bare || path.is_absolute()) || text.contains('\0') {
        return Err((format!("{text:?} is neither a path nor a name"), format!("write {WANTED}")));
    }
    if bare && text.len() > MOST_COMM_BYTES {
        let what = format!(
            "{text:?} is longer than the {MOST_COMM_BYTES} bytes that the kernel keeps of a program's name"
        );
        return Err((what, "write its absolute path, or match by cgroup or user".into()));
    }
    Ok(path.to_owned())
}

pub(super) fn control_group(value: &DeValue<'_>) -> Result<String, Refusal> {
    const WANTED: &str = "a path from the hierarchy's root: \"/system.slice/redis.service\"";
    let text = text(value, WANTED)?;
    let inner = text.strip_prefix('/').unwrap_or_default().trim_end_matches('/');
    if inner.is_empty() || inner.split('/').any(|part| part.is_empty() || part == "..") {
        return Err((format!("{text:?} is not a control group"), format!("write {WANTED}")));
    }
    let refused = |what: &str, todo: &str| Err((format!("{text:?} {what}"), todo.to_owned()));
    if inner.chars().any(|c| "*?[]{}".contains(c)) {
        return refused(
            "is a pattern, and is compared letter by letter",
            "name the group itself, or one above it: all below it match",
        );
    }
    if inner.split('/').any(|part| part == ".") || text.contains('\0') {
        return refused("is not a control group", &format!("write {WANTED}"));
    }
    if Path::new(text).starts_with("/sys/fs/cgroup") || Path::new(text).starts_with("/proc") {
        return refused(
            "is where groups are mounted, and no group",
            "leave that part out: /proc/PID/cgroup has the path",
        );
    }
    Ok(format!("/{inner}"))
}

pub(super) fn user(
    value: &DeValue<'_>,
    user_id: fn(&str) -> std::io::Result<Option<u32>>,
) -> Result<User, Refusal> {
    user_named(text(value, "a user's name, in quotes: \"postgres\"")?, user_id)
}

pub(super) fn user_named(
    name: &str,
    user_id: fn(&str) -> std::io::Result<Option<u32>>,
) -> Result<User, Refusal> {
    if let Ok(uid) = name.parse() {
        return Ok(User { name: name.to_owned(), uid });
    }
    match user_id(name) {
        Ok(Some(uid)) => Ok(User { name: name.to_owned(), uid }),
        Ok(None) => {
            Err((format!("there is no user {name:?}"), "name one of this machine's users".into()))
        }
        Err(error) => Err((
            format!("cannot look up the user {name:?}: {error}"),
            "write the user's number instead".into(),
        )),
    }
}
