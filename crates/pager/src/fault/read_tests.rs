//! Faults on the file tier with the real kernel, and what happens to a page while
//! it is being read: the world of [`crate::fault::serve_tests`], and a device that holds
//! its reads until it is told to go on.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::Instant;

use strata_store::Source;
use strata_units::{PAGE_SIZE, PageBuffer};

use crate::fault::serve_tests::{HANGS, PAGES, World};
use crate::map::counters::Counter;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::testing::{self, Message};

impl World {
    /// Writes, evicts and demotes `pages`, each with its number + 1 as its seed.
    fn sink(&mut self, pages: &[usize]) {
        for &page in pages {
            self.write(page, page as u8 + 1);
            self.wait_for(page, RESIDENT);
        }
        self.sink_again(pages);
    }

    fn sink_again(&mut self, pages: &[usize]) {
        self.evict_all(pages);
        let store = &self.tenant.store;
        store.settle(PAGES);
        while store.demote(PAGES) > 0 {}
        for &page in pages {
            let handle = self.entry(page).handle().expect("stored");
            assert_eq!(store.locate(handle), Source::File);
        }
    }

    /// A thread that reads a page, and what it sees.
    fn touch(&self, page: usize) -> JoinHandle<Box<PageBuffer>> {
        let memory = self.memory;
        std::thread::spawn(move || {
            let mut out = PageBuffer::zeroed();
            memory.read_page(page, &mut out);
            out
        })
    }

    fn wait_until_arriving(&self, page: usize) {
        let hangs = Instant::now() + HANGS;
        while !matches!(self.entry(page), Entry::Arriving(_)) {
            assert!(Instant::now() < hangs, "page {page} stays {:?}", self.entry(page));
            std::thread::yield_now();
        }
    }

    /// A page is in place, or lost, a moment before it is counted.
    fn wait_for_count(&self, counter: Counter, wanted: u64) {
        let hangs = Instant::now() + HANGS;
        while self.tenant.counters.get(counter) != wanted {
            assert!(Instant::now() < hangs, "{counter:?}: {}", self.tenant.counters.get(counter));
            std::thread::yield_now();
        }
    }

    fn wait_until_in_place(&self, page: usize) {
        let hangs = Instant::now() + HANGS;
        while !self.entry(page).is_resident() {
            assert!(Instant::now() < hangs, "page {page} stays {:?}", self.entry(page));
            std::thread::yield_now();
        }
    }
}

const RESIDENT: Entry = Entry::Resident { shared: false };

fn saw(thread: JoinHandle<Box<PageBuffer>>, seed: u8) {
    let seen = thread.join().expect("a reader");
    assert!(seen.0 == testing::page(seed).0, "not page {seed}, begins with {:?}", &seen.0[..4]);
}

#[test]
fn pages_come_back_from_a_real_file() {
    let Some(mut world) = World::of(testing::tenant_with_file("real")) else { return };
    let pages: Vec<usize> = (0..PAGES).collect();
    for _ in 0..2 {
        world.sink(&pages);
        // Scattered first, then in order.
        for page in (0..PAGES).step_by(7).chain(0..PAGES) {
            world.expect(page, page as u8 + 1);
        }
    }
    world.wait_for_count(Counter::FromFile, 2 * PAGES as u64);
    assert!(world.tenant.counters.get(Counter::FileFaults) >= 28);
    world.end();
}

#[test]
fn a_reader_in_order_finds_pages_of_the_file_in_place() {
    let Some(mut world) = World::of(testing::tenant_with_file("order")) else { return };
    let pages: Vec<usize> = (0..PAGES).collect();
    world.sink(&pages);
    for &page in &pages {
        world.expect(page, page as u8 + 1);
    }
    world.wait_for_count(Counter::FromFile, PAGES as u64);
    assert!(world.tenant.counters.get(Counter::PagesAhead) > PAGES as u64 / 2);
    world.end();
}

#[test]
fn whoever_needs_no_file_does_not_wait_for_those_who_do() {
    let (tenant, faults) = testing::tenant_with_faulty_file();
    let Some(mut world) = World::of(tenant) else { return };
    world.sink(&[3, 40]);
    for page in 10..20 {
        world.write(page, 100 + page as u8);
        world.wait_for(page, RESIDENT);
    }
    world.evict_all(&(10..20).collect::<Vec<_>>());
    faults.hold_reads.store(true, Relaxed);
    let waiting = [world.touch(3), world.touch(40), world.touch(40)];
    world.wait_until_arriving(3);
    world.wait_until_arriving(40);
    for page in 10..20 {
        world.expect(page, 100 + page as u8);
    }
    // First touches and events, too.
    world.expect(60, 0);
    world.memory.discard(60, 1).expect("madvise");
    assert!(matches!(world.entry(3), Entry::Arriving(_)), "the device still holds it");
    faults.hold_reads.store(false, Relaxed);
    for (thread, seed) in waiting.into_iter().zip([4, 41, 41]) {
        saw(thread, seed);
    }
    world.end();
}

