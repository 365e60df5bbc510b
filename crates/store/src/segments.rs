//! The tier file as a log: segments filled in order, emptied by deaths or by
//! cleaning, then used again.
//!
//! Only bookkeeping, in ordinary memory under the allocation lock; recovery
//! builds it anew from the object table.

use std::collections::VecDeque;

use crate::location::UNIT_BYTES;

/// Bytes of a segment: large enough that writing one is sequential for any
/// device.
pub(crate) const SEGMENT_BYTES: u64 = 256 << 10;
/// Granularity of writes.
pub(crate) const CLUSTER_BYTES: u64 = 4096;
const SEGMENT_CLUSTERS: u64 = SEGMENT_BYTES / CLUSTER_BYTES;
const SEGMENT_UNITS: u32 = (SEGMENT_BYTES / UNIT_BYTES) as u32;
/// Segments that demotion leaves for cleaning, which needs somewhere to write.
const CLEANING_RESERVE: usize = 2;
/// Empty segments that keep their blocks, at most, and at most this part of the
/// file: giving blocks back and taking new ones makes every reader of the file wait.
const MOST_EMPTIED: usize = 128;
const EMPTIED_PART: usize = 16;
/// Where no device is in the way, segments of which less than this part lives are
/// emptied, each time that so many were begun, and this part of all.
const SPARSE_PART: u32 = 4;
const BEGUN: usize = 64;
const BEGUN_PART: usize = 8;
/// Smallest useful tier file.
pub(crate) const MIN_FILE_BYTES: u64 = 8 * SEGMENT_BYTES;

#[derive(Clone, Copy, Default)]
struct Segment {
    /// Units of objects that live here.
    live_units: u32,
    /// Clusters written since the segment was last given back.
    written: u8,
    victim: bool,
}

/// The log.
pub(crate) struct Segments {
    segments: Vec<Segment>,
    free: VecDeque<u32>,
    /// Those that are free and keep their blocks, with how many clusters of them.
    emptied: VecDeque<(u32, u8)>,
    emptied_clusters: u64,
    /// The segment being filled.
    current: Option<u32>,
    max_segments: usize,
    written_clusters: u64,
    /// Segments begun since victims were last chosen.
    begun: usize,
}

