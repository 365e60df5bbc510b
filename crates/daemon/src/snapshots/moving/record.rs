//! What of moves outlives a worker: which tenant was given up here, and what was decided
//! of those that came.
//!
//! ```text
//! moves/out-NAME.json    given up here, or about to be
//! moves/in-ID.json       decided here
//! moves/disks-ID.json    images that were made here for a guest's disks
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use strata_api::SnapshotId;
use strata_sys::{Priority, log};
use strata_units::SpaceId;

use super::super::disk::Disk;
use super::super::lock;
use super::disks::{Aside, Room};
use super::lending::Pages;
use super::lent::Lent;

/// A tenant that was given up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct Out {
    pub(super) id: String,
    /// Where it went, for messages.
    pub(super) host: String,
    /// The tenant of that name that it was (see `lineage.rs`).
    pub(in super::super) life: u64,
    /// `go` may have been said: it does not run here any more unless it never runs there.
    /// Else it is only about to be given up.
    pub(super) is_given: bool,
    /// Its images, which are put aside once it is given up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) asides: Vec<Aside>,
    /// Pages that it does not have there yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lent: Option<Lent>,
}

impl Out {
    /// Gives its images their names back: what is to be known of one that has another one
    /// still. The guest has it open, and needs none.
    pub(super) fn put_back(&self) -> String {
        let failed = self.asides.iter().filter_map(|aside| aside.put_back().err());
        failed.fold(String::new(), |note, why| {
            log(Priority::Error, &why);
            format!("{note}; {why}")
        })
    }

    /// What is to be known of images that are left here.
    pub(super) fn note(&self) -> String {
        let images: Vec<&str> = self.asides.iter().map(|aside| &*aside.aside).collect();
        match images[..] {
            [] => String::new(),
            _ => {
                format!("; what its disks were is here still, and nobody's: {}", images.join(", "))
            }
        }
    }
}

/// What was decided of a tenant that came.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Decided {
    /// It is to run here, from this snapshot, and has not run yet.
    Committed(SnapshotId),
    /// It was let run, or is just about to be: nobody else may, whatever comes of it here.
    LetRun(SnapshotId),
    /// It ran.
    Ran,
    /// It never runs here.
    Never(String),
}

impl Decided {
    /// Whether that is still to be known when this machine has gone down. What has not run yet
    /// is gone then, and is the other side's; and what ran was let run before.
    const fn lasts(&self) -> bool {
        matches!(self, Self::LetRun(_) | Self::Never(_))
    }
}

/// The records. Whoever decides holds the lock.
#[derive(Clone)]
pub(in super::super) struct Moves {
    disk: Disk,
    deciding: Arc<Mutex<()>>,
    /// What this worker lends, by the numbers of moves.
    pub(super) lent: Arc<Mutex<BTreeMap<String, Arc<Mutex<Pages>>>>>,
}

fn out(name: &str) -> String {
    format!("out-{name}.json")
}

fn into(id: &str) -> String {
    format!("in-{id}.json")
}

fn room(id: &str) -> String {
    format!("disks-{id}.json")
}

impl Moves {
    pub(in super::super) fn new(disk: &Disk) -> Self {
        Self { disk: disk.clone(), deciding: Arc::default(), lent: Arc::default() }
    }

    /// What is known of a tenant that is on its way from here.
    pub(in super::super) fn out(&self, name: &str) -> Option<Out> {
        self.disk.read_move(&out(name))
    }

    /// All of them, by name.
    pub(in super::super) fn all_out(&self) -> Vec<(String, Out)> {
        let named = |file: String| {
            let name = file.strip_prefix("out-")?.strip_suffix(".json")?.to_owned();
            Some((name, self.disk.read_move(&file)?))
        };
        self.disk.moves().into_iter().filter_map(named).collect()
    }

    pub(super) fn write_out(&self, name: &str, record: &Out) -> Result<(), String> {
        let _deciding = lock(&self.deciding);
        // What it says of a tenant ends with this machine, not what it says of images.
        self.disk.write_move(&out(name), record, !record.asides.is_empty())
    }

    pub(in super::super) fn forget_out(&self, name: &str) -> Result<(), String> {
        let _deciding = lock(&self.deciding);
        self.disk.remove_move(&out(name))
    }

    /// What is lent by this move is whole in a snapshot's memory.
    pub(super) fn is_captured(&self, name: &str, id: &str, memories: &[SpaceId]) {
        let _deciding = lock(&self.deciding);
        let record = self.disk.read_move::<Out>(&out(name)).filter(|record| record.id == id);
        let Some(mut record) = record else { return };
        let Some(lent) = &mut record.lent else { return };
        lent.is_captured(memories);
        if let Err(why) = self.disk.write_move(&out(name), &record, false) {
            // Then the next worker captures it anew.
            log(Priority::Error, format_args!("{name}: {why}"));
        }
    }

    /// Whether the pager's memory of this number is lent to a tenant that was given up.
    pub(in super::super) fn lends(&self, tenant: &str, memory: SpaceId) -> bool {
        self.out(tenant).and_then(|out| out.lent).is_some_and(|lent| lent.is_in(memory))
    }

    /// Whether a snapshot that came by a move is needed still.
    pub(in super::super) fn needs(&self, coming: &str, snapshot: &SnapshotId) -> bool {
        matches!(self.decided(coming), Some(Decided::Committed(of)) if of == *snapshot)
    }

    pub(super) fn decided(&self, id: &str) -> Option<Decided> {
        self.disk.read_move(&into(id))
    }

    /// Decides, if nothing was decided yet; what is decided now.
    pub(super) fn decide(&self, id: &str, wanted: Decided) -> Result<Decided, String> {
        let _deciding = lock(&self.deciding);
        match self.decided(id) {
            Some(decided) => Ok(decided),
            None => self.disk.write_move(&into(id), &wanted, wanted.lasts()).map(|()| wanted),
        }
    }

    /// What was committed came to this.
    pub(super) fn came_to(&self, id: &str, end: &Decided) -> Result<(), String> {
        let _deciding = lock(&self.deciding);
        self.disk.write_move(&into(id), end, end.lasts())
    }

    /// Images that were made for a guest's disks.
    pub(super) fn room(&self, id: &str) -> Option<Room> {
        self.disk.read_move(&room(id))
    }

    /// The moves that there are such of.
    pub(super) fn all_rooms(&self) -> Vec<String> {
        let id = |file: String| {
            let id = file.strip_prefix("disks-")?.strip_suffix(".json")?.to_owned();
            is_id(&id).then_some(id)
        };
        self.disk.moves().into_iter().filter_map(id).collect()
    }

    pub(super) fn write_room(&self, id: &str, images: &Room) -> Result<(), String> {
        self.disk.write_move(&room(id), images, true)
    }

    pub(super) fn forget_room(&self, id: &str) -> Result<(), String> {
        self.disk.remove_move_for_good(&room(id))
    }

    pub(super) fn forget_in(&self, id: &str) {
        // What stays is a few bytes.
        let _ = self.disk.remove_move(&into(id));
    }
}

/// Whether `id` is one of a move: a name of a file here, as it comes from elsewhere.
pub(super) fn is_id(id: &str) -> bool {
    id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}
