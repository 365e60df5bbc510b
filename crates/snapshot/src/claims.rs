//! What a snapshot's images ask of the machine that they are restored on: users,
//! capabilities, files by their paths, devices, sockets, limits.
//!
//! CRIU restores with root's rights whatever the images say. So what somebody else
//! wrote is read here before CRIU sees any of it: [`read`] lists what it asks for,
//! [`check`] which of that its owner has no right to. What is not known here counts
//! as asked for, and nobody but root has a right to it. docs/snapshot-claims.md is
//! the list in words.

mod collect;
mod owner;
mod schema;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};
use std::path::Path;

use strata_sys::{Access, Directory};

use crate::archive::{ReadError, Reader};

pub use owner::{Limits, Owner, may_open};
use schema::Form;

/// An image that is read has at most this. What a process has goes into far less.
const MOST_IMAGE_BYTES: u64 = 16 << 20;
/// All together.
const MOST_BYTES: u64 = 64 << 20;
/// Of an image that is only to be what its name says.
const BEGINNING_BYTES: u64 = 64;
/// Claims beyond these are not listed, and are nobody's right.
const MOST_CLAIMS: usize = 1 << 16;

/// Something that a process, or the snapshot as a whole, is to have.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Claim {
    /// The process, by its number at the dump; none: all of them, or nobody.
    pub process: Option<u32>,
    /// What.
    pub what: What,
}

