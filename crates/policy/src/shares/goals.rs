//! Where the budgets of a host's tenants go, if nothing changes: what each would lose with
//! how many bytes, and where the sum of that is least.

use super::{Past, Seen, WORTH_MOVING};
use crate::advice::{Point, between, hull_segments};

/// A guessed curve has so many parts.
const PARTS: u64 = 32;
/// Between more tenants no pieces are moved in search of something better.
const MOST_IMPROVED: usize = 64;

/// What a tenant loses with how many bytes, by weight: from a point to the next it falls
/// evenly.
#[derive(Clone, Debug)]
struct Losses(Vec<Point>);

/// It is as sure as it is.
fn point(budget_bytes: u64, loss: f64) -> Point {
    Point { budget_bytes, misses_per_second: 0.0, loss, loss_at_most: loss }
}

impl Losses {
    fn at(&self, bytes: u64) -> f64 {
        between(&self.0, bytes, |point| point.loss)
    }

    /// Segments of the lower convex hull from `floor` on: bytes, and what each saves.
    fn segments(&self, floor: u64) -> Vec<(u64, f64)> {
        let mut points = vec![point(floor, self.at(floor))];
        points.extend(self.0.iter().filter(|point| point.budget_bytes > floor));
        hull_segments(&points)
    }
}

impl Seen {
    /// What it loses with how many bytes, as far as is known.
    fn losses(&self, past: &Past) -> Losses {
        let weight = self.weight * past.awake();
        let spare = self.spare_bytes(past);
        if self.curve.len() > 1 {
            let points = self.curve.iter();
            return Losses(points.map(|one| point(one.budget_bytes, weight * one.loss)).collect());
        }
        // With room for a part `u` of what can leave: (1 - u) to the power of its skew.
        let whole = self.whole_bytes.max(self.used_bytes);
        let empty = self.empty_bytes().min(whole);
        let step = ((whole - empty) / PARTS).max(1);
        let guessed = |part: u64| {
            let out = 1.0 - part as f64 / PARTS as f64;
            point(empty + step * part, weight * out.powf(past.skew()))
        };
        let mut points: Vec<Point> = (0..PARTS).map(guessed).collect();
        points.push(point(whole.saturating_add(spare), 0.0));
        Losses(points)
    }
}

/// Where the budgets go, if nothing changes.
pub(super) fn goals(dram_bytes: u64, seen: &[Seen], past: &[Past]) -> Vec<u64> {
    let mut goals: Vec<u64> =
        seen.iter().zip(past).map(|(one, past)| one.floor_bytes(past)).collect();
    let floors: u64 = goals.iter().fold(0, |sum, &floor| sum.saturating_add(floor));
    if floors > dram_bytes {
        // Reserves are refused when they exceed the host; beside them what cannot be done
        // with less is shared in proportion.
        let rights: Vec<u64> =
            seen.iter().zip(past).map(|(one, past)| one.right_bytes(past)).collect();
        let all = rights.iter().fold(0, |sum: u64, &right| sum.saturating_add(right));
        if all > dram_bytes {
            let part = dram_bytes as f64 / all as f64;
            return rights.iter().map(|&right| (right as f64 * part) as u64).collect();
        }
        let part = (dram_bytes - all) as f64 / (floors - all).max(1) as f64;
        let above = |goal: u64, right: u64| ((goal - right) as f64 * part) as u64;
        return goals
            .iter()
            .zip(&rights)
            .map(|(&goal, &right)| right + above(goal, right))
            .collect();
    }
    let floors = goals.clone();
    let losses: Vec<Losses> = seen.iter().zip(past).map(|(one, past)| one.losses(past)).collect();
    let mut left = dram_bytes - floors.iter().sum::<u64>();
    let mut segments: Vec<(f64, usize, u64)> = Vec::new();
    for (index, losses) in losses.iter().enumerate() {
        let of = losses.segments(floors[index]);
        segments.extend(of.into_iter().map(|(bytes, saved)| (saved, index, bytes)));
    }
    // Stable: the segments of a hull stay in order.
    segments.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (saved, index, bytes) in segments {
        if saved > 0.0 {
            let room = seen[index].most_bytes().saturating_sub(goals[index]);
            let given = bytes.min(left).min(room);
            goals[index] += given;
            left -= given;
        }
    }
    improve(&mut goals, &floors, seen, &losses, dram_bytes);
    // Nobody is moved for little.
    let sum = |budgets: &[u64]| -> f64 {
        losses.iter().zip(budgets).map(|(losses, &budget)| losses.at(budget)).sum()
    };
    let have: Vec<u64> =
        seen.iter().zip(&floors).map(|(one, &floor)| one.budget_bytes.max(floor)).collect();
    let fits = have.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes)) <= dram_bytes
        && have.iter().zip(seen).all(|(&bytes, one)| bytes <= one.most_bytes());
    if fits && sum(&have) - sum(&goals) < WORTH_MOVING {
        goals = have;
        left = dram_bytes - goals.iter().sum::<u64>();
    }
    // What nobody wants is room to grow: first to work in, then by weight.
    for (goal, (one, past)) in goals.iter_mut().zip(seen.iter().zip(past)) {
        let given = one.wants_bytes(past).saturating_sub(*goal).min(left);
        *goal += given;
        left -= given;
    }
    let weights: f64 = seen.iter().map(|one| one.weight).sum();
    for (goal, one) in goals.iter_mut().zip(seen) {
        let part = (left as f64 * one.weight / weights.max(f64::MIN_POSITIVE)) as u64;
        *goal += part.min(one.most_bytes().saturating_sub(*goal));
    }
    goals
}

/// A curve lies above its hull within a segment, so that one tenant may have been given
/// bytes that save it nothing yet. Moves pieces between two tenants as long as that saves
/// something: of few tenants, where it can matter.
fn improve(goals: &mut [u64], floors: &[u64], seen: &[Seen], losses: &[Losses], dram_bytes: u64) {
    if goals.len() > MOST_IMPROVED {
        return;
    }
    for shift in 2..=7 {
        let piece = (dram_bytes >> shift).max(1);
        for _ in 0..goals.len() * 4 {
            let mut best = (WORTH_MOVING / 100.0, 0, 0);
            for from in 0..goals.len() {
                if goals[from] < floors[from].saturating_add(piece) {
                    continue;
                }
                let lost = losses[from].at(goals[from] - piece) - losses[from].at(goals[from]);
                for to in 0..goals.len() {
                    if to == from || goals[to].saturating_add(piece) > seen[to].most_bytes() {
                        continue;
                    }
                    let won = losses[to].at(goals[to]) - losses[to].at(goals[to] + piece);
                    if won - lost > best.0 {
                        best = (won - lost, from, to);
                    }
                }
            }
            let (_, from, to) = best;
            if from == to {
                break;
            }
            goals[from] -= piece;
            goals[to] += piece;
        }
    }
}
