//! The other rival's store: zswap in front of a swap file on disk, for as long
//! as the guard lives. All of zswap's parameters are put back afterwards.
//!
//! The file is only what zswap needs behind it: while the pool has room, what
//! compresses is never written there.

use crate::{
    janitor::{Janitor, Registered, Undo, write},
    swap_file,
    zram::Stored,
};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
};

const PARAMETERS: &str = "/sys/module/zswap/parameters";
/// Number of pages that the kernel reads ahead on a swap-in, as a power of two.
const READAHEAD: &str = "/proc/sys/vm/page-cluster";

/// What is set while a trial runs. The pool may take more of the machine than
/// it would by default (20 %): the rival's store must never be full. The
/// shrinker would write what is compressed to the disk.
const SETTINGS: [(&str, &str); 3] =
    [("max_pool_percent", "50"), ("accept_threshold_percent", "90"), ("shrinker_enabled", "N")];
/// As for zram.
const WANTED: &str = "lz4";

/// zswap, switched on. What it changed goes back newest first.
pub(crate) struct Zswap {
    changes: Vec<Registered>,
    compressor: String,
    /// What others had in the pool before.
    before: Stored,
}

impl Zswap {
    /// Makes a swap file and swaps to it through zswap. An error says what is
    /// not permitted, in the kernel's words.
    pub(crate) fn start(janitor: &Janitor, file_bytes: u64) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("setting up swap needs root");
        }
        if !Path::new(PARAMETERS).exists() {
            bail!("this kernel has no zswap ({PARAMETERS} is not there)");
        }
        let before = pool();
        let mut this = Self { changes: Vec::new(), compressor: String::new(), before };
        for (name, value) in SETTINGS {
            let path = Path::new(PARAMETERS).join(name);
            // Older kernels lack the shrinker, and then it does not run.
            if path.exists() {
                this.set(janitor, path, value)?;
            }
        }
        // A kernel without it refuses, or takes its default when the pool is
        // made.
        let compressor = Path::new(PARAMETERS).join("compressor");
        let refused = this.set(janitor, compressor.clone(), WANTED).err();
        // Random reads gain nothing from neighbours, and the rival is to be at
        // its best; a zram device is never read ahead.
        this.set(janitor, READAHEAD.into(), "0")?;
        this.set(janitor, Path::new(PARAMETERS).join("enabled"), "Y")?;
        let taken = read(&compressor)?;
        this.compressor = match refused {
            _ if taken == WANTED => taken,
            Some(error) => format!("{taken} instead of {WANTED} ({error:#})"),
            None => format!("{taken} instead of {WANTED}, which this kernel does not offer it"),
        };
        let file = swap_file::make(janitor, file_bytes, &mut this.changes)?;
        swap_file::swap_on(janitor, &file, &mut this.changes)?;
        Ok(this)
    }

    /// Registers what a parameter is now, then sets it.
    fn set(&mut self, janitor: &Janitor, path: PathBuf, value: &str) -> Result<()> {
        let undo = Undo::WriteBack { path: path.clone(), value: read(&path)? };
        self.changes.push(janitor.register(undo)?);
        write(&path, value)
    }

    /// The compressor that the kernel took, and why if it is not zram's.
    pub(crate) fn compressor(&self) -> &str {
        &self.compressor
    }

    pub(crate) fn stored(&self) -> Stored {
        let now = pool();
        let used_bytes = now.used_bytes.saturating_sub(self.before.used_bytes);
        Stored {
            original_bytes: now.original_bytes.saturating_sub(self.before.original_bytes),
            compressed_bytes: used_bytes,
            used_bytes,
        }
    }

    /// Puts everything back and says whether that worked.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.undo()
    }

    fn undo(&mut self) -> Result<()> {
        swap_file::undo_all(&mut self.changes)
    }
}

impl Drop for Zswap {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            eprintln!("strata-lab: put zswap back: {error:#}");
        }
    }
}

fn read(path: &Path) -> Result<String> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

fn pool() -> Stored {
    parse_pool(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn parse_pool(meminfo: &str) -> Stored {
    let field = |name: &str| {
        meminfo
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_suffix("kB")?.trim().parse().ok())
            .map_or(0, |kib: u64| kib * 1024)
    };
    let used_bytes = field("Zswap:");
    Stored { original_bytes: field("Zswapped:"), compressed_bytes: used_bytes, used_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_told_from_its_contents() {
        let text = "SwapTotal:  0 kB\nZswap:              400 kB\nZswapped:          1000 kB\n";
        let found = parse_pool(text);
        assert_eq!((found.original_bytes, found.used_bytes), (1_024_000, 409_600));
        assert_eq!(parse_pool("MemTotal: 1 kB\n"), Stored::default());
    }
}
