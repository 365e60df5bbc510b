//! Kernel swap on a file of our own, for as long as the guard lives: on the device
//! on which Strata's file tier lies beside it.

use crate::janitor::{Janitor, Registered, Undo, run_tool, write};
use anyhow::{Context, Result, bail};
use rustix::fs::FallocateFlags;
use std::{
    fs::{self, DirBuilder, File},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// Where swap files lie: a disk, where `/tmp` may be memory.
pub(crate) const FILES: &str = "/var/tmp";
const ZSWAP_SWITCH: &str = "/sys/module/zswap/parameters/enabled";

/// Swapping to a file. What was changed goes back newest first.
pub(crate) struct SwapFile {
    changes: Vec<Registered>,
}

impl SwapFile {
    /// Makes a file and swaps to it, not through zswap. An error says what is not
    /// permitted.
    pub(crate) fn start(janitor: &Janitor, file_bytes: u64) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("setting up swap needs root");
        }
        let mut this = Self { changes: Vec::new() };
        let before = fs::read_to_string(ZSWAP_SWITCH).unwrap_or_default();
        if before.starts_with('Y') {
            let undo = Undo::WriteBack { path: ZSWAP_SWITCH.into(), value: "Y".into() };
            this.changes.push(janitor.register(undo)?);
            write(Path::new(ZSWAP_SWITCH), "N")?;
        }
        let file = make(janitor, file_bytes, &mut this.changes)?;
        swap_on(janitor, &file, &mut this.changes)?;
        Ok(this)
    }

    /// Puts everything back and says whether that worked.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.undo()
    }

    fn undo(&mut self) -> Result<()> {
        undo_all(&mut self.changes)
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            eprintln!("strata-lab: put swap back: {error:#}");
        }
    }
}

/// Takes changes back, the newest first; all of them, whatever comes of one.
pub(crate) fn undo_all(changes: &mut Vec<Registered>) -> Result<()> {
    let mut outcome = Ok(());
    while let Some(change) = changes.pop() {
        outcome = outcome.and(change.undo());
    }
    outcome
}

/// Makes a file that can be swapped to.
pub(crate) fn make(
    janitor: &Janitor,
    file_bytes: u64,
    changes: &mut Vec<Registered>,
) -> Result<PathBuf> {
    let directory = directory(janitor, "swap", changes)?;
    let path = directory.join("swap");
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .context("make the swap file")?;
    // Blocks without holes, as swapon demands.
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, file_bytes)
        .with_context(|| format!("reserve {} MiB for a swap file", file_bytes >> 20))?;
    Ok(path)
}

/// Swaps to it, before any other swap there is.
pub(crate) fn swap_on(janitor: &Janitor, file: &Path, changes: &mut Vec<Registered>) -> Result<()> {
    run_tool("mkswap", &[], file)?;
    changes.push(janitor.register(Undo::SwapOff { device: file.to_owned() })?);
    run_tool("swapon", &["-p", "32767"], file)
}

/// A directory of this run on the disk, gone when the change is taken back.
pub(crate) fn directory(
    janitor: &Janitor,
    name: &str,
    changes: &mut Vec<Registered>,
) -> Result<PathBuf> {
    directory_in(janitor, FILES, name, changes)
}

/// The same anywhere else.
pub(crate) fn directory_in(
    janitor: &Janitor,
    place: &str,
    name: &str,
    changes: &mut Vec<Registered>,
) -> Result<PathBuf> {
    let directory = Path::new(place).join(format!("strata-lab-{}-{name}", std::process::id()));
    changes.push(janitor.register(Undo::RemoveFiles { path: directory.clone() })?);
    DirBuilder::new()
        .mode(0o700)
        .create(&directory)
        .with_context(|| format!("make {}", directory.display()))?;
    Ok(directory)
}

/// What the disk of [`FILES`] is, in words.
pub(crate) fn device() -> String {
    let Ok(number) = fs::metadata(FILES).map(|status| status.dev()) else {
        return "an unknown device".to_owned();
    };
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let link = fs::read_link(format!("/sys/dev/block/{major}:{minor}")).unwrap_or_default();
    let name = link.file_name().map(|name| name.to_string_lossy().into_owned());
    let model = ["device/model", "../device/model"]
        .iter()
        .find_map(|file| fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{file}")).ok())
        .unwrap_or_default();
    let kind = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let kind = file_system(&kind, major, minor).unwrap_or("unknown file system");
    let text = format!("{} {} ({kind})", name.unwrap_or_else(|| "device".into()), model.trim());
    text.replace("  ", " ")
}

/// The kind of file system on a device, from `mountinfo`.
fn file_system(mounts: &str, major: u32, minor: u32) -> Option<&str> {
    let device = format!("{major}:{minor}");
    mounts.lines().find_map(|line| {
        let (mount, rest) = line.split_once(" - ")?;
        (mount.split(' ').nth(2)? == device).then(|| rest.split(' ').next())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_are_found_by_their_device() {
        let mounts = "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
                      23 22 0:5 / /proc rw - proc proc rw\n";
        assert_eq!(file_system(mounts, 254, 1), Some("ext4"));
        assert_eq!(file_system(mounts, 254, 2), None);
        assert!(!device().is_empty());
    }
}
