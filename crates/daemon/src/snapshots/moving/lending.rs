//! Memory that is lent: pages of a tenant that stands still here and runs elsewhere. It is
//! captured whoever asks meanwhile: first its processes have it (a guest's its QEMU), then a
//! snapshot.

use std::collections::BTreeMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use strata_api::{FrameKind, MoveWord, Progress, Unit};
use strata_pager::{Differences, Freeze, Lent as Read, SnapshotError, SnapshotRequest, Tenant};
use strata_snapshot::archive::{MOST_SENT_PAGES, SentPage, pack_pages};
use strata_sys::{Priority, log};
use strata_units::{PAGE_SIZE, PageBuffer, SpaceId};

use super::super::lock;
use super::super::take::in_words;
use super::lent::{Lent, Of};
use super::record::{Moves, Out};
use super::{ANSWERED_WITHIN, TAKEN_WITHIN, Wire};
use crate::tenants::chain;

/// How often a page is looked for that is on its way into the store, and how long.
const LOOK_EVERY: Duration = Duration::from_millis(1);
const LOOKED_FOR: Duration = Duration::from_secs(60);
/// How often a capture is tried again that came to nothing.
const CAPTURE_EVERY: Duration = Duration::from_millis(200);
/// How often it is told how far it is.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// By number of a process, as it is known elsewhere, how its memory differs from what is there.
pub(super) type Changes = Vec<(u32, Differences)>;

/// Where its pages are.
#[derive(Debug)]
pub(super) enum Pages {
    /// In its QEMU, or in the snapshot that is being taken of that.
    Captured,
    /// In a snapshot: of each process.
    Whole(Vec<SpaceId>),
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
    of: Of,
    /// Of each process, its number as it is known elsewhere.
    numbers: Vec<u32>,
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

/// Keeps capturing what stands still until it is whole.
struct Capturing {
    tenant: Arc<Tenant>,
    moves: Moves,
    /// Of the move.
    id: String,
    pages: Arc<Mutex<Pages>>,
}

/// How the first snapshot of what stands still begins.
type Begun = Sender<Result<Freeze, SnapshotError>>;

impl Capturing {
    /// See [`Self::go_on`].
    fn start(self, of: Of, first: SnapshotRequest, begun: Option<Begun>) -> Result<(), String> {
        let thread = thread::Builder::new().name("lent".into());
        let begun = thread.spawn(move || self.go_on(of, first, begun));
        begun.map(drop).map_err(|error| format!("no thread to capture it: {error}"))
    }

    /// From the snapshot `first` on; `begun` hears how that begins, if it is one of what runs,
    /// which it does on if nothing comes of it.
    fn go_on(self, of: Of, mut first: SnapshotRequest, begun: Option<Begun>) {
        let name = &self.tenant.record().name;
        let known = Arc::new(Mutex::new((begun.is_none(), of)));
        if let Some(begun) = begun.clone() {
            let known = Arc::clone(&known);
            first.frozen = Some(Box::new(move |freeze: &Freeze| {
                let mut known = lock(&known);
                known.0 = true;
                known.1.pids = freeze.processes.iter().map(|process| process.pid).collect();
                let _ = begun.send(Ok(freeze.clone()));
            }));
        }
        let mut outcome = self.tenant.snapshot(first, |_, _| ());
        loop {
            let why = match outcome {
                Ok(freeze) => {
                    let memories = freeze.processes.iter().map(|process| process.memory);
                    return self.is_whole(memories.collect());
                }
                Err(why) => why,
            };
            let (is_known, of) = lock(&known).clone();
            if let Some(begun) = begun.as_ref().filter(|_| !is_known) {
                let _ = begun.send(Err(why));
                return;
            }
            if matches!(*lock(&self.pages), Pages::Unwanted) {
                return;
            }
            if of.pids.iter().any(|&pid| self.tenant.space_of(pid).is_none()) {
                let whose = if of.range.is_some() { "its QEMU" } else { "a process of it" };
                let why = format!("{whose} has ended before all of its memory was captured");
                log(Priority::Error, format_args!("{name}: {why}"));
                *lock(&self.pages) = Pages::Lost(why);
                return;
            }
            let why = in_words(why);
            log(Priority::Warning, format_args!("{name}: what is lent is captured again: {why}"));
            thread::sleep(CAPTURE_EVERY);
            outcome = self.tenant.snapshot(of.again(), |_, _| ());
        }
    }

