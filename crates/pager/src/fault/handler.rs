//! The fault handler: one thread per space under pressure. It takes messages,
//! acts on events, and puts pages in place. It never waits for an agent's work,
//! for an eviction, for the file tier, or for another tenant.
//!
//! Between the claim of a page (`Stored → Arriving`, under the gate) and its
//! completion (`Arriving → Resident`, without) nobody else changes its entry:
//! the keeper leaves arriving pages alone, and this thread is the only one that
//! takes messages. What it has to read from the file tier meanwhile is in
//! [`crate::fault::reads`].

mod ahead;
mod claim;
mod follow;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use strata_store::{Fingerprint, GetError, Source};
use strata_sys::{Fill, Poller, Priority, log, set_thread_name, wake_in_time};
use strata_units::{Handle, PageBuffer, PageId};

use crate::fault::events::{Asker, FaultMessage};
use crate::fault::reads::{Reads, Why};
use crate::map::address::one_page;
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::registry::SpaceField;
use crate::tenant::Tenant;
use crate::tenant::space::Space;
use ahead::Ahead;
pub(crate) use ahead::MOST_HOT;
use claim::Claim;
use follow::Follow;

/// How long a fault that found no DRAM left waits before it is tried again.
const RETRY_AFTER: Duration = Duration::from_micros(500);
/// How long one that found its address space changing waits at first, twice as long
/// each time. Mostly the thread that changes it only has to run, on this CPU perhaps,
/// to say so; a yield would have this thread run last from then on.
const CHANGES_AFTER: Duration = Duration::from_micros(25);
/// No fault waits longer than this for DRAM: a tenant over its budget is better
/// than one that hangs.
const LONGEST_WAIT: Duration = Duration::from_millis(200);
/// A read error of the tier file is tried again so often before the page is
/// given up for lost.
const READ_RETRIES: u32 = 3;
/// Nobody evicts while a program is being stopped for a snapshot, and a thread in
/// a system call that asks for page after page cannot be stopped before it has
/// them all: from then on no fault waits.
const LONGEST_WAIT_FOR_A_FREEZE: Duration = Duration::from_millis(10);
/// Pause before a descriptor that the kernel refused is asked for again.
const NO_DESCRIPTOR: Duration = Duration::from_millis(20);
/// Most faults that wait for DRAM here; further ones fault again.
pub(crate) const MOST_DEFERRED: usize = 4096;

/// A stored page that is to be put in place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SwapIn {
    pub(crate) page: PageId,
    pub(crate) address: u64,
    pub(crate) handle: Handle,
}

/// What came of it.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Served {
    Done,
    /// Nothing can be put in place before some time has gone.
    Defer,
    /// The address space is changing.
    Again,
}

/// What came of bringing a stored page back.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Filled {
    /// It is in place, and its thread goes on.
    Arrived(Source, Option<Fingerprint>),
    /// It was in place already.
    WasThere,
    /// It cannot be read, and why.
    Unreadable(String),
    /// Nothing was put in place.
    Not(Served),
}

/// Starts the handler of a space.
pub(crate) fn start(space: &Arc<Space>, tenant: &Arc<Tenant>) {
    let mut handler = lock(&space.handler);
    if handler.is_some() {
        return;
    }
    let (own_space, own_tenant) = (Arc::clone(space), Arc::clone(tenant));
    let started = std::thread::Builder::new()
        .name(format!("fault-{}", space.id))
        .spawn(move || run(&own_space, &own_tenant));
    match started {
        Ok(thread) => *handler = Some(thread),
        Err(error) => {
            log(Priority::Warning, format_args!("{}: no thread for its faults: {error}", space.id))
        }
    }
}

impl Tenant {
    /// The tenant has this space from now on, which is served if it is to be.
    pub(crate) fn adopt_space(self: &Arc<Self>, space: Arc<Space>) {
        let managed = self.is_managed();
        let forked =
            self.registry.space_field(space.id, SpaceField::Parent).load(Ordering::Relaxed);
        if managed || forked != 0 {
            start(&space, self);
        }
        self.had_space.store(true, Ordering::Relaxed);
        self.spaces.write().unwrap_or_else(PoisonError::into_inner).insert(space.id, space);
        if self.stands_still.load(Ordering::SeqCst) {
            // Nobody looks who is in it meanwhile.
            self.wake_keeper();
        }
    }
}

