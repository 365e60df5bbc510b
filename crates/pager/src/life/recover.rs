//! A new worker takes over a tenant that an old one left behind.
//!
//! Nothing is served before all of it is done, in this order:
//! 1. the page map and the store's files are mapped again;
//! 2. the directories of all spaces are rebuilt from the leaves' owners;
//! 3. messages that the old worker had taken and not finished are acted on;
//! 4. pages that were arriving are settled by looking whether they are there;
//! 5. every handle in the page map is counted, and the store frees the rest;
//! 6. pages that were leaving are left to the keeper: it looks into the transfer
//!    range (they cannot be told apart before the agent is idle);
//! 7. handlers start, and every waiting thread is woken: faults that the old
//!    worker had read are not delivered again, so their threads fault again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use strata_store::{Descriptors, Store, StoreConfig};
use strata_sys::{
    ControlBlock, EventFd, PROCESS_FDS, Priority, Process, Range, SeqPacket, Urgent, Userfaultfd,
    adopt_fd, log,
};
use strata_units::{ADDRESSES_END, PAGE_SIZE, SpaceId, TenantId};

use crate::fault::events::done_reading;
use crate::map::address::EVERYTHING;
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::object::Object;
use crate::map::page_map::PageMap;
use crate::map::registry::{
    PROCESS_FIELDS, RING_MESSAGES, Registry, SpaceAddress, SpaceField, TenantRecord,
};
use crate::snapshot::in_file::{OpenPageFile, PageFileNote, backing_of};
use crate::tenant::space::{Agent, AgentRanges, Space};
use crate::tenant::{Tenant, store_config};

fn store_descriptors(record: &TenantRecord) -> io::Result<Descriptors> {
    let mut fds = record.store_fds.iter().map(|&fd| adopt_fd(fd));
    let missing = || io::Error::new(io::ErrorKind::NotFound, "a file of its store is gone");
    let mut next = || fds.next().flatten().ok_or_else(missing);
    Ok(Descriptors { table: next()?, data: next()?, file: next().ok() })
}

/// The page map and the store of tenants that share them.
pub(crate) struct Files {
    pub(crate) map: Arc<PageMap>,
    pub(crate) store: Arc<Store>,
    /// Every leaf is in one of them.
    objects: HashMap<SpaceId, Object>,
}

impl Files {
    fn recover(
        registry: &Arc<Registry>,
        record: &TenantRecord,
        open: OpenPageFile,
    ) -> io::Result<Self> {
        let map = PageMap::attach(&record.map_fds)?;
        let tier = record.tier.as_ref().map(|(path, limit)| (PathBuf::from(path), *limit));
        Self::of(map, store_descriptors(record)?, store_config(&tier), |recovering| {
            recover_page_files(registry, record, recovering, open)
        })
    }

    pub(crate) fn of(
        map: PageMap,
        descriptors: Descriptors,
        config: StoreConfig,
        page_files: impl FnOnce(&mut strata_store::Recovery) -> io::Result<()>,
    ) -> io::Result<Self> {
        let mut recovering = Store::recover(descriptors, config).map_err(io::Error::other)?;
        page_files(&mut recovering)?;
        // The store counts references from the page map before it serves; the
        // events of step 3 release and retain, so they wait for it.
        let mut objects: HashMap<SpaceId, Object> = HashMap::new();
        for (leaf, space, piece) in map.leaves() {
            objects.entry(space).or_insert_with(|| Object::new(space)).insert(piece, leaf);
            for page in leaf.pages() {
                if let Some(handle) = map.get(page).handle() {
                    recovering.reference(handle).map_err(io::Error::other)?;
                }
            }
        }
        Ok(Self { map: Arc::new(map), store: Arc::new(recovering.finish()), objects })
    }
}

fn recover_page_files(
    registry: &Arc<Registry>,
    record: &TenantRecord,
    recovering: &mut strata_store::Recovery,
    open: OpenPageFile,
) -> io::Result<()> {
    let files = registry.page_files();
    for (slot, _, number, fd) in files.into_iter().filter(|file| file.1 == record.family) {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "a snapshot's file is gone");
        let file = File::from(adopt_fd(fd).ok_or_else(gone)?);
        let pages = open(&file).inspect_err(|error| {
            let what = "what is read from a snapshot's file is lost";
            log(Priority::Error, format_args!("{}: {what}: {error}", record.name));
        });
        let note = PageFileNote::of(registry, slot);
        recovering.page_file(number, pages.ok(), backing_of(file), Box::new(note))?;
    }
    Ok(())
}

