//! QEMU's command line: what a guest is, and what has to be added for it to be a tenant.
//! A pure function of the words, so that it can be printed before anything is started.
//!
//! What the user wrote stays as it is and in its order, but for two things that are
//! completed in place: the objects of the guest's RAM, and a balloon device. What is added
//! comes last: devices that QEMU gives addresses in order keep theirs.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use strata_units::ByteSize;

use crate::accelerator::Accelerator;
use crate::agent_port;
use crate::balloon::BALLOON_ID;
use crate::options::{Options, escaped, size};
use crate::pool_disks::{self, PoolDisk};
use crate::refusals::{self, Refusal};
use crate::version::{OLDEST, Version};

/// The monitor's socket, in the guest's directory.
pub const MONITOR_SOCKET_NAME: &str = "monitor";
/// The guest's RAM, where the command line has no object for it.
const RAM_ID: &str = "strata-ram";
pub(crate) const MONITOR_ID: &str = "strata-monitor";
/// The device by which a guest's kernel learns that it is one of several from now on: it
/// makes its random numbers anew then.
pub(crate) const GENERATION: &str = "vmgenid";
/// Bytes of a unix socket's path that the kernel takes.
const MAX_SOCKET_PATH_BYTES: usize = 107;
pub(crate) const MIB: u64 = 1 << 20;

/// Options that have no value. Of what is not listed here or below, the next word is taken
/// for its value unless it looks like an option.
const BARE: [&str; 27] = [
    "S",
    "alt-grab",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "one-insn-per-tb",
    "preconfig",
    "singlestep",
    "snapshot",
    "usb",
    "version",
];
/// Options whose value may look like an option.
const VALUED: [&str; 8] =
    ["append", "kernel", "initrd", "fw_cfg", "smbios", "global", "uuid", "set"];

/// What is wished, and what the machine is like.
#[derive(Clone, Debug)]
pub struct Wish<'a> {
    /// The guest's name, if it is given beside the command line.
    pub name: Option<&'a str>,
    /// Its memory, if it is given beside the command line.
    pub memory: Option<ByteSize>,
    /// Whose command line it is.
    pub version: Version,
    /// Why guests do not run under KVM here, if they do not ([`crate::kvm_problem`]).
    pub kvm_problem: Option<&'a str>,
    /// The machine that this QEMU takes if none is named.
    pub default_machine: &'a str,
    /// Where huge pages of the kernel's are mounted.
    pub huge_pages: &'a [PathBuf],
    /// What relative paths are relative to.
    pub here: &'a Path,
}

/// A guest that can be started.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its name.
    pub name: String,
    /// What it is promised.
    pub memory: ByteSize,
    /// Its machine, as `-machine` names it.
    pub machine: String,
    /// What executes it, and where it is not as the user might think, why.
    pub accelerator: String,
    /// The balloon device's id; none: it has none.
    pub balloon: Option<String>,
    /// What the user should know.
    pub notes: Vec<String>,
    /// Disks that are read through pools, beside those of the command line.
    pub disks: Vec<PoolDisk>,
    /// It has a swap disk of Strata's.
    pub swap: bool,
    /// It has a port for an agent in it.
    pub agent: bool,
    items: Vec<Item>,
    /// Those of its RAM, of `items`.
    ram: Vec<usize>,
    /// The user's balloon, where something of it was completed.
    completed: Option<usize>,
    /// Added whatever the directory is.
    added: Vec<[String; 2]>,
}

/// A word, or an option with its value.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Item {
    Word(OsString),
    Option { word: OsString, name: String, value: OsString },
}

