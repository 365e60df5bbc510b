//! The rival's limit: a memory control group of our own, version 1 or 2.
//!
//! A program joins it before it executes, so that every page it touches is
//! charged there. Nothing of the groups that exist is changed.

use crate::janitor::{Janitor, Registered, Undo, write};
use anyhow::{Context, Result, bail};
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

const ZSWAP_SWITCH: &str = "/sys/module/zswap/parameters/enabled";

/// A group with a limit; removed when the guard drops (its processes must have
/// ended by then, or their end is waited for).
pub(crate) struct Group {
    path: PathBuf,
    registered: Option<Registered>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Version {
    One,
    Two,
}

impl Group {
    /// Makes a group of the given name with a limit on resident memory. Where
    /// `through_zswap` is not set, zswap must not stand before the swap device.
    pub(crate) fn create(
        janitor: &Janitor,
        name: &str,
        limit_bytes: u64,
        through_zswap: bool,
    ) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("read the mounts")?;
        let (root, version) =
            memory_root(&mounts).context("no memory control group hierarchy is mounted")?;
        if version == Version::Two {
            let enabled = fs::read_to_string(root.join("cgroup.subtree_control"))
                .context("read cgroup.subtree_control")?;
            if !enabled.split_whitespace().any(|controller| controller == "memory") {
                bail!("the memory controller is not enabled in {}", root.display());
            }
        }
        let path = root.join(name);
        let registered = janitor.register(Undo::RemoveGroup { path: path.clone() })?;
        fs::create_dir(&path)
            .with_context(|| format!("make the control group {}", path.display()))?;
        let group = Self { path, registered: Some(registered) };
        // zswap would keep pages before they reach the zram device, in a pool
        // that no figure here counts.
        let zswap = !through_zswap
            && fs::read_to_string(ZSWAP_SWITCH).is_ok_and(|text| text.starts_with('Y'));
        match version {
            Version::One if zswap => {
                bail!("zswap is on and would hide what zram costs (echo N > {ZSWAP_SWITCH})")
            }
            Version::One => {
                write(&group.path.join("memory.limit_in_bytes"), &limit_bytes.to_string())?;
            }
            Version::Two => {
                if zswap {
                    write(&group.path.join("memory.zswap.max"), "0")?;
                }
                // The hard limit: `memory.high` would put the rival to sleep on
                // top of the reclaim that it does itself.
                write(&group.path.join("memory.max"), &limit_bytes.to_string())?;
            }
        }
        Ok(group)
    }

    /// Put before a command line: joins the group, then becomes the command.
    pub(crate) fn wrapping(&self) -> Vec<OsString> {
        let join = "echo $$ > \"$0\" && exec \"$@\"";
        let procs = self.path.join("cgroup.procs");
        vec!["/bin/sh".into(), "-c".into(), join.into(), procs.into()]
    }

    /// How often the kernel killed a process of the group for its limit.
    pub(crate) fn oom_kills(&self) -> u64 {
        // Version 1, then version 2.
        ["memory.oom_control", "memory.events"]
            .iter()
            .filter_map(|name| fs::read_to_string(self.path.join(name)).ok())
            .find_map(|text| field(&text, "oom_kill"))
            .unwrap_or(0)
    }

    pub(crate) fn remove(mut self) -> Result<()> {
        self.registered.take().map_or(Ok(()), Registered::undo)
    }
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Where groups with the memory controller live. Version 1 wins when both are
/// mounted: the controller is then bound to it.
fn memory_root(mounts: &str) -> Option<(PathBuf, Version)> {
    let found = |kind: &str, option: Option<&str>| {
        mounts.lines().find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, path, this_kind, options, ..] = fields[..] else { return None };
            let fits = this_kind == kind
                && option.is_none_or(|option| options.split(',').any(|one| one == option));
            fits.then(|| Path::new(path).to_owned())
        })
    };
    found("cgroup", Some("memory"))
        .map(|path| (path, Version::One))
        .or_else(|| found("cgroup2", None).map(|path| (path, Version::Two)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_hierarchy_is_found() {
        let hybrid = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                      cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n";
        assert_eq!(memory_root(hybrid), Some(("/sys/fs/cgroup/memory".into(), Version::One)));
        let unified = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";
        assert_eq!(memory_root(unified), Some(("/sys/fs/cgroup".into(), Version::Two)));
        assert_eq!(memory_root("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn fields_are_told_apart() {
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        assert_eq!(field(text, "oom_kill"), Some(3));
        assert_eq!(field(text, "oom"), None);
    }
}
