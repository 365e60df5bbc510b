//! The budget's decisions in a closed loop: a tenant that grows, touches and
//! obeys, within what eviction and packing can do in a tick.

use proptest::prelude::*;
use strata_policy::budget::{Actions, Observation, Packed, decide, tolerance_bytes};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A tenant's counts, in pages.
#[derive(Clone, Copy, Debug, Default)]
struct Loop {
    budget_bytes: u64,
    mapped: u64,
    pinned: u64,
    staged: u64,
    fast: u64,
    dense: u64,
    file: u64,
    file_room_bytes: Option<u64>,
    fast_ratio: f64,
    dense_ratio: f64,
    growth: u64,
    evicting: bool,
}

impl Loop {
    fn packed(pages: u64, ratio: f64) -> Packed {
        let original_bytes = pages * PAGE;
        Packed { original_bytes, cost_bytes: (original_bytes as f64 / ratio) as u64 }
    }

    fn pages(&self) -> u64 {
        self.mapped + self.pinned + self.staged + self.fast + self.dense + self.file
    }

    fn observe(&self) -> Observation {
        Observation {
            budget_bytes: self.budget_bytes,
            resident_bytes: (self.mapped + self.pinned + self.staged) * PAGE,
            evictable_bytes: self.mapped * PAGE,
            staged_bytes: self.staged * PAGE,
            fast: Self::packed(self.fast, self.fast_ratio),
            dense: Self::packed(self.dense, self.dense_ratio),
            metadata_bytes: self.pages() * 24,
            growth_bytes: self.growth * PAGE,
            file_room_bytes: self.file_room_bytes,
            evicting: self.evicting,
            ..Observation::default()
        }
    }

    /// Does at most `speed` pages of each thing.
    fn obey(&mut self, actions: &Actions, speed: u64) {
        let repack = actions.repack_pages.min(speed).min(self.fast);
        self.fast -= repack;
        self.dense += repack;
        let settle = actions.settle_pages.min(speed).min(self.staged);
        self.staged -= settle;
        self.fast += settle;
        let evict = actions.evict_pages.min(speed).min(self.mapped);
        self.mapped -= evict;
        self.staged += evict;
        let per_page = (PAGE as f64 / self.dense_ratio).max(PAGE as f64 / self.fast_ratio) as u64;
        let demote = (actions.demote_bytes / per_page).min(speed).min(self.fast + self.dense);
        let from_dense = demote.min(self.dense);
        self.dense -= from_dense;
        self.fast -= demote - from_dense;
        self.file += demote;
        if let Some(room) = &mut self.file_room_bytes {
            *room = room.saturating_sub(demote * per_page);
        }
        self.evicting = actions.evict_pages > 0 || actions.settle_pages > 0;
    }

    /// One tick: the program grows by `grow` pages if it may, and takes `faults`
    /// stored pages back.
    fn tick(&mut self, grow: u64, faults: u64, speed: u64) -> (Observation, Actions) {
        let seen = self.observe();
        let actions = decide(&seen);
        self.growth = 0;
        if !actions.hold_growth {
            self.mapped += grow;
            self.growth += grow;
        }
        let back = faults.min(self.fast);
        self.fast -= back;
        self.mapped += back;
        self.growth += back;
        self.obey(&actions, speed);
        (seen, actions)
    }
}

