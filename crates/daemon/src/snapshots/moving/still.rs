//! A tenant that is on its way: its memory while it runs, and at last while it stands still.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use strata_pager::Tenant;
use strata_sys::{SIGCONT, SIGSTOP};
use strata_units::SpaceId;

use super::super::disk::Known;
use super::super::freezing::{Freezable, Manner};
use super::super::gone::ends;
use super::super::guest_disks::{Image, OwnDisk};
use super::super::take::{FEW_PAGES, Numbers, Standing, Whither};
use super::super::{Snapshots, Tell, guest_swap, lock};
use super::disks::Away;
use super::pieces::Once;
use crate::guests::{Alone, Guests, Stoppable};

/// How often a round may turn out torn: as for snapshots of programs.
const ATTEMPTS: [u64; 3] = [0, FEW_PAGES, u64::MAX];

/// How long a guest's QEMU may take to answer what is to be known before it is stopped: it
/// runs meanwhile, and on a busy machine its monitor waits for the guest.
pub(super) const ASKED_WITHIN: Duration = Duration::from_secs(20);

/// A tenant that stands still, all of it captured. Dropped, it runs on.
pub(super) enum Still<'a> {
    Program(Box<Standing>),
    Guest(Box<StandingGuest<'a>>),
}

pub(super) struct StandingGuest<'a> {
    known: Known,
    pub(super) since: Instant,
    stoppable: Arc<Mutex<Stoppable>>,
    /// It is not to run on by itself.
    is_kept: bool,
    _alone: Alone<'a>,
}

impl<'a> StandingGuest<'a> {
    pub(super) fn new(known: Known, since: Instant, guest: Freezable<'a>) -> Self {
        let Freezable { stoppable, alone, .. } = guest;
        Self { known, since, stoppable, is_kept: false, _alone: alone }
    }

    /// The same, known as this.
    pub(super) fn with(mut self, known: Known) -> Self {
        self.known = known;
        self
    }
}

impl Drop for StandingGuest<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            // If it does not now, whoever finds its mark goes on trying.
            let _ = lock(&self.stoppable).go_on();
        }
    }
}

impl Still<'_> {
    pub(super) fn known(&self) -> &Known {
        match self {
            Self::Program(standing) => &standing.known,
            Self::Guest(guest) => &guest.known,
        }
    }

    /// Since when.
    pub(super) fn since(&self) -> Instant {
        match self {
            Self::Program(standing) => standing.since().unwrap_or_else(Instant::now),
            Self::Guest(guest) => guest.since,
        }
    }
}

/// Has a tenant stand still whoever lives and dies here.
pub(super) fn give_up(tenant: &Tenant, guests: &Guests) -> Result<(), String> {
    match guests.spec(tenant) {
        Some(_) => guests.give_up(tenant),
        None => {
            tenant.signal(SIGSTOP);
            Ok(())
        }
    }
}

/// The opposite: a program runs, a guest does as soon as somebody sees to it.
pub(super) fn take_back(tenant: &Tenant, guests: &Guests) -> Result<(), String> {
    match guests.spec(tenant) {
        Some(_) => guests.take_back(tenant),
        None => {
            tenant.signal(SIGCONT);
            Ok(())
        }
    }
}

impl Snapshots {
    /// The memory of a tenant, which runs on, or has it stand still (`stay`). In no list,
    /// and not on disk.
    fn memory_of(
        &self,
        tenant: &Arc<Tenant>,
        away: Option<&Away>,
        tell: Tell<'_>,
    ) -> Result<Known, String> {
        let id = self.number_to_come(&tenant.record().name);
        let mut known = self.capturing(tenant, id);
        if self.guests.spec(tenant).is_some() {
            return self.guest_memory(tenant, known, (None, away), tell).map(|(known, _)| known);
        }
        let (freeze, numbers) = self.take_memory(tenant, &known.info.id.clone(), true, tell)?;
        known.is_captured(&freeze, &numbers);
        Ok(known)
    }

    /// The same in a round of a move.
    pub(super) fn round(
        &self,
        tenant: &Arc<Tenant>,
        away: Option<&Away>,
        tell: Tell<'_>,
    ) -> Result<Known, String> {
        self.memory_of(tenant, away, tell).map_err(|why| format!("its memory: {why}"))
    }

