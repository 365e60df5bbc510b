//! A domain of libvirt's: what has to be changed in its XML for its guest to be a tenant,
//! and what cannot be one. A pure function of the text, which changes nothing else in it.

mod edit;
mod live;
mod other;
mod refused;

use roxmltree::{Document, Node, ParsingOptions};
use strata_units::ByteSize;
use strata_units::reading::AGENT_PORT_NAME;
use strata_units::wire::{ENV_GUEST, ENV_SOCKET};

use crate::line::MONITOR_ID;
use crate::refusals::Refusal;
use edit::{Edits, Element};
pub use live::{LiveDomain, live_domain, with_images};
pub use other::{OtherDomain, WaitingDomain, other_domain};

/// The namespace of what libvirt passes on to QEMU.
const QEMU: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
const LD_PRELOAD: &str = "LD_PRELOAD";
/// The library's file, whichever directory it is in.
const LIBRARY_NAME: &str = "libstrata.so";
/// How often the balloon's driver tells what is free, in seconds.
const STATS_SECONDS: &str = "2";
/// TCG's buffer of translated code, in MiB: executable memory, which is never paged.
const TB_CACHE_MIB: &str = "64";
/// Elements and texts of a domain that are read; real ones have some hundred.
const MAX_NODES: u32 = 100_000;

/// What the guest is to find.
#[derive(Clone, Copy, Debug)]
pub struct DomainWish<'a> {
    /// `libstrata.so`.
    pub library: &'a str,
    /// Where libvirt makes the files of guests' memory.
    pub memory_directory: &'a str,
    /// The daemon's socket for agents, where it is not the usual one.
    pub agent_socket: Option<&'a str>,
    /// Where QEMU makes the socket of a monitor of Strata's own.
    pub monitor_directory: &'a str,
}

/// A domain whose guest can be a tenant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Domain {
    /// Its name.
    pub name: String,
    /// The memory that it is promised, as far as it is said.
    pub memory: Option<ByteSize>,
    /// Its QEMU.
    pub emulator: Option<String>,
    /// `kvm`, or `qemu` for an emulated one.
    pub kind: String,
    /// Whose process QEMU is, where the domain says it, as it says it.
    pub owner: Option<String>,
    /// The XML as it must be.
    pub text: String,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Reads a domain's XML and changes what has to be changed.
///
/// # Errors
/// All that keeps its guest from being a tenant.
pub fn amend(text: &str, wish: &DomainWish<'_>) -> Result<Domain, Vec<Refusal>> {
    let options = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|error| {
        vec![Refusal::new(format!("its XML cannot be read: {error}"), "see virsh dumpxml")]
    })?;
    let root = document.root_element();
    let refusals = refused::all(root);
    if !refusals.is_empty() {
        return Err(refusals);
    }
    let Some(devices) = child(root, "devices") else {
        return Err(vec![Refusal::new("its XML has no devices", "see virsh dumpxml")]);
    };
    let kind = root.attribute("type").unwrap_or_default();
    let mut change = Change { edits: Edits::new(text), notes: Vec::new() };
    change.backing(root, devices);
    if kind == "qemu" {
        change.bound_code(root, devices);
    }
    let new: Vec<Element> =
        [change.balloon(devices), agent_port(devices)].into_iter().flatten().collect();
    change.edits.append(devices, &new);
    change.environment(root, wish);
    change.generation(root);
    let Change { edits, notes } = change;
    Ok(Domain {
        name: inner(root, "name").unwrap_or_default().to_owned(),
        memory: child(root, "memory").and_then(memory),
        emulator: inner(devices, "emulator").map(str::to_owned),
        kind: kind.to_owned(),
        owner: owner(root),
        text: edits.finish(),
        notes,
    })
}

/// An element of the domain's own, without a namespace.
fn child<'a, 'b>(node: Node<'a, 'b>, name: &str) -> Option<Node<'a, 'b>> {
    node.children().find(|one| is(*one, name))
}

fn is(node: Node<'_, '_>, name: &str) -> bool {
    node.is_element() && node.tag_name().name() == name && node.tag_name().namespace().is_none()
}

fn is_qemus(node: Node<'_, '_>, name: &str) -> bool {
    node.is_element() && node.has_tag_name((QEMU, name))
}

/// The text in an element.
fn inner<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    child(node, name).and_then(|one| one.text()).map(str::trim)
}

fn memory(node: Node<'_, '_>) -> Option<ByteSize> {
    let number: u64 = node.text()?.trim().parse().ok()?;
    let scale = match node.attribute("unit").unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "K" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    number.checked_mul(scale).map(ByteSize)
}

