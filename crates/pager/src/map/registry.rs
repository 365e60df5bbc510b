//! The registry: what a new worker must know of the old one's tenants and
//! spaces. One memory file, mapped by the supervisor before it makes a worker,
//! fixed places, every field that changes an atomic.
//!
//! A slot is filled while its `live` word says so to nobody, and goes live by
//! one store; so a worker killed at any instant leaves whole slots only. The live
//! words lie together: looking for slots in use touches no memory of the others.

mod page_files;
mod spaces;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use strata_policy::order::TierOrder;
use strata_sys::{PROCESS_FDS, SharedMemory, Userfaultfd};
use strata_units::{SpaceId, TenantId, fnv1a};

use crate::map::counters::{ALL_BUCKETS, COUNTERS};
use crate::map::settings::{MOST_SETTINGS, SettingsFile};

/// Most tenants at a time.
pub const TENANTS: u32 = 1024;
/// Most address spaces at a time.
pub const SPACES: u32 = 8192;
/// Of these, so many are for tenants of root alone.
pub const RESERVED_SPACES: u32 = 512;
/// Files at a time that pages are read from where they lie.
pub(crate) const PAGE_FILES: u32 = 1024;
/// Messages taken from a userfaultfd at a time.
pub(crate) const RING_MESSAGES: usize = 16;

const HEADER_BYTES: u64 = 4096;
const TENANT_BYTES: u64 = 16384;
const SPACE_BYTES: u64 = 1024;
const TENANTS_LIVE_AT: u64 = HEADER_BYTES;
const SPACES_LIVE_AT: u64 = TENANTS_LIVE_AT + 4 * TENANTS as u64;
const TENANTS_AT: u64 = SPACES_LIVE_AT + 4 * SPACES as u64;
const SPACES_AT: u64 = TENANTS_AT + TENANTS as u64 * TENANT_BYTES;
const PAGE_FILES_AT: u64 = SPACES_AT + SPACES as u64 * SPACE_BYTES;
const PAGE_FILE_BYTES: u64 = 32;
const REGISTRY_BYTES: u64 = PAGE_FILES_AT + PAGE_FILES as u64 * PAGE_FILE_BYTES;

// Within a tenant's slot.
const T_RELEASED: u64 = 0;
const T_BUDGET: u64 = 8;
/// Reserve, limit, weight: see `Claim`.
const T_CLAIM: u64 = 16;
const T_COUNTERS: u64 = 64;
const T_BUCKETS: u64 = T_COUNTERS + 8 * COUNTERS as u64;
const T_RECORD: u64 = 12288;
const _: () = assert!(T_BUCKETS + 8 * ALL_BUCKETS as u64 <= T_RECORD);

/// In the header: descriptor of the settings' memory file + 1.
const H_SETTINGS: u64 = 8;
/// In the header: how many spaces there have been.
const H_SERIAL: u64 = 16;
/// In the header: the worker's process.
const H_WORKER: u64 = 24;
/// In the header: what it is, what it and all that it leads to are laid out like, which
/// daemon's it is, and the sum of the three.
const H_MAGIC: u64 = 32;
const H_LAYOUT: u64 = 40;
const H_HOME: u64 = 48;
const H_SUM: u64 = 56;
/// In the header: 1 if the worker ended so that another stratad takes this one's place.
const H_UPGRADES: u64 = 68;
/// In the header: the supervisor that has last said what it took over.
const H_REPORTED: u64 = 64;
/// In the header: how often the supervisor has read its configuration again, for how many of
/// these the worker has, and the sum of what was read last.
const H_READ: u64 = 72;
const H_FOLLOWED: u64 = 76;
const H_READ_SUM: u64 = 80;

const MAGIC: u64 = u64::from_le_bytes(*b"strataRG");
/// Raised when anything that a record leads to gets another meaning (records, entries of
/// page maps, ages, settings) without another length. The store's files have a version of
/// their own.
const VERSION: u64 = 4;

