//! How much of a tenant should be resident, staged, stored densely or in a file:
//! from what was counted to what should be done, without memory of its own.
//! Which pages it hits is decided in [`crate::replacement`].
//!
//! The owner observes, calls [`decide`], does some of what it says, and looks
//! again after [`Actions::next_look_us`] at the latest, or when it has done it.
//! Everything asked for is an amount *from now on*, not a sum over calls.

use strata_units::PAGE;

const MIB: u64 = 1 << 20;

/// Registering starts at this many hundredths of the budget.
pub const REGISTER_PERCENT: u64 = 90;
/// The fastest that memory is assumed to grow: some cores of first touches.
const GROWTH_BYTES_PER_US: u64 = 16_000;
/// Bounds of [`Actions::next_look_us`].
const LOOK_MIN_US: u64 = 1_000;
const LOOK_MAX_US: u64 = 250_000;

/// Free memory below which eviction starts: this part of the budget...
const LOW_PART: u64 = 256;
/// ...within these bounds, but never more than an eighth of the budget.
const LOW_MIN_BYTES: u64 = MIB;
const LOW_MAX_BYTES: u64 = 64 * MIB;

/// Who evicts evicts at least so many pages, or as many as the low mark has: a few
/// at a time cost as many commands, messages and moments in which no fault can be
/// served as a full batch, and beside faults that keep coming the rest is always few.
const LEAST_EVICTION_PAGES: u64 = strata_units::wire::BATCH_PAGES as u64;

/// What may stay staged when nothing presses: this part of the budget, and of what
/// is out. Staged pages spare a decompression when they were warm and cost a whole
/// page: where few are out, as many more would have to be.
const STAGED_PART: f64 = 64.0;
const STAGED_PART_OF_OUT: f64 = 8.0;
/// What kept copies of resident pages may cost: this part of the budget, and what the
/// pages out cost times so many times their number over that of resident ones. They
/// spare a compression per eviction and cost resident pages: with few out every page
/// more is many more misses (docs/measurements.md, "A budget that is a little too
/// small").
pub(crate) const KEPT_PART: u64 = 32;
const KEPT_TIMES: f64 = 2.0;
/// Where hardly any does, they get less: enough to notice when that changes.
const FEW_UNCHANGED_PERCENT: u64 = 25;
const KEPT_PART_USELESS: u64 = 256;
/// From this part of the tolerance on, growth waits and kept copies go.
const HOLD_PART: u64 = 4;
/// From this part of the budget on, what is stored fast is packed densely: the
/// pages won by it spare more misses than dense pages cost in decompression.
const DENSE_PART: u64 = 4;
/// From this part of the budget on, stored pages go to the file tier.
const FILE_PART: u64 = 2;

/// Compression ratios until enough was seen, in 2^-8.
const GUESSED_FAST_RATIO: u64 = 2 << RATIO_SHIFT;
const RATIO_SHIFT: u32 = 8;
/// How much smaller dense packing is guessed to make a fast-packed page: 4/3
/// times the ratio, less than was measured on any records.
const GUESSED_DENSE_GAIN: (u64, u64) = (4, 3);
/// Original bytes that must be stored before their ratio is believed.
const RATIO_SAMPLE_BYTES: u64 = MIB;
/// A page in the store costs at least this (a ratio of 128): index and class
/// rounding.
const MIN_STORED_PAGE_BYTES: u64 = 32;

/// What is stored by one packing method.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Packed {
    /// Before packing.
    pub original_bytes: u64,
    /// What it costs in DRAM.
    pub cost_bytes: u64,
}

impl Packed {
    /// Cost of a page, with `guess` bytes until enough is stored to know.
    fn page_cost(&self, guess: u64) -> u64 {
        let seen = if self.original_bytes < RATIO_SAMPLE_BYTES {
            guess
        } else {
            // Rounded up: what is said to fit must fit.
            let cost = u128::from(self.cost_bytes) * u128::from(PAGE);
            cost.div_ceil(u128::from(self.original_bytes)) as u64
        };
        seen.clamp(MIN_STORED_PAGE_BYTES, PAGE)
    }
}

