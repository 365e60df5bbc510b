//! Small changes to CRIU's image of open files, so that what no outsider can
//! give back does not keep a tree from being restored.
//!
//! - A unix connection to an outsider is closed: the restored program reads its
//!   end, as with a TCP connection under `--tcp-close`. CRIU itself can take
//!   such a socket (`--external unix[INODE]`), but not bring it back.
//! - A TCP connection to an outsider is closed as well, if the connections inside
//!   of the tree are in the images; else CRIU closes all of them.
//! - A file that is open for writing only (a log) may have another size by then.
//!
//! The image is a row of protobuf messages (`file_entry` of CRIU's
//! `images/fdinfo.proto`), each behind its length. Fields that are not ours
//! pass unchanged. No other image is touched, but those of connections that are
//! closed are removed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::connections::{Ends, address, end, with_both_ends};
use crate::message::{Message, Value, image_of, rows, take};

/// Two words at the start: images of the common kind, and the kind of this one
/// (CRIU's `magic.h`).
const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x38, 0x31, 0x30, 0x56];

/// What images of TCP connections are called, before the inode and `.img`.
const STREAM: &str = "tcp-stream-";
/// Field number of `tcp_stream_entry`: bytes at the end of its queue that were
/// not sent yet.
const STREAM_UNSENT: u64 = 12;

// Field numbers of `file_entry`, `reg_file_entry`, `inet_sk_entry` and
// `unix_sk_entry`.
const FILE_REGULAR: u64 = 3;
const FILE_INET: u64 = 4;
const FILE_UNIX: u64 = 16;
const REGULAR_FLAGS: u64 = 2;
const REGULAR_SIZE: u64 = 8;
const INET_INODE: u64 = 2;
const INET_PROTOCOL: u64 = 5;
const INET_STATE: u64 = 6;
const INET_PORT: u64 = 7;
const INET_PEER_PORT: u64 = 8;
const INET_ADDRESS: u64 = 11;
const INET_PEER_ADDRESS: u64 = 12;
const INET_SHUTDOWN: u64 = 19;
const UNIX_INODE: u64 = 2;
const UNIX_TYPE: u64 = 3;
const UNIX_STATE: u64 = 4;
const UNIX_UFLAGS: u64 = 6;
const UNIX_PEER: u64 = 8;
const UNIX_SHUTDOWN: u64 = 12;

/// `USK_EXTERN`: stands for an outsider's socket.
const EXTERN: u64 = 1;
/// `TCP_ESTABLISHED`, which connected unix sockets say too.
const ESTABLISHED: u64 = 1;
/// `TCP_CLOSE`.
const CLOSED: u64 = 7;
const IPPROTO_TCP: u64 = 6;
const SOCK_DGRAM: u64 = 2;
/// `SK_SHUTDOWN__BOTH`: what CRIU writes for a socket whose other end is gone.
const SHUTDOWN_BOTH: u64 = 3;
const O_ACCMODE: u64 = 3;
const O_WRONLY: u64 = 1;

fn is_outsider(file: &Message) -> bool {
    let socket = file.message(FILE_UNIX);
    socket.and_then(|socket| socket.number(UNIX_UFLAGS)).is_some_and(|flags| flags & EXTERN != 0)
}

/// The two ends of a TCP connection, this one first.
fn ends(file: &Message) -> Option<Ends> {
    let socket = file.message(FILE_INET)?;
    let end = |port, words| {
        let port = socket.number(port).and_then(|port| u16::try_from(port).ok())?;
        Some(end(address(&socket.numbers(words))?, port))
    };
    let own = end(INET_PORT, INET_ADDRESS)?;
    let other = end(INET_PEER_PORT, INET_PEER_ADDRESS)?;
    (socket.number(INET_PROTOCOL) == Some(IPPROTO_TCP) && other.port() != 0).then_some((own, other))
}

/// Closes a TCP connection: its reader finds the end. Its inode.
fn close_connection(file: &mut Message) -> Option<u64> {
    let mut socket = file.message(FILE_INET)?;
    for (field, value) in
        [(INET_STATE, CLOSED), (INET_PORT, 0), (INET_PEER_PORT, 0), (INET_SHUTDOWN, SHUTDOWN_BOTH)]
    {
        socket.set(field, Value::Number(value));
    }
    file.set(FILE_INET, Value::Bytes(socket.bytes()));
    socket.number(INET_INODE)
}

