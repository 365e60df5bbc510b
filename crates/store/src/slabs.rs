//! Slots for objects in the data memory file: slabs of one size class each.
//!
//! Only bookkeeping: it says which bytes are whose and never touches them. It
//! lives in ordinary memory under the allocation lock; recovery builds it anew
//! from the object table.

use crate::location::{CLASS_COUNT, SizeClass, UNIT_BYTES};
use strata_units::PAGE;

/// Bytes of a slab: 64 whole pages, or 4096 of the smallest slots.
pub(crate) const SLAB_BYTES: u64 = 256 << 10;
const SLAB_UNITS: u64 = SLAB_BYTES / UNIT_BYTES;
/// Empty slabs kept with their memory, so that a store that breathes at a
/// slab's boundary does not pay for giving it back and asking again: 1 MiB.
const WARM_SLABS: usize = 4;
/// Pages that packing a slab's objects to its front must give back to be worth
/// the copying.
const SQUEEZE_PAGES: u8 = 4;
/// Slabs that an allocation without growth looks at before it gives up.
const FULL_SEARCH: usize = 8;
const NIL: u32 = u32::MAX;

/// Used slots, a bit each. Up to 64 slots need no memory of their own.
enum Bits {
    Small(u64),
    Large(Box<[u64]>),
}

impl Bits {
    fn words(&self) -> &[u64] {
        match self {
            Self::Small(word) => std::slice::from_ref(word),
            Self::Large(words) => words,
        }
    }

    fn words_mut(&mut self) -> &mut [u64] {
        match self {
            Self::Small(word) => std::slice::from_mut(word),
            Self::Large(words) => words,
        }
    }

    fn heap_bytes(&self) -> u64 {
        match self {
            Self::Small(_) => 0,
            Self::Large(words) => size_of_val::<[u64]>(words) as u64,
        }
    }
}

struct Slab {
    bits: Bits,
    next: u32,
    previous: u32,
    used: u16,
    /// Pages from the slab's start that have been written since it was last
    /// given back: what it costs.
    touched: u8,
    /// None: empty.
    class: Option<SizeClass>,
    /// Being emptied: no slot is handed out.
    victim: bool,
    /// In its class's list of slabs with room.
    listed: bool,
}

#[derive(Clone, Copy)]
struct Class {
    /// List of slabs with room.
    head: u32,
    slabs: u32,
    used: u64,
}

/// The allocator.
pub(crate) struct Slabs {
    slabs: Vec<Slab>,
    classes: [Class; CLASS_COUNT],
    /// Empty, without memory.
    cold: Vec<u32>,
    /// Empty, with memory.
    warm: Vec<u32>,
    touched_bytes: u64,
    bits_bytes: u64,
    max_slabs: u32,
}

/// Why no slot is to be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NoSlot;

impl Slabs {
    pub(crate) fn new(span_bytes: u64) -> Self {
        Self {
            slabs: Vec::new(),
            classes: [Class { head: NIL, slabs: 0, used: 0 }; CLASS_COUNT],
            cold: Vec::new(),
            warm: Vec::new(),
            touched_bytes: 0,
            bits_bytes: 0,
            max_slabs: u32::try_from(span_bytes / SLAB_BYTES).unwrap_or(NIL - 1),
        }
    }

    /// What the data costs, slack included.
    pub(crate) fn touched_bytes(&self) -> u64 {
        self.touched_bytes
    }

