//! What the replacement remembers: four bytes for each page, and for each
//! neighbourhood of [`GROUP_PAGES`] pages how long its pages were out of DRAM and
//! how many came back. Only storage and counting; what it means is
//! [`crate::neighbours`]' business.
//!
//! Page ids are sparse in blocks of a page-map leaf; a block without a page takes
//! no memory.

use strata_units::{PAGES_PER_LEAF, PageId};

/// Pages that lie beside each other and are judged together.
pub(crate) const GROUP_PAGES: usize = 64;
const GROUPS: usize = PAGES_PER_LEAF / GROUP_PAGES;
/// Returns that a neighbourhood's rate is averaged over. Fewer follow a change
/// sooner and are noisier.
const MEMORY_RETURNS: f32 = 8.0;
/// Returns that follow each other so many times faster than a visit may are a
/// walk through memory and tell nothing about a change.
const WALKER_PART: f32 = 8.0;
/// Samples after which a page's own estimate gets no better: the moving average
/// of [`crate::gap`] has a memory of seven.
pub(crate) const SAMPLES_MAX: u8 = 7;

/// Where a page is, as far as the replacement was told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum State {
    /// Unknown, or gone.
    #[default]
    Absent,
    /// Resident, among the youngest.
    Young,
    Resident,
    /// Resident, and waiting in the list of the next victims.
    Chosen,
    /// Evicted and not yet back.
    Out,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Record {
    /// Tick of the last arrival or departure.
    pub(crate) stamp: u16,
    /// [`crate::Level::index`] when the page came, 0 if there was no sample.
    pub(crate) level: u8,
    /// [`State`] in the low three bits, samples above.
    bits: u8,
}

impl Record {
    pub(crate) fn state(self) -> State {
        match self.bits & 7 {
            0 => State::Absent,
            1 => State::Young,
            2 => State::Resident,
            3 => State::Chosen,
            _ => State::Out,
        }
    }

    /// All of it in one number, for arithmetic on many: the stamp in the low half,
    /// then the level, then the state in three bits and the samples.
    pub(crate) fn word(self) -> u32 {
        u32::from(self.stamp) | u32::from(self.level) << 16 | u32::from(self.bits) << 24
    }

    pub(crate) fn set_state(&mut self, state: State) {
        self.bits = self.bits & !7 | state as u8;
    }

    /// Returns seen, at most [`SAMPLES_MAX`].
    pub(crate) fn samples(self) -> u8 {
        self.bits >> 3
    }

    pub(crate) fn set_samples(&mut self, samples: u8) {
        self.bits = self.bits & 7 | samples.min(SAMPLES_MAX) << 3;
    }
}

/// The last returns to a neighbourhood. Its rate is returns per page and fault of
/// absence: the maximum-likelihood estimate for memoryless uses of which only
/// those of absent pages are seen.
#[derive(Clone, Copy, Default)]
pub(crate) struct Group {
    returns: f32,
    /// Faults × absent pages until the last return.
    exposure: f32,
    /// The same since then.
    silent: f32,
    at: u32,
    /// When the last page came back.
    returned: u32,
    /// Tick when there was last something to see.
    seen: u16,
    pub(crate) out: u8,
}

impl Group {
    /// Returns remembered, [`MEMORY_RETURNS`] and those of bursts.
    pub(crate) fn returns(&self) -> f32 {
        self.returns
    }

    /// Faults × absent pages, up to the last return and since, seen at `now`.
    pub(crate) fn exposure(&self, now: u32) -> (f32, f32) {
        (self.exposure, self.silent + now.wrapping_sub(self.at) as f32 * f32::from(self.out))
    }

    /// Whether a page came back after `then`, seen at `now`.
    pub(crate) fn returned_since(&self, then: u32, now: u32) -> bool {
        now.wrapping_sub(self.returned) <= now.wrapping_sub(then)
    }

    /// Ticks without an absent page.
    pub(crate) fn blind_ticks(&self, tick: u16) -> u16 {
        if self.out > 0 { 0 } else { tick.wrapping_sub(self.seen) }
    }

    fn advance(&mut self, now: u32, tick: u16) {
        self.silent = self.exposure(now).1;
        self.at = now;
        if self.out > 0 || self.returns == 0.0 {
            self.seen = tick;
        }
    }
}

pub(crate) struct Block {
    pub(crate) records: [Record; PAGES_PER_LEAF],
    pub(crate) groups: [Group; GROUPS],
}

/// Records of all pages that were ever announced and are not known to be gone.
#[derive(Default)]
pub(crate) struct Table {
    blocks: Vec<Option<Box<Block>>>,
    live_blocks: usize,
}

impl Table {
    pub(crate) fn memory_bytes(&self) -> usize {
        self.live_blocks * size_of::<Block>()
            + self.blocks.capacity() * size_of::<Option<Box<Block>>>()
    }

    /// Neighbourhoods, those without memory included.
    pub(crate) fn groups(&self) -> usize {
        self.blocks.len() * GROUPS
    }

    pub(crate) fn record(&self, page: PageId) -> Option<&Record> {
        let block = self.blocks.get(page.0 as usize / PAGES_PER_LEAF)?.as_ref()?;
        Some(&block.records[page.0 as usize % PAGES_PER_LEAF])
    }

    /// The record of a page and its neighbourhood.
    pub(crate) fn entry(&mut self, page: PageId) -> (&mut Record, &mut Group) {
        let (index, offset) = (page.0 as usize / PAGES_PER_LEAF, page.0 as usize % PAGES_PER_LEAF);
        if index >= self.blocks.len() {
            self.blocks.resize_with(index + 1, || None);
        }
        let live_blocks = &mut self.live_blocks;
        let block = self.blocks[index].get_or_insert_with(|| {
            *live_blocks += 1;
            Box::new(Block {
                records: [Record::default(); PAGES_PER_LEAF],
                groups: [Group::default(); GROUPS],
            })
        });
        (&mut block.records[offset], &mut block.groups[offset / GROUP_PAGES])
    }

