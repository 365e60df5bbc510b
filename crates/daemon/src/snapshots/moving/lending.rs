//! Memory that is lent: pages of a guest that stands still here and runs elsewhere. It is
//! captured whoever asks meanwhile: first its QEMU has it, then a snapshot.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use strata_api::{FrameKind, MoveWord, Progress, Unit};
use strata_pager::{Differences, Lent as Read, Only, SnapshotError, SnapshotRequest, Tenant};
use strata_snapshot::archive::{MOST_SENT_PAGES, SentPage, pack_pages};
use strata_sys::{Priority, Range, log};
use strata_units::{ByteSize, PAGE_SIZE, PageBuffer, SpaceId};

use super::super::disk::Known;
use super::super::lock;
use super::record::{Moves, Out};
use super::{ANSWERED_WITHIN, TAKEN_WITHIN, Wire};
use crate::tenants::chain;

/// How often a page is looked for that is on its way into the store, and how long.
const LOOK_EVERY: Duration = Duration::from_millis(1);
const LOOKED_FOR: Duration = Duration::from_secs(60);
/// How often a capture is tried again that came to nothing.
const CAPTURE_EVERY: Duration = Duration::from_millis(200);
/// Why nothing is known of what gave back memory when it was frozen: another attempt may do.
pub(super) const TORN: &str = "it gave back memory at that moment";
/// How often it is told how far it is.
const TELL_EVERY: Duration = Duration::from_millis(100);
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Lent {
    /// Its QEMU.
    pid: u32,
    /// The guest's memory in it: first byte, end.
    memory: (u64, u64),
    /// Pages that are lent.
    pages: u64,
    /// The pager's number of a snapshot that has all of it.
    whole: Option<u32>,
}

/// Where its pages are.
#[derive(Debug)]
pub(super) enum Pages {
    /// In its QEMU, or in the snapshot that is being taken of that.
    Captured,
    /// In this snapshot.
    Whole(SpaceId),
    /// Some of them are nowhere.
    Lost(String),
    /// Nobody wants them.
    Unwanted,
}

/// Memory that is lent, or about to be.
pub(super) struct Lending {
    tenant: Arc<Tenant>,
    moves: Moves,
    /// Of the move.
    id: String,
    pid: u32,
    total: u64,
    given: u64,
    told: Instant,
    pages: Arc<Mutex<Pages>>,
}

/// What is said by whoever has it.
pub(super) enum Said {
    Word(MoveWord),
    Failed(String),
}

impl Lent {
    pub(super) fn bytes(&self) -> ByteSize {
        ByteSize(self.pages * PAGE_SIZE as u64)
    }

    pub(super) fn is_captured(&mut self, memory: SpaceId) {
        self.whole = Some(memory.0);
    }

    /// Whether the pager's memory of this number is what is lent.
    pub(super) fn is_in(&self, memory: SpaceId) -> bool {
        self.whole == Some(memory.0)
    }
}

fn request(
    (pid, range): (u32, Range),
    freeze: impl FnOnce() -> Result<Instant, String> + Send + 'static,
    frozen: Option<Box<dyn FnOnce() + Send>>,
) -> SnapshotRequest {
    SnapshotRequest {
        freeze: Box::new(move || {
            let since = freeze().map_err(SnapshotError::Failed)?;
            Ok(strata_pager::Standing { pids: vec![pid], since })
        }),
        thaw: Box::new(|| Ok(())),
        most_frozen_pages: 0,
        stay: false,
        urgent: true,
        only: Some(Only { pid, range }),
        carry: None,
        frozen,
    }
}

/// Keeps capturing what stands still until it is whole, from the snapshot `first` on.
struct Capturing {
    tenant: Arc<Tenant>,
    moves: Moves,
    /// Of the move.
    id: String,
    at: (u32, Range),
    pages: Arc<Mutex<Pages>>,
    is_known: Arc<AtomicBool>,
    /// Hears why nothing is known of it.
    failed: Option<Sender<Result<(), String>>>,
}

impl Capturing {
    fn go_on(self, first: SnapshotRequest) {
        let name = &self.tenant.record().name;
        let mut outcome = self.tenant.snapshot(first, |_, _| ());
        loop {
            let why = match outcome {
                Ok(freeze) => {
                    let memory = freeze.processes.first().map(|process| process.memory);
                    return memory.into_iter().for_each(|memory| self.is_whole(memory));
                }
                Err(SnapshotError::Torn) => TORN.to_owned(),
                Err(SnapshotError::Failed(why) | SnapshotError::Restless(why)) => why,
            };
            if let Some(failed) = &self.failed
                && !self.is_known.load(Ordering::Acquire)
            {
                let _ = failed.send(Err(why));
                return;
            }
            if matches!(*lock(&self.pages), Pages::Unwanted) {
                return;
            }
            if self.tenant.space_of(self.at.0).is_none() {
                let why = "its QEMU has ended before all of its memory was captured".to_owned();
                log(Priority::Error, format_args!("{name}: {why}"));
                *lock(&self.pages) = Pages::Lost(why);
                return;
            }
            log(Priority::Warning, format_args!("{name}: what is lent is captured again: {why}"));
            thread::sleep(CAPTURE_EVERY);
            let again = request(self.at, || Ok(Instant::now()), None);
            outcome = self.tenant.snapshot(again, |_, _| ());
        }
    }

