//! Pages of one space that are being read from the file tier, while its handler
//! goes on serving others.
//!
//! Between a page's claim and its landing the handler acts on events, too: the page
//! may be discarded, moved away, or be another one by then. So each that is wanted
//! owns a reference to what is stored, and lands only where its entry still says
//! that it is arriving from there. Whoever waits for one that does not land is
//! woken, and asks again.
//!
//! What lies near each other in the file is read at once: pages that were evicted
//! together were written together.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_store::{FileRead, Source, Unread};
use strata_sys::{EventFd, READ_BYTES, ReadId, ReadQueue};
use strata_units::{Handle, PageBuffer, PageId};

use crate::fault::events::{Asker, FaultMessage};
use crate::fault::handler::{MOST_DEFERRED, Served, SwapIn};
use crate::map::address::one_page;
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// Reads of one space under way or at hand, 64 KiB at most each. A device that
/// needs more of them at a time to be busy is busy with other spaces' too.
const READS: u16 = 32;
/// Of them, for threads that wait.
const RESERVED: usize = 8;
/// Bytes between two pages that are read along rather than read apart.
const GAP_BYTES: u64 = 16 << 10;
/// Pages ahead of readers that may be on their way.
const MOST_AHEAD_PAGES: usize = 256;
/// A read that failed or brought wrong bytes is tried again after these; then the
/// page is given up for lost. Devices that are reset answer again within a second.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(100),
    Duration::from_secs(1),
];
/// What was read for a reader in order that did not come by then is forgotten.
const SPARES_KEPT: Duration = Duration::from_millis(50);

/// Why a page is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    /// A thread waits for it, since then.
    Fault {
        /// When the handler learnt of it.
        began: Instant,
        /// The thread is about to write.
        to_write: bool,
    },
    /// A reader in order is coming.
    Ahead,
    /// The same, and not near yet: what is read stays at hand, and nothing is
    /// claimed.
    Spare,
}

impl Why {
    fn rank(self) -> u8 {
        match self {
            Self::Fault { .. } => 0,
            Self::Ahead => 1,
            Self::Spare => 2,
        }
    }
}

/// A page that is to come, with a reference of its own to what is stored.
#[derive(Clone, Copy, Debug)]
struct Want {
    page: PageId,
    address: u64,
    handle: Handle,
    read: FileRead,
    why: Why,
    /// Reads that failed, or brought wrong bytes.
    tries: u32,
    /// It was in a read that failed: one bad block shall not cost its neighbours
    /// a try.
    alone: bool,
}

/// One read, and the pages in it.
#[derive(Debug)]
struct Cluster {
    id: ReadId,
    start: u64,
    /// When it was read; none: it has not ended.
    ended: Option<Instant>,
    wants: Vec<Want>,
}

/// What came of a page that was read.
enum Landing {
    /// Nothing is left to do.
    Over,
    /// It lies elsewhere by now.
    Moved(Want),
    /// The bytes are not its.
    Failed,
    /// It cannot be put in place just now; the bytes stay at hand.
    Later(Want),
}

/// See the module's text.
pub(crate) struct Reads {
    /// None: there was nothing to wait for yet.
    queue: Option<ReadQueue>,
    bell: Arc<EventFd>,
    /// Not begun yet.
    waiting: VecDeque<Want>,
    /// To be tried again, and when.
    failed: Vec<(Instant, Want)>,
    clusters: Vec<Cluster>,
    tally: Tally,
}

/// How many pages are wanted, all told.
#[derive(Clone, Copy, Default, Debug)]
struct Tally {
    claimed: usize,
    spares: usize,
}

impl Tally {
    fn of(&mut self, why: Why) -> &mut usize {
        if why == Why::Spare { &mut self.spares } else { &mut self.claimed }
    }

    fn add(&mut self, why: Why) {
        *self.of(why) += 1;
    }

    fn sub(&mut self, why: Why) {
        *self.of(why) -= 1;
    }
}

impl Reads {
    pub(crate) fn new(space: &Space) -> Self {
        Self {
            queue: None,
            bell: Arc::clone(&space.kick),
            waiting: VecDeque::new(),
            failed: Vec::new(),
            clusters: Vec::new(),
            tally: Tally::default(),
        }
    }

