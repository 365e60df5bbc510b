//! What the command line asks, carried out. A user commands only their own
//! tenants, root all of them (`belonging.rs`).

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use strata_api::{
    MOVE_LENT, MOVE_UNSETTLED, PROTOCOL_VERSION, Reply, Request, RevivedTenant, SnapshotInfo,
    SnapshotRef,
};
use strata_pager::{Registry, Space, Tenant};
use strata_snapshot::Terminals;
use strata_sys::peer::{KnownPeer, Peer};
use strata_sys::{Pidfd, Priority};

use crate::advice;
use crate::control::Handler;
use crate::current::Current;
use crate::doors::agent_socket;
use crate::guests::Guests;
use crate::logbook;
use crate::place;
use crate::pools::Pools;
use crate::shares::Shares;
use crate::snapshots::{CloneWish, ImportWish, MoveHow, Refused, Revived, Snapshots, Tell, Wire};
use crate::statistics;
use crate::supervisor::Inheritance;
use crate::tenants::Tenants;

mod budgets;
mod lives;
mod whole;

pub(crate) use budgets::LEAST_BUDGET;
use lives::release;

/// How often it is looked whether something has happened.
const LOOK_EVERY: Duration = Duration::from_millis(20);

pub(crate) struct Commands {
    tenants: Arc<Tenants>,
    snapshots: Arc<Snapshots>,
    guests: Arc<Guests>,
    pools: Arc<Pools>,
    shares: Arc<Shares>,
    current: Arc<Current>,
    config_file: Option<PathBuf>,
    private: bool,
    agent_socket: PathBuf,
    supervisor_pid: u32,
    registry: Arc<Registry>,
}

pub(crate) fn error(message: impl Into<String>, hint: impl Into<String>) -> Reply {
    Reply::Error { message: message.into(), hint: hint.into() }
}

impl Handler for Commands {
    fn log(&self, uid: u32, line: &str) {
        logbook::tell_of(uid, "control", Priority::Warning, line);
    }

    fn converse(&self, peer: Peer, request: Request, stream: UnixStream) {
        self.snapshots.learn_criu(peer);
        match Wire::new(stream) {
            Ok(mut wire) => {
                let reply = self.conversed(peer, &request, &mut wire);
                if let Reply::Error { message, .. } = &reply {
                    logbook::tell_of(peer.uid, "request", Priority::Warning, message);
                }
                wire.reply(reply);
            }
            Err(error) => self.log(peer.uid, &format!("a conversation: {error}")),
        }
    }

    fn handle(
        &self,
        peer: Peer,
        known: Option<KnownPeer>,
        request: Request,
        tell: Tell<'_>,
    ) -> Reply {
        let asked = request.clone();
        let mut reply = self.answer(peer, known, request, tell);
        if let Reply::Stats { stats } = &mut reply {
            self.guests.add(stats);
            self.pools.add(stats);
            self.snapshots.add(stats);
        }
        if let Some((priority, line)) = logbook::line(peer.uid, &asked, &reply) {
            logbook::tell_of(peer.uid, "request", priority, line);
        }
        reply
    }
}

impl Commands {
    /// What a conversation comes to.
    fn conversed(&self, peer: Peer, request: &Request, wire: &mut Wire) -> Reply {
        let hint = |name: &str| match self.snapshots.is_given(name) {
            true if self.snapshots.lends(name) => MOVE_LENT,
            true => MOVE_UNSETTLED,
            false => "",
        };
        let done = |outcome: Result<String, String>, name: &str, what: &str| match outcome {
            Ok(note) => Reply::Done { note },
            Err(why) => error(format!("{what}: {why}"), hint(name)),
        };
        match request {
            Request::Move { name, settle: true, .. } => {
                let settled = self.snapshots.settle_move(peer.uid, name, wire);
                done(settled, name, "it was not moved")
            }
            Request::Move { name, host, settle: false, copy_disks, at_once } => {
                self.with(peer, name, |tenant| {
                    let how = MoveHow { copy_disks: *copy_disks, at_once: *at_once };
                    let moved = self.snapshots.move_out(tenant, host, how, wire);
                    done(moved, name, &format!("it was not moved to {host}"))
                })
            }
            Request::MoveDisk { id, number } => {
                let carried = self.snapshots.carry_disk(peer.uid, (id, *number), wire);
                done(carried, "", "a disk was not copied")
            }
            Request::Receive => done(self.snapshots.receive(peer.uid, wire), "", "it did not come"),
            _ => error("that is no conversation", "use a strata of the same version"),
        }
    }

