//! Disks of a guest that leave with it: what is said of them, and how they are copied while
//! it runs.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use strata_api::{GuestDisk, MOST_MOVE_DISKS, MoveDisk, MoveWord, Progress, Unit};
use strata_pager::Tenant;
use strata_units::ByteSize;
use strata_vm::disks::{CopyProgress, WrittenDisk};

use super::super::super::Snapshots;
use super::super::super::guest::GuestPart;
use super::super::super::guest_disks::{Image, OwnDisk};
use super::super::{ANSWERED_WITHIN, Wire, still};
use super::aside::Aside;
use super::ways::Open;
use crate::guests::{FarDisk, Mirrored};

/// In the directory of a guest: where the way of a disk begins.
const SOCKET: &str = "strata-disk-";
/// What may be left to be copied when the guest is to stand still.
const LEFT_BYTES: u64 = 4 << 20;
/// A guest that writes has so long to let its copies get so far.
const CAUGHT_UP_WITHIN: Duration = Duration::from_secs(60);
/// How long copies may be no further than they were.
const STALLED_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often the other side is told that it is to wait.
const SAY_EVERY: Duration = Duration::from_secs(5);

/// What goes along.
pub(in super::super) struct Away {
    disks: Vec<Leaves>,
}

struct Leaves {
    own: GuestDisk,
    written: WrittenDisk,
    said: MoveDisk,
    /// It is an overlay there, too.
    is_over: bool,
}

/// Disks that are being copied. Dropped, they are not any more.
pub(in super::super) struct Mirroring<'a> {
    // First: a QEMU that waits for the other side hears that nobody answers.
    open: Open<'a>,
    mirrored: Mirrored,
}

impl Snapshots {
    /// What a guest's disks are, if they can go along.
    pub(in super::super) fn disks_away(&self, tenant: &Arc<Tenant>) -> Result<Away, String> {
        let spec = self.guests.spec(tenant).ok_or("it is no guest, and has no disks to copy")?;
        let directory = spec.launch.as_ref().map_or("/", |launch| &*launch.directory).to_owned();
        let found = self.freezable(tenant, &spec, still::ASKED_WITHIN)?;
        if let Some(own) = found.own.iter().find(|own| own.is_pooled) {
            return Err(format!(
                "its disk {} is read through a pool: put it where both hosts see it, and leave out --copy-disks",
                own.disk.path
            ));
        }
        if found.own.len() > MOST_MOVE_DISKS {
            return Err(format!(
                "it has {} disks, and {MOST_MOVE_DISKS} can be copied: put the others where both hosts see them, and leave out --copy-disks",
                found.own.len()
            ));
        }
        let leaves =
            |(own, written): (&OwnDisk, &WrittenDisk)| Leaves::new(&own.disk, written, &directory);
        let disks = found.own.iter().zip(&found.written).map(leaves).collect::<Result<_, _>>()?;
        Ok(Away { disks })
    }

    /// Begins to copy disks, each by a way of its own, and waits until they are alike.
    pub(in super::super) fn mirror(
        &self,
        tenant: &Arc<Tenant>,
        (away, id): (&Away, &str),
        wire: &mut Wire,
    ) -> Result<Mirroring<'_>, String> {
        let open = self.ways.open(id);
        let directory = self.guests.directory(tenant);
        let mut far = Vec::new();
        for (number, leaves) in away.disks.iter().enumerate() {
            let socket = directory.join(format!("{SOCKET}{number}"));
            self.ways
                .leave(&open, (number as u32, tenant), &socket, wire)
                .map_err(|why| format!("no way for the disk {}: {why}", leaves.own.path))?;
            let way = socket.to_str().ok_or("socket_dir is no text")?.to_owned();
            far.push(FarDisk { disk: &leaves.written, way, is_over: leaves.is_over });
        }
        self.guests.step("ways");
        let mirrored = Mirrored::begin(&self.guests, tenant, &far)?;
        for far in &far {
            // It is connected.
            let _ = fs::remove_file(&far.way);
        }
        self.guests.step("mirroring");
        let mirroring = Mirroring { open, mirrored };
        mirroring.catch_up(wire)?;
        self.guests.step("mirrored");
        Ok(mirroring)
    }
}

impl Mirroring<'_> {
    /// Waits until they are nearly alike.
    pub(in super::super) fn catch_up(&self, wire: &mut Wire) -> Result<(), String> {
        let (mut best, mut since) = (0, Instant::now());
        let (mut ready, mut said) = (None, Instant::now());
        loop {
            let progress = self.mirrored.progress()?;
            if progress.is_ready {
                let since = *ready.get_or_insert_with(Instant::now);
                if left(progress) <= LEFT_BYTES {
                    return Ok(());
                }
                if since.elapsed() > CAUGHT_UP_WITHIN {
                    return Err(format!(
                        "it writes to its disks faster than they are copied, for {CAUGHT_UP_WITHIN:?}: {} are left",
                        ByteSize(left(progress))
                    ));
                }
            }
            if progress.done_bytes > best {
                (best, since) = (progress.done_bytes, Instant::now());
            }
            if since.elapsed() > STALLED_WITHIN {
                return Err(format!(
                    "a disk of it cannot be copied: nothing of it in {STALLED_WITHIN:?}"
                ));
            }
            if said.elapsed() > SAY_EVERY {
                said = Instant::now();
                wire.say(&MoveWord::Copying)?;
            }
            let (done, total) = (progress.done_bytes, Some(progress.total_bytes));
            wire.tell(Progress { what: "copying disks".into(), done, total, unit: Unit::Bytes });
            thread::sleep(LOOK_EVERY);
        }
    }

    /// What went to the other side.
    pub(in super::super) fn sent_bytes(&self) -> u64 {
        self.open.sent_bytes()
    }
}

