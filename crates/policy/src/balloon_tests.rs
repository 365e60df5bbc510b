use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 1024 * MIB;

fn settings() -> Settings {
    Settings {
        floor_bytes: 128 * MIB,
        headroom_bytes: 32 * MIB,
        headroom_percent: 10,
        committed_percent: 100,
        hysteresis_bytes: 8 * MIB,
        up_bytes: 512 * MIB,
        down_bytes: 16 * MIB,
        some_percent: 10,
        full_percent: 2,
        swap_in_bytes: MIB,
        refault_bytes: MIB,
        low_percent: 50,
        calm_s: 5,
        remember_s: 60,
        stale_s: 5,
    }
}

/// A guest that cannot do without `kept` bytes, and whose programs were promised `committed`.
#[derive(Clone)]
struct Guest {
    kept: u64,
    committed: u64,
    balloon: u64,
    reading: Reading,
    past: Past,
    fits: Option<u64>,
}

impl Guest {
    fn new(kept: u64, committed: u64) -> Self {
        let counted = Some(0);
        let reading = Reading {
            at_ms: 1000,
            total_bytes: MEMORY - 20 * MIB,
            committed_bytes: Some(committed),
            some_us: counted,
            full_us: counted,
            refaulted_pages: counted,
            swapped_in_pages: counted,
            swapped_out_pages: counted,
            major_faults: counted,
            ..Reading::default()
        };
        Self { kept, committed, balloon: MEMORY, reading, past: Past::default(), fits: None }
    }

    /// A second goes by, in which `change` happens.
    fn second(&mut self, settings: &Settings, change: impl Fn(&mut Reading)) -> Target {
        self.reading.at_ms += 1000;
        self.reading.available_bytes =
            self.balloon.saturating_sub(self.kept).min(self.reading.total_bytes);
        // The rest it has in its page cache.
        self.reading.free_bytes = self.reading.available_bytes.min(8 * MIB);
        self.reading.committed_bytes = Some(self.committed);
        change(&mut self.reading);
        let seen = self.seen();
        let target = decide(settings, &mut self.past, &seen);
        self.balloon = target.bytes;
        target
    }

    fn seen(&self) -> Seen {
        Seen {
            memory_bytes: MEMORY,
            balloon_bytes: self.balloon,
            had_bytes: self.balloon,
            seconds: 1.0,
            reading: Some((self.reading, 0.5)),
            fits_bytes: self.fits,
        }
    }

    fn seconds(&mut self, settings: &Settings, count: u32) -> Target {
        (0..count).map(|_| self.second(settings, |_| {})).last().expect("at least one")
    }
}

#[test]
fn an_idle_guest_gives_back_slowly_and_gets_back_fast() {
    let settings = settings();
    let mut guest = Guest::new(200 * MIB, 100 * MIB);
    assert_eq!(guest.second(&settings, |_| {}).why, Why::First);
    assert_eq!(guest.seconds(&settings, 3).why, Why::Waits);
    assert_eq!(guest.balloon, MEMORY);
    let target = guest.seconds(&settings, 3);
    assert_eq!((target.why, target.bytes), (Why::Shrinks, MEMORY - 32 * MIB));
    let settled = guest.seconds(&settings, 100);
    assert_eq!(settled.why, Why::Fits);
    assert!((232 * MIB..=240 * MIB).contains(&settled.bytes), "{settled:?}");
    // Its programs ask for more than it has, before they use it.
    guest.committed = 600 * MIB;
    let target = guest.second(&settings, |_| {});
    assert_eq!((target.why, target.bytes > 640 * MIB), (Why::Grows, true), "{target:?}");
    // What is to be written cannot be given up at once.
    guest.committed = 0;
    let target = guest.second(&settings, |reading| reading.dirty_bytes = 700 * MIB);
    assert!(target.why == Why::Grows && target.bytes > 900 * MIB, "{target:?}");
}

