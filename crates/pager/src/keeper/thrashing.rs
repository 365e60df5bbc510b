//! A tenant whose budget is so small that it does little but wait for its pages says so,
//! with the budget that would end it.

use std::sync::Arc;

use strata_policy::budget::REGISTER_PERCENT;
use strata_units::{ByteSize, PAGE};

use super::Keeper;
use crate::tenant::space::Space;
use crate::tenant::usage::Usage;

/// A tenant thrashes from this part of the last ten seconds on in which some thread
/// waited...
const FROM: f64 = 0.5;
/// ...until it is less than this.
const UNTIL: f64 = 0.3;

/// Whether a tenant thrashes that did or did not so far.
fn thrashes(did: bool, some_10_s: f64, some_is_out: bool) -> bool {
    some_is_out && some_10_s >= if did { UNTIL } else { FROM }
}

/// The budget under which all that a tenant has is in DRAM, and nothing is registered.
fn enough_bytes(in_dram_bytes: u64, out_bytes: u64) -> u64 {
    (in_dram_bytes + out_bytes) / REGISTER_PERCENT * 100
}

fn text(
    some_10_s: f64,
    resident_bytes: u64,
    out_bytes: u64,
    enough_bytes: u64,
    name: &str,
) -> String {
    format!(
        "thrashes: in {:.0} % of the last 10 s some thread waited for a page ({} in DRAM, {} stored); with a budget of {} nothing would have to leave; strata advise {name} tells what less would cost",
        some_10_s * 100.0,
        ByteSize(resident_bytes),
        ByteSize(out_bytes),
        ByteSize(enough_bytes)
    )
}

impl Keeper<'_> {
    /// Ends a window of the stall's averages and notes whether the tenant thrashes.
    pub(super) fn say_thrashing(&mut self, spaces: &[Arc<Space>], usage: Usage) {
        let tenant = self.tenant;
        if !tenant.look_at_stall(spaces.iter().filter_map(|space| space.process())) {
            return;
        }
        let some_10_s = tenant.stalled().some[0];
        let out_bytes = tenant.away_pages() * PAGE;
        let did = self.thrashes;
        self.thrashes = thrashes(did, some_10_s, out_bytes > 0);
        if !self.thrashes {
            if did {
                tenant.note("thrashes", None);
            }
            return;
        }
        let resident_bytes = usage.anonymous_bytes;
        let enough = enough_bytes(resident_bytes + usage.shared_bytes, out_bytes);
        let name = &tenant.record.name;
        tenant.note("thrashes", Some(text(some_10_s, resident_bytes, out_bytes, enough, name)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_late_and_ends_late() {
        for (did, some, out, does) in [
            (false, 0.49, true, false),
            (false, 0.5, true, true),
            (true, 0.31, true, true),
            (true, 0.29, true, false),
            // What waits for first touches does not wait for want of a budget.
            (false, 0.9, false, false),
        ] {
            assert_eq!(thrashes(did, some, out), does, "{did} {some} {out}");
        }
    }

    #[test]
    fn the_budget_that_ends_it_is_above_where_anything_is_registered() {
        let enough = enough_bytes(1 << 20, 900 << 20);
        assert!(enough * REGISTER_PERCENT / 100 >= (901 << 20) - 100, "{enough}");
        let text = text(0.83, 1 << 20, 900 << 20, enough, "db");
        assert!(text.starts_with("thrashes: in 83 % of the last 10 s"), "{text}");
        assert!(
            text.contains("with a budget of 1001.1 MiB") && text.contains("advise db"),
            "{text}"
        );
    }
}
