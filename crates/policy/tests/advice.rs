//! The advisor against the replacement that it foretells, and the sharing out of a
//! total against every other way to share it.

use proptest::prelude::*;
use strata_policy::advice::{
    Facts, Point, between, budget_for, changes_too_fast, points, share_out,
};
use strata_policy::budget::watermarks_bytes;
use strata_policy::curve::Curve;
use strata_policy::replay::{Shape, Tenant, Touch};
use strata_policy::sampler::{EPOCH_RETURNS, MOST_PAGES, Sampler};
use strata_units::PageId;

const PAGES: usize = 4000;
/// Touches between two looks, and probes each.
const TICK: u64 = 200;
const PROBES: usize = 4;

/// Deterministic uniform numbers in 0..1.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Use {
    Uniform,
    Gaussian,
    Zipf,
    Scan,
}

/// Pages touched, one after the other.
struct Stream {
    random: Random,
    how: Use,
    cumulative: Vec<f64>,
    at: usize,
    offset: usize,
}

impl Stream {
    fn new(how: Use, seed: u64) -> Self {
        let mut sum = 0.0;
        let weight = |page: usize| match how {
            Use::Uniform | Use::Scan => 1.0,
            Use::Gaussian => (-0.5 * ((page as f64 / PAGES as f64 - 0.5) * 6.0).powi(2)).exp(),
            Use::Zipf => 1.0 / (page + 1) as f64,
        };
        let cumulative = (0..PAGES).map(|page| {
            sum += weight(page);
            sum
        });
        let cumulative = cumulative.collect();
        Self { random: Random(seed), how, cumulative, at: 0, offset: 0 }
    }

    fn next(&mut self) -> u32 {
        self.at += 1;
        let page = if self.how == Use::Scan {
            self.at
        } else {
            let at = self.random.uniform() * self.cumulative[PAGES - 1];
            self.cumulative.partition_point(|&upto| upto <= at)
        };
        ((page + self.offset) % PAGES) as u32
    }
}

/// A sampler that watches a tenant with room for all.
struct Watched {
    sampler: Sampler,
    out: Vec<bool>,
    now: u64,
    drifts: Vec<(f64, f64)>,
    /// Epochs end by the returns; or else at these times.
    ends: Option<Vec<u64>>,
}

impl Watched {
    fn new() -> Self {
        let mut sampler = Sampler::default();
        sampler.fit_to(PAGES);
        for page in 0..PAGES as u32 {
            sampler.found(PageId(page), true, 0.0);
        }
        Self { sampler, out: vec![false; PAGES], now: 0, drifts: Vec::new(), ends: None }
    }

    fn touch(&mut self, page: u32) {
        self.now += 1;
        let now = self.now as f64;
        if std::mem::take(&mut self.out[page as usize]) {
            self.sampler.returned(PageId(page), now);
        }
        if self.now.is_multiple_of(TICK) {
            for page in self.sampler.probes(PROBES) {
                self.out[page.0 as usize] = true;
                self.sampler.left(page, now);
            }
            if self.now.is_multiple_of(TICK * 16) {
                self.sampler.turn(now);
            }
            let ends = match &self.ends {
                None => self.sampler.epoch_returns() >= EPOCH_RETURNS,
                Some(ends) => ends.contains(&self.now),
            };
            if ends {
                self.drifts.extend(self.sampler.end_epoch(now));
            }
        }
    }
}

/// Misses a touch of the production replacement with room for `room` pages.
fn replayed(how: Use, room: usize) -> f64 {
    let shape =
        Shape { managed_pages: PAGES, capacity_pages: room, staged_pages: 0, batch_pages: 4 };
    let mut tenant = Tenant::new(shape);
    let mut stream = Stream::new(how, 77);
    for page in 0..PAGES as u32 {
        tenant.touch(page);
    }
    for _ in 0..300_000 {
        tenant.touch(stream.next());
    }
    let counted = 200_000;
    let missed = (0..counted).filter(|_| tenant.touch(stream.next()) != Touch::Hit).count();
    missed as f64 / f64::from(counted)
}

