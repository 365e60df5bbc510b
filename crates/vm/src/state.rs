//! The state of a guest's devices, in and out of its QEMU: what a snapshot has beside the
//! guest's memory, which is somebody else's business.
//!
//! QEMU's migration writes it, and leaves out memory that it believes shared
//! (`x-ignore-shared`), to a descriptor that comes with the request. Before that it is
//! asked what else belongs to the guest: disks that it writes to, which are copied
//! ([`crate::disks`]), and other memory that is shared, which would be left out.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

use crate::disks::{self, WrittenDisk};
use crate::pool_disks::Served;
use crate::qmp::{Monitor, QmpError};
use crate::version::Version;

/// The one capability of QEMU's migration that is used, for the time of one migration:
/// left on, the user's own next migration would leave the memory out as well.
const IGNORE_SHARED: &str = "x-ignore-shared";
/// Capabilities that change nothing here.
const HARMLESS: [&str; 1] = ["events"];
/// What the descriptor is called in the monitor.
const DESCRIPTOR: &str = "strata-state";
/// An address of the guest's that is memory in every PC.
const ASKED: u64 = 1 << 20;
/// How often it is asked whether a migration has ended.
const POLL: Duration = Duration::from_micros(500);

/// Why the state of a guest's devices cannot be had, or taken.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The monitor.
    #[error(transparent)]
    Monitor(#[from] QmpError),
    /// What the guest is, or has; one line for the user.
    #[error("{0}")]
    Unfit(String),
}

pub(crate) fn unfit(why: impl Into<String>) -> StateError {
    StateError::Unfit(why.into())
}

/// Sends the bytes of a request with a descriptor.
pub type Pass<'a> = &'a mut dyn FnMut(&UnixStream, &[u8]) -> io::Result<()>;

/// A guest of which the state of its devices is all that is not in its memory. Said by its
/// own QEMU: who believes it does no harm but to that guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Footing {
    /// Whether it runs; else it is paused.
    pub is_running: bool,
    /// Where QEMU has the first byte of the guest's memory.
    pub memory_start: u64,
    /// How much of it there is.
    pub memory_bytes: u64,
    /// Files that its drives read.
    pub files: Vec<String>,
    /// Disks that it writes to.
    pub disks: Vec<WrittenDisk>,
}

/// Asks a guest what a snapshot must know. `is_copied`: its disks are being copied, and that
/// goes on; `served`: disks of it that Strata serves.
///
/// # Errors
/// It cannot have one, and why; or its monitor does not answer.
pub fn footing(
    monitor: &mut Monitor,
    is_copied: bool,
    served: &[Served],
) -> Result<Footing, StateError> {
    let status = status(monitor)?;
    if status != "running" && status != "paused" {
        return Err(unfit(format!("it is neither running nor paused ({})", plain(&status))));
    }
    if !is_copied {
        // Of whoever died over one, it would have other nodes in between.
        disks::clean(monitor)?;
    }
    let nodes = monitor.execute("query-named-block-nodes", Some(json!({"flat": true})))?;
    let (disks, files) = disks::of_nodes(&nodes, served)?;
    let (id, memory_bytes) = one_memory(&monitor.execute("query-memdev", None)?)?;
    for name in capabilities(monitor)? {
        if !HARMLESS.contains(&name.as_str()) {
            return Err(unfit(format!(
                "its migration is set to {} by its own monitor",
                plain(&name)
            )));
        }
    }
    let is_running = status == "running";
    let memory_start = memory_start(monitor, &id)?;
    Ok(Footing { is_running, memory_start, memory_bytes, files, disks })
}

/// Where a guest's QEMU has the guest's memory, and how much.
///
/// # Errors
/// It does not say so.
pub fn memory(monitor: &mut Monitor) -> Result<(u64, u64), StateError> {
    let (id, bytes) = one_memory(&monitor.execute("query-memdev", None)?)?;
    Ok((memory_start(monitor, &id)?, bytes))
}

