//! What is said when a tenant moves from one daemon to another: on the way between the
//! two, and between each and its own command line, which carries it.
//!
//! ```text
//! daemon ── strata move ══ ssh, or a pipe ══ strata receive ── daemon
//! ```
//! All of it is frames: kind (1 byte), length (4 bytes, little-endian), content. What two
//! daemons say is words ([`MoveWord`], JSON) and data, pieces of snapshot files. What is
//! for a daemon's own command line ([`MoveNear`], JSON) is not passed on.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use crate::{MAX_PATH_BYTES, Progress, Reply, SnapshotId};

/// Longest frame.
pub const MAX_FRAME_BYTES: usize = 1 << 20;
/// The hint of a daemon that has given a tenant up and does not know whether it runs there.
pub const MOVE_UNSETTLED: &str = "settle it: strata move --settle NAME HOST";
/// The hint of a daemon that has pages of a tenant that runs elsewhere.
pub const MOVE_LENT: &str = "give them: strata move --settle NAME HOST";
/// Raised when the meaning of a word changes; other versions are refused.
pub const MOVE_VERSION: u32 = 2;
/// What is said in its place where disks go along: who does not know how refuses that.
pub const MOVE_DISKS_VERSION: u32 = 3;
/// And of a guest that disks are served to, whether disks go along or not.
pub const MOVE_SERVED_VERSION: u32 = 4;
/// What is said in its place where pages come after the switch (`--at-once`).
pub const MOVE_AT_ONCE_VERSION: u32 = 5;
/// And where it is a program that they are of.
pub const MOVE_PROGRAM_AT_ONCE_VERSION: u32 = 6;
/// Disks that go along with one guest; each has a connection of its own.
pub const MOST_MOVE_DISKS: usize = 6;
/// Images that one disk is an overlay of, over each other.
const MOST_LAYERS: usize = 64;

/// What a frame has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameKind {
    /// A [`MoveWord`].
    Word,
    /// A piece of a snapshot file.
    Data,
    /// A [`MoveNear`].
    Near,
}

impl FrameKind {
    const ALL: [(Self, u8); 3] = [(Self::Word, b'w'), (Self::Data, b'd'), (Self::Near, b'n')];
}

/// Writes one frame.
///
/// # Errors
/// What the stream says; or the content is too long.
pub fn write_frame(mut to: impl Write, kind: FrameKind, content: &[u8]) -> io::Result<()> {
    if content.len() > MAX_FRAME_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a frame is too long"));
    }
    let byte = FrameKind::ALL.iter().find(|known| known.0 == kind).map_or(0, |known| known.1);
    let mut frame = Vec::with_capacity(5 + content.len());
    frame.push(byte);
    frame.extend_from_slice(&(content.len() as u32).to_le_bytes());
    frame.extend_from_slice(content);
    to.write_all(&frame)?;
    to.flush()
}

