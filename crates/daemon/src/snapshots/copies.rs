//! Directories that a clone has copies of, and what is left of those.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::disk::Place;
use super::{Snapshots, lock};

impl Snapshots {
    /// Removes what clones that have ended had for themselves, and nobody has
    /// since.
    pub(crate) fn remove_copies(&self) {
        self.sweep_disks();
        for name in self.disk.copied() {
            if !self.is_there(&name) && !self.is_shown(&name) {
                // What cannot be removed now is tried again when the next tenant ends.
                let _ = std::fs::remove_dir_all(self.disk.copies(&name));
            }
        }
    }

    /// Whether a tenant is there, or begins.
    fn is_there(&self, name: &str) -> bool {
        self.own_tenant(name).is_some() || lock(&self.busy).contains(name)
    }

    /// Whether others see its copies: clones of it, or what a snapshot brings back.
    fn is_shown(&self, name: &str) -> bool {
        let copies = self.disk.copies(name);
        let sees = |place: &Option<Place>| {
            place.iter().any(|place| place.shown.iter().any(|(copy, _)| copy.starts_with(&copies)))
        };
        lock(&self.known).values().any(|known| sees(&known.place))
            || self.tenants.list().iter().any(|tenant| sees(&self.line_of(tenant).place))
    }
}

/// What a clone gets copies of: these directories, and what is shown below them.
pub(super) fn to_copy(wanted: &[String], seen: &[(PathBuf, PathBuf)]) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = wanted.iter().map(PathBuf::from).collect();
    for (_, path) in seen {
        if !all.contains(path) && all.iter().any(|wanted| path.starts_with(wanted)) {
            all.push(path.clone());
        }
    }
    all
}

/// Where `path` lies for whoever is shown nothing elsewhere.
pub(super) fn really(path: &Path, seen: &[(PathBuf, PathBuf)]) -> PathBuf {
    let around = seen.iter().filter(|(_, shown)| path.starts_with(shown));
    let innermost = around.max_by_key(|(_, shown)| shown.components().count());
    let below = innermost.and_then(|(copy, shown)| Some((copy, path.strip_prefix(shown).ok()?)));
    match below {
        Some((copy, rest)) if rest.as_os_str().is_empty() => copy.clone(),
        Some((copy, rest)) => copy.join(rest),
        None => path.to_owned(),
    }
}

/// Copies a directory, with owners and times.
pub(super) fn copy_directory(from: &Path, to: &Path) -> Result<(), String> {
    let failed = |why: String| format!("cannot copy {}: {why}", from.display());
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(to)
        .map_err(|error| failed(error.to_string()))?;
    let output = Command::new("cp")
        .args(["-a", "--reflink=auto", "--"])
        .arg(from.join("."))
        .arg(to)
        .output()
        .map_err(|error| failed(format!("cp does not start: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(failed(said.lines().next().unwrap_or("cp failed").to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_of_a_clone_copies_what_that_one_sees() {
        let seen: Vec<(PathBuf, PathBuf)> =
            [("/copies/a/0", "/srv/db"), ("/copies/a/1", "/srv/db/log")]
                .map(|(copy, path)| (copy.into(), path.into()))
                .into();
        for (path, place) in [
            ("/srv/db", "/copies/a/0"),
            ("/srv/db/data", "/copies/a/0/data"),
            ("/srv/db/log", "/copies/a/1"),
            ("/srv/db/log/old", "/copies/a/1/old"),
            ("/srv/dbs", "/srv/dbs"),
            ("/srv", "/srv"),
        ] {
            assert_eq!(really(Path::new(path), &seen), Path::new(place), "{path}");
        }
        let copied = |path: &str| to_copy(&[path.to_owned()], &seen);
        assert_eq!(copied("/srv/db"), ["/srv/db", "/srv/db/log"].map(PathBuf::from));
        assert_eq!(copied("/srv/db/log"), ["/srv/db/log"].map(PathBuf::from));
        assert_eq!(copied("/var"), ["/var"].map(PathBuf::from));
    }
}
