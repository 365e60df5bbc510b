//! The configuration: one flat TOML file, checked as a whole before anything is
//! started. A key that is not known, a value that cannot work, is said with file
//! and line; nothing is guessed.
//!
//! What each key does is described in `docs/usage.md`; reading the TOML is in
//! `config/read.rs`. Whether a rule applies to a process is decided in
//! `program.rs`, what a schedule demands in `schedule.rs`.

mod nearest;
mod read;

use std::fmt::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use strata_api::DramClaim;
use strata_policy::order::TierOrder;
use strata_sys::MemoryNode;
use strata_units::{ByteSize, fnv1a};

pub(crate) use self::nearest::nearest;
use crate::groups::{Group, Members};
use crate::naming::Naming;
use crate::quota::Quota;

/// Where stratad looks when no file is named.
const DEFAULT_FILE: &str = "/etc/strata/stratad.toml";
/// Where the sockets are when the configuration does not say.
pub(crate) const DEFAULT_SOCKET_DIR: &str = "/run/strata";
/// What the file tier may hold when it is switched on without a limit.
const DEFAULT_TIER_LIMIT: ByteSize = ByteSize(16 << 30);
/// What is moved to and from the node in a second when the configuration does not
/// say: a fraction of what CXL memory can do, so that programs hardly notice.
const DEFAULT_NODE_BANDWIDTH: ByteSize = ByteSize(1 << 30);
/// Where snapshots are kept when the configuration does not say.
const DEFAULT_SNAPSHOT_DIR: &str = "/var/lib/strata/snapshots";
/// Scheduled snapshots of a tenant that are kept when the schedule does not say.
const DEFAULT_KEEP: u32 = 12;
/// Without any page coming back for so long a release is given up.
const DEFAULT_RELEASE_PATIENCE: Duration = Duration::from_secs(30);
/// From SIGTERM to SIGKILL: what service managers and orchestrators give, too.
const DEFAULT_STOP_GRACE: Duration = Duration::from_secs(10);

/// A user of this machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct User {
    /// As the configuration says it: a name or a number.
    pub(crate) name: String,
    /// The number.
    pub(crate) uid: u32,
}

impl User {
    /// Whose a rule is that names no user.
    pub(crate) fn root() -> Self {
        Self { name: "root".into(), uid: 0 }
    }
}

/// Which programs are managed without `strata run`, and how. All conditions
/// that are given must hold; at least one is.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Rule {
    /// Names the tenants that it makes, among those of `user`.
    pub(crate) name: Naming,
    /// The executable: an absolute path, or a file name alone.
    pub(crate) exe: Option<PathBuf>,
    /// Whose the tenant is: programs of this user alone are managed by it, and what
    /// descends from them.
    pub(crate) user: User,
    /// The control group that it or an ancestor of its group is, from the
    /// hierarchy's root: `/system.slice/redis.service`.
    pub(crate) cgroup: Option<String>,
    /// Its budget.
    pub(crate) dram: ByteSize,
    /// What it claims of the DRAM that is shared out; none: its budget does not move.
    pub(crate) claim: Option<DramClaim>,
    /// What it may hold in the file tier; none: the tier's own limit.
    pub(crate) tier_limit: Option<ByteSize>,
    /// The order of its tiers; none: the order of all.
    pub(crate) tier_order: Option<TierOrder>,
    /// Whether its programs end if they cannot be managed; else they run on unmanaged.
    pub(crate) required: bool,
}

/// The node tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Node {
    /// The node, one without processors.
    pub(crate) number: u32,
    /// The node with processors that is nearest to it.
    pub(crate) home: u32,
    /// What one tenant may have there.
    pub(crate) limit: ByteSize,
    /// What may be moved in a second for one tenant, there and back.
    pub(crate) bandwidth: ByteSize,
}

/// Snapshots that are taken of a tenant without being asked for, while it lives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Schedule {
    /// The tenant's name, however it was started.
    pub(crate) name: String,
    /// From one snapshot to the next.
    pub(crate) every: Duration,
    /// How many are kept; at least 1.
    pub(crate) keep: u32,
    /// Whether they are written to disk.
    pub(crate) persist: bool,
}

