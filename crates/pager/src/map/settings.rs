//! What a program has set for ranges of its memory: never to leave, to leave
//! early for a tier, to be read in order. Held for each space under its gate, and
//! in a memory file that outlives the worker: a pin does not vanish with it.
//!
//! Which pages that concerns is looked up; nothing is noted in the page map.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};

use strata_sys::{Range, SharedMemory, adopt_fd};
use strata_units::SpaceId;

use crate::map::lock;
use crate::map::registry::{Registry, SPACES};

/// Most ranges with a setting in one space: what a fault may have to look
/// through, and what a hostile program can make the daemon keep.
pub const MOST_SETTINGS: usize = 512;
/// A range in the file: first byte; end and setting.
const RECORD_BYTES: u64 = 16;
const BANK_BYTES: u64 = MOST_SETTINGS as u64 * RECORD_BYTES;
/// Two banks: one is written while the other holds.
const SPACE_BYTES: u64 = 2 * BANK_BYTES;

/// What is set for a range. The number is that in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Setting {
    /// Never evicted.
    Pinned = 1,
    /// Read in order.
    Sequential = 2,
    /// Evicted early, and packed densely.
    Compressed = 3,
    /// Evicted early, to the file tier.
    File = 4,
    /// Moved to the node early, and not back.
    Node = 5,
}

impl Setting {
    /// The setting of a number.
    #[must_use]
    pub const fn of(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Pinned),
            2 => Some(Self::Sequential),
            3 => Some(Self::Compressed),
            4 => Some(Self::File),
            5 => Some(Self::Node),
            _ => None,
        }
    }

    /// Whether its pages leave without anybody needing their DRAM.
    pub(crate) const fn leaves_early(self) -> bool {
        matches!(self, Self::Compressed | Self::File | Self::Node)
    }
}

/// The settings of one space: ranges in order, apart from each other. Ends are
/// whole pages.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Settings {
    ranges: Vec<(Range, Setting)>,
}

impl Settings {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(crate) fn fits(&self) -> bool {
        self.ranges.len() <= MOST_SETTINGS
    }

    pub(crate) fn ranges(&self) -> &[(Range, Setting)] {
        &self.ranges
    }

    /// What is set at `address`.
    pub(crate) fn at(&self, address: u64) -> Option<Setting> {
        let at = self.ranges.partition_point(|(range, _)| range.end <= address);
        self.ranges.get(at).filter(|(range, _)| range.contains(address)).map(|&(_, set)| set)
    }

    /// Of `setting`, in bytes.
    pub(crate) fn bytes_of(&self, setting: Setting) -> u64 {
        self.ranges.iter().filter(|(_, set)| *set == setting).map(|(range, _)| range.len()).sum()
    }

    /// Sets `range`, whatever was set there before.
    pub(crate) fn set(&mut self, range: Range, setting: Setting) {
        self.clear(range, |_| true);
        let at = self.ranges.partition_point(|(known, _)| known.start < range.start);
        self.ranges.insert(at, (range, setting));
        self.merge();
    }

    /// Takes back what is set in `range` and `which` says.
    pub(crate) fn clear(&mut self, range: Range, which: impl Fn(Setting) -> bool) {
        let mut kept = Vec::with_capacity(self.ranges.len() + 1);
        for (known, setting) in self.ranges.drain(..) {
            if known.end <= range.start || range.end <= known.start || !which(setting) {
                kept.push((known, setting));
                continue;
            }
            let before = Range { start: known.start, end: range.start };
            let after = Range { start: range.end, end: known.end };
            kept.extend(
                [before, after]
                    .into_iter()
                    .filter(|part| part.start < part.end)
                    .map(|part| (part, setting)),
            );
        }
        self.ranges = kept;
    }

    /// `mremap` moved `source` to `to`. Done twice, the second time changes
    /// nothing.
    pub(crate) fn moved(&mut self, source: Range, to: u64) {
        let within = |&(known, setting): &(Range, Setting)| {
            let part =
                Range { start: known.start.max(source.start), end: known.end.min(source.end) };
            (part.start < part.end).then_some((part, setting))
        };
        let parts: Vec<(Range, Setting)> = self.ranges.iter().filter_map(within).collect();
        if parts.is_empty() {
            return;
        }
        self.clear(source, |_| true);
        for (part, setting) in parts {
            let place = |address: u64| address - source.start + to;
            self.set(Range { start: place(part.start), end: place(part.end) }, setting);
        }
    }

    /// Neighbours with the same setting become one.
    fn merge(&mut self) {
        let mut merged: Vec<(Range, Setting)> = Vec::with_capacity(self.ranges.len());
        for (range, setting) in self.ranges.drain(..) {
            match merged.last_mut() {
                Some((last, same)) if last.end == range.start && *same == setting => {
                    last.end = range.end;
                }
                _ => merged.push((range, setting)),
            }
        }
        self.ranges = merged;
    }
}

/// The memory file with the settings of all spaces; made when the first is set.
#[derive(Debug, Default)]
pub(crate) struct SettingsFile {
    memory: OnceLock<SharedMemory>,
    /// One takes the descriptor over.
    opening: Mutex<()>,
}

impl SettingsFile {
    fn bank_at(space: SpaceId, bank: u32) -> u64 {
        u64::from(space.0) * SPACE_BYTES + u64::from(bank) * BANK_BYTES
    }

    /// The file; none: there is none, and it cannot be made.
    fn open(&self, registry: &Registry) -> io::Result<&SharedMemory> {
        let _alone = lock(&self.opening);
        if let Some(memory) = self.memory.get() {
            return Ok(memory);
        }
        let memory = match registry.settings_fd().and_then(adopt_fd) {
            Some(fd) => SharedMemory::from_fd(fd)?,
            None => SharedMemory::create("strata-settings", u64::from(SPACES) * SPACE_BYTES)?,
        };
        let memory = self.memory.get_or_init(|| memory);
        registry.set_settings_fd(memory.as_fd().as_raw_fd());
        Ok(memory)
    }
}