    fn answer(
        &self,
        peer: Peer,
        known: Option<KnownPeer>,
        request: Request,
        tell: Tell<'_>,
    ) -> Reply {
        if request.shows_progress() {
            self.snapshots.learn_criu(peer);
        }
        match request {
            Request::Move { .. } | Request::MoveDisk { .. } | Request::Receive => {
                error("that is a conversation", "use a strata of the same version")
            }
            Request::Ping => Reply::Pong {
                protocol: PROTOCOL_VERSION,
                version: env!("CARGO_PKG_VERSION").into(),
                pid: self.supervisor_pid,
            },
            Request::Run { name, dram_bytes, command } => {
                self.run(peer, known, name, dram_bytes, command)
            }
            Request::Guest { name, guest } => {
                self.with(peer, &name, |tenant| self.guests.make(peer, tenant, *guest))
            }
            Request::GuestAgain { snapshot, name, rollback } => {
                self.guest_again(peer, &snapshot, (name, rollback), tell)
            }
            Request::GuestFill { name, snapshot, pid, rollback, again, rehearse } => {
                self.with(peer, &name, |tenant| {
                    match self.snapshots.fill_guest(
                        peer.uid,
                        tenant,
                        &snapshot,
                        (pid, rollback),
                        (again, rehearse),
                        tell,
                    ) {
                        Ok(one) => revived(vec![one]),
                        Err(why) => {
                            error(format!("{name} does not come from {snapshot}: {why}"), "")
                        }
                    }
                })
            }
            Request::GuestOrder { name, identity } => {
                self.with(peer, &name, |tenant| match self.guests.order(tenant, identity) {
                    Ok(identified) => Reply::GuestOrdered { identified },
                    Err(why) => error(format!("{name}: {why}"), ""),
                })
            }
            Request::Reload => self.reload(peer),
            Request::Upgrade => self.upgrade(peer),
            Request::List { after } => self.list(peer, after.as_ref()),
            Request::Stats { name } => self.with(peer, &name, |tenant| Reply::Stats {
                stats: Box::new(statistics::of(tenant)),
            }),
            Request::Set { name, dram_bytes } => {
                self.with(peer, &name, |tenant| self.set(peer, tenant, dram_bytes))
            }
            Request::Claim { name, claim } => {
                self.with(peer, &name, |tenant| self.claim(peer, tenant, &claim))
            }
            Request::Shares => self.host_shares(peer),
            Request::Advise { name, stop: false } => {
                self.with(peer, &name, |tenant| advice::of(tenant))
            }
            Request::Advise { name, stop: true } => self.with(peer, &name, |tenant| {
                tenant.stop_advising();
                Reply::Done { note: String::new() }
            }),
            Request::PoolCreate { name, limit_bytes, admission } => {
                self.pools.create(peer.uid, &name, limit_bytes, admission)
            }
            Request::Pools => self.pools.list(peer.uid),
            Request::PoolEmpty { name } => self.pools.empty(peer.uid, &name),
            Request::PoolRemove { name } => self.pools.remove(peer.uid, &name),
            Request::ShareOut { total_bytes, curves } => advice::shares(total_bytes, &curves),
            Request::Release { name } => {
                self.with(peer, &name, |tenant| match self.snapshots.is_lent(tenant) {
                    Some(why) => error(why, MOVE_LENT),
                    None => release(tenant, self.current.get().release_patience),
                })
            }
            Request::Stop { name } => self.with(peer, &name, |tenant| self.stop(tenant)),
            Request::GuestResume { name } => {
                self.with(peer, &name, |tenant| match self.guests.go_on(tenant) {
                    Ok(()) => Reply::Done { note: format!("{name} runs") },
                    Err((why, todo)) => error(why, todo),
                })
            }
            Request::Snapshot { name, label, persist } => {
                self.with(peer, &name, |tenant| {
                    match self.snapshots.take(tenant, label, false, tell) {
                        Ok(info) if persist => self.persist(peer, &info.id.into(), tell),
                        Ok(info) => taken(info),
                        Err(why) => error(format!("no snapshot of {name}: {why}"), ""),
                    }
                })
            }
            Request::SnapshotSelf { label } => self.snapshot_self(peer, label, tell),
            Request::Place { wish, ranges } => {
                self.with_caller(peer, |tenant, space| place::place(tenant, space, wish, &ranges))
            }
            Request::Where { start, pages } => self
                .with_caller(peer, |tenant, space| place::whereabouts(tenant, space, start, pages)),
            Request::Snapshots { name, brief } => {
                let mut snapshots = self.snapshots.list();
                snapshots.retain(|info| peer.uid == 0 || peer.uid == info.uid);
                snapshots.retain(|info| name.as_ref().is_none_or(|name| *name == info.tenant));
                if !brief {
                    let with_size = |info| self.snapshots.with_size(info);
                    snapshots = snapshots.into_iter().map(with_size).collect();
                }
                Reply::Snapshots { snapshots }
            }
            Request::Rollback { name, snapshot } => self.with(peer, &name, |tenant| {
                let terminals = terminals_of(peer);
                match self.snapshots.rollback(peer.uid, tenant, &snapshot, terminals, tell) {
                    Ok(life) => revived(vec![Revived {
                        name: name.clone(),
                        pid: life.pid,
                        forwards: Vec::new(),
                        notes: life.notes,
                    }]),
                    Err(why) => error(format!("{name} was not rolled back: {why}"), ""),
                }
            }),
            Request::Became { name, pid } => self.became(peer, &name, pid),
            Request::Restore { snapshot, name } => {
                match self.snapshots.restore(peer.uid, &snapshot, name, terminals_of(peer), tell) {
                    Ok(one) => revived(vec![one]),
                    Err(why) => error(format!("{snapshot} was not restored: {why}"), ""),
                }
            }
            Request::SnapshotRemove { snapshot } => {
                match self.snapshots.remove(peer.uid, &snapshot) {
                    Ok(()) => Reply::Done { note: String::new() },
                    Err(why) => error(why, "strata snapshots lists them"),
                }
            }
            Request::Clone { snapshot, count, name, net, forwards, tcp, copy_dirs } => {
                let wish = CloneWish { count, name, net, forwards, tcp, copy_dirs };
                let terminals = terminals_of(peer);
                match self.snapshots.start_clones(peer.uid, &snapshot, &wish, &terminals, tell) {
                    Ok(all) => revived(all),
                    Err(why) => error(format!("{snapshot} was not cloned: {why}"), ""),
                }
            }
            Request::SnapshotPersist { snapshot } => self.persist(peer, &snapshot, tell),
            Request::SnapshotExport { snapshot, path } => {
                match self.snapshots.export(peer.uid, &snapshot, path.as_ref(), tell) {
                    Ok(note) => Reply::Done { note },
                    Err(why) => error(format!("{snapshot} was not exported: {why}"), ""),
                }
            }
            Request::SnapshotCore { snapshot, pid, path } => {
                match self.snapshots.core(peer.uid, &snapshot, pid, path.as_ref(), tell) {
                    Ok(()) => Reply::Done { note: String::new() },
                    Err(Refused { why, todo }) => {
                        error(format!("process {pid} of {snapshot} was not written: {why}"), todo)
                    }
                }
            }
            Request::SnapshotImport { path, dry_run: true, trust, .. } => {
                match self.snapshots.claims_of(peer.uid, path.as_ref(), trust) {
                    Ok((owner, claims)) => Reply::Claims { owner, claims },
                    Err(why) => error(format!("{path} cannot be looked into: {why}"), ""),
                }
            }
            Request::SnapshotImport { path, name, any_cpu, trust, dry_run: false } => {
                let wish = ImportWish { name, any_cpu, trust };
                let taken = self.snapshots.import(peer.uid, path.as_ref(), wish, tell);
                self.shown(taken, || format!("{path} was not imported"))
            }
        }
    }
}

