//! What CRIU's images say of a process (`pstree.proto`, `core.proto`,
//! `core-x86.proto`, `mm.proto`, `vma.proto`, `regfile.proto`, `memfd.proto`).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use strata_sys::Directory;
use strata_units::{ADDRESSES_END, PAGE_SIZE};

use super::pages::{Pages, Run, runs_of};
use super::{CoreError, bad};
use crate::claims::{self, Images};
use crate::message::{Message, Value, rows};

/// Of a path, as the kernel has them.
const MOST_PATH_BYTES: usize = 4096;
/// Pieces of shared memory, each counted as often as it is mapped.
const MOST_SHARED: usize = 1 << 22;
/// `CORE_ENTRY__MARCH__X86_64`.
const X86_64: u64 = 1;
/// Of a thread's registers: a 64-bit program's (`user_x86_regs_mode`).
const NATIVE: u64 = 1;
/// Numbers of a thread's registers in `user_regs_struct`, and in CRIU's message, which
/// has them in the same order.
pub(super) const REGISTERS: u64 = 27;
/// The stack's.
const STACK: usize = 19;

/// Of a mapping's `status`.
const VSYSCALL: u64 = 0x4;
const OF_FILE: u64 = 0x40 | 0x80;
const SHARED: u64 = 0x100;
const VVAR: u64 = 0x1000;
const OF_MEMORY_FILE: u64 = 0x4000;
const GUARD: u64 = 0x1_0000;

/// A thread: its number, and its part of `core.proto`.
#[derive(Debug)]
pub(super) struct Thread {
    pub(super) tid: u32,
    /// Signals that it has blocked, one a bit.
    pub(super) blocked: u64,
    /// In the kernel's order.
    pub(super) registers: Vec<u64>,
    /// `user_x86_fpregs_entry`.
    pub(super) floating: Message,
}

/// A range of addresses with one kind of content.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Mapping {
    pub(super) range: Range<u64>,
    /// `PROT_READ`, `PROT_WRITE`, `PROT_EXEC`.
    pub(super) protection: u32,
    /// Of a file that is on disk: which in [`Process::paths`], and its byte there.
    pub(super) file: Option<(u64, u64)>,
}

/// What CRIU's images say of a process.
#[derive(Debug)]
pub struct Process {
    pub(super) pid: u32,
    pub(super) parent: u32,
    pub(super) group: u32,
    pub(super) session: u32,
    pub(super) user: u32,
    pub(super) user_group: u32,
    pub(super) nice: u8,
    pub(super) name: Vec<u8>,
    /// The first one is the process's own.
    pub(super) threads: Vec<Thread>,
    pub(super) auxiliary: Vec<u64>,
    /// Where its command line is.
    pub(super) arguments: Range<u64>,
    /// In order, without overlaps.
    pub(super) mappings: Vec<Mapping>,
    /// Of files, by their numbers in the images.
    pub(super) paths: BTreeMap<u64, Vec<u8>>,
    /// Pages that CRIU has: its own ones, and those that it shares.
    pub(super) pages: Pages,
}

/// The images, as messages.
struct Found<'a>(&'a Images);

impl Found<'_> {
    fn rows(&self, name: &str) -> Result<Vec<Message>, CoreError> {
        let image = self.0.get(name).ok_or_else(|| bad(name, "is missing"))?;
        let (_, rows) = rows(image).ok_or_else(|| bad(name, "is none that this version knows"))?;
        Ok(rows)
    }

    /// The same; none, where there is no such image.
    fn rows_if_there(&self, name: &str) -> Result<Vec<Message>, CoreError> {
        if self.0.contains_key(name) { self.rows(name) } else { Ok(Vec::new()) }
    }

    fn one(&self, name: &str) -> Result<Message, CoreError> {
        self.rows(name)?.into_iter().next().ok_or_else(|| bad(name, "is empty"))
    }

    /// Where CRIU has pages, by their addresses or their places in shared memory.
    fn runs(&self, name: &str) -> Result<Vec<Run>, CoreError> {
        let rows = self.rows_if_there(name)?;
        let Some((head, entries)) = rows.split_first() else { return Ok(Vec::new()) };
        let pages = head.number(1).unwrap_or(0);
        runs_of(pages, entries).ok_or_else(|| bad(name, "is none that this version knows"))
    }
}

fn long(message: &Message, field: u64) -> u64 {
    message.number(field).unwrap_or(0)
}

fn int(message: &Message, field: u64) -> u32 {
    long(message, field) as u32
}

/// All values of a repeated field.
fn longs(message: &Message, wanted: u64) -> Vec<u64> {
    let values = message.0.iter().filter_map(|(name, value)| match value {
        Value::Number(number) if *name == wanted => Some(*number),
        _ => None,
    });
    values.collect()
}

/// All messages of a repeated field; none: one is no message.
fn messages(message: &Message, wanted: u64) -> Option<Vec<Message>> {
    let values = message.0.iter().filter_map(|(name, value)| match value {
        Value::Bytes(bytes) if *name == wanted => Some(Message::parse(bytes)),
        _ => None,
    });
    values.collect()
}

fn thread(found: &Found<'_>, tid: u32) -> Result<(Thread, Message), CoreError> {
    let core = found.one(&format!("core-{tid}.img"))?;
    let registers = core.message(2).filter(|_| long(&core, 1) == X86_64);
    let other = || CoreError::OtherMachine(tid);
    let info = registers.ok_or_else(other)?;
    let general = info.message(2).ok_or_else(other)?;
    if general.number(28).is_some_and(|mode| mode != NATIVE) {
        return Err(other());
    }
    let own = core.message(5).unwrap_or_default();
    let thread = Thread {
        tid,
        blocked: long(&own, 6),
        registers: (1..=REGISTERS).map(|field| long(&general, field)).collect(),
        floating: info.message(3).unwrap_or_default(),
    };
    Ok((thread, core))
}

