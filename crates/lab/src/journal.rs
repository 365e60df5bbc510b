//! What a janitor has still to undo, on file. Whoever kills a whole session kills
//! the janitor, too; then the next lab does its work.
//!
//! A file for each janitor, named after it and replaced whole, in a directory that
//! only its owner can write to. It counts for the boot that it was written in.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use crate::{janitor::Undo, process};

/// One change, and the disk that it was made to: another can have its name by the
/// time that it is undone.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Change {
    undo: Undo,
    disk: Option<u64>,
}

/// The file of a janitor; oldest change first.
#[derive(Debug, Serialize, Deserialize)]
struct Page {
    boot: String,
    pid: u32,
    start_ticks: u64,
    changes: Vec<Change>,
}

/// Where a janitor writes.
pub(crate) struct Journal {
    directory: PathBuf,
    page: Page,
}

/// The directory of all of them; an error where nobody could be kept from writing
/// there.
pub(crate) fn directory() -> Result<PathBuf> {
    let own = rustix::process::geteuid();
    let base = match own.is_root() {
        true => PathBuf::from("/run"),
        false => std::env::var_os("XDG_RUNTIME_DIR").context("no XDG_RUNTIME_DIR")?.into(),
    };
    let directory = base.join("strata-lab");
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory)
        .with_context(|| format!("make {}", directory.display()))?;
    let status = fs::symlink_metadata(&directory)?;
    if !status.is_dir() || status.uid() != own.as_raw() || status.mode() & 0o022 != 0 {
        bail!("others can write to {}", directory.display());
    }
    Ok(directory)
}

fn boot() -> Result<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("read the boot's id")?;
    Ok(id.trim().to_owned())
}

/// A number that no other disk has had since the machine started.
fn disk_of(undo: &Undo) -> Option<u64> {
    let name = match undo {
        Undo::SwapOff { device } => device.file_name()?.to_str()?.to_owned(),
        Undo::ZramReset { sysfs, .. } => sysfs.file_name()?.to_str()?.to_owned(),
        Undo::ZramRemove { number } => format!("zram{number}"),
        _ => return None,
    };
    fs::read_to_string(format!("/sys/block/{name}/diskseq")).ok()?.trim().parse().ok()
}

impl Journal {
    /// That of this process.
    pub(crate) fn open(directory: PathBuf) -> Result<Self> {
        let pid = std::process::id();
        let start_ticks = process::times(pid).context("this process")?.start_ticks;
        let page = Page { boot: boot()?, pid, start_ticks, changes: Vec::new() };
        Ok(Self { directory, page })
    }

    /// What is registered now, oldest first.
    pub(crate) fn write<'a>(&mut self, registered: impl Iterator<Item = &'a Undo>) -> Result<()> {
        self.page.changes =
            registered.map(|undo| Change { undo: undo.clone(), disk: disk_of(undo) }).collect();
        let path = self.directory.join(format!("{}.json", self.page.pid));
        if self.page.changes.is_empty() {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
                _ => Ok(()),
            };
        }
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec(&self.page)?)?;
        fs::rename(&new, &path).with_context(|| format!("write {}", path.display()))
    }
}

/// Undoes what dead janitors have left; how many changes that were.
pub(crate) fn take_over(directory: &Path) -> Result<usize> {
    let (mut undone, boot) = (0, boot()?);
    for entry in fs::read_dir(directory).context("read the journals")?.flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let Ok(bytes) = fs::read(&path) else { continue };
        let page: Page = match serde_json::from_slice(&bytes) {
            Ok(page) => page,
            Err(error) => {
                eprintln!("strata-lab: {} is passed over: {error}", path.display());
                continue;
            }
        };
        let lives = process::times(page.pid)
            .is_some_and(|times| times.start_ticks == page.start_ticks)
            && !process::is_zombie(page.pid);
        if page.boot == boot && lives {
            continue;
        }
        // Whoever renames it does it.
        let mine = path.with_extension(format!("taken-{}", std::process::id()));
        if fs::rename(&path, &mine).is_err() {
            continue;
        }
        let holds = |change: &&Change| change.disk == disk_of(&change.undo);
        for change in page.changes.iter().rev().filter(|_| page.boot == boot).filter(holds) {
            match change.undo.perform() {
                Ok(()) => undone += 1,
                Err(error) => eprintln!("strata-lab: clean up after a killed one: {error:#}"),
            }
        }
        fs::remove_file(&mine)?;
    }
    Ok(undone)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> PathBuf {
        let path =
            std::env::temp_dir().join(format!("strata-lab-journal-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("made/below")).expect("made");
        path
    }

    fn journal(at: &Path) -> Journal {
        let mut journal = Journal::open(at.to_owned()).expect("this process");
        journal.write([Undo::RemoveFiles { path: at.join("made") }].iter()).expect("written");
        journal
    }

    /// As if its janitor had been killed, or lived before the machine started anew.
    fn change(at: &Path, change: impl Fn(&mut Page)) {
        let path = at.join(format!("{}.json", std::process::id()));
        let mut page: Page =
            serde_json::from_slice(&fs::read(&path).expect("written")).expect("a page");
        change(&mut page);
        fs::write(&path, serde_json::to_vec(&page).expect("encodes")).expect("written");
    }

    #[test]
    fn what_a_killed_janitor_left_is_undone_once() {
        let at = place("killed");
        let _journal = journal(&at);
        assert_eq!(take_over(&at).expect("read"), 0, "it lives");
        assert!(at.join("made").exists());
        change(&at, |page| page.start_ticks += 1);
        assert_eq!(take_over(&at).expect("read"), 1);
        assert!(!at.join("made").exists());
        assert_eq!(take_over(&at).expect("read"), 0);
        assert_eq!(fs::read_dir(&at).expect("there").count(), 0, "nothing is left of it");
        fs::remove_dir_all(&at).expect("removed");
    }

    #[test]
    fn another_boot_and_another_disk_are_left_alone() {
        for of_boot in [true, false] {
            let at = place("other");
            let _journal = journal(&at);
            change(&at, |page| {
                page.start_ticks += 1;
                match of_boot {
                    true => page.boot += "x",
                    false => page.changes[0].disk = Some(1),
                }
            });
            assert_eq!(take_over(&at).expect("read"), 0);
            assert!(at.join("made").exists());
            fs::remove_dir_all(&at).expect("removed");
        }
    }

    #[test]
    fn a_janitor_with_nothing_to_do_has_no_file() {
        let at = place("empty");
        let mut journal = journal(&at);
        assert_eq!(fs::read_dir(&at).expect("there").count(), 2);
        journal.write([].iter()).expect("removed");
        journal.write([].iter()).expect("nothing to remove");
        assert_eq!(fs::read_dir(&at).expect("there").count(), 1);
        fs::write(at.join("7.json"), "half a pa").expect("written");
        assert_eq!(take_over(&at).expect("passed over"), 0);
        fs::remove_dir_all(&at).expect("removed");
    }
}
