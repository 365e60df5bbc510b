//! What each mapping of a process has in memory. Walks its page tables: for rare
//! questions only.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use crate::process::{Mapping, parse_mapping};

/// A mapping, and what of it is in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappingUse {
    /// Which.
    pub mapping: Mapping,
    /// Resident anonymous bytes.
    pub anonymous_bytes: u64,
}

/// The mappings of a process that have resident anonymous memory, in order.
///
/// # Errors
/// It is gone, or may not be looked at.
pub fn read_mapping_uses(pid: u32) -> io::Result<Vec<MappingUse>> {
    let mut reader = BufReader::new(File::open(format!("/proc/{pid}/smaps"))?);
    let mut line = String::new();
    let mut uses = Vec::new();
    let mut current = None;
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(uses);
        }
        // "Rss:", "VmFlags:" and so on: a mapping's line begins with its addresses.
        let is_field = line.as_bytes().first().is_some_and(u8::is_ascii_uppercase);
        if !is_field {
            current = parse_mapping(&line);
        } else if let (Some(mapping), Some(rest)) = (current, line.strip_prefix("Anonymous:")) {
            let kib: u64 = rest.trim().trim_end_matches("kB").trim().parse().unwrap_or(0);
            if kib > 0 {
                uses.push(MappingUse { mapping, anonymous_bytes: kib << 10 });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OwnMemory;

    #[test]
    fn what_is_touched_is_found() {
        let memory = OwnMemory::create(16).expect("memory");
        let found = |of: &OwnMemory| {
            let uses = read_mapping_uses(std::process::id()).expect("this process");
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
        read_mapping_uses(u32::MAX).expect_err("no such process");
    }
}
