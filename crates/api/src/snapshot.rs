//! The words of snapshots: how one is named, what there is to know of it, and
//! the choices that a clone needs. Nothing here takes or reads a snapshot.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
pub use strata_units::{MAX_LABEL_BYTES, label_problem};

/// Clones that one request may ask for.
pub const MAX_CLONES: u32 = 256;
/// Port forwards that one request may ask for, each for every clone.
pub const MAX_FORWARDS: usize = 64;
/// Directories that one request may have copied.
pub const MAX_COPY_DIRS: usize = 16;
/// Longest path in a request: the kernel takes no longer one.
pub const MAX_PATH_BYTES: usize = 4095;
/// Shortest time between two scheduled snapshots of a tenant: each one freezes
/// it and write-protects its memory.
pub const MIN_SCHEDULE_SECONDS: u64 = 1;

/// A snapshot's identity, written `NAME@N`: the tenant that it was taken of, and
/// a number that counts up from 1 and is never given twice for one name, also
/// after the snapshot is removed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotId {
    /// The tenant's name, at the time.
    pub tenant: String,
    /// From 1.
    pub number: u64,
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.tenant, self.number)
    }
}

impl FromStr for SnapshotId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse()? {
            SnapshotRef { tenant, which: Which::Number(number) } => Ok(Self { tenant, number }),
            SnapshotRef { .. } => Err("a snapshot's identity ends in its number".to_owned()),
        }
    }
}

impl TryFrom<String> for SnapshotId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<SnapshotId> for String {
    fn from(id: SnapshotId) -> Self {
        id.to_string()
    }
}

/// Which of a tenant's snapshots.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Which {
    /// By its running number.
    Number(u64),
    /// By its label, which is unique among the tenant's snapshots.
    Label(String),
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Label(label) => f.write_str(label),
        }
    }
}

impl FromStr for Which {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
            return match text.parse() {
                // One spelling a snapshot: 007 would be another word for 7.
                Ok(number) if number > 0 && !text.starts_with('0') => Ok(Self::Number(number)),
                _ => Err("snapshots are numbered 1, 2, 3, …".to_owned()),
            };
        }
        match label_problem(text) {
            None => Ok(Self::Label(text.to_owned())),
            Some(problem) => Err(problem.to_owned()),
        }
    }
}

/// A snapshot as a person names it: `NAME@N` or `NAME@LABEL`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotRef {
    /// The tenant that it was taken of.
    pub tenant: String,
    /// Which of its snapshots.
    pub which: Which,
}

impl SnapshotRef {
    /// Whether `info` is what this names.
    #[must_use]
    pub fn names(&self, info: &SnapshotInfo) -> bool {
        self.tenant == info.id.tenant
            && match &self.which {
                Which::Number(number) => *number == info.id.number,
                Which::Label(label) => info.label.as_ref() == Some(label),
            }
    }
}

impl From<SnapshotId> for SnapshotRef {
    fn from(id: SnapshotId) -> Self {
        Self { tenant: id.tenant, which: Which::Number(id.number) }
    }
}

impl fmt::Display for SnapshotRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.tenant, self.which)
    }
}

impl FromStr for SnapshotRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((tenant, which)) = text.split_once('@') else {
            return Err("a snapshot is named NAME@N or NAME@LABEL".to_owned());
        };
        if let Some(problem) = super::name_problem(tenant) {
            return Err(problem.to_owned());
        }
        Ok(Self { tenant: tenant.to_owned(), which: which.parse()? })
    }
}

