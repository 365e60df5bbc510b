//! Making a tenant: its name, what its user may have, its cgroup, its file tier.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_api::ENDING;
use strata_pager::{Tenant, TenantSpec};
use strata_sys::Priority;
use strata_units::ByteSize;

use super::{Entry, Key, LOOK_EVERY, Taken, Tenants, Wish, chain};
use crate::config::Rule;
use crate::program::Program;
use crate::{groups, logbook, shares};

/// How long a new tenant waits for one of its name that has ended and is being taken
/// down: longer than one that executes another program may take.
const MAKING_ROOM: Duration = Duration::from_secs(4);
/// How often a rule's tenant is looked for that another program is just making.
const RULE_TRIES: u32 = 3;

/// Characters of a name: it becomes part of a path and of a metric.
fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 64
        && !name.starts_with(['.', '-'])
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

impl Tenants {
    /// Makes a tenant. The error is one line for the user.
    pub(crate) fn create(&self, wish: Wish) -> Result<(Arc<Tenant>, Vec<String>), String> {
        self.make(wish, None)
    }

    /// Makes a tenant that shares the pages of `origin`.
    pub(crate) fn create_beside(
        &self,
        wish: Wish,
        origin: &Tenant,
    ) -> Result<(Arc<Tenant>, Vec<String>), String> {
        self.make(wish, Some(origin))
    }

