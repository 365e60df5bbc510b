//! From the kernel's first process to a Debian: modules, file systems, and the
//! disk as root. The initramfs stays below, with what is not on the disk.

use anyhow::{Context, Result, bail};
use rustix::{
    mount::{MountFlags, mount, mount_bind, mount_move},
    process::{chdir, chroot},
    system::finit_module,
};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

const DISK: &str = "/dev/vda";
const ROOT: &str = "/disk";
const MODULES: &str = "/modules";
/// Where this binary's neighbours are, before and after.
const STRATA: &str = "/strata";
/// A disk that has not appeared by then will not.
const PATIENCE: Duration = Duration::from_secs(20);

/// Makes the disk this process's root.
pub(super) fn up() -> Result<()> {
    mounted("proc", "/proc")?;
    mounted("sysfs", "/sys")?;
    mounted("devtmpfs", "/dev")?;
    load_modules()?;
    let until = Instant::now() + PATIENCE;
    while !Path::new(DISK).exists() {
        if Instant::now() > until {
            bail!("no {DISK} appears");
        }
        thread::sleep(Duration::from_millis(20));
    }
    fs::create_dir_all(ROOT).context("make the root's place")?;
    mount(DISK, ROOT, "ext4", MountFlags::NOATIME, None)
        .with_context(|| format!("mount {DISK}"))?;
    for kind in ["proc", "sys", "dev"] {
        mount_move(format!("/{kind}"), format!("{ROOT}/{kind}"))
            .with_context(|| format!("move /{kind}"))?;
    }
    if Path::new(STRATA).exists() {
        mount_bind(STRATA, format!("{ROOT}{STRATA}")).context("bring Strata along")?;
    }
    chdir(ROOT).context("go to the root")?;
    mount_move(".", "/").context("move the root")?;
    chroot(".").context("change the root")?;
    chdir("/").context("go to the root")?;
    mounted("tmpfs", "/run")?;
    mounted("tmpfs", "/tmp")?;
    // Strata's backstop; a guest without it is none the worse.
    if mounted("cgroup2", "/sys/fs/cgroup").is_ok() {
        let _ = fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
    }
    Ok(())
}

fn mounted(kind: &str, place: &str) -> Result<()> {
    fs::create_dir_all(place).with_context(|| format!("make {place}"))?;
    mount(kind, place, kind, MountFlags::empty(), None).with_context(|| format!("mount {place}"))
}

/// All that are there, each when those that it needs have been; then forgets them.
fn load_modules() -> Result<()> {
    let mut left: Vec<PathBuf> = fs::read_dir(MODULES)
        .context("list the modules")?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    loop {
        let before = left.len();
        left.retain(|path| {
            let Ok(file) = File::open(path) else { return true };
            finit_module(file, c"", 0).is_err()
        });
        // What is left is for hardware or kernels that are not these.
        if left.is_empty() || left.len() == before {
            break;
        }
    }
    fs::remove_dir_all(MODULES).context("remove the modules")
}

/// The NVDIMM's file system at `/pmem`, with DAX; new each time.
pub(super) fn pmem() -> Result<PathBuf> {
    let place = PathBuf::from("/pmem");
    if !Path::new("/dev/pmem0").exists() {
        bail!("this guest has no NVDIMM");
    }
    // As it is, a namespace is without the pages' records that DAX needs.
    super::servers::tool(
        "ndctl",
        &["create-namespace", "-f", "-e", "namespace0.0", "-m", "fsdax", "-M", "mem"],
    )?;
    super::servers::tool("mkfs.ext4", &["-q", "-b", "4096", "-m", "0", "/dev/pmem0"])?;
    fs::create_dir_all(&place).context("make /pmem")?;
    mount("/dev/pmem0", &place, "ext4", MountFlags::NOATIME, Some(c"dax=always"))
        .context("mount the NVDIMM with DAX")?;
    Ok(place)
}
