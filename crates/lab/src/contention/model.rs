//! A queueing model of one tenant whose threads fault at the same time, each on
//! a core of its own. Pure: costs in, a curve out.
//!
//! ```text
//! thread:   works, faults, waits for its page, is woken
//! handler:  is woken; takes the gate, reads up to 16 messages; brings each page
//! keeper:   moves, packs and settles 16 pages, the settling under the gate, as
//!           long as fewer pages are free than the headroom
//! ```
//! A page can come only into a free one; every page that comes makes the keeper
//! work for another. Times are constant but for the threads' own work, which is
//! drawn from an exponential distribution.

use crate::random::Random;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

/// Messages read at once, and pages settled under one hold of the gate.
const PART: usize = 16;
/// Free pages at which the keeper rests.
const HEADROOM: usize = 512;

/// What things take, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Costs {
    /// A thread's own work between two faults, on average.
    pub work: f64,
    /// Waking a thread that sleeps on another core.
    pub wake: f64,
    /// Reading messages: the call, under the gate.
    pub read: f64,
    /// Taking a lock that another core has just let go.
    pub lock: f64,
    /// Unpacking a stored page.
    pub unpack: f64,
    /// Putting a page in place.
    pub copy: f64,
    /// Moving a page out of its place.
    pub evict: f64,
    /// Packing a page.
    pub pack: f64,
    /// Settling a page, under the gate.
    pub settle: f64,
}

