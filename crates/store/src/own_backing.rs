//! DRAM that ends with the process, in huge pages: for a store that nobody takes over,
//! and whose memory is to be given back at once.
//!
//! A huge page goes back when nothing in it is in use. What is freed in one that is in
//! use is taken again before the store asks for more.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, PoisonError};

use strata_sys::{HUGE_BYTES, PrivateMemory};

use crate::backing::{Backing, Waiting};

/// What is known to be in use: a bit for each of these in a huge page.
const GRAIN_BYTES: u64 = HUGE_BYTES / u32::BITS as u64;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct OwnBacking {
    memory: PrivateMemory,
    /// Of each huge page, which grains were written to since they were punched.
    used: Vec<AtomicU32>,
    held: AtomicU64,
    /// A huge page comes into use, or goes.
    changes: Mutex<()>,
}

impl OwnBacking {
    /// One that can grow to `capacity_bytes`.
    ///
    /// # Errors
    /// `Unsupported`: the kernel gives no huge pages; or there is no address space.
    pub(crate) fn create(capacity_bytes: u64) -> io::Result<Self> {
        let memory = PrivateMemory::create(capacity_bytes)?;
        let pages = memory.len_bytes() / HUGE_BYTES;
        let used = (0..pages).map(|_| AtomicU32::new(0)).collect();
        Ok(Self { memory, used, held: AtomicU64::new(0), changes: Mutex::new(()) })
    }

    /// Of each huge page that the range touches: its number, and the grains of it in
    /// the range, whole ones only or all.
    fn grains(offset: u64, len_bytes: u64, whole: bool) -> impl Iterator<Item = (usize, u32)> {
        let end = offset + len_bytes;
        let (first, last) = if whole {
            (offset.div_ceil(GRAIN_BYTES), end / GRAIN_BYTES)
        } else {
            (offset / GRAIN_BYTES, end.div_ceil(GRAIN_BYTES))
        };
        let bits = u64::from(u32::BITS);
        (first / bits..last.div_ceil(bits)).filter_map(move |page| {
            let from = first.max(page * bits) - page * bits;
            let to = last.min((page + 1) * bits).checked_sub(page * bits)?;
            let below = |bit: u64| (1u64 << bit) - 1;
            (from < to).then(|| (page as usize, (below(to) & !below(from)) as u32))
        })
    }

    /// Marks grains as used before they are written to. While one is, its huge page
    /// stays.
    fn mark(&self, page: usize, grains: u32) {
        if self.used[page].load(Relaxed) & grains == grains {
            return;
        }
        let _change = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        if self.used[page].fetch_or(grains, Relaxed) == 0 {
            self.held.fetch_add(HUGE_BYTES, Relaxed);
        }
    }

    /// The reverse; gives the huge page back if nothing else in it is used.
    fn unmark(&self, page: usize, grains: u32) -> io::Result<()> {
        let _change = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.used[page].load(Relaxed);
        if before != 0 && before & !grains == 0 {
            self.memory.give_back(page as u64 * HUGE_BYTES)?;
            self.held.fetch_sub(HUGE_BYTES, Relaxed);
        }
        self.used[page].store(before & !grains, Relaxed);
        Ok(())
    }
}

impl Backing for OwnBacking {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.memory.read(offset, out);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        for (page, grains) in Self::grains(offset, bytes.len() as u64, false) {
            self.mark(page, grains);
        }
        self.memory.write(offset, bytes);
        Ok(())
    }

    fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let mut grains = Self::grains(offset, len_bytes, true);
        grains.try_for_each(|(page, grains)| self.unmark(page, grains))
    }

    fn capacity_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn waiting(&self) -> Waiting {
        Waiting::Never
    }

    fn held_bytes(&self) -> Option<u64> {
        Some(self.held.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backing() -> Option<OwnBacking> {
        match OwnBacking::create(16 << 20) {
            Ok(backing) => Some(backing),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}");
                println!("skipped: this kernel gives no huge pages");
                None
            }
        }
    }

    #[test]
    fn grains_of_ranges() {
        let all = |offset, len, whole| OwnBacking::grains(offset, len, whole).collect::<Vec<_>>();
        let (grain, huge) = (GRAIN_BYTES, HUGE_BYTES);
        assert_eq!(all(0, 1, false), [(0, 1)]);
        assert_eq!(all(grain - 1, 2, false), [(0, 3)]);
        assert_eq!(all(huge - 1, 2, false), [(0, 1 << 31), (1, 1)]);
        assert_eq!(all(0, huge, true), [(0, u32::MAX)]);
        assert_eq!(all(huge, 2 * huge, true), [(1, u32::MAX), (2, u32::MAX)]);
        assert_eq!(all(1, grain, true), []);
        assert_eq!(all(1, 2 * grain, true), [(0, 2)]);
        assert_eq!(all(5 * grain, 0, true), []);
        assert_eq!(all(5 * grain, 0, false), []);
    }

    #[test]
    fn a_huge_page_goes_when_the_last_of_it_is_punched() {
        let Some(backing) = backing() else { return };
        let held = || backing.held_bytes().expect("it counts");
        let byte = |offset| {
            let mut out = [9];
            backing.read_at(offset, &mut out).expect("memory");
            out[0]
        };
        assert_eq!(held(), 0);
        let slab = 4 * GRAIN_BYTES;
        for n in 0..12 {
            backing.write_at(n * slab, &[n as u8 + 1; 5000]).expect("memory");
        }
        assert_eq!(held(), 2 * HUGE_BYTES);
        for n in 1..8 {
            backing.punch(n * slab, slab).expect("punched");
            assert_eq!((held(), byte(0)), (2 * HUGE_BYTES, 1));
        }
        // A part of a grain is kept with it.
        backing.punch(1000, slab - 1000).expect("punched");
        assert_eq!((held(), byte(0)), (2 * HUGE_BYTES, 1));
        backing.punch(0, slab).expect("punched");
        assert_eq!((held(), byte(0), byte(8 * slab)), (HUGE_BYTES, 0, 9));
        // Once more is nothing.
        backing.punch(0, HUGE_BYTES).expect("punched");
        assert_eq!(held(), HUGE_BYTES);
        backing.write_at(slab, &[3]).expect("memory");
        assert_eq!((held(), byte(slab)), (2 * HUGE_BYTES, 3));
    }

    #[test]
    fn what_one_thread_writes_no_other_s_punch_takes() {
        let Some(backing) = backing() else { return };
        let work = |grain: u64| {
            let at = grain * GRAIN_BYTES;
            for round in 0..20_000u32 {
                backing.write_at(at, &round.to_ne_bytes()).expect("memory");
                let mut out = [0; 4];
                backing.read_at(at, &mut out).expect("memory");
                assert_eq!(u32::from_ne_bytes(out), round, "grain {grain}");
                backing.punch(at, GRAIN_BYTES).expect("punched");
            }
        };
        std::thread::scope(|scope| {
            (0..4).for_each(|grain| {
                scope.spawn(move || work(grain));
            });
        });
        assert_eq!(backing.held_bytes(), Some(0));
    }
}