fn revived(all: Vec<Revived>) -> Reply {
    let mut warnings = Vec::new();
    let mut tenants = Vec::new();
    for Revived { name, pid, forwards, notes } in all {
        tenants.push(RevivedTenant { name, pid, forwards });
        warnings.extend(notes);
    }
    Reply::Revived { tenants, warnings }
}

/// A snapshot that is there from now on.
fn taken(info: SnapshotInfo) -> Reply {
    let copy = |path| format!("a copy of its disk is {path}");
    let warnings = info.disks.iter().map(copy).collect();
    Reply::Snapshot { snapshot: Box::new(info), warnings }
}

/// Whoever asks waits for the answer, with its terminal.
fn terminals_of(peer: Peer) -> Terminals {
    let own = std::fs::metadata(format!("/proc/{}", peer.pid));
    match own {
        Ok(own) if own.uid() == peer.uid => Terminals::of(&[peer.pid]),
        _ => Terminals::default(),
    }
}

fn may(peer: Peer, tenant: &Tenant) -> bool {
    peer.uid == 0 || peer.uid == tenant.record().uid
}

impl Commands {
    pub(crate) fn new(
        tenants: Arc<Tenants>,
        snapshots: Arc<Snapshots>,
        guests: Arc<Guests>,
        pools: Arc<Pools>,
        shares: Arc<Shares>,
        current: &Arc<Current>,
        inheritance: &Inheritance,
    ) -> Self {
        Self {
            tenants,
            snapshots,
            guests,
            pools,
            shares,
            current: Arc::clone(current),
            config_file: inheritance.config_file.clone(),
            private: inheritance.private,
            agent_socket: agent_socket(&inheritance.config),
            supervisor_pid: inheritance.supervisor_pid,
            registry: Arc::clone(&inheritance.registry),
        }
    }