    fn is_whole(&self, memory: SpaceId) {
        let mut pages = lock(&self.pages);
        if matches!(*pages, Pages::Unwanted) {
            drop(pages);
            return self.tenant.remove_snapshot_memory(memory);
        }
        *pages = Pages::Whole(memory);
        drop(pages);
        self.moves.is_captured(&self.tenant.record().name, &self.id, memory);
    }
}

impl Lending {
    /// Begins to capture a guest that `freeze` has stand still; and why it does not, or is not
    /// captured. Else how it differs from before is known to the pager from here on.
    pub(super) fn begin(
        tenant: &Arc<Tenant>,
        moves: &Moves,
        id: &str,
        at: (u32, Range),
        freeze: impl FnOnce() -> Result<Instant, String> + Send + 'static,
    ) -> (Self, Result<(), String>) {
        let (says, heard) = channel();
        let is_known = Arc::new(AtomicBool::new(false));
        let pages = Arc::new(Mutex::new(Pages::Captured));
        let capturing = Capturing {
            tenant: Arc::clone(tenant),
            moves: moves.clone(),
            id: id.to_owned(),
            at,
            pages: Arc::clone(&pages),
            is_known: Arc::clone(&is_known),
            failed: Some(says.clone()),
        };
        let frozen = move || {
            is_known.store(true, Ordering::Release);
            let _ = says.send(Ok(()));
        };
        let first = request(at, freeze, Some(Box::new(frozen)));
        let thread = thread::Builder::new().name("lent".into());
        let outcome = match thread.spawn(move || capturing.go_on(first)) {
            Ok(_) => heard.recv().unwrap_or_else(|_| Err("the tenant has ended".to_owned())),
            Err(error) => Err(format!("no thread to capture it: {error}")),
        };
        (Self::of(tenant, (moves, id), (at.0, 0), pages), outcome)
    }

    /// How it differs from the snapshot `before`: that is what it lends.
    pub(super) fn differs(&mut self, before: SpaceId) -> Result<Differences, String> {
        let until = Instant::now() + LOOKED_FOR;
        let found = loop {
            let found = match &*lock(&self.pages) {
                Pages::Whole(memory) => self.tenant.differences_of(*memory, before),
                Pages::Lost(why) => return Err(why.clone()),
                Pages::Captured | Pages::Unwanted => self.tenant.differences(self.pid, before),
            };
            match found {
                Ok(found) => break found,
                Err(error) if Instant::now() > until => return Err(chain(&error)),
                // It becomes whole just now.
                Err(_) => thread::sleep(LOOK_EVERY),
            }
        };
        self.total = found.pages;
        Ok(found)
    }

    /// What was lent before, by a worker or a command that is gone.
    pub(super) fn again(tenant: &Arc<Tenant>, out: &Out, lent: &Lent, moves: &Moves) -> Self {
        let named = (moves, &*out.id);
        let known = lock(&moves.lent).get(&out.id).cloned();
        if let Some(pages) = known {
            return Self::of(tenant, named, (lent.pid, lent.pages), pages);
        }
        let whole = lent.whole.map(SpaceId).filter(|&memory| tenant.has_snapshot_memory(memory));
        let pages = Arc::new(Mutex::new(whole.map_or(Pages::Captured, Pages::Whole)));
        let at = (lent.pid, Range { start: lent.memory.0, end: lent.memory.1 });
        if whole.is_none() {
            let capturing = Capturing {
                tenant: Arc::clone(tenant),
                moves: moves.clone(),
                id: out.id.clone(),
                at,
                pages: Arc::clone(&pages),
                is_known: Arc::default(),
                failed: None,
            };
            let begun = thread::Builder::new().name("lent".into()).spawn(move || {
                capturing.go_on(request(at, || Ok(Instant::now()), None));
            });
            if let Err(error) = begun {
                *lock(&pages) = Pages::Lost(format!("no thread to capture it: {error}"));
            }
        }
        Self::of(tenant, named, (lent.pid, lent.pages), pages)
    }

    fn of(
        tenant: &Arc<Tenant>,
        (moves, id): (&Moves, &str),
        (pid, total): (u32, u64),
        pages: Arc<Mutex<Pages>>,
    ) -> Self {
        lock(&moves.lent).insert(id.to_owned(), Arc::clone(&pages));
        let (tenant, moves, id) = (Arc::clone(tenant), moves.clone(), id.to_owned());
        Self { tenant, moves, id, pid, total, given: 0, told: Instant::now(), pages }
    }

    /// Nobody wants what was captured.
    pub(super) fn forget(&self) {
        lock(&self.moves.lent).remove(&self.id);
        let pages = std::mem::replace(&mut *lock(&self.pages), Pages::Unwanted);
        if let Pages::Whole(memory) = pages {
            self.tenant.remove_snapshot_memory(memory);
        }
    }

