//! What a snapshot file holds besides pages: the description, the processes, the
//! files' names. Its encoding, and the rules for names, which come from outside.

use super::format::{u32_at, u64_at};
use super::{MAX_DESCRIPTION_BYTES, MAX_FILES, MAX_NAME_BYTES, MAX_PROCESSES};

/// One that breaks no limit fits in.
pub(super) const MAX_DIRECTORY_BYTES: usize =
    12 + MAX_DESCRIPTION_BYTES + MAX_PROCESSES * 24 + MAX_FILES * (10 + MAX_NAME_BYTES);

/// A process of a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessInfo {
    /// Its number when it was taken.
    pub pid: u32,
    /// Address of its agent's restart record; none: it has no agent.
    pub restart: Option<u64>,
    /// Pages of it in the snapshot, filled and repeated ones included.
    pub pages: u64,
}

/// A file of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileInfo {
    /// A plain name, see [`super::Writer::file`].
    pub name: String,
    /// Its length.
    pub size_bytes: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Directory {
    pub(super) description: Vec<u8>,
    pub(super) processes: Vec<ProcessInfo>,
    pub(super) files: Vec<FileInfo>,
}

/// Whether a file may have this name. It is made in a directory with others, and
/// the archive it comes from may be hostile: no path, no hidden file, nothing
/// that a terminal or a shell takes for more than a name.
pub(super) fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+@:=,".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && !name.starts_with(['.', '-'])
        && name.bytes().all(plain)
}

impl Directory {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend((self.description.len() as u32).to_le_bytes());
        out.extend(&self.description);
        out.extend((self.processes.len() as u32).to_le_bytes());
        for process in &self.processes {
            out.extend(process.pid.to_le_bytes());
            out.extend(u32::from(process.restart.is_some()).to_le_bytes());
            out.extend(process.restart.unwrap_or(0).to_le_bytes());
            out.extend(process.pages.to_le_bytes());
        }
        out.extend((self.files.len() as u32).to_le_bytes());
        for file in &self.files {
            out.extend(file.size_bytes.to_le_bytes());
            out.extend((file.name.len() as u16).to_le_bytes());
            out.extend(file.name.as_bytes());
        }
        out
    }

    /// None: it breaks a rule.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let description = take_counted(&mut rest, MAX_DESCRIPTION_BYTES)?.to_vec();
        let mut processes = Vec::new();
        for _ in 0..take_count(&mut rest, MAX_PROCESSES)? {
            let bytes = take(&mut rest, 24)?;
            let restart = match (u32_at(bytes, 4), u64_at(bytes, 8)) {
                (0, 0) => None,
                (1, address) => Some(address),
                _ => return None,
            };
            let pid = u32_at(bytes, 0);
            processes.push(ProcessInfo { pid, restart, pages: u64_at(bytes, 16) });
        }
        let mut files = Vec::new();
        for _ in 0..take_count(&mut rest, MAX_FILES)? {
            let bytes = take(&mut rest, 10)?;
            let size_bytes = u64_at(bytes, 0);
            let len = u16::from_le_bytes([bytes[8], bytes[9]]);
            let name = std::str::from_utf8(take(&mut rest, len.into())?).ok()?;
            is_plain(name).then(|| files.push(FileInfo { name: name.into(), size_bytes }))?;
        }
        let mut pids: Vec<u32> = processes.iter().map(|process| process.pid).collect();
        let mut names: Vec<&str> = files.iter().map(|file| &*file.name).collect();
        pids.sort_unstable();
        names.sort_unstable();
        let unique = pids.windows(2).all(|pair| pair[0] != pair[1])
            && names.windows(2).all(|pair| pair[0] != pair[1]);
        (unique && rest.is_empty()).then_some(Self { description, processes, files })
    }
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(len)?;
    *rest = left;
    Some(taken)
}

fn take_count(rest: &mut &[u8], most: usize) -> Option<usize> {
    let count = u32_at(take(rest, 4)?, 0) as usize;
    (count <= most).then_some(count)
}

fn take_counted<'a>(rest: &mut &'a [u8], most: usize) -> Option<&'a [u8]> {
    let len = take_count(rest, most)?;
    take(rest, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        for name in ["core-1.img", "pages-1.img", "stats-dump", "tmpfs-dev-58.tar.gz.img", "a=b"] {
            assert!(is_plain(name), "{name}");
        }
        let long = "x".repeat(256);
        let bad =
            ["", ".", "..", ".x", "-rf", "a/b", "/a", "a\0", "a b", "a\n", "ä", "a\\b", &long];
        for name in bad {
            assert!(!is_plain(name), "{name:?}");
        }
        assert!(is_plain(&long[1..]));
    }

    fn sample() -> Directory {
        let process = |pid, restart| ProcessInfo { pid, restart, pages: 3 };
        let file = |name: &str| FileInfo { name: name.into(), size_bytes: 9 };
        Directory {
            description: b"{}".to_vec(),
            processes: vec![process(7, None), process(9, Some(0x7000))],
            files: vec![file("a.img"), file("b.img")],
        }
    }

    #[test]
    fn it_comes_back_and_no_other_does() {
        let directory = sample();
        let bytes = directory.encode();
        assert_eq!(Directory::decode(&bytes), Some(directory));
        for len in 0..bytes.len() {
            assert_eq!(Directory::decode(&bytes[..len]), None, "{len}");
        }
        assert_eq!(Directory::decode(&[&bytes[..], &[0]].concat()), None);
    }

    #[test]
    fn what_breaks_a_rule_is_refused() {
        let refused = |change: fn(&mut Directory)| {
            let mut directory = sample();
            change(&mut directory);
            Directory::decode(&directory.encode()).is_none()
        };
        assert!(!refused(|_| ()));
        assert!(refused(|d| d.processes[1].pid = 7));
        assert!(refused(|d| d.files[1].name = "a.img".into()));
        assert!(refused(|d| d.files[1].name = "../x".into()));
        assert!(refused(|d| d.description = vec![0; MAX_DESCRIPTION_BYTES + 1]));
        let process = sample().processes[0];
        let many = |n: u32| Directory {
            processes: (0..n).map(|pid| ProcessInfo { pid, ..process }).collect(),
            ..Directory::default()
        };
        assert!(Directory::decode(&many(MAX_PROCESSES as u32).encode()).is_some());
        assert!(Directory::decode(&many(MAX_PROCESSES as u32 + 1).encode()).is_none());
    }
}