/// The changed entry; `None` where nothing is to be changed.
fn changed(file: &Message, inside: &BTreeSet<u64>) -> Option<Message> {
    let mut file = file.clone();
    if let Some(mut regular) = file.message(FILE_REGULAR) {
        let writes_only = regular.number(REGULAR_FLAGS).is_some_and(|f| f & O_ACCMODE == O_WRONLY);
        if !writes_only || regular.number(REGULAR_SIZE).is_none() {
            return None;
        }
        regular.0.retain(|(name, _)| *name != REGULAR_SIZE);
        file.set(FILE_REGULAR, Value::Bytes(regular.bytes()));
        return Some(file);
    }
    let mut socket = file.message(FILE_UNIX)?;
    let peer = socket.number(UNIX_PEER)?;
    let connected = socket.number(UNIX_STATE) == Some(ESTABLISHED)
        && socket.number(UNIX_TYPE) != Some(SOCK_DGRAM);
    if !connected || peer == 0 || inside.contains(&peer) {
        return None;
    }
    socket.set(UNIX_PEER, Value::Number(0));
    socket.set(UNIX_SHUTDOWN, Value::Number(SHUTDOWN_BOTH));
    file.set(FILE_UNIX, Value::Bytes(socket.bytes()));
    Some(file)
}

fn parse_files(image: &[u8]) -> Option<Vec<Message>> {
    let (head, files) = rows(image)?;
    (head == MAGIC).then_some(files)
}

/// An image with the changes.
#[derive(PartialEq, Eq, Debug)]
struct Mended {
    image: Vec<u8>,
    /// Inodes of TCP sockets whose connections were closed.
    closed: Vec<u64>,
}

/// Changes an image, with `connections` also what is said of TCP; `None`: it is
/// no image of files.
fn mended(image: &[u8], connections: bool) -> Option<Mended> {
    let mut files = parse_files(image)?;
    files.retain(|file| !is_outsider(file));
    let inside: BTreeSet<u64> =
        files.iter().filter_map(|file| file.message(FILE_UNIX)?.number(UNIX_INODE)).collect();
    let mut closed = Vec::new();
    if connections {
        let inside = with_both_ends(&files.iter().filter_map(ends).collect());
        let to_outside = |file: &&mut Message| ends(file).is_some_and(|e| !inside.contains(&e));
        closed.extend(files.iter_mut().filter(to_outside).filter_map(close_connection));
    }
    let files: Vec<Message> =
        files.into_iter().map(|file| changed(&file, &inside).unwrap_or(file)).collect();
    Some(Mended { image: image_of(&MAGIC, &files), closed })
}

/// What a connection had not sent yet counts as sent and lost: the kernel sends it
/// again, a little later. CRIU would have it sent while the connection is made,
/// when its other end, in the same tree, may not be there yet to take it.
/// `None`: it is no image of a connection.
fn all_sent(image: &[u8]) -> Option<Vec<u8>> {
    let (head, mut rest) = image.split_at_checked(MAGIC.len())?;
    let length = u32::from_le_bytes(take(&mut rest, 4)?.try_into().ok()?);
    let mut entry = Message::parse(take(&mut rest, length as usize)?)?;
    entry.number(STREAM_UNSENT)?;
    entry.set(STREAM_UNSENT, Value::Number(0));
    let entry = entry.bytes();
    let length = (entry.len() as u32).to_le_bytes();
    Some([head, &length, &entry, rest].concat())
}

