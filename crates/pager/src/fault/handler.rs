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
mod follow;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use strata_store::{Fingerprint, GetError, Source};
use strata_sys::{Fill, Poller, Priority, Range, log, set_thread_name, wake_in_time};
use strata_units::{Handle, PAGE_SIZE, PAGES_PER_LEAF, PageBuffer, PageId};

use crate::fault::events::{Asker, FaultMessage};
use crate::fault::reads::{Reads, Why};
use crate::map::address::one_page;
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::registry::SpaceField;
use crate::map::settings::Setting;
use crate::tenant::Tenant;
use crate::tenant::space::{Gate, Space};
use ahead::Ahead;
pub(crate) use ahead::MOST_HOT;
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
/// A first-touch fill never maps more than this at once: 2 MiB, one leaf.
const MOST_ZERO_PAGES: u64 = PAGES_PER_LEAF as u64;
/// A first-touch fill takes at most this part of what is free in the budget.
const ZERO_SHARE: i64 = 16;
/// Most faults that wait for DRAM here; further ones fault again.
pub(crate) const MOST_DEFERRED: usize = 4096;

/// A stored page that is to be put in place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SwapIn {
    pub(crate) page: PageId,
    pub(crate) address: u64,
    pub(crate) handle: Handle,
}

/// What is to be done about one fault.
#[derive(Debug)]
enum Claim {
    /// Nothing more to do.
    Done,
    /// Put this stored page in place.
    Fill {
        swap_in: SwapIn,
        /// The thread that waits is about to write to it.
        to_write: bool,
        /// The program has said that it reads in order here.
        in_order: bool,
    },
    /// It is on its way out; the keeper hands it back when it has arrived.
    Wait,
    /// No DRAM left: later.
    Defer,
    /// The address space is changing: in a moment.
    Again,
    /// What the process inherited is not known yet.
    Adjust,
    /// Its content is lost.
    Poison(u64),
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
    let mut reads = Reads::new(space, tenant);
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
    /// Decides what one fault gets. The caller holds the gate.
    fn claim(
        &self,
        tenant: &Tenant,
        gate: &mut Gate,
        fault: &FaultMessage,
        waits_long: bool,
    ) -> Claim {
        let address = fault.address;
        if fault.protected {
            return match self.before_write(tenant, gate, address) {
                true => Claim::Done,
                false => Claim::Again,
            };
        }
        let agent = self.agent();
        // Before its agent has come nothing of a process can be evicted: to make it
        // wait for DRAM would only put that off.
        let must_wait = agent.is_some() && !waits_long;
        if let Some(agent) = agent {
            // That of a restored process may still be on its way.
            let is_stored = gate.page(address).is_some_and(|page| {
                matches!(tenant.map.get(page), Entry::Stored(_) | Entry::Arriving(_))
            });
            if agent.ranges.own.contains(address) && !is_stored {
                return self.zero_here(tenant, address);
            }
            // What has not been moved there is elsewhere: whoever reads it, the
            // evictor too, is told so.
            if agent.ranges.transfer.contains(address) {
                return match self.held.takes(fault.asker.thread(), address) {
                    true => Claim::Wait,
                    false => Claim::Poison(address),
                };
            }
        }
        let Some(page) = gate.page_or_new(&tenant.map, self.id, address) else {
            return Claim::Defer;
        };
        let entry = tenant.map.get(page);
        if self.must_adjust(entry) {
            return Claim::Adjust;
        }
        match entry {
            // Discarded unseen (MADV_FREE), or another thread's fault on the
            // same page came first: then it is there, and this only wakes.
            Entry::Resident { .. } | Entry::Kept(_) | Entry::OnNode => {
                self.zero_gone(tenant, address)
            }
            Entry::Leaving { slot, .. } => {
                tenant.map.set(page, Entry::Leaving { slot, wanted: true });
                Claim::Wait
            }
            Entry::Lost | Entry::Pending | Entry::Copied => Claim::Poison(address),
            _ if !tenant.may_fill() && must_wait => {
                tenant.wake_keeper();
                Claim::Defer
            }
            Entry::Untouched | Entry::Discarded => {
                let window = self.zero_window(tenant, gate, address);
                self.zero_new(tenant, window, page)
            }
            Entry::Stored(handle) | Entry::Arriving(handle) => {
                tenant.map.set(page, Entry::Arriving(handle));
                self.note_touched(address);
                let swap_in = SwapIn { page, address, handle };
                let in_order = !gate.settings.is_empty()
                    && gate.settings.at(address) == Some(Setting::Sequential);
                Claim::Fill { swap_in, to_write: fault.to_write, in_order }
            }
        }
    }

