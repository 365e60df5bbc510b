//! The production replacement on small page-level models. The margins are chosen
//! so that first in, first out fails each of them (it is run beside it where that
//! is not plain).

use std::collections::{HashSet, VecDeque};

use proptest::prelude::*;
use strata_policy::replay::{Shape, Tenant, Touch};
use strata_policy::{Census, Level, Pages, Replacement, gap, replacement::Candidate};
use strata_units::PageId;

/// A model a twentieth of the Redis run: value pages, index pages behind them.
const VALUES: u32 = 12_500;
const INDEX: u32 = 825;
const PAGES: u32 = VALUES + INDEX;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        let mixed = (self.0 ^ (self.0 >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    }

    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn gaussian_value(&mut self, offset: u32) -> u32 {
        loop {
            let (a, b) = (1.0 - self.uniform(), self.uniform());
            let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
            let place = 0.5 + normal / 6.0;
            if (0.0..1.0).contains(&place) {
                return ((place * f64::from(VALUES)) as u32 + offset) % VALUES;
            }
        }
    }
}

fn tenant(room: usize) -> Tenant {
    Tenant::new(Shape {
        managed_pages: PAGES as usize,
        capacity_pages: room,
        staged_pages: 32,
        batch_pages: 8,
    })
}

/// First in, first out, to compare with.
struct Fifo {
    room: usize,
    resident: HashSet<u32>,
    queue: VecDeque<u32>,
}

impl Fifo {
    fn new(room: usize) -> Self {
        Self { room, resident: HashSet::new(), queue: VecDeque::new() }
    }

    fn missed(&mut self, page: u32) -> bool {
        if !self.resident.insert(page) {
            return false;
        }
        self.queue.push_back(page);
        if self.queue.len() > self.room {
            let oldest = self.queue.pop_front().expect("the queue is longer than zero");
            self.resident.remove(&oldest);
        }
        true
    }
}

/// Faults per request, soft ones included: production and FIFO.
fn misses(
    production: &mut Tenant,
    fifo: &mut Fifo,
    requests: u32,
    mut request: impl FnMut(u32) -> [u32; 3],
) -> (f64, f64) {
    let (mut ours, mut theirs) = (0u32, 0u32);
    for number in 0..requests {
        for page in request(number) {
            ours += u32::from(production.touch(page) != Touch::Hit);
            theirs += u32::from(fifo.missed(page));
        }
    }
    (f64::from(ours) / f64::from(requests), f64::from(theirs) / f64::from(requests))
}

fn redis_get(random: &mut Random, offset: u32) -> [u32; 3] {
    let value = random.gaussian_value(offset);
    let index = |hash: u64| VALUES + (hash % u64::from(INDEX)) as u32;
    [index(random.next()), index(random.next()), value]
}

fn loaded(room: usize) -> (Tenant, Fifo, Random) {
    let (mut production, mut fifo, mut random) = (tenant(room), Fifo::new(room), Random(5));
    misses(&mut production, &mut fifo, VALUES, |value| {
        let [a, b, _] = redis_get(&mut random, 0);
        [a, b, value]
    });
    (production, fifo, random)
}

#[test]
fn gaussian_requests_miss_far_less_than_fifo() {
    let room = PAGES as usize / 3;
    let (mut production, mut fifo, mut random) = loaded(room);
    misses(&mut production, &mut fifo, 200_000, |_| redis_get(&mut random, 0));
    let (ours, theirs) = misses(&mut production, &mut fifo, 100_000, |_| redis_get(&mut random, 0));
    // The best fixed set misses 0.38, LRU that sees all 0.52.
    assert!(ours < 0.48 && theirs > 0.60, "{ours} {theirs}");
}

#[test]
fn the_hot_set_is_found_again_after_a_jump() {
    let room = PAGES as usize / 3;
    let (mut production, mut fifo, mut random) = loaded(room);
    misses(&mut production, &mut fifo, 200_000, |_| redis_get(&mut random, 0));
    let jumped = VALUES / 4;
    misses(&mut production, &mut fifo, 75_000, |_| redis_get(&mut random, jumped));
    let (ours, theirs) =
        misses(&mut production, &mut fifo, 75_000, |_| redis_get(&mut random, jumped));
    assert!(ours < 0.52 && theirs > 0.60, "{ours} {theirs}");
}

