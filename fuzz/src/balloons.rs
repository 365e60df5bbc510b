//! What an agent in a guest says of the guest's memory, and what becomes of that; and what it
//! says of what it was told.

use strata_policy::balloon::{Past, Seen, Settings, decide};
use strata_units::order::{Answer, Order};
use strata_units::reading::{Lines, MAX_READING_BYTES, Reading, asked};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 512 * MIB;

/// Lines of an agent's, in pieces of as many bytes as the first one says, a second each. Also
/// taken for questions and orders, as an agent reads them.
pub fn reading(data: &[u8]) {
    let Some((&size, said)) = data.split_first() else { return };
    let settings = Settings {
        floor_bytes: 64 * MIB,
        headroom_bytes: 16 * MIB,
        headroom_percent: 10,
        committed_percent: 100,
        hysteresis_bytes: 4 * MIB,
        up_bytes: 256 * MIB,
        down_bytes: 8 * MIB,
        some_percent: 10,
        full_percent: 2,
        swap_in_bytes: MIB,
        refault_bytes: MIB,
        low_percent: 50,
        calm_s: 2,
        remember_s: 10,
        stale_s: 5,
    };
    let (mut lines, mut past, mut balloon_bytes) = (Lines::default(), Past::default(), MEMORY);
    for piece in said.chunks(usize::from(size) + 1) {
        lines.take(piece, &mut |line| {
            assert!(line.len() <= MAX_READING_BYTES && !line.contains(&b'\n'));
            let _ = asked(line);
            if let Some(order) = Order::parse(line) {
                assert_eq!(Order::parse(order.to_string().as_bytes()), Some(order));
            }
            if let Some(answer) = Answer::parse(line) {
                let text = answer.to_string();
                assert!(text.len() <= MAX_READING_BYTES && !text.contains(char::is_control));
                assert_eq!(Answer::parse(text.as_bytes()), Some(answer));
            }
            let reading = Reading::parse(line);
            if let Some(reading) = &reading {
                let again = Reading::parse(reading.to_string().as_bytes());
                assert_eq!(again.as_ref(), Some(reading), "what was read can be written");
            }
            let seen = Seen {
                memory_bytes: MEMORY,
                balloon_bytes,
                had_bytes: balloon_bytes,
                seconds: 1.0,
                reading: reading.map(|reading| (reading, 1.0)),
                // Of a host that is short of DRAM, or has enough.
                fits_bytes: (size & 1 == 0).then_some(u64::from(size) * MIB),
            };
            let target = decide(&settings, &mut past, &seen).bytes;
            assert!((64 * MIB..=MEMORY).contains(&target));
            let free = reading.map_or(0, |reading| reading.free_bytes);
            assert!(target + free.max(8 * MIB) >= balloon_bytes, "faster down than is set");
            assert!(reading.is_some() || target == MEMORY, "nothing fresh was said");
            balloon_bytes = target;
        });
    }
}