/// QEMU's word for what the guest does.
///
/// # Errors
/// The monitor does not answer.
pub fn status(monitor: &mut Monitor) -> Result<String, QmpError> {
    let answer = monitor.execute("query-status", None)?;
    Ok(answer.get("status").and_then(Value::as_str).unwrap_or_default().to_owned())
}

/// Which QEMU it is.
///
/// # Errors
/// It does not say so.
pub fn version(monitor: &mut Monitor) -> Result<Version, StateError> {
    let answer = monitor.execute("query-version", None)?;
    let part = |key: &str| answer.get("qemu")?.get(key)?.as_u64()?.try_into().ok();
    let version = part("major").zip(part("minor"));
    let version = version.map(|(major, minor)| Version { major, minor });
    version.ok_or_else(|| QmpError::Nonsense("no version").into())
}

/// Has the guest stand still.
///
/// # Errors
/// It may run, or not.
pub fn stop(monitor: &mut Monitor) -> Result<(), StateError> {
    monitor.execute("stop", None)?;
    match status(monitor)?.as_str() {
        "paused" => Ok(()),
        other => Err(unfit(format!("it does not stand still ({})", plain(other)))),
    }
}

/// Lets the guest run on, and its own migrations be what they were.
///
/// # Errors
/// It may stand still.
pub fn go_on(monitor: &mut Monitor) -> Result<(), StateError> {
    // Of whoever died over it. QEMU refuses while a migration is under way.
    let _ = monitor.execute("migrate_cancel", None);
    let refused = ignore_shared(monitor, false).err();
    monitor.execute("cont", None)?;
    match (status(monitor)?.as_str(), refused) {
        ("running", None) => Ok(()),
        ("running", Some(error)) => Err(error.into()),
        (other, _) => Err(unfit(format!("it does not run on ({})", plain(other)))),
    }
}

