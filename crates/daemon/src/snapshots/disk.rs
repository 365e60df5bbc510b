//! What is known of snapshots on disk: a directory each, and which number each
//! tenant's next one gets.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use super::guest::GuestPart;
use super::guest_files::described;
use super::in_file::AsWritten;
use super::machine::Machine;
use super::remove_flat;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use strata_api::{PortForward, SnapshotId, SnapshotInfo, SnapshotState};
use strata_snapshot::archive::Reader;
use strata_sys::{Access, Directory, Priority, Range, log};
use strata_units::{PAGE_SIZE, SpaceId};

/// Pages so near to each other are remembered with what lies between them.
const SAME_RANGE_BYTES: u64 = 4 * PAGE_SIZE as u64;
const META: &str = "snapshot.json";
const IMAGES: &str = "images";
const ARCHIVE: &str = "memory";
const STATE: &str = "devices";
const COPIES: &str = "copies";
const LINEAGE: &str = "lineage.json";
const MADE: &str = "disks.json";
const MOVES: &str = "moves";

/// The memory of one process of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Process {
    /// Its number when it was taken.
    pub(super) pid: u32,
    /// The pager's number of its memory; none: it is on disk alone.
    pub(super) memory: Option<u32>,
    /// Address of its agent's `wire::restart::Restart`.
    pub(super) restart: Option<u64>,
    /// The agent's memory: first byte, end.
    pub(super) own: (u64, u64),
    /// What must be in place before it runs.
    pub(super) needed: Vec<(u64, u64)>,
    /// What it had set for ranges of its memory: first byte, end,
    /// `strata_pager::Setting`.
    #[serde(default)]
    pub(super) settings: Vec<(u64, u64, u64)>,
    /// What it asked for first when it was restored last: pages, in that order, and what
    /// came after them: first bytes and ends.
    #[serde(default)]
    pub(super) touched: Vec<u64>,
    #[serde(default)]
    pub(super) touched_then: Vec<(u64, u64)>,
}

/// Pages that are remembered in the order in which they were asked for: those before the
/// first answers. Of the rest, which is much of the working set, there are ranges.
const MOST_IN_ORDER: usize = 1024;
/// So few that a description holds those of many processes.
const MOST_RANGES: usize = 2048;

impl Process {
    /// Remembers what it asked for, which is forgotten with the next time.
    pub(super) fn asked_for(&mut self, mut pages: Vec<u64>) {
        let mut rest = pages.split_off(pages.len().min(MOST_IN_ORDER));
        rest.sort_unstable();
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for start in rest {
            match ranges.last_mut() {
                Some((_, end)) if start <= *end + SAME_RANGE_BYTES => {
                    *end = start + PAGE_SIZE as u64;
                }
                _ => ranges.push((start, start + PAGE_SIZE as u64)),
            }
        }
        ranges.truncate(MOST_RANGES);
        (self.touched, self.touched_then) = (pages, ranges);
    }

    /// That, in the order in which it is to be brought.
    pub(super) fn wanted(&self) -> Vec<Range> {
        let page = |&start: &u64| Range { start, end: start + PAGE_SIZE as u64 };
        let range = |&(start, end): &(u64, u64)| Range { start, end };
        self.touched.iter().map(page).chain(self.touched_then.iter().map(range)).collect()
    }
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
    /// Of a virtual machine: what there is beside its memory.
    #[serde(default)]
    pub(super) guest: Option<GuestPart>,
    /// Its file, if it is persisted.
    #[serde(default)]
    pub(super) as_written: Option<AsWritten>,
    /// The move that it came by: it is nobody's but that tenant's, until that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) coming: Option<String>,
}

impl Known {
    /// Whether the pager has all of its memory.
    pub(super) fn is_in_memory(&self) -> bool {
        self.processes.iter().all(|process| process.memory.is_some())
    }

