//! Keeps the memory of processes that are being killed, until there is time to
//! take it down.
//!
//! The kernel frees a process's memory before its number: about 0.1 s a GiB, for
//! which whoever needs the number waits. But an address space lives as long as it
//! is in use, and a thread of ours that reads a page which nobody brings uses it.
//! Let go, that thread takes the memory down, beside whatever is done by then.
//!
//! ```text
//! nobody ─ begin ─▶ wanted ─ comes ─▶ wanted by it ─ its fault ─▶ address
//!    ▲                 │                   │                        │
//!    └──────────────── Drop ◀──────────────┴────────────────────────┘
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use strata_sys::{Fill, Range, thread_id, yield_to_others};
use strata_units::PAGE_SIZE;

use crate::fault::handler::{self, one_page};
use crate::tenant::Tenant;
use crate::tenant::space::{Agent, Space};

/// Longest wait for the reader's fault.
const PATIENCE: Duration = Duration::from_millis(20);
const LOOK_EVERY: Duration = Duration::from_micros(100);

const NOBODY: u64 = 0;

/// Where the reader waits, or who it is; behind no lock, see the module's text.
#[derive(Debug, Default)]
pub(crate) struct Held(AtomicU64);

impl Held {
    /// Not the address of a page. Thread 0: it has not come yet.
    fn wanted_by(thread: u32) -> u64 {
        u64::from(thread) << 1 | 1
    }

    /// Whether the fault of `thread` at `address`, in the transfer range, is to stay
    /// unanswered. Others read there, too: the evictor.
    pub(crate) fn takes(&self, thread: u32, address: u64) -> bool {
        let is_it = |now: u64| match thread {
            // As CRIU makes userfaultfds: nobody says whose fault it is.
            0 => now & 1 == 1 && now != Self::wanted_by(0),
            _ => now == Self::wanted_by(thread),
        };
        let change = |now| (is_it(now) || now == address).then_some(address);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }

    /// The reader has come. False: nobody wants it any more.
    fn comes(&self, thread: u32) -> bool {
        let (begun, wanted) = (Self::wanted_by(0), Self::wanted_by(thread));
        self.0.compare_exchange(begun, wanted, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn is_wanted(&self) -> bool {
        self.0.load(Ordering::Acquire) != NOBODY
    }

    fn is_made(&self) -> bool {
        self.is_wanted() && self.0.load(Ordering::Acquire) & 1 == 0
    }

    /// Where the reader waits, who is not wanted any more.
    fn end(&self) -> Option<u64> {
        Some(self.0.swap(NOBODY, Ordering::AcqRel)).filter(|&was| was != NOBODY && was & 1 == 0)
    }
}

/// Memory that outlives its process. Dropped, it is let go.
#[derive(Debug)]
pub struct Hold(Arc<Space>);

impl Drop for Hold {
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
    /// Keeps the memory of all its processes, which are about to be killed: their
    /// numbers are free at once then. Of a process without an agent, or whose
    /// memory cannot be kept, nothing is: it ends as always.
    #[must_use]
    pub fn hold_memory(self: &Arc<Self>) -> Vec<Hold> {
        let mut begun: Vec<(Hold, JoinHandle<()>)> =
            self.space_list().into_iter().filter_map(|space| self.begin_hold(space)).collect();
        let deadline = Instant::now() + PATIENCE;
        let waits = |(hold, reader): &(Hold, JoinHandle<()>)| {
            !hold.0.held.is_made() && !reader.is_finished()
        };
        while begun.iter().any(waits) && Instant::now() < deadline {
            std::thread::sleep(LOOK_EVERY);
        }
        begun.retain(|(hold, _)| hold.0.held.is_made());
        begun.into_iter().map(|(hold, _)| hold).collect()
    }

    fn begin_hold(self: &Arc<Self>, space: Arc<Space>) -> Option<(Hold, JoinHandle<()>)> {
        let agent = space.agent()?;
        // Far from its budget nothing of it may be registered, nor has it a handler.
        space.uffd.register(agent.ranges.transfer);
        handler::start(&space, self);
        space.held.0.store(Held::wanted_by(0), Ordering::Release);
        let hold = Hold(Arc::clone(&space));
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
    fn only_the_reader_is_left_waiting() {
        let held = Held::default();
        assert!(!held.takes(7, 4096) && !held.takes(0, 4096) && !held.comes(7));
        held.0.store(Held::wanted_by(0), Ordering::Release);
        assert!(!held.takes(7, 4096) && !held.takes(0, 4096), "nobody has come");
        assert!(held.comes(7) && !held.comes(8));
        assert!(!held.takes(8, 4096) && !held.is_made());
        assert!(held.takes(7, 8192) && held.is_made());
        assert!(held.takes(7, 8192), "it looked again");
        assert!(!held.takes(7, 4096) && !held.takes(0, 4096) && !held.takes(8, 4096));
        assert_eq!((held.end(), held.end()), (Some(8192), None));
        assert!(!held.takes(7, 8192) && !held.is_wanted());
        // Of a userfaultfd that does not say whose fault it is.
        held.0.store(Held::wanted_by(0), Ordering::Release);
        assert!(held.comes(9) && held.takes(0, 4096) && !held.takes(0, 8192));
        assert_eq!(held.end(), Some(4096));
        // Not wanted any more before it has come, or before it has read.
        held.0.store(Held::wanted_by(0), Ordering::Release);
        assert!(held.end().is_none() && !held.comes(9));
        held.0.store(Held::wanted_by(9), Ordering::Release);
        assert!(held.end().is_none() && !held.takes(9, 4096));
    }

    #[test]
    fn a_reader_that_comes_too_late_does_not_wait_for_ever() {
        let Some(world) = World::of(testing::tenant()) else { return };
        let hangs = Instant::now() + Duration::from_secs(60);
        let mut held = world.tenant.hold_memory();
        while held.is_empty() {
            assert!(Instant::now() < hangs, "the memory is never held");
            held = world.tenant.hold_memory();
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
                let held = world.tenant.hold_memory();
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