/// Has the state of its devices written to a descriptor that `pass` sends. The guest
/// stands still, and stays so.
///
/// # Errors
/// What was written is of no use.
pub fn save(monitor: &mut Monitor, pass: Pass<'_>) -> Result<(), StateError> {
    migrate(monitor, "migrate", pass)?;
    // For a moment more QEMU lets nobody run it on.
    while status(monitor)? == "finish-migrate" {
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// Has the state read from a descriptor that `pass` sends, in a QEMU that was started with
/// `-incoming defer`. It stands still, and stays so.
///
/// # Errors
/// The guest must not run.
pub fn load(monitor: &mut Monitor, pass: Pass<'_>) -> Result<(), StateError> {
    migrate(monitor, "migrate-incoming", pass)?;
    loop {
        match status(monitor)?.as_str() {
            "inmigrate" => std::thread::sleep(POLL),
            "paused" | "prelaunch" | "postmigrate" => return Ok(()),
            other => return Err(unfit(format!("it does not stand still ({})", plain(other)))),
        }
    }
}

fn migrate(monitor: &mut Monitor, command: &str, pass: Pass<'_>) -> Result<(), StateError> {
    ignore_shared(monitor, true)?;
    let name = Some(json!({ "fdname": DESCRIPTOR }));
    monitor.execute_passing("getfd", name, pass)?;
    let uri = Some(json!({ "uri": format!("fd:{DESCRIPTOR}") }));
    let outcome = monitor.execute(command, uri).map_err(StateError::from);
    let outcome = outcome.and_then(|_| ended(monitor));
    let off = ignore_shared(monitor, false);
    outcome?;
    Ok(off?)
}

/// Waits for the end of a migration.
fn ended(monitor: &mut Monitor) -> Result<(), StateError> {
    loop {
        let answer = monitor.execute("query-migrate", None)?;
        let text = |key: &str| answer.get(key).and_then(Value::as_str).unwrap_or_default();
        match text("status") {
            "completed" => return Ok(()),
            "failed" | "cancelled" | "cancelling" => {
                let why = match text("error-desc") {
                    "" => "no reason",
                    why => why,
                };
                return Err(unfit(format!(
                    "the state of its devices cannot be moved: {}",
                    plain(why)
                )));
            }
            _ => std::thread::sleep(POLL),
        }
    }
}

fn ignore_shared(monitor: &mut Monitor, on: bool) -> Result<(), QmpError> {
    let one = json!({ "capability": IGNORE_SHARED, "state": on });
    monitor.execute("migrate-set-capabilities", Some(json!({ "capabilities": [one] }))).map(drop)
}

/// Those that are on.
fn capabilities(monitor: &mut Monitor) -> Result<Vec<String>, QmpError> {
    let answer = monitor.execute("query-migrate-capabilities", None)?;
    let is_on = |one: &&Value| one.get("state").and_then(Value::as_bool) == Some(true);
    let name = |one: &Value| Some(one.get("capability")?.as_str()?.to_owned());
    Ok(answer.as_array().into_iter().flatten().filter(is_on).filter_map(name).collect())
}

/// The id and the size of the one object of its memory that is shared: all others go
/// with the state of the devices.
fn one_memory(objects: &Value) -> Result<(String, u64), StateError> {
    let objects = objects.as_array().ok_or(QmpError::Nonsense("no list of its memory"))?;
    // QEMU before 6.1 does not say.
    let is_shared = |one: &&Value| one.get("share").and_then(Value::as_bool) != Some(false);
    let shared: Vec<&Value> = objects.iter().filter(is_shared).collect();
    let [one] = shared[..] else {
        return Err(unfit(format!(
            "it has {} objects of memory that is shared, and one is captured",
            shared.len()
        )));
    };
    let id = one.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
    let size = one.get("size").and_then(Value::as_u64);
    Ok((id, size.ok_or(QmpError::Nonsense("no size of its memory"))?))
}

/// QEMU's address of the guest's first byte, which on a PC is the first of its object `id`.
/// Something else can lie over the first page, so another one is asked for.
fn memory_start(monitor: &mut Monitor, id: &str) -> Result<u64, StateError> {
    let line = Some(json!({ "command-line": format!("gpa2hva {ASKED:#x}") }));
    let answer = monitor.execute("human-monitor-command", line)?;
    let said = answer.as_str().unwrap_or_default();
    let number = said.trim_end().rsplit("0x").next().unwrap_or_default();
    let is_it = said.contains(&format!(" ({id}) is 0x"));
    let start = u64::from_str_radix(number, 16).ok().filter(|_| is_it);
    let start = start.and_then(|at| at.checked_sub(ASKED));
    start.ok_or_else(|| unfit(format!("it does not say where its memory is: {}", plain(said))))
}

/// What others said, for a line.
pub(crate) fn plain(text: &str) -> String {
    text.chars().take(200).map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::qmp::tests::answering;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A monitor that answers by command, and what it was asked.
    fn monitor(answers: &'static [(&str, &str)]) -> (Monitor, Arc<Mutex<Vec<String>>>) {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let stream = answering(move |line| {
            let request: Value = serde_json::from_str(line).expect("JSON");
            let command = request["execute"].as_str().expect("a command").to_owned();
            seen.lock().expect("nobody panics").push(command.clone());
            let found = answers.iter().find(|(of, _)| *of == command).map(|(_, answer)| *answer);
            let answer = match found {
                Some(text) if text.starts_with("no ") => {
                    format!(r#"{{"error": {{"desc": "{text}"}}}}"#)
                }
                found => format!(r#"{{"return": {}}}"#, found.unwrap_or("{}")),
            };
            Some(answer + "\n")
        });
        (Monitor::begin(stream, PATIENCE).expect("it answers"), asked)
    }

    const RUNS: (&str, &str) = ("query-status", r#"{"status": "running"}"#);
    const NO_DRIVES: (&str, &str) = ("query-named-block-nodes", "[]");
    const ONE_MEMORY: (&str, &str) = (
        "query-memdev",
        r#"[{"id": "strata-ram", "size": 1048576, "share": true}, {"id": "x", "size": 5, "share": false}]"#,
    );
    const PLACE: (&str, &str) = (
        "human-monitor-command",
        r#""Host virtual address for 0x100000 (strata-ram) is 0x7f3a00100000\r\n""#,
    );
    const OFF: (&str, &str) =
        ("query-migrate-capabilities", r#"[{"capability": "events", "state": true}]"#);

    fn why(answers: &'static [(&str, &str)]) -> String {
        footing(&mut monitor(answers).0, false, &[]).expect_err("unfit").to_string()
    }

    #[test]
    fn a_guest_that_is_all_memory_and_devices_is_fit() {
        const FILES: (&str, &str) = (
            "query-named-block-nodes",
            r#"[{"ro": true, "drv": "raw", "file": "/a"}, {"ro": true, "drv": "file", "file": "/a"}]"#,
        );
        let found = footing(&mut monitor(&[RUNS, FILES, ONE_MEMORY, OFF, PLACE]).0, false, &[])
            .expect("fit");
        let expected = Footing {
            is_running: true,
            memory_start: 0x7f3a_0000_0000,
            memory_bytes: 1 << 20,
            files: vec!["/a".into()],
            disks: Vec::new(),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn what_would_be_left_out_is_refused_by_name() {
        const WRITABLE: (&str, &str) =
            ("query-named-block-nodes", r#"[{"ro": false, "drv": "nbd", "file": "/d\n.img"}]"#);
        assert!(why(&[RUNS, WRITABLE, ONE_MEMORY, OFF, PLACE]).contains("drive /d?.img can be"));
        const TWO: (&str, &str) =
            ("query-memdev", r#"[{"id": "a", "size": 1, "share": true}, {"id": "b", "size": 1}]"#);
        assert!(why(&[RUNS, NO_DRIVES, TWO, OFF, PLACE]).contains("2 objects of memory"));
        const ON: (&str, &str) =
            ("query-migrate-capabilities", r#"[{"capability": "multifd", "state": true}]"#);
        assert!(why(&[RUNS, NO_DRIVES, ONE_MEMORY, ON, PLACE]).contains("set to multifd"));
        const AWAY: (&str, &str) = ("query-status", r#"{"status": "inmigrate"}"#);
        assert!(why(&[AWAY]).contains("(inmigrate)"));
        const NOWHERE: (&str, &str) = ("human-monitor-command", r#""No memory is mapped""#);
        assert!(why(&[RUNS, NO_DRIVES, ONE_MEMORY, OFF, NOWHERE]).contains("where its memory is"));
    }

    #[test]
    fn a_migration_that_fails_leaves_the_capability_off() {
        const FAILED: (&str, &str) =
            ("query-migrate", r#"{"status": "failed", "error-desc": "no room"}"#);
        let (mut one, asked) = monitor(&[FAILED]);
        let mut passed = 0;
        let error = save(&mut one, &mut |mut stream, bytes| {
            passed += 1;
            io::Write::write_all(&mut stream, bytes)
        });
        assert!(error.expect_err("failed").to_string().contains("no room"));
        assert_eq!(passed, 1);
        let asked = asked.lock().expect("nobody panics");
        let set = "migrate-set-capabilities";
        assert_eq!(asked[1..], [set, "getfd", "migrate", "query-migrate", set]);
    }

    #[test]
    fn who_does_not_run_on_is_said_to_stand_still() {
        const PAUSED: (&str, &str) = ("query-status", r#"{"status": "paused"}"#);
        let error = go_on(&mut monitor(&[PAUSED]).0).expect_err("it stands still");
        assert!(error.to_string().contains("does not run on (paused)"), "{error}");
        go_on(&mut monitor(&[RUNS, ("migrate_cancel", "no migration")]).0).expect("it runs");
        assert!(stop(&mut monitor(&[RUNS]).0).is_err());
    }
}
