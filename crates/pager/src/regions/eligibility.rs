//! Which mappings are managed, and why the others are not. The one place that says so.

use std::sync::OnceLock;

use strata_sys::{Mapping, Range};

use crate::map::address::overlaps;
use crate::tenant::space::AgentRanges;

/// Smaller mappings are left alone as long as a process has few of them: glibc's own
/// threshold for giving an allocation a mapping of its own.
pub(crate) const SMALLEST_BYTES: u64 = 128 << 10;
/// From so much memory in small mappings on, those are managed as well. What the C
/// library and the loader have there is much less.
const SMALL_TOGETHER_BYTES: u64 = 4 << 20;
/// A mapping that holds a thread's stack is taken for that stack, whole, up to this
/// size; in a larger one only the thread's control block is kept out.
const LARGEST_STACK_BYTES: u64 = 64 << 20;
/// The kernel's own default for `vm.max_map_count`.
const DEFAULT_MOST_MAPPINGS: usize = 65530;

/// Why a mapping is not managed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Why {
    /// Shared with other processes, or with a file.
    Shared,
    /// A private mapping of a file (a memfd, too), and the program's changes to it:
    /// `UFFDIO_MOVE` takes plain anonymous memory alone.
    File,
    /// A private mapping of /dev/zero: anonymous for the kernel, but a file for CRIU,
    /// which would not have its pages fetched in what it restores.
    DevZero,
    /// The kernel's own (`[vdso]`), or the main thread's stack.
    Kernel,
    /// Executable: code that was made when the program ran.
    Executable,
    /// Strata's own, in the program.
    Agent,
    /// A thread's stack: the kernel writes there and cannot wait.
    Stack,
    /// Smaller than 128 KiB, in a process that has less than 4 MiB in such mappings, or
    /// half as many mappings as the kernel allows; or part of a library.
    Small,
}

/// Whether a mapping is data of the program's that can be moved at all.
pub(crate) fn is_data(mapping: &Mapping, agent: AgentRanges) -> Result<(), Why> {
    if !mapping.private {
        Err(Why::Shared)
    } else if mapping.dev_zero {
        Err(Why::DevZero)
    } else if !mapping.anonymous {
        Err(if mapping.backed { Why::File } else { Why::Kernel })
    } else if mapping.executable {
        Err(Why::Executable)
    } else if overlaps(mapping.range, agent.transfer) || overlaps(mapping.range, agent.own) {
        Err(Why::Agent)
    } else {
        Ok(())
    }
}

/// The same, and that it is not small and no stack: what is managed in every process.
pub(crate) fn is_large_data(
    mapping: &Mapping,
    agent: AgentRanges,
    stacks: &[u64],
) -> Result<(), Why> {
    is_data(mapping, agent)?;
    if mapping.range.len() < SMALLEST_BYTES {
        return Err(Why::Small);
    }
    if is_stack(mapping, stacks) { Err(Why::Stack) } else { Ok(()) }
}

fn is_stack(mapping: &Mapping, stacks: &[u64]) -> bool {
    mapping.range.len() <= LARGEST_STACK_BYTES
        && stacks.iter().any(|&stack| mapping.range.contains(stack))
}

/// Each mapping of a process, in order, and why it is not managed, if it is not.
pub(crate) fn eligibility<'maps>(
    maps: &'maps [Mapping],
    agent: AgentRanges,
    stacks: &[u64],
) -> Vec<(&'maps Mapping, Result<(), Why>)> {
    let mut eligibility: Vec<_> =
        maps.iter().map(|mapping| (mapping, is_large_data(mapping, agent, stacks))).collect();
    if maps.len() >= most_mappings() / 2 {
        // Memory that is registered does not become one mapping with its neighbours
        // that are not: a program that makes many would come to its limit earlier.
        return eligibility;
    }
    let mut small = Vec::new();
    let mut bytes = 0;
    for (index, &(mapping, eligible)) in eligibility.iter().enumerate() {
        // What has no access holds nothing, or a guard; what follows a file's mapping
        // is a library's variables, those of Strata's library perhaps.
        let follows_file = index.checked_sub(1).is_some_and(|before| {
            maps[before].backed && maps[before].range.end == mapping.range.start
        });
        if eligible == Err(Why::Small)
            && mapping.writable
            && !follows_file
            && !is_stack(mapping, stacks)
        {
            bytes += mapping.range.len();
            small.push(index);
        }
    }
    if bytes >= SMALL_TOGETHER_BYTES {
        small.into_iter().for_each(|index| eligibility[index].1 = Ok(()));
    }
    eligibility
}