/// Reads QEMU's words (without the program's own) and decides what is added.
///
/// # Errors
/// The guest cannot be started as a tenant: why, and what to do.
pub fn plan(words: &[OsString], wish: &Wish<'_>) -> Result<Plan, Refusal> {
    if wish.version < OLDEST {
        let why = format!("this is QEMU {}, which is too old", wish.version);
        return Err(Refusal::new(why, format!("use {OLDEST} or newer")));
    }
    let items = items(words)?;
    let line = Line { items };
    line.check(wish.huge_pages, wish.here)?;
    let name = line.name(wish)?;
    let (memory, memory_is_said) = line.memory(wish)?;
    let machine = line.last("machine", "type")?;
    let machine = machine.unwrap_or_else(|| wish.default_machine.to_owned());
    let (ram, has_ram) = line.ram()?;
    let lacks_generation = line.lacks_generation(&machine)?;
    let mut plan = Plan {
        name: name.0,
        memory,
        machine,
        accelerator: String::new(),
        balloon: None,
        notes: Vec::new(),
        disks: Vec::new(),
        swap: false,
        agent: false,
        items: line.items,
        ram,
        completed: None,
        added: Vec::new(),
    };
    if !name.1 {
        plan.add("-name", format!("guest={}", escaped(&plan.name)));
    }
    if !memory_is_said {
        plan.add("-m", format!("size={}M", memory.0 / MIB));
    }
    plan.accelerate(wish)?;
    if !has_ram {
        plan.add("-machine", format!("memory-backend={RAM_ID}"));
    }
    if lacks_generation {
        plan.add("-device", format!("{GENERATION},id=strata-generation,guid=auto"));
    }
    plan.inflate()?;
    plan.agent = agent_port::can_have(&plan.machine);
    let waits = |item: &Item| matches!(item, Item::Option { name, .. } if name == "incoming");
    if plan.items.iter().any(waits) {
        // QEMU registers all of its memory for post-copy, and cannot what Strata has.
        let note = "it waits for a migration (-incoming): have it come by pre-copy; post-copy fails when the guest is near its budget, and leaves it paused where it was";
        plan.notes.push(note.to_owned());
    }
    Ok(plan)
}

impl Plan {
    /// The words for a guest whose files are in `directory`.
    ///
    /// # Errors
    /// The directory's path is too long, or no text.
    pub fn words(&self, directory: &Path) -> Result<Vec<OsString>, Refusal> {
        let mut words = Vec::new();
        for (index, item) in self.items.iter().enumerate() {
            match item {
                Item::Word(word) => words.push(word.clone()),
                Item::Option { word, .. } if self.ram.contains(&index) => {
                    words.extend([word.clone(), self.ram_object(index, directory)?.into()]);
                }
                Item::Option { word, value, .. } => words.extend([word.clone(), value.clone()]),
            }
        }
        words.extend(self.added(directory)?.into_iter().flatten().map(OsString::from));
        Ok(words)
    }

    /// What is added behind the user's words: options with their values.
    ///
    /// # Errors
    /// As for [`Self::words`].
    pub fn added(&self, directory: &Path) -> Result<Vec<[String; 2]>, Refusal> {
        let socket = socket_at(path_in(directory, MONITOR_SOCKET_NAME)?, "the monitor's socket")?;
        let mut added = Vec::new();
        if self.ram.is_empty() {
            let path = escaped(&path_in(directory, RAM_ID)?);
            let bytes = self.memory.0;
            let object =
                format!("memory-backend-file,id={RAM_ID},share=on,size={bytes},mem-path={path}");
            added.push(["-object".to_owned(), object]);
        }
        let socket = escaped(&socket);
        let chardev = format!("socket,id={MONITOR_ID},path={socket},server=on,wait=off");
        added.push(["-chardev".to_owned(), chardev]);
        added.push(["-mon".to_owned(), format!("chardev={MONITOR_ID},mode=control")]);
        added.extend(self.added.iter().cloned());
        if self.agent {
            added.extend(agent_port::words(&self.machine, directory)?);
        }
        added.extend(pool_disks::words(&self.disks, &self.machine, directory)?);
        if self.swap {
            added.extend(pool_disks::swap_words(&self.machine, directory)?);
        }
        Ok(added)
    }

    /// What stands in the place of something that the user wrote.
    ///
    /// # Errors
    /// As for [`Self::words`].
    pub fn changed(&self, directory: &Path) -> Result<Vec<[String; 2]>, Refusal> {
        let mut changed = Vec::new();
        for &index in &self.ram {
            changed.push(["-object".to_owned(), self.ram_object(index, directory)?]);
        }
        if let Some(Item::Option { value, .. }) = self.completed.map(|index| &self.items[index]) {
            changed.push(["-device".to_owned(), text(value, "device")?.to_owned()]);
        }
        Ok(changed)
    }

    /// An object of the guest's RAM, as a file of ours.
    fn ram_object(&self, index: usize, directory: &Path) -> Result<String, Refusal> {
        let Item::Option { value, .. } = &self.items[index] else { unreachable!("an option") };
        let mut options = Options::parse(text(value, "object")?, "qom-type")?;
        let id = options.get("id").unwrap_or_default();
        options.set("qom-type", "memory-backend-file");
        options.set("share", "on");
        options.set("mem-path", &path_in(directory, &id)?);
        Ok(options.to_string())
    }

