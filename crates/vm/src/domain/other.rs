//! A domain once more, for a guest that comes from a snapshot: the same one, or a clone
//! beside it. A pure function of the text of the first one.
//!
//! A clone's devices are those that two can have, or are changed; what nobody knows could be
//! one thing of the machine's that both would write to.

use std::path::Path;

use roxmltree::{Document, Node, ParsingOptions};
use strata_units::wire::{ENV_SOCKET, ENV_TOKEN};

use super::edit::{Edits, Element};
use super::{
    MAX_NODES, QEMU, child, inner, is_qemus, monitor_argument, monitor_socket, monitor_words,
    refused,
};
use crate::again::OtherDisk;
use crate::networks::{CloneNetworks, NetworkWish, Networks, apart};
use crate::refusals::Refusal;

/// Devices that two guests can have.
const FOR_TWO: [&str; 13] = [
    "audio",
    "console",
    "controller",
    "emulator",
    "hub",
    "input",
    "memballoon",
    "panic",
    "rng",
    "sound",
    "video",
    "watchdog",
    "iommu",
];
/// What leads from an interface to a network that others are on.
const TO_NETWORKS: [&str; 8] =
    ["actual", "backend", "filterref", "portForward", "source", "target", "virtualport", "vlan"];

/// What the domain is to be.
#[derive(Clone, Copy, Debug)]
pub struct OtherDomain<'a> {
    /// What a clone is called. None: it is the first one.
    pub clone: Option<&'a str>,
    /// Nobody's: a clone's own, and the generation of what comes back.
    pub uuid: &'a str,
    /// Where QEMU makes the socket of Strata's monitor.
    pub monitor_directory: &'a str,
    /// What its QEMU finds its tenant by: the agents' socket, and a token.
    pub tenant: (&'a str, &'a str),
    /// Images in the places of those that the first one writes to.
    pub disks: &'a [OtherDisk],
    /// What becomes of its networks.
    pub networks: Networks<'a>,
}

/// A domain whose QEMU waits for the state of a guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WaitingDomain {
    /// Its name.
    pub name: String,
    /// Its QEMU.
    pub emulator: String,
    /// Its XML.
    pub text: String,
    /// Sockets of its serial lines: one that was full is sent on only to whom opens it.
    pub consoles: Vec<String>,
    /// Tap devices that libvirt makes for it, and that lead nowhere.
    pub taps: Vec<String>,
    /// What is not as it was.
    pub notes: Vec<String>,
}

/// The domain of a guest that comes from a snapshot of the one of this XML.
///
/// # Errors
/// There cannot be one.
pub fn other_domain(text: &str, wish: &OtherDomain<'_>) -> Result<WaitingDomain, Vec<Refusal>> {
    let options = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|error| {
        vec![Refusal::new(format!("its XML cannot be read: {error}"), "take another snapshot")]
    })?;
    let root = document.root_element();
    let (mut edits, mut notes) = (Edits::new(text), Vec::new());
    let mut refusals = refused::all(root);
    if let Some(name) = wish.clone {
        named(root, &mut edits, name, wish.uuid);
    }
    if let Some(generation) = child(root, "genid") {
        edits.set_text(generation, wish.uuid);
    }
    let (mut consoles, mut taps) = (Vec::new(), Vec::new());
    let mut other = Other {
        edits: &mut edits,
        notes: &mut notes,
        consoles: &mut consoles,
        taps: &mut taps,
        cards: 0,
        replaced: 0,
        wish,
    };
    if let Err(refusal) = other.firmware(root) {
        refusals.push(refusal);
    }
    for device in child(root, "devices").iter().flat_map(|devices| devices.children()) {
        if device.is_element()
            && let Err(refusal) = other.device(device)
        {
            refusals.push(refusal);
        }
    }
    if let Err(refusal) = other.line(root).and_then(|()| other.has_network()) {
        refusals.push(refusal);
    }
    if !refusals.is_empty() {
        return Err(refusals);
    }
    let name = wish.clone.or_else(|| inner(root, "name"));
    let emulator = child(root, "devices").and_then(|devices| inner(devices, "emulator"));
    Ok(WaitingDomain {
        name: name.unwrap_or_default().to_owned(),
        emulator: emulator.unwrap_or_default().to_owned(),
        text: edits.finish(),
        consoles,
        taps,
        notes,
    })
}

/// Gives a clone its own name and identity.
fn named(root: Node<'_, '_>, edits: &mut Edits<'_>, name: &str, uuid: &str) {
    for (element, text) in [("name", name), ("uuid", uuid)] {
        if let Some(there) = child(root, element) {
            edits.set_text(there, text);
        }
    }
    // What the firmware says has to be the same, libvirt demands.
    let is_uuid = |one: &Node<'_, '_>| one.attribute("name") == Some("uuid");
    let systems = root.descendants().filter(|one| one.has_tag_name("system"));
    for entry in systems.flat_map(|system| system.children()).filter(is_uuid) {
        edits.set_text(entry, uuid);
    }
}

