//! What became of a tenant that came: what is said of it, and what whoever asks later is told
//! because the other side has not heard that, or a worker has died over it.

use std::sync::Arc;

use strata_api::{MoveNear, MoveWord, SnapshotId};
use strata_pager::Tenant;
use strata_sys::{Priority, log};

use super::super::Snapshots;
use super::super::gone::ends;
use super::into::Coming;
use super::owed;
use super::record::Decided;
use super::{ANSWERED_WITHIN, Wire};
use crate::guests::Undone;

impl Snapshots {
    /// It runs, whether the other side hears of it or not: it asks then.
    pub(super) fn say_running(&self, id: &str, wire: &mut Wire) {
        // Before it is forgotten that it ran: then its images would be nobody's.
        let kept = self.keep_room(id);
        if let Err(why) = &kept {
            log(Priority::Error, format_args!("disks of a guest that came: {why}"));
        }
        let said = wire.say(&MoveWord::Running);
        if said.is_ok() && wire.hear(ANSWERED_WITHIN) == Ok(MoveWord::Settled) && kept.is_ok() {
            self.moves.forget_in(id);
        }
    }

    /// What became of a move whose end the other side did not hear.
    pub(super) fn answer_for(
        &self,
        uid: u32,
        (id, name): (String, String),
        wire: &mut Wire,
    ) -> Result<String, String> {
        let mut coming = Coming::new((id.clone(), name.clone()), uid);
        let turn = match owed::of(&id) {
            // What it is owed is what is asked about.
            Some(owed) => {
                let turn = self.turn_for_move(&name)?;
                coming.owes(owed, wire)?;
                turn
            }
            None => self.turn(&name)?,
        };
        let never = Decided::Never("it has not come whole, and was not let run".to_owned());
        match self.moves.decide(&id, never)? {
            Decided::Never(why) => {
                self.empty_room(&id);
                wire.say(&MoveWord::Never { why: why.clone() })?;
                if wire.hear(ANSWERED_WITHIN) == Ok(MoveWord::Settled) {
                    self.moves.forget_in(&id);
                }
                return Ok(why);
            }
            Decided::Ran => {}
            Decided::LetRun(snapshot) => {
                if let Err(why) = self.finish_let_run(&mut coming, snapshot) {
                    return Ok(undecided(&name, &why));
                }
            }
            Decided::Committed(snapshot) => {
                drop(turn);
                match self.finish_committed(&mut coming, snapshot, wire) {
                    Ok(true) => {}
                    Ok(false) => return Ok(name),
                    Err(why) => return Ok(undecided(&name, &why)),
                }
            }
        }
        self.say_whole(&coming, wire)?;
        Ok(name)
    }

    /// A tenant was to run here, and the worker that was about to let it has died: it does,
    /// or it is the other side's again, which is said. An error: it is not known yet.
    fn finish_committed(
        &self,
        coming: &mut Coming<'_>,
        snapshot: SnapshotId,
        wire: &mut Wire,
    ) -> Result<bool, String> {
        let tenant = self.own_tenant(&coming.name).filter(|tenant| !ends(tenant));
        coming.known = self.find(self.uid, &snapshot.clone().into()).ok();
        let outcome = match tenant {
            Some(tenant) => {
                match self.guests.spec(&tenant).is_none() || self.guests.has_devices(&tenant)? {
                    true => self.moves.came_to(&coming.id, &Decided::LetRun(snapshot)),
                    false => Err("its QEMU has not got the state of its devices".to_owned()),
                }
            }
            None => match coming.known.as_ref().is_some_and(|known| known.guest.is_some()) {
                true => self
                    .start_guest(coming, wire)
                    .and_then(|()| wire.near(&MoveNear::Committed))
                    .and_then(|()| self.bring_up(coming, false, wire)),
                false => self.bring_up(coming, false, wire),
            },
        };
        match self.moves.decided(&coming.id) {
            Some(Decided::LetRun(snapshot)) => {
                outcome?;
                self.finish_let_run(coming, snapshot)?;
                Ok(true)
            }
            _ => {
                let why = outcome.err().unwrap_or_else(|| "it was not let run".to_owned());
                self.end_come(&coming.name)?;
                self.moves.came_to(&coming.id, &Decided::Never(why.clone()))?;
                self.forget_coming(coming);
                self.empty_room(&coming.id);
                wire.say(&MoveWord::Never { why })?;
                Ok(false)
            }
        }
    }

    /// A tenant was let run here, and it is not known whether it did: it does, or it has ended
    /// here. It is the other side's in no case: it may have run. An error: it is not known yet.
    fn finish_let_run(&self, coming: &mut Coming<'_>, snapshot: SnapshotId) -> Result<(), String> {
        let name = &coming.name;
        match self.own_tenant(name).filter(|tenant| !ends(tenant)) {
            Some(tenant) => self.runs_already(&tenant)?,
            None => log(
                Priority::Error,
                format_args!("{name}: came from another host, was let run, and has ended"),
            ),
        }
        self.moves.came_to(&coming.id, &Decided::Ran)?;
        coming.known = self.find(self.uid, &snapshot.into()).ok();
        self.forget_coming(coming);
        Ok(())
    }

    /// Ends a guest's QEMU that was about to run: it may, for all that is known.
    pub(super) fn end_come(&self, name: &str) -> Result<(), String> {
        let guest = self.own_tenant(name).filter(|tenant| self.guests.spec(tenant).is_some());
        let Some(guest) = guest else { return Ok(()) };
        guest.kill();
        match ends(&guest) {
            true => Ok(()),
            false => Err("its QEMU was killed and has not ended yet".to_owned()),
        }
    }

    /// Has a tenant run that was let run.
    fn runs_already(&self, tenant: &Arc<Tenant>) -> Result<(), String> {
        match self.guests.spec(tenant) {
            // A disk of it failed: so it ran.
            Some(_) if self.guests.has_failed(tenant) => Ok(()),
            Some(_) => self.guests.runs(tenant).map_err(Undone::into_why),
            None => Ok(()),
        }
    }
}

/// It may run here, and may not: nothing is said to the other side, which asks again.
pub(super) fn undecided(name: &str, why: &str) -> String {
    let what =
        format!("{name}: came from another host, and it is not known yet whether it runs: {why}");
    log(Priority::Error, &what);
    what
}
