//! A tenant leaves: what is sent, when it is given up, and what becomes of it then.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use strata_api::{
    MOVE_AT_ONCE_VERSION, MOVE_DISKS_VERSION, MOVE_PROGRAM_AT_ONCE_VERSION, MOVE_SERVED_VERSION,
    MOVE_VERSION, MoveWord, Progress, Unit,
};
use strata_pager::Tenant;
use strata_snapshot::archive::Writer;
use strata_sys::{Priority, log};
use strata_units::{ByteSize, PAGE_SIZE, SpaceId};

use super::super::Snapshots;
use super::super::disk::Known;
use super::super::lineage::life_of;
use super::disks::{Aside, Away, Mirroring};
use super::pieces::{Gone, Once};
use super::record::Out;
use super::standstill::Standstill;
use super::still::{self, Still};
use super::{ANSWERED_WITHIN, CUT, Sent, TAKEN_WITHIN, Wire, home, random};
use crate::tenants::chain;

/// What is sent while it stands still may take so long there and back, as the round before
/// did: then another one would gain little.
const FEW: Duration = Duration::from_millis(8);
/// How often what has changed is sent while it runs.
const MOST_ROUNDS: u32 = 12;
/// How many pages are sent in rounds that bring no less than one before: they are written as
/// fast as they are sent.
const MOST_IN_VAIN: u64 = 2048;

/// How it goes.
#[derive(Clone, Copy)]
pub(crate) struct How {
    pub(crate) copy_disks: bool,
    /// It runs there before all of its memory is there.
    pub(crate) at_once: bool,
}

/// Where it goes, and with what.
struct Goes<'a> {
    host: &'a str,
    id: &'a str,
    /// Of memory.
    pages: u64,
    away: Option<&'a Away>,
    mirroring: Option<&'a Mirroring<'a>>,
}

/// Memory that the other side has: the snapshot that it was sent from, by process.
type There = BTreeMap<u32, SpaceId>;

impl Snapshots {
    /// Moves a tenant to the daemon at the other end of `wire`, with its disks or without;
    /// what to say of it. On an error it runs on here, or the error says otherwise.
    pub(crate) fn move_out(
        &self,
        tenant: &Arc<Tenant>,
        host: &str,
        how: How,
        wire: &mut Wire,
    ) -> Result<String, String> {
        self.check_user(tenant.record().uid)?;
        let name = &tenant.record().name;
        let _turn = self.turn(name)?;
        let has_ended = || !tenant.attachment().1;
        if has_ended() {
            return Err(format!("{name} has ended here"));
        }
        self.move_in_turn(tenant, host, how, wire).map_err(|why| match self.is_given(name) {
            true => why,
            false if has_ended() => format!("{why}; it has ended here"),
            false => format!("{why}; it runs on here"),
        })
    }

