//! A dump's images as CRIU is to see them: links to the files, and changed copies of a
//! few. The images themselves stay as they are.
//!
//! Changed is what is a matter of the moment: terminals (see `terminals`). For a
//! rehearsal also whatever would reach out of its namespaces while the original runs
//! beside it: a unix socket that is bound to a path would take that path away from
//! the original, locks on files are the original's, and so is what is in named
//! pipes. Shared memory is empty there.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::{fs, io};

use crate::images::unknown;
use crate::message::{Message, Value, image_of, rows};
use crate::terminals::{self, Outer, Terminals};

const FILES: &str = "files.img";
/// Which process has which file under which number, before its number.
const TABLE: &str = "fdinfo-";
/// Where the content of shared memory is, before its number: behind a first entry that
/// only says in which file.
const SHARED: &str = "pagemap-shmem-";
/// Not for a rehearsal: locks on files, and what is in named pipes.
const OF_THE_ORIGINAL: [&str; 2] = ["filelocks.img", "fifo-data.img"];

// Field numbers of `file_entry`, `fdinfo_entry`, `reg_file_entry`, `tty_file_entry` and
// `unix_sk_entry`; kinds of files (`fd_types`).
const FILE_KIND: u64 = 1;
const FILE_REGULAR: u64 = 3;
const FILE_UNIX: u64 = 16;
const FILE_TERMINAL: u64 = 19;
const TABLE_ID: u64 = 1;
const TABLE_KIND: u64 = 3;
const REGULAR_POSITION: u64 = 3;
const REGULAR_OWNER: u64 = 5;
const REGULAR_NAME: u64 = 6;
const TERMINAL_ID: u64 = 1;
const TERMINAL_ENTRY: u64 = 2;
const TERMINAL_FLAGS: u64 = 3;
const TERMINAL_OWNER: u64 = 4;
const UNIX_INODE: u64 = 2;
const UNIX_NAME: u64 = 11;
const UNIX_PERMISSIONS: u64 = 13;
const UNIX_DIRECTORY: u64 = 14;
const UNIX_DELETED: u64 = 15;
const REGULAR: u64 = 1;
const TERMINAL: u64 = 11;

/// What CRIU is to be started with.
#[derive(Debug, Default)]
pub(crate) struct View {
    /// Descriptors for it, by the names that it knows them by.
    pub(crate) inherited: Vec<(String, OwnedFd)>,
    /// A terminal of the dump is nowhere to be had.
    pub(crate) lacks_terminal: bool,
}

/// `/dev/null` in the place of a terminal's file.
fn nothing(terminal: &Message) -> Option<Message> {
    let number = |field| terminal.number(field).map(Value::Number);
    Some(Message(vec![
        (1, number(TERMINAL_ID)?),
        (2, number(TERMINAL_FLAGS)?),
        (REGULAR_POSITION, Value::Number(0)),
        (REGULAR_OWNER, Value::Bytes(terminal.message(TERMINAL_OWNER)?.bytes())),
        (REGULAR_NAME, Value::Bytes(b"/dev/null".to_vec())),
    ]))
}

/// Puts `/dev/null` in the place of files of these terminals; the files' numbers.
fn without_terminals(files: &mut [Message], lacking: &BTreeSet<u64>) -> BTreeSet<u64> {
    let mut changed = BTreeSet::new();
    for file in files {
        let Some(terminal) = file.message(FILE_TERMINAL) else { continue };
        let is_lacking = terminal.number(TERMINAL_ENTRY).is_some_and(|id| lacking.contains(&id));
        let Some(regular) = nothing(&terminal).filter(|_| is_lacking) else { continue };
        changed.extend(terminal.number(TERMINAL_ID));
        file.0.retain(|(field, _)| *field != FILE_TERMINAL);
        file.set(FILE_KIND, Value::Number(REGULAR));
        file.set(FILE_REGULAR, Value::Bytes(regular.bytes()));
    }
    changed
}

/// Gives unix sockets names that are nobody's in place of paths.
fn without_paths(files: &mut [Message]) {
    for file in files {
        let Some(mut socket) = file.message(FILE_UNIX) else { continue };
        let is_path =
            socket.bytes_of(UNIX_NAME).is_some_and(|n| n.first().is_some_and(|&b| b != 0));
        if !is_path {
            continue;
        }
        let own = format!("\0rehearsed-{}", socket.number(UNIX_INODE).unwrap_or(0));
        socket.set(UNIX_NAME, Value::Bytes(own.into_bytes()));
        let of_path = [UNIX_PERMISSIONS, UNIX_DIRECTORY, UNIX_DELETED];
        socket.0.retain(|(field, _)| !of_path.contains(field));
        file.set(FILE_UNIX, Value::Bytes(socket.bytes()));
    }
}

/// The changed image, in the directory `view`.
fn change(
    images: &Path,
    view: &Path,
    name: &str,
    how: impl FnOnce(&mut Vec<Message>),
) -> io::Result<()> {
    let path = images.join(name);
    let image = fs::read(&path)?;
    let (head, mut entries) = rows(&image).ok_or_else(|| unknown(&path))?;
    how(&mut entries);
    let to = view.join(name);
    fs::remove_file(&to)?;
    fs::write(to, image_of(head, &entries))
}

