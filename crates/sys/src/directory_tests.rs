use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("strata-directory-{}-{number}", std::process::id());
        let path = std::env::temp_dir().canonicalize().expect("there").join(name);
        fs::create_dir(&path).expect("a directory");
        Self(path)
    }

    fn make(&self, name: &str, mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir(&path).expect("a directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn kind<T>(outcome: io::Result<T>) -> Option<io::ErrorKind> {
    outcome.err().map(|error| error.kind())
}

#[test]
fn links_are_followed_only_where_nobody_else_puts_any() {
    let place = Place::new();
    let target = place.make("target", 0o700);
    fs::write(target.join("file"), "mine").expect("written");
    let ours = place.make("ours", 0o755);
    symlink(&target, ours.join("link")).expect("a link");
    symlink("../target", ours.join("relative")).expect("a link");
    symlink("loop", ours.join("loop")).expect("a link");
    for name in ["link", "relative"] {
        let opened = Directory::open(&ours.join(name)).expect("our own link");
        assert_eq!(opened.names().expect("names"), ["file"]);
        assert!(open_plain_file(&ours.join(name).join("file")).is_ok());
    }
    assert!(Directory::open(&ours.join("loop")).is_err());
    for mode in [0o777, 0o1777, 0o775] {
        let open = place.make(&format!("open-{mode:o}"), mode);
        symlink(&target, open.join("link")).expect("a link");
        symlink(target.join("file"), open.join("file")).expect("a link");
        let refused = Directory::open(&open.join("link")).expect_err("anybody's link");
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(refused.to_string().contains("link is a symbolic link"), "{refused}");
        // Also in the middle of a path, and at its end.
        let denied = Some(io::ErrorKind::PermissionDenied);
        assert_eq!(kind(Directory::open(&open.join("link/.."))), denied);
        assert_eq!(kind(open_plain_file(&open.join("link/file"))), denied);
        assert_eq!(kind(open_plain_file(&open.join("file"))), denied);
        // What is really there is opened.
        fs::create_dir(open.join("real")).expect("a directory");
        assert!(Directory::open(&open.join("real")).is_ok());
        assert_eq!(kind(Directory::open_private(&open)), denied);
        assert!(Directory::open_private(&open.join("real")).is_ok());
    }
}

#[test]
fn what_is_in_it_is_ones_own_and_never_a_link() {
    let place = Place::new();
    fs::write(place.0.join("outside"), "precious").expect("written");
    let path = place.make("in", 0o700);
    let directory = Directory::open_private(&path).expect("ours");
    symlink("../outside", path.join("link")).expect("a link");
    for access in [Access::Read, Access::ReadWrite, Access::New] {
        assert!(directory.file("link", access).is_err(), "{access:?}");
    }
    for name in ["../outside", "..", ".", "", "a/b"] {
        let invalid = Some(io::ErrorKind::InvalidInput);
        assert_eq!(kind(directory.file(name, Access::Read)), invalid, "{name:?}");
        assert_eq!(kind(directory.remove_file(name)), invalid, "{name:?}");
    }
    let file = directory.file("new", Access::New).expect("made");
    assert_eq!(file.metadata().expect("there").mode() & 0o7777, 0o600);
    assert_eq!(kind(directory.file("new", Access::New)), Some(io::ErrorKind::AlreadyExists));
    directory.rename("new", "link").expect("in the link's place");
    assert!(directory.metadata("link").expect("there").is_file());
    drop(directory.file("other", Access::ReadWrite).expect("made"));
    let taken = directory.rename_new("other", "link");
    assert_eq!(kind(taken), Some(io::ErrorKind::AlreadyExists));
    directory.make_directory("below").expect("made");
    assert_eq!(directory.metadata("below").expect("there").mode() & 0o7777, 0o700);
    // A directory or a pipe is no file, and is not waited for.
    assert!(directory.file("below", Access::Read).is_err());
    let fifo = CString::new(path.join("fifo").as_os_str().as_bytes()).expect("a name");
    // SAFETY: a NUL-terminated string.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    assert_eq!(kind(directory.file("fifo", Access::Read)), Some(io::ErrorKind::InvalidInput));
    assert_eq!(kind(open_plain_file(&path.join("fifo"))), Some(io::ErrorKind::InvalidInput));
    // Moved away, it is still the same one.
    fs::rename(&path, place.0.join("moved")).expect("moved");
    symlink("/nonexistent", &path).expect("a link");
    directory.remove_directory("below").expect("removed");
    assert!(!place.0.join("moved/below").exists());
    assert_eq!(fs::read(place.0.join("outside")).expect("there"), b"precious");
}

#[test]
fn who_could_replace_a_directory_is_named() {
    let place = Place::new();
    let ours = place.make("ours", 0o755);
    fs::create_dir(ours.join("in")).expect("a directory");
    assert_eq!(who_may_replace(&ours.join("in")).expect("looked"), None);
    for (mode, is_safe) in [(0o777, false), (0o775, false), (0o1777, true)] {
        let open = place.make(&format!("open-{mode:o}"), mode);
        fs::create_dir(open.join("in")).expect("a directory");
        for name in ["in", "new", "new/below"] {
            let who = who_may_replace(&open.join(name)).expect("looked");
            assert_eq!(who.is_none(), is_safe, "{who:?}");
            if let Some(who) = who {
                assert!(who.contains(&open.display().to_string()), "{who}");
            }
        }
    }
}