    fn move_in_turn(
        &self,
        tenant: &Arc<Tenant>,
        host: &str,
        how: How,
        wire: &mut Wire,
    ) -> Result<String, String> {
        let name = &tenant.record().name;
        let place = self.line_of(tenant).place.unwrap_or_default();
        if place.own_network || !place.shown.is_empty() || !place.forwards.is_empty() {
            return Err(
                "it is a clone with a network or directories of its own, which are here".into()
            );
        }
        let away = how.copy_disks.then(|| self.disks_away(tenant)).transpose()?;
        // Without disks there is nothing that another version does not know.
        let mut away = away.filter(|away| !away.is_empty());
        let launch = self.guests.spec(tenant).and_then(|spec| spec.launch);
        let is_served = launch.is_some_and(|launch| launch.servers() > 0);
        if how.at_once && is_served {
            let why = "it has a swap disk, or one that is read through a pool: leave out --at-once";
            return Err(why.into());
        }
        let id = format!("{:016x}", random()?);
        let hello = MoveWord::Hello {
            version: match (is_served, how.at_once, away.is_some()) {
                (_, true, _) if self.guests.spec(tenant).is_none() => MOVE_PROGRAM_AT_ONCE_VERSION,
                (_, true, _) => MOVE_AT_ONCE_VERSION,
                (true, ..) => MOVE_SERVED_VERSION,
                (false, false, true) => MOVE_DISKS_VERSION,
                (false, false, false) => MOVE_VERSION,
            },
            id: id.clone(),
            name: name.clone(),
            home: home(&self.work),
        };
        wire.say(&hello)?;
        wire.expect(&MoveWord::Welcome, ANSWERED_WITHIN).map_err(|why| match why == CUT {
            true => "nobody takes it in there".to_owned(),
            false => why,
        })?;
        self.guests.step("welcome");
        if how.at_once {
            wire.say(&MoveWord::Lends { from: machine_name() })?;
        }
        if let Some(away) = &mut away {
            away.ask(wire)?;
            self.guests.step("asked");
        }
        let mut sent = Vec::new();
        let goes = (host, &*id, how.at_once);
        let moved = self.move_in_rounds(tenant, goes, away.as_ref(), wire, &mut sent);
        for known in sent {
            self.forget_memory(tenant, &known);
        }
        moved
    }

    fn move_in_rounds(
        &self,
        tenant: &Arc<Tenant>,
        (host, id, at_once): (&str, &str, bool),
        away: Option<&Away>,
        wire: &mut Wire,
        sent: &mut Vec<Known>,
    ) -> Result<String, String> {
        let (mut least, mut all, mut in_vain) = (u64::MAX, 0, 0);
        let mut mirroring = None;
        for round in 0..MOST_ROUNDS {
            let known = self.round(tenant, away, &mut |progress| wire.tell(progress))?;
            sent.push(known.clone());
            let there = sent.len().checked_sub(2).and_then(|last| sent.get(last));
            let began = Instant::now();
            let pages =
                self.send(tenant, &known, &there.map(memories).unwrap_or_default(), None, wire)?;
            self.guests.step("sent");
            wire.expect(&MoveWord::Taken, TAKEN_WITHIN)?;
            self.guests.step("taken");
            if sent.len() > 1 {
                self.forget_memory(tenant, &sent.remove(0));
            }
            let took = began.elapsed();
            if let Some(away) = away.filter(|_| round == 0) {
                mirroring = Some(self.mirror(tenant, (away, id), wire)?);
            }
            if round > 0 {
                in_vain += if pages > least / 4 * 3 { pages } else { 0 };
                if took <= FEW || in_vain > MOST_IN_VAIN {
                    break;
                }
            }
            (least, all) = (least.min(pages), all.max(pages));
        }
        if let Some(last) = sent.last().filter(|_| at_once) {
            return self.lend(tenant, (host, id), (last, all), wire);
        }
        mirroring.as_ref().map_or(Ok(()), |mirroring| mirroring.catch_up(wire))?;
        let (still, gone) = self.stand_sent(tenant, away, wire)?;
        self.guests.step("still");
        let mut took = Standstill::begin(still.since());
        let stands = gone.as_ref().ok().and_then(|gone| gone.stands);
        took.step("to stop it", stands.unwrap_or_else(|| still.since()));
        took.step("for its memory", Instant::now());
        let there = sent.last().map(memories).unwrap_or_default();
        let last =
            gone.and_then(|gone| self.send(tenant, still.known(), &there, Some(&gone), wire));
        let ready = last.and_then(|_| {
            self.guests.step("all-sent");
            took.step("for the rest", Instant::now());
            wire.expect(&MoveWord::Ready, ANSWERED_WITHIN)
        });
        if let Err(why) = ready {
            let known = still.known().clone();
            // It runs on.
            drop(still);
            self.forget_memory(tenant, &known);
            return Err(why);
        }
        self.guests.step("ready");
        took.step("until it stood there", Instant::now());
        let goes = Goes { host, id, pages: all, away, mirroring: mirroring.as_ref() };
        self.hand_over(tenant, &goes, (still, took), wire)
    }