fn check_amounts(seen: &Observation, actions: &Actions) -> Result<(), TestCaseError> {
    prop_assert!(actions.evict_pages * PAGE <= seen.resident_bytes - seen.staged_bytes);
    prop_assert!(actions.evict_pages * PAGE <= seen.evictable_bytes);
    prop_assert!(actions.settle_pages * PAGE <= seen.staged_bytes);
    prop_assert!(actions.repack_pages * PAGE <= seen.fast.original_bytes);
    prop_assert!(actions.drop_kept_bytes <= seen.kept_cost_bytes);
    prop_assert!(actions.demote_bytes <= seen.file_room_bytes.unwrap_or(0));
    prop_assert!(actions.demote_bytes <= seen.fast.cost_bytes + seen.dense.cost_bytes);
    prop_assert!((1_000..=250_000).contains(&actions.next_look_us));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn never_asks_for_more_than_there_is(
        budget in 0..1u64 << 40,
        sizes in prop::array::uniform8(0..1u64 << 40),
        ratios in prop::array::uniform2(1.0..50.0f64),
        room in prop::option::of(0..1u64 << 40),
        evicting: bool,
    ) {
        let [mapped, pinned, staged, fast, dense, metadata, unmanaged, growth] =
            sizes.map(|size| size / PAGE * PAGE);
        let packed = |original_bytes: u64, ratio: f64| Packed {
            original_bytes,
            cost_bytes: (original_bytes as f64 / ratio) as u64,
        };
        let (fast, dense) = (packed(fast, ratios[0]), packed(dense, ratios[1]));
        let seen = Observation {
            budget_bytes: budget,
            resident_bytes: mapped + pinned + staged,
            evictable_bytes: mapped,
            staged_bytes: staged,
            fast,
            dense,
            lands_dense: evicting,
            kept_cost_bytes: fast.cost_bytes / 2,
            kept_unchanged_percent: growth % 101,
            metadata_bytes: metadata,
            unmanaged_bytes: unmanaged,
            merged_saved_bytes: unmanaged / 2,
            growth_bytes: growth,
            node_room_bytes: if evicting { pinned } else { 0 },
            file_room_bytes: room,
            file_first: (metadata / PAGE).is_multiple_of(2),
            evicting,
        };
        check_amounts(&seen, &decide(&seen))?;
    }

    #[test]
    fn keeps_the_budget_or_says_that_it_cannot(
        budget_mib in 16..4096u64,
        share in 0.3..6.0f64,
        fast_ratio in 1.0..6.0f64,
        dense_gain in 1.0..2.0f64,
        grow in 1..4096u64,
        least_ticks in 100..20_000u64,
        fault_share in 0.0..0.4f64,
    ) {
        let budget_bytes = budget_mib * MIB;
        let tolerance = tolerance_bytes(budget_bytes);
        let dense_ratio = fast_ratio * dense_gain;
        let mut tenant = Loop { budget_bytes, fast_ratio, dense_ratio, ..Loop::default() };
        let most_pages = (budget_bytes as f64 * share) as u64 / PAGE;
        // Eviction and packing are as fast as growth and faults together, a tick
        // is at most what the tolerance allows to come between two looks.
        let grow = grow.max(most_pages / least_ticks).min(tolerance / 4 / PAGE);
        let faults = (grow as f64 * fault_share) as u64;
        let speed = 2 * (grow + faults) + 512;
        let (mut said_cannot, mut ticks) = (false, 0u64);
        while tenant.pages() < most_pages && ticks < 200_000 {
            ticks += 1;
            let (seen, actions) = tenant.tick(grow, faults, speed);
            check_amounts(&seen, &actions)?;
            if actions.cannot_by_bytes > 0 {
                said_cannot = true;
                break;
            }
            prop_assert!(seen.cost_bytes() <= budget_bytes + tolerance, "{seen:?} {actions:?}");
            prop_assert!(seen.cost_bytes() * 10 < budget_bytes * 9 || actions.register);
        }
        let dense_cost = PAGE as f64 / dense_ratio;
        let least = tenant.pages() as f64 * (dense_cost + 24.0);
        if said_cannot {
            prop_assert!(least * 1.15 > budget_bytes as f64, "{least} fits: {tenant:?}");
            return Ok(());
        }
        // At the brim, what faults bring back may leave no room to grow.
        let brim = fault_share > 0.0 && least * 1.1 > budget_bytes as f64;
        prop_assert!(brim || tenant.pages() >= most_pages, "stuck: {:?} {tenant:?}", decide(&tenant.observe()));
        // Growth has ended: in a while there is nothing more to do.
        for _ in 0..200_000 {
            let (seen, actions) = tenant.tick(0, 0, speed);
            prop_assert!(seen.cost_bytes() <= budget_bytes + tolerance);
            let idle = actions.evict_pages == 0 && actions.settle_pages == 0
                && actions.repack_pages == 0;
            if idle || actions.cannot_by_bytes > 0 {
                let fits = tenant.observe().cost_bytes() <= budget_bytes;
                prop_assert!(fits || actions.cannot_by_bytes > 0, "{actions:?} {tenant:?}");
                return Ok(());
            }
        }
        prop_assert!(false, "never rests: {:?} {tenant:?}", decide(&tenant.observe()));
    }
}