fn left(progress: CopyProgress) -> u64 {
    progress.total_bytes.saturating_sub(progress.done_bytes)
}

impl Leaves {
    fn new(own: &GuestDisk, written: &WrittenDisk, directory: &str) -> Result<Self, String> {
        let path = &own.path;
        let found = fs::symlink_metadata(path).map_err(|error| format!("{path}: {error}"))?;
        if !found.is_file() {
            return Err(format!(
                "its disk {path} is no file but a link or a device, which is not copied: give the guest the file itself"
            ));
        }
        let size_bytes = if written.format == "raw" { found.len() } else { written.bytes };
        let mut said = MoveDisk {
            path: path.clone(),
            format: written.format.clone(),
            size_bytes,
            used_bytes: found.blocks() * 512,
            mode: found.mode() & 0o777,
            uid: found.uid(),
            gid: found.gid(),
            temporary: own.temporary,
            backing: None,
            layers: Vec::new(),
        };
        if let Some(problem) = said.problem() {
            return Err(format!("its disk {path} cannot be copied: {problem}"));
        }
        // What was made for it here is nowhere else.
        if let Some(backing) = written.backing.clone().filter(|_| !own.temporary) {
            let layer =
                |path: &String| Image::of("/", &joined(directory, path)).map(|one| one.said());
            let layers = written.layers.iter().map(layer).collect::<Result<_, _>>()?;
            let over = MoveDisk { backing: Some(backing), layers, ..said.clone() };
            // Of a name that may mean another file there it is no overlay there.
            said = if over.problem().is_none() { over } else { said };
        }
        Ok(Self { own: own.clone(), written: written.clone(), said, is_over: false })
    }
}

/// As QEMU opens it here, and there: links on the way may lead elsewhere there.
fn joined(directory: &str, path: &str) -> String {
    Path::new(directory).join(path).to_string_lossy().into_owned()
}

impl Away {
    /// Has images made for them.
    pub(in super::super) fn ask(&mut self, wire: &mut Wire) -> Result<(), String> {
        let disks = self.disks.iter().map(|leaves| leaves.said.clone()).collect();
        wire.say(&MoveWord::Disks { disks })?;
        match wire.hear(ANSWERED_WITHIN)? {
            MoveWord::Room { over } if over.len() == self.disks.len() => {
                for (leaves, is_over) in self.disks.iter_mut().zip(over) {
                    leaves.is_over = is_over && leaves.said.backing.is_some();
                }
                Ok(())
            }
            MoveWord::Never { why } => Err(why),
            _ => Err("the other side says what was not asked for".to_owned()),
        }
    }

    pub(in super::super) fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }

    /// What the guest is there: it has its disks under the names of their images, and not
    /// what those are over that are no overlays there.
    pub(in super::super) fn adapt(&self, part: &mut GuestPart) {
        let directory = part.directory().to_owned();
        let mut alone = Vec::new();
        let mut kept = Vec::new();
        for leaves in &self.disks {
            let into = if leaves.is_over { &mut kept } else { &mut alone };
            into.extend(leaves.written.layers.iter().map(|layer| joined(&directory, layer)));
        }
        let stays = |path: &String| -> bool {
            let path = joined(&directory, path);
            !alone.contains(&path) || kept.contains(&path)
        };
        part.files.retain(|image| stays(&image.path));
        for disk in &mut part.spec.disks {
            disk.opened.clone_from(&disk.path);
            disk.needs.retain(&stays);
        }
    }

    /// What of them can be compared when the guest stands still: raw images, as they are.
    pub(in super::super) fn images(
        &self,
        stands_still: bool,
    ) -> Result<BTreeMap<String, Option<Image>>, String> {
        let image = |leaves: &Leaves| {
            let path = &leaves.own.path;
            let is_alike =
                leaves.said.format == "raw" && leaves.said.size_bytes == leaves.written.bytes;
            let image = (stands_still && is_alike).then(|| Image::of("/", path)).transpose()?;
            Ok((path.clone(), image))
        };
        self.disks.iter().map(image).collect()
    }

    /// What is put aside of them: not what goes with the guest here.
    pub(in super::super) fn asides(&self) -> Result<Vec<Aside>, String> {
        let stays = self.disks.iter().filter(|leaves| !leaves.own.temporary);
        stays.map(|leaves| Aside::of(&leaves.own.path)).collect()
    }

    /// What the guest sees of them.
    pub(in super::super) fn bytes(&self) -> u64 {
        self.disks.iter().map(|leaves| leaves.written.bytes).sum()
    }
}
