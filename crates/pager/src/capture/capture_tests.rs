//! Snapshots of memory that a program goes on using, with the real kernel, in
//! one process: what the snapshot has is what was there at the freeze.
//!
//! Not here: stopping processes, and process state.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use strata_store::Put;
use strata_sys::Range;
use strata_units::{PAGE_SIZE, PageBuffer, SpaceId};

use crate::capture::{RUN_PAGES, Seen};
use crate::fault::serve_tests::{self, HANGS, PAGES, World};
use crate::map::address::EVERYTHING;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::excluded::Excluded;
use crate::testing;

/// A snapshot of a world, not whole yet.
pub(crate) struct Taken {
    pub(crate) id: SpaceId,
    pub(super) buffer: Vec<u8>,
}

impl Taken {
    /// The world stands still: nobody touches its memory meanwhile.
    pub(crate) fn of(world: &World) -> Self {
        arm(world);
        Self::at_freeze(world)
    }

    /// The same, when it was armed before.
    fn at_freeze(world: &World) -> Self {
        let mut buffer = vec![0; RUN_PAGES * PAGE_SIZE];
        let id = world.tenant.registry.add_space(world.tenant.id, None).expect("room");
        let maps = [testing::anonymous(world.memory.range())];
        let seen =
            Seen { process: &testing::own_process(), maps: &maps, excluded: &Excluded::default() };
        let frozen = world.space.freeze(&world.tenant, id, EVERYTHING, &seen, &mut buffer);
        frozen.expect("nothing is on its way");
        Self { id, buffer }
    }

    fn go_on(&mut self, world: &World) -> (u64, bool) {
        world.space.capture_some(&world.tenant, Put::Fast, &mut self.buffer);
        world.space.capture_state().expect("it is being captured")
    }

    /// Returns how many pages the snapshot before had.
    pub(crate) fn capture_all(&mut self, world: &World) -> u64 {
        let hangs = Instant::now() + HANGS;
        loop {
            let (pending, torn) = self.go_on(world);
            assert!(!torn, "nothing was discarded");
            if pending == 0 {
                break;
            }
            assert!(Instant::now() < hangs, "{pending} pages stay pending");
        }
        self.end(world)
    }

    /// Nothing is pending; how many pages the snapshot before had.
    pub(super) fn end(&mut self, world: &World) -> u64 {
        let capture =
            lock(&world.space.gate).end_capture(&world.tenant.registry).expect("captured");
        let from_base = capture.from_base;
        world.tenant.know_snapshot(capture.object);
        from_base
    }

    pub(super) fn entry(&self, world: &World, page: usize) -> Entry {
        let known = lock(&world.tenant.snapshots).get(&self.id).cloned().expect("whole");
        known.entry(&world.tenant.map, world.memory.address(page))
    }

    pub(super) fn expect(&self, world: &World, page: usize, seed: u8) {
        let mut buffer = PageBuffer::zeroed();
        match self.entry(world, page) {
            Entry::Untouched => {}
            Entry::Stored(handle) => {
                world.tenant.store.get(handle, &mut buffer.0).expect("stored");
            }
            other => panic!("page {page} of the snapshot is {other:?}"),
        }
        assert!(buffer.0 == testing::page(seed).0, "page {page} was {seed} at the freeze");
    }

    pub(crate) fn remove(self, world: &World) {
        world.tenant.remove_snapshot_memory(self.id);
        assert!(!world.tenant.snapshot_memories().contains(&self.id));
    }
}

/// The pages that are not captured yet.
pub(super) fn pending(world: &World) -> Vec<usize> {
    let gate = lock(&world.space.gate);
    let is_pending = |&page: &usize| gate.is_pending(&world.tenant.map, world.memory.address(page));
    (0..PAGES).filter(is_pending).collect()
}

fn arm(world: &World) {
    world.space.arm(&testing::own_process(), EVERYTHING, &Excluded::default()).expect("registered");
}

pub(crate) fn fill(world: &World, pages: std::ops::Range<usize>, seed: impl Fn(usize) -> u8) {
    // Backwards: whoever touches new memory in order gets more than a page.
    for page in pages.rev() {
        world.write(page, seed(page));
        world.wait_for(page, Entry::Resident { shared: false });
    }
}

