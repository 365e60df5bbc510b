//! Taking a snapshot of a tenant: its processes stop, their memory is captured
//! (`capture`), they run on, and the rest is captured while they do.
//!
//! Everything here runs on the keeper; only [`Tenant::snapshot`] is called by
//! whoever wants one, and waits.

pub(crate) mod fill;
mod freeze;
pub(crate) mod held_memory;
pub(crate) mod in_file;
pub(crate) mod lent;
mod pages;
pub(crate) mod prepared;
pub(crate) mod restore;

#[cfg(test)]
mod fill_tests;
#[cfg(test)]
mod lent_tests;
#[cfg(test)]
mod pages_tests;
#[cfg(test)]
mod prepared_tests;

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use strata_store::Put;
use strata_sys::thread_time;
use strata_units::{PAGE_SIZE, SpaceId};

use self::freeze::take;
use crate::capture::RUN_PAGES;
use crate::capture::pace::Pace;
use crate::map::counters::Counter;
use crate::map::lock;
use crate::map::object::Object;
use crate::tenant::Tenant;
use crate::tenant::excluded::Excluded;
use crate::tenant::orders::{
    CaptureProgress, Freeze, Only, Order, SnapshotError, SnapshotOrder, SnapshotRequest, failed,
};
use crate::tenant::space::Space;

/// Without any page captured for so long, the snapshot is given up.
const PATIENCE: Duration = Duration::from_secs(10);

/// A torn one is given up when none was captured for so long.
const TORN_PATIENCE: Duration = Duration::from_secs(1);

/// How often whoever waits for a snapshot hears how far it is.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// How often whoever removes a snapshot looks whether it is still read.
const READERS_EVERY: Duration = Duration::from_millis(1);

/// What a torn snapshot has captured, which the next attempt need not read again if
/// it is not written until then: it is its base (`capture::clean`). Dropped, it is buried.
pub(crate) struct Torn {
    tenant: Arc<Tenant>,
    memories: Vec<SpaceId>,
    pub(crate) since: Instant,
}

impl Drop for Torn {
    fn drop(&mut self) {
        for &memory in &self.memories {
            self.tenant.bury_snapshot(memory);
        }
    }
}

/// What came of some more capturing.
pub(crate) enum Went {
    On(Capturing),
    /// Whoever asked has got an answer.
    Over,
    /// The same: to try again.
    Torn(Torn),
}

/// A snapshot after the thaw, in the keeper's hands.
pub(crate) struct Capturing {
    /// Of the attempt before; read until this one is over.
    _torn: Option<Torn>,
    spaces: Vec<(Arc<Space>, SpaceId)>,
    freeze: Freeze,
    pending_pages: u64,
    thawed: Instant,
    progressed: Instant,
    answer: mpsc::Sender<Result<Freeze, SnapshotError>>,
    progress: Arc<CaptureProgress>,
    buffer: Vec<u8>,
    pace: Pace,
    /// Of the tenant, when some was captured last; the low bits tell whether there were more.
    faults: u32,
    is_urgent: bool,
}

impl Tenant {
    /// Takes a snapshot of all its processes' memory. `tell(done, total)` hears
    /// how many pages are captured. Returns when the snapshot is whole.
    ///
    /// # Errors
    /// See [`SnapshotError`]: there is no snapshot then, and the tenant runs on.
    pub fn snapshot(
        &self,
        request: SnapshotRequest,
        mut tell: impl FnMut(u64, u64),
    ) -> Result<Freeze, SnapshotError> {
        let (answer, receiver) = mpsc::channel();
        let progress = Arc::new(CaptureProgress::default());
        let order = SnapshotOrder { request, answer, progress: Arc::clone(&progress) };
        self.order(Order::Snapshot(Box::new(order)));
        loop {
            match receiver.recv_timeout(TELL_EVERY) {
                Ok(outcome) => return outcome,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(failed("the tenant has ended"));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let total = progress.total.load(Ordering::Relaxed);
                    if total > 0 {
                        tell(total - progress.pending.load(Ordering::Relaxed).min(total), total);
                    }
                }
            }
        }
    }

    /// Forgets a snapshot of an address space; what nothing else refers to is
    /// freed.
    pub fn remove_snapshot_memory(&self, id: SpaceId) {
        let Some(mut known) = lock(&self.snapshots).remove(&id) else { return };
        // Somebody restores from it, or reads it: nobody finds it any more.
        while Arc::get_mut(&mut known).is_none() {
            std::thread::sleep(READERS_EVERY);
        }
        self.forget_ready(id);
        self.forget_leaves(id);
        self.registry.remove_space(id);
    }
}

impl SnapshotOrder {
    /// What of the tenant is wanted; none: all.
    pub(crate) fn only(&self) -> Option<Only> {
        self.request.only
    }

    /// Nothing is done, and why.
    pub(crate) fn refuse(self, why: &str) {
        // Whoever asked may have gone.
        let _ = self.answer.send(Err(failed(why)));
    }