    /// Sees to a page that is to come: `page` is claimed, or `why` is
    /// [`Why::Spare`]. False: it is not in the file; whoever asks has it at once.
    pub(crate) fn take(&mut self, tenant: &Tenant, swap_in: SwapIn, why: Why) -> bool {
        let SwapIn { page, address, handle } = swap_in;
        let begun = self.clusters.iter_mut().flat_map(|cluster| &mut cluster.wants);
        let failed = self.failed.iter_mut().map(|(_, want)| want);
        let known = self
            .waiting
            .iter_mut()
            .chain(begun)
            .chain(failed)
            .find(|want| want.page == page && want.address == address && want.handle == handle);
        if let Some(known) = known {
            // Who waits already goes on waiting since then.
            if why.rank() < known.why.rank() {
                self.tally.sub(known.why);
                self.tally.add(why);
                known.why = why;
            }
            return true;
        }
        let Some(read) = tenant.store.file_read(handle) else { return false };
        self.queue.get_or_insert_with(|| ReadQueue::new(READS, &self.bell));
        tenant.store.retain(handle);
        self.tally.add(why);
        self.waiting.push_back(Want { page, address, handle, read, why, tries: 0, alone: false });
        true
    }

    /// Whether more may be read ahead.
    pub(crate) fn has_room(&self) -> bool {
        self.queue.is_none() || self.tally.claimed < MOST_AHEAD_PAGES
    }

    /// Whether more may be kept at hand.
    pub(crate) fn has_room_for_spares(&self) -> bool {
        self.tally.spares < MOST_AHEAD_PAGES
    }

    /// Pages that will need DRAM when they have come.
    pub(crate) fn coming(&self) -> i64 {
        self.tally.claimed as i64
    }

    /// Whether a thread waits for something that is read.
    pub(crate) fn is_waited_for(&self) -> bool {
        let begun = self.clusters.iter().flat_map(|cluster| &cluster.wants);
        let failed = self.failed.iter().map(|(_, want)| want);
        let mut wants = self.waiting.iter().chain(begun).chain(failed);
        wants.any(|want| matches!(want.why, Why::Fault { .. }))
    }

    /// Whether something is at hand that nobody has asked for.
    fn has_spares(&self) -> bool {
        self.clusters.iter().any(Cluster::is_spare)
    }

    /// Forgets what has been at hand for too long.
    fn drop_old_spares(&mut self, tenant: &Tenant) {
        if self.has_spares() {
            let now = Instant::now();
            while self.drop_spare(tenant, |ended| now.duration_since(ended) >= SPARES_KEPT) {}
        }
    }

