//! One tenant: its budget, page map, store and spaces, and what the daemon can
//! ask of it. The work is done by its keeper and by its spaces' handlers.

pub(crate) mod account;
pub(crate) mod advisor;
pub(crate) mod capture;
pub(crate) mod claim;
pub(crate) mod copied;
pub(crate) mod ending;
pub(crate) mod excluded;
pub(crate) mod gone_meanwhile;
pub(crate) mod inbox;
pub(crate) mod memory_hold;
pub(crate) mod merged;
pub(crate) mod notes;
pub(crate) mod orders;
pub(crate) mod placement;
mod processes;
pub(crate) mod share;
pub(crate) mod snapshots;
pub(crate) mod space;
pub(crate) mod stall;
pub(crate) mod surveyed;
pub(crate) mod transitions;
pub(crate) mod usage;
pub(crate) mod watching;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use strata_policy::order::TierOrder;
use strata_store::{Descriptors, FileConfig, Fingerprint, Store, StoreConfig, StoreStats};
use strata_sys::{ControlBlock, Process, Range, SeqPacket};
use strata_units::wire::TRANSFER_PAGES;
use strata_units::{PAGE_SIZE, PageId, SpaceId, TenantId};

use crate::map::counters::Counters;
use crate::map::lock;
use crate::map::object::Object;
use crate::map::page_map::PageMap;
use crate::map::registry::{NodeSpec, Registry, TenantRecord};
use crate::tenant::account::Account;
use crate::tenant::advisor::Advisor;
use crate::tenant::ending::Grave;
use crate::tenant::inbox::Inbox;
use crate::tenant::merged::Merged;
use crate::tenant::notes::Notes;
use crate::tenant::placement::Placement;
use crate::tenant::share::Share;
use crate::tenant::snapshots::MapCopy;
use crate::tenant::space::{Agent, AgentRanges, Space};
use crate::tenant::stall::Waiting;
use crate::tenant::surveyed::Surveyed;
use crate::tenant::usage::Shared;
pub use crate::tenant::usage::Usage;
use crate::tenant::watching::Watching;

/// What a new tenant is made of.
#[derive(Clone, Debug)]
pub struct TenantSpec {
    /// Its name.
    pub name: String,
    /// Its owner.
    pub uid: u32,
    /// What its agents name it by; not 0.
    pub token: u64,
    /// The first of those that it is a clone of, by its token; its own, if it is none.
    pub lineage: u64,
    /// The group whose members keep equal pages once, if it is of one.
    pub group: Option<String>,
    /// The program, for display.
    pub command: Vec<String>,
    /// Its DRAM budget.
    pub budget_bytes: u64,
    /// Its own memory cgroup's directory, if one could be made.
    pub cgroup: Option<String>,
    /// Its file tier, if any: directory and limit.
    pub tier: Option<(PathBuf, u64)>,
    /// Its node tier, if any.
    pub node: Option<NodeSpec>,
    /// The order in which its pages go to the tiers below DRAM.
    pub tier_order: TierOrder,
    /// The process that executes the program; none where a rule of the
    /// configuration makes the tenant.
    pub starter: Option<u32>,
}

/// What an agent said of its process.
#[derive(Clone, Debug)]
pub struct Hail {
    /// The process, as the kernel knows it.
    pub process: Arc<Process>,
    /// First byte of the transfer range.
    pub transfer: u64,
    /// The agent's own memory.
    pub own: Range,
    /// Address of its `wire::restart::Restart`; 0: none.
    pub restart: u64,
    /// The version of its library, by `wire::version_number`; 0: it was not told.
    pub library: u64,
}

/// Why `release` was refused. What is stored stays managed; processes of the
/// tenant whose pages were all back before run on without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReleaseRefused {
    /// The machine has not enough DRAM for what is stored.
    NoRoom {
        /// Bytes that would have to come back.
        needed_bytes: u64,
        /// Bytes that the machine could give.
        available_bytes: u64,
    },
    /// Some pages cannot come back, or a process does not let them.
    Stuck {
        /// Pages still stored.
        pages: u64,
    },
    /// Who keeps the tenant is held up, by one of its processes most likely.
    Unanswered,
    /// The tenant ended meanwhile.
    Ended,
}