/// The whole configuration, resolved and checked.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Config {
    /// Directory of the control socket and the agents' socket.
    pub(crate) socket_dir: PathBuf,
    /// Budget of a tenant that names none.
    pub(crate) default_dram: ByteSize,
    /// DRAM that is shared out among all tenants; none: each has its own budget.
    pub(crate) dram: Option<ByteSize>,
    /// Where Prometheus fetches metrics; none: nowhere.
    pub(crate) metrics: Option<SocketAddr>,
    /// Directory of the file tier; none: no file tier.
    pub(crate) tier_path: Option<PathBuf>,
    /// Bytes that one tenant may hold in the file tier.
    pub(crate) tier_limit: ByteSize,
    /// The node tier; none: no pages go to another node.
    pub(crate) node: Option<Node>,
    /// The order in which pages go to the tiers below DRAM.
    pub(crate) tier_order: TierOrder,
    /// Users besides root whose programs get `/dev/userfaultfd`.
    pub(crate) uffd_users: Vec<User>,
    /// `libstrata.so`; none: the one installed with this stratad.
    pub(crate) preload: Option<PathBuf>,
    /// From SIGTERM to SIGKILL in `strata stop`.
    pub(crate) stop_grace: Duration,
    /// Without any page coming back for so long, `strata release` gives up.
    pub(crate) release_patience: Duration,
    /// Directory of persisted snapshots and of each snapshot's process state;
    /// made if it is not there, for its owner only.
    pub(crate) snapshot_dir: PathBuf,
    /// DRAM that snapshots whose tenants have ended may cost, all together.
    pub(crate) snapshot_limit: ByteSize,
    /// CRIU; none: the one in PATH.
    pub(crate) criu: Option<PathBuf>,
    /// What one user may have.
    pub(crate) quota: Quota,
    /// Who shares a dedup domain.
    pub(crate) groups: Vec<Group>,
    /// Programs managed without `strata run`, first match wins.
    pub(crate) manage: Vec<Rule>,
    /// Scheduled snapshots, at most one schedule for a name.
    pub(crate) snapshot: Vec<Schedule>,
}

/// One thing wrong with the configuration. Displays as one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Problem {
    file: String,
    /// From 1; 0 when the file as a whole is meant.
    line: usize,
    /// The key, or empty.
    key: String,
    what: String,
    todo: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", self.key)?;
        }
        write!(f, ": {}; {}", self.what, self.todo)
    }
}

/// All that is wrong, so that one run of `strata config check` shows it all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Problems(pub(crate) Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// What the configuration is checked against.
pub(crate) struct Machine {
    /// All its memory.
    pub(crate) memory: ByteSize,
    /// The number of a user's name.
    pub(crate) user_id: fn(&str) -> std::io::Result<Option<u32>>,
    /// Its memory nodes.
    pub(crate) nodes: fn() -> Vec<MemoryNode>,
    /// The node with processors that is nearest to a node.
    pub(crate) home_of: fn(u32) -> Option<u32>,
}

impl Machine {
    /// This one.
    ///
    /// # Errors
    /// The kernel does not tell its memory.
    pub(crate) fn this() -> std::io::Result<Self> {
        let memory = ByteSize(strata_sys::total_bytes()?);
        Ok(Self {
            memory,
            user_id: strata_sys::peer::user_id,
            nodes: strata_sys::memory_nodes,
            home_of: strata_sys::home_of,
        })
    }
}

impl Config {
    /// What holds when the file says nothing.
    pub(crate) fn defaults(machine: &Machine) -> Self {
        Self {
            socket_dir: DEFAULT_SOCKET_DIR.into(),
            // Half: one tenant that names no budget leaves room for the rest
            // of the machine, and a second one still fits.
            default_dram: ByteSize(machine.memory.0 / 2),
            dram: None,
            metrics: None,
            tier_path: None,
            tier_limit: DEFAULT_TIER_LIMIT,
            node: None,
            tier_order: TierOrder::default(),
            uffd_users: Vec::new(),
            preload: None,
            stop_grace: DEFAULT_STOP_GRACE,
            release_patience: DEFAULT_RELEASE_PATIENCE,
            snapshot_dir: DEFAULT_SNAPSHOT_DIR.into(),
            // A quarter: beside a tenant with the default budget, a half, the
            // rest of the machine still has as much. It is a bound, not a
            // reserve; a snapshot costs compressed pages, and only those that
            // no living tenant shares.
            snapshot_limit: ByteSize(machine.memory.0 / 4),
            criu: None,
            quota: Quota::default(),
            groups: Vec::new(),
            manage: Vec::new(),
            snapshot: Vec::new(),
        }
    }