impl Registry {
    /// Keeps the settings of a space, whole or not at all. The caller holds its
    /// gate.
    pub(crate) fn keep_settings(&self, space: SpaceId, settings: &Settings) -> io::Result<()> {
        assert!(settings.fits(), "whoever adds to them looks");
        let word = self.settings_word(space);
        if settings.is_empty() {
            word.store(0, Ordering::Release);
            return Ok(());
        }
        let bank = 1 - (word.load(Ordering::Acquire) & 1);
        let memory = self.settings.open(self)?;
        for (index, &(range, setting)) in settings.ranges().iter().enumerate() {
            let at = SettingsFile::bank_at(space, bank) + index as u64 * RECORD_BYTES;
            memory.atomic_u64(at).store(range.start, Ordering::Relaxed);
            memory.atomic_u64(at + 8).store(range.end | setting as u64, Ordering::Relaxed);
        }
        word.store((settings.ranges().len() as u32) << 1 | bank, Ordering::Release);
        Ok(())
    }

    /// What an earlier worker kept for a space.
    pub(crate) fn kept_settings(&self, space: SpaceId) -> Settings {
        let word = self.settings_word(space).load(Ordering::Acquire);
        let (count, bank) = ((word >> 1) as usize, word & 1);
        let mut settings = Settings::default();
        if count == 0 {
            return settings;
        }
        let Ok(memory) = self.settings.open(self) else { return settings };
        for index in 0..count.min(MOST_SETTINGS) {
            let at = SettingsFile::bank_at(space, bank) + index as u64 * RECORD_BYTES;
            let start = memory.atomic_u64(at).load(Ordering::Relaxed);
            let end = memory.atomic_u64(at + 8).load(Ordering::Relaxed);
            let range = Range { start, end: end & !0xfff };
            if let Some(setting) = Setting::of(end & 0xfff).filter(|_| start < range.end) {
                settings.ranges.push((range, setting));
            }
        }
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    fn r(start: u64, end: u64) -> Range {
        Range { start: start << 12, end: end << 12 }
    }

    fn settings(parts: &[(u64, u64, Setting)]) -> Settings {
        let ranges = parts.iter().map(|&(start, end, set)| (r(start, end), set)).collect();
        Settings { ranges }
    }

    use Setting::{Compressed, File, Pinned, Sequential};

    #[test]
    fn the_last_setting_of_a_page_holds() {
        let mut one = Settings::default();
        one.set(r(10, 20), Pinned);
        one.set(r(30, 40), File);
        one.set(r(20, 30), Pinned);
        assert_eq!(one, settings(&[(10, 30, Pinned), (30, 40, File)]));
        one.set(r(15, 35), Sequential);
        assert_eq!(one, settings(&[(10, 15, Pinned), (15, 35, Sequential), (35, 40, File)]));
        assert_eq!(one.at(14 << 12), Some(Pinned));
        assert_eq!((one.at(15 << 12), one.at(40 << 12)), (Some(Sequential), None));
        assert_eq!(one.bytes_of(Pinned), 5 << 12);
        one.clear(r(0, 12), |set| set == File);
        assert_eq!(one.bytes_of(Pinned), 5 << 12, "only what is asked for");
        one.clear(r(11, 12), |set| set == Pinned);
        assert_eq!(one.bytes_of(Pinned), 4 << 12);
        one.clear(r(0, 100), |_| true);
        assert!(one.is_empty());
    }

    #[test]
    fn settings_move_with_their_memory_once() {
        let mut one = settings(&[(10, 20, Pinned), (20, 30, Compressed)]);
        for _ in 0..2 {
            one.moved(r(15, 25), 115 << 12);
            assert_eq!(
                one,
                settings(&[
                    (10, 15, Pinned),
                    (25, 30, Compressed),
                    (115, 120, Pinned),
                    (120, 125, Compressed)
                ])
            );
        }
    }

    #[test]
    fn every_page_agrees_with_a_plain_table() {
        let mut one = Settings::default();
        let mut table = [None; 64];
        let mut numbers = numbers(3);
        let mut next = |below: u64| (numbers.next().expect("endless") >> 33) % below;
        for _ in 0..5000 {
            let start = next(60);
            let end = start + 1 + next(63 - start);
            let setting = Setting::of(next(5));
            match setting {
                Some(setting) => one.set(r(start, end), setting),
                None => one.clear(r(start, end), |_| true),
            }
            table[start as usize..end as usize].fill(setting);
            for (page, &expected) in table.iter().enumerate() {
                assert_eq!(one.at((page as u64) << 12), expected, "page {page}");
            }
            assert!(one.ranges.windows(2).all(|pair| pair[0].0.end <= pair[1].0.start));
        }
    }

    #[test]
    fn another_worker_finds_them() {
        let registry = Registry::create().expect("a registry");
        let space = SpaceId(7);
        assert!(registry.kept_settings(space).is_empty());
        let mut one = Settings::default();
        for n in 0..MOST_SETTINGS as u64 {
            one.set(r(n * 2 + 1, n * 2 + 2), if n % 2 == 0 { Pinned } else { File });
            registry.keep_settings(space, &one).expect("memory");
            assert_eq!(registry.kept_settings(space), one);
        }
        assert!(one.fits());
        assert!(registry.kept_settings(SpaceId(8)).is_empty());
        registry.keep_settings(space, &Settings::default()).expect("nothing");
        assert!(registry.kept_settings(space).is_empty());
    }
}