/// See the module's text.
pub struct Tenant {
    pub(crate) id: TenantId,
    pub(crate) registry: Arc<Registry>,
    pub(crate) record: TenantRecord,
    /// Page map and store: its own, or those of the tenant that it was cloned
    /// from.
    pub(crate) map: Arc<PageMap>,
    pub(crate) store: Arc<Store>,
    /// What is the tenant's in them; none: everything.
    pub(crate) share: Mutex<Option<Share>>,
    /// Counters since the tenant's start.
    pub counters: Counters,
    pub(crate) spaces: RwLock<BTreeMap<SpaceId, Arc<Space>>>,
    /// What its pages cost it.
    pub(crate) account: Account,
    /// All of its pages are on their way back, and there is room for them.
    pub(crate) comes_back: AtomicBool,
    /// Address spaces that outlive their processes.
    pub(crate) memory_held: AtomicUsize,
    /// Its processes are being stopped, since then.
    pub(crate) freeze_began: Mutex<Option<Instant>>,
    /// Registered: near its budget at some time.
    pub(crate) under_pressure: AtomicBool,
    /// Nothing of it has run for a while, and its keeper sleeps until something does.
    pub(crate) stands_still: AtomicBool,
    /// How often that has ended.
    pub(crate) stood_up: AtomicU64,
    /// An alarm is being set for it.
    pub(crate) waits_for_alarm: AtomicBool,
    pub(crate) ended: AtomicBool,
    /// Arrivals that the policy has not seen yet.
    pub(crate) arrivals: Mutex<Vec<PageId>>,
    /// Those of them whose stored copies were kept, for the keeper.
    pub(crate) kept_arrivals: Mutex<Vec<(PageId, Fingerprint)>>,
    pub(crate) usage: Mutex<Usage>,
    pub(crate) shared: Mutex<Shared>,
    pub(crate) merged: Mutex<Merged>,
    /// What processes without an agent cost.
    pub(crate) unattended_bytes: AtomicU64,
    /// What its swap disk costs, in a process that is not the tenant's.
    pub(crate) swap_bytes: AtomicU64,
    pub(crate) survey: Surveyed,
    pub(crate) waiting: Waiting,
    pub(crate) advisor: Advisor,
    pub(crate) inbox: Mutex<Inbox>,
    pub(crate) inbox_filled: Condvar,
    pub(crate) keeper: Mutex<Option<JoinHandle<()>>>,
    /// What the user should know.
    pub(crate) notes: Mutex<Notes>,
    pub(crate) had_space: AtomicBool,
    /// Whole snapshots of its address spaces, by number.
    pub(crate) snapshots: Mutex<BTreeMap<SpaceId, Arc<Object>>>,
    /// Page maps for those that are to be restored without waiting.
    pub(crate) ready: Mutex<BTreeMap<SpaceId, MapCopy>>,
    /// Agents of processes that are ending: one that was restored is this
    /// daemon's child, and has to be collected.
    pub(crate) ending_agents: Mutex<Vec<Arc<Agent>>>,
    /// What is left of them in the page map.
    pub(crate) graves: Mutex<Vec<Grave>>,
    /// How many [`crate::Revival`]s there are.
    pub(crate) revivals: AtomicUsize,
    /// What its programs have set for their memory, in sum.
    pub(crate) placement: Placement,
    /// Agents whose spaces were released.
    pub(crate) released_agents: Mutex<Vec<Arc<Agent>>>,
    /// What is being watched of it, and what was seen.
    pub(crate) watching: Mutex<Watching>,
}

impl Tenant {
    /// Makes a tenant. Its keeper starts with its first process.
    pub fn create(registry: &Arc<Registry>, spec: TenantSpec) -> io::Result<Arc<Self>> {
        let map = Arc::new(PageMap::create()?);
        let store = Store::create(store_config(&spec.tier)).map_err(io::Error::other)?;
        let family = spec.token;
        Self::make(registry, spec, family, map, Arc::new(store))
    }

    /// `family` names those that share map and store.
    pub(crate) fn make(
        registry: &Arc<Registry>,
        spec: TenantSpec,
        family: u64,
        map: Arc<PageMap>,
        store: Arc<Store>,
    ) -> io::Result<Arc<Self>> {
        let started =
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64();
        let record = TenantRecord {
            name: spec.name,
            uid: spec.uid,
            token: spec.token,
            lineage: spec.lineage,
            group: spec.group,
            command: spec.command,
            started,
            cgroup: spec.cgroup,
            tier: spec.tier.map(|(path, limit)| (path.to_string_lossy().into_owned(), limit)),
            node: spec.node,
            tier_order: spec.tier_order,
            starter: spec.starter,
            family,
            map_fds: map.fds(),
            store_fds: store_fds(&store),
        };
        let id = registry.add_tenant(&record, spec.budget_bytes).ok_or_else(|| {
            io::Error::new(io::ErrorKind::OutOfMemory, "this daemon has 1024 tenants already")
        })?;
        Ok(Self::assemble(registry, id, record, map, store))
    }

