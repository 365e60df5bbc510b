use super::*;

const GIB: u64 = 1 << 30;
const PAGE_BYTES: u64 = strata_units::PAGE_SIZE as u64;

/// A tenant whose use of memory is known: with `hot` bytes in place it misses nothing.
#[derive(Clone)]
struct Model {
    whole: u64,
    hot: u64,
    /// Misses a second of processor time with nothing in place.
    misses: f64,
    works: bool,
    weight: f64,
    reserve: u64,
    limit: u64,
}

impl Model {
    const fn new(whole: u64, hot: u64, misses: f64) -> Self {
        Self { whole, hot, misses, works: true, weight: 1.0, reserve: 0, limit: u64::MAX }
    }

    const fn misses_at(&self, budget: u64) -> f64 {
        let missing = self.hot.saturating_sub(budget) as f64 / self.hot as f64;
        self.misses * missing * missing
    }

    fn loss_at(&self, budget: u64) -> f64 {
        let waits = self.misses_at(budget) * 20e-6;
        waits / (1.0 + waits)
    }
}

struct Host {
    dram: u64,
    models: Vec<Model>,
    used: Vec<u64>,
    budgets: Vec<u64>,
    past: Vec<Past>,
    last: Vec<Share>,
}

impl Host {
    fn new(dram: u64, models: Vec<Model>) -> Self {
        let count = models.len();
        Self {
            dram,
            models,
            used: vec![0; count],
            budgets: vec![64 * MIB; count],
            past: vec![Past::default(); count],
            last: Vec::new(),
        }
    }

    /// What each sees in a second with the budgets that it has.
    fn seen(&mut self) -> Vec<Seen> {
        let mut all = Vec::new();
        for (index, model) in self.models.iter().enumerate() {
            let budget = self.budgets[index];
            // What is out comes back as it is missed, and stays.
            let wanted = model.whole.min(budget);
            let before = self.used[index];
            let loss = if model.works { model.loss_at(before.min(budget)) } else { 0.0 };
            let back = (model.misses_at(before.min(budget)) * (1.0 - loss)) as u64 * PAGE_BYTES;
            let back = if model.works { back } else { 0 };
            self.used[index] = if before > budget { budget } else { wanted.min(before + back) };
            all.push(Seen {
                reserve_bytes: model.reserve,
                limit_bytes: model.limit,
                weight: model.weight,
                least_bytes: 4 * MIB,
                packed_bytes: 0,
                budget_bytes: budget,
                used_bytes: self.used[index],
                whole_bytes: model.whole,
                growth_bytes: 0,
                returned_bytes: back,
                stall: loss,
                busy: if model.works { 1.0 - loss } else { 0.0 },
                curve: Vec::new(),
            });
        }
        all
    }

    fn run(&mut self, seconds: usize) {
        for _ in 0..seconds {
            let seen = self.seen();
            self.last = share(self.dram, &seen, &mut self.past, 1.0);
            let sum: u64 = self.last.iter().map(|share| share.budget_bytes).sum();
            assert!(sum <= self.dram, "{sum} of {}", self.dram);
            self.budgets = self.last.iter().map(|share| share.budget_bytes).collect();
        }
    }

    fn loss(&self) -> f64 {
        self.models
            .iter()
            .zip(&self.budgets)
            .filter(|(model, _)| model.works)
            .map(|(model, &budget)| model.loss_at(budget))
            .sum()
    }
}

/// One that waits all the time, and of which hardly anything more can leave.
fn squeezed(reserve_bytes: u64) -> Seen {
    Seen {
        reserve_bytes,
        limit_bytes: u64::MAX,
        weight: 1.0,
        least_bytes: 4 * MIB,
        packed_bytes: 100 * MIB,
        budget_bytes: 128 * MIB,
        used_bytes: 128 * MIB,
        whole_bytes: 280 * MIB,
        returned_bytes: 20 * MIB,
        stall: 0.6,
        busy: 0.4,
        ..Seen::default()
    }
}

#[test]
fn compressed_memory_that_cannot_leave_is_nobodys_gain() {
    let dram = 512 * MIB;
    let mut seen = vec![squeezed(0); 4];
    let mut past = vec![Past::default(); 4];
    for second in 0..60 {
        let shares = share(dram, &seen, &mut past, 1.0);
        for (one, share) in seen.iter_mut().zip(&shares) {
            assert!(share.budget_bytes >= 104 * MIB, "{second}: {}", share.budget_bytes / MIB);
            // It does not get below what it has compressed, whatever its budget is.
            one.budget_bytes = share.budget_bytes;
            one.used_bytes = share.budget_bytes.clamp(104 * MIB, 280 * MIB);
        }
    }
    // There is less than all of them cost: reserves come first.
    let mut past = vec![Past::default(); 2];
    let shares = share(160 * MIB, &[squeezed(120 * MIB), squeezed(0)], &mut past, 1.0);
    assert_eq!(shares[0].goal_bytes / MIB, 120);
    assert!(shares[1].goal_bytes <= 40 * MIB, "{}", shares[1].goal_bytes / MIB);
}

#[test]
fn unlike_tenants_lose_far_less_than_with_equal_shares() {
    let models = vec![
        Model::new(4 * GIB, 3 * GIB, 60_000.0),
        Model::new(2 * GIB, GIB / 2, 80_000.0),
        Model::new(GIB, GIB / 4, 5_000.0),
        Model::new(2 * GIB, GIB / 2, 1_000.0),
    ];
    let dram = 4 * GIB;
    let equal: f64 = models.iter().map(|model| model.loss_at(dram / 4)).sum();
    let mut host = Host::new(dram, models);
    host.run(180);
    assert!(host.loss() <= equal * 0.5, "{} of {equal}: {:?}", host.loss(), host.last);
}

