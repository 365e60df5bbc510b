//! A tenant comes: its memory is taken in while it runs elsewhere, then all of it, it stands
//! here, and it is decided whether it runs here.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;

use strata_api::{
    Launch, MOVE_PROGRAM_AT_ONCE_VERSION, MOVE_VERSION, MoveNear, MoveWord, SnapshotId,
    name_problem,
};
use strata_pager::Tenant;
use strata_snapshot::Terminals;
use strata_snapshot::archive::Reader;
use strata_sys::{Priority, log};
use strata_units::SpaceId;

use super::super::disk::{Known, Place};
use super::super::files::extract;
use super::super::gone::ends;
use super::super::guest_files::{described, state_in};
use super::super::machine::Machine;
use super::super::preparing::Preparing;
use super::super::revive::{At, How};
use super::super::{SnapshotState, Snapshots};
use super::asked::undecided;
use super::disks::Making;
use super::lend::lent_name;
use super::memories::{forget_memories, memory_in, piece_in};
use super::out::gone_name;
use super::owed::{self, Owed};
use super::owing::say_owing;
use super::record::{Decided, is_id};
use super::{ANSWERED_WITHIN, Wire, home};
use crate::tenants::chain;

/// Pieces that have arrived and wait to be taken in: some megabytes each, in files.
const PIECES_WAITING: usize = 16;

/// A tenant that is on its way here.
pub(super) struct Coming<'a> {
    pub(super) id: String,
    pub(super) name: String,
    uid: u32,
    /// The snapshot that it will be when all of it is there, and until it runs.
    pub(super) known: Option<Known>,
    pub(super) memories: BTreeMap<u32, SpaceId>,
    /// Of a guest: the QEMU that waits for it.
    qemu: Option<u32>,
    /// Disks of it that come along.
    disks: Option<Making<'a>>,
    /// It runs here before all of its memory is here: the host that has the rest.
    pub(super) lender: Option<String>,
    /// That rest, and the way that it comes by.
    pub(super) owed: Option<(Arc<Owed>, u64)>,
}

impl Coming<'_> {
    /// One of which nothing has come.
    pub(super) fn new((id, name): (String, String), uid: u32) -> Self {
        Self {
            id,
            name,
            uid,
            known: None,
            memories: BTreeMap::new(),
            qemu: None,
            disks: None,
            lender: None,
            owed: None,
        }
    }

    /// Some of its memory comes later, or has yet to.
    pub(super) fn owes(&mut self, owed: Arc<Owed>, wire: &mut Wire) -> Result<(), String> {
        let way = owed.come_by(wire)?;
        self.owed = Some((owed, way));
        Ok(())
    }
}

impl Snapshots {
    /// Takes in what another daemon moves here, or says what became of it.
    pub(crate) fn receive(&self, uid: u32, wire: &mut Wire) -> Result<String, String> {
        let outcome = self.check_user(uid).and_then(|()| match wire.hear(ANSWERED_WITHIN)? {
            MoveWord::Hello { version, .. }
            | MoveWord::Ask { version, .. }
            | MoveWord::Way { version, .. }
                if !(MOVE_VERSION..=MOVE_PROGRAM_AT_ONCE_VERSION).contains(&version) =>
            {
                Err(format!("moves have version {MOVE_VERSION} here, and {version} there"))
            }
            MoveWord::Hello { id, name, .. } | MoveWord::Ask { id, name, .. }
                if !is_id(&id) || name_problem(&name).is_some() =>
            {
                Err("it is not said what moves".to_owned())
            }
            MoveWord::Hello { home: theirs, .. } if theirs == home(&self.work) => {
                Err("it is here already: name another host".to_owned())
            }
            MoveWord::Hello { id, name, .. } => self.receive_tenant(uid, (id, name), wire),
            MoveWord::Ask { id, name, .. } => self.answer_for(uid, (id, name), wire),
            MoveWord::Way { id, number, .. } => self.take_disk((id, number), wire),
            _ => Err("the other side says what was not asked for".to_owned()),
        });
        if let Err(why) = &outcome {
            // Who has gone asks later.
            let _ = wire.say(&MoveWord::Never { why: why.clone() });
        }
        outcome
    }

