//! The rival's store: a zram device used as swap, for as long as the guard
//! lives. The machine's own swap and zram devices are not touched: a device of
//! our own is added and removed again.

use crate::janitor::{Janitor, Registered, Undo, run_tool, write};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
};

const CONTROL: &str = "/sys/class/zram-control";

/// Swapping to a zram device. Fields drop in this order: swap off first, then
/// the device is emptied and removed.
pub(crate) struct Zram {
    sysfs: PathBuf,
    device: PathBuf,
    swap: Option<Registered>,
    filled: Option<Registered>,
    added: Option<Registered>,
}

/// What the device holds, from `mm_stat`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Stored {
    pub original_bytes: u64,
    pub compressed_bytes: u64,
    /// Memory that the device costs: compressed data and its fragmentation.
    pub used_bytes: u64,
}

impl Zram {
    /// Adds a device and swaps to it. An error says what is not permitted.
    pub(crate) fn start(janitor: &Janitor, algorithm: &str, disk_bytes: u64) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("setting up swap needs root");
        }
        let (number, added) = pick_device(janitor)?;
        let sysfs = PathBuf::from(format!("/sys/block/zram{number}"));
        let device = PathBuf::from(format!("/dev/zram{number}"));
        let offered = read(&sysfs.join("comp_algorithm"))?;
        let filled = janitor.register(Undo::ZramReset {
            sysfs: sysfs.clone(),
            algorithm: selected(&offered).context("zram names no algorithm")?.to_owned(),
        })?;
        let mut this = Self { sysfs, device, swap: None, filled: Some(filled), added };
        write(&this.sysfs.join("comp_algorithm"), algorithm)
            .with_context(|| format!("zram offers {}", offered.trim()))?;
        write(&this.sysfs.join("disksize"), &disk_bytes.to_string())?;
        if !this.device.exists() {
            bail!("{} does not appear (no udev or devtmpfs here)", this.device.display());
        }
        run_tool("mkswap", &[], &this.device)?;
        this.swap = Some(janitor.register(Undo::SwapOff { device: this.device.clone() })?);
        // Before any other swap: the rival is to use this one.
        run_tool("swapon", &["-p", "32767"], &this.device)?;
        Ok(this)
    }

    pub(crate) fn stored(&self) -> Stored {
        fs::read_to_string(self.sysfs.join("mm_stat"))
            .ok()
            .and_then(|text| parse_mm_stat(&text))
            .unwrap_or_default()
    }

    /// Puts everything back and says whether that worked.
    pub(crate) fn stop(mut self) -> Result<()> {
        for step in [self.swap.take(), self.filled.take(), self.added.take()] {
            step.map_or(Ok(()), Registered::undo)?;
        }
        Ok(())
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        // The order matters, and fields would drop in the order of declaration
        // anyway: this makes it independent of how they are written down.
        drop(self.swap.take());
        drop(self.filled.take());
        drop(self.added.take());
    }
}

fn pick_device(janitor: &Janitor) -> Result<(u32, Option<Registered>)> {
    let add = Path::new(CONTROL).join("hot_add");
    if add.exists() {
        // Reading this file is what adds a device.
        let number = read(&add)?.trim().parse().context("zram's new device has no number")?;
        let added = janitor.register(Undo::ZramRemove { number })?;
        return Ok((number, Some(added)));
    }
    if fs::read_to_string("/sys/block/zram0/disksize").is_ok_and(|size| size.trim() == "0") {
        return Ok((0, None));
    }
    bail!("this kernel has no zram, or its module is not loaded (modprobe zram)")
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

/// `lzo [lz4] zstd` → `lz4`.
fn selected(offered: &str) -> Option<&str> {
    offered.split_whitespace().find_map(|name| name.strip_prefix('[')?.strip_suffix(']'))
}

fn parse_mm_stat(text: &str) -> Option<Stored> {
    let mut fields = text.split_whitespace().map(|field| field.parse().ok());
    let mut next = || fields.next().flatten();
    Some(Stored { original_bytes: next()?, compressed_bytes: next()?, used_bytes: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mm_stat_is_read() {
        let text = "  4096  1575  12288        0    20480        0        0        0        0\n";
        let expected = Stored { original_bytes: 4096, compressed_bytes: 1575, used_bytes: 12_288 };
        assert_eq!(parse_mm_stat(text), Some(expected));
        assert_eq!(parse_mm_stat("4096 x"), None);
    }

    #[test]
    fn the_selected_algorithm_is_found() {
        assert_eq!(selected("lzo-rle lzo [lz4] \n"), Some("lz4"));
        assert_eq!(selected("lzo"), None);
    }
}
