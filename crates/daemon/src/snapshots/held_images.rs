//! Images of guests' disks that were made here: who still needs which, and those that are
//! held until a snapshot or a guest names them.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use strata_api::SnapshotId;
use strata_sys::is_locked;

use super::disk::Disk;
use super::lock;

/// Names of one kind that are tried.
const MOST_NAMES: u32 = 1000;

/// Files that were made here. Held ones stay, whether anything stands on them or not.
#[derive(Default)]
struct List {
    made: BTreeSet<PathBuf>,
    held: BTreeSet<PathBuf>,
}

/// The list of them, on disk too.
#[derive(Clone)]
pub(super) struct Made {
    disk: Disk,
    list: Arc<Mutex<List>>,
}

/// Has files stay until this is dropped.
pub(crate) struct Held {
    made: Made,
    files: Vec<PathBuf>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut list = lock(&self.made.list);
        for file in &self.files {
            list.held.remove(file);
        }
    }
}

impl Held {
    /// Notes a file that is about to be made.
    pub(super) fn add(&mut self, file: &Path) -> Result<(), String> {
        let mut list = lock(&self.made.list);
        list.made.insert(file.to_owned());
        self.made.disk.write_made(&list.made)?;
        list.held.insert(file.to_owned());
        self.files.push(file.to_owned());
        Ok(())
    }

    /// A name for a file beside `image` that none has, noted.
    pub(super) fn name(&mut self, image: &str, of: &str) -> Result<String, String> {
        for number in 1..MOST_NAMES {
            let name = match number {
                1 => format!("{image}.{of}"),
                _ => format!("{image}.{of}-{number}"),
            };
            if fs::symlink_metadata(&name).is_err() {
                self.add(Path::new(&name))?;
                return Ok(name);
            }
        }
        Err(format!("there are {MOST_NAMES} files that are called {image}.{of}"))
    }
}

impl Made {
    /// Those that an earlier worker made. What snapshots have that are not understood, and
    /// are left, stays.
    pub(super) fn new(disk: &Disk, left: &[SnapshotId]) -> Self {
        let made = disk.read_made();
        let stays = |file: &&PathBuf| left.iter().any(|id| is_named_after(file, &id.to_string()));
        let held = made.iter().filter(stays).cloned().collect();
        let list = List { made, held };
        Self { disk: disk.clone(), list: Arc::new(Mutex::new(list)) }
    }

    pub(super) fn hold(&self) -> Held {
        Held { made: self.clone(), files: Vec::new() }
    }

    /// Removes those that nothing stands on: none of `needed`, which is asked for when
    /// nobody holds any more or less, and no QEMU, a tenant's or not.
    pub(super) fn sweep(&self, needed: impl FnOnce() -> BTreeSet<PathBuf>) {
        let mut list = lock(&self.list);
        let List { made, held } = &mut *list;
        if made.is_empty() {
            return;
        }
        let needed = needed();
        let before = made.len();
        made.retain(|file| {
            let is_used = || File::open(file).and_then(|file| is_locked(&file)).unwrap_or(false);
            if needed.contains(file) || held.contains(file) || is_used() {
                return true;
            }
            match fs::remove_file(file) {
                Err(error) => error.kind() != io::ErrorKind::NotFound,
                Ok(()) => false,
            }
        });
        if made.len() < before {
            // What is named and not there is found so by the next worker.
            let _ = self.disk.write_made(made);
        }
    }
}

/// Whether a file has a name that [`Held::name`] gives.
fn is_named_after(file: &Path, of: &str) -> bool {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (_, end) = name.rsplit_once(&format!(".{of}")).unwrap_or(("", "none"));
    end.is_empty() || end.strip_prefix('-').is_some_and(|number| number.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nothing_stands_on_goes_and_what_is_held_stays() {
        let place = std::env::temp_dir().join(format!("strata-made-{}", std::process::id()));
        fs::create_dir_all(&place).expect("a directory");
        let image = place.join("image").to_str().expect("text").to_owned();
        let disk = Disk::new(place.join("snapshots"));
        let made = Made::new(&disk, &[]);
        let mut held = made.hold();
        let names: Vec<String> = (0..2)
            .map(|_| {
                let name = held.name(&image, "a@1").expect("a name");
                fs::write(&name, "x").expect("written");
                name
            })
            .collect();
        assert_eq!(names, [format!("{image}.a@1"), format!("{image}.a@1-2")]);
        made.sweep(BTreeSet::new);
        assert!(Path::new(&names[0]).exists());
        drop(held);
        let left = [SnapshotId { tenant: "a".into(), number: 1 }];
        Made::new(&disk, &left).sweep(BTreeSet::new);
        assert!(names.iter().all(|name| Path::new(name).exists()));
        // The next worker's.
        let next = Made::new(&disk, &[SnapshotId { tenant: "a".into(), number: 11 }]);
        next.sweep(|| BTreeSet::from([PathBuf::from(&names[1])]));
        assert!(!Path::new(&names[0]).exists() && Path::new(&names[1]).exists());
        assert_eq!(Made::new(&disk, &[]).disk.read_made().len(), 1);
        fs::remove_dir_all(&place).expect("clean up");
    }
}
