//! The node tier: whether it can be had, and who else moves pages between nodes.

use super::kernel::may_ptrace;
use super::{Files, Finding, Presence};

const NODES: &str = "/sys/devices/system/node";

/// Nodes by name, and which of them are without a processor.
pub(super) fn nodes(files: &Files) -> (usize, Vec<String>) {
    let mut names = files.names(NODES);
    names.retain(|name| {
        name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok())
    });
    let count = names.len();
    names.retain(|name| {
        files.read(&format!("{NODES}/{name}/cpulist")).is_some_and(|cpus| cpus.is_empty())
    });
    (count, names)
}

/// Nothing where there is no such node: what is not there needs no more lines.
pub(super) fn findings(files: &Files) -> Vec<Finding> {
    let (_, without_cpu) = nodes(files);
    if without_cpu.is_empty() {
        return Vec::new();
    }
    vec![rights(files, &without_cpu), balancing(files), demotion(files)]
}

/// `move_pages` asks for the right to read the process. (`CAP_SYS_NICE` is for pages
/// that processes share; those stay.)
fn rights(files: &Files, nodes: &[String]) -> Finding {
    let (may, said) = may_ptrace(files);
    let detail = format!("{}, {said}", nodes.join(" "));
    Finding::yes_or_no("node tier", may, detail).without("moving pages there (run stratad as root)")
}

fn balancing(files: &Files) -> Finding {
    let mode = files.read("/proc/sys/kernel/numa_balancing");
    let (presence, detail) = match mode.as_deref() {
        None | Some("0") => (Presence::Yes, "off: only Strata brings pages back"),
        Some("1") => (Presence::Partly, "on: the kernel brings pages back that are touched"),
        Some("2") => (Presence::Partly, "tiering: the kernel brings hot pages back, too"),
        Some(_) => (Presence::Partly, "on: the kernel brings pages back, too"),
    };
    Finding::new("NUMA balancing", presence, detail).without(
        "pages stay where Strata puts them; what the kernel moves back within ten seconds is counted (opposed_moves_total) and left alone for a minute",
    )
}

fn demotion(files: &Files) -> Finding {
    let on = files.read("/sys/kernel/mm/numa/demotion_enabled");
    let on = on.is_some_and(|text| matches!(text.as_str(), "1" | "true"));
    let (presence, detail) = match on {
        false => (Presence::Yes, "off: only Strata moves pages to the node"),
        true => (Presence::Partly, "on: the kernel moves cold pages to the node, too"),
    };
    Finding::new("kernel demotion", presence, detail)
        .without("a budget alone decides who is on the node; what the kernel moves there is found within minutes")
}
