//! How tenants begin and end: `strata run`, guests that come from snapshots, `stop`,
//! `release`, and what became of a process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_api::{MOVE_LENT, Reply, SnapshotRef};
use strata_pager::{ReleaseRefused, Tenant};
use strata_snapshot::is_ending;
use strata_sys::peer::{KnownPeer, Peer};
use strata_sys::{SIGTERM, collect_child, status_of_collected};
use strata_units::ByteSize;
use strata_units::wire::{ENV_SOCKET, ENV_TOKEN};

use super::budgets::check_budget;
use super::{Commands, LOOK_EVERY, error};
use crate::shares;
use crate::snapshots::Tell;
use crate::tenants::Wish;

/// How long killed processes may take to be gone.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// Within this a restored process that ends can be collected: its memory is taken down.
const COLLECTED_WITHIN: Duration = Duration::from_secs(2);

impl Commands {
    pub(super) fn run(
        &self,
        peer: Peer,
        known: Option<KnownPeer>,
        name: Option<String>,
        dram_bytes: Option<u64>,
        command: Vec<String>,
    ) -> Reply {
        let budget_bytes = dram_bytes.unwrap_or(self.current.get().default_dram.0);
        if let Err(refused) = check_budget(budget_bytes) {
            return refused;
        }
        let listed = self.current.get().uffd_users.iter().any(|user| user.uid == peer.uid);
        if peer.uid != 0 && !self.private && !listed {
            return error(
                format!("user {} may not use userfaultfd through this daemon", peer.uid),
                "let its administrator add you to uffd_users in the configuration",
            );
        }
        let claim = self.first_claim(peer, dram_bytes);
        if let (Some(dram), None) = (self.current.get().dram, claim)
            && let Err(why) = shares::can_keep(dram.0, &self.tenants.list(), None, budget_bytes)
        {
            return error(why, "name less, or a claim instead; strata shares shows who has what");
        }
        let wish = Wish {
            name,
            uid: peer.uid,
            command,
            budget_bytes,
            claim,
            tier_limit: None,
            tier_order: None,
            starter: known.map(|known| (peer.pid, known.into_pidfd())),
            of_rule: false,
        };
        match self.tenants.create(wish) {
            Ok((tenant, warnings)) => {
                let (name, environment) = (tenant.record().name.clone(), self.environment(&tenant));
                Reply::Run { name, dram_bytes: budget_bytes, environment, warnings }
            }
            Err(message) => error(message, "choose another --name, or see stratad's log"),
        }
    }

    /// What a program must find to become the tenant's.
    fn environment(&self, tenant: &Tenant) -> Vec<(String, String)> {
        let mut environment = vec![
            (ENV_SOCKET.to_owned(), self.agent_socket.to_string_lossy().into_owned()),
            (ENV_TOKEN.to_owned(), format!("{:016x}", tenant.record().token)),
        ];
        if let Some(library) = &self.current.get().preload {
            let library = library.to_string_lossy().into_owned();
            environment.push(("LD_PRELOAD".to_owned(), library));
        }
        environment
    }

    /// A tenant for a guest that is to come from a snapshot, and its directory.
    pub(super) fn guest_again(
        &self,
        peer: Peer,
        snapshot: &SnapshotRef,
        (name, rollback): (Option<String>, bool),
        tell: Tell<'_>,
    ) -> Reply {
        let refused = |why: String| error(format!("no guest from {snapshot}: {why}"), "");
        let begun = match self.snapshots.begin_guest(peer, snapshot, name, rollback, tell) {
            Ok(begun) => begun,
            Err(why) => return refused(why),
        };
        let tenant = &begun.tenant;
        let made = self.guests.make_again(peer, tenant, begun.spec.clone(), rollback);
        drop(begun.held);
        match made {
            Reply::Guest { directory } => Reply::GuestAgain {
                name: tenant.record().name.clone(),
                environment: self.environment(tenant),
                directory,
                guest: Box::new(begun.spec),
                warnings: begun.warnings,
            },
            other => other,
        }
    }

    pub(super) fn stop(&self, tenant: &Arc<Tenant>) -> Reply {
        if let Some(why) = self.snapshots.is_lent(tenant) {
            return error(why, MOVE_LENT);
        }
        let signalled = tenant.signal(SIGTERM);
        if signalled == 0 {
            return error(
                format!("{} has no process that stratad knows", tenant.record().name),
                "end its program by hand",
            );
        }
        let gone = |patience: Duration| {
            let deadline = Instant::now() + patience;
            while tenant.attachment().1 && Instant::now() < deadline {
                std::thread::sleep(LOOK_EVERY);
            }
            !tenant.attachment().1
        };
        if gone(self.current.get().stop_grace) {
            return Reply::Done { note: String::new() };
        }
        tenant.kill();
        if gone(KILL_PATIENCE) {
            Reply::Done { note: "it did not end by SIGTERM and was killed".into() }
        } else {
            error(
                format!("{} was killed and is not gone yet", tenant.record().name),
                "look for a process in uninterruptible sleep",
            )
        }
    }

    /// What became of a process, for whoever was its parent.
    pub(super) fn became(&self, peer: Peer, name: &str, ended: u32) -> Reply {
        let tenant = self.tenants.resolve(peer.uid, name).ok();
        let pid = tenant.and_then(|tenant| self.snapshots.first_process(&tenant));
        // It may have ended a moment ago, as a child of this one.
        let pid = pid.filter(|&pid| !is_ending(pid));
        let status = if pid.is_none() { how_it_ended(ended) } else { None };
        Reply::Became { pid, status }
    }
}

pub(super) fn release(tenant: &Arc<Tenant>, patience: Duration) -> Reply {
    if tenant.is_released() {
        return Reply::Done { note: "it was released before".into() };
    }
    match tenant.release(patience) {
        Ok(()) => Reply::Done { note: String::new() },
        Err(ReleaseRefused::NoRoom { needed_bytes, available_bytes }) => error(
            format!(
                "its stored pages need {} of DRAM, {} are available",
                ByteSize(needed_bytes),
                ByteSize(available_bytes)
            ),
            "free memory on this machine, or leave it managed",
        ),
        Err(ReleaseRefused::Stuck { pages }) => error(
            format!("{pages} pages cannot come back now"),
            "its processes may be stopped: let them run and try again",
        ),
        Err(ReleaseRefused::Unanswered) => error(
            "one of its processes holds up whoever manages it",
            format!("it stays managed; strata stop {} ends it", tenant.record().name),
        ),
        Err(ReleaseRefused::Ended) => error("it has ended", ""),
    }
}

/// How a process has ended that may be a child of this one, which collects it.
fn how_it_ended(pid: u32) -> Option<i32> {
    let end = Instant::now() + COLLECTED_WITHIN;
    loop {
        collect_child(pid);
        let status = status_of_collected(pid);
        if status.is_some() || !is_ending(pid) || Instant::now() > end {
            return status;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
