//! Carries out the configuration's schedules of snapshots.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use strata_api::SnapshotRef;
use strata_pager::Tenant;
use strata_sys::{Priority, log};

use super::Snapshots;
use super::take::now;
use crate::config::Schedule;
use crate::current::Current;
use crate::schedule::due;

/// How often schedules are looked at: a part of the shortest, of
/// [`strata_api::MIN_SCHEDULE_SECONDS`].
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Whoever schedules may do everything with its tenants.
const ROOT: u32 = 0;

/// Those of the configuration as it is now.
pub(crate) struct Schedules {
    snapshots: Arc<Snapshots>,
    current: Arc<Current>,
    /// There is a thread for them.
    runs: AtomicBool,
}

impl Schedules {
    pub(crate) fn new(snapshots: &Arc<Snapshots>, current: &Arc<Current>) -> Self {
        let (snapshots, current) = (Arc::clone(snapshots), Arc::clone(current));
        Self { snapshots, current, runs: AtomicBool::new(false) }
    }

    /// Carries them out from now on, if there are any.
    pub(crate) fn follow(&self) -> io::Result<()> {
        if self.runs.load(Ordering::Relaxed) || self.current.get().snapshot.is_empty() {
            return Ok(());
        }
        let (snapshots, current) = (Arc::clone(&self.snapshots), Arc::clone(&self.current));
        std::thread::Builder::new().name("schedule".into()).spawn(move || {
            let mut carried_out = BTreeMap::new();
            loop {
                std::thread::sleep(LOOK_EVERY);
                for schedule in &current.get().snapshot {
                    snapshots.follow(schedule, &mut carried_out);
                }
            }
        })?;
        self.runs.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Snapshots {
    /// The tenant of this name that snapshots can be of: this daemon's user's, or a guest of
    /// libvirt's.
    fn scheduled(&self, name: &str) -> Option<Arc<Tenant>> {
        self.own_tenant(name).or_else(|| {
            let mut all = self.tenants.list().into_iter();
            all.find(|tenant| {
                tenant.record().name == name && self.may_take_libvirts(tenant) == Ok(true)
            })
        })
    }

    fn follow(&self, schedule: &Schedule, carried_out: &mut BTreeMap<String, f64>) {
        let Some(tenant) = self.scheduled(&schedule.name) else { return };
        let lives = tenant.attachment().1;
        let began = tenant.record().started;
        let last = carried_out.get(&schedule.name).copied().unwrap_or(began).max(began);
        let due = due(schedule, now(), last, &self.list());
        // What was under way when it ended still takes the place of an older one.
        if due.take && lives {
            carried_out.insert(schedule.name.clone(), now());
            let mut outcome = self.take(&tenant, None, true, &mut |_| {});
            if schedule.persist
                && let Ok(info) = &outcome
            {
                outcome = self.persist(ROOT, &info.id.clone().into(), &mut |_| {});
            }
            match &outcome {
                Ok(info) => log(Priority::Notice, crate::logbook::taken(info)),
                Err(why) => log(
                    Priority::Warning,
                    format_args!("no scheduled snapshot of {}: {why}", schedule.name),
                ),
            }
        }
        for id in due.remove {
            let named = SnapshotRef::from(id);
            if let Err(why) = self.remove(ROOT, &named) {
                log(
                    Priority::Warning,
                    format_args!("scheduled snapshot {named} is not removed: {why}"),
                );
            }
        }
    }
}