#[test]
fn where_it_was_pressed_it_does_not_go_soon() {
    let settings = settings();
    let mut guest = Guest::new(200 * MIB, 0);
    guest.seconds(&settings, 100);
    let pressed_at = guest.balloon;
    let target = guest.second(&settings, |reading| reading.some_us = Some(200_000));
    assert_eq!((target.why, target.bytes), (Why::Stalled, MEMORY));
    // What is given back is not called off while it is under way.
    guest.balloon = pressed_at + 50 * MIB;
    let target = guest.second(&settings, |_| {});
    assert_eq!((target.why, target.bytes), (Why::Waits, MEMORY));
    guest.seconds(&settings, 55);
    assert!(guest.balloon >= pressed_at + 32 * MIB, "{} MiB", guest.balloon / MIB);
    guest.seconds(&settings, 20);
    assert!(guest.balloon < pressed_at + 32 * MIB, "{} MiB", guest.balloon / MIB);
}

#[test]
fn refaults_make_it_grow_and_each_kind_of_pressure_gives_all_back() {
    let settings = settings();
    let mut guest = Guest::new(200 * MIB, 0);
    guest.seconds(&settings, 100);
    let target =
        guest.clone().second(&settings, |reading| reading.refaulted_pages = Some(MIB / 4096));
    assert_eq!((target.why, target.bytes), (Why::Refaults, guest.balloon + 512 * MIB));
    type Change = fn(&mut Reading);
    let kinds: [(Why, Change); 4] = [
        (Why::Stalled, |reading| reading.some_us = Some(100_000)),
        (Why::Stalled, |reading| reading.full_us = Some(20_000)),
        (Why::Swaps, |reading| reading.swapped_in_pages = Some(MIB / 4096)),
        (Why::Low, |reading| {
            reading.available_bytes = 15 * MIB;
            reading.free_bytes = MIB;
        }),
    ];
    for (why, change) in kinds {
        let target = guest.clone().second(&settings, change);
        assert_eq!((target.why, target.bytes), (why, MEMORY));
        assert!(why.gives_back());
    }
}

#[test]
fn without_what_a_stock_driver_does_not_tell_it_has_twice_the_headroom() {
    let settings = settings();
    let mut guest = Guest::new(200 * MIB, 0);
    for _ in 0..100 {
        guest.second(&settings, |reading| {
            (reading.committed_bytes, reading.some_us, reading.full_us) = (None, None, None);
        });
    }
    assert!((264 * MIB..=272 * MIB).contains(&guest.balloon), "{} MiB", guest.balloon / MIB);
}

#[test]
fn silence_a_restart_and_an_old_reading_never_shrink() {
    let settings = settings();
    let mut guest = Guest::new(200 * MIB, 0);
    guest.seconds(&settings, 100);
    let settled = guest.balloon;
    for (reading, why) in [
        (None, Why::Silent),
        (Some((guest.reading, 5.1)), Why::Stale),
        (Some((guest.reading, f64::NAN)), Why::Stale),
        (Some((guest.reading, -1.0)), Why::Stale),
        (Some((Reading { total_bytes: 0, ..guest.reading }, 0.0)), Why::Nonsense),
        (Some((Reading { total_bytes: MEMORY + 1, ..guest.reading }, 0.0)), Why::Nonsense),
        (Some((Reading { available_bytes: settled * 2, ..guest.reading }, 0.0)), Why::Nonsense),
        (Some((Reading { free_bytes: settled * 2, ..guest.reading }, 0.0)), Why::Nonsense),
        (Some((Reading { dirty_bytes: MEMORY, ..guest.reading }, 0.0)), Why::Nonsense),
    ] {
        let mut past = guest.past;
        let target = decide(&settings, &mut past, &Seen { reading, ..guest.seen() });
        assert_eq!((target.why, target.bytes), (why, MEMORY));
        assert!(why.gives_back());
    }
    // The guest was started anew: its counters begin anew, too.
    let target = guest.second(&settings, |reading| reading.at_ms = 1);
    assert_eq!((target.why, target.bytes), (Why::First, MEMORY));
    // The same once more is no further step.
    let mut guest = Guest::new(200 * MIB, 0);
    let target = guest.seconds(&settings, 10);
    assert_eq!(target.why, Why::Shrinks);
    for _ in 0..50 {
        let seen = guest.seen();
        assert_eq!(decide(&settings, &mut guest.past, &seen), target);
    }
}