/// What is asked for.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum What {
    /// To be this user: real, effective, saved, and that of its file accesses.
    User(u32),
    /// To be of this group, by number or as one of its further groups.
    Group(u32),
    /// Capabilities: in which set, and which, one a bit.
    Capabilities(&'static str, u64),
    /// Bits that say what capabilities become when the user changes.
    SecureBits(u32),
    /// A label of SELinux, AppArmor or another such module.
    SecurityLabel(String),
    /// The audit's user.
    LoginUser(u32),
    /// A seccomp filter without `no_new_privs`: a set-user-id program that it executes
    /// would run under it.
    FilterWithPrivileges,
    /// To be spared by the OOM killer.
    SparedByOomKiller(i32),
    /// To be first at the processor: the scheduling policy, or a nice value below 0.
    Scheduling(String),
    /// A hard limit: which of the kernel's, and how much.
    Limit(usize, u64),
    /// A namespace of its own.
    Namespace(&'static str),
    /// Another root directory.
    Root(String),
    /// To be of a session or a group of processes that are not of the snapshot.
    Foreign(&'static str, u32),
    /// A file or directory by its path, with the flags that it is opened with.
    File(String, u32),
    /// A file that has no name any more, to be made again beside this path.
    Unlinked(String),
    /// Memory at an address that a program cannot have, or of a kind that it does not
    /// get by itself.
    Memory(String),
    /// Locked memory, in bytes.
    LockedMemory(u64),
    /// A file in memory of another user or with another mode than a program gets.
    MemoryFile(u32, u32, u32),
    /// A unix socket at a path in the file system.
    SocketPath(String),
    /// An internet socket at a port below 1024.
    Port(u32),
    /// A socket of a kind, or with an option, that needs a right.
    Socket(String),
    /// An established connection to be made again.
    Connection(String),
    /// A terminal.
    Terminal,
    /// Who is sent a signal by a descriptor, and as whom.
    SignalTo(String),
    /// A kind of open file that needs a right, or reaches another process.
    OpenFile(&'static str),
    /// A lease or another lock that is not a plain one.
    Lease(u32),
    /// Part of CRIU's own set-up.
    Setup(String),
    /// An image, or something in it, that is not known here.
    Unknown(String),
}

const LIMIT_NAMES: [&str; 16] = [
    "processor time",
    "file size",
    "data",
    "stack",
    "core dump size",
    "resident memory",
    "processes",
    "open files",
    "locked memory",
    "address space",
    "file locks",
    "pending signals",
    "message queue bytes",
    "nice priority",
    "real-time priority",
    "real-time processor time",
];

/// Capabilities by their numbers (`linux/capability.h`).
const CAPABILITIES: [&str; 41] = [
    "chown",
    "dac_override",
    "dac_read_search",
    "fowner",
    "fsetid",
    "kill",
    "setgid",
    "setuid",
    "setpcap",
    "linux_immutable",
    "net_bind_service",
    "net_broadcast",
    "net_admin",
    "net_raw",
    "ipc_lock",
    "ipc_owner",
    "sys_module",
    "sys_rawio",
    "sys_chroot",
    "sys_ptrace",
    "sys_pacct",
    "sys_admin",
    "sys_boot",
    "sys_nice",
    "sys_resource",
    "sys_time",
    "sys_tty_config",
    "mknod",
    "lease",
    "audit_write",
    "audit_control",
    "setfcap",
    "mac_override",
    "mac_admin",
    "syslog",
    "wake_alarm",
    "block_suspend",
    "audit_read",
    "perfmon",
    "bpf",
    "checkpoint_restore",
];

fn capability_names(bits: u64) -> String {
    let name = |bit: usize| match CAPABILITIES.get(bit) {
        Some(name) => format!("cap_{name}"),
        None => format!("capability {bit}"),
    };
    if bits == (1 << CAPABILITIES.len()) - 1 {
        return "all".into();
    }
    (0..64).filter(|bit| bits >> bit & 1 != 0).map(name).collect::<Vec<_>>().join(", ")
}

/// Without what a terminal takes for more than text.
fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

impl fmt::Display for What {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(out, "user {user}"),
            Self::Group(group) => write!(out, "group {group}"),
            Self::Capabilities(set, bits) => {
                write!(out, "{set} capabilities: {}", capability_names(*bits))
            }
            Self::SecureBits(bits) => write!(out, "securebits {bits:#x}"),
            Self::SecurityLabel(label) => write!(out, "security label {}", shown(label)),
            Self::LoginUser(user) => write!(out, "login user {user}"),
            Self::FilterWithPrivileges => write!(out, "seccomp filter without no_new_privs"),
            Self::SparedByOomKiller(score) => write!(out, "oom_score_adj {score}"),
            Self::Scheduling(what) => write!(out, "scheduling: {what}"),
            Self::Limit(which, value) => {
                let name = LIMIT_NAMES.get(*which).copied().unwrap_or("unknown");
                match *value {
                    u64::MAX => write!(out, "hard limit of {name}: unlimited"),
                    value => write!(out, "hard limit of {name}: {value}"),
                }
            }
            Self::Namespace(kind) => write!(out, "{kind} namespace of its own"),
            Self::Root(path) => write!(out, "root directory {}", shown(path)),
            Self::Foreign(kind, number) => write!(out, "{kind} {number}, of others"),
            Self::File(path, flags) => {
                let how = match flags & O_ACCMODE {
                    O_RDONLY => "to read",
                    O_WRONLY => "to write",
                    _ => "to read and write",
                };
                write!(out, "file {} {how}", shown(path))
            }
            Self::Unlinked(path) => write!(out, "deleted file {}", shown(path)),
            Self::Memory(what) => write!(out, "memory: {}", shown(what)),
            Self::LockedMemory(bytes) => write!(out, "{bytes} bytes of locked memory"),
            Self::MemoryFile(user, group, mode) => {
                write!(out, "memory file of user {user}, group {group}, mode {mode:o}")
            }
            Self::SocketPath(path) => write!(out, "unix socket at {}", shown(path)),
            Self::Port(port) => write!(out, "port {port}"),
            Self::Socket(what) => write!(out, "socket: {}", shown(what)),
            Self::Connection(name) => write!(out, "established connection {}", shown(name)),
            Self::Terminal => write!(out, "terminal"),
            Self::SignalTo(what) => write!(out, "signals to {what}"),
            Self::OpenFile(kind) => write!(out, "{kind}"),
            Self::Lease(flag) => write!(out, "file lock of kind {flag:#x}"),
            Self::Setup(what) => write!(out, "set-up: {}", shown(what)),
            Self::Unknown(what) => write!(out, "unknown: {}", shown(what)),
        }
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.process {
            Some(process) => write!(out, "process {process}: {}", self.what),
            None => write!(out, "the snapshot: {}", self.what),
        }
    }
}

const O_ACCMODE: u32 = 0o3;
const O_RDONLY: u32 = 0o0;
const O_WRONLY: u32 = 0o1;

/// All images of a snapshot, by their names.
pub type Images = BTreeMap<String, Vec<u8>>;

/// Reads the images in a directory; contents of memory are left out, only their names
/// are there.
///
/// # Errors
/// The file system's; they have more than any snapshot has.
pub fn load(directory: &Path) -> io::Result<Images> {
    let directory = Directory::open(directory)?;
    let mut images = Images::new();
    let mut left = MOST_BYTES;
    for name in directory.names()? {
        let Some(name) = name.to_str() else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "an image without a plain name",
            ));
        };
        let (most, is_whole) = most_of(name, left);
        let mut bytes = Vec::new();
        if most > 0 {
            let file = directory.file(name, Access::Read)?;
            file.take(most + u64::from(is_whole)).read_to_end(&mut bytes)?;
        }
        left = left.saturating_sub(bytes.len() as u64);
        if bytes.len() as u64 > most {
            return Err(too_large(name));
        }
        images.insert(name.to_owned(), bytes);
    }
    Ok(images)
}