    /// A snapshot as it is now.
    fn shown(&self, outcome: Result<SnapshotInfo, String>, what: impl Fn() -> String) -> Reply {
        match outcome {
            Ok(info) => taken(self.snapshots.with_size(info)),
            Err(why) => error(format!("{}: {why}", what()), ""),
        }
    }

    fn persist(&self, peer: Peer, snapshot: &SnapshotRef, tell: Tell<'_>) -> Reply {
        self.shown(self.snapshots.persist(peer.uid, snapshot, tell), || {
            format!("{snapshot} was not persisted")
        })
    }

    /// A tenant that the caller may command. Others' do not exist for them.
    fn with(&self, peer: Peer, name: &str, act: impl FnOnce(&Arc<Tenant>) -> Reply) -> Reply {
        match self.tenants.resolve(peer.uid, name) {
            Ok(tenant) => act(&tenant),
            Err(why) => error(why, "strata ps lists them"),
        }
    }

    /// The memory of the calling process: nobody asks about another's.
    fn with_caller(
        &self,
        peer: Peer,
        act: impl FnOnce(&Arc<Tenant>, &Arc<Space>) -> Reply,
    ) -> Reply {
        let own = |tenant: Arc<Tenant>| Some((tenant.space_of(peer.pid)?, tenant));
        match self.tenants.list().into_iter().find_map(own) {
            Some((_, tenant)) if !may(peer, &tenant) => {
                error(format!("its tenant does not belong to user {}", peer.uid), "")
            }
            Some((space, tenant)) => act(&tenant, &space),
            None => error(format!("process {} belongs to no tenant", peer.pid), ""),
        }
    }

    /// A snapshot of the tenant that the caller is part of.
    fn snapshot_self(&self, peer: Peer, label: Option<String>, tell: Tell<'_>) -> Reply {
        // Opened before the look, so that it is the process that is found.
        let asking = Pidfd::open(peer.pid);
        let own = |tenant: &Arc<Tenant>| tenant.space_of(peer.pid).is_some();
        let Some(tenant) = self.tenants.list().into_iter().find(own) else {
            return error(format!("process {} belongs to no tenant", peer.pid), "");
        };
        if !may(peer, &tenant) {
            let why = format!("its tenant does not belong to user {}", peer.uid);
            return error(format!("no snapshot: {why}"), "");
        }
        let name = &tenant.record().name;
        let refused = |why: String| error(format!("no snapshot of {name}: {why}"), "");
        match asking
            .map_err(|error| error.to_string())
            .and_then(|asking| self.snapshots.take_for(&asking, &tenant, label, tell))
        {
            Ok(info) => Reply::Snapshot { snapshot: Box::new(info), warnings: Vec::new() },
            Err(why) => refused(why),
        }
    }
}
