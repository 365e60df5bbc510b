//! What the log says of requests and clients: a line for each that changed
//! something, or that failed and somebody will ask about. Clients cause these
//! lines, so there are not more than a few a second.

use std::fmt::Display;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use strata_api::{Reply, Request, SnapshotInfo};
use strata_policy::Allowance;
use strata_sys::{Priority, log};
use strata_units::ByteSize;

/// Lines that are written at once...
const AT_ONCE: u32 = 200;
/// ...then one each so often.
const EVERY_MS: u64 = 250;

/// Writes a line that a client has caused, unless there were too many.
pub(crate) fn tell(priority: Priority, text: impl Display) {
    static LINES: OnceLock<(Instant, Mutex<Allowance>)> = OnceLock::new();
    let fresh = || (Instant::now(), Mutex::new(Allowance::new(AT_ONCE, EVERY_MS)));
    let (began, lines) = LINES.get_or_init(fresh);
    let now_ms = began.elapsed().as_millis() as u64;
    let due = lines.lock().unwrap_or_else(PoisonError::into_inner).take(now_ms);
    match due {
        Some(0) => log(priority, text),
        Some(left_out) => log(priority, format_args!("{text} ({left_out} lines were left out)")),
        None => {}
    }
}

/// What to log of a request that was answered; none: nothing. Tenants are logged
/// where they begin and end, whoever asked.
pub(crate) fn line(uid: u32, request: &Request, reply: &Reply) -> Option<(Priority, String)> {
    if let Reply::Error { message, .. } = reply {
        return request.shows_progress().then(|| (Priority::Warning, message.clone()));
    }
    let text = match (request, reply) {
        (Request::Set { name, dram_bytes }, _) => {
            format!("{name}: its budget is {} now", ByteSize(*dram_bytes))
        }
        (Request::Release { name }, _) => format!("{name}: released, it runs on unmanaged"),
        (Request::Stop { name }, _) => format!("{name}: stopped"),
        (Request::SnapshotPersist { .. }, Reply::Snapshot { snapshot, .. }) => {
            format!("snapshot {} is on disk", snapshot.id)
        }
        (Request::SnapshotImport { path, .. }, Reply::Snapshot { snapshot, .. }) => {
            format!("snapshot {} was imported from {path}", snapshot.id)
        }
        (_, Reply::Snapshot { snapshot, .. }) => taken(snapshot),
        (Request::Rollback { name, snapshot }, _) => format!("{name}: rolled back to {snapshot}"),
        (Request::Restore { snapshot, .. }, Reply::Revived { tenants, .. }) => {
            format!("{}: restored from {snapshot}", names(tenants))
        }
        (Request::Clone { snapshot, .. }, Reply::Revived { tenants, .. }) => {
            format!("{}: cloned from {snapshot}", names(tenants))
        }
        (Request::SnapshotRemove { snapshot }, _) => format!("snapshot {snapshot} was removed"),
        (Request::SnapshotExport { snapshot, path }, _) => {
            format!("snapshot {snapshot} was exported to {path}")
        }
        _ => return None,
    };
    Some((Priority::Notice, format!("{text} (user {uid})")))
}

/// The line of a new snapshot.
pub(crate) fn taken(info: &SnapshotInfo) -> String {
    let label = info.label.as_ref().map_or(String::new(), |label| format!(", labelled {label}"));
    format!(
        "snapshot {} was taken{label}: {} processes, {} pages, stood still for {:.1} ms",
        info.id,
        info.processes,
        info.pages,
        info.freeze_us as f64 / 1000.0
    )
}

fn names(tenants: &[strata_api::RevivedTenant]) -> String {
    let names: Vec<&str> = tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done() -> Reply {
        Reply::Done { note: String::new() }
    }

    #[test]
    fn what_changes_something_has_a_line_and_what_asks_has_none() {
        let set = Request::Set { name: "db".into(), dram_bytes: 1 << 30 };
        let (priority, text) = line(7, &set, &done()).expect("a line");
        assert_eq!(
            (priority, text.as_str()),
            (Priority::Notice, "db: its budget is 1.0 GiB now (user 7)")
        );
        assert_eq!(line(7, &Request::List, &Reply::List { tenants: vec![] }), None);
        let failed = Reply::Error { message: "no snapshot of db: why".into(), hint: String::new() };
        let snapshot = Request::Snapshot { name: "db".into(), label: None, persist: false };
        let (priority, text) = line(0, &snapshot, &failed).expect("a line");
        assert_eq!((priority, text.as_str()), (Priority::Warning, "no snapshot of db: why"));
        assert_eq!(line(0, &Request::Stats { name: "x".into() }, &failed), None);
        let clone = Request::Clone {
            snapshot: "db@1".parse().expect("a snapshot"),
            count: 2,
            name: None,
            net: strata_api::Net::New,
            forwards: vec![],
            tcp: strata_api::Tcp::Close,
            copy_dirs: vec![],
        };
        let one =
            |name: &str| strata_api::RevivedTenant { name: name.into(), pid: 1, forwards: vec![] };
        let revived = Reply::Revived { tenants: vec![one("a-1"), one("a-2")], warnings: vec![] };
        let (_, text) = line(0, &clone, &revived).expect("a line");
        assert_eq!(text, "a-1, a-2: cloned from db@1 (user 0)");
    }
}
