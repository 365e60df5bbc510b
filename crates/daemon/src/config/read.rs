//! From the text of a configuration file to a [`Config`]. The TOML is walked by
//! hand, because only then each complaint can name its line, and all complaints
//! can be made at once.

mod claims;
mod groups;
mod node;
mod quotas;
mod schedules;
mod values;

use std::ops::Range;
use std::time::Duration;

use strata_units::ByteSize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Config, Machine, Problem, Problems, Rule, User, nearest};
use values::{
    address, budget, control_group, duration, executable, library, naming, program, share, size,
    snapshot_directory, socket_directory, tenant_name, tier_order, truth, user, writable_directory,
    wrong_type,
};

/// All keys of the file.
pub(super) const KEYS: [&str; 21] = [
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
    "groups",
    "manage",
    "snapshot",
];
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
        config.groups = self.groups(table);
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
