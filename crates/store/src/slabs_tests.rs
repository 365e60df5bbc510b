//! Slots: that none is given twice, and which slabs are emptied into others.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

proptest! {
    #[test]
    fn slots_never_overlap_and_come_back(
        steps in prop::collection::vec((any::<bool>(), 1usize..=4096, any::<u32>()), 1..600)
    ) {
        let mut slabs = Slabs::new(1 << 30);
        let mut held: Vec<(u64, SizeClass)> = Vec::new();
        let mut units: HashMap<u64, ()> = HashMap::new();
        for (put, len, pick) in steps {
            if put || held.is_empty() {
                let class = SizeClass::of(len);
                let unit = slabs.allocate(class, true).expect("room");
                for unit in unit..unit + class.slot_units() {
                    prop_assert!(units.insert(unit, ()).is_none(), "unit {} twice", unit);
                }
                held.push((unit, class));
            } else {
                let (unit, class) = held.swap_remove(pick as usize % held.len());
                for unit in unit..unit + class.slot_units() {
                    units.remove(&unit);
                }
                if let Some(slab) = slabs.release(unit, class) {
                    slabs.punched(slab, true);
                }
            }
        }
        let mut copy = Slabs::new(1 << 30);
        for &(unit, class) in &held {
            prop_assert!(copy.claim(unit, class));
            prop_assert!(!copy.claim(unit, class));
        }
        copy.finish_claims(|_, _| {});
        for (unit, class) in held {
            if let Some(slab) = slabs.release(unit, class) {
                slabs.punched(slab, true);
            }
            if let Some(slab) = copy.release(unit, class) {
                copy.punched(slab, true);
            }
        }
        for mut slabs in [slabs, copy] {
            while let Some(slab) = slabs.pop_warm() {
                slabs.punched(slab, true);
            }
            prop_assert_eq!(slabs.touched_bytes(), 0);
            prop_assert_eq!(slabs.bits_bytes, 0);
        }
    }
}

#[test]
fn without_growth_only_holes_are_used() {
    let mut slabs = Slabs::new(1 << 30);
    let class = SizeClass::of(4096);
    assert_eq!(slabs.allocate(class, false), Err(NoSlot));
    let first = slabs.allocate(class, true).expect("room");
    assert_eq!(slabs.allocate(class, false), Err(NoSlot));
    let second = slabs.allocate(class, true).expect("room");
    assert_eq!(slabs.release(first, class), None);
    let cost = slabs.touched_bytes();
    assert_eq!(slabs.allocate(class, false), Ok(first));
    assert_eq!(slabs.touched_bytes(), cost);
    assert_ne!(first, second);
}

#[test]
fn the_span_is_respected() {
    let mut slabs = Slabs::new(2 * SLAB_BYTES);
    let class = SizeClass::of(4096);
    let slots = (0..).take_while(|_| slabs.allocate(class, true).is_ok()).count();
    assert_eq!(slots, 128);
}

#[test]
fn victims_fit_into_the_others() {
    let mut slabs = Slabs::new(1 << 30);
    let class = SizeClass::of(4096);
    let units: Vec<u64> =
        (0..64 * 20).map(|_| slabs.allocate(class, true).expect("room")).collect();
    for (at, &unit) in units.iter().enumerate() {
        if at % 10 < 6 {
            assert_eq!(slabs.release(unit, class), None);
        }
    }
    let mut victims = Vec::new();
    slabs.choose_victims(|slab| victims.push(slab));
    assert!(victims.len() >= 9 && victims.len() <= 12, "{}", victims.len());
    let before = slabs.end_bytes();
    for (at, &unit) in units.iter().enumerate() {
        if at % 10 >= 6 && victims.contains(&slab_of(unit)) {
            let moved = slabs.allocate(class, false).expect("a hole");
            assert!(!victims.contains(&slab_of(moved)));
            if let Some(slab) = slabs.release(unit, class) {
                slabs.punched(slab, true);
            }
        }
    }
    assert_eq!(slabs.end_bytes(), before);
}