// Within a space's slot.
const S_SETTINGS: u64 = 64;
const S_SERIAL: u64 = 248;
const S_RING: u64 = 256;
const _: () = assert!(S_RING + Userfaultfd::ring_bytes(RING_MESSAGES) as u64 <= SPACE_BYTES);

/// A slot nobody uses.
const FREE: u32 = 0;
/// A slot in use.
const LIVE: u32 = 1;
/// A slot whose page map is not complete yet: a forked child's, a restored
/// process's, a snapshot's.
const BUILDING: u32 = 2;
/// A snapshot of an address space: a page map without a process.
const SNAPSHOT: u32 = 3;

/// A tenant's node tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeSpec {
    /// The node, one without processors.
    pub node: u32,
    /// Where pages come back to.
    pub home: u32,
    /// What the tenant may have there.
    pub limit_bytes: u64,
    /// What may be moved in a second, there and back.
    pub bytes_per_second: u64,
}

/// What is fixed about a tenant from its start on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantRecord {
    /// Its name.
    pub name: String,
    /// Its owner.
    pub uid: u32,
    /// What its agents name it by.
    pub token: u64,
    /// The program, for display.
    pub command: Vec<String>,
    /// The first of those that are clones of each other, by its token.
    pub lineage: u64,
    /// The group whose members keep equal pages once, if it is of one.
    pub group: Option<String>,
    /// Seconds since the epoch.
    pub started: f64,
    /// Its memory cgroup's directory, if it has one of its own.
    pub cgroup: Option<String>,
    /// Directory and limit of its file tier, if any.
    pub tier: Option<(String, u64)>,
    /// Its node tier, if any.
    pub node: Option<NodeSpec>,
    /// The order in which its pages go to the tiers below DRAM.
    pub tier_order: TierOrder,
    /// The process that `strata run` became; none where a rule of the
    /// configuration made the tenant.
    pub starter: Option<u32>,
    /// Those that share page map and store: the token of the first of them.
    pub(crate) family: u64,
    /// Descriptors: page map.
    pub(crate) map_fds: Vec<RawFd>,
    /// Descriptors: store.
    pub(crate) store_fds: Vec<RawFd>,
}

/// The fields of a space's slot that are plain numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum SpaceField {
    Tenant = 0,
    Pid = 4,
    Uffd = 8,
    Pidfd = 12,
    Control = 16,
    Socket = 20,
    /// The parent's space + 1, or 0.
    Parent = 24,
    Directory = 72,
    Pagemap = 76,
    Memory = 80,
    Maps = 84,
    Smaps = 88,
}

/// Where the descriptors of a [`strata_sys::Process`] are recorded, in its order.
pub(crate) const PROCESS_FIELDS: [SpaceField; PROCESS_FDS] = [
    SpaceField::Pidfd,
    SpaceField::Directory,
    SpaceField::Pagemap,
    SpaceField::Memory,
    SpaceField::Maps,
    SpaceField::Smaps,
];

/// The fields of a space's slot that are addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum SpaceAddress {
    Transfer = 32,
    OwnStart = 40,
    OwnEnd = 48,
    /// 0: none.
    Restart = 56,
    /// Not an address: the version of its library.
    Library = 96,
}

/// See the module's text.
#[derive(Debug)]
pub struct Registry {
    memory: SharedMemory,
    pub(crate) settings: SettingsFile,
}

/// See [`Registry::layout`].
fn layout() -> u64 {
    let of_tenants = [u64::from(TENANTS), TENANT_BYTES, T_CLAIM, T_COUNTERS, T_BUCKETS, T_RECORD];
    let of_spaces = [u64::from(SPACES), SPACE_BYTES, S_SETTINGS, S_SERIAL, S_RING];
    let counted = [COUNTERS, ALL_BUCKETS, RING_MESSAGES, MOST_SETTINGS].map(|count| count as u64);
    let ring = Userfaultfd::ring_bytes(RING_MESSAGES) as u64;
    let control = strata_units::wire::CONTROL_BYTES as u64;
    let others = [VERSION, ring, PROCESS_FDS as u64, control];
    let all = of_tenants.iter().chain(&of_spaces).chain(&counted).chain(&others);
    mixed(all.copied())
}

