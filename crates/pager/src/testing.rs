//! What the pager's tests are made of: tenants without a keeper, pages, and
//! userfaultfd messages written by hand. Nothing here is in the product.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::Arc;

use strata_policy::order::TierOrder;
use strata_store::{Backing, Faults, Faulty, FileConfig, MemoryBacking, Store, StoreConfig};
use strata_sys::{EventFd, Mapping, Process, Range, Userfaultfd};
use strata_units::{PAGE_SIZE, PageBuffer, SpaceId};

use crate::map::page_map::PageMap;
use crate::map::registry::{NodeSpec, Registry, TenantRecord};
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// What a test's tenants may have resident.
pub(crate) const HEADROOM_PAGES: i64 = 1 << 20;

/// Numbers that look like chance in their upper bits, the same for the same seed.
pub(crate) fn numbers(seed: u64) -> impl Iterator<Item = u64> {
    let next = |number: &u64| Some(number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99));
    std::iter::successors(next(&seed), next)
}

/// A mapping of private anonymous memory.
pub(crate) fn anonymous(range: Range) -> Mapping {
    Mapping {
        range,
        readable: true,
        writable: true,
        executable: false,
        private: true,
        anonymous: true,
        backed: false,
        dev_zero: false,
        fileless: true,
        aio_ring: false,
    }
}

pub(crate) fn record(name: &str) -> TenantRecord {
    TenantRecord {
        name: name.into(),
        uid: 1,
        token: 2,
        lineage: 2,
        group: None,
        command: vec!["program".into(), "--option".into()],
        started: 3.5,
        cgroup: Some("/cgroup".into()),
        tier: Some(("/tier".into(), 5)),
        node: Some(NodeSpec { node: 1, home: 0, limit_bytes: 7, bytes_per_second: 8 }),
        tier_order: TierOrder::default(),
        starter: Some(6),
        family: 2,
        map_fds: Vec::new(),
        store_fds: Vec::new(),
    }
}

/// A tenant without a keeper: what happens to it is the test's doing.
pub(crate) fn tenant_on(store: Store) -> Arc<Tenant> {
    assemble(store, record("test"))
}

/// A tenant that is told to have that directory for its cgroup.
pub(crate) fn tenant_in(cgroup: &str) -> Arc<Tenant> {
    let store = Store::create(StoreConfig::default()).expect("a store");
    assemble(store, TenantRecord { cgroup: Some(cgroup.into()), ..record("test") })
}

fn assemble(store: Store, record: TenantRecord) -> Arc<Tenant> {
    let registry = Arc::new(Registry::create().expect("a registry"));
    let map = Arc::new(PageMap::create().expect("a page map"));
    let id = registry.add_tenant(&record, 1 << 40).expect("an empty registry");
    let tenant = Tenant::assemble(&registry, id, record, map, Arc::new(store));
    tenant.account.set_headroom(HEADROOM_PAGES);
    tenant
}

pub(crate) fn tenant() -> Arc<Tenant> {
    tenant_on(Store::create(StoreConfig::default()).expect("a store"))
}

/// A tenant whose stored pages lie on a device that fails as told.
pub(crate) fn faulty_tenant() -> (Arc<Tenant>, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let memory = MemoryBacking::create("strata-data", 1 << 30).expect("memory");
    let data: Box<dyn Backing> = Box::new(Faulty::new(Box::new(memory), Arc::clone(&faults)));
    let store = Store::create_on(None, data, None).expect("a store");
    (tenant_on(store), faults)
}

/// A tenant with a file tier that fails, or does not answer, as told.
pub(crate) fn tenant_with_faulty_file() -> (Arc<Tenant>, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let memory = |name, bytes| Box::new(MemoryBacking::create(name, bytes).expect("memory"));
    let file = Box::new(Faulty::new(memory("strata-file", 64 << 20), Arc::clone(&faults)));
    let store = Store::create_on(None, memory("strata-data", 1 << 30), Some(file));
    (tenant_on(store.expect("a store")), faults)
}

/// A tenant with a file tier in the temporary directory.
pub(crate) fn tenant_with_file(name: &str) -> Arc<Tenant> {
    let path = std::env::temp_dir().join(format!("strata-test-{name}-{}", std::process::id()));
    let file = Some(FileConfig { path, limit_bytes: 64 << 20 });
    tenant_on(Store::create(StoreConfig { compressed_limit: None, file }).expect("a store"))
}

/// A userfaultfd of this process; where there can be none, says so.
pub(crate) fn userfaultfd() -> Option<Userfaultfd> {
    match Userfaultfd::for_own_process() {
        Ok(uffd) => Some(uffd),
        Err(error) => {
            println!("skipped: this process may not have a userfaultfd: {error:?}");
            None
        }
    }
}

/// This process, which plays a managed one.
pub(crate) fn own_process() -> Arc<Process> {
    Arc::new(Process::open(std::process::id()).expect("this process"))
}

/// Its number, without an owner: a message names it.
pub(crate) fn raw(uffd: Userfaultfd) -> i32 {
    uffd.try_clone().expect("a copy").into_raw_fd()
}

/// A space of `tenant` without an agent and without a handler.
pub(crate) fn space(tenant: &Tenant, uffd: Userfaultfd) -> Arc<Space> {
    let id: SpaceId =
        tenant.registry.add_space(tenant.id, Some(uffd.as_fd().as_raw_fd())).expect("a free slot");
    tenant.registry.space_goes_live(id);
    Arc::new(Space::new(id, uffd, EventFd::new().expect("an eventfd")))
}

/// Page number `seed`: 0 is all zero, the others differ in every seed, and most
/// compress.
pub(crate) fn page(seed: u8) -> Box<PageBuffer> {
    let mut page = PageBuffer::zeroed();
    if seed == 0 {
        return page;
    }
    let mut state = u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // A third of the seeds are noise that cannot be packed.
    let noise = if seed.is_multiple_of(3) { PAGE_SIZE } else { 256 };
    for byte in &mut page.0[..noise] {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = state as u8;
    }
    page.0[0] = seed;
    page
}

/// A message as the kernel lays it out (`struct uffd_msg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Fork { fd: i32 },
    Remap { from: u64, to: u64, len: u64 },
    Remove { start: u64, end: u64 },
    Unmap { start: u64, end: u64 },
}

impl Message {
    pub(crate) fn bytes(self) -> [u8; 32] {
        let (number, words) = match self {
            Self::Fork { fd } => (0x13u8, [fd as u32 as u64, 0, 0]),
            Self::Remap { from, to, len } => (0x14, [from, to, len]),
            Self::Remove { start, end } => (0x15, [start, end, 0]),
            Self::Unmap { start, end } => (0x16, [start, end, 0]),
        };
        let mut bytes = [0; 32];
        bytes[0] = number;
        for (at, word) in words.iter().enumerate() {
            bytes[8 + at * 8..16 + at * 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// Puts `messages` into the ring of `space`, as a read of its userfaultfd would.
pub(crate) fn fill_ring(tenant: &Tenant, space: &Space, messages: &[Message]) {
    let (ring, at) = tenant.registry.ring(space.id);
    for (index, message) in messages.iter().enumerate() {
        ring.write(at + Userfaultfd::ring_bytes(index) as u64, &message.bytes());
    }
}