#[test]
fn a_snapshot_has_what_was_there_at_the_freeze() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..40, |page| 1 + page as u8);
    world.evict_all(&(0..10).collect::<Vec<_>>());
    world.memory.discard(38, 2).expect("madvise");
    let mut taken = Taken::of(&world);
    assert_eq!(world.space.capture_state(), Some((28, false)), "10..38 are in place");
    // Pages that were evicted, that were in place, and that are new.
    for page in [0, 3, 12, 13, 37, 39, 50] {
        world.write(page, 200);
    }
    assert_eq!(
        pending(&world),
        (16..32).collect::<Vec<_>>(),
        "two blocks of sixteen were captured by writes: 10..16 and 32..38 were pending"
    );
    assert_eq!(world.space.capture_state(), Some((28, false)), "nothing is in the store yet");
    assert!(world.space.copied_bytes() > 0);
    taken.capture_all(&world);
    for page in 0..PAGES {
        let seed = if page < 38 { 1 + page as u8 } else { 0 };
        taken.expect(&world, page, seed);
    }
    for page in 0..PAGES {
        let seed = match page {
            0 | 3 | 12 | 13 | 37 | 39 | 50 => 200,
            0..=37 => 1 + page as u8,
            _ => 0,
        };
        world.expect(page, seed);
    }
    // Whoever writes takes the protection off, although nobody captures any more.
    fill(&world, 0..40, |_| 7);
    taken.remove(&world);
    world.end();
}

#[test]
fn a_pending_page_that_leaves_is_captured_with_it() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..8, |page| 1 + page as u8);
    let mut taken = Taken::of(&world);
    // Captured by this write, with its neighbours; so is what is left alone.
    world.write(7, 100);
    fill(&world, 32..34, |page| 1 + page as u8);
    assert_eq!(pending(&world), Vec::<usize>::new());
    taken.capture_all(&world);
    let mut again = Taken::of(&world);
    assert_eq!(pending(&world).len(), 10);
    world.evict_all(&[0, 1, 2, 3, 7, 32]);
    let left: Vec<usize> = vec![4, 5, 6, 33];
    assert_eq!(pending(&world), left);
    world.write(0, 200);
    again.capture_all(&world);
    for page in 0..8 {
        taken.expect(&world, page, 1 + page as u8);
        again.expect(&world, page, if page == 7 { 100 } else { 1 + page as u8 });
        let now = [200, 2, 3, 4, 5, 6, 7, 100][page];
        world.expect(page, now);
    }
    taken.remove(&world);
    again.remove(&world);
    world.end();
}

#[test]
fn a_page_that_lost_its_protection_does_not_leave_for_the_snapshot() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..2, |page| 1 + page as u8);
    let mut taken = Taken::of(&world);
    // As a page that the kernel took (MADV_FREE) and that was written again.
    let at = world.memory.address(1);
    world.space.uffd.unprotect(Range { start: at, end: at + PAGE_SIZE as u64 });
    world.write(1, 77);
    let hangs = Instant::now() + HANGS;
    while world.entry(0).is_resident() {
        assert!(Instant::now() < hangs, "page 0 does not leave");
        world.evict_once(0..2);
    }
    assert_eq!(pending(&world), [1]);
    assert!(world.entry(1).is_resident());
    taken.go_on(&world);
    assert_eq!(pending(&world), [1], "it is not captured either");
    world.expect(1, 77);
    lock(&world.space.gate).capture = None;
    world.tenant.forget_leaves(taken.id);
    world.end();
}

#[test]
fn what_is_lost_while_it_is_pending_tears_the_snapshot() {
    let Some(world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..8, |page| 1 + page as u8);
    let mut taken = Taken::of(&world);
    world.memory.discard(20, 4).expect("madvise");
    // The event is answered before it is acted on; a fault comes after it.
    world.expect(20, 0);
    assert_eq!(world.space.capture_state(), Some((8, false)), "nothing was pending there");
    // As if the program had been faster than the handler.
    lock(&world.space.gate).put_back_unprotected(&world.tenant, world.memory.address(5));
    world.memory.discard(5, 1).expect("madvise");
    world.expect(5, 0);
    assert!(taken.go_on(&world).1, "page 5 was pending");
    assert_eq!(world.space.capture_state(), Some((0, true)), "all others are captured");
    // What it has the next one need not read; nor has anybody written to it.
    assert_eq!(taken.end(&world), 0);
    fill(&world, 6..8, |page| 100 + page as u8);
    let mut again = Taken::of(&world);
    assert_eq!(again.capture_all(&world), 5, "0..5; 5 is new, and 6 and 7 were written");
    taken.remove(&world);
    for page in 0..8 {
        again.expect(&world, page, [1, 2, 3, 4, 5, 0, 106, 107][page]);
    }
    // Whoever writes takes the protection off.
    fill(&world, 0..8, |page| 100 + page as u8);
    again.remove(&world);
    world.end();
}

