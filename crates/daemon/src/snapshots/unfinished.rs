//! Processes of a restore whose worker dies over it. Nobody serves them any more,
//! or not all of them: the next worker ends those whose agents have not come.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use strata_sys::{OPEN_NO_LINK, SIGKILL, note_of, noted};

use crate::tenants::Tenants;

const LIST: &str = "processes";

/// Notes a process of the restore that works in `work`, before it is served.
pub(super) fn note(work: &Path, pid: u32) -> io::Result<()> {
    let line = note_of(pid).ok_or(io::ErrorKind::NotFound)?;
    let mut list = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .custom_flags(OPEN_NO_LINK)
        .open(work.join(LIST))?;
    writeln!(list, "{line}")
}

/// Ends what is left of the restore that worked in `work`.
pub(super) fn end(work: &Path, tenants: &Tenants) {
    let list = std::fs::read_to_string(work.join(LIST)).unwrap_or_default();
    for (pid, pidfd) in list.lines().filter_map(noted) {
        let lives = tenants.list().iter().any(|tenant| tenant.space_of(pid).is_some());
        if !lives {
            pidfd.signal(SIGKILL);
        }
    }
}