fn stored_to_the_brim(fast_ratio: f64, room: Option<u64>) -> Loop {
    Loop {
        budget_bytes: 256 * MIB,
        mapped: 100 * MIB / PAGE,
        fast: 512 * MIB / PAGE,
        fast_ratio,
        dense_ratio: fast_ratio * 1.6,
        file_room_bytes: room,
        ..Loop::default()
    }
}

#[test]
fn far_from_the_budget_nothing_happens() {
    let tenant = Loop { mapped: 1000, fast_ratio: 2.0, dense_ratio: 3.0, ..Loop::default() };
    let actions = decide(&Loop { budget_bytes: 1 << 30, ..tenant }.observe());
    assert_eq!(actions, Actions { next_look_us: actions.next_look_us, ..Actions::default() });
    // 0.9 GiB at 16 GB/s are 60 ms.
    assert!((50_000..62_000).contains(&actions.next_look_us), "{}", actions.next_look_us);
}

#[test]
fn registers_from_nine_tenths_on() {
    for (pages, expected) in [(22_000, false), (23_500, true)] {
        let tenant = Loop {
            budget_bytes: 100 * MIB,
            mapped: pages,
            fast_ratio: 2.0,
            dense_ratio: 3.0,
            ..Loop::default()
        };
        assert_eq!(decide(&tenant.observe()).register, expected, "{pages}");
    }
}

#[test]
fn what_is_merged_is_registered_before_it_is_written() {
    let tenant = Loop { budget_bytes: 100 * MIB, mapped: 15_000, ..Loop::default() };
    let seen = tenant.observe();
    assert!(!decide(&seen).register);
    let merged = Observation { merged_saved_bytes: 50 * MIB, ..seen };
    let actions = decide(&merged);
    assert!(actions.register && actions.evict_pages == 0, "{actions:?}");
}

#[test]
fn packs_densely_when_the_store_takes_too_much() {
    let mut tenant = stored_to_the_brim(3.4, None);
    let first = decide(&tenant.observe());
    assert!(first.repack_pages > 0, "{first:?}");
    for _ in 0..1000 {
        tenant.tick(0, 0, 4096);
    }
    assert!(tenant.dense > tenant.fast, "{tenant:?}");
}

#[test]
fn dense_packing_that_wins_nothing_is_not_done() {
    let mut tenant = stored_to_the_brim(3.4, None);
    tenant.dense = 2000;
    tenant.dense_ratio = 3.45;
    assert_eq!(decide(&tenant.observe()).repack_pages, 0);
}

#[test]
fn says_by_how_much_it_cannot_and_a_file_helps() {
    let tenant = Loop { dense: 2048, dense_ratio: 1.0, ..stored_to_the_brim(1.0, None) };
    let alone = decide(&tenant.observe());
    let missing = (100 + 512 + 8 - 256) * MIB;
    assert!(alone.cannot_by_bytes.abs_diff(missing) < 8 * MIB, "{alone:?}");
    let mut helped = Loop { file_room_bytes: Some(1 << 30), ..tenant };
    assert_eq!(decide(&helped.observe()).cannot_by_bytes, 0);
    for _ in 0..2000 {
        helped.tick(0, 0, 4096);
    }
    let cost = helped.observe().cost_bytes();
    assert!(cost <= 256 * MIB, "{cost} {helped:?}");
}