#[test]
fn a_page_that_went_unseen_before_the_freeze_was_zero() {
    let Some(world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..4, |page| 1 + page as u8);
    world.memory.discard(2, 1).expect("madvise");
    world.expect(2, 0);
    world.memory.discard(2, 1).expect("madvise");
    // As MADV_FREE leaves it: believed resident, and not there.
    let id = world.id(2).expect("touched");
    let hangs = Instant::now() + HANGS;
    while world.entry(2) != Entry::Discarded {
        assert!(Instant::now() < hangs, "the event is never acted on");
    }
    world.tenant.now_resident(id);
    let mut taken = Taken::of(&world);
    taken.capture_all(&world);
    taken.expect(&world, 2, 0);
    taken.expect(&world, 3, 4);
    taken.remove(&world);
    world.end();
}

#[test]
fn what_is_there_counts_whatever_its_entry_says() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..4, |page| 1 + page as u8);
    world.evict_all(&[1]);
    let id = |page| world.id(page).expect("touched");
    let (free, late) = (id(0), id(2));
    // As MADV_FREE leaves a page that is written again before the kernel takes it.
    world.tenant.overwrite(free, world.entry(0), Entry::Discarded);
    // As the handler leaves a page that it has put in place a moment ago, and
    // that was written since.
    let Entry::Stored(stale) = world.entry(1) else { panic!("page 1 is stored") };
    world.tenant.store.retain(stale);
    world.tenant.map.set(late, Entry::Arriving(stale));
    let mut taken = Taken::of(&world);
    world.tenant.map.set(late, Entry::Resident { shared: false });
    world.tenant.store.release(stale);
    taken.capture_all(&world);
    for page in 0..4 {
        taken.expect(&world, page, 1 + page as u8);
    }
    world.write(0, 9);
    taken.expect(&world, 0, 1);
    taken.remove(&world);
    world.tenant.now_resident(free);
    world.end();
}

/// Whoever waits for a page can be stopped before it comes.
#[test]
fn pages_that_come_back_at_the_freeze_are_in_the_snapshot() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..PAGES, |page| 1 + page as u8);
    let all: Vec<usize> = (0..PAGES).collect();
    for round in 0..150 {
        world.evict_all(&all);
        arm(&world);
        for page in 0..PAGES {
            world.ask_for(page);
        }
        // Later in each round than in the one before.
        let began = Instant::now();
        while began.elapsed() < Duration::from_micros(2 * round) {
            std::hint::spin_loop();
        }
        let mut taken = Taken::at_freeze(&world);
        taken.capture_all(&world);
        for page in 0..PAGES {
            taken.expect(&world, page, 1 + page as u8);
        }
        taken.remove(&world);
    }
    world.end();
}

#[test]
fn a_second_snapshot_reads_only_what_was_written() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..48, |page| 1 + page as u8);
    let mut first = Taken::of(&world);
    assert_eq!(first.capture_all(&world), 0, "there was none before");
    // Blocks of sixteen pages: the first is written to four times, of the second a
    // page leaves and comes back, one is discarded, and one was moved.
    for page in 3..7 {
        world.write(page, 97 + page as u8);
    }
    world.evict_all(&[20]);
    world.expect(20, 21);
    world.memory.discard(21, 1).expect("madvise");
    world.write(21, 121);
    let moved = world.memory.address(24);
    lock(&world.space.gate).note_moved(Range { start: moved, end: moved + PAGE_SIZE as u64 });
    arm(&world);
    // Written when it had been noted as unwritten.
    world.write(41, 141);
    let mut second = Taken::at_freeze(&world);
    assert_eq!(second.capture_all(&world), 28, "16..48 without 20, 21, 24 and 41");
    // All the same, and the first is gone before anything of it was asked for.
    let mut third = Taken::of(&world);
    first.remove(&world);
    second.remove(&world);
    assert_eq!(third.capture_all(&world), 0);
    let mut fourth = Taken::of(&world);
    // What is discarded while it is pending is known already.
    world.memory.discard(17, 1).expect("madvise");
    world.expect(17, 0);
    assert_eq!(fourth.capture_all(&world), 48);
    for page in 0..48 {
        let seed = match page {
            3..7 => 97 + page as u8,
            21 => 121,
            41 => 141,
            _ => 1 + page as u8,
        };
        third.expect(&world, page, seed);
        fourth.expect(&world, page, seed);
    }
    third.remove(&world);
    fourth.remove(&world);
    world.end();
}

