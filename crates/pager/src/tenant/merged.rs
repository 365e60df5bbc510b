//! What a tenant's pages that the kernel has merged with equal ones (KSM) cost it.
//!
//! Of a merged page a tenant pays the part that it has of it. What that spares it is
//! measured now and then, by a walk through page tables; and a program that writes to such
//! a page gets one of its own without anybody being asked. So between two measurements
//! each fault that the kernel served alone counts as such a write: the tenant is taken for
//! cheaper than it is for no page that may have been written.

use std::sync::Arc;

use strata_sys::{MergedMemory, Process};
use strata_units::PAGE_SIZE;

/// What was measured, and what may have become of it.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    measured: MergedMemory,
    /// The process, where it is the tenant's only one, and its faults at that time.
    since: Option<(Arc<Process>, u64)>,
}

impl Merged {
    /// Measures. `processes`: all of the tenant's.
    pub(crate) fn measure(processes: &[Arc<Process>]) -> Self {
        // Before: what is written meanwhile counts.
        let since = match processes {
            [one] => one.minor_faults().map(|faults| (Arc::clone(one), faults)),
            _ => None,
        };
        let mut measured = MergedMemory::default();
        for process in processes {
            let one = process.merged_memory().unwrap_or_default();
            measured.bytes += one.bytes;
            measured.saved_bytes += one.saved_bytes;
        }
        Self { measured, since }
    }

    /// What is spared at least, now.
    pub(crate) fn now(&self) -> MergedMemory {
        let MergedMemory { bytes, saved_bytes } = self.measured;
        if saved_bytes == 0 {
            return self.measured;
        }
        let written = match &self.since {
            Some((process, then)) => match process.minor_faults() {
                Some(faults) => faults.saturating_sub(*then).saturating_mul(PAGE_SIZE as u64),
                None => saved_bytes,
            },
            // The kernel counts for several: what they are charged follows at once.
            None => 0,
        };
        MergedMemory { bytes, saved_bytes: saved_bytes.saturating_sub(written) }
    }

    /// What was spared when it was measured.
    pub(crate) fn saved_then(&self) -> u64 {
        self.measured.saved_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_fault_may_have_been_a_write_to_a_merged_page() {
        let process = testing::own_process();
        let faults = process.minor_faults().expect("this process");
        let measured = MergedMemory { bytes: 1 << 50, saved_bytes: 1 << 40 };
        let merged = Merged { measured, since: Some((process, faults)) };
        let first = merged.now().saved_bytes;
        let memory = vec![1u8; 64 * PAGE_SIZE];
        assert!(merged.now().saved_bytes <= first && memory[PAGE_SIZE] == 1);
        let since = merged.since.clone().map(|(process, then)| (process, then.saturating_sub(9)));
        let earlier = Merged { measured, since }.now();
        assert!(earlier.saved_bytes <= measured.saved_bytes - 9 * PAGE_SIZE as u64);
        assert_eq!(earlier.bytes, measured.bytes);
        assert_eq!(Merged { measured, since: None }.now(), measured);
    }
}