    /// Has its balloon follow what an agent in it says.
    ///
    /// # Errors
    /// It has no balloon, or one that does not let go when the guest needs memory at once.
    pub fn balloon_by_itself(&mut self) -> Result<(), Refusal> {
        let refuse = |why: &str, todo| {
            Err(Refusal::new(
                format!("its balloon cannot follow what it says of its memory: {why}"),
                todo,
            ))
        };
        if self.balloon.is_none() {
            return refuse("it has none", "leave --self-balloon out, or take another machine");
        }
        for (index, item) in self.items.iter_mut().enumerate() {
            let Item::Option { name, value, .. } = item else { continue };
            if name != "device" {
                continue;
            }
            let mut options = Options::parse(text(value, "device")?, "driver")?;
            if !options.get("driver").unwrap_or_default().starts_with("virtio-balloon") {
                continue;
            }
            match options.get("deflate-on-oom") {
                None => {
                    options.set("deflate-on-oom", "on");
                    self.completed = Some(index);
                    *value = options.to_string().into();
                }
                Some(_) if options.is_on("deflate-on-oom") => {}
                Some(_) => {
                    let todo = "leave deflate-on-oom=off out";
                    return refuse("it does not let go when the guest has no memory left", todo);
                }
            }
            break;
        }
        Ok(())
    }

    fn add(&mut self, option: &str, value: String) {
        self.added.push([option.to_owned(), value]);
    }

    /// Chooses who executes the guest, where the user does not.
    fn accelerate(&mut self, wish: &Wish<'_>) -> Result<(), Refusal> {
        let line = Line { items: std::mem::take(&mut self.items) };
        let said = line.accelerator();
        self.items = line.items;
        match (said?, wish.kvm_problem) {
            (Some(said), problem) => {
                if said.starts_with("kvm")
                    && let Some(problem) = problem
                {
                    self.notes.push(format!("the guest is to run under KVM, but {problem}"));
                }
                self.accelerator = format!("{}, as the command line says", said.to_uppercase());
            }
            (None, None) => {
                self.add("-accel", Accelerator::Kvm.option().to_owned());
                self.accelerator = Accelerator::Kvm.to_string();
            }
            (None, Some(problem)) => {
                self.add("-accel", Accelerator::Tcg.option().to_owned());
                self.accelerator = format!("{}, which is slow: {problem}", Accelerator::Tcg);
            }
        }
        Ok(())
    }

    /// Sees to a balloon that gives back what the guest frees.
    fn inflate(&mut self) -> Result<(), Refusal> {
        for (index, item) in self.items.iter_mut().enumerate() {
            let Item::Option { name, value, .. } = item else { continue };
            if name != "device" {
                continue;
            }
            let mut options = Options::parse(text(value, "device")?, "driver")?;
            let driver = options.get("driver").unwrap_or_default();
            if !driver.starts_with("virtio-balloon") {
                continue;
            }
            for (key, value) in [("free-page-reporting", "on"), ("id", BALLOON_ID)] {
                if options.get(key).is_none() {
                    options.set(key, value);
                    self.completed = Some(index);
                }
            }
            if !options.is_on("free-page-reporting") {
                let note = "its balloon has free-page-reporting=off: what the guest frees does not come back";
                self.notes.push(note.to_owned());
            }
            self.balloon = options.get("id");
            if self.completed.is_some() {
                *value = options.to_string().into();
            }
            return Ok(());
        }
        let driver = match self.machine.as_str() {
            "microvm" => "virtio-balloon-device",
            "isapc" | "none" => {
                let machine = &self.machine;
                self.notes.push(format!(
                    "a machine of the kind {machine} has no balloon: what the guest frees does not come back"
                ));
                return Ok(());
            }
            _ => "virtio-balloon-pci",
        };
        self.balloon = Some(BALLOON_ID.to_owned());
        let device = format!("{driver},id={BALLOON_ID},free-page-reporting=on,deflate-on-oom=on");
        self.add("-device", device);
        Ok(())
    }
}

pub(crate) fn path_in(directory: &Path, name: &str) -> Result<String, Refusal> {
    let path = directory.join(name);
    path.into_os_string().into_string().map_err(|path| {
        let why = format!("the path {} is no text", path.display());
        Refusal::new(why, "have stratad's sockets in another directory")
    })
}

