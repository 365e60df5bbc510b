//! Where things are: control sockets, private daemons' directories, and the
//! files that are installed beside the strata binary.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use strata_api::{
    CONTROL_SOCKET_NAME, DEFAULT_SOCKET, ENV_CONTROL_SOCKET, MARK_NAME, MOST_MARK_BYTES, Mark,
    PRIVATE_DIRECTORY_PREFIX, PRIVATE_SNAPSHOTS_NAME,
};

use crate::failure::{Failure, Result};

/// The caller's effective user id.
pub(crate) fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The socket that the environment names; then no other is looked for.
pub(crate) fn named_socket() -> Option<PathBuf> {
    std::env::var_os(ENV_CONTROL_SOCKET).filter(|name| !name.is_empty()).map(PathBuf::from)
}

/// Control sockets to ask, in order: the one that the environment names, or else
/// the system's and those of the caller's private daemons. Not all need be alive.
pub(crate) fn control_sockets() -> Vec<PathBuf> {
    if let Some(socket) = named_socket() {
        return vec![socket];
    }
    let mut sockets = vec![PathBuf::from(DEFAULT_SOCKET)];
    for base in private_bases() {
        sockets.extend(private_sockets(&base, uid()));
    }
    sockets
}

/// Where private daemons' directories may be: the user's runtime directory and,
/// for root (who has none in many containers), `/run`.
fn private_bases() -> Vec<PathBuf> {
    let uid = uid();
    let mut bases = Vec::new();
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let usual = PathBuf::from(format!("/run/user/{uid}"));
    // With `sudo -E` the variable names somebody else's directory.
    for base in named.into_iter().chain([usual, "/run".into()]) {
        if base.is_absolute() && is_own_directory(&base, uid) && !bases.contains(&base) {
            bases.push(base);
        }
    }
    bases
}

/// A directory that belongs to `uid` and that nobody else may write to: what is
/// in there was put there by `uid`.
fn is_own_directory(path: &Path, uid: u32) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| {
        metadata.is_dir() && metadata.uid() == uid && metadata.mode() & 0o022 == 0
    })
}

/// Sockets of the private daemons of `uid` under `base`, in order of name.
fn private_sockets(base: &Path, uid: u32) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(base).into_iter().flatten().flatten();
    let mut sockets: Vec<PathBuf> = entries
        .filter(|entry| {
            entry.file_name().as_encoded_bytes().starts_with(PRIVATE_DIRECTORY_PREFIX.as_bytes())
        })
        .map(|entry| entry.path())
        .filter(|directory| is_own_directory(directory, uid))
        .map(|directory| directory.join(CONTROL_SOCKET_NAME))
        .filter(|socket| socket.exists())
        .collect();
    sockets.sort();
    sockets
}

/// A daemon that died, and whose tenants wait for another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Died {
    /// Its supervisor.
    pub(crate) supervisor: u32,
    /// Who holds what its tenants have.
    pub(crate) holder: u32,
}

/// The daemon that was at `socket`, if it died and has a holder (docs/takeover.md).
pub(crate) fn died(socket: &Path) -> Option<Died> {
    let mut text = String::new();
    let mark = std::fs::File::open(socket.with_file_name(MARK_NAME)).ok()?;
    mark.take(MOST_MARK_BYTES).read_to_string(&mut text).ok()?;
    let mark = Mark::parse(&text)?;
    if is_living(&mark.supervisor) || !is_living(&mark.holder) {
        return None;
    }
    let (supervisor, holder) = (Mark::number(&mark.supervisor)?, Mark::number(&mark.holder)?);
    Some(Died { supervisor, holder })
}

/// Whether the process of a mark's note is there still: of its number, and started then.
fn is_living(note: &str) -> bool {
    let Some((pid, started)) = note.split_once(' ') else { return false };
    let Ok(pid) = pid.parse::<u32>() else { return false };
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name, which may hold anything: the state is the third field of proc(5),
    // the start the 22nd.
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let mut fields = fields.split_ascii_whitespace();
    let has_ended = matches!(fields.next(), None | Some("Z" | "X"));
    !has_ended && fields.nth(18) == Some(started)
}

/// Whether `socket` is that of the private daemon which the caller's commands start.
pub(crate) fn is_own_private(socket: &Path) -> bool {
    let base = private_bases().into_iter().next();
    let own = base.map(|base| base.join(format!("{PRIVATE_DIRECTORY_PREFIX}{}", uid())));
    own.is_some() && socket.parent() == own.as_deref()
}

/// Whether a private daemon of the caller's has ended and left snapshots.
pub(crate) fn private_snapshots_wait() -> bool {
    let Some(base) = private_bases().into_iter().next() else { return false };
    let uid = uid();
    let directory = base.join(format!("{PRIVATE_DIRECTORY_PREFIX}{uid}"));
    is_own_directory(&directory, uid) && has_entries(&directory.join(PRIVATE_SNAPSHOTS_NAME))
}