impl TryFrom<String> for SnapshotRef {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<SnapshotRef> for String {
    fn from(named: SnapshotRef) -> Self {
        named.to_string()
    }
}

/// How far a snapshot is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotState {
    /// Frozen and let go; its memory is still being captured. It cannot be
    /// restored yet.
    Capturing,
    /// Whole; lives as long as the daemon.
    Usable,
    /// Whole, and on disk: survives a reboot.
    Persisted,
    /// Cannot be restored; [`SnapshotInfo::reason`] says why. It stays listed
    /// until it is removed, and costs nothing but its line.
    Failed,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_not(flag: &bool) -> bool {
    !flag
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_none_of_them(number: &u32) -> bool {
    *number == 0
}

/// Everything there is to know about one snapshot. Sizes in bytes. All
/// that are listed must fit in one line: with a short command a thousand do.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SnapshotInfo {
    /// Its identity: `"db@3"`.
    pub id: SnapshotId,
    /// The tenant that it was taken of: the part of `id` before the `@`.
    pub tenant: String,
    /// A second name, unique among the tenant's snapshots.
    pub label: Option<String>,
    /// The snapshot that the tenant's memory came from last: the one before it,
    /// or what the tenant was restored, rolled back or cloned from (then it may
    /// be another tenant's). It may be gone by now.
    pub parent: Option<SnapshotId>,
    /// Taken by the configuration's schedule; the schedule removes these, and
    /// no others.
    pub scheduled: bool,
    /// How far it is.
    pub state: SnapshotState,
    /// Why it failed, a short line; empty in every other state.
    pub reason: String,
    /// When the tenant stood still for it, in seconds since the epoch.
    pub taken: f64,
    /// What removing this snapshot alone would free, in DRAM and on disk. In a brief
    /// list 0, as what follows.
    pub size_unique_bytes: u64,
    /// What it refers to that its tenant or other snapshots and clones refer to
    /// as well.
    pub size_shared_bytes: u64,
    /// What it alone costs in files under `snapshot_dir`; 0 until persisted.
    pub file_bytes: u64,
    /// Pages that it refers to.
    pub pages: u64,
    /// Part of them that had to be copied for it. The others were in the store
    /// already: evicted, or unchanged since the snapshot before.
    pub copied_pages: u64,
    /// Processes in it.
    pub processes: u32,
    /// It is one of a virtual machine: of its memory and its devices.
    #[serde(default)]
    pub guest: bool,
    /// Of one that libvirt has started, and starts when it comes back.
    #[serde(default, skip_serializing_if = "is_not")]
    pub libvirt: bool,
    /// Files that are copies of the guest's disks.
    #[serde(default)]
    pub disks: Vec<String>,
    /// Programs that serve disks to a guest that comes from it.
    #[serde(default, skip_serializing_if = "is_none_of_them")]
    pub servers: u32,
    /// Owner's user id.
    pub uid: u32,
    /// What the tenant was started with.
    pub command: Vec<String>,
    /// The tenant's budget, which a restored one gets again.
    pub budget_bytes: u64,
    /// How long the tenant stood still, in microseconds.
    pub freeze_us: u64,
    /// From the freeze until the last page was captured, in microseconds; 0
    /// while capturing.
    pub capture_us: u64,
}

/// Where the network of a clone is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Net {
    /// Where the original's was: a port that is still listened on makes the
    /// clone fail.
    #[default]
    Shared,
    /// In a network namespace of its own, reached through port forwards.
    New,
}

/// What becomes in a clone of TCP connections that have both ends in it. In a
/// network of its own they go on in any case; connections to others never do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tcp {
    /// The clone finds them closed.
    #[default]
    Close,
    /// They go on, on the original's network; the original must have ended.
    Keep,
}

/// A TCP port of this machine's loopback address that leads to one of a clone's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortForward {
    /// The port here, on 127.0.0.1, for the first clone; the second clone has
    /// the next, and so on. 0: any that is free, told in the reply.
    pub host: u16,
    /// The port that the clone listens on.
    pub guest: u16,
}

/// The name of clone `index` (from 1) of `count`, when the caller named them.
#[must_use]
pub fn clone_name(name: &str, index: u32, count: u32) -> String {
    if count == 1 { name.to_owned() } else { format!("{name}-{index}") }
}

pub(crate) fn count_problem(count: u32, name: Option<&str>) -> Option<String> {
    if !(1..=MAX_CLONES).contains(&count) {
        return Some(format!("1 to {MAX_CLONES} clones can be made at once"));
    }
    let last = clone_name(name?, count, count);
    (last.len() > super::MAX_NAME_BYTES).then(|| format!("the clone's name {last} is too long"))
}

pub(crate) fn forwards_problem(count: u32, net: Net, forwards: &[PortForward]) -> Option<String> {
    if forwards.is_empty() {
        return None;
    }
    if net == Net::Shared {
        return Some("ports are forwarded only to a clone with a network of its own".to_owned());
    }
    if forwards.len() > MAX_FORWARDS {
        return Some(format!("at most {MAX_FORWARDS} ports can be forwarded"));
    }
    if forwards.iter().any(|forward| forward.guest == 0) {
        return Some("a clone listens on no port 0".to_owned());
    }
    // What the caller chose; the daemon chooses among what is left.
    let fixed: Vec<u16> = forwards.iter().map(|f| f.host).filter(|host| *host != 0).collect();
    let last = |host: u16| u32::from(host) + count - 1;
    if let Some(host) = fixed.iter().find(|host| last(**host) > u32::from(u16::MAX)) {
        return Some(format!("{count} clones from port {host} on go beyond {}", u16::MAX));
    }
    for (index, one) in fixed.iter().enumerate() {
        for other in &fixed[index + 1..] {
            let (low, high) = (one.min(other), one.max(other));
            if u32::from(*high) <= last(*low) {
                return Some(format!("two forwards both take port {high}"));
            }
        }
    }
    None
}

pub(crate) fn tcp_problem(count: u32, net: Net, tcp: Tcp) -> Option<String> {
    let twice = tcp == Tcp::Keep && net == Net::Shared && count > 1;
    twice.then(|| "on one network only one clone can keep the connections".to_owned())
}

