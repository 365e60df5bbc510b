//! Pages that go while somebody looks which pages are in place.

use strata_sys::Range;

use crate::map::address::overlaps;
use crate::map::page_set::PageSet;

/// What went away while somebody looked which pages are in place: the look is without the gate, so
/// what it saw there may be gone by the time it is entered.
///
/// Reading the page table again would not do: the kernel says that memory is discarded before it
/// takes the pages.
#[derive(Debug, Default)]
pub(crate) struct GoneMeanwhile {
    looks: u32,
    ranges: Vec<Range>,
}

impl GoneMeanwhile {
    pub(crate) fn look(&mut self) {
        self.looks += 1;
    }

    pub(crate) fn looked(&mut self) {
        self.looks -= 1;
        if self.looks == 0 {
            self.ranges = Vec::new();
        }
    }

    /// The pages of `range` go.
    pub(crate) fn note(&mut self, range: Range) {
        if self.looks > 0 {
            self.ranges.push(range);
        }
    }

    /// Those pages of `part` that went.
    pub(crate) fn of(&self, part: Range) -> PageSet {
        let mut pages = PageSet::default();
        for gone in self.ranges.iter().filter(|&&gone| overlaps(gone, part)) {
            pages.insert(Range { start: gone.start.max(part.start), end: gone.end.min(part.end) });
        }
        pages
    }
}