/// Of `<seclabel model='dac'>`, where it names somebody.
fn owner(root: Node<'_, '_>) -> Option<String> {
    let is_dac = |one: &Node<'_, '_>| is(*one, "seclabel") && one.attribute("model") == Some("dac");
    inner(root.children().find(is_dac)?, "label").map(str::to_owned)
}

struct Change<'a> {
    edits: Edits<'a>,
    notes: Vec<String>,
}

impl Change<'_> {
    /// Anonymous memory that QEMU is told is shared.
    fn backing(&mut self, root: Node<'_, '_>, devices: Node<'_, '_>) {
        let wanted = [("source", "type", "anonymous"), ("access", "mode", "shared")];
        let element =
            |(name, key, value): (&str, &'static str, &str)| Element::new(name).with(key, value);
        let Some(backing) = child(root, "memoryBacking") else {
            let new = Element::new("memoryBacking").children(wanted.map(element));
            let before = ["currentMemory", "memory"].iter().find_map(|name| child(root, name));
            match before {
                Some(before) => self.edits.add_behind(before, &new),
                None => self.edits.add_behind(devices, &new),
            }
            return;
        };
        let mut missing = Vec::new();
        for (name, key, value) in wanted {
            match child(backing, name) {
                Some(there) => self.edits.set(there, key, value),
                None => missing.push(element((name, key, value))),
            }
        }
        self.edits.append(backing, &missing);
        let allocation = child(backing, "allocation").and_then(|one| one.attribute("mode"));
        if allocation == Some("immediate") {
            let note = "all of its memory is touched when it starts (allocation immediate): it begins with its whole memory in use";
            self.notes.push(note.to_owned());
        }
    }

    /// A bound for TCG's buffer of translated code, unless there is one.
    fn bound_code(&mut self, root: Node<'_, '_>, devices: Node<'_, '_>) {
        let cache = || Element::new("tb-cache").with("unit", "MiB").text(TB_CACHE_MIB);
        let tcg = || Element::new("tcg").children([cache()]);
        let Some(features) = child(root, "features") else {
            let new = Element::new("features").children([tcg()]);
            self.edits.add_behind(child(root, "os").unwrap_or(devices), &new);
            return;
        };
        match child(features, "tcg") {
            None => self.edits.append(features, &[tcg()]),
            Some(there) if child(there, "tb-cache").is_none() => {
                self.edits.append(there, &[cache()]);
            }
            Some(_) => {}
        }
    }

    /// A balloon that gives back what the guest frees, and tells what it has free: the one that
    /// is there is changed, else a new one is returned.
    fn balloon(&mut self, devices: Node<'_, '_>) -> Option<Element> {
        const WANTED: [(&str, &str); 2] = [("autodeflate", "on"), ("freePageReporting", "on")];
        let stats = || Element::new("stats").with("period", STATS_SECONDS);
        let Some(balloon) = child(devices, "memballoon") else {
            let new = Element::new("memballoon").with("model", "virtio");
            let new = WANTED.into_iter().fold(new, |new, (key, value)| new.with(key, value));
            return Some(new.children([stats()]));
        };
        if !balloon.attribute("model").is_some_and(|model| model.starts_with("virtio")) {
            self.edits.set(balloon, "model", "virtio");
        }
        for (key, value) in WANTED {
            self.edits.set(balloon, key, value);
        }
        match child(balloon, "stats") {
            None => self.edits.append(balloon, &[stats()]),
            Some(there) if matches!(there.attribute("period"), None | Some("0")) => {
                self.edits.set(there, "period", STATS_SECONDS);
            }
            Some(_) => {}
        }
        None
    }

    /// A monitor beside libvirt's; what is missing for one.
    fn monitor(&mut self, line: Option<Node<'_, '_>>, prefix: &str, socket: &str) -> Vec<Element> {
        let words = monitor_words(socket);
        if let Some(there) = line.and_then(monitor_argument) {
            self.edits.set(there, "value", &words[1]);
            return Vec::new();
        }
        let element = |word: String| Element::new(format!("{prefix}:arg")).with("value", word);
        words.map(element).into()
    }

    /// By which the kernel of a clone sees that it is another machine.
    fn generation(&mut self, root: Node<'_, '_>) {
        let machine = child(root, "os").and_then(|os| child(os, "type"));
        let is_pc = machine.and_then(|one| one.attribute("arch")) == Some("x86_64");
        let acpi = child(root, "features").and_then(|features| child(features, "acpi"));
        if let (true, Some(_), None, Some(before)) =
            (is_pc, acpi, child(root, "genid"), child(root, "uuid"))
        {
            self.edits.add_behind(before, &Element::new("genid"));
        }
    }

    /// What the library is loaded by, and finds the guest's memory by.
    fn environment(&mut self, root: Node<'_, '_>, wish: &DomainWish<'_>) {
        // A default namespace would do, but a prefix is what libvirt writes.
        let declared = root.namespaces().find(|one| one.uri() == QEMU && one.name().is_some());
        let prefix = declared.and_then(|one| one.name()).unwrap_or("qemu");
        if declared.is_none() {
            self.edits.declare(root, "xmlns:qemu", QEMU);
        }
        let line = root.children().find(|one| is_qemus(*one, "commandline"));
        let mut missing = Vec::new();
        let mut wanted = vec![(ENV_GUEST, wish.memory_directory.to_owned())];
        wanted.extend(wish.agent_socket.map(|socket| (ENV_SOCKET, socket.to_owned())));
        let there = |name: &str| {
            let mut all = line?.children().filter(|one| is_qemus(*one, "env"));
            all.find(|one| one.attribute("name") == Some(name))
        };
        let preload = there(LD_PRELOAD).and_then(|one| one.attribute("value"));
        wanted.insert(0, (LD_PRELOAD, with_library(preload.unwrap_or_default(), wish.library)));
        for (name, value) in wanted {
            match there(name) {
                Some(there) => self.edits.set(there, "value", &value),
                None => {
                    let new = Element::new(format!("{prefix}:env"));
                    missing.push(new.with("name", name).with("value", value));
                }
            }
        }
        // Snapshots need a monitor: libvirt's own has its one listener.
        if let Some(uuid) = inner(root, "uuid") {
            let socket = monitor_socket(wish.monitor_directory, uuid);
            missing.extend(self.monitor(line, prefix, &socket));
        } else {
            self.notes.push("it has no uuid yet, and gets no monitor: define it first".to_owned());
        }
        match line {
            Some(line) => self.edits.append(line, &missing),
            None => {
                let new = Element::new(format!("{prefix}:commandline")).children(missing);
                self.edits.append(root, &[new]);
            }
        }
    }
}

