//! A domain as it runs, by the file that libvirt keeps of it for its own next start.

use roxmltree::{Document, ParsingOptions};
use strata_units::ByteSize;

use super::edit::Edits;
use super::{MAX_NODES, agent_channel, child, inner, is, is_qemus, memory, monitor_argument};

/// A domain that runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LiveDomain {
    /// Its name.
    pub name: String,
    /// The memory that it is promised.
    pub memory: ByteSize,
    /// Its machine, as QEMU names it.
    pub machine: String,
    /// Its QEMU.
    pub emulator: String,
    /// The socket of Strata's own monitor, if it has one.
    pub monitor: Option<String>,
    /// The socket of the port of an agent in it, if it has one, and what QEMU calls that.
    pub agent: Option<(String, String)>,
    /// All of its XML.
    pub text: String,
}

/// The domain that runs as the process `pid`, if this is its file.
#[must_use]
pub fn live_domain(text: &str, pid: u32) -> Option<LiveDomain> {
    if !text.contains(&format!("pid='{pid}'")) {
        return None;
    }
    let options = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).ok()?;
    let root = document.root_element();
    let said: u32 = root.attribute("pid")?.parse().ok()?;
    if !is(root, "domstatus") || said != pid {
        return None;
    }
    let domain = child(root, "domain")?;
    let line = domain.children().find(|one| is_qemus(*one, "commandline"));
    let socket = line.and_then(monitor_argument).and_then(|one| one.attribute("value"));
    let path = socket.and_then(|words| words.split(',').find_map(|w| w.strip_prefix("path=")));
    let devices = child(domain, "devices")?;
    let port = agent_channel(devices).and_then(|channel| {
        let said = |name, key| child(channel, name).and_then(|one| one.attribute(key));
        Some((said("source", "path")?.to_owned(), format!("char{}", said("alias", "name")?)))
    });
    Some(LiveDomain {
        name: inner(domain, "name")?.to_owned(),
        memory: memory(child(domain, "memory")?)?,
        machine: child(child(domain, "os")?, "type")?.attribute("machine")?.to_owned(),
        emulator: inner(devices, "emulator")?.to_owned(),
        monitor: path.map(str::to_owned),
        agent: port,
        text: text[domain.range()].to_owned(),
    })
}

/// A domain's XML in which disks have the names of the images that they stand for: pairs of
/// what a file is called, and what it is to be called.
#[must_use]
pub fn with_images(text: &str, images: &[(&str, &str)]) -> String {
    let options = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    let Ok(document) = Document::parse_with_options(text, options) else {
        return text.to_owned();
    };
    let image = |name: Option<&str>| {
        let found = images.iter().find(|(from, _)| Some(*from) == name.map(str::trim));
        found.map(|(_, to)| *to)
    };
    let mut edits = Edits::new(text);
    for node in document.descendants() {
        let is_disks = node.parent().is_some_and(|parent| is(parent, "disk"));
        if is(node, "source")
            && is_disks
            && let Some(to) = image(node.attribute("file"))
        {
            edits.set(node, "file", to);
        } else if is(node, "nvram")
            && let Some(to) = image(node.text())
        {
            edits.set_text(node, to);
        }
    }
    edits.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_called_as_their_images() {
        let text = "<domain><os><nvram>/v.t</nvram></os><devices><disk><source file='/a.t'/></disk>\
                    <x><source file='/a.t'/></x></devices></domain>";
        assert_eq!(
            with_images(text, &[("/a.t", "/a"), ("/v.t", "/v")]),
            text.replacen("/a.t", "/a", 1).replace("/v.t", "/v")
        );
    }

    #[test]
    fn a_domain_is_what_its_process_has() {
        let domain = "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
                      <name>a</name><memory unit='KiB'>2048</memory><os><type machine='q35'>hvm\
                      </type></os><devices><emulator>/q</emulator><channel type='unix'><source path='/p'/>\
                      <target name='org.strata.memory.0'/><alias name='channel0'/></channel></devices><qemu:commandline>\
                      <qemu:arg value='socket,id=strata-monitor,path=/x.strata,server=on'/>\
                      </qemu:commandline></domain>";
        let text = format!("<domstatus state='running' pid='71'>\n  {domain}\n</domstatus>\n");
        let found = live_domain(&text, 71).expect("it runs");
        assert_eq!((found.name.as_str(), found.memory), ("a", ByteSize(2 << 20)));
        assert_eq!((found.machine.as_str(), found.emulator.as_str()), ("q35", "/q"));
        assert_eq!((found.monitor.as_deref(), found.text.as_str()), (Some("/x.strata"), domain));
        assert_eq!(found.agent, Some(("/p".to_owned(), "charchannel0".to_owned())));
        for (text, pid) in [(&*text, 72), ("<domain pid='71'/>", 71), ("<domstatus pid='71'", 71)] {
            assert_eq!(live_domain(text, pid), None, "{text}");
        }
    }
}
