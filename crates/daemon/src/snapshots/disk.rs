//! What is known of snapshots on disk: a directory each, and which number each
//! tenant's next one gets.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::machine::Machine;
use super::remove_flat;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use strata_api::{PortForward, SnapshotId, SnapshotInfo};

const META: &str = "snapshot.json";
const IMAGES: &str = "images";
const ARCHIVE: &str = "memory";
const COPIES: &str = "copies";
const LINEAGE: &str = "lineage.json";

/// The memory of one process of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Process {
    /// Its number when it was taken.
    pub(super) pid: u32,
    /// The pager's number of its memory; none: it is on disk alone.
    pub(super) memory: Option<u32>,
    /// Address of its agent's `wire::Restart`.
    pub(super) restart: Option<u64>,
    /// The agent's memory: first byte, end.
    pub(super) own: (u64, u64),
    /// What must be in place before it runs.
    pub(super) needed: Vec<(u64, u64)>,
    /// What it had set for ranges of its memory: first byte, end,
    /// `strata_pager::Setting`.
    #[serde(default)]
    pub(super) settings: Vec<(u64, u64, u64)>,
    /// Pages that it asked for first when it was restored last.
    #[serde(default)]
    pub(super) touched: Vec<u64>,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Known {
    pub(super) info: SnapshotInfo,
    pub(super) processes: Vec<Process>,
    /// Where it was taken; none: by a version that did not say.
    #[serde(default)]
    pub(super) machine: Option<Machine>,
    /// Where the clone lived that it was taken of; none: where everybody does.
    #[serde(default)]
    pub(super) place: Option<Place>,
}

impl Known {
    /// Whether the pager has all of its memory.
    pub(super) fn is_in_memory(&self) -> bool {
        self.processes.iter().all(|process| process.memory.is_some())
    }
}

/// Where a tenant's memory comes from, by its name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Line {
    /// The last number that was given.
    pub(super) last: u64,
    /// The tenant whose parent and place are below (see `lineage.rs`).
    #[serde(default)]
    pub(super) life: u64,
    /// The snapshot that its memory came from last.
    pub(super) parent: Option<SnapshotId>,
    /// Where a clone lives; none: where everybody does.
    pub(super) place: Option<Place>,
}

/// What a clone has for itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) own_network: bool,
    /// Directories, and what it sees in their places.
    pub(super) shown: Vec<(PathBuf, PathBuf)>,
    /// Ports of this machine that lead to it.
    pub(super) forwards: Vec<PortForward>,
}

#[derive(Clone, Debug)]
pub(super) struct Disk {
    directory: PathBuf,
}

impl Disk {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    fn of(&self, id: &SnapshotId) -> PathBuf {
        self.directory.join(id.to_string())
    }

    /// CRIU's images of a snapshot, open to be read, with their names.
    pub(super) fn open_images(&self, id: &SnapshotId) -> Result<Vec<(String, File)>, String> {
        let directory = self.images(id);
        let failed = |error| format!("cannot read {}: {error}", directory.display());
        let mut found = Vec::new();
        for entry in fs::read_dir(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            // What CRIU said while it made them.
            if entry.path().is_file() && !name.ends_with(".log") && !name.ends_with(".out") {
                found.push((name, File::open(entry.path()).map_err(failed)?));
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// Where CRIU's images of a snapshot are.
    pub(super) fn images(&self, id: &SnapshotId) -> PathBuf {
        self.of(id).join(IMAGES)
    }

    /// Where what CRIU said last when it failed is kept, of a dump or of a restore.
    pub(super) fn kept_log(&self, of: &str) -> PathBuf {
        self.directory.join(format!("criu-{of}.log"))
    }

    /// Makes the empty directory of a snapshot, readable by nobody else; where
    /// its images go, which is not made.
    pub(super) fn make(&self, id: &SnapshotId) -> Result<PathBuf, String> {
        self.remove(id)?;
        let directory = self.of(id);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(|error| {
            format!("cannot make {}: {error} (snapshot_dir)", directory.display())
        })?;
        Ok(directory.join(IMAGES))
    }

    /// The file of a persisted snapshot's memory and images.
    pub(super) fn archive(&self, id: &SnapshotId) -> PathBuf {
        self.of(id).join(ARCHIVE)
    }

    /// A directory for the copies of directories that the tenant `name` sees.
    pub(super) fn copies(&self, name: &str) -> PathBuf {
        self.directory.join(COPIES).join(name)
    }

    /// Tenants that have one.
    pub(super) fn copied(&self) -> Vec<String> {
        let entries = fs::read_dir(self.directory.join(COPIES)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// From now on the snapshot is offered, also to the next worker.
    pub(super) fn write(&self, known: &Known) -> Result<(), String> {
        write_json(&self.of(&known.info.id).join(META), known)
    }

    /// Removes a snapshot's files. An error: it is one still.
    pub(super) fn remove(&self, id: &SnapshotId) -> Result<(), String> {
        // First what makes it one: removed in part, it is none.
        let directory = self.of(id);
        let meta = directory.join(META);
        match fs::remove_file(&meta) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(format!("cannot remove {}: {error}", meta.display()));
            }
            _ => {}
        }
        remove_flat(&self.images(id));
        remove_flat(&directory);
        Ok(())
    }

    /// Every whole snapshot. What is none is removed.
    pub(super) fn read_all(&self) -> Vec<Known> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(|name| name.parse::<SnapshotId>().ok()) else {
                continue;
            };
            match read_json::<Known>(&entry.path().join(META)) {
                Some(known) if known.info.id == id => found.push(known),
                // If it cannot be, it is not known either.
                _ => drop(self.remove(&id)),
            }
        }
        found
    }

    pub(super) fn read_lineage(&self) -> BTreeMap<String, Line> {
        read_json(&self.directory.join(LINEAGE)).unwrap_or_default()
    }

    pub(super) fn write_lineage(&self, lineage: &BTreeMap<String, Line>) -> Result<(), String> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)
            .map_err(|error| format!("cannot make {}: {error}", self.directory.display()))?;
        write_json(&self.directory.join(LINEAGE), lineage)
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Writes a file as a whole or not at all.
fn write_json(path: &Path, value: &impl Serialize) -> Result<(), String> {
    let part = path.with_extension("part");
    let text = serde_json::to_vec(value).map_err(|error| error.to_string())?;
    let written = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&part)
        .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&part, path))
        .and_then(|()| path.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all()));
    written.map_err(|error| {
        let _ = fs::remove_file(&part);
        format!("cannot write {}: {error}", path.display())
    })
}