    /// Makes room for one read; false: all are needed.
    fn drop_spare(&mut self, tenant: &Tenant, old_enough: impl Fn(Instant) -> bool) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        let spare =
            |cluster: &Cluster| cluster.is_spare() && cluster.ended.is_some_and(&old_enough);
        let Some(at) = self.clusters.iter().position(spare) else { return false };
        let cluster = self.clusters.remove(at);
        for want in cluster.wants {
            self.tally.sub(want.why);
            tenant.store.release(want.handle);
        }
        queue.give_back(cluster.id);
        true
    }

    /// Begins what can be begun, those first for which threads wait.
    pub(crate) fn begin(&mut self, tenant: &Tenant) {
        if self.waiting.is_empty() {
            return;
        }
        self.waiting
            .make_contiguous()
            .sort_by_key(|want| (want.why.rank(), want.read.page_file(), want.read.start()));
        while let Some(&first) = self.waiting.front() {
            let Some(room) = self.queue.as_ref().map(ReadQueue::room) else { return };
            let urgent = matches!(first.why, Why::Fault { .. });
            let least = if urgent { 0 } else { RESERVED };
            if room <= least && (first.why == Why::Spare || !self.drop_spare(tenant, |_| true)) {
                return;
            }
            let (start, end, wants) = self.gather();
            let Some(queue) = &mut self.queue else { return };
            match tenant.store.begin_read(queue, &first.read, (start, end)) {
                Some(id) => self.clusters.push(Cluster { id, start, ended: None, wants }),
                None => {
                    self.waiting.extend(wants);
                    return;
                }
            }
        }
    }

    /// The first that waits, and those near it in the file.
    fn gather(&mut self) -> (u64, u64, Vec<Want>) {
        let first = self.waiting.pop_front().expect("the caller has seen it");
        let (mut start, mut end) = (first.read.start(), first.read.end());
        let mut wants = vec![first];
        let most = READ_BYTES as u64;
        // Twice: what comes before its neighbour in this list may lie behind it.
        for _ in 0..2 {
            self.waiting.retain(|want| {
                let (low, high) = (want.read.start().min(start), want.read.end().max(end));
                let near = !(first.alone || want.alone)
                    && want.read.page_file() == first.read.page_file()
                    && want.read.start() <= end + GAP_BYTES
                    && start <= want.read.end() + GAP_BYTES
                    && high - low <= most;
                if near {
                    (start, end) = (low, high);
                    wants.push(*want);
                }
                !near
            });
        }
        (start, end, wants)
    }

    /// Puts in place what has been read. Whether any thread was served; those who
    /// have to wait for something else go to `deferred`.
    pub(crate) fn land(
        &mut self,
        space: &Space,
        tenant: &Arc<Tenant>,
        buffer: &mut PageBuffer,
        deferred: &mut Vec<FaultMessage>,
    ) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        while let Some((id, result)) = queue.completed() {
            let cluster = self.clusters.iter_mut().find(|cluster| cluster.id == id);
            let cluster = cluster.expect("what ends was begun");
            cluster.ended = Some(Instant::now());
            if let (Err(error), Some(want)) = (result, cluster.wants.first()) {
                tenant.store.note_failed_read(&want.read, &error);
                let single = cluster.wants.len() == 1;
                for want in std::mem::take(&mut cluster.wants) {
                    if single {
                        self.failed.push(again(want));
                    } else {
                        self.waiting.push_back(Want { alone: true, ..want });
                    }
                }
            }
        }
        let mut served = false;
        let mut at = 0;
        while at < self.clusters.len() {
            let cluster = &mut self.clusters[at];
            if cluster.ended.is_none() || cluster.is_spare() {
                at += 1;
                continue;
            }
            let bytes = queue.bytes(cluster.id);
            let mut wants = std::mem::take(&mut cluster.wants);
            // Those first for whom threads wait; neighbours may be unpacked together.
            wants.sort_by_key(|want| (want.why.rank(), want.read.start()));
            for want in wants {
                if want.why == Why::Spare {
                    cluster.wants.push(want);
                    continue;
                }
                served |= matches!(want.why, Why::Fault { .. });
                match land(space, tenant, want, cluster.start, bytes, buffer) {
                    Landing::Over => {
                        self.tally.sub(want.why);
                        tenant.store.release(want.handle);
                        if matches!(want.why, Why::Fault { .. }) {
                            tenant.counters.add(Counter::Faults, 1);
                        }
                    }
                    Landing::Moved(want) => self.waiting.push_back(want),
                    Landing::Failed => self.failed.push(again(want)),
                    Landing::Later(mut want) => {
                        defer(space, &want, deferred);
                        self.tally.sub(want.why);
                        self.tally.add(Why::Spare);
                        want.why = Why::Spare;
                        cluster.wants.push(want);
                    }
                }
            }
            if cluster.wants.is_empty() {
                queue.give_back(cluster.id);
                self.clusters.swap_remove(at);
            } else {
                at += 1;
            }
        }
        self.see_to_failed(space, tenant);
        self.drop_old_spares(tenant);
        served
    }

    /// Tries again what failed, when it is time to. What failed too often is lost;
    /// but nothing is that nobody waits for: a later read may succeed.
    fn see_to_failed(&mut self, space: &Space, tenant: &Tenant) {
        if self.failed.is_empty() {
            return;
        }
        let now = Instant::now();
        let (waiting, tally) = (&mut self.waiting, &mut self.tally);
        self.failed.retain(|&(when, want)| {
            let waits = matches!(want.why, Why::Fault { .. });
            if waits && (want.tries as usize) <= PAUSES.len() {
                if when <= now {
                    waiting.push_back(want);
                }
                return when > now;
            }
            if !is_arriving(space, tenant, &want) {
                if waits {
                    space.uffd.wake(one_page(want.address));
                }
            } else if waits {
                let why = tenant.store.last_tier_error();
                let why = why.unwrap_or_else(|| "a stored page is corrupt".into());
                tenant.lost_page(space, want.page, want.address, &why);
                space.poison(want.address);
                tenant.counters.add(Counter::Faults, 1);
            } else {
                tenant.map.set(want.page, Entry::Stored(want.handle));
            }
            tally.sub(want.why);
            tenant.store.release(want.handle);
            false
        });
    }

    /// How long the handler may sleep at most, if nothing else happens.
    pub(crate) fn patience(&self) -> Option<Duration> {
        if !self.failed.is_empty() {
            Some(PAUSES[0])
        } else {
            self.has_spares().then_some(SPARES_KEPT)
        }
    }

    /// The space is given up: nothing lands any more.
    pub(crate) fn end(mut self, tenant: &Tenant) {
        // Before anything is released that a read under way may still bring.
        drop(self.queue.take());
        let begun = self.clusters.drain(..).flat_map(|cluster| cluster.wants);
        let failed = self.failed.drain(..).map(|(_, want)| want);
        for want in self.waiting.drain(..).chain(begun).chain(failed) {
            tenant.store.release(want.handle);
        }
    }
}

