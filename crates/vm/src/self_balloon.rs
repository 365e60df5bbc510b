//! A guest whose balloon follows what the guest says of its memory: what the monitor tells
//! for it, and how the balloon is set.

use serde_json::{Value, json};
use strata_units::reading::Reading;

use crate::qmp::{Monitor, QmpError};

/// What a monitor tells for a balloon that is to be set.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Held {
    /// Whether the guest runs.
    pub runs: bool,
    /// What its balloon leaves it.
    pub balloon_bytes: Option<u64>,
    /// What its balloon's driver said last, if that was asked for.
    pub statistics: Option<Statistics>,
}

/// What a balloon's driver says. It is the guest's word, as an agent's is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// When it said so, by QEMU's clock, in seconds: another figure is another time.
    pub told_s: u64,
    /// That, as an agent would say it, as far as it goes. When it was is what QEMU's clock says.
    pub reading: Reading,
}

/// Asks for it. `balloon`: the balloon device's id.
///
/// # Errors
/// The monitor does not answer.
pub fn held(monitor: &mut Monitor, balloon: &str, with_statistics: bool) -> Result<Held, QmpError> {
    let status = monitor.execute("query-status", None)?;
    let runs = status.get("status").and_then(Value::as_str) == Some("running");
    let mut held = Held { runs, ..Held::default() };
    match monitor.execute("query-balloon", None) {
        Ok(answer) => held.balloon_bytes = answer.get("actual").and_then(Value::as_u64),
        // It has none that works.
        Err(QmpError::Refused(_)) => {}
        Err(error) => return Err(error),
    }
    if with_statistics {
        let path = format!("/machine/peripheral/{balloon}");
        let get = json!({ "path": path, "property": "guest-stats" });
        match monitor.execute("qom-get", Some(get)) {
            Ok(answer) => held.statistics = statistics(&answer),
            Err(QmpError::Refused(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(held)
}

/// None: its driver has told nothing, or less than is needed.
fn statistics(answer: &Value) -> Option<Statistics> {
    let told_s = answer.get("last-update")?.as_u64().filter(|told| *told > 0)?;
    let stats = answer.get("stats")?;
    // What the driver does not tell is all ones.
    let figure = |name: &str| stats.get(name)?.as_u64().filter(|figure| *figure != u64::MAX);
    let free_bytes = figure("stat-free-memory")?;
    let caches = || Some(free_bytes.saturating_add(figure("stat-disk-caches")?));
    let pages = |name| Some(figure(name)? / strata_units::PAGE_SIZE as u64);
    let reading = Reading {
        heard: 0,
        at_ms: told_s.saturating_mul(1000),
        total_bytes: figure("stat-total-memory")?,
        free_bytes,
        // Before Linux 4.6 it is not told.
        available_bytes: figure("stat-available-memory").or_else(caches)?,
        swapped_in_pages: pages("stat-swap-in"),
        swapped_out_pages: pages("stat-swap-out"),
        major_faults: figure("stat-major-faults"),
        ..Reading::default()
    };
    Some(Statistics { told_s, reading })
}

/// Has the balloon leave the guest so much, as soon as the guest lets it.
///
/// # Errors
/// The monitor refuses, or does not answer.
pub fn set(monitor: &mut Monitor, bytes: u64) -> Result<(), QmpError> {
    monitor.execute("balloon", Some(json!({ "value": bytes }))).map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::qmp::tests::answering;

    fn heard(answers: &'static [(&str, &str)], with_statistics: bool) -> (Held, Monitor) {
        let stream = answering(move |line| {
            let found = answers.iter().find(|(part, _)| line.contains(part));
            let answer = found.map_or("{\"error\": {\"desc\": \"no\"}}", |(_, answer)| answer);
            Some(format!("{answer}\n"))
        });
        let mut monitor = Monitor::begin(stream, Duration::from_secs(20)).expect("it answers");
        (held(&mut monitor, "b", with_statistics).expect("held"), monitor)
    }

    #[test]
    fn a_guest_tells_by_its_driver() {
        let (held, mut monitor) = heard(
            &[
                ("qmp_capabilities", r#"{"return": {}}"#),
                ("query-status", r#"{"return": {"status": "running"}}"#),
                ("query-balloon", r#"{"return": {"actual": 536870912}}"#),
                (
                    "guest-stats",
                    r#"{"return": {"stats": {"stat-total-memory": 1000000, "stat-free-memory": 4000, "stat-available-memory": 18446744073709551615, "stat-disk-caches": 500, "stat-swap-in": 8192, "stat-major-faults": 3}, "last-update": 77}}"#,
                ),
                (r#"{"arguments":{"value":5},"execute":"balloon"}"#, r#"{"return": {}}"#),
            ],
            true,
        );
        assert_eq!((held.runs, held.balloon_bytes), (true, Some(536_870_912)));
        let told = held.statistics.expect("it has a driver");
        assert_eq!((told.told_s, told.reading.at_ms), (77, 77_000));
        assert_eq!((told.reading.free_bytes, told.reading.available_bytes), (4000, 4500));
        assert_eq!((told.reading.swapped_in_pages, told.reading.major_faults), (Some(2), Some(3)));
        assert_eq!((told.reading.committed_bytes, told.reading.some_us), (None, None));
        set(&mut monitor, 5).expect("set");
        assert!(matches!(set(&mut monitor, 6), Err(QmpError::Refused(_))));
    }

    #[test]
    fn a_guest_without_one_tells_nothing() {
        let capable = ("qmp_capabilities", r#"{"return": {}}"#);
        let paused = ("query-status", r#"{"return": {"status": "paused"}}"#);
        for stats in [
            r#"{"return": {"stats": {"stat-total-memory": 1, "stat-free-memory": 1}, "last-update": 0}}"#,
            r#"{"return": {"stats": {"stat-total-memory": 1, "stat-free-memory": 1}, "last-update": 5}}"#,
            r#"{"return": [1]}"#,
        ] {
            let answers = Box::leak(Box::new([capable, paused, ("guest-stats", stats)]));
            assert_eq!(heard(answers, true).0, Held::default(), "{stats}");
        }
    }
}
