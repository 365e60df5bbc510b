//! What each mapping of a process has in memory. Walks its page tables: for rare
//! questions only.

use crate::process::{Mapping, parse_mapping};

/// A mapping, and what of it is in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappingUse {
    /// Which.
    pub mapping: Mapping,
    /// Resident anonymous bytes.
    pub anonymous_bytes: u64,
}

/// "12 kB", in bytes.
fn bytes_of(words: &str) -> u64 {
    words.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0) << 10
}

/// The first field of a name, in bytes; 0 where the kernel has none.
pub(crate) fn field_bytes(text: &str, name: &str) -> u64 {
    text.lines().find_map(|line| line.strip_prefix(name)).map_or(0, bytes_of)
}

/// The mappings that have resident anonymous memory, in order.
pub(crate) fn parse_uses(text: &str) -> Vec<MappingUse> {
    let mut uses = Vec::new();
    let mut current = None;
    for line in text.lines() {
        // "Rss:", "VmFlags:" and so on: a mapping's line begins with its addresses.
        let is_field = line.as_bytes().first().is_some_and(u8::is_ascii_uppercase);
        if !is_field {
            current = parse_mapping(line);
        } else if let (Some(mapping), Some(rest)) = (current, line.strip_prefix("Anonymous:")) {
            let anonymous_bytes = bytes_of(rest);
            if anonymous_bytes > 0 {
                uses.push(MappingUse { mapping, anonymous_bytes });
            }
        }
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OwnMemory;

    #[test]
    fn what_is_touched_is_found() {
        let memory = OwnMemory::create(16).expect("memory");
        let found = |of: &OwnMemory| {
            let own = crate::Process::open(std::process::id()).expect("this process");
            let uses = own.mapping_uses().expect("as above");
            let within = |one: &&MappingUse| {
                one.mapping.range.start <= of.range().start
                    && of.range().end <= one.mapping.range.end
            };
            uses.iter().find(within).map_or(0, |one| one.anonymous_bytes)
        };
        let before = found(&memory);
        for page in 0..16 {
            memory.write_page(page, &strata_units::PageBuffer([page as u8 + 1; 4096]));
        }
        assert!(found(&memory) >= before + (16 << 12), "{before}");
    }
}
