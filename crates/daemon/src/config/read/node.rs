//! The node tier's keys: which node, how much of it, how fast.

use strata_sys::{MOST_NODES, MemoryNode};
use strata_units::ByteSize;
use toml::de::{DeTable, DeValue};

use super::{Reader, Refusal, size, wrong_type};
use crate::config::{Config, Machine, Node};

/// Slower than this, a page would take longer to move than to compress.
const LEAST_BANDWIDTH: ByteSize = ByteSize(1 << 20);

impl Reader<'_> {
    pub(super) fn node(&mut self, table: &DeTable<'_>, config: &mut Config) {
        let machine = self.machine;
        config.node = self.get(table, "node", |value| node(value, machine));
        for key in ["node_limit", "node_bandwidth"] {
            if let (Some(value), None) = (table.get(key), table.get("node")) {
                let todo = "set node to its number or \"auto\", or leave it out";
                self.complain(&value.span(), key, ("there is no node tier".into(), todo.into()));
            }
        }
        let limit = self.get(table, "node_limit", size);
        let bandwidth = self.get(table, "node_bandwidth", bandwidth);
        let Some(Node { number, limit: all, .. }) = config.node else { return };
        if let (Some(limit), Some(value)) = (limit, table.get("node_limit"))
            && limit > all
        {
            let what = format!("{limit} is more than node {number} has ({all})");
            self.complain(&value.span(), "node_limit", (what, "name a smaller limit".into()));
        }
        if let Some(node) = &mut config.node {
            node.limit = limit.unwrap_or(all);
            node.bandwidth = bandwidth.unwrap_or(node.bandwidth);
        }
    }
}

fn node(value: &DeValue<'_>, machine: &Machine) -> Result<Node, Refusal> {
    const WANTED: &str = "the number of a node without processors, or \"auto\"";
    let nodes = (machine.nodes)();
    let fits = |node: &&MemoryNode| !node.has_cpus && node.total_bytes > 0;
    let known = || {
        let listed: Vec<String> = nodes.iter().filter(fits).map(|n| n.number.to_string()).collect();
        match listed.is_empty() {
            true => "leave it out: this machine has no node without processors".to_owned(),
            false => format!("such nodes are here: {}", listed.join(", ")),
        }
    };
    let found = match value {
        DeValue::String(text) if text == "auto" => {
            let largest = nodes.iter().filter(fits).max_by_key(|node| node.total_bytes);
            largest.ok_or_else(|| ("there is none".to_owned(), known()))?
        }
        DeValue::Integer(number) => {
            let number = u32::from_str_radix(number.as_str(), number.radix());
            let number = number.ok().filter(|&number| number < MOST_NODES);
            let Some(number) = number else {
                return Err(("is no node's number".into(), known()));
            };
            let Some(node) = nodes.iter().find(|node| node.number == number) else {
                return Err((format!("node {number} is not there, or offline"), known()));
            };
            if node.has_cpus {
                return Err((format!("node {number} has processors: it is plain DRAM"), known()));
            }
            if node.total_bytes == 0 {
                return Err((format!("node {number} has no memory online"), known()));
            }
            node
        }
        DeValue::String(text) => return Err((format!("{text:?} is no node"), known())),
        other => return Err(wrong_type(other, WANTED)),
    };
    let number = found.number;
    let home = (machine.home_of)(number).ok_or_else(|| {
        (format!("no node with processors is near node {number}"), "leave it out".to_owned())
    })?;
    let limit = ByteSize(found.total_bytes);
    Ok(Node { number, home, limit, bandwidth: crate::config::DEFAULT_NODE_BANDWIDTH })
}

fn bandwidth(value: &DeValue<'_>) -> Result<ByteSize, Refusal> {
    let size = size(value)?;
    if size < LEAST_BANDWIDTH {
        let what = format!("{size} a second is too little");
        return Err((what, format!("give it at least {LEAST_BANDWIDTH}, or no node")));
    }
    Ok(size)
}
