//! A forked child without an agent: one whose agent has not come yet, or that was made
//! by a raw `clone` and never has one.
//!
//! Its page map is its parent's, but it did not inherit all of that: memory that was
//! advised so is empty in it (`MADV_WIPEONFORK`) or not there (`MADV_DONTFORK`), and a page
//! that was on its way out is in its place or in the transfer range. The fork's message does
//! not say so, nor which process it is. So before the first page that is away comes, its
//! process is looked for by a number, which may be another's in another namespace: proved by
//! the userfaultfd, and asked.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_sys::{MappingFlags, Process, all_processes, children_of, processes_with_thread};
use strata_units::SpaceId;

use crate::fault::events::Asker;
use crate::fault::inherit::drop_what_was_not_inherited;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::registry::SpaceField;
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// Looked for again after this. A thread waits there, so it is found at once, if at
/// all: this is for a machine that shows no process but one's own.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Space {
    /// Whether the page map still says what its parent's said.
    pub(crate) fn is_unadjusted(&self) -> bool {
        self.unadjusted.load(Ordering::Acquire) && self.agent().is_none()
    }

    /// Whether a fault on such an entry has to wait until that is not so.
    pub(crate) fn must_adjust(&self, entry: Entry) -> bool {
        !entry.reads_zero() && !entry.is_resident() && self.is_unadjusted()
    }

    /// Makes the page map agree with the process whose thread `asker` has faulted at
    /// `address`. If it cannot be found, or asked, nobody gets a page that is away.
    pub(crate) fn adjust_unattended(&self, tenant: &Tenant, asker: Asker, address: u64) {
        let before = {
            let mut looked = lock(&self.looked);
            if looked.is_some_and(|at| at.elapsed() < LOOK_AGAIN) {
                return;
            }
            looked.replace(Instant::now())
        };
        let parent = self.parent(tenant);
        let mut refused = None;
        for (process, mut flags) in candidates(tenant, parent.as_deref(), asker.thread(), address) {
            not_of_this_fork(&mut flags, parent.as_deref());
            let mut gate = lock(&self.gate);
            if !self.is_unadjusted() {
                return;
            }
            let pid = process.pid();
            let adjusted = self.prove_found(tenant, &gate, &process).and_then(|()| {
                drop_what_was_not_inherited(tenant, &mut gate, &flags);
                self.settle_leaving(tenant, &mut gate, &process)
            });
            match adjusted {
                Ok(()) => {
                    self.unadjusted.store(false, Ordering::Release);
                    let served = "it is served, and keeps its pages";
                    return tenant.log(&format!("process {pid} has no agent: {served}"));
                }
                Err(why) => refused = Some(format!("process {pid} is not shown to be it: {why}")),
            }
        }
        if let (None, Some(why)) = (before, refused) {
            tenant.log(&format!("a process without an agent waits, and {why}"));
        }
    }

    fn parent(&self, tenant: &Tenant) -> Option<Arc<Process>> {
        let parent = tenant.registry.space_field(self.id, SpaceField::Parent);
        let parent = parent.load(Ordering::Relaxed).checked_sub(1)?;
        tenant.space(SpaceId(parent))?.process()
    }
}

/// The processes that may be the one whose thread of that number waits at `address`, and their
/// mappings.
fn candidates(
    tenant: &Tenant,
    parent: Option<&Process>,
    tid: u32,
    address: u64,
) -> impl Iterator<Item = (Process, Vec<MappingFlags>)> {
    let attended: Vec<u32> = tenant.space_list().iter().filter_map(|s| s.pid()).collect();
    let pids: Box<dyn Iterator<Item = u32>> = if tid == 0 {
        // The kind of userfaultfd that CRIU makes names no thread; and who has lost
        // its parent is nobody's child here.
        let children = parent.and_then(|parent| parent.by_number(children_of)).unwrap_or_default();
        Box::new(children.into_iter().chain(all_processes()))
    } else {
        Box::new(processes_with_thread(tid))
    };
    pids.filter(move |pid| !attended.contains(pid)).filter_map(move |pid| {
        let process = Process::open(pid).ok()?;
        let flags = process.mapping_flags().ok()?;
        let here = |mapping: &MappingFlags| mapping.range.contains(address);
        let is_here = flags.iter().any(|mapping| here(mapping) && mapping.registered);
        is_here.then_some((process, flags))
    })
}

/// What was advised in the child itself, by now, says nothing of its fork.
fn not_of_this_fork(flags: &mut [MappingFlags], parent: Option<&Process>) {
    let wiped = |mapping: &MappingFlags| mapping.registered && mapping.wiped_on_fork;
    if flags.iter().any(wiped)
        && let Some(of_parent) = parent.and_then(|parent| parent.mapping_flags().ok())
    {
        for mapping in flags.iter_mut().filter(|mapping| wiped(mapping)) {
            let at = mapping.range.start;
            mapping.wiped_on_fork =
                of_parent.iter().any(|other| other.range.contains(at) && other.wiped_on_fork);
        }
    }
}
