//! A page-level model of a tenant: what the pager does with the replacement,
//! without memory, threads or time. For the simulator and for tests; production
//! code does not use it.

use std::collections::VecDeque;
use std::time::Duration;

use strata_units::PageId;

use crate::clock::Clock;
use crate::gap::{self, Level};
use crate::replacement::{Candidate, Census, Pages, Replacement};

/// What a touch stands for: a server that looks up records uses three pages for each,
/// and takes 2.3 us of a processor.
const WORK_OF_A_TOUCH: Duration = Duration::from_nanos(770);
/// Arrivals between two looks of the owner.
const ARRIVALS_OF_A_LOOK: u64 = 512;

/// Where a touched page was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    /// In the address space: nobody notices.
    Hit,
    /// Nowhere: a first touch.
    First,
    /// Out of the address space, kept raw.
    Soft,
    /// Stored.
    Hard,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Resident,
    Staged,
    Stored,
}

/// Sizes of the model, in pages.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Page ids are below this.
    pub managed_pages: usize,
    /// Room for resident and staged pages together.
    pub capacity_pages: usize,
    /// Most pages kept staged.
    pub staged_pages: usize,
    /// Pages evicted at a time.
    pub batch_pages: usize,
}

/// One tenant under the production replacement.
pub struct Tenant {
    shape: Shape,
    map: Map,
    replacement: Replacement,
    staged: VecDeque<PageId>,
    staged_live: usize,
    resident: usize,
    /// Pages that are somewhere.
    managed: usize,
    now: u32,
    clock: Clock,
    /// Since the clock was told last.
    work: Duration,
    arrivals: u64,
    /// Of an arrival.
    units: u32,
    swept: usize,
    victims: Vec<PageId>,
}

struct Map {
    cells: Vec<u16>,
    places: Vec<Place>,
}

impl Pages for Map {
    fn candidate(&self, page: PageId) -> Candidate {
        match self.places[page.0 as usize] {
            Place::Resident => Candidate::Evictable(gap::level(self.cells[page.0 as usize])),
            _ => Candidate::Gone,
        }
    }
}

impl Tenant {
    /// Nothing touched yet.
    #[must_use]
    pub fn new(shape: Shape) -> Self {
        assert!(shape.capacity_pages > shape.staged_pages + shape.batch_pages + 64);
        let map = Map {
            cells: vec![gap::NEW; shape.managed_pages],
            places: vec![Place::Nowhere; shape.managed_pages],
        };
        Self {
            shape,
            map,
            replacement: Replacement::new(),
            staged: VecDeque::new(),
            staged_live: 0,
            resident: 0,
            managed: 0,
            now: 0,
            clock: Clock::default(),
            work: Duration::ZERO,
            arrivals: 0,
            units: 1,
            swept: 0,
            victims: Vec::new(),
        }
    }

    /// The program touches `page`.
    pub fn touch(&mut self, page: u32) -> Touch {
        let index = page as usize;
        self.work += WORK_OF_A_TOUCH;
        let touch = match self.map.places[index] {
            Place::Resident => return Touch::Hit,
            Place::Nowhere => Touch::First,
            Place::Staged => Touch::Soft,
            Place::Stored => Touch::Hard,
        };
        self.managed += usize::from(touch == Touch::First);
        if touch == Touch::Soft {
            self.staged_live -= 1;
        } else if self.resident + self.staged_live >= self.shape.capacity_pages {
            self.make_room();
        }
        self.arrivals += 1;
        if self.arrivals == ARRIVALS_OF_A_LOOK {
            self.units = self.clock.advance(self.work, self.arrivals, self.resident) as u32;
            (self.work, self.arrivals) = (Duration::ZERO, 0);
        }
        self.now = self.now.wrapping_add(self.units);
        let (cell, _) = gap::arrived(self.map.cells[index], self.now);
        self.map.cells[index] = cell;
        self.map.places[index] = Place::Resident;
        self.resident += 1;
        self.replacement.arrived(PageId(page), self.now);
        self.sweep_one();
        touch
    }