/// Small, large and odd figures.
fn figure() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..4 * MEMORY,
        0..64 * MIB,
        Just(0),
        Just(u64::MAX),
        any::<u64>(),
        (0..MEMORY / 4096).prop_map(|pages| pages * 4096),
    ]
}

prop_compose! {
    fn any_settings()(
        bytes in prop::array::uniform7(figure()),
        percent in prop::array::uniform5(0..400_u32),
        seconds in prop::array::uniform3(0..100_u32),
    ) -> Settings {
        Settings {
            floor_bytes: bytes[0],
            headroom_bytes: bytes[1],
            headroom_percent: percent[0],
            committed_percent: percent[1],
            hysteresis_bytes: bytes[2],
            up_bytes: bytes[3],
            down_bytes: bytes[4],
            some_percent: percent[2],
            full_percent: percent[3],
            swap_in_bytes: bytes[5],
            refault_bytes: bytes[6],
            low_percent: percent[4],
            calm_s: seconds[0],
            remember_s: seconds[1],
            stale_s: seconds[2],
        }
    }
}

prop_compose! {
    fn any_reading()(
        sure in prop::array::uniform6(figure()),
        perhaps in prop::array::uniform7(prop::option::of(figure())),
    ) -> Reading {
        Reading {
            heard: sure[0],
            at_ms: sure[1],
            total_bytes: sure[2],
            free_bytes: sure[3],
            available_bytes: sure[4],
            dirty_bytes: sure[5],
            committed_bytes: perhaps[0],
            some_us: perhaps[1],
            full_us: perhaps[2],
            refaulted_pages: perhaps[3],
            swapped_in_pages: perhaps[4],
            swapped_out_pages: perhaps[5],
            major_faults: perhaps[6],
        }
    }
}

/// A guest that waits for memory a quarter of the time.
fn waits(reading: &mut Reading) {
    reading.some_us = reading.some_us.map(|waited| waited + 250_000);
}

#[test]
fn a_guest_that_waits_gets_what_the_host_has_room_for() {
    let settings = settings();
    let mut guest = Guest::new(200 * MIB, 100 * MIB);
    guest.fits = Some(300 * MIB);
    guest.second(&settings, |_| {});
    guest.balloon = 250 * MIB;
    let target = guest.second(&settings, waits);
    assert_eq!((target.bytes, target.why), (300 * MIB, Why::Bounded));
    let wish = guest.past.wish().expect("it was heard");
    assert_eq!((wish.bytes, wish.stall), (MEMORY, 0.25), "whoever shares out is told");
    // It has less room by now, and gives up the rest at the usual pace, waiting or not.
    guest.fits = Some(260 * MIB);
    assert_eq!(guest.second(&settings, waits).bytes, 284 * MIB);
    assert_eq!(guest.seconds(&settings, 5).bytes, 260 * MIB);
    guest.fits = Some(255 * MIB);
    assert_eq!(guest.second(&settings, waits).bytes, 260 * MIB, "that is hardly less");
    guest.fits = Some(2 * MEMORY);
    assert_eq!(guest.second(&settings, waits).bytes, MEMORY);
}

#[test]
fn what_a_guest_cannot_give_up_it_has_without_room() {
    let settings = settings();
    let mut guest = Guest::new(400 * MIB, 500 * MIB);
    guest.fits = Some(0);
    guest.second(&settings, |_| {});
    guest.balloon = 410 * MIB;
    let target = guest.second(&settings, waits);
    assert_eq!((target.bytes, target.why), (450 * MIB, Why::Bounded), "that and its headroom");
    // What it has in its swap is none of that: else it would lose more and more to it.
    let swaps = |reading: &mut Reading| {
        reading.swapped_in_pages = reading.swapped_in_pages.map(|pages| pages + 4096);
    };
    assert_eq!(guest.second(&settings, swaps).bytes, 550 * MIB, "what its programs may use");
    // A host without room takes nothing from a guest of which nothing is heard.
    let silent = Seen { reading: None, ..guest.seen() };
    let target = decide(&settings, &mut guest.past, &silent);
    assert_eq!((target.bytes, target.why), (MEMORY, Why::Silent));
    assert_eq!(guest.past.wish(), None);
}