#[test]
fn what_is_foretold_is_what_the_replacement_misses() {
    for how in [Use::Uniform, Use::Gaussian, Use::Zipf, Use::Scan] {
        let mut watched = Watched::new();
        let mut stream = Stream::new(how, 5);
        (0..600_000).for_each(|_| watched.touch(stream.next()));
        let seen = watched.sampler.seen(watched.now as f64);
        let curve = Curve::of(&seen).expect("enough was seen");
        // With room for less than a circle, which part stays is the replacement's luck
        // in so small a tenant: what it misses is compared with the best.
        let missed = |room: usize| match how {
            Use::Scan => 1.0 - room as f64 / PAGES as f64,
            _ => replayed(how, room),
        };
        for room in [PAGES / 3, PAGES / 2] {
            let (foretold, error) = curve.misses(room as f64 / PAGES as f64);
            let (foretold, error) = (foretold * PAGES as f64, error * PAGES as f64);
            let missed = missed(room);
            assert!(
                (foretold - missed).abs() <= 0.05,
                "{how:?}, room for {room}: {foretold} ± {error} foretold, {missed} missed"
            );
            assert!(error > 0.0 && error < 0.05, "{how:?}: ± {error}");
        }
        assert!(curve.misses(1.0).0 == 0.0 && curve.misses(0.0).0 > curve.misses(0.1).0);
        let drifts = &watched.drifts;
        let changes = drifts.iter().any(|&drift| changes_too_fast(drift));
        assert!(watched.sampler.epochs() >= 2 && !changes, "{how:?}: {drifts:?}");
    }
}

#[test]
fn epochs_of_unlike_times_do_not_make_a_steady_tenant_change() {
    for how in [Use::Gaussian, Use::Zipf] {
        let mut watched = Watched::new();
        watched.ends = Some(vec![200_000, 240_000, 440_000, 640_000]);
        let mut stream = Stream::new(how, 5);
        (0..640_000).for_each(|_| watched.touch(stream.next()));
        // Of the first epoch (none before it) and of one of the unlike pairs nothing
        // is told; only the last two are alike.
        assert_eq!(watched.sampler.epochs(), 4);
        assert!(watched.drifts.len() == 1, "{how:?}: {:?}", watched.drifts);
        assert!(!changes_too_fast(watched.drifts[0]), "{how:?}: {:?}", watched.drifts);
    }
}

#[test]
fn rest_is_not_taken_for_a_workload() {
    let mut sampler = Sampler::default();
    (0..100).for_each(|page| sampler.found(PageId(page), false, 0.0));
    assert!(!sampler.is_epoch_over(6.0, 14.0) && sampler.is_epoch_over(6.0, 15.0));
    sampler.end_epoch(6.0);
    // Next to nothing for an hour: what it did before still counts, until it has done
    // half of that again.
    assert!(!sampler.is_epoch_over(8.9, 3600.0) && sampler.is_epoch_over(9.0, 3600.0));
    assert!(!sampler.is_epoch_over(12.0, 14.0) && sampler.is_epoch_over(12.0, 15.0));
    sampler.end_epoch(106.0);
    // After a hundred seconds of work four are enough.
    assert!(!sampler.is_epoch_over(109.9, 60.0) && sampler.is_epoch_over(110.0, 60.0));
    // One that only rests says nothing at all.
    assert!(!Sampler::default().is_epoch_over(0.01, 600.0));
}