#[test]
fn a_node_takes_first_what_there_is_room_for() {
    let seen = |node_mib: u64| Observation {
        budget_bytes: 100 * MIB,
        resident_bytes: 120 * MIB,
        evictable_bytes: 120 * MIB,
        // Nothing compresses: without a node there is nothing to do.
        fast: Packed { original_bytes: 2 * MIB, cost_bytes: 2 * MIB },
        dense: Packed { original_bytes: 2 * MIB, cost_bytes: 2 * MIB },
        evicting: true,
        node_room_bytes: node_mib * MIB,
        ..Observation::default()
    };
    let without = decide(&seen(0));
    assert!(without.evict_pages == 0 && without.cannot_by_bytes > 0, "{without:?}");
    let little = decide(&seen(3));
    assert_eq!(little.evict_pages, 3 * MIB / PAGE, "{little:?}");
    let much = decide(&seen(500));
    // As much as it is over, and what is kept free.
    let freed = much.evict_pages * PAGE / MIB;
    assert!((24..28).contains(&freed) && much.cannot_by_bytes == 0, "{much:?}");
}

/// Beside faults the last few pages would be evicted a few at a time, for ever.
#[test]
fn whoever_evicts_evicts_a_batch() {
    let seen = |budget_mib: u64, free_pages: u64, evictable_pages| Observation {
        budget_bytes: budget_mib * MIB,
        resident_bytes: budget_mib * MIB - free_pages * PAGE,
        evictable_bytes: evictable_pages * PAGE,
        evicting: true,
        ..Observation::default()
    };
    // 4 MiB are the high mark: three pages are short.
    let evict_pages =
        |free_pages, evictable_pages| decide(&seen(512, free_pages, evictable_pages)).evict_pages;
    assert_eq!(evict_pages(4 * MIB / PAGE - 3, 5000), 256);
    assert_eq!(evict_pages(4 * MIB / PAGE - 3, 100), 100);
    assert_eq!(evict_pages(4 * MIB / PAGE, 5000), 0);
    // 1 MiB is the low mark of a budget of 8, half of that of one of 4.
    assert_eq!(decide(&seen(4, 255, 700)).evict_pages, 128);
}

#[test]
fn growth_waits_only_while_something_can_be_freed() {
    let over = Loop {
        budget_bytes: 64 * MIB,
        mapped: 90 * MIB / PAGE,
        fast_ratio: 2.0,
        dense_ratio: 3.0,
        ..Loop::default()
    };
    assert!(decide(&over.observe()).hold_growth);
    let pinned = Loop { mapped: 0, pinned: over.mapped, ..over };
    let actions = decide(&pinned.observe());
    assert!(!actions.hold_growth && actions.cannot_by_bytes > 20 * MIB, "{actions:?}");
}

#[test]
fn kept_copies_have_a_share_that_pressure_alone_does_not_take() {
    let budget = 320 * MIB;
    let seen = |kept_mib: u64, over_mib: u64| Observation {
        budget_bytes: budget,
        resident_bytes: budget - 40 * MIB + over_mib * MIB,
        evictable_bytes: 200 * MIB,
        fast: Packed { original_bytes: 120 * MIB, cost_bytes: 40 * MIB },
        kept_cost_bytes: kept_mib * MIB,
        kept_unchanged_percent: 50,
        evicting: true,
        ..Observation::default()
    };
    // A 32nd of the budget: below it they stay and more are kept, also while
    // pages are being evicted.
    let below = decide(&seen(4, 0));
    assert!(below.evict_pages > 0 && below.keep_copies && below.drop_kept_bytes == 0, "{below:?}");
    // What is more goes, and no new ones are kept meanwhile.
    let above = decide(&seen(14, 0));
    assert!(!above.keep_copies && above.drop_kept_bytes == 4 * MIB, "{above:?}");
    // Next to nothing where they spare no compression.
    let useless = decide(&Observation { kept_unchanged_percent: 10, ..seen(4, 0) });
    assert!(!useless.keep_copies && useless.drop_kept_bytes == 4 * MIB - 320 * MIB / 256);
    // A little over the budget is no reason: dropping them would make more to pack,
    // and the tenant stay over it. Evictions bring all that is needed.
    let hurried = decide(&seen(4, 3));
    assert!(hurried.keep_copies && hurried.drop_kept_bytes == 0, "{hurried:?}");
    assert!(hurried.evict_pages * PAGE > 3 * MIB, "{hurried:?}");
    // Where growth waits, new ones are not kept; further over, all may go.
    assert!(tolerance_bytes(budget) == 16 * MIB);
    let pressed = decide(&seen(4, 5));
    assert!(!pressed.keep_copies && pressed.drop_kept_bytes == MIB, "{pressed:?}");
    let over = decide(&seen(4, 30));
    assert!(!over.keep_copies && over.drop_kept_bytes == 4 * MIB, "{over:?}");
}

