//! Copies of a guest's disks for a snapshot, all of the moment in which it stands still:
//! made by the file system where that can share content between files, else by the guest's
//! own QEMU while it runs. The guest writes to its own images as before.

use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use strata_sys::reflink;
use strata_vm::Monitor;
use strata_vm::disks::{self, WrittenDisk};

/// How long `qemu-img` may take: it makes small files.
const TOOL_WITHIN: Duration = Duration::from_secs(20);
const TOOL_POLL: Duration = Duration::from_millis(2);
/// Bytes of what it says that are read.
const MAX_SAID_BYTES: u64 = 4096;
/// What one question about copies may take.
pub(super) const ASKED_WITHIN: Duration = Duration::from_secs(5);
/// What may be left to be copied in the moment in which the guest stands still.
const LEFT_BYTES: u64 = 4 << 20;
/// A guest that writes has so long to let its copies get so far.
const CAUGHT_UP_WITHIN: Duration = Duration::from_secs(60);
/// How long copies may be no further than they were.
const STALLED_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long the last of it may take, while the guest stands still.
pub(super) const ENDED_WITHIN: Duration = Duration::from_secs(10);
/// Nobody writes to a copy that is whole.
const READ_ONLY: u32 = 0o400;

/// A copy of one disk.
pub(crate) struct DiskCopy {
    pub(crate) disk: WrittenDisk,
    /// The image that the guest writes to.
    pub(crate) image: PathBuf,
    /// The copy of it.
    pub(crate) path: PathBuf,
    by: By,
}

enum By {
    /// The file system: the image, and the copy.
    Reflink(File, File),
    /// QEMU.
    Mirror,
}

impl DiskCopy {
    /// An empty copy at `path`, where nothing is yet.
    pub(crate) fn new(disk: WrittenDisk, image: PathBuf, path: PathBuf) -> Result<Self, String> {
        let by = begin(&disk, &image, &path)?;
        Ok(Self { disk, image, path, by })
    }

    /// The same once more.
    fn renew(&mut self) -> Result<(), String> {
        fs::remove_file(&self.path).map_err(|error| failed(&self.path, &error))?;
        self.by = begin(&self.disk, &self.image, &self.path)?;
        Ok(())
    }
}

fn begin(disk: &WrittenDisk, image: &Path, path: &Path) -> Result<By, String> {
    let text = path.to_str().ok_or_else(|| format!("{} is no text", path.display()))?;
    let from = File::open(image).map_err(|error| failed(image, &error))?;
    let mut options = File::options();
    let to = options.read(true).write(true).create_new(true).mode(0o600).open(path).map_err(
        |error| format!("the copy of a disk is made beside it, and {}", failed(path, &error)),
    )?;
    // QEMU writes it, as whom it writes the image.
    if let Ok(owner) = from.metadata() {
        let _ = fchown(&to, Some(owner.uid()), Some(owner.gid()));
    }
    // What is on the device by now need not go there while the guest stands still.
    let _ = from.sync_data();
    if reflink(&from, &to).is_ok() {
        return Ok(By::Reflink(from, to));
    }
    match disk.format.as_str() {
        "raw" => to.set_len(disk.bytes).map_err(|error| failed(path, &error))?,
        _ => {
            let backing = disk.backing.as_ref().map(|(path, format)| (&**path, &**format));
            create_image(text, backing, Some(disk.bytes))?;
        }
    }
    Ok(By::Mirror)
}

fn failed(path: &Path, error: &std::io::Error) -> String {
    format!("{} cannot be used: {error}", path.display())
}

/// Makes a qcow2 image; of `backing`, an image and its format, an overlay.
pub(crate) fn create_image(
    path: &str,
    backing: Option<(&str, &str)>,
    bytes: Option<u64>,
) -> Result<(), String> {
    let mut words = vec!["create".to_owned(), "-q".into(), "-f".into(), "qcow2".into()];
    if let Some((backing, format)) = backing {
        words.extend(["-b".into(), backing.into(), "-F".into(), format.into()]);
    }
    words.push(format!("file:{path}"));
    words.extend(bytes.map(|bytes| bytes.to_string()));
    tool(&words)
}