    /// Reads `file`; without one, [`DEFAULT_FILE`] if it exists, else the
    /// defaults.
    ///
    /// # Errors
    /// All that is wrong with it.
    pub(crate) fn load(file: Option<&Path>, machine: &Machine) -> Result<Self, Problems> {
        let path = file.unwrap_or(Path::new(DEFAULT_FILE));
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, &path.display().to_string(), machine),
            Err(error) if file.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                Ok(Self::defaults(machine))
            }
            Err(error) => Err(Problems(vec![Problem {
                file: path.display().to_string(),
                line: 0,
                key: String::new(),
                what: format!("cannot be read: {error}"),
                todo: "name another file or see to its permissions".into(),
            }])),
        }
    }

    /// Reads the text of a file called `file`.
    ///
    /// # Errors
    /// All that is wrong with it.
    pub(crate) fn parse(text: &str, file: &str, machine: &Machine) -> Result<Self, Problems> {
        read::read(text, file, machine)
    }

    /// The daemon's control socket.
    pub(crate) fn control_socket(&self) -> PathBuf {
        self.socket_dir.join(strata_api::CONTROL_SOCKET_NAME)
    }

    /// Tells it from another one.
    pub(crate) fn sum(&self) -> u64 {
        fnv1a(self.resolved().bytes())
    }

    /// The resolved configuration as TOML: reading it again gives the same.
    pub(crate) fn resolved(&self) -> String {
        let mut out = String::new();
        self.write_resolved(&mut out).expect("writing to a string does not fail");
        out
    }

    fn write_resolved(&self, out: &mut String) -> fmt::Result {
        let path = |path: &Path| quoted(&path.display().to_string());
        writeln!(out, "socket_dir = {}", path(&self.socket_dir))?;
        writeln!(out, "default_dram = {}", exact_size(self.default_dram))?;
        match self.dram {
            Some(size) => writeln!(out, "dram = {}", exact_size(size))?,
            None => writeln!(out, "# dram: not shared out; each tenant has its own budget")?,
        }
        match self.metrics {
            Some(address) => writeln!(out, "metrics = {}", quoted(&address.to_string()))?,
            None => writeln!(out, "# metrics: off")?,
        }
        match &self.tier_path {
            Some(directory) => {
                writeln!(out, "tier_path = {}", path(directory))?;
                writeln!(out, "tier_limit = {}", exact_size(self.tier_limit))?;
            }
            None => writeln!(out, "# tier_path: none; cold pages stay in compressed memory")?,
        }
        match &self.node {
            Some(Node { number, limit, bandwidth, .. }) => {
                writeln!(out, "node = {number}")?;
                writeln!(out, "node_limit = {}", exact_size(*limit))?;
                writeln!(out, "node_bandwidth = {}", exact_size(*bandwidth))?;
            }
            None => writeln!(out, "# node: none; no pages go to slower memory")?,
        }
        writeln!(out, "tier_order = {}", tier_names(self.tier_order))?;
        let users: Vec<String> = self.uffd_users.iter().map(|user| quoted(&user.name)).collect();
        writeln!(out, "uffd_users = [{}]", users.join(", "))?;
        match &self.preload {
            Some(library) => writeln!(out, "preload = {}", path(library))?,
            None => writeln!(out, "# preload: the libstrata.so installed with stratad")?,
        }
        for (key, time) in
            [("stop_grace", self.stop_grace), ("release_patience", self.release_patience)]
        {
            writeln!(out, "{key} = \"{}ms\"", time.as_millis())?;
        }
        writeln!(out, "snapshot_dir = {}", path(&self.snapshot_dir))?;
        writeln!(out, "snapshot_limit = {}", exact_size(self.snapshot_limit))?;
        match &self.criu {
            Some(criu) => writeln!(out, "criu = {}", path(criu))?,
            None => writeln!(out, "# criu: the one in PATH")?,
        }
        let Quota { tenants, processes, connections, log_lines, pools } = self.quota;
        writeln!(out, "\n[quota]\ntenants = {tenants}\nprocesses = {processes}")?;
        writeln!(out, "connections = {connections}\nlog_lines = {log_lines}\npools = {pools}")?;
        if !self.groups.is_empty() {
            writeln!(out, "\n[groups]")?;
        }
        for group in &self.groups {
            let members = group.members.iter().map(|Members { user, name, is_beginning }| {
                quoted(&format!("{}:{name}{}", user.name, if *is_beginning { "*" } else { "" }))
            });
            let members = members.collect::<Vec<_>>().join(", ");
            writeln!(out, "{} = [{members}]", quoted(&group.name))?;
        }
        for rule in &self.manage {
            writeln!(out, "\n[[manage]]\nname = {}", quoted(rule.name.text()))?;
            if let Some(exe) = &rule.exe {
                writeln!(out, "exe = {}", path(exe))?;
            }
            writeln!(out, "user = {}  # uid {}", quoted(&rule.user.name), rule.user.uid)?;
            if let Some(cgroup) = &rule.cgroup {
                writeln!(out, "cgroup = {}", quoted(cgroup))?;
            }
            match &rule.claim {
                None => writeln!(out, "dram = {}", exact_size(rule.dram))?,
                Some(claim) => write_claim(out, claim)?,
            }
            if let Some(limit) = rule.tier_limit {
                writeln!(out, "tier_limit = {}", exact_size(limit))?;
            }
            if let Some(order) = rule.tier_order {
                writeln!(out, "tier_order = {}", tier_names(order))?;
            }
            writeln!(out, "required = {}", rule.required)?;
        }
        for schedule in &self.snapshot {
            writeln!(out, "\n[[snapshot]]\nname = {}", quoted(&schedule.name))?;
            writeln!(out, "every = {}", exact_time(schedule.every))?;
            writeln!(out, "keep = {}", schedule.keep)?;
            writeln!(out, "persist = {}", schedule.persist)?;
        }
        Ok(())
    }
}

