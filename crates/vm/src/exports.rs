//! Disks of a QEMU that waits for a guest, open to whoever copies the guest's disks there:
//! it serves them itself, so nobody else has the images open, and what it remembers of them
//! is what was written.

use serde_json::json;

use crate::disks::{WrittenDisk, export_name};
use crate::qmp::{Monitor, QmpError};

/// Has it serve `disks` at a unix socket that it makes, each by its place among them.
///
/// # Errors
/// It does not.
pub fn open(monitor: &mut Monitor, socket: &str, disks: &[&WrittenDisk]) -> Result<(), QmpError> {
    let server = json!({
        "addr": { "type": "unix", "data": { "path": socket } },
        "max-connections": disks.len(),
    });
    monitor.execute("nbd-server-start", Some(server))?;
    for (number, disk) in disks.iter().enumerate() {
        let name = export_name(number);
        let export = json!({
            "type": "nbd",
            "id": format!("strata-{name}"),
            "node-name": disk.node,
            "name": name,
            "writable": true,
        });
        monitor.execute("block-export-add", Some(export))?;
    }
    Ok(())
}

/// Has it serve none any more: what was written is written when this returns.
///
/// # Errors
/// It may serve them still.
pub fn close(monitor: &mut Monitor) -> Result<(), QmpError> {
    monitor.execute("nbd-server-stop", None).map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::*;
    use crate::qmp::tests::answering;

    #[test]
    fn each_disk_is_served_by_its_place() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let stream = answering(move |line| {
            seen.lock().expect("nobody panics").push(line.to_owned());
            Some("{\"return\": {}}\n".to_owned())
        });
        let mut monitor = Monitor::begin(stream, Duration::from_secs(20)).expect("it answers");
        let disk = |node: &str| WrittenDisk {
            node: node.into(),
            file: "/a".into(),
            format: "raw".into(),
            bytes: 9,
            backing: None,
            layers: Vec::new(),
        };
        let (a, b) = (disk("a"), disk("b"));
        open(&mut monitor, "/x/disks", &[&a, &b]).expect("served");
        close(&mut monitor).expect("not any more");
        let asked = asked.lock().expect("nobody panics");
        let said = |number: usize, what: &str| assert!(asked[number].contains(what), "{asked:?}");
        said(1, "/x/disks");
        said(2, r#""node-name":"a""#);
        said(3, r#""name":"disk-1""#);
        said(4, "nbd-server-stop");
    }
}
