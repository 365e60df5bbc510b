//! How much of what a machine is to share out it has.

/// What a machine keeps for itself: part of its memory, between these.
const KEEPS_PART: u64 = 16;
const KEEPS_LEAST: u64 = 24 << 20;
const KEEPS_MOST: u64 = 1 << 30;

/// A machine's memory, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Machine {
    /// All of it.
    pub total_bytes: u64,
    /// What could be had without swapping.
    pub available_bytes: u64,
}

/// Of `dram_bytes` that tenants may have together, what the machine can give them, who use
/// `used_bytes` of it: that, and what is available beyond what it keeps for itself and
/// what is promised to others (`promised_bytes`). Who uses it up leaves no machine in
/// which the kernel has to end a process.
#[must_use]
pub fn room_bytes(dram_bytes: u64, used_bytes: u64, promised_bytes: u64, machine: Machine) -> u64 {
    let keeps = (machine.total_bytes / KEEPS_PART).clamp(KEEPS_LEAST, KEEPS_MOST);
    let has = used_bytes.saturating_add(machine.available_bytes);
    dram_bytes.min(has.saturating_sub(keeps).saturating_sub(promised_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn it_gives_what_was_set_as_long_as_it_has_that_and_what_it_has_otherwise() {
        let room = |dram, used, promised, total, available| {
            let machine = Machine { total_bytes: total * MIB, available_bytes: available * MIB };
            room_bytes(dram * MIB, used * MIB, promised * MIB, machine) / MIB
        };
        assert_eq!(room(175, 100, 0, 384, 200), 175);
        // It keeps 24 MiB of 384, 1 GiB of 64.
        assert_eq!(room(175, 134, 0, 384, 44), 154);
        assert_eq!(room(60 << 10, 30 << 10, 0, 64 << 10, 4 << 10), 33 << 10);
        // Less than is in use already.
        assert_eq!(room(175, 134, 0, 384, 10), 120);
        assert_eq!(room(175, 134, 20, 384, 44), 134);
        assert_eq!(room(175, 5, 0, 384, 4), 0);
    }
}