fn has_entries(directory: &Path) -> bool {
    std::fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some())
}

/// The directory of the caller's own private daemon; made if it is not there.
pub(crate) fn private_directory() -> Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let what = "cannot start a private stratad";
    let uid = uid();
    let Some(base) = private_bases().into_iter().next() else {
        return Err(Failure::new(what, "there is no runtime directory of your own")
            .todo("log in so that XDG_RUNTIME_DIR is set, or start the system's stratad"));
    };
    let directory = base.join(format!("{PRIVATE_DIRECTORY_PREFIX}{uid}"));
    match std::fs::DirBuilder::new().mode(0o700).create(&directory) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => {
            let what = format!("cannot make {}", directory.display());
            return Err(Failure::new(what, error).todo("see to the directory above it"));
        }
    }
    if is_own_directory(&directory, uid) {
        return Ok(directory);
    }
    Err(Failure::new(what, format!("{} is not yours alone", directory.display()))
        .todo("remove it, or correct its owner and mode"))
}

/// A file that is installed with strata: beside its binary (as in a build
/// directory), in `../lib/strata` or in `/usr/lib/strata`.
pub(crate) fn installed(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    installed_beside(&own, name)
}

fn installed_beside(own: &Path, name: &str) -> Option<PathBuf> {
    let directory = own.parent()?;
    [directory.to_owned(), directory.join("../lib/strata"), "/usr/lib/strata".into()]
        .into_iter()
        .map(|place| place.join(name))
        .find(|candidate| candidate.is_file())
        .map(|found| found.canonicalize().unwrap_or(found))
}

/// A program in one of the directories of `path` (a `PATH`).
pub(crate) fn in_path(name: &str, path: &std::ffi::OsStr) -> Option<PathBuf> {
    std::env::split_paths(path).map(|place| place.join(name)).find(|found| found.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Directory;
    use std::fs::{create_dir, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn private_sockets_are_the_callers_own() {
        let base = Directory::new("bases");
        for (name, mode, has_socket) in [
            ("strata-1", 0o700, true),
            ("strata-2", 0o777, true),
            ("strata-3", 0o700, false),
            ("other-4", 0o700, true),
        ] {
            let directory = base.path().join(name);
            create_dir(&directory).expect("directory");
            if has_socket {
                write(directory.join(CONTROL_SOCKET_NAME), "").expect("file");
            }
            set_permissions(&directory, PermissionsExt::from_mode(mode)).expect("mode");
        }
        let expected = base.path().join("strata-1").join(CONTROL_SOCKET_NAME);
        assert_eq!(private_sockets(base.path(), uid()), [expected]);
        assert!(private_sockets(base.path(), uid() + 1).is_empty());
    }

    #[test]
    fn a_daemon_that_died_is_one_whose_holder_lives() {
        let base = Directory::new("died");
        let socket = base.path().join(CONTROL_SOCKET_NAME);
        assert_eq!(died(&socket), None, "there is no mark");
        let own = std::process::id();
        let stat = std::fs::read_to_string("/proc/self/stat").expect("this process");
        let started = stat.rsplit_once(')').expect("a name").1.split_ascii_whitespace().nth(19);
        let living = format!("{own} {}", started.expect("a start"));
        let mark = |supervisor: &str, holder: &str| {
            let (supervisor, holder) = (supervisor.to_owned(), holder.to_owned());
            let text = Mark { supervisor, holder, registry: 5 }.to_string();
            write(base.path().join(MARK_NAME), text).expect("file");
            died(&socket)
        };
        let expected = Died { supervisor: 4_194_304, holder: own };
        assert_eq!(mark("4194304 1", &living), Some(expected));
        assert_eq!(mark("4194304 1", &format!("{own} 1")), None, "another of its number");
        assert_eq!(mark(&living, &living), None, "it lives");
        assert_eq!(mark("4194304 1", "4194305 1"), None, "nobody holds anything");
    }

    #[test]
    fn a_link_to_a_directory_is_not_ones_own() {
        let base = Directory::new("links");
        let link = base.path().join("strata-link");
        std::os::unix::fs::symlink("/", &link).expect("link");
        assert!(!is_own_directory(&link, uid()));
    }

    #[test]
    fn installed_files_are_beside_the_binary_or_in_lib() {
        let root = Directory::new("install");
        for directory in ["bin", "lib", "lib/strata"] {
            create_dir(root.path().join(directory)).expect("directory");
        }
        let own = root.path().join("bin/strata");
        assert_eq!(installed_beside(&own, "libstrata-test.so"), None);
        let in_lib = root.path().join("lib/strata/libstrata-test.so");
        write(&in_lib, "").expect("file");
        assert_eq!(installed_beside(&own, "libstrata-test.so"), Some(in_lib));
        let beside = root.path().join("bin/libstrata-test.so");
        write(&beside, "").expect("file");
        assert_eq!(installed_beside(&own, "libstrata-test.so"), Some(beside));
    }
}