    fn receive_tenant(
        &self,
        uid: u32,
        (id, name): (String, String),
        wire: &mut Wire,
    ) -> Result<String, String> {
        // Of a guest the QEMU is begun by whoever carries this, which takes a turn of its own.
        let mut turn = Some(self.turn(&name)?);
        if let Some(tenant) = self.own_tenant(&name)
            && !ends(&tenant)
        {
            return Err(format!("there is a tenant {name} already: it runs"));
        }
        self.check_limit()?;
        wire.say(&MoveWord::Welcome)?;
        let mut coming = Coming::new((id, name), uid);
        let came = self.receive_rounds(&mut coming, &mut turn, wire);
        if let Err(why) = came {
            match self.moves.decided(&coming.id) {
                // It may run although its monitor does not answer.
                Some(Decided::LetRun(_)) => return Ok(undecided(&coming.name, &why)),
                Some(Decided::Committed(_)) => {
                    // Whatever came back of it is ended; it is the other side's again.
                    let never = Decided::Never(why.clone());
                    let ended = self.end_come(&coming.name);
                    if let Err(too) = ended.and_then(|()| self.moves.came_to(&coming.id, &never)) {
                        return Ok(undecided(&coming.name, &format!("{why}; {too}")));
                    }
                }
                _ => {}
            }
            log(Priority::Warning, format_args!("{}: did not come: {why}", coming.name));
            self.forget_coming(&coming);
            coming.disks = None;
            self.empty_room(&coming.id);
            return Err(why);
        }
        // If this fails, it is seen to run by whoever asks.
        let _ = self.moves.came_to(&coming.id, &Decided::Ran);
        self.guests.step("ran");
        log(Priority::Notice, format_args!("{}: came from another host, and runs", coming.name));
        // It was only the way here.
        self.forget_coming(&coming);
        self.say_whole(&coming, wire)?;
        Ok(coming.name)
    }