    /// The pages of a neighbourhood. `None` where nothing is known.
    pub(crate) fn group(&mut self, group: usize) -> Option<(&mut [Record; GROUP_PAGES], &Group)> {
        let block = self.blocks.get_mut(group / GROUPS)?.as_mut()?;
        let within = group % GROUPS;
        let records = block.records[within * GROUP_PAGES..].first_chunk_mut()?;
        Some((records, &block.groups[within]))
    }

    /// Gives back the block of `group` when it is the block's last and no page of
    /// the block is known.
    pub(crate) fn leave_group(&mut self, group: usize) {
        if group % GROUPS + 1 != GROUPS {
            return;
        }
        let Some(slot) = self.blocks.get_mut(group / GROUPS) else { return };
        let unused = |block: &Block| block.records.iter().all(|r| r.state() == State::Absent);
        if slot.as_deref().is_some_and(unused) {
            *slot = None;
            self.live_blocks -= 1;
        }
    }

    /// `page` left DRAM.
    pub(crate) fn depart(&mut self, page: PageId, now: u32, tick: u16) {
        let (record, group) = self.entry(page);
        if record.state() != State::Out {
            group.advance(now, tick);
            group.out += 1;
        }
        record.set_state(State::Out);
        record.stamp = tick;
    }

    /// `page` is in DRAM. If it came back to a neighbourhood with a past: how long
    /// nothing had come back there, as a share of the usual. Returns that follow
    /// each other within `burst_faults` belong together (somebody walks by): the
    /// past is not forgotten for them.
    pub(crate) fn arrive(
        &mut self,
        page: PageId,
        now: u32,
        tick: u16,
        burst_faults: f32,
    ) -> Option<f32> {
        let (record, group) = self.entry(page);
        let mut surprise = None;
        if record.state() == State::Out {
            let since = now.wrapping_sub(group.returned) as f32;
            group.advance(now, tick);
            group.returned = now;
            if group.returns >= 1.0 && since >= burst_faults / WALKER_PART {
                surprise = Some(group.silent * group.returns / group.exposure.max(1.0));
            }
            let keep = 1.0 - (since / burst_faults).min(1.0) / MEMORY_RETURNS;
            group.returns = group.returns * keep + 1.0;
            group.exposure = group.exposure * keep + group.silent;
            group.silent = 0.0;
            group.out -= 1;
            record.set_samples(record.samples() + 1);
        } else {
            record.set_samples(0);
        }
        record.set_state(State::Young);
        record.stamp = tick;
        surprise
    }

    /// A victim did not leave after all: as if it had never been asked to.
    pub(crate) fn stay(&mut self, page: PageId, now: u32, tick: u16) {
        let (record, group) = self.entry(page);
        if record.state() == State::Out {
            group.advance(now, tick);
            group.out -= 1;
        }
        record.set_state(State::Young);
        record.stamp = tick;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absences_add_up_and_returns_are_forgotten_slowly() {
        let mut table = Table::default();
        let pages = [PageId(64), PageId(65)];
        let mut now = u32::MAX - 4_000;
        for page in pages {
            assert_eq!(table.arrive(page, now, 0, 1.0), None);
            table.depart(page, now, 0);
        }
        // Two pages out, one of them back every 500 faults: a gap of 1000.
        for round in 0..200u32 {
            now = now.wrapping_add(500);
            let page = pages[(round % 2) as usize];
            table.arrive(page, now, 1, 1.0);
            table.depart(page, now, 1);
        }
        let (_, group) = table.group(1).expect("it is known");
        let (exposure, silent) = group.exposure(now);
        assert!((exposure / group.returns() - 1_000.0).abs() < 60.0 && silent == 0.0);
        assert!(group.returns() > 7.9 && group.returns() < 8.1);
        assert_eq!(group.out, 2);
        assert!(group.returned_since(now, now.wrapping_add(9)));
        assert!(!group.returned_since(now.wrapping_add(1), now.wrapping_add(9)));
        assert!((group.exposure(now.wrapping_add(100)).1 - 200.0).abs() < 1e-3);
        // A return after a tenth of the usual silence.
        let surprise = table.arrive(pages[0], now.wrapping_add(50), 1, 1.0).expect("it is known");
        assert!((surprise - 0.1).abs() < 0.02, "{surprise}");
    }

    #[test]
    fn a_refused_page_was_never_out() {
        let mut table = Table::default();
        table.arrive(PageId(3), 0, 0, 1.0);
        table.depart(PageId(3), 10, 1);
        table.stay(PageId(3), 20, 1);
        let (records, group) = table.group(0).expect("it is known");
        assert_eq!((group.out, group.returns(), records[3].samples()), (0, 0.0, 0));
    }

    #[test]
    fn blocks_without_pages_cost_nothing() {
        let mut table = Table::default();
        let first = PageId(1_000 * PAGES_PER_LEAF as u32);
        table.arrive(first, 0, 0, 1.0);
        let used = table.memory_bytes();
        assert!(used < 12 * 1024, "{used}");
        assert!(size_of::<Block>() <= PAGES_PER_LEAF * 9 / 2, "{}", size_of::<Block>());
        table.entry(first).0.set_state(State::Absent);
        (0..table.groups()).for_each(|group| table.leave_group(group));
        assert!(table.memory_bytes() + size_of::<Block>() == used && table.record(first).is_none());
    }
}
