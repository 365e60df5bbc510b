//! A tenant leaves: what is sent, when it is given up, and what becomes of it then.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use strata_api::{
    MOVE_DISKS_VERSION, MOVE_SERVED_VERSION, MOVE_VERSION, MoveWord, Progress, Stats, Unit,
};
use strata_pager::Tenant;
use strata_snapshot::archive::Writer;
use strata_sys::{Priority, log};
use strata_units::{ByteSize, PAGE_SIZE, SpaceId};

use super::super::Snapshots;
use super::super::disk::Known;
use super::super::lineage::life_of;
use super::super::revive::ends;
use super::disks::{Aside, Away, Mirroring};
use super::pieces::{Gone, Once};
use super::record::{Moves, Out};
use super::standstill::Standstill;
use super::still::{self, Still};
use super::{ANSWERED_WITHIN, CUT, Sent, TAKEN_WITHIN, Wire, home, random};
use crate::guests::Guests;
use crate::tenants::{Tenants, chain};

/// What is sent while it stands still may take so long there and back, as the round before
/// did: then another one would gain little.
const FEW: Duration = Duration::from_millis(8);
/// How often what has changed is sent while it runs.
const MOST_ROUNDS: u32 = 12;
/// How many pages are sent in rounds that bring no less than one before: they are written as
/// fast as they are sent.
const MOST_IN_VAIN: u64 = 2048;

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

impl Out {
    /// Whether it is this tenant that was given up, and it has not ended.
    fn is_of(&self, tenant: &Tenant) -> bool {
        tenant.attachment().1 && life_of(tenant) == self.life
    }

    /// To whoever wants something else done with the tenant.
    pub(in super::super) fn refusal(&self, name: &str) -> String {
        format!(
            "{name} stands still here: it was given to {}, which has not said yet whether it runs there (strata move --settle {name} {} asks)",
            self.host, self.host
        )
    }
}

impl Snapshots {
    /// Looks after what an earlier worker was about to give up, and did not.
    pub(in super::super) fn see_to_moves(
        moves: &Moves,
        uid: u32,
        tenants: &Arc<Tenants>,
        guests: &Arc<Guests>,
    ) {
        for (name, out) in moves.all_out() {
            let tenant = tenants.get(uid, &name).filter(|tenant| out.is_of(tenant));
            let outcome = match &tenant {
                Some(_) if out.is_given => {
                    log(Priority::Warning, format_args!("{}", out.refusal(&name)));
                    continue;
                }
                Some(tenant) => still::take_back(tenant, guests),
                None if out.is_given && !out.asides.is_empty() => {
                    log(
                        Priority::Warning,
                        format_args!(
                            "{name} was given to {0} and has ended here, and it is not known whether it runs there (strata move --settle {name} {0} asks){1}",
                            out.host,
                            out.note()
                        ),
                    );
                    continue;
                }
                None => Ok(()),
            };
            if let Err(why) = outcome.and_then(|()| moves.forget_out(&name)) {
                log(Priority::Error, format_args!("{name}: {why}"));
            }
        }
    }

    /// What is known of the tenant of this name, if it was given up, or is about to be.
    pub(in super::super) fn given(&self, name: &str) -> Option<Out> {
        let out = self.moves.out(name)?;
        self.own_tenant(name).is_some_and(|tenant| out.is_of(&tenant)).then_some(out)
    }

    /// Whether the tenant was given up, and it is not known what became of it.
    pub(crate) fn is_given(&self, name: &str) -> bool {
        self.given(name).is_some_and(|out| out.is_given)
    }

    /// Moves a tenant to the daemon at the other end of `wire`, with its disks or without;
    /// what to say of it. On an error it runs on here, or the error says otherwise.
    pub(crate) fn move_out(
        &self,
        tenant: &Arc<Tenant>,
        (host, copy_disks): (&str, bool),
        wire: &mut Wire,
    ) -> Result<String, String> {
        self.check_user(tenant.record().uid)?;
        let name = &tenant.record().name;
        let _turn = self.turn(name)?;
        let has_ended = || !tenant.attachment().1;
        if has_ended() {
            return Err(format!("{name} has ended here"));
        }
        self.move_in_turn(tenant, (host, copy_disks), wire).map_err(|why| {
            match self.is_given(name) {
                true => why,
                false if has_ended() => format!("{why}; it has ended here"),
                false => format!("{why}; it runs on here"),
            }
        })
    }