/// A port for the agent in the guest, if it is missing.
fn agent_port(devices: Node<'_, '_>) -> Option<Element> {
    if agent_channel(devices).is_some() {
        return None;
    }
    let target = Element::new("target").with("type", "virtio").with("name", AGENT_PORT_NAME);
    Some(Element::new("channel").with("type", "unix").children([target]))
}

/// The port of the agent in the guest, if there is one.
fn agent_channel<'a, 'b>(devices: Node<'a, 'b>) -> Option<Node<'a, 'b>> {
    let is_it = |one: &Node<'_, '_>| {
        let name = child(*one, "target").and_then(|target| target.attribute("name"));
        is(*one, "channel") && name == Some(AGENT_PORT_NAME)
    };
    devices.children().find(is_it)
}

/// The socket of a domain's monitor: its name stays when the domain gets another one.
fn monitor_socket(directory: &str, uuid: &str) -> String {
    format!("{directory}/{uuid}.strata")
}

fn monitor_words(socket: &str) -> [String; 4] {
    [
        "-chardev".to_owned(),
        format!("socket,id={MONITOR_ID},path={socket},server=on,wait=off"),
        "-mon".to_owned(),
        format!("chardev={MONITOR_ID},mode=control"),
    ]
}

/// The argument that has the socket of the monitor, if there is one.
fn monitor_argument<'a, 'b>(line: Node<'a, 'b>) -> Option<Node<'a, 'b>> {
    let is_it = |one: &Node<'_, '_>| {
        let value = one.attribute("value").unwrap_or_default();
        is_qemus(*one, "arg") && value.starts_with(&format!("socket,id={MONITOR_ID},"))
    };
    line.children().find(is_it)
}

/// The libraries to preload, ours among them: where it was, or in front.
fn with_library(preload: &str, library: &str) -> String {
    let is_ours = |path: &str| path.rsplit('/').next() == Some(LIBRARY_NAME);
    let words = preload.split([':', ' ']).filter(|word| !word.is_empty());
    let mut words: Vec<&str> =
        words.map(|word| if is_ours(word) { library } else { word }).collect();
    if !words.contains(&library) {
        words.insert(0, library);
    }
    words.join(":")
}

#[cfg(test)]
mod tests;