    /// The program gives `page` back.
    pub fn discard(&mut self, page: u32) {
        let place = &mut self.map.places[page as usize];
        match place {
            Place::Resident => self.resident -= 1,
            Place::Staged => self.staged_live -= 1,
            Place::Nowhere | Place::Stored => {}
        }
        self.managed -= usize::from(*place != Place::Nowhere);
        *place = Place::Nowhere;
        self.map.cells[page as usize] = gap::NEW;
    }

    /// From now on there is room for so many pages; what has no room leaves.
    pub fn resize(&mut self, capacity_pages: usize) {
        let least = self.shape.staged_pages + self.shape.batch_pages + 65;
        self.shape.capacity_pages = capacity_pages.max(least);
        while self.resident + self.staged_live > self.shape.capacity_pages {
            self.make_room();
            if self.victims.is_empty() {
                return;
            }
        }
    }

    /// Forgets the queues and makes them anew from the page map, as a new worker
    /// does.
    pub fn restart_worker(&mut self) {
        let map = &self.map;
        let resident =
            (0..map.places.len() as u32).filter_map(|page| match map.candidate(PageId(page)) {
                Candidate::Evictable(level) => Some((PageId(page), level)),
                _ => None,
            });
        self.replacement.rebuild(resident, self.now);
    }

    /// Pages in the address space and staged.
    #[must_use]
    pub fn in_dram(&self) -> (usize, usize) {
        (self.resident, self.staged_live)
    }

    /// The replacement, to look at.
    #[must_use]
    pub fn replacement(&self) -> &Replacement {
        &self.replacement
    }

    /// The estimate of a page.
    #[must_use]
    pub fn level(&self, page: u32) -> Level {
        gap::level(self.map.cells[page as usize])
    }

    /// Evicts all that may leave, straight into the store. Returns how many pages
    /// that were.
    pub fn squeeze(&mut self) -> usize {
        let before = self.resident;
        loop {
            self.evict(usize::MAX / 2);
            self.store_staged(0, 0);
            if self.victims.is_empty() {
                return before - self.resident;
            }
        }
    }

    fn make_room(&mut self) {
        let Shape { capacity_pages, staged_pages, batch_pages, .. } = self.shape;
        // So many that the staged ones keep their share of the room.
        let resident_pages = capacity_pages - staged_pages - batch_pages;
        self.evict(self.resident.saturating_sub(resident_pages).max(batch_pages));
        self.store_staged(staged_pages, capacity_pages - batch_pages.min(self.victims.len()));
    }

    fn evict(&mut self, want: usize) {
        let census = Census { managed: self.managed, resident: self.resident };
        self.victims.clear();
        self.replacement.victims(self.now, want, census, &self.map, &mut self.victims);
        for &page in &self.victims {
            let index = page.0 as usize;
            let cell = self.map.cells[index];
            self.map.cells[index] = gap::left(cell, self.now, census.newcomer());
            self.map.places[index] = Place::Staged;
            self.staged.push_back(page);
        }
        self.resident -= self.victims.len();
        self.staged_live += self.victims.len();
    }

    /// Stores the oldest staged pages until at most `staged` are left and all that
    /// is in DRAM fits `room`, or none is left.
    fn store_staged(&mut self, staged: usize, room: usize) {
        while self.staged_live > staged
            || (self.staged_live > 0 && self.resident + self.staged_live > room)
        {
            let page = self.staged.pop_front().expect("what is staged is in the queue");
            let place = &mut self.map.places[page.0 as usize];
            if *place == Place::Staged {
                *place = Place::Stored;
                self.staged_live -= 1;
            }
        }
    }

    /// One page of the walk that raises the estimates of absent pages.
    fn sweep_one(&mut self) {
        self.swept = (self.swept + 1) % self.shape.managed_pages;
        if self.map.places[self.swept] != Place::Resident {
            let cell = &mut self.map.cells[self.swept];
            *cell = gap::swept(*cell, self.now);
        }
    }
}
