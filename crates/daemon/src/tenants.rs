//! The tenants of this daemon by owner and name and by token, and their coming and
//! going. How one is made is in `tenants/making.rs`, who may join and command which in
//! `belonging.rs`.

mod making;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use strata_pager::{Claim, MOST_SPACES, MOST_TENANTS, NodeSpec, RESERVED_SPACES, Registry, Tenant};
use strata_policy::order::TierOrder;
use strata_sys::{Pidfd, Priority};

use crate::cgroup::Cgroups;
use crate::config::Config;
use crate::current::Current;
use crate::logbook;
use crate::quota::RESERVED_TENANTS;
use crate::supervisor::Inheritance;
use crate::turnstile::Turnstile;

/// What a new tenant is asked to be.
#[derive(Debug)]
pub(crate) struct Wish {
    pub(crate) name: Option<String>,
    pub(crate) uid: u32,
    pub(crate) command: Vec<String>,
    pub(crate) budget_bytes: u64,
    /// Of the host's DRAM; none: its budget does not move.
    pub(crate) claim: Option<Claim>,
    pub(crate) tier_limit: Option<u64>,
    /// None: the configuration's.
    pub(crate) tier_order: Option<TierOrder>,
    /// The process that will execute the program, as it asked; none for a rule's tenant.
    pub(crate) starter: Option<(u32, Pidfd)>,
    /// A rule's programs stay in the cgroup that their service put them into.
    pub(crate) of_rule: bool,
}

/// A program that executes another one has no agent meanwhile, and takes no longer.
const EXECUTING: Duration = Duration::from_secs(2);
/// A process that has executed another program is attached anew; whoever was just
/// reading its memory before keeps that for a moment.
const FORGETTING: Duration = Duration::from_secs(1);
/// How often it is looked meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Two users may each have a tenant of one name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Key {
    name: String,
    uid: u32,
}

impl Key {
    pub(crate) fn new(uid: u32, name: &str) -> Self {
        Self { name: name.to_owned(), uid }
    }

    fn of(tenant: &Tenant) -> Self {
        Self::new(tenant.record().uid, &tenant.record().name)
    }
}

#[derive(Default)]
struct Known {
    by_key: BTreeMap<Key, Entry>,
    /// A private daemon that is ending takes no more.
    closed: bool,
}

struct Entry {
    tenant: Arc<Tenant>,
    /// The process that `strata run` became.
    starter: Option<Pidfd>,
    /// Programs that say hello just now.
    arriving: Arc<AtomicUsize>,
    /// Since when it has nobody.
    empty_since: Option<Instant>,
    /// Made for a program that says hello: without one it is nobody's.
    of_rule: bool,
}

/// How it is with a name that a new tenant wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Taken {
    Free,
    /// Its processes have ended, and it is being taken down.
    Ending,
    Living,
    /// It can come back.
    HasSnapshots,
}

/// A program, or the memory of a snapshot, is about to become the tenant's: it does not end
/// before.
pub(crate) struct Arriving {
    pub(crate) tenant: Arc<Tenant>,
    count: Arc<AtomicUsize>,
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Release);
    }
}

pub(crate) struct Tenants {
    known: Mutex<Known>,
    registry: Arc<Registry>,
    cgroups: Cgroups,
    /// Where the file tier is.
    tier: Option<PathBuf>,
    node: Option<NodeSpec>,
    current: Arc<Current>,
    /// Whose are all of a private daemon's means.
    private_uid: Option<u32>,
    /// Held by whoever attaches a process: no process is attached twice.
    attaching: Mutex<()>,
    /// Whoever makes a tenant goes through it: no name is given twice.
    making: Turnstile,
}

