//! Snapshots as text: a line each, below the one that it came from.
//!
//! A line of descent is not indented, else the twelfth snapshot in a row would
//! stand at the right edge; where the line forks, each arm is. The parent's
//! column tells descent from mere neighbourhood.

use std::collections::BTreeMap;

use strata_api::{SnapshotId, SnapshotInfo, SnapshotState};
use strata_units::ByteSize;

use crate::failure::printable;
use crate::show::{columns, short_latency};

/// What a table has where there is nothing to tell.
const NOTHING: &str = "-";

/// The tree of `snapshots`; ages are counted to `now`, in seconds since the
/// epoch.
pub(crate) fn tree(snapshots: &[SnapshotInfo], now: f64) -> String {
    let head = ["SNAPSHOT", "LABEL", "PARENT", "AGE", "UNIQUE", "SHARED", "FREEZE", "STATE"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for (prefix, index, parent_is_here) in order(snapshots) {
        rows.push(row(&prefix, &snapshots[index], parent_is_here, now));
    }
    columns(&rows, 3)
}

fn row(prefix: &str, info: &SnapshotInfo, parent_is_here: bool, now: f64) -> Vec<String> {
    let parent = match &info.parent {
        Some(parent) if parent_is_here => parent.to_string(),
        Some(parent) => format!("({parent})"),
        None => NOTHING.to_owned(),
    };
    let freeze = match info.freeze_us {
        0 => NOTHING.to_owned(),
        // Beyond, the short form has its unit.
        us if us < 10_000 => format!("{us}us"),
        us => short_latency(us as f64),
    };
    vec![
        format!("{prefix}{}", info.id),
        info.label.as_deref().map_or(NOTHING.to_owned(), printable),
        parent,
        age(now - info.taken),
        ByteSize(info.size_unique_bytes).to_string(),
        ByteSize(info.size_shared_bytes).to_string(),
        freeze,
        state(info),
    ]
}

fn state(info: &SnapshotInfo) -> String {
    let name = state_name(info.state);
    if info.reason.is_empty() {
        name.to_owned()
    } else {
        format!("{name}: {}", printable(&info.reason))
    }
}

/// The state as the API names it.
pub(crate) fn state_name(state: SnapshotState) -> &'static str {
    match state {
        SnapshotState::Capturing => "capturing",
        SnapshotState::Usable => "usable",
        SnapshotState::Persisted => "persisted",
        SnapshotState::Failed => "failed",
    }
}

/// Seconds in at most four characters; what lies in the future (a clock that
/// was set back) has just been.
fn age(seconds: f64) -> String {
    // Saturates, and takes NaN for 0.
    let seconds = seconds as u64;
    match seconds {
        s if s < 100 => format!("{s}s"),
        s if s < 100 * 60 => format!("{}m", s / 60),
        s if s < 48 * 3600 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86400),
    }
}