/// Reads one frame; none: the stream has ended.
///
/// # Errors
/// What the stream says, or it is no frame.
pub fn read_frame(mut from: impl Read) -> io::Result<Option<(FrameKind, Vec<u8>)>> {
    let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut head = [0; 5];
    loop {
        match from.read(&mut head[..1]) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    from.read_exact(&mut head[1..])?;
    let [byte, length @ ..] = head;
    let length = u32::from_le_bytes(length) as usize;
    let kind = FrameKind::ALL.iter().find(|known| known.1 == byte);
    let kind = kind.ok_or_else(|| invalid("what arrives is no frame"))?.0;
    if length > MAX_FRAME_BYTES {
        return Err(invalid("what arrives is longer than a frame"));
    }
    let mut content = Vec::new();
    from.take(length as u64).read_to_end(&mut content)?;
    match content.len() == length {
        true => Ok(Some((kind, content))),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// What two daemons say to each other.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "snake_case", deny_unknown_fields)]
pub enum MoveWord {
    /// A tenant is to move. Answered by `welcome` or `never`.
    Hello {
        /// [`MOVE_VERSION`].
        version: u32,
        /// Of this move.
        id: String,
        /// The tenant.
        name: String,
        /// The daemon that it comes from.
        home: String,
    },
    /// It may come.
    Welcome,
    /// It is to run there before all of it has come: pages are asked for then. Not answered.
    Lends {
        /// What the machine is called that it comes from.
        from: String,
    },
    /// Pages are needed of a process that stands still on the other side. Answered by data, in
    /// the order in which it was asked, and before any word.
    Pages {
        /// Its number there.
        pid: u32,
        /// Addresses of first pages, and how many: all together as many as are sent at a time.
        ranges: Vec<(u64, u32)>,
    },
    /// It runs, and so many of its pages are still on the other side.
    Owing {
        /// That.
        pages: u64,
    },
    /// Disks go along: an image is to be made for each. Answered by `room` or `never`.
    Disks {
        /// In their order from here on.
        disks: Vec<MoveDisk>,
    },
    /// The images are there, empty.
    Room {
        /// Whether each is an overlay, as it was: what that is over is there and alike.
        over: Vec<bool>,
    },
    /// Disks are being copied: for some time nothing else is said.
    Copying,
    /// First word of a connection of its own: what follows as data is what two QEMUs say
    /// about a disk. Answered by `welcome` or `never`.
    Way {
        /// [`MOVE_DISKS_VERSION`].
        version: u32,
        /// Of the move.
        id: String,
        /// Which disk, from 0 on.
        number: u32,
    },
    /// A snapshot file follows as data, up to `end`: all memory in the first, what has
    /// changed since in the others.
    Archive {
        /// The tenant stands still: it is all there then.
        last: bool,
    },
    /// It stands still, and a snapshot file of some of what has changed follows as data, up to
    /// `end`. More of these, or the last archive, come without an answer.
    Piece,
    /// The snapshot file is whole.
    End,
    /// It is taken in.
    Taken,
    /// The tenant is there, whole, and stands still.
    Ready,
    /// Let it run: it does not here any more.
    Go,
    /// It runs.
    Running,
    /// It does not run there, and never will.
    Never {
        /// Why.
        why: String,
    },
    /// What became of a move whose `go` was not answered. Answered by `running` or `never`.
    Ask {
        /// [`MOVE_VERSION`].
        version: u32,
        /// Of the move.
        id: String,
        /// The tenant.
        name: String,
    },
    /// The answer has arrived: it need not be remembered any more.
    Settled,
}

/// A disk that goes along with a guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveDisk {
    /// The image: an absolute path.
    pub path: String,
    /// `raw` or `qcow2`.
    pub format: String,
    /// What the guest sees of it; of a raw image, how long its file is.
    pub size_bytes: u64,
    /// What it takes of its file system.
    pub used_bytes: u64,
    /// Who may use the file, whose it is.
    pub mode: u32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// It goes when the guest has ended.
    pub temporary: bool,
    /// What it is an overlay of, as its header says, and that one's format; none: nothing
    /// that can be elsewhere.
    pub backing: Option<(String, String)>,
    /// All images that it is over, the nearest first.
    pub layers: Vec<MoveImage>,
}

/// An image that has to be there already, to be compared.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveImage {
    /// An absolute path.
    pub path: String,
    /// Of the file.
    pub bytes: u64,
    /// Of pieces all over it.
    pub sum: u64,
}

impl MoveDisk {
    /// What is wrong with it as it stands; none: nothing is.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        let is_plain = |text: &str| {
            !text.is_empty() && text.len() <= MAX_PATH_BYTES && !text.chars().any(char::is_control)
        };
        let is_path = |text: &str| {
            let mut parts = text.split('/');
            parts.next() == Some("")
                && is_plain(text)
                && parts.all(|part| !["", ".", ".."].contains(&part))
        };
        let is_format = |text: &str| ["raw", "qcow2"].contains(&text);
        // With a colon QEMU may take it for something else than a file.
        let is_file = |text: &str| is_plain(text) && !text.contains(':');
        let backing = self.backing.as_ref();
        if !is_path(&self.path) {
            Some("the path of a disk")
        } else if !is_format(&self.format)
            || self.size_bytes == 0
            || self.size_bytes > i64::MAX as u64
        {
            Some("the format or the size of a disk")
        } else if backing.is_some_and(|(name, format)| !is_file(name) || !is_format(format))
            || backing.is_some() && (self.format != "qcow2" || self.layers.is_empty())
            || self.layers.len() > MOST_LAYERS
            || !self.layers.iter().all(|image| is_path(&image.path))
        {
            Some("what a disk is an overlay of")
        } else {
            None
        }
    }
}