/// The same of an overlay whose image is not looked at.
pub(crate) fn create_image_over(
    path: &str,
    backing: Option<(&str, &str)>,
    bytes: u64,
) -> Result<(), String> {
    let mut words =
        vec!["create".to_owned(), "-q".into(), "-u".into(), "-f".into(), "qcow2".into()];
    if let Some((backing, format)) = backing {
        words.extend(["-b".into(), backing.into(), "-F".into(), format.into()]);
    }
    words.extend([format!("file:{path}"), bytes.to_string()]);
    tool(&words)
}

/// Runs `qemu-img`.
fn tool(words: &[String]) -> Result<(), String> {
    let failed = |why: String| format!("qemu-img {}: {why}", words[0]);
    let mut child = Command::new("qemu-img")
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(format!("{error} (it comes with QEMU)")))?;
    let until = Instant::now() + TOOL_WITHIN;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < until => std::thread::sleep(TOOL_POLL),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(format!("it does not end within {TOOL_WITHIN:?}")));
            }
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut said = Vec::new();
    if let Some(errors) = child.stderr.take() {
        let _ = errors.take(MAX_SAID_BYTES).read_to_end(&mut said);
    }
    let said = String::from_utf8_lossy(&said);
    let line = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no reason");
    Err(failed(line.chars().filter(|c| !c.is_control()).collect()))
}

/// Has all copies be nearly as their disks are, and stay so while the guest runs.
pub(super) fn copy(
    monitor: &mut Monitor,
    copies: &[DiskCopy],
    tell: &mut dyn FnMut(u64, u64),
    step: &dyn Fn(&str),
) -> Result<(), String> {
    let mirrored = copies.iter().filter(|copy| matches!(copy.by, By::Mirror));
    for (number, copy) in mirrored.enumerate() {
        monitor.allow(ASKED_WITHIN);
        let path = copy.path.to_str().ok_or("its path is no text")?;
        disks::begin(monitor, number, &copy.disk, path).map_err(|error| error.to_string())?;
    }
    step("copying");
    let (mut best, mut since) = (0, Instant::now());
    let mut ready = None;
    loop {
        monitor.allow(ASKED_WITHIN);
        let progress = disks::progress(monitor).map_err(|error| error.to_string())?;
        if progress.is_ready {
            let since = *ready.get_or_insert_with(Instant::now);
            if progress.total_bytes.saturating_sub(progress.done_bytes) <= LEFT_BYTES {
                step("copied");
                return Ok(());
            }
            if since.elapsed() > CAUGHT_UP_WITHIN {
                return Err(format!(
                    "it writes to its disks faster than they are copied, for {CAUGHT_UP_WITHIN:?}"
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
        tell(progress.done_bytes, progress.total_bytes);
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Ends QEMU's copies: the guest stands still.
pub(super) fn finish(monitor: &mut Monitor, copies: &[DiskCopy]) -> Result<(), String> {
    if !copies.iter().any(|copy| matches!(copy.by, By::Mirror)) {
        return Ok(());
    }
    monitor.allow(ENDED_WITHIN);
    disks::finish(monitor).map_err(|error| error.to_string())
}

/// Makes the file system's copies: the guest stands still, and its QEMU has written all.
pub(super) fn share(copies: &[DiskCopy]) -> Result<(), String> {
    for copy in copies {
        if let By::Reflink(from, to) = &copy.by {
            to.set_len(0)
                .and_then(|()| reflink(from, to))
                .map_err(|error| failed(&copy.path, &error))?;
        }
    }
    Ok(())
}

/// Empties the copies, for another attempt.
pub(super) fn renew(copies: &mut [DiskCopy]) -> Result<(), String> {
    copies.iter_mut().try_for_each(DiskCopy::renew)
}

/// Has QEMU let go of all copies.
pub(super) fn clean(monitor: &mut Monitor) -> Result<(), String> {
    monitor.allow(ENDED_WITHIN);
    disks::clean(monitor).map_err(|error| error.to_string())
}

/// Has whole copies on the device; nobody writes to them from now on.
pub(crate) fn keep(copies: &[DiskCopy]) -> Result<(), String> {
    for copy in copies {
        File::open(&copy.path)
            .and_then(|file| {
                file.sync_all()?;
                file.set_permissions(Permissions::from_mode(READ_ONLY))
            })
            .map_err(|error| failed(&copy.path, &error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_img_fails_in_a_sentence() {
        let why = create_image("/no/such/directory/x", None, Some(1 << 20)).expect_err("no place");
        assert!(why.starts_with("qemu-img create: "), "{why}");
        assert!(!why.contains('\n'), "{why}");
    }
}