impl Tenants {
    pub(crate) fn new(inheritance: &Inheritance, current: &Arc<Current>) -> Self {
        use std::os::unix::fs::MetadataExt;
        let Config { tier_path, node, .. } = &inheritance.config;
        let own_uid = std::fs::metadata("/proc/self").map_or(0, |own| own.uid());
        let records = inheritance.registry.tenants();
        let groups = records.into_iter().filter_map(|(_, record)| record.cgroup);
        let groups: Vec<_> = groups.map(PathBuf::from).collect();
        Self {
            known: Mutex::default(),
            registry: Arc::clone(&inheritance.registry),
            cgroups: Cgroups::find(inheritance.supervisor_pid, &groups),
            tier: tier_path.clone(),
            node: node.map(|node| NodeSpec {
                node: node.number,
                home: node.home,
                limit_bytes: node.limit.0,
                bytes_per_second: node.bandwidth.0,
            }),
            current: Arc::clone(current),
            private_uid: inheritance.private.then_some(own_uid),
            attaching: Mutex::default(),
            making: Turnstile::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A tenant that an earlier worker made.
    pub(crate) fn adopt(&self, tenant: &Arc<Tenant>) {
        let starter = tenant.record().starter.and_then(|pid| Pidfd::open(pid).ok());
        let entry = Entry::new(Arc::clone(tenant), starter, false);
        if let Some(directory) = &tenant.record().cgroup {
            self.cgroups.hold(directory.as_ref());
        }
        self.lock().by_key.insert(Key::of(tenant), entry);
    }

    /// All, in order of name.
    pub(crate) fn list(&self) -> Vec<Arc<Tenant>> {
        self.lock().by_key.values().map(|entry| Arc::clone(&entry.tenant)).collect()
    }

    /// At most so many behind `after`, which need not be there, in order; of `uid`, or
    /// everybody's. And whether there are more.
    pub(crate) fn page(
        &self,
        uid: Option<u32>,
        after: Option<&Key>,
        most: usize,
    ) -> (Vec<Arc<Tenant>>, bool) {
        use std::ops::Bound;
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let known = self.lock();
        let own = |entry: &&Entry| uid.is_none_or(|uid| entry.tenant.record().uid == uid);
        let behind = known.by_key.range((from, Bound::Unbounded)).map(|(_, entry)| entry);
        let mut listed = behind.filter(own).map(|entry| Arc::clone(&entry.tenant));
        let page: Vec<_> = listed.by_ref().take(most).collect();
        (page, listed.next().is_some())
    }

    /// The user's tenant of this name.
    pub(crate) fn get(&self, uid: u32, name: &str) -> Option<Arc<Tenant>> {
        self.lock().by_key.get(&Key::new(uid, name)).map(|entry| Arc::clone(&entry.tenant))
    }

    pub(crate) fn by_token(&self, token: u64) -> Option<Arc<Tenant>> {
        let known = self.lock();
        let mut tenants = known.by_key.values().map(|entry| &entry.tenant);
        tenants.find(|tenant| token != 0 && tenant.record().token == token).cloned()
    }

    /// The living process that `strata run` was and the program is.
    pub(super) fn is_starter(&self, tenant: &Tenant, pid: u32) -> bool {
        if tenant.record().starter != Some(pid) {
            return false;
        }
        let known = self.lock();
        let starter = known.by_key.get(&Key::of(tenant)).and_then(|entry| entry.starter.as_ref());
        starter.is_some_and(|starter| !starter.has_exited())
    }

    /// By the kernel: nobody else can put a process there.
    pub(super) fn is_in_cgroup(&self, tenant: &Tenant, pid: u32) -> bool {
        let directory = tenant.record().cgroup.as_ref();
        directory.is_some_and(|directory| self.cgroups.holds(directory.as_ref(), pid))
    }

    /// Whether quotas are not for this user: root, and whose private daemon it is.
    fn is_free(&self, uid: u32) -> bool {
        uid == 0 || self.private_uid == Some(uid)
    }

    /// Attaches the process `pid` to a tenant by `attach`, unless its user has as many
    /// as may be, or it is attached already. The error is one line for the user.
    pub(crate) fn attach<T>(
        &self,
        tenant: &Tenant,
        pid: u32,
        attach: impl FnOnce() -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let refused =
            |why: String| Err(std::io::Error::new(std::io::ErrorKind::QuotaExceeded, why));
        let until = Instant::now() + FORGETTING;
        let (_alone, all) = loop {
            let alone = self.attaching.lock().unwrap_or_else(PoisonError::into_inner);
            let all = self.list();
            if all.iter().all(|tenant| tenant.space_of(pid).is_none()) {
                break (alone, all);
            }
            drop(alone);
            if Instant::now() >= until {
                return refused(format!("process {pid} is attached already"));
            }
            std::thread::sleep(LOOK_EVERY);
        };
        let uid = tenant.record().uid;
        if !self.is_free(uid) {
            let count = |tenants: &mut dyn Iterator<Item = &Arc<Tenant>>| -> usize {
                tenants.map(|tenant| tenant.space_count()).sum()
            };
            let own = count(&mut all.iter().filter(|tenant| tenant.record().uid == uid));
            let quota = self.current.get().quota;
            if own >= quota.processes as usize {
                return refused(quota.no_more_processes(uid));
            }
            let taken = count(&mut all.iter());
            if taken as u32 + RESERVED_SPACES >= MOST_SPACES {
                return refused(
                    "stratad manages as many processes as it may for users other than root".into(),
                );
            }
        }
        attach()
    }

    /// Refuses one more tenant of this user, if need be.
    fn check_quota(&self, known: &Known, uid: u32) -> Result<(), String> {
        if self.is_free(uid) {
            return Ok(());
        }
        let own = known.by_key.keys().filter(|key| key.uid == uid).count();
        let quota = self.current.get().quota;
        if own >= quota.tenants as usize {
            return Err(quota.no_more_tenants(uid));
        }
        if known.by_key.len() + RESERVED_TENANTS >= MOST_TENANTS as usize {
            return Err("stratad has as many tenants as it may for users other than root".into());
        }
        Ok(())
    }

    /// Has `tenant` wait for a program, or for memory. None: it has been taken down.
    pub(crate) fn await_arrival(&self, tenant: Arc<Tenant>) -> Option<Arriving> {
        let known = self.lock();
        let entry = known.by_key.get(&Key::of(&tenant))?;
        if !Arc::ptr_eq(&entry.tenant, &tenant) {
            return None;
        }
        entry.arriving.fetch_add(1, Ordering::Relaxed);
        Some(Arriving { tenant, count: Arc::clone(&entry.arriving) })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().by_key.is_empty()
    }

    pub(crate) fn count(&self) -> usize {
        self.lock().by_key.len()
    }

    /// No more tenants from now on, if there are none.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut known = self.lock();
        known.closed |= known.by_key.is_empty();
        known.closed
    }

    /// Takes a tenant down that was made in vain.
    pub(crate) fn discard(&self, tenant: &Tenant) {
        let entry = self.lock().by_key.remove(&Key::of(tenant));
        if let Some(entry) = entry {
            self.take_down(&entry.tenant);
        }
    }

    /// Removes what ended tenants have left, before the daemon ends.
    pub(crate) fn finish(&self) {
        self.cgroups.finish();
    }

    fn take_down(&self, tenant: &Arc<Tenant>) {
        tenant.end();
        let record = tenant.record();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = (now.as_secs_f64() - record.started).max(0.0);
        let line =
            format!("tenant {} ended after {seconds:.1} s, user {}", record.name, record.uid);
        logbook::tell_of(record.uid, "ended", Priority::Notice, line);
        if let Some(directory) = &tenant.record().cgroup {
            self.cgroups.release(directory.as_ref());
        }
    }

    /// Ends every tenant whose processes are all gone; whether there was any.
    pub(crate) fn end_finished(&self) -> bool {
        let finished: Vec<Arc<Tenant>> = {
            let mut known = self.lock();
            let ends = |(key, entry): (&Key, &mut Entry)| entry.is_finished().then(|| key.clone());
            let keys: Vec<Key> = known.by_key.iter_mut().filter_map(ends).collect();
            keys.iter().filter_map(|key| known.by_key.remove(key)).map(|one| one.tenant).collect()
        };
        for tenant in &finished {
            tenant.begin_to_end();
        }
        for tenant in &finished {
            self.take_down(tenant);
        }
        self.cgroups.remove_left();
        !finished.is_empty()
    }
}

impl Entry {
    fn new(tenant: Arc<Tenant>, starter: Option<Pidfd>, of_rule: bool) -> Self {
        Self { tenant, starter, arriving: Arc::default(), empty_since: None, of_rule }
    }