#[test]
fn what_was_seen_before_counts_until_the_workload_changes() {
    let mut watched = Watched::new();
    watched.ends = Some((1..=8).map(|epoch| epoch * 200_000).collect());
    let mut stream = Stream::new(Use::Gaussian, 5);
    // Each probe comes back, half of them from a whole gap: as many as fit into the time that
    // is said to be known, in part of which each page was out.
    let known = |watched: &Watched| {
        let now = watched.now as f64;
        let seen = watched.sampler.seen(now);
        let time = watched.sampler.seen_for(now);
        let away = seen.iter().map(|seen| seen.away).sum::<f64>() / seen.len() as f64;
        assert!(away < time && away > 0.2 * time, "{away} of {time}");
        let probes = time * PROBES as f64 / TICK as f64;
        let returns = seen.iter().map(|seen| seen.returns).sum::<f64>();
        assert!((0.95..1.0).contains(&(returns / probes)), "{returns} of {probes}");
        let gaps = seen.iter().map(|seen| seen.gaps).sum::<f64>();
        assert!((0.95..1.0).contains(&(gaps * 2.0 / probes)), "{gaps} of {probes} halved");
        time
    };
    (0..400_000).for_each(|_| watched.touch(stream.next()));
    assert_eq!(known(&watched), 200_000.0 * 1.75, "the last of two, and what is left");
    (0..800_000).for_each(|_| watched.touch(stream.next()));
    let long = known(&watched);
    assert!((650_000.0..800_000.0).contains(&long), "{long}");
    stream.offset = PAGES / 4;
    (0..200_000).for_each(|_| watched.touch(stream.next()));
    assert_eq!(known(&watched), 200_000.0, "only what came after the change");
}

#[test]
fn a_hot_set_that_moves_is_seen_to_move() {
    let mut watched = Watched::new();
    let mut stream = Stream::new(Use::Gaussian, 5);
    // It moves on by a quarter of the pages about once an epoch.
    for touch in 0..1_200_000u64 {
        if touch % 200_000 == 150_000 {
            stream.offset += PAGES / 4;
        }
        watched.touch(stream.next());
    }
    assert!(watched.drifts.iter().any(|&drift| changes_too_fast(drift)), "{:?}", watched.drifts);
}

#[test]
fn the_sample_stays_as_large_as_it_may_be() {
    let mut sampler = Sampler::default();
    for page in 0..200_000u32 {
        sampler.found(PageId(page), true, 0.0);
        assert!(sampler.watched() <= MOST_PAGES);
    }
    assert!(sampler.watched() > MOST_PAGES / 2);
    assert!((0..200_000).filter(|&page| sampler.takes(PageId(page))).count() <= MOST_PAGES);
    // Most of the tenant goes: the limit rises, and the rest is found.
    for page in 3000..200_000u32 {
        sampler.gone(PageId(page));
    }
    sampler.fit_to(3000);
    (0..3000).for_each(|page| sampler.found(PageId(page), true, 0.0));
    assert!(sampler.watched() > MOST_PAGES / 2, "{}", sampler.watched());
    let probes = sampler.probes(usize::MAX);
    assert!(probes.len() >= sampler.watched(), "each is probed");
    assert!(sampler.probes(usize::MAX).is_empty(), "once");
    sampler.stayed(probes[0]);
    assert_eq!(sampler.probes(usize::MAX), [probes[0]]);
}

#[test]
fn budgets_and_rooms_are_each_others_inverse() {
    for (pages, has_file_tier) in [(1e5, false), (1e5, true), (3e3, false), (3e7, false)] {
        let facts = Facts {
            pages,
            free_pages: 0.0,
            stored_page_bytes: 1500.0,
            fixed_bytes: pages * 300.0,
            miss_seconds: 18e-6,
            has_file_tier,
        };
        for room in [0.1, 0.35, 0.5, 0.9, 1.0] {
            let budget = facts.budget_bytes(room);
            assert!((facts.room(budget) - room).abs() < 1e-3, "{pages}, {room}: {budget}");
            assert!(facts.room(budget * 0.99) < room);
            // What the keeper keeps free, as it does it: of a small budget far more.
            let (low, high) = watermarks_bytes(budget as u64, 0);
            let stored = pages * (1.0 - room) * if has_file_tier { 0.0 } else { 1500.0 };
            let used = pages * room * 4096.0 + stored + facts.fixed_bytes;
            assert!(budget - used > ((low + high) / 2) as f64 * 0.999, "{pages}, {room}: {budget}");
        }
    }
}

