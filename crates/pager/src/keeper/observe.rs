//! What the keeper sees of its tenant, for the policy to decide on.

use std::sync::atomic::Ordering;

use strata_policy::budget::{self, Observation, Packed};
use strata_store::StoreStats;
use strata_units::PAGE;

use crate::keeper::Keeper;
use crate::map::registry::TenantRecord;
use crate::tenant::share::stored_page_cost;
use crate::tenant::usage::Usage;

/// The room to spare: this part of the budget.
const SPARE_PART: u64 = 16;
/// A tenant that has brought back this part of what is away goes on with it.
const USED_PART: i64 = 16;

impl Keeper<'_> {
    pub(super) fn set_headroom(&self, budget: u64, usage: Usage) {
        let hard = budget + budget::tolerance_bytes(budget) / 4;
        let pages = (hard as i64 - usage.total_bytes() as i64) / PAGE as i64;
        self.tenant.account.set_headroom(pages);
        let comes_back = self.comes_back(pages, budget / PAGE);
        self.tenant.comes_back.store(comes_back, Ordering::Relaxed);
    }

    /// With more headroom than this nobody will have to wait for what is being evicted:
    /// half of what is kept free is left.
    pub(super) fn comfortable_pages(&self) -> i64 {
        let budget = self.tenant.budget_bytes();
        let (low, _) = budget::watermarks_bytes(budget, 0);
        ((budget::tolerance_bytes(budget) / 4 + low / 2) / PAGE) as i64
    }

    /// Whether the tenant uses what is away, and all of it fits in with room to spare.
    /// What a clone does not touch it shares with others, and the advisor waits for
    /// the use of each page that it watches.
    fn comes_back(&self, headroom_pages: i64, budget_pages: u64) -> bool {
        let tenant = self.tenant;
        let room = headroom_pages - (budget_pages / SPARE_PART) as i64;
        // In most rounds of a tenant at its budget that is all.
        if room <= 0 || self.advising.is_some() || tenant.shares_store() {
            return false;
        }
        let away = tenant.away_pages() as i64;
        let resident = tenant.account.resident_pages();
        (1..room).contains(&away) && resident > away / USED_PART
    }

    pub(super) fn observe(&mut self, budget_bytes: u64, usage: Usage) -> Observation {
        let tenant = self.tenant;
        let store = tenant.store_stats();
        let managed = tenant.account.resident_pages().max(0) as u64 * PAGE;
        let in_space = usage.in_space_bytes(managed);
        let stay = usage.merged_cost_bytes() + self.pinned.len() as u64 * PAGE;
        let pinned = stay + self.heeded_pins();
        let resident_bytes = in_space + store.staged_bytes;
        let growth_bytes = resident_bytes.saturating_sub(self.resident_before);
        self.resident_before = resident_bytes;
        let (fast, dense) = packed(&store);
        // All else that it costs: the policy must see what faults are refused for.
        let other = usage.total_bytes().saturating_sub(usage.anonymous_bytes + store.dram_bytes);
        Observation {
            budget_bytes,
            resident_bytes,
            evictable_bytes: in_space.saturating_sub(pinned),
            staged_bytes: store.staged_bytes,
            fast,
            dense,
            lands_dense: store.lands_dense,
            kept_unchanged_percent: self.evictor.copies.unchanged_percent(),
            kept_cost_bytes: tenant.kept_pages() * stored_page_cost(&store),
            metadata_bytes: other,
            unmanaged_bytes: usage.anonymous_bytes - in_space,
            merged_saved_bytes: usage.merged_saved_bytes,
            growth_bytes,
            node_room_bytes: self.node_room_bytes(&store),
            file_room_bytes: file_room_bytes(&tenant.record, &store),
            file_first: tenant.record.tier_order.is_file_first(),
            evicting: self.evicting,
        }
    }
}

/// What is left of the file tier; none where there is none.
pub(super) fn file_room_bytes(record: &TenantRecord, store: &StoreStats) -> Option<u64> {
    record.tier.as_ref().map(|(_, limit)| limit.saturating_sub(store.file_bytes))
}

/// What lz4 packed, and everything else in DRAM that is not staged (zstd, with a
/// dictionary or without, and pages that do not compress): what each was and
/// costs, unused parts of slots and slabs shared out in proportion.
fn packed(store: &StoreStats) -> (Packed, Packed) {
    let payload = store.payload_bytes - store.staged_bytes.min(store.payload_bytes);
    let cost = store.dram_bytes.saturating_sub(store.staged_bytes);
    let fast_cost = (u128::from(cost) * u128::from(store.fast_payload_bytes)
        / u128::from(payload.max(1))) as u64;
    let fast_cost = fast_cost.min(cost);
    let in_dram = store.objects * PAGE;
    let rest = in_dram.saturating_sub(store.fast_original_bytes + store.staged_bytes);
    let fast = Packed { original_bytes: store.fast_original_bytes, cost_bytes: fast_cost };
    (fast, Packed { original_bytes: rest, cost_bytes: cost - fast_cost })
}