pub(crate) fn path_problem(path: &str) -> Option<String> {
    if !path.starts_with('/') {
        Some(format!("the path {path} is not absolute"))
    } else if path.contains('\0') {
        Some("a path has no zero byte in it".to_owned())
    } else if path.len() > MAX_PATH_BYTES {
        Some(format!("a path has at most {MAX_PATH_BYTES} bytes"))
    } else {
        None
    }
}

/// Each copy is put over its original, so one inside another would hide half of
/// it, and `..` would hide that.
pub(crate) fn copy_dirs_problem(directories: &[String]) -> Option<String> {
    if directories.len() > MAX_COPY_DIRS {
        return Some(format!("at most {MAX_COPY_DIRS} directories can be copied"));
    }
    for directory in directories {
        if let Some(problem) = path_problem(directory) {
            return Some(problem);
        }
        if directory.split('/').any(|part| part == "..") {
            return Some(format!("the path {directory} has a \"..\" in it"));
        }
        if directory.bytes().all(|b| b == b'/') {
            return Some("the root directory is everything: name a directory in it".to_owned());
        }
    }
    for (index, one) in directories.iter().enumerate() {
        for other in &directories[index + 1..] {
            // Path's own comparison is by components.
            let (a, b) = (Path::new(one), Path::new(other));
            if a.starts_with(b) {
                return Some(format!("{one} lies in {other}"));
            } else if b.starts_with(a) {
                return Some(format!("{other} lies in {one}"));
            }
        }
    }
    None
}

/// A tenant that came to life from a snapshot.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RevivedTenant {
    /// Its name.
    pub name: String,
    /// Its first process, as the rest of the machine sees it.
    pub pid: u32,
    /// The forwards to it, with the ports that they got.
    pub forwards: Vec<PortForward>,
}

/// What a [`Progress`] counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Tenants, for many clones.
    Tenants,
}

/// How far long work is: a line of its own before the [`Reply`](super::Reply).
///
/// `{"progress":"capturing","done":1048576,"total":4294967296,"unit":"bytes"}`
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// What is being done, as one would say it: `capturing`. Another word means
    /// another step, which counts from 0 again.
    #[serde(rename = "progress")]
    pub what: String,
    /// How much is done.
    pub done: u64,
    /// Of how much; None when it is not known yet. It may change.
    pub total: Option<u64>,
    /// What is counted.
    pub unit: Unit,
}

/// Something that a snapshot in a file asks of whoever restores it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Claim {
    /// What, and for which process: one line.
    pub text: String,
    /// Whoever wrote the file has no right to it.
    pub is_beyond: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_that_can_and_cannot_be() {
        for label in ["a", "before-migration", "1.", "v1.2_3", "-", &"l".repeat(MAX_LABEL_BYTES)] {
            assert_eq!(label_problem(label), None, "{label}");
        }
        let long = "l".repeat(MAX_LABEL_BYTES + 1);
        for label in ["", "1", "0042", "a b", "a@b", "ä", "a/b", "a\n", &long] {
            assert!(label_problem(label).is_some(), "{label:?}");
        }
    }

    #[test]
    fn snapshots_are_named_by_number_or_label() {
        let named = |text: &str| text.parse::<SnapshotRef>();
        let db = |which| SnapshotRef { tenant: "db".into(), which };
        assert_eq!(named("db@3"), Ok(db(Which::Number(3))));
        assert_eq!(named("db@good"), Ok(db(Which::Label("good".into()))));
        for text in ["db@3", "db@good", "a.b@18446744073709551615"] {
            assert_eq!(named(text).expect(text).to_string(), text);
        }
        for text in [
            "",
            "db",
            "@3",
            "db@",
            "db@0",
            "db@03",
            "db@18446744073709551616",
            "db@a@b",
            "d b@1",
            ".@1",
        ] {
            assert!(named(text).is_err(), "{text:?}");
        }
        let id = SnapshotId { tenant: "db".into(), number: 3 };
        assert_eq!("db@3".parse(), Ok(id.clone()));
        assert_eq!(SnapshotRef::from(id), db(Which::Number(3)));
        assert!("db@good".parse::<SnapshotId>().is_err());
    }

    #[test]
    fn the_wire_has_them_as_text_and_takes_no_others() {
        let id = SnapshotId { tenant: "db".into(), number: 3 };
        assert_eq!(serde_json::to_string(&id).expect("serialise"), "\"db@3\"");
        assert_eq!(serde_json::from_str::<SnapshotId>("\"db@3\"").expect("parse"), id);
        assert!(serde_json::from_str::<SnapshotId>("\"db@x\"").is_err());
        assert!(serde_json::from_str::<SnapshotRef>("\"../x@1\"").is_err());
        let progress =
            Progress { what: "capturing".into(), done: 1, total: None, unit: Unit::Bytes };
        assert_eq!(
            serde_json::to_string(&progress).expect("serialise"),
            r#"{"progress":"capturing","done":1,"total":null,"unit":"bytes"}"#
        );
    }
}
