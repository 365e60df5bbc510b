//! What keeps a domain of libvirt's from being a tenant: the same as on a command line
//! (`refusals.rs`), as its XML says it.

use std::ffi::OsString;

use roxmltree::Node;

use super::{child, is, is_qemus};
use crate::line::words::check_words;
use crate::refusals::Refusal;

const PLAIN: &str = "take it out of the domain, or leave this guest without strata";

/// All that is to be said against it, a line each.
pub(super) fn all(root: Node<'_, '_>) -> Vec<Refusal> {
    let mut found = Vec::new();
    if !is(root, "domain") {
        return vec![Refusal::new("its XML is no domain's", "see virsh dumpxml")];
    }
    let kind = root.attribute("type").unwrap_or_default();
    if !matches!(kind, "qemu" | "kvm") {
        let why = format!("it is of the type {kind:?}, and only QEMU's guests can be managed");
        return vec![Refusal::new(why, "leave it without strata")];
    }
    let mut refuse = |what: &str, why: &str| {
        let refusal = Refusal::new(format!("{what}: {why}"), PLAIN);
        if !found.contains(&refusal) {
            found.push(refusal);
        }
    };
    if let Some(backing) = child(root, "memoryBacking") {
        if child(backing, "hugepages").is_some() {
            refuse(
                "memoryBacking hugepages",
                "huge pages of the kernel's (hugetlbfs) cannot leave",
            );
        }
        if child(backing, "locked").is_some() {
            refuse(
                "memoryBacking locked",
                "the guest's memory is to be locked, so none of it could leave",
            );
        }
    }
    if child(root, "launchSecurity").is_some() {
        refuse("launchSecurity", "the memory of an encrypted guest cannot leave and come back");
    }
    for device in child(root, "devices").iter().flat_map(|devices| devices.children()) {
        if device.is_element()
            && let Some((what, why)) = against(device)
        {
            refuse(&what, why);
        }
    }
    let line = root.children().find(|one| is_qemus(*one, "commandline"));
    let arguments = line.iter().flat_map(|line| line.children());
    let words: Vec<OsString> = arguments
        .filter(|one| is_qemus(*one, "arg"))
        .filter_map(|one| one.attribute("value").map(OsString::from))
        .collect();
    if let Err(Refusal { why, .. }) = check_words(&words) {
        refuse("qemu:arg", &why);
    }
    found
}

const SHARED_WITH_A_PROCESS: &str =
    "another process maps the guest's memory, which is private under Strata";
const PINNED: &str = "the hardware reaches all of the guest's memory, which is pinned for it";

/// What a device is, and why it cannot be in a guest whose memory comes and goes.
fn against(device: Node<'_, '_>) -> Option<(String, &'static str)> {
    let name = device.tag_name().name();
    let kind = device.attribute("type").unwrap_or_default();
    let driver = child(device, "driver");
    let driver = |key: &str| driver.and_then(|driver| driver.attribute(key)).unwrap_or_default();
    let why = match (name, kind) {
        ("interface" | "disk", "vhostuser") => SHARED_WITH_A_PROCESS,
        ("interface", "vdpa" | "hostdev") | ("disk", "vhostvdpa") => PINNED,
        ("hostdev", "pci" | "mdev") => PINNED,
        ("filesystem", _) if driver("type") == "virtiofs" => SHARED_WITH_A_PROCESS,
        ("video", _) if driver("name") == "vhostuser" => SHARED_WITH_A_PROCESS,
        ("shmem", _) => {
            "its memory is shared with other guests and processes, which Strata does not manage"
        }
        _ => return None,
    };
    let which = match (name, kind) {
        ("filesystem", _) => " virtiofs".to_owned(),
        ("video", _) => " vhostuser".to_owned(),
        (_, "") => String::new(),
        (_, kind) => format!(" {kind}"),
    };
    Some((format!("{name}{which}"), why))
}
