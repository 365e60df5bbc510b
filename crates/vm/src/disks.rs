//! The disks that a guest writes to: which they are, and copies of them that its QEMU makes
//! while it runs. A copy is of the moment in which the guest is stopped. The guest stays on
//! its own images whatever becomes of the copies: there is nothing to merge back.
//!
//! QEMU mirrors a disk until both are nearly alike, and goes on copying what is written.
//! Stopped, the guest writes no more; ending the mirror then copies what is left, and leaves
//! a copy of that moment. Not with writes that go to both at once (`write-blocking`): under
//! load QEMU 7.2 was seen to stand still for good with them, in `mirror_wait_on_conflicts`,
//! which waits without letting go for an operation that waits itself.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};

use crate::pool_disks::{self, Served};
use crate::qmp::{Monitor, QmpError};
use crate::state::{StateError, plain, unfit};

/// What begins the names of copies under way, and of what they go to.
const JOB: &str = "strata-disk-";
const NODE: &str = "strata-copy-";
/// What QEMU puts over a disk while it is copied.
const FILTER: &str = "strata-filter-";
/// How often it is asked whether one has ended.
const POLL: Duration = Duration::from_millis(1);

/// A disk that a guest writes to, as its QEMU says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WrittenDisk {
    /// QEMU's name of it.
    pub node: String,
    /// The image, as QEMU was told.
    pub file: String,
    /// `qcow2` or `raw`.
    pub format: String,
    /// What the guest sees of it.
    pub bytes: u64,
    /// The image that it is an overlay of, and that one's format.
    pub backing: Option<(String, String)>,
    /// All images that it is over, the nearest first, as QEMU has them open.
    pub layers: Vec<String>,
}

/// How far copies are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyProgress {
    /// All have been alike: what is left is what was written since.
    pub is_ready: bool,
    /// Bytes that are copied, of so many.
    pub done_bytes: u64,
    /// All of them.
    pub total_bytes: u64,
}

/// The disks of a guest that it writes to.
///
/// # Errors
/// One cannot be copied, and why; or its monitor does not answer.
pub fn written(monitor: &mut Monitor) -> Result<Vec<WrittenDisk>, StateError> {
    let nodes = monitor.execute("query-named-block-nodes", Some(json!({ "flat": true })))?;
    of_nodes(&nodes, &pool_disks::served(&[], true)).map(|(disks, _)| disks)
}

/// The disks that are written, and the files that are only read. `served`: what somebody of
/// Strata's serves, or an overlay above that: each is one image in a file, or in no file.
pub(crate) fn of_nodes(
    nodes: &Value,
    served: &[Served],
) -> Result<(Vec<WrittenDisk>, Vec<String>), StateError> {
    let nodes = nodes.as_array().ok_or(QmpError::Nonsense("no list of its drives"))?;
    let (mut written, mut read, mut layers) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
    let mut over = BTreeMap::new();
    let mut disks = Vec::new();
    for node in nodes {
        let text = |key: &str| node.get(key).and_then(Value::as_str).unwrap_or_default();
        let (mut file, driver) = (text("file").to_owned(), text("drv"));
        if [NODE, FILTER].iter().any(|ours| text("node-name").starts_with(ours)) {
            continue;
        }
        let below = node.get("image").and_then(|image| image.get("full-backing-filename"));
        if let Some(below) = below.and_then(Value::as_str) {
            over.insert(file.clone(), below.to_owned());
        }
        if node.get("ro").and_then(Value::as_bool) == Some(true) {
            match driver {
                "file" => read.push(file),
                _ => drop(layers.insert(file)),
            }
            continue;
        }
        match served.iter().find(|one| one.node == text("node-name")) {
            None => {}
            Some(Served { image: None, .. }) => continue,
            Some(Served { image: Some(image), .. }) if driver == "nbd" => {
                disks.push(disk(node, image, "raw")?);
                continue;
            }
            // Of an overlay that was told what it is over QEMU has no such name.
            Some(Served { image: Some(image), .. }) => file.clone_from(image),
        }
        let (format, protocols) = written.entry(file.clone()).or_insert((None, 0_u32));
        match driver {
            "file" => *protocols += 1,
            "qcow2" | "raw" if format.is_none() => *format = Some(disk(node, &file, driver)?),
            _ => {
                return Err(unfit(format!(
                    "its drive {} can be written and is of the kind {}: snapshots have disks that are raw or qcow2 images in files",
                    plain(&file),
                    plain(driver)
                )));
            }
        }
    }
    for (file, found) in written {
        match found {
            (Some(disk), 1) => disks.push(WrittenDisk { layers: layers_of(&file, &over), ..disk }),
            // Only what writes it opens it to be written (auto-read-only, as libvirt says).
            (None, 1) if layers.contains(&file) => read.push(file),
            _ => {
                return Err(unfit(format!(
                    "its drive {} can be written and is not one image in one file (give its format: raw or qcow2)",
                    plain(&file)
                )));
            }
        }
    }
    Ok((disks, read))
}

