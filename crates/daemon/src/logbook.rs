//! What the log says of requests and clients: a line for each that changed
//! something, or that failed and somebody will ask about. Clients cause these
//! lines, so each user has so many a minute, and so many of one cause.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use strata_api::{Reply, Request, SnapshotInfo};
use strata_policy::Allowance;
use strata_sys::{Priority, log};
use strata_units::ByteSize;

/// Lines that are written at once...
const AT_ONCE: u32 = 200;
/// ...then one each so often.
const EVERY_MS: u64 = 250;

/// Lines of one user in a minute, unless [`set_lines_per_minute`] says otherwise.
const LINES_PER_MINUTE: u32 = 60;
/// Lines of one cause and one user: so many at once...
const ALIKE_AT_ONCE: u32 = 20;
/// ...then one each so often.
const ALIKE_EVERY_MS: u64 = 3000;
/// Users and causes that are told apart; those that have been quiet for a minute are
/// forgotten. More noisy users than this share what one may say.
const MOST_APART: usize = 1024;
const QUIET_MS: u64 = 60_000;

/// How often something was said.
struct Said {
    allowance: Allowance,
    last_ms: u64,
    left_out: u64,
}

/// What may be said, by whom and of what.
struct Lines {
    all: Allowance,
    per_minute: u32,
    by_user: HashMap<u32, Said>,
    by_cause: HashMap<(u32, &'static str), Said>,
}

impl Lines {
    fn new() -> Self {
        Self {
            all: Allowance::new(AT_ONCE, EVERY_MS),
            per_minute: LINES_PER_MINUTE,
            by_user: HashMap::new(),
            by_cause: HashMap::new(),
        }
    }

    /// Whether to write a line that user `uid` has caused; then, how many of theirs were
    /// left out. Root's lines are bounded only all together.
    fn take(&mut self, uid: u32, cause: &'static str, now_ms: u64) -> Option<u64> {
        if uid == 0 {
            return self.all.take(now_ms);
        }
        let alike = || Allowance::new(ALIKE_AT_ONCE, ALIKE_EVERY_MS);
        let of_cause = said(&mut self.by_cause, (uid, cause), (u32::MAX, ""), alike, now_ms);
        let not_alike = of_cause.allowance.take(now_ms).is_some();
        let per_minute = self.per_minute.max(1);
        let own = || Allowance::new(per_minute, (60_000 / u64::from(per_minute)).max(1));
        let of_user = said(&mut self.by_user, uid, u32::MAX, own, now_ms);
        if not_alike && of_user.allowance.take(now_ms).is_some() {
            return Some(std::mem::take(&mut of_user.left_out));
        }
        of_user.left_out += 1;
        None
    }
}

/// What `key` has said, or, where there is no room for another, `rest`.
fn said<K: Eq + std::hash::Hash>(
    table: &mut HashMap<K, Said>,
    key: K,
    rest: K,
    fresh: impl FnOnce() -> Allowance,
    now_ms: u64,
) -> &mut Said {
    if table.len() >= MOST_APART && !table.contains_key(&key) {
        table.retain(|_, said| now_ms.saturating_sub(said.last_ms) < QUIET_MS);
    }
    let key = if table.len() < MOST_APART || table.contains_key(&key) { key } else { rest };
    let fresh = || Said { allowance: fresh(), last_ms: now_ms, left_out: 0 };
    let said = table.entry(key).or_insert_with(fresh);
    said.last_ms = now_ms;
    said
}

fn lines() -> (MutexGuard<'static, Lines>, u64) {
    static LINES: OnceLock<(Instant, Mutex<Lines>)> = OnceLock::new();
    let (began, lines) = LINES.get_or_init(|| (Instant::now(), Mutex::new(Lines::new())));
    let now_ms = began.elapsed().as_millis() as u64;
    (lines.lock().unwrap_or_else(PoisonError::into_inner), now_ms)
}

/// How many lines one user may cause in a minute.
pub(crate) fn set_lines_per_minute(lines_per_minute: u32) {
    lines().0.per_minute = lines_per_minute;
}

/// Writes a line that user `uid` has caused, unless there were too many of theirs, or
/// too many of this cause.
pub(crate) fn tell_of(uid: u32, cause: &'static str, priority: Priority, text: impl Display) {
    let (mut lines, now_ms) = lines();
    let due = lines.take(uid, cause, now_ms);
    drop(lines);
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
        (Request::GuestResume { name }, _) => format!("{name}: told to run on"),
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
        (Request::PoolCreate { name, .. }, _) => format!("pool {name} was made"),
        (Request::PoolEmpty { name }, _) => format!("pool {name} was emptied"),
        (Request::PoolRemove { name }, _) => format!("pool {name} was removed"),
        (Request::SnapshotRemove { snapshot }, _) => format!("snapshot {snapshot} was removed"),
        (Request::SnapshotExport { snapshot, path }, _) => {
            format!("snapshot {snapshot} was exported to {path}")
        }
        (Request::SnapshotCore { snapshot, pid, path }, _) => {
            format!("process {pid} of snapshot {snapshot} was written to the core file {path}")
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
    fn a_users_lines_are_bounded_and_nobody_elses_are_left_out_for_them() {
        let mut lines = Lines::new();
        let causes = ["a", "b", "c", "d", "e", "f"];
        let noisy = |lines: &mut Lines, uid| {
            let all = causes.iter().flat_map(|cause| std::iter::repeat_n(*cause, 100));
            all.filter(|cause| lines.take(uid, cause, 0).is_some()).count()
        };
        let alike = (0..100).filter(|_| lines.take(1, "a", 0).is_some()).count();
        assert_eq!(alike, ALIKE_AT_ONCE as usize);
        assert_eq!(noisy(&mut lines, 1), (LINES_PER_MINUTE - ALIKE_AT_ONCE) as usize);
        assert_eq!(noisy(&mut lines, 2), LINES_PER_MINUTE as usize);
        assert_eq!(lines.take(0, "a", 0), Some(0));
        // After a while, with the number of those that were not written.
        let since_the_last = 80 + 300;
        assert_eq!(lines.take(1, "a", 100_000), Some(since_the_last));
    }

    #[test]
    fn as_many_users_as_there_are_cost_no_more_than_so_many() {
        let mut lines = Lines::new();
        for uid in 1..=10_000 {
            lines.take(uid, "a", 0);
        }
        assert!(lines.by_user.len() <= MOST_APART + 1 && lines.by_cause.len() <= MOST_APART + 1);
        lines.take(20_000, "a", 2 * QUIET_MS);
        assert_eq!((lines.by_user.len(), lines.by_cause.len()), (1, 1));
    }

    #[test]
    fn what_changes_something_has_a_line_and_what_asks_has_none() {
        let set = Request::Set { name: "db".into(), dram_bytes: 1 << 30 };
        let (priority, text) = line(7, &set, &done()).expect("a line");
        assert_eq!(
            (priority, text.as_str()),
            (Priority::Notice, "db: its budget is 1.0 GiB now (user 7)")
        );
        assert_eq!(
            line(7, &Request::List { after: None }, &Reply::List { tenants: vec![], next: None }),
            None
        );
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