impl Tenant {
    /// Every tenant of the registry, taken over and at work again; `open` opens the files
    /// that their pages are read from.
    pub fn recover_all(
        registry: &Arc<Registry>,
        open: OpenPageFile,
    ) -> Vec<(String, io::Result<Arc<Self>>)> {
        let mut families: BTreeMap<Vec<RawFd>, Vec<(TenantId, TenantRecord)>> = BTreeMap::new();
        for (id, record) in registry.tenants() {
            families.entry(record.map_fds.clone()).or_default().push((id, record));
        }
        let known: HashSet<u64> = families.values().flatten().map(|(_, one)| one.family).collect();
        registry.forget_page_files(|family| known.contains(&family));
        // Programs wait meanwhile: as many at a time as there are processors.
        let waiting = Mutex::new(families.into_values());
        let recovered = Mutex::new(Vec::new());
        let work = || {
            let _urgent = Urgent::begin();
            loop {
                let Some(family) = lock(&waiting).next() else { return };
                let outcome = Self::recover_family(registry, family, open);
                lock(&recovered).extend(outcome);
            }
        };
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        std::thread::scope(|scope| {
            for _ in 1..processors {
                scope.spawn(work);
            }
            work();
        });
        let mut recovered = recovered.into_inner().unwrap_or_else(PoisonError::into_inner);
        recovered.sort_by(|(one, _), (other, _)| one.cmp(other));
        recovered
    }

    /// Tenants that share their files.
    fn recover_family(
        registry: &Arc<Registry>,
        family: Vec<(TenantId, TenantRecord)>,
        open: OpenPageFile,
    ) -> Vec<(String, io::Result<Arc<Self>>)> {
        match Files::recover(registry, &family[0].1, open) {
            Ok(mut files) => family
                .into_iter()
                .map(|(id, record)| {
                    let name = record.name.clone();
                    (name, Ok(Self::recover(registry, id, record, &mut files)))
                })
                .collect(),
            Err(error) => family
                .into_iter()
                .map(|(_, record)| {
                    (record.name, Err(io::Error::new(error.kind(), error.to_string())))
                })
                .collect(),
        }
    }

    fn recover(
        registry: &Arc<Registry>,
        id: TenantId,
        record: TenantRecord,
        files: &mut Files,
    ) -> Arc<Self> {
        let (map, store) = (Arc::clone(&files.map), Arc::clone(&files.store));
        let objects = &mut files.objects;
        let mut object = |id| objects.remove(&id).unwrap_or_else(|| Object::new(id));
        let tenant = Self::assemble(registry, id, record, map, store);
        tenant.counters.add(Counter::WorkerRestarts, 1);
        let mut spaces = Vec::new();
        for space_id in registry.spaces_of(id) {
            if registry.is_snapshot(space_id) {
                tenant.know_snapshot(object(space_id));
                continue;
            }
            if !registry.space_is_live(space_id) {
                // A fork half taken over: its message is still in the parent's
                // ring and makes it anew. Or half a handshake: its agent asks
                // again. Or half a snapshot: there is none.
                if registry.space_field(space_id, SpaceField::Parent).load(Ordering::Relaxed) == 0 {
                    tenant.forget_leaves(space_id);
                    registry.remove_space(space_id);
                }
                continue;
            }
            match tenant.recover_space(space_id) {
                Ok(space) => {
                    lock(&space.gate).object = object(space_id);
                    tenant.recover_settings(&space);
                    spaces.push(space);
                }
                Err(error) => {
                    tenant.log(&format!("{space_id} cannot be taken over: {error}"));
                    tenant.forget_leaves(space_id);
                    registry.remove_space(space_id);
                }
            }
        }
        for space in &spaces {
            let mut faults = Vec::new();
            let mut gate = lock(&space.gate);
            // Faults among them are dropped: their threads are woken below.
            space.act_on_ring(&tenant, &mut gate, RING_MESSAGES, &mut faults);
        }
        // What the events did to sums that were not counted yet.
        tenant.account.clear();
        lock(&tenant.arrivals).clear();
        lock(&tenant.kept_arrivals).clear();
        for space in &spaces {
            tenant.settle_after_death(space);
        }
        for space in spaces {
            if let Some(agent) = space.agent() {
                done_reading(agent.control.control());
            }
            let all = Range { start: PAGE_SIZE as u64, end: ADDRESSES_END - PAGE_SIZE as u64 };
            let registered = !lock(&space.gate).object.is_empty();
            if registered {
                tenant.under_pressure.store(true, Ordering::Relaxed);
                crate::fault::handler::start(&space, &tenant);
            }
            space.uffd.wake(all);
            tenant.adopt_space(space);
        }
        // One that nobody has attached to has nothing to keep.
        if !registry.spaces_of(id).is_empty() {
            tenant.start_keeper();
        }
        tenant
    }