/// Who does the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Staff {
    pub handlers: usize,
    pub keepers: usize,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Outcome {
    pub faults_per_second: f64,
    /// From the fault until the thread runs again, on average.
    pub fault_us: f64,
    /// Shares of the time.
    pub gate_held: f64,
    pub handlers_busy: f64,
    pub keepers_busy: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    Fault(usize),
    /// A handler is at the gate.
    Asks(Worker),
    /// Has what it wanted of the gate.
    Leaves(Worker),
    /// A handler has brought its next page.
    Brought(usize),
    /// A keeper has moved and packed its part.
    Packed(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Worker {
    Handler(usize),
    Keeper(usize),
}

struct Model<'a> {
    costs: &'a Costs,
    now: u64,
    order: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    random: Random,
    /// Threads that wait, and since when; in the order of their faults.
    waiting: VecDeque<(usize, u64)>,
    /// What each handler has read.
    taken: Vec<VecDeque<(usize, u64)>>,
    asleep: Vec<usize>,
    /// Handlers that have a page and no room for it.
    stalled: Vec<usize>,
    resting: Vec<usize>,
    free: usize,
    /// Pages that keepers are at work on.
    leaving: usize,
    gate: Option<Worker>,
    at_gate: VecDeque<Worker>,
    held: f64,
    handling: f64,
    keeping: f64,
    faults: u64,
    waited: u64,
}

/// The curve's point for `threads` threads: `faults` faults are simulated.
pub(crate) fn simulate(costs: &Costs, threads: usize, staff: Staff, faults: u64) -> Outcome {
    let mut model = Model {
        costs,
        now: 0,
        order: 0,
        events: BinaryHeap::new(),
        random: Random::new(threads as u64),
        waiting: VecDeque::new(),
        taken: vec![VecDeque::new(); staff.handlers],
        asleep: (0..staff.handlers).collect(),
        stalled: Vec::new(),
        resting: (0..staff.keepers).collect(),
        free: HEADROOM,
        leaving: 0,
        gate: None,
        at_gate: VecDeque::new(),
        held: 0.0,
        handling: 0.0,
        keeping: 0.0,
        faults: 0,
        waited: 0,
    };
    for thread in 0..threads {
        model.work(thread);
    }
    while model.faults < faults {
        let Some(Reverse((now, _, event))) = model.events.pop() else { break };
        model.now = now;
        model.happen(event);
    }
    let time = model.now as f64;
    Outcome {
        faults_per_second: model.faults as f64 * 1e9 / time,
        fault_us: model.waited as f64 / model.faults as f64 / 1000.0,
        gate_held: model.held / time,
        handlers_busy: model.handling / time / staff.handlers as f64,
        keepers_busy: model.keeping / time / staff.keepers as f64,
    }
}

impl Model<'_> {
    fn after(&mut self, nanoseconds: f64, event: Event) {
        self.order += 1;
        let at = self.now + nanoseconds.max(0.0) as u64;
        self.events.push(Reverse((at, self.order, event)));
    }

    /// A thread goes on and faults some time later.
    fn work(&mut self, thread: usize) {
        let own = -self.costs.work * (1.0 - self.random.unit()).ln();
        self.after(own, Event::Fault(thread));
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Fault(thread) => {
                self.waiting.push_back((thread, self.now));
                if let Some(handler) = self.asleep.pop() {
                    self.after(self.costs.wake, Event::Asks(Worker::Handler(handler)));
                }
            }
            Event::Asks(worker) => {
                self.at_gate.push_back(worker);
                if self.gate.is_none() {
                    self.enter(0.0);
                }
            }
            Event::Leaves(worker) => {
                self.gate = None;
                if !self.at_gate.is_empty() {
                    self.enter(self.costs.lock);
                }
                match worker {
                    Worker::Handler(handler) => self.bring(handler),
                    Worker::Keeper(keeper) => {
                        self.free += PART;
                        self.leaving -= PART;
                        for handler in std::mem::take(&mut self.stalled) {
                            self.bring(handler);
                        }
                        self.keep(keeper);
                    }
                }
            }
            Event::Brought(handler) => {
                if let Some((thread, since)) = self.taken[handler].pop_front() {
                    self.faults += 1;
                    self.waited += self.now - since + self.costs.wake as u64;
                    let own = self.costs.wake - self.costs.work * (1.0 - self.random.unit()).ln();
                    self.after(own, Event::Fault(thread));
                }
                self.bring(handler);
            }
            Event::Packed(keeper) => self.after(0.0, Event::Asks(Worker::Keeper(keeper))),
        }
    }

    /// The next in line gets the gate.
    fn enter(&mut self, handover: f64) {
        let Some(worker) = self.at_gate.pop_front() else { return };
        self.gate = Some(worker);
        let hold = match worker {
            Worker::Handler(handler) => {
                let count = self.waiting.len().min(PART);
                self.taken[handler].extend(self.waiting.drain(..count));
                self.handling += self.costs.read;
                self.costs.read
            }
            Worker::Keeper(_) => self.costs.settle * PART as f64,
        };
        self.held += hold + handover;
        self.after(hold + handover, Event::Leaves(worker));
    }

    /// A handler brings its next page, reads on, or sleeps.
    fn bring(&mut self, handler: usize) {
        if self.taken[handler].is_empty() {
            if self.waiting.is_empty() {
                self.asleep.push(handler);
            } else {
                self.after(0.0, Event::Asks(Worker::Handler(handler)));
            }
            return;
        }
        if self.free == 0 {
            self.stalled.push(handler);
            return;
        }
        self.free -= 1;
        self.wake_keeper();
        let takes = self.costs.unpack + self.costs.copy;
        self.handling += takes;
        self.after(takes, Event::Brought(handler));
    }

    fn wake_keeper(&mut self) {
        if let Some(keeper) = self.resting.pop() {
            self.keep(keeper);
        }
    }

    /// A keeper packs another part, or rests.
    fn keep(&mut self, keeper: usize) {
        if self.free + self.leaving + PART > HEADROOM {
            self.resting.push(keeper);
            return;
        }
        self.leaving += PART;
        let takes = (self.costs.evict + self.costs.pack) * PART as f64;
        self.keeping += takes + self.costs.settle * PART as f64;
        self.after(takes, Event::Packed(keeper));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Costs = Costs {
        work: 5000.0,
        wake: 2000.0,
        read: 700.0,
        lock: 100.0,
        unpack: 2500.0,
        copy: 800.0,
        evict: 2000.0,
        pack: 6000.0,
        settle: 200.0,
    };
    const AS_BUILT: Staff = Staff { handlers: 1, keepers: 1 };

    #[test]
    fn a_thread_alone_waits_for_what_its_fault_takes() {
        let cheap = Costs { evict: 0.0, pack: 0.0, settle: 0.0, ..COSTS };
        let outcome = simulate(&cheap, 1, AS_BUILT, 50_000);
        // Woken, read, unpacked, put in place, woken.
        assert!((outcome.fault_us - 8.0).abs() < 0.05, "{outcome:?}");
        assert!((outcome.faults_per_second / (1e9 / 13_000.0) - 1.0).abs() < 0.03, "{outcome:?}");
    }

    #[test]
    fn nothing_is_faster_than_whoever_does_all_of_some_work() {
        for threads in [8, 64, 512] {
            let outcome = simulate(&COSTS, threads, AS_BUILT, 50_000);
            assert!(outcome.faults_per_second < 1e9 / 8200.0 * 1.02, "{threads}: {outcome:?}");
            assert!(outcome.keepers_busy < 1.01 && outcome.gate_held < 1.01, "{outcome:?}");
        }
        let staffed = simulate(&COSTS, 512, Staff { handlers: 4, keepers: 4 }, 50_000);
        let alone = simulate(&COSTS, 512, AS_BUILT, 50_000);
        assert!(staffed.faults_per_second > 2.5 * alone.faults_per_second, "{staffed:?} {alone:?}");
    }

    #[test]
    fn more_threads_never_get_less_done() {
        let speed = |threads| simulate(&COSTS, threads, AS_BUILT, 50_000).faults_per_second;
        let curve: Vec<f64> = [1, 2, 4, 8, 16, 32, 64].map(speed).to_vec();
        assert!(curve.windows(2).all(|pair| pair[1] > 0.98 * pair[0]), "{curve:?}");
    }
}