/// What a daemon and its own command line say to each other.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "near", rename_all = "snake_case", deny_unknown_fields)]
pub enum MoveNear {
    /// The request was read: what follows is frames, in both directions.
    Begun,
    /// How far it is.
    Progress {
        /// That.
        progress: Progress,
    },
    /// The end of it.
    Reply {
        /// That.
        reply: Reply,
    },
    /// Have a guest begun of this snapshot, which waits.
    StartGuest {
        /// Which.
        snapshot: SnapshotId,
        /// The tenant.
        name: String,
        /// Programs that serve disks to it.
        servers: u32,
    },
    /// It waits, in this QEMU.
    Started {
        /// Its number.
        pid: u32,
    },
    /// It could not be.
    Failed {
        /// Why.
        why: String,
    },
    /// From now on the guest is not ended when the connection is.
    Committed,
    /// Open another connection to the other host, for a disk ([`crate::Request::MoveDisk`]).
    Way {
        /// Of the move.
        id: String,
        /// Which disk.
        number: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_out_as_they_went_in() {
        let mut bytes = Vec::new();
        for (kind, content) in [(FrameKind::Word, &b"{}"[..]), (FrameKind::Data, b"")] {
            write_frame(&mut bytes, kind, content).expect("written");
        }
        let mut from = &bytes[..];
        let read = |from: &mut &[u8]| read_frame(from).expect("a frame");
        assert_eq!(read(&mut from), Some((FrameKind::Word, b"{}".to_vec())));
        assert_eq!(read(&mut from), Some((FrameKind::Data, Vec::new())));
        assert_eq!(read(&mut from), None);
        for cut in 1..7 {
            assert!(read_frame(&bytes[..cut]).is_err(), "{cut}");
        }
        assert!(read_frame(&b"x\0\0\0\0"[..]).is_err());
        assert!(read_frame(&b"w\xff\xff\xff\xff"[..]).is_err());
        assert!(write_frame(Vec::new(), FrameKind::Data, &vec![0; MAX_FRAME_BYTES + 1]).is_err());
    }

    #[test]
    fn a_disk_that_is_none_is_refused_by_what_is_wrong() {
        let image = MoveImage { path: "/d/base".into(), bytes: 5, sum: 7 };
        let disk = MoveDisk {
            path: "/d/a.qcow2".into(),
            format: "qcow2".into(),
            size_bytes: 1 << 20,
            used_bytes: 0,
            mode: 0o644,
            uid: 0,
            gid: 0,
            temporary: false,
            backing: Some(("base".into(), "raw".into())),
            layers: vec![image],
        };
        assert_eq!(disk.problem(), None);
        for path in ["", "a", "/", "/d/", "/d/../a", "/d/./a", "//a", "/d/a\n"] {
            let other = MoveDisk { path: path.into(), ..disk.clone() };
            assert_eq!(other.problem(), Some("the path of a disk"), "{path:?}");
        }
        let other = MoveDisk { format: "vmdk".into(), ..disk.clone() };
        assert_eq!(other.problem(), Some("the format or the size of a disk"));
        let other = MoveDisk { size_bytes: 0, ..disk.clone() };
        assert_eq!(other.problem(), Some("the format or the size of a disk"));
        for backing in ["nbd:unix:/x", "json:{}", "", "a\tb"] {
            let other = MoveDisk { backing: Some((backing.into(), "raw".into())), ..disk.clone() };
            assert_eq!(other.problem(), Some("what a disk is an overlay of"), "{backing:?}");
        }
        let other = MoveDisk { layers: Vec::new(), ..disk };
        assert_eq!(other.problem(), Some("what a disk is an overlay of"));
    }
}
