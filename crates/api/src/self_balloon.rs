//! Guests whose balloons follow what the guests say of their memory: how each is treated, and
//! what is known of it.

use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;
/// No guest runs in less.
const LEAST_FLOOR_BYTES: u64 = 16 * MIB;
/// Percentages beyond that mean nothing.
const MOST_PERCENT: u32 = 1000;
/// Nor do times beyond a day.
const MOST_SECONDS: u32 = 86_400;

/// How a guest's balloon follows it. Rates are per second, percentages of what is said there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelfBalloon {
    /// The guest always keeps so much.
    pub floor_bytes: u64,
    /// What it has beyond its need, at least, ...
    pub headroom_bytes: u64,
    /// ...and as a part of its need.
    pub headroom_percent: u32,
    /// How much of what its programs may come to use (`Committed_AS`) counts as needed.
    pub committed_percent: u32,
    /// Smaller changes are none.
    pub hysteresis_bytes: u64,
    /// How fast it grows.
    pub up_bytes: u64,
    /// How fast it shrinks.
    pub down_bytes: u64,
    /// It gets everything back if some of its tasks wait for memory so much of the time, ...
    pub some_percent: u32,
    /// ...or all of them so much, ...
    pub full_percent: u32,
    /// ...or so much comes in from its swap, ...
    pub swap_in_bytes: u64,
    /// ...or less of its headroom is available.
    pub low_percent: u32,
    /// It grows if so much is wanted again that was reclaimed.
    pub refault_bytes: u64,
    /// Seconds for which it must not have been short before it shrinks.
    pub calm_s: u32,
    /// Seconds for which it does not shrink to where it was short.
    pub remember_s: u32,
    /// Seconds after which what it said is too old.
    pub stale_s: u32,
}

impl SelfBalloon {
    /// What serves a guest of that size.
    #[must_use]
    pub fn for_memory(memory_bytes: u64) -> Self {
        let part = |of: u64, least: u64| (memory_bytes / of).max(least).min(memory_bytes);
        Self {
            floor_bytes: part(4, 64 * MIB),
            headroom_bytes: part(16, 32 * MIB),
            headroom_percent: 10,
            committed_percent: 100,
            hysteresis_bytes: part(64, 4 * MIB),
            up_bytes: part(2, 64 * MIB),
            down_bytes: part(64, 4 * MIB),
            some_percent: 10,
            full_percent: 2,
            swap_in_bytes: part(512, MIB),
            low_percent: 50,
            refault_bytes: part(256, MIB),
            calm_s: 30,
            remember_s: 300,
            stale_s: 5,
        }
    }

    /// What is wrong with it for a guest of that size; None when nothing is.
    #[must_use]
    pub fn problem(&self, memory_bytes: u64) -> Option<&'static str> {
        let percent = [
            self.headroom_percent,
            self.committed_percent,
            self.some_percent,
            self.full_percent,
            self.low_percent,
        ];
        if self.floor_bytes > memory_bytes {
            Some("its floor is more than the guest's memory")
        } else if self.floor_bytes < LEAST_FLOOR_BYTES.min(memory_bytes) {
            Some("its floor is 16 MiB at least")
        } else if self.up_bytes == 0 || self.down_bytes == 0 {
            Some("up and down are not 0: leave --self-balloon out for a balloon that stays")
        } else if percent.into_iter().any(|percent| percent > MOST_PERCENT) {
            Some("a percentage is 1000 at most")
        } else if self.some_percent == 0 || self.full_percent == 0 {
            Some("the share of time that counts as pressure is not 0")
        } else if self.calm_s.max(self.remember_s).max(self.stale_s) > MOST_SECONDS {
            Some("a time is a day at most")
        } else if self.stale_s == 0 {
            Some("what is said is good for a second at least")
        } else {
            None
        }
    }
}

/// What is known of a balloon that follows its guest.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BalloonStats {
    /// What the balloon is to leave the guest; none: that is not decided yet.
    pub target_bytes: Option<u64>,
    /// Why, in words.
    pub why: String,
    /// By whose word: `agent`, `driver` (the balloon's own figures), or empty: nobody's.
    pub by: String,
    /// How often the guest got everything back, since this worker started.
    pub given_back_total: u64,
    /// Why it did so last; empty: it has not.
    pub given_back_why: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_serves_is_right_for_any_guest_and_nonsense_is_refused() {
        for memory in [MIB, 8 * MIB, 100 * MIB, 1 << 30, 1 << 42] {
            assert_eq!(SelfBalloon::for_memory(memory).problem(memory), None, "{memory}");
        }
        let memory = 1 << 30;
        let whole = SelfBalloon::for_memory(memory);
        for (wrong, why) in [
            (SelfBalloon { floor_bytes: memory + 1, ..whole }, "more than"),
            (SelfBalloon { floor_bytes: MIB, ..whole }, "16 MiB"),
            (SelfBalloon { up_bytes: 0, ..whole }, "not 0"),
            (SelfBalloon { down_bytes: 0, ..whole }, "not 0"),
            (SelfBalloon { low_percent: 1001, ..whole }, "1000"),
            (SelfBalloon { some_percent: 0, ..whole }, "pressure"),
            (SelfBalloon { full_percent: 0, ..whole }, "pressure"),
            (SelfBalloon { remember_s: 86_401, ..whole }, "a day"),
            (SelfBalloon { stale_s: 0, ..whole }, "a second"),
        ] {
            assert!(wrong.problem(memory).is_some_and(|said| said.contains(why)), "{why}");
        }
    }
}