/// The same of the images in a file, which whoever wrote it may change meanwhile.
///
/// # Errors
/// See [`ReadError`]; they have more than any snapshot has.
pub fn load_archive(archive: &Reader) -> Result<Images, ReadError> {
    let mut images = Images::new();
    let mut left = MOST_BYTES;
    for (index, file) in archive.files().iter().enumerate() {
        let (most, is_whole) = most_of(&file.name, left);
        let bytes = archive.file_beginning(index, most + u64::from(is_whole))?;
        left = left.saturating_sub(bytes.len() as u64);
        if bytes.len() as u64 > most {
            return Err(archive.failed(too_large(&file.name)));
        }
        images.insert(file.name.clone(), bytes);
    }
    Ok(images)
}

/// How much of an image is looked at, with `left` for all that come, and whether it
/// may have no more.
fn most_of(name: &str, left: u64) -> (u64, bool) {
    match schema::kind_of(name).map(|(kind, _)| kind.form) {
        // The name of an unknown one is a claim already.
        None | Some(Form::Raw | Form::Ignored) => (0, false),
        Some(Form::Beginning) => (BEGINNING_BYTES, false),
        Some(_) => (left.min(MOST_IMAGE_BYTES), true),
    }
}

fn too_large(name: &str) -> io::Error {
    let text = format!("{name} is larger than any that CRIU writes");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// What the images ask for, each once, in order of the processes. It is all that there
/// is: what cannot be read is among it.
#[must_use]
pub fn read(images: &Images) -> Vec<Claim> {
    let mut claims = collect::collect(images);
    claims.sort();
    claims.dedup();
    if claims.len() > MOST_CLAIMS {
        claims.truncate(MOST_CLAIMS);
        claims.push(Claim { process: None, what: What::Unknown("more than can be listed".into()) });
    }
    claims
}

/// A claim that its owner has no right to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Beyond {
    /// Which.
    pub claim: Claim,
    /// Why not, where that is not plain.
    pub why: Option<String>,
}

impl fmt::Display for Beyond {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.why {
            Some(why) => write!(out, "{} ({})", self.claim, shown(why)),
            None => write!(out, "{}", self.claim),
        }
    }
}

/// Which of these claims `owner` has no right to. `may_open` says for a path and
/// flags why the owner may not have that file opened.
#[must_use]
pub fn check(
    claims: &[Claim],
    owner: &Owner,
    may_open: &dyn Fn(&Path, u32) -> Result<(), String>,
) -> Vec<Beyond> {
    claims.iter().filter_map(|claim| owner::beyond(claim, owner, may_open)).collect()
}

#[cfg(test)]
mod tests;