/// What was counted of a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Observation {
    /// What it may cost.
    pub budget_bytes: u64,
    /// Managed pages in DRAM, staged ones included.
    pub resident_bytes: u64,
    /// Part of `resident_bytes` that can be evicted as far as is known: not
    /// staged, not pinned, not locked.
    pub evictable_bytes: u64,
    /// Part of `resident_bytes` that is out of the address space, kept raw.
    pub staged_bytes: u64,
    /// Stored with lz4, kept copies included.
    pub fast: Packed,
    /// Stored densely (zstd), kept copies included.
    pub dense: Packed,
    /// What is put into the store is packed densely at once: dense packing has
    /// become as cheap as lz4 (a dictionary fits this tenant's pages).
    pub lands_dense: bool,
    /// Part of what is stored that belongs to pages which are resident again.
    pub kept_cost_bytes: u64,
    /// Of the pages with kept copies that were evicted lately, so many of a
    /// hundred had not changed.
    pub kept_unchanged_percent: u64,
    /// The pager's and the store's own memory for this tenant.
    pub metadata_bytes: u64,
    /// Anonymous memory in DRAM that is not managed.
    pub unmanaged_bytes: u64,
    /// What it does not cost because the kernel has merged its pages with others: what
    /// comes back as it writes to them, without a fault that anybody is asked about.
    pub merged_saved_bytes: u64,
    /// Growth of the tenant in DRAM since the last look: fills and first touches.
    pub growth_bytes: u64,
    /// Room on the node: what may be moved there now. 0 without one.
    pub node_room_bytes: u64,
    /// Room in the file tier; `None` when there is no such tier.
    pub file_room_bytes: Option<u64>,
    /// Pages go on to the file at once, as long as it has room
    /// ([`crate::order::TierOrder`]).
    pub file_first: bool,
    /// The last decision was to evict.
    pub evicting: bool,
}

impl Observation {
    /// What the tenant costs now.
    #[must_use]
    pub fn cost_bytes(&self) -> u64 {
        self.resident_bytes
            .saturating_add(self.unmanaged_bytes)
            .saturating_add(self.metadata_bytes)
            .saturating_add(self.fast.cost_bytes)
            .saturating_add(self.dense.cost_bytes)
    }
}

/// What should be done. Amounts are never more than there is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Actions {
    /// Everything eligible is to be registered.
    pub register: bool,
    /// Pages to take out of DRAM: to the node as far as there is room, the others
    /// out of the address space. Those are staged first.
    pub evict_pages: u64,
    /// Staged pages to pack, the oldest first.
    pub settle_pages: u64,
    /// Kept copies to drop, the oldest first: what they cost.
    pub drop_kept_bytes: u64,
    /// Pages that are read back keep their stored copies.
    pub keep_copies: bool,
    /// Fast-packed pages to pack densely, the oldest first.
    pub repack_pages: u64,
    /// Stored bytes to move to the file tier, the oldest first.
    pub demote_bytes: u64,
    /// First touches wait until some of this has been done: the budget is used
    /// up and more can be freed.
    pub hold_growth: bool,
    /// By how much the budget is too small even when all this is done; 0 when it
    /// can be kept.
    pub cannot_by_bytes: u64,
    /// Look again after at most this time.
    pub next_look_us: u64,
}

/// By how much a tenant may exceed its budget for a moment.
#[must_use]
pub fn tolerance_bytes(budget_bytes: u64) -> u64 {
    (budget_bytes / 50).max(16 * MIB)
}

/// Free memory at which evicting starts and at which it ends, in bytes.
#[must_use]
pub fn watermarks_bytes(budget_bytes: u64, growth_bytes: u64) -> (u64, u64) {
    let least = (budget_bytes / LOW_PART).clamp(LOW_MIN_BYTES, LOW_MAX_BYTES);
    // What came since the last look may come again before the next one.
    let low = least.max(growth_bytes.min(LOW_MAX_BYTES)).min(budget_bytes / 8);
    (low, 2 * low)
}

