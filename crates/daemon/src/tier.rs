//! The directory of the file tier: what it lies on, and whose it is.
//!
//! The tier's files have no names, so nothing of another daemon, version or machine
//! is ever read. What has a name is a mark that says who is there: two daemons would
//! not disturb each other's pages, but each would count on all of the room.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::Context;
use strata_store::{Backing, FileBacking, MappedBacking};
use strata_sys::MappingKind;

/// The mark's name in the directory.
pub(crate) const MARK: &str = "strata-tier";
/// First words of its first line; the number is the version of what follows.
const MAGIC: &str = "strata-tier 1";
/// More than a mark has.
const MOST_MARK_BYTES: u64 = 4096;
/// What a tenant's file is called for the moment that it has a name.
const FILE_PREFIX: &str = "tier-";
const PROBE_BYTES: u64 = 2 << 20;

/// Makes the directory this daemon's, as long as the file that comes back is open.
/// What is worth saying goes to `say`.
///
/// # Errors
/// Another daemon has it; or there is something in it that is not a mark.
pub(crate) fn claim(directory: &Path, mut say: impl FnMut(&str)) -> anyhow::Result<File> {
    let path = directory.join(MARK);
    let shown = path.display();
    let mut mark = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(strata_sys::OPEN_NO_LINK)
        .open(&path)
        .with_context(|| format!("tier_path: cannot open {shown}"))?;
    let mut text = String::new();
    let readable = (&mut mark).take(MOST_MARK_BYTES).read_to_string(&mut text).is_ok();
    let line = text.lines().next().unwrap_or_default();
    let field = |name| line.split(' ').skip_while(|word| *word != name).nth(1).unwrap_or("?");
    let locked = strata_sys::try_lock(mark.as_fd());
    if !locked.with_context(|| format!("tier_path: cannot lock {shown}"))? {
        anyhow::bail!(
            "tier_path: another stratad (pid {}) keeps its file tier in {}; give this one another directory",
            field("pid"),
            directory.display()
        );
    }
    let own = machine();
    if !text.is_empty() {
        if !readable || !line.starts_with("strata-tier ") {
            anyhow::bail!(
                "tier_path: {shown} is not Strata's; move it away, or name another directory"
            );
        }
        if !line.starts_with(MAGIC) {
            say(&format!(
                "{shown} was left by another version of stratad; nothing of it is needed"
            ));
        } else if field("machine") != own {
            say(&format!(
                "{shown} was left by another machine, which must not use the directory at the same time; nothing of it is needed"
            ));
        }
    }
    let new = format!("{MAGIC} machine {own} pid {}\n", std::process::id());
    mark.set_len(0)
        .and_then(|()| mark.rewind())
        .and_then(|()| mark.write_all(new.as_bytes()))
        .with_context(|| format!("tier_path: cannot write {shown}"))?;
    tidy(directory, &mut say);
    Ok(mark)
}

/// Names that a daemon left which was killed between making a file and taking away
/// its name: they are empty. Others are not ours to remove.
fn tidy(directory: &Path, say: &mut impl FnMut(&str)) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let number = name.strip_prefix(FILE_PREFIX);
        let ours = number.is_some_and(|number| {
            number.len() == 16 && number.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        let Ok(status) = entry.metadata() else { continue };
        if !ours || !status.is_file() {
            continue;
        }
        if status.len() == 0 {
            let _ = fs::remove_file(entry.path());
        } else {
            say(&format!(
                "{} is no file of a running stratad, and is never read; remove it to have its room",
                entry.path().display()
            ));
        }
    }
}

/// This machine's own name, as far as it has one.
fn machine() -> String {
    let text = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let text = text.trim();
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if plain { text.to_owned() } else { "unnamed".to_owned() }
}

/// How files in `directory` are read and written, in words. Leaves nothing there.
pub(crate) fn describe(directory: &Path) -> String {
    let path = directory.join(format!("{FILE_PREFIX}probe-{}", std::process::id()));
    let file = match FileBacking::create(&path, PROBE_BYTES) {
        Ok(file) => file,
        Err(error) => return format!("{}: {error}", directory.display()),
    };
    let how = match (MappedBacking::of(file, MappingKind::Memory), strata_sys::probe::io_uring()) {
        (Ok(mapped), _) if mapped.is_dax() => "on memory (DAX): by mapping".to_owned(),
        (Ok(_), _) => "in a tmpfs, by mapping: that is DRAM which no budget counts, unless it is \
                       bound to other memory (mpol=bind:NODE)"
            .to_owned(),
        (Err(_), Ok(())) => "not DAX: as a file, by io_uring".to_owned(),
        (Err(_), Err(error)) => format!("not DAX: as a file, by threads (io_uring: {error})"),
    };
    format!("{}, {how}", directory.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Directory(std::path::PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("strata-{name}-{}", std::process::id()));
            fs::create_dir(&path).expect("directory");
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("clean up");
        }
    }

    fn claimed(directory: &Path) -> (anyhow::Result<File>, Vec<String>) {
        let mut said = Vec::new();
        let mark = claim(directory, |line| said.push(line.to_owned()));
        (mark, said)
    }

    #[test]
    fn a_directory_is_one_daemons_at_a_time() {
        let directory = Directory::new("tier-claim");
        let (first, said) = claimed(&directory.0);
        let first = first.expect("free");
        assert_eq!(said, [""; 0]);
        let second = claimed(&directory.0).0.expect_err("taken").to_string();
        let pid = format!("another stratad (pid {})", std::process::id());
        assert!(second.contains(&pid) && second.contains("another directory"), "{second}");
        drop(first);
        claimed(&directory.0).0.expect("free again");
    }

    #[test]
    fn what_others_left_is_named_and_nothing_is_lost() {
        let directory = Directory::new("tier-left");
        let mark = directory.0.join(MARK);
        for (text, word) in [
            ("strata-tier 7 whatever\n", "another version"),
            ("strata-tier 1 machine 0123abc pid 1\n", "another machine"),
        ] {
            fs::write(&mark, text).expect("write");
            let (claimed, said) = claimed(&directory.0);
            claimed.expect("it is nobody's");
            assert!(said.len() == 1 && said[0].contains(word), "{said:?}");
            assert!(fs::read_to_string(&mark).expect("a mark").starts_with(MAGIC));
        }
        fs::write(&mark, "my notes\n").expect("write");
        let refused = claimed(&directory.0).0.expect_err("not a mark").to_string();
        assert!(refused.contains("not Strata's"), "{refused}");
        assert_eq!(fs::read(&mark).expect("kept"), b"my notes\n");
        fs::remove_file(&mark).expect("away");
        fs::write(directory.0.join("tier-0123456789abcdef"), "").expect("write");
        fs::write(directory.0.join("tier-fedcba9876543210"), "bytes").expect("write");
        fs::write(directory.0.join("tier-notes"), "").expect("write");
        let (mark, said) = claimed(&directory.0);
        mark.expect("free");
        assert!(said.len() == 1 && said[0].contains("fedcba9876543210"), "{said:?}");
        let left = fs::read_dir(&directory.0).expect("there").count();
        assert_eq!(left, 3, "the mark, the one with bytes, and the one that is none");
    }

    #[test]
    fn it_says_how_files_are_reached_and_leaves_none() {
        let directory = Directory::new("tier-say");
        let said = describe(&directory.0);
        assert!(said.contains("DAX") || said.contains("tmpfs"), "{said}");
        assert_eq!(fs::read_dir(&directory.0).expect("there").count(), 0);
        assert!(describe(Path::new("/no/such/place")).contains("No such file"));
    }
}
