//! Pools: caches that guests' disks are read through. Which there are, whose they are, and
//! what they may have; what a pool does is in `strata-guest`.
//!
//! A pool's memory is this worker's, and gone with it: there is nothing in it that is not on
//! a disk. That there is a pool, and what it may cost, lies in a file beside the daemon's
//! sockets, for the next worker. Pages go to and come from the owner's processes alone.
//!
//! Guests' swap disks are listed with the pools, and are elsewhere ([`swaps`]).

mod door;
mod swaps;

use self::swaps::Swaps;

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use strata_api::{PoolAdmission, PoolStats, Reply, Stats};
use strata_guest::{Admission, Pool};
use strata_sys::peer::user_id;
use strata_sys::{Priority, available_bytes, log, total_bytes};
use strata_units::{ByteSize, PAGE_SIZE};

use crate::commands::error;
use crate::current::Current;
use crate::lock::lock;
use crate::supervisor::Inheritance;
use crate::tenants::Tenants;

/// The pools' records, in the directory of the sockets.
const DIRECTORY: &str = "pools";
/// How often pools are tended, and it is looked how much memory the machine has left.
const TEND_EVERY: Duration = Duration::from_millis(250);
/// Below this part of the machine's memory all pools hand theirs back, and take nothing
/// before twice as much is left.
const LITTLE_LEFT: u64 = 32;
/// Without a limit a pool gets this part of the machine's memory. All pools of a user may
/// have a quarter, and all pools half of it.
const USUAL_PART: u64 = 16;
const USERS_PART: u64 = 4;
const POOLS_PART: u64 = 2;
const LEAST_LIMIT: ByteSize = ByteSize(16 << 20);
const SEE_THEM: &str = "strata pool ls lists them";

#[derive(Clone, Serialize, Deserialize)]
struct Record {
    limit_bytes: u64,
    admission: PoolAdmission,
}

struct Known {
    record: Record,
    pool: Arc<Pool>,
    connections: Arc<AtomicU64>,
}

/// All of them.
pub(crate) struct Pools {
    directory: PathBuf,
    current: Arc<Current>,
    total_bytes: u64,
    /// By owner and name.
    known: Mutex<BTreeMap<(u32, String), Known>>,
    /// The machine has little memory left.
    closed: AtomicBool,
    swaps: Arc<Swaps>,
}

fn admission(said: PoolAdmission) -> Admission {
    match said {
        PoolAdmission::Room => Admission::Room,
        PoolAdmission::First => Admission::First,
        PoolAdmission::Second => Admission::Second,
    }
}

impl Pools {
    /// Those that an earlier worker had, empty; and threads that tend and serve them.
    pub(crate) fn start(
        inheritance: &Inheritance,
        tenants: &Arc<Tenants>,
        current: &Arc<Current>,
    ) -> io::Result<Arc<Self>> {
        let directory = inheritance.config.socket_dir.join(DIRECTORY);
        let charged = Arc::clone(tenants);
        let swaps = Swaps::new(Box::new(move |uid, guest, bytes| {
            let tenant = charged.get(uid, guest);
            tenant.inspect(|tenant| tenant.set_swap_bytes(bytes)).is_some()
        }));
        let pools = Self::of_directory(directory, current, total_bytes()?, swaps);
        let pools = Arc::new(pools);
        let tending = Arc::clone(&pools);
        std::thread::Builder::new().name("pools".into()).spawn(move || {
            loop {
                std::thread::sleep(TEND_EVERY);
                tending.tend();
            }
        })?;
        door::open(inheritance, &pools)?;
        Ok(pools)
    }

    /// With those whose records are in a directory.
    fn of_directory(
        directory: PathBuf,
        current: &Arc<Current>,
        total_bytes: u64,
        swaps: Arc<Swaps>,
    ) -> Self {
        let (known, closed) = (Mutex::default(), AtomicBool::new(false));
        let current = Arc::clone(current);
        let pools = Self { directory, current, total_bytes, known, closed, swaps };
        pools.recover();
        pools
    }