    fn receive_rounds<'a>(
        &'a self,
        coming: &mut Coming<'a>,
        turn: &mut Option<super::super::Turn<'_>>,
        wire: &mut Wire,
    ) -> Result<(), String> {
        loop {
            let last = match wire.hear(super::TAKEN_WITHIN)? {
                MoveWord::Archive { last } => last,
                MoveWord::Piece => self.pieces_arrive(coming, wire)?,
                MoveWord::Disks { disks } if coming.disks.is_none() && coming.known.is_none() => {
                    let (making, over) = self.make_room(&coming.id, &disks)?;
                    coming.disks = Some(making);
                    wire.say(&MoveWord::Room { over })?;
                    continue;
                }
                MoveWord::Lends { from } if coming.known.is_none() => {
                    let is_plain = from.len() <= 64 && !from.chars().any(char::is_control);
                    coming.lender = is_plain.then_some(from);
                    continue;
                }
                MoveWord::Copying => continue,
                MoveWord::Never { why } => return Err(why),
                _ => return Err("the other side says what was not asked for".to_owned()),
            };
            self.arrives(coming, last, wire)?;
            self.guests.step("arrived");
            if last && let Some(owed) = owed::of(&coming.id) {
                coming.owes(owed, wire)?;
            }
            if coming.known.as_ref().is_some_and(|known| known.guest.is_some())
                && coming.qemu.is_none()
            {
                *turn = None;
                self.start_guest(coming, wire)?;
                self.serve_disks(coming)?;
            }
            if last {
                break;
            }
            wire.say(&MoveWord::Taken)?;
        }
        self.bring_up(coming, true, wire)
    }

    /// Has a QEMU begun that waits.
    pub(super) fn start_guest(
        &self,
        coming: &mut Coming<'_>,
        wire: &mut Wire,
    ) -> Result<(), String> {
        let known = coming.known.as_ref().ok_or("nothing of it has come")?;
        let snapshot = known.info.id.clone();
        let launch = known.guest.as_ref().and_then(|part| part.spec.launch.as_ref());
        let (name, servers) = (coming.name.clone(), launch.map_or(0, Launch::servers));
        wire.near(&MoveNear::StartGuest { snapshot, name, servers })?;
        match wire.hear_near(ANSWERED_WITHIN)? {
            MoveNear::Started { pid } => coming.qemu = Some(pid),
            MoveNear::Failed { why } => return Err(why),
            _ => return Err("the command line says something else".to_owned()),
        }
        Ok(())
    }

    /// Has the QEMU that waits open its disks to who copies them.
    fn serve_disks(&self, coming: &Coming<'_>) -> Result<(), String> {
        let Some((disks, pid)) = coming.disks.as_ref().zip(coming.qemu) else { return Ok(()) };
        let part = coming.known.as_ref().and_then(|known| known.guest.as_ref());
        let spec = &part.ok_or("nothing of it has come")?.spec;
        disks.is_for(&spec.disks.iter().map(|disk| &*disk.path).collect::<Vec<_>>())?;
        let holder = self.own_tenant(&coming.name).ok_or("its memory is gone")?;
        disks.serve(&holder, pid)
    }

    /// Has what is all here stand, and, if it is held, run only when the other side says so.
    pub(super) fn bring_up(
        &self,
        coming: &Coming<'_>,
        held: bool,
        wire: &mut Wire,
    ) -> Result<(), String> {
        let known = coming.known.as_ref().ok_or("nothing of it has come")?;
        let id = known.info.id.clone();
        if let Some((owed, _)) = &coming.owed {
            owed.runs(false);
        }
        let mut hold = |at| match at {
            At::Stands if !held => Ok(()),
            At::Stands => {
                self.guests.step("stands");
                wire.say(&MoveWord::Ready)?;
                match wire.hear(ANSWERED_WITHIN)? {
                    MoveWord::Go => {}
                    _ => return Err("the other side says what was not asked for".to_owned()),
                }
                self.guests.step("told");
                match self.moves.decide(&coming.id, Decided::Committed(id.clone()))? {
                    Decided::Committed(_) => {}
                    _ => return Err("it was said before that it never runs here".to_owned()),
                }
                let _ = wire.near(&MoveNear::Committed);
                self.guests.step("committed");
                Ok(())
            }
            At::Runs => {
                self.moves.came_to(&coming.id, &Decided::LetRun(id.clone()))?;
                self.guests.step("let-run");
                self.lets_run(coming);
                Ok(())
            }
        };
        let holder = self.own_tenant(&coming.name).ok_or("its memory is gone")?;
        if let Some(disks) = &coming.disks {
            disks.end(&holder)?;
        }
        if let Some(pid) = coming.qemu {
            let named = known.info.id.clone().into();
            self.fill_held(coming.uid, &holder, &named, (pid, false), &mut |_| (), &mut hold)?;
            say_owing(coming, wire);
            return Ok(());
        }
        let taken = |pid: u32| Path::new(&format!("/proc/{pid}")).exists();
        let is_taken = known.processes.iter().any(|process| taken(process.pid));
        self.settle(&holder, is_taken.then(Place::default))?;
        let preparing = Preparing::begin(&holder, &holder, known)?;
        let how = How { keep_connections: true, terminals: Terminals::default() };
        self.revive_held(&holder, known, preparing, how, &mut hold)?;
        Ok(())
    }

    /// Receives one snapshot file.
    fn receive_file(&self, id: &str, wire: &mut Wire) -> Result<Reader, String> {
        let (path, file) = self.disk.arriving(id)?;
        let received = wire.file(&file);
        let reader = received.and_then(|()| Reader::open(&path).map_err(|error| chain(&error)));
        // From here on it has no name, or there is none.
        self.disk.forget_arrived_of(id);
        reader
    }

    /// Receives pieces, and takes each in while the next ones arrive. Whether the archive that
    /// comes after them is the last one.
    fn pieces_arrive(&self, coming: &mut Coming<'_>, wire: &mut Wire) -> Result<bool, String> {
        let known = coming.known.clone().ok_or("nothing of it has come")?;
        let id = coming.id.clone();
        let (send, readers) = sync_channel(PIECES_WAITING);
        let (heard, taken) = thread::scope(|scope| {
            let takes = move || {
                self.with_holder(&known.info, |holder| {
                    let taken =
                        readers.iter().try_for_each(|reader| piece_in(&reader, coming, holder));
                    if taken.is_err() {
                        forget_memories(coming, holder);
                    }
                    taken
                })
            };
            let taker = thread::Builder::new().name("pieces".into()).spawn_scoped(scope, takes);
            let heard = loop {
                let reader = match self.receive_file(&id, wire) {
                    Ok(reader) => reader,
                    Err(why) => break Err(why),
                };
                if send.send(reader).is_err() {
                    break Err("it is not taken in".to_owned());
                }
                match wire.hear(ANSWERED_WITHIN) {
                    Ok(MoveWord::Piece) => {}
                    Ok(MoveWord::Archive { last }) => break Ok(last),
                    Ok(MoveWord::Never { why }) | Err(why) => break Err(why),
                    Ok(_) => break Err("the other side says what was not asked for".to_owned()),
                }
            };
            drop(send);
            let failed = |_| Err("who takes it in has failed".to_owned());
            let taken = match taker {
                Ok(taker) => taker.join().unwrap_or_else(failed),
                Err(error) => Err(format!("no thread to take it in: {error}")),
            };
            (heard, taken)
        });
        taken?;
        heard
    }

    /// Takes in one snapshot file.
    fn arrives(&self, coming: &mut Coming<'_>, last: bool, wire: &mut Wire) -> Result<(), String> {
        let reader = self.receive_file(&coming.id, wire)?;
        let mut known = described(&reader, Path::new("what arrived"))?;
        self.check_arrived(coming, &reader, &mut known)?;
        let id = match &coming.known {
            Some(known) => known.info.id.clone(),
            None => self.next_id(&coming.name, None)?,
        };
        self.becomes_ours(coming, id, &mut known);
        self.with_holder(&known.info.clone(), |holder| {
            let taken = self.memories_in(&reader, coming, &known, holder);
            if taken.is_err() {
                forget_memories(coming, holder);
            }
            taken
        })?;
        if last && coming.lender.is_some() {
            self.with_holder(&known.info.clone(), |holder| {
                let lent = self.lent_in(&reader, coming, &known, holder);
                if lent.is_err() {
                    forget_memories(coming, holder);
                }
                lent
            })?;
        }
        for process in &mut known.processes {
            process.memory = coming.memories.get(&process.pid).map(|memory| memory.0);
        }
        if last {
            self.rest_in(&reader, &known)?;
        }
        coming.known = Some(known.clone());
        super::super::lock(&self.known).insert(known.info.id.clone(), known);
        Ok(())
    }

    fn check_arrived(
        &self,
        coming: &Coming<'_>,
        reader: &Reader,
        known: &mut Known,
    ) -> Result<(), String> {
        let listed = |process: &super::super::disk::Process| {
            reader.processes().iter().any(|known| known.pid == process.pid)
        };
        let was_guest = coming.known.as_ref().map(|known| known.guest.is_some());
        if known.processes.is_empty()
            || !known.processes.iter().all(listed)
            || was_guest.is_some_and(|was| was != known.guest.is_some())
        {
            return Err("what arrived contradicts itself".to_owned());
        }
        let unfit = known.machine.as_ref().and_then(|one| one.unfit_for(Machine::here(), false));
        if let Some(why) = unfit {
            return Err(why);
        }
        match &mut known.guest {
            Some(part) => part.comes_here(reader, coming.disks.is_some()),
            None => Ok(()),
        }
    }

    /// What it is called here, and whose it is.
    fn becomes_ours(&self, coming: &Coming<'_>, id: SnapshotId, known: &mut Known) {
        known.processes.iter_mut().for_each(|process| process.memory = None);
        known.machine = Some(Machine::here().clone());
        known.as_written = None;
        known.info.id = id;
        known.info.tenant.clone_from(&coming.name);
        known.info.uid = coming.uid;
        known.info.guest = known.guest.is_some();
        known.info.disks = Vec::new();
        known.info.scheduled = false;
        known.info.label = None;
        known.info.parent = None;
        known.info.state = SnapshotState::Usable;
        known.info.file_bytes = 0;
        known.place = None;
        known.coming = Some(coming.id.clone());
    }

    /// Takes in memory: all of a process that is new, what has changed of the others.
    fn memories_in(
        &self,
        reader: &Reader,
        coming: &mut Coming<'_>,
        known: &Known,
        holder: &Tenant,
    ) -> Result<(), String> {
        let pids: Vec<u32> = known.processes.iter().map(|process| process.pid).collect();
        let ended: Vec<u32> =
            coming.memories.keys().filter(|pid| !pids.contains(pid)).copied().collect();
        for pid in ended {
            if let Some(memory) = coming.memories.remove(&pid) {
                holder.remove_snapshot_memory(memory);
            }
        }
        pids.into_iter().try_for_each(|pid| memory_in(reader, coming, pid, holder))
    }

    /// Takes in what a snapshot has beside memory: it is one from here on, for the next
    /// worker too.
    fn rest_in(&self, reader: &Reader, known: &Known) -> Result<(), String> {
        let images = self.disk.make(&known.info.id)?;
        match &known.guest {
            Some(part) => self.disk.write_state(&known.info.id, &state_in(reader, part)?)?,
            None => {
                extract(reader, &images)?;
                for process in &known.processes {
                    for name in [gone_name(process.pid), lent_name(process.pid)] {
                        let _ = std::fs::remove_file(images.join(name));
                    }
                }
            }
        }
        self.disk.write(known)
    }

    /// Forgets the snapshot that a tenant came by.
    pub(super) fn forget_coming(&self, coming: &Coming<'_>) {
        match &coming.known {
            // What cannot be removed is in the list of snapshots.
            Some(known) => drop(self.forget(known)),
            None => {
                if let Some(holder) = self.own_tenant(&coming.name) {
                    for memory in coming.memories.values() {
                        holder.remove_snapshot_memory(*memory);
                    }
                }
            }
        }
    }
}