/// The path of a socket, if it can be one's. `what`: that socket, as a refusal names it.
pub(crate) fn socket_at(path: String, what: &str) -> Result<String, Refusal> {
    if path.len() > MAX_SOCKET_PATH_BYTES {
        let why = format!("{what} {path} would have too long a path");
        return Err(Refusal::new(why, "give the guest a shorter name"));
    }
    Ok(path)
}

pub(crate) fn text<'a>(value: &'a OsStr, option: &str) -> Result<&'a str, Refusal> {
    value.to_str().ok_or_else(|| {
        let why = format!("the value of -{option} ({}) is no text", value.display());
        Refusal::new(why, "write it in UTF-8")
    })
}

/// The words in order, options with their values.
pub(crate) fn items(words: &[OsString]) -> Result<Vec<Item>, Refusal> {
    let mut items = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let name = word.to_str().and_then(|text| {
            let name = text.strip_prefix('-')?;
            Some(name.strip_prefix('-').unwrap_or(name)).filter(|name| !name.is_empty())
        });
        let Some(name) = name.filter(|name| !BARE.contains(name)) else {
            items.push(Item::Word(word.clone()));
            continue;
        };
        // -M is QEMU's short form.
        let name = if name == "M" { "machine" } else { name }.to_owned();
        let is_known = is_read(&name) || VALUED.contains(&name.as_str());
        let looks_like_option = |next: &OsString| {
            let next = next.as_encoded_bytes();
            next.starts_with(b"-")
                && next.get(1).is_some_and(|b| *b == b'-' || b.is_ascii_alphabetic())
        };
        if !is_known && words.peek().is_none_or(|next| looks_like_option(next)) {
            items.push(Item::Word(word.clone()));
            refusals::option(&name)?;
            continue;
        }
        let Some(value) = words.next() else {
            let why = format!("{} has no value", word.display());
            return Err(Refusal::new(why, "complete the command line"));
        };
        items.push(Item::Option { word: word.clone(), name, value: value.clone() });
    }
    Ok(items)
}

/// Whether words that are added to a command line by somebody else can be in a guest's.
pub(crate) fn check_words(words: &[OsString]) -> Result<(), Refusal> {
    Line { items: items(words)? }.check(&[], Path::new("/"))
}

/// The implied first key of an option that is read here; none: it is not.
fn implied(name: &str) -> Option<&'static str> {
    Some(match name {
        "machine" | "numa" | "netdev" | "nic" | "net" => "type",
        "m" => "size",
        "object" => "qom-type",
        "device" => "driver",
        "name" => "guest",
        "accel" => "accel",
        "overcommit" | "realtime" => "",
        _ => return None,
    })
}

fn is_read(name: &str) -> bool {
    implied(name).is_some()
}

pub(crate) struct Line {
    pub(crate) items: Vec<Item>,
}

impl Line {
    /// Options of that name, each with its place.
    fn each(&self, wanted: &str) -> Result<Vec<(usize, Options)>, Refusal> {
        let implied = implied(wanted).expect("an option that is read");
        let mut found = Vec::new();
        for (index, item) in self.items.iter().enumerate() {
            if let Item::Option { name, value, .. } = item
                && name == wanted
            {
                found.push((index, Options::parse(text(value, wanted)?, implied)?));
            }
        }
        Ok(found)
    }

    /// The last value of a key.
    pub(crate) fn last(&self, option: &str, key: &str) -> Result<Option<String>, Refusal> {
        Ok(self.each(option)?.into_iter().filter_map(|(_, options)| options.get(key)).next_back())
    }

    fn check(&self, huge_pages: &[PathBuf], here: &Path) -> Result<(), Refusal> {
        for item in &self.items {
            if let Item::Option { name, .. } = item {
                refusals::option(name)?;
            }
        }
        for (_, options) in self.each("device")? {
            refusals::device(&options)?;
        }
        for option in ["netdev", "nic", "net"] {
            for (_, options) in self.each(option)? {
                refusals::network(&options)?;
            }
        }
        for (_, options) in self.each("object")? {
            refusals::object(&options, huge_pages, here)?;
        }
        for (_, options) in self.each("machine")? {
            refusals::machine(&options)?;
        }
        for option in ["overcommit", "realtime"] {
            for (_, options) in self.each(option)? {
                refusals::locked(&options)?;
            }
        }
        Ok(())
    }

