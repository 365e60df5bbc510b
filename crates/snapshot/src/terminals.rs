//! Terminals that programs have open and that are not theirs: the other end is a
//! terminal emulator's, or an ssh server's.
//!
//! CRIU brings such a terminal back only where it has it as its own standard input,
//! in its session. Here it is given one as an outsider's descriptor (`--inherit-fd
//! tty[DEVICE:FILESYSTEM]`): the one that the program had, or that of whoever asks for
//! a restore; never as the terminal that sends it signals, for whoever waits at
//! the terminal has that. Its modes stay what they are now, because a shell may have
//! changed them for its prompt. Where none is to be had, `/dev/null` is in its place.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::termios::{SpecialCodeIndex, tcgetattr, tcgetwinsize};
use strata_sys::stat_fields;

use crate::images::unknown;
use crate::message::{Message, Value, rows};

/// What terminals are in.
pub(crate) const IMAGE: &str = "tty-info.img";

// Field numbers of `tty_info_entry`, `termios_entry` and `winsize_entry`.
const ID: u64 = 1;
const SESSION: u64 = 6;
const GROUP: u64 = 7;
const DEVICE: u64 = 8;
const MODES: u64 = 9;
const WINDOW: u64 = 11;
const PTY: u64 = 12;
const FILESYSTEM: u64 = 13;
const OWNER: u64 = 14;
const OWNERS_GROUP: u64 = 15;
const PTY_INDEX: u64 = 1;
const CONTROL_CHARACTERS: u64 = 8;

/// The kernel's `c_cc`, in its order; CRIU wants 19 of them.
const CHARACTERS: [SpecialCodeIndex; 17] = [
    SpecialCodeIndex::VINTR,
    SpecialCodeIndex::VQUIT,
    SpecialCodeIndex::VERASE,
    SpecialCodeIndex::VKILL,
    SpecialCodeIndex::VEOF,
    SpecialCodeIndex::VTIME,
    SpecialCodeIndex::VMIN,
    SpecialCodeIndex::VSWTC,
    SpecialCodeIndex::VSTART,
    SpecialCodeIndex::VSTOP,
    SpecialCodeIndex::VSUSP,
    SpecialCodeIndex::VEOL,
    SpecialCodeIndex::VREPRINT,
    SpecialCodeIndex::VDISCARD,
    SpecialCodeIndex::VWERASE,
    SpecialCodeIndex::VLNEXT,
    SpecialCodeIndex::VEOL2,
];
const MOST_CHARACTERS: usize = 19;

/// Majors of terminals: consoles, `/dev/tty` and its kin, serial lines, the other ends
/// of pseudo-terminals.
const MAJORS: [u32; 4] = [4, 5, 88, 204];
const PTY_MAJORS: std::ops::RangeInclusive<u32> = 136..=143;
/// `/dev/ptmx`: an end of a pseudo-terminal that its holder made.
const MULTIPLEXER: u32 = 5 << 8 | 2;
/// `O_NOCTTY`: opened, it does not become ours.
const NO_CONTROL: i32 = 0o400;

fn major(device: u32) -> u32 {
    device >> 8 & 0xfff
}

fn is_terminal(device: u32) -> bool {
    let major = major(device);
    MAJORS.contains(&major) || PTY_MAJORS.contains(&major)
}

/// Terminals to be given to restored programs, by device number.
#[derive(Debug, Default)]
pub struct Terminals {
    found: Vec<(u32, OwnedFd)>,
    are_led: bool,
}