/// What an image is over, and that is over, and so on.
fn layers_of(file: &str, over: &BTreeMap<String, String>) -> Vec<String> {
    let next = |file: &String| over.get(file).cloned();
    // Whoever says of two images that each is over the other is not followed for ever.
    std::iter::successors(over.get(file).cloned(), next).take(over.len()).collect()
}

fn disk(node: &Value, file: &str, format: &str) -> Result<WrittenDisk, StateError> {
    let image = node.get("image").ok_or(QmpError::Nonsense("a drive without an image"))?;
    let text = |key: &str| image.get(key).and_then(Value::as_str).map(str::to_owned);
    if image.get("encrypted").and_then(Value::as_bool) == Some(true) {
        return Err(unfit(format!("its drive {} is encrypted", plain(file))));
    }
    let bytes = image.get("virtual-size").and_then(Value::as_u64);
    // As its header has it: a copy is beside the image.
    let backing = text("backing-filename");
    Ok(WrittenDisk {
        node: node.get("node-name").and_then(Value::as_str).unwrap_or_default().to_owned(),
        file: file.to_owned(),
        format: format.to_owned(),
        bytes: bytes.ok_or(QmpError::Nonsense("a drive without a size"))?,
        backing: backing.zip(text("backing-filename-format")),
        layers: Vec::new(),
    })
}

/// Has QEMU begin to copy a disk to the image `to`, which is of the same format, empty and
/// an overlay of the same image. `number` tells it from the guest's others.
///
/// # Errors
/// There is no copy under way of that number.
pub fn begin(
    monitor: &mut Monitor,
    number: usize,
    disk: &WrittenDisk,
    to: &str,
) -> Result<(), QmpError> {
    let node = format!("{NODE}{number}");
    // Whoever needs the copy on the device sees to that, when the guest runs again.
    let target = json!({
        "driver": disk.format,
        "node-name": node,
        "discard": "unmap",
        "cache": { "no-flush": true },
        "file": { "driver": "file", "filename": to },
    });
    monitor.execute("blockdev-add", Some(target))?;
    let job = json!({
        "job-id": format!("{JOB}{number}"),
        "device": disk.node,
        "target": node,
        "sync": if disk.backing.is_some() { "top" } else { "full" },
        "copy-mode": "background",
        "auto-dismiss": false,
    });
    monitor.execute("blockdev-mirror", Some(job)).map(drop)
}