    /// Gives the pages that are asked for, until something else is said.
    pub(super) fn give(&mut self, wire: &mut Wire, within: Duration) -> Said {
        loop {
            let word = match wire.hear(within) {
                Ok(MoveWord::Pages { pid, ranges }) if pid == self.pid => {
                    self.answer(wire, &ranges)
                }
                Ok(word) => return Said::Word(word),
                Err(why) => Err(why),
            };
            if let Err(why) = word {
                return Said::Failed(why);
            }
            if self.told.elapsed() > TELL_EVERY {
                self.told = Instant::now();
                wire.tell(self.progress());
            }
        }
    }

    fn progress(&self) -> Progress {
        let what = "it runs there; sending what is missing".into();
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        Progress {
            what,
            done: bytes(self.given.min(self.total)),
            total: Some(bytes(self.total)),
            unit: Unit::Bytes,
        }
    }

    fn answer(&mut self, wire: &mut Wire, ranges: &[(u64, u32)]) -> Result<(), String> {
        let count: u64 = ranges.iter().map(|&(_, count)| u64::from(count)).sum();
        if count > MOST_SENT_PAGES as u64 {
            return Err("the other side asks for too much".to_owned());
        }
        let mut pages = Vec::with_capacity(count as usize);
        for &(start, count) in ranges {
            for number in 0..u64::from(count) {
                let address = start.saturating_add(number * PAGE_SIZE as u64);
                pages.push(self.page(address)?);
            }
        }
        self.given += count;
        let sent = wire.send(FrameKind::Data, &pack_pages(&pages));
        sent.map_err(|error| format!("the connection: {error}"))
    }

    /// An error: it cannot be had now, and may be later.
    fn page(&self, address: u64) -> Result<SentPage, String> {
        let mut page = PageBuffer::zeroed();
        let until = Instant::now() + LOOKED_FOR;
        loop {
            let whole = match &*lock(&self.pages) {
                Pages::Whole(memory) => Some(*memory),
                Pages::Captured => None,
                Pages::Lost(why) => {
                    log(Priority::Error, format_args!("the page at {address:#x} is lost: {why}"));
                    return Ok(SentPage::Lost);
                }
                Pages::Unwanted => return Err("it runs on here".to_owned()),
            };
            let read = match whole {
                Some(memory) => self.tenant.lent_page(memory, address, &mut page),
                None => self.tenant.lent_page_of(self.pid, address, &mut page),
            };
            match read {
                Read::Bytes => return Ok(SentPage::Bytes(Box::new(page.0))),
                Read::Zero => return Ok(SentPage::Zero),
                Read::NotYet => {}
                Read::Lost(why) if Instant::now() > until => {
                    log(Priority::Error, format_args!("the page at {address:#x} is lost: {why}"));
                    return Ok(SentPage::Lost);
                }
                // A device may answer again.
                Read::Lost(_) => {}
            }
            if Instant::now() > until {
                return Err("its memory is not captured".to_owned());
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

impl Said {
    pub(super) fn why(self) -> String {
        match self {
            Self::Word(MoveWord::Never { why }) | Self::Failed(why) => why,
            Self::Word(_) => "the other side says what was not asked for".to_owned(),
        }
    }
}

impl Lending {
    pub(super) fn lent(&self, known: &Known) -> Result<Lent, String> {
        let memory = known.guest.as_ref().ok_or("it is no guest any more")?.memory;
        let whole = match &*lock(&self.pages) {
            Pages::Whole(memory) => Some(memory.0),
            _ => None,
        };
        Ok(Lent { pid: self.pid, memory, pages: self.total, whole })
    }

    /// It is on record: if it was captured meanwhile, that is as well from here on.
    pub(super) fn is_lent(&self) {
        let whole = match &*lock(&self.pages) {
            Pages::Whole(memory) => Some(*memory),
            _ => None,
        };
        if let Some(memory) = whole {
            self.moves.is_captured(&self.tenant.record().name, &self.id, memory);
        }
    }

    /// The answer of the other side, which has been asked what became of it: it has all of it,
    /// or never let it run.
    pub(super) fn settled(&mut self, wire: &mut Wire) -> Result<MoveWord, String> {
        match self.give(wire, ANSWERED_WITHIN) {
            Said::Word(MoveWord::Never { why }) => Ok(MoveWord::Never { why }),
            said => self.give_all(said, wire).map(|()| MoveWord::Running),
        }
    }

    /// Gives all that is asked for until the other side has all of it; `said` is what it has
    /// said up to now.
    pub(super) fn give_all(&mut self, mut said: Said, wire: &mut Wire) -> Result<(), String> {
        loop {
            match said {
                Said::Word(MoveWord::Owing { pages }) => {
                    self.given = self.total.saturating_sub(pages);
                    wire.tell(self.progress());
                    said = self.give(wire, TAKEN_WITHIN);
                }
                Said::Word(MoveWord::Running) => return Ok(()),
                other => return Err(other.why()),
            }
        }
    }
}