impl Terminals {
    /// Those that these processes have open, each opened anew: they stay when the
    /// processes have ended. One whose session a process of `pids` leads is left
    /// out: with its leader it is hung up.
    #[must_use]
    pub fn of(pids: &[u32]) -> Self {
        let led: BTreeSet<u32> = pids.iter().filter_map(|&pid| led_by(pid)).collect();
        let mut found: Vec<(u32, OwnedFd)> = Vec::new();
        for pid in pids {
            let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            for entry in entries {
                let Ok(metadata) = fs::metadata(entry.path()) else { continue };
                let device = metadata.rdev() as u32;
                let is_new = || found.iter().all(|(other, _)| *other != device);
                if !metadata.file_type().is_char_device()
                    || !is_terminal(device)
                    || device == MULTIPLEXER
                    || led.contains(&device)
                    || !is_new()
                {
                    continue;
                }
                let opened = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .custom_flags(NO_CONTROL)
                    .open(entry.path());
                found.extend(opened.ok().map(|file| (device, file.into())));
            }
        }
        Self { found, are_led: !led.is_empty() }
    }

    /// Whether one was left out because a process of theirs leads its session.
    #[must_use]
    pub fn are_led(&self) -> bool {
        self.are_led
    }

    /// These, or `others` if there are none.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        if self.found.is_empty() { others } else { self }
    }

    /// The same once more; those that no descriptor is left for are missing.
    #[must_use]
    pub fn again(&self) -> Self {
        let again = |(device, fd): &(u32, OwnedFd)| Some((*device, fd.try_clone().ok()?));
        Self { found: self.found.iter().filter_map(again).collect(), are_led: self.are_led }
    }

    /// The one with this number, or else any.
    fn get(&self, device: u32) -> Option<&OwnedFd> {
        let same = self.found.iter().find(|(number, _)| *number == device);
        same.or(self.found.first()).map(|(_, fd)| fd)
    }
}

/// The terminal of the session that this process leads.
fn led_by(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // As proc(5) counts them: the sixth and the seventh.
    let mut fields = stat_fields(&stat)?.skip(3);
    let session: u32 = fields.next()?.parse().ok()?;
    let device: i32 = fields.next()?.parse().ok()?;
    (session == pid && device != 0).then_some(device.cast_unsigned())
}

/// A terminal of the dump whose other end is an outsider's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Outer {
    /// Which it is among the terminals of the images.
    pub(crate) id: u64,
    device: u32,
    filesystem: u32,
}

impl Outer {
    /// What CRIU calls it.
    pub(crate) fn name(&self) -> String {
        format!("tty[{:x}:{:x}]", self.device, self.filesystem)
    }

    /// The terminal that is to be in its place, of those that there are.
    pub(crate) fn given(&self, terminals: &Terminals) -> Option<OwnedFd> {
        // Hung up meanwhile, it is none.
        let fd = terminals.get(self.device)?;
        tcgetattr(fd.as_fd()).ok()?;
        fd.try_clone().ok()
    }
}

/// Those among the terminals of an image.
fn outer(entries: &[Message]) -> Vec<Outer> {
    let number = |entry: &Message, field| entry.number(field).map(|value| value as u32);
    let index = |entry: &Message| entry.message(PTY).and_then(|pty| pty.number(PTY_INDEX));
    let inside: BTreeSet<u64> = entries
        .iter()
        .filter(|entry| number(entry, DEVICE) == Some(MULTIPLEXER))
        .filter_map(index)
        .collect();
    let is_outer = |entry: &&Message| {
        number(entry, DEVICE) != Some(MULTIPLEXER)
            && index(entry).is_none_or(|index| !inside.contains(&index))
    };
    let found = entries.iter().filter(is_outer).filter_map(|entry| {
        Some(Outer {
            id: entry.number(ID)?,
            device: number(entry, DEVICE)?,
            filesystem: number(entry, FILESYSTEM).unwrap_or(0),
        })
    });
    found.collect()
}

/// The outsiders' terminals in a directory of images.
pub(crate) fn outer_in(images: &Path) -> io::Result<Vec<Outer>> {
    let path = images.join(IMAGE);
    let image = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        image => image?,
    };
    let (_, entries) = rows(&image).ok_or_else(|| unknown(&path))?;
    Ok(outer(&entries))
}