    /// What this bookkeeping costs.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.bits_bytes
            + (self.slabs.capacity() * size_of::<Slab>()) as u64
            + ((self.cold.capacity() + self.warm.capacity()) * size_of::<u32>()) as u64
    }

    fn slots(class: SizeClass) -> u64 {
        SLAB_BYTES / class.slot_bytes()
    }

    /// Takes a slot; its first unit. Without `growth`, only where memory is
    /// already there.
    pub(crate) fn allocate(&mut self, class: SizeClass, growth: bool) -> Result<u64, NoSlot> {
        let mut slab = self.classes[class.0 as usize].head;
        for _ in 0..FULL_SEARCH {
            if slab == NIL {
                break;
            }
            let slot = self.first_free(slab, class).expect("a listed slab has room");
            if growth || self.end_page(class, slot) <= self.slabs[slab as usize].touched {
                return Ok(self.take(slab, class, slot));
            }
            slab = self.slabs[slab as usize].next;
        }
        let first_slot_pages = self.end_page(class, 0);
        let warm_enough = |slab: &Slab| growth || slab.touched >= first_slot_pages;
        let slab = match self.warm.iter().rposition(|&slab| warm_enough(&self.slabs[slab as usize]))
        {
            Some(position) => self.warm.swap_remove(position),
            None if !growth => return Err(NoSlot),
            None => match self.cold.pop() {
                Some(slab) => slab,
                None => self.append()?,
            },
        };
        self.assign(slab, class);
        self.enlist(slab, class);
        Ok(self.take(slab, class, 0))
    }

    fn append(&mut self) -> Result<u32, NoSlot> {
        let slab = self.slabs.len() as u32;
        if slab >= self.max_slabs {
            return Err(NoSlot);
        }
        self.slabs.push(Slab {
            bits: Bits::Small(0),
            next: NIL,
            previous: NIL,
            used: 0,
            touched: 0,
            class: None,
            victim: false,
            listed: false,
        });
        Ok(slab)
    }

    fn assign(&mut self, slab: u32, class: SizeClass) {
        let words = Self::slots(class).div_ceil(64) as usize;
        let bits = if words == 1 {
            Bits::Small(0)
        } else {
            Bits::Large(vec![0; words].into_boxed_slice())
        };
        self.bits_bytes += bits.heap_bytes();
        let entry = &mut self.slabs[slab as usize];
        debug_assert!(entry.class.is_none() && entry.used == 0);
        entry.bits = bits;
        entry.class = Some(class);
        self.classes[class.0 as usize].slabs += 1;
    }

    fn first_free(&self, slab: u32, class: SizeClass) -> Option<u64> {
        let words = self.slabs[slab as usize].bits.words();
        let word = words.iter().position(|&word| word != u64::MAX)?;
        let slot = word as u64 * 64 + u64::from(words[word].trailing_ones());
        (slot < Self::slots(class)).then_some(slot)
    }

    /// Pages of its slab up to the end of the slot.
    fn end_page(&self, class: SizeClass, slot: u64) -> u8 {
        ((slot + 1) * class.slot_bytes()).div_ceil(PAGE) as u8
    }

    fn take(&mut self, slab: u32, class: SizeClass, slot: u64) -> u64 {
        let end_page = self.end_page(class, slot);
        let entry = &mut self.slabs[slab as usize];
        let word = &mut entry.bits.words_mut()[slot as usize / 64];
        debug_assert_eq!(*word >> (slot % 64) & 1, 0);
        *word |= 1 << (slot % 64);
        entry.used += 1;
        if entry.touched < end_page {
            self.touched_bytes += u64::from(end_page - entry.touched) * PAGE;
            entry.touched = end_page;
        }
        self.classes[class.0 as usize].used += 1;
        if u64::from(self.slabs[slab as usize].used) == Self::slots(class) {
            self.delist(slab, class);
        }
        u64::from(slab) * SLAB_UNITS + slot * class.slot_units()
    }

    /// Gives a slot back. When that leaves a slab whose memory should go: its
    /// index; the caller punches it and then says [`Slabs::punched`].
    #[must_use]
    pub(crate) fn release(&mut self, unit: u64, class: SizeClass) -> Option<u32> {
        let (slab, slot) = Self::place(unit, class);
        let entry = &mut self.slabs[slab as usize];
        assert_eq!(entry.class, Some(class), "slab {slab} is of another class");
        let word = &mut entry.bits.words_mut()[slot as usize / 64];
        assert!(*word >> (slot % 64) & 1 == 1, "slot {slot} of slab {slab} was free already");
        *word &= !(1 << (slot % 64));
        entry.used -= 1;
        self.classes[class.0 as usize].used -= 1;
        if self.slabs[slab as usize].used > 0 {
            if !self.slabs[slab as usize].listed && !self.slabs[slab as usize].victim {
                self.enlist(slab, class);
            }
            return None;
        }
        self.delist(slab, class);
        self.classes[class.0 as usize].slabs -= 1;
        let entry = &mut self.slabs[slab as usize];
        self.bits_bytes -= entry.bits.heap_bytes();
        entry.bits = Bits::Small(0);
        entry.class = None;
        entry.victim = false;
        if self.warm.len() < WARM_SLABS {
            self.warm.push(slab);
            return None;
        }
        Some(slab)
    }

    fn place(unit: u64, class: SizeClass) -> (u32, u64) {
        ((unit / SLAB_UNITS) as u32, unit % SLAB_UNITS / class.slot_units())
    }

    /// The slab's memory has been given back, or (`done` false) could not be.
    pub(crate) fn punched(&mut self, slab: u32, done: bool) {
        if done {
            let entry = &mut self.slabs[slab as usize];
            self.touched_bytes -= u64::from(entry.touched) * PAGE;
            entry.touched = 0;
            self.cold.push(slab);
        } else {
            self.warm.push(slab);
        }
    }

    /// An empty slab that still has memory, for the caller to punch.
    pub(crate) fn pop_warm(&mut self) -> Option<u32> {
        self.warm.pop()
    }

    fn enlist(&mut self, slab: u32, class: SizeClass) {
        let head = self.classes[class.0 as usize].head;
        let entry = &mut self.slabs[slab as usize];
        (entry.next, entry.previous, entry.listed) = (head, NIL, true);
        if head != NIL {
            self.slabs[head as usize].previous = slab;
        }
        self.classes[class.0 as usize].head = slab;
    }

    fn delist(&mut self, slab: u32, class: SizeClass) {
        let entry = &mut self.slabs[slab as usize];
        if !entry.listed {
            return;
        }
        let (next, previous) = (entry.next, entry.previous);
        entry.listed = false;
        if next != NIL {
            self.slabs[next as usize].previous = previous;
        }
        if previous == NIL {
            self.classes[class.0 as usize].head = next;
        } else {
            self.slabs[previous as usize].next = next;
        }
    }

    /// Picks slabs whose objects fit into the holes of the others of their
    /// class, emptiest first, where more than an eighth of the class is holes;
    /// no slot of theirs is handed out from now on. Calls `chosen` for each.
    pub(crate) fn choose_victims(&mut self, mut chosen: impl FnMut(u32)) {
        let mut wanted = [false; CLASS_COUNT];
        for (index, class) in self.classes.iter().enumerate() {
            let per_slab = Self::slots(SizeClass(index as u8));
            let slots = u64::from(class.slabs) * per_slab;
            wanted[index] = slots - class.used >= per_slab.max(slots / 8) && class.slabs > 1;
        }
        let mut sparse: Vec<(u8, u16, u32)> = Vec::new();
        for (index, slab) in self.slabs.iter().enumerate() {
            if let Some(class) = slab.class
                && wanted[class.0 as usize]
                && !slab.victim
            {
                sparse.push((class.0, slab.used, index as u32));
            }
        }
        sparse.sort_unstable();
        for group in sparse.chunk_by(|a, b| a.0 == b.0) {
            let class = SizeClass(group[0].0);
            let per_slab = Self::slots(class);
            let state = self.classes[class.0 as usize];
            let slots = u64::from(state.slabs) * per_slab;
            let (mut holes, mut moving) = (slots - state.used, 0);
            for &(_, used, slab) in group {
                let holes_after = holes - (per_slab - u64::from(used));
                let moving_after = moving + u64::from(used);
                // Leave a sixteenth: packing the rest costs more than it gives.
                if moving_after + slots / 16 > holes_after && moving > 0
                    || moving_after > holes_after
                {
                    break;
                }
                (holes, moving) = (holes_after, moving_after);
                self.delist(slab, class);
                self.slabs[slab as usize].victim = true;
                chosen(slab);
            }
        }
    }

    /// Picks, for each class, the emptiest slab that stays, if packing its
    /// objects to its front would give pages back. Calls `chosen` with the slab
    /// and the units that they need then; the bytes to be gained.
    pub(crate) fn choose_squeezed(&self, mut chosen: impl FnMut(u32, u64)) -> u64 {
        let mut emptiest = [None; CLASS_COUNT];
        for (index, slab) in self.slabs.iter().enumerate() {
            let Some(class) = slab.class.filter(|_| !slab.victim) else { continue };
            let best = &mut emptiest[class.0 as usize];
            if best.is_none_or(|(used, _)| slab.used < used) {
                *best = Some((slab.used, index as u32));
            }
        }
        let mut gain_pages = 0;
        for (index, best) in emptiest.into_iter().enumerate() {
            let Some((used, slab)) = best.filter(|&(used, _)| used > 0) else { continue };
            let class = SizeClass(index as u8);
            let touched = self.slabs[slab as usize].touched;
            let gain = touched - self.end_page(class, u64::from(used) - 1);
            if gain >= SQUEEZE_PAGES {
                gain_pages += u64::from(gain);
                chosen(slab, u64::from(used) * class.slot_units());
            }
        }
        gain_pages * PAGE
    }

    /// The byte range behind a slab's last object that still costs memory, for
    /// the caller to punch before it lets go of the lock.
    pub(crate) fn tail(&self, slab: u32) -> Option<(u64, u64)> {
        let end = u64::from(self.used_pages(slab)) * PAGE;
        let touched = u64::from(self.slabs[slab as usize].touched) * PAGE;
        (end < touched).then(|| (u64::from(slab) * SLAB_BYTES + end, touched - end))
    }

    /// The tail has been punched.
    pub(crate) fn trimmed(&mut self, slab: u32) {
        let pages = self.used_pages(slab);
        let entry = &mut self.slabs[slab as usize];
        self.touched_bytes -= u64::from(entry.touched - pages) * PAGE;
        entry.touched = pages;
    }

    /// Pages up to the end of a slab's last object.
    fn used_pages(&self, slab: u32) -> u8 {
        let entry = &self.slabs[slab as usize];
        let words = entry.bits.words();
        match (entry.class, words.iter().rposition(|&word| word != 0)) {
            (Some(class), Some(word)) => {
                let slot = word as u64 * 64 + u64::from(words[word].ilog2());
                self.end_page(class, slot)
            }
            _ => 0,
        }
    }

    /// Lets a slab that could not be emptied hand out slots again.
    pub(crate) fn pardon(&mut self, slab: u32) {
        let entry = &mut self.slabs[slab as usize];
        if !entry.victim {
            return;
        }
        entry.victim = false;
        if let Some(class) = entry.class
            && u64::from(entry.used) < Self::slots(class)
        {
            self.enlist(slab, class);
        }
    }

    /// Recovery: a slot that the object table says is used. False when it is
    /// no slot, is taken, or lies in a slab of another class.
    pub(crate) fn claim(&mut self, unit: u64, class: SizeClass) -> bool {
        let (slab, slot) = Self::place(unit, class);
        if !(unit % SLAB_UNITS).is_multiple_of(class.slot_units())
            || slot >= Self::slots(class)
            || slab >= self.max_slabs
        {
            return false;
        }
        while self.slabs.len() <= slab as usize {
            if self.append().is_err() {
                return false;
            }
        }
        match self.slabs[slab as usize].class {
            None => self.assign(slab, class),
            Some(other) if other != class => return false,
            Some(_) => {}
        }
        let words = self.slabs[slab as usize].bits.words();
        if words[slot as usize / 64] >> (slot % 64) & 1 == 1 {
            return false;
        }
        self.take(slab, class, slot);
        true
    }

    /// Recovery, after the last claim: lists are built, and `unused` is told
    /// every byte range that belongs to nobody, up to the end of the last slab.
    pub(crate) fn finish_claims(&mut self, mut unused: impl FnMut(u64, u64)) {
        // Neighbouring ranges are told as one: each costs a system call.
        let mut gap = 0..0;
        for slab in 0..self.slabs.len() as u32 {
            let entry = &self.slabs[slab as usize];
            let start = u64::from(slab) * SLAB_BYTES;
            let touched = u64::from(entry.touched) * PAGE;
            let (class, used) = (entry.class, u64::from(entry.used));
            if touched > 0 && !gap.is_empty() {
                unused(gap.start, gap.end - gap.start);
                gap = 0..0;
            }
            if touched < SLAB_BYTES {
                let begin = if gap.is_empty() { start + touched } else { gap.start };
                gap = begin..start + SLAB_BYTES;
            }
            match class {
                None => self.cold.push(slab),
                Some(class) if used < Self::slots(class) => self.enlist(slab, class),
                Some(_) => {}
            }
        }
        if !gap.is_empty() {
            unused(gap.start, gap.end - gap.start);
        }
    }

    /// First byte behind the last slab.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.slabs.len() as u64 * SLAB_BYTES
    }
}

/// The slab that a unit lies in.
pub(crate) fn slab_of(unit: u64) -> u32 {
    (unit / SLAB_UNITS) as u32
}

/// Units between its slab's start and `unit`.
pub(crate) fn units_into_slab(unit: u64) -> u64 {
    unit % SLAB_UNITS
}

#[cfg(test)]
#[path = "slabs_tests.rs"]
mod tests;
