//! What a tenant may claim of the host's DRAM, and what says how much it needs: kept
//! here, decided on elsewhere (`strata_policy::shares`).

use std::sync::atomic::Ordering;

use strata_units::PAGE_SIZE;

use crate::map::counters::Counter;
use crate::tenant::Tenant;

/// With less of it out, how well a tenant's memory compresses is not known.
const KNOWN_BYTES: u64 = 8 << 20;

/// What a tenant claims of the host's DRAM. Survives the worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// What it always gets back.
    pub reserve_bytes: u64,
    /// The most that it may have; `u64::MAX`: no limit of its own.
    pub limit_bytes: u64,
    /// Its share of the rest, in thousandths; never 0.
    pub weight_thousandths: u64,
}

/// What a tenant has done since its start, and has now. All of it can be had without
/// asking its processes' page tables.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Demand {
    /// It cannot do with less: what is pinned, and our own records.
    pub least_bytes: u64,
    /// What it costs beside that with nothing in place: where there is no room below
    /// compressed memory, all of it compressed.
    pub packed_bytes: u64,
    /// What it costs.
    pub used_bytes: u64,
    /// What it would cost with everything in place.
    pub whole_bytes: u64,
    /// What was brought back so far.
    pub returned_bytes: u64,
    /// What was evicted so far.
    pub evicted_bytes: u64,
    /// So long some thread has waited for a page.
    pub waited_ns: u64,
    /// Processor time of its processes that live.
    pub processor_ns: u64,
}

impl Tenant {
    /// What it claims; none: its budget is its own and changes only when it is told to.
    #[must_use]
    pub fn claim(&self) -> Option<Claim> {
        let [reserve, limit, weight] = self.registry.claim(self.id);
        let weight_thousandths = weight.load(Ordering::Acquire);
        (weight_thousandths > 0).then(|| Claim {
            reserve_bytes: reserve.load(Ordering::Relaxed),
            limit_bytes: limit.load(Ordering::Relaxed),
            weight_thousandths,
        })
    }

    /// See [`Self::claim`].
    pub fn set_claim(&self, claim: Option<Claim>) {
        let [reserve, limit, weight] = self.registry.claim(self.id);
        match claim {
            None => weight.store(0, Ordering::Release),
            Some(claim) => {
                reserve.store(claim.reserve_bytes, Ordering::Relaxed);
                limit.store(claim.limit_bytes, Ordering::Relaxed);
                weight.store(claim.weight_thousandths.max(1), Ordering::Release);
            }
        }
    }

    /// See [`Demand`].
    #[must_use]
    pub fn demand(&self) -> Demand {
        let usage = self.usage();
        let store = self.store_stats();
        let count = |counter| self.counters.get(counter);
        let kept_bytes = self.kept_pages() * PAGE_SIZE as u64;
        let used_bytes = usage.total_bytes();
        let out_bytes = store.stored_bytes.saturating_sub(kept_bytes);
        let in_place_bytes = used_bytes.saturating_sub(store.dram_bytes);
        let returned = count(Counter::Faults) + count(Counter::PagesAhead);
        let processes = self.processes();
        let processor: std::time::Duration =
            processes.iter().filter_map(|one| one.processor_time()).sum();
        let fixed_bytes = usage.metadata_bytes + self.pinned_bytes();
        let has_room_below =
            self.record.tier.as_ref().is_some_and(|&(_, limit)| limit > store.file_bytes);
        let packed_bytes = if has_room_below {
            0
        } else {
            let can_leave = in_place_bytes.saturating_sub(fixed_bytes);
            packed(store.dram_bytes, out_bytes, can_leave)
        };
        Demand {
            least_bytes: fixed_bytes,
            packed_bytes,
            used_bytes,
            whole_bytes: in_place_bytes + out_bytes,
            returned_bytes: returned.saturating_sub(count(Counter::ZeroFaults)) * PAGE_SIZE as u64,
            evicted_bytes: count(Counter::Evictions) * PAGE_SIZE as u64,
            waited_ns: self.waited_ns(),
            processor_ns: processor.as_nanos() as u64,
        }
    }
}

/// What pages cost that cannot go below compressed memory: what those that are out do, and
/// those in place, should they be like them. Of hardly any that are out nothing is known.
fn packed(cost_bytes: u64, out_bytes: u64, in_place_bytes: u64) -> u64 {
    if out_bytes < KNOWN_BYTES {
        return cost_bytes;
    }
    let ratio = (cost_bytes as f64 / out_bytes as f64).min(1.0);
    cost_bytes.saturating_add((in_place_bytes as f64 * ratio) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_place_is_taken_to_compress_as_what_is_out() {
        let mib = 1 << 20;
        assert_eq!(packed(40 * mib, 100 * mib, 50 * mib), 60 * mib);
        assert_eq!(packed(mib, mib, 50 * mib), mib, "of one MiB nothing is known");
        assert_eq!(packed(20 * mib, 10 * mib, mib), 21 * mib, "never more than they are");
    }
}