fn run(space: &Arc<Space>, tenant: &Arc<Tenant>) {
    set_thread_name(&format!("fault-{}", space.id));
    wake_in_time();
    strata_store::prepare_thread();
    let mut page = PageBuffer::zeroed();
    let mut faults: Vec<FaultMessage> = Vec::with_capacity(64);
    let mut claims: Vec<(FaultMessage, Claim)> = Vec::with_capacity(64);
    let mut deferred: Vec<FaultMessage> = Vec::new();
    let mut waiting_since: Option<Instant> = None;
    let mut ahead = Ahead::default();
    let mut reads = Reads::new(space);
    let mut served = false;
    let mut changes_after: Option<Duration> = None;
    // Since when some thread here waits for a page.
    let mut stalled_since: Option<Instant> = None;
    let mut follow = Follow::new();
    let Some(poller) = poller(space, tenant) else { return };
    while !space.is_gone() {
        ahead.take_hot(space);
        let wait = if served || ahead.can_bring(tenant, &reads) {
            // The next fault is often here by now: the thread that was woken
            // ran at once. Asked for without asking first whether there is one.
            None
        } else if deferred.is_empty() {
            let (read, hot) = (reads.patience(), ahead.patience());
            Some(read.into_iter().chain(hot).min())
        } else {
            Some(Some(changes_after.unwrap_or(RETRY_AFTER)))
        };
        let kicked = match wait.map(|timeout| poller.wait(timeout)) {
            None => false,
            Some(Ok([_, kicked])) => kicked,
            // Nothing that a wait on open descriptors can say; look at both.
            Some(Err(_)) => true,
        };
        let began = Instant::now();
        if kicked {
            space.kick.clear();
        }
        let handed = std::mem::take(&mut *lock(&space.kicked));
        faults.extend(handed.into_iter().map(|address| FaultMessage {
            address,
            asker: Asker::Seen,
            to_write: false,
            protected: false,
        }));
        let waits_long = match (deferred.is_empty(), waiting_since) {
            (true, _) => {
                waiting_since = None;
                false
            }
            (false, None) => {
                waiting_since = Some(began);
                false
            }
            (false, Some(since)) => began.duration_since(since) > LONGEST_WAIT,
        } || (!tenant.may_fill()
            && tenant.freezes_for() > LONGEST_WAIT_FOR_A_FREEZE);
        faults.append(&mut deferred);
        {
            let mut gate = lock(&space.gate);
            space.take_messages(tenant, &mut gate, &mut faults);
            faults.sort_unstable_by_key(|fault| (fault.address, fault.protected));
            faults.dedup_by_key(|fault| (fault.address, fault.protected));
            for fault in faults.drain(..) {
                let claim = space.claim(tenant, &mut gate, &fault, waits_long);
                claims.push((fault, claim));
            }
        }
        if stalled_since.is_none() && !claims.is_empty() {
            stalled_since = Some(began);
            tenant.wait_begins(began);
        }
        served = false;
        let mut changing = false;
        for (fault, claim) in claims.drain(..) {
            if fault.asker != Asker::Seen {
                follow.beside(space, fault.asker, began);
                if let Claim::Fill { in_order, .. } = claim {
                    ahead.follow(space, tenant, fault.address, in_order);
                }
            }
            if let Claim::Fill { swap_in, to_write, .. } = claim {
                let why = Why::Fault { began, to_write };
                if reads.take(tenant, swap_in, why) {
                    continue;
                }
            }
            if matches!(claim, Claim::Adjust) {
                space.adjust_unattended(tenant, fault.asker, fault.address);
            }
            let counts =
                !matches!(claim, Claim::Wait | Claim::Defer | Claim::Again | Claim::Adjust);
            match space.serve(tenant, claim, &mut page, began) {
                Served::Done => {
                    if counts {
                        served = true;
                        tenant.counters.add(Counter::Faults, 1);
                    }
                }
                kept if deferred.len() < MOST_DEFERRED => {
                    changing |= kept == Served::Again;
                    deferred.push(fault);
                }
                // Woken, its thread faults again, and the kernel's queue is
                // where it waits.
                Served::Defer | Served::Again => space.uffd.wake(one_page(fault.address)),
            }
        }
        let next = changes_after.map_or(CHANGES_AFTER, |last| RETRY_AFTER.min(last * 2));
        changes_after = changing.then_some(next);
        // Before anything is brought ahead: who waits for a device waits longest.
        reads.begin(tenant);
        served |= reads.land(space, tenant, &mut page, &mut deferred);
        if let Some(since) = stalled_since
            && deferred.is_empty()
            && !reads.is_waited_for()
        {
            tenant.wait_ends(since);
            stalled_since = None;
        }
        ahead.bring(space, tenant, &mut reads, &mut page);
        reads.begin(tenant);
    }
    if let Some(since) = stalled_since {
        tenant.wait_ends(since);
    }
    reads.end(tenant);
}

/// Waits for the descriptor that this takes, as the space's faults do. None:
/// the space is gone.
fn poller(space: &Space, tenant: &Tenant) -> Option<Poller<2>> {
    let mut said = false;
    while !space.is_gone() {
        match Poller::new([space.uffd.as_fd(), space.kick.as_fd()]) {
            Ok(poller) => return Some(poller),
            Err(error) if !said => {
                said = true;
                tenant.log(&format!("{}: its faults cannot be waited for: {error}", space.id));
            }
            Err(_) => {}
        }
        std::thread::sleep(NO_DESCRIPTOR);
    }
    None
}