    fn taken(&mut self) -> Taken {
        if self.is_finished() {
            return Taken::Free;
        }
        let starter_gone = self.starter.as_ref().is_none_or(Pidfd::has_exited);
        let arriving = self.arriving.load(Ordering::Acquire) > 0;
        if !starter_gone || self.waits_for_first() || self.tenant.has_living_process() {
            Taken::Living
        } else if arriving
            || self.tenant.attachment().1
            || self.tenant.snapshot_memories().is_empty()
        {
            // Who arrives may have ended in the middle of it. The last: taken down, all but
            // for somebody noticing.
            Taken::Ending
        } else {
            Taken::HasSnapshots
        }
    }

    fn waits_for_first(&self) -> bool {
        let (attached_once, _) = self.tenant.attachment();
        self.tenant.record().starter.is_none() && !attached_once && !self.of_rule
    }

    fn is_finished(&mut self) -> bool {
        if !self.is_empty() {
            self.empty_since = None;
            return false;
        }
        let since = *self.empty_since.get_or_insert_with(Instant::now);
        !self.tenant.has_ending_process() || since.elapsed() > EXECUTING
    }

    fn is_empty(&self) -> bool {
        let (_, attached_now) = self.tenant.attachment();
        !attached_now
            && self.arriving.load(Ordering::Acquire) == 0
            && self.starter.as_ref().is_none_or(Pidfd::has_exited)
            && !self.waits_for_first()
            && !self.tenant.has_released_process()
            // It can come back.
            && self.tenant.snapshot_memories().is_empty()
    }
}

/// An error and its causes, on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let line = inner.to_string();
        if !text.contains(&line) {
            text.push_str(": ");
            text.push_str(&line);
        }
        cause = inner.source();
    }
    text
}
