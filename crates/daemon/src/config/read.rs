//! From the text of a configuration file to a [`Config`]. The TOML is walked by
//! hand, because only then each complaint can name its line, and all complaints
//! can be made at once.

mod claims;
mod node;
mod quotas;
mod schedules;

use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use strata_policy::order::{Lower, TierOrder};
use strata_units::ByteSize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Config, Machine, Problem, Problems, Rule, User, exact_time, nearest};
use crate::naming::Naming;

/// All keys of the file.
pub(super) const KEYS: [&str; 20] = [
    "socket_dir",
    "dram",
    "default_dram",
    "metrics",
    "tier_path",
    "tier_limit",
    "node",
    "node_limit",
    "node_bandwidth",
    "tier_order",
    "uffd_users",
    "preload",
    "stop_grace",
    "release_patience",
    "snapshot_dir",
    "snapshot_limit",
    "criu",
    "quota",
    "manage",
    "snapshot",
];
/// What the kernel keeps of the name that a program is executed by (`comm`).
const MOST_COMM_BYTES: usize = 15;
/// All keys of a `[[manage]]` rule.
const RULE_KEYS: [&str; 11] = [
    "name",
    "exe",
    "user",
    "cgroup",
    "dram",
    "reserve",
    "limit",
    "weight",
    "tier_limit",
    "tier_order",
    "required",
];
/// Longest path of a unix socket, without the zero byte at its end.
const MAX_SOCKET_PATH_BYTES: usize = 107;
/// Rules at most: each is tried on every new process.
const MAX_RULES: usize = 256;
/// Longest time that `strata stop` may wait.
const MAX_GRACE: Duration = Duration::from_secs(24 * 3600);

/// What is wrong with a value, and what to do.
type Refusal = (String, String);
type Value<'a> = Spanned<DeValue<'a>>;

pub(super) fn read(text: &str, file: &str, machine: &Machine) -> Result<Config, Problems> {
    let mut reader = Reader { text, file, machine, problems: Vec::new() };
    let config = match DeTable::parse(text) {
        Ok(table) => reader.config(table.get_ref()),
        Err(error) => {
            let at = error.span().unwrap_or(0..0);
            // The parser's message may have several lines.
            let what = error.message().lines().collect::<Vec<_>>().join(", ");
            reader.complain(&at, "", (what, "mend the TOML syntax".into()));
            Config::defaults(machine)
        }
    };
    if reader.problems.is_empty() {
        return Ok(config);
    }
    reader.problems.sort_by_key(|problem| problem.line);
    Err(Problems(reader.problems))
}