#[test]
fn a_scan_does_not_push_out_what_is_hot() {
    let room = 4_000;
    let (mut production, mut fifo, mut random) = loaded(room);
    let hot = |random: &mut Random| (random.next() % 2_500) as u32;
    let mut request = |number: u32| {
        let scanned = 2_500 + number % (VALUES - 2_500);
        [hot(&mut random), hot(&mut random), scanned]
    };
    misses(&mut production, &mut fifo, 150_000, &mut request);
    let (ours, theirs) = misses(&mut production, &mut fifo, 50_000, &mut request);
    // A page of the scan each time, and of the hot pages next to nothing; FIFO
    // loses more than half a hot page with each.
    assert!(ours < 1.1 && theirs > 1.5, "{ours} {theirs}");
}

#[test]
fn a_circle_larger_than_memory_is_not_missed_whole() {
    let room = 6_000;
    let (mut production, mut fifo) = (tenant(room), Fifo::new(room));
    let request = |number: u32| [0, 1, 2].map(|step| (3 * number + step) % 9_000);
    misses(&mut production, &mut fifo, 90_000, request);
    let (ours, theirs) = misses(&mut production, &mut fifo, 30_000, request);
    assert!(theirs > 2.999, "first in, first out misses every page: {theirs}");
    assert!(ours < 2.0, "{ours}");
}

#[test]
fn a_restarted_worker_keeps_what_the_cells_know() {
    let room = PAGES as usize / 3;
    let (mut production, mut fifo, mut random) = loaded(room);
    misses(&mut production, &mut fifo, 200_000, |_| redis_get(&mut random, 0));
    production.restart_worker();
    let (ours, theirs) = misses(&mut production, &mut fifo, 50_000, |_| redis_get(&mut random, 0));
    assert!(ours < 0.50 && theirs > 0.60, "{ours} {theirs}");
}

#[test]
fn memory_stays_within_five_bytes_a_managed_page() {
    let pages = 400_000u32;
    let mut large = Tenant::new(Shape {
        managed_pages: pages as usize,
        capacity_pages: 200_000,
        staged_pages: 1000,
        batch_pages: 64,
    });
    let mut random = Random(3);
    for _ in 0..1_500_000 {
        let page = (random.uniform() * random.uniform() * f64::from(pages)) as u32;
        large.touch(page);
        // A program that frees and touches again, over and over.
        if page.is_multiple_of(4) {
            large.discard(page ^ 1);
        }
    }
    let per_page = large.replacement().memory_bytes() as f64 / f64::from(pages);
    assert!(per_page < 4.8, "{per_page} bytes a page");
}

/// A page map of which everything is known.
struct Map(Vec<Candidate>);

impl Pages for Map {
    fn candidate(&self, page: PageId) -> Candidate {
        self.0[page.0 as usize]
    }
}

fn evictable(gap_faults: u32) -> Candidate {
    Candidate::Evictable(Level::of_gap(gap_faults))
}

/// 1,000 resident pages that are old enough to leave, page `n` with `gap(n)`.
fn aged(gap: impl Fn(u32) -> Candidate) -> (Replacement, Map, Census) {
    let mut replacement = Replacement::new();
    for page in 0..1_000 {
        replacement.arrived(PageId(page), page);
    }
    let map = Map((0..1_000).map(gap).collect());
    (replacement, map, Census { managed: 10_000, resident: 1_000 })
}

#[test]
fn the_largest_gap_goes_first_and_the_older_of_equals() {
    let (mut replacement, map, census) =
        aged(|page| evictable(if page.is_multiple_of(3) { 1 << 20 } else { 1 << 9 }));
    let mut victims = Vec::new();
    replacement.victims(1_000, 100, census, &map, &mut victims);
    assert_eq!(victims.len(), 100);
    assert!(victims.iter().all(|page| page.0.is_multiple_of(3)), "{victims:?}");
    let mean = victims.iter().map(|page| page.0).sum::<u32>() / 100;
    assert!(mean < 400, "that of all is 500, that of the oldest 100 is 150: {mean}");
}

