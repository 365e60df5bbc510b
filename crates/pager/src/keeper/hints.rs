//! What programs say of their memory, heeded: hints ([`strata_units::Hints`]), and
//! settings that make pages leave early ([`crate::map::settings`]).
//!
//! It is bounded whatever a program says: hints wait in its own ring, one is under
//! way for each space, and a round looks at so many pages of each and no more.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_store::Source;
use strata_sys::Range;
use strata_units::wire::BATCH_PAGES;
use strata_units::{ADDRESSES_END, Handle, HintKind, PAGE, PAGE_SIZE, PageId, SpaceId};

use crate::fault::handler::MOST_HOT;
use crate::keeper::{Keeper, REGISTER_EVERY};
use crate::map::address::{PIECE_BYTES, ids_in, piece_at};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::page_set::PageSet;
use crate::map::settings::Setting;
use crate::regions::place::most_pinned_bytes;
use crate::regions::registration::register_within;
use crate::tenant::space::Space;

/// Hints of one space that are begun in a round...
const HINTS_PER_ROUND: usize = 64;
/// ...and the pieces of its memory that are looked at for them, and for settings.
const PIECES_PER_ROUND: usize = 8;
/// A hint is given up when its space's agent could not act on it for so many
/// rounds.
const MOST_TRIES: u32 = 50;
/// Pages of a range that leave early are there at two looks at least so far apart.
const EARLY_EVERY: Duration = Duration::from_millis(500);
/// Ranges that leave first; with more, the oldest are treated as all memory.
const MOST_GIVEN_UP: usize = 256;

/// See the module's text.
#[derive(Default)]
pub(super) struct Hinted {
    spaces: BTreeMap<u32, Heeded>,
    /// What leaves first when something has to; the flag: it is packed densely.
    given_up: VecDeque<(SpaceId, Range, bool)>,
}

/// Of one space.
#[derive(Default)]
struct Heeded {
    /// The hint under way, and what is left of its range.
    current: Option<(HintKind, Range)>,
    tries: u32,
    /// When its memory map was last read for a hint.
    mapped: Option<Instant>,
    early: Early,
}

/// A walk over the ranges whose pages leave early.
#[derive(Default)]
struct Early {
    /// What is left of the walk.
    left: VecDeque<(Range, Setting)>,
    began: Option<Instant>,
    /// Pages that were there at the walk before, and at this one.
    before: PageSet,
    now: PageSet,
}

/// The first piece of `range`, cut off.
fn cut(range: &mut Range) -> Range {
    let end = ((range.start / PIECE_BYTES + 1) * PIECE_BYTES).min(range.end);
    let piece = Range { start: range.start, end };
    range.start = end;
    piece
}

