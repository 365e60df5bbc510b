//! What an ordinary user has a right to.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use strata_sys::who_may_replace;

use super::{Beyond, Claim, O_ACCMODE, O_RDONLY, O_WRONLY, What};

/// What `loginuid` is where nobody logged in.
const NO_LOGIN: u32 = u32::MAX;
/// A program gets no memory below (`vm.mmap_min_addr`, as it is set everywhere).
pub(super) const LOWEST_ADDRESS: u64 = 1 << 16;
const LOCKED: usize = 8;
/// Flags of an open file that ask for no more than the mode of the access does.
const PLAIN_FLAGS: u32 = O_ACCMODE
    | 0o2000 // O_APPEND
    | 0o4000 // O_NONBLOCK
    | 0o10000 // O_DSYNC
    | 0o40000 // O_DIRECT
    | 0o100000 // O_LARGEFILE
    | 0o200000 // O_DIRECTORY
    | 0o400000 // O_NOFOLLOW
    | 0o2000000 // O_CLOEXEC
    | 0o4000000; // O_SYNC
/// Devices that everybody may open and that lead nowhere, by major and minor number.
const PLAIN_DEVICES: [u64; 5] = [0x103, 0x105, 0x107, 0x108, 0x109];

/// Hard limits, in the kernel's order; none: without limit.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Limits(Vec<Option<u64>>);

impl Limits {
    /// Of a `/proc/PID/limits`.
    #[must_use]
    pub fn of(text: &str) -> Self {
        // Names have words, and a width.
        const NAME_BYTES: usize = 26;
        let hard = |line: &str| {
            let word = line.get(NAME_BYTES..)?.split_ascii_whitespace().nth(1)?;
            // What is not understood allows nothing.
            Some(if word == "unlimited" { None } else { Some(word.parse().unwrap_or(0)) })
        };
        Self(text.lines().skip(1).filter_map(hard).collect())
    }

    fn allow(&self, which: usize, value: u64) -> bool {
        match self.0.get(which) {
            Some(None) => true,
            Some(Some(most)) => value <= *most,
            None => false,
        }
    }
}

/// A user, and what that user may have.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Owner {
    /// The number.
    pub user: u32,
    /// All groups.
    pub groups: BTreeSet<u32>,
    /// What programs of users start with.
    pub limits: Limits,
}

impl Owner {
    /// A user by the texts of `/etc/passwd` and `/etc/group`, with the hard limits of
    /// a `/proc/PID/limits`.
    #[must_use]
    pub fn of(user: u32, passwd: &str, group: &str, limits: &str) -> Self {
        let mut groups = BTreeSet::new();
        let mut names = BTreeSet::new();
        for line in passwd.lines() {
            let fields: Vec<&str> = line.split(':').collect();
            if let [name, _, number, primary, ..] = fields[..]
                && number.parse() == Ok(user)
            {
                names.insert(name);
                groups.extend(primary.parse::<u32>().ok());
            }
        }
        for line in group.lines() {
            let fields: Vec<&str> = line.split(':').collect();
            if let [_, _, number, members] = fields[..]
                && members.split(',').any(|member| names.contains(member))
            {
                groups.extend(number.parse::<u32>().ok());
            }
        }
        Self { user, groups, limits: Limits::of(limits) }
    }

    /// Whether the permissions of a file give its `bits` (4 read, 2 write, 1 execute)
    /// to this user.
    fn may(&self, file: &Metadata, bits: u32) -> bool {
        let mode = file.mode();
        let given = if file.uid() == self.user {
            mode >> 6
        } else if self.groups.contains(&file.gid()) {
            mode >> 3
        } else {
            mode
        };
        given & bits == bits
    }
}

/// Why `owner` may not have the file at `path` opened with these flags by root.
///
/// The file is opened later and by its path, so nobody but root may be able to put
/// something else there by then.
///
/// # Errors
/// The reason.
pub fn may_open(path: &Path, flags: u32, owner: &Owner) -> Result<(), String> {
    let failed = |error: std::io::Error| error.to_string();
    if !path.is_absolute() {
        return Err("it is no absolute path".into());
    }
    let found = path.canonicalize().map_err(failed)?;
    if let Some(who) = who_may_replace(path).map_err(failed)? {
        return Err(format!("it can be replaced: {who}"));
    }
    let kernels = ["/proc", "/sys"].iter().any(|kernel| found.starts_with(kernel));
    if kernels {
        return Err("it is the kernel's".into());
    }
    for directory in found.ancestors().skip(1) {
        if !owner.may(&directory.metadata().map_err(failed)?, 1) {
            return Err(format!("user {} may not go into {}", owner.user, directory.display()));
        }
    }
    let file = found.metadata().map_err(failed)?;
    let kind = file.file_type();
    let plain_device = kind.is_char_device() && PLAIN_DEVICES.contains(&file.rdev());
    if kind.is_char_device() || kind.is_block_device() {
        if !plain_device {
            return Err("it is a device".into());
        }
    } else if !kind.is_file() && !kind.is_dir() {
        return Err("it is no plain file and no directory".into());
    }
    if file.mode() & 0o6000 != 0 && kind.is_file() {
        return Err(format!("it is set-user-id or set-group-id (mode {:o})", file.mode() & 0o7777));
    }
    let bits = match flags & O_ACCMODE {
        O_RDONLY => 4,
        O_WRONLY => 2,
        _ => 6,
    };
    // A directory that is only a place to be is not read.
    let is_place = kind.is_dir() && owner.may(&file, 1);
    if !is_place && !owner.may(&file, bits) {
        return Err(format!("user {} may not open it", owner.user));
    }
    Ok(())
}