/// What to do about a tenant.
#[must_use]
pub fn decide(seen: &Observation) -> Actions {
    let budget = seen.budget_bytes;
    let cost = seen.cost_bytes();
    let unmerged = cost.saturating_add(seen.merged_saved_bytes);
    let register = unmerged >= budget / 100 * REGISTER_PERCENT;
    let mut actions = Actions { register, ..Actions::default() };
    let (low, high) = watermarks_bytes(budget, seen.growth_bytes);
    let free = budget.saturating_sub(cost);
    let over = cost.saturating_sub(budget);
    let target = if free < low || seen.evicting { high } else { 0 };
    // What must become free, counted down by what each measure brings.
    let mut need = over + target.saturating_sub(free);

    let fast_page = seen.fast.page_cost((PAGE << RATIO_SHIFT) / GUESSED_FAST_RATIO);
    let dense_guess = fast_page * GUESSED_DENSE_GAIN.1 / GUESSED_DENSE_GAIN.0;
    let dense_page = seen.dense.page_cost(dense_guess).min(fast_page);
    let landing_page = if seen.lands_dense { dense_page } else { fast_page };
    // Below a 64th of a page, moving it costs more than it brings.
    let settle_gain = if PAGE - landing_page < PAGE / 64 { 0 } else { PAGE - landing_page };
    // Below a 16th of what is stored, packing it again does.
    let worth_it = (fast_page - dense_page) * 16 >= fast_page;
    let repack_gain = if worth_it { fast_page - dense_page } else { 0 };

    let packed = seen.fast.cost_bytes + seen.dense.cost_bytes;
    // Kept copies are a luxury: what exceeds its share goes first. The share
    // itself stays while pages come and go (that is when it spares
    // compressions), also while the budget is overstepped a little: a tenant
    // whose evictions do not keep up would have to pack even more.
    let pressing = over.saturating_sub(tolerance_bytes(budget) / HOLD_PART);
    let kept = seen.kept_cost_bytes.min(packed);
    let out_cost = packed - kept;
    let out_pages = out_cost / landing_page;
    let out_per_resident = out_pages as f64 / (seen.resident_bytes / PAGE).max(1) as f64;
    let most = (budget / kept_part(seen)) as f64;
    let share = kept_share_bytes(most, out_cost as f64, out_per_resident) as u64;
    actions.drop_kept_bytes = kept.min(pressing.max(kept.saturating_sub(share)));
    actions.keep_copies = kept < share && pressing == 0;
    need = need.saturating_sub(actions.drop_kept_bytes);

    // Staged pages have left already; packing them brings memory soonest.
    let staged_pages = seen.staged_bytes / PAGE;
    let staged_share = staged_share_bytes(budget as f64, (out_pages * PAGE) as f64) as u64;
    let spare_pages = staged_pages.saturating_sub(staged_share / PAGE);
    actions.settle_pages = match pages_for(need, settle_gain) {
        Some(pages) => staged_pages.min(pages.max(spare_pages)),
        None => 0,
    };
    need = need.saturating_sub(actions.settle_pages * settle_gain);

    let evictable_pages = seen.evictable_bytes.min(seen.resident_bytes) / PAGE;
    // What goes to the node frees all that it took, whether it compresses or not.
    let to_node = need.div_ceil(PAGE).min(seen.node_room_bytes / PAGE).min(evictable_pages);
    need = need.saturating_sub(to_node * PAGE);
    let to_store = match pages_for(need, settle_gain) {
        Some(pages) if pages > 0 => pages.max(LEAST_EVICTION_PAGES.min(low / PAGE)),
        _ => 0,
    };
    let to_store = to_store.min(evictable_pages - to_node);
    actions.evict_pages = to_node + to_store;
    need = need.saturating_sub(to_store * settle_gain);

    // Dense packing: down to its share of the budget, or as far as the need goes.
    let stored = packed - actions.drop_kept_bytes;
    let fast_pages = seen.fast.original_bytes / PAGE;
    let excess = need.max(stored.saturating_sub(budget / DENSE_PART));
    actions.repack_pages = pages_for(excess, repack_gain).unwrap_or(0).min(fast_pages);
    need = need.saturating_sub(actions.repack_pages * repack_gain);
    let after_repack = stored.saturating_sub(actions.repack_pages * repack_gain);
    if let Some(room) = seen.file_room_bytes {
        let share = if seen.file_first { 0 } else { budget / FILE_PART };
        let excess = need.max(after_repack.saturating_sub(share));
        actions.demote_bytes = excess.min(room).min(after_repack);
        need = need.saturating_sub(actions.demote_bytes);
        // Pages that do not compress still fit the file: they are evicted to
        // pass through the store.
        let through = need.min(room - actions.demote_bytes) / PAGE;
        let through = through.min(evictable_pages - actions.evict_pages);
        actions.evict_pages += through;
        actions.settle_pages = actions.settle_pages.max(staged_pages.min(through));
    }

    actions.cannot_by_bytes = least_cost_bytes(seen, if worth_it { dense_page } else { fast_page })
        .saturating_sub(budget);

    let frees = actions.evict_pages > 0
        || actions.settle_pages > 0
        || actions.drop_kept_bytes > 0
        || actions.demote_bytes > 0
        || actions.repack_pages > 0;
    actions.hold_growth = frees && over >= tolerance_bytes(budget) / HOLD_PART;
    let mark = if actions.register { budget } else { budget / 100 * REGISTER_PERCENT };
    let distance_us = mark.saturating_sub(cost) / GROWTH_BYTES_PER_US;
    actions.next_look_us = distance_us.clamp(LOOK_MIN_US, LOOK_MAX_US);
    actions
}