/// Makes a view of `images` in the directory `view`, which is there, if they are to be
/// seen otherwise than they are; `None`: they are not.
pub(crate) fn make(
    images: &Path,
    view: &Path,
    terminals: &Terminals,
    is_rehearsal: bool,
) -> io::Result<Option<View>> {
    let outer = terminals::outer_in(images)?;
    if outer.is_empty() && !is_rehearsal {
        return Ok(None);
    }
    let from = images.canonicalize()?;
    let (mut tables, mut shared) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(&from)? {
        let name = entry?.file_name();
        let Some(text) = name.to_str().filter(|name| name.ends_with(".img")) else { continue };
        if is_rehearsal && OF_THE_ORIGINAL.contains(&text) {
            continue;
        }
        symlink(from.join(&name), view.join(&name))?;
        if text.starts_with(TABLE) {
            tables.push(text.to_owned());
        } else if text.starts_with(SHARED) {
            shared.push(text.to_owned());
        }
    }
    let given: Vec<(Outer, OwnedFd)> =
        outer.iter().filter_map(|one| Some((one.clone(), one.given(terminals)?))).collect();
    let is_given = |id: u64| given.iter().find(|(one, _)| one.id == id);
    let lacking: BTreeSet<u64> =
        outer.iter().map(|one| one.id).filter(|&id| is_given(id).is_none()).collect();
    if !given.is_empty() {
        change(images, view, terminals::IMAGE, |entries| {
            for entry in entries {
                if let Some((_, fd)) = entry.number(1).and_then(is_given) {
                    *entry = terminals::given(entry.clone(), fd);
                }
            }
        })?;
    }
    let mut changed = BTreeSet::new();
    if is_rehearsal || !lacking.is_empty() {
        change(images, view, FILES, |files| {
            changed = without_terminals(files, &lacking);
            if is_rehearsal {
                without_paths(files);
            }
        })?;
    }
    for table in tables.iter().filter(|_| !changed.is_empty()) {
        change(images, view, table, |entries| {
            for entry in entries {
                let of_changed = entry.number(TABLE_ID).is_some_and(|id| changed.contains(&id));
                if of_changed && entry.number(TABLE_KIND) == Some(TERMINAL) {
                    entry.set(TABLE_KIND, Value::Number(REGULAR));
                }
            }
        })?;
    }
    for memory in shared.iter().filter(|_| is_rehearsal) {
        // Nobody reads it, and there may be no room for all of it twice.
        change(images, view, memory, |entries| entries.truncate(1))?;
    }
    let inherited = given.into_iter().map(|(one, fd)| (one.name(), fd)).collect();
    Ok(Some(View { inherited, lacks_terminal: !lacking.is_empty() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(fields: &[(u64, u64)]) -> Message {
        Message(fields.iter().map(|&(name, value)| (name, Value::Number(value))).collect())
    }

    fn file(kind: u64, field: u64, inner: &Message) -> Message {
        let mut file = numbers(&[(FILE_KIND, kind), (2, inner.number(1).unwrap_or(0))]);
        file.set(field, Value::Bytes(inner.bytes()));
        file
    }

    fn terminal(id: u64, entry: u64) -> Message {
        let mut terminal =
            numbers(&[(TERMINAL_ID, id), (TERMINAL_ENTRY, entry), (TERMINAL_FLAGS, 2)]);
        terminal.set(TERMINAL_OWNER, Value::Bytes(numbers(&[(1, 7)]).bytes()));
        file(TERMINAL, FILE_TERMINAL, &terminal)
    }

    #[test]
    fn only_files_of_terminals_that_lack_become_nothing() {
        let mut files = [terminal(23, 5), terminal(24, 6)];
        let changed = without_terminals(&mut files, &BTreeSet::from([5]));
        assert_eq!(changed, BTreeSet::from([23]));
        assert_eq!(files[1], terminal(24, 6));
        assert_eq!(files[0].number(FILE_KIND), Some(REGULAR));
        assert_eq!(files[0].message(FILE_TERMINAL), None);
        let regular = files[0].message(FILE_REGULAR).expect("a file");
        assert_eq!(regular.bytes_of(REGULAR_NAME), Some(&b"/dev/null"[..]));
        assert_eq!((regular.number(1), regular.number(2)), (Some(23), Some(2)));
        assert_eq!(regular.message(REGULAR_OWNER).and_then(|owner| owner.number(1)), Some(7));
    }

    #[test]
    fn sockets_lose_their_paths_and_nothing_else() {
        let socket = |name: &[u8]| {
            let mut socket = numbers(&[(1, 3), (UNIX_INODE, 99), (UNIX_DELETED, 0)]);
            socket.set(UNIX_NAME, Value::Bytes(name.to_vec()));
            file(5, FILE_UNIX, &socket)
        };
        let mut files = [socket(b"/run/db.sock\0"), socket(b"\0abstract"), socket(b"")];
        let before = files.clone();
        without_paths(&mut files);
        assert_eq!(files[1..], before[1..]);
        let named = files[0].message(FILE_UNIX).expect("a socket");
        assert_eq!(named.bytes_of(UNIX_NAME), Some(&b"\0rehearsed-99"[..]));
        assert_eq!((named.number(UNIX_INODE), named.number(UNIX_DELETED)), (Some(99), None));
    }
}