    /// Has it stand still, and sends what of its memory is read meanwhile: what that was, or
    /// why not all of it.
    fn stand_sent<'a>(
        &'a self,
        tenant: &Arc<Tenant>,
        away: Option<&Away>,
        wire: &mut Wire,
    ) -> Result<(Still<'a>, Result<Gone, String>), String> {
        let (once, runs) = Once::new(self.guests.spec(tenant).is_some());
        thread::scope(|scope| {
            let sender = thread::Builder::new()
                .name("pieces".into())
                .spawn_scoped(scope, move || runs.send(wire))
                .map_err(|error| format!("no thread to send it: {error}"))?;
            let still = self.stand(tenant, &once, away);
            // If it was not used, nobody sends by it any more.
            drop(once);
            let gone = sender.join().unwrap_or_else(|_| Err("who sends it has failed".to_owned()));
            match (still, gone) {
                // The one is because of the other.
                (Err(_), Err(why)) => Err(why),
                (still, gone) => Ok((still?, gone)),
            }
        })
    }

    /// The other side has all of it, and it stands still on both: it is given up here.
    fn hand_over(
        &self,
        tenant: &Arc<Tenant>,
        goes: &Goes<'_>,
        (still, mut took): (Still<'_>, Standstill),
        wire: &mut Wire,
    ) -> Result<String, String> {
        let name = &tenant.record().name;
        let (id, host, life) = (goes.id.to_owned(), goes.host.to_owned(), life_of(tenant));
        let asides = Vec::new();
        let mut out = Out { id, host: host.clone(), life, is_given: false, asides, lent: None };
        if let Err(why) = self.give(tenant, goes.away, &mut out) {
            return Err(format!("{why}{}", self.runs_on(tenant, still, &out)?));
        }
        let answer = wire.say(&MoveWord::Go).and_then(|()| wire.hear(ANSWERED_WITHIN));
        match answer {
            Ok(MoveWord::Running) => {
                took.step("until it ran", Instant::now());
                self.guests.step("answered");
                let bytes = wire.sent_bytes + goes.mirroring.map_or(0, Mirroring::sent_bytes);
                self.end_still(tenant, still)?;
                self.moves.forget_out(name)?;
                let _ = wire.say(&MoveWord::Settled);
                log(
                    Priority::Notice,
                    format_args!("{name}: moved to {host}, stood still for {took}"),
                );
                Ok(format!(
                    "{name} runs at {host}; it stood still for {took}, {} were sent for {} of memory{}{}",
                    ByteSize(bytes),
                    ByteSize(goes.pages * PAGE_SIZE as u64),
                    goes.away
                        .map(|away| format!(" and {} of disks", ByteSize(away.bytes())))
                        .unwrap_or_default(),
                    out.note(),
                ))
            }
            Ok(MoveWord::Never { why }) => {
                let note = self.runs_on(tenant, still, &out)?;
                let _ = wire.say(&MoveWord::Settled);
                Err(format!("{why}{note}"))
            }
            other => {
                self.leave(tenant, still);
                let why = other.err().unwrap_or_else(|| "it says something else".to_owned());
                log(Priority::Error, format_args!("{}", out.refusal(name)));
                Err(format!("{why}; {}", out.refusal(name)))
            }
        }
    }

    /// Gives it up: from here on it runs here only if it never runs there.
    pub(super) fn give(
        &self,
        tenant: &Arc<Tenant>,
        away: Option<&Away>,
        out: &mut Out,
    ) -> Result<(), String> {
        let name = &tenant.record().name;
        out.asides = away.map_or(Ok(Vec::new()), Away::asides)?;
        self.moves.write_out(name, out)?;
        still::give_up(tenant, &self.guests)?;
        self.guests.step("giving");
        out.is_given = true;
        self.moves.write_out(name, out)?;
        self.guests.step("given");
        out.asides.iter().try_for_each(Aside::put)?;
        self.guests.step("aside");
        Ok(())
    }

    /// What was given up is not wanted there. What is to be known of its images.
    pub(super) fn runs_on(
        &self,
        tenant: &Arc<Tenant>,
        still: Still<'_>,
        out: &Out,
    ) -> Result<String, String> {
        let note = out.put_back();
        still::take_back(tenant, &self.guests)?;
        let known = still.known().clone();
        drop(still);
        self.forget_memory(tenant, &known);
        self.moves.forget_out(&tenant.record().name)?;
        Ok(note)
    }

    /// Sends a snapshot: all of it, or what is not `there`; how many pages. `last`: it stands
    /// still, and this was sent of it.
    fn send(
        &self,
        tenant: &Tenant,
        known: &Known,
        there: &There,
        last: Option<&Gone>,
        wire: &mut Wire,
    ) -> Result<u64, String> {
        wire.tell(Progress {
            what: if last.is_some() { "sending the rest" } else { "sending" }.into(),
            done: wire.sent_bytes,
            total: None,
            unit: Unit::Bytes,
        });
        wire.say(&MoveWord::Archive { last: last.is_some() })?;
        let pages =
            self.send_file(tenant, known, there, last, wire).map_err(|error| chain(&*error))?;
        wire.say(&MoveWord::End)?;
        Ok(pages)
    }

    fn send_file(
        &self,
        tenant: &Tenant,
        known: &Known,
        there: &There,
        last: Option<&Gone>,
        wire: &mut Wire,
    ) -> Result<u64, Box<dyn std::error::Error>> {
        let mut writer = Writer::to(Sent(wire), Path::new("to the other side"), random()?)?;
        writer.description(&serde_json::to_vec(known)?)?;
        let files = if last.is_some() { self.files_of(known, false)? } else { Vec::new() };
        for (name, file) in files {
            writer.file(&name, file)?;
        }
        let mut pages = 0;
        let mut gone = Vec::new();
        for process in &known.processes {
            writer.process(process.pid, process.restart)?;
            let memory = SpaceId(process.memory.ok_or("its memory is not loaded")?);
            let mut add = |address: u64, page: &strata_units::PageBuffer| {
                pages += 1;
                writer.page(address, &page.0).map_err(std::io::Error::other)
            };
            let before = there.get(&process.pid).copied();
            let is_gone = |address| last.is_some_and(|gone| gone.has(memory, address));
            let mut ranges = Vec::new();
            tenant.read_changes(before, memory, is_gone, |address, page| match page {
                Some(page) => add(address, page),
                None => {
                    join(&mut ranges, address);
                    Ok(())
                }
            })?;
            gone.push((process.pid, ranges));
        }
        for (pid, ranges) in gone {
            let bytes: Vec<u8> = ranges
                .iter()
                .flat_map(|(start, end): &(u64, u64)| [start.to_le_bytes(), end.to_le_bytes()])
                .flatten()
                .collect();
            writer.file(&gone_name(pid), &*bytes)?;
        }
        writer.finish()?;
        Ok(pages)
    }
}

/// What this machine is called, for messages there.
fn machine_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().chars().filter(|c| !c.is_control()).take(64).collect()
}

/// The file that says which pages a process does not have any more.
pub(super) fn gone_name(pid: u32) -> String {
    format!("gone-{pid}")
}

pub(super) fn memories(known: &Known) -> There {
    let one = |process: &super::super::disk::Process| Some((process.pid, SpaceId(process.memory?)));
    known.processes.iter().filter_map(one).collect()
}

/// Adds a page to ranges in order.
fn join(ranges: &mut Vec<(u64, u64)>, address: u64) {
    let end = address + PAGE_SIZE as u64;
    match ranges.last_mut() {
        Some(last) if last.1 == address => last.1 = end,
        _ => ranges.push((address, end)),
    }
}
