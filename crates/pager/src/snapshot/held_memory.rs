//! Keeps the memory of processes that are being killed, until there is time to
//! take it down.
//!
//! The kernel frees a process's memory before its number: about 0.1 s a GiB, for
//! which whoever needs the number waits. But an address space lives as long as it
//! is in use, and a thread of ours that reads a page which nobody brings uses it.
//! Let go, that thread takes the memory down, beside whatever is done by then.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use strata_sys::{Fill, Range, thread_id, yield_to_others};
use strata_units::PAGE_SIZE;

use crate::fault::handler::{self};
use crate::map::address::one_page;
use crate::tenant::Tenant;
use crate::tenant::memory_hold::MemoryHold;
use crate::tenant::space::{Agent, Space};

/// Longest wait for the reader's fault.
const PATIENCE: Duration = Duration::from_millis(20);
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Memory that outlives its process. Dropped, it is let go.
#[derive(Debug)]
pub struct HeldMemory(Arc<Space>);

impl Drop for HeldMemory {
    fn drop(&mut self) {
        let Some(address) = self.0.held.end() else { return };
        // As any other reader of the transfer range is told; a process that was not
        // killed moves pages there again.
        self.0.transfer_clean.store(false, Ordering::Release);
        match self.0.uffd.poison(address) {
            Fill::Done { .. } | Fill::Gone => {}
            Fill::Present => self.0.uffd.wake(one_page(address)),
            _ => {
                self.0.uffd.unregister(one_page(address));
            }
        }
    }
}

impl Tenant {
    /// Keeps the memory of those of its processes which are about to be killed: their
    /// numbers are free at once then. Of a process without an agent, or whose
    /// memory cannot be kept, nothing is: it ends as always.
    #[must_use]
    pub fn hold_memory(self: &Arc<Self>, are_killed: &[u32]) -> Vec<HeldMemory> {
        let is_killed =
            |space: &Arc<Space>| space.pid().is_some_and(|pid| are_killed.contains(&pid));
        let spaces = self.space_list().into_iter().filter(is_killed);
        let mut begun: Vec<(HeldMemory, JoinHandle<()>)> =
            spaces.filter_map(|space| self.begin_hold(space)).collect();
        let deadline = Instant::now() + PATIENCE;
        let waits = |(hold, reader): &(HeldMemory, JoinHandle<()>)| {
            !hold.0.held.is_made() && !reader.is_finished()
        };
        while begun.iter().any(waits) && Instant::now() < deadline {
            std::thread::sleep(LOOK_EVERY);
        }
        begun.retain(|(hold, _)| hold.0.held.is_made());
        begun.into_iter().map(|(hold, _)| hold).collect()
    }

    fn begin_hold(self: &Arc<Self>, space: Arc<Space>) -> Option<(HeldMemory, JoinHandle<()>)> {
        let agent = space.agent()?;
        // Far from its budget nothing of it may be registered, nor has it a handler.
        space.uffd.register(agent.ranges.transfer);
        handler::start(&space, self);
        space.held.0.store(MemoryHold::wanted_by(0), Ordering::Release);
        let hold = HeldMemory(Arc::clone(&space));
        self.memory_held.fetch_add(1, Ordering::Relaxed);
        let tenant = Arc::clone(self);
        let reader =
            Builder::new().name("take-down".into()).stack_size(64 << 10).spawn(move || {
                yield_to_others();
                if space.held.comes(thread_id()) {
                    read_until_let_go(&space, &agent);
                }
                tenant.memory_held.fetch_sub(1, Ordering::Relaxed);
            });
        if reader.is_err() {
            self.memory_held.fetch_sub(1, Ordering::Relaxed);
        }
        Some((hold, reader.ok()?))
    }
}

/// Reads from the transfer range, whose pages are missing but for those of a batch
/// that is under way. The last call returns when the memory is taken down.
fn read_until_let_go(space: &Space, agent: &Agent) {
    let Range { start, end } = agent.ranges.transfer;
    // Slots are filled from the first one on.
    let slots = (end - start) / PAGE_SIZE as u64;
    for address in (0..slots).rev().map(|slot| start + slot * PAGE_SIZE as u64) {
        if !space.held.is_wanted() || agent.process.has_exited() {
            break;
        }
        agent.process.wait_for_page(address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::serve_tests::World;
    use crate::testing;

    #[test]
    fn a_reader_that_comes_too_late_does_not_wait_for_ever() {
        let Some(world) = World::of(testing::tenant()) else { return };
        let hangs = Instant::now() + Duration::from_secs(60);
        let mut held = world.tenant.hold_memory(&world.tenant.pids());
        while held.is_empty() {
            assert!(Instant::now() < hangs, "the memory is never held");
            held = world.tenant.hold_memory(&world.tenant.pids());
        }
        let tenant = Arc::clone(&world.tenant);
        world.end();
        while tenant.memory_held.load(Ordering::Relaxed) > 0 {
            assert!(Instant::now() < hangs, "the reader reads for ever");
            std::thread::sleep(LOOK_EVERY);
        }
        drop(held);
    }

    #[test]
    fn a_process_that_was_not_killed_after_all_runs_on() {
        let Some(mut world) = World::of(testing::tenant()) else { return };
        let pages: Vec<usize> = (0..64).collect();
        for round in 0..4 {
            for &page in &pages {
                world.write(page, round + page as u8);
            }
            let hangs = Instant::now() + Duration::from_secs(60);
            let readers = || world.tenant.memory_held.load(Ordering::Relaxed);
            loop {
                let held = world.tenant.hold_memory(&world.tenant.pids());
                // On a busy machine a reader may come later than it is waited for.
                let made = !held.is_empty();
                assert!(!made || readers() == 1);
                drop(held);
                while readers() > 0 {
                    assert!(Instant::now() < hangs, "the reader reads for ever");
                    std::thread::sleep(LOOK_EVERY);
                }
                if made {
                    break;
                }
                assert!(Instant::now() < hangs, "the memory is never held");
            }
            world.evict_all(&pages);
            for &page in &pages {
                world.expect(page, round + page as u8);
            }
        }
        world.end();
    }
}