/// The ranges of what is managed of a process.
pub(crate) fn managed(maps: &[Mapping], agent: AgentRanges, stacks: &[u64]) -> Vec<Range> {
    let eligibility = eligibility(maps, agent, stacks).into_iter();
    eligibility.filter(|(_, why)| why.is_ok()).map(|(mapping, _)| mapping.range).collect()
}

/// How many mappings a process may have (`vm.max_map_count`).
fn most_mappings() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        text.trim().parse().unwrap_or(DEFAULT_MOST_MAPPINGS)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    const AGENT: AgentRanges = AgentRanges {
        transfer: Range { start: 1 << 40, end: (1 << 40) + (2 << 20) },
        own: Range { start: 2 << 40, end: (2 << 40) + (1 << 20) },
    };

    fn at(start: u64, bytes: u64) -> Mapping {
        testing::anonymous(Range { start, end: start + bytes })
    }

    fn file(start: u64, bytes: u64) -> Mapping {
        Mapping { anonymous: false, backed: true, fileless: false, ..at(start, bytes) }
    }

    /// So many mappings of 64 KiB, a page between any two.
    fn blocks(count: u64) -> Vec<Mapping> {
        (0..count).map(|index| at((8 << 30) + index * (68 << 10), 64 << 10)).collect()
    }

    fn reasons(maps: &[Mapping], stacks: &[u64]) -> Vec<Option<Why>> {
        eligibility(maps, AGENT, stacks).into_iter().map(|(_, why)| why.err()).collect()
    }

    #[test]
    fn every_kind_has_its_reason() {
        let large = 1 << 20;
        let stack = 9 << 30;
        let maps = [
            at(1 << 30, large),
            Mapping { private: false, ..at(2 << 30, large) },
            file(3 << 30, large),
            Mapping { dev_zero: true, ..file(4 << 30, large) },
            Mapping { executable: true, ..at(5 << 30, large) },
            Mapping { anonymous: false, fileless: false, ..at(6 << 30, large) },
            at(7 << 30, SMALLEST_BYTES - 4096),
            at(stack, large),
            at(AGENT.transfer.start, large),
            at(AGENT.own.start - large, 2 * large),
        ];
        let expected = [
            None,
            Some(Why::Shared),
            Some(Why::File),
            Some(Why::DevZero),
            Some(Why::Executable),
            Some(Why::Kernel),
            Some(Why::Small),
            Some(Why::Stack),
            Some(Why::Agent),
            Some(Why::Agent),
        ];
        assert_eq!(reasons(&maps, &[stack + 4096]), expected);
        assert_eq!(managed(&maps, AGENT, &[stack]), [maps[0].range]);
    }

    #[test]
    fn small_mappings_are_managed_where_there_are_many_of_them() {
        let few = blocks(SMALL_TOGETHER_BYTES / (64 << 10) - 1);
        assert!(reasons(&few, &[]).iter().all(|why| *why == Some(Why::Small)));
        let enough = blocks(SMALL_TOGETHER_BYTES / (64 << 10));
        assert!(reasons(&enough, &[]).iter().all(Option::is_none));
        assert!(!reasons(&enough, &[enough[3].range.start]).iter().all(Option::is_none));
    }

    #[test]
    fn guards_and_variables_of_libraries_are_left_alone_among_them() {
        let mut maps = vec![
            file(1 << 30, 4096),
            // Begins where a file's mapping ends: a library's.
            at((1 << 30) + 4096, 8192),
            Mapping { writable: false, ..at(2 << 30, 4096) },
            at((2 << 30) + 4096, 4096),
        ];
        maps.extend(blocks(2 * SMALL_TOGETHER_BYTES / (64 << 10)));
        let reasons = reasons(&maps, &[]);
        let small = Some(Why::Small);
        assert_eq!(reasons[..4], [Some(Why::File), small, small, None]);
        assert!(reasons[4..].iter().all(Option::is_none));
    }

    #[test]
    fn a_process_near_its_limit_of_mappings_keeps_its_small_ones() {
        let many = blocks(most_mappings() as u64 / 2);
        assert!(reasons(&many, &[]).iter().all(|why| *why == Some(Why::Small)));
    }
}
