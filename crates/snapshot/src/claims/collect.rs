//! From checked images to claims. What is said in words here is docs/snapshot-claims.md.

mod files;

use std::collections::{BTreeMap, BTreeSet};

use super::owner::LOWEST_ADDRESS;
use super::schema::{Form, kind_of, read};
use super::{Claim, Images, What};
use crate::message::{Message, Value};

/// Fields of `task_kobj_ids_entry` that name namespaces.
const NAMESPACES: [(u64, &str); 8] = [
    (5, "process number"),
    (6, "network"),
    (7, "IPC"),
    (8, "host name"),
    (9, "mount"),
    (10, "user"),
    (11, "cgroup"),
    (12, "time"),
];

/// Of a mapping's `status`: what a program gets by `mmap` and from the kernel.
const PLAIN_MAPPING: u32 = 0x1 // regular
    | 0x2 // stack
    | 0x4 // vsyscall
    | 0x8 // vDSO
    | 0x20 // heap
    | 0x40 | 0x80 // of a file, private and shared
    | 0x100 | 0x200 // of none, shared and private
    | 0x1000 // vvar
    | 0x4000 // of a memory file
    | 0x8000 // shadow stack
    | 0x10000; // guard pages
const VSYSCALL: u32 = 0x4;
const OF_FILE: u32 = 0x40 | 0x80;
const OF_MEMORY_FILE: u32 = 0x4000;
/// Of a mapping's `flags`: `MAP_SHARED`, `MAP_PRIVATE`, `MAP_FIXED`, `MAP_ANONYMOUS`,
/// `MAP_GROWSDOWN`, `MAP_LOCKED`, `MAP_NORESERVE`, `MAP_STACK`.
const PLAIN_MAP_FLAGS: u32 = 0x1 | 0x2 | 0x10 | 0x20 | 0x100 | 0x2000 | 0x4000 | 0x20000;
const MAP_LOCKED: u32 = 0x2000;

const ALL_IDS: [&str; 4] = ["real", "effective", "saved", "file system"];
/// `FL_POSIX`, `FL_FLOCK`, `FL_OFDLCK`.
const LOCKS: [u32; 3] = [1, 2, 1024];
const NOT_DUMPABLE_BY_OTHERS: u32 = 1;
/// Of the seccomp entry of a thread: none.
const NO_SECCOMP: u32 = 0;
const LINK_OF_PROC: u32 = 2;

/// A field that is a number of 32 bits; 0 where there is none, as it means to CRIU.
fn int(message: &Message, field: u64) -> u32 {
    message.number(field).unwrap_or(0) as u32
}

fn optional(message: &Message, field: u64) -> Option<u32> {
    message.number(field).map(|value| value as u32)
}

fn long(message: &Message, field: u64) -> u64 {
    message.number(field).unwrap_or(0)
}

fn text(message: &Message, field: u64) -> String {
    String::from_utf8_lossy(message.bytes_of(field).unwrap_or_default()).into_owned()
}

/// Zigzag, as signed numbers of CRIU's are where they may be negative.
fn signed(value: u32) -> i32 {
    (value >> 1).cast_signed() ^ -((value & 1).cast_signed())
}

struct Collector<'a> {
    images: &'a Images,
    claims: Vec<Claim>,
    /// By kind and number.
    read: BTreeMap<(&'static str, Option<u64>), Vec<Message>>,
    pids: BTreeSet<u32>,
    /// Of each process, its threads.
    threads: BTreeMap<u32, Vec<u32>>,
    /// Which process has a file: the first one.
    holders: BTreeMap<u32, u32>,
    /// Files that have a path.
    paths: BTreeMap<u32, String>,
    /// Those of whoever took the snapshot.
    root_ids: Message,
}

pub(super) fn collect(images: &Images) -> Vec<Claim> {
    let mut this = Collector {
        images,
        claims: Vec::new(),
        read: BTreeMap::new(),
        pids: BTreeSet::new(),
        threads: BTreeMap::new(),
        holders: BTreeMap::new(),
        paths: BTreeMap::new(),
        root_ids: Message::default(),
    };
    this.read_all();
    this.tree();
    let files = this.take("files");
    this.name_files(&files);
    this.setup();
    let pids: Vec<u32> = this.pids.iter().copied().collect();
    for &pid in &pids {
        this.process(pid);
    }
    this.strays();
    files.iter().for_each(|file| this.file(file));
    this.others();
    this.claims
}