/// Why `owner` has no right to a claim; none: it has.
pub(super) fn beyond(
    claim: &Claim,
    owner: &Owner,
    may_open: &dyn Fn(&Path, u32) -> Result<(), String>,
) -> Option<Beyond> {
    let mut why = None;
    let is_right = match &claim.what {
        What::User(user) => *user == owner.user,
        What::Group(group) => owner.groups.contains(group),
        What::LoginUser(user) => [owner.user, NO_LOGIN].contains(user),
        What::SparedByOomKiller(score) => *score >= 0,
        What::Limit(which, value) => owner.limits.allow(*which, *value),
        What::LockedMemory(bytes) => owner.limits.allow(LOCKED, *bytes),
        // One of root's has no name and gives nothing; the agent's control block is one.
        What::MemoryFile(user, group, mode) => {
            (*user == 0 || *user == owner.user)
                && (*group == 0 || owner.groups.contains(group))
                && mode & 0o6000 == 0
        }
        What::File(path, flags) => {
            let opened = if flags & !PLAIN_FLAGS == 0 {
                may_open(Path::new(std::ffi::OsStr::from_bytes(path.as_bytes())), *flags)
            } else {
                Err(format!("flags {flags:o} ask for more than to open it"))
            };
            why = opened.err();
            why.is_none()
        }
        What::Capabilities(..)
        | What::SecureBits(_)
        | What::SecurityLabel(_)
        | What::FilterWithPrivileges
        | What::Scheduling(_)
        | What::Namespace(_)
        | What::Root(_)
        | What::Foreign(..)
        | What::Unlinked(_)
        | What::Memory(_)
        | What::SocketPath(_)
        | What::Port(_)
        | What::Socket(_)
        | What::Connection(_)
        | What::Terminal
        | What::SignalTo(_)
        | What::OpenFile(_)
        | What::Lease(_)
        | What::Setup(_)
        | What::Unknown(_) => false,
    };
    (!is_right).then(|| Beyond { claim: claim.clone(), why })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     \n\
Max cpu time              unlimited            unlimited            seconds   \n\
Max file size             unlimited            unlimited            bytes     \n\
Max data size             1024                 4096                 bytes     \n\
Max stack size            8388608              broken               bytes     \n";

    #[test]
    fn limits_are_the_hard_ones() {
        let limits = Limits::of(LIMITS);
        assert!(limits.allow(0, u64::MAX));
        assert!(limits.allow(2, 4096) && !limits.allow(2, 4097) && !limits.allow(2, u64::MAX));
        assert!(limits.allow(3, 0) && !limits.allow(3, 1), "what is not understood");
        assert!(!limits.allow(4, 1), "what is not there");
    }

    #[test]
    fn a_user_has_the_groups_that_name_it() {
        let passwd = "root:x:0:0::/:/bin/sh\nada:x:1000:1000::/home/ada:/bin/sh\nbad\n";
        let group = "root:x:0:\nwheel:x:10:ada,bob\nadas:x:1000:\naudio:x:11:bob\nada:x:12:eve\n";
        let owner = Owner::of(1000, passwd, group, LIMITS);
        assert_eq!(owner.groups, BTreeSet::from([10, 1000]));
        assert!(Owner::of(7, passwd, group, LIMITS).groups.is_empty());
    }

    #[test]
    fn only_files_that_root_alone_can_replace_are_opened() {
        let owner = Owner { user: 65_534, ..Owner::default() };
        let why = |path: &str, flags| may_open(Path::new(path), flags, &owner).err();
        assert_eq!(why("/dev/null", 2), None);
        assert_eq!(why("/etc/passwd", 0), None);
        assert_eq!(why("/", 0o200_000), None);
        let place = std::env::temp_dir().join(format!("strata-owner-{}", std::process::id()));
        fs::create_dir(&place).expect("a directory");
        let make = |name: &str, mode| {
            let path = place.join(name);
            fs::write(&path, "x").expect("a file");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
            path.display().to_string()
        };
        let (open, closed, special) =
            (make("open", 0o644), make("closed", 0o600), make("special", 0o4755));
        fs::create_dir(place.join("shared")).expect("a directory");
        let all = fs::Permissions::from_mode(0o777);
        fs::set_permissions(place.join("shared"), all).expect("a mode");
        symlink(&open, place.join("shared/link")).expect("a link");
        fs::write(place.join("shared/file"), "x").expect("a file");
        fs::create_dir(place.join("inner")).expect("a directory");
        fs::write(place.join("inner/file"), "x").expect("a file");
        let none = fs::Permissions::from_mode(0o700);
        fs::set_permissions(place.join("inner"), none).expect("a mode");
        let inner = place.join("inner/file").display().to_string();
        let shared = place.join("shared/file").display().to_string();
        assert_eq!(why(&open, 0), None);
        for (path, flags, word) in [
            (&*open, 1, "may not open it"),
            (&closed, 0, "may not open it"),
            (&special, 0, "set-user-id"),
            (&inner, 0, "may not go into"),
            (&shared, 0, "can be replaced"),
            ("/proc/self/status", 0, "kernel's"),
            ("/nonexistent", 0, "No such file"),
            ("etc/passwd", 0, "no absolute path"),
        ] {
            let found = why(path, flags).unwrap_or_default();
            assert!(found.contains(word), "{path}: {found}");
        }
        // What a link somebody else can have put there leads to is open to all; where
        // it leads is not known when it is opened.
        let linked = place.join("shared/link").display().to_string();
        assert!(why(&linked, 0).is_some(), "a link in a place that others write to");
        fs::remove_dir_all(&place).expect("removed");
    }
}