/// The lines in order: what to draw before each, its index, and whether its
/// parent is among them. Every snapshot has exactly one line, whatever their
/// parents say.
fn order(snapshots: &[SnapshotInfo]) -> Vec<(String, usize, bool)> {
    let mut by_id: BTreeMap<&SnapshotId, usize> = BTreeMap::new();
    for (index, info) in snapshots.iter().enumerate() {
        by_id.entry(&info.id).or_insert(index);
    }
    let parent: Vec<Option<usize>> = snapshots
        .iter()
        .map(|info| info.parent.as_ref().and_then(|parent| by_id.get(parent).copied()))
        .collect();
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); snapshots.len()];
    for (index, parent) in parent.iter().enumerate() {
        if let Some(parent) = parent {
            children[*parent].push(index);
        }
    }
    let mut lines = Vec::with_capacity(snapshots.len());
    let mut drawn = vec![false; snapshots.len()];
    let roots = (0..snapshots.len()).filter(|index| parent[*index].is_none());
    // The second pass finds what only a circle of parents leads to.
    for root in roots.chain(0..snapshots.len()) {
        // (before this line, before those that follow it), the last one first
        let mut waiting = vec![(String::new(), String::new(), root)];
        while let Some((own, below, index)) = waiting.pop() {
            if std::mem::replace(&mut drawn[index], true) {
                continue;
            }
            lines.push((own, index, parent[index].is_some()));
            let arms: Vec<usize> =
                children[index].iter().copied().filter(|child| !drawn[*child]).collect();
            if let [only] = arms[..] {
                waiting.push((below.clone(), below, only));
                continue;
            }
            for (place, child) in arms.iter().enumerate().rev() {
                let (own, further) =
                    if place + 1 == arms.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
                waiting.push((format!("{below}{own}"), format!("{below}{further}"), *child));
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::snapshot;

    /// The first column of the tree of snapshots given as (id, parent).
    fn drawn(family: &[(&str, Option<&str>)]) -> Vec<String> {
        let infos: Vec<SnapshotInfo> =
            family.iter().map(|(id, parent)| snapshot(id, *parent)).collect();
        order(&infos)
            .into_iter()
            .map(|(prefix, index, _)| format!("{prefix}{}", infos[index].id))
            .collect()
    }

    #[test]
    fn a_line_of_descent_stays_at_the_left_and_forks_are_indented() {
        let family = [
            ("db@1", None),
            ("db@2", Some("db@1")),
            ("db@3", Some("db@2")),
            ("db@4", Some("db@3")),
            ("db@5", Some("db@2")),
            ("db@6", Some("db@5")),
            ("db@7", Some("db@5")),
            ("web@1", None),
        ];
        assert_eq!(
            drawn(&family),
            ["db@1", "db@2", "├─ db@3", "│  db@4", "└─ db@5", "   ├─ db@6", "   └─ db@7", "web@1"]
        );
    }

    #[test]
    fn every_snapshot_has_one_line_whatever_the_parents_say() {
        assert!(drawn(&[]).is_empty());
        assert_eq!(drawn(&[("db@2", Some("db@1"))]), ["db@2"]);
        // Circles, as no daemon should send them.
        assert_eq!(drawn(&[("a@1", Some("a@1"))]), ["a@1"]);
        assert_eq!(drawn(&[("a@1", Some("a@2")), ("a@2", Some("a@1"))]), ["a@1", "a@2"]);
        // Two daemons may both have one of this name.
        assert_eq!(drawn(&[("a@1", None), ("a@1", None), ("a@2", Some("a@1"))]).len(), 3);
        let long: Vec<(String, Option<String>)> =
            (1..=10_000).map(|n| (format!("a@{n}"), Some(format!("a@{}", n - 1)))).collect();
        let infos: Vec<SnapshotInfo> = long
            .iter()
            .map(|(id, parent)| snapshot(id, parent.as_deref().filter(|p| *p != "a@0")))
            .collect();
        assert_eq!(order(&infos).len(), 10_000);
    }

    #[test]
    fn a_line_tells_parent_age_sizes_freeze_and_state() {
        let mut first = snapshot("db@7", Some("db@6"));
        first.state = SnapshotState::Persisted;
        let mut second = snapshot("db@8", Some("db@7"));
        second.label = Some("good".into());
        second.taken = 990.0;
        second.freeze_us = 4321;
        second.state = SnapshotState::Failed;
        second.reason = "no\nspace".into();
        let text = tree(&[first, second], 1000.0);
        let lines: Vec<&str> = text.lines().collect();
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(lines[0]), words("SNAPSHOT LABEL PARENT AGE UNIQUE SHARED FREEZE STATE"));
        assert_eq!(
            words(lines[1]),
            words("db@7 - (db@6) 16m 1.0 MiB 1.0 GiB 31ms persisted"),
            "{text}"
        );
        assert_eq!(
            words(lines[2]),
            words("db@8 good db@7 10s 1.0 MiB 1.0 GiB 4321us failed: no?space"),
            "{text}"
        );
        assert_eq!(lines.len(), 3);
        assert_eq!(tree(&[], 0.0).lines().count(), 1);
    }

    #[test]
    fn ages_are_short() {
        for (seconds, text) in [
            (f64::NAN, "0s"),
            (-5.0, "0s"),
            (99.9, "99s"),
            (100.0, "1m"),
            (5999.0, "99m"),
            (6000.0, "1h"),
            (172_799.0, "47h"),
            (172_800.0, "2d"),
        ] {
            assert_eq!(age(seconds), text, "{seconds}");
        }
    }
}
