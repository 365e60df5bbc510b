//! QEMU's command line: what a guest is, and what has to be added for it to be a tenant.
//! A pure function of the words, so that it can be printed before anything is started.
//!
//! What the user wrote stays as it is and in its order, but for two things that are
//! completed in place: the objects of the guest's RAM, and a balloon device. What is added
//! comes last: devices that QEMU gives addresses in order keep theirs.

pub(crate) mod words;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use strata_units::ByteSize;

use self::words::{Item, Line, items, text};
use crate::accelerator::Accelerator;
use crate::agent_port;
use crate::balloon::BALLOON_ID;
use crate::options::{Options, escaped};
use crate::pool_disks::{self, PoolDisk};
use crate::refusals::Refusal;
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
    /// Where QEMU sees the sockets of those; none: in the guest's directory.
    pub sockets: Option<PathBuf>,
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
        sockets: None,
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
        let sockets = self.sockets.as_deref().unwrap_or(directory);
        added.extend(pool_disks::words(&self.disks, &self.machine, sockets)?);
        if self.swap {
            added.extend(pool_disks::swap_words(&self.machine, sockets)?);
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

#[cfg(test)]
mod tests;
