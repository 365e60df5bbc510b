//! Reading QEMU's words: which of them are options with values, and what the command line
//! says of the guest.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use strata_units::ByteSize;

use super::{GENERATION, MIB, MONITOR_SOCKET_NAME, Wish};
use crate::options::{Options, size};
use crate::refusals::{self, Refusal};

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

/// A word, or an option with its value.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Item {
    Word(OsString),
    Option { word: OsString, name: String, value: OsString },
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

    pub(super) fn check(&self, huge_pages: &[PathBuf], here: &Path) -> Result<(), Refusal> {
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
    pub(super) fn name(&self, wish: &Wish<'_>) -> Result<(String, bool), Refusal> {
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
    pub(super) fn memory(&self, wish: &Wish<'_>) -> Result<(ByteSize, bool), Refusal> {
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
    pub(super) fn ram(&self) -> Result<(Vec<usize>, bool), Refusal> {
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
    pub(super) fn lacks_generation(&self, machine: &str) -> Result<bool, Refusal> {
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