    fn is_whole(&self, memories: Vec<SpaceId>) {
        let mut pages = lock(&self.pages);
        if matches!(*pages, Pages::Unwanted) {
            drop(pages);
            return memories.into_iter().for_each(|memory| {
                self.tenant.remove_snapshot_memory(memory);
            });
        }
        *pages = Pages::Whole(memories.clone());
        drop(pages);
        self.moves.is_captured(&self.tenant.record().name, &self.id, &memories);
    }
}

impl Lending {
    /// Begins to capture what `first` has stand still; and why it does not, or is not captured.
    /// Else how it differs from before is known to the pager from here on.
    pub(super) fn begin(
        tenant: &Arc<Tenant>,
        moves: &Moves,
        id: &str,
        of: Of,
        first: SnapshotRequest,
    ) -> (Self, Result<Freeze, SnapshotError>) {
        let (begun, heard) = channel();
        let pages = Arc::new(Mutex::new(Pages::Captured));
        let mut lending = Self::of(tenant, (moves, id), of.clone(), pages);
        let outcome = match lending.capturing().start(of, first, Some(begun)) {
            Ok(()) => heard
                .recv()
                .unwrap_or_else(|_| Err(SnapshotError::Failed("the tenant has ended".to_owned()))),
            Err(why) => Err(SnapshotError::Failed(why)),
        };
        if let Ok(freeze) = &outcome {
            lending.of.pids = freeze.processes.iter().map(|process| process.pid).collect();
            lending.numbers.clone_from(&lending.of.pids);
        }
        (lending, outcome)
    }

    /// Its processes, in the order in which they were captured, have these numbers elsewhere.
    pub(super) fn is_known_by(&mut self, numbers: Vec<u32>) {
        self.numbers = numbers;
    }

    /// How it differs from the snapshots `before`: that is what it lends.
    pub(super) fn differs(&mut self, before: &BTreeMap<u32, SpaceId>) -> Result<Changes, String> {
        let whose = self.numbers.iter().enumerate();
        let found = whose.map(|(which, number)| {
            let found = self.differences(which, before.get(number).copied())?;
            Ok((*number, found))
        });
        let found = found.collect::<Result<Changes, String>>()?;
        self.total = found.iter().map(|(_, differences)| differences.pages).sum();
        Ok(found)
    }