#[test]
fn a_page_that_is_discarded_while_it_is_read_stays_discarded() {
    let (tenant, faults) = testing::tenant_with_faulty_file();
    let Some(mut world) = World::of(tenant) else { return };
    world.sink(&[3, 4, 5]);
    faults.hold_reads.store(true, Relaxed);
    let reader = world.touch(4);
    world.wait_until_arriving(4);
    world.memory.discard(4, 1).expect("madvise");
    world.wait_for(4, Entry::Discarded);
    faults.hold_reads.store(false, Relaxed);
    saw(reader, 0);
    world.expect(3, 4);
    world.end();
}

#[test]
fn a_page_that_becomes_another_one_while_it_is_read_is_the_other_one() {
    let (tenant, faults) = testing::tenant_with_faulty_file();
    let Some(mut world) = World::of(tenant) else { return };
    world.sink(&[7]);
    faults.hold_reads.store(true, Relaxed);
    world.ask_for(7);
    world.wait_until_arriving(7);
    world.memory.discard(7, 1).expect("madvise");
    world.wait_for(7, Entry::Discarded);
    world.write(7, 200);
    world.wait_until_in_place(7);
    world.sink_again(&[7]);
    let reader = world.touch(7);
    world.wait_until_arriving(7);
    faults.hold_reads.store(false, Relaxed);
    saw(reader, 200);
    world.end();
}

#[test]
fn a_page_that_is_moved_away_while_it_is_read_is_found_where_it_went() {
    let (tenant, faults) = testing::tenant_with_faulty_file();
    let Some(mut world) = World::of(tenant) else { return };
    world.sink(&[7, 8]);
    faults.hold_reads.store(true, Relaxed);
    let reader = world.touch(7);
    world.wait_until_arriving(7);
    let (from, to) = (world.memory.address(7), world.memory.address(50));
    let mut gate = lock(&world.space.gate);
    let moved = Message::Remap { from, to, len: PAGE_SIZE as u64 };
    testing::fill_ring(&world.tenant, &world.space, &[moved]);
    world.space.act_on_ring(&world.tenant, &mut gate, 1, &mut Vec::new());
    gate.add_registered(world.memory.range());
    drop(gate);
    assert!(matches!(world.entry(50), Entry::Arriving(_)));
    faults.hold_reads.store(false, Relaxed);
    // Who waited is woken, and finds what has taken its place: nothing.
    saw(reader, 0);
    world.expect(50, 8);
    world.expect(8, 9);
    world.end();
}

#[test]
fn a_device_that_fails_for_a_while_loses_nothing() {
    let (tenant, faults) = testing::tenant_with_faulty_file();
    let Some(mut world) = World::of(tenant) else { return };
    let pages: Vec<usize> = (20..60).collect();
    world.sink(&pages);
    faults.hold_reads.store(true, Relaxed);
    for &page in &pages {
        world.ask_for(page);
    }
    for &page in &pages {
        world.wait_until_arriving(page);
    }
    faults.read_error.store(1, Relaxed);
    faults.hold_reads.store(false, Relaxed);
    let hangs = Instant::now() + HANGS;
    while world.tenant.store.stats().tier_errors == 0 {
        assert!(Instant::now() < hangs, "nothing is read");
        std::thread::yield_now();
    }
    faults.read_error.store(0, Relaxed);
    let lost =
        |world: &World| pages.iter().filter(|&&page| world.entry(page) == Entry::Lost).count();
    for &page in &pages {
        let hangs = Instant::now() + HANGS;
        while !world.entry(page).is_resident() && world.entry(page) != Entry::Lost {
            assert!(Instant::now() < hangs, "page {page} stays {:?}", world.entry(page));
            std::thread::yield_now();
        }
    }
    // The first that was asked for was read alone, the others together.
    assert!(lost(&world) <= 1, "{} pages lost", lost(&world));
    for page in pages.iter().copied().filter(|&page| world.entry(page) != Entry::Lost) {
        world.expect(page, page as u8 + 1);
    }
    world.end();
}

#[test]
fn a_page_that_can_never_be_read_is_lost_and_its_neighbours_are_not() {
    let (tenant, faults) = testing::tenant_with_faulty_file();
    let Some(mut world) = World::of(tenant) else { return };
    world.sink(&[1, 2]);
    faults.flipped_bit.store(1, Relaxed);
    world.ask_for(1);
    world.wait_for(1, Entry::Lost);
    faults.flipped_bit.store(0, Relaxed);
    world.wait_for_count(Counter::LostPages, 1);
    world.expect(2, 3);
    world.end();
}

#[test]
fn a_space_that_ends_while_it_reads_leaves_nothing_behind() {
    let (tenant, faults) = testing::tenant_with_faulty_file();
    let Some(mut world) = World::of(Arc::clone(&tenant)) else { return };
    let pages: Vec<usize> = (0..40).collect();
    world.sink(&pages);
    faults.hold_reads.store(true, Relaxed);
    for &page in &pages {
        world.ask_for(page);
    }
    world.wait_until_arriving(39);
    world.end();
    faults.hold_reads.store(false, Relaxed);
}