    /// Carries the order out up to the thaw. `excluded` tells what of a space is
    /// never protected, `torn` is of the attempt before. None: it failed, and
    /// whoever asked knows.
    pub(crate) fn begin(
        self,
        tenant: &Arc<Tenant>,
        spaces: &[Arc<Space>],
        excluded: &dyn Fn(&Space) -> Excluded,
        torn: Option<Torn>,
    ) -> Option<Capturing> {
        let Self { request, answer, progress } = self;
        let is_urgent = request.urgent;
        let mut buffer = vec![0; RUN_PAGES * PAGE_SIZE];
        match take(tenant, spaces, excluded, request, &mut buffer) {
            Ok((freeze, spaces, pending_pages)) => {
                progress.total.store(pending_pages, Ordering::Relaxed);
                progress.pending.store(pending_pages, Ordering::Relaxed);
                let now = Instant::now();
                Some(Capturing {
                    _torn: torn,
                    spaces,
                    freeze,
                    pending_pages,
                    thawed: now,
                    progressed: now,
                    answer,
                    progress,
                    buffer,
                    pace: Pace::default(),
                    faults: 0,
                    is_urgent,
                })
            }
            Err(error) => {
                // Whoever asked may have gone.
                let _ = answer.send(Err(error));
                None
            }
        }
    }
}

fn undo(tenant: &Tenant, spaces: &[(Arc<Space>, SpaceId)]) {
    for (space, snapshot) in spaces {
        let mut gate = lock(&space.gate);
        gate.capture = None;
        for &range in &gate.registered {
            // If not now, then by whoever writes there first.
            space.uffd.unprotect(range);
        }
        drop(gate);
        tenant.forget_leaves(*snapshot);
        tenant.registry.remove_space(*snapshot);
    }
}

impl Capturing {
    /// Captures some more. `spare`: the machine has a CPU for it, which does not count
    /// where faults wait for the keeper: then it is idle because they do. They do where
    /// pages have to leave for those that come, and some have come.
    pub(crate) fn go_on(mut self, tenant: &Arc<Tenant>, spare: bool) -> Went {
        let mut pending = 0;
        let (mut torn, mut gone) = (false, false);
        for (space, _) in &self.spaces {
            match space.capture_state() {
                Some((left, is_torn)) => {
                    pending += left;
                    torn |= is_torn;
                    gone |= left > 0 && !space.uffd.is_alive();
                }
                None => gone = true,
            }
        }
        self.progress.pending.store(pending, Ordering::Relaxed);
        if gone {
            self.give_up(tenant, SnapshotError::Torn);
            return Went::Over;
        }
        if torn && (pending == 0 || self.progressed.elapsed() > TORN_PATIENCE) {
            return Went::Torn(self.keep_for_another(tenant));
        }
        if pending == 0 {
            self.finish(tenant);
            return Went::Over;
        }
        if !self.pace.is_due() {
            return Went::On(self);
        }
        let began = thread_time();
        // Raw as long as there is room: a page that is packed later keeps nobody
        // waiting now.
        let room = tenant.headroom_pages() > pending as i64;
        let how = if room { Put::Staged } else { Put::Fast };
        let captured: usize = self
            .spaces
            .iter()
            .map(|(space, _)| space.capture_some(tenant, how, &mut self.buffer))
            .sum();
        let faults = tenant.counters.get(Counter::Faults) as u32;
        let nobody_waits = !tenant.is_short() || self.faults == faults;
        self.faults = faults;
        self.pace.worked(began, self.is_urgent || spare && nobody_waits);
        if captured > 0 {
            self.progressed = Instant::now();
        } else if self.progressed.elapsed() > PATIENCE {
            self.give_up(tenant, failed("some of its pages cannot be captured"));
            return Went::Over;
        }
        Went::On(self)
    }

    /// How long there is nothing to do for it.
    pub(crate) fn rest(&self) -> Duration {
        self.pace.rest()
    }

    pub(crate) fn give_up(self, tenant: &Tenant, why: SnapshotError) {
        undo(tenant, &self.spaces);
        // Whoever asked may have gone.
        let _ = self.answer.send(Err(why));
    }

    /// It is torn, and what could be captured of it is.
    fn keep_for_another(self, tenant: &Arc<Tenant>) -> Torn {
        let mut memories = Vec::new();
        for (space, snapshot) in &self.spaces {
            if let Some(capture) = lock(&space.gate).end_capture(&tenant.registry) {
                tenant.know_snapshot(capture.object);
                memories.push(*snapshot);
            }
        }
        tenant.log("it gave back memory before that was captured: its snapshot is taken again");
        // Whoever asked may have gone.
        let _ = self.answer.send(Err(SnapshotError::Torn));
        Torn { tenant: Arc::clone(tenant), memories, since: Instant::now() }
    }

    fn finish(mut self, tenant: &Tenant) {
        self.freeze.copied_pages = self.pending_pages;
        for (space, snapshot) in &self.spaces {
            let capture = lock(&space.gate).end_capture(&tenant.registry);
            if let Some(capture) = &capture {
                self.freeze.copied_pages -= capture.from_base;
            }
            let object = capture.map_or_else(|| Object::new(*snapshot), |capture| capture.object);
            tenant.know_snapshot(object);
            tenant.registry.snapshot_is_whole(*snapshot);
        }
        self.freeze.captured = self.thawed.elapsed();
        let memories: Vec<SpaceId> = self.spaces.iter().map(|&(_, id)| id).collect();
        if self.answer.send(Ok(self.freeze)).is_err() {
            for id in memories {
                tenant.remove_snapshot_memory(id);
            }
        }
    }
}