#[test]
fn where_few_pages_are_out_nothing_is_kept_that_would_send_more_out() {
    // 2 % of the pages are out and cost 2 MiB; a 32nd of the budget would be 20.
    let seen = |kept_bytes: u64, staged_bytes: u64| Observation {
        budget_bytes: 640 * MIB,
        resident_bytes: 630 * MIB,
        evictable_bytes: 600 * MIB,
        staged_bytes,
        fast: Packed {
            original_bytes: 12 * MIB + 6 * kept_bytes,
            cost_bytes: 2 * MIB + kept_bytes,
        },
        kept_cost_bytes: kept_bytes,
        kept_unchanged_percent: 100,
        ..Observation::default()
    };
    let few = decide(&seen(MIB / 32, MIB));
    assert!(few.keep_copies && few.drop_kept_bytes == 0 && few.settle_pages == 0, "{few:?}");
    let many = decide(&seen(4 * MIB, 4 * MIB));
    assert!(!many.keep_copies && many.drop_kept_bytes > 3 * MIB, "{many:?}");
    assert!(many.settle_pages * PAGE > 2 * MIB, "{many:?}");
}

#[test]
fn a_page_that_lands_dense_frees_more() {
    let seen = |lands_dense| Observation {
        budget_bytes: 100 * MIB,
        resident_bytes: 80 * MIB,
        evictable_bytes: 80 * MIB,
        fast: Packed { original_bytes: 20 * MIB, cost_bytes: 10 * MIB },
        dense: Packed { original_bytes: 80 * MIB, cost_bytes: 10 * MIB },
        lands_dense,
        evicting: true,
        ..Observation::default()
    };
    let (fast, dense) = (decide(&seen(false)).evict_pages, decide(&seen(true)).evict_pages);
    // Half a page each against seven eighths.
    assert!(dense > 0 && (1.7..1.8).contains(&(fast as f64 / dense as f64)), "{fast}, {dense}");
}

#[test]
fn with_the_file_first_all_that_is_stored_goes_on_as_far_as_it_has_room() {
    let seen = |file_first, room_mib: u64| Observation {
        budget_bytes: 100 * MIB,
        resident_bytes: 60 * MIB,
        evictable_bytes: 60 * MIB,
        fast: Packed { original_bytes: 24 * MIB, cost_bytes: 8 * MIB },
        dense: Packed { original_bytes: 20 * MIB, cost_bytes: 4 * MIB },
        file_room_bytes: Some(room_mib * MIB),
        file_first,
        ..Observation::default()
    };
    assert_eq!(decide(&seen(false, 500)).demote_bytes, 0, "it has its share of the budget");
    assert_eq!(decide(&seen(true, 500)).demote_bytes, 12 * MIB);
    assert_eq!(decide(&seen(true, 5)).demote_bytes, 5 * MIB);
    assert_eq!(decide(&seen(true, 0)).demote_bytes, 0);
}