    fn differences(&self, which: usize, before: Option<SpaceId>) -> Result<Differences, String> {
        let until = Instant::now() + LOOKED_FOR;
        loop {
            let found = match &*lock(&self.pages) {
                Pages::Whole(memories) => self.tenant.differences_of(memories[which], before),
                Pages::Lost(why) => return Err(why.clone()),
                Pages::Captured | Pages::Unwanted => {
                    self.tenant.differences(self.of.pids[which], before)
                }
            };
            match found {
                Ok(found) => return Ok(found),
                Err(error) if Instant::now() > until => return Err(chain(&error)),
                // It becomes whole just now.
                Err(_) => thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// What was lent before, by a worker or a command that is gone.
    pub(super) fn again(tenant: &Arc<Tenant>, out: &Out, lent: &Lent, moves: &Moves) -> Self {
        let known = lock(&moves.lent).get(&out.id).cloned();
        let is_known = known.is_some();
        let is_there = |memories: &Vec<SpaceId>| {
            memories.iter().all(|&memory| tenant.has_snapshot_memory(memory))
        };
        let pages = known.unwrap_or_else(|| {
            let whole = lent.memories().filter(is_there);
            Arc::new(Mutex::new(whole.map_or(Pages::Captured, Pages::Whole)))
        });
        let is_to_come = !is_known && matches!(*lock(&pages), Pages::Captured);
        let mut lending = Self::of(tenant, (moves, &out.id), lent.of(), pages);
        (lending.numbers, lending.total) = (lent.numbers(), lent.pages());
        if is_to_come {
            let (of, first) = (lending.of.clone(), lending.of.again());
            if let Err(why) = lending.capturing().start(of, first, None) {
                *lock(&lending.pages) = Pages::Lost(why);
            }
        }
        lending
    }

    fn of(
        tenant: &Arc<Tenant>,
        (moves, id): (&Moves, &str),
        of: Of,
        pages: Arc<Mutex<Pages>>,
    ) -> Self {
        lock(&moves.lent).insert(id.to_owned(), Arc::clone(&pages));
        let (tenant, moves, id) = (Arc::clone(tenant), moves.clone(), id.to_owned());
        let numbers = of.pids.clone();
        Self { tenant, moves, id, of, numbers, total: 0, given: 0, told: Instant::now(), pages }
    }

    fn capturing(&self) -> Capturing {
        let (tenant, moves) = (Arc::clone(&self.tenant), self.moves.clone());
        Capturing { tenant, moves, id: self.id.clone(), pages: Arc::clone(&self.pages) }
    }

    /// Nobody wants what was captured.
    pub(super) fn forget(&self) {
        lock(&self.moves.lent).remove(&self.id);
        let pages = std::mem::replace(&mut *lock(&self.pages), Pages::Unwanted);
        if let Pages::Whole(memories) = pages {
            memories.into_iter().for_each(|memory| self.tenant.remove_snapshot_memory(memory));
        }
    }

    /// Gives the pages that are asked for, until something else is said.
    pub(super) fn give(&mut self, wire: &mut Wire, within: Duration) -> Said {
        loop {
            let word = match wire.hear(within) {
                Ok(MoveWord::Pages { pid, ranges }) => {
                    let which = self.numbers.iter().position(|&number| number == pid);
                    let wrong = || "the other side asks for what is not lent".to_owned();
                    which.ok_or_else(wrong).and_then(|which| self.answer(wire, which, &ranges))
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

    fn answer(
        &mut self,
        wire: &mut Wire,
        which: usize,
        ranges: &[(u64, u32)],
    ) -> Result<(), String> {
        let count: u64 = ranges.iter().map(|&(_, count)| u64::from(count)).sum();
        if count > MOST_SENT_PAGES as u64 {
            return Err("the other side asks for too much".to_owned());
        }
        let mut pages = Vec::with_capacity(count as usize);
        for &(start, count) in ranges {
            for number in 0..u64::from(count) {
                let address = start.saturating_add(number * PAGE_SIZE as u64);
                pages.push(self.page(which, address)?);
            }
        }
        self.given += count;
        let sent = wire.send(FrameKind::Data, &pack_pages(&pages));
        sent.map_err(|error| format!("the connection: {error}"))
    }

    /// An error: it cannot be had now, and may be later.
    fn page(&self, which: usize, address: u64) -> Result<SentPage, String> {
        let mut page = PageBuffer::zeroed();
        let until = Instant::now() + LOOKED_FOR;
        loop {
            let whole = match &*lock(&self.pages) {
                Pages::Whole(memories) => Some(memories[which]),
                Pages::Captured => None,
                Pages::Lost(why) => {
                    log(Priority::Error, format_args!("the page at {address:#x} is lost: {why}"));
                    return Ok(SentPage::Lost);
                }
                Pages::Unwanted => return Err("it runs on here".to_owned()),
            };
            let read = match whole {
                Some(memory) => self.tenant.lent_page(memory, address, &mut page),
                None => self.tenant.lent_page_of(self.of.pids[which], address, &mut page),
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
    /// What is to be on record.
    pub(super) fn lent(&self) -> Lent {
        let mut lent = Lent::new(&self.of, &self.numbers, self.total);
        if let Pages::Whole(memories) = &*lock(&self.pages) {
            lent.is_captured(memories);
        }
        lent
    }

    /// It is on record: if it was captured meanwhile, that is as well from here on.
    pub(super) fn is_lent(&self) {
        let whole = match &*lock(&self.pages) {
            Pages::Whole(memories) => Some(memories.clone()),
            _ => None,
        };
        if let Some(memories) = whole {
            self.moves.is_captured(&self.tenant.record().name, &self.id, &memories);
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
