//! What DRAM tenants are given, and what they are promised.

use std::sync::Arc;

use strata_api::{DramClaim, Reply};
use strata_pager::{Claim, Tenant};
use strata_sys::peer::Peer;
use strata_sys::total_bytes;
use strata_units::ByteSize;

use super::{Commands, error};
use crate::shares;

/// Refuses a budget that this machine cannot give.
pub(super) fn check_budget(bytes: u64) -> Result<(), Reply> {
    let machine = total_bytes().unwrap_or(u64::MAX);
    if bytes > machine {
        return Err(error(
            format!(
                "a budget of {} is more than this machine has ({})",
                ByteSize(bytes),
                ByteSize(machine)
            ),
            "name a smaller one",
        ));
    }
    if bytes < LEAST_BUDGET.0 {
        return Err(error(
            format!("a budget of {} is too small to run anything", ByteSize(bytes)),
            format!("name at least {LEAST_BUDGET}"),
        ));
    }
    Ok(())
}

/// Below this a program's own stacks and libraries fill the budget.
pub(crate) const LEAST_BUDGET: ByteSize = ByteSize(4 << 20);

impl Commands {
    /// Whether a user may be promised DRAM that others then cannot have.
    pub(super) fn may_be_promised(&self, peer: Peer) -> bool {
        peer.uid == 0 || self.private
    }

    /// What a new tenant claims, where DRAM is shared out. Of a user who may be promised
    /// none a named budget is a limit.
    pub(super) fn first_claim(&self, peer: Peer, dram_bytes: Option<u64>) -> Option<Claim> {
        self.current.get().dram?;
        match dram_bytes {
            Some(_) if self.may_be_promised(peer) => None,
            limit_bytes => {
                let wanted = DramClaim { limit_bytes, ..DramClaim::default() };
                Some(shares::claim(None, &wanted))
            }
        }
    }

    /// A budget of its own: it does not move any more.
    pub(super) fn set(&self, peer: Peer, tenant: &Arc<Tenant>, dram_bytes: u64) -> Reply {
        if let Err(refused) = check_budget(dram_bytes) {
            return refused;
        }
        if self.current.get().dram.is_some() && !self.may_be_promised(peer) {
            let limit = DramClaim { limit_bytes: Some(dram_bytes), ..DramClaim::default() };
            return self.claim(peer, tenant, &limit);
        }
        if let Err(why) = self.can_keep(tenant, dram_bytes) {
            return error(why, "strata shares shows who has what");
        }
        tenant.set_claim(None);
        let note = shares::set_budget(tenant, dram_bytes).err();
        Reply::Done { note: note.map_or_else(String::new, |failed| failed.to_string()) }
    }

    /// From now on its budget moves.
    pub(super) fn claim(&self, peer: Peer, tenant: &Arc<Tenant>, wanted: &DramClaim) -> Reply {
        if self.current.get().dram.is_none() {
            let hint = "set dram in its configuration; --dram gives a budget that does not move";
            return error("this stratad shares no DRAM out", hint);
        }
        let takes = wanted.reserve_bytes.is_some_and(|bytes| bytes > 0)
            || wanted.weight.is_some_and(|weight| weight > 1.0);
        if takes && !self.may_be_promised(peer) {
            let what = "only root promises DRAM: a reserve, or a weight above 1";
            return error(what, "a limit, and a weight of 1 or less, are yours to set");
        }
        let claim = shares::claim(tenant.claim(), wanted);
        if claim.reserve_bytes > claim.limit_bytes {
            let (reserve, limit) = (ByteSize(claim.reserve_bytes), ByteSize(claim.limit_bytes));
            let what = format!("its reserve of {reserve} is more than its limit of {limit}");
            return error(what, "name both");
        }
        if let Some(problem) = wanted.problem() {
            return error(problem, "");
        }
        if claim.limit_bytes < LEAST_BUDGET.0 {
            return error(format!("a limit is at least {LEAST_BUDGET}"), "");
        }
        if let Err(why) = self.can_keep(tenant, claim.reserve_bytes) {
            return error(why, "strata shares shows who has what");
        }
        tenant.set_claim(Some(claim));
        Reply::Done { note: String::new() }
    }

    pub(super) fn can_keep(&self, tenant: &Tenant, bytes: u64) -> Result<(), String> {
        let Some(dram) = self.current.get().dram else { return Ok(()) };
        shares::can_keep(dram.0, &self.tenants.list(), Some(tenant), bytes)
    }

    pub(super) fn host_shares(&self, peer: Peer) -> Reply {
        let Some(ByteSize(dram_bytes)) = self.current.get().dram else {
            return error("this stratad shares no DRAM out", "set dram in its configuration");
        };
        let (mut tenants, room_bytes) = self.shares.list();
        tenants.retain(|share| peer.uid == 0 || peer.uid == share.uid);
        Reply::HostShares { dram_bytes, room_bytes, tenants }
    }
}