    /// The stored page at `address`, to be brought although nobody asked. The
    /// caller holds the gate.
    fn claim_ahead(&self, tenant: &Tenant, gate: &Gate, address: u64) -> Option<SwapIn> {
        let page = gate.page(address)?;
        let Entry::Stored(handle) = tenant.map.get(page) else { return None };
        if self.is_unadjusted() {
            return None;
        }
        tenant.map.set(page, Entry::Arriving(handle));
        Some(SwapIn { page, address, handle })
    }

    /// How much to map at a first touch: one page, but twice as much each time
    /// as long as touches go on where the last fill ended.
    fn zero_window(&self, tenant: &Tenant, gate: &mut Gate, address: u64) -> Range {
        let in_sequence = address == gate.zero_end && gate.zero_pages > 0;
        let wish = if in_sequence { (gate.zero_pages * 2).min(MOST_ZERO_PAGES) } else { 1 };
        let afford = (tenant.headroom_pages() / ZERO_SHARE).max(1) as u64;
        let wish = wish.min(afford);
        let leaf_end = (address / (PAGES_PER_LEAF * PAGE_SIZE) as u64 + 1)
            * (PAGES_PER_LEAF * PAGE_SIZE) as u64;
        let mapped_end = gate.registered_end(address).unwrap_or(address + PAGE_SIZE as u64);
        let most = leaf_end.min(mapped_end).min(address + wish * PAGE_SIZE as u64);
        let mut end = address + PAGE_SIZE as u64;
        while end < most && gate.page(end).is_none_or(|page| tenant.map.get(page).reads_zero()) {
            end += PAGE_SIZE as u64;
        }
        gate.zero_end = end;
        gate.zero_pages = if in_sequence { wish } else { 1 };
        Range { start: address, end }
    }

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

    /// A zero page at `address` unless there is a page. Under the gate, as all
    /// zero pages are put in place: later the page could have been evicted, and
    /// zeroes would stand where a stored page belongs.
    fn zero_here(&self, tenant: &Tenant, address: u64) -> Claim {
        match self.uffd.zero(one_page(address)) {
            Fill::Done { .. } => Claim::Done,
            other => self.not_zeroed(tenant, address, other),
        }
    }

    /// The same for a page that was in place, for all that is known. If it is not,
    /// the kernel has taken it by MADV_FREE, or it was lost: nobody else would ever
    /// say so.
    fn zero_gone(&self, tenant: &Tenant, address: u64) -> Claim {
        let filled = self.uffd.zero(one_page(address));
        if !matches!(filled, Fill::Done { .. }) {
            return self.not_zeroed(tenant, address, filled);
        }
        let pid = self.pid().unwrap_or(0);
        tenant.log(&format!("page {address:#x} of process {pid} was in place and is gone: zero"));
        Claim::Done
    }

    /// Zero pages in `window`, whose first page is `first`. The caller holds the
    /// gate: see [`Self::zero_here`].
    fn zero_new(&self, tenant: &Tenant, window: Range, first: PageId) -> Claim {
        let filled = match self.uffd.zero(window) {
            // The window may span mappings of different kinds.
            Fill::Unmapped if window.len() > PAGE_SIZE as u64 => {
                self.uffd.zero(one_page(window.start))
            }
            other => other,
        };
        let Fill::Done { pages } = filled else {
            // Present: entered by nobody yet, or just being discarded.
            return self.not_zeroed(tenant, window.start, filled);
        };
        tenant.counters.add(Counter::ZeroFaults, 1);
        for offset in 0..pages as u32 {
            let page = PageId(first.0 + offset);
            tenant.now_resident(page);
        }
        Claim::Done
    }

    /// What a zero fill that put nothing in place means for its fault.
    fn not_zeroed(&self, tenant: &Tenant, address: u64, outcome: Fill) -> Claim {
        match self.not_filled(tenant, address, outcome) {
            Served::Done => Claim::Done,
            Served::Defer => Claim::Defer,
            Served::Again => Claim::Again,
        }
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