/// The same to another host, by the way that begins at the socket `way`, where another QEMU
/// has the disk exported ([`crate::exports`]); `over`: it is an overlay there, too.
///
/// # Errors
/// There is no copy under way of that number.
pub fn begin_far(
    monitor: &mut Monitor,
    number: usize,
    disk: &WrittenDisk,
    (way, over): (&str, bool),
) -> Result<(), QmpError> {
    let node = format!("{NODE}{number}");
    let target = json!({
        "driver": "nbd",
        "node-name": node,
        "discard": "unmap",
        "server": { "type": "unix", "path": way },
        "export": export_name(number),
    });
    monitor.execute("blockdev-add", Some(target))?;
    let job = json!({
        "job-id": format!("{JOB}{number}"),
        "device": disk.node,
        "target": node,
        "filter-node-name": format!("{FILTER}{number}"),
        "sync": if over { "top" } else { "full" },
        "copy-mode": "background",
        "auto-dismiss": false,
    });
    monitor.execute("blockdev-mirror", Some(job)).map(drop)
}

/// What a disk is called where it is exported.
pub(crate) fn export_name(number: usize) -> String {
    format!("disk-{number}")
}

/// How far all copies under way are.
///
/// # Errors
/// One of them has failed.
pub fn progress(monitor: &mut Monitor) -> Result<CopyProgress, StateError> {
    let mut progress = CopyProgress { is_ready: true, done_bytes: 0, total_bytes: 0 };
    for job in jobs(monitor)? {
        if let Some(why) = job.error {
            return Err(failed(&why));
        }
        progress.is_ready &= job.status == "ready";
        progress.done_bytes += job.done;
        progress.total_bytes += job.total;
    }
    Ok(progress)
}

/// Ends the copies, which are ready: they are of this moment, in which the guest stands
/// still.
///
/// # Errors
/// They are of no use.
pub fn finish(monitor: &mut Monitor) -> Result<(), StateError> {
    for job in jobs(monitor)? {
        if job.status != "ready" {
            return Err(failed(job.error.as_deref().unwrap_or("it is not ready")));
        }
        // Of one that is ready this is its proper end: what is left is copied before.
        monitor.execute("block-job-cancel", Some(json!({ "device": job.id })))?;
    }
    loop {
        let jobs = jobs(monitor)?;
        if let Some(why) = jobs.iter().find_map(|job| job.error.as_deref()) {
            return Err(failed(why));
        }
        if jobs.iter().all(|job| job.status == "concluded") {
            return Ok(());
        }
        std::thread::sleep(POLL);
    }
}