fn one_only(what: &str) -> Refusal {
    Refusal::new(
        format!("{what} is one guest's only"),
        "take it out of the domain, or restore the snapshot in the place of the first guest",
    )
}

struct Other<'a, 'b> {
    edits: &'a mut Edits<'b>,
    notes: &'a mut Vec<String>,
    consoles: &'a mut Vec<String>,
    taps: &'a mut Vec<String>,
    cards: usize,
    /// User networks that became others.
    replaced: usize,
    wish: &'a OtherDomain<'a>,
}

impl<'a> Other<'a, '_> {
    fn disk(&self, said: &str) -> Option<&'a OtherDisk> {
        self.wish.disks.iter().find(|disk| disk.said == Path::new(said))
    }

    /// The variables of its firmware are a disk like any other.
    fn firmware(&mut self, root: Node<'_, '_>) -> Result<(), Refusal> {
        let Some(variables) = child(root, "os").and_then(|os| child(os, "nvram")) else {
            return Ok(());
        };
        let said = variables.text().map(str::trim).unwrap_or_default();
        match self.disk(said) {
            Some(disk) if disk.format == "raw" => self.edits.set_text(variables, &disk.path),
            Some(_) => return Err(one_only("nvram, the variables of its firmware,")),
            None => {}
        }
        Ok(())
    }

    fn device(&mut self, device: Node<'_, '_>) -> Result<(), Refusal> {
        let name = device.tag_name().name();
        let source = child(device, "source").filter(|one| one.attribute("mode") == Some("bind"));
        if let ("serial" | "parallel", Some(path)) =
            (name, source.and_then(|one| one.attribute("path")))
        {
            let end = self.wish.clone.map_or(String::new(), |name| format!(".{name}"));
            self.consoles.push(format!("{path}{end}"));
        }
        match name {
            "tpm" => Err(Refusal::new(
                "the state of a tpm is not in a snapshot",
                "take it out of the domain",
            )),
            "disk" => self.image(device),
            _ if self.wish.clone.is_none() || FOR_TWO.contains(&name) => Ok(()),
            "interface" => self.interface(device),
            "serial" | "parallel" | "channel" => self.console(device),
            "graphics" => self.display(device),
            "redirdev" if device.attribute("type") == Some("spicevmc") => Ok(()),
            other => Err(one_only(&format!("the device {other}"))),
        }
    }

    fn image(&mut self, device: Node<'_, '_>) -> Result<(), Refusal> {
        let source = child(device, "source");
        let said = source.and_then(|source| source.attribute("file")).unwrap_or_default();
        let Some(disk) = self.disk(said) else {
            let is_read = child(device, "readonly").is_some() || source.is_none();
            return match is_read {
                true => Ok(()),
                false => Err(one_only(&format!("its disk {said}"))),
            };
        };
        if child(device, "transient").is_some() {
            return Err(one_only("a transient disk"));
        }
        self.edits.set(source.expect("it has a path"), "file", &disk.path);
        match child(device, "driver") {
            Some(driver) => self.edits.set(driver, "type", &disk.format),
            None => {
                let new = Element::new("driver").with("name", "qemu").with("type", &disk.format);
                self.edits.append(device, &[new]);
            }
        }
        // What an overlay stands on, it says itself.
        for chain in device.children().filter(|one| one.has_tag_name("backingStore")) {
            self.edits.remove(chain);
        }
        Ok(())
    }

    /// Each clone is alone: inside of it the address is the first one's, by the state of
    /// the device, until somebody in it is told another. libvirt knows it by that one.
    fn interface(&mut self, device: Node<'_, '_>) -> Result<(), Refusal> {
        let kind = device.attribute("type").unwrap_or_default();
        let Networks::Clone(clone) = self.wish.networks else { return Ok(()) };
        let becomes_tap = match (kind, clone.wish) {
            ("user", NetworkWish::User(_) | NetworkWish::SameKind) => false,
            ("user", NetworkWish::Tap) => true,
            ("network" | "bridge" | "direct" | "ethernet", NetworkWish::User(_)) => {
                return Err(Refusal::new(
                    format!(
                        "its interface ({kind}) has ways that its driver uses: user networking lacks them"
                    ),
                    "clone it with --net bridge=NAME, or without --net",
                ));
            }
            ("network" | "bridge" | "direct" | "ethernet", _) => true,
            _ => return Err(one_only(&format!("its interface {kind}"))),
        };
        for way in device.children().filter(|one| TO_NETWORKS.contains(&one.tag_name().name())) {
            self.edits.remove(way);
        }
        let mut missing = Vec::new();
        let mac = clone.mac(self.cards).to_string();
        self.cards += 1;
        match child(device, "mac") {
            Some(there) => self.edits.set(there, "address", &mac),
            None => missing.push(Element::new("mac").with("address", mac)),
        }
        if becomes_tap {
            self.replaced += usize::from(kind == "user");
            self.edits.set(device, "type", "ethernet");
            let name = clone.tap(self.taps.len());
            missing.push(Element::new("target").with("dev", name.as_str()));
            if clone.wish == NetworkWish::SameKind {
                self.notes.push(format!(
                    "its interface ({kind}) is the tap device {name}, which leads nowhere; --net bridge=NAME puts a clone on a bridge"
                ));
            }
            self.taps.push(name);
        }
        self.edits.append(device, &missing);
        Ok(())
    }

    /// Whether it has a network of the kind that is wished.
    fn has_network(&self) -> Result<(), Refusal> {
        let Networks::Clone(CloneNetworks { wish, .. }) = self.wish.networks else {
            return Ok(());
        };
        match wish {
            NetworkWish::User(forwards) if !forwards.is_empty() => Err(Refusal::new(
                "user networking of libvirt's has no ports that lead to it",
                "leave --forward out, or put the clone on a bridge: --net bridge=NAME",
            )),
            NetworkWish::Tap if self.taps.is_empty() => {
                Err(Refusal::new("it has no network", "leave --net out"))
            }
            _ => Ok(()),
        }
    }

    fn console(&mut self, device: Node<'_, '_>) -> Result<(), Refusal> {
        let kind = device.attribute("type").unwrap_or_default();
        let suffix = self.wish.clone.unwrap_or_default();
        let mut own = |one: Node<'_, '_>, key: &str| {
            let path = one.attribute(key)?;
            let new = format!("{path}.{suffix}");
            self.edits.set(one, key, &new);
            self.notes.push(format!("in the place of {path} it has {new}"));
            Some(())
        };
        let source = child(device, "source");
        match kind {
            "pty" | "null" | "vc" | "spicevmc" | "spiceport" => {}
            // Those without a path, or with libvirt's own, get one of libvirt's.
            "unix" if is_libvirts(source) => {}
            "unix" if source.and_then(|one| one.attribute("mode")) == Some("bind") => {
                source.and_then(|one| own(one, "path"));
            }
            "file" => drop(source.and_then(|one| own(one, "path"))),
            _ => return Err(one_only(&format!("a console of the type {kind}"))),
        }
        child(device, "log").and_then(|log| own(log, "file"));
        Ok(())
    }

    fn display(&mut self, device: Node<'_, '_>) -> Result<(), Refusal> {
        let has = |key: &str| device.attribute(key).is_some();
        let sockets = device.children().any(|one| one.attribute("type") == Some("socket"));
        if !matches!(device.attribute("type"), Some("vnc" | "spice"))
            || has("socket")
            || has("websocket")
            || sockets
        {
            return Err(one_only("its display"));
        }
        self.edits.set(device, "autoport", "yes");
        for key in ["port", "tlsPort"].into_iter().filter(|key| has(key)) {
            self.edits.set(device, key, "-1");
        }
        Ok(())
    }

    /// What QEMU is told beside what libvirt says.
    fn line(&mut self, root: Node<'_, '_>) -> Result<(), Refusal> {
        let line = root.children().find(|one| is_qemus(*one, "commandline"));
        let monitor = line.and_then(monitor_argument);
        let (Some(line), Some(monitor)) = (line, monitor) else {
            return Err(Refusal::new("it has no monitor of Strata's", "strata vm libvirt --apply"));
        };
        let uuid = self.wish.clone.map(|_| self.wish.uuid).or_else(|| inner(root, "uuid"));
        let socket = monitor_socket(self.wish.monitor_directory, uuid.unwrap_or_default());
        self.edits.set(monitor, "value", &monitor_words(&socket)[1]);
        let declared = root.namespaces().find(|one| one.uri() == QEMU && one.name().is_some());
        let prefix = declared.and_then(|one| one.name()).unwrap_or("qemu");
        let word = |word: &str| Element::new(format!("{prefix}:arg")).with("value", word);
        let mut missing: Vec<Element> =
            apart(self.replaced).iter().map(|text| word(text)).collect();
        let waits = line.children().any(|one| one.attribute("value") == Some("-incoming"));
        if !waits {
            missing.extend(["-incoming", "defer"].map(word));
        }
        let (socket, token) = self.wish.tenant;
        for (name, value) in [(ENV_SOCKET, socket), (ENV_TOKEN, token)] {
            let is_it =
                |one: &Node<'_, '_>| is_qemus(*one, "env") && one.attribute("name") == Some(name);
            match line.children().find(is_it) {
                Some(there) => self.edits.set(there, "value", value),
                None => {
                    let new = Element::new(format!("{prefix}:env"));
                    missing.push(new.with("name", name).with("value", value));
                }
            }
        }
        self.edits.append(line, &missing);
        Ok(())
    }
}

/// Whether libvirt has made the socket's path up.
fn is_libvirts(source: Option<Node<'_, '_>>) -> bool {
    let path = source.and_then(|source| source.attribute("path"));
    path.is_none_or(|path| path.contains("/libvirt/qemu/channel/"))
}