#[test]
fn pages_of_one_value_take_no_room_once_they_are_out() {
    let facts = Facts { pages: 1e5, stored_page_bytes: 1500.0, ..Facts::default() };
    let with_free = Facts { free_pages: 4e4, ..facts };
    // With those out that cost nothing, the budget is the others' alone.
    let budget = with_free.budget_bytes(0.6);
    assert!((budget / (6e4 * 4096.0) - 1.0).abs() < 0.1, "{budget}");
    assert!(facts.budget_bytes(0.6) - budget > 0.9 * 4e4 * 1500.0);
    // The least is what the others cost in the store.
    let least = with_free.budget_bytes(1e-6) / (6e4 * 1500.0);
    assert!((1.0..1.1).contains(&least), "{least}");
}

#[test]
fn a_curve_of_budgets_falls_to_nothing() {
    let mut watched = Watched::new();
    let mut stream = Stream::new(Use::Zipf, 5);
    (0..300_000).for_each(|_| watched.touch(stream.next()));
    let curve = Curve::of(&watched.sampler.seen(watched.now as f64)).expect("enough was seen");
    let facts = Facts {
        pages: PAGES as f64,
        free_pages: 0.0,
        stored_page_bytes: 1500.0,
        fixed_bytes: 1e6,
        miss_seconds: 0.5,
        has_file_tier: false,
    };
    let points = points(&curve, &facts);
    assert!(points.is_sorted_by(|a, b| a.budget_bytes < b.budget_bytes && a.loss >= b.loss));
    assert!(points.iter().all(|point| point.loss <= point.loss_at_most));
    assert!(points[0].loss > 0.1 && points.last().is_some_and(|last| last.loss == 0.0));
    // Room for everything is room for what a tenant varies by, too.
    let all = points.last().map_or(0.0, |last| last.budget_bytes as f64);
    assert!(all > facts.budget_bytes(1.0) * 1.01, "{all}");
    for limit in [0.01, 0.05, 0.1] {
        let budget = budget_for(&points, limit, |point| point.loss).expect("there is one");
        let loss = between(&points, budget, |point| point.loss);
        assert!((loss - limit).abs() < 1e-3, "{limit}: {loss}");
    }
}

/// Convex curves: each step saves less a byte than the one before.
fn curves() -> impl Strategy<Value = Vec<Vec<Point>>> {
    let curve = (1u64..20, prop::collection::vec((1u64..10, 0.0f64..0.2), 0..5));
    prop::collection::vec(curve, 1..4).prop_map(|curves| {
        let built = curves.into_iter().map(|(first, mut steps)| {
            steps.sort_by(|a, b| (b.1 / b.0 as f64).total_cmp(&(a.1 / a.0 as f64)));
            let mut loss = steps.iter().map(|step| step.1).sum::<f64>();
            let mut budget_bytes = first;
            let mut points = vec![Point { budget_bytes, loss, ..Point::default() }];
            for (bytes, saved) in steps {
                budget_bytes += bytes;
                loss -= saved;
                points.push(Point { budget_bytes, loss, ..Point::default() });
            }
            points
        });
        built.collect()
    })
}

/// The least sum of losses, by trying every whole number of bytes.
fn least(curves: &[Vec<Point>], total: u64) -> f64 {
    let Some((points, rest)) = curves.split_first() else { return 0.0 };
    let others: u64 = rest.iter().map(|points| points[0].budget_bytes).sum();
    (points[0].budget_bytes..=total - others)
        .map(|budget| between(points, budget, |point| point.loss) + least(rest, total - budget))
        .fold(f64::INFINITY, f64::min)
}

proptest! {
    #[test]
    fn no_other_shares_lose_less(curves in curves(), more in 0u64..40) {
        let first: u64 = curves.iter().map(|points| points[0].budget_bytes).sum();
        let total = first + more;
        let budgets = share_out(&curves, total).expect("there is enough");
        prop_assert!(budgets.iter().sum::<u64>() <= total);
        let mut lost = 0.0;
        for (points, &budget) in curves.iter().zip(&budgets) {
            prop_assert!(budget >= points[0].budget_bytes);
            prop_assert!(budget <= points[points.len() - 1].budget_bytes);
            lost += between(points, budget, |point| point.loss);
        }
        let best = least(&curves, total);
        prop_assert!(lost <= best + 1e-9, "{lost} is lost, {best} would do");
        prop_assert!(share_out(&curves, first - 1).is_none());
    }
}
