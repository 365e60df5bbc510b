//! What a guest's monitor tells of the guest: whether it runs, and what its balloon driver
//! says of its memory.

use serde_json::{Value, json};

use crate::qmp::{Monitor, QmpError};

/// The balloon device's id, where the command line gives it none.
pub const BALLOON_ID: &str = "strata-balloon";
/// How often the guest's driver is asked for its figures, in seconds.
const POLLING_SECONDS: u64 = 2;

/// What a guest says. All figures are its own, and so untrusted.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GuestState {
    /// Running, paused, …: QEMU's words.
    pub status: String,
    /// Whether the processor executes it.
    pub is_kvm: bool,
    /// What its balloon leaves it; none: it has no balloon, or no driver for it.
    pub balloon_bytes: Option<u64>,
    /// What it has free.
    pub free_bytes: Option<u64>,
    /// What it could have without swapping.
    pub available_bytes: Option<u64>,
}

/// Longest status that is kept.
const MAX_STATUS_CHARS: usize = 32;

/// Asks for all of it. `balloon`: the balloon device's id.
///
/// # Errors
/// The monitor does not answer.
pub fn look(monitor: &mut Monitor, balloon: Option<&str>) -> Result<GuestState, QmpError> {
    let mut state = GuestState::default();
    let answer = monitor.execute("query-status", None)?;
    let status = answer.get("status").and_then(Value::as_str).unwrap_or_default();
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || *c == '-';
    state.status = status.chars().filter(is_plain).take(MAX_STATUS_CHARS).collect();
    if let Some(answer) = accepted(monitor.execute("query-kvm", None))? {
        state.is_kvm = answer.get("enabled").and_then(Value::as_bool).unwrap_or(false);
    }
    let Some(balloon) = balloon else { return Ok(state) };
    if let Some(answer) = accepted(monitor.execute("query-balloon", None))? {
        state.balloon_bytes = answer.get("actual").and_then(Value::as_u64);
    }
    let path = format!("/machine/peripheral/{balloon}");
    let get = |property: &str| Some(json!({ "path": path, "property": property }));
    let every = accepted(monitor.execute("qom-get", get("guest-stats-polling-interval")))?;
    if every.and_then(|every| every.as_u64()) == Some(0) {
        let property = "guest-stats-polling-interval";
        let set = json!({ "path": path, "property": property, "value": POLLING_SECONDS });
        accepted(monitor.execute("qom-set", Some(set)))?;
    }
    if let Some(answer) = accepted(monitor.execute("qom-get", get("guest-stats")))? {
        let was_told = answer.get("last-update").and_then(Value::as_u64).is_some_and(|at| at > 0);
        let figure = |name: &str| {
            let value = answer.get("stats")?.get(name)?.as_u64()?;
            // What the driver does not tell is all ones.
            (was_told && value != u64::MAX).then_some(value)
        };
        state.free_bytes = figure("stat-free-memory");
        state.available_bytes = figure("stat-available-memory");
    }
    Ok(state)
}

/// A refusal is an answer, too: there is no such device, or no driver.
fn accepted(answer: Result<Value, QmpError>) -> Result<Option<Value>, QmpError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(QmpError::Refused(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::qmp::tests::answering;

    /// What is seen of a guest whose monitor answers so, by command and property.
    fn seen(answers: &'static [(&str, &str)]) -> GuestState {
        let stream = answering(move |line| {
            let request: Value = serde_json::from_str(line).expect("JSON");
            let property = request["arguments"]["property"].as_str().unwrap_or_default();
            let key = format!("{} {property}", request["execute"].as_str().expect("a command"));
            let found = answers.iter().find(|(command, _)| *command == key.trim());
            Some(match found {
                Some((_, answer)) => format!("{{\"return\": {answer}}}\n"),
                None if key.starts_with("qmp_capabilities") => "{\"return\": {}}\n".to_owned(),
                None => "{\"error\": {\"desc\": \"no\"}}\n".to_owned(),
            })
        });
        let mut monitor = Monitor::begin(stream, Duration::from_secs(20)).expect("it answers");
        look(&mut monitor, Some("b")).expect("looked")
    }

    #[test]
    fn a_guest_with_a_driver_tells_its_figures() {
        let state = seen(&[
            ("query-status", r#"{"status": "running", "singlestep": false, "running": true}"#),
            ("query-kvm", r#"{"enabled": true, "present": true}"#),
            ("query-balloon", r#"{"actual": 536870912}"#),
            ("qom-get guest-stats-polling-interval", "2"),
            (
                "qom-get guest-stats",
                r#"{"stats": {"stat-free-memory": 1048576, "stat-available-memory": 18446744073709551615}, "last-update": 1}"#,
            ),
        ]);
        let expected = GuestState {
            status: "running".into(),
            is_kvm: true,
            balloon_bytes: Some(512 << 20),
            free_bytes: Some(1 << 20),
            available_bytes: None,
        };
        assert_eq!(state, expected);
    }

    #[test]
    fn a_guest_without_one_tells_none() {
        let state = seen(&[
            ("query-status", r#"{"status": "prelaunch"}"#),
            ("qom-get guest-stats", r#"{"stats": {"stat-free-memory": 5}, "last-update": 0}"#),
        ]);
        let expected = GuestState { status: "prelaunch".into(), ..GuestState::default() };
        assert_eq!(state, expected);
    }

    #[test]
    fn odd_answers_are_no_figures() {
        let state = seen(&[
            (
                "query-status",
                r#"{"status": "\u001b[2J;rm -rf/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}"#,
            ),
            ("query-kvm", r#"{"enabled": "yes"}"#),
            ("query-balloon", r#"{"actual": -1}"#),
            ("qom-get guest-stats", r#"{"stats": [1, 2], "last-update": 3}"#),
        ]);
        assert_eq!(state.status, "2Jrm-rfaaaaaaaaaaaaaaaaaaaaaaaaa");
        assert_eq!((state.is_kvm, state.balloon_bytes, state.free_bytes), (false, None, None));
    }
}
