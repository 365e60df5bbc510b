//! What guests are made of on this machine: QEMU, a kernel with its modules, the
//! disk, and the initramfs that brings this program into them.

use super::archive::Archive;
use anyhow::{Context, Result, bail};
use std::{
    env, fs,
    path::{Path, PathBuf},
};

const QEMU: &str = "qemu-system-x86_64";
/// The disk's driver: kernels that were fetched before there were disks lack it.
const DRIVER: &str = "virtio_blk";
/// From which kernel on programs can be managed.
const MANAGES: (u32, u32) = (6, 8);
/// What a guest that manages programs has of Strata, beside this program.
pub(crate) const PROGRAMS: &[&str] = &["strata", "stratad", "libstrata.so"];

/// All of it.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub qemu: PathBuf,
    pub kernel: PathBuf,
    /// What is on it: `scripts/guest-disk.sh`.
    pub disk: PathBuf,
    binaries: PathBuf,
}

impl Site {
    /// Looks for it beside the built programs. What is missing is said with the command
    /// that brings it.
    pub(crate) fn find(binaries: &Path) -> Result<Self> {
        Self::with(binaries, "disk")
    }

    /// The same for guests that have a Strata inside: a kernel with UFFDIO_MOVE.
    pub(crate) fn that_manages(binaries: &Path) -> Result<Self> {
        let site = Self::find(binaries)?;
        let kernel = site.kernel_version();
        if version(&format!("vmlinuz-{kernel}")) < Some(MANAGES) {
            bail!(
                "Linux {kernel} cannot have Strata inside (UFFDIO_MOVE came with 6.8): \
                 scripts/setup.sh disk fetches a newer one where the distribution has it"
            );
        }
        Ok(site)
    }

    /// The same for guests that compile.
    pub(crate) fn that_compiles(binaries: &Path) -> Result<Self> {
        Self::with(binaries, "compile")
    }

    /// With the disk that `scripts/setup.sh KIND` builds.
    fn with(binaries: &Path, kind: &str) -> Result<Self> {
        let missing = |what: &str| missing(what, kind);
        let place = binaries.join("../tests/guest");
        let path = env::var_os("PATH").unwrap_or_default();
        let qemu = env::split_paths(&path)
            .map(|place| place.join(QEMU))
            .find(|program| program.is_file())
            .with_context(|| missing(QEMU))?;
        let kernels = fs::read_dir(&place).into_iter().flatten().filter_map(|entry| {
            let path = entry.ok()?.path();
            let version = version(path.file_name()?.to_str()?)?;
            modules(&path).iter().any(|module| named(module, DRIVER)).then_some((version, path))
        });
        let (_, kernel) = kernels.max().with_context(|| missing("a kernel for guests"))?;
        let disk = place.join(format!("{kind}.img"));
        if !disk.is_file() {
            bail!(missing("the guests' disk"));
        }
        let disk = disk.canonicalize().context("look at the guests' disk")?;
        let kernel = kernel.canonicalize().context("look at the guests' kernel")?;
        Ok(Self { qemu, kernel, disk, binaries: binaries.to_owned() })
    }

    #[cfg(test)]
    pub(super) fn for_tests(place: &Path) -> Self {
        let [qemu, kernel, disk] = [QEMU, "vmlinuz", "disk.img"].map(|name| place.join(name));
        Self { qemu, kernel, disk, binaries: place.to_owned() }
    }

    /// The kernel's version, for captions.
    pub(crate) fn kernel_version(&self) -> String {
        let name = self.kernel.file_name().unwrap_or_default().to_string_lossy();
        name.trim_start_matches("vmlinuz-").to_owned()
    }

    /// This program, the kernel's modules, and these programs of Strata.
    pub(super) fn initramfs(&self, programs: &[&str]) -> Result<Vec<u8>> {
        let mut archive = Archive::default();
        let this = env::current_exe().context("find this program")?;
        archive.program(&this, &format!("/strata/{NAME}"))?;
        for name in programs {
            archive.program(&self.binaries.join(name), &format!("/strata/{name}"))?;
        }
        for module in modules(&self.kernel) {
            archive.module(&module)?;
        }
        Ok(archive.finish())
    }
}

/// What this program is called in a guest.
pub(super) const NAME: &str = "strata-lab";

fn missing(what: &str, kind: &str) -> String {
    format!("{what} is missing: run scripts/setup.sh {kind}")
}

/// `vmlinuz-6.12.1-amd64` → (6, 12).
fn version(name: &str) -> Option<(u32, u32)> {
    let mut numbers = name.strip_prefix("vmlinuz-")?.split(['.', '-']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn named(module: &Path, name: &str) -> bool {
    module
        .file_name()
        .and_then(|file| file.to_str())
        .is_some_and(|file| file.strip_prefix(name).is_some_and(|rest| rest.starts_with(".ko")))
}

/// What scripts/setup.sh unpacked beside a kernel.
fn modules(kernel: &Path) -> Vec<PathBuf> {
    let Some(name) = kernel.file_name().and_then(|name| name.to_str()) else { return Vec::new() };
    let place = kernel.with_file_name(name.replacen("vmlinuz-", "modules-", 1));
    let mut found: Vec<PathBuf> = fs::read_dir(place)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.to_string_lossy();
            name.ends_with(".ko") || name.ends_with(".ko.xz")
        })
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_apart_by_their_numbers() {
        assert_eq!(version("vmlinuz-6.12.117+deb12-amd64"), Some((6, 12)));
        assert_eq!(version("vmlinuz-6.1.0-56-amd64"), Some((6, 1)));
        assert!(version("vmlinuz-6.12.1") > version("vmlinuz-6.1.0-56-amd64"));
        assert_eq!(version("modules-6.1.0"), None);
        assert_eq!(version("vmlinuz-x"), None);
    }

    #[test]
    fn a_driver_is_a_whole_name() {
        assert!(named(Path::new("/x/virtio_blk.ko.xz"), "virtio_blk"));
        assert!(!named(Path::new("/x/virtio_blkx.ko"), "virtio_blk"));
    }

    #[test]
    fn what_is_missing_is_said_with_what_brings_it() {
        let empty = env::temp_dir().join("strata-lab-no-such-place");
        let error = Site::find(&empty).expect_err("nothing is there").to_string();
        assert!(error.contains("scripts/setup.sh disk"), "{error}");
    }
}
