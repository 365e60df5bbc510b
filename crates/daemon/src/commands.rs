//! What the command line asks, carried out. A user commands only their own
//! tenants, root all of them (`belonging.rs`).

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_api::{
    MAX_LINE_BYTES, MAX_LISTED, MAX_LISTED_COMMAND_BYTES, MOVE_LENT, MOVE_UNSETTLED,
    PROTOCOL_VERSION, Reply, Request, RevivedTenant, SnapshotInfo, SnapshotRef, Stats,
};
use strata_pager::{Registry, ReleaseRefused, SURVEY_PATIENCE, Space, Tenant};
use strata_snapshot::{Terminals, is_ending};
use strata_sys::peer::{KnownPeer, Peer};
use strata_sys::{
    Pidfd, Priority, SIGHUP, SIGTERM, collect_child, kill_process, status_of_collected,
};
use strata_units::ByteSize;
use strata_units::wire::{ENV_SOCKET, ENV_TOKEN};

use crate::advice;
use crate::control::Handler;
use crate::current::Current;
use crate::doors::agent_socket;
use crate::guests::Guests;
use crate::logbook;
use crate::place;
use crate::pools::Pools;
use crate::reload::Reread;
use crate::shares::{self, Shares};
use crate::snapshots::{CloneWish, ImportWish, MoveHow, Refused, Revived, Snapshots, Tell, Wire};
use crate::statistics;
use crate::supervisor::Inheritance;
use crate::tenants::{Key, Tenants, Wish};
use crate::upgrade;

mod budgets;

pub(crate) use budgets::LEAST_BUDGET;
use budgets::check_budget;

/// Of one page of a list: a part of what a line may have.
const LISTED_BYTES: usize = MAX_LINE_BYTES * 3 / 4;
/// How often `stop` looks whether the processes have gone.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long killed processes may take to be gone.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// A configuration that was read again holds within this, unless the worker is busy.
const FOLLOWED_WITHIN: Duration = Duration::from_secs(2);
/// Within this a restored process that ends can be collected: its memory is taken down.
const COLLECTED_WITHIN: Duration = Duration::from_secs(2);

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

/// Cuts a command line to what is listed of it.
fn cut(command: &mut Vec<String>) {
    let mut left = MAX_LISTED_COMMAND_BYTES;
    for index in 0..command.len() {
        let word = &mut command[index];
        if word.len() >= left {
            let end = (0..=left).rev().find(|&end| word.is_char_boundary(end)).unwrap_or(0);
            word.truncate(end);
            word.push('…');
            command.truncate(index + 1);
            return;
        }
        left = left.saturating_sub(word.len() + 1);
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

    /// What became of a process, for whoever was its parent.
    fn became(&self, peer: Peer, name: &str, ended: u32) -> Reply {
        let tenant = self.tenants.resolve(peer.uid, name).ok();
        let pid = tenant.and_then(|tenant| self.snapshots.first_process(&tenant));
        // It may have ended a moment ago, as a child of this one.
        let pid = pid.filter(|&pid| !is_ending(pid));
        let status = if pid.is_none() { how_it_ended(ended) } else { None };
        Reply::Became { pid, status }
    }

    /// Has the supervisor read the configuration again, if it will be able to.
    fn reload(&self, peer: Peer) -> Reply {
        if peer.uid != 0 && !self.private {
            return error("only root has the configuration read again", "run as root");
        }
        match Reread::of(self.config_file.as_deref(), self.private, &self.current.get()) {
            // A package was upgraded: the new stratad reads it. Not where it says that the
            // new one is to find elsewhere what this one has.
            Ok(reread) if upgrade::is_another() && reread.kept.is_empty() => self.upgrade(peer),
            Ok(reread) => {
                let before = self.registry.config_read().load(Ordering::Acquire);
                kill_process(self.supervisor_pid, SIGHUP);
                let until = Instant::now() + FOLLOWED_WITHIN;
                while Instant::now() < until {
                    // Less, where the worker has not followed the one before yet.
                    if self.registry.config_followed().load(Ordering::Acquire) > before {
                        return Reply::Done { note: reread.note() };
                    }
                    std::thread::sleep(LOOK_EVERY);
                }
                let note = format!("{}, and is about to hold", reread.note());
                Reply::Done { note }
            }
            Err(problems) => {
                let hint = "nothing was changed; strata config check shows it all";
                error(format!("{problems:#}").replace('\n', "; "), hint)
            }
        }
    }

    /// Has the supervisor become the stratad that is installed now, if that can be.
    fn upgrade(&self, peer: Peer) -> Reply {
        if peer.uid != 0 && !self.private {
            return error("only root has stratad upgraded", "run as root");
        }
        match upgrade::check(self.config_file.as_deref(), self.private) {
            Ok(version) => {
                self.registry.upgrades().store(upgrade::THIS, Ordering::Release);
                // As for another configuration: the worker makes room.
                kill_process(std::process::id(), SIGHUP);
                Reply::Done { note: format!("stratad {version} takes over") }
            }
            Err(why) => error(format!("{why:#}").replace('\n', "; "), "stratad goes on as it was"),
        }
    }

    /// A page of the caller's tenants, of root everybody's.
    fn list(&self, peer: Peer, after: Option<&(String, u32)>) -> Reply {
        let own = (peer.uid != 0).then_some(peer.uid);
        if after.is_none() {
            // Of all pages at once: the next ones wait the less.
            let all = self.tenants.list().into_iter();
            let own = |tenant: &Arc<Tenant>| own.is_none_or(|uid| tenant.record().uid == uid);
            all.filter(own).for_each(|tenant| tenant.ask_for_survey());
        }
        let by = Instant::now() + SURVEY_PATIENCE;
        let after = after.map(|(name, uid)| Key::new(*uid, name));
        let (page, mut more) = self.tenants.page(own, after.as_ref(), MAX_LISTED);
        let mut tenants = Vec::new();
        let mut bytes = 0;
        for tenant in &page {
            let mut stats = statistics::by_then(tenant, by);
            // By all of the command line.
            self.guests.add(&mut stats);
            self.pools.add(&mut stats);
            self.snapshots.add(&mut stats);
            cut(&mut stats.command);
            bytes += serde_json::to_vec(&stats).map_or(0, |line| line.len());
            if bytes > LISTED_BYTES && !tenants.is_empty() {
                more = true;
                break;
            }
            tenants.push(stats);
        }
        let last = tenants.last().map(|stats: &Stats| (stats.name.clone(), stats.uid));
        Reply::List { next: last.filter(|_| more), tenants }
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

    fn run(
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
    fn guest_again(
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

    fn stop(&self, tenant: &Arc<Tenant>) -> Reply {
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
}

fn release(tenant: &Arc<Tenant>, patience: Duration) -> Reply {
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