struct Reader<'a> {
    text: &'a str,
    file: &'a str,
    machine: &'a Machine,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    fn complain(&mut self, at: &Range<usize>, key: &str, (what, todo): Refusal) {
        let before = &self.text.as_bytes()[..at.start.min(self.text.len())];
        self.problems.push(Problem {
            file: self.file.to_owned(),
            line: 1 + before.iter().filter(|byte| **byte == b'\n').count(),
            key: key.to_owned(),
            what,
            todo,
        });
    }

    /// Complains of keys that are not `known` in a table of the array `array`
    /// (empty: the whole file).
    fn unknown_keys(&mut self, table: &DeTable<'_>, known: &[&str], array: &str) {
        for key in table.keys() {
            let name = key.get_ref().as_ref();
            if !known.contains(&name) {
                // In the table of a rule a key of the whole file is a likely
                // slip: in TOML whatever follows [[manage]] belongs to it.
                let todo = if KEYS.contains(&name) {
                    format!("put it before the first [[{array}]]")
                } else {
                    format!("did you mean {}? (known: {})", nearest(name, known), known.join(", "))
                };
                let shown: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
                self.complain(&key.span(), &shown, ("unknown key".into(), todo));
            }
        }
    }

    /// The value of `key`, if it is there and `parse` takes it.
    fn get<T>(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        parse: impl Fn(&DeValue<'_>) -> Result<T, Refusal>,
    ) -> Option<T> {
        let value: &Value<'_> = table.get(key)?;
        match parse(value.get_ref()) {
            Ok(parsed) => Some(parsed),
            Err(refusal) => {
                self.complain(&value.span(), key, refusal);
                None
            }
        }
    }

    fn config(&mut self, table: &DeTable<'_>) -> Config {
        let machine = self.machine;
        self.unknown_keys(table, &KEYS, "");
        let mut config = Config::defaults(machine);
        if let Some(directory) = self.get(table, "socket_dir", socket_directory) {
            config.socket_dir = directory;
        }
        config.dram = self.get(table, "dram", |value| budget(value, machine));
        if let Some(size) = self.get(table, "default_dram", |value| budget(value, machine)) {
            config.default_dram = size;
        }
        config.metrics = self.get(table, "metrics", address);
        config.tier_path = self.get(table, "tier_path", writable_directory);
        if let Some(limit) = self.get(table, "tier_limit", size) {
            config.tier_limit = limit;
        }
        self.limit_needs_a_tier(table, table);
        self.tier_fits(table, &mut config);
        self.node(table, &mut config);
        if let Some(order) = self.get(table, "tier_order", tier_order) {
            config.tier_order = order;
        }
        config.uffd_users = self.users(table, "uffd_users");
        config.preload = self.get(table, "preload", library);
        if let Some(grace) = self.get(table, "stop_grace", |value| duration(value, MAX_GRACE)) {
            config.stop_grace = grace;
        }
        if let Some(time) = self.get(table, "release_patience", |value| duration(value, MAX_GRACE))
        {
            config.release_patience = time;
        }
        if let Some(directory) = self.get(table, "snapshot_dir", snapshot_directory) {
            config.snapshot_dir = directory;
        }
        if let Some(limit) = self.get(table, "snapshot_limit", |value| share(value, machine)) {
            config.snapshot_limit = limit;
        }
        config.criu = self.get(table, "criu", program);
        config.quota = self.quota(table);
        config.manage = self.rules(table, config.default_dram);
        self.claims(table, &mut config);
        config.snapshot = self.schedules(table);
        config
    }

    /// What the device does not have at all cannot be promised to a tenant.
    fn tier_fits(&mut self, table: &DeTable<'_>, config: &mut Config) {
        let Some(directory) = &config.tier_path else { return };
        let Ok(all) = strata_sys::file_system_bytes(directory).map(ByteSize) else { return };
        if config.tier_limit <= all {
            return;
        }
        let Some(limit) = table.get("tier_limit") else {
            config.tier_limit = all;
            return;
        };
        let what = format!(
            "{} is more than the file system at {} has ({all})",
            config.tier_limit,
            directory.display()
        );
        self.complain(&limit.span(), "tier_limit", (what, "name a smaller limit".into()));
    }

    /// A limit of a tier that there is not would be obeyed by nobody.
    fn limit_needs_a_tier(&mut self, whole: &DeTable<'_>, table: &DeTable<'_>) {
        if let (Some(limit), None) = (table.get("tier_limit"), whole.get("tier_path")) {
            let todo = "set tier_path to a directory, or leave tier_limit out";
            let refusal = ("there is no file tier to limit".into(), todo.into());
            self.complain(&limit.span(), "tier_limit", refusal);
        }
    }

    fn users(&mut self, table: &DeTable<'_>, key: &str) -> Vec<User> {
        let user_id = self.machine.user_id;
        let Some(value) = table.get(key) else { return Vec::new() };
        let Some(array) = value.get_ref().as_array() else {
            let refusal = wrong_type(value.get_ref(), "a list of users: [\"postgres\"]");
            self.complain(&value.span(), key, refusal);
            return Vec::new();
        };
        let mut users = Vec::new();
        for element in array.iter() {
            match user(element.get_ref(), user_id) {
                Ok(user) => users.push(user),
                Err(refusal) => self.complain(&element.span(), key, refusal),
            }
        }
        users
    }

    fn rules(&mut self, whole: &DeTable<'_>, default_dram: ByteSize) -> Vec<Rule> {
        let Some(value) = whole.get("manage") else { return Vec::new() };
        let Some(array) = value.get_ref().as_array() else {
            self.complain(&value.span(), "manage", wrong_type(value.get_ref(), "[[manage]] rules"));
            return Vec::new();
        };
        if array.len() > MAX_RULES {
            let what = format!("{} rules are more than the {MAX_RULES} allowed", array.len());
            self.complain(&value.span(), "manage", (what, "match by cgroup or user".into()));
            return Vec::new();
        }
        let mut rules: Vec<Rule> = Vec::new();
        for element in array.iter() {
            let Some(table) = element.get_ref().as_table() else {
                let refusal = wrong_type(element.get_ref(), "[[manage]] rules");
                self.complain(&element.span(), "manage", refusal);
                continue;
            };
            let Some(rule) = self.rule(whole, table, &element.span(), default_dram) else {
                continue;
            };
            if rules.iter().any(|other| other.name == rule.name && other.user.uid == rule.user.uid)
            {
                let at = table.get("name").map_or(element.span(), Spanned::span);
                let what = format!("a rule named {:?} is there already", rule.name.text());
                self.complain(&at, "name", (what, "give each rule its own name".into()));
            }
            rules.push(rule);
        }
        rules
    }

    fn rule(
        &mut self,
        whole: &DeTable<'_>,
        table: &DeTable<'_>,
        at: &Range<usize>,
        default_dram: ByteSize,
    ) -> Option<Rule> {
        let machine = self.machine;
        self.unknown_keys(table, &RULE_KEYS, "manage");
        let name = self.get(table, "name", naming);
        if !table.contains_key("name") {
            let refusal = ("a rule needs a name".into(), "add name = \"…\"".into());
            self.complain(at, "manage", refusal);
        }
        if !["exe", "user", "cgroup"].iter().any(|key| table.contains_key(*key)) {
            let what = "a rule without a condition would manage every program";
            self.complain(at, "manage", (what.into(), "add exe, user or cgroup".into()));
        }
        self.limit_needs_a_tier(whole, table);
        let exe = self.get(table, "exe", executable);
        let user = self.get(table, "user", |value| user(value, machine.user_id));
        let cgroup = self.get(table, "cgroup", control_group);
        let dram = self.get(table, "dram", |value| budget(value, machine));
        let claim = self.claim(whole, table);
        let tier_limit = self.get(table, "tier_limit", size);
        let tier_order = self.get(table, "tier_order", tier_order);
        let required = self.get(table, "required", truth).unwrap_or(false);
        Some(Rule {
            name: name?,
            exe,
            user: user.unwrap_or_else(User::root),
            cgroup,
            dram: dram.unwrap_or(default_dram),
            claim,
            tier_limit,
            tier_order,
            required,
        })
    }
}

