//! Images of a guest that goes elsewhere: before it may run there they get other names, so
//! that nobody starts a guest here from what is not the newest.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use strata_sys::Directory;

/// What follows the name of an image whose guest is elsewhere.
const MOVED: &str = ".moved";
/// Names that are tried.
const MOST_NAMES: u32 = 1000;

/// An image that is put aside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct Aside {
    path: String,
    /// What it is called then.
    pub(in super::super) aside: String,
    /// The file: device, number.
    file: (u64, u64),
}

fn file_of(path: &str) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// The directory of a path, and the name in it.
pub(super) fn place_of(path: &str) -> io::Result<(Directory, String)> {
    let path = Path::new(path);
    let name = path.file_name().and_then(|name| name.to_str()).ok_or(ErrorKind::InvalidInput)?;
    Ok((Directory::open(path.parent().unwrap_or(Path::new("/")))?, name.to_owned()))
}

impl Aside {
    /// A name for the image at `path` that nothing has.
    pub(super) fn of(path: &str) -> Result<Self, String> {
        let file = file_of(path).map_err(|error| format!("{path}: {error}"))?;
        let name = |number: u32| match number {
            1 => format!("{path}{MOVED}"),
            _ => format!("{path}{MOVED}-{number}"),
        };
        let is_free = |name: &String| fs::symlink_metadata(name).is_err();
        let aside = (1..MOST_NAMES).map(name).find(is_free);
        let aside =
            aside.ok_or_else(|| format!("there are {MOST_NAMES} files called {path}{MOVED}"))?;
        Ok(Self { path: path.to_owned(), aside, file })
    }

    /// Gives it the other name. Done twice it is done.
    pub(in super::super) fn put(&self) -> Result<(), String> {
        self.rename(&self.path, &self.aside)
    }

    /// The opposite: it is the guest's still.
    pub(in super::super) fn put_back(&self) -> Result<(), String> {
        self.rename(&self.aside, &self.path)
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), String> {
        let renamed = || {
            if file_of(from).ok() != Some(self.file) {
                return match file_of(to)? == self.file {
                    true => Ok(()),
                    false => Err(io::Error::new(ErrorKind::NotFound, "it is another file by now")),
                };
            }
            let ((place, old), (_, new)) = (place_of(from)?, place_of(to)?);
            place.rename_new(&old, &new)?;
            if file_of(from).ok() == Some(self.file) {
                // The file system could only give it a second name.
                place.remove_file(&old)?;
            }
            place.sync()
        };
        renamed().map_err(|error| format!("{from} cannot be renamed to {to}: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_put_aside_and_back_and_never_over_another_file() {
        let place = std::env::temp_dir().join(format!("strata-aside-{}", std::process::id()));
        fs::create_dir_all(&place).expect("a directory");
        let path = place.join("a.raw").to_str().expect("text").to_owned();
        fs::write(&path, "image").expect("written");
        fs::write(format!("{path}.moved"), "older").expect("written");
        let aside = Aside::of(&path).expect("a name");
        assert_eq!(aside.aside, format!("{path}.moved-2"));
        for _ in 0..2 {
            aside.put().expect("put aside");
            assert!(fs::metadata(&path).is_err());
            assert_eq!(fs::read_to_string(&aside.aside).expect("there"), "image");
        }
        fs::write(&path, "another").expect("written");
        aside.put_back().expect_err("there is another one");
        assert_eq!(fs::read_to_string(&path).expect("there"), "another");
        assert_eq!(fs::read_to_string(&aside.aside).expect("there"), "image");
        fs::remove_file(&path).expect("removed");
        for _ in 0..2 {
            aside.put_back().expect("put back");
            assert_eq!(fs::read_to_string(&path).expect("there"), "image");
        }
        assert_eq!(fs::read_to_string(format!("{path}.moved")).expect("there"), "older");
        fs::remove_file(&path).expect("removed");
        assert!(aside.put().is_err() && aside.put_back().is_err());
        fs::remove_dir_all(&place).expect("clean up");
    }
}