fn mixed(words: impl IntoIterator<Item = u64>) -> u64 {
    fnv1a(words.into_iter().flat_map(u64::to_le_bytes))
}

impl Registry {
    /// A new, empty one.
    pub fn create() -> io::Result<Self> {
        let memory = SharedMemory::create("strata-registry", REGISTRY_BYTES)?;
        Ok(Self { memory, settings: SettingsFile::default() })
    }

    /// A number for how all of it is laid out, and what it leads to: another version's is
    /// another.
    #[must_use]
    pub fn layout() -> u64 {
        layout()
    }

    /// Not 0: the worker ended so that another stratad takes this one's place.
    #[must_use]
    pub fn upgrades(&self) -> &AtomicU32 {
        self.memory.atomic_u32(H_UPGRADES)
    }

    /// How often the configuration was read again.
    #[must_use]
    pub fn config_read(&self) -> &AtomicU32 {
        self.memory.atomic_u32(H_READ)
    }

    /// The last of these that the worker follows.
    #[must_use]
    pub fn config_followed(&self) -> &AtomicU32 {
        self.memory.atomic_u32(H_FOLLOWED)
    }

    /// The sum of the configuration that was read last.
    #[must_use]
    pub fn config_sum(&self) -> &AtomicU64 {
        self.memory.atomic_u64(H_READ_SUM)
    }

    /// That of the daemon `home` from now on, for whoever attaches to it later.
    pub fn settle(&self, home: u64) {
        let words = [(H_MAGIC, MAGIC), (H_LAYOUT, layout()), (H_HOME, home)];
        for (at, word) in words {
            self.memory.atomic_u64(at).store(word, Ordering::Relaxed);
        }
        let sum = mixed(words.map(|(_, word)| word));
        self.memory.atomic_u64(H_SUM).store(sum, Ordering::Release);
    }