    /// Has it stand still, with all that it is captured, or carried `once`.
    pub(super) fn stand<'a>(
        &'a self,
        tenant: &Arc<Tenant>,
        once: &Once,
        away: Option<&Away>,
    ) -> Result<Still<'a>, String> {
        if self.guests.spec(tenant).is_none() {
            return self
                .stand_still(tenant, &Whither::Sent(once))
                .map(|still| Still::Program(Box::new(still)));
        }
        let known = self.capturing(tenant, self.number_to_come(&tenant.record().name));
        match self.guest_memory(tenant, known, (Some(once), away), &mut |_| ())? {
            (_, Some(guest)) => Ok(Still::Guest(Box::new(guest))),
            (_, None) => Err("it does not stand still".to_owned()),
        }
    }

    /// Ends what is left of a tenant that runs elsewhere by now.
    pub(super) fn end_here(&self, tenant: &Arc<Tenant>) -> Result<(), String> {
        tenant.kill();
        if !ends(tenant) {
            return Err("its processes here were killed and have not ended yet".to_owned());
        }
        self.guests.forget_given(tenant);
        Ok(())
    }

    /// Ends what stood still and runs elsewhere by now.
    pub(super) fn end_still(&self, tenant: &Arc<Tenant>, still: Still<'_>) -> Result<(), String> {
        match still {
            Still::Program(standing) => {
                tenant.kill();
                let known = standing.end_killed();
                self.end_here(tenant)?;
                // Before it is said: its name is free then.
                self.forget_memory(tenant, &known);
            }
            Still::Guest(mut guest) => {
                guest.is_kept = true;
                self.end_here(tenant)?;
                self.forget_memory(tenant, &guest.known);
            }
        }
        Ok(())
    }

    /// Leaves what stood still as it is: it was given up.
    pub(super) fn leave(&self, tenant: &Arc<Tenant>, still: Still<'_>) {
        let known = still.known().clone();
        if let Still::Guest(mut guest) = still {
            guest.is_kept = true;
        }
        self.forget_memory(tenant, &known);
    }

    /// Forgets what was captured for a move.
    pub(super) fn forget_memory(&self, tenant: &Arc<Tenant>, known: &Known) {
        // Nobody names its files.
        let _ = self.disk.remove(&known.info.id);
        for memory in known.processes.iter().filter_map(|process| process.memory) {
            tenant.remove_snapshot_memory(SpaceId(memory));
        }
    }

    fn guest_memory<'a>(
        &'a self,
        tenant: &Arc<Tenant>,
        mut known: Known,
        (once, away): (Option<&Once>, Option<&Away>),
        tell: Tell<'_>,
    ) -> Result<(Known, Option<StandingGuest<'a>>), String> {
        let stay = once.is_some();
        let mut spec = self.guests.spec(tenant).ok_or("it is no guest")?;
        let guest = self.freezable(tenant, &spec, ASKED_WITHIN)?;
        if let Some(disk) =
            spec.disks.iter().find(|disk| disk.temporary || disk.opened != disk.path)
            && away.is_none()
        {
            let todo = match guest.own.iter().any(|own| own.is_pooled) {
                // These are not copied.
                true => {
                    "and it writes to disks that are read through a pool: strata snapshot export writes a file that travels"
                }
                false => "have it copied there (--copy-disks)",
            };
            return Err(format!("its disk {} was made for it here: {todo}", disk.path));
        }
        if let Some(OwnDisk { disk, .. }) =
            guest.own.iter().find(|own| own.is_pooled && own.disk.layers.is_empty())
        {
            // Its lock is another process's than the one that waits there.
            return Err(format!(
                "its disk {} is written to through a pool, and nobody else can have it open meanwhile: give it an overlay",
                disk.path
            ));
        }
        spec.disks = guest.own.iter().map(|own| own.disk.clone()).collect();
        let in_place: Vec<String> = spec.disks.iter().map(|disk| disk.path.clone()).collect();
        for most_frozen_pages in ATTEMPTS {
            let manner = Manner { most_frozen_pages, urgent: true, once };
            let Some(frozen) = guest.freeze(tenant, &manner, tell)? else { continue };
            known.processes = frozen.swap.map(guest_swap::process).into_iter().collect();
            known.is_captured(&frozen.freeze, &Numbers::new());
            known.info.guest = true;
            known.guest = Some(guest.part(spec, &frozen.state, Vec::new()));
            let standing = stay.then(|| StandingGuest::new(known.clone(), frozen.since, guest));
            let kept = self.keep_beside(&mut known, &frozen.state, (&in_place, stay), away);
            return match (kept, standing) {
                (Ok(()), None) => Ok((known, None)),
                (Ok(()), Some(standing)) => Ok((known.clone(), Some(standing.with(known)))),
                (Err(why), standing) => {
                    // It runs on.
                    drop(standing);
                    self.forget_memory(tenant, &known);
                    Err(why)
                }
            };
        }
        Err("its memory cannot be captured".into())
    }
}

impl Snapshots {
    /// Keeps what a guest's snapshot for a move has beside memory.
    pub(super) fn keep_beside(
        &self,
        known: &mut Known,
        state: &[u8],
        (disks, stands_still): (&[String], bool),
        away: Option<&Away>,
    ) -> Result<(), String> {
        let id = known.info.id.clone();
        if let Some(part) = &mut known.guest {
            part.in_place = Some(match away {
                Some(away) => away.images(stands_still)?,
                None => images_at(part.directory(), disks, stands_still)?,
            });
            if let Some(away) = away {
                away.adapt(part);
            }
        }
        self.disk.make(&id)?;
        self.disk.write_state(&id, state)
    }
}

/// What is compared of the disks that it keeps: what they are when nobody writes to them.
fn images_at(
    directory: &str,
    paths: &[String],
    stands_still: bool,
) -> Result<BTreeMap<String, Option<Image>>, String> {
    let image = |path: &String| {
        let image = stands_still.then(|| Image::of(directory, path)).transpose()?;
        Ok((path.clone(), image))
    };
    paths.iter().map(image).collect()
}