/// Ends all copies, whatever they are worth, and has QEMU let go of their files.
///
/// # Errors
/// Some are there still.
pub fn clean(monitor: &mut Monitor) -> Result<(), QmpError> {
    loop {
        let jobs = jobs(monitor)?;
        if jobs.is_empty() {
            break;
        }
        for job in jobs {
            let (command, one) = match job.status.as_str() {
                "concluded" => ("job-dismiss", json!({ "id": job.id })),
                _ => ("block-job-cancel", json!({ "device": job.id, "force": true })),
            };
            // One that ends meanwhile is looked at once more.
            match monitor.execute(command, Some(one)) {
                Ok(_) | Err(QmpError::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        std::thread::sleep(POLL);
    }
    let nodes = monitor.execute("query-named-block-nodes", Some(json!({ "flat": true })))?;
    for node in nodes.as_array().into_iter().flatten() {
        let name = node.get("node-name").and_then(Value::as_str).unwrap_or_default();
        if name.starts_with(NODE) {
            monitor.execute("blockdev-del", Some(json!({ "node-name": name })))?;
        }
    }
    Ok(())
}

struct Job {
    id: String,
    status: String,
    error: Option<String>,
    done: u64,
    total: u64,
}

/// Copies under way.
fn jobs(monitor: &mut Monitor) -> Result<Vec<Job>, QmpError> {
    let answer = monitor.execute("query-jobs", None)?;
    let job = |one: &Value| {
        let text = |key: &str| one.get(key).and_then(Value::as_str).map(str::to_owned);
        let number = |key: &str| one.get(key).and_then(Value::as_u64).unwrap_or(0);
        Some(Job {
            id: text("id").filter(|id| id.starts_with(JOB))?,
            status: text("status").unwrap_or_default(),
            error: text("error"),
            done: number("current-progress"),
            total: number("total-progress"),
        })
    };
    Ok(answer.as_array().into_iter().flatten().filter_map(job).collect())
}

fn failed(why: &str) -> StateError {
    unfit(format!("a disk of it cannot be copied: {}", plain(why)))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::qmp::tests::answering;

    fn nodes(text: &str) -> Result<(Vec<WrittenDisk>, Vec<String>), StateError> {
        let one = |node: &str, image: Option<&str>| Served {
            node: node.into(),
            image: image.map(Into::into),
        };
        let served = [one("image", Some("/raw")), one("swap", None), one("over", Some("/o"))];
        of_nodes(&serde_json::from_str(text).expect("JSON"), &served)
    }

    #[test]
    fn an_image_is_two_nodes_and_what_it_is_over_is_read() {
        let (disks, read) = nodes(
            r##"[{"ro": true, "drv": "file", "file": "/base"},
                {"ro": true, "drv": "qcow2", "file": "/base", "image": {"virtual-size": 9}},
                {"ro": false, "drv": "file", "file": "/a", "node-name": "#1"},
                {"ro": false, "drv": "qcow2", "file": "/a", "node-name": "#2", "image":
                 {"virtual-size": 9, "backing-filename": "base", "full-backing-filename": "/base",
                  "backing-filename-format": "qcow2"}},
                {"ro": false, "drv": "raw", "file": "/b", "node-name": "d", "image":
                 {"virtual-size": 5}},
                {"ro": false, "drv": "file", "file": "/b"},
                {"ro": false, "drv": "file", "file": "/under"},
                {"ro": true, "drv": "raw", "file": "/under", "image": {"virtual-size": 9}}]"##,
        )
        .expect("two disks");
        let disk = |node: &str, file: &str, format: &str, bytes| WrittenDisk {
            node: node.into(),
            file: file.into(),
            format: format.into(),
            bytes,
            backing: None,
            layers: Vec::new(),
        };
        let backing = Some(("base".into(), "qcow2".into()));
        let layers = vec!["/base".into()];
        let first = WrittenDisk { backing, layers, ..disk("#2", "/a", "qcow2", 9) };
        assert_eq!(disks, [first, disk("d", "/b", "raw", 5)]);
        assert_eq!(read, ["/base", "/under"]);
    }

    #[test]
    fn what_is_served_is_the_image_that_it_is_served_from() {
        let (disks, read) = nodes(
            r#"[{"ro": false, "drv": "nbd", "file": "nbd+unix:///?s=a", "node-name": "image",
                 "image": {"virtual-size": 9}},
                {"ro": false, "drv": "nbd", "file": "nbd+unix:///?s=b", "node-name": "swap"},
                {"ro": true, "drv": "nbd", "file": "nbd+unix:///?s=c", "node-name": "base"},
                {"ro": false, "drv": "file", "file": "/o"},
                {"ro": false, "drv": "qcow2", "file": "json:{}", "node-name": "over",
                 "image": {"virtual-size": 7}}]"#,
        )
        .expect("two disks");
        assert_eq!((disks.len(), read.len()), (2, 0));
        assert_eq!((&*disks[1].file, &*disks[1].format, disks[1].bytes), ("/o", "qcow2", 7));
        assert_eq!((&*disks[0].file, &*disks[0].format, disks[0].bytes), ("/raw", "raw", 9));
        let other = r#"[{"ro": false, "drv": "nbd", "file": "nbd://x", "node-name": "x"}]"#;
        assert!(nodes(other).expect_err("somebody's").to_string().contains("of the kind nbd"));
    }

    #[test]
    fn what_copies_a_disk_is_none_and_layers_that_contradict_themselves_end() {
        let (disks, _) = nodes(
            r#"[{"ro": false, "drv": "nbd", "file": "nbd+unix:///x", "node-name": "strata-copy-0"},
                {"ro": false, "drv": "mirror_top", "file": "/a", "node-name": "strata-filter-0"},
                {"ro": false, "drv": "file", "file": "/a"},
                {"ro": false, "drv": "qcow2", "file": "/a", "image":
                 {"virtual-size": 9, "full-backing-filename": "/b"}},
                {"ro": true, "drv": "qcow2", "file": "/b", "image":
                 {"virtual-size": 9, "full-backing-filename": "/a"}}]"#,
        )
        .expect("a disk");
        assert_eq!((disks.len(), &disks[0].layers), (1, &vec!["/b".to_owned(), "/a".to_owned()]));
    }

    #[test]
    fn what_cannot_be_copied_is_refused_by_name() {
        for (text, why) in [
            (r#"[{"ro": false, "drv": "host_device", "file": "/dev/x"}]"#, "host_device"),
            (r#"[{"ro": false, "drv": "file", "file": "/a\n"}]"#, "drive /a? can be written"),
            (
                r#"[{"ro": false, "drv": "qcow2", "file": "/a", "image": {"virtual-size": 1, "encrypted": true}}]"#,
                "encrypted",
            ),
            (
                r#"[{"ro": false, "drv": "raw", "file": "/a", "image": {"virtual-size": 1}},
                    {"ro": false, "drv": "raw", "file": "/a", "image": {"virtual-size": 1}}]"#,
                "of the kind raw",
            ),
        ] {
            let error = nodes(text).expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    /// A monitor that gives these answers in order, then empty ones; what it is asked has
    /// to be as said.
    fn monitor(answers: &'static [(&str, &str)]) -> Monitor {
        let mut answers: VecDeque<_> = answers.iter().collect();
        let mut greeted = false;
        let stream = answering(move |line| {
            if !std::mem::replace(&mut greeted, true) {
                return Some("{\"return\": {}}\n".to_owned());
            }
            let (command, answer) = answers.pop_front()?;
            assert!(line.contains(&format!(r#""execute":"{command}""#)), "{line}");
            Some(format!("{answer}\n"))
        });
        Monitor::begin(stream, Duration::from_secs(20)).expect("it answers")
    }

    const NONE: &str = r#"{"return": {}}"#;

    #[test]
    fn copies_end_in_the_moment_when_all_are_ready() {
        let mut one = monitor(&[
            (
                "query-jobs",
                r#"{"return": [{"id": "x", "status": "ready"}, {"id": "strata-disk-0", "status": "ready"}]}"#,
            ),
            ("block-job-cancel", NONE),
            ("query-jobs", r#"{"return": [{"id": "strata-disk-0", "status": "waiting"}]}"#),
            ("query-jobs", r#"{"return": [{"id": "strata-disk-0", "status": "concluded"}]}"#),
        ]);
        finish(&mut one).expect("copied");
        let mut one = monitor(&[(
            "query-jobs",
            r#"{"return": [{"id": "strata-disk-0", "status": "running"}]}"#,
        )]);
        assert!(finish(&mut one).expect_err("too early").to_string().contains("not ready"));
        let mut one = monitor(&[(
            "query-jobs",
            r#"{"return": [{"id": "strata-disk-0", "status": "concluded", "error": "No space"}]}"#,
        )]);
        assert!(progress(&mut one).expect_err("failed").to_string().contains("No space"));
    }

    #[test]
    fn what_is_left_of_others_is_ended_and_let_go() {
        let mut one = monitor(&[
            ("query-jobs", r#"{"return": [{"id": "strata-disk-0", "status": "running"}]}"#),
            ("block-job-cancel", NONE),
            ("query-jobs", r#"{"return": [{"id": "strata-disk-0", "status": "concluded"}]}"#),
            ("job-dismiss", NONE),
            ("query-jobs", r#"{"return": []}"#),
            (
                "query-named-block-nodes",
                r#"{"return": [{"node-name": "strata-copy-0"}, {"node-name": "d"}]}"#,
            ),
            ("blockdev-del", NONE),
        ]);
        clean(&mut one).expect("clean");
    }
}