    pub(crate) fn assemble(
        registry: &Arc<Registry>,
        id: TenantId,
        record: TenantRecord,
        map: Arc<PageMap>,
        store: Arc<Store>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            registry: Arc::clone(registry),
            record,
            map,
            store,
            share: Mutex::default(),
            counters: Counters::new(Arc::clone(registry), id),
            spaces: RwLock::default(),
            account: Account::default(),
            comes_back: AtomicBool::new(false),
            memory_held: AtomicUsize::new(0),
            freeze_began: Mutex::default(),
            under_pressure: AtomicBool::new(false),
            stands_still: AtomicBool::new(false),
            stood_up: AtomicU64::new(0),
            waits_for_alarm: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            arrivals: Mutex::default(),
            kept_arrivals: Mutex::default(),
            usage: Mutex::default(),
            shared: Mutex::default(),
            merged: Mutex::default(),
            unattended_bytes: AtomicU64::new(0),
            swap_bytes: AtomicU64::new(0),
            survey: Surveyed::default(),
            waiting: Waiting::default(),
            advisor: Advisor::default(),
            inbox: Mutex::default(),
            inbox_filled: Condvar::new(),
            keeper: Mutex::default(),
            notes: Mutex::default(),
            had_space: AtomicBool::new(false),
            snapshots: Mutex::default(),
            ready: Mutex::default(),
            ending_agents: Mutex::default(),
            graves: Mutex::default(),
            revivals: AtomicUsize::new(0),
            released_agents: Mutex::default(),
            placement: Placement::default(),
            watching: Mutex::default(),
        })
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> TenantId {
        self.id
    }

    /// What is fixed about it.
    #[must_use]
    pub fn record(&self) -> &TenantRecord {
        &self.record
    }

    /// Its budget, bytes.
    #[must_use]
    pub fn budget_bytes(&self) -> u64 {
        self.registry.budget(self.id).load(Ordering::Relaxed)
    }

    /// Its swap disk costs so much; its keeper looks at it if that has changed much.
    pub fn set_swap_bytes(&self, bytes: u64) {
        const MUCH: u64 = 1 << 20;
        let before = self.swap_bytes.swap(bytes, Ordering::Relaxed);
        if bytes.abs_diff(before) >= MUCH {
            self.wake_keeper();
        }
    }

    /// Changes the budget; the keeper follows at once.
    pub fn set_budget(&self, bytes: u64) {
        self.registry.budget(self.id).store(bytes, Ordering::Relaxed);
        self.wake_keeper();
    }

    /// Whether `release` was carried out.
    #[must_use]
    pub fn is_released(&self) -> bool {
        self.registry.released(self.id).load(Ordering::Relaxed) != 0
    }

    /// Whether anything is registered.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        self.under_pressure.load(Ordering::Relaxed) && !self.is_released()
    }

    /// Over its budget with nothing left to evict.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.account.may_exceed()
    }

    /// Whether it was taken down.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// What it cost when the keeper last looked.
    #[must_use]
    pub fn usage(&self) -> Usage {
        *lock(&self.usage)
    }

    /// Managed pages in DRAM and with an entry in the page map.
    #[must_use]
    pub fn pages(&self) -> (u64, u64) {
        let managed = self.leaf_count() * strata_units::PAGES_PER_LEAF as u64;
        (self.account.resident_pages().max(0) as u64, managed)
    }

    /// The store's figures, as far as they are this tenant's.
    #[must_use]
    pub fn store_stats(&self) -> StoreStats {
        let stats = self.store.stats();
        match *lock(&self.share) {
            Some(share) => share.of(stats),
            None => stats,
        }
    }

    /// How its file tier is read.
    #[must_use]
    pub fn file_access(&self) -> &'static str {
        if !self.store.has_slow_tier() {
            return if self.store.has_dax_tier() { "DAX" } else { "tmpfs" };
        }
        static RING: OnceLock<bool> = OnceLock::new();
        match RING.get_or_init(|| strata_sys::probe::io_uring().is_ok()) {
            true => "io_uring",
            false => "threads",
        }
    }

    // ----- spaces -----

    pub(crate) fn space_list(&self) -> Vec<Arc<Space>> {
        self.spaces.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The space `id`, if it is this tenant's.
    #[must_use]
    pub fn space(&self, id: SpaceId) -> Option<Arc<Space>> {
        self.spaces.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// How many address spaces it has: what its processes cost in threads and
    /// descriptors goes by that.
    #[must_use]
    pub fn space_count(&self) -> usize {
        self.spaces.read().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Agent {
    pub(crate) fn new(control: ControlBlock, socket: SeqPacket, hail: Hail) -> Self {
        let end = hail.transfer.saturating_add((TRANSFER_PAGES * PAGE_SIZE) as u64);
        Self {
            control,
            ranges: AgentRanges { transfer: Range { start: hail.transfer, end }, own: hail.own },
            socket: Mutex::new(Some(socket)),
            process: hail.process,
            restart: (hail.restart != 0).then_some(hail.restart),
            library: hail.library,
        }
    }
}

/// Numbers of a store's descriptors: table, data and, perhaps, tier file.
fn store_fds(store: &Store) -> Vec<RawFd> {
    let Descriptors { table, data, file } = store.descriptors();
    [Some(table), Some(data), file].into_iter().flatten().map(|fd| fd.as_raw_fd()).collect()
}

pub(crate) fn store_config(tier: &Option<(PathBuf, u64)>) -> StoreConfig {
    StoreConfig {
        compressed_limit: None,
        file: tier.as_ref().map(|(path, limit_bytes)| FileConfig {
            path: path.clone(),
            limit_bytes: *limit_bytes,
        }),
    }
}

impl std::fmt::Debug for Tenant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tenant").field("id", &self.id).field("name", &self.record.name).finish()
    }
}