#[test]
fn an_attempt_that_was_given_up_is_no_base() {
    let Some(world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..32, |page| 1 + page as u8);
    let mut first = Taken::of(&world);
    first.capture_all(&world);
    world.write(3, 100);
    // Everything is protected, page 3 too, and then nothing comes of it.
    arm(&world);
    let mut second = Taken::of(&world);
    assert_eq!(second.capture_all(&world), 0);
    second.expect(&world, 3, 100);
    first.remove(&world);
    second.remove(&world);
    world.end();
}

/// Ends the program, also when the test fails.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A program that never stands still but at the freeze; many snapshots, each
/// compared with what its memory was.
#[test]
fn snapshots_of_a_busy_program_are_of_one_moment() {
    let Some(mut world) = World::of(testing::tenant()) else { return };
    const ROUNDS: usize = 30;
    let stop = AtomicBool::new(false);
    let steps = AtomicU64::new(0);
    // What is discarded while it is pending may tear a snapshot.
    let may_discard = AtomicBool::new(true);
    // Locked while the program touches its memory: who has the lock has frozen it.
    let model = std::sync::Mutex::new([0u8; PAGES]);
    let memory = world.memory;
    let mut before: Option<Taken> = None;
    let (mut from_base, mut torn) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut state = 0x2545_f491_4f6c_dd1du64;
            while !stop.load(Ordering::Relaxed) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // The last pages hardly ever.
                let page = |shift: u64| (state >> shift) as usize % PAGES;
                let page = page(0).min(page(8)).min(page(16)).min(page(24));
                let seed = (state >> 32) as u8;
                let mut model = lock(&model);
                if state >> 60 == 0 && may_discard.load(Ordering::Relaxed) {
                    memory.discard(page, 1).expect("madvise");
                    model[page] = 0;
                } else if state >> 60 < 4 {
                    memory.write_page(page, &testing::page(seed));
                    model[page] = seed;
                } else {
                    let mut out = PageBuffer::zeroed();
                    memory.read_page(page, &mut out);
                    assert!(out.0 == testing::page(model[page]).0, "page {page} is wrong");
                }
                steps.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _ended = Ended(&stop);
        let evictor = &mut world;
        for round in 0..ROUNDS {
            // Every other one right after the one before it.
            let seen = steps.load(Ordering::Relaxed);
            while round % 2 == 0 && steps.load(Ordering::Relaxed) < seen + 200 {
                evictor.evict_once((0..PAGES).filter(|page| page % 3 == round % 3));
            }
            arm(evictor);
            let frozen = lock(&model);
            let then = *frozen;
            let mut taken = Taken::at_freeze(evictor);
            may_discard.store(round % 4 < 2, Ordering::Relaxed);
            if round % 4 == 1 {
                // What is discarded is mostly captured in time: as if it were not.
                for page in 0..PAGES {
                    lock(&evictor.space.gate)
                        .put_back_unprotected(&evictor.tenant, memory.address(page));
                    if evictor.space.capture_state().is_some_and(|(_, torn)| torn) {
                        break;
                    }
                }
            }
            drop(frozen);
            let hangs = Instant::now() + HANGS;
            let seen = steps.load(Ordering::Relaxed);
            while round % 4 < 2 && steps.load(Ordering::Relaxed) < seen + 60 {
                std::thread::yield_now();
            }
            while taken.go_on(evictor).0 > 0 {
                evictor.evict_once(0..PAGES / 2);
                assert!(Instant::now() < hangs, "pages stay pending");
            }
            may_discard.store(true, Ordering::Relaxed);
            let is_torn = evictor.space.capture_state().expect("it is captured").1;
            from_base += taken.end(evictor);
            if is_torn {
                // The next one is captured with what it has.
                torn += 1;
            } else {
                for (page, &seed) in then.iter().enumerate() {
                    taken.expect(evictor, page, seed);
                }
            }
            if let Some(before) = before.replace(taken) {
                before.remove(evictor);
            }
        }
    });
    assert!(from_base > 0, "no snapshot took anything from the one before");
    assert!((1..ROUNDS / 2 + 1).contains(&torn), "{torn} were torn");
    before.expect("many").remove(&world);
    world.end();
}