impl Cluster {
    /// Read, and nobody has asked for any of it.
    fn is_spare(&self) -> bool {
        self.ended.is_some()
            && self.wants.iter().all(|want| want.why == Why::Spare)
            && !self.wants.is_empty()
    }
}

/// What failed once more, and when it is tried again.
fn again(want: Want) -> (Instant, Want) {
    let pause = PAUSES.get(want.tries as usize).copied().unwrap_or_default();
    (Instant::now() + pause, Want { tries: want.tries + 1, alone: true, ..want })
}

/// Whether the page is still to come there, from there. No event can change that
/// before this thread has acted on it.
fn is_arriving(space: &Space, tenant: &Tenant, want: &Want) -> bool {
    let there = lock(&space.gate).object.page(want.address);
    there == Some(want.page) && tenant.map.get(want.page) == Entry::Arriving(want.handle)
}

fn land(
    space: &Space,
    tenant: &Tenant,
    want: Want,
    start: u64,
    bytes: &[u8],
    buffer: &mut PageBuffer,
) -> Landing {
    let Want { page, address, handle, .. } = want;
    if !is_arriving(space, tenant, &want) {
        if matches!(want.why, Why::Fault { .. }) {
            space.uffd.wake(one_page(address));
        }
        return Landing::Over;
    }
    let swap_in = SwapIn { page, address, handle };
    let filled = match tenant.store.get_from(handle, &want.read, start, bytes, &mut buffer.0) {
        Ok(fingerprint) => space.put_in_place(tenant, swap_in, buffer, (Source::File, fingerprint)),
        Err(Unread::Moved) => match tenant.store.file_read(handle) {
            Some(read) => return Landing::Moved(Want { read, ..want }),
            // It has come back to DRAM meanwhile.
            None => space.serve_stored(tenant, swap_in, buffer),
        },
        Err(Unread::Corrupt) => {
            tenant.store.note_failed_read(&want.read, &"a stored page is corrupt");
            return Landing::Failed;
        }
    };
    match want.why {
        Why::Fault { began, to_write } => {
            match space.settle_fill(tenant, swap_in, to_write, began, filled) {
                Served::Done => Landing::Over,
                Served::Defer | Served::Again => Landing::Later(want),
            }
        }
        Why::Ahead | Why::Spare => {
            space.settle_ahead(tenant, swap_in, filled);
            Landing::Over
        }
    }
}

/// Its fault is tried again with the others that wait.
fn defer(space: &Space, want: &Want, deferred: &mut Vec<FaultMessage>) {
    let Why::Fault { to_write, .. } = want.why else { return };
    if deferred.len() < MOST_DEFERRED {
        let address = want.address;
        deferred.push(FaultMessage { address, asker: Asker::Seen, to_write, protected: false });
    } else {
        space.uffd.wake(one_page(want.address));
    }
}