/// The images of TCP connections in a directory.
fn stream_images(images: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(STREAM) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// The TCP connections in a directory of images; none, if CRIU is to close all.
pub(crate) fn connections(images: &Path) -> io::Result<BTreeSet<Ends>> {
    if stream_images(images)?.is_empty() {
        return Ok(BTreeSet::new());
    }
    let path = images.join("files.img");
    let files = parse_files(&fs::read(&path)?).ok_or_else(|| unknown(&path))?;
    Ok(files.iter().filter_map(ends).collect())
}

pub(crate) fn unknown(path: &Path) -> io::Error {
    let text = format!("{} is not an image that this version knows", path.display());
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Changes the image of open files in a directory of images.
///
/// # Errors
/// It cannot be read or written, or is not what CRIU 4 writes.
pub(crate) fn mend_files(images: &Path) -> io::Result<()> {
    let path = images.join("files.img");
    let image = fs::read(&path)?;
    let streams = !stream_images(images)?.is_empty();
    let new = mended(&image, streams).ok_or_else(|| unknown(&path))?;
    for inode in new.closed {
        fs::remove_file(images.join(format!("{STREAM}{inode:x}.img")))?;
    }
    for path in stream_images(images)? {
        fs::write(&path, all_sent(&fs::read(&path)?).ok_or_else(|| unknown(&path))?)?;
    }
    if new.image != image { fs::write(&path, new.image) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(fields: &[(u64, u64)]) -> Message {
        Message(fields.iter().map(|(name, value)| (*name, Value::Number(*value))).collect())
    }

    fn file(kind: u64, inner: &Message) -> Message {
        Message(vec![(1, Value::Number(0)), (kind, Value::Bytes(inner.bytes()))])
    }

    fn socket(inode: u64, peer: u64, uflags: u64) -> Message {
        let fields = [
            (UNIX_INODE, inode),
            (UNIX_TYPE, 1),
            (UNIX_STATE, ESTABLISHED),
            (UNIX_UFLAGS, uflags),
            (UNIX_PEER, peer),
        ];
        file(FILE_UNIX, &message(&fields))
    }

    fn image(files: &[Message]) -> Vec<u8> {
        image_of(&MAGIC, files)
    }

    fn plain(image: &[u8]) -> Option<Vec<u8>> {
        mended(image, false).map(|mended| mended.image)
    }

    /// A TCP socket at 127.0.0.1, its family's way to say so first.
    fn tcp(inode: u64, address: &[u64], port: u64, peer_port: u64) -> Message {
        let mut fields = vec![
            (INET_INODE, inode),
            (INET_PROTOCOL, IPPROTO_TCP),
            (INET_STATE, ESTABLISHED),
            (INET_PORT, port),
            (INET_PEER_PORT, peer_port),
        ];
        fields.extend(address.iter().map(|word| (INET_ADDRESS, *word)));
        fields.extend(address.iter().map(|word| (INET_PEER_ADDRESS, *word)));
        file(FILE_INET, &message(&fields))
    }

    #[test]
    fn tcp_connections_are_closed_unless_both_ends_are_here() {
        let four = [u64::from(u32::from_ne_bytes([127, 0, 0, 1]))];
        let six = [0, 0, u64::from(u32::from_ne_bytes([0, 0, 0xff, 0xff])), four[0]];
        let before = [
            tcp(1, &four, 80, 5000),
            tcp(2, &six, 5000, 80),
            tcp(3, &four, 80, 5001),
            tcp(4, &four, 80, 0),
        ];
        let changed = mended(&image(&before), true).expect("an image");
        assert_eq!(changed.closed, [3]);
        let mut closed = before[2].clone();
        assert_eq!(close_connection(&mut closed), Some(3));
        let inner = closed.message(FILE_INET).expect("a socket");
        assert_eq!(inner.number(INET_STATE), Some(CLOSED));
        assert_eq!((inner.number(INET_PORT), inner.number(INET_PEER_PORT)), (Some(0), Some(0)));
        let after = [before[0].clone(), before[1].clone(), closed, before[3].clone()];
        assert_eq!(changed.image, image(&after));
        // CRIU closes them itself.
        assert_eq!(plain(&image(&before)), Some(image(&before)));
    }

    #[test]
    fn only_connections_to_outsiders_are_closed() {
        let closed = {
            let mut inner = socket(10, 0, 0).message(FILE_UNIX).expect("a socket");
            inner.set(UNIX_SHUTDOWN, Value::Number(SHUTDOWN_BOTH));
            file(FILE_UNIX, &inner)
        };
        let before = [socket(10, 99, 0), socket(11, 12, 0), socket(12, 11, 0), socket(99, 0, 1)];
        let after = [closed, socket(11, 12, 0), socket(12, 11, 0)];
        assert_eq!(plain(&image(&before)), Some(image(&after)));
        assert_eq!(plain(&image(&after)), Some(image(&after)));
    }

    #[test]
    fn what_was_not_sent_yet_is_to_be_sent_again() {
        let stream = |unsent| {
            let entry = message(&[(1, 0), (3, 700), (STREAM_UNSENT, unsent)]).bytes();
            let length = (entry.len() as u32).to_le_bytes();
            [&[0x5a; 8][..], &length, &entry, b"seven hundred bytes"].concat()
        };
        assert_eq!(all_sent(&stream(500)), Some(stream(0)));
        assert_eq!(all_sent(&stream(500)[..15]), None);
    }

    #[test]
    fn only_files_that_are_only_written_may_change_their_size() {
        let regular = |flags, size: Option<u64>| {
            let mut inner = message(&[(1, 300), (REGULAR_FLAGS, flags)]);
            inner.0.extend(size.map(|size| (REGULAR_SIZE, Value::Number(size))));
            file(FILE_REGULAR, &inner)
        };
        let before = [regular(1, Some(70_000)), regular(0, Some(5)), regular(2, Some(6))];
        let after = [regular(1, None), regular(0, Some(5)), regular(2, Some(6))];
        assert_eq!(plain(&image(&before)), Some(image(&after)));
    }

    #[test]
    fn what_is_not_ours_passes_and_what_is_cut_off_is_refused() {
        let odd = Message(vec![
            (7, Value::Fixed(vec![1, 2, 3, 4])),
            (70_000, Value::Fixed(vec![1; 8])),
            (2, Value::Number(u64::MAX)),
            (9, Value::Bytes(b"x".to_vec())),
        ]);
        assert_eq!(Message::parse(&odd.bytes()).as_ref(), Some(&odd));
        let whole = image(&[odd]);
        assert_eq!(plain(&whole), Some(whole.clone()));
        for length in 0..whole.len() {
            // Nothing but the bare magic is an image by itself.
            assert_eq!(plain(&whole[..length]).is_some(), length == MAGIC.len(), "{length}");
        }
    }
}
