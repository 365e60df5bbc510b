//! Who belongs to which tenant: whom a user's name of a tenant means, and which
//! processes a tenant takes in. Asked before anything is made for them.
//!
//! A user's processes join that user's tenants only. The one exception is descent,
//! which the kernel vouches for: a process of another user that descends from one of
//! the tenant's, as a service does that drops root. Root's processes never become an
//! ordinary user's that way: whoever commands a tenant can stop what is in it.

use std::sync::Arc;

use strata_api::no_tenant;
use strata_pager::Tenant;
use strata_sys::parent_of;
use strata_sys::peer::{Peer, user_id};

use crate::tenants::Tenants;

/// Generations of processes that are looked at for a tenant's.
const MOST_GENERATIONS: u32 = 64;
/// Of several tenants of one name, so many are named.
const MOST_NAMED: usize = 8;

impl Tenants {
    /// The tenant that `name` means when user `uid` says it: their own; or, said by root,
    /// anybody's, if it is the only one of that name. Root can say `USER:NAME`. Of others'
    /// tenants the error tells nothing.
    pub(crate) fn resolve(&self, uid: u32, name: &str) -> Result<Arc<Tenant>, String> {
        let missing = || no_tenant(name);
        if let Some((user, own)) = name.split_once(':') {
            // Nobody else learns here which users there are.
            let owner = match user.parse() {
                Ok(owner) => Some(owner),
                Err(_) if uid == 0 => user_id(user).ok().flatten(),
                Err(_) => None,
            };
            let owner = owner.filter(|&owner| uid == 0 || uid == owner);
            return owner.and_then(|owner| self.get(owner, own)).ok_or_else(missing);
        }
        if let Some(own) = self.get(uid, name) {
            return Ok(own);
        }
        if uid != 0 {
            return Err(missing());
        }
        let mut all = self.list();
        all.retain(|tenant| tenant.record().name == name);
        match all.as_slice() {
            [] => Err(missing()),
            [one] => Ok(Arc::clone(one)),
            several => {
                let named = several.iter().take(MOST_NAMED);
                let named: Vec<String> =
                    named.map(|tenant| format!("{}:{name}", tenant.record().uid)).collect();
                Err(format!(
                    "{} users have a tenant {name}: say {}",
                    several.len(),
                    named.join(" or ")
                ))
            }
        }
    }

    /// Whether the process at the other end may become `tenant`'s.
    pub(crate) fn admits(&self, tenant: &Arc<Tenant>, peer: Peer) -> bool {
        let owner = tenant.record().uid;
        peer.uid == owner || (may_descend(peer.uid, owner) && self.descends(tenant, peer.pid))
    }

    /// Whether a process is one of the tenant's, or descends from one.
    fn descends(&self, tenant: &Arc<Tenant>, pid: u32) -> bool {
        if self.is_in_cgroup(tenant, pid) {
            return true;
        }
        ancestry(pid).any(|pid| tenant.has_process(pid) || self.is_starter(tenant, pid))
    }

    /// The tenant of the nearest ancestor of process `pid` that has one.
    pub(crate) fn of_ancestors(&self, pid: u32) -> Option<Arc<Tenant>> {
        let all = self.list();
        let of = |pid| all.iter().find(|tenant| tenant.has_process(pid));
        ancestry(pid).skip(1).find_map(of).cloned()
    }

    /// Whose process `pid` is, which says that it is `named`'s. A program that a
    /// clone executes has the original's environment: it belongs to the clone.
    pub(crate) fn of_descent(&self, pid: u32, named: Arc<Tenant>) -> Arc<Tenant> {
        let mut family = self.list();
        family.retain(|tenant| tenant.record().lineage == named.record().lineage);
        if family.len() < 2 {
            return named;
        }
        let of = |pid| family.iter().find(|tenant| tenant.pids().contains(&pid));
        ancestry(pid).find_map(of).cloned().unwrap_or(named)
    }
}

/// Whether a process of user `uid` may be another user's by descent.
fn may_descend(uid: u32, owner: u32) -> bool {
    uid != 0 || owner == 0
}

/// A process, its parent and so on.
fn ancestry(pid: u32) -> impl Iterator<Item = u32> {
    let next = |&pid: &u32| parent_of(pid).filter(|&pid| pid > 1);
    std::iter::successors(Some(pid).filter(|&pid| pid > 1), next).take(MOST_GENERATIONS as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_descends_from_itself_and_its_parent() {
        let own = std::process::id();
        let line: Vec<u32> = ancestry(own).collect();
        assert_eq!(line.first(), Some(&own));
        let parent = parent_of(own).filter(|&pid| pid > 1);
        assert_eq!(line.get(1).copied(), parent);
        assert_eq!(ancestry(0).count() + ancestry(1).count(), 0);
    }

    #[test]
    fn root_is_no_ordinary_users_by_descent() {
        assert!(may_descend(1000, 0) && may_descend(1000, 1001) && may_descend(0, 0));
        assert!(!may_descend(0, 1000));
    }
}
