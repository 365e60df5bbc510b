//! Whose a program is that carries no tenant's token: the child of a fork is its
//! parent's, by the memory that they share; any other is whose a rule says.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use strata_pager::Tenant;
use strata_sys::peer::{KnownPeer, Peer};
use strata_sys::{Priority, Process};
use strata_units::wire::{Hello, REQUIRED};

use super::{Belongs, Reception};
use crate::config::Rule;
use crate::logbook;
use crate::naming::Placeholder;
use crate::program::Program;

/// Programs that have been told of.
const MOST_UNNAMED: usize = 256;

/// Of which rules and programs it was said that a placeholder stands for nothing in them:
/// it is said once.
#[derive(Default)]
pub(super) struct Unnamed(Mutex<BTreeSet<(String, String)>>);

impl Unnamed {
    /// Whether to say it of this rule and program.
    fn is_new(&self, rule: &str, exe: &str) -> bool {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.len() < MOST_UNNAMED && said.insert((rule.to_owned(), exe.to_owned()))
    }
}

/// [`REQUIRED`], if the rule says so.
fn required(rule: &Rule) -> u32 {
    if rule.required { REQUIRED } else { 0 }
}

impl Reception {
    /// The tenant in which the memory of a fork's child is registered, whatever the child
    /// is called by now and wherever it has been put. Whether it is that memory is shown
    /// afterwards, as for everybody; here only where several could be it.
    pub(super) fn of_memory(
        &self,
        hello: &Hello,
        known: &KnownPeer,
    ) -> io::Result<Option<(Arc<Tenant>, u32)>> {
        let config = self.current.get();
        let rules = &config.manage;
        if rules.is_empty() {
            return Ok(None);
        }
        let pid = known.peer().pid;
        let all = self.tenants.list();
        // It was answered before, and has not heard it.
        let answered = all.iter().find(|tenant| tenant.space_of(pid).is_some()).cloned();
        let has_it = |tenant: &Arc<Tenant>| tenant.orphan_with(hello.probe, None).is_some();
        let parents = || self.tenants.of_ancestors(pid).filter(has_it);
        if let Some(tenant) = answered.or_else(parents) {
            return Ok(Some((tenant, 0)));
        }
        // Its parent has ended. Nobody's gates are taken but those of rules' users.
        let of_rules = |tenant: &Arc<Tenant>| {
            rules.iter().any(|rule| {
                rule.user.uid == tenant.record().uid && rule.name.can_be(&tenant.record().name)
            })
        };
        let of = |tenant: Arc<Tenant>| Some((tenant.orphan_with(hello.probe, None)?, tenant));
        let mut found: Vec<_> = all.into_iter().filter(of_rules).filter_map(of).collect();
        if found.len() > 1 {
            let process = Process::of_peer(known)?;
            found.retain(|(space, _)| space.prove(&process, hello.probe).is_ok());
        }
        Ok(found.pop().map(|(_, tenant)| (tenant, 0)))
    }

    /// The tenant of the first rule that is for this program and whose user's it is, or
    /// that it descends from. It is made for a program of that user alone, and not for
    /// one who may not be managed: nobody would be in it.
    pub(super) fn of_rules(
        &self,
        program: &Program,
        peer: Peer,
        joins: impl Fn(&Arc<Tenant>) -> bool,
    ) -> Result<(Arc<Tenant>, u32), Belongs> {
        let config = self.current.get();
        for rule in program.rules(&config.manage) {
            let (named, required) = (rule.name.name_of(program), required(rule));
            let is_own = peer.uid == rule.user.uid;
            let there = named.as_ref().ok();
            let there = there.and_then(|name| self.tenants.get(rule.user.uid, name));
            // Who is called otherwise than whom it descends from, as a server that drops
            // root, or not at all.
            let by_descent = || {
                let applies = rule.name.is_template() && (!is_own || named.is_err());
                let tenant = self.tenants.of_ancestors(peer.pid).filter(|_| applies)?;
                let record = tenant.record();
                let is_rules = record.uid == rule.user.uid && rule.name.can_be(&record.name);
                is_rules.then_some(tenant)
            };
            if let Some(tenant) = there.filter(&joins).or_else(|| by_descent().filter(&joins)) {
                return Ok((tenant, required));
            }
            if !is_own {
                continue;
            }
            let name = match named {
                Ok(name) => name,
                Err(missing) => {
                    self.say_unnamed(rule, program, peer, missing);
                    continue;
                }
            };
            if !self.may_have_device(peer) {
                return Err(Belongs::ToButMayNot { name, required });
            }
            let made = self.tenants.of_rule(rule, &name, program);
            return made
                .map(|tenant| (tenant, required))
                .map_err(|why| Belongs::Refused { why, required });
        }
        Err(Belongs::Nowhere)
    }

    fn say_unnamed(&self, rule: &Rule, program: &Program, peer: Peer, missing: Placeholder) {
        let (template, exe) = (rule.name.text(), program.exe.as_deref());
        let exe = exe.map_or_else(|| program.comm.clone(), |exe| exe.display().to_string());
        if self.unnamed.is_new(template, &exe) {
            let Peer { pid, uid, .. } = peer;
            let line = format!(
                "rule {template}: process {pid} ({exe}) is not managed by it: it has nothing that {missing} stands for"
            );
            logbook::tell_of(uid, "no name", Priority::Warning, line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_name_is_said_once_and_of_so_many() {
        let unnamed = Unnamed::default();
        assert!(unnamed.is_new("vm-{guest}", "/bin/a") && unnamed.is_new("{unit}", "/bin/a"));
        assert!(!unnamed.is_new("vm-{guest}", "/bin/a"));
        let others = (0..2 * MOST_UNNAMED).filter(|n| unnamed.is_new("{unit}", &n.to_string()));
        assert_eq!(others.count(), MOST_UNNAMED - 2);
    }
}