/// Whether compressed memory that costs so much has its whole part of a budget.
pub(crate) const fn compressed_is_full(budget_bytes: u64, stored_bytes: u64) -> bool {
    stored_bytes >= budget_bytes / FILE_PART
}

/// What may stay staged within a budget while so much is out, before packing.
pub(crate) fn staged_share_bytes(budget_bytes: f64, out_bytes: f64) -> f64 {
    (budget_bytes / STAGED_PART).min(out_bytes / STAGED_PART_OF_OUT)
}

/// What kept copies may cost, `most_bytes` at most, while pages that cost
/// `out_cost_bytes` are out: so many for each resident page.
pub(crate) fn kept_share_bytes(most_bytes: f64, out_cost_bytes: f64, out_per_resident: f64) -> f64 {
    most_bytes.min(out_cost_bytes * KEPT_TIMES * out_per_resident.min(1.0))
}

fn kept_part(seen: &Observation) -> u64 {
    if seen.kept_unchanged_percent < FEW_UNCHANGED_PERCENT { KEPT_PART_USELESS } else { KEPT_PART }
}

/// What the tenant would cost with everything stored that can be, each page at
/// `page_cost`, and node and file tier full.
fn least_cost_bytes(seen: &Observation, page_cost: u64) -> u64 {
    let movable = seen.evictable_bytes.saturating_add(seen.staged_bytes).min(seen.resident_bytes);
    let fixed = (seen.resident_bytes - movable)
        .saturating_add(seen.unmanaged_bytes)
        .saturating_add(seen.metadata_bytes);
    // Kept copies belong to pages that `movable` counts already.
    let stored =
        (seen.fast.cost_bytes + seen.dense.cost_bytes).saturating_sub(seen.kept_cost_bytes);
    let stored_pages = (seen.fast.original_bytes + seen.dense.original_bytes) / PAGE;
    let stored = stored.min(stored_pages * page_cost);
    let packed = (movable / PAGE * page_cost).saturating_add(stored);
    let below = seen.file_room_bytes.unwrap_or(0).saturating_add(seen.node_room_bytes);
    fixed.saturating_add(packed.saturating_sub(below))
}

/// Pages that free `bytes` at `gain` bytes each; `None` when no number does.
fn pages_for(bytes: u64, gain: u64) -> Option<u64> {
    (gain > 0).then(|| bytes.div_ceil(gain))
}