/// A claim as TOML. One of nothing has a weight of 1.
fn write_claim(out: &mut String, claim: &DramClaim) -> fmt::Result {
    if let Some(reserve) = claim.reserve_bytes {
        writeln!(out, "reserve = {}", exact_size(ByteSize(reserve)))?;
    }
    if let Some(limit) = claim.limit_bytes {
        writeln!(out, "limit = {}", exact_size(ByteSize(limit)))?;
    }
    writeln!(out, "weight = {:?}", claim.weight.unwrap_or(1.0))
}

/// An order as TOML.
fn tier_names(order: TierOrder) -> String {
    format!("[{}]", order.tiers().map(|tier| quoted(tier.name())).join(", "))
}

/// A TOML string.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A size as TOML, in the largest unit that gives a whole number (`ByteSize`'s
/// own `Display` rounds).
fn exact_size(size: ByteSize) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let exact = units.iter().find(|(_, shift)| size.0.trailing_zeros() >= *shift && size.0 > 0);
    match exact {
        Some((unit, shift)) => format!("\"{}{unit}\"", size.0 >> shift),
        None => format!("\"{}B\"", size.0),
    }
}

/// A time as TOML, in the largest unit that gives a whole number.
fn exact_time(time: Duration) -> String {
    let ms = time.as_millis();
    let units = [("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)];
    match units.iter().find(|(_, unit_ms)| ms > 0 && ms.is_multiple_of(*unit_ms)) {
        Some((unit, unit_ms)) => format!("\"{}{unit}\"", ms / unit_ms),
        None => format!("\"{ms}ms\""),
    }
}

#[cfg(test)]
mod tests;
