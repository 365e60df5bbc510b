//! Shares that move, beside equal ones and the optimum.

use super::*;

fn arguments() -> SharesArgs {
    SharesArgs {
        dram: 0.55,
        seconds: 240,
        warm_seconds: 60,
        scale_down: 200,
        seed: 1,
        advised: false,
    }
}

#[test]
fn moving_shares_lose_less_than_equal_ones_and_more_than_the_optimum() {
    let args = arguments();
    let plans = plans(&args);
    let pages: usize = plans.iter().map(|plan| plan.pages).sum();
    let dram_pages = (pages as f64 * args.dram) as usize;
    let sum = |moves: bool| {
        let mut world = World::new(&args, &plans, dram_pages);
        world.begin(&[1.0; 4]);
        world.run(moves);
        world.losses().iter().sum::<f64>()
    };
    let (equal, moving) = (sum(false), sum(true));
    let best: f64 = optimum(&args, &plans, dram_pages).iter().sum();
    assert!(moving < 0.95 * equal && moving > best, "{moving} of {equal}, best {best}");
}
