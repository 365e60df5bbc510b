//! A tenant leaves at once: it runs there before all of its memory is there, and what is
//! missing is lent from here.
//!
//! ```text
//! here                                                 there
//! stands still: which pages changed, its state ──────▶ a file of pages that have not come, restored
//!                                                ◀──── ready
//! lent: written down                      ── go ─────▶ decided, it runs
//! asked for, or in order                  ◀──────────▶ stored
//!                                                ◀──── running: all of it is there
//! ended
//! ```
//! What stands still here stays so, and what it has is captured meanwhile: from then on its
//! pages are here even if that ends. A guest's QEMU stays stopped; of a program all processes
//! do, as CRIU has left them, and from when it is given up on by signal as well.

use std::cell::RefCell;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use strata_api::{GuestSpec, MoveWord};
use strata_pager::{SnapshotError, Tenant};
use strata_snapshot::archive::Writer;
use strata_sys::{Priority, log};
use strata_units::{ByteSize, PAGE_SIZE};

use super::super::disk::Known;
use super::super::lineage::life_of;
use super::super::take::{TORN, Whither, in_words};
use super::super::{Snapshots, lock};
use super::lending::{Changes, Lending, Said};
use super::lent::Of;
use super::out::{gone_name, memories};
use super::record::Out;
use super::standstill::Standstill;
use super::still::{ASKED_WITHIN, StandingGuest, Still};
use super::{ANSWERED_WITHIN, Sent, Wire, random};
use crate::tenants::chain;

/// How often it is tried to have it stand still.
const ATTEMPTS: u32 = 5;

impl Snapshots {
    /// The rounds are over: it leaves, and the rest of its memory after it.
    pub(super) fn lend(
        &self,
        tenant: &Arc<Tenant>,
        (host, id): (&str, &str),
        (last, most_pages): (&Known, u64),
        wire: &mut Wire,
    ) -> Result<String, String> {
        let name = &tenant.record().name;
        let mut attempts = 1..ATTEMPTS;
        let (still, mut lending, changes) = loop {
            let stood = match self.guests.spec(tenant) {
                Some(spec) => self.guest_lent(tenant, id, last, spec),
                None => self.program_lent(tenant, id, last),
            };
            match stood {
                Err(why) if why == TORN && attempts.next().is_some() => {}
                outcome => break outcome?,
            }
        };
        self.guests.step("still");
        let mut took = Standstill::begin(still.since());
        took.step("to stop it", Instant::now());
        let sent = self.send_lent(still.known(), &changes, wire);
        let ready = sent.map_err(Said::Failed).and_then(|()| {
            self.guests.step("all-sent");
            took.step("for its state and what changed", Instant::now());
            match lending.give(wire, ANSWERED_WITHIN) {
                Said::Word(MoveWord::Ready) => Ok(()),
                other => Err(other),
            }
        });
        if let Err(said) = ready {
            lending.forget();
            let known = still.known().clone();
            // It runs on.
            drop(still);
            self.forget_memory(tenant, &known);
            return Err(said.why());
        }
        self.guests.step("ready");
        took.step("until it stood there", Instant::now());
        let life = life_of(tenant);
        let lent = lending.lent();
        let (id, host) = (id.to_owned(), host.to_owned());
        let asides = Vec::new();
        let mut out = Out { id, host, life, is_given: false, asides, lent: Some(lent) };
        if let Err(why) = self.give(tenant, None, &mut out) {
            lending.forget();
            return Err(format!("{why}{}", self.runs_on(tenant, still, &out)?));
        }
        lending.is_lent();
        let before = wire.sent_bytes;
        let said = match wire.say(&MoveWord::Go) {
            Ok(()) => lending.give(wire, ANSWERED_WITHIN),
            Err(why) => Said::Failed(why),
        };
        if let Said::Word(MoveWord::Never { why }) = said {
            lending.forget();
            let note = self.runs_on(tenant, still, &out)?;
            let _ = wire.say(&MoveWord::Settled);
            return Err(format!("{why}{note}"));
        }
        took.step("until it ran", Instant::now());
        self.guests.step("answered");
        let ran = Instant::now();
        if let Err(why) = lending.give_all(said, wire) {
            self.leave(tenant, still);
            log(Priority::Error, format_args!("{}", out.refusal(name)));
            return Err(format!("{why}; {}", out.refusal(name)));
        }
        self.guests.step("whole");
        let (rest, bytes) = (wire.sent_bytes - before, wire.sent_bytes);
        self.end_still(tenant, still)?;
        lending.forget();
        self.moves.forget_out(name)?;
        let _ = wire.say(&MoveWord::Settled);
        let note = format!(
            "it stood still for {took}, {} were sent for {} of memory, {} of that after it ran there; its last page was there {:.1} s after that",
            ByteSize(bytes),
            ByteSize(most_pages * PAGE_SIZE as u64),
            ByteSize(rest),
            ran.elapsed().as_secs_f64(),
        );
        log(Priority::Notice, format_args!("{name}: moved to {}, {note}", out.host));
        Ok(format!("{name} runs at {}; {note}", out.host))
    }