    /// The pager has it, by these numbers.
    pub(super) fn has_memories(&mut self, memories: Vec<SpaceId>) {
        for (process, memory) in self.processes.iter_mut().zip(memories) {
            process.memory = Some(memory.0);
        }
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

    /// The directory itself, which must be nobody else's: what is in it is found by
    /// name, and brought to life as what it says.
    fn open(&self) -> io::Result<Directory> {
        Directory::open_private(&self.directory)
    }

    /// The directory itself, made if it is not there.
    fn open_or_make(&self) -> Result<Directory, String> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)
            .and_then(|()| self.open())
            .map_err(|error| {
                format!("cannot make {}: {error} (snapshot_dir)", self.directory.display())
            })
    }

    /// CRIU's images of a snapshot, open to be read, with their names.
    pub(super) fn open_images(&self, id: &SnapshotId) -> Result<Vec<(String, File)>, String> {
        let failed = |error| format!("cannot read {}: {error}", self.images(id).display());
        let directory = self
            .open()
            .and_then(|all| all.directory(id.to_string())?.directory(IMAGES))
            .map_err(failed)?;
        let mut found = Vec::new();
        for name in directory.names().map_err(failed)? {
            let Ok(name) = name.into_string() else { continue };
            // What CRIU said while it made them.
            let is_log = name.ends_with(".log") || name.ends_with(".out");
            if !is_log && directory.metadata(&name).map_err(failed)?.is_file() {
                let file = directory.file(&name, Access::Read).map_err(failed)?;
                found.push((name, file));
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
        self.open_or_make()?.make_directory(id.to_string()).map_err(|error| {
            format!("cannot make {}: {error} (snapshot_dir)", self.of(id).display())
        })?;
        Ok(self.images(id))
    }

    /// The file of a persisted snapshot's memory and images.
    pub(super) fn archive(&self, id: &SnapshotId) -> PathBuf {
        self.of(id).join(ARCHIVE)
    }

    /// Keeps the state of a guest's devices with a snapshot.
    pub(super) fn write_state(&self, id: &SnapshotId, bytes: &[u8]) -> Result<(), String> {
        let directory = self.open().and_then(|all| all.directory(id.to_string()));
        let written = directory.and_then(|directory| {
            // Of an attempt before this one.
            let _ = directory.remove_file(STATE);
            let mut file = directory.file(STATE, Access::New)?;
            file.write_all(bytes)?;
            // It may be persisted.
            file.sync_all()
        });
        written.map_err(|error| format!("cannot write {}: {error}", self.of(id).display()))
    }

    /// That, open to be read.
    pub(super) fn open_state(&self, id: &SnapshotId) -> Result<File, String> {
        let directory = self.open().and_then(|all| all.directory(id.to_string()));
        directory
            .and_then(|directory| directory.file(STATE, Access::Read))
            .map_err(|error| format!("cannot read {}: {error}", self.of(id).display()))
    }

    /// The same, of no more than `most` bytes.
    pub(super) fn read_state(&self, id: &SnapshotId, most: u64) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        self.open_state(id)?
            .take(most)
            .read_to_end(&mut bytes)
            .map_err(|error| format!("cannot read {}: {error}", self.of(id).display()))?;
        Ok(bytes)
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
        let id = &known.info.id;
        let directory = self.open().and_then(|all| all.directory(id.to_string()));
        let written = directory.and_then(|directory| write_json(&directory, META, known));
        written.map_err(|error| format!("cannot write {}: {error}", self.of(id).display()))
    }

    /// Removes a snapshot's files. An error: it is one still.
    pub(super) fn remove(&self, id: &SnapshotId) -> Result<(), String> {
        let failed = |error| format!("cannot remove {}: {error}", self.of(id).display());
        let directory = match self.open().and_then(|all| all.directory(id.to_string())) {
            Ok(directory) => directory,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed(error)),
        };
        // First what makes it one: removed in part, it is none.
        match directory.remove_file(META) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        remove_flat(&self.images(id));
        remove_flat(&self.of(id));
        Ok(())
    }

    /// Every whole snapshot, and those that are left because they are not understood. What
    /// is none is removed.
    pub(super) fn read_all(&self) -> (Vec<Known>, Vec<SnapshotId>) {
        let (mut found, mut left) = (Vec::new(), Vec::new());
        let Ok(all) = self.open() else { return (found, left) };
        for name in all.names().unwrap_or_default() {
            let Some(id) = name.to_str().and_then(|name| name.parse::<SnapshotId>().ok()) else {
                continue;
            };
            let one = all.directory(&name).ok();
            let has = |name| one.as_ref().is_some_and(|one| one.metadata(name).is_ok());
            match one.as_ref().and_then(|one| read_json::<Known>(one, META)) {
                Some(known) if known.info.id == id => found.push(known),
                _ if has(META) && has(ARCHIVE) => match self.read_persisted(&id) {
                    Some(known) => found.push(known),
                    None => left.push(id),
                },
                // If it cannot be, it is not known either.
                _ => drop(self.remove(&id)),
            }
        }
        (found, left)
    }

    /// A persisted snapshot, of which what is said beside its file is damaged: the file
    /// says the same, under checksums.
    fn read_persisted(&self, id: &SnapshotId) -> Option<Known> {
        let path = self.archive(id);
        let reader = Reader::open(&path).map_err(|error| crate::tenants::chain(&error));
        match reader.and_then(|reader| described(&reader, &path)) {
            Ok(mut known) if known.info.id == *id => {
                known.info.state = SnapshotState::Persisted;
                known.info.file_bytes = fs::metadata(&path).map_or(0, |file| file.len());
                known.processes.iter_mut().for_each(|process| process.memory = None);
                log(Priority::Warning, format_args!("{META} of {id} is damaged: its file has it"));
                Some(known)
            }
            // Another version may know what it is.
            outcome => {
                let why = outcome.err().unwrap_or_else(|| "it is another snapshot's".to_owned());
                log(
                    Priority::Error,
                    format_args!("{META} of {id} is not understood, and is left: {why}"),
                );
                None
            }
        }
    }

    /// Files of guests' disks that were made, wherever they are.
    pub(super) fn read_made(&self) -> BTreeSet<PathBuf> {
        self.open().ok().and_then(|all| read_json(&all, MADE)).unwrap_or_default()
    }

    pub(super) fn write_made(&self, made: &BTreeSet<PathBuf>) -> Result<(), String> {
        write_json(&self.open_or_make()?, MADE, made).map_err(|error| {
            format!("cannot write {}: {error}", self.directory.join(MADE).display())
        })
    }

    fn moves_directory(&self) -> io::Result<Directory> {
        let all = self.open()?;
        match all.make_directory(MOVES) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
            _ => all.directory(MOVES),
        }
    }

    /// Records of moves, by the names of their files.
    pub(super) fn moves(&self) -> Vec<String> {
        let found = self.open().and_then(|all| all.directory(MOVES)?.names());
        found.unwrap_or_default().into_iter().filter_map(|name| name.into_string().ok()).collect()
    }

    pub(super) fn read_move<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        self.open().and_then(|all| all.directory(MOVES)).ok().and_then(|all| read_json(&all, name))
    }

    /// `lasts`: also if the machine goes down a moment later.
    pub(super) fn write_move(
        &self,
        name: &str,
        value: &impl Serialize,
        lasts: bool,
    ) -> Result<(), String> {
        self.open_or_make()?;
        let written =
            self.moves_directory().and_then(|all| write_json_for(&all, name, value, lasts));
        written.map_err(|error| self.move_failed("write", name, &error))
    }

    pub(super) fn remove_move(&self, name: &str) -> Result<(), String> {
        let removed = self.open().and_then(|all| all.directory(MOVES)?.remove_file(name));
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(self.move_failed("remove", name, &error))
            }
            _ => Ok(()),
        }
    }

    /// The same, and it does not come back if the machine goes down a moment later.
    pub(super) fn remove_move_for_good(&self, name: &str) -> Result<(), String> {
        self.remove_move(name)?;
        let synced = self.moves_directory().and_then(|all| all.sync());
        synced.map_err(|error| self.move_failed("remove", name, &error))
    }

    fn move_failed(&self, verb: &str, name: &str, error: &io::Error) -> String {
        let path = self.directory.join(MOVES).join(name);
        format!("cannot {verb} {}: {error}", path.display())
    }

    /// A new file for a snapshot that arrives, and its path; what a worker left there that
    /// died over it is overwritten.
    pub(super) fn arriving(&self, id: &str) -> Result<(PathBuf, File), String> {
        let name = format!("arriving-{id}");
        let file = self.new_file(&name, Access::New)?;
        Ok((self.directory.join(MOVES).join(&name), file))
    }

    /// A new file without a name, to be written and read.
    pub(super) fn nameless(&self, id: &str) -> Result<File, String> {
        let file = self.new_file(&format!("arriving-{id}"), Access::ReadWrite)?;
        self.forget_arrived_of(id);
        Ok(file)
    }

    fn new_file(&self, name: &str, access: Access) -> Result<File, String> {
        self.open_or_make()?;
        let made = self.moves_directory().and_then(|all| {
            let _ = all.remove_file(name);
            all.file(name, access)
        });
        made.map_err(|error| self.move_failed("make", name, &error))
    }

    /// The same name is nobody's any more.
    pub(super) fn forget_arrived_of(&self, id: &str) {
        // What stays is removed by the next worker.
        let _ = self.remove_move(&format!("arriving-{id}"));
    }

    /// Removes what arrived for workers that are gone.
    pub(super) fn forget_arrived(&self) {
        for name in self.moves().iter().filter(|name| name.starts_with("arriving-")) {
            let _ = self.remove_move(name);
        }
    }

    pub(super) fn read_lineage(&self) -> BTreeMap<String, Line> {
        self.open().ok().and_then(|all| read_json(&all, LINEAGE)).unwrap_or_default()
    }

    pub(super) fn write_lineage(&self, lineage: &BTreeMap<String, Line>) -> Result<(), String> {
        write_json(&self.open_or_make()?, LINEAGE, lineage).map_err(|error| {
            format!("cannot write {}: {error}", self.directory.join(LINEAGE).display())
        })
    }
}

fn read_json<T: DeserializeOwned>(directory: &Directory, name: &str) -> Option<T> {
    let mut text = Vec::new();
    directory.file(name, Access::Read).ok()?.read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Writes a file as a whole or not at all.
fn write_json(directory: &Directory, name: &str, value: &impl Serialize) -> io::Result<()> {
    write_json_for(directory, name, value, true)
}

fn write_json_for(
    directory: &Directory,
    name: &str,
    value: &impl Serialize,
    lasts: bool,
) -> io::Result<()> {
    let part = format!("{name}.part");
    let text = serde_json::to_vec(value)?;
    // What a writer left that was killed.
    let _ = directory.remove_file(&part);
    let written = directory
        .file(&part, Access::New)
        .and_then(|mut file| {
            file.write_all(&text)?;
            if lasts { file.sync_all() } else { Ok(()) }
        })
        .and_then(|()| directory.rename(&part, name))
        .and_then(|()| if lasts { directory.sync() } else { Ok(()) });
    if written.is_err() {
        let _ = directory.remove_file(&part);
    }
    written
}