/// The entry of a terminal that is given: nobody's session, and modes as they are.
pub(crate) fn given(mut entry: Message, fd: &OwnedFd) -> Message {
    for field in [SESSION, GROUP] {
        entry.set(field, Value::Number(0));
    }
    entry.0.retain(|(field, _)| ![OWNER, OWNERS_GROUP].contains(field));
    if let Ok(now) = tcgetattr(fd.as_fd()) {
        let mut modes = entry.message(MODES).unwrap_or_default();
        let flags = [
            now.input_modes.bits(),
            now.output_modes.bits(),
            now.control_modes.bits(),
            now.local_modes.bits(),
        ];
        for (field, flags) in (1..).zip(flags) {
            modes.set(field, Value::Number(flags.into()));
        }
        modes.0.retain(|(field, _)| *field != CONTROL_CHARACTERS);
        let characters = CHARACTERS.iter().map(|&index| now.special_codes[index]);
        let rest = std::iter::repeat_n(0, MOST_CHARACTERS - CHARACTERS.len());
        let fields = characters.chain(rest).map(|code| Value::Number(code.into()));
        modes.0.extend(fields.map(|value| (CONTROL_CHARACTERS, value)));
        entry.set(MODES, Value::Bytes(modes.bytes()));
    }
    if let Ok(now) = tcgetwinsize(fd.as_fd()) {
        let size = [now.ws_row, now.ws_col, now.ws_xpixel, now.ws_ypixel];
        let fields = (1..).zip(size).map(|(field, value)| (field, Value::Number(value.into())));
        entry.set(WINDOW, Value::Bytes(Message(fields.collect()).bytes()));
    }
    entry
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn entry(id: u64, device: u64, index: Option<u64>) -> Message {
        let mut entry = Message(
            [(ID, id), (SESSION, 9), (GROUP, 9), (DEVICE, device), (FILESYSTEM, 0x16), (OWNER, 0)]
                .map(|(field, value)| (field, Value::Number(value)))
                .into(),
        );
        if let Some(index) = index {
            let pty = Message(vec![(PTY_INDEX, Value::Number(index))]);
            entry.set(PTY, Value::Bytes(pty.bytes()));
        }
        entry
    }

    #[test]
    fn a_terminal_whose_other_end_is_inside_is_not_an_outsiders() {
        let multiplexer = u64::from(MULTIPLEXER);
        let entries = [
            entry(1, multiplexer, Some(4)),
            entry(2, 0x8804, Some(4)),
            entry(3, 0x8807, Some(7)),
            entry(4, 0x0500, None),
        ];
        let found = outer(&entries);
        let names: Vec<String> = found.iter().map(Outer::name).collect();
        assert_eq!(names, ["tty[8807:16]", "tty[500:16]"]);
    }

    #[test]
    fn what_is_given_is_nobodys_session() {
        let pair = || Some((File::open("/dev/ptmx").ok()?, ()));
        let Some((master, ())) = pair() else { return println!("skipped: no /dev/ptmx here") };
        let fd = OwnedFd::from(master);
        let given = given(entry(3, 0x8807, Some(7)), &fd);
        assert_eq!((given.number(SESSION), given.number(GROUP)), (Some(0), Some(0)));
        assert_eq!((given.number(OWNER), given.number(ID)), (None, Some(3)));
        let modes = given.message(MODES).expect("the modes of now");
        assert_eq!(modes.numbers(CONTROL_CHARACTERS).len(), MOST_CHARACTERS);
        assert!(given.message(WINDOW).is_some());
    }

    #[test]
    fn files_that_are_no_terminals_are_not_given() {
        let _null = File::open("/dev/null").expect("null");
        let own = Terminals::of(&[std::process::id()]);
        assert!(own.found.iter().all(|&(device, _)| is_terminal(device) && device != 0x0103));
        assert!(is_terminal(0x8807) && is_terminal(0x0500) && !is_terminal(0x0103));
        assert_eq!(Terminals::default().again().found.len(), 0);
    }
}
