//! What a schedule of snapshots demands now: a pure decision. Who carries it
//! out, and what the clock says, is not known here.

use strata_api::{SnapshotId, SnapshotInfo, SnapshotState};

use crate::config::Schedule;

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Due {
    /// Take a snapshot now.
    pub(crate) take: bool,
    /// Remove these, oldest first. What `take` asks for is not counted, so that
    /// one that fails leaves no fewer than before.
    pub(crate) remove: Vec<SnapshotId>,
}

/// What `schedule` demands at `now`, in seconds since the epoch, of its tenant. Of one that
/// has ended no snapshot can be taken; `take` is for whoever lives. `last` is when the tenant began to live or its schedule was last
/// carried out, whether or not a snapshot came of it; `existing` are all
/// snapshots there are, other tenants' too.
///
/// Never removes one that somebody took, labelled or persisted by hand, nor one
/// of the newest `keep` that the schedule took and that can be restored. Failed
/// ones are not counted among these, or a tenant that cannot be snapshotted any
/// more would lose those that it has; of them the newest stays, to be seen.
pub(crate) fn due(schedule: &Schedule, now: f64, last: f64, existing: &[SnapshotInfo]) -> Due {
    let mut own: Vec<&SnapshotInfo> =
        existing.iter().filter(|info| info.id.tenant == schedule.name && info.scheduled).collect();
    // By number, not by time: clocks are set back.
    own.sort_by_key(|info| std::cmp::Reverse(info.id.number));
    let busy = own.iter().any(|info| info.state == SnapshotState::Capturing);
    // What lies in the future was read from a clock that has been set back since;
    // to wait for it could take years.
    let times = own.iter().map(|info| info.taken).chain([last]).filter(|time| *time <= now);
    let latest = times.fold(f64::NEG_INFINITY, f64::max);
    let take = !busy && now - latest >= schedule.every.as_secs_f64();

    let mut whole = 0;
    let mut newer = false;
    let mut remove = Vec::new();
    for info in own {
        let by_hand =
            info.label.is_some() || (info.state == SnapshotState::Persisted && !schedule.persist);
        match info.state {
            SnapshotState::Capturing => continue,
            _ if by_hand => {}
            SnapshotState::Failed if newer => remove.push(info.id.clone()),
            SnapshotState::Failed => {}
            SnapshotState::Usable | SnapshotState::Persisted => {
                whole += 1;
                if whole > schedule.keep {
                    remove.push(info.id.clone());
                }
            }
        }
        newer = true;
    }
    remove.reverse();
    Due { take, remove }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const STATES: [SnapshotState; 4] = [
        SnapshotState::Capturing,
        SnapshotState::Usable,
        SnapshotState::Persisted,
        SnapshotState::Failed,
    ];

    fn schedule(keep: u32, persist: bool) -> Schedule {
        Schedule { name: "db".into(), every: Duration::from_secs(300), keep, persist }
    }

    /// A scheduled snapshot db@`number`, taken at `taken`.
    fn taken(number: u64, taken: f64, state: SnapshotState) -> SnapshotInfo {
        SnapshotInfo {
            id: SnapshotId { tenant: "db".into(), number },
            tenant: "db".into(),
            label: None,
            parent: None,
            scheduled: true,
            state,
            reason: String::new(),
            taken,
            size_unique_bytes: 0,
            size_shared_bytes: 0,
            file_bytes: 0,
            pages: 0,
            copied_pages: 0,
            guest: false,
            libvirt: false,
            disks: Vec::new(),
            servers: 0,
            processes: 1,
            uid: 0,
            command: vec![],
            budget_bytes: 0,
            freeze_us: 0,
            capture_us: 0,
        }
    }

    fn numbers(due: &Due) -> Vec<u64> {
        due.remove.iter().map(|id| id.number).collect()
    }

    #[test]
    fn one_is_due_when_the_time_is_over() {
        let at = |now, last, existing: &[SnapshotInfo]| {
            due(&schedule(12, false), now, last, existing).take
        };
        // A tenant that has just begun is not worth one.
        assert!(!at(1299.0, 1000.0, &[]));
        assert!(at(1300.0, 1000.0, &[]));
        // A daemon that begins anew finds when the last was taken.
        let one = taken(1, 2000.0, SnapshotState::Usable);
        assert!(!at(2299.0, 1000.0, std::slice::from_ref(&one)));
        assert!(at(2300.0, 1000.0, std::slice::from_ref(&one)));
        // A manual one is no scheduled one.
        assert!(at(2299.0, 1000.0, &[SnapshotInfo { scheduled: false, ..one.clone() }]));
        // Another tenant's says nothing.
        let mut other = one;
        other.id.tenant = "web".into();
        assert!(at(2299.0, 1000.0, &[other]));
        // Not two at a time.
        assert!(!at(9999.0, 1000.0, &[taken(1, 2000.0, SnapshotState::Capturing)]));
        // One that failed was an attempt.
        assert!(!at(2299.0, 1000.0, &[taken(1, 2000.0, SnapshotState::Failed)]));
    }

    #[test]
    fn a_clock_that_was_set_back_costs_one_snapshot_not_years() {
        let future = taken(1, 1e9, SnapshotState::Usable);
        assert!(due(&schedule(12, false), 1000.0, 1e9, std::slice::from_ref(&future)).take);
        let both = [future, taken(2, 1000.0, SnapshotState::Usable)];
        assert!(!due(&schedule(12, false), 1010.0, 1000.0, &both).take);
    }

    #[test]
    fn the_oldest_go_and_what_somebody_wants_stays() {
        let usable = |number| taken(number, number as f64, SnapshotState::Usable);
        let mut existing: Vec<SnapshotInfo> = (1..=6).map(usable).collect();
        assert_eq!(numbers(&due(&schedule(4, false), 9.0, 9.0, &existing)), [1, 2]);
        existing[0].label = Some("good".into());
        existing[1].scheduled = false;
        existing[2].state = SnapshotState::Persisted;
        assert_eq!(numbers(&due(&schedule(2, false), 9.0, 9.0, &existing)), [4]);
        // Where the schedule persists them itself, that is no sign of a wish.
        assert_eq!(numbers(&due(&schedule(2, true), 9.0, 9.0, &existing)), [3, 4]);
        assert!(numbers(&due(&schedule(12, true), 9.0, 9.0, &existing)).is_empty());
    }

    #[test]
    fn failures_push_out_nothing_and_only_the_newest_is_shown() {
        let mut existing = vec![
            taken(1, 1.0, SnapshotState::Usable),
            taken(2, 2.0, SnapshotState::Usable),
            taken(3, 3.0, SnapshotState::Failed),
            taken(4, 4.0, SnapshotState::Failed),
        ];
        assert_eq!(numbers(&due(&schedule(2, false), 9.0, 9.0, &existing)), [3]);
        existing.push(taken(5, 5.0, SnapshotState::Capturing));
        assert_eq!(numbers(&due(&schedule(2, false), 9.0, 9.0, &existing)), [3]);
        existing[4].state = SnapshotState::Usable;
        assert_eq!(numbers(&due(&schedule(2, false), 9.0, 9.0, &existing)), [1, 3, 4]);
    }

    prop_compose! {
        fn any_snapshot()(
            tenant in prop::sample::select(vec!["db", "db", "db", "web"]),
            scheduled in prop::bool::weighted(0.7),
            labelled in prop::bool::weighted(0.2),
            state in prop::sample::select(STATES.to_vec()),
            time in 0.0..1000.0,
        ) -> SnapshotInfo {
            let mut info = taken(0, time, state);
            info.id.tenant = tenant.into();
            info.scheduled = scheduled;
            info.label = labelled.then(|| "kept".into());
            info
        }
    }

    proptest! {
        #[test]
        fn whatever_there_is_the_wanted_and_the_newest_stay(
            mut existing in prop::collection::vec(any_snapshot(), 0..40),
            (keep, persist) in (1..6u32, any::<bool>()),
            (now, last) in (0.0..1000.0, 0.0..1000.0),
        ) {
            for (index, info) in existing.iter_mut().enumerate() {
                info.id.number = index as u64 + 1;
            }
            let schedule = schedule(keep, persist);
            let due = due(&schedule, now, last, &existing);
            let mut left = existing.clone();
            left.retain(|info| !due.remove.contains(&info.id));
            prop_assert_eq!(left.len() + due.remove.len(), existing.len());
            let is_wanted = |info: &SnapshotInfo| {
                !info.scheduled || info.label.is_some() || info.id.tenant != "db"
                    || info.state == SnapshotState::Capturing
                    || (info.state == SnapshotState::Persisted && !persist)
            };
            let is_whole = |info: &&SnapshotInfo| {
                !is_wanted(info) && info.state != SnapshotState::Failed
            };
            let removed: Vec<&SnapshotInfo> =
                existing.iter().filter(|info| due.remove.contains(&info.id)).collect();
            for info in &removed {
                prop_assert!(!is_wanted(info), "{info:?}");
            }
            let newest = |infos: &[SnapshotInfo]| -> Vec<u64> {
                let whole = infos.iter().rev().filter(is_whole);
                whole.take(keep as usize).map(|info| info.id.number).collect()
            };
            prop_assert_eq!(newest(&left), newest(&existing));
            prop_assert!(left.iter().filter(is_whole).count() <= keep as usize);
            // A second look finds nothing more to do.
            prop_assert!(super::due(&schedule, now, last, &left).remove.is_empty());
        }
    }
}
