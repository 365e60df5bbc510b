//! Whether the directories of a daemon are its own: what it makes, opens and removes
//! there is found by its name, and whoever could put something else in a name's place
//! would have root read, write or run that.

use std::io::ErrorKind;
use std::path::Path;

use strata_sys::{Directory, who_may_replace};

use crate::config::Config;

/// Refuses directories that somebody else may write to, or replace. Those that are to
/// be made yet are looked at where they will be.
///
/// # Errors
/// Which, who may, and what to do.
pub(crate) fn check(config: &Config) -> anyhow::Result<()> {
    let tier = config.tier_path.as_deref().map(|path| ("tier_path", path));
    let others =
        [("socket_dir", config.socket_dir.as_path()), ("snapshot_dir", &config.snapshot_dir)];
    for (key, path) in others.into_iter().chain(tier) {
        if let Some(why) = problem(path) {
            anyhow::bail!(
                "{key}: {why}; have it and the directories above it belong to root, and nobody else write to them (chown, chmod go-w), or name another"
            );
        }
    }
    Ok(())
}

/// Why `path` is not to be used; none: it may be.
fn problem(path: &Path) -> Option<String> {
    let there = path.ancestors().find(|place| place.symlink_metadata().is_ok())?;
    let opened = if there == path { Directory::open_private(path) } else { Directory::open(there) };
    match opened.and_then(|_| who_may_replace(path)) {
        Ok(None) => None,
        Ok(Some(who)) => Some(format!("{who}, and so could replace {}", path.display())),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Some(error.to_string()),
        // What is made or opened there says what is wrong.
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn directories_of_others_are_refused_and_ones_own_are_not() {
        let place = std::env::temp_dir().join(format!("strata-places-{}", std::process::id()));
        fs::create_dir(&place).expect("a directory");
        let make = |name: &str, mode| {
            fs::create_dir(place.join(name)).expect("a directory");
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(place.join(name), mode).expect("a mode");
        };
        make("ours", 0o755);
        make("anybodys", 0o777);
        make("shared", 0o1777);
        symlink("../ours", place.join("anybodys/link")).expect("a link");
        symlink("ours", place.join("link")).expect("a link");
        for (name, word) in [
            ("ours", None),
            ("ours/new/below", None),
            ("link", None),
            ("shared/new", None),
            ("anybodys", Some("others may write to")),
            ("anybodys/new", Some("others may write to")),
            ("shared", Some("others may write to")),
            ("anybodys/link", Some("symbolic link")),
            ("anybodys/link/new", Some("symbolic link")),
        ] {
            let found = problem(&place.join(name));
            let is_right = match word {
                Some(word) => found.as_ref().is_some_and(|why| why.contains(word)),
                None => found.is_none(),
            };
            assert!(is_right, "{name}: {found:?}");
        }
        make("anybodys/below", 0o700);
        assert!(problem(&place.join("anybodys/below")).is_some_and(|why| why.contains("replace")));
        fs::remove_dir_all(&place).expect("removed");
    }
}