impl Collector<'_> {
    fn claim(&mut self, process: Option<u32>, what: What) {
        self.claims.push(Claim { process, what });
    }

    fn unknown(&mut self, what: impl Into<String>) {
        self.claim(None, What::Unknown(what.into()));
    }

    /// The rows of an image that there is one of; they are looked at once.
    fn take(&mut self, name: &'static str) -> Vec<Message> {
        self.read.remove(&(name, None)).unwrap_or_default()
    }

    fn is_there(&self, name: &'static str, number: u32) -> bool {
        self.read.contains_key(&(name, Some(number.into())))
    }

    /// The one row of the image of this number.
    fn one(&mut self, name: &'static str, number: u32) -> Option<Message> {
        let rows = self.read.get_mut(&(name, Some(number.into())))?;
        // Left empty: that it is there is still known.
        std::mem::take(rows).into_iter().next()
    }

    fn name_files(&mut self, files: &[Message]) {
        let mut seen = BTreeSet::new();
        for file in files {
            let id = int(file, 2);
            if !seen.insert(id) {
                self.unknown(format!("open file {id} is there twice"));
            }
            if let Some(regular) = file.message(3) {
                self.paths.insert(id, text(&regular, 6));
            }
        }
    }

    fn read_all(&mut self) {
        for (name, bytes) in self.images {
            let Some((kind, number)) = kind_of(name) else {
                self.unknown(format!("image {name}"));
                continue;
            };
            match read(kind, bytes) {
                Ok(messages) => {
                    if self.read.insert((kind.name, number), messages).is_some() {
                        self.unknown(format!("image {name} is there twice"));
                    }
                }
                Err(why) => self.unknown(format!("image {name}: {why}")),
            }
            if matches!(kind.form, Form::Beginning) {
                match kind.name {
                    "tcp-stream-" => {
                        let named = name.trim_end_matches(".img").to_owned();
                        self.claim(None, What::Connection(named));
                    }
                    "ghost-file-" => self.claim(None, What::Unlinked(name.clone())),
                    _ => self.claim(None, What::Terminal),
                }
            }
        }
    }

    /// Who is there, and of which sessions and groups.
    fn tree(&mut self) {
        let tree = self.take("pstree");
        if tree.is_empty() {
            self.unknown("no list of processes");
        }
        let mut threads = BTreeSet::new();
        for process in &tree {
            let pid = int(process, 1);
            if !self.pids.insert(pid) {
                self.unknown(format!("process {pid} is there twice"));
            }
            threads.extend(process.numbers(5));
            self.threads.insert(pid, process.numbers(5));
        }
        // The first one's own are replaced by those of whoever restores.
        let root = tree.first().map(|root| (int(root, 3), int(root, 4)));
        for process in &tree {
            let pid = int(process, 1);
            let (group, session) = (int(process, 3), int(process, 4));
            for (kind, number, of_root) in [
                ("process group", group, root.map(|root| root.0)),
                ("session", session, root.map(|root| root.1)),
            ] {
                if !self.pids.contains(&number) && of_root != Some(number) {
                    self.claim(Some(pid), What::Foreign(kind, number));
                }
            }
            let parent = int(process, 2);
            if parent != 0 && !self.pids.contains(&parent) {
                self.claim(Some(pid), What::Foreign("parent", parent));
            }
        }
        // Every thread has an image of its own.
        for number in threads {
            if !self.pids.contains(&number) && !self.is_there("core-", number) {
                self.unknown(format!("thread {number} has no image"));
            }
        }
    }

    fn setup(&mut self) {
        let Some(inventory) = self.take("inventory").pop() else {
            return self.unknown("no inventory");
        };
        self.root_ids = inventory.message(3).unwrap_or_default();
        let inventory = &inventory;
        let version = int(inventory, 1);
        if version != 2 {
            self.claim(None, What::Setup(format!("images of version {version}")));
        }
        // Before they were as they are now, they could be read otherwise.
        for (field, name) in [(2, "files per process"), (4, "namespaces per process")] {
            if int(inventory, field) != 1 {
                self.claim(None, What::Setup(format!("without {name}")));
            }
        }
        if inventory.message(12).is_some_and(|plugins| !plugins.0.is_empty()) {
            self.claim(None, What::Setup("plug-ins of CRIU".into()));
        }
        if int(inventory, 14) != 0 {
            self.claim(None, What::Setup("uprobes".into()));
        }
        if int(inventory, 9) != 0 {
            self.claim(None, What::Setup("a dump before this one".into()));
        }
    }

    fn process(&mut self, pid: u32) {
        if !self.is_there("core-", pid) {
            self.unknown(format!("process {pid} has no image"));
        }
        if let Some(ids) = self.one("ids-", pid) {
            self.ids(pid, &ids);
        }
        if let Some(place) = self.one("fs-", pid) {
            self.holders.entry(int(&place, 1)).or_insert(pid);
            self.root_of(pid, int(&place, 2));
        }
        if let Some(memory) = self.one("mm-", pid) {
            self.memory(pid, &memory);
        }
        let threads = self.threads.get(&pid).cloned().unwrap_or_default();
        for thread in threads.into_iter().chain([pid]) {
            if let Some(core) = self.one("core-", thread) {
                self.core(pid, &core);
            }
        }
    }

    /// Images with a number that no process has are not read by CRIU, as far as is
    /// known; then nobody needs them.
    fn strays(&mut self) {
        let mut known = self.pids.clone();
        known.extend(self.threads.values().flatten());
        let per_process = ["core-", "ids-", "fs-", "mm-", "pagemap-"];
        let strays: Vec<String> = self
            .read
            .keys()
            .filter_map(|(name, number)| {
                let number = (*number)?;
                let is_stray = per_process.contains(name)
                    && !u32::try_from(number).is_ok_and(|number| known.contains(&number));
                is_stray.then(|| format!("image {name}{number} is nobody's"))
            })
            .collect();
        strays.into_iter().for_each(|stray| self.unknown(stray));
    }

    fn ids(&mut self, pid: u32, ids: &Message) {
        for (field, name) in NAMESPACES {
            let own = optional(ids, field);
            if own.is_some() && own != optional(&self.root_ids, field) {
                self.claim(Some(pid), What::Namespace(name));
            }
        }
        let table = ("fdinfo-", Some(u64::from(int(ids, 2))));
        for descriptor in self.read.get(&table).into_iter().flatten() {
            self.holders.entry(int(descriptor, 1)).or_insert(pid);
        }
    }

    fn root_of(&mut self, pid: u32, file: u32) {
        self.holders.entry(file).or_insert(pid);
        match self.paths.get(&file) {
            Some(path) if path == "/" => {}
            Some(path) => self.claim(Some(pid), What::Root(path.clone())),
            None => self.claim(Some(pid), What::Root("that is not there".into())),
        }
    }

    fn memory(&mut self, pid: u32, memory: &Message) {
        let mut locked = 0u64;
        self.holders.entry(int(memory, 12)).or_insert(pid);
        for (field, value) in &memory.0 {
            let Value::Bytes(bytes) = value else { continue };
            let Some(mapping) = Message::parse(bytes).filter(|_| *field == 14) else { continue };
            let (start, end) = (long(&mapping, 1), long(&mapping, 2));
            let (flags, status) = (int(&mapping, 6), int(&mapping, 7));
            let odd = status & !PLAIN_MAPPING;
            if odd != 0 {
                self.claim(Some(pid), What::Memory(format!("of kind {odd:#x} at {start:#x}")));
            }
            if flags & !PLAIN_MAP_FLAGS != 0 {
                let odd = flags & !PLAIN_MAP_FLAGS;
                self.claim(Some(pid), What::Memory(format!("with flags {odd:#x} at {start:#x}")));
            }
            if start < LOWEST_ADDRESS || end <= start {
                self.claim(Some(pid), What::Memory(format!("from {start:#x} to {end:#x}")));
            }
            let kernels = status & VSYSCALL != 0;
            if end > 1 << 56 && !kernels {
                self.claim(Some(pid), What::Memory(format!("up to {end:#x}")));
            }
            if flags & MAP_LOCKED != 0 {
                locked = locked.saturating_add(end.saturating_sub(start));
            }
            if status & (OF_FILE | OF_MEMORY_FILE) != 0 {
                self.holders.entry(long(&mapping, 4) as u32).or_insert(pid);
            }
        }
        if locked > 0 {
            self.claim(Some(pid), What::LockedMemory(locked));
        }
        if memory.0.iter().any(|(field, _)| *field == 16) {
            self.claim(Some(pid), What::Memory("rings of asynchronous I/O".into()));
        }
        if int(memory, 15) > NOT_DUMPABLE_BY_OTHERS {
            self.claim(Some(pid), What::Memory("that only root may dump".into()));
        }
    }

    fn core(&mut self, pid: u32, core: &Message) {
        if let Some(ids) = core.message(4) {
            self.ids(pid, &ids);
        }
        if let Some(task) = core.message(3) {
            self.task(pid, &task);
        }
        if let Some(thread) = core.message(5) {
            self.thread(pid, &thread);
        }
    }

    fn task(&mut self, pid: u32, task: &Message) {
        if let Some(user) = optional(task, 13) {
            self.claim(Some(pid), What::LoginUser(user));
        }
        if let Some(score) = optional(task, 14) {
            self.claim(Some(pid), What::SparedByOomKiller(score.cast_signed()));
        }
        // Before threads had their own.
        if int(task, 11) != NO_SECCOMP {
            self.claim(Some(pid), What::FilterWithPrivileges);
        }
        let limits = task.message(8).unwrap_or_default();
        for (which, (_, value)) in limits.0.iter().enumerate() {
            if let Value::Bytes(bytes) = value {
                let limit = Message::parse(bytes).unwrap_or_default();
                self.claim(Some(pid), What::Limit(which, long(&limit, 2)));
            }
        }
    }

    fn thread(&mut self, pid: u32, thread: &Message) {
        let nice = signed(int(thread, 3));
        if nice < 0 {
            self.claim(Some(pid), What::Scheduling(format!("nice {nice}")));
        }
        // `SCHED_OTHER`, `SCHED_BATCH`, `SCHED_IDLE`.
        let policy = int(thread, 4);
        if ![0, 3, 5].contains(&policy) || int(thread, 5) != 0 {
            let priority = int(thread, 5);
            let what = format!("policy {policy}, priority {priority}");
            self.claim(Some(pid), What::Scheduling(what));
        }
        let credentials = thread.message(10);
        let has_given_up = credentials.as_ref().is_some_and(|own| int(own, 18) == 1);
        if int(thread, 11) != NO_SECCOMP && !has_given_up {
            self.claim(Some(pid), What::FilterWithPrivileges);
        }
        match credentials {
            Some(credentials) => self.credentials(pid, &credentials),
            // CRIU leaves it as it is itself.
            None => self.claim(Some(pid), What::User(0)),
        }
    }

    fn credentials(&mut self, pid: u32, credentials: &Message) {
        for index in 0..ALL_IDS.len() as u64 {
            self.claim(Some(pid), What::User(int(credentials, 1 + 2 * index)));
            self.claim(Some(pid), What::Group(int(credentials, 2 + 2 * index)));
        }
        for group in credentials.numbers(14) {
            self.claim(Some(pid), What::Group(group));
        }
        // What is only a bound gives nothing.
        for (field, set) in
            [(9, "inheritable"), (10, "permitted"), (11, "effective"), (19, "ambient")]
        {
            let words = credentials.numbers(field);
            let bits = words.iter().rev().fold(0u64, |bits, word| bits << 32 | u64::from(*word));
            if bits != 0 || words.len() > 2 {
                self.claim(Some(pid), What::Capabilities(set, bits));
            }
        }
        let bits = int(credentials, 13);
        if bits != 0 {
            self.claim(Some(pid), What::SecureBits(bits));
        }
        for field in [15, 16, 17] {
            if credentials.bytes_of(field).is_some() {
                self.claim(Some(pid), What::SecurityLabel(text(credentials, field)));
            }
        }
    }

    /// What is of no process alone.
    fn others(&mut self) {
        for file in self.take("memfd") {
            let (user, group) = (int(&file, 2), int(&file, 3));
            let mode = optional(&file, 9).unwrap_or(0o777);
            self.claim(None, What::MemoryFile(user, group, mode & 0o7777));
            if int(&file, 8) != 0 {
                self.claim(None, What::Memory("file in huge pages".into()));
            }
        }
        for lock in self.take("filelocks") {
            let flag = int(&lock, 1);
            let process = Some(int(&lock, 3)).filter(|pid| self.pids.contains(pid));
            if !LOCKS.contains(&flag) {
                self.claim(process, What::Lease(flag));
            }
        }
        for remap in self.take("remap-fpath") {
            let of = int(&remap, 1);
            if int(&remap, 3) == LINK_OF_PROC {
                self.claim(None, What::OpenFile("file of an ended process in /proc"));
                continue;
            }
            let path = self.paths.get(&of).cloned();
            let path = path.unwrap_or_else(|| "that is not there".into());
            self.claim(self.holders.get(&of).copied(), What::Unlinked(path));
        }
    }
}