    /// What a dead daemon of the same `home` has left.
    ///
    /// # Errors
    /// `InvalidData`, with what it is instead; else as for any memory file.
    pub fn attach(descriptor: OwnedFd, home: u64) -> io::Result<Self> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let memory = SharedMemory::from_fd(descriptor)?;
        if memory.len_bytes() < HEADER_BYTES {
            return Err(invalid("it is no registry"));
        }
        let word = |at| memory.atomic_u64(at).load(Ordering::Acquire);
        let (sum, words) = (word(H_SUM), [H_MAGIC, H_LAYOUT, H_HOME].map(word));
        if words[0] != MAGIC || sum != mixed(words) {
            return Err(invalid("it is no registry, or damaged"));
        }
        if words[1] != layout() || memory.len_bytes() != REGISTRY_BYTES {
            return Err(invalid("it is another version's"));
        }
        if words[2] != home {
            return Err(invalid("it is of a daemon in another directory"));
        }
        Ok(Self { memory, settings: SettingsFile::default() })
    }

    /// The supervisor that has last said what became of the tenants it took over.
    #[must_use]
    pub fn reported(&self) -> &AtomicU32 {
        self.memory.atomic_u32(H_REPORTED)
    }

    /// Whether there is any snapshot, of whichever tenant.
    #[must_use]
    pub fn has_snapshots(&self) -> bool {
        (0..SPACES).map(SpaceId).any(|id| self.is_snapshot(id))
    }

    /// The registry's own descriptor.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Number of workers so far; the next one adds itself.
    #[must_use]
    pub fn workers(&self) -> &AtomicU64 {
        self.memory.atomic_u64(0)
    }

    /// The process that works on it; it says so itself before it does anything else.
    #[must_use]
    pub fn worker_pid(&self) -> &AtomicU32 {
        self.memory.atomic_u32(H_WORKER)
    }

    fn tenant_at(id: TenantId) -> u64 {
        assert!(id.0 < TENANTS, "tenant ids come from this registry");
        TENANTS_AT + u64::from(id.0) * TENANT_BYTES
    }

    fn tenant_live(&self, id: TenantId) -> &AtomicU32 {
        assert!(id.0 < TENANTS, "tenant ids come from this registry");
        self.memory.atomic_u32(TENANTS_LIVE_AT + 4 * u64::from(id.0))
    }

    /// Every live tenant.
    #[must_use]
    pub fn tenants(&self) -> Vec<(TenantId, TenantRecord)> {
        (0..TENANTS)
            .map(TenantId)
            .filter(|&id| self.tenant_live(id).load(Ordering::Acquire) == LIVE)
            .filter_map(|id| Some((id, self.tenant_record(id)?)))
            .collect()
    }

    fn tenant_record(&self, id: TenantId) -> Option<TenantRecord> {
        let at = Self::tenant_at(id) + T_RECORD;
        let length = self.memory.atomic_u32(at).load(Ordering::Acquire) as usize;
        let mut bytes = vec![0; length.min((TENANT_BYTES - T_RECORD - 4) as usize)];
        self.memory.read(at + 4, &mut bytes);
        serde_json::from_slice(&bytes).ok()
    }

    /// Makes a tenant known. None: all slots are taken, or its paths are longer
    /// than a slot.
    pub(crate) fn add_tenant(&self, record: &TenantRecord, budget_bytes: u64) -> Option<TenantId> {
        let bytes = Self::record_bytes(record)?;
        let id = (0..TENANTS)
            .map(TenantId)
            .find(|&id| self.tenant_live(id).load(Ordering::Acquire) == FREE)?;
        let at = Self::tenant_at(id);
        self.memory.write(at, &vec![0; TENANT_BYTES as usize]);
        self.memory.atomic_u64(at + T_BUDGET).store(budget_bytes, Ordering::Relaxed);
        self.memory.write(at + T_RECORD + 4, &bytes);
        self.memory.atomic_u32(at + T_RECORD).store(bytes.len() as u32, Ordering::Release);
        self.tenant_live(id).store(LIVE, Ordering::Release);
        Some(id)
    }

    /// The record as it is kept; the command line, which is for display, is cut
    /// to what there is room for.
    fn record_bytes(record: &TenantRecord) -> Option<Vec<u8>> {
        let mut record = record.clone();
        let room = (TENANT_BYTES - T_RECORD - 4) as usize;
        loop {
            let bytes = serde_json::to_vec(&record).expect("plain strings and numbers");
            if bytes.len() <= room {
                return Some(bytes);
            }
            // One word that is too long still shows that there is a command.
            if record.command.pop()?.len() > 3 && record.command.is_empty() {
                record.command.push("…".into());
            }
        }
    }

    pub(crate) fn remove_tenant(&self, id: TenantId) {
        self.tenant_live(id).store(FREE, Ordering::Release);
    }

    pub(crate) fn budget(&self, id: TenantId) -> &AtomicU64 {
        self.memory.atomic_u64(Self::tenant_at(id) + T_BUDGET)
    }

    /// Reserve, limit and weight.
    pub(crate) fn claim(&self, id: TenantId) -> [&AtomicU64; 3] {
        [0, 8, 16].map(|field| self.memory.atomic_u64(Self::tenant_at(id) + T_CLAIM + field))
    }

    pub(crate) fn released(&self, id: TenantId) -> &AtomicU32 {
        self.memory.atomic_u32(Self::tenant_at(id) + T_RELEASED)
    }

    pub(crate) fn counter(&self, id: TenantId, index: usize) -> &AtomicU64 {
        assert!(index < COUNTERS, "counters are an enum of ours");
        self.memory.atomic_u64(Self::tenant_at(id) + T_COUNTERS + 8 * index as u64)
    }

    pub(crate) fn bucket(&self, id: TenantId, index: usize) -> &AtomicU64 {
        assert!(index < ALL_BUCKETS, "bucket_of clamps");
        self.memory.atomic_u64(Self::tenant_at(id) + T_BUCKETS + 8 * index as u64)
    }

    /// The settings' memory file, if there is one.
    pub(crate) fn settings_fd(&self) -> Option<RawFd> {
        let word = self.memory.atomic_u32(H_SETTINGS).load(Ordering::Acquire);
        (word as RawFd).checked_sub(1).filter(|&fd| fd >= 0)
    }

    pub(crate) fn set_settings_fd(&self, fd: RawFd) {
        self.memory.atomic_u32(H_SETTINGS).store(fd as u32 + 1, Ordering::Release);
    }

    /// Every descriptor that some record names: all others in the table are a
    /// dead worker's litter.
    #[must_use]
    pub fn claimed_fds(&self) -> Vec<RawFd> {
        let mut fds = vec![self.memory.as_fd().as_raw_fd()];
        fds.extend(self.settings_fd());
        fds.extend(self.page_files().into_iter().map(|(.., fd)| fd));
        for (id, record) in self.tenants() {
            fds.extend(&record.map_fds);
            fds.extend(&record.store_fds);
            for space in self.spaces_of(id) {
                let others = [SpaceField::Uffd, SpaceField::Control, SpaceField::Socket];
                for field in others.into_iter().chain(PROCESS_FIELDS) {
                    fds.extend(self.space_fd(space, field));
                }
                let (memory, at) = self.ring(space);
                for index in 0..RING_MESSAGES {
                    if let Some(strata_sys::Event::Fork { fd }) =
                        Userfaultfd::message(memory, at, index)
                    {
                        fds.push(fd);
                    }
                }
            }
        }
        fds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(registry: &Registry) -> OwnedFd {
        registry.descriptor().try_clone_to_owned().expect("a descriptor")
    }

    fn refusal(attached: io::Result<Registry>) -> String {
        attached.expect_err("it does not fit").to_string()
    }

    #[test]
    fn a_registry_is_attached_to_by_its_own_daemon_and_version_alone() {
        let registry = Registry::create().expect("a registry");
        assert!(refusal(Registry::attach(copy(&registry), 7)).contains("no registry"));
        registry.settle(7);
        registry.workers().store(3, Ordering::Relaxed);
        let again = Registry::attach(copy(&registry), 7).expect("it is the same");
        assert_eq!(again.workers().load(Ordering::Relaxed), 3);
        assert!(refusal(Registry::attach(copy(&registry), 8)).contains("another directory"));
        for at in [H_MAGIC, H_LAYOUT, H_HOME, H_SUM] {
            let word = registry.memory.atomic_u64(at);
            word.fetch_add(1, Ordering::Relaxed);
            assert!(refusal(Registry::attach(copy(&registry), 7)).contains("damaged"), "{at}");
            word.fetch_sub(1, Ordering::Relaxed);
        }
        let other = [MAGIC, layout() + 1, 7];
        registry.memory.atomic_u64(H_LAYOUT).store(other[1], Ordering::Relaxed);
        registry.memory.atomic_u64(H_SUM).store(mixed(other), Ordering::Relaxed);
        assert!(refusal(Registry::attach(copy(&registry), 7)).contains("another version"));
        let stranger = SharedMemory::create("other", 64).expect("a memory file");
        let stranger = stranger.as_fd().try_clone_to_owned().expect("a descriptor");
        assert!(refusal(Registry::attach(stranger, 7)).contains("no registry"));
    }
}