    fn recover(&self) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let file = entry.file_name();
            let key = file.to_str().and_then(|file| {
                let (uid, name) = file.split_once('.')?;
                let is_name = strata_api::name_problem(name).is_none();
                Some((uid.parse().ok()?, name.to_owned())).filter(|_| is_name)
            });
            let Some(key) = key else { continue };
            let read = fs::read(entry.path()).map_err(|error| error.to_string());
            let read = read.and_then(|text| {
                let record = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
                Self::known(record)
            });
            match read {
                Ok(known) => drop(lock(&self.known).insert(key, known)),
                Err(why) => {
                    log(Priority::Warning, format_args!("the pool {} is lost: {why}", key.1));
                }
            }
        }
    }

    fn known(record: Record) -> Result<Known, String> {
        let pool = Pool::new(record.limit_bytes, admission(record.admission));
        let pool = Arc::new(pool.map_err(|error| crate::tenants::chain(&error))?);
        Ok(Known { record, pool, connections: Arc::default() })
    }

    fn record_path(&self, (uid, name): &(u32, String)) -> PathBuf {
        self.directory.join(format!("{uid}.{name}"))
    }

    /// Makes one for user `uid`.
    pub(crate) fn create(
        &self,
        uid: u32,
        name: &str,
        limit_bytes: Option<u64>,
        admission: PoolAdmission,
    ) -> Reply {
        let what = format!("the pool {name} was not made");
        let refuse = |why: String, todo: &str| error(format!("{what}: {why}"), todo);
        let usual = (self.total_bytes / USUAL_PART).max(LEAST_LIMIT.0);
        let limit = ByteSize(limit_bytes.unwrap_or(usual));
        if limit < LEAST_LIMIT {
            return refuse(
                format!("{limit} is too little"),
                &format!("give {LEAST_LIMIT} or more"),
            );
        }
        let key = (uid, name.to_owned());
        let mut known = lock(&self.known);
        if known.contains_key(&key) {
            return refuse("you have one of that name".into(), SEE_THEM);
        }
        let sum = |whose: &dyn Fn(u32) -> bool| -> u64 {
            let limits = known.iter().filter(|((uid, _), _)| whose(*uid));
            limits.map(|(_, known)| known.record.limit_bytes).sum()
        };
        let count = known.keys().filter(|(owner, _)| *owner == uid).count();
        let quota = self.current.get().quota;
        if uid != 0 && count >= quota.pools as usize {
            return refuse(quota.no_more_pools(uid), "");
        }
        let all = sum(&|_| true).saturating_add(limit.0);
        let own = sum(&|owner| owner == uid).saturating_add(limit.0);
        let most_of_one = self.total_bytes / USERS_PART;
        if uid != 0 && own > most_of_one {
            let most = ByteSize(most_of_one);
            let why =
                format!("all pools of a user may cost {most}, a quarter of the machine's memory");
            return refuse(why, "give a smaller --limit, or remove a pool");
        }
        let most = self.total_bytes / POOLS_PART;
        if all > most {
            let why =
                format!("all pools may cost {}, half of the machine's memory", ByteSize(most));
            return refuse(why, "give a smaller --limit, or remove a pool");
        }
        let record = Record { limit_bytes: limit.0, admission };
        let made = Self::known(record.clone()).and_then(|made| {
            made.pool.set_closed(self.closed.load(Relaxed));
            self.write(&key, &record).map_err(|error| error.to_string()).map(|()| made)
        });
        match made {
            Ok(made) => {
                known.insert(key, made);
                Reply::Done { note: String::new() }
            }
            Err(why) => refuse(why, "see to stratad's socket_dir, and to free memory"),
        }
    }

    fn write(&self, key: &(u32, String), record: &Record) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let text = serde_json::to_vec(record).map_err(io::Error::other)?;
        // Whole or not at all.
        let next = self.directory.join(".next");
        fs::write(&next, text)?;
        fs::rename(next, self.record_path(key))
    }

    /// The pools of user `uid`, of root all; swap disks of their guests behind them.
    pub(crate) fn list(&self, uid: u32) -> Reply {
        Reply::Pools { pools: self.all(uid) }
    }

    /// The same, as they are.
    pub(crate) fn all(&self, uid: u32) -> Vec<PoolStats> {
        let known = lock(&self.known);
        let own = known.iter().filter(|((owner, _), _)| uid == 0 || *owner == uid);
        let caches = own.map(|(key, known)| self.stats(key, known));
        caches.chain(self.swaps.list(uid)).collect()
    }

    /// Adds what is known of a guest's swap disk to what is known of the guest.
    pub(crate) fn add(&self, stats: &mut Stats) {
        self.swaps.add(stats);
    }

    fn stats(&self, (uid, name): &(u32, String), known: &Known) -> PoolStats {
        let figures = known.pool.figures();
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        PoolStats {
            name: name.clone(),
            uid: *uid,
            guest: None,
            admission: known.record.admission,
            limit_bytes: figures.limit_bytes,
            cost_bytes: figures.cost_bytes,
            page_bytes: bytes(figures.pages),
            deduplicated_bytes: bytes(figures.deduplicated_pages),
            fill_bytes: bytes(figures.fill_pages),
            files: figures.files,
            connections: known.connections.load(Relaxed),
            closed: self.closed.load(Relaxed),
            gets_total: figures.gets,
            hits_total: figures.hits,
            puts_total: figures.puts,
            refused_total: figures.refused,
            passed_over_total: figures.passed_over,
            forgotten_total: figures.forgotten,
            evicted_total: figures.evicted,
            corrupt_total: figures.corrupt,
            handed_back_total: figures.handed_back,
            handed_back_bytes_total: figures.handed_back_bytes,
        }
    }

    /// The pool that `name` means when user `uid` says it: their own; or, said by root,
    /// `USER:NAME` of anybody's.
    fn resolve(&self, uid: u32, name: &str) -> Result<(u32, String), Reply> {
        let key = match name.split_once(':') {
            None => Some((uid, name.to_owned())),
            Some((user, own)) => {
                let owner = match user.parse() {
                    Ok(owner) => Some(owner),
                    Err(_) if uid == 0 => user_id(user).ok().flatten(),
                    Err(_) => None,
                };
                let owner = owner.filter(|&owner| uid == 0 || uid == owner);
                owner.map(|owner| (owner, own.to_owned()))
            }
        };
        let known = lock(&self.known);
        if let Some(key) = key.as_ref().filter(|key| known.contains_key(key)) {
            return Ok(key.clone());
        }
        Err(match key.and_then(|key| self.swaps.guest_of(&key)) {
            Some(guest) => error(
                format!(
                    "{name} is what the guest {guest} has swapped out: none of it can be dropped"
                ),
                "it ends with the guest; to have less of it, switch swap off in the guest (swapoff)",
            ),
            None => error(format!("there is no pool {name}"), SEE_THEM),
        })
    }

    /// Has a pool hand its memory back.
    pub(crate) fn empty(&self, uid: u32, name: &str) -> Reply {
        let key = match self.resolve(uid, name) {
            Ok(key) => key,
            Err(refused) => return refused,
        };
        let pool = lock(&self.known).get(&key).map(|known| Arc::clone(&known.pool));
        match pool.map(|pool| pool.empty()) {
            Some(Ok(bytes)) => {
                Reply::Done { note: format!("{} were handed back", ByteSize(bytes)) }
            }
            Some(Err(why)) => error(
                format!("the pool {name} was not emptied: {}", crate::tenants::chain(&why)),
                "",
            ),
            None => error(format!("there is no pool {name}"), SEE_THEM),
        }
    }

    /// Removes a pool.
    pub(crate) fn remove(&self, uid: u32, name: &str) -> Reply {
        let key = match self.resolve(uid, name) {
            Ok(key) => key,
            Err(refused) => return refused,
        };
        let mut known = lock(&self.known);
        if let Err(why) = fs::remove_file(self.record_path(&key))
            && why.kind() != io::ErrorKind::NotFound
        {
            return error(format!("the pool {name} was not removed: {why}"), "");
        }
        let removed = known.remove(&key);
        drop(known);
        if let Some(removed) = removed {
            // Before its memory goes, which those who are connected still hold.
            removed.pool.end();
            let _ = removed.pool.empty();
        }
        Reply::Done { note: String::new() }
    }

    /// The pool for a process of user `uid`: that user's own, and nobody else's, for who
    /// puts pages there decides what is read.
    fn of(&self, uid: u32, name: &str) -> Result<(Arc<Pool>, Arc<AtomicU64>), String> {
        let known = lock(&self.known);
        let Some(known) = known.get(&(uid, name.to_owned())) else {
            return Err(format!("you have no pool {name}: strata pool create makes one"));
        };
        Ok((Arc::clone(&known.pool), Arc::clone(&known.connections)))
    }

    fn tend(&self) {
        let pools: Vec<Arc<Pool>> =
            lock(&self.known).values().map(|known| Arc::clone(&known.pool)).collect();
        if pools.is_empty() {
            return;
        }
        let least = self.total_bytes / LITTLE_LEFT;
        let left = available_bytes().unwrap_or(u64::MAX);
        if left < least && !self.closed.swap(true, Relaxed) {
            let mut bytes = 0;
            for pool in &pools {
                pool.set_closed(true);
                bytes += pool.empty().unwrap_or(0);
            }
            let (left, bytes) = (ByteSize(left), ByteSize(bytes));
            let line = format!("the machine has {left} left: the pools handed {bytes} back");
            log(Priority::Notice, line);
            return;
        }
        if left > least * 2 && self.closed.swap(false, Relaxed) {
            pools.iter().for_each(|pool| pool.set_closed(false));
        }
        pools.iter().for_each(|pool| pool.tend());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Machine};
    use crate::quota::Quota;

    const MIB: u64 = 1 << 20;

    fn refusal(reply: Reply) -> String {
        match reply {
            Reply::Error { message, .. } => message,
            other => panic!("it was not refused: {other:?}"),
        }
    }

    fn names(pools: &Pools, uid: u32) -> Vec<String> {
        let Reply::Pools { pools } = pools.list(uid) else { panic!("no list") };
        pools.into_iter().map(|pool| pool.name).collect()
    }

    #[test]
    fn pools_are_bounded_are_their_owners_and_outlive_the_worker() {
        let directory = std::env::temp_dir().join(format!("strata-pools-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        let machine = Machine::this().expect("this machine");
        let quota = Quota { pools: 2, ..Quota::default() };
        let current = Current::new(Config { quota, ..Config::defaults(&machine) });
        let swaps = || Swaps::new(Box::new(|_, _, _| true));
        let pools = Pools::of_directory(directory.clone(), &current, 1024 * MIB, swaps());
        let make = |uid, name: &str, mib: u64| {
            pools.create(uid, name, Some(mib * MIB), PoolAdmission::Room)
        };
        let done = Reply::Done { note: String::new() };
        assert_eq!(make(7, "a", 64), done);
        assert_eq!(make(8, "a", 200), done, "another user's");
        for (uid, name, mib, why) in [
            (7, "a", 64, "you have one of that name"),
            (7, "b", 15, "too little"),
            (7, "b", 200, "a quarter of the machine's memory"),
            (0, "b", 300, "half of the machine's memory"),
        ] {
            let refused = refusal(make(uid, name, mib));
            assert!(refused.contains(why), "{refused}");
        }
        assert_eq!(make(7, "b", 64), done);
        assert!(refusal(make(7, "c", 16)).contains("quota pools"));
        assert_eq!(names(&pools, 7), ["a", "b"]);
        assert_eq!(names(&pools, 0).len(), 3);
        assert!(pools.of(7, "a").is_ok());
        for (uid, name) in [(0, "a"), (7, "c"), (9, "a")] {
            assert!(pools.of(uid, name).is_err(), "{uid} {name}: nobody else's pages");
        }
        for (uid, name) in [(9, "7:a"), (9, "a"), (0, "a"), (0, "nobody-there:a")] {
            assert!(refusal(pools.remove(uid, name)).contains("there is no pool"));
        }
        assert!(matches!(pools.empty(7, "a"), Reply::Done { .. }));
        let swap = pools.swaps.meet(7, "web");
        assert_eq!(names(&pools, 7), ["a", "b", "web.swap"]);
        for (uid, name) in [(7, "web.swap"), (0, "7:web.swap")] {
            assert!(refusal(pools.remove(uid, name)).contains("the guest web has swapped out"));
            assert!(refusal(pools.empty(uid, name)).contains("none of it can be dropped"));
        }
        assert!(refusal(pools.remove(8, "web.swap")).contains("there is no pool"));
        drop(swap);
        assert_eq!(pools.remove(0, "7:b"), done);
        drop(pools);
        let pools = Pools::of_directory(directory.clone(), &current, 1024 * MIB, swaps());
        assert_eq!((names(&pools, 7), names(&pools, 8)), (vec!["a".into()], vec!["a".to_owned()]));
        fs::remove_dir_all(directory).expect("removed");
    }
}