fn wrong_type(value: &DeValue<'_>, wanted: &str) -> Refusal {
    (format!("is of the type {}", value.type_str()), format!("write {wanted}"))
}

/// The text of a value; `wanted` says what to write instead of another type.
fn text<'a>(value: &'a DeValue<'_>, wanted: &str) -> Result<&'a str, Refusal> {
    value.as_str().ok_or_else(|| wrong_type(value, wanted))
}

fn size(value: &DeValue<'_>) -> Result<ByteSize, Refusal> {
    let text = text(value, "a size with its unit, in quotes: \"4GiB\"")?;
    text.parse().map_err(|_| {
        (format!("{text:?} is not a size"), "write a size with its unit: \"4GiB\"".into())
    })
}

/// Tiers that the machine does not have may be named: one file serves several.
fn tier_order(value: &DeValue<'_>) -> Result<TierOrder, Refusal> {
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

fn budget(value: &DeValue<'_>, machine: &Machine) -> Result<ByteSize, Refusal> {
    let size = size(value)?;
    if size > machine.memory {
        let what = format!("{size} is more than this machine has ({})", machine.memory);
        return Err((what, "give it less: a budget is a share of DRAM".into()));
    }
    Ok(size)
}

/// A part of the machine's memory.
fn share(value: &DeValue<'_>, machine: &Machine) -> Result<ByteSize, Refusal> {
    let size = size(value)?;
    if size > machine.memory {
        let what = format!("{size} is more than this machine has ({})", machine.memory);
        return Err((what, "name a part of it".into()));
    }
    Ok(size)
}

/// `"250ms"`, `"10s"`, `"5m"` or `"5min"`, `"2h"`, `"1d"`; at most `max`.
fn duration(value: &DeValue<'_>, max: Duration) -> Result<Duration, Refusal> {
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

fn address(value: &DeValue<'_>) -> Result<SocketAddr, Refusal> {
    const WANTED: &str = "an address and a port: \"127.0.0.1:9464\"";
    let text = text(value, WANTED)?;
    text.parse().map_err(|_| (format!("{text:?} is not an address"), format!("write {WANTED}")))
}

fn absolute(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    const WANTED: &str = "an absolute path: \"/var/lib/strata\"";
    let text = text(value, WANTED)?;
    let path = Path::new(text);
    if !path.is_absolute() || text.contains('\0') {
        return Err((format!("{text:?} is not an absolute path"), format!("write {WANTED}")));
    }
    Ok(path.to_owned())
}

fn socket_directory(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
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
fn writable_directory(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
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
fn snapshot_directory(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    let directory = absolute(value)?;
    match directory.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(directory),
        Ok(_) | Err(_) => writable_directory(value),
    }
}

fn program(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
    let path = absolute(value)?;
    let executable =
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    if !executable {
        let what = format!("{} is not a program", path.display());
        return Err((what, "name the criu to use, or leave the key out".into()));
    }
    Ok(path)
}

fn library(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
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

fn truth(value: &DeValue<'_>) -> Result<bool, Refusal> {
    value.as_bool().ok_or_else(|| wrong_type(value, "true or false, without quotes"))
}

fn tenant_name(value: &DeValue<'_>) -> Result<String, Refusal> {
    let text = text(value, "a name: \"db\"")?;
    match strata_api::name_problem(text) {
        None => Ok(text.to_owned()),
        Some(problem) => Err((problem.to_owned(), "choose another name".into())),
    }
}

/// The name of a rule's tenants.
fn naming(value: &DeValue<'_>) -> Result<Naming, Refusal> {
    Naming::parse(text(value, "a name: \"db\"")?)
}

fn executable(value: &DeValue<'_>) -> Result<PathBuf, Refusal> {
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

fn control_group(value: &DeValue<'_>) -> Result<String, Refusal> {
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

fn user(
    value: &DeValue<'_>,
    user_id: fn(&str) -> std::io::Result<Option<u32>>,
) -> Result<User, Refusal> {
    let name = text(value, "a user's name, in quotes: \"postgres\"")?;
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