impl Keeper<'_> {
    /// Bytes of pins that are heeded; says so where they cannot be.
    pub(super) fn heeded_pins(&mut self) -> u64 {
        let tenant = self.tenant;
        let (pinned, most) = (tenant.pinned_bytes(), most_pinned_bytes(tenant.budget_bytes()));
        let suspended = pinned > most;
        if tenant.placement.suspended.swap(suspended, Ordering::Relaxed) != suspended {
            if suspended {
                // The policy had forgotten them.
                self.rebuild();
            }
            tenant.note(
                "pins",
                suspended.then(|| {
                    "its programs have pinned more than three quarters of its budget: nothing is pinned until it is raised".into()
                }),
            );
        }
        if suspended { 0 } else { pinned }
    }

    /// Does some of what the programs have said. True: there is more, soon.
    pub(super) fn heed(&mut self, spaces: &[Arc<Space>]) -> bool {
        let living = |id: &u32| spaces.iter().any(|space| space.id.0 == *id);
        self.hinted.spaces.retain(|id, _| living(id));
        let mut more = false;
        for space in spaces {
            let mut heeded = self.hinted.spaces.remove(&space.id.0).unwrap_or_default();
            more |= self.heed_hints(space, &mut heeded, spaces);
            more |= self.walk_early(space, &mut heeded.early, spaces);
            for range in std::mem::take(&mut *lock(&space.read)) {
                self.give_up(space.id, range, false);
            }
            self.hinted.spaces.insert(space.id.0, heeded);
        }
        more
    }

    fn heed_hints(
        &mut self,
        space: &Arc<Space>,
        heeded: &mut Heeded,
        spaces: &[Arc<Space>],
    ) -> bool {
        let Some(agent) = space.agent() else { return false };
        let mut pieces = 0;
        for _ in 0..HINTS_PER_ROUND {
            if heeded.current.is_none() {
                let Some((start, end_kind)) = agent.control.control().hints.take() else {
                    return false;
                };
                let end = end_kind & !(PAGE - 1);
                let range = Range { start: start & !(PAGE - 1), end: end.min(ADDRESSES_END) };
                heeded.current = HintKind::of(end_kind & (PAGE - 1))
                    .filter(|_| range.start < range.end)
                    .map(|kind| (kind, range));
                heeded.tries = 0;
            }
            let Some((kind, mut rest)) = heeded.current.take() else { continue };
            if kind != HintKind::Hot && !self.is_managed_for(space, heeded, rest) {
                heeded.current = Some((kind, rest));
                return true;
            }
            if kind == HintKind::FreeSoon {
                self.forget_copies(space, rest);
                self.give_up(space.id, rest, true);
                continue;
            }
            while pieces < PIECES_PER_ROUND {
                let Some(piece) = next_piece(space, &mut rest) else { break };
                pieces += 1;
                let done = match kind {
                    HintKind::Hot => self.warm(space, piece),
                    _ => self.evict_range(space, piece, spaces, |_| true),
                };
                if !done {
                    heeded.tries += 1;
                    if heeded.tries < MOST_TRIES {
                        rest.start = piece.start;
                    }
                    pieces = PIECES_PER_ROUND;
                    break;
                }
                heeded.tries = 0;
            }
            if !rest.is_empty() {
                heeded.current = Some((kind, rest));
            }
            if pieces >= PIECES_PER_ROUND {
                return true;
            }
        }
        true
    }

    /// Whether pages of `range` can be evicted, as far as they can be at all. Its
    /// memory map is not read for every hint.
    fn is_managed_for(&self, space: &Arc<Space>, heeded: &mut Heeded, range: Range) -> bool {
        if self.tenant.under_pressure.load(Ordering::Relaxed)
            || lock(&space.gate).is_registered(range)
        {
            return true;
        }
        if heeded.mapped.is_some_and(|mapped| mapped.elapsed() < REGISTER_EVERY) {
            return false;
        }
        heeded.mapped = Some(Instant::now());
        if !register_within(space, self.tenant, range) {
            space.set_gone();
        }
        true
    }

    /// Has the stored pages of `piece` brought, and those that are there counted as
    /// just used. False: later, others come first.
    fn warm(&mut self, space: &Arc<Space>, piece: Range) -> bool {
        let tenant = self.tenant;
        let mut stored = false;
        let mut resident = Vec::new();
        let mut on_node = Vec::new();
        {
            let gate = lock(&space.gate);
            for (_, leaf, part) in gate.object.pages_in(piece) {
                for (_, page) in ids_in(leaf, part) {
                    match tenant.map.get(page) {
                        Entry::Stored(_) => stored = true,
                        Entry::OnNode => on_node.push(page),
                        entry if entry.is_resident() => resident.push(page),
                        _ => {}
                    }
                }
            }
        }
        if stored {
            let mut hot = lock(&space.hot);
            if hot.len() >= MOST_HOT {
                return false;
            }
            hot.push(piece);
            drop(hot);
            space.kick.ring();
        }
        if self.node.as_mut().is_some_and(|node| !node.ask(&on_node)) {
            return false;
        }
        resident.retain(|&page| !tenant.is_pinned(page));
        self.give_back(&resident);
        true
    }

    /// Evicts what is resident in `range`, at most a piece, and `wanted`. False: its
    /// agent cannot just now.
    fn evict_range(
        &mut self,
        space: &Arc<Space>,
        range: Range,
        spaces: &[Arc<Space>],
        wanted: impl Fn(PageId) -> bool,
    ) -> bool {
        let pages = self.resident_in(space, range, wanted);
        pages.chunks(BATCH_PAGES).all(|batch| self.evict_batch(space, batch, spaces).is_some())
    }

    fn resident_in(
        &self,
        space: &Space,
        range: Range,
        wanted: impl Fn(PageId) -> bool,
    ) -> Vec<PageId> {
        let gate = lock(&space.gate);
        let mut pages = Vec::new();
        for (_, leaf, part) in gate.object.pages_in(range) {
            let own = ids_in(leaf, part).map(|(_, page)| page);
            pages.extend(
                own.filter(|&page| self.tenant.map.get(page).is_resident() && wanted(page)),
            );
        }
        pages
    }

    fn give_up(&mut self, space: SpaceId, range: Range, densely: bool) {
        let given_up = &mut self.hinted.given_up;
        if given_up.len() >= MOST_GIVEN_UP {
            given_up.pop_front();
        }
        if !range.is_empty() {
            given_up.push_back((space, range, densely));
        }
    }

    /// Pages that are to be freed come back no more: their stored copies are good
    /// for nothing. A piece of them at most: the others go as copies do.
    fn forget_copies(&mut self, space: &Arc<Space>, mut range: Range) {
        let Some(piece) = next_piece(space, &mut range) else { return };
        for page in self.resident_in(space, piece, |_| true) {
            self.tenant.drop_kept(page);
        }
    }

    /// Evicts up to about `want` pages of what leaves first; how many left.
    pub(super) fn evict_given_up(&mut self, want: usize, spaces: &[Arc<Space>]) -> usize {
        let mut evicted = 0;
        for _ in 0..PIECES_PER_ROUND {
            let Some((id, mut range, densely)) = self.hinted.given_up.pop_front() else { break };
            let Some(space) = spaces.iter().find(|space| space.id == id) else { continue };
            let Some(piece) = next_piece(space, &mut range) else { continue };
            let pages = self.resident_in(space, piece, |_| true);
            self.evictor.densely = densely;
            let batches = pages.chunks(BATCH_PAGES);
            let left: usize =
                batches.filter_map(|batch| self.evict_batch(space, batch, spaces)).sum();
            self.evictor.densely = false;
            evicted += left;
            if !range.is_empty() {
                self.hinted.given_up.push_front((id, range, densely));
            }
            if evicted >= want {
                break;
            }
        }
        evicted
    }

    /// Goes on over the ranges whose pages leave early. True: there is more, soon.
    fn walk_early(&mut self, space: &Arc<Space>, early: &mut Early, spaces: &[Arc<Space>]) -> bool {
        if early.left.is_empty() {
            if early.began.is_some_and(|began| began.elapsed() < EARLY_EVERY) {
                return false;
            }
            let gate = lock(&space.gate);
            let ranges = gate.settings.ranges();
            early.left = ranges.iter().filter(|(_, set)| set.leaves_early()).copied().collect();
            if early.left.is_empty() {
                *early = Early::default();
                return false;
            }
            early.began = Some(Instant::now());
            early.before = std::mem::take(&mut early.now);
        }
        let tenant = self.tenant;
        for _ in 0..PIECES_PER_ROUND {
            let Some((range, setting)) = early.left.front_mut() else { break };
            let setting = *setting;
            let Some(piece) = next_piece(space, range) else {
                early.left.pop_front();
                continue;
            };
            let before = early.before.of(piece_at(piece.start));
            let was_there = |page: PageId| before.has(page.index());
            // What cannot leave now is met again at the next walk.
            if setting == Setting::Node {
                let in_dram = |page| was_there(page) && tenant.map.get(page).is_own_dram();
                let pages = self.resident_in(space, piece, in_dram);
                self.send_to_node(space, &pages);
            } else {
                self.evictor.densely = true;
                self.evict_range(space, piece, spaces, was_there);
                self.evictor.densely = false;
            }
            self.note_resident(space, piece, &mut early.now);
            if setting == Setting::File {
                self.send_to_file(space, piece);
            }
        }
        true
    }

    fn note_resident(&self, space: &Space, piece: Range, seen: &mut PageSet) {
        let bits = seen.of_mut(piece_at(piece.start));
        for page in self.resident_in(space, piece, |_| true) {
            bits.put(page.index()..page.index() + 1, true);
        }
    }

    /// Moves what is stored of `piece` to the file tier.
    fn send_to_file(&self, space: &Space, piece: Range) {
        let tenant = self.tenant;
        let mut handles: Vec<Handle> = Vec::new();
        {
            let gate = lock(&space.gate);
            for (_, leaf, part) in gate.object.pages_in(piece) {
                for (_, page) in ids_in(leaf, part) {
                    if let Entry::Stored(handle) = tenant.map.get(page)
                        && tenant.store.locate(handle) == Source::Compressed
                    {
                        // It may come back meanwhile.
                        tenant.store.retain(handle);
                        handles.push(handle);
                    }
                }
            }
        }
        if !handles.is_empty() {
            tenant.store.demote_these(&handles);
        }
        for handle in handles {
            tenant.store.release(handle);
        }
    }
}

/// The first piece of `range` of which something is managed, cut off with all before
/// it; a range may be as large as the address space.
fn next_piece(space: &Space, range: &mut Range) -> Option<Range> {
    if range.is_empty() {
        return None;
    }
    let gate = lock(&space.gate);
    let first = (range.start / PIECE_BYTES) as u32;
    let next = gate.object.leaves_from(first).next().map(|(piece, _)| piece);
    let start = next.map_or(range.end, |piece| u64::from(piece) * PIECE_BYTES);
    range.start = range.start.max(start.min(range.end));
    (!range.is_empty()).then(|| cut(range))
}

const _: () = assert!(PAGE_SIZE as u64 == PAGE);