#[test]
fn what_is_free_goes_at_once() {
    let settings = settings();
    let mut guest = Guest::new(200 * MIB, 100 * MIB);
    guest.seconds(&settings, 5);
    let free = |reading: &mut Reading| reading.free_bytes = 500 * MIB;
    // All but the headroom; the rest is page cache, and goes slowly.
    assert_eq!(guest.second(&settings, free).bytes, MEMORY - 468 * MIB);
    let none = |reading: &mut Reading| reading.free_bytes = 0;
    assert_eq!(guest.second(&settings, none).bytes, MEMORY - 484 * MIB);
}

fn any_age() -> impl Strategy<Value = f64> {
    prop_oneof![0.0..10.0, Just(f64::NAN), Just(f64::INFINITY), -10.0..1e9]
}

proptest! {
    /// Whatever is said, and in whatever order: between floor and promise, and down only for
    /// a fresh reading that can be, no faster than is set.
    #[test]
    fn any_guest_stays_between_floor_and_promise(
        settings in any_settings(),
        memory in 1..2 * MEMORY,
        said in prop::collection::vec(
            (
                prop::option::of((any_reading(), any_age())),
                figure(),
                any_age(),
                prop::option::of(figure()),
            ),
            1..30,
        ),
    ) {
        let mut past = Past::default();
        let mut balloon = memory;
        for (reading, had, seconds, fits_bytes) in said {
            let seen = Seen {
                memory_bytes: memory,
                balloon_bytes: balloon,
                had_bytes: had,
                seconds,
                reading,
                fits_bytes,
            };
            let target = decide(&settings, &mut past, &seen);
            prop_assert!(target.bytes >= settings.floor_bytes.min(memory));
            prop_assert!(target.bytes <= memory);
            let is_fresh = reading.is_some_and(|(_, age)| age <= f64::from(settings.stale_s));
            let can_be = reading.is_some_and(|(reading, _)| makes_sense(&reading, memory, had));
            if target.bytes < balloon {
                prop_assert!(is_fresh && can_be && !target.why.gives_back(), "{target:?}");
                let free = reading.map_or(0, |(reading, _)| reading.free_bytes);
                let most = settings.down_bytes.saturating_mul(2).max(free);
                prop_assert!(balloon - target.bytes <= most, "{target:?}");
            }
            if target.why.gives_back() {
                prop_assert_eq!(target.bytes, memory);
            }
            balloon = target.bytes;
        }
    }

    /// A guest whose need stays as it is gets one amount and keeps it: at most once up, once
    /// down, and then nothing changes.
    #[test]
    fn constant_needs_end_in_one_amount(
        kept in 0..MEMORY,
        committed in 0..2 * MEMORY,
        balloon in 0..=MEMORY,
    ) {
        let settings = settings();
        let mut guest = Guest::new(kept, committed);
        guest.balloon = balloon;
        let mut all = vec![guest.balloon];
        for _ in 0..300 {
            all.push(guest.second(&settings, |_| {}).bytes);
        }
        let turns = all
            .windows(2)
            .filter(|two| two[0] != two[1])
            .map(|two| two[0] < two[1])
            .collect::<Vec<_>>()
            .windows(2)
            .filter(|two| two[0] != two[1])
            .count();
        prop_assert!(turns <= 1, "{all:?}");
        prop_assert!(all[200..].iter().all(|bytes| *bytes == all[300]), "{all:?}");
        let need = kept.max(committed).min(MEMORY);
        prop_assert!(all[300] >= need.max(128 * MIB), "{} of {need}", all[300]);
    }

    /// Pressure is answered in the step in which it is said.
    #[test]
    fn pressure_gives_everything_back_at_once(
        kept in 0..MEMORY / 2,
        seconds in 2..200_u32,
        waits_us in 100_000..1_000_000_u64,
    ) {
        let settings = settings();
        let mut guest = Guest::new(kept, 0);
        guest.seconds(&settings, seconds);
        let target = guest.second(&settings, |reading| reading.some_us = Some(waits_us));
        prop_assert_eq!(target.bytes, MEMORY);
    }
}