    /// Has `name` be free for a new tenant, if it can be. One that has just ended is
    /// not taken down yet: a service that is restarted does not wait for that.
    fn make_room(&self, key: &Key) -> Result<(), String> {
        let name = &key.name;
        let until = Instant::now() + MAKING_ROOM;
        loop {
            let mut known = self.lock();
            let taken = known.by_key.get_mut(key).map_or(Taken::Free, Entry::taken);
            match taken {
                Taken::Free => {
                    let entry = known.by_key.remove(key);
                    drop(known);
                    if let Some(entry) = entry {
                        self.take_down(&entry.tenant);
                    }
                    return Ok(());
                }
                Taken::Living => return Err(format!("there is a tenant {name} already")),
                Taken::HasSnapshots => {
                    return Err(format!("a tenant {name} has ended and has snapshots"));
                }
                Taken::Ending if Instant::now() >= until => {
                    return Err(format!("the tenant {name} before it has not ended yet"));
                }
                Taken::Ending => known.by_key[key].tenant.look_for_ended(),
            }
            drop(known);
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn make(
        &self,
        wish: Wish,
        origin: Option<&Tenant>,
    ) -> Result<(Arc<Tenant>, Vec<String>), String> {
        if let Some(name) = &wish.name {
            if !is_name(name) {
                return Err(format!(
                    "{name:?} is no name for a tenant (1 to 64 letters, digits, '.', '_', '-')"
                ));
            }
            // A rule's next program joins the tenant that is there.
            if !wish.of_rule || wish.starter.is_some() {
                self.make_room(&Key::new(wish.uid, name))?;
            }
        }
        // It takes a while, and only who also makes one waits for it.
        let _turn = self.making.enter(wish.uid);
        let known = self.lock();
        if known.closed {
            return Err(ENDING.into());
        }
        let is_taken = |name: &str| known.by_key.contains_key(&Key::new(wish.uid, name));
        let name = match wish.name {
            Some(name) if is_taken(&name) => {
                return Err(format!("there is a tenant {name} already"));
            }
            Some(name) => name,
            None => free_name(is_taken, wish.command.first()),
        };
        self.check_quota(&known, wish.uid)?;
        let key = Key::new(wish.uid, &name);
        let config = self.current.get();
        let claim = wish.claim.or_else(|| origin?.claim()).filter(|_| config.dram.is_some());
        let group = match origin {
            Some(origin) => origin.record().group.clone(),
            None => groups::of(&config.groups, wish.uid, &name).map(str::to_owned),
        };
        // Whoever is of the group shares its pages with all others that are.
        let is_of_it = |tenant: &&Arc<Tenant>| group.is_some() && tenant.record().group == group;
        let member = known.by_key.values().map(|entry| &entry.tenant).find(is_of_it).cloned();
        let mut budget_bytes = wish.budget_bytes;
        if let Some(ByteSize(dram_bytes)) = config.dram {
            let others: Vec<_> =
                known.by_key.values().map(|entry| Arc::clone(&entry.tenant)).collect();
            let kept = claim.map_or(budget_bytes, |claim| claim.reserve_bytes);
            shares::can_keep(dram_bytes, &others, None, kept)?;
            if let Some(claim) = &claim {
                budget_bytes = shares::first_budget(dram_bytes, &others, claim);
            }
        }
        drop(known);
        let mut warnings = Vec::new();
        let (starter_pid, starter) = wish.starter.unzip();
        let made = if wish.of_rule {
            Err(std::io::Error::other("programs of a rule stay in their own cgroup"))
        } else {
            // What is on the node counts there too, and not in the budget.
            let node_bytes = self.node.map_or(0, |node| node.limit_bytes);
            let memory_bytes = budget_bytes.saturating_add(node_bytes);
            let starter = starter_pid.zip(starter.as_ref());
            self.cgroups.make(wish.uid, &name, starter, memory_bytes)
        };
        let cgroup = match made {
            Ok(directory) => Some(directory.to_string_lossy().into_owned()),
            Err(error) => {
                warnings.push(format!(
                    "no memory cgroup ({error}): memory that grows before it is managed can exceed the budget (see docs/limits.md)"
                ));
                None
            }
        };
        let tier = match &self.tier {
            Some(directory) if origin.is_none() && member.is_none() => {
                // A file of its own, nameless as soon as it is open. Random: a
                // daemon killed in between leaves the name behind.
                let number =
                    random_token().map_err(|error| format!("no random numbers: {error}"))?;
                let file = directory.join(format!("tier-{number:016x}"));
                let limit = config.tier_limit.0;
                Some((file, wish.tier_limit.map_or(limit, |own| own.min(limit))))
            }
            _ => None,
        };
        let token = random_token().map_err(|error| format!("no random numbers: {error}"))?;
        let spec = TenantSpec {
            name: name.clone(),
            uid: wish.uid,
            token,
            lineage: origin.map_or(token, |origin| origin.record().lineage),
            group,
            command: wish.command,
            budget_bytes,
            cgroup: cgroup.clone(),
            tier,
            node: self.node,
            tier_order: wish.tier_order.unwrap_or(config.tier_order),
            starter: starter_pid,
        };
        let made = match origin.or(member.as_deref()) {
            Some(origin) => origin.create_beside(spec),
            None => Tenant::create(&self.registry, spec),
        };
        let tenant = made.map_err(|error| {
            if let Some(directory) = &cgroup {
                self.cgroups.release(directory.as_ref());
            }
            format!("cannot make tenant {name}: {}", chain(&error))
        })?;
        tenant.set_claim(claim);
        let mut known = self.lock();
        if known.closed {
            drop(known);
            self.take_down(&tenant);
            return Err(ENDING.into());
        }
        let record = tenant.record();
        let command = record.command.first().map_or("", |word| word.as_str());
        let of_group = record.group.as_deref().map(|group| format!(", group {group}"));
        let of_group = of_group.unwrap_or_default();
        let line = format!(
            "tenant {name} starts: budget {}, user {}{of_group}, {command}",
            ByteSize(tenant.budget_bytes()),
            record.uid
        );
        logbook::tell_of(record.uid, "starts", Priority::Notice, line);
        known.by_key.insert(key, Entry::new(Arc::clone(&tenant), starter, wish.of_rule));
        Ok((tenant, warnings))
    }

    /// The tenant of a rule that is called `name`, made when its first program starts, which
    /// is of the rule's user.
    pub(crate) fn of_rule(
        &self,
        rule: &Rule,
        name: &str,
        program: &Program,
    ) -> Result<Arc<Tenant>, String> {
        let mut refused = String::new();
        for _ in 0..RULE_TRIES {
            if let Some(tenant) = self.get(rule.user.uid, name) {
                return Ok(tenant);
            }
            let made = self.create(Wish {
                name: Some(name.to_owned()),
                uid: rule.user.uid,
                command: program.shown_command(),
                budget_bytes: rule.dram.0,
                claim: rule.claim.as_ref().map(|wanted| shares::claim(None, wanted)),
                tier_limit: rule.tier_limit.map(|limit| limit.0),
                tier_order: rule.tier_order,
                starter: None,
                of_rule: true,
            });
            match made {
                Ok((tenant, _)) => return Ok(tenant),
                // Another of its programs may have been first.
                Err(why) => refused = why,
            }
        }
        Err(refused)
    }
}

fn free_name(is_taken: impl Fn(&str) -> bool, program: Option<&String>) -> String {
    let base: String = program
        .and_then(|path| path.rsplit('/').next())
        .unwrap_or("tenant")
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
        .take(48)
        .collect();
    let base = if is_name(&base) { base } else { "tenant".into() };
    (1..)
        .map(|number| if number == 1 { base.clone() } else { format!("{base}-{number}") })
        .find(|name| !is_taken(name))
        .expect("numbers do not run out before tenants")
}

fn random_token() -> std::io::Result<u64> {
    use std::io::Read;
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes) | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_paths_can_hold() {
        for good in ["redis", "db-1", "a.b_c", "X"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", ".", "..", "-rf", "a/b", "a b", "é", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn a_name_is_made_of_the_program() {
        let free = |_: &str| false;
        assert_eq!(free_name(free, Some(&"/usr/bin/redis-server".into())), "redis-server");
        assert_eq!(free_name(free, Some(&"/opt/x y".into())), "x-y");
        assert_eq!(free_name(free, None), "tenant");
        assert_eq!(free_name(|name| name == "x", Some(&"/bin/x".into())), "x-2");
    }
}