    /// How many processes of its spaces live, live without an agent, and have ended.
    #[must_use]
    pub fn who_is_left(&self) -> (usize, usize, usize) {
        let (mut living, mut orphans, mut ended) = (0, 0, 0);
        for space in self.space_list() {
            let counted = match space.process() {
                Some(process) if !process.has_exited() => &mut living,
                None if space.uffd.is_alive() => &mut orphans,
                _ => &mut ended,
            };
            *counted += 1;
        }
        (living, orphans, ended)
    }

    fn recover_space(&self, id: SpaceId) -> io::Result<Arc<Space>> {
        let missing = |what| io::Error::new(io::ErrorKind::NotFound, format!("its {what} is gone"));
        let fd = |field| self.registry.space_fd(id, field).and_then(adopt_fd);
        // Before the userfaultfd: were that closed for want of an event, the
        // process would read zeroes.
        let kick = EventFd::new()?;
        let uffd = Userfaultfd::adopt(fd(SpaceField::Uffd).ok_or(missing("userfaultfd"))?);
        let space = Space::new(id, uffd, kick);
        // Descriptors were recorded one by one, the number after those of the process, the
        // control block last: without it, the agent says hello again.
        let pid = self.registry.space_field(id, SpaceField::Pid).load(Ordering::Acquire);
        let process = if pid == 0 { None } else { self.recover_process(id, pid) };
        if let Some(process) = &process {
            let _ = space.process.set(Arc::clone(process));
        }
        if let (Some(process), Some(control)) = (process, fd(SpaceField::Control)) {
            let address = |field| self.registry.space_address(id, field).load(Ordering::Relaxed);
            let transfer = address(SpaceAddress::Transfer);
            let transfer_bytes = (strata_units::wire::TRANSFER_PAGES * PAGE_SIZE) as u64;
            let agent = Agent {
                control: ControlBlock::attach(control)?,
                ranges: AgentRanges {
                    transfer: Range { start: transfer, end: transfer + transfer_bytes },
                    own: Range {
                        start: address(SpaceAddress::OwnStart),
                        end: address(SpaceAddress::OwnEnd),
                    },
                },
                socket: Mutex::new(fd(SpaceField::Socket).map(SeqPacket::adopt)),
                process,
                restart: Some(address(SpaceAddress::Restart)).filter(|&at| at != 0),
                library: address(SpaceAddress::Library),
            };
            agent.remind();
            *space.agent.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(agent));
        }
        let parent = self.registry.space_field(id, SpaceField::Parent).load(Ordering::Relaxed);
        space.unadjusted.store(parent != 0, Ordering::Release);
        Ok(Arc::new(space))
    }

    /// What the worker before has opened and proved of a process.
    fn recover_process(&self, id: SpaceId, pid: u32) -> Option<Arc<Process>> {
        let fds = PROCESS_FIELDS.map(|field| self.registry.space_fd(id, field).and_then(adopt_fd));
        // All or none: what is left is closed here.
        let fds: Vec<_> = fds.into_iter().collect::<Option<_>>()?;
        let fds: [_; PROCESS_FDS] = fds.try_into().ok()?;
        Some(Arc::new(Process::adopt(pid, fds)))
    }

    /// Counts what is resident, finds what was leaving, settles what was
    /// arriving.
    fn settle_after_death(&self, space: &Space) {
        let process = space.process();
        let mut gate = lock(&space.gate);
        let pieces = gate.object.pages_in(EVERYTHING);
        for (_, leaf, part) in pieces {
            for (address, page) in crate::map::address::ids_in(leaf, part) {
                let entry = self.map.get(page);
                self.count_again(page, entry);
                match entry {
                    Entry::Resident { shared: true } => {
                        space.has_shared.store(true, Ordering::Release);
                    }
                    Entry::Leaving { slot, .. } => {
                        gate.slots[usize::from(slot)] = address;
                        space.has_strays.store(true, Ordering::Release);
                    }
                    Entry::Arriving(handle) => {
                        // Unreadable: the process is gone.
                        let there = |process: &Arc<Process>| {
                            process.is_page_present(address).unwrap_or(false)
                        };
                        if process.as_ref().is_some_and(there) {
                            self.arrived(page, handle, None);
                        } else {
                            self.map.set(page, Entry::Stored(handle));
                        }
                    }
                    Entry::Untouched
                    | Entry::Resident { shared: false }
                    | Entry::Kept(_)
                    | Entry::OnNode
                    | Entry::Discarded
                    | Entry::Stored(_)
                    | Entry::Lost
                    | Entry::Pending
                    | Entry::Copied => {}
                }
            }
        }
    }
}
