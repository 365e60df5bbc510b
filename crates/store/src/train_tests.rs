//! When a training is due.

use super::*;

/// Puts `count` pages that cost so much each; whether a training came due.
fn put(schedule: &Schedule, count: u64, slot_bytes: u64) -> bool {
    (0..count).fold(false, |due, _| {
        schedule.count_put();
        schedule.note_landing(slot_bytes);
        due || schedule.is_due()
    })
}

fn train(schedule: &Schedule, adopted: bool, expected_bytes: Option<u64>) {
    let turn = schedule.begin().expect("nobody else");
    assert!(schedule.begin().is_none() && !schedule.is_due(), "one at a time");
    turn.note_result(adopted, expected_bytes);
    drop(turn);
}

#[test]
fn looks_get_rarer() {
    let schedule = Schedule::default();
    assert!(!put(&schedule, FIRST_OBJECTS - 1, 1000));
    assert!(put(&schedule, 1, 1000));
    let mut puts = FIRST_OBJECTS;
    for _ in 0..3 {
        train(&schedule, false, None);
        assert!(!put(&schedule, puts * 3 - 1, 1000));
        assert!(put(&schedule, 1, 1000));
        puts *= 4;
    }
    train(&schedule, true, Some(1000));
    assert!(!put(&schedule, puts * 7 - 1, 1000));
    assert!(put(&schedule, 1, 1000));
    for _ in 0..MAX_ATTEMPTS {
        train(&schedule, false, None);
        schedule.next_puts.store(0, Relaxed);
    }
    assert!(!schedule.is_due(), "attempts are bounded");
}

#[test]
fn pages_that_pack_worse_are_noticed_once() {
    let schedule = Schedule::default();
    put(&schedule, FIRST_OBJECTS, 2000);
    train(&schedule, true, Some(500));
    assert!(!put(&schedule, 8000, 600), "a fifth is no quarter");
    assert!(put(&schedule, 1000, 2000));
    // Nothing better was found: this is how these pages are.
    put(&schedule, 3000, 2000);
    train(&schedule, false, Some(700));
    assert!(!put(&schedule, 20_000, 2000));
    assert!(put(&schedule, 5000, 3000), "worse again");
    // Not before enough pages have told.
    train(&schedule, true, Some(500));
    assert!(!put(&schedule, DRIFT_PUTS - 1, 3000));
    assert!(put(&schedule, 1, 3000));
}

#[test]
fn pages_of_two_kinds_in_turn_are_looked_at_less_and_less() {
    let schedule = Schedule::default();
    put(&schedule, FIRST_OBJECTS, 500);
    train(&schedule, true, Some(500));
    // All within the eight-fold that a new look is due after anyway.
    schedule.next_puts.store(u64::MAX, Relaxed);
    let mut looks = Vec::new();
    for turn in 0..400 {
        for _ in 0..1000 {
            if put(&schedule, 1, if turn % 2 == 0 { 3000 } else { 500 }) {
                train(&schedule, false, None);
                schedule.next_puts.store(u64::MAX, Relaxed);
                looks.push(turn);
            }
        }
    }
    let gaps: Vec<i32> = looks.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(looks.len() >= 4, "{looks:?}");
    assert!(gaps.windows(2).all(|pair| pair[1] * 2 >= pair[0] * 3), "{gaps:?}");
    // A dictionary that is found begins anew.
    train(&schedule, true, Some(500));
    schedule.next_puts.store(u64::MAX, Relaxed);
    assert!(put(&schedule, DRIFT_PUTS, 3000));
}

#[test]
fn a_recovered_store_that_has_a_dictionary_waits_for_the_next() {
    let mut schedule = Schedule::default();
    schedule.resume(5000, true);
    assert!(!schedule.is_due());
    assert!(put(&schedule, 7 * 5000, 1000));
    let mut without = Schedule::default();
    without.resume(5000, false);
    assert!(without.is_due());
}