    /// The guest's name, and whether the command line says it.
    fn name(&self, wish: &Wish<'_>) -> Result<(String, bool), Refusal> {
        let said = self.last("name", "guest")?;
        match (said, wish.name) {
            (Some(said), Some(wished)) if said != wished => {
                let why = format!("-name calls the guest {said}, and --name {wished}");
                Err(Refusal::new(why, "leave one of them out"))
            }
            (Some(said), _) => Ok((said, true)),
            (None, Some(wished)) => Ok((wished.to_owned(), false)),
            (None, None) => Err(Refusal::new("the guest has no name", "give --name")),
        }
    }

    /// The guest's memory, and whether the command line says it.
    fn memory(&self, wish: &Wish<'_>) -> Result<(ByteSize, bool), Refusal> {
        let said = self.last("m", "size")?;
        let read = |text: String| {
            size(&text, MIB).map(ByteSize).ok_or_else(|| {
                Refusal::new(format!("-m {text} is not a size"), "write it as 4G or 4096")
            })
        };
        let (memory, is_said) = match (said.map(read).transpose()?, wish.memory) {
            (Some(said), Some(wished)) if said != wished => {
                let why = format!("-m gives the guest {said}, and --memory {wished}");
                return Err(Refusal::new(why, "leave one of them out"));
            }
            (Some(said), _) => (said, true),
            (None, Some(wished)) => (wished, false),
            (None, None) => {
                return Err(Refusal::new("the guest has no memory", "give --memory"));
            }
        };
        if memory.0 == 0 || !memory.0.is_multiple_of(MIB) {
            let why = format!("a guest's memory is so many MiB, and not {} bytes", memory.0);
            return Err(Refusal::new(why, "round it up"));
        }
        Ok((memory, is_said))
    }

    /// Which objects are the guest's RAM, and whether there are any: those are made files
    /// of ours.
    fn ram(&self) -> Result<(Vec<usize>, bool), Refusal> {
        let mut ids = Vec::new();
        ids.extend(self.last("machine", "memory-backend")?);
        for (_, options) in self.each("numa")? {
            if options.get("mem").is_some() {
                let why = "-numa node,mem= divides the guest's memory without objects";
                return Err(Refusal::new(why, "give each node an object: memdev="));
            }
            ids.extend(options.get("memdev"));
        }
        let objects = self.each("object")?;
        let mut ram = Vec::new();
        for id in &ids {
            let found = objects.iter().find(|(_, object)| object.get("id").as_ref() == Some(id));
            let Some((index, object)) = found else {
                let why = format!("no -object is called {id}, which is the guest's memory");
                return Err(Refusal::new(why, "correct the command line"));
            };
            let kind = object.get("qom-type").unwrap_or_default();
            let is_plain = id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
                && !id.starts_with('.')
                && id != MONITOR_SOCKET_NAME;
            if kind != "memory-backend-ram" || !is_plain {
                let why = format!(
                    "the guest's memory is the object {id} ({kind}), which would stay shared and in DRAM"
                );
                return Err(Refusal::new(why, "leave it out, or make it a memory-backend-ram"));
            }
            ram.push(*index);
        }
        Ok((ram, !ids.is_empty()))
    }

    /// Whether the guest could have the device [`GENERATION`], and has none: it is in the
    /// tables (ACPI) of a PC.
    fn lacks_generation(&self, machine: &str) -> Result<bool, Refusal> {
        let is_pc = matches!(machine, "pc" | "q35") || machine.starts_with("pc-");
        let is_off = self.last("machine", "acpi")?.is_some_and(|acpi| acpi == "off");
        let has_none = self.items.iter().any(
            |item| matches!(item, Item::Word(word) if word == "-no-acpi" || word == "--no-acpi"),
        );
        let has_one = self
            .each("device")?
            .iter()
            .any(|(_, device)| device.get("driver").as_deref() == Some(GENERATION));
        Ok(is_pc && !is_off && !has_none && !has_one)
    }

    /// What the command line says of who executes the guest.
    pub(crate) fn accelerator(&self) -> Result<Option<String>, Refusal> {
        let option = |name: &str| {
            self.items.iter().any(|item| {
                let Item::Word(word) = item else { return false };
                word.to_str().is_some_and(|word| word.trim_start_matches('-') == name)
            })
        };
        let said = self.each("accel")?.into_iter().find_map(|(_, options)| options.get("accel"));
        Ok(match said {
            Some(said) => Some(said),
            None if option("enable-kvm") => Some("kvm".to_owned()),
            None => self.last("machine", "accel")?,
        })
    }
}

#[cfg(test)]
mod tests;