impl Segments {
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        Self {
            segments: Vec::new(),
            free: VecDeque::new(),
            emptied: VecDeque::new(),
            emptied_clusters: 0,
            current: None,
            max_segments: (capacity_bytes / SEGMENT_BYTES) as usize,
            written_clusters: 0,
            begun: 0,
        }
    }

    /// What the tier file costs.
    pub(crate) fn written_bytes(&self) -> u64 {
        (self.written_clusters + self.emptied_clusters) * CLUSTER_BYTES
    }

    /// What this bookkeeping costs.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        (self.segments.capacity() * size_of::<Segment>()
            + self.free.capacity() * size_of::<u32>()
            + self.emptied.capacity() * size_of::<(u32, u8)>()) as u64
    }

    fn available(&self) -> usize {
        self.free.len() + self.emptied.len() + (self.max_segments - self.segments.len())
    }

    /// Bytes that one write may have now; 0 when the file is full. Cleaning may
    /// use the reserve.
    pub(crate) fn room_bytes(&self, cleaning: bool) -> u64 {
        if let Some(current) = self.current {
            let written = u64::from(self.segments[current as usize].written);
            if written < SEGMENT_CLUSTERS {
                return (SEGMENT_CLUSTERS - written) * CLUSTER_BYTES;
            }
        }
        let reserve = if cleaning { 0 } else { CLEANING_RESERVE };
        if self.available() > reserve { SEGMENT_BYTES } else { 0 }
    }

    /// Takes the next `len_bytes` of the log, whole clusters and at most
    /// [`Segments::room_bytes`]; their offset, and a segment to give back.
    pub(crate) fn reserve(&mut self, len_bytes: u64) -> (u64, Option<u32>) {
        let clusters = len_bytes / CLUSTER_BYTES;
        let full = |segment: &Segment| u64::from(segment.written) == SEGMENT_CLUSTERS;
        let mut closed = None;
        if self.current.is_none_or(|current| full(&self.segments[current as usize])) {
            closed = self.close();
            self.current = Some(self.open());
        }
        let current = self.current.expect("a segment was opened");
        let segment = &mut self.segments[current as usize];
        let first = u64::from(segment.written);
        assert!(first + clusters <= SEGMENT_CLUSTERS, "a write larger than the room offered");
        segment.written += clusters as u8;
        self.written_clusters += clusters;
        (u64::from(current) * SEGMENT_BYTES + first * CLUSTER_BYTES, closed)
    }

    /// Whether so many segments were begun since victims were last chosen that it is
    /// time to look for those that are nearly empty.
    pub(crate) fn has_begun_many(&self) -> bool {
        self.begun >= BEGUN.max(self.segments.len() / BEGUN_PART)
    }

    fn open(&mut self) -> u32 {
        self.begun += 1;
        // What has blocks first, then untouched space, then the segment that has been
        // free longest, so that one bad spot of a device is not tried again and again.
        if let Some((index, clusters)) = self.emptied.pop_front() {
            self.emptied_clusters -= u64::from(clusters);
            return index;
        }
        if self.segments.len() < self.max_segments {
            self.segments.push(Segment::default());
            return self.segments.len() as u32 - 1;
        }
        self.free.pop_front().expect("the caller asked for room first")
    }

    /// Ends the segment being filled; a segment to give back if nothing in it
    /// lives.
    pub(crate) fn close(&mut self) -> Option<u32> {
        let current = self.current.take()?;
        (self.segments[current as usize].live_units == 0).then_some(current)
    }

    /// An object lives at `offset` now.
    pub(crate) fn add(&mut self, offset: u64, len: usize) {
        self.segments[segment_of(offset) as usize].live_units += units(len);
    }

    /// It does not any more. A segment to give back, if that was its last.
    #[must_use]
    pub(crate) fn remove(&mut self, offset: u64, len: usize) -> Option<u32> {
        let index = segment_of(offset);
        let segment = &mut self.segments[index as usize];
        segment.live_units = segment
            .live_units
            .checked_sub(units(len))
            .expect("a segment holds what is removed from it");
        (segment.live_units == 0 && self.current != Some(index)).then_some(index)
    }

    /// Whether one that has become empty should keep its blocks: then it has them
    /// now, and is free.
    pub(crate) fn keep_blocks(&mut self, index: u32) -> bool {
        let most = MOST_EMPTIED.min(self.max_segments / EMPTIED_PART);
        if self.emptied.len() >= most {
            return false;
        }
        let segment = &mut self.segments[index as usize];
        self.written_clusters -= u64::from(segment.written);
        self.emptied_clusters += u64::from(segment.written);
        self.emptied.push_back((index, segment.written));
        *segment = Segment::default();
        true
    }

    /// The segment's space was given back (or the device cannot; it is ours to
    /// use again either way).
    pub(crate) fn given_back(&mut self, index: u32) {
        let segment = &mut self.segments[index as usize];
        self.written_clusters -= u64::from(segment.written);
        *segment = Segment::default();
        self.free.push_back(index);
    }

    /// When little room is left, picks segments that live objects fill the
    /// least, as many as fit into the room that is left. Calls `chosen` for
    /// each. Where cleaning waits for `no_device`, those that are nearly empty are
    /// picked before, too.
    pub(crate) fn choose_victims(&mut self, no_device: bool, mut chosen: impl FnMut(u32)) {
        let is_short = self.available() * 8 <= self.max_segments;
        let may_look = no_device && self.has_begun_many();
        if !is_short && !may_look {
            return;
        }
        self.begun = 0;
        let most_live = if is_short { u32::MAX } else { SEGMENT_UNITS / SPARSE_PART };
        let mut sparse: Vec<(u32, u32)> = Vec::new();
        for (index, segment) in self.segments.iter().enumerate() {
            let index = index as u32;
            let live = 1..=most_live;
            let is_closed = self.current != Some(index) && !segment.victim;
            if live.contains(&segment.live_units) && is_closed {
                sparse.push((segment.live_units, index));
            }
        }
        sparse.sort_unstable();
        // Each write is padded to clusters: count a little more than lives.
        let mut room = (self.available() as u64).saturating_sub(1) * u64::from(SEGMENT_UNITS);
        for (live, index) in sparse {
            let cost = u64::from(live) + u64::from(SEGMENT_UNITS) / 16;
            if live > SEGMENT_UNITS / 8 * 7 || cost > room {
                break;
            }
            room -= cost;
            self.segments[index as usize].victim = true;
            chosen(index);
        }
    }

    /// Ends the cleaning of a segment that could not be emptied.
    pub(crate) fn pardon(&mut self, index: u32) {
        self.segments[index as usize].victim = false;
    }

    /// Recovery: an object that the table says lives here. False when it
    /// cannot.
    pub(crate) fn claim(&mut self, offset: u64, len: usize) -> bool {
        let index = segment_of(offset);
        if index as usize >= self.max_segments
            || offset % SEGMENT_BYTES + len as u64 > SEGMENT_BYTES
        {
            return false;
        }
        while self.segments.len() <= index as usize {
            self.segments.push(Segment::default());
        }
        self.segments[index as usize].live_units += units(len);
        true
    }

    /// Recovery, after the last claim. `unused` is told every segment in which
    /// nothing lives.
    pub(crate) fn finish_claims(&mut self, mut unused: impl FnMut(u32)) {
        for (index, segment) in self.segments.iter_mut().enumerate() {
            if segment.live_units == 0 {
                unused(index as u32);
                self.free.push_back(index as u32);
            } else {
                // How far it was written is forgotten; it is closed.
                segment.written = SEGMENT_CLUSTERS as u8;
                self.written_clusters += SEGMENT_CLUSTERS;
            }
        }
    }

    /// First byte behind the last segment ever used.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.segments.len() as u64 * SEGMENT_BYTES
    }
}

fn units(len: usize) -> u32 {
    len.div_ceil(UNIT_BYTES as usize) as u32
}

/// The segment that an offset lies in.
pub(crate) fn segment_of(offset: u64) -> u32 {
    (offset / SEGMENT_BYTES) as u32
}
