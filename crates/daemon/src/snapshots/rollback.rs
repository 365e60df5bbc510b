//! Rollback: the tenant's processes end, and those of a snapshot come back under their
//! numbers, ports and locks, for which the old ones must be gone. So before anything
//! is ended it is known that they can come back:
//!
//! ```text
//! check ─▶ rehearse ─▶ copy page maps ─▶ stand still, in a snapshot ─▶ end ─▶ restore
//!    each of these fails: it runs on, as if nothing had been ──┘           fails:
//!                                             restore what stood still, or keep both
//! ```
//!
//! A rehearsal restores the snapshot in namespaces of its own, beside the program,
//! up to its first instruction, with no memory in it.

use std::path::Path;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use strata_api::SnapshotRef;
use strata_pager::Tenant;
use strata_snapshot::{Restore, RestoreOptions, Shown, Terminals, keep_free};
use strata_sys::Pidfd;
use strata_units::SpaceId;

use super::disk::Known;
use super::gone::{wait_gone, wait_gone_again};
use super::preparing::Preparing;
use super::revive::{How, Life, helper};
use super::take::Standing;
use super::{Snapshots, Tell, remove_flat, unfinished};

/// How long CRIU may take for a step of a rehearsal.
const REHEARSED_WITHIN: Duration = Duration::from_secs(30);

impl Snapshots {
    /// Ends the tenant's processes and brings those of the snapshot back; on an error
    /// it runs on as it was, or the error names what is left of it.
    pub(crate) fn rollback(
        &self,
        uid: u32,
        tenant: &Arc<Tenant>,
        named: &SnapshotRef,
        terminals: Terminals,
        tell: Tell<'_>,
    ) -> Result<Life, String> {
        let name = &tenant.record().name;
        if self.check_user(tenant.record().uid).is_err() {
            // Its turns are those of this daemon's user's tenant of that name.
            return Err(format!("there is no snapshot {named}"));
        }
        let _turn = self.turn(name)?;
        let (known, origin) = self.fitting(uid, named, tell)?;
        known.is_of_programs()?;
        if !tenant.shares_pages_with(&origin) {
            return Err(format!("{} was taken of another tenant than {name}", known.info.id));
        }
        let unharmed = |why: String| format!("{why}; {name} runs on, nothing was ended");
        let mut preparing = Preparing::begin(tenant, &origin, &known).map_err(unharmed)?;
        self.rehearse(tenant, &known).map_err(unharmed)?;
        preparing.wait().map_err(unharmed)?;
        let pids = tenant.pids();
        let own = Terminals::of(&pids);
        let is_led = own.are_led();
        let terminals = if is_led { own } else { own.or(terminals) };
        let standing = self.take_standing(tenant).map_err(|why| {
            unharmed(format!("what it is now cannot be kept for the case that this fails: {why}"))
        })?;
        let again = terminals.again();
        keep_free(&self.disk.images(&known.info.id));
        keep_free(&self.disk.images(&standing.known.info.id));
        let undo = self.end(tenant, standing)?;
        let how = How { keep_connections: true, terminals };
        match self.revive(tenant, &known, preparing, how) {
            Ok(life) => {
                self.descends(tenant, &known.info.id);
                self.forget_later(tenant, &undo);
                Ok(life)
            }
            Err(why) => Err(self.undo(tenant, &known, undo, again, why)),
        }
    }

    /// Forgets what is not needed any more; nobody waits until its pages are released.
    pub(super) fn forget_later(&self, tenant: &Arc<Tenant>, undo: &Known) {
        if self.disk.remove(&undo.info.id).is_err() {
            // Its number of memory must be nobody else's while its files are there.
            return;
        }
        let memories: Vec<_> =
            undo.processes.iter().filter_map(|process| process.memory.map(SpaceId)).collect();
        let forget = |tenant: &Tenant, memories: Vec<SpaceId>| {
            memories.into_iter().for_each(|memory| tenant.remove_snapshot_memory(memory));
        };
        let (held, all) = (Arc::clone(tenant), memories.clone());
        let thread = Builder::new().name("forget".into()).spawn(move || forget(&held, all));
        if thread.is_err() {
            forget(tenant, memories);
        }
    }

    /// Sees whether a snapshot can be restored, beside the tenant that runs.
    fn rehearse(&self, tenant: &Arc<Tenant>, known: &Known) -> Result<(), String> {
        let mut options = RestoreOptions::new(helper()?);
        (options.rehearsal, options.limit) = (true, REHEARSED_WITHIN);
        options.kept_log = Some(self.disk.kept_log("restore"));
        if let Some(place) = self.line_of(tenant).place {
            let shown = place.shown.into_iter();
            options.shown = shown.map(|(copy, path)| Shown { copy, path }).collect();
        }
        let work = self.work_directory();
        let outcome = self.rehearse_in(&work, known, options);
        remove_flat(&work);
        outcome
    }

    fn rehearse_in(
        &self,
        work: &Path,
        known: &Known,
        options: RestoreOptions,
    ) -> Result<(), String> {
        let criu = self.criu()?;
        let images = self.disk.images(&known.info.id);
        let mut restore =
            Restore::begin(&criu, &images, work, options).map_err(|error| error.to_string())?;
        loop {
            let arrival = match restore.next_arrival() {
                Ok(Some(arrival)) => arrival,
                Ok(None) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            };
            if !known.processes.iter().any(|process| process.pid == arrival.old_pid) {
                return Err("CRIU restores a process that is not known".to_owned());
            }
            unfinished::note(work, arrival.pid).map_err(|error| error.to_string())?;
            arrival.fill_with_nothing().map_err(|error| format!("no thread: {error}"))?;
        }
    }

    /// Ends the tenant, which stands still.
    fn end(&self, tenant: &Arc<Tenant>, standing: Standing) -> Result<Known, String> {
        let pids = tenant.pids();
        let processes: Vec<_> = pids.iter().filter_map(|&pid| Pidfd::open(pid).ok()).collect();
        let held = tenant.hold_memory(&pids);
        tenant.kill();
        let undo = standing.end_killed();
        match wait_gone(tenant, &processes, || drop(held)) {
            Ok(()) => Ok(undo),
            Err(why) => {
                let id = undo.info.id.clone();
                self.offer(undo);
                Err(format!("{why}; what it was is in {id} (strata restore {id})"))
            }
        }
    }

    /// What stood still comes back in place of `known`, which failed because of `why`.
    fn undo(
        &self,
        tenant: &Arc<Tenant>,
        known: &Known,
        undo: Known,
        terminals: Terminals,
        why: String,
    ) -> String {
        let name = &tenant.record().name;
        let how = How { keep_connections: true, terminals };
        let back = wait_gone_again(tenant)
            .map_err(str::to_owned)
            .and_then(|()| Preparing::begin(tenant, tenant, &undo))
            .and_then(|preparing| self.revive(tenant, &undo, preparing, how));
        match back {
            Ok(_) => {
                let _ = self.forget(&undo);
                format!("{why}; {name} is back as it was before")
            }
            Err(too) => {
                let id = undo.info.id.clone();
                self.offer(undo);
                format!(
                    "{why}; {name} could not be brought back as it was either ({too}); both are kept: what it was is in {id}, what it was to become in {} (strata restore)",
                    known.info.id
                )
            }
        }
    }
}