impl Space {
    fn serve(
        &self,
        tenant: &Tenant,
        claim: Claim,
        buffer: &mut PageBuffer,
        began: Instant,
    ) -> Served {
        match claim {
            Claim::Wait | Claim::Done => Served::Done,
            Claim::Defer => Served::Defer,
            Claim::Again | Claim::Adjust => Served::Again,
            Claim::Poison(address) => self.poison(address),
            Claim::Fill { swap_in, to_write, in_order: _ } => {
                let filled = self.serve_stored(tenant, swap_in, buffer);
                self.settle_fill(tenant, swap_in, to_write, began, filled)
            }
        }
    }

    /// What came of a fill that a thread waits for, since `began`.
    pub(crate) fn settle_fill(
        &self,
        tenant: &Tenant,
        swap_in: SwapIn,
        to_write: bool,
        began: Instant,
        filled: Filled,
    ) -> Served {
        let SwapIn { page, address, handle } = swap_in;
        match filled {
            Filled::Arrived(source, fingerprint) => {
                tenant.arrived(page, handle, fingerprint.filter(|_| !to_write));
                tenant.counters.record_fault(source, began.elapsed());
                Served::Done
            }
            Filled::WasThere => {
                tenant.was_in_place(self, page, address, handle);
                self.uffd.wake(one_page(address));
                Served::Done
            }
            Filled::Unreadable(why) => {
                tenant.lost_page(self, page, address, &why);
                self.poison(address)
            }
            Filled::Not(served) => served,
        }
    }

    /// What came of a fill that nobody waits for yet.
    pub(crate) fn settle_ahead(&self, tenant: &Tenant, swap_in: SwapIn, filled: Filled) {
        let SwapIn { page, address, handle } = swap_in;
        match filled {
            Filled::Arrived(source, fingerprint) => {
                tenant.arrived(page, handle, fingerprint);
                tenant.counters.count_ahead(source);
            }
            Filled::WasThere => tenant.was_in_place(self, page, address, handle),
            // Not worth a second try. A page that cannot be read is lost only
            // when somebody asks for it: by then it may be readable.
            Filled::Unreadable(_) | Filled::Not(_) => {
                tenant.map.set(page, Entry::Stored(handle));
            }
        }
    }

    /// Whoever touches the page at `address` dies, those who wait there first.
    pub(crate) fn poison(&self, address: u64) -> Served {
        self.uffd.poison(address);
        self.uffd.wake(one_page(address));
        Served::Done
    }

    /// Brings a page of which reading waits for nothing.
    pub(crate) fn serve_stored(
        &self,
        tenant: &Tenant,
        swap_in: SwapIn,
        buffer: &mut PageBuffer,
    ) -> Filled {
        let handle = swap_in.handle;
        let mut got = tenant.store.get_with_fingerprint(handle, &mut buffer.0);
        for _ in 0..READ_RETRIES {
            if !matches!(got, Err(GetError::Io { .. })) {
                break;
            }
            got = tenant.store.get_with_fingerprint(handle, &mut buffer.0);
        }
        match got {
            Ok(got) => self.put_in_place(tenant, swap_in, buffer, got),
            Err(error) => Filled::Unreadable(error.to_string()),
        }
    }

    /// Puts what was read where it belongs.
    pub(crate) fn put_in_place(
        &self,
        tenant: &Tenant,
        swap_in: SwapIn,
        buffer: &PageBuffer,
        (source, fingerprint): (Source, Option<Fingerprint>),
    ) -> Filled {
        let SwapIn { page, address, handle } = swap_in;
        match self.uffd.copy(address, buffer) {
            Fill::Done { .. } => Filled::Arrived(source, fingerprint),
            Fill::Present => Filled::WasThere,
            other => {
                if matches!(other, Fill::Unmapped | Fill::Gone) {
                    // The message that says so is on its way and releases the
                    // handle.
                    tenant.map.set(page, Entry::Stored(handle));
                }
                Filled::Not(self.not_filled(tenant, address, other))
            }
        }
    }

    /// What a fill that put nothing in place means for its fault.
    fn not_filled(&self, tenant: &Tenant, address: u64, outcome: Fill) -> Served {
        match outcome {
            Fill::Changing => Served::Again,
            Fill::NoMemory => {
                tenant.wake_keeper();
                Served::Defer
            }
            // The thread that waits there touched what is no longer mapped:
            // woken, it learns so from the kernel.
            Fill::Done { .. } | Fill::Present | Fill::Unmapped => {
                self.uffd.wake(one_page(address));
                Served::Done
            }
            Fill::Gone => {
                self.gone.store(true, Ordering::Release);
                Served::Done
            }
        }
    }
}