/// Paths of open and mapped files, and of memory files which shared memory they are.
struct Files {
    paths: BTreeMap<u64, Vec<u8>>,
    memory: BTreeMap<u64, u64>,
}

fn files(found: &Found<'_>) -> Result<Files, CoreError> {
    let memory_files: BTreeMap<u64, u64> = found
        .rows_if_there("memfd.img")?
        .iter()
        .map(|inode| (long(inode, 7), long(inode, 5)))
        .collect();
    let mut files = Files { paths: BTreeMap::new(), memory: BTreeMap::new() };
    for entry in found.rows("files.img")? {
        let id = long(&entry, 2);
        if let Some(regular) = entry.message(3) {
            let mut path = regular.bytes_of(6).unwrap_or_default().to_vec();
            path.truncate(MOST_PATH_BYTES);
            path.retain(|&byte| byte != 0);
            files.paths.insert(id, path);
        } else if let Some(memory) = entry.message(20)
            && let Some(&shared) = memory_files.get(&long(&memory, 5))
        {
            files.memory.insert(id, shared);
        }
    }
    Ok(files)
}

/// The mappings of a process, and where CRIU has the pages of those that are shared.
fn mappings(
    found: &Found<'_>,
    image: &str,
    listed: &[Message],
    files: &Files,
) -> Result<(Vec<Mapping>, Vec<Run>), CoreError> {
    let (mut mappings, mut shared) = (Vec::<Mapping>::new(), Vec::new());
    let mut known = BTreeMap::new();
    for entry in listed {
        let (range, status) = (long(entry, 1)..long(entry, 2), long(entry, 7));
        if status & (VSYSCALL | GUARD) != 0 {
            continue;
        }
        let is_page = |address: u64| address.is_multiple_of(PAGE_SIZE as u64);
        let follows = mappings.last().is_none_or(|last| last.range.end <= range.start);
        let offset = long(entry, 3);
        let is_sound =
            range.start < range.end && range.end <= ADDRESSES_END && offset < ADDRESSES_END;
        if !follows || !is_sound || ![range.start, range.end, offset].into_iter().all(is_page) {
            return Err(bad(image, "has mappings that no program has"));
        }
        let id = long(entry, 4);
        let memory = match status {
            status if status & OF_MEMORY_FILE != 0 => files.memory.get(&id).copied(),
            status if status & SHARED != 0 => Some(id),
            _ => None,
        };
        if let Some(memory) = memory {
            let runs = match known.entry(memory) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => {
                    entry.insert(found.runs(&format!("pagemap-shmem-{memory}.img"))?)
                }
            };
            shared.extend(runs.iter().filter_map(|run| run.shown_at(offset, &range)));
            if shared.len() > MOST_SHARED {
                return Err(bad(image, "has more shared memory than any program"));
            }
        }
        let is_on_disk = status & OF_FILE != 0 && memory.is_none();
        mappings.push(Mapping {
            range,
            protection: if status & VVAR != 0 { 0 } else { int(entry, 5) & 7 },
            file: is_on_disk.then_some((id, offset)),
        });
    }
    Ok((mappings, shared))
}

impl Process {
    /// Reads the images of the process `pid` in a directory. Threads whose stack is in
    /// `agent` are none of the program's.
    ///
    /// # Errors
    /// See [`CoreError`].
    pub fn read(directory: &Path, pid: u32, agent: &Range<u64>) -> Result<Self, CoreError> {
        let images = claims::load(directory).map_err(CoreError::Images)?;
        let directory = Directory::open(directory).map_err(CoreError::Images)?;
        Self::of(&images, directory, pid, agent)
    }

    /// The same of images that were read; contents of memory are in `directory`.
    ///
    /// # Errors
    /// See [`CoreError`].
    pub fn of(
        images: &Images,
        directory: Directory,
        pid: u32,
        agent: &Range<u64>,
    ) -> Result<Self, CoreError> {
        let found = Found(images);
        let tree = found.rows("pstree.img")?;
        let Some(place) = tree.iter().find(|process| int(process, 1) == pid) else {
            let pids: Vec<String> =
                tree.iter().map(|process| int(process, 1).to_string()).collect();
            return Err(CoreError::NoProcess { pid, there: pids.join(", ") });
        };
        let (first, core) = thread(&found, pid)?;
        let others: BTreeSet<u32> =
            place.numbers(5).into_iter().filter(|&tid| tid != pid).collect();
        let mut threads = vec![first];
        for tid in others {
            let (other, _) = thread(&found, tid)?;
            if !agent.contains(&other.registers[STACK]) {
                threads.push(other);
            }
        }
        let image = format!("mm-{pid}.img");
        let memory = found.one(&image)?;
        let listed = messages(&memory, 14).ok_or_else(|| bad(&image, "is cut off"))?;
        let files = files(&found)?;
        let (mappings, shared) = mappings(&found, &image, &listed, &files)?;
        let (own, task) =
            (core.message(5).unwrap_or_default(), core.message(3).unwrap_or_default());
        let credentials = own.message(10).unwrap_or_default();
        Ok(Self {
            pid,
            parent: int(place, 2),
            group: int(place, 3),
            session: int(place, 4),
            user: int(&credentials, 1),
            user_group: int(&credentials, 2),
            nice: long(&own, 3) as u8,
            name: task.bytes_of(6).unwrap_or_default().to_vec(),
            threads,
            auxiliary: longs(&memory, 13),
            arguments: long(&memory, 8)..long(&memory, 9),
            mappings,
            paths: files.paths,
            pages: Pages::new(directory, [found.runs(&format!("pagemap-{pid}.img"))?, shared]),
        })
    }
}