/// Its slot is another's by the time it is looked for.
#[test]
fn a_base_that_was_removed_is_not_another_snapshot() {
    let Some(world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..8, |page| 1 + page as u8);
    let mut taken = Taken::of(&world);
    taken.capture_all(&world);
    let slot = taken.id;
    taken.remove(&world);
    let mut strangers = (0..8).map(|page| world.memory.address(page));
    let stranger = world.tenant.import_memory(|buffer| {
        buffer.0.copy_from_slice(&testing::page(200).0);
        Ok(strangers.next())
    });
    assert_eq!(stranger.expect("room"), slot, "else this tests nothing");
    let mut again = Taken::of(&world);
    assert_eq!(again.capture_all(&world), 0, "it has no base");
    for page in 0..8 {
        again.expect(&world, page, 1 + page as u8);
    }
    again.remove(&world);
    world.tenant.remove_snapshot_memory(slot);
    world.end();
}

#[test]
fn a_snapshot_is_removed_when_nobody_reads_it_any_more() {
    let Some(world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..8, |page| 1 + page as u8);
    let mut taken = Taken::of(&world);
    taken.capture_all(&world);
    let reader = lock(&world.tenant.snapshots).get(&taken.id).cloned().expect("whole");
    let page = reader.page(world.memory.address(3)).expect("a page");
    let (tenant, id) = (Arc::clone(&world.tenant), taken.id);
    let remover = std::thread::spawn(move || tenant.remove_snapshot_memory(id));
    let hangs = Instant::now() + HANGS;
    while world.tenant.snapshot_memories().contains(&id) {
        assert!(Instant::now() < hangs, "it is never taken off the list");
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(matches!(world.tenant.map.get(page), Entry::Stored(_)), "its reader still reads");
    assert!(!remover.is_finished());
    drop(reader);
    remover.join().expect("removed");
    assert_eq!(world.tenant.map.get(page), Entry::Untouched);
    world.end();
}

/// Tells threads to end, also when their test fails.
pub(crate) struct Stops<'a>(pub(crate) &'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Two threads write all the time, each to its own pages, and look whether what they
/// wrote last is there; everything is evicted again and again, and captured at the
/// same time.
#[test]
fn writing_evicting_and_capturing_at_the_same_time() {
    const SNAPSHOTS: usize = 60;
    let Some(mut world) = World::of(testing::tenant()) else { return };
    fill(&world, 0..PAGES, |page| page as u8);
    let seeds: Vec<AtomicU64> = (0..PAGES as u64).map(|page| AtomicU64::new(page & 255)).collect();
    let (stop, stands) = (AtomicBool::new(false), RwLock::new(()));
    std::thread::scope(|scope| {
        let _stops = Stops(&stop);
        for writer in 0..2 {
            let (memory, seeds, stop, stands) = (world.memory, &seeds, &stop, &stands);
            scope.spawn(move || {
                let mut number = writer as u64 + 1;
                while !stop.load(Ordering::Relaxed) {
                    let runs = stands.read().expect("nobody panics");
                    // An ordinary generator of numbers is good enough here.
                    number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let page = (number >> 33) as usize % (PAGES / 2) * 2 + writer;
                    let seed = number >> 56;
                    serve_tests::expect(memory, page, seeds[page].load(Ordering::Relaxed) as u8);
                    memory.write_page(page, &testing::page(seed as u8));
                    seeds[page].store(seed, Ordering::Relaxed);
                    drop(runs);
                }
            });
        }
        let mut evicted = 0;
        for round in 0..SNAPSHOTS {
            arm(&world);
            let freeze = stands.write().expect("nobody panics");
            let frozen: Vec<u8> =
                seeds.iter().map(|seed| seed.load(Ordering::Relaxed) as u8).collect();
            let mut taken = Taken::at_freeze(&world);
            drop(freeze);
            let hangs = Instant::now() + HANGS;
            for step in round.. {
                assert!(Instant::now() < hangs, "{:?}", world.space.capture_state());
                evicted += world.evict_once((0..PAGES).skip(step * 7 % PAGES).take(16));
                let (left, torn) = match step % 5 {
                    0 => taken.go_on(&world),
                    _ => world.space.capture_state().expect("it is being captured"),
                };
                assert!(!torn, "nothing was discarded");
                if left == 0 {
                    break;
                }
            }
            taken.capture_all(&world);
            for (page, &seed) in frozen.iter().enumerate() {
                taken.expect(&world, page, seed);
            }
            taken.remove(&world);
        }
        assert!(evicted > SNAPSHOTS, "something is evicted");
    });
    for (page, seed) in seeds.iter().enumerate() {
        world.expect(page, seed.load(Ordering::Relaxed) as u8);
    }
    world.end();
}
