//! Probes, what was set aside, and changes that are remembered.

use super::*;

#[test]
fn a_doubted_neighbourhood_is_probed_at_once_and_followed_together() {
    let walk = Walk::new();
    assert_eq!(probes(&walk, 0.0, false, 0, 0), 0, "no time has passed");
    assert_eq!(probes(&walk, 0.0, true, 0, 0), PROBES_IN_CHANGE);
    assert_eq!(probes(&walk, 0.0, true, 0, 3), PROBES_IN_CHANGE - 3);
    assert_eq!(probes(&walk, 0.0, false, 32, 8), 1);
    assert_eq!(probes(&walk, 0.0, true, 32, 8), 24);
}

#[test]
fn what_is_set_aside_is_chosen_when_it_is_announced_anew() {
    struct All;
    impl Pages for All {
        fn candidate(&self, _: PageId) -> Candidate {
            Candidate::Evictable(Level::of_gap(1000))
        }
    }
    let census = Census { managed: 400, resident: 400 };
    let mut policy = Replacement::new();
    (0..400).for_each(|page| policy.arrived(PageId(page), page));
    let mut chosen = Vec::new();
    policy.victims(400, 8, census, &All, &mut chosen);
    let aside = chosen[0];
    policy.set_aside(aside, 400);
    chosen[1..].iter().for_each(|&page| policy.refused(page, 400));
    let all = |policy: &mut Replacement| {
        let mut all = Vec::new();
        policy.victims(401, 400, census, &All, &mut all);
        all.iter().for_each(|&page| policy.refused(page, 401));
        all
    };
    let without = all(&mut policy);
    assert!(without.len() > 200 && !without.contains(&aside), "{}", without.len());
    policy.refused(aside, 401);
    // The youngest are spared: others are younger by now.
    let with: Vec<_> = (0..4).flat_map(|_| all(&mut policy)).collect();
    assert!(with.contains(&aside));
}

#[test]
fn a_change_is_remembered_for_a_while_and_a_start_is_none() {
    const RESIDENT: usize = 1024;
    let (mut surprise, mut now) = (Surprise::default(), u32::MAX - 15_000);
    let mut after = |returns: u32, silences: f32| {
        for _ in 0..returns {
            now = now.wrapping_add(1);
            surprise.see(silences, RESIDENT);
            surprise.pass(now, RESIDENT);
        }
        surprise.changed.map(|then| now.wrapping_sub(then))
    };
    assert_eq!(after(5_000, 0.0), None, "all is new");
    assert_eq!(after(5_000, 1.0), None, "and is no longer");
    assert_eq!(after(20, 0.0), Some(0));
    assert!(after(2_000, 1.0).is_some_and(|ago| ago > 1_000), "the early ones have ended");
    assert_eq!(after(4_000, 1.0), None);
}