    /// Has a guest stand still; how it differs from what is there, and what is about to be
    /// captured of it.
    fn guest_lent<'a>(
        &'a self,
        tenant: &Arc<Tenant>,
        id: &str,
        last: &Known,
        mut spec: GuestSpec,
    ) -> Result<(Still<'a>, Lending, Changes), String> {
        let guest = self.freezable(tenant, &spec, ASKED_WITHIN)?;
        spec.disks = guest.own.iter().map(|own| own.disk.clone()).collect();
        let in_place: Vec<String> = spec.disks.iter().map(|disk| disk.path.clone()).collect();
        let stopped = Arc::new(Mutex::new(None));
        let (stops, kept) = (Arc::clone(&guest.stoppable), Arc::clone(&stopped));
        let freeze = move || {
            let (since, state) = lock(&stops).stop(true).map_err(SnapshotError::Failed)?;
            *lock(&kept) = Some((since, state));
            Ok(since)
        };
        let of = Of::guest(guest.place());
        let first = of.request(freeze);
        let (mut lending, outcome) = Lending::begin(tenant, &self.moves, id, of, first);
        let (since, state) = match (outcome, lock(&stopped).take()) {
            (Ok(_), Some(taken)) => taken,
            (outcome, taken) => {
                lending.forget();
                if taken.is_some() {
                    lock(&guest.stoppable).go_on()?;
                }
                return Err(outcome.err().map_or("it does not stand still".to_owned(), in_words));
            }
        };
        let mut known = last.clone();
        // That is the round's, and forgotten with it.
        known.processes.iter_mut().for_each(|process| process.memory = None);
        known.guest = Some(guest.part(spec, &state, Vec::new()));
        lending.is_known_by(known.processes.iter().map(|process| process.pid).collect());
        let standing = StandingGuest::new(known.clone(), since, guest);
        let kept = lending.differs(&memories(last)).and_then(|changes| {
            self.keep_beside(&mut known, &state, (&in_place, true), None).map(|()| changes)
        });
        match kept {
            Ok(changes) => Ok((Still::Guest(Box::new(standing.with(known))), lending, changes)),
            Err(why) => {
                lending.forget();
                // It runs on.
                drop(standing);
                Err(why)
            }
        }
    }

    /// The same of a program.
    fn program_lent<'a>(
        &'a self,
        tenant: &Arc<Tenant>,
        id: &str,
        last: &Known,
    ) -> Result<(Still<'a>, Lending, Changes), String> {
        let lent = RefCell::new(None::<Lending>);
        let begin = |request| {
            if let Some(before) = lent.take() {
                before.forget();
            }
            let (lending, outcome) =
                Lending::begin(tenant, &self.moves, id, Of::program(), request);
            *lent.borrow_mut() = Some(lending);
            outcome
        };
        let stood = self.stand_still(tenant, &Whither::Lent(&begin));
        let Some(mut lending) = lent.take() else {
            return Err(stood.err().unwrap_or_else(|| "its memory cannot be captured".to_owned()));
        };
        let standing = match stood {
            Ok(standing) => standing,
            Err(why) => {
                lending.forget();
                return Err(why);
            }
        };
        lending.is_known_by(standing.known.processes.iter().map(|process| process.pid).collect());
        match lending.differs(&memories(last)) {
            Ok(changes) => Ok((Still::Program(Box::new(standing)), lending, changes)),
            Err(why) => {
                lending.forget();
                let known = standing.known.clone();
                // It runs on.
                drop(standing);
                self.forget_memory(tenant, &known);
                Err(why)
            }
        }
    }

    /// Sends what is not memory, and which pages are lent.
    fn send_lent(&self, known: &Known, changes: &Changes, wire: &mut Wire) -> Result<(), String> {
        wire.say(&MoveWord::Archive { last: true })?;
        let mut send = || -> Result<(), Box<dyn std::error::Error>> {
            let mut writer = Writer::to(Sent(wire), Path::new("to the other side"), random()?)?;
            writer.description(&serde_json::to_vec(known)?)?;
            for (name, file) in self.files_of(known, false)? {
                writer.file(&name, file)?;
            }
            for process in &known.processes {
                writer.process(process.pid, process.restart)?;
            }
            for (number, differences) in changes {
                for (name, ranges) in [
                    (gone_name(*number), &differences.gone),
                    (lent_name(*number), &differences.changed),
                ] {
                    let numbers = ranges.iter().flat_map(|&(start, end)| [start, end]);
                    let bytes: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
                    writer.file(&name, &*bytes)?;
                }
            }
            writer.finish()?;
            Ok(())
        };
        send().map_err(|error| chain(&*error))?;
        wire.say(&MoveWord::End)
    }
}

/// The file that says which pages of a process come later.
pub(super) fn lent_name(pid: u32) -> String {
    format!("lent-{pid}")
}