#[test]
fn what_is_steady_does_not_swing() {
    let models = vec![Model::new(2 * GIB, GIB, 40_000.0); 3];
    let mut host = Host::new(2 * GIB, models);
    host.run(240);
    let before = host.budgets.clone();
    host.run(60);
    for (old, new) in before.iter().zip(&host.budgets) {
        assert!(old.abs_diff(*new) <= 2 * GIB / 16, "{before:?} {:?}", host.budgets);
    }
}

#[test]
fn a_reserve_is_given_back_at_once() {
    let mut sleeper = Model::new(GIB, GIB, 50_000.0);
    (sleeper.reserve, sleeper.works) = (GIB, false);
    let greedy = Model::new(8 * GIB, 8 * GIB, 90_000.0);
    let mut host = Host::new(2 * GIB, vec![sleeper, greedy]);
    host.run(300);
    assert!(host.budgets[1] > GIB * 3 / 2, "what nobody uses is lent: {:?}", host.budgets);
    host.models[0].works = true;
    host.run(8);
    assert!(host.budgets[0] >= GIB * 7 / 8, "{:?}", host.last);
}

#[test]
fn nobody_takes_a_reserve_that_is_used() {
    let mut small = Model::new(GIB, GIB / 2, 10.0);
    small.reserve = GIB / 2;
    let mut host = Host::new(GIB, vec![small, Model::new(8 * GIB, 8 * GIB, 90_000.0)]);
    host.budgets = vec![GIB / 2, GIB / 2];
    host.used = vec![GIB / 2, GIB / 2];
    for _ in 0..120 {
        host.run(1);
        assert!(host.budgets[0] >= GIB / 2, "{:?}", host.last);
    }
}

#[test]
fn one_that_wakes_has_half_of_what_it_lacks_in_a_second() {
    let mut host = Host::new(
        4 * GIB,
        vec![Model::new(GIB, GIB, 60_000.0), Model::new(GIB / 4, GIB / 8, 10.0)],
    );
    host.run(60);
    host.models[0].works = false;
    host.run(120);
    // Somebody has evicted it meanwhile, and there is room.
    (host.budgets[0], host.used[0]) = (GIB / 4, GIB / 4);
    host.models[0].works = true;
    host.run(1);
    let lacked = GIB * 3 / 4;
    assert!(host.budgets[0] >= GIB / 4 + lacked / 2, "{:?}", host.last);
}

#[test]
fn what_is_quiet_gives_way_slowly() {
    let quiet = Model::new(GIB, GIB, 50_000.0);
    let mut host = Host::new(2 * GIB, vec![quiet, Model::new(GIB / 2, GIB / 2, 1_000.0)]);
    host.run(120);
    let before = host.budgets[0].min(host.used[0]);
    host.models[0].works = false;
    host.models[1] = Model::new(4 * GIB, 4 * GIB, 90_000.0);
    host.run(5);
    assert!(host.budgets[0] >= before / 2, "not at once: {:?}", host.last);
    host.run(600);
    assert!(host.budgets[0] <= before / 2, "but in the end: {:?}", host.last);
    assert_eq!(host.last[0].why, Why::Quiet);
}

#[test]
fn weights_and_limits_count() {
    let mut host = Host::new(GIB, vec![Model::new(2 * GIB, 2 * GIB, 50_000.0); 2]);
    host.models[0].weight = 3.0;
    host.run(180);
    assert!(host.budgets[0] > host.budgets[1] * 3 / 2, "{:?}", host.budgets);
    host.models[0].limit = GIB / 4;
    host.run(180);
    assert!(host.budgets[0] <= GIB / 4, "{:?}", host.last);
    assert_eq!(host.last[0].why, Why::Limit);
}

#[test]
fn more_is_held_than_there_is_never() {
    // By a small generator of its own: any figures, also absurd ones.
    let mut state = 88_172_645_463_325_252u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below.max(1)
    };
    for _ in 0..2_000 {
        let count = random(9) as usize;
        let dram = random(16 * GIB);
        let mut left = dram;
        let mut seen = Vec::new();
        for _ in 0..count {
            let reserve = random(left);
            left -= reserve;
            let budget = random(dram / count as u64 + 1);
            seen.push(Seen {
                reserve_bytes: reserve,
                limit_bytes: if random(2) == 0 { u64::MAX } else { random(8 * GIB) },
                weight: 0.1 + random(100) as f64 / 10.0,
                least_bytes: random(budget.min(reserve) + 1),
                packed_bytes: random(8 * GIB),
                budget_bytes: budget,
                used_bytes: random(budget + 1),
                whole_bytes: random(32 * GIB),
                growth_bytes: random(GIB),
                returned_bytes: random(GIB),
                stall: random(1000) as f64 / 999.0,
                busy: random(100) as f64 / 50.0,
                curve: Vec::new(),
            });
        }
        let mut past = vec![Past::default(); count];
        for _ in 0..5 {
            let shares = share(dram, &seen, &mut past, 1.0);
            let sum: u64 = shares.iter().map(|share| share.budget_bytes).sum();
            assert!(sum <= dram, "{sum} of {dram}: {seen:?} {shares:?}");
            for (share, one) in shares.iter().zip(&seen) {
                assert!(share.budget_bytes <= one.most_bytes().max(one.budget_bytes));
                assert!(share.costs_others.is_finite());
            }
            for (one, share) in seen.iter_mut().zip(&shares) {
                one.budget_bytes = share.budget_bytes;
                one.used_bytes = one.used_bytes.min(share.budget_bytes);
            }
        }
    }
}