    fn move_in_turn(
        &self,
        tenant: &Arc<Tenant>,
        (host, copy_disks): (&str, bool),
        wire: &mut Wire,
    ) -> Result<String, String> {
        let name = &tenant.record().name;
        let place = self.line_of(tenant).place.unwrap_or_default();
        if place.own_network || !place.shown.is_empty() || !place.forwards.is_empty() {
            return Err(
                "it is a clone with a network or directories of its own, which are here".into()
            );
        }
        let away = copy_disks.then(|| self.disks_away(tenant)).transpose()?;
        // Without disks there is nothing that another version does not know.
        let mut away = away.filter(|away| !away.is_empty());
        let launch = self.guests.spec(tenant).and_then(|spec| spec.launch);
        let is_served = launch.is_some_and(|launch| launch.servers() > 0);
        let id = format!("{:016x}", random()?);
        let hello = MoveWord::Hello {
            version: match (is_served, away.is_some()) {
                (true, _) => MOVE_SERVED_VERSION,
                (false, true) => MOVE_DISKS_VERSION,
                (false, false) => MOVE_VERSION,
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
        if let Some(away) = &mut away {
            away.ask(wire)?;
            self.guests.step("asked");
        }
        let mut sent = Vec::new();
        let moved = self.move_in_rounds(tenant, (host, &id), away.as_ref(), wire, &mut sent);
        for known in sent {
            self.forget_memory(tenant, &known);
        }
        moved
    }

    /// What whoever looks at a tenant should know of its move.
    pub(crate) fn add(&self, stats: &mut Stats) {
        let out = self.given(&stats.name).filter(|out| out.is_given && stats.uid == self.uid);
        stats.notes.extend(out.map(|out| out.refusal(&stats.name)));
    }

    fn move_in_rounds(
        &self,
        tenant: &Arc<Tenant>,
        (host, id): (&str, &str),
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
        let mut out = Out { id, host: host.clone(), life, is_given: false, asides };
        if let Err(why) = self.give(tenant, goes, &mut out) {
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
    fn give(&self, tenant: &Arc<Tenant>, goes: &Goes<'_>, out: &mut Out) -> Result<(), String> {
        let name = &tenant.record().name;
        out.asides = goes.away.map_or(Ok(Vec::new()), Away::asides)?;
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
    fn runs_on(&self, tenant: &Arc<Tenant>, still: Still<'_>, out: &Out) -> Result<String, String> {
        let note = out.put_back();
        still::take_back(tenant, &self.guests)?;
        let known = still.known().clone();
        drop(still);
        self.forget_memory(tenant, &known);
        self.moves.forget_out(&tenant.record().name)?;
        Ok(note)
    }

    /// Asks what became of a tenant that was given up, and does what follows.
    pub(crate) fn settle_move(
        &self,
        uid: u32,
        name: &str,
        wire: &mut Wire,
    ) -> Result<String, String> {
        self.check_user(uid)?;
        let _turn = self.turn_for_move(name)?;
        let Some(out) = self.moves.out(name).filter(|out| out.is_given) else {
            return Err("it was not given up here: it runs here, or has ended".to_owned());
        };
        let tenant = self.own_tenant(name).filter(|tenant| out.is_of(tenant) && !ends(tenant));
        let (version, id) = (MOVE_VERSION, out.id.clone());
        wire.say(&MoveWord::Ask { version, id, name: name.to_owned() })?;
        match wire.hear(ANSWERED_WITHIN)? {
            MoveWord::Running => {
                if let Some(tenant) = &tenant {
                    self.end_here(tenant)?;
                }
                self.moves.forget_out(name)?;
                let _ = wire.say(&MoveWord::Settled);
                log(Priority::Notice, format_args!("{name}: moved to {}", out.host));
                Ok(format!("{name} runs at {}{}", out.host, out.note()))
            }
            MoveWord::Never { why } => {
                let note = out.put_back();
                if let Some(tenant) = &tenant {
                    still::take_back(tenant, &self.guests)?;
                }
                self.moves.forget_out(name)?;
                if let Some(tenant) = tenant.as_ref().filter(|one| self.guests.spec(one).is_some())
                {
                    self.guests.resume(tenant);
                }
                let _ = wire.say(&MoveWord::Settled);
                Err(match tenant {
                    Some(_) => format!("{why}{note}; it runs on here"),
                    None => format!("{why}{note}; and it has ended here"),
                })
            }
            _ => Err("the other side says what was not asked for".to_owned()),
        }
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

/// The file that says which pages a process does not have any more.
pub(super) fn gone_name(pid: u32) -> String {
    format!("gone-{pid}")
}

fn memories(known: &Known) -> There {
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