#[test]
fn the_youngest_are_never_victims() {
    let (mut replacement, map, census) = aged(|_| evictable(1 << 9));
    let mut victims = Vec::new();
    replacement.victims(1_000, usize::MAX / 2, census, &map, &mut victims);
    assert_eq!(victims.len(), 1_000 - 64);
    assert!(victims.iter().all(|page| page.0 < 1_000 - 64));
}

#[test]
fn busy_pages_are_asked_about_again_and_gone_ones_are_not() {
    let (mut replacement, mut map, census) = aged(|page| match page {
        0..=9 => Candidate::Busy,
        10..=19 => Candidate::Gone,
        _ => evictable(1 << 9),
    });
    let mut victims = Vec::new();
    replacement.victims(1_000, 20, census, &map, &mut victims);
    assert!(victims.iter().all(|page| page.0 >= 20), "{victims:?}");
    map.0.fill(evictable(1 << 9));
    for late in 0..10 {
        replacement.victims(2_000 + late, 1_000, census, &map, &mut victims);
    }
    // The busy ones came last and make up the nursery with its last pages.
    assert!(victims.iter().all(|page| !(10..20).contains(&page.0)), "{victims:?}");
    let unique: HashSet<_> = victims.iter().collect();
    assert_eq!(unique.len(), victims.len(), "no page is evicted twice");
    assert_eq!(victims.len(), 1_000 - 10 - 64);
}

#[test]
fn a_refused_victim_is_not_tried_at_once() {
    let (mut replacement, map, census) = aged(|_| evictable(1 << 9));
    let (mut first, mut second) = (Vec::new(), Vec::new());
    replacement.victims(1_000, 10, census, &map, &mut first);
    for &page in &first {
        replacement.refused(page, 1_000);
    }
    replacement.victims(1_000, 500, census, &map, &mut second);
    assert_eq!(second.len(), 500);
    assert!(first.iter().all(|page| !second.contains(page)));
}

#[test]
fn a_page_map_that_forgets_and_remembers_does_not_grow_the_queues() {
    let (mut replacement, map, census) = aged(|_| Candidate::Evictable(gap::level(gap::NEW)));
    for now in 1_000..200_000 {
        replacement.arrived(PageId(now % 1_000), now);
        if now.is_multiple_of(500) {
            replacement.maintain(census, &map);
        }
    }
    replacement.maintain(census, &map);
    assert!(replacement.memory_bytes() < 80_000, "{}", replacement.memory_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the program does, the room is kept, and nothing that is resident
    /// is forgotten by the queues: squeezed, all but the nursery comes out.
    #[test]
    fn every_resident_page_can_be_found(
        seed: u64,
        room in 200..2_000usize,
        staged in 0..50usize,
        batch in 1..40usize,
        spread in 1..4u32,
    ) {
        let managed_pages = 3_000;
        let shape =
            Shape { managed_pages, capacity_pages: room, staged_pages: staged, batch_pages: batch };
        let mut tenant = Tenant::new(shape);
        let mut random = Random(seed);
        for _ in 0..20_000 {
            let place = (0..spread).fold(1.0, |product, _| product * random.uniform());
            let page = (place * managed_pages as f64) as u32;
            match random.next() % 50 {
                0 => tenant.discard(page),
                1 if random.next().is_multiple_of(100) => tenant.restart_worker(),
                _ => { tenant.touch(page); }
            }
            let (resident, staged_now) = tenant.in_dram();
            prop_assert!(resident + staged_now <= room);
            prop_assert!(staged_now <= staged.max(batch));
        }
        let (resident, _) = tenant.in_dram();
        let evicted = tenant.squeeze();
        prop_assert!(evicted + 64 >= resident, "{evicted} of {resident}");
        prop_assert_eq!(tenant.in_dram().0 + evicted, resident);
    }
}
